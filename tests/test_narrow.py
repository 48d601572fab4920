"""Gradients that travel in fewer bits: what is rounded how, what becomes of the rest, what each mode makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import fuzz
import numpy as np
import pytest
import torch
from harness import run_job, values
from test_hostile import MEBI, taking_at_most

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.base.clock import SystemClock
from fleet.base.settings import ProcessSettings, SecuritySettings
from fleet.errors import FleetError, PlanMismatchError, ProtocolError
from fleet.numeric.ids import noise
from fleet.numeric.tensors import WireTensor
from fleet.plan.layout import dense_layout
from fleet.plan.plan import make_plan
from fleet.plan.specs import WIRE_DTYPES, GroupSpec, JobSpec, ParamSpec, PlanSettings
from fleet.ps.server.service import Service
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.low_precision import LINE, Narrow
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.ps.worker.push import ErrorFeedback
from fleet.strategy.parameter_server import Strategy

#: How far a line's elements may be off, in parts of its largest.
OFF = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 253}


def rounded(wire_dtype: str, flat: np.ndarray) -> np.ndarray:
    """What a server reads, computed apart from the package: the nearest number, halves to even."""
    if wire_dtype == "bf16":
        bits = flat.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(flat.dtype)
    out = np.empty_like(flat)
    for start in range(0, flat.size, LINE):
        line = flat[start : start + LINE]
        largest = 127 if wire_dtype == "int8" else 2**15
        scale = np.abs(line).max() / flat.dtype.type(largest)
        numbers = line / scale if scale else line * 0
        halves = numbers.astype(np.float32).astype(np.float16)
        numbers = np.rint(numbers) if wire_dtype == "int8" else halves.astype(flat.dtype)
        out[start : start + LINE] = numbers * scale
    return out


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (1,), (LINE,), (70_000,), (0, 3), (7, 10), (2, 70_000)], ids=str)
def test_what_is_read_and_what_is_left_make_the_whole(wire_dtype: str, dtype: torch.dtype, shape: Any) -> None:
    narrow = Narrow(wire_dtype)
    given = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 1e-7
    left = given.clone()
    parts = narrow.encode(left, keep=True)
    read = narrow.decode(parts, str(dtype)[6:], tuple(shape))
    assert len(parts) == narrow.parts(str(dtype)[6:])
    assert torch.equal(left, given - read)
    if given.numel():
        assert left.abs().max() <= OFF[wire_dtype] * given.abs().max()
    if given.dim() == 1:
        np.testing.assert_array_equal(read.numpy(), rounded(wire_dtype, given.numpy()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_narrow_travels_as_it_is(dtype: torch.dtype) -> None:
    given = torch.randn(10).to(dtype)
    (part,) = Narrow("int8").encode(given)
    assert torch.equal(Narrow("int8").decode([part], str(dtype)[6:], (10,)), given)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_what_is_not_finite_arrives_so_and_leaves_nothing(wire_dtype: str) -> None:
    given = torch.ones(3 * LINE)
    given[5], given[LINE] = math.nan, math.inf
    left = given.clone()
    read = Narrow(wire_dtype).decode(Narrow(wire_dtype).encode(left, keep=True), "float32", (3 * LINE,))
    assert not read[[5, LINE]].isfinite().any()
    assert torch.equal(read[2 * LINE :], given[2 * LINE :])
    assert torch.equal(left, torch.zeros(3 * LINE))


@pytest.mark.parametrize("wire_dtype", ["fp16", "int8"])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 3e38])
def test_no_line_is_too_small_or_too_large(wire_dtype: str, size: float) -> None:
    given = torch.full((4,), size)
    left = given.clone()
    read = Narrow(wire_dtype).decode(Narrow(wire_dtype).encode(left, keep=True), "float32", (4,))
    assert torch.equal(read + left, given)


# ---------------------------------------------------------------------------------------------- memory


def feedback_of(wire_dtype: str, *sizes: int, dtype: str = "float32") -> tuple[ErrorFeedback, Any]:
    params = tuple(ParamSpec(f"p{index}", (size,), dtype, 0) for index, size in enumerate(sizes))
    plan = make_plan(JobSpec(params, (), (GroupSpec("SGD", 0, ("lr",)),), PlanSettings(1, 1)))
    return ErrorFeedback(Narrow(wire_dtype), [layout := dense_layout(plan, 0)]), layout


def test_what_did_not_arrive_is_not_taken_for_told() -> None:
    feedback, layout = feedback_of("int8", 300)
    gradient = torch.randn(300, generator=torch.Generator().manual_seed(2))
    told = []
    for arrives in (True, False, True):
        ((_, tensors),), arrived = feedback.encode([(b"\1", {"float32": [gradient]})])
        told.append(Narrow("int8").decode_flats(tensors, layout.sizes)["float32"])
        if arrives:
            arrived()
    assert torch.equal(told[1], told[2])
    assert not torch.equal(told[0], told[1])


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_blocks_that_stay_at_home_keep_what_is_left_of_them(wire_dtype: str) -> None:
    """In the long run all arrives, to within one rounding, whichever blocks come when."""
    feedback, layout = feedback_of(wire_dtype, 300, 40)
    gradient = torch.randn(340, generator=torch.Generator().manual_seed(3))
    sums = torch.zeros(340), torch.zeros(340)
    for step in range(60):
        present = bytes([step % 3 != 1, step % 3 != 2])
        flat = torch.cat([gradient[:300], gradient[300:]][present == b"\0\1" : 2 - (present == b"\1\0")])
        places = slice(0 if present[0] else 300, 340 if present[1] else 300)
        sums[0][places] += flat
        ((_, tensors),), arrived = feedback.encode([(present, {"float32": [flat]})])
        sums[1][places] += Narrow(wire_dtype).decode_flats(tensors, layout.sizes_of(present))["float32"]
        arrived()
    assert (sums[0] - sums[1]).abs().max() <= 2 * OFF[wire_dtype] * gradient.abs().max()


def test_rows_are_rounded_by_a_chance_that_is_fair_and_the_same_every_time() -> None:
    ids = np.array([3, -9, 2**60])
    assert np.array_equal(noise(ids, 5, 0, 1), noise(ids, 5, 0, 1))
    for other in (noise(ids + 1, 5, 0, 1), noise(ids, 5, 1, 1), noise(ids, 5, 0, 2)):
        assert not np.isclose(noise(ids, 5, 0, 1), other).any()
    row = torch.tensor([[1.0, 0.3, -0.001, 0.0006, 0.0]])
    total = torch.zeros(1, 5)
    for step in range(1000):
        parts = Narrow("int8").encode(row, torch.from_numpy(noise(ids[:1], 5, 0, step)))
        total += Narrow("int8").decode(parts, "float32", (1, 5))
    assert torch.allclose(total / 1000, row, rtol=0, atol=4 * 0.5 / 127 / math.sqrt(1000))
    assert total[0, 0] == 1000
    assert total[0, 4] == 0


# ---------------------------------------------------------------------------------------------- jobs


class Both(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(30, 20, generator=draw).to(dtype))
        self.empty = torch.nn.Parameter(torch.zeros(0, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(20, dtype=dtype))
        self.rows = fleet.nn.Embedding(None, 30, initializer="normal(0, 1)")

    def loss(self, step: int, worker: int, *, rows: bool = True) -> torch.Tensor:
        draw = torch.Generator().manual_seed(10 * step + worker)
        inputs = torch.randn(8, 30, generator=draw).to(self.weight.dtype)
        if rows:
            inputs = inputs + self.rows(torch.randint(0, 6, (8,), generator=draw)).to(inputs.dtype)
        # A product of matrices may end at other last bits where its operands lie elsewhere, and rounding would show it.
        product = (inputs.unsqueeze(2) * self.weight).sum(1)
        return ((product + self.bias) / 5).tanh().square().mean() + 0 * self.empty.sum()


def body(strategy: Strategy, steps: int, rows: bool = True, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    def work(fleet_: Fleet, worker: int) -> tuple[list[torch.Tensor], list[float], dict[str, Any]]:
        model = Both(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.5)
        optimizer = fleet_.distributed_optimizer(optimizer, strategy, model=model)
        fleet_.init_worker()
        losses = []
        for step in range(steps):
            loss = model.loss(step % 4, worker, rows=rows)
            optimizer.minimize(loss)
            losses.append(loss.item())
        fleet_.barrier_worker()
        held = [model.rows(torch.arange(6)).detach()] if rows else []
        return [*values(model), *held], losses, fleet_.summary()

    return work


def simulated(wire_dtype: str, workers: int, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same in one process: every worker's gradients and what is left of earlier ones, rounded, and their mean."""
    model = Both(dtype)
    del model.rows
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.5)
    left = [np.zeros(620, str(dtype)[6:]) for _ in range(workers)]
    for step in range(steps):
        told = []
        for worker in range(workers):
            optimizer.zero_grad()
            model.loss(step % 4, worker, rows=False).backward()
            whole = left[worker] + torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
            told.append(rounded(wire_dtype, whole))
            left[worker] = whole - told[worker]
        mean = torch.from_numpy(sum(told[1:], told[0].copy()) / workers)
        sizes = [p.numel() for p in model.parameters()]
        for param, grad in zip(model.parameters(), mean.split(sizes), strict=True):
            param.grad = grad.view(param.shape).clone()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_dense_training_ends_where_a_simulation_of_the_rounding_ends(wire_dtype: str, dtype: torch.dtype) -> None:
    strategy = StrategyFactory.create_sync_strategy(wire_dtype=wire_dtype)
    for got, _, _ in run_job(body(strategy, 12, rows=False, dtype=dtype), 2):
        torch.testing.assert_close(got, simulated(wire_dtype, 2, 12, dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.pairs(1)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_synchronous_training_ends_at_the_same_bits_every_time(wire_dtype: str) -> None:
    strategy = StrategyFactory.create_sync_strategy(wire_dtype=wire_dtype)
    (first, _, _), (also, _, _) = run_job(body(strategy, 6), 2, 2)
    (again, _, _), _ = run_job(body(strategy, 6), 2, 2)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, also, strict=True))


