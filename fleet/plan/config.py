"""Defines ``DistributeTranspilerConfig``: the source documents' switches, each checked when it is set."""

from __future__ import annotations

from typing import Any, ClassVar

from fleet.base import checks
from fleet.base.spelling import unknown_setting
from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.plan.dispatch import DISPATCHERS, Dispatcher, RoundRobin, name_of
from fleet.plan.specs import DENSE, SERVERS, WIRE_DTYPES

_MODES = ("pserver", "nccl2", "collective")
_COLLECTIVE_MODES = ("grad_allreduce", "local_sgd")


class DistributeTranspilerConfig:
    """Holds the settings of a distributed job, with the source system's names and defaults.

    Examples:
        >>> from fleet.transpiler import DistributeTranspilerConfig, HashName
        >>> config = DistributeTranspilerConfig()
        >>> config.sync_mode, config.min_block_size
        (True, 8192)
        >>> config.split_method = HashName  # or "HashName"
        >>> config
        DistributeTranspilerConfig(split_method=HashName)
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {
        "slice_var_up": True,
        "split_method": RoundRobin,
        "min_block_size": 8192,
        "enable_dc_asgd": False,
        "mode": "pserver",
        "print_log": False,
        "wait_port": True,
        "sync_mode": True,
        "runtime_split_send_recv": False,
        "half_async": False,
        "geo_sgd_mode": False,
        "geo_sgd_need_push_nums": 100,
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
        "collective_mode": None,
        "check_finite": False,
        "elastic": False,
        "wire_dtype": None,
        "dense": SERVERS,
    }

    slice_var_up: bool
    #: ``RoundRobin`` or ``HashName``; each is equal to its name, which may be set as well.
    split_method: type[Dispatcher] | str
    min_block_size: int
    enable_dc_asgd: bool
    mode: str
    print_log: bool
    wait_port: bool
    sync_mode: bool
    runtime_split_send_recv: bool
    half_async: bool
    geo_sgd_mode: bool
    geo_sgd_need_push_nums: int
    nccl_comm_num: int
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int
    collective_mode: str | None
    #: Ours: name the parameter whose gradient holds NaN or infinity, instead of training on as torch does.
    check_finite: bool
    #: Ours: workers may join the running job beyond those that it began with, and leave.
    elastic: bool
    #: Ours: what gradients travel in: "bf16", "fp16" or "int8"; None is the element type of their parameter.
    wire_dtype: str | None
    #: Ours: where dense parameters are trained: on the "servers", or on the workers by "all_reduce".
    dense: str

    def __init__(self) -> None:
        self.__dict__.update(self._DEFAULTS)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._DEFAULTS:
            raise unknown_setting("DistributeTranspilerConfig", name, self._DEFAULTS)
        self.__dict__[name] = self._checked(name, value)

    def _checked(self, name: str, value: object) -> object:
        default = self._DEFAULTS[name]
        if name in ("sync_mode", "runtime_split_send_recv") and value is None:
            raise ConfigurationError(f"{name} must be True or False", got="None")
        if name == "split_method":
            return self._split_method(value)
        if name == "collective_mode":
            return _one_of(name, value, (None, *_COLLECTIVE_MODES))
        if name == "wire_dtype":
            return _one_of(name, value, (None, *WIRE_DTYPES))
        if name == "dense":
            return _one_of(name, value, DENSE)
        if name == "mode":
            return _one_of(name, value, _MODES)
        if isinstance(default, bool):
            self._check_split_send(name, checks.switch(name, value))
            return value
        return checks.whole(name, value, least=0 if name == "hierarchical_allreduce_inter_nranks" else 1)

    @staticmethod
    def _split_method(value: object) -> type[Dispatcher]:
        if not isinstance(value, type | str):
            raise ArgumentTypeError("split_method must be RoundRobin or HashName, or its name", got=repr(value))
        _one_of("split_method", value, tuple(DISPATCHERS))
        return DISPATCHERS[name_of(value)]

    def _check_split_send(self, name: str, value: bool) -> None:
        """Refuse to send apart from receiving in rounds, where that means nothing, in whichever order the two are
        set."""
        both = {"sync_mode": "runtime_split_send_recv", "runtime_split_send_recv": "sync_mode"}
        if name in both and value and getattr(self, both[name]):
            raise ConfigurationError(
                "runtime_split_send_recv and sync_mode cannot both be True",
                todo="Set sync_mode = False before runtime_split_send_recv = True.",
            )

    def __repr__(self) -> str:
        changed = {k: v for k, v in self.__dict__.items() if v != self._DEFAULTS[k]}
        told = (f"{k}={v.__name__ if isinstance(v, type) else repr(v)}" for k, v in changed.items())
        return f"DistributeTranspilerConfig({', '.join(told)})"


def _one_of(name: str, value: object, known: tuple[object, ...]) -> object:
    if value not in known:
        raise ConfigurationError(f"{name} is unknown", expected=" or ".join(map(repr, known)), got=repr(value))
    return value
