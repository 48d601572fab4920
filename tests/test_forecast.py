"""``fleet plan``: what it makes of two small jobs, held against arithmetic by hand, a simulated queue and real jobs."""

from __future__ import annotations

import heapq
import json
import math
import os
import random
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, PROCESSES_S
from prepared import Prepared
from test_processes import ended

from fleet.base.cluster import Endpoint
from fleet.launch import cli, plan_command, supervisor
from fleet.launch.process_plan import LaunchPlan, plan_launch
from fleet.telemetry.cause import LAUNCHER, claim
from fleet.telemetry.forecast import SETTLING_S, Costs, Limit, Observed, Site, observed
from fleet.telemetry.record import EVENT, Line, Record

#: A step of 10 ms: 6 of the worker's own, 3 at a server, 1 between them.
ONE = Observed(
    servers=1,
    workers=1,
    mode="sync",
    in_rounds=True,
    steps=1000,
    step_s=10e-3,
    pull_s=2e-3,
    push_s=2e-3,
    reduce_s=0.0,
    worker_cpu_s=7e-3,
    server_cpu_s=4e-3,
    busy_s=3e-3,
    sent_bytes=100_000,
    received_bytes=80_000,
    worker_bytes=300e6,
    server_bytes=200e6,
    table_bytes=50e6,
    has_files=False,
    growth=((250, 250_000), (500, 500_000), (1000, 1_000_000)),
    examples=64,
)
TWO = replace(
    ONE,
    servers=2,
    workers=2,
    server_cpu_s=5e-3,
    busy_s=4e-3,
    sent_bytes=100_500,
    received_bytes=80_000,
    server_bytes=180e6,
    growth=((500, 400_000), (900, 700_000)),
)
ASYNC_ONE = replace(ONE, in_rounds=False, mode="async", push_s=0.0, step_s=8e-3)
ASYNC_TWO = replace(TWO, in_rounds=False, mode="async", push_s=0.0, step_s=8e-3)
SYNC, ASYNC = Costs(ONE, TWO, 8), Costs(ASYNC_ONE, ASYNC_TWO, 8)
#: Where nothing but work takes time.
IDEAL = Site(bytes_a_second=math.inf, round_trip_s=0.0)


def test_the_job_that_was_seen_is_what_is_predicted_of_it() -> None:
    for costs, seen in ((SYNC, ONE), (ASYNC, ASYNC_ONE)):
        said = costs.forecast(1, 1, IDEAL, rows=1_000_000)
        assert said.step_s == pytest.approx(seen.step_s)
        assert said.rate == pytest.approx(1 / seen.step_s)
        assert said.examples == pytest.approx(64 / seen.step_s)
        assert (said.sent_bytes, said.received_bytes) == (seen.sent_bytes, seen.received_bytes)
        assert said.worker_bytes == seen.worker_bytes
        assert said.server_bytes == pytest.approx(seen.server_bytes + seen.table_bytes)


@pytest.mark.parametrize(
    ("servers", "workers", "step_ms"),
    [
        (1, 4, 6 + 1 + 4 * 3),  # all four are served before anybody goes on
        (4, 4, 6 + 1 + 4 * (3 + 3) / 4),  # each further server adds one millisecond, shared by all of them
    ],
)
def test_a_round_ends_with_the_last_that_is_served(servers: int, workers: int, step_ms: float) -> None:
    assert SYNC.forecast(servers, workers, IDEAL).step_s == pytest.approx(step_ms / 1e3)


def test_a_round_crosses_the_network_twice() -> None:
    slow = Site(bytes_a_second=1e6, round_trip_s=5e-3)
    said = SYNC.forecast(1, 1, slow)
    assert said.step_s == pytest.approx(10e-3 + 0.1 + 0.08 + 2 * 5e-3)
    assert said.limit is Limit.NETWORK
    foreseen = Costs(replace(ONE, pull_s=0.0, push_s=4e-3), replace(TWO, pull_s=0.0, push_s=4e-3), 8)
    assert foreseen.forecast(1, 1, slow).step_s == pytest.approx(10e-3 + 0.1 + 0.08 + 5e-3)


