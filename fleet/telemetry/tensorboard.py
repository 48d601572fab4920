"""Writes a process's figures as scalars of TensorBoard, over the steps of a worker or the versions of a server.

A figure that counts is shown as its growth in a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.errors import ConfigurationError, UnsupportedError
from fleet.telemetry.figures import OF_KIND, Figures, rate

#: They say when the others were read.
_CLOCKS = ("uptime_seconds", "step", "version")


class Scalars:
    def __init__(self, directory: str, process: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UnsupportedError(
                "FLEET_TENSORBOARD_DIR is set and TensorBoard is not installed",
                got=f"FLEET_TENSORBOARD_DIR={directory}",
                todo="pip install 'torch-fleet[tensorboard]', or unset the variable.",
            ) from None
        try:
            self._writer = SummaryWriter(str(Path(directory) / process.replace(" ", ".")))
        except OSError as error:
            raise ConfigurationError(
                "FLEET_TENSORBOARD_DIR cannot be written to",
                where=directory,
                got=str(error),
                todo="Name a directory in which this process may make files, or unset the variable.",
            ) from None
        self._before: Figures | None = None

    def write(self, at: float, kind: str, told: Mapping[str, Any], _is_last: bool = False) -> None:
        figures: Figures = told if kind == "worker" else told["figures"]
        step = int(figures["step" if kind == "worker" else "version"])
        for name, value in scalars(kind, self._before, figures).items():
            self._writer.add_scalar(f"fleet/{name}", value, step, at)
        self._writer.flush()
        self._before = figures

    def close(self) -> None:
        self._writer.close()


def scalars(kind: str, before: Figures | None, now: Figures) -> dict[str, float]:
    """Return what TensorBoard shows of two readings, by its name there."""
    known = OF_KIND[kind]
    shown = {name: value for name, value in now.items() if not (name in known and known[name].counts)}
    grown = {f"{name}_per_second": rate(name, before, now) for name in now if name in known and known[name].counts}
    return {
        **{name: value for name, value in shown.items() if name not in _CLOCKS},
        **{name: value for name, value in grown.items() if value is not None and name != "uptime_seconds_per_second"},
    }
