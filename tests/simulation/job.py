"""Runs one scenario: real servers and workers, in simulated processes, and whatever befalls them."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer would import it

import fleet.nn
from fleet import Checkpoints, Fleet
from fleet.base import exit_guard
from fleet.base.cluster import Endpoint
from fleet.checkpoint.inspection import WEIGHT, Problem, Rows, parameters, verify
from fleet.checkpoint.places import place_at
from fleet.checkpoint.series import complete
from fleet.errors import CheckpointError, FleetError, TableFileError
from fleet.ps.server.runtime import ServerRuntime
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.serving.followed_model import FollowedModel
from fleet.serving.follower import Follower
from fleet.serving.server_source import ServerSource
from fleet.strategy.parameter_server import Strategy, StrategyFactory
from fleet.telemetry.cause import claim

from . import scenario as kinds
from .acts import Acts, Kept
from .disk import Disk, tiny_journals, tiny_tiers, turn_a_bit
from .groups import Groups
from .launcher import JOB, Launcher, Verdict
from .network import Message, Wires
from .scenario import Fault, Scenario, Setting
from .scheduler import Process, Scheduler, Thread
from .threads import installed

#: A job that is not over after so long, on the simulation's clock, hangs.
PATIENCE_S = 20 * kinds.DEADLINE_S
#: How long a worker computes.
_THINKS_S = (0.0, 0.02)
#: So long after it has ended by an error a durable server is started again.
_STARTS_AGAIN_AFTER_S = 0.5

#: By mode. What follows is said by a setting: whether workers may join, and where dense parameters are.
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half_async": partial(StrategyFactory.create_half_async_strategy, max_merge_var_num=3),
    "ssp": partial(StrategyFactory.create_ssp_strategy, staleness=2),
    "gba": StrategyFactory.create_gba_strategy,
    "auto": StrategyFactory.create_auto_strategy,
    "geo": partial(StrategyFactory.create_geo_strategy, 2),
    "dc_asgd": partial(StrategyFactory.create_async_strategy, dc_asgd_lambda=0.5),
}


#: What rows come and leave by, and after how many steps of a table; a script lets them leave after as many others.
LIVES: dict[str, dict[str, Any]] = {
    "count": {"admit": fleet.nn.CountFilter(2)},
    "weight": {
        "admit": fleet.nn.CountFilter(1.5, of="weight"),
        "evict": fleet.nn.MaxRows(9, by="weight"),
    },
    "chance": {"admit": fleet.nn.Probability(0.6)},
    "unused": {"evict": fleet.nn.Unused(steps=4)},
    "recent": {"evict": fleet.nn.MaxRows(7)},
    "often": {"evict": [fleet.nn.MaxRows(7, by="often"), fleet.nn.SmallNorm(0.1)]},
    "several": {"admit": fleet.nn.CountFilter(2), "evict": [fleet.nn.Unused(steps=9), fleet.nn.MaxRows(5)]},
}
_ROWS_LEAVE_EVERY, _SHRINKS_EVERY = 3, 5

#: Under these names an end has the steps as its worker has them, where that is not as the servers do; which rows of the
#: table that all share it holds, and what it takes the servers to have of them.
HERE, HELD, AGREED = "steps, here", "rows held", "rows agreed on"


class Model(torch.nn.Module):
    """Notes every step of every worker: by a gradient of one, in a place of its own in a parameter, and in a row. Two
    more tables and a layer make updates on which all that came before has its effect.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.steps = torch.nn.Parameter(torch.zeros(setting.all_workers, setting.steps))
        self.rows = fleet.nn.Embedding(None, 1, initializer="zeros")
        if setting.life:
            self.shared = fleet.nn.Embedding(None, 4, **LIVES[setting.life])
        else:
            self.shared = torch.nn.Embedding(40, 4, sparse=True)
        self.head = torch.nn.Linear(4, 1)
        self._lives, self._has_weights = bool(setting.life), setting.life == "weight"
        self._has_grown = False

    def grow(self) -> list[torch.nn.Parameter]:
        """Return parameters that take part from now on."""
        torch.manual_seed(2)
        self.late_rows, self.late_head = torch.nn.Embedding(40, 4, sparse=True), torch.nn.Linear(4, 1)
        self._has_grown = True
        return [*self.late_rows.parameters(), *self.late_head.parameters()]

    @torch.no_grad()
    def edit(self) -> None:
        """Write what is there as well if it is written twice, as by a script that was killed behind it."""
        self.head.weight.fill_(0.25)
        if not self._lives:
            self.shared.weight[2:5] = 0.5

    def loss(self, worker: int, step: int) -> torch.Tensor:
        own, ids = self.looked_up(worker, step).values()
        noted = self.steps[worker, step] + self.rows(own).sum()
        weights = {"weights": torch.tensor([0.5, 1.0])} if self._has_weights else {}
        computed = self.head(self.shared(ids, **weights))
        if self._has_grown:
            computed = computed + self.late_head(self.late_rows(ids))
        return noted + (computed.tanh() - 0.5).square().mean()

    def looked_up(self, worker: int, step: int) -> dict[torch.nn.Module, torch.Tensor]:
        """Return the ids that a step asks for of the tables that were there from the beginning."""
        ids = torch.tensor([step % 7, 10 + (worker * 3 + step) % 30])
        return {self.rows: torch.tensor([place(worker, step)]), self.shared: ids}


