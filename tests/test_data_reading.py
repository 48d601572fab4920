"""What every format shares: batches and samples, who reads what, in which order, and going on from anywhere."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fleet
from fleet.data import Floats, Ids, MultiSlot, Ragged, dataset, order, text
from fleet.data.text import Piece, lines_of, ranges
from fleet.errors import ArgumentTypeError, ConfigurationError, StateError
from fleet.role_maker import Role, UserDefinedRoleMaker

COLUMNS = {"number": Ids(1), "half": Floats(1), "many": Ids()}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Samples numbered through, in files of different sizes that are cut into many pieces."""
    monkeypatch.setattr(text, "PIECE", 300)
    monkeypatch.setattr(text, "CHUNK", 100)
    numbers = itertools.count()
    made = []
    for index, size in enumerate([60, 0, 1, 25, 40]):
        path = tmp_path / f"part-{index}"
        path.write_text("".join(line(next(numbers)) for _ in range(size)))
        made.append(str(path))
    return made


def line(number: int) -> str:
    many = " ".join(str(number) for _ in range(number % 5 + 1))
    return f"1 {number} 1 {number / 2} {number % 5 + 1} {many}\n"


TOTAL = 126


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["number"].flatten().tolist()]


def same(one: Any, other: Any) -> bool:
    return plain(one) == plain(other)


