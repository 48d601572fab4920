"""Averages gradients while backward runs, by DistributedDataParallel's own reducer and without its wrapper.

DDP arms the reducer in the forward of its wrapper. Here a hook on every gradient accumulator does it, at the first
gradient of a backward, before the reducer's own hook sees it. It also asks the autograd engine to call ``_close`` when
that backward is through, which hands the reducer the parameters that had no gradient, so that every round comes to its
end on every worker, and waits for the buckets. What the reducer calls its communication hook begins their exchange.

One more parameter travels with the gradients, the census: a mark for each worker that takes part, one for each
parameter that has a gradient, and the small numbers that each worker has to say, if any. By it everybody knows, at no
cost, by how many to divide, and which parameters nobody trained. On CUDA reading it would make every step wait for the
device, so there it goes beside, over Gloo.

A round without any backward (``run``) is a backward through nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, _compute_bucket_assignment_by_size, _register_comm_hook
from torch._C._distributed_c10d import Reducer as _Reducer

from fleet.averaging.communicators import Communicators
from fleet.averaging.exchange import Exchange, Finish, gradients_in, layouts
from fleet.base.interruption import uninterrupted
from fleet.base.turns import Turns
from fleet.errors import StateError, UnsupportedError
from fleet.nn.trainables import ElementTypes
from fleet.numeric.compiler import uncompiled

P = ParamSpec("P")
T = TypeVar("T")

#: Sizes of DistributedDataParallel's own: the first bucket is small, so that sending begins early.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20


@dataclass(frozen=True)
class Round:
    """Says who brought gradients to a round, and what each worker of the group had to say."""

    workers: tuple[int, ...]
    words: tuple[tuple[int, ...], ...] = ()
    #: of each question that was asked too, whether any worker has said yes
    marked: tuple[bool, ...] = ()


def _with_gradients(call: Callable[P, T]) -> Callable[P, T]:
    """Let a call have torch's autograd, also where a script has turned it off around what steps or stops."""

    @wraps(call)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.enable_grad():
            return call(*args, **kwargs)

    return made


