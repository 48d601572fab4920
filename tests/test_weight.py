"""A table's weight and its gradient are what an ordinary embedding's are: whatever a script does with them ends as in
plain torch, or is refused by name."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from habits.habit import MODES
from harness import assert_close, run_job
from test_geo import Watched
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import fleet.nn
from fleet import Fleet
from fleet.errors import NotInitializedError, StateError, UnsupportedError
from fleet.nn.handle import handle_of
from fleet.ps.worker import runtime

ROWS, DIM = 12, 3
IDS = torch.tensor([[1, 4], [4, 7], [1, 1]])
ALL = torch.arange(ROWS)


class Net(torch.nn.Module):
    """A table that is looked up twice, and a dense layer."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.emb = torch.nn.Embedding(ROWS, DIM, sparse=sparse, _weight=torch.randn(ROWS, DIM, generator=draw))
        self.top = torch.nn.Linear(DIM, 1)
        with torch.no_grad():
            self.top.weight.copy_(torch.randn(1, DIM, generator=draw))
            self.top.bias.fill_(0.5)

    def loss(self) -> torch.Tensor:
        looked_up = self.emb(IDS).sum(1) + self.emb(IDS[:, 0] + 1)
        return (self.top(looked_up) ** 2).mean()

    def values(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.emb(ALL).clone(), *(each.detach().clone() for each in self.top.parameters())]


Script = Callable[[Net, Any], Any]


