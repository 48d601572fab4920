"""A model that follows reads one version in every forward, whatever comes beside it, and says how fresh it is."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import PATIENT, run_job, until
from patience import PATIENCE_S
from test_checkpoint_places import s3  # noqa: F401 (a fixture)
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

import fleet.nn
from fleet import Checkpoints, Fleet
from fleet.base.clock import SystemClock
from fleet.checkpoint.manifest import MANIFEST
from fleet.checkpoint.places import Directory
from fleet.checkpoint.series import name_of
from fleet.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    IdOutOfRangeError,
    PlanMismatchError,
    ServerLostError,
    StateError,
    UnsupportedError,
)
from fleet.role_maker import UserDefinedCollectiveRoleMaker
from fleet.serving import Follower, checkpoint_source, follow, readers
from fleet.serving.followed_model import FollowedModel, kept_of
from fleet.serving.readers import Readers
from fleet.serving.source import Piece, RowChanges, SourceDescription, TableDescription, Update
from fleet.strategy.collective import DistributedStrategy
from fleet.strategy.parameter_server import StrategyFactory

DIM = 4
MEAN = 0.25
CLOSED = 12
IDS = torch.tensor([0, 3, -7, 2**40])


class Net(torch.nn.Module):
    """Says whether all that a forward reads is of one version: the source gives every number the version's."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(DIM, 1)
        self.open = fleet.nn.Embedding(None, DIM, initializer=f"constant({MEAN})", padding_idx=99)
        self.plain = torch.nn.Embedding(CLOSED, DIM)
        self.bag = fleet.nn.EmbeddingBag(CLOSED, DIM, mode="sum", initializer="zeros")
        self.between: Callable[[], object] = lambda: None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        few = ids.abs() % CLOSED
        read = [self.dense.weight.flatten(), self.open(ids).flatten()]
        self.between()
        read += [self.dense.bias, self.plain(few).flatten(), self.bag(few[:, None]).flatten()]
        return torch.cat(read)


DESCRIBED = SourceDescription(
    {"dense.weight": ((1, DIM), torch.float32), "dense.bias": ((1,), torch.float32)},
    {
        "open.weight": TableDescription(DIM, None, MEAN),
        "plain.weight": TableDescription(DIM, CLOSED, MEAN),
        "bag.weight": TableDescription(DIM, CLOSED, 0.0),
    },
)


def rows_of(ids: list[int], value: float, gone: tuple[int, ...] = ()) -> RowChanges:
    return RowChanges(np.array(ids, np.int64), torch.full((len(ids), DIM), float(value)), np.array(gone, np.int64))


def pieces_of(version: float) -> list[Piece]:
    """Everything, with the version for every number, in several pieces."""
    few = list(range(CLOSED))
    return [
        Piece({"dense.weight": torch.full((1, DIM), float(version))}, {"open.weight": rows_of([0, 3], version)}),
        Piece(rows={"open.weight": rows_of([-7, 2**40], version), "plain.weight": rows_of(few, version)}),
        Piece({"dense.bias": torch.full((1,), float(version))}, {"bag.weight": rows_of(few, version)}),
    ]


class FakeSource:
    """Gives what a test puts in."""

    def __init__(self, described: SourceDescription = DESCRIBED, version: int = 1) -> None:
        self.described = described
        self.coming: queue.Queue[Update | Exception] = queue.Queue()
        self.heard_at = SystemClock().now()
        self.ended = False
        self.closed = threading.Event()
        self.give(version, whole=True)

    def give(self, version: int, pieces: list[Piece] | Iterator[Piece] | None = None, *, whole: bool = False) -> None:
        self.coming.put(Update(version, whole, iter(pieces_of(version) if pieces is None else pieces)))

    def describe(self) -> SourceDescription:
        return self.described

    def next(self, timeout_s: float) -> Update | None:
        deadline = time.monotonic() + timeout_s
        while not self.closed.is_set() and time.monotonic() < deadline and not self.ended:
            try:
                found = self.coming.get(timeout=0.005)
            except queue.Empty:
                continue
            if isinstance(found, Exception):
                raise found
            return found
        return None

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def following() -> Iterator[Callable[..., tuple[Any, FakeSource, Follower]]]:
    """Begins to follow a fake source; it is closed at the end."""
    begun: list[Follower] = []

    def begin(model: torch.nn.Module | None = None, *, share: Any = None, **options: Any) -> Any:
        model = Net() if model is None else model
        source = FakeSource()
        follower = Follower(FollowedModel(model, share, 1 << 20), source, "a source", **options)
        begun.append(follower)
        follower.begin(PATIENCE_S)
        return model, source, follower

    yield begin
    for follower in begun:
        follower.close()


def is_of(model: torch.nn.Module, version: float, ids: torch.Tensor = IDS) -> bool:
    with torch.no_grad():
        return bool((model(ids) == version).all())


# ---------------------------------------------------------------------------------------------- one version


@pytest.mark.parametrize("whole", [False, True])
def test_no_forward_sees_a_mixture(following: Any, whole: bool) -> None:
    model, source, follower = following()
    seen: list[set[int]] = [set(), set(), set()]
    mixed: list[torch.Tensor] = []
    done = threading.Event()

    def read(mine: set[int], part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        while not done.is_set():
            with torch.inference_mode():
                found = part(IDS)
            values = set(found.flatten().tolist())
            mine.update(map(int, values))
            if len(values) > 1:
                mixed.append(found)

    model.between = lambda: time.sleep(0.0005)
    parts = [model, model, model.open]
    threads = [threading.Thread(target=read, args=each) for each in zip(seen, parts, strict=True)]
    for thread in threads:
        thread.start()
    for version in range(2, 42):
        source.give(version, whole=whole)
        follower.wait(version, PATIENCE_S)
    done.set()
    for thread in threads:
        thread.join()
    assert mixed == []
    assert len(seen[0] | seen[1]) > 10, "forwards went on"
    assert is_of(model, 41)


def test_a_forward_that_runs_keeps_its_version_and_the_next_one_has_the_new(following: Any) -> None:
    model, source, follower = following()
    inside, go_on = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    def stay() -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)

    model.between = stay
    thread = threading.Thread(target=lambda: found.append(model(IDS).detach()))
    thread.start()
    assert inside.wait(PATIENCE_S)
    model.between = lambda: None
    source.give(2)
    with pytest.raises(DeadlineError, match=r"expected version 2 within 0.2 s; got version 1"):
        follower.wait(2, 0.2)
    assert is_of(model, 1), "another thread may read meanwhile, after a moment"
    go_on.set()
    thread.join()
    assert set(found[0].tolist()) == {1.0}
    follower.wait(2, PATIENCE_S)
    assert is_of(model, 2)


