"""Gradients that leave while ``minimize`` computes: what is trained is the same, whatever happens on the way."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
import torch
from dying import DyingJob, every
from faults import Action, Fault, FaultyNetwork
from harness import run_job, values
from test_hostile import member_and_other
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from fleet import Fleet, StrategyFactory
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.errors import ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Channel, Handler, Listener, Respond
from fleet.ps.worker import connection, overlap
from fleet.strategy.parameter_server import Strategy

STEPS = 5

STRATEGIES = {
    "sync": StrategyFactory.create_sync_strategy(),
    "ssp": StrategyFactory.create_ssp_strategy(0),
    "half_async": StrategyFactory.create_half_async_strategy(),
}


@pytest.fixture(autouse=True)
def _all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SMALLEST_BYTES", 64)
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.002)


class Counting:
    """The loopback network; ``seen`` counts requests by kind, pushes that rely on parts as "joined". A server at
    ``whole`` takes pushes that are whole."""

    def __init__(self, whole: str = "") -> None:
        self._inner = LoopbackNetwork()
        self._whole = whole
        self.seen: Counter[str] = Counter()

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        def watched(frame: Frame, respond: Respond) -> None:
            kind = frame.message.WhichOneof("kind")
            self.seen[kind] += 1
            self.seen["joined"] += bool(frame.message.push.attempt)
            if kind == "part" and str(endpoint) == self._whole:
                respond(Frame(pb.Reply(granted=False)))
            else:
                handler(frame, respond)

        return self._inner.listen(endpoint, watched)

    def connect(self, endpoint: Endpoint) -> Channel:
        return self._inner.connect(endpoint)


class Model(torch.nn.Module):
    """Of every sort: shared, used twice, unused in some steps, small, and large enough to be cut."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=draw) / 10)

        self.large, self.shared, self.seldom, self.small = made(150, 120), made(120, 120), made(120), made(3)
        self.alias = self.shared

    def loss(self, step: int, worker: int, *, within: Callable[..., Any] = lambda f, x: f(x)) -> torch.Tensor:
        inputs = torch.randn(4, 150, generator=torch.Generator().manual_seed(10 * step + worker))
        hidden = within(lambda x: torch.tanh(x @ self.large) @ self.shared, inputs.requires_grad_())
        hidden = torch.tanh(hidden) @ self.alias + self.small.sum()
        return (hidden + self.seldom if step % 2 else hidden).square().mean()


def joined(fleet_: Fleet, strategy: Strategy | None = None) -> tuple[Model, Any]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapped = fleet_.distributed_optimizer(optimizer, strategy, model=model)
    fleet_.init_worker()
    return model, wrapped


def minimizes(strategy: Strategy | None = None, **how: Any) -> Callable[[Fleet, int], list[torch.Tensor]]:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = joined(fleet_, strategy)
        for step in range(STEPS):
            optimizer.minimize(model.loss(step, worker, **how))
        return values(model)

    return body


