"""Draws a job and what befalls it from one number."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

MESSAGE_FAULTS = LOST, UNANSWERED, TWICE = "lost", "unanswered", "twice"
KILL, POWER, BIT, ROWS, PAUSE, CUT, CUT_IN, CUT_OUT, CLOCK, FULL, LIES = (
    "kill",
    "power",
    "bit",
    "damaged rows",
    "pause",
    "cut",
    "cut in",
    "cut out",
    "clock",
    "full disk",
    "lying disk",
)

#: The job's deadline for silence; whatever befalls it and is shorter than that must not end it.
DEADLINE_S = 60.0
HEARTBEAT_S = 1.0
#: The longest that one of its misfortunes lasts. A few at once are still shorter than the deadline.
LONGEST_S = 6.0

#: More restarts than a job needs.
MANY = 20

#: A process that serves a model which follows the job.
FOLLOWER = "follower0"

MODES = ("sync", "async", "half_async", "ssp", "gba", "auto", "geo", "dc_asgd")
#: In these the workers may keep dense parameters, and average their gradients.
AVERAGING = ("sync", "async", "half_async", "ssp")
ALL_REDUCE = "all_reduce"
#: In these workers may join a running job, and leave it.
ELASTIC = ("async", "half_async", "gba")
#: In these what becomes an update is clipped.
CLIPPED = ("sync", "gba", "auto")
#: What rows of a table come and leave by: see job.py.
LIVES = ("count", "weight", "chance", "unused", "recent", "often", "several")


@dataclass(frozen=True, order=True)
class Fault:
    """Befalls a job at one of its moments: each message, and each time that something is written to a disk."""

    moment: int
    kind: str
    #: a process, or nobody in particular
    whom: str = ""
    #: how long it is away, or stopped, or cut off
    for_s: float = 0.0

    def __str__(self) -> str:
        whom = f" of {self.whom}" if self.whom else ""
        how_long = f", {self.for_s:.2f} s" if self.for_s else ""
        return f"moment {self.moment}: {self.kind}{whom}{how_long}"


@dataclass(frozen=True)
class Setting:
    """Is the job, without what befalls it. All that two equal ones do alike is known once one was run."""

    mode: str = "sync"
    workers: int = 3
    servers: int = 3
    steps: int = 30
    optimizer: str = "SGD"
    #: "" for servers that keep nothing, else FLEET_DURABLE_SYNC
    durable: str = ""
    #: a snapshot is due when a journal has so many bytes
    journal_bytes: int = 256 << 20
    #: the longest that a disk takes to put on it what is synced
    sync_s: float = 0.0
    #: steps between two checkpoints, of which the second of two is a delta; none if 0
    checkpoint_every: int = 0
    #: a model that is served follows the job
    follower: bool = False
    #: before which step worker 0 moves the job to the first so many servers; never if 0
    moves_at: int = 0
    moves_to: int = 0
    #: workers that join the job when the others have done so many steps, and leave it when they have done theirs
    joins: int = 0
    joins_at: int = 0
    #: rows of each table that a server keeps in memory; all of them if 0
    rows_in_memory: int = 0
    #: where dense parameters are: with "all_reduce" on the workers, which average their gradients
    dense: str = "servers"
    #: what rows of one table come and leave by; all of them stay if ""
    life: str = ""
    #: the largest norm of a gradient that is applied; any if 0
    clip: float = 0.0
    #: before which step further parameters join the job; never if 0
    grows_at: int = 0
    #: before which step the script of every worker writes into parameters and rows; never if 0
    edits_at: int = 0
    #: for how many steps ahead workers look rows up; for none if 0
    ahead: int = 0
    #: before every which step all workers meet; never if 0
    meets_every: int = 0
    #: a script keeps what belongs to its steps, with each of them and in checkpoints
    keeps: bool = False
    #: what parameters that note no steps have: a "group" of options, an "optimizer", or nothing of their own
    beside: str = ""
    #: before which step all workers load the model that was before another one; never if 0
    loads_at: int = 0
    loads_from: int = 0
    #: before which step the job goes back, once, to the checkpoint that it saved before another one; never if 0
    goes_back_at: int = 0
    goes_back_to: int = 0
    #: when the job is over, another one goes on from the checkpoints of its first half
    goes_on: bool = False

    @property
    def all_workers(self) -> int:
        return self.workers + self.joins

    @property
    def taken_back(self) -> list[int]:
        """Return the steps that parameters lose when the workers load an earlier model. Rows that it lacks stay."""
        return list(range(self.loads_from, self.loads_at)) if self.mode == "sync" else []

    @property
    def names(self) -> list[str]:
        names = [f"server{index}" for index in range(max(self.servers, self.moves_to))]
        names += [f"worker{index}" for index in range(self.all_workers)]
        return [*names, FOLLOWER] if self.follower else names


@dataclass(frozen=True)
class Scenario:
    seed: int
    setting: Setting
    faults: tuple[Fault, ...] = ()
    #: how likely a thread gives way where it takes a lock
    preemption: float = 0.0
    #: so many times the launcher starts a process again that a signal has killed
    max_restarts: int = MANY
    #: all that the job begins with has one launcher, which ends it as a whole; else each process has its own
    is_one_machine: bool = False

    @property
    def may_fail(self) -> bool:
        """Say whether something befalls it that may end the job, by an error that names it."""
        kinds = {fault.kind for fault in self.faults}
        is_mortal = not self.setting.durable
        loses_state = POWER in kinds and self.setting.durable != "always"
        is_killed = bool(kinds & {BIT, FULL, LIES}) or loses_state or (is_mortal and self._kills_a_server)
        return is_killed or self.is_given_up

    def may_be_left(self, name: str) -> bool:
        """Say whether a process may be there when the job is over, and nobody needs it: a server to which the job never
        moved, or from which it went."""
        setting = self.setting
        index = int(name[len("server") :]) if name.startswith("server") else 0
        return bool(setting.moves_at) and index >= min(setting.servers, setting.moves_to)

    @property
    def leaves_who_is_killed(self) -> bool:
        """Say whether workers that average may be through before one that was killed has started again."""
        killed = [fault for fault in self.faults if fault.kind in (KILL, POWER) and fault.whom.startswith("worker")]
        return self.setting.dense == ALL_REDUCE and bool(killed)

    @property
    def is_given_up(self) -> bool:
        """Say whether a process may be killed once more than it is started again."""
        killed = Counter(fault.whom for fault in self.faults if fault.kind in (KILL, POWER, ROWS))
        killed.pop(FOLLOWER, None)
        return any(times > self.max_restarts for times in killed.values())

    @property
    def _kills_a_server(self) -> bool:
        return any(fault.kind in (KILL, POWER, ROWS) and fault.whom.startswith("server") for fault in self.faults)


def drawn(seed: int, *, share: float = 0.05) -> Scenario:
    """Return the scenario of a seed, with faults at this share of its messages."""
    draw = random.Random(f"scenario {seed}")
    mode = draw.choice((*MODES, "sync", "sync", "async"))
    durable = draw.choice(("", "always", "interval", "os", "always"))
    setting = Setting(
        mode=mode,
        workers=draw.randint(1, 3),
        servers=draw.randint(1, 3),
        steps=draw.randint(4, 30),
        optimizer=draw.choice(("SGD", "SGD", "Adagrad", "Adam")),
        durable=durable,
        journal_bytes=draw.choice((256 << 20, 2000, 10000)) if durable else 256 << 20,
        checkpoint_every=draw.choice((0, 0, 0, 2, 5)),
        follower=draw.random() < 0.2,
        sync_s=random.Random(f"disk {seed}").choice((0.0, 0.01, 0.1)) if durable else 0.0,
    )
    if draw.random() < 0.3:
        moves_at, moves_to = draw.randint(1, setting.steps - 1), draw.randint(1, 3)
        setting = replace(setting, moves_at=moves_at, moves_to=moves_to)
    draw_more = random.Random(f"joins, memory {seed}")
    if mode in ELASTIC and draw_more.random() < 0.4:
        setting = replace(setting, joins=draw_more.randint(1, 2), joins_at=draw_more.randint(0, setting.steps))
    if draw_more.random() < 0.3:
        setting = replace(setting, rows_in_memory=draw_more.choice((4, 8, 16)))
    faults = draw_faults(setting, draw, share)
    if mode in AVERAGING and not setting.joins and random.Random(f"dense {seed}").random() < 0.3:
        setting = replace(setting, dense=ALL_REDUCE, follower=False)
        faults = tuple(fault for fault in faults if fault.whom != FOLLOWER)
    if setting.rows_in_memory and draw_more.random() < 0.1:
        whom = f"server{draw_more.randrange(max(setting.servers, setting.moves_to))}"
        faults = tuple(sorted((*faults, Fault(draw_more.randrange(moments_of(setting)), ROWS, whom))))
    setting = _draw_script(setting, random.Random(f"script {seed}"))
    setting = _draw_acts(setting, faults, random.Random(f"acts {seed}"))
    draw_launcher = random.Random(f"launcher {seed}")
    max_restarts, is_one_machine = draw_launcher.choice((MANY, MANY, MANY, 1, 0)), draw_launcher.random() < 0.5
    return Scenario(seed, setting, faults, draw.choice((0.0, 0.01, 0.1)), max_restarts, is_one_machine)


def _draw_script(setting: Setting, draw: random.Random) -> Setting:
    """Let a job do what its mode allows beside its steps."""
    if setting.mode != "geo" and draw.random() < 0.3:
        setting = replace(setting, life=draw.choice(LIVES))
    if setting.mode in CLIPPED and setting.dense != ALL_REDUCE and draw.random() < 0.2:
        setting = replace(setting, clip=0.5)
    if setting.mode == "sync" and setting.dense != ALL_REDUCE:
        if not setting.follower and draw.random() < 0.2:
            setting = replace(setting, grows_at=draw.randint(1, setting.steps - 1))
        if draw.random() < 0.25:
            setting = replace(setting, edits_at=draw.randint(1, setting.steps - 1))
    return setting


def _draw_acts(setting: Setting, faults: tuple[Fault, ...], draw: random.Random) -> Setting:
    """Let scripts look ahead, meet, keep, and go back. A worker that starts again does not know whether it has met the
    others, and those who join have not."""
    if draw.random() < 0.2:
        setting = replace(setting, ahead=draw.choice((1, 1, 2, 3)))
    meets_every, kills = draw.randint(1, 4), [fault for fault in faults if fault.kind in (KILL, POWER)]
    if draw.random() < 0.2 and not setting.joins and not any(fault.whom.startswith("worker") for fault in kills):
        setting = replace(setting, meets_every=meets_every)
    if draw.random() < 0.2:
        setting = replace(setting, keeps=True)
    if draw.random() < 0.15:
        setting = replace(setting, beside=draw.choice(("group", "optimizer")))
    loads_at = draw.randint(1, setting.steps - 1)
    if draw.random() < 0.15 and not setting.grows_at:
        setting = replace(setting, loads_at=loads_at, loads_from=draw.randrange(loads_at))
    goes_back_at = draw.randint(2, setting.steps - 1)
    if draw.random() < 0.3 and setting.mode == "sync" and not (setting.grows_at or setting.loads_at):
        setting = replace(setting, goes_back_at=goes_back_at, goes_back_to=draw.randrange(goes_back_at - 1))
    # Elsewhere workers may go on at other steps than each other, and wait for each other in the last ones.
    meets = setting.meets_every > 0 or setting.dense == ALL_REDUCE or setting.mode == "auto"
    may_go_on = setting.mode == "sync" or not (meets or setting.joins)
    if draw.random() < 0.5 and setting.checkpoint_every and may_go_on:
        setting = replace(setting, goes_on=True)
    return setting


def moments_of(setting: Setting) -> int:
    """Return about how many moments a job has."""
    return setting.steps * setting.all_workers * setting.servers * 5 + 40


def draw_faults(setting: Setting, draw: random.Random, share: float) -> tuple[Fault, ...]:
    moments = moments_of(setting)
    faults = [
        Fault(moment, draw.choice(MESSAGE_FAULTS)) for moment in range(moments) if draw.random() < share * draw.random()
    ]
    kinds = [KILL, KILL, KILL, PAUSE, PAUSE, CUT, CUT_IN, CUT_OUT, CLOCK, POWER]
    if draw.random() < 0.1:
        kinds += [BIT, FULL, LIES]
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3, 4))):
        kind, whom = draw.choice(kinds), draw.choice(setting.names)
        if kind in (POWER, BIT, FULL, LIES):
            whom = f"server{draw.randrange(max(setting.servers, setting.moves_to))}"
        if not setting.durable and whom.startswith("server") and kind == KILL and draw.random() < 0.8:
            continue  # that ends the job, which is not what most of these are to try
        faults.append(Fault(draw.randrange(moments), kind, whom, round(draw.uniform(0.0, LONGEST_S), 2)))
    return tuple(sorted(faults))
