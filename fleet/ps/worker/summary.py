"""Makes what ``fleet.summary()`` returns of the surveys of all servers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.ps.consistency.staleness import total
from fleet.telemetry.figures import Figures, hit_rate, in_all


def summary(worker: int, mode: str, steps: int, surveys: Sequence[str], figures: Figures) -> dict[str, Any]:
    """Summarize the job. ``surveys`` holds the JSON text of each server, ``figures`` are the worker's."""
    servers: list[dict[str, Any]] = [json.loads(text) for text in surveys]
    names = dict.fromkeys(name for each in servers for name in each["tables"])
    tables = {name: in_all(each["tables"].get(name, {}) for each in servers) for name in names}
    counts = total(_numbered(each["staleness"]) for each in servers)
    return {
        "worker": worker,
        "mode": mode,
        "steps": steps,
        "figures": dict(figures),
        "steps_by_worker": {int(index): count for index, count in servers[0]["steps"].items()},
        "tables": {name: {**table, "hit_rate": hit_rate(table)} for name, table in tables.items()},
        "changes": [
            {"update": update, "to": "synchronous" if together else "GBA", "gain": gain}
            for update, together, gain in servers[0]["changes"]
        ],
        "late_gradients": {int(index): count for index, count in servers[0]["late"].items()},
        "staleness": {
            index: {name: _described(histogram) for name, histogram in by_name.items()}
            for index, by_name in counts.items()
        },
    }


def _numbered(by_worker: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[int, dict[str, dict[int, int]]]:
    """Turn the keys into numbers again, which JSON does not have."""
    return {
        int(worker): {name: {int(low): count for low, count in counts.items()} for name, counts in by_name.items()}
        for worker, by_name in by_worker.items()
    }


def _described(histogram: Mapping[int, int]) -> dict[str, Any]:
    updates = sum(histogram.values())
    return {
        "updates": updates,
        "mean": sum(low * count for low, count in histogram.items()) / updates,
        "max": max(histogram),
        "histogram": histogram,
    }
