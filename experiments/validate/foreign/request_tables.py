"""Reads tables with one row per request: CSV files of any engine, and the tables of our own runs.

Columns of a CSV: arrival_s (time of sending), input_tokens, output_tokens, first_token_s, last_token_s, and
if known run, queued_s (time at which the engine took it, then its arrival), scheduled_s, status and
prefix_block_ids (a number per full 16-token block of the prompt, equal for equal prefixes), all on one clock.
A request without a first or last token counts as failed; failed requests are reported and left out.
timeseries.csv[.gz] beside it, with t, running, waiting and kv_cache_pct, is the server's log.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.study.measured_requests import block_ids_of
from experiments.validate.fidelity.measured import Measured
from experiments.validate.foreign.clock import check_order, check_requests
from experiments.validate.foreign.complete_prefix import Prefix, complete_lines
from hwmodels.checks import UnreadableFileError
from hwmodels.levels import table_files
from hwmodels.levels.table_files import read_table_file
from sim.records.table import Gaps
from sim.report.wording import plural
from sim.settings.errors import ConfigError
from sim.settings.recorded import read_json_object
from sim.workload.distributions import MAX_TOKENS
from sim.workload.trace_columns import MAX_UNIX_S, shown, tokens_rule

NEEDED = ("arrival_s", "input_tokens", "output_tokens", "first_token_s", "last_token_s")
OWN = ("status", "arrival_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens")
BLOCK_SIZE = 16
CLIENTS_TIMES = "Times are the client's: they include the network to the server and back."
"""Note on every recording that was made outside of an engine."""


class MissingColumns(ValueError):
    """A table lacks required columns."""


def read_csv(file: Path, prefix: Prefix) -> dict[str, Measured]:
    """Reads the runs of a CSV file by the column run; without it, a single run named like the file."""
    lines = complete_lines(prefix)
    header = (prefix.lines or [""])[0].strip().split(",")
    _require(header, NEEDED)
    try:
        table = pd.read_csv(io.StringIO("".join(lines)))
    except (ValueError, pd.errors.ParserError) as error:
        raise ValueError(f"cannot be read as CSV: {error}") from error
    table["row"] = np.arange(1, len(table) + 1)
    if table.empty:
        raise ValueError("the file has no complete row")
    numbers = [*NEEDED, *(name for name in ("queued_s", "scheduled_s") if name in table)]
    for name in numbers:
        table[name] = _numbers(table, name)
    notes = (
        (f"The file is truncated; only its {plural(len(table), 'complete row')} can be used.",)
        if prefix.is_cut
        else ()
    )
    rows_by_run = table.groupby("run", sort=False) if "run" in table else [(file.name.split(".")[0], table)]
    return {
        str(name): _run(str(name), rows, file, notes, num_runs=len(rows_by_run)) for name, rows in rows_by_run
    }


def _run(name: str, rows: pd.DataFrame, file: Path, notes: tuple[str, ...], num_runs: int) -> Measured:
    arrives = "queued_s" if "queued_s" in rows else "arrival_s"
    rows = rows.sort_values(arrives, kind="stable", ignore_index=True)
    started = rows["first_token_s"].notna() & rows["last_token_s"].notna() & (rows["output_tokens"] > 0)
    if "status" in rows:
        started &= rows["status"].astype(str).isin(["finished", "ok", "success", "200"])
    requests = pd.DataFrame(
        {
            "row": rows["row"],
            "status": np.where(started, "finished", "aborted"),
            "arrival_s": rows[arrives],
            "scheduled_s": rows.get("scheduled_s", np.nan),
            "first_token_s": rows["first_token_s"].where(started),
            "last_token_s": rows["last_token_s"].where(started),
            "finished_s": rows["last_token_s"].where(started),
            "prompt_tokens": _whole(rows, "input_tokens"),
            "output_tokens": _whole(rows, "output_tokens").where(started, 0),
        }
    )
    check_requests(requests)
    if observed := _observed_notes(file):
        notes = (*notes, *observed)
    elif arrives == "queued_s":
        notes = (
            *notes,
            "Arrival is when the engine took a request: a frontend's time before that is not included.",
        )
    return measured(
        name,
        requests,
        notes=notes,
        samples=_samples(file, name if num_runs > 1 or "run" in rows else None),
        block_ids=_block_ids(rows),
    )


def measured(
    name: str,
    requests: pd.DataFrame,
    *,
    notes: tuple[str, ...] = (),
    gaps: Gaps | None = None,
    samples: pd.DataFrame | None = None,
    block_ids: tuple[tuple[int, ...], ...] = (),
) -> Measured:
    """Returns the finished requests on a clock that is 0 at the first arrival.

    Raises ValueError if none is.
    """
    notes = (*notes, *_failures(requests))
    answered = _answered(requests)
    requests = requests[answered].reset_index(drop=True)
    block_ids = tuple(itertools.compress(block_ids, answered))
    zero_s = float(requests["arrival_s"].min())
    shifted = {str(name): requests[name] - zero_s for name in requests if str(name).endswith("_s")}
    if gaps is not None:
        gaps = gaps._replace(gap_end_s=gaps.gap_end_s - zero_s)
    if samples is not None:
        samples = samples.assign(time_s=samples["time_s"] - zero_s)
    return Measured(
        name=name,
        requests=requests.assign(**shifted),
        gaps=gaps,
        samples=samples,
        notes=notes,
        block_ids=block_ids,
        block_size=BLOCK_SIZE,
    )


def read_parquet(file: Path) -> Measured:
    """Reads requests.parquet of one of our runs, with the files beside it.

    Of a simulated run: iterations.parquet and summary.json; of an observed one: chunks.parquet, and
    requests.csv.gz for the prompts' shared prefixes.
    """
    requests = _parquet(file)
    _require(requests.columns, OWN)
    if "samples" in requests and (requests["samples"] > 1).any():
        raise ValueError("requests with several outputs (samples > 1) cannot be compared")
    requests = requests.reset_index(drop=True)
    requests["row"] = np.arange(1, len(requests) + 1)
    check_own_requests(requests)
    for name in ("scheduled_s", "finished_s"):
        if name not in requests:
            requests[name] = np.nan
    check_requests(requests)
    requests = requests.sort_values("arrival_s", kind="stable", ignore_index=True)
    notes = _failures(requests)
    requests = requests[_answered(requests)].reset_index(drop=True)
    iterations, chunks = _beside(file, "iterations.parquet"), _beside(file, "chunks.parquet")
    if chunks is not None:
        _require(requests.columns, ("request_id",))
        _require(chunks.columns, ("request_id", "time_s", "tokens"))
        check_numbers(chunks, "chunks.parquet", ("time_s",))
        check_numbers(chunks, "chunks.parquet", ("tokens",), whole=True)
        chunks = chunks[chunks["request_id"].isin(requests["request_id"])]
        notes += _observed_notes(file) or (CLIENTS_TIMES,)
    if iterations is not None:
        _require(iterations.columns, ("replica", "start_s", "duration_s"))
        check_numbers(iterations, "iterations.parquet", ("start_s", "duration_s"))
        for replica, rows in iterations.groupby("replica"):
            check_order(rows["start_s"], f"iterations.parquet, replica {replica}")
    return Measured(
        name=file.parent.name or file.stem,
        requests=requests,
        gaps=None if chunks is None else _gaps(chunks),
        iterations=iterations if iterations is not None and len(iterations) else None,
        num_kv_blocks=_summary(file.parent).get("memory", {}).get("num_blocks"),
        num_replicas=1 if iterations is None else max(int(iterations["replica"].nunique()), 1),
        notes=notes,
        block_ids=_captured_block_ids(file.with_name("requests.csv.gz"), requests),
        block_size=BLOCK_SIZE,
    )


def _gaps(chunks: pd.DataFrame) -> Gaps:
    """Returns the gaps between tokens; tokens of one chunk have the same time."""
    chunks = chunks.sort_values(["request_id", "time_s"], kind="stable")
    token_s = np.repeat(chunks["time_s"].to_numpy(dtype=np.float64), chunks["tokens"].to_numpy())
    owner = np.repeat(chunks["request_id"].to_numpy(), chunks["tokens"].to_numpy())
    same = owner[1:] == owner[:-1]
    gap_s = np.diff(token_s)[same]
    return Gaps(gap_s, np.ones(len(gap_s), np.int64), token_s[1:][same])


def _captured_block_ids(file: Path, requests: pd.DataFrame) -> tuple[tuple[int, ...], ...]:
    """Returns each request's block ids from the table of an observed run; none without it."""
    if not file.is_file() or "request_id" not in requests:
        return ()
    table = read_table_file(file)
    if not {"req", "prefix_block_ids"} <= set(table) or table["prefix_block_ids"].isna().all():
        return ()
    found = dict(zip(table["req"], _block_ids(table.assign(row=range(1, len(table) + 1))), strict=True))
    return tuple(found.get(request_id, ()) for request_id in requests["request_id"])