MODES = {
    "sync": StrategyFactory.create_sync_strategy(),
    "ssp": StrategyFactory.create_ssp_strategy(1),
    "half_async": StrategyFactory.create_half_async_strategy(max_merge_var_num=2),
    "async": StrategyFactory.create_async_strategy(send_queue_size=1),
    "dc_asgd": StrategyFactory.create_async_strategy(send_queue_size=1, dc_asgd_lambda=1.0),
    "geo": StrategyFactory.create_geo_strategy(2),
}


@cache
def learnt(mode: str, wire_dtype: str | None) -> Any:
    torch.manual_seed(0)  # rows begin as the job's seed has it, whatever tests ran before
    return run_job(body(replace(MODES[mode], wire_dtype=wire_dtype), 40))[0]


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.pairs(1)
def test_every_mode_learns_as_well(mode: str, wire_dtype: str) -> None:
    """One worker; the same course as with gradients as they are, but where threads decide it."""
    plain, losses, _ = learnt(mode, None)
    narrow, narrow_losses, _ = learnt(mode, wire_dtype)
    assert losses[-1] < 0.6 * losses[0]
    assert narrow_losses[-1] < 0.6 * losses[0]
    if mode not in ("async", "dc_asgd"):
        for got, expected in zip(narrow, plain, strict=True):
            assert (got - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.pairs(1)
def test_the_bytes_a_worker_sends(mode: str) -> None:
    """20 x 31 numbers and up to six rows of 30, with ids; and once, as wide as ever, initial values."""
    sent = {}
    for wire_dtype in (None, *WIRE_DTYPES):
        sent[wire_dtype] = learnt(mode, wire_dtype)[2]["figures"]["sent_bytes"]
    assert sent["bf16"] <= 0.55 * sent[None]
    assert sent["fp16"] <= 0.57 * sent[None]
    assert sent["int8"] <= 0.34 * sent[None]


def test_further_parameters_join_what_is_left_of_the_others() -> None:
    def work(fleet_: Fleet, _: int) -> list[torch.Tensor]:
        first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        strategy = StrategyFactory.create_sync_strategy(wire_dtype="int8")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([first], lr=1.0), strategy)
        fleet_.init_worker()
        gradient = torch.tensor([127.0, 1.3, -0.4])
        optimizer.minimize((first * gradient).sum())
        optimizer.add_param_group({"params": [second]})
        for _ in range(9):
            optimizer.minimize(((first + second) * gradient).sum())
        return values(torch.nn.ParameterList([first, second]))

    ((first, second),) = run_job(work)
    assert torch.equal(first, torch.tensor([-1270.0, -13.0, 4.0]))
    assert torch.equal(second, torch.tensor([-1143.0, -12.0, 4.0]))


