"""What a script writes into parameters by itself, between two steps, has the result that it has in plain torch."""

from __future__ import annotations

import copy
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dying import DyingJob, every
from faults import Action, Fault, FaultyNetwork
from harness import PATIENT, SOON, Job, assert_close, run_job, until, values
from inside import connections, flush, leave
from patience import PATIENCE_S
from test_parity_dense import OPTIMIZERS

from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.errors import ConfigurationError, DeadlineError, ProtocolError, UnsupportedError
from fleet.nn import Embedding
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.replacement import Replacement
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.worker import connection
from fleet.ps.worker.trained_model import MANY, TrainedModel
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.strategy.parameter_server import StrategyFactory

STEPS = 4

Edit = Callable[[torch.nn.Module, int], Any]


class Net(torch.nn.Module):
    """A convolution, for memory that may be laid out in other ways, and a parameter that is in no order of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.line = torch.nn.Linear(12, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.turned = torch.nn.Parameter(torch.randn(4, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.line(self.conv(x).flatten(1))) @ self.turned


def _template() -> torch.nn.Module:
    torch.manual_seed(5)
    return Net()


#: Made once: the threads of a job share torch's random state.
TEMPLATE = _template()
OTHER = {name: value * 0.5 + 0.125 for name, value in TEMPLATE.state_dict().items()}


def loss_of(model: torch.nn.Module, step: int, worker: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step * 100 + worker)
    return model(torch.randn(6, 2, 4, 4, generator=draw)).square().mean()


def drawn(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


@torch.no_grad()
def weights_clamp(model: torch.nn.Module, step: int) -> None:
    for param in model.parameters():
        param.clamp_(-0.2, 0.2)


def data_clamp(model: torch.nn.Module, step: int) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def zero_one(model: torch.nn.Module, step: int) -> None:
    model.line.weight[step % 5].zero_()


def init_again(model: torch.nn.Module, step: int) -> None:
    torch.nn.init.normal_(model.line.weight, generator=drawn(step))
    torch.nn.init.constant_(model.turned, 0.25)


def other_memory(model: torch.nn.Module, step: int) -> None:
    model.line.weight.data = torch.randn(5, 12, generator=drawn(step))
    model.conv.weight.data = model.conv.weight.detach().clone()  # the same values


def load_all(model: torch.nn.Module, step: int) -> None:
    model.load_state_dict(OTHER)


def load_a_part(model: torch.nn.Module, step: int) -> None:
    model.line.load_state_dict({"weight": OTHER["line.weight"] + step, "bias": OTHER["line.bias"]})


def load_and_assign(model: torch.nn.Module, step: int) -> None:
    """As ``load_state_dict(…, assign=True)`` does with tensors that are to be the very parameters."""
    for name, param in model.named_parameters():
        param.data = OTHER[name].clone()


def vector(model: torch.nn.Module, step: int) -> None:
    params = [*model.line.parameters(), *model.norm.parameters()]
    flat = torch.nn.utils.parameters_to_vector(params)
    torch.nn.utils.vector_to_parameters(flat.detach() * 0.75, params)


def numpy_(model: torch.nn.Module, step: int) -> None:
    model.line.bias.detach().numpy()[2] = step


def nothing_new(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2).mul_(0.5)


def not_a_number(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        model.norm.bias[0] = float("nan")
        model.norm.bias[1] = -0.0


def channels_last(model: torch.nn.Module, step: int) -> None:
    model.to(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)
    with torch.no_grad():
        model.conv.weight[0] += 0.5


def swap_in_and_out(model: torch.nn.Module, step: int) -> None:
    there = copy.deepcopy(model.state_dict())
    model.load_state_dict(OTHER)
    model.load_state_dict(there)


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        weights_clamp,
        data_clamp,
        zero_one,
        init_again,
        other_memory,
        load_all,
        load_a_part,
        load_and_assign,
        vector,
        numpy_,
        nothing_new,
        not_a_number,
        channels_last,
        swap_in_and_out,
    )
}

#: Where a job of one worker computes what one process does.
EXACT = {
    "sync": StrategyFactory.create_sync_strategy,
    "ssp": StrategyFactory.create_ssp_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
}


def alike(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def trained_alone(make: Any, edit: Edit, when: str) -> list[list[torch.Tensor]]:
    model = copy.deepcopy(TEMPLATE)
    optimizer = make(list(model.parameters()))
    return [train(model, optimizer, edit, when, step) for step in range(STEPS)]


def train(model: torch.nn.Module, optimizer: Any, edit: Edit, when: str, step: int) -> list[torch.Tensor]:
    """One step; what is there after it."""
    if when == "before":
        edit(model, step)
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if when == "after backward":
        edit(model, step)
    optimizer.step()
    return values(model)


def trained_in_a_job(make: Any, strategy: Any, edit: Edit, when: str, servers: int = 2) -> list[list[torch.Tensor]]:
    def body(fleet: Fleet, _: int) -> list[list[torch.Tensor]]:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet.distributed_optimizer(make(list(model.parameters())), strategy(), model=model)
        fleet.init_worker()
        return [train(model, optimizer, edit, when, step) for step in range(STEPS)]

    return run_job(body, 1, servers)[0]


@pytest.mark.pairs
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", EXACT)
def test_an_edit_has_the_result_of_plain_torch(mode: str, edit: str) -> None:
    make, when = OPTIMIZERS["adam"], "before" if edit != "vector" else "after backward"
    expected = trained_alone(make, EDITS[edit], when)
    got = trained_in_a_job(make, EXACT[mode], EDITS[edit], when)
    assert all(alike(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_s_state_stays(name: str) -> None:
    make = OPTIMIZERS[name]
    expected = trained_alone(make, data_clamp, "after backward")
    got = trained_in_a_job(make, StrategyFactory.create_sync_strategy, data_clamp, "after backward")
    assert all(alike(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def test_many_small_parameters_and_one_that_is_cut() -> None:
    """Small ones are compared by compiled code, in blocks of two servers."""
    numbers = range(MANY + 50)

    def params() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.full((3 + n % 3,), float(n))) for n in numbers] + [
            torch.nn.Parameter(torch.ones(300, 100, dtype=torch.float64)),
            torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
        ]

    def train_all(params: list[torch.nn.Parameter], optimizer: Any) -> list[torch.Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            sum((param * (1 + step)).double().sum() for param in params).backward()
            for param in params[step::40]:
                param.data[-1] = step
            params[-2].data[299] += 1
            optimizer.step()
        return [param.detach().clone() for param in params]

    def body(fleet: Fleet, _: int) -> list[torch.Tensor]:
        there = params()
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(there, lr=0.1))
        fleet.init_worker()
        return train_all(there, optimizer)

    alone = params()
    expected = train_all(alone, torch.optim.Adam(alone, lr=0.1))
    assert alike(run_job(body, 1, 2)[0], expected)


# ---------------------------------------------------------------- where the servers are ahead


#: Gradients that are the same wherever they are computed, so that late ones give the same sums.
SLOPE = torch.arange(12.0).reshape(3, 4)

AHEAD = {
    **EXACT,
    "async": StrategyFactory.create_async_strategy,
    "dc-asgd": lambda: StrategyFactory.create_async_strategy(dc_asgd_lambda=0.5),
    "half-async, merged": lambda: StrategyFactory.create_half_async_strategy(),
}


@pytest.mark.parametrize("mode", AHEAD)
def test_every_step_before_an_edit_is_before_it_and_every_later_one_after(mode: str) -> None:
    environ = {**PATIENT, "FLAGS_communicator_max_merge_var_num": "3" if "merged" in mode else "1"}

    def body(fleet: Fleet, _: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(3, 4))
        model = torch.nn.ParameterList([weight])
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), AHEAD[mode](), model=model)
        fleet.init_worker()
        for step in range(10):
            optimizer.minimize((weight * SLOPE).sum())
            if step in (3, 7):
                weight.data[1] = 100.0
        weight.data[2, 2] = 7.0
        (state,) = fleet.state_dict(model).values()
        return state

    expected = -10 * SLOPE
    expected[1] = 100 - 2 * SLOPE[1]
    expected[2, 2] = 7
    (got,) = run_job(body, 1, 1, environ=environ)
    assert_close([got], [expected])


@pytest.mark.parametrize("mode", ["async", "half-async", "ssp", "dc-asgd"])
def test_what_others_have_trained_meanwhile_stays(mode: str) -> None:
    """Worker 0 changes a row of a matrix whose other rows worker 1 has trained since worker 0 looked at them."""
    trained, edited = threading.Event(), threading.Event()

    def body(fleet: Fleet, index: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(3, 4))
        model = torch.nn.ParameterList([weight])
        strategy = StrategyFactory.create_ssp_strategy(staleness=50) if mode == "ssp" else AHEAD[mode]()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy, model=model)
        fleet.init_worker()
        fleet.barrier_worker()
        if index == 1:
            for _ in range(5):
                optimizer.minimize((weight * SLOPE).sum())
            flush(fleet)
            trained.set()
            assert edited.wait(PATIENCE_S)
            optimizer.minimize((weight * SLOPE).sum())
        else:
            assert trained.wait(PATIENCE_S)
            weight.data[1] = 100.0
            flush(fleet)
            torch.testing.assert_close(weight[1], torch.full((4,), 100.0))
            edited.set()
        fleet.barrier_worker()
        (state,) = fleet.state_dict(model).values()
        return state

    expected = -6 * SLOPE
    expected[1] = 100 - SLOPE[1]
    for got in run_job(body, 2, 1):
        if mode == "dc-asgd":  # worker 1 has not seen the edit when it computes its last gradient
            got[1] = expected[1]
        assert_close([got], [expected])


def test_an_edit_is_what_delay_compensation_takes_a_worker_to_have() -> None:
    """Else it would take what the script has changed for what others have trained."""

    def body(fleet: Fleet, _: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(3, 4))
        strategy = StrategyFactory.create_half_async_strategy(dc_asgd_lambda=0.5)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        fleet.init_worker()
        for _ in range(3):
            weight.data += 1
            optimizer.minimize((weight * SLOPE).sum())
        return weight.detach().clone()

    assert_close(run_job(body), [3 - 3 * SLOPE])


# ---------------------------------------------------------------- several workers


@pytest.mark.parametrize("mode", ["sync", "ssp", "half-async"])
def test_the_first_worker_s_edits_count_for_all(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """From the next step on; others are told once that theirs do not."""

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(torch.zeros(3, 4))
        model = torch.nn.ParameterDict({"w": weight})
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), AHEAD[mode](), model=model)
        fleet.init_worker()
        seen = []
        for _ in range(3):
            weight.data[index] = 10.0 * (index + 1)
            fleet.barrier_worker()
            optimizer.minimize((weight * SLOPE).sum())
            fleet.barrier_worker()
            (state,) = fleet.state_dict(model).values()
            seen.append(state)
            fleet.barrier_worker()
        return seen

    together = 1 if mode == "sync" else 2
    for got in run_job(body, 2, 2):
        for step, state in enumerate(got, 1):
            expected = -step * together * SLOPE
            expected[0] = 10 - together * SLOPE[0]
            assert_close([state], [expected])
    told = [record.getMessage() for record in caplog.records if "by itself" in record.getMessage()]
    assert len(told) == 1
    assert "worker 1: the script has changed 'w' by itself" in told[0]


@pytest.mark.parametrize("workers", [2, 3])
def test_when_all_workers_clamp_the_job_is_that_of_one_that_clamps(workers: int) -> None:
    make = OPTIMIZERS["sgd-momentum"]

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet.distributed_optimizer(make(list(model.parameters())), model=model)
        fleet.init_worker()
        for step in range(STEPS):
            data_clamp(model, step)
            optimizer.minimize(loss_of(model, step, index))
        return values(model)

    model = copy.deepcopy(TEMPLATE)
    optimizer = make(list(model.parameters()))
    for step in range(STEPS):
        data_clamp(model, step)
        optimizer.zero_grad()
        for worker in range(workers):
            (loss_of(model, step, worker) / workers).backward()
        optimizer.step()
    for got in run_job(body, workers, 2):
        assert_close(got, values(model))


def test_in_geo_an_edit_is_a_worker_s_part_of_the_change() -> None:
    """As a step of that size would be: half of what it differs by from the servers goes there at a time."""

    def body(fleet: Fleet, index: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(4))
        model = torch.nn.ParameterList([weight])
        strategy = StrategyFactory.create_geo_strategy(1)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy, model=model)
        fleet.init_worker()
        weight.data[index] = 8.0
        fleet.barrier_worker()
        weight.data[2] += 4.0 * index
        optimizer.minimize((weight * 0).sum())
        fleet.barrier_worker()
        (state,) = fleet.state_dict(model).values()
        return state

    for got in run_job(body, 2, 1):
        assert_close([got], [torch.tensor([6.0, 6.0, 2.0, 0.0])])


# ---------------------------------------------------------------- before everything else


def by_checkpoint(fleet: Fleet, model: torch.nn.Module, where: Any) -> torch.Tensor:
    fleet.save_persistables(where / "saved")
    with torch.no_grad():
        model.w.fill_(-1)
    fleet.load_persistables(where / "saved")
    return model.w.detach()


def by_serving(fleet: Fleet, model: torch.nn.Module, where: Any) -> torch.Tensor:
    fleet.save_inference_model(str(where / "served"), model)
    return fleet.load_inference_model(str(where / "served"))["w"]


def by_state_dict(fleet: Fleet, model: torch.nn.Module, where: Any) -> torch.Tensor:
    return fleet.state_dict(model)["w"]


def by_another_thread(fleet: Fleet, model: torch.nn.Module, where: Any) -> torch.Tensor:
    """It sees what there was after the last step: it does not know whether a script has done with its changes."""
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(fleet.state_dict, model).result()["w"]
    assert_close([seen], [torch.zeros(3)])
    return fleet.state_dict(model)["w"]


def by_newcomers(fleet: Fleet, model: torch.nn.Module, where: Any) -> torch.Tensor:
    model.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    return model.w.detach()


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
@pytest.mark.parametrize("look", [by_checkpoint, by_serving, by_state_dict, by_another_thread, by_newcomers])
def test_an_edit_comes_before_every_other_call(look: Any, mode: str, tmp_path: Path) -> None:
    if look is by_newcomers and mode != "sync":
        pytest.skip("parameters join where workers share steps")

    def body(fleet: Fleet, _: int) -> torch.Tensor:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.zeros(3))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([model.w], lr=1.0), AHEAD[mode](), model=model)
        object.__setattr__(model, "optimizer", optimizer)
        fleet.init_worker()
        model.w.data[1] = 5.0
        return look(fleet, model, tmp_path).clone()

    (got,) = run_job(body)
    assert_close([got], [torch.tensor([0.0, 5.0, 0.0])])


def test_what_others_load_wins_over_an_edit_that_came_before() -> None:
    loaded = threading.Event()

    def body(fleet: Fleet, index: int) -> torch.Tensor:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet.init_worker()
        fleet.barrier_worker()
        if index == 1:
            fleet.load_state_dict(model, {"weight": torch.tensor([[3.0, 4.0]])})
            loaded.set()
        else:
            assert loaded.wait(PATIENCE_S)
            model.weight.data[0, 1] = 9.0  # after it, in this job's order of things
        optimizer.minimize(0 * model(torch.ones(1, 2)).sum())
        return model.weight.detach().clone()

    for got in run_job(body, 2, 1):
        assert_close([got], [torch.tensor([[3.0, 9.0]])])


def test_another_shape_is_refused_by_name() -> None:
    def body(fleet: Fleet, _: int) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet.init_worker()
        model.weight.data = torch.zeros(2, 2)
        with pytest.raises(UnsupportedError, match=r"'weight' was given another shape .* \(1, 2\); got \(2, 2\)"):
            optimizer.step()
        model.weight.data = torch.zeros(1, 2)
        optimizer.step()

    run_job(body)


#: What a script makes of a parameter of a running job, and what the refusal names.
CONVERTED: dict[str, tuple[Callable[[torch.nn.Module], Any], str]] = {
    "double": (torch.nn.Module.double, r"'weight' was given another element type .* torch.float32; got torch.float64"),
    "half": (torch.nn.Module.half, r"'weight' was given another element type .* torch.float32; got torch.float16"),
    "longer": (
        lambda model: setattr(model.weight, "data", torch.zeros(1, 5)),
        r"'weight' was given another shape .* \(1, 2\); got \(1, 5\)",
    ),
    "turned": (
        lambda model: setattr(model.weight, "data", torch.zeros(2, 1)),
        r"'weight' was given another shape .* \(1, 2\); got \(2, 1\)",
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("mode", ["sync", "half-async", "async", "ssp", "gba", "auto", "geo-1", "geo-3"])
@pytest.mark.parametrize("stops", [False, True])
def test_what_a_parameter_cannot_become_is_named_by_whatever_call_is_next(
    mode: str, name: str, stops: bool, tmp_path: Path
) -> None:
    make = {
        "sync": StrategyFactory.create_sync_strategy,
        "half-async": StrategyFactory.create_half_async_strategy,
        "async": StrategyFactory.create_async_strategy,
        "ssp": StrategyFactory.create_ssp_strategy,
        "gba": StrategyFactory.create_gba_strategy,
        "auto": StrategyFactory.create_auto_strategy,
        "geo-1": lambda: StrategyFactory.create_geo_strategy(1),
        "geo-3": lambda: StrategyFactory.create_geo_strategy(3),
    }[mode]
    convert, says = CONVERTED[name]

    def body(fleet: Fleet, _: int) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), make(), model=model)
        fleet.init_worker()
        optimizer.minimize(model(torch.ones(1, 2)).sum())
        before = [param.data for param in model.parameters()]
        convert(model)
        for call in (
            fleet.barrier_worker,
            lambda: fleet.state_dict(model),
            lambda: fleet.save_persistables(str(tmp_path / "saved")),
        ):
            with pytest.raises(UnsupportedError, match=says):
                call()
        if stops:
            with pytest.raises(UnsupportedError, match=says):
                fleet.stop_worker()
        else:
            for param, data in zip(model.parameters(), before, strict=True):
                param.data = data
            optimizer.minimize(model(torch.ones(1, 2)).sum())

    if stops:
        with pytest.raises(AssertionError, match="what it still had to send did not arrive"):
            run_job(body)
    else:
        run_job(body)


EVERY_MODE: dict[str, Callable[[], Any]] = {
    "sync": StrategyFactory.create_sync_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "ssp": StrategyFactory.create_ssp_strategy,
    "gba": StrategyFactory.create_gba_strategy,
    "auto": StrategyFactory.create_auto_strategy,
    "dc-asgd": lambda: StrategyFactory.create_half_async_strategy(dc_asgd_lambda=0.5),
    "dc-asgd-adaptive": lambda: StrategyFactory.create_half_async_strategy(dc_asgd_lambda=0.5, dc_asgd_adaptive=True),
    "geo-1": lambda: StrategyFactory.create_geo_strategy(1),
    "geo-3": lambda: StrategyFactory.create_geo_strategy(3),
}


class Masked(torch.nn.Module):
    """Adds infinities to what it scores, of which no gradient comes: a mask that is a parameter, and rows of one."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.nn.Parameter(torch.tensor([0.0, -torch.inf, 1.0]))
        self.table = torch.nn.Embedding(4, 3, sparse=True)
        self.fixed = torch.nn.Parameter(torch.tensor([torch.inf, -torch.inf, 2.0]), requires_grad=False)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(12.0).view(4, 3) / 10)
            self.table.weight[1, 2] = -torch.inf

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.table(ids) + self.mask, 1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_infinities_stay_what_they_are(mode: str, workers: int) -> None:
    """Nothing is made of the difference of two: workers do the same, in turns."""
    if workers == 2 and mode in ("gba", "auto"):
        pytest.skip("updates of several gradients, which workers in turns wait for")

    def train(model: torch.nn.Module, optimizer: Any) -> None:
        for _ in range(4):
            minimized = model(torch.tensor([0, 1, 1, 3]))[:, 0].sum()
            optimizer.zero_grad()
            minimized.backward()
            optimizer.step()

    def body(fleet: Fleet, worker: int) -> list[torch.Tensor]:
        model = Masked()
        optimizer = fleet.distributed_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), EVERY_MODE[mode](), model=model
        )
        fleet.init_worker()
        train(model, optimizer)
        fleet.barrier_worker()
        return [model.mask.detach().clone(), model.fixed.detach().clone(), fleet.state_dict(model)["table.weight"]]

    plain = Masked()
    train(plain, torch.optim.SGD(plain.parameters(), 0.1))
    expected = [plain.mask.detach(), plain.fixed.detach(), plain.table.weight.detach()]
    for got in run_job(body, workers, 2):
        if workers == 1:
            assert_close(got, expected)
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours.isinf(), theirs.isinf())
            assert not ours.isnan().any()


