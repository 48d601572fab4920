"""Offers what the source documents import: their transpiler, its configuration, and ``fleet`` for parameter-server
jobs."""

from __future__ import annotations

from typing import Any

from fleet.base.facade import parameter_server as fleet
from fleet.base.pointers import missing
from fleet.plan.config import DistributeTranspilerConfig
from fleet.plan.dispatch import HashName, RoundRobin
from fleet.plan.slicing import slice_variable
from fleet.transpiler.program import DistributeTranspiler

#: As some of the source documents spell them.
DistributedTranspiler = DistributeTranspiler
DistributedTranspilerConfig = DistributeTranspilerConfig

__all__ = [
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "DistributedTranspiler",
    "DistributedTranspilerConfig",
    "HashName",
    "RoundRobin",
    "fleet",
    "slice_variable",
]


def __getattr__(name: str) -> Any:
    raise missing(f"module {__name__!r}", name)
