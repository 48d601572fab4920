"""What the ranks of test_collective.py do: each check is a job of its own, most of them beside torch's own DDP."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import shutil
import unittest
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import until
from inside import abort
from ranks import Check, Rank, serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

import fleet.nn as fleet_nn
from fleet import Checkpoints
from fleet.checkpoint.inspection import buffers
from fleet.checkpoint.manifest import Checkpoint
from fleet.collective import DGC, DistributedStrategy, GradientMerge, LocalSGD, PowerSGD, object_states
from fleet.errors import (
    CheckpointError,
    ConfigurationError,
    FleetError,
    JobAbortedError,
    NonFiniteGradientError,
    PlanMismatchError,
    StateError,
    UnsupportedError,
)

warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")

CHECKS: dict[str, Check] = {}
#: The numbers of ranks a check runs on; 2 where it says nothing.
SIZES: dict[str, tuple[int, ...]] = {}


def check(*sizes: int) -> Callable[[Check], Check]:
    def enter(function: Check) -> Check:
        CHECKS[function.__name__] = function
        SIZES[function.__name__] = sizes or (2,)
        return function

    return enter


# ---------------------------------------------------------------- what is trained


def network(seed: int = 0) -> nn.Sequential:
    """No bias before the batch norm: its gradient would be rounding errors, of which Adam makes whole steps."""
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
    return first.extend([nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)])


def large(seed: int = 0) -> nn.Sequential:
    """With two weights of 16,384 elements and more."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 2))


def batch(rank: int, step: int, width: int = 8) -> torch.Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int, width: int = 8) -> torch.Tensor:
    return model(batch(rank, step, width)).square().mean()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in (*model.parameters(), *model.buffers())]


def close(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def raises(kind: type[BaseException], words: str, call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)
    return str(caught.value)


def alike(me: Rank, fleet: Any, tensors: Sequence[torch.Tensor]) -> None:
    """The same bits on all ranks."""
    flat = torch.cat([tensor.double().reshape(-1) for tensor in tensors])
    assert torch.equal(fleet.all_reduce_worker(flat, op="max"), fleet.all_reduce_worker(flat, op="min"))


_groups: list[Any] = []
#: The last one. Where torch's reducer, which DistributedDataParallel has, is the last to hold a group, it waits for the
#: group's threads with the interpreter's lock, and one of them may want that to let go of its last barrier. Python,
#: where it is the last, waits without.
_parted: list[Any] = []


@contextlib.contextmanager
def torch_group(me: Rank) -> Iterator[None]:
    """A process group of the user's own."""
    _groups.append(me.scratch / f"store.{me.size}.{len(_groups)}")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(_groups[-1]), me.size),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=100),
    )
    _parted[:] = [dist.group.WORLD]
    yield
    dist.barrier()
    dist.destroy_process_group()


Train = Callable[[nn.Module, Any, Callable[[], Any]], None]


def beside_ddp(
    me: Rank,
    train: Train,
    build: Callable[[], nn.Module] = network,
    optimizer: Callable[[Any], Any] = lambda params: torch.optim.Adam(params, lr=0.01),
    strategy: Any = None,
    hook: Callable[[DistributedDataParallel], None] = lambda ddp: None,
    tolerance: float = 1e-6,
    **ddp_options: Any,
) -> Any:
    """The same training twice, by DistributedDataParallel and by a job of ours in the same process group."""
    with torch_group(me):
        theirs = DistributedDataParallel(build(), **ddp_options)
        hook(theirs)
        train(theirs, optimizer(theirs.parameters()), theirs.no_sync)
        fleet = me.fleet()
        model = build()
        ours = fleet.distributed_optimizer(optimizer(model.parameters()), strategy, model=model)
        fleet.init_worker()
        train(model, ours, ours.no_sync)
        close(values(model)[: len(list(model.parameters()))], list(theirs.module.parameters()), tolerance)
        # Those of batch norms: DDP hands rank 0's on before a forward, ours after a backward.
        if me.rank == 0:
            close(list(model.buffers()), list(theirs.module.buffers()), tolerance)
        alike(me, fleet, values(model))
        summary = fleet.summary()
        fleet.stop_worker()
        assert dist.is_initialized(), "what the user made stays"
    return summary


# ---------------------------------------------------------------- plain averaging


@check(1, 2, 4)
def thirty_steps_end_where_ddp_ends(me: Rank) -> Any:
    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        for step in range(30):
            optimizer.zero_grad()
            loss_of(model, me.rank, step).backward()
            optimizer.step()

    return beside_ddp(me, train)["rounds"]


@check(2)
def momentum_schedule_and_clipping_end_where_ddp_ends(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, me.rank, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()

    beside_ddp(me, train, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01))


@check(2)
def hooks_before_a_step_see_everybodys_gradients(me: Rank) -> None:
    """And what they do to them counts, once, also where it does not show in the gradients' versions."""

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.data.clamp_(-0.05, 0.05).div_(2)

    def hooked(params: Any) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(params, lr=0.1)
        inner.register_step_pre_hook(halve)
        return inner

    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        optimizer.register_step_pre_hook(halve)
        for step in range(6):
            if step == 3:  # on all of this process's optimizers: it may not see the same step twice
                handles.append(register_optimizer_step_pre_hook(halve))
            loss = loss_of(model, me.rank, step)
            if isinstance(model, DistributedDataParallel):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                optimizer.minimize(loss)
        handles.pop().remove()

    handles: list[RemovableHandle] = []
    beside_ddp(me, train, optimizer=hooked)


@check(2)
def a_model_that_is_converted_in_a_running_job_is_told_so(me: Rank) -> None:
    """In part or whole, and converted back as well: torch then forgets who waits for its gradients."""
    local_sgd = DistributedStrategy(local_sgd=LocalSGD(k_steps=2))
    to, back = "was given another element type in a running job", "was converted in a running job, and back"
    ways: list[tuple[str, Any, Callable[[nn.Sequential], Any]]] = [
        (to, None, lambda model: model.double()),
        (to, None, lambda model: model[3].double()),
        (to, local_sgd, lambda model: model[3].half()),
        (back, None, lambda model: model.double().float()),
    ]
    for words, strategy, convert in ways:
        fleet = me.fleet()
        model = network()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet.init_worker()
        optimizer.minimize(loss_of(model, me.rank, 0))
        if me.rank == 1:
            convert(model)
            loss = torch.stack([each.double().sum() for each in model.parameters()]).sum()
            raises(UnsupportedError, words, lambda loss=loss, minimize=optimizer.minimize: minimize(loss))  # type: ignore[misc]
            abort(fleet, "converted")
        else:
            with pytest.raises(FleetError, match="worker 1 failed"):
                deque(optimizer.minimize(loss_of(model, 0, step)) for step in (1, 2))
        fleet.stop_worker()


