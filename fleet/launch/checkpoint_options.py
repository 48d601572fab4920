"""Reads the command line of ``fleet checkpoint``, without importing the torch that its work needs."""

from __future__ import annotations

import argparse
import sys

from fleet.errors import FleetError
from fleet.launch.parser import Parser

_MEMORY = (
    "memory for one table at a time, some 60 bytes a row, and for 16 M elements of parameters, or one parameter, with "
    "their state"
)
_EPILOG = """\
DIR is a directory, or a URL such as s3://bucket/run/step-00000120. Only import writes
checkpoints, and no job is needed.

examples:
  {prog} ls ckpt/                                the checkpoints in a directory, or what is in one
  {prog} verify ckpt/step-*                      every byte of each, and of what deltas go on from
  {prog} diff ckpt/step-00000100 ckpt/step-00000120
  {prog} export ckpt/step-00000120 model.safetensors
  {prog} export ckpt/step-00000120 dcp/ --format dcp --state
  {prog} import dcp/ ckpt/imported --format dcp
"""


def inspect(argv: list[str], prog: str) -> int:
    """Run the ``fleet checkpoint`` command, and return the exit code."""
    options = _parser(prog).parse_args(argv)
    from fleet.launch.checkpoint_command import carry_out

    try:
        return carry_out(options.command, options)
    except BrokenPipeError:
        raise
    except (FleetError, OSError) as error:  # not a mistake in the arguments, so no word of --help
        print(f"{prog} {options.command}: {error}", file=sys.stderr)
        return 2


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog,
        description="Look at checkpoints, and bring them to other programs and back.",
        epilog=_EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)

    def command(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=description, allow_abbrev=False)

    ls = command(
        "ls",
        "what is in a checkpoint, or which ones are in a directory",
        f"Tell what a checkpoint is and has; of a directory with checkpoints in it, which. Takes {_MEMORY}.",
    )
    ls.add_argument("dirs", metavar="DIR", nargs="+")
    ls.add_argument("--json", action="store_true", help="one JSON object a line, for programs")
    verified = command(
        "verify",
        "whether all of it is as it was written",
        "Read every file of a checkpoint, and of all that it goes on from, and tell everything that is wrong. "
        "Exit code 0: nothing; 1: something; 2: it could not be found out. Takes the memory of one file, some 16 MiB.",
    )
    verified.add_argument("dirs", metavar="DIR", nargs="+")
    diff = command(
        "diff",
        "how two differ",
        "Tell what is in one of two checkpoints only, and how far apart the rest is. Exit code 0: all of it is the "
        f"same, bit by bit; 1: it is not; 2: it could not be found out. Takes {_MEMORY}, of both; and in the temporary "
        "directory (TMPDIR) disk for one table of the first.",
    )
    diff.add_argument("left", metavar="A")
    diff.add_argument("right", metavar="B")
    exported = command(
        "export",
        "its contents as safetensors or Parquet",
        "Write parameters, and tables as ids and rows in the order of ids, to plain files. OUT.safetensors gets all of "
        "it (a table 'user.weight' as 'user.ids' and 'user.weight', which is what fleet.load_state_dict takes), "
        "OUT.parquet the rows of one table (columns id and weight), and a folder, OUT/, parameters.safetensors and a "
        f"Parquet file for each table. Parquet needs the extra torch-fleet[arrow]. Takes {_MEMORY}; Parquet also "
        "disk beside OUT for the rows of one table.",
    )
    exported.add_argument("dir", metavar="DIR")
    exported.add_argument("out", metavar="OUT")
    exported.add_argument(
        "--table", action="append", default=[], metavar="NAME", help="this table alone; may be repeated"
    )
    exported.add_argument("--state", action="store_true", help="the state of the optimizer as well")
    exported.add_argument("--force", action="store_true", help="replace files that are there")
    exported.add_argument(
        "--format",
        choices=("plain", "dcp"),
        default="plain",
        help="dcp: a directory OUT that torch.distributed.checkpoint loads (default: as OUT's name says)",
    )
    imported = command(
        "import",
        "a checkpoint made of one of torch.distributed.checkpoint's",
        "Write a checkpoint to OUT with what a directory of torch.distributed.checkpoint (DCP) has. One that `export "
        "--format dcp --state` wrote becomes what it was. Of others', tensors become parameters, and matrices tables "
        "where --table says so, or where ids stand beside them (user.ids beside user.weight); the optimizer's state "
        "begins anew. Takes memory for one parameter, or one chunk of a table.",
    )
    imported.add_argument("source", metavar="DIR")
    imported.add_argument("out", metavar="OUT")
    imported.add_argument("--format", choices=("dcp",), required=True, help="what DIR is")
    imported.add_argument(
        "--optimizer", default="", metavar="CLASS", help="the optimizer's class in the job that goes on from it"
    )
    imported.add_argument(
        "--prefix", default="", metavar="TEXT", help="what the names begin with that are taken, as model. (and lose)"
    )
    imported.add_argument(
        "--table", action="append", default=[], metavar="NAME", help="this is a table; may be repeated"
    )
    imported.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="leave such names out, as *running_*"
    )
    return parser
