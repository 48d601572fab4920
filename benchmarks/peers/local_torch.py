"""One process, no servers: what PyTorch alone reaches."""

from __future__ import annotations

import torch
from torch_model import OneTable, TableEach, batches, make_model
from work import ROW_RANGE, Meter, Work, my_work


def make_rows(work: Work, *, sparse: bool = True) -> torch.nn.Module:
    tables = [torch.nn.Embedding(work.vocabulary, work.dim, sparse=sparse) for _ in range(work.tables)]
    for table in tables:
        torch.nn.init.uniform_(table.weight, -ROW_RANGE, ROW_RANGE)
    return OneTable(*tables) if work.tables == 1 else TableEach(tables)


def main() -> None:
    work = my_work()
    model = make_model(work, lambda: make_rows(work))
    if work.optimizer == "sgd":
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), work.rate)]
    else:
        optimizers = [
            torch.optim.Adam(model.top.parameters(), work.rate),
            torch.optim.SparseAdam(model.rows.parameters(), work.rate),
        ]
    meter = Meter(work)
    for batch in meter.batches(batches(work)):
        loss = model.loss(*batch)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        meter.after_step(loss)
    meter.end()


if __name__ == "__main__":
    main()
