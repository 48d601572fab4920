"""One process of a job with a token: trains a step, after a worker without the token was turned away."""

from __future__ import annotations

import os

import torch

import fleet
from fleet import Fleet
from fleet.errors import AuthenticationError
from fleet.role_maker import EnvRoleMaker

fleet.init()
model = torch.nn.Linear(2, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    without = {key: value for key, value in os.environ.items() if key != "FLEET_AUTH_TOKEN"}
    stranger = Fleet(environ=without)
    stranger.init(EnvRoleMaker(environ=without))
    other = torch.nn.Linear(2, 1)
    stranger.distributed_optimizer(torch.optim.SGD(other.parameters(), lr=0.1), model=other)
    for _ in range(100):
        try:
            stranger.init_worker()
        except AuthenticationError:
            print("turned away without the token")
            break
    fleet.init_worker()
    optimizer.minimize(model(torch.ones(1, 2)).sum())
    fleet.stop_worker()
