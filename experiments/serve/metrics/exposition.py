"""Writes the metrics of a server in the text format of Prometheus.

All values are read at a scrape; each server has a registry of its own. OpenMetrics is not offered: it
does not allow a histogram whose name ends in _total, as one of vLLM's does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from time import time
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from experiments.serve.metrics.engine import EngineMetrics, EngineState
from experiments.serve.metrics.families import COUNTERS, GAUGES, HISTOGRAMS, Family
from experiments.serve.metrics.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
ADAPTER_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


class ServerGauge(NamedTuple):
    """A number of the server as a whole. read: called at every scrape."""

    name: str
    help: str
    read: Callable[[], float]


class ServerHistogram(NamedTuple):
    """Counts of the server as a whole."""

    name: str
    help: str
    counts: Histogram


class ServingMetrics(Collector):
    """The metrics of some engines, and of the server in front of them.

    engines: called at every scrape. rejections: number of requests that were refused, by reason. clock: what
    a second of a latency is, as part of descriptions; "": a wall second.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable[EngineMetrics]],
        *,
        rejections: Callable[[], Mapping[str, int]] = dict,
        gauges: Iterable[ServerGauge] = (),
        histograms: Iterable[ServerHistogram] = (),
        clock: str = "",
    ) -> None:
        self._engines = engines
        self._rejections = rejections
        self._gauges = tuple(gauges)
        self._server_histograms = tuple(histograms)
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def parts(self) -> Iterator[bytes]:
        """Yields the text of each metric. A server serves others between them, as all take 2 ms an engine."""
        for metric in self._registry.collect():
            yield generate_latest(_Collected(metric))

    def text(self) -> bytes:
        """Returns the text of all metrics."""
        return b"".join(self.parts())

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics (called by the registry)."""
        states = [(engine, engine.state()) for engine in self._engines()]
        for family in GAUGES:
            yield _filled(GaugeMetricFamily, family, states)
        for family in COUNTERS:
            yield _filled(CounterMetricFamily, family, states)
        engines = [engine for engine, _ in states]
        yield from self._histograms(engines)
        yield from _cache_configs(engines)
        yield from _adapters(states)
        yield self._rejected(engines)
        for gauge in self._gauges:
            yield GaugeMetricFamily(gauge.name, gauge.help, gauge.read())
        for name, described, counts in self._server_histograms:
            yield HistogramMetricFamily(name, described, buckets=counts.buckets(), sum_value=counts.sum)

    def _histograms(self, engines: Iterable[EngineMetrics]) -> Iterator[Metric]:
        for family in HISTOGRAMS:
            described = f"{family.help} {self._clock}" if family.is_time and self._clock else family.help
            metric = HistogramMetricFamily(family.name, described, labels=LABELS)
            for engine in engines:
                histogram = family.histogram(engine)
                metric.add_metric(_labels_of(engine), histogram.buckets(), histogram.sum)
            yield metric

    def _rejected(self, engines: Iterable[EngineMetrics]) -> Metric:
        labels = ("model_name", "reason")
        metric = CounterMetricFamily(
            "vllm:admission_rejections", "Requests that were refused, by reason.", labels=labels
        )
        name = ",".join(dict.fromkeys(engine.model_name for engine in engines))
        for reason, count in sorted(self._rejections().items()):
            metric.add_metric((name, reason), count)
        return metric


class _Collected(Collector):
    """A metric that has been collected."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _labels_of(engine: EngineMetrics) -> tuple[str, str]:
    return engine.model_name, str(engine.index)


def _filled(
    make: type[GaugeMetricFamily] | type[CounterMetricFamily],
    family: Family,
    states: Iterable[tuple[EngineMetrics, EngineState]],
) -> Metric:
    """Returns a gauge or counter with the values of all engines."""
    metric = make(family.name, family.help, labels=(*LABELS, *family.labels))
    for engine, state in states:
        for labels, value in family.values(engine, state):
            metric.add_metric((*_labels_of(engine), *labels), value)
    return metric


def _cache_configs(engines: Iterable[EngineMetrics]) -> Iterator[Metric]:
    """Yields the settings of the KV caches, as labels of a gauge that is 1."""
    engines = list(engines)
    names = tuple(dict.fromkeys(name for engine in engines for name in engine.cache_config))
    metric = GaugeMetricFamily(
        "vllm:cache_config_info", "Settings of the KV cache, as labels.", labels=(*LABELS, *names)
    )
    for engine in engines:
        values = (engine.cache_config.get(name, "") for name in names)
        metric.add_metric((*_labels_of(engine), *values), 1)
    yield metric


def _adapters(states: Iterable[tuple[EngineMetrics, EngineState]]) -> Iterator[Metric]:
    """Yields the adapters of waiting and running requests, as labels of a gauge with the present time."""
    metric = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "LoRA adapters of waiting and running requests, as labels; the value is the time of the scrape.",
        labels=(*LABELS, *ADAPTER_LABELS),
    )
    for engine, state in states:
        if engine.max_adapters is not None:
            adapters = (",".join(state.waiting_adapters), ",".join(state.running_adapters))
            metric.add_metric((*_labels_of(engine), str(engine.max_adapters), *adapters), time())
    if metric.samples:
        yield metric
