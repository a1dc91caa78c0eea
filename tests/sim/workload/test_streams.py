"""Replications are independent, and draws for one purpose never shift another: common random numbers."""

from itertools import combinations

import numpy as np
from omegaconf import OmegaConf

from experiments.app.settings.config_groups import CONFIG_DIR
from sim.workload.arrivals import Constant, Poisson
from sim.workload.distributions import Fixed, Lengths, Lognormal, stream
from sim.workload.synthetic import Synthetic

NAMES = ("arrivals", "lengths", "priorities", "troubles.0")


def test_streams_of_other_seeds_names_and_keys_are_uncorrelated():
    """The correlation of n independent pairs exceeds 4 / sqrt(n) only once in 16,000 times."""
    num = 20_000
    drawn = {(seed, name): stream(seed, name).standard_normal(num) for seed in (0, 1) for name in NAMES}
    drawn[0, "arrivals", 1] = stream(0, "arrivals", 1).standard_normal(num)
    for one, other in combinations(drawn, 2):
        assert abs(np.corrcoef(drawn[one], drawn[other])[0, 1]) < 4 / np.sqrt(num), (one, other)
    assert (stream(0, "arrivals").standard_normal(num) == drawn[0, "arrivals"]).all()


def requests_of(seed=0, arrivals=None, output=None):
    lengths = Lengths(prompt_tokens=Fixed(value=64), output_tokens=output or Lognormal(mean=100, cv=0.5))
    workload = Synthetic(arrivals=arrivals or Poisson(rate_per_s=5.0), lengths=lengths, num_requests=200)
    return [
        (arrival.request.arrival_s, arrival.num_output_tokens)
        for arrival in workload.source(seed=seed, max_model_len=100_000).arrivals()
    ]


def test_configurations_share_what_they_do_not_change():
    arrival_s, tokens = zip(*requests_of(), strict=True)
    assert [at for at, _ in requests_of(output=Fixed(value=7))] == list(arrival_s)
    assert [num for _, num in requests_of(arrivals=Constant(rate_per_s=1.0))] == list(tokens)
    assert requests_of(seed=1) != requests_of(seed=0)


def test_whatever_draws_draws_anew_with_the_seed_of_the_run():
    """A seed of its own would be the same in every replication: their intervals would leave it out."""
    seeds = {}
    for file in CONFIG_DIR.glob("*/**/*.yaml"):
        plain = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(plain, dict) and "seed" in plain:
            seeds[f"{file.parent.name}/{file.stem}"] = plain["seed"]
    assert "routing/power_of_two" in seeds
    assert set(seeds.values()) == {"${seed}"}, seeds
