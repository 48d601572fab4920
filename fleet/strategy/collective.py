"""Defines what a collective job may be told: ``DistributedStrategy`` and its options, each checked when it is set.

Nothing here needs torch. Which options exclude each other is one table, ``_EXCLUSIONS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fleet.base import checks
from fleet.base.spelling import unknown_setting
from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.plan.config import DistributeTranspilerConfig


@dataclass(frozen=True)
class LocalSGD:
    """Lets workers train alone and average their parameters: after each of the first ``begin_step`` steps, then after
    every ``k_steps``.

    Examples:
        >>> from fleet.collective import DistributedStrategy, LocalSGD
        >>> DistributedStrategy(local_sgd=LocalSGD(k_steps=4, begin_step=100))
        DistributedStrategy(local_sgd=LocalSGD(k_steps=4, begin_step=100))
    """

    k_steps: int = 1
    begin_step: int = 1

    def __post_init__(self) -> None:
        checks.whole("LocalSGD.k_steps", self.k_steps, 1)
        checks.whole("LocalSGD.begin_step", self.begin_step, 0)


@dataclass(frozen=True)
class GradientMerge:
    """Turns ``k_steps`` calls of ``step`` into one update, on the mean of their gradients; with ``avg=False`` on their
    sum.

    Examples:
        >>> from fleet.collective import DistributedStrategy, GradientMerge
        >>> strategy = DistributedStrategy()
        >>> strategy.gradient_merge = GradientMerge(k_steps=8)
    """

    k_steps: int = 1
    avg: bool = True

    def __post_init__(self) -> None:
        checks.whole("GradientMerge.k_steps", self.k_steps, 1)
        checks.switch("GradientMerge.avg", self.avg)


@dataclass(frozen=True)
class PowerSGD:
    """Sends low-rank gradients (Vogels et al., 2019) by torch's own hook, whose arguments these are; ``start_step`` is
    its ``start_powerSGD_iter``, up to which gradients travel whole.

    Examples:
        >>> from fleet.collective import DistributedStrategy, PowerSGD
        >>> DistributedStrategy(power_sgd=PowerSGD(rank=4)).power_sgd.start_step
        1000
    """

    rank: int = 1
    start_step: int = 1000
    min_compression_rate: float = 2.0
    use_error_feedback: bool = True
    warm_start: bool = True

    def __post_init__(self) -> None:
        checks.whole("PowerSGD.rank", self.rank, 1)
        # Buckets are rebuilt after the first step, and what the hook remembers of them must not change its shape.
        checks.whole("PowerSGD.start_step", self.start_step, 2)
        checks.number("PowerSGD.min_compression_rate", self.min_compression_rate, 0.0)
        checks.switch("PowerSGD.use_error_feedback", self.use_error_feedback)
        checks.switch("PowerSGD.warm_start", self.warm_start)


@dataclass(frozen=True)
class DGC:
    """Compresses gradients (deep gradient compression, Lin et al., 2018): of a gradient of 16,384 elements or more,
    only the largest travel.

    Gradients travel whole until ``rampup_begin_step``. From then on ``sparsity`` gives the shares that are left out,
    one after the other, over ``rampup_step`` steps, and its last share holds after that. ``local_grad_clip_norm`` clips
    each parameter's gradient, before it is added to what was held back, to that norm divided by the square root of the
    number of workers.

    Examples:
        >>> from fleet.collective import DGC, DistributedStrategy
        >>> DistributedStrategy(dgc=DGC(rampup_begin_step=1000, sparsity=(0.75, 0.99, 0.999))).dgc.rampup_step
        1
    """

    rampup_begin_step: int = 0
    rampup_step: int = 1
    sparsity: tuple[float, ...] = (0.999,)
    local_grad_clip_norm: float | None = None

    def __post_init__(self) -> None:
        checks.whole("DGC.rampup_begin_step", self.rampup_begin_step, 0)
        checks.whole("DGC.rampup_step", self.rampup_step, 1)
        if not isinstance(self.sparsity, tuple | list) or not self.sparsity:
            raise ArgumentTypeError("DGC.sparsity must be a tuple of numbers", got=repr(self.sparsity))
        object.__setattr__(self, "sparsity", tuple(self.sparsity))
        for share in self.sparsity:
            checks.number("DGC.sparsity", share, 0.0, below=1.0)
        if self.local_grad_clip_norm is not None:
            checks.number("DGC.local_grad_clip_norm", self.local_grad_clip_norm, 0.0, above=True)


class DistributedStrategy:
    """Says how a collective job computes. Without any option gradients are averaged, as ``DistributedDataParallel``
    does.

    Examples:
        >>> from fleet.collective import DistributedStrategy, LocalSGD
        >>> strategy = DistributedStrategy(local_sgd=LocalSGD(k_steps=4))
        >>> strategy.sync_batch_norm = True
        >>> strategy
        DistributedStrategy(local_sgd=LocalSGD(k_steps=4, begin_step=1), sync_batch_norm=True)
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {
        "local_sgd": None,
        "gradient_merge": None,
        "fp16_allreduce": False,
        "bf16_allreduce": False,
        "power_sgd": None,
        "dgc": None,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
        "nccl_comm_num": 1,
        "sync_batch_norm": False,
        "recompute_checkpoints": (),
        "use_amp": False,
        "amp_loss_scaling": 2.0**15,
        "check_finite": False,
    }
    _KINDS: ClassVar[dict[str, type]] = {
        "local_sgd": LocalSGD,
        "gradient_merge": GradientMerge,
        "power_sgd": PowerSGD,
        "dgc": DGC,
    }

    local_sgd: LocalSGD | None
    gradient_merge: GradientMerge | None
    #: Gradients travel and are added in half precision.
    fp16_allreduce: bool
    bf16_allreduce: bool
    power_sgd: PowerSGD | None
    dgc: DGC | None
    #: Gradients are added within groups of ``inter_nranks`` neighbours, then over their first ones, then handed back;
    #: 0 is the number of workers on this worker's host.
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int
    #: How many communicators take turns with the buckets of gradients.
    nccl_comm_num: int
    #: Batch norms of ``model=`` take their statistics over the batches of all workers.
    sync_batch_norm: bool
    #: Names of submodules of ``model=`` whose activations are computed again in backward instead of being kept.
    recompute_checkpoints: tuple[str, ...]
    #: ``model=`` computes forward in half precision; ``minimize`` scales the loss, at first by ``amp_loss_scaling``.
    use_amp: bool
    amp_loss_scaling: float
    #: As in ``DistributeTranspilerConfig``.
    check_finite: bool

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(self._DEFAULTS)
        for name, value in options.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._DEFAULTS:
            raise unknown_setting("DistributedStrategy", name, self._DEFAULTS)
        self.__dict__[name] = self._checked(name, value)

    def _checked(self, name: str, value: Any) -> object:
        if name in self._KINDS:
            kind = self._KINDS[name]
            if value is not None and not isinstance(value, kind):
                raise ArgumentTypeError(f"{name} must be a fleet.collective.{kind.__name__} or None", got=repr(value))
        elif name == "recompute_checkpoints":
            if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
                raise ArgumentTypeError(f"{name} must be a list of names of submodules", got=repr(value))
            return tuple(value)
        elif name == "amp_loss_scaling":
            checks.number(name, value, 0.0, above=True)
            return float(value)
        elif name in ("nccl_comm_num", "hierarchical_allreduce_inter_nranks"):
            checks.whole(name, value, int(name == "nccl_comm_num"))
        else:
            checks.switch(name, value)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributedStrategy) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = [f"{name}={value!r}" for name, value in self.__dict__.items() if value != self._DEFAULTS[name]]
        return f"DistributedStrategy({', '.join(changed)})"


