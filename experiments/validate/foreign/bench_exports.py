"""Reads per-request results of load generators; times are the client's, and fields tell the tools apart.

vllm bench serve     one object of lists with an element per request (--save-detailed): start_times on a
clock without a zero, ttfts and itls (gaps between chunks) in seconds, input_lens,
output_lens, errors (text, empty if there was none)
SGLang bench_serving one such object per line and run (--output-details), without start_times
guidellm             one object with benchmarks, each with requests by their outcome; Unix times in seconds
aiperf               one object per line, requests in the order of their ends: metadata.request_start_ns
on the wall clock, and in metrics time_to_first_token and request_latency in ms,
input_ and output_sequence_length
inference-perf       a list of requests: start_time and output_token_times on a clock without a zero, in s
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from experiments.validate.fidelity.measured import Measured
from experiments.validate.foreign.clock import check_requests
from experiments.validate.foreign.complete_prefix import Prefix, complete_lines, read_list, read_object
from experiments.validate.foreign.request_tables import CLIENTS_TIMES, measured
from sim.records.table import Gaps
from sim.report.wording import plural
from sim.workload.trace_columns import MAX_UNIX_S, field_seconds, field_tokens, is_tokens, shown

LISTS = ("input_lens", "output_lens", "ttfts", "itls")
STARTS = "start_times"
VLLM_BENCH = ("input_lens", "output_lens", STARTS, "ttfts", "itls")
SGLANG_ONLY = ("backend", "dataset_name", "random_range_ratio", "sharegpt_output_len")
"""Fields of which SGLang's bench_serving has at least two, and vllm bench serve at most one."""
AIPERF = ("input_sequence_length", "output_sequence_length", "time_to_first_token", "request_latency")
AIPERF_SUMMARY = ("request_latency", "request_throughput", "time_to_first_token", "inter_token_latency")
GUIDELLM_OUTCOMES = ("successful", "errored", "incomplete")
NOT_KNOWN_WHEN = (
    f"{STARTS} missing: SGLang's bench_serving does not store when it sent its requests, which is known only "
    "for --request-rate inf without --max-concurrency (all at once); give a CSV with the times of sending, "
    "or measure with vllm bench serve --save-detailed"
)


class UnknownLayout(ValueError):
    """JSON that lacks required fields, which the message names."""


def read_json(name: str, prefix: Prefix) -> dict[str, Measured]:
    """Returns the runs of a result in JSON, by name; the fields say which tool wrote it.

    Raises UnknownLayout if it is none of the known ones, and ValueError that names the row, the field and the
    value of the first value that no run can have.
    """
    first = first_record(prefix)
    if first is not None and {"metadata", "metrics"} <= first.keys():
        return {name: read_aiperf(name, prefix)}
    if first is not None and _is_sglang(first):
        return _read_sglang(name, prefix)
    try:
        found, is_whole = read_object("".join(prefix.lines))
    except RecursionError:
        raise ValueError("its JSON nests values too deeply to be read") from None
    except ValueError as error:
        raise UnknownLayout(str(error)) from error
    if isinstance(found.get("benchmarks"), list):
        return _read_guidellm(name, found["benchmarks"])
    if isinstance(found.get("experiments"), list):
        raise UnknownLayout(
            "it is a profile of genai-perf or perf_analyzer, without numbers of tokens; measure with aiperf, "
            "its successor"
        )
    if {"load_summary", "successes"} <= found.keys():
        raise UnknownLayout(
            "it is a summary of inference-perf, without requests; give per_request_lifecycle_metrics.json, "
            "which it writes with report.request_lifecycle.per_request=true"
        )
    if any(isinstance(found.get(key), dict) and "avg" in found[key] for key in AIPERF_SUMMARY):
        raise UnknownLayout(
            "it is a summary of aiperf, without requests; give profile_export.jsonl beside it"
        )
    return {name: _read_lists(name, found, is_whole)}


def first_record(prefix: Prefix) -> dict[str, Any] | None:
    """Returns the object in the first line; None if that is no whole object."""
    try:
        first = json.loads(next(line for line in prefix.lines if line.strip()))
    except (ValueError, StopIteration, RecursionError):
        return None
    return first if isinstance(first, dict) else None


