"""Turns the rows of any table into requests by the columns that a format declares.

`Reading` is one pass over a file. It reads pieces of plain rows as columns, and others row by row: both check
the same rules and give the same requests.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sim.workload.arrival_times import Clock
from sim.workload.chunks import NO_SESSION, ObjectArray, objects
from sim.workload.distributions import MAX_TOKENS, BoolArray, IntArray
from sim.workload.trace_columns import DONE, Columns, shown, tokens, tokens_rule, whole_number
from sim.workload.trace_files import UnusualTextError, require_file, require_size
from sim.workload.trace_rows import Block, TraceRow
from sim.workload.trace_tables import IDS, UNREADABLE, ArrowColumns, Record

CANCELED = ("true", "1", "1.0")
NOT_CANCELED = ("", "false", "0", "0.0", "nan")
"""Texts of `Columns.canceled` in lower case; numbers and missing values stand for true and false."""
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024, 8, 4, 2, 1)
"""Known block sizes, the usual ones first."""
CHARACTERS_PER_TOKEN = 4
"""English text has about 4 characters per token with current vocabularies; code and other languages have
fewer.
"""
MAX_TOKENIZER_BYTES = 1 << 28


class Reading:
    """One pass over the rows of a trace.

    time_rule: the rule of arrivals, for messages. tokens_per_hash: tokens of the block that an id of
    `Columns.hashes` names. tokenizer: counts the tokens of `Columns.prompt_text`.
    """

    def __init__(
        self,
        columns: Columns,
        clock: Clock,
        time_rule: str,
        tokens_per_hash: int = 1,
        tokenizer: Path | None = None,
    ) -> None:
        self._columns, self._clock, self._time_rule = columns, clock, time_rule
        self._tokens_per_hash, self._tokenizer = tokens_per_hash, tokenizer
        self._sessions: dict[str, int] = {}  # numbers of the sessions seen so far, by name
        self._lengths: TextLengths | None = None
        self._remarks: list[str] = []  # of the row that is being read
        self._has_hashes = True

    def block(self, found: ArrowColumns, number: int) -> Block:
        """Returns the rows of a piece. Raises UnusualTextError unless all values are right.

        number: number of the first row.
        """
        columns = self._columns
        arrival_s = self._clock.of_column(found[columns.arrival])
        prompts, has_prompt = _whole_numbers(found[columns.prompt])
        outputs, has_output = _whole_numbers(found[columns.output])
        least = 0 if columns.empty else 1
        is_right = (prompts >= least) & (prompts <= MAX_TOKENS)
        is_right &= (outputs >= least) & (outputs <= MAX_TOKENS)
        if columns.failed:
            is_right |= outputs == 0
        is_known = has_prompt & has_output
        is_left_out, reason = ~is_known, columns.unknown
        if columns.canceled in found:
            is_left_out, reason = _are_true(found[columns.canceled]), "canceled"
        elif not reason:
            is_left_out = np.zeros(len(is_known), np.bool_)
        if arrival_s is None or not ((is_right & is_known) | is_left_out).all():
            raise UnusualTextError
        is_empty = ~is_left_out & ((prompts == 0) | (outputs == 0))
        skips = (is_left_out | is_empty).any()
        reasons = objects(["", reason, columns.failed or columns.empty])
        contents = self._contents_of(found, prompts)
        tenants = _texts(found[columns.tenant]) if columns.tenant in found else None
        remark = self._clock.take_remark()  # last: it is still there if the rows are read one by one instead
        return Block(
            line=np.arange(number, number + len(arrival_s)),
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            content_ids=contents,
            skip_reason=reasons[is_left_out + 2 * is_empty] if skips else None,
            tenant=tenants,
            remarks=(remark,) if remark else (),
        )

    def row(self, record: Record) -> TraceRow:
        """Returns the request of a row. Raises ValueError."""
        columns, values = self._columns, record.values
        values.pop("", None)  # a column without a name stands for a column that the format lacks
        self._remarks = []
        for name, instead in columns.refused.items():
            if values.get(name) is not None:
                raise record.bad(name, instead, values[name])
        if columns.prompt not in values and isinstance(values.get(columns.prompt_text), str):
            values[columns.prompt] = self._text_tokens(values[columns.prompt_text])
        record.require(columns.required)
        try:
            arrival_s = self._clock(values[columns.arrival])
        except (ValueError, TypeError):
            raise record.bad(columns.arrival, self._time_rule, values[columns.arrival]) from None
        reason = self._skip_reason(record)
        prompt = output = 0
        if not reason:
            prompt, output, reason = self._tokens(record)
            reason = self._status(record) or reason
        content_ids: tuple[int, ...] = ()
        if not reason or columns.cached:
            prompt, content_ids = self._contents(record, prompt)
        tenant = values.get(columns.tenant)
        session = self._session(record)
        self._remarks.append(self._clock.take_remark())
        return TraceRow(
            record.number,
            arrival_s,
            prompt,
            output,
            content_ids,
            " ".join(filter(None, self._remarks)),
            reason,
            "" if tenant is None else str(tenant),
            session,
        )

    def _skip_reason(self, record: Record) -> str:
        """Returns why a row is not replayed, for any lengths; empty if it may be replayed."""
        columns, values = self._columns, record.values
        if left_out := values.get(columns.left_out):
            return str(left_out)
        if columns.canceled in values:
            value = values[columns.canceled]
            text = "" if value is None else str(value).strip().lower()
            if text not in (*CANCELED, *NOT_CANCELED):
                raise record.bad(columns.canceled, "true or false", value)
            return "canceled" if text in CANCELED else ""
        if columns.unknown and None in (values[columns.prompt], values[columns.output]):
            return columns.unknown
        return ""

    def _status(self, record: Record) -> str:
        """Returns why a row with a status is not replayed; empty if it is replayed."""
        status = record.values.get(self._columns.status)
        is_done = not status or str(status).lower() in DONE
        return "" if is_done else f"{self._columns.status}: {shown(status)}"

    def _tokens(self, record: Record) -> tuple[int, int, str]:
        """Returns prompt and output, and the reason why the row is not replayed if one of them is 0."""
        columns = self._columns
        failed, least = columns.failed, 0 if columns.empty else 1
        prompt_is_whole = _whole(record.values[columns.prompt]) is not None
        if failed and prompt_is_whole and _whole(record.values[columns.output]) == 0:
            return 0, 0, failed  # its prompt may be any number
        prompt = _tokens(record, columns.prompt, 1 if columns.cached else least)
        output = _tokens(record, columns.output, 0 if failed else least)
        if record.values.get(columns.more_output) is not None:
            output += _tokens(record, columns.more_output, 0)
        return prompt, output, "" if prompt and output else columns.empty

    def _contents(self, record: Record, prompt: int) -> tuple[int, tuple[int, ...]]:
        """Returns the tokens of the prompt and its content ids; see `sized_segments`."""
        columns, values = self._columns, record.values
        if columns.cached:
            return prompt, (_tokens(record, columns.cached, 0), prompt)
        if columns.hashes:
            return prompt, self._hashes(record, prompt)
        group = values.get(columns.prefix_group)
        number = (
            _tokens(record, columns.prefix_tokens, 0) if group and values.get(columns.prefix_tokens) else 0
        )
        if number:
            digest = blake2b(str(group).encode(), digest_size=8).digest()
            return prompt + number, (number, int.from_bytes(digest, "little") >> 1)
        served = _tokens(record, columns.served_prompt, 0) if values.get(columns.served_prompt) else 0
        return served or prompt, ()

    def _hashes(self, record: Record, prompt: int) -> tuple[int, ...]:
        """Returns the ids of the prompt's content."""
        columns, values, size = self._columns, record.values, self._tokens_per_hash
        if values.get(columns.hash_tokens) not in (None, size):
            given = shown(values[columns.hash_tokens])
            raise record.bad(
                columns.hash_tokens,
                f"tokens_per_hash={size}",
                f"{given}; set workload.tokens_per_hash={given}",
            )
        ids = values.get(columns.hashes)
        if ids is None:
            if self._has_hashes:
                self._remarks.append(columns.no_hashes)
            self._has_hashes = False
            return ()
        least = columns.least_hash
        if not IDS.is_sound(ids) or (least is not None and min(ids, default=least) < least):
            rule = IDS.text if least is None else f"{IDS.text} >= {least}"
            raise record.bad(columns.hashes, rule, ids)
        max_ids = -(-prompt // size)
        if len(ids) > max_ids:
            rule = f"at most {max_ids} ids for {prompt} tokens, {size} each"
            raise record.bad(columns.hashes, rule, f"{len(ids)} ids; {other_block_size(prompt, len(ids))}")
        return (size, *ids) if ids else ()

    def _contents_of(self, found: ArrowColumns, prompts: IntArray) -> ObjectArray | None:
        """Returns `_hashes` of all rows; None: all are empty. Raises UnusualTextError."""
        columns, size = self._columns, self._tokens_per_hash
        if columns.hash_tokens in found:
            sizes, is_set = _whole_numbers(found[columns.hash_tokens])
            if (is_set & (sizes != size)).any():
                raise UnusualTextError
        if columns.hashes not in found:
            return None
        ids = found[columns.hashes]
        hashes, counts = _tuples(ids, size)
        is_noted = columns.no_hashes and ids.null_count
        if is_noted or (counts > -(-prompts // size)).any():
            raise UnusualTextError
        least = columns.least_hash
        if least is not None and (ids.flatten().cast(pa.int64()).to_numpy() < least).any():
            raise UnusualTextError
        return hashes

    def _session(self, record: Record) -> int:
        """Returns the number of the session of a row."""
        name = record.values.get(self._columns.session)
        if self._columns.cached and not (name and isinstance(name, str)):
            raise record.bad(self._columns.session, "a text", name)
        return self._sessions.setdefault(str(name), len(self._sessions)) if name else NO_SESSION

    def _text_tokens(self, text: str) -> int:
        if self._lengths is None:
            self._lengths = TextLengths(self._tokenizer)
            self._remarks.append(self._lengths.remark)
        return self._lengths(text)


def _tokens(record: Record, name: str, least: int) -> int:
    """Returns a number of tokens of a row. Raises ValueError."""
    found = record.values.get(name)
    try:
        if isinstance(found, str) and not record.is_text:
            raise ValueError(found)
        return tokens(found, least)
    except ValueError:
        raise record.bad(name, tokens_rule(least), found) from None


def _whole(found: object) -> int | None:
    """Returns an integer; None for other values."""
    try:
        return whole_number(found)
    except ValueError:
        return None


def other_block_size(num_tokens: int, num_ids: int) -> str:
    """Returns the advice if there are more ids than blocks according to the setting."""
    fitting = [size for size in BLOCK_SIZES if -(-num_tokens // size) == num_ids]
    value = str(fitting[0]) if fitting else "the tokens that one id stands for"
    return f"set workload.tokens_per_hash={value}" + (", which fits this row" if fitting else "")


def _whole_numbers(column: pa.Array) -> tuple[IntArray, BoolArray]:
    """Returns a column of integers [N], 0 for nulls, and a mask of its non-null values [N].

    Raises UnusualTextError for other types.
    """
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise UnusualTextError
    try:
        whole = column.cast(pa.int64())
    except pa.ArrowInvalid:  # 64 bits without a sign
        raise UnusualTextError from None
    if not whole.null_count:
        return whole.to_numpy(), np.ones(len(whole), np.bool_)
    return whole.fill_null(0).to_numpy(zero_copy_only=False), whole.is_valid().to_numpy(zero_copy_only=False)


def _are_true(column: pa.Array) -> BoolArray:
    """Returns which values of `Columns.canceled` are true [N]. Raises UnusualTextError for texts."""
    flags, _ = _whole_numbers(column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column)
    if ((flags != 0) & (flags != 1)).any():
        raise UnusualTextError
    is_true: BoolArray = flags == 1  # 0 where it is missing
    return is_true


def _tuples(column: pa.ListArray, size: int) -> tuple[ObjectArray, IntArray]:
    """Returns lists of integers as tuples preceded by a size [N], and the lengths of the lists [N].

    A null list is empty. Raises UnusualTextError for other values in a list.
    """
    try:
        values = column.flatten().cast(pa.int64())
    except (AttributeError, pa.ArrowException):
        raise UnusualTextError from None
    if values.null_count:
        raise UnusualTextError
    lengths = np.asarray(column.value_lengths().fill_null(0).to_numpy(), np.int64)
    numbers = values.to_numpy().tolist()
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    return objects(
        [(size, *numbers[a:b]) if b > a else () for a, b in zip(starts, ends, strict=True)]
    ), lengths


def _texts(column: pa.Array) -> ObjectArray:
    """Returns a column as strings [N], empty for nulls. Raises UnusualTextError for lists and others."""
    try:
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        names = ["" if name is None else str(name) for name in encoded.dictionary.to_pylist()]
    except (pa.ArrowException, *UNREADABLE):
        raise UnusualTextError from None
    indices = encoded.indices.cast(pa.int64()).fill_null(len(names))
    texts: ObjectArray = objects([*names, ""])[indices.to_numpy(zero_copy_only=False)]
    return texts


class TextLengths:
    """Counts the tokens of texts.

    path: a tokenizer.json, or the folder that holds one; None: 4 characters per token.
    """

    def __init__(self, path: Path | None) -> None:
        """Reads the tokenizer. Raises ValueError."""
        self._tokenizer: Any = None
        if path is None:
            self.remark = (
                f"Lengths are those of texts at {CHARACTERS_PER_TOKEN} characters per token; "
                "workload.tokenizer=FILE counts them with a tokenizer.json."
            )
            return
        path = path.expanduser()
        file = path / "tokenizer.json" if path.is_dir() else path
        require_file(file, "tokenizer")
        require_size(file, MAX_TOKENIZER_BYTES, "tokenizer")
        try:
            package = importlib.import_module("tokenizers")  # a compiled package that only such traces need
        except ImportError:
            raise ValueError(
                f"tokenizer={path}: needs the package tokenizers: pip install tokenizers"
            ) from None
        try:
            self._tokenizer = package.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises no specific exception class
            raise ValueError(f"tokenizer={path}: is no tokenizer.json: {error}") from None
        self.remark = f"Lengths are those of texts, counted with {file}."

    def __call__(self, text: str) -> int:
        """Returns the number of tokens of a text, at least 1."""
        if self._tokenizer is None:
            return max(1, -(-len(text) // CHARACTERS_PER_TOKEN))
        return max(1, len(self.tokens(text)))

    def tokens(self, text: str) -> Sequence[object]:
        """Returns the tokens of a text: ids, or pieces of 4 characters; at least one."""
        if self._tokenizer is None:
            return [
                text[i : i + CHARACTERS_PER_TOKEN] for i in range(0, len(text), CHARACTERS_PER_TOKEN)
            ] or [""]
        ids: Sequence[object] = self._tokenizer.encode(text, add_special_tokens=False).ids or [0]
        return ids