def place(worker: int, step: int) -> int:
    return 1000 * worker + step


def ids_of(setting: Setting) -> torch.Tensor:
    steps, workers = range(setting.steps), range(setting.all_workers)
    return torch.tensor([[place(worker, step) for step in steps] for worker in workers])


def noted(state: dict[str, torch.Tensor], setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what has become of every worker's every step, by the dense parameter and by the rows."""
    rows = torch.zeros(setting.all_workers * 1000)
    rows[state["rows.ids"]] = state["rows.weight"][:, 0]
    return state["steps"], rows[ids_of(setting)]


@dataclass
class Told:
    """Is what the workers of a job have seen."""

    #: steps that a worker has heard to be done: (worker, step)
    done: set[tuple[int, int]] = field(default_factory=set)
    #: workers that have no step left
    through: set[int] = field(default_factory=set)
    #: steps that a worker has begun
    begun: set[tuple[int, int]] = field(default_factory=set)
    #: when a worker has gone on after a step: (worker, steps done, steps that the slowest one has begun)
    went_on: list[tuple[int, int, int]] = field(default_factory=list)
    #: what each worker has in the end
    ends: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    #: where a life of a worker began, and how far the same worker had come by then: (worker, step, steps done)
    begins: list[tuple[int, int, int]] = field(default_factory=list)
    #: what a model that follows has had, in each of its lives: its version, and what ``noted`` says of its values
    followed: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = field(default_factory=list)
    #: of each checkpoint that can be gone back to: its step, and what ``noted`` says of it
    saved: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    #: what is wrong with checkpoints that are there
    damaged: list[str] = field(default_factory=list)
    #: by server, when it has served to the end: how every worker stands
    members: dict[str, dict[int, str]] = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept)

    def slowest(self, workers: int) -> int:
        """Return how many steps the slowest worker has begun."""
        begun = Counter(worker for worker, _ in self.begun)
        return min(begun[worker] for worker in range(workers))


