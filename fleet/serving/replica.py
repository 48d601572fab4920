"""Answers look-ups for many predictors: a follower whose model is nobody's own, behind the service of lookup.proto.

It listens at once, answers when it is filled, and goes on with the last version when its source has ended.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from fleet.base.clock import Clock, SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import ServerBusyError
from fleet.numeric.bits import as_bytes
from fleet.numeric.jit import Array
from fleet.numeric.tensors import dtype_name
from fleet.ps.table.stores import stores_of
from fleet.ps.wire.health import Health
from fleet.ps.wire.plain_service import Methods, PlainListener
from fleet.ps.wire.security import Security
from fleet.ps.wire.small_calls import MOST_ANSWERED, SmallCallListener
from fleet.serving import lookup_pb2 as pb
from fleet.serving.editions import Editions
from fleet.serving.follower import Follower
from fleet.serving.look_ups import LookUps, compile_all, read, written
from fleet.serving.source import Source, SourceDescription
from fleet.telemetry.observer import Observer
from fleet.telemetry.process import ProcessFigures

_log = logging.getLogger("fleet.serving")

SERVICE = "fleet.serving.Lookup"
#: Of ids, and of rows, in one request, if messages may be so large.
MOST_BYTES = 32 << 20
#: Room in a message for what is not ids or rows.
ROOM = 64 << 10
#: Dense parameters travel in pieces of so many bytes.
_PIECE_BYTES = 1 << 20
#: What replies under way get to leave before the listener closes.
_GRACE_S = 2.0


class Replica:
    """Listens from the beginning on. ``close`` ends all of it."""

    def __init__(
        self,
        source: Source,
        where: str,
        endpoint: Endpoint,
        settings: ProcessSettings,
        clock: Clock | None = None,
        *,
        at: int | None = None,
    ) -> None:
        """``where`` names the source in messages; it is closed with this. ``at`` is a version to take and to stay
        at."""
        self.endpoint = endpoint
        self._settings = settings
        self._editions = Editions(stores_of(endpoint, settings))
        self._follower = Follower(self._editions, source, where, at=at, clock=clock)
        self._look_ups = LookUps(self._editions, secrets.randbits(63) | 1, lambda: self._follower.age_s)
        self._most_bytes = min(MOST_BYTES, settings.security.max_message_bytes)
        self._description: pb.Description | None = None
        # A stream holds a thread for as long as its reader takes, so look-ups keep half of them.
        self._streams = threading.Semaphore(max(1, settings.rpc_get_thread_num // 2))
        self._process = ProcessFigures(SystemClock() if clock is None else clock)
        with ExitStack() as opened:
            opened.callback(self._editions.remove_files)
            opened.callback(self._follower.close)
            here = settings.binding.of(endpoint)
            self._health = None if settings.health_port is None else Health(Endpoint(here.host, settings.health_port))
            if self._health is not None:
                opened.callback(self._health.close)
            self._small = self._small_calls(here)
            if self._small is not None:
                opened.callback(self._small.close)
            listener = PlainListener(
                SERVICE,
                Methods(
                    {"Describe": self._describe, "Look": self._look, "LookUp": self._look_up}, {"Dense": self._dense}
                ),
                endpoint,
                here,
                settings.rpc_get_thread_num,
                Security.of(settings.security),
                self._most_bytes + ROOM,
            )
            opened.callback(listener.close, _GRACE_S)
            observer = Observer(f"replica {endpoint}", "replica", self.told, settings)
            opened.callback(observer.close)
            self._opened = opened.pop_all()

    def _small_calls(self, at: Endpoint) -> SmallCallListener | None:
        """Take small look-ups beside gRPC; with certificates from this machine alone, as they are not encrypted."""
        port, security = self._settings.direct_port, Security.of(self._settings.security)
        if port is None:
            return None
        security.check_listening(at)
        return SmallCallListener(at, port, self._look_up_together, only_near=security.tls is not None)

    def begin(self) -> None:
        """Take the first version, and go on behind."""
        compile_all()  # now, and not when the first predictor waits
        self._follower.begin(self._settings.startup_deadline_s)
        if self._health is not None:
            self._health.report(serving=True)
        _log.info("replica at %s answers, from version %d on", self.endpoint, self._follower.version)

    def serve(self) -> None:
        """Answer for as long as the rows can be had; raise why they cannot."""
        self._editions.lost.wait()
        assert self._editions.loss is not None
        raise self._editions.loss.again()

    def close(self) -> None:
        if self._health is not None:
            self._health.report(serving=False)
        self._opened.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def follower(self) -> Follower:
        return self._follower

    def told(self) -> dict[str, dict[str, float]]:
        """Return its figures, as they are recorded."""
        editions = self._editions
        figures = {
            **self._process.read(),
            "lookups": float(editions.lookups),
            "asked_rows": float(editions.rows_asked),
            "misses": float(editions.misses),
            "rows": float(editions.row_count),
            "version": 0.0,
        }
        if editions.is_filled and editions.loss is None:
            figures |= {"version": float(editions.newest.version), "age_seconds": self._follower.age_s}
        return {"figures": figures}

    # ---------------------------------------------------------------- the service

    def _describe(self, request: bytes) -> bytes:
        read(pb.DescribeRequest, request)
        state = self._look_ups.state(self._editions.newest)
        if self._description is None:
            self._description = description_of(self._editions.described, self._most_bytes)
        described = pb.Description()
        described.CopyFrom(self._description)
        described.state.CopyFrom(state)
        if self._small is not None:
            door = self._small.door
            described.door.CopyFrom(pb.Door(key=door.key, local=door.local, port=door.port))
        return written(described)

    def _look(self, request: bytes) -> bytes:
        read(pb.LookRequest, request)
        return written(self._look_ups.state(self._editions.newest))

    def _look_up(self, request: bytes) -> bytes:
        return self._look_ups.one(request, self._most_bytes)

    def _look_up_together(self, requests: Sequence[bytes]) -> list[bytes | None]:
        return self._look_ups.together(requests, min(MOST_ANSWERED, self._most_bytes))

    def _dense(self, request: bytes) -> Iterator[bytes]:
        read(pb.DenseRequest, request)
        if not self._streams.acquire(blocking=False):
            raise ServerBusyError("too many read dense parameters at once", todo="Ask again soon.")
        try:
            edition, dense = self._editions.dense()
            yield written(pb.DensePiece(state=self._look_ups.state(edition)))
            for place, name in enumerate(self._editions.described.dense):
                values = _raw(dense[name])
                for offset in range(0, len(values), _PIECE_BYTES):
                    part = values[offset : offset + _PIECE_BYTES].tobytes()
                    yield written(pb.DensePiece(parameter=place, offset=offset, values=part))
        finally:
            self._streams.release()


def description_of(source: SourceDescription, most_bytes: int) -> pb.Description:
    return pb.Description(
        tables=[
            pb.Table(
                name=name,
                embedding_dim=table.embedding_dim,
                num_embeddings=table.num_embeddings or 0,
                mean=table.mean,
                dtype=dtype_name(table.dtype),
            )
            for name, table in source.tables.items()
        ],
        dense=[
            pb.Parameter(name=name, shape=shape, dtype=dtype_name(dtype))
            for name, (shape, dtype) in source.dense.items()
        ],
        most_bytes=most_bytes,
    )


def _raw(values: torch.Tensor) -> Array:
    """Return the bytes of a tensor, whatever its element type is."""
    flat: Array = as_bytes(values).numpy()
    return flat
