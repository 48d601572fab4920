"""Makes whole scripts of many habits, drawn from a seed: what each of them gets alone, they have to get together.

    python tests/habits/programs.py [--first SEED] [--minutes N] [--workers N]

One worker ends where plain torch ends. Several, each with its part of every batch, end where it ends on whole
batches, and each of them has seen what the pages promise it (``replicas.py``). What goes by a worker's own gradients,
as clipping does, is an ``act(own=…)``: a script with one of these is compared with the pages alone.

A script that ends otherwise, and is not refused by name, is made as short as it can be and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import fleet.nn
from habits.habit import (
    ALL,
    AS_IN_TORCH,
    DIM,
    MODES,
    REFUSED,
    ROWS,
    Habit,
    Net,
    Outcome,
    Script,
    difference,
    in_a_job,
    in_a_job_of,
    in_torch,
    is_named,
    judge,
    plain,
)
from habits.nets import group_of_two
from habits.replicas import Replica, in_replicas

#: What gives rows of a table the same numbers as torch's dense formula: those that no batch touches do not move.
TABLE_OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD, maximized": lambda params: torch.optim.SGD(params, lr=0.05, maximize=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, eps=1e-3),
}
DENSE_OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-3, weight_decay=0.01),
    "AdamW in groups": lambda params: torch.optim.AdamW(
        [
            {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        eps=1e-3,
    ),
}
#: Rounding adds up over a script.
TOLERANCE = 2e-5
#: In these a script's own changes have their effect with the next step, or workers step by themselves.
LEAVES_TO_TIME = ("half-async", "dc-asgd")
#: In these several workers end where one does.
TOGETHER = ("sync", "all-reduce")
#: In these each worker has to give dense parameters the same values, where a script changes them by itself.
UNLIKE = ("all-reduce",)


class Drawn(Net):
    """Is the model of a script: with one table, with two in a group, or with two embeddings of which one is a table.
    Several workers have no norm over a batch, which each has of its own part."""

    def __init__(self, sparse: bool, net: str, alone: bool) -> None:
        super().__init__(sparse and net == "one table")
        if not alone:
            self.norm = torch.nn.LayerNorm(5)
        self.of_group = net == "a group"
        if self.of_group:
            del self.table
            self.group = group_of_two(sparse)
        elif net == "one of two":
            self.side = torch.nn.Embedding(ROWS, DIM)
        self.remote = {"all tables": "all", "one of two": lambda name, _: name == "table"}.get(net, "sparse")

    def __getattr__(self, name: str) -> Any:
        if name == "table" and "group" in self._modules:
            return self.group["table"]
        return super().__getattr__(name)

    def lookup(self, ids: torch.Tensor) -> dict[Any, Any]:
        return {self.group: {"table": ids, "side": ids}} if self.of_group else {self.table: ids}

    def rows(self) -> list[Any]:
        """Return the weights whose rows are on servers."""
        return [each.weight for each in self.group.values()] if self.of_group else [self.table.weight]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.of_group:
            found = self.group({"table": ids, "side": ids})
            rows = found["table"] + found["side"] ** 2
        else:
            rows = self.table(ids) + self.side(ids) ** 2 if hasattr(self, "side") else self.table(ids)
        return self.out(torch.tanh(self.norm(self.hidden(rows.flatten(1))))).squeeze(1)


NETS = ("one table", "a group", "all tables", "one of two")


@dataclass
class Running:
    """Holds what a script has in its hands while it runs."""

    script: Script
    draw: random.Random
    place: Path  #: for files, the same for all workers
    seen: list[Any] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.script.model

    @property
    def weight(self) -> Any:
        return self.script.model.table.weight

    def note(self, *values: Any) -> None:
        self.seen.extend(plain(list(values)))

    def loss(self) -> torch.Tensor:
        return self.script.loss()

    def number(self) -> int:
        self.kept["number"] = self.kept.get("number", 0) + 1
        return int(self.kept["number"])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.script.remote:
            with self.script.optimizer.no_sync():
                yield
            return
        of = self.script if isinstance(self.script, Replica) else None
        if of is not None:
            of.set_synchronized(False)
        yield
        if of is not None:
            of.set_synchronized(True)

    def ahead(self, batches: list[Any], depth: int | None) -> Iterable[Any]:
        if not self.script.remote:
            return batches
        return self.script.fleet.prefetch(batches, lambda batch: self.model.lookup(batch[0]), depth)

    def learnt(self) -> tuple[dict[Any, torch.Tensor], list[Any]]:
        """Return what a checkpoint has, in plain torch."""
        values = {param: param.detach().clone() for param in self.model.parameters()}
        return values, [copies_of(own.state) for own in self.script.own]


def copies_of(states: Mapping[Any, Any]) -> dict[Any, Any]:
    return {param: copy.deepcopy(state) for param, state in states.items()}


Act = Callable[[Running], None]
ACTS: dict[str, Act] = {}
#: In which modes an act goes by what is a worker's own; and in which the pages promise something else than torch.
OWN: dict[str, Sequence[str]] = {}
NOT_IN: dict[str, Sequence[str]] = {}


def act(*, own: Sequence[str] = (), not_in: Sequence[str] = ()) -> Callable[[Act], Act]:
    def add(function: Act) -> Act:
        name = function.__name__.replace("_", " ")
        ACTS[name], OWN[name], NOT_IN[name] = function, own, not_in
        return function

    return add


# ---------------------------------------------------------------------------------------------- steps


@act()
def a_step(run: Running) -> None:
    run.script.step()


@act()
def several_backwards_and_a_step(run: Running) -> None:
    run.script.optimizer.zero_grad()
    for _ in range(run.draw.randint(2, 4)):
        (run.loss() / 3).backward()
    run.script.optimizer.step()


@act()
def a_step_on_what_was_there(run: Running) -> None:
    run.loss().backward()
    run.script.optimizer.step()


@act()
def a_step_without_a_backward(run: Running) -> None:
    run.script.optimizer.step()


@act()
def a_backward_without_a_step(run: Running) -> None:
    run.loss().backward()


@act()
def gradients_set_to_zero(run: Running) -> None:
    run.script.optimizer.zero_grad(set_to_none=False)


@act()
def gradients_dropped_by_the_model(run: Running) -> None:
    run.model.zero_grad()


@act()
def a_closure(run: Running) -> None:
    def closure() -> torch.Tensor:
        run.script.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    if not isinstance(run.script.optimizer, torch.optim.Optimizer) or len(run.script.own) == 1:
        run.note(run.script.optimizer.step(closure))
    else:
        closure()
        run.script.optimizer.step()


@act(own=("sync",))
def a_clipped_step(run: Running) -> None:
    run.script.backward()
    norm = run.draw.choice([1.0, 2.0, float("inf")])
    foreach = run.draw.choice([None, False])
    most = run.draw.choice([0.01, 0.5, 10.0])
    if isinstance(run.script, Replica):
        run.script.clips_what_is_applied()
    run.note(torch.nn.utils.clip_grad_norm_(run.model.parameters(), most, norm_type=norm, foreach=foreach))
    run.script.optimizer.step()


@act(own=TOGETHER)
def a_step_of_clipped_values(run: Running) -> None:
    run.script.backward()
    torch.nn.utils.clip_grad_value_(run.model.parameters(), run.draw.choice([0.001, 0.1]))
    run.script.optimizer.step()


@act()
def a_step_on_two_losses(run: Running) -> None:
    run.script.optimizer.zero_grad()
    loss = run.loss()
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    run.script.optimizer.step()


@act()
def a_step_with_a_penalty(run: Running) -> None:
    run.script.optimizer.zero_grad()
    penalty = run.draw.choice([lambda w: w.square().sum(), lambda w: w.abs().sum(), lambda w: w.norm()])
    (run.loss() + 0.01 * penalty(run.weight)).backward()
    run.script.optimizer.step()


@act()
def a_step_with_some_rows_of_the_weight(run: Running) -> None:
    run.script.optimizer.zero_grad()
    rows = run.draw.sample(range(ROWS), 3)
    (run.loss() + run.weight[rows].sum() * 0.1).backward()
    run.script.optimizer.step()


@act()
def a_step_with_a_tied_layer(run: Running) -> None:
    run.script.optimizer.zero_grad()
    ids, _ = run.script.batch()
    scores = F.linear(run.model.table(ids[:, 0]), run.weight)
    F.cross_entropy(scores, ids[:, 1]).backward()
    run.script.optimizer.step()


@act()
def a_step_on_no_ids(run: Running) -> None:
    run.script.optimizer.zero_grad()
    empty = torch.empty(0, dtype=torch.int64)
    (run.loss() + run.model.table(empty).sum()).backward()
    run.script.optimizer.step()


@act()
def a_step_on_the_table_alone(run: Running) -> None:
    run.script.optimizer.zero_grad()
    run.model.table(torch.tensor([run.draw.randrange(ROWS)] * 2)).square().sum().backward()
    run.script.optimizer.step()


@act()
def a_step_on_the_layers_alone(run: Running) -> None:
    run.script.optimizer.zero_grad()
    run.model.out(torch.ones(2, 5)).sum().backward()
    run.script.optimizer.step()


# ---------------------------------------------------------------------------------------------- gradients


def _some(run: Running) -> list[Any]:
    """Return some parameters that have a gradient."""
    there = [param for param in run.model.parameters() if param.grad is not None]
    return there if run.draw.random() < 0.5 else [param for param in there if run.draw.random() < 0.5]


@act()
def gradients_scaled_in_place(run: Running) -> None:
    run.script.backward()
    for param in _some(run):
        param.grad.mul_(0.5)
    run.script.optimizer.step()


@act()
def gradients_replaced(run: Running) -> None:
    run.script.backward()
    for param in _some(run):
        param.grad = param.grad.clone() / 2
    run.script.optimizer.step()


@act()
def gradients_dropped(run: Running) -> None:
    run.script.backward()
    for param in _some(run):
        param.grad = None
    run.script.optimizer.step()


@act()
def gradients_from_elsewhere(run: Running) -> None:
    run.script.backward()
    for param in _some(run):
        param.grad = torch.full(param.shape, 0.01)
    run.script.optimizer.step()


@act()
def gradients_of_autograd_grad(run: Running) -> None:
    run.script.optimizer.zero_grad()
    params = [param for param in run.model.parameters() if param.requires_grad]
    for param, grad in zip(params, torch.autograd.grad(run.loss(), params), strict=True):
        param.grad = grad
    run.script.optimizer.step()


@act(own=TOGETHER)
def gradients_looked_at(run: Running) -> None:
    run.script.backward()
    for param in run.model.parameters():
        if param.grad is not None:
            run.note(param.grad.norm(), param.grad.abs().max(), bool(param.grad.isfinite().all()))
    run.script.optimizer.step()


@act()
def a_hook_on_a_gradient(run: Running) -> None:
    run.kept.setdefault("hooks", []).append(
        run.draw.choice([run.weight, run.model.out.weight]).register_hook(lambda grad: grad * 0.5)
    )


@act()
def a_hook_after_a_gradient(run: Running) -> None:
    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    param = run.draw.choice([run.weight, run.model.hidden.weight])
    run.kept.setdefault("hooks", []).append(param.register_post_accumulate_grad_hook(halve))


@act()
def hooks_taken_away(run: Running) -> None:
    for hook in run.kept.pop("hooks", []):
        hook.remove()


# ---------------------------------------------------------------------------------------------- values


@act()
def values_scaled(run: Running) -> None:
    with torch.no_grad():
        for param in run.model.parameters():
            if run.draw.random() < 0.5:
                param.mul_(0.9)


@act()
def rows_set(run: Running) -> None:
    with torch.no_grad():
        run.weight[run.draw.sample(range(ROWS), 2)] = 0.25


@act()
def values_clamped(run: Running) -> None:
    for param in run.model.parameters():
        param.data.clamp_(-0.4, 0.4)


@act()
def a_layer_made_anew(run: Running) -> None:
    torch.nn.init.constant_(run.draw.choice([run.weight, run.model.out.weight, run.model.hidden.weight]), 0.1)


@act(own=TOGETHER)
def rows_moved_by_hand(run: Running) -> None:
    run.script.optimizer.zero_grad()
    run.loss().backward()
    with torch.no_grad():
        for param in run.model.parameters():
            if param.grad is not None:
                param -= 0.1 * param.grad


@act()
def data_of_another(run: Running) -> None:
    param = run.draw.choice([run.weight, run.model.out.weight])
    param.data = torch.full(tuple(param.shape), 0.05)


# ---------------------------------------------------------------------------------------------- state


@act()
def the_state_kept(run: Running) -> None:
    run.kept["state"] = copy.deepcopy(run.model.state_dict())


@act()
def the_state_put_back(run: Running) -> None:
    if "state" in run.kept:
        run.model.load_state_dict(run.kept["state"])


@act()
def the_state_through_a_file(run: Running) -> None:
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    file.seek(0)
    found = torch.load(file)
    run.note(found)
    run.model.load_state_dict(found)


@act()
def a_copy_of_the_model(run: Running) -> None:
    other = copy.deepcopy(run.model).eval()
    with torch.no_grad():
        run.note(other(run.script.ids(99)))


@act()
def an_averaged_model(run: Running) -> None:
    if "averaged" not in run.kept:
        run.kept["averaged"] = torch.optim.swa_utils.AveragedModel(run.model)
    run.kept["averaged"].update_parameters(run.model)
    with torch.no_grad():
        run.note(run.kept["averaged"].module.eval()(run.script.ids(98)))


@act()
def another_rate(run: Running) -> None:
    for group in run.script.optimizer.param_groups:
        group["lr"] *= run.draw.choice([0.5, 1.5])


@act()
def a_layer_frozen(run: Running) -> None:
    run.draw.choice([run.model.table, run.model.hidden, run.model.out]).requires_grad_(False)


@act()
def all_layers_trained(run: Running) -> None:
    run.model.requires_grad_(True)


@act()
def evaluation(run: Running) -> None:
    run.model.eval()
    with run.draw.choice([torch.no_grad, torch.inference_mode])():
        run.note(run.model(run.script.ids(97)))
    run.model.train()


@act()
def a_look_at_everything(run: Running) -> None:
    run.note(run.script.seen())


@act()
def a_look_at_the_weight(run: Running) -> None:
    run.note(run.weight.detach().clone(), run.weight.mean(), run.weight.detach().norm(dim=1))


@act()
def a_call_of_the_function(run: Running) -> None:
    values = {name: param.detach() * 0.5 for name, param in run.model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    with torch.no_grad():
        run.note(torch.func.functional_call(run.model, (values, buffers), (run.script.ids(96),)))


@act()
def a_backward_under_checkpointing(run: Running) -> None:
    run.script.optimizer.zero_grad()
    ids, target = run.script.batch()
    F.mse_loss(torch.utils.checkpoint.checkpoint(run.model, ids, use_reentrant=False), target).backward()
    run.script.optimizer.step()


@act()
def a_step_in_other_modes(run: Running) -> None:
    """Of the device where new tensors are made, of counting, and of autocast where no layer is cast."""
    ids, target = run.script.batch()
    run.script.optimizer.zero_grad()
    with run.draw.choice([torch.device("meta"), FlopCounterMode(display=False), torch.autocast("cpu", enabled=False)]):
        F.mse_loss(run.model(ids), target).backward()
        run.script.optimizer.step()


@act(own=TOGETHER)
def a_step_in_autocast(run: Running) -> None:
    ids, target = run.script.batch()
    run.script.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(run.model(ids).float(), target)
    loss.backward()
    run.script.optimizer.step()


@act()
def the_state_of_the_optimizer(run: Running) -> None:
    found = run.script.optimizer.state_dict()
    run.note([{k: v for k, v in group.items() if k in ("lr", "momentum")} for group in found["param_groups"]])


@act()
def evaluation_on_another_thread(run: Running) -> None:
    """After a step: what a script changes by itself others see with the next one."""
    run.script.step()

    def look() -> None:
        with torch.no_grad():
            run.note(run.model.table(ALL))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()


@act(own=TOGETHER)
def a_double_backward(run: Running) -> None:
    run.script.optimizer.zero_grad()
    loss = run.loss()
    (grad,) = torch.autograd.grad(loss, [run.model.out.weight], create_graph=True)
    (loss + 0.1 * grad.square().sum()).backward()
    run.script.optimizer.step()


@act()
def a_step_in_evaluation_mode(run: Running) -> None:
    run.model.eval()
    run.script.step()
    run.model.train()


# ---------------------------------------------------------------------------------------------- more of them


@act()
def a_minimized_step(run: Running) -> None:
    if run.script.remote:
        run.script.optimizer.minimize(run.loss())
    else:
        run.script.step()


@act()
def accumulation_without_sync(run: Running) -> None:
    run.script.optimizer.zero_grad()
    for _ in range(run.draw.randint(1, 3)):
        with run.no_sync():
            run.loss().backward()
    (run.loss() * 0.5).backward()
    run.script.optimizer.step()


@act()
def accumulation_without_sync_to_the_end(run: Running) -> None:
    run.script.optimizer.zero_grad()
    with run.no_sync():
        run.loss().backward()
    run.script.optimizer.step()


@act(not_in=("ssp", "async"))  # where rows of the next batch may lack a step
def batches_fetched_ahead(run: Running) -> None:
    batches = [run.script.batch() for _ in range(run.draw.randint(1, 5))]
    every, end, edit = run.draw.choice([1, 1, 2]), run.draw.choice([2, 9, 9]), run.draw.choice([1, 2, 9, 9])
    depth = run.draw.choice([None, 1, 3])
    run.script.optimizer.zero_grad()
    for place, (ids, target) in enumerate(run.ahead(batches, depth)):
        if place == end:
            break
        if place == edit:
            with torch.no_grad():
                run.weight[run.script.ids(94)[0]] = 0.2
        F.mse_loss(run.model(ids), target).backward()
        if place % every == 0:
            run.script.optimizer.step()
            run.script.optimizer.zero_grad()


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5),
    lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
    lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2),
    lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, 6),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=500, cycle_momentum=False),
    lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3, cycle_momentum=False),
    lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
    lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
]


def _pass(scheduler: Any) -> None:
    metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    scheduler.step(*([1.0] if metric else []))


@act()
def steps_on_a_schedule(run: Running) -> None:
    if "schedule" not in run.kept:
        make = run.draw.choice(SCHEDULERS)
        run.kept["schedule"] = [make(run.draw.choice([run.script.optimizer, run.script.own[0]])), make]
    for _ in range(run.draw.randint(1, 3)):
        run.script.step()
        _pass(run.kept["schedule"][0])
    run.note([group["lr"] for group in run.script.optimizer.param_groups])


@act()
def a_schedule_through_its_state(run: Running) -> None:
    if "schedule" in run.kept:
        old, make = run.kept["schedule"]
        rates = [group["lr"] for group in run.script.optimizer.param_groups]
        fresh = make(old.optimizer)
        fresh.load_state_dict(copy.deepcopy(old.state_dict()))
        for group, rate in zip(run.script.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        run.kept["schedule"][0] = fresh


@act()
def the_optimizer_through_its_state(run: Running) -> None:
    if run.script.remote:
        run.script.optimizer.load_state_dict(copy.deepcopy(run.script.optimizer.state_dict()))


@act()
def a_step_of_a_called_function(run: Running) -> None:
    run.script.optimizer.zero_grad()
    ids, target = run.script.batch()
    values = {name: param * 0.5 for name, param in run.model.named_parameters() if name.startswith("out.")}
    F.mse_loss(torch.func.functional_call(run.model, values, (ids,)), target).backward()
    run.script.optimizer.step()


@act(own=TOGETHER)
def a_step_learnt_to_learn(run: Running) -> None:
    """MAML, whose inner step goes by a worker's own gradients."""
    run.script.optimizer.zero_grad()
    params = {name: param for name, param in run.model.named_parameters() if param.requires_grad}
    grads = torch.autograd.grad(run.loss(), list(params.values()), create_graph=True, allow_unused=True)
    moved = {
        name: param if grad is None else param - 0.1 * grad
        for (name, param), grad in zip(params.items(), grads, strict=True)
    }
    ids, target = run.script.batch()
    F.mse_loss(torch.func.functional_call(run.model, moved, (ids,)), target).backward()
    run.script.optimizer.step()


