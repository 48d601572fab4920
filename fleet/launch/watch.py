"""Decides when a job is over and with which exit code: events in, effects out; the caller has clock and processes.

A job runs until a process fails, somebody interrupts it, or all its processes have ended. Servers that are still there
a grace period after the last worker are asked to end. Ending is SIGTERM to all, a grace period, then SIGKILL.
What ends the job decides the exit code; what the dying processes return says nothing.

One failure brings others about, and whose exit is seen first is chance. So a process that has failed by itself has put
that down (``fleet.telemetry.cause``). Its exit code is the job's, even if it is still on its way when another one's
comes. Without such a note the first exit code is the job's.

A process that was killed by a signal may be started again, so many times for each. A process that ended with an exit
code has failed by itself: it has told the job so, and would fail again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals
from typing import TypeAlias

from fleet.base.cluster import Role
from fleet.launch.process_plan import LaunchPlan, ProcessSpec
from fleet.telemetry.cause import LAUNCHER, Cause

#: How long a process that has failed may take to end after those whom it told.
_ON_ITS_WAY_S = 10.0
_BROKE_OFF = "it ended in the midst of its job, without fleet.stop_worker(), which has to be called after the training"


@dataclass(frozen=True)
class Say:
    """Asks to show a line to the person at the terminal."""

    text: str


@dataclass(frozen=True)
class Send:
    """Asks to send a signal to every process group of the job."""

    signal: Signals


@dataclass(frozen=True)
class Restart:
    """Asks to start a process again."""

    process: ProcessSpec


Effect: TypeAlias = Say | Send | Restart


class Watch:
    """Decides when a job is over. ``deadline`` is the instant at which ``elapsed`` has something to do, if any."""

    def __init__(self, plan: LaunchPlan, *, grace_s: float, log_dir: str, max_restarts: int = 0) -> None:
        self.exit_code = 0
        #: of the processes here, the one whose output tells why the job failed
        self.culprit: ProcessSpec | None = None
        #: who has ended the job, and why; known before anybody is signalled
        self.verdict: Cause | None = None
        self.deadline: float | None = None
        self._plan = plan
        self._grace_s = grace_s
        self._log_dir = log_dir
        self._alive = list(plan.processes)
        self._exits: dict[str, int] = {}
        self._ending = False
        self._first_failed: ProcessSpec | None = None
        self._cause: Cause | None = None
        self._awaits_cause = False
        self._has_enough = False
        self._max_restarts = max_restarts
        self._restarts = {process.name: 0 for process in plan.processes}

    @property
    def done(self) -> bool:
        return not self._alive

    @property
    def failing(self) -> bool:
        """Say whether the job is known to end badly, and not because the user wished it."""
        return self._first_failed is not None

    def exited(
        self,
        process: ProcessSpec,
        returncode: int,
        now: float,
        cause: Cause | None = None,
        *,
        broke_off: bool = False,
    ) -> list[Effect]:
        """Take note that a process ended. ``returncode`` is negative for a signal, as in ``subprocess``; ``cause`` is
        what a process has put down; ``broke_off`` says that this one ended as part of a job, without having left it."""
        may_come_back = returncode < 0 and cause is None and not self._ending
        if may_come_back and self._restarts[process.name] < self._max_restarts:
            self._restarts[process.name] += 1
            count = f"restart {self._restarts[process.name]} of {self._max_restarts}"
            return [Say(f"{process.name} was {how_ended(returncode)}; starting it again ({count})"), Restart(process)]
        self._alive.remove(process)
        self._exits[process.name] = returncode
        if self._ending:
            return self._ended_late(process, returncode)
        if broke_off and cause is None and returncode == 0:
            cause = Cause(process.name, _BROKE_OFF)
        self._cause = cause
        if self._first_failed is None and (returncode != 0 or (cause is not None and cause.process == process.name)):
            self._first_failed = process
        if self._first_failed is not None:
            return self._judge(self._first_failed, now)
        workers_left = any(other.role is Role.WORKER for other in self._alive)
        if self._alive and self._plan.has_every_worker and not workers_left and self.deadline is None:
            self.deadline = now + self._grace_s
        return []

    def enough(self, now: float) -> list[Effect]:
        """End a job that has done what it was started for."""
        self._has_enough = True
        self.verdict = Cause(LAUNCHER, "it has done enough")
        return self._end(now)

    def interrupted(self, signum: Signals, now: float) -> list[Effect]:
        if self._has_enough:  # it ends, and was meant to
            self._has_enough, self.exit_code = False, 128 + signum
        if not self._ending:
            self.exit_code = 128 + signum
            self.verdict = Cause(LAUNCHER, f"{signum.name}{' (Ctrl-C)' * (signum == SIGINT)}")
            return [Say(f"{signum.name}: ending {named(self._alive)}; Ctrl-C kills at once"), *self._end(now)]
        if signum == SIGINT:
            return self._kill(f"killing {named(self._alive)}")
        return []

    def elapsed(self, now: float) -> list[Effect]:
        if self.deadline is None or now < self.deadline:
            return []
        if self._ending:
            return self._kill(f"{named(self._alive)} still there {self._grace_s:g} s after SIGTERM: killing")
        if self._first_failed is not None:
            return self._fail(self._first_failed, now)
        late = f"{named(self._alive)} still running {self._grace_s:g} s after the last worker ended"
        return [Say(f"{late}: ending with SIGTERM"), *self._end(now)]

    def _ended_late(self, process: ProcessSpec, returncode: int) -> list[Effect]:
        """Judge the end of a server that outstayed the workers; only such ends come after the job's exit code is
        found."""
        if returncode == 0 or self.exit_code != 0 or self._has_enough:
            return []
        self.exit_code = _as_exit_code(returncode)
        return [Say(f"{process.name} did not end cleanly: {how_ended(returncode)}; {self._where(process)}")]

    def _judge(self, first: ProcessSpec, now: float) -> list[Effect]:
        """Fail the job, as ``first`` was seen to fail: name the process that caused it, or wait for its end."""
        cause = self._cause
        if cause is not None and any(process.name == cause.process for process in self._alive):
            self.deadline = self.deadline if self._awaits_cause else now + _ON_ITS_WAY_S
            self._awaits_cause = True
            return []
        return self._fail(first, now)

    def _fail(self, first: ProcessSpec, now: float) -> list[Effect]:
        cause = self._cause
        name = first.name if cause is None else cause.process
        here = {process.name: process for process in self._plan.processes}
        self.culprit = here.get(name, first)
        own = self._exits.get(name)
        # It may have told the others that it failed and ended as if nothing were amiss, or belong to another machine.
        self.exit_code = _as_exit_code(own or self._exits[first.name]) if own != 0 else 1
        why = "" if cause is None else cause.why
        ended = "" if not own else how_ended(own)
        told = f"{ended} ({why})" if ended and why else ended or why
        elsewhere = "" if name in here else f", of another machine, and {first.name} here with it"
        self.verdict = Cause(name, why or ended)
        others = f"; ending {named(self._alive)}" if self._alive else ""
        return [Say(f"{name}{elsewhere} failed: {told}; {self._where(self.culprit)}{others}"), *self._end(now)]

    def _where(self, process: ProcessSpec) -> str:
        return f"its output is in {self._log_dir}/{process.log_name}"

    def _end(self, now: float) -> list[Effect]:
        self._ending = True
        self.deadline = now + self._grace_s
        return [Send(SIGTERM)]

    def _kill(self, reason: str) -> list[Effect]:
        self.deadline = None
        return [Say(reason), Send(SIGKILL)]


def _as_exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def how_ended(returncode: int) -> str:
    """Return in words how a process ended; ``returncode`` is negative for a signal."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = Signals(-returncode).name
    except ValueError:  # a real-time signal has a number only
        name = f"signal {-returncode}"
    hint = ", as the kernel does when memory runs out" if returncode == -SIGKILL else ""
    return f"killed by {name}{hint} (exit code {128 - returncode})"


