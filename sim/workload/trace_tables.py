"""Reads the rows of a trace from its file: CSV, JSON lines, JSON objects, Parquet.

A table yields its rows in pieces of several thousand. A piece can be read as columns by pyarrow if its text
and types are plain; otherwise its rows are read one by one, with the same values and with errors that name
file, row, column and value. The module is long because four file formats share one way to report invalid
values.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv
from pyarrow import json as arrow_json

from sim.workload.arrival_times import Clock
from sim.workload.distributions import MAX_ARRIVAL_S
from sim.workload.trace_columns import MAX_SHOWN, Columns, is_tokens, shown, tokens_rule, whole_number
from sim.workload.trace_files import LINE_FEED, UnusualTextError, lines_of, opened, pieces_of
from sim.workload.trace_rows import MAX_VALUES

OTHER_NAMES = "workload=trace finds other columns"
"""The advice in the error for a file that lacks a column."""

ArrowColumns = dict[str, pa.Array]
"""The columns of some rows, by name."""


class Rule(NamedTuple):
    """Rule for a value, its text for messages, and the conversion of a valid value."""

    is_sound: Callable[[Any], bool]
    text: str
    read: Callable[[Any], Any] | None = None


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


COUNT = Rule(is_tokens, tokens_rule(1), whole_number)
TOKENS = Rule(partial(is_tokens, least=0), tokens_rule(0), whole_number)
IDS = Rule(_is_list_of_ids, "a list of whole numbers")
OBJECTS = Rule(
    lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value), "a list of objects"
)
TEXT = Rule(lambda value: isinstance(value, str) and bool(value), "a text")


@dataclass(slots=True)
class Record:
    """One row of a file by column, and its place."""

    path: Path
    number: int
    values: dict[str, Any]

    is_text: ClassVar[bool] = False
    """Whether numbers are texts in the file."""

    def where(self, name: str) -> str:
        """Returns the place of a value, for messages."""
        return f"{self.path}:{self.number}:{name}"

    def bad(self, name: str, rule: str, found: object) -> ValueError:
        """Returns the error of a value."""
        return ValueError(f"{self.where(name)}: expected {rule}, found {shown(found)}")

    def require(self, names: Iterable[str]) -> None:
        """Raises ValueError unless the row has all these columns."""

    def check(self, rules: Mapping[str, Rule], values: dict[str, Any] | None = None) -> None:
        """Raises ValueError for the first value that is missing or wrong; reads the others in place.

        values: an object inside the row; None: the row.
        """
        found = self.values if values is None else values
        for name, (is_sound, rule, read) in rules.items():
            if name not in found:
                raise _missing(self.path, self.number, "key", name, ", ".join(rules), ", ".join(found))
            if not is_sound(found[name]):
                raise self.bad(name, rule, found[name])
            if read is not None:
                found[name] = read(found[name])


class Piece(NamedTuple):
    """Some rows of a file."""

    number: int
    """Number of the first row, as in messages."""
    columns: Callable[[], ArrowColumns]
    """Reads the rows as columns; raises UnusualTextError if they must be read one by one."""
    records: Callable[[], Iterator[Record]]
    """Reads them one by one."""
    is_rest: bool
    """Whether `records` continues to the end of the file."""


class Table(ABC):
    """A kind of file with rows."""

    has_texts: ClassVar[bool] = False
    """Whether numbers are texts in the file."""

    def time_rule(self, unit: str, most: float) -> str:
        """Returns the rule of an arrival, for messages. most: the largest number after the first one."""
        return f"a finite number of {unit} >= 0, at most {most:g} after the first"

    @abstractmethod
    def names(self, path: Path) -> Iterable[str]:
        """Returns the names of the columns, as far as they are known before the file is read."""

    @abstractmethod
    def pieces(self, path: Path, columns: Columns, clock: Clock, start_s: float) -> Iterator[Piece]:
        """Yields the rows. Raises ValueError.

        start_s: rows before this time may be skipped, if the file shows where they end.
        """


def refuse_columns() -> NoReturn:
    """Raises UnusualTextError: rows that can only be read one by one."""
    raise UnusualTextError


def _missing(path: Path, line: int, kind: str, name: str, wanted: str, found: str) -> ValueError:
    return ValueError(
        f"{path}:{line}:1: no {kind} {name}; expected {wanted} ({OTHER_NAMES}), found {shown(found, 200)}"
    )


def _require_once(where: str, columns: Columns, names: Sequence[str]) -> None:
    """Raises ValueError if a file has a column of the format twice."""
    for name in columns.all:
        if names.count(name) > 1:
            raise ValueError(f"{where}: has {names.count(name)} columns {name}; rename or remove all but one")


@dataclass(slots=True)
class CsvRow(Record):
    """One row of a CSV file. fields: its texts in the order of the header."""

    header: list[str]
    fields: list[str]

    is_text: ClassVar[bool] = True

    def where(self, name: str) -> str:
        """Returns the place of a field; its column counts characters from 1, for rows without quotes."""
        before = self.fields[: self.header.index(name)]
        return f"{self.path}:{self.number}:{1 + sum(len(text) + 1 for text in before)}: {name}"

    def bad(self, name: str, rule: str, found: object) -> ValueError:
        """Returns the error of a field."""
        text = str(found)[:MAX_SHOWN]
        return ValueError(f"{self.where(name)}: expected {rule}, found {text!r}")


class CsvTable(Table):
    """Comma-separated rows after a header line."""

    has_texts = True

    def time_rule(self, unit: str, most: float) -> str:
        """Returns the rule of an arrival; see `Table`."""
        return f"a number of {unit} >= 0, at most {most:g} after the first"

    def names(self, path: Path) -> Iterable[str]:
        """Returns the fields of the header."""
        return next(csv.reader(lines_of(path)), [])

    def pieces(self, path: Path, columns: Columns, clock: Clock, start_s: float) -> Iterator[Piece]:
        """Yields the rows; see `Table`."""
        header: list[str] | None = None
        line = 1
        try:
            for text in pieces_of(path):
                if header is None:
                    names, text = _split_header(text)
                    others = {*columns.in_columns} - {columns.tenant}  # lists and truth values as texts
                    if columns.only_by_row(names) or not others.isdisjoint(names):
                        raise UnusualTextError
                    _check_header(path, columns, names)
                    header, line = names, 2
                if text:
                    read = partial(_csv_columns, text, header, columns)
                    yield Piece(line, read, partial(_csv_rows, path, columns, header, line - 1), True)
                    line += text.count(b"\n")
        except UnusualTextError:
            yield Piece(line, refuse_columns, partial(_csv_rows, path, columns, header, line - 1), True)


def _split_header(text: bytes) -> tuple[list[str], bytes]:
    """Returns the fields of the first line, and the text after it. Raises UnusualTextError for quotes."""
    line, _, rest = text.partition(b"\n")
    if b'"' in line:
        raise UnusualTextError
    return line.removesuffix(b"\r").decode().split(","), rest


def _check_header(path: Path, columns: Columns, header: list[str]) -> None:
    wanted = ",".join(columns.needed)
    if not header:
        raise ValueError(f"{path}:1:1: expected a header with {wanted}, found an empty line or file")
    for name in columns.needed:
        if name not in header:
            raise _missing(path, 1, "column", name, f"a header with {wanted}", ",".join(header))
    _require_once(f"{path}:1:1", columns, header)


def _csv_columns(text: bytes, header: list[str], columns: Columns) -> ArrowColumns:
    """Returns the columns of whole lines: no quotes, and whole numbers without separators.

    Raises UnusualTextError for everything else.
    """
    # pyarrow reads hexadecimal numbers; searching for one byte first is faster than searching for two.
    is_hexadecimal = any(one in text and b"0" + one in text for one in (b"x", b"X"))
    if b'"' in text or is_hexadecimal:
        raise UnusualTextError
    kinds = dict(zip(columns.needed, (pa.utf8(), pa.int64(), pa.int64()), strict=True))
    if columns.tenant in header:
        kinds |= {columns.tenant: pa.utf8()}
    numbers = {name: str(header.index(name)) for name in kinds}  # others may have equal names
    types = {numbers[name]: kind for name, kind in kinds.items()}
    read = arrow_csv.ReadOptions(
        use_threads=False, block_size=len(text) + 1, column_names=[str(i) for i in range(len(header))]
    )
    convert = arrow_csv.ConvertOptions(
        column_types=types, include_columns=list(types), null_values=[], check_utf8=False
    )
    try:
        parse = arrow_csv.ParseOptions(quote_char=False)
        table = arrow_csv.read_csv(pa.BufferReader(text), read, parse, convert)
    except pa.ArrowInvalid:
        raise UnusualTextError from None
    if table.num_rows != text.count(b"\n"):
        raise UnusualTextError
    return {name: table.column(number).combine_chunks() for name, number in numbers.items()}


def _csv_rows(path: Path, columns: Columns, header: list[str] | None, num_lines: int) -> Iterator[Record]:
    """Yields the rows after the first num_lines lines. header: None: it is the first row."""
    reader = csv.reader(islice(lines_of(path), num_lines, None))
    try:
        if header is None:
            header = next(reader, [])
            _check_header(path, columns, header)
        for fields in reader:
            if not fields:
                continue  # a blank line
            line = num_lines + reader.line_num
            if len(fields) != len(header):
                column = 1 + sum(len(text) + 1 for text in fields[: len(header)])
                column -= len(fields) < len(header)  # the row ends where a comma should follow
                raise ValueError(
                    f"{path}:{line}:{column}: expected {len(header)} fields "
                    f"({shown(','.join(header), 200)}), found {len(fields)}"
                )
            yield CsvRow(path, line, dict(zip(header, fields, strict=True)), header, fields)
    except csv.Error as error:
        raise ValueError(f"{path}:{num_lines + reader.line_num}:1: expected CSV, found: {error}") from None


NAMED_LINES = 100
"""Number of lines at the beginning of a file whose keys are known before it is read."""
OPEN, CLOSE = b"{}"


@dataclass(slots=True)
class JsonLine(Record):
    """The object in one line of a file. text: the line."""

    text: str

    def where(self, name: str) -> str:
        """Returns the place of a value, which is that of its key."""
        column = self.text.index(f'"{name}"') + 1 if f'"{name}"' in self.text else 1
        return f"{self.path}:{self.number}:{column}: {name}"

    def require(self, names: Iterable[str]) -> None:
        """Raises ValueError unless the object has all these keys."""
        wanted = list(names)
        for name in wanted:
            if name not in self.values:
                raise _missing(self.path, self.number, "key", name, ", ".join(wanted), ", ".join(self.values))


class JsonLines(Table):
    """One JSON object per line."""

    def names(self, path: Path) -> Iterable[str]:
        """Returns the keys in the first lines of a file, in their order."""
        first = islice(json_lines(path, ()), NAMED_LINES)
        return dict.fromkeys(key for line in first for key in line.values)

    def pieces(self, path: Path, columns: Columns, clock: Clock, start_s: float) -> Iterator[Piece]:
        """Yields the objects; see `Table`."""
        line = 1
        try:
            for text in pieces_of(path):
                rest = partial(json_lines, path, columns.required, line - 1)
                yield Piece(line, partial(_json_columns, text, columns, clock), rest, True)
                line += text.count(b"\n")
        except UnusualTextError:
            yield Piece(line, refuse_columns, partial(json_lines, path, columns.required, line - 1), True)


def json_lines(path: Path, wanted: Iterable[str], num_lines: int = 0) -> Iterator[Record]:
    """Yields the objects of a file. Raises ValueError.

    wanted: names of the keys, for an empty file. num_lines: number of skipped lines at the beginning.
    """
    number = num_lines
    for number, text in enumerate(islice(lines_of(path), num_lines, None), num_lines + 1):
        if text.isspace():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}:{error.colno}: expected one JSON object per line: {error.msg}"
            ) from None
        except RecursionError:
            raise ValueError(f"{path}:{number}:1: nests values too deeply to be read") from None
        except ValueError as error:  # an integer of thousands of digits
            raise ValueError(f"{path}:{number}:1: expected one JSON object per line: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}:1: expected a JSON object, found {shown(text.strip())}")
        yield JsonLine(path, number, row, text)
    if not number:
        raise ValueError(f"{path}:1:1: expected JSON lines with {', '.join(wanted)}, found an empty file")


def _json_columns(text: bytes, columns: Columns, clock: Clock) -> ArrowColumns:
    """Returns the columns of lines with one object each; other keys are ignored.

    Raises UnusualTextError unless all values have the right types.
    """
    if columns.by_row or not clock.begins(_first_object(text).get(columns.arrival)):
        raise UnusualTextError
    lines = np.frombuffer(text, np.uint8)
    first = np.concatenate([[0], np.flatnonzero(lines == LINE_FEED)[:-1] + 1])  # of each line
    # pyarrow also reads two objects in a line, and objects that begin in the line before.
    if not (lines[first] == OPEN).all() or ((lines[:-1] == CLOSE) & (lines[1:] == OPEN)).any():
        raise UnusualTextError
    types = {
        columns.arrival: pa.int64() if clock.is_unix else pa.float64(),  # a double has not enough bits
        columns.prompt: pa.int64(),
        columns.output: pa.int64(),
        columns.hashes: pa.list_(pa.int64()),
        columns.hash_tokens: pa.int64(),
        columns.canceled: pa.bool_(),
        columns.tenant: pa.utf8(),
        **dict.fromkeys(columns.refused, pa.null()),
    }
    schema = pa.schema([(name, kind) for name, kind in types.items() if name])
    read = arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = arrow_json.read_json(pa.BufferReader(text), read, parse)
    except pa.ArrowException:
        raise UnusualTextError from None
    found = {name: table.column(name).combine_chunks() for name in schema.names}
    if table.num_rows != len(first) or any(found[name].null_count for name in columns.needed):
        raise UnusualTextError
    return found


def _first_object(text: bytes) -> dict[str, Any]:
    """Returns the object in the first line of a text. Raises UnusualTextError if there is none."""
    try:
        found = json.loads(text.partition(b"\n")[0])
    except (ValueError, RecursionError):
        raise UnusualTextError from None
    if not isinstance(found, dict):
        raise UnusualTextError
    return found


PIECE = 1 << 18
"""Number of bytes read at once; more if an element is longer."""
MAX_ELEMENT = 1 << 28
"""Number of characters from which an element is rejected."""
CUT_SHORT = 16
"""An error within this many characters of the end of the text read so far may be due to the cut."""

_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"


class Element(Record):
    """One object of a JSON file."""

    __slots__ = ()

    def where(self, name: str) -> str:
        """Returns the place of a value."""
        return f"{self.path}: element {self.number}: {name}"


@dataclass(frozen=True, slots=True)
class JsonElements(Table):
    """A JSON file of any size: the elements of one list, or objects one after another.

    wanted: the expected objects, for messages.
    """

    wanted: str

    def names(self, path: Path) -> Iterable[str]:
        """Returns the keys of the first object."""
        return next(self.records(path)).values

    def pieces(self, path: Path, columns: Columns, clock: Clock, start_s: float) -> Iterator[Piece]:
        """Yields the objects; see `Table`."""
        yield Piece(1, refuse_columns, partial(self.records, path), True)

    def records(self, path: Path) -> Iterator[Record]:
        """Yields the objects with their numbers from 1. Raises ValueError that names the element."""
        text = _Text(path)
        text.skip(_BLANKS)
        is_list = text.skip("[", at_most=1)
        number = 0
        while True:
            text.skip(_BLANKS + ("," if is_list and number else ""))
            if text.has_ended or (is_list and text.next == "]"):
                break
            number += 1
            found = text.value(number)
            if not isinstance(found, dict):
                raise ValueError(f"{path}: element {number}: expected {self.wanted}, found {shown(found)}")
            yield Element(path, number, found)
        if is_list and text.has_ended:
            raise ValueError(
                f"{path}: element {number + 1}: expected more elements or ], found the end of the file"
            )
        if not number:
            raise ValueError(f"{path}: expected {self.wanted}, found none")


class _Text:
    """The text of a file; only the part being read is in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = opened(path)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0
        self._is_read = False

    @property
    def has_ended(self) -> bool:
        while self._at == len(self._text) and not self._is_read:
            self._read_more(PIECE)
        return self._at == len(self._text)

    @property
    def next(self) -> str:
        return self._text[self._at]

    def skip(self, characters: str, at_most: int | None = None) -> int:
        """Skips characters of a set; returns their number."""
        count = 0
        while count != at_most and not self.has_ended and self.next in characters:
            self._at += 1
            count += 1
        return count

    def value(self, number: int) -> Any:
        """Returns the value that begins at the current position."""
        size = PIECE
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
                self._at = end
                return found
            except json.JSONDecodeError as error:
                length = len(self._text) - self._at
                may_be_cut = error.pos >= len(self._text) - CUT_SHORT or "Unterminated" in error.msg
                if self._is_read or not may_be_cut:
                    raise ValueError(
                        f"{self._path}: element {number}: expected JSON: {error.msg} after "
                        f"{error.pos - self._at:,} characters of it"
                    ) from None
                if length > MAX_ELEMENT:
                    raise ValueError(
                        f"{self._path}: element {number}: must have at most {MAX_ELEMENT:,} characters"
                    ) from None
            except RecursionError:
                raise ValueError(
                    f"{self._path}: element {number}: nests values too deeply to be read"
                ) from None
            except ValueError as error:  # an integer of thousands of digits
                raise ValueError(f"{self._path}: element {number}: {error}") from None
            self._read_more(size)
            size *= 2

    def _read_more(self, size: int) -> None:
        try:
            data = self._file.read(size)
            more = self._decode.decode(data, final=not data)
        except UnicodeDecodeError:
            raise ValueError(f"{self._path}: expected UTF-8 text, found other bytes") from None
        except (EOFError, OSError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self._path}: cannot be read: {error}") from None
        self._is_read = not data
        self._text, self._at = self._text[self._at :] + more, 0


