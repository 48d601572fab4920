"""The relaxed modes in whole jobs: what each computes, with the order of arrival fixed where it matters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from harness import Job, assert_close, run_job, values
from test_parity_dense import OPTIMIZERS, loss_of, make_model, reference

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.base.cluster import Endpoint
from fleet.errors import UnsupportedError
from fleet.numeric.merge import merge
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Channel, Handler, Listener, Respond
from fleet.strategy.parameter_server import Strategy
from fleet.transpiler import DistributeTranspilerConfig

STEPS = 6

#: Every relaxed mode as it computes what plain torch does, if there is one worker.
FREE = {
    "half_async": StrategyFactory.create_half_async_strategy(),
    "ssp-0": StrategyFactory.create_ssp_strategy(0),
    "ssp-4": StrategyFactory.create_ssp_strategy(4),
    "gba": StrategyFactory.create_gba_strategy(1, 99),
}
#: All of them.
RELAXED = {
    **FREE,
    "async": StrategyFactory.create_async_strategy(),
    "geo": StrategyFactory.create_geo_strategy(update_frequency=2),
}


def train(strategy: Strategy, name: str, steps: int = STEPS) -> Callable[[Fleet, int], list[torch.Tensor]]:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        optimizer = fleet_.distributed_optimizer(OPTIMIZERS[name](list(model.parameters())), strategy, model=model)
        fleet_.init_worker()
        for step in range(steps):
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    return body


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adam", "adagrad"])
@pytest.mark.parametrize("mode", FREE)
def test_one_worker_is_plain_torch(mode: str, name: str, servers: int) -> None:
    (got,) = run_job(train(FREE[mode], name), 1, servers)
    assert_close(got, reference(OPTIMIZERS[name], 1))


def test_merged_steps_have_the_options_of_the_last_and_decay_once() -> None:
    def body(fleet_: Fleet, worker: int) -> float:
        weight = torch.nn.Parameter(torch.ones(1))
        strategy = StrategyFactory.create_half_async_strategy(max_merge_var_num=2)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0, weight_decay=0.1), strategy)
        fleet_.init_worker()
        for lr in (1.0, 0.1):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.minimize((weight * 0.5).sum())
        return weight.item()

    (got,) = run_job(body)
    assert got == pytest.approx(1 - 0.1 * (0.5 + 0.5 + 0.1 * 1))


@pytest.mark.pairs(2)
@pytest.mark.parametrize("mode", FREE)
def test_three_workers_move_together(mode: str) -> None:
    """Every gradient is applied once and undivided: with a constant one, the end is known whatever the order."""

    def body(fleet_: Fleet, worker: int) -> tuple[float, torch.Tensor]:
        weight = torch.nn.Parameter(torch.zeros(3))
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0), FREE[mode])
        fleet_.init_worker()
        for _ in range(10):
            optimizer.minimize(weight.sum() + table(torch.tensor([5, 5, worker])).sum())
        everybody.wait(20)
        optimizer.minimize(weight.sum() * 0)
        return weight[0].item(), table(torch.tensor([5, worker])).detach()

    everybody = threading.Barrier(3)
    for weight, rows in run_job(body, 3, 2):
        assert weight == -30
        assert torch.equal(rows, torch.tensor([[-60.0, -60], [-10, -10]]))


class Arrivals:
    """A loopback network that tells when the servers have taken in a worker's push of a step."""

    def __init__(self) -> None:
        self._network = LoopbackNetwork()
        self._changed = threading.Condition()
        self._arrived: Counter[tuple[int, int]] = Counter()

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        def watched(frame: Frame, respond: Respond) -> None:
            handler(frame, respond)
            if frame.message.WhichOneof("kind") == "push":
                with self._changed:
                    self._arrived[frame.message.worker, frame.message.step] += 1
                    self._changed.notify_all()

        return self._network.listen(endpoint, watched)

    def connect(self, endpoint: Endpoint) -> Channel:
        return self._network.connect(endpoint)

    def wait(self, worker: int, step: int, servers: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._arrived[worker, step] >= servers, 20)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_bounded_staleness_with_bound_zero_orders_steps_as_synchronous_training_does(name: str) -> None:
    """Each gradient is a step of its own: within one step worker 0's, then worker 1's, here forced."""
    arrivals, both = Arrivals(), threading.Barrier(2)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        strategy = StrategyFactory.create_ssp_strategy(0)
        optimizer = fleet_.distributed_optimizer(OPTIMIZERS[name](list(model.parameters())), strategy, model=model)
        fleet_.init_worker()
        both.wait(20)  # whoever comes later begins with what the other has done already
        for step in range(STEPS):
            if worker == 1:
                arrivals.wait(0, step + 1, servers=2)
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    model = make_model()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for step in range(STEPS):
        gradients = []
        for worker in range(2):
            optimizer.zero_grad()
            loss_of(model, step, worker).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for gradient in gradients:
            for param, grad in zip(model.parameters(), gradient, strict=True):
                param.grad = grad
            optimizer.step()
    for got in run_job(body, 2, 2, network=arrivals):
        assert_close(got, values(model))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_fast_worker_stops_at_its_bound(staleness: int) -> None:
    """While the slow one takes no step, the fast one's push of step ``staleness + 1`` has no answer."""
    arrivals = Arrivals()
    took: list[int] = []

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        strategy = StrategyFactory.create_ssp_strategy(staleness)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        fleet_.init_worker()
        for step in range(staleness + 2):
            if worker == 1 and step == 0:
                arrivals.wait(0, staleness + 1, servers=1)
                assert took == list(range(staleness))
            optimizer.minimize(weight.sum())
            if worker == 0:
                took.append(step)

    run_job(body, 2, 1, network=arrivals)
    assert took == list(range(staleness + 2))


