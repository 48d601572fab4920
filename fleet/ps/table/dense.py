"""The dense blocks of one server, updated by ``torch.optim`` itself.

All blocks of one element type are views of one flat tensor, so that a round's gradients can be added and the new
values sent as one piece of memory. Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fleet.checkpoint.entries import Entry, entries_of, set_state
from fleet.errors import ProtocolError
from fleet.ps import memory
from fleet.ps.kernels import RULES
from fleet.ps.layout import DenseLayout, Slot, dense_layout
from fleet.ps.table.compensation import Compensation
from fleet.transpiler.plan import Plan

Gradient = tuple[bytes, Mapping[str, torch.Tensor]]


class DenseShard:
    def __init__(self, plan: Plan, server: int, options: Sequence[Mapping[str, Any]]) -> None:
        self.clock = 0  #: how many updates there have been
        self._server = server
        self._flat: dict[str, torch.Tensor] = {}
        self._params: list[torch.nn.Parameter] = []
        self._groups: dict[int, dict[str, Any]] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self.adopt(plan, options)

    def adopt(self, plan: Plan, options: Sequence[Mapping[str, Any]]) -> None:
        """Take over a plan: the first, or one that continues the present one with further parameters."""
        self._plan = plan
        self.layout = dense_layout(plan, self._server)
        self._layouts: dict[bytes, DenseLayout] = {}
        for name, size in self.layout.sizes.items():
            grown = torch.zeros(size, dtype=getattr(torch, name))
            present = self._flat.get(name, grown[:0])
            grown[: present.numel()] = present
            self._flat[name] = grown
        newcomers: dict[int, list[torch.nn.Parameter]] = {}
        for slot in self.layout.slots:
            piece = self._shaped(slot, self._flat[slot.dtype])
            if slot.position < len(self._params):
                self._params[slot.position].data = piece
            else:
                param = torch.nn.Parameter(piece)
                self._params.append(param)
                newcomers.setdefault(plan.param_of(slot.block).group, []).append(param)
        self._enlist(newcomers, options)

    def _shaped(self, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
        """A slot's piece of a flat tensor; a whole parameter keeps its shape, for rules that look at it."""
        param = self._plan.param_of(slot.block)
        piece = flat[slot.start : slot.stop]
        return piece.view(param.shape) if slot.block.numel == param.numel else piece

    def _enlist(self, newcomers: Mapping[int, list[torch.nn.Parameter]], options: Sequence[Mapping[str, Any]]) -> None:
        """Give new blocks to optimizers: one for each of the user's, with the same groups, as far as they are here."""
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
        if not 0 <= position < len(self._params):
            raise ProtocolError("an upload names a block this server does not have", got=position)
        target = self._params[position].data.view(-1)
        if values.numel() != target.numel() or values.dtype != target.dtype:
            slot = self.layout.slots[position]
            raise ProtocolError(
                f"the values of {self._plan.block_name(slot.block)!r} do not fit",
                expected=f"{target.numel()} x {slot.dtype}",
                got=f"{values.numel()} x {values.dtype}",
            )
        target.copy_(values.view(-1))

    def check(self, gradient: Gradient) -> None:
        """Refuse a gradient that does not fit, before it becomes part of a round."""
        present, tensors = gradient
        if len(present) != len(self._params):
            raise ProtocolError("a push speaks of other blocks", expected=len(self._params), got=len(present))
        expected = self.layout_of(present).sizes
        got = {name: tensor.numel() for name, tensor in tensors.items()}
        if expected != got:
            raise ProtocolError("a push's dense gradients do not fit", expected=expected, got=got)

    def apply(self, gradients: Sequence[Gradient], divisor: int, options: Sequence[Mapping[str, Any]]) -> None:
        """One optimizer step on the sum of ``gradients``, in the given order, divided by ``divisor``.

        A block without a gradient anywhere is skipped, as torch skips ``grad=None``.
        """
        self._tick(gradients)
        for index, group in self._groups.items():
            group.update(options[index])
        marks = {present for present, _ in gradients}
        if len(marks) == 1:
            self._sum_flat(gradients, divisor)
        else:
            self._sum_blocks(gradients, divisor)
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    def add(self, change: Gradient) -> None:
        """Add changes, laid out as gradients are, to the values."""
        self._tick([change])
        present, tensors = change
        for slot in self.layout_of(present).slots:
            whole = self.layout.slots[slot.position]
            self._flat[slot.dtype][whole.start : whole.stop].add_(tensors[slot.dtype][slot.start : slot.stop])

    def _tick(self, gradients: Sequence[Gradient]) -> None:
        self.clock += any(any(present) for present, _ in gradients)

    def layout_of(self, present: bytes) -> DenseLayout:
        """Of the blocks marked in ``present``."""
        if present not in self._layouts:
            if len(self._layouts) > 64:
                self._layouts.clear()  # gradients that come and go at random must not fill the memory
            self._layouts[present] = dense_layout(self._plan, self._server, present)
        return self._layouts[present]

    def _sum_flat(self, gradients: Sequence[Gradient], divisor: int) -> None:
        """Everybody has the same blocks: add whole tensors. The first one's memory takes the sum."""
        present, total = gradients[0]
        for _, more in gradients[1:]:
            for name, tensor in more.items():
                total[name].add_(tensor)
        if divisor > 1:
            for tensor in total.values():
                tensor.div_(divisor)
        for dtype, (positions, sizes) in self.layout_of(present).pieces.items():
            for position, piece in zip(positions, torch.split_with_sizes(total[dtype], sizes), strict=True):
                param = self._params[position]
                param.grad = piece if param.dim() == 1 else piece.view(param.shape)

    def _sum_blocks(self, gradients: Sequence[Gradient], divisor: int) -> None:
        for present, tensors in gradients:
            for slot in self.layout_of(present).slots:
                param = self._params[slot.position]
                piece = self._shaped(slot, tensors[slot.dtype])
                if param.grad is None:
                    param.grad = piece
                else:
                    param.grad.add_(piece)
        if divisor > 1:
            for param in self._params:
                if param.grad is not None:
                    param.grad.div_(divisor)

    def compensate(self, worker: int, gradient: Gradient, compensation: Compensation) -> None:
        """Correct one worker's gradient in place for what has changed since it was handed its values."""
        present, tensors = gradient
        compensation.dense(worker, self.layout_of(present), self.layout, tensors, self._flat)

    def snapshot(self) -> list[torch.Tensor]:
        """A copy of all values, one flat tensor an element type, in the layout's order."""
        flats = [self._flat[name] for name in self.layout.dtypes]
        return [memory.take_flat(len(flat), flat.dtype).copy_(flat) for flat in flats]

    def export(self, position: int) -> Iterator[Entry]:
        """The values and optimizer state of one block."""
        block, param = self.layout.slots[position].block, self._params[position]
        return entries_of(self._plan.param_of(block).name, block.offset, param, self._state_of(param))

    def _state_of(self, param: torch.nn.Parameter) -> dict[str, Any]:
        for optimizer in self._optimizers.values():
            if param in optimizer.state:
                return dict(optimizer.state[param])
        return {}

    def restore(self, position: int, pieces: Mapping[str, Any], flat: set[str]) -> None:
        """Set the optimizer state of one block, as a checkpoint says."""
        param = self._params[position]
        group = self._groups[self._plan.param_of(self.layout.slots[position].block).group]
        owner = next(o for o in self._optimizers.values() if any(own is group for own in o.param_groups))
        set_state(owner, param, pieces, flat)
