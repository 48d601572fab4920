"""Turns the user's optimizers and model into values, a ``JobSpec``, and refuses what cannot be honoured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fleet.errors import ArgumentTypeError, UnsupportedError
from fleet.kernels import HINTS, REFUSED, RULES, Rule
from fleet.nn.handle import TableHandle, handle_of
from fleet.nn.trainables import ElementTypes, Member, Memory, groups, members, refuse_overlap
from fleet.optimizer import SteppedOn, has_own_step, has_stepped, state_in
from fleet.plan.specs import ALL_REDUCE, DTYPES, TABLE_DTYPES, GroupSpec, JobSpec, ParamSpec, PlanSettings, TableSpec
from fleet.ps.consistency import policy_of
from fleet.strategy.parameter_server import Strategy

_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}


@dataclass(frozen=True)
class Description:
    """Holds a spec and the torch objects that it describes, in the same order."""

    spec: JobSpec
    params: tuple[torch.nn.Parameter, ...]
    handles: tuple[TableHandle, ...]
    groups: tuple[dict[str, Any], ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    has_model: bool  #: whether the model was handed over too, so that its embeddings are known

    def has_newcomers(self) -> bool:
        """Say whether a parameter joined an optimizer after this was made; it is an error if one left its group."""
        present = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        groups, places, names = self._known
        if not groups <= {id(group) for group in present}:
            raise UnsupportedError(
                "a param group was taken away from a running job",
                todo="Leave it, with lr=0 or requires_grad=False for its parameters; change its options in place.",
            )
        here = {id(param): id(group) for group in present for param in group["params"]}
        if sum([len(group["params"]) for group in present]) > len(here):
            twice = Counter(id(param) for group in present for param in group["params"]).most_common(1)[0][0]
            raise UnsupportedError(
                f"{names.get(twice, 'a new parameter')!r} is in param groups more than once in a running job",
                todo="Let it be in one group, once.",
            )
        for thing, group in places.items() if not places.items() <= here.items() else ():
            if thing not in here:
                raise UnsupportedError(
                    f"{names[thing]!r} was taken out of its param group in a running job",
                    todo="Leave it there, with requires_grad_(False).",
                )
            if here[thing] != group:
                raise UnsupportedError(
                    f"{names[thing]!r} was moved to another param group in a running job",
                    todo="Leave it where it is, and change the options of its group; or give it a group of its own "
                    "before the job begins.",
                )
        return len(here) > len(places)

    @cached_property
    def _known(self) -> tuple[set[int], dict[int, int], dict[int, str]]:
        """Return the identities of all groups, those of all parameters with their groups', and their names: every step
        looks at them, so they are made once."""
        specs: list[ParamSpec | TableSpec] = [*self.spec.params, *self.spec.tables]
        things = [id(thing) for thing in (*self.params, *(handle.weight for handle in self.handles))]
        found = list(zip(things, specs, strict=True))
        places = {thing: id(self.groups[spec.group]) for thing, spec in found}
        return {id(group) for group in self.groups}, places, {thing: spec.name for thing, spec in found}

    @contextmanager
    def tables_aside(self) -> Iterator[None]:
        """Hide gradients of rows."""
        with _without_gradients([handle.weight for handle in self.handles]):
            yield

    @contextmanager
    def steps_without_tables(self) -> Iterator[None]:
        """Hide gradients of rows from steps of torch's optimizers, as others step on them. Hooks before and after such
        a step see them, and what they make of them holds."""
        hidden, earlier = ExitStack(), SteppedOn()

        def hide(optimizer: torch.optim.Optimizer, *_: object) -> None:
            earlier.check(optimizer)
            hidden.enter_context(_without_gradients(self._weights_of(optimizer)))

        def show(optimizer: torch.optim.Optimizer, *_: object) -> None:
            hidden.close()
            earlier.add(self._weights_of(optimizer))

        with ExitStack() as hooks:
            hooks.callback(hidden.close)
            for optimizer in self.optimizers:
                last, first = optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(show)
                optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
                hooks.callback(last.remove)
                hooks.callback(first.remove)
            yield

    def _weights_of(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Return the weights of the tables in an optimizer's groups."""
        groups = self.spec.groups
        return [
            handle.weight
            for spec, handle in zip(self.spec.tables, self.handles, strict=True)
            if self.optimizers[groups[spec.group].optimizer] is optimizer
        ]

    def check_types(self) -> None:
        """Refuse parameters that were converted since this was made."""
        self._types.check()

    @cached_property
    def _types(self) -> ElementTypes:
        specs = self.spec.params
        return ElementTypes(self.params, [spec.name for spec in specs], [getattr(torch, spec.dtype) for spec in specs])

    def check_memory(self) -> None:
        """Refuse parameters and tables that the script has given one memory."""
        given = ((handle.name, handle.given) for handle in self.handles)
        self._memory.check((name, rows) for name, rows in given if rows is not None)

    @cached_property
    def _memory(self) -> Memory:
        return Memory(self.params, [spec.name for spec in self.spec.params])

    def check_steps(self) -> None:
        """Refuse a ``step`` that is not the class's own, of optimizers in whose place others step."""
        for optimizer in self._done_elsewhere:
            _refuse_other_step(optimizer)

    @cached_property
    def _done_elsewhere(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return the optimizers whose steps others take, on rows of tables at least."""
        spec = self.spec
        if not spec.settings.has_dense_on_workers and not policy_of(spec.settings).trains_on_workers:
            return self.optimizers
        places = {spec.groups[table.group].optimizer for table in spec.tables}
        return tuple(self.optimizers[place] for place in sorted(places))

    def continued_by(self, fresh: Description) -> Description:
        """Return ``fresh``, which describes the same optimizers later, in an order that begins with this one's."""
        self.options(of_step=True)  # refuses what they must not have become since
        groups, specs = list(self.groups), list(self.spec.groups)
        places = {id(group): index for index, group in enumerate(groups)}
        for group, group_spec in zip(fresh.groups, fresh.spec.groups, strict=True):
            if id(group) not in places:
                places[id(group)] = len(groups)
                groups.append(group)
                specs.append(group_spec)
        moved = [places[id(group)] for group in fresh.groups]
        known = {id(thing) for thing in (*self.params, *self.handles)}
        names = {spec.name for spec in self.spec.params} | {spec.name for spec in self.spec.tables}
        params = [
            (replace(spec, name=_free(spec.name, names), group=moved[spec.group]), param)
            for spec, param in zip(fresh.spec.params, fresh.params, strict=True)
            if id(param) not in known
        ]
        tables = [
            (replace(spec, name=_free(spec.name, names), group=moved[spec.group]), handle)
            for spec, handle in zip(fresh.spec.tables, fresh.handles, strict=True)
            if id(handle) not in known
        ]
        spec = JobSpec(
            (*self.spec.params, *(spec for spec, _ in params)),
            (*self.spec.tables, *(spec for spec, _ in tables)),
            tuple(specs),
            self.spec.settings,
        )
        params_now = (*self.params, *(param for _, param in params))
        handles_now: tuple[TableHandle, ...] = (*self.handles, *(handle for _, handle in tables))
        for described, handle in zip(spec.tables, handles_now, strict=True):
            handle.name = described.name  # wherever its module stands in the model by now
        return Description(spec, params_now, handles_now, tuple(groups), self.optimizers, self.has_model)

    def dense_gradient(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return what a sparse gradient of a dense parameter stands for, where torch, too, would step on it: that of a
        module's own parameter that it gave to ``F.embedding(…, sparse=True)``."""
        spec = self.spec.params[index]
        rule, group = RULES[self.spec.groups[spec.group].rule], self.groups[spec.group]
        decay = group.get("weight_decay")
        # Where nothing keeps a zero from being divided by zero, only a sparse gradient leaves other elements alone.
        that = f" with weight_decay={decay}" if decay else " with eps=0" if group.get("eps") == 0 else ""
        if not self.has_model:
            why, todo = "", "Hand the model to distributed_optimizer(…, model=…), so that its sparse tables go remote."
        elif not rule.takes_sparse or that:
            why = f", and {rule.name}{that} takes dense ones only"
            todo = "Look it up without sparse=True, or make it the weight of an nn.Embedding(…, sparse=True)."
        else:
            return grad.to_dense()
        raise UnsupportedError(f"the gradient of {spec.name!r} is sparse{why}", todo=todo)

    def options(self, *, of_step: bool = False) -> tuple[str, ...]:
        """Return the options of every group as they are now, as JSON: they travel with each push."""
        return tuple(json.dumps(self.option_values(index, of_step=of_step)) for index in range(len(self.groups)))

    def option_values(self, index: int, *, of_step: bool = False) -> dict[str, Any]:
        """Return the options of one group as they are now, in plain values. Those of a step are refused if they were
        turned on too late for it."""
        spec, group = self.spec.groups[index], self.groups[index]
        if not spec.options:  # its optimizer steps on the workers, and servers have no part in it
            return {}
        rule, defaults = RULES[spec.rule], self.optimizers[spec.optimizer].defaults
        _refuse_options(rule, group)
        for name in self._off[index] if of_step else ():
            if group[name]:
                raise rule.too_late(name, group[name], f"param group {index}")
        fixed = rule.constructor_only
        given = {name: defaults[name] if name in fixed else group[name] for name in spec.options}
        # Torch asks of a switch whether it is true.
        return {name: bool(v) if type(defaults[name]) is bool else _plain(v, name) for name, v in given.items()}

    @cached_property
    def _off(self) -> tuple[tuple[str, ...], ...]:
        """Return, by group, the options that were off in the first step, and cannot be turned on any more."""
        named = zip(self.spec.groups, self.groups, strict=True)
        return tuple(
            tuple(name for name in RULES[spec.rule].kept_from_the_first if not group[name]) if spec.options else ()
            for spec, group in named
        )


@contextmanager
def _without_gradients(weights: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    grads = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        yield
    finally:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad


def _free(name: str, names: set[str]) -> str:
    """Return the name of a parameter that joins a job, or one like it: a module put in another's place has that one's
    name."""
    chosen, number = name, 2
    while chosen in names:
        chosen, number = f"{name}.{number}", number + 1
    names.add(chosen)
    return chosen


def describe(
    optimizers: Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None,
    strategy: Strategy,
    server_num: int,
    worker_num: int,
    evict_every: int = PlanSettings.evict_every,
) -> Description:
    """Describe the optimizers' groups; whatever a server could not do exactly as torch does is refused by name."""
    params: list[ParamSpec] = []
    tables: list[TableSpec] = []
    specs: list[GroupSpec] = []
    objects: list[torch.nn.Parameter] = []
    handles: list[TableHandle] = []
    in_order = tuple(group for *_, group in groups(optimizers))
    everything = members(optimizers, model)
    refuse_overlap((member.name, member.param) for member in everything)
    here = strategy.dense == ALL_REDUCE
    with_rows = {member.group for member in everything if handle_of(member.param) is not None}
    rules: list[Rule | None] = []
    for index, (position, _, optimizer, group) in enumerate(groups(optimizers)):
        _refuse_optimizer(optimizer)
        if here and index not in with_rows:
            rules.append(None)
            specs.append(GroupSpec(type(optimizer).__name__, position, (), sliceable=False))
        else:
            rule = _rule(optimizer)
            _refuse_state(optimizer, [p for p in group["params"] if not here or handle_of(p) is not None])
            rules.append(rule)
            specs.append(_group_spec(rule, position, optimizer, group))
    for member in everything:
        handle = handle_of(member.param)
        if handle is None:
            params.append(_param_spec(member.name, member.param, member.group, None if here else rules[member.group]))
            objects.append(member.param)
        else:
            handle.name = member.name
            check_table(member)
            _refuse_rules(member.name, handle, strategy)
            tables.append(_table_spec(member.name, handle, member.group))
            handles.append(handle)
    settings = PlanSettings(
        server_num=server_num,
        worker_num=worker_num,
        mode=strategy.mode,
        slice_var_up=strategy.slice_var_up,
        split_method=strategy.split_method,
        min_block_size=strategy.min_block_size,
        staleness=strategy.staleness,
        dc_lambda=strategy.dc_lambda,
        dc_adaptive=strategy.dc_adaptive,
        elastic=strategy.elastic,
        wire_dtype=strategy.wire_dtype,
        needs_all_workers=strategy.needs_all_workers,
        evict_every=evict_every,
        dense=strategy.dense,
        gradients=strategy.gradients,
        max_grad_norm=strategy.max_grad_norm,
        changes=strategy.changes,
    )
    spec = JobSpec(tuple(params), tuple(tables), tuple(specs), settings)
    described = Description(spec, tuple(objects), tuple(handles), in_order, tuple(optimizers), model is not None)
    described.check_steps()
    described.options()  # refuses what cannot travel, while the user's line is still on the stack
    return described


def _refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if name in REFUSED:
        raise UnsupportedError(
            f"{name} cannot be honoured by parameter servers: {REFUSED[name]}",
            todo="Take one that steps once for a gradient, such as torch.optim.Adam, or train without Fleet.",
        )


def _rule(optimizer: torch.optim.Optimizer) -> Rule:
    _refuse_optimizer(optimizer)
    name = type(optimizer).__name__
    rule = RULES.get(name)
    if rule is None or type(optimizer) is not rule.optimizer:
        raise UnsupportedError(
            f"the optimizer {type(optimizer).__module__}.{name} is not known to the servers",
            expected="one of torch.optim's or fleet.optim's own: " + ", ".join(sorted(RULES)),
            todo='With dense="all_reduce" dense parameters may have any optimizer. A new one for servers is a file in '
            "fleet/kernels; CONTRIBUTING.md has the recipe.",
        )
    return rule


def _refuse_state(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> None:
    """Refuse what an optimizer has kept for parameters that are the servers' from now on."""
    if has_stepped(state_in(optimizer, param) for param in params):
        raise UnsupportedError(
            f"{type(optimizer).__name__} already has state, which would be lost: state lives on the servers",
            todo="Wrap the optimizer before its first step; to go on from a checkpoint use init_server(model_dir).",
        )


def _refuse_other_step(optimizer: torch.optim.Optimizer) -> None:
    if not has_own_step(optimizer):
        name = type(optimizer).__name__
        raise UnsupportedError(
            f"step() of the wrapped {name} was replaced, and the job steps in its place as the class was made",
            todo="Change gradients before step() or in a hook (register_step_pre_hook), or replace step() of what "
            "fleet.distributed_optimizer() returned.",
        )


def _group_spec(rule: Rule, position: int, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> GroupSpec:
    _refuse_options(rule, group)
    return GroupSpec(rule.name, position, tuple(sorted(optimizer.defaults)), rule.sliceable)


def _refuse_options(rule: Rule, group: Mapping[str, Any]) -> None:
    for option, reason in rule.refused.items():
        if group.get(option):
            raise UnsupportedError(f"{option}={group[option]!r} of {rule.name} cannot be honoured: {reason}")


def _param_spec(name: str, param: torch.nn.Parameter, group: int, rule: Rule | None) -> ParamSpec:
    """Describe a dense parameter; without a ``rule`` it is trained on the workers."""
    if rule is not None and not rule.dense:
        raise UnsupportedError(
            f"{rule.name} updates rows of sparse tables only, and {name!r} is a dense parameter",
            todo="Give it to another optimizer; distributed_optimizer takes a list.",
        )
    if param.dtype not in _DTYPE_NAMES:
        raise UnsupportedError(f"{name!r} is {param.dtype}", expected="one of " + ", ".join(DTYPES))
    return ParamSpec(name, tuple(param.shape), _DTYPE_NAMES[param.dtype], group)


def check_table(member: Member) -> None:
    """Refuse a table whose rows its optimizer could not update on a server, be it one already or about to be."""
    rule, name, param = _rule(member.optimizer), member.name, member.param
    _refuse_state(member.optimizer, [param])
    _refuse_other_step(member.optimizer)
    if rule.rows is None:
        usable = ", ".join(sorted(each.name for each in RULES.values() if each.rows is not None))
        raise UnsupportedError(
            f"{rule.name} cannot update rows of the sparse table {name!r}",
            expected=f"one of {usable}",
            todo="Give the table's weight to another optimizer; distributed_optimizer takes a list.",
        )
    unknown = set(member.optimizer.defaults) - set(rule.rows.options) - set(rule.refused) - HINTS
    for option in sorted(unknown):
        if member.options[option]:
            raise UnsupportedError(
                f"{option}={member.options[option]!r} of {rule.name} cannot be honoured for rows of the table {name!r}"
            )
    dtype = _DTYPE_NAMES.get(param.dtype, str(param.dtype))
    if dtype not in TABLE_DTYPES:
        raise UnsupportedError(f"the table {name!r} is {dtype}", expected="one of " + ", ".join(TABLE_DTYPES))


def _refuse_rules(name: str, handle: TableHandle, strategy: Strategy) -> None:
    """Refuse rules for which rows there are where workers hold rows by themselves."""
    if (handle.admit is not None or handle.evict) and policy_of(strategy).trains_on_workers:
        raise UnsupportedError(
            f"{name!r} has rules for which rows there are, and in GEO workers hold the rows that they train",
            expected="no admit= and no evict=",
            got=", ".join(map(repr, (() if handle.admit is None else (handle.admit,)) + handle.evict)),
            todo="Leave them out, or choose another mode.",
        )


def _table_spec(name: str, handle: TableHandle, group: int) -> TableSpec:
    dtype = _DTYPE_NAMES[handle.weight.dtype]
    return TableSpec(
        name,
        handle.dim,
        dtype,
        group,
        handle.num_embeddings,
        handle.initializer,
        handle.uploaded,
        handle.admit,
        handle.evict,
    )


def _plain(value: Any, name: str) -> Any:
    """Return an option in a form that JSON carries without loss."""
    if (isinstance(value, torch.Tensor) and value.numel() == 1) or isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):  # such as OmegaConf's
        return [_plain(item, name) for item in value]
    raise ArgumentTypeError(f"the option {name} of an optimizer cannot travel", got=f"{type(value).__name__} {value!r}")