def both(script: Script, *, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
    """Run a script in plain torch and in a job of one worker, and compare what it returns and what it trained."""

    def ours(fleet_: Fleet, worker: int) -> tuple[Any, list[torch.Tensor]]:
        net = Net(sparse=True)
        optimizer = fleet_.distributed_optimizer(make(net.parameters(), lr=0.05), options.get("strategy"), model=net)
        fleet_.init_worker()
        return script(net, optimizer), net.values()

    net = Net()
    expected = script(net, make(net.parameters(), lr=0.05)), net.values()
    (got,) = run_job(ours, 1, 2)
    compare(got[0], expected[0])
    assert_close(got[1], expected[1])


def compare(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        got = got.to_dense() if got.is_sparse else got
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
    elif isinstance(expected, list | tuple):
        for each, other in zip(got, expected, strict=True):
            compare(each, other)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-6)
    else:
        assert got == expected


def steps(between: Script, count: int = 3) -> Script:
    """Some steps, with something done between backward and step."""

    def script(net: Net, optimizer: Any) -> list[Any]:
        found = []
        for _ in range(count):
            optimizer.zero_grad()
            net.loss().backward()
            found.append(between(net, optimizer))
            optimizer.step()
        return found

    return script


# ---------------------------------------------------------------------------------------------- gradients


def halved(net: Net) -> None:
    for param in net.parameters():
        param.grad = param.grad / 2


def cloned(net: Net) -> None:
    for param in net.parameters():
        param.grad = param.grad.clone()


def noisy(net: Net) -> None:
    for param in net.parameters():
        param.grad = param.grad + torch.linspace(-1, 1, param.numel()).view(param.shape)


def decayed(net: Net) -> None:
    for param in net.parameters():
        param.grad.add_(param, alpha=0.1)


def accumulated(net: Net) -> torch.Tensor:
    first = net.emb.weight.grad.clone()
    net.loss().backward()
    net.emb.weight.grad += first
    return first.to_dense() if first.is_sparse else first


def replaced_by_dense(net: Net) -> None:
    net.emb.weight.grad = torch.eye(ROWS, DIM)


def replaced_by_rows(net: Net) -> None:
    ids, rows = torch.tensor([[3, 5, 3]]), torch.ones(3, DIM)
    rows_grad = torch.sparse_coo_tensor(ids, rows, (ROWS, DIM))
    net.emb.weight.grad = rows_grad if net.emb.sparse else rows_grad.to_dense()


def one_row_cleared(net: Net) -> None:
    net.emb.weight.grad[4] = 0


def facts(net: Net) -> list[Any]:
    grad = net.emb.weight.grad
    found = [
        *(grad.norm(), grad.norm(1), grad.abs().max(), grad.max(), grad.min(), grad.sum(), grad.mean(), grad.amax()),
        *(torch.linalg.vector_norm(grad, p) for p in (0, 1, 2, 3, float("inf"), -float("inf"))),
        *(grad.isfinite().all(), torch.isnan(grad).any(), grad.isinf().any(), (~grad.isinf()).all(), (grad > 0).any()),
        *((grad == 0).all(), (grad == 0).sum(), grad.pow(2).sum(), (grad * 3).sum(), (grad + 1).sum(), grad[4], grad.T),
        *(grad.square().mean().sqrt(), grad.flatten(), grad.view(-1)[5], torch.exp(grad), grad.std(), grad.shape),
        *(grad.cpu().sum(), grad.numel(), grad.detach().clone().zero_().norm(), torch.stack([grad, grad]).sum()),
        *(torch.isfinite(torch.cat([param.grad.flatten() for param in net.parameters()])).all(), -grad.sum()),
    ]
    return [each.to_dense() if getattr(each, "is_sparse", False) else each for each in found]


BETWEEN: dict[str, Script] = {
    "facts": lambda net, _: facts(net),
    "total norm": lambda net, _: get_total_norm([p.grad for p in net.parameters()]),
    **{
        f"norm {norm}, foreach {foreach}": lambda net, _, norm=norm, foreach=foreach: clip_grad_norm_(
            net.parameters(), 0.5, norm, foreach=foreach
        )
        for norm, foreach in [(2, None), (1, False), (2.5, True), (float("inf"), True), (float("inf"), None)]
    },
    "clip of a norm": lambda net, _: clip_grads_with_norm_(net.parameters(), 1.0, torch.tensor(3.0)),
    "value": lambda net, _: clip_grad_value_(net.parameters(), 0.3),
    "value, foreach": lambda net, _: clip_grad_value_(net.parameters(), 0.3, foreach=True),
    "mul_": lambda net, _: [p.grad.mul_(0.5) is p.grad for p in net.parameters()],
    "data": lambda net, _: [p.grad.data.div_(2) is None for p in net.parameters()],
    "clamp_": lambda net, _: [p.grad.clamp_(-0.2, 0.1) is p.grad for p in net.parameters()],
    "foreach": lambda net, _: torch._foreach_mul_([p.grad for p in net.parameters()], 0.25),
    "halved": lambda net, _: halved(net),
    "cloned": lambda net, _: cloned(net),
    "noisy": lambda net, _: noisy(net),
    "decayed": lambda net, _: decayed(net),
    "accumulated": lambda net, _: accumulated(net),
    "replaced by dense": lambda net, _: replaced_by_dense(net),
    "replaced by rows": lambda net, _: replaced_by_rows(net),
    "one row cleared": lambda net, _: one_row_cleared(net),
    "nan_to_num_": lambda net, _: torch.nan_to_num_(net.emb.weight.grad) is net.emb.weight.grad,
    "normalized": lambda net, _: net.emb.weight.grad.div_(net.emb.weight.grad.norm() + 1e-6) is None,
    "zeroed": lambda net, _: net.emb.weight.grad.zero_() is None,
    "filled": lambda net, _: net.emb.weight.grad.fill_(0.1) is None,
    "dropped": lambda net, _: setattr(net.emb.weight, "grad", None),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_between_backward_and_step(between: Script) -> None:
    both(steps(between))


def test_adagrad_too() -> None:
    both(steps(lambda net, _: clip_grad_norm_(net.parameters(), 0.5)), make=torch.optim.Adagrad)


def test_gradients_that_are_not_finite() -> None:
    def script(net: Net, optimizer: Any) -> list[Any]:
        (net.emb(torch.tensor([3])) * float("inf")).sum().backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(net.emb.parameters(), 1.0, error_if_nonfinite=True)
        grad = net.emb.weight.grad
        found = [grad.isfinite().all(), grad.isinf().any(), grad.isinf().sum(), grad.isfinite()[3].any()]
        if all(param.grad.isfinite().all() for param in net.emb.parameters()):
            optimizer.step()
        torch.nan_to_num_(grad, posinf=0.5)
        optimizer.step()
        return found

    both(script)


@pytest.mark.parametrize("infinite", [False, True])
def test_a_grad_scaler(infinite: bool) -> None:
    def script(net: Net, optimizer: Any) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(net.loss() * (float("inf") if infinite and step == 1 else 1)).backward()
            if step:
                scaler.unscale_(optimizer)
                clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    both(script)


def test_hooks_are_torchs() -> None:
    def script(net: Net, optimizer: Any) -> list[Any]:
        seen: list[Any] = []
        weight = net.emb.weight
        early = weight.register_hook(lambda grad: grad * 2)
        weight.register_hook(lambda grad: seen.append(grad.norm()))
        weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.abs().sum()))
        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                early.remove()
            net.loss().backward()
            optimizer.step()
        return seen

    both(script)


