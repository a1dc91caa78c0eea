"""Reads measurements of any origin: `against=FILE`.

    requests.csv[.gz]       one row per request; columns: `request_tables`
    requests.parquet        of windtunnel observe or simulate, or its folder
    result.json             of vllm bench serve --save-detailed, or of guidellm
    result.jsonl            of SGLang's bench_serving --output-details
    profile_export.jsonl    of aiperf, or its folder
    per_request_lifecycle_metrics.json  of inference-perf, or its folder

Of a truncated file the complete prefix is read, and a note says so.
"""

from __future__ import annotations

from pathlib import Path

from experiments.validate.fidelity.measured import Measured
from experiments.validate.foreign import bench_exports, request_tables
from experiments.validate.foreign.complete_prefix import read_lines
from sim.settings.errors import ConfigError, nearest

KNOWN = (
    "known formats: a CSV (.csv, .csv.gz) with the columns "
    f"{', '.join(request_tables.NEEDED)}; requests.parquet of windtunnel observe or simulate, or its folder; "
    "the JSON of vllm bench serve --save-detailed; the JSON lines of SGLang's bench_serving "
    "--output-details; guidellm's JSON; aiperf's profile_export.jsonl; inference-perf's "
    "per_request_lifecycle_metrics.json"
)
PARTS = "part-*.parquet"
"""Files of a table that a run has streamed: see `sim.report.chunk_tables`."""
INSIDE = (
    "requests.parquet",
    "profile_export.jsonl",
    "per_request_lifecycle_metrics.json",
    "requests.csv",
    "requests.csv.gz",
)
"""Files that are looked for in a folder, in this order."""


def read_runs(path: Path) -> dict[str, Measured]:
    """Reads the runs of a file by name; only a table with a column run has several.

    Raises ConfigError for an unknown file, missing columns, or a clock that goes backwards.
    """
    file = _file(path)
    try:
        return _read(file)
    except ValueError as error:
        raise ConfigError(f"against={file}: {error}") from error


def _read(file: Path) -> dict[str, Measured]:
    if file.suffix == ".parquet":
        return {file.stem: request_tables.read_parquet(file)}
    prefix = read_lines(file)
    first = next((line.lstrip() for line in prefix.lines if line.strip()), "")
    if first.startswith(("{", "[")):
        try:
            if first.startswith("["):
                return {file.stem: bench_exports.read_inference_perf(file.stem, prefix)}
            return bench_exports.read_json(file.stem, prefix)
        except bench_exports.UnknownLayout as error:
            raise ValueError(f"{error}; {KNOWN}") from error
    try:
        return request_tables.read_csv(file, prefix)
    except request_tables.MissingColumns as error:
        raise ValueError(f"{error}; {KNOWN}") from error


def _file(path: Path) -> Path:
    if path.is_dir() and not any(path.glob(PARTS)):
        for name in INSIDE:
            if (path / name).is_file() or any((path / name).glob(PARTS)):
                return path / name
        raise ConfigError(f"against={path}: the folder has none of {', '.join(INSIDE)}; {KNOWN}")
    if path.is_fifo() or path.is_char_device() or path.is_block_device() or path.is_socket():
        raise ConfigError(f"against={path}: must be a regular file, not a pipe, socket or device")
    if not path.exists():
        if not path.parent.is_dir():
            raise ConfigError(f"against={path}: no such file; the folder {path.parent} does not exist either")
        close = nearest(path.name, sorted(entry.name for entry in path.parent.iterdir()))
        raise ConfigError(f"against={path}: no such file; {f'nearest: {close}' if close else KNOWN}")
    return path
