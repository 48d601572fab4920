"""What users do around a step: schedules, groups, accumulation, clipping, uneven data, late starters."""

from __future__ import annotations

import copy
import functools
import linecache
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import fuzz
import numpy as np
import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from harness import PATIENT, Job, assert_close, run_job, values
from inside import outgrown, under_way
from small_job import STRATEGIES as MODES
from test_hostile import member_and_other
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fleet.nn
from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.base.interruption import uninterrupted
from fleet.errors import DeadlineError, StateError, UnsupportedError
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.plan.specs import ParamSpec
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.worker.push import COPIED

torch.manual_seed(11)
TEMPLATE = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
#: Two independent outputs, so that a worker can leave parameters without a gradient.
HEADS = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 1), "b": torch.nn.Linear(3, 1)})


def data(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step * 10 + worker)
    return torch.randn(6, 5, generator=draw), torch.randn(6, 2, generator=draw)


def loss_of(model: torch.nn.Module, step: int, worker: int) -> torch.Tensor:
    x, y = data(step, worker)
    return torch.nn.functional.mse_loss(model(x), y)


def average_into(model: torch.nn.Module, losses: list[Callable[[], torch.Tensor]]) -> None:
    """Leave in ``.grad`` what a round makes of the workers' gradients: their sum in worker order over their number."""
    params = list(model.parameters())
    total: list[torch.Tensor | None] = [None] * len(params)
    for loss in losses:
        model.zero_grad()
        loss().backward()
        for index, param in enumerate(params):
            if param.grad is not None:
                total[index] = param.grad.clone() if total[index] is None else total[index] + param.grad
    for param, grad in zip(params, total, strict=True):
        param.grad = None if grad is None else grad / len(losses)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
}


@pytest.mark.parametrize("inner", [False, True], ids=["on the wrapper", "on the inner optimizer"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler(name: str, inner: bool) -> None:
    """Momentum included: OneCycleLR moves that too."""

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        early = SCHEDULERS[name](plain) if inner else None
        optimizer = fleet_.distributed_optimizer(plain, model=model)
        scheduler = early or SCHEDULERS[name](optimizer)
        fleet_.init_worker()
        for step in range(8):
            optimizer.minimize(loss_of(model, step, worker))
            scheduler.step()
        return values(model)

    model = copy.deepcopy(TEMPLATE)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](plain)
    for step in range(8):
        average_into(model, [lambda s=step, w=w: loss_of(model, s, w) for w in range(2)])
        plain.step()
        scheduler.step()
    for got in run_job(body, 2, 2):
        assert_close(got, values(model))


def test_groups_and_several_optimizers() -> None:
    def optimizers(model: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
        groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias], "momentum": 0.9}]
        return [torch.optim.SGD(groups, lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.01)]

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        inner = optimizers(model)
        optimizer = fleet_.distributed_optimizer(inner, model=model)
        assert isinstance(optimizer, torch.optim.Optimizer)
        own = [group for each in inner for group in each.param_groups]
        assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups, own, strict=True))
        fleet_.init_worker()
        for step in range(5):
            optimizer.minimize(loss_of(model, step, worker))
            optimizer.param_groups[0]["lr"] *= 0.9
        return values(model)

    model = copy.deepcopy(TEMPLATE)
    plain = optimizers(model)
    for step in range(5):
        average_into(model, [lambda s=step, w=w: loss_of(model, s, w) for w in range(3)])
        for each in plain:
            each.step()
        plain[0].param_groups[0]["lr"] *= 0.9
    for got in run_job(body, 3, 2):
        assert_close(got, values(model))