def good_end(
    plan: LaunchPlan, seconds: float, steps: Sequence[int], logs: str, records: str, time_went_into: str = ""
) -> str:
    """Return the last line of a job that went well. ``steps`` are those of each worker here that has reported some."""
    workers = sum(process.role is Role.WORKER for process in plan.processes)
    parts = [f"{workers} worker{'s' * (workers != 1)}"]
    if steps:
        most, unit = max(steps), f"step{'s' * (max(steps) != 1)}"
        if len(steps) < workers:
            parts.append(f"up to {most:,} {unit} told of")
        elif min(steps) < most:
            parts.append(f"{min(steps):,} to {most:,} {unit}")
        else:
            parts.append(f"{most:,} {unit}{' each' * (workers > 1)}")
    shown = f", fleet report {records}" if steps else ""
    if time_went_into:
        parts[-1] += f" ({time_went_into})"
    return f"done in {_duration(seconds)}: {', '.join(parts)}; logs in {logs}{shown}"


def state_stays(folders: Sequence[Path], job_id: str) -> str:
    """Return what to do with the folders of durable servers that their job has left behind."""
    names = ", ".join(folder.name for folder in folders)
    return (
        f"what the servers kept of this job stays in {folders[0].parent} ({names}): remove that, or go on with the job "
        f"as FLEET_JOB_ID={job_id}, at the same ports (--start_port)"
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def named(processes: list[ProcessSpec]) -> str:
    """Return ``server 0, worker 0 and worker 1``; of many processes, a few and a number."""
    names = [process.name for process in processes]
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "nothing"
