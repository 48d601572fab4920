"""Runs barriers and reductions of a collective job over its store rather than its process group.

So they are not in the way of gradients, and a worker that has stopped need not take part: it says so in the store. The
n-th gathering of one worker meets the n-th of every other. The first worker that is in it collects what all have
brought, reduces it in worker order, and writes the result down; the others wait for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from torch._C._distributed_c10d import Store

from fleet.base.turns import Turns
from fleet.collective.store_monitor import StoreMonitor
from fleet.errors import PlanMismatchError
from fleet.numeric.reduction import BARRIER, Asked, disagreement
from fleet.numeric.tensors import WireTensor, view
from fleet.numeric.values import UserValue, reduce_over_workers, reduced

#: A value of the store may have 8 MiB.
_CHUNK = 4 << 20
#: How often a worker that waits looks whether it could wait for ever.
_LOOK_S = 1.0


class StoreReductions:
    def __init__(self, monitor: StoreMonitor, turns: Turns) -> None:
        self._monitor = monitor
        self._turns = turns
        self._number = 0

    def is_ahead(self, store: Store, worker: int) -> bool:
        """Say whether a worker has come to the gathering that is next for this one."""
        return store.check([f"gather/{self._number + 1}/{worker}"])

    def barrier(self) -> None:
        with self._turns.meeting("barrier_worker()"):
            self._meet(Asked(BARRIER, beside=self._turns.is_other_thread), None)

    def all_reduce(self, call: str, value: object, output: object, op: object) -> Any:
        """Reduce the ``value`` of all workers to one, in the kind it came in, and write it into ``output`` if that is
        given."""

        def meet(op: str, mine: UserValue) -> WireTensor:
            with self._turns.meeting(call):
                result = self._meet(Asked(op, mine.dtype, mine.shape, self._turns.is_other_thread), mine.wire())
            assert result is not None
            return result

        return reduce_over_workers(call, value, output, op, meet)

    def _meet(self, asked: Asked, mine: WireTensor | None) -> WireTensor | None:
        self._number += 1
        number, rank, monitor = self._number, self._monitor.rank, self._monitor
        header = {"op": asked.op, "dtype": asked.dtype, "shape": asked.shape, "beside": asked.beside}
        monitor.ask(lambda store: put(store, f"gather/{number}/{rank}", header, mine))
        if self._wait(lambda store: self._leads(store, number), number, asked):
            self._wait(lambda store: not self._absent(store, number) or None, number, asked)
            monitor.ask(lambda store: self._collect(store, number))
        told, result = monitor.ask(lambda store: get(store, f"gather/{number}/result"))
        if told.get("error"):
            raise PlanMismatchError(**told["error"])
        return result

    def _wait(self, ready: Callable[[Store], bool | None], number: int, asked: Asked) -> bool:
        while (found := self._monitor.until(ready, _LOOK_S)) is None:
            if not asked.beside:  # else the training goes on meanwhile
                absent = self._monitor.ask(lambda store: self._absent(store, number))
                self._monitor.refuse_standstill(absent, f"{asked.op} {number}")
        return found

    def _leads(self, store: Store, number: int) -> bool | None:
        """Say whether this worker collects; None while that is open."""
        if store.check([f"gather/{number}/result"]):
            return False
        earlier = range(self._monitor.rank)
        return True if all(self._is_out(store, number, other) for other in earlier) else None

    def _is_out(self, store: Store, number: int, worker: int) -> bool:
        """Say whether a worker has left without coming to a gathering."""
        left = store.check([f"left/{worker}"])  # asked first: what it brought, it brought before
        return left and not store.check([f"gather/{number}/{worker}"])

    def _settled(self, store: Store, number: int, worker: int) -> bool:
        return store.check([f"gather/{number}/{worker}"]) or self._is_out(store, number, worker)

    def _absent(self, store: Store, number: int) -> list[int]:
        return [other for other in range(self._monitor.size) if not self._settled(store, number, other)]

    def _collect(self, store: Store, number: int) -> None:
        came = [other for other in range(self._monitor.size) if store.check([f"gather/{number}/{other}"])]
        brought = {worker: get(store, f"gather/{number}/{worker}") for worker in came}
        asked = {
            worker: Asked(told["op"], told["dtype"], tuple(told["shape"]), told["beside"])
            for worker, (told, _) in brought.items()
        }
        odd = [worker for worker in came if asked[worker] != asked[came[0]]]
        header: dict[str, Any] = {}
        result = None
        if odd:
            error = disagreement(number, (came[0], asked[came[0]]), (odd[0], asked[odd[0]]))
            told = ("what", "where", "expected", "got", "todo")
            header = {"error": {name: getattr(error, name) for name in told}}
        elif asked[came[0]].op != BARRIER:
            result = reduced(asked[came[0]].op, [tensor for _, tensor in brought.values() if tensor is not None])
        put(store, f"gather/{number}/result", header, result)
        # Everybody has come to this one, so nobody will ask for the one before.
        for name in (*map(str, range(self._monitor.size)), "result"):
            drop(store, f"gather/{number - 1}/{name}")


def put(store: Store, key: str, header: dict[str, Any], tensor: WireTensor | None) -> None:
    told = dict(header)
    if tensor is not None:
        data = b"".join(tensor.buffers)
        told |= {"carried": tensor.dtype, "extent": tensor.shape, "bytes": len(data)}
        for start in range(0, len(data), _CHUNK):
            store.set(f"{key}/{start}", data[start : start + _CHUNK])  # type: ignore[arg-type]
    store.set(key, json.dumps(told))  # last: it says that the rest is there


def get(store: Store, key: str) -> tuple[dict[str, Any], WireTensor | None]:
    told = json.loads(store.get(key))
    if "carried" not in told:
        return told, None
    data = b"".join(store.get(f"{key}/{start}") for start in range(0, told["bytes"], _CHUNK))
    buffer = np.frombuffer(bytearray(data), np.uint8)
    return told, view(buffer, 0, told["carried"], tuple(told["extent"]))


def drop(store: Store, key: str) -> None:
    if store.check([key]):
        told = json.loads(store.get(key))
        for start in range(0, told.get("bytes", 0), _CHUNK):
            store.delete_key(f"{key}/{start}")
        store.delete_key(key)
