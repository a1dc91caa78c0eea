"""Thinned fleets: what stays of the traffic and of the fleet, and what their intervals say."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench.thinning import checked, random_fleet
from policies.core.request import Prompt, Request, Segment
from sim import simulate
from sim.metrics.thinned import ratio
from sim.report.lines import thinned_lines
from sim.settings.errors import ConfigError
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.chunks import ROWS
from sim.workload.listed import ListedSource
from sim.workload.thinned import ThinnedSource
from tests.examples import examples
from tests.tables import assert_equal_tables

FLEET = ("replicas=64", "workload=poisson", "workload.num_requests=640", "workload.arrivals.rate_per_s=320")


def arrivals(sessions: list[int | None]) -> list[Arrival]:
    return [
        Arrival(
            Request(i, float(i), Prompt(100 + i % 7, (Segment(i % 5, 10),)), session_id=session), 10 + i % 3
        )
        for i, session in enumerate(sessions)
    ]


def source_of(sessions: list[int | None]) -> ListedSource:
    return ListedSource(arrivals(sessions), notes=WorkloadNotes())


@examples(10, 30)
@given(st.integers(2, 20), st.integers(0, 5), st.integers(0, 9))
def test_one_in_n_requests_is_kept(n, seed, blocks):
    source = source_of([None] * (64 * n * blocks))
    kept = list(ThinnedSource(source, n, seed=seed, by_family=False).arrivals())
    full, rest = divmod(64 * n * blocks, ROWS)
    assert abs(len(kept) - 64 * blocks) <= full + bool(rest)  # the last n of a chunk may be incomplete
    assert [one.request.request_id for one in kept] == list(range(len(kept)))
    assert [one.at_s for one in kept] == sorted(one.at_s for one in kept)


@examples(10, 30)
@given(st.lists(st.integers(0, 40), max_size=200), st.integers(2, 6))
def test_sessions_and_families_stay_whole(sessions, n):
    whole = arrivals(list(sessions))
    kept = {
        one.at_s for one in ThinnedSource(source_of(list(sessions)), n, seed=1, by_family=False).arrivals()
    }
    by_session = {}
    for one in whole:
        by_session.setdefault(one.request.session_id, set()).add(one.at_s in kept)
    assert all(len(found) == 1 for found in by_session.values())
    kept = {
        one.at_s for one in ThinnedSource(source_of(list(sessions)), n, seed=1, by_family=True).arrivals()
    }
    by_family = {}
    for one in whole:
        by_family.setdefault(one.request.prompt.segments[0].content_id, set()).add(one.at_s in kept)
    assert all(len(found) == 1 for found in by_family.values())


@pytest.mark.parametrize("first", [-2, 1 << 63, 10**25])
def test_families_of_any_hashes_stay_whole(first):
    """Half of the 96 families are kept, about: groups of 32 families may be cut at the ends."""
    whole = [
        Arrival(Request(i, float(i), Prompt(100, (Segment(first + i % 96, 10),))), 10) for i in range(960)
    ]
    kept = list(
        ThinnedSource(ListedSource(whole, notes=WorkloadNotes()), 2, seed=1, by_family=True).arrivals()
    )
    families = Counter(one.request.prompt.segments[0].content_id for one in kept)
    assert set(families.values()) == {10}
    assert 32 <= len(families) <= 64


def test_the_sample_has_the_lengths_of_the_whole():
    rng = np.random.default_rng(3)
    prompts, outputs = rng.lognormal(6, 1, (2, 64 * 20)).astype(int) + 1
    whole = [
        Arrival(Request(i, float(i), Prompt(int(prompt))), int(output))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    errors = []
    for seed in range(40):
        source = ThinnedSource(ListedSource(whole, notes=WorkloadNotes()), 20, seed=seed, by_family=False)
        kept = list(source.arrivals())
        assert len(kept) == 64
        mean_prompt = np.mean([one.request.prompt.num_tokens for one in kept])
        mean_output = np.mean([one.num_output_tokens for one in kept])
        errors.append((mean_prompt / prompts.mean() - 1, mean_output / outputs.mean() - 1))
    of_prompts, of_outputs = np.sqrt(np.mean(np.square(errors), axis=0))
    # The error of a random sample of 64 values of this distribution is 16 % of the mean.
    assert of_prompts < 0.12
    assert of_outputs < 0.12


def test_the_interval_of_a_ratio_by_hand():
    """Two replicas with the values 1, 3 and 5: r = 3, deviations -2 and 2, h = 12.706 sqrt(2 * 8) / 3."""
    found = ratio(np.array([4.0, 5.0]), np.array([2.0, 1.0]))
    assert found.value == 3
    assert found.high - found.value == pytest.approx(12.7062 * 4 / 3, rel=1e-4)
    assert found.value - found.low == pytest.approx(found.high - found.value)


def test_the_fleet_and_the_traffic_are_divided():
    whole, part = simulate(*FLEET).summary, simulate(*FLEET, "sim.thin=4").summary
    assert "thinned" not in whole
    assert part["requests"]["arrived"] == whole["requests"]["arrived"] // 4
    found = part["thinned"]
    assert (found["keeps_one_in"], found["replicas"], found["of_replicas"]) == (4, 16, 64)
    assert found["unit"] == "request"
    for name in ("ttft", "tpot", "e2e"):
        assert found[name]["mean_s"]["low"] <= whole[name]["mean_s"] <= found[name]["mean_s"]["high"]


def test_a_run_that_streams_has_the_same_intervals(tmp_path):
    whole = simulate(*FLEET, "sim.thin=4").summary["thinned"]
    divided = simulate(*FLEET, "sim.thin=4", stream_to=tmp_path / "one").summary["thinned"]
    for section in ("ttft", "tpot", "e2e", "goodput", "throughput"):
        for key, figure in whole[section].items():
            for side, value in figure.items():
                if value is not None:  # a bound beyond all values, which buckets may just not reach
                    assert divided[section][key][side] == pytest.approx(value, rel=1e-3)
    assert {key: divided[key] for key in ("unit", "replicas", "of_replicas")} == {
        key: whole[key] for key in ("unit", "replicas", "of_replicas")
    }


@pytest.mark.parametrize("workload", ["poisson", "azure_conv_like", "rag"])
def test_a_thinned_run_in_shards_is_that_of_one_process(workload):
    world = (
        "replicas=64",
        "routing=random",
        f"workload={workload}",
        "workload.num_requests=600",
        "sim.thin=4",
    )
    whole, divided = simulate(*world), simulate(*world, "sim.shards=3")
    assert divided.summary == whole.summary
    assert_equal_tables(divided.requests, whole.requests)


def test_no_interval_of_a_share_goes_beyond_all_or_nothing():
    share = simulate(*FLEET, "sim.thin=4").summary["thinned"]["goodput"]["share"]
    assert share["value"] == share["high"] == 1
    assert 0.97 < share["low"] < 0.99


def test_a_part_without_requests_has_no_rates():
    summary = simulate("replicas=64", "workload=poisson", "workload.num_requests=2", "sim.thin=4").summary
    assert summary["requests"]["arrived"] == 0
    assert "requests/s" not in thinned_lines(summary)[-1]


def test_a_part_without_requests_says_so():
    settings = ("replicas=64", "workload=poisson", "workload.num_requests=2", "sim.thin=4")
    assert "nothing is known of the fleet" in thinned_lines(simulate(*settings).summary)[-1]


def test_a_closed_loop_has_fewer_users():
    world = ("workload=closed_loop", "workload.arrivals.num_users=640", "replicas=64")
    part = simulate(*world, "workload.num_requests=2560", "sim.thin=4")
    assert part.requests["session_id"].nunique() == 160
    assert part.summary["requests"]["arrived"] == 640


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sim.thin=0",), "thin=0: must be >= 1"),
        (("sim.thin=5",), "replicas=64: thin must divide the replicas"),
        (
            ("sim.thin=8", "routing=least_outstanding"),
            "leaves 8, and routing=least_outstanding needs at least 16",
        ),
        (("sim.thin=64",), "needs at least 2"),
        (
            ("sim.thin=2", "routing=join_shortest_kv"),
            "sim.thin=2, routing=join_shortest_kv: it picks extremes of all replicas by their signals",
        ),
        (("sim.thin=2", "workload=conversation", "caching=prefix"), "finds the KV of the turn before it"),
        (
            ("sim.thin=2", "scaling=utilisation", "scaling.max_replicas=64"),
            "a scaled fleet cannot be thinned",
        ),
        (("sim.thin=2", "slo=chat", "sim.stop_missed=true"), "the number of requests is not exact"),
        (
            ("sim.thin=3", "workload=closed_loop", "workload.arrivals.num_users=64", "replicas=63"),
            "num_users",
        ),
    ],
)
def test_what_a_part_of_the_fleet_cannot_show_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        simulate("replicas=64", *words)


@pytest.mark.slow
def test_intervals_of_random_fleets_hold():
    draw = random.Random(5)
    held = [
        found["low"] is None or found["high"] is None or found["low"] <= true <= found["high"]
        for _ in range(40)
        for _, true, found in checked(*random_fleet(draw))
    ]
    assert np.mean(held) > 0.9


def test_requests_that_are_made_once_are_not_given_twice():
    thinned = ThinnedSource(source_of([None] * 64), 2, seed=0, by_family=False)
    assert len(list(thinned.arrivals())) == 32
    with pytest.raises(RuntimeError, match=r"have been taken; create the source again"):
        list(thinned.arrivals())
