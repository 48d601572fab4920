"""What CONTRIBUTING.md says of commits, where there is a history to look at."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: The last commit before the rule.
BEFORE = "e6a939007c811dce808793c48584ad65db440649"
LONGEST = 72


def test_the_first_line_of_a_commit_is_short() -> None:
    try:
        log = subprocess.run(
            ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%h %s", f"{BEFORE}..HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("there is no git, or no history that goes back so far")
    subjects = dict(line.split(" ", 1) for line in log.stdout.splitlines())
    assert {commit: subject for commit, subject in subjects.items() if len(subject) > LONGEST} == {}
