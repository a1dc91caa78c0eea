"""Reading what others measured: `against=FILE`, whatever wrote it.

    requests.csv[.gz]       one row a request; columns: `request_tables`
    requests.parquet        of windtunnel observe or simulate, or the folder that it lies in
    result.json             of vllm bench serve --save-detailed
    profile_export.jsonl    of aiperf, or the folder that it lies in

A file that ends early gives its complete prefix, and a note says so.
"""

from __future__ import annotations

from pathlib import Path

from experiments.validate.fidelity.measured import Measured
from experiments.validate.foreign import bench_exports, request_tables
from experiments.validate.foreign.complete_prefix import Prefix, read_lines
from sim.settings.errors import ConfigError, nearest

KNOWN = (
    "known formats: a CSV (.csv, .csv.gz) with the columns "
    f"{', '.join(request_tables.NEEDED)}; requests.parquet of windtunnel observe or simulate, or its folder; "
    "the JSON of vllm bench serve --save-detailed; aiperf's profile_export.jsonl"
)
INSIDE = ("requests.parquet", "profile_export.jsonl", "requests.csv", "requests.csv.gz")
"""What is looked for in a folder, the first one first."""


def read_runs(path: Path) -> dict[str, Measured]:
    """The runs in a file by name, several only of a table with a column run.

    Raises ConfigError for what is no such file, lacks columns, or has a clock that goes backwards.
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
    if first.startswith("{"):
        return {file.stem: _json(file, prefix)}
    try:
        return request_tables.read_csv(file, prefix)
    except request_tables.MissingColumns as error:
        raise ValueError(f"{error}; {KNOWN}") from error


def _json(file: Path, prefix: Prefix) -> Measured:
    try:
        if bench_exports.is_aiperf(prefix):
            return bench_exports.read_aiperf(file.stem, prefix)
        return bench_exports.read_vllm_bench(file.stem, prefix)
    except bench_exports.UnknownLayout as error:
        raise ValueError(f"{error}; {KNOWN}") from error


def _file(path: Path) -> Path:
    if path.is_dir():
        for name in INSIDE:
            if (path / name).is_file():
                return path / name
        raise ConfigError(f"against={path}: none of {', '.join(INSIDE)} in that folder; {KNOWN}")
    if not path.is_file():
        if not path.parent.is_dir():
            raise ConfigError(f"against={path}: no such file, nor the folder {path.parent}")
        close = nearest(path.name, sorted(entry.name for entry in path.parent.iterdir()))
        raise ConfigError(f"against={path}: no such file; {f'nearest: {close}' if close else KNOWN}")
    return path
