"""The example of the flights in one mode after the other: jobs in a row, by processes that start once."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

sys.path.insert(0, str(EXAMPLES))
for mode in sys.argv[1:]:
    sys.argv = ["flight_delays.py", "--mode", mode]
    runpy.run_path(str(EXAMPLES / "flight_delays.py"), run_name="__main__")