@dataclass
class Outcome:
    scenario: Scenario
    told: Told
    #: by process: the error that its last life ended with
    errors: dict[str, BaseException]
    #: those that have not ended
    hang: list[str]
    messages: list[Message]
    #: faults that have come to pass, and when
    struck: list[tuple[float, Fault]]
    kills: Counter[str]
    lasted_s: float
    turns: int
    #: by process: the most requests that it has had to answer at a time
    most_held: Counter[str]
    #: what has come of a job that went on from its checkpoints when this one was over
    again: Outcome | None = None
    #: what the launcher of each machine has come to
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Return a number for all that has happened: two runs of a scenario have the same."""
        ends = [
            (worker, name, value.numpy().tobytes())
            for worker, end in sorted(self.told.ends.items())
            for name, value in end.items()
        ]
        told = (self.messages, self.struck, ends, sorted(self.told.done), sorted(map(str, self.errors.values())))
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


class _Life:
    """One process at a time under one name: started, killed, and started again."""

    def __init__(self, job: Simulation, name: str, run: Callable[[_Life], None]) -> None:
        self.job = job
        self.name = name
        self.launcher: Launcher | None = None
        self.is_down = True
        #: whether it is down and is not started again
        self.is_over = False
        self.process = Process(name)
        self.fleet: Fleet | None = None
        self.disk: Disk | None = None
        self._run = run

    def start(self) -> None:
        self.process = Process(self.name)
        self.process.disk = self.disk
        self.is_down = self.is_over = False
        self.thread = Thread(self.job.scheduler, self.process, self._live, self.name)
        self.thread.waiters.append(self.job.watcher)
        self.job.scheduler.start(self.thread)

    def _live(self) -> None:
        returncode = 1
        try:
            self._run(self)
            returncode = 0
        finally:
            self.job.groups.gone(self.process)
            if not self.process.is_dead:
                self._ended(returncode)

    @property
    def worker(self) -> Any:
        """Return what has joined the job here, and may not have left it."""
        chosen = None if self.fleet is None else self.fleet._chosen
        return None if chosen is None else chosen._worker

    @property
    def has_ended(self) -> bool:
        return self.is_over or (not self.is_down and self.thread.has_ended)

    @property
    def is_there(self) -> bool:
        """Say whether its main thread runs, and is not just the one that says so."""
        return not (self.is_down or self.thread.has_ended or self.job.scheduler.current is self.thread)

    def _ended(self, returncode: int) -> None:
        if self.launcher is not None:
            self.is_over = self.is_down
            broke_off = returncode == 0 and self.worker is not None and not self.worker.stopped
            self.launcher.exited(self.name, returncode, broke_off=broke_off)
        elif returncode < 0:  # whoever serves a model starts that again
            self.start()

    def kill(self, fault: Fault, number: Signals = SIGKILL) -> None:
        """End it as a signal or a power cut does; whoever starts it again hears of it some time later."""
        if self.is_down or self.thread.has_ended:
            return
        self.is_down = True
        self.job.kills[self.name.rstrip("0123456789")] += 1
        scheduler, process = self.job.scheduler, self.process
        self.job.wires.forget(process, silently=fault.kind == kinds.POWER)
        self.job.groups.gone(process, silently=fault.kind == kinds.POWER)
        scheduler.at(fault.for_s, partial(self._ended, -number))

        def unwind() -> None:
            scheduler.unwind(process)

        if self.disk is None:
            unwind()
        else:
            loses_power, turns_a_bit = fault.kind == kinds.POWER, fault.kind == kinds.BIT
            self.disk.killed(unwind, loses_power=loses_power, turns_a_bit=turns_a_bit)
        scheduler.leave(process)

    def signal(self, number: Signals) -> None:
        """Do what comes of its launcher's signal, on a thread: it may come while nobody's thread runs."""
        if not self.is_there:
            return
        name, scheduler = f"{self.name}-{number.name}", self.job.scheduler
        killed = partial(self.kill, Fault(0, kinds.KILL, self.name))
        if number == SIGKILL:
            scheduler.start(Thread(scheduler, Process("launcher"), killed, name))
        else:
            scheduler.start(Thread(scheduler, self.process, self._told_to_end, name))

    def _told_to_end(self) -> None:
        """End in order if it serves; else say so, as the guard of a worker does, and die."""
        if self.process.on_sigterm is not None:
            self.process.on_sigterm()
            return
        worker, scheduler = self.worker, self.job.scheduler
        if worker is not None:
            telling = Thread(scheduler, self.process, lambda: worker.end("it was ended by SIGTERM"), self.name)
            scheduler.start(telling)
            scheduler.join(telling, exit_guard.TELLING_S)
        self.kill(Fault(0, kinds.KILL, self.name), SIGTERM)


class Simulation:
    def __init__(self, scenario: Scenario, folder: Path, before: Simulation | None = None) -> None:
        """A job goes on from the checkpoints of the one ``before`` it."""
        self.scenario = scenario
        self.setting = setting = scenario.setting
        self.folder = folder
        self._goes_on = before is not None
        self.scheduler = Scheduler(scenario.seed, preemption=scenario.preemption)
        self.watcher = self.scheduler.current
        self.wires = Wires(self.scheduler, scenario.seed)
        self.wires.on_moment = self._moment
        self.groups = self.scheduler.groups = Groups(self.scheduler, self.wires)
        self.told = Told() if before is None else Told(kept=Kept(models=before.told.kept.models))
        self.kills: Counter[str] = Counter()
        self.struck: list[tuple[float, Fault]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._moments = 0
        self._draw = random.Random(f"damage {scenario.seed}")
        #: whether a worker has no step left, and whether all are saying goodbye
        self._is_near_its_end = self._is_ending = False
        self._storage = str(folder / "storage") if before is None else before._storage
        self._faults = {fault.moment: fault for fault in reversed(scenario.faults)}
        acts = {"server": self._serve, "worker": self._work, "follower": self._follow}
        self.lives = {name: _Life(self, name, acts[name.rstrip("0123456789")]) for name in setting.names}
        self._first = [self.lives[f"worker{index}"] for index in range(setting.workers)]
        self._joining = [self.lives[f"worker{setting.workers + index}"] for index in range(setting.joins)]
        self._launchers = self._launch()
        self._endpoints = _endpoints(setting.servers)
        self._environ = {
            "FLEET_JOB_ID": f"{JOB} again" if self._goes_on else JOB,
            "FLAGS_rpc_deadline": f"{kinds.DEADLINE_S * 1000:.0f}",
            "FLEET_HEARTBEAT_S": f"{kinds.HEARTBEAT_S}",
            # A server to which the job may move waits for that.
            "FLEET_STARTUP_DEADLINE_S": f"{kinds.DEADLINE_S * (10 if setting.moves_at else 1)}",
            "FLAGS_rpc_retry_times": "1000000",
            "FLEET_EVICT_EVERY": f"{_ROWS_LEAVE_EVERY}",
        }
        if setting.durable or setting.rows_in_memory:
            for life in self.lives.values():
                if life.name.startswith("server"):
                    life.disk = Disk(folder / life.name, f"{scenario.seed} {life.name}", self._moment, setting.sync_s)

    def _launch(self) -> list[Launcher]:
        """Give every process a launcher: one for all that the job begins with, or each its own, as on machines of their
        own."""
        setting, scenario = self.setting, self.scenario
        # A model that is served is no part of the job.
        apart = [life for life in self.lives.values() if life.name != kinds.FOLLOWER]
        together = [self.lives[f"server{index}"] for index in range(setting.servers)] + self._first
        machines = [[life] for life in apart if not (scenario.is_one_machine and life in together)]
        if scenario.is_one_machine:
            machines.insert(0, together)
        launchers = []
        for lives in machines:
            launcher = Launcher(
                self.scheduler, lives, setting.workers, scenario.max_restarts, self.folder, self._wake_watcher
            )
            launchers.append(launcher)
            for life in lives:
                life.launcher = launcher
        return launchers

    def _wake_watcher(self) -> None:
        self.scheduler.wake(self.watcher)

    # ---------------------------------------------------------------- what its processes do

    def _fleet(self, life: _Life, role: Role) -> Fleet:
        environ = dict(self._environ)
        if life.disk is not None and self.setting.durable:
            environ |= {"FLEET_DURABLE_DIR": str(life.disk.folder), "FLEET_DURABLE_SYNC": self.setting.durable}
        if life.disk is not None and self.setting.rows_in_memory:
            environ |= {"FLEET_TABLE_DIR": str(self._rows_of(life)), "FLEET_TABLE_MEMORY_MB": "64"}
        life.fleet = Fleet(environ=environ, network=self.wires.of(life.process))
        index = int(life.name[len("worker") :])
        comes_later = role is Role.SERVER and index >= self.setting.servers
        endpoints = _endpoints(self.setting.moves_to) if comes_later else self._endpoints
        is_late = role is Role.WORKER and index >= self.setting.workers
        workers = self.setting.all_workers if is_late else self.setting.workers
        life.fleet.init(UserDefinedRoleMaker(index, role, workers, endpoints))
        return life.fleet

    def _rows_of(self, life: _Life) -> Path:
        return self.folder / "rows" / life.name

    def _serve(self, life: _Life) -> None:
        here = self._fleet(life, Role.SERVER)
        if self._goes_on:
            here.resume_from(self._storage)
        here.init_server()
        try:
            here.run_server()
        except TableFileError:  # a durable one makes its rows anew when it is started again, as after a signal
            if self.setting.durable:
                life.kill(Fault(0, kinds.KILL, life.name, _STARTS_AGAIN_AFTER_S))
            raise

    def _work(self, life: _Life) -> None:
        setting, told = self.setting, self.told
        if not self._may_join(life):
            return
        here = self._fleet(life, Role.WORKER)
        worker = here.worker_index()
        try:
            torch.manual_seed(1)
            model = Model(setting)
            went_on_at = here.resume_from(self._storage) if self._goes_on else 0
            has_grown = 0 < setting.grows_at < went_on_at
            if has_grown:
                model.grow()
            options: dict[str, Any] = {"elastic": True} if setting.joins else {}
            if setting.dense != "servers":
                options["dense"] = setting.dense
            if setting.clip:
                options["max_grad_norm"] = setting.clip
            strategy = STRATEGIES[setting.mode](**options)
            optimizer = here.distributed_optimizer(_optimizers(setting, model), strategy, model=model)
            here.init_worker()
            acts = Acts(here, setting, told.kept, model, optimizer, self.folder)
            begin = setting.steps  # of one that was killed in its goodbye
            if worker not in told.through:
                begin, heard = here.resume_step(), sum(each == worker for each, _ in told.done)
                told.begins.append((worker, begin, heard))
                told.begun |= {(worker, step) for step in range(begin if self._goes_on else 0)}
                acts.begin(begin, heard)
            saving = self._checkpoints(here, acts.state)
            if 0 < setting.grows_at < begin and not has_grown:  # it was killed later than that
                optimizer.add_param_group({"params": model.grow()})
            with contextlib.closing(acts.steps(begin)) as steps:
                for step in steps:
                    if step == setting.grows_at > 0:
                        optimizer.add_param_group({"params": model.grow()})
                    if step == setting.edits_at > 0:
                        model.edit()
                    if setting.life and step and step % _SHRINKS_EVERY == 0:
                        here.shrink()
                    if worker == 0 and step == setting.moves_at > 0:
                        self._move(here)
                    told.begun.add((worker, step))
                    optimizer.minimize(model.loss(worker, step))
                    told.done.add((worker, step))
                    told.went_on.append((worker, step + 1, told.slowest(setting.workers)))
                    _save(saving, "after_step")
                    self.scheduler.block(self.wires.draw.uniform(*_THINKS_S))
            _save(saving, "close")
            if worker >= setting.workers:
                told.through.add(worker)
                here.stop_worker()
                return
            self._await_others(here)
            agreed = _agreed(here) if setting.mode == "geo" else {}
            told.ends[worker] = {**here.state_dict(model), **agreed}
            if agreed:
                told.ends[worker][HERE] = model.steps.detach().clone()
            here.stop_worker()
        except Exception as error:
            if here._chosen is not None:  # as the guard of a script does that ends by an exception
                here._chosen.abort(repr(error))
            raise

    def _move(self, here: Fleet) -> None:
        """Move the job, or have it stay where it is if that fails: the next step tells whether it goes on."""
        with contextlib.suppress(FleetError):
            here.resize_servers(_endpoints(self.setting.moves_to))

    def _may_join(self, life: _Life) -> bool:
        """Wait until a worker is to join the job, if it does not begin with it; say whether the job is still there."""
        if life not in self._joining:
            return True
        awaited = self.setting.joins_at * self.setting.workers
        while len(self.told.done) < awaited and not (self._is_near_its_end or self._is_over(self._first)):
            self.scheduler.block(0.01)
        return not self._is_over(self._first)

    def _await_others(self, here: Fleet) -> None:
        """Wait until all steps are done. In turns, a worker that starts again may have a step left when others are at a
        barrier, and needs them in it: there they wait without a word to the servers. So they do for those who have
        joined, and leave."""
        self._is_near_its_end = True  # of a worker that was killed it is not known that all its steps are done
        if self.scenario.leaves_who_is_killed:  # it would wait for those who wait for it
            return
        while not self._is_over(self._joining):
            self.scheduler.block(0.01)
        if self.setting.mode != "auto":
            here.barrier_worker()
        self.told.through.add(here.worker_index())
        others = [life for life in self._first if life.name != f"worker{here.worker_index()}"]
        while self.setting.mode == "auto" and len(self.told.through) < self.setting.workers:
            if self._is_over(others):
                break
            self.scheduler.block(0.01)

    def _checkpoints(self, here: Fleet, state: dict[str, Any] | None) -> Checkpoints | None:
        every_steps = self.setting.checkpoint_every
        if not every_steps:
            return None
        return Checkpoints(self._storage, every_steps=every_steps, full_every=2, state=state, fleet=here)

    def forget_later_half(self) -> None:
        """Remove the later checkpoints, so that a job that goes on from the others has steps to take."""
        for checkpoint in complete(place_at(self._storage)):
            if checkpoint.manifest.version > self.setting.steps // 2:
                shutil.rmtree(checkpoint.where)

    def _follow(self, life: _Life) -> None:
        """Look at what a model has that is served, again and again, until the job is over."""
        ids, had = ids_of(self.setting), []
        self.told.followed.append(had)
        model = Model(self.setting).eval()
        servers = [Endpoint.parse(each) for each in self._endpoints]
        source = ServerSource(servers, self.wires.of(life.process), startup_s=kinds.DEADLINE_S, poll_s=0.02)
        follower = Follower(FollowedModel(model, None, 256 << 20), source, "the servers")
        try:
            follower.begin(kinds.DEADLINE_S)
            while not self._workers_are_over:
                with follower.pinned(), torch.no_grad():
                    had.append((follower.version, model.steps.clone(), model.rows(ids)[..., 0].clone()))
                self.scheduler.block(0.03)
        except FleetError:
            if not self._workers_are_over:  # then there is nobody any more
                raise
        finally:
            follower.close()

    @property
    def _workers_are_over(self) -> bool:
        return self._is_over([life for life in self.lives.values() if life.name.startswith("worker")])

    @staticmethod
    def _is_over(lives: Iterable[_Life]) -> bool:
        return all(life.has_ended for life in lives)

    # ---------------------------------------------------------------- what befalls it

    def _moment(self, what: str = "") -> str:
        """Let happen what is due at this moment; return what becomes of the message, if it is one. Goodbyes of a job
        that ends are spared: the last of them ends its server, and a worker that does not hear that waits until its
        deadline. So is all that comes after the last worker's first one."""
        is_a_last_one = what.startswith("bye") and bool(self.told.ends)
        if is_a_last_one:
            self._is_ending = len(self.told.ends) == self.setting.workers
        if self._is_ending or is_a_last_one:
            return ""
        self._moments += 1
        fault = self._faults.pop(self._moments, None)
        if fault is None:
            return ""
        self.struck.append((self.scheduler.now, fault))
        if fault.kind in kinds.MESSAGE_FAULTS:
            return fault.kind
        life = self.lives.get(fault.whom)
        if life is not None:
            self._strike(life, fault)
        return ""

    def _strike(self, life: _Life, fault: Fault) -> None:
        scheduler, wires, process = self.scheduler, self.wires, life.process
        if fault.kind in (kinds.KILL, kinds.POWER, kinds.BIT):
            life.kill(fault)
        elif fault.kind == kinds.PAUSE:
            scheduler.pause(process)
            scheduler.at(fault.for_s, lambda: scheduler.resume(process))
        elif fault.kind in (kinds.CUT, kinds.CUT_IN, kinds.CUT_OUT):
            for other in self.lives:
                if fault.kind != kinds.CUT_OUT:
                    wires.cut(other, life.name)
                if fault.kind != kinds.CUT_IN:
                    wires.cut(life.name, other)
            scheduler.at(fault.for_s, wires.heal)
        elif fault.kind == kinds.ROWS:
            turn_a_bit(self._rows_of(life), self._draw)
        elif fault.kind == kinds.CLOCK:
            process.wall_offset_s += fault.for_s * 1000 - 3000
        elif life.disk is not None:
            disk, what = life.disk, "is_full" if fault.kind == kinds.FULL else "lies"
            setattr(disk, what, True)
            scheduler.at(fault.for_s, lambda: setattr(disk, what, False))

    # ---------------------------------------------------------------- the run

    def run(self) -> Outcome:
        with installed(self.scheduler, self.scenario.seed, self._claim), pytest.MonkeyPatch.context() as patch:
            tiny_journals(patch, self.setting.journal_bytes)
            self._note_members(patch)
            if self.setting.rows_in_memory:
                tiny_tiers(patch, self.setting.rows_in_memory, 512)
            for life in self.lives.values():
                life.start()
            until = PATIENCE_S
            needed = [life for life in self.lives.values() if not self._may_be_left(life)]
            while self.scheduler.now < until and not all(life.has_ended for life in needed):
                self.scheduler.block(until - self.scheduler.now)
            hang = [life.name for life in needed if not life.has_ended]
            lasted_s = self.scheduler.now
            ended = [life for life in needed if life.has_ended]
            errors = {life.name: life.thread.error for life in ended if life.thread.error is not None}
            for life in self.lives.values():
                self.scheduler.unwind(life.process)
                if life.disk is not None:
                    life.disk.close()
        if self.setting.checkpoint_every:
            self._look_at_checkpoints()
        return Outcome(
            self.scenario,
            self.told,
            errors,
            hang,
            self.wires.messages,
            self.struck,
            self.kills,
            lasted_s,
            self.scheduler.turns,
            self.wires.most_held,
            verdicts=[launcher.verdict for launcher in self._launchers],
        )

    def _may_be_left(self, life: _Life) -> bool:
        """Say whether nobody waits for its end. A launcher of several processes ends what is left."""
        is_alone = not self.scenario.is_one_machine or life.launcher is not self._launchers[0]
        return is_alone and self.scenario.may_be_left(life.name)

    def _claim(self, _: str, *word: str) -> None:
        """Note a cause where launchers look for it, though no other records are kept."""
        claim(str(self.folder), *word)

    def _note_members(self, patch: pytest.MonkeyPatch) -> None:
        serve = ServerRuntime.run

        def noting(server: ServerRuntime) -> None:
            serve(server)
            if not server._service.end.over or server._service.failure is not None:  # it was told to end
                return
            stand = {worker: standing for worker, standing, *_ in server._service._members.glance(0.0)}
            self.told.members[self.scheduler.current.process.name] = stand

        patch.setattr(ServerRuntime, "run", noting)

    def _look_at_checkpoints(self) -> None:
        root, verified = place_at(self._storage), set[str]()
        for checkpoint in complete(root):  # the latest first, with what they go on from
            if checkpoint.where not in verified:
                verified |= {each.where for each in checkpoint.lineage()}
                problems = [found for found in verify(checkpoint.where) if isinstance(found, Problem)]
                self.told.damaged += [f"{found.where}: {found.what}" for found in problems]
                if problems:
                    continue
            (steps,) = parameters(checkpoint, {"steps"})
            table = next(each for each in checkpoint.manifest.spec.tables if each.name == "rows.weight")
            rows = Rows(checkpoint, table)
            values = np.zeros((len(rows.ids), 1), np.float32)
            rows.fill({WEIGHT: values})
            state = {
                "steps": steps.value,
                "rows.ids": torch.from_numpy(rows.ids),
                "rows.weight": torch.from_numpy(values),
            }
            self.told.saved.append((checkpoint.manifest.version, *noted(state, self.setting)))


