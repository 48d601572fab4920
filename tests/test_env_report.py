"""``fleet env`` on machines where things are missing or broken, and commands that need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.launch import cli, env_report

SECRET = "correct-horse-battery-staple"


@pytest.fixture
def torch_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands in the place of torch for processes that are started from here."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "torch.py"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise OSError('libtorch_cpu.so: cannot open shared object file')", "OSError: libtorch_cpu.so: cannot open"),
        ("import os; os.abort()", "ended with -6 and said nothing"),
        ("raise SystemExit(0)", "ended with 0 and said nothing"),
        ("print('hello')", "ModuleNotFoundError: No module named 'torch.distributed'"),
    ],
)
def test_a_broken_torch_is_told_and_does_no_harm(
    torch_that: Path, capsys: pytest.CaptureFixture[str], code: str, said: str
) -> None:
    torch_that.write_text(code)
    assert cli.main(["env"]) == 0
    out, err = capsys.readouterr()
    assert "cannot be imported" in out
    assert said in out
    assert err == ""


def test_a_torch_that_hangs(torch_that: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_that.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(env_report, "_TORCH_S", 0.5)
    assert env_report.about({})["torch"] == {"cannot be imported": "no answer within 0.5 s"}


def test_what_a_bug_report_needs(
    torch_that: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_that.write_text("raise ImportError")
    for name, value in {
        "FLEET_AUTH_TOKEN": SECRET,
        "FLEET_TLS_KEY": "/certs/me.key",
        "OMP_NUM_THREADS": "3",
        "HOME_OF_MINE": "x",
        "GRPC_PROXY": f"http://me:{SECRET}@proxy:1",
        "FLEET_HEARTBEAT_S": "no",
    }.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    assert SECRET not in out
    told = json.loads(out)
    assert set(told) == {
        *("fleet", "this process", "python", "system", "processor", "memory", "network", "packages", "torch", "MPI"),
        "environment",
    }
    variables = told["environment"]
    assert variables["FLEET_AUTH_TOKEN"] == "(set, and not shown)"
    assert variables["FLEET_TLS_KEY"] == "/certs/me.key"
    assert variables["GRPC_PROXY"] == "http://***@proxy:1"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert "HOME_OF_MINE" not in variables
    assert "FLEET_HEARTBEAT_S is not usable" in told["this process"]["settings"]
    assert told["python"]["executable"] == sys.executable
    assert told["packages"]["torch-fleet"] == env_report.version_of("torch-fleet")
    assert "127.0.0.1" in told["network"]["addresses"]


@pytest.mark.parametrize(
    ("environ", "role"),
    [
        ({}, "worker 0 of 1 workers and 1 servers (alone"),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "MPI says, whose launcher has set PMI_SIZE=4"),
        ({"PADDLE_TRAINERS": "2"}, "none: the environment does not describe this process"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "worker 1 of 2 workers and 0 servers (torchrun's",
        ),
    ],
)
def test_which_process_this_would_be(environ: dict[str, str], role: str) -> None:
    assert env_report._job(environ)["role"].startswith(role)


def test_limits_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n",
        "/sys/fs/cgroup/memory.max": f"{4 << 30}\n",
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    monkeypatch.setattr(env_report, "_read", lambda path: files.get(path, ""))
    assert env_report._memory() == {"installed": "16.0 GiB", "available": "8.0 GiB", "limit": "4.0 GiB"}
    assert env_report._processor()["quota"] == "1.5 cores"
    files |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}
    assert env_report._memory()["limit"] == "none"
    assert env_report._processor()["quota"] == "none"


@pytest.mark.pairs(2)
@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        ["run", "--help"],
        ["server", "--help"],
        ["checkpoint", "--help"],
        ["checkpoint", "diff", "--help"],
    ],
)
def test_commands_that_only_talk_need_no_torch(words: list[str]) -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'grpc', 'numba'])); "
    call = f"from fleet.launch import cli; sys.exit(cli.main({words!r}))"
    done = subprocess.run([sys.executable, "-c", block + call], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fleet " if words == ["--version"] else "usage: fleet")