@pytest.mark.parametrize("mode", FREE)
def test_uneven_data_and_a_late_start_hold_nobody_back_for_good(mode: str) -> None:
    def body(fleet_: Fleet, worker: int) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), FREE[mode])
        if worker == 2:
            assert two_done.wait(20)
        fleet_.init_worker()
        for _ in range(3 * (worker + 1)):
            optimizer.minimize(weight.sum())
        two_done.set()
        return weight[0].item()

    two_done = threading.Event()
    if mode.startswith("ssp"):
        two_done.set()  # the others wait for a worker that has not come yet
    ends = run_job(body, 3, 1)
    assert min(ends) >= -18
    if mode == "ssp-0":
        assert ends[2] == -18, "the last one to go has seen every gradient"


# --- Half-asynchronous: merging ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "summed"), [("sgd", True), ("sgd-momentum", False), ("adam", False), ("rmsprop", False)]
)
def test_merged_steps_end_where_torch_ends_on_merged_gradients(name: str, summed: bool) -> None:
    """Parameters stand still while gradients are collected; seven steps make two pushes of three and a rest."""
    merged, steps = 3, 7
    strategy = StrategyFactory.create_half_async_strategy(max_merge_var_num=merged)
    ends: list[list[torch.Tensor]] = []

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        optimizer = fleet_.distributed_optimizer(OPTIMIZERS[name](list(model.parameters())), strategy, model=model)
        fleet_.init_worker()
        for step in range(steps):
            optimizer.minimize(loss_of(model, step, worker))
            ends.append(values(model))
        return values(model)

    model = make_model()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    expected = []
    for step in range(steps):
        if step % merged == 0:
            optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        if step % merged == merged - 1:
            for param in model.parameters():
                param.grad = param.grad if summed else param.grad / merged
            optimizer.step()
        expected.append(values(model))
    run_job(body, 1, 2)
    for got, wanted in zip(ends, expected, strict=True):
        assert_close(got, wanted)


def test_what_is_unsent_leaves_with_stop_worker() -> None:
    strategy = StrategyFactory.create_half_async_strategy(max_merge_var_num=4)
    read = []

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0), strategy)
        fleet_.init_worker()
        if worker == 0:
            for _ in range(6):
                optimizer.minimize(weight.sum() + table(torch.tensor([3])).sum())
            fleet_.stop_worker()
            stopped.set()
            return
        assert stopped.wait(20)
        optimizer.minimize(weight.sum() * 0)
        for _ in range(3):
            optimizer.minimize(weight.sum() * 0)
        read.append((weight[0].item(), table(torch.tensor([3]))[0, 0].item()))

    stopped = threading.Event()
    run_job(body, 2, 2)
    assert read == [(-6.0, -6.0)]


@pytest.mark.parametrize("is_sgd", [True, False, None])
def test_rows_merge_by_id_as_numpy_does(is_sgd: bool | None) -> None:
    random = np.random.default_rng(0)
    batches = [random.integers(0, 9, 6) for _ in range(3)]
    strategy = StrategyFactory.create_half_async_strategy(max_merge_var_num=3, is_sgd_optimizer=is_sgd)

    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        fleet_.init_worker()
        for scale, ids in enumerate(batches):
            optimizer.minimize((table(torch.from_numpy(ids)) * (scale + 1)).sum())
        return table(torch.arange(9)).detach()

    expected = np.zeros((9, 2), np.float32)
    for scale, ids in enumerate(batches):
        np.subtract.at(expected, ids, scale + 1)
    if is_sgd is False:
        expected /= 3
    (got,) = run_job(body, 1, 2)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("mode", ["half_async", "async", "geo"])
