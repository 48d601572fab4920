"""Makes whole scripts of many habits, drawn from a seed: what each of them gets alone, they have to get together.

    python tests/habits/programs.py [--first SEED] [--minutes N]

A script that ends otherwise than in plain torch, and is not refused by name, is made as short as it can be and printed.
"""

from __future__ import annotations

import argparse
import copy
import io
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from habits.habit import (
    ALL,
    AS_IN_TORCH,
    MODES,
    REFUSED,
    ROWS,
    Habit,
    Net,
    Script,
    in_a_job,
    in_torch,
    is_named,
    judge,
    plain,
)

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
}
#: Rounding adds up over a script.
TOLERANCE = 2e-5
#: In these a script's own changes have their effect with the next step, or workers step by themselves.
LEAVES_TO_TIME = ("half-async", "dc-asgd")


@dataclass
class Running:
    """Holds what a script has in its hands while it runs."""

    script: Script
    draw: random.Random
    seen: list[Any] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.script.model

    @property
    def weight(self) -> Any:
        return self.script.model.table.weight

    def optimizers(self) -> list[Any]:
        """Return what a script calls ``step`` on."""
        return [self.script.optimizer]

    def note(self, *values: Any) -> None:
        self.seen.extend(plain(list(values)))

    def loss(self) -> torch.Tensor:
        return self.script.loss()


Act = Callable[[Running], None]
ACTS: dict[str, Act] = {}


def act(function: Act) -> Act:
    ACTS[function.__name__.replace("_", " ")] = function
    return function


# ---------------------------------------------------------------------------------------------- steps


@act
def a_step(run: Running) -> None:
    run.script.step()


@act
def several_backwards_and_a_step(run: Running) -> None:
    run.script.optimizer.zero_grad()
    for _ in range(run.draw.randint(2, 4)):
        (run.loss() / 3).backward()
    run.script.optimizer.step()


@act
def a_step_on_what_was_there(run: Running) -> None:
    run.loss().backward()
    run.script.optimizer.step()


@act
def a_step_without_a_backward(run: Running) -> None:
    run.script.optimizer.step()


@act
def a_backward_without_a_step(run: Running) -> None:
    run.loss().backward()


@act
def gradients_set_to_zero(run: Running) -> None:
    run.script.optimizer.zero_grad(set_to_none=False)


@act
def gradients_dropped_by_the_model(run: Running) -> None:
    run.model.zero_grad()


@act
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


@act
def a_clipped_step(run: Running) -> None:
    run.script.backward()
    norm = run.draw.choice([1.0, 2.0, float("inf")])
    foreach = run.draw.choice([None, False])
    most = run.draw.choice([0.01, 0.5, 10.0])
    run.note(torch.nn.utils.clip_grad_norm_(run.model.parameters(), most, norm_type=norm, foreach=foreach))
    run.script.optimizer.step()


@act
def a_step_of_clipped_values(run: Running) -> None:
    run.script.backward()
    torch.nn.utils.clip_grad_value_(run.model.parameters(), run.draw.choice([0.001, 0.1]))
    run.script.optimizer.step()


@act
def a_step_on_two_losses(run: Running) -> None:
    run.script.optimizer.zero_grad()
    loss = run.loss()
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    run.script.optimizer.step()


@act
def a_step_with_a_penalty(run: Running) -> None:
    run.script.optimizer.zero_grad()
    penalty = run.draw.choice([lambda w: w.square().sum(), lambda w: w.abs().sum(), lambda w: w.norm()])
    (run.loss() + 0.01 * penalty(run.weight)).backward()
    run.script.optimizer.step()


@act
def a_step_with_some_rows_of_the_weight(run: Running) -> None:
    run.script.optimizer.zero_grad()
    rows = run.draw.sample(range(ROWS), 3)
    (run.loss() + run.weight[rows].sum() * 0.1).backward()
    run.script.optimizer.step()


