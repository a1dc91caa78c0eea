"""Reads request traces in Parquet: Baseten and Chutes. Errors name file, row (from 1) and column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from policies.core.request import Segment
from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS, require_positive
from sim.workload.table import block_segments
from sim.workload.trace_blocks import TraceRow
from sim.workload.traces import Trace

ROWS_AT_ONCE = 4096
CANCELED = ("true", "1", "1.0")
NOT_CANCELED = ("", "false", "0", "0.0", "nan")
"""Values of request_canceled, as text in lower case; numbers and missing values stand for true and false."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetTrace(Trace):
    """Base class: rows as dictionaries of the columns that a replay needs."""

    needed: ClassVar[tuple[str, ...]]
    """Columns that must be there: the time, the prompt tokens, the output tokens."""
    optional: ClassVar[tuple[str, ...]] = ()

    def rows(self) -> Iterator[TraceRow]:
        clock = self.number_clock()
        time, prompt, output = self.needed
        for number, row in enumerate(self._read(), 1):
            try:
                arrival_s = clock(str(_whole_time(row[time])))
            except (ValueError, TypeError):
                rule = f"a time at most {MAX_ARRIVAL_S:g} s after the first"
                raise self._bad(number, time, rule, row[time]) from None
            reason = self.skip_reason(number, row)
            if not reason:
                for name in (prompt, output):
                    if type(row[name]) is not int or not 0 <= row[name] <= MAX_TOKENS:
                        rule = f"a whole number of tokens from 0 to {MAX_TOKENS:,}"
                        raise self._bad(number, name, rule, row[name])
                reason = "" if row[prompt] and row[output] else "no input or no output tokens"
            found = TraceRow(number, arrival_s, row[prompt] or 0, row[output] or 0, self.content(number, row))
            yield found._replace(remark=clock.take_remark(), skip_reason=reason, tenant=self.tenant(row))

    def skip_reason(self, number: int, row: dict[str, Any]) -> str:
        """Returns why a row is not a request to replay; empty if it is one."""
        return ""

    def content(self, number: int, row: dict[str, Any]) -> tuple[int, ...]:
        """Returns the content ids of the prompt's blocks; empty if the format has none."""
        return ()

    def tenant(self, row: dict[str, Any]) -> str:
        """Returns the tenant of a row; empty if the format has none."""
        return ""

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            with pq.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                for name in self.needed:
                    if name not in names:
                        raise ValueError(
                            f"{self.path}: no column {name}; expected {', '.join(self.needed)}, "
                            f"found {', '.join(names)[:200]}"
                        )
                columns = [name for name in (*self.needed, *self.optional) if name in names]
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                    yield from _with_plain_times(batch, self.needed[0]).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{self.path}: cannot be read as Parquet: {str(error).splitlines()[0]}"
            ) from None

    def _bad(self, number: int, column: str, rule: str, found: object) -> ValueError:
        return ValueError(f"{self.path}:{number}:{column}: expected {rule}, found {str(found)[:80]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BasetenParquet(ParquetTrace):
    """Baseten: timestamp_start_unix_ms, input_tokens, output_tokens, total_hashes of whole or partial blocks.

    Each hash stands for tokens_per_hash tokens; the column block_size, if any, must say the same. Canceled
    requests (request_canceled) are counted and not replayed. `org_id` is the tenant.
    """

    time_exponent: ClassVar[int] = 3
    needed: ClassVar[tuple[str, ...]] = ("timestamp_start_unix_ms", "input_tokens", "output_tokens")
    optional: ClassVar[tuple[str, ...]] = ("total_hashes", "block_size", "request_canceled", "org_id")
    tokens_per_hash: int = 16

    def __post_init__(self) -> None:
        Trace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "tokens_per_hash")

    def skip_reason(self, number: int, row: dict[str, Any]) -> str:
        value = row.get("request_canceled")
        text = "" if value is None else str(value).strip().lower()
        if text not in CANCELED and text not in NOT_CANCELED:
            raise self._bad(number, "request_canceled", "true or false", value)
        return "canceled" if text in CANCELED else ""

    def content(self, number: int, row: dict[str, Any]) -> tuple[int, ...]:
        block_size = row.get("block_size")
        if block_size not in (None, self.tokens_per_hash):
            raise ValueError(
                f"{self.path}:{number}:block_size: expected tokens_per_hash={self.tokens_per_hash}, "
                f"found {block_size}; set workload.tokens_per_hash={block_size}"
            )
        hashes = row.get("total_hashes") or []
        max_hashes = -(-(row["input_tokens"] or 0) // self.tokens_per_hash)
        if not isinstance(hashes, list):
            raise self._bad(number, "total_hashes", "a list of whole numbers >= 0", hashes)
        if len(hashes) > max_hashes or any(type(one) is not int or one < 0 for one in hashes):
            rule = f"at most {max_hashes} whole numbers >= 0, for {self.tokens_per_hash} tokens each"
            raise self._bad(number, "total_hashes", rule, hashes)
        return tuple(hashes)

    def tenant(self, row: dict[str, Any]) -> str:
        return "" if row.get("org_id") is None else str(row["org_id"])

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        return block_segments(content_ids, num_tokens, self.tokens_per_hash)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChutesParquet(ParquetTrace):
    """Chutes: started_at (a time, or Unix time), it, ot; `user_id` is the tenant.

    Rows without token counts (failed, or no text generation) are counted and not replayed. The file says how
    many tokens were cached (ct), not which, so prompts share nothing.
    """

    needed: ClassVar[tuple[str, ...]] = ("started_at", "it", "ot")
    optional: ClassVar[tuple[str, ...]] = ("user_id",)

    def skip_reason(self, number: int, row: dict[str, Any]) -> str:
        return "no token counts" if row["it"] is None or row["ot"] is None else ""

    def tenant(self, row: dict[str, Any]) -> str:
        return "" if row.get("user_id") is None else str(row["user_id"])


def _with_plain_times(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Returns the batch with a column of dates as Unix times in nanoseconds."""
    index = batch.schema.get_field_index(name)
    column = batch.column(index)
    if not pa.types.is_timestamp(column.type):
        return batch
    whole = column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())
    return batch.set_column(index, name, whole)


def _whole_time(value: Any) -> int | float:
    """Returns a time that is a number. Raises TypeError for anything else."""
    if type(value) not in (int, float):
        raise TypeError(value)
    number: int | float = value
    return number
