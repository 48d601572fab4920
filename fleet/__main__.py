"""``python -m fleet`` is the ``fleet`` command."""

import sys

from fleet.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
