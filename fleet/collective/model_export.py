"""Exports the whole model as plain tensors on the CPU: every worker of a collective job has all of it."""

from __future__ import annotations

import torch

from fleet.collective.batch_norm import StatisticsGroup
from fleet.collective.lease import write_once
from fleet.collective.worker import CollectiveWorker
from fleet.serving import export


def state_dict(model: torch.nn.Module, *, tables: bool) -> dict[str, torch.Tensor]:
    """Return a copy of ``model.state_dict()``. Remote tables have no rows in such a job: they are left out or
    refused."""
    if tables:
        return _copied(export.state_in_job(model, ()))
    state = export.own_state(model)
    remote = export.remote_tables(state)
    return _copied({key: value for key, value in state.items() if key not in remote})


def save_inference_model(
    worker: CollectiveWorker, dirname: str, model: torch.nn.Module, example_inputs: object, statistics: StatisticsGroup
) -> None:
    """Write the model to serve, by the first worker that calls this after its step; the others wait until it is
    written."""
    state = export.state_to_save(model, (), example_inputs)
    alone = {id(statistics): StatisticsGroup()}  # batch norms of a copy to serve meet nobody

    def write() -> None:
        export.save(dirname, model, lambda: _copied(state), {}, example_inputs, alone)

    write_once(worker, f"model {dirname}", write)


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
