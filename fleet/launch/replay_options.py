"""Reads the command line of ``fleet replay``, without importing the torch that its work needs."""

from __future__ import annotations

import argparse
import re
import sys

from fleet.errors import ConfigurationError, FleetError
from fleet.launch.parser import Parser

_ID = re.compile(r"-?[0-9]{1,400}")

_EPILOG = """\
DURABLE_DIR is what FLEET_DURABLE_DIR was for the servers, or the folder of one of them. Nothing is changed there, and
no job is needed. It holds what recovery needs, so the last steps; with FLEET_DURABLE_KEEP=all it holds all steps, and
stays when the job ends.

examples:
  {prog} /var/tmp/fleet                          what is kept, and digests of its last state
  {prog} /var/tmp/fleet --to 120 --out ckpt/     the job after 120 steps, as a checkpoint
  {prog} /var/tmp/fleet --server 0 --out ckpt/   one server, with --to after so many of its updates
  {prog} one/ --diff other/                      where two runs part
  {prog} /var/tmp/fleet --blame user.weight:17   whose gradients made a row what it is
"""


def replay(argv: list[str], prog: str) -> int:
    """Run the ``fleet replay`` command, and return the exit code."""
    options = _parser(prog).parse_args(argv)
    _check(options)
    from fleet.launch.replay_command import carry_out

    try:
        return carry_out(options)
    except BrokenPipeError:
        raise
    except (FleetError, OSError) as error:  # not a mistake in the arguments, so no word of --help
        print(f"{prog}: {error}", file=sys.stderr)
        return 2


def _check(options: argparse.Namespace) -> None:
    aims = [name for name in ("out", "digests", "diff", "blame") if getattr(options, name)]
    if len(aims) > 1:
        raise ConfigurationError(
            f"{' and '.join(f'--{name}' for name in aims)} do not go together", todo="Ask for one after the other."
        )
    if options.to is not None and options.to < 0:
        raise ConfigurationError("--to is not usable", expected="a number of steps, 0 or more", got=options.to)
    if options.blame is not None:
        table, _, id = options.blame.rpartition(":")
        if not table or not _ID.fullmatch(id):
            raise ConfigurationError("--blame is not usable", expected="TABLE:ID", got=repr(options.blame))
        options.blame = table, int(id)


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog,
        description="Run the servers of a durable job again, from what they have kept, and say or write what they were "
        "at some step.",
        epilog=_EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("durable_dir", metavar="DURABLE_DIR")
    parser.add_argument(
        "--server",
        type=int,
        metavar="I",
        help="this server alone; needed where servers apply gradients each at its own time, as in asynchronous jobs",
    )
    parser.add_argument(
        "--to",
        type=int,
        metavar="STEP",
        help="after so many steps, or in asynchronous jobs updates of the server (default: the last that is there)",
    )
    parser.add_argument("--out", metavar="DIR", help="write the state there, as a checkpoint")
    parser.add_argument("--digests", action="store_true", help="a digest of each block and table after every step")
    parser.add_argument(
        "--diff",
        metavar="OTHER",
        help="the first step after which another run's state differs, and what differs then. Exit code 0: none; "
        "1: there is one; 2: it could not be found out",
    )
    parser.add_argument(
        "--blame", metavar="TABLE:ID", help="every change of a row: after which step, and by whose gradients"
    )
    parser.add_argument("--job", metavar="ID", help="the job, where the directory has several (default: the last one)")
    return parser
