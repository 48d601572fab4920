"""Embeddings whose rows live on the servers do what ``torch.nn`` does, and what they do differently on purpose."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_close, run_job

import fleet.nn
from fleet import Fleet
from fleet.checkpoint.manifest import Checkpoint
from fleet.errors import ConfigurationError, IdOutOfRangeError, NotInitializedError, UnsupportedError
from fleet.nn.frozen import FrozenEmbedding, FrozenEmbeddingBag, FrozenTable
from fleet.nn.handle import handle_of
from fleet.ps.worker import upload
from fleet.ps.worker.connection import Connection

ROWS, DIM = 10, 4
INT64 = torch.iinfo(torch.int64)
ALL = torch.arange(ROWS)


def start_of(rows: int = ROWS, dim: int = DIM, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def torch_embedding(**options: Any) -> torch.nn.Embedding:
    """With values of its own, not the global generator's: bodies are threads that share that one."""
    weight = options.pop("weight", None)
    return torch.nn.Embedding(ROWS, DIM, _weight=start_of() if weight is None else weight.clone(), **options)


def weighted(out: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is another one everywhere."""
    return (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum()


def begin(fleet_: Fleet, *modules: torch.nn.Module, lr: float = 1.0) -> Any:
    """The usual start of a body: plain gradient descent on all parameters of some modules."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = fleet_.distributed_optimizer(torch.optim.SGD(parameters, lr=lr))
    fleet_.init_worker()
    return optimizer


def alone(body: Callable[[Fleet], Any], servers: int = 2) -> Any:
    """What ``body`` returns as the only worker of a job."""
    return run_job(lambda fleet_, worker: body(fleet_), 1, servers)[0]


def stored_ids(fleet_: Fleet, dirname: Path) -> dict[str, list[int]]:
    """The ids that exist on the servers, a list a table."""
    fleet_.save_persistables(str(dirname))
    found: dict[str, list[int]] = {}
    for about, (ids, *_) in Checkpoint.open(str(dirname)).pieces("table"):
        found[about["table"]] = sorted(found.get(about["table"], []) + ids.tolist())
    return found


# ---------------------------------------------------------------------------------------------- Embedding

IDS = {
    "a list": torch.tensor([3, 1, 4]),
    "three dimensions": torch.arange(12).view(2, 3, 2) % ROWS,
    "no dimension": torch.tensor(7),
    "empty": torch.empty(0, dtype=torch.int64),
    "empty in two dimensions": torch.empty(0, 3, dtype=torch.int64),
    "int32": torch.tensor([[9, 0], [5, 9]], dtype=torch.int32),
    "not contiguous": (torch.arange(20).view(4, 5) % ROWS).t()[::2],
    "expanded": torch.tensor([[6], [2]]).expand(2, 5),
    "repeated": torch.tensor([[2, 2, 2], [2, 5, 2]]),
}


def jagged(numbers: torch.Tensor, ends: Sequence[int] = (3, 3, 5)) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(numbers, torch.tensor([0, *ends, len(numbers)]))


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_embedding_is_torchs(ids: torch.Tensor) -> None:
    def body(fleet_: Fleet) -> tuple[torch.Tensor, ...]:
        table = fleet.nn.Embedding(ROWS, DIM)
        optimizer = begin(fleet_, table)
        start = table(ALL).detach()
        out = table(ids)
        optimizer.minimize(weighted(out))
        return start, out.detach(), table(ALL).detach()

    start, out, after = alone(body)
    reference = torch_embedding(weight=start)
    expected = reference(ids)
    weighted(expected).backward()
    assert torch.equal(out, expected.detach())
    assert_close([after], [start - reference.weight.grad])


def test_any_int64_is_an_id() -> None:
    ids = torch.tensor([INT64.min, INT64.max, -1, 0, 1, 2**40])

    def body(fleet_: Fleet) -> tuple[torch.Tensor, torch.Tensor]:
        table = fleet.nn.Embedding(None, DIM)
        optimizer = begin(fleet_, table)
        before = table(ids).detach()
        optimizer.minimize(table(ids[:3]).sum())
        return before, table(ids).detach()

    before, after = alone(body)
    assert len({tuple(row) for row in before.tolist()}) == len(ids)
    assert_close([after], [before - torch.tensor([1.0, 1, 1, 0, 0, 0])[:, None]])


PADDINGS = [
    (ROWS, 3, 3),
    (ROWS, -1, ROWS - 1),
    (ROWS, -ROWS, 0),
    (None, 5, 5),
    (None, -1, -1),
    (None, INT64.min, INT64.min),
    (None, INT64.max, INT64.max),
]
MOVERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize(("size", "padding", "row"), PADDINGS)
def test_the_padding_row(size: int | None, padding: int, row: int, mover: str, tmp_path: Path) -> None:
    """It reads as zeros, gets no gradient and so never comes into being."""
    ids = torch.tensor([[row, 1], [row, 2]])

    def body(fleet_: Fleet) -> None:
        table = fleet.nn.Embedding(size, DIM, padding_idx=padding, initializer="constant(2.0)")
        optimizer = fleet_.distributed_optimizer(MOVERS[mover](table.parameters()))
        fleet_.init_worker()
        assert table.padding_idx == row
        for _ in range(3):
            out = table(ids)
            assert torch.equal(out[:, 0], torch.zeros(2, DIM))
            optimizer.minimize((out**2 + out).sum())
        assert (table(ids)[:, 1] != 2).all(), "the others do move"
        assert torch.equal(table.eval()(ids)[:, 0], torch.zeros(2, DIM))
        assert stored_ids(fleet_, tmp_path / "ckpt") == {"optimizer0.group0.param0": [1, 2]}

    alone(body)


def test_two_backwards_of_one_forward_count_twice() -> None:
    def body(fleet_: Fleet) -> torch.Tensor:
        table = fleet.nn.Embedding(ROWS, 1, initializer="zeros")
        optimizer = begin(fleet_, table)
        loss = table(torch.tensor([1, 2, 2])).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return table(torch.tensor([0, 1, 2])).detach()[:, 0]

    assert alone(body).tolist() == [0, -2, -4]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_of_a_gradient() -> None:
    """A penalty on a gradient, as in torch: the backward itself is differentiated."""

    def penalty(out: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad((out**3).sum(), out, create_graph=True)
        return (first**2).sum()

    ids = torch.tensor([1, 2, 2])

    def body(fleet_: Fleet) -> tuple[torch.Tensor, torch.Tensor]:
        table = fleet.nn.Embedding(ROWS, DIM, initializer="uniform(-0.5, 0.5)")
        optimizer = begin(fleet_, table)
        start = table(ALL).detach()
        penalty(table(ids)).backward(create_graph=True)
        optimizer.step()
        return start, table(ALL).detach()

    start, after = alone(body)
    reference = torch_embedding(weight=start)
    penalty(reference(ids)).backward()
    assert_close([after], [start - reference.weight.grad], 1e-5)


def test_lookups_without_gradient_push_nothing(tmp_path: Path) -> None:
    def body(fleet_: Fleet) -> None:
        table = fleet.nn.Embedding(None, DIM)
        frozen = fleet.nn.Embedding(None, DIM)
        optimizer = begin(fleet_, table, frozen)
        frozen.weight.requires_grad_(False)
        with torch.no_grad():
            assert not table(torch.tensor([1, 2])).requires_grad
        with torch.inference_mode():
            table(torch.tensor([3]))
        out = table(torch.tensor([4])) + frozen(torch.tensor([5]))
        optimizer.minimize(out.sum())
        assert stored_ids(fleet_, tmp_path / "ckpt") == {
            "optimizer0.group0.param0": [4],
            "optimizer0.group0.param1": [],
        }

    alone(body)


def test_ids_of_lists_of_different_lengths() -> None:
    """In an embedding, a group, ahead of time, and in a frozen copy; the rows are laid out as the ids are."""
    ids, wide = jagged(torch.tensor([1, 3, 3, 0, 9, 5, 3])), jagged(torch.arange(14).view(7, 2) % ROWS)

    def body(fleet_: Fleet) -> None:
        model = torch.nn.ModuleDict(
            {"one": torch_embedding(sparse=True), "group": fleet.nn.EmbeddingGroup({"a": (9, 2)})}
        )
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = fleet_.distributed_optimizer(sgd, model=model)
        fleet_.init_worker()
        reference = torch_embedding()
        for given in fleet_.prefetch([ids, wide], lambda given: {model["one"]: given}):
            rows, expected = model["one"](given), reference(given)
            assert rows.shape == expected.shape
            assert torch.equal((rows + rows).values(), 2 * expected.values())
            optimizer.minimize(weighted(rows.values()))
            weighted(expected.values()).backward()
            with torch.no_grad():
                reference.weight -= reference.weight.grad
            reference.zero_grad()
        assert_close([model["one"](ALL).detach()], [reference(ALL).detach()])
        small = jagged(torch.tensor([1, 3, 3, 0, 8, 5, 3]))
        assert model["group"]({"a": small})["a"].shape == (*small.shape, 2)
        frozen = FrozenEmbedding(model["one"], FrozenTable(ALL, model["one"](ALL).detach(), ROWS, 0.0, False))
        assert torch.equal(frozen(input=ids).values(), model["one"](ids).detach().values())
        table = model["group"]["a"]
        with pytest.raises(ConfigurationError, match="leaves some of its ids out"):
            table(torch.nested.nested_tensor_from_jagged(ALL, torch.tensor([0, 5, 10]), lengths=torch.tensor([1, 2])))
        with pytest.raises(TypeError, match="one by one"):
            table(torch.ones(2, dtype=torch.int64, device="meta"))

    alone(body)


def test_forwards_take_their_arguments_by_torchs_names() -> None:
    for kind in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        module = kind(ROWS, DIM, sparse=True)
        expected = [*inspect.signature(module.forward).parameters]
        fleet_ = Fleet(environ={})
        fleet_.init()
        fleet_.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=1.0), model=module)
        assert type(module) is not kind
        assert [*inspect.signature(module.forward).parameters] == expected


