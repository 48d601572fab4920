"""Says what is wrong with how a job has gone, if anything is."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from fleet.errors import FleetError, TableFileError

from .job import AGREED, HELD, HERE, Outcome, noted, run
from .network import PROBED_AFTER_S
from .scenario import (
    BIT,
    CUT,
    CUT_IN,
    CUT_OUT,
    DEADLINE_S,
    FOLLOWER,
    FULL,
    KILL,
    LIES,
    PAUSE,
    POWER,
    Scenario,
    Setting,
)

#: In these every worker's every step has its effect whatever the others do.
_IN_STEP = ("sync",)
#: In these workers that average are in the same step.
_IN_ROUNDS = ("sync", "ssp")
#: In these a step is over when the servers have it.
_WAITS = ("sync", "ssp", "gba", "auto")
#: In these no worker is more steps ahead of another.
_BOUNDS = {"sync": 0, "ssp": 2}
#: After what has befallen it a job is soon over; it takes far longer if anybody waits until a deadline.
_IN_TIME_S = DEADLINE_S / 2
#: So long after a machine has stopped its peers may find that connections are open at one end only.
_FOUND_AFTER_S = {POWER: PROBED_AFTER_S}
#: After these somebody may be silent without a word.
_SILENCE = (KILL, POWER, BIT, PAUSE, CUT, CUT_IN, CUT_OUT, FULL, LIES)
#: In these a gradient may come too late, and is dropped.
_DROPS = ("gba", "auto")
_FEW_STEPS = 4
#: A process has no more requests under way at one server, but for those that look ahead, and for what was repeated.
_UNDER_WAY = 4
#: Is what those say that hear of a worker that has ended the job itself.
_HEARD_OF = re.compile("(worker [0-9]+) failed and ended the job")
#: End a job whose workers average: where they have begun a step together they cannot go on without one of them, and
#: what all of them have had is lost with the last.
_LOST_AMID = ("a worker was lost in the middle of a step", "no worker has the dense parameters any more")


def broken(outcome: Outcome) -> list[str]:
    """Return a sentence for everything that must not be."""
    return [
        *_always(outcome),
        *_held(outcome),
        *_members(outcome),
        *_when_it_ends_well(outcome),
        *_ends_well(outcome),
        *_checkpoints(outcome),
        *_followed(outcome),
        *_acts(outcome),
        *_launched(outcome),
        *_going_on(outcome),
    ]


def _going_on(outcome: Outcome) -> Iterator[str]:
    """A job goes on from a checkpoint as if it had not ended. Where steps are not common to all, it is of none; and it
    lacks what was lost with a worker that others went on without."""
    again = outcome.again
    if again is not None:
        is_whole = again.scenario.setting.mode in _IN_STEP and not outcome.scenario.leaves_who_is_killed
        for each in broken(again) if is_whole else (*_always(again), *_ends_well(again), *_acts(again)):
            yield f"going on: {each}"


def _always(outcome: Outcome) -> Iterator[str]:
    setting = outcome.scenario.setting
    for name in outcome.hang:
        yield f"{name} has not ended after {outcome.lasted_s:.0f} s"
    for name, error in outcome.errors.items():
        if not isinstance(error, FleetError):
            yield f"{name} failed by something that is no error of Fleet's: {error!r}"
        elif not error.what or str(error) == repr(error):
            yield f"{name} failed and does not say why: {error!r}"
        elif "is silent" in str(error) and not any(fault.kind in _SILENCE for _, fault in outcome.struck):
            yield f"{name} was not told why nobody answers: {error}"
        elif "ProtocolError" in repr(error) or "the server failed on this request" in repr(error):
            yield f"{name} found something in the protocol that cannot be: {error}"
    # With a bound, what has come of a step may be lost with all who have averaged it, and servers have their pushes.
    once_more = 1 if setting.mode == "ssp" and outcome.scenario.leaves_who_is_killed else 0
    for worker, begin, done in outcome.told.begins:
        if setting.goes_back_at:
            continue
        if begin < done - once_more and setting.mode in _WAITS and not outcome.scenario.may_fail:
            yield f"worker {worker} began at step {begin} although it had heard that {done} were done"
    over_s = max((at + fault.for_s + _FOUND_AFTER_S.get(fault.kind, 0.0) for at, fault in outcome.struck), default=0.0)
    is_late = outcome.lasted_s > over_s + _IN_TIME_S
    # One that follows waits for servers, if it starts late, and a server that is cut off for who ends the job.
    may_be_late = setting.follower or (outcome.scenario.leaves_who_is_killed and outcome.errors)
    if is_late and not (may_be_late or outcome.scenario.may_fail or outcome.hang):
        yield f"it has lasted for {outcome.lasted_s:.0f} s, and what befell it was over after {over_s:.0f} s"
    # Workers of a job that goes on are as far apart as its checkpoint has them, and the values have all of their steps.
    first = dict(reversed([(worker, begin) for worker, begin, _ in outcome.told.begins]))
    least = min(first.values(), default=0)  # also of one that has not come yet
    apart = max(first.values(), default=0) - least
    for worker, done, slowest in outcome.told.went_on:
        bound = _BOUNDS.get(setting.mode)
        if bound is not None and done - max(slowest, least) > bound + apart and not outcome.scenario.may_fail:
            yield f"worker {worker} went on after {done} steps, and another one had begun {slowest}"


def _launched(outcome: Outcome) -> Iterator[str]:
    """What a launcher says of a job agrees with what has happened to it, and leaves nobody behind."""
    errors = {re.sub("([0-9]+)", r" \1", name): error for name, error in outcome.errors.items()}
    for verdict in outcome.verdicts:
        named, said = "" if verdict.cause is None else verdict.cause.process, "; ".join(verdict.said)
        failed = {name: code if code > 0 else 128 - code for name, code in verdict.codes.items() if code}
        for name in verdict.outlived:
            yield f"{name} has outlived its launcher"
        if not verdict.is_done:
            continue
        if verdict.exit_code and not failed and named not in verdict.codes:
            yield f"a launcher has ended a job in which nobody had failed: {said}"
        if failed and not verdict.exit_code:
            yield f"a launcher has taken a job to have ended well, in which {failed} had failed"
        if named in verdict.codes and verdict.exit_code != failed.get(named, 1):
            yield f"{named} is named, with {failed}, and the exit code is {verdict.exit_code}"
        heard = _HEARD_OF.match(str(errors.get(named, "")))
        if heard and heard[1] != named and heard[1] in verdict.codes:
            yield f"{named} is named as the first to fail, and had heard that {heard[1]} was: {said}"
        if verdict.exit_code and not outcome.scenario.may_fail and not _is_lost_amid(outcome):
            yield f"a launcher has ended a job that could go on: {said}"


def _held(outcome: Outcome) -> Iterator[str]:
    """What a server holds of requests that wait is bounded, whatever becomes of who has sent them."""
    setting = outcome.scenario.setting
    processes = len(setting.names) + outcome.kills.total()
    bound = processes * (_UNDER_WAY + setting.ahead) + 2 * len(outcome.struck)
    for name, requests in outcome.most_held.items():
        if requests > bound:
            yield f"{name} had {requests} requests to answer at a time, of {processes} processes"


def _members(outcome: Outcome) -> Iterator[str]:
    """Servers that a job has in the end agree on who was in it, and that nobody is any more."""
    told, setting = outcome.told.members, outcome.scenario.setting
    stay = {name: stand for name, stand in told.items() if not outcome.scenario.may_be_left(name) and stand}
    for name, stand in stay.items():
        there = [worker for worker, standing in stand.items() if standing not in ("left", "lost")]
        if there:
            yield f"{name} has served to the end, and has workers {there} in the job"
    first = min(stay, default="")
    for name, stand in stay.items():
        if stand.keys() != stay[first].keys():
            yield f"{first} knows of workers {sorted(stay[first])} in the end, and {name} of {sorted(stand)}"
        elif not outcome.kills["worker"] and not setting.moves_at and stand != stay[first]:
            yield f"{first} and {name} differ on how workers have left: {stay[first]}, {stand}"


def _ends_well(outcome: Outcome) -> Iterator[str]:
    if outcome.scenario.may_fail:
        return
    if _is_lost_amid(outcome):
        return
    for name, error in outcome.errors.items():
        if name == FOLLOWER and isinstance(error, TableFileError):  # a server could not read what it was asked for
            continue
        yield f"{name} failed although nothing had befallen the job that may end it: {error}"


def _is_lost_amid(outcome: Outcome) -> bool:
    """Say whether workers that average had begun a step with one that was lost."""
    said = " ".join(map(str, outcome.errors.values()))
    return outcome.scenario.leaves_who_is_killed and any(each in said for each in _LOST_AMID)


def _when_it_ends_well(outcome: Outcome) -> Iterator[str]:
    """Look at what a job has learnt when all of its workers say that it is done."""
    setting = outcome.scenario.setting
    ends = outcome.told.ends
    has_failed = bool(outcome.errors) or any(verdict.exit_code for verdict in outcome.verdicts)
    if has_failed or outcome.hang or not ends or len(ends) < setting.workers:
        return
    if setting.mode == "geo":  # each has values of its own, which the last exchange has brought together or not
        if not outcome.scenario.may_fail:
            yield from _every_change_is_heard(outcome)
            if setting.optimizer != "Adam":
                yield from _every_change_once(outcome)
        return
    if outcome.scenario.leaves_who_is_killed:  # and nobody has waited for what others had still to send
        lives = Counter(worker for worker, *_ in outcome.told.begins)
        ends = {worker: {"steps": end["steps"]} for worker, end in ends.items() if lives[worker] == 1}
    first = ends[min(ends)] if ends else {}
    for worker, end in ends.items():
        for name, value in end.items():
            # A server that has lost state may have done so after one of them had read it.
            if not torch.equal(value, first[name]) and not outcome.scenario.may_fail:
                yield f"workers {min(ends)} and {worker} end with other values of {name}"
    if outcome.scenario.leaves_who_is_killed:
        if setting.mode in _IN_ROUNDS and first and not outcome.scenario.may_fail:
            yield from _every_round_once(outcome, first["steps"])
        return
    if setting.mode in _IN_STEP and not outcome.scenario.may_fail:
        for name, value in _undisturbed(_plain(setting)).items():
            if not _is_as_undisturbed(setting, first.get(name), value):
                yield f"{name} differs from that of the undisturbed job"
    if setting.optimizer != "Adam" and not setting.clip:  # then some steps move less than others
        yield from _every_step_once(outcome, first)


def _is_as_undisturbed(setting: Setting, value: torch.Tensor | None, before: torch.Tensor) -> bool:
    """Say whether it is to the bit, or nearly so where several servers add up a norm: each has its own part of it."""
    if value is None or value.shape != before.shape:
        return False
    return torch.equal(value, before) or (setting.clip > 0 and torch.allclose(value, before, rtol=1e-4, atol=1e-6))


def _every_step_once(outcome: Outcome, end: dict[str, torch.Tensor]) -> Iterator[str]:
    setting = outcome.scenario.setting
    if outcome.scenario.may_fail and any(begin < done for _, begin, done in outcome.told.begins):
        return  # one server has lost steps that its worker does over, and others have them twice
    plain = _plain(setting)
    usual = noted(_undisturbed(plain), plain)
    for what, values, before in zip(("the parameter", "the rows"), noted(end, setting), usual, strict=True):
        once = before[before != 0][:1]
        here = values[: setting.all_workers, : setting.steps]
        may_lack = torch.full_like(here, setting.mode in _DROPS or outcome.scenario.may_fail, dtype=torch.bool)
        may_lack[:, setting.taken_back if what == "the parameter" else []] = True
        is_wrong = ~torch.isclose(here, once, rtol=1e-4) & ~((here == 0) & may_lack)
        for worker, step in is_wrong.nonzero().tolist():
            yield f"step {step} of worker {worker} has {here[worker, step]:.4f} in {what}, and not {once[0]:.4f}"


def _every_round_once(outcome: Outcome, steps: torch.Tensor) -> Iterator[str]:
    """Workers that average in rounds take each step together, and once, whoever is killed meanwhile. Only what such a
    worker alone has had of a step is lost with it: of all workers."""
    setting = outcome.scenario.setting
    # What is noted has the same gradient in every mode. But in this one alone a script takes back what it has learnt.
    rounds = replace(setting, mode="sync", loads_at=setting.loads_at if setting.mode == "sync" else 0)
    usual = _undisturbed(_plain(rounds))["steps"]
    lost = _lost_rounds(outcome, steps)
    if lost and setting.optimizer == "Adam":  # which would have moved on in later steps
        return
    there = [step for step in range(setting.steps) if step not in lost]
    if not torch.equal(steps[:, there], usual[:, there]):
        yield "what the workers have averaged differs from that of the undisturbed job"


def _lost_rounds(outcome: Outcome, steps: torch.Tensor) -> list[int]:
    """Return the steps that no worker has any trace of, in a parameter, if there may be so many."""
    lost: list[int] = (steps == 0).all(0).nonzero().flatten().tolist()
    lost = [step for step in lost if step not in outcome.scenario.setting.taken_back]
    return lost if len(lost) <= outcome.kills["worker"] else []


def _every_change_once(outcome: Outcome) -> Iterator[str]:
    """In GEO a worker tells what has come of a step to a parameter bit by bit, and has all of it itself, unless some of
    what it has told was lost, or counted twice. It tells its share of a row with that step alone."""
    setting, ends = outcome.scenario.setting, outcome.told.ends
    if outcome.kills["worker"]:  # what one that was killed had not told is lost with it, and the rest is the servers'
        return
    once = float(_undisturbed(_plain(setting))[HERE][0, 0])
    for worker, end in ends.items():
        for step, value in enumerate(end[HERE][worker]):
            if not abs(value - once) < 1e-4 * abs(once):
                yield f"step {step} of worker {worker} has {value:.4f} where it was taken, and not {once:.4f}"
        _, rows = noted(end, setting)
        for step, value in enumerate(rows[worker] * setting.workers):
            if not abs(value - once) < 1e-4 * abs(once):
                yield f"step {step} of worker {worker} has told {value:.4f} of its row, and not {once:.4f}"


def _every_change_is_heard(outcome: Outcome) -> Iterator[str]:
    for worker, end in outcome.told.ends.items():
        if not torch.allclose(end[AGREED], end["shared.weight"][end[HELD]], rtol=1e-4, atol=1e-6):
            yield f"worker {worker} has not heard of all that others have changed in its rows {end[HELD].tolist()}"


def _is_cut_at(step: int, values: torch.Tensor, lost: Iterable[tuple[int, int]] = ()) -> bool:
    """Say whether every worker's steps before this one have had their effect, which may be ``lost`` of some, and no
    later ones."""
    has = values != 0
    for worker, at in lost:
        has[worker, at] = at < step
    return bool(has[:, :step].all()) and not bool(values[:, step:].any())


def _checkpoints(outcome: Outcome) -> Iterator[str]:
    """A checkpoint is whole, and of one moment."""
    yield from outcome.told.damaged
    if outcome.scenario.setting.mode in _IN_STEP and not outcome.scenario.may_fail:
        for step, steps, rows in outcome.told.saved:
            rounds = _lost_rounds(outcome, steps[:, :step]) if outcome.scenario.leaves_who_is_killed else []
            taken_back = _taken_back(outcome)
            lost = taken_back | set(itertools.product(range(len(steps)), rounds))
            parts = (("the parameter", steps, lost), ("the rows", rows, _lost_rows(outcome)))
            for what, values, lacks in parts:
                if not _is_cut_at(step, values, lacks):
                    yield f"the checkpoint of step {step} has in {what} {values.tolist()}"


def _taken_back(outcome: Outcome) -> set[tuple[int, int]]:
    setting = outcome.scenario.setting
    return set(itertools.product(range(setting.workers), setting.taken_back))


def _lost_rows(outcome: Outcome) -> set[tuple[int, int]]:
    """Return the workers' steps whose rows may have been lost: those that they were killed in, and did not do again
    where the others had taken them."""
    if not outcome.scenario.leaves_who_is_killed:
        return set()
    told = outcome.told
    last = {worker: max(begin for each, begin, _ in told.begins if each == worker) for worker, *_ in told.begins}
    return {(worker, step) for worker, step in told.begun - told.done if step < last.get(worker, 0)}


def _followed(outcome: Outcome) -> Iterator[str]:
    """A model that follows has one version at a time, and never an older one."""
    setting = outcome.scenario.setting
    for life in outcome.told.followed:
        last = 0
        for version, steps, rows in life:
            if version < last and not outcome.scenario.may_fail:
                yield f"the version of a model that follows went back from {last} to {version}"
            last = version
            stay = [step for step in range(setting.steps) if step not in setting.taken_back]
            is_torn = not torch.equal(steps[:, stay] != 0, rows[:, stay] != 0)
            if setting.mode in ("sync", "gba", "auto") and is_torn:
                yield f"version {version} of a model that follows has {steps.tolist()} and rows {rows.tolist()}"
            again = setting.goes_back_at - setting.goes_back_to  # versions count on where steps are taken again
            at = [version, version - again] if version >= setting.goes_back_at else [version]
            if setting.mode == "sync" and not any(_is_cut_at(each, steps, _taken_back(outcome)) for each in at):
                yield f"version {version} of a model that follows has {steps.tolist()}"


def _acts(outcome: Outcome) -> Iterator[str]:
    """What a script has kept belongs to where it begins, and what it has from all others is of the same step."""
    setting, kept = outcome.scenario.setting, outcome.told.kept
    yield from kept.wrong
    if outcome.scenario.may_fail:
        return
    # A checkpoint lacks what a worker has kept that was killed before it could give it.
    may_lack = setting.goes_back_at > 0 or setting.goes_on
    # There the others may have taken a step that a worker was killed in before its push, with what it had kept.
    may_be_older = setting.dense == "all_reduce"
    for worker, step, of in kept.states:
        if of is not None and may_be_older and of < step:
            continue
        if of != step and (of is not None or (step > 0 and not may_lack)):
            yield f"worker {worker} began at step {step} with what it had kept after {of} steps"
    workers = setting.workers
    for worker, step, together in kept.met:
        if together != [workers * (workers + 1) // 2, workers * step]:
            yield f"worker {worker} met the others before step {step}, and they had {together}"
    for worker, model in kept.models:
        for name, value in model.items():
            if not torch.equal(value, kept.models[0][1][name]):
                yield f"workers {kept.models[0][0]} and {worker} have read other values of {name}"


def _plain(setting: Setting) -> Setting:
    """Return the smallest job that ends as one with this setting does: what keeps, saves, follows or moves it makes no
    difference to what it learns, nor does the number of servers. Where steps are not common to all workers each of them
    has the same effect, and a few show it."""
    steps = setting.steps if setting.mode in _IN_STEP else _FEW_STEPS
    plain = Setting(setting.mode, setting.workers, 1, steps, setting.optimizer, dense=setting.dense)
    if setting.mode not in _IN_STEP:
        return plain
    same = ("life", "clip", "grows_at", "edits_at", "beside", "loads_at", "loads_from")
    return replace(plain, **{name: getattr(setting, name) for name in same})


@cache
def _undisturbed(plain: Setting) -> dict[str, torch.Tensor]:
    """Return what the first worker of a job has in the end that nothing befalls."""
    with tempfile.TemporaryDirectory(prefix="fleet-simulation-") as folder:
        return run(Scenario(0, plain), Path(folder)).told.ends[0]