@act(own=TOGETHER)
def a_step_up_and_back(run: Running) -> None:
    """SAM."""
    run.script.backward()
    params = [param for param in run.model.parameters() if param.grad is not None]
    ups = [0.05 * param.grad.clone() for param in params]
    ups = [up.to_dense() if up.is_sparse else up for up in ups]
    with torch.no_grad():
        for param, up in zip(params, ups, strict=True):
            param.add_(up)
    run.script.optimizer.zero_grad()
    ids, target = run.script.batch()
    F.mse_loss(run.model(ids), target).backward()
    with torch.no_grad():
        for param, up in zip(params, ups, strict=True):
            param.sub_(up)
    run.script.optimizer.step()


@act(own=TOGETHER, not_in=UNLIKE)
def a_copy_trained_by_itself(run: Running) -> None:
    other = copy.deepcopy(run.model)
    other.requires_grad_(True)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        run.script.loss(other).backward()
        optimizer.step()
    run.note(other.state_dict())
    if run.draw.random() < 0.5:
        run.model.load_state_dict(other.state_dict())


@act(own=TOGETHER, not_in=UNLIKE)
def the_best_of_some_steps(run: Running) -> None:
    """Early stopping, by the loss of a worker's own part."""
    best, state = float("inf"), None
    for _ in range(run.draw.randint(2, 4)):
        loss = run.script.backward().item()
        if loss < best:
            best, state = loss, copy.deepcopy(run.model.state_dict())
        run.script.optimizer.step()
    run.model.load_state_dict(state)


