"""docs/errors.md has every error that a user can meet: each class, and what each place that raises one says."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from fleet import errors

ROOT = Path(__file__).parent.parent
PAGE = " ".join((ROOT / "docs" / "errors.md").read_text().split())
CLASSES = {kind.__name__ for _, kind in inspect.getmembers(errors, inspect.isclass)}

#: The page tells these together: what is wrong with an argument's type, and with a peer that is of another version.
TOGETHER = {"ArgumentTypeError", "ProtocolError"}


def headlines() -> Iterator[tuple[str, str, str]]:
    """For every error that is made: where, its class, and the longest constant part of what it says."""
    for path in sorted((ROOT / "fleet").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
                said = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                longest = max((part for part in said if isinstance(part, str)), key=len, default="")
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.func.id, " ".join(longest.split()).strip(":")


def test_every_class_is_in_the_table() -> None:
    assert [name for name in CLASSES - {"FleetError"} if f"| `{name}` |" not in PAGE] == []


def test_every_message_is_on_the_page() -> None:
    told = [(place, text) for place, kind, text in headlines() if kind not in TOGETHER]
    assert len(told) > 200, "they were found"
    assert [f"{place}: {text}" for place, text in told if text not in PAGE] == []
