"""Saves checkpoints from time to time: decides when one is due, of which kind it is, and which older ones may go.

The first worker decides and saves, in every kind of job, so nobody has to agree on a time. With servers it trains on as
soon as they let it: they write their shares beside the training, and a thread here waits for them and adds the
manifest. In a collective job the others wait in their next step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from fleet.api import Fleet
from fleet.base import checks
from fleet.base.clock import Clock, SystemClock
from fleet.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    MissedError,
    ServersMovedError,
    StateError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from os import PathLike

    from fleet.checkpoint.places import Place
    from fleet.ps.worker.checkpoint_save import Rest

_log = logging.getLogger("fleet.checkpoint")

#: What a thread is called, before the place it writes to.
_THREAD = "fleet-checkpoint "
#: What is being written has to be done within so many seconds, unless it is said otherwise.
_WITHIN_S = 600.0


@dataclass
class Schedule:
    """Decides when a checkpoint is due, and of which kind it is. Pure."""

    every_steps: int | None
    every_s: float | None
    full_every: int
    #: of the last one, or of the beginning
    step: int
    at: float
    #: how many were written from the last full one on; 0: there is none
    written: int = 0
    #: one has to be made up for: it was missed, or became due while another was being written
    missed: bool = False

    def is_due(self, step: int, now: float) -> bool:
        """Say whether a checkpoint is due: at multiples of ``every_steps``, or at the first step after a missed one; or
        ``every_s`` after the last one was begun."""
        self.step = min(self.step, step)  # a job that has loaded another state has gone back
        by_steps = self.every_steps is not None and step // self.every_steps > self.step // self.every_steps
        by_time = self.every_s is not None and now - self.at >= self.every_s
        return step > self.step and (by_steps or by_time or self.missed)

    def following(self, step: int, now: float) -> int | None:
        """Return the next step after which a checkpoint will be due, as far as that is known."""
        if self.is_due(step + 1, now):
            return step + 1
        return None if self.every_steps is None else (step // self.every_steps + 1) * self.every_steps

    @property
    def mode(self) -> str:
        return "delta" if 0 < self.written < self.full_every else "full"

    def begin(self, step: int, now: float) -> None:
        self.step, self.at, self.missed = step, now, False

    def end(self, mode: str) -> None:
        """Note that a checkpoint has been written."""
        self.written = self.written + 1 if mode == "delta" else 1


class Checkpoints:
    """Saves a job into ``root/step-00000120`` and so on. Used as a context, it waits at the end for the last
    checkpoint.

    Every worker has one and calls ``after_step()`` after every step of its optimizer.

    Examples:
        >>> with fleet.Checkpoints("ckpt/run", every_steps=2, keep_last=3, background=False) as checkpoints:
        ...     for _ in range(5):
        ...         optimizer.minimize(loss())
        ...         checkpoints.after_step()
        >>> fleet.Checkpoints.latest("ckpt/run")[-13:]
        'step-00000004'
    """

    #: The job that is meant where none is given: that of the functions of ``import fleet``.
    default: ClassVar[Fleet]

    def __init__(
        self,
        root: str | PathLike[str],
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep_last: int | None = None,
        full_every: int = 1,
        background: bool | None = None,
        state: dict[str, Any] | None = None,
        fleet: Fleet | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``root`` is a directory, or a URL that fsspec knows. A checkpoint is due every ``every_steps`` steps of the
        first worker, or every ``every_s`` seconds, whichever comes first. Of each ``full_every`` checkpoints in a row,
        the first is full and the others are deltas. ``keep_last`` removes older checkpoints, except those that the
        remaining ones go on from.

        ``background=None`` goes on training while a checkpoint is written, wherever the mode allows that; False never
        does, and True insists on it. ``state`` is what else belongs to the job, as ``load_state`` takes it: every
        worker hands over its own, and calls ``after_step()`` when that is as it should be. Create it after
        ``init_worker()``; ``clock`` stands in for the machine's (tests, simulations).
        """
        job = Checkpoints.default if fleet is None else fleet
        if not isinstance(job, Fleet):
            raise ArgumentTypeError("fleet must be a fleet.Fleet or None", got=type(job).__name__)
        if background not in (None, True, False):
            raise ArgumentTypeError("background must be True, False or None", got=repr(background))
        for name, value in (("every_steps", every_steps), ("keep_last", keep_last)):
            checks.whole_or_none(name, value, 1)
        checks.whole("full_every", full_every, 1)
        if every_s is not None:
            checks.seconds("every_s", every_s)
        if every_steps is None and every_s is None:
            raise ConfigurationError(
                "it is not said when checkpoints are due", todo="Give every_steps, every_s, or both."
            )
        if state is not None:
            from fleet.checkpoint.state import check_state

            check_state(state)
        self._job = job._backend("Checkpoints")
        steps = self._job.steps_taken("Checkpoints()")
        self._clock = SystemClock() if clock is None else clock
        self._schedule = Schedule(every_steps, every_s, full_every, steps, self._clock.now())
        if full_every > 1 and not self._job.saves_deltas:
            raise UnsupportedError(
                "a collective job has no rows of which only the changed ones could be saved",
                expected="full_every=1",
                got=full_every,
            )
        if background and not self._job.saves_behind:
            raise UnsupportedError(
                "this job cannot train on while it is saved: its state stands still for a checkpoint",
                expected="background=None or False, or a job with servers",
                got="background=True",
            )
        self._background = self._job.saves_behind if background is None else background
        from fleet.checkpoint.places import place_at

        self._root: Place = place_at(root)
        self._keep_last = keep_last
        self._saves = job.is_first_worker()
        self._state = state
        self._states = self._job.checkpoint_states(gives=state is not None)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closed = False
        #: the step of what was saved last, and its id
        self._last: tuple[int, str] | None = None
        self._knows_of_others = False
        self._is_used = False
        self._steps_before = self._job.steps_of_its_own("Checkpoints()")
        self._job.before_goodbye(self._end)
        self._give_notice()

    @staticmethod
    def latest(root: str | PathLike[str]) -> str | None:
        """Return where the newest complete checkpoint is, for ``init_server`` or ``load_persistables``; None if there
        is none. Anything half-written or not Fleet's is passed over."""
        from fleet.checkpoint.places import place_at
        from fleet.checkpoint.series import latest

        found = latest(place_at(root))
        return None if found is None else found.where

    def after_step(self) -> None:
        """Save a checkpoint if it is time. It does not wait for one that is still being written: the next begins after
        that. If an earlier one failed behind the training, the failure is raised here."""
        self._refuse_closed("after_step()")
        self._is_used = True
        if not self._saves:
            wanted = None if self._state is None else self._states.wanted
            if wanted is not None:
                self._states.give(wanted, self._own())
            return
        is_due = self._schedule.is_due(self._job.steps_taken("Checkpoints.after_step()"), self._clock.now())
        if not self._is_writing():
            self._raise_failure()
            if is_due and (self._states.asked or not self._states.needs_notice):
                self._save(self._states.asked or self._states.name_of_call("Checkpoints"))
        elif is_due:
            self._schedule.missed = True
        self._give_notice()

    def _give_notice(self) -> None:
        """Tell all workers with a step that a checkpoint of it needs their states right after it."""
        if self._saves and self._states.needs_notice:
            following = self._schedule.following(self._job.steps_taken("Checkpoints.after_step()"), self._clock.now())
            if following is not None:
                self._states.ask(following)

    def _own(self) -> Any:
        """Return the state of this worker's own objects as it is now, if it has any."""
        if self._state is None:
            return None
        from fleet.checkpoint.state import encoded

        return encoded(self._state)

    def save(self, within_s: float = _WITHIN_S) -> None:
        """Save now, whether it is time or not, for example at the end of the training. A checkpoint that is still being
        written has to be done within ``within_s`` seconds."""
        self._refuse_closed("save()")
        checks.seconds("within_s", within_s)  # before the call counts, which others make too
        self._is_used = True
        wanted = self._states.name_of_call("Checkpoints.save()")
        if self._saves:
            self._finish(within_s)
            self._save(wanted)
        elif self._state is not None:
            self._states.give(wanted, self._own())

    def close(self, within_s: float = _WITHIN_S) -> None:
        """Wait for what is still being written, and save what has become due meanwhile; each has to be done within
        ``within_s`` seconds. A second call does nothing. ``stop_worker()`` does the same first of all."""
        if self._closed:
            return
        checks.seconds("within_s", within_s)
        self._look_whether_used()
        wanted = self._states.name_of_call("Checkpoints.close()")
        if not self._saves and self._state is not None:
            self._states.give(wanted, self._own(), last=True)
        self._finish(within_s)
        if self._schedule.missed:
            self._save(wanted)
            self._finish(within_s)
        self._states.end()
        self._closed = True

    def _end(self) -> None:
        """Finish what the job would leave unwritten that stops now. What an error has closed is waited for as well."""
        if self._closed:
            self._finish(_WITHIN_S)
        else:
            self.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        self._closed = True  # after an error the others wait to hear of it

    def _look_whether_used(self) -> None:
        """Warn of checkpoints that were due and never saved, as the loop does not say when a step is over."""
        if self._is_used or not self._saves:
            return
        try:
            steps = self._job.steps_taken("Checkpoints.close()")
            has_trained = self._job.steps_of_its_own("Checkpoints.close()") > self._steps_before
        except FleetError:  # the job is over
            return
        # A checkpoint that was loaded meanwhile has brought the job on as well, and perhaps to its end.
        if has_trained and self._schedule.is_due(steps, self._clock.now()):
            _log.warning(
                "nothing was saved into %s, and the job is at step %d: after_step() was never called. Call it after "
                "every step, on every worker",
                self._root.url,
                steps,
            )

    # ---------------------------------------------------------------- one checkpoint

    def _save(self, wanted: str) -> None:
        """Save a checkpoint. ``wanted`` is the name under which other workers give their states; empty where they do
        not."""
        from fleet.checkpoint.series import name_of

        with self._job.undisturbed("Checkpoints.save()"):
            step, mode = self._job.steps_taken("Checkpoints.save()"), self._schedule.mode
            where = self._root.within(name_of(step)).url
            self._schedule.begin(step, self._clock.now())
            rest = self._job.begin_saving(where, mode, self._own(), wanted, or_full=True)
            if not self._background:
                self._write(partial(rest, None), step, mode)
                return
            may_go_on = threading.Event()
            self._thread = threading.Thread(
                target=self._write_behind, args=(rest, step, mode, may_go_on), name=f"{_THREAD}{where}", daemon=True
            )
            self._thread.start()
            may_go_on.wait()

    def _write(self, rest: Callable[[], None], step: int, mode: str) -> None:
        from fleet.checkpoint.series import remove_old

        rest()
        self._schedule.end(mode)
        self._look_for_others(step, mode)
        if self._keep_last is not None:
            try:
                remove_old(self._root, self._keep_last, step)
            except (CheckpointError, OSError) as error:
                _log.warning("older checkpoints in %s stay: %s", self._root.url, error)

    def _look_for_others(self, step: int, mode: str) -> None:
        """Warn once if what was saved before the checkpoint of ``step`` is not there any more: only what is older than
        that leaves by itself, so another job may save to the same root, and each removes what the other has saved."""
        before, self._last = self._last, self._id_at(step)
        if before is None or before[0] == step or self._knows_of_others or mode == "delta":  # a delta has looked itself
            return
        there = self._id_at(before[0])
        if there != before:
            self._knows_of_others = True
            _log.warning(
                "the checkpoint of step %d in %s is %s: if another job saves to this directory too, give each its own",
                before[0],
                self._root.url,
                "gone, and not by this job" if there is None else "another one now, not this job's",
            )

    def _id_at(self, step: int) -> tuple[int, str] | None:
        from fleet.checkpoint.manifest import Checkpoint
        from fleet.checkpoint.series import name_of

        try:
            return step, Checkpoint.open_manifest(self._root.within(name_of(step)))[1].id
        except CheckpointError:
            return None

    def _write_behind(self, rest: Rest, step: int, mode: str, may_go_on: threading.Event) -> None:
        try:
            self._write(partial(rest, may_go_on.set), step, mode)
        except (MissedError, ServersMovedError) as error:  # this thread may not go over to others
            _log.warning("the checkpoint of step %d is made up for by the next step's: %s", step, error)
            self._schedule.missed = True
        except BaseException as error:
            _log.warning("the checkpoint of step %d was not written: %s", step, error)
            self._failure = error
        finally:
            may_go_on.set()

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _finish(self, within_s: float) -> None:
        if self._thread is not None:
            self._thread.join(within_s)
            if self._thread.is_alive():
                raise DeadlineError(
                    "a checkpoint is still being written",
                    where=self._thread.name.removeprefix(_THREAD),
                    expected=f"its end within {within_s:g} s",
                    todo="Give it more time, close(within_s=…), or look whether the place takes what is written.",
                )
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if isinstance(failure, FleetError):
            raise failure.again() from failure
        if failure is not None:
            raise CheckpointError(
                "a checkpoint could not be written", where=self._root.url, got=repr(failure)
            ) from failure

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise StateError(f"{call} came after close()", where=self._root.url)
