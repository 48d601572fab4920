"""Lookup prediction: a model that asks table by table sends one request once its look-ups are known; results stay."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from habits.habit import difference, plain
from harness import run_job, values
from inside import running_forwards
from test_geo import Watched
from torch.utils.checkpoint import checkpoint

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.errors import IdOutOfRangeError, UnsupportedError
from fleet.ps.worker import lookup_prediction
from fleet.ps.worker.lookup_prediction import HOPE, PATIENCE, View, _tensors, _view
from fleet.ps.worker.runtime import WorkerRuntime
from fleet.strategy.parameter_server import Strategy

Inputs = dict[str, Any]


class Net(torch.nn.Module):
    """Four tables, whose ids are a column, a range of columns, a whole tensor, and an entry of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.column = fleet.nn.Embedding(None, 2)
        self.range = fleet.nn.EmbeddingBag(40, 3, mode="sum")
        self.whole = fleet.nn.Embedding(50, 1)
        self.entry = fleet.nn.Embedding(None, 2)
        self.dense = torch.nn.Linear(8, 1)
        with torch.no_grad():  # no random numbers: workers are threads, and would draw from one generator
            self.dense.weight.copy_(torch.linspace(-1, 1, 8))
            self.dense.bias.zero_()

    def forward(self, ids: torch.Tensor, others: Inputs) -> torch.Tensor:
        parts = [
            self.column(ids[:, 0]),
            self.range(ids[:, 1:3]),
            self.whole(others["whole"]),
            self.entry(others["entries"][1].long()),
        ]
        return self.dense(torch.cat(parts, 1)).square().mean()


def batches(worker: int, count: int = 6) -> list[tuple[torch.Tensor, Inputs]]:
    random = torch.Generator().manual_seed(worker)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 9, shape, generator=random)

    sizes = [5] * (count - 1) + [2]  # the last one is smaller
    return [(some(size, 3), {"whole": some(size), "entries": [some(size), some(size)]}) for size in sizes]


def train(
    strategy: Strategy | None, monkeypatch: pytest.MonkeyPatch, *, foresee: bool, workers: int = 2
) -> list[list[torch.Tensor]]:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        net = Net()
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.1), strategy, model=net)
        fleet_.init_worker()
        losses = []
        for number, batch in enumerate(batches(worker)):
            optimizer.minimize(net(*batch))
            if number % 2:
                with torch.no_grad():
                    losses.append(net.eval()(*batch))
                net.train()
        fleet_.barrier_worker()
        return [*values(net.dense), *losses, net.column(torch.arange(9)).detach()]

    with monkeypatch.context() as patch:
        if not foresee:
            patch.setattr(WorkerRuntime, "watch", lambda *_: None)
        return run_job(body, workers, 2)