def read_vllm_bench(name: str, prefix: Prefix) -> Measured:
    """Reads the result of vllm bench serve. Raises as `read_json`."""
    return read_json(name, prefix)[name]


def _is_sglang(found: dict[str, Any]) -> bool:
    return sum(key in found for key in SGLANG_ONLY) >= 2


def _read_sglang(name: str, prefix: Prefix) -> dict[str, Measured]:
    """Returns the runs of a file of SGLang's bench_serving, one per line."""
    runs: dict[str, Measured] = {}
    texts = [line for line in prefix.lines if line.strip()]
    for number, text in enumerate(texts, 1):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            if prefix.is_cut and number == len(texts):
                break
            raise UnknownLayout(f"line {number}: must be a JSON object") from None
        if not isinstance(found, dict):
            raise UnknownLayout(f"line {number}: must be a JSON object")
        missing = [key for key in LISTS if not isinstance(found.get(key), list)]
        if missing:
            raise UnknownLayout(
                f"{', '.join(missing)} missing; SGLang's bench_serving writes them with --output-details"
            )
        notes: tuple[str, ...] = ()
        if STARTS not in found:
            if not _is_unlimited(found.get("request_rate")) or found.get("max_concurrency") is not None:
                raise UnknownLayout(NOT_KNOWN_WHEN)
            found[STARTS] = [0.0] * len(found["input_lens"])
            notes = ("All requests were sent at once (request_rate inf); the file does not say when.",)
        run = name if len(texts) == 1 else f"line_{number}"
        runs[run] = _read_lists(run, found, True, notes)
    return runs


def _is_unlimited(rate: Any) -> bool:
    return rate is None or rate == math.inf or (isinstance(rate, str) and rate.lower() in ("inf", "infinity"))


def _read_lists(name: str, found: dict[str, Any], is_whole: bool, notes: tuple[str, ...] = ()) -> Measured:
    """Reads a result that has a list per figure."""
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
    errors = found.get("errors", [])
    if not isinstance(errors, list):
        raise ValueError(f"errors={shown(errors)}: must be a list of texts")
    errors = [*errors, *[""] * count][:count]
    rows, gaps_s, ends_s = [], [], []
    for i in range(count):
        where = f"row {i + 1}"
        start_s = field_seconds(where, f"{STARTS}[{i}]", columns[STARTS][i], least=-MAX_UNIX_S)
        output_tokens = field_tokens(where, f"output_lens[{i}]", columns["output_lens"][i])
        done = not errors[i] and output_tokens > 0
        prompt_tokens = field_tokens(where, f"input_lens[{i}]", columns["input_lens"][i], least=int(done))
        if not done:
            rows.append(_row(i + 1, start_s, None, prompt_tokens, 0))
            continue
        ttft_s = field_seconds(where, f"ttfts[{i}]", columns["ttfts"][i])
        itls_s = _gaps_s(where, f"itls[{i}]", columns["itls"][i])
        chunks_s = start_s + ttft_s + np.concatenate(([0.0], np.cumsum(itls_s)))
        rows.append(
            _row(i + 1, start_s, (float(chunks_s[0]), float(chunks_s[-1])), prompt_tokens, output_tokens)
        )
        gaps_s += list(itls_s)
        ends_s += chunks_s[1:].tolist()
    if not is_whole:
        notes = (*notes, _truncated(count))
    return _measured(name, rows, (gaps_s, ends_s), notes)


def _gaps_s(where: str, field: str, found: Any, unit_s: float = 1.0) -> list[float]:
    """Returns gaps between chunks in seconds. Raises ValueError at the first that is no time."""
    if not isinstance(found, list):
        raise ValueError(f"{where}: {field}={shown(found)}: must be a list of times")
    if set(map(type, found)) <= {int, float}:
        try:
            gaps_s = np.array(found, np.float64) * unit_s
        except OverflowError:  # an integer beyond all floats, which is found below
            gaps_s = np.array([math.nan])
        if ((gaps_s >= 0) & (gaps_s <= MAX_UNIX_S)).all():
            listed: list[float] = gaps_s.tolist()
            return listed
    return [field_seconds(where, f"{field}[{k}]", gap, unit_s=unit_s) for k, gap in enumerate(found)]


