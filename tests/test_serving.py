"""What a job has learnt leaves it whole: as plain tensors, as a model of plain torch, as a program that needs neither
the job nor this package."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness import PATIENT, Job, run_job

import fleet
import fleet.nn
from fleet import Fleet
from fleet.checkpoint import inference
from fleet.checkpoint.inference import InferenceModel, TableFacts
from fleet.errors import (
    ArgumentTypeError,
    CheckpointError,
    FleetError,
    NotInitializedError,
    UnsupportedError,
)
from fleet.nn.exported_program import export_program, save_program
from fleet.nn.frozen import FrozenTable, freeze
from fleet.plan.specs import Initializer, TableSpec
from fleet.ps.worker.connection import Connection
from fleet.ps.worker.model_export import SortedRows
from fleet.serving import export

DIM = 4
INT64 = torch.iinfo(torch.int64)


def alone(body: Callable[[Fleet], Any], servers: int = 2) -> Any:
    """What ``body`` returns as the only worker of a job."""
    return run_job(lambda fleet_, worker: body(fleet_), 1, servers)[0]


def drawn(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def values_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------- state_dict

MODES: dict[str, Any] = {
    "sync": fleet.StrategyFactory.create_sync_strategy(),
    "half_async": fleet.StrategyFactory.create_half_async_strategy(),
    "async": fleet.StrategyFactory.create_async_strategy(),
    "ssp": fleet.StrategyFactory.create_ssp_strategy(staleness=2),
    "geo": fleet.StrategyFactory.create_geo_strategy(update_frequency=3),
}


class Linear(torch.nn.Module):
    """Its gradients do not depend on its values, so the result is the same to the bit however steps are ordered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(35.0).view(7, 5))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        self.tied = self.weight
        self.still = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.own = torch.nn.Embedding(6, DIM, sparse=True, _weight=values_of(1, 6, DIM))
        self.sized = fleet.nn.Embedding(9, DIM, padding_idx=2)
        self.open = fleet.nn.Embedding(None, DIM, initializer="constant(1.0)")

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.weight.sum() * 2 + self.nothing.sum() + sum(t(ids).sum() for t in (self.own, self.sized, self.open))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("servers", [1, 3])
def test_state_dict_is_the_whole_model(mode: str, servers: int) -> None:
    """With all that this worker has computed, though its mode may not have sent it yet."""
    steps, ids = 4, torch.tensor([5, 1, 1])

    def body(fleet_: Fleet) -> None:
        model = Linear()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), MODES[mode], model=model)
        fleet_.init_worker()
        start = {"sized": model.sized(torch.arange(9)).detach(), "own": model.own(torch.arange(6)).detach()}
        for _ in range(steps):
            optimizer.minimize(model.loss(ids))
        state = fleet_.state_dict(model)
        keys = list(model.state_dict(keep_vars=True))
        keys.insert(keys.index("open.weight"), "open.ids")
        assert list(state) == keys
        assert all(type(value) is torch.Tensor and value.is_cpu for value in state.values())
        assert torch.equal(state["weight"], torch.arange(35.0).view(7, 5) - 0.5 * 2 * steps)
        assert state["tied"] is state["weight"] or torch.equal(state["tied"], state["weight"])
        assert torch.equal(state["still"], torch.ones(2))
        assert state["seen"] == steps
        moved = {key: value.clone() for key, value in start.items()}
        for value in moved.values():
            for each in ids.tolist() * steps:
                value[each] -= 0.5
        torch.testing.assert_close(state["own.weight"], moved["own"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state["sized.weight"], moved["sized"], rtol=1e-6, atol=1e-6)
        assert not state["sized.weight"][2].any(), "the padding row reads zeros"
        assert state["open.ids"].tolist() == [1, 5]
        assert torch.equal(
            state["open.weight"], torch.tensor([[1 - 0.5 * 2 * steps], [1 - 0.5 * steps]]).expand(2, DIM)
        )
        for each in (model.own, model.sized):
            assert torch.equal(
                state[f"{'own' if each is model.own else 'sized'}.weight"], each(torch.arange(each.num_embeddings))
            )
        without = fleet_.state_dict(model, tables=False)
        assert without.keys() == {"weight", "nothing", "tied", "still", "seen"}
        state["weight"].zero_()
        assert model.weight.detach().any(), "it is a copy"
        optimizer.minimize(model.loss(ids))

    alone(body, servers)


def test_a_plain_model_takes_the_state() -> None:
    class Plain(torch.nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.table = kind(11, DIM, padding_idx=3)
            self.top = torch.nn.Linear(DIM, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.top(self.table(ids))

    def body(fleet_: Fleet) -> None:
        model = Plain(fleet.nn.Embedding)
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        for step in range(3):
            optimizer.minimize(model(drawn(step, 0, 8, 5)).square().sum())
        plain = Plain(torch.nn.Embedding)
        plain.load_state_dict(fleet_.state_dict(model))
        assert torch.equal(plain(torch.arange(11)), model(torch.arange(11))), (
            "never trained rows too, as training reads"
        )

    alone(body)


def test_rows_come_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every size, from three servers, and in the order of their ids in the end."""
    monkeypatch.setattr("fleet.ps.table.shard.PIECE_BYTES", 100)
    monkeypatch.setattr("fleet.ps.worker.model_export._IDS_AT_ONCE", 7)
    ids = torch.cat([drawn(0, -(2**60), 2**60, 50), torch.tensor([INT64.min, INT64.max, 0, -1])])

    def body(fleet_: Fleet) -> None:
        model = torch.nn.ModuleDict({"open": fleet.nn.Embedding(None, 3), "sized": fleet.nn.Embedding(40, 2)})
        model["wide"] = fleet.nn.Embedding(None, 2, initializer="uniform(0, 1)").double()
        dense = torch.nn.Parameter(torch.arange(1000.0))
        model.register_parameter("dense", dense)
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        optimizer.minimize(
            model["open"](ids).sum() + model["wide"](ids).sum() + model["sized"](ids % 40)[::2].sum() + dense.sum()
        )
        state = fleet_.state_dict(model)
        assert state["open.ids"].tolist() == sorted(ids.tolist())
        assert torch.equal(state["open.weight"], model["open"](state["open.ids"]))
        assert state["wide.weight"].dtype == torch.float64
        assert torch.equal(state["wide.weight"], model["wide"](state["wide.ids"]))
        assert torch.equal(state["sized.weight"], model["sized"](torch.arange(40)))
        assert torch.equal(state["dense"], dense)

    alone(body, 3)


def test_rows_that_come_into_being_meanwhile_are_taken_too() -> None:
    spec = TableSpec("t", 3, "float64", 0, None, Initializer("normal", 0.0, 1.0))
    collected = SortedRows(spec, 2)
    rows = values_of(3, 40, 3).double()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    for part in (order[:2], order[2:3], order[3:10], order[10:10], order[10:]):
        collected.add(part - 20, rows[part])
    for _ in range(2):  # once for each name that a table has
        found = collected.tensors("t.weight")
        assert torch.equal(found["t.ids"], torch.arange(40) - 20)
        assert torch.equal(found["t.weight"], rows)


def test_every_worker_has_the_same_state_and_one_may_ask_alone() -> None:
    def body(fleet_: Fleet, worker: int) -> dict[str, torch.Tensor]:
        model = Linear()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        fleet_.init_worker()
        optimizer.minimize(model.loss(torch.tensor([worker, 4])))
        state = fleet_.state_dict(model)
        if worker == 2:
            again = fleet_.state_dict(model)
            assert all(torch.equal(value, again[key]) for key, value in state.items())
        optimizer.minimize(model.loss(torch.tensor([worker])))
        return state

    first, *others = run_job(body, 3, 2)
    for other in others:
        assert all(torch.equal(value, other[key]) for key, value in first.items())


# ---------------------------------------------------------------------------------------------- serving


class Net(torch.nn.Module):
    """Every kind of embedding, in every kind of input."""

    def __init__(self) -> None:
        super().__init__()
        self.open = fleet.nn.Embedding(None, DIM, padding_idx=-3, initializer="constant(0.5)")
        self.sized = fleet.nn.Embedding(20, DIM, padding_idx=-1, initializer="uniform(0, 1)")
        self.own = torch.nn.Embedding(20, DIM, padding_idx=5, sparse=True, _weight=values_of(2, 20, DIM))
        self.means = fleet.nn.EmbeddingBag(None, DIM, mode="mean", padding_idx=7)
        self.sums = fleet.nn.EmbeddingBag(20, DIM, mode="sum", include_last_offset=True)
        self.bags = torch.nn.EmbeddingBag(
            20, DIM, mode="sum", sparse=True, padding_idx=0, _weight=values_of(3, 20, DIM)
        )
        self.group = fleet.nn.EmbeddingGroup({"a": (None, DIM), "b": (20, DIM)})
        self.never = fleet.nn.Embedding(None, DIM, initializer="normal(0.25, 1)")
        self.rest = [self.open]
        self.top = torch.nn.Linear(DIM, 2)
        self.norm = torch.nn.BatchNorm1d(DIM)

    def forward(self, ids: dict[str, torch.Tensor], bags: list[torch.Tensor], scale: torch.Tensor) -> Any:
        found = self.group({"a": ids["any"], "b": ids["sized"]})
        out = self.open(ids["any"]) + self.sized(ids["sized"]) + self.own(ids["sized"].int()) + self.rest[0](ids["any"])
        out = out + self.means(bags[0]) + self.bags(bags[1], None, bags[2]) + found["a"] + found["b"]
        out = out + self.sums(bags[3], bags[4])
        if not self.training:
            out = out + self.never(ids["any"])
        return {"score": self.top(self.norm(out)) * scale, "hidden": out}


def batch(size: int, seed: int, near: int = 30) -> tuple[Any, ...]:
    """Ids beyond ``near`` are none of those that were trained."""
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), drawn(seed + 1, 0, 4, size).cumsum(0)])
    return (
        {"any": drawn(seed, -near, near, size), "sized": drawn(seed, 0, 20, size)},
        [
            drawn(seed + 2, -near, near, size, 3),
            drawn(seed + 3, 0, 20, size, 2).int(),
            values_of(seed, size, 2),
            drawn(seed + 4, 0, 20, int(ends[-1])),
            ends,
        ],
        values_of(seed + 5, size, 1),
    )


def trained(fleet_: Fleet, worker: int, strategy: Any = None, steps: int = 3) -> Net:
    model = Net()
    torch.nn.init.constant_(model.top.weight, 0.3)
    torch.nn.init.constant_(model.top.bias, 0.1)
    optimizer = fleet_.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), strategy, model=model)
    fleet_.init_worker()
    for step in range(steps):
        optimizer.minimize(model(*batch(8, 10 * step + worker))["score"].square().mean())
    return model


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


@pytest.mark.parametrize(
    ("servers", "example"),
    [pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(1, 1, marks=pytest.mark.slow), (3, 3)],
)
def test_a_program_gives_what_evaluation_in_the_job_gives(tmp_path: Path, servers: int, example: int) -> None:
    """To the bit, for batches of any size; and so does a frozen copy of a fresh model."""

    def body(fleet_: Fleet) -> None:
        model = trained(fleet_, 0)
        fleet_.save_inference_model(str(tmp_path / "model"), model, batch(example, 40))
        assert model.training
        model.eval()
        program = torch.export.load(tmp_path / "model" / "model.pt2").module()
        frozen = fleet.load_inference_model(str(tmp_path / "model"), Net())
        assert not frozen.training
        for size in (0, 1, 2, 3, 1000):
            inputs = batch(size, 50 + size, near=60)
            expected = model(*inputs)
            assert_same(expected, program(*inputs))
            assert_same(expected, frozen(*inputs))
        assert sorted(os.listdir(tmp_path)) == ["model"]

    alone(body, servers)


class Score(torch.nn.Module):
    """One kind of embedding and a dense layer; ``*`` in front of arguments."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table
        self.top = torch.nn.Linear(DIM, 2)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(*inputs))


def saved(dirname: Path, model: torch.nn.Module, *inputs: torch.Tensor, example: Any = None, train: bool = True) -> Any:
    """Train a model for a step on ``inputs``, save it, and return its evaluation of some inputs as a function."""
    results = {}

    def body(fleet_: Fleet) -> None:
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        if train:
            optimizer.minimize(model(*inputs).sum())
        fleet_.save_inference_model(str(dirname), model, example)
        results["out"] = model.eval()(*inputs).detach()

    alone(body)
    return results["out"]


TABLES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[torch.Tensor, ...]]] = {
    "open": (lambda: fleet.nn.Embedding(None, DIM), (torch.tensor([4]),)),
    "lists of ids": (lambda: fleet.nn.Embedding(9, DIM), (torch.tensor([[4, 8]]),)),
    "int32": (lambda: fleet.nn.Embedding(9, DIM), (torch.tensor([4], dtype=torch.int32),)),
    "bag of lists": (lambda: fleet.nn.EmbeddingBag(None, DIM), (torch.tensor([[4, 1, 4]]),)),
    "bag of one": (lambda: fleet.nn.EmbeddingBag(None, DIM), (torch.tensor([4]), torch.tensor([0]))),
    "of torch": (lambda: torch.nn.Embedding(9, DIM, sparse=True), (torch.tensor([4]),)),
}


