"""Trains dense parameters on the workers: each has them all, with their optimizers' state, and steps on gradients that
all average while backward runs.

The workers meet once a step, in a *round* (dense_reducer.py), and equal values stay equal to the bit. Whoever comes or
has missed a round gets all values, and all state, from another one. A worker that stops says so in one more round, to
which it brings nothing, and the others make a group without it. So data may be uneven, and nobody's last gradient is
lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch

from fleet.averaging.communicators import buffers_to_share, kinds, outline
from fleet.averaging.reducer import Round, interrupted, one_device
from fleet.base.turns import Turns
from fleet.checkpoint.manifest import DENSE
from fleet.errors import FleetError, NonFiniteGradientError, PlanMismatchError, StateError
from fleet.nn.trainables import ElementTypes
from fleet.numeric.tensors import finite
from fleet.ps.worker.dense_group import Comer, DenseGroup, GroupBrokenError
from fleet.ps.worker.dense_reducer import LastingReducer, LoneReducer
from fleet.ps.worker.dense_state import DenseOptions, Piece, fill, hand_over, pieces, told_by
from fleet.ps.worker.describe import Description
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.row_agreement import has_gradient, is_infinite, mean_rows, set_rows, share_infinite
from fleet.ps.worker.trained_model import TrainedModel

_log = logging.getLogger("fleet.worker")

#: In half precision numbers are told apart up to this one.
_STEPS_TOLD = 32

#: What gradients may travel in.
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class DenseTraining:
    def __init__(
        self,
        group: DenseGroup,
        trained: TrainedModel,
        model: torch.nn.Module | None,
        progress: Progress,
        turns: Turns,
        worker: int,
        wire_dtype: str | None,
        record: Callable[[bool], Iterator[tuple[dict[str, Any], list[torch.Tensor]]]],
        *,
        check_finite: bool,
    ) -> None:
        """``record`` yields what the servers have of the checkpoint that the job has gone on from; True: as nobody has
        any values."""
        self.group = group
        self._record = record
        self._trained = trained
        self._model = model
        self._progress = progress
        self._turns = turns
        self._worker = worker
        self._dtype = None if wire_dtype is None else _HALF.get(wire_dtype)
        self._check_finite = check_finite
        self._reducer: LastingReducer | LoneReducer | None = None
        self._options = DenseOptions(self._described)
        #: which options the last step was taken with, as words tell; 0 before the first one here
        self._options_used = 0
        #: the worker whose values all take over in the step
        self._giver: int | None = None
        self._leading: list[dict[str, Any]] | None = None
        #: of the buffers, as all workers have them
        self._kinds: list[Any] | None = None
        self._is_told_of_options = False
        self._is_enabled = True
        #: how many steps the workers have taken together
        self._steps = 0
        #: whether this worker has missed the end of its step, and gets what has come of it after that
        self._is_late = False
        #: how many rounds were over after the last step
        self._rounds_before = 0
        self._has_values = False
        #: whether this worker has taken over other values, which the others get in the next round
        self._is_replaced = False
        #: whether this worker has taken a step in the present group, and has a reducer for it
        self._is_ready = False
        #: whether a step was taken, and may make another group necessary before the next
        self._is_ending = False
        #: whether a backward was interrupted, and its gradients are to no use
        self._is_unaveraged = False
        #: how often the values had been replaced of the first server that these are like
        self._loads = 0

    # ---------------------------------------------------------------- the beginning

    def start(self, miss_step: Callable[[], None]) -> int:
        """Meet the others, and take over the values of the first. ``miss_step`` is called before, as often as these
        have taken a step with an earlier process in this worker's place, and wait for its push; return how often."""
        self._loads, missed = self._progress.loads[0], 0
        while self._meet():
            miss_step()
            missed += 1
        self._rounds_before = self.group.rounds
        self._arm()
        return missed

    def _arm(self) -> None:
        """Begin to watch the parameters that are trained now."""
        self._disarm()
        described = self._described
        self._options = DenseOptions(described, self._options.moving)
        trained = [
            (param, spec.name)
            for param, spec in zip(described.params, described.spec.params, strict=True)
            if param.requires_grad
        ]
        watched = [param for param, _ in trained]
        modules = () if self._model is None else self._model.modules()
        self._buffered = [module for module in modules if any(True for _ in module.buffers(recurse=False))]
        if not trained:
            raise StateError(
                "no dense parameter of the optimizer requires a gradient",
                todo="Leave dense at 'servers': there is nothing to average among the workers.",
            )
        names = [name for _, name in trained]
        types = ElementTypes(watched, names, [param.dtype for param in watched])
        self._weights = [handle.weight for handle in described.handles]
        if self._kinds is None:
            self._kinds = kinds(self._buffered)
        questions = [partial(ask, weight) for ask in (has_gradient, is_infinite) for weight in self._weights]
        asked: list[Callable[[], bool]] = [*questions, self._has_other_buffers]
        if self.group.size == 1:
            one_device(watched, names)  # as those ask who average
            self._reducer = LoneReducer(types, self.group, self._after_round, self._words, len(asked))
        else:
            self._reducer = LastingReducer(
                watched,
                described.params,
                names,
                types,
                self.group,
                self._dtype,
                self._after_round,
                self._turns,
                self._words,
                asked,
                self._meet,
            )
        self._reducer.enabled = self._is_enabled

    def _disarm(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

    @property
    def _described(self) -> Description:
        return self._trained.description

    @property
    def _device(self) -> torch.device:
        params = self._described.params
        return params[0].device if params else torch.device("cpu")

    # ---------------------------------------------------------------- meeting

    def _meet(self, *, in_a_step: bool = False, in_backward: bool = False) -> bool:
        """Make another group; return whether this worker has got from it what it would have come to in this step. If
        this is ``in_a_step``, on whose gradients it has met the others, all have to be there. Where it is
        ``in_backward``, which may need the model's buffers as they are, those come when that is through."""
        while True:
            step, self._is_ready = self._progress.completed, False
            # Some rounds of a step may be over, and it not.
            amid = in_a_step or self.group.rounds != self._rounds_before
            comers = self.group.meet(step, self._steps, self._device, has_values=self._has_values, in_a_step=amid)
            if in_a_step and len({(each.rounds, each.place) for each in comers}) != 1:
                raise self._lost_in_a_step(f"workers that were not as far: {[each.worker for each in comers]}")
            if not comers:
                self._is_late = True
                return True
            if not self._has_values:
                self._progress.join_in([each.step for each in comers if each.has_values])
            try:
                with self.group.together("the values to go on from"):
                    return self._level(comers, in_backward=in_backward)
            except GroupBrokenError:
                continue

    def _level(self, comers: Sequence[Comer], *, in_backward: bool) -> bool:
        """Bring everybody to where the furthest is."""
        group = self.group
        there = [rank for rank, each in enumerate(comers) if each.has_values]
        source = max(there, key=lambda rank: (comers[rank].rounds, -rank), default=0)
        if not there and source == group.rank and (self._progress.steps > 0 or group.is_trained):
            self._read_record(begins=True)
        first = comers[source]
        behind = [not each.has_values or each.rounds < first.rounds for each in comers]
        if any(
            lags and each.has_values and each.steps == first.steps for lags, each in zip(behind, comers, strict=True)
        ):
            raise FleetError(
                "a worker was lost in the middle of a step that has several backwards",
                where=f"worker {self._worker}, step {self._progress.taken + 1}",
                todo="Start the job again from its last checkpoint; no_sync() around all backwards of a step but the "
                "last leaves no such middle.",
            )
        if any(behind):
            self._loads = hand_over(
                group, self._described, self._options, source, self._loads, takes=behind[group.rank]
            )
        if self._model is not None:
            self._refuse_other_buffers(self._model, source)
            buffers = list(self._model.buffers())
            group.broadcast([each.clone() for each in buffers] if in_backward else buffers, source)
        group.rounds, was_there = first.rounds, self._has_values
        if not was_there or self._is_late:
            self._steps, self._is_late = first.steps, False
        self._has_values = True
        return behind[group.rank] and was_there

    def _refuse_other_buffers(self, model: torch.nn.Module, source: int) -> None:
        """Refuse buffers that are not those of the rank ``source``, into which its values cannot go."""
        own = outline(model.named_buffers())
        first = told_by(self.group, source, own)
        if own != first:
            raise PlanMismatchError(
                "the model has other buffers than that of another worker",
                where=f"worker {self._worker}",
                expected=", ".join(each for each in first if each not in own) or "no more",
                got=", ".join(each for each in own if each not in first) or "none of these",
                todo="Build the same model on every worker.",
            )

    def _has_other_buffers(self) -> bool:
        """Say whether a buffer is of another kind than all workers have it."""
        return kinds(self._buffered) != self._kinds

    def _agree_on_buffers(self, source: int) -> None:
        """Refuse buffers that have come to differ from those of the rank ``source``."""
        assert self._model is not None, "it has some"
        self.group.advance()  # beyond the average, which others may still be heard to wait for
        with self.group.together("the kinds of buffers"):
            self._refuse_other_buffers(self._model, source)
        self._kinds = kinds(self._buffered)

    def _read_record(self, *, begins: bool) -> None:
        self.group.following(lambda: self._take_record(begins))

    def _take_record(self, begins: bool) -> None:
        read = self._record(begins)
        first, tensors = next(read)
        found = ((about[DENSE], each) for about, each in chain([(first, tensors)], read))
        fill(self._described, found, first["whole"], first["values"], "what the servers went on from")

    def pieces(self) -> list[Piece]:
        """Return copies of all dense parameters and of what optimizers keep of them, as they stand in a checkpoint."""
        return pieces(self._described)

    def reload(self) -> None:
        """Take over what the servers have gone on from, unless another worker has given it to this one."""
        if self._loads < self._progress.loads[0]:
            self._loads = self._progress.loads[0]
            self._read_record(begins=False)

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take over these parameters, by name, and let the others have all that this worker has."""
        for spec, param in zip(self._described.spec.params, self._described.params, strict=True):
            if spec.name in values:
                with torch.no_grad():
                    param.copy_(values[spec.name])
        self._is_replaced = True

    def _after_round(self, done: Round) -> None:
        """Take over the buffers of the first worker that took part, as DistributedDataParallel does with worker 0's."""
        group = self.group
        if not done.words:  # it is over elsewhere, and so is its step
            return
        steps = {done.words[rank][1] for rank in done.workers}
        if len(steps) > 1:
            raise StateError(
                "the workers average gradients of different steps",
                where=f"worker {self._worker}, step {self._progress.taken + 1}",
                todo="Let every worker go backward as often in a step; those beyond the last belong into no_sync().",
            )
        group.is_over = group.is_over or any(said[0] for said in done.words)
        group.has_buckets = all(said[3] for said in done.words) and len({said[12:] for said in done.words}) == 1
        self._level_rows(done.marked[:-1])
        replaced = [rank for rank, said in enumerate(done.words) if said[2]]
        have, used = ({done.words[rank][at : at + 4] for rank in done.workers} for at in (4, 8))
        if len(used - {(0,) * 4}) > 1 and not replaced:
            replaced = [done.workers[0]]  # the last step was taken with several options, and values are not equal
        if replaced:
            self._is_replaced = False
            self._giver = group.worker_at(replaced[0])  # in the step: another backward may need values as they are
        self._leading = None
        if len(have) > 1:  # now, as one that leaves is still there
            self._agree_on_options(done.workers[0])
        buffers = buffers_to_share(self._buffered)
        if done.workers and (buffers or done.marked[-1]):  # one that has none any more hears of it from the others
            try:
                if done.marked[-1]:
                    self._agree_on_buffers(done.workers[0])
                group.broadcast(buffers, done.workers[0])
            except GroupBrokenError:  # they come with the next group
                group.tell_broken(self._progress.completed)

    def _level_rows(self, marked: Sequence[bool]) -> None:
        """Let gradients of rows lead all workers to the same decisions: where others have some of a table this worker
        has at least none of its rows, and where others have one that is not finite it has that too."""
        tables = len(self._weights)
        for weight, is_there, infinite in zip(self._weights, marked[:tables], marked[tables:], strict=True):
            if is_there and not has_gradient(weight):
                set_rows(weight, torch.empty(0, dtype=torch.int64, device="cpu"), weight.new_empty(0, weight.shape[1]))
            if infinite:
                with self._in_a_step():
                    share_infinite(weight, self.group)

    # ---------------------------------------------------------------- a step

    def begin_step(self, *, if_finite: bool) -> bool:
        """Have all that a step goes by: gradients that are averaged, and clipped. Return whether it is to be taken:
        with ``if_finite`` not if a gradient is not finite."""
        if self._is_armed_alone and self.group.must_meet:
            self._meet()
            self._arm()
        reducer = self._armed
        has_averaged = self.group.rounds != self._rounds_before or reducer.is_taken_over
        if reducer.was_interrupted or (self._is_unaveraged and not has_averaged):
            raise interrupted(f"worker {self._worker}")
        if not has_averaged or not (reducer.has_averaged_all or reducer.is_taken_over):
            reducer.check_watching()
            self._run_round(taking_part=True)  # what there is was not averaged since the last step, or not all of it
        if reducer.is_taken_over:
            self._giver = None  # what it has given has come with that
        else:
            self._agree_on_values()
        is_taken = not if_finite or self._is_finite()
        if is_taken and not reducer.is_taken_over:
            if self._check_finite:
                self._refuse_infinite()
            self._clip()
        return is_taken

    def take_step(self, update: Callable[[], None] | None) -> None:
        """Take the step that was begun: ``update`` lets the wrapped optimizers step."""
        reducer = self._armed
        if update is not None and not reducer.is_taken_over:
            leading, self._leading = self._leading, None
            with self._described.steps_without_tables(), self._options.of_a_step(leading):
                self._options_used = self._digest
                update()
        if reducer.is_taken_over:  # by whichever the others have
            self._options_used = 0
        reducer.is_taken_over = False
        reducer.let_go()
        self._steps += not self._is_late
        self._be_between_steps()
        self._is_ending = True

    def _be_between_steps(self) -> None:
        self._rounds_before = self.group.rounds
        self._is_ready = self.group.rounds_here > 0
        self._is_unaveraged = False

    def _agree_on_values(self) -> None:
        """Have what one worker has, if those of workers differ."""
        giver, self._giver = self._giver, None
        if giver is None:
            return
        takes = not self._is_replaced  # or the others get them with the next step
        while True:
            try:
                with self.group.together("values that have been replaced"):
                    source = self.group.rank_of(giver)
                    self._loads = hand_over(
                        self.group, self._described, self._options, source, self._loads, takes=takes
                    )
                return
            except GroupBrokenError as error:
                self._meet(in_a_step=True)
                if not self.group.has(giver):
                    raise self._lost_in_a_step(str(error)) from None

    def _agree_on_options(self, leader: int) -> None:
        """Hear which options a step is to be taken with: those of the rank ``leader``."""
        own = self._options.read()
        self.group.advance()  # beyond the average, which others may still be heard to wait for
        try:
            with self.group.together("the options of a step"):
                self._leading = told_by(self.group, leader, own)
        except GroupBrokenError:  # each takes the step with its own, and all are brought together in the next one
            self.group.tell_broken(self._progress.completed)
            return
        pairs = [*zip(self._leading, own, strict=True)]
        differing = [[name for name in first if first[name] != mine.get(name)] for first, mine in pairs]
        if any(differing) and not self._is_told_of_options:
            self._is_told_of_options = True
            told = [
                [{name: each.get(name) for name in names} for names, each in zip(differing, some, strict=True)]
                for some in (self._leading, own)
            ]
            text = "worker %d, step %d: the options of the first worker's optimizers count, %s; here they are %s"
            _log.warning(text, self._worker, self._progress.taken + 1, *told)

    def _clip(self) -> None:
        """Clip the averaged gradient by its norm, rows' parts included, where the strategy says so."""
        most = self._trained.plan.spec.settings.max_grad_norm
        if most:
            torch.nn.utils.clip_grad_norm_([*self._described.params, *self._weights], most)

    def end_step(self) -> None:
        """Make another group if it is time for one, when the step is through."""
        group = self.group
        if group.must_meet:
            self._meet()
        reducer = self._armed
        # The first round of a group is alike for all, whatever reducer they have, but one that knows of nobody else.
        if reducer.is_outdated:
            is_due = group.rounds_here > 0 or self._is_armed_alone
        else:
            is_due = not (group.has_buckets or reducer.is_fresh)  # all leave buckets, and come to others, together
        if is_due:
            self._arm()
        self._be_between_steps()
        self._is_ending = False

    def finish_interrupted(self) -> None:
        """Finish a step, or drop a round, that an exception has ended. The others meet this worker for another round,
        in its next backward."""
        if self._is_ending:
            self.end_step()
        if self._reducer is not None and self._reducer.was_interrupted:
            self._is_unaveraged = True
            self.group.break_off()
            self._arm()

    def _words(self) -> tuple[int, ...]:
        """Return what this worker says in a round: whether another group is to be made after it, in which step it is,
        as far as numbers in half precision tell, whether its values have replaced those of all, whether it is ready for
        rounds of buckets, and in four bytes each which options its optimizers have, and had in the last step, and which
        parameters are in its buckets."""
        is_last, step = self.group.is_leaving or self.group.is_wanted, self._steps % _STEPS_TOLD
        reducer = self._reducer
        is_ready = self._is_ready and reducer is not None and not reducer.lacks_some
        said = int(is_last), step, int(self._is_replaced), int(is_ready)
        told = self._digest, self._options_used, 0 if reducer is None else reducer.watched
        return *said, *b"".join(each.to_bytes(4, "big") for each in told)

    @property
    def _digest(self) -> int:
        return self._options.digest if self.group.size > 1 else 0  # there is nobody to tell

    def _run_round(self, *, taking_part: bool) -> None:
        reducer = self._armed
        before, reducer.enabled = reducer.enabled, True
        try:
            reducer.run(taking_part)
        finally:
            reducer.enabled = before

    def _is_finite(self) -> bool:
        """Say whether all gradients are finite. All workers say the same, as dense ones are everybody's and of rows
        that are not finite each has one."""
        dense = [param.grad for param in self._described.params if param.grad is not None]
        flags = [finite(gradient) for gradient in dense]
        return not any(map(is_infinite, self._weights)) and (not flags or bool(torch.stack(flags).all()))

    def _refuse_infinite(self) -> None:
        for spec, param in zip(self._described.spec.params, self._described.params, strict=True):
            if param.grad is not None and not bool(finite(param.grad)):
                raise NonFiniteGradientError(
                    f"the gradient of {spec.name!r} holds NaN or infinity",
                    where=f"worker {self._worker}, step {self._progress.taken + 1}",
                )

    def set_synchronized(self, wanted: bool) -> bool:
        """Set whether backwards average from now on, and return what it was before."""
        before, self._is_enabled = self._is_enabled, wanted
        if self._reducer is not None:
            self._reducer.enabled = wanted
        return before

    def averaged(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the gradients of one table's rows as the servers will have them: the mean over the workers."""
        while True:
            try:
                with self.group.together("the norm of gradients of rows"):
                    return mean_rows(self.group, ids, values)
            except GroupBrokenError:
                self._meet(in_a_step=True)

    @contextmanager
    def _in_a_step(self) -> Iterator[None]:
        """Surround what all workers do together between the average of gradients and the step on it."""
        try:
            yield
        except GroupBrokenError as error:
            self.group.tell_broken(self._progress.completed)  # which raises what has ended the job, if it is over
            raise self._lost_in_a_step(str(error)) from None

    def _lost_in_a_step(self, got: str) -> FleetError:
        return FleetError(
            "a worker was lost in the middle of a step",
            where=f"worker {self._worker}, step {self._progress.taken + 1}",
            got=got,
            todo="Start the job again from its last checkpoint.",
        )

    # ---------------------------------------------------------------- parameters that join

    def extend(self, known: int) -> None:
        """Train further parameters from now on, those behind the ``known`` ones, with the first worker's values."""
        with self._in_a_step(), self.group.together("the values of parameters that join"):
            self.group.broadcast(self._described.params[known:], 0)
        self._arm()
        if self.group.rounds != self._rounds_before:
            self._run_round(taking_part=True)  # what this step has averaged lacks their gradients

    # ---------------------------------------------------------------- the end

    def leave(self) -> None:
        """Part from the others, who hear of it in their next round."""
        if self._reducer is None:
            return
        # After a backward without a step the others are in the push of that step, and go on when this one is gone.
        is_between_steps = self.group.rounds == self._rounds_before
        if self.group.size > 1 and is_between_steps and not self.group.must_meet:
            self.group.say_farewell(self._progress.completed)
            with suppress(GroupBrokenError):  # who is left makes another one
                self._run_round(taking_part=False)
        self.close()

    def close(self) -> None:
        self._disarm()
        self.group.close()

    @property
    def _is_armed_alone(self) -> bool:
        return isinstance(self._reducer, LoneReducer)

    @property
    def _armed(self) -> LastingReducer | LoneReducer:
        assert self._reducer is not None, "started"
        return self._reducer
