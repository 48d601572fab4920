"""``torch.autograd``, ``torch.func``, mixed precision, and what records, compiles or exports a model."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import checkpoint

from habits.habit import ALL, DIM, ROWS, Net, Script, Section

SECTION = Section("Graphs")
as_in_torch, differs, refused = SECTION.as_in_torch, SECTION.differs, SECTION.refused

IDS = ALL[:6].view(2, 3)


# ---------------------------------------------------------------- torch.autograd


@as_in_torch("`backward(inputs=[…])`: some parameters, the table's weight alone, all but that", everywhere=True)
def _(s: Script) -> Any:
    found = []
    for inputs in ([s.weight], [p for p in s.params if p is not s.weight], [s.model.out.bias], s.params):
        s.optimizer.zero_grad()
        s.loss().backward(inputs=inputs)
        found.append([p.grad is None for p in s.params])
        s.optimizer.step()
    return found


@as_in_torch("`backward(retain_graph=True)` and a second backward; a second one without it", everywhere=True)
def _(s: Script) -> Any:
    s.optimizer.zero_grad()
    loss = s.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    loss = s.loss()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        return "second time" in str(error)
    return False


@as_in_torch("a gradient penalty: `autograd.grad(out, rows, create_graph=True)`, and its backward", everywhere=True)
def _(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        ids, target = s.batch()
        rows = s.model.table(ids)
        out = s.model.out(torch.tanh(s.model.hidden(rows.flatten(1)))).squeeze(1)
        (g,) = torch.autograd.grad(out.sum(), rows, create_graph=True)
        (F.mse_loss(out, target) + 0.1 * g.square().sum()).backward()
        s.optimizer.step()


@as_in_torch(
    "a gradient penalty over all parameters: `autograd.grad(loss, params, create_graph=True)`", everywhere=True
)
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    loss = s.loss()
    grads = torch.autograd.grad(loss, s.params, create_graph=True)
    (loss + 0.1 * sum(g.square().sum() for g in grads)).backward()
    s.optimizer.step()


@as_in_torch("`loss.backward(create_graph=True)`")
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    s.loss().backward(create_graph=True)
    for p in s.params:
        p.grad = p.grad.detach()
    s.optimizer.step()


@as_in_torch("`autograd.grad(loss, weight)`, `allow_unused=True`, `grad_outputs=`, `is_grads_batched`")
def _(s: Script) -> Any:
    rows = s.model.table(IDS)
    found = [torch.autograd.grad(rows, s.weight, torch.ones_like(rows), retain_graph=True)[0]]
    found += torch.autograd.grad(s.loss(), [s.weight, s.model.out.bias])
    found += torch.autograd.grad(s.model.out.weight.sum(), s.params, allow_unused=True)
    return found


@as_in_torch("`torch.autograd.gradcheck` over all parameters of a deep copy")
def _(s: Script) -> Any:
    model = copy.deepcopy(s.model).double().eval()
    for table in model.modules():
        if hasattr(table, "sparse"):
            table.sparse = False  # torch's check has dense gradients
    return torch.autograd.gradcheck(lambda *_: model(IDS), tuple(model.parameters()))


@refused("`torch.autograd.gradcheck` over a table's weight", "stride 0", make=lambda sparse: Net(sparse).double())
def _(s: Script) -> Any:
    return torch.autograd.gradcheck(lambda weight: weight[:3].square(), (s.weight,))


@as_in_torch("`torch.autograd.detect_anomaly()`, `set_detect_anomaly`")
def _(s: Script) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        s.step(2)


@as_in_torch("`detect_anomaly()` finds a NaN", raises=RuntimeError)
def _(s: Script) -> None:
    with torch.autograd.detect_anomaly():
        s.optimizer.zero_grad()
        (s.model.table(IDS).sum() * 0).sqrt().mul(0).backward()


@as_in_torch("`saved_tensors_hooks`, `save_on_cpu`, `disable_saved_tensors_hooks`")
def _(s: Script) -> None:
    with torch.autograd.graph.save_on_cpu():
        s.step()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        s.step()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        s.step()


@as_in_torch("`torch.autograd.Function` over rows; `torch.autograd.functional.jacobian`, `vjp`, `hessian` of a head")
def _(s: Script) -> Any:
    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return -g

    s.optimizer.zero_grad()
    Flip.apply(s.model.table(IDS)).square().sum().backward()
    s.optimizer.step()
    rows = s.model.table(IDS).detach().flatten(1)
    return [
        torch.autograd.functional.jacobian(lambda r: s.model.hidden(r), rows),
        torch.autograd.functional.hessian(lambda r: s.model.hidden(r).square().sum(), rows),
    ]


@as_in_torch("`torch.autograd.forward_ad`: dual numbers through a model")
def _(s: Script) -> Any:
    import torch.autograd.forward_ad as fwAD

    with fwAD.dual_level():
        rows = s.model.table(IDS).detach().flatten(1)
        dual = fwAD.make_dual(rows, torch.ones_like(rows))
        return fwAD.unpack_dual(s.model.hidden(dual)).tangent


@as_in_torch("backwards of several threads")
def _(s: Script) -> None:
    import threading

    s.optimizer.zero_grad()
    losses = [s.loss() for _ in range(3)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    s.optimizer.step()


# ---------------------------------------------------------------- activation checkpointing


@as_in_torch("`checkpoint(model, ids, use_reentrant=False)`, and of a part with the table in it", everywhere=True)
def _(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        s.loss(lambda ids: checkpoint.checkpoint(s.model, ids, use_reentrant=False)).backward()
        s.optimizer.step()


@as_in_torch("`checkpoint(…, use_reentrant=True)`")
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    anchor = torch.ones(1, requires_grad=True)
    s.loss(
        lambda ids: checkpoint.checkpoint(lambda ids, one: s.model(ids) * one, ids, anchor, use_reentrant=True)
    ).backward()
    s.optimizer.step()


@as_in_torch("`checkpoint_sequential`")
def _(s: Script) -> None:
    whole = torch.nn.Sequential(s.model.table, torch.nn.Flatten(), s.model.hidden, torch.nn.Tanh(), s.model.out)
    s.optimizer.zero_grad()
    checkpoint.checkpoint_sequential(whole, 2, IDS, use_reentrant=False).sum().backward()
    s.optimizer.step()


# ---------------------------------------------------------------- torch.func


@as_in_torch("`functional_call(model, {name: value})`: dense values, and a table's", everywhere=True)
def _(s: Script) -> Any:
    values = {name: torch.full(p.shape, 0.1) for name, p in s.model.named_parameters()}
    s.model.eval()
    found = [
        torch.func.functional_call(s.model, values, (IDS,)),
        torch.func.functional_call(s.model, {"table.weight": values["table.weight"]}, (IDS,)),
        torch.func.functional_call(s.model, {"out.bias": values["out.bias"]}, (IDS,)),
        torch.func.functional_call(s.model, dict(s.model.named_parameters()), (IDS,)),
        s.model(IDS),
    ]
    s.model.train()
    return found


@as_in_torch("MAML: one step by hand on copies of all parameters, `functional_call`, backward to the originals")
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    names = [name for name, _ in s.model.named_parameters()]
    inner = torch.autograd.grad(s.loss(), s.params, create_graph=True)
    moved = {name: p - 0.1 * g for name, p, g in zip(names, s.params, inner, strict=True)}
    ids, target = s.batch()
    F.mse_loss(torch.func.functional_call(s.model, moved, (ids,)), target).backward()
    s.optimizer.step()


@as_in_torch("a value with a gradient of its own in place of the table's weight")
def _(s: Script) -> Any:
    own = torch.full((ROWS, DIM), 0.1, requires_grad=True)
    out = torch.func.functional_call(s.model, {"table.weight": own}, (IDS,))
    s.optimizer.zero_grad()
    out.sum().backward()
    found = [own.grad, s.weight.grad is None]
    s.optimizer.step()
    return found


@as_in_torch("`torch.func.grad` and `grad_and_value` over `{name: p.detach() for name, p in model.named_parameters()}`")
def _(s: Script) -> Any:
    values = {name: p.detach() for name, p in s.model.named_parameters()}
    s.model.eval()

    def loss(values: Any) -> torch.Tensor:
        return torch.func.functional_call(s.model, values, (IDS,)).square().sum()

    found = [torch.func.grad(loss)(values), torch.func.grad_and_value(loss)(values)[1]]
    s.model.train()
    return found


@as_in_torch("the same over the parameters themselves, of which a step is made", everywhere=True)
def _(s: Script) -> Any:
    ids = s.ids(50)
    s.model.eval()

    def inner(values: Any) -> torch.Tensor:
        return torch.func.functional_call(s.model, values, (ids,)).square().sum()

    def outer(values: Any) -> torch.Tensor:
        moved = {name: values[name] - 0.1 * grad for name, grad in torch.func.grad(inner)(values).items()}
        return torch.func.functional_call(s.model, {**moved, "table.weight": values["table.weight"]}, (ids,)).sum()

    found = []
    for loss in (inner, outer):
        grads, value = torch.func.grad_and_value(loss)(dict(s.model.named_parameters()))
        for name, p in s.model.named_parameters():
            p.grad = grads[name].detach()
        s.optimizer.step()
        found.append(value)
    s.model.train()
    return found


def per_sample(s: Script) -> Any:
    values = {name: p.detach() for name, p in s.model.named_parameters()}
    s.model.eval()

    def loss(values: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(s.model, values, (ids[None],)).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, IDS)
    s.model.train()
    return found


@as_in_torch(
    "`vmap(grad(…))` per sample over all parameters, of a table with `sparse=True`: an error",
    sparse=True,
    raises=NotImplementedError,
)
def _(s: Script) -> Any:
    return per_sample(s)


@as_in_torch(
    "`vmap(grad(…))` per sample over all parameters, of a table with `sparse=False`",
    make=lambda sparse: Net(False),
    options={"remote": "all"},
)
def _(s: Script) -> Any:
    return per_sample(s)


@as_in_torch("`jacrev`, `jacfwd`, `hessian`, `vjp`, `jvp` over dense parameters, the table in the forward")
def _(s: Script) -> Any:
    s.model.eval()
    bias = s.model.out.bias.detach()

    def out(bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(s.model, {"out.bias": bias}, (IDS,))

    found = [torch.func.jacrev(out)(bias), torch.func.hessian(lambda b: out(b).square().sum())(bias)]
    found += [torch.func.vjp(out, bias)[0], torch.func.jvp(out, (bias,), (torch.ones(1),))]
    found += [torch.func.jacfwd(out)(bias)]
    s.model.train()
    return found


@as_in_torch("`torch.func.stack_module_state` and an ensemble by `vmap`")
def _(s: Script) -> Any:
    stacked, buffers = torch.func.stack_module_state([s.model, s.model])
    return [{name: value.sum() for name, value in stacked.items()}, sorted(buffers)]


# ---------------------------------------------------------------- mixed precision


@as_in_torch("`torch.autocast('cpu', dtype=torch.bfloat16)` around forward and loss", everywhere=True)
def _(s: Script) -> Any:
    for _ in range(2):
        s.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = s.loss()
        loss.backward()
        s.optimizer.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [s.model.table(IDS).dtype, F.linear(s.model.table(IDS), s.weight).dtype]


# ---------------------------------------------------------------- compiled, traced, exported


@as_in_torch("`torch.compile(model)`, `model.compile()`, and training through it", slow=True)
def _(s: Script) -> None:
    compiled = torch.compile(s.model, backend="eager")
    for _ in range(2):
        s.optimizer.zero_grad()
        s.loss(compiled).backward()
        s.optimizer.step()
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in s.model.state_dict()]
    s.model.compile(backend="eager")
    s.step(2)


@as_in_torch("`torch.compile` of a function that steps", slow=True)
def _(s: Script) -> None:
    @torch.compile(backend="eager")
    def step() -> None:
        s.optimizer.step()

    s.backward()
    step()


@as_in_torch("`torch.compile` of a whole step: forward, backward, clipping and step", everywhere=True, slow=True)
def _(s: Script) -> Any:
    def loss_of(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        s.optimizer.zero_grad()
        loss = F.mse_loss(s.model(ids), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
        s.optimizer.step()
        return loss

    step = torch.compile(loss_of, backend="eager")
    return [step(*s.batch()) for _ in range(4)]


@refused("`torch.jit.trace(model, ids)`", "save_inference_model")
def _(s: Script) -> Any:
    torch.jit.trace(s.model.eval(), (IDS,))


@refused("`torch.jit.script(model)`", "save_inference_model")
def _(s: Script) -> Any:
    torch.jit.script(s.model.eval())


@refused("`torch.export.export(model, (ids,))`", "save_inference_model")
def _(s: Script) -> Any:
    torch.export.export(s.model.eval(), (IDS,))


@as_in_torch("`torch.export.export(copy.deepcopy(model), (ids,))`, saved and loaded")
def _(s: Script) -> Any:
    program = torch.export.export(copy.deepcopy(s.model).eval(), (IDS,))
    file = io.BytesIO()
    torch.export.save(program, file)
    s.step(2)
    file.seek(0)
    return torch.export.load(file).module()(IDS + 1)


@as_in_torch("`torch.jit.trace(copy.deepcopy(model), ids)`")
def _(s: Script) -> Any:
    return torch.jit.trace(copy.deepcopy(s.model).eval(), (IDS,))(IDS + 1)


@as_in_torch("`torch.fx.symbolic_trace(model)`, and training through it")
def _(s: Script) -> Any:
    traced = torch.fx.symbolic_trace(s.model)
    s.optimizer.zero_grad()
    s.loss(traced).backward()
    s.optimizer.step()
    return traced.eval()(IDS + 1)


@as_in_torch("hooks of a table in what `torch.fx` traced, and its nodes, which name the table as a whole")
def _(s: Script) -> Any:
    seen: list[Any] = []
    hook = s.table.register_forward_hook(lambda _, __, rows: seen.append(rows.detach().clone()))
    traced = torch.fx.symbolic_trace(s.model)
    found = [traced.eval()(IDS), copy.deepcopy(traced)(IDS)]
    hook.remove()
    return seen, found, [(node.op, str(node.target)) for node in traced.graph.nodes]


@as_in_torch("the profiler, `FlopCounterMode`, `TorchDispatchMode` and `TorchFunctionMode` around a step")
def _(s: Script) -> Any:
    from torch.overrides import TorchFunctionMode
    from torch.profiler import profile
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    counter = FlopCounterMode(display=False)
    for mode in (profile(), counter, Functions(), Dispatches()):
        with mode:
            s.step()
    return counter.get_total_flops()


@as_in_torch("`torch.set_default_dtype`, `torch.device('cpu')` as a context, `use_deterministic_algorithms`")
def _(s: Script) -> Any:
    with torch.device("cpu"):
        s.step()
    torch.use_deterministic_algorithms(True)
    try:
        s.step()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        return s.model.table(IDS).dtype
    finally:
        torch.set_default_dtype(torch.float32)


@as_in_torch(
    "`torch.set_default_device`, `torch.device(…)` as a context, of another device than the model's", everywhere=True
)
def _(s: Script) -> Any:
    batches = [s.batch() for _ in range(3)]
    torch.set_default_device("meta")  # it stands for a GPU
    try:
        for ids, target in batches:
            s.optimizer.zero_grad()
            F.mse_loss(s.model(ids), target).backward()
            torch.nn.utils.clip_grad_norm_(s.params, 0.5)
            s.optimizer.step()
        kept = copy.deepcopy(s.model.state_dict())
        with torch.no_grad():
            return kept, s.model(batches[0][0])
    finally:
        torch.set_default_device(None)  # type: ignore[arg-type]


@as_in_torch("the random state: `torch.manual_seed` and what it gives around look-ups and steps")
def _(s: Script) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        s.step()
        return torch.rand(3)


@as_in_torch("TensorBoard's `add_histogram(name, p)`; of a table's gradient, of `p.grad.to_dense()`")
def _(s: Script) -> Any:
    import tempfile

    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, contextlib.closing(SummaryWriter(folder)) as writer:
        s.backward()
        for name, p in s.model.named_parameters():
            writer.add_histogram(name, p)
            writer.add_histogram(f"{name}.grad", p.grad.to_dense() if p.grad.is_sparse else p.grad)
    return None


@as_in_torch("`torch.save` of a whole script's state: model, epoch, random state, scheduler")
def _(s: Script) -> Any:
    schedule = torch.optim.lr_scheduler.StepLR(s.optimizer, 1, 0.5)
    s.step()
    schedule.step()
    file = io.BytesIO()
    torch.save({"model": s.model.state_dict(), "epoch": 3, "schedule": schedule.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    s.step()
    s.model.load_state_dict(state["model"])
    schedule.load_state_dict(state["schedule"])
    return [state["epoch"], state["schedule"]["last_epoch"], s.optimizer.param_groups[0]["lr"]]
