"""Real ranks under real launchers, Open MPI's and MPICH's: `make test-mpi` installs both and runs this."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import PROCESSES_S

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "scripts" / "mpi.py"

#: Where the Makefile puts the MPIs: side by side, as only one of them can be in an environment.
PREFIXES = Path(sys.prefix) / "mpi"
#: Words with which Open MPI allows itself to run as root and on fewer cores than ranks.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # Between its SIGTERM and its SIGKILL: one second, the default, may be too short to speak on a busy machine.
    "PRTE_MCA_odls_base_sigkill_timeout": "10",
}

Run = Callable[..., "tuple[int, str, str]"]


def launch(launcher: str, library: str, ranks: int, *command: str, **variables: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a whole launch; with the latter the words that ranks have put into files."""
    mpirun = PREFIXES / launcher / "bin" / "mpirun"
    assert mpirun.is_file(), f"no {launcher} in {PREFIXES}: run `make test-mpi`"
    strange = ("PADDLE_", "FLAGS_", "FLEET_", "PMI", "OMPI_", "PRTE_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    environ |= {"LD_LIBRARY_PATH": str(PREFIXES / library / "lib"), "OMP_NUM_THREADS": "1", **OPEN_MPI, **variables}
    with tempfile.TemporaryDirectory() as words:
        started = subprocess.Popen(
            [mpirun, "-n", str(ranks), sys.executable, *command],
            env=environ | {"WORDS": words},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            out, err = started.communicate(timeout=PROCESSES_S)
        finally:
            started.kill()
        err += "".join(said.read_text() for said in sorted(Path(words).glob("*.txt")))
    return started.returncode, out, err


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mpirun(mpi: str) -> Run:
    def run(ranks: int, *command: str, **variables: str) -> tuple[int, str, str]:
        return launch(mpi, mpi, ranks, *command, **variables)

    return run


def test_a_job_ends_where_one_process_ends_and_leaves_mpi_to_the_script(mpirun: Run) -> None:
    code, out, err = mpirun(4, str(SCRIPT), "uses-mpi")
    assert code == 0, err
    # Two workers: weight -1 a round; row 0 gets half a gradient a round, from worker 0 alone.
    assert out.count("weight -5.0 row -2.5") == 2
    assert sorted(re.findall(r"neighbour (\d)", out)) == ["1", "3"]
    assert len(set(re.findall(r"served at (127\.0\.0\.1:\d+)", out))) == 2


def test_every_rank_a_worker(mpirun: Run) -> None:
    code, out, err = mpirun(3, str(SCRIPT), "collective")
    assert code == 0, err
    assert sorted(re.findall(r"worker (\d) of 3 at 3 endpoints", out)) == ["0", "1", "2"]
    assert out.count("weight -5.0") == 3, "the mean of 0, 1 and 2, five times"


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_are_no_pairs(mpirun: Run, ranks: int) -> None:
    code, _, err = mpirun(ranks, str(SCRIPT))
    assert code != 0
    for rank in range(ranks):
        assert re.search(rf"ConfigurationError: .*at rank {rank}; expected an even number of ranks.* got {ranks}", err)


def test_ranks_that_disagree(mpirun: Run) -> None:
    code, _, err = mpirun(4, str(SCRIPT), "discord", "1")
    assert code != 0
    assert err.count("ConfigurationError: the ranks do not ask for one kind of job") == 4


@pytest.mark.parametrize("variant", ["exit-before", "never-calls"])
def test_a_rank_that_is_gone_before_mpi_has_started(mpirun: Run, mpi: str, variant: str) -> None:
    """MPICH lets the others wait on, so that the deadline is ours; Open MPI ends them."""
    code, _, err = mpirun(4, str(SCRIPT), variant, "1", FLEET_STARTUP_DEADLINE_S="4")
    assert code != 0
    assert "MPI rank 1 of 4" not in err
    for rank in (0, 2, 3):
        if mpi == "mpich":
            assert f"at MPI rank {rank} of 4;" in err
        else:
            assert f"MPI rank {rank} of 4 is ended by SIGTERM" in err
    assert err.count("DeadlineError: MPI did not start within 4 s") == (3 if mpi == "mpich" else 0)


def test_ranks_that_wait_say_so(mpirun: Run) -> None:
    """Under one MPI in its own start, under the other for the first word of all."""
    code, _, err = mpirun(2, str(SCRIPT), "comes-late", "1")
    assert code == 0, err
    assert re.search(r"MPI rank 0 of 2: (MPI waits|waiting) for the other ranks.*, 1\d s so far", err), err
    assert "MPI rank 1 of 2" not in err


def test_a_rank_that_fails_before_the_job_runs(mpirun: Run) -> None:
    code, _, err = mpirun(4, str(SCRIPT), "raise-early", "1")
    assert code != 0
    assert "ValueError: no data here" in err
    for rank in (0, 2, 3):
        assert f"MPI rank {rank} of 4: MPI rank 1 of 4 has failed and ends the job: ValueError: no data here" in err


def test_a_rank_that_just_ends_before_its_part(mpirun: Run) -> None:
    code, _, err = mpirun(4, str(SCRIPT), "exit-early", "1")
    assert code != 0
    for rank in (0, 2, 3):
        assert f"MPI rank {rank} of 4: MPI rank 1 of 4 has failed and ends the job: its script ended before" in err


def test_a_script_that_finalizes_mpi_itself(mpirun: Run) -> None:
    code, out, err = mpirun(2, str(SCRIPT), "finalize")
    assert code == 0, err
    assert "weight -5.0" in out
    assert "served" in out


def test_a_rank_that_fails_in_the_job(mpirun: Run) -> None:
    code, _, err = mpirun(4, str(SCRIPT), "raise", "3")
    assert code != 0
    assert err.count("JobAbortedError: worker 1 failed and ended the job") == 3
    assert err.count("ValueError: a bad batch") >= 4


def test_a_rank_that_is_killed(mpirun: Run, mpi: str) -> None:
    code, out, err = mpirun(4, str(SCRIPT), "kill", "1")
    assert code != 0
    if mpi == "openmpi":
        assert err.count("serving ends: SIGTERM") + err.count("this worker is ended by SIGTERM") >= 2
    else:  # MPICH kills them all in the same moment, and is the only one left to speak
        assert "EXIT CODE: 9" in out + err


def test_a_launcher_and_a_library_of_different_mpis() -> None:
    """Every process would take itself for a job of one. (MPICH under the launcher of Open MPI gives up by itself.)"""
    code, _, err = launch("mpich", "openmpi", 2, str(SCRIPT))
    assert code != 0
    assert err.count("the MPI launcher and the MPI library of this process do not belong together") == 2
