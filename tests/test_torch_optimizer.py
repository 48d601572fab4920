"""Around a step, an optimizer of a job is what it is in plain torch: gradients that the script changed, parameters that
it froze, scaled losses, and the optimizer's own state_dict."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_close, run_job, values
from test_edits import AHEAD, EXACT, STEPS, TEMPLATE, alike, loss_of
from test_parity_dense import OPTIMIZERS

from fleet import Fleet
from fleet.errors import ConfigurationError, FleetError, UnsupportedError
from fleet.kernels import RULES
from fleet.strategy.parameter_server import StrategyFactory

Script = Callable[[torch.nn.Module, Any, int, int], None]


def run_here(script: Script, make: Any, template: torch.nn.Module = TEMPLATE) -> list[torch.Tensor]:
    model = copy.deepcopy(template)
    optimizer = make(list(model.parameters()))
    for step in range(STEPS):
        script(model, optimizer, step, 0)
    return values(model)


def run_there(
    script: Script,
    make: Any,
    strategy: Any = StrategyFactory.create_sync_strategy,
    workers: int = 1,
    template: torch.nn.Module = TEMPLATE,
) -> list[list[torch.Tensor]]:
    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = copy.deepcopy(template)
        optimizer = fleet.distributed_optimizer(make(list(model.parameters())), strategy(), model=model)
        fleet.init_worker()
        for step in range(STEPS):
            script(model, optimizer, step, index)
        fleet.barrier_worker()
        return values(model)

    return run_job(body, workers, 2)


def minimized(optimizer: Any, loss: torch.Tensor) -> None:
    """As an optimizer of a job does it in one call."""
    if hasattr(optimizer, "minimize"):
        optimizer.minimize(loss)
    else:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---------------------------------------------------------------- options that change

#: What a script may set amid a job, where it is not so already.
SET: dict[type, tuple[Any, ...]] = {bool: (True, False), float: (0.25, np.float32(0.25), torch.tensor(0.25), 1, 0)}


def changed_amid(cls: Any, rows: bool, option: str, value: Any, there: bool) -> list[torch.Tensor]:
    """Values after two steps with an option and two more with another value of it, or as it was if that is refused."""
    torch.manual_seed(0)
    sparse = there or cls is torch.optim.SparseAdam
    model = torch.nn.Embedding(4, 3, sparse=sparse) if rows else torch.nn.Linear(4, 3, bias=False)
    params, before = list(model.parameters()), 0.01
    own = cls(params, lr=before)
    optimizer, fleet = own, Fleet(environ={})
    if there:
        fleet.init()
        optimizer = fleet.distributed_optimizer(own, model=model)
        fleet.init_worker()
    given = torch.arange(4) if rows else torch.ones(2, 4)
    for step in range(4):
        if step == 2:
            former, optimizer.param_groups[0][option] = optimizer.param_groups[0][option], value
        optimizer.zero_grad()
        model(given).square().sum().backward()
        try:
            optimizer.step()
        except (FleetError, KeyError, TypeError, AssertionError, RuntimeError):
            optimizer.param_groups[0][option] = former
            optimizer.step()
    found = [p.detach().clone() for p in params]
    if there:
        fleet.stop_worker()
    return found


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.pairs(2)
def test_an_option_that_changes_takes_effect_or_is_refused(name: str, rows: bool) -> None:
    """What torch fails at is refused before anything changes, and the job goes on without it."""
    rule = RULES[name]
    if not (rule.rows if rows else rule.dense):
        pytest.skip(f"{name} does not train these")
    defaults = rule.optimizer([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    for option, default in defaults.items():
        for value in SET.get(type(default), ()):
            if option == "differentiable" or (option == "d" and value == 0):  # by which Adafactor divides
                continue
            theirs = changed_amid(rule.optimizer, rows, option, value, there=False)
            ours = changed_amid(rule.optimizer, rows, option, value, there=True)
            for one, other in zip(ours, theirs, strict=True):
                # Rows of Adam have SparseAdam's eps.
                near = 1e-2 if rows and name in ("Adam", "Ftrl", "NAdam") else 1e-5
                torch.testing.assert_close(one, other, rtol=near, atol=near, equal_nan=True, msg=f"{option}={value!r}")


@pytest.mark.parametrize(
    ("make", "turn_on"),
    [
        (torch.optim.Adam, lambda own: own.param_groups[0].update(amsgrad=True)),
        (torch.optim.RMSprop, lambda own: torch.optim.lr_scheduler.OneCycleLR(own, 0.1, total_steps=9)),
    ],
)
def test_options_that_are_turned_on_before_the_first_step(make: Any, turn_on: Any) -> None:
    """What they go by begins with it: OneCycleLR has RMSprop use momentum."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    plain = copy.deepcopy(model)
    own, optimizer = make(model.parameters()), make(plain.parameters())
    alone = Fleet(environ={})
    alone.init()
    ours = alone.distributed_optimizer(own, model=model)
    alone.init_worker()
    for each in (own, optimizer):
        turn_on(each)
    for step in range(3):
        ours.minimize(model(torch.full((2, 4), step - 1.5)).square().sum())
        optimizer.zero_grad()
        plain(torch.full((2, 4), step - 1.5)).square().sum().backward()
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    alone.stop_worker()


