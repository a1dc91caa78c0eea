"""Measures reading traces: peak memory and CPU time per row, by format and number of rows.

    python -m experiments.bench.traces [rows ...]        # default: 100000 1000000

The files are made in a temporary folder; each is read in a process of its own. The memory is that above the
imports, for checking the trace and reading all requests as columns. docs/speed.md has results.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from experiments.bench.memory import peak_mib
from sim.workload.base import Workload
from sim.workload.chunks import chunks_of
from sim.workload.formats import ChutesParquet, MooncakeJsonl, PlainCsv

ROWS_AT_ONCE = 100_000
DAY_S = 86_400.0

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
}
COMPRESSED = {".gz": compress_gzip, ".zst": compress_zstd}


def files(folder: Path, num_rows: int, formats: Mapping[str, Format] = FORMATS) -> Iterator[Path]:
    """Yields the file of each format; the next call deletes it."""
    for suffix, kind in formats.items():
        path = folder / f"trace{suffix}"
        kind.write(path, num_rows)
        yield path
        for more, compress in COMPRESSED.items() if suffix in (".csv", ".jsonl") else ():
            compressed = path.with_name(path.name + more)
            compress(path, compressed)
            yield compressed
            compressed.unlink()
        path.unlink()


def measure(path: Path, formats: Mapping[str, Format] = FORMATS) -> tuple[float, float, float]:
    """Returns peak MiB above the start of this process, us per row to check the trace, and to read it."""
    suffix = path.name.removeprefix("trace").removesuffix(".gz").removesuffix(".zst")
    before_mib, began_s = peak_mib(), process_time()
    source = formats[suffix].reads(path=path).source(seed=0, max_model_len=1 << 20)
    checked_s = process_time()
    num_rows = sum(map(len, chunks_of(source)))
    read_s = process_time()
    return (
        peak_mib() - before_mib,
        (checked_s - began_s) * 1e6 / num_rows,
        (read_s - checked_s) * 1e6 / num_rows,
    )


def main(
    nums_rows: list[int], formats: Mapping[str, Format] = FORMATS, module: str = "experiments.bench.traces"
) -> None:
    """Prints one line for each format and number of rows. module: the one that measures a file."""
    print(f"{'file':22} {'rows':>12} {'peak MiB':>9} {'check us/row':>13} {'read us/row':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in nums_rows:
            for path in files(Path(folder), num_rows, formats):
                command = [sys.executable, "-m", module, "--file", str(path)]
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
