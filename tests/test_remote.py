"""Which of a model's embeddings go to the servers (``remote=``), and what is told about those that do and that stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_close, run_job
from inside import description_of

import fleet.nn
import fleet.optim
from fleet import Fleet, StrategyFactory
from fleet.collective import DistributedStrategy
from fleet.errors import ArgumentTypeError, ConfigurationError, UnsupportedError
from fleet.ps.worker import embedding_remarks
from fleet.role_maker import UserDefinedCollectiveRoleMaker
from fleet.transpiler import DistributeTranspilerConfig

ROWS, DIM = 10, 4
ALL = torch.arange(ROWS)
IDS = torch.tensor([[1, 2], [2, 9]])


def start_of(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))


class Library(torch.nn.Module):
    """As libraries make their models: dense embeddings, one that is marked sparse, one that is frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.user = torch.nn.Embedding(ROWS, DIM, padding_idx=2, _weight=start_of(seed))
        self.bag = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=start_of(seed + 1))
        self.marked = torch.nn.Embedding(ROWS, DIM, sparse=True, _weight=start_of(seed + 2))
        self.frozen = torch.nn.Embedding.from_pretrained(start_of(seed + 3))
        self.again = torch.nn.Embedding(ROWS, DIM, _weight=self.user.weight)
        self.again.weight = self.user.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.user(ids) + self.marked(ids) + self.frozen(ids) + 2 * self.again(ids)
        return rows.sum(1) + self.bag(ids)


def loss(model: torch.nn.Module) -> torch.Tensor:
    out = model(IDS)
    return (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).square().mean()


def wrap(fleet_: Fleet, model: torch.nn.Module, remote: Any = None, **options: Any) -> Any:
    """With plain gradient descent; without ``remote`` as the default has it."""
    sgd = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})
    return fleet_.distributed_optimizer(sgd, model=model, **({} if remote is None else {"remote": remote}))


def alone() -> Fleet:
    fleet_ = Fleet(environ={})
    fleet_.init()
    return fleet_


def tables(fleet_: Fleet) -> list[str]:
    return [table.name for table in description_of(fleet_).spec.tables]


# ---------------------------------------------------------------------------------------------- which go

CHOICES: dict[str, tuple[Any, list[str]]] = {
    "as ever": (None, ["marked.weight"]),
    "sparse": ("sparse", ["marked.weight"]),
    "all": ("all", ["user.weight", "bag.weight", "marked.weight"]),
    "a function": (lambda name, module: module.sparse or name in ("user", "again"), ["user.weight", "marked.weight"]),
    "one of two with one weight": (lambda name, _module: name in ("user", "marked"), ["user.weight", "marked.weight"]),
    "frozen as well": (lambda name, _module: name in ("frozen", "marked"), ["marked.weight", "frozen.weight"]),
    "no more than have to": (lambda _name, module: module.sparse, ["marked.weight"]),
}


@pytest.mark.parametrize(("remote", "expected"), CHOICES.values(), ids=CHOICES)
def test_whatever_goes_remote_two_workers_end_where_torch_ends(remote: Any, expected: list[str]) -> None:
    """Worker 0's values win, the modules and weights stay the user's, a padding row has no gradient."""

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = Library(seed=100 * worker)
        modules, weights = dict(model.named_modules()), dict(model.named_parameters())
        frozen = model.frozen.weight.detach().clone()
        optimizer = wrap(fleet_, model, remote)
        fleet_.init_worker()
        assert tables(fleet_) == expected
        assert dict(model.named_modules()) == modules
        assert all(weights[name] is weight for name, weight in model.named_parameters())
        assert isinstance(model.user, torch.nn.Embedding)
        for _ in range(3):
            optimizer.minimize(loss(model))
        if worker == 0:
            assert torch.equal(model.frozen(ALL), frozen)
        return [found.detach() for found in (model.user(ALL), model.bag(ALL[:, None]), model.marked(ALL))]

    reference = Library()
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        loss(reference).backward()
        sgd.step()
    ends = [weight.detach() for weight in (reference.user.weight, reference.bag.weight, reference.marked.weight)]
    for got in run_job(body, 2, 2):
        assert_close(got, ends, 1e-5)


