"""Fleet, as its README shows it. What follows a mode after "+" is what a user may do beside: "prefetch", "group", a
``wire_dtype``, "all_reduce" for dense parameters among the workers, "ahead" to have rows brought to the device ahead,
"kept" to let them stay there for a while, "dense" or "all" for ``torch.nn.Embedding`` that stay on the workers or go
remote, and "apart" for calling ``backward`` and ``step`` where ``minimize`` does both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import local_torch
import torch
from torch_model import OneTable, TableEach, batches, make_model
from work import ROW_RANGE, Meter, Work, my_work

import fleet
from fleet import StrategyFactory
from fleet.plan.specs import WIRE_DTYPES
from fleet.role_maker import Role, UserDefinedRoleMaker

STRATEGIES = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "ssp": StrategyFactory.create_ssp_strategy,
    "geo": StrategyFactory.create_geo_strategy,
    "gba": StrategyFactory.create_gba_strategy,
    "auto": StrategyFactory.create_auto_strategy,
}


#: For so many batches rows stay on the device with "kept".
KEPT = 16

INITIALIZER = f"uniform({-ROW_RANGE}, {ROW_RANGE})"


class Group(torch.nn.Module):
    """A table for each slot, asked together."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        tables = {f"slot{slot}": (work.vocabulary, work.dim) for slot in range(work.tables)}
        self.group = fleet.nn.EmbeddingGroup(tables, initializer=INITIALIZER)

    def ids_by_slot(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.group, ids.unbind(1), strict=True))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([*self.group(self.ids_by_slot(ids)).values()], 1)


def make_rows(work: Work, extras: Sequence[str]) -> torch.nn.Module:
    if "group" in extras:
        return Group(work)
    if {"dense", "all"} & {*extras}:
        return local_torch.make_rows(work, sparse=False)
    tables = [fleet.nn.Embedding(work.vocabulary, work.dim, initializer=INITIALIZER) for _ in range(work.tables)]
    return OneTable(*tables) if work.tables == 1 else TableEach(tables)


def asked(rows: torch.nn.Module, ids: torch.Tensor) -> dict[torch.nn.Module, Any]:
    """Which module will be asked for which ids."""
    if isinstance(rows, OneTable):
        return {rows.table: ids}
    if isinstance(rows, TableEach):
        return dict(zip(rows.tables, ids.unbind(1), strict=True))
    return {rows.group: rows.ids_by_slot(ids)}


def main() -> None:
    work = my_work()
    role = Role.SERVER if work.role == "server" else Role.WORKER
    fleet.init(UserDefinedRoleMaker(work.index, role, work.workers, work.servers))
    mode, *extras = work.mode.split("+")
    model = make_model(work, lambda: make_rows(work, extras))
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[work.optimizer]
    optimizer = kind(model.parameters(), lr=work.rate)
    (wire_dtype,) = {*WIRE_DTYPES} & {*extras} or {None}
    dense = "all_reduce" if "all_reduce" in extras else "servers"
    strategy = STRATEGIES[mode](wire_dtype=wire_dtype, **({} if mode == "geo" else {"dense": dense}))
    remote = "all" if "all" in extras else "sparse"
    optimizer = fleet.distributed_optimizer(optimizer, strategy, model=model, remote=remote)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    meter = Meter(work)
    stream = meter.batches(batches(work))
    if {"prefetch", "ahead", "kept"} & {*extras}:
        on_device: dict[str, Any] = {} if "prefetch" in extras else {"device": work.device}
        if "kept" in extras:
            on_device["embedding_staleness"] = KEPT
        stream = fleet.prefetch(stream, lambda batch: asked(model.rows, batch[0]), **on_device)
    for batch in stream:
        loss = model.loss(*batch)
        work.compute()
        if "apart" in extras:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            optimizer.minimize(loss)
        meter.after_step(loss)
    fleet.barrier_worker()  # what is still on its way counts
    meter.end()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