class Reducer:
    """Averages gradients in rounds. ``on_round`` is called with each round after it, inside the backward that it
    belongs to."""

    @_with_gradients
    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        types: ElementTypes,
        group: Communicators,
        exchange: Exchange,
        on_round: Callable[[Round], None],
        turns: Turns,
        says: Callable[[], Sequence[int]] = tuple,
        asked: Sequence[Callable[[], bool]] = (),
    ) -> None:
        """Have a round tell all what this worker ``says`` when the backward is through, always as many small numbers,
        and of each question that is ``asked`` then whether any worker says yes."""
        self._params = list(params)
        self._names = names
        self._types = types
        self._group = group
        self._exchange = exchange
        self._on_round = on_round
        self._turns = turns
        self.enabled = True
        self._taking_part = True
        #: whether gradients have come since the last round that are in none
        self.has_more = False
        self._is_open = self._is_in_round = False
        self._is_settled = False
        self._seen: set[int] = set()
        self._says = says
        self._words = len(says())
        self._pending: list[tuple[torch.futures.Future[torch.Tensor], GradBucket, Finish]] = []
        self._engine = torch.autograd.Variable._execution_engine
        self._device = one_device(params, names)
        self._asked = asked
        self._census = torch.nn.Parameter(
            torch.zeros(group.size * (1 + self._words) + len(params) + len(asked), device="cpu")
        )
        self._everything = torch.ones_like(self._census, requires_grad=False)
        self._everything[: group.size] = 0
        self._everything[group.size + len(params) :] = 0
        self._everything[group.rank] = 1
        travelling = [*self._params, self._census] if self._device.type == "cpu" else self._params
        self._nodes = [_accumulator(param) for param in self._params]
        self._handles = [node.register_prehook(partial(self._arrive, index)) for index, node in enumerate(self._nodes)]
        self._reducer: Any = _make(travelling, [*names, "census"], group.everyone)
        self._note_layouts()
        _register_comm_hook(self._reducer, None, self._begin_bucket)

    @_with_gradients
    def run(self, taking_part: bool) -> None:
        """Run a round on the gradients as they are; without taking part, on none."""
        for name, param in zip(self._names, self._params, strict=True) if taking_part else ():
            self._refuse_sparse(name, param.grad)
        self._taking_part = taking_part
        if not taking_part:
            for param in self._params:
                param.grad = None
        probe = torch.zeros((), requires_grad=True, device="cpu")
        probe.register_hook(lambda _: self._open())  # type: ignore[no-untyped-call]
        try:
            (probe * 1).backward()  # type: ignore[no-untyped-call]
        finally:
            self._taking_part = True

    @_with_gradients
    def check_watching(self) -> None:
        """Refuse a parameter that was converted and back: torch has then replaced what its gradients arrive at."""
        for param, name, node in zip(self._params, self._names, self._nodes, strict=True):
            if param.requires_grad and _accumulator(param) is not node:
                raise UnsupportedError(
                    f"{name!r} was converted in a running job, and back: its gradients would no longer be averaged",
                    todo="Convert a copy: copy.deepcopy(model).",
                )

    @property
    def was_interrupted(self) -> bool:
        """Say whether a backward began a round and ended in an exception before it was complete."""
        return self._is_in_round

    def close(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()
        self._reducer._remove_autograd_hooks()
        self._reducer = None  # it holds this object as its hook, which no garbage collector sees

    # ---------------------------------------------------------------- within a backward

    @uncompiled
    def _arrive(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note that a gradient is about to be accumulated."""
        self._refuse_sparse(self._names[index], gradients[0])
        if self.enabled:
            self._refuse_graph(self._names[index], gradients[0])
            if not self._is_open:
                self._open()
            self._seen.add(index)
        else:
            self.has_more = True

    @staticmethod
    def _refuse_sparse(name: str, gradient: torch.Tensor | None) -> None:
        """Refuse what a module's own parameter gets from ``F.embedding(…, sparse=True)``."""
        if gradient is not None and gradient.is_sparse:
            raise UnsupportedError(
                f"the gradient of {name!r} is sparse, and workers average dense ones only",
                todo="Look it up without sparse=True, or make it the weight of an nn.Embedding(…, sparse=True), whose "
                "rows are on servers.",
            )

    @staticmethod
    def _refuse_graph(name: str, gradient: torch.Tensor | None) -> None:
        """Refuse what is to be derived again: a mean over workers has no graph that would lead back through it."""
        if gradient is not None and gradient.requires_grad:
            raise UnsupportedError(
                f"the gradient of {name!r} has a graph of its own, which ends where workers average",
                got="backward(create_graph=True)",
                todo="Take it by torch.autograd.grad(loss, params, create_graph=True), and go backward from what you "
                "make of it; or surround this backward with no_sync().",
            )

    def _enter_round(self) -> None:
        self._turns.refuse_fork("backward()")
        if self._is_in_round:
            raise interrupted()
        self._is_open = self._is_in_round = True

    @uncompiled
    def _open(self) -> None:
        self._types.check()
        self._exchange.prepare(self._lie)
        self._enter_round()
        self._seen.clear()
        self._pending.clear()
        self._reducer.prepare_for_backward([])
        self._engine.queue_callback(self._close)

    @uncompiled
    def _begin_bucket(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        on_cuda: list[int | str | torch.device] | None = [self._device] if self._device.type == "cuda" else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=on_cuda)
        self._refill(bucket)
        self._pending.append((future, bucket, self._begin(bucket)))
        return future

    @torch.no_grad()
    def _refill(self, bucket: GradBucket) -> None:
        """Write into a bucket the gradients that are elsewhere: ``grad.data = …``, which a conversion of the model does
        too, has parted from it what torch's reducer writes to."""
        buffer = bucket.buffer()
        start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        if all(each.grad is not None and start <= each.grad.data_ptr() < stop for each in bucket.parameters()):
            return
        for param, gradient in gradients_in(bucket, self._lie):
            if param.grad is None:
                gradient.zero_()
            elif not start <= param.grad.data_ptr() < stop:
                gradient.copy_(param.grad)

    def _as_read(self, bucket: GradBucket, content: torch.Tensor) -> torch.Tensor:
        """Return a bucket's new content as torch reads it: by how parameters lie now, though a script may have laid
        them out anew since the bucket was made."""
        params = bucket.parameters()
        if all(self._strides[id(param)] == param.stride() for param in params):
            return content
        now, lie = layouts(params), self._lie
        moved = torch.empty_like(content)
        for (_, to), (_, gradient) in zip(
            gradients_in(bucket, now, moved), gradients_in(bucket, lie, content), strict=True
        ):
            to.copy_(gradient)
        return moved

    def _begin(self, bucket: GradBucket) -> Finish:
        return self._exchange.begin(bucket)

    def _close(self) -> None:
        """Complete the round, as the backward is through."""
        self._is_open = False
        self._mark()
        counting = None
        if self._device.type != "cpu":
            assert self._census.grad is not None
            marks = [self._census.grad]
            counting = self._group.begin(lambda: self._group.control.allreduce(marks))
        if len(self._seen) < len(self._params):
            for index in set(range(len(self._params))) - self._seen:
                self._reducer._autograd_hook(index)
        if counting is None:
            self._reducer._autograd_hook(len(self._params))
        self._complete(counting)
        self._engine.queue_callback(self._finish)  # after the reducer's own, which writes the gradients

    def _complete(self, counting: dist.Work | None) -> None:
        """Wait for all buckets, and for the census where it goes beside; then hand their contents to the reducer."""
        results = [finish() for *_, finish in self._pending]
        if counting is not None:
            self._group.finish(counting, self._census.device)
        for (future, bucket, _), result in zip(self._pending, results, strict=True):
            future.set_result(self._as_read(bucket, result))

    def _mark(self) -> None:
        """Fill in the census. The usual case, everything there, is a copy: it must cost nothing in a small model."""
        if len(self._seen) == len(self._params):
            marks = self._everything
        else:
            marks = torch.zeros_like(self._everything)
            if self._taking_part:
                given = [index for index, param in enumerate(self._params) if param.grad is not None]
                marks[[self._group.rank, *(self._group.size + index for index in given)]] = 1
        if self._census.grad is None:
            self._census.grad = torch.empty_like(marks)
        self._census.grad.copy_(marks)
        if self._words or self._asked:
            self._say(self._census.grad)

    def _say(self, census: torch.Tensor) -> None:
        """Fill in what stands behind the parameters' marks."""
        words = self._words
        first = len(census) - self._group.size * words - len(self._asked)
        stop = first + len(self._asked)
        if self._taking_part:
            census[first:stop] = torch.tensor([float(ask()) for ask in self._asked], device="cpu")
        if words:
            said = torch.tensor(self._says(), dtype=census.dtype, device="cpu")
            census[stop + self._group.rank * words :][:words] = said

    @torch.no_grad()
    def _finish(self) -> None:
        assert self._census.grad is not None
        # Beside the gradients the census is averaged as they are.
        counted = self._census.grad.tolist()
        done = self._read_census(counted, self._group.size if self._device.type == "cpu" else 1, self._params)
        if not self._is_settled:
            # Buckets in the order in which gradients came on worker 0; the census, which came last, in the last one.
            self._group.at_once(self._rebuild_buckets)
            self._is_settled = True
        self._end_round(done)

    def _rebuild_buckets(self) -> None:
        if self._reducer._rebuild_buckets():
            self._note_layouts()  # a script may have laid out its model anew

    def _note_layouts(self) -> None:
        self._lie = layouts(self._params)
        self._strides = {id(param): param.stride() for param in (*self._params, self._census)}

    def _read_census(self, counted: Sequence[float], divided_by: int, of: Sequence[torch.nn.Parameter]) -> Round:
        """Read the census of these parameters, which may have been divided, and correct the gradients where not all was
        there."""
        size, params = self._group.size, len(of)
        workers = tuple(rank for rank in range(size) if counted[rank] > 0)
        if min(counted[: size + params]) <= 0:
            self._correct(of, counted[size : size + params], len(workers))
        stop, words = size + params + len(self._asked), self._words
        said = [round(each * divided_by) for each in counted[stop:]]
        return Round(
            workers,
            tuple(tuple(said[rank * words : (rank + 1) * words]) for rank in range(size)),
            tuple(each > 0 for each in counted[size + params : stop]),
        )

    def _end_round(self, done: Round) -> None:
        with uninterrupted():  # or this worker would be elsewhere than the others think
            self._group.count_round()
            self._on_round(done)
            self._leave_round()
            self.has_more = False

    def _leave_round(self) -> None:
        self._is_in_round = False

    def _correct(self, of: Sequence[torch.nn.Parameter], marks: Sequence[float], workers: int) -> None:
        """Drop the gradients of parameters that no worker has one for, and divide by the number of those who took
        part."""
        present = []
        for param, mark in zip(of, marks, strict=True):
            if mark > 0 and param.grad is not None:
                present.append(param.grad)
            else:
                param.grad = None
        if present and workers < self._group.size:
            torch._foreach_mul_(present, self._group.size / workers)


def interrupted(where: str | None = None) -> StateError:
    """Return the error for a round that an exception has ended, as an interruption does."""
    return StateError(
        "a backward ended in an exception, and the other workers wait for its gradients",
        where=where,
        todo="Let the exception end the script, which ends the job for all. With servers it goes on after "
        "step(), or after a look-up, with a whole backward.",
    )


def _accumulator(param: torch.nn.Parameter) -> Any:
    """Return the autograd node that adds to ``param.grad``."""
    return torch.autograd.graph.get_gradient_edge(param).node


def one_device(params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> torch.device:
    """Return where all parameters are."""
    devices = {param.device: name for param, name in zip(params, names, strict=True)}
    if len(devices) > 1:
        (one, first), (other, second) = list(devices.items())[:2]
        raise UnsupportedError(
            "the parameters are on several devices",
            expected="one device a worker",
            got=f"{first!r} on {one}, {second!r} on {other}",
        )
    return next(iter(devices))


def _make(params: Sequence[torch.nn.Parameter], names: Sequence[str], group: dist.ProcessGroup) -> _Reducer:
    sparse = [False] * len(params)
    limits = [_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
    buckets, caps = _compute_bucket_assignment_by_size(list(params), limits, sparse)
    return _Reducer(
        list(params),
        list(reversed(buckets)),
        list(reversed(caps)),
        group,
        sparse,
        _BUCKET_BYTES,
        False,  # parameters without a gradient are found by the census
        True,  # gradients are views of their buckets
        dict(enumerate(names)),
        _FIRST_BUCKET_BYTES,
    )