def test_forwards_do_not_wait_for_pieces_under_way(following: Any) -> None:
    model, source, follower = following()
    halfway, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[Piece]:
        first, *others = pieces_of(2)
        yield first
        halfway.set()
        assert go_on.wait(PATIENCE_S)
        yield from others

    source.give(2, slow())
    assert halfway.wait(PATIENCE_S)
    assert is_of(model, 1)
    assert follower.version == 1
    go_on.set()
    assert follower.wait(2, PATIENCE_S) == 2
    assert is_of(model, 2)


def test_an_update_that_breaks_off_changes_nothing_and_the_next_one_is_taken(
    following: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, source, follower = following()

    def broken() -> Iterator[Piece]:
        yield pieces_of(2)[0]
        raise ServerLostError("a server was lost", where="a:1")

    with caplog.at_level(logging.WARNING, "fleet.serving"):
        source.give(2, broken())
        source.give(3)
        follower.wait(3, PATIENCE_S)
    assert "version 1 stays, and a source is tried again: a server was lost" in caplog.text
    assert is_of(model, 3)


def test_a_backward_of_a_pinned_version_and_a_state_dict_are_of_one_version(following: Any) -> None:
    model, source, follower = following()
    with follower.pinned():
        source.give(2)
        first = model(IDS).detach()
        model.bag.weight.sum().backward()
        state = copy.deepcopy([part.state_dict() for part in (model.dense, model.plain, model.bag)])
        assert torch.equal(first, model(IDS))
    follower.wait(2, PATIENCE_S)
    assert {value for part in state for each in part.values() for value in each.flatten().tolist()} == {1.0}
    assert set(model.bag.weight.detach().flatten().tolist()) == {2.0}


# ---------------------------------------------------------------------------------------------- rows


def test_pinned_contexts_of_one_thread_may_overlap(following: Any) -> None:
    """As those of the tasks of a loop that wait in one, in whatever order they end."""
    model, source, follower = following()
    first, second = follower.pinned(), follower.pinned()
    first.__enter__()
    second.__enter__()
    source.give(2)
    until(source.coming.empty)
    first.__exit__(None, None, None)
    with torch.no_grad():
        for _ in range(20):
            assert is_of(model, 1), "the second one is not over"
            assert follower._holder._readers._inside
            assert follower.version == 1
    second.__exit__(None, None, None)
    follower.wait(2, PATIENCE_S)
    assert is_of(model, 2)


def test_a_pinned_context_may_be_ended_by_another_thread(following: Any) -> None:
    _, source, follower = following()
    pinned = follower.pinned()
    pinned.__enter__()
    thread = threading.Thread(target=pinned.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert follower._holder._readers._inside == {}
    source.give(2)
    follower.wait(2, PATIENCE_S)


def test_rows_that_are_gone_and_ids_without_a_row_read_the_mean(following: Any) -> None:
    model, source, follower = following()
    gone = {"open.weight": rows_of([], 0, (3, 5)), "plain.weight": rows_of([7], 8, (2,))}
    source.give(2, [Piece(rows=gone)])
    follower.wait(2, PATIENCE_S)
    for training in (True, False):
        model.train(training)
        assert model.open(torch.tensor([3, 5, 0, 99]))[:, 0].tolist() == [MEAN, MEAN, 1.0, 0.0]
    assert model.plain(torch.tensor([2, 7, 3]))[:, 0].tolist() == [MEAN, 8.0, 1.0]
    source.give(3, [Piece(rows={"open.weight": rows_of([3], 5)})])
    follower.wait(3, PATIENCE_S)
    assert model.open(torch.tensor([3]))[0, 0] == 5
    with pytest.raises(IdOutOfRangeError, match=f"0 <= id < {CLOSED}; got {CLOSED}"):
        model.bag(torch.tensor([[CLOSED]]))


def test_a_row_that_goes_and_comes_again_in_one_update_is_there(following: Any) -> None:
    model, source, follower = following()
    source.give(2, [Piece(rows={"open.weight": rows_of([3], 6, (3,)), "plain.weight": rows_of([3], 6, (3,))})])
    follower.wait(2, PATIENCE_S)
    assert model.open(torch.tensor([3]))[0, 0] == model.plain(torch.tensor([3]))[0, 0] == 6


def test_padding_reads_as_in_training() -> None:
    torch_s = torch.nn.Embedding(CLOSED, DIM, padding_idx=3)
    described = SourceDescription({}, {"weight": TableDescription(DIM, CLOSED, MEAN)})
    holder = FollowedModel(torch_s, None, 1 << 20)
    holder.fit(described)
    draft = holder.begin(whole=True, version=1)
    draft.add(Piece(rows={"weight": rows_of([1], 5)}))
    assert draft.publish()
    assert torch_s.weight[:, 0].tolist() == [MEAN, 5.0, MEAN, 0.0, *[MEAN] * 8]
    holder.close()


class OpenOnly(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group = fleet.nn.EmbeddingGroup({"user": (None, DIM), "item": (CLOSED, DIM)}, padding_idx=1)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.group({"user": ids, "item": ids.abs() % CLOSED})
        return found


def test_a_share_holds_its_rows_and_refuses_others() -> None:
    tables = {
        "group.user.weight": TableDescription(DIM, None, 0.0),
        "group.item.weight": TableDescription(DIM, CLOSED, 0.0),
    }
    holder = FollowedModel(OpenOnly(), lambda ids: ids % 2 == 0, 1 << 20)
    model = holder._model
    holder.fit(SourceDescription({}, tables))
    draft = holder.begin(whole=True, version=1)
    draft.add(Piece(rows={"group.user.weight": rows_of([2, 3, 4], 7), "group.item.weight": rows_of([2, 3, 4], 7)}))
    assert draft.publish()
    assert len(holder._kept["group.user.weight"]) == 2
    assert model(torch.tensor([2, 1, 6]))["user"][:, 0].tolist() == [7.0, 0.0, 0.0]  # 1 is padding
    with pytest.raises(IdOutOfRangeError, match=r"not in the share of 'group.user.weight'.*got 3"):
        model(torch.tensor([2, 3]))
    holder.close()


def test_a_share_is_refused_where_it_cannot_be_kept(following: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"rows= cannot be honoured for 'plain.weight'"):
        following(share=lambda ids: ids > 0)
    group = FollowedModel(OpenOnly(), lambda ids: ids, 1 << 20)
    tables = {
        "group.user.weight": TableDescription(DIM, None, 0.0),
        "group.item.weight": TableDescription(DIM, CLOSED, 0.0),
    }
    group.fit(SourceDescription({}, tables))
    with pytest.raises(ArgumentTypeError, match="must return for each id whether it is kept"):
        group.begin(whole=True, version=1).add(Piece(rows={"group.user.weight": rows_of([2], 7)}))


def changed_in_place(ids: torch.Tensor) -> torch.Tensor:
    kept = ids % 2 == 0
    ids.zero_()
    return kept


def raised(_: torch.Tensor) -> torch.Tensor:
    raise KeyError("of the user's own")


SHARES: dict[str, tuple[Any, type[Exception] | None]] = {
    "a list": (lambda ids: [each % 2 == 0 for each in ids.tolist()], None),
    "numpy": (lambda ids: ids.numpy() % 2 == 0, None),
    "in place": (changed_in_place, None),
    "numbers": (lambda ids: ids % 2, ArgumentTypeError),
    "one for all": (lambda ids: True, ArgumentTypeError),
    "two dimensions": (lambda ids: (ids % 2 == 0)[:, None], ArgumentTypeError),
    "too few": (lambda ids: (ids % 2 == 0)[1:], ArgumentTypeError),
    "nothing": (lambda ids: None, ArgumentTypeError),
    "ragged": (lambda ids: [[True], [True, False]], ArgumentTypeError),
    "sparse": (lambda ids: (ids % 2 == 0).to_sparse(), ArgumentTypeError),
    "meta": (lambda ids: (ids % 2 == 0).to("meta"), ArgumentTypeError),
    "an error": (raised, KeyError),
}


@pytest.mark.parametrize("name", SHARES)
def test_whatever_says_which_rows_are_kept_is_right_or_refused(name: str) -> None:
    share, refused = SHARES[name]
    ids = np.array([1, 2, 4, 7])
    if refused is not None:
        with pytest.raises(refused):
            kept_of(share, ids)
    else:
        assert kept_of(share, ids).tolist() == [False, True, True, False]
    assert ids.tolist() == [1, 2, 4, 7], "they are the follower's own"


def test_an_error_of_a_share_is_logged_once_and_tried_again(saved: Any, root: Path, caplog: Any) -> None:
    calls = []

    def share(ids: torch.Tensor) -> torch.Tensor:
        calls.append(ids)
        if 1 < len(calls) < 5:
            raise KeyError("of the user's own")
        return ids >= 0

    described = SourceDescription({}, {"group.user.weight": TableDescription(DIM, None, 0.0)})
    model = torch.nn.Module()
    model.group = torch.nn.Module()
    model.group.user = fleet.nn.Embedding(None, DIM)
    source = FakeSource(described)
    source.coming.get()
    source.give(1, [Piece(rows={"group.user.weight": rows_of([2], 1)})], whole=True)
    follower = Follower(FollowedModel(model, share, 1 << 20), source, "a source")
    with contextlib.closing(follower), caplog.at_level(logging.WARNING, "fleet.serving"):
        follower.begin(PATIENCE_S)
        for _ in range(4):  # as a source does that has the same again
            source.give(2, [Piece(rows={"group.user.weight": rows_of([2], 2)})])
        follower.wait(2, PATIENCE_S)
    assert caplog.text.count("tried again") == 1
    assert "of the user's own" in caplog.text


# ---------------------------------------------------------------------------------------------- how a model is used


def test_an_error_in_a_forward_lets_the_next_version_come(following: Any) -> None:
    model, source, follower = following()

    def fail() -> None:
        raise ValueError("of the user")

    model.between = fail
    with pytest.raises(ValueError, match="of the user"):
        model(IDS)
    model.between = lambda: None
    source.give(2)
    follower.wait(2, PATIENCE_S)
    assert is_of(model, 2)


def test_ctrl_c_in_a_forward_lets_the_next_version_come(following: Any) -> None:
    model, source, follower = following()
    model.between = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    model.between = lambda: None
    source.give(2)
    follower.wait(2, PATIENCE_S)
    source.give(3)
    assert is_of(model, 2) or is_of(model, 3)
    follower.wait(3, PATIENCE_S)
    assert is_of(model, 3)


def test_a_forward_may_wait_for_one_in_another_thread(following: Any) -> None:
    model, source, follower = following()
    found: list[torch.Tensor] = []

    def elsewhere() -> None:
        source.give(2)
        until(source.coming.empty)
        thread = threading.Thread(target=lambda: found.append(model.open(IDS)))
        thread.start()
        thread.join()

    model.between = elsewhere
    assert set(model(IDS).tolist()) == set(found[0].flatten().tolist()) == {1.0}
    follower.wait(2, PATIENCE_S)


@pytest.mark.slow
def test_a_compiled_model_reads_one_version(following: Any) -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    _, source, follower = following(compiled)
    assert is_of(compiled, 1)
    held: list[int] = []
    model.between = torch.compiler.disable(lambda: held.append(len(follower._holder._readers._inside)))
    for version in range(2, 5):
        source.give(version)
        follower.wait(version, PATIENCE_S)
        assert is_of(compiled, version)
    assert set(held) == {1}
    assert follower._holder._readers._inside == {}


@pytest.mark.slow
def test_a_model_that_is_compiled_after_it_follows_reads_one_version(following: Any) -> None:
    model, source, follower = following()
    compiled = torch.compile(model, backend="eager")
    held: list[int] = []
    model.between = torch.compiler.disable(lambda: held.append(len(follower._holder._readers._inside)))
    for version in range(2, 5):
        source.give(version)
        follower.wait(version, PATIENCE_S)
        assert is_of(compiled, version)
    assert set(held) == {1}
    assert follower._holder._readers._inside == {}


def test_a_copy_of_a_model_stays_as_it_is(following: Any) -> None:
    model, source, follower = following()
    del model.open, model.between  # rows of any id are no tensor to copy
    model.forward = model.plain.forward
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model.plain))
    source.give(2)
    follower.wait(2, PATIENCE_S)
    for each in (copied.plain, copied.bag, pickled):
        assert set(each.weight.detach().flatten().tolist()) == {1.0}
        each(torch.tensor([[3]]))
    assert set(model.bag.weight.detach().flatten().tolist()) == {2.0}


def replaced_by_a_state(model: Any) -> None:
    model.load_state_dict(
        {name: value.clone() for name, value in model.dense.state_dict(prefix="dense.").items()},
        strict=False,
        assign=True,
    )


def replaced_table(model: Any) -> None:
    model.open = fleet.nn.Embedding(None, DIM)


def replaced_plain(model: Any) -> None:
    model.plain = torch.nn.Embedding(CLOSED, DIM)


def reshaped(model: Any) -> None:
    model.dense.weight.data = torch.zeros(2, DIM)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (replaced_by_a_state, "'dense.weight' of the model is not what was followed.*got another in its place"),
        (replaced_table, "'open.weight' of the model is not what was followed.*got another in its place"),
        (replaced_plain, "'plain.weight' of the model is not what was followed.*got another in its place"),
        (lambda model: model.dense.half(), "'dense.weight' .*expected the same parameter, of float32; got float16"),
        (lambda model: model.plain.double(), "'plain.weight' .*expected the same parameter, of float32; got float64"),
        (lambda model: weight_norm(model.dense), "'dense.weight' .*got a model without it"),
        (lambda model: delattr(model, "plain"), "'plain.weight' .*got a model without it"),
        (reshaped, r"'dense.weight' .*got one of \(2, 4\) on cpu, not of \(1, 4\)"),
    ],
    ids=["a state", "a table", "a module", "half", "double", "computed", "taken out", "reshaped"],
)
def test_a_model_with_other_parameters_is_followed_no_more(following: Any, change: Any, told: str) -> None:
    """It would be a mixture of what it was and what comes."""
    model, source, follower = following()
    change(model)
    source.give(2)
    with pytest.raises(StateError, match=told):
        follower.wait(2, PATIENCE_S)
    assert follower.version == 1


