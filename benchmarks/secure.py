"""What protection costs a job between two machines: direct connections and gRPC alone, in the clear and under TLS.

    python benchmarks/secure.py [--quick] [--rounds N] [--json FILE] [--works PATTERN …]

The two machines are network namespaces of this one, so this takes Linux and root. TLS is mutual. Everything else is as
in ctr.py: a server, a worker, a thread each, and ways that take turns; ratios are medians of those within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import trustme
from ctr import KINDS, Kind
from measuring import Cost, Place, end_like_an_exit, median_ratio, print_table, progress, run_job, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from network_namespaces import Machines, missing

MODES = ("sync", "async", "async+prefetch")
SERVER, WORKER = "10.77.0.1", "10.77.0.2"
CLEAR, SEALED, GRPC, GRPC_SEALED = "direct", "direct, TLS", "gRPC alone", "gRPC alone, TLS"


def certificates(folder: Path) -> dict[str, str]:
    """The variables of both sides: they may share a certificate, as only the server's name is looked at."""
    authority = trustme.CA()
    made = authority.issue_cert(SERVER)
    files = {
        "CA": authority.cert_pem.bytes(),
        "CERT": b"".join(pem.bytes() for pem in made.cert_chain_pems),
        "KEY": made.private_key_pem.bytes(),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {f"FLEET_TLS_{name}": str(folder / name) for name in files}


def ways(protected: Mapping[str, str]) -> dict[str, dict[str, str]]:
    alone = {"FLEET_DIRECT_PORT": "off"}
    return {CLEAR: {}, SEALED: {**protected}, GRPC: alone, GRPC_SEALED: {**protected, **alone}}


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of the steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--works", nargs="+", default=["3x32", "3x400"], help=f"of {[kind.name for kind in KINDS]}")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"there can be no network namespaces here: {reason}")
    rounds = 1 if options.quick else options.rounds
    kinds = [kind for kind in KINDS if any(fnmatch(kind.name, pattern) for pattern in options.works)]
    results: dict[str, Any] = {}
    with Machines() as machines, tempfile.TemporaryDirectory() as folder:
        places = {}
        for role, host in (("server", SERVER), ("worker", WORKER)):
            machine = machines.machine(role)
            machines.connect(machine, "lan", f"{host}/24")
            places[role] = Place(host, ("ip", "netns", "exec", machine.namespace))
        environments = ways(certificates(Path(folder)))
        for kind in kinds:
            results[kind.name] = measure(kind, rounds, options.quick, places, environments)
    write_json(options.json, figures=results)


def measure(
    kind: Kind, rounds: int, quick: bool, places: Mapping[str, Place], environments: Mapping[str, dict[str, str]]
) -> list[dict[str, Any]]:
    costs: dict[tuple[str, str], list[Cost]] = {(mode, way): [] for mode in MODES for way in environments}
    turns = [turn for _ in range(rounds) for turn in costs]
    for mode, way in progress(turns, lambda turn: f"{kind.name}, {turn[0]}, {turn[1]}"):
        cost = run_job(
            "ours",
            kind.work(mode, quick),
            servers=kind.servers,
            workers=kind.workers,
            environment=environments[way],
            places=places,
        )
        costs[mode, way].append(cost)

    def rates(mode: str, way: str) -> list[float]:
        return [cost.rate for cost in costs[mode, way]]

    def cpu(mode: str, way: str) -> list[float]:
        return [(cost.worker_cpu_s + cost.server_cpu_s) / cost.examples * 1e6 for cost in costs[mode, way]]

    rows = [
        {
            "mode": mode,
            "way": way,
            "1000 examples/s": statistics.median(rates(mode, way)) / 1000,
            f"of {CLEAR}": median_ratio(rates(mode, way), rates(mode, CLEAR)),
            f"of {GRPC_SEALED}": median_ratio(rates(mode, way), rates(mode, GRPC_SEALED)),
            "CPU us/example": statistics.median(cpu(mode, way)),
            f"CPU of {CLEAR}": median_ratio(cpu(mode, way), cpu(mode, CLEAR)),
            "others, cores": max(cost.foreign for cost in costs[mode, way]),
        }
        for mode, way in costs
    ]
    print_table(f"{kind.name}, medians of {rounds} rounds", list(rows[0]), [list(row.values()) for row in rows])
    return rows


if __name__ == "__main__":
    main()
