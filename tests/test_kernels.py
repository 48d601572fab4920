"""The update's maths: every rule against torch, and what is done to ids and rows whatever the rule."""

from __future__ import annotations

import inspect
import itertools
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from test_import import fresh_python

from fleet.kernels import HINTS, REFUSED, RULES
from fleet.numeric import ids as rows
from fleet.numeric import jit
from fleet.numeric.jit import Compiled, compiled

INT64 = np.iinfo(np.int64)
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
ROWS, DIM, STEPS = 6, 5, 24

ids_strategy = st.lists(st.one_of(st.integers(-3, 3), st.integers(INT64.min, INT64.max)), max_size=60)


# ---------------------------------------------------------------------------------------------- rules against torch


def combinations(**choices: list[Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


#: Every combination of options, by rule.
CASES: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        options
        for options in combinations(
            momentum=[0.0, 0.9],
            dampening=[0.0, 0.3],
            weight_decay=[0.0, 0.1],
            nesterov=[False, True],
            maximize=[False, True],
        )
        if not options["nesterov"] or (options["momentum"] and not options["dampening"])
    ],
    "Adagrad": list(
        combinations(
            lr_decay=[0.0, 0.05],
            weight_decay=[0.0, 0.1],
            initial_accumulator_value=[0.0, 0.1],
            eps=[1e-10, 1e-3],
            maximize=[False, True],
        )
    ),
    "RMSprop": list(
        combinations(
            alpha=[0.9, 0.3],
            eps=[1e-8, 1e-2],
            weight_decay=[0.0, 0.1],
            momentum=[0.0, 0.9],
            centered=[False, True],
            maximize=[False, True],
        )
    ),
    # Dense Adam corrects the second moment before adding eps, SparseAdam after: without eps they are one formula.
    "Adam": [
        {"eps": 0.0, **options}
        for options in combinations(
            betas=[(0.9, 0.999), (0.5, 0.8)],
            weight_decay=[0.0, 0.1],
            amsgrad=[False, True],
            decoupled_weight_decay=[False, True],
            maximize=[False, True],
        )
    ],
    "AdamW": list(
        combinations(
            betas=[(0.9, 0.999), (0.3, 0.8)],
            eps=[1e-8, 1e-2],
            weight_decay=[0.0, 0.1],
            amsgrad=[False, True],
            maximize=[False, True],
        )
    ),
    "Adamax": list(
        combinations(
            betas=[(0.9, 0.999), (0.3, 0.8)], eps=[1e-8, 1e-2], weight_decay=[0.0, 0.1], maximize=[False, True]
        )
    ),
    "Adadelta": list(combinations(rho=[0.9, 0.3], eps=[1e-6, 1e-2], weight_decay=[0.0, 0.1], maximize=[False, True])),
    "NAdam": list(
        combinations(
            betas=[(0.9, 0.999), (0.3, 0.8)],
            eps=[1e-8, 1e-2],
            weight_decay=[0.0, 0.1],
            momentum_decay=[4e-3, 0.5],
            decoupled_weight_decay=[False, True],
            maximize=[False, True],
        )
    ),
    "RAdam": list(
        combinations(
            betas=[(0.9, 0.999), (0.3, 0.8)],
            eps=[1e-8, 1e-2],
            weight_decay=[0.0, 0.1],
            decoupled_weight_decay=[False, True],
            maximize=[False, True],
        )
    ),
}