@act
def a_step_with_a_tied_layer(run: Running) -> None:
    run.script.optimizer.zero_grad()
    ids, _ = run.script.batch()
    scores = F.linear(run.model.table(ids[:, 0]), run.weight)
    F.cross_entropy(scores, ids[:, 1]).backward()
    run.script.optimizer.step()


@act
def a_step_on_no_ids(run: Running) -> None:
    run.script.optimizer.zero_grad()
    empty = torch.empty(0, dtype=torch.int64)
    (run.loss() + run.model.table(empty).sum()).backward()
    run.script.optimizer.step()


@act
def a_step_on_the_table_alone(run: Running) -> None:
    run.script.optimizer.zero_grad()
    run.model.table(torch.tensor([run.draw.randrange(ROWS)] * 2)).square().sum().backward()
    run.script.optimizer.step()


@act
def a_step_on_the_layers_alone(run: Running) -> None:
    run.script.optimizer.zero_grad()
    run.model.out(torch.ones(2, 5)).sum().backward()
    run.script.optimizer.step()


# ---------------------------------------------------------------------------------------------- gradients


def _some(run: Running) -> list[Any]:
    """Return some parameters that have a gradient."""
    there = [param for param in run.model.parameters() if param.grad is not None]
    return there if run.draw.random() < 0.5 else [param for param in there if run.draw.random() < 0.5]


@act
def gradients_scaled_in_place(run: Running) -> None:
    run.script.backward()
    for param in _some(run):
        param.grad.mul_(0.5)
    run.script.optimizer.step()


@act
def gradients_replaced(run: Running) -> None:
    run.script.backward()
    for param in _some(run):
        param.grad = param.grad.clone() / 2
    run.script.optimizer.step()


@act
def gradients_dropped(run: Running) -> None:
    run.script.backward()
    for param in _some(run):
        param.grad = None
    run.script.optimizer.step()


@act
def gradients_from_elsewhere(run: Running) -> None:
    run.script.backward()
    for param in _some(run):
        param.grad = torch.full(param.shape, 0.01)
    run.script.optimizer.step()


@act
def gradients_of_autograd_grad(run: Running) -> None:
    run.script.optimizer.zero_grad()
    params = [param for param in run.model.parameters() if param.requires_grad]
    for param, grad in zip(params, torch.autograd.grad(run.loss(), params), strict=True):
        param.grad = grad
    run.script.optimizer.step()


@act
def gradients_looked_at(run: Running) -> None:
    run.script.backward()
    for param in run.model.parameters():
        if param.grad is not None:
            run.note(param.grad.norm(), param.grad.abs().max(), bool(param.grad.isfinite().all()))
    run.script.optimizer.step()


@act
def a_hook_on_a_gradient(run: Running) -> None:
    run.kept.setdefault("hooks", []).append(
        run.draw.choice([run.weight, run.model.out.weight]).register_hook(lambda grad: grad * 0.5)
    )


@act
def a_hook_after_a_gradient(run: Running) -> None:
    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    param = run.draw.choice([run.weight, run.model.hidden.weight])
    run.kept.setdefault("hooks", []).append(param.register_post_accumulate_grad_hook(halve))


@act
def hooks_taken_away(run: Running) -> None:
    for hook in run.kept.pop("hooks", []):
        hook.remove()


# ---------------------------------------------------------------------------------------------- values


@act
def values_scaled(run: Running) -> None:
    with torch.no_grad():
        for param in run.model.parameters():
            if run.draw.random() < 0.5:
                param.mul_(0.9)


@act
def rows_set(run: Running) -> None:
    with torch.no_grad():
        run.weight[run.draw.sample(range(ROWS), 2)] = 0.25


@act
def values_clamped(run: Running) -> None:
    for param in run.model.parameters():
        param.data.clamp_(-0.4, 0.4)


@act
def a_layer_made_anew(run: Running) -> None:
    torch.nn.init.constant_(run.draw.choice([run.weight, run.model.out.weight, run.model.hidden.weight]), 0.1)


