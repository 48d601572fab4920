"""Blocks that an optimizer updates as one end where each by itself would, to the bit, and so do those that part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_parity_dense import OPTIMIZERS

from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.entries import VALUE, split
from fleet.kernels import RULES
from fleet.numeric.tensors import WireTensor
from fleet.optim import Ftrl, Lamb
from fleet.plan.layout import dense_layout
from fleet.plan.plan import Plan, make_plan
from fleet.plan.specs import GroupSpec, JobSpec, ParamSpec, PlanSettings
from fleet.ps.table.dense_blocks import DenseBlocks, Gradient
from fleet.ps.table.runs import LONGEST, joined

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Shapes = Sequence[tuple[int, ...]]
State = tuple[dict[str, Any], set[str]]

MAKES: dict[str, Make] = {
    **OPTIMIZERS,
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "ftrl": lambda p: Ftrl(p, lr=0.1, lr_power=-0.3),
    "decayed-adagrad": lambda p: RULES["DecayedAdagrad"].optimizer(p, lr=0.1),
    "lamb": lambda p: Lamb(p, lr=0.1),
}

#: Around the lengths of torch's vector loops, whose last elements go another way; without elements; without dimensions.
SHAPES: Shapes = [*((n,) for n in (1, 2, 3, 7, 8, 9, 15, 16, 17, 0, 31, 33, 65, 257)), (), (5, 7), (0, 3), (101,)]


def options_of(make: Make) -> dict[str, Any]:
    return dict(make([torch.nn.Parameter(torch.zeros(1))]).defaults)


def plan_of(
    make: Make, shapes: Shapes, dtypes: Sequence[str] = ("float32",), servers: int = 1, groups: int = 1
) -> Plan:
    """Parameters of changing element type, and of as many groups, one after the other."""
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    rule = RULES[type(optimizer).__name__]
    group = GroupSpec(rule.name, 0, tuple(sorted(optimizer.defaults)), rule.sliceable)
    params = tuple(
        ParamSpec(f"p{index}", shape, dtypes[index % len(dtypes)], index * groups // len(shapes))
        for index, shape in enumerate(shapes)
    )
    return make_plan(JobSpec(params, (), (group,) * groups, PlanSettings(servers, 2, min_block_size=20)))


class Pair:
    """One server's blocks, and torch with an optimizer for each of them."""

    def __init__(self, make: Make, shapes: Shapes = SHAPES, **chosen: Any) -> None:
        self.make, self.options = make, [options_of(make)] * chosen.get("groups", 1)
        self.plan = plan_of(make, shapes, **chosen)
        self.shard = DenseBlocks(self.plan, 0, self.options)
        self.random = torch.Generator().manual_seed(4)
        self.params: list[torch.nn.Parameter] = []
        self.torch: list[torch.optim.Optimizer] = []
        self._begin()

    def grow(self, *shapes: tuple[int, ...]) -> None:
        spec = self.plan.spec
        more = tuple(ParamSpec(f"more{index}", shape, "float32", 0) for index, shape in enumerate(shapes))
        self.plan = make_plan(replace(spec, params=spec.params + more))
        self.shard.adopt(self.plan, self.options)
        self._begin()

    def _begin(self) -> None:
        for position, spec in list(enumerate(self.plan.spec.params))[len(self.params) :]:
            param = torch.nn.Parameter(self._draw(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))))
            self.params.append(param)
            self.torch.append(self.make([param]))
            self.shard.write(position, param.detach())

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.random).to(like.dtype)

    def step(self, *absent: set[int]) -> None:
        """A round of one worker for each of ``absent``, the blocks it has no gradient for."""
        gradients: list[Gradient] = []
        total: dict[int, torch.Tensor] = {}
        for missing in absent:
            present = bytes(position not in missing for position in range(len(self.params)))
            layout = self.shard.layout_of(present)
            flat = {name: torch.empty(size, dtype=getattr(torch, name)) for name, size in layout.sizes.items()}
            for slot in layout.slots:
                grad = self._draw(self.params[slot.position])
                flat[slot.dtype][slot.start : slot.stop] = grad.view(-1)
                total[slot.position] = total[slot.position] + grad if slot.position in total else grad
            gradients.append((present, flat))
        self.shard.apply(gradients, len(absent), self.options)
        for position, (param, optimizer) in enumerate(zip(self.params, self.torch, strict=True)):
            param.grad = total[position] / len(absent) if position in total else None
            optimizer.step()

    def assert_equal(self) -> None:
        """In values and state, as a checkpoint has them."""
        for name, (got, flat) in contents(self.plan, self.shard).items():
            index = [spec.name for spec in self.plan.spec.params].index(name)
            param, optimizer = self.params[index], self.torch[index]
            expected = {"value": param.detach(), **{f"state.{k}": v for k, v in optimizer.state[param].items()}}
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert (key in flat) == (value.shape == param.shape)
                    assert torch.equal(got[key].reshape(value.shape), value), (name, key)
                else:
                    assert got[key] == value


