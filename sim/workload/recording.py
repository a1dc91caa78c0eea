"""Repeats the traffic of a live session: the requests that `windtunnel serve` has written to its run folder.

Requests have the arrivals, prompts, shared prefixes, limits and output lengths of the session, and clients
give up when they did. With the settings of the session and a simulated fleet, the run is the session again;
with others, it says what the same clients would have seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from policies.adapters.registry import Adapter
from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival, Source, WorkloadNotes
from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS
from sim.workload.lengths import clip_to_context
from sim.workload.listed import ListedSource
from sim.workload.traffic_log import FILE, NONE, REMARKS

LEAST = {
    "request_id": 0,
    "prompt_tokens": 1,
    "output_tokens": 1,
    "max_tokens": NONE,
    "priority": -(1 << 62),
    "answer_id": NONE,
    "adapter_rank": 0,
}
"""Columns of whole numbers, with the smallest value of each."""
TIMES = ("arrival_s", "time_s", "aborted_s", "deadline_s")
MAY_BE_MISSING = ("aborted_s", "deadline_s")
TEXTS = ("tenant", "model", "adapter")
LISTS = ("contents", "content_tokens")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The requests of a live session.

    path: the run folder of `windtunnel serve`, or its recording.parquet. aborts: clients give up when they
    did; otherwise they wait for their outputs. Raises ValueError for a file that cannot be read.
    """

    path: Path
    aborts: bool = True

    def __post_init__(self) -> None:
        path = Path(self.path).expanduser()
        object.__setattr__(self, "path", path / FILE if path.is_dir() else path)
        if not self.path.is_file():
            raise ValueError(
                f"path={path}: has no {FILE}; give a folder that `windtunnel serve` has written, with "
                "output.tables=true"
            )
        _ = self._table

    @cached_property
    def _table(self) -> pd.DataFrame:
        return _read(self.path)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that requests name, by name."""
        table = self._table[["adapter", "adapter_rank"]].dropna().drop_duplicates("adapter")
        pairs = sorted(zip(table["adapter"], table["adapter_rank"], strict=True))
        return tuple(Adapter(name=name, rank=int(rank)) for name, rank in pairs)

    @property
    def models(self) -> dict[str, float]:
        """The models that requests name, with their shares of the requests."""
        return dict(self._table["model"].dropna().value_counts(normalize=True).sort_index())

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic; the seed has no effect. Longer requests than the context are clipped."""
        table = self._table
        prompts, outputs, clipped = clip_to_context(
            table["prompt_tokens"].to_numpy(), table["output_tokens"].to_numpy(), max_model_len
        )
        rows = zip(table.to_dict("records"), prompts.tolist(), outputs.tolist(), strict=True)
        arrivals = [self._arrival(row, prompt, output, max_model_len) for row, prompt, output in rows]
        notes = WorkloadNotes(num_clipped=int(np.count_nonzero(clipped)))
        notes.remarks += [
            f"The session had {event} ({count:,}), which this run does not repeat."
            for event, count in table.attrs.get(REMARKS, {}).items()
        ]
        return ListedSource(arrivals, notes=notes)

    def _arrival(self, row: dict[Hashable, Any], prompt: int, output: int, max_model_len: int) -> Arrival:
        segments = tuple(_segments(row["contents"], row["content_tokens"], prompt))
        limit = None if row["max_tokens"] == NONE else min(row["max_tokens"], max_model_len - prompt)
        request = Request(
            request_id=row["request_id"],
            arrival_s=row["arrival_s"],
            prompt=Prompt(prompt, segments),
            max_tokens=limit,
            priority=row["priority"],
            tenant=row["tenant"] or "",
            deadline_s=None if isnan(row["deadline_s"]) else row["deadline_s"],
            answer_id=None if row["answer_id"] == NONE else row["answer_id"],
            adapter=row["adapter"],
            model=row["model"],
        )
        gives_up_s = None if isnan(row["aborted_s"]) or not self.aborts else row["aborted_s"]
        return Arrival(request, output, time_s=row["time_s"], gives_up_s=gives_up_s)


def _segments(contents: Sequence[int], lengths: Sequence[int], num_tokens: int) -> Iterator[Segment]:
    """Yields the segments of the first num_tokens tokens of a prompt."""
    for content_id, length in zip(contents, lengths, strict=True):
        if num_tokens < 1:
            return
        yield Segment(int(content_id), min(int(length), num_tokens))
        num_tokens -= int(length)


def _read(path: Path) -> pd.DataFrame:
    """Reads and checks the table. Raises ValueError."""
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"path={path}: is not a whole parquet file; serve and record again") from error
    for name in (*LEAST, *TIMES, *TEXTS, *LISTS):
        if name not in table:
            raise ValueError(f"path={path}: has no column {name}; give a file that `windtunnel serve` wrote")
    if table.empty:
        raise ValueError(f"path={path}: expected at least one request, found none")
    for name, least in LEAST.items():
        most = MAX_TOKENS if name.endswith("_tokens") else 1 << 62
        if not pd.api.types.is_integer_dtype(table[name]):
            raise ValueError(f"path={path}: {name} must be whole numbers, found {table[name].dtype}")
        _check(path, table, name, table[name].between(least, most))
    for name in TIMES:
        if not pd.api.types.is_numeric_dtype(table[name]):
            raise ValueError(f"path={path}: {name} must be numbers, found {table[name].dtype}")
        found = table[name].astype(float)
        is_right = found.between(0, MAX_ARRIVAL_S) | (found.isna() if name in MAY_BE_MISSING else False)
        _check(path, table, name, is_right)
        table[name] = found
    for name in TEXTS:
        table[name] = table[name].astype(object).where(table[name].notna(), None)
        _check(path, table, name, table[name].map(lambda text: text is None or isinstance(text, str)))
    has_rank = (table["adapter_rank"] >= 1) | table["adapter"].isna()
    _check(path, table, "adapter_rank", has_rank)
    _check(path, table, "request_id", ~table["request_id"].duplicated())
    _check(path, table, "time_s", table["time_s"].diff().fillna(0.0) >= 0)
    _check(path, table, "contents", table.apply(_has_right_segments, axis=1))
    return table


def _has_right_segments(row: pd.Series[Any]) -> bool:
    contents, lengths = (np.asarray(row[name]) for name in LISTS)
    if contents.shape != lengths.shape or contents.ndim != 1:
        return False
    if not len(contents):
        return True
    if contents.dtype.kind != "i" or lengths.dtype.kind != "i":
        return False
    return bool(contents.min() >= 0 and lengths.min() >= 1 and lengths.sum() <= row["prompt_tokens"])


def _check(path: Path, table: pd.DataFrame, column: str, is_right: pd.Series[bool]) -> None:
    """Raises ValueError, with the first wrong row, unless a column is right."""
    wrong = np.flatnonzero(~is_right.to_numpy(bool))
    if len(wrong):
        row = int(wrong[0])
        found = str(table[column].iloc[row])[:80]
        raise ValueError(f"path={path}: row {row}: {column}={found} is not what a server writes")
