from __future__ import annotations

import copy
import math
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import config

from fleet.base.settings import ProcessSettings
from fleet.errors import ArgumentTypeError, ConfigurationError, FleetError
from fleet.plan.plan import make_plan
from fleet.plan.specs import JobSpec, PlanSettings
from fleet.ps.consistency import MODES
from fleet.strategy.collective import DistributedStrategy, as_collective
from fleet.strategy.parameter_server import Strategy, StrategyFactory, as_strategy
from fleet.transpiler import DistributeTranspilerConfig, HashName, RoundRobin

# --- DistributeTranspilerConfig ---------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
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
    "dense": "servers",
}
SWITCHES = [name for name, value in DEFAULTS.items() if isinstance(value, bool)]
NUMBERS = [name for name, value in DEFAULTS.items() if isinstance(value, int) and not isinstance(value, bool)]


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    value = getattr(DistributeTranspilerConfig(), name)
    assert value == DEFAULTS[name]
    assert type(value) is type(DEFAULTS[name])


def test_there_are_no_other_settings() -> None:
    assert set(vars(DistributeTranspilerConfig())) == set(DEFAULTS)
    assert set(DistributeTranspilerConfig.__annotations__) - {"_DEFAULTS"} == set(DEFAULTS)


def test_two_configurations_do_not_share_anything() -> None:
    one, other = DistributeTranspilerConfig(), DistributeTranspilerConfig()
    one.min_block_size = 1
    assert other.min_block_size == DistributeTranspilerConfig().min_block_size == 8192
    copied = copy.deepcopy(one)
    one.min_block_size = 2
    assert copied.min_block_size == 1


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("sync_mod", "Did you mean 'sync_mode'"),
        ("slice_var", "Did you mean 'slice_var_up'"),
        ("min_block_sise", "Did you mean 'min_block_size'"),
        ("geo_sgd_need_push_num", "Did you mean 'geo_sgd_need_push_nums'"),
        ("SYNC", "Known are check_finite, collective_mode, .*, wait_port"),
        ("_DEFAULTS", "Known are|Did you mean"),
    ],
)
def test_a_misspelt_setting_is_an_error(wrong: str, hint: str) -> None:
    made = DistributeTranspilerConfig()
    with pytest.raises(AttributeError, match=f"has no setting {wrong!r}. {hint}"):
        setattr(made, wrong, True)
    assert vars(made) == DEFAULTS


def test_reading_a_misspelt_setting_is_an_error() -> None:
    with pytest.raises(AttributeError, match="sync_mod"):
        _ = DistributeTranspilerConfig().sync_mod  # type: ignore[attr-defined]


def refused(name: str, value: object) -> FleetError:
    """Set it, and give back the refusal; the setting must be as it was."""
    made = DistributeTranspilerConfig()
    with pytest.raises(FleetError) as caught:
        setattr(made, name, value)
    assert name in str(caught.value)
    assert vars(made) == DEFAULTS
    return caught.value


@pytest.mark.parametrize("value", [0, 1, "True", "", 1.0, [], None])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_true_or_false(name: str, value: object) -> None:
    error = refused(name, value)
    none_is_a_value_error = value is None and name in ("sync_mode", "runtime_split_send_recv")
    assert isinstance(error, ValueError if none_is_a_value_error else TypeError)
    assert "must be True or False" in str(error)