def test_a_hook_from_before_the_job_is_kept() -> None:
    def body(fleet_: Fleet, worker: int) -> Any:
        net = Net(sparse=True)
        seen: list[torch.Tensor] = []
        net.emb.weight.register_hook(lambda grad: seen.append(grad.clamp(max=1).sum()))
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        net.loss().backward()
        return seen

    net = Net()
    net.loss().backward()
    (got,) = run_job(body, 1, 1)
    compare(got, [net.emb.weight.grad.clamp(max=1).sum()])


def test_autograd_is_asked_for_the_weights_gradient() -> None:
    def script(net: Net, optimizer: Any) -> list[Any]:
        found = []
        weight = net.emb.weight
        (grad,) = torch.autograd.grad(net.loss(), weight)
        assert weight.grad is None
        found += [grad.norm(), weight.is_leaf, weight.grad_fn, weight.requires_grad]
        (grad,) = torch.autograd.grad(net.loss() + weight.square().sum(), [weight])
        found.append(grad.norm())
        net.loss().backward(inputs=[weight])
        assert net.top.weight.grad is None
        assert weight.grad is weight.grad
        loss = net.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(weight.grad.sum())
        optimizer.step()
        return found

    both(script)


def test_a_penalty_on_the_gradient_of_the_weight() -> None:
    def script(net: Net, optimizer: Any) -> None:
        (grad,) = torch.autograd.grad(net.loss(), net.emb.weight, create_graph=True)
        (grad.to_dense() if grad.is_sparse else grad).square().sum().backward()
        optimizer.step()

    both(script)


def test_freezing_at_any_time() -> None:
    def script(net: Net, optimizer: Any) -> list[bool]:
        found = []
        for step in range(4):
            net.emb.weight.requires_grad_(step not in (1, 2))
            optimizer.zero_grad()
            loss = net.loss() + net.emb.weight.sum()
            loss.backward()
            found.append(net.emb.weight.grad is None)
            optimizer.step()
        return found

    both(script)


def test_a_padding_row_has_no_gradient() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(ROWS, DIM, padding_idx=4)
        fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        table(torch.tensor([4])).sum().backward()
        assert table.weight.grad is not None
        assert not table.weight.grad.norm()
        table(IDS).sum().backward()
        assert not table.weight.grad[4].any()
        assert table.weight.grad[1].tolist() == [3.0] * DIM
        assert not table.weight[4].any()

    run_job(body, 1, 1)


# ---------------------------------------------------------------------------------------------- the values

