"""Synchronous training ends where one process ends that averages the workers' gradients in worker order."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable

import pytest
import torch
from harness import assert_close, run_job, values

from fleet import Fleet
from fleet.transpiler import DistributeTranspilerConfig

STEPS = 6

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, betas=(0.8, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, eps=1e-6),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, rho=0.8, weight_decay=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, weight_decay=0.01),
}

#: (slice_var_up, split_method)
PLACEMENTS = [(True, "RoundRobin"), (True, "HashName"), (False, "RoundRobin"), (False, "HashName")]


def _template() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(13, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))


#: Made once: the threads of a job share torch's random state.
TEMPLATE = _template()


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return copy.deepcopy(TEMPLATE).to(dtype)


def loss_of(model: torch.nn.Module, step: int, worker: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step * 100 + worker)
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 13, generator=draw).to(dtype)
    y = torch.randn(8, 3, generator=draw).to(dtype)
    return torch.nn.functional.mse_loss(model(x), y)


def reference(make: Make, workers: int, dtype: torch.dtype = torch.float32, steps: int = STEPS) -> list[torch.Tensor]:
    model = make_model(dtype)
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        total: list[torch.Tensor] = []
        for worker in range(workers):
            optimizer.zero_grad()
            loss_of(model, step, worker).backward()
            grads = [p.grad.clone() for p in model.parameters()]
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad / workers
        optimizer.step()
    return values(model)


def distributed(
    make: Make,
    workers: int,
    servers: int,
    placement: tuple[bool, str] = (True, "RoundRobin"),
    dtype: torch.dtype = torch.float32,
    last: int | None = None,
) -> list[list[torch.Tensor]]:
    """What every worker ends with; ``last`` is a worker whose gradients come after all others'."""
    config = DistributeTranspilerConfig()
    config.slice_var_up, config.split_method = placement
    config.min_block_size = 20

    def body(fleet: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model(dtype)
        optimizer = fleet.distributed_optimizer(make(list(model.parameters())), config, model=model)
        if worker:
            # Worker 0's values win, whatever the others start from.
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.fill_(float(worker))
        fleet.init_worker()
        for step in range(STEPS):
            if worker == last:
                time.sleep(0.01)
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    return run_job(body, workers, servers)


#: Every optimizer with every placement and every number of workers and of servers, and every layout of these three with
#: some optimizer: what is wrong with two of them together shows, without all 612 combinations.
CASES = [
    (name, 1 + (which + turn) % 3, 1 + (which // 3 - turn) % 3, placement)
    for which, name in enumerate(OPTIMIZERS)
    for turn, placement in enumerate(PLACEMENTS)
]


def test_every_layout_and_every_pair_is_among_the_cases() -> None:
    counts, names = range(1, 4), list(OPTIMIZERS)
    assert {case[1:] for case in CASES} == set(itertools.product(counts, counts, PLACEMENTS))
    for other, values_ in ((1, counts), (2, counts), (3, PLACEMENTS)):
        assert {(case[0], case[other]) for case in CASES} == set(itertools.product(names, values_))


def ids_of(case: tuple[str, int, int, tuple[bool, str]]) -> str:
    name, workers, servers, (sliced, method) = case
    return f"{name}-{workers}-{servers}-{'sliced' if sliced else 'whole'}-{method}"


#: Two of each optimizer are quick to show what is wrong with it, and all of them, what is wrong with a layout.
@pytest.mark.parametrize(
    ("name", "workers", "servers", "placement"),
    [
        pytest.param(
            *case,
            id=ids_of(case),
            marks=() if place % 4 in ((place // 4) % 4, (place // 4 + 1) % 4) else pytest.mark.slow,
        )
        for place, case in enumerate(CASES)
    ],
)
def test_ends_where_one_process_ends(name: str, workers: int, servers: int, placement: tuple[bool, str]) -> None:
    expected = reference(OPTIMIZERS[name], workers)
    for got in distributed(OPTIMIZERS[name], workers, servers, placement):
        assert_close(got, expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_other_element_types(dtype: torch.dtype, tolerance: float) -> None:
    expected = reference(OPTIMIZERS["sgd-momentum"], 2, dtype)
    for got in distributed(OPTIMIZERS["sgd-momentum"], 2, 2, dtype=dtype):
        assert_close(got, expected, tolerance)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_runs_are_bit_identical_whatever_the_order_of_arrival(name: str) -> None:
    runs = [distributed(OPTIMIZERS[name], 3, 2, last=last) for last in (None, 0, 1, 2)]
    for got in itertools.chain(*runs):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, runs[0][0], strict=True))


def test_one_worker_is_plain_torch_to_the_bit() -> None:
    expected = reference(OPTIMIZERS["adam"], 1)
    (got,) = distributed(OPTIMIZERS["adam"], 1, 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def test_equal_batches_are_one_big_batch() -> None:
    """Mean loss and equal sizes: two workers are one process on the concatenated batches, up to rounding."""

    def batch(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(step * 10 + worker)
        return torch.randn(8, 13, generator=draw), torch.randn(8, 3, generator=draw)

    def body(fleet: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet.init_worker()
        for step in range(STEPS):
            x, y = batch(step, worker)
            optimizer.minimize(torch.nn.functional.mse_loss(model(x), y))
        return values(model)

    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(batch(step, 0), batch(step, 1), strict=True))
        plain.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        plain.step()
    for got in run_job(body, 2, 2):
        assert_close(got, values(model))


def test_fewer_parameters_than_servers() -> None:
    def body(fleet: Fleet, worker: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=0.5))
        fleet.init_worker()
        for _ in range(3):
            optimizer.minimize((weight * (worker + 1)).sum())
        return weight.detach().clone()

    for got in run_job(body, 2, 5):
        assert torch.equal(got, torch.full((3,), 1 - 3 * 0.5 * 1.5))


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_optimizers_that_mix_elements_stay_whole(name: str) -> None:
    cls = getattr(torch.optim, name, None)
    if cls is None:
        pytest.skip(f"this torch has no {name}")

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return cls([p for p in params if p.ndim == 2], lr=0.01)

    expected = reference(make, 2)
    for got in distributed(make, 2, 3):
        assert_close([g for g in got if g.ndim == 2], [e for e in expected if e.ndim == 2])


def test_deep_copies_of_the_model_are_left_alone() -> None:
    def body(fleet: Fleet, worker: int) -> None:
        model = make_model()
        average = copy.deepcopy(model)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet.init_worker()
        optimizer.minimize(loss_of(model, 0, worker))
        assert_close(values(average), values(make_model()))

    run_job(body, 2, 1)