@pytest.mark.parametrize("value", ["1", 1.0, True, None, [1]])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_an_int(name: str, value: object) -> None:
    error = refused(name, value)
    assert isinstance(error, TypeError)
    assert "must be an int" in str(error)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_in_range(name: str) -> None:
    least = 0 if name == "hierarchical_allreduce_inter_nranks" else 1
    for value in (least - 1, -100):
        error = refused(name, value)
        assert isinstance(error, ValueError)
        assert (error.expected, error.got) == (f"at least {least}", value)
    for value in (least, 10**6):
        assert getattr(config(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("mode", ["pserver", "nccl2", "collective"], ["PSERVER", "", "ps", None, 1, True, []]),
        ("collective_mode", [None, "grad_allreduce", "local_sgd"], ["localsgd", "", 0, False, []]),
    ],
)
def test_a_choice(name: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        assert getattr(config(**{name: value}), name) == value
    for value in bad:
        error = refused(name, value)
        assert isinstance(error, TypeError | ValueError)
        assert repr(good[-1]) in str(error), "the choices are told"


@pytest.mark.parametrize(
    ("value", "name"),
    [(RoundRobin, "RoundRobin"), ("RoundRobin", "RoundRobin"), (HashName, "HashName"), ("HashName", "HashName")],
)
def test_split_method_is_a_class_and_equal_to_its_name(value: Any, name: str) -> None:
    method = config(split_method=value).split_method
    assert method is {"RoundRobin": RoundRobin, "HashName": HashName}[name]
    assert method == name
    assert name == method
    assert hash(method) == hash(name)
    assert method != {"RoundRobin": HashName, "HashName": RoundRobin}[name]
    assert method not in ("roundrobin", 1, None, Unknown, heir())
    assert type(as_strategy(config(split_method=value)).split_method) is str
    assert as_strategy(config(split_method=value)).split_method == name


class Unknown:
    pass


def heir() -> type:
    """A class that is made of a dispatcher, and has its name."""
    return type(RoundRobin)("RoundRobin", (RoundRobin,), {})


def impostor() -> type:
    """A class that only has the name of a dispatcher."""
    return type("RoundRobin", (), {})


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("roundrobin", ConfigurationError),
        ("", ConfigurationError),
        (Unknown, ConfigurationError),
        (impostor(), ConfigurationError),
        (heir(), ConfigurationError),
        (str, ConfigurationError),
        (None, ArgumentTypeError),
        (1, ArgumentTypeError),
        (RoundRobin(2), ArgumentTypeError),
        (["RoundRobin"], ArgumentTypeError),
    ],
)
def test_another_split_method_is_refused(value: object, error: type[Exception]) -> None:
    assert type(refused("split_method", value)) is error


def test_splitting_send_and_receive_excludes_rounds_in_either_order() -> None:
    made = DistributeTranspilerConfig()
    with pytest.raises(ConfigurationError, match=r"cannot both be True.*Set sync_mode = False"):
        made.runtime_split_send_recv = True
    assert made.runtime_split_send_recv is False
    made.sync_mode = False
    made.runtime_split_send_recv = True
    with pytest.raises(ConfigurationError, match="cannot both be True"):
        made.sync_mode = True
    assert (made.sync_mode, made.runtime_split_send_recv) == (False, True)
    made.runtime_split_send_recv = False
    made.sync_mode = True
    assert (made.sync_mode, made.runtime_split_send_recv) == (True, False)


def test_repr_tells_what_was_changed() -> None:
    assert repr(DistributeTranspilerConfig()) == "DistributeTranspilerConfig()"
    changed = config(sync_mode=False, min_block_size=1, split_method=HashName)
    assert repr(changed) == "DistributeTranspilerConfig(split_method=HashName, min_block_size=1, sync_mode=False)"


# --- as_strategy ------------------------------------------------------------------------------------------------------


def test_none_is_synchronous() -> None:
    assert as_strategy(None) == Strategy() == StrategyFactory.create_sync_strategy()
    assert as_strategy(None).mode == "sync"
    assert as_strategy(None).mode in MODES


def test_a_strategy_is_itself() -> None:
    strategy = StrategyFactory.create_sync_strategy(check_finite=True)
    assert as_strategy(strategy) is strategy


def test_a_configuration_as_it_comes_is_the_default_strategy() -> None:
    assert as_strategy(DistributeTranspilerConfig()) == Strategy()


@pytest.mark.parametrize(
    "settings",
    [
        {"slice_var_up": False},
        {"split_method": "HashName"},
        {"min_block_size": 1},
        {"wait_port": False},
        {"print_log": True},
        {"check_finite": True},
        {"wire_dtype": "int8"},
        {"slice_var_up": False, "split_method": "HashName", "min_block_size": 5, "wait_port": False, "print_log": True},
    ],
)
def test_what_a_configuration_carries_over(settings: dict[str, Any]) -> None:
    assert as_strategy(config(**settings)) == Strategy(**settings)


def test_later_changes_of_the_configuration_do_not_reach_the_strategy() -> None:
    made = config(min_block_size=5)
    strategy = as_strategy(made)
    made.min_block_size = 6
    assert strategy.min_block_size == 5


@pytest.mark.parametrize(
    "given",
    [
        "sync",
        True,
        False,
        0,
        {},
        {"sync_mode": True},
        [],
        object(),
        Strategy,
        DistributeTranspilerConfig,
        StrategyFactory,
    ],
)
def test_anything_else_is_a_type_error(given: object) -> None:
    with pytest.raises(TypeError, match=r"strategy is of the wrong type; expected None, a DistributeTranspilerConfig"):
        as_strategy(given)


