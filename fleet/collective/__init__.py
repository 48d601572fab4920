"""Collective training: workers that average among themselves, over NCCL or Gloo, and need no server.

This is also the source documents' import point; ``fleet`` (``import fleet`` for collective jobs) is made of the whole
package and looked up when somebody asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet.collective.options import DGC, DistributedStrategy, GradientMerge, LocalSGD, PowerSGD

if TYPE_CHECKING:
    from fleet.facade import collective as fleet

__all__ = ["DGC", "DistributedStrategy", "GradientMerge", "LocalSGD", "PowerSGD", "fleet"]


def __getattr__(name: str) -> Any:
    if name == "fleet":
        from fleet.facade import collective

        return collective
    from fleet.instead import missing

    raise missing(f"module {__name__!r}", name)
