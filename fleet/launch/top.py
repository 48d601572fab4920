"""Runs ``fleet top``: shows a job as it runs, from anywhere its servers can be reached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from fleet.base.clock import SystemClock
from fleet.base.settings import PROCESS_ENVIRONMENT
from fleet.errors import ConfigurationError
from fleet.launch.live_view import is_possible
from fleet.launch.parser import Parser
from fleet.launch.sources import Source, source_of
from fleet.telemetry.live_table import plain, rich_tables, title
from fleet.telemetry.view import History, HotId, Row, TableRow, hot_ids, rows, table_rows

#: When nobody has answered for so long the job is taken to be over; a server may be started again meanwhile.
GONE_S = 10.0


def top(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog,
        description="Show a running job, one line a process: how far, how fast, how stale, and who waits for whom.",
        epilog=f"examples: {prog} 10.0.0.1:6170,10.0.0.2:6170    {prog} logs",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="HOST:PORT,...|LOGDIR", help="the job's servers, or what fleetrun logs into")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one table, of the first interval, and end")
    options = parser.parse_args(argv)
    if not 0.1 <= options.interval <= 3600:
        raise ConfigurationError("--interval is not usable", expected="0.1 to 3600", got=f"{options.interval:g}")
    source = source_of(options.target)
    try:
        _show(source, options.interval, options.once)
    except KeyboardInterrupt:  # the way to leave it
        pass
    finally:
        source.close()
    return 0


def _show(source: Source, interval_s: float, once: bool) -> None:
    clock, history = SystemClock(), History()
    history.add(source.look())
    silent_s = 0.0
    with _display(live=not once) as show:
        while silent_s < GONE_S:
            clock.sleep(interval_s)
            history.add(source.look())
            before, now = history.ends
            show(rows(before, now), table_rows(before, now), hot_ids(now))
            if once or now.is_over:
                break
            silent_s = 0.0 if now.is_heard else silent_s + interval_s
    if not once:
        print("The job is over." if now.is_over else f"Nobody has answered for {silent_s:.0f} s: the job is over.")


@contextlib.contextmanager
def _display(live: bool) -> Iterator[Callable[[list[Row], list[TableRow], list[HotId]], None]]:
    """Give a function that shows tables: over the one before on a terminal, else below it."""
    if not (live and is_possible(PROCESS_ENVIRONMENT) and find_spec("rich")):
        yield lambda shown, tables, hot: print(f"{title(shown)}\n{plain(shown, tables, hot)}\n", flush=True)
        return
    from rich.live import Live

    with Live(auto_refresh=False) as drawn:
        yield lambda shown, tables, hot: drawn.update(
            rich_tables(shown, tables, *drawn.console.size, hot), refresh=True
        )