@pytest.mark.parametrize("on_wrapper", [True, False], ids=["on the wrapper", "on the inner optimizer"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_groups_added_before_and_during_the_job(name: str, on_wrapper: bool) -> None:
    """Unfreezing a layer while training goes on."""
    cls = getattr(torch.optim, name)
    late = torch.nn.Linear(5, 2)
    later = torch.nn.Parameter(torch.randn(2))

    def loss(model: torch.nn.Module, more: torch.nn.Module, bias: torch.Tensor, step: int, worker: int) -> torch.Tensor:
        x, y = data(step, worker)
        return torch.nn.functional.mse_loss(model(x) + more(x) + bias, y)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, more, bias = copy.deepcopy(TEMPLATE), copy.deepcopy(late), torch.nn.Parameter(later.detach().clone())
        inner = cls(model[0].parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer([torch.optim.Adam([bias], lr=0.01), inner])
        inner.add_param_group({"params": model[2].parameters(), "lr": 0.05})
        fleet_.init_worker()
        for step in range(2):
            optimizer.minimize(loss(model, more, bias, step, worker))
        if worker and on_wrapper:
            torch.nn.init.zeros_(more.weight)  # worker 0's values win here too
        (optimizer if on_wrapper else inner).add_param_group({"params": more.parameters(), "lr": 0.2})
        for step in range(2, 5):
            optimizer.minimize(loss(model, more, bias, step, worker))
        return [*values(model), *values(more), bias.detach()]

    if name == "Adagrad":
        # torch's own Adagrad prepares its state in the constructor only, and fails on a group that comes later;
        # ours goes on as if the group had been there, without gradients, from the start.
        def plain_optimizer(model: torch.nn.Sequential, more: torch.nn.Module) -> torch.optim.Optimizer:
            groups = [(model[0], 0.1), (model[2], 0.05), (more, 0.2)]
            return cls([{"params": part.parameters(), "lr": lr} for part, lr in groups])
    else:

        def plain_optimizer(model: torch.nn.Sequential, more: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = cls(model[0].parameters(), lr=0.1)
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
            return optimizer

    model, more, bias = copy.deepcopy(TEMPLATE), copy.deepcopy(late), torch.nn.Parameter(later.detach().clone())
    plain, other = plain_optimizer(model, more), torch.optim.Adam([bias], lr=0.01)
    everything = torch.nn.ModuleList([model, more, torch.nn.ParameterList([bias])])
    for step in range(5):
        if step == 2 and name != "Adagrad":
            plain.add_param_group({"params": more.parameters(), "lr": 0.2})
        average_into(everything, [lambda s=step, w=w: loss(model, more, bias, s, w) for w in range(2)])
        if step < 2:
            more.zero_grad()
        plain.step()
        other.step()
    for got in run_job(body, 2, 3):
        assert_close(got, [*values(model), *values(more), bias.detach()])


def test_a_table_added_during_the_job() -> None:
    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet_.init_worker()
        optimizer.minimize(weight.sum())
        table = fleet.nn.Embedding(None, 2, initializer="constant(3.0)")
        optimizer.add_param_group({"params": table.parameters()})
        optimizer.minimize(weight.sum() + table(torch.tensor([worker])).sum())
        return torch.cat([table(torch.tensor([0, 1, 2])).detach()[:, 0], weight.detach()])

    for got in run_job(body, 2, 2):
        assert got.tolist() == [2.5, 2.5, 3.0, -2.0, -2.0, -2.0]


def test_a_worker_that_leaves_without_further_parameters_is_not_waited_for() -> None:
    """Of who does not know of them yet a server remembers which ones it knows, as long as it is there."""
    ask, service = member_and_other()
    known = fuzz.SPECS["sync"]
    spec = replace(known, params=(*known.params, ParamSpec("more", (2,), "float32", 0)))
    extend = pb.Extend(spec=spec.to_json(), fingerprint=make_plan(spec).fingerprint, options=[fuzz.OPTIONS])
    ask(0, {"extend": extend, "step": 0})
    ask(0, {"upload": pb.Upload(blocks=[2])}, [WireTensor.of(np.ones(2, np.float32))])
    ask(0, {"ready": pb.Ready()})
    assert outgrown(service) == {1}
    ask(1, {"bye": pb.Bye()})
    assert not outgrown(service)


def test_the_first_contributing_workers_learning_rate_rules_the_round() -> None:
    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=[0.5, 7.0][worker]))
        fleet_.init_worker()
        optimizer.minimize(weight.sum())
        return weight.detach().clone()

    for got in run_job(body, 2, 1):
        assert torch.equal(got, torch.full((2,), -0.5))


def test_gradient_accumulation_and_clipping_and_closures() -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        for step in range(4):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss_of(model, 2 * step, worker).backward()
            loss_of(model, 2 * step + 1, worker).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 99, worker)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
        return values(model)

    model = copy.deepcopy(TEMPLATE)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        total: list[torch.Tensor] = []
        for worker in range(2):
            plain.zero_grad()
            loss_of(model, 2 * step, worker).backward()
            loss_of(model, 2 * step + 1, worker).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # each worker clips its own
            grads = [p.grad.clone() for p in model.parameters()]
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad / 2
        plain.step()
    average_into(model, [lambda w=w: loss_of(model, 99, w) for w in range(2)])
    plain.step()
    for got in run_job(body, 2, 2):
        assert_close(got, values(model))


CLEAR: dict[str, Callable[[torch.optim.Optimizer, torch.optim.Optimizer, torch.nn.Module], None]] = {
    "optimizer": lambda optimizer, inner, model: optimizer.zero_grad(),
    "optimizer to zeros": lambda optimizer, inner, model: optimizer.zero_grad(set_to_none=False),
    "inner": lambda optimizer, inner, model: inner.zero_grad(),
    "inner to zeros": lambda optimizer, inner, model: inner.zero_grad(set_to_none=False),
    "model": lambda optimizer, inner, model: model.zero_grad(),
    "model to zeros": lambda optimizer, inner, model: model.zero_grad(set_to_none=False),
    "by hand": lambda optimizer, inner, model: model.weight.grad.zero_(),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("clear", CLEAR)
def test_rows_accumulate_and_are_dropped_like_dense_gradients(clear: str, foreach: bool) -> None:
    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        inner = torch.optim.SGD(table.parameters(), lr=1.0, foreach=foreach)
        optimizer = fleet_.distributed_optimizer(inner)
        fleet_.init_worker()
        table(torch.tensor([1])).sum().backward()
        CLEAR[clear](optimizer, inner, table)
        # What was dropped must not count; what comes now, in two parts and without zero_grad between, must.
        table(torch.tensor([2, 3])).sum().backward()
        table(torch.tensor([3, 4])).sum().backward()
        torch.nn.utils.clip_grad_norm_(
            table.parameters(), 1e3
        )  # which adds up what belongs to one row, and must keep it
        optimizer.step()
        optimizer.step()  # nobody cleared: as in torch, the same gradient once more
        return table(torch.tensor([1, 2, 3, 4])).detach()[:, 0]

    (got,) = run_job(body, 1, 2)
    assert got.tolist() == [0.0, -2.0, -4.0, -2.0]


def test_backward_through_a_graph_from_before_the_step_is_an_error_as_in_torch() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet_.init_worker()
        loss = (weight**3).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()

    run_job(body, 1)


@pytest.mark.parametrize("numel", [2, COPIED], ids=["small", "large"])
@pytest.mark.parametrize("delivered", [0, 1, 2])
def test_an_interrupted_step_is_finished_first(delivered: int, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop button of a notebook, in the middle of a push: with none, one or all of the servers reached. Whatever
    becomes of the gradients then, the step that is finished is that of before."""
    from fleet.ps.worker.connection import Connection, PendingRequest

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(2)]
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(params, lr=1.0))
        fleet_.init_worker()
        start, reached = Connection.start, [0]

        def interrupted(client: Connection, frame: object, what: str) -> PendingRequest:
            if reached[0] == delivered:
                raise KeyboardInterrupt
            reached[0] += 1
            return start(client, frame, what)

        def result(pending: PendingRequest) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Connection, "start", interrupted)
            patch.setattr(PendingRequest, "result", result)
            with pytest.raises(KeyboardInterrupt):
                optimizer.minimize(params[0].sum() + params[1].sum())
        for param in params:
            assert param.grad is not None
            param.grad.fill_(7.0)
        optimizer.minimize(100 * params[0].sum() + 100 * params[1].sum())
        return [param.detach().clone() for param in params]

    (got,) = run_job(body, 1, 2)
    assert all(torch.equal(each, torch.full((numel,), -101.0)) for each in got)


def half_of_a_table(base: torch.Tensor) -> list[torch.nn.Parameter]:
    table = torch.nn.Embedding(4, 3, sparse=True, _weight=base)
    return [table.weight, torch.nn.Parameter(table.weight.detach()[2:])]


OVERLAPPING: dict[str, Callable[[torch.Tensor], list[torch.nn.Parameter]]] = {
    "the same": lambda base: [torch.nn.Parameter(base), torch.nn.Parameter(base)],
    "a part": lambda base: [torch.nn.Parameter(base), torch.nn.Parameter(base[1:3])],
    "a row": lambda base: [torch.nn.Parameter(base[:2]), torch.nn.Parameter(base[2:]), torch.nn.Parameter(base[1:3])],
    "a column": lambda base: [torch.nn.Parameter(base[:, :2]), torch.nn.Parameter(base[:, 1:])],
    "transposed": lambda base: [torch.nn.Parameter(base.t()), torch.nn.Parameter(base[3])],
    "other numbers": lambda base: [torch.nn.Parameter(base), torch.nn.Parameter(base.view(-1).view(torch.float64)[:1])],
    "of a table": half_of_a_table,
}


@pytest.mark.parametrize("share", OVERLAPPING.values(), ids=OVERLAPPING)
def test_parameters_that_share_elements_are_refused(share: Callable[[torch.Tensor], list[torch.nn.Parameter]]) -> None:
    model = torch.nn.Module()
    for index, param in enumerate(share(torch.zeros(4, 3))):
        model.register_parameter(f"p{index}", param)
    alone = Fleet(environ={})
    alone.init()
    with pytest.raises(UnsupportedError, match=r"'p\d' and 'p\d' share memory and are two parameters"):
        alone.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)


@pytest.mark.parametrize("collective", [False, True])
def test_lazy_modules_are_refused_before_their_first_batch(collective: bool) -> None:
    one_of_one = {"PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:1", "PADDLE_TRAINER_ID": "0"}
    normed = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LazyBatchNorm1d(affine=False))
    for model, name in ((torch.nn.LazyLinear(3), "weight"), (normed, "1.running_mean")):
        alone = Fleet(environ=one_of_one if collective else {})
        alone.init(is_collective=collective)
        if model is normed and not collective:  # buffers are each worker's own
            alone.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
            continue
        with pytest.raises(UnsupportedError, match=f"'{name}' has no shape yet"):
            alone.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        model(torch.zeros(2, 4))
        alone.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)


@pytest.mark.parametrize("servers", [1, 3])
def test_disjoint_parts_of_one_storage_are_parameters_like_others(servers: int) -> None:
    def make() -> list[torch.nn.Parameter]:
        flat = torch.arange(40.0)
        square = flat[4:36].view(8, 4)
        parts = [flat[:4], square[:4], square[4:, :2], square[4:, 2:3], square[4:, 3:], flat[36:37], flat[37:]]
        return [torch.nn.Parameter(part) for part in (*parts, torch.zeros(0))]

    def train(params: list[torch.nn.Parameter], step: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
        for scale in range(6):
            step(sum((param * index).square().sum() for index, param in enumerate(params)) * scale)  # type: ignore[arg-type]
        return [param.detach().clone() for param in params]

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        params = make()
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(params, lr=0.1))
        fleet_.init_worker()
        return train(params, optimizer.minimize)

    params = make()
    plain = torch.optim.Adam(params, lr=0.1)

    def step(loss: torch.Tensor) -> None:
        plain.zero_grad()
        loss.backward()
        plain.step()

    expected = train(params, step)
    for got in run_job(body, 1, servers):
        assert_close(got, expected, 1e-6)


STRATEGIES = {
    "sync": fleet.StrategyFactory.create_sync_strategy(),
    "narrow": fleet.StrategyFactory.create_sync_strategy(wire_dtype="bf16"),
    "half_async": fleet.StrategyFactory.create_half_async_strategy(),
    "merging": fleet.StrategyFactory.create_half_async_strategy(max_merge_var_num=3),
    "async": fleet.StrategyFactory.create_async_strategy(),
    "ssp": fleet.StrategyFactory.create_ssp_strategy(staleness=2),
    "geo": fleet.StrategyFactory.create_geo_strategy(update_frequency=2),
}


@pytest.mark.parametrize("mode", STRATEGIES)
@pytest.mark.parametrize(
    "convert", [lambda model: model.double(), lambda model: model[2].half()], ids=["all", "a part"]
)
def test_a_model_that_is_converted_in_a_running_job_is_told_so(convert: Callable[[Any], Any], mode: str) -> None:
    """And may be converted back."""

    def body(fleet_: Fleet, worker: int) -> None:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet_.distributed_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), STRATEGIES[mode], model=model
        )
        fleet_.init_worker()
        optimizer.minimize(loss_of(model, 0, 0))
        convert(model)
        which = next(name for name, param in model.named_parameters() if param.dtype != torch.float32)
        words = (
            rf"'{which}' was given another element type in a running job; expected torch.float32; got torch\.\w+\. Conv"
        )
        with pytest.raises(UnsupportedError, match=words):
            optimizer.minimize(sum(param.sum() for param in model.parameters()))  # type: ignore[arg-type]
        model.float()
        optimizer.minimize(loss_of(model, 1, 0))

    run_job(body, 1, 2)


def test_a_table_that_is_converted_in_a_running_job_is_told_so() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        model = torch.nn.Sequential(fleet.nn.Embedding(None, 3), torch.nn.Linear(3, 1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        ids = torch.tensor([1, 2])
        optimizer.minimize(model(ids).sum())
        model.double()
        with pytest.raises(UnsupportedError, match=r"'0.weight' was given another element type in a running job"):
            model(ids)
        model.float()
        optimizer.minimize(model(ids).sum())

    run_job(body, 1)


def test_hooks_and_steps_of_the_wrapped_optimizer() -> None:
    def body(fleet_: Fleet, worker: int) -> list[str]:
        weight = torch.nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([weight], lr=1.0)
        calls: list[str] = []
        inner.register_step_pre_hook(lambda *_: calls.append("before"))
        inner.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer = fleet_.distributed_optimizer(inner)
        optimizer.register_step_post_hook(lambda *_: calls.append("wrapper"))
        fleet_.init_worker()
        optimizer.minimize(weight.sum())
        with pytest.raises(StateError, match="distributed_optimizer"):
            inner.step()
        with pytest.raises(UnsupportedError, match="param_groups"):
            optimizer.param_groups = []
        return calls

    (calls,) = run_job(body, 1)
    assert calls == ["before", "after", "wrapper", "before"]


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_a_hook_on_all_optimizers_sees_each_step_once(mode: str) -> None:
    """As in plain torch, of each of the user's optimizers, wherever these step."""

    def body(fleet_: Fleet, worker: int) -> tuple[list[str], list[float]]:
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        inner = [torch.optim.SGD([weights[0]], lr=1.0), torch.optim.Adagrad([weights[1]], lr=1.0)]
        optimizer = fleet_.distributed_optimizer(inner, STRATEGIES[mode])
        fleet_.init_worker()
        mine, calls = {*map(id, inner), id(optimizer)}, []

        def called(which: str) -> Any:
            return lambda stepped, *_: (
                calls.append(f"{which} {type(stepped).__name__}") if id(stepped) in mine else None
            )

        def halve(stepped: torch.optim.Optimizer, *_: Any) -> None:
            for group in stepped.param_groups if id(stepped) in mine else ():
                for param in group["params"]:
                    param.grad.mul_(0.5)

        handles = [
            register_optimizer_step_pre_hook(called("before")),
            register_optimizer_step_pre_hook(halve),
            register_optimizer_step_post_hook(called("after")),
        ]
        try:
            optimizer.minimize(weights[0].sum() + weights[1].sum())
        finally:
            for handle in handles:
                handle.remove()
        optimizer.register_step_pre_hook(lambda *_: ((), {}))
        with pytest.raises(UnsupportedError, match="a step hook cannot give"):
            optimizer.step()
        return calls, weights[0].tolist()

    ((calls, moved),) = run_job(body, 1)
    assert sorted(calls) == ["after Adagrad", "after SGD", "before Adagrad", "before SGD"]
    assert moved == [-0.5, -0.5]


def test_zero_grad_between_forward_and_backward() -> None:
    """``minimize`` does exactly that."""

    def body(fleet_: Fleet, worker: int) -> float:
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        loss = table(torch.tensor([5])).sum()
        optimizer.minimize(loss)
        return table(torch.tensor([5])).item()

    assert run_job(body, 1, 1) == [-1.0]


def test_parameters_without_gradient_on_one_worker_or_on_all() -> None:
    def loss(model: torch.nn.ModuleDict, worker: int) -> torch.Tensor:
        x = torch.ones(2, 3)
        return model["a"](x).sum() if worker == 0 else (2 * model["a"](x)).sum() + model["b"](x).sum()

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(HEADS)
        model["c"] = torch.nn.Linear(3, 1)  # no gradient anywhere
        model["c"].load_state_dict(HEADS["a"].state_dict())
        optimizer = fleet_.distributed_optimizer(
            torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1), model=model
        )
        fleet_.init_worker()
        for _ in range(3):
            optimizer.minimize(loss(model, worker))
        return values(model)

    model = copy.deepcopy(HEADS)
    plain = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        average_into(model, [lambda w=w: loss(model, w) for w in range(2)])
        plain.step()
    expected = [*values(model), *values(HEADS["a"])]
    for got in run_job(body, 2, 3):
        assert_close(got, expected)


def test_uneven_data() -> None:
    """A worker that runs out leaves the round; the mean is then over those that are left."""
    steps = [3, 6]

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        for step in range(steps[worker]):
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    model = copy.deepcopy(TEMPLATE)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    ends: dict[int, list[torch.Tensor]] = {}
    for step in range(max(steps)):
        present = [w for w in range(2) if step < steps[w]]
        average_into(model, [lambda s=step, w=w: loss_of(model, s, w) for w in present])
        plain.step()
        for worker in range(2):
            if step + 1 == steps[worker]:
                ends[worker] = values(model)
    for worker, got in enumerate(run_job(body, 2, 2)):
        assert_close(got, ends[worker])


def test_a_slow_starter_is_waited_for() -> None:
    first_is_in = threading.Event()

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        if worker == 1:
            assert first_is_in.wait(30)
            time.sleep(0.3)  # worker 0 is in its first round by now, and waits there
        fleet_.init_worker()
        first_is_in.set()
        for step in range(3):
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    model = copy.deepcopy(TEMPLATE)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        average_into(model, [lambda s=step, w=w: loss_of(model, s, w) for w in range(2)])
        plain.step()
    for got in run_job(body, 2, 2):
        assert_close(got, values(model))


def test_workers_without_any_step() -> None:
    def body(fleet_: Fleet, worker: int) -> int:
        _start_only(fleet_)
        return fleet_.resume_step()

    assert run_job(body, 3, 2) == [0, 0, 0]


def _start_only(fleet_: Fleet) -> None:
    model = copy.deepcopy(TEMPLATE)
    fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet_.init_worker()


def test_memory_formats_and_shapes() -> None:
    """A parameter that does not lie row by row in memory, one without dimensions, an empty one."""

    def make() -> list[torch.nn.Parameter]:
        draw = torch.Generator().manual_seed(1)
        image = torch.randn(2, 3, 4, 5, generator=draw).contiguous(memory_format=torch.channels_last)
        return [torch.nn.Parameter(t) for t in (image, torch.tensor(2.0), torch.empty(0, 3), torch.randn(3, 2).t())]

    start = make()

    def losses(params: list[torch.nn.Parameter]) -> torch.Tensor:
        return (params[0] ** 3).sum() + params[1] ** 2 + params[2].sum() + (params[3] ** 2).sum()

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(p.detach().clone()) for p in start]
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(params, lr=0.1))
        fleet_.init_worker()
        for _ in range(3):
            optimizer.minimize(losses(params))
        assert params[0].is_contiguous(memory_format=torch.channels_last)
        return [p.detach() for p in params]

    params = [torch.nn.Parameter(p.detach().clone()) for p in start]
    plain = torch.optim.Adam(params, lr=0.1)
    for _ in range(3):
        plain.zero_grad()
        losses(params).backward()
        plain.step()
    for got in run_job(body, 2, 3):
        assert_close(got, [p.detach() for p in params])