# ---------------------------------------------------------------------------------------------- what a peer may send


def member(wire_dtype: str, limit_mb: int = 64) -> tuple[Callable[..., list[Frame]], Service]:
    spec = replace(fuzz.SPECS["sync"], settings=replace(fuzz.SPECS["sync"].settings, wire_dtype=wire_dtype))
    service = Service(
        fuzz.ENDPOINT, ProcessSettings(security=SecuritySettings(max_message_bytes=limit_mb * MEBI)), SystemClock()
    )

    def ask(worker: int, kind: dict[str, Any], tensors: Sequence[WireTensor] = ()) -> list[Frame]:
        replies: list[Frame] = []
        request = pb.Request(worker=worker, incarnation=worker + 1, step=1, **kind)
        service.handle(Frame(request, [*tensors]), replies.append)
        return [raise_if_error(reply) for reply in replies]

    start = fuzz.requests("sync", 1)
    hello = start["hello"][0]["hello"]
    assert isinstance(hello, pb.Hello)
    hello.spec, hello.fingerprint = spec.to_json(), make_plan(spec).fingerprint
    for worker, name in ((0, "hello"), (1, "hello"), (0, "upload"), (0, "ready")):
        ask(worker, *start[name])
    return ask, service


def push(wire_dtype: str) -> tuple[dict[str, Any], list[list[WireTensor]]]:
    """A good one: the message, and what travels of two blocks, two tables' ids and their gradients."""
    narrow = Narrow(wire_dtype)
    kind, tensors = fuzz.requests("sync", 1)["push"]
    weight, bias, ids, rows, more = tensors
    encoded = [narrow.encode(torch.from_numpy(tensor.array)) for tensor in (weight, bias, rows, more)]
    return kind, [encoded[0], encoded[1], [ids], encoded[2], encoded[3]]