FORMULAS: dict[str, Callable[[Net], torch.Tensor]] = {
    "L2": lambda net: 0.1 * net.emb.weight.square().sum(),
    "norm": lambda net: net.emb.weight.norm(),
    "mean": lambda net: net.emb.weight.mean(),
    "a row": lambda net: net.emb.weight[3].sum() + net.emb.weight[-1:].pow(2).sum(),
    "linear": lambda net: F.linear(net.emb(IDS), net.emb.weight).logsumexp(-1).sum(),
    "matmul": lambda net: (net.emb(IDS) @ net.emb.weight.t()).square().sum(),
    "stacked": lambda net: torch.stack([net.emb.weight, net.emb.weight * 2]).square().sum(),
    "concatenated": lambda net: torch.cat([net.emb.weight, net.top.weight]).square().sum(),
    "all parameters": lambda net: sum((p.abs().sum() for p in net.parameters()), torch.zeros(())),
    "embedding": lambda net: F.embedding(IDS, net.emb.weight).square().sum(),
    "vector": lambda net: torch.nn.utils.parameters_to_vector(net.parameters()).square().sum(),
    "einsum": lambda net: torch.einsum("ij,kj->ik", net.emb.weight, net.emb.weight).sum(),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_the_weight_in_a_formula(formula: Callable[[Net], torch.Tensor]) -> None:
    def script(net: Net, optimizer: Any) -> list[Any]:
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            penalty = formula(net)
            (net.loss() + penalty).backward()
            found.append(penalty.detach())
            optimizer.step()
        with torch.no_grad():
            found.append(formula(net))
        return found

    both(script)


@pytest.mark.parametrize("mode", ["async", "half_async", "geo", "ssp", "dc"])
def test_the_weight_in_every_mode(mode: str) -> None:
    factory = fleet.StrategyFactory
    strategies = {
        "async": factory.create_async_strategy,
        "half_async": factory.create_half_async_strategy,
        "geo": lambda: factory.create_geo_strategy(2),
        "ssp": factory.create_ssp_strategy,
        "dc": lambda: factory.create_async_strategy(dc_asgd_lambda=0.5),
    }

    def body(fleet_: Fleet, worker: int) -> None:
        net = Net(sparse=True)
        optimizer = fleet_.distributed_optimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), strategies[mode](), model=net
        )
        fleet_.init_worker()
        for _ in range(3):
            optimizer.zero_grad()
            (net.loss() + net.emb.weight.square().sum()).backward()
            clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        fleet_.barrier_worker()
        assert torch.equal(net.emb.weight, net.emb(ALL))

    run_job(body, 1, 2)


def test_a_tied_output_layer() -> None:
    class Tied(torch.nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
            self.words = torch.nn.Embedding(ROWS, DIM, sparse=sparse, _weight=start)
            self.scores = torch.nn.Linear(DIM, ROWS, bias=False)
            self.scores.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.scores(self.words(ids))

    def train(model: Tied, optimizer: Any) -> torch.Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(IDS[:, 0]), IDS[:, 1]).backward()
            optimizer.step()
        assert [name for name, _ in model.named_parameters()] == ["words.weight"]
        return model.words(ALL).detach()

    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        model = Tied(sparse=True)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        fleet_.init_worker()
        return train(model.to("cpu"), optimizer)

    plain = Tied(sparse=False)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    assert_close(run_job(body, 1, 2), [expected])


def test_state_dicts_hold_all_rows() -> None:
    def script(net: Net, optimizer: Any) -> Any:
        optimizer.zero_grad()
        net.loss().backward()
        optimizer.step()
        state = net.state_dict()
        assert net.state_dict(keep_vars=True)["emb.weight"] is net.emb.weight
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file)
        return [[name, value, loaded[name], copy.deepcopy(value)] for name, value in state.items()]

    both(script)


def test_safetensors_hold_all_rows(tmp_path: Any) -> None:
    torchs = pytest.importorskip("safetensors.torch")

    def script(net: Net, optimizer: Any) -> Any:
        torchs.save_model(net, str(tmp_path / "model"))
        torchs.save_file(net.state_dict(), str(tmp_path / "state"))
        found = [torchs.load_file(str(tmp_path / name)) for name in ("model", "state")]
        return [[state[name] for name in sorted(state)] for state in found]

    both(script)


def test_a_state_dict_shows_later_steps_as_torchs_does() -> None:
    def script(net: Net, optimizer: Any) -> Any:
        live, kept = net.state_dict(), copy.deepcopy(net.state_dict())
        for _ in range(2):
            optimizer.zero_grad()
            net.loss().backward()
            optimizer.step()
        return [live["emb.weight"].clone(), kept["emb.weight"]]

    both(script)


