"""``torch.nn.Module`` and what ``torch.nn.utils`` does to one."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

import fleet.nn
from habits.habit import ALL, DIM, ROWS, Net, Script, Section

SECTION = Section("Modules")
as_in_torch, differs, refused = SECTION.as_in_torch, SECTION.differs, SECTION.refused


# ---------------------------------------------------------------- walked through


@as_in_torch("`parameters`, `named_parameters(prefix, recurse, remove_duplicate)`, `modules`, `children`, `buffers`")
def _(s: Script) -> Any:
    m = s.model
    return [
        [(name, list(p.shape)) for name, p in m.named_parameters()],
        [name for name, _ in m.named_parameters("net", remove_duplicate=False)],
        [name for name, _ in m.named_parameters(recurse=False)],
        [name for name, _ in m.named_modules()],
        [name for name, _ in m.named_children()],
        [(name, list(b.shape)) for name, b in m.named_buffers()],
        [len(list(m.parameters())), len(list(m.modules())), len(list(m.children())), len(list(m.buffers()))],
    ]


@as_in_torch("`get_parameter`, `get_submodule`, `get_buffer`, `hasattr`, `isinstance(module, nn.Embedding)`, `type(p)`")
def _(s: Script) -> Any:
    m = s.model
    return [
        m.get_parameter("table.weight") is m.table.weight,
        m.get_submodule("table") is m.table,
        m.get_buffer("norm.running_mean"),
        isinstance(m.table, nn.Embedding),
        isinstance(m.table.weight, nn.Parameter),
        [
            m.table.num_embeddings,
            m.table.embedding_dim,
            m.table.padding_idx,
            m.table.max_norm,
            list(m.table.weight.shape),
        ],
        [name for name, each in m.named_modules() if isinstance(each, nn.Linear | nn.Embedding)],
    ]


@differs("`type(table) is nn.Embedding`, `type(table.weight) is nn.Parameter`: they are subclasses")
def _(s: Script) -> Any:
    kinds = [type(s.model.table) is nn.Embedding, type(s.model.table.weight) is nn.Parameter]
    if s.remote:
        assert kinds == [False, False]
    return kinds


@as_in_torch("`train()`, `eval()`, `training` of the model and of parts")
def _(s: Script) -> Any:
    ids = ALL[:6].view(2, 3)
    s.model.eval()
    found = [s.model(ids)]
    s.model.norm.train()
    s.step()
    s.model.train()
    return [*found, s.model.training, s.model.table.training]


@as_in_torch("a step in evaluation mode", everywhere=True)
def _(s: Script) -> None:
    s.model.eval()
    s.step(2)
    s.model.train()


@as_in_torch("`requires_grad_`, `zero_grad`, `apply`, `float()`, `cpu()`, `to(torch.float32)`, `to('cpu')`, `type`")
def _(s: Script) -> Any:
    seen: list[str] = []
    s.model.apply(lambda module: seen.append(type(module).__mro__[-3].__name__))
    for same in (
        lambda m: m.float(),
        lambda m: m.cpu(),
        lambda m: m.to(torch.float32),
        lambda m: m.to("cpu"),
        lambda m: m.to("cpu", torch.float32),
        lambda m: m.type(torch.float32),
        lambda m: m.requires_grad_(),
        lambda m: m.to(memory_format=torch.contiguous_format),
    ):
        assert same(s.model) is s.model
        s.step()
    return len(seen)


@refused("`model.double()`, `half()`, `bfloat16()`, `to(torch.float64)` in a running job", "element type")
def _(s: Script) -> None:
    s.model.double()
    s.step()


@refused("`table.double()` in a running job", "element type|table.weight")
def _(s: Script) -> None:
    s.model.table.double()
    s.step()


@as_in_torch("`model.double()` before the optimizer is wrapped", before=None)
def _(s: Script) -> None:
    s.model.double()
    s.begin()
    s.loss = lambda: (s.model(s.batch()[0]) - 1).square().mean()  # type: ignore[method-assign]
    s.step(2)


@as_in_torch("`register_buffer`, `persistent=False`, buffers edited")
def _(s: Script) -> Any:
    s.model.register_buffer("seen", torch.zeros(3))
    s.model.register_buffer("hidden_one", torch.zeros(3), persistent=False)
    s.model.seen += 1
    s.model.norm.running_mean.zero_()
    return [name for name, _ in s.model.named_buffers()]


@as_in_torch("`register_parameter`, `add_module`, `set_submodule` in a running job: used, and trained by nobody")
def _(s: Script) -> Any:
    s.model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    s.model.add_module("extra", nn.Linear(2, 2))
    s.model.extra = nn.Identity()
    s.model.set_submodule("out", nn.Sequential(s.model.out, nn.Tanh()))
    s.step(2)
    return [name for name, _ in s.model.named_parameters()]


@as_in_torch("a dense submodule replaced, with `add_param_group` for the new one")
def _(s: Script) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        s.model.out = nn.Linear(5, 1)
    s.step()
    s.optimizer.add_param_group({"params": list(s.model.out.parameters())})
    s.step()


@as_in_torch("a table replaced by an ordinary embedding: used, and trained by nobody")
def _(s: Script) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        s.model.table = nn.Embedding(ROWS, DIM)
    s.step(2)
    return s.model.table.weight


@as_in_torch("a table that grows: a larger `nn.Embedding` with the old rows copied in, and `add_param_group`")
def _(s: Script) -> Any:
    old = s.model.table
    with torch.random.fork_rng():
        torch.manual_seed(1)
        grown = nn.Embedding(ROWS + 5, DIM, sparse=s.remote)
    with torch.no_grad():
        grown.weight[:ROWS] = old.weight
    s.model.table = grown
    s.table = None
    s.optimizer.add_param_group({"params": [grown.weight]})
    s.step(2)
    return grown(torch.arange(ROWS + 5))


@as_in_torch("`del model.table`; a module taken out of the model")
def _(s: Script) -> Any:
    table = s.model.table
    del s.model.table
    s.model.table = nn.Identity()
    s.optimizer.zero_grad()
    table(ALL[:4]).sum().backward()
    s.optimizer.step()
    s.model.table = table


@as_in_torch("hooks of modules: forward, pre, with kwargs, full backward, backward pre, global ones")
def _(s: Script) -> Any:
    seen: list[Any] = []
    handles = [
        s.model.table.register_forward_hook(lambda module, args, out: seen.append(float(out.sum())) or out * 0.5),
        s.model.table.register_forward_pre_hook(lambda module, args: (args[0].clone(),)),
        s.model.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True),
        s.model.table.register_full_backward_hook(lambda module, i, o: seen.append(float(o[0].abs().sum()))),
        s.model.out.register_full_backward_hook(lambda module, i, o: (i[0] * 0.5,)),
        s.model.out.register_full_backward_pre_hook(lambda module, o: (o[0] * 2,)),
        nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(1)),
    ]
    s.step(2)
    for handle in handles:
        handle.remove()
    return [round(each, 4) for each in seen]


@as_in_torch("`nn.Embedding.from_pretrained(…, freeze=False, sparse=True)`", make=lambda sparse: pretrained(sparse))
def _(s: Script) -> None:
    s.step(2)


def pretrained(sparse: bool) -> nn.Module:
    model = Net(sparse)
    model.table = nn.Embedding.from_pretrained(torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM), False, sparse=sparse)
    return model


class OwnRows(Net):
    """Looks rows up in a parameter of its own beside the table, as modules of papers do."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.rows = nn.Parameter(torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        own = nn.functional.embedding(ids, self.rows, sparse=True)
        bags = nn.functional.embedding_bag(ids, self.rows, mode="sum", sparse=True)
        return self.above((self.table(ids) * own).flatten(1)) + 0.01 * bags.sum(1)