@pytest.mark.pairs(1)
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [(None, 2), (StrategyFactory.create_half_async_strategy(), 1), (StrategyFactory.create_geo_strategy(2), 1)],
    ids=["sync", "half_async", "geo"],
)
def test_the_same_to_the_bit(strategy: Strategy | None, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    got = train(strategy, monkeypatch, foresee=True, workers=workers)
    expected = train(strategy, monkeypatch, foresee=False, workers=workers)
    for ours, theirs in zip(got, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def requests(forwards: Callable[[Fleet, Net, Any], None], wrap: Callable[[Net], Any] = lambda net: net) -> list[int]:
    """How many tables each request for rows named."""
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        net = Net()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        forwards(fleet_, net, wrap(net))
        optimizer.zero_grad()
        fleet_.stop_worker()
        assert not net._forward_pre_hooks
        assert not net._forward_hooks

    run_job(body, 1, 1, network=network)
    return [len(frame.message.pull.tables) for frame, _ in network.seen if frame.message.pull.tables]


def test_one_request_from_the_second_forward_on() -> None:
    def forwards(fleet_: Fleet, net: Net, model: Any) -> None:
        for batch in batches(0, 4):
            model(*batch)

    assert requests(forwards) == [1, 1, 1, 1, 4, 4, 4]


@pytest.mark.slow
def test_a_compiled_model() -> None:
    def forwards(fleet_: Fleet, net: Net, model: Any) -> None:
        for batch in batches(0, 3)[:-1]:
            model(*batch)

    assert requests(forwards, lambda net: torch.compile(net, backend="eager")) == [1, 1, 1, 1, 4]


def test_evaluation_is_learnt_apart() -> None:
    def forwards(fleet_: Fleet, net: Net, model: Any) -> None:
        for number, batch in enumerate(batches(0, 4)):
            net.train(number % 2 == 0)
            model(*batch)

    assert requests(forwards) == [1, 1, 1, 1, 1, 1, 1, 1, 4, 4]


def test_what_was_prefetched_is_not_asked_for_again() -> None:
    def forwards(fleet_: Fleet, net: Net, model: Any) -> None:
        net.eval()  # there are no steps between these batches
        for batch in fleet_.prefetch(batches(0, 4), lambda batch: {net.column: batch[0][:, 0]}, 1):
            model(*batch)

    # Column by column at first, with those fetched ahead in between; then what is left.
    assert sorted(requests(forwards)) == [1, 1, 1, 1, 1, 1, 1, 3, 3, 3]


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    def forwards(fleet_: Fleet, net: Net, model: Any) -> None:
        ids, others = batches(0, 2)[0]
        model(ids, others)
        for _ in range(2 * PATIENCE):
            with pytest.raises(RuntimeError):
                model(ids, {**others, "whole": torch.zeros(3, dtype=torch.int64)})  # rows that cannot be put together
        model(ids, others)

    assert requests(forwards)[-2:] == [4, 4]


def test_a_forward_inside_of_a_forward() -> None:
    def forwards(fleet_: Fleet, net: Net, model: Any) -> None:
        plain = net.forward

        def forward(ids: torch.Tensor, others: Inputs, depth: int = 0) -> torch.Tensor:
            return plain(ids, others) + (net(ids, others, 1) if depth == 0 else 0)

        net.forward = forward  # type: ignore[method-assign,assignment]
        for batch in batches(0, PATIENCE + 3):
            model(*batch)

    assert requests(forwards)[-8:] == [1] * 8, "left alone"


class Part(torch.nn.Module):
    """Two tables, of the columns of what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(fleet.nn.Embedding(None, 2) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)])


class Whole(torch.nn.Module):
    """A table, and a part that is called with what is made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Sequential(fleet.nn.Embedding(None, 2))
        self.part = Part()

    def forward(self, ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(ids[:, 0]), *(self.part(each + 1) for each in (ids, *others))])

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.one(ids[:, 0]).sum() + self.part(ids).sum()).square()


def pulls(call: Callable[[Whole, torch.Tensor], object], times: int) -> tuple[list[int], set[str]]:
    """How many tables each request for rows named, and the parts of the model that are still watched."""
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> set[str]:
        model = Whole()
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        for number in range(times):
            call(model, torch.arange(4 * number, 4 * number + 4).view(2, 2))
        watched = {name for name, module in model.named_modules() if module._forward_hooks}
        assert watched == {name for name, module in model.named_modules() if module._forward_pre_hooks}
        fleet_.stop_worker()
        assert not any(module._forward_hooks for module in model.modules())
        return watched

    (watched,) = run_job(body, 1, 1, network=network)
    return [len(frame.message.pull.tables) for frame, _ in network.seen if frame.message.pull.tables], watched


def test_a_model_that_is_not_called_as_a_whole() -> None:
    found, watched = pulls(lambda model, ids: model.loss(ids), HOPE + 2)
    assert found == [1, 1, 1] + [1, 2] * (HOPE + 1)
    assert watched == {"", "part", "part.tables"}, "nothing can be foreseen of the one table"


def test_what_a_model_makes_of_its_input_is_a_parts_input() -> None:
    found, _ = pulls(lambda model, ids: model(ids), 5)
    assert found == [1, 1, 1] + [1, 2] * 4


def test_a_part_that_is_called_twice() -> None:
    found, _ = pulls(lambda model, ids: model(ids, ids + 100), 3)
    assert found == [1, 1, 1, 2] + [1, 2, 2] * 2


def test_what_was_foreseen_for_the_whole_is_not_asked_for_again_for_its_part() -> None:
    def call(model: Whole, ids: torch.Tensor) -> None:
        model.forward = lambda ids: model.part(ids).sum() + model.one(ids[:, 1]).sum()  # type: ignore[method-assign]
        model(ids)

    found, _ = pulls(call, 5)
    assert found == [1, 1, 1] + [3] * 4


def test_a_part_that_is_called_with_what_was_foreseen_and_with_something_else() -> None:
    def call(model: Whole, ids: torch.Tensor) -> None:
        def forward(ids: torch.Tensor) -> torch.Tensor:
            parts = [model.part(ids), model.part(ids + 1), *(table(ids[:, 0]) for table in model.part.tables)]
            return torch.cat(parts)

        model.forward = forward  # type: ignore[method-assign,assignment]
        model(ids)

    found, _ = pulls(call, 3)
    assert found[-2:] == [2, 2], "for the whole, and for its part once"


