"""The launcher, with small scripts in the place of training ones."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from harness import until
from patience import PROCESSES_S
from prepared import Prepared, Process

from fleet.base import ports
from fleet.base.cluster import Endpoint, Role
from fleet.errors import ConfigurationError, PortInUseError
from fleet.launch import cli, host_network
from fleet.launch.job_folder import alone_in
from fleet.launch.process_plan import (
    LaunchPlan,
    ProcessSpec,
    check_reachable,
    child_environment,
    parse_endpoints,
    parse_worker_hosts,
    plan_launch,
    shared_job_id,
)
from fleet.launch.supervisor import Lines
from fleet.launch.watch import Say, Send, Watch, good_end
from fleet.role_maker import EnvRoleMaker
from fleet.telemetry.cause import Cause, claim, claimed, forget

#: What every script starts with: who it is, and its process id in a file of that name.
PREAMBLE = """
import os, pathlib, signal, subprocess, sys, time
env = os.environ
serves = env["PADDLE_TRAINING_ROLE"] == "PSERVER"
servers = env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
me = f"server.{servers.index(env['PADDLE_CURRENT_ENDPOINT'])}" if serves else f"worker.{env['PADDLE_TRAINER_ID']}"
def ready(name=me, pid=os.getpid()):
    pathlib.Path(f"{name}.tmp").write_text(str(pid))
    os.rename(f"{name}.tmp", f"{name}.pid")
def wait(name):
    while not os.path.exists(f"{name}.pid"):
        time.sleep(0.01)
"""

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start the launcher on a script; at the end of the test it and every process with a file must be gone."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *options: str, args: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(PREAMBLE + script)
        clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "FLEET_JOB_ID")}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "fleet.launch", *options, "script.py", *args],
                cwd=tmp_path,
                env={**clean, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        )
        return started[-1]

    yield start
    try:
        assert all(launcher.poll() is not None for launcher in started), "the launcher has not ended"
        assert not left_behind(tmp_path)
    finally:
        for launcher in started:
            launcher.kill()
            launcher.communicate()
        for pid in left_behind(tmp_path):
            os.kill(pid, signal.SIGKILL)


def left_behind(directory: Path) -> list[int]:
    return [pid for path in directory.glob("*.pid") if alive(pid := int(path.read_text()))]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_ready(directory: Path, count: int) -> Callable[[], bool]:
    return lambda: len(list(directory.glob("*.pid"))) == count


def finish(launcher: subprocess.Popen[str] | Process) -> tuple[int, str, str]:
    out, err = launcher.communicate(timeout=PROCESSES_S)
    return launcher.returncode, out, err


def said(err: str) -> list[str]:
    return [line.removeprefix("[fleetrun] ") for line in err.splitlines() if line.startswith("[fleetrun] ")]


TWO_AND_TWO = ("--server_num", "2", "--worker_num", "2")
ONE_AND_TWO = ("--server_num", "1", "--worker_num", "2", "--grace", "0.4")


# A job that goes well


def test_four_processes_and_their_variables(launch: Launch, tmp_path: Path) -> None:
    script = """
for name in sorted(os.environ):
    if name.startswith(("PADDLE_", "FLEET_", "OMP_", "POD_")) or name in ("TRAINING_ROLE", "PYTHONUNBUFFERED"):
        print(name, os.environ[name])
"""
    stale = {"PADDLE_TRAINER_ID": "7", "PADDLE_PORT": "1", "POD_IP": "10.0.0.9", "TRAINING_ROLE": "PSERVER"}
    code, out, err = finish(launch(script, *TWO_AND_TWO, **stale))
    assert code == 0
    found: dict[str, dict[str, str]] = {}
    for line in out.splitlines():
        match = re.fullmatch(r"\[(\w+ \d)\] (\w+) (.*)", line)
        assert match is not None
        found.setdefault(match[1], {})[match[2]] = match[3]
    assert sorted(found) == ["server 0", "server 1", "worker 0", "worker 1"]
    servers = found["server 0"]["PADDLE_PSERVERS_IP_PORT_LIST"]
    ports = [Endpoint.parse(server).port for server in servers.split(",")]
    assert len(set(ports)) == 2
    job_id = found["server 0"]["FLEET_JOB_ID"]
    assert re.fullmatch("[0-9a-f]{16}", job_id)
    for name, variables in found.items():
        role = "PSERVER" if name.startswith("server") else "TRAINER"
        index = int(name[-1])
        own = (
            {"PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{ports[index]}"}
            if role == "PSERVER"
            else {"PADDLE_TRAINER_ID": str(index)}
        )
        assert variables == {
            "PADDLE_TRAINING_ROLE": role,
            "TRAINING_ROLE": role,
            "PADDLE_PSERVERS_IP_PORT_LIST": servers,
            "PADDLE_TRAINERS_NUM": "2",
            "FLEET_JOB_ID": job_id,
            "FLEET_LAUNCHER": "fleetrun",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "FLEET_RECORD_DIR": str(tmp_path / "logs"),
            **own,
        }
    assert sum("OMP_NUM_THREADS" in line for line in said(err)) == 1


def test_what_the_user_set_is_kept(launch: Launch) -> None:
    script = "print(os.environ['OMP_NUM_THREADS'], os.environ['FLEET_JOB_ID'])"
    launcher = launch(script, "--server_num", "1", "--worker_num", "1", OMP_NUM_THREADS="3", FLEET_JOB_ID="mine")
    code, out, err = finish(launcher)
    assert (code, sorted(out.splitlines())) == (0, ["[server 0] 3 mine", "[worker 0] 3 mine"])
    assert "OMP" not in err


def test_variables_without_effect_are_told_of_once_a_job(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import fleet; fleet.init()")
    variables = {"PADDLE_TRAINERS_NUMBER": "9", "FLEET_BEET": "1", "FLAGS_rpc_send_thread_num": "12"}
    command = ["-m", "fleet.launch", "--server_num", "1", "--worker_num", "1", "script.py"]
    code, _, err = finish(prepared.start(command, {**os.environ, **variables}, tmp_path))
    assert code == 0
    for name in variables:
        assert [line.split()[0] for line in err.splitlines() if name in line] == ["[fleetrun]"], err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's full disk")
def test_a_log_that_its_disk_has_no_room_for_is_named(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker.0.log").symlink_to("/dev/full")
    code, out, err = finish(launch("print('trained')", *ONE_AND_TWO))
    assert (code, out.count("trained")) == (0, 3)
    assert "[fleetrun] logs/worker.0.log ends here: [Errno 28]" in err


def test_streams_prefixes_and_logs(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "worker.0.log").write_text("from an earlier run\n")
    script = r"""