#: Options that cannot be had together, and why not.
_EXCLUSIONS: tuple[tuple[str, str, str], ...] = (
    *(
        ("local_sgd", other, "local SGD sends parameters and no gradients")
        for other in ("gradient_merge", "fp16_allreduce", "bf16_allreduce", "power_sgd", "dgc")
    ),
    *(
        ("dgc", other, "DGC sends a selection of gradient elements in a form of its own")
        for other in ("fp16_allreduce", "bf16_allreduce", "power_sgd", "use_hierarchical_allreduce", "nccl_comm_num")
    ),
    ("dgc", "gradient_merge", "DGC's momentum needs the gradient of every step"),
    ("dgc", "use_amp", "what DGC holds back would mix gradients of different scales"),
    *(
        ("power_sgd", other, "torch's PowerSGD hook has a form and a communicator of its own")
        for other in ("fp16_allreduce", "bf16_allreduce", "use_hierarchical_allreduce", "nccl_comm_num")
    ),
    ("fp16_allreduce", "bf16_allreduce", "a gradient travels in one element type"),
    ("use_amp", "check_finite", "AMP skips steps whose gradients are not finite, and check_finite ends the job then"),
)
_NEEDED: tuple[tuple[str, str], ...] = (
    ("hierarchical_allreduce_inter_nranks", "use_hierarchical_allreduce"),
    ("amp_loss_scaling", "use_amp"),
)