ROWS_AT_ONCE = 8192
"""Rows of a batch, fewer if they have long lists."""
LISTS_AT_ONCE = 256
"""Rows with lists that are read at once."""
BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at once: row groups may be larger than the memory."""
UNREADABLE = (UnicodeDecodeError, OverflowError)
"""Errors of values that Python cannot represent: text that is not UTF-8, and dates out of range."""


class ParquetTable(Table):
    """A Parquet file; rows have numbers from 1."""

    def time_rule(self, unit: str, most: float) -> str:
        """Returns the rule of an arrival, which may also be a date; see `Table`."""
        return f"a time at most {MAX_ARRIVAL_S:g} s after the first"

    def names(self, path: Path) -> Iterable[str]:
        """Returns the names of the columns."""
        with pq.ParquetFile(path) as file:
            names: list[str] = file.schema_arrow.names
        return names

    def pieces(self, path: Path, columns: Columns, clock: Clock, start_s: float) -> Iterator[Piece]:
        """Yields the rows, without row groups whose statistics show that they are before start_s."""
        try:
            with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                names = file.schema_arrow.names
                for name in columns.needed:
                    if name not in names:
                        raise ValueError(
                            f"{path}: no column {name}; expected {', '.join(columns.needed)} "
                            f"({OTHER_NAMES}), found {shown(', '.join(names), 200)}"
                        )
                _require_once(str(path), columns, names)
                wanted = [name for name in (*columns.all, *columns.refused) if name in names]
                is_by_row = columns.only_by_row(names)
                group, number = start_of(file, columns.arrival, clock, start_s) if start_s else Start(0, 1)
                for batch in batches_of(file, wanted, ROWS_AT_ONCE, group):
                    if len(batch):
                        plain = _with_plain_times(batch, columns.arrival)
                        by_name = dict(zip(plain.schema.names, plain.columns, strict=True))
                        rows = partial(_parquet_rows, path, plain, number)
                        read: Callable[[], ArrowColumns] = partial(dict, by_name)
                        yield Piece(number, refuse_columns if is_by_row else read, rows, False)
                    number += len(batch)
        except (pa.ArrowException, OSError, *UNREADABLE) as error:
            raise ValueError(
                f"{path}: cannot be read as Parquet: {shown(str(error).partition(chr(10))[0], 200)}"
            ) from None


def _parquet_rows(path: Path, batch: pa.RecordBatch, number: int) -> Iterator[Record]:
    """Yields the rows of a batch. Raises ValueError for a value that Python cannot represent."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UNREADABLE:
        for row, name in product(range(len(batch)), batch.schema.names):
            try:
                batch.column(name)[row].as_py()
            except UNREADABLE as error:
                raise Record(path, number + row, {}).bad(name, "a value that can be read", error) from None
        raise
    for place, values in enumerate(rows, number):
        yield Record(path, place, values)


