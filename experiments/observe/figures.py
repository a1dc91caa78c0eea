"""Computes the figures of an observed run, under a simulated run's names, and those of the client itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.observe.load import Load
from experiments.observe.reply import Reply
from sim.metrics import definitions
from sim.metrics.definitions import Window, plain_json
from sim.metrics.dialects import MetricsSettings
from sim.metrics.measured import goodput, measure
from sim.metrics.output import check_conservation
from sim.metrics.slo import Slo
from sim.metrics.summary import request_figures
from sim.records.requests import Status
from sim.records.run import RunRecords
from sim.records.table import to_pandas
from sim.report.wording import plural
from sim.workload.base import WorkloadNotes

LATE_SHARE = 0.01
"""Share of late requests above which a note names the client as the bottleneck."""
STALL_MS = 5.0
"""99th percentile of the client's stalls above which a note says that measured times may be late."""


def observed_figures(
    records: RunRecords, load: Load, *, slo: Slo | None, metrics: MetricsSettings, late_s: float
) -> dict[str, Any]:
    """Computes all figures as plain JSON. Latencies count from the moment of sending."""
    counts = check_conservation(records)
    part = measure(records, metrics, slo)
    table, window = to_pandas(part.table), part.window
    figures = {
        "source": "observed",
        "simulated_s": records.end_s,  # seconds on the wall clock; the name is a simulated run's
        "interrupted": records.interrupted,
        "stopped": load.stopped or None,
        "requests": counts,
        "failed": _failures(load.replies),
        **request_figures(records, part, slo),
        "throughput": _throughput(table, window, records),
        "goodput": None if slo is None else goodput(table, part.requests, window, slo),
        "client": _client(table, load, late_s),
        "tokens": _tokens(load.replies),
    }
    plain: dict[str, Any] = plain_json(figures)
    return plain


def client_notes(summary: dict[str, Any]) -> list[str]:
    """Returns the notes on the client and on failures that qualify the server's figures."""
    run = [*_ending_notes(summary), *_request_notes(summary)]
    return [*run, *_pace_notes(summary["client"]), *_token_notes(summary["tokens"])]


def _ending_notes(summary: dict[str, Any]) -> list[str]:
    if summary["stopped"] == "interrupted":
        return [f"Interrupted after {summary['simulated_s']:.1f} s; the figures cover this part of the run."]
    if summary["stopped"] and summary["stopped"] != "until_s":
        return [
            f"Stopped after {summary['simulated_s']:.1f} s: {summary['stopped']}; the remaining requests "
            "were not sent."
        ]
    return []


def _request_notes(summary: dict[str, Any]) -> list[str]:
    failed, requests = summary["failed"], summary["requests"]
    found = []
    if failed["count"]:
        kinds = "; ".join(f"{count:,} x {error}" for error, count in failed["by_error"].items())
        found.append(f"{_of_requests(failed['count'], summary)} failed: {kinds}.")
    if requests["rejected"]:
        kinds = "; ".join(f"{count:,} x {error}" for error, count in failed["refusals"].items())
        found.append(f"{_of_requests(requests['rejected'], summary, be=True)} rejected: {kinds}.")
    others = requests["aborted"] - failed["count"]
    if others:
        found.append(f"{_of_requests(others, summary, be=True)} aborted by their client.")
    if requests["unfinished"]:
        found.append(f"{_of_requests(requests['unfinished'], summary, be=True)} unfinished at the end.")
    return found


def _pace_notes(client: dict[str, Any]) -> list[str]:
    found = []
    lag_ms, stall_ms = (1e3 * (client[name]["p99_s"] or 0) for name in ("lag", "stall"))
    if (client["late_share"] or 0) > LATE_SHARE:
        found.append(
            f"{100 * client['late_share']:.1f} % of the requests were sent more than "
            f"{client['late_ms']:g} ms late (p99 {lag_ms:.1f} ms): the client was the bottleneck; lower the "
            "load, or run the client on a separate machine."
        )
    if stall_ms > STALL_MS:
        found.append(
            f"The client stalled for {stall_ms:.1f} ms (p99): measured times may be late by as much."
        )
    return found


