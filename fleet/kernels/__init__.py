"""Finds the maths of an update by the name of the optimizer. Adding a rule is one file and a line here."""

from __future__ import annotations

from fleet.kernels import (
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    decayed_adagrad,
    dense_classes,
    ftrl,
    lamb,
    lars_momentum,
    nadam,
    radam,
    rmsprop,
    row_wise_adagrad,
    sgd,
)
from fleet.kernels.rule import HINTS, Column, RowKernel, Rule

_OF_TORCH = (
    *(sgd.RULE, adagrad.RULE, adadelta.RULE, rmsprop.RULE),
    *(*adam.RULES, adamw.RULE, adamax.RULE, nadam.RULE, radam.RULE),
    *dense_classes.RULES,
)
_OF_FLEET = (ftrl.RULE, decayed_adagrad.RULE, lamb.RULE, lars_momentum.RULE, row_wise_adagrad.RULE)

RULES: dict[str, Rule] = {rule.name: rule for rule in (*_OF_TORCH, *_OF_FLEET)}

#: Optimizers of torch that a server cannot run, and why.
REFUSED: dict[str, str] = {
    "LBFGS": "it evaluates its closure several times in a step, over the whole parameter vector",
}

__all__ = ["HINTS", "REFUSED", "RULES", "Column", "RowKernel", "Rule"]
