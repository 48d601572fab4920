"""Defines the optimizer that the user holds: it has the groups of the user's own, and takes the job's steps."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

import torch
from torch.autograd.profiler import record_function
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fleet.base.interruption import uninterrupted
from fleet.errors import ConfigurationError, StateError, UnsupportedError
from fleet.numeric.compiler import uncompiled
from fleet.telemetry.worker_figures import WorkerFigures

T = TypeVar("T", bound="DistributedOptimizer")


class Stepper(Protocol):
    """Carries out a step: the worker's side of a running job."""

    figures: WorkerFigures

    @property
    def trains_here(self) -> bool:
        """Say whether the wrapped optimizers do step in this process; else the servers do what they would."""
        ...

    def step_here(self, update: Callable[[], None]) -> None: ...

    def extend(self) -> None: ...


class RemoteStepper(Stepper, Protocol):
    """Carries out a step whose optimizers may run elsewhere."""

    def during_backward(self) -> AbstractContextManager[None]:
        """Surround a backward that a step follows at once."""
        ...

    def step(self) -> None: ...


class AveragingStepper(Stepper, Protocol):
    """Runs as a worker whose backwards average gradients among the workers, unless they are kept from that."""

    def set_synchronized(self, wanted: bool) -> bool: ...


def params_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Any]:
    """Return the parameters that some optimizers have, in the order of their groups."""
    return (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])


class Guard:
    """Keeps optimizers from stepping by themselves, as a step hook, unless it is open."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], todo: str) -> None:
        """``optimizers`` lose the guards that they have already."""
        self.is_open = False
        self._todo = todo
        for optimizer in optimizers:
            for number in _guards(optimizer):
                del optimizer._optimizer_step_pre_hooks[number]
            optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        if not self.is_open:
            raise StateError(
                f"step() was called on the wrapped {type(optimizer).__name__}, which would train this worker alone",
                todo=self._todo,
            )


def _guards(optimizer: torch.optim.Optimizer) -> list[int]:
    return [number for number, hook in optimizer._optimizer_step_pre_hooks.items() if isinstance(hook, Guard)]


def guard_until_wrapped(optimizers: Sequence[torch.optim.Optimizer], todo: str) -> None:
    """Keep optimizers that no job has wrapped yet from stepping by themselves until one has."""
    Guard([optimizer for optimizer in optimizers if not _guards(optimizer)], todo)


def hooks_before(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the user's hooks that run before a step of an optimizer, those of all optimizers first."""
    own = [hook for hook in optimizer._optimizer_step_pre_hooks.values() if not isinstance(hook, Guard)]
    return [*_global_optimizer_pre_hooks.values(), *own]


def _run_hooks(
    optimizer: torch.optim.Optimizer, hooks: Iterable[Callable[..., Any]], given: tuple[Any, ...] = ()
) -> None:
    """Let the user's hooks see a step, wherever it happens."""
    for hook in list(hooks):
        if hook(optimizer, given, {}) is not None:
            raise UnsupportedError(
                "a step hook cannot give step() other arguments",
                got=f"a hook that returns something: {hook}",
                todo="Let the hook return None.",
            )


class SteppedOn:
    """Knows the gradients on which some of several optimizers have stepped. In this job they step together, so hooks of
    the others must leave these as they are."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []

    def add(self, params: Iterable[torch.Tensor]) -> None:
        """Note the gradients of parameters whose optimizer has stepped."""
        self._known += [(param, *_mark(param)) for param in params]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what the hooks of the next optimizer have changed of them."""
        for param, grad, version in self._known:
            now, at = _mark(param)
            if now is not grad or at != version:
                raise UnsupportedError(
                    f"a step hook of {type(optimizer).__name__} changed gradients of an optimizer that steps before it",
                    expected="as they were then: they are used with those of all optimizers",
                    todo="Register the hook on the first of the optimizers, or on what fleet.distributed_optimizer() "
                    "returned: it runs before all of them.",
                )


