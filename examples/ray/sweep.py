"""Finds a learning rate with Ray Tune: eight small jobs, each of one server and one worker, as many at a time as fit.

python examples/ray/sweep.py
"""

from __future__ import annotations

from typing import Any

import torch
from ray import tune

import fleet


def train(lr: float) -> float | None:
    fleet.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=lr), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return None
    fleet.init_worker()
    for _ in range(50):
        ids = torch.randint(100, (64, 2))
        loss = torch.nn.functional.mse_loss(model(ids).squeeze(1), (ids[:, 0] > ids[:, 1]).float())
        optimizer.minimize(loss)
    fleet.stop_worker()
    return loss.item()


def trial(config: dict[str, Any]) -> dict[str, float]:
    """A trial only waits for its job, whose actors have resources of their own."""
    (loss,) = fleet.ray.run(
        train,
        config["lr"],
        server_num=1,
        worker_num=1,
        resources_per_server={"CPU": 0.5},
        resources_per_worker={"CPU": 0.5},
    )
    return {"loss": loss}


def main() -> None:
    rates = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
    results = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.01}),
        param_space={"lr": tune.grid_search(rates)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
    ).fit()
    best = results.get_best_result()
    print(f"{len(results)} jobs; the best learning rate is {best.config['lr']:g}")


if __name__ == "__main__":
    main()