@check(2)
def accumulation_needs_no_care(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        for step in range(6):
            optimizer.zero_grad()
            for part in range(3):
                loss_of(model, me.rank, 10 * step + part).backward()
            optimizer.step()

    assert beside_ddp(me, train)["rounds"] == 18


@check(2)
def no_sync_accumulates_without_traffic(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        for step in range(6):
            optimizer.zero_grad()
            with no_sync():
                for part in range(2):
                    loss_of(model, me.rank, 10 * step + part).backward()
            loss_of(model, me.rank, 10 * step + 2).backward()
            optimizer.step()

    assert beside_ddp(me, train)["rounds"] == 6


class Branches(nn.Module):
    """One part that only rank 0 uses, one that is used now and then, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.first, self.sometimes, self.never = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, first: bool, sometimes: bool) -> torch.Tensor:
        x = self.shared(x)
        x = self.first(x) if first else x
        return self.sometimes(x) if sometimes else x


@check(2)
def parameters_without_a_gradient(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        for step in range(8):
            optimizer.zero_grad()
            model(batch(me.rank, step), me.rank == 0, step % 3 == 0).square().mean().backward()
            whole = model.module if isinstance(model, DistributedDataParallel) else model
            assert whole.never.weight.grad is None
            assert whole.first.weight.grad is not None, "rank 0 has one"
            assert (whole.sometimes.weight.grad is not None) == (step % 3 == 0)
            optimizer.step()

    beside_ddp(
        me,
        train,
        Branches,
        # Its weight decay moves what has a gradient of zeros, and leaves alone what has none.
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
        find_unused_parameters=True,
    )


@check(2)
def a_grad_scaler_skips_on_all_ranks_alike(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, me.rank, step) * (float("inf") if (me.rank, step) == (1, 4) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1024.0 * 2 / 2 * 2, "grown after 3 steps, halved at the infinity, grown again"

    beside_ddp(me, train)


@check(2)
def a_compiled_model(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        forward = torch.compile(model, backend="aot_eager")
        for step in range(5):
            optimizer.zero_grad()
            loss_of(forward, me.rank, step).backward()
            optimizer.step()

    beside_ddp(me, train)


@check(2)
def several_optimizers(me: Rank) -> None:
    with torch_group(me):
        theirs = DistributedDataParallel(network())
        model = network()

        def two(of: nn.Module) -> list[Any]:
            params = list(of.parameters())
            return [torch.optim.SGD(params[:2], lr=0.1, momentum=0.9), torch.optim.Adam(params[2:], lr=0.01)]

        fleet = me.fleet()
        inner, their_own = two(model), two(theirs)
        ours = fleet.distributed_optimizer(inner, model=model)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (inner[0], their_own[0])]
        fleet.init_worker()
        for step in range(10):
            ours.minimize(loss_of(model, me.rank, step))
            for each in their_own:
                each.zero_grad()
            loss_of(theirs, me.rank, step).backward()
            for each in their_own:
                each.step()
            for schedule in schedules:
                schedule.step()
        close(list(model.parameters()), list(theirs.module.parameters()))
        raises(StateError, "would train this worker alone", inner[0].step)
        fleet.stop_worker()


@check(2)
def the_model_stays_what_it_is(me: Rank) -> None:
    random_before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    model = network(me.rank)
    torch.set_rng_state(random_before[0])
    keys, kind = list(model.state_dict()), type(model)
    first = network(0).state_dict()
    torch.set_rng_state(random_before[0])
    fleet = me.fleet()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), model=model)
    fleet.init_worker()
    close(list(model.state_dict().values()), list(first.values()), 0)
    optimizer.minimize(loss_of(model, me.rank, 0))
    fleet.stop_worker()
    assert (list(model.state_dict()), type(model)) == (keys, kind)
    assert torch.equal(torch.get_rng_state(), random_before[0])
    assert np.random.get_state()[1].tolist() == random_before[1]
    copy.deepcopy(model)
    loss_of(model, me.rank, 1).backward()  # it is free again


@check(2)
def buffers_of_any_type_are_the_first_ranks(me: Rank) -> None:
    """Also of those that Gloo has no name for."""
    types = torch.bool, torch.uint8, torch.int16, torch.uint16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64
    model = network()
    for position, dtype in enumerate(types):
        model.register_buffer(f"b{position}", torch.full((3,), me.rank).to(dtype))
    fleet = me.fleet()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    for position, dtype in enumerate(types):
        got = model.get_buffer(f"b{position}")
        assert got.dtype == dtype
        assert not got.to(torch.complex64).any(), dtype
    fleet.stop_worker()


@check(2)
def two_backwards_through_one_graph(me: Rank) -> None:
    """The statistics of a batch norm, which the first one brings from worker 0, are in that graph."""
    model, expected = network(), network()
    fleet = me.fleet()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        theirs.zero_grad()
        for rank in range(me.size):
            found = expected(batch(rank, step))
            ((found.square().mean() + found.abs().mean()) / me.size).backward()
        found = model(batch(me.rank, step))
        found.square().mean().backward(retain_graph=True)
        found.abs().mean().backward()
        optimizer.step()
        theirs.step()
    alike(me, fleet, values(model))
    close([each.detach() for each in model.parameters()], [each.detach() for each in expected.parameters()])
    fleet.stop_worker()


@check(2)
def two_backwards_read_a_buffer(me: Rank) -> None:
    """One that nobody changes, as a mask is, and that the graph has saved."""
    fleet, layer, scale = me.fleet(), nn.Linear(8, 4), nn.Module()
    scale.register_buffer("scale", torch.ones(4))
    model = nn.ModuleList([layer, scale])
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    for step in range(2):
        optimizer.zero_grad()
        found = layer(batch(me.rank, step)) * scale.scale
        found.square().mean().backward(retain_graph=True)
        found.abs().mean().backward()
        optimizer.step()
    alike(me, fleet, values(model))
    fleet.stop_worker()


@check(2)
def a_gradient_with_a_graph_is_refused(me: Rank) -> None:
    fleet, model = me.fleet(), nn.Linear(8, 4)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    loss = loss_of(model, me.rank, 0)
    raises(UnsupportedError, "backward(create_graph=True)", lambda: loss.backward(create_graph=True))
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, me.rank, 0).backward(create_graph=True)
        assert model.weight.grad.requires_grad
    optimizer.zero_grad()
    gradients = torch.autograd.grad(loss_of(model, me.rank, 0), list(model.parameters()), create_graph=True)
    sum(each.square().sum() for each in gradients).backward()
    optimizer.step()
    alike(me, fleet, values(model))
    fleet.stop_worker()


@check(2)
def a_process_group_that_is_destroyed_is_missed_by_name(me: Rank) -> None:
    fleet, model = me.fleet(), nn.Linear(8, 4)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    world, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None  # as dist.destroy_process_group() leaves it
    raises(StateError, "process group was destroyed", optimizer.step)
    dist.GroupMember.WORLD = world
    fleet.stop_worker()


@check(2)
def what_a_module_keeps_beside_tensors_is_loaded(me: Rank) -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    fleet, model = me.fleet(), Counting(8, 4)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    fleet.load_state_dict(model, {**model.state_dict(), "weight": torch.ones(4, 8), "_extra_state": {"seen": 3}})
    assert model.seen == 3
    assert model.weight.eq(1).all()
    fleet.stop_worker()


@check(2)
def synchronized_batch_norms_are_pickled_and_evaluate_alone(me: Rank) -> None:
    fleet = me.fleet()
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4))
    strategy = DistributedStrategy(sync_batch_norm=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    loaded = pickle.loads(pickle.dumps(model))
    if me.rank == 0:
        model.eval()
        assert torch.equal(loaded.eval()(batch(0, 1)), model(batch(0, 1)))
        close([model[1](model[0](batch(0, 1))).mean(0)], [torch.zeros(4)])
        model.train()
    loss_of(copy.deepcopy(model), me.rank, 1).backward()  # a copy meets where the model does
    optimizer.minimize(loss_of(model, me.rank, 1))
    alike(me, fleet, values(model))
    fleet.stop_worker()


@check(2, 4)
def uneven_data(me: Rank) -> None:
    """Rank r has 3 + 2r batches: each round is the mean over those who are still there, and all end alike."""
    last = 3 + 2 * (me.size - 1)

    def alone() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 4))
        torch.manual_seed(5)
        nn.init.normal_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(last):
            optimizer.zero_grad()
            there = [rank for rank in range(me.size) if step < 3 + 2 * rank]
            (sum(loss_of(model, rank, step) for rank in there) / len(there)).backward()
            optimizer.step()
        return model

    expected = alone()
    model = nn.Sequential(nn.Linear(8, 4))
    torch.manual_seed(5)
    nn.init.normal_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    fleet = me.fleet()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    fleet.init_worker()
    for step in range(3 + 2 * me.rank):
        optimizer.minimize(loss_of(model, me.rank, step))
    fleet.stop_worker()
    close(list(model.parameters()), list(expected.parameters()))


@check(2)
def a_rank_without_any_data(me: Rank) -> None:
    model, expected = network(), network()
    fleet = me.fleet()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(4):
        theirs.zero_grad()
        loss_of(expected, 0, step).backward()
        theirs.step()
        if me.rank == 0:
            optimizer.minimize(loss_of(model, 0, step))
            assert fleet.all_reduce_worker(3.0) == 3.0 or step == 0, "one that has left is not waited for"
    fleet.stop_worker()
    close(values(model), values(expected))


@check(2)
def parameters_that_come_later(me: Rank) -> None:
    fleet = me.fleet()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    torch.manual_seed(me.rank)
    more = nn.Linear(8, 8)
    optimizer.add_param_group({"params": more.parameters(), "lr": 0.01})
    model.append(more)
    optimizer.minimize(loss_of(model, me.rank, 1))
    alike(me, fleet, values(model))
    more.weight.requires_grad_(False)
    optimizer.minimize(loss_of(model, me.rank, 2))
    more.weight.requires_grad_(True)  # nobody says so to us
    optimizer.minimize(loss_of(model, me.rank, 3))
    more.weight.requires_grad_(False)
    optimizer.add_param_group({"params": model[1].parameters()})
    model[1].requires_grad_(True)  # seen in the step, after a backward without it
    optimizer.minimize(loss_of(model, me.rank, 4))
    optimizer.minimize(loss_of(model, me.rank, 5))
    alike(me, fleet, values(model))
    assert len(optimizer.param_groups) == 3
    fleet.stop_worker()


def _trained_apart(me: Rank, alter: Callable[[nn.Sequential, Any], None], kind: type[FleetError], words: str) -> None:
    """Some steps after which each rank alters what is trained."""
    fleet = me.fleet()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))

    def go_on() -> None:
        alter(model, optimizer)
        for step in range(1, 4):
            optimizer.minimize(loss_of(model, me.rank, step))

    with pytest.raises(FleetError) as caught:
        go_on()
    assert isinstance(caught.value, kind) or "failed and ended the job" in str(caught.value), caught.value
    assert words in str(caught.value)
    fleet.stop_worker()


@check(2)
def a_layer_that_one_rank_unfreezes(me: Rank) -> None:
    def alter(model: nn.Sequential, optimizer: Any) -> None:
        model[0].requires_grad_(me.rank == 1)

    _trained_apart(me, alter, StateError, "worker 1 waits in a change of what is trained for worker 0")


@check(2)
def a_parameter_that_one_rank_adds(me: Rank) -> None:
    def alter(model: nn.Sequential, optimizer: Any) -> None:
        if me.rank == 0:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})

    _trained_apart(me, alter, StateError, "worker 0 waits in a change of what is trained for worker 1")


@check(2)
def parameters_of_other_sizes_that_ranks_add(me: Rank) -> None:
    def alter(model: nn.Sequential, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4 + me.rank))]})

    _trained_apart(me, alter, PlanMismatchError, "worker 1 is about to train something else than worker 0")


@check(2)
def a_parameter_added_where_one_rank_has_frozen_another(me: Rank) -> None:
    def alter(model: nn.Sequential, optimizer: Any) -> None:
        model[1].bias.requires_grad_(me.rank == 0)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})

    _trained_apart(me, alter, PlanMismatchError, "worker 1 is about to train something else than worker 0")


@check(2)
def a_parameter_added_after_one_rank_has_stopped(me: Rank) -> None:
    fleet = me.fleet()
    model = nn.Linear(8, 4)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    words = "a change of what is trained needs every worker, and worker 1 has stopped"
    if me.rank == 1:
        raises(FleetError, words, fleet.stop_worker)
        return
    more = {"params": [nn.Parameter(torch.ones(4))]}
    raises(StateError, words, lambda: optimizer.add_param_group(more))
    fleet.stop_worker()


@check(2)
def values_that_one_rank_loads(me: Rank) -> None:
    def alter(model: nn.Sequential, optimizer: Any) -> None:
        if me.rank == 0:
            me.jobs[0].load_state_dict(model, model.state_dict())

    _trained_apart(me, alter, StateError, "worker 0 waits in load_state_dict() for worker 1, which waits in a step")


@check(2)
def a_checkpoint_that_one_rank_loads(me: Rank) -> None:
    def alter(model: nn.Sequential, optimizer: Any) -> None:
        if me.rank == 1:
            me.jobs[0].load_persistables(me.scratch / "none")

    _trained_apart(me, alter, StateError, "worker 1 waits in load_persistables() for worker 0, which waits in a step")


@check(2)
def values_that_one_rank_loads_while_another_measures(me: Rank) -> None:
    def alter(model: nn.Sequential, optimizer: Any) -> None:
        if me.rank == 0:
            me.jobs[0].load_state_dict(model, model.state_dict())
        else:
            me.jobs[0].metrics.sum(1.0)

    _trained_apart(me, alter, StateError, "for worker 0, which waits in another call for it")


@check(2)
def optimizer_state_is_here(me: Rank) -> None:
    fleet = me.fleet()
    model = network()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    state, weights = copy.deepcopy(optimizer.state_dict()), values(model)
    optimizer.minimize(loss_of(model, me.rank, 1))
    after = values(model)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for value, before in zip((*model.parameters(), *model.buffers()), weights, strict=True):
            value.copy_(before)
    optimizer.minimize(loss_of(model, me.rank, 1))
    close(values(model), after, 0)
    fleet.stop_worker()


# ---------------------------------------------------------------- options


@check(2)
def local_sgd(me: Rank) -> None:
    """Averages after steps 1, 2 (begin_step), then 5, 8; and what was computed after the last one counts at the end."""
    copies = [network() for _ in range(me.size)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in copies]

    def average() -> None:
        with torch.no_grad():
            for same in zip(*(each.parameters() for each in copies), strict=True):
                mean = torch.stack([value.detach() for value in same]).mean(0)
                for value in same:
                    value.copy_(mean)
            for same in zip(*(each.buffers() for each in copies), strict=True):
                for value in same:
                    value.copy_(same[0])

    fleet = me.fleet()
    model = network()
    strategy = DistributedStrategy(local_sgd=LocalSGD(k_steps=3, begin_step=2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fleet.distributed_optimizer(inner, strategy, model=model)
    fleet.init_worker()
    for step in range(1, 10):
        for rank, (each, its) in enumerate(zip(copies, optimizers, strict=True)):
            its.zero_grad()
            loss_of(each, rank, step).backward()
            its.step()
        if step in (1, 2, 5, 8):
            average()
        optimizer.minimize(loss_of(model, me.rank, step))
        close(values(model), values(copies[me.rank]))
    fleet.stop_worker()
    average()
    close(list(model.parameters()), list(copies[0].parameters()))


@check(2)
def local_sgd_looks_at_sparse_gradients(me: Rank) -> None:
    """Those of a module's own parameter, which nobody averages here."""
    fleet = me.fleet()
    model = nn.Module()
    model.rows = nn.Parameter(torch.ones(4, 2))
    strategy = DistributedStrategy(local_sgd=LocalSGD(k_steps=100), check_finite=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), strategy, model=model)
    fleet.init_worker()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found = torch.nn.functional.embedding(torch.tensor([1, 1]), model.rows, sparse=True)
    scaler.scale(found.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(model.rows.detach(), torch.ones(4, 2).index_fill_(0, torch.tensor([1]), 0.0))
    optimizer.zero_grad()
    found = torch.nn.functional.embedding(torch.tensor([1, 1]), model.rows, sparse=True)
    raises(NonFiniteGradientError, "the gradient of 'rows'", lambda: optimizer.minimize(found.sum() * torch.inf))
    fleet.stop_worker()


@check(2)
def local_sgd_with_a_grad_scaler_and_uneven_data(me: Rank) -> None:
    """A rank that skips a step, or stops, comes to the same averages as the others."""
    fleet = me.fleet()
    model = network()
    strategy = DistributedStrategy(local_sgd=LocalSGD(k_steps=2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
    fleet.init_worker()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6 + 3 * me.rank):
        optimizer.zero_grad()
        loss = loss_of(model, me.rank, step) * (float("inf") if (me.rank, step) == (1, 3) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    fleet.stop_worker()
    assert all(bool(value.isfinite().all()) for value in values(model))
    (me.scratch / f"local.{me.rank}").write_text(repr([value.tolist() for value in values(model)]))
    fleet = me.fleet()
    plain = nn.Linear(1, 1)
    fleet.distributed_optimizer(torch.optim.SGD(plain.parameters(), lr=0.1))
    fleet.init_worker()
    fleet.barrier_worker()
    assert len({(me.scratch / f"local.{rank}").read_text() for rank in range(me.size)}) == 1
    fleet.stop_worker()


@check(2)
def gradient_merge(me: Rank) -> None:
    for avg in (True, False):
        expected, model = network(), network()
        theirs = torch.optim.Adam(expected.parameters(), lr=0.01)
        fleet = me.fleet()
        strategy = DistributedStrategy(gradient_merge=GradientMerge(k_steps=3, avg=avg))
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), strategy, model=model)
        fleet.init_worker()
        for update in range(3):
            theirs.zero_grad()
            for part in range(3):
                before = values(model)[0]
                for rank in range(me.size):
                    scale = me.size * (3 if avg else 1)
                    expected.eval()
                    (loss_of(expected, rank, 10 * update + part) / scale).backward()
                model.eval()
                optimizer.minimize(loss_of(model, me.rank, 10 * update + part))
                assert torch.equal(values(model)[0], before) == (part < 2), "an update with the third"
            theirs.step()
        close(list(model.parameters()), list(expected.parameters()))
        assert fleet.summary()["rounds"] == 3
        fleet.stop_worker()


@check(2)
def a_merge_is_whole(me: Rank) -> None:
    """Also where a layer is unfrozen amid it, or a hook raises in its last step and that is taken again."""

    def joins(model: nn.Module, optimizer: Any) -> None:
        model[3].requires_grad_(True)
        optimizer.step()

    def raises_once(_: nn.Module, optimizer: Any) -> None:
        wrapped = optimizer._wrapped[0]

        def fail(*_: object) -> None:
            handle.remove()
            raise ValueError("once")

        handle = wrapped.register_step_pre_hook(fail)
        raises(ValueError, "once", optimizer.step)
        optimizer.step()

    for last_step in (joins, raises_once):
        expected, model = network().eval(), network().eval()
        model[3].requires_grad_(last_step is raises_once)
        theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
        for part in range(2):
            expected[3].requires_grad_(last_step is raises_once)
            for rank in range(me.size):
                (loss_of(expected, rank, part) / me.size / 2).backward()
        expected[3].requires_grad_(True)
        theirs.step()
        fleet = me.fleet()
        strategy = DistributedStrategy(gradient_merge=GradientMerge(k_steps=2))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet.init_worker()
        optimizer.minimize(loss_of(model, me.rank, 0))
        optimizer.zero_grad()
        loss_of(model, me.rank, 1).backward()
        last_step(model, optimizer)
        close(list(model.parameters()), list(expected.parameters()))
        assert fleet.summary()["rounds"] == 1
        fleet.stop_worker()


@check(2)
def autograd_may_be_off_around_calls(me: Rank) -> None:
    """An evaluation at the end of a script turns it off for good; the others still train."""
    for off in (torch.no_grad, torch.inference_mode):
        fleet, model = me.fleet(), network()
        strategy = DistributedStrategy(gradient_merge=GradientMerge(k_steps=2))
        with off():
            optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
            fleet.init_worker()
        for step in range(4 + 2 * me.rank):
            optimizer.zero_grad()
            loss_of(model, me.rank, step).backward()
            with off():
                optimizer.step()
        with off():
            fleet.stop_worker()
        (me.scratch / f"off.{off.__name__}.{me.rank}").write_text(str([each.tolist() for each in values(model)]))
        loss_of(model, me.rank, 0).backward()
    if me.rank == 0:
        return
    for off in ("no_grad", "inference_mode"):
        mine, other = me.scratch / f"off.{off}.1", me.scratch / f"off.{off}.0"
        until(other.exists)
        until(lambda mine=mine, other=other: mine.read_text() == other.read_text())


@check(2)
def a_scaled_step_that_a_hook_ends_is_taken_again(me: Rank) -> None:
    """By the scaler, or without it: the gradients have lost their scale, once."""
    results = []
    for again in (None, "scaler", "plain"):
        fleet, model = me.fleet(), network()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        left = [ArithmeticError("no")] if again else []

        def raise_once(*_: Any, left: list[ArithmeticError] = left) -> None:
            if left:
                raise left.pop()

        inner.register_step_pre_hook(raise_once)
        optimizer = fleet.distributed_optimizer(inner, model=model)
        fleet.init_worker()
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, me.rank, step)).backward()
            if left:
                raises(ArithmeticError, "no", functools.partial(scaler.step, optimizer))
                if again == "plain":
                    optimizer.step()
                    continue
            scaler.step(optimizer)
            scaler.update()
        results.append(values(model))
        fleet.stop_worker()
    close(results[1], results[0])
    close(results[2], results[0])


