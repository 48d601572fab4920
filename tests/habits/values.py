"""Values of parameters and tables: read, used in formulas, edited."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import init, utils

from habits.habit import ALL, DIM, ROWS, Net, Script, Section, halve

SECTION = Section("Values")
as_in_torch, differs, refused = SECTION.as_in_torch, SECTION.differs, SECTION.refused


# ---------------------------------------------------------------- read


@as_in_torch("a weight's shape, `size`, `numel`, `len`, `dim`, dtype, device, `element_size`, `nbytes`, `is_leaf`")
def _(s: Script) -> Any:
    found: list[Any] = [sum(p.numel() for p in s.model.parameters() if p.requires_grad)]
    for p in s.params:
        found += [list(p.shape), list(p.size()), p.size(0), p.numel(), len(p), p.dim(), p.dtype, str(p.device)]
        found += [p.nelement(), p.element_size(), p.nbytes, p.is_leaf, p.requires_grad, p.is_sparse, p.layout]
        found += [p.is_floating_point(), isinstance(p, torch.nn.Parameter), isinstance(p, torch.Tensor), p.is_cpu]
    return found


@as_in_torch(
    "figures of a weight: `norm`, `mean`, `std`, `abs().max()`, `isnan().any()`, `sum`, `item`", everywhere=True
)
def _(s: Script) -> Any:
    found: list[Any] = []
    for p in s.params:
        found += [p.norm(), p.mean(), p.std(), p.abs().max(), p.isnan().any(), p.sum().item(), p.data.norm(2)]
        found += [torch.linalg.vector_norm(p), p.detach().abs().mean(), p.min(), p.max(), p.histc(5), p.square().sum()]
        found += [p.flatten()[:5], p.view(-1)[-3:], torch.count_nonzero(p), p.quantile(0.5)]
    return found


@as_in_torch("a weight to numpy, `tolist`, `cpu()`, `clone()`, `double()`, `half()`, `detach()`, `data`, iteration")
def _(s: Script) -> Any:
    w = s.weight
    return [
        torch.from_numpy(w.detach().numpy().copy()),
        torch.from_numpy(w.detach().cpu().numpy().copy()),
        w.tolist(),
        w.cpu(),
        w.clone(),
        w.double(),
        w.half(),
        w.detach(),
        w.data,
        w.to(torch.bfloat16),
        [row.sum() for row in w],
        torch.tensor([float(x) for x in w[0]]),
    ]


@as_in_torch(
    "rows of a weight: `weight[3]`, `weight[:5]`, `weight[ids]`, `index_select`, `gather`, `weight[3, 1].item()`"
)
def _(s: Script) -> Any:
    w, ids = s.weight, torch.tensor([3, 7, 3])
    return [
        w[3],
        w[:5],
        w[ids],
        w.index_select(0, ids),
        w.gather(0, torch.zeros(2, DIM, dtype=torch.long)),
        w[3, 1].item(),
        w[-1],
        w[ids.tolist()],
        w[w[:, 0] > 0],
        w.data[3],
        w.unbind(0)[2],
        torch.split(w, 5)[1],
        w.narrow(0, 2, 3),
    ]


@as_in_torch("functions of a weight: `weight.T`, `@`, `topk`, `F.normalize`, `cdist`, `cosine_similarity`, `cat`, `==`")
def _(s: Script) -> Any:
    w, query = s.weight, torch.arange(float(DIM))
    return [
        w.T,
        w @ query,
        (w @ w.T).topk(3).indices,
        F.normalize(w),
        torch.cdist(w, w),
        F.cosine_similarity(w, query[None]),
        torch.cat([w, w]),
        w == w,
        torch.stack([w, w]).sum(),
        w.softmax(1),
        torch.einsum("nd,d->n", w, query),
        torch.allclose(w, w),
        w.argmax(1),
        w + 1,
        2 * w,
        w > 0,
        -w,
        w**2,
    ]


@differs("a weight or a model printed", sparse=True)
def _(s: Script) -> Any:
    printed = [repr(s.weight), repr(s.model)]
    if s.remote:
        assert f"{s.weight}" == str(s.weight) == printed[0]
        assert "'table.weight', whose rows are on the servers: (20, 4)" in printed[0]
        assert "_RemoteEmbedding(20, 4, sparse=True)" in printed[1]
    return printed


@as_in_torch("values read in `inference_mode`, and used in a formula that is trained afterwards", everywhere=True)
def _(s: Script) -> Any:
    with torch.inference_mode():
        norms = [s.weight.norm(), (s.weight @ s.weight.T).sum()]
    s.optimizer.zero_grad()
    (s.loss() + 0.1 * s.weight.square().sum()).backward()
    s.optimizer.step()
    return norms


@as_in_torch("values edited in `inference_mode`", everywhere=True, edits=True)
def _(s: Script) -> None:
    with torch.inference_mode():
        for p in s.params:
            p.mul_(0.5)
        s.weight[:2] = 0.25
    s.step()


@as_in_torch("a weight as a key: `id`, `hash`, `in`, `is`, a dict or set of parameters, `weakref`")
def _(s: Script) -> Any:
    import weakref

    first, again = s.params, s.params
    known = {p: place for place, p in enumerate(first)}
    return [
        [a is b for a, b in zip(first, again, strict=True)],
        [known[p] for p in again],
        [id(p) in {id(q) for q in first} for p in again],
        len(set(first) & set(again)),
        [weakref.ref(p)() is p for p in first],
        any(p is s.weight for g in s.optimizer.param_groups for p in g["params"]),
    ]


@as_in_torch("a snapshot of values: `[p.clone() …]`, `[p.data.clone() …]`, `copy.deepcopy(p.data)`, compared later")
def _(s: Script) -> Any:
    before = [p.detach().clone() for p in s.params]
    again = copy.deepcopy([p.data for p in s.params])
    s.step()
    return [(p.detach() - old).abs().sum() for p, old in zip(s.params, before, strict=True)] + again


@as_in_torch("`parameters_to_vector(model.parameters())`")
def _(s: Script) -> Any:
    return utils.parameters_to_vector(s.params)


# ---------------------------------------------------------------- in formulas


def penalised(s: Script, penalty: Any) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        (s.loss() + penalty()).backward()
        s.optimizer.step()


@as_in_torch("an L2 penalty: `loss + c * weight.square().sum()`, of all parameters, `weight.norm()`", everywhere=True)
def _(s: Script) -> None:
    penalised(s, lambda: 1e-2 * s.weight.square().sum())
    penalised(s, lambda: 1e-2 * sum(p.pow(2).sum() for p in s.params))
    penalised(s, lambda: 1e-2 * torch.stack([p.norm(2) for p in s.params]).sum())
    penalised(s, lambda: 1e-2 * (s.weight * s.weight).mean())


@as_in_torch("an L1 penalty, an orthogonality penalty, a proximal term against old values")
def _(s: Script) -> None:
    old = [p.detach().clone() for p in s.params]
    penalised(s, lambda: 1e-3 * sum(p.abs().sum() for p in s.params))
    penalised(s, lambda: 1e-3 * (s.weight.T @ s.weight - torch.eye(DIM)).square().sum())
    penalised(s, lambda: 0.01 * sum((p - q).square().sum() for p, q in zip(s.params, old, strict=True)))


@as_in_torch("a penalty on the rows of a batch alone: `weight[ids].square().sum()`, `table(ids).norm()`")
def _(s: Script) -> None:
    penalised(s, lambda: 1e-2 * s.weight[torch.tensor([1, 2, 2])].square().sum())
    penalised(s, lambda: 1e-2 * s.model.table(torch.tensor([1, 2, 2])).norm())


@as_in_torch("a tied output layer: `F.linear(h, table.weight)`, `h @ table.weight.T`, `matmul`", everywhere=True)
def _(s: Script) -> None:
    def scores(product: Any) -> torch.Tensor:
        hidden = torch.tanh(s.model.table(torch.tensor([1, 5, 9])))
        return F.cross_entropy(product(hidden), torch.tensor([2, 6, 10]))

    for product in (
        lambda h: F.linear(h, s.weight),
        lambda h: h @ s.weight.T,
        lambda h: torch.matmul(h, s.weight.t()),
        lambda h: torch.einsum("bd,nd->bn", h, s.weight),
        lambda h: h.mm(s.weight.transpose(0, 1)),
    ):
        s.optimizer.zero_grad()
        scores(product).backward()
        s.optimizer.step()


@as_in_torch("`F.embedding(ids, table.weight)`, `F.embedding_bag`, `F.one_hot(ids) @ table.weight`", everywhere=True)
def _(s: Script) -> None:
    ids = torch.tensor([[1, 2, 2], [7, 0, 1]])
    for rows in (
        lambda: F.embedding(ids, s.weight),
        lambda: F.embedding_bag(ids, s.weight, mode="sum"),
        lambda: F.one_hot(ids, ROWS).float() @ s.weight,
        lambda: s.weight[ids],
        lambda: s.weight.index_select(0, ids.flatten()),
        lambda: torch.index_select(s.weight, 0, ids.flatten()),
    ):
        s.optimizer.zero_grad()
        rows().square().sum().backward()
        s.optimizer.step()


@as_in_torch("`torch.autograd.grad(loss, params)`, assigned to `.grad`", everywhere=True)
def _(s: Script) -> Any:
    s.optimizer.zero_grad()
    grads = torch.autograd.grad(s.loss(), s.params)
    for p, g in zip(s.params, grads, strict=True):
        p.grad = g
    s.optimizer.step()
    return list(grads)


# ---------------------------------------------------------------- edited


def edit(s: Script, *changes: Any) -> None:
    for change in changes:
        with torch.no_grad():
            for p in s.params:
                change(p)
        s.step()


@as_in_torch("WGAN's `p.data.clamp_(-c, c)`; `clamp_` under `no_grad`", everywhere=True, edits=True)
def _(s: Script) -> None:
    edit(s, lambda p: p.data.clamp_(-0.3, 0.3), lambda p: p.clamp_(-0.2, 0.2), lambda p: torch.clamp_(p, -0.1, 0.1))


@as_in_torch(
    "`zero_()`, `fill_`, `mul_`, `add_`, `sub_`, `div_`, `copy_`, `normal_`, `uniform_` under `no_grad`",
    everywhere=True,
    edits=True,
)
def _(s: Script) -> None:
    generator = torch.Generator().manual_seed(1)
    edit(
        s,
        lambda p: p.zero_(),
        lambda p: p.fill_(0.25),
        lambda p: p.mul_(0.9),
        lambda p: p.add_(torch.ones_like(p), alpha=0.1),
        lambda p: p.sub_(0.01),
        lambda p: p.div_(2),
        lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape)),
        lambda p: p.normal_(0, 0.1, generator=generator),
        lambda p: p.uniform_(-0.1, 0.1, generator=generator),
        lambda p: p.lerp_(torch.ones_like(p), 0.1),
        lambda p: p.addcmul_(p, p, value=0.1),
        lambda p: p.sign_().mul_(0.1),
        lambda p: p.add_(p.new_full(p.shape, 0.5).mul_(0.1)),
    )


@as_in_torch("the same on `p.data` and on `p.detach()`", everywhere=True, edits=True)
def _(s: Script) -> None:
    edit(
        s,
        lambda p: p.data.mul_(0.9),
        lambda p: p.data.fill_(0.2),
        lambda p: p.detach().add_(0.1),
        lambda p: p.data.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape)),
        lambda p: p.data.view(-1)[:3].zero_(),
        lambda p: p.detach().flatten().mul_(0.5),
    )


@as_in_torch("`p.data = p.data * 0.5`, `p.data = tensor`, and back", everywhere=True, edits=True)
def _(s: Script) -> None:
    old = [p.data.clone() for p in s.params]
    for p in s.params:
        p.data = p.data * 0.5
    s.step()
    for p in s.params:
        p.data = torch.linspace(-1, 1, p.numel()).view(p.shape)
    s.step()
    for p, value in zip(s.params, old, strict=True):
        p.data = value


@as_in_torch("`p *= 0.5`, `p -= lr * p.grad` under `no_grad`: a step by hand", everywhere=True, edits=True)
def _(s: Script) -> None:
    for _ in range(2):
        s.backward()
        with torch.no_grad():
            for p in s.params:
                p -= 0.1 * p.grad
                p *= 0.99


@as_in_torch(
    "rows set: `weight[:3] = 7`, `weight[ids] = rows`, `weight.data[0] = …`, `weight[2].zero_()`, `index_copy_`"
)
def _(s: Script) -> None:
    ids = torch.tensor([4, 9])
    for change in (
        lambda w: w.__setitem__(slice(0, 3), 7.0),
        lambda w: w.__setitem__(ids, torch.ones(2, DIM)),
        lambda w: w.data.__setitem__(0, torch.full((DIM,), 0.5)),
        lambda w: w[2].zero_(),
        lambda w: w.index_copy_(0, ids, torch.zeros(2, DIM)),
        lambda w: w.index_fill_(0, ids, 0.5),
        lambda w: w.data[5:8].fill_(0.25),
        lambda w: w.masked_fill_(w > 1, 1.0),
        lambda w: w.index_add_(0, ids, torch.ones(2, DIM)),
        lambda w: w[3:5].mul_(2).add_(1),
        lambda w: w.data.__setitem__((slice(None), 0), 0.0),
        lambda w: w.narrow(0, 1, 2).fill_(0.1),
        lambda w: w.view(-1)[:4].zero_(),
    ):
        with torch.no_grad():
            change(s.weight)
        s.step()


@as_in_torch(
    "`F.relu(p, inplace=True)`, `hardtanh`, `dropout`, `nn.ReLU(inplace=True)(p)`", everywhere=True, edits=True
)
def _(s: Script) -> None:
    def without(p: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(int(p.numel()))
            F.dropout(p, 0.3, True, inplace=True)

    edit(
        s,
        without,
        lambda p: F.hardtanh(p, -0.3, 0.3, inplace=True),
        lambda p: F.threshold(p, -0.2, 0.1, inplace=True),
        lambda p: F.leaky_relu(p, 0.5, inplace=True),
        lambda p: torch.nn.ELU(inplace=True)(p),
        lambda p: torch.nn.ReLU(inplace=True)(p),
    )


@as_in_torch("the same where it is to be trained: an error", raises=RuntimeError)
def _(s: Script) -> None:
    F.relu(s.weight, inplace=True)


@as_in_torch(
    "`F.embedding(ids, weight, max_norm=0.5)`, `F.embedding_bag(…)`: rows renormalised",
    everywhere=True,
    edits=True,
    not_in=("dc-asgd",),  # an edit before the step of the same batch
)
def _(s: Script) -> None:
    ids = torch.tensor([[1, 2, 2], [7, 0, 1]])
    for rows in (
        lambda: F.embedding(ids, s.weight, max_norm=0.5),
        lambda: F.embedding_bag(ids + 3, s.weight, max_norm=0.4, mode="sum"),
    ):
        s.optimizer.zero_grad()
        rows().square().sum().backward()
        s.optimizer.step()
    with torch.no_grad():
        F.embedding(ids + 9, s.weight, max_norm=0.3)


@as_in_torch("`torch.mul(a, 2, out=p)`, `torch.ops.aten.mul_`, operators of one's own", everywhere=True, edits=True)
def _(s: Script) -> None:
    edit(
        s,
        lambda p: torch.mul(torch.full(p.shape, 0.1), 2, out=p),
        lambda p: torch.ops.aten.add_.Scalar(p, 0.1),
        lambda p: torch.ops.aten.mul_(p, 0.9),
        lambda p: torch.ops.aten.add.out(p, torch.ones(p.shape), out=p),
        halve,
        torch.ops.habits.halve,
        torch.ops.habits.halve.default,
    )


@refused("a weight given another shape in place: `weight.t_()`, `weight.resize_(3, 4)`", "another shape or memory")
def _(s: Script) -> None:
    with torch.no_grad():
        s.weight.t_()


@as_in_torch("`nn.init.*_` on dense parameters and on a table's weight", everywhere=True, edits=True)
def _(s: Script) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in s.params:
        init.constant_(p, 0.1)
    s.step()
    for p in s.params:
        if p.dim() > 1:
            init.xavier_uniform_(p, generator=generator)
            s.step()
            init.kaiming_normal_(p, generator=generator)
        else:
            init.zeros_(p)
    s.step()
    init.normal_(s.weight, std=0.01, generator=generator)
    s.step()
    init.trunc_normal_(s.weight, std=0.01, generator=generator)
    init.orthogonal_(s.model.hidden.weight, generator=generator)
    init.eye_(s.weight)


@as_in_torch("`model.apply(init_weights)`, `reset_parameters()` of each layer")
def _(s: Script) -> None:
    def initialise(module: Any) -> None:
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            with torch.no_grad():
                module.weight.fill_(0.05)

    s.model.apply(initialise)
    s.step()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for module in s.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


@as_in_torch(
    "`weight.data.renorm_(2, 0, 1)`, rows normalised: `weight.data = F.normalize(weight.data)`, `weight.div_(norm)`"
)
def _(s: Script) -> None:
    s.weight.data.renorm_(2, 0, 0.5)
    s.step()
    s.weight.data = F.normalize(s.weight.data, dim=1)
    s.step()
    with torch.no_grad():
        s.weight.div_(s.weight.norm(dim=1, keepdim=True))
        s.weight.copy_(torch.renorm(s.weight, 2, 0, 0.7))


@as_in_torch("`torch._foreach_mul_(params, 0.5)`, `_foreach_copy_`, `_foreach_lerp_`", everywhere=True, edits=True)
def _(s: Script) -> None:
    with torch.no_grad():
        torch._foreach_mul_(s.params, 0.5)
    s.step()
    new = [torch.linspace(-1, 1, p.numel()).view(p.shape) for p in s.params]
    with torch.no_grad():
        torch._foreach_copy_(s.params, new)
    s.step()
    with torch.no_grad():
        torch._foreach_lerp_(s.params, new, 0.1)


@as_in_torch("`vector_to_parameters(vector * 0.5, model.parameters())`", everywhere=True, edits=True)
def _(s: Script) -> None:
    utils.vector_to_parameters(utils.parameters_to_vector(s.params).detach() * 0.5, s.params)


@as_in_torch("values written through numpy: `p.detach().numpy()[…] = …`, `p.data.numpy()`")
def _(s: Script) -> None:
    for p in s.params:
        p.detach().numpy()[...] *= 0.5
    s.step()
    array = s.weight.data.numpy()
    array[2:4] = 1.0


@as_in_torch("a handle on values kept, and written through later: `d = p.data; …; d.mul_(0.5)`")
def _(s: Script) -> None:
    kept = [p.data for p in s.params]
    s.step()
    for each in kept:
        each.mul_(0.5)


@as_in_torch(
    "a look through such a handle after a step",
)
def _(s: Script) -> Any:
    kept = [p.data for p in s.params]
    s.step()
    return kept


@as_in_torch(
    "an edit between a forward and its step, and between a backward and its step",
    everywhere=True,
    edits=True,
    not_in=("dc-asgd",),
)
def _(s: Script) -> None:
    s.backward()
    with torch.no_grad():
        for p in s.params:
            p.data.mul_(0.5)
    s.optimizer.step()
    s.optimizer.zero_grad()
    loss = s.loss()
    for p in s.params:
        p.data.add_(0.01)
    loss.backward()
    s.optimizer.step()


@as_in_torch("an edit of a value that a backward still needs", raises=RuntimeError)
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    loss = s.loss()
    with torch.no_grad():
        s.model.out.weight.mul_(2)
    loss.backward()


@as_in_torch("an edit in place where autograd records: `weight.mul_(2)`", raises=RuntimeError)
def _(s: Script) -> None:
    s.weight.mul_(2)


@as_in_torch("SAM: a step up the gradient, a second backward, the step back", everywhere=True, edits=True)
def _(s: Script) -> None:
    for _ in range(2):
        s.backward()
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in s.params]), p=2)
        moves = []
        with torch.no_grad():
            for p in s.params:
                moves.append(p.grad * (0.05 / (norm + 1e-12)))
                p.add_(moves[-1])
        s.optimizer.zero_grad()
        s.taken -= 1
        s.loss().backward()
        with torch.no_grad():
            for p, move in zip(s.params, moves, strict=True):
                p.sub_(move)
        s.optimizer.step()


@as_in_torch(
    "FGM: embeddings moved up their gradient, a second backward, put back",
    everywhere=True,
    edits=True,
    not_in=("dc-asgd",),
)
def _(s: Script) -> None:
    for _ in range(2):
        s.backward()
        backup = s.weight.data.clone()
        norm = torch.norm(s.weight.grad)
        assert norm != 0
        assert not torch.isnan(norm)
        s.weight.data.add_(0.5 * s.weight.grad / norm)
        s.taken -= 1
        s.loss().backward()
        s.weight.data = backup
        s.optimizer.step()


@as_in_torch("an exponential mean kept by hand: `e.mul_(d).add_(p, alpha=1-d)`, swapped in and out for evaluation")
def _(s: Script) -> Any:
    means = [p.detach().clone() for p in s.params]
    for _ in range(2):
        s.step()
        with torch.no_grad():
            for e, p in zip(means, s.params, strict=True):
                e.mul_(0.9).add_(p, alpha=0.1)
    backup = [p.data.clone() for p in s.params]
    for p, e in zip(s.params, means, strict=True):
        p.data.copy_(e)
    s.model.eval()
    with torch.no_grad():
        found = s.model(ALL[:6].view(2, 3))
    s.model.train()
    for p, old in zip(s.params, backup, strict=True):
        p.data.copy_(old)
    return [found, *means]


@as_in_torch("Lookahead: slow weights, to which the fast ones are set back", everywhere=True, edits=True)
def _(s: Script) -> None:
    slow = [p.detach().clone() for p in s.params]
    for _ in range(2):
        s.step(2)
        with torch.no_grad():
            for p, q in zip(s.params, slow, strict=True):
                q.add_(p - q, alpha=0.5)
                p.copy_(q)


@as_in_torch("pruning by hand: a mask on the values after each step")
def _(s: Script) -> None:
    for _ in range(2):
        s.step()
        with torch.no_grad():
            for p in s.params:
                p.mul_((p.abs() > 0.05).float())


@as_in_torch(
    "rows copied from another table: `weight.data.copy_(torch.from_numpy(pretrained))`, `weight.data[ids] = vectors`"
)
def _(s: Script) -> None:
    import numpy as np

    vectors = np.linspace(-1, 1, ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    s.weight.data.copy_(torch.from_numpy(vectors))
    s.step()
    s.weight.data[torch.tensor([2, 5])] = torch.from_numpy(vectors[[7, 8]])
    s.step()
    s.weight.data[3] = torch.zeros(DIM)


@as_in_torch("an edit before `init_worker`, after `distributed_optimizer`", before=None)
def _(s: Script) -> None:
    s.wrap()
    with torch.no_grad():
        for p in s.params:
            p.fill_(0.1)
        s.weight[2] = 0.5
        s.weight.mul_(2)
    s.begin()
    s.step(2)


@as_in_torch("NaN and infinities written into values")
def _(s: Script) -> Any:
    with torch.no_grad():
        s.weight[3] = float("inf")
        s.model.out.bias.fill_(math.nan)
    found = s.model(ALL[:6].view(2, 3)).detach()
    with torch.no_grad():
        s.weight[3] = 0.0
        s.model.out.bias.fill_(0.0)
    return found


# ---------------------------------------------------------------- other objects in their place


@as_in_torch("`table.weight = nn.Parameter(…)` in a running job: used, and trained by nobody")
def _(s: Script) -> Any:
    s.model.table.weight = torch.nn.Parameter(torch.full((ROWS, DIM), 0.1))
    s.model.out.weight = torch.nn.Parameter(torch.full((1, 5), 0.1))
    s.step(2)
    return [s.model.table.weight, s.model.out.weight]


@as_in_torch("`table.weight = nn.Parameter(…)`, and `add_param_group` for it")
def _(s: Script) -> Any:
    s.model.table.weight = torch.nn.Parameter(torch.full((ROWS, DIM), 0.1))
    s.optimizer.add_param_group({"params": [s.model.table.weight]})
    s.step(2)
    return s.model.table.weight


@as_in_torch("`weight.requires_grad`, `retain_grad()`, `weight.grad_fn`, `weight.is_leaf`, `weight.grad = None`")
def _(s: Script) -> Any:
    s.weight.retain_grad()
    s.backward()
    s.weight.grad = None
    s.optimizer.step()
    return [s.weight.requires_grad, s.weight.grad_fn, s.weight.is_leaf]


@as_in_torch("`torch.utils.swap_tensors(p, other)` of a dense parameter")
def _(s: Script) -> None:
    p = s.model.out.weight
    torch.utils.swap_tensors(p, torch.nn.Parameter(torch.full(p.shape, 0.1)))


@as_in_torch(
    "all dense parameters moved into one memory: `p.data = flat[a:b].view(p.shape)`", everywhere=True, edits=True
)
def _(s: Script) -> None:
    dense = [p for p in s.params if p is not s.weight]
    flat, start = torch.cat([p.detach().flatten() for p in dense]), 0
    for p in dense:
        p.data, start = flat[start : start + p.numel()].view(p.shape), start + p.numel()
    s.step()
    flat.mul_(0.5)


class Square(Net):
    """A layer of the table's shape, and another table, beside the net's own."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.other = torch.nn.Embedding(ROWS, DIM, sparse=sparse)
        self.wide = torch.nn.Linear(DIM, ROWS, bias=False)
        self.wide_too = torch.nn.Linear(DIM, ROWS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + (self.wide(self.other(ids)) + self.wide_too(self.table(ids))).mean((1, 2))


@refused(
    "two parameters of a running job given one memory: `a.weight.data = b.weight.data`",
    "'wide.weight' and 'wide_too.weight' share memory",
    make=Square,
)
def _(s: Script) -> None:
    s.model.wide_too.weight.data = s.model.wide.weight.data
    s.step()


@refused(
    "a parameter given the memory of a table's rows: `p.data = table.weight.data[:5]`",
    "'wide.weight' and 'table.weight' share memory",
    make=Square,
)
def _(s: Script) -> None:
    s.model.wide.weight.data = s.weight.data
    s.step()


@refused(
    "a table given the memory of a parameter, or of another table: `table.weight.data = other.weight.data`",
    "'table.weight' and 'other.weight' share memory",
    make=Square,
)
def _(s: Script) -> None:
    s.weight.data = s.model.other.weight
    s.step()


@refused("`torch.utils.swap_tensors(table.weight, other)`", "table.weight")
def _(s: Script) -> None:
    torch.utils.swap_tensors(s.weight, torch.nn.Parameter(torch.full((ROWS, DIM), 0.1)))
    s.step()


@refused("`table.weight.set_(…)`", "table.weight")
def _(s: Script) -> None:
    with torch.no_grad():
        s.weight.set_(torch.full((ROWS, DIM), 0.1))


@as_in_torch("`table.weight.resize_(…)`: an error", raises=RuntimeError)
def _(s: Script) -> None:
    with torch.no_grad():
        s.weight.resize_(ROWS + 1, DIM)


@as_in_torch("`weight.share_memory_()`, `is_shared()`")
def _(s: Script) -> Any:
    s.weight.share_memory_()
    return s.weight.is_shared()


@differs("a table's memory: `stride()`, `is_contiguous()`, `data_ptr()`, `untyped_storage()`")
def _(s: Script) -> Any:
    found = [s.weight.stride(), s.weight.is_contiguous(), s.weight.untyped_storage().nbytes()]
    assert not s.remote or found == [(0, 0), False, s.weight.element_size()], "there is none but one NaN"
    return found


@as_in_torch("a part of a weight used after its values have changed: `p = weight[:5]`, then `mul_`, then `p.sum()`")
def _(s: Script) -> Any:
    part, again = s.weight[:5], s.weight[2:6]
    with torch.no_grad():
        part.mul_(0.5)
    part.sum().backward()
    with torch.no_grad():
        s.weight.mul_(0.5)
    again.sum().backward()
    return s.weight[:5].detach().clone()
