"""Predicts with a model whose rows are at replicas: its dense parameters are here, and rows are asked for.

A forward reads one edition of one replica (editions.py). Where that is not to be had any more, because the replica is
gone or has gone on for long, the forward is begun anew with the dense parameters of another: nobody has seen anything
of it yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch

from fleet.base import checks
from fleet.base.clock import Clock, SystemClock, Wait
from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.errors import ServerLostError, StateError, UnsupportedError
from fleet.nn.embedding import BAGS, EMBEDDINGS, check_remote, make_remote
from fleet.nn.handle import Lookup, TableHandle, Wanted, handle_of
from fleet.numeric.ids import bounds, packed_ids, unique
from fleet.ps.wire.plain_service import PlainChannel
from fleet.ps.wire.security import Security
from fleet.role_maker.arguments import endpoints
from fleet.serving.export import check_model
from fleet.serving.followed_model import Draft, FollowedModel
from fleet.serving.follower import Follower
from fleet.serving.kept_rows import KeptRows
from fleet.serving.replica import MOST_BYTES, ROOM, SERVICE
from fleet.serving.replica_pool import Bound, Elsewhere, PoolSource, array_of
from fleet.serving.source import SourceDescription


class RemoteModel:
    """Predicts with ``model``, whose rows are asked of the ``replicas``, a list of the endpoints of ``fleet replica``.

    It is called as the model is. Its dense parameters are kept fresh. All of a forward is of one version. As long as
    one replica lives, forwards go on; when none does, they raise a ``ServerLostError`` after ``deadline_s`` seconds.

    The model is built as in the training. Its embeddings hold no rows from then on, those of ``torch.nn`` neither.

    Examples:
        >>> fleet.serving.RemoteModel(torch.nn.Linear(2, 1), [])
        Traceback (most recent call last):
            ...
        fleet.errors.ConfigurationError: replicas must not be empty; ...
    """

    def __init__(
        self, model: torch.nn.Module, replicas: Sequence[str], *, poll_s: float = 0.1, deadline_s: float = 5.0
    ) -> None:
        self.model = check_model(model)
        named = endpoints("replicas", list(replicas) if isinstance(replicas, tuple) else replicas)
        checks.seconds("poll_s", poll_s)
        checks.seconds("deadline_s", deadline_s)
        settings = ProcessSettings.read(PROCESS_ENVIRONMENT)
        security = Security.of(settings.security)
        most = min(MOST_BYTES, settings.security.max_message_bytes)

        def connect(endpoint: Endpoint) -> PlainChannel:
            return PlainChannel(SERVICE, endpoint, security, most + ROOM)

        self._clock: Clock = SystemClock()
        self._deadline_s = deadline_s
        self._source = PoolSource(
            named,
            connect,
            self._clock,
            deadline_s=deadline_s,
            startup_s=settings.startup_deadline_s,
            poll_s=poll_s,
            most_bytes=most,
            with_small_calls=settings.direct_port is not None,
        )
        self._holder = _RemoteRows(model, self._source, settings.whole_table_bytes)
        self._follower = Follower(self._holder, self._source, self._source.names)
        self._follower.begin(settings.startup_deadline_s)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the model."""
        return self._one_version(lambda: self.model(*args, **options))

    def _one_version(self, forward: Any) -> Any:
        if self._holder.is_reading:
            return forward()  # what has begun cannot be begun anew from here
        wait = Wait(self._clock, self._deadline_s)
        while True:
            try:
                with self._holder.reading():
                    bound = self._source.bound
                    return forward()
            except _Lost as error:
                left_s = self._deadline_s - wait.so_far_s
                if left_s <= 0 or not self._source.await_another(bound, left_s):
                    raise self._nobody(wait.so_far_s, error) from None

    def _nobody(self, seconds: float, last: ServerLostError) -> ServerLostError:
        return ServerLostError(
            "no replica has the rows of this forward",
            where=self._source.names,
            expected=f"an answer within {self._deadline_s:g} s",
            got=f"none in {seconds:.1f} s: {last.got}; {self._source.troubles()}",
            todo="Start a replica, with fleet replica, at one of these addresses.",
        )

    @property
    def version(self) -> int:
        """Return the version that forwards read now."""
        return self._follower.version

    @property
    def age_s(self) -> float:
        """Return how many seconds ago this version was last known to be the newest that there is."""
        return self._follower.age_s

    def wait(self, version: int, timeout_s: float) -> int:
        """Wait until ``version`` or a later one is there, and return which it is."""
        return self._follower.wait(version, timeout_s)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Return a context in which this thread reads one version in all that it does. What it does is not begun anew
        when its replica is lost: that is a ``ServerLostError``."""
        with self._holder.reading():
            yield

    def close(self) -> None:
        """Ask nobody any more. A second call does nothing."""
        self._follower.close()

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RemoteModel({type(self.model).__name__}, {self._source.names!r}, version={self.version})"


class _Lost(ServerLostError):
    """Says that a forward has to be begun anew."""


class _RemoteRows(FollowedModel):
    """Keeps dense parameters here, and asks a replica for rows."""

    def __init__(self, model: torch.nn.Module, source: PoolSource, most_whole_bytes: int) -> None:
        super().__init__(model, None, most_whole_bytes)
        self._source = source
        self._process = os.getpid()

    def fit(self, source: SourceDescription) -> None:
        named = self._checked_names(source)
        wanted = {id(named[name]): name for name in source.tables if handle_of(named[name]) is None}
        embeddings = [
            (name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, EMBEDDINGS + BAGS) and id(module.weight) in wanted
        ]
        for name, module in embeddings:
            check_remote(module, name or type(module).__name__)
        if lacking := wanted.keys() - {id(module.weight) for _, module in embeddings}:
            raise UnsupportedError(
                f"{wanted[min(lacking)]!r} is a table, and in the model it is no embedding's weight",
                todo="Use torch.nn.Embedding, torch.nn.EmbeddingBag or those of fleet.nn.",
            )
        for _, module in embeddings:
            make_remote(module)
        super().fit(source)

    def _new_rows(self) -> dict[str, KeptRows]:
        return {}

    def _put(self, draft: Draft) -> None:
        super()._put(draft)
        bound = self._source.coming
        assert bound is not None
        self._source.took(bound)

    def lookup(self, wanted: Sequence[Wanted]) -> list[Lookup]:
        with self.reading():
            asked, places = [], []
            for each in wanted:
                ids, found = unique(packed_ids(each.ids.detach().reshape(-1).cpu().numpy()))
                if ids.size:
                    each.handle.check_range(*bounds(ids))
                asked.append((self._names[id(each.handle)], ids))
                places.append(found)
            rows = self._rows(asked)
            return [
                Lookup(torch.from_numpy(ids), found, torch.from_numpy(place))
                for (_, ids), found, place in zip(asked, rows, places, strict=True)
            ]

    def _rows(self, asked: Sequence[tuple[str, Any]]) -> list[torch.Tensor]:
        if self._is_closed:
            raise StateError("the RemoteModel was closed, and its rows are at the replicas", where=self._source.names)
        if os.getpid() != self._process:
            raise StateError(
                "a RemoteModel asks its replicas in the process that made it, not in its children",
                where=self._source.names,
                todo="Make another in the child.",
            )
        bound: Bound | None = self._source.bound
        assert bound is not None
        places = self._source.described.places
        try:
            found = self._source.look_up(bound, [(places[name], ids) for name, ids in asked])
        except Elsewhere as error:
            raise _Lost(
                f"the rows of version {bound.version} are not to be had any more",
                where=self._source.names,
                got=str(error),
                todo="Call the RemoteModel, which begins such a forward anew, instead of the model.",
            ) from None
        return [array_of(values, self._tables[name]) for values, (name, _) in zip(found, asked, strict=True)]

    def whole(self, handle: TableHandle) -> torch.Tensor:
        assert handle.num_embeddings is not None
        with self.reading():
            return self._rows([(self._names[id(handle)], np.arange(handle.num_embeddings))])[0]