@act
def rows_moved_by_hand(run: Running) -> None:
    run.script.optimizer.zero_grad()
    run.loss().backward()
    with torch.no_grad():
        for param in run.model.parameters():
            if param.grad is not None:
                param -= 0.1 * param.grad


@act
def data_of_another(run: Running) -> None:
    param = run.draw.choice([run.weight, run.model.out.weight])
    param.data = torch.full(tuple(param.shape), 0.05)


# ---------------------------------------------------------------------------------------------- state


@act
def the_state_kept(run: Running) -> None:
    run.kept["state"] = copy.deepcopy(run.model.state_dict())


@act
def the_state_put_back(run: Running) -> None:
    if "state" in run.kept:
        run.model.load_state_dict(run.kept["state"])


@act
def the_state_through_a_file(run: Running) -> None:
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    file.seek(0)
    found = torch.load(file)
    run.note(found)
    run.model.load_state_dict(found)


@act
def a_copy_of_the_model(run: Running) -> None:
    other = copy.deepcopy(run.model).eval()
    with torch.no_grad():
        run.note(other(run.script.ids(99)))


@act
def an_averaged_model(run: Running) -> None:
    if "averaged" not in run.kept:
        run.kept["averaged"] = torch.optim.swa_utils.AveragedModel(run.model)
    run.kept["averaged"].update_parameters(run.model)
    with torch.no_grad():
        run.note(run.kept["averaged"].module.eval()(run.script.ids(98)))


@act
def another_rate(run: Running) -> None:
    for group in run.script.optimizer.param_groups:
        group["lr"] *= run.draw.choice([0.5, 1.5])


@act
def a_layer_frozen(run: Running) -> None:
    run.draw.choice([run.model.table, run.model.hidden, run.model.out]).requires_grad_(False)


@act
def all_layers_trained(run: Running) -> None:
    run.model.requires_grad_(True)


@act
def evaluation(run: Running) -> None:
    run.model.eval()
    with run.draw.choice([torch.no_grad, torch.inference_mode])():
        run.note(run.model(run.script.ids(97)))
    run.model.train()


@act
def a_look_at_everything(run: Running) -> None:
    run.note(run.script.seen())


@act
def a_look_at_the_weight(run: Running) -> None:
    run.note(run.weight.detach().clone(), run.weight.mean(), run.weight.detach().norm(dim=1))


