"""Traffic like ServeGen's: its published figures come out of the traffic that is made."""

from collections import Counter

import numpy as np
import pytest

from sim.workload.distributions import Fixed, Lognormal
from sim.workload.servegen import ServeGenLike


def make(**settings):
    given = {
        "rate_per_s": 20.0,
        "duration_s": 600.0,
        "gap_cv": Lognormal(mean=2.0, cv=0.5),
        "prompt_tokens": Lognormal(mean=1024.0, cv=0.8),
        "output_tokens": Lognormal(mean=256.0, cv=0.6),
    }
    return ServeGenLike(**(given | settings))


def arrivals_of(workload, seed=0, max_model_len=10**6):
    return list(workload.source(seed=seed, max_model_len=max_model_len).arrivals())


def test_29_of_2412_clients_send_90_percent_as_published():
    assert make().shares[:29].sum() == pytest.approx(0.9, abs=0.005)
    tenants = Counter(arrival.request.tenant for arrival in arrivals_of(make()))
    top = sum(number for _, number in tenants.most_common(29))
    assert top / tenants.total() == pytest.approx(0.9, abs=0.03)


def test_the_aggregate_is_burstier_than_poisson_as_published():
    for seed in range(3):
        gaps_s = np.diff([arrival.at_s for arrival in arrivals_of(make(), seed)])
        assert gaps_s.std() / gaps_s.mean() > 1.1


def test_equal_poisson_clients_together_are_poisson():
    workload = make(num_clients=200, client_skew=0.0, gap_cv=Fixed(value=1.0))
    gaps_s = np.diff([arrival.at_s for arrival in arrivals_of(workload)])
    assert gaps_s.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.03)


def test_outputs_of_a_client_are_exponential_and_prompts_have_the_mean_of_the_client():
    workload = make(
        num_clients=1,
        rate_per_s=100.0,
        prompt_tokens=Fixed(value=5000.0),
        output_tokens=Fixed(value=5000.0),
        gap_cv=Fixed(value=1.0),
    )
    found = arrivals_of(workload, max_model_len=10**9)
    outputs = np.array([arrival.num_output_tokens for arrival in found])
    prompts = np.array([arrival.request.prompt.num_tokens for arrival in found])
    assert outputs.mean() == pytest.approx(5000, rel=0.02)
    assert outputs.std() / outputs.mean() == pytest.approx(1.0, rel=0.02)
    assert prompts.mean() == pytest.approx(5000, rel=0.03)


def test_the_tail_of_prompts_falls_as_a_power():
    """In the tail, P(X > 10 x) / P(X > x) = 10^-exponent, here 10^-1.5 = 3.2 %."""
    workload = make(
        num_clients=1,
        rate_per_s=300.0,
        prompt_tokens=Fixed(value=100_000.0),
        prompt_cv=0.1,
        tail_share=0.5,
        tail_exponent=1.5,
        gap_cv=Fixed(value=1.0),
    )
    prompts = np.array([a.request.prompt.num_tokens for a in arrivals_of(workload, max_model_len=10**9)])
    mean = 1 + 0.5 * (4 * 3 - 1)  # of the mixture, in means of the body
    beyond = [(prompts > 100_000 / mean * 4 * times).sum() for times in (1, 10)]
    assert beyond[1] / beyond[0] == pytest.approx(10**-1.5, rel=0.1)


def test_the_same_seed_gives_the_same_traffic_and_another_one_does_not():
    one, same, other = (arrivals_of(make(duration_s=20.0), seed) for seed in (3, 3, 4))
    assert one == same
    assert one != other


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_clients": 0}, "num_clients=0: must be >= 1"),
        ({"client_skew": -1.0}, "client_skew=-1.0: must be finite and >= 0"),
        ({"tail_share": 1.0}, "tail_share=1.0: must be >= 0 and < 1"),
        ({"tail_exponent": 1.0}, "tail_exponent=1.0: must be > 1"),
        ({"rate_per_s": 0.0}, "rate_per_s=0.0: must be finite and > 0"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)


def test_traffic_without_a_request_is_refused():
    with pytest.raises(ValueError, match="no request arrives in this time"):
        make(rate_per_s=1e-6, duration_s=1.0).source(seed=0, max_model_len=100)