def test_a_strategy_of_the_other_kind_of_job_says_so() -> None:
    """A script is started the other way: the strategy is what it names, and the start is what is to be changed."""
    with pytest.raises(
        ArgumentTypeError, match=r"got DistributedStrategy.* this job has parameter servers: start it with"
    ):
        as_strategy(DistributedStrategy())
    with pytest.raises(ArgumentTypeError, match=r"got Strategy.* this job has none: start it with some"):
        as_collective(StrategyFactory.create_sync_strategy())


@pytest.mark.parametrize("relaxed", ["half_async", "geo_sgd_mode", "enable_dc_asgd"])
def test_rounds_exclude_what_relaxes_them(relaxed: str) -> None:
    with pytest.raises(ConfigurationError, match=f"sync_mode=True and {relaxed}=True exclude each other"):
        as_strategy(config(**{relaxed: True}))


@pytest.mark.parametrize(
    ("settings", "where"),
    [({}, "synchronous training"), ({"sync_mode": False, "geo_sgd_mode": True}, "GEO")],
    ids=["sync", "geo"],
)
def test_elastic_is_refused_where_a_step_counts_on_the_number_of_workers(settings: dict[str, Any], where: str) -> None:
    what = f"elastic=True: in {where} every step counts on the number of workers"
    with pytest.raises(ConfigurationError, match=what):
        as_strategy(config(elastic=True, **settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nccl_comm_num", 2),
        ("use_hierarchical_allreduce", True),
        ("hierarchical_allreduce_inter_nranks", 2),
        ("collective_mode", "local_sgd"),
        ("collective_mode", "grad_allreduce"),
        ("geo_sgd_need_push_nums", 10),
    ],
)
def test_what_has_nothing_to_act_on_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}: nothing to act on"):
        as_strategy(config(**{name: value}))


def test_all_that_is_set_in_vain_is_named() -> None:
    with pytest.raises(ConfigurationError, match="nccl_comm_num, use_hierarchical_allreduce: nothing"):
        as_strategy(config(use_hierarchical_allreduce=True, nccl_comm_num=2))


@pytest.mark.parametrize("mode", ["nccl2", "collective"])
def test_a_collective_mode_never_quietly_becomes_the_synchronous_one(mode: str) -> None:
    with pytest.raises(ConfigurationError, match=f"mode='{mode}' asks for a collective job, and this one has param"):
        as_strategy(config(mode=mode))


# --- StrategyFactory --------------------------------------------------------------------------------------------------


def test_the_factory_makes_the_synchronous_strategy() -> None:
    made = StrategyFactory.create_sync_strategy()
    assert made == Strategy(mode="sync", check_finite=False)
    assert StrategyFactory().create_sync_strategy(check_finite=True) == Strategy(check_finite=True)


FACTORY = [getattr(StrategyFactory, name) for name in dir(StrategyFactory) if name.startswith("create_")]


@pytest.mark.parametrize("make", FACTORY, ids=lambda make: make.__name__)
@pytest.mark.parametrize("given", ["no", None, 1, math.nan, torch.ones(2)], ids=str)
def test_a_switch_of_a_strategy_is_true_or_false(make: Any, given: object) -> None:
    for name in {"check_finite", "elastic", "needs_all_workers"} & {*signature(make).parameters}:
        with pytest.raises(ArgumentTypeError, match=f"{name} must be True or False"):
            make(**{name: given})


@pytest.mark.parametrize("make", FACTORY, ids=lambda make: make.__name__)
def test_a_number_that_is_no_float_is_out_of_range(make: Any) -> None:
    for name in {"max_grad_norm", "dc_asgd_lambda"} & {*signature(make).parameters}:
        with pytest.raises(ConfigurationError, match=f"{name} is out of range; expected what a float can hold"):
            make(**{name: 10**400})


def test_megabytes_are_a_whole_number() -> None:
    for given in (1.5, True, Path("8")):
        with pytest.raises(ArgumentTypeError, match="table_memory_mb must be an int"):
            Strategy().with_settings(table_memory_mb=given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="table_memory_mb is out of range; expected at least 1; got 0"):
        Strategy().with_settings(table_memory_mb=0)