@act
def a_call_of_the_function(run: Running) -> None:
    values = {name: param.detach() * 0.5 for name, param in run.model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    with torch.no_grad():
        run.note(torch.func.functional_call(run.model, (values, buffers), (run.script.ids(96),)))


@act
def a_backward_under_checkpointing(run: Running) -> None:
    run.script.optimizer.zero_grad()
    ids, target = run.script.batch()
    F.mse_loss(torch.utils.checkpoint.checkpoint(run.model, ids, use_reentrant=False), target).backward()
    run.script.optimizer.step()


@act
def a_step_in_other_modes(run: Running) -> None:
    """Of the device where new tensors are made, of counting, and of autocast where no layer is cast."""
    ids, target = run.script.batch()
    run.script.optimizer.zero_grad()
    with run.draw.choice([torch.device("meta"), FlopCounterMode(display=False), torch.autocast("cpu", enabled=False)]):
        F.mse_loss(run.model(ids), target).backward()
        run.script.optimizer.step()


@act
def a_step_in_autocast(run: Running) -> None:
    ids, target = run.script.batch()
    run.script.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(run.model(ids).float(), target)
    loss.backward()
    run.script.optimizer.step()


@act
def the_state_of_the_optimizer(run: Running) -> None:
    found = run.script.optimizer.state_dict()
    run.note([{k: v for k, v in group.items() if k in ("lr", "momentum")} for group in found["param_groups"]])


@act
def evaluation_on_another_thread(run: Running) -> None:
    """After a step: what a script changes by itself others see with the next one."""
    run.script.step()

    def look() -> None:
        with torch.no_grad():
            run.note(run.model.table(ALL))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()


@act
def a_double_backward(run: Running) -> None:
    run.script.optimizer.zero_grad()
    loss = run.loss()
    (grad,) = torch.autograd.grad(loss, [run.model.out.weight], create_graph=True)
    (loss + 0.1 * grad.square().sum()).backward()
    run.script.optimizer.step()


@act
def a_step_in_evaluation_mode(run: Running) -> None:
    run.model.eval()
    run.script.step()
    run.model.train()


# ---------------------------------------------------------------------------------------------- whole scripts


@dataclass(frozen=True)
class Program:
    """Is one script: who trains it, in which mode, and what it does, each time by a seed of its own."""

    mode: str
    table: str
    dense: str | None  #: None: the table's optimizer has all
    acts: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        lines = [f"mode {self.mode}; table by {self.table}; layers by {self.dense or 'the same'}"]
        return "\n  ".join([*lines, *(f"{name} ({seed})" for name, seed in self.acts)])

    @property
    def habit(self) -> Habit:
        def optimizers(model: Any) -> list[torch.optim.Optimizer]:
            if self.dense is None:
                return [TABLE_OPTIMIZERS[self.table](list(model.parameters()))]
            rows, rest = [model.table.weight], [*model.parameters()][1:]
            return [TABLE_OPTIMIZERS[self.table](rows), DENSE_OPTIMIZERS[self.dense](rest)]

        return Habit("is drawn", AS_IN_TORCH, self.run, make=Net, optimizers=optimizers, before=1, after=1)

    def run(self, script: Script) -> Any:
        running = Running(script, random.Random())
        for name, seed in self.acts:
            running.draw.seed(seed)
            ACTS[name](running)
        running.note(script.seen())
        return running.seen


def drawn(seed: int) -> Program:
    draw = random.Random(f"program {seed}")
    mode = draw.choice(["sync", "sync", *(mode for mode in MODES if mode not in LEAVES_TO_TIME)])
    table = draw.choice([*TABLE_OPTIMIZERS])
    dense = draw.choice([None, *DENSE_OPTIMIZERS])
    names = draw.choices([*ACTS], k=draw.randint(3, 14))
    return Program(mode, table, dense, tuple((name, draw.randrange(1000)) for name in names))


def wrong_with(program: Program) -> str | None:
    """Return what a job makes of a program that is neither torch's result nor refused by name."""
    theirs, ours = in_torch(program.habit), in_a_job(program.habit, program.mode)
    got, why = judge(program.habit, theirs, ours, TOLERANCE)
    if got == AS_IN_TORCH:
        return None
    if got == REFUSED:
        assert ours.error is not None
        return None if is_named(ours.error) or theirs.error is not None else f"{ours.error!r}, and no error in torch"
    return why


def is_refused(program: Program) -> str | None:
    ours = in_a_job(program.habit, program.mode)
    return None if ours.error is None else str(ours.error).split(";")[0]


def shortest(program: Program) -> Program:
    """Return the same without all that is not needed for it to be wrong."""
    place = 0
    while place < len(program.acts):
        shorter = replace(program, acts=program.acts[:place] + program.acts[place + 1 :])
        if wrong_with(shorter):
            program = shorter
        else:
            place += 1
    for change in ({"mode": "sync"}, {"dense": None}, {"table": "SGD"}):
        simpler = replace(program, **change)
        if simpler != program and wrong_with(simpler):
            program = simpler
    return program


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=1.0, help="for how long")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    until, seed, wrong, refused = time.monotonic() + 60 * options.minutes, options.first, 0, Counter[str]()
    while time.monotonic() < until:
        program = drawn(seed)
        if wrong_with(program):
            wrong += 1
            short = shortest(program)
            print(f"seed {seed}: {wrong_with(short)}\n  {short}", flush=True)
        elif (why := is_refused(program)) is not None:
            refused[why] += 1
        seed += 1
    print(f"{seed - options.first} scripts, {wrong} wrong, {refused.total()} refused:")
    for why, count in refused.most_common():
        print(f"{count:5}  {why}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
