"""Deals anew what servers remember of the dense values that they gave to a worker, or of all that came: each has its
blocks of them, and the servers to come have others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import Plan
from fleet.ps.wire.move_names import GIVEN
from fleet.ps.worker.moved_pushes import layouts_of
from fleet.ps.worker.trained_model import TrainedModel, laid_out

#: What one server has: what it is, and its tensors.
Piece = tuple[dict[str, Any], Sequence[WireTensor]]


def given_anew(worker: int | None, pieces: Sequence[Piece], trained: TrainedModel, plan: Plan) -> list[Piece] | None:
    """Return for each server of a plan what it is to remember, where the servers that there are remember this; None if
    one of them has given the worker nothing: it has all values still to come."""
    flats = [dict(zip(about["dtypes"], (each.torch() for each in tensors), strict=True)) for about, tensors in pieces]
    known = {dtype for flat in flats for dtype in flat}
    for layout, flat in zip(trained.layouts, flats, strict=True):
        for dtype in known.intersection(layout.sizes).difference(flat):
            if worker is not None:
                return None
            flat[dtype] = torch.zeros(layout.sizes[dtype], dtype=getattr(torch, dtype), device="cpu")
    params = trained.description.params
    return [
        ({GIVEN: [worker, None], "dtypes": [*flat]}, [WireTensor.of(each) for each in flat.values()])
        for flat in laid_out(params, trained.layouts, flats, layouts_of(plan))
    ]