def test_the_random_state_is_not_touched() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    (_,) = run_job(lambda fleet_, worker: _start_only(fleet_), 1, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_sixty_four_workers_on_one_server_over_grpc(free_endpoints: Callable[[int], list[str]]) -> None:
    """Their pulls park without holding a thread: the server has twelve."""
    from fleet.ps.wire.grpc_server import GrpcNetwork

    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet_.init_worker()
        for _ in range(3):
            optimizer.minimize(weight.sum() * worker)
        return weight.detach().clone()

    job = Job(body, 64, network=GrpcNetwork(threads=12), endpoints=free_endpoints(1))
    for got in job.run():
        assert torch.equal(got, torch.full((3,), -3 * 31.5))


class SeesPushes(LoopbackNetwork):
    """Notes the files of the package that a push has come through when it reaches the transport."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[list[str]] = []

    def connect(self, endpoint: Endpoint) -> Any:
        channel: Any = super().connect(endpoint)
        start = channel.start

        def noting(frame: Frame, *args: Any, **options: Any) -> Any:
            if frame.message.HasField("push"):
                self.ways.append(self.way())
            return start(frame, *args, **options)

        channel.start = noting
        return channel

    @staticmethod
    def way() -> list[str]:
        package, caller = Path(fleet.__file__).parent, sys._getframe()
        files: list[str] = []
        while caller := caller.f_back:  # type: ignore[assignment]
            file = Path(caller.f_code.co_filename)
            if package in file.parents and file.relative_to(package).as_posix() not in files:
                files.append(file.relative_to(package).as_posix())
        return files[::-1]


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_gradient_passes_five_files_to_the_transport(mode: str) -> None:
    def body(fleet_: Fleet, _worker: int) -> None:
        model = torch.nn.Sequential(fleet.nn.Embedding(10, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer(optimizer, MODES[mode](), model=model)
        fleet_.init_worker()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        fleet_.stop_worker()

    network = SeesPushes()
    Job(body, network=network).run()
    worker = [f"ps/worker/{name}.py" for name in ("runtime", "step", "push", "connection")]
    assert network.ways == [["optimizer.py", *worker]]


def test_a_step_whose_answer_never_came_is_not_taken_for_another() -> None:
    """The server has it, the replies got lost until the worker gave up: going on repeats it, and loses no later one."""
    network = FaultyNetwork(LoopbackNetwork())

    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet_.init_worker()
        network.add(Fault(Action.DROP_REPLY, kind="push", step=1, times=None))
        with pytest.raises(DeadlineError, match="push of step 1"):
            optimizer.minimize(weight.sum())
        network.clear()
        optimizer.minimize(100 * weight.sum())
        return weight.detach().clone()

    environ = {**PATIENT, "FLAGS_rpc_retry_times": "0", "FLEET_HEARTBEAT_S": "0.01"}
    (got,) = run_job(body, 1, network=network, environ=environ)
    assert torch.equal(got, torch.full((2,), -101.0))


class _Interrupts:
    """Sends the signal that Ctrl-C sends, at the n-th line that this thread runs of Fleet: of the worker, and of the
    server, which a job of one process runs here as well. Python hears of none where a ``with`` begins or ends."""

    def __init__(self, at: int, within: str = "", number: int = signal.SIGINT) -> None:
        self._left = at
        self._number = number
        self._within = f"{Path(fleet.__file__).parent}/{within}"

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._within):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith("with "):
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(self._number)
        return self


def _raise(*_: object) -> None:
    """Handle a signal as Python handles a Ctrl-C."""
    raise KeyboardInterrupt


@pytest.fixture
def _handled() -> Iterator[None]:
    """Let the signals of a script, or of a library, raise as that of a Ctrl-C does."""
    before = {number: signal.signal(number, _raise) for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))


def _error_of(model: torch.nn.Module) -> torch.Tensor:
    """Another one after each step, so that it matters on which values a gradient was computed."""
    return (model(torch.tensor([0, 1, 1, 3])) - torch.tensor([[1.0], [2.0], [3.0], [4.0]])).square().mean()


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


@functools.cache
def _after(steps: int) -> list[torch.Tensor]:
    """The values after so many steps of plain torch."""
    model = _small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        sgd.zero_grad()
        _error_of(model).backward()
        sgd.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize("apart", [397, pytest.param(29, marks=pytest.mark.slow)])
def test_an_interruption_anywhere_in_init_worker_lets_it_be_called_again(apart: int) -> None:
    at, is_hit = 1, True
    while is_hit:
        alone = Fleet(environ={})
        alone.init()
        model = _small_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = alone.distributed_optimizer(sgd, model=model)
        is_hit = False
        before = sys.gettrace()
        sys.settrace(_Interrupts(at))
        try:
            alone.init_worker()
        except KeyboardInterrupt:
            is_hit = True
        finally:
            sys.settrace(before)
        if is_hit:
            with suppress(StateError):  # heard when all was done
                alone.init_worker()
        optimizer.minimize(_error_of(model))
        learnt = list(alone.state_dict(model).values())
        alone.stop_worker()
        assert max(map(_largest_difference, learnt, _after(1))) < 1e-6, at
        at += apart
    assert at > 10 * apart, "it has more lines"


@pytest.mark.parametrize("strategy", ["sync", "half-async", "ssp", "geo"])
@pytest.mark.parametrize(
    ("first", "apart", "within", "number"),
    [
        (1, 199, "", signal.SIGINT),
        (2, 43, "ps/worker/", signal.SIGINT),
        (4, 199, "", signal.SIGUSR1),
        pytest.param(3, 17, "", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(5, 17, "", signal.SIGCHLD, marks=pytest.mark.slow),
    ],
)
@pytest.mark.pairs(1)
@pytest.mark.usefixtures("_handled")
def test_an_interruption_anywhere_in_a_step_counts_it_once(
    strategy: str, first: int, apart: int, within: str, number: int
) -> None:
    """Or not at all, where it was not yet on its way: lines so far apart are tried, of the worker and the server."""
    at, is_hit = first, True
    while is_hit:
        alone = Fleet(environ={})
        alone.init()
        model = _small_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = alone.distributed_optimizer(sgd, MODES[strategy](), model=model)
        alone.init_worker()
        optimizer.minimize(_error_of(model))
        is_hit = False
        before = sys.gettrace()
        sys.settrace(_Interrupts(at, within, number))
        try:
            optimizer.zero_grad()
            _error_of(model).backward()
            optimizer.step()
        except KeyboardInterrupt:
            is_hit = True
        finally:
            sys.settrace(before)
        for _ in range(2):
            optimizer.minimize(_error_of(model))
        alone.barrier_worker()
        learnt, steps = list(alone.state_dict(model).values()), alone.resume_step()
        alone.stop_worker()
        assert steps in ((3, 4) if is_hit else (4,)), at
        assert max(map(_largest_difference, learnt, _after(steps))) < 1e-6, (at, steps)
        at += apart
    assert at > first + 2 * apart, "a step has more lines"


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
@pytest.mark.usefixtures("_handled")
@pytest.mark.pairs(2)
def test_an_interruption_anywhere_in_a_prefetch_leaves_nothing_under_way(number: int, device: str | None) -> None:
    """Nor a thread: lines so far apart are tried, of its loop and of its end."""
    alone = Fleet(environ={})
    alone.init()
    table = fleet.nn.Embedding(9, 1)
    optimizer = alone.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    alone.init_worker()
    at, is_hit = 1, True
    while is_hit:
        is_hit = False
        before = sys.gettrace()
        sys.settrace(_Interrupts(at, "ps/worker/prefetch.py", number))
        try:
            for ids in alone.prefetch([torch.tensor([n]) for n in range(3)], lambda ids: {table: ids}, device=device):
                optimizer.minimize(table(ids).sum())
        except KeyboardInterrupt:
            is_hit = True
        finally:
            sys.settrace(before)
        alone.summary()  # and whatever was left to the next call is done
        assert not any(under_way(alone)), at
        assert not any(each.name == "fleet-look-ahead" for each in threading.enumerate()), at
        at += 5
    assert at > 99, "it has more lines"
    alone.stop_worker()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD])
@pytest.mark.usefixtures("_handled")
def test_what_holds_signals_back_lets_them_through_behind(number: int) -> None:
    """Once, however deep; an error of the work comes along; and a handler that is set inside stays."""
    before, done = signal.getsignal(number), []

    @uninterrupted()
    def work() -> None:
        with uninterrupted():
            signal.raise_signal(number)
            done.append("inner")
        done.append("outer")
        raise ValueError

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert done == ["inner", "outer"]
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(number) is before
    try:
        with uninterrupted():
            signal.signal(number, signal.SIG_IGN)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("first", "then"), [(signal.SIGALRM, signal.SIGUSR1), (signal.SIGUSR1, signal.SIGALRM)])
@pytest.mark.usefixtures("_handled")
def test_a_signal_that_was_held_back_is_heard_though_another_comes(first: int, then: int) -> None:
    """At any line behind the work, but where the first one's handler is being called: there Python has it so too."""
    before = {number: signal.getsignal(number) for number in (first, then)}
    heard: list[int] = []
    at, left = 0, -1
    is_behind = False

    def hears(number: int, _: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("interruption.py"):
            return None
        if event == "line" and is_behind and "told" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            left -= 1
            if left == 0:
                signal.raise_signal(then)
        return trace

    def work() -> None:
        nonlocal is_behind
        with uninterrupted():
            signal.raise_signal(first)
            is_behind = True

    own = sys.gettrace()
    try:
        while left <= 0:
            for number in before:
                signal.signal(number, hears)
            at, left, is_behind = at + 1, at + 1, False
            heard.clear()
            sys.settrace(trace)
            try:
                with pytest.raises(KeyboardInterrupt):
                    work()
            finally:
                sys.settrace(own)
            assert sorted(heard) == sorted([first, then] if left <= 0 else [first]), at
            assert all(signal.getsignal(number) is hears for number in before), at
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert at > 9, "it has more lines"


@pytest.mark.parametrize("backend", ["servers", "all_reduce", "collective"])
def test_the_optimizer_of_a_job_is_not_made_anew_from_its_class(backend: str) -> None:
    """PyKEEN's training begins so, whatever optimizer it was given; it takes the one that is put there later."""
    rank = {"PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:6170", "PADDLE_TRAINER_ID": "0"}
    alone = Fleet(environ=rank if backend == "collective" else {})
    alone.init(is_collective=backend == "collective")
    strategy = fleet.StrategyFactory.create_sync_strategy(dense=backend) if backend != "collective" else None
    params = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = alone.distributed_optimizer(torch.optim.SGD(params, lr=1.0), strategy)
    for given, options in [
        ((), {}),
        ((), {"params": params, "lr": 0.1}),
        ((params,), {}),
        ((params, 0.1), {}),
        ((params, 0.1, (0.9, 0.99), 1e-8), {"foreach": None}),
    ]:
        with pytest.raises(UnsupportedError, match=r"made anew from its class.*fleet\.distributed_optimizer\(\)"):
            type(optimizer)(*given, **options)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_optimizer_of_a_job_is_not_copied(copied: Callable[[Any], Any]) -> None:
    """A copy would be none of the job's, and lack what it was made of."""
    alone = Fleet(environ={})
    alone.init()
    optimizer = alone.distributed_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        copied(optimizer)
