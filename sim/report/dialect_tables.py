"""Formats figures by the definitions of other tools as tables of text, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.metrics.dialects import DIALECTS, PERCENTILES, ours
from sim.report.numbers import MISSING, milliseconds, number, percent_at_least

if TYPE_CHECKING:
    import pandas as pd

DIALECT_LATENCIES = {
    "ttft": "time to first token",
    "per_token": "per token after the first",
    "per_token_with_first": "per token with the first",
    "gap": "gap between tokens",
    "e2e": "whole request",
}
FIGURES = {
    "answered": "successful",
    "failed": "failed",
    "duration_s": "duration, s",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tok/s",
    "goodput_per_s": "goodput/s",
    "good_share": "SLO attainment",
    "valid": "valid",
}
DIALECT_STATISTICS = ("mean", *(f"p{q}" for q in PERCENTILES))


def dialect_tables(summary: Mapping[str, Any]) -> list[list[list[str]]]:
    """Returns tables (heading and rows): one tool with its own terms, or several tools side by side.

    Empty if no other tool was selected.
    """
    found = summary.get("dialects")
    if not found:
        return []
    if len(found) == 1:
        return own_words(next(iter(found.values())))
    return [side_by_side(summary)]


def dialect_frame(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Returns one row per figure and tool that reports it, ours first; columns name, value, mean_s, ...

    Index: the keys of `FIGURES` and `DIALECT_LATENCIES`; `ours` and the tools of the summary.
    """
    import pandas as pd  # noqa: PLC0415 (a run that shows no frame need not load it)

    dialects = {"ours": ours(summary).to_json(), **summary["dialects"]}
    rows = {
        (key, dialect): found[key]
        for key in (*FIGURES, *DIALECT_LATENCIES)
        for dialect, found in dialects.items()
        if key in found
    }
    columns = ["name", "value", *(f"{name}_s" for name in DIALECT_STATISTICS)]
    index = pd.MultiIndex.from_tuples(rows, names=["figure", "dialect"])
    return pd.DataFrame(list(rows.values()), index=index, columns=columns)


def own_words(dialect: Mapping[str, Any]) -> list[list[list[str]]]:
    """Returns two tables with the terms of one tool: its latencies and its figures of the whole run."""
    latencies = [
        [dialect[key]["name"], *(milliseconds(dialect[key][f"{name}_s"]) for name in DIALECT_STATISTICS)]
        for key in DIALECT_LATENCIES
        if key in dialect
    ]
    figures = [
        [dialect[key]["name"], _value(key, dialect[key]["value"])] for key in FIGURES if key in dialect
    ]
    return [[[f"{dialect['tool']}, ms", *DIALECT_STATISTICS], *latencies], [[dialect["tool"], ""], *figures]]


def side_by_side(summary: Mapping[str, Any]) -> list[list[str]]:
    """Returns one table with a row per figure and a column per tool, ours first.

    A row above each latency has the terms of the tools.
    """
    columns = [
        ours(summary).to_json(),
        *(summary["dialects"][name] for name in DIALECTS if name in summary["dialects"]),
    ]
    rows = [["", *(column["tool"] for column in columns)]]
    for key in ("answered", "failed"):
        rows.append([FIGURES[key], *_figures(columns, key)])
    for key, label in DIALECT_LATENCIES.items():
        rows.append([label, *(column[key]["name"] if key in column else MISSING for column in columns)])
        for name in DIALECT_STATISTICS:
            cells = (
                milliseconds(_known(column[key][f"{name}_s"])) if key in column else "" for column in columns
            )
            rows.append([f"  {name}, ms", *cells])
    for key in list(FIGURES)[2:]:
        if any(key in column for column in columns):
            rows.append([FIGURES[key], *_figures(columns, key)])
    return rows


def _figures(columns: list[dict[str, Any]], key: str) -> list[str]:
    return [_value(key, column[key]["value"]) if key in column else MISSING for column in columns]


def _value(key: str, value: float | None) -> str:
    value = _known(value)
    if value is None:
        return MISSING
    if key == "valid":
        return "yes" if value else "no"
    if key == "good_share":
        return percent_at_least(value)
    return f"{value:,.0f}" if key in ("answered", "failed") else number(value)


def _known(value: float | None) -> float | None:
    """Returns None for NaN."""
    return None if value is None or value != value else value
