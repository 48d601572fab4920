"""Say who is who in code: two servers and two workers, each process started by hand with its own arguments.

Start these in four terminals, in any order:

    python examples/user_defined.py --role server --index 0
    python examples/user_defined.py --role server --index 1
    python examples/user_defined.py --role worker --index 0
    python examples/user_defined.py --role worker --index 1

Every process is told the same endpoints and the same number of workers, and its own place among its kind. The data
have no noise, so the answer is known: each worker prints how far it ended from it.
"""

from __future__ import annotations

import argparse

import torch

import fleet
from fleet.role_maker import Role, UserDefinedRoleMaker

SLOPES, OFFSET = torch.tensor([[2.0, -3.0, 0.5]]), 1.0
STEPS, BATCH = 200, 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit a line in three dimensions as one process of a job.")
    parser.add_argument("--role", choices=["server", "worker"], required=True)
    parser.add_argument("--index", type=int, required=True, help="place among the processes of this role, from 0")
    parser.add_argument("--endpoints", default="127.0.0.1:6001,127.0.0.1:6002", help="all servers, host:port,…")
    parser.add_argument("--worker_num", type=int, default=2, help="how many workers the job has")
    return parser.parse_args()


def batch(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and their values; every worker and every step has its own."""
    draw = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(BATCH, 3, generator=draw)
    return x, x @ SLOPES.T + OFFSET


def main() -> None:
    args = arguments()
    fleet.init(
        UserDefinedRoleMaker(
            current_id=args.index,
            role=Role.SERVER if args.role == "server" else Role.WORKER,
            worker_num=args.worker_num,
            server_endpoints=args.endpoints.split(","),
        )
    )
    model = torch.nn.Linear(3, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()  # returns when every worker has stopped
        return

    fleet.init_worker()  # from here on every worker has worker 0's initial values
    for step in range(STEPS):
        x, y = batch(step, fleet.worker_index())
        optimizer.minimize(torch.nn.functional.mse_loss(model(x), y))
    fleet.stop_worker()

    slopes = [round(value, 4) for value in model.weight.flatten().tolist()]
    print(f"learned  slopes {slopes}, offset {model.bias.item():.4f}")
    print(f"expected slopes {SLOPES.flatten().tolist()}, offset {OFFSET:.4f}")
    error = max((model.weight - SLOPES).abs().max().item(), (model.bias - OFFSET).abs().item())
    print(f"largest error {error:.1e}")


if __name__ == "__main__":
    main()
