"""Writes the metrics of a server in the text format of Prometheus, and serves them at /metrics.

All values are read at a scrape; each server has a registry of its own. OpenMetrics is not offered: it
does not allow a histogram whose name ends in _total, as one of vLLM's does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from experiments.serve.metrics.engine import EngineMetrics, Histogram
from experiments.serve.metrics.table import TABLE, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_LABELS = ("model_name", "engine")
FAMILIES: Mapping[str, Callable[..., Any]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Clock(Protocol):
    """The clock of a simulation. late_s, max_late_s: of the last and of the latest event, in wall seconds."""

    time_scale: float
    late_s: float
    max_late_s: float


class ServerState(NamedTuple):
    """The state of a server as a whole at a scrape. refused: number of refused requests, by reason.

    clock: None: that of the wall. token_delays, token_work: of the tokens of streams, in seconds; None: they
    are not measured.
    """

    refused: Mapping[str, int]
    clock: Clock | None = None
    token_delays: Histogram | None = None
    token_work: Histogram | None = None
    model_name: str = ""

    @property
    def rejections(self) -> dict[tuple[str, str], int]:
        """Number of requests that were refused, by the names of the models and the reason."""
        return {(self.model_name, reason): num for reason, num in sorted(self.refused.items())}


class ServingMetrics(Collector):
    """The metrics of some engines, and of the server in front of them. Both are called at every scrape."""

    def __init__(
        self, engines: Callable[[], Iterable[EngineMetrics]], server: Callable[[], ServerState]
    ) -> None:
        self._engines = engines
        self._server = server
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def parts(self) -> Iterator[bytes]:
        """Yields the text of each metric. A server serves others between them, as all take 2 ms an engine."""
        for family in self._registry.collect():
            yield generate_latest(_Collected(family))

    def text(self) -> bytes:
        """Returns the text of all metrics."""
        return b"".join(self.parts())

    def collect(self) -> Iterator[Family]:
        """Yields all metrics (called by the registry)."""
        states = [(engine, engine.state()) for engine in self._engines()]
        names = dict.fromkeys(engine.model_name for engine, _ in states)
        server = self._server()._replace(model_name=",".join(names))
        for row in TABLE:
            if row.source.startswith("server."):
                family = FAMILIES[row.kind](row.name, row.help, labels=row.labels)
                _add(family, (), row.value(server=server))
            else:
                labels = (*ENGINE_LABELS, *row.labels)
                family = FAMILIES[row.kind](row.name, _help(row, server.clock), labels=labels)
                for engine, state in states:
                    value: Any = engine.histograms.get(row.source)
                    if value is None:
                        value = row.value(engine=engine, state=state)
                    _add(family, (engine.model_name, str(engine.index)), value)
            if family.samples or not row.is_optional:
                yield family


def _add(family: Any, labels: tuple[str, ...], value: Any) -> None:
    """Adds a value of a metric, or the values by further labels. value: as `Metric` says."""
    if isinstance(value, Histogram):
        family.add_metric(labels, value.buckets(), value.sum)
    elif isinstance(value, Mapping):
        for more, number in value.items():
            family.add_metric((*labels, *((more,) if isinstance(more, str) else more)), number)
    elif value is not None:
        family.add_metric(labels, value)


def _help(row: Metric, clock: Clock | None) -> str:
    """Returns the description of a metric of engines; their histograms of seconds name another clock."""
    is_time = row.kind == "histogram" and row.name.endswith("_seconds")
    if not is_time or clock is None or clock.time_scale == 1:
        return row.help
    return f"{row.help} [simulated seconds: {clock.time_scale:g} of them pass in a second]"


class _Collected(Collector):
    """A metric that has been collected."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        yield self._family


def add_metrics_route(app: web.Application, metrics: ServingMetrics) -> None:
    """Adds /metrics to an application."""

    async def show(request: web.Request) -> web.StreamResponse:
        parts = []
        for part in metrics.parts():
            parts.append(part)
            await asyncio.sleep(0)
        return web.Response(body=b"".join(parts), headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/metrics", show)
