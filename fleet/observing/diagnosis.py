"""What holds a job back, in sentences, out of two views of it. Pure: each rule is a function of both.

A worker's time is all of the kinds that it counts (pushing, pulling, meeting) and the rest, which is its own: forward,
backward, data. Of pushing and meeting a part is waiting for other workers; servers know which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from fleet.observing.names import rate
from fleet.observing.picture import SILENT_S, View, WorkerView, held_up, mean_staleness, waited_shares

#: So large a part of the time is worth a sentence.
_NOTABLE = 0.10
_LARGE = 0.40
#: A server that is busy for more than this is what others wait for.
_BUSY = 0.70
#: A step that takes so many times as long as the others' is long.
_LONGER = 1.3
#: Who waits for longer than this is stuck, or would be served by a slower clock.
_STUCK_S = 10.0


@dataclass(frozen=True)
class _Time:
    """How one worker spent a second, in parts of it."""

    push: float
    pull: float
    meet: float
    waited: dict[int, float]
    steps: float
    cpu: float

    @property
    def exchange(self) -> float:
        return self.push + self.pull

    @property
    def own(self) -> float:
        return max(0.0, 1.0 - self.push - self.pull - self.meet)

    @property
    def own_of_a_step(self) -> float:
        return self.own / self.steps if self.steps else math.inf


@dataclass(frozen=True)
class _Case:
    before: View
    now: View
    times: dict[int, _Time]
    busy: dict[str, float]


def diagnose(before: View, now: View) -> list[str]:
    """Sentences, what matters most first; the first says how the job does at all."""
    case = _Case(before, now, dict(_times(before, now)), dict(_busy(before, now)))
    found = [sentence for rule in _RULES for sentence in rule(case)]
    return [_overview(case), *(found or ["Nothing stands out."])]


def _times(before: View, now: View) -> Iterator[tuple[int, _Time]]:
    for index, worker in now.workers.items():
        earlier = before.workers.get(index)
        if worker.standing != "live" or earlier is None:
            continue
        rates = {
            name: rate(name, earlier.figures, worker.figures)
            for name in ("push_seconds", "pull_seconds", "meet_seconds", "steps", "cpu_seconds")
        }
        known = {name: value for name, value in rates.items() if value is not None}
        if len(known) == len(rates):
            yield (
                index,
                _Time(
                    known["push_seconds"],
                    known["pull_seconds"],
                    known["meet_seconds"],
                    waited_shares(earlier, worker),
                    known["steps"],
                    known["cpu_seconds"],
                ),
            )


def _busy(before: View, now: View) -> Iterator[tuple[str, float]]:
    for name, server in now.servers.items():
        earlier = before.servers.get(name)
        share = None if earlier is None else rate("busy_seconds", earlier.figures, server.figures)
        if share is not None:
            yield name, min(share, 1.0)


def _overview(case: _Case) -> str:
    live = [worker for worker in case.now.workers.values() if worker.standing == "live"]
    steps = sum(spent.steps for spent in case.times.values())
    examples = sum(
        rate("examples", case.before.workers[index].figures, case.now.workers[index].figures) or 0.0
        for index in case.times
    )
    speed = f"{steps:.3g} steps a second" + (f", {examples:,.0f} examples a second" if examples else "")
    modes = {server.mode for server in case.now.servers.values() if server.mode}
    mode = f", mode {modes.pop()}" if len(modes) == 1 else ""
    return f"{_count(len(live), 'worker')} and {_count(len(case.now.servers), 'server')}{mode}: {speed}."


# ---------------------------------------------------------------- rules: what is broken


def _servers_away(case: _Case) -> Iterator[str]:
    for name, server in case.now.servers.items():
        if not server.figures:
            yield f"{_capital(name)} {server.phase}: its log says why, or the network between."
        elif server.phase != "training":
            yield f"{_capital(name)} is not training: {server.phase}."


def _workers_away(case: _Case) -> Iterator[str]:
    for index, worker in case.now.workers.items():
        if worker.standing == "expected":
            yield f"Worker {index} has not said hello yet, and the job waits for it."
        elif worker.standing == "lost":
            yield f"Worker {index} ({worker.label}) was given up on; the others go on without it."
        elif worker.standing == "live" and (worker.heard_seconds or 0.0) >= SILENT_S:
            yield (
                f"Worker {index}{_at(worker)} has not been heard of for {worker.heard_seconds:.0f} s: its process may "
                "have died, or its machine be out of reach."
            )


def _stuck(case: _Case) -> Iterator[str]:
    for index, worker in case.now.workers.items():
        wait = worker.wait
        if worker.standing == "live" and wait is not None and wait.seconds >= _STUCK_S:
            whom = " and ".join(f"worker {other}" for other in wait.workers[:3]) or "the server"
            yield f"Worker {index} has waited {wait.seconds:.0f} s for {whom} ({wait.what})."


def _not_finite(case: _Case) -> Iterator[str]:
    for index, worker in case.now.workers.items():
        loss = worker.figures.get("loss")
        if loss is not None and not math.isfinite(loss):
            yield f"The loss of worker {index} is {loss}: FLEET_CHECK_FINITE=1 names the parameter that is to blame."


# ---------------------------------------------------------------- rules: what is slow


def _straggler(case: _Case) -> Iterator[str]:
    if len(case.times) < 2:
        return
    held = {index: share for index, share in held_up(case.before, case.now).items() if index in case.times}
    worst = max(held, key=held.__getitem__)
    if held[worst] < _NOTABLE:
        return
    theirs = median(spent.own_of_a_step for index, spent in case.times.items() if index != worst)
    mine = case.times[worst].own_of_a_step
    if math.isfinite(mine) and mine > _LONGER * theirs:
        yield (
            f"Worker {worst}{_at(case.now.workers[worst])} holds the others back: they wait {held[worst]:.0%} of their "
            f"time for it. Of its own, a step takes it {_ms(mine)}, and the others {_ms(theirs)}."
        )
    else:
        yield (
            f"The workers wait {sum(held.values()) / len(held):.0%} of their time for each other, the most for worker "
            f"{worst} ({held[worst]:.0%}), though none is slower in the mean: a mode that does not wait for every step "
            "would gain that (docs/modes/index.md)."
        )


def _busy_server(case: _Case) -> Iterator[str]:
    busiest = max(case.busy, key=case.busy.__getitem__, default=None)
    if busiest is None or case.busy[busiest] < _BUSY:
        return
    rest = [share for name, share in case.busy.items() if name != busiest]
    if rest and max(rest) < case.busy[busiest] / 2:
        yield (
            f"{_capital(busiest)} is busy {case.busy[busiest]:.0%} of the time and the others {max(rest):.0%} at most: "
            "what it holds is asked for more than the rest. Another split_method may spread it."
        )
    else:
        yield f"{_capital(busiest)} is busy {case.busy[busiest]:.0%} of the time: more servers would share its work."


def _exchange(case: _Case) -> Iterator[str]:
    for index, spent in case.times.items():
        rest = spent.exchange - sum(spent.waited.values())
        if rest < _LARGE or max(case.busy.values(), default=0.0) >= _BUSY:
            continue
        before, now = case.before.workers[index].figures, case.now.workers[index].figures
        moved = (rate("sent_bytes", before, now) or 0.0) + (rate("received_bytes", before, now) or 0.0)
        a_step = f" ({moved / spent.steps / 1e3:,.0f} kB a step)" if spent.steps else ""
        todo = (
            "fleet.prefetch fetches rows while it computes" if spent.pull > spent.push else "larger batches need fewer"
        )
        yield (
            f"Worker {index} spends {spent.exchange:.0%} of its time in exchanges (push {spent.push:.0%}, pull "
            f"{spent.pull:.0%}), {sum(spent.waited.values()):.0%} of it for other workers; the servers are busy "
            f"{max(case.busy.values(), default=0.0):.0%}. What is left is moving {moved / 1e6:.3g} MB a second"
            f"{a_step}: {todo}."
        )


def _waits_unseen(case: _Case) -> Iterator[str]:
    for index, spent in case.times.items():
        if spent.own >= 0.5 and spent.cpu < spent.own / 2:
            yield (
                f"Worker {index} is in its own code {spent.own:.0%} of the time and uses a processor for "
                f"{spent.cpu:.0%}: it waits for something that Fleet does not see, such as its data, a device, or a "
                "machine with too few processors."
            )


def _stale(case: _Case) -> Iterator[str]:
    for index, worker in case.now.workers.items():
        mean = mean_staleness(case.before.workers.get(index), worker)
        if mean is not None and mean > 2 * max(1, len(case.times)):
            yield (
                f"What worker {index} trains on is {mean:.3g} updates old when its gradients are applied, with "
                f"{_count(len(case.times), 'worker')}: fewer steps in its queue (send_queue_size) or a lower learning "
                "rate lose less (docs/modes/index.md)."
            )


def _compute(case: _Case) -> Iterator[str]:
    if not case.times:
        return
    own = median(spent.own for spent in case.times.values())
    if own >= 0.8:
        yield (
            f"The workers are in their own code {own:.0%} of the time, and the servers busy "
            f"{max(case.busy.values(), default=0.0):.0%}: more or faster workers make the job faster, more servers do "
            "not."
        )


_RULES: tuple[Callable[[_Case], Iterator[str]], ...] = (
    *(_servers_away, _workers_away, _stuck, _not_finite),
    *(_straggler, _busy_server, _exchange, _waits_unseen, _stale, _compute),
)


def _at(worker: WorkerView) -> str:
    return f" ({worker.label})" if worker.label else ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
