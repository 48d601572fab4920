"""Puts parameters and their optimizer state together from the blocks they were cut into when they were exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleet.checkpoint.entries import joined
from fleet.errors import CheckpointError


class Assembly:
    def __init__(self, numel: Mapping[str, int], where: str) -> None:
        """``numel`` says which parameters are wanted, and how many elements each has; pieces of others are skipped.
        ``where`` is named in errors."""
        self._numel = numel
        self._where = where
        self._pieces: dict[str, dict[str, Any]] = {name: {} for name in numel}
        #: which elements have come, by parameter and key
        self._come: dict[str, dict[str, list[tuple[int, int]]]] = {name: {} for name in numel}

    def add(self, entries: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor]) -> None:
        """Take what one export has of dense blocks: entries, and a tensor for each that is not a plain value."""
        for entry, tensor in joined(entries, tensors):
            name, key = entry["param"], entry["key"]
            if name not in self._numel:
                continue
            pieces, come = self._pieces[name], self._come[name]
            if tensor is None:
                pieces[key] = entry["plain"]
            elif entry["elementwise"]:
                begin, end = entry["offset"], entry["offset"] + tensor.numel()
                if tensor.numel() != entry["numel"] or not 0 <= begin <= end <= self._numel[name]:
                    raise self._lacks(name)
                come.setdefault(key, []).append((begin, end))
                total = pieces.setdefault(key, torch.empty(self._numel[name], dtype=tensor.dtype, device="cpu"))
                total[begin:end] = tensor.reshape(-1)
            else:
                pieces.setdefault(key, tensor)

    def whole(self, name: str) -> tuple[dict[str, Any], set[str]]:
        """Return all that came for one parameter, by key, and the keys that are flat and of its size."""
        come = self._come[name]
        if not come or not all(_are_all(ranges, self._numel[name]) for ranges in come.values()):
            raise self._lacks(name)
        return self._pieces[name], set(come)

    def _lacks(self, name: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint lacks values of {name!r}", where=self._where)


def _are_all(ranges: list[tuple[int, int]], numel: int) -> bool:
    """Say whether ranges are all of so many elements, each once."""
    at = 0
    for begin, end in sorted(ranges):
        if begin != at:
            return False
        at = end
    return at == numel
