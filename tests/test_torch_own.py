"""Torch's own cases, which its tests of modules and optimizers are made from, in a job of one worker: what is passed,
what is refused and what is skipped is counted here, and stands in docs/torch.md."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fleet import Fleet
from fleet.errors import FleetError
from fleet.kernels import REFUSED, RULES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "torch.md"

#: What a refusal names, by the option that is refused.
REFUSALS: Mapping[str, str] = {
    "differentiable": "differentiable",
    "max_norm": "max_norm",
    "scale_grad_by_freq": "scale_grad_by_freq",
    "mode": "mode='max'",
    "complex": "complex64",
    "duplicate": "stands in two groups",
    "float ids": "int64 or int32 ids",
}

#: Cases that are left out, as "kind/name/description", with the reason. Each is tried all the same, and has to fail.
SKIPPED: Mapping[str, str] = {}


@pytest.fixture(scope="module")
def torchs(monkeypatch_module: pytest.MonkeyPatch) -> Any:
    """Torch's databases of cases. They take seconds to import, and read the command line."""
    pytest.importorskip("expecttest")
    monkeypatch_module.setattr(sys, "argv", sys.argv[:1])
    from torch.testing._internal import common_methods_invocations, common_modules, common_nn, common_optimizers

    return SimpleNamespace(
        modules=common_modules, nn=common_nn, ops=common_methods_invocations, optimizers=common_optimizers
    )


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patched:
        yield patched


@contextmanager
def job() -> Iterator[Fleet]:
    fleet = Fleet(environ={})
    fleet.init()
    try:
        yield fleet
    finally:
        with suppress(FleetError):  # there may be no worker to stop
            fleet.stop_worker()


@dataclass
class Tally:
    """What became of the cases of one kind."""

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def take(self, name: str, run: Callable[[], None], refused: Sequence[str] = ()) -> None:
        """Run a case, which has to pass, or to be refused by a message that names one of ``refused``."""
        name, error = f"{self.kind}/{name}", None
        try:
            run()
        except Exception as raised:
            error = raised
        if name in SKIPPED:
            self.counts["skipped"] += 1
            if error is None:
                self.wrong.append(f"{name} is skipped ({SKIPPED[name]}) and passes")
        elif refused:
            self.counts["refused"] += 1
            if not (isinstance(error, FleetError) and any(each in str(error) for each in refused)):
                self.wrong.append(f"{name} should be refused by name, {' or '.join(refused)}: {error!r}")
        else:
            self.counts["passed"] += 1
            if error is not None:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Hold what was found against what should be, and the counts against the page's."""
        assert not self.wrong, "\n".join(self.wrong)
        here = [self.counts[each] for each in ("passed", "refused", "skipped")]
        print(f"{self.kind}: {sum(here)} of torch's cases, {here[0]} passed, {here[1]} refused, {here[2]} skipped")
        unknown = {name for name in SKIPPED if name.startswith(f"{self.kind}/")}
        assert self.counts["skipped"] == len(unknown), f"not all of {unknown} are cases of torch's"
        pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        if pinned is not None and torch.__version__.partition("+")[0] == pinned[1]:
            assert counted()[self.kind] == [sum(here), *here]


def counted() -> dict[str, list[int]]:
    """The counts that the page gives: kind, cases, passed, refused, skipped."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    return {kind: [int(number) for number in numbers] for kind, *numbers in rows}


def close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------- optimizers


def refusals(options: Mapping[str, Any]) -> list[str]:
    return [REFUSALS[name] for name, value in options.items() if name in REFUSALS and value]


def infos(torchs: Any) -> list[Any]:
    """Torch's descriptions of the optimizers that Fleet takes."""
    return [info for info in torchs.optimizers.optim_db if info.name in RULES]


def inputs(torchs: Any, info: Any) -> list[tuple[str, dict[str, Any]]]:
    """Every set of options, with each implementation that this processor has."""
    found = torchs.optimizers._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    return [(f"{info.name}/{place} {each.desc}", each.kwargs) for place, each in enumerate(found)]


def test_every_optimizer_of_torch_is_taken_or_refused_by_name(torchs: Any) -> None:
    known = {info.name for info in torchs.optimizers.optim_db}
    assert known <= {*RULES, *REFUSED}
    for info in torchs.optimizers.optim_db:
        if info.name in REFUSED:
            with job() as fleet, pytest.raises(FleetError, match=info.name):
                fleet.distributed_optimizer(info.optim_cls([torch.nn.Parameter(torch.ones(2, 2))]))


Params = list[torch.nn.Parameter]