def simulated(thinking_s: float, pulling_s: float, pushing_s: float, workers: int, steps: int = 30_000) -> float:
    """The rate of workers that think, wait for rows, and send gradients that they do not wait for, at a server that
    does one thing after the other; all times are drawn, with these means."""
    draw = random.Random(1)

    def lasts(mean_s: float) -> float:
        return draw.expovariate(1 / mean_s) if mean_s else 0.0

    ready = [(lasts(thinking_s), worker) for worker in range(workers)]
    heapq.heapify(ready)
    free = 0.0
    for _ in range(steps):
        at, worker = heapq.heappop(ready)
        answered = max(free, at) + lasts(pulling_s)
        free = answered + lasts(pushing_s)
        heapq.heappush(ready, (answered + lasts(thinking_s), worker))
    return steps / free


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 32])
@pytest.mark.parametrize(("pulling_s", "busy_s"), [(3e-3, 3e-3), (1.5e-3, 3e-3)], ids=["all awaited", "half of it"])
def test_workers_that_wait_for_no_others_queue(workers: int, pulling_s: float, busy_s: float) -> None:
    """Against a simulation of the queue: exact where workers wait for all they ask for, near where they do not."""
    one = replace(ASYNC_ONE, pull_s=pulling_s, busy_s=busy_s, step_s=6e-3 + pulling_s)
    costs = Costs(one, replace(ASYNC_TWO, busy_s=busy_s), 8)
    said = costs.forecast(1, workers, IDEAL)
    wanted = simulated(6e-3, pulling_s, busy_s - pulling_s, workers)
    assert said.rate == pytest.approx(wanted, rel=0.03 if pulling_s == busy_s else 0.15)
    assert said.rate <= 1 / costs.serving_s(1) * (1 + 1e-9)


def test_what_limits_a_job() -> None:
    assert ASYNC.forecast(1, 1, IDEAL).limit is Limit.COMPUTING
    assert ASYNC.forecast(1, 16, IDEAL).limit is Limit.SERVERS
    assert ASYNC.forecast(8, 2, Site(bytes_a_second=2e6, round_trip_s=0.0)).limit is Limit.NETWORK
    assert ASYNC.forecast(1, 1, Site(bytes_a_second=math.inf, round_trip_s=0.1)).limit is Limit.ANSWERS
    assert SYNC.forecast(1, 16, IDEAL).limit is Limit.SERVERS
    assert SYNC.forecast(16, 16, Site(bytes_a_second=math.inf, round_trip_s=0.1)).limit is Limit.ANSWERS
    assert SYNC.forecast(2, 4, Site(cores=2)).limit is Limit.PROCESSORS


@pytest.mark.parametrize("costs", [SYNC, ASYNC], ids=["sync", "async"])
def test_more_workers_never_make_fewer_steps_on_machines_of_their_own(costs: Costs) -> None:
    for servers in (1, 2, 8):
        rates = [costs.forecast(servers, workers, Site()).rate for workers in range(1, 65)]
        assert all(fewer <= more * (1 + 1e-9) for fewer, more in pairwise(rates))


@pytest.mark.parametrize("costs", [SYNC, ASYNC], ids=["sync", "async"])
def test_one_machine_makes_no_more_than_its_processors(costs: Costs) -> None:
    for servers, workers in ((1, 2), (2, 2), (2, 4), (4, 16)):
        cpu = costs.one.worker_cpu_s + costs.server_cpu_s(servers)
        assert costs.forecast(servers, workers, Site(cores=2)).rate <= 2 / cpu * 1.2


