"""A row that was never trained has the value that its table's initializer gives it."""

from __future__ import annotations

import numpy as np

from fleet.errors import ConfigurationError
from fleet.numeric.ids import CONSTANT, NORMAL, UNIFORM, initial_rows, table_key
from fleet.numeric.jit import Array, Ids
from fleet.plan.specs import TableSpec

_KINDS = {"zeros": CONSTANT, "constant": CONSTANT, "uniform": UNIFORM, "normal": NORMAL}


class InitialRows:
    """Fills rows of one table: equal seeds, names and ids give equal values, on any server and in any order."""

    def __init__(self, spec: TableSpec, seed: int) -> None:
        start = spec.initializer
        if start.kind not in _KINDS:
            raise ConfigurationError(
                "an initializer is unknown", where=f"table {spec.name!r}", expected=sorted(_KINDS), got=start.kind
            )
        self._kind, self._a, self._b = _KINDS[start.kind], float(start.a), float(start.b)
        self._seed = np.uint64(seed & (2**64 - 1))
        self._key = table_key(spec.name)

    def fill(self, ids: Ids, out: Array) -> None:
        """Write the initial value of ``ids[k]`` into ``out[k]``."""
        initial_rows(self._kind, self._a, self._b, self._seed, self._key, ids, out)
