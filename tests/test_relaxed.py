"""What a training loop may do, in every mode without rounds: schedules, clipping, accumulation, several optimizers,
workers that come late, leave early or fail."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Job, assert_close, run_job
from test_async import Held, eventually
from test_modes import FREE, RELAXED, Arrivals

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.errors import JobAbortedError
from fleet.strategy.parameter_server import Strategy

STEPS, ROWS = 7, 12

MERGING = StrategyFactory.create_half_async_strategy(max_merge_var_num=3)
INLINE = StrategyFactory.create_async_strategy(independent_recv_thread=False)

#: One worker: ``step()`` returns with what plain torch has then. Without drift there is no delay to compensate for.
EXACT = {
    **FREE,
    "half_async-dc": StrategyFactory.create_half_async_strategy(dc_asgd_lambda=9.0, dc_asgd_adaptive=True),
    "geo": RELAXED["geo"],
}
#: One worker: the same, once what is unsent was sent and what came of it was taken over.
BEHIND = {
    "half_async-merging": MERGING,
    "async-inline": INLINE,
    "async-dc": StrategyFactory.create_async_strategy(dc_asgd_lambda=9.0, independent_recv_thread=False),
}
#: Several workers.
SHARED = {**RELAXED, "half_async-merging": MERGING, "async-inline": INLINE}
#: Those whose optimizers run on the servers.
SERVED = {name: strategy for name, strategy in SHARED.items() if strategy.mode != "geo"}
#: Those in which nobody waits for a worker that has not come yet.
UNBOUND = {name: strategy for name, strategy in SHARED.items() if strategy.mode != "ssp"}
UNBOUND["ssp-99"] = StrategyFactory.create_ssp_strategy(99)


def merged(strategy: Strategy) -> int:
    """How many steps of a worker become one push."""
    return int(dict(strategy.communicator).get("max_merge_var_num", 1))


def reaches(strategy: Strategy, steps: int, workers: int) -> float:
    """What a worker's steps of length one come to on the servers, once it has sent what is unsent.

    Their sum, wherever a gradient arrives undivided. In GEO it sends a share of how far it is ahead, each time."""
    if strategy.mode != "geo":
        return float(steps)
    sent = ahead = 0.0
    for step in range(1, steps + 1):
        ahead += 1
        if step % strategy.update_frequency == 0 or step == steps:
            sent, ahead = sent + ahead / workers, ahead - ahead / workers
    return sent


def idle(optimizer: torch.optim.Optimizer) -> None:
    """A step without any gradient: it changes nothing anywhere, and takes over what is there to be taken."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = [param.grad for param in params]
    optimizer.zero_grad()
    optimizer.step()
    for param, grad in zip(params, kept, strict=True):
        param.grad = grad


def comes_to(optimizer: torch.optim.Optimizer, tensor: torch.Tensor, expected: float) -> None:
    """When nobody trains any more, all there is to come is what this worker has not fetched yet."""

    def arrived() -> bool:
        idle(optimizer)
        return torch.allclose(tensor, torch.full_like(tensor, expected), rtol=1e-5)

    eventually(arrived, f"{expected}")


# --- One worker: plain torch, step by step ----------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, 3)
        self.body = torch.nn.Linear(3, 5)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(5, 1) for _ in range(2))

    def loss(self, step: int, head: int = 0) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        ids, target = torch.randint(0, ROWS, (6,), generator=draw), torch.randn(6, 1, generator=draw)
        out: torch.Tensor = self.heads[head](torch.tanh(self.body(self.table(ids))))
        return ((out - 3 * target) ** 2).mean()


def _template() -> Net:
    torch.manual_seed(3)
    return Net()


TEMPLATE = _template()


