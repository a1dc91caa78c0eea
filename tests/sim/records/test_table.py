"""Tables of numpy columns: what they can do is what a frame of pandas does, also in Parquet files."""

from io import BytesIO

import numpy as np
import pandas as pd
import pytest

from sim.records.parquet import arrow_table, of_arrow, parquet_bytes
from sim.records.table import Table, column, joined, places_of, to_pandas
from tests.tables import assert_equal_tables

FRAME = pd.DataFrame(
    {
        "request_id": np.array([3, 1, 7, 2]),
        "replica": np.array([0, 1, 0, -1], np.int32),
        "kept": np.array([0, 255, 3, 1], np.uint8),
        "first_s": [0.5, np.nan, 2.0, np.nan],
        "slo_met": [True, False, True, True],
        "tenant": ["a", "", "\u00e4\u6f22", "a"],
    }
)
EVERY = {str(name): FRAME[name].to_numpy() for name in FRAME}
TABLE = Table(EVERY | {"tenant": FRAME["tenant"].to_numpy(dtype=object)})
MASK = np.array([True, False, True, False])


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table,
        lambda table: table[MASK],
        lambda table: table[1:3],
        lambda table: table[:0],
        lambda table: table[["tenant", "replica"]],
        lambda table: table.take(np.array([2, 0])),
        lambda table: table.assign(first_s=np.arange(4.0), more=np.arange(4)),
    ],
    ids=["whole", "mask", "slice", "none", "names", "places", "assigned"],
)
def test_a_table_does_what_a_frame_does(change):
    mine, theirs = change(TABLE), change(FRAME)
    assert len(mine) == len(theirs)
    assert list(mine) == list(theirs)
    assert ("first_s" in mine) == ("first_s" in theirs)
    assert_equal_tables(mine, theirs.reset_index(drop=True), check_dtype=len(mine) > 0)
    for name in mine:
        np.testing.assert_array_equal(column(mine, name), column(theirs, name))


def test_a_frame_stays_as_it_is():
    assert to_pandas(FRAME) is FRAME


def test_joined_rows_are_those_of_a_concatenated_frame():
    assert_equal_tables(joined([TABLE, FRAME[1:]]), pd.concat([FRAME, FRAME[1:]], ignore_index=True))


def test_a_column_that_only_some_tables_have_is_0_for_the_others():
    both = joined([Table({"a": np.array([1, 2])}), Table({"a": np.array([3]), "b": np.array([4.5])})])
    assert both["a"].tolist() == [1, 2, 3]
    assert both["b"].tolist() == [0, 0, 4.5]


def test_columns_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"must have equal lengths, not {'a': 2, 'b': 1}"):
        Table({"a": np.zeros(2), "b": np.zeros(1)})


def test_a_table_without_columns_has_no_rows():
    assert len(Table({})) == len(Table({})[:0]) == 0


def test_places_of_ids():
    ids = np.array([3, 1, 7, 2])
    assert places_of(ids, np.array([7, 4, 3, 3, 9])).tolist() == [2, -1, 0, 0, -1]
    assert places_of(ids[:0], np.array([1])).tolist() == [-1]


@pytest.mark.parametrize("rows", [slice(None), slice(0, 0), slice(1, 2)], ids=["whole", "none", "nan only"])
def test_a_file_is_read_as_the_one_that_pandas_writes(rows):
    file = BytesIO()
    FRAME[rows].to_parquet(file, index=False)
    mine = pd.read_parquet(BytesIO(parquet_bytes(TABLE[rows], "zstd")))
    assert_equal_tables(mine, pd.read_parquet(file), check_exact=True)


def test_missing_times_are_null_as_pandas_writes_them():
    table = arrow_table(TABLE)
    assert table["first_s"].null_count == 2
    assert table["request_id"].null_count == 0
    assert_equal_tables(of_arrow(table), TABLE, check_exact=True)
