from __future__ import annotations

import pytest

from fleet.errors import DuplicateWorkerError, IdentityError, ServerBusyError
from fleet.ps.consistency.membership import Lost, Membership, NeverCame, Standing

SILENCE_S = 10.0
QUIET_S = 3.0
STARTUP_S = 60.0
BORN = 1000.0


def members(worker_num: int = 2) -> Membership:
    """A membership that was made at the time ``BORN``."""
    return Membership(worker_num, silence_s=SILENCE_S, quiet_s=QUIET_S, startup_s=STARTUP_S, now=BORN)


def joined(worker_num: int = 2) -> Membership:
    """Every worker has said hello at ``BORN``; the incarnation of worker ``i`` is ``100 + i``."""
    made = members(worker_num)
    for worker in range(worker_num):
        made.hello(worker, 100 + worker, f"host{worker}:1", BORN)
    return made


# --- Hello ------------------------------------------------------------------------------------------------------------


def test_everybody_is_expected_from_the_start() -> None:
    made = members(3)
    assert [made.standing(worker) for worker in range(4)] == [Standing.EXPECTED] * 3 + [None]
    assert made.standing(-1) is None
    assert not made.finished


def test_a_hello_admits() -> None:
    made = members()
    made.hello(1, 7, "a:1", BORN + 1)
    assert made.standing(1) is Standing.LIVE
    assert made.standing(0) is Standing.EXPECTED


def test_repeating_a_hello_is_no_second_worker() -> None:
    made = members(1)
    made.hello(0, 7, "a:1", BORN)
    made.hello(0, 7, "a:1", BORN + 1)
    assert made.standing(0) is Standing.LIVE
    assert made.heard(0, 7, BORN + 2)


@pytest.mark.parametrize("worker", [-1, 2, 1000])
def test_a_stranger_is_refused(worker: int) -> None:
    with pytest.raises(IdentityError, match=rf"worker {worker} is not part of this job.*an index from 0 to 1"):
        members().hello(worker, 1, "a:1", BORN)


def test_a_second_incarnation_is_refused_and_both_are_named() -> None:
    made = members()
    made.hello(1, 7, "first:11", BORN)
    with pytest.raises(IdentityError) as caught:
        made.hello(1, 8, "second:22", BORN + 2.5)
    assert "there is already a worker 1" in str(caught.value)
    assert caught.value.where == "first:11, last heard 2.5 s ago"
    assert caught.value.got == "a second one at second:22"
    assert made.heard(1, 7, BORN + 3)
    assert not made.heard(1, 8, BORN + 3)
    made.hello(1, 7, "first:11", BORN + 4)


@pytest.mark.parametrize("incarnation", [7, 8])
def test_nobody_comes_back_after_leaving(incarnation: int) -> None:
    made = members()
    made.hello(0, 7, "a:1", BORN)
    made.leave(0)
    with pytest.raises(IdentityError, match="worker 0 has already left this job; at b:2"):
        made.hello(0, incarnation, "b:2", BORN + 1)
    assert made.standing(0) is Standing.LEFT


def test_who_was_given_up_on_stays_out_but_its_successor_is_let_in() -> None:
    made = members()
    made.hello(0, 7, "a:1", BORN)
    made.tick(BORN + SILENCE_S + 1)
    with pytest.raises(IdentityError, match="worker 0 has already been given up on; at a:1"):
        made.hello(0, 7, "a:1", BORN + SILENCE_S + 2)
    assert made.standing(0) is Standing.LOST
    assert made.hello(0, 8, "b:2", BORN + SILENCE_S + 3) is Standing.LOST
    assert made.heard(0, 8, BORN + SILENCE_S + 4)
    assert not made.heard(0, 7, BORN + SILENCE_S + 4)


