"""Reads request traces in Parquet: Baseten and Chutes. Errors name file, row (from 1) and column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from policies.core.request import Segment
from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS, require_positive
from sim.workload.chunks import ObjectArray, objects
from sim.workload.distributions import IntArray
from sim.workload.json_pieces import tuples_of
from sim.workload.lengths import BoolArray
from sim.workload.parquet_groups import batches_of, start_of, with_plain_times
from sim.workload.table import block_segments
from sim.workload.trace_blocks import Block, TraceRow, blocks_of_rows
from sim.workload.trace_files import UnusualTextError, shown
from sim.workload.traces import Trace
from sim.workload.unix_times import ArrivalClock
from sim.workload.values import is_tokens, tokens_rule, whole_number

ROWS_AT_ONCE = 8192
"""Rows of a batch, fewer if they have long lists."""
BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at once: row groups may be larger than the memory."""
UNREADABLE = (UnicodeDecodeError, OverflowError)
"""Errors of values that Python cannot represent: text that is not UTF-8, and dates out of range."""
NO_TOKENS = "no input or no output tokens"
CANCELED = ("true", "1", "1.0")
NOT_CANCELED = ("", "false", "0", "0.0", "nan")
"""Values of request_canceled, as text in lower case; numbers and missing values stand for true and false."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetTrace(Trace):
    """Base class: batches of the columns that a replay needs; unusual ones as a dictionary per row."""

    needed: ClassVar[tuple[str, ...]]
    """Columns that must be there: the time, the prompt tokens, the output tokens."""
    optional: ClassVar[tuple[str, ...]] = ()
    tenant_column: ClassVar[str]
    """Column of the tenant, which may be missing."""

    def blocks(self) -> Iterator[Block]:
        clock = self.number_clock()
        for number, batch in self._batches(clock):
            try:
                yield self._block(batch, number, clock)
            except UnusualTextError:
                yield from blocks_of_rows(self._rows(self._listed(batch, number), number, clock))

    def column_names(self) -> Iterable[str]:
        with pq.ParquetFile(self.path) as file:
            names: list[str] = file.schema_arrow.names
        return names

    def used_columns(self) -> Iterable[str]:
        return (*self.needed, *self.optional, self.tenant_column)

    def _block(self, batch: pa.RecordBatch, number: int, clock: ArrivalClock) -> Block:
        """Returns the rows of a batch. Raises UnusualTextError unless all values are right."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        time, prompt, output = (columns[name] for name in self.needed)
        if time.null_count or not _is_number(time.type):
            raise UnusualTextError
        arrival_s = clock.of_numbers(time.to_numpy())
        lengths, has_length = zip(*map(_whole_numbers, (prompt, output)), strict=True)
        is_known = has_length[0] & has_length[1]
        is_right = is_known.copy()
        for tokens in lengths:
            is_right &= (tokens >= 0) & (tokens <= MAX_TOKENS)
        reason, is_left_out = self.left_out(columns, is_known)
        if arrival_s is None or not (is_right | is_left_out).all():
            raise UnusualTextError
        is_empty = ~is_left_out & ((lengths[0] == 0) | (lengths[1] == 0))
        reasons = objects(["", reason, NO_TOKENS])[is_left_out + 2 * is_empty]
        contents = self.contents(columns, lengths[0])
        tenants = _texts(columns[self.tenant_column]) if self.tenant_column in columns else None
        remark = clock.take_remark()  # last: it is still there if the rows are read one by one instead
        return Block(
            line=np.arange(number, number + len(batch)),
            arrival_s=arrival_s,
            prompt_tokens=lengths[0],
            output_tokens=lengths[1],
            content_ids=contents,
            skip_reason=reasons if (is_left_out | is_empty).any() else None,
            tenant=tenants,
            remarks=(remark,) if remark else (),
        )

    def _listed(self, batch: pa.RecordBatch, number: int) -> list[dict[str, Any]]:
        """Returns the rows of a batch. Raises ValueError for a value that Python cannot represent."""
        try:
            rows: list[dict[str, Any]] = batch.to_pylist()
        except UNREADABLE:
            for row, name in product(range(len(batch)), batch.schema.names):
                try:
                    batch.column(name)[row].as_py()
                except UNREADABLE as error:
                    raise self._bad(number + row, name, "a value that can be read", error) from None
            raise
        return rows

    def _rows(self, rows: Iterable[dict[str, Any]], first: int, clock: ArrivalClock) -> Iterator[TraceRow]:
        """Checks rows one by one; `first` is the number of the first one."""
        time, prompt, output = self.needed
        for number, row in enumerate(rows, first):
            try:
                arrival_s = clock(str(_whole_time(row[time])))
            except (ValueError, TypeError):
                rule = f"a time at most {MAX_ARRIVAL_S:g} s after the first"
                raise self._bad(number, time, rule, row[time]) from None
            reason = self.skip_reason(number, row)
            if not reason:
                for name in (prompt, output):
                    if not is_tokens(row[name], least=0):
                        raise self._bad(number, name, tokens_rule(0), row[name])
                    row[name] = whole_number(row[name])
                reason = "" if row[prompt] and row[output] else NO_TOKENS
            tenant = row.get(self.tenant_column)
            yield TraceRow(
                number,
                arrival_s,
                row[prompt] or 0,
                row[output] or 0,
                () if reason else self.content(number, row),
                clock.take_remark(),
                reason,
                "" if tenant is None else str(tenant),
            )

    def skip_reason(self, number: int, row: dict[str, Any]) -> str:
        """Returns why a row is not a request to replay; empty if it is one."""
        return ""

    def content(self, number: int, row: dict[str, Any]) -> tuple[int, ...]:
        """Returns the content ids of the prompt's blocks; empty if the format has none."""
        return ()

    def left_out(self, columns: dict[str, pa.Array], is_known: BoolArray) -> tuple[str, BoolArray]:
        """Returns the reason of `skip_reason`, and which rows it holds for [N].

        is_known: which rows have both lengths. Raises UnusualTextError to have rows read one by one.
        """
        return "", np.zeros(len(is_known), np.bool_)

    def contents(self, columns: dict[str, pa.Array], prompt_tokens: IntArray) -> ObjectArray | None:
        """Returns `content` of all rows; None: the format has none, or all are empty. Raises as left_out."""
        return None

    def _batches(self, clock: ArrivalClock) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields batches, each with the number of its first row; row groups before start_s are left out."""
        try:
            with pq.ParquetFile(self.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                names = file.schema_arrow.names
                for name in self.needed:
                    if name not in names:
                        raise ValueError(
                            f"{self.path}: no column {name}; expected {', '.join(self.needed)}, "
                            f"found {shown(', '.join(names), 200)}"
                        )
                wanted = (*self.needed, *self.optional, self.tenant_column)
                columns = [name for name in wanted if name in names]
                for name in columns:
                    if names.count(name) > 1:
                        raise ValueError(
                            f"{self.path}: has {names.count(name)} columns {name}; rename or remove all "
                            "but one"
                        )
                time, group, number = self.needed[0], 0, 1
                if self.start_s and not self.sort:
                    group, number = start_of(file, time, clock, self.start_s)
                for batch in batches_of(file, columns, ROWS_AT_ONCE, group):
                    if len(batch):
                        yield number, with_plain_times(batch, time)
                    number += len(batch)
        except (pa.ArrowException, OSError, *UNREADABLE) as error:
            raise ValueError(
                f"{self.path}: cannot be read as Parquet: {shown(str(error).partition(chr(10))[0], 200)}"
            ) from None

    def _bad(self, number: int, column: str, rule: str, found: object) -> ValueError:
        return ValueError(f"{self.path}:{number}:{column}: expected {rule}, found {shown(found)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BasetenParquet(ParquetTrace):
    """Baseten: timestamp_start_unix_ms, input_tokens, output_tokens, total_hashes of whole or partial blocks.

    Each hash stands for tokens_per_hash tokens; the column block_size, if any, must say the same. Canceled
    requests (request_canceled) are counted and not replayed. `org_id` is the tenant.
    """

    time_exponent: ClassVar[int] = 3
    needed: ClassVar[tuple[str, ...]] = ("timestamp_start_unix_ms", "input_tokens", "output_tokens")
    optional: ClassVar[tuple[str, ...]] = ("total_hashes", "block_size", "request_canceled")
    tenant_column: ClassVar[str] = "org_id"
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
                f"found {shown(block_size)}; set workload.tokens_per_hash={shown(block_size)}"
            )
        hashes = row.get("total_hashes") or []
        max_hashes = -(-(row["input_tokens"] or 0) // self.tokens_per_hash)
        if not isinstance(hashes, list):
            raise self._bad(number, "total_hashes", "a list of whole numbers >= 0", hashes)
        if len(hashes) > max_hashes or any(type(one) is not int or one < 0 for one in hashes):
            rule = (
                f"at most {max_hashes} whole numbers >= 0, each for as many tokens as "
                f"workload.tokens_per_hash={self.tokens_per_hash} says"
            )
            raise self._bad(number, "total_hashes", rule, hashes)
        return tuple(hashes)

    def left_out(self, columns: dict[str, pa.Array], is_known: BoolArray) -> tuple[str, BoolArray]:
        column = columns.get("request_canceled")
        if column is None:
            return "", np.zeros(len(is_known), np.bool_)
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        canceled, _ = _whole_numbers(column)  # 0 where it is missing
        if ((canceled != 0) & (canceled != 1)).any():
            raise UnusualTextError
        return "canceled", canceled == 1

    def contents(self, columns: dict[str, pa.Array], prompt_tokens: IntArray) -> ObjectArray | None:
        if "block_size" in columns:
            sizes, is_set = _whole_numbers(columns["block_size"])
            if (is_set & (sizes != self.tokens_per_hash)).any():
                raise UnusualTextError
        if "total_hashes" not in columns:
            return None
        hashes, counts = tuples_of(columns["total_hashes"])
        has_negative = (columns["total_hashes"].flatten().cast(pa.int64()).to_numpy() < 0).any()
        if has_negative or (counts > -(-prompt_tokens // self.tokens_per_hash)).any():
            raise UnusualTextError
        return hashes

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        return block_segments(content_ids, num_tokens, self.tokens_per_hash)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChutesParquet(ParquetTrace):
    """Chutes: started_at (a time, or Unix time), it, ot; `user_id` is the tenant.

    Rows without token counts (failed, or no text generation) are counted and not replayed. The file says how
    many tokens were cached (ct), not which, so prompts share nothing.
    """

    needed: ClassVar[tuple[str, ...]] = ("started_at", "it", "ot")
    tenant_column: ClassVar[str] = "user_id"

    def skip_reason(self, number: int, row: dict[str, Any]) -> str:
        return "no token counts" if row["it"] is None or row["ot"] is None else ""

    def left_out(self, columns: dict[str, pa.Array], is_known: BoolArray) -> tuple[str, BoolArray]:
        return "no token counts", ~is_known


def _whole_time(value: Any) -> int | float:
    """Returns a time that is a number. Raises TypeError for anything else."""
    if type(value) not in (int, float):
        raise TypeError(value)
    number: int | float = value
    return number


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_float64(kind))


def _whole_numbers(column: pa.Array) -> tuple[IntArray, BoolArray]:
    """Returns a column of whole numbers [N], 0 where it is null, and where it is not null [N].

    Raises UnusualTextError for other types.
    """
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise UnusualTextError
    try:
        whole = column.cast(pa.int64())
    except pa.ArrowInvalid:  # 64 bits without a sign
        raise UnusualTextError from None
    return whole.fill_null(0).to_numpy(zero_copy_only=False), whole.is_valid().to_numpy(zero_copy_only=False)


def _texts(column: pa.Array) -> ObjectArray:
    """Returns a column as texts [N], empty where it is null. Raises UnusualTextError for lists and others."""
    try:
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        names = ["" if name is None else str(name) for name in encoded.dictionary.to_pylist()]
    except (pa.ArrowException, *UNREADABLE):
        raise UnusualTextError from None
    indices = encoded.indices.cast(pa.int64()).fill_null(len(names))
    texts: ObjectArray = objects([*names, ""])[indices.to_numpy(zero_copy_only=False)]
    return texts
