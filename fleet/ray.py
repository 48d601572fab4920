"""Runs a job on a Ray cluster: ``fleet.ray.run`` starts servers and workers as actors, and returns what the workers do.

The actors' places are one placement group. Addresses are those of the nodes that Ray has chosen. Each actor gets the
variables of its part in the job, and calls the user's function, whose ``fleet.init()`` finds its role by them.

An actor that is lost may be started again. A worker rejoins its job; so does a server that finds its journal and its
endpoint. Otherwise all actors start again: servers follow their journals to other endpoints, or begin with the newest
checkpoint. What a function raises is never tried again.

Workers that may join later have no place in the group. Their actors wait for one from the beginning on, which an
autoscaler sees, and each does its part once it has started.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from fleet.base import checks
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint, Role, parse_address
from fleet.base.exit_guard import dismiss
from fleet.base.file_lock import locked
from fleet.base.ports import is_taken
from fleet.base.settings import (
    PROCESS_ENVIRONMENT,
    SETTINGS,
    ProcessSettings,
    change_process_environment,
    under_present_names,
)
from fleet.base.unknown_variables import remark
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DeadlineError,
    IdentityError,
    JobAbortedError,
    ServerLostError,
    UnsupportedError,
)
from fleet.launch.host_network import hold_port
from fleet.launch.process_plan import ProcessSpec, child_environment, plan_launch

_log = logging.getLogger("fleet.ray")

#: Threads may run jobs at once: one of them connects to the cluster.
_connecting = threading.Lock()

#: How long a process that has failed may take to tell so after those who heard of it.
_ON_ITS_WAY_S = 10.0
#: How long an actor that has done its part may take to leave.
_LEAVING_S = 10.0
#: How often it is looked whether there is room for the actors yet.
_LOOK_S = 1.0
#: What a process raises that has heard of another's end, or of no end at all.
_MESSENGERS = (JobAbortedError, DeadlineError, ServerLostError)
#: What a worker raises that would join a job that is over.
_TOO_LATE = (IdentityError, *_MESSENGERS)


def run(
    function: Callable[..., Any],
    *args: Any,
    server_num: int,
    worker_num: int,
    max_worker_num: int | None = None,
    resources_per_server: Mapping[str, float] | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    max_restarts: int = 0,
    storage: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on every server and worker of a job, each a Ray actor, and return the workers' results in
    the order of their indices. If one fails, the job ends, and the error names it and has its exception as the cause.

    Resources are Ray's, as ``{"CPU": 4, "GPU": 1}``; one CPU each by default. Each actor that is lost with its process
    or node is started again up to ``max_restarts`` times. With ``storage``, a directory that all nodes see, servers
    keep a journal there, from which they go on.

    An elastic job begins with ``worker_num`` workers, and others join it, up to ``max_worker_num``, as soon as Ray has
    places for them; its autoscaler may add nodes for that. The results are those of the workers that came.

    Examples:
        >>> def accuracies():
        ...     return fleet.ray.run(train, "clicks.parquet", server_num=2, worker_num=4)
        >>> fleet.ray.run(print, "clicks.parquet", server_num=0, worker_num=4)
        Traceback (most recent call last):
            ...
        fleet.errors.ConfigurationError: server_num is out of range; expected at least 1; got 0
    """
    if not callable(function):
        raise ArgumentTypeError("function must be a function", got=type(function).__name__)
    checks.whole("server_num", server_num, 1)
    checks.whole("worker_num", worker_num, 1)
    checks.whole("max_restarts", max_restarts, 0)
    most = worker_num if max_worker_num is None else checks.whole("max_worker_num", max_worker_num, worker_num)
    needs = {
        Role.SERVER: _resources("resources_per_server", resources_per_server),
        Role.WORKER: _resources("resources_per_worker", resources_per_worker),
    }
    environ = under_present_names(PROCESS_ENVIRONMENT)
    folder = _storage(storage, environ)
    settings = ProcessSettings.read(environ)
    remark(environ)
    ray = _ray()
    with _connecting:
        if not ray.is_initialized():
            ray.init()
    job_id = settings.job_id or secrets.token_hex(8)
    parts = [_Part(Role.SERVER, index, needs[Role.SERVER]) for index in range(server_num)]
    parts += [_Part(Role.WORKER, index, needs[Role.WORKER], is_late=index >= worker_num) for index in range(most)]
    if folder is not None:
        for part in parts[:server_num]:
            part.keeps_in = str(folder / f"fleet-{job_id.replace('/', '_')}" / f"server-{part.index}")
    variables = {name: value for name, value in environ.items() if name in SETTINGS}
    variables |= {"FLEET_JOB_ID": job_id, "FLEET_LAUNCHER": "ray", **_key(settings)}
    first = [part for part in parts if not part.is_late]
    with _placement_group(ray, first, job_id, settings.startup_deadline_s) as group:
        return _Job(ray, group, parts, variables, settings, max_restarts, ray.put((function, args))).run()


