"""The shape of the package, read from its source: layers, cycles, and what only listed files may do.

A new file needs nothing here unless it opens a new folder (one name in ``LAYERS``) or does what few may do (one line in
``ONLY``, with the reason). Imports inside functions and under TYPE_CHECKING count like any other; the search for
cycles alone looks at what runs when a module is imported.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fleet.ps.consistency import MODES

ROOT = Path(__file__).parent.parent
GENERATED = {"fleet/ps/wire/fleet_pb2.py", "fleet/serving/lookup_pb2.py"}

#: From the bottom up. A unit is a module or a folder with all in it, the longest fitting name counts; it may import
#: itself and the units of lower layers, never a neighbour.
LAYERS: list[tuple[str, ...]] = [
    ("errors",),
    ("base",),
    ("numeric", "plan", "bootstrap", "telemetry"),
    ("kernels", "strategy", "role_maker", "checkpoint", "optimizer", "metrics", "data", "ps.wire", "ps.consistency"),
    ("nn", "optim", "ps.table"),
    ("serving", "averaging", "checkpoint.dcp"),
    ("ps.server", "ps.worker", "collective"),  # siblings: server and worker know each other by their messages only
    ("ps",),
    ("launch", "api"),
    ("transpiler", "checkpoints", "lightning", "ray"),
    ("__init__", "__main__"),
]

#: What lies directly in the package: modules that users import, or whose one class they call by its name.
FOR_USERS = {"api", "checkpoints", "errors", "lightning", "metrics", "optim", "optimizer", "ray"}

#: Two files of one name do the same for the two sides of a job, server and worker, or for its two kinds.
MIRRORED = {
    *("barrier", "handshake", "object_states", "replacement", "runtime"),
    *("backend", "lease", "model_export", "reductions", "resumption"),
}

#: Decisions: nothing but the standard library, and of that nothing that has effects or differs from run to run.
PURE = (
    *("errors", "base.spelling", "base.cluster", "plan", "strategy", "role_maker"),
    *("ps.consistency", "numeric.reduction", "checkpoint.resume_choice"),
    *("launch.process_plan", "collective.liveness", "telemetry.figures"),
)
#: Effects, and still nothing to install: ``import fleet`` and the launcher must be light.
STANDARD_LIBRARY = (
    *("base", "metrics", "api", "checkpoints", "transpiler", "collective.__init__", "__init__"),
    *("telemetry", "launch"),
)
#: But for these, which are imported late, by whoever needs what they need.
HEAVY = (
    *("base.checksum", "base.lifecycle", "launch.checkpoint_command", "launch.replay_command"),
    "telemetry.worker_figures",
)
EFFECTS = {
    *("os", "sys", "io", "pathlib", "shutil", "tempfile", "logging", "atexit", "signal", "subprocess"),
    *("time", "datetime", "random", "secrets", "uuid", "socket", "select", "selectors"),
    *("threading", "asyncio", "concurrent", "multiprocessing", "queue"),
}

#: Who may import a module or use a name, and for what. The lists are exact: a line nobody needs any more fails as well.
ONLY: dict[str, dict[str, str]] = {
    "os.environ os.environb os.getenv os.putenv os.unsetenv": {"base/settings.py": "monopoly"},
    "grpc": {
        "ps/wire/grpc_client.py": "adapter",
        "ps/wire/grpc_server.py": "adapter",
        "ps/wire/health.py": "adapter",
        "ps/wire/plain_service.py": "adapter",
    },
    "ssl": {"ps/wire/tls.py": "certificates", "ps/wire/tls_line.py": "sockets"},
    "google": {"ps/wire/frame.py": "headers", "serving/look_ups.py": "what cannot be read"},
    "mpi4py": {"bootstrap/mpi_world.py": "adapter"},
    "ray": {"ray.py": "adapter"},
    "numba llvmlite": {"numeric/jit.py": "compiler"},
    "threading asyncio concurrent _thread": {
        "base/interruption.py": "what no Ctrl-C may interrupt",
        "base/turns.py": "turns",
        "checkpoint/manifest.py": "reader",
        "checkpoint/pieces.py": "writers",
        "collective/store_monitor.py": "monitor",
        "base/exit_guard.py": "lock",
        "launch/supervisor.py": "waiters",
        "telemetry/observer.py": "observer",
        "bootstrap/mpi_world.py": "start",
        "checkpoints.py": "writer",
        "ray.py": "lock",
        "ps/backend.py": "embedding",
        "numeric/elementary.py": "lock",
        "numeric/jit.py": "compiler",
        "ps/table/row_file.py": "writer",
        "ps/table/stores.py": "writer",
        "ps/server/job_end.py": "event",
        "ps/server/initialization.py": "reader",
        "ps/server/deferring_lock.py": "lock",
        "ps/server/members.py": "lock",
        "ps/server/runtime.py": "lifetime",
        "ps/server/background.py": "tasks",
        "ps/server/checkpoint_reader.py": "memory for rows",
        "ps/server/durability/durability.py": "writer",
        "ps/server/durability/state_directory.py": "lock",
        "ps/wire/leader_pool.py": "threads",
        "ps/wire/direct_client.py": "lock",
        "ps/wire/direct_connections.py": "lock",
        "ps/wire/direct_server.py": "porter",
        "ps/wire/grpc_client.py": "readers",
        "ps/wire/grpc_server.py": "pool",
        "ps/wire/health.py": "pool",
        "ps/wire/loopback.py": "replies",
        "ps/wire/plain_service.py": "pool",
        "ps/wire/small_calls.py": "calls",
        "ps/worker/connection.py": "heartbeat",
        "ps/worker/dense_group.py": "ends",
        "ps/worker/communicator.py": "sender",
        "ps/worker/lease.py": "whose claim",
        "ps/worker/overlap.py": "sender",
        "ps/worker/prefetch.py": "preparer",
        "ps/worker/new_servers.py": "lock",
        "ps/worker/resizing.py": "copier",
        "serving/checkpoint_source.py": "event",
        "serving/editions.py": "lock",
        "serving/follower.py": "follower",
        "serving/readers.py": "lock",
        "serving/replica.py": "streams",
        "serving/replica_pool.py": "those who wait",
    },
    "time datetime": {
        "base/clock.py": "clock",
        "averaging/communicators.py": "torch's timeouts",
        "ps/worker/dense_group.py": "torch's timeouts",
        "collective/process_group.py": "torch's timeouts",
        "launch/checkpoint_command.py": "dates",
        "launch/guard.py": "standalone",
        "launch/supervisor.py": "events",
        "telemetry/process.py": "processor time",
        "telemetry/html_report.py": "a date",
    },
    "secrets uuid": {
        "checkpoint/plain_files.py": "names",
        "checkpoint/dcp.py": "names",
        "ray.py": "names, keys",
        "checkpoint/inference.py": "names",
        "checkpoint/places.py": "proofs",
        "checkpoint/writer.py": "names",
        "launch/cli.py": "names",
        "ps/wire/direct_server.py": "keys",
        "ps/wire/small_calls.py": "keys",
        "ps/worker/runtime.py": "incarnation",
        "serving/replica.py": "incarnation",
        "serving/replica_pool.py": "shares",
        "serving/server_source.py": "incarnation",
        "bootstrap/rendezvous.py": "token",
    },
    "random numpy.random torch.manual_seed torch.random torch.rand torch.randn": {},
    "subprocess": {"launch/supervisor.py": "children", "launch/env_report.py": "what may crash"},
    "socket": {
        "collective/process_group.py": "store",
        "launch/host_network.py": "ports",
        "launch/env_report.py": "hostname",
        "base/ports.py": "ports",
        "ps/wire/direct_client.py": "connections",
        "ps/wire/direct_connections.py": "connections",
        "ps/wire/direct_server.py": "doors",
        "base/exposure.py": "addresses",
        "ps/wire/grpc_server.py": "own address",
        "ps/wire/line.py": "frames",
        "ps/wire/small_calls.py": "connections",
        "ps/wire/tls_line.py": "frames",
        "ps/wire/tls.py": "why a handshake fails",
        "ps/worker/handshake.py": "hostname",
        "ps/worker/dense_group.py": "store",
        "bootstrap/rendezvous.py": "addresses",
    },
    "print": {
        "launch/checkpoint_command.py": "console",
        "launch/checkpoint_options.py": "console",
        "launch/cli.py": "console",
        "launch/doctor.py": "console",
        "launch/env_report.py": "console",
        "launch/plan_command.py": "console",
        "launch/replay_command.py": "console",
        "launch/replay_options.py": "console",
        "launch/report_command.py": "console",
        "launch/top.py": "console",
        "ps/worker/runtime.py": "plan",
    },
    "rich": {"launch/top.py": "live table", "launch/live_view.py": "live view", "telemetry/live_table.py": "table"},
    "prometheus_client": {"telemetry/prometheus.py": "page"},
    "tensorboard torch.utils.tensorboard": {"telemetry/tensorboard.py": "scalars"},
    "pickle cPickle marshal shelve dill cloudpickle joblib multiprocessing eval exec torch.load torch.save": {
        "checkpoint/dcp.py": "others' metadata, by names on a list",
        "nn/table_weight.py": "refuses, and sends gradients",
    },
    "numpy.load numpy.save": {},
    "logging.basicConfig logging.config": {"launch/cli.py": "command"},
    # The network is chosen where a backend is put together; nobody else names a concrete one.
    "fleet.ps.wire.loopback": {"ps/backend.py": "choice"},
    "fleet.ps.wire.direct": {"ps/wire/real_network.py": "choice"},
    "fleet.ps.wire.grpc_server": {"ps/wire/real_network.py": "choice", "ps/wire/plain_service.py": "listen"},
    "fleet.ps.wire.grpc_client": {"ps/wire/grpc_server.py": "connect", "ps/wire/plain_service.py": "connect"},
    "fleet.ps.table.memory_store": {
        "ps/table/table.py": "default",
        "ps/table/stores.py": "without a bound",
        "ps/table/changes.py": "rows held",
        "ps/table/compensation.py": "rows handed out",
        "ps/worker/geo_replica.py": "rows that are there",
        "serving/kept_rows.py": "default",
    },
}

#: Who else writes the name of a consistency mode, and what it is there. Files in ``ps.consistency`` may; all others ask
#: the job's policy.
MODE_NAMES = {
    "strategy/parameter_server.py": "what the user may choose",
    "launch/cli.py": "a form of what it shows",
    "plan/config.py": "an option of the source system's configuration",
    "plan/specs.py": "the default of the wire's and the checkpoints' text",
}
#: What a mode's flags were called, and what else has such a name.
MODE_FLAGS = {"adds", "behind", "lockstep"}
FLAGS_OF_OTHERS = {
    "checkpoint/resume_choice.py": "of what a server holds, as it travels",
    "telemetry/view.py": "a figure",
}

FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted((ROOT / "fleet").rglob("*.py"))
    if path.relative_to(ROOT).as_posix() not in GENERATED
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
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
    if not at_import_only:
        yield from ast.walk(top)
        return
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (later or typing):
            stack.extend(ast.iter_child_nodes(node))


def dotted(node: ast.AST) -> str:
    """What a name, or an attribute of one, looks up; nothing for all else."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(attributes)]) if isinstance(node, ast.Name) else ""