@act(own=TOGETHER)
def a_layer_frozen_by_the_last(run: Running) -> None:
    if run.script.parts > 1 and run.script.index == run.script.parts - 1:
        run.draw.choice([run.model.table, run.model.hidden, run.model.out]).requires_grad_(False)


@act(own=TOGETHER)
def another_rate_of_the_last(run: Running) -> None:
    if run.script.parts > 1 and run.script.index == run.script.parts - 1:
        for group in run.script.optimizer.param_groups:
            group["lr"] *= 3


@act(own=TOGETHER)
def values_scaled_by_the_first(run: Running) -> None:
    """Which counts for all from the next step on."""
    run.script.backward()
    if run.script.index == 0 or run.script.mode == "all-reduce":
        with torch.no_grad():
            run.draw.choice([run.weight, run.model.out.weight]).mul_(0.8)
    run.script.optimizer.step()


@act(own=TOGETHER)
def rows_set_by_the_last(run: Running) -> None:
    """Which is dropped."""
    if run.script.parts > 1 and run.script.index == run.script.parts - 1:
        run.script.backward()
        with torch.no_grad():
            run.weight[:3] = 0.7
    else:
        run.script.backward()
    run.script.optimizer.step()


@act()
def another_epoch(run: Running) -> None:
    """With evaluation and a rate in the middle of it."""
    for step in range(4):
        run.script.step()
        if step == 1:
            with torch.no_grad():
                run.note(run.model.eval()(run.script.ids(95)))
            run.model.train()


