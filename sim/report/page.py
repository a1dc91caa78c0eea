"""Writes report.html: verdict, headline metrics, plots with captions, configuration, glossary."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from sim.metrics.definitions import Window
from sim.metrics.plots import MAX_REPLICAS_APART, MAX_REQUEST_POINTS, MAX_SAMPLE, Plots
from sim.metrics.slo import Slo
from sim.records.run import RunRecords
from sim.report import lines, wording
from sim.report.chart import Chart, page_js
from sim.report.files import config_yaml, write_whole
from sim.report.plots import (
    SPECULATION_CAPTION,
    iteration_times,
    latency_cdfs,
    replicas_over_time,
    slo_attainment,
    speculation,
    time_by_kind,
    timeline,
    ttft_by_prompt_length,
)
from sim.report.wording import dialect_tables

GLOSSARY = {
    "token": "piece of text that the model reads or writes: a short word or a part of a word",
    "iteration": "one forward pass of the model over a batch: the tokens of all requests that run in it",
    "prefill": "computation of a prompt, whole or in chunks; ends with the first output token",
    "decode": "computation of one further output token of a request",
    "KV cache": "GPU memory with the keys and values of the tokens of running requests, allocated in blocks",
    "replica": "one copy of the model with its own GPUs and its own queue",
    "preemption": "a running request loses its KV blocks to other requests and continues later; its KV is "
    "recomputed, or swapped to host memory and back",
    "SLO": "service level objective: limits on the latencies of a request, and a target for the share of "
    "requests that meet all limits",
    "SLO attainment": "share of the requests that met all limits; rejected and unfinished requests did not",
    "TTFT": "time to first token: arrival at the service to the first output token, queueing included",
    "TPOT": "time per output token: (last token − first token) / (output tokens − 1), one value per request",
    "ITL": "inter-token latency: the time between two output tokens of a request, over all requests",
    "E2E": "end-to-end latency: arrival to the last output token",
    "queue": "queueing time: arrival to the start of the first iteration that computes tokens of the request",
    "waiting": "all time in the queue, also after preemptions, by what the first request in the queue "
    "waited for: the end of the current iteration, a sequence slot (max_num_seqs), token budget "
    "(max_num_batched_tokens), KV memory, an adapter slot, or the policy",
    "hit rate": "share of prompt tokens with KV in the prefix cache or another tier when the request started",
    "goodput": "requests per second that finished within all limits of the SLO",
    "GPU busy": "share of the time in which an iteration runs, however few units it uses; nvidia-smi calls "
    "it utilisation. High utilisation with low MFU is normal for decode, which reads all weights and KV to "
    "compute one token per sequence: memory bandwidth (MBU) limits it, not FLOP/s",
    "MFU": "model FLOPs utilisation: FLOPs of the model / (time × peak dense FLOP/s of the data type)",
    "MBU": "memory bandwidth utilisation: bytes of weights and KV read / (time × peak memory bandwidth)",
    "KV mean / peak": "share of the KV cache's blocks that are in use: mean over time, and maximum",
    "batch mean / max": "requests per iteration",
    "decode, prefill, mixed": "kinds of iterations: with decodes only, with prefill chunks only, with both",
    "gemm, attention, communication, elementwise, lm_head, launch, host": "parts of an iteration's time: "
    "matrix products of the layers, attention, data exchange between GPUs, other operators of the layers, "
    "output projection and sampling, kernel launches, and work on the CPU",
    "cost": "price of all GPUs for the measured time; per M output tokens: the whole cost per million output "
    "tokens",
    "cost, split": "the cost divided between input and output tokens by the GPU time that each took; mixed "
    "iterations are divided by their tokens",
    "energy": "electricity of the GPUs, at a power between idle power and TDP according to MFU and MBU; kWh "
    "and CO2e include the overhead of the data centre (PUE)",
    "warm-up": "the first requests, until latencies no longer depend on the empty start; MSER-5 is the "
    "method that finds its end",
    "confidence (single run)": "95 % confidence intervals by the method of batch means, if the run is long "
    "enough for independent batches; several seeds give better ones: windtunnel compare",
    "p50, p99": "percentiles: 50 % or 99 % of the values are at most this large (linear interpolation)",
}

DRAFT_GLOSSARY = {
    "draft token": "token that is guessed before a pass and verified in it, as one more row",
    "draft": "one pass of a request with at least one draft token",
    "acceptance rate": "accepted / verified draft tokens; by place: share of the drafts that accepted their "
    "first, second, ... draft token",
    "mean accepted length": "1 + accepted draft tokens / drafts, as in vLLM",
    "burst": "output tokens of one pass, which come at one time; ITL counts the gap between two bursts",
}
"""Glossary terms for runs with speculation."""
NOTHING = "Nothing was served in the measured time, so there is nothing to draw."


ATTAINMENT_CAPTION = (
    "Share of the requests that met all limits of the SLO, and each limit. Dashed: the target."
)
LATENCY_CAPTION = (
    "Share of the requests (ITL: of the gaps between tokens) with at most the latency on the x axis. "
    "Points: p50 and p99. Dashed: the limit of the SLO."
)
TTFT_CAPTION = (
    f"One point per request (at most {MAX_REQUEST_POINTS:,}; the slowest are always shown). "
    "Lines: median and p99 per doubling of the prompt length."
)
REPLICAS_CAPTION = (
    "Wanted: all replicas except draining ones, which finish their requests and stop. Replicas that "
    "start, drain or are down cost as much as serving ones."
)
TIME_CAPTION = (
    "Share of the replicas' time by kind of iteration, split into the parts that the hardware model computes."
)
SAMPLED = (
    f"The time of a kind is divided as in a sample of its iterations, {MAX_SAMPLE:,} at most, because there "
    "are many."
)
ITERATIONS_CAPTION = (
    "One point per iteration: its duration against the tokens in its batch. If there are many, a part is "
    "shown, always with the longest."
)


class Section(NamedTuple):
    """A plot with its title and caption; the plot is None for a run with a duration of 0 s."""

    title: str
    caption: str
    figure: Chart | None


_BEFORE, _AFTER = map(
    Template, Path(__file__).with_name("page.html").read_text(encoding="utf-8").split("$plotly")
)
"""The page before and after 5 MB of code, in two parts because any placeholder could occur in a run's names.
"""


def write_report(
    path: str | Path,
    plots: Plots,
    end: RunRecords,
    summary: dict[str, Any],
    config: dict[str, Any],
    slo: Slo | None,
) -> None:
    """Writes one self-contained HTML file of less than 6 MB for runs of any length; it opens offline.

    end: the records of the run, whose tables may have no rows. config: the resolved configuration as plain
    data.
    """
    write_sections(path, report_sections(plots, end, summary, slo), summary, config)


def write_sections(
    path: str | Path, sections: Sequence[Section], summary: dict[str, Any], config: dict[str, Any]
) -> None:
    """Writes the page of `write_report` with the given plots."""
    fields = {
        "title": html.escape(_title(config)),
        "verdict": html.escape(wording.verdict(summary)),
        "verdict_class": _verdict_class(summary),
        "terms": html.escape("; ".join(wording.slo_terms(summary["goodput"])) if summary["goodput"] else ""),
        "caveats": "".join(f"<p class=caveat>{html.escape(text)}</p>" for text in lines.caveats(summary)),
        "blocks": _blocks(summary),
        "pressure": "".join(
            f"<p class=caption>{html.escape(text)}</p>"
            for text in (
                *filter(None, [wording.busy_line(summary)]),
                *lines.pressure_lines(summary),
                *lines.fleet_lines(summary),
                *lines.interval_lines(summary),
            )
        ),
        "latencies": _latency_table(summary),
        "classes": "".join(
            f"<div class=scroll>{_latencies(rows)}</div>"
            for rows in (
                *wording.class_tables(summary),
                wording.pool_table(summary),
                wording.own_table(summary),
                *dialect_tables(summary),
            )
            if rows
        ),
        "sections": "".join(map(_drawn, sections)) or f"<section><p>{NOTHING}</p></section>",
        "config": html.escape(config_yaml(config)),
        "glossary": "".join(
            f"<dt>{term}</dt><dd>{meaning}</dd>" for term, meaning in _terms(summary).items()
        ),
    }
    before, after = (part.substitute(fields).encode() for part in (_BEFORE, _AFTER))
    write_whole(Path(path), b"".join((before, page_js(), after)))


def report_sections(plots: Plots, end: RunRecords, summary: dict[str, Any], slo: Slo | None) -> list[Section]:
    """Returns the sections of the page from the top; none if no request was served in the measured time."""
    figures = plots.figures
    if not figures.octaves and not figures.states.num_bins:
        return []
    window = Window(summary["trimmed"]["start_s"], summary["trimmed"]["end_s"])
    sections: list[Section] = []
    if slo and figures.octaves:
        chart = slo_attainment(plots, summary["goodput"], window, slo)
        sections.append(Section("SLO attainment", ATTAINMENT_CAPTION, chart))
    sections.append(Section("Latency", LATENCY_CAPTION, latency_cdfs(plots, slo)))
    sections.append(Section("TTFT against prompt length", TTFT_CAPTION, ttft_by_prompt_length(plots, slo)))
    sections.append(Section("Over time", over_time_caption(end, window), timeline(plots, end, window)))
    if (figure := replicas_over_time(end)) is not None:
        sections.append(Section("Replicas", REPLICAS_CAPTION, figure))
    if (figure := speculation(plots, end, window)) is not None:
        sections.append(Section("Speculation", SPECULATION_CAPTION, figure))
    caption = f"{TIME_CAPTION} {SAMPLED}" if figures.times.is_sample else TIME_CAPTION
    sections.append(Section("Where the time went", caption, time_by_kind(plots, end, window)))
    sections.append(Section("Iterations", ITERATIONS_CAPTION, iteration_times(plots)))
    return sections


def over_time_caption(records: RunRecords, window: Window) -> str:
    """Returns the caption of the plots over time. records: their tables may have no rows."""
    caption = "Means over short intervals. Dotted: the maximum in each interval."
    if records.num_replicas > MAX_REPLICAS_APART:
        caption = f"Mean of {records.num_replicas} replicas over short intervals. Dotted: their maximum."
    elif records.num_replicas > 1:
        caption += " One colour per replica."
    if window != (0.0, records.end_s):
        caption += " Shaded: warm-up and cool-down, which no other figure includes."
    return caption


def _terms(summary: dict[str, Any]) -> dict[str, str]:
    own = {html.escape(name.replace("_", " ")): html.escape(one["definition"]) for name, one in _own(summary)}
    return GLOSSARY | (DRAFT_GLOSSARY if "speculation" in summary else {}) | own


def _own(summary: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Returns the user-defined metrics that have a definition."""
    return ((name, one) for name, one in summary.get("own", {}).items() if one["definition"])


