"""Reserves the folder of logs and that of records for one job: another one would overwrite them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleet.base.file_lock import locked
from fleet.base.system_errors import reason
from fleet.errors import ConfigurationError

#: It stays when the job is over: who removes a file that others may have open locks nobody out. Not the folder itself
#: is locked, as scripts may save a checkpoint there, which locks it.
_NAME = "fleetrun.lock"


@contextlib.contextmanager
def alone_in(folders: Mapping[Path, str]) -> Iterator[None]:
    """Keep other jobs out of these folders, each of which comes with the option or variable that chooses it."""
    with contextlib.ExitStack() as held:
        for folder, chosen_by in folders.items():
            held.callback(os.close, _taken(folder, chosen_by))
        yield


def _taken(folder: Path, chosen_by: str) -> int:
    try:
        descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigurationError(
            "this file cannot be written",
            where=str(folder / _NAME),
            got=reason(error),
            todo=f"Another user's job may have made it: give this job another folder with {chosen_by}.",
        ) from None
    if locked(descriptor) is False:
        holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
        os.close(descriptor)
        process = f" (process {holder})" if holder.isdigit() else ""
        raise ConfigurationError(
            f"another fleetrun{process} has its job write here",
            where=str(folder),
            todo=f"Give this job another folder with {chosen_by}, or wait until the other one is over.",
        )
    with contextlib.suppress(OSError):  # it says who holds the folder, which a job on a full disk does without
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % os.getpid())
    return descriptor