@act()
def a_checkpoint_saved(run: Running) -> None:
    run.script.step()  # what one worker has changed holds for the others once it is saved, and not with the next step
    if run.script.remote:
        run.kept["checkpoint"] = str(run.place / f"by call {run.number()}")
        run.script.fleet.save_persistables(run.kept["checkpoint"])
    else:
        run.kept["checkpoint"] = run.learnt()


@act()
def a_checkpoint_from_time_to_time(run: Running) -> None:
    full, waits, times = run.draw.choice([1, 3]), run.draw.choice([None, False]), run.draw.randint(1, 3)
    if not run.script.remote:
        run.script.step(times)
        run.kept["checkpoint"] = run.learnt()
        return
    root = str(run.place / f"series {run.number()}")
    with fleet.Checkpoints(root, every_steps=1, full_every=full, background=waits, fleet=run.script.fleet) as saved:
        for _ in range(times):
            run.script.step()
            saved.after_step()
    run.script.fleet.barrier_worker()
    run.kept["checkpoint"] = fleet.Checkpoints.latest(root)


@act(not_in=("geo",))  # whose optimizers begin anew
def a_checkpoint_loaded(run: Running) -> None:
    if "checkpoint" not in run.kept:
        return
    if run.script.remote:
        run.script.fleet.load_persistables(run.kept["checkpoint"])
        run.script.fleet.barrier_worker()
        return
    values, states = run.kept["checkpoint"]
    for param, value in values.items():
        param.data.copy_(value)
    for own, state in zip(run.script.own, states, strict=True):
        own.state = defaultdict(dict, copies_of(state))