class Start(NamedTuple):
    """The row group with which reading begins, and the number of its first row, from 1."""

    group: int
    row: int


def start_of(file: pq.ParquetFile, column: str, clock: Clock, start_s: float) -> Start:
    """Returns the first row group whose times may reach start_s.

    column: name of the time column, which is sorted. A group without statistics of its times ends the search,
    and the last group is read in any case. The clock reads the first time of the file.
    """
    first = (
        next(file.iter_batches(1, row_groups=[0], columns=[column]), None) if file.num_row_groups else None
    )
    if first is None or not clock.begins(_with_plain_times(first, column).column(0)[0].as_py()):
        return Start(0, 1)
    row = 1
    for group in range(file.num_row_groups - 1):
        latest_s = _latest_s(file, group, column, clock)
        if latest_s is None or latest_s >= start_s:
            return Start(group, row)
        row += file.metadata.row_group(group).num_rows
    return Start(file.num_row_groups - 1, row)


def batches_of(
    file: pq.ParquetFile, columns: Sequence[str], max_rows: int, first: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yields max_rows rows at a time, fewer if their lists have more than `MAX_VALUES` numbers.

    first: the row group with which reading begins. Lists may be long in only one part of a file.
    """
    groups = range(first, file.num_row_groups)
    types = [file.schema_arrow.field(name).type for name in columns]
    if not any(map(pa.types.is_nested, types)):
        yield from file.iter_batches(max_rows, groups, columns, use_threads=False)
        return
    gathered: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in file.iter_batches(min(LISTS_AT_ONCE, max_rows), groups, columns, use_threads=False):
        while len(batch):
            part = batch.slice(0, max_rows - num_rows)
            batch = batch.slice(len(part))
            gathered.append(part)
            num_rows, num_bytes = num_rows + len(part), num_bytes + part.nbytes
            if num_rows == max_rows or num_bytes > 8 * MAX_VALUES:
                yield _joined(gathered)
                gathered, num_rows, num_bytes = [], 0, 0
    if gathered:
        yield _joined(gathered)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _with_plain_times(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Returns the batch with a column of dates as Unix times in nanoseconds."""
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, name, _plain_times(batch.column(index)))


def _plain_times(column: pa.Array) -> pa.Array:
    """Returns dates as Unix times in nanoseconds, and other values unchanged."""
    if not pa.types.is_timestamp(column.type):
        return column
    return column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())


def _latest_s(file: pq.ParquetFile, group: int, name: str, clock: Clock) -> float | None:
    """Returns the latest time in a row group, in seconds; None if it has no statistics."""
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    if name not in paths:
        return None
    # pyarrow terminates the process for some damaged metadata, unless it detects the damage while reading
    # rows.
    next(file.iter_batches(1, row_groups=[group], columns=[name]), None)
    found = file.metadata.row_group(group).column(paths.index(name)).statistics
    if found is None or not found.has_min_max:
        return None
    latest: Any = found.max
    kind = file.schema_arrow.field(name).type
    if not pa.types.is_timestamp(kind) and type(latest) not in (int, float):
        return None
    times_s = clock.of_column(_plain_times(pa.array([latest], kind)))
    return None if times_s is None else float(times_s[0])


CSV, JSON_LINES, PARQUET = CsvTable(), JsonLines(), ParquetTable()