@check(2)
def buffers_stay_alike_in_training(me: Rank) -> None:
    def train(other: dict[str, Any], strategy: Any, on: Sequence[int]) -> None:
        fleet, model = me.fleet(), nn.Linear(8, 4)
        model.register_buffer("seen", torch.zeros(3))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet.init_worker()
        for step in range(3):
            if step == 1 and me.rank in on:
                model.seen = torch.full(**other)
            optimizer.minimize(loss_of(model, me.rank, step))
        alike(me, fleet, values(model))
        fleet.stop_worker()

    shorter, wider = ({"size": (1,), "fill_value": 1.0}, {"size": (3,), "fill_value": 1.0, "dtype": torch.float64})
    for strategy in (DistributedStrategy(), DistributedStrategy(local_sgd=LocalSGD())):
        train(shorter, strategy, [0, 1])
        for other, words in ((shorter, "seen torch.float32 (1,)"), (wider, "seen torch.float64 (3,)")):
            call = functools.partial(train, other, strategy, [1])
            raises(PlanMismatchError, words, call)
            abort(me.jobs[-1], "the check is over")


@check(2)
def models_are_alike_in_all_that_travels(me: Rank) -> None:
    def start(model: nn.Module, trained: nn.Module) -> Any:
        fleet = me.fleet()
        fleet.distributed_optimizer(torch.optim.SGD(trained.parameters(), lr=0.1), model=model)
        return fleet.init_worker

    def with_buffer() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("seen", torch.zeros(3 + me.rank))
        return model

    def with_frozen() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Embedding(4 + me.rank, 2).requires_grad_(False))

    def laid_out_otherwise() -> nn.Module:
        model = nn.Conv2d(3, 4, 2)
        return model.to(memory_format=torch.channels_last) if me.rank else model

    for make, words in (
        (with_buffer, "seen torch.float32 (3,)"),
        (with_frozen, "1.weight torch.float32 (4, 2)"),
        (laid_out_otherwise, "(4, 3, 2, 2) by (12, 1, 6, 3)"),
    ):
        model = make()
        trained = model[0] if isinstance(model, nn.Sequential) else model
        raises(PlanMismatchError if me.rank else JobAbortedError, words, start(model, trained))


