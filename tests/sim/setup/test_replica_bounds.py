"""Bounds that rule candidates out are true: nothing that is simulated beats them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from hwmodels.iterations import Jitter
from hwmodels.levels import Calibrated
from sim.metrics.slo import Slo
from sim.settings.scenario import build_scenario
from sim.setup.replica_bounds import (
    Demand,
    _deadlines,
    _line_below,
    bounds,
    decode_token_seconds,
    least_limit,
    token_seconds,
)
from sim.workload.listed import listed
from tests.examples import examples

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


@cache
def scenario_of(*overrides):
    return build_scenario(composed(SOURCE, list(overrides)))


SHORT = ("workload=synthetic", "workload.num_requests=60")
WORLDS = {
    "small": ("model=smollm2_135m", "hardware=l4", *SHORT),
    "sglang": ("model=llama3_1_8b", "hardware=l40s", "engine=sglang", *SHORT),
    "few slots": (
        "model=llama3_1_8b", "hardware=h100_sxm", "engine.max_num_seqs=3", "workload=synthetic",
        "workload.num_requests=60",
    ),
    "little memory": (
        "model=llama3_1_8b", "hardware=l4", "workload=synthetic", "workload.num_requests=60",
        "engine.max_num_seqs=32",
    ),
    "pipeline": (
        "model=llama3_1_8b", "hardware=l40s", "pipeline_parallel_size=2", "tensor_parallel_size=2",
        "workload=synthetic", "workload.num_requests=60",
    ),
    "experts": (
        "model=qwen3_30b_a3b", "hardware=h200_sxm", "workload=synthetic", "workload.num_requests=60"
    ),
    "conversation of content": (
        "model=llama3_1_8b", "hardware=h100_sxm", "batching=prefill_first", "caching=paged",
        "workload=synthetic", "workload.num_requests=60",
    ),
}  # fmt: skip


@examples(6, 12)
@given(
    st.sampled_from(sorted(WORLDS)),
    st.integers(0, 50),
    st.sampled_from([0.2, 5, 60]),
    st.sampled_from(
        [(30, None, None), (300, 15, None), (None, 40, None), (None, None, 2000), (500, 50, 9000)]
    ),
    st.sampled_from([0.5, 0.9, 1.0]),
)
@example("pipeline", 0, 0.2, (30, None, None), 0.5)  # chunks of a prompt in two stages at once
def test_nothing_simulated_beats_a_bound(world, seed, load, limits_ms, target):
    ttft_ms, tpot_ms, e2e_ms = limits_ms
    slo = Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms, attainment_target=target)
    scenario = replace(scenario_of(*WORLDS[world]), seed=seed, load=load, slo=slo)
    demand = Demand.of(listed(replace(scenario, load=1.0).source()))
    found = bounds(scenario, demand, slo, load)
    least = max(found.replicas.values())
    for replicas in {1, 3}:
        table = replace(scenario, replicas=replicas).run().in_pandas().requests
        table = table.sort_values("request_id")
        for term in ("ttft", "tpot", "e2e"):
            simulated, idle = table[f"{term}_s"].to_numpy(), getattr(found.idle, f"{term}_s")
            known = ~np.isnan(simulated)
            assert (idle[known] <= simulated[known] * (1 + 1e-9)).all(), term
        share = table["slo_met"].mean()
        assert share <= found.idle.share(slo) + 1e-12
        assert share < target or replicas >= least


def test_with_jitter_nothing_is_ruled_out():
    """Any iteration may be short, so no bound on the latency of a request holds."""
    scenario = scenario_of(*WORLDS["small"])
    noisy = replace(scenario, latency=Calibrated(jitter=Jitter(independent_cv=0.1)))
    slo, demand = Slo(ttft_ms=0.001, tpot_ms=0.001), Demand.of(listed(scenario.source()))
    assert bounds(scenario, demand, slo).idle.share(slo) == 0
    found = bounds(noisy, demand, slo)
    assert found.idle.share(slo) == 1
    assert found.replicas == {"tokens": 1}


def test_a_line_below_touches_the_first_and_stays_below_all():
    counts = np.array([1.0, 2.0, 3.0, 4.0])
    assert _line_below(counts, np.array([3.0, 4.0, 5.0, 8.0])) == (2.0, 1.0)
    alpha, beta = _line_below(counts, np.array([3.0, 3.0, 9.0, 9.0]))
    assert (alpha, beta) == (3.0, 0.0)


class Affine:
    """An engine whose iterations take 10 ms and 1 ms a decode or 0.1 ms a prompt token."""

    def seconds(self, shape):
        return 0.010 + 0.001 * shape.decode_seqs + 0.0001 * shape.prefill_tokens


def test_a_decoded_token_costs_what_the_largest_batch_within_the_limit_makes_it_cost():
    # 30 ms a token: 20 at once, 30 ms / 20 = 1.5 ms each; without a limit 100 at once, 110 / 100 = 1.1 ms.
    assert decode_token_seconds(Affine(), 100, Slo(tpot_ms=30)) == pytest.approx(1.5e-3)
    assert decode_token_seconds(Affine(), 100, Slo(ttft_ms=30)) == pytest.approx(1.1e-3)
    assert decode_token_seconds(Affine(), 5, Slo(tpot_ms=30)) == pytest.approx(3.0e-3)


def test_a_token_costs_no_more_than_in_the_largest_iteration():
    # 16,384 tokens take 1.6484 s, 0.1006 ms each; the grid is 15 % apart.
    assert 0.8 * 1.006e-4 < token_seconds(Affine()) <= 1.006e-4


def test_deadlines_follow_from_the_terms():
    demand = Demand(
        arrival_s=np.array([0.0, 1.0]),
        prompt_tokens=np.array([5.0, 5.0]),
        output_tokens=np.array([1.0, 11.0]),
        reusable=False,
        has_branches=False,
    )
    assert _deadlines(demand, Slo(ttft_ms=500, tpot_ms=100)).tolist() == [0.5, 1.5]
    assert _deadlines(demand, Slo(ttft_ms=500)).tolist() == [0.5, np.inf]
    assert _deadlines(demand, Slo(tpot_ms=100, e2e_ms=700)).tolist() == [0.7, 0.7]


def test_the_least_limit_of_a_share():
    values = np.array([5.0, 1.0, 4.0, 2.0, 3.0, np.nan, 6.0, 7.0, 8.0, 9.0])
    assert least_limit(values, 0.9) == 9.0
    assert least_limit(values, 0.5) == 5.0
    assert least_limit(values, 1.0) == np.inf
