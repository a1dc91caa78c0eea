"""Figures of summary.json: their values by dotted key, and their labels and units."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.metrics.confidence import Better
from sim.report.wording import LATENCIES
from sim.settings.errors import ConfigError, suggest
from sim.setup.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A figure of summary.json, and which direction is better."""

    key: str
    """Dotted key: throughput.output_tokens_per_s, ttft.p99_s."""
    better: Better
    label: str | None = None
    """Label in tables and figures; None: derived from the key."""


WORDS = {
    "mean_batch_seqs": "mean batch size (sequences)",
    "max_batch_seqs": "max batch size (sequences)",
    "mean_batch_tokens": "mean batch size (tokens)",
    "mean_accepted_length": "mean accepted length (tokens)",
    "gpu_busy": "GPU busy",
    "mfu": "MFU",
    "mbu": "MBU",
}
"""Name of a figure -> its label, where the words of the name do not make one."""


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a summary by dotted key; NaN for a missing figure, 0 or 1 for false or true.

    Texts, lists and missing sections are left out, and so are the intervals of a single run, because a study
    computes its intervals from several runs.
    """
    of_runs = {key: value for key, value in summary.items() if key != "intervals"}
    found = (
        (key, value)
        for key, value in leaves(of_runs)
        if "." in key or value is not None or key == "break_even_load"
    )
    return {
        key: float("nan") if value is None else float(value)
        for key, value in found
        if value is None or isinstance(value, bool | int | float)
    }


def known_figures(scenario: Scenario) -> dict[str, float]:
    """Returns the figures of a scenario's runs, from a run that ends at once and has all keys."""
    at_once = replace(scenario, sim=replace(scenario.sim, until_s=1e-9))
    return figures(at_once.run().summary)


def check_metrics(scenario: Scenario, metrics: Sequence[Metric], where: str) -> None:
    """Raises ConfigError for a metric that the scenario's runs do not have. where: key of the list."""
    known = known_figures(scenario)
    for i, metric in enumerate(metrics):
        if of_all_classes(metric.key) not in known:
            section = metric.key.partition(".")[0]
            allowed = [name for name in known if name.startswith(f"{section}.")] or list(
                dict.fromkeys(name.partition(".")[0] for name in known)
            )
            missing = " with slo=none" if section == "goodput" and scenario.slo is None else ""
            raise ConfigError(
                f"{where}[{i}].key={metric.key}: no such figure in summary.json{missing}; "
                f"{suggest(metric.key, allowed, also=known)}"
            )


def of_all_classes(key: str) -> str:
    """Returns the key of a figure for all requests: by_priority.0.e2e.mean_s is e2e.mean_s of one class.

    A run that ends at once has no requests of any class.
    """
    kind, _, rest = key.partition(".")
    return rest.partition(".")[2] if kind in ("by_priority", "by_tenant") else key


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and their values; a list is one value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_text(value: Any) -> str:
    """Returns a text that is equal for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, default=str)


def label_of(metric: Metric) -> str:
    """Returns the metric's label, or one derived from its key: ttft.p99_s is TTFT p99 (in ms)."""
    if metric.label is not None:
        return metric.label
    section, _, name = metric.key.rpartition(".")
    if section in LATENCIES:
        return f"{LATENCIES[section]} {name.removesuffix('_s')}"
    per_second = name.removesuffix("_per_s")
    words = f"{per_second}/s" if per_second != name else name
    words = WORDS.get(name) or words.replace("_", " ")
    return words if section in ("", "throughput", "iterations") else f"{section.replace('.', ' ')} {words}"


def unit_of(metric: Metric) -> tuple[float, str]:
    """Returns the factor and the unit in which a figure is shown; latencies are shown in ms."""
    section, _, name = metric.key.rpartition(".")
    if section in LATENCIES and name.endswith("_s"):
        return 1e3, "ms"
    return (100.0, "%") if name.endswith("share") else (1.0, "")


def titled(metric: Metric) -> str:
    """Returns the label with the unit: TTFT p99, ms."""
    unit = unit_of(metric)[1]
    return f"{label_of(metric)}, {unit}" if unit else label_of(metric)