@check(2)
def half_precision_on_the_way(me: Rank) -> None:
    for name, dtype in (("fp16_allreduce", torch.float16), ("bf16_allreduce", torch.bfloat16)):
        fleet = me.fleet()
        model = nn.Linear(8, 4)
        strategy = DistributedStrategy(**{name: True})
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet.init_worker()
        mine = copy.deepcopy(model)
        each = []
        for rank in range(me.size):
            mine.zero_grad()
            loss_of(mine, rank, 0).backward()
            each.append([param.grad.to(dtype) / me.size for param in mine.parameters()])
        expected = [sum(same).float() for same in zip(*each, strict=True)]
        optimizer.zero_grad()
        loss_of(model, me.rank, 0).backward()
        close([param.grad for param in model.parameters()], expected, 0)
        numel = sum(param.numel() for param in model.parameters())
        assert fleet.summary()["gradient_bytes"] < 4 * numel, "half of what float32 takes, and the census"
        fleet.stop_worker()


@check(2)
def complex_numbers_keep_both_parts_in_half_precision(me: Rank) -> None:
    got = []
    for strategy in (DistributedStrategy(), DistributedStrategy(fp16_allreduce=True)):
        fleet, weight = me.fleet(), nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        fleet.init_worker()
        for _ in range(2):
            optimizer.zero_grad()
            (0 * weight.abs().square().sum()).backward()
            weight.grad.data = weight.grad.clone()  # parts it from what is sent
        optimizer.minimize((weight - torch.complex(*batch(me.rank, 0)[:2, :3])).abs().square().sum())
        got.append(weight.detach().clone())
        fleet.stop_worker()
    assert got[0].imag.abs().min() > 0
    close([got[1]], [got[0]], 1e-2)


@check(2)
def power_sgd_is_torchs(me: Rank) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def hook(ddp: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, me.rank, step, 64).backward()
            optimizer.step()

    summary = beside_ddp(
        me,
        train,
        large,
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        DistributedStrategy(power_sgd=PowerSGD(rank=2, start_step=3)),
        hook,
        1e-5,
    )
    numel = sum(param.numel() for param in large().parameters())
    whole = 4 * (numel + me.size + len(list(large().parameters())))
    low_rank = summary["gradient_bytes"] - 3 * whole
    factors = 2 * (64 + 256 + 256 + 128)
    rest = numel - 64 * 256 - 256 * 128 + me.size + len(list(large().parameters()))
    assert 0 < low_rank <= 9 * 4 * (factors + rest), (low_rank, factors, rest)


@check(2)
def dgc_by_its_formula(me: Rank) -> None:
    """Beside a simulation of all ranks by the formulas of the paper, written anew here."""
    for nesterov, clip in ((False, None), (True, 0.5)):
        strategy = DistributedStrategy(
            dgc=DGC(rampup_begin_step=2, rampup_step=2, sparsity=(0.75, 0.9), local_grad_clip_norm=clip)
        )
        fleet = me.fleet()
        model = large()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
        optimizer = fleet.distributed_optimizer(inner, strategy, model=model)
        fleet.init_worker()
        expected = large()
        params = list(expected.parameters())
        velocity = [torch.zeros_like(param) for param in params]
        u = [[torch.zeros_like(param) for param in params] for _ in range(me.size)]
        v = [[torch.zeros_like(param) for param in params] for _ in range(me.size)]
        for step in range(7):
            sparsity = None if step < 2 else (0.75, 0.9, 0.9, 0.9, 0.9)[step - 2]
            gradients = []
            for rank in range(me.size):
                expected.zero_grad()
                loss_of(expected, rank, step, 64).backward()
                gradients.append([param.grad.clone() for param in params])
            with torch.no_grad():
                for index, param in enumerate(params):
                    if sparsity is None or param.numel() < 16384:
                        g = sum(each[index] for each in gradients) / me.size + 0.01 * param
                        velocity[index].mul_(0.9).add_(g)
                        param -= 0.05 * (g + 0.9 * velocity[index] if nesterov else velocity[index])
                        continue
                    total = torch.zeros_like(param)
                    for rank in range(me.size):
                        g = gradients[rank][index] + 0.01 * param
                        if clip is not None:
                            g = g * min(1.0, clip * me.size**-0.5 / float(g.norm()))
                        if step == 2:
                            u[rank][index] = velocity[index].clone()
                        if nesterov:
                            u[rank][index] = 0.9 * (u[rank][index] + g)
                            v[rank][index] += u[rank][index] + g
                        else:
                            u[rank][index] = 0.9 * u[rank][index] + g
                            v[rank][index] += u[rank][index]
                        count = round(param.numel() * (1 - sparsity))
                        threshold = v[rank][index].abs().reshape(-1).sort(descending=True).values[count - 1]
                        sent = v[rank][index].abs() >= threshold
                        total += torch.where(sent, v[rank][index], torch.zeros(()))
                        u[rank][index][sent] = 0
                        v[rank][index][sent] = 0
                    param -= 0.05 * total / me.size
            optimizer.minimize(loss_of(model, me.rank, step, 64))
            close(list(model.parameters()), params, 1e-5)
        fleet.stop_worker()


@check(2)
def dgc_sends_what_it_promises(me: Rank) -> None:
    fleet = me.fleet()
    model = large()
    strategy = DistributedStrategy(dgc=DGC(sparsity=(0.999,)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05), strategy, model=model)
    fleet.init_worker()
    for step in range(5):
        optimizer.minimize(loss_of(model, me.rank, step, 64))
    small = sum(param.numel() for param in model.parameters() if param.numel() < 16384)
    chosen = sum(round(0.001 * param.numel()) for param in model.parameters() if param.numel() >= 16384)
    census = me.size + len(list(model.parameters()))
    assert fleet.summary()["gradient_bytes"] == 5 * (8 * chosen + 4 * (small + census))
    fleet.stop_worker()


@check(2)
def a_step_that_a_hook_ends_counts_when_it_is_taken_again(me: Rank) -> None:
    """On the one worker where it raised: all name what they do together after their steps."""
    fleet = me.fleet()
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    left = [ArithmeticError("no")] if me.rank == 1 else []

    def raise_once(*_: Any) -> None:
        if left:
            raise left.pop()

    inner.register_step_pre_hook(raise_once)
    optimizer = fleet.distributed_optimizer(inner, model=model)
    fleet.init_worker()
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, me.rank, step).backward()
        if left:
            raises(ArithmeticError, "no", optimizer.step)
        optimizer.step()
    assert fleet.resume_step() == 2
    fleet.save_persistables(str(me.scratch / "once"))
    fleet.stop_worker()


@check(2)
def dgc_keeps_gradients_though_a_hook_raises(me: Rank) -> None:
    """The step is taken once more, and counts."""
    results = []
    for fails in (False, True):
        fleet = me.fleet()
        model = large()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        left = [ArithmeticError("no")] if fails else []

        def raise_once(*_: Any, left: list[ArithmeticError] = left) -> None:
            if left:
                raise left.pop()

        inner.register_step_pre_hook(raise_once)
        strategy = DistributedStrategy(dgc=DGC(sparsity=(0.9,)))
        optimizer = fleet.distributed_optimizer(inner, strategy, model=model)
        fleet.init_worker()
        loss_of(model, me.rank, 0, 64).backward()
        if fails:
            raises(ArithmeticError, "no", optimizer.step)
            assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
        results.append(values(model))
        fleet.stop_worker()
    close(*results, 0.0)


def with_dgc(
    me: Rank, model: nn.Module, sparsity: Sequence[float] = (0.9,), momentum: float = 0.9, weight_decay: float = 0.0
) -> tuple[Any, Any]:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay)
    strategy = DistributedStrategy(dgc=DGC(sparsity=tuple(sparsity), rampup_step=2 * len(sparsity)))
    fleet = me.fleet()
    return fleet, fleet.distributed_optimizer(inner, strategy, model=model)


