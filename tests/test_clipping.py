"""``max_grad_norm``: what is applied is clipped by its norm on all servers together, as one process would."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import DyingJob, every
from faults import Action, Fault, FaultyNetwork
from harness import SOON, Job, assert_close, run_job
from inside import leave, refresh
from test_durable import same, state

from fleet import Fleet, StrategyFactory
from fleet.base.cluster import Endpoint
from fleet.errors import ArgumentTypeError, ConfigurationError, DeadlineError
from fleet.ps.server.step_requests import StepRequests, clipped
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.strategy.parameter_server import Strategy

STEPS, ROWS = 5, 30
#: Some of the gradients here are longer, and some are not.
MOST = 0.5

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


class Model(torch.nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.table = torch.nn.Embedding(ROWS, 4, sparse=sparse)
        self.line = torch.nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))

    def loss(self, step: int, worker: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(10 * step + worker)
        ids = torch.randint(0, ROWS, (6, 2), generator=draw)
        return (self.line(self.table(ids).sum(1)) - 1).square().mean() * (0.02 if step % 2 else 1.0)


def reference(name: str, workers: int) -> list[torch.Tensor]:
    model = Model(sparse=False)
    optimizer = OPTIMIZERS[name](model.parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model.loss(step, worker) for worker in range(workers)) / workers).backward()  # type: ignore[union-attr]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MOST).item())
        optimizer.step()
    assert min(norms) < MOST < max(norms), "both happen"
    return [parameter.detach() for parameter in model.parameters()]


def trains(strategy: Strategy, name: str, *, lockstep: bool = False) -> Callable[[Fleet, int], Any]:
    def body(made: Fleet, index: int) -> Any:
        model = Model(sparse=True)
        wrapped = made.distributed_optimizer(OPTIMIZERS[name](model.parameters()), strategy, model=model)
        made.init_worker()
        for step in range(STEPS):
            wrapped.minimize(model.loss(step, index))
            if lockstep:
                made.barrier_worker()
                refresh(made)
                made.barrier_worker()
        return state(made, model)

    return body


SYNC = StrategyFactory.create_sync_strategy(max_grad_norm=MOST)
GBA = StrategyFactory.create_gba_strategy(max_grad_norm=MOST)
HYBRID = StrategyFactory.create_sync_strategy(dense="all_reduce", max_grad_norm=MOST)


@pytest.mark.pairs(1)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_ends_where_one_process_ends(name: str, workers: int, servers: int) -> None:
    expected = reference(name, workers)
    for strategy, lockstep in ((SYNC, False), (GBA, True)):
        for result in run_job(trains(strategy, name, lockstep=lockstep), workers, servers):
            assert_close([result["table.weight"], result["line.weight"], result["line.bias"]], expected, 1e-5)


@pytest.mark.parametrize("servers", [1, 2])
def test_in_lockstep_gba_clips_as_synchronous_training_does_to_the_bit(servers: int) -> None:
    same(run_job(trains(GBA, "adagrad", lockstep=True), 2, servers), run_job(trains(SYNC, "adagrad"), 2, servers))


@pytest.mark.parametrize(("mode", "workers"), [("gba", 1), ("gba", 3), ("auto", 3)])
def test_the_rest_of_a_buffer_is_clipped_by_the_norm_of_all_servers(
    mode: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers leave at once, and whoever is the last at one server need not be the last at another."""
    updates: dict[int, list[tuple[float, float, float]]] = {}
    close = StepRequests._close

    def noted(self: StepRequests, job: Any, due: Any, scale: float) -> None:
        updates.setdefault(due.version, []).append((due.squares, due.total, scale))
        close(self, job, due, scale)

    monkeypatch.setattr(StepRequests, "_close", noted)
    strategy = StrategyFactory.create_gba_strategy(3, max_grad_norm=MOST)
    if mode == "auto":
        strategy = StrategyFactory.create_auto_strategy(changes=[1], max_grad_norm=MOST)

    def body(made: Fleet, index: int) -> None:
        model = Model(sparse=True)
        wrapped = made.distributed_optimizer(OPTIMIZERS["sgd"](model.parameters()), strategy, model=model)
        made.init_worker()
        for step in range(4 if index == 0 else 3):
            wrapped.minimize(model.loss(step, index))

    run_job(body, workers, 2)
    assert sorted(updates) == [*range(1, workers + 2)], "the last is of one gradient"
    for version, ((squares, total, scale), (others, also_total, also_scale)) in updates.items():
        assert total == also_total == pytest.approx(squares + others), version
        assert scale == also_scale == clipped(total, MOST)