# ---------------------------------------------------------------------------------------------- EmbeddingBag

FLAT = torch.tensor([1, 3, 3, 0, 9, 5, 3, 2])
SAMPLE_WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25, 3.0, 1.0, -2.0, 0.125])

#: Options of the module, then what it is called with.
BAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two dimensions": ({}, {"input": FLAT.view(4, 2)}),
    "two dimensions, not contiguous": ({}, {"input": FLAT.view(4, 2).t()}),
    "offsets": ({}, {"input": FLAT, "offsets": torch.tensor([0, 3, 5])}),
    "int32": ({}, {"input": FLAT.int(), "offsets": torch.tensor([0, 3], dtype=torch.int32)}),
    "the last offset too": ({"include_last_offset": True}, {"input": FLAT, "offsets": torch.tensor([0, 3, 5, 8])}),
    "empty bags": ({}, {"input": FLAT, "offsets": torch.tensor([0, 0, 5, 5, 8])}),
    "nothing but empty bags": ({}, {"input": FLAT[:0], "offsets": torch.tensor([0, 0, 0])}),
    "padding": ({"padding_idx": 3}, {"input": FLAT.view(4, 2)}),
    "padding counted from the end": ({"padding_idx": -7}, {"input": FLAT, "offsets": torch.tensor([0, 1, 3, 5])}),
    "padding that is not there": ({"padding_idx": 7}, {"input": FLAT.view(2, 4)}),
    "jagged": ({}, {"input": jagged(FLAT)}),
    "jagged, with padding": ({"padding_idx": 3}, {"input": jagged(FLAT)}),
}

