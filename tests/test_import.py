"""What ``import fleet`` costs and touches, and what its names do before ``fleet.init``."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

import fleet
from fleet.errors import NotInitializedError

#: What an import may take beyond torch's own.
IMPORT_BUDGET_S = 0.5

NEEDS_NO_INIT = {"Checkpoints", "Fleet", "Program", "StrategyFactory", "init", "metrics", "nn", "optim"}
CALLS = sorted(set(fleet.__all__) - NEEDS_NO_INIT)


def fresh_python(code: str) -> Any:
    """What ``code`` prints as JSON, in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_fleet_imports_nothing_heavy() -> None:
    loaded = fresh_python("import fleet, fleet.collective, sys, json; print(json.dumps(sorted(sys.modules)))")
    assert {"torch", "numpy", "grpc", "google.protobuf", "numba", "llvmlite"} & set(loaded) == set()


def test_fleet_nn_imports_torch_and_nothing_else_heavy() -> None:
    loaded = fresh_python("import fleet.nn, sys, json; print(json.dumps(sorted(sys.modules)))")
    assert {"grpc", "google.protobuf", "numba", "llvmlite"} & set(loaded) == set()


@pytest.mark.parametrize("what", ["fleet", "fleet, fleet.nn"])
def test_import_time_beyond_torch(what: str) -> None:
    code = f"""
import json, time, torch
start = time.perf_counter()
import {what}
print(json.dumps(time.perf_counter() - start))
"""
    assert min(fresh_python(code) for _ in range(3)) < IMPORT_BUDGET_S


def test_import_leaves_every_random_state_alone() -> None:
    code = """
import json, random, numpy, torch
def states():
    return repr((random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state().tolist()))
numpy.set_printoptions(threshold=10**6)
before = states()
import fleet, fleet.nn, fleet.role_maker, fleet.transpiler, fleet.ps.backend, fleet.ps.wire.grpc_server
print(json.dumps(before == states()))
"""
    assert fresh_python(code) is True


def test_import_leaves_logging_and_signals_alone() -> None:
    code = """
import json, logging, signal, threading
def state():
    return logging.root.level, len(logging.root.handlers), [str(signal.getsignal(s)) for s in signal.valid_signals()], \
        threading.active_count()
before = state()
import fleet, fleet.nn, fleet.ps.backend
print(json.dumps(before == state()))
"""
    assert fresh_python(code) is True


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


@pytest.mark.parametrize("name", [name for name in CALLS if name != "load_inference_model"])  # which needs no job
def test_every_call_before_init_says_to_call_init(name: str) -> None:
    call = getattr(fleet.Fleet(environ={}), name)
    # The arguments are wrong as well: that there was no init is what has to be said first.
    parameters = inspect.signature(call).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    with pytest.raises(NotInitializedError, match=rf"{name}\(\).*[Cc]all fleet\.init\(\)") as caught:
        call(*[None] * len(required))
    assert isinstance(caught.value, RuntimeError)
