"""The engines that ``benchmarks/row_files.py`` compares hold what was written, also when they are opened again."""

import importlib
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ROWS, REQUEST = 40_000, 3_000


@pytest.fixture
def row_engines(monkeypatch):
    """Imported by whoever runs these tests alone, as it loads compiled functions for a second."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("row_engines")


NAMES = ("fleet", "mapped", "mapped, announced", "hot set, mapped, announced")


def test_all_engines_that_need_nothing_more_are_here(row_engines):
    assert tuple(name for name, (needs, *_) in row_engines.ENGINES.items() if needs is None) == NAMES


@pytest.mark.pairs(1)
@pytest.mark.parametrize("name", NAMES)
def test_engines_hold_what_was_written_last(name, row_engines, tmp_path):
    random = np.random.default_rng(3)
    ids = np.arange(ROWS) * 977 + 5
    expected = random.integers(0, 1 << 32, (ROWS, row_engines.WORDS), "<u4")
    # So little memory that hot sets let go of rows all the time.
    _, _, made = row_engines.ENGINES[name]
    engine = made(tmp_path, ROWS, 2 << 20)
    for start in range(0, ROWS, REQUEST):
        engine.load(ids[start : start + REQUEST], expected[start : start + REQUEST])
    for request in range(60):
        places = random.permutation(ROWS)[: REQUEST if request % 2 else 7]
        assert np.array_equal(engine.read(ids[places]), expected[places])
        # Some of what is written was not read just before.
        places = np.union1d(places[1:], random.integers(0, ROWS, 50))
        expected[places] = random.integers(0, 1 << 32, (places.size, row_engines.WORDS), "<u4")
        engine.write(ids[places], expected[places])
        if request == 40:
            engine.close()
            engine = made(tmp_path, ROWS, 2 << 20)
    for start in range(0, ROWS, REQUEST):
        assert np.array_equal(engine.read(ids[start : start + REQUEST]), expected[start : start + REQUEST])
    engine.close()
