"""fleet.optim: the formulas, what PaddlePaddle computes, and the same on servers, rows and checkpoints included."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_checkpoint
import test_parity_dense
import test_parity_rows
import torch
from harness import assert_close
from test_kernels import Trial

import fleet
from fleet import Fleet
from fleet.errors import UnsupportedError
from fleet.kernels import RULES
from fleet.optim import DecayedAdagrad, Ftrl, Lamb, LarsMomentum, RowWiseAdagrad
from fleet.plan.plan import make_plan
from fleet.ps.worker.describe import describe
from fleet.strategy.parameter_server import as_strategy
from fleet.transpiler import DistributeTranspilerConfig

Array = np.ndarray[Any, Any]

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    each.__name__: each for each in (Ftrl, DecayedAdagrad, Lamb, LarsMomentum, RowWiseAdagrad)
}
CUT = ["Ftrl", "DecayedAdagrad"]
ROWS = [*CUT, "RowWiseAdagrad"]


def make(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    return CLASSES[name](params, **options)


# ---------------------------------------------------------------------------------------------- formulas


def ftrl(w: Array, g: Array, s: dict[str, Any], o: dict[str, Any]) -> Array:
    n, z, p = s.get("n", np.full_like(w, o["initial_accumulator_value"])), s.get("z", np.zeros_like(w)), -o["lr_power"]
    s["n"] = n + g * g
    s["z"] = z + g - (s["n"] ** p - n**p) / o["lr"] * w
    y = s["n"] ** p / o["lr"] + 2 * o["l2"]
    used = (np.abs(s["z"]) > o["l1"]) & (y > 0)
    return np.where(used, (np.sign(s["z"]) * o["l1"] - s["z"]) / np.where(used, y, 1), 0)


def decayed_adagrad(w: Array, g: Array, s: dict[str, Any], o: dict[str, Any]) -> Array:
    s["m"] = o["decay"] * s.get("m", np.zeros_like(w)) + (1 - o["decay"]) * g * g
    return w - o["lr"] * g / (np.sqrt(s["m"]) + o["eps"])


def lamb(w: Array, g: Array, s: dict[str, Any], o: dict[str, Any]) -> Array:
    (b1, b2), s["t"] = o["betas"], s.get("t", 0) + 1
    s["m"] = b1 * s.get("m", np.zeros_like(w)) + (1 - b1) * g
    s["v"] = b2 * s.get("v", np.zeros_like(w)) + (1 - b2) * g * g
    mean, square = s["m"] / (1 - b1 ** s["t"]), s["v"] / (1 - b2 ** s["t"])
    r = mean / (np.sqrt(square) + o["eps"]) + o["weight_decay"] * w
    up, down = math.sqrt((w * w).sum()), math.sqrt((r * r).sum())
    return w - o["lr"] * (up / down if up > 0 and down > 0 else 1) * r


def lars_momentum(w: Array, g: Array, s: dict[str, Any], o: dict[str, Any]) -> Array:
    decay, up, down = o["weight_decay"], math.sqrt((w * w).sum()), math.sqrt((g * g).sum())
    rate = o["lr"]
    if decay > 0 and up > 0 and down > 0:
        rate *= o["lars_coeff"] * up / (down + decay * up + o["eps"])
    s["v"] = o["momentum"] * s.get("v", np.zeros_like(w)) + rate * (g + decay * w)
    return w - s["v"]


def row_wise_adagrad(w: Array, g: Array, s: dict[str, Any], o: dict[str, Any]) -> Array:
    squares = (g * g).mean(1, keepdims=True) if g.ndim > 1 else g * g
    s["s"] = s.get("s", np.full_like(squares, o["initial_accumulator_value"])) + squares
    return w - (o["lr"] * g / (np.sqrt(s["s"]) + o["eps"])).astype(w.dtype)


FORMULAS: dict[str, Callable[[Array, Array, dict[str, Any], dict[str, Any]], Array]] = {
    "Ftrl": ftrl,
    "DecayedAdagrad": decayed_adagrad,
    "Lamb": lamb,
    "LarsMomentum": lars_momentum,
    "RowWiseAdagrad": row_wise_adagrad,
}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Ftrl", {}),
    ("Ftrl", {"l1": 0.3, "l2": 0.2, "initial_accumulator_value": 0.5}),
    ("Ftrl", {"l1": 0.1, "lr_power": -0.75, "maximize": True}),
    ("Ftrl", {"l2": 0.1, "lr_power": 0.0}),
    ("DecayedAdagrad", {}),
    ("DecayedAdagrad", {"decay": 0.5, "eps": 0.01, "maximize": True}),
    ("Lamb", {}),
    ("Lamb", {"betas": (0.5, 0.75), "eps": 0.01, "weight_decay": 0.3, "maximize": True}),
    ("Lamb", {"weight_decay": 0.0}),
    ("LarsMomentum", {}),
    ("LarsMomentum", {"momentum": 0.5, "lars_coeff": 0.3, "weight_decay": 0.2, "eps": 0.1, "maximize": True}),
    ("LarsMomentum", {"weight_decay": 0.0}),
    ("RowWiseAdagrad", {}),
    ("RowWiseAdagrad", {"eps": 0.1, "initial_accumulator_value": 0.5, "maximize": True}),
]


def assert_near(got: Array, expected: Array) -> None:
    assert got.dtype == expected.dtype
    tolerance = 1e-5 if got.dtype == np.float32 else 1e-12
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max()))


def ids(case: Any) -> str:
    if isinstance(case, dict):
        return "-".join(f"{key}={value}" for key, value in case.items()) or "defaults"
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=ids)
def test_follows_the_formula_under_a_changing_rate(name: str, options: dict[str, Any], dtype: str) -> None:
    """Two parameters in groups of their own; some gradients are zero, one element's always, and all for a while."""
    random = np.random.default_rng(3)
    weights = [random.normal(size=(4, 3)).astype(dtype), np.zeros(5, dtype)]
    params = [torch.nn.Parameter(torch.from_numpy(w.copy())) for w in weights]
    groups = [{"params": params[:1], **options}, {"params": params[1:]}]
    optimizer = make(name, groups, lr=1.0)
    settings = [{**optimizer.defaults, **options}, dict(optimizer.defaults)]
    states: list[dict[str, Any]] = [{}, {}]
    for step in range(200):
        lr = 0.1 / (1 + step // 50)
        for index, param in enumerate(params):
            grad = random.normal(size=param.shape).astype(dtype) * (random.random(param.shape) < 0.8)
            grad.flat[0] = 0
            grad *= not 20 <= step < 23
            optimizer.param_groups[index]["lr"] = settings[index]["lr"] = lr
            param.grad = torch.from_numpy(grad.copy())
            g = -grad if settings[index]["maximize"] else grad
            weights[index] = FORMULAS[name](weights[index], g, states[index], settings[index])
        optimizer.step()
    for param, weight in zip(params, weights, strict=True):
        assert_near(param.detach().numpy(), weight)


# PaddlePaddle 2.6.2 gives these: its operators ftrl, decayed_adagrad, lamb and lars_momentum, in float32 and without a
# GPU, on the weights, gradients and learning rates below; the weights after the first step and after the last.
WEIGHTS = [0.5, -1.25, 2.0, 0.0, 0.75, -0.03125]
GRADS = [
    [0.25, -0.5, 1.0, 0.125, 0.0, -0.75],
    [-0.5, 0.375, 0.25, 0.0, 0.0, -0.0625],
    [1.5, -0.125, -0.75, 0.5, 0.0, 0.25],
    [0.125, 0.25, -1.0, -0.5, 0.0625, 1.0],
]
RATES = [0.1, 0.1, 0.05, 0.2]
PADDLE: list[tuple[str, dict[str, Any], list[float], list[float]]] = [
    (
        "Ftrl",
        {},
        [0.4, -1.15, 1.9, -0.1, 0.0, 0.06875],
        [1.4096991, -2.3750718, 3.9771097, -0.29077536, -0.2, -0.0858771],
    ),
    (
        "Ftrl",
        {"l1": 0.125, "l2": 0.25},
        [0.29166666, -1.0227273, 1.7976191, 0.0, 0.0, 0.048828125],
        [0.99026394, -1.9888377, 3.660808, -0.011461964, 0.0, -0.067263775],
    ),
    (
        "Ftrl",
        {"l1": 0.0625, "l2": 0.5, "lr_power": -0.75},
        [0.1388889, -0.8503778, 1.7215909, -0.04334433, 0.0, 0.064644836],
        [0.64179164, -1.556494, 3.3685503, -0.11500028, 0.0, -0.049494583],
    ),
    (
        "DecayedAdagrad",
        {},
        [0.052794427, -0.8027904, 1.5527885, -0.44719756, 0.75, 0.4159609],
        [0.17282623, -1.3754691, 2.1491508, -0.032865584, -0.1443631, -0.33927527],
    ),
    (
        "DecayedAdagrad",
        {"decay": 0.5, "eps": 0.25},
        [0.44142136, -1.1671573, 1.8955184, -0.036939807, 0.75, 0.06486318],
        [0.44127262, -1.3139858, 2.0881236, 0.067995965, 0.70751107, -0.148616],
    ),
    (
        "Lamb",
        {},
        [0.38736662, -1.1365259, 1.8856852, -0.112072565, 0.74915946, 0.08085833],
        [0.14851256, -1.1246607, 1.8529005, -0.32943052, 0.43263006, 0.09150864],
    ),
    (
        "Lamb",
        {"betas": (0.5, 0.75), "eps": 0.0625, "weight_decay": 0.125},
        [0.39809725, -1.1265188, 1.8592647, -0.07876541, 0.7389236, 0.078271315],
        [0.22097312, -1.1746782, 1.8750575, -0.09934179, 0.55341154, -0.106073126],
    ),
    (
        "LarsMomentum",
        {},
        [0.49995407, -1.2499081, 1.9998163, -2.2934122e-05, 0.74999994, -0.031112392],
        [0.50010264, -1.2501277, 1.9995462, 1.8690844e-05, 0.7499786, -0.031077782],
    ),
    (
        "LarsMomentum",
        {"momentum": 0.5, "lars_coeff": 0.25, "weight_decay": 0.125, "eps": 0.5},
        [0.49099478, -1.2310891, 1.9639791, -0.0036020821, 0.7472984, -0.009524941],
        [0.47752526, -1.2307827, 1.9451253, 0.01059798, 0.7283532, -0.04268308],
    ),
    (
        "LarsMomentum",
        {"momentum": 0.5, "lars_coeff": 0.25, "weight_decay": 0.0},
        [0.475, -1.2, 1.9, -0.0125, 0.75, 0.043750003],
        [0.403125, -1.2625, 2.0249999, 0.0390625, 0.7375, -0.098437496],
    ),
]


@pytest.mark.parametrize(("name", "options", "first", "last"), PADDLE, ids=ids)
def test_paddles_numbers(name: str, options: dict[str, Any], first: list[float], last: list[float]) -> None:
    param = torch.nn.Parameter(torch.tensor(WEIGHTS).view(2, 3))
    optimizer = make(name, [param], **options)
    row = Trial(name, options, np.array([WEIGHTS], "float32")) if name in ROWS else None
    for step, (grad, lr) in enumerate(zip(GRADS, RATES, strict=True), 1):
        param.grad = torch.tensor(grad).view(2, 3)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        if row is not None:
            row.step([0], np.array([grad], "float32"), lr, step)
        if step in (1, len(GRADS)):
            expected = torch.tensor(first if step == 1 else last)
            torch.testing.assert_close(param.detach().view(-1), expected, rtol=1e-6, atol=1e-7)
            if row is not None:
                torch.testing.assert_close(torch.from_numpy(row.weights[0]), expected, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] in ROWS], ids=ids)