def momentum(model: nn.Module) -> list[torch.optim.Optimizer]:
    rows = [model.get_parameter("rows")]
    return [torch.optim.SGD([{"params": rows, "momentum": 0.9}, {"params": _others(model, rows)}], lr=0.1)]


def _others(model: nn.Module, those: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in model.parameters() if all(param is not each for each in those)]


@as_in_torch(
    "`F.embedding(ids, self.rows, sparse=True)`, `F.embedding_bag`, of a module's own parameter",
    make=OwnRows,
    optimizers=momentum,
    everywhere=True,
)
def _(s: Script) -> Any:
    s.step(2)
    grads = [param.grad.is_sparse for name, param in s.model.named_parameters() if name == "rows"]
    s.model.rows.grad.mul_(0.5)
    s.optimizer.step()
    return grads


@as_in_torch(
    "the same with Adagrad",
    make=OwnRows,
    optimizers=lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
)
def _(s: Script) -> None:
    s.step(2)


@refused(
    "the same with Adam, or with weight decay: an error in torch",
    "is sparse, and Adam takes dense ones only",
    make=OwnRows,
    optimizers=lambda model: [torch.optim.Adam(model.parameters(), lr=0.1)],
    raises=RuntimeError,
    before=None,
)
def _(s: Script) -> None:
    s.begin()
    s.step(2)