@cache
def ours(module: str, *, at_import_only: bool = False) -> set[str]:
    """The package's own modules that ``module`` imports."""
    known = modules()
    names = [name for node in nodes(module, at_import_only=at_import_only) for name in imported(node)]
    stubs = {path.removesuffix(".py").replace("/", ".") for path in GENERATED}
    found = {known.get(name) or known.get(name.rpartition(".")[0]) for name in names if name not in stubs}
    return {key for key in found if key is not None}


def unit(module: str) -> str:
    inner = module.removeprefix("fleet.")
    fitting = [name for layer in LAYERS for name in layer if f"{inner}.".startswith(f"{name}.")]
    return max(fitting, key=len, default="")


def is_in(module: str, names: tuple[str, ...]) -> bool:
    inner = f"{module.removeprefix('fleet.')}."
    return any(inner.startswith(f"{name}.") for name in names)


def is_light(module: str) -> bool:
    return is_in(module, PURE + STANDARD_LIBRARY) and not is_in(module, HEAVY)


LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
WITH_CODE = [module for module in FILES if FILES[module].read_text(encoding="utf-8").strip()]


def test_every_module_has_a_layer() -> None:
    homeless = [module for module in WITH_CODE if not unit(module)]
    assert homeless == [], "add their folder to LAYERS"
    assert sorted(set(LEVEL) - {unit(module) for module in WITH_CODE}) == [], "in LAYERS and not in the package"


