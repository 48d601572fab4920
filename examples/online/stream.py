"""Clicks on their way from the visitors to the training: a file that grows, or a stream of Redis.

Each is a line: a user, an item, the score that was predicted, and 1 if it was a click. The score is for the page: what
was predicted before anybody knew makes an honest AUC.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

#: What the address of a Redis begins with; any other place is a file.
REDIS = ("redis://", "rediss://", "unix://")
END = "end"
PAUSE_S = 0.05
AT_ONCE = 256


class FileStream:
    """Readers take turns, line by line. Nobody notes who has read what: who starts again reads all of it again."""

    def __init__(self, path: str) -> None:
        self._path = path
        open(path, "a").close()

    def add(self, lines: list[str]) -> None:
        with open(self._path, "a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def end(self) -> None:
        self.add([END])

    def read(self, _: str, part: int = 0, of: int = 1) -> Iterator[list[str]]:
        """Yield what has come for this reader since the last time, an empty list if nothing has."""
        number, rest, has_ended = 0, "", False
        with open(self._path) as file:
            while not has_ended:
                *lines, rest = (rest + file.read(1 << 16)).split("\n")  # the last one may not be whole yet
                has_ended = END in lines
                mine = [line for place, line in enumerate(lines, number) if place % of == part and line != END]
                number += len(lines)
                yield from (mine[start : start + AT_ONCE] for start in range(0, max(1, len(mine)), AT_ONCE))
                if not lines:
                    time.sleep(PAUSE_S)


class RedisStream:
    """Readers of a group share the stream. What one has read counts as done when it asks for more, so a worker that is
    killed reads what it was at again when it is started again."""

    def __init__(self, url: str) -> None:
        import redis  # pip install redis

        address, _, name = url.partition("#")
        self._redis = redis.Redis.from_url(address, decode_responses=True)
        self._name = name or "clicks"

    def add(self, lines: list[str]) -> None:
        with self._redis.pipeline() as together:
            for line in lines:
                together.xadd(self._name, {"click": line}, maxlen=1_000_000, approximate=True)
            together.expire(self._name, 86_400)
            together.execute()

    def end(self) -> None:
        self._redis.set(f"{self._name}-end", 1, ex=86_400)

    def read(self, group: str, part: int = 0, of: int = 1) -> Iterator[list[str]]:
        """Yield what has come for this reader since the last time, an empty list if nothing has."""
        del of  # whoever asks first gets it
        if all(each["name"] != group for each in self._groups()):
            try:
                self._redis.xgroup_create(self._name, group, "0", mkstream=True)
            except Exception as error:
                if "BUSYGROUP" not in str(error):  # another reader was first
                    raise
        since = "0"  # at first what this one had not acknowledged, then what is new
        while True:
            has_ended = self._redis.exists(f"{self._name}-end")
            wait_ms = int(1e3 * PAUSE_S)
            found = self._redis.xreadgroup(group, f"reader {part}", {self._name: since}, AT_ONCE, wait_ms)
            entries = found[0][1] if found else []
            yield [fields["click"] for _, fields in entries if fields]
            if entries:
                self._redis.xack(self._name, group, *(number for number, _ in entries))
            elif since == ">" and has_ended:
                return
            else:
                since = ">"

    def _groups(self) -> list[dict[str, object]]:
        return self._redis.xinfo_groups(self._name) if self._redis.exists(self._name) else []


def stream_at(place: str) -> FileStream | RedisStream:
    return RedisStream(place) if place.startswith(REDIS) else FileStream(place)
