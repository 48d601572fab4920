"""The shape of the package, read from its source: layers, cycles, and what only listed files may do.

A new file needs nothing here unless it opens a new folder (one name in ``LAYERS``) or does what few may do (one line in
``ONLY``, with the reason). Imports inside functions and under TYPE_CHECKING count like any other; the search for
cycles alone looks at what runs when a module is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GENERATED = {"fleet/ps/wire/fleet_pb2.py"}

#: From the bottom up. A unit is a module or a folder with all in it, the longest fitting name counts; it may import
#: itself and the units of lower layers, never a neighbour.
LAYERS: list[tuple[str, ...]] = [
    ("errors", "clock", "spelling", "checksum", "locks"),
    ("cluster", "instead"),
    ("environ", "transpiler", "ps.memory", "members", "callers", "lifecycle", "observing.names", "observing.process"),
    ("ports", "rendezvous", "mpi", "metrics", "ps.kernels", "observing", "observing.worker"),
    (
        "role_maker",
        "strategy",
        "ps.consistency",
        "ps.layout",
        "ps.choice",
        "collective.options",
        "launch.job",
        "launch.parser",
    ),
    ("collective.pace", "collective.silence"),
    (
        *("checkpoint", "data", "nn", "optimizer", "exit_guard", "ps.wire"),
        *("launch.folder", "launch.guard", "launch.watch", "launch.view"),
    ),
    (
        "values",
        "optim",
        "serving",
        "ps.table",
        "ps.describe",
        "ps.resuming",
        "launch.network",
        "launch.local",
        "observing.prometheus",
    ),
    ("observing.observer",),
    ("ps.server", "ps.worker", "collective"),  # siblings: server and worker know each other by their messages only
    ("ps.backend", "collective.backend"),
    ("launch.server", "launch.checkpoints", "launch.sources", "launch.environment"),
    ("launch.top", "launch.doctor", "launch.report", "launch.checkpoint_options"),
    ("launch.cli", "api"),
    ("transpile", "periodic"),
    ("launch.__main__", "__main__", "__init__"),
    ("facade",),
    ("transpiler.__init__", "collective.__init__"),  # import points that get the whole package when they are asked
]

#: Decisions: nothing but the standard library, and of that nothing that has effects or differs from run to run.
PURE = (
    *("errors", "spelling", "cluster", "strategy", "role_maker", "transpiler"),
    *("ps.consistency", "ps.layout", "ps.choice", "launch.job"),
    *("collective.options", "collective.pace", "collective.silence"),
    "observing.names",
)
#: Effects, and still nothing to install: ``import fleet`` and the launcher must be light.
STANDARD_LIBRARY = (
    *(
        "clock",
        "environ",
        "api",
        "transpile",
        "periodic",
        "facade",
        "__init__",
        "transpiler.__init__",
        "collective.__init__",
    ),
    *(
        "locks",
        "metrics",
        "launch.folder",
        "launch.guard",
        "launch.watch",
        "launch.view",
        "launch.local",
        "launch.parser",
        "launch.cli",
        "launch.environment",
        "launch.checkpoint_options",
    ),
    *("observing", "observing.process", "observing.observer", "observing.prometheus"),
)
EFFECTS = {
    *("os", "sys", "io", "pathlib", "shutil", "tempfile", "logging", "atexit", "signal", "subprocess"),
    *("time", "datetime", "random", "secrets", "uuid", "socket", "select", "selectors"),
    *("threading", "asyncio", "concurrent", "multiprocessing", "queue"),
}

#: Who may import a module or use a name, and for what. The lists are exact: a line nobody needs any more fails as well.
ONLY: dict[str, dict[str, str]] = {
    "os.environ os.environb os.getenv os.putenv os.unsetenv": {"environ.py": "monopoly"},
    "grpc": {"ps/wire/grpc_client.py": "adapter", "ps/wire/grpc_server.py": "adapter", "ps/wire/health.py": "adapter"},
    "ssl": {"ps/wire/tls.py": "monopoly"},
    "google": {"ps/wire/frame.py": "headers"},
    "mpi4py": {"mpi.py": "adapter"},
    "numba llvmlite": {"ps/kernels/jit.py": "compiler"},
    "threading asyncio concurrent _thread": {
        "callers.py": "turns",
        "checkpoint/manifest.py": "reader",
        "checkpoint/pieces.py": "writers",
        "collective/clerk.py": "clerk",
        "exit_guard.py": "lock",
        "launch/local.py": "waiters",
        "observing/observer.py": "observer",
        "mpi.py": "start",
        "nn/handle.py": "gradients of several threads",
        "periodic.py": "writer",
        "ps/backend.py": "embedding",
        "ps/kernels/jit.py": "compiler",
        "ps/server/ending.py": "event",
        "ps/server/filling.py": "reader",
        "ps/server/journal.py": "lock",
        "ps/server/lock.py": "lock",
        "ps/server/roll.py": "lock",
        "ps/server/room.py": "memory",
        "ps/server/runtime.py": "lifetime",
        "ps/server/shares.py": "writer",
        "ps/server/snapshots.py": "writer",
        "ps/wire/crew.py": "threads",
        "ps/wire/direct_client.py": "lock",
        "ps/wire/direct_connections.py": "lock",
        "ps/wire/direct_server.py": "porter",
        "ps/wire/grpc_client.py": "readers",
        "ps/wire/grpc_server.py": "pool",
        "ps/wire/health.py": "pool",
        "ps/wire/loopback.py": "replies",
        "ps/worker/client.py": "heartbeat",
        "ps/worker/communicator.py": "sender",
        "ps/worker/early.py": "sender",
    },
    "time datetime": {
        "clock.py": "clock",
        "collective/group.py": "torch's timeouts",
        "launch/checkpoints.py": "dates",
        "launch/guard.py": "standalone",
        "launch/local.py": "events",
        "observing/process.py": "processor time",
        "observing/report.py": "a date",
    },
    "secrets uuid": {
        "checkpoint/exporting.py": "names",
        "checkpoint/inference.py": "names",
        "checkpoint/places.py": "proofs",
        "checkpoint/writer.py": "names",
        "launch/cli.py": "names",
        "ps/wire/direct_server.py": "keys",
        "ps/worker/runtime.py": "incarnation",
        "rendezvous.py": "token",
    },
    "random numpy.random torch.manual_seed torch.random torch.rand torch.randn": {},
    "subprocess": {"launch/local.py": "children", "launch/environment.py": "what may crash"},
    "socket": {
        "collective/group.py": "store",
        "launch/network.py": "ports",
        "launch/environment.py": "hostname",
        "ports.py": "ports",
        "ps/wire/direct_client.py": "connections",
        "ps/wire/direct_connections.py": "connections",
        "ps/wire/direct_server.py": "doors",
        "ps/wire/exposure.py": "addresses",
        "ps/wire/stream.py": "frames",
        "ps/wire/tls.py": "why a handshake fails",
        "ps/worker/joining.py": "hostname",
        "rendezvous.py": "addresses",
    },
    "print": {
        "launch/checkpoints.py": "console",
        "launch/checkpoint_options.py": "console",
        "launch/cli.py": "console",
        "launch/doctor.py": "console",
        "launch/environment.py": "console",
        "launch/report.py": "console",
        "launch/top.py": "console",
        "ps/worker/runtime.py": "plan",
    },
    "rich": {"launch/top.py": "live table", "launch/view.py": "live view", "observing/table.py": "table"},
    "prometheus_client": {"observing/prometheus.py": "page"},
    "tensorboard torch.utils.tensorboard": {"observing/tensorboard.py": "scalars"},
    "pickle cPickle marshal shelve dill cloudpickle joblib multiprocessing eval exec torch.load torch.save": {},
    "numpy.load numpy.save": {},
    "logging.basicConfig logging.config": {"launch/cli.py": "command"},
    # The network is chosen where a backend is put together; nobody else names a concrete one.
    "fleet.ps.wire.loopback": {"ps/backend.py": "choice"},
    "fleet.ps.wire.direct": {"ps/backend.py": "choice"},
    "fleet.ps.wire.grpc_server": {"ps/backend.py": "choice"},
    "fleet.ps.wire.grpc_client": {"ps/wire/grpc_server.py": "connect"},
    "fleet.ps.table.memory": {
        "ps/table/table.py": "default",
        "ps/table/changes.py": "rows held",
        "ps/table/compensation.py": "rows handed out",
    },
}

FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted((ROOT / "fleet").rglob("*.py"))
    if path.relative_to(ROOT).as_posix() not in GENERATED
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def modules() -> dict[str, str]:
    """Dotted name as it is imported -> the key of its file."""
    return {key.removesuffix(".__init__"): key for key in FILES}


def imported(node: ast.AST) -> list[str]:
    """The full names an import statement brings in: of modules where they are modules, else of what is in them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "ruff allows no relative imports"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@cache