os.write(1, b"one\ntwo \xff\xfe\n")
os.write(2, b"warning\n")
os.write(1, b"no newline")
"""
    code, out, err = finish(launch(script, *TWO_AND_TWO, "--log_dir", "kept"))
    assert code == 0
    for name in ("server 0", "server 1", "worker 0", "worker 1"):
        assert [line for line in out.splitlines() if line.startswith(f"[{name}]")] == [
            f"[{name}] one",
            f"[{name}] two \ufffd\ufffd",
            f"[{name}] no newline",
        ]
        assert f"[{name}] warning" in err.splitlines()
        log = (tmp_path / "kept" / f"{name.replace(' ', '.')}.log").read_bytes()
        assert sorted(log.splitlines()) == [b"no newline", b"one", b"two \xff\xfe", b"warning"]
    assert "warning" not in out


def test_lines_of_several_processes_do_not_mix(launch: Launch, tmp_path: Path) -> None:
    script = """
for i in range(300):
    for piece in (me[-1] * 50, me[-1] * 50, "\\n"):
        os.write(1, piece.encode())
"""
    code, out, _ = finish(launch(script, "--server_num", "1", "--worker_num", "3"))
    assert code == 0
    assert len(out.splitlines()) == 1200
    assert all(re.fullmatch(r"\[\w+ (\d)\] \1{100}", line) for line in out.splitlines())


def test_arguments_pass_through_untouched(launch: Launch) -> None:
    args = ("-h", "--server_num", "9", "--", "-m", "a b", "--log-dir=x", "")
    code, out, _ = finish(launch("print(sys.argv[1:])", "--server-num=1", "--trainer_num", "1", args=args))
    assert (code, out.splitlines()[0].partition("] ")[2]) == (0, str(list(args)))


def test_a_module(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    code, out, _ = finish(launch("", "--server_num", "1", "--worker_num", "1", "-m", "pkg.train", "-m"))
    assert (code, sorted(out.splitlines())[1]) == (0, "[worker 0] __main__ ['-m', 'script.py']")


def test_servers_that_stay_are_ended_after_the_workers(launch: Launch) -> None:
    script = """
if serves:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ready(); time.sleep(60)
wait("server.0")
"""
    code, _, err = finish(launch(script, *ONE_AND_TWO))
    assert code == 0
    late, done = said(err)[1:]
    assert late == "server 0 still running 0.4 s after the last worker ended: ending with SIGTERM"
    assert re.fullmatch(r"done in [\d.]+ s: 2 workers; logs in logs/", done)


def test_such_a_server_has_to_end_cleanly(launch: Launch) -> None:
    code, _, err = finish(launch("ready()\nif serves: time.sleep(60)", *ONE_AND_TWO))
    assert code == 128 + signal.SIGTERM
    assert "server 0 did not end cleanly: killed by SIGTERM (exit code 143)" in said(err)[-1]


def test_two_runs_on_the_same_ports(launch: Launch, tmp_path: Path) -> None:
    script = """
import socket
if serves:
    host, port = servers[int(me[-1])].split(":")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, int(port))); listener.listen()
    ready()
    listener.accept()[0].close()  # the server closes first, so its end of the connection lingers
else:
    wait("server.0"); wait("server.1")
    host, port = servers[int(me[-1])].split(":")
    socket.create_connection((host, int(port))).recv(1)
print(*servers)
"""
    start = host_network.free_ports(1)[0] // 2 - 5000  # below the range the kernel serves
    for _ in range(2):
        code, out, err = finish(launch(script, *TWO_AND_TWO, "--start_port", str(start)))
        assert code == 0, err
        assert set(out.splitlines()) == {
            f"[{role} {i}] 127.0.0.1:{start} 127.0.0.1:{start + 1}" for role in ("server", "worker") for i in (0, 1)
        }
        for path in tmp_path.glob("*.pid"):
            path.unlink()


def test_a_second_job_in_the_same_folder_is_refused(launch: Launch, tmp_path: Path) -> None:
    first = launch("print('first', flush=True); ready(); wait('go')", *ONE_AND_TWO)
    until(all_ready(tmp_path, 3))
    written = [tmp_path / "logs" / f"{process}.log" for process in ("server.0", "worker.0", "worker.1")]
    until(lambda: all(path.exists() and path.read_bytes() == b"first\n" for path in written))
    logs = {path: path.read_bytes() for path in (tmp_path / "logs").iterdir() if path.suffix != ".jsonl"}
    code, _, err = finish(launch("ready()", *ONE_AND_TWO))
    assert code == 2
    assert f"another fleetrun (process {first.pid}) has its job write here" in err
    assert "--log_dir" in err
    assert {path: path.read_bytes() for path in logs} == logs
    code, _, err = finish(launch("pass", *ONE_AND_TWO, "--log_dir", "elsewhere", FLEET_RECORD_DIR="logs"))
    assert code == 2
    assert "FLEET_RECORD_DIR" in err
    assert finish(launch("pass", *ONE_AND_TWO, "--log_dir", "elsewhere"))[0] == 0
    (tmp_path / "go.pid").write_text("0")
    assert finish(first)[0] == 0
    assert finish(launch("pass", *ONE_AND_TWO))[0] == 0, "the first job is over"


# A job that fails, or is interrupted


def test_the_first_failure_decides(launch: Launch, tmp_path: Path) -> None:
    script = """
ready()
for name in ("server.0", "server.1", "worker.0", "worker.1"): wait(name)
if me == "worker.1":
    print("last words", file=sys.stderr)
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
time.sleep(60)
"""
    code, _, err = finish(launch(script, *TWO_AND_TWO))
    assert code == 7
    lines = err.splitlines()
    failure = next(i for i, line in enumerate(lines) if "failed" in line)
    assert lines[failure] == (
        "[fleetrun] worker 1 failed: exit code 7; its output is in logs/worker.1.log; "
        "ending server 0, server 1 and worker 0"
    )
    assert lines.index("[worker 1] last words") < failure
    assert (tmp_path / "logs" / "worker.1.log").read_text() == "last words\n"


@pytest.mark.parametrize("role", ["worker.0", "server.0"])
def test_a_process_killed_by_a_signal(launch: Launch, role: str) -> None:
    script = f"ready(); wait('{role}')\nif me == '{role}': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    code, _, err = finish(launch(script, *ONE_AND_TWO))
    assert code == 137
    assert f"{role.replace('.', ' ')} failed: killed by SIGKILL" in err


def test_a_server_that_ends_early_is_no_failure_by_itself(launch: Launch) -> None:
    code, _, err = finish(launch("if not serves: time.sleep(0.3)", *ONE_AND_TWO))
    assert code == 0
    assert "server 0" not in err


#: Worker 1 fails as a worker does: it puts that down, then the others learn of it and end before it.
MESSENGERS_FIRST = """
from fleet.telemetry.cause import claim
def follow(): raise RuntimeError("worker 1 failed")
if me == "worker.1":
    claim(env["FLEET_RECORD_DIR"], env["FLEET_JOB_ID"], "worker 1", "Traceback\\n\\nValueError: boom")
    ready("told")
    for name in ("server.0", "worker.0"): wait(name)
    until = time.monotonic() + 0.5
    while time.monotonic() < until: time.sleep(0.01)
    END