# ---------------------------------------------------------------------------------------------- what is asked for


def _ray() -> Any:
    try:
        import ray
        import ray.util
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        # Python's own kind, as scripts catch it that can do without.
        needs = "fleet.ray needs Ray: pip install 'torch-fleet[ray]'"
        raise ModuleNotFoundError(needs, name=error.name) from None
    return ray


def _resources(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    if given is None:
        return {"CPU": 1}
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
        raise ArgumentTypeError(f"{name} must be a dict of Ray's resources", expected='{"CPU": 1}', got=repr(given))
    found = {kind: checks.number(f"{name}[{kind!r}]", amount, 0) for kind, amount in given.items()}
    asked = {kind: amount for kind, amount in found.items() if amount}
    if not asked:
        raise ConfigurationError(
            f"{name} asks for nothing, and Ray has no place for that",
            expected='{"CPU": 1} or some part of it',
            got=given,
        )
    return asked


def _storage(storage: object, environ: Mapping[str, str]) -> Path | None:
    if storage is None:
        return None
    if isinstance(storage, bytes) or not isinstance(storage, str | os.PathLike):
        raise ArgumentTypeError("storage must be a path", got=repr(storage))
    text = os.fspath(storage)
    if "://" in text:
        raise UnsupportedError(
            "storage is for the journals of servers, which are written to a file system",
            expected="a directory that all nodes see",
            got=text,
            todo="Checkpoints may go to a URL: fleet.Checkpoints and fleet.resume_from in the function take one.",
        )
    if environ.get("FLEET_DURABLE_DIR", "").strip():
        raise ConfigurationError(
            "FLEET_DURABLE_DIR and storage= both say where servers keep their journals",
            got=f"{environ['FLEET_DURABLE_DIR']!r} and {text!r}",
            todo="Leave one of them out.",
        )
    return Path(text).absolute()


def _key(settings: ProcessSettings) -> dict[str, str]:
    """Return a token for this job alone where the user has said nothing of who may join it."""
    security = settings.security
    if security.token or security.cert or security.ca or security.insecure:
        return {}
    return {"FLEET_AUTH_TOKEN": secrets.token_hex(32)}


# ---------------------------------------------------------------------------------------------- an actor


@contextmanager
def _lost_by_sigterm() -> Iterator[None]:
    """Let a process that Ray ends, with its node, say, leave its job without a word, also in a script's ``finally``: it
    is lost, and starts again."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_sigterm(number: int, frame: Any) -> None:
        dismiss()
        handler(number, frame)

    # For those who ask whose it is: Ray's, as it was.
    on_sigterm.__module__ = getattr(handler, "__module__", None) or ""
    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


class Member:
    """Is one process of the job: Ray makes an actor of it."""

    def __init__(self, name: str, keeps_in: str, threads: int) -> None:
        """``threads`` is how many torch is to compute with; it reads that when it is imported."""
        change_process_environment({**PROCESS_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)})
        self._name = name
        self._keeps_in = keeps_in
        self._held: Any = None

    def __repr__(self) -> str:
        """Return what Ray writes before each line that this process prints."""
        return self._name

    def look_around(self, port: int) -> tuple[str, int, bool]:
        """Return the node's address, a port there that is free, and whether the journal of a server that was here
        before is in sight. It is the given port if that is free."""
        import ray

        host = parse_address(ray.util.get_node_ip_address())[0]
        if not port or is_taken(Endpoint(host, port)):
            self._held = hold_port(host)
            port = self._held.getsockname()[1]
        return host, port, bool(self._journals())

    def prepare(self) -> None:
        """Import what takes long, torch above all, as this has to wait until all actors have looked around."""
        with suppress(Exception):  # which is told by whoever needs it
            import_module("fleet.ps.backend")

    def forget(self) -> None:
        """Remove the journal."""
        for journal in self._journals():
            shutil.rmtree(journal)

    def work(self, call: tuple[Callable[..., Any], tuple[Any, ...]], process: ProcessSpec) -> Any:
        """Do this process's part of the job, and return what the user's function does."""
        if self._keeps_in:
            self._take_over(Endpoint.parse(process.environment["PADDLE_CURRENT_ENDPOINT"]))
        change_process_environment(child_environment(PROCESS_ENVIRONMENT, process))
        if self._held is not None:
            self._held.close()
        function, args = call
        try:
            with _lost_by_sigterm():
                result = function(*args)
        except SystemExit as end:  # a server's script may end so, as that of ``fleet.join`` does
            if hasattr(end, "ray_terminate_msg") and end.code:
                raise  # Ray ends this process
            if end.code not in (None, 0):
                raise RuntimeError(f"the function ended with exit code {end.code}") from end
            result = None
        if self._keeps_in:  # servers have removed what they kept
            with suppress(OSError):
                os.rmdir(self._keeps_in)
                os.rmdir(Path(self._keeps_in).parent)
        return result

    def _journals(self) -> list[Path]:
        return list(Path(self._keeps_in).glob("*/")) if self._keeps_in else []

    def _take_over(self, endpoint: Endpoint) -> None:
        """Bring the journal to where a server of this endpoint looks for it, once its writer is gone."""
        clock = SystemClock()
        for journal in self._journals():
            descriptor = os.open(journal, os.O_RDONLY)
            try:
                began = clock.now()
                while locked(descriptor) is False and clock.now() - began < _LEAVING_S:
                    clock.sleep(0.05)
                os.rename(journal, journal.with_name(endpoint.folder_name))
            finally:
                os.close(descriptor)


# ---------------------------------------------------------------------------------------------- the job


@dataclass(eq=False)
class _Part:
    """Is one process of the job, whichever actor it is at the time."""

    role: Role
    index: int
    needs: Mapping[str, float]
    #: where a server has its journal, if it keeps one
    keeps_in: str = ""
    #: whether it joins a job that has begun, once there is a place
    is_late: bool = False
    actor: Any = None
    #: how often it was lost, and how many actors it has been
    losses: int = 0
    starts: int = 0
    host: str = ""
    port: int = 0
    has_journal: bool = False
    result: Any = field(default=None, repr=False)
    has_ended: bool = False

    @property
    def name(self) -> str:
        return f"{self.role.name.lower()} {self.index}"

    @property
    def where(self) -> str:
        return f"{self.name}, on {self.host}" if self.host else self.name


class _Job:
    """Starts the actors, waits for them, and leaves none behind."""

    def __init__(
        self,
        ray: Any,
        group: Any,
        parts: Sequence[_Part],
        variables: Mapping[str, str],
        settings: ProcessSettings,
        max_restarts: int,
        call: Any,
    ) -> None:
        self._ray = ray
        self._group = group
        self._parts = parts
        self._variables = variables
        self._settings = settings
        self._max_restarts = max_restarts
        self._call = call
        self._clock = SystemClock()
        #: what is under way, who will say where it is, and what goes on as its actor leaves
        self._working: dict[Any, _Part] = {}
        self._coming: dict[Any, _Part] = {}
        self._leaving: list[Any] = []
        #: who has failed as if by another's failure, and until when that one may still come
        self._suspect: tuple[_Part, BaseException, float] | None = None

    def run(self) -> list[Any]:
        try:
            self._start_all()
            while self._working:
                awaited = [*self._working, *self._coming]
                done, _ = self._ray.wait(awaited, num_returns=1, timeout=self._patience_s())
                for each in done:
                    if each in self._coming:
                        self._came(each)
                    else:
                        self._ended(each)
                if not done:
                    self._waited_in_vain()
                if self._coming and not self._has_workers:  # whoever comes now comes too late
                    self._kill(list(self._coming.values()))
            if self._suspect is not None:  # all others have ended well
                self._hold_against(*self._suspect[:2])
            self._ray.wait(self._leaving, num_returns=len(self._leaving), timeout=_LEAVING_S)
            workers = [part for part in self._parts if part.role is Role.WORKER]
            return [part.result for part in workers if part.has_ended or not part.is_late]
        except BaseException:
            self._tell_what_stays()
            raise
        finally:
            self._kill(self._parts)

    def _patience_s(self) -> float | None:
        """Return how long to wait for the end of somebody's work. That of a worker may be any time away."""
        if self._suspect is not None:
            return max(0.0, self._suspect[2] - self._clock.now())
        if not self._has_workers:
            return self._settings.rpc_deadline_s + _LEAVING_S
        return None

    @property
    def _has_workers(self) -> bool:
        """Say whether a worker still does its part."""
        return any(part.role is Role.WORKER for part in self._working.values())

    def _waited_in_vain(self) -> None:
        if self._suspect is not None:
            self._hold_against(*self._suspect[:2])
            return
        late = ", ".join(part.where for part in self._working.values())
        raise DeadlineError(
            "a server does not end, and all workers have",
            where=late,
            expected="fleet.run_server() to return after the last worker's fleet.stop_worker()",
        )

    # ---------------------------------------------------------------- starting

    def _start_all(self) -> None:
        first = [part for part in self._parts if not part.is_late]
        for part in first:
            self._make_actor(part)
        self._look_around(first)
        keeping = [part for part in self._parts if part.keeps_in]
        if any(part.has_journal for part in keeping) and not all(part.has_journal for part in keeping):
            lost = ", ".join(part.name for part in keeping if not part.has_journal)
            _log.warning("nothing is left of the journal of %s: the job begins with the newest checkpoint", lost)
            for part, answer in [(part, part.actor.forget.remote()) for part in keeping]:
                try:
                    self._heard(part, answer)
                except self._ray.exceptions.RayActorError as error:
                    self._fail(part, error)
        self._begin(first)
        for part in self._parts[len(first) :]:
            if not part.has_ended:
                self._expect(part)
        servers = [part for part in self._parts if part.role is Role.SERVER]
        endpoints = ", ".join(f"{part.host}:{part.port}" for part in servers)
        _log.info("job %s has its servers at %s", self._variables["FLEET_JOB_ID"], endpoints)

    def _make_actor(self, part: _Part) -> None:
        needs = dict(part.needs)
        in_group = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        bundle = self._parts.index(part)
        name = f"fleet-{part.role.name.lower()}-{part.index}" + (f".{part.starts}" if part.starts else "")
        part.starts += 1
        part.host = ""
        part.has_ended = False
        part.actor = (
            self._ray.remote(Member)
            .options(
                name=name,
                namespace=f"fleet-{self._variables['FLEET_JOB_ID']}",
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                memory=needs.pop("memory", None),
                resources=needs,
                scheduling_strategy="DEFAULT"
                if part.is_late
                else in_group(self._group, placement_group_bundle_index=bundle),
            )
            .remote(name, part.keeps_in, max(1, int(part.needs.get("CPU", 1))))
        )

    def _ask(self, part: _Part) -> Any:
        """Have it say where it is, and then use its time as long as there is nothing else to do."""
        answer = part.actor.look_around.remote(part.port if part.role is Role.SERVER else 0)
        part.actor.prepare.remote()
        return answer

    def _look_around(self, parts: Sequence[_Part]) -> None:
        """Learn where Ray has put them, and start those again that are lost before they say it."""
        asked = [(part, self._ask(part)) for part in parts]
        for part, answer in asked:
            while True:
                try:
                    part.host, part.port, part.has_journal = self._heard(part, answer)
                    break
                except self._ray.exceptions.RayActorError as error:
                    self._count_loss(part, error)
                    self._make_actor(part)
                    answer = self._ask(part)

    def _heard(self, part: _Part, answer: Any) -> Any:
        """Return what an actor answers before it works. That it is lost is an error of Ray's."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(answer, timeout=self._settings.startup_deadline_s)
        except exceptions.GetTimeoutError:
            raise DeadlineError(
                "an actor did not start",
                where=part.name,
                expected=f"within {self._settings.startup_deadline_s:g} s (FLEET_STARTUP_DEADLINE_S)",
                todo="Ray's dashboard, or `ray status`, shows what it waits for.",
            ) from None
        except exceptions.RayActorError:
            raise
        except exceptions.RayError as error:
            self._fail(part, error)

    def _expect(self, part: _Part) -> None:
        """Have a worker come as soon as there is a place for it."""
        self._make_actor(part)
        self._coming[self._ask(part)] = part

    def _came(self, answer: Any) -> None:
        part = self._coming.pop(answer)
        try:
            part.host, part.port, part.has_journal = self._heard(part, answer)
        except self._ray.exceptions.RayActorError as error:
            self._lost(part, error)
            return
        _log.info("%s joins the job", part.where)
        self._begin([part])

    def _begin(self, parts: Sequence[_Part]) -> None:
        """Let them do their parts: any of those that the job begins with, or one that joins."""
        servers = [Endpoint(part.host, part.port) for part in self._parts if part.role is Role.SERVER]
        if parts[0].is_late:  # who joins is told of as many workers as make its index one of them
            hosts = [parts[0].host] * (parts[0].index + 1)
        else:
            hosts = [part.host for part in self._parts if part.role is Role.WORKER and not part.is_late]
        plan = plan_launch(
            servers=servers,
            worker_hosts=hosts,
            here={*hosts, *(server.host for server in servers)},
            command=(),
            job_id=self._variables["FLEET_JOB_ID"],
            inherited={"OMP_NUM_THREADS": "set, by each actor's CPUs"},
            record_dir=self._settings.observing.record_dir,
            metrics_port=self._settings.observing.metrics_port,
        )
        for part in parts:
            spec = plan.processes[self._parts.index(part)]
            kept = {"FLEET_DURABLE_DIR": part.keeps_in} if part.keeps_in else {}
            environment = {**spec.environment, **self._variables, **kept}
            environment["FLEET_METRICS_PORT"] = spec.environment.get("FLEET_METRICS_PORT", "")
            process = ProcessSpec(part.role, part.index, (), environment)
            self._working[part.actor.work.remote(self._call, process)] = part

    # ---------------------------------------------------------------- ends

    def _ended(self, work: Any) -> None:
        part = self._working.pop(work)
        exceptions = self._ray.exceptions
        try:
            part.result = self._ray.get(work)
        except (exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.OutOfMemoryError) as error:
            self._lost(part, error)
        except exceptions.RayError as error:
            self._failed(part, error)
        else:
            part.has_ended = True
            # What its script leaves to the end of the process, as ``fleet.join`` does, happens then.
            self._leaving.append(part.actor.__ray_terminate__.remote())

    def _failed(self, part: _Part, error: BaseException) -> None:
        """End the job, unless this one may only have heard of the failure that ends it."""
        if not isinstance(getattr(error, "cause", error), _TOO_LATE if part.is_late else _MESSENGERS):
            self._fail(part, error)
        if self._suspect is None or (self._suspect[0].is_late and not part.is_late):
            self._suspect = part, error, self._clock.now() + _ON_ITS_WAY_S

    def _hold_against(self, part: _Part, error: BaseException) -> None:
        """End the job for a failure that nobody else explains, unless it came of the job's end."""
        if not part.is_late or not all(each.has_ended for each in self._parts if each.role is Role.SERVER):
            self._fail(part, error)
        _log.info("%s came when the job was over", part.where)
        self._suspect = None

    def _fail(self, part: _Part, error: BaseException) -> NoReturn:
        cause = getattr(error, "cause", error)
        told = str(cause).strip() or "no more"
        raise JobAbortedError(
            f"{part.name} failed",
            where=f"node {part.host}" if part.host else None,
            got=f"{type(cause).__name__}: {told}",
        ) from error

    def _count_loss(self, part: _Part, error: BaseException) -> None:
        """Let who has died be started again, or end the job."""
        if part.losses >= self._max_restarts:
            self._fail(part, error)
        part.losses += 1
        _log.warning("%s was lost; starting it again (restart %d of %d)", part.where, part.losses, self._max_restarts)

    def _lost(self, part: _Part, error: BaseException) -> None:
        """Start again who has died, or end the job."""
        self._count_loss(part, error)
        if part.is_late:  # nobody else fails of that
            self._expect(part)
            return
        # Who has failed as if by this loss has ended, and would not come back by itself.
        is_alone, self._suspect = self._suspect is None, None
        host, port = part.host, part.port
        self._make_actor(part)
        self._look_around([part])
        finds_itself = part.has_journal and (part.host, part.port) == (host, port)
        if is_alone and (part.role is Role.WORKER or finds_itself):
            self._begin([part])
            return
        why = "is not where it was" if is_alone else "was missed by others, which have ended"
        _log.warning("%s %s, so all start again", part.name, why)
        self._kill(self._parts)
        self._start_all()

    def _kill(self, parts: Sequence[_Part]) -> None:
        """End actors, whatever they are doing, and wait until Ray knows it."""
        for part in parts:
            if part.actor is not None:
                self._ray.kill(part.actor)
        dying = [each for each, part in (self._working | self._coming).items() if part in parts]
        for each in dying:
            self._working.pop(each, None)
            self._coming.pop(each, None)
        if dying:
            self._ray.wait(dying, num_returns=len(dying), timeout=_LEAVING_S)
        for part in parts:  # not before: an actor that nobody refers to is asked to end in its own time
            part.actor = None

    def _tell_what_stays(self) -> None:
        kept = [part.keeps_in for part in self._parts if part.keeps_in]
        if kept:
            _log.warning(
                "what the servers kept of this job stays in %s: remove that, or go on with the job as FLEET_JOB_ID=%s",
                Path(kept[0]).parent,
                self._variables["FLEET_JOB_ID"],
            )


# ---------------------------------------------------------------------------------------------- places


@contextmanager
def _placement_group(ray: Any, parts: Sequence[_Part], job_id: str, deadline_s: float) -> Iterator[Any]:
    """Hold the places of all actors. As long as other work takes them, that is waited for, as Ray's users expect; a
    cluster that is too small may grow within the deadline."""

    bundles = [dict(part.needs) for part in parts]
    group = ray.util.placement_group(bundles, strategy="PACK", name=f"fleet-{job_id}")
    try:
        clock, said = SystemClock(), False
        too_small_since = math.inf
        while not group.wait(_LOOK_S):
            if _is_enough(bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]]):
                too_small_since = math.inf
                if not said:
                    _log.info("waiting for resources of the cluster that others use")
                    said = True
                continue
            too_small_since = min(too_small_since, clock.now())
            if clock.now() - too_small_since > deadline_s:
                raise DeadlineError(
                    "the cluster has no room for the job",
                    expected=_told(bundles),
                    got=_told([node["Resources"] for node in ray.nodes() if node["Alive"]]) or "no node",
                    todo="Ask for less, or add nodes; an autoscaler has FLEET_STARTUP_DEADLINE_S to do it.",
                )
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _is_enough(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Say whether empty nodes would take all bundles, one after the other wherever there is room."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda each: -sum(each.values())):
        node = next((n for n in free if all(n.get(kind, 0) >= amount for kind, amount in bundle.items())), None)
        if node is None:
            return False
        for kind, amount in bundle.items():
            node[kind] -= amount
    return True


def _told(resources: Sequence[Mapping[str, float]]) -> str:
    """Return resources in words, without what Ray notes for itself."""
    each = [
        " + ".join(f"{amount:g} {kind}" for kind, amount in some.items() if not kind.startswith("node:"))
        for some in resources
    ]
    return ", ".join(f"{each.count(one)} times {one}" for one in dict.fromkeys(each))
