"""Holds what Adam and its variants share: their options, the state of a row, and the two readings of weight decay.

Their loops stay apart: each follows its class's order of operations, and compiled functions are of one file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.kernels.rule import Column, named

_COMMON: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False}
_DECAYING: Mapping[str, Any] = {**_COMMON, "weight_decay": 0.0, "decoupled_weight_decay": False}

#: Every option that rows honour, with torch's default. Newer versions of torch have ``decoupled_weight_decay`` among
#: the options of AdamW as well, and obey it.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "SparseAdam": _COMMON,
    "Adam": {**_DECAYING, "amsgrad": False},
    "AdamW": {**_DECAYING, "amsgrad": False, "weight_decay": 1e-2, "decoupled_weight_decay": True},
    "Adamax": {**_COMMON, "lr": 2e-3, "weight_decay": 0.0},
    "NAdam": {**_DECAYING, "lr": 2e-3, "momentum_decay": 4e-3},
    "RAdam": _DECAYING,
}

#: What an option keeps from the first step on (``Rule.kept_from_the_first``).
AMSGRAD: Mapping[str, str] = {"amsgrad": "max_exp_avg_sq"}


def fading(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Name what moves the moments of rows without a gradient, and by them the rows; and weight decay."""
    moments = (f"betas={tuple(options['betas'])}",) if any(options["betas"]) else ()
    return moments + named(options, "weight_decay")


class MomentRows:
    """Updates rows with a first and a second moment, and with ``amsgrad`` the largest second one."""

    options: Mapping[str, Any]

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:
        moments = {"exp_avg": Column(dim), "exp_avg_sq": Column(dim)}
        return {**moments, "max_exp_avg_sq": Column(dim)} if options.get("amsgrad") else moments

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return fading({**self.options, **options})


def decay_and_shrink(options: Mapping[str, Any]) -> tuple[float, float]:
    """Return how much of the weight is added to its gradient, and by what the weight is multiplied: weight decay is one
    or the other."""
    if options["decoupled_weight_decay"]:
        return 0.0, 1 - options["lr"] * options["weight_decay"]
    return options["weight_decay"], 1.0
