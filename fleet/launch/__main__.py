"""``python -m fleet.launch`` is ``fleetrun``."""

from __future__ import annotations

import sys

from fleet.launch.cli import fleetrun

if __name__ == "__main__":
    sys.exit(fleetrun())
