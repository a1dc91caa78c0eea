"""Splitwise's cluster designs: equal budgets, nine percentiles, and iterations priced as in the paper."""

from itertools import accumulate

import numpy as np
import pandas as pd
import pytest

from experiments.papers.splitwise import (
    A100,
    BUDGETS,
    H100,
    Design,
    Trial,
    best_split,
    failing,
    holds,
    slowdowns,
    write_requests,
)
from experiments.papers.splitwise_prices import AS_SIMULATED, AS_TIMED, PROMPT_TOKENS, TIMES, TimedModel
from hwmodels.iterations import IterationShape

LENGTHS = pd.DataFrame({"ContextTokens": [100, 200], "GeneratedTokens": [3, 5]})


def timed(*, by_batch, device="A100 80GB SXM"):
    return TimedModel(TIMES[device], base=None, by_batch=by_batch)


def decodes(num_seqs):
    return IterationShape(num_seqs, 600 * num_seqs, 0, 0, 0, 0, num_seqs)


def prompts(num_tokens, num_decodes=0):
    return IterationShape(num_decodes, 0, 1, num_tokens, 0, num_tokens, 1 + num_decodes)


@pytest.mark.parametrize(("budget", "figure"), [("power", "power"), ("cost", "cost")])
def test_no_design_has_more_than_the_baseline_on_h100(budget, figure):
    """Equal power or equal cost, except for the rounding to whole machines: a tenth."""
    designs = {design.name: getattr(design, figure) for design in BUDGETS[budget]}
    limit = designs["Baseline-H100"]
    for name, used in designs.items():
        assert 0.85 * limit <= used <= 1.02 * limit, name


def test_a_cap_counts_in_the_power_of_machines_for_tokens_alone():
    """Five at 1.75 and four at 0.7 of that."""
    capped = Design("Splitwise-HHcap", H100, 5, H100, 4, is_capped=True)
    assert capped.power == pytest.approx(5 * 1.75 + 4 * 1.75 * 0.7)
    assert capped.cost == 9 * 38


def requests(ttft_s=1.0, tpot_s=0.1, e2e_s=10.0, num=100):
    return pd.DataFrame({"ttft_s": [ttft_s] * num, "tpot_s": [tpot_s] * num, "e2e_s": [e2e_s] * num})


def test_as_fast_as_alone_holds():
    assert holds(slowdowns(requests(), requests()))


@pytest.mark.parametrize(
    ("slowed", "num_slowed", "failed"),
    [
        ({"ttft_s": 2.1}, 60, "ttft p50 2.10"),
        ({"ttft_s": 3.1}, 15, "ttft p90 3.10"),
        ({"ttft_s": 6.1}, 3, "ttft p99 6.10"),
        ({"tpot_s": 0.126}, 60, "tpot p50 1.26"),
        ({"tpot_s": 0.51}, 3, "tpot p99 5.10"),
        ({"e2e_s": 15.1}, 15, "e2e p90 1.51"),
    ],
)
def test_each_term_fails_by_itself(slowed, num_slowed, failed):
    mixed = pd.concat([requests(**slowed, num=num_slowed), requests(num=100 - num_slowed)])
    found = slowdowns(mixed, requests())
    assert not holds(found)
    assert failing(found) == failed


def test_answers_of_one_token_do_not_count_between_tokens():
    one = requests(tpot_s=np.nan, num=50)
    assert holds(slowdowns(pd.concat([one, requests(num=50)]), pd.concat([one, requests(num=50)])))


def test_seeds_draw_lengths_of_the_trace_and_gaps_of_a_second(tmp_path):
    for seed in (0, 1):
        write_requests(tmp_path / f"{seed}.csv", LENGTHS, 2000, seed)
    first, second = (pd.read_csv(tmp_path / f"{seed}.csv") for seed in (0, 1))
    assert first["arrival_s"].diff().mean() == pytest.approx(1, rel=0.1)
    assert set(first["prompt_tokens"]) == {100, 200}
    assert set(first["output_tokens"]) == {3, 5}
    assert not first.equals(second)


@pytest.mark.parametrize(
    ("design", "found"),
    [
        (Design("Splitwise-AA", A100, 9, A100, 5), (4, 10)),
        (Design("Splitwise-HA", H100, 6, A100, 3), (4, 7)),
        (Design("Splitwise-HHcap", H100, 6, H100, 2, is_capped=True), (4, 5)),
    ],
)
def test_a_better_split_is_found_a_machine_at_a_time(design, found):
    """Four for prompts serve most; what 14 DGX-A100 draw beyond them is for tokens."""
    best, served = best_split(design, lambda tried: -abs(tried.num_prompt - 4), "power")
    assert (best.num_prompt, best.num_token, served) == (*found, 0)


def test_a_split_leaves_both_phases_a_machine():
    """This holds however strong the demand for prompts is."""
    best, _ = best_split(
        Design("Splitwise-HH", H100, 5, H100, 3), lambda tried: float(tried.num_prompt), "cost"
    )
    assert (best.num_prompt, best.num_token) == (7, 1)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 48.8), (48, (65.4 + 96.6) / 2), (96, 96.6 + 31.2)])
def test_decodes_as_timed_cost_by_the_batch(batch, milliseconds):
    """Halfway between 32 and 64, and as far beyond 64."""
    assert float(timed(by_batch=True).seconds(decodes(batch))) == pytest.approx(milliseconds / 1e3)


@pytest.mark.parametrize("batch", [1, 64, 500])
def test_decodes_as_simulated_cost_the_same_in_any_batch(batch):
    assert float(timed(by_batch=False).seconds(decodes(batch))) == pytest.approx(0.0488)


def test_prompts_cost_by_their_tokens_and_a_tenth_more_beside_decodes():
    model = timed(by_batch=True)
    assert float(model.seconds(prompts(1536))) == pytest.approx((287.5 + 536.1) / 2e3)
    assert float(model.seconds(prompts(1024 - 24, 24))) == pytest.approx(1.1 * 0.2875)


@pytest.mark.parametrize("by_batch", [True, False])
def test_many_decodes_are_priced_as_each_alone(by_batch):
    """Prices are equal to the last bit, as leaps need it."""
    model = timed(by_batch=by_batch)
    shape = decodes(7)._replace(decode_context_tokens=4200 + 7 * np.arange(5))
    steps = np.asarray(model.seconds(shape)).tolist()
    assert list(accumulate(steps)) == model.decode_ends(0.0, 7, 4200, 5)


def test_times_are_of_every_point():
    for times in TIMES.values():
        assert len(times.prompts) == len(PROMPT_TOKENS)
        assert sorted(times.prompts) == list(times.prompts)
        assert sorted(times.decodes) == list(times.decodes)


@pytest.mark.slow
def test_machines_for_tokens_serve_more_where_a_batch_costs_as_much_as_one(tmp_path):
    """The paper's figure depends on this: two machines, decodes priced by the batch's size or not."""
    lengths = pd.DataFrame({"ContextTokens": [1000], "GeneratedTokens": [200]})
    write_requests(tmp_path / "requests.csv", lengths, 2000, 0)
    apart = Design("Splitwise-AA", A100, 1, A100, 1)
    model = ["model=llama2_70b"]
    timed_rate, simulated_rate = (
        Trial(tmp_path / "requests.csv", 30.0, prices, model).rate(apart, start=2.0)
        for prices in (AS_TIMED, AS_SIMULATED)
    )
    assert simulated_rate > timed_rate
