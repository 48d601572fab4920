"""Begins to follow: chooses the source that a user means, and what reaches it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch

from fleet.base import checks
from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.role_maker.arguments import endpoints
from fleet.serving.checkpoint_source import CheckpointSource
from fleet.serving.export import check_model
from fleet.serving.followed_model import FollowedModel, Share
from fleet.serving.follower import Follower
from fleet.serving.source import Source


def follow(
    model: torch.nn.Module,
    source: object,
    *,
    poll_s: float = 0.1,
    at: int | None = None,
    rows: Share | None = None,
) -> Follower:
    """Keep a model as fresh as its source, in a process that belongs to no job, and return when it is filled.

    ``source`` is a list of the endpoints of running servers, or the directory or URL of ``fleet.Checkpoints``; it is
    asked every ``poll_s`` seconds. ``at`` is a version to take and to stay at. ``rows`` is a function of ids, which
    returns for each whether its row is kept here.

    Examples:
        >>> fleet.save_persistables("run/step-00000000")  # as fleet.Checkpoints does
        >>> serving = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Linear(4, 1))
        >>> follower = fleet.serving.follow(serving, "run")
        >>> follower.version
        0
        >>> torch.equal(serving.eval()(ids), model.eval()(ids))
        True
        >>> follower.close()
    """
    check_model(model)
    checks.seconds("poll_s", poll_s)
    checks.whole_or_none("at", at, 0)
    if rows is not None and not callable(rows):
        raise ArgumentTypeError("rows must be a function of ids", got=repr(rows))
    settings = ProcessSettings.read(PROCESS_ENVIRONMENT)
    found, where = source_of(source, poll_s, at, settings)
    holder = FollowedModel(model, rows, settings.whole_table_bytes)
    follower = Follower(holder, found, where, at=at)
    follower.begin(settings.startup_deadline_s)
    holder.is_final = at is not None
    return follower


def source_of(source: object, poll_s: float, at: int | None, settings: ProcessSettings) -> tuple[Source, str]:
    """Return the source that a user means, and what to call it."""
    if isinstance(source, list | tuple):
        named = endpoints("source", list(source))
        return _servers(named, poll_s, settings), ",".join(map(str, named))
    if not isinstance(source, str | os.PathLike):
        raise ArgumentTypeError(
            "source must be a list of endpoints of servers, or the directory or URL of checkpoints", got=repr(source)
        )
    text = os.fspath(source)
    if isinstance(text, str) and re.fullmatch(r"[^/\\]+:\d+(,[^/\\]+:\d+)*", text) and not os.path.exists(text):
        raise ConfigurationError(
            "source looks like endpoints of servers, which go into a list",
            expected=repr(text.split(",")),
            got=repr(text),
        )
    found = CheckpointSource(source, poll_s=poll_s, at=at, deadline_s=settings.startup_deadline_s)
    return found, found.where


def _servers(named: Sequence[Endpoint], poll_s: float, settings: ProcessSettings) -> Source:
    """Return the source that running servers are; the network is imported for those who need it."""
    from fleet.ps.wire.real_network import real_network
    from fleet.serving.server_source import ServerSource

    return ServerSource(named, real_network(settings), startup_s=settings.startup_deadline_s, poll_s=poll_s)