# ---------------------------------------------------------------------------------------------- whole scripts


@dataclass(frozen=True)
class Program:
    """Is one script: who trains it, in which mode, and what it does, each time by a seed of its own."""

    mode: str
    table: str
    dense: str | None  #: None: the table's optimizer has all
    acts: tuple[tuple[str, int], ...]
    workers: int = 1
    net: str = "one table"

    def __str__(self) -> str:
        lines = [
            f"mode {self.mode}; workers: {self.workers}; model of {self.net}; rows by {self.table}; "
            f"layers by {self.dense or 'the same'}"
        ]
        return "\n  ".join([*lines, *(f"{name} ({seed})" for name, seed in self.acts)])

    @property
    def is_own(self) -> bool:
        """Say whether several workers end elsewhere than one with whole batches."""
        return any(self.mode in OWN.get(name, ()) for name, _ in self.acts)

    def habit(self, place: Path) -> Habit:
        def make(sparse: bool) -> Drawn:
            return Drawn(sparse, self.net, self.workers == 1)

        def optimizers(model: Any) -> list[torch.optim.Optimizer]:
            if self.dense is None:
                return [TABLE_OPTIMIZERS[self.table](list(model.parameters()))]
            rows = model.rows()
            rest = [param for param in model.parameters() if not any(param is each for each in rows)]
            return [TABLE_OPTIMIZERS[self.table](rows), DENSE_OPTIMIZERS[self.dense](rest)]

        return Habit(
            "is drawn",
            AS_IN_TORCH,
            lambda script: self.run(script, place),
            make=make,
            optimizers=optimizers,
            before=1,
            after=1,
            options={"remote": make(False).remote},
        )

    def run(self, script: Script, place: Path) -> Any:
        running = Running(script, random.Random(), place)
        for name, seed in self.acts:
            running.draw.seed(seed)
            ACTS[name](running)
        running.note(script.seen())
        return running.seen


