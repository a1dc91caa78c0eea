"""Figures of summary.json: their values by dotted key, and how a reader knows them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.metrics.paired import Better
from sim.report.wording import LATENCIES
from sim.settings.errors import ConfigError, suggest
from sim.setup.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A figure of summary.json, and which way is better."""

    key: str
    """Dotted: throughput.output_tokens_per_s, ttft.p99_s."""
    better: Better
    label: str | None = None
    """In tables and figures; None: made from the key."""


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """The numbers of a summary by dotted key; NaN where a figure does not exist, 0 or 1 for false or true.

    Texts and lists are left out, and so is a whole section that does not exist, and what one run alone says
    of its own noise: that is known here, from several.
    """
    of_runs = {key: value for key, value in summary.items() if key != "intervals"}
    found = ((key, value) for key, value in leaves(of_runs) if "." in key or value is not None)
    return {
        key: float("nan") if value is None else float(value)
        for key, value in found
        if value is None or isinstance(value, bool | int | float)
    }


def known_figures(scenario: Scenario) -> dict[str, float]:
    """What `figures` has of its runs: a run that ends at once has them all."""
    at_once = replace(scenario, sim=replace(scenario.sim, until_s=1e-9))
    return figures(at_once.run().summary)


def check_metrics(scenario: Scenario, metrics: Sequence[Metric], where: str) -> None:
    """Raise ConfigError for a metric that is no figure of the scenario's runs. where: of the list."""
    known = known_figures(scenario)
    for i, metric in enumerate(metrics):
        if metric.key not in known:
            section = metric.key.partition(".")[0]
            allowed = [name for name in known if name.startswith(f"{section}.")] or list(
                dict.fromkeys(name.partition(".")[0] for name in known)
            )
            missing = " with slo=none" if section == "goodput" and scenario.slo is None else ""
            raise ConfigError(
                f"{where}[{i}].key={metric.key}: no such figure in summary.json{missing}; "
                f"{suggest(metric.key, allowed, also=known)}"
            )


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and what stands under them; a list is one value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_text(value: Any) -> str:
    """Equal for values that are equal, whatever order their keys have."""
    return json.dumps(value, sort_keys=True, default=str)


def label_of(metric: Metric) -> str:
    """The metric's own label, or one from its key: ttft.p99_s is TTFT p99 (shown in ms)."""
    if metric.label is not None:
        return metric.label
    section, _, name = metric.key.rpartition(".")
    if section in LATENCIES:
        return f"{LATENCIES[section]} {name.removesuffix('_s')}"
    per_second = name.removesuffix("_per_s")
    words = f"{per_second}/s" if per_second != name else name
    words = words.replace("_", " ")
    return words if section in ("", "throughput", "iterations") else f"{section.replace('.', ' ')} {words}"


def unit_of(metric: Metric) -> tuple[float, str]:
    """What to multiply a figure by for a reader, and the unit's name; latencies are shown in ms."""
    section, _, name = metric.key.rpartition(".")
    if section in LATENCIES and name.endswith("_s"):
        return 1e3, "ms"
    return (100.0, "%") if name.endswith("share") else (1.0, "")


def titled(metric: Metric) -> str:
    """Label and unit: TTFT p99, ms."""
    unit = unit_of(metric)[1]
    return f"{label_of(metric)}, {unit}" if unit else label_of(metric)