def contents(plan: Plan, *shards: DenseBlocks) -> dict[str, State]:
    """What a checkpoint of these servers says of every parameter."""
    assembly = Assembly({spec.name: spec.numel for spec in plan.spec.params}, "here")
    for shard in shards:
        for slot in shard.layout.slots:
            assembly.add(*split(shard.export(slot.position)))
    return {spec.name: assembly.whole(spec.name) for spec in plan.spec.params}


def restored(plan: Plan, found: Mapping[str, State], options: Sequence[Mapping[str, Any]]) -> list[DenseBlocks]:
    """New servers with these contents."""
    shards = [DenseBlocks(plan, server, options) for server in range(plan.spec.settings.server_num)]
    for shard in shards:
        states = []
        for slot in shard.layout.slots:
            block = slot.block
            whole, flat = found[plan.param_of(block).name]
            here = slice(block.offset, block.offset + block.numel)
            mine = {key: value[here] if key in flat else value for key, value in whole.items()}
            shard.write(slot.position, mine.pop(VALUE))
            states.append((mine, flat))
        shard.restore(states)
    return shards


def assert_same(one: Mapping[str, State], other: Mapping[str, State]) -> None:
    assert one.keys() == other.keys()
    for name, (mine, flat) in one.items():
        theirs, also_flat = other[name]
        assert flat == also_flat
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]


def sizes(shard: DenseBlocks) -> list[int]:
    """Of the parameters that optimizers go through."""
    optimizers = shard._optimizers.values()
    return [p.numel() for o in optimizers for group in o.param_groups for p in group["params"]]


# ---------------------------------------------------------------------------------------------- what is joined