#: What torch refuses, each with a class of its own.
WRONG_BAGS: dict[str, tuple[Any, ...]] = {
    "no offsets": (FLAT,),
    "offsets beside two dimensions": (FLAT.view(4, 2), torch.tensor([0, 2])),
    "offsets in two dimensions": (FLAT, torch.tensor([[0, 2]])),
    "offsets without a dimension": (FLAT, torch.tensor(0)),
    "offsets that do not begin at 0": (FLAT, torch.tensor([1, 2])),
    "offsets that are no integers": (FLAT, torch.tensor([0.0, 2.0])),
    "one id": (FLAT[0],),
    "three dimensions": (FLAT.view(2, 2, 2),),
    "weights of another shape": (FLAT.view(4, 2), None, SAMPLE_WEIGHTS),
    "weights of another type": (FLAT.view(4, 2), None, SAMPLE_WEIGHTS.double().view(4, 2)),
    "flat weights for jagged ids": (jagged(FLAT), None, SAMPLE_WEIGHTS),
    "weights in parts of other lengths": (jagged(FLAT), None, jagged(SAMPLE_WEIGHTS, (1, 3, 5))),
    "jagged weights for flat ids": (FLAT, torch.tensor([0, 3]), jagged(SAMPLE_WEIGHTS)),
}


@pytest.mark.parametrize("call", WRONG_BAGS.values(), ids=WRONG_BAGS)
def test_bags_refuse_what_torchs_refuse(call: tuple[Any, ...]) -> None:
    with pytest.raises(Exception) as theirs:
        torch.nn.EmbeddingBag(ROWS, DIM, mode="sum")(*call)

    def body(fleet_: Fleet) -> None:
        bag = fleet.nn.EmbeddingBag(ROWS, DIM, mode="sum")
        begin(fleet_, bag)
        frozen = FrozenEmbeddingBag(bag, FrozenTable(ALL, torch.ones(ROWS, DIM), ROWS, 0.0, False))
        for each in (bag, frozen):
            with pytest.raises(type(theirs.value)):
                each(*call)

    alone(body)


def test_weights_of_lookups_are_in_parts_as_the_ids_are() -> None:
    ids = jagged(FLAT)

    def body(fleet_: Fleet) -> None:
        table = fleet.nn.Embedding(None, DIM, admit=fleet.nn.CountFilter(2, of="weight"))
        begin(fleet_, table)
        offsets = ids.offsets()
        assert (
            table(ids, weights=torch.nested.nested_tensor_from_jagged(SAMPLE_WEIGHTS.abs(), offsets)).shape[:2]
            == ids.shape
        )
        assert table(ids, weights=jagged(SAMPLE_WEIGHTS.abs())).shape[:2] == ids.shape
        for wrong in (SAMPLE_WEIGHTS.abs(), jagged(SAMPLE_WEIGHTS.abs(), (1, 3, 5))):
            with pytest.raises(ConfigurationError, match="does not fit the ids"):
                table(ids, weights=wrong)

    alone(body)


def test_a_frozen_copy_takes_ids_once() -> None:
    frozen = FrozenEmbedding(torch.nn.Embedding(ROWS, DIM), FrozenTable(ALL, torch.ones(ROWS, DIM), ROWS, 0.0, False))
    for call, said in (({}, "without ids"), ({"ids": ALL, "input": ALL}, "two sets of ids")):
        with pytest.raises(TypeError, match=said):
            frozen(**call)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(("options", "call"), BAGS.values(), ids=BAGS)
def test_embedding_bag_is_torchs(options: dict[str, Any], call: dict[str, Any], mode: str) -> None:
    check_bag({**options, "mode": mode}, call)


@pytest.mark.parametrize(
    "name", ["two dimensions", "offsets", "the last offset too", "empty bags", "padding", "padding that is not there"]
)
def test_samples_with_weights(name: str) -> None:
    options, call = BAGS[name]
    check_bag({**options, "mode": "sum"}, {**call, "weights": SAMPLE_WEIGHTS.view(call["input"].shape)})


