"""The summary of a run from parts of its records: whatever the cuts and the order of merging, the same.

In random worlds of every kind, cut at random moments, summaries are equal bit for bit among themselves.
Beside the summary of the whole tables, counts are equal, sums equal to 1e-12, percentiles within the stated
error.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.conformance.adapting import draw_adapter_worlds
from experiments.conformance.draws import draw_worlds
from experiments.conformance.recording_core import RecordingCore
from hwmodels.costs import EnergySettings, PowerModel, Tariff
from policies.core.engine import EngineCore
from sim import simulate
from sim.metrics.dialects import MetricsSettings
from sim.metrics.figure import FigureSetting, PoolHardware
from sim.metrics.sketches import PERCENTILE_ERROR, SKETCHED
from sim.metrics.slo import Slo
from sim.metrics.summary import RunFigures, summarise
from tests.worlds.chunks import chunks_of
from tests.worlds.clusters import draw_clusters, draw_crashes
from tests.worlds.services import draw_services
from tests.worlds.speculating import draw_speculating

KINDS = {
    "engines": draw_worlds,
    "adapters": draw_adapter_worlds,
    "clusters": draw_clusters,
    "crashes": draw_crashes,
    "disaggregated": draw_services,
    "speculating": lambda: draw_speculating(draw_worlds()),
}
SUMS_REL, SMALL_S = 1e-12, 2.0**-40
OWN_KEYS = {"percentile_error", "not_computed"}


class SmallModel:
    """FLOPs and bytes with fractions, so that the rounding of sums depends on their order."""

    peak_flops_per_s = peak_bytes_per_s = 1000.0

    def flops(self, shape):
        return 10.1 * (shape.decode_seqs + shape.prefill_tokens)

    def bytes_moved(self, shape):
        return 0.7

    def breakdown(self, shape):
        return {"tokens": self.flops(shape), "rest": 0.3}


def setting_of(records, **given):
    pools = [PoolHardware(model=SmallModel(), price_usd_per_hour=3.6) for _ in records.pools]
    return {"pools": pools, **given}


def figures_of(records, chunks, setting):
    found = []
    for chunk in chunks:
        found.append(RunFigures(FigureSetting(pool_records=records.pools, kept=SKETCHED, **setting)))
        found[-1].add(chunk)
    return found


def merged(every, rng):
    """Merges figures in a random tree; a part of them goes through a pickle, as between processes."""
    while len(every) > 1:
        one, other = (every.pop(rng.randrange(len(every))) for _ in range(2))
        one.merge(pickle.loads(pickle.dumps(other)) if rng.random() < 0.5 else other)
        every.append(one)
    return every[0]


def is_percentile(path):
    """Returns whether a key, or the one that it is a bound or the value of, is a percentile."""
    keys = path.removesuffix(".value").removesuffix(".low").removesuffix(".high").rsplit(".", 1)
    return keys[-1][:1] == "p" and keys[-1][1:2].isdigit()


def compare(whole, folded, path=""):
    """Yields the differences that are too large, without those of confidence intervals."""
    if isinstance(whole, dict):
        if whole.keys() != folded.keys() - OWN_KEYS:
            yield path, sorted(whole.keys() ^ (folded.keys() - OWN_KEYS))
        for key in whole.keys() & folded.keys():
            if path or key != "intervals":
                yield from compare(whole[key], folded[key], f"{path}.{key}")
    elif isinstance(whole, list):
        for index, pair in enumerate(zip(whole, folded, strict=True)):
            yield from compare(*pair, f"{path}[{index}]")
    elif isinstance(whole, float) and isinstance(folded, float):
        rel, least = SUMS_REL, 1e-9
        if is_percentile(path):
            rel, least = PERCENTILE_ERROR * (1 + 1e-9), SMALL_S  # a value may be the border of a bucket
        if folded != pytest.approx(whole, rel=rel, abs=least):
            yield path, whole, folded
    elif whole != folded or isinstance(whole, bool) != isinstance(folded, bool):
        yield path, whole, folded


@pytest.mark.sampled(fast=1, slow=5)
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_and_order_of_merging_do_not_matter(kind):
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(KINDS[kind](), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.2, 2.0]))
    def check(world, rng, warmup_share):
        # Other tests check the decisions of engines, which need not be recorded here.
        if getattr(world, "engine", None) is RecordingCore:
            world = replace(world, engine=EngineCore)
        records = world.simulate(leap=True).records
        metrics = MetricsSettings(warmup_s=warmup_share * records.end_s)
        slo = Slo(ttft_ms=5000, tpot_ms=2000)
        setting = setting_of(records, slo=slo, metrics=metrics)
        found = set()
        for num_cuts in (0, 3, 9):
            cuts = sorted(rng.uniform(0, records.end_s) for _ in range(num_cuts))
            chunks = chunks_of(records, cuts, group_rows=rng.choice([2, 5]))
            figures = merged(figures_of(records, chunks, setting), rng)
            summary = figures.summary(chunks[-1].end)
            found.add(json.dumps([summary, figures.plots(chunks[-1].end).figures.times.seconds()]))
        assert len(found) == 1
        whole = summarise(records, **setting)
        assert list(compare(whole, summary)) == []
        assert summary["not_computed"] == {}
        assert whole["intervals"].keys() == summary["intervals"].keys()

    check()


@pytest.fixture(scope="module")
def run():
    return simulate(workload="azure_conv_like", workload__num_requests=3000, load=0.5, metrics__warmup_s=60)


def test_intervals_of_groups_are_about_those_of_whole_tables(run):
    records = run.run.records
    setting = setting_of(records, slo=run.run.slo, metrics=MetricsSettings(warmup_s=60))
    (figures,) = figures_of(records, chunks_of(records, []), setting)
    whole, streamed = summarise(records, **setting)["intervals"], figures.summary(records)["intervals"]
    known = 0
    for section in ("ttft", "tpot", "e2e", "goodput"):
        assert whole[section].keys() == streamed[section].keys()
        for key, one in whole[section].items():
            other = streamed[section][key]
            if one["lack"] is None and other["lack"] is None and one["batches"] == other["batches"]:
                known += 1
                width = one["high"] - one["low"]
                for bound in ("low", "high"):
                    assert other[bound] == pytest.approx(one[bound], abs=0.3 * width + 0.005 * one[bound])
    assert known >= 6


def test_all_sections_with_prices_and_energy(run):
    records = run.run.records
    setting = setting_of(
        records,
        slo=None,
        metrics=MetricsSettings(),
        energy=EnergySettings(training_tokens=1e9),
        tariff=Tariff(),
    )
    setting["pools"] = [PoolHardware(model=run.run.models[0], power=PowerModel(idle_w=70.0, tdp_w=700.0))]
    (figures,) = figures_of(records, chunks_of(records, []), setting)
    summary = figures.summary(records)
    assert list(compare(summarise(records, **setting), summary)) == []
    assert summary["percentile_error"] == PERCENTILE_ERROR < 0.0005
    assert summary["not_computed"] == {}


def test_more_classes_than_are_kept_are_named(run):
    records = run.run.records
    tenants = np.arange(len(records.requests)).astype(str).astype(object)
    many = replace(records, requests=records.requests.assign(tenant=tenants))
    setting = setting_of(many)
    chunks = chunks_of(many, [many.end_s / 2], group_rows=200)
    one, other = figures_of(many, chunks, setting)
    one.merge(other)
    summary = one.summary(many)
    assert "by_tenant" not in summary
    assert summary["not_computed"] == {"by_tenant": "more than 256 classes"}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"warmup_s": "auto"}, "metrics.warmup_s=auto: the end of the warm-up is found from"),
        ({"cooldown_s": 5.0}, r"metrics.cooldown_s=5: must be 0 with streamed tables"),
        ({"dialect": "vllm_bench"}, "metrics.dialect=vllm_bench: needs the time of every token"),
    ],
)
def test_settings_that_need_whole_tables_are_refused(metrics, message):
    with pytest.raises(ValueError, match=message):
        FigureSetting(pools=[], pool_records=[], metrics=MetricsSettings(**metrics), kept=SKETCHED)
