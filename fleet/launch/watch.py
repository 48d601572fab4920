"""When a job is over and with which exit code: events in, effects out; whoever calls has the clock and the processes.

A job runs until a process fails, somebody interrupts it, or all its processes have ended. Servers that are still there
a grace period after the last worker are asked to end. Ending is SIGTERM to all, a grace period, then SIGKILL.
The first event that ends the job decides the exit code; what the dying processes return says nothing.

A process that was killed by a signal may be started again, so many times each. One that ended with an exit code has
failed by itself: it has told the job so, and would fail again.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGINT, SIGKILL, SIGTERM, Signals
from typing import TypeAlias

from fleet.cluster import Role
from fleet.launch.job import LaunchPlan, ProcessSpec


@dataclass(frozen=True)
class Say:
    """A line for the person at the terminal."""

    text: str


@dataclass(frozen=True)
class Send:
    """A signal to every process group of the job."""

    signal: Signals


@dataclass(frozen=True)
class Restart:
    """Start a process again."""

    process: ProcessSpec


Effect: TypeAlias = Say | Send | Restart


class Watch:
    """``deadline`` is the instant at which ``elapsed`` has something to do, if any."""

    def __init__(self, plan: LaunchPlan, *, grace_s: float, log_dir: str, max_restarts: int = 0) -> None:
        self.exit_code = 0
        self.deadline: float | None = None
        self._plan = plan
        self._grace_s = grace_s
        self._log_dir = log_dir
        self._alive = list(plan.processes)
        self._ending = False
        self._max_restarts = max_restarts
        self._restarts = {process.name: 0 for process in plan.processes}

    @property
    def done(self) -> bool:
        return not self._alive

    def exited(self, process: ProcessSpec, returncode: int, now: float) -> list[Effect]:
        """``returncode`` is negative for a signal, as in ``subprocess``."""
        if returncode < 0 and not self._ending and self._restarts[process.name] < self._max_restarts:
            self._restarts[process.name] += 1
            count = f"restart {self._restarts[process.name]} of {self._max_restarts}"
            return [Say(f"{process.name} was {how_ended(returncode)}; starting it again ({count})"), Restart(process)]
        self._alive.remove(process)
        if returncode != 0:
            return self._failed(process, returncode, now)
        workers_left = [other for other in self._alive if other.role is Role.WORKER]
        if self._ending or not self._alive or not self._plan.has_every_worker:
            return []
        if workers_left and process.role is Role.SERVER:
            return [Say(f"{process.name} has ended; {_names(workers_left)} still running")]
        if not workers_left and self.deadline is None:
            self.deadline = now + self._grace_s
        return []

    def interrupted(self, signum: Signals, now: float) -> list[Effect]:
        if not self._ending:
            self.exit_code = 128 + signum
            return [Say(f"{signum.name}: ending {_names(self._alive)}; Ctrl-C kills at once"), *self._end(now)]
        if signum == SIGINT:
            return self._kill(f"killing {_names(self._alive)}")
        return []

    def elapsed(self, now: float) -> list[Effect]:
        if self.deadline is None or now < self.deadline:
            return []
        if self._ending:
            return self._kill(f"{_names(self._alive)} still there {self._grace_s:g} s after SIGTERM: killing")
        late = f"{_names(self._alive)} still running {self._grace_s:g} s after the last worker ended"
        return [Say(f"{late}: ending with SIGTERM"), *self._end(now)]

    def _failed(self, process: ProcessSpec, returncode: int, now: float) -> list[Effect]:
        if self.exit_code != 0:
            return []
        self.exit_code = returncode if returncode > 0 else 128 - returncode
        where = f"its output is in {self._log_dir}/{process.log_name}"
        if self._ending:  # only servers that outstayed the workers end with an exit code still to be found
            return [Say(f"{process.name} did not end cleanly: {how_ended(returncode)}; {where}")]
        failure = f"{process.name} failed: {how_ended(returncode)}; {where}"
        others = f"; ending {_names(self._alive)}" if self._alive else ""
        return [Say(failure + others), *self._end(now)]

    def _end(self, now: float) -> list[Effect]:
        self._ending = True
        self.deadline = now + self._grace_s
        return [Send(SIGTERM)]

    def _kill(self, reason: str) -> list[Effect]:
        self.deadline = None
        return [Say(reason), Send(SIGKILL)]


def how_ended(returncode: int) -> str:
    """In words; ``returncode`` is negative for a signal."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = Signals(-returncode).name
    except ValueError:  # a real-time signal has a number only
        name = f"signal {-returncode}"
    hint = ", as the kernel does when memory runs out" if returncode == -SIGKILL else ""
    return f"killed by {name}{hint} (exit code {128 - returncode})"


def _names(processes: list[ProcessSpec]) -> str:
    """``server 0, worker 0 and worker 1``; of many, a few and a number."""
    names = [process.name for process in processes]
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "nothing"