def _optimizers(setting: Setting, model: Model) -> Any:
    """Return one for all parameters, or what a setting has beside that of the parameters that note steps."""
    kind = getattr(torch.optim, setting.optimizer)
    if not setting.beside:
        return kind(model.parameters(), lr=0.5)
    noting = [model.steps, *model.rows.parameters()]
    others = [param for param in model.parameters() if not any(param is each for each in noting)]
    if setting.beside == "group":
        return kind([{"params": noting}, {"params": others, "lr": 0.1, "weight_decay": 0.01}], lr=0.5)
    return [kind(noting, lr=0.5), torch.optim.Adagrad(others, lr=0.1)]


def _endpoints(servers: int) -> list[str]:
    return [f"server{index}:1" for index in range(servers)]


def _agreed(here: Fleet) -> dict[str, torch.Tensor]:
    """Let a GEO worker hear of all that others have changed; return what it takes the servers to have."""
    assert here._chosen is not None
    worker = here._chosen._worker  # type: ignore[attr-defined]
    geo = worker._geo
    worker.following(lambda: geo._agree(geo.replica))
    (index,) = [index for index, each in enumerate(worker.trained.plan.spec.tables) if each.name == "shared.weight"]
    rows, ids = geo.replica._tables[index]._agreed, np.arange(40)
    held = ids[rows.known(ids)]
    return {HELD: torch.from_numpy(held), AGREED: torch.from_numpy(rows.read(held, True))}


def _save(checkpoints: Checkpoints | None, call: str) -> None:
    """Have a checkpoint written if it is time; one that comes to nothing costs nobody anything but itself."""
    if checkpoints is not None:
        with contextlib.suppress(CheckpointError):
            getattr(checkpoints, call)()


def run(scenario: Scenario, folder: Path) -> Outcome:
    """Run a scenario, with a folder that is there for it alone and is gone afterwards."""
    try:
        job = Simulation(scenario, folder)
        outcome = job.run()
        # Checkpoints lack the steps of a worker that the others have gone on without.
        if scenario.setting.goes_on and not (outcome.hang or scenario.is_given_up):
            job.forget_later_half()
            again = replace(scenario, setting=replace(scenario.setting, goes_back_at=0), faults=())
            outcome.again = Simulation(again, folder / "again", job).run()
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)
