"""Comparison of tables of ours with each other and with frames of pandas."""

import pandas as pd

from sim.records.table import joined, to_pandas


def assert_equal_tables(one, other, **options):
    """Asserts that two tables are equal. options: those of pandas.testing.assert_frame_equal."""
    pd.testing.assert_frame_equal(to_pandas(one), to_pandas(other), **options)


def joined_frame(tables):
    """Returns the rows of all tables, one after the other, as a frame. tables: any iterable."""
    return to_pandas(joined(list(tables)))