def plainly(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
    model, optimizer = joined(fleet_)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.loss(step, worker).backward()
        optimizer.step()
    return values(model)


def same(got: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    pairs = [pair for both in zip(got, expected, strict=True) for pair in zip(*both, strict=True)]
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("servers", [1, 3])
def test_training_ends_at_the_bits_at_which_it_ends_otherwise(servers: int) -> None:
    network, plain = Counting(), Counting()
    assert same(run_job(minimizes(), 2, servers, network=network), run_job(plainly, 2, servers, network=plain))
    assert network.seen["joined"] == network.seen["push"] == 2 * servers * STEPS
    assert network.seen["part"] >= 4 * STEPS
    assert plain.seen["part"] == 0


@pytest.mark.parametrize(
    ("strategy", "leaves"),
    [
        (StrategyFactory.create_ssp_strategy(0), True),
        (StrategyFactory.create_half_async_strategy(), True),
        (StrategyFactory.create_half_async_strategy(max_merge_var_num=2), False),
        (StrategyFactory.create_async_strategy(), False),
        (StrategyFactory.create_geo_strategy(2), False),
        (StrategyFactory.create_sync_strategy(wire_dtype="bf16"), False),
    ],
    ids=["ssp", "half-async", "merging", "async", "geo", "bf16"],
)
def test_where_each_step_is_one_push_of_gradients_as_they_are(strategy: Strategy, leaves: bool) -> None:
    network = Counting()
    got = run_job(minimizes(strategy), network=network)
    assert bool(network.seen["joined"]) == bool(network.seen["part"]) == leaves
    if leaves:
        assert same(got, run_job(plainly))


def test_a_gradient_that_is_completed_twice_leaves_with_the_step() -> None:
    """A reentrant checkpoint has a backward of its own, and ``shared`` is used outside of it as well."""
    network = Counting()

    def within(function: Callable[..., Any], inputs: torch.Tensor) -> Any:
        return checkpoint(function, inputs, use_reentrant=True)

    got = run_job(minimizes(within=within), 2, network=network)
    torch.testing.assert_close(got, run_job(plainly, 2))
    assert network.seen["part"] > 0
    assert network.seen["joined"] == 0


def in_place(param: torch.nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.div_(2)


def another(param: torch.nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad / 2


def unseen(param: torch.nn.Parameter) -> None:
    """By a way that raises no version counter."""
    assert param.grad is not None
    param.grad.data.div_(2)


def by_numpy(param: torch.nn.Parameter) -> None:
    assert param.grad is not None
    array = param.grad.numpy()
    array /= 2


Halve = Callable[[torch.nn.Parameter], None]


def halve_all(halve: Halve) -> Callable[..., None]:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                halve(param)

    return hook


def on_wrapper(halve: Halve, wrapped: Any, inner: torch.optim.Optimizer) -> None:
    wrapped.register_step_pre_hook(halve_all(halve))


def on_wrapped(halve: Halve, wrapped: Any, inner: torch.optim.Optimizer) -> None:
    inner.register_step_pre_hook(halve_all(halve))


def on_every_optimizer(halve: Halve, wrapped: Any, inner: torch.optim.Optimizer) -> Callable[[], None]:
    def mine(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is wrapped:
            halve_all(halve)(optimizer)

    return register_optimizer_step_pre_hook(mine).remove  # type: ignore[no-any-return]


def as_its_step(halve: Halve, wrapped: Any, inner: torch.optim.Optimizer) -> None:
    """As libraries wrap a step that they were given, here that of a scheduler."""
    torch.optim.lr_scheduler.StepLR(wrapped, 100)
    step = wrapped.step

    @functools.wraps(step)
    def halved(*args: Any) -> Any:
        halve_all(halve)(wrapped)
        return step(*args)

    wrapped.step = halved


def on_gradients(halve: Halve, wrapped: Any, inner: torch.optim.Optimizer) -> None:
    """Of all large parameters when the last of them is complete, and of the others each."""
    first, *others = inner.param_groups[0]["params"][:2]
    for each in inner.param_groups[0]["params"][2:]:
        each.register_post_accumulate_grad_hook(halve)

    def both(_: torch.Tensor) -> None:
        for each in (first, *others):
            halve(each)

    first.register_post_accumulate_grad_hook(both)


def on_a_gradient_to_come(halve: Halve, wrapped: Any, inner: torch.optim.Optimizer) -> None:
    for each in inner.param_groups[0]["params"]:
        each.register_hook(lambda grad: grad / 2)


def at_another_one(halve: Halve, wrapped: Any, inner: torch.optim.Optimizer) -> None:
    """When the gradient of the last one comes, of those that are complete and may be on their way."""
    *others, last = inner.param_groups[0]["params"]

    def hook(grad: torch.Tensor) -> None:
        for each in others:
            if each.grad is not None:
                halve(each)

    for each in (*others, last):
        each.register_hook(hook)


@pytest.mark.pairs
@pytest.mark.parametrize("strategy", ["sync", "ssp", "half_async"])
@pytest.mark.parametrize("halve", [in_place, another, unseen, by_numpy])
@pytest.mark.parametrize(
    "register",
    [on_wrapper, on_wrapped, on_every_optimizer, as_its_step, on_gradients, on_a_gradient_to_come, at_another_one],
)
def test_what_the_user_does_to_gradients_before_a_step_counts(register: Any, halve: Halve, strategy: str) -> None:
    def body(fleet_: Fleet, worker: int, *, minimize: bool) -> list[torch.Tensor]:
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = fleet_.distributed_optimizer(inner, STRATEGIES[strategy], model=model)
        fleet_.init_worker()
        undo = register(halve, wrapped, inner) or (lambda: None)
        for step in range(3):
            if minimize:
                wrapped.minimize(model.loss(step, worker))
            else:
                wrapped.zero_grad()
                model.loss(step, worker).backward()
                wrapped.step()
        undo()
        return values(model)

    early_, late = (run_job(lambda f, w, m=m: body(f, w, minimize=m)) for m in (True, False))
    assert same(early_, late)


def test_a_scheduler_holds_no_gradient_back() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = joined(fleet_)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.minimize(model.loss(0, worker))
        scheduler.step()

    network = Counting()
    run_job(body, network=network)
    assert network.seen["part"] > 0


def test_a_backward_that_fails_has_done_nothing() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise ZeroDivisionError("in the midst of it")

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = joined(fleet_)
        for step in range(STEPS):
            with pytest.raises(ZeroDivisionError):
                optimizer.minimize(model.loss(step + 7, worker, within=lambda f, x: Failing.apply(f(x))))
            optimizer.minimize(model.loss(step, worker))
        return values(model)

    network = Counting()
    assert same(run_job(body, 2, 2, network=network), run_job(plainly, 2, 2))
    assert network.seen["joined"] == 4 * STEPS


@pytest.mark.pairs(2)
@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY, Action.DUPLICATE])
@pytest.mark.parametrize("kind", ["part", "push"])
def test_each_counts_once(kind: str, action: Action) -> None:
    network = FaultyNetwork(LoopbackNetwork(), Fault(action, kind=kind, skip=1, times=3))
    assert same(run_job(minimizes(), 2, 2, network=network), run_job(plainly, 2, 2))
    assert len(network.struck) == 3


def test_parameters_that_join() -> None:
    def body(fleet_: Fleet, worker: int, *, minimize: bool) -> list[torch.Tensor]:
        model = Model()
        late = {id(model.large)}
        optimizer = torch.optim.Adam([p for p in model.parameters() if id(p) not in late], lr=0.01)
        wrapped = fleet_.distributed_optimizer(optimizer, model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            if step == 2:
                wrapped.add_param_group({"params": [model.large]})
            wrapped.zero_grad()
            model.zero_grad()
            if minimize:
                wrapped.minimize(model.loss(step, worker))
            else:
                model.loss(step, worker).backward()
                wrapped.step()
        return values(model)[1:]

    early_, late = (run_job(lambda f, w, m=m: body(f, w, minimize=m), 2) for m in (True, False))
    assert same(early_, late)


def test_durable_servers_are_sent_whole_pushes(tmp_path: Path) -> None:
    job = DyingJob(minimizes(), tmp_path, plan=every(3, 1))
    assert same(job.run(), run_job(plainly, 2, 2))
    assert job.kills > 5


def test_where_one_server_of_two_takes_no_parts() -> None:
    network = Counting(whole="server1:1")
    assert same(run_job(minimizes(), 2, 2, network=network), run_job(plainly, 2, 2))
    assert network.seen["part"] > 0
    assert network.seen["joined"] == 0


# ---------------------------------------------------------------------------------------------- what a peer may send


def a_part(*blocks: int, attempt: int = 1) -> dict[str, Any]:
    return {"part": pb.Part(attempt=attempt, blocks=blocks)}


WEIGHT, BIAS = WireTensor.of(np.ones(6, np.float32)), WireTensor.of(np.ones(3))


def test_parts_that_do_not_fit_concern_their_sender_alone() -> None:
    ask, service = member_and_other()
    kind, tensors = fuzz.requests("sync", 1)["push"]
    push = kind["push"]
    assert isinstance(push, pb.Push)
    rest = pb.Push()
    rest.CopyFrom(push)
    rest.present, rest.attempt = b"\0\1", 1
    bad = [
        ({**a_part(0), "step": 2}, [WEIGHT], "before its push was due"),
        (a_part(0, 1), [WEIGHT], "differ in number"),
        (a_part(7), [WEIGHT], "does not have"),
        (a_part(0), [BIAS], "do not fit"),
        ({"push": rest}, tensors[1:], "not here"),
    ]
    for request, sent, words in bad:
        with pytest.raises(ProtocolError, match=words):
            ask(1, request, sent)
    for attempt in (2, 1):  # of two attempts the one that came last
        (reply,) = ask(1, a_part(0, attempt=attempt), [WEIGHT])
        assert reply.message.granted
    twice = pb.Push()
    twice.CopyFrom(push)
    twice.attempt = 1
    with pytest.raises(ProtocolError, match="and with it"):
        ask(1, {"push": twice}, tensors)
    with pytest.raises(ProtocolError, match="not here"):  # a push that was refused takes its parts along
        ask(1, {"push": rest}, tensors[1:])
    ask(1, a_part(0), [WEIGHT])
    assert ask(0, kind, tensors) == []
    (reply,) = ask(1, {"push": rest}, tensors[1:])
    assert reply.message.version == 1
    assert service.failure is None


def test_parts_of_a_process_whose_place_another_has_taken_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other counts its steps and attempts alike, and need not send the same ahead."""
    ask, _ = member_and_other()
    ask(1, a_part(0), [WEIGHT])
    later = SystemClock().now() + 3600
    monkeypatch.setattr(SystemClock, "now", lambda _: later)
    hello, _ = fuzz.requests("sync", 1)["hello"]
    ask(1, {**hello, "incarnation": 9})
    rest, tensors = fuzz.requests("sync", 1)["behind"]
    assert isinstance(rest["push"], pb.Push)
    rest["push"].attempt = 1
    with pytest.raises(ProtocolError, match="not here"):
        ask(1, {**rest, "incarnation": 9}, tensors)
