"""Makes the data of the examples here: clicks that depend on who is shown what, from a fixed seed."""

from __future__ import annotations

import numpy as np
import pandas as pd

#: How many different values each field of ids has.
SIZES = {"user": 400, "item": 150, "city": 20}


def clicks(rows: int) -> pd.DataFrame:
    """One row an impression: three fields of ids, a number, and whether it was clicked."""
    random = np.random.default_rng(2013)
    data = {name: random.integers(size, size=rows) for name, size in SIZES.items()}
    age = random.random(rows, dtype=np.float32)
    taste = sum(random.normal(size=size)[data[name]] for name, size in SIZES.items())
    clicked = random.random(rows) < 1 / (1 + np.exp(-taste - age))
    return pd.DataFrame({**data, "age": age, "click": clicked.astype(np.float32)})
