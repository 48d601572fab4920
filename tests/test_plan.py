from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fleet.ps.wire
from fleet.errors import ConfigurationError, ProtocolError
from fleet.plan import plan
from fleet.plan.plan import Block, Plan, make_plan
from fleet.plan.specs import (
    DTYPES,
    INITIALIZERS,
    GroupSpec,
    Initializer,
    JobSpec,
    ParamSpec,
    PlanSettings,
    TableSpec,
    differences,
)
from fleet.transpiler import HashName, RoundRobin, slice_variable

SGD = GroupSpec("SGD", 0, ("lr", "momentum"))

UNTIMED = settings(deadline=None)


def params(*shapes: tuple[int, ...], dtype: str = "float32", group: int = 0) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(f"p{index}", shape, dtype, group) for index, shape in enumerate(shapes))


def job(*shapes: tuple[int, ...], server_num: int = 2, **chosen: Any) -> JobSpec:
    return JobSpec(params(*shapes), (), (SGD,), PlanSettings(server_num, 2, **chosen))


def sizes(made: Plan, param: int) -> list[int]:
    return [block.numel for block in made.blocks if block.param == param]


# --- Slicing: the source system's numbers -----------------------------------------------------------------------------

GOLDEN: list[tuple[tuple[int, ...], int, int, list[int]]] = [
    # shape, servers, min_block_size, sizes
    ((3, 5), 10, 1024, [15]),
    ((1024,), 10, 1024, [1024]),
    ((28, 784), 10, 1024, [2352] * 9 + [784]),
    ((8, 1020), 10, 1024, [2040] * 4),
    ((800, 10), 10, 1024, [1150] * 6 + [1100]),
    ((3, 5), 10, 8192, [15]),
    ((1024,), 10, 8192, [1024]),
    ((28, 784), 10, 8192, [10976] * 2),
    ((8, 1020), 10, 8192, [8160]),
    ((800, 10), 10, 8192, [8000]),
    ((6, 33, 33, 33), 10, 8192, [35937] * 6),
    ((1000, 1000), 2, 8192, [500000] * 2),
    ((1000, 1000), 3, 8192, [334000, 334000, 332000]),
    ((10000, 8), 2, 8192, [40000] * 2),
    ((10000, 8), 3, 8192, [26672, 26672, 26656]),
    ((100000, 128), 2, 8192, [6400000] * 2),
    ((100000, 128), 3, 8192, [4266752, 4266752, 4266496]),
    ((16385,), 2, 8192, [8193, 8192]),
    ((16385,), 3, 8192, [8193, 8192]),
    ((10, 9000), 2, 8192, [45000] * 2),
    ((10, 9000), 3, 8192, [36000, 36000, 18000]),
    ((10000, 1), 2, 8192, [10000]),
    ((10000, 1), 3, 8192, [10000]),
    ((1000,), 2, 8192, [1000]),
    ((13, 1), 3, 8192, [13]),
]


@pytest.mark.parametrize(("shape", "servers", "least", "expected"), GOLDEN)
def test_golden_sizes(shape: tuple[int, ...], servers: int, least: int, expected: list[int]) -> None:
    assert slice_variable([shape], servers, least) == [expected]
    made = make_plan(job(shape, server_num=servers, min_block_size=least))
    assert sizes(made, 0) == expected


def test_several_shapes_at_once() -> None:
    assert slice_variable([[28, 784], [800, 10], [1024]], 10, 1024) == [
        [2352] * 9 + [784],
        [1150] * 6 + [1100],
        [1024],
    ]
    assert slice_variable([], 10) == []
    assert slice_variable([(16385,)], 2) == [[8193, 8192]], "min_block_size is 8192 unless told"


