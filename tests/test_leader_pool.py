"""Leader pools: threads wait for work in turn; the leader does what comes, and is replaced when it is held up."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Iterator

import pytest
from harness import until
from patience import PATIENCE_S

from fleet.ps.wire import leader_pool as module
from fleet.ps.wire.leader_pool import SPARE, LeaderPool, Work


class Job:
    """A leader pool, and the work it is given."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._releases: list[threading.Event] = []
        self.pool = LeaderPool("pool-test", self.next)

    def next(self) -> Work | None:
        return self._given.get()

    def give(self, work: Work) -> None:
        self._given.put(work)

    def name(self) -> str:
        """Of the thread that does the next piece of work."""
        told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.give(lambda: told.put(threading.current_thread().name))
        return told.get(timeout=PATIENCE_S)

    def stick(self) -> threading.Event:
        """Give a piece of work that gets stuck until this is set."""
        stuck, release = threading.Event(), threading.Event()
        self._releases.append(release)

        def work() -> None:
            stuck.set()
            release.wait(PATIENCE_S)

        self.give(work)
        assert stuck.wait(PATIENCE_S)
        return release

    def threads(self) -> int:
        return sum(thread.name.startswith("pool-test") for thread in threading.enumerate())

    def end(self) -> None:
        for release in self._releases:
            release.set()
        self.pool.dismiss()
        self._given.put(None)
        self.pool.join(PATIENCE_S)
        assert not self.threads()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.end()


@pytest.fixture
def slow_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE_S", "HURRY_S"):
        monkeypatch.setattr(module, name, 10 * PATIENCE_S)


@pytest.mark.usefixtures("slow_to_notice")
def test_one_thread_does_all(job: Job) -> None:
    assert len({job.name() for _ in range(100)}) == 1


def test_work_that_gets_stuck_holds_up_nothing(job: Job) -> None:
    releases = [job.stick() for _ in range(20)]
    name = job.name()
    for release in releases:
        release.set()
    until(lambda: job.threads() <= SPARE + 1)
    assert name.startswith("pool-test")
    job.name()


def test_it_is_noticed_after_a_long_quiet(job: Job) -> None:
    until(lambda: job.pool._asleep)
    job.stick()
    job.name()


@pytest.mark.usefixtures("slow_to_notice")
def test_another_takes_over_at_once_where_it_is_asked_to(job: Job) -> None:
    assert not job.pool.relieve()  # there is nothing to take over from
    job.stick()
    assert job.pool.relieve()
    job.name()


@pytest.mark.usefixtures("slow_to_notice")
def test_who_is_done_before_another_came_goes_on(job: Job) -> None:
    def work() -> None:
        assert job.pool.relieve()

    for _ in range(100):
        job.give(work)
    job.name()
    assert job.threads() <= SPARE + 1


def test_work_that_fails_is_told_and_ends_nothing(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise ValueError("a mistake")

    job.give(work)
    job.name()
    (told,) = caplog.records
    assert told.levelno == logging.ERROR
    assert told.exc_info is not None
    assert "a mistake" in str(told.exc_info[1])


def test_not_to_know_what_to_do_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    told = iter([MemoryError("none left"), OSError("nor here")])

    class Failing(Job):
        def next(self) -> Work | None:
            for error in told:
                raise error
            return super().next()

    job = Failing()
    job.name()
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [MemoryError, OSError]
    job.end()


def test_a_pool_that_begins_without_a_second_thread_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    start, attempts = threading.Thread.start, itertools.count()

    def scarce(thread: threading.Thread) -> None:
        if 0 < next(attempts) < 2 * module._QUIET_LOOKS:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", scarce)
        patch.setattr(module, "PATIENCE_S", 0.001)
        job = Job()
        job.name()
    job.end()


def test_without_another_thread_work_waits(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    job.name()
    until(lambda: job.threads() == 2)
    done = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        release = job.stick()
        job.give(done.set)
        until(lambda: bool(caplog.records))
        assert not done.wait(10 * module.PATIENCE_S)  # who watches does not leave its post
        release.set()
        assert done.wait(PATIENCE_S)
    (told,) = caplog.records
    assert "can't start new thread" in told.getMessage()
    job.stick()
    job.name()
