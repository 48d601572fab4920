"""Does what ``fleet replay`` is asked for, and prints it."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from fleet.base.clock import SystemClock
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.errors import ConfigurationError
from fleet.ps.server.blame import Change, blame, check_row, server_of
from fleet.ps.server.digests import Parting, compare, differing_places, digests, each_step
from fleet.ps.server.durability.kept_state import KeptServer, RemovedError, kept_servers
from fleet.ps.server.job import Job
from fleet.ps.server.lean import be_lean
from fleet.ps.server.replay import NOWHERE, Replay, shares_versions
from fleet.ps.server.replayed_checkpoint import write_job, write_server
from fleet.ps.table.stores import stores_of

#: A server that runs may remove what is being read; there is a newer state then.
_MORE_TIMES = 3
#: So many of the names that differ are told.
_MOST_NAMES = 10


def carry_out(options: argparse.Namespace) -> int:
    """Do what the options ask for, and return the exit code."""
    be_lean()
    log = logging.getLogger("fleet")
    level = log.level
    log.setLevel(logging.ERROR)  # what servers said then is no news
    try:
        for _ in range(_MORE_TIMES):
            with contextlib.suppress(RemovedError):
                return _carry_out(options)
        return _carry_out(options)
    finally:
        log.setLevel(level)


def _carry_out(options: argparse.Namespace) -> int:
    """Do it once. Nothing is printed before all is read, lest it be printed again."""
    kept = kept_servers(options.durable_dir, options.job)
    if options.blame is not None:
        return _blame(options, kept)
    chosen = _chosen(options, kept)
    if options.diff is not None:
        return _diff(options, chosen)
    if options.out is not None:
        return _write(options, chosen)
    if options.digests:
        return _digests(options, chosen)
    return _tell(options, chosen)


def _replay(kept: KeptServer) -> Replay:
    settings = ProcessSettings.read(PROCESS_ENVIRONMENT)
    return Replay(kept, settings, SystemClock(), partial(stores_of, NOWHERE, settings))


def _chosen(options: argparse.Namespace, kept: Sequence[KeptServer]) -> list[Replay]:
    """Return the servers that are asked for: one, or all of a job whose servers are at the same steps."""
    spec, there = kept[0].spec, [each.server for each in kept]
    if options.server is not None:
        found = [each for each in kept if each.server == options.server]
        if not found:
            raise ConfigurationError(
                "nothing is kept here of this server",
                where=options.durable_dir,
                expected=f"--server {_or(there)}",
                got=options.server,
            )
        return [_replay(found[0])]
    if not shares_versions(spec):
        raise ConfigurationError(
            "the servers of this job had no steps in common, as each applied gradients when they came",
            where=f"{options.durable_dir}, a job in the mode {spec.settings.mode!r}",
            todo=f"Choose one of them: --server {_or(there)}.",
        )
    missing = sorted(set(range(spec.settings.server_num)) - set(there))
    if missing:
        raise ConfigurationError(
            "not all servers of the job kept their state here",
            where=options.durable_dir,
            expected=f"a folder for each of {spec.settings.server_num} servers",
            got=f"none of server {_or(missing)}",
            todo=f"Copy their folders into one directory, or choose a server that is here: --server {_or(there)}.",
        )
    return [_replay(each) for each in kept]


def _write(options: argparse.Namespace, replays: Sequence[Replay]) -> int:
    alone = options.server is not None and replays[0].kept.spec.settings.server_num > 1
    if alone:
        saved, step = write_server(replays[0], options.to, options.out, SystemClock())
    else:
        saved, step = write_job(replays, options.to, options.out, SystemClock())
    what = f"server {options.server} after update {step}" if alone else f"the job after step {step}"
    print(f"{saved.url}: {what}, checkpoint {saved.id}")
    spec = replays[0].kept.spec
    if spec.settings.has_dense_on_workers:
        print("It has the rows alone: dense parameters are on the workers, and no server has kept them.")
    return 0


def _tell(options: argparse.Namespace, replays: Sequence[Replay]) -> int:
    seen: list[tuple[Replay, int, dict[str, str]]] = []
    for replay in replays:
        found: dict[str, str] = {}
        seen.append((replay, replay.to(options.to, partial(_take, found)), found))
    for replay, last, found in seen:
        spec = replay.kept.spec
        job = f"job {replay.kept.job_id!r}" if replay.kept.job_id else "a job without FLEET_JOB_ID"
        print(f"{replay.kept.name}, of {spec.settings.server_num}: {job}, {spec.settings.mode}")
        print(f"  from step {replay.kept.first} on; after step {last}:")
        for name, digest in found.items():
            print(f"  {digest}  {name}")
    return 0


def _take(found: dict[str, str], job: Job, _: int) -> None:
    found |= digests(job)


def _digests(options: argparse.Namespace, replays: Sequence[Replay]) -> int:
    for replay, steps in [(replay, each_step(replay, options.to)) for replay in replays]:
        for step, found in steps.items():
            for name, digest in found.items():
                print(f"{step}  {replay.kept.server}  {digest}  {name}")
    return 0


# ---------------------------------------------------------------------------------------------- diff


def _diff(options: argparse.Namespace, replays: Sequence[Replay]) -> int:
    others = {each.server: each for each in kept_servers(options.diff)}
    for replay in replays:
        other = others.get(replay.kept.server)
        if other is None or other.spec.common != replay.kept.spec.common:
            raise ConfigurationError(
                "two runs cannot be compared",
                where=options.diff,
                expected=f"server {replay.kept.server} of a job with the same model, optimizer and strategy",
                got="none" if other is None else f"server {other.server} of another one",
            )
    pairs = [(replay, _replay(others[replay.kept.server])) for replay in replays]
    compared = [compare(left, right, options.to) for left, right in pairs]
    partings = [each.parting for each in compared if each.parting is not None]
    told = [f"A  {options.durable_dir}", f"B  {options.diff}", ""]
    if not partings:
        first, last = max(each.first for each in compared), min(each.last for each in compared)
        told.append(f"the same, bit by bit, after every step from {first} to {last}")
        print(*told, sep="\n")
        return 0
    earliest = min(parting.step for parting in partings)
    for (left, right), each in zip(pairs, compared, strict=True):
        if each.parting is not None and each.parting.step == earliest:
            told += _told_of_parting(left, right, each.parting)
    print(*told, sep="\n")
    return 1


def _told_of_parting(left: Replay, right: Replay, parting: Parting) -> list[str]:
    before = "they are the same before it" if parting.is_later else "the first that both have"
    told = [f"{left.kept.name} differs first after step {parting.step} ({before})"]
    for name in parting.names[:_MOST_NAMES]:
        places, count = differing_places(left, right, parting.step, name)
        kind = "ids" if any(table.name == name for table in left.kept.spec.tables) else "elements"
        listed = ", ".join(map(str, places)) + (", …" if count > len(places) else "")
        told.append(f"  {name}: {f'{count} {kind}: {listed}' if count else 'its step count'}")
    if len(parting.names) > _MOST_NAMES:
        told.append(f"  and {len(parting.names) - _MOST_NAMES} more")
    return told


# ---------------------------------------------------------------------------------------------- blame


def _blame(options: argparse.Namespace, kept: Sequence[KeptServer]) -> int:
    table, id = options.blame
    spec = kept[0].spec
    check_row(spec, table, id)
    owner = server_of(spec, id)
    if options.server not in (None, owner):
        raise ConfigurationError("the row is on another server", expected=f"--server {owner}", got=options.server)
    (replay,) = _chosen(argparse.Namespace(**{**vars(options), "server": owner}), kept)
    found = blame(replay, table, id, options.to)
    print(f"{table}, id {id}, on {replay.kept.name}: from step {found.first} to {found.last}")
    for change in found.changes:
        print(_told(change))
    print(f"{len(found.changes)} changes")
    return 0


def _told(change: Change) -> str:
    moved = f"step {change.step}: moved by {change.moved:.4g}"
    if not change.parts:
        return f"{moved}; by no gradient: loaded, edited, or gone"
    parts = ", ".join(f"worker {part.worker} {part.norm:.4g}" for part in change.parts)
    return f"{moved}; norm of the gradient of {parts}; over {change.divisor:g}"


def _or(numbers: Sequence[int]) -> str:
    texts = [str(each) for each in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
