"""Reads per-request results of load generators: vllm bench serve and aiperf. Times are the client's.

vllm bench serve --save-detailed: one JSON object of lists with one element per request: start_times on a
clock without a zero, ttfts and itls (gaps between chunks) in seconds, input_lens, output_lens, errors (text,
empty if there was none). aiperf: one JSON object per line, requests in the order of their ends:
metadata.request_start_ns on the wall clock, and in metrics time_to_first_token and request_latency in ms,
input_ and output_sequence_length.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd

from experiments.validate.fidelity.measured import Measured
from experiments.validate.foreign.clock import check_requests
from experiments.validate.foreign.complete_prefix import Prefix, complete_lines, read_object
from experiments.validate.foreign.request_tables import CLIENTS_TIMES, measured
from sim.records.gaps import Gaps
from sim.report.wording import plural

VLLM_BENCH = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
AIPERF = ("input_sequence_length", "output_sequence_length", "time_to_first_token", "request_latency")


class UnknownLayout(ValueError):
    """JSON that lacks required fields, which the message names."""


def is_aiperf(prefix: Prefix) -> bool:
    """Returns whether the first line is a record of aiperf."""
    try:
        first = json.loads(prefix.lines[0])
    except (ValueError, IndexError):
        return False
    return isinstance(first, dict) and {"metadata", "metrics"} <= first.keys()


def read_vllm_bench(name: str, prefix: Prefix) -> Measured:
    """Reads the result of vllm bench serve.

    Raises UnknownLayout for missing lists, ValueError for wrong ones.
    """
    try:
        found, is_whole = read_object("".join(prefix.lines))
    except ValueError as error:
        raise UnknownLayout(str(error)) from error
    missing = [key for key in VLLM_BENCH if not isinstance(found.get(key), list)]
    if missing:
        hint = (
            "vllm bench serve writes them with --save-detailed" if is_whole else "the file ends before them"
        )
        raise UnknownLayout(f"{', '.join(missing)} missing; {hint}")
    columns = {key: found[key] for key in VLLM_BENCH}
    count = min(map(len, columns.values()))
    if is_whole and any(len(values) != count for values in columns.values()):
        lengths = ", ".join(f"{key} {len(values)}" for key, values in columns.items())
        raise ValueError(f"the lists must have equal lengths, but have {lengths}")
    errors = [*found.get("errors", []), *[""] * count][:count]
    rows, gaps_s, ends_s = [], [], []
    for i in range(count):
        start_s, ttft_s, itls_s = (float(columns["start_times"][i]), columns["ttfts"][i], columns["itls"][i])
        done = not errors[i] and columns["output_lens"][i] > 0
        chunks_s = start_s + float(ttft_s or 0.0) + np.concatenate(([0.0], np.cumsum(itls_s)))
        rows.append(
            _row(
                i + 1,
                start_s,
                (float(chunks_s[0]), float(chunks_s[-1])) if done else None,
                int(columns["input_lens"][i]),
                int(columns["output_lens"][i]),
            )
        )
        if done:
            gaps_s += list(itls_s)
            ends_s += chunks_s[1:].tolist()
    notes: tuple[str, ...] = ()
    if not is_whole:
        notes = (f"The file is truncated; only its {plural(count, 'complete request')} can be used.",)
    return _measured(name, rows, (gaps_s, ends_s), notes)


def read_aiperf(name: str, prefix: Prefix) -> Measured:
    """Reads the result of aiperf.

    Raises UnknownLayout with the line of a record that lacks required fields.
    """
    lines = complete_lines(prefix)
    rows, gaps_s, ends_s = [], [], []
    num_left_out = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            about, figures = record["metadata"], record["metrics"]
        except (ValueError, TypeError, KeyError):
            raise UnknownLayout(f"row {number}: must be an object with metadata and metrics") from None
        if about.get("benchmark_phase", "profiling") != "profiling":
            num_left_out += 1
            continue
        done = not record.get("error") and not about.get("was_cancelled")
        missing = [key for key in AIPERF if key not in figures]
        if "request_start_ns" not in about or (done and missing):
            raise UnknownLayout(
                f"row {number}: {', '.join(missing or ['request_start_ns'])} missing; run "
                "aiperf with --streaming"
            )
        start_s = about["request_start_ns"] / 1e9
        values = {key: _value(figures.get(key)) for key in AIPERF}
        first_s = start_s + values["time_to_first_token"] / 1e3
        last_s = start_s + values["request_latency"] / 1e3
        rows.append(
            _row(
                number,
                start_s,
                (first_s, last_s) if done else None,
                max(int(values["input_sequence_length"]), 1),
                int(values["output_sequence_length"]),
            )
        )
        chunk_gaps = figures.get("inter_chunk_latency", {}).get("value")
        if done and isinstance(chunk_gaps, list):
            gaps_s += [gap / 1e3 for gap in chunk_gaps]
            ends_s += (first_s + np.cumsum(chunk_gaps) / 1e3).tolist()
    notes = []
    if prefix.is_cut:
        notes.append(f"The file is truncated; only its {plural(len(rows), 'complete request')} can be used.")
    if num_left_out:
        was = "was" if num_left_out == 1 else "were"
        notes.append(f"{plural(num_left_out, 'request')} of the warm-up {was} excluded.")
    return _measured(name, rows, (gaps_s, ends_s), tuple(notes))


def _value(figure: Any) -> float:
    return float(figure["value"]) if isinstance(figure, dict) and figure.get("value") is not None else 0.0


def _row(
    number: int,
    start_s: float,
    first_and_last_s: tuple[float, float] | None,
    prompt_tokens: int,
    output_tokens: int,
) -> dict[str, Any]:
    """Returns a row of the simulator's table; without times of tokens, that of a failed request."""
    first_s, last_s = first_and_last_s or (np.nan, np.nan)
    return {
        "row": number,
        "status": "finished" if first_and_last_s else "aborted",
        "arrival_s": start_s,
        "scheduled_s": np.nan,
        "first_token_s": first_s,
        "last_token_s": last_s,
        "finished_s": last_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens if first_and_last_s else 0,
    }


def _measured(
    name: str, rows: list[dict[str, Any]], gaps: tuple[list[float], list[float]], notes: tuple[str, ...]
) -> Measured:
    if not rows:
        raise ValueError("the file has no complete request")
    requests = pd.DataFrame(rows).sort_values("arrival_s", kind="stable", ignore_index=True)
    check_requests(requests)
    gaps_s, ends_s = (np.array(values, dtype=np.float64) for values in gaps)
    recorded = Gaps(gaps_s, np.ones(len(gaps_s), np.int64), ends_s) if len(gaps_s) else None
    notes = (*notes, CLIENTS_TIMES)
    if recorded is not None and len(gaps_s) < (requests["output_tokens"] - 1).clip(lower=0).sum():
        notes = (*notes, "Some chunks contained several tokens: ITL is measured between chunks.")
    return measured(name, requests, gaps=recorded, notes=notes)
