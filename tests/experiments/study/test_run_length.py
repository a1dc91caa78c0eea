"""The requests that goodput needs follow from the longest latencies, the end of the run and the target."""

from experiments.study.steady_state import requests_needed


def needed(**changes):
    given = {"lasts_s": 100.0, "ends_s": 102.0, "e2e_p90_s": 5.0, "target": 0.9} | changes
    return requests_needed(1000, **given)


def test_a_long_run_needs_no_more():
    assert needed() == {}
    assert needed(target=1.0) == {}
    assert needed(e2e_p90_s=10.0) == {}


def test_each_reason_has_its_number():
    assert needed(e2e_p90_s=20.0) == {"backlog": 2000}
    assert needed(ends_s=110.0) == {"drain": 1900}
    assert needed(target=0.999) == {"share": 10_000}
    assert needed(e2e_p90_s=12.341) == {"backlog": 1300}  # rounded up
    assert needed(e2e_p90_s=20.0, ends_s=110.0).keys() == {"backlog", "drain"}
