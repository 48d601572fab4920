"""Says what a mode decides beside the order of updates: questions that workers and servers ask, with one answer for
each mode.

A mode's file overrides what is otherwise in it. Pure, as gates are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleet.ps.consistency.gate import Gate, Rules


class Policy:
    #: Steps are the whole job's: after the same one every server is at the same version and every worker sees it.
    shares_steps = False
    #: A worker goes on with the answer to its push, and not before it is there.
    awaits_answers = True
    #: The user's optimizers step on the workers, and servers add the changes to their values.
    trains_on_workers = False
    #: Servers remember what each worker has read: a read changes what they do next.
    remembers_reads = False
    #: A push that is due lets the next forward read its rows first.
    lets_reads_go_first = False
    #: A worker may use a row again, as it was read some steps ago, if its script says so.
    lets_rows_age = False
    #: A worker may ask for the rows of a batch before it has taken the steps that come before it.
    lets_rows_come_ahead = True
    #: Servers take gradients that come ahead of their push.
    takes_gradients_early = True
    #: The answer to a push tells which rows others have changed.
    tells_changed_rows = False
    #: The optimizer state of dense parameters is on the servers.
    has_dense_state_on_servers = True
    #: Checkpoints are worker 0's to save, whose state is the job's.
    saves_on_first_worker = False
    #: Pushes of any workers wait in a buffer for each other. The first server says what goes into one; the others are
    #: told by the worker.
    fills_buffers = False

    def __init__(self, staleness: int = 0, update_frequency: int = 1) -> None:
        """``staleness`` and ``update_frequency`` are the strategy's, and mean nothing to most modes."""
        self.staleness = staleness
        self.update_frequency = update_frequency

    @property
    def may_lose_steps(self) -> bool:
        """Say whether a job goes on where a server has lost steps, since what it has is right without them."""
        return not (self.shares_steps or self.remembers_reads or self.fills_buffers)

    @property
    def versions_agree(self) -> bool:
        """Say whether a version means the same on all servers."""
        return self.shares_steps or self.fills_buffers

    # ---------------------------------------------------------------- a worker asks

    def version_needed(self, step: int) -> int:
        """Return which version of the servers' values a worker needs to go on after a step."""
        return 0

    @property
    def most_steps_ahead(self) -> int:
        """Return how many of its own steps those rows may lack that a worker has fetched ahead."""
        if not self.lets_rows_come_ahead:
            return 0
        return self.staleness if self.fills_buffers else 1 << 62

    @property
    def waits_for_others(self) -> bool:
        """Say whether a worker may wait for a step of another one."""
        return self.version_needed(1 << 62) > 0

    def steps_per_push(self, most_merged: int) -> int:
        """Return how many steps make one push of a worker; ``most_merged`` is the communicator's setting."""
        return 1

    def sends_gradients_early(self, most_merged: int) -> bool:
        """Say whether gradients may leave while the backward still runs."""
        return self.steps_per_push(most_merged) == 1

    # ---------------------------------------------------------------- a server asks

    def remembers_read(self, *, dense: bool, training: bool) -> bool:
        """Say whether a server remembers that a worker read dense values, or rows that are to be trained."""
        return self.remembers_reads and (dense or training)

    def remembers_push(self, *, brings_values: bool) -> bool:
        """Say whether a server remembers the answer to a push."""
        return self.remembers_reads and brings_values

    def applies_one_lookup(self, worker_num: int) -> bool:
        """Say whether the rows that are updated together are those that one forward has looked up."""
        return True


@dataclass(frozen=True)
class Mode:
    """Holds a consistency mode: the name that strategies and checkpoints have for it, and its two halves."""

    name: str
    gate: Callable[[Iterable[int], int, Rules], Gate]
    policy: type[Policy]