@refused(
    "the same with Adagrad and `eps=0`",
    "is sparse, and Adagrad with eps=0 takes dense ones only",
    make=OwnRows,
    optimizers=lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1, eps=0.0)],
    before=None,
)
def _(s: Script) -> None:
    s.begin()
    s.step(2)


class Token(nn.Embedding):
    """Begins in its own way, as embeddings of papers do."""

    def __init__(self, rows: int, sparse: bool) -> None:
        super().__init__(rows, DIM, padding_idx=0, sparse=sparse)

    def reset_parameters(self) -> None:
        self.weight.data.normal_(0, 1.0 / self.embedding_dim)
        if self.padding_idx is not None:
            self.weight.data[self.padding_idx].fill_(0)


def of_tokens(sparse: bool) -> nn.Module:
    model = Net(sparse)
    model.table = Token(ROWS, sparse)
    return model


@as_in_torch(
    "a subclass of `nn.Embedding` with an `__init__`, `reset_parameters` or `extra_repr` of its own",
    make=of_tokens,
    everywhere=True,
)
def _(s: Script) -> Any:
    s.step(2)
    copied = copy.deepcopy(s.model)
    again = pickle.loads(pickle.dumps(copied))
    return [isinstance(s.model.table, Token), type(copied.table).__name__, again.table(ALL[:4]), s.model.state_dict()]


@as_in_torch("the same, as an `nn.EmbeddingBag`", make=lambda sparse: of_bags(sparse))
def _(s: Script) -> Any:
    s.step(2)
    return [isinstance(s.model.table, TokenBag), s.model.table.weight[:3], repr(copy.deepcopy(s.model.table))]


class TokenBag(nn.EmbeddingBag):
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -0.1, 0.1)


def of_bags(sparse: bool) -> nn.Module:
    model = Net(sparse)
    model.table = TokenBag(ROWS, DIM, mode="sum", sparse=sparse)
    model.hidden = nn.Linear(DIM, 5, bias=False)
    return model


@refused(
    "the same with a `forward` or a method of its own",
    "may do more than look up",
    make=lambda sparse: scaled(sparse),
    before=None,
)
def _(s: Script) -> None:
    s.begin()


def scaled(sparse: bool) -> nn.Module:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = Net(sparse)
    model.table = Scaled(ROWS, DIM, sparse=sparse)
    return model


@as_in_torch("`padding_idx`, positive or negative", make=lambda sparse: padded(sparse), everywhere=True)
def _(s: Script) -> Any:
    s.step(2)
    return s.model.table(torch.tensor([2, 3]))


def padded(sparse: bool) -> nn.Module:
    model = Net(sparse)
    model.table = nn.Embedding(ROWS, DIM, padding_idx=2, sparse=sparse)
    return model


@as_in_torch("`table.padding_idx = 3`, `-7`, None in a running job")
def _(s: Script) -> None:
    for row in (3, -7, None):
        s.model.table.padding_idx = row
        s.step(2)


@refused("`table.max_norm = 0.1` in a running job", "max_norm")
def _(s: Script) -> None:
    s.model.table.max_norm = 0.1
    s.step(1)


@refused("`table.scale_grad_by_freq = True` in a running job", "scale_grad_by_freq")
def _(s: Script) -> None:
    s.model.table.scale_grad_by_freq = True
    s.step(1)


@as_in_torch("`table.sparse = False` in a running job")
def _(s: Script) -> None:
    s.model.table.sparse = False
    s.step(2)


@refused("`max_norm` of an embedding with `sparse=True`", "max_norm", make=lambda sparse: option(sparse, max_norm=1.0))
def _(s: Script) -> None: ...


@refused(
    "`scale_grad_by_freq` of an embedding with `sparse=True`",
    "scale_grad_by_freq",
    make=lambda sparse: option(sparse, scale_grad_by_freq=True),
)
def _(s: Script) -> None: ...


def option(sparse: bool, **options: Any) -> nn.Module:
    model = Net(sparse)
    model.table = nn.Embedding(ROWS, DIM, sparse=sparse, **options)
    return model


@as_in_torch("ids out of range", raises=IndexError)
def _(s: Script) -> None:
    s.model.table(torch.tensor([ROWS]))


@refused("ids that are not integers", "int64 or int32 ids", raises=RuntimeError)
def _(s: Script) -> None:
    s.model.table(torch.tensor([0.5]))