def _mark(param: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return a gradient, and what changes with it."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = param.grad
        if grad is None:
            return None, 0
        return grad, grad._version + (grad._values()._version if grad.layout is torch.sparse_coo else 0)


#: The key under which a state says that it is not in it: where it is, and after how many of this worker's steps.
ELSEWHERE = "fleet"


class Kept(NamedTuple):
    """Tells that state is not in the optimizers: after how many steps of this worker, that of which parameters, where
    it is instead (in words), and whether checkpoints have it. In GEO rows have theirs beside them, on the worker."""

    step: int
    holds: Callable[[Any], bool]
    where: str
    is_saved: bool


#: What is kept elsewhere of the optimizers' state; None where all of it is in them.
KeptAt = Callable[[], "Kept | None"]


def has_stepped(states: Iterable[Mapping[str, Any]]) -> bool:
    """Say whether there is state that came from steps; Adagrad's constructor makes some that did not."""
    for state in states:
        steps = state.get("step")
        if (steps is None and any(value is not None for value in state.values())) or (steps is not None and steps > 0):
            return True
    return False


def _keeps_none(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.SGD and not any(group["momentum"] for group in optimizer.param_groups)


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether ``step`` is what an optimizer's class was made with, on the object and in the class. What torch puts
    around it, such as a count for schedules, changes nothing."""
    kind = type(optimizer)
    names = {f"{each.__qualname__}.step" for each in kind.__mro__}
    steps: Iterable[Any] = (kind.step, optimizer.step) if "step" in vars(optimizer) else (kind.step,)
    for step in steps:
        while True:
            if getattr(step, "__self__", optimizer) is not optimizer:
                return False
            step = getattr(step, "__func__", step)
            # A layer goes by where its code is from: it bears the name of what it surrounds.
            where = getattr(step, "__globals__", {}).get("__name__", "")
            if where.partition(".")[0] not in ("torch", "fleet"):
                return False
            if not hasattr(step, "__wrapped__"):
                break
            step = step.__wrapped__
        if step.__qualname__ not in names:
            return False
    return True


class OptimizerState(defaultdict[Any, Any]):
    """Is the ``state`` of wrapped optimizers: torch's, without what is kept elsewhere. Code that reads what a parameter
    has there, or would have the optimizer forget it, is told so; a walk through it finds nothing."""

    def __init__(self, kept_at: KeptAt, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[Any, Any]) -> None:
        super().__init__(dict)
        self._kept_at = kept_at
        self._optimizers = optimizers
        #: what constructors made for parameters whose state is elsewhere: nobody goes on from it in this job
        self._made: dict[Any, Any] = {}
        kept = kept_at()
        for param, each in {**state, **getattr(state, "_made", {})}.items():
            if kept is None or not kept.holds(param):
                super().__setitem__(param, each)
            else:
                self._made[param] = each

    def __bool__(self) -> bool:
        # Torch's checkpoints take a step of an optimizer without state, to have some.
        return self.is_partial or len(self) > 0

    def __missing__(self, param: Any) -> Any:
        self._refuse("was looked up in", param)
        return super().__missing__(param)

    def get(self, param: Any, default: Any = None) -> Any:
        self._refuse("was looked up in", param)
        return super().get(param, default)

    def setdefault(self, param: Any, default: Any = None) -> Any:
        self._refuse("was looked up in", param)
        return super().setdefault(param, default)

    def pop(self, param: Any, *default: Any) -> Any:
        self._refuse("was taken out of", param)
        return super().pop(param, *default)

    def __delitem__(self, param: Any) -> None:
        self._refuse("was taken out of", param)
        super().__delitem__(param)

    def __setitem__(self, param: Any, state: Any) -> None:
        self._refuse("was put into", param)
        super().__setitem__(param, state)

    def clear(self) -> None:
        self._refuse("was cleared from", *self._params)
        super().clear()

    def popitem(self) -> tuple[Any, Any]:
        self._refuse("was taken out of", *self._params)
        return super().popitem()

    def update(self, *state: Any, **more: Any) -> None:
        for param, each in dict(*state, **more).items():
            self[param] = each

    def __ior__(self, state: Any) -> Any:  # type: ignore[misc]
        self.update(state)
        return self

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    @property
    def is_partial(self) -> bool:
        """Say whether state of some of the parameters is kept elsewhere."""
        return any(self._kept(param) is not None for param in self._params)

    @property
    def _params(self) -> Iterator[Any]:
        return params_of(self._optimizers)

    def _kept(self, param: Any) -> Kept | None:
        kept = self._kept_at()
        return kept if kept is not None and kept.holds(param) else None

    def _refuse(self, what: str, *params: Any) -> None:
        for kept in filter(None, map(self._kept, params)):
            raise _elsewhere(f"state {what} an optimizer's state", kept)


class JoinedState(OptimizerState):
    """Shows the state of several optimizers, each of which has its own."""

    def __init__(self, kept_at: KeptAt, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        states = (optimizer.state.items() for optimizer in optimizers)
        super().__init__(kept_at, optimizers, dict(chain.from_iterable(states)))

    def __missing__(self, param: Any) -> Any:
        for optimizer in self._optimizers:
            if any(each is param for each in params_of([optimizer])):
                return optimizer.state[param]
        raise KeyError(param)

    def _refuse_change(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedError(
            "the state of several optimizers cannot be changed at once",
            todo="Change that of the optimizer which was handed to fleet.distributed_optimizer().",
        )

    setdefault = pop = popitem = clear = update = _refuse_change
    __setitem__ = __delitem__ = __ior__ = _refuse_change


def state_in(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Mapping[str, Any]:
    """Return what an optimizer itself has of a parameter's state, be the rest elsewhere."""
    return dict.get(optimizer.state, param, {})


def _elsewhere(what: str, kept: Kept) -> UnsupportedError:
    todo = "Save the whole job with fleet.save_persistables(dirname), which has it; to have none, begin a new job."
    if not kept.is_saved:
        todo = "To have none, go on from fleet.save_persistables(dirname) in a new job: it leaves that of rows out."
    return UnsupportedError(f"{what}, which {kept.where}", todo=todo)


class StateDicts:
    """Says in the wrapped optimizers' own ``state_dict()`` where their state is, and refuses to load what would lose
    it. What is loaded goes into the groups that are there: the job knows these."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], kept_at: KeptAt) -> None:
        """``optimizers`` lose those that they have already."""
        self._kept_at = kept_at
        #: what an optimizer has that loads
        self._before: tuple[list[dict[str, Any]], Any] | None = None
        for optimizer in optimizers:
            for hooks in (
                optimizer._optimizer_state_dict_post_hooks,
                optimizer._optimizer_load_state_dict_pre_hooks,
                optimizer._optimizer_load_state_dict_post_hooks,
            ):
                for number in [n for n, hook in hooks.items() if isinstance(getattr(hook, "__self__", 0), StateDicts)]:
                    del hooks[number]
            optimizer.register_state_dict_post_hook(self._mark)
            optimizer.register_load_state_dict_pre_hook(self._begin)
            optimizer.register_load_state_dict_post_hook(self._end)
            optimizer.state = OptimizerState(kept_at, [optimizer], optimizer.state)

    def check_place(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse another state in the place of one of which something is elsewhere."""
        for optimizer in optimizers:
            if isinstance(optimizer.state, OptimizerState):
                continue
            kept = self._kept_at()
            if kept is not None and any(map(kept.holds, params_of([optimizer]))):
                raise _elsewhere(f"{type(optimizer).__name__} was given another state in the place of its own", kept)

    def _mark(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        kept = self._kept_at()
        if kept is None:
            return state
        return {**state, "state": {}, ELSEWHERE: {"state": "on the servers", "step": kept.step}}

    def _begin(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self.check(optimizer, state)
        self._before = optimizer.param_groups, optimizer.state

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._before is not None
        (groups, former), self._before = self._before, None
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        optimizer.param_groups = groups
        if self._kept_at() is None:
            former = OptimizerState(self._kept_at, [optimizer], optimizer.state)
        optimizer.state = former

    def check(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Refuse a state that is not the one there is, or is not there."""
        kept, told = self._kept_at(), state.get(ELSEWHERE)
        at = None if kept is None else kept.step
        step = 0 if told is None else told["step"]
        if at is None and not step:
            return
        todo = (
            "Save the whole job with fleet.save_persistables(dirname) or fleet.Checkpoints, and go on from it with "
            "fleet.resume_from(dirname); what is loaded here are the options of param groups, at the same step."
        )
        if at is None:
            raise UnsupportedError(
                f"a state_dict() of {type(optimizer).__name__} has no state: it lay on the servers of its job",
                got=f"what stands beside it after step {step}",
                todo=todo,
            )
        if has_stepped(state["state"].values()):
            raise UnsupportedError(
                f"the state of {type(optimizer).__name__} is on the servers, and no worker can load another",
                todo=todo,
            )
        if step != at and not _keeps_none(optimizer):
            raise UnsupportedError(
                f"the state of {type(optimizer).__name__} is on the servers, and cannot become that of another step",
                expected=f"a state_dict() of step {at}",
                got=f"one of step {step}",
                todo="To go back in a job, as after a search for a learning rate, fleet.save_persistables(dirname) "
                f"before and fleet.load_persistables(dirname) after. {todo}",
            )


class JoinedGroups(list[dict[str, Any]]):
    """Holds the groups of several optimizers. Which of them an entry would come to is not known, so none can be put in
    or taken out."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedError(
            "the list of the param groups of several optimizers cannot be changed",
            todo="Change the groups in it; add_param_group() adds one to the last of the optimizers.",
        )

    def __reduce__(self) -> Any:
        return list, (list(self),)

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


#: Those that somebody holds.
_made: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


def is_trained(params: Iterable[torch.Tensor]) -> bool:
    """Say whether a job that runs in this process trains one of these."""
    wanted = {id(param) for param in params}
    running = [each for each in list(_made) if each._running()]
    return any(id(param) in wanted for param in params_of(running))


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps one optimizer or several. ``param_groups`` are theirs, so schedulers work on either side.

    Examples:
        >>> optimizer.zero_grad()
        >>> loss().backward()
        >>> optimizer.step()
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        >>> optimizer.minimize(loss())  # the three calls in one
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.05
    """

    def __new__(cls: type[T], *given: Any, **options: Any) -> T:  # noqa: ARG004 - what another optimizer's class takes
        """Refuse the arguments of another optimizer: some libraries begin to train with a new one, of the class of the
        one that they were given."""
        if len(given) < 2 or not callable(given[1]):
            raise UnsupportedError(
                "the optimizer of a job cannot be made anew from its class, as type(optimizer)(params, ...) would",
                todo="Hand to fleet.distributed_optimizer() the one that is made in the end, such as in a callback "
                "before the first batch, and put what it returns in that one's place.",
            )
        return super().__new__(cls)

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        stepper: Callable[[], Stepper],
        running: Callable[[], bool],
        kept_at: KeptAt = lambda: None,
    ) -> None:
        """``stepper`` is asked for at every step: it says who carries it out, or why there is nobody to. ``running``
        says whether the servers already have a plan, ``kept_at`` whether they have the state."""
        self._wrapped = tuple(optimizers)
        self._stepper = stepper
        self._running = running
        # torch's own constructor sets up hooks and what schedulers look for; the groups stay where they are.
        self._constructed = False
        super().__init__([{"params": []}], self._wrapped[-1].defaults)
        self.defaults = self._wrapped[-1].defaults  # of the one that gets new groups
        self._constructed = True
        self._kept_at = kept_at
        self._states = StateDicts(self._wrapped, kept_at)
        self._guard = Guard(self._wrapped, "Call step() on what fleet.distributed_optimizer() returned.")
        _made.add(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        if len(self._wrapped) == 1:
            return self._wrapped[0].param_groups
        return JoinedGroups(group for optimizer in self._wrapped for group in optimizer.param_groups)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # noqa: ARG002 - refused, or torch's constructor
        if self._constructed:
            raise UnsupportedError("param_groups cannot be replaced", todo="Change the groups, or add_param_group().")

    @property
    def state(self) -> Any:
        """Return the wrapped optimizers' state; in jobs with servers it is mostly there."""
        if len(self._wrapped) == 1:
            return self._wrapped[0].state
        return JoinedState(self._kept_at, self._wrapped)

    @state.setter
    def state(self, state: Any) -> None:  # noqa: ARG002 - refused, or torch's constructor
        if self._constructed:
            raise UnsupportedError(
                "an optimizer's state cannot be replaced: it is on the servers, or the wrapped one's",
                todo="To have none, begin a new job.",
            )

    def __getattr__(self, name: str) -> Any:
        """Give what a wrapped optimizer has of its own and torch's have not, such as ``train()`` and ``eval()`` of a
        schedule-free one, which libraries call if they are there."""
        holder = self._holder(name)
        if holder is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(holder, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what a wrapped optimizer has of its own there, where its step reads it."""
        holder = None if name in vars(self) or hasattr(type(self), name) else self._holder(name)
        if holder is None:
            super().__setattr__(name, value)
        else:
            setattr(holder, name, value)

    def _holder(self, name: str) -> torch.optim.Optimizer | None:
        """Return the wrapped optimizer that has an attribute of its own, if one has."""
        # What begins with an underscore tells torch what an optimizer can do, such as skip steps for a GradScaler.
        if name.startswith("_") or not vars(self).get("_constructed"):
            return None
        holders = [optimizer for optimizer in self._wrapped if hasattr(optimizer, name)]
        if len(holders) > 1:
            kinds = " and ".join(type(optimizer).__name__ for optimizer in holders)
            raise AttributeError(
                f"{kinds} have {name!r} each. Take it from the one that was handed to fleet.distributed_optimizer()."
            )
        return holders[0] if holders else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch, to the last of the wrapped optimizers. In a running job every worker does so after
        the same step, and waits for worker 0, whose values win for the new parameters too."""
        if not self._constructed:
            return
        self._wrapped[-1].add_param_group(param_group)
        if self._running():
            self._stepper().extend()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as in torch, those of rows too."""
        for optimizer in self._wrapped:
            is_torchs = type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(
                optimizer
            )
            if set_to_none and is_torchs:
                with torch._C.DisableTorchFunctionSubclass():  # no gradient of a table need be made one to be read
                    optimizer.zero_grad()
            else:
                optimizer.zero_grad(set_to_none)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the job: send this worker's gradients, and take over new values. ``closure`` is called once,
        before."""
        given = () if closure is None else (closure,)
        with record_function("Optimizer.step#DistributedOptimizer.step"):
            _run_hooks(self, self._optimizer_step_pre_hooks.values(), given)
            self._states.check_place(self._wrapped)
            loss = self._step(closure)
            _run_hooks(self, self._optimizer_step_post_hooks.values(), given)
        return loss

    # Else torch would surround it with the hooks of all optimizers, which surround the steps of the wrapped ones.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepper = self._stepper()
        stepper.figures.saw(loss)
        if stepper.trains_here:
            stepper.step_here(self._update)
            return loss
        earlier, hooks = SteppedOn(), list(map(hooks_before, self._wrapped))
        for place, optimizer in enumerate(self._wrapped):
            _run_hooks(optimizer, hooks[place])
            earlier.check(optimizer)
            if any(hooks[place + 1 :]):
                earlier.add(params_of([optimizer]))
        cast(RemoteStepper, stepper).step()
        for optimizer in self._wrapped:
            own = optimizer._optimizer_step_post_hooks.values()
            _run_hooks(optimizer, chain(own, _global_optimizer_post_hooks.values()))
            # What a scheduler on the wrapped optimizer looks at, to warn of a step() that never came.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _update(self) -> None:
        """Let the wrapped optimizers step in this process."""
        self._guard.is_open = True
        try:
            for optimizer in self._wrapped:
                optimizer.step()
        finally:
            self._guard.is_open = False

    @uncompiled
    def minimize(self, loss: torch.Tensor) -> None:
        """Take a step on ``loss``: ``zero_grad(); loss.backward(); step()``. Gradients may leave while the backward
        still runs, unless something of the user's is to see them first."""
        self.zero_grad()
        stepper = self._stepper()
        whole = stepper.trains_here or self._is_preceded()
        with nullcontext() if whole else cast(RemoteStepper, stepper).during_backward():
            loss.backward()  # type: ignore[no-untyped-call]
        self.step()
        self._stepper().figures.saw(loss)

    def _is_preceded(self) -> bool:
        """Say whether something of the user's runs before a step: what it does to gradients may leave no trace."""
        return any(map(hooks_before, (self, *self._wrapped))) or not has_own_step(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surround backwards that only accumulate. Outside of ``minimize`` nothing leaves before ``step`` anyway."""
        yield

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            "the optimizer of a job cannot be copied or pickled: it stands for the job, which is on the servers too",
            todo="Copy the model; fleet.save_persistables(dirname) has the optimizer's state.",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch, with the groups of all wrapped optimizers. ``state`` is empty where it is on
        the servers, and ``"fleet"`` says so, and after which step."""
        for hook in list(self._optimizer_state_dict_pre_hooks.values()):
            hook(self)
        parts = [optimizer.state_dict() for optimizer in self._wrapped]
        whole: dict[str, Any] = {**parts[0], "state": {}, "param_groups": []}
        start = 0
        for part in parts:
            for group in part["param_groups"]:
                whole["param_groups"].append({**group, "params": [start + place for place in group["params"]]})
            whole["state"].update(
                {start + key if isinstance(key, int) else key: value for key, value in part["state"].items()}
            )
            start += sum(len(group["params"]) for group in part["param_groups"])
        for change in list(self._optimizer_state_dict_post_hooks.values()):
            whole = change(self, whole) or whole
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as in torch, where the state is in this process; otherwise load the options of the groups, and
        refuse a state that is not the one on the servers. Every worker loads the same."""
        given = state_dict.copy()
        for change in list(self._optimizer_load_state_dict_pre_hooks.values()):
            given = change(self, given) or given
        parts = self._split(given)
        for optimizer, part in parts:
            self._states.check(optimizer, part)
        with uninterrupted():  # or an optimizer would have the state that is loaded in the place of its own
            for optimizer, part in parts:
                optimizer.load_state_dict(part)
        for hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            hook(self)

    def _split(self, given: dict[str, Any]) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Return the part of each wrapped optimizer, if there are parts for all."""
        groups, state = list(given["param_groups"]), dict(given["state"])
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self._wrapped]
        if [len(group["params"]) for group in groups] != [size for each in sizes for size in each]:
            raise ConfigurationError(
                "a state_dict() of other param groups cannot be loaded",
                expected=f"groups of {', '.join(str(size) for each in sizes for size in each)} parameters",
                got=f"groups of {', '.join(str(len(group['params'])) for group in groups)}",
            )
        parts = []
        for optimizer, each in zip(self._wrapped, sizes, strict=True):
            own, groups = groups[: len(each)], groups[len(each) :]
            places = {place for group in own for place in group["params"]}
            mine = {key: value for key, value in state.items() if key in places}
            parts.append((optimizer, {**given, "param_groups": own, "state": mine}))
        return parts

    def __repr__(self) -> str:
        return f"DistributedOptimizer({', '.join(repr(optimizer) for optimizer in self._wrapped)})"


class AveragingOptimizer(DistributedOptimizer):
    """Wraps optimizers that step in this process, on gradients that backwards average among the workers."""

    #: A GradScaler then hands its scale over and leaves to ``step`` what to skip, so that no worker misses a step.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor
    #: which gradients a step that failed has left without their scale
    _unscaled: list[tuple[int, int]] | None = None

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if not hasattr(self, "found_inf"):
            return super()._step(closure)
        # A GradScaler calls; it takes no closure.
        if self.grad_scale is not None and self._unscaled != self._marks():
            for gradient in self._gradients():
                gradient.div_(self.grad_scale.to(gradient.device))
        try:
            return self._step_if_finite()
        except BaseException:  # of a hook of the script's, say, and the step is taken once more
            self._unscaled = self._marks()
            del self.grad_scale, self.found_inf  # as the scaler does after a step
            raise

    def _marks(self) -> list[tuple[int, int]]:
        """Return what changes where other gradients take the place of these, or something is done to them."""
        return [(id(grad), at) for grad, at in map(_mark, params_of([self]))]

    def _step_if_finite(self) -> None:
        """Take a step whose update is skipped if a gradient is not finite."""
        raise NotImplementedError

    def _gradients(self) -> list[torch.Tensor]:
        return [param.grad for param in params_of([self]) if param.grad is not None]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surround backwards that only accumulate: they send nothing, and the first one outside sends everything."""
        worker = cast(AveragingStepper, self._stepper())
        before = worker.set_synchronized(False)
        try:
            yield
        finally:
            worker.set_synchronized(before)