class Trial:
    """A matrix whose rows are updated by a kernel, at slots that are out of order."""

    def __init__(self, rule: str, options: dict[str, Any], start: np.ndarray[Any, Any]) -> None:
        kernel = RULES[rule].rows
        assert kernel is not None
        self.kernel, self.options = kernel, options
        self.slots = np.random.default_rng(1).permutation(3 * len(start))[: len(start)]
        self.matrix = np.full((3 * len(start), start.shape[1]), 7, start.dtype)
        self.matrix[self.slots] = start
        self.state = {
            name: np.full((len(self.matrix), column.width), column.fill, start.dtype)
            for name, column in kernel.columns(options, start.shape[1]).items()
        }

    def step(self, touched: Any, grads: np.ndarray[Any, Any], lr: float, step: int) -> None:
        self.kernel.step(
            self.matrix, self.state, self.slots[touched], grads, {**self.options, "lr": lr, "foreach": None}, step
        )

    @property
    def weights(self) -> np.ndarray[Any, Any]:
        return self.matrix[self.slots]


def touches(dtype: str) -> Iterator[tuple[int, float, Any, Any]]:
    """Step number, learning rate, touched rows and their gradients; the rate changes and some steps touch nothing."""
    random = np.random.default_rng(5)
    for step in range(1, STEPS + 1):
        touched = random.permutation(ROWS)[: random.integers(0, ROWS + 1)]
        yield step, 0.05 / (1 + step // 8), touched, random.normal(size=(len(touched), DIM)).astype(dtype)


def set_count(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Have torch's next step of all parameters that have a gradient be number ``step``: the count is the table's."""
    (group,) = optimizer.param_groups
    grads = {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
    fresh = {parameter: parameter.detach().clone() for parameter in grads if not optimizer.state[parameter]}
    if fresh:
        for parameter in grads.keys() - fresh.keys():
            parameter.grad = None
        optimizer.step()  # only to have the state made; the parameters are put back
        for parameter, before in fresh.items():
            parameter.data.copy_(before)
            state = optimizer.state[parameter]
            if "step" in state:
                for value in state.values():
                    value.zero_()
            else:
                state.clear()
        for parameter, grad in grads.items():
            parameter.grad = grad
    for parameter in grads:
        state = optimizer.state[parameter]
        if "step" in state:
            state["step"].fill_(step - 1)
        if "mu_product" in state:  # torch keeps it in float32 even beside float64 parameters
            mus = (group["betas"][0] * (1 - 0.5 * 0.96 ** (i * group["momentum_decay"])) for i in range(1, step))
            state["mu_product"] = torch.tensor(math.prod(mus), dtype=torch.float64)


def assert_close(ours: Any, theirs: Any, slack: float = 1, about: object = "") -> None:
    assert ours.dtype == theirs.dtype
    scale = max(1.0, float(np.abs(theirs).max()))
    assert float(np.abs(ours - theirs).max()) <= slack * TOLERANCE[str(ours.dtype)] * scale, about


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", CASES)
@pytest.mark.pairs(2)
def test_rows_follow_torch_row_by_row(rule: str, dtype: str) -> None:
    """Each row is a parameter of its own, with each combination of options."""
    start = np.random.default_rng(3).normal(size=(ROWS, DIM)).astype(dtype)
    make: Callable[..., torch.optim.Optimizer] = RULES[rule].optimizer
    for options in CASES[rule]:
        ours = Trial(rule, options, start)
        parameters = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in start]
        optimizer = make(parameters, lr=1.0, foreach=False, **options)
        for step, lr, touched, grads in touches(dtype):
            ours.step(touched, grads, lr, step)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            for row, grad in zip(touched, grads, strict=True):
                parameters[row].grad = torch.from_numpy(grad)
            set_count(optimizer, step)
            optimizer.step()
        # Centered, RMSprop divides by the root of a difference of near-equal numbers: torch's own last bits are lost.
        slack = 2 if options.get("centered") else 1
        assert_close(ours.weights, np.stack([p.detach().numpy() for p in parameters]), slack, options)
        assert (np.delete(ours.matrix, ours.slots, axis=0) == 7).all(), f"a row nobody touched has moved: {options}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("rule", "sparse", "options"),
    [
        *[
            (rule, "SparseAdam", options)
            for rule in ("Adam", "SparseAdam")
            for options in combinations(betas=[(0.9, 0.999), (0.5, 0.8)], eps=[1e-8, 1e-2], maximize=[False, True])
        ],
        *[("Adagrad", "Adagrad", options) for options in combinations(lr_decay=[0.0, 0.1], eps=[1e-10, 1e-2])],
        ("SGD", "SGD", {}),
    ],
)
def test_rows_follow_torch_with_sparse_gradients(rule: str, sparse: str, options: dict[str, Any], dtype: str) -> None:
    start = np.random.default_rng(3).normal(size=(ROWS, DIM)).astype(dtype)
    ours = Trial(rule, options, start)
    embedding = torch.nn.Embedding(ROWS, DIM, sparse=True, _weight=torch.from_numpy(start.copy()))
    optimizer = getattr(torch.optim, sparse)(embedding.parameters(), lr=1.0, **options)
    for step, lr, touched, grads in touches(dtype):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        (embedding(torch.from_numpy(touched)) * torch.from_numpy(grads)).sum().backward()
        optimizer.step()
        ours.step(touched, grads, lr, step)
    assert_close(ours.weights, embedding.weight.detach().numpy())


#: What may decide whether a dense formula changes rows that have no gradient, and what certainly does not.
IDLE: dict[str, list[Any]] = {
    **{name: [0.0, 0.9] for name in ("momentum", "initial_accumulator_value")},
    **{name: [0.0, 0.1] for name in ("weight_decay", "lr_decay")},
    **{name: [0.0, 0.7, 1.0] for name in ("alpha", "rho", "decay")},
    "betas": [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.0, 0.9), (0.9, 0.999)],
    **{name: [False, True] for name in ("amsgrad", "decoupled_weight_decay")},
}


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.rows and rule.dense])
def test_rules_know_what_changes_rows_without_a_gradient(rule: str) -> None:
    """The dense class itself says so: where a row without one ends elsewhere than a lazy row, something is named."""
    kernel, make = RULES[rule].rows, RULES[rule].optimizer
    assert kernel is not None
    accepted = inspect.signature(make).parameters
    start, random = np.random.default_rng(3).normal(size=(3, DIM)), np.random.default_rng(5)
    grads = random.normal(size=(9, 3, DIM))
    changed = []
    for options in combinations(**{name: IDLE[name] for name in kernel.options if name in IDLE and name in accepted}):
        ours, weight = Trial(rule, options, start), torch.nn.Parameter(torch.from_numpy(start.copy()))
        optimizer = make([weight], lr=0.05, **options)  # type: ignore[call-arg]
        for step, grad in enumerate(grads, start=1):
            touched = [0, 1] if step in (1, 2, 6, 9) else [0]  # the third row never
            weight.grad = torch.zeros_like(weight)
            weight.grad[touched] = torch.from_numpy(grad[touched])
            optimizer.step()
            ours.step(touched, grad[touched], 0.05, step)
        differs = not np.allclose(ours.weights, weight.detach().numpy(), rtol=1e-5, atol=1e-6)
        assert bool(kernel.idle_changes(options)) == differs, options
        changed.append(differs)
    assert any(changed) or not {*IDLE} & {*kernel.options} - {"initial_accumulator_value"}  # that alone moves nothing


def test_what_changes_rows_without_a_gradient_is_named_as_the_user_wrote_it() -> None:
    told = {rule: RULES[rule].rows.idle_changes({}) for rule in RULES if RULES[rule].rows}  # type: ignore[union-attr]
    assert told["SGD"] == told["Adagrad"] == told["SparseAdam"] == ()
    assert told["AdamW"] == ("betas=(0.9, 0.999)", "weight_decay=0.01")
    momentum = RULES["RMSprop"].rows.idle_changes({"momentum": 0.5})  # type: ignore[union-attr]
    assert momentum == ("alpha=0.99", "momentum=0.5")


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.rows])
def test_rows_share_non_finite_gradients_and_a_zero_rate_with_torch(rule: str) -> None:
    sparse = rule in ("Adam", "SparseAdam")
    start, grad = np.ones((1, 4), "float32"), np.array([[math.nan, math.inf, -math.inf, 1]], "float32")
    for lr in (0.1, 0.0):
        ours = Trial(rule, {}, start)
        weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
        make: Callable[..., torch.optim.Optimizer] = RULES["SparseAdam" if sparse else rule].optimizer
        optimizer = make([weight], lr=1.0)
        optimizer.param_groups[0]["lr"] = lr  # what a schedule may do, and some constructors refuse
        for step, each in enumerate((grad, grad[:, ::-1]), start=1):  # a NaN that was, and one that comes
            weight.grad = torch.from_numpy(each.copy())
            if sparse:
                weight.grad = torch.sparse_coo_tensor([[0]], weight.grad, (1, 4))
            optimizer.step()
            ours.step([0], each, lr, step)
        np.testing.assert_allclose(ours.weights, weight.detach().numpy(), rtol=1e-6)
        for name in ours.state.keys() & optimizer.state[weight].keys():
            theirs = optimizer.state[weight][name].numpy()
            np.testing.assert_allclose(ours.state[name][ours.slots], theirs, rtol=1e-6, err_msg=name)


#: Options away from the defaults for every rule of torch. Adam has no eps, as in ``CASES``.
LONG: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
    "Adagrad": {"lr_decay": 0.01, "weight_decay": 0.02, "initial_accumulator_value": 0.1, "eps": 1e-6},
    "Adadelta": {"rho": 0.8, "eps": 1e-4, "weight_decay": 0.02, "maximize": True},
    "RMSprop": {"alpha": 0.9, "eps": 1e-4, "momentum": 0.5, "weight_decay": 0.02},
    "Adam": {"betas": (0.8, 0.95), "eps": 0.0, "weight_decay": 0.02, "amsgrad": True},
    "SparseAdam": {"betas": (0.8, 0.95), "eps": 1e-4, "maximize": True},
    "AdamW": {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.02, "amsgrad": True},
    "Adamax": {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.02},
    "NAdam": {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.02, "momentum_decay": 0.02},
    "RAdam": {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.02, "decoupled_weight_decay": True},
}


def of_torch(name: str) -> bool:
    return getattr(torch.optim, name, None) is RULES[name].optimizer


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.rows and of_torch(name)])
def test_two_hundred_steps_end_where_torch_ends(rule: str, dtype: str) -> None:
    random = np.random.default_rng(3)
    start = random.normal(size=(ROWS, DIM)).astype(dtype)
    ours = Trial(rule, LONG[rule], start)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    make: Callable[..., torch.optim.Optimizer] = RULES[rule].optimizer
    optimizer = make([weight], lr=0.01, **LONG[rule])
    for step in range(1, 201):
        grad = random.normal(size=(ROWS, DIM)).astype(dtype)
        weight.grad = torch.from_numpy(grad)
        if rule == "SparseAdam":
            weight.grad = torch.sparse_coo_tensor([range(ROWS)], weight.grad, grad.shape)
        elif step == 1 and dtype == "float64":
            set_count(optimizer, 1)  # changes nothing but that NAdam's product is counted in float64 too
        optimizer.step()
        ours.step(np.arange(ROWS), grad, 0.01, step)
    assert_close(ours.weights, weight.detach().numpy())


@pytest.mark.parametrize("rule", ["AdamW", "Adamax", "NAdam", "RAdam"])
def test_the_ten_millionth_step_is_torchs(rule: str) -> None:
    start, grad = np.ones((1, 4)), np.array([[2.0, -1.0, 0.5, 0.0]])
    ours, weight = Trial(rule, LONG[rule], start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    make: Callable[..., torch.optim.Optimizer] = RULES[rule].optimizer
    optimizer = make([weight], lr=0.01, **LONG[rule])
    weight.grad = torch.from_numpy(grad)
    set_count(optimizer, 1)
    optimizer.state[weight]["step"].fill_(10**7 - 1)
    if rule == "NAdam":
        optimizer.state[weight]["mu_product"].zero_()  # as it is long before
    optimizer.step()
    ours.step([0], grad, 0.01, 10**7)
    assert_close(ours.weights, weight.detach().numpy())


def test_adamw_decays_as_adam_does_where_a_group_says_so() -> None:
    """The constructor does not take the option; a group's dictionary does."""
    start, grad, options = np.ones((1, 4)), np.array([[2.0, -1.0, 0.5, 0.0]]), {"weight_decay": 0.1}
    ours, weight = Trial("AdamW", options, start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.AdamW([weight], lr=0.01, **options)
    if "decoupled_weight_decay" not in optimizer.param_groups[0]:
        pytest.skip("this torch does not have the option")
    ours.options["decoupled_weight_decay"] = optimizer.param_groups[0]["decoupled_weight_decay"] = False
    for step in (1, 2, 3):
        weight.grad = torch.from_numpy(grad)
        optimizer.step()
        ours.step([0], grad, 0.01, step)
    assert_close(ours.weights, weight.detach().numpy())


def test_the_first_touch_of_a_row_sets_its_momentum_undamped_however_late() -> None:
    ours = Trial("SGD", {"momentum": 0.9, "dampening": 0.5}, np.zeros((2, 1), "float64"))
    ours.step([0], np.ones((1, 1)), 1.0, 1)
    ours.step([0, 1], np.ones((2, 1)), 1.0, 2)
    assert ours.weights.ravel().tolist() == [-1 - 1.4, -1]


def test_state_takes_memory_only_when_the_options_need_it() -> None:
    def names(rule: str, **options: Any) -> list[str]:
        kernel = RULES[rule].rows
        assert kernel is not None
        return list(kernel.columns(options, DIM))

    assert names("SGD") == names("SGD", momentum=0) == []
    assert names("SGD", momentum=0.9) == ["momentum_buffer", "started"]
    assert names("Adam") == ["exp_avg", "exp_avg_sq"]
    assert names("Adam", amsgrad=True) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert names("AdamW") == ["exp_avg", "exp_avg_sq"]
    assert names("AdamW", amsgrad=True) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert names("RMSprop", centered=True) == ["square_avg", "grad_avg"]


# ---------------------------------------------------------------------------------------------- the registry


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_called_what_its_class_is_called(name: str) -> None:
    rule = RULES[name]
    assert rule.name == rule.optimizer.__name__ == name
    assert rule.rows is not None or rule.dense


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.rows])
def test_every_option_of_a_class_is_honoured_or_refused_with_the_class_default(name: str) -> None:
    rule = RULES[name]
    assert rule.rows is not None
    make: Callable[..., torch.optim.Optimizer] = rule.optimizer
    theirs = make([torch.nn.Parameter(torch.zeros(1))]).defaults
    ours = dict(rule.rows.options)
    assert set(theirs) - HINTS - set(rule.refused) <= set(ours)
    assert all(theirs.get(key, default) == default for key, default in ours.items())


def test_no_optimizer_of_torch_is_forgotten() -> None:
    known = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    assert known == {name for name in RULES if of_torch(name)} | set(REFUSED)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.dense])