wait("told"); ready(); follow()
"""


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("raise ValueError('boom')", 1, "exit code 1 (ValueError: boom)"),
        ("sys.exit(7)", 7, "exit code 7 (ValueError: boom)"),
        ("sys.exit(0)", 1, "ValueError: boom"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL, as the kernel does when memory runs out "),
    ],
)
@pytest.mark.pairs(1)
def test_who_caused_the_end_is_named_and_shown_last(
    launch: Launch, tmp_path: Path, end: str, code: int, how: str
) -> None:
    got, _, err = finish(launch(MESSENGERS_FIRST.replace("END", end), *ONE_AND_TWO))
    assert got == code
    told = said(err)
    assert told[1].startswith(f"worker 1 failed: {how}")
    assert told[2:] == ["what server 0 and worker 0 said of it is in logs/"]
    last = [line for line in err.splitlines() if not line.startswith("[fleetrun]")]
    assert {line.partition("]")[0] for line in last} <= {"[worker 1"}
    assert [line for line in last if line == "[worker 1] ValueError: boom"] == last[-1:]
    assert "RuntimeError: worker 1 failed" in (tmp_path / "logs" / "server.0.log").read_text()


@pytest.mark.pairs(1)
@pytest.mark.parametrize("rank", ["", "[rank1]: "])
def test_the_traceback_of_who_failed_comes_last(launch: Launch, rank: str) -> None:
    """Also where torch puts the rank before each of its lines, as it does in collective jobs."""
    script = f"""
if me == "worker.1":
    wait("server.0"); wait("worker.0")
    for line in ("Traceback (most recent call last):", "  a line of a file", "ValueError: boom"):
        print({rank!r} + line, file=sys.stderr)
    sys.exit(1)
ready()
time.sleep(60)
"""
    code, _, err = finish(launch(script, *ONE_AND_TWO))
    assert code == 1
    shown = err.splitlines()
    assert shown[-1] == f"[worker 1] {rank}ValueError: boom"
    named = next(place for place, line in enumerate(shown) if line.startswith("[fleetrun] worker 1 failed"))
    assert named < shown.index(f"[worker 1] {rank}Traceback (most recent call last):")


def test_whom_the_launcher_ends_is_not_the_cause(launch: Launch, tmp_path: Path) -> None:
    script = """
from fleet.telemetry.cause import claim
def on_sigterm(*_):
    claim(env["FLEET_RECORD_DIR"], env["FLEET_JOB_ID"], me.replace(".", " "), "it was ended by SIGTERM")
    sys.exit(1)
signal.signal(signal.SIGTERM, on_sigterm)
ready()
if me == "worker.1":
    wait("server.0"); wait("worker.0")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    assert finish(launch(script, *ONE_AND_TWO))[0] == 137
    why = "killed by SIGKILL, as the kernel does when memory runs out (exit code 137)"
    assert claimed(tmp_path / "logs") == Cause("worker 1", why)


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("is_last", "code"), [(False, 1), (True, 0)])
def test_a_worker_that_ends_well_in_the_midst_of_its_job(launch: Launch, is_last: bool, code: int) -> None:
    script = f"""
from fleet.telemetry.record import Record
if me == "worker.1":
    Record(env["FLEET_RECORD_DIR"], "worker 1").write(time.time(), "worker", {{"steps": 3}}, {is_last})
    os._exit(0)
if {is_last}: sys.exit(0)
time.sleep(60)
"""
    got, _, err = finish(launch(script, *ONE_AND_TWO))
    assert got == code
    told = said(err)[1]
    assert told.startswith("worker 1 failed: it ended in the midst of its job, without fleet.stop_worker()") == (
        not is_last
    )
    assert is_last == ("2 workers, up to 3 steps told of; logs" in told)


def test_a_traceback_that_ends_nothing_is_shown_while_the_job_runs(launch: Launch) -> None:
    script = """
if me == "worker.0":
    try: 1 / 0
    except ZeroDivisionError: import traceback; traceback.print_exc(); ready("told")
wait("go")
"""
    launcher = launch(script, *ONE_AND_TWO)
    assert launcher.stderr is not None
    shown = ""
    while "ZeroDivisionError" not in shown:
        shown += launcher.stderr.readline()
    cwd = Path(psutil.Process(launcher.pid).cwd())
    (cwd / "go.pid").write_text("0")
    code, _, err = finish(launcher)
    assert code == 0
    assert "[worker 0] Traceback (most recent call last):" in shown
    assert re.fullmatch(r"done in [\d.]+ s: 2 workers; logs in logs/", said(err)[-1])


def test_what_is_killed_is_started_again(launch: Launch, tmp_path: Path) -> None:
    """Its log goes on, what it had started is dead, and it is the same process of the job."""
    script = """
if me == "server.0" and not os.path.exists("once.pid"):
    helper = subprocess.Popen(["sleep", "60"])
    ready("once", helper.pid)
    print("first", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if me == "server.0":
    print("second", env["PADDLE_CURRENT_ENDPOINT"] == servers[0])
    ready()
else:
    wait("server.0")
"""
    code, out, err = finish(
        launch(script, *ONE_AND_TWO, "--max_restarts", "2", FLEET_DURABLE_DIR=str(tmp_path / "kept"))
    )
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("[server 0]")] == [
        "[server 0] first",
        "[server 0] second True",
    ]
    assert (tmp_path / "logs" / "server.0.log").read_text().splitlines() == ["first", "second True"]
    told = [line for line in said(err) if line.startswith("server 0 was killed by SIGKILL")]
    assert [line.rpartition("; ")[2] for line in told] == ["starting it again (restart 1 of 2)"], err


def test_a_folder_of_logs_that_is_gone_keeps_nobody_from_starting_again(launch: Launch, tmp_path: Path) -> None:
    script = """
import shutil
if me == "worker.0" and not os.path.exists("once.pid"):
    ready("once")
    shutil.rmtree("logs")
    os.kill(os.getpid(), signal.SIGKILL)
if me == "worker.0": print("second")
"""
    code, out, err = finish(
        launch(script, *ONE_AND_TWO, "--max_restarts", "1", FLEET_DURABLE_DIR=str(tmp_path / "kept"))
    )
    assert code == 0, err
    assert "[worker 0] second" in out.splitlines()


