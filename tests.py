"""Makes a package of the folder beside it, for ``python -m tests.simulation``: others have packages of this name, which
would be found first. To pytest that folder is none, so that its files import each other by their names alone.
"""

from pathlib import Path

__path__ = [str(Path(__file__).with_suffix(""))]
