"""Whole jobs on a simulated network, disk, clock and scheduler: what they have found, and a few seeds more."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from simulation import on_purpose
from simulation.invariants import broken
from simulation.job import Simulation, run
from simulation.scenario import (
    ALL_REDUCE,
    AVERAGING,
    CLOCK,
    CUT,
    CUT_IN,
    ELASTIC,
    KILL,
    LOST,
    MODES,
    PAUSE,
    POWER,
    ROWS,
    TWICE,
    UNANSWERED,
    Fault,
    Scenario,
    Setting,
    drawn,
)
from simulation.scheduler import Process, Scheduler, Thread
from simulation.story import shrunk, told
from simulation.threads import Condition, Event, Lock, installed

from fleet.ps.table.row_file import Reading, RowFile
from fleet.ps.table.tiered_store import TieredStore
from fleet.telemetry.cause import Cause


@pytest.fixture(scope="module", autouse=True)
def _no_garbage() -> Iterator[None]:
    """What simulated processes leave is collected here, and not in the midst of another test."""
    yield
    gc.collect()


def wrong_with(scenario: Scenario, folder: Path) -> str:
    """The story of a run in which something is wrong; nothing if nothing is."""
    outcome = run(scenario, folder / "job")
    wrong = broken(outcome)
    return told(outcome, wrong) if wrong else ""


# ---------------------------------------------------------------- what it has found


MOVES_TO_TWO = Setting(
    "async", 3, 1, 14, "Adagrad", durable="os", journal_bytes=1 << 28, sync_s=0.1, moves_at=7, moves_to=2
)

FOUND = {
    # One server had let the job go to others and one had not, as a worker called shrink(): it ended the job.
    "a call that is made once for all meets servers that the job has left": Scenario(
        382,
        Setting("async", 2, 2, 10, "Adam", "interval", 2000, 0.0, moves_at=1, moves_to=3, life="count"),
        (Fault(231, KILL, "worker0", 0.04),),
    ),
    # A worker that was further in the checkpoint was through and in a barrier, and the other one could not take its
    # last steps: their clocks began alike.
    "a job of workers that are apart goes on": Scenario(
        9201161,
        Setting("ssp", 2, 1, 5, "SGD", "os", 10000, 0.1, checkpoint_every=2, keeps=True, goes_on=True),
        (),
    ),
    # A checkpoint was written, a server forgot so when it lost power, and those that the job moved to did not know
    # that it had been started again: for them the checkpoint was still being written, and nobody could write another.
    "a server that loses power as the job moves": Scenario(
        3500544,
        Setting(
            "sync", 2, 1, 8, "Adagrad", durable="os", journal_bytes=2000, checkpoint_every=2, moves_at=2, moves_to=3
        ),
        (Fault(117, POWER, "server0", 0.1),),
    ),
    # The thread that wrote a checkpoint met servers that the job had left, and ended it: nobody went over for that.
    "a checkpoint that is being written when the job moves": Scenario(
        3400640,
        Setting("auto", 3, 1, 9, durable="os", checkpoint_every=5, moves_at=8, moves_to=3, rows_in_memory=16),
        (Fault(77, ROWS, "server0"), Fault(166, CUT, "server0", 1.2)),
    ),
    # The answer to a meeting came to two workers, and the server had forgotten it when the third one asked again: those
    # waited for it in their group, and it for them in the next meeting, until the deadline.
    "a server that is killed as a meeting ends": Scenario(
        231973,
        Setting(workers=3, servers=1, steps=1, optimizer="Adam", durable="interval", sync_s=0.1, dense=ALL_REDUCE),
        (Fault(37, KILL, "server0", 0.07),),
    ),
    # A round that was done over was over elsewhere only when it was done over again, and its averages were used.
    "a round that breaks twice": Scenario(
        113985,
        Setting("sync", 2, 3, 9, durable="os", journal_bytes=2000, checkpoint_every=2, dense=ALL_REDUCE),
        (Fault(255, TWICE), Fault(276, LOST), Fault(290, KILL, "worker0", 0.1)),
    ),
    # A worker that had read the first values, and waited for the others, went over to other servers as if it had not.
    "a worker that meets the others on other servers": Scenario(
        225419,
        Setting("ssp", 3, 2, 6, checkpoint_every=2, moves_at=2, moves_to=3, dense=ALL_REDUCE),
        (Fault(183, KILL, "worker2", 0.06), Fault(219, PAUSE, "server0", 3.87)),
    ),
    # Workers that average met without one that had been killed, and waited for another that had been meanwhile: for as
    # long as the deadline once more, as torch connects all without a look at whether they can still come.
    "a worker that is lost between a meeting and a group": Scenario(
        200858,
        Setting(workers=3, servers=1, steps=29, durable="always", dense=ALL_REDUCE),
        (Fault(769, KILL, "worker1", 0.06), Fault(885, KILL, "worker2", 0.07)),
    ),
    # That rows were lost was told to the thread alone that saved a checkpoint, and the server went. Nobody else heard.
    "a job that ends when a checkpoint is saved": Scenario(
        1,
        Setting(workers=1, servers=1, steps=20, checkpoint_every=2, rows_in_memory=4),
        (Fault(60, ROWS, "server0"), Fault(67, ROWS, "server0"), Fault(74, ROWS, "server0")),
    ),
    # Servers told a follower of an elastic job that it has no workers, which the follower took for impossible.
    "a model that follows a job that workers may join": Scenario(
        3020052, Setting("gba", 2, 2, 4, follower=True, joins=1, joins_at=1)
    ),
    # A push had not come to the second server. Its worker waited for the first one, which stood still until the second
    # had that push: for as long as the deadline, as nobody looked at the broken line.
    "a line that broke while its worker waited for another server": Scenario(
        3004851,
        Setting("ssp", 2, 2, 7, "SGD", durable="always", sync_s=0.01, moves_at=4, moves_to=3),
        (Fault(39, TWICE), Fault(52, LOST), Fault(94, LOST), Fault(124, TWICE), Fault(172, LOST)),
        preemption=0.1,
    ),
    # The first server had lost that a checkpoint was done, and its writer waited for itself before the next one.
    "a checkpoint whose end was lost, before the next one": Scenario(
        3002079,
        Setting("sync", 3, 2, 24, "SGD", durable="os", journal_bytes=2000, sync_s=0.0, checkpoint_every=2),
        (Fault(753, POWER, "server0", 0.09),),
        preemption=0.1,
    ),
    # A server waited for the push of a worker that was killed, whose next process waited for the end of the move.
    "a worker that starts again amid a move": Scenario(
        2000697,
        Setting("async", 3, 3, 10, moves_at=9, moves_to=2),
        (Fault(19, TWICE), Fault(117, LOST), Fault(183, KILL, "worker2", 0.06)),
    ),
    # A server had lost steps with the power, and the job moved before all of its workers had asked for anything.
    "steps that were lost before the job moved": Scenario(
        1000914,
        MOVES_TO_TWO,
        (Fault(165, POWER, "server0", 0.4),),
    ),
    # The first server had kept that a worker saves a checkpoint, and not that it was done: others had to wait for it.
    "the end of a checkpoint was not kept": Scenario(
        1100340,
        Setting(
            "async", 2, 3, 10, "Adagrad", durable="interval", checkpoint_every=2, sync_s=0.1, moves_at=9, moves_to=1
        ),
        (
            Fault(55, TWICE),
            Fault(73, CUT, "server2", 5.31),
            Fault(125, CUT_IN, "worker0", 0.08),
            Fault(217, LOST),
            Fault(238, LOST),
            Fault(273, POWER, "server0", 0.06),
        ),
    ),
    # A server had lost the initial values. Who had brought them waited at the other one, for who waited at this one.
    "initial values that were lost, and nobody asked for": Scenario(
        1,
        Setting("sync", 2, 2, 4, durable="os", sync_s=0.01),
        (Fault(20, PAUSE, "worker1", 4.0), Fault(50, POWER, "server1", 0.8)),
    ),
    # They were lost by the first server, and a worker that had taken all of its steps asked for something else.
    "initial values that were lost, and only needed at the end": Scenario(
        100356,
        Setting("half_async", 3, 3, 20, "SGD", durable="os", sync_s=0.1),
        (Fault(602, POWER, "server0", 0.66), Fault(632, KILL, "worker2", 3.79)),
    ),
    # Of three servers one had the push of a worker that was killed, and another one had lost more than that.
    "steps that were lost, and one that was sent to some": Scenario(
        100327,
        Setting("async", 2, 3, 12, durable="interval", sync_s=0),
        (Fault(288, POWER, "server1", 0.8), Fault(291, KILL, "worker1", 2.1)),
    ),
    # The first server had lost a push that the other one had made an update of, and its worker took the step again.
    "a push that was lost by the server that says what becomes of it": Scenario(
        500562,
        Setting("gba", 2, 2, 12, "SGD", durable="interval", journal_bytes=2000, sync_s=0),
        (Fault(151, POWER, "server0", 1.39), Fault(169, KILL, "worker1", 3.64), Fault(209, KILL, "worker0", 3.38)),
    ),
    # The first server had lost what it was to take over, and stood still, when others had gone over.
    "a server that had lost a move that was made": Scenario(
        1000914,
        MOVES_TO_TWO,
        (Fault(305, POWER, "server0", 0.4),),
    ),
    # A server had lost its last step with the power, and who had that waited for the others. The next process of a
    # worker took the step again, and waited at this server for those, whose workers sent it nothing.
    "a step that was lost, and nobody asked for": Scenario(
        996192,
        Setting("sync", 3, 3, 12, durable="os", journal_bytes=2000, sync_s=0.1),
        (Fault(376, POWER, "server2", 0.82), Fault(406, KILL, "worker1", 1.0)),
    ),
    # One of two servers had the push of a worker that was killed. The job was to move, and waited for the push; the
    # next process was let in after the move.
    "a worker that was killed between two servers when the job was to move": Scenario(
        970633,
        Setting("gba", 2, 2, 20, checkpoint_every=2, moves_at=18, moves_to=3),
        (
            *(Fault(85, UNANSWERED), Fault(109, TWICE), Fault(186, LOST), Fault(219, CUT_IN, "server0", 4.98)),
            *(Fault(256, LOST), Fault(338, KILL, "worker1", 3.7)),
        ),
        preemption=0.1,
    ),
    # The request of a worker to do something for all came twice, and only the second was answered.
    "a request that came twice, and waited": Scenario(
        900175,
        Setting("async", 1, 2, 6, durable="always", sync_s=0.1, checkpoint_every=2, moves_at=3, moves_to=1),
        (Fault(41, PAUSE, "server0", 5.88), Fault(72, TWICE), Fault(97, TWICE)),
    ),
    # The answer was lost to a worker that had written a checkpoint, and the job moved before it said so again.
    "a job that moved when a checkpoint was done": Scenario(
        900623,
        Setting("half_async", 3, 2, 8, checkpoint_every=2, moves_at=7, moves_to=1),
        (Fault(103, UNANSWERED),),
    ),
    # A GEO worker was killed when one of two servers had its push. The next process sent another one for that: a server
    # that had the first took no notice, and the worker believed that it had.
    "a worker that was killed between two servers": Scenario(
        4292,
        Setting("geo", 3, 2, 23, durable="always", journal_bytes=10000, sync_s=0.01, follower=True),
        (Fault(308, LOST), Fault(333, KILL, "worker1", 0.1)),
        preemption=0.01,
    ),
    # The folder of a server's state was there, and its name was not on the disk: power that failed took all with it.
    "a folder that is not on the disk": Scenario(
        2, Setting("ssp", 1, 1, 4, durable="always"), (Fault(20, POWER, "server0", 0.5),)
    ),
    # A server had kept that a worker joined, and not the initial values: the push of another worker was called wrong.
    "initial values that were not kept": Scenario(
        1, Setting("half_async", 2, 2, 3, durable="interval"), (Fault(58, POWER, "server0", 0.06),)
    ),
    # A worker that starts again asks for its place until that is free. It stood still, and then believed an old answer.
    "a worker that stood still at the door": Scenario(
        91,
        Setting("auto", 3, 2, 6, "Adagrad", durable="interval", journal_bytes=2000),
        (Fault(144, KILL, "worker0", 1.89), Fault(192, PAUSE, "worker0", 3.77)),
    ),
    # The gradient of several steps was not made anew for other servers, when a move came between two that had it.
    "a merged gradient of a job that moves": Scenario(4, Setting("half_async", 2, 1, 6, moves_at=3, moves_to=2)),
    # A server had kept one worker's push of a round that was over, and not the other's: the next one was called wrong.
    "a push of a round that is over was not kept": Scenario(
        3, Setting("sync", 2, 1, 4, durable="os"), (Fault(59, POWER, "server0", 0.06),)
    ),
    # A server had kept that a worker joined, and no values: the worker that asked for all of them was called wrong.
    "values that were not kept": Scenario(
        92, Setting("half_async", 2, 1, 7, durable="os"), (Fault(104, POWER, "server0", 0.1),)
    ),
    # A model that follows heard of an update before its server had it on the disk, and lost it again with the power.
    "a version that was told of and not kept": Scenario(
        40193,
        Setting("ssp", 2, 1, 9, durable="always", sync_s=0.01, follower=True),
        (Fault(106, POWER, "server0", 0.06),),
    ),
    # A worker was given initial values before its server had them on the disk, which lost its power.
    "values that were given before they were kept": Scenario(
        3620550,
        Setting("sync", 2, 1, 1, "Adam", durable="always", journal_bytes=2000, sync_s=0.01),
        (Fault(24, POWER, "server0", 0.07),),
        0.1,
    ),
    # The job moved while a worker looked for the rows that leave after its push, which it made once more.
    "rows that leave as the job moves": Scenario(
        5000261,
        Setting(
            "async",
            1,
            2,
            18,
            durable="os",
            journal_bytes=10000,
            moves_at=17,
            moves_to=3,
            joins=1,
            joins_at=8,
            life="often",
        ),
    ),
    # A worker saved a checkpoint when another one had announced parameters that join after that step: it had these too.
    "parameters that join as a checkpoint is saved": Scenario(
        5000010, Setting("sync", 2, 1, 6, durable="interval", sync_s=0.1, checkpoint_every=5, grows_at=5)
    ),
    # A server that awaits which rows leave had nothing for a model that follows, which took that for all there is.
    "rows that leave as a model begins to follow": Scenario(
        5000748,
        Setting(
            "dc_asgd",
            2,
            3,
            7,
            "Adam",
            durable="os",
            journal_bytes=10000,
            checkpoint_every=2,
            follower=True,
            life="weight",
        ),
        (Fault(39, LOST), Fault(101, TWICE), Fault(249, TWICE)),
    ),
    # A worker was killed while it let rows leave for all; the others, who waited for it, failed.
    "a worker is killed while it shrinks a table": Scenario(
        5002714,
        Setting("sync", 3, 1, 11, "Adagrad", durable="always", life="count"),
        (
            Fault(28, KILL, "worker0", 4.82),
            Fault(158, POWER, "server0", 3.15),
            Fault(177, PAUSE, "worker0", 0.07),
            Fault(200, KILL, "worker1", 0.09),
        ),
    ),
    # A worker was killed between its push and the norm by which it was clipped, which nobody else was there to find.
    "a norm that was not agreed on": Scenario(
        3701124,
        Setting("sync", 1, 2, 8, durable="os", journal_bytes=10000, sync_s=0.01, clip=0.5),
        (Fault(95, PAUSE, "worker0", 1.17), Fault(117, KILL, "worker0", 0.09)),
    ),
    # A worker came to a job that moved while it found out which rows leave, and did not go over.
    "a worker that comes as a job moves and rows leave": Scenario(
        3701593, Setting("half_async", 3, 2, 9, moves_at=8, moves_to=3, joins=1, joins_at=9, life="recent")
    ),
    # Steps that were merged and not sent yet were dropped when their worker went over to other servers.
    "merged steps of a job that moves": Scenario(1, Setting("half_async", 3, 1, 12, moves_at=4, moves_to=2)),
    # A worker told a server, which had lost them with its power, of another one's pushes: that was called wrong.
    "pushes that others were told of were not kept": Scenario(
        4015,
        Setting("auto", 2, 3, 11, durable="interval", journal_bytes=2000),
        (
            Fault(97, KILL, "server2", 3.23),
            Fault(179, LOST),
            Fault(216, UNANSWERED),
            Fault(281, POWER, "server2", 4.72),
            Fault(361, TWICE),
        ),
    ),
    # of which it was wrong what the simulation said
    "a worker that comes late to a job that goes on": Scenario(
        6000026,
        Setting("ssp", 2, 3, 26, "Adam", "interval", 10000, 0.1, checkpoint_every=2, goes_on=True),
    ),
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.pairs(4)
def test_what_was_found_stays_mended(found: str, tmp_path: Path) -> None:
    wrong = wrong_with(FOUND[found], tmp_path)
    assert not wrong, wrong


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.pairs(1)
def test_a_seed(seed: int, tmp_path: Path) -> None:
    wrong = wrong_with(drawn(seed), tmp_path)
    assert not wrong, wrong


@pytest.mark.parametrize("seed", [3, 8])
@pytest.mark.pairs(1)
def test_a_seed_is_a_run(seed: int, tmp_path: Path) -> None:
    """The same messages at the same times, the same numbers in the end, and another seed gives another run."""
    first, second, other = (run(drawn(each), tmp_path / "job") for each in (seed, seed, seed + 1))
    assert first.messages == second.messages
    assert first.digest == second.digest != other.digest
    assert first.turns == second.turns


def test_a_job_in_which_nothing_goes_wrong(tmp_path: Path) -> None:
    """Every message arrives, and the faults of others are not its own."""
    setting = Setting(steps=5)
    outcome = run(Scenario(7, setting), tmp_path / "job")
    assert not outcome.errors
    assert not outcome.hang
    assert not outcome.struck
    assert not any(message.fate for message in outcome.messages)
    assert outcome.told.done == {(worker, step) for worker in range(3) for step in range(5)}


@pytest.mark.pairs(2)
@pytest.mark.parametrize("mode", AVERAGING)
def test_workers_average(mode: str, tmp_path: Path) -> None:
    """They meet in each step, and end with the same values of what they keep themselves."""
    outcome = run(Scenario(7, Setting(mode, steps=5, dense=ALL_REDUCE)), tmp_path / "job")
    assert not broken(outcome)
    assert outcome.told.ends.keys() == {0, 1, 2}
    assert sum(message.what.startswith("all_reduce") for message in outcome.messages) >= 5 * 3 * 2


@pytest.mark.pairs(1)
@pytest.mark.parametrize("whom", ["worker0", "worker1", "server1"])
@pytest.mark.parametrize("moment", range(120, 172))
def test_one_is_killed_at_every_moment_of_a_step_in_which_workers_average(
    moment: int, whom: str, tmp_path: Path
) -> None:
    """In the mode whose turn it is; it starts again."""
    mode = AVERAGING[(moment + int(whom[-1])) % len(AVERAGING)]
    setting = Setting(mode, workers=3, servers=2, steps=4, durable="always", dense=ALL_REDUCE)
    outcome = run(Scenario(1, setting, (Fault(moment, KILL, whom, 0.1),)), tmp_path / "job")
    assert outcome.kills.total() == 1
    wrong = broken(outcome)
    assert not wrong, wrong


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", ELASTIC)
def test_workers_join_and_leave(mode: str, tmp_path: Path) -> None:
    """They begin when they are to, train, and are gone when the others are not."""
    setting = Setting(mode, workers=2, servers=2, steps=6, joins=2, joins_at=3)
    outcome = run(Scenario(1, setting), tmp_path / "job")
    assert not broken(outcome)
    assert outcome.told.ends.keys() == {0, 1}
    assert outcome.told.done == {(worker, step) for worker in range(4) for step in range(6)}


@pytest.mark.pairs(1)
@pytest.mark.parametrize("kind", [LOST, UNANSWERED, TWICE, "worker2", "server1"])
@pytest.mark.parametrize("nth", range(4))
@pytest.mark.parametrize("mode", ELASTIC)
def test_whatever_befalls_the_goodbye_of_one_that_leaves(
    mode: str, nth: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a server, before its answer or after it; or who has said it is killed, or one to whom it was said."""
    setting = Setting(mode, 2, 2, 4, durable="always", joins=1, joins_at=1)
    byes, moment = list[int](), Simulation._moment

    def noting(job: Simulation, what: str = "") -> str:
        if what.startswith("bye") and not job.told.ends:
            byes.append(job._moments + 1)
        return moment(job, what)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_moment", noting)
        assert not broken(run(Scenario(1, setting), tmp_path / "job"))
    assert len(byes) >= 4
    is_of_messages = kind in (LOST, UNANSWERED, TWICE)
    fault = Fault(byes[nth], kind) if is_of_messages else Fault(byes[nth], KILL, kind, 0.1)
    outcome = run(Scenario(1, setting, (fault,)), tmp_path / "job")
    assert [each for _, each in outcome.struck] == [fault]
    wrong = broken(outcome)
    assert not wrong, wrong


