"""Fleet with nothing to compute: every step sends the gradients of ``tables`` parameters that are there already, of
``width`` numbers each, and ends with the new values in place."""

from __future__ import annotations

import torch
from work import Meter, my_work

import fleet
from fleet.role_maker import Role, UserDefinedRoleMaker


def main() -> None:
    work = my_work()
    role = Role.SERVER if work.role == "server" else Role.WORKER
    fleet.init(UserDefinedRoleMaker(work.index, role, work.workers, work.servers))
    model = torch.nn.ParameterList(torch.ones(work.width) for _ in range(work.tables))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    meter = Meter(work)
    for _ in meter.batches([None]):
        optimizer.step()
        meter.after_step(model[-1][-1])  # every step takes 0.01 of it
    meter.end()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
