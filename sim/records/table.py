"""Tables of the records of a run: columns of equal length, as numpy arrays.

These tables have a small subset of pandas' interface, so code that reads tables accepts both (`AnyTable`):
the records of a run, which are such tables, and pandas frames from measured runs, notebooks and tests. A run
loads pandas only if a frame is requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    import pandas as pd


class AnyTable(Protocol):
    """The common interface of these tables and pandas frames. A column is read with `column`."""

    @overload
    def __getitem__(self, key: str, /) -> Any: ...

    @overload
    def __getitem__(self, key: slice, /) -> Self: ...

    @overload
    def __getitem__(self, key: list[str] | NDArray[np.bool_], /) -> Self: ...

    def __getitem__(self, key: Any, /) -> Any:
        """Returns the column of a name, or the table with some names (a list) or rows (a mask or a slice)."""
        ...

    def __contains__(self, name: Any, /) -> bool:
        """Returns whether there is a column of this name."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Yields the names of the columns."""
        ...

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def assign(self, **columns: Any) -> Self:
        """Returns the table with added or replaced columns."""
        ...

    def take(self, indices: Any, /) -> Self:
        """Returns the rows of these places, in their order."""
        ...


class Table:
    """Columns of equal length by name; text columns are object arrays.

    Raises ValueError for unequal lengths.
    """

    __slots__ = ("_columns",)

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = dict(columns)
        sizes = {name: len(values) for name, values in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns of a table must have equal lengths, not {sizes}")

    @overload
    def __getitem__(self, key: str, /) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, key: slice, /) -> Table: ...

    @overload
    def __getitem__(self, key: list[str] | NDArray[np.bool_], /) -> Table: ...

    def __getitem__(self, key: Any, /) -> NDArray[Any] | Table:
        """Returns the column of a name, or the table with some names (a list) or rows (a mask or a slice)."""
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, list):
            return Table({name: self._columns[name] for name in key})
        return Table({name: values[key] for name, values in self._columns.items()})

    def __contains__(self, name: object, /) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def assign(self, **columns: NDArray[Any]) -> Table:
        """Returns the table with added or replaced columns."""
        return Table({**self._columns, **columns})

    def take(self, indices: NDArray[np.int64], /) -> Table:
        """Returns the rows of these places, in their order."""
        return Table({name: values[indices] for name, values in self._columns.items()})

    def to_pandas(self) -> pd.DataFrame:
        """Returns the table as a pandas frame (loads pandas); the columns are not copied."""
        import pandas as pd  # noqa: PLC0415 (half a second of a command that needs no frame)

        return pd.DataFrame(self._columns, copy=False)


def column(table: AnyTable, name: str, dtype: DTypeLike | None = None) -> NDArray[Any]:
    """Returns a column as an array, converted if a dtype is given."""
    return np.asarray(table[name], dtype)


def to_pandas(table: AnyTable) -> pd.DataFrame:
    """Returns a table as a pandas frame; a frame is returned unchanged."""
    frame: pd.DataFrame = table.to_pandas() if isinstance(table, Table) else table  # type: ignore[assignment]
    return frame


def joined(tables: Sequence[AnyTable]) -> Table:
    """Returns the rows of all tables, one after the other.

    A column that only some tables have belongs to engines with a feature; it is 0 for the others.
    """
    names = dict.fromkeys(str(name) for table in tables for name in table)
    return Table({name: _joined_column(tables, name) for name in names})


def _joined_column(tables: Sequence[AnyTable], name: str) -> NDArray[Any]:
    dtype = next(column(table, name).dtype for table in tables if name in table)
    return np.concatenate(
        [column(table, name) if name in table else np.zeros(len(table), dtype) for table in tables]
    )


def places_of(ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the position of each wanted id in `ids`, which are unique; -1: not found."""
    order = np.argsort(ids, kind="stable")
    if not len(order):
        return np.full(len(wanted), -1)
    at = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(order) - 1)
    found: NDArray[np.int64] = np.where(ids[order[at]] == wanted, order[at], -1)
    return found


class Gaps(NamedTuple):
    """Gaps between consecutive tokens: value in seconds, number of sequences, time of its end."""

    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.int64]
    gap_end_s: NDArray[np.float64]

    def part(self, first: int, end: int) -> Gaps:
        """Returns the gaps from `first` to end - 1, as a view."""
        return Gaps(self.gap_s[first:end], self.gap_count[first:end], self.gap_end_s[first:end])