BAD: dict[str, Callable[[list[list[WireTensor]]], object]] = {
    "no scales": lambda parts: parts[0].pop(),
    "a tensor too many": lambda parts: parts[3].append(parts[3][1]),
    "numbers as they were": lambda parts: parts[0].__setitem__(0, WireTensor.of(np.ones(6, np.float32))),
    "too few numbers": lambda parts: parts[0].__setitem__(0, WireTensor.of(np.ones(5, np.int8))),
    "too many scales": lambda parts: parts[0].__setitem__(1, WireTensor.of(np.ones(2, np.float32))),
    "scales of another type": lambda parts: parts[0].__setitem__(1, WireTensor.of(np.ones(1))),
    "scales for other rows": lambda parts: parts[3].__setitem__(1, WireTensor.of(np.ones(3, np.float32))),
    "rows of another width": lambda parts: parts[3].__setitem__(0, WireTensor.of(np.ones((2, 3), np.int8))),
}


@pytest.mark.parametrize("case", BAD)
def test_gradients_that_do_not_fit_concern_their_sender_alone(case: str) -> None:
    ask, service = member("int8")
    kind, parts = push("int8")
    bad = push("int8")[1]
    BAD[case](bad)
    with pytest.raises(ProtocolError, match=r"do not fit|wrong number"), taking_at_most(4 * MEBI):
        ask(1, kind, [tensor for each in bad for tensor in each])
    good = [tensor for each in parts for tensor in each]
    assert ask(0, kind, good) == []
    assert [reply.message.version for reply in ask(1, kind, good)] == [1]
    assert service.failure is None


def test_rows_may_not_grow_beyond_a_message_when_they_are_read() -> None:
    ask, service = member("int8", limit_mb=1)
    kind, parts = push("int8")
    count = 100_000
    kind["push"].row_counts[1] = count
    parts[2] = [WireTensor.of(np.zeros(2 + count, np.int64))]
    parts[4] = [WireTensor.of(np.ones((count, 3), np.int8)), WireTensor.of(np.ones(count))]
    with pytest.raises(FleetError, match=r"more rows than a message may hold.*2\.3 MiB"), taking_at_most(MEBI):
        ask(1, kind, [tensor for each in parts for tensor in each])
    assert service.failure is None


def test_workers_agree_on_what_travels() -> None:
    ask, _ = member("int8")
    with pytest.raises(PlanMismatchError, match=r"wire_dtype"):
        ask(1, fuzz.requests("sync", 1)["hello"][0])
