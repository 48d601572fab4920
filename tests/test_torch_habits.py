"""What a script does with a model and an optimizer that Fleet has taken over gets what docs/torch.md says it gets: each
row of its tables is a case here, run in plain torch and in a job."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from habits import gradients, graphs, modules, optimizers, values
from habits.habit import (
    AS_IN_TORCH,
    DIFFERS,
    MODES,
    REFUSED,
    TOLERANCE,
    Habit,
    Net,
    Outcome,
    difference,
    in_a_job,
    in_a_job_of,
    in_torch,
    judge,
    sgd,
)
from habits.nets import NETS

SECTIONS = [each.SECTION for each in (gradients, values, modules, graphs, optimizers)]
HABITS = [habit for section in SECTIONS for habit in section.habits]
PAGE = Path(__file__).parent.parent / "docs" / "torch.md"


def check(habit: Habit, ours: Outcome, theirs: Outcome, tolerance: float = TOLERANCE) -> None:
    if habit.raises is not None or habit.gets != REFUSED:  # what is refused may be wrong in torch too
        assert type(theirs.error) is (habit.raises or type(None)), theirs.error
    got, why = judge(habit, theirs, ours, tolerance)
    assert got == habit.gets, why
    if habit.gets == REFUSED:
        assert re.search(habit.says, str(ours.error)), ours.error


@pytest.mark.parametrize(
    "habit", [pytest.param(each, marks=[pytest.mark.slow] if each.slow else [], id=each.does) for each in HABITS]
)
def test_a_script_gets_what_the_page_says(habit: Habit) -> None:
    check(habit, in_a_job(habit), in_torch(habit))


EVERYWHERE = [habit for habit in HABITS if habit.everywhere]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "sync"])
@pytest.mark.parametrize("habit", EVERYWHERE, ids=str)
def test_it_gets_the_same_in_every_mode(habit: Habit, mode: str) -> None:
    if mode not in habit.not_in:
        check(habit, in_a_job(habit, mode), in_torch(habit))


@pytest.mark.slow
@pytest.mark.parametrize("habit", EVERYWHERE, ids=str)
def test_it_gets_the_same_where_two_workers_do_it(habit: Habit) -> None:
    """On the same batches, so that one process is what both compare with. What a script changes by itself reaches the
    other worker with the next step or later, and is told; then both have the same."""
    first, second = in_a_job_of(2, habit)
    if not habit.edits:
        check(habit, first, in_torch(habit))
        if habit.gets == REFUSED:
            check(habit, second, in_torch(habit))
        else:
            assert difference(first.value["after"], second.value["after"]) is None
        return
    assert first.error is None
    assert second.error is None
    assert any("what worker 0's script gives them counts for all" in said for said in first.said), first.said
    for name, value in first.value["after"].items():
        if not name.startswith("norm.running"):  # buffers are each worker's own
            assert difference(value, second.value["after"][name], name) is None


#: Their scripts name what a model of one table has, or go by what torch's own embeddings have and fleet.nn's lack.
NOT_WITH = {
    "three tables": ("the same over the parameters themselves",),
    "a group": (
        *("`model.apply(init_weights)`", "an edit before `init_worker`", "`get_parameter`, `get_submodule`"),
        *("ids by the name that torch has for them", "`state_dict` before `init_worker`"),
        *(
            "`DistributedDataParallel(model)`",
            "hooks of a table in what `torch.fx` traced",
            "a table's weight taken out",
        ),
        "an average made before the job",
        *(
            "`torch.ao.quantization.quantize_dynamic",
            "`type(copy.deepcopy(model).table)",
        ),  # its tables were never torch's
    ),
}
#: Run by default too.
QUICK = (
    *("hooks of modules: forward", "`table.padding_idx = ", "`jacrev`, `jacfwd`", "`torch.jit.trace(model, ids)`"),
    *("`clip_grad_norm_`, any", "SAM: ", "`F.embedding(ids, table.weight)`", "two steps on one gradient"),
)
OF_ONE_TABLE = [each for each in HABITS if each.make is Net and each.optimizers is sgd and not each.slow]
WITH_MORE = [
    (net, each) for net in NETS for each in OF_ONE_TABLE if not each.does.startswith(NOT_WITH.get(net, ()) or "-")
]


def check_with(net: str, habit: Habit, mode: str = "sync") -> None:
    """A script that torch cannot run with another model says nothing."""
    habit = replace(habit, make=NETS[net])
    theirs = in_torch(habit)
    if type(theirs.error) is not (habit.raises or type(None)):
        pytest.skip(f"{type(theirs.error).__name__} in torch")
    check(habit, in_a_job(habit, mode), theirs, 3 * TOLERANCE)  # of larger numbers


@pytest.mark.parametrize(
    ("net", "habit"),
    [
        pytest.param(
            *each, marks=() if each[1].does.startswith(QUICK) else pytest.mark.slow, id=f"{each[0]}: {each[1]}"
        )
        for each in WITH_MORE
    ],
)
def test_it_gets_the_same_with_several_tables(net: str, habit: Habit) -> None:
    check_with(net, habit)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "geo"])
@pytest.mark.parametrize(
    ("net", "habit"),
    [pytest.param(*each, id=f"{each[0]}: {each[1]}") for each in WITH_MORE if each[1].everywhere],
)
def test_it_gets_the_same_with_several_tables_in_other_modes(net: str, habit: Habit, mode: str) -> None:
    if mode not in habit.not_in:
        check_with(net, habit, mode)


def rows(text: str) -> list[tuple[str, str]]:
    """What a script does and what it gets, from each row of the page's tables of three columns."""
    cells = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in text.splitlines() if line.startswith("|")]
    found = [(each[0].strip().replace(r"\|", "|"), each[1].strip()) for each in cells if len(each) == 3]
    return [each for each in found if each[1] in (AS_IN_TORCH, DIFFERS, REFUSED)]


def test_every_row_of_the_page_has_its_case_and_every_case_its_row() -> None:
    assert rows(PAGE.read_text()) == [(habit.does, habit.gets) for habit in HABITS]