def test_how_processes_hold_each_other_up_is_measured() -> None:
    """Two and two on two processors took twice what their work accounts for: so will others that share them."""
    slowed = replace(TWO, step_s=28e-3)
    quiet, crowded = Costs(ONE, TWO, 2), Costs(ONE, slowed, 2)
    for servers, workers in ((2, 2), (1, 4), (2, 4)):
        before, after = (each.forecast(servers, workers, Site(cores=2)).step_s for each in (quiet, crowded))
        assert after > 1.8 * before
    assert crowded.forecast(2, 2, Site(cores=2)).step_s == pytest.approx(28e-3)
    assert crowded.forecast(1, 1, Site(cores=2)).step_s == pytest.approx(ONE.step_s)
    assert crowded.forecast(2, 2, IDEAL).step_s == quiet.forecast(2, 2, IDEAL).step_s


def test_memory_of_servers() -> None:
    """Of their 200 MB 40 are divided; rows take 50 bytes; a round keeps what waits."""
    said = SYNC.forecast(4, 3, IDEAL, rows=8_000_000)
    assert said.server_bytes == pytest.approx(160e6 + 40e6 / 4 + 8e6 * 50 / 4 + 2 * 100_000 / 4)
    assert ASYNC.forecast(4, 3, IDEAL, rows=8_000_000).server_bytes == pytest.approx(160e6 + 40e6 / 4 + 8e6 * 50 / 4)


def test_tables_with_a_budget_take_no_more() -> None:
    costs = Costs(replace(ONE, has_files=True), replace(TWO, has_files=True), 8)
    assert costs.forecast(1, 1, IDEAL, rows=1e9).server_bytes == costs.forecast(1, 1, IDEAL, rows=1e6).server_bytes


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_rows_grow_on_as_they_did(power: float) -> None:
    growth = tuple((steps, 1000 * steps**power) for steps in range(10, 1001, 10))
    costs = Costs(replace(ONE, growth=growth), replace(TWO, growth=growth[:50]), 8)
    assert costs.growth_power == pytest.approx(power, abs=1e-6)
    assert costs.rows_after(50_000) == pytest.approx(1000 * 50_000**power)


def test_a_job_without_rows() -> None:
    costs = Costs(
        *(replace(each, table_bytes=0.0, growth=((500, 0.0), (1000, 0.0))) for each in (ONE, TWO)),
        8,
    )
    assert costs.rows_after(1e6) == 0
    assert costs.row_bytes == 0
    assert costs.forecast(1, 1, IDEAL).server_bytes == ONE.server_bytes


def test_bytes_that_other_workers_may_have_sent_are_told_of() -> None:
    assert not SYNC.is_mixed
    assert Costs(ONE, replace(TWO, received_bytes=ONE.received_bytes * 1.5), 8).is_mixed


def test_the_other_kind_of_mode_is_estimated() -> None:
    free = SYNC.of_kind(False)
    assert free.forecast(1, 1, IDEAL).step_s == pytest.approx(ONE.step_s - ONE.push_s)
    assert SYNC.of_kind(True).forecast(2, 3, IDEAL) == SYNC.forecast(2, 3, IDEAL)
    together = ASYNC.of_kind(True)
    assert together.forecast(1, 1, IDEAL).step_s == pytest.approx(ASYNC_ONE.step_s + 2e-3 * 100 / 80)
    assert together.forecast(1, 8, IDEAL).rate < ASYNC.forecast(1, 8, IDEAL).rate


