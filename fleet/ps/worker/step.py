"""Takes a step whose optimizers run on the servers: gradients leave, and new values come when the mode lets them.

In the synchronous modes a step is one push, of which a part may leave while the backward still runs; the
half-asynchronous mode makes one push of several steps. In the asynchronous mode the communicator pushes and fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fleet.base.interruption import uninterrupted
from fleet.base.settings import CommunicatorSettings
from fleet.errors import NonFiniteGradientError
from fleet.nn.handle import GradientRows
from fleet.numeric.device_copies import await_all, bring, is_away
from fleet.numeric.jit import Array
from fleet.optimizer import hooks_before
from fleet.ps.consistency.policy import Policy
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.communicator import Communicator, IdleCommunicator
from fleet.ps.worker.gradient_merge import GradientMerge
from fleet.ps.worker.lookups import RowReader
from fleet.ps.worker.object_states import OwnStates
from fleet.ps.worker.overlap import EarlyGradients, worthwhile
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.push import Clocks, Gradients, Push, Pusher, Rows
from fleet.ps.worker.trained_model import DenseValues, TrainedModel
from fleet.telemetry.worker_figures import WorkerFigures


class UserGradients:
    """Reads the gradients that the user's backwards have left on the parameters and on the tables' weights."""

    def __init__(
        self,
        trained: TrainedModel,
        values: DenseValues,
        table_rows: RowReader,
        own_states: OwnStates,
        progress: Progress,
        worker: int,
        copying: AbstractContextManager[None],
        *,
        check_finite: bool,
    ) -> None:
        """``copying`` is around copies from a device."""
        self._trained = trained
        self._values = values
        self._table_rows = table_rows
        self._own_states = own_states
        self._progress = progress
        self._worker = worker
        self._copying = copying
        self.check_finite = check_finite

    def take(self, early: EarlyGradients | None, update: Callable[[], None] | None = None) -> Gradients:
        """Take a step: return what it leaves behind, except what has left ``early``. ``update`` lets optimizers step on
        this worker, when all else that may fail is through."""
        description = self._trained.description
        options = description.options(of_step=True)
        dense, whole, attempt = self.dense(), None, 0
        if early is not None:
            attempt, sent = early.sent([param.grad for param in description.params])
            whole = dense
            dense = [None if index in sent else grad for index, grad in enumerate(dense)]
        rows = self.rows()
        weights = self.weights(rows)
        if update is not None:
            update()
            if self._has_hooks:
                rows = self.rows()
                weights = self.weights(rows)
        read = self._take_clocks()
        return Gradients(dense, rows, read, options, ahead=attempt, state=self.end_step(), weights=weights, whole=whole)

    @property
    def _has_hooks(self) -> bool:
        """Say whether hooks of optimizers that step on this worker may change gradients of rows."""
        return any(map(hooks_before, self._trained.description.optimizers))

    def none(self) -> Gradients:
        """Return the gradients of a step that leaves none behind."""
        description = self._trained.description
        dense = [None] * len(description.params)
        return Gradients(dense, {}, Clocks(self._values.read_at), description.options(of_step=True))

    def take_along(self, update: Callable[[], None] | None = None) -> Callable[[], Gradients]:
        """Take a step as above, and return what waits until the gradients that it leaves behind have come from their
        device. They stay as they are, whatever becomes of the script's."""
        handles = self._trained.description.handles
        if self.check_finite or any(handle.goes_by_weight for handle in handles):
            gradients = self.take(None, update).copied()
            return lambda: gradients
        options = self._trained.description.options(of_step=True)
        (dense, away), rows = self._flats(), self._row_gradients()
        if update is not None:
            update()
            rows = self._row_gradients() if self._has_hooks else rows
        read, state = self._take_clocks(), self.end_step()
        rows_away = {index: each for index, each in rows.items() if is_away(each.rows)}
        here = {index: each.merged() for index, each in rows.items() if index not in rows_away}
        taken = Gradients(dense, here, read, options, state=state).copied()
        leaving = [*away.values(), *(part for each in rows_away.values() for part in each[:2])]
        with self._copying if leaving else nullcontext():
            copies, wait = bring(leaving)

        def arrived() -> Gradients:
            wait()
            coming = iter(copies)
            whole = [*taken.dense]
            for index in away:
                whole[index] = next(coming)
            came = {
                index: GradientRows(next(coming), next(coming), each.once).merged() for index, each in rows_away.items()
            }
            return replace(taken, dense=whole, rows={**taken.rows, **came})

        return arrived

    def _take_clocks(self) -> Clocks:
        """Return when the values were read that the gradients were computed on; rows are read anew in the next step."""
        return Clocks(self._values.read_at, self._table_rows.take_clocks())

    def end_step(self) -> Array | None:
        """Count a step; return the state of the worker's own objects that goes with it."""
        state = self._own_states.take()
        self._progress.take_step()
        return state

    def dense(self) -> list[torch.Tensor | None]:
        """Return the flat gradient of every parameter, on the CPU; none of those that are trained on the workers."""
        flat, away = self._flats()
        for index, here in zip(away, self._brought(away.values()), strict=True):
            flat[index] = here
        if self.check_finite:
            for index, grad in enumerate(flat):
                if grad is not None and not bool(torch.isfinite(grad).all()):
                    raise self._not_finite(f"the gradient of {self._name(index)}")
        return flat

    @torch.no_grad()
    def _flats(self) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor]]:
        """Return the same of those that are on the CPU, and by place those that are not."""
        away: dict[int, torch.Tensor] = {}
        if self._trained.plan.spec.settings.has_dense_on_workers:
            return [None] * len(self._trained.description.params), away
        grads = [param.grad for param in self._trained.description.params]
        # With many small parameters each look at a gradient counts.
        flat = [
            grad
            if grad is None or (grad.dim() == 1 and grad.is_cpu and not grad.is_sparse)
            else self._flat(place, grad, away)
            for place, grad in enumerate(grads)
        ]
        return flat, away

    def _flat(self, index: int, grad: torch.Tensor, away: dict[int, torch.Tensor]) -> torch.Tensor | None:
        if grad.is_sparse:
            grad = self._trained.description.dense_gradient(index, grad)
        flat = grad.reshape(-1)
        if not is_away(flat):
            return flat
        away[index] = flat
        return None

    def rows(self) -> dict[int, Rows]:
        """Return, for every table that was used, distinct ids and the gradients of their rows."""
        rows: dict[int, Rows] = {}
        found = self._row_gradients()
        parts = iter(self._brought([part for each in found.values() for part in each[:2]]))
        for index, gradient in found.items():
            ids, grads = GradientRows(next(parts), next(parts), gradient.once).merged()
            if self.check_finite and not np.isfinite(grads).all():
                handle = self._trained.description.handles[index]
                got = f"id {ids[~np.isfinite(grads).all(axis=1)][0]}"
                raise self._not_finite(f"the gradient of a row of {handle.name!r}", got)
            rows[index] = (ids, grads)
        return rows

    def _row_gradients(self) -> dict[int, GradientRows]:
        """Return the same where they are, and as they are."""
        found = ((index, handle.gradient()) for index, handle in enumerate(self._trained.description.handles))
        return {index: gradient for index, gradient in found if gradient is not None}

    def _brought(self, gradients: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients on the CPU, all of them after one wait."""
        devices = {each.device for each in gradients if is_away(each)}
        if not devices:
            return [*gradients]
        for device in devices:
            await_all(device)  # which still computes, and that is no copy
        with self._copying:
            copies, wait = bring([*gradients])
            wait()
        return copies

    def weights(self, rows: Mapping[int, Rows]) -> dict[int, Array]:
        """Return how much the look-ups count that are behind these rows, for the tables whose rules ask for it."""
        handles = self._trained.description.handles
        found = {index: handles[index].weights_of(ids) for index, (ids, _) in rows.items()}
        return {index: weights for index, weights in found.items() if weights is not None}

    def _name(self, index: int) -> str:
        return repr(self._trained.plan.spec.params[index].name)

    def _not_finite(self, what: str, got: Any = None) -> NonFiniteGradientError:
        where = f"worker {self._worker}, step {self._progress.taken + 1}"
        return NonFiniteGradientError(f"{what} holds NaN or infinity", where=where, got=got)


class RemoteTraining:
    """Takes the worker's steps, whose optimizers run on the servers."""

    def __init__(
        self,
        policy: Policy,
        communication: CommunicatorSettings,
        name: str,
        gradients: UserGradients,
        pusher: Pusher,
        trained: TrainedModel,
        values: DenseValues,
        figures: WorkerFigures,
    ) -> None:
        """``name`` is what threads are named after."""
        self._policy = policy
        self._communication = communication
        self._name = name
        self._gradients = gradients
        self._pusher = pusher
        self._trained = trained
        self._values = values
        self._figures = figures
        self._steps_per_push = policy.steps_per_push(communication.max_merge_var_num)
        self._merge = self._make_merge()
        #: what is done behind the user's thread, from ``start`` on
        self.communicator = IdleCommunicator()
        self._early: EarlyGradients | None = None

    def start(self) -> None:
        """Begin the work beside the user's thread, as the first values are there."""
        if not self._policy.awaits_answers:
            self.communicator = Communicator(
                self._communication,
                self._make_merge(),
                self._pusher.prepare,
                partial(self._pusher.deliver_behind, at_once=self._communication.thread_pool_size),
                partial(self._values.fetch_behind, self._communication.thread_pool_size),
                self._name,
                values_bytes=self._trained.most_values_bytes,
                prepares_ahead=self._pusher.is_plain and not self._is_anything_away,
                gives_way=bool(self._trained.description.handles) and self._policy.lets_reads_go_first,
            )
        self._early = self._make_early()

    @property
    def _is_anything_away(self) -> bool:
        """Say whether any gradients have to come from a device, for which the answer to a push would wait."""
        description = self._trained.description
        return any(map(is_away, [*description.params, *(handle.weight for handle in description.handles)]))

    def grow(self) -> None:
        """Take in parameters that have joined the job, or other servers. Steps that are not sent yet stay: where steps
        are merged, no parameters join."""
        if self._early is not None:
            self._early.close()
        self._early = self._make_early()

    def _make_merge(self) -> GradientMerge:
        return GradientMerge(self._trained.description, self._communication.is_sgd_optimizer)

    def _make_early(self) -> EarlyGradients | None:
        """Make what sends gradients ahead of their push, where each step is one push, of gradients as they are."""
        params = self._trained.description.params
        may_leave = self._policy.sends_gradients_early(self._communication.max_merge_var_num)
        none_leaves = self._trained.plan.spec.settings.has_dense_on_workers
        if none_leaves or not (may_leave and self._pusher.is_plain and worthwhile(params)):
            return None
        return EarlyGradients(params, self._pusher.send_early, self._name)

    # ---------------------------------------------------------------- the user's thread

    def during_backward(self) -> AbstractContextManager[None]:
        """Surround a backward that the step follows at once: its gradients may leave."""
        return nullcontext() if self._early is None else self._early.leaving()

    def step(self, update: Callable[[], None] | None = None) -> None:
        """Push what this worker's gradients are now, or put them aside for a push that is due later; return with the
        values that the mode lets it go on with. ``update`` is what steps on this worker; an interruption leaves both
        undone, or lets the next call finish the push."""
        if isinstance(self.communicator, Communicator):
            self._leave_to(self.communicator, update)
            return
        push = self._pusher.hold(lambda: self._begun(update))
        if push is not None:
            self._pusher.deliver(push)

    def miss_step(self) -> None:
        """Push a step without any gradients."""
        self._pusher.deliver(self._made(self._gradients.none()))

    def _begun(self, update: Callable[[], None] | None) -> Push | None:
        """Take a step; return the push that is due with it, if one is."""
        gradients = self._gradients.take(self._early, update)
        if self._steps_per_push == 1:
            return self._made(gradients)
        self._merge.add(gradients)
        return self._made_of_merged() if self._merge.count >= self._steps_per_push else None

    def _made_of_merged(self) -> Push:
        push = self._made(self._merge.merged())
        self._merge.clear()
        return push

    def _leave_to(self, communicator: Communicator, update: Callable[[], None] | None) -> None:
        with self._figures.push:
            communicator.await_room()  # before the step is taken: what interrupts this leaves it untaken
        with uninterrupted():  # or it would be counted and not sent, or rows not take what the parameters have taken
            communicator.put(self._gradients.take_along(update))
        with uninterrupted():  # what was fetched is given out once
            fresh = communicator.fresh()
            if fresh is not None:
                self._values.write(fresh)
        self._pusher.reload_if_replaced()

    def _made(self, gradients: Gradients) -> Push:
        frames, arrived = self._pusher.encode(gradients)

        def take(replies: Sequence[Frame]) -> None:
            arrived()
            self._values.write(replies)

        return Push(gradients.steps, frames, take, self._trained.plan, gradients)

    def flush(self) -> None:
        """Wait until the servers have applied everything that this worker has computed."""
        self.communicator.flush()
        if self._merge.count:
            push = self._pusher.hold(self._made_of_merged)
            if push is not None:
                self._pusher.deliver(push)

    def close(self) -> None:
        """Wait for the threads, when the connections are closed."""
        if self._early is not None:
            self._early.close()
        self.communicator.join()
