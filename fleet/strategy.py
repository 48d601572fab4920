"""What the user may hand to ``distributed_optimizer(strategy=…)``, and the one value it is turned into."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ArgumentTypeError, ConfigurationError, UnsupportedError
from fleet.transpiler.config import DistributeTranspilerConfig


@dataclass(frozen=True)
class Strategy:
    """How a parameter-server job computes. ``mode`` is a name in ``fleet.ps.consistency.MODES``."""

    mode: str = "sync"
    slice_var_up: bool = True
    split_method: str = "RoundRobin"
    min_block_size: int = 8192
    wait_port: bool = True
    print_log: bool = False
    check_finite: bool = False


class StrategyFactory:
    """Makes strategies by name, as the source system's factory does."""

    @staticmethod
    def create_sync_strategy(*, check_finite: bool = False) -> Strategy:
        """All workers step together. ``check_finite`` names a parameter whose gradient is NaN or infinite."""
        return Strategy(check_finite=check_finite)

    @staticmethod
    def create_async_strategy() -> Strategy:
        raise _not_yet("the asynchronous mode")

    @staticmethod
    def create_half_async_strategy() -> Strategy:
        raise _not_yet("the half-asynchronous mode")

    @staticmethod
    def create_geo_strategy(update_frequency: int = 100) -> Strategy:
        raise _not_yet(f"the GEO mode (update_frequency={update_frequency})")

    @staticmethod
    def create_ssp_strategy(staleness: int = 4) -> Strategy:
        raise _not_yet(f"bounded staleness (staleness={staleness})")


def as_strategy(given: object) -> Strategy:
    """None, a ``Strategy`` or a ``DistributeTranspilerConfig`` as a ``Strategy``; anything else is a ``TypeError``."""
    if given is None:
        return Strategy()
    if isinstance(given, Strategy):
        return given
    if isinstance(given, DistributeTranspilerConfig):
        return _from_config(given)
    raise ArgumentTypeError(
        "strategy is of the wrong type",
        expected="None, a DistributeTranspilerConfig, or what a fleet.StrategyFactory method returns",
        got=type(given).__name__,
    )


def _from_config(config: DistributeTranspilerConfig) -> Strategy:
    if config.mode != "pserver":
        raise UnsupportedError(
            f"mode={config.mode!r} (collective training) is not supported yet",
            todo="Leave mode at 'pserver' and name parameter servers; docs/doors.md shows every way to.",
        )
    idle = {
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
        "collective_mode": None,
    }
    set_in_vain = [name for name, default in idle.items() if getattr(config, name) != default]
    if set_in_vain:
        raise ConfigurationError(
            f"{', '.join(set_in_vain)}: nothing to act on in a parameter-server job",
            todo="Leave it at its default, or choose a collective mode.",
        )
    relaxed = [name for name in ("half_async", "geo_sgd_mode", "enable_dc_asgd") if getattr(config, name)]
    if config.sync_mode and relaxed:
        raise ConfigurationError(
            f"sync_mode=True and {relaxed[0]}=True exclude each other",
            todo=f"Set sync_mode = False, or leave {relaxed[0]} unset.",
        )
    if not config.sync_mode:
        raise _not_yet(f"{relaxed[0]}=True" if relaxed else "sync_mode=False (the asynchronous mode)")
    if config.geo_sgd_need_push_nums != 100:
        raise ConfigurationError("geo_sgd_need_push_nums: nothing to act on without geo_sgd_mode")
    return Strategy(
        slice_var_up=config.slice_var_up,
        split_method=config.split_method,
        min_block_size=config.min_block_size,
        wait_port=config.wait_port,
        print_log=config.print_log,
        check_finite=config.check_finite,
    )


def _not_yet(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what} is not supported yet", todo="Use the synchronous mode, the default.")
