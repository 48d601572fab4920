"""Runs ``fleet plan``: lets a script train for a while as two small jobs, and says what larger ones would cost."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from fleet.base import checks
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, under_present_names
from fleet.errors import ConfigurationError, FleetError, StateError
from fleet.launch import host_network, supervisor
from fleet.launch.parser import Parser, python_arguments
from fleet.launch.process_plan import LaunchPlan, plan_launch
from fleet.plan.specs import MOST_PROCESSES
from fleet.telemetry.cause import LAUNCHER, claimed
from fleet.telemetry.forecast import LEAST_S, SETTLING_S, Costs, Forecast, Observed, Site, observed
from fleet.telemetry.live_table import aligned, shown_bytes, shown_number
from fleet.telemetry.record import newest, read_records

#: The two jobs that are looked at: as many servers as workers.
_SIZES = (1, 2)
#: So long a script may take to its first step.
_STARTUP_S = 600.0
_GRACE_S = 10.0
_LAST_LINES = 30
_WIDTH = 100
#: Figures are recorded once a second, and the last are of up to a second ago.
_RECORDED_S = 2.0
#: These would have the sample show itself where the user's own jobs do.
_NOT_OF_SAMPLES = (
    *("FLEET_METRICS_PORT", "FLEET_TENSORBOARD_DIR", "FLEET_RECORD_DIR", "FLEET_JOB_ID", "FLEET_HEALTH_PORT"),
)
#: Asynchronous training has to gain so much to be worth what it loses.
_WORTH = 1.15

_EPILOG = """\
The script runs as it would under fleetrun: with one server and one worker, then with two and two, on this machine,
each until so many steps have been taken, or half of the time is over. It is then ended as SIGTERM ends it, and what it
writes on its way is written. What is predicted:
  steps/s, examples/s   of all workers together; examples if the script calls fleet.report(examples=...)
  sent, received        bytes of one worker's step
  a server's network    bytes a second of one server, in the direction that has more
  memory                of one process; of a server, after --steps of all workers together
  limited by            what would have to be faster

examples:
  {prog} train.py --sample 1000
  {prog} train.py --servers 2,4,8 --workers 16,32 --gbit_s 25 --steps 1000000
  {prog} train.py --here                    all processes on this machine
  {prog} train.py -- --epochs 1 --data day1    what follows -- is the script's
