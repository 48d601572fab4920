"""Tells once what a user might not expect of a model's embeddings, on the servers and on the workers."""

from __future__ import annotations

import logging

import torch

from fleet.kernels import RULES
from fleet.nn.handle import handle_of
from fleet.ps.worker.describe import Description
from fleet.ps.worker.remote_choice import Torchs

_log = logging.getLogger("fleet")

#: Dense embeddings above this are told of. They travel whole in each step.
LARGE_BYTES = 64 << 20

_IF_TRAINED = "With sparse=True, or distributed_optimizer(…, model=model, remote='all'), its rows alone travel."
_IF_FROZEN = "One that is frozen does not if the optimizer is not given it."

#: So many names are told, and how many more there are.
_NAMES = 3


class EmbeddingRemarks:
    """Remembers what it has told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, model: torch.nn.Module, described: Description) -> None:
        for subject, remark in (("lazy", lazy_rows(model, described)), ("large", large_dense(model, described))):
            if remark and subject not in self._told:
                self._told.add(subject)
                _log.warning("%s", remark)


def lazy_rows(model: torch.nn.Module, described: Description) -> str | None:
    """Say where rows end elsewhere than they would in torch, which would train these modules densely."""
    dense_in_torch = {
        id(handle_of(module.weight)) for module in model.modules() if isinstance(module, Torchs) and not module.sparse
    }
    tables: list[str] = []
    reasons: dict[str, None] = {}
    for handle, spec in zip(described.handles, described.spec.tables, strict=True):
        rule = RULES[described.spec.groups[spec.group].rule]
        if id(handle) not in dense_in_torch or rule.rows is None:
            continue
        changes = rule.rows.idle_changes(described.option_values(spec.group))
        if changes:
            tables.append(repr(spec.name))
            reasons[f"{rule.name} with {', '.join(changes)}"] = None
    if not tables:
        return None
    return (
        f"rows are lazy in the tables {_listed(tables)}: a step changes those that its batch looked up, where "
        f"{' and '.join(reasons)} would in torch also change all others. It is what torch does with sparse gradients; "
        "to have the dense formula, let them stay on the workers"
    )


def large_dense(model: torch.nn.Module, described: Description) -> str | None:
    """Say which embeddings travel whole in each step, and what to do."""
    names = {id(param): spec.name for param, spec in zip(described.params, described.spec.params, strict=True)}
    large = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, Torchs) and id(module.weight) in names and module.weight.nbytes > LARGE_BYTES
    }
    if not large:
        return None
    sizes = [f"{names[key]!r} ({weight.nbytes >> 20} MiB)" for key, weight in large.items()]
    states = {weight.requires_grad for weight in large.values()}
    advice = " ".join(todo for trained, todo in ((True, _IF_TRAINED), (False, _IF_FROZEN)) if trained in states)
    return f"dense embeddings travel whole between worker and servers in each step: {_listed(sizes)}. {advice}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