@pytest.mark.pairs(2)
@pytest.mark.parametrize("mode", MODES)
def test_workers_look_ahead_meet_and_keep_what_is_theirs(mode: str, tmp_path: Path) -> None:
    setting = Setting(
        mode, 2, 2, 7, "Adagrad", ahead=2, meets_every=3, keeps=True, beside="group", loads_at=4, loads_from=1
    )
    outcome = run(Scenario(1, setting), tmp_path / "job")
    assert not broken(outcome)
    kept = outcome.told.kept
    assert {(worker, step) for worker, step, _ in kept.met} == {(worker, step) for worker in (0, 1) for step in (3, 6)}
    assert [worker for worker, _ in kept.models] == ([0, 1] if mode == "sync" else [])


@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("Adam", marks=pytest.mark.slow)])
def test_workers_go_back_and_go_on(optimizer: str, tmp_path: Path) -> None:
    """To what they have saved, and as another job from its checkpoints; one that starts again has what it kept."""
    setting = Setting(
        *("sync", 2, 2, 8, optimizer),
        checkpoint_every=2,
        keeps=True,
        beside="optimizer",
        goes_on=True,
        goes_back_at=5,
        goes_back_to=2,
    )
    outcome = run(Scenario(1, setting, (Fault(90, KILL, "worker1", 0.1),)), tmp_path / "job")  # as it saves for all
    assert not broken(outcome)
    kept, again = outcome.told.kept, outcome.again
    assert kept.saved == kept.went_back == {0, 1}
    assert (1, 2, 2) in kept.states
    assert again is not None
    assert sorted(again.told.kept.states) == [(0, 4, 4), (1, 4, 4)]


