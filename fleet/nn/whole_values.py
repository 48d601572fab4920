"""Holds all rows of a table for as long as they are what the servers have, and finds what a script changed in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fleet.numeric.bits import alike, changed
from fleet.numeric.jit import Ids
from fleet.numeric.modes import outside_inference, outside_transforms


class WholeValues:
    """Holds the values of a table's ``weight``.

    ``tensor`` may be changed by whoever has it or a part of it. It is compared with a copy of what was fetched, which
    is made before the first of them has it: most only compute with the values, and cannot change them.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._fetched: torch.Tensor | None = None
        self._take(values)

    def _take(self, values: torch.Tensor) -> None:
        self.tensor = values
        self._holders = self._count_holders()

    def expose(self, fetched: torch.Tensor | None = None) -> None:
        """Note that from now on somebody may change them; or has, where a copy is given of what they were."""
        if self._fetched is None:
            self._fetched = self.copied() if fetched is None else fetched

    def copied(self) -> torch.Tensor:
        """Return a copy that shows later whether they were changed."""
        with outside_transforms(), outside_inference(), torch.no_grad():
            return self.tensor.clone()

    def differs(self, before: torch.Tensor) -> bool:
        """Say whether they were changed since this copy was made."""
        with outside_transforms(), torch.no_grad():
            return not alike(self.tensor, before)

    def put_back(self, before: torch.Tensor) -> None:
        """Make them what they were when this copy was made."""
        with outside_transforms(), torch.no_grad():
            self.tensor.copy_(before)

    @property
    def given(self) -> torch.Tensor | None:
        """Return the memory that somebody else has too; None as long as nobody has."""
        return None if self._fetched is None else self.tensor

    def shares_memory(self, result: Any) -> bool:
        """Say whether what torch made of the values may be a way to change them."""
        if isinstance(result, torch.Tensor):
            if result.layout is not torch.strided or _is_wrapped(result):
                return False
            return result.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()
        if isinstance(result, list | tuple):
            return any(self.shares_memory(each) for each in result)
        return not isinstance(result, int | float | complex | str | torch.dtype | torch.device | type(None))

    def assign(self, values: torch.Tensor) -> None:
        """Let this memory hold them from now on."""
        self.expose()
        self._holders = 0  # whoever gave it has it
        with outside_inference():
            self.tensor = values.clone() if values.is_inference() else values

    @torch.no_grad()
    def take_edit(self) -> tuple[Ids, torch.Tensor] | None:
        """Return ids and values of the rows that were changed since they were fetched or last returned here."""
        if self._fetched is None:
            return None
        differ = changed(self.tensor.contiguous(), self._fetched.contiguous())
        ids = differ.any(1).nonzero().flatten()
        if not len(ids):
            return None
        rows = self.tensor[ids]
        self._fetched[ids] = rows
        return ids.cpu().numpy(), rows.cpu()

    def renew(self, fetch: Callable[[], torch.Tensor]) -> bool:
        """Fetch the servers' values, which are others now, for those who still have these; return False if nobody has.

        A graph that was made with the old ones ends with torch's error, as it does after a step of torch's.
        """
        if self._fetched is None or self._count_holders() <= self._holders:
            torch.autograd.graph.increment_version(self.tensor)
            return False
        with torch.no_grad():
            self.tensor.copy_(fetch())
            self._fetched.copy_(self.tensor)
        return True

    def _count_holders(self) -> int:
        memory = self.tensor.untyped_storage()
        return int(torch._C._storage_Use_Count(memory._cdata))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Say whether it stands for another one in a transformation of ``torch.func``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
