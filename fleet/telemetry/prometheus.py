"""Serves a page for Prometheus with the figures of one process, made anew for every request.

The names are those of ``figures.py``: ``fleet_worker_steps_total`` of a worker, ``fleet_server_busy_seconds_total`` of
a server; docs/observing.md lists them all. The page asks nobody for credentials, so it listens on loopback unless told
otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.base.exposure import public_addresses
from fleet.base.settings import ProcessSettings
from fleet.errors import ConfigurationError, PortInUseError, UnsupportedError
from fleet.telemetry.figures import OF_KIND, TABLE, Figure, Figures
from fleet.telemetry.view import workers_in

_log = logging.getLogger("fleet.observing")

#: What a server knows beside its figures: the labels of each family, and its meaning.
BESIDE = {
    **{f"table_{name}": (("table",), figure) for name, figure in TABLE.items()},
    "worker_up": (("worker",), Figure("1 for a worker that takes part, 0 for one that does not", counts=False)),
    "worker_steps": (("worker",), Figure("steps of a worker that are applied here")),
    "worker_heard_seconds": (("worker",), Figure("for how long a worker has not been heard of", counts=False)),
    "stale_updates": (("worker",), Figure("updates whose staleness was counted")),
    "staleness": (("worker",), Figure("the sum of their staleness; over stale_updates it is the mean")),
    "late_gradients": (("worker",), Figure("gradients of a worker that came too late and were dropped")),
    "waited_seconds": (("worker", "waited_for"), Figure("how long requests of a worker have waited for another")),
}


class Page:
    def __init__(
        self, process: str, kind: str, read: Callable[[], Mapping[str, Any]], settings: ProcessSettings
    ) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise UnsupportedError(
                "FLEET_METRICS_PORT is set and prometheus-client is not installed",
                todo="pip install 'torch-fleet[prometheus]', or unset the variable.",
            ) from None
        host, port = settings.observing.metrics_host, settings.observing.metrics_port
        assert port is not None
        endpoint = Endpoint(host, port)
        public = public_addresses(endpoint)
        if public and not settings.security.insecure:
            raise ConfigurationError(
                "the page for Prometheus would show itself to anybody",
                where=f"FLEET_METRICS_HOST={host}",
                expected="a loopback or private address",
                got=", ".join(public),
                todo="Choose an address of this machine that is one, or let it through with FLEET_INSECURE=1.",
            )
        registry = prometheus_client.CollectorRegistry()
        index = process.rpartition(" ")[2]
        registry.register(_Collector(kind, index, read))
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise PortInUseError(
                "the page for Prometheus cannot be served",
                where=f"FLEET_METRICS_HOST={host}, FLEET_METRICS_PORT={port}",
                got=error.strerror or str(error),
                todo="Choose another port, or 0 for any free one.",
            ) from None
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        _log.info("figures of %s for Prometheus: %s", process, self.url)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    def __init__(self, kind: str, index: str, read: Callable[[], Mapping[str, Any]]) -> None:
        self._kind = kind
        self._index = index
        self._read = read

    def collect(self) -> Iterable[Any]:
        told = self._read()
        figures: Figures = told if self._kind == "worker" else told["figures"]
        yield from _families(self._kind, OF_KIND[self._kind], figures, self._index)
        if self._kind == "server":
            yield from _beside(told, self._index)

    def describe(self) -> Iterable[Any]:
        """Return nothing: it is not known before it is read what there will be."""
        return ()


def _families(kind: str, known: Mapping[str, Figure], figures: Figures, index: str) -> Iterable[Any]:
    for name, figure in known.items():
        if name in figures:
            family = _family(f"fleet_{kind}_{name}", figure, (kind,))
            family.add_metric([index], figures[name])
            yield family
    reported = _family("fleet_worker_reported", Figure("figures that fleet.report() was told", False), (kind, "name"))
    for name, value in figures.items():
        if name not in known:
            reported.add_metric([index, name], value)
    if reported.samples:
        yield reported


def _beside(status: Mapping[str, Any], index: str) -> Iterable[Any]:
    families = {
        name: _family(f"fleet_server_{name}", figure, ("server", *labels)) for name, (labels, figure) in BESIDE.items()
    }
    for table, figures in status.get("tables", {}).items():
        for name in TABLE:
            families[f"table_{name}"].add_metric([index, table], figures.get(name, 0))
    for worker, about in workers_in(status):
        total, updates = about["staleness"]
        labels = [index, str(worker)]
        families["worker_up"].add_metric(labels, about["standing"] == "live")
        families["worker_steps"].add_metric(labels, about["steps"])
        families["stale_updates"].add_metric(labels, updates)
        families["staleness"].add_metric(labels, total)
        families["late_gradients"].add_metric(labels, about["late"])
        if about["heard_seconds"] is not None:
            families["worker_heard_seconds"].add_metric(labels, about["heard_seconds"])
        for other, seconds in about["waited"].items():
            families["waited_seconds"].add_metric([*labels, other], seconds)
    return families.values()


def _family(name: str, figure: Figure, labels: tuple[str, ...]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if figure.counts else GaugeMetricFamily
    return make(name, figure.meaning, labels=labels)