def test_a_worker_that_has_another_option_on_is_told() -> None:
    """Worker 1 begins with what worker 0, whose options rule, has not: from the second step on servers lack it."""

    def body(fleet: Fleet, index: int) -> None:
        model = torch.nn.Linear(4, 3)
        adam = torch.optim.Adam(model.parameters(), amsgrad=index == 1)
        optimizer = fleet.distributed_optimizer(adam, model=model)
        fleet.init_worker()
        optimizer.minimize(model(torch.ones(2, 4)).sum())
        fleet.barrier_worker()
        if index == 1:
            with pytest.raises(UnsupportedError, match="amsgrad=True of Adam comes too late for 'weight'"):
                optimizer.minimize(model(torch.ones(2, 4)).sum())
            adam.param_groups[0]["amsgrad"] = False
        optimizer.minimize(model(torch.ones(2, 4)).sum())

    run_job(body, 2)


# ---------------------------------------------------------------- parameters that are frozen for a while


def freezes(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    model.line.weight.requires_grad_(step in (0, 3))
    model.norm.requires_grad_(step != 2)
    model.conv.bias.requires_grad_(step > 1)
    minimized(optimizer, loss_of(model, step))


def freezes_and_keeps_the_gradient(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    """Which torch goes on applying."""
    loss_of(model, step).backward()
    optimizer.step()
    model.line.weight.requires_grad_(step == 2)


@pytest.mark.parametrize("script", [freezes, freezes_and_keeps_the_gradient])
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("name", ["sgd-nesterov", "adam-amsgrad"])
def test_a_frozen_parameter_is_skipped(name: str, mode: str, script: Script) -> None:
    """By weight decay and momentum too."""
    (got,) = run_there(script, OPTIMIZERS[name], EXACT[mode])
    assert alike(got, run_here(script, OPTIMIZERS[name]))


def test_where_only_some_workers_freeze_a_parameter_they_contribute_nothing() -> None:
    """As one without data for it does: the mean is over all. Where all freeze it, it is skipped."""

    def script(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
        model.line.weight.requires_grad_(step == 0 or worker == step)
        minimized(optimizer, loss_of(model, step, worker))

    model = copy.deepcopy(TEMPLATE)
    optimizer = OPTIMIZERS["sgd-nesterov"](list(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        for worker in range(2):
            model.line.weight.requires_grad_(step == 0 or worker == step)
            (loss_of(model, step, worker) / 2).backward()
        optimizer.step()
    for got in run_there(script, OPTIMIZERS["sgd-nesterov"], workers=2):
        assert_close(got, values(model))


def large() -> torch.nn.Module:
    """With gradients that leave while a backward runs."""
    torch.manual_seed(9)
    return torch.nn.Sequential(torch.nn.Linear(4, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 2))


LARGE = large()


def large_loss(model: torch.nn.Module, step: int, worker: int = 0) -> torch.Tensor:
    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step + 50 * worker))).square().mean()


def freezes_large(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    model[1].weight.requires_grad_(step in (1, 3))
    minimized(optimizer, large_loss(model, step))


# ---------------------------------------------------------------- gradients


def replaces(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    optimizer.zero_grad()
    large_loss(model, step).backward()
    for param in model.parameters():
        param.grad = param.grad / 2
    model[1].weight.grad = torch.ones(600, 600).t() * step
    optimizer.step()


def scales_in_place(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    optimizer.zero_grad()
    large_loss(model, step).backward()
    torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)
    optimizer.step()


def accumulates(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    large_loss(model, step).backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()


def assigns_one_without_a_backward(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    optimizer.zero_grad()
    model[2].weight.grad = torch.full((2, 600), float(step))
    optimizer.step()


def hooks_tensors(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    if step in (1, 3):
        model[1].weight.register_hook(lambda grad: grad * 0.5)
    minimized(optimizer, large_loss(model, step))


def hooks_what_has_been_accumulated(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    if step == 1:
        model[1].weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", param.grad.mul_(0.5)))
    if step == 2:
        model[1].weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", param.grad + 1))
    minimized(optimizer, large_loss(model, step))


def hooks_beside(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    """A hook of one parameter, which comes last, changes the gradient of another without a trace."""

    def other(param: torch.Tensor) -> None:
        if model[1].weight.grad is not None:
            model[1].weight.grad.data.mul_(0.5)

    removed = model[0].bias.register_hook(lambda grad: other(model[1].weight))
    minimized(optimizer, large_loss(model, step))
    removed.remove()


def module_hooks(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    if step == 0:
        model[1].register_full_backward_hook(lambda module, inputs, outputs: tuple(each * 2 for each in inputs))
    minimized(optimizer, large_loss(model, step))


def edits_in_a_backward(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
    """After the gradient of the large one has left."""

    def edit(grad: torch.Tensor) -> None:
        model[1].weight.data.mul_(0.9)

    removed = model[0].bias.register_hook(edit)
    minimized(optimizer, large_loss(model, step))
    removed.remove()


SCRIPTS: list[Script] = [
    freezes_large,
    replaces,
    scales_in_place,
    accumulates,
    assigns_one_without_a_backward,
    hooks_tensors,
    hooks_what_has_been_accumulated,
    hooks_beside,
    module_hooks,
    edits_in_a_backward,
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("mode", ["sync", "half-async", "geo"])
@pytest.mark.pairs
def test_gradients_are_those_that_the_script_leaves(mode: str, script: Script) -> None:
    (got,) = run_there(script, OPTIMIZERS["sgd-momentum"], EXACT[mode], template=LARGE)
    assert alike(got, run_here(script, OPTIMIZERS["sgd-momentum"], LARGE))


# ---------------------------------------------------------------- scaled losses


class Scaled:
    """Trains with a GradScaler; the loss of some steps is infinite."""

    def __init__(self, *, unscales: bool = True, infinite: dict[int, int] | None = None) -> None:
        self.unscales = unscales
        self.infinite = infinite or {}
        self.scalers: dict[int, torch.amp.GradScaler] = {}

    def __call__(self, model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
        scaler = self.scalers.setdefault(worker, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
        optimizer.zero_grad()
        loss = loss_of(model, step, worker)
        scaler.scale(loss * torch.inf if self.infinite.get(worker) == step else loss).backward()
        if self.unscales:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("mode", EXACT)
def test_a_grad_scaler_skips_and_unscales(mode: str, unscales: bool) -> None:
    make = OPTIMIZERS["adam"]
    here, there = (Scaled(unscales=unscales, infinite={0: 1}) for _ in range(2))
    (got,) = run_there(there, make, EXACT[mode])
    assert alike(got, run_here(here, make))
    assert there.scalers[0].get_scale() == here.scalers[0].get_scale() != 1024.0


def test_a_step_that_one_worker_skips_is_no_step_of_the_job() -> None:
    """The others wait for its next one, which takes the place of the one that it skipped; it ends one short."""

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        sgd = OPTIMIZERS["sgd-momentum"](list(model.parameters()))
        optimizer = fleet.distributed_optimizer(sgd, model=model)
        fleet.init_worker()
        script = Scaled(infinite={1: 1})
        for step in range(STEPS):
            script(model, optimizer, step, index)
        (state,) = [fleet.state_dict(model)] if index == 0 else [{}]
        return list(state.values())

    model = copy.deepcopy(TEMPLATE)
    optimizer = OPTIMIZERS["sgd-momentum"](list(model.parameters()))
    for step, other in enumerate([0, 2, 3, None]):
        grads = []
        for worker, batch in ((0, step), (1, other)):
            if batch is not None:
                optimizer.zero_grad()
                loss_of(model, batch, worker).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                grads.append([param.grad for param in model.parameters()])
        for param, *each in zip(model.parameters(), *grads, strict=True):
            param.grad = sum(each) / len(each)
        optimizer.step()
    assert_close(run_job(body, 2, 2)[0], [value.detach() for value in model.state_dict().values()], 1e-5)


# ---------------------------------------------------------------- the optimizer's own state_dict


def two_groups(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": params[:2], "lr": 0.02}, {"params": params[2:]}], lr=0.01)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_state_dict_has_torch_s_layout_and_says_where_the_state_is(mode: str) -> None:
    def body(fleet: Fleet, _: int) -> tuple[Any, Any, Any, Any]:
        model = copy.deepcopy(TEMPLATE)
        inner = two_groups(list(model.parameters()))
        optimizer = fleet.distributed_optimizer(inner, AHEAD[mode](), model=model)
        before = optimizer.state_dict()
        fleet.init_worker()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.minimize(loss_of(model, 0))
        schedule.step()
        pickled = io.BytesIO()
        torch.save(optimizer.state_dict(), pickled)
        return before, torch.load(io.BytesIO(pickled.getvalue()), weights_only=True), inner.state_dict(), schedule

    model = copy.deepcopy(TEMPLATE)
    alone = two_groups(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(alone, 1)
    expected = []
    for _ in range(2):
        expected.append(copy.deepcopy(alone.state_dict()["param_groups"]))
        alone.step()
        schedule.step()
    before, after, inner, _ = run_job(body)[0]
    for group in expected[0]:
        group.pop("initial_lr")
    assert [before["param_groups"], after["param_groups"]] == expected
    assert (before["state"], before["fleet"]) == ({}, {"state": "on the servers", "step": 0})
    assert (after["state"], after["fleet"]) == ({}, {"state": "on the servers", "step": 1})
    assert inner == after


def test_names_and_groups_of_several_optimizers_are_in_it() -> None:
    model = copy.deepcopy(TEMPLATE)
    named = list(model.named_parameters())
    alone = Fleet(environ={})
    alone.init()
    optimizers = [torch.optim.SGD(named[:3], lr=0.1), torch.optim.Adam(named[3:])]
    optimizer = alone.distributed_optimizer(optimizers)
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1, 2], list(range(3, len(named)))]
    assert [name for group in state["param_groups"] for name in group["param_names"]] == [name for name, _ in named]
    state["param_groups"][1]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizers[0].param_groups + optimizers[1].param_groups] == [0.1, 0.5]
    with pytest.raises(ConfigurationError, match=r"other param groups .* groups of 3, 4 parameters; got groups of 7"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())


@pytest.mark.parametrize("which", ["wrapper", "wrapped"])
def test_options_that_are_loaded_take_effect(which: str) -> None:
    """Of a fresh optimizer, or of this one; the groups that the job and schedules know stay the same."""
    fresh = torch.optim.Adam(copy.deepcopy(TEMPLATE).parameters(), lr=0.5, betas=(0.5, 0.6)).state_dict()

    def script(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
        target = optimizer._wrapped[0] if which == "wrapped" and hasattr(optimizer, "minimize") else optimizer
        if step == 0:
            target.load_state_dict(fresh)
        else:
            state = target.state_dict()
            state["param_groups"][0]["lr"] = 0.25 * step
            target.load_state_dict(state)
        minimized(optimizer, loss_of(model, step))

    (got,) = run_there(script, OPTIMIZERS["adam"])
    assert alike(got, run_here(script, OPTIMIZERS["adam"]))


def test_a_state_that_is_not_that_of_the_servers_is_refused() -> None:
    torches = OPTIMIZERS["adam"](list(copy.deepcopy(TEMPLATE).parameters()))
    empty = copy.deepcopy(torches.state_dict())
    for group in torches.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    torches.step()
    stepped = torches.state_dict()

    def body(fleet: Fleet, _: int) -> None:
        model = copy.deepcopy(TEMPLATE)
        inner = OPTIMIZERS["adam"](list(model.parameters()))
        optimizer = fleet.distributed_optimizer(inner, model=model)
        first = optimizer.state_dict()
        for target in (optimizer, inner):
            with pytest.raises(UnsupportedError, match=r"on the servers, and no worker can load .*save_persistables.*"):
                target.load_state_dict(stepped)
        fleet.init_worker()
        optimizer.minimize(loss_of(model, 0))
        for target in (optimizer, inner):
            for given, step in ((first, 0), (empty, 0)):
                with pytest.raises(UnsupportedError, match=f"step 1; got one of step {step}.*fleet.resume_from"):
                    target.load_state_dict(given)
            with pytest.raises(UnsupportedError, match="no worker can load"):
                target.load_state_dict(stepped)
            target.load_state_dict(optimizer.state_dict())
        optimizer.minimize(loss_of(model, 1))
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
                copied(optimizer)
        mine = inner.state_dict()
        fleet.stop_worker()
        assert optimizer.state_dict() == mine

    run_job(body)
    plain = OPTIMIZERS["adam"](list(copy.deepcopy(TEMPLATE).parameters()))
    plain.load_state_dict(empty)  # one that belongs to no job


def test_one_that_keeps_no_state_loads_the_options_of_any_step() -> None:
    def body(fleet: Fleet, _: int) -> float:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet.init_worker()
        first = optimizer.state_dict()
        optimizer.minimize(loss_of(model, 0))
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.load_state_dict(first)
        return optimizer.param_groups[0]["lr"]

    assert run_job(body) == [0.1]


def test_a_job_that_goes_on_takes_the_state_dict_of_that_step(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def first(fleet: Fleet, _: int) -> None:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet.distributed_optimizer(two_groups(list(model.parameters())), model=model)
        fleet.init_worker()
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.001 * step
            optimizer.minimize(loss_of(model, step))
        fleet.save_persistables(tmp_path)
        kept.update(optimizer.state_dict())

    def again(fleet: Fleet, _: int) -> None:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet.distributed_optimizer(two_groups(list(model.parameters())), model=model)
        fleet.init_worker()
        optimizer.load_state_dict(kept)
        assert optimizer.param_groups[0]["lr"] == 0.002
        with pytest.raises(UnsupportedError, match="step 3; got one of step 2"):
            optimizer.load_state_dict({**kept, "fleet": {"state": "on the servers", "step": 2}})

    run_job(first)
    run_job(again, model_dir=str(tmp_path))


def test_where_the_optimizer_steps_on_the_worker_its_state_is_there() -> None:
    """In GEO, unless tables have states of rows, which are in no optimizer."""

    def with_tables(fleet: Fleet, _: int) -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 1))
        strategy = StrategyFactory.create_geo_strategy(2)
        optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters()), strategy, model=model)
        fleet.init_worker()
        optimizer.minimize(model(torch.tensor([1, 2])).sum())
        state = optimizer.state_dict()
        assert (state["state"], state["fleet"]["step"]) == ({}, 1)
        optimizer.load_state_dict(state)
        optimizer.minimize(model(torch.tensor([1, 2])).sum())

    run_job(with_tables)

    def script(model: torch.nn.Module, optimizer: Any, step: int, worker: int) -> None:
        minimized(optimizer, loss_of(model, step))
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"]
        assert "fleet" not in state
        minimized(optimizer, loss_of(model, step))
        optimizer.load_state_dict(state)

    (got,) = run_there(script, OPTIMIZERS["adam"], EXACT["geo"])
    assert alike(got, run_here(script, OPTIMIZERS["adam"]))


class Rated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(6, 2, sparse=True)
        self.top = torch.nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(ids)).sum()


#: Ways to read an optimizer's state of a parameter, or to have it forgotten.
LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "[]": lambda state, param: state[param],
    "get": lambda state, param: state.get(param),
    "setdefault": lambda state, param: state.setdefault(param, {}),
    "pop": lambda state, param: state.pop(param, None),
    "del": lambda state, param: state.__delitem__(param),
    "[]=": lambda state, param: state.__setitem__(param, {}),
    "update": lambda state, param: state.update({param: {}}),
    "clear": lambda state, param: state.clear(),
    "popitem": lambda state, param: state.popitem(),
}


@pytest.mark.parametrize("of_several", [False, True])
@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adagrad"])
@pytest.mark.parametrize("mode", ["sync", "geo", "all-reduce"])
def test_state_that_is_elsewhere_is_neither_read_nor_forgotten(mode: str, name: str, of_several: bool) -> None:
    """Adagrad's constructor makes some, which a job never changes. What steps on the worker has its state there."""
    strategies: dict[str, Any] = {
        "sync": StrategyFactory.create_sync_strategy,
        "geo": StrategyFactory.create_geo_strategy,
        "all-reduce": lambda: StrategyFactory.create_sync_strategy(dense="all_reduce"),
    }

    def body(fleet: Fleet, worker: int) -> None:
        model = Rated()
        make = OPTIMIZERS[name]
        parts = [[model.table.weight], [*model.top.parameters()]] if of_several else [[*model.parameters()]]
        own = [make(params) for params in parts]
        optimizer = fleet.distributed_optimizer(own, strategies[mode](), model=model)
        fleet.init_worker()
        optimizer.minimize(model(torch.arange(3)))
        elsewhere = [model.table.weight, *(model.top.parameters() if mode == "sync" else ())]
        for param in elsewhere:
            holder = next(each for each in own if any(p is param for p in each.param_groups[0]["params"]))
            for way, look in LOOKS.items():
                with pytest.raises(UnsupportedError, match=r"on the servers|beside these"):
                    look(holder.state, param)
                if way in ("[]", "get") or not of_several:
                    with pytest.raises(UnsupportedError, match=r"on the servers|beside these"):
                        look(optimizer.state, param)
                else:
                    with pytest.raises(UnsupportedError, match="cannot be changed at once"):
                        look(optimizer.state, param)
            assert all(each is not param for each in holder.state)
            for walked, state in list(holder.state.items()):
                holder.state[walked] = state  # as trainers do that move it to a device
        if mode != "sync":
            assert set(optimizer.state[model.top.weight]) == set(own[-1].state[model.top.weight]) != set()
            del own[-1].state[model.top.bias]
            assert own[-1].state.get(model.top.bias) is None
        if name != "adagrad":  # torch's own needs what its constructor made
            optimizer.minimize(model(torch.arange(3)))
        kept, holder.state = holder.state, {}
        with pytest.raises(UnsupportedError, match="another state"):
            optimizer.step()
        holder.state = kept

    run_job(body, 1, 1)