def test_rows_all_touched_are_the_class_itself(name: str, options: dict[str, Any], dtype: str) -> None:
    random = np.random.default_rng(5)
    start = random.normal(size=(20, 3)).astype(dtype)
    rows, param = Trial(name, options, start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = make(name, [param], **options)
    for step in range(1, 201):
        grads = (random.normal(size=start.shape) * (random.random(start.shape) < 0.8)).astype(dtype)
        grads[0, 0] = 0
        lr = optimizer.param_groups[0]["lr"] = 0.1 / (1 + step // 50)
        param.grad = torch.from_numpy(grads.copy())
        optimizer.step()
        order = random.permutation(len(start))
        rows.step(order, grads[order], lr, step)
    assert_near(rows.weights, param.detach().numpy())
    assert (np.delete(rows.matrix, rows.slots, axis=0) == 7).all(), "a row nobody touched has moved"


ON_SERVERS: dict[str, test_parity_dense.Make] = {
    "Ftrl": lambda p: Ftrl(p, lr=0.1, l1=0.01, l2=0.1, initial_accumulator_value=0.1),
    "DecayedAdagrad": lambda p: DecayedAdagrad(p, lr=0.05, decay=0.8),
    "Lamb": lambda p: Lamb(p, lr=0.05, betas=(0.8, 0.9)),
    "LarsMomentum": lambda p: LarsMomentum(p, lr=0.5, lars_coeff=0.1),
    "RowWiseAdagrad": lambda p: RowWiseAdagrad(p, lr=0.05, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_on_servers_follow_the_class_row_by_row(name: str) -> None:
    rows = [torch.nn.Parameter(row[None].clone()) for row in test_parity_rows.initial()]
    optimizers = [ON_SERVERS[name]([row]) for row in rows]
    for step in range(test_parity_rows.STEPS):
        weight = torch.cat([row.detach() for row in rows])
        grad = test_parity_rows.mean_gradient(weight, step, workers=2)
        for index, value in zip(grad.indices()[0].tolist(), grad.values(), strict=True):
            rows[index].grad = value[None].clone()
            optimizers[index].step()
    expected = torch.cat([row.detach() for row in rows])
    for got in test_parity_rows.distributed(ON_SERVERS[name], workers=2, servers=3):
        assert_close([got], [expected])


@pytest.mark.parametrize("name", sorted(set(CLASSES) - set(ROWS)))
def test_what_needs_whole_parameters_is_refused_for_tables(name: str) -> None:
    made = Fleet(environ={})
    made.init()
    table = torch.nn.Embedding(10, 2, sparse=True)
    with pytest.raises(UnsupportedError, match=rf"{name} cannot update rows of the sparse table 'weight'") as caught:
        made.distributed_optimizer(make(name, table.parameters()), model=table)
    assert "DecayedAdagrad, Ftrl" in str(caught.value)


# ---------------------------------------------------------------------------------------------- dense, on servers


@pytest.mark.parametrize("name", CLASSES)
def test_servers_end_where_one_process_ends(name: str) -> None:
    expected = test_parity_dense.reference(ON_SERVERS[name], workers=2)
    for got in test_parity_dense.distributed(ON_SERVERS[name], workers=2, servers=3):
        assert_close(got, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_only_elementwise_formulas_are_cut(name: str) -> None:
    config = DistributeTranspilerConfig()
    config.min_block_size = 20
    model = test_parity_dense.make_model()
    spec = describe([make(name, model.parameters())], model, as_strategy(config), 3, 2).spec
    parts = [block.numel for blocks in make_plan(spec).by_server for block in blocks]
    whole = [param.numel for param in spec.params]
    assert (sorted(parts) == sorted(whole)) == (name not in CUT)
    assert sum(parts) == sum(whole)


GOING_ON: dict[str, Callable[[Iterable[torch.nn.Parameter]], Any]] = {
    "Ftrl": lambda p: ON_SERVERS["Ftrl"](list(p)),
    "Lamb and DecayedAdagrad": lambda p: _by_kind(p, "Lamb", "DecayedAdagrad"),
    "LarsMomentum and Ftrl": lambda p: _by_kind(p, "LarsMomentum", "Ftrl"),
    "RowWiseAdagrad": lambda p: ON_SERVERS["RowWiseAdagrad"](list(p)),
}


def _by_kind(params: Iterable[torch.nn.Parameter], dense: str, rows: str) -> list[torch.optim.Optimizer]:
    *most, own, opened = params
    return [ON_SERVERS[dense](most), ON_SERVERS[rows]([own, opened])]


@pytest.mark.pairs(1)
@pytest.mark.parametrize("name", GOING_ON)
def test_going_on_from_a_checkpoint_equals_never_stopping(name: str, tmp_path: Path) -> None:
    def train(*args: Any, **options: Any) -> list[list[torch.Tensor]]:
        torch.manual_seed(4)  # of it come the rows of the table without a size
        return test_checkpoint.train(GOING_ON[name], *args, **options)

    (expected,) = train(1, 1, {}, range(10))
    train(2, 2, {"min_block_size": 4}, range(5), save_to=tmp_path / "ckpt")
    for got in train(1, 1, {}, range(5, 10), model_dir=str(tmp_path / "ckpt")):
        assert_close(got, expected)


# ---------------------------------------------------------------------------------------------- as torch's are


def test_ftrl_drops_what_has_no_gradient_and_stands_still_at_rate_zero() -> None:
    start, grad = np.array([[1.0, 2.0, 3.0]], "float32"), np.array([[0.0, 1e-30, 1.0]], "float32")
    param, rows = torch.nn.Parameter(torch.from_numpy(start[0].copy())), Trial("Ftrl", {}, start)
    optimizer = Ftrl([param], lr=0.0)
    for lr, expected in [(0.0, [1.0, 2.0, 3.0]), (0.5, [0.0, 0.0, 2.5]), (0.0, [0.0, 0.0, 2.5])]:
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.from_numpy(grad[0].copy())
        optimizer.step()
        rows.step([0], grad, lr, 1)
        assert param.tolist() == rows.weights[0].tolist() == expected


def test_l1_makes_weights_exactly_zero() -> None:
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = Ftrl([param], lr=0.1, l1=1.0)
    for step in range(20):
        param.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step)) * 0.1
        param.grad[0] = 1.0
        optimizer.step()
    assert param[0] < 0
    assert (param == 0).sum() > 900


@pytest.mark.parametrize("name", ["DecayedAdagrad", "Lamb", "LarsMomentum", "RowWiseAdagrad"])
def test_gradients_that_are_all_zero_move_nothing_without_weight_decay(name: str) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = make(name, [param], **({} if name in ROWS else {"weight_decay": 0.0}))
    for _ in range(2):
        param.grad = torch.zeros(2)
        optimizer.step()
    assert param.tolist() == [1, 1]


@pytest.mark.parametrize("name", CLASSES)
def test_a_nan_is_not_hidden(name: str) -> None:
    param = torch.nn.Parameter(torch.ones(1, 2))
    optimizer = make(name, [param], lr=0.1)
    rows = Trial(name, {}, np.ones((1, 2), "float32")) if name in ROWS else None
    for step in (1, 2):
        param.grad = torch.tensor([[math.nan, 1.0]])
        optimizer.step()
        assert param[0, 0].isnan()
        if rows is not None:
            rows.step([0], np.array([[math.nan, 1.0]], "float32"), 0.1, step)
            np.testing.assert_allclose(rows.weights, param.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {"lr": bad}) for name in CLASSES for bad in (-0.1, math.nan)],
        *[("Ftrl", {key: -0.1}) for key in ("l1", "l2", "initial_accumulator_value")],
        ("Ftrl", {"lr_power": 0.5}),
        *[("DecayedAdagrad", {"decay": bad}) for bad in (-0.1, 1.1)],
        *[("Lamb", {"betas": bad}) for bad in ((-0.1, 0.9), (0.9, 1.0))],
        ("Lamb", {"weight_decay": -0.1}),
        *[(name, {"eps": -0.1}) for name in ("DecayedAdagrad", "Lamb", "LarsMomentum", "RowWiseAdagrad")],
        ("RowWiseAdagrad", {"initial_accumulator_value": -0.1}),
        *[("LarsMomentum", {key: -0.1}) for key in ("momentum", "lars_coeff", "weight_decay")],
    ],
    ids=ids,
)
def test_bad_arguments(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        make(name, [torch.nn.Parameter(torch.zeros(1))], **options)


@pytest.mark.parametrize("dims", [(), (3,), (2, 2)], ids=str)
def test_row_wise_adagrad_steps_on_sparse_gradients_as_on_dense_ones(dims: tuple[int, ...]) -> None:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 6 * math.prod(dims)).view(6, *dims)) for _ in range(2)]
    optimizer = RowWiseAdagrad(params, lr=0.1, eps=0.01)
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 6, (4,), generator=draw)  # some of them twice
        sparse = torch.sparse_coo_tensor(ids[None], torch.randn(4, *dims, generator=draw), params[0].shape)
        params[0].grad, params[1].grad = sparse, sparse.to_dense()
        optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted({*CLASSES} - {"RowWiseAdagrad"}))