def test_copies_and_averages() -> None:
    def script(net: Net, optimizer: Any) -> Any:
        average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
        for _ in range(3):
            optimizer.zero_grad()
            net.loss().backward()
            optimizer.step()
            average.update_parameters(net)
        twin = copy.deepcopy(net)
        torch.optim.SGD(twin.parameters(), lr=1.0).zero_grad()
        twin.loss().backward()
        return [*average.module.values(), *twin.values(), copy.copy(net.emb.weight)]

    both(script)


def test_a_plain_tensor_in_its_place_is_what_is_computed_with() -> None:
    def script(net: Net, optimizer: Any) -> Any:
        other = torch.arange(float(ROWS * DIM)).view(ROWS, DIM)
        found = [torch.func.functional_call(net.emb, {"weight": other}, (IDS,))]
        weight = net.emb.weight
        net.emb.weight = torch.nn.Parameter(other)
        found.append(net.emb(IDS))
        net.loss().backward()
        found.append(net.emb.weight.grad.to_dense())
        net.emb.weight = weight
        found.append(net.emb(IDS))
        twin = copy.deepcopy(net)
        twin.load_state_dict({**net.state_dict(), "emb.weight": other}, assign=True)
        found.append(twin.emb(IDS))
        return found

    both(script)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def script(net: Net, optimizer: Any) -> None:
        dummy = torch.ones(1, requires_grad=True)

        def part(ids: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
            return net.top(net.emb(ids)) * one + net.emb.weight.square().sum()

        for _ in range(2):
            optimizer.zero_grad()
            torch.utils.checkpoint.checkpoint(part, IDS, dummy, use_reentrant=reentrant).sum().backward()
            optimizer.step()

    both(script)


def test_a_compiled_model() -> None:
    def script(net: Net, optimizer: Any) -> None:
        forward = torch.compile(
            lambda ids: net.top(net.emb(ids)).sum() + net.emb.weight.square().sum(), backend="eager"
        )
        for _ in range(2):
            optimizer.zero_grad()
            forward(IDS).backward()
            optimizer.step()

    both(script)


def test_moving_a_model_fetches_nothing() -> None:
    def script(net: Net, optimizer: Any) -> list[Any]:
        weight = net.emb.weight
        assert net.to("cpu").float().emb.weight is weight
        assert net.apply(lambda module: None).emb.weight is weight
        optimizer.zero_grad()
        net.loss().backward()
        net.to(torch.device("cpu"))
        optimizer.step()
        return [weight.shape, weight.dtype, weight.device, weight.numel()]

    both(script)


# ---------------------------------------------------------------------------------------------- edits


def clamped_alias(weight: torch.nn.Parameter) -> None:
    weight.detach().clamp_(-0.3, 0.3)


def item_set(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[:3] = 7
        weight[5, 1] += 2


def through_numpy(weight: torch.nn.Parameter) -> None:
    weight.detach().numpy()[2] = 4


def through_a_view(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[4].fill_(2)
        weight.view(-1)[:2].zero_()
        weight.t()[1].add_(1)


def into_out(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        torch.mul(torch.ones(ROWS, DIM), 3, out=weight)


def stepped_by_hand(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones(ROWS, DIM)
    with torch.no_grad():
        weight.sub_(weight.grad, alpha=0.5)
        weight -= 0.25 * weight.grad
    weight.grad = None


EDITS: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "zero_": lambda weight: torch.no_grad()(weight.zero_)(),
    "clamp_": lambda weight: torch.no_grad()(weight.clamp_)(-0.1, 0.1),
    "copy_": lambda weight: torch.no_grad()(weight.copy_)(torch.ones(ROWS, DIM)),
    "init": lambda weight: torch.nn.init.constant_(weight, 2.5),
    "init, orthogonal": lambda weight: torch.nn.init.eye_(weight),
    "setitem": item_set,
    "data": lambda weight: weight.data.renorm_(2, 0, 0.5),
    "data assigned": lambda weight: setattr(weight, "data", torch.full((ROWS, DIM), 0.5)),
    "data set": lambda weight: weight.data.__setitem__(3, 1.0),
    "detached": clamped_alias,
    "numpy": through_numpy,
    "a view": through_a_view,
    "foreach": lambda weight: torch.no_grad()(torch._foreach_mul_)([weight], 0.5),
    "out": into_out,
    "by hand": stepped_by_hand,
    "vector": lambda weight: torch.nn.utils.vector_to_parameters(torch.arange(float(ROWS * DIM)), [weight]),
    "nothing": lambda weight: weight.detach().add_(0),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_is_found(edit: Callable[[torch.nn.Parameter], Any]) -> None:
    """Those rows that it changed, once, with their new values."""
    plain = Net().emb.weight
    before = plain.detach().clone()
    edit(plain)
    expected = (plain.detach() != before).any(1).nonzero().flatten()

    def body(fleet_: Fleet, worker: int) -> None:
        net = Net(sparse=True)
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        handle = handle_of(net.emb.weight)
        assert handle is not None
        assert handle.take_edit() is None
        net.emb.weight.square().sum()
        assert handle.take_edit() is None
        edit(net.emb.weight)
        assert isinstance(net.emb.weight, torch.nn.Parameter)
        assert torch.equal(net.emb.weight, plain)
        found = handle.take_edit()
        assert (found is None) == (not len(expected))
        if found is not None:
            assert found[0].tolist() == expected.tolist()
            assert torch.equal(found[1], plain.detach()[expected])
        assert handle.take_edit() is None

    run_job(body, 1, 1)


def test_a_loaded_state_is_an_edit() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        net = Net(sparse=True)
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        state = copy.deepcopy(net.state_dict())
        state["emb.weight"][3] = 9
        net.load_state_dict(state)
        found = handle_of(net.emb.weight).take_edit()  # type: ignore[union-attr]
        assert found is not None
        assert found[0].tolist() == [3]
        with pytest.raises(RuntimeError, match="size mismatch for emb"):
            net.load_state_dict({**state, "emb.weight": torch.zeros(2, DIM)})

    run_job(body, 1, 1)


def test_what_torch_refuses_is_refused() -> None:
    def script(net: Net, optimizer: Any) -> None:
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            net.emb.weight.zero_()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            net.emb.weight[1] = 0
        loss = net.emb.weight.square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        net.emb.weight.grad = None
        with pytest.raises(RuntimeError, match="size"):
            net.emb.weight.grad = torch.zeros(2, DIM)

    both(script)


def test_another_shape_is_refused() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        net = Net(sparse=True)
        fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        with torch.no_grad():
            for change in (
                lambda weight: setattr(weight, "data", torch.zeros(2, DIM)),
                lambda weight: setattr(weight, "data", torch.zeros(ROWS, DIM).double()),
                lambda weight: weight.set_(torch.zeros(ROWS, DIM)),
                lambda weight: weight.t_(),
            ):
                with pytest.raises(UnsupportedError, match=r"'emb.weight' stays as it is"):
                    change(net.emb.weight)
        assert torch.equal(net.emb.weight, net.emb(ALL))

    run_job(body, 1, 1)


# ---------------------------------------------------------------------------------------------- what is refused


def test_without_values_an_error_names_the_table() -> None:
    uses: list[Callable[[torch.nn.Module], Any]] = [
        lambda table: table.weight.sum(),
        lambda table: table.weight[0],
        lambda table: table.state_dict(),
        lambda table: torch.nn.init.zeros_(table.weight),
        lambda table: table.weight.data,
        lambda table: setattr(table.weight, "data", torch.zeros(ROWS, DIM)),
    ]

    def refused(table: torch.nn.Module, kind: type[Exception], match: str) -> None:
        for use in uses:
            with pytest.raises(kind, match=match), torch.no_grad():
                use(table)

    def body(fleet_: Fleet, worker: int) -> None:
        tables = torch.nn.ModuleDict({"closed": fleet.nn.Embedding(ROWS, DIM), "open": fleet.nn.Embedding(None, DIM)})
        assert tables["closed"].weight.shape == (ROWS, DIM)
        assert tables["open"].weight.shape == (0, DIM)
        refused(tables["closed"], NotInitializedError, "before its job was there")
        fleet_.distributed_optimizer(torch.optim.Adagrad(tables.parameters(), lr=1.0), model=tables)
        refused(tables["closed"], NotInitializedError, "closed.weight")
        fleet_.init_worker()
        refused(tables["open"], UnsupportedError, "'open.weight' has no num_embeddings|stays as it is")
        tables["open"](torch.tensor([-5])).sum().backward()
        with pytest.raises(UnsupportedError, match=r"fleet.state_dict\(model\)"):
            tables["open"].weight.grad.to_dense()
        assert torch.equal(tables["open"].weight.grad.norm(), torch.tensor(DIM).sqrt())
        fleet_.stop_worker()
        refused(tables["closed"], StateError, "after the job ended")

    run_job(body, 1, 1)


def test_the_bound_on_whole_tables() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        net = torch.nn.ModuleDict({"fits": fleet.nn.Embedding(1 << 16, 4), "large": fleet.nn.Embedding(1 << 17, 4)})
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=1.0), model=net)
        fleet_.init_worker()
        assert net["fits"].weight.detach().shape == (1 << 16, 4)
        for use in (lambda: net.state_dict(), lambda: copy.deepcopy(net), lambda: net["large"].weight.mean()):
            with pytest.raises(UnsupportedError, match=r"'large.weight'.*at most 1 MiB.*got 2 MiB"):
                use()
        net["large"](IDS).sum().backward()
        grad = net["large"].weight.grad
        assert clip_grad_norm_(net.parameters(), 1.0) > 1
        assert grad.isfinite().all()
        assert grad.norm() == pytest.approx(1)
        with pytest.raises(UnsupportedError, match=r"'large.weight'.*at most 1 MiB"):
            grad.cos()
        optimizer.step()

    run_job(body, 1, 2, environ={"FLEET_WHOLE_TABLE_MB": "1"})


@pytest.mark.parametrize("bag", [False, True])
def test_a_copy_can_be_pickled_and_trained_in_a_job_of_its_own(bag: bool) -> None:
    def make() -> torch.nn.Module:
        start = torch.ones(ROWS, DIM)
        kind = torch.nn.EmbeddingBag if bag else torch.nn.Embedding
        return torch.nn.ModuleDict({"torchs": kind(ROWS, DIM, sparse=True, _weight=start), "ours": ours()})

    def ours() -> torch.nn.Module:
        kind = fleet.nn.EmbeddingBag if bag else fleet.nn.Embedding
        return kind(ROWS, DIM, initializer="constant(1.0)")

    def train(fleet_: Fleet, model: torch.nn.Module, expected: float) -> None:
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet_.init_worker()
        for module in model.values():  # type: ignore[operator]
            optimizer.minimize(module(IDS[:1, :1]).sum())
            assert module(IDS[:1, :1]).flatten().tolist() == [expected] * DIM

    def body(fleet_: Fleet, worker: int) -> None:
        model = make()
        train(fleet_, model, 0.0)
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert type(twin["torchs"]) is type(make()["torchs"])  # type: ignore[index]
        with pytest.raises(UnsupportedError, match="cannot be pickled while it trains"):
            pickle.dumps(model)
        fleet_.stop_worker()
        other = Fleet(environ={})
        other.init()
        train(other, twin, -1.0)
        assert twin["torchs"].weight.untyped_storage().nbytes() == 4
        other.stop_worker()

    run_job(body, 1, 1)


def test_workers_average_the_gradients_of_a_formula() -> None:
    def penalty(net: Net, worker: int) -> torch.Tensor:
        return net.loss() + (worker + 1) * net.emb.weight.square().sum()

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        net = Net(sparse=True)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05), model=net)
        fleet_.init_worker()
        for _ in range(2):
            optimizer.minimize(penalty(net, worker))
        return net.values()

    net = Net()
    plain = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(2):
        plain.zero_grad()
        (sum(penalty(net, worker) for worker in range(2)) / 2).backward()  # type: ignore[union-attr]
        plain.step()
    for got in run_job(body, 2, 2):
        assert_close(got, net.values())


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_all_rows_come_in_requests_of_a_limited_size(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "WHOLE_BYTES", 5 * 8 * DIM)
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        strategy = None if mode == "sync" else fleet.StrategyFactory.create_geo_strategy(2)
        table = fleet.nn.Embedding(ROWS, DIM, padding_idx=2)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), strategy, model=table)
        fleet_.init_worker()
        optimizer.minimize(table(IDS).sum())
        before = len(network.seen)
        values = table.weight.detach().clone()
        rows = [len(tensor.array) for frame, _ in network.seen[before:] for tensor in frame.tensors]
        assert max(rows) <= 10
        assert sum(rows) == (ROWS if mode == "sync" else ROWS - 3), "in GEO the worker holds what it has trained"
        assert torch.equal(values, table(ALL))
        table.weight.sum()
        assert len(network.seen) > before

    run_job(body, 1, 1, network=network)


