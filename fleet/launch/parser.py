"""Parses the commands, with errors in the form of Fleet's own."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

from fleet.errors import ConfigurationError

#: The names of what this process has open, and no other.
_OWN_INPUT = re.compile(r"/dev/stdin$|/dev/fd/|/proc/self/fd/")


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an empty word, which a shell makes of a variable that is not set: as a path it would be the working
        directory, as a name it would be none."""
        before = ""
        for word in args or ():
            name, equals, value = word.partition("=")
            if not word or (equals and not value and name.startswith("--")):
                where = name or before
                raise ConfigurationError(
                    "an argument is empty",
                    where=where if where.startswith("--") else None,
                    todo="Is it a variable that is not set?",
                )
            before = word
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def python_arguments(command: Sequence[str], *, as_module: bool) -> list[str]:
    """Return the arguments for Python, once it is certain that there is something to run."""
    if not command:
        raise ConfigurationError("no script given", todo="Name it after the options.")
    script = command[0]
    if as_module:
        if PathFinder.find_spec(script.partition(".")[0], [os.getcwd(), *sys.path]) is None:
            raise ConfigurationError(f"there is no module {script}")
        return ["-m", *command]
    if _OWN_INPUT.match(script):  # whose processes have another one, so that they would run nothing
        raise ConfigurationError(
            f"the script {script} can be read by one process only", todo="Save it in a file, which every process reads."
        )
    path = Path(script)
    if not os.path.exists(path):  # which is False, and no error, of a name too long for a file's
        raise ConfigurationError(f"there is no script {script}", todo="For a module put -m before its name.")
    if path.is_dir() and not os.path.isfile(path / "__main__.py"):
        raise ConfigurationError(f"{script} is a directory without a __main__.py")
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"the script {script} cannot be read", todo="Check its permissions.")
    # Python would take a name with a leading dash for one of its options.
    return [script if not script.startswith("-") else f"./{script}", *command[1:]]
