"""An optimizer's own ``step``, replaced by the script, is called as in plain torch, or refused by name."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness import assert_close, run_job, values
from inside import flush, take_fresh

from fleet import Fleet
from fleet.errors import StateError, UnsupportedError
from fleet.kernels import RULES
from fleet.optimizer import has_own_step
from fleet.role_maker import UserDefinedCollectiveRoleMaker
from fleet.strategy.parameter_server import StrategyFactory

STEPS = 4

MODES: dict[str, Callable[..., Any]] = {
    "sync": StrategyFactory.create_sync_strategy,
    "half_async": StrategyFactory.create_half_async_strategy,
    "ssp": StrategyFactory.create_ssp_strategy,
    "async": StrategyFactory.create_async_strategy,
    "dc_asgd": functools.partial(StrategyFactory.create_async_strategy, dc_asgd_lambda=0.5),
    "gba": StrategyFactory.create_gba_strategy,
    "auto": StrategyFactory.create_auto_strategy,
    "geo": functools.partial(StrategyFactory.create_geo_strategy, 1),
    **{
        f"all_reduce {name}": functools.partial(getattr(StrategyFactory, f"create_{name}_strategy"), dense="all_reduce")
        for name in ("sync", "async", "half_async", "ssp")
    },
}
#: In which the optimizers of dense parameters step on the workers.
HERE = [name for name in MODES if name == "geo" or name.startswith("all_reduce")]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 4, sparse=True)
        self.dense = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def loss(self, step: int) -> torch.Tensor:
        ids = torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = (self.dense(self.table(ids)) - 1).square().mean()
        return loss


@pytest.mark.parametrize("mode", [*MODES, "collective"])
@pytest.mark.parametrize("is_ended", [False, True], ids=["", "after its job"])
def test_what_was_returned_is_not_wrapped_again(net: Net, mode: str, is_ended: bool) -> None:
    """As a cell of a notebook does that runs twice."""
    roles = UserDefinedCollectiveRoleMaker(0, ["127.0.0.1:9"]) if mode == "collective" else None
    strategy = MODES.get(mode, lambda: None)
    model: Any = net if roles is None else net.dense
    fleet = Fleet(environ={})
    fleet.init(roles)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy(), model=model)
    if is_ended:
        if roles is None:
            fleet.init_worker()
            fleet.stop_worker()
        fleet.init(roles)
    for given in (optimizer, [optimizer]):
        with pytest.raises(StateError, match="has returned, and cannot be wrapped again"):
            fleet.distributed_optimizer(given, strategy(), model=model)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(5)
    return Net()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def replace_on_object(optimizer: torch.optim.Optimizer) -> None:
    own = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        return own(closure)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


class Other(torch.optim.SGD):
    """A class of the user's own."""

    def step(self, closure: Any = None) -> Any:
        torch._foreach_mul_([param.grad for group in self.param_groups for param in group["params"]], 0.5)
        return super().step(closure)


# ---------------------------------------------------------------- what is a class's own