class Together:
    """Several optimizers of plain torch, used like one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure else None
        for optimizer in self._optimizers:
            optimizer.step()
        return loss


class Run:
    """A model that a recipe trains, in plain torch or in a job; ``ends`` is what it comes to after each step."""

    def __init__(self, fleet_: Fleet | None = None, mode: str = "") -> None:
        self.model = copy.deepcopy(TEMPLATE)
        self.model.table.sparse = fleet_ is not None  # in a job its rows go to the servers
        self.dense = [*self.model.body.parameters(), *self.model.heads.parameters()]
        self.rows = list(self.model.table.parameters())
        self.ends: list[list[torch.Tensor]] = []
        self._fleet, self._mode = fleet_, mode
        self._optimizer: Any = None

    def start(self, *optimizers: torch.optim.Optimizer) -> Any:
        if self._fleet is None:
            self._optimizer = Together(*optimizers)
        else:
            strategy = {**EXACT, **BEHIND}[self._mode]
            self._optimizer = self._fleet.distributed_optimizer(list(optimizers), strategy, model=self.model)
            self._fleet.init_worker()
        return self._optimizer

    def stepped(self) -> None:
        if self._fleet is not None and self._mode in BEHIND:
            self._fleet.barrier_worker()
            idle(self._optimizer)
        with torch.no_grad():
            self.ends.append([p.clone() for p in self.dense] + [self.model.table(torch.arange(ROWS))])


def warm_up_and_cosine(run: Run) -> None:
    adam, adagrad = torch.optim.Adam(run.dense, lr=0.05), torch.optim.Adagrad(run.rows, lr=0.5)
    optimizer = run.start(adam, adagrad)
    warm_up = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: (step + 1) / 3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 4)
    schedules = [
        torch.optim.lr_scheduler.SequentialLR(adam, [warm_up, cosine], [3]),
        torch.optim.lr_scheduler.LambdaLR(adagrad, lambda step: min(1.0, (step + 1) / 5)),
    ]
    for step in range(STEPS):
        optimizer.zero_grad()
        run.model.loss(step).backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        run.stepped()


def one_cycle_of_rate_and_momentum(run: Run) -> None:
    sgd = torch.optim.SGD([{"params": run.dense}, {"params": run.rows}], lr=0.1, momentum=0.9)
    # The momentum of rows rests where torch's goes on, so theirs has none.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        sgd, [0.2, 0.4], total_steps=STEPS + 1, base_momentum=[0.5, 0.0], max_momentum=[0.95, 0.0]
    )
    optimizer = run.start(sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.model.loss(step).backward()
        optimizer.step()
        schedule.step()
        run.stepped()


def clipping_in_groups_of_three_optimizers(run: Run) -> None:
    body = list(run.model.body.parameters())
    optimizer = run.start(
        torch.optim.SGD([{"params": body[:1], "lr": 0.2}, {"params": body[1:], "weight_decay": 0.1}], lr=0.02),
        torch.optim.AdamW(run.model.heads.parameters(), lr=0.05),
        torch.optim.Adagrad(run.rows, lr=0.5, initial_accumulator_value=0.1),
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        run.model.loss(step).backward()
        if step % 2:
            torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.1)
        else:
            assert torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.2) > 0.2
        optimizer.step()
        run.stepped()


def closures_that_accumulate(run: Run) -> None:
    optimizer = run.start(torch.optim.Adam(run.dense, lr=0.05), torch.optim.Adagrad(run.rows, lr=0.5))
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            for part in range(3):
                (run.model.loss(10 * step + part) / 3).backward()
            return step / 8

        assert optimizer.step(closure) == step / 8
        run.stepped()


def gradients_that_are_kept_or_zeroed(run: Run) -> None:
    """Kept ones count again in the next step; zeroed ones, other than None, move what has momentum."""
    dense = torch.optim.SGD(run.dense, lr=0.05, momentum=0.9)
    optimizer = run.start(dense, torch.optim.Adagrad(run.rows, lr=0.5))
    clear: list[Callable[[], None]] = [
        lambda: None,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: run.model.zero_grad(),
        lambda: dense.zero_grad(set_to_none=False),
        lambda: optimizer.zero_grad(),
    ]
    for step in range(2 * len(clear)):
        clear[step % len(clear)]()
        run.model.loss(step, head=step % 2).backward()
        optimizer.step()
        run.stepped()


def frozen_parameters_and_idle_heads(run: Run) -> None:
    """What has no gradient in a step does not move, decay or no; a frozen part is let go in the middle."""
    adam = torch.optim.Adam(run.dense, lr=0.05, weight_decay=0.1)
    run.model.body.requires_grad_(False)
    run.model.table.requires_grad_(False)
    optimizer = run.start(adam, torch.optim.Adagrad(run.rows, lr=0.5))
    for step in range(STEPS):
        if step == 3:
            run.model.body.requires_grad_(True)
            run.model.table.requires_grad_(True)
        optimizer.zero_grad()
        run.model.loss(step, head=step % 2).backward()
        optimizer.step()
        run.stepped()


RECIPES = [
    warm_up_and_cosine,
    one_cycle_of_rate_and_momentum,
    clipping_in_groups_of_three_optimizers,
    closures_that_accumulate,
    gradients_that_are_kept_or_zeroed,
    frozen_parameters_and_idle_heads,
]


@pytest.mark.pairs
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
@pytest.mark.parametrize("mode", [*EXACT, *BEHIND])
def test_one_worker_does_what_plain_torch_does(mode: str, recipe: Callable[[Run], None]) -> None:
    def body(fleet_: Fleet, worker: int) -> list[list[torch.Tensor]]:
        run = Run(fleet_, mode)
        recipe(run)
        return run.ends

    plain = Run()
    recipe(plain)
    (ends,) = run_job(body, 1, 2)
    for got, expected in zip(ends, plain.ends, strict=True):
        assert_close(got, expected)


# --- Several workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SERVED)
def test_every_gradient_brings_the_rate_it_was_computed_with(mode: str) -> None:
    """Each worker warms up from a rate of its own. In a merged push the last rate counts."""
    strategy, bases, steps = SERVED[mode], [1.0, 0.5, 0.25], 8

    def rate(step: int) -> float:
        return (step + 1) / 8

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(5))
        sgd = torch.optim.SGD([weight], lr=bases[worker])
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, rate)
        optimizer = fleet_.distributed_optimizer(sgd, strategy)
        fleet_.init_worker()
        for _ in range(steps):
            optimizer.minimize(weight.sum())
            schedule.step()
        fleet_.barrier_worker()
        comes_to(optimizer, weight, -expected)

    lasts = [min(step - step % merged(strategy) + merged(strategy), steps) - 1 for step in range(steps)]
    expected = sum(bases) * sum(rate(last) for last in lasts)
    run_job(body, 3, 2)


def test_what_the_sender_merges_leaves_with_the_last_rate() -> None:
    network = Held()
    strategy = StrategyFactory.create_async_strategy(max_merge_var_num=4, send_queue_size=4, send_wait_times=0)

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([weight], lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 2.0**step)
        optimizer = fleet_.distributed_optimizer(sgd, strategy)
        fleet_.init_worker()
        for step in range(5):
            optimizer.minimize(weight.sum())
            schedule.step()
            if step == 0:
                eventually(lambda: len(network.pushes) == 1, "the first push is under way")
        network.release()
        comes_to(optimizer, weight, -(1 + 4 * 16.0))

    run_job(body, 1, 1, network=network)


@pytest.mark.parametrize("mode", SERVED)
def test_uneven_data_down_to_the_last_worker(mode: str) -> None:
    """One has nothing to do, one leaves early, one goes on alone; what each has sent counts once, in each optimizer.

    Gradients are constant, so state and values come to what plain torch has after as many steps as there were pushes.
    """
    strategy, steps = SERVED[mode], [5, 0, 9]
    gone = [threading.Event(), threading.Event()]

    def make(all_: torch.nn.Parameter, one: torch.nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.Adam([all_, one], lr=0.1, weight_decay=0.1)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        summed, all_, one = (torch.nn.Parameter(torch.ones(4)) for _ in range(3))
        table = fleet.nn.Embedding(None, 2, initializer="constant(1.0)")
        inner = [torch.optim.SGD([summed], lr=1.0), make(all_, one), torch.optim.Adagrad(table.parameters(), lr=0.5)]
        optimizer = fleet_.distributed_optimizer(inner, strategy)
        fleet_.init_worker()
        for step in range(steps[worker]):
            if worker == 2 and step == 6:
                assert all(event.wait(20) for event in gone)
            loss = summed.sum() + 2 * all_.sum() + table(torch.tensor([7])).sum()
            optimizer.zero_grad(set_to_none=False)  # what is unsent must not be zeroed with it
            (loss + one.sum() if worker == 0 else loss).backward()
            optimizer.step()
        if worker != 2:
            fleet_.stop_worker()
            gone[worker].set()
            return []
        fleet_.barrier_worker()
        comes_to(optimizer, summed, 1.0 - sum(steps))
        return [all_.detach(), one.detach(), table(torch.tensor([7])).detach()]

    pushes = [-(-count // merged(strategy)) for count in steps]
    all_, one, row = (torch.nn.Parameter(torch.ones(shape)) for shape in [(4,), (4,), (1, 2)])
    plain = Together(make(all_, one), torch.optim.Adagrad([row], lr=0.5))
    for push in range(sum(pushes)):
        plain.zero_grad()
        (2 * all_.sum() + row.sum() + (one.sum() if push < pushes[0] else 0)).backward()
        plain.step()
    assert_close(run_job(body, 3, 2)[2], [all_.detach(), one.detach(), row.detach()], 1e-5)


@pytest.mark.parametrize("mode", UNBOUND)
def test_workers_that_come_late_begin_where_the_others_are(mode: str, tmp_path: Path) -> None:
    """One joins in the middle of another's training, one after somebody has left, and is the last in the end."""
    zero_has_sent, one_has_left, two_is_in, zero_has_left = (threading.Event() for _ in range(4))

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.full((5,), 100.0 * worker))  # the late ones' own values do not count
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), UNBOUND[mode])

        def join(expected: float) -> None:
            fleet_.init_worker()
            torch.testing.assert_close(weight.detach(), torch.full((5,), expected))

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.minimize(weight.sum())

        if worker == 0:
            join(0.0)
            train(4)
            fleet_.save_persistables(str(tmp_path / "which sends what is unsent first"))
            zero_has_sent.set()
            assert two_is_in.wait(20)
            train(2)
            fleet_.stop_worker()
            zero_has_left.set()
        elif worker == 1:
            assert zero_has_sent.wait(20)
            join(-reached(4))
            train(3)
            fleet_.stop_worker()
            one_has_left.set()
        else:
            assert one_has_left.wait(20)
            join(-reached(4) - reached(3))
            two_is_in.set()
            train(5)
            assert zero_has_left.wait(20)
            comes_to(optimizer, weight, -reached(4 + 2) - reached(3) - 5)

    def reached(steps: int) -> float:
        return reaches(UNBOUND[mode], steps, workers=3)

    run_job(body, 3, 2)