def test_a_parameter_with_another_name_is_followed_on(following: Any) -> None:
    model, source, follower = following()
    register_parametrization(model.dense, "weight", torch.nn.Identity())
    assert "dense.weight" not in dict(model.named_parameters())
    source.give(2)
    follower.wait(2, PATIENCE_S)
    assert is_of(model, 2)


def test_others_in_the_places_of_parameters_for_a_while_are_none_of_our_affair(following: Any) -> None:
    model, source, follower = following()
    swapped, checked = threading.Event(), threading.Event()

    def wait_inside() -> None:
        swapped.set()
        assert checked.wait(PATIENCE_S)

    model.between = wait_inside
    others = {"dense.weight": torch.full((1, DIM), 8.0), "dense.bias": torch.full((1,), 8.0)}

    def call() -> None:
        with follower.pinned(), torch.no_grad():
            torch.func.functional_call(model, others, (IDS,))

    thread = threading.Thread(target=call)
    thread.start()
    assert swapped.wait(PATIENCE_S)
    source.give(2)
    until(lambda: follower._holder._readers._is_shut)
    checked.set()
    thread.join()
    model.between = lambda: None
    assert follower.wait(2, PATIENCE_S) == 2
    assert is_of(model, 2)


def test_a_version_that_is_put_in_place_in_part_is_read_by_nobody(
    following: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its source begins with what there was before, as if it had not been given."""
    model, source, follower = following()
    holder, taken = follower._holder, []
    put = holder._put

    def fails(draft: Any) -> None:
        holder._dense["dense.bias"].fill_(2.0)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(holder, "_put", fails)
    source.coming.put(Update(2, False, iter(pieces_of(2)), lambda: taken.append(2)))
    until(lambda: follower._trouble is not None)
    for read in (lambda: model(IDS), lambda: model.open(IDS), lambda: model.plain(IDS.abs() % CLOSED)):
        with pytest.raises(StateError, match="a version could be put in place in part only"):
            read()
    assert (follower.version, taken) == (1, [])
    monkeypatch.setattr(holder, "_put", put)
    source.coming.put(Update(3, False, iter(pieces_of(3)), lambda: taken.append(3)))
    follower.wait(3, PATIENCE_S)
    assert taken == [3]
    assert is_of(model, 3)


def test_a_model_that_was_left_in_part_says_so_when_it_is_closed(following: Any) -> None:
    model, source, follower = following()
    follower._holder._plain["plain.weight"].change = None  # so that it fails after dense parameters were written
    source.give(2)
    until(lambda: follower._trouble is not None)
    follower.close()
    with pytest.raises(StateError, match="a version could be put in place in part only"):
        model(IDS)
    following(model)
    assert is_of(model, 1)


def test_another_device_of_the_caller_s_is_not_the_follower_s(saved: Any, root: Path) -> None:
    put(saved, root, 1)
    model = Small()
    with torch.device("meta"), follow(model, root, poll_s=0.02) as follower:  # it stands for that of a GPU
        put(saved, root, 2)
        follower.wait(2, PATIENCE_S)
        assert model.open(ALL).device.type == "cpu"
    assert torch.equal(shows(model), saved[1][2])


class WithScripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.jit.script(self.dense)


def test_a_scripted_model_is_refused_and_a_part_of_one_may_be(following: Any) -> None:
    with pytest.raises(UnsupportedError, match="a scripted model does not tell when its forwards begin and end"):
        following(torch.jit.script(torch.nn.Sequential()))
    model, source, follower = following(WithScripted())
    source.give(2)
    follower.wait(2, PATIENCE_S)
    assert is_of(model, 2)


def test_a_model_made_in_inference_mode_can_follow(following: Any) -> None:
    with torch.inference_mode():
        model = torch.nn.Module()
        model.dense = torch.nn.Linear(DIM, 1)
    described = SourceDescription(DESCRIBED.dense, {})
    holder = FollowedModel(model, None, 1 << 20)
    holder.fit(described)
    draft = holder.begin(whole=True, version=1)
    for piece in pieces_of(4):
        draft.add(Piece(piece.dense))
    assert draft.publish()
    assert set(model.dense.weight.flatten().tolist()) == {4.0}
    holder.close()


def test_a_model_that_was_closed_serves_on_and_can_follow_anew(following: Any) -> None:
    model, _, follower = following()
    with pytest.raises(StateError, match="followed already"):
        following(model)
    follower.close()
    follower.close()
    assert is_of(model, 1)
    assert not model._forward_pre_hooks
    with pytest.raises(StateError, match="the follower was closed, and no later version comes"):
        follower.wait(2, PATIENCE_S)
    _, source, again = following(model)
    source.give(2)
    again.wait(2, PATIENCE_S)
    assert is_of(model, 2)


def test_a_child_is_told(following: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, source, follower = following()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for _ in range(2):
                assert is_of(model, 1)
                assert caplog.text.count("in a fork of the process that follows its source: it stays at") == 1
            try:
                follower.wait(2, 1)
            except StateError as error:
                status = 0 if "not in its children" in str(error) else 2
            follower.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    source.give(2)
    follower.wait(2, PATIENCE_S)
    assert is_of(model, 2)
    assert "fork" not in caplog.text


# ---------------------------------------------------------------------------------------------- what does not fit


MISFITS: dict[str, tuple[Callable[[Net], object], str]] = {
    "a shape": (
        lambda net: setattr(net, "dense", torch.nn.Linear(DIM + 1, 1)),
        r"'dense.weight': float32 \(1, 4\) in the source, float32 \(1, 5\) in the model",
    ),
    "a type": (lambda net: net.dense.double(), r"'dense.bias': float32 \(1,\) in the source, float64 \(1,\)"),
    "a dim": (
        lambda net: setattr(net, "open", fleet.nn.Embedding(None, 5)),
        r"'open.weight': table of float32 x 4 for any id in the source, table of float32 x 5 for any id in the model",
    ),
    "a size": (
        lambda net: setattr(net, "plain", torch.nn.Embedding(7, DIM)),
        r"'plain.weight': table of float32 x 4 for 12 ids in the source, table of float32 x 4 for 7 ids in the model",
    ),
    "more": (
        lambda net: setattr(net, "more", torch.nn.Linear(1, 1)),
        r"'more.bias': absent in the source, float32 \(1,\) in the model; 'more.weight': absent",
    ),
    "less": (lambda net: delattr(net, "bag"), r"'bag.weight': table of .* in the source, absent in the model"),
    "no memory": (lambda net: net.dense.to("meta"), r"'dense.bias': on the meta device"),
    "tied": (
        lambda net: setattr(net, "bag", net.plain),
        r"'plain.weight': a parameter of its own in the source, the same as 'bag.weight' in the model",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_model_that_does_not_fit_is_refused_by_name(following: Any, name: str) -> None:
    model = Net()
    alter, told = MISFITS[name]
    alter(model)
    before = model.plain.weight.clone()
    with pytest.raises(PlanMismatchError, match=told):
        following(model)
    assert torch.equal(before, model.plain.weight)
    assert not model._forward_pre_hooks


def test_what_the_job_lacks_and_nobody_trains_stays_the_model_s_own(following: Any, caplog: Any) -> None:
    model = Net()
    model.register_buffer("buffer", torch.ones(2))
    model.frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    model.tied = model.dense
    with caplog.at_level(logging.INFO, "fleet.serving"):
        following(model)
    assert "stay the model's own: frozen.bias, frozen.weight" in caplog.text
    assert model.buffer.tolist() == [1, 1]
    assert is_of(model, 1)


def test_what_is_no_argument_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[FleetError], str]] = [
        ((3, tmp_path), {}, ArgumentTypeError, "model must be a torch.nn.Module"),
        ((model, 7), {}, ArgumentTypeError, "source must be a list of endpoints"),
        ((model, []), {}, ConfigurationError, "source must not be empty"),
        ((model, ["nowhere"]), {}, ConfigurationError, "malformed endpoint"),
        ((model, "a:1,b:2"), {}, ConfigurationError, r"which go into a list; expected \['a:1', 'b:2'\]"),
        ((model, tmp_path), {"poll_s": 0}, ConfigurationError, "poll_s is out of range"),
        ((model, tmp_path), {"poll_s": 1e10}, ConfigurationError, "poll_s is out of range"),
        ((model, tmp_path), {"at": -1}, ConfigurationError, "at is out of range"),
        ((model, tmp_path), {"at": "3"}, ArgumentTypeError, "at must be an int"),
        ((model, tmp_path), {"rows": 3}, ArgumentTypeError, "rows must be a function of ids"),
    ]
    for given, options, kind, told in wrong:
        with pytest.raises(kind, match=told):
            follow(*given, **options)


# ---------------------------------------------------------------------------------------------- version, age, end


def test_wait_raises_what_lasts_and_the_last_version_stays(following: Any) -> None:
    model, source, follower = following()
    source.coming.put(PlanMismatchError("another model"))
    with pytest.raises(PlanMismatchError, match="another model"):
        follower.wait(2, PATIENCE_S)
    assert is_of(model, 1)
    assert follower.wait(1, 0) == 1


def test_wait_ends_when_the_job_does(following: Any) -> None:
    model, source, follower = following()
    threading.Timer(0.05, lambda: setattr(source, "ended", True)).start()
    with pytest.raises(StateError, match="the job is over, and no later version comes"):
        follower.wait(2, PATIENCE_S)
    assert is_of(model, 1)


def test_an_age_grows_until_the_source_is_heard(following: Any) -> None:
    class Clock(SystemClock):
        at = 100.0

        def now(self) -> float:
            return self.at

    clock = Clock()
    _, source, follower = following(clock=clock)
    source.heard_at = 100.0
    assert follower.age_s == 0
    clock.at = 107.0
    assert follower.age_s == 7
    source.heard_at = 106.5
    assert follower.age_s == 0.5


def test_a_version_that_a_source_has_not_is_refused(following: Any) -> None:
    with pytest.raises(CheckpointError, match=r"this version cannot be had.*expected version 7; got version 1"):
        following(at=7)
    _, source, follower = following(at=1)
    assert source.closed.is_set()
    with pytest.raises(StateError, match="pinned to version 1"):
        follower.wait(2, PATIENCE_S)


def test_threads_may_fork_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes to it while another lets go of what it held has to wait, and lets go of its own."""
    kept = [Readers(), Readers()]
    let_go = Readers.after_fork

    def slowly(of: Readers) -> None:
        let_go(of)
        time.sleep(0.05)

    monkeypatch.setattr(Readers, "after_fork", slowly)
    failures: list[BaseException] = []

    def fork() -> None:
        try:
            readers._before_fork()
            readers._after_fork(in_child=False)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fork) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)
    assert all(each._condition.acquire(blocking=False) for each in kept)


