"""The requests of shards, merged range after range."""

from io import BytesIO

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from sim.shards.request_windows import merged_groups, windowed_bytes

GROUP = 4


def table(ids):
    return pd.DataFrame(
        {"request_id": ids, "arrival_s": np.array(ids) / 3, "tenant": [f"t{i % 3}" for i in ids]}
    )


@given(owners=st.lists(st.integers(-1, 3), min_size=1, max_size=120))
def test_merged_groups_are_the_requests_by_id(owners):
    """owners: the shard of each request; -1: it has not arrived."""
    files = [
        BytesIO(windowed_bytes(table([i for i, own in enumerate(owners) if own == shard]), GROUP))
        for shard in range(4)
    ]
    whole = table([i for i, own in enumerate(owners) if own >= 0])
    groups = list(merged_groups(files, GROUP))
    for group in groups:
        assert group["request_id"].iloc[0] // GROUP == group["request_id"].iloc[-1] // GROUP
    if groups:
        pd.testing.assert_frame_equal(pd.concat(groups, ignore_index=True), whole, check_exact=True)
    else:
        assert whole.empty
