"""The servers of a job change while it runs, and it ends to the bit where it would have ended without that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import Job

import fleet as fleet_package
from fleet import Fleet
from fleet.role_maker import Role, UserDefinedRoleMaker

STEPS, MOVED_AFTER = 6, 3

#: What trains parameters, and what trains rows.
OPTIMIZERS: dict[str, Callable[[torch.nn.Module], list[torch.optim.Optimizer]]] = {
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
    "adam": lambda model: [torch.optim.Adam(model.parameters(), lr=0.05)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
}


#: torch has one generator for all threads.
one_at_a_time = threading.Lock()


def model_of_all() -> Model:
    with one_at_a_time:
        torch.manual_seed(7)
        return Model()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = fleet_package.nn.Embedding(None, 4)
        self.small = torch.nn.Linear(4, 3)
        self.large = torch.nn.Linear(3, 9000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.large(torch.tanh(self.small(self.table(ids)).sum(1))).square().mean()


def names(numbers: Sequence[int]) -> list[str]:
    return [f"server{number}:1" for number in numbers]


class Resized(Job):
    """Is a job whose servers may change; ``later`` ones start with the list that it is to have."""

    def __init__(self, body: Any, first: Sequence[int], then: Sequence[int], workers: int = 2, **options: Any) -> None:
        super().__init__(body, workers, endpoints=names(first), **options)
        self.then = names(then)
        self.served: list[str] = []

    def serve_at(self, name: str, servers: list[str]) -> None:
        try:
            fleet = Fleet(environ=self.environ, network=self.network)
            fleet.init(UserDefinedRoleMaker(servers.index(name), Role.SERVER, self.workers, servers))
            fleet.init_server()
            fleet.run_server()
            self.served.append(name)
        except BaseException as error:
            self.errors[name] = error

    def start(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self.serve_at, args=(name, self.then), name=f"job-serve-{name}", daemon=True)
            for name in self.then
            if name not in self.endpoints
        ]
        for thread in threads:
            thread.start()
        return [*super().start(), *threads]

    def serve(self, index: int) -> None:
        self.serve_at(self.endpoints[index], self.endpoints)


def ids_of(worker: int, step: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 3), generator=torch.Generator().manual_seed(100 * worker + step))


def training(
    optimizers: str, then: list[str] | None, movers: Sequence[int] = (0,), workers: int = 2
) -> Callable[[Fleet, int], Any]:
    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS[optimizers](model), model=model)
        fleet.init_worker()
        losses = []
        for step in range(STEPS):
            if step == MOVED_AFTER and then is not None and worker in movers:
                fleet.resize_servers(then)
            optimizer.zero_grad()
            loss = model(ids_of(worker, step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        fleet.barrier_worker()
        return losses, fleet.state_dict(model)

    return body


def assert_same(got: Any, expected: Any) -> None:
    for (losses, state), (other_losses, other_state) in zip(got, expected, strict=True):
        assert losses == other_losses
        assert state.keys() == other_state.keys()
        for name, value in state.items():
            assert torch.equal(value, other_state[name]), name


MOVES = {"2 to 4": ([0, 1], [0, 1, 2, 3]), "3 to 1": ([0, 1, 2], [1]), "1 to 2 others": ([0], [1, 2])}


@pytest.mark.parametrize("optimizers", OPTIMIZERS)
@pytest.mark.parametrize("move", MOVES)
def test_a_job_ends_where_it_ends_without_a_move(optimizers: str, move: str) -> None:
    first, then = MOVES[move]
    job = Resized(training(optimizers, names(then)), first, then)
    got = job.run()
    assert sorted(job.served) == sorted({*names(first), *names(then)})
    assert_same(got, Job(training(optimizers, None), 2, len(first)).run())