def test_a_part_that_is_compiled() -> None:
    found, _ = pulls(lambda model, ids: torch.compile(model.part, backend="eager")(ids), 3)
    assert found == [1, 1, 2, 2]


def test_a_part_that_is_computed_again_in_the_backward() -> None:
    def call(model: Whole, ids: torch.Tensor) -> None:
        out = checkpoint(model.part, ids, torch.ones(1, requires_grad=True), use_reentrant=False)
        out.sum().backward()

    def forward(self: Part, ids: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
        return plain(self, ids) * ones * ones

    plain = Part.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "forward", forward)
        found, _ = pulls(call, 3)
    assert found == [1, 1] + [2] * 5


def test_a_forward_that_looks_nothing_up_changes_nothing() -> None:
    def call(model: Whole, ids: torch.Tensor) -> None:
        def forward(ids: torch.Tensor | None = None) -> list[torch.Tensor]:
            return [] if ids is None else [table(ids[:, at]) for at, table in enumerate(model.part.tables)]

        model.forward = forward  # type: ignore[method-assign,assignment]
        model(ids)
        model()

    found, _ = pulls(call, 5)
    assert found == [1, 1] + [2] * 4


def test_evaluation_of_which_nothing_can_be_foreseen_is_no_matter_to_training() -> None:
    def call(model: Whole, ids: torch.Tensor) -> None:
        model.train(ids[0, 0] in (0, 4 * last))
        model.part(ids if model.training else CountedFromOne(ids))

    class CountedFromOne:
        """Ids that a part has to compute."""

        def __init__(self, ids: torch.Tensor) -> None:
            self._ids = ids

        def unbind(self, dim: int) -> tuple[torch.Tensor, ...]:
            return (self._ids + 1).unbind(dim)

    last = HOPE + 2
    found, watched = pulls(call, last + 1)
    assert found == [1, 1] + [1, 1] * (last - 1) + [2]
    assert "part" in watched


def test_guesses_that_are_right_make_up_for_some_that_are_wrong() -> None:
    def call(model: Whole, ids: torch.Tensor) -> None:
        branch = model.part.tables[:1] if ids[0, 0] % 1000 == 40 else model.part.tables
        model.part.forward = lambda ids: [table(ids[:, at]) for at, table in enumerate(branch)]  # type: ignore
        model.part(ids)

    found, _ = pulls(call, 1020)
    assert found[-2:] == [2, 2]


def test_two_branches_in_turn_are_left_alone() -> None:
    def call(model: Whole, ids: torch.Tensor) -> None:
        offset = ids[0, 0] // 8 % 2
        model.part.forward = lambda ids: [table(ids[:, offset]) for table in model.part.tables]  # type: ignore
        model.part(ids)

    found, watched = pulls(call, 20)
    assert found[-4:] == [1, 1, 1, 1]
    assert "part" not in watched


