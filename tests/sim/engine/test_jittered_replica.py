"""Runs with jitter: leaps change nothing, a seed gives one run, and figures follow the longer iterations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.same_run import assert_leap_equals_step
from hwmodels.iterations import Jitter
from hwmodels.levels import Calibrated
from sim import simulate
from tests.examples import examples
from tests.worlds.clusters import draw_clusters, draw_crashes

JITTER = Jitter(independent_cv=0.2, drift_cv=0.1, straggler_share=0.05, straggler_factor=4.0)
TABLES = ("requests", "iterations", "events", "own_gaps")


def assert_same(one, other):
    for name in TABLES:
        assert getattr(one.records, name).equals(getattr(other.records, name)), f"{name} differ"


@given(world=draw_worlds())
def test_leap_equals_step(world):
    assert_leap_equals_step(replace(world, jitter=JITTER))


@given(data=st.data())
def test_leap_equals_step_with_branches_and_adapters(data, branching_worlds, adapter_worlds):
    assert_leap_equals_step(replace(data.draw(branching_worlds | adapter_worlds), jitter=JITTER))


@given(world=draw_clusters() | draw_crashes())
def test_leap_equals_step_in_a_cluster(world):
    """Replicas crash, slow down and come, clients give up and try again."""
    assert_leap_equals_step(replace(world, jitter=JITTER))


@examples(10, 30)
@given(world=draw_worlds())
def test_one_seed_gives_one_run(world):
    world = replace(world, jitter=JITTER)
    assert_same(world.simulate(), world.simulate())


@given(world=draw_worlds() | draw_clusters() | draw_crashes())
def test_jitter_without_spread_changes_nothing(world):
    assert_same(world.simulate(), replace(world, jitter=Jitter()).simulate())


@pytest.fixture(scope="module")
def run():
    """Returns run(**settings): a small run of one H100."""

    def run(**given):
        return simulate(workload="poisson", workload__num_requests=100, **given)

    return run


def noisy(**given):
    return {"latency": Calibrated(jitter=Jitter(**given))}


def test_replicas_and_seeds_have_factors_of_their_own(run):
    def durations_s(**given):
        found = run(**noisy(independent_cv=0.2), **given).iterations
        return [part["duration_s"].tolist()[:50] for _, part in found.groupby("replica")]

    first, second = durations_s(replicas=2)
    assert first != second
    assert durations_s() != durations_s(seed=1)
    assert durations_s() == durations_s()


def test_figures_follow_the_longer_iterations():
    """All requests are there from the beginning: the same iterations with and without jitter."""
    usual = {"workload": "offline_batch", "workload__num_requests": 20, "engine__frontend": None}
    plain, noised = simulate(**usual), simulate(**usual, **noisy(drift_cv=0.5, drift_iterations=1e6))
    one, other = plain.iterations, noised.iterations
    assert one.drop(columns=["start_s", "duration_s"]).equals(other.drop(columns=["start_s", "duration_s"]))
    ratios = other["duration_s"] / one["duration_s"]
    assert ratios.std() < 0.1 * abs(ratios.mean() - 1)
    factor = noised.summary["simulated_s"] / plain.summary["simulated_s"]
    assert abs(factor - 1) > 0.05
    for name in ("mfu", "mbu"):
        assert noised.summary[name] == pytest.approx(plain.summary[name] / factor)
    for found in (plain, noised):
        energy, simulated_s = found.summary["energy"], found.summary["simulated_s"]
        assert energy["joules"] == pytest.approx(energy["mean_device_w"] * simulated_s)
    watts = [found.summary["energy"]["mean_device_w"] for found in (plain, noised)]
    assert (watts[0] > watts[1]) == (factor > 1)


def test_the_mean_of_many_iterations_is_that_of_the_model(run):
    plain, noised = run(), run(**noisy(independent_cv=0.3))
    means_s = [found.iterations["duration_s"].mean() for found in (plain, noised)]
    assert means_s[1] == pytest.approx(means_s[0], rel=0.02)
    assert np.quantile(noised.iterations["duration_s"], 0.99) > np.quantile(
        plain.iterations["duration_s"], 0.99
    )


def test_the_basis_of_the_figures_states_the_jitter(run):
    first, *_ = run(**noisy(independent_cv=0.05)).summary["notes"]
    assert first == (
        "Iteration times: fitted to operators measured on H100 SXM. "
        "With jitter: 5 % from iteration to iteration."
    )


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize("choice", ["lognormal", "vllm"])
@pytest.mark.parametrize("latency", ["calibrated", "spec"])
def test_every_choice_scatters_the_iterations_of_every_replica(run, choice, latency):
    settings = {"latency": latency, "pools": "disaggregated"}
    plain, noised = run(**settings), run(**settings, **{"latency/jitter": choice})
    assert len(noised.requests) == len(plain.requests)
    tables = [found.iterations.groupby("replica")["duration_s"].first() for found in (plain, noised)]
    assert len(tables[0]) == 2
    assert (tables[0] != tables[1]).all()