@pytest.mark.pairs(2)
@pytest.mark.parametrize("train", [True, False], ids=["trained", "never trained"])
@pytest.mark.parametrize(("make", "inputs"), TABLES.values(), ids=TABLES)
def test_an_example_of_one_sample_is_enough(tmp_path: Path, make: Any, inputs: Any, train: bool) -> None:
    """And a table without any row can be exported and run."""
    expected = saved(tmp_path / "model", Score(make()), *inputs, example=inputs, train=train)
    program = torch.export.load(tmp_path / "model" / "model.pt2").module()
    assert torch.equal(program(*inputs), expected)
    if len(inputs) == 1:
        many = program(torch.cat(inputs * 1000))
        # Some processors multiply larger matrices in another order.
        torch.testing.assert_close(many, expected.expand(1000, *expected.shape[1:]))


class Forwards(torch.nn.Module):
    """What a forward may do to a batch: each of these decides nothing by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = fleet.nn.Embedding(None, DIM, padding_idx=3)
        self.sized = fleet.nn.Embedding(9, DIM)
        self.bag = fleet.nn.EmbeddingBag(None, DIM, mode="sum")
        self.group = fleet.nn.EmbeddingGroup({"a": (None, DIM), "b": (9, DIM)})
        self.top = torch.nn.Linear(3 * DIM, 2)
        self.gru = torch.nn.GRU(DIM, 2, batch_first=True)
        self.attention = torch.nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(DIM)

    def forward(self, ids: torch.Tensor, named: Any, lists: Any, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        table, columns, (values, offsets) = self.table, ids.unbind(1), lists
        rows = table(ids)
        return {
            "column": table(ids[:, 0]),
            "by keyword": self.sized(ids=ids[:, 2]),
            "columns": self.top(table(ids[:, :3]).flatten(1)),
            "every other column": table(ids[:, ::2]).sum(1),
            "unbound": torch.stack([table(column) for column in columns], 1),
            "split": torch.cat([table(column) for column in ids.split(1, 1)], 1).mean(1),
            "transposed": torch.cat([table(column) for column in ids.t()], -1),
            "contiguous": table(ids[:, 1].contiguous()),
            "reshaped": table(ids[:, 1].reshape(-1)),
            "flat": table(ids.t().reshape(-1)).view(ids.shape[1], -1, DIM).sum(0),
            "output's column": rows[:, 1].contiguous(),
            "output transposed": rows.transpose(1, 2).reshape(-1, DIM * ids.shape[1]),
            "narrow": self.sized(ids[:, 1:2].int().squeeze(1)),
            "where": torch.where(ids[:, :1] > 3, table(ids[:, 0]), table(ids[:, 1])),
            "product": torch.bmm(rows[:, :2], rows[:, 1:].transpose(1, 2)),
            "masked": (rows * (ids != 0).unsqueeze(-1)).sum(1) / (ids != 0).sum(1, keepdim=True).clamp(min=1),
            "dict": self.sized(named["one"]) * scale + table(named["two"][:, 1]),
            "group": torch.cat([*self.group({"a": named["two"][:, 0], "b": named["one"]}).values(), scale], 1),
            "bag": self.bag(ids[:, 1:]),
            "bag of a column": self.bag(values[:, 0], offsets),
            "norm": self.norm(table(ids[:, 3])),
            "recurrent": self.gru(rows[:, :2])[0],
            "attention": self.attention(rows, rows, rows)[0],
            "zeros": table(ids[:, 0]) + torch.zeros(ids.shape[0], 1),
        }


def forwarded(size: int) -> tuple[Any, ...]:
    lengths = drawn(9, 0, 3, size)
    values = drawn(8, -9, 9, int(lengths.sum()), 2)
    return (
        drawn(size, 0, 9, size, 4),
        {"one": drawn(size + 1, 0, 9, size), "two": drawn(size + 2, -9, 9, size, 2)},
        (values, lengths.cumsum(0) - lengths),
        values_of(size, size, 1),
    )


@pytest.fixture(scope="module")
def forwards() -> torch.nn.Module:
    """Frozen as a job's end leaves them: with rows for some ids."""
    model = Forwards()
    tables = {
        key: FrozenTable(torch.arange(0, 9, 2), values_of(5, 5, DIM), handle.num_embeddings, 0.25, True)
        for key, handle in export.remote_tables(export.own_state(model)).items()
    }
    return freeze(model, {}, tables, {})