def _read_guidellm(name: str, benchmarks: list[Any]) -> dict[str, Measured]:
    """Returns the benchmarks of a result of guidellm, by their numbers from 1 if there are several."""
    runs: dict[str, Measured] = {}
    for number, one in enumerate(benchmarks, 1):
        requests = one.get("requests") if isinstance(one, dict) else None
        if not isinstance(requests, dict) or not isinstance(requests.get("successful"), list):
            raise UnknownLayout(
                f"benchmarks[{number - 1}]: requests.successful missing; guidellm must store requests"
            )
        run = name if len(benchmarks) == 1 else f"benchmark_{number}"
        rows = list(_guidellm_rows(f"benchmarks[{number - 1}]", requests))
        if rows:
            runs[run] = _measured(run, rows, ([], []), ())
    if not runs:
        raise ValueError("the file has no complete request")
    return runs


def _guidellm_rows(where: str, requests: dict[str, Any]) -> Iterator[dict[str, Any]]:
    number = 0
    for outcome in GUIDELLM_OUTCOMES:
        found = requests.get(outcome) or []
        if not isinstance(found, list):
            raise ValueError(f"{where}: requests.{outcome}={shown(found)}: must be a list of requests")
        for i, one in enumerate(found):
            number += 1
            place = f"{where}: requests.{outcome}[{i}]"
            if not isinstance(one, dict):
                raise ValueError(f"{place}={shown(one)}: must be an object")
            values = _guidellm_values(one)
            if outcome != "successful":
                if is_tokens(values["prompt_tokens"], 0) and values["request_start"] is not None:
                    start_s = field_seconds(place, "request_start", values["request_start"])
                    yield _row(number, start_s, None, int(values["prompt_tokens"]), 0)
                continue
            start_s = field_seconds(place, "request_start", values["request_start"])
            yield _row(
                number,
                start_s,
                (
                    field_seconds(place, "first_token_iteration", values["first_token"]),
                    field_seconds(place, "last_token_iteration", values["last_token"]),
                ),
                field_tokens(place, "prompt_tokens", values["prompt_tokens"], least=1),
                field_tokens(place, "output_tokens", values["output_tokens"], least=1),
            )


