"""Schedules of failure: draws, their stability when the fleet grows, refused settings."""

from itertools import islice, pairwise
from math import exp, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats

from experiments.app.settings.config_groups import CONFIG_DIR
from sim.cluster.failures import BadRelease, Failures, Random, Scripted
from sim.records.run import Failure, FailureKind
from sim.settings.build import build
from sim.settings.errors import ConfigError

CONFIGS = sorted((CONFIG_DIR / "failures").glob("*.yaml"))
POOLS = {"prefill": [0, 1], "decode": [2, 3, 4]}


def crashes(**changed):
    return Random(**{"kind": FailureKind.crash, "mtbf_s": 1000.0, "mttr_s": 100.0, **changed})


def schedule(*events, seed=0, num_replicas=3, until_s=10_000.0, pools=None):
    return list(Failures(events=events).schedule(seed, num_replicas, until_s, pools))


def test_what_is_scripted_happens_at_its_time_to_the_named_replicas():
    slow = Scripted(kind=FailureKind.straggler, at_s=5, duration_s=2, factor=3, replicas=(2,))
    crash = Scripted(kind=FailureKind.crash, at_s=1, duration_s=4)
    assert schedule(slow, crash) == [
        Failure(1, 0, 1, FailureKind.crash, 4),
        Failure(1, 1, 1, FailureKind.crash, 4),
        Failure(1, 2, 1, FailureKind.crash, 4),
        Failure(5, 2, 0, FailureKind.straggler, 2, 3.0),
    ]
    assert schedule(crash, until_s=1) == [], "until_s itself is not in it"


def test_a_pool_is_its_replicas():
    crash = Scripted(kind=FailureKind.crash, at_s=1, duration_s=4, pool="decode")
    assert [t.replica for t in schedule(crash, num_replicas=5, pools=POOLS)] == [2, 3, 4]


events = st.lists(
    st.one_of(
        st.builds(crashes, mtbf_s=st.floats(100, 5000), failure_shape=st.sampled_from([0.5, 1.0, 3.0])),
        st.builds(
            BadRelease,
            at_s=st.floats(0, 5000),
            rolled_back_after_s=st.floats(1, 5000),
            share=st.floats(0.01, 1),
            factor=st.sampled_from([None, 2.0]),
        ),
        st.builds(
            Scripted, kind=st.just(FailureKind.crash), at_s=st.floats(0, 5000), duration_s=st.floats(1, 100)
        ),
    ),
    max_size=4,
)


@given(events=events, num_replicas=st.integers(1, 6), seed=st.integers(0, 9))
def test_a_schedule_is_in_order_and_a_replica_more_changes_no_other(events, num_replicas, seed):
    fewer = schedule(*events, seed=seed, num_replicas=num_replicas)
    more = schedule(*events, seed=seed, num_replicas=num_replicas + 1)
    assert fewer == sorted(fewer)
    assert fewer == [failure for failure in more if failure.replica < num_replicas]
    own = Failures(events=tuple(events)).of_replica(seed, num_replicas, 10_000.0)
    assert list(own) == [failure for failure in more if failure.replica == num_replicas]
    for one, other in pairwise(t for t in more if t.replica == 0 and t.event == 0):
        assert one.at_s + one.duration_s <= other.at_s


def test_it_is_made_while_it_is_read():
    endless = Failures(events=(crashes(),)).schedule(0, 100, inf)
    first = list(islice(endless, 1000))
    assert len({failure.replica for failure in first}) == 100


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_times_between_failures_have_their_distribution(shape):
    """Kolmogorov-Smirnov against Weibull of that mean; repairs are exponential."""
    drawn = schedule(crashes(failure_shape=shape), num_replicas=1, until_s=3e6)
    ends = np.array([0.0] + [t.at_s + t.duration_s for t in drawn[:-1]])
    sound_s = np.array([t.at_s for t in drawn]) - ends
    unit = stats.weibull_min(shape)
    assert len(drawn) > 2000
    assert stats.kstest(sound_s / 1000 * unit.mean(), unit.cdf).pvalue > 0.01
    assert stats.kstest([t.duration_s for t in drawn], stats.expon(scale=100).cdf).pvalue > 0.01


def test_replicas_and_seeds_fail_by_themselves_unless_it_is_together():
    apart = schedule(crashes(), num_replicas=2, until_s=1e6)
    one, other = ([t.at_s for t in apart if t.replica == r][:500] for r in (0, 1))
    assert abs(np.corrcoef(np.diff(one), np.diff(other))[0, 1]) < 0.15
    assert schedule(crashes(), seed=1) != schedule(crashes(), seed=0)
    together = schedule(crashes(together=True), num_replicas=2)
    times = [[(t.at_s, t.duration_s) for t in together if t.replica == r] for r in (0, 1)]
    assert times[0] == times[1] != []


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.7, 1.0])
def test_a_release_goes_to_its_share_of_any_fleet(share):
    for num_replicas in range(1, 41):
        release = BadRelease(at_s=5, rolled_back_after_s=60, share=share, factor=2)
        got = schedule(release, num_replicas=num_replicas)
        assert len(got) == int(np.ceil(share * num_replicas - 1e-9))
        assert {t[3:] for t in got} == {(FailureKind.straggler, 60, 2)}


