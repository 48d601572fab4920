"""A worker forks between two steps. The child tries what it may not do, and looks rows up; the parent goes on training.

Prints a line of JSON for each kind of job: what the child was told, what it read, and where the parent ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.role_maker import Role, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker

STRATEGIES = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "ssp": StrategyFactory.create_ssp_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(1),
    "dc-asgd": lambda: StrategyFactory.create_async_strategy(dc_asgd_lambda=0.5),
}
QUICK = {"FLAGS_rpc_deadline": "20000"}


def told(act: Callable[[], object]) -> str:
    """What somebody is told who does this."""
    try:
        return f"nothing: {act()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def in_a_fork(act: Callable[[], dict[str, Any]]) -> Any:
    """What it returns in a forked child."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        found = told(lambda: os.write(into, json.dumps(act()).encode()))
        os._exit(0 if found.startswith("nothing") else os.write(2, found.encode()) and 1)
    os.close(into)
    with os.fdopen(out) as pipe:
        found = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child failed with {status}"
    return json.loads(found)


def job(fleet_: Fleet, strategy: str, *, has_begun: bool = True) -> dict[str, Any]:
    """Steps of gradient -1 and -10, with a child between them that tries to make one of -100. With ``has_begun`` it may
    go on with a loop of its parent's."""
    weight = torch.nn.Parameter(torch.zeros(1))
    table = fleet.nn.Embedding(None, 1, initializer="zeros")
    model = torch.nn.ModuleList([table])
    sgd = torch.optim.SGD([weight, table.weight], lr=1.0)
    optimizer = fleet_.distributed_optimizer(sgd, STRATEGIES[strategy](), model=model)
    fleet_.init_worker()

    def loss(size: float) -> torch.Tensor:
        return -size * (weight + table(torch.tensor([7]))[0]).sum()

    optimizer.minimize(loss(1))
    fleet_.barrier_worker()
    begun: Any = fleet_.prefetch([torch.tensor([7])] * 3, lambda ids: {table: ids})
    if has_begun:
        next(begun)

    def child() -> dict[str, Any]:
        calls: Mapping[str, Callable[[], object]] = {
            "minimize": lambda: optimizer.minimize(-100 * weight.sum()),
            "step": optimizer.step,
            "barrier_worker": fleet_.barrier_worker,
            "metrics": lambda: fleet_.metrics.sum(1.0),
            "save_persistables": lambda: fleet_.save_persistables("nowhere"),
            "summary": fleet_.summary,
            "prefetch": lambda: next(iter(fleet_.prefetch([torch.tensor([7])], lambda ids: {table: ids}))),
            "prefetch()": lambda: next(begun),
            "add_param_group": lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]}),
            "stop_worker": fleet_.stop_worker,
        }
        found = {call: told(act) for call, act in calls.items()}
        table.eval()
        return {"told": found, "row": told(lambda: table(torch.tensor([7])).item()), "step": fleet_.resume_step()}

    of_child = in_a_fork(child)
    begun.close()
    optimizer.zero_grad()
    loss(10).backward()
    optimizer.step()
    fleet_.barrier_worker()
    with torch.no_grad():
        row = table(torch.tensor([7])).item()
    state = fleet_.state_dict(model)
    assert state["0.weight"].item() == row
    steps = fleet_.resume_step()
    fleet_.stop_worker()
    return {"child": of_child, "row": row, "steps": steps}


def with_a_server(strategy: str, environ: Mapping[str, str], *, has_begun: bool = True) -> dict[str, Any]:
    from fleet.launch.host_network import free_ports

    endpoints = [f"127.0.0.1:{port}" for port in free_ports(1)]

    def serve() -> None:
        server = Fleet(environ=environ)
        server.init(UserDefinedRoleMaker(0, Role.SERVER, 1, endpoints))
        server.init_server()
        server.run_server()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    worker = Fleet(environ=environ)
    worker.init(UserDefinedRoleMaker(0, Role.WORKER, 1, endpoints))
    found = job(worker, strategy, has_begun=has_begun)
    thread.join(20)
    return found


def alone() -> dict[str, Any]:
    worker = Fleet(environ=QUICK)
    worker.init()
    return job(worker, "sync")


def collective() -> dict[str, Any]:
    from fleet.launch.host_network import free_ports

    worker = Fleet(environ=QUICK)
    worker.init(UserDefinedCollectiveRoleMaker(0, [f"127.0.0.1:{port}" for port in free_ports(1)]))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = worker.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
    worker.init_worker()
    optimizer.minimize(-weight.sum())

    def child() -> dict[str, Any]:
        calls: Mapping[str, Callable[[], object]] = {
            "minimize": lambda: optimizer.minimize(-100 * weight.sum()),
            "backward": lambda: (-100 * weight.sum()).backward(),
            "step": optimizer.step,
            "barrier_worker": worker.barrier_worker,
            "metrics": lambda: worker.metrics.sum(1.0),
            "stop_worker": worker.stop_worker,
        }
        return {"told": {call: told(act) for call, act in calls.items()}}

    of_child = in_a_fork(child)
    optimizer.minimize(-10 * weight.sum())
    end = weight.item()
    worker.stop_worker()
    return {"child": of_child, "row": end, "steps": 2}


if __name__ == "__main__":
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "alone": alone,
        "collective": collective,
        # Amid requests gRPC does not prepare for a fork, and may end the child.
        "no-direct-connections": lambda: with_a_server("sync", {**QUICK, "FLEET_DIRECT_PORT": "off"}, has_begun=False),
        **{name: (lambda name=name: with_a_server(name, QUICK)) for name in STRATEGIES},  # type: ignore[misc]
    }
    for name in sys.argv[1:] or kinds:
        print(json.dumps({"job": name, **kinds[name]()}), flush=True)