def test_a_sliceable_rule_updates_the_pieces_as_it_updates_the_whole(name: str) -> None:
    make: Callable[..., Any] = RULES[name].optimizer
    random = torch.Generator().manual_seed(1)
    start = torch.randn(6, 4, generator=random)
    whole = torch.nn.Parameter(start.clone())
    # What cannot be cut anywhere is cut between columns: rows alone would be whole parameters to some.
    cut = (lambda whole: whole.view(-1).split(10)) if RULES[name].sliceable else (lambda whole: whole.split(2, 1))
    pieces = [torch.nn.Parameter(piece.clone()) for piece in cut(start)]
    optimizers = [make([whole], lr=0.05), *(make([piece], lr=0.05) for piece in pieces)]
    for _ in range(20):
        grad = torch.randn(6, 4, generator=random)
        whole.grad = grad
        for piece, part in zip(pieces, cut(grad), strict=True):
            piece.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    alike = [
        torch.allclose(piece, part, rtol=1e-6, atol=1e-7)
        for piece, part in zip(pieces, cut(whole.detach()), strict=True)
    ]
    assert all(alike) == RULES[name].sliceable


# ---------------------------------------------------------------------------------------------- ids


@settings(max_examples=100, deadline=None)
@given(ids_strategy)
def test_unique_keeps_the_order_of_first_appearance(values: list[int]) -> None:
    distinct, inverse = rows.unique(np.array(values, np.int64))
    assert distinct.tolist() == list(dict.fromkeys(values))
    assert distinct[inverse].tolist() == values


