"""Tells a run that went wrong: made as short as it can be, and drawn as a sequence of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .job import Outcome
from .scenario import FOLLOWER, MANY, MESSAGE_FAULTS, Fault, Scenario, moments_of

#: What of a run is tried while a scenario is made shorter.
_MOST_TRIALS = 150
_WIDTH = 15
#: What a setting may do without.
_ACTS = (
    *("rows_in_memory", "life", "clip", "grows_at", "edits_at"),
    *("ahead", "meets_every", "keeps", "beside", "loads_at", "goes_back_at", "goes_on"),
)


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool], most: int = _MOST_TRIALS) -> Scenario:
    """Return a shorter scenario that still fails: fewer faults first, then fewer steps and processes."""
    trials = [most]

    def still(each: Scenario) -> bool:
        trials[0] -= 1
        return trials[0] >= 0 and fails(each)

    scenario = replace(scenario, faults=_fewer(scenario.faults, lambda some: still(replace(scenario, faults=some))))
    while trials[0] > 0:
        for each in _smaller(scenario):
            if still(each):
                scenario = each
                break
        else:
            break
    return scenario


def _fewer(faults: tuple[Fault, ...], still: Callable[[tuple[Fault, ...]], bool]) -> tuple[Fault, ...]:
    """Leave out as many as possible: halves, quarters, and so on down to single ones."""
    if faults and still(()):
        return ()
    size = len(faults) // 2
    while size:
        for start in range(0, len(faults), size):
            some = faults[:start] + faults[start + size :]
            if some != faults and still(some):
                faults = some
                break
        else:
            size //= 2
    return faults


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    setting = scenario.setting
    last = max((fault.moment for fault in scenario.faults), default=0)
    if scenario.preemption:
        yield replace(scenario, preemption=0.0)
    if scenario.is_one_machine:
        yield replace(scenario, is_one_machine=False)
    if scenario.max_restarts < MANY:
        yield replace(scenario, max_restarts=MANY)
    if setting.moves_at:
        yield replace(scenario, setting=replace(setting, moves_at=0, moves_to=0))
    if setting.joins and f"worker{setting.all_workers - 1}" not in {fault.whom for fault in scenario.faults}:
        yield replace(scenario, setting=replace(setting, joins=setting.joins - 1))
    for name in _ACTS:
        if getattr(setting, name):
            yield replace(scenario, setting=replace(setting, **{name: type(getattr(setting, name))()}))
    if setting.sync_s:
        yield replace(scenario, setting=replace(setting, sync_s=0.0))
    if setting.checkpoint_every:
        yield replace(scenario, setting=replace(setting, checkpoint_every=0))
    if setting.follower and FOLLOWER not in {fault.whom for fault in scenario.faults}:
        yield replace(scenario, setting=replace(setting, follower=False))
    for steps in sorted({setting.steps // 2, setting.steps - 1}):
        shorter = replace(setting, steps=steps)
        if 0 < steps < setting.steps and last < moments_of(shorter):
            yield replace(scenario, setting=shorter)
    named = {fault.whom for fault in scenario.faults}
    for kind, count in (("workers", setting.workers), ("servers", setting.servers)):
        last_one = f"{kind[:-1]}{count - 1 + (setting.joins if kind == 'workers' else 0)}"
        if count > 1 and last_one not in named:
            yield replace(scenario, setting=replace(setting, **{kind: count - 1}))
    for at, fault in enumerate(scenario.faults):
        if fault.for_s > 0.1 and fault.kind not in MESSAGE_FAULTS:
            briefer = replace(fault, for_s=round(fault.for_s / 2, 2))
            yield replace(scenario, faults=(*scenario.faults[:at], briefer, *scenario.faults[at + 1 :]))


def told(outcome: Outcome, wrong: Sequence[str], *, heartbeats: bool = False) -> str:
    """Return what has happened, as text: a column for each process, an arrow for each message."""
    scenario = outcome.scenario
    lines = [
        f"seed {scenario.seed}: {scenario.setting}, preemption {scenario.preemption:g}, "
        f"max_restarts {scenario.max_restarts}, is_one_machine {scenario.is_one_machine}",
        *(f"  {fault}" for fault in scenario.faults),
        "",
        *(f"[fleetrun] {each}" for verdict in outcome.verdicts for each in verdict.said),
        "",
        *(f"WRONG: {each}" for each in wrong),
        "",
        *_diagram(outcome, heartbeats=heartbeats),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _diagram(outcome: Outcome, *, heartbeats: bool) -> Iterator[str]:
    names = sorted(outcome.scenario.setting.names, key=lambda name: name.startswith("server"))
    places = {name: at * _WIDTH + _WIDTH // 2 for at, name in enumerate(names)}
    yield " " * 11 + "".join(f"{name:^{_WIDTH}}" for name in names)
    events: list[tuple[float, int, str]] = []
    for message in outcome.messages:
        if heartbeats or not message.what.endswith(("beat", "beat 0")):
            ends = [places[name.split(":")[0]] for name in (message.sender, message.receiver)]
            events.append((message.at, len(events), _arrow(*ends, len(names)) + f"  {message.what} {message.fate}"))
    for at, fault in outcome.struck:
        line = "".join("X" if place == places.get(fault.whom) else "." for place in range(len(names) * _WIDTH))
        events.append((at, len(events), f"{line}  **** {fault}"))
    for at, _, what in sorted(events):
        yield f"{at:10.4f} {what}"


def _arrow(sender: int, receiver: int, columns: int) -> str:
    line = [" |"[place % _WIDTH == _WIDTH // 2] for place in range(columns * _WIDTH)]
    left, right = sorted((sender, receiver))
    line[left + 1 : right] = "-" * (right - left - 1)
    line[sender] = "+"
    line[receiver] = ">" if receiver > sender else "<"
    return "".join(line)