def _token_notes(tokens: dict[str, Any]) -> list[str]:
    found = []
    if tokens["mean_per_chunk"] and tokens["several_share"] > 0:
        found.append(
            f"{100 * tokens['several_share']:.1f} % of the chunks held several tokens (mean "
            f"{tokens['mean_per_chunk']:.2f}, at most {tokens['max_per_chunk']}); ITL "
            "includes the gaps of 0 s between them."
        )
    if tokens["spread_requests"]:
        found.append(
            f"For {plural(tokens['spread_requests'], 'output')} the server reported only the total number of "
            "tokens: they are spread evenly over the chunks."
        )
    if tokens["off_prompts"]:
        found.append(
            f"{plural(tokens['off_prompts'], 'prompt')} had a different length on the server than "
            f"in the workload (mean {100 * tokens['mean_off_share']:+.1f} %)."
        )
    if tokens["off_outputs"]:
        found.append(f"{plural(tokens['off_outputs'], 'output')} had a different length than requested.")
    return found


def workload_notes(notes: WorkloadNotes) -> list[str]:
    """Returns the notes on requests that were skipped or changed."""
    found = [f"{count:,} skipped: {reason}." for reason, count in notes.skipped.items()]
    if notes.num_clipped:
        verb = "was" if notes.num_clipped == 1 else "were"
        found.append(
            f"{plural(notes.num_clipped, 'request')} {verb} truncated to the model's context length."
        )
    if notes.num_conversations_cut:
        conversations = plural(notes.num_conversations_cut, "conversation")
        found.append(f"{conversations} ended early, because the context was full.")
    return found


def _of_requests(count: int, summary: Mapping[str, Any], *, be: bool = False) -> str:
    """Returns `3 of 20 requests`; be: with was or were after it."""
    text = f"{count:,} of {plural(summary['requests']['arrived'], 'request')}"
    return text + (" was" if count == 1 else " were") * be


def _failures(replies: Sequence[Reply]) -> dict[str, Any]:
    failed = Counter(reply.error for reply in replies if reply.has_failed)
    refused = Counter(
        f"{reply.http_status} {reply.error}" for reply in replies if reply.status is Status.rejected
    )
    return {
        "count": failed.total(),
        "by_error": dict(failed.most_common(5)),
        "refusals": dict(refused.most_common(5)),
    }


def _client(table: pd.DataFrame, load: Load, late_s: float) -> dict[str, Any]:
    """Computes how late requests were sent, and how late the heartbeat's sleeps ended (stall)."""
    lag_s = _times(table, "lag_s")
    return {
        "late_ms": late_s * 1e3,
        "late_share": float((lag_s > late_s).mean()) if len(lag_s) else math.nan,
        "lag": definitions.describe(lag_s),
        "stall": definitions.describe(np.array(load.stalls_s)),
    }


def _tokens(replies: Sequence[Reply]) -> dict[str, Any]:
    held = np.array([n for reply in replies for n in reply.chunks().num_tokens], np.int64)
    prompts = [(r.prompt_tokens, r.request.prompt.num_tokens) for r in replies if r.prompt_tokens is not None]
    off = [counted / asked - 1 for counted, asked in prompts if counted != asked]
    finished = [reply for reply in replies if reply.status is Status.finished]
    return {
        "counted_by": dict(Counter(reply.chunks().counted for reply in finished)),
        "chunks": len(held),
        "mean_per_chunk": float(held.mean()) if len(held) else math.nan,
        "max_per_chunk": int(held.max(initial=0)),
        "several_share": float((held > 1).mean()) if len(held) else math.nan,
        "spread_requests": sum(reply.chunks().counted == "spread" for reply in finished),
        "off_prompts": len(off),
        "mean_off_share": float(np.mean(off)) if off else 0.0,
        "off_outputs": sum(r.num_asked is not None and r.num_tokens != r.num_asked for r in finished),
    }


def _throughput(table: pd.DataFrame, window: Window, records: RunRecords) -> dict[str, float]:
    """Computes finished requests, output tokens and prompts with a first token per second of the window."""
    began = window.holds(_times(table, "first_token_s"))
    finished = window.holds(_times(table, "finished_s")) & (table["status"] == "finished").to_numpy()
    num_gaps = int((records.gap_count * window.holds(records.gap_end_s)).sum())
    seconds = window.duration_s if window.duration_s > 0 else math.nan
    return {
        "requests_per_s": int(finished.sum()) / seconds,
        "output_tokens_per_s": (int(began.sum()) + num_gaps) / seconds,
        "input_tokens_per_s": int(table["prompt_tokens"].to_numpy()[began].sum()) / seconds,
    }


def _times(table: pd.DataFrame, name: str) -> Any:
    return table[name].to_numpy(dtype=np.float64)