def test_unique_of_many_ids_is_numpys() -> None:
    ids = np.random.default_rng(0).integers(-5000, 5000, 100_000)
    distinct, inverse = rows.unique(ids)
    assert np.array_equal(np.sort(distinct), np.unique(ids))
    assert np.array_equal(distinct[inverse], ids)


@settings(max_examples=50, deadline=None)
@given(ids_strategy, st.integers(1, 9))
def test_partition_gives_every_server_its_ids_in_their_order(values: list[int], servers: int) -> None:
    ids = np.array(values, np.int64)
    parts, owners = rows.partition(ids, servers), rows.owner(ids, servers)
    assert len(parts) == servers
    assert [part.tolist() for part in parts] == [np.flatnonzero(owners == s).tolist() for s in range(servers)]


def splitmix64(x: int) -> int:
    """The finalizer as published, on Python's integers."""
    x &= 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_the_owner_of_an_id_is_fixed_for_ever() -> None:
    ids = [0, 1, 2, 3, -1, INT64.min, INT64.max, 123456789]
    golden = {
        2: [0, 1, 0, 0, 1, 0, 1, 0],
        3: [0, 1, 1, 2, 0, 0, 1, 2],
        7: [0, 6, 1, 4, 0, 0, 3, 2],
        64: [0, 37, 10, 48, 59, 10, 61, 32],
    }
    for servers, owners in golden.items():
        assert rows.owner(ids, servers).tolist() == owners == [splitmix64(i) % servers for i in ids]