def ends(plan: Plan, options: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [[slot.position for slot in run] for run in joined(plan, dense_layout(plan, 0).slots, options)]


def test_neighbours_are_joined() -> None:
    make = MAKES["adam"]
    assert ends(plan_of(make, [(2,), (3, 4), (0,), (5,)]), [options_of(make)]) == [[0, 1, 2, 3]]


def test_a_param_group_ends_a_run() -> None:
    make = MAKES["adam"]
    assert ends(plan_of(make, [(2,)] * 4, groups=2), [options_of(make)] * 2) == [[0, 1], [2, 3]]


def test_a_parameter_without_dimensions_stays_alone() -> None:
    make = MAKES["adam"]
    assert ends(plan_of(make, [(2,), (3,), (), (5,), (6,)]), [options_of(make)]) == [[0, 1], [2], [3, 4]]


def test_a_run_is_no_longer_than_pays() -> None:
    make, half = MAKES["adam"], (LONGEST // 2,)
    assert ends(plan_of(make, [half, half, (1,), half, (LONGEST + 1,), (1,)]), [options_of(make)]) == [
        [0, 1],
        [2, 3],
        [4],
        [5],
    ]


@pytest.mark.parametrize("name", ["ftrl", "lamb", "sgd-fused", "adam-fused"])
def test_what_depends_on_where_a_tensor_ends_is_not_joined(name: str) -> None:
    assert ends(plan_of(MAKES[name], [(2,), (3,)]), [options_of(MAKES[name])]) == [[0], [1]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_not_joined(dtype: str) -> None:
    make = MAKES["sgd"]
    assert ends(plan_of(make, [(2,), (3,)], [dtype]), [options_of(make)]) == [[0], [1]]


# ---------------------------------------------------------------------------------------------- updates


def test_every_rule_whose_blocks_are_joined_is_tried_here() -> None:
    tried = {type(make([torch.nn.Parameter(torch.zeros(1))])).__name__ for make in MAKES.values()}
    assert {name for name, rule in RULES.items() if rule.dense and rule.joinable} <= tried


@pytest.mark.parametrize("dtypes", [("float32",), ("float64",), ("float32", "float64")], ids="-".join)
@pytest.mark.parametrize("name", MAKES)
def test_joined_blocks_end_where_each_by_itself_does(name: str, dtypes: Sequence[str]) -> None:
    pair = Pair(MAKES[name], dtypes=dtypes)
    for _ in range(8):
        pair.step(set())
    pair.assert_equal()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_precision_ends_where_each_block_by_itself_does(name: str) -> None:
    pair = Pair(MAKES[name], dtypes=("float16", "float32", "bfloat16"))
    for _ in range(8):
        pair.step(set())
    pair.assert_equal()


@pytest.mark.parametrize("name", MAKES)
def test_blocks_without_a_gradient_now_and_then_are_left_alone(name: str) -> None:
    pair = Pair(MAKES[name], groups=2, dtypes=("float32", "float64"))
    every = set(range(len(SHAPES)))
    for absent in (set(), {1, 4, 14}, every - {2, 3}, every, set(), {16}, set(range(9, 17)), set()):
        pair.step(absent)
        pair.assert_equal()


@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adagrad", "asgd"])
def test_workers_with_different_blocks(name: str) -> None:
    pair = Pair(MAKES[name], dtypes=("float32", "float64"))
    for absent in ([set(), set()], [{1, 5}, {1, 6}, {1}], [{0, 2, 4}, {1, 3, 5}], [set(range(18)), {7}], [set()]):
        pair.step(*absent)
        pair.assert_equal()


def test_a_run_is_split_only_where_its_blocks_part() -> None:
    pair = Pair(MAKES["adam"], [(1,), (2,), (3,), (4,), (5,)])
    pair.step(set())
    pair.step(set(range(5)))
    assert sizes(pair.shard) == [15]
    pair.step({2, 3})
    assert sizes(pair.shard) == [3, 7, 5]
    pair.step(set())
    pair.step({2, 3})
    assert sizes(pair.shard) == [3, 7, 5]
    steps = [int(state["state.step"]) for state, _ in contents(pair.plan, pair.shard).values()]
    assert steps == [4, 4, 2, 2, 4]
    pair.assert_equal()


def test_workers_that_complete_each_other_split_nothing() -> None:
    pair = Pair(MAKES["adam"], [(1,), (2,), (3,)])
    pair.step({0}, {1, 2})
    assert sizes(pair.shard) == [6]
    pair.assert_equal()


@pytest.mark.parametrize("name", ["sgd-momentum", "adam-amsgrad", "adagrad", "asgd"])
def test_blocks_absent_from_the_first_step_on(name: str) -> None:
    pair = Pair(MAKES[name])
    for _ in range(3):
        pair.step({0, 5, 6, 17})
    pair.assert_equal()
    pair.step(set())
    pair.assert_equal()


@pytest.mark.parametrize("absent", [set(), {2, 3}], ids=["joined", "split"])
@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adagrad"])
def test_newcomers_form_runs_of_their_own(name: str, absent: set[int]) -> None:
    pair = Pair(MAKES[name], [(1,), (2,), (3,), (4,), (5,)])
    pair.step(absent)
    before = sizes(pair.shard)
    pair.grow((6,), (7, 2))
    assert sizes(pair.shard) == [*before, 20]
    pair.step(set())
    pair.assert_equal()
    pair.step({0, 5})
    pair.assert_equal()


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("absent", [set(), {2, 3, 15}], ids=["joined", "split"])
@pytest.mark.parametrize("name", ["sgd-momentum", "adam-amsgrad", "adagrad", "asgd", "nadam", "lamb"])
def test_a_checkpoint_gives_each_block_its_state(name: str, absent: set[int], servers: int) -> None:
    pair = Pair(MAKES[name])
    pair.step(set())
    pair.step(absent)
    found = contents(pair.plan, pair.shard)
    plan = plan_of(MAKES[name], SHAPES, servers=servers)
    shards = restored(plan, found, pair.options)
    assert_same(contents(plan, *shards), found)
    (pair.shard,) = restored(pair.plan, contents(plan, *shards), pair.options)
    pair.step(set())
    pair.step({7})
    pair.assert_equal()


def test_a_checkpoint_keeps_runs_whose_blocks_fared_alike() -> None:
    pair = Pair(MAKES["adam"], [(1,), (2,), (3,), (4,), (5,)])
    pair.step(set())
    (shard,) = restored(pair.plan, contents(pair.plan, pair.shard), pair.options)
    assert sizes(shard) == [15]
    pair.step({2, 3})
    (shard,) = restored(pair.plan, contents(pair.plan, pair.shard), pair.options)
    assert sizes(shard) == [3, 7, 5]


def test_a_checkpoint_with_state_for_some_blocks() -> None:
    pair = Pair(MAKES["adam"], [(1,), (2,), (3,), (4,)])
    pair.step({1})
    (pair.shard,) = restored(pair.plan, contents(pair.plan, pair.shard), pair.options)
    assert sizes(pair.shard) == [1, 2, 7]
    pair.assert_equal()
    pair.step(set())
    pair.assert_equal()


@pytest.mark.parametrize("change", ["step", "add", "write"])
def test_a_snapshot_stays_as_it_was(change: str) -> None:
    pair = Pair(MAKES["adam"], dtypes=("float32", "float64"))
    pair.step(set())
    held = pair.shard.snapshot()
    before = [flat.clone() for flat in held]
    part = held[0][1:3]  # a view holds it as well
    del held[0]
    if change == "step":
        pair.step(set())
        pair.step({3})
        pair.assert_equal()
    elif change == "add":
        present = bytes([1] * len(pair.params))
        pair.shard.add((present, {name: torch.ones(size) for name, size in pair.shard.layout.sizes.items()}))
    else:
        pair.shard.write(4, torch.full((8,), 9.0))
    assert torch.equal(part, before[0][1:3])
    assert all(map(torch.equal, held, before[1:]))
    assert not all(map(torch.equal, pair.shard.snapshot(), before))


def test_values_that_nobody_holds_any_more_change_where_they_are() -> None:
    pair = Pair(MAKES["sgd"])
    pair.step(set())
    sent = WireTensor.of(pair.shard.snapshot()[0])
    (where,) = [flat.data_ptr() for flat in pair.shard.snapshot()]
    assert sent.array.ctypes.data == where, "nothing was copied"
    buffers = sent.buffers
    del sent
    pair.step(set())
    assert [flat.data_ptr() for flat in pair.shard.snapshot()] != [where], "bytes that still have to leave"
    del buffers
    (where,) = [flat.data_ptr() for flat in pair.shard.snapshot()]
    pair.step(set())
    assert [flat.data_ptr() for flat in pair.shard.snapshot()] == [where]
    pair.assert_equal()
