"""What a collective job may be told, and the decisions that need no other worker: all of it pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import config

from fleet.collective import DGC, DistributedStrategy, GradientMerge, LocalSGD, PowerSGD
from fleet.collective.dgc import Residual, clip_factor, kept, sparsity_at
from fleet.collective.hierarchical import neighbours
from fleet.collective.liveness import Liveness, stopped
from fleet.errors import ConfigurationError
from fleet.strategy.collective import _EXCLUSIONS, as_collective
from fleet.strategy.pace import Pace
from fleet.strategy.parameter_server import StrategyFactory, as_strategy

#: For every option a value that is not its default.
SET: dict[str, Any] = {
    "local_sgd": LocalSGD(k_steps=4),
    "gradient_merge": GradientMerge(k_steps=2),
    "fp16_allreduce": True,
    "bf16_allreduce": True,
    "power_sgd": PowerSGD(),
    "dgc": DGC(),
    "use_hierarchical_allreduce": True,
    "hierarchical_allreduce_inter_nranks": 2,
    "nccl_comm_num": 2,
    "sync_batch_norm": True,
    "recompute_checkpoints": ("encoder",),
    "use_amp": True,
    "amp_loss_scaling": 8.0,
    "check_finite": True,
}
NEED = {"hierarchical_allreduce_inter_nranks": "use_hierarchical_allreduce", "amp_loss_scaling": "use_amp"}


def test_every_option_can_be_set_in_both_ways_and_alone() -> None:
    assert set(SET) == set(DistributedStrategy._DEFAULTS)
    for name, value in SET.items():
        by_name = DistributedStrategy()
        setattr(by_name, name, value)
        assert getattr(by_name, name) == value
        assert repr(by_name) == f"DistributedStrategy({name}={value!r})"
        assert by_name == DistributedStrategy(**{name: value}) != DistributedStrategy()
        together = {name: value} | ({NEED[name]: True} if name in NEED else {})
        assert as_collective(DistributedStrategy(**together)) == DistributedStrategy(**together)
        if name in NEED:
            with pytest.raises(ConfigurationError, match=f"{name}: nothing to act on without {NEED[name]}"):
                as_collective(by_name)


@pytest.mark.parametrize(("one", "other", "why"), _EXCLUSIONS, ids=lambda word: word if " " not in word else "")
def test_options_that_exclude_each_other_are_both_named(one: str, other: str, why: str) -> None:
    both = DistributedStrategy(**{one: SET[one], other: SET[other]})
    with pytest.raises(ConfigurationError, match=f"{one} and {other} exclude each other: {why}"):
        as_collective(both)


def test_all_other_pairs_go_together() -> None:
    excluded = {frozenset(pair[:2]) for pair in _EXCLUSIONS}
    for one in SET:
        for other in SET:
            names = {one, other} | {NEED[name] for name in (one, other) if name in NEED}
            if not any(pair <= names for pair in excluded):
                taken = as_collective(DistributedStrategy(**{name: SET[name] for name in names}))
                assert {name: getattr(taken, name) for name in names} == {name: SET[name] for name in names}


def test_what_the_user_sets_later_comes_too_late() -> None:
    given = DistributedStrategy()
    taken = as_collective(given)
    given.check_finite = True
    assert not taken.check_finite


@pytest.mark.parametrize(
    ("name", "hint"),
    [("local_sdg", "Did you mean 'local_sgd'"), ("geo", "Known are amp_loss_scaling, .*, use_hierarchical_allreduce")],
)
def test_a_misspelt_option_is_an_error(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=f"no setting '{name}'. {hint}"):
        setattr(DistributedStrategy(), name, 1)
    with pytest.raises(AttributeError, match=hint):
        DistributedStrategy(**{name: 1})


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: LocalSGD(k_steps=0), ValueError),
        (lambda: LocalSGD(k_steps=1.5), TypeError),
        (lambda: LocalSGD(begin_step=-1), ValueError),
        (lambda: GradientMerge(k_steps=True), TypeError),
        (lambda: GradientMerge(avg=1), TypeError),
        (lambda: PowerSGD(rank=0), ValueError),
        (lambda: PowerSGD(start_step=1), ValueError),
        (lambda: PowerSGD(min_compression_rate="2"), TypeError),
        (lambda: DGC(sparsity=()), TypeError),
        (lambda: DGC(sparsity=0.999), TypeError),
        (lambda: DGC(sparsity=(1.0,)), ValueError),
        (lambda: DGC(rampup_step=0), ValueError),
        (lambda: DGC(local_grad_clip_norm=0.0), ValueError),
        (lambda: DGC(local_grad_clip_norm=math.nan), ValueError),
        (lambda: DistributedStrategy(local_sgd=True), TypeError),
        (lambda: DistributedStrategy(dgc={"sparsity": [0.9]}), TypeError),
        (lambda: DistributedStrategy(nccl_comm_num=0), ValueError),
        (lambda: DistributedStrategy(hierarchical_allreduce_inter_nranks=-1), ValueError),
        (lambda: DistributedStrategy(use_amp=1), TypeError),
        (lambda: DistributedStrategy(amp_loss_scaling=0.0), ValueError),
        (lambda: DistributedStrategy(recompute_checkpoints="encoder"), TypeError),
        (lambda: DistributedStrategy(recompute_checkpoints=[1]), TypeError),
        (lambda: as_collective("local_sgd"), TypeError),
        (lambda: as_collective(StrategyFactory.create_sync_strategy()), TypeError),
        (lambda: as_strategy(DistributedStrategy()), TypeError),
    ],
)
def test_impossible_values(make: Callable[[], object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        make()


def test_a_config_in_a_collective_mode() -> None:
    assert as_collective(None) == as_collective(config(mode="nccl2")) == DistributedStrategy()
    assert as_collective(config(mode="collective", collective_mode="grad_allreduce")) == DistributedStrategy()
    local = as_collective(config(mode="collective", collective_mode="local_sgd"))
    assert local == DistributedStrategy(local_sgd=LocalSGD(k_steps=1))
    acting = {"nccl_comm_num": 2, "use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 4}
    assert as_collective(config(mode="nccl2", **acting)) == DistributedStrategy(**acting)
    for settings, words in (
        ({"mode": "pserver"}, "a collective job has none"),
        ({"mode": "nccl2", "collective_mode": "local_sgd"}, "mode='nccl2' and collective_mode='local_sgd' exclude"),
        ({"mode": "nccl2", "min_block_size": 1, "sync_mode": False}, "min_block_size, sync_mode: nothing to act on"),
        ({"mode": "nccl2", "wait_port": False}, "wait_port: nothing to act on"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            as_collective(config(**settings))


def test_the_pace_of_local_sgd_and_of_merging() -> None:
    local = Pace.of(DistributedStrategy(local_sgd=LocalSGD(k_steps=3, begin_step=2)))
    assert [step for step in range(1, 12) if local.averages(step)] == [1, 2, 5, 8, 11]
    assert (local.sends_gradients, local.reduces_in_backward, local.updates(4)) == (False, False, True)
    merging = Pace.of(DistributedStrategy(gradient_merge=GradientMerge(k_steps=4)))
    assert [step for step in range(1, 13) if merging.updates(step)] == [4, 8, 12]
    assert (merging.sends_gradients, merging.reduces_in_backward, merging.averages(4)) == (True, False, False)
    plain = Pace.of(DistributedStrategy())
    assert (plain.reduces_in_backward, plain.updates(1), plain.averages(1)) == (True, True, False)


def test_the_ramp_of_dgc_is_spread_evenly() -> None:
    options = DGC(rampup_begin_step=10, rampup_step=8, sparsity=(0.75, 0.9375, 0.98, 0.999))
    told = [sparsity_at(options, step) for step in range(9, 21)]
    assert told == [None, *[0.75] * 2, *[0.9375] * 2, *[0.98] * 2, *[0.999] * 5]
    assert sparsity_at(DGC(), 0) == 0.999
    assert (kept(100_000, 0.999), kept(16384, 0.999), kept(10, 0.999)) == (100, 16, 1)


def test_the_clip_of_dgc() -> None:
    assert clip_factor(4.0, 2.0, 4) == 0.25
    assert clip_factor(0.5, 2.0, 4) == 1.0
    assert clip_factor(0.0, 2.0, 4) == 1.0


def test_what_is_sent_is_cleared_and_what_is_not_adds_up() -> None:
    residual = Residual(torch.zeros(4), torch.zeros(4))
    where, what = residual.take(torch.tensor([1.0, -5.0, 2.0, 0.5]), 0.5, False, 1)
    assert (where.tolist(), what.tolist()) == ([1], [-5.0])
    where, what = residual.take(torch.tensor([1.0, 1.0, 0.0, 0.0]), 0.5, False, 2)
    # u = 0.5 u + g = [1.5, 1, 1, 0.25]; v + u = [2.5, 1, 3, 0.75]
    assert sorted(zip(where.tolist(), what.tolist(), strict=True)) == [(0, 2.5), (2, 3.0)]
    assert residual.momentum.tolist() == [0.0, 1.0, 0.0, 0.25]
    assert residual.unsent.tolist() == [0.0, 1.0, 0.0, 0.75]


def test_silence_is_measured_from_the_last_beat_that_counted_up() -> None:
    silence = Liveness()
    assert silence.still_for(1, 5, 10.0) == 0.0
    assert silence.still_for(1, 5, 12.5) == 2.5
    assert silence.still_for(1, 6, 13.0) == 0.0
    assert silence.still_for(1, 6, 14.0) == 1.0
    assert stopped({0: 3, 1: 6, 2: 9}, {0: 4, 1: 6, 2: 9}) == [1, 2]


def test_neighbours() -> None:
    assert neighbours(6, 2) == [[0, 1], [2, 3], [4, 5]]
