"""The dense blocks of one server, updated by ``torch.optim`` itself.

All blocks of one element type are views of one flat tensor, so that a round's gradients can be added and the new
values sent as one piece of memory. Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fleet.errors import ProtocolError
from fleet.ps.kernels import RULES
from fleet.ps.layout import DenseLayout, Slot, dense_layout
from fleet.transpiler.plan import Plan

Gradient = tuple[bytes, Mapping[str, torch.Tensor]]


class DenseShard:
    def __init__(self, plan: Plan, server: int, options: Sequence[Mapping[str, Any]]) -> None:
        self._plan = plan
        self._server = server
        self.layout = dense_layout(plan, server)
        self._flat = {name: torch.zeros(size, dtype=getattr(torch, name)) for name, size in self.layout.sizes.items()}
        self._params = [torch.nn.Parameter(self._shaped(slot, self._flat[slot.dtype])) for slot in self.layout.slots]
        self._groups: dict[int, dict[str, Any]] = {}
        self._optimizers = self._make_optimizers(options)
        self._layouts: dict[bytes, DenseLayout] = {}

    def _shaped(self, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
        """A slot's piece of a flat tensor; a whole parameter keeps its shape, for rules that look at it."""
        param = self._plan.param_of(slot.block)
        piece = flat[slot.start : slot.stop]
        return piece.view(param.shape) if slot.block.numel == param.numel else piece

    def _make_optimizers(self, options: Sequence[Mapping[str, Any]]) -> list[torch.optim.Optimizer]:
        """One optimizer for each of the user's, with the same groups, as far as they have blocks here."""
        spec = self._plan.spec
        members: dict[int, list[torch.nn.Parameter]] = {}
        for slot, param in zip(self.layout.slots, self._params, strict=True):
            members.setdefault(self._plan.param_of(slot.block).group, []).append(param)
        by_optimizer: dict[int, list[int]] = {}
        for index in sorted(members):
            by_optimizer.setdefault(spec.groups[index].optimizer, []).append(index)
        made = []
        for indices in by_optimizer.values():
            rule = RULES[spec.groups[indices[0]].rule]
            if rule.torch_class is None:
                raise ProtocolError(f"{rule.name} cannot update a dense parameter")
            cls = getattr(torch.optim, rule.torch_class)
            # Some constructors read their own arguments rather than the groups (Adagrad's initial accumulator).
            known = inspect.signature(cls).parameters
            defaults = {key: value for key, value in options[indices[0]].items() if key in known}
            optimizer = cls([{**options[index], "params": members[index]} for index in indices], **defaults)
            self._groups.update(zip(indices, optimizer.param_groups, strict=True))
            made.append(optimizer)
        return made

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
        expected = self._layout(present).sizes
        got = {name: tensor.numel() for name, tensor in tensors.items()}
        if expected != got:
            raise ProtocolError("a push's dense gradients do not fit", expected=expected, got=got)

    def apply(self, gradients: Sequence[Gradient], divisor: int, options: Sequence[Mapping[str, Any]]) -> None:
        """One optimizer step on the sum of ``gradients``, in the given order, divided by ``divisor``.

        A block without a gradient anywhere is skipped, as torch skips ``grad=None``.
        """
        for index, group in self._groups.items():
            group.update(options[index])
        marks = {present for present, _ in gradients}
        if len(marks) == 1:
            self._sum_flat(gradients, divisor)
        else:
            self._sum_blocks(gradients, divisor)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _layout(self, present: bytes) -> DenseLayout:
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
        for slot in self._layout(present).slots:
            self._params[slot.position].grad = self._shaped(slot, total[slot.dtype])

    def _sum_blocks(self, gradients: Sequence[Gradient], divisor: int) -> None:
        for present, tensors in gradients:
            for slot in self._layout(present).slots:
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

    def snapshot(self) -> list[torch.Tensor]:
        """A copy of all values, one flat tensor an element type, in the layout's order."""
        return [self._flat[name].clone() for name in self.layout.dtypes]

    def export(self, position: int) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
        """The values and optimizer state of one block: what each piece is, and its tensor if it is one."""
        slot, param = self.layout.slots[position], self._params[position]
        place = {
            "param": self._plan.param_of(slot.block).name,
            "offset": slot.block.offset,
            "numel": slot.block.numel,
        }
        yield {**place, "key": "value", "elementwise": True}, param.data.view(-1)
        for key, value in self._state_of(param).items():
            if isinstance(value, torch.Tensor):
                # State of the parameter's own shape is cut with it; anything else belongs to the whole.
                yield {**place, "key": f"state.{key}", "elementwise": value.shape == param.shape}, value
            else:
                yield {**place, "key": f"state.{key}", "plain": value}, None

    def _state_of(self, param: torch.nn.Parameter) -> dict[str, Any]:
        for optimizer in self._optimizers:
            if param in optimizer.state:
                return dict(optimizer.state[param])
        return {}

    def restore(self, position: int, state: Mapping[str, Any], elementwise: set[str]) -> None:
        """Set the optimizer state of one block; ``elementwise`` names the keys that are flat and of its size."""
        param = self._params[position]
        group = self._groups[self._plan.param_of(self.layout.slots[position].block).group]
        owner = next(o for o in self._optimizers if any(own is group for own in o.param_groups))
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                value = value.reshape(param.shape if key in elementwise else value.shape).clone()
            owner.state[param][key] = value
