"""Planning: how parameters are cut, where the blocks go, and the configuration that decides it. Pure."""

from fleet.transpiler.config import DistributeTranspilerConfig
from fleet.transpiler.dispatch import HashName, RoundRobin
from fleet.transpiler.slicing import slice_variable

__all__ = ["DistributeTranspilerConfig", "HashName", "RoundRobin", "slice_variable"]
