"""Gradients, between the backward and the step."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import utils

from habits.habit import ALL, DIM, ROWS, Script, Section, halve, one_at_a_time

SECTION = Section("Gradients")
as_in_torch, differs, refused = SECTION.as_in_torch, SECTION.differs, SECTION.refused


# ---------------------------------------------------------------- clipping


@as_in_torch("`clip_grad_norm_`, any `norm_type`, `foreach` or not", everywhere=True)
def _(s: Script) -> Any:
    norms = []
    for kind in (2.0, 1.0, float("inf"), 3.0):
        for foreach in (None, True, False):
            s.backward()
            norms.append(utils.clip_grad_norm_(s.params, 0.05, norm_type=kind, foreach=foreach))
            s.optimizer.step()
    return norms


@as_in_torch("`clip_grad_norm_` of a table's weight alone, or of a generator")
def _(s: Script) -> Any:
    s.backward()
    norms = [utils.clip_grad_norm_(s.weight, 0.01), utils.clip_grad_norm_(s.model.parameters(), 0.01)]
    s.optimizer.step()
    return norms


@as_in_torch("`clip_grad_norm_(…, error_if_nonfinite=True)`", raises=RuntimeError)
def _(s: Script) -> Any:
    s.backward()
    s.model.out.weight.grad.fill_(float("nan"))
    utils.clip_grad_norm_(s.params, 1.0, error_if_nonfinite=True)


@as_in_torch("`clip_grad_norm_(…, error_if_nonfinite=True)` where only rows are infinite", raises=RuntimeError)
def _(s: Script) -> Any:
    s.optimizer.zero_grad()
    (s.model.table(ALL).sum() * float("inf")).backward()
    utils.clip_grad_norm_(s.params, 1.0, error_if_nonfinite=True)


@as_in_torch("`clip_grad_value_`, `foreach` or not", everywhere=True)
def _(s: Script) -> None:
    for foreach in (None, True, False):
        s.backward()
        utils.clip_grad_value_(s.params, 0.002, foreach=foreach)
        s.optimizer.step()


@as_in_torch("`get_total_norm` and `clip_grads_with_norm_`")
def _(s: Script) -> Any:
    s.backward()
    total = utils.get_total_norm([p.grad for p in s.params])
    utils.clip_grads_with_norm_(s.params, 0.01, total)
    s.optimizer.step()
    return total


@as_in_torch("clipping in a step pre-hook")
def _(s: Script) -> None:
    s.optimizer.register_step_pre_hook(lambda *_: utils.clip_grad_norm_(s.params, 0.01) and None)
    s.step(2)


@as_in_torch("clipping in a step pre-hook, with `minimize`")
def _(s: Script) -> None:
    s.optimizer.register_step_pre_hook(lambda *_: utils.clip_grad_norm_(s.params, 0.01) and None)
    if s.remote:
        s.optimizer.minimize(s.loss())
    else:
        s.step()


# ---------------------------------------------------------------- looked at


@as_in_torch("`all(p.grad.isfinite().all() for p in …)`, `isnan`, `isinf`")
def _(s: Script) -> Any:
    s.backward()
    found = [bool(getattr(p.grad, test)().all()) for test in ("isfinite", "isnan", "isinf") for p in s.params]
    found += [bool(getattr(torch, test)(p.grad).any()) for test in ("isfinite", "isnan", "isinf") for p in s.params]
    s.optimizer.zero_grad()
    (s.model.table(ALL[:3]).sum() * float("inf")).backward()
    found += [bool(s.weight.grad.isfinite().all()), bool(s.weight.grad.isinf().any())]
    return found


@as_in_torch("norms of `p.grad`: `norm()`, `torch.linalg.vector_norm`, `torch._foreach_norm`")
def _(s: Script) -> Any:
    s.backward()
    grads = [p.grad for p in s.params]
    return [
        *(g.norm() for g in grads),
        *(g.data.norm(2).item() for g in grads),
        *(g.norm(p=1) for g in grads),
        *(torch.norm(g, float("inf")) for g in grads),
        *(torch.linalg.vector_norm(g) for g in grads),
        *torch._foreach_norm(grads),
        torch.norm(torch.stack([torch.norm(g.detach(), 2.0) for g in grads]), 2.0),
    ]


@as_in_torch("figures of `p.grad`: `sum`, `mean`, `std`, `var`, `abs().max()`, `min`, `square().sum()`")
def _(s: Script) -> Any:
    s.backward()
    found = []
    for p in s.params:
        g = p.grad
        found += [g.sum(), g.mean(), g.std(), g.var(), g.abs().max(), g.min(), g.square().sum(), (g * g).sum()]
        found += [g.abs().mean().item(), g.max().item(), (g != 0).sum(), g.pow(2).sum().sqrt(), float(g.abs().sum())]
    return found


@as_in_torch("`p.grad`'s shape, type, device, `numel`, `is_leaf`, `requires_grad`")
def _(s: Script) -> Any:
    s.backward()
    found: list[Any] = []
    for p in s.params:
        g = p.grad
        found += [list(g.shape), list(g.size()), g.dtype, str(g.device), g.numel(), g.dim(), g.is_leaf]
        found += [g.requires_grad, len(g), g.ndim, g.shape == p.shape, g.element_size()]
    return found


@as_in_torch("`p.grad` is None before a backward and after `zero_grad()`, and the same object until then")
def _(s: Script) -> Any:
    found = [p.grad is None for p in s.params]
    s.optimizer.zero_grad()
    found += [p.grad is None for p in s.params]
    s.backward()
    found += [p.grad is not None and p.grad is p.grad for p in s.params]
    before = s.weight.grad
    s.loss().backward()
    return [*found, before is s.weight.grad]


@as_in_torch(
    "`zero_grad(set_to_none=False)`, `model.zero_grad()`, `p.grad.zero_()`, `p.grad.detach_()`",
    everywhere=True,
    not_in=("all-reduce",),  # whose gradients are views, which torch does not detach in place
)
def _(s: Script) -> Any:
    found = []
    for zero in (
        lambda: s.optimizer.zero_grad(set_to_none=False),
        lambda: s.model.zero_grad(set_to_none=False),
        lambda: [p.grad.detach_().zero_() for p in s.params],
        lambda: torch._foreach_zero_([p.grad for p in s.params]),
        lambda: [p.grad.data.fill_(0) for p in s.params],
        lambda: s.model.zero_grad(),
    ):
        s.backward()
        zero()
        found.append([p.grad is None or float(p.grad.abs().sum()) for p in s.params])
        s.loss().backward()
        s.optimizer.step()
    return found


@as_in_torch("`p.grad` printed")
def _(s: Script) -> Any:
    s.backward()
    return [bool(repr(p.grad)) and bool(f"{p.grad}") for p in s.params]


@refused("`p.grad.numpy()` of a table's weight", "to_dense")
def _(s: Script) -> Any:
    s.backward()
    return s.weight.grad.detach().cpu().numpy()


@as_in_torch("`p.grad` to `tolist`, `to_dense().numpy()`, `cpu`, `view(-1)`, `flatten`, `reshape`, `torch.cat` of all")
def _(s: Script) -> Any:
    s.backward()
    grads = [p.grad for p in s.params]
    return [
        torch.cat([g.view(-1) for g in grads]),
        torch.cat([g.flatten() for g in grads]),
        torch.cat([g.detach().reshape(-1) for g in grads]),
        utils.parameters_to_vector(grads),
        [torch.from_numpy((g.to_dense() if g.is_sparse else g).cpu().numpy().copy()) for g in grads],
        [g.tolist() for g in grads],
        torch.nn.functional.cosine_similarity(grads[0].flatten(), grads[0].flatten() + 1, dim=0),
    ]


@as_in_torch("`p.grad[rows]`, iteration over `p.grad`, comparisons")
def _(s: Script) -> Any:
    s.backward()
    g = s.weight.grad
    return [g[3], g[:5], g[ALL[2:4]], g[:, 1], [row.sum() for row in g], g > 0, (g == 0).all(1), torch.equal(g, g)]


@as_in_torch("`torch.save` and `copy.deepcopy` of `p.grad`")
def _(s: Script) -> Any:
    s.backward()
    file = io.BytesIO()
    torch.save([p.grad for p in s.params], file)
    file.seek(0)
    return [torch.load(file, weights_only=False), copy.deepcopy([p.grad for p in s.params])]


# ---------------------------------------------------------------- changed


@as_in_torch("`p.grad.mul_(0.5)`, `div_`, `/=`, `neg_`, `clamp_`, `nan_to_num_`, `sign_`", everywhere=True)
def _(s: Script) -> None:
    def halve(p: Any) -> None:
        p.grad /= 2

    for change in (
        lambda p: p.grad.mul_(0.5),
        lambda p: p.grad.div_(3),
        halve,
        lambda p: p.grad.neg_(),
        lambda p: p.grad.clamp_(-0.001, 0.001),
        lambda p: p.grad.clamp_(min=-0.001),
        lambda p: p.grad.nan_to_num_(0.0),
        lambda p: torch.nan_to_num(p.grad, out=p.grad),
        lambda p: p.grad.sign_(),
        lambda p: p.grad.data.mul_(0.5),
        lambda p: p.grad.detach().mul_(0.5),
        lambda p: p.grad.copy_(p.grad * 2),
        lambda p: p.grad.mul_(torch.tensor(0.5)),
        lambda p: p.grad.pow_(2),
    ):
        s.backward()
        for p in s.params:
            change(p)
        s.optimizer.step()


@as_in_torch("`torch._foreach_mul_([p.grad …], 0.5)`, `_foreach_div_`, `_foreach_clamp_max_`")
def _(s: Script) -> None:
    for change in (
        lambda grads: torch._foreach_mul_(grads, 0.5),
        lambda grads: torch._foreach_mul_(grads, torch.tensor(0.5)),
        lambda grads: torch._foreach_div_(grads, 2.0),
        lambda grads: torch._foreach_clamp_max_(grads, 0.001),
        lambda grads: torch._foreach_neg_(grads),
        lambda grads: torch._foreach_add_(grads, [p.detach() for p in s.params], alpha=0.01),
    ):
        s.backward()
        change([p.grad for p in s.params])
        s.optimizer.step()


@as_in_torch("`p.grad = p.grad / 2`, `.clone()`, a dense tensor, zeros, None", everywhere=True, not_in=("dc-asgd",))
def _(s: Script) -> None:
    for change in (
        lambda p: p.grad / 2,
        lambda p: p.grad.clone(),
        lambda p: p.grad.detach().clone() * 0.1,
        lambda p: p.grad.sign(),
        lambda p: torch.full_like(p, 0.25),
        lambda p: torch.ones(p.shape),
        lambda p: torch.zeros_like(p),
        lambda p: None,
        lambda p: p.grad.to_dense() if p.grad.is_sparse else p.grad,
    ):
        s.backward()
        for p in s.params:
            p.grad = change(p)
        s.optimizer.step()


@as_in_torch("`p.grad` assigned without any backward", everywhere=True, not_in=("dc-asgd",))
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    for p in s.params:
        p.grad = torch.full_like(p, 0.125)
    s.optimizer.step()


@as_in_torch("a sparse tensor assigned to `p.grad` of a table", sparse=True)
def _(s: Script) -> None:
    s.backward()
    s.weight.grad = torch.sparse_coo_tensor(torch.tensor([[3, 3, 7]]), torch.ones(3, DIM), (ROWS, DIM))
    s.optimizer.step()


@as_in_torch("`p.grad = p.grad.to_dense().to_sparse()`: single numbers instead of rows")
def _(s: Script) -> Any:
    s.backward()
    s.weight.grad = (s.weight.grad * 0.5).to_dense().to_sparse()
    found = s.weight.grad.to_dense()
    s.optimizer.step()
    return found


@as_in_torch("a gradient assigned before anything was looked up", before=None, everywhere=True)
def _(s: Script) -> None:
    s.begin()
    for p in s.params:
        p.grad = torch.full(p.shape, 0.5)
    s.optimizer.step()


@as_in_torch("a gradient of the wrong shape assigned", raises=RuntimeError)
def _(s: Script) -> None:
    s.weight.grad = torch.ones(3, DIM)


@as_in_torch("gradient noise: `p.grad.add_(noise)`, `p.grad += …`, `add_(p, alpha=decay)`")
def _(s: Script) -> None:
    generator = torch.Generator().manual_seed(1)

    def noise(p: Any) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator) * 0.01

    def weight_decay(p: Any) -> None:
        p.grad += 0.01 * p.detach()

    for change in (
        lambda p: p.grad.add_(noise(p)),
        lambda p: p.grad.data.add_(noise(p)),
        weight_decay,
        lambda p: p.grad.add_(p.data, alpha=0.01),
        lambda p: p.grad.sub_(0.001),
    ):
        s.backward()
        for p in s.params:
            change(p)
        s.optimizer.step()


@as_in_torch("gradient centralisation: `p.grad.sub_(p.grad.mean(1, keepdim=True))`")
def _(s: Script) -> None:
    s.backward()
    for p in s.params:
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))
    s.optimizer.step()


@as_in_torch("rows of a gradient masked: `weight.grad[:5] = 0`, `weight.grad[ids] *= 0`, `masked_fill_`")
def _(s: Script) -> None:
    def times(g: Any) -> None:
        g[ALL[3:9]] *= 0.5

    for change in (
        lambda g: g.__setitem__(slice(0, 5), 0),
        times,
        lambda g: g.masked_fill_((ALL % 2 == 0)[:, None], 0.0),
        lambda g: g.data.__setitem__(2, 0.0),
        lambda g: g.mul_((ALL % 2 == 0).float()[:, None]),
    ):
        s.backward()
        change(s.weight.grad)
        s.optimizer.step()


@as_in_torch("`F.hardtanh(p.grad, -c, c, inplace=True)`, `threshold`, `relu`, `dropout`", everywhere=True)
def _(s: Script) -> None:
    def without(g: Any) -> None:
        with one_at_a_time, torch.random.fork_rng():
            torch.manual_seed(int(g.numel()))
            F.dropout(g, 0.3, True, inplace=True)

    for change in (
        lambda g: F.hardtanh(g, -0.001, 0.001, inplace=True),
        lambda g: F.threshold(g, 0.001, 0.0, inplace=True),
        lambda g: F.threshold(g, 0.001, -0.1, inplace=True),
        lambda g: F.relu(g, inplace=True).mul_(2),
        lambda g: torch.nn.ReLU6(inplace=True)(g),
        without,
    ):
        s.backward()
        for p in s.params:
            change(p.grad)
        s.optimizer.step()


@as_in_torch("`torch.mul(g, 2, out=p.grad)`, `torch.ops.aten.mul_`, operators of one's own, for `p.grad`")
def _(s: Script) -> Any:
    found = []
    for change in (
        lambda g: torch.mul(g, 2, out=g),
        lambda g: torch.mul(torch.ones(g.shape), 0.01, out=g),
        lambda g: torch.ops.aten.mul_.Scalar(g, 0.1),
        lambda g: torch.ops.aten.mul_(g, 0.1),
        lambda g: torch.ops.aten.add.out(g, g, out=g),
        halve,
        torch.ops.habits.halve,
        lambda g: torch._foreach_mul_(self=[g], scalar=0.5),
        lambda g: torch.ops.aten._foreach_mul_.Scalar([g], 0.5),
    ):
        s.backward()
        for p in s.params:
            found.append(change(p.grad) is p.grad)
        s.optimizer.step()
    return found


@as_in_torch("`torch._amp_foreach_non_finite_check_and_unscale_([p.grad …], …)`")
def _(s: Script) -> Any:
    s.backward()
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in s.params], found, torch.tensor(0.1))
    s.optimizer.step()
    return found


@as_in_torch("numbers masked: `g[g.isnan()] = 0`, `g[g.abs() < c] = 0`, `g.masked_fill_(…)`, `g.mul_(g.abs() > c)`")
def _(s: Script) -> None:
    def times(g: Any) -> None:
        g *= g.abs() > 0.001

    for change in (
        lambda g: g.__setitem__(torch.isnan(g), 0),
        lambda g: g.__setitem__(g.abs() < 0.001, 0),
        lambda g: g.__setitem__(g.abs() < 0.001, 0.002),
        lambda g: g.__setitem__(~torch.isfinite(g), 0),
        lambda g: g.__setitem__(g > 0.001, g[g > 0.001] * 2),
        lambda g: g.masked_fill_(g.isnan() | (g > 0.001), 0.0),
        lambda g: g.masked_fill_(g <= 0, 0.01),
        lambda g: g.mul_(g.abs() >= 0.001),
        lambda g: g.copy_(torch.where(g > 0, torch.zeros(()), g)),
        lambda g: g.copy_((g > 0) * g),
        lambda g: g.copy_(g * (g > 0)),
        lambda g: g.add_(g > 0, alpha=0.1),
        times,
    ):
        s.backward()
        for p in s.params:
            change(p.grad)
        s.optimizer.step()


@as_in_torch("masks of `p.grad`: combined, counted, compared, indexed with, changed, taken for numbers")
def _(s: Script) -> Any:
    s.backward()
    found: list[Any] = []
    for p in s.params:
        g = p.grad
        mask = g > 0
        kept, alias = mask.clone(), mask.view(-1)
        found += [isinstance(mask, torch.Tensor), len(mask), list(mask.shape), mask.dtype, mask.numel(), mask.tolist()]
        found += [mask & (g < 1), mask | g.isnan(), ~mask ^ mask, torch.logical_and(mask, g < 1), mask == (g > 0)]
        found += [mask.sum(), torch.count_nonzero(g != 0), (mask & (g < 1)).any(), (~mask).all(), mask.all(0)]
        found += [(g != 0).float().mean(), g.isnan() + 0, 1 - mask.float(), -mask.int(), mask * g, g * mask]
        found += [torch.where(mask, g, 0.0), torch.where(mask, 0.0, g), torch.where(g.isnan(), 0.0, g), g[mask]]
        found += [torch.ones(g.shape)[mask], torch.masked_select(g, mask), p.detach()[mask], mask.nonzero(), mask[0]]
        found += [torch.from_numpy(mask.numpy().copy()), str(mask), torch.stack([mask, ~mask]), bool(mask.any())]
        g.mul_(2).add_(0.5)
        found += [mask.clone(), torch.equal(mask, kept), mask & (g > 0)]  # a mask is of what was
        mask[0] = True
        mask &= g > 0.51
        mask.logical_not_()
        found += [mask, alias, mask.any(), mask | (g > 0.6), mask in {mask}]
        g[mask] = 0.0
    s.optimizer.step()
    return found


@refused("a gradient changed in place while it has a graph: `weight.grad.mul_(2)`", "which has a graph")
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    s.loss().backward(create_graph=True)
    s.weight.grad.mul_(2)


@refused("a gradient given another shape in place: `weight.grad.t_()`", "gradient of the table .* another shape")
def _(s: Script) -> None:
    s.backward()
    s.weight.grad.t_()


@refused("a part of a gradient written into: `weight.grad[4:8].mul_(0)`", "inference tensor")
def _(s: Script) -> None:
    s.backward()
    s.weight.grad[4:8].mul_(0.0)


@as_in_torch("gradients kept and put back: `saved = [p.grad.clone() …]`, `p.grad = g`, `p.grad.copy_(g)`")
def _(s: Script) -> None:
    s.backward()
    saved = [p.grad.clone() for p in s.params]
    s.backward()
    for p, g in zip(s.params, saved, strict=True):
        p.grad = (p.grad + g) / 2
    s.optimizer.step()
    s.backward()
    for p, g in zip(s.params, saved, strict=True):
        p.grad.copy_(g)
    s.optimizer.step()


@as_in_torch("PCGrad and the like: gradients of several losses projected on one another")
def _(s: Script) -> None:
    grads = []
    for _ in range(2):
        s.backward()
        grads.append([p.grad.clone() for p in s.params])
    for p, a, b in zip(s.params, *grads, strict=True):
        product = (a * b).sum()
        p.grad = a - torch.where(product < 0, product / (b * b).sum(), torch.tensor(0.0)) * b + b
    s.optimizer.step()


# ---------------------------------------------------------------- accumulated


@as_in_torch("gradients accumulated over several backwards, and averaged", everywhere=True)
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    for _ in range(3):
        (s.loss() / 3).backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    for _ in range(2):
        s.loss().backward()
    for p in s.params:
        p.grad /= 2
    s.optimizer.step()


@as_in_torch("gradients accumulated of batches of which some are empty, the first one too", everywhere=True)
def _(s: Script) -> None:
    for counts in ((0, 2, 3), (0, 0, 1), (2, 0, 0, 1), (0, 1, 0), (0,), (0, 0)):
        s.optimizer.zero_grad()
        for count in counts:
            ids, _ = s.batch()
            s.table(ids[:count]).square().sum().backward()
        s.optimizer.step()
        if not any(counts):
            s.table(ids).sum().backward()  # on top of what has been stepped on
            s.optimizer.step()


@as_in_torch("two steps on one gradient; a step without any gradient", everywhere=True)
def _(s: Script) -> None:
    s.backward()
    s.optimizer.step()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.optimizer.step()


@as_in_torch("a step without `zero_grad()` after it", everywhere=True)
def _(s: Script) -> None:
    for _ in range(3):
        s.loss().backward()
        s.optimizer.step()


@as_in_torch("a loss that some parameters, or the table, have no part in")
def _(s: Script) -> Any:
    s.optimizer.zero_grad()
    s.model.out.weight.sum().backward()
    found = [p.grad is None for p in s.params]
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.model.table(ALL[:4]).sum().backward()
    found += [p.grad is None for p in s.params]
    s.optimizer.step()
    return found


@as_in_torch("a batch that is skipped: no `step()` after its backward", everywhere=True)
def _(s: Script) -> None:
    s.backward()
    s.backward()
    s.optimizer.step()
    s.backward()
    s.optimizer.zero_grad()


# ---------------------------------------------------------------- hooks


@as_in_torch("`weight.register_hook` that looks, that returns another gradient; removed again", everywhere=True)
def _(s: Script) -> Any:
    seen: list[Any] = []
    handles = [p.register_hook(lambda g: seen.append(float(g.abs().sum()))) for p in s.params]
    handles += [p.register_hook(lambda g: g * 0.5) for p in s.params]
    s.step(2)
    for handle in handles:
        handle.remove()
    s.step()
    return seen


@as_in_torch("`weight.register_hook(lambda g: g.clamp(-c, c))`, a mask, zeros")
def _(s: Script) -> None:
    for hook in (
        lambda g: g.clamp(-0.001, 0.001),
        lambda g: torch.zeros_like(g),
        lambda g: g * (ALL < 10).float()[:, None],
        lambda g: torch.clamp(g, max=0.001),
        lambda g: torch.nn.functional.normalize(g, dim=1),
    ):
        handle = s.weight.register_hook(hook)
        s.step()
        handle.remove()


@as_in_torch("`register_post_accumulate_grad_hook` that looks and that scales", everywhere=True)
def _(s: Script) -> Any:
    seen = []

    def hook(p: torch.Tensor) -> None:
        assert p.grad is not None
        seen.append((list(p.shape), float(p.grad.abs().sum())))
        p.grad.mul_(0.5)

    handles = [p.register_post_accumulate_grad_hook(hook) for p in s.params]
    s.backward()
    s.loss().backward()
    s.optimizer.step()
    for handle in handles:
        handle.remove()
    return sorted(seen)


@as_in_torch("hooks of backwards with `minimize`")
def _(s: Script) -> None:
    def halve(p: Any) -> None:
        p.grad.mul_(0.5)

    for p in s.params:
        p.register_hook(lambda g: g * 0.5)
        p.register_post_accumulate_grad_hook(halve)
    for _ in range(2):
        if s.remote:
            s.optimizer.minimize(s.loss())
        else:
            s.step()


@as_in_torch("hooks on a look-up's result: `rows.register_hook`, `rows.retain_grad()`")
def _(s: Script) -> Any:
    s.optimizer.zero_grad()
    rows = s.model.table(ALL[:6])
    rows.register_hook(lambda g: g * 2)
    rows.retain_grad()
    (rows * torch.arange(6.0)[:, None]).sum().backward()
    s.optimizer.step()
    return [rows.grad, rows.requires_grad, rows.is_leaf]


@as_in_torch("`torch.autograd.graph.Node` hooks and `register_multi_grad_hook` over all parameters")
def _(s: Script) -> Any:
    seen: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        s.params, lambda grads: seen.append([g is None or float(g.abs().sum()) for g in grads])
    )
    s.step(2)
    handle.remove()
    return seen


# ---------------------------------------------------------------- frozen


@as_in_torch("`requires_grad_(False)` for the table, or for dense layers, and back, while training", everywhere=True)
def _(s: Script) -> Any:
    found = []
    for part in (s.model.table, s.model.hidden, s.model):
        part.requires_grad_(False)
        found.append([p.requires_grad for p in s.params])
        if part is not s.model:
            s.step(2)
        part.requires_grad_(True)
        s.step()
    return found


@as_in_torch("frozen after a backward: the gradient that is there counts")
def _(s: Script) -> None:
    s.backward()
    for p in s.params:
        p.requires_grad = False
    s.optimizer.step()
    for p in s.params:
        p.requires_grad = True


@as_in_torch("`torch.no_grad()`, `inference_mode`, `set_grad_enabled(False)` around forwards", everywhere=True)
def _(s: Script) -> Any:
    found = []
    for context in (torch.no_grad(), torch.inference_mode(), torch.set_grad_enabled(False)):
        with context:
            found.append(s.loss())
    torch.set_grad_enabled(True)
    with torch.no_grad(), torch.enable_grad():
        s.optimizer.zero_grad()
        s.loss().backward()
    s.optimizer.step()
    return found


@as_in_torch("`rows.detach()`: a loss that stops at the table")
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    ids, target = s.batch()
    rows = s.model.table(ids).detach().flatten(1)
    (s.model.out(torch.tanh(s.model.norm(s.model.hidden(rows)))).squeeze(1) - target).square().mean().backward()
    s.optimizer.step()


# ---------------------------------------------------------------- GradScaler


def scaled(s: Script, *, clip: bool = False, broken: bool = False) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(3):
        s.optimizer.zero_grad()
        loss = s.loss()
        if broken and step == 1:
            loss = loss + s.model.table(ALL[:2]).sum() * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(s.optimizer)
            utils.clip_grad_norm_(s.params, 0.02)
        scaler.step(s.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@as_in_torch("`GradScaler`: `scale`, `step`, `update`", everywhere=True)
def _(s: Script) -> Any:
    return scaled(s)


@as_in_torch("`GradScaler.unscale_` and clipping")
def _(s: Script) -> Any:
    return scaled(s, clip=True)


@as_in_torch("`GradScaler` skips a step whose row gradients are infinite", everywhere=True)
def _(s: Script) -> Any:
    return scaled(s, broken=True)


@as_in_torch("`if not torch.isfinite(loss): continue`")
def _(s: Script) -> Any:
    s.optimizer.zero_grad()
    loss = s.loss() * float("nan")
    if torch.isfinite(loss):
        loss.backward()
        s.optimizer.step()
    return bool(torch.isfinite(loss))


# ---------------------------------------------------------------- what torch itself has for sparse gradients


@as_in_torch("`weight.grad.is_sparse`, `coalesce()`, `indices()`, `values()`, `to_dense()`", sparse=True)
def _(s: Script) -> Any:
    s.backward()
    grad = s.weight.grad
    one = grad.coalesce()
    return [grad.is_sparse, one.indices(), one.values(), grad.to_dense(), grad.sparse_dim(), grad.dense_dim()]