def test_the_step_to_resume_from_counts_steps_and_not_pushes(mode: str, tmp_path: object) -> None:
    """Five steps are two merged pushes or more, the last of them not full."""
    strategy = {
        "half_async": StrategyFactory.create_half_async_strategy(max_merge_var_num=4),
        "async": StrategyFactory.create_async_strategy(max_merge_var_num=3),
        "geo": StrategyFactory.create_geo_strategy(update_frequency=4),
    }[mode]

    def body(fleet_: Fleet, worker: int) -> int:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        fleet_.init_worker()
        begin = fleet_.resume_step()
        for _ in range(5):
            optimizer.minimize(weight.sum())
        fleet_.save_persistables(f"{tmp_path}/ckpt")
        return begin

    assert run_job(body, 1, 2) == [0]
    assert run_job(body, 1, 2, model_dir=f"{tmp_path}/ckpt") == [5]


def test_the_environment_says_how_many_steps_merge_unless_the_strategy_does() -> None:
    def pushes(strategy: Strategy, environ: dict[str, str]) -> int:
        def body(fleet_: Fleet, worker: int) -> int:
            weight = torch.nn.Parameter(torch.zeros(1))
            optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
            fleet_.init_worker()
            moves = 0
            for _ in range(12):
                before = weight[0].item()
                optimizer.minimize(weight.sum())
                moves += weight[0].item() != before
            return moves

        return Job(body, 1, 1, environ=environ).run()[0]

    make, name = StrategyFactory.create_half_async_strategy, "FLAGS_communicator_max_merge_var_num"
    assert pushes(make(), {}) == 12
    assert pushes(make(), {name: "4"}) == 3
    assert pushes(make(max_merge_var_num=2), {name: "4"}) == 6
    assert pushes(StrategyFactory.create_sync_strategy(), {name: "4"}) == 12, "a synchronous job merges nothing"


def test_merging_sums_by_id_in_the_order_given() -> None:
    ids, rows = merge([(np.array([4, 2]), np.ones((2, 1))), (np.array([2, 9]), np.full((2, 1), 3.0))], 2)
    assert dict(zip(ids.tolist(), rows[:, 0].tolist(), strict=True)) == {4: 0.5, 2: 2.0, 9: 1.5}


# --- What else goes on in every mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FREE)
def test_schedules_accumulation_and_clipping(mode: str) -> None:
    """One worker: the same as torch, with a warm-up, two backwards a step and clipped gradients."""

    def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, step, part).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        return values(model)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        plain = torch.optim.Adam(model.parameters(), lr=0.05)
        optimizer = fleet_.distributed_optimizer(plain, FREE[mode], model=model)
        fleet_.init_worker()
        return run(model, optimizer)

    model = make_model()
    expected = run(model, torch.optim.Adam(model.parameters(), lr=0.05))
    (got,) = run_job(body, 1, 2)
    assert_close(got, expected)


@pytest.mark.parametrize("mode", FREE)
def test_several_optimizers(mode: str) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        first, second = list(model.parameters())[:2], list(model.parameters())[2:]
        both = [torch.optim.SGD(first, lr=0.1), torch.optim.Adam(second, lr=0.01)]
        optimizer = fleet_.distributed_optimizer(both, FREE[mode], model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    model = make_model()
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    both = [torch.optim.SGD(first, lr=0.1), torch.optim.Adam(second, lr=0.01)]
    for step in range(STEPS):
        for optimizer in both:
            optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        for optimizer in both:
            optimizer.step()
    (got,) = run_job(body, 1, 2)
    assert_close(got, values(model))


@pytest.mark.parametrize("mode", FREE)
def test_a_checkpoint_by_all_workers_and_going_on_from_it(mode: str, tmp_path: object) -> None:
    where = f"{tmp_path}/ckpt"

    def body(fleet_: Fleet, worker: int) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), FREE[mode])
        fleet_.init_worker()
        begin = weight[0].item()
        for _ in range(5):
            optimizer.minimize(weight.sum())
        everybody.wait(20)
        fleet_.save_persistables(where)
        return begin

    everybody = threading.Barrier(2)
    run_job(body, 2, 2)
    begins = Job(body, 2, 1, model_dir=where).run()
    assert max(begins) == -10, "the first to come finds what both have done; the other may find more"


@pytest.mark.parametrize("mode", RELAXED)
def test_parameters_cannot_join_a_running_job_without_rounds(mode: str) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), RELAXED[mode])
        fleet_.init_worker()
        with pytest.raises(UnsupportedError, match="cannot join a running job"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})

    run_job(body, 1, 1)


def test_the_config_chooses_half_async() -> None:
    config = DistributeTranspilerConfig()
    config.sync_mode = False
    config.half_async = True

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), config, model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    (got,) = run_job(body, 1, 1)
    assert_close(got, reference(OPTIMIZERS["sgd"], 1))