def test_a_function_is_asked_once_about_each_embedding_that_is_trained() -> None:
    asked: list[tuple[str, torch.nn.Module]] = []

    def choose(name: str, module: torch.nn.Module) -> bool:
        asked.append((name, module))
        return name == "deep.0"

    model = torch.nn.ModuleDict({"deep": torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM)), "bag": Library().bag})
    model["own"], model["other"] = fleet.nn.Embedding(ROWS, DIM), torch.nn.Embedding(ROWS, DIM)
    model["layer"] = torch.nn.Linear(DIM, 1)
    trained = [weight for name, weight in model.named_parameters() if not name.startswith("other")]
    fleet_ = alone()
    fleet_.distributed_optimizer(torch.optim.SGD(trained, lr=0.1), model=model, remote=choose)
    fleet_.init_worker()
    assert asked == [("deep.0", model["deep"][0]), ("bag", model["bag"])]
    assert tables(fleet_) == ["deep.0.weight", "own.weight"]
    fleet_.stop_worker()


def test_what_has_stayed_stays_and_what_joins_is_asked_about() -> None:
    """One that was frozen when the job began is a dense parameter of it, and goes on as that."""
    model = Library()
    optimizer = wrap(fleet_ := alone(), model, "all")
    fleet_.init_worker()
    model.frozen.requires_grad_(True)
    model.late = torch.nn.Embedding(ROWS, DIM)
    optimizer.add_param_group({"params": [model.late.weight]})
    assert tables(fleet_) == [*CHOICES["all"][1], "late.weight"]
    before = model.frozen.weight.detach().clone()
    optimizer.minimize(loss(model) + model.late(ALL).sum())
    assert not torch.equal(model.frozen.weight, before)
    fleet_.stop_worker()


def test_a_checkpoint_wins_over_what_a_dense_embedding_began_with(tmp_path: Any) -> None:
    def body(fleet_: Fleet, _worker: int) -> torch.Tensor:
        model = Library(seed=7)
        optimizer = wrap(fleet_, model, "all")
        fleet_.init_worker()
        if not list(tmp_path.iterdir()):
            optimizer.minimize(loss(model))
            fleet_.save_persistables(str(tmp_path / "saved"))
        return model.user(ALL).detach()

    (trained,) = run_job(body, 1, 1)
    (loaded,) = run_job(body, 1, 2, model_dir=str(tmp_path / "saved"))
    assert torch.equal(trained, loaded)
    assert not torch.equal(trained, Library(seed=7).user.weight)


# ---------------------------------------------------------------------------------------------- what is refused


class Scaled(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


CANNOT_GO: dict[str, Callable[[], torch.nn.Module]] = {
    "Scaled": lambda: Scaled(ROWS, DIM),
    "max_norm": lambda: torch.nn.Embedding(ROWS, DIM, max_norm=1.0),
    "scale_grad_by_freq": lambda: torch.nn.Embedding(ROWS, DIM, scale_grad_by_freq=True),
    "mode='max'": lambda: torch.nn.EmbeddingBag(ROWS, DIM, mode="max"),
}


@pytest.mark.parametrize("what", CANNOT_GO)
def test_all_refuses_by_name_what_cannot_go_and_a_function_leaves_it_out(what: str) -> None:
    model = torch.nn.ModuleDict({"good": torch.nn.Embedding(ROWS, DIM), "bad": CANNOT_GO[what]()})
    kinds = [type(module) for module in model.values()]
    with pytest.raises(UnsupportedError, match=r"'bad'.*remote=") as caught:
        wrap(alone(), model, "all")
    assert what in str(caught.value)
    assert [type(module) for module in model.values()] == kinds, "all or none"
    fleet_ = alone()
    wrap(fleet_, model, lambda name, _module: name != "bad")
    fleet_.init_worker()
    assert tables(fleet_) == ["good.weight"]
    fleet_.stop_worker()


def test_what_the_optimizer_cannot_do_to_rows_leaves_the_model_as_it_was() -> None:
    """So that the script can go on without: dense parameters are what this optimizer is for."""
    model, fleet_ = torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM)), alone()
    lamb = fleet.optim.Lamb(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"Lamb cannot update rows of the sparse table '0\.weight'"):
        fleet_.distributed_optimizer(lamb, model=model, remote="all")
    assert type(model[0]) is torch.nn.Embedding
    fleet_.distributed_optimizer(lamb, model=model)
    fleet_.init_worker()
    assert tables(fleet_) == []
    fleet_.stop_worker()


def test_what_has_sparse_gradients_cannot_stay() -> None:
    with pytest.raises(UnsupportedError, match="'marked' has sparse gradients and is to stay"):
        wrap(alone(), Library(), lambda _name, _module: False)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": ("dense", ConfigurationError, "remote is unknown.*'sparse', 'all', or a function.*'dense'"),
    "no text": (True, ArgumentTypeError, "remote is of the wrong type.*True"),
    "None": (0, ArgumentTypeError, "remote is of the wrong type.*0"),
    "a class": (torch.nn.Embedding, ArgumentTypeError, "remote is of the wrong type.*Embedding"),
    "an answer that is none": (lambda *_: None, ArgumentTypeError, "'user' goes remote.*True or False.*None"),
    "an answer that is not one": (lambda *_: 1, ArgumentTypeError, "'user' goes remote.*True or False.*1"),
}