def with_a_schedule(optimizer: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def compiled(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]


def left_to_python(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = torch._dynamo.disable(optimizer.step)  # type: ignore[method-assign]


def without_gradients(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = torch.no_grad()(optimizer.step)  # type: ignore[method-assign]


def bound(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = optimizer.step  # type: ignore[method-assign]


OWN = [with_a_schedule, compiled, left_to_python, without_gradients, bound]


@pytest.mark.parametrize("has_schedule", [False, True])
@pytest.mark.parametrize("surround", OWN)
def test_what_torch_puts_around_a_step_leaves_it_the_class_s_own(surround: Any, has_schedule: bool) -> None:
    optimizer = sgd([torch.nn.Parameter(torch.ones(2))])
    assert has_own_step(optimizer)
    if has_schedule:
        with_a_schedule(optimizer)
    surround(optimizer)
    assert has_own_step(optimizer)


@pytest.mark.parametrize("kind", [rule.optimizer for rule in RULES.values()])
def test_every_class_that_servers_know_has_a_step_of_its_own(kind: type[torch.optim.Optimizer]) -> None:
    params: Any = [torch.nn.Parameter(torch.ones(2, 2))]
    assert has_own_step(kind(params))
    assert has_own_step(kind(params)), "whose class torch has changed when it made the first"


def by_a_function(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = lambda: None  # type: ignore[assignment, misc]


def wrapped_by_name(optimizer: torch.optim.Optimizer) -> None:
    own = optimizer.step
    optimizer.step = functools.wraps(own)(lambda *given: own(*given))  # type: ignore[method-assign]


def by_a_partial(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = functools.partial(optimizer.step, None)  # type: ignore[method-assign]


def by_another_s(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = sgd([torch.nn.Parameter(torch.ones(2))]).step  # type: ignore[method-assign]


def by_another_class_s(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = types.MethodType(torch.optim.Adam.step, optimizer)  # type: ignore[method-assign]


def by_a_mock(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = mock.Mock(wraps=optimizer.step)  # type: ignore[method-assign]


def below_a_schedule(optimizer: torch.optim.Optimizer) -> None:
    replace_on_object(optimizer)
    with_a_schedule(optimizer)


def above_a_schedule(optimizer: torch.optim.Optimizer) -> None:
    with_a_schedule(optimizer)
    replace_on_object(optimizer)


def below_the_compiler(optimizer: torch.optim.Optimizer) -> None:
    replace_on_object(optimizer)
    compiled(optimizer)


REPLACED = [
    *(replace_on_object, by_a_function, wrapped_by_name, by_a_partial, by_another_s, by_another_class_s, by_a_mock),
    *(below_a_schedule, above_a_schedule, below_the_compiler),
]


@pytest.mark.parametrize("replace", REPLACED)
def test_whatever_else_stands_there_is_not(replace: Any) -> None:
    optimizer = sgd([torch.nn.Parameter(torch.ones(2))])
    replace(optimizer)
    assert not has_own_step(optimizer)


@pytest.mark.parametrize("has_schedule", [False, True])
def test_nor_is_what_stands_in_the_class(has_schedule: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the object has kept the former one: servers step by the class."""
    optimizer = sgd([torch.nn.Parameter(torch.ones(2))])
    if has_schedule:
        with_a_schedule(optimizer)
    own = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", functools.wraps(own)(lambda *given: own(*given)))
    assert not has_own_step(optimizer)
    assert not has_own_step(sgd([torch.nn.Parameter(torch.ones(2))]))


# ---------------------------------------------------------------- in jobs


@pytest.mark.parametrize("when", ["before", "in the job"])
@pytest.mark.parametrize("mode", MODES)
def test_one_in_whose_place_others_step_is_refused(mode: str, when: str, net: Net) -> None:
    """Its table's rows, at least, are trained by others in every mode."""

    def body(fleet: Fleet, _: int) -> None:
        model = copy.deepcopy(net)
        inner = sgd(model.parameters())
        if when == "before":
            replace_on_object(inner)
            with pytest.raises(UnsupportedError, match=r"step\(\) of the wrapped SGD was replaced"):
                fleet.distributed_optimizer(inner, MODES[mode](), model=model)
            assert type(model.table.weight) is torch.nn.Parameter, "it is as it was"
            del inner.step
        optimizer = fleet.distributed_optimizer(inner, MODES[mode](), model=model)
        fleet.init_worker()
        optimizer.minimize(model.loss(0))
        if when == "in the job":
            replace_on_object(inner)
            with pytest.raises(UnsupportedError, match=r"step\(\) of the wrapped SGD was replaced"):
                optimizer.minimize(model.loss(1))
            del inner.step
        optimizer.minimize(model.loss(2))

    run_job(body)


@pytest.mark.parametrize("mode", [name for name in MODES if name not in HERE])
def test_without_a_table_too_where_servers_step(mode: str) -> None:
    inner = sgd(torch.nn.Linear(2, 2).parameters())
    replace_on_object(inner)
    alone = Fleet(environ={})
    alone.init()
    with pytest.raises(UnsupportedError, match=r"step\(\) of the wrapped SGD was replaced"):
        alone.distributed_optimizer(inner, MODES[mode]())


@pytest.mark.parametrize(
    ("mode", "when"),
    [(mode, when) for mode in HERE for when in ("before", "in the job", "class") if (mode, when) != ("geo", "class")],
)
def test_one_that_steps_here_is_called(mode: str, when: str, net: Net) -> None:
    """The optimizer of dense parameters, beside another one that has the table."""

    def train(model: Net, optimizer: Any, replaced: torch.optim.Optimizer) -> list[torch.Tensor]:
        for step in range(STEPS):
            if when == "in the job" and step == 2:
                replace_on_object(replaced)
            for each in optimizer:
                each.zero_grad()
            model.loss(step).backward()  # type: ignore[no-untyped-call]
            for each in optimizer:
                each.step()
        with torch.no_grad():
            return [model.table(torch.arange(20)), *values(model.dense)]

    def parts(model: Net) -> list[torch.optim.Optimizer]:
        dense = Other(model.dense.parameters(), lr=0.1) if when == "class" else sgd(model.dense.parameters())
        if when == "before":
            replace_on_object(dense)
        return [sgd(model.table.parameters()), dense]

    def body(fleet: Fleet, _: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        inner = parts(model)
        optimizer = fleet.distributed_optimizer(inner, MODES[mode](), model=model)
        fleet.init_worker()
        optimizer.register_step_post_hook(lambda *_: settle(fleet, optimizer))
        return train(model, [optimizer], inner[1])

    def settle(fleet: Fleet, optimizer: Any) -> None:
        if mode == "all_reduce async":
            flush(fleet)
            take_fresh(optimizer)

    alone = copy.deepcopy(net)
    inner = parts(alone)
    (got,) = run_job(body)
    assert_close(got, train(alone, inner, inner[1]))


class Averaging(torch.optim.Optimizer):
    """Shows an average of its points for evaluation, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.weight = 0.5
        self.is_training = True

    @torch.no_grad()
    def _swap(self) -> None:
        for param in self.param_groups[0]["params"]:
            other = self.state[param].setdefault("other", param.clone())
            kept = param.clone()
            param.copy_(other)
            other.copy_(kept)
        self.is_training = not self.is_training

    def train(self) -> None:
        if not self.is_training:
            self._swap()

    def eval(self) -> None:
        if self.is_training:
            self._swap()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.is_training
        for param in self.param_groups[0]["params"]:
            other = self.state[param].setdefault("other", param.clone())
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])
            other.lerp_(param, self.weight)


def averaged(optimizer: Any, model: Net, step_of: Callable[[int], torch.Tensor], optional: bool) -> list[torch.Tensor]:
    """Train as libraries do, which call ``train`` and ``eval`` where there are such, and change an option under way."""
    seen = []
    for step in range(STEPS):
        if not optional or hasattr(optimizer, "train"):
            optimizer.train()
        optimizer.zero_grad()
        step_of(step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == 1:
            optimizer.weight = 0.25
        if not optional or hasattr(optimizer, "eval"):
            optimizer.eval()
        seen += values(model.dense)
    return seen


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", [name for name in HERE if name.endswith(" sync")])
def test_what_an_optimizer_has_of_its_own_is_there(net: Net, mode: str, workers: int, optional: bool) -> None:
    plain = copy.deepcopy(net)
    expected = averaged(Averaging(plain.dense.parameters(), lr=0.1), plain, plain.loss, optional)

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        given = [torch.optim.SGD(model.table.parameters(), lr=0.0), Averaging(model.dense.parameters(), lr=0.1)]
        optimizer = fleet.distributed_optimizer(given, MODES[mode](), model=model)
        fleet.init_worker()
        return averaged(optimizer, model, model.loss, optional)

    for got in run_job(body, workers):
        assert_close(got, expected)


def test_what_an_optimizer_has_of_its_own_is_there_in_collective_jobs(net: Net) -> None:
    plain = copy.deepcopy(net)
    own = Averaging(plain.dense.parameters(), lr=0.1)
    expected = averaged(own, plain, lambda step: plain.dense(torch.full((2, 4), step / STEPS)).sum(), optional=True)
    fleet = Fleet(environ={})
    fleet.init(UserDefinedCollectiveRoleMaker(0, ["127.0.0.1:9"]))
    optimizer = fleet.distributed_optimizer(Averaging(net.dense.parameters(), lr=0.1), model=net.dense)
    fleet.init_worker()
    got = averaged(optimizer, net, lambda step: net.dense(torch.full((2, 4), step / STEPS)).sum(), optional=True)
    fleet.stop_worker()
    assert_close(got, expected)


def test_what_several_optimizers_have_is_taken_from_one_of_them(net: Net) -> None:
    halves = [Averaging(net.dense[0].parameters(), lr=0.1), Averaging(net.dense[2].parameters(), lr=0.1)]
    fleet = Fleet(environ={})
    fleet.init()
    optimizer = fleet.distributed_optimizer(halves, MODES["all_reduce sync"](), model=net)
    for use in (lambda: optimizer.eval(), lambda: setattr(optimizer, "weight", 0.1)):
        with pytest.raises(AttributeError, match=r"Averaging and Averaging have '(eval|weight)' each.*handed to fleet"):
            use()
    assert not hasattr(optimizer, "evaluate")


def test_what_torch_asks_an_optimizer_is_answered_for_the_job(net: Net) -> None:
    """A fused optimizer tells a GradScaler that it skips steps, which servers do not."""
    adam = torch.optim.Adam(net.dense.parameters(), lr=0.1, fused=True)
    fleet = Fleet(environ={})
    fleet.init()
    optimizer = fleet.distributed_optimizer(adam, model=net.dense)
    assert adam._step_supports_amp_scaling  # type: ignore[attr-defined]
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