@check(2)
def gradients_go_by_numbers_whatever_the_layout(me: Rank) -> None:
    """Also where a script lays its model out anew in the job, which puts other memory under the gradients too."""
    for option in ({}, {"bf16_allreduce": True}, {"dgc": DGC(sparsity=(0.9,))}):
        results = []
        for converts_at in (None, -1, 0, 2):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 4, 3))
            if converts_at == -1:
                model.to(memory_format=torch.channels_last)
            inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.5)
            fleet = me.fleet()
            optimizer = fleet.distributed_optimizer(inner, DistributedStrategy(**option), model=model)
            fleet.init_worker()
            for step in range(4):
                if step == converts_at:
                    model.to(memory_format=torch.channels_last)
                images = torch.randn(2, 32, 6, 6, generator=torch.Generator().manual_seed(10 * step + me.rank))
                optimizer.minimize(model(images).square().mean())
            results.append(values(model))
            alike(me, fleet, values(model))
            fleet.stop_worker()
        for each in results[1:]:
            close(each, results[0], 2e-5)


@check(2)
def dgc_keeps_back_what_nobody_has_a_gradient_for(me: Rank) -> None:
    """Such a step leaves no trace, though weight decay would: it is skipped, as in torch."""
    results = []
    for gaps in (False, True):
        model = nn.ModuleList([large(), nn.Linear(2, 2)])
        fleet, optimizer = with_dgc(me, model, weight_decay=0.1)
        fleet.init_worker()
        for step in range(3):
            optimizer.minimize(loss_of(model[0], me.rank, step, 64))
            if gaps:
                optimizer.minimize(model[1].weight.sum())
        results.append(values(model[0]))
        fleet.stop_worker()
    close(*results, 0.0)


@check(2)
def dgc_goes_on_alone(me: Rank) -> None:
    """Without a worker that has stopped, also where the share that is kept back changes after that."""
    expected, model = large(), large()
    theirs = torch.optim.SGD(expected.parameters(), lr=0.05, weight_decay=0.5)
    fleet, optimizer = with_dgc(me, model, (0.0,), momentum=0.0, weight_decay=0.5)  # keeps nothing back
    fleet.init_worker()
    for step in range(6):
        ranks = range(me.size if step < 2 else 1)
        theirs.zero_grad()
        for rank in ranks:
            (loss_of(expected, rank, step, 64) / len(ranks)).backward()
        theirs.step()
        if me.rank in ranks:
            optimizer.minimize(loss_of(model, me.rank, step, 64))
    fleet.stop_worker()
    close(list(model.parameters()), list(expected.parameters()), 1e-5)
    model = large()
    fleet, optimizer = with_dgc(me, model, (0.5, 0.9, 0.99))
    fleet.init_worker()
    for step in range(2 + 6 * me.rank):
        optimizer.minimize(loss_of(model, 0, step, 64))
    fleet.stop_worker()


@check(2)
def dgc_sends_once_in_a_step(me: Rank) -> None:
    """Also where a layer is unfrozen amid it; more backwards than one are refused unless they send nothing."""
    results = []
    for late in (False, True):
        model = large()
        model[2].bias.requires_grad_(False)
        fleet, optimizer = with_dgc(me, model, weight_decay=0.1)
        fleet.init_worker()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, me.rank, step, 64).backward()
            if late and step == 1:
                model[2].bias.requires_grad_(True)
            optimizer.step()
            model[2].bias.requires_grad_(False)
        results.append(values(model))
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, me.rank, 3, 64).backward()
        loss_of(model, me.rank, 4, 64).backward()
        raises(UnsupportedError, "optimizer.no_sync()", loss_of(model, me.rank, 5, 64).backward)
        optimizer.zero_grad(set_to_none=late)
        loss_of(model, me.rank, 6, 64).backward()
        optimizer.step()
        alike(me, fleet, values(model))
        fleet.stop_worker()
    close(*results, 1e-6)


@check(2)
def a_load_leaves_nothing_of_before(me: Rank) -> None:
    """What the options hold back of a training belongs to its values."""

    def start(option: dict[str, Any]) -> tuple[Any, Any, nn.Module]:
        fleet, model = me.fleet(), large()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = fleet.distributed_optimizer(inner, DistributedStrategy(**option), model=model)
        fleet.init_worker()
        return fleet, optimizer, model

    for place, option in enumerate(
        (
            {"dgc": DGC(rampup_begin_step=2, sparsity=(0.9,))},
            {"power_sgd": PowerSGD(start_step=2)},
            {"gradient_merge": GradientMerge(k_steps=2)},
        )
    ):
        saved = str(me.scratch / f"anew{place}")
        fleet, optimizer, model = start(option)
        for step in range(7):
            optimizer.minimize(loss_of(model, me.rank, step, 64))
            if step == 3:
                fleet.save_persistables(saved)
        results = []
        for again in (False, True):
            if again:
                fleet.stop_worker()
                fleet, optimizer, model = start(option)
            fleet.load_persistables(saved)
            for step in range(3):
                optimizer.minimize(loss_of(model, me.rank, step, 64))
            results.append(values(model))
        fleet.stop_worker()
        close(*results, 0.0)


@check(4)
def hierarchies_and_communicators_change_no_number(me: Rank) -> None:
    results = []
    for strategy in (
        None,
        DistributedStrategy(nccl_comm_num=3),
        DistributedStrategy(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2),
        DistributedStrategy(
            use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2, nccl_comm_num=2, bf16_allreduce=True
        ),
    ):
        fleet = me.fleet()
        model = large()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05), strategy, model=model)
        fleet.init_worker()
        for step in range(4):
            optimizer.minimize(loss_of(model, me.rank, step, 64))
        alike(me, fleet, values(model))
        results.append(values(model))
        fleet.stop_worker()
    close(results[1], results[0])
    close(results[2], results[0])
    close(results[3], results[0], 1e-2)
    fleet = me.fleet()
    strategy = DistributedStrategy(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=3)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05), strategy)
    raises(ConfigurationError, "expected a divisor of 4 between 1 and 4; got 3", fleet.init_worker)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv1d(3, 5, 2), nn.BatchNorm1d(5), nn.ReLU(), nn.Conv1d(5, 2, 2))
        self.plain = nn.BatchNorm1d(2, affine=False, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.layers(x))


@check(2)
def batch_norms_of_all_ranks(me: Rank) -> None:
    """As one process with the batches of all ranks."""
    fleet = me.fleet()
    model, expected = Normed(), Normed()
    norm = model.layers[1]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(inner, DistributedStrategy(sync_batch_norm=True), model=model)
    assert model.layers[1] is norm
    assert isinstance(norm, nn.BatchNorm1d)
    model(torch.randn(2, 3, 6))  # before the job it is the layer it was
    expected.load_state_dict(model.state_dict())
    fleet.init_worker()
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(4):
        inputs = torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(step))
        weights = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(100 + step))
        theirs.zero_grad()
        (expected(inputs) * weights).mean().backward()
        theirs.step()
        mine = slice(4 * me.rank, 4 * me.rank + 4)
        optimizer.minimize((model(inputs[mine]) * weights[mine]).mean())
    close(values(model), values(expected), 1e-5)
    model.eval()
    expected.eval()
    close([model(inputs)], [expected(inputs)], 1e-5)
    fleet.stop_worker()


@check(2)
def batch_norms_of_values_far_from_zero(me: Rank) -> None:
    """They differ by little, and by more from rank to rank than on one."""
    fleet = me.fleet()
    model, expected = nn.BatchNorm1d(3), nn.BatchNorm1d(3).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(inner, DistributedStrategy(sync_batch_norm=True), model=model)
    fleet.init_worker()
    noise = torch.randn(3, 40, 3, generator=torch.Generator().manual_seed(1))
    for at, width in ((1e3, 0.1), (-2e4, 1.0), (1e6, 1e9)):
        shifts = torch.arange(2).repeat_interleave(20)[:, None] * 3
        inputs = (at + width * (noise[0] + shifts)).requires_grad_()
        exact = inputs.detach().double().requires_grad_()
        (expected(exact) * noise[1]).sum().backward()
        mine = slice(20 * me.rank, 20 * me.rank + 20)
        outputs = model(inputs[mine])
        optimizer.minimize((outputs * noise[1][mine]).sum())
        close([outputs], [expected(exact)[mine].float()], 5e-3)
        close([inputs.grad[mine] * width], [(exact.grad[mine] * width).float()], 5e-3)
        model.load_state_dict(nn.BatchNorm1d(3).state_dict())
        expected.load_state_dict(model.state_dict())
    fleet.stop_worker()


@check(1)
def batch_norms_of_one_rank(me: Rank) -> None:
    """A batch of one value has no variance, which torch refuses."""
    fleet = me.fleet()
    model = nn.BatchNorm1d(2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.distributed_optimizer(inner, DistributedStrategy(sync_batch_norm=True), model=model)
    fleet.init_worker()
    raises(ValueError, "Expected more than 1 value per channel", lambda: model(torch.ones(1, 2)))
    fleet.stop_worker()


@check(2)
def batch_norms_need_every_rank(me: Rank) -> None:
    fleet = me.fleet()
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(inner, DistributedStrategy(sync_batch_norm=True), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    if me.rank == 0:
        words = raises(FleetError, "sync_batch_norm needs every worker", fleet.stop_worker)
        assert "worker 1 failed" in words
    else:
        raises(StateError, "worker 0 has stopped", lambda: loss_of(model, 1, 1))
        fleet.stop_worker()


@check(2)
def recomputation(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, me.rank, step, 64).backward()
            optimizer.step()

    beside_ddp(me, train, large, strategy=DistributedStrategy(recompute_checkpoints=["0", "2"]))
    model = large()
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda x: x):
        loss_of(model, 0, 0, 64)
    assert model[2].weight.t().shape in kept
    fleet = me.fleet()
    fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), DistributedStrategy(recompute_checkpoints=["2"]), model=model
    )
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda x: x):
        loss_of(model, 0, 0, 64)
    assert model[2].weight.t().shape not in kept


