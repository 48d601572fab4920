"""A forked child of a worker may look rows up and may not train, whatever the job; its parent's steps all count."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from prepared import Prepared
from test_processes import ended

SCRIPT = Path(__file__).parent / "scripts" / "forks.py"
JOBS = ("alone", "collective", "no-direct-connections", "sync", "async", "half-async", "ssp", "geo", "dc-asgd")


@pytest.fixture(scope="module")
def found(prepared: Prepared) -> dict[str, Any]:
    """By job; in one process, and that a new one, which has no threads yet but its jobs'."""
    code, out, err = ended(prepared.start([str(SCRIPT), *JOBS], {**os.environ, "OMP_NUM_THREADS": "1"}))
    assert code == 0, err
    return {told.pop("job"): told for told in map(json.loads, out.splitlines())}


@pytest.mark.parametrize("job", JOBS)
def test_a_forked_child_does_not_train(found: dict[str, Any], job: str) -> None:
    for call, told in found[job]["child"]["told"].items():
        assert "in a forked child of a worker, which is no member of the job" in told, call
        assert "this call" not in told, call
    assert (found[job]["row"], found[job]["steps"]) == (11.0, 2)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "collective"])
def test_a_forked_child_may_look_rows_up(found: dict[str, Any], job: str) -> None:
    child = found[job]["child"]
    assert child["step"] == 1
    if job == "no-direct-connections":
        assert "gRPC does not outlive a fork" in child["row"]
    else:
        assert child["row"] == "nothing: 1.0"
