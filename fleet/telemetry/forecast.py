"""Predicts what a job would cost with other numbers of servers and workers, from what two small ones have cost.

Pure. One worker at one server shows what a step costs where nobody is in the way; two at two, what each further server
adds, and how much processes on one machine hold each other up. docs/scaling.md explains the arithmetic, and
benchmarks/needs.py checks it.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import mean

from fleet.telemetry.record import Line

#: The first steps are not counted: what is compiled and filled then is done once.
SETTLING_S = 2.0
#: Figures are recorded once a second, so that a shorter time says little.
LEAST_S = 3.0
#: A server that is busy for a larger part of the time is what a job waits for; so is a network.
_FULL = 0.75
#: So little time in looking rows up means that they were there before they were asked for.
_FORESEEN = 0.02


#: So much more, or less, is received than further servers add in headers.
_MIXED = 0.2


class Limit(Enum):
    """Says what would have to be faster for a job to be."""

    COMPUTING = "workers computing"
    ANSWERS = "waiting for answers"
    SERVERS = "servers"
    NETWORK = "network"
    PROCESSORS = "this machine"


@dataclass(frozen=True)
class Observed:
    """Holds what a job showed. Seconds and bytes are those of one worker's step in the mean; those of servers, of all
    together. ``server_bytes`` is the memory of one server but for its tables, and ``growth`` has how many rows there
    were after how many steps."""

    servers: int
    workers: int
    mode: str
    in_rounds: bool
    steps: float
    step_s: float
    pull_s: float
    push_s: float
    reduce_s: float
    worker_cpu_s: float
    server_cpu_s: float
    busy_s: float
    sent_bytes: float
    received_bytes: float
    worker_bytes: float
    server_bytes: float
    table_bytes: float
    has_files: bool
    growth: tuple[tuple[float, float], ...]
    examples: float

    @property
    def own_s(self) -> float:
        """Return what a step takes beside waiting for servers and other workers."""
        return max(0.0, self.step_s - self.exchange_s - self.reduce_s)

    @property
    def exchange_s(self) -> float:
        return self.pull_s + self.push_s


def observed(lines: Sequence[Line]) -> Observed | None:
    """Return what the records of a job show of its training; None if that was too short."""
    workers, servers = _by_process(lines, "worker"), _by_process(lines, "server")
    trained = [[line for line in each if line.told.get("steps", 0) > 0] for each in workers]
    if not servers or not workers or not all(trained):
        return None
    begin = max(each[0].at for each in trained) + SETTLING_S
    # What a process writes as it leaves may lie long after its last step.
    end = min(max((line.at for line in each if not line.is_last), default=0.0) for each in (*trained, *servers))
    if end - begin < LEAST_S:
        return None

    def grown(processes: Sequence[Sequence[Line]], of: Callable[[Line], float]) -> float:
        return sum(_at(each, of, end) - _at(each, of, begin) for each in processes)

    steps = grown(workers, _own("steps"))
    if steps <= 0:
        return None

    def a_step(processes: Sequence[Sequence[Line]], of: Callable[[Line], float]) -> float:
        return grown(processes, of) / steps

    seconds = end - begin
    instants = [line.at for line in servers[0] if trained[0][0].at <= line.at <= end]
    first = workers[0][-1].told
    status = servers[0][-1].told
    return Observed(
        servers=len(servers),
        workers=len(workers),
        mode=str(status.get("mode", "")),
        in_rounds=bool(first.get("lockstep", 0)),
        steps=sum(_at(each, _own("steps"), end) for each in workers),
        step_s=len(workers) * seconds / steps,
        pull_s=a_step(workers, _own("pull_seconds")),
        push_s=a_step(workers, _own("push_seconds")),
        reduce_s=a_step(workers, _own("reduce_seconds")),
        worker_cpu_s=a_step(workers, _own("cpu_seconds")),
        server_cpu_s=a_step(servers, _of_server("cpu_seconds")),
        busy_s=a_step(servers, _of_server("busy_seconds")),
        sent_bytes=a_step(workers, _own("sent_bytes")),
        received_bytes=a_step(workers, _own("received_bytes")),
        worker_bytes=mean(_at(each, _own("memory_bytes"), end) for each in workers),
        server_bytes=mean(
            _at(each, _of_server("memory_bytes"), end) - _at(each, _of_tables("bytes"), end) for each in servers
        ),
        table_bytes=sum(_at(each, _of_tables("bytes"), end) for each in servers),
        has_files=any(_of_tables("on_disk")(each[-1]) for each in servers),
        growth=tuple(
            (
                sum(_at(each, _own("steps"), at) for each in workers),
                sum(_at(each, _of_tables("rows"), at) for each in servers),
            )
            for at in instants
        ),
        examples=a_step(workers, _own("examples")),
    )


@dataclass(frozen=True)
class Site:
    """Describes where a job is to run: on machines with so many processors that no process is in another's way, and
    with this network between; or with ``cores`` on one machine, and none between."""

    bytes_a_second: float = 10e9 / 8
    round_trip_s: float = 0.2e-3
    cores: int | None = None


@dataclass(frozen=True)
class Forecast:
    """Predicts a job. ``rate`` is in steps a second, those of all workers added up; ``examples`` a second is 0 where
    the script reports none. Memory is that of one worker, and of one server; ``network`` in bytes a second is what one
    server has to send or to receive, whichever is more."""

    servers: int
    workers: int
    step_s: float
    rate: float
    examples: float
    sent_bytes: float
    received_bytes: float
    network: float
    worker_bytes: float
    server_bytes: float
    limit: Limit


class Costs:
    """Holds what a step costs, by the numbers of servers and workers."""

    def __init__(self, one: Observed, two: Observed, cores: int, interference: float | None = None) -> None:
        """``one`` is a job of one server and one worker, ``two`` one of two and two, on a machine with ``cores``.
        ``interference`` is how many times as long a step took there as the work on these processors accounts for, if
        that is known."""
        self.one, self.two, self._cores = one, two, cores
        # Processes that share caches and processors take longer for the same; what servers add is not that.
        crowding = max(1.0, two.worker_cpu_s / one.worker_cpu_s) if one.worker_cpu_s > 0 else 1.0
        self._server_cpu_more = max(0.0, two.server_cpu_s / crowding - one.server_cpu_s)
        self._busy_more = max(0.0, two.busy_s / crowding - one.busy_s)
        if interference is None:
            interference = min(3.0, max(1.0, two.step_s / self._sharing(2, 2, cores)[0]))
        self._interference = interference

    def server_cpu_s(self, servers: int) -> float:
        """Return the processor time of all servers for one worker's step."""
        return self.one.server_cpu_s + (servers - 1) * self._server_cpu_more

    def serving_s(self, servers: int) -> float:
        """Return for how long one server is taken by one worker's step."""
        return (self.one.busy_s + (servers - 1) * self._busy_more) / servers

    @property
    def is_mixed(self) -> bool:
        """Say whether further workers may be the reason for other bytes, and not further servers alone."""
        return abs(self.two.received_bytes - self.one.received_bytes) > _MIXED * max(1.0, self.one.received_bytes)

    @property
    def growth(self) -> Sequence[tuple[float, float]]:
        """Return how many rows there were after how many steps, in the job that has taken more."""
        known = [each.growth for each in (self.one, self.two) if each.growth]
        return max(known, key=lambda growth: growth[-1], default=((0.0, 0.0),))

    @property
    def growth_power(self) -> float:
        """Return by which power of the steps the rows grow: 1 where every step brings as many new ones, 0 where none
        come any more."""
        steps, rows = self.growth[-1]
        half = _between([each[0] for each in self.growth], [each[1] for each in self.growth], steps / 2)
        return min(1.0, math.log2(rows / half)) if half > 0 else 1.0

    def rows_after(self, steps: float) -> float:
        """Return how many rows there are after so many steps of all workers together."""
        reached, rows = self.growth[-1]
        return rows * (steps / reached) ** self.growth_power if rows else 0.0

    @property
    def row_bytes(self) -> float:
        """Return the memory of a row, with what finds it and room to grow."""
        rows = self.one.growth[-1][1] if self.one.growth else 0.0
        return self.one.table_bytes / rows if rows else 0.0

    def server_bytes(self, servers: int, workers: int, rows: float) -> float:
        """Return the memory of one of the servers when there are so many rows."""
        shared = max(0.0, 2 * (self.one.server_bytes - self.two.server_bytes))
        tables = self.one.table_bytes if self.one.has_files else rows * self.row_bytes / servers
        # A round keeps the gradients of all until the last has come.
        waiting = (workers - 1) * self.one.sent_bytes / servers if self.one.in_rounds else 0.0
        return self.one.server_bytes - shared + shared / servers + tables + waiting

    def forecast(self, servers: int, workers: int, site: Site, rows: float = 0.0) -> Forecast:
        if site.cores is None:
            step_s, limit = self._apart(servers, workers, site)
        else:
            step_s, limit = self._together(servers, workers, site.cores)
        rate = workers / step_s
        sent, received = (
            one + (servers - 1) * max(0.0, two - one)
            for one, two in (
                (self.one.sent_bytes, self.two.sent_bytes),
                (self.one.received_bytes, self.two.received_bytes),
            )
        )
        return Forecast(
            servers=servers,
            workers=workers,
            step_s=step_s,
            rate=rate,
            examples=rate * self.one.examples,
            sent_bytes=sent,
            received_bytes=received,
            network=max(sent, received) * rate / servers,
            worker_bytes=max(self.one.worker_bytes, self.two.worker_bytes),
            server_bytes=self.server_bytes(servers, workers, rows),
            limit=limit,
        )

    def of_kind(self, in_rounds: bool) -> Costs:
        """Return what would be the costs if workers took their steps together, or each its own. Not measured: gradients
        are taken to wait as long for their bytes as rows do, or not at all."""

        def other(each: Observed) -> Observed:
            if each.in_rounds == in_rounds:
                return each
            push_s = each.pull_s * each.sent_bytes / each.received_bytes if in_rounds and each.received_bytes else 0.0
            push_s = max(push_s, each.push_s) if in_rounds else 0.0
            return replace(
                each,
                in_rounds=in_rounds,
                push_s=push_s,
                step_s=each.step_s - each.push_s + push_s,
            )

        return Costs(other(self.one), other(self.two), self._cores, self._interference)

    def _apart(self, servers: int, workers: int, site: Site) -> tuple[float, Limit]:
        serving = self.serving_s(servers)
        up, down = (
            each * max(1.0, workers / servers) / site.bytes_a_second
            for each in (self.one.sent_bytes, self.one.received_bytes)
        )
        # Beside what the server does for it: the worker's own share of an exchange, and the way there and back.
        talking = max(0.0, self.one.exchange_s - self.one.busy_s)
        reducing = self.two.reduce_s if workers > 1 else self.one.reduce_s
        if self.one.in_rounds:
            # All ask at once, and nobody goes on before the last has been answered.
            trips = (1 if self.one.pull_s < _FORESEEN * self.one.step_s else 2) * site.round_trip_s
            parts = {
                Limit.COMPUTING: self.one.own_s,
                Limit.SERVERS: workers * serving,
                Limit.NETWORK: up + down,
                Limit.ANSWERS: talking + trips + reducing,
            }
            return sum(parts.values()), max(parts, key=lambda limit: parts[limit])
        is_foreseen = self.one.pull_s < _FORESEEN * self.one.step_s
        wire = max(self.one.sent_bytes, self.one.received_bytes) / servers / site.bytes_a_second
        on_wire = 0.0 if is_foreseen else self.one.received_bytes / servers / site.bytes_a_second
        step_s = _step_with_queues(
            self._thinking_s + (0.0 if is_foreseen else site.round_trip_s) + reducing,
            (_Queue(serving, self._awaited * serving), _Queue(wire, on_wire)),
            workers,
        )
        used = {Limit.SERVERS: workers / step_s * serving, Limit.NETWORK: workers / step_s * wire}
        fullest = max(used, key=lambda limit: used[limit])
        if used[fullest] > _FULL:
            return step_s, fullest
        return step_s, Limit.COMPUTING if self.one.own_s >= step_s / 2 else Limit.ANSWERS

    @property
    def _awaited(self) -> float:
        """Return for which part of a server's work a worker waits that takes its steps alone: for looking rows up, and
        for gradients only as far as it may not run ahead of them."""
        return min(1.0, self.one.exchange_s / self.one.busy_s) if self.one.busy_s > 0 else 0.0

    @property
    def _thinking_s(self) -> float:
        """Return what such a worker's step takes beside that."""
        return max(0.0, self.one.step_s - self.one.reduce_s - self._awaited * self.one.busy_s)

    def _together(self, servers: int, workers: int, cores: int) -> tuple[float, Limit]:
        step_s, limit = self._sharing(servers, workers, cores)
        if workers + servers <= cores:
            return step_s, limit
        # As much of it as there are more processes than processors, up to what the second job had.
        crowd = min(1.0, (workers + servers - cores) / max(1, self.two.workers + self.two.servers - cores))
        return step_s * (1.0 + (self._interference - 1.0) * crowd), Limit.PROCESSORS

    def _sharing(self, servers: int, workers: int, cores: int) -> tuple[float, Limit]:
        """Return how long a step takes if work is all that processes have to wait for."""
        if not self.one.in_rounds:
            serving, cpu = self.serving_s(servers), self.one.worker_cpu_s + self.server_cpu_s(servers)
            step_s = _step_with_queues(self._thinking_s, (_Queue(serving, self._awaited * serving),), workers)
            shared = workers * cpu / cores
            return max(step_s, shared), Limit.PROCESSORS if shared > _FULL * step_s else Limit.COMPUTING
        working = (self.one.step_s - self.one.busy_s) * max(1.0, workers / cores)
        serving = workers * self.serving_s(servers) * max(1.0, servers / cores)
        return working + serving, Limit.SERVERS if serving > working else Limit.COMPUTING