def trained(s: Script, rows: torch.Tensor) -> torch.Tensor:
    """The rows that a step has trained."""
    s.optimizer.zero_grad()
    rows.square().sum().backward()
    s.optimizer.step()
    return rows


@as_in_torch("ids by the name that torch has for them: `table(input=ids)`", everywhere=True)
def _(s: Script) -> Any:
    return trained(s, s.model.table(input=s.ids(7)))


@as_in_torch("ids in a jagged tensor: `torch.nested.nested_tensor(…, layout=torch.jagged)`", everywhere=True)
def _(s: Script) -> Any:
    ids = torch.nested.nested_tensor_from_jagged(torch.tensor([1, 2, 3, 3, 7]), torch.tensor([0, 3, 5]))
    rows = s.model.table(ids)
    assert rows.shape[:2] == ids.shape
    return trained(s, (rows + rows).values())


@refused("ids in a sparse tensor", "in memory one by one", raises=IndexError)
def _(s: Script) -> None:
    s.model.table(torch.arange(4).to_sparse())


@refused("ids in a nested tensor that is not jagged", "in memory one by one", raises=NotImplementedError)
def _(s: Script) -> None:
    trained(s, s.model.table(torch.nested.nested_tensor([torch.tensor([1, 2])])).to_padded_tensor(0.0))


# ---------------------------------------------------------------- one weight in two places


class Shared(Net):
    """A second module with the table's weight."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.again = nn.Embedding(ROWS, DIM, sparse=sparse)
        self.again.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.again(ids.flip(0)).sum((1, 2))


@as_in_torch("a second `nn.Embedding` with the same weight", make=Shared)
def _(s: Script) -> Any:
    s.step(2)
    return [s.model.table.weight is s.model.again.weight, s.model.again(ALL)]


@as_in_torch("one module in two places of the model", make=lambda sparse: twice(sparse))
def _(s: Script) -> Any:
    s.step(2)
    return [name for name, _ in s.model.named_parameters(remove_duplicate=False)]


def twice(sparse: bool) -> nn.Module:
    model = Net(sparse)
    model.other = nn.ModuleDict({"again": model.table})
    return model


class Tied(Net):
    """An output layer with the table's weight."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.scores = nn.Linear(DIM, ROWS, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 0.01 * self.scores(self.table(ids[:, 0])).square().mean(1)


@as_in_torch("a tied `nn.Linear`: `head.weight = table.weight`, `sparse=False`", make=lambda sparse: Tied(False))
def _(s: Script) -> Any:
    s.step(2)
    return s.model.scores.weight is s.model.table.weight


@as_in_torch("a tied `nn.Linear` with `sparse=True`", make=Tied)
def _(s: Script) -> Any:
    s.step(2)
    return s.model.scores.weight is s.model.table.weight


@as_in_torch("tied in a running job: `model.out2.weight = table.weight`, `other.weight = table.weight`")
def _(s: Script) -> Any:
    other = nn.Embedding(ROWS, DIM)
    other.weight = s.weight
    head = nn.Linear(DIM, ROWS, bias=False)
    head.weight = s.weight
    s.optimizer.zero_grad()
    head(other(torch.tensor([1, 2, 2]))).square().mean().backward()
    s.optimizer.step()
    return [other(ALL), head(torch.ones(1, DIM))]


# ---------------------------------------------------------------- state


@as_in_torch("`model.state_dict()`: keys, order, shapes, values, `prefix=`, `keep_vars=True`", everywhere=True)
def _(s: Script) -> Any:
    kept = s.model.state_dict(keep_vars=True)
    return [
        dict(s.model.state_dict()),
        list(s.model.state_dict(prefix="net.")),
        kept["table.weight"] is s.weight,
        s.model.state_dict()._metadata == s.model.state_dict()._metadata,
        [(key, v.requires_grad, v.is_leaf) for key, v in s.model.state_dict().items()],
        s.model.table.state_dict()["weight"],
    ]


@as_in_torch(
    "`load_state_dict` of what `state_dict` gave: the best epoch kept by `deepcopy`, and restored",
    everywhere=True,
    edits=True,
)
def _(s: Script) -> Any:
    best = copy.deepcopy(s.model.state_dict())
    s.step(2)
    told = s.model.load_state_dict(best)
    found = s.model.table(ALL)
    s.step()
    again = {key: value.clone() for key, value in s.model.state_dict().items()}
    s.step()
    s.model.load_state_dict(again)
    return [found, list(told.missing_keys), list(told.unexpected_keys)]


@as_in_torch("`state_dict()` kept without a copy: it follows the training")
def _(s: Script) -> Any:
    kept = s.model.state_dict()
    s.step()
    return dict(kept)