def test_what_lies_at_the_top_is_for_users() -> None:
    assert len(LAYERS) <= 11
    assert {name for name in (path.stem for path in (ROOT / "fleet").glob("*.py")) if name[0] != "_"} == FOR_USERS


def test_a_file_s_name_is_its_own() -> None:
    stems = Counter(path.stem for path in FILES.values() if path.stem[0] != "_")
    assert {stem for stem, times in stems.items() if times > 1} == MIRRORED


def test_imports_point_downwards() -> None:
    def wrong_in(module: str) -> list[str]:
        mine = unit(module)
        return [other for other in sorted(ours(module)) if unit(other) != mine and LEVEL[unit(other)] >= LEVEL[mine]]

    assert {module: wrong for module in WITH_CODE if (wrong := wrong_in(module))} == {}, "upwards, or from a neighbour"


def test_tests_reach_the_inside_of_a_job_through_one_file() -> None:
    """The simulation is run without the tests too, and has its own way."""
    tests = ROOT / "tests"
    files = [path for path in tests.rglob("*.py") if path != Path(__file__)]
    inside = {path.relative_to(tests).as_posix() for path in files if "._chosen" in path.read_text(encoding="utf-8")}
    assert inside == {"inside.py", "simulation/job.py"}


def test_there_are_no_cycles() -> None:
    try:
        TopologicalSorter({module: ours(module, at_import_only=True) for module in FILES}).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_light_modules_import_the_standard_library_only() -> None:
    def others_in(module: str) -> list[str]:
        pure = is_in(module, PURE)
        allowed = sys.stdlib_module_names - (EFFECTS if pure else set()) | {"fleet"}
        # api imports torch inside one function, when a backend is there already.
        found = {name.partition(".")[0] for n in nodes(module, at_import_only=not pure) for name in imported(n)}
        return sorted(found - allowed)

    light = [module for module in WITH_CODE if is_light(module)]
    assert {module: others for module in light if (others := others_in(module))} == {}