def test_sparse_and_complex_gradients_are_refused(name: str) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    number = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    number.grad = torch.ones_like(number)
    for param in (table.weight, number):
        before = param.detach().clone()
        with pytest.raises(RuntimeError, match=f"{name} supports neither sparse nor complex gradients"):
            make(name, [param]).step()
        assert param.equal(before)


def run(optimizer: torch.optim.Optimizer, steps: range, schedule: Any = None) -> list[torch.Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in steps:
        for index, param in enumerate(params):
            draw = torch.Generator().manual_seed(10 * step + index)
            param.grad = torch.randn(param.shape, generator=draw, dtype=param.dtype)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [param.detach().clone() for param in params]


def params_of(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=dtype).view(shape)) for shape in ((2, 3), (6,))]


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
@pytest.mark.parametrize("name", CLASSES)
def test_state_dicts_make_the_round_trip(name: str, carry: Callable[[Any], Any]) -> None:
    expected = run(ON_SERVERS[name](params_of()), range(6))
    first = ON_SERVERS[name](params_of())
    middle = run(first, range(3))
    second = make(name, [torch.nn.Parameter(value) for value in middle])
    second.load_state_dict(carry(first.state_dict()))
    assert [torch.equal(*pair) for pair in zip(run(second, range(3, 6)), expected, strict=True)] == [True, True]


