"""The requests of shards, merged range after range."""

from io import BytesIO
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim.shards.request_rows
from sim.shards.request_rows import merged_groups, rows_bytes
from sim.shards.shard_file import ShardMember
from tests.tables import assert_equal_tables, joined_frame

GROUP = 4


def table(ids):
    return pd.DataFrame(
        {"request_id": ids, "arrival_s": np.array(ids) / 3, "tenant": [f"t{i % 3}" for i in ids]}
    )


def shard_of(ids):
    """Returns the requests of a shard as a member of its file."""
    file = BytesIO()
    with ZipFile(file, "w") as archive:
        archive.writestr("rows", rows_bytes(table(ids), GROUP))
    return ShardMember(file, "rows")


@given(owners=st.lists(st.integers(-1, 3), min_size=1, max_size=120), max_open=st.integers(1, 5))
def test_merged_groups_are_the_requests_by_id(owners, max_open):
    """owners: the shard of each request; -1: it has not arrived."""
    files = [shard_of([i for i, own in enumerate(owners) if own == shard]) for shard in range(4)]
    whole = table([i for i, own in enumerate(owners) if own >= 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.shards.open_files, "MAX_OPEN", max_open)
        groups = list(merged_groups(files, GROUP))
    for group in groups:
        assert group["request_id"][0] // GROUP == group["request_id"][-1] // GROUP
    if groups:
        assert_equal_tables(joined_frame(groups), whole, check_exact=True)
    else:
        assert whole.empty