def test_owners_are_spread_evenly() -> None:
    counts = np.bincount(rows.owner(np.arange(100_000) * 64, 8))
    assert counts.min() > 12_000


# ---------------------------------------------------------------------------------------------- rows


def sum_rows(places: object, grads: np.ndarray, count: int) -> np.ndarray:
    total = np.zeros((count, grads.shape[1]), grads.dtype)
    rows.accumulate(rows.packed_ids(places), rows.packed(grads, grads.dtype), total)
    return total


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_share_a_place_are_added_in_order(dtype: str) -> None:
    random = np.random.default_rng(0)
    inverse, grads = random.integers(0, 50, 1000), random.normal(size=(1000, 3)).astype(dtype)
    expected = np.zeros((60, 3), dtype)
    for place, grad in zip(inverse, grads, strict=True):
        expected[place] += grad
    assert np.array_equal(sum_rows(inverse, grads, 60), expected)
    assert sum_rows(inverse[:0], grads[:0], 2).tolist() == [[0, 0, 0]] * 2


def test_arrays_that_are_read_only_strided_or_unaligned_are_taken() -> None:
    grads = np.frombuffer(b"x" + np.arange(8, dtype="float32").tobytes(), "float32", offset=1).reshape(4, 2)
    assert sum_rows([0, 1, 0, 1], grads, 2).tolist() == [[4, 6], [8, 10]]
    assert sum_rows(np.array([0, 9, 0, 9, 1, 9, 1])[::2], grads[::-1], 2).tolist() == [[10, 12], [2, 4]]