def test_what_is_killed_too_often_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    script = """
if me == "worker.0":
    wait("server.0")
    os.kill(os.getpid(), signal.SIGKILL)
if serves:
    os.makedirs(os.path.join(env["FLEET_DURABLE_DIR"], env["PADDLE_CURRENT_ENDPOINT"].replace(":", "_")))
    ready()
time.sleep(60)
"""
    options = (*ONE_AND_TWO, "--max_restarts", "2", "--job_id", "clicks")
    code, _, err = finish(launch(script, *options, FLEET_DURABLE_DIR=str(tmp_path / "kept")))
    assert code == 128 + signal.SIGKILL
    assert [line.rpartition("(")[2] for line in said(err) if "again" in line] == ["restart 1 of 2)", "restart 2 of 2)"]
    assert "worker 0 failed: killed by SIGKILL" in err
    (folder,) = (tmp_path / "kept").iterdir()
    stays = f"what the servers kept of this job stays in {folder.parent} ({folder.name}): remove that, or go on"
    assert [line for line in said(err) if line.startswith(stays) and "FLEET_JOB_ID=clicks" in line] == said(err)[-1:]


def test_what_fails_by_itself_is_not_started_again(launch: Launch, tmp_path: Path) -> None:
    script = """
if me == "worker.0":
    sys.exit(3)
time.sleep(60)
"""
    options = (*ONE_AND_TWO, "--max_restarts", "2")
    code, _, err = finish(launch(script, *options, FLEET_DURABLE_DIR=str(tmp_path / "kept")))
    assert code == 3
    assert "again" not in err


@pytest.mark.pairs(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--server_num", "1", "--max_restarts", "1"), "--max_restarts needs servers that keep what they have"),
        (("--max_restarts", "1"), "--max_restarts has nothing to act on in a collective job"),
        (("--server_num", "1", "--max_restarts", "-1"), "--max_restarts is not usable; expected 0 or more; got -1"),
    ],
)
def test_restarts_that_cannot_be(launch: Launch, options: tuple[str, ...], message: str) -> None:
    code, _, err = finish(launch("", "--worker_num", "1", *options))
    assert code == 2
    assert message in err


def test_who_ignores_sigterm_is_killed_after_the_grace(launch: Launch) -> None:
    script = """
if me == "worker.0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
if me == "worker.1":
    wait("worker.0"); wait("server.0")
    sys.exit(3)
time.sleep(60)
"""
    code, _, err = finish(launch(script, *ONE_AND_TWO))
    assert code == 3
    assert said(err)[-1] == "worker 0 still there 0.4 s after SIGTERM: killing"


def test_what_a_process_left_behind_is_ended_too(launch: Launch) -> None:
    script = """
if not serves:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ready(me + ".child", child.pid)
"""
    code, _, err = finish(launch(script, *ONE_AND_TWO))
    assert code == 0
    assert said(err)[-1] == "worker 0, worker 1 left processes behind: ending them; Ctrl-C kills at once"


def test_ctrl_c_kills_what_a_process_left_behind(launch: Launch) -> None:
    script = """
if me == "worker.0":
    stays = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", stays], stdout=subprocess.PIPE)
    child.stdout.readline()
    ready(me + ".child", child.pid)
"""
    launcher = launch(script, *ONE_AND_TWO, "--grace", "600")
    assert launcher.stderr is not None
    while "left processes behind" not in (line := launcher.stderr.readline()):
        assert line
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher)[0] == 0


def test_a_process_that_left_its_group_does_not_hold_the_launcher_up(launch: Launch, tmp_path: Path) -> None:
    script = """
if me == "worker.0":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    pathlib.Path("escaped").write_text(str(child.pid))
"""
    code, _, err = finish(launch(script, *ONE_AND_TWO))
    os.kill(int((tmp_path / "escaped").read_text()), signal.SIGKILL)
    assert code == 0
    assert said(err)[-1] == "processes that worker 0 started in sessions of their own go on: end them yourself"


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_ends_all(launch: Launch, tmp_path: Path, signum: signal.Signals, expected: int) -> None:
    launcher = launch("ready(); time.sleep(60)", *TWO_AND_TWO)
    until(all_ready(tmp_path, 4))
    launcher.send_signal(signum)
    code, _, err = finish(launcher)
    assert code == expected
    assert said(err)[1].startswith(f"{signum.name}: ending server 0, server 1, worker 0 and worker 1")
    assert "Traceback (most recent call last)" not in err


def test_a_second_ctrl_c_kills_at_once(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(60)", *TWO_AND_TWO)
    until(all_ready(tmp_path, 4))
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert len(left_behind(tmp_path)) == 4
    launcher.send_signal(signal.SIGINT)
    code, _, err = finish(launcher)
    assert code == 130
    assert said(err)[-1].startswith("killing server 0")


@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_outlives_a_killed_launcher(launch: Launch, tmp_path: Path, stubborn: bool) -> None:
    script = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
ready(me + ".child", child.pid)
ready(); time.sleep(60)
"""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    launcher = launch(ignore + script, *ONE_AND_TWO)
    until(all_ready(tmp_path, 6))
    guards = [child.pid for child in psutil.Process(launcher.pid).children() if "guard.py" in " ".join(child.cmdline())]
    launcher.kill()
    launcher.wait()
    until(lambda: not left_behind(tmp_path))
    until(lambda: not any(map(alive, guards)))


def test_a_full_console_does_not_keep_a_failure_from_ending_the_job(launch: Launch, tmp_path: Path) -> None:
    script = """
ready()
if me == "worker.0": os.write(1, b"x" * 99 + b"\\n") and [os.write(1, b"x" * 99 + b"\\n") for _ in range(10000)]
if me == "worker.1": time.sleep(0.3); sys.exit(5)
time.sleep(60)
"""
    launcher = launch(script, *ONE_AND_TWO)
    until(all_ready(tmp_path, 3))
    until(lambda: not left_behind(tmp_path))
    code, out, _ = finish(launcher)  # only now is anything read
    assert code == 5
    assert set(out.splitlines()[:-1]) == {"[worker 0] " + "x" * 99}


def test_a_console_that_went_away_does_not_end_the_job(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("for i in range(2000): print(i)", *ONE_AND_TWO)
    assert launcher.stdout is not None
    launcher.stdout.close()
    assert launcher.wait(timeout=10) == 0
    assert (tmp_path / "logs" / "worker.1.log").read_text().split() == [str(i) for i in range(2000)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_working_directory_that_is_removed_meanwhile_changes_nothing(tmp_path: Path, fails: bool) -> None:
    """Relative paths in options and variables mean what they meant when the job began."""
    place = tmp_path / "place"
    place.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, shutil, sys
if os.environ["PADDLE_TRAINING_ROLE"] == "TRAINER":
    shutil.rmtree({str(place)!r})
    sys.exit({int(fails)})
"""
    )
    options = ("--server_num", "1", "--worker_num", "1", "--log_dir", "logs", "--grace", "1")
    ended = subprocess.run(
        [sys.executable, "-m", "fleet.launch", *options, str(script)],
        cwd=place,
        env={**os.environ, "FLEET_DURABLE_DIR": "kept"},
        capture_output=True,
        text=True,
        timeout=PROCESSES_S,
    )
    assert ended.returncode == fails, ended.stderr
    assert "No such file" not in ended.stderr