def lines_of(servers: int = 1, workers: int = 1, seconds: int = 12, rate: float = 100.0) -> list[Line]:
    """The records of a job whose workers each take so many steps a second after the third second."""

    def line(at: float, process: str, kind: str, told: dict[str, Any], is_last: bool = False) -> Line:
        return Line(1e9 + at, process, kind, told, is_last)

    lines = [line(0.0, "launcher", EVENT, {"process": "worker 0", "what": "started"})]
    for second in range(seconds + 1):
        steps = max(0, second - 3) * rate
        for index in range(workers):
            figures = {
                "steps": steps,
                "lockstep": 1,
                "uptime_seconds": second,
                "pull_seconds": steps * 1e-3,
                "push_seconds": steps * 2e-3,
                "cpu_seconds": 5 + steps * 6e-3,
                "sent_bytes": 777 + steps * 1000,
                "received_bytes": steps * 500,
                "memory_bytes": 1e8 + steps,
                "examples": steps * 32,
            }
            lines.append(line(second + 0.3 * index, f"worker {index}", "worker", figures, second == seconds))
        for index in range(servers):
            status = {
                "mode": "sync",
                "phase": "training",
                "figures": {
                    "version": steps,
                    "parked": 0,
                    "uptime_seconds": second,
                    "cpu_seconds": 9 + workers * steps * 3e-3 / servers,
                    "busy_seconds": workers * steps * 2e-3 / servers,
                    "memory_bytes": 2e8,
                },
                "tables": {"t": {"rows": workers * steps * 10 / servers, "bytes": 1e6, "on_disk": 0}},
            }
            lines.append(line(second + 0.1, f"server {index}", "server", status, second == seconds))
    return sorted(lines, key=lambda each: each.at)


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 2), (2, 3)])
def test_what_records_show(servers: int, workers: int) -> None:
    seen = observed(lines_of(servers, workers))
    assert seen is not None
    assert (seen.servers, seen.workers, seen.mode, seen.in_rounds) == (servers, workers, "sync", True)
    assert seen.step_s == pytest.approx(0.01)
    assert (seen.pull_s, seen.push_s, seen.own_s) == pytest.approx((1e-3, 2e-3, 7e-3))
    assert (seen.worker_cpu_s, seen.server_cpu_s, seen.busy_s) == pytest.approx((6e-3, 3e-3, 2e-3), rel=0.02)
    assert (seen.sent_bytes, seen.received_bytes, seen.examples) == pytest.approx((1000, 500, 32))
    assert seen.server_bytes == pytest.approx(2e8 - 1e6)
    assert seen.table_bytes == pytest.approx(servers * 1e6)
    assert seen.growth[-1][1] == pytest.approx(10 * seen.growth[-1][0], rel=0.2)


def test_records_that_show_too_little() -> None:
    assert observed([]) is None
    assert observed(lines_of(seconds=int(3 + SETTLING_S + 2))) is None
    assert observed(lines_of(rate=0.0)) is None
    assert observed([line for line in lines_of() if line.kind != "server"]) is None
    assert observed([line for line in lines_of(workers=2) if line.process != "worker 0" or line.at < 1e9 + 2]) is None


def recorded(plan: LaunchPlan, folder: Path, lines: Sequence[Line]) -> None:
    for process in plan.processes:
        record = Record(folder, process.name)
        for line in lines:
            if line.process == process.name:
                record.write(line.at, line.kind, line.told, line.is_last)
        record.close()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[LaunchPlan]]:
    """Has jobs leave records, or end with an exit code, at once. The plans of those that were to run."""

    def arrange(exit_code: int = 0, **shape: Any) -> list[LaunchPlan]:
        plans: list[LaunchPlan] = []

        def run(plan: LaunchPlan, *, record_dir: Path, stdout: int, **_: Any) -> int:
            plans.append(plan)
            os.write(stdout, b"ValueError: of the script's own\n")
            if exit_code == 130:
                claim(str(record_dir), plan.job_id, LAUNCHER, "SIGINT (Ctrl-C)")
            if exit_code == 0:
                recorded(plan, record_dir, lines_of(plan.server_num, plan.worker_num, **shape))
            return exit_code

        monkeypatch.setattr(supervisor, "run", run)
        return plans

    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return arrange