def dense_params(info: Any, dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(1)
    shapes = [(10, 5)] if info.name == "Muon" else [(10, 5), (10,)]  # Muon trains matrices
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def dense_loss(params: Params, step: int) -> torch.Tensor:
    x = torch.randn(5, generator=torch.Generator().manual_seed(step)).to(params[0].dtype)
    out = params[0].mv(x)
    return (out if len(params) == 1 else out + params[1]).square().sum()


def train(
    params: Params,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Params, int], torch.Tensor] = dense_loss,
    schedules: Sequence[Any] = (),
    steps: int = 4,
) -> None:
    """Every other step is taken with a closure."""
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(params, step)
            value.backward()
            return value

        if step % 2:
            value = optimizer.step(closure)
        else:
            value = closure()
            optimizer.step()
        for schedule in schedules:
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(value.item())
            else:
                schedule.step()


Make = Callable[[Params], torch.optim.Optimizer]


def compare_dense(
    info: Any,
    make: Make,
    schedules: Iterable[Callable[[torch.optim.Optimizer], Any]] = (),
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-6,
) -> None:
    schedules = list(schedules)
    theirs, ours = dense_params(info, dtype), dense_params(info, dtype)
    with job() as fleet:
        wrapped = fleet.distributed_optimizer(make(ours))
        fleet.init_worker()
        train(ours, wrapped, schedules=[each(wrapped) for each in schedules])
    optimizer = make(theirs)
    train(theirs, optimizer, schedules=[each(optimizer) for each in schedules])
    close(ours, theirs, tolerance)
    assert not torch.equal(ours[0], dense_params(info, dtype)[0]), "nothing was trained"


@pytest.mark.slow
def test_options_on_dense_parameters(torchs: Any) -> None:
    tally = Tally("options, dense parameters")
    for info in infos(torchs):
        if not info.only_supports_sparse_grads:
            for name, options in inputs(torchs, info):
                make = lambda p, c=info.optim_cls, o=options: c(p, **copy.deepcopy(o))  # noqa: E731
                tally.take(name, lambda i=info, m=make: compare_dense(i, m), refusals(options))
    tally.close()


def test_groups_schedules_and_element_types(torchs: Any) -> None:
    tally = Tally("groups, schedules, element types")
    for info in infos(torchs):
        if info.only_supports_sparse_grads:
            continue
        kind = info.optim_cls

        def grouped(params: Params, kind: Any = kind) -> torch.optim.Optimizer:
            return kind([{"params": [p], "lr": 0.01 * (place + 1)} for place, p in enumerate(params)])

        tally.take(f"{info.name}/groups", lambda i=info, m=grouped: compare_dense(i, m))
        for place, schedules in enumerate(info.scheduler_inputs):
            tally.take(f"{info.name}/schedules {place}", lambda i=info, k=kind, s=schedules: compare_dense(i, k, s))
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            tally.take(f"{info.name}/{dtype}", lambda i=info, k=kind, d=dtype: compare_dense(i, k, dtype=d))
        tally.take(
            f"{info.name}/complex",
            lambda i=info, k=kind: compare_dense(i, k, dtype=torch.complex64),
            [REFUSALS["complex"]],
        )
    tally.close()


ROWS, DIM = 6, 3


def all_rows(step: int) -> torch.Tensor:
    """Every row, some of them twice: the optimizer's dense formula is what is right then."""
    ids = torch.cat([torch.arange(ROWS), torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(step))])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(step))]


def some_rows(step: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(step))


def compare_rows(
    make: Make,
    ids_of: Callable[[int], torch.Tensor],
    schedules: Iterable[Callable[[torch.optim.Optimizer], Any]] = (),
    *,
    sparse: bool,
    tolerance: float,
) -> None:
    """A table in a job, and an embedding in plain torch with sparse or dense gradients."""
    schedules = list(schedules)
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    tables = [torch.nn.Embedding(ROWS, DIM, sparse=True, _weight=start.clone()) for _ in range(2)]
    tables[0].sparse = sparse

    def loss(table: torch.nn.Module) -> Callable[[Params, int], torch.Tensor]:
        scale = torch.linspace(1, 2, DIM)
        return lambda _, step: ((table(ids_of(step)) * scale - 1).square()).sum()

    with job() as fleet:
        wrapped = fleet.distributed_optimizer(make([tables[1].weight]), model=tables[1])
        fleet.init_worker()
        train([tables[1].weight], wrapped, loss(tables[1]), [each(wrapped) for each in schedules])
        ours = tables[1](torch.arange(ROWS)).detach()
    optimizer = make([tables[0].weight])
    train([tables[0].weight], optimizer, loss(tables[0]), [each(optimizer) for each in schedules])
    close(ours, tables[0].weight.detach(), tolerance)
    assert not torch.equal(ours, start), "nothing was trained"


