"""Trains without servers: workers average among themselves, over NCCL or Gloo.

This is also the source documents' import point: ``fleet`` is ``import fleet`` for collective jobs.
"""

from __future__ import annotations

from typing import Any

from fleet.base.facade import collective as fleet
from fleet.base.pointers import missing
from fleet.strategy.collective import DGC, DistributedStrategy, GradientMerge, LocalSGD, PowerSGD

__all__ = ["DGC", "DistributedStrategy", "GradientMerge", "LocalSGD", "PowerSGD", "fleet"]


def __getattr__(name: str) -> Any:
    raise missing(f"module {__name__!r}", name)