def test_gather_leaves_the_rows_of_negative_slots() -> None:
    matrix, slots = np.arange(40, dtype="float64").reshape(20, 2), np.array([3, -1, 19, 0, *range(12)])
    out = np.full((slots.size, 2), -5.0)
    rows.gather(matrix, slots, out)
    assert np.array_equal(out, np.where(slots[:, None] < 0, -5.0, matrix[slots]))
    rows.scatter(matrix, np.array([4, 2]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert matrix[[2, 4]].tolist() == [[3, 4], [1, 2]]


# ---------------------------------------------------------------------------------------------- initial values


def initial(kind: int, a: float, b: float, ids: Any, dim: int, dtype: str = "float64", seed: int = 7) -> Any:
    out = np.empty((len(ids), dim), dtype)
    rows.initial_rows(kind, a, b, np.uint64(seed), rows.table_key("user"), np.asarray(ids), out)
    return out


GOLDEN = {
    (rows.UNIFORM, "float32"): ["-0x1.e362100000000p-2", "-0x1.7d1e500000000p-3", "0x1.e5e2840000000p-1"],
    (rows.UNIFORM, "float64"): ["-0x1.e3620aabc8dacp-2", "-0x1.7d1e4c94fdb68p-3", "0x1.e5e28757c98e8p-1"],
    (rows.NORMAL, "float32"): ["-0x1.5c6dfa0000000p+0", "0x1.cd2f120000000p-1", "0x1.1f651a0000000p-3"],
    (rows.NORMAL, "float64"): ["-0x1.5c6dfa768ae53p+0", "0x1.cd2f11a3d167ep-1", "0x1.1f651adba5ad1p-3"],
}


@pytest.mark.parametrize(("kind", "dtype"), GOLDEN)
def test_initial_values_are_fixed_for_ever(kind: int, dtype: str) -> None:
    values = initial(kind, -1.0 if kind == rows.UNIFORM else 0.0, 1.0, [0, INT64.min], 3, dtype)
    golden = np.array([float.fromhex(text) for text in GOLDEN[kind, dtype]], dtype)
    # Logarithm and cosine are the C library's, which may differ in the last bit between systems.
    np.testing.assert_allclose([*values[0, :2], values[1, 0]], golden, rtol=0 if kind == rows.UNIFORM else 1e-7)


def test_the_name_of_a_table_hashes_to_the_same_bits_for_ever() -> None:
    assert rows.table_key("user") == 7173623408806911919


@pytest.mark.slow
def test_in_another_process_the_first_call_imports_numba_and_initial_values_are_the_same() -> None:
    program = (
        "import sys, fleet.kernels, fleet.ps.table.table; assert 'numba' not in sys.modules;"
        "import numpy as np; from fleet.numeric import ids; out = np.empty((2, 5), 'float32');"
        "ids.initial_rows(ids.NORMAL, 0.0, 1.0, np.uint64(7), ids.table_key('user'), np.array([5, -5]), out);"
        "assert 'numba' in sys.modules; print(out.tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == initial(rows.NORMAL, 0, 1, [5, -5], 5, "float32").tobytes().hex()


@pytest.mark.parametrize("kind", [rows.UNIFORM, rows.NORMAL])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_initial_values_depend_on_id_and_column_alone(kind: int, dtype: str) -> None:
    ids = np.random.default_rng(0).permutation(1000)
    values = initial(kind, -1, 1, ids, 5, dtype)
    back = np.argsort(ids)
    assert np.array_equal(initial(kind, -1, 1, np.arange(1000), 5, dtype), values[back])
    assert np.array_equal(initial(kind, -1, 1, ids[:1], 3, dtype), values[:1, :3])
    assert not np.array_equal(initial(kind, -1, 1, ids, 5, dtype, seed=8), values)
    assert len(np.unique(values)) > 0.99 * values.size


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_initial_values_have_the_distribution_asked_for(dtype: str) -> None:
    ids = np.arange(50_000) * 4096 - 10_000  # regular ids must not show
    uniform = initial(rows.UNIFORM, -3, 1, ids, 4, dtype)
    assert uniform.min() >= -3
    assert uniform.max() < 1
    assert np.allclose(np.quantile(uniform, [0.1, 0.5, 0.9]), [-2.6, -1, 0.6], atol=0.02)
    normal = initial(rows.NORMAL, 2, 0.5, ids, 4, dtype)
    assert np.isfinite(normal).all()
    for column in normal.T:
        assert abs(column.mean() - 2) < 0.01
        assert abs(column.std() - 0.5) < 0.01
        assert np.allclose(np.quantile(column, [0.0228, 0.1587, 0.8413]), [1, 1.5, 2.5], atol=0.03)
    assert np.abs(np.corrcoef(normal.T) - np.eye(4)).max() < 0.02
    assert abs(np.corrcoef(normal[:-1, 0], normal[1:, 0])[0, 1]) < 0.02


def test_a_uniform_value_never_reaches_the_upper_end() -> None:
    high = float(np.nextafter(np.float32(1), np.float32(2)))
    values = initial(rows.UNIFORM, 1.0, high, np.arange(1000), 4, "float32")
    assert (values == 1).all()
    assert (initial(rows.UNIFORM, 3, 3, [1, 2], 2) == 3).all()
    assert (initial(rows.CONSTANT, 3, 0, [1, 2], 2) == 3).all()
    assert (initial(rows.NORMAL, 3, 0, [1, 2], 2) == 3).all()


# ---------------------------------------------------------------------------------------------- compilation


def _twice(values: Any) -> Any:
    return values + values


def test_first_calls_from_many_threads_compile_once() -> None:
    function: Compiled[..., Any] = compiled(_twice)
    start, results = threading.Barrier(8), []

    def call(kind: str) -> None:
        start.wait()
        results.append(function(np.ones(3, kind)).tolist())

    threads = [threading.Thread(target=call, args=(kind,)) for kind in ["float32", "float64"] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[2, 2, 2]] * 8
    assert len(function.native().signatures) == 2  # type: ignore[attr-defined]


#: The first call of a compiled function, which is interrupted where numba imports one of its parts.
INTERRUPTED = """
import json, signal, sys, threading
import numpy as np
from fleet.numeric.ids import unique

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {part!r} and self in sys.meta_path:
            sys.meta_path.remove(self)
            {interrupt}

sys.meta_path.insert(0, Interrupting())
told = []
for _ in range(2):
    try:
        told.append(unique(np.array([3, 1, 3]))[0].tolist())
    except BaseException as error:
        told.append(repr(error))
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    "interrupt",
    ["signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)", "raise KeyboardInterrupt"],
    ids=["the wait", "the import"],
)
@pytest.mark.slow
def test_an_interrupted_first_call_spoils_none_that_follows(interrupt: str) -> None:
    told = fresh_python(INTERRUPTED.format(part="numba.core.registry", interrupt=interrupt))
    assert told == ["KeyboardInterrupt()", [3, 1]]


def test_what_compiles_comes_to_its_end_though_its_caller_is_interrupted() -> None:
    interrupted, done = threading.Event(), threading.Event()

    def compile_for() -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(PATIENCE_S)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        jit._compiling(compile_for)()
    interrupted.set()
    assert done.wait(PATIENCE_S)


def test_without_a_directory_to_keep_it_in_a_function_is_compiled_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    njit = numba.njit

    def refusing(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function '_twice': no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", refusing)
    assert compiled(_twice)(np.ones(2)).tolist() == [2, 2]