def nodes(module: str, *, at_import_only: bool = False) -> tuple[ast.AST, ...]:
    return tuple(walk(tree(module), at_import_only))


def walk(top: ast.AST, at_import_only: bool) -> Iterator[ast.AST]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (at_import_only and (later or typing)):
            stack.extend(ast.iter_child_nodes(node))


def ours(module: str, *, at_import_only: bool = False) -> set[str]:
    """The package's own modules that ``module`` imports."""
    known = modules()
    names = [name for node in nodes(module, at_import_only=at_import_only) for name in imported(node)]
    found = {known.get(name) or known.get(name.rpartition(".")[0]) for name in names}
    return {key for key in found if key is not None}


def unit(module: str) -> str:
    inner = module.removeprefix("fleet.")
    fitting = [name for layer in LAYERS for name in layer if f"{inner}.".startswith(f"{name}.")]
    return max(fitting, key=len, default="")


def is_in(module: str, units: tuple[str, ...]) -> bool:
    return unit(module) in units


LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
WITH_CODE = [module for module in FILES if FILES[module].read_text(encoding="utf-8").strip()]


def test_every_module_has_a_layer() -> None:
    homeless = [module for module in WITH_CODE if not unit(module)]
    assert homeless == [], "add their folder to LAYERS"
    assert sorted(set(LEVEL) - {unit(module) for module in WITH_CODE}) == [], "in LAYERS and not in the package"