def drawn(seed: int, workers: int = 1) -> Program:
    draw = random.Random(f"program {seed}")
    mode = draw.choice(["sync", "sync", *(mode for mode in MODES if mode not in LEAVES_TO_TIME)])
    table = draw.choice([*TABLE_OPTIMIZERS])
    dense = draw.choice([None, *DENSE_OPTIMIZERS])
    net = draw.choice(NETS)
    if workers > 1:
        mode = draw.choice(TOGETHER)
    own = workers == 1 or seed % 2 == 0
    known = [name for name in ACTS if mode not in NOT_IN[name] and (own or mode not in OWN[name])]
    names = draw.choices(known, k=draw.randint(3, 14))
    return Program(mode, table, dense, tuple((name, draw.randrange(1000)) for name in names), workers, net)


def wrong_with(program: Program, refusals: Counter[str] | None = None) -> str | None:
    """Return what a job makes of a program that is neither what it has to be nor refused by name; ``refusals`` counts
    those."""
    with tempfile.TemporaryDirectory() as place:
        habit = program.habit(Path(place))
        whole = in_torch(habit)
        if program.workers == 1:
            theirs, ours = [whole], [in_a_job(habit, program.mode)]
        else:
            theirs = in_replicas(program.workers, habit, program.mode)
            ours = in_a_job_of(program.workers, habit, program.mode, apart=True)
    for who, (one, its) in enumerate(zip(ours, theirs, strict=True)):
        if wrong := _wrong(habit, its, one):
            return f"worker {who}: {wrong}"
        if one.error is not None and refusals is not None:
            refusals[str(one.error).split(";")[0]] += 1
        if program.workers > 1 and not program.is_own and one.error is None and (wrong := _ends_elsewhere(one, whole)):
            return f"worker {who}, beside one process on whole batches: {wrong}"
    return None


