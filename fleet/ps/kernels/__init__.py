"""The update's maths, by the name of the optimizer. Adding a rule is one file and a line here."""

from __future__ import annotations

from fleet.ps.kernels import adagrad, adam, dense, rmsprop, sgd
from fleet.ps.kernels.rule import HINTS, Column, RowKernel, Rule

RULES: dict[str, Rule] = {rule.name: rule for rule in (sgd.RULE, adagrad.RULE, *adam.RULES, rmsprop.RULE, *dense.RULES)}

#: Optimizers of torch that a server cannot run, and why.
REFUSED: dict[str, str] = {
    "LBFGS": "it evaluates its closure several times in a step, over the whole parameter vector",
}

__all__ = ["HINTS", "REFUSED", "RULES", "Column", "RowKernel", "Rule"]
