"""``torch.optim`` itself updates the dense blocks of a server.

All blocks of one element type are views of one flat tensor, so that a round's gradients can be added and the new
values sent as one piece of memory. Optimizers see runs of neighbouring blocks, layouts and checkpoints the blocks.
Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.entries import Entry, entries_of, set_state
from fleet.errors import ProtocolError
from fleet.kernels import RULES
from fleet.numeric import buffers
from fleet.plan.layout import DenseLayout, Slot, dense_layout
from fleet.plan.plan import Plan
from fleet.ps.table.compensation import Compensation
from fleet.ps.table.runs import BlockState, Run, agree, joined, parted, split, together

Gradient = tuple[bytes, Mapping[str, torch.Tensor]]


class DenseBlocks:
    def __init__(self, plan: Plan, server: int, options: Sequence[Mapping[str, Any]]) -> None:
        self.clock = 0  #: how many updates there have been
        self.revision = 0  #: how often values have changed, in whatever way
        self._server = server
        self._flat: dict[str, torch.Tensor] = {}
        self._runs: dict[int, Run] = {}  # of every block, by its position
        self._groups: dict[int, dict[str, Any]] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._shown: list[buffers.Watch] = []  # what snapshots look at
        self.adopt(plan, options)

    def adopt(self, plan: Plan, options: Sequence[Mapping[str, Any]]) -> None:
        """Take over a plan: the first, or one that continues the present one with further parameters."""
        self._plan = plan
        self.revision += 1
        self.layout = dense_layout(plan, self._server)
        self._layouts: dict[bytes, DenseLayout] = {}
        self._last_receivers: tuple[bytes, dict[str, list[Run]]] = (b"", {})
        for name, size in self.layout.sizes.items():
            grown = torch.zeros(size, dtype=getattr(torch, name), device="cpu")
            present = self._flat.get(name, grown[:0])
            grown[: present.numel()] = present
            self._flat[name] = grown
            for run in self._each_run():
                if run.slots[0].dtype == name:
                    run.move(grown)
        newcomers: dict[int, list[torch.nn.Parameter]] = {}
        strangers = self.layout.slots[len(self._runs) :]
        for name, flat in self._flat.items():
            for slots in joined(plan, [slot for slot in strangers if slot.dtype == name], options):
                run = Run(plan, slots, flat)
                self._runs.update((slot.position, run) for slot in slots)
                newcomers.setdefault(run.group, []).append(run.param)
        self._enlist(newcomers, options)

    def _each_run(self) -> Iterable[Run]:
        return dict.fromkeys(self._runs.values())

    def _enlist(self, newcomers: Mapping[int, list[torch.nn.Parameter]], options: Sequence[Mapping[str, Any]]) -> None:
        """Give new runs to optimizers: one for each of the user's, with the same groups, as far as they are here."""
        by_optimizer: dict[int, list[int]] = {}
        for index in sorted(newcomers):
            by_optimizer.setdefault(self._plan.spec.groups[index].optimizer, []).append(index)
        for position, indices in by_optimizer.items():
            made = self._make_optimizer(indices, newcomers, options)
            present = self._optimizers.setdefault(position, made)
            if present is not made:
                present.state.update(made.state)  # what a constructor prepares (Adagrad's sums) comes along
            for index, group in zip(indices, list(made.param_groups), strict=True):
                if index in self._groups:
                    self._groups[index]["params"] += group["params"]
                elif present is not made:
                    present.add_param_group(group)
                self._groups.setdefault(index, group)

    def _make_optimizer(
        self,
        indices: Sequence[int],
        members: Mapping[int, list[torch.nn.Parameter]],
        options: Sequence[Mapping[str, Any]],
    ) -> torch.optim.Optimizer:
        rule = RULES[self._plan.spec.groups[indices[0]].rule]
        if not rule.dense:
            raise ProtocolError(f"{rule.name} cannot update a dense parameter")
        # Some constructors read their own arguments rather than the groups (Adagrad's initial accumulator).
        known = inspect.signature(rule.optimizer).parameters
        defaults = {key: value for key, value in options[indices[0]].items() if key in known}
        groups = [{**options[index], "params": members[index]} for index in indices]
        return rule.optimizer(groups, **defaults)

    def write(self, position: int, values: torch.Tensor) -> None:
        """Set one block, as an upload or a checkpoint says."""
        self.check_values(position, values)
        self._prepare_change()
        slot = self.layout.slots[position]
        self._flat[slot.dtype][slot.start : slot.stop] = values.view(-1)

    def edit(self, position: int, marks: np.ndarray[Any, Any], values: torch.Tensor) -> None:
        """Set those elements of a block that are marked by a bit each, or all of them where there are no marks."""
        if not marks.size:
            self.write(position, values)
            return
        self._check_position(position)
        slot = self.layout.slots[position]
        numel = slot.stop - slot.start
        form = np.dtype(np.uint8), (-(-numel // 8),)
        there = (
            torch.from_numpy(np.unpackbits(marks, count=numel).view(np.bool_))
            if (marks.dtype, marks.shape) == form
            else None
        )
        flat = self._flat[slot.dtype]
        if there is None or (values.dtype, values.shape) != (flat.dtype, (int(there.sum()),)):
            raise ProtocolError(
                f"an edit of {self._plan.block_name(slot.block)!r} does not fit",
                expected=f"a bit for each of {numel} elements, and as many of {slot.dtype} as are marked",
                got=f"{marks.size} x {marks.dtype}, and {values.numel()} x {values.dtype}",
            )
        self._prepare_change()
        self._flat[slot.dtype][slot.start : slot.stop][there] = values

    def check_values(self, position: int, values: torch.Tensor) -> None:
        """Refuse values that do not fit a block."""
        self._check_position(position)
        slot = self.layout.slots[position]
        if values.numel() != slot.stop - slot.start or values.dtype != self._flat[slot.dtype].dtype:
            raise ProtocolError(
                f"the values of {self._plan.block_name(slot.block)!r} do not fit",
                expected=f"{slot.stop - slot.start} x {slot.dtype}",
                got=f"{values.numel()} x {values.dtype}",
            )

    def _check_position(self, position: int) -> None:
        if not 0 <= position < len(self.layout.slots):
            raise ProtocolError("an upload names a block this server does not have", got=position)

    def apply(self, gradients: Sequence[Gradient], divisor: float, options: Sequence[Mapping[str, Any]]) -> None:
        """Take one optimizer step on the sum of ``gradients``, in the given order, divided by ``divisor``.

        A block without a gradient anywhere is skipped, as torch skips ``grad=None``.
        """
        self._prepare_change()
        self._tick(gradients)
        for index, group in self._groups.items():
            group.update(options[index])
        same = all(present == gradients[0][0] for present, _ in gradients)
        present, total = self._sum_flat(gradients) if same else self._sum_blocks(gradients)
        if divisor != 1:
            for tensor in total.values():
                tensor.div_(divisor)
        receivers = self._receivers(present)
        for dtype, runs in receivers.items():
            pieces = torch.split_with_sizes(total[dtype], [run.stop - run.start for run in runs])
            for run, piece in zip(runs, pieces, strict=True):
                run.param.grad = piece.view(run.param.shape)
        with torch.no_grad():
            for optimizer in self._optimizers.values():
                # Around it torch wraps what autograd, profilers and its compiler need, and imports the latter.
                inspect.unwrap(type(optimizer).step)(optimizer)
        for run in chain.from_iterable(receivers.values()):
            run.param.grad = None

    def squares(self, gradients: Sequence[Gradient], divisor: float) -> float:
        """Return the squared norm of the sum of ``gradients`` over ``divisor``."""
        _, total = self._sum_blocks(gradients)
        norms = [torch.linalg.vector_norm(each.div_(divisor), dtype=torch.float64) for each in total.values()]
        return sum(float(norm) ** 2 for norm in norms)

    def add(self, change: Gradient) -> None:
        """Add changes, laid out as gradients are, to the values."""
        self._prepare_change()
        self._tick([change])
        present, tensors = change
        for slot in self.layout_of(present).slots:
            whole = self.layout.slots[slot.position]
            self._flat[slot.dtype][whole.start : whole.stop].add_(tensors[slot.dtype][slot.start : slot.stop])

    def _tick(self, gradients: Sequence[Gradient]) -> None:
        self.clock += any(any(present) for present, _ in gradients)

    def layout_of(self, present: bytes) -> DenseLayout:
        """Return the layout of the blocks marked in ``present``."""
        if present not in self._layouts:
            if len(self._layouts) > 64:
                self._layouts.clear()  # gradients that come and go at random must not fill the memory
            self._layouts[present] = dense_layout(self._plan, self._server, present)
        return self._layouts[present]

    @staticmethod
    def _sum_flat(gradients: Sequence[Gradient]) -> Gradient:
        """Add whole tensors, since all workers have the same blocks. The first one's memory takes the sum."""
        present, total = gradients[0]
        for _, more in gradients[1:]:
            for name, tensor in more.items():
                total[name].add_(tensor)
        return present, total

    def _sum_blocks(self, gradients: Sequence[Gradient]) -> Gradient:
        present = bytes(any(marks) for marks in zip(*(present for present, _ in gradients), strict=True))
        layout = self.layout_of(present)
        places = {slot.position: slot for slot in layout.slots}
        total = {
            name: torch.empty(size, dtype=getattr(torch, name), device="cpu") for name, size in layout.sizes.items()
        }
        begun: set[int] = set()
        for theirs, tensors in gradients:
            for slot in self.layout_of(theirs).slots:
                place, piece = places[slot.position], tensors[slot.dtype][slot.start : slot.stop]
                sum_ = total[slot.dtype][place.start : place.stop]
                if slot.position in begun:
                    sum_.add_(piece)
                else:
                    sum_.copy_(piece)
                    begun.add(slot.position)
        return present, total

    def _receivers(self, present: bytes) -> dict[str, list[Run]]:
        """Return for each element type the runs of the blocks marked in ``present``, after splitting those marked in
        part."""
        if self._last_receivers[0] != present:
            self._split(lambda one, other: bool(present[one.position]) == bool(present[other.position]))
            receivers: dict[str, list[Run]] = {}
            for run in dict.fromkeys(self._runs[slot.position] for slot in self.layout_of(present).slots):
                receivers.setdefault(run.slots[0].dtype, []).append(run)
            self._last_receivers = (present, receivers)
        return self._last_receivers[1]

    def _split(self, alike: Callable[[Slot, Slot], bool]) -> None:
        """Split every run where neighbours are not alike."""
        for run in self._each_run():
            parts = parted(run.slots, lambda part, slot: alike(part[-1], slot))
            if len(parts) > 1:
                pieces = [Run(self._plan, slots, self._flat[slots[0].dtype]) for slots in parts]
                split(run, pieces, self._optimizer_of(run), self._groups[run.group])
                self._runs.update((slot.position, piece) for piece in pieces for slot in piece.slots)
                self._last_receivers = (b"", {})

    def _optimizer_of(self, run: Run) -> torch.optim.Optimizer:
        return self._optimizers[self._plan.spec.groups[run.group].optimizer]

    def compensate(self, worker: int, gradient: Gradient, compensation: Compensation) -> None:
        """Correct one worker's gradient in place for what has changed since it was handed its values."""
        present, tensors = gradient
        compensation.dense(worker, self.layout_of(present), self.layout, tensors, self._flat)

    def snapshot(self) -> list[torch.Tensor]:
        """Return all values as they are now and will stay, one flat tensor for each element type, in the layout's
        order. Nothing is copied unless values change while somebody still holds them."""
        shown = [buffers.window(self._flat[name]) for name in self.layout.dtypes]
        self._shown += [watch for _, watch in shown]
        return [flat for flat, _ in shown]

    def _prepare_change(self) -> None:
        """Leave the memory of values to those who still hold them, and go on in a copy."""
        self.revision += 1
        if any(watch() is not None for watch in self._shown):
            # All of them or, where there is no memory, none.
            self._flat |= {
                name: buffers.take_flat(len(flat), flat.dtype).copy_(flat) for name, flat in self._flat.items()
            }
            for run in self._each_run():
                run.move(self._flat[run.slots[0].dtype])
        self._shown.clear()

    def export(self, position: int) -> Iterator[Entry]:
        """Yield the values and optimizer state of one block."""
        slot, run = self.layout.slots[position], self._runs[position]
        alone = Run(self._plan, [slot], self._flat[slot.dtype])
        state = run.cut(self._optimizer_of(run).state.get(run.param, {}), alone)
        return entries_of(self._plan.param_of(slot.block).name, slot.block.offset, alone.param, state)

    def forget_state(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.state.clear()

    def check_state(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Refuse options that need a state which is made in a parameter's first step, where that is over."""
        for run in self._each_run():
            if state := self._optimizer_of(run).state.get(run.param):
                group, first = self._plan.spec.groups[run.group], self._plan.param_of(run.slots[0].block)
                RULES[group.rule].refuse_late(options[run.group], state, repr(first.name))

    def restore(self, states: Sequence[BlockState]) -> None:
        """Set the optimizer state of all blocks, by position, as a checkpoint says."""
        self._split(lambda one, other: agree(states[one.position], states[other.position]))
        for run in self._each_run():
            pieces, flat = together([states[slot.position] for slot in run.slots])
            set_state(self._optimizer_of(run), run.param, pieces, flat)
