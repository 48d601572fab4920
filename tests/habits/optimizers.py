"""``torch.optim``: groups, options, hooks, state, schedules and averages."""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook

from habits.habit import ALL, DIM, ROWS, Net, Script, Section, one_at_a_time

SECTION = Section("Optimizers")
as_in_torch, differs, refused = SECTION.as_in_torch, SECTION.differs, SECTION.refused

IDS = ALL[:6].view(2, 3)


def lazily(model: Any) -> list[torch.optim.Optimizer]:
    """Adam on dense parameters, torch's own lazy one on the table."""
    dense = [p for name, p in model.named_parameters() if not name.startswith("table.")]
    return [torch.optim.Adam(dense, lr=0.01), torch.optim.SparseAdam([model.table.weight], lr=0.01)]


def momentum(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def dense_only(model: Any) -> list[torch.optim.Optimizer]:
    """The table is left out: on its rows momentum is lazy."""
    model.table.weight.requires_grad_(False)
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def apart(model: Any) -> list[torch.optim.Optimizer]:
    """Two optimizers, the table's and that of all else."""
    dense = [p for p in model.parameters() if p is not model.table.weight]
    return [torch.optim.SGD([model.table.weight], lr=0.1), torch.optim.SGD(dense, lr=0.1)]


def grouped(model: Any) -> list[torch.optim.Optimizer]:
    dense = [p for name, p in model.named_parameters() if not name.startswith("table.")]
    groups = [{"params": dense, "weight_decay": 0.01, "name": "dense"}, {"params": [model.table.weight], "lr": 0.05}]
    return [torch.optim.SGD(groups, lr=0.1, momentum=0.0)]


# ---------------------------------------------------------------- steps


@as_in_torch("`optimizer.step(closure)`", everywhere=True)
def _(s: Script) -> Any:
    def closure() -> torch.Tensor:
        return s.backward()

    return [s.optimizer.step(closure), s.optimizer.step(closure)]


@as_in_torch("`step()` that returns None; `zero_grad()` twice; `step` as a bound method kept")
def _(s: Script) -> Any:
    step = s.optimizer.step
    s.backward()
    found = step()
    s.optimizer.zero_grad()
    s.optimizer.zero_grad()
    return found


@as_in_torch(
    "several optimizers, as a list: Adam for dense parameters, SparseAdam for tables",
    optimizers=lazily,
    sparse=True,
    everywhere=True,
)
def _(s: Script) -> None:
    s.step(3)


@refused("`step()` of the wrapped optimizer instead of what was returned", "wrapped SGD")
def _(s: Script) -> None:
    s.backward()
    s.own[0].step()


@as_in_torch("a second, plain optimizer on the same parameters, now and then")
def _(s: Script) -> None:
    other = torch.optim.SGD(s.params, lr=0.05)
    s.backward()
    other.step()
    s.step()
    s.backward()
    other.step()


@as_in_torch("a plain optimizer for parameters that Fleet was not given")
def _(s: Script) -> Any:
    extra = nn.Parameter(torch.ones(()))
    other = torch.optim.SGD([extra], lr=0.1)
    for _ in range(2):
        s.optimizer.zero_grad()
        other.zero_grad()
        (s.loss() * extra).backward()
        s.optimizer.step()
        other.step()
    return extra


# ---------------------------------------------------------------- groups and options


@as_in_torch("groups with options and names of their own", optimizers=grouped, everywhere=True)
def _(s: Script) -> Any:
    s.step(2)
    return [sorted(group) for group in s.optimizer.param_groups] + [s.optimizer.param_groups[0]["name"]]


@as_in_torch("`group['lr'] = …`, `weight_decay`, `momentum`, `maximize` changed while training", optimizers=grouped)
def _(s: Script) -> None:
    for name, value in (("lr", 0.03), ("weight_decay", 0.2), ("maximize", True), ("maximize", False), ("lr", 0.0)):
        s.optimizer.param_groups[0][name] = value
        s.step()


@as_in_torch("`group['betas']`, `eps`, `lr` of Adam changed while training", optimizers=lazily, sparse=True)
def _(s: Script) -> None:
    for name, value in (("betas", (0.5, 0.9)), ("eps", 1e-4), ("lr", 0.003)):
        for group in s.optimizer.param_groups:
            group[name] = value
        s.step(2)


@refused(
    "`group['amsgrad'] = True` in a running job, RMSprop's `momentum` or `centered` turned on",
    "amsgrad=True of Adam comes too late",
    optimizers=lazily,
)
def _(s: Script) -> None:
    s.optimizer.param_groups[0]["amsgrad"] = True
    s.step()


@as_in_torch("options that are numpy's numbers, a switch that is 1: `group['lr'] = np.float32(0.03)`")
def _(s: Script) -> None:
    s.optimizer.param_groups[0].update(lr=np.float32(0.03), momentum=np.float64(0.0), maximize=1)
    s.step()
    s.optimizer.param_groups[0].update(lr=np.int64(0), maximize=0)
    s.step()


class Configured(Sequence[float]):
    """Is a list as libraries that read configurations have it, which is none of Python's: Hydra's, for example."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def __getitem__(self, at: Any) -> Any:
        return self.values[at]

    def __len__(self) -> int:
        return len(self.values)


@as_in_torch(
    "`betas` from a configuration, a list that is none of Python's",
    optimizers=lambda model: [
        torch.optim.Adam([p for p in model.parameters() if p is not model.table.weight], betas=Configured(0.5, 0.9)),
        torch.optim.SparseAdam([model.table.weight], betas=Configured(0.5, 0.9)),
    ],
    sparse=True,
)
def _(s: Script) -> None:
    s.step()
    s.optimizer.param_groups[0]["betas"] = Configured(0.6, 0.8)
    s.step()


@as_in_torch(
    "`lr` as a tensor, and changed in place",
    optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))],
)
def _(s: Script) -> None:
    s.step()
    s.optimizer.param_groups[0]["lr"].mul_(0.5)
    s.step()
    s.optimizer.param_groups[0]["lr"] = torch.tensor(0.03)
    s.step()


@as_in_torch(
    "`foreach=True`, `fused=True`", optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, fused=True)]
)
def _(s: Script) -> None:
    s.step()
    s.optimizer.param_groups[0]["fused"] = False
    s.optimizer.param_groups[0]["foreach"] = True
    s.step()


@as_in_torch(
    "`maximize=True`",
    optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.01, maximize=True)],
    everywhere=True,
)
def _(s: Script) -> None:
    s.step(2)


@refused(
    "`differentiable=True`",
    "differentiable",
    optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)],
)
def _(s: Script) -> None: ...


@refused("`group['differentiable'] = True` in a running job", "differentiable")
def _(s: Script) -> None:
    s.optimizer.param_groups[0]["differentiable"] = True
    s.step()


@refused("`capturable=True`", "capturable", optimizers=lambda model: capturable(model))
def _(s: Script) -> None: ...


def capturable(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)]


@as_in_torch("an option that torch refuses when it steps: `group['lr'] = -1` is taken as it is")
def _(s: Script) -> None:
    s.optimizer.param_groups[0]["lr"] = -0.1
    s.step()
    s.optimizer.param_groups[0]["lr"] = 0.1


@as_in_torch("`add_param_group` with dense parameters in a running job")
def _(s: Script) -> None:
    extra = nn.Parameter(torch.ones(3))
    s.model.extra = extra
    s.optimizer.add_param_group({"params": [extra], "lr": 0.01})
    for _ in range(2):
        s.optimizer.zero_grad()
        (s.loss() + extra.square().sum()).backward()
        s.optimizer.step()


@as_in_torch("`add_param_group` with another table in a running job")
def _(s: Script) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        s.model.other = nn.Embedding(ROWS, DIM, sparse=s.remote)
    s.optimizer.add_param_group({"params": list(s.model.other.parameters())})
    for _ in range(2):
        s.optimizer.zero_grad()
        (s.loss() + s.model.other(IDS).square().sum()).backward()
        s.optimizer.step()
    return s.model.other(ALL)


@refused("a group taken away: `del optimizer.param_groups[1]`", "taken away", optimizers=grouped)
def _(s: Script) -> None:
    del s.optimizer.param_groups[1]
    s.step()


@refused("a group taken away by `pop`, `clear`, `remove`", "taken away", optimizers=grouped)
def _(s: Script) -> None:
    s.optimizer.param_groups.pop(0)
    s.step()


@refused("another group in the place of one: `optimizer.param_groups[1] = {…}`", "taken away", optimizers=grouped)
def _(s: Script) -> None:
    s.optimizer.param_groups[1] = {**s.optimizer.param_groups[1], "lr": 0.01}
    s.step()


@refused("the list of the groups of several optimizers changed", "cannot be changed", optimizers=apart)
def _(s: Script) -> None:
    s.optimizer.param_groups.append(s.optimizer.param_groups[0])


@refused("a parameter moved to another group", "'out.bias' was moved to another", optimizers=grouped)
def _(s: Script) -> None:
    dense, rows = s.optimizer.param_groups
    dense["params"] = [p for p in dense["params"] if p is not s.model.out.bias]
    rows["params"].append(s.model.out.bias)
    s.step()


@refused("a parameter in its groups twice, which torch moves twice", "'out.bias' is in param groups more than once")
def _(s: Script) -> None:
    s.optimizer.param_groups[0]["params"].append(s.model.out.bias)
    s.step()


@as_in_torch("`optimizer.param_groups.append(group)`, `copy.deepcopy(optimizer.param_groups)`", optimizers=dense_only)
def _(s: Script) -> Any:
    extra = nn.Parameter(torch.ones(2))
    kept = copy.deepcopy([{**group, "params": []} for group in s.optimizer.param_groups])
    s.optimizer.param_groups.append({**s.optimizer.param_groups[0], "params": [extra], "lr": 0.5})
    s.step()
    s.optimizer.zero_grad()
    (s.loss() + extra.square().sum()).backward()
    s.optimizer.step()
    return extra, len(s.optimizer.param_groups), [group["lr"] for group in kept]


@as_in_torch("`optimizer.defaults[…] = …`, which the next `add_param_group` takes", optimizers=dense_only)
def _(s: Script) -> Any:
    s.optimizer.defaults["lr"] = 0.7
    s.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return [group["lr"] for group in s.optimizer.param_groups]


@refused("`optimizer.param_groups = […]`", "param_groups cannot be replaced")
def _(s: Script) -> None:
    s.optimizer.param_groups = []


@refused("a parameter taken out of its group: `group['params'].remove(p)`", "'out.bias' was taken out")
def _(s: Script) -> None:
    params = s.optimizer.param_groups[0]["params"]
    params[:] = [p for p in params if p is not s.model.out.bias]
    s.step(2)


@refused("a table's weight taken out of its group", "'table.weight' was taken out")
def _(s: Script) -> None:
    params = s.optimizer.param_groups[0]["params"]
    params[:] = [p for p in params if p is not s.weight]
    s.step(2)


@as_in_torch("`group['params'].append(p)` without `add_param_group`")
def _(s: Script) -> None:
    s.model.extra = nn.Parameter(torch.ones(3))
    s.optimizer.param_groups[0]["params"].append(s.model.extra)
    for _ in range(2):
        s.optimizer.zero_grad()
        (s.loss() + s.model.extra.square().sum()).backward()
        s.optimizer.step()


@as_in_torch("`isinstance(optimizer, torch.optim.Optimizer)`, `defaults`, `param_groups`, `repr`")
def _(s: Script) -> Any:
    groups = s.optimizer.param_groups
    return [
        isinstance(s.optimizer, torch.optim.Optimizer),
        s.optimizer.defaults,
        [sorted(group) for group in groups],
        [p is q for p, q in zip(groups[0]["params"], s.params, strict=True)],
        "lr: 0.1" in repr(s.optimizer),
    ]


# ---------------------------------------------------------------- rows are lazy


@differs("momentum, on rows: only rows that a step touches move", optimizers=momentum)
def _(s: Script) -> Any:
    s.step(2)
    before = s.model.table(ALL).detach().clone()
    ids = s.ids(s.taken + 1).unique()
    s.step()
    moved = (s.model.table(ALL).detach() != before).any(1).nonzero().flatten()
    if s.remote:
        assert set(moved.tolist()) == set(ids.tolist())
    return moved


@differs(
    "`weight_decay`, on rows: only rows that a step touches decay",
    optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)],
)
def _(s: Script) -> Any:
    return s.step(2)


@differs(
    "`torch.optim.Adam`, on rows: SparseAdam's formula",
    optimizers=lambda model: [torch.optim.Adam(model.parameters(), lr=0.01)],
)
def _(s: Script) -> Any:
    return s.step(2)


@as_in_torch(
    "`torch.optim.Adagrad`, on dense parameters and rows",
    optimizers=lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
    everywhere=True,
)
def _(s: Script) -> Any:
    return s.step(3)


@refused("`torch.optim.LBFGS`", "LBFGS", optimizers=lambda model: [torch.optim.LBFGS(model.parameters())], before=None)
def _(s: Script) -> Any:
    s.begin()


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@refused(
    "an optimizer class of the user's own",
    "not known to the servers",
    optimizers=lambda m: [Own(m.parameters(), lr=0.1)],
)
def _(s: Script) -> Any: ...


def replace_step(optimizer: Any) -> None:
    """As gradients are centralised, or given noise, by scripts that know of no hooks."""
    own = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5).add_(0.01)
        own()
        return loss

    optimizer.step = types.MethodType(step, optimizer)


@as_in_torch(
    "`step` of what `distributed_optimizer` returned, replaced: gradients centralised, or with noise", everywhere=True
)
def _(s: Script) -> None:
    replace_step(s.optimizer)
    s.step(2)
    del s.optimizer.step


@refused("`step` of the wrapped optimizer replaced, before wrapping", "step.. of the wrapped SGD", before=None)
def _(s: Script) -> None:
    replace_step(s.own[0])
    s.begin()
    s.step(2)


@refused("the same in a running job", "step.. of the wrapped SGD")
def _(s: Script) -> None:
    replace_step(s.own[0])
    s.step(2)


@refused("`torch.optim.SGD.step = …`: the same in the class", "step.. of the wrapped SGD", before=None)
def _(s: Script) -> None:
    with pytest.MonkeyPatch.context() as patch:
        own = torch.optim.SGD.step
        patch.setattr(torch.optim.SGD, "step", lambda *given: own(*given))
        s.begin()
        s.step(2)


# ---------------------------------------------------------------- hooks


@as_in_torch("`register_step_pre_hook`, `register_step_post_hook`, global ones, and `remove()`", everywhere=True)
def _(s: Script) -> Any:
    seen: list[str] = []
    handles = [
        s.optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        s.optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    s.step()
    for handle in handles:
        handle.remove()
    s.step()
    return seen


@as_in_torch("a step pre-hook that changes gradients, a post-hook that changes values", everywhere=True, edits=True)
def _(s: Script) -> None:
    def halve(*_: Any) -> None:
        for p in s.params:
            p.grad.mul_(0.5)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for p in s.params:
                p.clamp_(-0.4, 0.4)

    handles = [s.optimizer.register_step_pre_hook(halve), s.optimizer.register_step_post_hook(clamp)]
    s.step(2)
    for handle in handles:
        handle.remove()


@as_in_torch("a pre-hook of the wrapped optimizer that changes gradients, a post-hook that reads them", everywhere=True)
def _(s: Script) -> list[float]:
    seen: list[float] = []

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    handles = [
        s.own[0].register_step_pre_hook(halve),
        s.own[0].register_step_post_hook(
            lambda *_: seen.append(utils.get_total_norm([p.grad for p in s.params]).item())
        ),
    ]
    s.step(2)
    for handle in handles:
        handle.remove()
    return seen


@as_in_torch("a pre-hook of all optimizers that clips gradients", everywhere=True)
def _(s: Script) -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is each for each in s.own):  # and not another worker's
            utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.01)

    with one_at_a_time:
        handle = register_optimizer_step_pre_hook(clip)
    s.step(2)
    handle.remove()


@as_in_torch(
    "a hook of one of several wrapped optimizers that reads the gradients of all", optimizers=apart, everywhere=True
)
def _(s: Script) -> list[float]:
    seen: list[float] = []
    handle = s.own[-1].register_step_pre_hook(
        lambda *_: seen.append(utils.get_total_norm([p.grad for p in s.params]).item())
    )
    s.step(2)
    handle.remove()
    return seen


@as_in_torch(
    "a hook of the first of several wrapped optimizers that changes the gradients of all",
    optimizers=apart,
    everywhere=True,
)
def _(s: Script) -> None:
    handle = s.own[0].register_step_pre_hook(lambda *_: utils.clip_grad_norm_(s.params, 0.01) and None)
    s.step(2)
    handle.remove()


@refused(
    "a hook of a later one that sets a part of the gradient of an earlier one's table",
    "changed gradients of an optimizer that steps before it",
    optimizers=apart,
    everywhere=True,
)
def _(s: Script) -> None:
    def cut(*_: Any) -> None:
        s.weight.grad[:5] = 0

    s.own[-1].register_step_pre_hook(cut)
    s.step()


@refused(
    "a hook of a later one that changes the gradients of an earlier one, which has stepped in torch",
    "changed gradients of an optimizer that steps before it",
    optimizers=apart,
    everywhere=True,
)
def _(s: Script) -> None:
    s.own[-1].register_step_pre_hook(lambda *_: utils.clip_grad_norm_(s.params, 0.01) and None)
    s.step()


# ---------------------------------------------------------------- state


@differs(
    "`optimizer.state_dict()`: torch's layout, with whole `param_groups` and without the state",
    optimizers=momentum,
)
def _(s: Script) -> Any:
    told = s.optimizer.state_dict()
    assert {"state", "param_groups"} <= set(told)
    assert [group["params"] for group in told["param_groups"]] == [list(range(len(s.params)))]
    if s.remote:
        assert told["state"] == {}
    return told["state"]


@as_in_torch("`optimizer.load_state_dict` of what it gave at the same step", optimizers=dense_only)
def _(s: Script) -> Any:
    state = s.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.05
    s.optimizer.load_state_dict(state)
    s.step(2)
    return s.optimizer.param_groups[0]["lr"]


@refused(
    "`optimizer.load_state_dict` of what it gave at another step",
    "cannot become that of another step.*fleet.load_persistables",
    optimizers=momentum,
)
def _(s: Script) -> None:
    state = s.optimizer.state_dict()
    s.step()
    s.optimizer.load_state_dict(state)


@refused("`optimizer.load_state_dict` of a state that plain torch has saved", "state|servers", optimizers=momentum)
def _(s: Script) -> None:
    other = Net(False)
    own = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    s.loss(other).backward()
    own.step()
    s.optimizer.load_state_dict(own.state_dict())


@refused("`optimizer.state[p]['momentum_buffer']`", "on the servers", optimizers=momentum)
def _(s: Script) -> Any:
    return s.optimizer.state[s.model.out.weight]["momentum_buffer"]


@refused("`optimizer.state = defaultdict(dict)`: momentum forgotten", "on the servers", optimizers=momentum)
def _(s: Script) -> None:
    import collections

    s.optimizer.state = collections.defaultdict(dict)


@refused("`optimizer.state.clear()`: momentum forgotten", "on the servers", optimizers=momentum)
def _(s: Script) -> None:
    s.optimizer.state.clear()


@refused("the same of the wrapped optimizer", "on the servers", optimizers=momentum)
def _(s: Script) -> None:
    s.own[0].state.clear()


@refused(
    "`optimizer.state.get(p)`, `pop(p)`, `setdefault(p)`, `del optimizer.state[p]`",
    "on the servers",
    optimizers=momentum,
)
def _(s: Script) -> None:
    s.optimizer.state.pop(s.model.out.weight, None)


@as_in_torch("`optimizer.state` walked through: `for p, state in optimizer.state.items(): …to(device)`")
def _(s: Script) -> Any:
    return [value.to("cpu") for state in s.optimizer.state.values() for value in state.values() if value is not None]


@refused("`copy.deepcopy(optimizer)`", "cannot be copied or pickled")
def _(s: Script) -> None:
    copy.deepcopy(s.optimizer)


@refused("`pickle.dumps(optimizer)`, `torch.save(optimizer)`", "cannot be copied or pickled")
def _(s: Script) -> None:
    torch.save(s.optimizer, io.BytesIO())
    pickle.dumps(s.optimizer)


@refused("`type(optimizer)(params, lr=…)`: another one of its class", "made anew from its class")
def _(s: Script) -> None:
    options = {name: value for name, value in s.optimizer.param_groups[0].items() if name != "params"}
    type(s.optimizer)(params=s.model.parameters(), **options)


@as_in_torch("`register_state_dict_pre_hook`, `register_state_dict_post_hook`")
def _(s: Script) -> Any:
    seen: list[str] = []
    s.optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("before"))
    s.optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 1})
    return [sorted({*s.optimizer.state_dict()} - {"fleet"}), seen]


# ---------------------------------------------------------------- schedules


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6, cycle_momentum=False),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@as_in_torch("every `lr_scheduler`: `step()`, `get_last_lr()`, `state_dict()`", optimizers=grouped)
def _(s: Script) -> Any:
    found = []
    for make in SCHEDULES.values():
        for group in s.optimizer.param_groups:
            group["lr"] = 0.05
            group.pop("initial_lr", None)
        schedule = make(s.optimizer)
        for _ in range(2):
            s.step()
            schedule.step()
            found.append(schedule.get_last_lr())
    return found


@as_in_torch(
    "`ReduceLROnPlateau`, `OneCycleLR` and `CyclicLR` that turn momentum",
    optimizers=dense_only,
    sparse=True,
)
def _(s: Script) -> Any:
    found = []
    for schedule in (
        lr_scheduler.OneCycleLR(s.optimizer, 0.1, total_steps=6),
        lr_scheduler.CyclicLR(s.optimizer, 0.01, 0.1, 2),
        lr_scheduler.ReduceLROnPlateau(s.optimizer, patience=0),
    ):
        for step in range(3):
            s.step()
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                schedule.step(1.0 + step)
            else:
                schedule.step()
            found.append([s.optimizer.param_groups[0]["lr"], s.optimizer.param_groups[0]["momentum"]])
    return found


@as_in_torch("a schedule on the wrapped optimizer instead, or made before wrapping", before=None)
def _(s: Script) -> Any:
    schedule = lr_scheduler.ExponentialLR(s.own[0], 0.5)
    s.begin()
    for _ in range(3):
        s.step()
        schedule.step()
    return s.optimizer.param_groups[0]["lr"]


# ---------------------------------------------------------------- averages


def averaged(s: Script, model: Any) -> Any:
    for _ in range(3):
        s.step()
        model.update_parameters(s.model)
    model.eval()
    with torch.no_grad():
        return [model(IDS), model.module.table(ALL), int(model.n_averaged)]


@as_in_torch("`AveragedModel(model)`: its mean over steps, rows included", everywhere=True)
def _(s: Script) -> Any:
    return averaged(s, swa_utils.AveragedModel(s.model))


@as_in_torch("`AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))`, `avg_fn=`, `use_buffers=True`")
def _(s: Script) -> Any:
    return [
        averaged(s, swa_utils.AveragedModel(s.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))),
        averaged(s, swa_utils.AveragedModel(s.model, avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True)),
    ]


@as_in_torch("`swa_utils.update_bn(loader, averaged)`, and the averaged values taken over by the model")
def _(s: Script) -> Any:
    mean = swa_utils.AveragedModel(s.model)
    averaged(s, mean)
    swa_utils.update_bn([s.ids(step) for step in range(3)], mean)
    s.model.load_state_dict(mean.module.state_dict())
    return mean.module.norm.running_mean


@as_in_torch("an average made before the job, of the untrained model", before=None)
def _(s: Script) -> Any:
    mean = swa_utils.AveragedModel(s.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    s.begin()
    return averaged(s, mean)


# ---------------------------------------------------------------- distributed tools of torch


@as_in_torch("`torch.distributed.checkpoint.state_dict.get_model_state_dict(model)`, `set_model_state_dict`")
def _(s: Script) -> Any:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    state = {name: value.clone() for name, value in get_model_state_dict(s.model).items()}
    s.step()
    set_model_state_dict(s.model, state)
    return state


@differs(
    "`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)`: groups, without the state",
    optimizers=dense_only,
)
def _(s: Script) -> Any:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = get_optimizer_state_dict(s.model, s.optimizer)
    if s.remote:
        assert state["state"] == {}
    return [len(state["param_groups"][0]["params"]), sorted(state["state"])]


@as_in_torch("the model, the optimizer or a table deleted, and `gc.collect()`")
def _(s: Script) -> None:
    import gc

    copied = copy.deepcopy(s.model)
    del copied
    gc.collect()
    s.step(2)


@as_in_torch("an optimizer step per parameter inside `register_post_accumulate_grad_hook`")
def _(s: Script) -> None:
    own = {p: torch.optim.SGD([p], lr=0.1) for p in s.params}

    def hook(p: Any) -> None:
        own[p].step()
        own[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(hook) for p in s.params]
    for _ in range(2):
        s.loss().backward()
    for handle in handles:
        handle.remove()
