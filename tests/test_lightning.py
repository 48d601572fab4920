"""Lightning's Trainer with ``FleetStrategy`` ends where it ends without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_job

from fleet import Fleet
from fleet.errors import CheckpointError, NotInitializedError, StateError, UnsupportedError

pl = pytest.importorskip("lightning.pytorch", reason="comes with the extra 'lightning'")

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from fleet.lightning import FleetStrategy  # noqa: E402

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore::UserWarning")]

ROWS, EXAMPLES, BATCH = 20, 60, 10


class Module(pl.LightningModule):
    def __init__(self, optimizer: str = "Adagrad", gamma: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.optimizer, self.gamma = optimizer, gamma
        self.table = torch.nn.Embedding(ROWS, 4)
        self.head = torch.nn.Linear(4, 1)
        self.norms: list[float] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).squeeze(1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        ids, wanted = batch
        return torch.nn.functional.mse_loss(self(ids), wanted)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.training_step(batch, index))

    test_step = validation_step

    def on_before_optimizer_step(self, _: Any) -> None:
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, self.gamma)]


def loader(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (EXAMPLES,), generator=generator)
    return DataLoader(TensorDataset(ids, torch.randn(EXAMPLES, generator=generator)), BATCH)


@contextmanager
def job() -> Iterator[Fleet]:
    """One of its own, alone in this process."""
    fleet_ = Fleet(environ={})
    try:
        yield fleet_
    finally:
        with suppress(NotInitializedError):  # one that was refused has not begun
            fleet_.stop_worker()


def trainer(folder: Path, strategy: Any, **options: Any) -> Any:
    told = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(default_root_dir=folder, strategy=strategy, **{"max_epochs": 4, **told, **options})


def fit(folder: Path, fleet_: Fleet | None, module: Module, ckpt_path: str | None = None, **options: Any) -> Any:
    """The trainer, after its fit: with a job, or Lightning's own."""
    strategy = "auto" if fleet_ is None else FleetStrategy(remote="all", job=fleet_)
    used = trainer(folder, strategy, **options)
    used.fit(module, loader(2), loader(3), ckpt_path=ckpt_path)
    return used


def assert_same_end(left: Any, right: Any, tolerance: float = 1e-5) -> None:
    assert list(left) == list(right)
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.3},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 4},
        {"precision": "bf16-mixed"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_a_fit_ends_where_it_ends_without(options: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = Module(), Module()
    without = fit(tmp_path / "plain", None, plain, **options)
    with job() as fleet_:
        used = fit(tmp_path / "ours", fleet_, ours, **options)
        assert fleet_.summary()["tables"]["table.weight"]["rows"] == ROWS
        assert_same_end(ours.state_dict(), plain.state_dict())
        assert_same_end(used.callback_metrics, without.callback_metrics)
        assert ours.norms == pytest.approx(plain.norms, abs=1e-5)
        assert max(plain.norms) > 0.3, "or there was nothing to clip"
        assert used.global_step == without.global_step
        assert used.optimizers[0].param_groups[0]["lr"] == without.optimizers[0].param_groups[0]["lr"] < 0.1


def test_it_stops_early_and_goes_back_to_the_best(tmp_path: Path) -> None:
    def run(folder: Path, fleet_: Fleet | None) -> tuple[Any, ...]:
        best = ModelCheckpoint(folder, monitor="val", save_top_k=1)
        callbacks = [best, EarlyStopping("val", patience=2)]
        module = Module(gamma=1.0)
        used = fit(folder, fleet_, module, callbacks=callbacks, max_epochs=30)
        [tested] = used.test(module, loader(3), ckpt_path="best", verbose=False)
        loaded = Module.load_from_checkpoint(best.best_model_path)
        assert_same_end(module.state_dict(), loaded.state_dict(), 0.0)
        return used.current_epoch, float(best.best_model_score), tested["val"], loaded.state_dict()

    epoch, score, tested, state = run(tmp_path / "plain", None)
    with job() as fleet_:
        ours = run(tmp_path / "ours", fleet_)
    assert (ours[0], epoch < 30) == (epoch, True)
    assert ours[1:3] == pytest.approx((score, tested), abs=1e-5)
    assert tested == pytest.approx(score)
    assert_same_end(ours[3], state)
    assert sorted(path.suffix for path in (tmp_path / "ours").iterdir()) == [".ckpt", ".fleet"], "older ones are gone"


@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_it_resumes_exactly(optimizer: str, tmp_path: Path) -> None:
    whole = Module(optimizer)
    with job() as fleet_:
        fit(tmp_path, fleet_, whole)
        end = whole.state_dict()
    with job() as fleet_:
        half = fit(tmp_path, fleet_, Module(optimizer), max_epochs=2)
        half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Module(optimizer)
    with job() as fleet_:
        used = fit(tmp_path, fleet_, resumed, ckpt_path=str(tmp_path / "half.ckpt"))
        assert used.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)
        assert_same_end(resumed.state_dict(), end, 0.0)


def test_going_on_without_the_state_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, None, Module(), max_epochs=1).save_checkpoint(tmp_path / "plain.ckpt")
    with job() as fleet_, pytest.raises(CheckpointError, match=r"plain\.ckpt\.fleet"):
        fit(tmp_path, fleet_, Module(), ckpt_path=str(tmp_path / "plain.ckpt"))