@as_in_torch("`torch.save(model.state_dict())` and `torch.load`, `weights_only` or not", everywhere=True, edits=True)
def _(s: Script) -> Any:
    file = io.BytesIO()
    torch.save(s.model.state_dict(), file)
    s.step(2)
    found = []
    for weights_only in (True, False):
        file.seek(0)
        state = torch.load(file, weights_only=weights_only)
        found.append(dict(state))
        s.model.load_state_dict(state)
    return found


@as_in_torch("safetensors: `save_file(model.state_dict())`, `save_model`, `load_model`", everywhere=True, edits=True)
def _(s: Script) -> Any:
    import tempfile

    import safetensors.torch

    with tempfile.TemporaryDirectory() as folder:
        safetensors.torch.save_file(s.model.state_dict(), f"{folder}/a")
        safetensors.torch.save_model(s.model, f"{folder}/b")
        s.step(2)
        found = [safetensors.torch.load_file(f"{folder}/a"), safetensors.torch.load_file(f"{folder}/b")]
        safetensors.torch.load_model(s.model, f"{folder}/b")
    return found


@as_in_torch("what was saved, loaded by plain torch: a fresh model on one process gives the same")
def _(s: Script) -> Any:
    fresh = Net(False)
    fresh.load_state_dict(s.model.state_dict())
    return fresh.eval()(ALL[:6].view(2, 3))


@as_in_torch(
    "`load_state_dict` of a part, `strict=False`; of the table alone; unexpected keys", everywhere=True, edits=True
)
def _(s: Script) -> Any:
    told = s.model.load_state_dict({"out.weight": torch.full((1, 5), 0.1), "other": torch.ones(1)}, strict=False)
    s.step()
    s.model.table.load_state_dict({"weight": torch.full((ROWS, DIM), 0.1)})
    return [list(told.missing_keys), list(told.unexpected_keys)]


@as_in_torch("`load_state_dict` with missing keys or another shape", raises=RuntimeError)
def _(s: Script) -> None:
    s.model.load_state_dict({"table.weight": torch.ones(3, DIM)})


@as_in_torch("`load_state_dict` before `init_worker`, after `distributed_optimizer`", before=None)
def _(s: Script) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        state = Net(False).state_dict()
    s.wrap()
    s.model.load_state_dict(state)
    s.begin()
    s.step()


@as_in_torch("`state_dict` before `init_worker`, after `distributed_optimizer`", before=None)
def _(s: Script) -> Any:
    s.wrap()
    found = {key: value.clone() for key, value in s.model.state_dict().items()}
    s.begin()
    return found


@as_in_torch("`load_state_dict(state, assign=True)`: new parameters, which the optimizer does not know")
def _(s: Script) -> Any:
    state = {name: torch.full_like(value, 0.1) for name, value in s.model.state_dict().items()}
    s.model.load_state_dict(state, assign=True)
    s.step(2)
    return s.model.table.weight


@as_in_torch(
    "hooks of state: `register_state_dict_post_hook`, `…_pre_hook`, `register_load_state_dict_pre_hook`, `…_post_hook`"
)
def _(s: Script) -> Any:
    seen = []
    m = s.model
    handles = [
        m.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append("before")),
        m.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(extra=torch.ones(1)) and None),
        m.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("extra") and None),
        m.register_load_state_dict_post_hook(lambda module, told: seen.append(len(told.missing_keys))),
    ]
    state = {name: value * 0.5 for name, value in m.state_dict().items()}
    m.load_state_dict(state)
    for handle in handles:
        handle.remove()
    return [seen, sorted(state)]


class Extra(Net):
    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


@as_in_torch("`get_extra_state` and `set_extra_state`", make=Extra)
def _(s: Script) -> Any:
    s.model.load_state_dict(s.model.state_dict())
    return s.model.loaded


# ---------------------------------------------------------------- copied


@as_in_torch("`copy.deepcopy(model)`: a model of its own, with the values of now", everywhere=True)
def _(s: Script) -> Any:
    frozen = copy.deepcopy(s.model)
    s.step(2)
    frozen.eval()
    with torch.no_grad():
        return [frozen(ALL[:6].view(2, 3)), frozen.table.weight, frozen.table(ALL), frozen.table.weight is s.weight]


@as_in_torch("a deep copy trained by an optimizer of its own, in plain torch")
def _(s: Script) -> Any:
    other = copy.deepcopy(s.model)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        own.zero_grad()
        s.loss(other).backward()
        own.step()
    s.step()
    return [other.table(ALL), other.out.weight]