def test_the_table_and_the_figures(
    ran: Callable[..., list[LaunchPlan]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plans = ran()
    numbers = ["--servers", "1,4", "--workers", "8", "--steps", "50000", "--json", "told.json"]
    assert cli.main(["plan", "train.py", "--sample", "10", *numbers, "--", "--epochs", "3"]) == 0
    assert [(each.server_num, each.worker_num) for each in plans] == [(1, 1), (2, 2)]
    assert plans[0].processes[0].command[1:] == ("train.py", "--epochs", "3")
    said = capsys.readouterr()
    heads, one, four, *_ = said.out.splitlines()
    assert heads.split()[:4] == ["servers", "workers", "steps/s", "examples/s"]
    assert (one.split()[:2], four.split()[:2]) == (["1", "8"], ["4", "8"])
    assert "Best mode: " in said.out
    assert "10 Gbit/s" in said.out
    told = json.loads((tmp_path / "told.json").read_text())
    assert [(each["servers"], each["workers"]) for each in told["forecasts"]] == [(1, 8), (4, 8)]
    assert told["tables"]["rows"] == pytest.approx(500_000, rel=0.2)
    assert told["observed"][0]["step_s"] == pytest.approx(0.01)


def test_a_sample_leaves_the_users_own_files_alone(
    ran: Callable[..., list[LaunchPlan]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans = ran()
    monkeypatch.setenv("FLEET_RECORD_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("FLEET_JOB_ID", "mine")
    assert cli.main(["plan", "train.py", "--servers", "1", "--workers", "1"]) == 0
    assert {each.name for each in tmp_path.iterdir()} == {"train.py"}
    for plan in plans:
        assert plan.job_id != "mine"
        assert not any("records" in process.environment["FLEET_RECORD_DIR"] for process in plan.processes)


@pytest.mark.parametrize(
    ("shape", "code", "word"),
    [
        ({"exit_code": 3}, 1, "ValueError: of the script's own"),
        ({"exit_code": 137}, 1, "ValueError: of the script's own"),
        ({"exit_code": 130}, 130, ""),
        ({"seconds": 6}, 1, "has not trained for long enough"),
        ({"rate": 0.0}, 1, "got 0 steps at servers. Let it take more steps"),
    ],
    ids=["failed", "killed", "interrupted", "short", "no steps"],
)
def test_a_script_that_shows_nothing(
    ran: Callable[..., list[LaunchPlan]],
    capsys: pytest.CaptureFixture[str],
    shape: dict[str, Any],
    code: int,
    word: str,
) -> None:
    ran(**shape)
    assert cli.main(["plan", "train.py"]) == code
    said = capsys.readouterr()
    assert word in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "SCRIPT"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["train.py", "--sample", "0"], "--sample"),
        (["train.py", "--seconds", "1"], "--seconds"),
        (["train.py", "--servers", "1,0"], "--servers"),
        (["train.py", "--workers", "some"], "--workers"),
        (["train.py", "--servers", "1,65537"], "--servers is not usable; expected numbers from 1 to 65536"),
        (["train.py", "--workers", "9" * 400], "--workers is not usable; expected numbers from 1 to 65536"),
        (["train.py", "--json", "."], "--json cannot be written"),
        (["train.py", "--gbit_s", "0"], "--gbit_s"),
        (["train.py", "--rtt_ms", "nan"], "--rtt_ms"),
        (["train.py", "--steps", "-1"], "--steps"),
        (["train.py", "--epochs", "3"], "--epochs"),
        (["train.py", "--json", "nowhere/told.json"], "--json cannot be written"),
    ],
)
def test_arguments_that_are_refused(
    ran: Callable[..., list[LaunchPlan]], capsys: pytest.CaptureFixture[str], options: list[str], word: str
) -> None:
    plans = ran()
    assert cli.main(["plan", *options]) == 2
    assert word in capsys.readouterr().err
    assert not plans


def test_when_a_sample_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So many steps after the first seconds, on every worker; or so much time; or no step in a long time."""
    now = 0.0

    class Clock:
        def now(self) -> float:
            return now

    monkeypatch.setattr(plan_command, "SystemClock", Clock)
    records = [Record(tmp_path, f"worker {index}") for index in range(2)]

    def steps(*each: float) -> None:
        for record, had in zip(records, each, strict=True):
            record.write(now, "worker", {"steps": had})

    def fresh(**other: Any) -> plan_command._Enough:
        return plan_command._Enough(tmp_path, ["worker 0", "worker 1"], **{"steps": 100, "seconds": 30, **other})

    enough = fresh()
    assert not enough()
    steps(5, 0)
    assert not enough()
    now, _ = 1.0, steps(6, 5)
    assert not enough()
    now, _ = 4.0, steps(50, 60)
    assert not enough()
    now, _ = 9.0, steps(140, 160)
    assert not enough(), "one has taken 90 steps"
    now, _ = 10.0, steps(150, 160)
    assert enough()

    now, _ = 0.0, steps(10, 10)
    enough = fresh()
    assert not enough()
    now = 31.0
    assert not enough()
    now = 32.0 + SETTLING_S
    assert enough()

    now, _ = 0.0, steps(0, 0)
    enough = fresh()
    now = plan_command._STARTUP_S + 1
    assert enough()
    for record in records:
        record.close()


RECORDING = """
import os, sys
sys.path[:0] = {paths!r}
from test_forecast import lines_of
from fleet.telemetry.record import Record
is_server = os.environ["TRAINING_ROLE"] == "PSERVER"
servers = len(os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(","))
workers = int(os.environ["PADDLE_TRAINERS_NUM"])
index = 0 if is_server else int(os.environ["PADDLE_TRAINER_ID"])
if is_server:
    index = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",").index(os.environ["PADDLE_CURRENT_ENDPOINT"])
me = f"server {{index}}" if is_server else f"worker {{index}}"
record = Record(os.environ["FLEET_RECORD_DIR"], me)
for line in lines_of(servers, workers):
    if line.process == me:
        record.write(line.at, line.kind, line.told, line.is_last)
record.close()
"""


def test_a_job_is_ended_once_it_is_enough(tmp_path: Path) -> None:
    job = plan_launch(
        servers=[],
        workers=[Endpoint("127.0.0.1", 1)],
        worker_hosts=("127.0.0.1",),
        here=("127.0.0.1",),
        command=[sys.executable, "-c", f"import time; time.sleep({10 * PROCESSES_S})"],
        job_id="enough",
        inherited={},
    )
    asked = iter([False, False, True])
    with (tmp_path / "said").open("wb") as said:
        exit_code = supervisor.run(
            job,
            log_dir=tmp_path,
            record_dir=tmp_path,
            grace_s=PATIENCE_S,
            inherited={},
            stdout=said.fileno(),
            stderr=said.fileno(),
            is_enough=lambda: next(asked),
        )
    assert exit_code == 0
    assert next(asked, None) is None, "it is not asked again"


@pytest.mark.slow
def test_processes_are_started(prepared: Prepared, tmp_path: Path) -> None:
    """With processes that leave records of steps as soon as they are started."""
    script = tmp_path / "train.py"
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    script.write_text(textwrap.dedent(RECORDING.format(paths=paths)))
    command = ["-m", "fleet", "plan", str(script), "--servers", "3", "--workers", "5"]
    code, out, err = ended(prepared.start(command, os.environ, Path(paths[1])))
    assert code == 0, err
    assert out.splitlines()[1].split()[:2] == ["3", "5"]


@pytest.mark.slow
def test_a_real_script(prepared: Prepared, tmp_path: Path) -> None:
    """To the end, with the click model of the benchmarks: it is ended once it has shown enough."""
    root = Path(__file__).parent.parent
    script = root / "benchmarks" / "peers" / "clicks.py"
    command = ["-m", "fleet", "plan", str(script), "--sample", "50", "--json", str(tmp_path / "told")]
    code, _, err = ended(prepared.start(command, os.environ, root))
    assert code == 0, err
    one, two = json.loads((tmp_path / "told").read_text())["observed"]
    assert (one["servers"], one["workers"], two["servers"], two["workers"]) == (1, 1, 2, 2)
    for seen in (one, two):
        assert (seen["in_rounds"], seen["mode"]) == (True, "sync")
        assert seen["examples"] == pytest.approx(1000, rel=0.05)
        assert 0 < seen["busy_s"] < seen["step_s"]
        assert seen["growth"][-1][1] > 26_000
    assert two["sent_bytes"] == pytest.approx(one["sent_bytes"], rel=0.05)