def test_two_workers_go_on_together(tmp_path: Path) -> None:
    def run(epochs: int, folder: Path, ckpt_path: str | None = None) -> list[Any]:
        modules = [Module("Adam"), Module("Adam")]  # from the generator that all threads share

        def body(fleet_: Fleet, worker: int) -> Any:
            callbacks = [ModelCheckpoint(folder if worker == 0 else None), EarlyStopping("val", patience=9)]
            used = fit(folder, fleet_, modules[worker], ckpt_path, callbacks=callbacks, max_epochs=epochs)
            places = used.strategy.all_gather(torch.tensor([worker, 7]))
            assert (used.world_size, used.global_rank, places.tolist()) == (2, worker, [[0, 7], [1, 7]])
            assert used.strategy.reduce(torch.tensor(float(worker))) == 0.5
            assert used.strategy.broadcast({"from": worker}, src=1) == {"from": 1}
            assert used.global_step == epochs * EXAMPLES // BATCH // 2
            return modules[worker].state_dict(), used.checkpoint_callback.best_model_path

        return run_job(body, 2, 2)

    whole = run(4, tmp_path / "whole")
    [(_, half), (_, told)] = run(2, tmp_path / "half")
    assert half == told, "worker 1 knows where worker 0 has saved"
    resumed = run(4, tmp_path / "resumed", half)
    for (state, _), (expected, _) in zip(resumed, whole, strict=True):
        assert_same_end(state, expected, 0.0)


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.table, self.head)]

    automatic_optimization = False


def test_what_a_job_has_no_meaning_for_is_refused_by_name(tmp_path: Path) -> None:
    with job() as fleet_, pytest.raises(UnsupportedError, match="several optimizers"):
        fit(tmp_path, fleet_, TwoOptimizers())
    with job() as fleet_:
        module = Module()
        used = fit(tmp_path, fleet_, module, max_epochs=1)
        with pytest.raises(StateError, match="second time"):
            used.fit(module, loader(2))
    collective = Fleet(environ={"PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:1", "PADDLE_TRAINER_ID": "0"})
    with pytest.raises(UnsupportedError, match="collective"):
        FleetStrategy(job=collective)


def raising(error: BaseException) -> Callable[..., Any]:
    def step(*_: object) -> None:
        raise error

    return step


def test_an_exception_leaves_the_job_to_whoever_catches_it(tmp_path: Path) -> None:
    module = Module()
    module.training_step = raising(RuntimeError("broken"))  # type: ignore[method-assign]
    with job() as fleet_:
        with pytest.raises(RuntimeError, match="broken"):
            fit(tmp_path, fleet_, module)
        assert fleet_.resume_step() == 0
