"""Runs the commands: ``fleetrun`` starts a job; ``fleet`` has it and the rest as subcommands."""

from __future__ import annotations

import argparse
import io
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fleet.base import checks
from fleet.base.cluster import Endpoint
from fleet.base.setting_kinds import JOB_ID, LOCAL_PATH
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings, under_present_names
from fleet.base.unknown_variables import remarks
from fleet.errors import AuthenticationError, ConfigurationError, DeadlineError, FleetError
from fleet.launch import checkpoint_options, env_report, host_network, live_view, replay_options, supervisor
from fleet.launch.job_folder import alone_in
from fleet.launch.parser import Parser, python_arguments
from fleet.launch.process_plan import (
    LaunchPlan,
    check_reachable,
    parse_endpoints,
    parse_worker_hosts,
    plan_launch,
    shared_job_id,
)
from fleet.plan.specs import MOST_PROCESSES
from fleet.role_maker.arguments import endpoint as named_endpoint

#: Spellings of the source documents.
_ALIASES = {"--trainer_num": "--worker_num", "--trainers": "--workers"}
#: The options that stand alone; every other one is followed by its value.
_FLAGS = ("-h", "--help", "-m")

_RUN_EPILOG = """\
examples:
  a whole job on this machine, two servers and two workers:
    {prog} --server_num 2 --worker_num 2 train.py --epochs 3
  the same with a module, as python -m would run it:
    {prog} --server_num 1 --worker_num 4 -m mypackage.train
  a collective job, which has no servers:
    {prog} --worker_num 2 train.py
  a job of two machines; the same command on both, each starts its own part:
    {prog} --servers 10.0.0.1:6170,10.0.0.2:6170 --workers 10.0.0.1,10.0.0.1,10.0.0.2 train.py
  a collective job of two machines:
    {prog} --workers 10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170 train.py

Options come before the script; what follows it is the script's, untouched. The script is run by the Python that runs
this command, with no terminal input, once for each server and each worker. fleet.init() finds in these variables which
one it is:
  PADDLE_TRAINING_ROLE, TRAINING_ROLE    PSERVER or TRAINER
  PADDLE_PSERVERS_IP_PORT_LIST           host:port of every server
  PADDLE_TRAINER_ENDPOINTS               in a collective job, host:port of every worker
  PADDLE_TRAINERS_NUM                    number of workers
  PADDLE_TRAINER_ID                      which worker this is (workers)
  PADDLE_CURRENT_ENDPOINT                which server this is (servers)
  FLEET_JOB_ID                           the same for the whole job
  FLEET_LAUNCHER                         fleetrun, which tells what concerns all processes
  FLEET_RECORD_DIR                       where figures are kept: --log_dir, unless it is set
  FLEET_METRICS_PORT                     with --metrics_port
  PYTHONUNBUFFERED=1; OMP_NUM_THREADS=1  unless OMP_NUM_THREADS is set

Output is passed on line by line with a prefix such as [worker 0], and kept without it in --log_dir. On a terminal a
table below it shows how the job does. fleet report draws what was recorded in --log_dir. With --max_restarts
a process that a signal has killed is started again. Otherwise a process that fails ends the job: the one that was the
cause is named, its traceback comes last, and its exit code becomes this command's (128 + n after signal n). Ctrl-C ends
the job, a second one kills it. After a mistake in the options nothing is started and the exit code is 2.
"""


def fleetrun(argv: list[str] | None = None) -> int:
    """Run the ``fleetrun`` command, and return the exit code."""
    return _guarded(_run, sys.argv[1:] if argv is None else argv, "fleetrun")


def main(argv: list[str] | None = None) -> int:
    """Run the ``fleet`` command, and return the exit code."""
    return _guarded(_dispatch, sys.argv[1:] if argv is None else argv, "fleet")