def test_a_silent_process_is_succeeded_and_fenced_off() -> None:
    made = members()
    made.hello(0, 7, "a:1", BORN)
    with pytest.raises(DuplicateWorkerError, match="already a worker 0"):
        made.hello(0, 8, "b:2", BORN + QUIET_S)
    assert made.hello(0, 8, "b:2", BORN + QUIET_S + 0.1) is Standing.LIVE
    assert made.heard(0, 8, BORN + QUIET_S + 0.2)
    assert not made.heard(0, 7, BORN + QUIET_S + 0.2)
    assert made.hello(0, 8, "b:2", BORN + QUIET_S + 0.3) is None, "a repetition"


def test_who_was_admitted_once_is_admitted_again_whatever_the_time() -> None:
    made = members()
    made.hello(0, 7, "a:1", BORN)
    assert made.hello(0, 8, "b:2", BORN, surely=True) is Standing.LIVE


def test_what_is_told_of_members_makes_the_same_members() -> None:
    made = joined()
    made.leave(1)
    again = members()
    again.resume(made.told(), BORN + 1)
    assert again.told() == made.told()
    assert again.heard(0, 100, BORN + 2)
    assert again.standing(1) is Standing.LEFT


def test_a_server_that_starts_again_first_waits_who_shows_that_it_is_there() -> None:
    again = members()
    again.resume(joined().told(), BORN + 1)
    again.surmise(BORN + 2)
    with pytest.raises(
        ServerBusyError, match="started again and does not know yet whether worker 0 still is"
    ) as caught:
        again.hello(0, 8, "b:2", BORN + 2.5)
    assert caught.value.got == "a second one at b:2"
    assert again.heard(1, 101, BORN + 3)
    with pytest.raises(DuplicateWorkerError, match="already a worker 1"):
        again.hello(1, 8, "b:2", BORN + 3.5)
    assert again.hello(0, 8, "b:2", BORN + 2 + QUIET_S + 0.1) is Standing.LIVE
    assert again.heard(0, 8, BORN + 2 + QUIET_S + 0.2)


# --- An elastic job ---------------------------------------------------------------------------------------------------


def elastic() -> Membership:
    """Worker 0, which the job begins with, has said hello at ``BORN``."""
    made = Membership(1, silence_s=SILENCE_S, quiet_s=QUIET_S, startup_s=STARTUP_S, now=BORN, elastic=True)
    assert made.hello(0, 7, "a:1", BORN) is None
    return made


def test_others_may_take_any_place() -> None:
    made = elastic()
    assert made.hello(9, 8, "b:1", BORN) is Standing.LEFT
    assert made.hello(9, 8, "b:1", BORN) is None, "a repetition"
    assert made.awaited() == (0, 9)
    with pytest.raises(DuplicateWorkerError):
        made.hello(9, 9, "c:1", BORN + 1)
    made.leave(0)
    assert not made.finished
    made.leave(9)
    assert made.finished


def test_a_place_that_was_left_is_free_for_another_process() -> None:
    made = elastic()
    made.hello(1, 8, "b:1", BORN)
    made.leave(1)
    with pytest.raises(IdentityError, match="worker 1 has already left this job"):
        made.hello(1, 8, "b:1", BORN + 1)
    assert made.hello(1, 9, "c:1", BORN + 1) is Standing.LEFT
    assert not made.heard(1, 8, BORN + 1)


def test_nobody_joins_when_the_job_is_over() -> None:
    made = elastic()
    made.lose(0)
    for worker in (0, 1):
        with pytest.raises(IdentityError, match=rf"worker {worker} comes too late.*has left or was given up on"):
            made.hello(worker, 8, "b:1", BORN + 1)


def test_who_has_joined_is_told() -> None:
    made, again = elastic(), elastic()
    made.hello(9, 8, "b:1", BORN)
    again.resume(made.told(), BORN + 1)
    assert again.heard(9, 8, BORN + 2)


# --- Heartbeats -------------------------------------------------------------------------------------------------------