"""


def plan(argv: list[str], prog: str) -> int:
    """Run the ``fleet plan`` command, and return the exit code."""
    cut = argv.index("--") if "--" in argv else len(argv)
    options = _parser(prog).parse_args(argv[:cut])
    servers, workers = _numbers("--servers", options.servers), _numbers("--workers", options.workers)
    sample = checks.whole("--sample", options.sample, 1)
    seconds = checks.number("--seconds", options.seconds, 2 * (SETTLING_S + LEAST_S))
    gbit_s = checks.number("--gbit_s", options.gbit_s, 0, above=True)
    round_trip_ms = checks.number("--rtt_ms", options.rtt_ms, 0)
    command = python_arguments([options.script, *argv[cut + 1 :]], as_module=options.m)
    if options.steps is not None:
        checks.number("--steps", options.steps, 0, above=True)
    if options.json is not None and (
        os.path.isdir(options.json) or not os.access(Path(options.json).absolute().parent, os.W_OK)
    ):
        raise ConfigurationError("--json cannot be written", where=options.json)  # before a minute has passed
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    site = Site(gbit_s * 1e9 / 8, round_trip_ms / 1e3, cores if options.here else None)
    try:
        one, two = (_sampled(size, command, sample, seconds / len(_SIZES)) for size in _SIZES)
    except _Interrupted as interrupted:
        return interrupted.exit_code
    except FleetError as error:  # not a mistake in the arguments, so no word of --help
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    costs = Costs(one, two, cores)
    steps = options.steps or one.steps
    rows = costs.rows_after(steps)
    forecasts = [costs.forecast(each, of, site, rows) for each in servers for of in workers]
    print(_table(forecasts))
    for sentence in _sentences(costs, site, forecasts[-1], steps):
        print("\n" + textwrap.fill(sentence, _WIDTH))
    if options.json is not None:
        _write(Path(options.json), costs, site, steps, rows, forecasts)
    return 0


class _Interrupted(Exception):
    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Enough:
    """Decides when a job has shown enough."""

    def __init__(self, folder: Path, workers: Sequence[str], steps: int, seconds: float) -> None:
        self.is_reached = False
        self.workers = workers
        self._folder = folder
        self._steps, self._seconds = steps, seconds
        self._clock = SystemClock()
        self._began = self._clock.now()
        self._trains_since: float | None = None
        self._settled_at: float | None = None

    def __call__(self) -> bool:
        now = self._clock.now()
        told = [line.told.get("steps", 0) for line in newest(self._folder, self.workers)]
        if len(told) < len(self.workers) or not all(told):
            self.is_reached = now - self._began > _STARTUP_S
            return self.is_reached
        if self._trains_since is None:
            self._trains_since = now
        settled_s = now - self._trains_since - SETTLING_S
        if settled_s < 0:
            return False
        if self._settled_at is None:
            self._settled_at = min(told)
        has_steps = min(told) - self._settled_at >= self._steps and settled_s >= LEAST_S + _RECORDED_S
        self.is_reached = has_steps or settled_s >= self._seconds
        return self.is_reached


def _sampled(size: int, command: Sequence[str], steps: int, seconds: float) -> Observed:
    """Run a job of so many servers and workers for a while, and return what it has shown."""
    what = f"{size} server{'s' * (size > 1)} and {size} worker{'s' * (size > 1)}"
    print(f"training with {what}, for {steps:,} steps or {seconds:g} s", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-plan-")))
        inherited = {
            name: value
            for name, value in under_present_names(PROCESS_ENVIRONMENT).items()
            if name not in _NOT_OF_SAMPLES
        }
        if inherited.get("FLEET_DIRECT_PORT", "").strip().isdigit():
            del inherited["FLEET_DIRECT_PORT"]  # one for a machine, which has two servers here
        if durable := inherited.get("FLEET_DURABLE_DIR", "").strip():
            Path(durable).mkdir(parents=True, exist_ok=True)
            inherited["FLEET_DURABLE_DIR"] = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="fleet-plan-", dir=durable)
            )
        job = _job(size, command, folder, inherited)
        enough = _Enough(folder, [each.name for each in job.processes[size:]], steps, seconds)
        said = folder / "said"
        with said.open("wb") as output:
            exit_code = supervisor.run(
                job,
                log_dir=folder,
                record_dir=folder,
                grace_s=_GRACE_S,
                inherited=inherited,
                stdout=output.fileno(),
                stderr=output.fileno(),
                is_enough=enough,
            )
        cause = claimed(folder, job.job_id)
        if exit_code != 0 and (enough.is_reached or (cause is not None and cause.process == LAUNCHER)):
            raise _Interrupted(exit_code)
        seen = observed(read_records(folder)) if exit_code == 0 else None
        if seen is not None:
            return seen
        steps_seen = min((int(line.told.get("steps", 0)) for line in newest(folder, enough.workers)), default=0)
        print("\n".join(said.read_text(errors="replace").splitlines()[-_LAST_LINES:]), file=sys.stderr)
    where = f"a job of {what}, whose last words are above"
    if exit_code != 0:
        raise StateError("the script failed", where=where, got=f"exit code {exit_code}")
    raise StateError(
        "the script has not trained for long enough",
        where=where,
        expected=f"{SETTLING_S + LEAST_S + _RECORDED_S:g} s of steps, after the first",
        got=f"{steps_seen:,} steps at servers",
        todo="Give it more time (--seconds)." if enough.is_reached else "Let it take more steps.",
    )


def _job(size: int, command: Sequence[str], folder: Path, inherited: Mapping[str, str]) -> LaunchPlan:
    here = host_network.LOOPBACK
    return plan_launch(
        servers=[Endpoint(here, port) for port in host_network.free_ports(size)],
        worker_hosts=(here,) * size,
        here=(here,),
        command=[sys.executable, *command],
        job_id=folder.name,
        inherited=inherited,
        record_dir=str(folder),
    )


def _table(forecasts: Sequence[Forecast]) -> str:
    has_examples = any(each.examples for each in forecasts)
    heads = ("servers", "workers", "steps/s", *(("examples/s",) if has_examples else ()))
    lines = [(*heads, "sent", "received", "a server's network", "worker", "server", "limited by")]
    for each in forecasts:
        examples = (shown_number(each.examples),) if has_examples else ()
        lines.append(
            (
                *(str(each.servers), str(each.workers), shown_number(each.rate), *examples),
                *(shown_bytes(each.sent_bytes), shown_bytes(each.received_bytes), f"{shown_bytes(each.network)}/s"),
                *(shown_bytes(each.worker_bytes), shown_bytes(each.server_bytes), each.limit.value),
            )
        )
    return aligned(lines, (len(lines[0]) - 1,))


def _sentences(costs: Costs, site: Site, last: Forecast, steps: float) -> list[str]:
    one = costs.one
    network = f"{site.bytes_a_second * 8 / 1e9:g} Gbit/s and {site.round_trip_s * 1e3:g} ms there and back between them"
    where = (
        f"On machines where every process has processors like these, with {network}"
        if site.cores is None
        else f"All processes on this machine, with {site.cores} processors"
    )
    said = [
        f"{where}. A step of one worker at one server took {one.step_s * 1e3:.3g} ms here ({one.mode}), "
        f"{one.own_s * 1e3:.3g} of them its own."
    ]
    if costs.is_mixed:
        said.append(
            "Two workers received other bytes a step than one. What workers send each other (as in GEO) is not told "
            "apart from what further servers add, so bytes and the network are not predicted."
        )
    if one.has_files:
        said.append("Rows lie in files beyond the memory that tables were given, so that they take no more than that.")
    elif costs.row_bytes:
        after, known = costs.growth[-1]
        later = f"{costs.rows_after(steps):,.0f} after {steps:,.0f} of all workers together"
        said.append(
            f"Tables: {shown_bytes(costs.row_bytes)} of a server's memory for a row. {known:,.0f} rows after "
            f"{after:,.0f} steps, growing like steps to the power of {costs.growth_power:.2f}, make {later}, and "
            f"{costs.rows_after(10 * steps):,.0f} after ten times as many."
        )
    return [*said, _best_mode(costs, site, last)]


def _best_mode(costs: Costs, site: Site, job: Forecast) -> str:
    """Say which mode to take for a job."""
    together, free = (costs.of_kind(wanted).forecast(job.servers, job.workers, site).rate for wanted in (True, False))
    of = f"{job.servers} server{'s' * (job.servers > 1)} and {job.workers} worker{'s' * (job.workers > 1)}"
    rates = f"with {of}, {shown_number(together)} steps/s synchronous and {shown_number(free)} asynchronous"
    if free < _WORTH * together or job.workers == 1:
        return f"Best mode: sync. It would make, {rates}, and it computes what one process would."
    return (
        f"Best mode: async; or, with dense parameters on servers, gba, which keeps the batch and the learning rate of "
        f"sync. It would make, {rates}. "
        f"Gradients are then about {job.workers} updates old: docs/modes tells what a model loses by that."
    )


def _write(path: Path, costs: Costs, site: Site, steps: float, rows: float, forecasts: Sequence[Forecast]) -> None:
    told = {
        "site": asdict(site),
        "observed": [asdict(each) for each in (costs.one, costs.two)],
        "tables": {"steps": steps, "rows": rows, "row_bytes": costs.row_bytes},
        "forecasts": [{**asdict(each), "limit": each.limit.value} for each in forecasts],
    }
    try:
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError("--json cannot be written", where=str(path), got=error.strerror) from None


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not 1 <= min(numbers) <= max(numbers) <= MOST_PROCESSES:
        expected = f"numbers from 1 to {MOST_PROCESSES}, such as 1,2,4"
        raise ConfigurationError(f"{option} is not usable", expected=expected, got=repr(text))
    return numbers


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog,
        usage=f"{prog} [-m] SCRIPT [options] [-- ARG ...]",
        description="Predict memory, bytes and speed of a script's jobs, from a minute of its steps on this machine.",
        epilog=_EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("-m", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    parser.add_argument("--sample", type=int, default=1000, metavar="STEPS", help="steps of each job (default: 1000)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="SECONDS", help="no more time than this for them (default: 60)"
    )
    parser.add_argument(
        "--servers", default="1,2,4,8", metavar="N,...", help="numbers to predict for (default: 1,2,4,8)"
    )
    parser.add_argument("--workers", default="1,2,4,8,16", metavar="N,...", help="likewise (default: 1,2,4,8,16)")
    parser.add_argument(
        "--steps",
        type=float,
        metavar="N",
        help="memory is that after so many steps of all workers together (default: as many as the sample)",
    )
    parser.add_argument("--gbit_s", type=float, default=10.0, metavar="GBIT", help="of each machine (default: 10)")
    parser.add_argument("--rtt_ms", type=float, default=0.2, metavar="MS", help="there and back (default: 0.2)")
    parser.add_argument(
        "--here", action="store_true", help="all processes are on this machine, and share its processors"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all figures there")
    return parser