def test_scalars_and_empty_parameters_are_one_block() -> None:
    assert slice_variable([(), (0,), (0, 5), (5, 0), (1,)], 4, 1) == [[1], [0], [0], [0], [1]]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([[4]], "2", 1), TypeError, "slice_count must be an int"),
        (([[4]], 2.0, 1), TypeError, "slice_count must be an int"),
        (([[4]], True, 1), TypeError, "slice_count must be an int"),
        (([[4]], 0, 1), ValueError, "slice_count is out of range"),
        (([[4]], -1, 1), ValueError, "slice_count is out of range"),
        (([[4]], 2, None), TypeError, "min_block_size must be an int"),
        (([[4]], 2, True), TypeError, "min_block_size must be an int"),
        (([[4]], 2, 0), ValueError, "min_block_size is out of range"),
        (([[4], [3, -1]], 2, 1), ValueError, r"shapes\[1\]\[1\] is out of range; expected at least 0; got -1"),
        (([[4], [3.0]], 2, 1), TypeError, r"shapes\[1\]\[0\] must be an int; got 3.0"),
        ((["ab"], 2, 1), TypeError, r"shapes\[0\]\[0\] must be an int"),
        (([[True]], 2, 1), TypeError, r"shapes\[0\]\[0\] must be an int"),
        (([4], 2, 1), TypeError, "not iterable"),
    ],
)
def test_bad_arguments_of_slice_variable(arguments: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        slice_variable(*arguments)


def rule(shape: tuple[int, ...], n: int, min_block_size: int) -> list[int]:
    """The rule as the documents say it, word for word."""
    numel = 1
    for size in shape:
        numel *= size
    k = max(1, numel // min_block_size)
    split = min(n, k)
    block = math.ceil(numel / split)
    if len(shape) >= 2:
        width = 1
        for size in shape[1:]:
            width *= size
        while block % width:
            block += 1
    split = math.ceil(numel / block)
    return [min(block, numel - i * block) for i in range(split)]


SHAPES = st.lists(st.integers(1, 60), max_size=4).map(tuple)


@UNTIMED
@given(shape=SHAPES, n=st.integers(1, 40), least=st.integers(1, 20000))
def test_slicing_follows_the_rule(shape: tuple[int, ...], n: int, least: int) -> None:
    (found,) = slice_variable([shape], n, least)
    assert found == rule(shape, n, least)
    assert sum(found) == math.prod(shape)
    assert 1 <= len(found) <= n
    assert min(found) > 0
    assert len(set(found[:-1])) <= 1, "only the last block may be smaller"
    assert found[-1] <= found[0]
    assert len(found) == 1 or found[0] >= least
    if len(shape) >= 2:
        assert all(size % math.prod(shape[1:]) == 0 for size in found)


# --- Placement --------------------------------------------------------------------------------------------------------


def test_the_source_systems_own_placement() -> None:
    spec = JobSpec(
        (ParamSpec("fc_b", (1000,), "float32", 0), ParamSpec("fc_w", (1000, 1000), "float32", 0)),
        (),
        (SGD,),
        PlanSettings(2, 2),
    )
    made = make_plan(spec)
    assert [made.block_name(block) for block in made.blocks] == ["fc_b", "fc_w.block0", "fc_w.block1"]
    assert made.servers == (0, 1, 0)


def test_one_cursor_runs_over_all_blocks_of_all_parameters() -> None:
    made = make_plan(job((28, 784), (3, 5), (800, 10), (1024,), server_num=10, min_block_size=1024))
    assert [sizes(made, param) for param in range(4)] == [[2352] * 9 + [784], [15], [1150] * 6 + [1100], [1024]]
    assert made.servers == (*range(10), 0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert RoundRobin(3).dispatch(["b", "a", "a", "a", "c"]) == [0, 1, 2, 0, 1]
    assert RoundRobin(3).dispatch([]) == []


#: Written down, so that no release moves a parameter. That of "123456789" is the published check value of CRC-32.
CRC32 = {
    "123456789": 0xCBF43926,
    "fc_w": 0x86DAA7BE,
    "fc_b": 0xEB074355,
    "net.0.weight": 0x82E4DA8E,
    "größe": 0x5BD3A989,
}


def crc32(data: bytes) -> int:
    """CRC-32 as its definition has it."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0xEDB88320 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


@pytest.mark.parametrize("name", CRC32)
def test_golden_hashes(name: str) -> None:
    assert crc32(name.encode()) == CRC32[name]
    for server_num in (1, 2, 3, 7, 20):
        assert HashName(server_num).dispatch([name]) == [CRC32[name] % server_num]


def test_blocks_hash_by_their_own_names() -> None:
    """Those of a parameter that is cut spread over the servers; a whole one goes by its own name."""
    made = make_plan(job((1000, 1000), (10, 9000), (13, 1), server_num=3, split_method="HashName"))
    names = [f"p{param}.block{index}" for param in (0, 1) for index in range(3)] + ["p2"]
    assert [made.block_name(block) for block in made.blocks] == names
    assert list(made.servers) == [crc32(name.encode()) % 3 for name in names]
    large = make_plan(job((10000, 100), server_num=8, split_method="HashName", min_block_size=1))
    assert len(set(large.servers)) > 3


def test_the_placement_stands_for_cuts_and_servers_alone() -> None:
    """They are what a server that goes on has to find as it left them."""
    ours = make_plan(job((16385,), (3,)))
    assert make_plan(replace(job((16385,), (3,)), settings=PlanSettings(2, 7))).placement == ours.placement
    assert make_plan(job((16384,), (3,))).placement != ours.placement
    assert make_plan(job((16385,), (3,), split_method="HashName")).placement != ours.placement


SCRIPT = """
from fleet.plan.plan import make_plan
from fleet.plan.specs import GroupSpec, JobSpec, ParamSpec, PlanSettings
params = tuple(ParamSpec(f"layer{i}.weight", (200 + i, 100), "float32", 0) for i in range(40))
made = make_plan(JobSpec(params, (), (GroupSpec("SGD", 0, ("lr",)),), PlanSettings(7, 3, split_method="HashName")))
print(made.fingerprint, *made.servers, hash("layer0.weight"))
"""


def test_placement_is_the_same_in_every_process() -> None:
    seen = set()
    hashes = set()
    for seed in ("0", "1", "4294967295"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        *placement, python_hash = done.stdout.split()
        seen.add(tuple(placement))
        hashes.add(python_hash)
    assert len(hashes) == 3, "the processes were meant to differ in Python's own hash"
    ((fingerprint, *servers),) = seen
    assert len(fingerprint) == 64
    owners = [index for index in range(40) for _ in slice_variable([(200 + index, 100)], 7)[0]]
    names = [f"layer{owner}.weight.block{place - owners.index(owner)}" for place, owner in enumerate(owners)]
    whole = {index for index in owners if owners.count(index) == 1}
    names = [name.partition(".block")[0] if owner in whole else name for owner, name in zip(owners, names, strict=True)]
    assert servers == [str(crc32(name.encode()) % 7) for name in names]


# --- The plan ---------------------------------------------------------------------------------------------------------


def test_without_slicing_every_parameter_stays_whole() -> None:
    made = make_plan(job((1000, 1000), (16385,), (3,), slice_var_up=False))
    assert made.blocks == (Block(0, 0, 0, 1000000), Block(1, 0, 0, 16385), Block(2, 0, 0, 3))
    assert made.servers == (0, 1, 0)
    assert made.block_name(made.blocks[0]) == "p0"


def test_a_group_that_cannot_be_sliced_stays_whole() -> None:
    whole = GroupSpec("Adafactor", 1, ("lr",), sliceable=False)
    spec = JobSpec(
        (ParamSpec("a", (1000, 1000), "float32", 0), ParamSpec("b", (1000, 1000), "float32", 1)),
        (),
        (SGD, whole),
        PlanSettings(2, 2),
    )
    made = make_plan(spec)
    assert sizes(made, 0) == [500000, 500000]
    assert sizes(made, 1) == [1000000]


def test_a_server_may_be_idle() -> None:
    made = make_plan(job((4, 4), (4,), server_num=5))
    assert made.servers == (0, 1)
    assert made.by_server == ((Block(0, 0, 0, 16),), (Block(1, 0, 0, 4),), (), (), ())
    assert [made.dense_bytes(server) for server in range(5)] == [64, 16, 0, 0, 0]


def test_a_job_without_dense_parameters() -> None:
    made = make_plan(job(server_num=3))
    assert (made.blocks, made.servers, made.by_server) == ((), (), ((), (), ()))


@pytest.mark.parametrize("split_method", ["RoundRobin", "HashName"])
def test_an_empty_parameter_is_one_empty_block(split_method: str) -> None:
    made = make_plan(job((0, 5), (2,), server_num=2, split_method=split_method))
    assert made.blocks == (Block(0, 0, 0, 0), Block(1, 0, 0, 2))
    assert made.block_name(made.blocks[0]) == "p0"
    assert sum(made.dense_bytes(server) for server in range(2)) == 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_server_holds_is_counted_in_bytes(dtype: str) -> None:
    spec = replace(job(), params=params((16385,), (3,), dtype=dtype))
    assert [make_plan(spec).dense_bytes(server) for server in (0, 1)] == [8196 * DTYPES[dtype], 8192 * DTYPES[dtype]]
    assert DTYPES[dtype] == {"float64": 8, "float32": 4}.get(dtype, 2)


def test_the_plan_as_text() -> None:
    made = make_plan(replace(job((16385,), (3,)), tables=(table("emb", dim=8),)))
    assert [line.split() for line in made.table().splitlines()] == [
        ["parameter", "block", "server", "elements"],
        ["p0", "0", "0", "8193"],
        ["p0", "1", "1", "8192"],
        ["p1", "0", "0", "3"],
        ["emb", "rows", "by", "id", "?", "x", "8"],
    ]


def table(name: str = "t", **changes: Any) -> TableSpec:
    return replace(TableSpec(name, 4, "float32", 0, None, Initializer("normal", 0.0, 0.01)), **changes)


BOOLS = st.booleans()
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
FINITE = st.floats(-1e6, 1e6)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Any job that is possible."""
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    cut = draw(st.integers(0, len(names)))
    groups = draw(
        st.lists(
            st.builds(
                GroupSpec,
                st.sampled_from(["SGD", "Adam"]),
                st.integers(0, 3),
                st.lists(NAMES, max_size=3).map(tuple),
                st.booleans(),
            ),
            min_size=1,
            max_size=3,
        )
    )
    group = st.integers(0, len(groups) - 1)
    shape = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    initializer = st.builds(Initializer, st.sampled_from(sorted(INITIALIZERS)), FINITE, FINITE)
    limit = st.none() | st.integers(0, 2**63 - 1)
    return JobSpec(
        tuple(ParamSpec(name, draw(shape), draw(st.sampled_from(sorted(DTYPES))), draw(group)) for name in names[:cut]),
        tuple(
            TableSpec(
                name, draw(st.integers(1, 64)), "float64", draw(group), draw(limit), draw(initializer), draw(BOOLS)
            )
            for name in names[cut:]
        ),
        tuple(groups),
        PlanSettings(
            draw(st.integers(1, 9)),
            draw(st.integers(1, 9)),
            draw(NAMES),
            draw(BOOLS),
            draw(st.sampled_from(["RoundRobin", "HashName"])),
            draw(st.integers(1, 10000)),
        ),
    )


@UNTIMED
@given(specs())
def test_every_element_of_every_parameter_has_one_place(spec: JobSpec) -> None:
    made = make_plan(spec)
    assert len(made.blocks) == len(made.servers)
    assert all(0 <= server < spec.settings.server_num for server in made.servers)
    assert [block.param for block in made.blocks] == sorted(block.param for block in made.blocks)
    for index, param in enumerate(spec.params):
        mine = [block for block in made.blocks if block.param == index]
        assert [block.index for block in mine] == list(range(len(mine)))
        assert [block.offset for block in mine] == [sum(b.numel for b in mine[:place]) for place in range(len(mine))]
        assert sum(block.numel for block in mine) == param.numel
        assert all(made.param_of(block) is param for block in mine)
    gathered = [(block, server) for server, blocks in enumerate(made.by_server) for block in blocks]
    pairs = zip(made.blocks, made.servers, strict=True)
    assert sorted(gathered, key=repr) == sorted(pairs, key=repr)


def test_a_large_job_is_planned_within_a_second() -> None:
    shapes = [((1000 + index % 7, 1000), (1000,), (64, 32, 3, 3), (512, 1024))[index % 4] for index in range(2000)]
    spec = JobSpec(params(*shapes), (), (SGD,), PlanSettings(20, 50))
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        made = make_plan(spec)
        filled = sum(bool(blocks) for blocks in made.by_server)
        taken.append(time.perf_counter() - begin)
    assert filled == 20
    assert len(made.blocks) > 20000
    assert min(taken) < 1.0


# --- The fingerprint --------------------------------------------------------------------------------------------------

BASE = JobSpec(
    (ParamSpec("w", (300, 100), "float32", 0), ParamSpec("b", (100,), "float32", 0)),
    (table("t"),),
    (SGD, GroupSpec("Adam", 1, ("betas", "lr"))),
    PlanSettings(2, 3),
)


def with_param(**changes: Any) -> JobSpec:
    return replace(BASE, params=(replace(BASE.params[0], **changes), BASE.params[1]))


def with_group(**changes: Any) -> JobSpec:
    return replace(BASE, groups=(replace(SGD, **changes), BASE.groups[1]))


def with_table(**changes: Any) -> JobSpec:
    return replace(BASE, tables=(table("t", **changes),))


def with_settings(**changes: Any) -> JobSpec:
    return replace(BASE, settings=replace(BASE.settings, **changes))


#: Every way to differ from BASE, with words that its difference is told in.
CHANGED: list[tuple[JobSpec, str]] = [
    (with_param(name="v"), "parameter 'w' is only in the job's model"),
    (with_param(shape=(100, 300)), "parameter 'w': shape (300, 100) in the job, (100, 300) in the newcomer's"),
    (with_param(shape=(30000,)), "parameter 'w': shape (300, 100) in the job, (30000,) in the newcomer's"),
    (with_param(shape=()), "parameter 'w': shape (300, 100) in the job, () in the newcomer's"),
    (with_param(dtype="float64"), "parameter 'w': dtype 'float32' in the job, 'float64' in the newcomer's"),
    (with_param(group=1), "parameter 'w': group 0 in the job, 1 in the newcomer's"),
    (replace(BASE, params=BASE.params[:1]), "parameter 'b' is only in the job's model"),
    (replace(BASE, params=(*BASE.params, *params((2,)))), "parameter 'p0' is only in the newcomer's model"),
    (replace(BASE, params=BASE.params[::-1]), "parameters come in another order"),
    (replace(BASE, tables=()), "table 't' is only in the job's model"),
    (with_table(dim=8), "table 't': dim 4 in the job, 8 in the newcomer's"),
    (with_table(dtype="float64"), "table 't': dtype 'float32' in the job, 'float64' in the newcomer's"),
    (with_table(group=1), "table 't': group 0 in the job, 1 in the newcomer's"),
    (with_table(num_embeddings=5), "table 't': num_embeddings None in the job, 5 in the newcomer's"),
    (with_table(uploaded=True), "table 't': uploaded False in the job, True in the newcomer's"),
    (with_table(initializer=Initializer("zeros")), "table 't': initializer {'kind': 'normal', 'a': 0.0, 'b': 0.01}"),
    (with_group(rule="Adam"), "param group 0: rule 'SGD' in the job, 'Adam' in the newcomer's"),
    (with_group(optimizer=1), "param group 0: optimizer 0 in the job, 1 in the newcomer's"),
    (with_group(options=("lr",)), "param group 0: options ('lr', 'momentum') in the job, ('lr',) in the newcomer's"),
    (with_group(sliceable=False), "param group 0: sliceable True in the job, False in the newcomer's"),
    (replace(BASE, groups=(SGD,)), "2 param groups in the job, 1 in the newcomer's"),
    (with_settings(server_num=3), "settings: server_num 2 in the job, 3 in the newcomer's"),
    (with_settings(worker_num=4), "settings: worker_num 3 in the job, 4 in the newcomer's"),
    (with_settings(mode="async"), "settings: mode 'sync' in the job, 'async' in the newcomer's"),
    (with_settings(slice_var_up=False), "settings: slice_var_up True in the job, False in the newcomer's"),
    (with_settings(split_method="HashName"), "settings: split_method 'RoundRobin' in the job, 'HashName' in the newc"),
    (with_settings(min_block_size=1), "settings: min_block_size 8192 in the job, 1 in the newcomer's"),
]


def test_equal_specs_have_equal_fingerprints() -> None:
    again = JobSpec.from_json(BASE.to_json())
    assert make_plan(again) == make_plan(BASE)
    assert make_plan(again).fingerprint == make_plan(BASE).fingerprint


def test_no_two_of_these_specs_share_a_fingerprint() -> None:
    fingerprints = {make_plan(spec).fingerprint for spec in [BASE, *(spec for spec, _ in CHANGED)]}
    assert len(fingerprints) == len(CHANGED) + 1


def test_the_fingerprint_covers_where_the_cuts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two releases that cut differently must not take each other for equal, though the spec is the same."""
    ours = make_plan(BASE)

    def other(shape: tuple[int, ...], slice_count: int, min_block_size: int) -> list[int]:
        first, *rest = rule(shape, slice_count, min_block_size)
        return [first - 100, *rest[:-1], rest[-1] + 100] if rest else [first]

    monkeypatch.setattr(plan, "block_sizes", other)
    theirs = make_plan(BASE)
    assert theirs.servers == ours.servers
    assert theirs.blocks != ours.blocks
    assert theirs.fingerprint != ours.fingerprint


def test_the_fingerprint_covers_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_plan(BASE)
    monkeypatch.setattr(plan, "PROTOCOL", plan.PROTOCOL - 1)
    theirs = make_plan(BASE)
    assert theirs.fingerprint != ours.fingerprint
    assert theirs.placement == ours.placement


def test_other_messages_are_another_protocol() -> None:
    """Only by its number do processes of releases that speak differently part at the hello. Whoever changes messages
    raises it, and writes both down here."""
    text = Path(fleet.ps.wire.__path__[0], "fleet.proto").read_text()
    said = " ".join(re.sub("//.*", "", text).split())  # comments and layout do not travel
    assert {plan.PROTOCOL: hashlib.sha256(said.encode()).hexdigest()[:16]} == {5: "6db86ebdf6c5782b"}


def test_the_fingerprint_covers_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_plan(BASE)
    monkeypatch.setattr(RoundRobin, "dispatch", lambda self, owners: [0] * len(owners))
    assert make_plan(BASE).fingerprint != ours.fingerprint


# --- Differences in words ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "words"), CHANGED, ids=[words[:60] for _, words in CHANGED])
def test_a_difference_is_told_in_words(other: JobSpec, words: str) -> None:
    told = differences(BASE, other)
    assert any(words in one for one in told), told
    assert differences(other, BASE)


def test_all_differences_are_told_at_once() -> None:
    other = replace(with_param(shape=(1,), dtype="float64"), tables=(), settings=PlanSettings(2, 4))
    assert differences(BASE, other) == [
        "parameter 'w': shape (300, 100) in the job, (1,) in the newcomer's, "
        "dtype 'float32' in the job, 'float64' in the newcomer's",
        "table 't' is only in the job's model",
        "settings: worker_num 3 in the job, 4 in the newcomer's",
    ]


@UNTIMED
@given(specs(), specs())
def test_no_difference_means_equal(one: JobSpec, other: JobSpec) -> None:
    assert differences(one, one) == []
    assert bool(differences(one, other)) == (one != other)


# --- JSON -------------------------------------------------------------------------------------------------------------


@UNTIMED
@given(specs())
def test_a_spec_survives_the_journey(spec: JobSpec) -> None:
    text = spec.to_json()
    back = JobSpec.from_json(text)
    assert back == spec
    assert back.to_json() == text
    assert make_plan(back).fingerprint == make_plan(spec).fingerprint


HUGE = 10**30

#: A path in the JSON of BASE, what is put there, and words of the refusal.
IMPOSSIBLE: list[tuple[tuple[str | int, ...], Any, str]] = [
    # The whole
    ((), None, "cannot be read"),
    ((), [], "wrong fields|cannot be read"),
    ((), 5, "cannot be read"),
    ((), "text", "cannot be read"),
    ((), {}, "wrong fields|cannot be read"),
    (("extra",), 1, r"a JobSpec has the wrong fields; .*\. Another version .* install the same one"),
    (("params",), None, "a list is missing"),
    (("params",), {}, "a list is missing"),
    (("tables",), "", "a list is missing"),
    (("groups",), 3, "a list is missing"),
    (("settings",), None, "cannot be read"),
    (("settings",), [], "a PlanSettings has the wrong fields"),
    (("params", 0), None, "cannot be read"),
    (("params", 0), [], "cannot be read"),
    (("params", 0), {"shape": [1]}, "a ParamSpec has the wrong fields"),
    (("tables", 0, "initializer"), {"a": 1.0}, "a Initializer has the wrong fields"),
    # Wrong fields
    (("params", 0, "colour"), "red", "a ParamSpec has the wrong fields"),
    (("tables", 0, "colour"), "red", "a TableSpec has the wrong fields"),
    (("groups", 0, "colour"), "red", "a GroupSpec has the wrong fields"),
    (("settings", "colour"), "red", "a PlanSettings has the wrong fields"),
    # Wrong types
    (("params", 0, "name"), 5, "name of a ParamSpec has the wrong type"),
    (("params", 0, "name"), [], "name of a ParamSpec has the wrong type"),
    (("params", 0, "name"), None, "name of a ParamSpec has the wrong type"),
    (("params", 0, "shape"), "34", "a list is missing"),
    (("params", 0, "shape"), {"3": 4}, "a list is missing"),
    (("params", 0, "shape"), [3.0], "shape of a ParamSpec has the wrong type"),
    (("params", 0, "shape"), [True], "shape of a ParamSpec has the wrong type"),
    (("params", 0, "shape"), [[3]], "shape of a ParamSpec has the wrong type"),
    (("params", 0, "dtype"), [], "dtype of a ParamSpec has the wrong type"),
    (("params", 0, "group"), "0", "group of a ParamSpec has the wrong type"),
    (("params", 0, "group"), False, "group of a ParamSpec has the wrong type"),
    (("tables", 0, "dim"), 4.0, "dim of a TableSpec has the wrong type"),
    (("tables", 0, "uploaded"), 0, "uploaded of a TableSpec has the wrong type"),
    (("tables", 0, "num_embeddings"), "5", "num_embeddings of a TableSpec has the wrong type"),
    (("tables", 0, "initializer", "kind"), [], "kind of a Initializer has the wrong type"),
    (("tables", 0, "initializer", "a"), "0", "a of a Initializer has the wrong type"),
    (("groups", 0, "rule"), 7, "rule of a GroupSpec has the wrong type"),
    (("groups", 0, "optimizer"), "0", "optimizer of a GroupSpec has the wrong type"),
    (("groups", 0, "options"), "lr", "a list is missing"),
    (("groups", 0, "options"), [1], "options of a GroupSpec has the wrong type"),
    (("groups", 0, "sliceable"), "no", "sliceable of a GroupSpec has the wrong type"),
    (("settings", "server_num"), "2", "server_num of a PlanSettings has the wrong type"),
    (("settings", "worker_num"), 2.5, "worker_num of a PlanSettings has the wrong type"),
    (("settings", "worker_num"), True, "worker_num of a PlanSettings has the wrong type"),
    (("settings", "mode"), [], "mode of a PlanSettings has the wrong type"),
    (("settings", "slice_var_up"), "no", "slice_var_up of a PlanSettings has the wrong type"),
    (("settings", "split_method"), [], "split_method of a PlanSettings has the wrong type"),
    # Impossible values
    (("params", 0, "shape"), [3, -4], "negative"),
    (("params", 0, "group"), -1, "negative"),
    (("params", 0, "group"), 2, "a group is out of range"),
    (("params", 0, "dtype"), "int8", "an element type is unknown"),
    (("params", 0, "name"), "\ud800", "a name is not text"),
    (("tables", 0, "group"), 2, "a group is out of range"),
    (("tables", 0, "dim"), -4, "negative"),
    (("tables", 0, "dim"), 0, "no columns"),
    (("tables", 0, "dtype"), "float16", "a table's element type is unknown"),
    (("tables", 0, "num_embeddings"), -1, "negative"),
    (("tables", 0, "initializer", "kind"), "magic", "an initializer is unknown"),
    (("tables", 0, "initializer", "a"), math.nan, "an initializer is unknown or not finite"),
    (("tables", 0, "initializer", "b"), math.inf, "an initializer is unknown or not finite"),
    (("groups", 0, "optimizer"), -1, "negative"),
    (("groups",), [], "a group is out of range"),
    (("settings", "server_num"), 0, "no server or no worker"),
    (("settings", "worker_num"), 0, "no server or no worker"),
    (("settings", "worker_num"), -3, "no server or no worker"),
    (("settings", "min_block_size"), 0, "no server or no worker"),
    (("settings", "split_method"), "Random", "split_method is unknown"),
    # Two of a name
    (("params", 1, "name"), "w", "two parameters share a name"),
    (("tables", 0, "name"), "w", "two parameters share a name"),
    # Too large for any memory
    (("params", 0, "shape"), [1 << 24, (1 << 24) + 1], "larger than 2"),
    (("params", 0, "shape"), [HUGE, HUGE], "larger than 2"),
    (("tables", 0, "dim"), HUGE, "more than 2.16 columns"),
    (("settings", "worker_num"), HUGE, "more than 2.16 processes"),
    (("settings", "server_num"), HUGE, "more than 2.16 processes"),
    (("params", 0, "shape"), [10**4000] * 100, "larger than 2"),
    (("params", 0, "shape"), [1] * 65, "larger than 2"),
    (("params", 0, "shape"), [0] * (1 << 20), "more than 2.20 values"),
]


def altered(path: tuple[str | int, ...], value: Any) -> str:
    raw = json.loads(BASE.to_json())
    if not path:
        return json.dumps(value)
    place = raw
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(raw)


@pytest.mark.parametrize(("path", "value", "match"), IMPOSSIBLE)
def test_garbage_is_refused(path: tuple[str | int, ...], value: Any, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        JobSpec.from_json(altered(path, value))


def test_the_garbage_differs_from_good_only_where_it_says() -> None:
    assert JobSpec.from_json(altered(("settings", "worker_num"), 3)) == BASE
    assert JobSpec.from_json(altered(("params", 0, "shape"), [1 << 24, 1 << 24])).params[0].numel == 1 << 48


@pytest.mark.parametrize(
    ("owner", "kind"),
    [
        (("params", 0), ParamSpec),
        (("tables", 0), TableSpec),
        (("groups", 0), GroupSpec),
        (("settings",), PlanSettings),
        ((), JobSpec),
    ],
)
def test_a_missing_field_has_its_default_or_is_refused(owner: tuple[str | int, ...], kind: Any) -> None:
    defaults = {field.name: field.default for field in fields(kind)}
    place: Any = json.loads(BASE.to_json())
    for step in owner:
        place = place[step]
    for name in place:
        raw: Any = json.loads(BASE.to_json())
        inside = raw
        for step in owner:
            inside = inside[step]
        del inside[name]
        if defaults[name] is MISSING:
            with pytest.raises(ProtocolError, match=r"wrong fields|cannot be read"):
                JobSpec.from_json(json.dumps(raw))
        else:
            inside[name] = defaults[name]
            full = JobSpec.from_json(json.dumps(raw))
            del inside[name]
            assert JobSpec.from_json(json.dumps(raw)) == full


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 100000, "NaN", '{"params": ' + "9" * 10000 + "}", "\x00"])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        JobSpec.from_json(text)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
PLACES = [path for path, _, _ in IMPOSSIBLE if path and path[-1] != "colour"]


@UNTIMED
@given(path=st.sampled_from(PLACES), value=ANYTHING)
def test_whatever_stands_in_a_field_is_taken_or_refused(path: tuple[str | int, ...], value: Any) -> None:
    """What gets through can be planned; everything else is a ProtocolError and no other error."""
    try:
        spec = JobSpec.from_json(altered(path, value))
    except ProtocolError:
        return
    assert JobSpec.from_json(spec.to_json()) == spec
    assert make_plan(spec).spec is spec


# --- Initializers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "a", "b", "mean"),
    [
        (None, "normal", 0.0, 1.0, 0.0),
        ("zeros", "zeros", 0.0, 0.0, 0.0),
        ("zeros()", "zeros", 0.0, 0.0, 0.0),
        ("constant(1.5)", "constant", 1.5, 0.0, 1.5),
        (" uniform( -0.5 , 1 ) ", "uniform", -0.5, 1.0, 0.25),
        ("normal(2, 0.01)", "normal", 2.0, 0.01, 2.0),
        ("normal(1e-3,0)", "normal", 0.001, 0.0, 0.001),
    ],
)
def test_initializers_are_read(text: str | None, kind: str, a: float, b: float, mean: float) -> None:
    read = Initializer.parse(text)
    assert read == Initializer(kind, a, b)
    assert read.mean == mean
    assert JobSpec.from_json(with_table(initializer=read).to_json()).tables[0].initializer == read


@pytest.mark.parametrize(
    "text",
    [
        *("", "zero", "zeros(1)", "constant", "constant()", "constant(1, 2)", "constant(a)", "constant(nan)"),
        *("uniform(1)", "uniform(2, 1)", "uniform(0, inf)", "normal(0, -1)", "normal(0, 1", "normal(0,, 1)"),
        *("normal(0, 1))", "Normal(0, 1)", "normal 0, 1", "zeros(", "constant(1)(2)", "__import__('os')"),
    ],
)
def test_initializers_that_mean_nothing(text: str) -> None:
    with pytest.raises(ConfigurationError, match="initializer is not usable"):
        Initializer.parse(text)