def as_collective(given: object) -> DistributedStrategy:
    """Return None, a ``DistributedStrategy`` or a ``DistributeTranspilerConfig`` as a strategy whose options go
    together."""
    if given is None:
        return DistributedStrategy()
    if isinstance(given, DistributeTranspilerConfig):
        strategy = _from_config(given)
    elif isinstance(given, DistributedStrategy):
        strategy = DistributedStrategy(**given.__dict__)  # what the user sets later comes too late
    else:
        from fleet.strategy.parameter_server import Strategy

        raise ArgumentTypeError(
            "strategy is of the wrong type for a collective job",
            expected="None, a fleet.collective.DistributedStrategy, or a DistributeTranspilerConfig in nccl2 mode",
            got=type(given).__name__,
            todo="That is one of jobs with parameter servers, and this job has none: start it with some, as "
            "docs/doors.md shows, or leave the strategy out."
            if isinstance(given, Strategy)
            else None,
        )
    _refuse_contradictions(strategy)
    return strategy


def _refuse_contradictions(strategy: DistributedStrategy) -> None:
    changed = {name for name, value in strategy.__dict__.items() if value != strategy._DEFAULTS[name]}
    for one, other, why in _EXCLUSIONS:
        if one in changed and other in changed:
            raise ConfigurationError(
                f"{one} and {other} exclude each other: {why}", todo=f"Leave {one} or {other} out."
            )
    for idle, needed in _NEEDED:
        if idle in changed and needed not in changed:
            raise ConfigurationError(f"{idle}: nothing to act on without {needed}", todo=f"Set {needed} = True.")


#: Settings of a config that a collective job can honour; every other one has to stay at its default.
_HONOURED = {
    *("mode", "collective_mode", "nccl_comm_num", "check_finite"),
    *("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks"),
}


def _from_config(config: DistributeTranspilerConfig) -> DistributedStrategy:
    if config.mode == "pserver":
        raise ConfigurationError(
            "mode='pserver' asks for parameter servers, and a collective job has none",
            todo="Set config.mode = 'nccl2'.",
        )
    in_vain = [name for name, value in config.__dict__.items() if value != config._DEFAULTS[name]]
    in_vain = sorted(set(in_vain) - _HONOURED)
    if in_vain:
        raise ConfigurationError(
            f"{', '.join(in_vain)}: nothing to act on in a collective job", todo="Leave it at its default."
        )
    if config.mode == "nccl2" and config.collective_mode is not None:
        raise ConfigurationError(
            f"mode='nccl2' and collective_mode={config.collective_mode!r} exclude each other",
            todo="Set config.mode = 'collective'.",
        )
    return DistributedStrategy(
        local_sgd=LocalSGD() if config.collective_mode == "local_sgd" else None,
        nccl_comm_num=config.nccl_comm_num,
        use_hierarchical_allreduce=config.use_hierarchical_allreduce,
        hierarchical_allreduce_inter_nranks=config.hierarchical_allreduce_inter_nranks,
        check_finite=config.check_finite,
    )
