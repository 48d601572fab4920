"""For every test: torch on one thread, and nothing left running afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import logging
import math
import os
import re
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from prepared import Prepared

#: Threads and processes that were told to end get this long to do so.
GRACE_S = 5.0


# Until all tests are there, what is made stays: to look for garbage among it takes a fifth of the time.
gc.disable()
# A shell that starts something in the background has it ignore Ctrl-C, and whatever that starts does so too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Workers of one machine would ask for a device each, and few machines have so many: all but the tests for devices
    train on the CPU, and so do the processes that they start."""
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Lightning takes seconds to import, which only those who run its tests should wait for."""
    return ("not libraries" in config.getoption("markexpr") and collection_path.name == "test_lightning.py") or None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every case of the matrices that are marked `pairs`")
    parser.addoption(
        "--part", type=_part, default=(1, 1), metavar="K/N", help="of slow and chaos tests the K-th of N parts"
    )


def _part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError("K is from 1 to N")
    return number, parts


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a matrix that is marked so, the default run has as many cases as its longest side, with each value of every
    side among them, or so many of these as the mark says. Slow ones are as many others as it takes that each value is
    together with each value of every other side; what the rest would show differs little from that. Of all slow
    and chaos tests a run may have one part of several."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairs"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: list[pytest.Item] = []
    for matrix in matrices.values():
        places = {item: [_place(item, *mark.args) for mark in item.iter_markers("parametrize")] for item in matrix}
        (mark,) = matrix[0].iter_markers("pairs")
        fast = [item for item in matrix if _is_on_the_diagonal(places[item], *mark.args)]
        slow = [item for item in matrix if item not in fast]
        for item in slow:
            item.add_marker("slow")
        sizes = [size for _, size in places[matrix[0]]]
        is_complete = len(matrix) == math.prod(sizes)  # or somebody has chosen of it
        if is_complete and len(sizes) > 2 and not config.getoption("whole"):
            left += _beyond_pairs({item: [at for at, _ in places[item]] for item in [*fast, *slow]}, len(fast))
    number, parts = config.getoption("part")
    for item in items:
        # Which part a test is in does not depend on what else is collected.
        is_long = any(map(item.get_closest_marker, ("slow", "chaos")))
        if is_long and zlib.crc32(item.nodeid.encode()) % parts != number - 1:
            left.append(item)
    if left:
        without = set(left)
        items[:] = [item for item in items if item not in without]
        config.hook.pytest_deselected(items=left)


def _beyond_pairs(cases: dict[pytest.Item, list[int]], fast: int) -> list[pytest.Item]:
    """The cases that add no pair of values of two sides to the first ones, which there are, and the best others."""
    pairs = {item: set(itertools.combinations(enumerate(places), 2)) for item, places in cases.items()}
    lacking = set[Any]().union(*pairs.values()).difference(*[pairs[item] for item in [*cases][:fast]])
    others = [*cases][fast:]
    while lacking:
        best = max(others, key=lambda item: len(pairs[item] & lacking))
        others.remove(best)
        lacking -= pairs[best]
    return others


def _is_on_the_diagonal(sides: Sequence[tuple[int, int]], most: int | None = None) -> bool:
    longest = max(size for _, size in sides)
    count = min(most or longest, longest)
    steps = [number * longest // count for number in range(count)]
    return any(all(at == step % size for at, size in sides) for step in steps)


def _place(item: pytest.Item, names: str | Sequence[str], values: Iterable[Any]) -> tuple[int, int]:
    """Where a case stands on one side of its matrix, and how long that is."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    rows = [value.values if isinstance(value, _PARAM) else value if len(names) > 1 else (value,) for value in values]
    given = [item.callspec.params[name] for name in names]  # type: ignore[attr-defined]
    at = next(at for at, row in enumerate(rows) if all(a is b or a == b for a, b in zip(row, given, strict=True)))
    return at, len(rows)


_PARAM = type(pytest.param())


def pytest_collection_finish() -> None:
    """Have the collector of garbage leave alone what is there for good, a million objects of torch's and the tests."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # it is looked for less often: there is memory, and nothing keeps on for long
    gc.enable()
    # To each logger that keeps to itself pytest gives its handlers six times a test, and torch has sixty such loggers.
    # Where one has a handler, all that torch's compiler does is written down.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and not logger.propagate:
            logger.disabled = logger.propagate = True
            logger.handlers.clear()


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Tests run whole jobs as threads of one process, and each would otherwise ask for every core."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """A test leaves no thread of ours, none that would keep the interpreter alive, and no process.

    Daemon threads of others are let be: gRPC, for one, keeps some for good. Whatever a fixture of a wider scope has
    started was there before and is not the test's.
    """
    threads_before = set(threading.enumerate())
    processes_before = _descendants()
    yield

    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in threads_before and (_is_ours(t) or not t.daemon)]

    def processes() -> list[psutil.Process]:
        return [process for process in _descendants() - processes_before if _counts(process)]

    # Who ends is no longer known by its command line, and is not dead yet: what is blamed was there at the last look,
    # and is not looked for again.
    deadline = time.monotonic() + GRACE_S
    while (looked := (threads(), processes())) != ([], []) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [f"thread {thread.name}" for thread in looked[0]]
    for process in looked[1]:
        try:
            left.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()  # or it would be in the way of all tests to come
        except psutil.NoSuchProcess:
            continue
    if left:
        pytest.fail(f"left running {GRACE_S:g} s after the test: " + "; ".join(left))


def _descendants() -> set[psutil.Process]:
    """All processes below this one. Most tests have none, which is known without a look at the whole machine."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return set()
    return set(psutil.Process().children(recursive=True))


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("fleet")


def _counts(process: psutil.Process) -> bool:
    """Dead ones that nobody collected do not, nor does multiprocessing's helper, which is there once and for all, nor
    Ray's, which come and go as Ray likes: test_ray.py looks for its actors itself."""
    try:
        words = process.cmdline()
        is_helper = any("multiprocessing" in word and "tracker" in word for word in words)
        is_rays = any(word.startswith("ray::") or "/site-packages/ray/" in word for word in words)
        return process.status() != psutil.STATUS_ZOMBIE and not is_helper and not is_rays
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AbstractContextManager[Path]]:
    """Hands out a folder by its name, the same one in all the processes that the tests are spread over, and to one at a
    time: what takes long is found there by whoever comes second."""
    mine = tmp_path_factory.getbasetemp()
    common = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine

    @contextlib.contextmanager
    def hold(name: str) -> Iterator[Path]:
        folder = common / name
        folder.mkdir(exist_ok=True)
        with (common / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder

    return hold


@pytest.fixture(scope="session")
def prepared(shared: Callable[[str], AbstractContextManager[Path]]) -> Iterator[Prepared]:
    """Starts scripts in Python processes that have imported torch and Fleet already."""
    with shared("prepared") as folder:
        made = Prepared(folder)
    yield made
    made.close()


@pytest.fixture
def free_endpoints() -> Callable[[int], list[str]]:
    """Makes endpoints nobody listens at: ports the system gives, all held until all are chosen."""

    def choose(count: int) -> list[str]:
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(count)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]

    return choose