@pytest.mark.parametrize("servers", [1, 2])
def test_with_dense_parameters_among_the_workers(servers: int) -> None:
    expected = reference("sgd", 2)
    for result in run_job(trains(HYBRID, "sgd"), 2, servers):
        assert_close([result["table.weight"], result["line.weight"], result["line.bias"]], expected, 1e-5)


def test_a_bound_that_is_never_reached_changes_no_bit() -> None:
    wide, none = (StrategyFactory.create_sync_strategy(max_grad_norm=most) for most in (1e6, None))
    same(run_job(trains(wide, "adagrad"), 2, 2), run_job(trains(none, "adagrad"), 2, 2))


@pytest.mark.parametrize("value", [0.0, 0.3, 3.0, math.inf, math.nan])
def test_a_gradient_is_scaled_as_torch_scales_it(value: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([value, 1.0], dtype=torch.float64)
    before = parameter.grad.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    ours = before * clipped(before.square().sum().item(), 1.0)
    torch.testing.assert_close(ours, parameter.grad, equal_nan=True)


@pytest.mark.parametrize("servers", [1, 2])
def test_what_is_not_finite_does_what_it_does_in_torch(servers: int) -> None:
    def steps(weight: torch.Tensor, other: torch.Tensor, optimizer: Any, clip: Callable[[], object]) -> Any:
        optimizer.zero_grad()
        (weight.sum() * math.inf + other.sum()).backward()
        clip()
        optimizer.step()
        return weight.detach().clone(), other.detach().clone()

    def make() -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        return torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))

    def body(made: Fleet, index: int) -> Any:
        both = make()
        wrapped = made.distributed_optimizer(torch.optim.SGD(both, lr=1.0), SYNC)
        made.init_worker()
        return steps(*both, wrapped, lambda: None)

    both = make()
    plain = torch.optim.SGD(both, lr=1.0)
    expected = steps(*both, plain, lambda: torch.nn.utils.clip_grad_norm_(both, MOST))
    (got,) = run_job(body, 1, servers)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


# ---------------------------------------------------------------- what goes wrong between the servers


@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY, Action.DUPLICATE])
@pytest.mark.parametrize("strategy", [SYNC, GBA], ids=["sync", "gba"])
@pytest.mark.pairs(1)
def test_whatever_happens_to_what_servers_are_told(strategy: Strategy, action: Action) -> None:
    network = FaultyNetwork(LoopbackNetwork(), Fault(action, kind="clip", skip=1, times=3))
    body = trains(strategy, "adagrad", lockstep=True)
    same(run_job(body, 2, 2, network=network), run_job(body, 2, 2))
    assert len(network.struck) == 3


@pytest.mark.parametrize("strategy", [SYNC, GBA], ids=["sync", "gba"])
@pytest.mark.pairs(1)
def test_servers_that_are_killed_give_the_same_bits(tmp_path: Path, strategy: Strategy) -> None:
    body = trains(strategy, "adagrad", lockstep=True)
    job = DyingJob(body, tmp_path, plan=every(4, 1), journal_bytes=1)
    same(job.run(), run_job(body, 2, 2))
    assert job.kills > 3


@pytest.mark.parametrize("server", [0, 1])
def test_a_worker_dies_before_it_has_told_a_server(server: int) -> None:
    """The other one has told it, or does; it is not missed before it is given up on."""
    lost = Fault(Action.DROP_REQUEST, Endpoint.parse(f"server{server}:1"), 1, "clip", 2, times=None)
    network = FaultyNetwork(LoopbackNetwork(), lost)

    def body(made: Fleet, index: int) -> Any:
        model = Model(sparse=True)
        wrapped = made.distributed_optimizer(OPTIMIZERS["sgd"](model.parameters()), SYNC, model=model)
        made.init_worker()
        for step in range(STEPS if index == 0 else 1):
            wrapped.minimize(model.loss(step, index))
        if index == 1:
            with pytest.raises(DeadlineError, match="norm of step 2"):
                wrapped.minimize(model.loss(1, index))
            leave(made)
            return None
        return state(made, model)

    job = Job(body, 2, 2, environ={**SOON, "FLAGS_rpc_retry_times": "0"}, network=network)
    job.join(job.start())
    assert {"worker 0", "server 0", "server 1"}.isdisjoint(job.errors), job.errors
    assert job.results[0] is not None


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("make", [StrategyFactory.create_sync_strategy, StrategyFactory.create_gba_strategy])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ConfigurationError),
        (-1.0, ConfigurationError),
        (math.nan, ConfigurationError),
        (math.inf, ConfigurationError),
        ("1", ArgumentTypeError),
        (True, ArgumentTypeError),
    ],
)
def test_a_norm_is_a_number_above_zero(make: Callable[..., Strategy], value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_grad_norm"):
        make(max_grad_norm=value)
