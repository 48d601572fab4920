"""The parser of the commands: its errors are told as ours are."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fleet.errors import ConfigurationError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)
