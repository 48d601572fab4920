"""Planning: how parameters are cut, where the blocks go, and the configuration that decides it.

The modules in here are pure. This one is also the source documents' import point, and gets what is made of the whole
package (``DistributeTranspiler``, and ``fleet`` for parameter-server jobs) when somebody asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet.transpiler.config import DistributeTranspilerConfig
from fleet.transpiler.dispatch import HashName, RoundRobin
from fleet.transpiler.slicing import slice_variable

if TYPE_CHECKING:
    from fleet.facade import parameter_server as fleet
    from fleet.transpile import DistributeTranspiler

    DistributedTranspiler = DistributeTranspiler

#: As some of the source documents spell it.
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
    if name in ("DistributeTranspiler", "DistributedTranspiler"):
        from fleet.transpile import DistributeTranspiler

        return DistributeTranspiler
    if name == "fleet":
        from fleet.facade import parameter_server

        return parameter_server
    from fleet.instead import missing

    raise missing(f"module {__name__!r}", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
