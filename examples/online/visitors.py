"""Visitors of a made-up shop, who ask for predictions and then click or do not: visitors.py STREAM PORT SECONDS

Users come and go, and items come into fashion and go out of it within a minute. So a model that is not fresh is wrong.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import sys
import time
from http.client import HTTPConnection, HTTPException

from stream import stream_at

USERS, ITEMS, AT_ONCE, EVERY_S = 500, 200, 100, 0.05
PERIOD_S, STRENGTH = 60.0, 3.0
STARTUP_S = 120.0


def chance(user: int, item: int, now_s: float) -> float:
    """Return how likely a click is: by the user's mood, and by the item's fashion at that time."""
    mood = random.Random(user).gauss(0, 1)
    fashion = STRENGTH * math.sin(2 * math.pi * (now_s / PERIOD_S + item / ITEMS))
    return 1 / (1 + math.exp(-mood - fashion))


def visit(shop: HTTPConnection, now_s: float, draw: random.Random) -> list[str]:
    """Let some visitors see an item each, and return what they did."""
    first = int(now_s * 10)  # ten users go and ten come in a second
    users = [first + draw.randrange(USERS) for _ in range(AT_ONCE)]
    items = [draw.randrange(ITEMS) for _ in range(AT_ONCE)]
    shop.request("POST", "/predict", json.dumps({"user": users, "item": items}))
    answer = shop.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise HTTPException(f"{answer.status} {answer.reason}")
    return [
        f"{user} {item} {score:.6f} {int(draw.random() < chance(user, item, now_s))}"
        for user, item, score in zip(users, items, json.loads(content)["score"], strict=True)
    ]


def main(place: str, port: int, seconds: float) -> None:
    stream, draw, shop = stream_at(place), random.Random(0), HTTPConnection("127.0.0.1", port, timeout=STARTUP_S)
    began, heard_at = None, time.monotonic()
    while began is None or time.monotonic() - began < seconds:
        now = time.monotonic()
        try:
            stream.add(visit(shop, now - (began or now), draw))
            heard_at = time.monotonic()
            began = began or heard_at  # the first of them may have waited for the predictor to be ready
        except (OSError, HTTPException) as error:  # the predictor starts, or starts again
            if now - heard_at > STARTUP_S:
                sys.exit(f"nobody predicts at 127.0.0.1:{port}: {error}")
            shop.close()
        time.sleep(EVERY_S)
    stream.end()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
