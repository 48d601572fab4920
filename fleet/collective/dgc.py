"""Compresses gradients (deep gradient compression, Lin et al., 2018, arXiv:1712.01887): the few largest elements
travel, the others wait.

Every worker keeps, for each compressed parameter, a momentum ``u`` of its own gradients and a sum ``v`` of what it has
not sent yet. In a step, with momentum ``m`` and gradient ``g`` (weight decay included):

    u = m u + g          v = v + u          (with Nesterov: u = m (u + g), v = v + u + g)

The largest ``k`` elements of ``v`` are sent, and cleared in ``v`` and ``u``. Since momentum is in what is sent, the
update is plain: ``p -= lr * mean``. Parameters of fewer than 16,384 elements are averaged whole.

A step in which no worker has a gradient for a parameter leaves ``u`` and ``v`` as they were. A worker that has stopped
sends nothing: what it has kept back is lost, as it is for all of them when the job ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from fleet.averaging.exchange import Finish, Layouts, gradients_in
from fleet.collective.process_group import Group
from fleet.errors import UnsupportedError
from fleet.nn.trainables import Member
from fleet.optimizer import has_own_step
from fleet.strategy.collective import DGC

#: Below it, what tells where the elements are would be more than is saved.
LEAST_ELEMENTS = 16384


def sparsity_at(options: DGC, step: int) -> float | None:
    """Return the share of elements that stay behind in this step, counted from 0; None while gradients travel whole."""
    since = step - options.rampup_begin_step
    if since < 0:
        return None
    stage = since * len(options.sparsity) // options.rampup_step
    return options.sparsity[min(stage, len(options.sparsity) - 1)]


def kept(elements: int, sparsity: float) -> int:
    """Return how many elements travel."""
    return max(1, round(elements * (1.0 - sparsity)))


def clip_factor(norm: float, clip_norm: float, workers: int) -> float:
    """Return the factor for a gradient of this norm: N clipped gradients add up to no more than one clipped sum."""
    limit = clip_norm / float(workers) ** 0.5
    return min(1.0, limit / norm) if norm > 0 else 1.0


@dataclass
class Residual:
    """Holds what a worker keeps back of one parameter."""

    momentum: torch.Tensor
    unsent: torch.Tensor

    def copy(self) -> Residual:
        return Residual(self.momentum.clone(), self.unsent.clone())

    def take(
        self, gradient: torch.Tensor, momentum: float, nesterov: bool, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a gradient, and give away the ``count`` largest elements: their places and values."""
        if nesterov:
            self.momentum.add_(gradient).mul_(momentum)
            self.unsent.add_(self.momentum).add_(gradient)
        else:
            self.momentum.mul_(momentum).add_(gradient)
            self.unsent.add_(self.momentum)
        where = torch.topk(self.unsent.abs(), count, sorted=False).indices
        what = self.unsent[where]
        self.unsent[where] = 0
        self.momentum[where] = 0
        return where, what