@pytest.mark.parametrize("staleness", [0, 2])
def test_bounded_staleness_waits_for_one_that_comes_late_and_not_for_one_that_left(staleness: int) -> None:
    arrivals, took = Arrivals(), []

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        strategy = StrategyFactory.create_ssp_strategy(staleness)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        if worker == 1:
            arrivals.wait(0, staleness + 1, servers=1)
        fleet_.init_worker()
        if worker == 1:
            assert weight.item() == -1 - staleness
            for step in range(2):
                assert took == list(range(staleness + step))
                optimizer.minimize(weight.sum())
                arrivals.wait(0, staleness + step + 2, servers=1)
            return
        for step in range(staleness + 5):
            optimizer.minimize(weight.sum())
            took.append(step)

    run_job(body, 2, 1, network=arrivals)
    assert took == list(range(staleness + 5))


@pytest.mark.parametrize("mode", SHARED)
def test_one_that_fails_ends_the_job_for_all_and_is_named(mode: str) -> None:
    """Also for those that wait for it, and for those whose ``finally`` says goodbye."""
    trained = threading.Barrier(3)

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), SHARED[mode])
        fleet_.init_worker()
        optimizer.minimize(weight.sum())
        trained.wait(20)
        if worker == 1:
            raise ValueError("a bad batch")

        def fails() -> bool:
            optimizer.minimize(weight.sum())
            return False

        try:
            eventually(fails, "the job ends")
        finally:
            fleet_.stop_worker()

    job = Job(body, 3, 2)
    job.join(job.start(), timeout_s=30)
    assert isinstance(job.errors.pop("worker 1"), ValueError)
    assert sorted(job.errors) == ["server 0", "server 1", "worker 0", "worker 2"]
    for name, error in job.errors.items():
        assert isinstance(error, JobAbortedError), name
        assert "worker 1 failed" in str(error), name
        assert "ValueError: a bad batch" in str(error), name