def test_who_may_be_heard() -> None:
    made = members(3)
    made.hello(0, 7, "a:1", BORN)
    assert made.heard(0, 7, BORN)
    assert not made.heard(0, 6, BORN), "another incarnation"
    assert not made.heard(1, 0, BORN), "it has not said hello"
    assert not made.heard(3, 7, BORN), "it is not part of the job"
    made.leave(0)
    assert not made.heard(0, 7, BORN), "it has left"


def test_a_lost_worker_is_fenced_off() -> None:
    made = joined()
    made.heard(1, 101, BORN + 8)
    assert [lost.worker for lost in made.tick(BORN + SILENCE_S + 1) if isinstance(lost, Lost)] == [0]
    assert not made.heard(0, 100, BORN + SILENCE_S + 1)
    assert made.heard(1, 101, BORN + SILENCE_S + 1)


def test_another_incarnations_beat_does_not_keep_a_worker_alive() -> None:
    made = joined(1)
    assert not made.heard(0, 99, BORN + SILENCE_S)
    assert made.tick(BORN + SILENCE_S + 1) == [Lost(0, SILENCE_S + 1)]


# --- The deadline of silence ------------------------------------------------------------------------------------------


def test_silence_is_allowed_up_to_the_deadline() -> None:
    made = joined(1)
    assert made.tick(BORN) == []
    assert made.tick(BORN + SILENCE_S) == []
    assert made.standing(0) is Standing.LIVE
    assert made.tick(BORN + SILENCE_S + 0.5) == [Lost(0, SILENCE_S + 0.5)]
    assert made.standing(0) is Standing.LOST


def test_a_loss_is_told_once() -> None:
    made = joined()
    made.heard(1, 101, BORN + 1000)
    assert made.tick(BORN + 20) == [Lost(0, 20.0)]
    assert made.tick(BORN + 20) == []
    assert made.tick(BORN + 1005) == []
    assert made.tick(BORN + 2000) == [Lost(1, 1000.0)]


def test_heartbeats_push_the_deadline_back() -> None:
    made = joined(1)
    for beat in range(1, 20):
        assert made.heard(0, 100, BORN + beat * SILENCE_S)
        assert made.tick(BORN + beat * SILENCE_S + SILENCE_S) == []
    assert made.tick(BORN + 20 * SILENCE_S + 1) == [Lost(0, SILENCE_S + 1)]


def test_several_are_lost_at_once_in_worker_order() -> None:
    made = joined(4)
    made.heard(2, 102, BORN + 15)
    assert made.tick(BORN + 20) == [Lost(0, 20.0), Lost(1, 20.0), Lost(3, 20.0)]


def test_the_silence_of_a_late_worker_counts_from_its_hello() -> None:
    made = members(1)
    made.hello(0, 7, "a:1", BORN + 50)
    assert made.tick(BORN + 50 + SILENCE_S) == []
    assert made.tick(BORN + 51 + SILENCE_S) == [Lost(0, SILENCE_S + 1)]


def test_who_has_left_is_not_lost() -> None:
    made = joined()
    made.leave(0)
    assert made.tick(BORN + 20) == [Lost(1, 20.0)]
    assert made.standing(0) is Standing.LEFT


# --- The deadline of the start ----------------------------------------------------------------------------------------


def test_waiting_for_a_slow_starter() -> None:
    made = members()
    made.hello(0, 7, "a:1", BORN)
    made.heard(0, 7, BORN + STARTUP_S)
    assert made.tick(BORN + STARTUP_S) == []
    made.hello(1, 8, "b:1", BORN + STARTUP_S)
    assert made.tick(BORN + STARTUP_S + 5) == []


def test_who_never_came_is_told_once() -> None:
    made = members(3)
    made.hello(1, 7, "a:1", BORN + STARTUP_S)
    assert made.tick(BORN + STARTUP_S + 1) == [NeverCame((0, 2), STARTUP_S + 1, ())]
    assert made.tick(BORN + STARTUP_S + 2) == []
    assert made.standing(0) is made.standing(2) is Standing.LOST
    assert made.standing(1) is Standing.LIVE
    with pytest.raises(IdentityError, match="given up on"):
        made.hello(0, 1, "late:1", BORN + STARTUP_S + 3)