@check(2)
def automatic_mixed_precision(me: Rank) -> None:
    """As DDP under autocast with a GradScaler; on the CPU it is bfloat16."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = large()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    seen = []

    def train(model: nn.Module, optimizer: Any, no_sync: Any) -> None:
        by_hand = isinstance(model, DistributedDataParallel)
        for step in range(6):
            with torch.autocast("cpu", torch.bfloat16, enabled=by_hand):
                result = model(batch(me.rank, step, 64))
            seen.append(result.dtype)
            loss = result.float().square().mean()
            if by_hand:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                optimizer.minimize(loss)

    beside_ddp(me, train, Cast, strategy=DistributedStrategy(use_amp=True, amp_loss_scaling=256.0), tolerance=1e-5)
    assert set(seen) == {torch.bfloat16}


@check(2)
def gradients_that_are_not_finite(me: Rank) -> None:
    fleet = me.fleet()
    model = nn.Linear(8, 4)
    strategy = DistributedStrategy(check_finite=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
    fleet.init_worker()
    before = values(model)
    loss = loss_of(model, me.rank, 0) * (float("nan") if me.rank == 1 else 1.0)
    raises(NonFiniteGradientError, "the gradient of 'weight' holds NaN", lambda: optimizer.minimize(loss))
    close(values(model), before, 0)
    optimizer.minimize(loss_of(model, me.rank, 1))
    fleet.stop_worker()


@check(2)
def what_cannot_be_honoured_is_refused(me: Rank) -> None:
    def wrap(optimizer: Any, strategy: Any = None, model: Any = None) -> Any:
        fleet = me.fleet()
        fleet.distributed_optimizer(optimizer, strategy, model=model)
        return fleet

    linear = nn.Linear(8, 4)
    table = nn.Embedding(10, 4, sparse=True)
    raises(UnsupportedError, "LBFGS", lambda: wrap(torch.optim.LBFGS(linear.parameters())))
    raises(
        UnsupportedError,
        "'0' is a sparse table",
        lambda: wrap(torch.optim.SGD(table.parameters(), lr=0.1), None, nn.Sequential(table)),
    )
    for option in ({"sync_batch_norm": True}, {"recompute_checkpoints": ["0"]}, {"use_amp": True}):
        raises(
            ConfigurationError,
            f"{next(iter(option))} acts on the model",
            lambda given=option: wrap(torch.optim.SGD(linear.parameters(), lr=0.1), DistributedStrategy(**given)),
        )
    raises(
        ConfigurationError,
        "expected 0; got nowhere",
        lambda: wrap(
            torch.optim.SGD(linear.parameters(), lr=0.1),
            DistributedStrategy(recompute_checkpoints=["nowhere"]),
            nn.Sequential(nn.Linear(1, 1)),
        ),
    )
    dgc = DistributedStrategy(dgc=DGC())
    for optimizer, words in (
        (torch.optim.Adam(linear.parameters()), "knows no other optimizer's; expected torch.optim.SGD; got Adam"),
        (torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.5, dampening=0.5), "SGD's dampening=0.5"),
        (torch.optim.SGD(linear.parameters(), lr=0.1, maximize=True), "SGD's maximize=True"),
    ):
        raises(UnsupportedError, words, wrap(optimizer, dgc).init_worker)
    scalar = nn.Parameter(torch.zeros(()))
    power = DistributedStrategy(power_sgd=PowerSGD())
    raises(
        UnsupportedError, "no parameter without a dimension", wrap(torch.optim.SGD([scalar], lr=0.1), power).init_worker
    )
    for strange in (torch.zeros(0, 4), torch.zeros(4, 4, dtype=torch.complex64)):
        start = wrap(torch.optim.SGD([nn.Parameter(strange)], lr=0.1), power).init_worker
        raises(UnsupportedError, "power_sgd cannot compress 'optimizer0.group0.param0'", start)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    raises(
        StateError,
        "no parameter of the optimizer requires",
        wrap(torch.optim.SGD(frozen.parameters(), lr=0.1)).init_worker,
    )
    fleet = me.fleet()
    model = large()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dgc)
    fleet.init_worker()
    with pytest.MonkeyPatch.context() as patch:
        (inner,) = optimizer._wrapped
        patch.setattr(inner, "step", functools.partial(inner.step))
        loss_of(model, me.rank, 0, 64).backward()
        raises(UnsupportedError, "got SGD with a step() of the script's", optimizer.step)
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(loss_of(model, me.rank, 0, 64)).backward()
    raises(UnsupportedError, "dgc and a GradScaler exclude each other", lambda: scaler.step(optimizer))
    fleet.stop_worker()


@check(2)
def a_step_of_the_script_s_is_called(me: Rank) -> None:
    """Put into the wrapped optimizer before it is wrapped, or in the job."""

    def halve(optimizer: Any) -> Any:
        own = optimizer.step

        def step() -> None:
            for param in optimizer.param_groups[0]["params"]:
                param.grad.mul_(0.5)
            own()

        optimizer.step = step
        return optimizer

    def train(model: nn.Module, optimizer: Any, no_sync: Callable[[], Any]) -> None:
        for step in range(4):
            if step == 2:
                halve(optimizer._wrapped[0] if hasattr(optimizer, "_wrapped") else optimizer)
            optimizer.zero_grad()
            loss_of(model, me.rank, step).backward()
            optimizer.step()

    beside_ddp(me, train, optimizer=lambda params: halve(torch.optim.SGD(params, lr=0.1)))


# ---------------------------------------------------------------- doors


@check(2)
def the_transpiler_in_nccl2_mode(me: Rank) -> None:
    import fleet
    from fleet.transpiler import DistributeTranspiler, DistributeTranspilerConfig

    for mode, collective_mode in (("nccl2", None), ("collective", "grad_allreduce"), ("collective", "local_sgd")):
        model, expected = network(me.rank), network(0)
        program = fleet.Program(model, torch.optim.SGD(model.parameters(), lr=0.1))
        config = DistributeTranspilerConfig()
        config.mode, config.collective_mode = mode, collective_mode
        t = DistributeTranspiler(config=config)
        t.transpile(
            me.rank,
            program=program,
            startup_program=program,
            trainers=",".join(me.endpoints),
            current_endpoint=me.endpoints[me.rank],
        )
        trainer = t.get_trainer_program()
        theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
        for step in range(5):
            trainer.minimize(loss_of(trainer.model, me.rank, step))
            theirs.zero_grad()
            (sum(loss_of(expected, rank, step) for rank in range(me.size)) / me.size).backward()
            theirs.step()
        close(list(model.parameters()), list(expected.parameters()))
        assert trainer.fleet.worker_num() == me.size
        raises(StateError, "which has no servers", lambda t=t: t.get_pserver_program("127.0.0.1:1"))
        trainer.close()
        trainer.close()


@check(2)
def calls_in_the_wrong_place(me: Rank) -> None:
    fleet = me.fleet()
    model = network()
    raises(FleetError, "came before distributed_optimizer()", fleet.init_worker)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    raises(StateError, "cannot be wrapped again", lambda: fleet.distributed_optimizer(optimizer))
    another = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(StateError, "called twice", lambda: fleet.distributed_optimizer(another))
    for call in (optimizer.step, fleet.barrier_worker, fleet.summary, lambda: fleet.save_persistables("x")):
        raises(FleetError, "before fleet.init_worker()", call)
    raises(FleetError, "before init_worker()", fleet.stop_worker)
    for call in (fleet.init_server, fleet.run_server):
        raises(StateError, "collective job, which has no servers", call)
    assert not fleet.is_server()
    assert fleet.server_num() == 0
    fleet.init_worker()
    raises(StateError, "init_worker() was called twice", fleet.init_worker)
    optimizer.minimize(loss_of(model, me.rank, 0))
    fleet.stop_worker()
    fleet.stop_worker()
    for call in (optimizer.step, fleet.barrier_worker, lambda: fleet.metrics.sum(1.0)):
        raises(StateError, "after the job ended for this worker", call)


@check(2)
def another_model_on_one_rank(me: Rank) -> None:
    fleet = me.fleet()
    model = nn.Linear(8, 4 + me.rank)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    if me.rank == 1:
        raises(PlanMismatchError, "worker 1 is about to train something else than worker 0", fleet.init_worker)
    else:
        raises(FleetError, "worker 1 failed and ended the job", fleet.init_worker)


# ---------------------------------------------------------------- among workers


@check(2, 4)
def reductions_and_metrics(me: Rank) -> None:
    fleet = me.fleet()
    model = nn.Linear(1, 1)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    ranks = np.arange(me.size)
    for op, expected in (("sum", ranks.sum()), ("mean", ranks.mean()), ("max", ranks.max()), ("min", 0)):
        got = fleet.all_reduce_worker(np.full((2, 3), me.rank, np.float32), op=op)
        assert got.dtype == np.float32
        assert np.array_equal(got, np.full((2, 3), expected, np.float32))
    output = torch.zeros(4, dtype=torch.int64)
    assert fleet.all_reduce_worker(torch.tensor([True, False, True, bool(me.rank)]), output) is output
    assert output.tolist() == [me.size, 0, me.size, me.size - 1]
    wide = torch.arange(2_000_000, dtype=torch.float64) + me.rank  # more than one piece
    assert torch.equal(
        fleet.all_reduce_worker(wide), torch.arange(2_000_000, dtype=torch.float64) * me.size + ranks.sum()
    )
    assert fleet.all_reduce_worker(np.zeros((0, 3))).shape == (0, 3)
    raises(ConfigurationError, "op is unknown", lambda: fleet.all_reduce_worker(1.0, op="product"))
    assert fleet.metrics.max(float(me.rank)) == me.size - 1
    labels = torch.arange(40) % 2
    scores = (torch.arange(40) % (2 + me.rank)) / 8
    assert 0 < fleet.metrics.auc(scores, labels) < 1
    assert fleet.split_files([str(i) for i in range(2 * me.size + 1)])[0] == str(0 if me.rank == 0 else 2 * me.rank + 1)
    error = raises(
        PlanMismatchError,
        "workers asked for different things",
        fleet.barrier_worker if me.rank else lambda: fleet.all_reduce_worker(1.0),
    )
    assert "worker 0: all_reduce sum of float64 (); worker 1: barrier" in error
    fleet.barrier_worker()  # those after it go on
    if me.rank:
        assert fleet.all_reduce_worker(1.0) == me.size - 1, "rank 0 has left"
    fleet.stop_worker()


@check(2)
def another_thread_beside_the_training(me: Rank) -> None:
    """It may measure; what it would read while steps and backwards alter it is refused."""
    fleet = me.fleet()
    model = nn.Linear(8, 4)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))

    def aside() -> list[float]:
        sums = [fleet.metrics.sum(me.rank + 1.0) for _ in range(5)]
        for call in (
            lambda: fleet.save_persistables(me.scratch / "aside"),
            lambda: fleet.load_persistables(me.scratch / "aside"),
            lambda: fleet.state_dict(model),
        ):
            raises(StateError, "was called in another thread than the one that trains", call)
        return sums

    with ThreadPoolExecutor(1) as pool:
        measured = pool.submit(aside)
        for step in range(1, 30):
            optimizer.minimize(loss_of(model, me.rank, step))
        assert measured.result() == [3.0] * 5
    alike(me, fleet, values(model))
    fleet.stop_worker()


@check(2)
def nobody_waits_for_ever(me: Rank) -> None:
    """Rank 0 at a barrier, rank 1 in a step: each for the other."""
    fleet = me.fleet()
    model = nn.Linear(8, 4)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    if me.rank == 0:
        raises(StateError, "worker 0 waits in barrier 1 for worker 1, which waits in a step", fleet.barrier_worker)
    else:
        raises(
            FleetError,
            "worker 0 failed and ended the job; got worker 0 waits in barrier 1",
            lambda: optimizer.minimize(loss_of(model, 1, 1)),
        )
    fleet.stop_worker()  # hides nothing


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ValueError("a bad gradient")


@check(2)
def a_backward_that_fails_is_not_stepped_over(me: Rank) -> None:
    fleet = me.fleet()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    if me.rank == 1:
        broken = model[1](_Broken.apply(model[0](batch(1, 1)))).mean()
        raises(ValueError, "a bad gradient", lambda: optimizer.minimize(broken))
        raises(StateError, "a backward ended in an exception", optimizer.step)
        abort(fleet, "a bad gradient")
    else:
        raises(FleetError, "worker 1 failed", lambda: optimizer.minimize(loss_of(model, 0, 1)))
    fleet.stop_worker()


# ---------------------------------------------------------------- checkpoints


@check(2)
def a_job_goes_on_where_it_was_saved(me: Rank) -> list[float]:
    def job(seed: int) -> tuple[Any, nn.Module, Any]:
        fleet = me.fleet()
        model = network(seed)
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        fleet.init_worker()
        return fleet, model, optimizer

    fleet, model, optimizer = job(0)
    assert fleet.resume_step() == 0
    for step in range(3):
        optimizer.minimize(loss_of(model, me.rank, step))
    fleet.save_persistables(str(me.scratch / "by-all"))
    if me.rank == 1:
        fleet.save_persistables(str(me.scratch / "by-one"))
    saved = values(model)
    for step in range(3, 6):
        optimizer.minimize(loss_of(model, me.rank, step))
    expected = values(model)
    fleet.stop_worker()
    for where in ("by-all", "by-one"):
        fleet, model, optimizer = job(7)
        fleet.load_persistables(str(me.scratch / where))
        assert fleet.resume_step() == 3
        close(values(model), saved, 0)
        for step in range(fleet.resume_step(), 6):
            optimizer.minimize(loss_of(model, me.rank, step))
        close(values(model), expected, 0)
        figures = fleet.summary()["figures"]
        assert (figures["step"], figures["steps"], figures["lockstep"]) == (6, 3, 1), "the first three are no speed"
        assert figures["push_seconds"] > 0, "it has waited for the others' gradients"
        fleet.stop_worker()
    return [float(value) for value in saved[0].reshape(-1)]


@check(2)
def a_state_that_is_loaded_takes_the_place_of_the_present_one(me: Rank) -> None:
    """Also where there was none yet."""
    fleet, model = me.fleet(), network()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = fleet.distributed_optimizer(inner, model=model)
    fleet.init_worker()
    fleet.save_persistables(str(me.scratch / "begun"))
    ends = []
    for _ in range(2):
        for step in range(3):
            optimizer.minimize(loss_of(model, me.rank, step))
        ends.append(values(model))
        fleet.load_persistables(str(me.scratch / "begun"))
        assert not inner.state
    close(*ends, 0)
    fleet.stop_worker()


@check(2)
def what_an_optimizer_keeps_and_no_checkpoint_can(me: Rank) -> None:
    kept: tuple[tuple[Any, Any], ...] = (
        ("list", [torch.zeros(2)]),
        ("tuple", (1, 2)),
        ("dict", {1: 2}),
        ("Tensor", torch.eye(2).to_sparse()),
        ("int", 1),
    )
    fleet, model = me.fleet(), network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(inner, model=model)
    fleet.init_worker()
    state = inner.state[model[0].weight]
    for step, (kind, value) in enumerate(kept):
        optimizer.minimize(loss_of(model, me.rank, step))
        name = 1 if kind == "int" else "kept"
        state[name] = value
        where = str(me.scratch / f"kept-{kind}")
        told = raises(FleetError, "which no checkpoint holds", lambda where=where: fleet.save_persistables(where))
        assert f"the optimizer's state {name!r} of '0.weight' is {kind}" in told
        assert not (me.scratch / f"kept-{kind}").exists()
        del state[name]
    inner.state["count"] = {"of": 1}
    where = str(me.scratch / "loose")
    raises(FleetError, "the state 'count' of SGD belongs to no parameter", lambda: fleet.save_persistables(where))
    del inner.state["count"]
    state["kept"] = [None, True, 2, 3.0, "four", [5]]
    fleet.save_persistables(str(me.scratch / "plain"))
    inner.state.clear()
    fleet.load_persistables(str(me.scratch / "plain"))
    assert inner.state[model[0].weight]["kept"] == [None, True, 2, 3.0, "four", [5]]
    fleet.stop_worker()


@check(2)
def what_could_not_be_saved_is_saved_by_the_next_call(me: Rank) -> None:
    fleet, model = me.fleet(), network()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    calls = (fleet.save_persistables, lambda where: fleet.save_inference_model(where, model))
    for number, save in enumerate(calls):
        where = me.scratch / f"in-the-way-{number}"
        where.touch()
        fleet.barrier_worker()
        raises(FleetError, "over something else", lambda where=where, save=save: save(str(where)))
        fleet.barrier_worker()
        where.unlink(missing_ok=True)
        save(str(where))
        assert where.is_dir()
    fleet.stop_worker()


@check(2)
def values_that_do_not_fit_change_nothing(me: Rank) -> None:
    def job(model: nn.Module) -> tuple[Any, Any]:
        fleet = me.fleet()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet.init_worker()
        return fleet, optimizer

    model = network()
    model.register_buffer("seen", torch.zeros(2))
    fleet, optimizer = job(model)
    optimizer.minimize(loss_of(model, me.rank, 0))
    fleet.save_persistables(str(me.scratch / "with a buffer"))
    fleet.stop_worker()
    model = network(1)
    fleet, optimizer = job(model)
    before = values(model)
    told = raises(CheckpointError, "'seen'", lambda: fleet.load_persistables(str(me.scratch / "with a buffer")))
    assert "does not fit the model's buffers" in told
    fleet.save_persistables(str(me.scratch / "without"))
    model.register_buffer("beside", torch.zeros(2), persistent=False)
    fleet.load_persistables(str(me.scratch / "without"))
    model.register_buffer("unseen", torch.zeros(2))
    told = raises(CheckpointError, "'unseen'", lambda: fleet.load_persistables(str(me.scratch / "without")))
    assert "none in the checkpoint" in told
    del model.unseen, model.beside
    state = {name: value + 1 for name, value in model.state_dict().items()}
    del state["3.weight"]
    raises(CheckpointError, "3.weight", lambda: fleet.load_state_dict(model, state))
    close(values(model), before, 0)
    optimizer.minimize(loss_of(model, me.rank, 0))
    alike(me, fleet, list(model.parameters()))
    fleet.stop_worker()


@check(2)
def states_of_each_rank(me: Rank) -> None:
    """What each rank has beside the model, by checkpoints from time to time and by one save, by one rank or by all."""

    class Counting:
        def __init__(self) -> None:
            self.read = torch.zeros(2, dtype=torch.int64)

        def state_dict(self) -> dict[str, Any]:
            return {"read": self.read}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.read = state["read"].clone()

    def job(strategy: DistributedStrategy | None = None) -> tuple[Any, Callable[[int], None], dict[str, Any]]:
        fleet, model = me.fleet(), network(0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet.distributed_optimizer(inner, strategy, model=model)
        fleet.init_worker()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        state = {"schedule": schedule, "data": Counting(), "rank": me.rank}

        def step(number: int) -> None:
            optimizer.minimize(loss_of(model, me.rank, number))
            state["data"].read += 1 + me.rank
            schedule.step()

        return fleet, step, state

    def check_state(fleet: Any, state: dict[str, Any], steps: int, rank: int) -> None:
        assert fleet.load_state(state)
        assert state["rank"] == rank
        assert state["data"].read.tolist() == [steps * (1 + rank)] * 2
        assert state["schedule"].optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (steps // 2)

    merging = DistributedStrategy()
    merging.gradient_merge = GradientMerge(k_steps=4)
    for name, strategy in (("plain", None), ("merging", merging)):
        root = me.scratch / f"states-{name}"
        fleet, step, state = job(strategy)
        assert not fleet.load_state(state)
        raises(
            UnsupportedError, "keep_state() is for a worker that starts again", lambda fleet=fleet: fleet.keep_state({})
        )
        with Checkpoints(root, every_steps=3, state=state, fleet=fleet) as checkpoints:
            for number in range(7):
                step(number)
                checkpoints.after_step()
            checkpoints.save()
        fleet.save_persistables(str(root / "all"), state=state)
        if me.rank == 1:
            fleet.save_persistables(str(root / "one"), state=state)
        fleet.barrier_worker()
        step(7)
        for where, steps in (("step-00000003", 3), ("step-00000006", 6), ("step-00000007", 7), ("all", 7)):
            fleet.load_persistables(str(root / where))
            check_state(fleet, state, steps, me.rank)
        fleet.load_persistables(str(root / "one"))
        tester = unittest.TestCase()
        with (tester.assertLogs if me.rank == 0 else tester.assertNoLogs)("fleet.checkpoint") as logs:
            assert fleet.load_state(state) == (me.rank == 1)
        if me.rank == 0:
            assert "worker 0 goes on after step 7 without a state" in logs.output[0]
        fleet.stop_worker()


@check(2)
def a_state_lies_there_until_all_have_gone_on(me: Rank) -> None:
    """Worker 0 is in its next load already when the other one asks what the last one has brought."""
    fleet = me.fleet()
    model = network(0)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    fleet.init_worker()
    optimizer.minimize(loss_of(model, me.rank, 0))
    state = {"rank": me.rank}
    where, is_ahead = str(me.scratch / "of-both"), me.scratch / "is-ahead"
    fleet.save_persistables(where, state=state)
    fleet.barrier_worker()
    bring = object_states.bring

    brings: list[Any] = []

    def bringing(worker: Any, checkpoint: Any) -> dict[str, object]:
        found = bring(worker, checkpoint)
        brings.append(worker)
        is_ahead.touch()
        return found

    fleet.load_persistables(where)
    with mock.patch.object(object_states, "bring", bringing):
        for _ in range(3):
            if me.rank == 1:
                state["rank"] = None
                until(is_ahead.exists)
                is_ahead.unlink()
                assert fleet.load_state(state)
                assert state["rank"] == 1
            fleet.load_persistables(where)
            fleet.barrier_worker()
    if me.rank == 0:
        assert len(brings[-1].laid_out) <= 2, "what nobody asks for any more is taken away"
    fleet.stop_worker()


@check(2)
def checkpoints_from_time_to_time(me: Rank) -> None:
    """The first worker saves when its clock says so, and the others wait for it in their next step."""
    fleet = me.fleet()
    model = network(0)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    fleet.init_worker()
    root = me.scratch / "series"
    for option, words in ({"full_every": 2}, "no rows of which only"), ({"background": True}, "cannot train on while"):
        raises(UnsupportedError, words, lambda option=option: Checkpoints(root, every_steps=1, fleet=fleet, **option))
    clock = SimpleNamespace(now=lambda: 100.0 * fleet.resume_step() if me.rank == 0 else 0.0)
    with Checkpoints(root, every_s=200, keep_last=2, fleet=fleet, clock=clock) as checkpoints:
        for step in range(7):
            optimizer.minimize(loss_of(model, me.rank, step))
            checkpoints.after_step()
            if step == 5:
                saved = values(model)
    fleet.barrier_worker()
    assert sorted(path.name for path in root.iterdir()) == ["step-00000004", "step-00000006"]
    fleet.load_persistables(Checkpoints.latest(root))
    assert fleet.resume_step() == 6
    close(values(model), saved, 0)
    assert {"1.running_mean", "1.running_var"} <= set(buffers(Checkpoint.open(root / "step-00000006")))
    fleet.stop_worker()


@check(2)
def a_job_resumes(me: Rank) -> None:
    """From the newest checkpoint that all workers see who see any; those who see none take worker 0's."""
    mine, shared = me.scratch / f"of worker {me.rank}", me.scratch / "shared"

    def run(root: object, until: int, model: nn.Module, **options: bool) -> tuple[int, list[torch.Tensor]]:
        fleet = me.fleet()
        first = fleet.resume_from(root, **options)
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        fleet.init_worker()
        assert fleet.resume_step() == first
        with Checkpoints(shared, every_steps=2, fleet=fleet) as checkpoints:
            for step in range(first, until):
                optimizer.minimize(loss_of(model, me.rank, step))
                checkpoints.after_step()
        fleet.stop_worker()
        return first, values(model)

    first, whole = run(me.scratch / "none", 6, network(0))
    assert first == 0
    if me.rank == 0:  # killed while it wrote the last one
        (shared / "step-00000006" / "manifest.json").unlink()
    fleet = me.fleet()
    raises(ConfigurationError, "different values of strict", lambda: fleet.resume_from(shared, strict=me.rank == 0))
    first, got = run(shared, 6, network(1))
    assert first == 4
    close(got, whole, 0)
    if me.rank == 0:
        shutil.copytree(shared, mine)
    first, got = run(mine, 6, network(2))
    assert first == 6
    close(got, whole, 0)
    wider = network(0)
    wider[-1] = nn.Linear(16, 5)
    first, _ = run(shared, 6, wider, strict=False)
    assert first == 6
    close([*wider[0].parameters()], [whole[0]], 0)
    raises(FleetError, "does not fit", lambda: run(shared, 6, wider))


