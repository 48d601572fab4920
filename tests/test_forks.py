"""A forked child of a worker may look rows up and may not train, whatever the job; its parent's steps all count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PROCESSES_S

SCRIPT = Path(__file__).parent / "scripts" / "forks.py"
JOBS = ("alone", "collective", "no-direct-connections", "sync", "async", "half-async", "ssp", "geo", "dc-asgd")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """By job; in one process, and that a new one, which has no threads yet but its jobs'."""
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *JOBS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESSES_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return {told.pop("job"): told for told in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("job", JOBS)
def test_a_forked_child_does_not_train(found: dict[str, Any], job: str) -> None:
    for call, told in found[job]["child"]["told"].items():
        assert "in a forked child of a worker, which is no member of the job" in told, call
    assert (found[job]["row"], found[job]["steps"]) == (11.0, 2)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "collective"])
def test_a_forked_child_may_look_rows_up(found: dict[str, Any], job: str) -> None:
    child = found[job]["child"]
    assert child["step"] == 1
    if job == "no-direct-connections":
        assert "gRPC does not outlive a fork" in child["row"]
    else:
        assert child["row"] == "nothing: 1.0"