def test_it_is_told_why_they_were_turned_away() -> None:
    made = members(3)
    made.refused(2, "another model")
    made.refused(0, "another list of servers")
    made.refused(0, "another number of workers")
    made.refused(7, "no such worker")
    effect = NeverCame((0, 1, 2), STARTUP_S + 1, ("another number of workers", "another model"))
    assert made.tick(BORN + STARTUP_S + 1) == [effect]


def test_a_refusal_is_forgotten_once_the_worker_comes_back_better() -> None:
    made = members()
    made.refused(0, "another model")
    made.hello(0, 7, "a:1", BORN + STARTUP_S)
    assert made.tick(BORN + STARTUP_S + 1) == [NeverCame((1,), STARTUP_S + 1, ())]


def test_a_refusal_of_an_impostor_does_not_touch_the_one_that_is_there() -> None:
    made = joined(1)
    made.refused(0, "a second one")
    assert made.standing(0) is Standing.LIVE
    assert made.heard(0, 100, BORN + 1)


def test_both_deadlines_in_one_tick() -> None:
    made = members()
    made.hello(0, 7, "a:1", BORN)
    assert made.tick(BORN + 100) == [Lost(0, 100.0), NeverCame((1,), 100.0, ())]
    assert made.finished


def test_a_worker_that_left_before_it_came_is_not_missed() -> None:
    made = members(1)
    made.leave(0)
    assert made.tick(BORN + STARTUP_S + 1) == []
    assert made.finished


# --- The end ----------------------------------------------------------------------------------------------------------


def test_the_job_is_finished_when_everybody_has_left_or_is_lost() -> None:
    made = joined(3)
    made.leave(2)
    assert not made.finished
    made.heard(0, 100, BORN + 9)
    made.tick(BORN + SILENCE_S + 1)
    assert made.standing(1) is Standing.LOST
    assert not made.finished
    made.leave(0)
    assert made.finished


def test_a_worker_that_has_not_come_yet_holds_the_job_open() -> None:
    made = members(2)
    made.hello(0, 7, "a:1", BORN)
    made.leave(0)
    assert not made.finished
    made.tick(BORN + STARTUP_S + 1)
    assert made.finished


# --- In words ---------------------------------------------------------------------------------------------------------


def test_describe() -> None:
    made = members(4)
    for worker in (1, 2, 3):
        made.hello(worker, worker, f"host:{worker}", BORN)
    made.heard(1, 1, BORN + 9)
    made.leave(2)
    made.tick(BORN + 12)
    assert made.describe(0, BORN + 12.25) == "worker 0, not there yet"
    assert made.describe(1, BORN + 12.25) == "worker 1 (host:1), last heard 3.2 s ago"
    assert made.describe(2, BORN + 12.25) == "worker 2, left"
    assert made.describe(3, BORN + 12.25) == "worker 3, lost"


def test_time_alone_decides() -> None:
    """The same events at the same times give the same effects, whatever the clock on the wall says."""

    def run(offset: float) -> list[Lost | NeverCame]:
        made = Membership(3, silence_s=SILENCE_S, quiet_s=QUIET_S, startup_s=STARTUP_S, now=offset)
        made.hello(0, 1, "a:1", offset + 1)
        made.hello(1, 2, "b:1", offset + 2)
        effects = made.tick(offset + 5)
        made.heard(0, 1, offset + 6)
        return [*effects, *made.tick(offset + 14), *made.tick(offset + 15), *made.tick(offset + 64)]

    assert run(0.0) == run(4096.0) == [Lost(1, 12.0), Lost(0, 58.0), NeverCame((2,), 64.0, ())]
