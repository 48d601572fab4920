"""Predicts behind HTTP with a model that follows the job, and shows how it does: serve.py STREAM PORT HOST:PORT,…

POST /predict  {"user": [1, 2], "item": [3, 4]}  ->  {"score": [0.1, 0.9], "version": 123}
GET /          a page with the AUC of the stream and the age of the model; GET /state has its numbers
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from stream import stream_at
from train import ClickModel, columns

import fleet

PAGE = (Path(__file__).parent / "page.html").read_bytes()
MOST_BYTES, MOST_PAIRS = 1 << 16, 1000
WINDOW, EVERY_S, POINTS = 3000, 0.5, 600


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, place: str, port: int) -> None:
        self.place = place
        self.state: dict[str, Any] = {"version": 0, "age_s": None, "auc": [], "age": [], "clicks": 0}
        super().__init__(("127.0.0.1", port), Handler)

    def follow(self, servers: list[str]) -> None:
        """Answer from now on. A forward has one version of the model, while the next one arrives beside it."""
        self.model = ClickModel().eval()
        with fleet.serving.follow(self.model, servers, poll_s=0.05) as self.follower:
            threading.Thread(target=self._watch, daemon=True).start()
            self.serve_forever()

    def predict(self, user: list[int], item: list[int]) -> dict[str, Any]:
        with torch.no_grad(), self.follower.pinned():
            score = self.model(torch.tensor(user), torch.tensor(item)).sigmoid()
            return {"score": score.tolist(), "version": self.follower.version}

    def _watch(self) -> None:
        """Note from time to time how good the last predictions were, and how old the model is."""
        seen, next_at = deque[str](maxlen=WINDOW), time.monotonic()
        aucs, ages = deque[float](maxlen=POINTS), deque[float](maxlen=POINTS)
        for lines in stream_at(self.place).read("page"):
            seen.extend(lines)
            self.state["clicks"] += len(lines)
            if time.monotonic() >= next_at and len(seen) > 100:
                next_at = time.monotonic() + EVERY_S
                _, _, score, clicked = columns(list(seen))
                aucs.append(auc(score, clicked))
                ages.append(self.follower.age_s)
                self.state |= {"auc": list(aucs), "age": list(ages), "every_s": EVERY_S}


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(200, PAGE, "text/html; charset=utf-8")
        elif self.path == "/state":
            follower = self.server.follower
            self._json(200, {**self.server.state, "version": follower.version, "age_s": follower.age_s})
        else:
            self._json(404, {"error": f"there is nothing at {self.path}"})

    def do_POST(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", -1))
            if self.path != "/predict" or not 0 <= size <= MOST_BYTES:
                raise ValueError(f"POST /predict takes up to {MOST_BYTES} bytes of JSON")
            asked = json.loads(self.rfile.read(size))
            user, item = ids(asked["user"]), ids(asked["item"])
            if len(user) != len(item):
                raise ValueError(f"{len(user)} users, and {len(item)} items")
            self._json(200, self.server.predict(user, item))
        except (ValueError, TypeError, KeyError) as error:
            self.close_connection = True  # what follows may be the rest of it
            self._json(400, {"error": f"bad request: {error!r}"})

    def _json(self, code: int, what: Any) -> None:
        self._answer(code, json.dumps(what).encode(), "application/json")

    def _answer(self, code: int, content: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


def ids(given: Any) -> list[int]:
    if not isinstance(given, list) or len(given) > MOST_PAIRS or not all(type(each) is int for each in given):
        raise ValueError(f"a list of up to {MOST_PAIRS} ids is expected")
    if any(not -(1 << 63) <= each < 1 << 63 for each in given):
        raise ValueError("an id has 64 bits")
    return given


def auc(score: torch.Tensor, clicked: torch.Tensor) -> float:
    """Return how often a click was given a higher score than no click; half where they are the same."""
    _, place, count = score.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[place]
    clicks = clicked.sum()
    pairs = clicks * (len(clicked) - clicks)
    return ((rank[clicked == 1].sum() - clicks * (clicks + 1) / 2) / pairs).item() if pairs else 0.5


if __name__ == "__main__":
    place, port, servers = sys.argv[1:]
    try:
        server = Server(place, int(port))
    except OSError as error:
        sys.exit(f"nothing can listen at 127.0.0.1:{port}: {error}. Choose another --port.")
    try:
        server.follow(servers.split(","))
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