@pytest.mark.parametrize("name", CLASSES)
def test_schedules_closures_and_tensor_rates_work(name: str) -> None:
    scheduled = make(name, params_of(), lr=0.2)
    got = run(scheduled, range(4), torch.optim.lr_scheduler.StepLR(scheduled, 2, 0.5))
    by_hand = make(name, params_of(), lr=torch.tensor(0.2))
    run(by_hand, range(2))
    by_hand.param_groups[0]["lr"] = 0.1
    assert_close(got, run(by_hand, range(2, 4)))

    param = torch.nn.Parameter(torch.ones(2))
    optimizer = make(name, [param], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param * 3).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6
    assert (param < 1).all()
    optimizer.zero_grad()
    still = param.detach().clone()
    assert optimizer.step() is None
    assert param.equal(still), "without a gradient there is no step"


@pytest.mark.parametrize("name", CLASSES)
def test_half_precision_and_groups_that_come_later(name: str) -> None:
    """Norms of the short types are taken in float32: 90,000, of these weights, is more than float16 holds."""
    exact = make(name, [torch.nn.Parameter(torch.full((300, 300), 300.0))], lr=0.5)
    short = make(name, [torch.nn.Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))], lr=0.5)
    for optimizer in (exact, short):
        optimizer.param_groups[0]["params"][0].grad = torch.full_like(optimizer.param_groups[0]["params"][0], 0.5)
        optimizer.step()
        late = torch.nn.Parameter(torch.ones(2))
        late.grad = torch.ones(2)
        optimizer.add_param_group({"params": [late], "lr": 0.25})
        optimizer.step()
        assert not late.equal(torch.ones(2))
    wanted, got = (optimizer.param_groups[0]["params"][0].detach().float() for optimizer in (exact, short))
    assert not wanted.equal(torch.full((300, 300), 300.0))
    torch.testing.assert_close(got, wanted, rtol=5e-3, atol=0)


def test_the_classes_are_what_the_servers_run() -> None:
    assert sorted(fleet.optim.__all__) == sorted(CLASSES)
    for name, each in CLASSES.items():
        assert RULES[name].optimizer is each is getattr(fleet.optim, name)
        assert name in repr(each([torch.nn.Parameter(torch.zeros(1))]))
        rows = RULES[name].rows
        assert rows is None or dict(rows.options) == each([torch.nn.Parameter(torch.zeros(1))]).defaults
