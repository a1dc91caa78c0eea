"""One run in the formats of several tools."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd

# Three requests on a clock that begins at 100 s: sent, first token, last token, prompt and output tokens.
RUN = [(100.0, 100.5, 101.5, 64, 11), (100.25, 101.0, 101.0, 32, 1), (101.0, 101.25, 102.25, 16, 5)]
LATENCIES = {"ttft_s": [0.5, 0.75, 0.25], "e2e_s": [1.5, 0.75, 1.25], "tpot_s": [0.1, np.nan, 0.25]}


def csv_text(**extra) -> str:
    columns = ["arrival_s", "first_token_s", "last_token_s", "input_tokens", "output_tokens"]
    return pd.DataFrame(RUN, columns=columns).assign(**extra).to_csv(index=False)


def bench(failed: bool = False) -> dict:
    """Returns the run as `vllm bench serve --save-detailed` writes it."""
    gaps = [[0.1] * 10, [], [0.25] * 4]
    found = {
        "date": "20261122-000000",
        "duration": 2.25,
        "input_lens": [row[3] for row in RUN],
        "output_lens": [row[4] for row in RUN],
        "ttfts": [row[1] - row[0] for row in RUN],
        "itls": gaps,
        "start_times": [row[0] for row in RUN],
        "generated_texts": ["a, ]b", 'c"}', "d"],
        "errors": ["", "", ""],
    }
    if failed:
        found["errors"][1], found["output_lens"][1], found["ttfts"][1] = "Connection refused", 0, 0.0
    return found


def aiperf(row: tuple, **about) -> dict:
    sent_s, first_s, last_s, prompt, output = row
    figures = {
        "time_to_first_token": (1e3 * (first_s - sent_s), "ms"),
        "request_latency": (1e3 * (last_s - sent_s), "ms"),
        "input_sequence_length": (prompt, "tokens"),
        "output_sequence_length": (output, "tokens"),
    }
    return {
        "metadata": {"request_start_ns": int(1e9 * sent_s), "benchmark_phase": "profiling", **about},
        "metrics": {name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()},
        "error": None,
    }


def lines(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write(folder: Path, name: str) -> Path:
    """Writes the run in the format that the file name stands for."""
    file = folder / name
    if name == "requests.csv.gz":
        file.write_bytes(gzip.compress(csv_text().encode()))
    elif name.endswith(".csv"):
        file.write_text(csv_text())
    elif name == "bench.json":
        file.write_text(json.dumps(bench()))
    elif name == "profile_export.jsonl":
        ends = sorted(RUN, key=lambda row: row[2])
        file.write_text(lines([aiperf(row) for row in ends]))
    else:
        columns = ["arrival_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens"]
        pd.DataFrame(RUN, columns=columns).assign(status="finished").to_parquet(file)
    return file