@pytest.mark.parametrize("most_ids", [5, 1 << 24])
@pytest.mark.parametrize("step", [False, True])
def test_a_forward_that_was_interrupted(step: bool, most_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says that it has ended: it is found out with the next step, or when too much is seen of it."""
    monkeypatch.setattr(lookup_prediction, "MOST_IDS", most_ids)
    if most_ids == 5:
        monkeypatch.setattr(lookup_prediction, "IDS_OF_ONE", 0)
    forwards = []

    def interrupted(ids: torch.Tensor) -> None:
        raise KeyboardInterrupt

    def body(fleet_: Fleet, worker: int) -> None:
        model = Whole()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer(optimizer, model=model)
        fleet_.init_worker()
        with monkeypatch.context() as patch:
            patch.setattr(model.part.tables[1], "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(torch.arange(4).view(2, 2))
        forwards.append(running_forwards(optimizer))
        loss = model.loss(torch.arange(4).view(2, 2))
        if step:
            optimizer.minimize(loss)
        forwards.append(running_forwards(optimizer))

    run_job(body, 1, 1)
    assert forwards == [2, 0 if step or most_ids == 5 else 1]


def test_nothing_of_a_batch_is_kept() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        net = Net()
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        for ids, others in batches(0, 3):
            net(ids, others)
        gone = weakref.ref(ids)
        del ids, others
        assert gone() is None

    run_job(body, 1, 1)


def test_a_model_in_a_job_cannot_be_pickled(tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        net = Net()
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        with pytest.raises(UnsupportedError, match="save_persistables"):
            torch.save(net, tmp_path / "model.pt")

    run_job(body, 1, 1)


class Pair(torch.nn.Module):
    """Two tables, which are looked up together as soon as that is foreseen."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Embedding(20, 2, sparse=True)
        self.right = torch.nn.Embedding(20, 2, sparse=True)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(ids[..., 0]), self.right(ids[..., 1])


def beside_torch(use: Callable[[Pair, torch.Tensor], Any]) -> None:
    """Do the same with a model whose look-ups are foreseen and with a copy of it, which is torch's alone."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, ids = Pair(), torch.arange(10).view(5, 2)
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        for _ in range(2):
            model(ids)
        found, expected = use(model, ids), use(copy.deepcopy(model), ids)
        assert difference(plain(found), plain(expected)) is None

    run_job(body, 1, 1)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda model, ids: torch.func.vmap(model)(ids),
        lambda model, ids: torch.func.vmap(torch.func.vmap(model))(ids[None]),
        lambda model, ids: torch.func.vmap(lambda each: model(each[None]))(ids),
        lambda model, ids: torch.func.jacrev(lambda scale: model(ids)[0] * scale + model(ids)[1])(torch.ones(5, 2)),
        lambda model, ids: torch.func.jvp(lambda x: x * model(ids)[1], (torch.ones(5, 2),), (torch.ones(5, 2),)),
        lambda model, ids: (torch.func.vmap(model)(ids), model(ids), torch.func.vmap(model)(ids)),
    ],
)
def test_forwards_that_torch_func_transforms(transformed: Callable[[Pair, torch.Tensor], Any]) -> None:
    """Ids stand for others there."""
    beside_torch(transformed)


Hang = Callable[[Pair, Callable[[Any, Any], None]], object]


def _hook(model: Pair, note: Callable[[Any, Any], None]) -> None:
    model.left.weight.register_hook(lambda grad: note("left", grad is None))
    model.right.weight.register_hook(lambda grad: note("right", grad is None))


def _hook_that_computes(model: Pair, note: Callable[[Any, Any], None]) -> None:
    model.left.weight.register_hook(lambda grad: grad * 2)
    _hook(model, note)


def _hook_after_it(model: Pair, note: Callable[[Any, Any], None]) -> None:
    model.left.weight.register_post_accumulate_grad_hook(lambda p: note("left", p.grad is None))


def _hook_of_all(model: Pair, note: Callable[[Any, Any], None]) -> None:
    torch.autograd.graph.register_multi_grad_hook(
        [*model.parameters()], lambda grads: note("both", [grad is None for grad in grads])
    )


def _hook_of_any(model: Pair, note: Callable[[Any, Any], None]) -> None:
    weights = [*model.parameters()]
    torch.autograd.graph.register_multi_grad_hook(weights, lambda grad: note("any", grad is None), mode="any")


@pytest.mark.parametrize(
    ("hang", "late"),
    [
        (_hook, False),
        (_hook, True),
        (_hook_that_computes, True),
        (_hook_after_it, False),
        (_hook_of_all, False),
        (_hook_of_all, True),
        (_hook_of_any, True),
    ],
)
@pytest.mark.parametrize("part", [0, 1])
def test_hooks_of_tables_to_which_a_backward_does_not_come(part: int, hang: Hang, late: bool) -> None:
    """Several tables share a function of autograd, and hooks see nothing of that: be they there before the forward, or
    come after it."""

    def use(model: Pair, ids: torch.Tensor) -> Any:
        noted: list[Any] = []
        for _ in range(2):
            if not late:
                hang(model, lambda *told: noted.append(told))
            rows = model(ids)
            if late:
                hang(model, lambda *told: noted.append(told))
            rows[part].sum().backward()
        return noted, model.left.weight.grad, model.right.weight.grad

    beside_torch(use)


def test_inputs_that_do_not_lie_in_memory_as_others_do() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        net = Net()
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        neighbours = torch.eye(3, dtype=torch.int64).to_sparse()
        endless: list[Any] = []
        endless.append(endless)
        for ids, others in batches(0, 3):
            assert torch.equal(net(ids, {**others, "neighbours": neighbours, "endless": endless}), net(ids, others))

    run_job(body, 1, 1)


def test_ids_that_are_no_part_of_the_input_are_not_guessed() -> None:
    def forwards(fleet_: Fleet, net: Net, model: Any) -> None:
        net.forward = lambda ids: net.column(ids[:, 0] + 1).sum() + net.whole(ids[:, 1] % 7).sum()  # type: ignore
        for _ in range(4):
            model(torch.arange(6).view(2, 3))

    assert requests(forwards) == [1] * 8


def test_a_model_that_surprises_is_left_alone() -> None:
    def forwards(fleet_: Fleet, net: Net, model: Any) -> None:
        def forward(ids: torch.Tensor, at: int) -> torch.Tensor:
            return net.column(ids[:, at]).sum() + net.whole(ids[:, at]).sum()

        net.forward = forward  # type: ignore[method-assign,assignment]
        for number in range(PATIENCE + 4):
            ids = torch.arange(40).view(4, 10)
            model(ids, number)

    expected: list[int] = [1, 1]
    for _ in range(PATIENCE):
        expected += [2, 1, 1]  # the guess, and what was looked up instead
    assert requests(forwards) == expected + [1, 1] * 3


def test_a_guess_out_of_range_spoils_no_other() -> None:
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        net = Net()
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()

        def forward(ids: torch.Tensor, careful: bool) -> list[torch.Tensor]:
            found = [net.column(ids[:, 0]), net.whole(ids[:, 1])]
            return found if careful else [*found, net.whole(ids[:, 2])]

        net.forward = forward  # type: ignore[method-assign,assignment]
        for careful in (False, False, True):
            net(torch.tensor([[1, 2, 1000 if careful else 3]]), careful)

    run_job(body, 1, 1, network=network)
    assert [len(frame.message.pull.tables) for frame, _ in network.seen if frame.message.pull.tables][-1] == 2


def test_a_guess_out_of_range_is_no_error() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        net = Net()
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()

        def forward(ids: torch.Tensor, careful: bool) -> torch.Tensor:
            return net.column(ids[:, 0]).sum() + (0 if careful else net.whole(ids[:, 1]).sum())

        net.forward = forward  # type: ignore[method-assign,assignment]
        for careful in (False, False, True):
            net(torch.tensor([[1, 1000 if careful else 1]]), careful)
        with pytest.raises(IdOutOfRangeError, match="whole"):
            net(torch.tensor([[1, 1000]]), False)

    run_job(body, 1, 1)


@pytest.mark.parametrize("strategy", [None, StrategyFactory.create_geo_strategy(2)], ids=["sync", "geo"])
def test_nothing_is_sent_where_one_of_several_ids_is_out_of_range(strategy: Strategy | None) -> None:
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        group = fleet.nn.EmbeddingGroup({"good": (10, 1), "bad": (10, 1)})
        fleet_.distributed_optimizer(torch.optim.SGD(group.parameters(), lr=0.1), strategy, model=group)
        fleet_.init_worker()
        before = len(network.seen)
        with pytest.raises(IdOutOfRangeError, match="bad"):
            group({"good": torch.tensor([1]), "bad": torch.tensor([10])})
        assert len(network.seen) == before

    run_job(body, 1, 1, network=network)


IDS = torch.arange(24).view(4, 6)
OTHER = torch.arange(60, 120).view(4, 3, 5)


@pytest.mark.parametrize(
    "part",
    [
        lambda ids: ids,
        lambda ids: ids[:, 0],
        lambda ids: ids[:, -1],
        lambda ids: ids[:, 2:5],
        lambda ids: ids[:, :1],
        lambda ids: ids[0],
        lambda ids: ids[1:3],
        lambda ids: ids.unbind(1)[3],
        lambda ids: ids.split(2, 1)[2],
    ],
)
@pytest.mark.parametrize("size", [4, 3, 1])
def test_a_part_is_found_again_in_other_inputs(part: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    view = _view(part(IDS), {("other",): OTHER, ("ids",): IDS})
    assert view is not None
    later = {("ids",): IDS[:size] + 100}
    found = view.of(later)
    if found is None:
        assert size < len(IDS), "only what is smaller may lack a part"
    else:
        assert torch.equal(found, part(later["ids",]))


def test_what_is_no_part() -> None:
    inputs = {("ids",): IDS}
    for ids in (IDS.t(), IDS[:, ::2], IDS[::2], IDS.clone(), IDS + 1, IDS.flatten()[3:9], IDS[:, 0].int()):
        assert _view(ids, inputs) is None, ids
    assert View(("ids",), 1, 6).of(inputs) is None
    assert View(("ids",), 1, 5, 2).of(inputs) is None
    assert View(("ids",), 2, 0).of(inputs) is None
    assert View(("other",)).of(inputs) is None


def test_the_tensors_of_ids_among_arguments() -> None:
    found = dict(_tensors(((IDS, torch.ones(2), 3), {"a": [{"b": OTHER.int()}], "c": None})))
    assert list(found) == [(0, 0), (1, "a", 0, "b")]