def _wrong(habit: Habit, theirs: Outcome, ours: Outcome) -> str | None:
    got, why = judge(habit, theirs, ours, TOLERANCE)
    if got == AS_IN_TORCH:
        return None
    if got == REFUSED:
        assert ours.error is not None
        return None if is_named(ours.error) or theirs.error is not None else f"{ours.error!r}, and no error in torch"
    return why


def _ends_elsewhere(ours: Outcome, whole: Outcome) -> str | None:
    if whole.error is not None:
        return f"torch raises {whole.error!r}"
    found = (difference(ours.value[when], whole.value[when], when, 3 * TOLERANCE) for when in ("between", "after"))
    return next((each for each in found if each), None)


def shortest(program: Program) -> Program:
    """Return the same without all that is not needed for it to be wrong."""
    place = 0
    while place < len(program.acts):
        shorter = replace(program, acts=program.acts[:place] + program.acts[place + 1 :])
        if wrong_with(shorter):
            program = shorter
        else:
            place += 1
    for change in ({"workers": 1}, {"mode": "sync"}, {"dense": None}, {"table": "SGD"}, {"net": "one table"}):
        simpler = replace(program, **change)
        if simpler != program and wrong_with(simpler):
            program = simpler
    return program


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=1.0, help="for how long")
    parser.add_argument("--workers", type=int, default=1, help="how many train together")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    until, seed, wrong, refused = time.monotonic() + 60 * options.minutes, options.first, 0, Counter[str]()
    while time.monotonic() < until:
        program = drawn(seed, options.workers)
        if wrong_with(program, refused):
            wrong += 1
            short = shortest(program)
            print(f"seed {seed}: {wrong_with(short)}\n  {short}", flush=True)
        seed += 1
    print(f"{seed - options.first} scripts, {wrong} wrong, {refused.total()} refused:")
    for why, count in refused.most_common():
        print(f"{count:5}  {why}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