def test_readers_forget_threads_that_are_gone() -> None:
    readers = Readers()
    thread = threading.Thread(target=lambda: readers.enter(readers))
    thread.start()
    thread.join()
    with readers.alone() as may:
        assert may
    with readers.reading(), readers.reading():
        threading.Timer(0.05, readers.close).start()

        def change(found: list[bool]) -> None:
            with readers.alone() as may:
                found.append(may)

        found: list[bool] = []
        thread = threading.Thread(target=change, args=(found,))
        thread.start()
        thread.join()
        assert found == [False]


# ---------------------------------------------------------------------------------------------- checkpoints


class Small(torch.nn.Module):
    """What a job trains, and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(DIM, 3)
        self.open = fleet.nn.Embedding(None, DIM, initializer="uniform(0, 1)", evict=fleet.nn.Unused(steps=2))
        self.closed = torch.nn.Embedding(30, DIM, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(self.open(ids) + self.closed(ids % 30))
        return out


ALL = torch.arange(200)


class Trainer:
    """Trains in a running job, and saves; what evaluation gave at each step is kept."""

    def __init__(self, job: Fleet, root: str, *, strategy: Any = None, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Small()
        optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.optimizer = job.distributed_optimizer(optimizer, strategy, model=self.model)
        job.init_worker()
        self.checkpoints = Checkpoints(root, every_steps=1, background=False, fleet=job, **options)
        self.taken = 0
        self.outputs: dict[int, torch.Tensor] = {}

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            ids = torch.arange(self.taken * 10, self.taken * 10 + 20)
            self.optimizer.minimize(self.model(ids).square().mean())
            self.taken += 1
            self.checkpoints.after_step()
            self.outputs[self.taken] = self.evaluated()

    def evaluated(self) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            found: torch.Tensor = self.model(ALL)
        self.model.train()
        return found


def shows(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ALL)
    return found


#: Rows leave after every second step.
EVICTING = {**PATIENT, "FLEET_EVICT_EVERY": "2"}


def with_trainer(root: str, body: Callable[[Trainer], None], servers: int = 2, **options: Any) -> None:
    def run(job: Fleet, worker: int) -> None:
        trainer = Trainer(job, root, **options)
        body(trainer)
        trainer.checkpoints.close()

    run_job(run, 1, servers, environ=EVICTING)


@pytest.mark.parametrize(("servers", "dense"), [(1, "servers"), (3, "servers"), (2, "all_reduce")])
@pytest.mark.pairs(1)
def test_a_model_follows_checkpoints_and_their_deltas(tmp_path: Path, servers: int, dense: str) -> None:
    root = str(tmp_path / "run")

    def body(trainer: Trainer) -> None:
        trainer.step()
        model = Small()
        with follow(model, root, poll_s=0.02) as follower:
            assert follower.version == 1
            for _ in range(7):  # full at 1, 5 and 9
                trainer.step()
                assert follower.wait(trainer.taken, PATIENCE_S) == trainer.taken
                assert torch.equal(shows(model), trainer.outputs[trainer.taken])
                assert follower.age_s < PATIENCE_S
            trainer.step(3)
            follower.wait(11, PATIENCE_S)
            assert torch.equal(shows(model), trainer.outputs[11])
        trainer.step()
        assert torch.equal(shows(model), trainer.outputs[11])

    strategy = StrategyFactory.create_sync_strategy(dense=dense)
    with_trainer(root, body, servers, full_every=4, strategy=strategy)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[int, torch.Tensor]]:
    """A directory of six checkpoints, full ones of steps 1 and 4, and what each shows."""
    root = tmp_path_factory.mktemp("saved") / "run"
    outputs: dict[int, torch.Tensor] = {}

    def body(trainer: Trainer) -> None:
        trainer.step(6)
        outputs.update(trainer.outputs)

    with_trainer(str(root), body, full_every=3)
    return root, outputs


@pytest.fixture
def root(saved: tuple[Path, Mapping[int, torch.Tensor]], tmp_path: Path) -> Path:
    """An empty directory, where ``put`` puts the checkpoints of ``saved``."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def put(saved: tuple[Path, Any], root: Path, *steps: int) -> None:
    """Put checkpoints there, each at one moment."""
    for step in steps:
        draft = root / f".{step}"
        shutil.copytree(saved[0] / name_of(step), draft)
        draft.rename(root / name_of(step))