class DeepCompression:
    """Exchanges the gradients of a job with DGC."""

    def __init__(self, group: Group, options: DGC, members: Sequence[Member]) -> None:
        self._group = group
        self._options = options
        self._residuals: dict[int, Residual] = {}
        #: of parameters that this worker has no gradient for in a round: what it kept back before
        self._undecided: dict[int, tuple[Member, Residual]] = {}
        #: counts rounds, which are the same ones on a worker that has stopped
        self.step = 0
        #: whether this worker brings something to rounds
        self.takes_part = True
        self._lie: Layouts = {}
        self._sends_whole = False
        #: whether a part of gradients has been sent since the last update
        self._has_sent = False
        self.sent_bytes = 0
        self.adopt(members)

    def adopt(self, members: Sequence[Member]) -> None:
        for member in members:
            _check(member)
        self._eligible = {id(m.param): m for m in members if m.param.numel() >= LEAST_ELEMENTS}

    def begin_anew(self, step: int) -> None:
        self._residuals.clear()
        self._has_sent, self.step = False, step

    # ---------------------------------------------------------------- gradients

    @contextmanager
    def whole(self, wanted: bool) -> Iterator[None]:
        """Let gradients travel whole, if that is ``wanted``, as those do that have been averaged before."""
        self._sends_whole = wanted
        try:
            yield
        finally:
            self._sends_whole = False

    def prepare(self, lie: Layouts) -> None:
        self._lie = lie
        if not self._has_sent or self._sends_whole:
            return
        for member in self._eligible.values():
            if member.param.grad is not None and bool(member.param.grad.any()):
                raise UnsupportedError(
                    "dgc would compress once more what it has averaged in this step",
                    where=f"the gradient of {member.name!r}",
                    expected="one backward a step that is averaged",
                    got="another one, which adds to it",
                    todo="Surround all backwards of a step but the last with optimizer.no_sync().",
                )

    def begin(self, bucket: GradBucket) -> Finish:
        sparsity = None if self._sends_whole else sparsity_at(self._options, self.step)
        buffer = bucket.buffer()
        pairs = gradients_in(bucket, self._lie)
        compressed = [] if sparsity is None else [pair for pair in pairs if id(pair[0]) in self._eligible]
        if not compressed:
            return self._average([buffer], lambda: buffer)
        assert sparsity is not None
        self._has_sent = True
        chosen = {id(param) for param, _ in compressed}
        whole = [gradient for param, gradient in pairs if id(param) not in chosen]
        wheres, whats = [], []
        for param, gradient in compressed:
            where, what = self._select(param, gradient.reshape(-1), sparsity)
            wheres.append(where)
            whats.append(what)
        counts = [len(where) for where in wheres]
        # Places and values in one message: both are four bytes wide.
        mine = torch.cat([torch.cat(wheres).to(torch.int32), torch.cat(whats).view(torch.int32)])
        theirs = mine.new_empty(self._group.size, len(mine))
        gathering = dist.all_gather(list(theirs), mine, async_op=True)
        self.sent_bytes += mine.numel() * mine.element_size()

        def scatter() -> torch.Tensor:
            self._group.finish(gathering, mine.device)
            means = [gradient.new_zeros(gradient.numel()) for _, gradient in compressed]
            for row in theirs.view(self._group.size, 2, -1):
                places, values = row[0].split_with_sizes(counts), row[1].view(torch.float32).split_with_sizes(counts)
                for mean, where, what in zip(means, places, values, strict=True):
                    mean.index_add_(0, where, what, alpha=1 / self._group.size)
            for (_, gradient), mean in zip(compressed, means, strict=True):
                gradient.copy_(mean.view(gradient.shape))
            return buffer

        return self._average(whole, scatter)

    def _average(self, tensors: list[torch.Tensor], then: Callable[[], torch.Tensor]) -> Finish:
        if not tensors:
            return then
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(self._group.size)
        work = dist.all_reduce(flat, async_op=True)
        self.sent_bytes += flat.numel() * flat.element_size()

        def finish() -> torch.Tensor:
            self._group.finish(work, flat.device)
            result = then()
            for tensor, mean in zip(
                tensors, flat.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True
            ):
                tensor.copy_(mean.view(tensor.shape))
            return result

        return finish

    def _select(
        self, param: torch.Tensor, gradient: torch.Tensor, sparsity: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        member = self._eligible[id(param)]
        options, count = member.options, kept(gradient.numel(), sparsity)
        if not self.takes_part:
            return torch.arange(count, device=gradient.device), gradient.new_zeros(count)
        residual = self._residuals.get(id(param))
        if residual is None:
            # The momentum of the steps before goes on here.
            earlier = member.optimizer.state[member.param].pop("momentum_buffer", None)
            start = torch.zeros_like(gradient) if earlier is None else earlier.reshape(-1).clone()
            residual = self._residuals[id(param)] = Residual(start, torch.zeros_like(gradient))
        if member.param.grad is None:
            self._undecided[id(param)] = member, residual.copy()
        if options["weight_decay"]:
            gradient = gradient.add(param.detach().reshape(-1), alpha=options["weight_decay"])
        if self._options.local_grad_clip_norm is not None:
            norm = float(torch.linalg.vector_norm(gradient))
            gradient = gradient * clip_factor(norm, self._options.local_grad_clip_norm, self._group.size)
        return residual.take(gradient, options["momentum"], options["nesterov"], count)

    def end_round(self) -> None:
        """Give back what was taken of parameters that, as a round has shown, no worker has a gradient for."""
        for key, (member, before) in self._undecided.items():
            if member.param.grad is None:
                self._residuals[key] = before
        self._undecided.clear()
        self.step += not self._sends_whole

    # ---------------------------------------------------------------- the update

    @torch.no_grad()
    def update(self, rest: Callable[[], None]) -> None:
        """Update compressed parameters plainly, and let ``rest`` update the others."""
        for optimizer in {member.optimizer for member in self._eligible.values()}:
            _check_optimizer(optimizer)  # whose step() may have been replaced since
        mine = [m for m in self._eligible.values() if id(m.param) in self._residuals and m.param.grad is not None]
        gradients = [member.param.grad for member in mine]
        for member in mine:
            member.param.grad = None
        try:
            rest()
        finally:  # a hook of the script's may raise, and the step be taken once more
            for member, gradient in zip(mine, gradients, strict=True):
                member.param.grad = gradient
        for member, gradient in zip(mine, gradients, strict=True):
            assert gradient is not None, "chosen so"
            member.param.add_(gradient, alpha=-float(member.options["lr"]))
        self._has_sent = False


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) is not torch.optim.SGD or not has_own_step(optimizer):
        name = type(optimizer).__name__
        raise UnsupportedError(
            "dgc corrects SGD's momentum, and knows no other optimizer's",
            expected="torch.optim.SGD",
            got=name if has_own_step(optimizer) else f"{name} with a step() of the script's",
            todo="Use SGD, or leave dgc out; power_sgd compresses the gradients of every optimizer.",
        )


def _check(member: Member) -> None:
    optimizer, options = member.optimizer, member.options
    _check_optimizer(optimizer)
    for name in ("dampening", "maximize"):
        if options[name]:
            raise UnsupportedError(f"dgc and SGD's {name}={options[name]!r} exclude each other")
    if member.param.dtype != torch.float32 and member.param.numel() >= LEAST_ELEMENTS:
        raise UnsupportedError(f"dgc sends float32 only, and {member.name!r} is {member.param.dtype}")
