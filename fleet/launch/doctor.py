"""Runs ``fleet doctor``, which says in sentences what holds a job back."""

from __future__ import annotations

import textwrap

from fleet.base.clock import SystemClock
from fleet.errors import ConfigurationError
from fleet.launch.parser import Parser
from fleet.launch.sources import source_of
from fleet.telemetry.diagnosis import diagnose

_WIDTH = 100


def doctor(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog,
        description="Say what holds a job back, in sentences with numbers: a running one, or one that is over.",
        epilog=f"examples: {prog} 10.0.0.1:6170,10.0.0.2:6170    {prog} logs",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="HOST:PORT,...|LOGDIR", help="the job's servers, or what fleetrun logs into")
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="SECONDS", help="how long to look at one that runs (default: 5)"
    )
    options = parser.parse_args(argv)
    if not 1 <= options.seconds <= 3600:
        raise ConfigurationError("--seconds is not usable", expected="1 to 3600", got=f"{options.seconds:g}")
    source = source_of(options.target)
    try:
        whole = source.whole()
        if whole is not None:
            sentences = diagnose(*whole, source.ending())
        else:
            before = source.look()
            SystemClock().sleep(options.seconds)
            sentences = diagnose(before, source.look())
    finally:
        source.close()
    for sentence in sentences:
        print(textwrap.fill(sentence, _WIDTH, subsequent_indent="  "))
    return 0
