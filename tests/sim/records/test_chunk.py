"""The chunks into which tests cut the records of a whole run hold every row once."""

import pandas as pd
import pytest

from sim import simulate
from tests.tables import assert_equal_tables
from tests.worlds.chunks import chunks_of


@pytest.mark.parametrize(
    "overrides",
    [{}, {"speculation": "eagle3"}, {"caching": "contiguous"}],
    ids=["plain", "drafts", "regions"],
)
def test_chunks_hold_every_row_once(overrides):
    records = (
        simulate(model="llama3_1_8b", workload="poisson", workload__num_requests=40, replicas=2, **overrides)
        .run.in_pandas()
        .records
    )
    chunks = chunks_of(records, [records.end_s / 3, records.end_s / 2], group_rows=8)
    assert [chunk.end is None for chunk in chunks] == [True, True, False]
    requests = pd.concat([chunk.requests for chunk in chunks], ignore_index=True)
    assert_equal_tables(requests, records.requests)
    for name, keys in (
        ("iterations", ["replica", "iteration"]),
        ("own_gaps", ["end_s", "request_id"]),
        ("bursts", ["replica", "iteration", "request_id"]),
    ):
        whole = getattr(records, name)
        if whole is not None:
            joined = pd.concat([getattr(chunk, name) for chunk in chunks]).sort_values(
                keys, ignore_index=True
            )
            assert_equal_tables(joined, whole.sort_values(keys, ignore_index=True))
    assert sum(len(chunk.events) for chunk in chunks) == len(records.events)
    assert sum(int(chunk.gap_count.sum()) for chunk in chunks) == records.gap_count.sum()
    if records.unfilled is not None:
        assert sum(len(chunk.unfilled) for chunk in chunks) == len(records.unfilled) > 0
