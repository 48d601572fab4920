"""DistributedDataParallel: all processes are workers. They average the gradients of the layers over Gloo, and each has
a table of its own, whose gradients stay with it: what averaging costs where rows cost nothing."""

from __future__ import annotations

import local_torch
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch_model import batches, make_model
from work import Meter, my_work


def main() -> None:
    work = my_work()
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{work.meeting[0]}", rank=work.index, world_size=work.workers
    )
    model = make_model(work, lambda: local_torch.make_rows(work))
    model.top = DistributedDataParallel(model.top)
    optimizer = torch.optim.SGD(model.parameters(), work.rate)
    meter = Meter(work)
    for batch in meter.batches(batches(work)):
        optimizer.zero_grad()
        loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
        meter.after_step(loss)
    meter.end()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
