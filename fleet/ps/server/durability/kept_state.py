"""Finds what durable servers have kept in a directory, and reads it. Nothing is changed there.

What a server has kept falls into segments: each begins with a snapshot, or with the job, and goes on with all journals
since. A server may run on the directory meanwhile. A journal only grows, and its end may be torn for a moment; what the
server removes is missed by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import CheckpointError, ConfigurationError
from fleet.plan.specs import JobSpec
from fleet.ps.server.checkpoint_reader import Origin
from fleet.ps.server.durability.state_directory import (
    JOURNAL,
    NEVER,
    OVER,
    SNAPSHOT,
    Journal,
    Kind,
    Snapshot,
    StateDirectory,
    ended_number,
    numbers_in,
    snapshot_in,
    snapshots_in,
)
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import read_frame


class RemovedError(CheckpointError):
    """Says that a server which runs has taken a snapshot, and removed what was being read: there is a newer state."""


class Segment(StateDirectory):
    """Is a server's directory as it was from one snapshot on, for reading."""

    def __init__(self, directory: Path, number: int) -> None:
        """Number 0 is the segment that begins with the job."""
        self.directory = directory
        self._number = number
        self._sync = NEVER
        self.snapshot = _snapshot(directory, number) if number else None
        #: how many updates the server had made when it begins
        self.first: int = 0 if self.snapshot is None else self.snapshot.state["version"]

    def records(self) -> Iterator[tuple[Kind, memoryview]]:
        """Yield what happened after the snapshot."""
        numbers = self._journal_numbers()
        for number in range(self._number, numbers[-1] + 1):  # those between are there, or were removed just now
            path = self._path(JOURNAL, number)
            try:
                journal = Journal(path, read_only=True)
            except FileNotFoundError:
                raise _removed(path) from None
            with closing(journal):
                for record in journal.read(is_last=number == numbers[-1]):
                    yield self._told(record)

    def pieces(self) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """Yield the shard's pieces in the snapshot, in the order in which they are to be taken."""
        try:
            yield from super().pieces()
        except (CheckpointError, OSError):
            for path in (self.directory / file.file for file in self._files()):
                if not path.exists():
                    raise _removed(path) from None
            raise


@dataclass(frozen=True)
class KeptServer:
    """Holds what one server has kept: which one it was, of which job, and the segments, the first one first."""

    directory: Path
    server: int
    spec: JobSpec
    job_id: str
    segments: tuple[Segment, ...]

    @property
    def first(self) -> int:
        """Return after how many updates the first state was that can be had."""
        return self.segments[0].first

    def segment_for(self, step: int) -> Segment:
        """Return the segment in which a step is reached soonest."""
        return [segment for segment in self.segments if segment.first <= step][-1]

    @property
    def name(self) -> str:
        return f"server {self.server} ({self.directory.name})"


def kept_servers(root: object, job_id: str | None = None) -> list[KeptServer]:
    """Return what there is of the last job in a directory, or of one that is named, by the servers' indices."""
    where = Path(str(root))
    folders = [path for path in sorted(where.iterdir()) if _is_kept(path)] if where.is_dir() else []
    if where.is_dir() and _is_kept(where):
        folders = [where]
    if not folders:
        raise ConfigurationError(
            "no server has kept anything here",
            where=str(where),
            expected="what was FLEET_DURABLE_DIR for the servers of a job",
            got="a directory without journals" if where.is_dir() else "no such directory",
            todo="What servers keep is removed when their job ends, unless FLEET_DURABLE_KEEP=all is set for them.",
        )
    found = [_kept_server(folder) for folder in folders]
    jobs = sorted({each.job_id for each in found})
    if job_id is not None:
        found = [each for each in found if each.job_id == job_id]
    if not found:
        raise ConfigurationError(
            "nothing is kept here of this job", where=str(where), expected=", ".join(map(repr, jobs)), got=repr(job_id)
        )
    found.sort(key=lambda each: (_age(each.directory), -each.first))  # of one job those that it has moved to come first
    last, newest = found[0], dict[int, KeptServer]()
    for each in found:
        if (each.job_id, each.spec.common.settings) == (last.job_id, last.spec.common.settings):
            newest.setdefault(each.server, each)
    return [each for _, each in sorted(newest.items())]


def _is_kept(path: Path) -> bool:
    if path.name.endswith(OVER):  # its job is over
        return False
    return path.is_dir() and (bool(numbers_in(path, JOURNAL)) or bool(numbers_in(path, SNAPSHOT)))


def _age(directory: Path) -> int:
    """Return what sorts the directory of a job that has not ended first, and then that of the one that ended last."""
    number = ended_number(directory.name)
    return -(1 << 62) if number is None else -number


def _kept_server(directory: Path) -> KeptServer:
    journals = numbers_in(directory, JOURNAL)
    segments = [Segment(directory, number) for number in snapshots_in(directory) if number in journals]
    if journals[:1] == [0]:
        begun = Segment(directory, 0)
        origin, hello = _beginning(begun)
        if hello is not None and not origin.id:  # else a snapshot follows as soon as the checkpoint is read
            segments.insert(0, begun)
        if hello is not None and not (segments and _has_moved(segments[-1])):
            spec = JobSpec.from_json(hello.spec)
            return _known(directory, hello.server, spec, hello.job_id, segments)
    if not segments:
        raise CheckpointError(
            "no job has begun here", where=str(directory), todo="Start its workers, or remove the directory."
        )
    snapshot = segments[-1].snapshot
    assert snapshot is not None
    state = snapshot.state
    spec = JobSpec.from_json(state["spec"])
    return _known(directory, state["server"], spec, state["job_id"], _since_a_move(segments, state))


def _since_a_move(segments: list[Segment], state: Mapping[str, Any]) -> list[Segment]:
    """Return those since the job has moved to the servers that it has in a state, if it ever has."""
    return [
        each
        for each in segments
        if each.snapshot is not None and each.snapshot.state.get("moved") == state.get("moved")
    ]


def _has_moved(segment: Segment) -> bool:
    moved = {} if segment.snapshot is None else segment.snapshot.state.get("moved", {})
    return bool(moved.get("past", moved.get("made")))  # an earlier release names the last move alone


def _known(directory: Path, server: int, spec: JobSpec, job_id: str, segments: list[Segment]) -> KeptServer:
    if not segments:
        raise CheckpointError(
            "a job began here with a checkpoint, and no server had taken it over yet",
            where=str(directory),
            todo="Use that checkpoint.",
        )
    return KeptServer(directory, server, spec, job_id, tuple(segments))


def _beginning(segment: Segment) -> tuple[Origin, pb.Hello | None]:
    """Return what a job began with, and the first hello, if it has come."""
    origin = Origin()
    for kind, data in segment.records():
        if kind is Kind.ORIGIN:
            origin = Origin(*json.loads(bytes(data)))
        elif kind is Kind.REQUEST:
            message = read_frame(pb.Request, [data]).message
            return origin, message.hello if message.WhichOneof("kind") == "hello" else None
    return origin, None


def _snapshot(directory: Path, number: int) -> Snapshot:
    try:
        return snapshot_in(directory, number)
    except CheckpointError:
        if number in snapshots_in(directory):
            raise
        raise _removed(directory / f"{SNAPSHOT}{number:08d}") from None


def _removed(path: Path) -> RemovedError:
    return RemovedError(
        "what a server has kept is not there any more",
        where=str(path),
        got="it was removed while it was being read, or is lost",
        todo="If the server is running, try again: with FLEET_DURABLE_KEEP=all it removes nothing.",
    )
