"""A run is shortened if its workload has more requests than asked for and their number is not set."""

import pytest

from experiments.study.request_limit import limiting_override


@pytest.mark.parametrize(
    ("workload", "overrides", "found"),
    [
        ({"num_requests": 2000}, [], "workload.num_requests=1000"),
        ({"max_requests": None}, ["workload=trace"], "workload.max_requests=1000"),
        ({"num_requests": 1000}, [], None),
        ({"num_requests": 2000}, ["++workload.num_requests=2000"], None),
        ({"users": 7}, [], None),
    ],
)
def test_the_override_that_limits_a_run(workload, overrides, found):
    assert limiting_override({"workload": workload}, overrides, 1000) == found


def test_without_a_limit_nothing_is_cut():
    assert limiting_override({"workload": {"num_requests": 2000}}, [], None) is None
