"""Histograms of many equal values at once."""

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from experiments.serve.metrics.engine import Histogram
from experiments.serve.metrics.table import TOKEN_GAP_S, request_tokens

observations = st.lists(
    st.tuples(
        st.one_of(st.floats(0, 100), st.sampled_from(TOKEN_GAP_S)), st.integers(min_value=1, max_value=5)
    ),
    max_size=20,
)


@given(observations)
def test_histogram_matches_reference(values):
    ours = Histogram(TOKEN_GAP_S)
    theirs = TheirHistogram("x", "x", buckets=TOKEN_GAP_S, registry=CollectorRegistry())
    for value, count in values:
        ours.observe(value, count)
        for _ in range(count):
            theirs.observe(value)
    (family,) = theirs.collect()
    expected = {sample.labels["le"]: sample.value for sample in family.samples if sample.labels}
    assert dict(ours.buckets()) == expected
    assert ours.sum == pytest.approx(next(s.value for s in family.samples if s.name == "x_sum"))
    assert ours.count == expected["+Inf"]


@pytest.mark.parametrize(
    ("max_model_len", "bounds"), [(1, [1]), (9, [1, 2, 5]), (100, [1, 2, 5, 10, 20, 50, 100])]
)
def test_bounds_of_token_counts(max_model_len, bounds):
    assert list(request_tokens(max_model_len)) == bounds
