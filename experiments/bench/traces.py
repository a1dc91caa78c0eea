"""Measures reading traces: peak memory and CPU time per row, by format and number of rows.

    python -m experiments.bench.traces [rows ...]        # default: 100000 1000000

The files are made in a temporary folder; each is read in a process of its own. The memory is that above the
imports, for checking the trace and reading all requests as columns. docs/speed.md has results.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from policies.core.request import Prompt, Request, Segment
from sim.report.files import write_table
from sim.workload.agent_traces import TraceLabJsonl, WekaJsonl
from sim.workload.arrivals import Poisson
from sim.workload.base import Workload
from sim.workload.chunks import chunks_of
from sim.workload.csv_traces import PlainCsv
from sim.workload.mooncake import MooncakeJsonl
from sim.workload.parquet_traces import ChutesParquet
from sim.workload.recording import Recording
from sim.workload.traffic_log import TrafficLog

ROWS_AT_ONCE = 100_000
DAY_S = 86_400.0
CALLS = 50
"""Calls of a session of agents; `ACTIVE` sessions run at the same time."""
ACTIVE = 100

Columns = tuple[list[float], list[int], list[int]]
"""Times in seconds, prompt tokens and output tokens."""


def drawn(num_rows: int, *, is_sorted: bool = True) -> Iterator[Columns]:
    """Draws the requests of a day, some at a time."""
    rng = np.random.default_rng(0)
    for start in range(0, num_rows, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, num_rows - start)
        shares = np.sort(rng.random(count)) * count + start if is_sorted else rng.random(count) * num_rows
        prompts, outputs = rng.integers(1, 4000, count), rng.integers(1, 800, count)
        yield np.round(shares / num_rows * DAY_S, 4).tolist(), prompts.tolist(), outputs.tolist()


def write_csv(path: Path, num_rows: int, *, is_sorted: bool = True) -> None:
    """Writes `PlainCsv`."""
    with path.open("w") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n")
        for columns in drawn(num_rows, is_sorted=is_sorted):
            file.write(
                "".join(f"{time},{prompt},{output}\n" for time, prompt, output in zip(*columns, strict=True))
            )


def write_json(path: Path, num_rows: int) -> None:
    """Writes `MooncakeJsonl`, with two hashes per prompt."""
    row = '{{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": [{}, {}]}}\n'
    with path.open("w") as file:
        for times, prompts, outputs in drawn(num_rows):
            rows = zip(times, prompts, outputs, strict=True)
            file.write("".join(row.format(int(t * 1e3), p + 512, o, p, o) for t, p, o in rows))


def write_parquet(path: Path, num_rows: int) -> None:
    """Writes `ChutesParquet` in a single row group."""
    columns = [np.concatenate(column) for column in zip(*drawn(num_rows), strict=True)]
    users = pa.DictionaryArray.from_arrays(np.arange(num_rows) % 1000, [f"user-{i}" for i in range(1000)])
    times = pa.array(((1.77e9 + columns[0]) * 1e6).astype(np.int64)).cast(pa.timestamp("us"))
    table = pa.table(
        {"started_at": times, "it": columns[1], "ot": columns[2], "user_id": users.cast(pa.utf8())}
    )
    pq.write_table(table, path, row_group_size=num_rows)


def write_weka(path: Path, num_rows: int) -> None:
    """Writes `WekaJsonl`: sessions of `CALLS` calls in `ACTIVE` seconds, whose prompts grow by 64 tokens."""
    with path.open("w") as file:
        for session in range(num_rows // CALLS):
            calls = [
                {
                    "t": call * ACTIVE / CALLS,
                    "type": "n",
                    "in": 64 * (call + 1),
                    "out": 9 + session % 90,
                    "hash_ids": [*range(call + 1)],
                }
                for call in range(CALLS)
            ]
            head = {"id": f"session-{session}", "block_size": 64, "hash_id_scope": "local"}
            file.write(json.dumps(head | {"requests": calls}) + "\n")


def write_tracelab(path: Path, num_rows: int) -> None:
    """Writes `TraceLabJsonl`: the rounds of one session after the other, as `write_weka` has them."""
    with path.open("w") as file:
        for number in range(num_rows):
            session, call = divmod(number, CALLS)
            at_s = 1.77e9 + session + call * ACTIVE / CALLS
            event = {
                "event_type": "user_message",
                "timestamp": datetime.fromtimestamp(at_s, UTC).isoformat(),
            }
            row = {
                "session_id": f"session-{session}",
                "input_tokens_total": 64 * (call + 1),
                "prefix_tokens": 64 * call,
                "output_tokens": 9 + session % 90,
                "timing_events": [event],
            }
            file.write(json.dumps(row) + "\n")


def write_recording(path: Path, num_rows: int) -> None:
    """Writes `Recording`, with two segments per prompt."""
    log, numbers = TrafficLog(), count()
    for times, prompts, outputs in drawn(num_rows):
        for time_s, prompt, output in zip(times, prompts, outputs, strict=True):
            segments = (Segment(prompt, 16), Segment(output, 8))
            request = Request(next(numbers), time_s, Prompt(prompt + 23, segments), max_tokens=output)
            log.add(request, output, time_s)
    write_table(log.table({}), path)


def compress_gzip(source: Path, path: Path) -> None:
    """Compresses a file as gzip does by default."""
    with source.open("rb") as file, gzip.open(path, "wb", compresslevel=6) as compressed:
        shutil.copyfileobj(file, compressed)


def compress_zstd(source: Path, path: Path) -> None:
    """Compresses a file as zstd does by default."""
    with source.open("rb") as file, path.open("wb") as compressed:
        zstandard.ZstdCompressor().copy_stream(file, compressed)


class Format(NamedTuple):
    """A format: what reads a file, and what writes one with a number of rows."""

    reads: Callable[..., Workload]
    write: Callable[[Path, int], None]


FORMATS = {
    ".csv": Format(PlainCsv, write_csv),
    ".jsonl": Format(MooncakeJsonl, write_json),
    ".parquet": Format(ChutesParquet, write_parquet),
    ".unsorted.csv": Format(partial(PlainCsv, sort=True), partial(write_csv, is_sorted=False)),
    ".weka.jsonl": Format(partial(WekaJsonl, arrivals=Poisson(rate_per_s=1.0)), write_weka),
    ".tracelab.jsonl": Format(TraceLabJsonl, write_tracelab),
    ".recording": Format(Recording, write_recording),
}
COMPRESSED = {".gz": compress_gzip, ".zst": compress_zstd}


def files(folder: Path, num_rows: int) -> Iterator[Path]:
    """Yields the file of each format; the next call deletes it."""
    for suffix, kind in FORMATS.items():
        path = folder / f"trace{suffix}"
        kind.write(path, num_rows)
        yield path
        for more, compress in COMPRESSED.items() if suffix in (".csv", ".jsonl") else ():
            compressed = path.with_name(path.name + more)
            compress(path, compressed)
            yield compressed
            compressed.unlink()
        path.unlink()


def peak_kib() -> int:
    """Returns the peak memory of this process, without that of the one which began it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def measure(path: Path) -> tuple[float, float, float]:
    """Returns peak MiB above the start of this process, us per row to check the trace, and to read it."""
    suffix = path.name.removeprefix("trace").removesuffix(".gz").removesuffix(".zst")
    before_kib, began_s = peak_kib(), process_time()
    source = FORMATS[suffix].reads(path=path).source(seed=0, max_model_len=1 << 20)
    checked_s = process_time()
    num_rows = sum(map(len, chunks_of(source)))
    read_s = process_time()
    return (
        (peak_kib() - before_kib) / 1024,
        (checked_s - began_s) * 1e6 / num_rows,
        (read_s - checked_s) * 1e6 / num_rows,
    )


def main(nums_rows: list[int]) -> None:
    """Prints one line for each format and number of rows."""
    print(f"{'file':22} {'rows':>12} {'peak MiB':>9} {'check us/row':>13} {'read us/row':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in nums_rows:
            for path in files(Path(folder), num_rows):
                command = [sys.executable, "-m", "experiments.bench.traces", "--file", str(path)]
                ended = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
                peak_mib, check_us, read_us = map(float, ended.stdout.split())
                print(
                    f"{path.name:22} {num_rows:12,} {peak_mib:9.0f} {check_us:13.2f} {read_us:12.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--file"]:
        print(*measure(Path(sys.argv[2])))
    else:
        main([int(float(number)) for number in sys.argv[1:]] or [100_000, 1_000_000])
