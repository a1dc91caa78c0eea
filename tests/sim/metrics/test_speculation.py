"""Figures of runs that speculate: worked out on paper, conserved in random worlds, against closed forms."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.conformance.speculating import SpeculatingWorld, ToyProposer
from experiments.conformance.toys import ToyModel
from experiments.conformance.worlds import Ask
from hwmodels.speculation import PassFlops, SpeculativeModel
from sim import simulate
from sim.metrics.dialects import MetricsSettings
from sim.metrics.figure import PoolHardware, iteration_shape
from sim.metrics.summary import summarise
from sim.settings.scenario import build_scenario
from sim.speculation.acceptance.by_position import ByPosition
from sim.speculation.acceptance.iid import Iid
from tests.worlds.speculating import draw_speculating

TICK_S = 0.125


class HundredFlopsARow(SpeculativeModel):
    """100 FLOPs a row of the target, 10 a token of the draft."""

    peak_flops_per_s = peak_bytes_per_s = 1e6
    pass_tokens = 0
    stages = None

    def __init__(self):
        pass

    def flops(self, shape):
        return sum(self.flops_by_purpose(shape))

    def bytes_moved(self, shape):
        return 0.0 * shape.decode_seqs

    def flops_by_purpose(self, shape):
        rows = shape.decode_seqs + shape.prefill_tokens
        return PassFlops(100.0 * rows, 100.0 * shape.drafts.tokens, 10.0 * shape.drafts.drafted)


def summary_of(run, model=None, **metrics):
    pools = [PoolHardware(model=model or ToyModel(flat=True), price_usd_per_hour=3600.0)]
    return summarise(run.records, pools=pools, slo=None, metrics=MetricsSettings(**metrics))


def run_of_ten_tokens(**settings):
    """Simulates 10 tokens with 3 drafts that are always right: the first at 1 tick, then 4, 4 and 1."""
    return SpeculatingWorld(asks=(Ask(0.0, 4, 10),), acceptance=Iid(rate=1.0), **settings).simulate()


def test_acceptance_of_a_run_of_ten_tokens():
    use = summary_of(run_of_ten_tokens())["speculation"]
    assert use["drafts"] == 3
    assert (use["draft_tokens"], use["accepted_tokens"], use["kept_tokens"]) == (9, 9, 6)
    assert use["acceptance_rate"] == 1.0
    assert use["mean_accepted_length"] == 4.0
    assert use["tokens_per_pass"] == 3.0  # the last pass brought one token, as the answer ended there
    assert use["wasted_tokens"] == {"rejected": 0, "discarded": 3, "unused": 3}
    assert [place["accepted"] for place in use["by_place"]] == [3, 3, 3]


def test_a_pass_of_an_answer_that_has_ended_is_no_draft():
    """An asynchronous engine computes one pass more, which is in no figure of acceptance."""
    use = summary_of(run_of_ten_tokens(plans_ahead=True))["speculation"]
    assert (use["drafts"], use["accepted_tokens"]) == (3, 9)
    assert [place["drafted"] for place in use["by_place"]] == [3, 3, 3]


def test_every_output_token_has_a_price_and_counts_in_throughput():
    summary = summary_of(run_of_ten_tokens())
    assert summary["throughput"]["output_tokens_per_s"] == 10 / (4 * TICK_S)
    assert summary["cost"]["usd_per_million_output_tokens"] == pytest.approx(4 * TICK_S / 10 * 1e6)
    assert summary["itl"]["count"] == 3  # one per burst
    assert summary["tpot"]["mean_s"] == pytest.approx(3 * TICK_S / 9)
    assert summary["iterations"]["mean_batch_tokens"] == (4 + 4 + 4 + 4) / 4


def test_tokens_count_in_the_window_in_which_they_come():
    """Of the bursts at 2, 3 and 4 ticks, those of 4 and 1 tokens are after a warm-up of 2.5 ticks."""
    summary = summary_of(run_of_ten_tokens(), warmup_s=2.5 * TICK_S)
    assert summary["throughput"]["output_tokens_per_s"] == 5 / (1.5 * TICK_S)
    assert summary["speculation"]["kept_tokens"] == 3


def test_flops_in_vain():
    """13 rows of tokens that were needed, of 9 draft rows 6 kept, and 12 draft tokens at 10 FLOPs."""
    flops = summary_of(run_of_ten_tokens(), HundredFlopsARow())["speculation"]["flops"]
    needed = 100 * (4 + 3 + 6)
    assert flops["tokens"] == pytest.approx(needed)
    assert flops["rejected_rows"] == pytest.approx(100 * 3)
    assert flops["drafting"] == pytest.approx(10 * 12)
    assert flops["wasted_share"] == pytest.approx(420 / (needed + 420))


def test_rates_by_place_are_those_of_the_model():
    """Conditional rates of 0.9, 0.5 and 0.2 are rates of 0.9, 0.45 and 0.09 of all passes."""
    world = SpeculatingWorld(
        asks=(Ask(0.0, 4, 40_001),),
        acceptance=ByPosition(rates=(0.9, 0.5, 0.2)),
        max_model_len=50_000,
        num_blocks=20_000,
    )
    use = summary_of(world.simulate())["speculation"]
    places = use["by_place"]
    assert [place["conditional_rate"] for place in places] == pytest.approx([0.9, 0.5, 0.2], rel=0.03)
    assert [place["rate"] for place in places] == pytest.approx([0.9, 0.45, 0.09], rel=0.03)
    assert use["mean_accepted_length"] == pytest.approx(1 + sum(place["rate"] for place in places))


def test_a_run_without_speculation_has_no_figures_of_it():
    run = simulate(workload="poisson", workload__num_requests=3)
    assert "speculation" not in run.summary
    assert run.run.records.speculation is None
    assert not {"draft_tokens", "kept_tokens"} & set(run.iterations)


@pytest.mark.parametrize(("rate", "num_drafts"), [(0.8, 4), (0.6, 3)])
def test_accepted_lengths_follow_the_truncated_geometric(rate, num_drafts):
    """Leviathan et al.: j < K drafts are accepted with probability a^j (1 - a), all K with a^K."""
    world = SpeculatingWorld(
        asks=tuple(Ask(0.1 * i, 4 + i % 5, 300 + 7 * i) for i in range(40)),
        acceptance=Iid(rate=rate),
        proposer=ToyProposer(num_speculative_tokens=num_drafts),
        num_blocks=400,
    )
    run = world.simulate()
    acceptance = run.records.speculation.acceptance
    at_least = [int(acceptance["drafted"].iloc[0]), *acceptance["accepted"].tolist(), 0]
    counts = -np.diff(at_least)
    shares = [rate**j * (1 - rate) for j in range(num_drafts)] + [rate**num_drafts]
    assert counts.sum() > 3000
    assert stats.chisquare(counts, counts.sum() * np.array(shares)).pvalue > 0.01


@given(data=st.data())
def test_all_output_tokens_are_counted(data, worlds):
    run = data.draw(draw_speculating(worlds)).simulate()
    summary, requests = summary_of(run), run.records.requests
    tokens_per_s = summary["throughput"]["output_tokens_per_s"]
    num_tokens = int(requests["output_tokens"].sum())
    if run.records.end_s and not run.records.num_lost_first_tokens:
        assert tokens_per_s * run.records.end_s == pytest.approx(num_tokens)
    use, table = summary["speculation"], run.records.iterations
    places = use["by_place"]
    assert use["accepted_tokens"] == sum(place["accepted"] for place in places)
    assert use["draft_tokens"] == use["accepted_tokens"] + use["wasted_tokens"]["rejected"]
    assert use["kept_tokens"] == int(run.records.speculation.bursts["kept_tokens"].sum())
    made = int(table["proposed_tokens"].sum())
    assert made == use["draft_tokens"] + use["wasted_tokens"]["unused"]
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize("speculation", ["eagle3", "draft_model", "ngram", "lookahead", "medusa"])
def test_the_table_of_iterations_has_what_their_prices_depend_on(speculation):
    run = simulate(workload="poisson", workload__num_requests=12, speculation=speculation).run.in_pandas()
    (model,), table = run.models, run.records.iterations
    seconds = model.seconds(iteration_shape(table, model))
    assert seconds == pytest.approx(table["duration_s"].to_numpy(), rel=1e-6)
    assert 0 < run.summary["speculation"]["flops"]["wasted_share"] < 1


def test_pools_may_speculate_or_not():
    """Checks a decode pool with n-grams beside a prefill pool without drafts, whose prices have no draft."""
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    settings = ("workload=poisson", "workload.num_requests=12", "pools=disaggregated", "network=infiniband")
    drafts = ("pools.decode.speculation=ngram", "failures=random_crashes", "metrics.dialect=vllm_bench")
    result = build_scenario(source.compose([*settings, *drafts])).run()
    use = result.summary["speculation"]
    assert use["by_place_and_pool"]["prefill"] == []
    assert use["by_place_and_pool"]["decode"] == use["by_place"]
    assert use["kept_tokens"] > 0
    assert result.records.speculation.acceptance["pool"].tolist() == [1] * len(use["by_place"])
    answered = result.summary["dialects"]["vllm_bench"]["gap"]
    assert answered["mean_s"] > 0  # the time of every token was found
