"""What ``import fleet`` costs and touches, and what its names do before ``fleet.init``."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S
from prepared import Prepared

import fleet
from fleet.base.pointers import NAMES, OF_A_PROGRAM, OF_A_TRAINER, OF_ROLE_MAKERS
from fleet.errors import ArgumentTypeError, NotInitializedError, UnknownNameError

NEEDS_NO_INIT = {
    *("Checkpoints", "Fleet", "Program", "StrategyFactory", "data", "init", "metrics", "nn", "optim", "serving"),
}
CALLS = sorted(set(fleet.__all__) - NEEDS_NO_INIT)


#: Imports step by step, and what has been loaded or touched by then.
CODE = """
import json, logging, signal, sys, threading

def shared():
    return repr((
        logging.root.level, logging.root.handlers, [signal.getsignal(each) for each in signal.valid_signals()],
        threading.enumerate(),
    ))

def states():
    return repr((random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state().tolist()))

before = shared()
import fleet, fleet.collective
fleet.serving
told = {"fleet": sorted(sys.modules), "shared": [before, shared()]}
fleet.optim.Ftrl
told["optim"] = sorted(sys.modules)
import fleet.nn
told["nn"] = sorted(sys.modules)
import random, numpy, torch
numpy.set_printoptions(threshold=10**6)
before, drawn = shared(), states()
import fleet.role_maker, fleet.transpiler, fleet.ps.backend, fleet.ps.wire.grpc_server
told["shared"] += [before, shared()]
told["states"] = [drawn, states()]
print(json.dumps(told))
"""


def fresh_python(code: str) -> Any:
    """What ``code`` prints as JSON, in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_is_light_and_leaves_all_alone() -> None:
    """What is heavy, random states, logging, signals, threads."""
    told = fresh_python(CODE)
    assert {"torch", "numpy", "grpc", "google.protobuf", "numba", "llvmlite"} & set(told["fleet"]) == set()
    for part in ("optim", "nn"):
        assert "torch" in told[part]
        assert {"grpc", "google.protobuf", "numba", "llvmlite"} & set(told[part]) == set()
    before, after = told["states"]
    assert before == after
    before_fleet, after_fleet, before_rest, after_rest = told["shared"]
    assert before_fleet == after_fleet
    assert before_rest == after_rest


def test_every_public_name_is_there() -> None:
    assert len(set(fleet.__all__)) == len(fleet.__all__)
    assert [name for name in fleet.__all__ if getattr(fleet, name, None) is None] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        fleet.no_such_name  # noqa: B018


def test_module_functions_are_methods_of_one_default_fleet() -> None:
    owners = {getattr(fleet, name).__self__ for name in [*CALLS, "init"]}
    assert len(owners) == 1
    assert isinstance(owners.pop(), fleet.Fleet)


def test_every_public_method_of_fleet_is_a_module_function() -> None:
    methods = {name for name, _ in inspect.getmembers(fleet.Fleet, inspect.isfunction) if not name.startswith("_")}
    assert methods == {*CALLS, "init"}


NEEDS_NO_INIT = {"load_inference_model", "join"}  # no job; the call itself


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NEEDS_NO_INIT])
def test_every_call_before_init_says_to_call_init(name: str) -> None:
    call = getattr(fleet.Fleet(environ={}), name)
    # The arguments are wrong as well: that there was no init is what has to be said first.
    parameters = inspect.signature(call).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    with pytest.raises(NotInitializedError, match=rf"{name}\(\).*[Cc]all fleet\.init\(\)") as caught:
        call(*[None] * len(required))
    assert isinstance(caught.value, RuntimeError)


def owners() -> dict[str, Any]:
    from fleet.collective import fleet as collective
    from fleet.transpiler import fleet as parameter_server

    return {"fleet": fleet, "a Fleet": fleet.Fleet(environ={}), "ps": parameter_server, "collective": collective}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("owner", ["fleet", "a Fleet", "ps", "collective"])