def _drawn(section: Section) -> str:
    settings = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}
    drawn = "<p>The run has a duration of 0 s: there is nothing to draw.</p>"
    if section.figure is not None:
        drawn = section.figure.html(settings)
    return f"<section><h2>{section.title}</h2><p class=caption>{section.caption}</p>{drawn}</section>"


def _title(config: dict[str, Any]) -> str:
    """Returns the names of the parts of the configuration: "llama-3.1-8b · H100 SXM · chat"."""
    names = [part["name"] for part in config.values() if isinstance(part, dict) and part.get("name")]
    return " · ".join(map(str, names)) or "simulation"


def _verdict_class(summary: dict[str, Any]) -> str:
    attained = summary["goodput"]["attained"] if summary["goodput"] else None
    return "neutral" if attained is None else "attained" if attained else "missed"


def _blocks(summary: dict[str, Any]) -> str:
    def rows(block: dict[str, str]) -> str:
        return "".join(
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in block.items()
        )

    blocks = wording.headline(summary)
    if energy := wording.energy(summary):
        blocks["Energy"] = energy
    return "".join(
        f"<div class=block><h3>{title}</h3><table>{rows(block)}</table></div>"
        for title, block in blocks.items()
    )


def headline_html(summary: dict[str, Any]) -> str:
    """Returns the latencies and the blocks of metrics as unstyled HTML tables."""
    return f"{_latency_table(summary)}<div style='display:flex;gap:24px'>{_blocks(summary)}</div>"


def _latency_table(summary: dict[str, Any]) -> str:
    return _latencies([["ms", *wording.STATISTICS, "count"], *wording.latency_rows(summary)])


def _latencies(rows: list[list[str]]) -> str:
    """Returns a heading and its rows as an HTML table."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join(
        f"<tr><th>{html.escape(label)}</th>{''.join(f'<td>{value}</td>' for value in values)}</tr>"
        for label, *values in rows[1:]
    )
    return f"<table class=latencies><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