@as_in_torch("`copy.copy(model)`: another module with the same parameters")
def _(s: Script) -> Any:
    other = copy.copy(s.model)
    s.optimizer.zero_grad()
    s.loss(other).backward()
    s.optimizer.step()
    return [other.table.weight is s.weight, other(ALL[:6].view(2, 3))]


@as_in_torch("`copy.deepcopy(model.table)`, `copy.deepcopy(model.table.weight)`")
def _(s: Script) -> Any:
    table, weight = copy.deepcopy(s.model.table), copy.deepcopy(s.weight)
    s.step()
    return [table(ALL), weight]


@as_in_torch("`type(copy.deepcopy(model).table) is nn.Embedding`: a copy has the classes that the model was made of")
def _(s: Script) -> Any:
    class Named(nn.Embedding):
        pass

    made = nn.Sequential(copy.deepcopy(s.model), Named.from_pretrained(torch.ones(ROWS, DIM), freeze=False))
    copied = copy.deepcopy(made)
    early = copy.deepcopy(s.model.table)
    return [type(copied[0].table) is nn.Embedding, type(copied[1]) is Named, type(early) is nn.Embedding]


def _quantized(s: Script, inplace: bool) -> Any:
    from torch.ao.quantization import float_qparams_weight_only_qconfig, quantize_dynamic

    kinds = {nn.Embedding: float_qparams_weight_only_qconfig}
    return quantize_dynamic(s.model, kinds, inplace=inplace).table(ALL[:6].view(2, 3))


@as_in_torch("`torch.ao.quantization.quantize_dynamic(model, {nn.Embedding: …})`, which works on a copy")
def _(s: Script) -> Any:
    return _quantized(s, inplace=False)


@differs("the same with `inplace=True` in a running job, which goes by `type(table)`: a table stays as it is", after=0)
def _(s: Script) -> Any:
    return _quantized(s, inplace=True)


@refused("`pickle.dumps(model)`", r"cannot be pickled while it trains.*Pickle copy\.deepcopy\(model\)")
def _(s: Script) -> Any:
    pickle.dumps(s.model)


@refused("`torch.save(model)` of the whole module", "cannot be pickled while it trains")
def _(s: Script) -> Any:
    torch.save(s.model, io.BytesIO())


@as_in_torch("`torch.save(model.parameters())`, `torch.save(p)`, `pickle.dumps(p)`")
def _(s: Script) -> Any:
    file = io.BytesIO()
    torch.save(list(s.model.parameters()), file)
    file.seek(0)
    return [torch.load(file, weights_only=False), pickle.loads(pickle.dumps(s.weight))]


@as_in_torch("`model.share_memory()`")
def _(s: Script) -> None:
    s.optimizer.zero_grad()
    s.model.share_memory()
    s.step()


@as_in_torch("`model.to('meta')` in a running job: an error", raises=RuntimeError)
def _(s: Script) -> None:
    s.model.to("meta")
    s.step()


# ---------------------------------------------------------------- torch.nn.utils


@as_in_torch(
    "`parametrizations.weight_norm`, `spectral_norm`, `orthogonal` of dense layers, before the optimizer", before=None
)
def _(s: Script) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        parametrizations.weight_norm(s.model.hidden)
        parametrizations.spectral_norm(s.model.out)
        s.model.extra = parametrizations.orthogonal(nn.Linear(3, 3, bias=False))
    s.own = s.habit.optimizers(s.model)
    s.optimizer = s.own[0]
    forward = type(s.model).forward
    s.loss = lambda: (forward(s.model, s.batch()[0]) + s.model.extra(torch.ones(3)).sum()).square().mean()  # type: ignore[method-assign]
    s.begin()
    s.step(2)


@as_in_torch("`parametrize.register_parametrization` of a dense layer in a running job")
def _(s: Script) -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

    parametrize.register_parametrization(s.model.hidden, "weight", Half())
    s.step(2)
    parametrize.remove_parametrizations(s.model.hidden, "weight")
    s.step()


@as_in_torch("`parametrize.register_parametrization` of a table")
def _(s: Script) -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

    parametrize.register_parametrization(s.model.table, "weight", Half())
    s.step(2)


@refused("`nn.Parameter(table.weight)`, `parametrizations.weight_norm(table)`", "TableWeight")
def _(s: Script) -> None:
    nn.Parameter(s.weight)