def _guidellm_values(one: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a request by our names; versions of guidellm have them at different places."""
    info = one.get("info") or one.get("scheduler_info") or {}
    timings = info.get("timings") or info.get("request_timings") if isinstance(info, dict) else {}
    known = {**one, **(timings if isinstance(timings, dict) else {})}
    places = {
        "request_start": ("request_start", "request_start_time", "start_time"),
        "first_token": ("first_token_iteration", "first_iteration", "first_token_time"),
        "last_token": ("last_token_iteration", "last_iteration", "last_token_time"),
        "prompt_tokens": ("prompt_tokens",),
        "output_tokens": ("output_tokens",),
    }
    return {
        name: next((known[key] for key in keys if known.get(key) is not None), None)
        for name, keys in places.items()
    }


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
            phase = about.get("benchmark_phase", "profiling")
            missing = [key for key in AIPERF if key not in figures]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UnknownLayout(f"row {number}: must be an object with metadata and metrics") from None
        if phase != "profiling":
            num_left_out += 1
            continue
        done = not record.get("error") and not about.get("was_cancelled")
        if "request_start_ns" not in about or (done and missing):
            raise UnknownLayout(
                f"row {number}: {', '.join(missing or ['request_start_ns'])} missing; run "
                "aiperf with --streaming"
            )
        where = f"row {number}"
        start_s = field_seconds(where, "request_start_ns", about["request_start_ns"], unit_s=1e-9)
        if not done:
            prompt = _figure(figures, AIPERF[0])
            rows.append(_row(number, start_s, None, int(prompt) if is_tokens(prompt) else 1, 0))
            continue
        first_s, last_s = (
            start_s + field_seconds(where, key, _figure(figures, key), unit_s=1e-3) for key in AIPERF[2:]
        )
        prompt_tokens, output_tokens = (
            field_tokens(where, key, _figure(figures, key), least=1) for key in AIPERF[:2]
        )
        rows.append(_row(number, start_s, (first_s, last_s), prompt_tokens, output_tokens))
        chunk_gaps = _figure(figures, "inter_chunk_latency")
        if isinstance(chunk_gaps, list):
            between_s = _gaps_s(where, "inter_chunk_latency", chunk_gaps, 1e-3)
            gaps_s += between_s
            ends_s += (first_s + np.cumsum(between_s)).tolist()
    notes = []
    if prefix.is_cut:
        notes.append(_truncated(len(rows)))
    if num_left_out:
        was = "was" if num_left_out == 1 else "were"
        notes.append(f"{plural(num_left_out, 'request')} of the warm-up {was} excluded.")
    return _measured(name, rows, (gaps_s, ends_s), tuple(notes))


def read_inference_perf(name: str, prefix: Prefix) -> Measured:
    """Reads the requests of inference-perf. Raises UnknownLayout and ValueError as `read_json`.

    Numbers of tokens are those of the server where the file has them.
    """
    try:
        found, is_whole = read_list("".join(prefix.lines))
    except RecursionError:
        raise ValueError("its JSON nests values too deeply to be read") from None
    except ValueError as error:
        raise UnknownLayout(str(error)) from error
    rows, gaps_s, ends_s = [], [], []
    for number, one in enumerate(found, 1):
        where = f"request {number}"
        if not isinstance(one, dict) or "start_time" not in one:
            what = "; LLMPerf does not store when it sent its requests" if _has(one, "ttft_s") else ""
            raise UnknownLayout(f"{where}: start_time missing{what}")
        start_s = field_seconds(where, "start_time", one["start_time"])
        prompt, output, times = _of_inference_perf(one)
        if one.get("error") or output in (None, 0):
            rows.append(_row(number, start_s, None, int(prompt) if is_tokens(prompt) else 1, 0))
            continue
        if not times:
            raise UnknownLayout(f"{where}: output_token_times missing; run inference-perf with streaming")
        at_s = np.array(_gaps_s(where, "output_token_times", times))
        prompt_tokens = field_tokens(where, "input_tokens", prompt, least=1)
        output_tokens = field_tokens(where, "output_tokens", output, least=1)
        rows.append(_row(number, start_s, (float(at_s[0]), float(at_s[-1])), prompt_tokens, output_tokens))
        if (np.diff(at_s) < 0).any():
            raise ValueError(f"{where}: output_token_times: must not decrease")
        gaps_s += np.diff(at_s).tolist()
        ends_s += at_s[1:].tolist()
    notes = () if is_whole else (_truncated(len(rows)),)
    return _measured(name, rows, (gaps_s, ends_s), notes)


def _has(found: Any, key: str) -> bool:
    return isinstance(found, dict) and key in found


def _of_inference_perf(one: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns the tokens of prompt and output of a request and the times of its chunks."""

    def inside(found: Any, *keys: str) -> Any:
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    info = one.get("info")
    response = inside(info, "response_metrics") or info
    prompts = (
        inside(response, "server_usage", "prompt_tokens"),
        inside(info, "request_metrics", "text", "input_tokens"),
        inside(info, "input_tokens"),
    )
    outputs = inside(response, "server_usage", "completion_tokens"), inside(response, "output_tokens")
    prompt, output = (next((one for one in found if one), None) for found in (prompts, outputs))
    return prompt, output, inside(response, "output_token_times")


def _truncated(count: int) -> str:
    return f"The file is truncated; only its {plural(count, 'complete request')} can be used."


def _figure(figures: dict[str, Any], key: str) -> Any:
    """Returns the value of a figure, which stands beside its unit."""
    found = figures.get(key)
    return found.get("value") if isinstance(found, dict) else found


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
