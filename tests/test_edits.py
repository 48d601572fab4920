"""What a script writes into parameters by itself, between two steps, has the result that it has in plain torch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from harness import PATIENT, Job, assert_close, run_job, values
from inside import shard_of, worker_of
from test_parity_dense import OPTIMIZERS

import fleet as fleet_module
from fleet import Fleet
from fleet.errors import UnsupportedError
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.strategy.parameter_server import StrategyFactory

STEPS = 4

Edit = Callable[[torch.nn.Module, int], Any]


class Net(torch.nn.Module):
    """A convolution, for memory that may be laid out in other ways, and a parameter that is in no order of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.line = torch.nn.Linear(12, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.turned = torch.nn.Parameter(torch.randn(4, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.line(self.conv(x).flatten(1))) @ self.turned


def _template() -> torch.nn.Module:
    torch.manual_seed(5)
    return Net()


#: Made once: the threads of a job share torch's random state.
TEMPLATE = _template()
OTHER = {name: value * 0.5 + 0.125 for name, value in TEMPLATE.state_dict().items()}


def loss_of(model: torch.nn.Module, step: int, worker: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step * 100 + worker)
    return model(torch.randn(6, 2, 4, 4, generator=draw)).square().mean()


def drawn(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


@torch.no_grad()
def weights_clamp(model: torch.nn.Module, step: int) -> None:
    for param in model.parameters():
        param.clamp_(-0.2, 0.2)


def data_clamp(model: torch.nn.Module, step: int) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def zero_one(model: torch.nn.Module, step: int) -> None:
    model.line.weight[step % 5].zero_()


def init_again(model: torch.nn.Module, step: int) -> None:
    torch.nn.init.normal_(model.line.weight, generator=drawn(step))
    torch.nn.init.constant_(model.turned, 0.25)


def other_memory(model: torch.nn.Module, step: int) -> None:
    model.line.weight.data = torch.randn(5, 12, generator=drawn(step))
    model.conv.weight.data = model.conv.weight.detach().clone()  # the same values


def load_all(model: torch.nn.Module, step: int) -> None:
    model.load_state_dict(OTHER)


def load_a_part(model: torch.nn.Module, step: int) -> None:
    model.line.load_state_dict({"weight": OTHER["line.weight"] + step, "bias": OTHER["line.bias"]})


def load_and_assign(model: torch.nn.Module, step: int) -> None:
    """As ``load_state_dict(…, assign=True)`` does with tensors that are to be the very parameters."""
    for name, param in model.named_parameters():
        param.data = OTHER[name].clone()


def vector(model: torch.nn.Module, step: int) -> None:
    params = [*model.line.parameters(), *model.norm.parameters()]
    flat = torch.nn.utils.parameters_to_vector(params)
    torch.nn.utils.vector_to_parameters(flat.detach() * 0.75, params)


def numpy_(model: torch.nn.Module, step: int) -> None:
    model.line.bias.detach().numpy()[2] = step


def nothing_new(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2).mul_(0.5)


def not_a_number(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        model.norm.bias[0] = float("nan")
        model.norm.bias[1] = -0.0


def channels_last(model: torch.nn.Module, step: int) -> None:
    model.to(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)
    with torch.no_grad():
        model.conv.weight[0] += 0.5


def swap_in_and_out(model: torch.nn.Module, step: int) -> None:
    there = copy.deepcopy(model.state_dict())
    model.load_state_dict(OTHER)
    model.load_state_dict(there)


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        weights_clamp,
        data_clamp,
        zero_one,
        init_again,
        other_memory,
        load_all,
        load_a_part,
        load_and_assign,
        vector,
        numpy_,
        nothing_new,
        not_a_number,
        channels_last,
        swap_in_and_out,
    )
}

#: Where a job of one worker computes what one process does.
EXACT = {
    "sync": StrategyFactory.create_sync_strategy,
    "ssp": StrategyFactory.create_ssp_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
}


def alike(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def trained_alone(make: Any, edit: Edit, when: str) -> list[list[torch.Tensor]]:
    model = copy.deepcopy(TEMPLATE)
    optimizer = make(list(model.parameters()))
    return [train(model, optimizer, edit, when, step) for step in range(STEPS)]


def train(model: torch.nn.Module, optimizer: Any, edit: Edit, when: str, step: int) -> list[torch.Tensor]:
    """One step; what is there after it."""
    if when == "before":
        edit(model, step)
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if when == "after backward":
        edit(model, step)
    optimizer.step()
    return values(model)


def trained_in_a_job(make: Any, strategy: Any, edit: Edit, when: str, servers: int = 2) -> list[list[torch.Tensor]]:
    def body(fleet: Fleet, _: int) -> list[list[torch.Tensor]]:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet.distributed_optimizer(make(list(model.parameters())), strategy(), model=model)
        fleet.init_worker()
        return [train(model, optimizer, edit, when, step) for step in range(STEPS)]

    return run_job(body, 1, servers)[0]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", EXACT)
def test_an_edit_has_the_result_of_plain_torch(mode: str, edit: str) -> None:
    make, when = OPTIMIZERS["adam"], "before" if edit != "vector" else "after backward"
    expected = trained_alone(make, EDITS[edit], when)
    got = trained_in_a_job(make, EXACT[mode], EDITS[edit], when)
    assert all(alike(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_s_state_stays(name: str) -> None:
    make = OPTIMIZERS[name]
    expected = trained_alone(make, data_clamp, "after backward")
    got = trained_in_a_job(make, StrategyFactory.create_sync_strategy, data_clamp, "after backward")
    assert all(alike(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
