"""Variables that are set and have no effect: what is said of them, once a process."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from fleet.base.launcher_variables import CLUSTER, OF_PADDLE, SLURM, names
from fleet.base.settings import IDLE, SETTINGS
from fleet.base.spelling import misspelt, nearest

_log = logging.getLogger("fleet")

#: What role makers read of the source system's variables.
ROLE_VARIABLES = {name for name in names(CLUSTER) if name.startswith("PADDLE_")}
#: The settings, and the variables that our role makers need from a job's launcher.
KNOWN = set(SETTINGS) | {name for name in names(SLURM) if name.startswith("FLEET_")}

_IDLE = {row.name for row in IDLE}
#: How Kubernetes tells every pod of a service; one may be called paddle.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")

#: What this process has been told of already.
_remarked: set[str] = set()


def remarks(environ: Mapping[str, str]) -> list[str]:
    """Return what there is to say about variables that are set and have no effect: misspelt ones, and those with
    nothing to act on."""
    said = []
    for name in sorted(environ):
        if name in _IDLE:
            said.append(f"the environment variable {name} has nothing to act on here (docs/environment.md says why)")
        elif name.startswith(("FLEET_", "FLAGS_rpc_", "FLAGS_communicator_")) and name not in KNOWN:
            said.append(_unknown(name, nearest(name, KNOWN)))
        elif name == "FLEET_TABLE_DIR" and not environ.get("FLEET_TABLE_MEMORY_MB", "").strip():
            said.append(f"the environment variable {name} has no effect without FLEET_TABLE_MEMORY_MB")
        elif not name.startswith("PADDLE_") and not _is_service_link(name, environ[name]):
            meant = misspelt(name, KNOWN | ROLE_VARIABLES)
            said += [] if meant is None else [_unknown(name, meant)]
    of_paddle = {name: meant for name, meant in names_of_paddle(environ).items() if meant != name}
    # What would be another of Paddle's own is none of our business.
    return said + [_unknown(name, meant) for name, meant in of_paddle.items() if meant in ROLE_VARIABLES]


def names_of_paddle(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are Paddle's or nearly so, and what each probably means."""
    found = {
        name: nearest(name, ROLE_VARIABLES | OF_PADDLE)
        for name in sorted(environ)
        if name.startswith("PADDLE_") and not _is_service_link(name, environ[name])
    }
    return {name: meant for name, meant in found.items() if meant is not None}


def remark(environ: Mapping[str, str]) -> None:
    """Log the remarks, each once. A launcher has made them for all processes that it started."""
    if environ.get("FLEET_LAUNCHER", "").strip():
        return
    for said in remarks(environ):
        if said not in _remarked:
            _remarked.add(said)
            _log.warning("%s", said)


def _is_service_link(name: str, value: str) -> bool:
    """Say whether this is one of the variables that Kubernetes gives every pod for each service."""
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and "://" in value)


def _unknown(name: str, meant: str | None) -> str:
    """Return ``meant`` under its present name."""
    now = None if meant is None else SETTINGS[meant].name if meant in SETTINGS else meant
    hint = "" if now is None else f"; did you mean {now}?"
    return f"the environment variable {name} is not known here and has no effect{hint}"
