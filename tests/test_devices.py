"""Workers whose models are on a CUDA device compute what they do on the CPU. Skipped where there is none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Job, run_job
from small_job import STRATEGIES

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.errors import NonFiniteGradientError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

STEPS = 6
#: Workers are threads, and torch's generator is one for all.
_SEEDING = threading.Lock()
#: Between two devices' products of matrices.
TOLERANCE = 2e-5
#: What divides by the size of gradients makes much of their last bits, unless ``eps`` is larger than those.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3),
}


class ClickModel(torch.nn.Module):
    """Every way rows can be asked for, and a dense part of which one parameter is large enough to leave by itself."""

    def __init__(self) -> None:
        super().__init__()
        with _SEEDING:
            torch.manual_seed(7)
            self._make()

    def _make(self) -> None:
        self.rows = fleet.nn.Embedding(None, 4, padding_idx=0, initializer="uniform(-0.1, 0.1)")
        self.bags = fleet.nn.EmbeddingBag(None, 4, mode="sum", initializer="uniform(-0.1, 0.1)")
        self.closed = torch.nn.Embedding(50, 4, sparse=True)
        self.wide = torch.nn.Linear(12, 4096)
        self.deep = torch.nn.Linear(4096, 128)
        self.turned = torch.nn.Parameter(torch.randn(3, 128).mul(0.1).t())  # memory laid out otherwise than row by row
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weights = 0.5 + ids * 0.02
        x = torch.cat([self.rows(ids).mean(1), self.bags(ids * 3, None, weights), self.closed(ids).sum(1)], 1)
        out: torch.Tensor = torch.relu(self.deep(torch.relu(self.wide(x)))) @ self.turned
        return out

    def loss(self, step: int, worker: int, device: str) -> torch.Tensor:
        return self(batch(step, worker).to(device)).square().mean()


def batch(step: int, worker: int) -> torch.Tensor:
    return torch.randint(0, 50, (16, 5), generator=torch.Generator().manual_seed(100 * step + worker))


def learnt(model: ClickModel, device: str) -> list[torch.Tensor]:
    with torch.no_grad():
        rows = [model.rows(torch.arange(50, device=device)), model.closed(torch.arange(50, device=device))]
    return [each.detach().cpu() for each in [*(p for p in model.parameters() if p.shape[0]), *rows]]


def body(device: str, strategy: Any, optimizer: str = "sgd") -> Callable[[Fleet, int], list[torch.Tensor]]:
    def work(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = ClickModel().to(device)
        made = OPTIMIZERS[optimizer](model.parameters())
        wrapped = fleet_.distributed_optimizer(made, strategy, model=model)
        fleet_.init_worker()
        batches = [batch(step, worker).to(device) for step in range(STEPS)]
        for step, ids in enumerate(fleet_.prefetch(batches, lambda ids: {model.rows: ids, model.bags: ids * 3})):
            loss = model(ids).square().mean()
            if step % 2:
                wrapped.minimize(loss)
            else:
                wrapped.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.shape[0]], 5.0)
                wrapped.step()
        assert all(p.device.type == torch.device(device).type for p in model.parameters())
        fleet_.barrier_worker()
        return learnt(model, device)

    return work


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["sync", "half-async", "geo", "ssp"])
def test_one_worker_computes_what_it_computes_on_the_cpu(name: str) -> None:
    (on_cpu,) = run_job(body("cpu", STRATEGIES[name]()), 1, 2)
    (on_device,) = run_job(body("cuda", STRATEGIES[name]()), 1, 2)
    same(on_device, on_cpu)


def test_every_gradient_of_a_device_is_applied_once() -> None:
    """With a constant one the end is known, whatever the order."""

    def work(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(3, device="cuda"))
        table = fleet.nn.Embedding(None, 2, initializer="zeros").cuda()
        made = torch.optim.SGD([weight, *table.parameters()], lr=1.0)
        optimizer = fleet_.distributed_optimizer(made, STRATEGIES["async"]())
        fleet_.init_worker()
        ids = torch.tensor([5, 5], device="cuda")
        for _ in range(10):
            optimizer.minimize(weight.sum() + table(ids).sum())
        fleet_.barrier_worker()
        state = fleet_.state_dict(torch.nn.ParameterDict({"weight": weight}))
        assert state["weight"].tolist() == [-10.0] * 3
        assert table(ids[:1]).tolist() == [[-20.0] * 2]

    run_job(work, 1, 2)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_synchronous_workers_compute_what_they_compute_on_the_cpu(optimizer: str) -> None:
    on_cpu = run_job(body("cpu", STRATEGIES["sync"](), optimizer), 2, 2)
    on_device = run_job(body("cuda", STRATEGIES["sync"](), optimizer), 2, 2)
    assert all(torch.equal(*pair) for pair in zip(*on_device, strict=True)), "workers agree to the bit"
    same(on_device[0], on_cpu[0])


def test_workers_on_different_devices_train_one_model() -> None:
    def mixed(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        return body("cuda" if worker else "cpu", STRATEGIES["sync"]())(fleet_, worker)

    on_cpu = run_job(body("cpu", STRATEGIES["sync"]()), 2, 1)
    for ours in run_job(mixed, 2, 1):
        same(ours, on_cpu[0])


def test_what_is_saved_from_a_device_is_read_on_another(tmp_path: Path) -> None:
    def work(device: str, load: bool) -> Callable[[Fleet, int], Any]:
        def run(fleet_: Fleet, worker: int) -> Any:
            model = ClickModel().to(device)
            wrapped = fleet_.distributed_optimizer(
                torch.optim.Adagrad(model.parameters(), lr=0.05), STRATEGIES["sync"](), model=model
            )
            fleet_.init_worker()
            if load:
                fleet_.load_persistables(str(tmp_path / "kept"))
            else:
                for step in range(STEPS):
                    wrapped.minimize(model.loss(step, worker, device))
                fleet_.save_persistables(str(tmp_path / "kept"))
                fleet_.save_inference_model(str(tmp_path / "served"), model, (batch(0, 0).to(device),))
            state = fleet_.state_dict(model)
            assert all(each.device.type == "cpu" for each in state.values() if isinstance(each, torch.Tensor))
            fleet_.load_state_dict(model, state)
            with torch.no_grad():
                predicted = model(batch(0, 0).to(device)).cpu()
            return learnt(model, device), predicted

        return run

    ((trained, predicted),) = run_job(work("cuda", False), 1, 2)
    for device in ("cuda", "cpu"):
        ((loaded, _),) = run_job(work(device, True), 1, 1)
        assert all(torch.equal(*pair) for pair in zip(loaded, trained, strict=True))
    served = fleet.load_inference_model(str(tmp_path / "served"), ClickModel())
    torch.testing.assert_close(served(batch(0, 0)), predicted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
def test_gradients_in_fewer_bits(dtype: str) -> None:
    strategy = StrategyFactory.create_sync_strategy(wire_dtype=dtype)
    (on_cpu,) = run_job(body("cpu", strategy), 1, 1)
    (on_device,) = run_job(body("cuda", strategy), 1, 1)
    for mine, other in zip(on_device, on_cpu, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-3)


def test_a_device_gradient_that_is_not_finite_is_refused() -> None:
    def work(fleet_: Fleet, worker: int) -> str:
        model = torch.nn.Linear(4, 2, device="cuda")
        strategy = StrategyFactory.create_sync_strategy(check_finite=True)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        fleet_.init_worker()
        with pytest.raises(NonFiniteGradientError) as caught:
            optimizer.minimize(model(torch.full((1, 4), float("nan"), device="cuda")).sum())
        return str(caught.value)

    (said,) = run_job(work)
    assert "holds NaN or infinity" in said


def test_values_and_metrics_of_a_device() -> None:
    def work(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(2, device="cuda"))
        fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=0.1), STRATEGIES["async"]())
        fleet_.init_worker()
        total = fleet_.all_reduce_worker(torch.full((3,), worker + 1.0, device="cuda"))
        assert total.device.type == "cuda"
        assert total.tolist() == [3.0] * 3
        scores, labels = torch.tensor([0.1, 0.9, 0.8, 0.3]), torch.tensor([0, 1, 0, 1])
        assert fleet_.metrics.auc(scores.cuda(), labels.cuda()) == fleet_.metrics.auc(scores, labels)

    run_job(work, 2, 1)


def test_a_job_that_is_over_leaves_nothing_on_the_device() -> None:
    Job(body("cuda", STRATEGIES["sync"]())).run()  # the libraries that torch calls keep memory from their first call on
    gc.collect()
    before = torch.cuda.memory_allocated()
    Job(body("cuda", STRATEGIES["sync"]())).run()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
