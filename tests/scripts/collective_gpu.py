"""What the ranks of test_collective_gpu.py do, one CUDA device each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Check, Rank, serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 4)).cuda()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
    return model(x).float().square().mean()


def job(me: Rank, model: nn.Module) -> tuple[Any, Any]:
    fleet = me.fleet()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model=model)
    fleet.init_worker()
    assert next(model.parameters()).device.index == me.rank, "chosen by the local rank"
    assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
    return fleet, optimizer


def beside_ddp(me: Rank, train: Callable[[nn.Module, Any], None]) -> None:
    torch.cuda.set_device(me.rank)
    model = network()
    fleet, optimizer = job(me, model)
    theirs = DistributedDataParallel(network(), device_ids=[me.rank])
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9))
    train(model, optimizer)
    for ours, reference in zip(model.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    fleet.stop_worker()


@check
def parity_with_ddp(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        for step in range(30):
            optimizer.zero_grad()
            loss_of(model, me.rank, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    beside_ddp(me, train)


@check
def half_precision_with_a_grad_scaler(me: Rank) -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(10):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model, me.rank, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    beside_ddp(me, train)


@check
def sending_overlaps_backward(me: Rank) -> None:
    """NCCL's first kernel starts before the last one of backward, as the profiler saw them."""
    torch.cuda.set_device(me.rank)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).cuda()
    fleet, optimizer = job(me, model)
    x = torch.randn(512, 4096, device="cuda")
    for _ in range(3):
        optimizer.minimize(model(x).square().mean())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    sending = [event.time_range.start for event in kernels if "nccl" in event.name.lower()]
    computing = [event.time_range.end for event in kernels if "gemm" in event.name.lower()]
    if me.size > 1:
        assert min(sending) < max(computing)
    fleet.stop_worker()


@check
def uneven_data(me: Rank) -> None:
    torch.cuda.set_device(me.rank)
    model = network()
    fleet, optimizer = job(me, model)
    for step in range(3 + me.rank):
        optimizer.minimize(loss_of(model, me.rank, step))
    fleet.stop_worker()
    assert all(bool(param.isfinite().all()) for param in model.parameters())


if __name__ == "__main__":
    serve(CHECKS)