def test_a_name_of_the_source_documents_has_a_pointer(owner: str, name: str) -> None:
    if hasattr(fleet, name):
        assert name in ("Program", "StrategyFactory"), "there is such a name, and the pointer is never seen"
        return
    with pytest.raises(UnknownNameError, match=f"has no attribute '{name}'") as caught:
        getattr(owners()[owner], name)
    assert caught.value.todo == NAMES[name]
    assert not hasattr(owners()[owner], name)
    assert name not in dir(fleet)


@pytest.mark.parametrize("page", ["paddle-fluid", "paddle-2"])
def test_every_name_that_is_to_be_replaced_has_a_pointer(page: str) -> None:
    """Who moves a script over meets the names before the page."""
    text = Path(__file__).parent.parent.joinpath("docs", "migrating", f"{page}.md").read_text()
    theirs = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    theirs = re.sub(r"`(from|import) .*?`", "", theirs)
    named = {(module, name) for module, name in re.findall(r"\b(fleet|role_maker)\.(\w+)", theirs)}
    assert ("fleet", "init") in named
    without = set()
    for module, name in named:
        try:
            getattr(fleet if module == "fleet" else fleet.role_maker, name)
        except UnknownNameError:
            pass
        except AttributeError:
            without.add(name)
    assert without == set()


def test_what_pointers_point_at_is_there() -> None:
    for todo in {*NAMES.values(), *OF_A_TRAINER.values(), *OF_A_PROGRAM.values(), *OF_ROLE_MAKERS.values()}:
        for path in re.findall(r"fleet((?:\.\w+)+)", todo):
            place: Any = fleet
            for part in path.split(".")[1:]:
                assert hasattr(place, part), f"fleet{path}, to which this points: {todo}"
                place = getattr(place, part)


@pytest.mark.parametrize("place", [fleet, importlib.import_module("fleet.transpiler"), fleet.Fleet(environ={})])
def test_any_other_name_is_python_s_own_error(place: Any) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'shine'") as caught:
        place.shine  # noqa: B018
    assert type(caught.value) is AttributeError


PROGRAM = object()


@pytest.mark.parametrize("door", ["fleet", "ps", "collective"])
@pytest.mark.parametrize(
    ("call", "given", "named", "todo"),
    [
        ("save_persistables", (None, "ckpt"), {}, "save_persistables(dirname)"),
        ("save_persistables", (PROGRAM, "ckpt", PROGRAM), {}, "save_persistables(dirname)"),
        ("save_persistables", (), {"executor": PROGRAM, "dirname": "ckpt"}, "save_persistables(dirname)"),
        ("save_persistables", (PROGRAM,), {"dirname": "ckpt"}, "save_persistables(dirname)"),
        ("load_persistables", (PROGRAM, "ckpt"), {}, "load_persistables(dirname)"),
        ("save_inference_model", (PROGRAM, "d", ["x"], [PROGRAM], None), {}, "save_inference_model(dirname, model"),
        ("save_inference_model", ("d",), {"feeded_var_names": []}, "save_inference_model(dirname, model"),
        ("load_inference_model", ("d",), {"executor": PROGRAM}, "load_inference_model(dirname, model)"),
    ],
)
def test_a_call_as_fluid_has_it_says_how_it_is_called(
    door: str, call: str, given: tuple[Any, ...], named: dict[str, Any], todo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = fleet.Fleet(environ={})
    alone.init()
    monkeypatch.setattr(fleet, call, getattr(alone, call))
    with pytest.raises(ArgumentTypeError, match="takes a directory first") as caught:
        getattr(owners()[door], call)(*given, **named)
    assert todo in str(caught.value.todo)


@pytest.mark.slow
def test_a_strategy_for_lightning_says_what_it_needs(prepared: Prepared, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.modules['lightning'] = None; import fleet.lightning")
    _, said = prepared.start([str(script)], os.environ).communicate(PATIENCE_S)
    assert said.count("Error: ") == 1
    assert "ModuleNotFoundError: fleet.lightning needs Lightning: pip install 'torch-fleet[lightning]'" in said