@pytest.mark.slow
@pytest.mark.parametrize("example", [1, 3])
def test_no_way_to_treat_a_batch_decides_its_size(forwards: torch.nn.Module, example: int) -> None:
    program = export_program(forwards, forwarded(example)).module()
    for size in (0, 1, 2, 1000):
        inputs = forwarded(size)
        assert_same(forwards(*inputs), program(*inputs))


@pytest.mark.parametrize(
    "decide",
    [lambda size: size == 1, lambda size: size != 1, lambda size: size > 5, lambda size: size <= 5],
    ids=["one", "not one", "many", "few"],
)
@pytest.mark.parametrize("example", [1, 3])
def test_a_forward_that_decides_by_the_batchs_size_is_refused(decide: Callable[[int], bool], example: int) -> None:
    class Deciding(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, 0] if decide(x.shape[0]) else x[:, 0] * 2

    with pytest.raises(UnsupportedError, match=r"batches of any size.*Deciding"):
        export_program(Deciding(), (torch.ones(example, 2),))


def test_a_program_is_exact_however_values_lie_in_memory(tmp_path: Path) -> None:
    class Lying(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
            self.turned = torch.nn.Parameter(torch.randn(5, 4).t())
            self.register_buffer("spread", torch.randn(16, 10).t()[::2])
            self.spread: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).mean((2, 3)) @ self.spread.t() @ self.turned.t()

    def body(job: Fleet, worker: int) -> torch.Tensor:
        torch.manual_seed(4)
        model = Lying()
        optimizer = job.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        optimizer.minimize(model(x).square().mean())
        job.save_inference_model(str(tmp_path / "serve"), model, example_inputs=(x,))
        with torch.no_grad():
            return model.eval()(x).clone()

    x = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    (expected,) = run_job(body)
    assert torch.equal(torch.export.load(tmp_path / "serve" / "model.pt2").module()(x), expected)
    assert torch.equal(fleet.load_inference_model(str(tmp_path / "serve"), Lying())(x), expected)


