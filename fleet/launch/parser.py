"""Parses the commands, with errors in the form of Fleet's own."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fleet.errors import ConfigurationError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)
