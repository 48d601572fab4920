"""Decides which ids get a row, from what is counted of ids that have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import GAMMA, mix, table_key
from fleet.numeric.jit import Array, Ids, compiled
from fleet.plan.life import CountFilter, Probability
from fleet.plan.specs import TableSpec
from fleet.ps.table.exact_counts import ExactCounts, ExactView
from fleet.ps.table.sketch import Sketch, SketchView, cells_of, unit_of

#: Beyond this a count takes eight bytes.
_MOST_IN_FOUR_BYTES = 1 << 31

#: What is counted, as it was at one moment.
CountsView = ExactView | SketchView


class Admission(Protocol):
    """Lets ids in. What is asked about are ids without a row, which are distinct."""

    def __len__(self) -> int:
        """Return how many ids were counted and not let in."""

    @property
    def nbytes(self) -> int: ...

    def admit(self, ids: Ids, counts: Array, weights: Array, step: int) -> tuple[npt.NDArray[np.bool_], Array, Array]:
        """Count look-ups of a step, and return which ids get a row now, and what they have been counted and weighed in
        all."""

    def forget(self, ids: Ids) -> None:
        """Forget what was counted of ids that have got a row otherwise, as far as that can be told from others."""

    def view(self, *, frozen: bool) -> CountsView | None:
        """Return what is counted, as it is now; ``frozen``, it stays so while counts change. None if nothing is
        counted."""

    def about(self, view: CountsView) -> dict[str, Any]:
        """Return in what way something was counted."""

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
        """Take over a piece of what was counted, unless it was counted in a way that says nothing here."""


def admission_of(spec: TableSpec, seed: int) -> Admission | None:
    """Return what decides for a table; None if every id gets a row."""
    rule = spec.admit
    if rule is None:
        return None
    if isinstance(rule, Probability):
        return Chance(rule, spec, seed)
    return ByCount(rule, spec, seed)


class Chance:
    """Lets an id in by chance, which is a function of seed, table, id and step."""

    def __init__(self, rule: Probability, spec: TableSpec, seed: int) -> None:
        self._key = mix(_seeded(seed) ^ table_key(spec.name) ^ GAMMA)
        self._p = float(rule.p)
        self.nbytes = 0

    def __len__(self) -> int:
        return 0

    def admit(self, ids: Ids, counts: Array, weights: Array, step: int) -> tuple[npt.NDArray[np.bool_], Array, Array]:
        out = np.empty(ids.size, np.bool_)
        _by_chance(np.uint64(mix(np.uint64(self._key) ^ np.uint64(step))), self._p, ids, out)
        return out, counts, weights

    def forget(self, ids: Ids) -> None:
        """Do nothing: nothing is counted."""

    def view(self, *, frozen: bool) -> None:
        del frozen

    def about(self, view: CountsView) -> dict[str, Any]:
        raise AssertionError(f"nothing is counted: {view}")

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
        del about, arrays
        return False


class ByCount:
    """Lets an id in once it was looked up often enough."""

    def __init__(self, rule: CountFilter, spec: TableSpec, seed: int) -> None:
        self._of, self._n = rule.of, float(rule.n)
        self._by_weight = rule.of == "weight"
        self._counts: ExactCounts | Sketch
        if rule.sketch_mb is not None:
            key = np.uint64(mix(_seeded(seed) ^ table_key(spec.name)))
            unit = unit_of(self._n) if self._by_weight else 1.0
            self._counts = Sketch(int(rule.sketch_mb * (1 << 20)), self._n, key, unit)
        elif self._by_weight:
            self._counts = ExactCounts(np.float64)
        else:
            self._counts = ExactCounts(np.uint32 if rule.n < _MOST_IN_FOUR_BYTES else np.int64)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes

    def admit(self, ids: Ids, counts: Array, weights: Array, step: int) -> tuple[npt.NDArray[np.bool_], Array, Array]:
        del step
        totals = self._counts.add(ids, weights if self._by_weight else counts)
        out: npt.NDArray[np.bool_] = totals >= self._n
        if out.any():
            self.forget(ids[out])
        return (out, counts, totals) if self._by_weight else (out, totals.astype(np.int64), weights)

    def forget(self, ids: Ids) -> None:
        if isinstance(self._counts, ExactCounts) and len(self._counts):  # in a sketch others stand in the same cells
            self._counts.remove(ids)

    def view(self, *, frozen: bool) -> CountsView:
        return self._counts.view(frozen=frozen)

    def about(self, view: CountsView) -> dict[str, Any]:
        if isinstance(view, SketchView):
            about = {"bits": view.bits, "blocks": view.blocks, "unit": view.unit, "counted": view.counted}
            return {"of": self._of, **about}
        return {"of": self._of}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
        if about["of"] != self._of:
            return False
        if "cells" not in arrays:
            some = arrays["counts"] > 0
            self._counts.add(arrays["ids"][some], arrays["counts"][some])
        elif isinstance(self._counts, Sketch):
            bits, unit = int(about["bits"]), float(about.get("unit", 1.0))  # look-ups had none in earlier versions
            cells = cells_of(arrays["cells"], bits)
            self._counts.load(cells, bits, int(about["start"]), int(about["blocks"]), unit)
            if int(about["start"]) == 0:
                self._counts.count_on(int(about["counted"]))
        else:
            return False
        return True


def _seeded(seed: int) -> np.uint64:
    return mix(np.uint64((seed + int(GAMMA)) % 2**64))  # Python's sum: numpy warns of one that is too large


@compiled
def _by_chance(key: np.uint64, p: float, ids: Ids, out: npt.NDArray[np.bool_]) -> None:
    for k in range(ids.size):
        out[k] = np.float64(mix(key ^ mix(np.uint64(ids[k]) + GAMMA)) >> np.uint64(11)) * 2.0**-53 < p
