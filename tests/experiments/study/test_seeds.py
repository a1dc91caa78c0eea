"""Seeds that give the same run are one run."""

import math
import random

import pandas as pd
import pytest

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.variants import Variants
from experiments.compare.results import evaluate
from experiments.compare.sentences import caveats, verdicts
from experiments.compare.settings import Experiment
from experiments.study.figures import Metric
from experiments.study.runs import Point, run_all
from experiments.study.seeds import distinct_seeds
from sim.metrics.confidence import Outcome
from sim.settings.scenario import build_scenario

SMALL = ["model=smollm2_135m", "hardware=l4"]


@pytest.fixture
def trace(tmp_path):
    rows = [f"{i * 0.5:.1f},{20 + i},{5 + i % 3}" for i in range(20)]
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return ["workload=plain_csv", f"workload.path={file}"]


def config(*overrides):
    return Variants(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), [*SMALL, *overrides]).config(())


def scenario_of(*overrides):
    return lambda seed: build_scenario(resolved({**config(*overrides), "seed": seed}))


def test_only_what_draws_needs_several_seeds(trace):
    poisson = scenario_of("workload=poisson")
    assert distinct_seeds([scenario_of(*trace)], [4, 5, 6]) == (4,)
    assert distinct_seeds([poisson], [4, 5, 6]) == (4, 5, 6)
    assert distinct_seeds([scenario_of(*trace), poisson], [4, 5]) == (4, 5)
    routed = scenario_of(*trace, "replicas=3", "routing=power_of_two")
    assert distinct_seeds([routed], [4, 5]) == (4, 5)


def test_a_study_of_a_trace_runs_each_arm_once_and_has_a_row_for_each_seed(trace):
    points = [Point(arm=name, swept=None, config=config(*trace, f"replicas={name}")) for name in ("1", "2")]
    reported = []
    runs = run_all(points, [0, 1, 2], 1, lambda done, total: reported.append((done, total)))
    assert reported == [(1, 2), (2, 2)]
    assert runs.table.groupby("arm")["seed"].apply(list).to_dict() == {"1": [0, 1, 2], "2": [0, 1, 2]}
    of_seeds = [runs.table[runs.table["seed"] == seed].drop(columns="seed") for seed in (0, 1, 2)]
    for other in of_seeds[1:]:
        pd.testing.assert_frame_equal(of_seeds[0].reset_index(drop=True), other.reset_index(drop=True))


@pytest.fixture
def busy_trace(tmp_path):
    draws = random.Random(4)
    at_s, rows = 0.0, []
    for _ in range(400):
        at_s += draws.expovariate(8)
        rows.append(f"{at_s:.3f},{draws.randint(20, 400)},{draws.randint(5, 60)}")
    file = tmp_path / "busy.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return ["workload=plain_csv", f"workload.path={file}", "slo.ttft_ms=12", "slo.tpot_ms=50"]


METRICS = tuple(
    Metric(key=key, better=better)
    for key, better in {
        "ttft.p90_s": "lower",
        "tpot.mean_s": "lower",
        "goodput.share": "higher",
        "goodput.requests_per_s": "higher",
        "cost.usd_per_hour": "lower",
        "throughput.output_tokens_per_s": "higher",
    }.items()
)


def compared(trace, *arms):
    points = [Point(arm=arm, swept=None, config=config(*trace, *words.split())) for arm, words in arms]
    runs = run_all(points, [0, 1, 2, 3, 4], 1, lambda *done: None)
    experiment = Experiment(
        title="trace",
        claim="none",
        arms={arm: (words,) for arm, words in arms},
        baseline=arms[0][0],
        metrics=METRICS,
    )
    return evaluate(experiment, runs)


def test_arms_on_a_trace_are_compared_over_blocks_of_its_requests(busy_trace):
    found = compared(busy_trace, ("slow", "batching.max_num_batched_tokens=256"), ("usual", "replicas=2"))
    by_key = {one.metric.key: one for one in found.comparisons if one.arm == "usual"}
    for key in ("ttft.p90_s", "tpot.mean_s", "goodput.share", "goodput.requests_per_s"):
        one = by_key[key]
        assert one.mean.low < one.mean.mean < one.mean.high, key
        assert one.mean.num_values >= 10
        assert one.paired.num_pairs >= 10
    share, rate = by_key["goodput.share"].mean, by_key["goodput.requests_per_s"].mean
    assert rate.low / rate.mean == pytest.approx(share.low / share.mean)
    assert by_key["tpot.mean_s"].outcome is Outcome.BETTER
    for key in ("cost.usd_per_hour", "throughput.output_tokens_per_s"):
        assert math.isnan(by_key[key].mean.low)
        assert by_key[key].outcome is Outcome.UNKNOWN
    printed = "\n".join([*caveats(found), *verdicts(found)])
    assert "moving-block bootstrap" in printed
    assert "paired blocks of the trace" in printed
    assert "no verdict on output tokens/s" in printed
    assert "seeds" not in printed.replace("every seed", "")


def test_equal_arms_on_a_trace_are_equal_and_a_short_trace_has_no_interval(busy_trace, trace):
    found = compared(busy_trace, ("one", "replicas=1"), ("other", "engine.max_num_seqs=200"))
    assert {one.outcome for one in found.comparisons if one.arm == "other"} == {Outcome.EQUAL}
    short = compared(trace, ("one", "replicas=1"), ("two", "replicas=2"))
    assert all(math.isnan(one.mean.low) or one.mean.is_exact for one in short.comparisons)
    assert "and no interval: the trace is too short" in "\n".join(caveats(short))
    assert not any("interval" in line for line in verdicts(short) if "no interval" not in line)
