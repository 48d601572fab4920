"""Runs a job on a Ray cluster: ``fleet.ray.run`` starts servers and workers as actors, and returns what the workers do.

The actors' places are one placement group. Addresses are those of the nodes that Ray has chosen. Each actor gets the
variables of its part in the job, and calls the user's function, whose ``fleet.init()`` finds its role by them.

An actor that is lost may be started again. A worker rejoins its job; so does a server that finds its journal and its
endpoint. Otherwise all actors start again: servers follow their journals to other endpoints, or begin with the newest
checkpoint. What a function raises is never tried again.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.base import checks
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint, Role, parse_address
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
    JobAbortedError,
    ServerLostError,
    UnsupportedError,
)
from fleet.launch.host_network import hold_port
from fleet.launch.process_plan import ProcessSpec, child_environment, plan_launch

_log = logging.getLogger("fleet.ray")

#: How long a process that has failed may take to tell so after those who heard of it.
_ON_ITS_WAY_S = 10.0
#: How long an actor that has done its part may take to leave.
_LEAVING_S = 10.0
#: How often it is looked whether there is room for the actors yet.
_LOOK_S = 1.0
#: What a process raises that has heard of another's end, or of no end at all.
_MESSENGERS = (JobAbortedError, DeadlineError, ServerLostError)


def run(
    function: Callable[..., Any],
    *args: Any,
    server_num: int,
    worker_num: int,
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
    needs = {
        Role.SERVER: _resources("resources_per_server", resources_per_server),
        Role.WORKER: _resources("resources_per_worker", resources_per_worker),
    }
    environ = under_present_names(PROCESS_ENVIRONMENT)
    folder = _storage(storage, environ)
    settings = ProcessSettings.read(environ)
    remark(environ)
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    job_id = settings.job_id or secrets.token_hex(8)
    parts = [_Part(Role.SERVER, index, needs[Role.SERVER]) for index in range(server_num)]
    parts += [_Part(Role.WORKER, index, needs[Role.WORKER]) for index in range(worker_num)]
    if folder is not None:
        for part in parts[:server_num]:
            part.keeps_in = str(folder / f"fleet-{job_id}" / f"server-{part.index}")
    variables = {name: value for name, value in environ.items() if name in SETTINGS}
    variables |= {"FLEET_JOB_ID": job_id, "FLEET_LAUNCHER": "ray", **_key(settings)}
    with _placement_group(ray, parts, job_id, settings.startup_deadline_s) as group:
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
            result = function(*args)
        except SystemExit as end:  # a server's script may end so, as that of ``fleet.join`` does
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


@dataclass
class _Part:
    """Is one process of the job, whichever actor it is at the time."""

    role: Role
    index: int
    needs: Mapping[str, float]
    #: where a server has its journal, if it keeps one
    keeps_in: str = ""
    actor: Any = None
    #: how often it was lost, and how many actors it has been
    losses: int = 0
    starts: int = 0
    host: str = ""
    port: int = 0
    has_journal: bool = False
    result: Any = field(default=None, repr=False)

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
        #: what is under way, and what goes on as its actor leaves
        self._working: dict[Any, _Part] = {}
        self._leaving: list[Any] = []
        #: who has failed as if by another's failure, and until when that one may still come
        self._suspect: tuple[_Part, BaseException, float] | None = None

    def run(self) -> list[Any]:
        try:
            self._start_all()
            while self._working:
                done, _ = self._ray.wait(list(self._working), num_returns=1, timeout=self._patience_s())
                for each in done:
                    self._ended(each)
                if not done:
                    self._waited_in_vain()
            self._ray.wait(self._leaving, num_returns=len(self._leaving), timeout=_LEAVING_S)
            return [part.result for part in self._parts if part.role is Role.WORKER]
        except BaseException:
            self._tell_what_stays()
            raise
        finally:
            self._kill(self._parts)

    def _patience_s(self) -> float | None:
        """Return how long to wait for the end of somebody's work. That of a worker may be any time away."""
        if self._suspect is not None:
            return max(0.0, self._suspect[2] - self._clock.now())
        if all(part.role is Role.SERVER for part in self._working.values()):
            return self._settings.rpc_deadline_s + _LEAVING_S
        return None

    def _waited_in_vain(self) -> None:
        if self._suspect is not None:
            self._fail(*self._suspect[:2])
        late = ", ".join(part.where for part in self._working.values())
        raise DeadlineError(
            "a server does not end, and all workers have",
            where=late,
            expected="fleet.run_server() to return after the last worker's fleet.stop_worker()",
        )

    # ---------------------------------------------------------------- starting

    def _start_all(self) -> None:
        for part in self._parts:
            self._make_actor(part)
        self._look_around(self._parts)
        keeping = [part for part in self._parts if part.keeps_in]
        if any(part.has_journal for part in keeping) and not all(part.has_journal for part in keeping):
            lost = ", ".join(part.name for part in keeping if not part.has_journal)
            _log.warning("nothing is left of the journal of %s: the job begins with the newest checkpoint", lost)
            self._ray.get([part.actor.forget.remote() for part in keeping], timeout=self._settings.startup_deadline_s)
        self._begin(self._parts)
        servers = [part for part in self._parts if part.role is Role.SERVER]
        endpoints = ", ".join(f"{part.host}:{part.port}" for part in servers)
        _log.info("job %s has its servers at %s", self._variables["FLEET_JOB_ID"], endpoints)

    def _make_actor(self, part: _Part) -> None:
        needs = dict(part.needs)
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._parts.index(part)
        )
        name = f"fleet-{part.role.name.lower()}-{part.index}" + (f".{part.starts}" if part.starts else "")
        part.starts += 1
        part.actor = (
            self._ray.remote(Member)
            .options(
                name=name,
                namespace=f"fleet-{self._variables['FLEET_JOB_ID']}",
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                memory=needs.pop("memory", None),
                resources=needs,
                scheduling_strategy=place,
            )
            .remote(name, part.keeps_in, max(1, int(part.needs.get("CPU", 1))))
        )

    def _look_around(self, parts: Sequence[_Part]) -> None:
        """Learn where Ray has put them."""
        asked = [part.actor.look_around.remote(part.port if part.role is Role.SERVER else 0) for part in parts]
        for part, answer in zip(parts, asked, strict=True):
            try:
                found = self._ray.get(answer, timeout=self._settings.startup_deadline_s)
            except self._ray.exceptions.GetTimeoutError:
                raise DeadlineError(
                    "an actor did not start",
                    where=part.name,
                    expected=f"within {self._settings.startup_deadline_s:g} s (FLEET_STARTUP_DEADLINE_S)",
                    todo="Ray's dashboard, or `ray status`, shows what it waits for.",
                ) from None
            part.host, part.port, part.has_journal = found

    def _begin(self, parts: Sequence[_Part]) -> None:
        """Let them do their parts."""
        servers = [Endpoint(part.host, part.port) for part in self._parts if part.role is Role.SERVER]
        hosts = [part.host for part in self._parts if part.role is Role.WORKER]
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
            # What its script leaves to the end of the process, as ``fleet.join`` does, happens then.
            self._leaving.append(part.actor.__ray_terminate__.remote())

    def _failed(self, part: _Part, error: BaseException) -> None:
        """End the job, unless this one may only have heard of the failure that ends it."""
        if not isinstance(getattr(error, "cause", error), _MESSENGERS):
            self._fail(part, error)
        if self._suspect is None:
            self._suspect = part, error, self._clock.now() + _ON_ITS_WAY_S

    def _fail(self, part: _Part, error: BaseException) -> None:
        cause = getattr(error, "cause", error)
        told = str(cause).strip() or "no more"
        raise JobAbortedError(
            f"{part.name} failed", where=f"node {part.host}", got=f"{type(cause).__name__}: {told}"
        ) from error

    def _lost(self, part: _Part, error: BaseException) -> None:
        """Start again who has died, or end the job."""
        if part.losses >= self._max_restarts:
            self._fail(part, error)
        part.losses += 1
        self._suspect = None  # what was said before is said of the one that comes back
        _log.warning("%s was lost; starting it again (restart %d of %d)", part.where, part.losses, self._max_restarts)
        host, port = part.host, part.port
        self._make_actor(part)
        try:
            self._look_around([part])
        except self._ray.exceptions.RayActorError as again:
            self._lost(part, again)
            return
        finds_itself = part.has_journal and (part.host, part.port) == (host, port)
        if part.role is Role.WORKER or finds_itself:
            self._begin([part])
            return
        _log.warning("%s is not where it was, so all start again", part.name)
        self._kill(self._parts)
        self._start_all()

    def _kill(self, parts: Sequence[_Part]) -> None:
        """End actors, whatever they are doing, and wait until Ray knows it."""
        for part in parts:
            if part.actor is not None:
                self._ray.kill(part.actor)
        dying = list(self._working)
        self._working.clear()
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