def check_bag(options: dict[str, Any], call: dict[str, Any]) -> None:
    def use(bag: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights = call["weights"].clone().requires_grad_() if "weights" in call else None
        return bag(call["input"], call.get("offsets"), weights), weights

    def rows_of(bag: torch.nn.Module) -> torch.Tensor:
        """Bags of one id each; the padding row reads as zeros, which changes no bag."""
        return bag(ALL, torch.arange(ROWS + options.get("include_last_offset", 0))).detach()

    def body(fleet_: Fleet) -> tuple[torch.Tensor | None, ...]:
        bag = fleet.nn.EmbeddingBag(ROWS, DIM, **options)
        optimizer = begin(fleet_, bag)
        start = rows_of(bag)
        out, weights = use(bag)
        optimizer.minimize(weighted(out))
        return start, out.detach(), rows_of(bag), None if weights is None else weights.grad

    start, out, after, weights_grad = alone(body)
    reference = torch.nn.EmbeddingBag(ROWS, DIM, sparse=False, _weight=start.clone(), **options)
    expected, weights = use(reference)
    weighted(expected).backward()
    assert_close([out, after], [expected.detach(), start - reference.weight.grad])
    if weights is not None:
        assert_close([weights_grad], [weights.grad])


def test_means_are_torchs_default_and_take_no_weights() -> None:
    def body(fleet_: Fleet) -> None:
        bag = fleet.nn.EmbeddingBag(ROWS, DIM)
        assert bag.mode == torch.nn.EmbeddingBag(1, 1, _weight=torch.zeros(1, 1)).mode == "mean"
        begin(fleet_, bag)
        with pytest.raises(NotImplementedError, match="per_sample_weights"):
            bag(FLAT.view(4, 2), None, SAMPLE_WEIGHTS.view(4, 2))

    alone(body)


def test_a_bag_of_any_id_with_weights_one_of_which_is_padding() -> None:
    def body(fleet_: Fleet) -> None:
        bag = fleet.nn.EmbeddingBag(None, 1, mode="sum", padding_idx=INT64.max, initializer="constant(1.0)")
        optimizer = begin(fleet_, bag)
        ids = torch.tensor([[INT64.max, INT64.min], [-1, INT64.max]])
        out = bag(ids, per_sample_weights=torch.tensor([[5.0, 2.0], [3.0, 5.0]]))
        assert out.tolist() == [[2.0], [3.0]]
        optimizer.minimize(out.sum())
        assert bag(torch.tensor([[INT64.min], [-1], [INT64.max]])).tolist() == [[-1.0], [-2.0], [0.0]]

    alone(body)


# ---------------------------------------------------------------------------------------------- torch's own go remote


class Tower(torch.nn.Module):
    """Embeddings at several depths: two to go remote, two to stay."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.deep = torch.nn.ModuleDict(
            {"list": torch.nn.ModuleList([torch_embedding(weight=start_of(seed=seed), sparse=True)])}
        )
        self.bag = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=start_of(seed=seed + 1))
        self.dense = torch_embedding(weight=start_of(seed=seed + 2))
        self.untrained = torch_embedding(weight=start_of(seed=seed + 3), sparse=True)

    def trained(self) -> list[torch.nn.Parameter]:
        return [self.deep["list"][0].weight, self.bag.weight, self.dense.weight]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.deep["list"][0](ids) + self.dense(ids) + self.untrained(ids).detach()
        return rows.sum(1) * 0.5 + self.bag(ids)


def test_torchs_embeddings_go_remote_in_place_and_worker_0s_values_win() -> None:
    ids = torch.tensor([[1, 2], [2, 9]])

    def body(fleet_: Fleet, worker: int) -> tuple[torch.Tensor, ...]:
        model = Tower(seed=100 * worker)
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        untrained = model.untrained.weight.detach().clone()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.trained(), lr=1.0), model=model)
        fleet_.init_worker()
        assert dict(model.named_modules()) == modules
        assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
        assert isinstance(model.deep["list"][0], torch.nn.Embedding)
        assert isinstance(model.bag, torch.nn.EmbeddingBag)
        for module in (model.deep["list"][0], model.bag, model.dense, model.untrained):
            assert tuple(module.weight.shape) == (ROWS, DIM)
        assert model.bag.weight.untyped_storage().nbytes() == 4, "no worker keeps the rows"
        assert type(model.dense) is type(model.untrained) is torch.nn.Embedding
        optimizer.minimize(weighted(model(ids)))
        assert torch.equal(model.untrained.weight, untrained)
        return model.deep["list"][0](ALL).detach(), model.bag(ALL[:, None]).detach(), model.dense.weight.detach()

    model, other = Tower(seed=0), Tower(seed=100)
    other.load_state_dict({**model.state_dict(), "untrained.weight": other.untrained.weight})
    for each in (model, other):
        weighted(each(ids)).backward()
    expected = []
    for mine, theirs in zip(model.trained(), other.trained(), strict=True):
        grads = [p.grad.to_dense() for p in (mine, theirs)]
        expected.append(mine.detach() - (grads[0] + grads[1]) / 2)
    for got in run_job(body, 2, 3):
        assert_close(list(got), expected)


def test_a_size_may_be_an_integer_of_numpys() -> None:
    def body(fleet_: Fleet) -> tuple[int, ...]:
        model = torch.nn.Embedding(np.int64(ROWS), np.int32(DIM), sparse=True)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fleet_.distributed_optimizer(optimizer, model=model)
        fleet_.init_worker()
        return tuple(model(ALL).shape)

    assert alone(body) == (ROWS, DIM)


def test_initial_values_travel_in_requests_of_about_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    start, sizes, most = Connection.start, [], 320

    def watched(client: Connection, frame: Any, what: str, **options: bool) -> Any:
        if frame.message.WhichOneof("kind") == "upload":
            sizes.append(sum(tensor.array.nbytes for tensor in frame.tensors))
        return start(client, frame, what, **options)

    def body(fleet_: Fleet) -> list[torch.Tensor]:
        rows = torch.nn.Embedding(100, DIM, sparse=True, _weight=start_of(100))
        model = torch.nn.ModuleDict({"rows": rows, "small": torch.nn.ParameterList([*start_of(20)])})
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet_.init_worker()
        return [rows(torch.arange(100)), *model["small"]]

    monkeypatch.setattr(upload, "UPLOAD_BYTES", most)
    monkeypatch.setattr(Connection, "start", watched)
    rows, *small = alone(body)
    assert torch.equal(rows, start_of(100))
    assert torch.equal(torch.stack(small), start_of(20))
    assert max(sizes) < 2 * most
    assert sum(sizes) / most < len(sizes) < 4 * sum(sizes) / most


class Pair(torch.nn.Module):
    def __init__(self, **second: Any) -> None:
        super().__init__()
        self.a = torch_embedding(sparse=True)
        self.b = torch_embedding(sparse=True, **second)
        self.b.weight = self.a.weight


def test_two_modules_with_one_weight_share_its_table() -> None:
    def body(fleet_: Fleet) -> torch.Tensor:
        model = Pair()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet_.init_worker()
        assert model.a.weight is model.b.weight
        assert handle_of(model.a.weight) is not None
        optimizer.minimize(model.a(torch.tensor([1, 2])).sum() + 2 * model.b(torch.tensor([2, 3])).sum())
        assert torch.equal(model.a(ALL), model.b(ALL))
        return model.b(ALL).detach()

    moved = torch.zeros(ROWS)
    moved[1:4] = torch.tensor([1.0, 3.0, 2.0])
    assert_close([alone(body)], [start_of() - moved[:, None]])


def test_modules_that_share_a_table_keep_their_own_padding() -> None:
    def body(fleet_: Fleet) -> torch.Tensor:
        model = Pair(padding_idx=2)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet_.init_worker()
        ids = torch.tensor([2, 3])
        optimizer.minimize(model.a(ids).sum() + 5 * model.b(ids).sum())
        return model.a(ids).detach()

    assert_close([alone(body)], [start_of()[2:4] - torch.tensor([[1.0], [6.0]])])


def test_our_own_embeddings_share_a_table_through_their_weight() -> None:
    def body(fleet_: Fleet) -> None:
        a, b = (fleet.nn.Embedding(ROWS, 1, initializer="zeros") for _ in range(2))
        b.weight = a.weight
        optimizer = begin(fleet_, a)
        optimizer.minimize(a(torch.tensor([1])).sum() + b(torch.tensor([1])).sum())
        assert a(torch.tensor([1])).item() == b(torch.tensor([1])).item() == -2.0

    alone(body)


@pytest.mark.parametrize("mover", MOVERS)
def test_the_padding_row_of_torchs_own_keeps_its_value(mover: str) -> None:
    """torch only withholds the gradient; what stands in the row is read."""

    def body(fleet_: Fleet) -> torch.Tensor:
        model = torch_embedding(padding_idx=4, sparse=True)
        optimizer = fleet_.distributed_optimizer(MOVERS[mover](model.parameters()), model=model)
        fleet_.init_worker()
        for _ in range(3):
            optimizer.minimize(model(torch.tensor([4, 5, 4])).sum())
        return model(torch.tensor([4, 5])).detach()

    padding, other = alone(body)
    assert torch.equal(padding, start_of()[4])
    assert (other != start_of()[5]).all()


class MyEmbedding(torch.nn.Embedding):
    def half(self) -> torch.Tensor:
        return self.weight / 2


class MyBag(torch.nn.EmbeddingBag):
    scale = 2.0


REFUSED: dict[str, Callable[[], torch.nn.Module]] = {
    "MyEmbedding": lambda: MyEmbedding(ROWS, DIM, sparse=True),
    "MyBag": lambda: MyBag(ROWS, DIM, sparse=True),
    "max_norm": lambda: torch.nn.Embedding(ROWS, DIM, sparse=True, max_norm=1.0),
    "scale_grad_by_freq": lambda: torch.nn.Embedding(ROWS, DIM, sparse=True, scale_grad_by_freq=True),
    "mode='max'": lambda: _max_bag(),
}


def _max_bag() -> torch.nn.Module:
    bag = torch.nn.EmbeddingBag(ROWS, DIM, sparse=True)
    bag.mode = "max"  # torch's own forward refuses it together with sparse=True
    return bag


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_go_remote_is_refused_by_name(what: str) -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(REFUSED[what]()))
    kind = type(model[0][0])
    fleet_ = Fleet(environ={})
    fleet_.init()
    with pytest.raises(UnsupportedError, match=r"'0\.0'") as caught:
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    assert what in str(caught.value)
    assert type(model[0][0]) is kind, "what is refused stays as it was"


def test_torchs_own_work_locally_until_the_job_is_there() -> None:
    fleet_ = Fleet(environ={})
    fleet_.init()
    model = torch.nn.ModuleList(
        [torch_embedding(sparse=True), torch.nn.EmbeddingBag(ROWS, DIM, sparse=True, _weight=start_of())]
    )
    optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    assert torch.equal(model[0](ALL), start_of())
    assert torch.equal(model[1](ALL[:, None]), start_of())
    fleet_.init_worker()
    assert torch.equal(model[0](ALL), start_of())
    assert torch.equal(model[1](ALL[:, None]), start_of())
    optimizer.minimize(model[0](ALL).sum())
    assert_close([model[0](ALL).detach()], [start_of() - 1])
    fleet_.stop_worker()


# ---------------------------------------------------------------------------------------------- initial values

INITIALIZERS: dict[str | None, float] = {
    "zeros": 0.0,
    "constant(1.5)": 1.5,
    "uniform(2, 3)": 2.5,
    "normal(-1, 0.01)": -1.0,
    None: 0.0,
}


@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_an_unknown_id_reads_the_same_everywhere(initializer: str | None) -> None:
    """Whoever asks, in whatever order, however many servers there are; the seed alone makes a difference."""
    ids = torch.cat([torch.arange(200), torch.tensor([INT64.min, INT64.max])])

    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        tables = [fleet.nn.Embedding(None, DIM, initializer=initializer) for _ in range(2)]
        begin(fleet_, *tables)
        order = torch.arange(len(ids)) if worker == 0 else torch.arange(len(ids)).flip(0)
        rows = torch.stack([table(ids[order]).detach() for table in tables])
        return rows[:, order]  # both orders undo themselves

    found: dict[int, list[torch.Tensor]] = {}
    for seed in (5, 6):
        torch.manual_seed(seed)
        found[seed] = [rows for servers in (1, 3) for rows in run_job(body, 2, servers)]
        assert all(torch.equal(rows, found[seed][0]) for rows in found[seed])
    rows, others = found[5][0], found[6][0]
    if initializer in ("zeros", "constant(1.5)"):
        assert torch.equal(rows, torch.full_like(rows, INITIALIZERS[initializer]))
    else:
        assert rows.unique().numel() > 0.99 * rows.numel(), "no two tables, ids or columns are alike"
        assert not torch.isclose(rows, others, rtol=1e-6, atol=0).any()
    if initializer == "uniform(2, 3)":
        assert 2 <= rows.min() < 2.05
        assert 2.95 < rows.max() < 3
    elif initializer in ("normal(-1, 0.01)", None):
        scale = 1 if initializer is None else 0.01
        assert abs(rows.mean() - INITIALIZERS[initializer]) < 0.1 * scale
        assert abs(rows.std() / scale - 1) < 0.1


@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_evaluation_reads_the_mean_and_reading_creates_nothing(initializer: str | None, tmp_path: Path) -> None:
    ids = torch.tensor([1, 2, 3])

    def body(fleet_: Fleet) -> None:
        table = fleet.nn.Embedding(None, DIM, initializer=initializer)
        bag = fleet.nn.EmbeddingBag(None, DIM, initializer=initializer)
        optimizer = begin(fleet_, table, bag)
        mean = torch.full((3, DIM), INITIALIZERS[initializer])
        training = table(ids).detach()
        bag(ids[:, None])
        table.eval()
        bag.eval()
        assert torch.equal(table(ids), mean)
        assert torch.equal(bag(ids[:, None]), mean)
        assert stored_ids(fleet_, tmp_path / "a") == {"optimizer0.group0.param0": [], "optimizer0.group0.param1": []}
        table.train()
        assert torch.equal(table(ids), training), "evaluation has left no trace"
        optimizer.minimize(table(ids[1:2]).sum())
        assert stored_ids(fleet_, tmp_path / "b") == {"optimizer0.group0.param0": [2], "optimizer0.group0.param1": []}
        table.eval()
        expected = mean.clone()
        expected[1] = training[1] - 1
        assert_close([table(ids).detach()], [expected])

    alone(body)


# ---------------------------------------------------------------------------------------------- wrong use


def test_bad_ids_are_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    start = Connection.start

    def recording(client: Connection, frame: Any, what: str, **options: bool) -> Any:
        sent.append(what)
        return start(client, frame, what, **options)

    monkeypatch.setattr(Connection, "start", recording)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.tensor([1.0]), TypeError, "float32"),
        (torch.tensor([True]), TypeError, "bool"),
        (torch.tensor([1], dtype=torch.uint8), TypeError, "uint8"),
        ([1, 2], TypeError, "list"),
        (torch.tensor([0, ROWS]), IndexError, f"got {ROWS}"),
        (torch.tensor([[0], [-1]]), IndexError, "got -1"),
        (torch.tensor(INT64.max), IndexError, str(INT64.max)),
        (torch.tensor([-5], dtype=torch.int32), IndexError, "got -5"),
    ]

    def body(fleet_: Fleet) -> None:
        model = torch.nn.ModuleDict(
            {
                "user": fleet.nn.Embedding(ROWS, DIM),
                "tags": fleet.nn.EmbeddingBag(ROWS, DIM),
                "item": torch_embedding(sparse=True),
            }
        )
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet_.init_worker()
        sent.clear()
        for name, module in model.items():
            for ids, kind, got in wrong:
                with pytest.raises(kind, match=f"{name}.weight") as caught:
                    module(ids)
                assert got in str(caught.value)
                assert isinstance(caught.value, IdOutOfRangeError) is (kind is IndexError)
        assert sent == []
        model["user"](torch.tensor([0, ROWS - 1]))
        assert sent, "this one does go out"

    alone(body)


BAD_ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "num_embeddings is no int": ((3.0, DIM), {}, TypeError, "num_embeddings"),
    "num_embeddings is a bool": ((True, DIM), {}, TypeError, "num_embeddings"),
    "num_embeddings is text": (("10", DIM), {}, TypeError, "num_embeddings"),
    "no rows": ((0, DIM), {}, ValueError, "num_embeddings"),
    "fewer than no rows": ((-1, DIM), {}, ValueError, "num_embeddings"),
    "embedding_dim is None": ((ROWS, None), {}, TypeError, "embedding_dim"),
    "embedding_dim is no int": ((None, 2.0), {}, TypeError, "embedding_dim"),
    "no columns": ((None, 0), {}, ValueError, "embedding_dim"),
    "padding_idx beyond the end": ((ROWS, DIM), {"padding_idx": ROWS}, ValueError, "padding_idx"),
    "padding_idx before the start": ((ROWS, DIM), {"padding_idx": -ROWS - 1}, ValueError, "padding_idx"),
    "padding_idx is no int64": ((None, DIM), {"padding_idx": 2**63}, ValueError, "padding_idx"),
    "padding_idx is no int": ((None, DIM), {"padding_idx": 1.0}, TypeError, "padding_idx"),
    "padding_idx is a bool": ((ROWS, DIM), {"padding_idx": True}, TypeError, "padding_idx"),
    "initializer is unknown": ((ROWS, DIM), {"initializer": "xavier"}, ValueError, "initializer"),
    "initializer lacks a number": ((ROWS, DIM), {"initializer": "uniform(1)"}, ValueError, "initializer"),
    "initializer is upside down": ((ROWS, DIM), {"initializer": "uniform(1, 0)"}, ValueError, "initializer"),
    "initializer is not finite": ((ROWS, DIM), {"initializer": "constant(nan)"}, ValueError, "initializer"),
    "a negative deviation": ((ROWS, DIM), {"initializer": "normal(0, -1)"}, ValueError, "initializer"),
    "an option of torch's": ((ROWS, DIM), {"max_norm": 1.0}, TypeError, "max_norm"),
}


@pytest.mark.parametrize("module", [fleet.nn.Embedding, fleet.nn.EmbeddingBag])
@pytest.mark.parametrize(("args", "options", "kind", "named"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(
    module: Any, args: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        module(*args, **options)


@pytest.mark.parametrize("mode", ["max", "min", "", None])
def test_bags_that_neither_sum_nor_average(mode: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"mode {mode!r}.*'sum' or 'mean'"):
        fleet.nn.EmbeddingBag(ROWS, DIM, mode=mode)


@pytest.mark.parametrize("make", [fleet.nn.Embedding, fleet.nn.EmbeddingBag])
def test_use_before_the_job_is_there(make: Any) -> None:
    module, ids = make(ROWS, DIM), torch.tensor([[1]])
    with pytest.raises(NotInitializedError, match=r"fleet.init_worker\(\)"):
        module(ids)
    fleet_ = Fleet(environ={})
    fleet_.init()
    fleet_.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=1.0))
    with pytest.raises(NotInitializedError, match=r"optimizer0.group0.param0.*fleet.init_worker\(\)"):
        module(ids)
    fleet_.init_worker()
    assert module(ids).shape[-1] == DIM
    fleet_.stop_worker()


def test_a_table_in_two_param_groups_is_refused() -> None:
    table = fleet.nn.Embedding(ROWS, DIM)
    fleet_ = Fleet(environ={})
    fleet_.init()
    optimizers = [torch.optim.SGD(table.parameters(), lr=1.0), torch.optim.Adam(table.parameters())]
    with pytest.raises(ConfigurationError, match="two groups"):
        fleet_.distributed_optimizer(optimizers, model=table)


# ---------------------------------------------------------------------------------------------- copies and neighbours


def test_a_copy_of_a_model_in_a_job_has_the_values_for_itself() -> None:
    ids = torch.tensor([1, 2, 3])

    def body(fleet_: Fleet) -> None:
        model = torch.nn.ModuleDict({"ours": fleet.nn.Embedding(ROWS, DIM), "torchs": torch_embedding(sparse=True)})
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        early = copy.deepcopy(model)
        fleet_.init_worker()
        late = copy.deepcopy(model)  # a target network, an average of weights
        assert torch.equal(early["torchs"](ids), model["torchs"](ids)), "it had its values by then"
        with pytest.raises(NotInitializedError, match="an embedding was asked for rows"):
            early["ours"](ids)
        for name, module in model.items():
            twin, before = late[name], module(ids).detach()
            assert twin.weight.untyped_storage().nbytes() == ROWS * DIM * 4
            assert torch.equal(twin(ids), before)
            optimizer.minimize(module(ids).sum())
            assert torch.equal(twin(ids), before), "and keeps them"
            twin(ids).sum().backward()
            after = module(ids).detach()
            optimizer.step()
            assert torch.equal(module(ids), after - 1), "its backward trains nothing but itself"
            assert twin.weight.grad is not None

    alone(body)


def test_a_table_without_an_end_cannot_be_copied() -> None:
    def body(fleet_: Fleet) -> None:
        model = torch.nn.ModuleDict({"user": fleet.nn.Embedding(None, DIM)})
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet_.init_worker()
        with pytest.raises(UnsupportedError, match=r"'user.weight' has no num_embeddings"):
            copy.deepcopy(model)

    alone(body)


def test_a_copy_of_a_model_that_no_job_has_yet_is_a_model_of_its_own() -> None:
    template = torch.nn.Sequential(fleet.nn.Embedding(ROWS, DIM, padding_idx=2, initializer="constant(3.0)"))

    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        model = copy.deepcopy(template)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet_.init_worker()
        optimizer.minimize(model(torch.tensor([1, 2])).sum())
        return model(torch.tensor([0, 1, 2])).detach()[:, 0]

    for got in run_job(body, 2, 2):
        assert got.tolist() == [3, 2, 0]
    with pytest.raises(NotInitializedError):
        template(torch.tensor([1]))


def test_repr() -> None:
    assert repr(fleet.nn.Embedding(10, 4)) == "Embedding(10, 4)"
    assert repr(fleet.nn.Embedding(None, 4)) == "Embedding(any id, 4)"
    assert repr(fleet.nn.Embedding(10, 4, padding_idx=-1)) == "Embedding(10, 4, padding_idx=9)"
    assert repr(fleet.nn.EmbeddingBag(10, 4, mode="sum")) == "EmbeddingBag(10, 4, mode='sum')"
    assert repr(torch.nn.Embedding(10, 4, padding_idx=-1)) == "Embedding(10, 4, padding_idx=9)", "torch's own form"


def test_two_jobs_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    jobs = []
    for rate in (1.0, 10.0):
        fleet_ = Fleet(environ={})
        fleet_.init()
        table, dense = fleet.nn.Embedding(None, 1, initializer="zeros"), torch.nn.Parameter(torch.zeros(2))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([table.weight, dense], lr=rate))
        jobs.append((rate, fleet_, table, dense, optimizer))
    for _, fleet_, *_ in jobs:
        fleet_.init_worker()
    for step in range(3):
        for _, _, table, dense, optimizer in jobs:
            optimizer.zero_grad()
            (table(torch.tensor([1, step + 10])).sum() + dense.sum()).backward()
        for *_, optimizer in jobs:
            optimizer.step()
    jobs[0][1].stop_worker()
    rate, fleet_, table, dense, optimizer = jobs[1]
    optimizer.minimize(table(torch.tensor([1])).sum() + dense.sum())
    assert table(torch.tensor([1, 10, 99])).tolist() == [[-4 * rate], [-rate], [0]]
    assert dense.tolist() == [-4 * rate] * 2
    assert fleet_.resume_step() == 4
    assert stored_ids(fleet_, tmp_path / "ckpt") == {"optimizer0.group0.param0": [1, 10, 11, 12]}
    assert jobs[0][3].tolist() == [-3.0] * 2
    fleet_.stop_worker()


def test_a_model_whose_rows_an_earlier_job_took_cannot_start_a_fresh_one() -> None:
    model = torch.nn.Embedding(5, 3, sparse=True)
    alone = Fleet(environ={})
    for round_ in range(2):
        alone.init()
        alone.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        if round_ == 0:
            alone.init_worker()
            alone.stop_worker()
        else:
            with pytest.raises(UnsupportedError, match="earlier job"):
                alone.init_worker()


class _Doubled(fleet.nn.Embedding):
    def forward(self, ids: torch.Tensor, *, weights: torch.Tensor | None = None) -> torch.Tensor:
        return 2 * super().forward(ids, weights=weights)


@pytest.mark.parametrize("kind", ["own forward", "set forward", "bag", "torch's bag", "torch's", "plain", "layers"])
def test_what_stands_in_a_group_is_called_as_it_is(kind: str) -> None:
    def body(fleet_: Fleet, _: int) -> None:
        ones = "constant(1.0)"
        group = fleet.nn.EmbeddingGroup(dict.fromkeys("ab", (9, 2)), initializer=ones)
        made: dict[str, Callable[[], torch.nn.Module]] = {
            "own forward": lambda: _Doubled(9, 2, initializer=ones),
            "set forward": lambda: fleet.nn.Embedding(9, 2, initializer=ones),
            "bag": lambda: fleet.nn.EmbeddingBag(9, 2, mode="sum", initializer=ones),
            "torch's bag": lambda: torch.nn.EmbeddingBag(9, 2, mode="sum", sparse=True),
            "torch's": lambda: torch.nn.Embedding(9, 2, sparse=True),
            "plain": lambda: torch.nn.Embedding(9, 2),
            "layers": lambda: torch.nn.Sequential(torch.nn.Embedding(9, 2), torch.nn.Linear(2, 3)),
        }
        group["b"] = made[kind]()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(group.parameters(), lr=0.1), model=group)
        fleet_.init_worker()
        if kind == "set forward":
            inner = group["b"].forward
            group["b"].forward = lambda ids: inner(ids) - 1
        ids = torch.tensor([[1, 2], [3, 3]])
        for _ in range(3):
            found = group({"a": ids, "b": ids})
            assert torch.equal(found["a"], group["a"](ids))
            assert torch.equal(found["b"], group["b"](ids))
            optimizer.minimize(found["a"].sum() + found["b"].sum())

    run_job(body, 1, 1)