def whole(model: Any, value: float) -> None:
    with torch.no_grad():
        model.mask[1] = value


def row(model: Any, value: float) -> None:
    with torch.no_grad():
        model.table.weight[1, 2] = value


@pytest.mark.parametrize("edit", [whole, row])
@pytest.mark.parametrize(
    ("first", "then"), [(-torch.inf, 3.0), (-torch.inf, torch.inf), (torch.nan, 3.0), (3e38, -3e38)]
)
def test_geo_refuses_what_no_change_leads_to(edit: Callable[..., None], first: float, then: float) -> None:
    """What servers add to infinity is not a number."""

    def body(fleet: Fleet, _: int) -> None:
        model = Masked()
        edit(model, first)
        strategy = StrategyFactory.create_geo_strategy(1)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy, model=model)
        fleet.init_worker()
        edit(model, then)
        name = "'mask'" if edit is whole else "'table.weight', id 1"
        with pytest.raises(UnsupportedError, match=f"a value of {name} was changed from .* to .*in GEO servers add"):
            optimizer.step()
        edit(model, first)

    run_job(body)


# ---------------------------------------------------------------- what comes in between


class Interrupts:
    """Sends this process a Ctrl-C at the n-th line that this thread runs of these files of a worker."""

    FOLDERS: tuple[str, ...] = ("worker",)
    FILES: tuple[str, ...] = ("edits", "upload", "push", "step", "trained_model", "runtime")

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if path.parent.name not in self.FOLDERS or path.stem not in self.FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("first", [1, 12])
@pytest.mark.pairs(1)
def test_an_interruption_anywhere_loses_no_edit(mode: str, first: int) -> None:
    """Every 23rd line is tried, from two places on. A step that was interrupted counts once, or not at all."""
    at, is_hit = first, True
    tried = 0
    while is_hit:
        alone = Fleet(environ={})
        alone.init()
        weight = torch.nn.Parameter(torch.zeros(3))
        model = torch.nn.Module()
        model.weight, model.table = weight, torch.nn.Embedding(3, 1, sparse=True, _weight=torch.zeros(3, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = alone.distributed_optimizer(sgd, AHEAD[mode](), model=model)
        alone.init_worker()
        optimizer.minimize(-weight.sum())
        alone.barrier_worker()
        weight.data[0] = 10.0
        model.table.weight.data[2] = 30.0
        before = sys.gettrace()
        interrupts = Interrupts(at)
        sys.settrace(interrupts)
        try:
            optimizer.minimize(-weight.sum())
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        is_hit = interrupts.left <= 0
        weight.data[2] = 20.0
        state, rows = alone.state_dict(model).values()
        alone.stop_worker()
        assert rows.tolist() == [[0.0], [0.0], [30.0]], at
        steps = int(state[1].item())
        assert steps in ((1, 2) if is_hit else (2,)), (at, state)
        assert state.tolist() == [9.0 + steps, float(steps), 20.0], at
        at += 23
        tried += 1
    assert tried > 5


@pytest.mark.parametrize("action", [Action.DROP_REPLY, Action.DROP_REQUEST, Action.DUPLICATE])
def test_a_broken_line_changes_nothing(action: Action) -> None:
    network = FaultyNetwork(LoopbackNetwork(), Fault(action, kind="upload", skip=4, times=3))
    make = OPTIMIZERS["adam"]

    def body(fleet: Fleet, _: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet.distributed_optimizer(make(list(model.parameters())), model=model)
        fleet.init_worker()
        return [train(model, optimizer, data_clamp, "before", step) for step in range(STEPS)][-1]

    (got,) = run_job(body, 1, 2, network=network)
    assert len(network.struck) == 3
    assert alike(got, trained_alone(make, data_clamp, "before")[-1])


@pytest.mark.parametrize("journal_bytes", [None, 1])
def test_servers_that_are_killed_keep_what_was_edited(
    tmp_path: Path, journal_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.002)

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = fleet.distributed_optimizer(adam, model=model)
        fleet.init_worker()
        for step in range(STEPS):
            zero_one(model, step)
            optimizer.minimize(loss_of(model, step, index))
        return values(model)

    more = {} if journal_bytes is None else {"journal_bytes": journal_bytes}
    job = DyingJob(body, tmp_path, plan=every(3, 1), **more)
    got = job.run()
    assert job.kills > 8
    for ours, theirs in zip(got, run_job(body, 2, 2), strict=True):
        assert alike(ours, theirs)


def test_servers_take_edits_of_the_first_worker_that_fit_and_no_others() -> None:
    def body(fleet: Fleet, index: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(9))
        fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet.init_worker()
        (line,) = connections(fleet)
        marks, values_ = np.zeros(2, np.uint8), torch.zeros(0)
        marks[0] = 128
        wrong = {
            "come from worker 0": ([0], marks, torch.ones(1), 1),
            "of one block": ([0, 0], marks, torch.ones(1), 0),
            "a block this server does not have": ([5], marks, torch.ones(1), 0),
            "does not fit; expected a bit for each of 9": ([0], marks[:1], torch.ones(1), 0),
            "as many of float32 as are marked": ([0], marks, values_, 0),
            "does not fit; expected a bit for each": ([0], marks.astype(np.int64), torch.ones(1), 0),
            "got 2 x uint8, and 1 x torch.float64": ([0], marks, torch.ones(1, dtype=torch.float64), 0),
            "do not fit": ([0], np.empty(0, np.uint8), torch.ones(3), 0),
        }
        for told, (blocks, bits, new, by) in wrong.items():
            if by == index:
                upload = pb.Upload(blocks=blocks, edit=True)
                tensors = [WireTensor.of(bits), WireTensor.of(new)]
                with pytest.raises(ProtocolError, match=told):
                    line.call(Frame(line.request(0, upload=upload), tensors), "an edit")

    run_job(body, 2, 1)


# ---------------------------------------------------------------- tables


class Tables(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(30, 4, sparse=True, padding_idx=0)
        self.items = torch.nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        self.line = torch.nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.line(self.users(ids[:, 0]) + self.items(ids % 20))


def _tables() -> torch.nn.Module:
    torch.manual_seed(6)
    return Tables()


TABLES = _tables()
ROWS = {name: value * 0.5 + 0.25 for name, value in TABLES.state_dict().items()}


def table_loss(model: torch.nn.Module, step: int, worker: int = 0) -> torch.Tensor:
    return model(torch.randint(0, 30, (6, 3), generator=drawn(step * 10 + worker))).square().mean()


@torch.no_grad()
def rows_clamp(model: torch.nn.Module, step: int) -> None:
    model.users.weight.clamp_(-0.5, 0.5)
    model.items.weight.data.clamp_(-0.5, 0.5)


def rows_assign(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        model.users.weight[3:9] = step
        model.items.weight[step] *= 2


def rows_init(model: torch.nn.Module, step: int) -> None:
    torch.nn.init.normal_(model.users.weight, generator=drawn(step))
    model.items.weight.data = torch.full((20, 4), 0.5 * step)


def rows_load(model: torch.nn.Module, step: int) -> None:
    model.load_state_dict(ROWS)


def rows_and_line(model: torch.nn.Module, step: int) -> None:
    model.line.weight.data.mul_(0.5)
    rows_assign(model, step)


TABLE_EDITS: dict[str, Edit] = {
    each.__name__: each for each in (rows_clamp, rows_assign, rows_init, rows_load, rows_and_line)
}


def trained_tables(model: torch.nn.Module, optimizer: Any, edit: Edit, when: str) -> list[list[torch.Tensor]]:
    seen = []
    for step in range(STEPS):
        if when == "before":
            edit(model, step)
        optimizer.zero_grad()
        table_loss(model, step).backward()
        if when == "after backward":
            edit(model, step)
        optimizer.step()
        with torch.no_grad():
            seen.append(
                [
                    model.users(torch.arange(1, 30)),
                    model.items(torch.arange(20)[:, None]),
                    *(param.clone() for param in model.line.parameters()),
                ]
            )
    return seen


@pytest.mark.pairs
@pytest.mark.parametrize("when", ["before", "after backward"])
@pytest.mark.parametrize("edit", TABLE_EDITS)
@pytest.mark.parametrize("mode", EXACT)
def test_rows_that_a_script_changes_have_the_result_of_plain_torch(mode: str, edit: str, when: str) -> None:
    def body(fleet: Fleet, _: int) -> list[list[torch.Tensor]]:
        model = copy.deepcopy(TABLES)
        adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
        optimizer = fleet.distributed_optimizer(adagrad, EXACT[mode](), model=model)
        fleet.init_worker()
        return trained_tables(model, optimizer, TABLE_EDITS[edit], when)

    alone = copy.deepcopy(TABLES)
    optimizer = torch.optim.Adagrad(alone.parameters(), lr=0.1)
    for ours, theirs in zip(
        run_job(body, 1, 2)[0], trained_tables(alone, optimizer, TABLE_EDITS[edit], when), strict=True
    ):
        assert_close(ours, theirs)


@pytest.mark.parametrize("mode", ["sync", "async", "half-async"])
def test_the_first_worker_s_rows_count_for_all(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = torch.nn.ModuleDict({"t": torch.nn.Embedding(5, 2, sparse=True, _weight=torch.zeros(5, 2))})
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = fleet.distributed_optimizer(sgd, AHEAD[mode](), model=model)
        fleet.init_worker()
        fleet.barrier_worker()
        with torch.no_grad():
            model["t"].weight[index] = 10.0 * (index + 1)
        fleet.barrier_worker()
        optimizer.minimize(model["t"](torch.arange(5)).sum())
        fleet.barrier_worker()
        seen = fleet.state_dict(model)["t.weight"], model["t"].weight.detach().clone()
        fleet.barrier_worker()
        return list(seen)

    together = 1.0 if mode == "sync" else 2.0
    expected = torch.full((5, 2), -together)
    expected[0] += 10
    for got in run_job(body, 2, 2):
        assert_close(got, [expected, expected])
    told = [record.getMessage() for record in caplog.records if "by itself" in record.getMessage()]
    assert len(told) == 1
    assert "worker 1: the script has changed 't.weight' by itself" in told[0]


def test_another_worker_s_rows_that_it_still_holds_stay_until_its_step() -> None:
    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = torch.nn.ModuleDict({"t": torch.nn.Embedding(5, 2, sparse=True, _weight=torch.zeros(5, 2))})
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = fleet.distributed_optimizer(sgd, AHEAD["sync"](), model=model)
        fleet.init_worker()
        held = model["t"].weight.data
        if index:
            held[1:3] = 5.0
        penalty = model["t"].weight.square().sum() * 0  # before the look-up, in one graph with it
        looked_up = model["t"](torch.arange(5))
        (looked_up.sum() + penalty).backward()
        before = held.clone()
        optimizer.step()
        return [looked_up.detach(), before, held.clone()]

    for index, got in enumerate(run_job(body, 2, 2)):
        edited = torch.zeros(5, 2)
        edited[1:3] = 5.0 * index
        assert_close(got, [edited, edited, torch.full((5, 2), -1.0)])


@pytest.mark.parametrize("dense", ["servers", "all_reduce"])
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_when_all_workers_change_rows_the_job_is_that_of_one_that_does(workers: int, dense: str) -> None:
    """Each finds its own changes in look-ups, and in the weight, before its next step."""

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TABLES)
        adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
        strategy = StrategyFactory.create_sync_strategy(dense=dense)
        optimizer = fleet.distributed_optimizer(adagrad, strategy, model=model)
        fleet.init_worker()
        seen = []
        for step in range(STEPS):
            rows_assign(model, step)
            seen += [model.users(torch.arange(30)).detach(), model.items.weight.detach().clone()]
            optimizer.zero_grad()
            table_loss(model, step, index).backward()
            optimizer.step()
        return [*seen, model.users(torch.arange(30)).detach(), *values(model.line)]

    alone = copy.deepcopy(TABLES)
    optimizer = torch.optim.Adagrad(alone.parameters(), lr=0.1)
    expected = []
    for step in range(STEPS):
        rows_assign(alone, step)
        expected += [alone.users(torch.arange(30)).detach(), alone.items.weight.detach().clone()]
        optimizer.zero_grad()
        for worker in range(workers):
            (table_loss(alone, step, worker) / workers).backward()
        optimizer.step()
    for got in run_job(body, workers, 2):
        assert_close(got, [*expected, alone.users(torch.arange(30)).detach(), *values(alone.line)])


@pytest.mark.parametrize("dense", ["servers", "all_reduce"])
def test_rows_that_the_first_worker_changes_are_nobody_else_s_before_the_step(
    dense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, has_come = threading.Event(), threading.Event()
    edit = Replacement.edit

    def edited(*args: Any) -> None:
        edit(*args)
        has_come.set()

    monkeypatch.setattr(Replacement, "edit", edited)

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = torch.nn.ModuleDict(
            {"t": torch.nn.Embedding(5, 2, sparse=True, _weight=torch.zeros(5, 2)), "line": torch.nn.Linear(2, 1)}
        )
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = fleet.distributed_optimizer(sgd, StrategyFactory.create_sync_strategy(dense=dense), model=model)
        fleet.init_worker()
        seen = []

        def look() -> None:
            with torch.no_grad():
                seen.append(model["t"](torch.arange(5)).clone())

        if index == 0:
            model["t"].weight.data.fill_(5.0)
            look()
            looked_up.set()
        else:
            assert looked_up.wait(PATIENCE_S)
            look()
        model["line"](torch.ones(1, 2)).sum().backward()  # in which workers may meet
        if index:
            # Where they meet in a step of their own the first is not there before this one comes.
            assert dense == "all_reduce" or has_come.wait(PATIENCE_S)
            look()
        optimizer.step()
        look()
        return seen

    zeros, fives = torch.zeros(5, 2), torch.full((5, 2), 5.0)
    first, second = run_job(body, 2, 1)
    assert has_come.is_set()
    assert_close(first, [fives, fives])
    assert_close(second, [zeros, zeros, fives])


def test_rows_that_were_changed_need_no_worker_that_is_gone() -> None:
    def body(fleet: Fleet, index: int) -> torch.Tensor | None:
        model = torch.nn.ModuleDict({"t": torch.nn.Embedding(5, 2, sparse=True, _weight=torch.zeros(5, 2))})
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet.init_worker()
        fleet.barrier_worker()
        if index:
            return None  # and stops, whether the other waits already or not
        model["t"].weight.data.fill_(5.0)
        optimizer.minimize(model["t"](torch.arange(5)).sum())
        return model["t"](torch.arange(5)).detach()

    got, _ = run_job(body, 2, 2)
    assert_close([got], [torch.full((5, 2), 4.0)])


@pytest.mark.parametrize(
    ("change", "becomes"), [(lambda weight: weight.fill_(3.0), 1.0), (lambda weight: weight.add_(5.0), 2.0)]
)
def test_a_worker_that_takes_a_step_once_more_changes_rows_before_it(
    change: Callable[[torch.Tensor], object], becomes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between two servers: one has the step, and the values as they are after it."""
    environ = {**SOON, "FLEET_JOB_ID": "one", "FLAGS_rpc_retry_times": "0"}
    lost = Fault(Action.DROP_REQUEST, Endpoint.parse("server1:1"), 0, "push", 2, times=None)
    closed, close = set[str](), StepRequests._close

    def closing(self: Any, job: Any, due: Any, scale: float) -> None:
        close(self, job, due, scale)
        if due.version == 2:
            closed.add(job.where)

    monkeypatch.setattr(StepRequests, "_close", closing)

    def train(fleet: Fleet, steps: Iterable[int] | None = None) -> torch.Tensor:
        model = torch.nn.ModuleDict({"t": torch.nn.Embedding(5, 2, sparse=True, _weight=torch.zeros(5, 2))})
        model["line"] = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(model["line"].weight)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet.init_worker()
        for step in range(fleet.resume_step(), 3) if steps is None else steps:
            if step == 1:
                with torch.no_grad():
                    change(model["line"].weight)
                model["t"].weight.data.add_(5.0)
            optimizer.zero_grad()
            optimizer.minimize(model["t"](torch.arange(5)).sum() + model["line"].weight.sum())
        return torch.cat([model["t"](torch.arange(5)).detach(), model["line"].weight.detach()])

    def body(fleet: Fleet, index: int) -> torch.Tensor:
        if index == 0:
            first = Fleet(environ=environ, network=running.network)
            first.init(UserDefinedRoleMaker(0, Role.WORKER, 2, running.endpoints))
            with pytest.raises(DeadlineError, match="push of step 2"):
                train(first, range(2))
            leave(first)
            network.clear()
            until(lambda: len(closed) == 1)
        return train(fleet)

    network = FaultyNetwork(LoopbackNetwork(), lost)
    running = Job(body, 2, 2, environ={**environ, "FLAGS_rpc_deadline": "60000"}, network=network)
    rows = [torch.full((5, 2), 2.0), torch.full((1, 2), becomes)]
    for got in running.run():
        assert_close([got], [torch.cat(rows)])


@pytest.mark.parametrize("reads", ["state_dict", "look-up", "nothing"])
def test_rows_of_a_step_that_is_refused_do_not_come_back_with_the_next(reads: str) -> None:
    """They have left for the servers by then, and the script goes on to change them once more."""

    def body(fleet: Fleet, index: int) -> torch.Tensor:
        rows = 300_000
        table = Embedding(rows, 1, initializer="zeros")
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), model=table)
        fleet.init_worker()
        table.weight.data[:2] = 5.0
        if index == 0:
            sum(table(ids).sum() for ids in torch.arange(rows).split(rows // 9)).backward()
            with pytest.raises(ConfigurationError, match="push of step 1; expected at most 1 MiB"):
                optimizer.step()
            table.weight.data[:2] = 7.0
            if reads == "state_dict":
                assert fleet.state_dict(table)["weight"][:2].tolist() == [[7.0], [7.0]]
            elif reads == "look-up":
                assert table(torch.arange(2)).flatten().tolist() == [7.0, 7.0]
        optimizer.zero_grad()
        optimizer.minimize(table(torch.tensor([1, 2])).sum())
        return table(torch.arange(3)).detach().flatten()

    for got in run_job(body, 2, 1, environ={**PATIENT, "FLEET_MAX_MESSAGE_MB": "1"}):
        assert_close([got], [torch.tensor([7.0, 6.0, -1.0])])


@pytest.mark.pairs(1)
@pytest.mark.parametrize("journal_bytes", [None, 1])
def test_servers_that_are_killed_keep_rows_that_were_changed(
    tmp_path: Path, journal_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.002)

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TABLES)
        optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
        fleet.init_worker()
        for step in range(STEPS):
            rows_assign(model, step)
            optimizer.minimize(table_loss(model, step, index))
        return [model.users(torch.arange(30)).detach(), model.items.weight.detach().clone(), *values(model.line)]

    more = {} if journal_bytes is None else {"journal_bytes": journal_bytes}
    job = DyingJob(body, tmp_path, plan=every(3, 1), **more)
    got = job.run()
    assert job.kills > 8
    for ours, theirs in zip(got, run_job(body, 2, 2), strict=True):
        assert alike(ours, theirs)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_step_that_is_interrupted_leaves_no_old_rows_to_edit(is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(fleet: Fleet, _: int) -> list[torch.Tensor]:
        model = torch.nn.ModuleDict({"t": torch.nn.Embedding(5, 2, sparse=True, _weight=torch.zeros(5, 2))})
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = fleet.distributed_optimizer(sgd, model=model)
        fleet.init_worker()
        held = model["t"].weight.data
        if not is_held:
            del held
        model["t"](torch.arange(5)).sum().backward()
        with monkeypatch.context() as patched:
            patched.setattr(TrainedModel, "forget_whole_tables", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        model["t"].weight.data.mul_(2)
        with torch.no_grad():
            return [model["t"](torch.arange(5)).clone()]

    def interrupted(_: TrainedModel) -> None:
        raise KeyboardInterrupt

    for got in run_job(body, 1, 2):
        assert_close(got, [torch.full((5, 2), -2.0)])


def rows_by_checkpoint(fleet: Fleet, model: torch.nn.Module, where: Path) -> torch.Tensor:
    fleet.save_persistables(where / "saved")
    with torch.no_grad():
        model.table.weight.fill_(-1)
    fleet.load_persistables(where / "saved")
    return model.table.weight.detach().clone()


def rows_by_serving(fleet: Fleet, model: torch.nn.Module, where: Path) -> torch.Tensor:
    fleet.save_inference_model(str(where / "served"), model)
    return fleet.load_inference_model(str(where / "served"))["table.weight"]


def rows_by_state_dict(fleet: Fleet, model: torch.nn.Module, where: Path) -> torch.Tensor:
    return fleet.state_dict(model)["table.weight"]


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
@pytest.mark.parametrize("look", [rows_by_checkpoint, rows_by_serving, rows_by_state_dict])
def test_rows_come_before_every_other_call(look: Any, mode: str, tmp_path: Path) -> None:
    def body(fleet: Fleet, _: int) -> torch.Tensor:
        model = torch.nn.Module()
        model.table = torch.nn.Embedding(3, 2, sparse=True, _weight=torch.zeros(3, 2))
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), AHEAD[mode](), model=model)
        fleet.init_worker()
        model.table.weight.data[1] = 5.0
        return look(fleet, model, tmp_path)

    expected = torch.zeros(3, 2)
    expected[1] = 5
    assert_close(run_job(body), [expected])


def tied_layers(model: Any) -> None:
    model.one.weight.data = model.two.weight.data


def tied_part(model: Any) -> None:
    model.one.weight.data = model.table.weight.data[1:3]


def tied_table(model: Any) -> None:
    model.table.weight.data = model.wide.weight.data


def tied_tables(model: Any) -> None:
    model.table.weight.data = model.other.weight


@pytest.mark.parametrize("tie", [tied_layers, tied_part, tied_table, tied_tables])
@pytest.mark.parametrize("mode", [*AHEAD, "all_reduce"])
@pytest.mark.pairs
def test_what_comes_to_share_memory_is_refused_until_it_does_no_more(mode: str, tie: Any) -> None:
    def body(fleet: Fleet, _: int) -> bool:
        tables = {name: torch.nn.Embedding(4, 2, sparse=True) for name in ("table", "other")}
        layers = {"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2), "wide": torch.nn.Linear(2, 4)}
        model: Any = torch.nn.ModuleDict({**tables, **layers})
        make = AHEAD.get(mode, lambda: StrategyFactory.create_sync_strategy(dense="all_reduce"))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet.distributed_optimizer(sgd, make(), model=model)
        fleet.init_worker()

        def step() -> None:
            found = model["table"](torch.arange(4)) + model["other"](torch.arange(4))
            optimizer.minimize(model["wide"](model["two"](model["one"](found))).square().mean())

        step()
        tie(SimpleNamespace(**model))
        with pytest.raises(UnsupportedError, match="share memory and are two parameters"):
            step()
        for each in model.values():
            each.weight.data = each.weight.data.clone()
        step()
        return True

    assert run_job(body) == [True]
