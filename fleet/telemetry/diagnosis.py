"""Says in sentences what holds a job back, from two views of it. Pure: each rule is a function of both.

A worker counts what it spends in pushing, pulling and meeting, in averaging dense gradients with others and in copies
to a device and back; the rest of its time is its own: data, forward, backward. Of pushing and meeting a part is waiting
for other workers; servers know which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from fleet.telemetry.cause import LAUNCHER, Cause
from fleet.telemetry.figures import has_parts, in_words, rate, reported
from fleet.telemetry.view import (
    MOST_HOT,
    SILENT_S,
    View,
    held_up,
    late_share,
    mean_staleness,
    rows,
    table_rows,
    total_speed,
    usual_parts,
    waited_shares,
)

#: So large a part of the time is worth a sentence.
_NOTABLE = 0.10
_LARGE = 0.40
#: So large a part of the time without a processor is more than what any scheduler takes.
_STARVED = 0.25
_NOTABLY_LATE = 0.01
#: Others wait for a server that is busy for more than this part of the time.
_BUSY = 0.70
#: A step that takes so many times as long as the others' is long.
_LONGER = 1.3
#: A worker that waits for longer than this is stuck, or would be served by a slower clock.
_STUCK_S = 10.0
#: An exchange of fewer bytes costs what any exchange costs.
_FEW_BYTES = 100e3
#: A server that is further away is not near, as heartbeats of a busy machine have it; and so many round trips or fewer
#: are what a step waits for.
_FAR_S, _FEW_TRIPS = 1e-3, 4
#: With so little to compute on both sides of it, it is the network that takes its time.
_IDLE = 0.3
#: What is shorter cannot be told from the length of the steps at the ends of the time.
_LEAST_S = 1e-4
#: After so many steps a table should have rows.
_MANY_STEPS = 100
#: A table that has to read a larger part of the rows it is asked for has too little memory.
_READ_TOO_OFTEN = 0.2
#: So many workers are named one by one.
_NAMED = 4

_COUNTED = {"push_seconds", "pull_seconds", "meet_seconds", "steps", "cpu_seconds"}
_COUNTED_BY_SOME = {"reduce_seconds", "copy_seconds", "delay_seconds", "sent_bytes", "received_bytes"}


@dataclass(frozen=True)
class _Time:
    """Says how one worker spent a second, in parts of it."""

    push: float
    pull: float
    meet: float
    waited: dict[int, float]
    steps: float
    cpu: float
    delay: float
    moved: float
    reduce: float
    copy: float
    #: how long a request takes on its way there and back; 0 if that is not known
    trip_s: float = 0.0

    @property
    def exchange(self) -> float:
        return self.push + self.pull

    @property
    def own(self) -> float:
        return max(0.0, 1.0 - self.push - self.pull - self.meet - self.reduce - self.copy)

    @property
    def waits_unseen(self) -> bool:
        """Say whether the worker does not compute, though it neither waits in Fleet nor lacks a processor."""
        return self.own >= 0.5 and self.cpu + self.delay < self.own / 2

    @property
    def own_of_a_step(self) -> float:
        return self.own / self.steps if self.steps else math.inf


@dataclass(frozen=True)
class _Case:
    before: View
    now: View
    last: View
    is_over: bool
    ending: Cause | None
    times: dict[int, _Time]
    busy: dict[str, float]

    @property
    def most_busy(self) -> float:
        return max(self.busy.values(), default=0.0)


def diagnose(before: View, now: View, last: View | None = None, ending: Cause | None = None) -> list[str]:
    """Return sentences, what matters most first: who has ended the job, where that is known, and how it does at all.

    ``last`` is the end of a record whose training lies between the other two views: it shows what was broken then.
    """
    times, busy = dict(_times(before, now)), dict(_busy(before, now))
    case = _Case(before, now, now if last is None else last, last is not None, ending, times, busy)
    lead = "At the end of the record: " if case.is_over else ""
    broken = [lead + sentence for rule in _BROKEN for sentence in rule(case)]
    slow = [sentence for rule in _SLOW for sentence in rule(case)]
    return [*_ended(ending), _overview(case), *(broken + slow or ["Nothing stands out."])]


def _times(before: View, now: View) -> Iterator[tuple[int, _Time]]:
    for index, worker in now.workers.items():
        earlier = before.workers.get(index)
        if worker.standing != "live" or earlier is None:
            continue
        rates = {name: rate(name, earlier.figures, worker.figures) for name in (*_COUNTED, *_COUNTED_BY_SOME)}
        known = {name: value for name, value in rates.items() if value is not None}
        if known.keys() >= _COUNTED:
            yield (
                index,
                _Time(
                    known["push_seconds"],
                    known["pull_seconds"],
                    known["meet_seconds"],
                    waited_shares(earlier, worker),
                    known["steps"],
                    known["cpu_seconds"],
                    known.get("delay_seconds", 0.0),
                    known.get("sent_bytes", 0.0) + known.get("received_bytes", 0.0),
                    known.get("reduce_seconds", 0.0),
                    known.get("copy_seconds", 0.0),
                    worker.figures.get("round_trip_seconds", 0.0),
                ),
            )


def _busy(before: View, now: View) -> Iterator[tuple[str, float]]:
    for name, server in now.servers.items():
        earlier = before.servers.get(name)
        share = None if earlier is None else rate("busy_seconds", earlier.figures, server.figures)
        if share is not None:
            yield name, min(share, 1.0)


def _ended(ending: Cause | None) -> Iterator[str]:
    if ending is not None and ending.process == LAUNCHER:
        yield f"The job was ended by {ending.why}."
    elif ending is not None:
        yield f"{_capital(ending.process)} ended the job: {ending.why.rstrip('.')}."


def _overview(case: _Case) -> str:
    counted = ("live", "left") if case.is_over else ("live",)
    there = [worker for worker in case.now.workers.values() if worker.standing in counted]
    told = total_speed(rows(case.before, case.now))
    speed = "how fast is not known" if told.steps is None else f"{told.steps:.3g} {told.unit} a second"
    speed += f", {told.examples:,.0f} examples a second" if told.examples else ""
    # A server that began to keep its record last may be in none of the earlier views.
    modes = {server.mode for server in case.last.servers.values() if server.mode}
    mode = f", mode {modes.pop()}" if len(modes) == 1 else ""
    paces = [server.pace for server in case.last.servers.values() if server.pace]
    pace = f" They are {paces[0]}." if paces else ""
    parts = usual_parts(case.before, case.now)
    step = f" A step: {in_words(parts)}." if has_parts(parts) else ""
    return f"{_count(len(there), 'worker')} and {_count(len(case.last.servers), 'server')}{mode}: {speed}.{pace}{step}"


# ---------------------------------------------------------------- rules: what is broken


def _servers_away(case: _Case) -> Iterator[str]:
    for name, server in case.last.servers.items():
        if not server.figures:
            yield f"{_capital(name)} {server.phase}: its log says why, or the network between."
        elif server.phase.startswith("failed") and case.ending is not None:
            continue  # for the reason that is told first
        elif server.phase != "training" and not (case.is_over and server.phase == "over"):
            yield f"{_capital(name)} is not training: {server.phase}."
        elif server.errand and not case.is_over:
            yield f"{_capital(name)} is {server.errand}."


def _workers_away(case: _Case) -> Iterator[str]:
    def standing(wanted: str) -> list[int]:
        return [index for index, worker in case.last.workers.items() if worker.standing == wanted]

    if expected := standing("expected"):
        yield f"The job waits for a first hello of {_named(expected, case)}."
    if lost := standing("lost"):
        yield f"The servers have given up on {_named(lost, case)}; the others go on."
    if case.ending is not None:
        return  # silence is no wonder then
    heard = {index: case.last.workers[index].heard_seconds or 0.0 for index in standing("live")}
    if silent := [index for index, seconds in heard.items() if seconds >= SILENT_S]:
        yield (
            f"Nothing has been heard of {_named(silent, case)} for {min(map(heard.__getitem__, silent)):.0f} s: the "
            "process may have died, or its machine be out of reach."
        )


def _stuck_for(case: _Case) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """Return which workers wait, in what and for whom."""
    stuck: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for index, worker in case.last.workers.items():
        if worker.standing == "live" and worker.wait is not None and worker.wait.seconds >= _STUCK_S:
            stuck.setdefault((worker.wait.what, worker.wait.workers), []).append(index)
    return stuck


def _stuck(case: _Case) -> Iterator[str]:
    for (what, whom), waiting in _stuck_for(case).items():
        waits = (case.last.workers[index].wait for index in waiting)
        seconds = max(wait.seconds for wait in waits if wait is not None)
        yield (
            f"{_capital(_named(waiting, case))}: for {seconds:.0f} s waiting for "
            f"{_named(whom, case) if whom else 'the server'} ({what})."
        )


def _not_finite(case: _Case) -> Iterator[str]:
    told: dict[str, dict[int, float]] = {}
    for index, worker in case.last.workers.items():
        for name, value in {"loss": worker.figures.get("loss", 0.0), **reported(worker.figures)}.items():
            if not math.isfinite(value):
                told.setdefault(name, {})[index] = value
    for name, wrong in told.items():
        values = " or ".join(sorted(set(map(str, wrong.values()))))
        todo = "FLEET_CHECK_FINITE=1 names the parameter that is to blame" if name == "loss" else "so its script says"
        yield f"The {name} of {_named(list(wrong), case)} is {values}: {todo}."


def _admits_nothing(case: _Case) -> Iterator[str]:
    servers = case.last.servers.values()
    if max((server.figures.get("version", 0.0) for server in servers), default=0.0) < _MANY_STEPS:
        return
    for table in table_rows(View(0.0), case.last):
        dropped = int(table.figures["dropped_gradients"])
        if dropped and not (table.figures["rows"] or table.figures["evicted"]):
            yield (
                f"No id has a row in the table {table.name!r} yet, and {dropped:,} gradients were dropped: its admit= "
                "asks for more than the ids come to (docs/embeddings.md#rows-that-come-and-leave)."
            )


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
    if not case.times[worst].steps:
        if worst not in {other for waiting in _stuck_for(case) for other in waiting[1]}:  # else that is told already
            yield (
                f"{_capital(_named([worst], case))} holds the others back: they wait {held[worst]:.0%} of their time "
                "for it, and it has not come to the end of a step."
            )
    elif mine > _LONGER * theirs:
        yield (
            f"{_capital(_named([worst], case))} holds the others back: they wait {held[worst]:.0%} of their time for "
            f"it. Of its own, a step takes it {_ms(mine)}, and the others {_ms(theirs)}."
        )
    elif case.most_busy < _BUSY:  # else they wait for a server in turn
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
    told = f"{_capital(busiest)} is busy {case.busy[busiest]:.0%} of the time"
    if not rest or max(rest) >= case.busy[busiest] / 2:
        yield f"{told}: more servers would share its work."
        return
    told += f" and the others {max(rest):.0%} at most"
    asked = {name: _asked(case, name) for name in case.busy}
    if asked[busiest] <= 2 * max(rows for name, rows in asked.items() if name != busiest):
        yield f"{told}: what it holds is asked for more than the rest. Another split_method may spread it."
        return
    hot = ", ".join(map(str, case.now.servers[busiest].hot[:MOST_HOT]))
    named = f", and in most requests for {hot}" if hot else ""
    yield (
        f"{told}: it is asked for {asked[busiest]:,.0f} rows a second{named}. Larger batches ask for an id once for "
        "more examples, and a table of few ids costs less as a dense embedding (docs/embeddings.md)."
    )


def _asked(case: _Case, name: str) -> float:
    """Return how many rows a second a server was asked for; 0 if that is not known."""
    return rate("asked_rows", case.before.servers[name].figures, case.now.servers[name].figures) or 0.0


def _thrashes(case: _Case) -> Iterator[str]:
    for table in table_rows(case.before, case.now):
        asked, read, missed = table.a_step("asked_rows"), table.a_step("read_bytes"), 1.0 - table.hit_rate
        if asked is not None and read is not None and missed > _READ_TOO_OFTEN:
            written = (table.a_step("written_bytes") or 0.0) / 1e6
            yield (
                f"The table {table.name!r} has {table.figures['in_memory']:,.0f} of its {table.figures['rows']:,.0f} "
                f"rows in memory, and {missed:.0%} of the {asked:,.0f} it is asked for a step have to be read from "
                f"files ({read / 1e6:.3g} MB read and {written:.3g} MB written a step): a larger FLEET_TABLE_MEMORY_MB "
                "or more servers keep more of them, fleet.prefetch reads them ahead, and admit= and evict= leave fewer "
                "(docs/embeddings.md#tables-larger-than-memory)."
            )


def _exchange(case: _Case) -> Iterator[str]:
    times = [
        (index, spent)
        for index, spent in case.times.items()
        if spent.exchange - sum(spent.waited.values()) >= _LARGE and case.most_busy < _BUSY
    ]
    if not times:
        return

    def usual(of: Callable[[_Time], float]) -> float:
        return median(of(spent) for _, spent in times)

    moved, steps = usual(lambda spent: spent.moved), usual(lambda spent: spent.steps)
    push, pull = usual(lambda spent: spent.push), usual(lambda spent: spent.pull)
    a_step = f"{moved / steps / 1e3:,.3g} kB a step" if steps else "no step came to its end"
    if not case.now.servers:
        yield (
            f"Of the time of {_named([index for index, _ in times], case)}, {push:.0%} goes into exchanging gradients, "
            f"waits for each other among it ({a_step}): larger batches or gradient_merge exchange less for an example."
        )
        return
    told = (
        f"Of the time of {_named([index for index, _ in times], case)}, {usual(lambda spent: spent.exchange):.0%} goes "
        f"into exchanges (push {push:.0%}, pull {pull:.0%}), {usual(lambda spent: sum(spent.waited.values())):.0%} of "
        f"it for other workers; the servers are busy {case.most_busy:.0%}."
    )
    trip_s, own = usual(lambda spent: spent.trip_s), usual(lambda spent: spent.exchange - sum(spent.waited.values()))
    if not steps:
        yield f"{told} No step came to its end in that time."
    elif trip_s >= max(_FAR_S, own / steps / _FEW_TRIPS):
        far = f"{told} A request takes {trip_s * 1e3:.3g} ms there and back, and a step waits for about"
        trips = max(1, round(own / steps / trip_s))
        todo = (
            "fleet.prefetch has rows come while it computes"
            if pull > push / 2
            else "the asynchronous mode with fleet.prefetch waits for no answer, and GEO exchanges once in many steps"
        )
        yield f"{far} {_count(trips, 'such way')}: {todo} (docs/network.md)."
    elif moved < steps * _FEW_BYTES:
        yield f"{told} It moves little ({a_step}), so what costs is each exchange itself: larger batches need fewer."
    else:
        prefetch = pull > push and usual(lambda spent: spent.own) >= _NOTABLE
        todo = (
            "fleet.prefetch fetches rows while it computes" if prefetch else "larger batches move less for an example"
        )
        if case.most_busy < _IDLE and usual(lambda spent: spent.cpu + spent.delay) < 1 - _IDLE - _NOTABLE:
            todo += (
                f". The network carries {moved * 8 / 1e6:,.3g} Mbit/s of it, and nobody computes much meanwhile: "
                "wire_dtype='bf16' sends half as much, and GEO once in many steps (docs/network.md)"
            )
        yield f"{told} What is left is moving {moved / 1e6:.3g} MB a second ({a_step}): {todo}."


def _averaging(case: _Case) -> Iterator[str]:
    times = {index: spent.reduce for index, spent in case.times.items() if spent.reduce >= _LARGE}
    if times:
        yield (
            f"Of the time of {_named(list(times), case)}, {median(times.values()):.0%} goes into averaging dense "
            "gradients, waits for the slowest among it: wire_dtype='bf16', larger batches, or no_sync() around "
            "backwards that only accumulate exchange less for an example."
        )


def _copies(case: _Case) -> Iterator[str]:
    times = {index: spent.copy for index, spent in case.times.items() if spent.copy >= _NOTABLE}
    if times:
        yield (
            f"Of the time of {_named(list(times), case)}, {median(times.values()):.0%} goes into copies between the "
            "host and its device: fleet.prefetch(…, device=, depth=2) makes those of rows beside the computation."
        )


def _starved(case: _Case) -> Iterator[str]:
    starved = {index: spent.delay for index, spent in case.times.items() if spent.delay >= _STARVED}
    if starved:
        yield (
            f"For {median(starved.values()):.0%} of the time the training of {_named(list(starved), case)} is ready to "
            "run and has no processor: something else computes on its machine, or there are more processes and threads "
            "(OMP_NUM_THREADS) than processors."
        )


def _waits_unseen(case: _Case) -> Iterator[str]:
    times = {index: spent for index, spent in case.times.items() if spent.waits_unseen}
    if times:
        own = median(spent.own for spent in times.values())
        cpu = median(spent.cpu for spent in times.values())
        yield (
            f"Of the time of {_named(list(times), case)}, {own:.0%} is spent in the script's own code, with "
            f"{cpu:.0%} of a processor: it waits for something that Fleet does not see, such as its data or a device."
        )


def _stale(case: _Case) -> Iterator[str]:
    means = {
        index: mean_staleness(case.before.workers.get(index), worker) for index, worker in case.now.workers.items()
    }
    stale = {index: mean for index, mean in means.items() if mean is not None and mean > 2 * max(1, len(case.times))}
    if stale:
        yield (
            f"What {_named(list(stale), case)} computed gradients on is {median(stale.values()):.3g} updates old when "
            f"they are applied, with {_count(len(case.times), 'worker')}: fewer steps in a queue (send_queue_size) or "
            "a lower learning rate lose less (docs/modes/index.md)."
        )


def _late(case: _Case) -> Iterator[str]:
    shares = {index: late_share(case.before.workers.get(index), now) for index, now in case.now.workers.items()}
    late = {index: share for index, share in shares.items() if share is not None and share >= _NOTABLY_LATE}
    if late:
        yield (
            f"Of the gradients of {_named(list(late), case)}, {max(late.values()):.0%} come too late and are dropped: "
            "a larger staleness keeps them, and as many gradients an update as there are workers makes fewer late "
            "(docs/modes/gba.md)."
        )


def _compute(case: _Case) -> Iterator[str]:
    if not case.times:
        return
    own = median(spent.own for spent in case.times.values())
    if own >= 0.8 and not any(spent.waits_unseen or spent.delay >= _STARVED for spent in case.times.values()):
        told = f"The workers are in the script's own code (data, forward, backward) {own:.0%} of the time"
        if case.now.servers:
            yield (
                f"{told}, and the servers busy {case.most_busy:.0%}: more or faster workers make the job faster, more "
                "servers do not."
            )
        else:
            yield f"{told}: more or faster workers make the job faster."


_Rules = tuple[Callable[[_Case], Iterator[str]], ...]
_BROKEN: _Rules = (_servers_away, _workers_away, _stuck, _not_finite, _admits_nothing)
_SLOW: _Rules = (
    _straggler,
    _busy_server,
    _thrashes,
    _starved,
    _exchange,
    _averaging,
    _copies,
    _waits_unseen,
    _stale,
    _late,
    _compute,
)


def _named(workers: Sequence[int], case: _Case) -> str:
    """Name workers in the order of their numbers: a single one with where it is, of many only how many."""
    if len(workers) == 1:
        label = case.now.workers[workers[0]].label if workers[0] in case.now.workers else ""
        return f"worker {workers[0]} ({label})" if label else f"worker {workers[0]}"
    if len(workers) <= _NAMED:
        *most, last = map(str, workers)
        return f"workers {', '.join(most)} and {last}"
    known = len(case.now.workers)
    return f"all {known} workers" if len(workers) == known else f"{len(workers)} of {known} workers"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds >= _LEAST_S else f"less than {1000 * _LEAST_S:g} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
