"""Does what a worker's script does beside its steps, where a setting says so: it looks rows up ahead, meets the others,
keeps what belongs to a step, and goes back to what it had before."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fleet import Fleet
from fleet.errors import UnsupportedError

from .scenario import Setting


@dataclass
class Kept:
    """Is what scripts have written where they find it again when they are started again, and what came of it."""

    #: the whole model before the first step that is taken back, as each worker has read it
    models: list[tuple[int, dict[str, torch.Tensor]]] = field(default_factory=list)
    #: workers that have saved a checkpoint to go back to, and those that have gone back
    saved: set[int] = field(default_factory=set)
    went_back: set[int] = field(default_factory=set)
    #: what a worker that begins has of its own: (worker, step, steps that its state is of, or None if there is none)
    states: list[tuple[int, int, int | None]] = field(default_factory=list)
    #: what workers have brought together before a step: (worker, step, what has come of it)
    met: list[tuple[int, int, list[int]]] = field(default_factory=list)
    #: what an optimizer has done, and must not
    wrong: list[str] = field(default_factory=list)


class Acts:
    """Belongs to one life of a worker."""

    def __init__(
        self, here: Fleet, setting: Setting, kept: Kept, model: Any, optimizer: torch.optim.Optimizer, place: Path
    ) -> None:
        """Checkpoints to go back to are in ``place``."""
        self._here = here
        self._setting = setting
        self._kept = kept
        self._model = model
        self._optimizer = optimizer
        self._place = place
        self._worker = here.worker_index()
        self._state = {"steps": 0}
        self._optimizer_was: dict[str, Any] | None = None

    @property
    def state(self) -> dict[str, Any] | None:
        """Return what belongs to checkpoints."""
        return self._state if self._setting.keeps else None

    def begin(self, step: int, heard: int) -> None:
        """Note where this life begins; the worker had heard of so many steps that they were done."""
        self._load_state(step)
        if step < heard:  # while it was away the others have gone back
            self._kept.went_back.add(self._worker)

    def _load_state(self, step: int) -> None:
        if self._setting.keeps:
            has_state = self._here.load_state(self._state)
            self._kept.states.append((self._worker, step, self._state["steps"] if has_state else None))

    def steps(self, begin: int) -> Iterator[int]:
        """Yield one step after the other, and do before it what is to be done then."""
        while begin < self._setting.steps:
            steps, begin = range(begin, self._setting.steps), self._setting.steps
            with self._looked_up_ahead(steps) as batches:
                for step in batches:
                    if self._goes_back(step):
                        begin = self._here.resume_step()
                        break
                    self._act(step)
                    yield step

    @contextlib.contextmanager
    def _looked_up_ahead(self, steps: Iterable[int]) -> Iterator[Iterable[int]]:
        """Have rows of further steps asked for, and give back in the end what nobody has used."""
        if not self._setting.ahead:
            yield steps
            return
        lookup = partial(self._model.looked_up, self._worker)
        batches = cast("Generator[int]", self._here.prefetch(steps, lookup, self._setting.ahead))
        with contextlib.closing(batches):
            yield batches

    def _goes_back(self, step: int) -> bool:
        """Save before one step, once, and go back to that before another."""
        setting, kept, dirname = self._setting, self._kept, str(self._place / "to go back to")
        if not setting.goes_back_at:
            return False
        if step == setting.goes_back_to and self._worker not in kept.saved:
            self._here.save_persistables(dirname, state=self.state)
            kept.saved.add(self._worker)
        if step != setting.goes_back_at or self._worker in kept.went_back:
            return False
        self._here.load_persistables(dirname)
        kept.went_back.add(self._worker)
        self._load_state(self._here.resume_step())
        return True

    def _act(self, step: int) -> None:
        setting = self._setting
        if setting.meets_every and step and step % setting.meets_every == 0:
            self._meet(step)
        if step == setting.loads_from and setting.loads_at:
            self._optimizer_was = self._optimizer.state_dict()
            if setting.mode == "sync":
                self._kept.models.append((self._worker, self._here.state_dict(self._model)))
        if step == setting.loads_at > 0:
            self._load_optimizer()
            if setting.mode == "sync":
                self._here.load_state_dict(self._model, self._kept.models[0][1])
        if setting.keeps:
            self._state["steps"] = step + 1
            self._here.keep_state(self._state)

    def _meet(self, step: int) -> None:
        self._here.barrier_worker()
        together = self._here.all_reduce_worker(np.array([self._worker + 1, step]))
        self._kept.met.append((self._worker, step, together.tolist()))

    def _load_optimizer(self) -> None:
        """Load what the optimizer has, which changes nothing, and what it had, which it may have to refuse."""
        self._optimizer.load_state_dict(self._optimizer.state_dict())
        if self._optimizer_was is None:
            return
        keeps_none = self._setting.optimizer == "SGD" and self._setting.beside != "optimizer"
        if keeps_none:
            self._optimizer.load_state_dict(self._optimizer_was)
        elif self._setting.mode != "geo":
            with contextlib.suppress(UnsupportedError):
                self._optimizer.load_state_dict(self._optimizer_was)
                self._kept.wrong.append(f"worker {self._worker} has loaded a state that the servers have")