#: What makes tensors where the script has chosen that new ones are, unless it is told where.
MAKE_TENSORS = (
    "arange as_tensor asarray empty eye full linspace ones rand randint randn randperm scalar_tensor tensor zeros"
)


def test_a_tensor_that_is_made_here_says_where() -> None:
    """A script may have called ``torch.set_default_device``, which is meant for what it makes itself."""
    made = {f"torch.{name}" for name in MAKE_TENSORS.split()}

    def silent(module: str) -> list[int]:
        calls = (node for node in nodes(module) if isinstance(node, ast.Call) and dotted(node.func) in made)
        return [call.lineno for call in calls if not any(each.arg == "device" for each in call.keywords)]

    found = {module: lines for module in WITH_CODE if (lines := silent(module))}
    assert len(found.pop("fleet.nn.embedding")) == 1, "the weight that a script makes with an embedding"
    assert found == {}


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
        if name := dotted(node):
            head, dot, rest = name.partition(".")
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


@cache
def mode_names() -> set[str]:
    """The names of all modes, read from the files that define them."""
    calls = [
        node
        for module in FILES
        if is_in(module, ("ps.consistency",))
        for node in nodes(module)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Mode"
    ]
    return {ast.literal_eval(call.args[0]) for call in calls}


def of_modes(module: str) -> tuple[set[str], set[str]]:
    """The names of modes that stand in a file as text, and what it reads of a mode that only a policy may."""
    written, read = set(), set()
    for node in nodes(module):
        if isinstance(node, ast.Constant) and node.value in mode_names():
            written.add(node.value)
        elif isinstance(node, ast.Attribute):
            whose = ast.unparse(node.value).rpartition(".")[2]
            if node.attr in MODE_FLAGS or (node.attr == "name" and whose in ("mode", "_mode", "MODE", "policy")):
                read.add(ast.unparse(node))
    return written, read


def test_modes_are_told_apart_in_their_own_files_only() -> None:
    assert mode_names() == {*MODES}, "what is read from the files is what there is"
    found = {
        FILES[module].relative_to(ROOT / "fleet").as_posix(): of_modes(module)
        for module in FILES
        if not is_in(module, ("ps.consistency",))
    }
    writers = {file for file, (written, _) in found.items() if written}
    readers = {file: sorted(read) for file, (_, read) in found.items() if read and file not in FLAGS_OF_OTHERS}
    assert readers == {}, "ask the policy of the job, and give it the question if it has none"
    assert sorted(writers - set(MODE_NAMES)) == [], "tell modes apart in fleet/ps/consistency/ only"
    assert sorted(set(MODE_NAMES) - writers) == [], "take them off the list"
    assert sorted(file for file in FLAGS_OF_OTHERS if not found[file][1]) == [], "take them off the list"


#: What a noun phrase or half a sentence begins with.
NO_VERBS = {
    *("A", "An", "The", "All", "Any", "Both", "Each", "Every", "Its", "No", "One", "Some", "That", "These", "This"),
    *("Those", "Another", "Other", "Only", "Two", "Once", "It", "So", "If", "Nothing", "Nobody", "None", "Everything"),
    *("Everybody", "Somebody", "Something", "How", "What", "Whatever", "Where", "Whether", "Which", "Who", "Whose"),
    *("Why", "When", "Whenever", "As", "After", "Around", "At", "Before", "By", "For", "From", "In", "Inside", "Of"),
    *("On", "To", "With", "Without", "Memory", "State"),
}


def begins_with_a_verb(node: ast.AST, docstring: str) -> bool:
    """Whether it is an imperative in a function ("Return …") or a third person in a class ("Holds …"). An argument in
    quotes may be its subject."""
    first = docstring.split()[0].rstrip(",:")
    third_person = first.endswith("s") and not first.endswith("ss")
    verb = first.isalpha() and first not in NO_VERBS and third_person == isinstance(node, ast.ClassDef)
    return verb or first.startswith("``")


def test_docstrings_begin_with_a_verb() -> None:
    found = [
        f"{module}: {node.name}: {docstring.splitlines()[0]}"
        for module in WITH_CODE
        if module != "fleet.errors"  # an error's is a sentence: what has happened
        for node in nodes(module)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and (docstring := ast.get_docstring(node))
        and not begins_with_a_verb(node, docstring)
    ]
    assert found == [], "say what it does: Return …, Say whether …, Holds …"
