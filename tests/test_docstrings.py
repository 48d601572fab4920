"""The API reference: every public name has a docstring with an example, and the example does what it says.

Examples run in a job of one worker, alone in this process, set up by the lines that docs/reference/index.md shows;
those of errors may have a second job, as docs/reference/errors.md sets it up.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import PATIENCE_S

import fleet
import fleet.errors
import fleet.ray
from fleet.checkpoint.dcp import FleetStorageReader
from fleet.launch import checkpoint_options, cli
from fleet.metrics import Metrics
from fleet.optimizer import DistributedOptimizer
from fleet.strategy.parameter_server import Strategy

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"

#: Modules whose ``__all__`` is public, and objects whose methods are.
MODULES = (
    *("fleet", "fleet.nn", "fleet.optim", "fleet.role_maker", "fleet.transpiler", "fleet.collective", "fleet.data"),
    "fleet.serving",
)
NAMESPACES = {"fleet.StrategyFactory": fleet.StrategyFactory, "fleet.metrics": Metrics}

RUNNER_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public() -> dict[str, Any]:
    """Every name that has to be documented; modules have pages of their own."""
    found: dict[str, Any] = {
        "fleet.optimizer.DistributedOptimizer": DistributedOptimizer,
        "fleet.strategy.Strategy.with_settings": Strategy.with_settings,
        "fleet.checkpoint.dcp.FleetStorageReader": FleetStorageReader,
        "fleet.ray.run": fleet.ray.run,
    }
    for module in MODULES:
        loaded = importlib.import_module(module)
        found |= {f"{module}.{name}": getattr(loaded, name) for name in loaded.__all__}
    for space, kind in NAMESPACES.items():
        found |= {f"{space}.{name}": value for name, value in inspect.getmembers(kind, inspect.isfunction)}
    errors = inspect.getmembers(fleet.errors, inspect.isclass)
    found |= {f"fleet.errors.{name}": error for name, error in errors if error.__name__ == name}
    return {
        name: value
        for name, value in found.items()
        if not inspect.ismodule(value) and not name.rpartition(".")[2].startswith("_") and _is_ours(value)
    }


def _is_ours(value: Any) -> bool:
    """What a name for one of Python's types is not."""
    return str(getattr(value, "__module__", "fleet")).startswith("fleet")


PUBLIC = public()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that examples begin with."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for page in ("index.md", "errors.md"):
        (setup,) = re.findall(r"```python\n(.*?)```", (REFERENCE / page).read_text(), re.DOTALL)
        exec(setup, names)
    yield names
    with contextlib.suppress(fleet.errors.NotInitializedError):  # an example may end between two jobs
        fleet.stop_worker()
    for thread in threading.enumerate():
        if thread.name == "second job":
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "its server waits for somebody"


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name(name: str, job: dict[str, Any]) -> None:
    text = inspect.getdoc(PUBLIC[name])
    assert text, "no docstring"
    test = doctest.DocTestParser().get_doctest(text, job, name, None, None)
    assert test.examples, "its docstring has no example"
    told: list[str] = []
    doctest.DocTestRunner(optionflags=RUNNER_FLAGS).run(test, out=told.append)
    assert not told, "".join(told)


def test_every_public_name_is_in_the_reference() -> None:
    shown = set()
    for page in REFERENCE.glob("*.md"):
        shown |= set(re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))
    assert shown == {name for name in PUBLIC if name.rpartition(".")[0] not in NAMESPACES}


def test_every_command_is_in_the_reference() -> None:
    page = (REFERENCE / "commands.md").read_text()
    shown = re.findall(r"^<!-- output of: fleet (.+) --help -->$", page, re.MULTILINE)
    of_checkpoints = checkpoint_options._parser("fleet checkpoint")._subparsers._group_actions[0].choices
    expected = (set(cli._COMMANDS) - {"run"}) | {f"checkpoint {name}" for name in of_checkpoints}
    assert set(shown) == expected, "fleet run is fleetrun"
