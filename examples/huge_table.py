"""A table that does not fit into one server: each is given 512 MiB, and the rows take 582 without what finds them.

    fleetrun --server_num 1 --worker_num 1 examples/huge_table.py     # the job ends, and says which server is full
    fleetrun --server_num 4 --worker_num 1 examples/huge_table.py     # 4,000,000 rows on four servers

Rows belong to servers by their id, so each of four servers holds a quarter of them. The limit is the system's
(RLIMIT_DATA, on Linux), and stands for the memory of a machine.
"""

from __future__ import annotations

import argparse
import resource

import torch

import fleet

ROWS, DIM, BATCH = 4_000_000, 32, 100_000
LIMIT = 512 << 20


def limit_data(more: int) -> None:
    """Let this process have ``more`` bytes of data beside what it has."""
    with open("/proc/self/status") as status:
        (now,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmData:")]
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, now + more))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    fleet.init()
    table = fleet.nn.Embedding(None, DIM, initializer="constant(1.0)")
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), model=table)

    if fleet.is_server():
        fleet.init_server()
        limit_data(LIMIT)
        fleet.run_server()
        return

    fleet.init_worker()
    for start in range(0, ROWS, BATCH):
        ids = torch.arange(start, start + BATCH)
        optimizer.minimize(table(ids).sum())  # a gradient of 1, so that every row ends as zeros
    told = fleet.summary()["tables"]["weight"]
    wrong = table(torch.randint(0, ROWS, (1000,))).count_nonzero()
    size = f"{told['rows']:,} rows, {told['bytes'] >> 20} MiB"
    print(f"{size}, on {fleet.server_num()} servers; {wrong} numbers are wrong")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