@refused("`parametrize.remove_parametrizations` of a table", "another memory")
def _(s: Script) -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

    parametrize.register_parametrization(s.model.table, "weight", Half())
    parametrize.remove_parametrizations(s.model.table, "weight")


@as_in_torch(
    "`utils.weight_norm`, `utils.spectral_norm` (the older ones) of dense layers, before the optimizer", before=None
)
def _(s: Script) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        utils.weight_norm(s.model.hidden)
        utils.spectral_norm(s.model.out)
    s.own = s.habit.optimizers(s.model)
    s.optimizer = s.own[0]
    s.begin()
    s.step(2)


@as_in_torch("`prune.l1_unstructured` of dense layers in a running job, `prune.remove`")
def _(s: Script) -> Any:
    prune.l1_unstructured(s.model.hidden, "weight", amount=0.3)
    prune.ln_structured(s.model.out, "weight", amount=0.4, n=2, dim=1)
    s.step(2)
    found = [s.model.hidden.weight]
    prune.remove(s.model.hidden, "weight")
    s.step()
    return found


@as_in_torch("`prune.l1_unstructured` of a table")
def _(s: Script) -> Any:
    prune.l1_unstructured(s.model.table, "weight", amount=0.3)
    s.step(2)
    return s.model.table(ALL)


@as_in_torch("`fuse_linear_bn_eval`, `fuse_conv_bn_eval` for serving")
def _(s: Script) -> Any:
    s.model.eval()
    fused = utils.fuse_linear_bn_eval(s.model.hidden, s.model.norm)
    s.model.train()
    return fused(torch.ones(2, 12))


@as_in_torch("`utils.stateless.functional_call`, `utils.skip_init`")
def _(s: Script) -> Any:
    values = {name: p.detach() * 0.5 for name, p in s.model.named_parameters()}
    made = utils.skip_init(nn.Linear, 2, 2)
    return [utils.stateless.functional_call(s.model.eval(), values, (ALL[:6].view(2, 3),)), list(made.weight.shape)]


# ---------------------------------------------------------------- tables that no worker holds whole


class Endless(Net):
    """A table that takes any id, beside the other."""

    def __init__(self, remote: bool) -> None:
        super().__init__(remote)
        self.endless = fleet.nn.Embedding(None, DIM) if remote else nn.Embedding(ROWS, DIM)


class Large(Net):
    def __init__(self, remote: bool) -> None:
        super().__init__(remote)
        self.large = nn.Embedding(70_000, DIM, sparse=remote)


NO_END, TOO_MUCH = "no num_embeddings", "too much for one worker"
SMALL = {"FLEET_WHOLE_TABLE_MB": "1"}


@refused("`weight` in a formula, of a table without `num_embeddings`", NO_END, make=Endless)
def _(s: Script) -> None:
    s.model.endless.weight.square().sum()


@refused("`model.state_dict()`, with a table without `num_embeddings`", NO_END, make=Endless)
def _(s: Script) -> None:
    s.model.state_dict()


@refused("`copy.deepcopy(model)`, with a table without `num_embeddings`", NO_END, make=Endless)
def _(s: Script) -> None:
    copy.deepcopy(s.model)


@refused("`weight` in a formula, of a table larger than `FLEET_WHOLE_TABLE_MB`", TOO_MUCH, make=Large, environ=SMALL)
def _(s: Script) -> None:
    s.model.large.weight.norm()


@refused("`weight.data`, `weight.mul_(…)`, `weight[:3] = 0` of such a table", TOO_MUCH, make=Large, environ=SMALL)
def _(s: Script) -> None:
    with torch.no_grad():
        s.model.large.weight[:3] = 0


@refused("`model.state_dict()` with such a table", TOO_MUCH, make=Large, environ=SMALL)
def _(s: Script) -> None:
    s.model.state_dict()