def test_a_working_directory_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    assert cli.fleetrun(["--worker_num", "1", str(tmp_path)]) == 2
    assert "the working directory is not there any more" in capsys.readouterr().err


# One machine's part of a job


def test_every_host_that_is_this_machine(launch: Launch) -> None:
    first, second = host_network.free_ports(2)
    lists = ("--servers", f"127.0.0.1:{first}, 127.0.0.2:{second}", "--workers", "127.0.0.1,127.0.0.2,127.0.0.2:77")
    code, out, _ = finish(launch("print(os.environ['PADDLE_TRAINERS_NUM'])", *lists))
    names = {f"server {i}" for i in range(2)} | {f"worker {i}" for i in range(3)}
    assert (code, set(out.splitlines())) == (0, {f"[{name}] 3" for name in names})


def test_two_launchers_make_one_job(launch: Launch) -> None:
    first, second = host_network.free_ports(2)
    lists = ("--servers", f"127.0.0.1:{first},127.0.0.2:{second}", "--workers", "127.0.0.1,127.0.0.2,127.0.0.2")
    script = "print(os.environ['FLEET_JOB_ID'])"
    found = []
    for node, names in (("127.0.0.1", ["server 0", "worker 0"]), ("127.0.0.2", ["server 1", "worker 1", "worker 2"])):
        code, out, _ = finish(launch(script, *lists, "--node_ip", node, "--log_dir", node))
        assert code == 0
        prefixed = dict(line[1:].split("] ") for line in out.splitlines())
        assert sorted(prefixed) == names
        found += prefixed.values()
    assert len(set(found)) == 1


# Bad arguments; nothing is started

REFUSED = [
    ("", "no script given"),
    ("--server_num 1 --worker_num 1", "no script given"),
    ("--server_num 1 --worker_num 1 nowhere.py", "there is no script nowhere.py"),
    ("--server_num 1 --worker_num 1 -m nowhere.train", "there is no module nowhere.train"),
    ("--server_num 1 --worker_num 1 .", "is a directory"),
    ("--server_num 1 --worker_num 1 /dev/stdin", "the script /dev/stdin can be read by one process only"),
    ("--worker_num 2 /dev/fd/0", "the script /dev/fd/0 can be read by one process only"),
    ("script.py", "--worker_num is missing"),
    ("--server_num 1 script.py", "--worker_num is missing"),
    ("script.py --server_num 1 --worker_num 1", "before the script: what follows it is the script's"),
    ("--worker_num 0 script.py", "--worker_num is not usable; expected 1 to 65536; got 0"),
    ("--workers a script.py", "malformed endpoint"),
    ("--workers a:1,a:1 script.py", "--workers names a:1 twice"),
    ("--server_num 0 --worker_num 1 script.py", "--server_num is not usable; expected 1 to 65536; got 0"),
    ("--server_num 1 --worker_num -2 script.py", "--worker_num is not usable; expected 1 to 65536; got -2"),
    ("--server_num 1 --worker_num 1000000000 script.py", "--worker_num is not usable; expected 1 to 65536"),
    (f"--server_num {10**30} --worker_num 1 script.py", "--server_num is not usable; expected 1 to 65536"),
    ("--server_num x --worker_num 1 script.py", "invalid int value: 'x'"),
    ("--server_num 1 --worker_num 1 --grace -1 script.py", "--grace is not usable"),
    ("--server_num 1 --worker_num 1 --grace 1e10 script.py", "expected seconds, from 0 to 1e+09"),
    ("--server_num 1 --worker_num 1 --log_dir script.py script.py", "--log_dir cannot be made"),
    ("--server_num 1 --worker_num 1 --log_dir s3://bucket/logs script.py", "--log_dir is not usable"),
    (
        "--server_num 3 --worker_num 1 --start_port 65534 script.py",
        "no room for the ports of 3 processes; expected 1 to 65533",
    ),
    ("--worker_num 2 --start_port 70000 script.py", "no room for the ports of 2 processes; expected 1 to 65534"),
    ("--worker_num 65536 --start_port 1 script.py", "expected fewer processes than there are ports; got 1"),
    (
        "--server_num 2 --worker_num 1 --start_port 9099 --metrics_port 9100 script.py",
        "are the job's own; expected others than 9100",
    ),
    ("--worker_num 1 --job_id a\x00b script.py", "--job_id is not usable; expected at most 200 letters, in one line"),
    (f"--worker_num 1 --job_id {'a' * 201} script.py", "--job_id is not usable"),
    (f"--worker_num 1 {'a' * 300}.py", f"there is no script {'a' * 300}.py"),
    ("--severs a:1 script.py", "unrecognized arguments: --severs"),
    ("--server_num 1 --workers a script.py", "--server_num and --workers do not go together"),
    ("--servers 127.0.0.1:80 script.py", "--workers is missing"),
    ("--servers 127.0.0.1:80 script.py --workers 127.0.0.1", "before the script and alike"),
    ("--servers 2 --workers 4 script.py", "use --server_num 2"),
    ("--servers a --workers a script.py", "malformed endpoint"),
    ("--servers 203.0.113.1:80 --workers 203.0.113.2 script.py", "this machine is"),
    ("--servers 127.0.0.1:80 --workers 203.0.113.2 script.py", "means a different machine on each machine"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line or "nothing" for line, _ in REFUSED])
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    assert cli.fleetrun(line.split()) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("fleetrun: ")
    assert out == ""


def test_who_holds_a_port_is_told_in_one_line() -> None:
    code = "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        told = ports.holder_of(int(holder.stdout.readline()))
        holder.stdin.write(b"\n")
    assert f"held by process {holder.pid} (" in told
    assert "\n" not in told


def test_a_busy_port_and_who_holds_it() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"port {port} is busy, held by process {os.getpid()} \(.*python"):
            host_network.consecutive_ports(port, 1)


def test_free_ports_are_distinct() -> None:
    assert len(set(host_network.free_ports(200))) == 200
    besides = range(1, 65536, 2)
    assert not {*besides}.intersection(host_network.free_ports(20, besides))