def test_rows_go_to_files_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers are those of a job with all rows in memory."""
    done = Counter[str]()

    def counted(owner: type, name: str) -> None:
        act = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (done.update([name]), act(*args))[1])

    for owner, name in ((RowFile, "_write"), (Reading, "run"), (TieredStore, "rewrite")):
        counted(owner, name)
    setting = Setting(workers=3, servers=1, optimizer="Adagrad", rows_in_memory=4)
    assert not broken(run(Scenario(1, setting), tmp_path / "job"))
    assert min(done[name] for name in ("_write", "run", "rewrite")) > 0


def test_steps_that_one_server_goes_on_without_are_not_taken_again(tmp_path: Path) -> None:
    """The other one has them. Their worker was killed when the first had made them up."""
    setting = Setting("async", 1, 2, 30, "SGD", durable="os", sync_s=0.1)
    scenario = Scenario(5, setting, (Fault(135, POWER, "server1", 0.5), Fault(225, KILL, "worker0", 1.0)))
    outcome = run(scenario, tmp_path / "job")
    assert not outcome.errors
    assert not broken(outcome)
    (_, *begins) = outcome.told.begins
    assert begins
    assert all(begin == done > 0 for _, begin, done in begins)


@pytest.mark.pairs(3)
@pytest.mark.parametrize("kind", [LOST, UNANSWERED, TWICE, KILL, PAUSE, CUT, POWER])
def test_faults_come_to_pass(kind: str, tmp_path: Path) -> None:
    """At the moment that is told, to whom it is told; and a durable job goes on."""
    is_of_messages = kind in (LOST, UNANSWERED, TWICE)
    faults = tuple(Fault(moment, kind, "" if is_of_messages else "server1", 1.0) for moment in range(60, 80))
    setting = Setting(servers=2, workers=2, steps=8, durable="always")
    outcome = run(Scenario(1, setting, faults), tmp_path / "job")
    assert [fault for _, fault in outcome.struck] == list(faults)
    assert not broken(outcome)
    if kind in (KILL, POWER):
        assert outcome.kills["server"] > 0
    if is_of_messages:
        assert any(message.fate == kind for message in outcome.messages)
    else:
        assert outcome.lasted_s > 1.0


# ---------------------------------------------------------------- what a launcher decides


@pytest.mark.pairs(1)
@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("whom", ["worker1", "server1"])
def test_a_launcher_starts_a_process_again_as_often_as_it_may(max_restarts: int, whom: str, tmp_path: Path) -> None:
    """Then it ends the job, whose exit code and cause are those of the process that was killed once more."""
    setting, faults = Setting(steps=8, durable="always"), (Fault(100, KILL, whom, 0.1), Fault(190, KILL, whom, 0.1))
    for some in (faults[:max_restarts], faults[: max_restarts + 1]):
        scenario = Scenario(1, setting, some, max_restarts=max_restarts, is_one_machine=True)
        outcome = run(scenario, tmp_path / "job")
        wrong = broken(outcome)
        assert not wrong, wrong
        (verdict,) = outcome.verdicts
        assert sum("starting it again" in each for each in verdict.said) == min(len(some), max_restarts)
        assert verdict.exit_code == (137 if len(some) > max_restarts else 0)
    named = f"{whom[:-1]} {whom[-1]}"
    assert verdict.cause is not None
    assert (verdict.cause.process, verdict.codes[named]) == (named, -9)
    assert set(verdict.codes.values()) <= {-9, -15, 0, 1}
    assert outcome.lasted_s < 20.0


def test_who_does_not_end_when_it_is_told_to_is_killed(tmp_path: Path) -> None:
    faults = (Fault(90, PAUSE, "server0", 100.0), Fault(100, KILL, "worker0"))
    outcome = run(Scenario(1, Setting(), faults, max_restarts=0, is_one_machine=True), tmp_path / "job")
    (verdict,) = outcome.verdicts
    assert not outcome.hang
    assert verdict.codes["server 0"] == -9
    assert "server 0 still there 10 s after SIGTERM: killing" in verdict.said[-1]
    assert verdict.exit_code == 137
    assert not verdict.outlived
    wrong = broken(outcome)
    assert not wrong, wrong


def test_a_launcher_that_is_wrong_is_seen(tmp_path: Path) -> None:
    scenario = Scenario(1, Setting(steps=2), is_one_machine=True)
    outcome = run(scenario, tmp_path / "job")
    assert not broken(outcome)
    (verdict,) = outcome.verdicts
    verdict.codes["worker 1"] = -9
    verdict.outlived = ["server0"]
    assert broken(outcome) == [
        "server0 has outlived its launcher",
        "a launcher has taken a job to have ended well, in which {'worker 1': 137} had failed",
    ]
    verdict.cause, verdict.exit_code, verdict.outlived = Cause("worker 0", "boom"), 3, []
    assert broken(outcome)[0].startswith("worker 0 is named, with {'worker 1': 137}, and the exit code is 3")


# ---------------------------------------------------------------- that it would find what is put in on purpose


ONE_LEAVES = Setting("async", 1, 1, 4, durable="always", joins=1, joins_at=1)

ON_PURPOSE = {
    "a worker that starts again goes on after a step that the others are yet to take": Scenario(
        768363,
        Setting("ssp", 3, 1, 5, dense=ALL_REDUCE),
        (Fault(36, LOST), Fault(66, LOST), Fault(109, KILL, "worker1", 0.06), Fault(112, KILL, "worker0", 0.02)),
    ),
    "a worker that has missed the end of its step keeps the values that it has": Scenario(
        511,
        Setting("sync", 3, 1, 6, "Adam", durable="always", sync_s=0.01, rows_in_memory=16, dense=ALL_REDUCE),
        (Fault(137, KILL, "worker2", 0.06),),
    ),
    "workers that wait for an average do not ask whether one of them is lost": Scenario(
        1130,
        Setting("async", 3, 3, 2, "Adam", durable="always", sync_s=0.1, dense=ALL_REDUCE),
        (Fault(84, UNANSWERED), Fault(94, KILL, "worker2", 0.09)),
    ),
    "a repeated push is answered before its round is over": Scenario(
        28, Setting("sync", 2, 1, 4, durable="always"), (Fault(46, KILL, "server0", 0.1),)
    ),
    "silence is measured by the time of day": Scenario(
        92, Setting(workers=2, servers=1, steps=7), (Fault(86, CLOCK, "server0", 5.0), Fault(88, PAUSE, "worker0", 0.1))
    ),
    "a gradient for which a queue has no room is dropped": Scenario(
        0, Setting(mode="async", workers=1, servers=1, steps=4, durable="always", sync_s=0.1)
    ),
    "a push is not written into the journal": Scenario(
        0, Setting(workers=2, servers=1, steps=1, durable="always"), (Fault(37, KILL, "server0", 0.06),)
    ),
    "the name of a server's folder is not on the disk": FOUND["a folder that is not on the disk"],
    "the torn end of a journal is not cut off": Scenario(
        6,
        Setting(workers=2, servers=1, steps=6, durable="always", sync_s=0.1),
        (Fault(12, POWER, "server0", 0.06), Fault(114, KILL, "server0", 0.1)),
    ),
    "a snapshot lacks its last piece": Scenario(
        5,
        Setting(workers=1, servers=1, steps=1, durable="always", journal_bytes=2000),
        (Fault(25, KILL, "server0", 0.1),),
    ),
    "pushes that no update has yet are not carried into a new journal": Scenario(
        0,
        Setting(mode="gba", workers=2, servers=1, steps=4, durable="always", journal_bytes=2000),
        (Fault(78, KILL, "server0", 0.25),),
    ),
    "only worker 0 is told that a server has lost the initial values": FOUND["initial values that were not kept"],
    "a journal is synced with its lock and the server's taken in the other order": Scenario(
        47,
        Setting(mode="async", workers=2, servers=2, steps=12, durable="always", journal_bytes=2000, sync_s=0.01),
        preemption=0.1,
    ),
    "gradients are added in the order in which they come": Scenario(0, Setting(servers=1, steps=1), ()),
    "a worker may be a step further ahead than its bound": Scenario(
        2, Setting(mode="ssp", workers=2, servers=1, steps=5), (Fault(34, PAUSE, "worker1", 1.25),)
    ),
    "a worker that starts again asks the first server alone how far it is": Scenario(
        9, Setting(mode="ssp", workers=1, servers=2, steps=2), (Fault(28, KILL, "worker0", 1.25),)
    ),
    "answers leave before the journal is on the disk": Scenario(
        1, Setting(mode="async", workers=1, servers=1, steps=1, durable="always"), (Fault(25, POWER, "server0", 0.07),)
    ),
    "the last record of a journal stays in the process's memory": Scenario(
        1, Setting(mode="async", workers=1, servers=1, steps=8, durable="os"), (Fault(67, KILL, "server0", 0.07),)
    ),
    "older journals are removed when a snapshot begins": Scenario(
        1,
        Setting(workers=1, servers=1, steps=7, durable="always", journal_bytes=2000, sync_s=0.1),
        (Fault(67, KILL, "server0", 0.1),),
    ),
    "a snapshot has rows as they became while it was written": Scenario(
        13,
        Setting(mode="async", workers=2, servers=1, steps=6, durable="always", journal_bytes=2000, sync_s=0.01),
        (Fault(37, KILL, "server0", 0.1), Fault(139, KILL, "server0", 0.1)),
        preemption=0.1,
    ),
    "a snapshot forgets how many steps the optimizer of a table has taken": Scenario(
        2,
        Setting(workers=1, servers=1, steps=6, optimizer="Adam", durable="always", journal_bytes=2000),
        (Fault(55, KILL, "server0", 0.1),),
    ),
    "a server that goes on takes the next push for one that it has acknowledged": Scenario(
        0, Setting(mode="async", workers=1, servers=1, steps=1, durable="always"), (Fault(8, KILL, "server0", 0.06),)
    ),
    "a repeated push is applied again": Scenario(
        13, Setting(mode="async", workers=1, servers=1, steps=5), (Fault(39, TWICE),)
    ),
    "a round closes without a worker that starts again": Scenario(
        0, Setting(workers=2, servers=1, steps=2), (Fault(27, KILL, "worker1", 0.06),)
    ),
    "a step that is taken once more is taken with the newest values": Scenario(
        7, Setting(workers=2, servers=2, steps=6), (Fault(63, KILL, "worker0", 0.1), Fault(163, KILL, "worker0", 0.62))
    ),
    "a worker is given up on after three heartbeats": Scenario(
        2, Setting(workers=1, servers=1, steps=7), (Fault(60, PAUSE, "worker0", 5.0),)
    ),
    "a server that starts again does not know who has joined": Scenario(
        1,
        Setting("async", 1, 1, 8, durable="always", journal_bytes=2000, joins=1, joins_at=2),
        (Fault(80, KILL, "server0", 0.1),),
    ),
    "a goodbye is not written into the journal": Scenario(1, ONE_LEAVES, (Fault(63, KILL, "server0", 0.1),)),
    "a worker leaves without an answer to its goodbye": Scenario(1, ONE_LEAVES, (Fault(61, LOST),)),
    "a row that has changed since it was read leaves memory as it was": Scenario(
        1, Setting(workers=1, servers=1, steps=12, rows_in_memory=4)
    ),
    "a request whose line broke is not repeated": Scenario(
        0, Setting(workers=1, servers=1, steps=5), (Fault(47, LOST),)
    ),
}


@pytest.mark.parametrize("fault", on_purpose.FAULTS)
@pytest.mark.pairs(1)
def test_a_fault_that_is_put_in_on_purpose_is_found(fault: str, tmp_path: Path) -> None:
    """With it something is wrong, and without it nothing is."""
    scenario = ON_PURPOSE[fault]
    assert not on_purpose.said_with("", scenario, tmp_path / "job")
    assert on_purpose.said_with(fault, scenario, tmp_path / "job")


# ---------------------------------------------------------------- that it would see what is wrong


def test_a_job_that_hangs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.job.PATIENCE_S", 0.05)
    outcome = run(Scenario(1, Setting(workers=2, servers=1, steps=30)), tmp_path / "job")
    assert [each.split(" after")[0] for each in broken(outcome)] == [
        f"{name} has not ended" for name in ("server0", "worker0", "worker1")
    ]


def test_a_step_that_counts_twice_is_seen(tmp_path: Path) -> None:
    outcome = run(Scenario(1, Setting(workers=2, servers=1, steps=3)), tmp_path / "job")
    assert not broken(outcome)
    for end in outcome.told.ends.values():
        end["steps"][1, 2] *= 2
    assert any("step 2 of worker 1" in each for each in broken(outcome))
    outcome.told.ends[1]["head.bias"] += 1
    assert any("end with other values of head.bias" in each for each in broken(outcome))


def test_servers_that_hold_too_much_or_disagree_on_who_is_there_are_seen(tmp_path: Path) -> None:
    outcome = run(Scenario(1, Setting(workers=2, servers=2, steps=3)), tmp_path / "job")
    assert not broken(outcome)
    assert 2 <= outcome.most_held["server0"] <= 8
    assert outcome.told.members == {f"server{each}": {0: "left", 1: "left"} for each in range(2)}
    outcome.told.members["server1"][1] = "lost"
    assert broken(outcome) == [
        "server0 and server1 differ on how workers have left: {0: 'left', 1: 'left'}, {0: 'left', 1: 'lost'}"
    ]
    outcome.told.members["server1"][1] = "live"
    assert "server1 has served to the end, and has workers [1] in the job" in broken(outcome)
    del outcome.told.members["server1"][1]
    assert broken(outcome) == ["server0 knows of workers [0, 1] in the end, and server1 of [0]"]
    outcome.told.members.clear()
    outcome.most_held["server0"] = 100
    assert broken(outcome) == ["server0 had 100 requests to answer at a time, of 4 processes"]


def test_a_scenario_is_made_shorter() -> None:
    """What has nothing to do with a failure goes, and what it needs stays."""
    guilty = {Fault(10, KILL, "server1", 4.0), Fault(30, LOST)}
    innocent = {Fault(moment, LOST) for moment in range(40, 90)}
    scenario = Scenario(1, Setting(steps=30), tuple(sorted(guilty | innocent)), preemption=0.1)

    def fails(each: Scenario) -> bool:
        kinds = {(fault.moment, fault.kind) for fault in each.faults}
        return {(10, KILL), (30, LOST)} <= kinds and each.setting.steps > 3 and each.setting.workers > 1

    least = shrunk(scenario, fails)
    assert [(fault.moment, fault.kind) for fault in least.faults] == [(10, KILL), (30, LOST)]
    assert (least.setting.steps, least.setting.workers, least.setting.servers, least.preemption) == (4, 2, 2, 0.0)


def test_a_story_is_a_picture(tmp_path: Path) -> None:
    scenario = Scenario(1, Setting(workers=1, servers=1, steps=1), (Fault(9, PAUSE, "server0", 0.5),))
    story = told(run(scenario, tmp_path / "job"), ["something"])
    assert "WRONG: something" in story
    lines = [line for line in story.splitlines() if "push 1" in line]
    assert [("+-" in line and "->" in line, "<-" in line) for line in lines] == [(True, False), (False, True)]
    assert any("**** moment 9: pause of server0, 0.50 s" in line for line in story.splitlines())


# ---------------------------------------------------------------- the scheduler


def threads_of(scheduler: Scheduler, *works: Callable[[], object]) -> list[Thread]:
    process = Process("test")
    threads = [Thread(scheduler, process, work, f"thread {at}") for at, work in enumerate(works)]
    for thread in threads:
        scheduler.start(thread)
    return threads


def test_time_passes_when_all_wait_and_not_otherwise() -> None:
    scheduler = Scheduler(1)
    with installed(scheduler, 1):
        event, seen = Event(), []

        def wait() -> None:
            seen.append((event.wait(5.0), scheduler.now))
            seen.append((event.wait(500.0), scheduler.now))

        def wake() -> None:
            scheduler.block(7.0)
            event.set()

        for thread in threads_of(scheduler, wait, wake):
            scheduler.join(thread)
    assert seen == [(False, 5.0), (True, 7.0)]


def test_a_lock_is_held_by_one_whoever_gives_way() -> None:
    scheduler = Scheduler(3, preemption=0.5)
    with installed(scheduler, 3):
        lock, inside, most = Lock(), [0], [0]

        def work() -> None:
            for _ in range(50):
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    scheduler.give_way()
                    inside[0] -= 1

        for thread in threads_of(scheduler, work, work, work):
            scheduler.join(thread)
    assert most == [1]


def test_a_killed_process_does_nothing_more() -> None:
    scheduler = Scheduler(5)
    with installed(scheduler, 5):
        changed, done = Condition(), []

        def wait() -> None:
            try:
                with changed:
                    changed.wait()
                done.append("woken")
            finally:
                with changed:  # whatever it does on its way out
                    done.append("entered")

        threads = threads_of(scheduler, wait, wait)
        scheduler.block(1.0)
        scheduler.unwind(threads[0].process)
        assert all(thread.has_ended for thread in threads)
    assert done == []


def test_a_process_that_is_stopped_goes_on_later() -> None:
    scheduler = Scheduler(7)
    with installed(scheduler, 7):
        seen: list[float] = []

        def work() -> None:
            for _ in range(3):
                scheduler.block(1.0)
                seen.append(scheduler.now)

        (thread,) = threads_of(scheduler, work)
        scheduler.block(1.5)
        scheduler.pause(thread.process)
        scheduler.at(10.0, lambda: scheduler.resume(thread.process))
        scheduler.join(thread)
    assert seen == [1.0, 11.5, 12.5]


def test_another_setting_draws_other_faults() -> None:
    assert drawn(11) == drawn(11) != drawn(12)