@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=[] if each in ("sync", "geo") else [pytest.mark.slow]) for each in MODES]
)
def test_nothing_of_a_job_outlives_it_by_a_gradient(mode: str) -> None:
    """A weight holds its gradient where Python does not look, so the gradient may not hold what holds the weight."""

    def job() -> tuple[list[weakref.ref[Any]], Any]:
        fleet_ = Fleet(environ={})
        fleet_.init()
        net = Net(sparse=True)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05), MODES[mode](), model=net)
        fleet_.init_worker()
        for _ in range(2):
            optimizer.zero_grad()
            net.loss().backward()
            clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        fleet_.stop_worker()
        return [weakref.ref(each) for each in (net, net.top.weight, optimizer)], net.emb.weight.grad

    gone, gradient = job()
    gc.collect()
    assert [each() for each in gone] == [None, None, None]
    assert gradient.norm() > 0
    with pytest.raises(UnsupportedError, match=r"the model of the table 'emb\.weight' is gone"):
        gradient.to_dense()
    doubled = copy.deepcopy(gradient) * 2
    with pytest.raises(UnsupportedError, match=r"asked for cos\(\), and the model"):
        doubled.cos()
    assert doubled.coalesce().values().shape == (5, DIM)


#: What adds up the gradients of equal ids.
ADDS_UP: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "clip": lambda params: clip_grad_norm_(params, 0.1),
    "coalesce": lambda params: setattr(params[0], "grad", params[0].grad.coalesce()),  # type: ignore[union-attr]
    "square": lambda params: setattr(params[0], "grad", params[0].grad * params[0].grad),  # type: ignore[operator]
    "finite": lambda params: [each.grad.isfinite().all() for each in params if each.grad is not None],
}