def _failures(requests: pd.DataFrame) -> tuple[str, ...]:
    """Returns a note on failed requests. Raises ValueError if none finished."""
    failed = int((requests["status"] != "finished").sum())
    if failed == len(requests):
        raise ValueError("no request finished, so there is nothing to compare")
    if not failed:
        return ()
    how = "failed or were unfinished" if (requests["status"] == "unfinished").any() else "failed"
    note = f"{failed:,} of {plural(len(requests), 'request')} {how}; they are not simulated."
    return (f"{note} The measured figures exclude them, though the server may have worked on them.",)


def _answered(requests: pd.DataFrame) -> NDArray[np.bool_]:
    """Returns which requests finished; failed ones are not simulated, so they have no counterpart."""
    return (requests["status"] == "finished").to_numpy(dtype=np.bool_)


def _observed_notes(file: Path) -> tuple[str, ...]:
    """Returns the notes of an observed run from the summary beside it; empty for other files."""
    summary = _summary(file.parent)
    if summary.get("source") != "observed":
        return ()
    endpoint = summary.get("endpoint", {})
    served = f"{endpoint.get('model')} at {endpoint.get('url')}"
    unchecked = f"Measured was {served}; it cannot be checked that model= and hardware= are the same."
    return (unchecked, *summary.get("notes", ()), CLIENTS_TIMES)


