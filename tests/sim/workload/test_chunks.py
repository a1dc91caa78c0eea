"""Requests as columns: the same requests as objects, parts of them, and constant memory for many."""

import pickle
import tracemalloc

import numpy as np
import pytest

from policies.core.request import Segment
from sim.workload.arrivals import AllAtOnce, Constant, Diurnal, Poisson
from sim.workload.base import Answers, WorkloadNotes
from sim.workload.chunks import ROWS, PartOfSource, TableSource, arrivals_of, chunks_of
from sim.workload.distributions import Exponential, Lengths, Lognormal, stream
from sim.workload.modified import WithCallers, faster
from sim.workload.synthetic import Synthetic

LENGTHS = Lengths(
    prompt_tokens=Lognormal(mean=100, cv=1.0), output_tokens=Exponential(mean=50), rank_correlation=0.4
)

DUE = {"priority_shares": (0.5, 0.5), "deadlines_s": (3.3, None)}


def make_synthetic(**settings):
    given = {"arrivals": Poisson(rate_per_s=2.0), "lengths": LENGTHS, "num_requests": 10_000}
    return Synthetic(**(given | settings))


def source_of(workload):
    return workload.source(seed=3, max_model_len=512)


def make_table(num=9_000):
    return TableSource(
        arrival_s=np.arange(num) / 7,
        prompt_tokens=np.arange(num) % 50 + 20,
        output_tokens=np.arange(num) % 5 + 3,
        notes=WorkloadNotes(),
        priorities=np.arange(num) % 3,
        deadlines_s=(None, 5.0, 9.0),
        segments=lambda row, num_tokens: (Segment(row % 2, 16), Segment(10 + row, num_tokens - 16)),
        tenants=np.array([f"t{i % 4}" for i in range(num)], object),
        session_ids=np.arange(num) // 3 - 1,
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: source_of(make_synthetic()),
        lambda: source_of(make_synthetic(max_tokens="exact", priority_shares=(0.5, 0.5))),
        lambda: source_of(make_synthetic(branching=Answers(width=3))),
        lambda: source_of(make_synthetic(arrivals=AllAtOnce())),
        lambda: source_of(WithCallers(of=make_synthetic(), tenants={"a": 1.0, "b": 2.0}, models={"m": 1.0})),
        make_table,
        lambda: faster(make_table(), 1.7),
        lambda: faster(source_of(make_synthetic(priority_shares=(0.5, 0.5), deadlines_s=(3.3, None))), 0.3),
        lambda: faster(source_of(WithCallers(of=make_synthetic(), tenants={"a": 1.0})), 3.0),
    ],
    ids=["plain", "exact", "samples", "batch", "callers", "table", "faster", "deadlines", "objects"],
)
def test_the_parts_of_a_source_are_together_its_requests(make):
    whole = list(make().arrivals())
    assert list(arrivals_of(chunks_of(make()))) == whole
    parts = [list(PartOfSource(make(), lambda c, k=k: c.request_id % 3 == k).arrivals()) for k in range(3)]
    assert [len(part) for part in parts] == [len(whole[k::3]) for k in range(3)]
    assert parts == [whole[k::3] for k in range(3)]


def test_the_columns_are_those_of_the_requests():
    source = make_table()
    rows = [
        (c.request_id, c.at_s, c.prompt_tokens, c.output_tokens, c.tenant, c.session_id)
        for c in source.chunks()
    ]
    columns = [np.concatenate(column).tolist() for column in zip(*rows, strict=True)]
    for arrival, row in zip(source.arrivals(), zip(*columns, strict=True), strict=True):
        request = arrival.request
        session = -1 if request.session_id is None else request.session_id
        assert row == (
            request.request_id,
            arrival.at_s,
            request.prompt.num_tokens,
            arrival.num_output_tokens,
            request.tenant,
            session,
        )


def test_tenants_of_other_sources_are_columns_too():
    workload = WithCallers(of=make_synthetic(num_requests=300), tenants={"a": 1.0, "b": 2.0})
    of_a = PartOfSource(source_of(workload), lambda chunk: chunk.tenant == "a")
    wanted = [a for a in source_of(workload).arrivals() if a.request.tenant == "a"]
    assert 0 < len(wanted) < 300
    assert list(of_a.arrivals()) == wanted


def test_chunks_draw_what_one_array_would_hold():
    """The streams of arrivals and lengths are drawn at once here."""
    workload = make_synthetic(priority_shares=(0.25, 0.75))
    times_s = workload.arrivals.times_s(stream(3, "arrivals"), num_requests=10_000, duration_s=None)
    z_N2 = stream(3, "lengths").standard_normal((10_000, 2))
    prompts, outputs, clipped = workload.tokens_of(z_N2, 512)
    priorities = np.searchsorted([0.25], stream(3, "priorities").random(10_000), side="right")
    source = source_of(workload)
    chunks = list(source.chunks())
    assert len(chunks) > 1
    for name, wanted in [
        ("at_s", times_s),
        ("prompt_tokens", prompts),
        ("output_tokens", outputs),
        ("priority", priorities),
    ]:
        assert np.array_equal(np.concatenate([getattr(chunk, name) for chunk in chunks]), wanted), name
    assert source.notes.num_clipped == np.count_nonzero(clipped) > 0
    assert (source.num_requests, source.last_arrival_s) == (10_000, times_s[-1])


@pytest.mark.parametrize(
    "arrivals",
    [Constant(rate_per_s=3.0), Diurnal(mean_rate_per_s=5.0, peak_to_trough_ratio=9.0, period_s=99.0)],
)
def test_both_limits_end_the_chunks(arrivals):
    for num_requests, duration_s in ((9_000, 1000.0), (9_000, None), (None, 3000.0)):
        whole = arrivals.times_s(stream(0, "arrivals"), num_requests=num_requests, duration_s=duration_s)
        chunks = list(
            arrivals.chunks_s(stream(0, "arrivals"), num_requests=num_requests, duration_s=duration_s)
        )
        assert max(map(len, chunks)) <= ROWS
        assert np.concatenate(chunks).tolist() == whole.tolist()
        assert len(whole) <= (num_requests or 1e9)
        assert whole[-1] < (duration_s or 1e9)


def test_a_source_can_be_sent_to_another_process():
    source = source_of(make_synthetic())
    sent = pickle.loads(pickle.dumps(source))  # as multiprocessing does
    assert list(sent.arrivals()) == list(source.arrivals())


def test_the_memory_of_synthetic_traffic_does_not_grow_with_its_requests():
    def peak_bytes(num_requests):
        tracemalloc.start()
        source = source_of(make_synthetic(num_requests=num_requests))
        assert sum(len(chunk) for chunk in source.chunks()) == num_requests
        assert source.notes.num_clipped
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few, many = peak_bytes(20_000), peak_bytes(160_000)
    assert many < 1.2 * few
