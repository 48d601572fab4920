"""The tables of environment.md, from the package's own: ``python docs/variables.py`` writes them into the page.

What stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` is written anew; the prose around it is the page's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fleet.base import launcher_variables
from fleet.base.settings import (
    IDLE,
    CommunicatorSettings,
    ObservingSettings,
    ProcessSettings,
    SecuritySettings,
    Setting,
    rows,
)

PAGE = Path(__file__).parent / "environment.md"
TABLE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def of_settings(*tables: type) -> str:
    """A line for each field, in the order of the classes."""
    return _table(
        ("variable", "type", "default", "read by", "meaning"),
        (
            (_named(row), row.kind.word, row.default, row.readers, row.meaning)
            for table in tables
            for row in rows(table)
        ),
    )


def of_launchers(group: Sequence[launcher_variables.Row], whose: str) -> str:
    """A line for each of the rows; ``whose`` is what their second column tells."""
    return _table(
        ("variable", whose, "meaning"),
        ((re.sub(r"\b[A-Z][A-Z0-9_]+\b", r"`\g<0>`", row.names), row.whose, row.meaning) for row in group),
    )


def _named(row: Setting) -> str:
    return f"`{row.name}`" + (f", once `{row.formerly}`" if row.formerly else "")


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = f"|{'---|' * len(head)}"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


TABLES = {
    "cluster": of_launchers(launcher_variables.CLUSTER, "needed by"),
    "torchrun": of_launchers(launcher_variables.TORCHRUN, "set by"),
    "mpi": of_launchers(launcher_variables.MPI, "set by"),
    "slurm": of_launchers(launcher_variables.SLURM, "set by"),
    "job": of_settings(ProcessSettings, CommunicatorSettings),
    "figures": of_settings(ObservingSettings),
    "security": of_settings(SecuritySettings),
    "idle": _table(("variable", "why"), ((_named(row), row.meaning) for row in IDLE)),
}


def written(page: str) -> str:
    """The page with its tables as the package has them."""
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found['name']]}\n", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
