"""Runs ``fleet report``: writes a finished run, or one as far as it has come, as one HTML page."""

from __future__ import annotations

import os
from pathlib import Path

from fleet.errors import ConfigurationError
from fleet.launch.parser import Parser
from fleet.launch.sources import Recorded
from fleet.telemetry.html_report import page
from fleet.telemetry.record import read_records
from fleet.telemetry.story import story_of


def report(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog,
        description="Draw a run: speed, loss, staleness, waits, bytes over time, who waited for whom, what happened.",
        epilog=f"example: {prog} logs",
        allow_abbrev=False,
    )
    parser.add_argument("logdir", metavar="LOGDIR", help="what fleetrun logs into (--log_dir)")
    parser.add_argument("--output", metavar="FILE", help="the page (default: report.html in LOGDIR)")
    options = parser.parse_args(argv)
    directory = Path(options.logdir)
    lines = read_records(directory) if os.path.isdir(directory) else []  # False, and no error, of too long a name
    if not any(line.kind in ("worker", "server") for line in lines):
        raise ConfigurationError(
            "no job has left a record here",
            where=str(directory),
            todo="Give the directory that fleetrun logs into, or that FLEET_RECORD_DIR names.",
        )
    output = directory / "report.html" if options.output is None else Path(options.output)
    text = page(story_of(lines, Recorded(directory).ending()), directory.resolve().name)
    try:
        output.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigurationError(
            "the report cannot be written",
            where=str(output),
            got=error.strerror,
            todo="Name a file in a directory that is there with --output FILE.",
        ) from None
    print(output)
    return 0