@pytest.mark.parametrize(("remote", "kind", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_remote_is_refused_by_name(remote: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        wrap(alone(), Library(), remote)


@pytest.mark.parametrize("remote", ["all", lambda *_: True])
def test_without_a_model_there_is_nothing_to_choose_from(remote: Any) -> None:
    sgd = torch.optim.SGD(Library().parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"remote .* was given none.*model=model"):
        alone().distributed_optimizer(sgd, remote=remote)


def test_a_collective_job_has_nowhere_to_go_to() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM))
    fleet_ = Fleet(environ={})
    fleet_.init(UserDefinedCollectiveRoleMaker(0, ["127.0.0.1:1"]))
    with pytest.raises(UnsupportedError, match="remote='all' cannot be honoured: a collective job"):
        wrap(fleet_, model, "all")
    wrap(fleet_, model, "sparse")


def test_strategies_do_not_swallow_it() -> None:
    with pytest.raises(AttributeError, match="no setting 'remote'"):
        DistributeTranspilerConfig().remote = "all"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no setting 'remote'"):
        DistributedStrategy().remote = "all"  # type: ignore[attr-defined]
    for make in (StrategyFactory.create_sync_strategy, StrategyFactory.create_async_strategy):
        with pytest.raises(TypeError, match="remote"):
            make(remote="all")  # type: ignore[call-arg]


# ---------------------------------------------------------------------------------------------- what is told


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "fleet" and record.levelno >= logging.WARNING]


def test_lazy_rows_are_told_of_once_where_torch_would_be_dense(caplog: pytest.LogCaptureFixture) -> None:
    def body(fleet_: Fleet, _worker: int) -> None:
        model = Library()
        slow = torch.optim.AdamW([model.user.weight, model.marked.weight], lr=0.1)
        fast = torch.optim.SGD([model.bag.weight], lr=0.1, momentum=0.5)
        fleet_.distributed_optimizer([slow, fast], model=model, remote="all")
        fleet_.init_worker()

    run_job(body, 2, 1)
    (only,) = told(caplog)
    assert "'user.weight', 'bag.weight'" in only
    assert "marked" not in only, "in torch, too, its rows are lazy"
    assert "AdamW with betas=(0.9, 0.999), weight_decay=0.01" in only
    assert "SGD with momentum=0.5" in only


QUIET: dict[str, tuple[Any, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "formulas that leave idle rows alone": ("all", torch.optim.Adagrad, {}),
    "rows that are lazy in torch": ("sparse", torch.optim.Adagrad, {"weight_decay": 0.0}),
    "fleet's own": ("all", torch.optim.Adam, {"own": True}),
}


@pytest.mark.parametrize("what", QUIET)
def test_nothing_is_told_where_nothing_differs(what: str, caplog: pytest.LogCaptureFixture) -> None:
    remote, kind, options = QUIET[what]
    model = torch.nn.Sequential(fleet.nn.Embedding(ROWS, DIM)) if options.pop("own", False) else Library()
    alone().distributed_optimizer(kind(model.parameters(), **options), model=model, remote=remote)
    assert told(caplog) == []


def test_a_large_dense_embedding_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_remarks, "LARGE_BYTES", ROWS * DIM * 4 - 1)

    def body(fleet_: Fleet, _worker: int) -> None:
        model = torch.nn.ModuleDict(
            {"large": torch.nn.Embedding(ROWS, DIM), "small": torch.nn.Embedding(ROWS - 1, DIM)}
        )
        model["twin"] = torch.nn.Embedding(ROWS, DIM, _weight=model["large"].weight)
        model["twin"].weight, model["layer"] = model["large"].weight, torch.nn.Linear(100, 100)
        wrap(fleet_, model)
        fleet_.init_worker()

    run_job(body, 2, 1)
    (only,) = told(caplog)
    assert "in each step: 'large.weight' (0 MiB)." in only
    assert "sparse=True, or distributed_optimizer(…, model=model, remote='all')" in only


def test_a_large_frozen_embedding_is_better_left_out_of_the_optimizer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_remarks, "LARGE_BYTES", 1)
    wrap(alone(), Library(), "all")
    (only,) = told(caplog)
    assert "'frozen.weight' (0 MiB)" in only
    assert "if the optimizer is not given it" in only
    assert "remote='all'" not in only