def _parquet(file: Path) -> pd.DataFrame:
    try:
        return table_files.read_parquet(file)
    except UnreadableFileError as error:
        raise ValueError(f"{file.name}: {error}") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file.name} cannot be read: {error}; a truncated parquet file cannot be repaired, because "
            "its index is at its end; record again, or use the CSV"
        ) from error


def _beside(file: Path, name: str) -> pd.DataFrame | None:
    other = file.with_name(name)
    return _parquet(other) if other.exists() else None


def _summary(folder: Path) -> dict[str, Any]:
    """Reads summary.json of a run; empty if it is missing or unreadable."""
    try:
        return read_json_object(folder / "summary.json")
    except ConfigError:
        return {}


def _samples(file: Path, run: str | None) -> pd.DataFrame | None:
    """Reads the server's log, of one run if it holds several; None if there is none beside the file."""
    for name in ("timeseries.csv.gz", "timeseries.csv"):
        if (other := file.with_name(name)).is_file():
            break
    else:
        return None
    table = read_table_file(other)
    _require(table.columns, ("t", "running", "waiting", "kv_cache_pct"))
    check_numbers(table, other.name, ("t", "running", "waiting", "kv_cache_pct"))
    if run is not None and "run" in table:
        table = table[table["run"] == run]
    if len(table) < 2:
        return None
    check_order(table["t"], other.name)
    kv = table["kv_cache_pct"] / 100
    return pd.DataFrame(
        {
            "time_s": table["t"].to_numpy(dtype=np.float64),
            "running": table["running"].to_numpy(dtype=np.float64),
            "waiting": table["waiting"].to_numpy(dtype=np.float64),
            "kv_use_share": kv.to_numpy(dtype=np.float64) if kv.gt(0).any() else np.nan,
        }
    )