@pytest.mark.slow
def test_options_on_rows(torchs: Any) -> None:
    tally = Tally("options, rows of tables")
    for info in infos(torchs):
        if RULES[info.name].rows is None:
            continue
        for name, options in inputs(torchs, info):
            make = lambda p, c=info.optim_cls, o=options: c(p, **copy.deepcopy(o))  # noqa: E731
            only = info.only_supports_sparse_grads
            # Adam's eps stands elsewhere on rows.
            tolerance = 1e-5 if info.name == "Adam" else 1e-6
            tally.take(
                name,
                lambda m=make, s=only, t=tolerance: compare_rows(m, all_rows, sparse=s, tolerance=t),
                refusals(options),
            )
    tally.close()


def test_torchs_own_sparse_optimizers(torchs: Any) -> None:
    """Where torch takes sparse gradients itself, rows that a step leaves out count too."""
    tally = Tally("sparse gradients")
    for info in infos(torchs):
        if not (info.supports_sparse or info.only_supports_sparse_grads):
            continue
        kwargs, schedules = info.metadata_for_sparse
        cases = [(f"{info.name}/its own", kwargs, ())]
        cases += [(f"{info.name}/schedule {place}", kwargs, (each,)) for place, each in enumerate(schedules)]
        # Momentum of torch's moves rows that no batch has touched, and weight decay is an error with sparse gradients.
        cases += [
            (name, options, ())
            for name, options in inputs(torchs, info)
            if not (options.get("momentum") or options.get("weight_decay"))
            and not any(options.get(flag) for flag in ("foreach", "fused", "differentiable"))
        ]
        for name, options, given in cases:
            make = lambda p, c=info.optim_cls, o=options: c(p, **copy.deepcopy(o))  # noqa: E731
            run = lambda m=make, g=given: compare_rows(m, some_rows, g, sparse=True, tolerance=1e-6)  # noqa: E731
            tally.take(name, run)
    tally.close()


def test_what_torch_refuses(torchs: Any) -> None:
    """Torch's constructor raises in a script with Fleet too; what it raises in a step is refused before."""
    tally = Tally("errors of optimizers")
    at_step = torchs.optimizers.OptimizerErrorEnum.STEP_ERROR
    for info in infos(torchs):
        for place, each in enumerate(info.optim_error_inputs_func("cpu", torch.float32)):
            given = each.optimizer_error_input

            def run(info: Any = info, each: Any = each, given: Any = given) -> None:
                params = given.params or [torch.nn.Parameter(torch.randn(1, 1))]
                if each.error_on is at_step or each.error_type is UserWarning:
                    with warnings.catch_warnings(), job() as fleet:
                        warnings.simplefilter("ignore")
                        fleet.distributed_optimizer(info.optim_cls(params, **given.kwargs))
                else:
                    with job() as fleet, pytest.raises(each.error_type, match=each.error_regex):
                        fleet.distributed_optimizer(info.optim_cls(params, **given.kwargs))

            named = {"complex": each.error_on is at_step, "duplicate": each.error_type is UserWarning}
            tally.take(f"{info.name}/{place} {given.desc}", run, refusals(named))
    tally.close()


# ---------------------------------------------------------------------------------------------- modules


@dataclass
class ModuleCase:
    name: str
    make: Callable[..., torch.nn.Module]  #: takes ``sparse``
    called: Callable[[torch.nn.Module], torch.Tensor]
    options: Mapping[str, Any]