@dataclass(frozen=True)
class _Queue:
    """Describes what workers queue for: how long one step takes it up, and how much of that its worker waits for."""

    taken_s: float
    awaited_s: float


def _step_with_queues(thinking_s: float, queues: Sequence[_Queue], workers: int) -> float:
    """Return how long a step takes when workers queue for these, after thinking for so long.

    Where workers wait for all that they ask for this is mean value analysis: who comes as the last of some finds the
    queues that there are without it. What they do not wait for is in the way of others all the same.
    """
    queued = [0.0] * len(queues)
    step_s = thinking_s
    for present in range(1, workers + 1):
        waits = sum(queue.awaited_s * (1.0 + others) for queue, others in zip(queues, queued, strict=True))
        step_s = max(thinking_s + waits, *(present * queue.taken_s for queue in queues))
        queued = [
            min(present, present / step_s * queue.taken_s * (1.0 + others)) if step_s else 0.0
            for queue, others in zip(queues, queued, strict=True)
        ]
    return step_s


def _by_process(lines: Sequence[Line], kind: str) -> list[list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line.kind == kind:
            found.setdefault(line.process, []).append(line)
    return list(found.values())


def _own(name: str) -> Callable[[Line], float]:
    return lambda line: float(line.told.get(name, 0.0))


def _of_server(name: str) -> Callable[[Line], float]:
    return lambda line: float(line.told["figures"].get(name, 0.0))


def _of_tables(name: str) -> Callable[[Line], float]:
    def total(line: Line) -> float:
        tables: Mapping[str, Mapping[str, float]] = line.told.get("tables", {})
        return float(sum(table.get(name, 0) for table in tables.values()))

    return total


def _at(lines: Sequence[Line], of: Callable[[Line], float], at: float) -> float:
    return _between([line.at for line in lines], [of(line) for line in lines], at)


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at a place between those that are known; beyond the ends, the nearest."""
    after = bisect(places, at)
    if after in (0, len(places)):
        return values[max(0, after - 1)]
    begin, end = places[after - 1], places[after]
    part = (at - begin) / (end - begin)
    return values[after - 1] + part * (values[after] - values[after - 1])