def _block_ids(rows: pd.DataFrame) -> tuple[tuple[int, ...], ...]:
    if "prefix_block_ids" not in rows:
        return ()
    cells = zip(rows["prefix_block_ids"], rows["row"], strict=True)
    return tuple(block_ids_of(text, f"row {row}: ") for text, row in cells)


def check_own_requests(requests: pd.DataFrame) -> None:
    """Raises ValueError with row, column and value for what no request can have."""
    check_numbers(requests, "", ("arrival_s",))
    check_numbers(requests, "", ("prompt_tokens",), least=1, whole=True)
    check_numbers(requests, "", ("output_tokens",), whole=True)
    done = requests[requests["status"] == "finished"]
    check_numbers(done, "", ("first_token_s", "last_token_s"))
    check_numbers(done, "", ("output_tokens",), least=1, whole=True)


def check_numbers(
    table: pd.DataFrame, where: str, names: Sequence[str], *, least: float = 0.0, whole: bool = False
) -> None:
    """Raises ValueError with row (1 is the first), column and value unless columns hold finite numbers.

    where: the file, if it is not the one that the user named. whole: numbers of tokens.
    """
    most = MAX_TOKENS if whole else MAX_UNIX_S
    for name in names:
        numbers = pd.to_numeric(table[name], errors="coerce").to_numpy(np.float64, na_value=np.nan)
        sound = (numbers >= least) & (numbers <= most)
        if whole:
            sound &= numbers % 1 == 0
        wrong = np.flatnonzero(~sound)
        if len(wrong):
            row = table["row"].iloc[wrong[0]] if "row" in table else wrong[0] + 1
            rule = tokens_rule(int(least)) if whole else f"a finite number from {least:g} to {most:g}"
            value = shown(table[name].iloc[wrong[0]])
            raise ValueError(f"{where}{', ' if where else ''}row {row}: {name}={value}: must be {rule}")


def _require(columns: Any, needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in columns]
    if missing:
        found = ", ".join(map(str, list(columns)[:20]))
        raise MissingColumns(f"missing column {', '.join(missing)}; found {found}")


def _numbers(table: pd.DataFrame, name: str) -> pd.Series:
    """Returns a column as numbers, NaN if empty.

    Raises ValueError with the row of a cell that is no number.
    """
    numbers = pd.to_numeric(table[name], errors="coerce").astype(np.float64)
    wrong = np.flatnonzero(numbers.isna() & table[name].notna() | ~(numbers.isna() | np.isfinite(numbers)))
    empty = np.flatnonzero(numbers.isna() & (name in ("arrival_s", "input_tokens", "queued_s")))
    if len(wrong) or len(empty):
        at = int(min([*wrong[:1], *empty[:1]]))
        shown = "empty" if pd.isna(table[name].iloc[at]) else table[name].iloc[at]
        raise ValueError(f"row {at + 1}: {name}={shown}: must be a number")
    return numbers


def _whole(rows: pd.DataFrame, name: str) -> pd.Series:
    least = 1 if name == "input_tokens" else 0
    numbers = rows[name].fillna(0)
    wrong = np.flatnonzero((numbers < least) | (numbers % 1 != 0) | (numbers > MAX_TOKENS))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"row {rows['row'].iloc[at]}: {name}={rows[name].iloc[at]:g}: must be a whole number >= {least}, "
            f"at most {MAX_TOKENS:,}"
        )
    return numbers.astype(np.int64)