@check(2)
def checkpoints_that_do_not_fit(me: Rank) -> None:
    fleet = me.fleet()
    model = nn.Linear(3, 2)
    fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    fleet.init_worker()
    raises(CheckpointError, "there is no checkpoint here", lambda: fleet.load_persistables(str(me.scratch / "none")))
    fleet.save_persistables(str(me.scratch / "linear"))
    fleet.stop_worker()
    fleet = me.fleet()
    model = nn.Linear(3, 4)
    fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    fleet.init_worker()
    words = "'weight': float32 (2, 3), Adam in the checkpoint, float32 (4, 3), Adam in the job"
    raises(CheckpointError, words, lambda: fleet.load_persistables(str(me.scratch / "linear")))
    fleet.stop_worker()


@check(2)
def a_checkpoint_of_servers(me: Rank) -> None:
    """Written by the test, on two servers, in blocks."""
    fleet = me.fleet()
    model = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 3))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    fleet.init_worker()
    fleet.load_persistables(str(me.scratch / "by-servers"))
    expected = torch.load(me.scratch / "by-servers.pt", weights_only=True)
    close(list(model.parameters()), expected["params"], 0)
    states = [optimizer._wrapped[0].state[param] for param in model.parameters()]
    assert [float(state["step"]) for state in states] == [4.0] * 4
    close([state["exp_avg"] for state in states], expected["exp_avg"], 1e-6)
    assert fleet.resume_step() == 4
    optimizer.minimize(model(torch.ones(2, 20)).sum())
    fleet.stop_worker()