def test_the_factory_makes_the_relaxed_strategies() -> None:
    assert StrategyFactory.create_ssp_strategy() == Strategy(mode="ssp", staleness=4)
    assert StrategyFactory.create_ssp_strategy(0, check_finite=True) == Strategy(mode="ssp", check_finite=True)
    assert StrategyFactory.create_half_async_strategy() == Strategy(mode="half_async")
    assert StrategyFactory.create_geo_strategy() == Strategy(mode="geo", update_frequency=100)
    assert StrategyFactory.create_geo_strategy(7, check_finite=True).update_frequency == 7
    geo = config(sync_mode=False, geo_sgd_mode=True, geo_sgd_need_push_nums=9)
    assert as_strategy(geo) == Strategy(mode="geo", update_frequency=9)
    made = StrategyFactory.create_half_async_strategy(max_merge_var_num=3, is_sgd_optimizer=False)
    said = (("max_merge_var_num", 3), ("is_sgd_optimizer", False))
    assert made == Strategy(mode="half_async", communicator=said)
    for make in FACTORY:
        assert make(wire_dtype="fp16") == replace(make(), wire_dtype="fp16")
        assert as_strategy(make()).wire_dtype is None
    assert as_strategy(config(sync_mode=False, half_async=True)) == Strategy(mode="half_async")
    assert StrategyFactory.create_async_strategy() == Strategy(mode="async")
    assert StrategyFactory.create_async_strategy(send_queue_size=7).communicator == (("send_queue_size", 7),)
    assert StrategyFactory.create_half_async_strategy(elastic=True) == Strategy(mode="half_async", elastic=True)
    assert as_strategy(config(sync_mode=False, elastic=True)) == StrategyFactory.create_async_strategy(elastic=True)
    for split in (True, False):
        assert as_strategy(config(sync_mode=False, runtime_split_send_recv=split)) == Strategy(mode="async")


@pytest.mark.parametrize(
    ("make", "arguments", "kind"),
    [
        *((make, {"wire_dtype": "bfloat16"}, ValueError) for make in FACTORY),
        *((make, {"wire_dtype": torch.bfloat16}, TypeError) for make in FACTORY),
        (StrategyFactory.create_ssp_strategy, {"staleness": -1}, ValueError),
        (StrategyFactory.create_ssp_strategy, {"staleness": 1.0}, TypeError),
        (StrategyFactory.create_ssp_strategy, {"staleness": True}, TypeError),
        (StrategyFactory.create_half_async_strategy, {"max_merge_var_num": 0}, ValueError),
        (StrategyFactory.create_half_async_strategy, {"max_merge_var_num": "3"}, TypeError),
        (StrategyFactory.create_half_async_strategy, {"is_sgd_optimizer": 1}, TypeError),
        (StrategyFactory.create_ssp_strategy, {"staleness": None}, TypeError),
        (StrategyFactory.create_async_strategy, {"send_queue_size": 0}, ValueError),
        (StrategyFactory.create_async_strategy, {"send_wait_times": -1}, ValueError),
        (StrategyFactory.create_async_strategy, {"thread_pool_size": 0}, ValueError),
        (StrategyFactory.create_async_strategy, {"min_send_grad_num_before_recv": 0}, ValueError),
        (StrategyFactory.create_async_strategy, {"independent_recv_thread": 1}, TypeError),
        (StrategyFactory.create_async_strategy, {"elastic": 1}, TypeError),
        (StrategyFactory.create_half_async_strategy, {"elastic": None}, TypeError),
        (StrategyFactory.create_sync_strategy, {"elastic": True}, TypeError),
        (StrategyFactory.create_ssp_strategy, {"elastic": True}, TypeError),
        (StrategyFactory.create_geo_strategy, {"elastic": True}, TypeError),
    ],
)
def test_the_factory_checks_its_numbers(make: Any, arguments: dict[str, Any], kind: type[Exception]) -> None:
    (name,) = arguments
    with pytest.raises(kind, match=name):
        make(**arguments)


@pytest.mark.parametrize("other", ["half_async", "enable_dc_asgd"])
def test_geo_excludes_what_sends_gradients(other: str) -> None:
    with pytest.raises(ConfigurationError, match=f"geo_sgd_mode=True and {other}=True exclude each other"):
        as_strategy(config(sync_mode=False, geo_sgd_mode=True, **{other: True}))


def test_a_strategy_is_a_value() -> None:
    with pytest.raises(AttributeError):
        Strategy().mode = "async"  # type: ignore[misc]
    assert len({Strategy(), Strategy(), Strategy(min_block_size=1)}) == 2


def test_strategy_and_plan_have_the_same_defaults() -> None:
    """The planner's settings and the strategy, or those of a process, are written down twice; a default must not
    differ."""
    settings = PlanSettings(2, 2)
    names = {field.name for field in fields(PlanSettings)} - {"server_num", "worker_num"}
    assert len(names) > 7
    for name in names:
        assert getattr(settings, name) == getattr(ProcessSettings() if name == "evict_every" else Strategy(), name)
    assert make_plan(JobSpec((), (), (), settings)).blocks == ()