@pytest.mark.parametrize("adds_up", ADDS_UP)
@pytest.mark.parametrize("among_workers", [False, True])
def test_minus_one_is_an_id_like_any_other(adds_up: str, among_workers: bool) -> None:
    """``coalesce`` of torch takes it for none, if it is the smallest, and writes its row where no memory is."""
    make = fleet.StrategyFactory.create_sync_strategy
    strategy = make(dense="all_reduce", max_grad_norm=0.5) if among_workers else make()

    def trained(first: int) -> list[list[torch.Tensor]]:
        def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            model = torch.nn.Module()
            model.emb = fleet.nn.Embedding(None, DIM, initializer="constant(0.5)")
            model.scale = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))
            sgd = torch.optim.SGD([model.emb.weight, model.scale], lr=0.1)
            optimizer = fleet_.distributed_optimizer(sgd, strategy, model=model)
            fleet_.init_worker()
            for ids in ([0], [0, 0, 4], [3, 0], [0, 6, 0, 5]):
                optimizer.zero_grad()
                for times in range(1, 3):
                    (model.emb(torch.tensor(ids) + first) * model.scale * times).square().sum().backward()
                ADDS_UP[adds_up]([model.emb.weight, model.scale])
                optimizer.step()
            return [model.emb(torch.arange(7) + first).detach().clone(), model.scale.detach().clone()]

        return run_job(body, workers=1 + among_workers)

    for ours, expected in zip(trained(-1), trained(7), strict=True):
        assert_close(ours, expected)
