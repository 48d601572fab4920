"""Defines what the user may hand to ``distributed_optimizer(strategy=…)``, and the one value that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.base import checks
from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.plan.config import DistributeTranspilerConfig
from fleet.plan.dispatch import name_of
from fleet.plan.specs import ALL_REDUCE, DENSE, MOST_PROCESSES, SERVERS, WIRE_DTYPES
from fleet.strategy.collective import DistributedStrategy

#: An update that no job comes to.
_NEVER = (1 << 63) - 1
#: What delay compensation reckons with has to be a number of 32 bits.
_STRONGEST = 1e38


@dataclass(frozen=True)
class Strategy:
    """Says how a parameter-server job computes. ``mode`` is a name in ``fleet.ps.consistency.MODES``."""

    mode: str = "sync"
    slice_var_up: bool = True
    split_method: str = "RoundRobin"
    min_block_size: int = 8192
    wait_port: bool = True
    print_log: bool = False
    check_finite: bool = False
    #: What gradients travel in, a name in ``WIRE_DTYPES``; None is the element type of their parameter.
    wire_dtype: str | None = None
    #: sync: whether the job ends when a worker is given up on, instead of going on without it.
    needs_all_workers: bool = False
    #: ssp: how many steps a worker may be ahead of the slowest; gba: how many updates late a gradient may be.
    staleness: int = 0
    #: gba: how many gradients make one update; 0 is the number of workers.
    gradients: int = 0
    #: geo: after how many steps a worker tells the others how far it has come.
    update_frequency: int = 1
    #: async and half_async: strength of delay compensation (DC-ASGD), 0 for none; whether in its adaptive variant.
    dc_lambda: float = 0.0
    dc_adaptive: bool = False
    #: auto: before which updates it changes between synchronous training and GBA, if it is not to find out itself.
    changes: tuple[int, ...] = ()
    #: sync, gba and auto: by what norm the averaged gradient is clipped, 0 for none.
    max_grad_norm: float = 0.0
    #: async, half_async and gba: whether workers may join beyond those that the job began with.
    elastic: bool = False
    #: async and half_async: settings of ``CommunicatorSettings`` that win over those of the environment.
    communicator: tuple[tuple[str, int | bool], ...] = ()
    #: Where dense parameters are trained, a name in ``DENSE``.
    dense: str = "servers"
    #: What the environment might say as well, by the names of its variables.
    settings: tuple[tuple[str, str], ...] = ()

    def with_settings(
        self,
        *,
        durable_dir: str | None = None,
        durable_sync: str | None = None,
        durable_keep: str | None = None,
        table_memory_mb: int | None = None,
        table_dir: str | None = None,
        evict_every: int | None = None,
        auth_token_file: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        tls_server_name: str | None = None,
    ) -> Strategy:
        """Return this strategy with settings that the environment could also give: where servers keep what they
        acknowledge, how much memory their rows may take and when they leave tables, and who is let in. Each argument
        stands for the variable ``FLEET_…`` of its name, in the process that runs the script; if that variable is set
        as well, it has to say the same.

        Examples:
            >>> strategy = fleet.StrategyFactory.create_sync_strategy().with_settings(durable_dir="/var/tmp/fleet")
            >>> strategy.settings
            (('FLEET_DURABLE_DIR', '/var/tmp/fleet'),)
        """
        given = {
            "durable_dir": durable_dir,
            "durable_sync": durable_sync,
            "durable_keep": durable_keep,
            "table_memory_mb": table_memory_mb,
            "table_dir": table_dir,
            "evict_every": None if evict_every is None else str(checks.whole("evict_every", evict_every, 1)),
            "auth_token_file": auth_token_file,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "tls_ca": tls_ca,
            "tls_server_name": tls_server_name,
        }
        said = {f"FLEET_{name.upper()}": _text(name, value) for name, value in given.items() if value is not None}
        return replace(self, settings=tuple({**dict(self.settings), **said}.items()))


class StrategyFactory:
    """Makes strategies by name, as the source system's factory does. A strategy's ``with_settings(durable_dir=…)``
    returns the same strategy with settings of the environment: where servers keep what they acknowledge, and the paths
    of certificates and of the token.

    Examples:
        >>> geo = fleet.StrategyFactory.create_geo_strategy(update_frequency=20)
        >>> geo.mode, geo.update_frequency
        ('geo', 20)
    """

    @staticmethod
    def create_sync_strategy(
        *,
        check_finite: bool = False,
        wire_dtype: str | None = None,
        needs_all_workers: bool = False,
        dense: str = "servers",
        max_grad_norm: float | None = None,
    ) -> Strategy:
        """Return a strategy by which all workers step together. ``check_finite`` names a parameter whose gradient is
        NaN or infinite; ``wire_dtype`` sends gradients as "bf16", "fp16" or "int8". With ``needs_all_workers`` the job
        ends when a worker is given up on; without it the others go on. With ``dense="all_reduce"`` dense parameters
        stay on the workers, which average their gradients among themselves, and only rows travel to the servers.
        ``max_grad_norm`` clips the averaged gradient, of parameters and rows together, as
        ``torch.nn.utils.clip_grad_norm_`` does in one process.

        Examples:
            >>> strategy = fleet.StrategyFactory.create_sync_strategy(check_finite=True)
            >>> strategy.mode, strategy.check_finite
            ('sync', True)
        """
        return Strategy(
            check_finite=checks.switch("check_finite", check_finite),
            wire_dtype=_wire_dtype(wire_dtype),
            needs_all_workers=checks.switch("needs_all_workers", needs_all_workers),
            dense=_dense(dense),
            max_grad_norm=_max_grad_norm(max_grad_norm),
        )

    @staticmethod
    def create_async_strategy(
        *,
        max_merge_var_num: int | None = None,
        send_queue_size: int | None = None,
        min_send_grad_num_before_recv: int | None = None,
        independent_recv_thread: bool | None = None,
        send_wait_times: int | None = None,
        thread_pool_size: int | None = None,
        is_sgd_optimizer: bool | None = None,
        dc_asgd_lambda: float = 0.0,
        dc_asgd_adaptive: bool = False,
        check_finite: bool = False,
        elastic: bool = False,
        wire_dtype: str | None = None,
        dense: str = "servers",
    ) -> Strategy:
        """Return a strategy by which gradients leave and parameters arrive in the background, and no worker waits for
        another. An argument that is None takes the value of the ``FLAGS_communicator_*`` variable of its name, or its
        default. ``dc_asgd_lambda`` above zero compensates for the delay of gradients. With ``elastic`` workers may join
        the running job, and leave. ``dense="all_reduce"`` is as in ``create_sync_strategy``: the workers then meet once
        a step, and only rows go their own way.

        Examples:
            >>> strategy = fleet.StrategyFactory.create_async_strategy(send_queue_size=1)
            >>> strategy.mode, strategy.communicator
            ('async', (('send_queue_size', 1),))
        """
        given = {
            "max_merge_var_num": checks.whole_or_none("max_merge_var_num", max_merge_var_num, 1),
            "send_queue_size": checks.whole_or_none("send_queue_size", send_queue_size, 1),
            "min_send_grad_num_before_recv": checks.whole_or_none(
                "min_send_grad_num_before_recv", min_send_grad_num_before_recv, 1
            ),
            "independent_recv_thread": checks.switch_or_none("independent_recv_thread", independent_recv_thread),
            "send_wait_times": checks.whole_or_none("send_wait_times", send_wait_times, 0),
            "thread_pool_size": checks.whole_or_none("thread_pool_size", thread_pool_size, 1),
            "is_sgd_optimizer": checks.switch_or_none("is_sgd_optimizer", is_sgd_optimizer),
        }
        strength = _strength(dc_asgd_lambda, dc_asgd_adaptive)
        return Strategy(
            "async",
            check_finite=checks.switch("check_finite", check_finite),
            wire_dtype=_wire_dtype(wire_dtype),
            communicator=_said(given),
            dc_lambda=strength,
            dc_adaptive=dc_asgd_adaptive,
            elastic=checks.switch("elastic", elastic),
            dense=_dense(dense, strength),
        )

    @staticmethod
    def create_half_async_strategy(
        *,
        max_merge_var_num: int | None = None,
        is_sgd_optimizer: bool | None = None,
        dc_asgd_lambda: float = 0.0,
        dc_asgd_adaptive: bool = False,
        check_finite: bool = False,
        elastic: bool = False,
        wire_dtype: str | None = None,
        dense: str = "servers",
    ) -> Strategy:
        """Return a strategy by which each worker merges ``max_merge_var_num`` steps, sends once and waits for no other
        worker. With ``elastic`` workers may join the running job, and leave. ``dense="all_reduce"`` is as in
        ``create_async_strategy``.

        Examples:
            >>> strategy = fleet.StrategyFactory.create_half_async_strategy(max_merge_var_num=4)
            >>> strategy.mode, strategy.communicator
            ('half_async', (('max_merge_var_num', 4),))
        """
        given = {
            "max_merge_var_num": checks.whole_or_none("max_merge_var_num", max_merge_var_num, 1),
            "is_sgd_optimizer": checks.switch_or_none("is_sgd_optimizer", is_sgd_optimizer),
        }
        strength = _strength(dc_asgd_lambda, dc_asgd_adaptive)
        return Strategy(
            "half_async",
            check_finite=checks.switch("check_finite", check_finite),
            wire_dtype=_wire_dtype(wire_dtype),
            communicator=_said(given),
            dc_lambda=strength,
            dc_adaptive=dc_asgd_adaptive,
            elastic=checks.switch("elastic", elastic),
            dense=_dense(dense, strength),
        )

    @staticmethod
    def create_geo_strategy(
        update_frequency: int = 100, *, check_finite: bool = False, wire_dtype: str | None = None
    ) -> Strategy:
        """Return a strategy by which each worker trains on its own, and every ``update_frequency`` steps sends the
        others what has changed.

        Examples:
            >>> strategy = fleet.StrategyFactory.create_geo_strategy(20)
            >>> strategy.mode, strategy.update_frequency
            ('geo', 20)
        """
        checks.whole("update_frequency", update_frequency, 1)
        return Strategy(
            "geo",
            update_frequency=update_frequency,
            check_finite=checks.switch("check_finite", check_finite),
            wire_dtype=_wire_dtype(wire_dtype),
        )

    @staticmethod
    def create_ssp_strategy(
        staleness: int = 4, *, check_finite: bool = False, wire_dtype: str | None = None, dense: str = "servers"
    ) -> Strategy:
        """Return a strategy by which gradients are applied as they arrive, and a worker may be ``staleness`` steps
        ahead of the slowest, no more. ``dense="all_reduce"`` is as in ``create_async_strategy``.

        Examples:
            >>> strategy = fleet.StrategyFactory.create_ssp_strategy(staleness=2)
            >>> strategy.mode, strategy.staleness
            ('ssp', 2)
        """
        checks.whole("staleness", staleness, 0)
        return Strategy(
            "ssp",
            staleness=staleness,
            check_finite=checks.switch("check_finite", check_finite),
            wire_dtype=_wire_dtype(wire_dtype),
            dense=_dense(dense),
        )

    @staticmethod
    def create_gba_strategy(
        gradients: int | None = None,
        staleness: int = 4,
        *,
        check_finite: bool = False,
        elastic: bool = False,
        wire_dtype: str | None = None,
        dense: str = "servers",
        max_grad_norm: float | None = None,
    ) -> Strategy:
        """Return a strategy by which ``gradients`` gradients make one update, whichever workers they come from, and no
        worker waits for another. The number is that of the workers unless given, so an update stands for the batch of
        synchronous training and its learning rate holds. A gradient on values that are more than ``staleness`` updates
        old is dropped, and counted. With ``elastic`` workers may join the running job, and leave; the number of
        gradients stays. ``max_grad_norm`` is as in ``create_sync_strategy``.

        Examples:
            >>> strategy = fleet.StrategyFactory.create_gba_strategy(gradients=8)
            >>> strategy.mode, strategy.gradients, strategy.staleness
            ('gba', 8, 4)
        """
        return Strategy(
            "gba",
            gradients=_gradients(gradients),
            staleness=checks.whole("staleness", staleness, 0),
            check_finite=checks.switch("check_finite", check_finite),
            elastic=checks.switch("elastic", elastic),
            wire_dtype=_wire_dtype(wire_dtype),
            dense=_on_servers(dense, "GBA"),
            max_grad_norm=_max_grad_norm(max_grad_norm),
        )

    @staticmethod
    def create_auto_strategy(
        *,
        staleness: int = 4,
        changes: Sequence[int] | None = None,
        check_finite: bool = False,
        wire_dtype: str | None = None,
        dense: str = "servers",
        max_grad_norm: float | None = None,
    ) -> Strategy:
        """Return a strategy that is synchronous while that costs next to nothing, and GBA while workers would gain 3 %
        or more by not waiting for each other. The job measures that, says in its log when it changes and why, and does
        so four times an hour at most. Both make an update of as many gradients, so the learning rate holds. ``changes``
        are the updates before which an earlier job has changed (``fleet.summary()["changes"]``): this one does so too,
        and at no others; with an empty list it never does.

        Examples:
            >>> fleet.StrategyFactory.create_auto_strategy().mode
            'auto'
        """
        return Strategy(
            "auto",
            staleness=checks.whole("staleness", staleness, 0),
            changes=_changes(changes),
            check_finite=checks.switch("check_finite", check_finite),
            wire_dtype=_wire_dtype(wire_dtype),
            dense=_on_servers(dense, "the auto mode, which is GBA at times,"),
            max_grad_norm=_max_grad_norm(max_grad_norm),
        )


def as_strategy(given: object) -> Strategy:
    """Return None, a ``Strategy`` or a ``DistributeTranspilerConfig`` as a ``Strategy``; refuse anything else with a
    ``TypeError``."""
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
        todo="That is one of collective jobs, and this job has parameter servers: start it without any, as "
        "docs/collective.md shows, or leave the strategy out."
        if isinstance(given, DistributedStrategy)
        else None,
    )


def _from_config(config: DistributeTranspilerConfig) -> Strategy:
    if config.mode != "pserver":
        raise ConfigurationError(
            f"mode={config.mode!r} asks for a collective job, and this one has parameter servers",
            todo="Leave mode at 'pserver', or start the job without servers; docs/doors.md shows every way to.",
        )
    idle = ("nccl_comm_num", "use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks", "collective_mode")
    untouched = DistributeTranspilerConfig()
    set_in_vain = [name for name in idle if getattr(config, name) != getattr(untouched, name)]
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
    if config.geo_sgd_need_push_nums != 100 and not config.geo_sgd_mode:
        raise ConfigurationError("geo_sgd_need_push_nums: nothing to act on without geo_sgd_mode")
    if config.geo_sgd_mode and len(relaxed) > 1:
        (other,) = set(relaxed[:2]) - {"geo_sgd_mode"}
        raise ConfigurationError(
            f"geo_sgd_mode=True and {other}=True exclude each other: GEO workers send no gradients",
            todo=f"Leave {other} unset, or geo_sgd_mode.",
        )
    if config.elastic and (config.sync_mode or config.geo_sgd_mode):
        raise ConfigurationError(
            "elastic=True: "
            + ("in synchronous training" if config.sync_mode else "in GEO")
            + " every step counts on the number of workers that the job began with",
            todo="Set sync_mode = False, without geo_sgd_mode, or leave elastic unset.",
        )
    if config.geo_sgd_mode and config.dense == ALL_REDUCE:
        raise ConfigurationError(
            f"geo_sgd_mode=True and dense={ALL_REDUCE!r} exclude each other: GEO workers train on their own",
            todo="Leave dense at 'servers', or geo_sgd_mode unset.",
        )
    compensation = 1.0 if config.enable_dc_asgd else 0.0
    chosen = [mode for mode, on in (("geo", config.geo_sgd_mode), ("half_async", config.half_async)) if on]
    return Strategy(
        mode="sync" if config.sync_mode else chosen[0] if chosen else "async",
        dc_lambda=compensation,
        update_frequency=config.geo_sgd_need_push_nums if config.geo_sgd_mode else 1,
        slice_var_up=config.slice_var_up,
        split_method=name_of(config.split_method),
        min_block_size=config.min_block_size,
        wait_port=config.wait_port,
        print_log=config.print_log,
        check_finite=config.check_finite,
        elastic=config.elastic,
        wire_dtype=config.wire_dtype,
        dense=_dense(config.dense, compensation),
    )


def _text(name: str, value: object) -> str:
    """Return what a variable of the environment would hold."""
    if name.endswith("_mb") and not isinstance(value, str):
        return str(checks.whole(name, value, 1))
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name} must be a str", got=repr(value))
    if not value.strip():
        raise ConfigurationError(f"{name} is empty", todo="Leave it out where there is nothing to say.")
    return value.strip()


def _wire_dtype(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ArgumentTypeError("wire_dtype must be a str or None", got=repr(value))
    if value not in (None, *WIRE_DTYPES):
        known = ", ".join(map(repr, WIRE_DTYPES))
        raise ConfigurationError("wire_dtype is unknown", expected=f"one of {known}, or None", got=repr(value))
    return value


def _dense(value: object, compensation: float = 0.0) -> str:
    """Return where dense parameters are trained, if that goes with the rest of a strategy."""
    if not isinstance(value, str):
        raise ArgumentTypeError("dense must be a str", got=repr(value))
    if value not in DENSE:
        raise ConfigurationError("dense is unknown", expected=" or ".join(map(repr, DENSE)), got=repr(value))
    if value == ALL_REDUCE and compensation:
        raise ConfigurationError(
            f"delay compensation and dense={ALL_REDUCE!r} exclude each other: what workers average among themselves "
            "has no delay",
            todo="Leave one of the two out.",
        )
    return value


def _gradients(value: object) -> int:
    """Return how many gradients make one update, 0 for as many as there are workers."""
    given = checks.whole_or_none("gradients", value, 1) or 0
    if given > MOST_PROCESSES:
        raise ConfigurationError("gradients is out of range", expected=f"at most {MOST_PROCESSES}", got=given)
    return given


def _changes(value: object) -> tuple[int, ...]:
    """Return the updates before which a job changes."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ArgumentTypeError("changes must be a list of updates", got=repr(value))
    given = tuple(checks.whole("changes", each, 1) for each in value)
    if [*given] != sorted({*given}):
        raise ConfigurationError(
            "changes are not updates in order", expected="numbers, each above the one before", got=value
        )
    return given or (_NEVER,)


def _max_grad_norm(value: object) -> float:
    """Return by what norm to clip, 0 for not at all."""
    return 0.0 if value is None else float(checks.number("max_grad_norm", value, 0, above=True))


def _on_servers(value: object, mode: str) -> str:
    """Return where dense parameters are trained in a mode in which that can only be on the servers."""
    if _dense(value) == ALL_REDUCE:
        raise ConfigurationError(
            f"{mode} and dense={ALL_REDUCE!r} exclude each other: workers that average among themselves wait for the "
            "slowest",
            todo="Leave dense at 'servers', or use create_sync_strategy(dense='all_reduce').",
        )
    return SERVERS


def _strength(strength: object, adaptive: object) -> float:
    """Return lambda; 0 means no compensation."""
    given = checks.number("dc_asgd_lambda", strength, 0, below=_STRONGEST)
    if checks.switch("dc_asgd_adaptive", adaptive) and not given:
        raise ConfigurationError("dc_asgd_adaptive=True: nothing to act on without dc_asgd_lambda", got="0")
    return float(given)


def _said(given: Mapping[str, int | None]) -> tuple[tuple[str, int | bool], ...]:
    return tuple((name, value) for name, value in given.items() if value is not None)