@as_in_torch("clipping, hooks, `GradScaler`, arithmetic on `.grad` with such a table", make=Large, environ=SMALL)
def _(s: Script) -> Any:
    handle = s.model.large.weight.register_hook(lambda g: g * 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    s.optimizer.zero_grad()
    scaler.scale(s.loss() + s.model.large(ALL).square().mean()).backward()
    scaler.unscale_(s.optimizer)
    norm = utils.clip_grad_norm_(s.params, 0.01)
    for p in s.params:
        p.grad *= 2
        p.grad = p.grad / 3
    scaler.step(s.optimizer)
    handle.remove()
    return [norm, s.model.large(ALL)]


@as_in_torch("numbers of its gradient masked, by masks of it", make=Large, environ=SMALL)
def _(s: Script) -> Any:
    found = []
    for change in (
        lambda g: g.__setitem__(g.isnan() | (g > 0.001), 0),
        lambda g: g.masked_fill_(~g.isfinite() | (g < -0.001), 0.0),
        lambda g: g.mul_(g.abs() > 0.001),
        lambda g: g.mul_((g > 0) & (g < 1)),
    ):
        s.optimizer.zero_grad()
        (s.loss() + s.model.large(ALL).square().mean()).backward()
        for p in s.params:
            change(p.grad)
            p.grad = torch.where(p.grad > 0, p.grad, 0.0)
            p.grad = (p.grad < 0.01) * p.grad
            found += [(p.grad == 0).all(), ((p.grad > 0) & (p.grad < 1)).any()]
        s.optimizer.step()
    return [*found, s.model.large(ALL)]


@refused("a mask of its gradient taken for numbers", TOO_MUCH, make=Large, environ=SMALL)
def _(s: Script) -> None:
    (s.loss() + s.model.large(ALL).square().mean()).backward()
    (s.model.large.weight.grad > 0).float()


@refused("`model.state_dict()` with a `fleet.nn` table before `init_worker`", "init_worker", before=None, make=Endless)
def _(s: Script) -> None:
    s.wrap()
    s.model.state_dict()


# ---------------------------------------------------------------- containers


@as_in_torch("tables in `nn.Sequential`, `ModuleList`, `ModuleDict`", make=lambda sparse: Many(sparse))
def _(s: Script) -> Any:
    s.step(2)
    return [table(ALL) for table in s.model.tables]


class Many(Net):
    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM, sparse=sparse) for _ in range(3))
        self.named = nn.ModuleDict({"bag": nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=sparse)})
        self.top = nn.Sequential(nn.Linear(DIM, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = sum(table(ids[:, place]) for place, table in enumerate(self.tables)) + self.named["bag"](ids)
        return super().forward(ids) + self.top(found).squeeze(1)


@refused("`torch.multiprocessing`: a model sent to another process", "cannot be pickled")
def _(s: Script) -> None:
    from multiprocessing.reduction import ForkingPickler

    ForkingPickler.dumps(s.model)


@refused(
    "`torch.multiprocessing`: a table's weight, or its `nn.Embedding`, sent to another process", "cannot be shared"
)
def _(s: Script) -> None:
    from multiprocessing.reduction import ForkingPickler

    ForkingPickler.dumps(s.table)


@refused(
    "`torch.multiprocessing`: a `fleet.nn` table sent to another process before `init_worker`",
    "init_worker",
    before=None,
    make=Endless,
)
def _(s: Script) -> None:
    from multiprocessing.reduction import ForkingPickler

    s.wrap()
    ForkingPickler.dumps(s.model.endless)


@as_in_torch("`torch.multiprocessing`: the gradient of a table sent to another process", sparse=True)
def _(s: Script) -> Any:
    from multiprocessing.reduction import ForkingPickler

    s.backward()
    gradient = s.table.weight.grad
    rebuild, given = ForkingPickler(io.BytesIO()).dispatch_table[type(gradient)](gradient)
    sent = rebuild(*given).coalesce()
    return [sent.layout, sent.indices(), sent.values()]


def world_of_one() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@as_in_torch("`DistributedDataParallel(model)` around it, in a group of one process")
def _(s: Script) -> None:
    world_of_one()
    group = torch.distributed.group.WORLD  # to outlive torch's reducer, as in `collective_ranks.py`
    try:
        whole = nn.parallel.DistributedDataParallel(s.model)
        s.optimizer.zero_grad()
        s.loss(whole).backward()
        s.optimizer.step()
        del whole
    finally:
        torch.distributed.destroy_process_group()
        del group


@refused("`fully_shard(model)` of a model with tables", "FSDP does not support")
def _(s: Script) -> None:
    from torch.distributed.fsdp import fully_shard

    world_of_one()
    try:
        fully_shard(s.model)
    finally:
        torch.distributed.destroy_process_group()


@as_in_torch("`nn.DataParallel(model)` without a GPU")
def _(s: Script) -> Any:
    whole = nn.DataParallel(s.model)
    s.optimizer.zero_grad()
    s.loss(whole).backward()
    s.optimizer.step()
    return list(whole.state_dict())


@as_in_torch("`nn.ParameterList`, `nn.ParameterDict` in a model", make=lambda sparse: Lists(sparse))
def _(s: Script) -> None:
    s.step(2)


class Lists(Net):
    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))])
        self.by_name = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(1))})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scales[0] + self.scales[1] + self.by_name["shift"]