@check(2)
def models_to_serve(me: Rank) -> None:
    """Tensors and a program that gives what evaluation gives, whatever options changed about the forward."""
    options: dict[str, Any] = {
        "plain": None,
        "half": DistributedStrategy(use_amp=True),
        "recompute": DistributedStrategy(recompute_checkpoints=["0", "2"]),
        "norms": DistributedStrategy(sync_batch_norm=True),
    }
    for name, strategy in options.items():
        fleet = me.fleet()
        model = network(0)
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), strategy, model=model)
        fleet.init_worker()
        for step in range(2):
            optimizer.minimize(loss_of(model, me.rank, step))
        state = fleet.state_dict(model)
        assert list(state) == list(model.state_dict())
        for key, value in model.state_dict().items():
            assert torch.equal(state[key], value), key
            assert value.numel() == 0 or state[key].data_ptr() != value.data_ptr(), "it is a copy"
        where = me.scratch / f"serve-{name}"
        fleet.save_inference_model(str(where), model)
        assert (where / "model.safetensors").is_file()
        optimizer.minimize(loss_of(model, me.rank, 2))
        if me.rank == 1:  # alone, which the other need not know
            fleet.save_inference_model(str(where), model, (batch(me.rank, 0)[:1],))
            assert model.training
            model.eval()
            program = torch.export.load(where / "model.pt2").module()
            loaded = fleet.load_inference_model(str(where), network(5))
            for step, size in enumerate((1, 2, 3)):
                given = batch(me.rank, step)[:size]
                with torch.no_grad():
                    assert torch.equal(program(given), model(given)), name
                    assert name == "half" or torch.equal(loaded(given), model(given)), name
            model.train()
        fleet.stop_worker()
    fleet = me.fleet()
    model = nn.ModuleDict({"top": nn.Linear(2, 2), "table": fleet_nn.Embedding(None, 2)})
    fleet.distributed_optimizer(torch.optim.SGD(model["top"].parameters(), lr=0.1))
    fleet.init_worker()
    words = "'table.weight' is a remote table that does not belong to the running job"
    raises(UnsupportedError, words, lambda: fleet.state_dict(model))
    raises(UnsupportedError, words, lambda: fleet.save_inference_model(str(me.scratch / "no"), model))
    assert list(fleet.state_dict(model, tables=False)) == ["top.weight", "top.bias"]
    fleet.stop_worker()


if __name__ == "__main__":
    serve(CHECKS)