def _guarded(command: Callable[[list[str], str], int], argv: list[str], prog: str) -> int:
    """Turn every way in which a command can end into an exit code, and errors into a line."""
    _open_streams()
    try:
        code = _exit_code(command, argv, prog)
        sys.stdout.flush()  # what cannot be written is to be said here, and not when the interpreter ends
        return code
    except FleetError as error:
        print(f"{prog}: {error}\nSee {prog} --help.", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads it has seen enough, as head has
        _write_no_more()
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        _write_no_more()
        return 1
    except KeyboardInterrupt:
        return 130


def _exit_code(command: Callable[[list[str], str], int], argv: list[str], prog: str) -> int:
    try:
        return command(argv, prog)
    except SystemExit as asked:  # --help and --version
        return int(asked.code or 0)


def _write_no_more() -> None:
    """Let go of what is still to be written, which the interpreter would try again, and complain, as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Let everything be written that a command says, wherever it goes and whatever its encoding has letters for."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # it was closed before this process began: a file that is opened later would be written into
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does by itself


def _dispatch(argv: list[str], prog: str) -> int:
    parser = Parser(prog, description="Distributed training for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fleet {env_report.version_of('torch-fleet')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (summary, _) in _COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    # Only the first word is argparse's business: what follows it belongs to the command.
    name = parser.parse_args(argv[:1]).command
    return _guarded(_COMMANDS[name][1], argv[1:], f"{prog} {name}")


def _run(argv: list[str], prog: str) -> int:
    given, command = _split(argv)
    options = _run_parser(prog).parse_args(given)
    _check_working_directory()
    if not 0 <= options.grace <= checks.LONGEST_S:
        raise ConfigurationError(
            "--grace is not usable", expected=f"seconds, from 0 to {checks.LONGEST_S:g}", got=f"{options.grace:g}"
        )
    _check_restarts(options.max_restarts, has_servers=(options.servers, options.server_num) != (None, None))
    plan = _plan(options, [sys.executable, *python_arguments(command, as_module=options.m)])
    log_dir, record_dir = Path(LOCAL_PATH.read("--log_dir", options.log_dir)), _record_dir(options)
    folders = {record_dir: "FLEET_RECORD_DIR", log_dir.resolve(): "--log_dir"}
    for folder, chosen_by in folders.items():
        _make_writable(chosen_by, folder)
    # A part may share its folders with the others.
    with alone_in(folders) if plan.is_whole else nullcontext():
        return supervisor.run(
            plan,
            log_dir=log_dir,
            record_dir=record_dir,
            live=_wants_live_view(options.view),
            grace_s=options.grace,
            inherited=under_present_names(PROCESS_ENVIRONMENT),
            max_restarts=options.max_restarts,
        )


def _serve(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog,
        description="Run one parameter server with no script of yours: what it holds, its workers tell it.",
        epilog=f"example: {prog} --endpoint 10.0.0.1:6170",
        allow_abbrev=False,
    )
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="the address to listen on")
    parser.add_argument("--model_dir", metavar="DIR", help="a checkpoint to load first")
    parser.add_argument(
        "--join",
        metavar="HOST:PORT,...",
        help="servers of a job: if it runs without this one, it is given this one too (see fleet servers)",
    )
    options = parser.parse_args(argv)
    endpoint = named_endpoint(options.endpoint, where="--endpoint")  # which port 0 is not: nobody would find it
    joins = [named_endpoint(each, where="--join") for each in (options.join or "").split(",") if options.join]
    if joins and options.model_dir is not None:
        raise ConfigurationError(
            "--join and --model_dir do not go together", todo="A server that joins a job gets what the job has."
        )
    from fleet.launch.server_command import serve_endpoint  # loads torch and grpc, which no other command needs

    return _serving(lambda: serve_endpoint(endpoint, options.model_dir, joins), prog)


def _serving(serve: Callable[[], int], prog: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return serve()
    except FleetError as error:  # not a mistake in the arguments, so no word of --help
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def _change_servers(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog,
        description="Give a running job more servers, or fewer. Return when its rows and parameters have moved.",
        epilog=f"example, once fleet server --endpoint 10.0.0.3:6170 runs: {prog} 10.0.0.1:6170 add 10.0.0.3:6170",
        allow_abbrev=False,
    )
    parser.add_argument("server", metavar="HOST:PORT", help="any server of the job, or several (a:1,b:2)")
    parser.add_argument("action", choices=["add", "remove"])
    parser.add_argument("endpoints", nargs="+", metavar="HOST:PORT", help="the servers to add, or to remove")
    parser.add_argument(
        "--timeout_s", type=float, default=600.0, metavar="SECONDS", help="how long it may take (default: 600)"
    )
    options = parser.parse_args(argv)
    asked = parse_endpoints(options.server, "server")
    changed = [named_endpoint(each, where=options.action) for each in options.endpoints]
    checks.seconds("--timeout_s", options.timeout_s)
    from fleet.launch.servers_command import change_servers  # loads torch and grpc

    servers = change_servers(asked, options.action, changed, options.timeout_s)
    print(f"the job has {len(servers)} servers now: {', '.join(servers)}")
    return 0


def _replicate(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog,
        description="Follow a job, and answer look-ups for many predictors.",
        epilog=f"example: {prog} --servers 10.0.0.1:6170,10.0.0.2:6170 --endpoint 10.0.0.3:6180",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--servers", metavar="HOST:PORT,...", help="every server of the job, in its order")
    source.add_argument("--checkpoints", metavar="DIR", help="or the directory or URL of fleet.Checkpoints")
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="the address to listen on")
    parser.add_argument(
        "--poll_s", type=float, default=0.1, metavar="SECONDS", help="how soon to ask for what is new (default: 0.1)"
    )
    parser.add_argument("--at", type=int, metavar="VERSION", help="the one checkpoint to take and to stay at")
    options = parser.parse_args(argv)
    followed: str | list[str] = options.checkpoints
    if options.servers is not None:
        followed = [str(each) for each in parse_endpoints(options.servers, "server")]
    endpoint = named_endpoint(options.endpoint, where="--endpoint")  # not port 0: nobody would know where to ask
    checks.seconds("--poll_s", options.poll_s)
    checks.whole_or_none("--at", options.at, 0)
    from fleet.launch.replica_command import replicate  # loads torch and grpc

    return _serving(lambda: replicate(followed, endpoint, options.poll_s, options.at), prog)


def _environment(argv: list[str], prog: str) -> int:
    return env_report.tell(argv, prog, PROCESS_ENVIRONMENT)


def _top(argv: list[str], prog: str) -> int:
    from fleet.launch.top import top

    return _observed(top, argv, prog)


def _doctor(argv: list[str], prog: str) -> int:
    from fleet.launch.doctor import doctor

    return _observed(doctor, argv, prog)


def _forecast(argv: list[str], prog: str) -> int:
    from fleet.launch.plan_command import plan

    return plan(argv, prog)


def _report(argv: list[str], prog: str) -> int:
    from fleet.launch.report_command import report

    return report(argv, prog)


def _observed(command: Callable[[list[str], str], int], argv: list[str], prog: str) -> int:
    """Run a command that asks a job: not every error is a mistake in the arguments, so most do not mention --help."""
    try:
        return command(argv, prog)
    except (DeadlineError, AuthenticationError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


#: What ``fleet`` can do: a new subcommand is one entry.
_COMMANDS: dict[str, tuple[str, Callable[[list[str], str], int]]] = {
    "run": ("start a job, or this machine's part of one (also: fleetrun)", _run),
    "plan": ("predict what a script needs of servers and workers", _forecast),
    "server": ("run one parameter server, without a script", _serve),
    "servers": ("give a running job more servers, or fewer", _change_servers),
    "replica": ("follow a job, and answer look-ups of predictors", _replicate),
    "doctor": ("say what holds a job back", _doctor),
    "report": ("draw a run as one HTML page", _report),
    "top": ("show a running job, one line a process", _top),
    "replay": ("show a durable job's servers as they were at any step", replay_options.replay),
    "checkpoint": ("look at checkpoints: ls, verify, diff, export, import", checkpoint_options.inspect),
    "env": ("print what a bug report needs", _environment),
}


def _run_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog,
        usage=f"{prog} [options] [-m] SCRIPT [ARG ...]",
        description="Start every process of a job on this machine, or this machine's part of one.",
        epilog=_RUN_EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole = parser.add_argument_group("a whole job on this machine")
    whole.add_argument("--server_num", type=int, metavar="N", help="number of parameter servers (default: none)")
    whole.add_argument("--worker_num", type=int, metavar="N", help="number of workers")
    whole.add_argument(
        "--start_port", type=int, metavar="PORT", help="first of consecutive ports (default: any free ports)"
    )
    part = parser.add_argument_group("this machine's part of a larger job")
    part.add_argument("--servers", metavar="HOST:PORT,...", help="every server of the job")
    part.add_argument("--workers", metavar="HOST,...", help="the host of every worker; host:port without --servers")
    part.add_argument("--node_ip", metavar="HOST", help="which of these hosts this is (default: found out)")
    both = parser.add_argument_group("both")
    both.add_argument("-m", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    both.add_argument("--log_dir", default="logs", metavar="DIR", help="one file a process goes here (default: logs)")
    both.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL, and for servers to end after the last worker (default: 10)",
    )
    both.add_argument(
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a process that is killed by a signal again, up to N times each; servers need FLEET_DURABLE_DIR "
        "for that (default: 0)",
    )
    both.add_argument(
        "--view",
        choices=("auto", "live", "plain"),
        default="auto",
        help="a live table below the output, or the output alone (default: live on a terminal, if rich is installed)",
    )
    both.add_argument(
        "--metrics_port",
        type=int,
        metavar="PORT",
        help="first of consecutive ports with figures for Prometheus, one a process (default: FLEET_METRICS_PORT, "
        "else none)",
    )
    both.add_argument("--job_id", metavar="ID", help="name of the job (default: FLEET_JOB_ID, else made up)")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate our options from the script with its own: argparse would look into the script's, however it is asked not
    to."""
    options: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("-", "_").replace("__", "--", 1)
        name = _ALIASES.get(name, name)
        options.append(f"{name}{equals}{value}")
        if rest and not equals and name not in _FLAGS:
            options.append(rest.pop(0))
    return options, rest[1:] if rest[:1] == ["--"] else rest


def _plan(options: argparse.Namespace, command: list[str]) -> LaunchPlan:
    """Plan what the options ask for, checked against this machine."""
    alone = [f"--{name}" for name in ("server_num", "worker_num", "start_port") if getattr(options, name) is not None]
    part = [f"--{name}" for name in ("servers", "workers", "node_ip") if getattr(options, name) is not None]
    if alone and part:
        raise ConfigurationError(
            f"{', '.join(alone)} and {', '.join(part)} do not go together",
            todo="The first start a whole job on this machine, the others its part of a larger one.",
        )
    metrics_port = _metrics_port(options)
    found = _part_of_a_job(options) if part else _whole_job(options, metrics_port)
    plan = plan_launch(
        servers=found.servers,
        worker_hosts=found.worker_hosts,
        here=found.here,
        command=command,
        job_id=_job_id(options.job_id) or found.made_up_id,
        inherited=PROCESS_ENVIRONMENT,
        workers=found.workers,
        record_dir=str(_record_dir(options)),
        metrics_port=metrics_port,
    )
    return replace(plan, notes=(*remarks(PROCESS_ENVIRONMENT), *plan.notes))


class _Places(NamedTuple):
    """Says where the processes of a job are; ``workers`` are those of a collective job, which has no servers."""

    servers: tuple[Endpoint, ...]
    workers: tuple[Endpoint, ...]
    worker_hosts: tuple[str, ...]
    here: Collection[str]
    made_up_id: str


def _part_of_a_job(options: argparse.Namespace) -> _Places:
    if options.workers is None:
        raise ConfigurationError(
            "--workers is missing",
            todo="Give both lists, or for a collective job this one, before the script and alike on all machines.",
        )
    servers: tuple[Endpoint, ...] = ()
    workers: tuple[Endpoint, ...] = ()
    if options.servers is None:
        workers = parse_endpoints(options.workers, "worker")
        worker_hosts = tuple(worker.host for worker in workers)
    else:
        servers = parse_endpoints(options.servers, "server")
        worker_hosts = parse_worker_hosts(options.workers)
    hosts = [*(server.host for server in servers), *worker_hosts]
    here = host_network.hosts_here(hosts, options.node_ip)
    check_reachable(hosts, here)
    for listening in (*servers, *workers[:1]):
        if listening.host in here:
            host_network.check_free(listening)
    return _Places(servers, workers, worker_hosts, here, shared_job_id(servers or workers, worker_hosts))


def _whole_job(options: argparse.Namespace, metrics_port: int | None) -> _Places:
    _check_numbers(options.server_num, options.worker_num)
    count = options.worker_num if options.server_num is None else options.server_num
    processes = options.worker_num + (options.server_num or 0)
    ports = (
        host_network.free_ports(count, range(metrics_port, metrics_port + processes) if metrics_port else ())
        if options.start_port is None
        else host_network.consecutive_ports(options.start_port, count)
    )
    listening = tuple(Endpoint(host_network.LOOPBACK, port) for port in ports)
    servers, workers = ((), listening) if options.server_num is None else (listening, ())
    here = (host_network.LOOPBACK,)
    return _Places(servers, workers, here * options.worker_num, here, secrets.token_hex(8))


def _check_working_directory() -> None:
    """Refuse to start processes in a directory that was removed, where torch ends with errors of other names."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigurationError(
            "the working directory is not there any more", got=error.strerror, todo="Change to one that is, with cd."
        ) from None


def _make_writable(name: str, directory: Path) -> None:
    todo = f"Give {name} a directory in which you may make files."
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be made", where=str(directory), got=str(error), todo=todo) from None
    if not os.access(directory, os.W_OK):
        raise ConfigurationError(f"{name} is not writable", where=str(directory), todo=todo)


def _record_dir(options: argparse.Namespace) -> Path:
    """Return where the processes keep their figures, for the view and ``fleet report``."""
    given = PROCESS_ENVIRONMENT.get("FLEET_RECORD_DIR", "").strip()
    return Path(LOCAL_PATH.read("FLEET_RECORD_DIR", given) if given else options.log_dir).resolve()


def _job_id(asked: str | None) -> str:
    """Return the name that this job was given, empty if it was given none."""
    name, text = ("FLEET_JOB_ID", PROCESS_ENVIRONMENT.get("FLEET_JOB_ID", "")) if asked is None else ("--job_id", asked)
    return JOB_ID.read(name, text.strip()) if text.strip() else ""


def _wants_live_view(asked: str) -> bool:
    has_rich = find_spec("rich") is not None
    is_terminal = live_view.is_possible(PROCESS_ENVIRONMENT)
    if asked == "live" and not (has_rich and is_terminal):
        raise ConfigurationError(
            "--view live is not possible here",
            expected="a terminal that can move its cursor, and rich",
            got="no rich" if is_terminal else "no such terminal",
            todo="Leave it out." if has_rich else "pip install 'torch-fleet[view]', or leave it out.",
        )
    return asked != "plain" and has_rich and is_terminal


def _metrics_port(options: argparse.Namespace) -> int | None:
    """Return the first port at which figures are shown to Prometheus, if they are."""
    port: int | None = options.metrics_port
    if port is None:
        port = ProcessSettings.read(PROCESS_ENVIRONMENT).observing.metrics_port
    if port is not None and not 0 <= port <= 65000:
        raise ConfigurationError("--metrics_port is not usable", expected="0 to 65000", got=port)
    return port


def _check_restarts(max_restarts: int, *, has_servers: bool) -> None:
    """Refuse restarts of processes that could not find their place again."""
    if max_restarts < 0:
        raise ConfigurationError("--max_restarts is not usable", expected="0 or more", got=max_restarts)
    if not max_restarts:
        return
    if not has_servers:
        raise ConfigurationError(
            "--max_restarts has nothing to act on in a collective job",
            got=f"--max_restarts {max_restarts}",
            todo="Leave it out, and start the job again from its last checkpoint.",
        )
    if not PROCESS_ENVIRONMENT.get("FLEET_DURABLE_DIR", "").strip():
        raise ConfigurationError(
            "--max_restarts needs servers that keep what they have",
            expected="FLEET_DURABLE_DIR in the environment",
            got=f"--max_restarts {max_restarts} and no FLEET_DURABLE_DIR",
            todo="Set it to a directory on a local disk.",
        )


def _check_numbers(server_num: int | None, worker_num: int | None) -> None:
    """Refuse numbers that make no job: a collective job has workers only."""
    for option, number in (("--worker_num", worker_num), ("--server_num", server_num)):
        if number is None and option == "--worker_num":
            raise ConfigurationError(
                f"{option} is missing",
                todo="For example: --server_num 2 --worker_num 2, before the script: what follows it is the script's.",
            )
        if number is not None and not 1 <= number <= MOST_PROCESSES:
            raise ConfigurationError(f"{option} is not usable", expected=f"1 to {MOST_PROCESSES}", got=number)