@pytest.mark.parametrize("module", WITH_CODE)
def test_imports_point_downwards(module: str) -> None:
    mine = unit(module)
    wrong = [other for other in sorted(ours(module)) if unit(other) != mine and LEVEL[unit(other)] >= LEVEL[mine]]
    assert wrong == [], f"{module} (layer {LEVEL[mine]}) imports upwards or from a neighbour"


def test_there_are_no_cycles() -> None:
    try:
        TopologicalSorter({module: ours(module, at_import_only=True) for module in FILES}).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


@pytest.mark.parametrize("module", [m for m in WITH_CODE if is_in(m, PURE + STANDARD_LIBRARY)])
def test_light_modules_import_the_standard_library_only(module: str) -> None:
    allowed = sys.stdlib_module_names - (EFFECTS if is_in(module, PURE) else set()) | {"fleet"}
    # api imports torch inside one function, when a backend is there already.
    at_import = is_in(module, STANDARD_LIBRARY)
    found = {name.partition(".")[0] for n in nodes(module, at_import_only=at_import) for name in imported(n)}
    assert sorted(found - allowed) == []


@cache
def uses(module: str) -> set[str]:
    """Every name the file imports or looks up, in full: with ``import numpy as np``, np.random.x is numpy.random.x."""
    aliases = {
        alias.asname: alias.name
        for node in nodes(module)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    found: set[str] = set()
    for node in nodes(module):
        found.update(imported(node))
        if isinstance(node, ast.Name | ast.Attribute):
            head, dot, rest = ast.unparse(node).partition(".")
            found.add(aliases.get(head, head) + dot + rest)
    return found


@pytest.mark.parametrize("names", ONLY, ids=lambda names: names.split()[0])
def test_only_listed_files_do_it(names: str) -> None:
    restricted = tuple(names.split())
    users = {
        FILES[module].relative_to(ROOT / "fleet").as_posix()
        for module in FILES
        if any(use == name or use.startswith(f"{name}.") for use in uses(module) for name in restricted)
    }
    listed = set(ONLY[names])
    assert sorted(users - listed) == [], f"may not use {names}; or list them, with a reason"
    assert sorted(listed - users) == [], f"need {names} no more; take them off the list"
