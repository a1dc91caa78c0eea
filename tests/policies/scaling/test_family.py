"""Every shipped autoscaler, with its shipped settings, over days of fluid traffic."""

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.conformance.days import Day
from policies.scaling.scheduled import Scheduled
from sim.settings.build import build
from tests.examples import examples

CONFIGS = sorted(file.stem for file in (CONFIG_DIR / "scaling").glob("*.yaml") if file.stem != "none")


def shipped(name):
    return build(OmegaConf.load(CONFIG_DIR / "scaling" / f"{name}.yaml"), "scaling")


@pytest.mark.parametrize("name", CONFIGS)
@examples(8, 15)
@given(
    rates_per_s=st.lists(st.floats(0, 30), min_size=1, max_size=8),
    bounds=st.tuples(st.integers(1, 6), st.integers(0, 6)),
    num_replicas=st.integers(1, 12),
)
def test_targets_stay_within_bounds(name, rates_per_s, bounds, num_replicas):
    entries = {"entries": ({"at": "00:00", "replicas": bounds[0]},)} if name == "scheduled" else {}
    low, high = bounds[0], sum(bounds)
    scaling = replace(shipped(name), min_replicas=low, max_replicas=high, **entries)
    day = Day(scaling=scaling, rates_per_s=tuple(rates_per_s), num_intervals=60, num_replicas=num_replicas)
    assert all(low <= asked.target <= high for asked in day.simulate())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "scheduled"])
@examples(8, 15)
@given(
    # Near 8/s, and a hair above a whole number, a backlog needs more than eight hours to grow or to drain.
    rate_per_s=st.integers(1, 20).map(lambda n: n / 4) | st.floats(9, 12),
    num_replicas=st.integers(1, 8),
    cold_start_s=st.sampled_from([30.0, 120.0, 300.0]),
)
def test_shipped_settings_come_to_rest_under_constant_load(name, rate_per_s, num_replicas, cold_start_s):
    """In the last two of eight hours nothing changes, and no request waits that 8 replicas could serve."""
    scaling = shipped(name)
    day = Day(
        scaling=scaling,
        rates_per_s=(rate_per_s,),
        num_intervals=int(8 * 3600 / scaling.interval_s),
        num_replicas=num_replicas,
        service_s=100.0,
        cold_start_s=cold_start_s,
    )
    last = [asked for asked in day.simulate() if asked.now > 6 * 3600]
    assert len({asked.target for asked in last}) == 1
    if rate_per_s <= 5:
        assert last[-1].num_waiting == 0
        assert last[-1].target >= rate_per_s


def test_a_fluid_day_by_hand():
    """Capacity 1/s a replica. 2/s on one replica for 10 s leave 10 waiting; the second replica that was
    asked for then is up 20 s later, and 1/s lets two of them get through the queue at 1/s.
    """
    scaling = Scheduled(interval_s=10, day_s=1000, entries=({"at": "00:00", "replicas": 2},))
    day = Day(scaling=scaling, rates_per_s=(2, 1, 1, 1), num_intervals=4, cold_start_s=20)
    seen = [(a.num_replicas, a.num_starting, a.num_waiting) for a in day.simulate()]
    assert seen == [(1, 0, 10), (1, 1, 10), (2, 0, 10), (2, 0, 0)]


@pytest.mark.parametrize("name", ["utilisation", "queue_length", "slo_attainment", "predictive"])
def test_a_rise_is_followed_out_and_back(name):
    scaling = replace(shipped(name), max_replicas=8)
    num = int(3 * 3600 / scaling.interval_s)
    rates = (0.5,) * num + (4.0,) * num + (0.5,) * num
    day = Day(scaling=scaling, rates_per_s=rates, num_intervals=3 * num, service_s=100.0)
    asked = day.simulate()
    assert asked[num - 1].target <= 2
    assert asked[2 * num - 1].target >= 4
    assert asked[2 * num - 1].num_waiting == 0
    assert asked[-1].target <= 2
    # out and in, step by step, and no way back in between
    after = [target for target, _ in groupby(a.target for a in asked[2 * num :])]
    assert after == sorted(after, reverse=True)
