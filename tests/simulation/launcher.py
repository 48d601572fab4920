"""Lets the real launcher decide when a process is started again, when a job is ended, and with which exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Protocol

from fleet.launch.process_plan import LaunchPlan, ProcessSpec
from fleet.launch.watch import Effect, Restart, Say, Watch
from fleet.role_maker import Role
from fleet.telemetry.cause import Cause, claim, claimed

from .scheduler import Scheduler

#: What fleetrun gives processes to end, if nothing else is said.
_GRACE_S = 10.0
JOB = "simulated"


class Launched(Protocol):
    """Is a process that has a launcher, under whichever number it runs now."""

    name: str

    @property
    def is_there(self) -> bool: ...

    def start(self) -> None: ...

    def signal(self, number: Signals) -> None: ...


@dataclass
class Verdict:
    """Is what a launcher has come to."""

    is_done: bool = False
    exit_code: int = 0
    #: who has ended the job, and why, if it did not end by itself
    cause: Cause | None = None
    #: what each process has ended with that was not started again
    codes: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    #: processes that were still there when the launcher had done
    outlived: list[str] = field(default_factory=list)


class Launcher:
    """Looks after the processes of one machine: carries out what a ``Watch`` decides of them."""

    def __init__(
        self,
        scheduler: Scheduler,
        processes: Sequence[Launched],
        workers: int,
        max_restarts: int,
        records: Path,
        woken: Callable[[], None],
    ) -> None:
        """The whole job has so many ``workers``; causes are noted in ``records``; ``woken`` is called in the end."""
        self.verdict = Verdict()
        self._scheduler = scheduler
        self._records = records
        self._woken = woken
        specs = [_spec(each.name) for each in processes]
        self._processes = {spec.name: each for spec, each in zip(specs, processes, strict=True)}
        self._specs = {each.name: spec for spec, each in zip(specs, processes, strict=True)}
        plan = LaunchPlan(tuple(specs), workers)
        self._watch = Watch(plan, grace_s=_GRACE_S, log_dir="logs", max_restarts=max_restarts)

    def exited(self, name: str, returncode: int, *, broke_off: bool) -> None:
        """Hear that a process has ended, as ``Watch`` does."""
        spec, cause = self._specs[name], claimed(self._records)
        self.verdict.codes[spec.name] = returncode
        self._act(self._watch.exited(spec, returncode, self._scheduler.now, cause, broke_off=broke_off))

    def _elapsed(self, deadline: float) -> None:
        if self._watch.deadline == deadline and not self._watch.done:  # it may have been put off
            self._act(self._watch.elapsed(deadline))

    def _act(self, effects: Sequence[Effect]) -> None:
        watch, verdict = self._watch, self.verdict
        if watch.verdict is not None:  # before anybody is signalled
            claim(str(self._records), JOB, watch.verdict.process, watch.verdict.why)
        deadline = watch.deadline
        if deadline is not None:
            self._scheduler.at(deadline - self._scheduler.now, partial(self._elapsed, deadline))
        for effect in effects:
            if isinstance(effect, Say):
                verdict.said.append(effect.text)
            elif isinstance(effect, Restart):
                del verdict.codes[effect.process.name]
                self._processes[effect.process.name].start()
            else:
                for process in self._processes.values():
                    process.signal(effect.signal)
        if watch.done and not verdict.is_done:
            verdict.is_done, verdict.exit_code, verdict.cause = True, watch.exit_code, watch.verdict
            verdict.outlived = [each.name for each in self._processes.values() if each.is_there]
            self._woken()


def _spec(name: str) -> ProcessSpec:
    kind = name.rstrip("0123456789")
    return ProcessSpec(Role.WORKER if kind == "worker" else Role.SERVER, int(name[len(kind) :]), (), {})