def module_cases(torchs: Any) -> Iterator[ModuleCase]:
    """From module_db, from the older list of modules (which has EmbeddingBag), and from the functions' samples."""
    kinds = {torch.nn.Embedding: "Embedding", torch.nn.EmbeddingBag: "EmbeddingBag"}
    for info in torchs.modules.module_db:
        if info.module_cls not in kinds:
            continue
        for training in (True, False):
            found = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            for place, each in enumerate(found):
                built, given = each.constructor_input, each.forward_input

                def make(kind: Any = info.module_cls, built: Any = built, **options: Any) -> torch.nn.Module:
                    return kind(*built.args, **{**built.kwargs, **options})

                yield ModuleCase(
                    f"module_db/{kinds[info.module_cls]} {place} training={training}",
                    make,
                    lambda module, g=given: module(*g.args, **g.kwargs),
                    built.kwargs,
                )
    for place, each in enumerate(torchs.nn.get_new_module_tests()):
        name = each.get("module_name") or each.get("fullname", "").partition("_")[0]
        if name not in kinds.values():
            continue
        options = dict(zip(("num_embeddings", "embedding_dim", "max_norm", "norm_type", "scale_grad_by_freq", "mode"),
                           each.get("constructor_args", ()), strict=False))  # fmt: skip
        if "constructor" in each:
            built = each["constructor"]()
            kept = ("num_embeddings", "embedding_dim", "padding_idx", "mode", "max_norm", "norm_type")
            options = {name: getattr(built, name) for name in kept if hasattr(built, name)}
        ids = each["input_fn"]()
        kind, dtype = getattr(torch.nn, name), each.get("default_dtype", torch.float64)
        yield ModuleCase(
            f"module_tests/{place} {each.get('fullname') or name} {each.get('desc', '')}".strip(),
            lambda kind=kind, options=options, dtype=dtype, **more: kind(**options, **more, dtype=dtype),
            lambda module, ids=ids: module(ids),
            options,
        )
    for op in torchs.ops.op_db:
        if op.name not in ("nn.functional.embedding", "nn.functional.embedding_bag"):
            continue
        kind = torch.nn.Embedding if op.name.endswith("embedding") else torch.nn.EmbeddingBag
        for place, each in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=False)):
            weight, (ids,) = each.input, each.args
            calls = {name: value for name, value in each.kwargs.items() if name in ("offsets", "per_sample_weights")}
            options = {name: value for name, value in each.kwargs.items() if name not in (*calls, "sparse")}
            yield ModuleCase(
                f"op_db/{kind.__name__} {place}",
                lambda kind=kind, weight=weight, options=options, **more: kind(
                    *weight.shape, _weight=weight.clone(), **{**options, **more}
                ),
                lambda module, ids=ids, calls=calls: module(ids, **calls),
                options,
            )


def compare_module(case: ModuleCase, *, sparse: bool) -> None:
    """A table that went remote since it is sparse, or since all embeddings did."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = case.make(sparse=False)
        torch.manual_seed(3)
        ours = case.make(sparse=sparse)
    start = theirs.weight.detach().clone()
    with torch.no_grad():
        ours.weight.copy_(start)

    def step(module: Any, optimizer: Any) -> torch.Tensor:
        out = case.called(module)
        optimizer.zero_grad()
        (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        optimizer.step()
        return out.detach()

    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    expected = [step(theirs, sgd), step(theirs, sgd), theirs.weight.detach()]
    with job() as fleet:
        sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
        wrapped = fleet.distributed_optimizer(sgd, model=ours, remote="sparse" if sparse else "all")
        fleet.init_worker()
        assert repr(ours).startswith("_Remote")
        found = [step(ours, wrapped), step(ours, wrapped)]
        found.append(ours.weight.detach())
        close(found, expected)


@pytest.mark.parametrize("sparse", [True, False])
def test_modules(torchs: Any, sparse: bool) -> None:
    tally = Tally("modules with `sparse=True`" if sparse else 'modules with `remote="all"`')
    for case in module_cases(torchs):
        refused = refusals({**case.options, "mode": case.options.get("mode") == "max"})
        tally.take(case.name, lambda c=case: compare_module(c, sparse=sparse), refused)
    tally.close()


def test_what_torchs_modules_refuse(torchs: Any) -> None:
    tally = Tally("errors of modules")
    for info in torchs.modules.module_db:
        if info.module_cls not in (torch.nn.Embedding, torch.nn.EmbeddingBag) or not info.module_error_inputs_func:
            continue
        found = info.module_error_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=True)
        for place, each in enumerate(found):
            built, given = each.module_error_input.constructor_input, each.module_error_input.forward_input

            def run(info: Any = info, each: Any = each, built: Any = built, given: Any = given) -> None:
                def script(fleet: Fleet) -> None:
                    module = info.module_cls(*built.args, sparse=True, **built.kwargs)
                    fleet.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=0.1), model=module)
                    fleet.init_worker()
                    module(*given.args, **given.kwargs)

                with job() as fleet, pytest.raises(each.error_type) as raised:
                    script(fleet)
                # Out of range is the same kind of error in words of Fleet's own.
                assert isinstance(raised.value, FleetError) or re.search(each.error_regex, str(raised.value))

            floats = any(isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in given.args)
            tally.take(f"{info.name}/{place}", run, refusals({"float ids": floats}))
    tally.close()