@pytest.mark.parametrize("argv", [["--help"], ["run", "-h"], ["server", "--help"]])
def test_help_teaches(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for word in {"--help": ["run", "server", "--version"], "server": ["--endpoint", "--model_dir", "example"]}.get(
        argv[0], ["examples:", "--server_num", "--servers", "--grace", "PADDLE_TRAINER_ID", "FLEET_JOB_ID", "fleet run"]
    ):
        assert word in out


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"fleet \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert cli.main(["fly"]) == 2
    assert cli.main([]) == 2
    assert cli.main(["server"]) == 2
    here = "127.0.0.1:6170"
    for endpoint in ("here", "127.0.0.1:0"):
        for where, asked in {
            "--endpoint": ["server", "--endpoint", endpoint],
            "--join": ["server", "--endpoint", here, "--join", f"{here},{endpoint}"],
            "add": ["servers", here, "add", here, endpoint],
            "remove": ["servers", here, "remove", endpoint],
        }.items():
            assert cli.main(asked) == 2
            assert f"malformed endpoint; at {where}; expected host:port with a port from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (["run", "--worker_num", "1", "--log_dir", "", "train.py"], "; at --log_dir"),
        (["run", "--worker_num", "1", "--job_id=", "train.py"], "; at --job_id"),
        (["plan", "train.py", "--json", ""], "; at --json"),
        (["server", "--endpoint", "127.0.0.1:6170", "--model_dir", ""], "; at --model_dir"),
        (["servers", "127.0.0.1:6170", "add", ""], ""),
        (["replica", "--checkpoints=", "--endpoint", "127.0.0.1:6170"], "; at --checkpoints"),
        (["doctor", ""], ""),
        (["top", ""], ""),
        (["report", ""], ""),
        (["report", "logs", "--output", ""], "; at --output"),
        (["replay", ""], ""),
        (["replay", "durable", "--out", ""], "; at --out"),
        (["checkpoint", "ls", "ckpt", ""], ""),
        (["checkpoint", "export", "ckpt", ""], ""),
        (["checkpoint", "import", "dcp", "out", "--format", "dcp", "--prefix="], "; at --prefix"),
    ],
    ids=" ".join,
)
def test_an_empty_argument_is_refused(
    argv: list[str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a path it was the working directory, which was read as a checkpoint, or got the files of one."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    assert f": an argument is empty{where}." in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["train.py"]


#: Python writes what it prints when there is enough of it, or at the end.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("words", [["checkpoint", "ls"], ["replay"]])
@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.pairs(1)
def test_a_reader_that_has_seen_enough(words: list[str], buffered: bool) -> None:
    """As head, which goes away: nothing is said of it, whether the pipe breaks at a line or at the end."""
    script = f"""
import os, sys
from fleet.launch import checkpoint_command, cli, replay_command
checkpoint_command.carry_out = lambda *_: print("said", flush={not buffered}) or 0
replay_command.carry_out = lambda *_: print("said", flush={not buffered}) or 0
sys.exit(cli.main({words} + ["here"]))
"""
    reader, writer = os.pipe()
    os.close(reader)
    told = subprocess.run(
        [sys.executable, "-c", script], env=BUFFERED, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert told.stderr == ""
    assert told.returncode == 128 + signal.SIGPIPE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's full disk")
def test_output_that_there_is_no_room_for() -> None:
    with open("/dev/full", "wb") as full:
        told = subprocess.run(
            [sys.executable, "-m", "fleet", "--help"], env=BUFFERED, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert told.stderr == "fleet: [Errno 28] No space left on device\n"
    assert told.returncode == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("worker.1.log", "the log of worker 1 cannot be written; at here/worker.1.log; got Is a directory (EISDIR)"),
        ("fleetrun.lock", "this file cannot be written"),
        ("cause.json", "what an earlier job has left cannot be removed"),
        ("worker.1.record.jsonl", "what an earlier job has left cannot be removed"),
        ("fleetrun.of.worker.0.record.jsonl", "what an earlier job has left cannot be removed"),
    ],
)
def test_a_folder_with_something_that_cannot_be_replaced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import pathlib; pathlib.Path('started').touch()")
    (tmp_path / "here" / name).mkdir(parents=True)
    assert cli.fleetrun(["--worker_num", "2", "--log_dir", "here", "script.py"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "another folder" in err
    assert not (tmp_path / "started").exists()


def test_a_job_runs_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    another = pytest.raises(ConfigurationError, match="another fleetrun has its job")
    with alone_in({tmp_path: "--log_dir"}), another, alone_in({tmp_path: "--log_dir"}):
        pass


def test_what_the_system_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    assert cli.fleetrun(["--worker_num", "1", "script.py", "x" * 200_000]) == 2
    assert "worker 0 cannot be started; got Argument list too long (E2BIG). Give the script" in capsys.readouterr().err


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("workers", "message"), [(50, "no 50 free ports are"), (33, "the log of"), (12, "be started")])
def test_a_limit_on_open_files_is_named(tmp_path: Path, workers: int, message: str) -> None:
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    command = f"ulimit -n 40; exec {sys.executable} -m fleet.launch --worker_num {workers} script.py"
    ended = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=PROCESSES_S)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "(EMFILE). Start fewer processes" in ended.stderr


@pytest.mark.pairs(2)
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_streams_that_are_closed_are_nobody_elses_files(tmp_path: Path, closed: str) -> None:
    """Whatever the launcher opens would else be in their place, and what it says would be written into that."""
    (tmp_path / "script.py").write_text("import sys; print('told'); print('warned', file=sys.stderr)")
    command = f"{sys.executable} -m fleet.launch --worker_num 1 script.py {closed}"
    ended = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=PROCESSES_S)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ("" if "1>" in closed else "[worker 0] told\n")
    assert ("done in" in ended.stderr) == ("2>" not in closed)
    assert sorted((tmp_path / "logs" / "worker.0.log").read_text().split()) == ["told", "warned"]
    assert re.fullmatch(r"\d+\n", (tmp_path / "logs" / "fleetrun.lock").read_text())


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_what_an_encoding_has_no_letters_for_is_escaped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on stderr: no command ends because of it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setitem(cli._COMMANDS, name, ("", lambda *_: print("· tablé \udcff") or 0))
    assert cli.main([name]) == 0
    assert out.buffer.getvalue() == rb"\xb7 tabl\xe9 \udcff" + b"\n"


def test_the_launcher_is_light() -> None:
    script = "import sys, fleet.launch.cli; print({'torch', 'numpy', 'grpc', 'numba'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"


# The pure parts


def plan(*, here: tuple[str, ...] = ("a", "b")) -> LaunchPlan:
    return plan_launch(
        servers=parse_endpoints("a:1,b:2", "server"),
        worker_hosts=parse_worker_hosts("a, b:5"),
        here=here,
        command=("python", "train.py"),
        job_id="j",
        inherited={},
    )


def test_the_plan_of_one_machine() -> None:
    part = plan(here=("b",))
    assert [process.name for process in part.processes] == ["server 1", "worker 1"]
    assert not part.has_every_worker
    assert plan().has_every_worker
    inherited = {"PATH": "/bin", "PADDLE_TRAINER_ID": "4", "POD_IP": "x"}
    environment = child_environment(inherited, part.processes[0])
    assert environment["PADDLE_CURRENT_ENDPOINT"] == "b:2"
    assert environment["PATH"] == "/bin"
    assert not environment.keys() & {"PADDLE_TRAINER_ID", "POD_IP", "PADDLE_PORT"}


def test_the_plan_of_a_collective_job() -> None:
    workers = parse_endpoints("a:1,a:2,b:1", "worker")
    part = plan_launch(
        servers=(),
        worker_hosts=[worker.host for worker in workers],
        here=("a",),
        command=("python", "train.py"),
        job_id="j",
        inherited={},
        workers=workers,
    )
    assert [process.name for process in part.processes] == ["worker 0", "worker 1"]
    environment = child_environment({}, part.processes[1])
    assert "PADDLE_PSERVERS_IP_PORT_LIST" not in environment
    assignment = EnvRoleMaker(True, environment).assignment()
    assert (assignment.index, assignment.workers, assignment.collective) == (1, workers, True)


def test_ports_for_prometheus_follow_one_another() -> None:
    part = plan_launch(
        servers=parse_endpoints("a:1,b:2", "server"),
        worker_hosts=("a", "b"),
        here=("b",),
        command=("python", "train.py"),
        job_id="j",
        inherited={"OMP_NUM_THREADS": "1"},
        metrics_port=9100,
    )
    assert [each.environment["FLEET_METRICS_PORT"] for each in part.processes] == ["9100", "9101"]
    assert part.notes == ("ports for Prometheus: server 1 9100, worker 1 9101",)


def test_the_job_decides_about_a_folder_that_no_server_has_used(launch: Launch) -> None:
    """Its name is too long for a file's, which the launcher finds out when it looks what stays there."""
    code, _, err = finish(launch("", *ONE_AND_TWO, FLEET_DURABLE_DIR="a" * 300))
    assert code == 0
    assert said(err)[-1].startswith("done in")


def test_an_address_for_prometheus_may_come_with_the_option(launch: Launch) -> None:
    code, out, _ = finish(launch("print('here')", *ONE_AND_TWO, "--metrics_port", "0", FLEET_METRICS_HOST="::1"))
    assert code == 0
    assert out.count("here") == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_there_is_a_port_for_prometheus_for_every_process(workers: int) -> None:
    def planned() -> LaunchPlan:
        return plan_launch(
            servers=parse_endpoints("a:1", "server"),
            worker_hosts=("a",) * workers,
            here=("a",),
            command=("python", "train.py"),
            job_id="j",
            inherited={},
            metrics_port=65534,
        )

    if workers == 1:
        assert planned().processes[-1].environment["FLEET_METRICS_PORT"] == "65535"
        return
    with pytest.raises(ConfigurationError, match=r"fewer ports .* at most 65533 for 3 processes .* 65536 for the last"):
        planned()


def test_addresses() -> None:
    assert parse_worker_hosts("[::1], [::2]:3,c ") == ("[::1]", "[::2]", "c")
    for bad in ("a:1,a:1", "a:0", "0.0.0.0:5", "a:1,", "a"):
        with pytest.raises(ConfigurationError):
            parse_endpoints(bad, "server")
    for bad in ("", "a,,b", "a b", "3"):
        with pytest.raises(ConfigurationError):
            parse_worker_hosts(bad)
    check_reachable(["127.0.0.1", "localhost"], {"127.0.0.1"})
    with pytest.raises(ConfigurationError):
        check_reachable(["localhost", "far"], {"localhost"})
    assert shared_job_id([Endpoint("a", 1)], ["b"]) == shared_job_id(parse_endpoints(" a:1 ", "server"), ["b"])
    assert host_network.hosts_here(["localhost", "203.0.113.1"], None) == {"localhost"}
    assert host_network.hosts_here(["localhost", "203.0.113.1", "elsewhere"], "203.0.113.1") == {"203.0.113.1"}


def watched(here: tuple[str, ...] = ("a", "b")) -> tuple[Watch, dict[str, ProcessSpec]]:
    of = plan(here=here)
    return Watch(of, grace_s=10, log_dir="logs"), {process.name: process for process in of.processes}


def test_workers_elsewhere_keep_the_servers() -> None:
    watch, process = watched(here=("a",))
    assert watch.exited(process["worker 0"], 0, now=1) == []
    assert watch.deadline is None
    assert watch.exited(process["server 0"], 0, now=2) == []
    assert watch.done
    assert watch.exit_code == 0


def test_only_the_first_failure_counts() -> None:
    watch, process = watched()
    said, sent = watch.exited(process["server 0"], -signal.SIGSEGV, now=1)
    assert isinstance(said, Say)
    assert "server 0 failed: killed by SIGSEGV (exit code 139)" in said.text
    assert sent == Send(signal.SIGTERM)
    assert watch.exited(process["worker 0"], 4, now=2) == []
    assert watch.interrupted(signal.SIGTERM, now=3) == []
    assert watch.elapsed(now=10.9) == []
    assert watch.elapsed(now=11)[1] == Send(signal.SIGKILL)
    assert watch.deadline is None
    watch.exited(process["server 1"], -9, now=12)
    watch.exited(process["worker 1"], -9, now=12)
    assert (watch.done, watch.exit_code) == (True, 139)


BOOM = Cause("worker 1", "ValueError: boom")


@pytest.mark.parametrize(
    ("exits", "code", "told"),
    [
        # whoever's exit is seen first
        ([("worker 1", 1), ("server 0", 1), ("worker 0", 1)], 1, "worker 1 failed: exit code 1 (ValueError: boom)"),
        ([("server 0", 1), ("worker 0", 1), ("worker 1", 7)], 7, "worker 1 failed: exit code 7 (ValueError: boom)"),
        ([("worker 0", 1), ("worker 1", -9), ("server 0", 1)], 137, "worker 1 failed: killed by SIGKILL"),
        ([("worker 0", -6), ("server 0", 1), ("worker 1", 1)], 1, "worker 1 failed: exit code 1 (ValueError: boom)"),
        # it ends as if all were well
        ([("worker 1", 0), ("server 0", 1), ("worker 0", 1)], 1, "worker 1 failed: ValueError: boom"),
        ([("server 0", 1), ("server 1", 1), ("worker 1", 0)], 1, "worker 1 failed: ValueError: boom"),
    ],
)
def test_the_cause_is_named_whoever_is_seen_first(exits: list[tuple[str, int]], code: int, told: str) -> None:
    watch, process = watched()
    effects = [effect for name, ended in exits for effect in watch.exited(process[name], ended, now=1, cause=BOOM)]
    (line,) = [effect.text for effect in effects if isinstance(effect, Say)]
    assert line.startswith(f"{told}")
    assert "its output is in logs/worker.1.log" in line
    assert watch.exit_code == code
    assert watch.culprit is process["worker 1"]
    assert effects.count(Send(signal.SIGTERM)) == 1


def test_a_cause_that_does_not_end_is_not_waited_for_long() -> None:
    watch, process = watched()
    assert watch.exited(process["server 0"], 3, now=1, cause=BOOM) == []
    assert watch.failing
    assert watch.deadline is not None
    before = watch.deadline
    assert watch.exited(process["server 1"], 4, now=5, cause=BOOM) == []
    assert watch.deadline == before
    said, sent = watch.elapsed(before)
    assert isinstance(said, Say)
    assert said.text.startswith(
        "worker 1 failed: ValueError: boom; its output is in logs/worker.1.log; ending worker 0"
    )
    assert (watch.exit_code, sent) == (3, Send(signal.SIGTERM))


def test_a_cause_on_another_machine() -> None:
    watch, process = watched(here=("a",))
    said, _ = watch.exited(process["server 0"], 1, now=1, cause=BOOM)
    assert isinstance(said, Say)
    assert said.text.startswith("worker 1, of another machine, and server 0 here with it failed: ValueError: boom")
    assert (watch.exit_code, watch.culprit) == (1, process["server 0"])


def test_who_breaks_off_is_the_cause() -> None:
    watch, process = watched()
    said, _ = watch.exited(process["worker 1"], 0, now=1, broke_off=True)
    assert isinstance(said, Say)
    assert said.text.startswith("worker 1 failed: it ended in the midst of its job, without fleet.stop_worker(), which")
    assert (watch.exit_code, watch.culprit) == (1, process["worker 1"])
    watch, process = watched()
    watch.exited(process["worker 1"], 0, now=1, cause=Cause("worker 0", "ValueError: boom"), broke_off=True)
    watch.exited(process["worker 0"], 7, now=2, cause=Cause("worker 0", "ValueError: boom"))
    assert (watch.exit_code, watch.culprit) == (7, process["worker 0"]), "the first word stands"


def test_the_verdict_is_known_with_the_signal() -> None:
    watch, process = watched()
    watch.exited(process["worker 1"], -signal.SIGSEGV, now=1)
    assert watch.verdict == Cause("worker 1", "killed by SIGSEGV (exit code 139)")
    watch, process = watched()
    assert watch.exited(process["server 0"], 3, now=1, cause=BOOM) == []
    assert watch.verdict is None, "nobody is signalled yet"
    watch.elapsed(now=100)
    assert watch.verdict == BOOM
    watch, _ = watched()
    watch.interrupted(signal.SIGINT, now=1)
    assert watch.verdict == Cause("fleetrun", "SIGINT (Ctrl-C)")


def test_a_job_that_has_done_enough_ends_well_unless_it_is_interrupted() -> None:
    watch, here = watched(("a", "b"))
    assert Send(signal.SIGTERM) in watch.enough(0.0)
    for process in here.values():
        assert watch.exited(process, -signal.SIGTERM, 1.0) == []
    assert watch.done
    assert watch.exit_code == 0
    watch, here = watched(("a", "b"))
    watch.enough(0.0)
    assert Send(signal.SIGKILL) in watch.interrupted(signal.SIGINT, 1.0)
    for process in here.values():
        watch.exited(process, -signal.SIGKILL, 2.0)
    assert watch.exit_code == 130


def test_who_has_ended_the_job_is_not_started_again() -> None:
    of = plan()
    watch = Watch(of, grace_s=10, log_dir="logs", max_restarts=3)
    said, _ = watch.exited(of.processes[-1], -signal.SIGTERM, now=1, cause=Cause("worker 1", "it was ended by SIGTERM"))
    assert isinstance(said, Say)
    assert said.text.startswith("worker 1 failed: killed by SIGTERM (exit code 143) (it was ended by SIGTERM)")


def test_the_last_line_of_a_good_job() -> None:
    two = plan()
    assert good_end(two, 12.34, [400, 400], "logs/", "logs/") == (
        "done in 12.3 s: 2 workers, 400 steps each; logs in logs/, fleet report logs/"
    )
    assert ": 2 workers, 1,390 to 1,400 steps; logs" in good_end(two, 125, [1390, 1400], "a/", "/b/")
    assert ": 2 workers, up to 30 steps told of; logs" in good_end(two, 1, [30], "a/", "/b/")
    assert good_end(plan(here=("a",)), 7384, [1], "logs/", "logs/").startswith("done in 2 h 3 min: 1 worker, 1 step;")
    assert good_end(two, 1, [], "logs/", "logs/") == "done in 1.0 s: 2 workers; logs in logs/"
    assert ", 3 steps each (rows 21%); logs" in good_end(two, 1, [3, 3], "a/", "/b/", "rows 21%")


def test_the_first_word_stands(tmp_path: Path) -> None:
    claim(str(tmp_path), "a", "worker 1", "Traceback ...\n  File ...\nValueError: boom\n")
    claim(str(tmp_path), "a", "worker 0", "JobAbortedError: worker 1 failed")
    claim("", "a", "worker 0", "no records are kept")
    assert claimed(tmp_path, "a") == claimed(tmp_path) == Cause("worker 1", "ValueError: boom")
    assert claimed(tmp_path, "b") is None, "it is another job's"
    forget(tmp_path)
    assert claimed(tmp_path) is None
    (tmp_path / "cause.json").write_text('{"process":')
    assert claimed(tmp_path) is None


def test_many_processes_are_counted_in_messages() -> None:
    many = LaunchPlan(tuple(ProcessSpec(Role.WORKER, i, (), {}) for i in range(9)), worker_num=9)
    said = Watch(many, grace_s=1, log_dir="logs").exited(many.processes[0], 1, now=0)[0]
    assert isinstance(said, Say)
    assert said.text.endswith("ending worker 1, worker 2, worker 3, worker 4, worker 5 and 3 more")


def test_lines_come_out_whole_whatever_the_pieces() -> None:
    data = b"alpha\nbeta\r\n\n\xff\xfe gamma\nrest"
    for size in range(1, len(data) + 1):
        lines = Lines()
        found = [line for i in range(0, len(data), size) for line in lines.feed(data[i : i + size], now=-1e9)]
        assert found == [b"alpha", b"beta", b"", b"\xff\xfe gamma"]
        assert lines.close() == [b"rest"]
        assert lines.close() == []


def test_a_progress_bar_is_shown_now_and_then_and_at_its_end() -> None:
    lines = Lines()
    assert lines.feed(b"\r 10%", now=0.0) == [b" 10%"]
    assert lines.feed(b"\r 20%", now=1.0) == []
    assert lines.feed(b"\r 30%\r 40%", now=6.0) == [b" 40%"]
    assert lines.feed(b"\r100%\nnext\n", now=6.1) == [b"100%", b"next"]
    assert [lines.feed(b"%d%%\r" % i, now=20.0 + i) for i in range(4)] == [[], [b"1%"], [], []]
    assert lines.close() == [b"3%"]


def test_output_without_newlines_is_passed_on() -> None:
    lines = Lines()
    assert sum(map(len, lines.feed(b"x" * 200_000, now=0.0))) > 100_000