def test_a_release_in_a_pool_counts_the_pools_replicas():
    release = BadRelease(at_s=5, rolled_back_after_s=60, share=0.5, factor=2, pool="decode")
    assert [t.replica for t in schedule(release, num_replicas=5, pools=POOLS)] == [2, 4]


def test_a_release_that_crashes_crashes_until_it_is_rolled_back():
    """The share of 400 replicas without a crash in 60 s at a mean of 60 s is exp(-1)."""
    release = BadRelease(at_s=100, rolled_back_after_s=60, crash_after_s=60, restart_s=30)
    got = schedule(release, num_replicas=400)
    assert all(100 < t.at_s < 160 and t.duration_s == 30 for t in got)
    spared = 400 - len({t.replica for t in got})
    assert stats.binomtest(spared, 400, exp(-1)).pvalue > 0.01
    again = [t.at_s for t in got if t.replica == got[0].replica]
    assert all(late - early >= 30 for early, late in pairwise(again))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Scripted(kind=FailureKind.crash, at_s=-1, duration_s=1),
            "at_s=-1: must be .* >= 0 s; a run",
        ),
        (lambda: Scripted(kind=FailureKind.crash, at_s=0, duration_s=0), "duration_s=0: must be .* > 0 s"),
        (
            lambda: Scripted(kind=FailureKind.crash, at_s=0, duration_s=inf),
            "duration_s=inf: must be a finite",
        ),
        (
            lambda: Scripted(kind=FailureKind.straggler, at_s=0, duration_s=1, factor=0),
            "factor=0: must be a finite number > 1, by which",
        ),
        (
            lambda: Scripted(kind=FailureKind.link_slow, at_s=0, duration_s=1),
            "factor=None: must be a finite number",
        ),
        (
            lambda: Scripted(kind=FailureKind.crash, at_s=0, duration_s=1, factor=2),
            "factor=2: must be null, as crash slows nothing down",
        ),
        (
            lambda: Scripted(kind=FailureKind.crash, at_s=0, duration_s=1, replicas=(-1,)),
            r"replicas\[0\]=-1: must",
        ),
        (
            lambda: Scripted(kind=FailureKind.crash, at_s=0, duration_s=1, replicas=(1, 1)),
            r"replicas\[1\]=1: must be listed once",
        ),
        (lambda: crashes(replicas=(0,), pool="decode"), r"replicas=\[0\], pool=decode: must not both be set"),
        (lambda: crashes(mtbf_s=0), "mtbf_s=0: must be a finite number > 0 s"),
        (lambda: crashes(mttr_s=float("nan")), "mttr_s=nan: must be"),
        (lambda: crashes(failure_shape=0), "failure_shape=0: must be a finite number >= 0.1"),
        (lambda: BadRelease(at_s=0, rolled_back_after_s=0), "rolled_back_after_s=0: must be"),
        (
            lambda: BadRelease(at_s=0, rolled_back_after_s=1, share=0),
            "share=0: must be a share, > 0 and <= 1",
        ),
        (lambda: BadRelease(at_s=0, rolled_back_after_s=1, factor=0.5), "factor=0.5: must be"),
    ],
)
def test_rejects_what_cannot_happen(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rejects_what_is_not_in_the_fleet():
    failures = Failures(events=(crashes(), crashes(replicas=(0, 3))))
    failures.check(4)
    with pytest.raises(ValueError, match=r"events\[1\].replicas\[1\]=3: must be < 3, the number of replicas"):
        failures.check(3)
    with pytest.raises(ValueError, match=r"events\[0\].pool=decoding: no such pool; known: prefill, decode"):
        Failures(events=(crashes(pool="decoding"),)).check(5, POOLS)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_one_builds_and_happens_within_three_days(file):
    failures = build(OmegaConf.load(file), "failures")
    happens = next(failures.schedule(0, 2, 3 * 86_400), None)
    assert (happens is None) == (file.stem == "none")


def test_an_unknown_kind_is_refused_with_those_that_there_are():
    node = {"_target_": "sim.cluster.failures.Scripted", "kind": "crush", "at_s": 0, "duration_s": 1}
    with pytest.raises(ConfigError, match=r"events.0..kind=crush: must be one of the choices; .*crash"):
        build({"_target_": "sim.cluster.failures.Failures", "events": [node]}, "failures")