def damage(root: Path, step: int) -> None:
    path = max((root / name_of(step)).rglob("*.safetensors"), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_follower_catches_up_from_what_it_has(saved: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleet.checkpoint import inspection

    read: list[str] = []
    checked = inspection.checked
    monkeypatch.setattr(
        inspection, "checked", lambda place, piece, of: (read.append(of.where), checked(place, piece, of))[1]
    )
    model = Small()
    put(saved, root, 1)
    with follow(model, root, poll_s=0.02) as follower:
        read.clear()
        put(saved, root, 2)
        follower.wait(2, PATIENCE_S)
        assert {Path(each).name for each in read} == {name_of(2)}
        put(saved, root, 4, 5, 6)  # an outage: none of them goes on from 2
        follower.wait(6, PATIENCE_S)
        assert torch.equal(shows(model), saved[1][6])


def test_checkpoints_that_were_read_and_not_taken_are_given_again(saved: Any, root: Path) -> None:
    put(saved, root, 1)
    source = checkpoint_source.CheckpointSource(str(root), poll_s=0.01)
    source.describe()

    def given() -> Update:
        update = source.next(PATIENCE_S)
        assert update is not None
        list(update.pieces)
        return update

    given()
    first = given()
    first.taken()
    put(saved, root, 2)
    second = given()
    put(saved, root, 3)
    third = given()
    assert [(each.version, each.whole) for each in (first, second, third)] == [(1, True), (2, False), (3, False)]
    assert source._taken is not None
    assert source._taken.manifest.version == 1
    third.taken()
    assert source.next(0.05) is None


def test_a_damaged_checkpoint_is_named_and_a_later_one_is_taken(
    saved: Any, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Small()
    put(saved, root, 1)
    with follow(model, root, poll_s=0.02) as follower, caplog.at_level(logging.WARNING, "fleet.serving"):
        put(saved, root.parent, 2)
        damage(root.parent, 2)
        (root.parent / name_of(2)).rename(root / name_of(2))
        until(lambda: "a piece of the checkpoint is damaged" in caplog.text)
        assert name_of(2) in caplog.text
        assert torch.equal(shows(model), saved[1][1])
        with pytest.raises(DeadlineError, match="got version 1"):
            follower.wait(2, 0)
        put(saved, root, 4)
        follower.wait(4, PATIENCE_S)
        assert torch.equal(shows(model), saved[1][4])


def test_what_goes_on_from_a_damaged_one_is_left_alone_with_it(
    saved: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long an attempt takes: else each of its deltas would be tried again before an older one."""
    from fleet.checkpoint import inspection

    put(saved, root, 1, 2, 3, 4, 5, 6)
    damage(root, 4)
    tried: list[str] = []
    checked = inspection.checked

    def slowly(place: Any, piece: Any, of: Any) -> Any:
        tried.append(Path(of.where).name)
        if Path(of.where).name == name_of(4):
            time.sleep(0.6)
        return checked(place, piece, of)

    monkeypatch.setattr(inspection, "checked", slowly)
    monkeypatch.setattr(checkpoint_source, "_FIRST_PAUSE_S", 1.2)
    model = Small()
    with follow(model, root, poll_s=0.02) as follower:
        assert follower.version == 3
        assert torch.equal(shows(model), saved[1][3])
    assert {name_of(5), name_of(6)} - {*tried}, "one of them was tried for all that need it"


def test_a_checkpoint_that_is_finished_while_it_is_looked_at_is_taken(
    saved: Any, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(saved, root, 1)
    shutil.copytree(saved[0] / name_of(2), root / name_of(2))
    manifest, is_file = root / name_of(2) / MANIFEST, Directory.is_file
    manifest.rename(root / "apart")

    def finishing(place: Directory) -> bool:
        if place.path == manifest.parent and (root / "apart").exists():
            (root / "apart").rename(manifest)
        return is_file(place)

    with follow(Small(), root, poll_s=0.02) as follower:
        monkeypatch.setattr(Directory, "is_file", finishing)
        assert follower.wait(2, PATIENCE_S) == 2
    assert "passing by" not in caplog.text


def test_an_age_grows_where_all_checkpoints_are_gone(saved: Any, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(saved, root, 1)
    with follow(Small(), root, poll_s=0.02) as follower:
        until(lambda: follower.age_s < 0.1)
        shutil.rmtree(root)
        until(lambda: follower.age_s > 0.5)
        assert follower.version == 1
        assert caplog.text.count("has no checkpoints any more; version 1 stays") == 1
        root.mkdir()
        put(saved, root, 4)
        follower.wait(4, PATIENCE_S)


def test_a_follower_begins_with_the_newest_that_is_whole(saved: Any, root: Path) -> None:
    put(saved, root, 4, 5, 6)
    damage(root, 6)
    (root / name_of(7)).mkdir()  # one that is being written
    model = Small()
    with follow(model, root) as follower:
        assert follower.version == 5
        assert torch.equal(shows(model), saved[1][5])


def test_checkpoints_that_are_removed_while_they_are_read_are_passed_by(
    saved: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleet.checkpoint import inspection

    model = Small()
    put(saved, root, 1)
    with follow(model, root, poll_s=0.02) as follower:
        checked = inspection.checked

        def after_removal(place: Any, piece: Any, of: Any) -> Any:
            if Path(of.where).name == name_of(2):
                put(saved, root, 4)
                shutil.rmtree(root / name_of(2))
            return checked(place, piece, of)

        monkeypatch.setattr(inspection, "checked", after_removal)
        put(saved, root, 2)
        assert follower.wait(4, PATIENCE_S) == 4
        assert torch.equal(shows(model), saved[1][4])


def test_a_directory_that_begins_anew_is_followed_back(saved: Any, root: Path) -> None:
    model = Small()
    put(saved, root, 4)
    with follow(model, root, poll_s=0.02) as follower:
        put(saved, root, 1)
        shutil.rmtree(root / name_of(4))
        until(lambda: follower.version == 1)
        assert torch.equal(shows(model), saved[1][1])


def test_a_version_can_be_gone_back_to(saved: Any, root: Path) -> None:
    put(saved, root, 1, 2, 3, 4)
    model = Small()
    with follow(model, root, at=3) as follower:
        assert follower.version == 3
        put(saved, root, 5)
        assert torch.equal(shows(model), saved[1][3])
        with pytest.raises(StateError, match="pinned to version 3"):
            follower.wait(5, PATIENCE_S)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of version 9; .* one of 5, 4, 3, 2, 1"):
        follow(model, root, at=9)


@pytest.mark.parametrize("step", [2, 1], ids=["itself", "what it goes on from"])
def test_a_version_that_cannot_be_gone_back_to_is_read_once_and_named(
    saved: Any, root: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    from fleet.checkpoint import inspection

    read: list[str] = []
    checked = inspection.checked
    monkeypatch.setattr(
        inspection,
        "checked",
        lambda place, piece, of: (read.append(f"{of.where}/{piece.file}"), checked(place, piece, of))[1],
    )
    put(saved, root, 1, 2, 4)
    damage(root, step)
    with pytest.raises(CheckpointError, match=f"a piece of the checkpoint is damaged.*{name_of(step)}"):
        follow(Small(), root, poll_s=0.02, at=2)
    assert sorted(read) == sorted({*read})


def test_a_look_at_a_directory_in_which_nothing_is_new_is_one_request(
    saved: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(saved, root, 1, 2)
    source = checkpoint_source.CheckpointSource(str(root), poll_s=1e-6)
    source.describe()
    update = source.next(PATIENCE_S)
    assert update is not None
    update.taken()
    looks: list[str] = []
    for name in ("names", "has", "is_file", "exists", "read", "size", "sizes"):
        asks = getattr(Directory, name)
        monkeypatch.setattr(
            Directory, name, lambda *given, a=asks, n=name, **more: (looks.append(n), a(*given, **more))[1]
        )
    assert source.next(0) is None
    assert looks == ["names"]


def test_a_follower_waits_for_the_first_checkpoint(saved: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = threading.Timer(0.1, put, args=(saved, root, 1))
    thread.start()
    follow(Small(), root, poll_s=0.02).close()
    thread.join()
    monkeypatch.setenv("FLEET_STARTUP_DEADLINE_S", "0.1")
    with pytest.raises(DeadlineError, match="no complete checkpoint to follow"):
        follow(Small(), root / "nowhere", poll_s=0.02)
    with pytest.raises(CheckpointError, match="this is no directory of checkpoints"):
        follow(Small(), root / name_of(1))


def test_checkpoints_of_another_model_end_the_following(
    saved: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_source, "_LOOK_AGAIN_S", 0.0)

    def body(job: Fleet, worker: int) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = job.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        optimizer.minimize(model(torch.ones(2)).sum())
        job.save_persistables(root.parent / "other")

    run_job(body)
    put(saved, root, 1)
    model = Small()
    with follow(model, root, poll_s=0.02) as follower:
        shutil.rmtree(root / name_of(1))
        (root.parent / "other").rename(root / name_of(1))
        with pytest.raises(PlanMismatchError, match="one of another model than those before it"):
            follower.wait(2, PATIENCE_S)
        assert torch.equal(shows(model), saved[1][1])


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.slow)])
def test_checkpoints_in_a_store_are_followed(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    store = f"memory://{tmp_path.name}" if kind == "memory" else f"{request.getfixturevalue('s3')}/{tmp_path.name}"

    def body(trainer: Trainer) -> None:
        trainer.step()
        model = Small()
        with follow(model, store, poll_s=0.05) as follower:
            trainer.step(2)
            follower.wait(3, PATIENCE_S)
            assert torch.equal(shows(model), trainer.outputs[3])

    with_trainer(store, body, full_every=3)


def test_a_collective_job_is_followed_with_its_buffers(tmp_path: Path) -> None:
    def net() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    from fleet.role_maker import UserDefinedCollectiveRoleMaker

    job = Fleet(environ=PATIENT)
    job.init(UserDefinedCollectiveRoleMaker(0, ["127.0.0.1:6174"]))
    trained = net()
    optimizer = job.distributed_optimizer(
        torch.optim.SGD(trained.parameters(), lr=0.1), DistributedStrategy(), model=trained
    )
    job.init_worker()
    optimizer.minimize(trained(torch.randn(4, 2)).sum())
    job.save_persistables(tmp_path / name_of(1))
    job.stop_worker()
    model = net()
    with follow(model, tmp_path) as follower:
        assert follower.version == 1
        for name, value in trained.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("kind", ["dense", "fleet.nn", "torch.nn"])
@pytest.mark.parametrize("role_maker", [None, UserDefinedCollectiveRoleMaker(0, ["127.0.0.1:1"])], ids=["ps", "nccl2"])
def test_what_is_followed_is_not_trained(kind: str, role_maker: Any, tmp_path: Path) -> None:
    """Each would write over what the other has made of it."""

    def build() -> torch.nn.Module:
        tables = {"fleet.nn": fleet.nn.Embedding(None, 2), "torch.nn": torch.nn.Embedding(4, 2, sparse=True)}
        first = tables.get(kind, torch.nn.Linear(3, 2))
        return torch.nn.Sequential(first, torch.nn.Linear(2, 1))

    def join(job: Fleet, model: torch.nn.Module, role_maker: Any = None) -> None:
        job.init(role_maker)
        optimizer = job.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        held.append(optimizer)

    held: list[Any] = []
    job, trained = Fleet(environ={}), build()
    join(job, trained)
    job.init_worker()
    job.save_persistables(tmp_path / name_of(0))
    with pytest.raises(StateError, match="the model belongs to a running job"):
        follow(trained, tmp_path)
    job.stop_worker()
    model = build()
    with contextlib.closing(follow(model, tmp_path)), pytest.raises(StateError, match="the model is followed"):
        join(Fleet(environ={}), model, role_maker)
    assert model[0].weight.shape[0] or kind == "fleet.nn", "nothing has been done to it"
    if kind == "dense" or (kind == "torch.nn" and role_maker is None):  # rows of fleet.nn the follower has alone
        follow(began := build(), tmp_path, at=0)
        values = began[1].weight.detach().clone()
        join(Fleet(environ={}), began, role_maker)
        assert torch.equal(began[1].weight, values), "it goes on from what it was given"
    if role_maker is None and kind != "torch.nn":
        join(Fleet(environ={}), model)


def test_rows_are_of_one_running_job() -> None:
    """A second one would take over the look-ups and the gradients of the first."""
    model = fleet.nn.Embedding(None, 2)

    def trained(job: Fleet) -> Any:
        job.init()
        optimizer = job.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        optimizer.minimize(model(IDS).sum())
        return optimizer

    first, second = Fleet(environ={}), Fleet(environ={})
    optimizer = trained(first)
    with pytest.raises(StateError, match="the rows of 'weight' are on the servers of another job, which runs in this"):
        trained(second)
    optimizer.minimize(model(IDS).sum())
    first.stop_worker()
    trained(second)
    second.stop_worker()