def plain(value: Any) -> Any:
    """As what Python has, which can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value]


# ---------------------------------------------------------------------------------------------- batches and samples


def test_batches_are_whole_but_for_the_last(files: list[str]) -> None:
    batches = list(MultiSlot(files, COLUMNS, batch_size=16))
    assert [len(batch["number"]) for batch in batches] == [16] * 7 + [14]
    assert numbers(batches) == list(range(TOTAL))
    assert [len(batch["number"]) for batch in MultiSlot(files, COLUMNS, batch_size=16, drop_last=True)] == [16] * 7
    for batch in batches:
        own = batch["number"].flatten().tolist()
        assert torch.equal(batch["half"], batch["number"] / 2)
        assert batch["many"].values.tolist() == [number for number in own for _ in range(number % 5 + 1)]
        assert batch["many"].offsets.tolist() == [0, *itertools.accumulate(n % 5 + 1 for n in own[:-1])]


def test_samples_collated_are_the_batches(files: list[str]) -> None:
    plain = MultiSlot(files, COLUMNS)
    assert isinstance(plain, IterableDataset)
    sample = next(iter(plain))
    assert {name: value.dim() for name, value in sample.items()} == {"number": 1, "half": 1, "many": 1}
    by_samples = DataLoader(plain, batch_size=16, collate_fn=plain.collate)
    by_batches = DataLoader(MultiSlot(files, COLUMNS, batch_size=16), batch_size=None)
    assert same(list(by_samples), list(by_batches))


def test_no_files_are_no_samples() -> None:
    assert list(MultiSlot([], COLUMNS, batch_size=4)) == []


def test_workers_of_a_job_read_all_files_once(files: list[str]) -> None:
    found = []
    for worker in range(3):
        process = fleet.Fleet(environ={})
        process.init(UserDefinedRoleMaker(worker, Role.WORKER, 3, ["127.0.0.1:6001"]))
        found.append(numbers(MultiSlot(process.split_files(files), COLUMNS, batch_size=7)))
    assert [len(each) for each in found] == [60, 26, 40]
    assert sorted(itertools.chain(*found)) == list(range(TOTAL))


# ---------------------------------------------------------------------------------------------- pieces of files


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 30), max_size=20),
    st.integers(1, 50),
    st.integers(1, 20),
    st.booleans(),
)
def test_every_line_is_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], piece: int, chunk: int, ends: bool
) -> None:
    monkeypatch.setattr(text, "PIECE", piece)
    monkeypatch.setattr(text, "CHUNK", chunk)
    content = b"\n".join(b"%d" % index + b"x" * size for index, size in enumerate(sizes)) + b"\n" * ends
    (tmp_path / "file").write_bytes(content)
    pieces = ranges(str(tmp_path / "file"))
    found = b"".join(lines.text for each in pieces for lines in lines_of(each, None))  # type: ignore[arg-type]
    assert found == (content if ends or not content else content + b"\n")
    assert [each.begin for each in pieces] == list(range(0, len(content), piece))


def test_a_file_at_a_url_is_read_like_one_here(files: list[str]) -> None:
    import fsspec

    urls = [f"memory://fleet-data/{Path(file).name}" for file in files]
    memory = fsspec.filesystem("memory")
    for url, file in zip(urls, files, strict=True):
        memory.pipe_file(url, Path(file).read_bytes())
    try:
        here, there = (MultiSlot(each, COLUMNS, batch_size=10, shuffle_mb=0.001) for each in (files, urls))
        assert same(list(here), list(there))
    finally:
        memory.rm("memory://fleet-data", recursive=True)


# ---------------------------------------------------------------------------------------------- the order


def test_an_order_is_fixed_for_ever() -> None:
    assert order.shuffled(8, 0, 0).tolist() == [2, 1, 7, 4, 6, 3, 5, 0]
    assert order.shuffled(8, 1, 0).tolist() != order.shuffled(8, 0, 1).tolist()


def test_shuffling_loses_nothing_and_differs_by_epoch_and_seed(files: list[str]) -> None:
    orders = []
    for seed, epoch in itertools.product([0, 7], [0, 1]):
        shuffled = MultiSlot(files, COLUMNS, batch_size=10, shuffle_mb=0.002, seed=seed)
        shuffled.set_epoch(epoch)
        orders.append(numbers(shuffled))
        assert numbers(shuffled) == orders[-1]
    assert [sorted(each) for each in orders] == [list(range(TOTAL))] * 4
    assert len(set(map(tuple, orders))) == 4


def test_samples_come_from_everywhere(files: list[str]) -> None:
    """Within one window the files' order is gone: pieces of all files are in it."""
    (window,) = MultiSlot(files, COLUMNS, batch_size=TOTAL, shuffle_mb=1)
    found = window["number"].flatten()
    assert abs(torch.corrcoef(torch.stack([found.float(), torch.arange(TOTAL).float()]))[0, 1]) < 0.3
    for more_than_there_is in (1e9, 1e300):
        (again,) = MultiSlot(files, COLUMNS, batch_size=TOTAL, shuffle_mb=more_than_there_is)
        assert str(again) == str(window), "all samples are one window"
    small = MultiSlot(files, COLUMNS, batch_size=6, shuffle_mb=0.001)
    assert any(len({number // 40 for number in batch["number"].flatten().tolist()}) > 1 for batch in small)


def test_no_more_is_held_than_the_bound(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    window = dataset._Held.window

    def noted(self: Any, all_of_them: bool = False) -> Any:
        made = window(self, all_of_them)
        held.append(8 * int(made.rows.bounds[-1]) + 8 * made.rows.number)
        return made

    monkeypatch.setattr(dataset._Held, "window", noted)
    list(MultiSlot(files, COLUMNS, batch_size=2, shuffle_mb=0.001))
    chunk = 8 * 100
    assert len(held) > 4
    assert max(held) < 1000 + chunk
    assert min(held[:-1]) > 1000 - chunk


# ---------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("shuffle_mb", [0, 0.001, 1])
@pytest.mark.parametrize("batch_size", [None, 7, 50])
def test_a_reading_goes_on_at_the_exact_sample(files: list[str], shuffle_mb: float, batch_size: int | None) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle_mb": shuffle_mb, "seed": 3}
    whole = MultiSlot(files, COLUMNS, **options)
    whole.set_epoch(2)
    expected = list(whole)
    for stop in sorted({0, 1, len(expected) // 2, len(expected) - 1, len(expected)}):
        first = MultiSlot(files, COLUMNS, **options)
        first.set_epoch(2)
        reading = iter(first)
        seen = [next(reading) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        second = MultiSlot(files, COLUMNS, **options)
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert same(seen + list(second), expected)
        assert same(list(second), expected), "and the next time all of it"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 30), st.floats(0, 0.004))
def test_going_on_time_and_again(files: list[str], steps: list[int], batch_size: int, shuffle_mb: float) -> None:
    expected = list(MultiSlot(files, COLUMNS, batch_size=batch_size, shuffle_mb=shuffle_mb))
    found: list[Any] = []
    state = None
    for step in [*steps, TOTAL]:
        part = MultiSlot(files, COLUMNS, batch_size=batch_size, shuffle_mb=shuffle_mb)
        if state is not None:
            part.load_state_dict(state)
        found.extend(itertools.islice(part, step))
        state = part.state_dict()
    assert same(found, expected)


def test_an_epoch_that_is_told_begins_anew(files: list[str]) -> None:
    reading = MultiSlot(files, COLUMNS, batch_size=10)
    next(iter(reading))
    state = reading.state_dict()
    reading.load_state_dict(state)
    reading.set_epoch(0)  # it is that one
    assert numbers(reading)[0] == 10
    reading.load_state_dict(state)
    reading.set_epoch(1)
    assert numbers(reading)[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 11}, "batch_size differs; expected 10, as it was; got 11"),
        ({"seed": 1}, "seed differs"),
        ({"shuffle_mb": 2}, "shuffle_mb differs"),
        ({"columns": {**COLUMNS, "many": Floats()}}, "columns differs"),
        ({"files": 3}, "the number of files differs; expected 5, as it was; got 3"),
        ({"longer": True}, "the size of some file differs"),
    ],
)
def test_another_reading_cannot_go_on(files: list[str], change: dict[str, Any], message: str) -> None:
    options = {"batch_size": 10, "shuffle_mb": 1, "seed": 0}
    first = MultiSlot(files, COLUMNS, **options)  # type: ignore[arg-type]
    next(iter(first))
    state = first.state_dict()
    if change.pop("longer", False):
        with open(files[0], "a") as file:
            file.write(line(1))
    chosen = files[: change.pop("files", None)]
    second = MultiSlot(chosen, change.pop("columns", COLUMNS), **{**options, **change})
    second.load_state_dict(state)
    with pytest.raises(ConfigurationError, match=message):
        list(second)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (3, ArgumentTypeError, "a state must be what state_dict"),
        ({}, ConfigurationError, "not the state of a dataset; .*no 'done'"),
        ({"epoch": "1"}, ArgumentTypeError, "epoch must be an int"),
        ({"epoch": 3, "piece": None}, ArgumentTypeError, "piece must be an int"),
        ({"epoch": 3, "row": -1}, ConfigurationError, "row is out of range"),
        ({"epoch": 3, "done": 1.0}, ArgumentTypeError, "done must be an int"),
        ({"epoch": 3, "settings": None}, ConfigurationError, "not the state of a dataset; .*settings of .*NoneType"),
        ({"epoch": 3, "settings": [1]}, ConfigurationError, "not the state of a dataset; .*settings of .*list"),
    ],
)
def test_what_is_no_state(files: list[str], state: Any, error: type[Exception], message: str) -> None:
    """It is refused at once, and the dataset is where it was."""
    reading = MultiSlot(files, COLUMNS, batch_size=10)
    batches = iter(reading)
    next(batches)
    there = reading.state_dict()
    if isinstance(state, dict) and state:
        state = {**there, **state}
    with pytest.raises(error, match=message):
        reading.load_state_dict(state)
    assert reading.state_dict() == there
    assert numbers([next(batches)])[0] == 10