def test_columns_of_a_batch_of_one(tmp_path: Path) -> None:
    """From a job to a file and back."""

    class Columns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = fleet.nn.Embedding(None, DIM)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids[:, 0]) * self.table(ids[:, 1])

    ids = torch.tensor([[4, 5]])
    expected = saved(tmp_path / "model", Columns(), ids, example=(ids.expand(3, 2),))
    assert torch.equal(torch.export.load(tmp_path / "model" / "model.pt2").module()(ids), expected)


def test_an_id_out_of_range_is_refused_as_ever(tmp_path: Path) -> None:
    ids = torch.tensor([4, 8])
    for name, kind in (("rows", fleet.nn.Embedding), ("bags", fleet.nn.EmbeddingBag)):
        bagged = ids if kind is fleet.nn.Embedding else ids[:, None]
        saved(tmp_path / name, Score(kind(9, DIM)), bagged, example=(bagged,))
        program = torch.export.load(tmp_path / name / "model.pt2").module()
        program(bagged)
        for wrong in (-1, 9, INT64.max):
            with pytest.raises((IndexError, RuntimeError), match=r"range|idx"):
                program(torch.full_like(bagged, wrong))


def test_modules_that_share_a_table_share_it_when_frozen(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = fleet.nn.Embedding(None, DIM), fleet.nn.EmbeddingBag(None, DIM, mode="sum")
            self.second.weight = self.first.weight
            self.same = self.first

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.first(ids) + self.second(ids[:, None]) + self.same(ids)

    ids = torch.tensor([3, -8, 3])
    expected = saved(tmp_path / "model", Tied(), ids, example=(ids,))
    assert torch.equal(torch.export.load(tmp_path / "model" / "model.pt2").module()(ids), expected)
    frozen = fleet.load_inference_model(str(tmp_path / "model"), Tied())
    assert torch.equal(frozen(ids), expected)
    assert frozen.same is frozen.first


WITHOUT = """
import sys
sys.modules["fleet"] = None  # as if it were not installed
import torch
from safetensors.torch import load_file
given = load_file("../given.safetensors")
"""


@pytest.mark.slow
def test_plain_pytorch_runs_it_without_this_package(tmp_path: Path) -> None:
    """By the code on the page that is saved beside it."""
    ids = torch.tensor([3, -8, 3, 100, 5])
    expected = saved(
        tmp_path / "model",
        Score(fleet.nn.Embedding(None, DIM, padding_idx=5, initializer="constant(2)")),
        ids,
        example=(ids,),
    )
    safetensors.torch.save_file({"ids": ids, "expected": expected}, tmp_path / "given.safetensors")
    page = (tmp_path / "model" / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    last = (
        'assert torch.equal(model(given["ids"]), given["expected"])\n'
        'rows = look_up("table.weight", given["ids"])\n'
        'out = torch.nn.functional.linear(rows, state["top.weight"], state["top.bias"])\n'
        'assert torch.equal(out, given["expected"])\n'
        'print("as expected")\n'
    )
    script = "\n".join([WITHOUT, *blocks, last])
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "model", env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "as expected\n", done.stderr
    assert done.returncode == 0


def test_the_page_says_what_there_is(tmp_path: Path) -> None:
    saved(tmp_path / "model", Score(fleet.nn.Embedding(None, DIM)), torch.tensor([1]))
    page = (tmp_path / "model" / "README.md").read_text()
    assert "| `table.ids` | int64 (1,) |" in page
    assert "model.pt2" not in page, "there is none"
    assert sorted(os.listdir(tmp_path / "model")) == ["README.md", "inference.json", "model.safetensors"]


def test_every_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    ids = torch.tensor([1, 2])
    saved(tmp_path / "model", Score(fleet.nn.Embedding(None, DIM)), ids, example=(ids,))
    plain = tmp_path / "plain"
    plain.write_text("")
    assert {path.stat().st_mode for path in (tmp_path / "model").iterdir()} == {plain.stat().st_mode}


def test_the_tensors_are_those_of_the_job(tmp_path: Path) -> None:
    """Of every table the rows that were trained, whatever its size."""

    def body(fleet_: Fleet) -> None:
        model = trained(fleet_, 0)
        state = fleet_.state_dict(model)
        fleet_.save_inference_model(str(tmp_path / "model"), model)
        loaded = fleet.load_inference_model(str(tmp_path / "model"))
        tables = {key.removesuffix(".ids") for key in loaded if key.endswith(".ids")}
        assert tables == {*("open", "sized", "own", "means", "sums", "bags", "group.a", "group.b", "never")}
        for table in tables:
            ids, rows = loaded.pop(f"{table}.ids"), loaded.pop(f"{table}.weight")
            whole = state.pop(f"{table}.weight")
            assert torch.equal(rows, whole[ids] if f"{table}.ids" not in state else whole)
            assert torch.equal(ids, state.pop(f"{table}.ids", ids))
        assert len(loaded) == 7
        assert_same(loaded, state)

    alone(body)


# ---------------------------------------------------------------------------------------------- by one, by all


@pytest.mark.pairs(2)
@pytest.mark.parametrize("mode", MODES)
def test_one_worker_saves_or_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Where all ask at once one writes, and the others return when it is there. In every mode any worker may."""
    workers, written, write = 3, [], inference.write
    claims: list[str] = []
    all_claimed, start = threading.Event(), Connection.start

    def counting(client: Connection, frame: Any, what: str, **options: bool) -> Any:
        pending = start(client, frame, what, **options)
        claims.extend([what] if what.startswith("claim") and "all" in what else [])
        if len(claims) == workers:
            all_claimed.set()
        return pending

    def patient(dirname: str, *rest: Any) -> None:
        assert "all" not in dirname or all_claimed.wait(30)
        write(dirname, *rest)
        written.append(dirname)

    monkeypatch.setattr(Connection, "start", counting)
    monkeypatch.setattr(inference, "write", patient)

    def body(fleet_: Fleet, worker: int) -> None:
        model = trained(fleet_, worker, MODES[mode])
        fleet_.barrier_worker()
        fleet_.save_inference_model(str(tmp_path / "all"), model)
        assert (tmp_path / "all" / "inference.json").is_file()
        if worker == 1:
            fleet_.save_inference_model(str(tmp_path / "one"), model)
            state = fleet_.state_dict(model, tables=False)
            alone = fleet.load_inference_model(str(tmp_path / "one"))
            assert all(torch.equal(alone[key], value) for key, value in state.items())
        fleet_.barrier_worker()

    Job(body, workers, 2, environ={**PATIENT, "FLAGS_rpc_deadline": "20000"}).run()
    assert sorted(written) == [str(tmp_path / "all"), str(tmp_path / "one")]


def test_waiting_workers_hear_of_the_writers_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").write_text("in the way")

    def body(fleet_: Fleet, worker: int) -> str:
        model = trained(fleet_, worker)
        with pytest.raises(FleetError) as caught:
            fleet_.save_inference_model(str(tmp_path / "model"), model)
        fleet_.barrier_worker()
        return str(caught.value)

    for told in run_job(body, 2, 1):
        assert "will not write a model to serve over something else" in told


# ---------------------------------------------------------------------------------------------- what is refused


class Branching(Score):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out = super().forward(*inputs)
        return out if out.sum() > 0 else -out


class Sized(Score):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs) + torch.ones(len(inputs[0].tolist()), 2)


class Keeping(torch.nn.Embedding):
    """Looks up as torch's does, and holds something beside its rows."""

    def __init__(self) -> None:
        super().__init__(9, DIM, sparse=True)
        self.register_buffer("kept", torch.zeros(1))


class Doubling(fleet.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


class Rows(Score):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)


class Locked(Score):
    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__(table)
        self.lock = threading.Lock()


IDS = torch.tensor([1, 2, 3])
EXPORTS: dict[str, tuple[Callable[[], torch.nn.Module], Any, type[FleetError], str]] = {
    "a branch on data": (
        lambda: Branching(_open()),
        (IDS,),
        UnsupportedError,
        r"torch.export cannot export.*at Branching, .*test_serving.py:\d+; got .*data-dependent",
    ),
    "a fixed batch": (lambda: Sized(_open()), (IDS,), UnsupportedError, "torch.export cannot export"),
    "a table that holds more": (lambda: Score(Keeping()), (IDS % 9,), UnsupportedError, "'table' cannot be frozen"),
    "a class of the user's": (lambda: Score(Doubling(None, DIM)), (IDS,), UnsupportedError, "'table' cannot be frozen"),
    "a lock": (lambda: Locked(_open()), (IDS,), UnsupportedError, "the model cannot be copied.*lock"),
    "too many arguments": (lambda: Score(_open()), (IDS, IDS), UnsupportedError, "TypeError"),
    "too few arguments": (lambda: Rows(_open()), (), ArgumentTypeError, "do not fit forward.*missing.*'ids'"),
    "a tensor": (lambda: Score(_open()), IDS, ArgumentTypeError, "must be a tuple.*got Tensor"),
    "a number": (
        lambda: Score(_open()),
        ({"a": [3]},),
        ArgumentTypeError,
        r"at example_inputs\[0\]\['a'\]\[0\]; got int",
    ),
}


def _open() -> torch.nn.Module:
    return fleet.nn.Embedding(None, DIM)


@pytest.mark.parametrize(("make", "example", "kind", "words"), EXPORTS.values(), ids=EXPORTS)
def test_a_model_that_cannot_be_exported_leaves_nothing(
    tmp_path: Path, make: Any, example: Any, kind: type[FleetError], words: str
) -> None:
    def body(fleet_: Fleet) -> None:
        model = make()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        with pytest.raises(kind, match=words):
            fleet_.save_inference_model(str(tmp_path / "model"), model, example)
        assert os.listdir(tmp_path) == []
        optimizer.minimize(model(IDS).sum())
        fleet_.save_inference_model(str(tmp_path / "model"), model)

    alone(body)


class Strange(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None: ...


def test_what_cannot_be_gathered_is_refused(tmp_path: Path) -> None:
    other = Score(_open())
    clashing = Score(_open())
    clashing.table.register_buffer("ids", torch.zeros(1))

    def body(fleet_: Fleet) -> None:
        model = Score(_open())
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        place = str(tmp_path / "model")
        with pytest.raises(NotInitializedError, match=r"state_dict\(\) came before"):
            fleet_.state_dict(model)
        with pytest.raises(NotInitializedError, match=r"save_inference_model\(\) came before"):
            fleet_.save_inference_model(place, model)
        fleet_.init_worker()
        optimizer.minimize(model(IDS).sum())
        for call in (fleet_.state_dict, lambda given: fleet_.save_inference_model(place, given)):
            with pytest.raises(ArgumentTypeError, match=r"model must be a torch.nn.Module; got int"):
                call(3)
            with pytest.raises(UnsupportedError, match=r"'table.weight' is a remote table that does not belong"):
                call(other)
            with pytest.raises(UnsupportedError, match=r"'table.ids' of the model has the name"):
                call(clashing)
        with pytest.raises(ArgumentTypeError, match="tables must be True or False"):
            fleet_.state_dict(model, tables=1)
        with pytest.raises(ArgumentTypeError, match="dirname must be a path; got int"):
            fleet_.save_inference_model(3, model)
        assert fleet_.state_dict(Strange())["_extra_state"] == {"version": 3}
        with pytest.raises(UnsupportedError, match="'_extra_state' of the model's state cannot be saved"):
            fleet_.save_inference_model(place, Strange())
        unreadable = torch.nn.Module()
        unreadable.register_buffer("__metadata__", torch.zeros(1))
        with pytest.raises(UnsupportedError, match=r"'__metadata__' of .* cannot be saved.*another name"):
            fleet_.save_inference_model(place, unreadable)
        assert os.listdir(tmp_path) == []

    alone(body)


# ---------------------------------------------------------------------------------------------- the directory

FACTS = TableFacts(None, DIM, 0.5, None, True)


def small(number: float = 1.0) -> InferenceModel:
    values = {"a": torch.full((2, 3), number), "t.ids": torch.tensor([-1, 4]), "t.weight": torch.zeros(2, DIM)}
    return InferenceModel(values, {"t.weight": FACTS})


def program(path: Path) -> None:
    path.write_bytes(b"a program")


class Failing:
    """Counts what is done to the disk, and fails at one of these operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        self.fails_at: int | None = None
        places = [(inference, name) for name in ("write_file", "sync_file", "sync_directory")]
        for module, name in [*places, (inference.os, "replace"), (inference.safetensors.torch, "save_file")]:
            monkeypatch.setattr(module, name, self._failing(getattr(module, name)))

    def _failing(self, operation: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            self.done += 1
            if self.done - 1 == self.fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return operation(*arguments)

        return wrapped


@pytest.mark.parametrize("existing", ["nothing", "an empty directory", "a model"])
def test_a_disk_that_fails_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: str
) -> None:
    target = tmp_path / "model"
    disk = Failing(monkeypatch)

    def prepare() -> None:
        inference.remove(target)
        disk.fails_at = None
        if existing == "a model":
            inference.write(str(target), small(1.0), program)
        elif existing == "an empty directory":
            target.mkdir()
        disk.done = 0

    prepare()
    inference.write(str(target), small(2.0), program)
    operations, outcomes = disk.done, []
    for fails_at in range(operations):
        prepare()
        disk.fails_at = fails_at
        with pytest.raises(CheckpointError, match=f"could not be written; .*{os.strerror(errno.ENOSPC)}"):
            inference.write(str(target), small(2.0), program)
        assert os.listdir(tmp_path) == (["model"] if target.exists() else [])
        found = inference.read(str(target)).values["a"][0, 0].item() if (target / "inference.json").exists() else 0
        outcomes.append(found)
    before = 1.0 if existing == "a model" else 0
    assert outcomes == [before] * (operations - 1) + [2.0], "only the last has nothing to do with what is there"


@pytest.mark.parametrize("what", ["tensors", "program"])
def test_a_full_disk_is_told_of_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    """Told of it by itself, torch ends the process."""
    resource = pytest.importorskip("resource")
    large = torch.export.export(torch.nn.Linear(300, 300), (torch.zeros(1, 300),))
    model = small() if what == "program" else InferenceModel({"large": torch.zeros(300, 300)}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="a model to serve could not be written") as caught:
            inference.write(str(tmp_path / "model"), model, partial(save_program, large))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "too large" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    inference.write(str(tmp_path / "model"), model, partial(save_program, large))
    loaded = torch.export.load(tmp_path / "model" / "model.pt2").module()
    assert loaded(torch.zeros(1, 300)).shape == (1, 300)


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text(json.dumps({"format": "fleet-checkpoint"}))
    inference.write(str(tmp_path / "noted"), small(), None)
    (tmp_path / "noted" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for name in ("checkpoint", "noted", "file", "."):
        with pytest.raises(CheckpointError, match="will not write a model to serve over something else"):
            inference.write(str(tmp_path / name), small(), None)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_place_is_a_directory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is called like a store."""
    monkeypatch.chdir(tmp_path)
    told = "lies in a directory of this machine; expected a path; got s3://bucket/model"

    def body(fleet_: Fleet, worker: int) -> None:
        model = trained(fleet_, worker)
        with pytest.raises(UnsupportedError, match=told):
            fleet_.save_inference_model("s3://bucket/model", model)
        with pytest.raises(CheckpointError, match="this place cannot be reached"):
            fleet_.save_inference_model("x" * 300, model)
        fleet_.save_inference_model(f"file://{tmp_path}/model", model)

    run_job(body, 1, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    assert_same(fleet.load_inference_model(f"file://{tmp_path}/model"), fleet.load_inference_model("model"))
    for wrong, kind in (("s3://bucket/model", UnsupportedError), ("a\0b", CheckpointError)):
        with pytest.raises(kind):
            fleet.load_inference_model(wrong)


def test_loading_needs_no_job_and_reads_no_program(tmp_path: Path) -> None:
    inference.write(str(tmp_path / "model"), small(), program)
    (tmp_path / "model" / "model.pt2").write_bytes(b"something else")
    loaded = Fleet(environ={}).load_inference_model(tmp_path / "model")
    assert_same(loaded, dict(small().values))


@pytest.mark.parametrize("when", ["before it is described", "before its bytes are checked", "before they are loaded"])
@pytest.mark.parametrize("how", ["replaced", "away for a moment"])
def test_a_model_that_is_replaced_while_it_is_read_is_read_anew(
    when: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "serve"

    def write(value: float) -> None:
        inference.write(str(place), inference.InferenceModel({"w": torch.full((3,), value)}, {}), None)

    def replace() -> None:
        if how == "replaced":
            write(2.0)
        else:
            place.rename(tmp_path / "aside")
            monkeypatch.setattr(inference.SystemClock, "sleep", lambda clock, seconds: write(2.0))

    def meddled(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any, **options: Any) -> Any:
            if name == when and pending:
                pending.pop()
                replace()
            return call(*arguments, **options)

        return calling

    pending: list[None] = []
    for name, owner, of in (
        ("before it is described", inference, "_read"),
        ("before its bytes are checked", inference, "_loaded"),
        ("before they are loaded", inference.safetensors.torch, "load_file"),
    ):
        monkeypatch.setattr(owner, of, meddled(name, getattr(owner, of)))
    write(1.0)
    pending.append(None)
    assert fleet.load_inference_model(str(place))["w"].tolist() == [2.0] * 3
    assert not pending


def test_altered_files_are_told_of(tmp_path: Path) -> None:
    """Whichever byte it is."""
    inference.write(str(tmp_path / "model"), small(), None)
    for name in ("model.safetensors", "inference.json"):
        path = tmp_path / "model" / name
        whole = path.read_bytes()
        for place in range(0, len(whole), 3):
            altered = bytearray(whole)
            altered[place] ^= 4
            path.write_bytes(altered)
            if name == "inference.json" and same_json(altered, whole):
                continue
            with pytest.raises(CheckpointError, match=re.escape(str(path.parent))):
                inference.read(str(path.parent))
        for end in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:end])
            with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
                inference.read(str(path.parent))
        path.unlink()
        with pytest.raises(CheckpointError, match=r"a file of the model is missing|there is no model to serve here"):
            inference.read(str(path.parent))
        path.write_bytes(whole)
    inference.read(str(tmp_path / "model"))


def same_json(left: bytes, right: bytes) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return False


def forged(directory: Path, **changes: Any) -> Path:
    """A description with other content and the right checksum."""
    path = directory / "inference.json"
    raw = {**json.loads(path.read_text()), **changes}
    raw.pop("crc32")
    raw["crc32"] = zlib.crc32(json.dumps(raw, sort_keys=True).encode())
    path.write_text(json.dumps(raw))
    return directory


TABLE = {"num_embeddings": None, "embedding_dim": DIM, "mean": 0.5, "padding_idx": None, "zero_padding": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"tables": []},
        {"tables": {"t.weight": {**TABLE, "embedding_dim": 3}}},
        {"tables": {"t.weight": {**TABLE, "embedding_dim": "4"}}},
        {"tables": {"t.weight": {**TABLE, "mean": None}}},
        {"tables": {"t.weight": {**TABLE, "num_embeddings": -1}}},
        {"tables": {"t.weight": {**TABLE, "more": 1}}},
        {"tables": {"a": TABLE}},
        {"tensors": ["a"]},
        {"tensors": 3},
        {"files": {}},
        {"files": {"model.safetensors": 3}},
        {"format_version": 2},
        {"format": None},
    ],
    ids=str,
)
def test_a_forged_description_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    inference.write(str(tmp_path / "model"), small(), None)
    with pytest.raises(CheckpointError):
        inference.read(str(forged(tmp_path / "model", **changes)))


def test_ids_out_of_order_are_refused(tmp_path: Path) -> None:
    model = small()
    inference.write(str(tmp_path), InferenceModel({**model.values, "t.ids": torch.tensor([4, -1])}, model.tables), None)
    with pytest.raises(CheckpointError, match="sorted ids"):
        inference.read(str(tmp_path))


def test_where_there_is_none(tmp_path: Path) -> None:
    for place, words in ((tmp_path / "none", "no such directory"), (tmp_path, "a directory without one")):
        with pytest.raises(CheckpointError, match=f"there is no model to serve here.*{words}"):
            fleet.load_inference_model(str(place))


def test_a_model_that_is_another_is_told_every_difference(tmp_path: Path) -> None:
    saved(tmp_path / "model", Score(fleet.nn.Embedding(9, DIM)), IDS)
    wrong = Score(fleet.nn.Embedding(None, 5))
    wrong.top = torch.nn.Linear(5, 2)
    wrong.register_buffer("more", torch.zeros(3))
    with pytest.raises(CheckpointError, match="the model is not the one that was saved") as told:
        fleet.load_inference_model(str(tmp_path / "model"), wrong)
    assert str(told.value.got).split("; ") == [
        "'more': absent in the directory, float32 (3,) in the model",
        "'table.weight': table of float32 x 4 for 9 ids in the directory, table of float32 x 5 for any id in the model",
        "'top.weight': float32 (2, 4) in the directory, float32 (2, 5) in the model",
    ]
    for table in (torch.nn.Linear(DIM, 9, bias=False), torch.nn.Embedding(9, 3)):
        with pytest.raises(CheckpointError, match=r"'table.weight'"):
            fleet.load_inference_model(str(tmp_path / "model"), Score(table))
    frozen = fleet.load_inference_model(str(tmp_path / "model"), Score(torch.nn.Embedding(9, DIM)))
    assert torch.equal(
        frozen(IDS), fleet.load_inference_model(str(tmp_path / "model"), Score(fleet.nn.Embedding(9, DIM)))(IDS)
    )


def test_a_fresh_model_is_copied_and_left_alone(tmp_path: Path) -> None:
    saved(tmp_path / "model", Score(_open()), IDS)
    fresh = Score(_open())
    before = [value.clone() for value in fresh.top.state_dict().values()]
    fleet.load_inference_model(str(tmp_path / "model"), fresh)
    assert all(torch.equal(value, now) for value, now in zip(before, fresh.top.state_dict().values(), strict=True))
    assert fresh.training
    assert isinstance(fresh.table, fleet.nn.Embedding)


def test_the_random_state_is_nobodys_business(tmp_path: Path) -> None:
    model = Score(_open())
    before = torch.get_rng_state()
    saved(tmp_path / "model", model, IDS, example=(IDS,))
    fleet.load_inference_model(str(tmp_path / "model"))
    assert torch.equal(torch.get_rng_state(), before)
