"""Handwritten digits by workers that average among themselves, without any server.

    fleetrun --worker_num 2 examples/collective.py
    torchrun --nproc-per-node 2 examples/collective.py --local_sgd 4

Each worker trains on its share of scikit-learn's 1,797 digits; the last 360 are for testing. Gradients are averaged in
every backward, or with ``--local_sgd K`` parameters every K steps. Either way more than 95 % of the answers are right.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

import fleet
from fleet.collective import DistributedStrategy, LocalSGD

EPOCHS = 20
BATCH = 32
TEST = 360


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.from_numpy(data.target)[order]


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 4 * 4, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_sgd", type=int, metavar="K", help="average parameters every K steps")
    options = parser.parse_args()

    fleet.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"  # of several, fleet.init() has chosen this worker's
    model = network().to(device)
    strategy = DistributedStrategy()
    if options.local_sgd is not None:
        strategy.local_sgd = LocalSGD(k_steps=options.local_sgd, begin_step=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fleet.distributed_optimizer(optimizer, strategy, model=model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    images, labels = digits()
    mine = torch.tensor(fleet.split_files(list(range(len(images) - TEST))))
    shuffle = torch.Generator().manual_seed(fleet.worker_index())
    fleet.init_worker()
    for _ in range(EPOCHS):
        for rows in mine[torch.randperm(len(mine), generator=shuffle)].split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(images[rows].to(device)), labels[rows].to(device))
            optimizer.minimize(loss)
        schedule.step()
    fleet.stop_worker()  # from here on the model is the same everywhere

    model.eval()
    with torch.no_grad():
        right = (model(images[-TEST:].to(device)).argmax(1).cpu() == labels[-TEST:]).float().mean()
    print(f"worker {fleet.worker_index()} of {fleet.worker_num()}: accuracy {right:.3f}")


if __name__ == "__main__":
    main()