# ---------------------------------------------------------------------------------------------- worker processes


def test_a_dataset_can_be_copied(files: list[str]) -> None:
    reading = MultiSlot(files, COLUMNS, batch_size=10, shuffle_mb=1)
    reading.set_epoch(4)
    assert same(list(pickle.loads(pickle.dumps(reading))), list(reading))
    assert same(list(copy.deepcopy(reading)), list(reading))


def test_worker_processes_read_all_once_in_every_epoch(files: list[str]) -> None:
    reading = MultiSlot(files, COLUMNS, batch_size=10, shuffle_mb=0.002)
    loader = DataLoader(
        reading, batch_size=None, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    epochs = []
    for epoch in range(2):
        reading.set_epoch(epoch)
        epochs.append(numbers(loader))
    assert [sorted(each) for each in epochs] == [list(range(TOTAL))] * 2
    assert epochs[0] != epochs[1], "the processes that are there already know of the epoch"
    with pytest.raises(StateError, match=r"only they know.*StatefulDataLoader"):
        reading.state_dict()
    assert numbers(reading) != epochs[1]
    assert reading.state_dict()["piece"] > 0, "now this process has read"


def test_a_stateful_loader_goes_on_at_the_exact_batch(files: list[str]) -> None:
    def loader(workers: int) -> Any:
        reading = MultiSlot(files, COLUMNS, batch_size=10, shuffle_mb=0.002, seed=5)
        context = "fork" if workers else None
        return StatefulDataLoader(reading, batch_size=None, num_workers=workers, multiprocessing_context=context)

    for workers, stop in ((0, 5), (2, 5)):
        first = loader(workers)
        reading = iter(first)
        seen = [next(reading) for _ in range(stop)]
        state = first.state_dict()
        rest = list(reading)
        second = loader(workers)
        second.load_state_dict(state)
        assert same(list(second), rest)
        assert sorted(numbers([*seen, *rest])) == list(range(TOTAL))


def test_another_number_of_worker_processes_cannot_go_on(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reading = MultiSlot(files, COLUMNS, batch_size=10)
    next(iter(reading))
    reading.load_state_dict(reading.state_dict())

    class Info:
        id, num_workers = 0, 2

    monkeypatch.setattr(dataset, "get_worker_info", Info)
    with pytest.raises(
        ConfigurationError, match="the number of DataLoader workers differs; expected 1, as it was; got 2"
    ):
        iter(reading)


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("shuffle", [None, (0, 0)])
def test_pieces_are_dealt_once(readers: int, shuffle: Any) -> None:
    pieces = [Piece("a", begin, begin + 1) for begin in range(11)]
    dealt = [order.dealt(pieces, reader, readers, shuffle) for reader in range(readers)]
    assert sorted(itertools.chain(*dealt)) == pieces
    assert {len(each) for each in dealt} <= {11 // readers, 11 // readers + 1}


def test_a_batch_travels_as_two_pieces_of_memory(files: list[str]) -> None:
    (batch, *_) = MultiSlot(files, COLUMNS, batch_size=10)
    tensors = [t for value in batch.values() for t in (value if isinstance(value, Ragged) else [value])]
    assert len(tensors) == 4
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 2
