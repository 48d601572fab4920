"""Whole scripts of many habits, drawn from seeds, get what torch gives them, or are refused by name; so they do where
several workers run them, each on its part of every batch."""

from __future__ import annotations

import pytest
from habits.programs import ACTS, Program, drawn, wrong_with

#: Scripts that were wrong once, as short as they could be made.
FOUND = [
    Program("sync", "SGD", None, (("rows set", 41), ("evaluation", 204)), workers=2),
    Program("sync", "SGD", None, (("data of another", 503),), workers=2),
    Program("all-reduce", "SGD", None, (("rows moved by hand", 785),), workers=2),
    Program("sync", "SGD", None, (("a step up and back", 883), ("values scaled by the first", 370)), workers=2),
    Program(
        "all-reduce", "SGD", None, (("a backward without a step", 531), ("gradients of autograd grad", 668)), workers=2
    ),
    Program(
        "all-reduce",
        "SGD",
        None,
        (("a backward without a step", 122), ("accumulation without sync to the end", 756)),
        workers=2,
    ),
    Program("sync", "SGD", None, (("rows moved by hand", 285), ("evaluation", 482), ("a layer frozen", 862))),
]


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 76))])
def test_a_script_of_many_habits(seed: int) -> None:
    assert wrong_with(drawn(seed)) is None, drawn(seed)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_a_script_that_several_workers_run(seed: int, workers: int) -> None:
    program = drawn(seed, workers)
    assert wrong_with(program) is None, program


@pytest.mark.parametrize("program", FOUND, ids=lambda program: program.acts[-1][0])
def test_what_was_wrong_once(program: Program) -> None:
    assert wrong_with(program) is None


def test_a_script_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda run: run.weight.data.mul_(2.0 if run.script.remote else 1.0)  # noqa: E731
    monkeypatch.setitem(ACTS, "what only a job does", wrong)
    found = wrong_with(Program("sync", "SGD", None, (("what only a job does", 0),)))
    assert found is not None
    assert "rows of table" in found
