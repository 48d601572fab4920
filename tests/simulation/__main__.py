"""Runs seeds for so many minutes, or one seed as a story; the exit code is 0 if nothing was wrong."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from . import on_purpose
from .exploration import begin, explore
from .invariants import broken
from .job import run
from .scenario import Scenario, drawn
from .story import shrunk, told


def tell(scenario: Scenario, *, shorter: bool, heartbeats: bool) -> bool:
    """Print the story of a scenario; return whether something is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="fleet-simulation-") as folder:

        def wrong_with(each: Scenario) -> list[str]:
            return broken(run(each, Path(folder) / "job"))

        wrong = wrong_with(scenario)
        if wrong and shorter:
            scenario = shrunk(scenario, lambda each: bool(wrong_with(each)))
        outcome = run(scenario, Path(folder) / "job")
        wrong = broken(outcome)
        print(told(outcome, wrong, heartbeats=heartbeats))
        return bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to try one seed after the other")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--seed", type=int, help="tell the story of this one")
    parser.add_argument("--whole", action="store_true", help="tell it as it was, and not as short as it can be")
    parser.add_argument("--on-purpose", action="store_true", help="say after how many seeds each known fault is found")
    parser.add_argument("--most", type=int, default=10000, help="so many seeds are tried for each of these")
    parser.add_argument("--heartbeats", action="store_true", help="tell of these too")
    options = parser.parse_args()
    if options.seed is not None:
        begin()
        return tell(drawn(options.seed), shorter=not options.whole, heartbeats=options.heartbeats)
    if options.on_purpose:
        return on_purpose.tell_all(options.most, options.jobs)
    return bool(explore(options.first, options.minutes, options.jobs).wrong)


if __name__ == "__main__":
    # Sets of texts have another order in each process unless this says which; a seed is to be the same run everywhere.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
