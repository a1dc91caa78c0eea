"""Distributions and lengths: samples follow their definition, and pairs are correlated as asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sim.workload.distributions import (
    Exponential,
    Fixed,
    Geometric,
    Lengths,
    Lognormal,
    Quantiles,
    Uniform,
    clip_to_context,
    normal_cdf,
    whole_numbers,
)

INF, NAN = float("inf"), float("nan")
Z = np.random.default_rng(1).standard_normal(40_000)
EVERY = [
    Fixed(value=3),
    Uniform(low=2, high=9),
    Exponential(mean=4.0),
    Lognormal(mean=1000, cv=1.0),
    Geometric(mean=3.0),
    Quantiles(probabilities=(0, 0.2, 1), values=(1, 50, 60)),
]


def assert_mean_is(samples, expected, *, max_rel_half_width=0.03):
    half_width = stats.t.ppf(0.995, len(samples) - 1) * stats.sem(samples)
    assert half_width <= max_rel_half_width * abs(expected), f"too few samples: +-{half_width:.2g}"
    assert abs(np.mean(samples) - expected) <= half_width, f"{np.mean(samples):.4g}, expected {expected:.4g}"


def test_normal_cdf_matches_scipy_into_the_tails():
    z = np.array([[-9.0, -3.0, 0.0], [0.5, 3.0, 9.0]])
    np.testing.assert_allclose(normal_cdf(z), stats.norm.cdf(z), rtol=1e-12)


@pytest.mark.parametrize("distribution", EVERY, ids=lambda d: type(d).__name__)
def test_every_distribution_rises_with_its_score_and_keeps_the_shape(distribution):
    samples = distribution.from_normal(np.linspace(-4, 4, 100).reshape(20, 5))
    assert samples.shape == (20, 5)
    assert (np.diff(samples.ravel()) >= 0).all()


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        (Uniform(low=2, high=9), 5.5),
        (Exponential(mean=4.0), 4.0),
        (Lognormal(mean=1000, cv=1.0), 1000),
        (Geometric(mean=3.0), 3.0),
        (Quantiles(probabilities=(0, 0.2, 1), values=(1, 50, 60)), 0.2 * 25.5 + 0.8 * 55),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mean_matches_theory(distribution, mean):
    assert_mean_is(distribution.from_normal(Z), mean)


def test_uniform_gives_each_whole_number_equally_often():
    counts = np.bincount(Uniform(low=3, high=6).from_normal(Z).astype(int))
    assert counts[:3].sum() == 0
    assert stats.chisquare(counts[3:]).pvalue > 0.01


def test_lognormal_has_the_cv_and_median_of_its_docstring():
    samples = Lognormal(mean=1000, cv=1.0).from_normal(Z)
    assert np.std(samples) / np.mean(samples) == pytest.approx(1.0, rel=0.1)
    assert Lognormal(mean=1000, cv=1.0).from_normal(np.zeros(1))[0] == pytest.approx(707.1, rel=1e-4)
    assert Lognormal(mean=1000, cv=1.0).from_normal(np.array([2.326]))[0] == pytest.approx(4907, rel=1e-3)


def test_geometric_goes_on_with_probability_one_minus_one_over_mean():
    turns = Geometric(mean=3.0).from_normal(Z)
    assert_mean_is(turns[turns > 2] > 3, 2 / 3)
    assert set(Geometric(mean=1.0).from_normal(Z)) == {1.0}


def test_quantiles_are_linear_between_their_points():
    distribution = Quantiles(probabilities=[0, 0.5, 1], values=[0, 100, 200])
    assert distribution.from_normal(stats.norm.ppf([0.25, 0.5, 0.9])) == pytest.approx([50, 100, 180])


@pytest.mark.parametrize("rho", [-0.9, 0.0, 0.5, 1.0])
def test_lengths_have_the_rank_correlation_asked_for(rho):
    marginal = Lognormal(mean=5000, cv=1.0)
    lengths = Lengths(prompt_tokens=marginal, output_tokens=marginal, rank_correlation=rho)
    prompts, outputs = lengths.from_normal(Z.reshape(-1, 2))
    half_width = 2.576 * (1 - rho**2 + 0.02) / np.sqrt(len(prompts))
    assert stats.spearmanr(prompts, outputs).statistic == pytest.approx(rho, abs=half_width + 1e-9)


def test_whole_numbers_are_at_least_one():
    assert whole_numbers(Fixed(value=0.2), np.zeros(2)).tolist() == [1, 1]
    assert whole_numbers(Fixed(value=2.6), np.zeros(1)).tolist() == [3]


def test_whole_numbers_of_the_heaviest_tail_stay_at_the_maximum():
    heavy = Lognormal(mean=1e9, cv=1000)
    assert whole_numbers(heavy, np.array([-8.0, 8.0])).tolist() == [1, 1_000_000_000]
    assert whole_numbers(heavy, np.array([8.0]), maximum=7).tolist() == [7]


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        (Fixed(value=0), "value=0: must be >= 1 and <= 1,000,000,000 tokens"),
        (Fixed(value=0.2), "value=0.2: must be >= 1"),
        (Fixed(value=1e300), r"value=1e\+300: must be >= 1 and <= 1,000,000,000 tokens"),
        (Uniform(low=0, high=9), "low=0: must be >= 1"),
        (Uniform(low=1, high=2_000_000_000), "high=2000000000: must be"),
        (Exponential(mean=0.5), "mean=0.5: must be >= 1"),
        (Lognormal(mean=1e300, cv=1), r"mean=1e\+300: must be"),
        (Geometric(mean=1e300), r"mean=1e\+300: must be"),
        (Quantiles(probabilities=(0, 1), values=(0, 5)), r"values\[0\]=0: must be >= 1"),
        (Quantiles(probabilities=(0, 1), values=(1, 1e10)), r"values\[-1\]=10000000000: must be"),
    ],
)
@pytest.mark.parametrize("which", ["prompt_tokens", "output_tokens"])
def test_rejects_lengths_below_one_token_or_beyond_reason(which, distribution, message):
    both = {"prompt_tokens": Fixed(value=1), "output_tokens": Fixed(value=1e9), which: distribution}
    with pytest.raises(ValueError, match=rf"^{which}\.{message}"):
        Lengths(**both)


def test_clipping_cuts_the_prompt_first_and_then_the_output():
    prompts, outputs, clipped = clip_to_context(np.array([5, 90, 90, 3]), np.array([5, 20, 150, 97]), 100)
    assert prompts.tolist() == [5, 80, 1, 3]
    assert outputs.tolist() == [5, 20, 99, 97]
    assert clipped.tolist() == [False, True, True, False]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=20),
    st.integers(2, 300),
)
def test_clipped_requests_fit_and_the_others_are_untouched(pairs, max_model_len):
    before = np.array(pairs)
    prompts, outputs, clipped = clip_to_context(before[:, 0], before[:, 1], max_model_len)
    assert (prompts + outputs <= max_model_len).all()
    assert min(prompts.min(), outputs.min()) >= 1
    changed = (prompts != before[:, 0]) | (outputs != before[:, 1])
    assert changed.tolist() == clipped.tolist()


def test_clipping_rejects_a_context_without_room_for_one_output_token():
    with pytest.raises(ValueError, match="max_model_len=1: must be >= 2 tokens"):
        clip_to_context(np.array([1]), np.array([1]), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(value=-1), "value=-1: must be finite and >= 0"),
        (lambda: Uniform(low=5, high=4), "high=4: must be >= low=5"),
        (lambda: Exponential(mean=0), "mean=0: must be finite and > 0"),
        (lambda: Lognormal(mean=float("inf"), cv=1), "mean=inf: must be finite"),
        (lambda: Lognormal(mean=1, cv=float("nan")), "cv=nan: must be finite"),
        (lambda: Geometric(mean=0.5), "mean=0.5: must be finite and >= 1"),
        (lambda: Quantiles(probabilities=(0, 1), values=(1, 2, 3)), "values: 3 numbers for 2 probabilities"),
        (lambda: Quantiles(probabilities=(0, 0.9), values=(1, 2)), "must increase from 0 to 1"),
        (lambda: Quantiles(probabilities=(0, 1), values=(2, 1)), "must be finite, >= 0 and not decreasing"),
        (lambda: Quantiles(probabilities=(0, 1), values=(2, INF)), "must be finite, >= 0 and not decreasing"),
        (lambda: Quantiles(probabilities=(0, 1), values=(2, NAN)), "must be finite, >= 0 and not decreasing"),
        (lambda: Quantiles(probabilities=(0, NAN, 1), values=(1, 2, 3)), "must increase from 0 to 1"),
        (lambda: Uniform(low=0, high=INF), "high=inf: must be finite"),
        (lambda: Lognormal(mean=1, cv=1e200), r"cv=1e\+200: must be <= 1000"),
        (
            lambda: Lengths(prompt_tokens=EVERY[0], output_tokens=EVERY[0], rank_correlation=2),
            "rank_correlation=2: must be between -1 and 1",
        ),
    ],
)
def test_rejects_settings_that_describe_no_distribution(make, message):
    with pytest.raises(ValueError, match=message):
        make()
