"""Linear regression on real data with two servers and two trainers, through ``DistributeTranspiler``.

PaddlePaddle Fluid's quick start with distributed training, ported line for line; the four commands that start it are in
README.md beside this file, and docs/doors.md shows the original. The data are scikit-learn's: 442 patients, ten
measurements each, and how far their diabetes had progressed a year later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from sklearn.datasets import load_diabetes

import fleet
from fleet.transpiler import DistributeTranspiler

EPOCH_NUM = 30
BATCH_SIZE = 8


def train_reader(trainer_id: int, trainers: int, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One epoch over this trainer's share of the patients, in an order of its own."""
    data, target = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True, scaled=False))
    data = (data - data.mean(0)) / data.std(0)
    target = ((target - target.mean()) / target.std()).unsqueeze(1)
    share = torch.arange(trainer_id, len(data), trainers)
    order = share[torch.randperm(len(share), generator=torch.Generator().manual_seed(epoch))]
    for rows in order.split(BATCH_SIZE):
        yield data[rows], target[rows]


def train() -> None:
    # fetch distributed training environment setting
    training_role = os.getenv("PADDLE_TRAINING_ROLE", None)
    port = os.getenv("PADDLE_PSERVER_PORT", "6174")
    pserver_ips = os.getenv("PADDLE_PSERVER_IPS", "")
    trainer_id = int(os.getenv("PADDLE_TRAINER_ID", "0"))
    eplist = []
    for ip in pserver_ips.split(","):
        eplist.append(":".join([ip, port]))
    pserver_endpoints = ",".join(eplist)
    trainers = int(os.getenv("PADDLE_TRAINERS", "1"))
    current_endpoint = os.getenv("PADDLE_CURRENT_IP", "") + ":" + port
    if training_role not in ("TRAINER", "PSERVER"):
        raise SystemExit(
            "PADDLE_TRAINING_ROLE should be one of [TRAINER, PSERVER]; examples/README.md has the commands"
        )
    if not pserver_ips:
        raise SystemExit(
            "PADDLE_PSERVER_IPS should name the servers' hosts, and is not set (fleetrun sets "
            "PADDLE_PSERVERS_IP_PORT_LIST, which this script does not read); examples/README.md has the commands"
        )

    torch.manual_seed(0)
    model = torch.nn.Linear(10, 1)
    fleet.Program(model, torch.optim.SGD(model.parameters(), lr=0.001))

    t = DistributeTranspiler()
    t.transpile(trainer_id=trainer_id, pservers=pserver_endpoints, trainers=trainers)

    if training_role == "PSERVER":
        pserver_prog = t.get_pserver_program(current_endpoint)
        startup_prog = t.get_startup_program(current_endpoint, pserver_prog)
        startup_prog.run()
        pserver_prog.run()
    elif training_role == "TRAINER":
        trainer_prog = t.get_trainer_program()

        for epoch in range(EPOCH_NUM):
            for batch_id, (x, y) in enumerate(train_reader(trainer_id, trainers, epoch)):
                avg_loss = torch.nn.functional.mse_loss(model(x), y)
                trainer_prog.minimize(avg_loss)
                if (batch_id + 1) % 10 == 0:
                    print(f"Epoch: {epoch}, Batch: {batch_id}, loss: {avg_loss.item():.4f}")
        # destroy the resource of current trainer node in pserver server node
        trainer_prog.close()
        print("weights:", " ".join(f"{value:.6f}" for value in [*model.weight[0].tolist(), model.bias.item()]))


if __name__ == "__main__":
    train()
