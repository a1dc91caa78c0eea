"""windtunnel goodput: the search finds the highest rate that meets the SLO, and reports unusable settings."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.cli import main
from experiments.app.settings.compose import Composition, ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.goodput import search
from experiments.goodput.answer import Outcome
from experiments.goodput.arms import build_arms
from experiments.goodput.page import rate_figure, scale_figure
from experiments.goodput.results import curve, goodput_curve, highest_of, scale_curve
from experiments.goodput.search import Arm, Found, Measured, rate_of, scaled
from experiments.goodput.settings import GoodputSettings
from experiments.goodput.tables import rows, sentences
from experiments.study.bisection import Bracket, bisected, bracketed
from policies.batching.static import Static
from sim.cluster.gateway import Gateway
from sim.metrics.confidence import Interval
from sim.metrics.confidence import Outcome as Outcome_
from sim.metrics.slo import Slo
from sim.settings.errors import ConfigError
from sim.settings.scenario import run

SOURCE = ConfigSource(config_name="goodput", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=300")
AGENTS = ("workload=agentic", "workload.num_tasks=12", "workload.system_prompt_tokens.value=300")
SLO = Slo(name="toy", ttft_ms=500, tpot_ms=50)


def arms_of(*overrides):
    given_all = [*SMALL, *overrides] if AGENTS[0] not in overrides else [*SMALL[:2], *overrides]
    return build_arms(SOURCE.compose(given_all), Composition(SOURCE, given_all))


def arm(name, num_devices=1):
    return Arm(
        name=name,
        scenarios={},
        slo=SLO,
        target=0.9,
        base_rate=1.0,
        num_devices=num_devices,
        warmup_share=0.0,
        slo_scales=(1.0, 2.0),
        num_requests=100,
        max_requests=100_000,
    )


def measured(rate, share, *, overloaded=False, ttft=1.0, tpot=1.0, lack=None):
    return Measured(
        rate=rate,
        share=share,
        is_overloaded=overloaded,
        term_shares={"ttft": ttft, "tpot": tpot},
        scale_shares={1.0: share, 2.0: min(1.0, share + 0.2)},
        figures={
            "ttft.p90_s": 0.4,
            "tpot.p90_s": 0.04,
            "e2e.p90_s": 3.0,
            "throughput.output_tokens_per_s": 100.0,
            "cost.usd_per_million_output_tokens": None,
            "cost.usd_per_1000_requests": 0.5,
        },
        notes=("a note",),
        num_requests=100,
        lasts_s=100 / rate,
        least_s=1.0,
        lack=lack,
        is_attained=share >= 0.9,
    )


def found(highest, above, *more):
    return Found(at_rates=[*more], at_scale_rate=measured(1.0, 0.7), highest=highest, above=above)


@given(st.floats(1e-2, 1e2), st.floats(1e-2, 1e2), st.sampled_from([0.001, 0.02, 0.3]))
def test_the_search_encloses_the_capacity_wherever_it_starts(capacity, start, precision):
    bracket = bisected(lambda r: r <= capacity, bracketed(lambda r: r <= capacity, start), precision)
    assert bracket.low <= capacity < bracket.high <= bracket.low * (1 + precision)


def test_a_search_without_another_side_says_so():
    assert bracketed(lambda rate: False, 8.0).low == 0
    assert bracketed(lambda rate: True, 8.0).high == float("inf")
    assert bisected(lambda rate: True, Bracket(0.0, 3.0), 0.1) == (0.0, 3.0)


def test_an_overloaded_run_never_keeps_the_slo():
    assert arm("a").keeps(measured(1.0, 0.95))
    assert not arm("a").keeps(measured(1.0, 0.95, overloaded=True))
    assert not arm("a").keeps(measured(1.0, 0.85))


def test_arms_are_ranked_by_what_they_keep_with_what_they_miss():
    arms = [arm("slow"), arm("fast", num_devices=2), arm("never")]
    runs = {
        "slow": [found(measured(r, 0.9), measured(1.01 * r, 0.8, ttft=0.8)) for r in (5.0, 6.0, 7.0)],
        "fast": [
            found(measured(r, 0.9), measured(1.01 * r, 0.5, overloaded=True)) for r in (10.0, 12.0, 14.0)
        ],
        "never": [found(None, measured(0.001, 0.0, tpot=0.0)) for _ in range(3)],
    }
    highest = highest_of(arms, runs)
    assert [one.arm.name for one in highest] == ["fast", "slow", "never"]
    assert [one.rate.mean for one in highest] == [12.0, 6.0, 0.0]
    assert highest[0].rate_per_device == 6.0
    assert [one.limiting for one in highest] == ["overload", "ttft", "tpot"]
    assert highest[1].best.ratio.mean == pytest.approx(0.5)
    lines = sentences(highest)
    assert lines[0].startswith(
        "fast: 12 requests/s (95 % interval 7 to 17) with 90 % of requests within TTFT 500 ms"
    )
    assert lines[0].endswith("at higher rates the backlog grows without bound")
    assert "0.500 times the best" in lines[1]
    assert lines[1].endswith("at higher rates TTFT fails first")
    assert lines[2] == (
        "never: misses the SLO at all tried rates; TPOT fails first (SLO attainment 0 % at the lowest rate)"
    )
    # Half widths: t(2, 0.975) = 4.303 times s / sqrt(3); rates of 5, 6, 7 have s = 1, other figures 0.
    # The upper bounds are those of the rates that miss, 1 % higher: 2.54 becomes 2.6.
    assert rows(highest)[2] == ["slow", "6.0 ± 2.6", "6.0 ± 2.6", "400", "40.0", "–", "TTFT"]
    assert rows(highest)[1][1:3] == ["12 ± 5", "6.0 ± 2.6"]


def test_the_ratio_to_the_best_includes_the_steps_of_the_search():
    """Both seeds find 9.0 and 9.1, but each rate is known to a step of 5 % only."""
    of_best = [found(measured(rate, 0.95), measured(1.05 * rate, 0.8)) for rate in (9.1, 9.2)]
    of_other = [found(measured(rate, 0.95), measured(1.05 * rate, 0.8)) for rate in (9.0, 9.1)]
    _, other = highest_of([arm("best"), arm("other")], {"best": of_best, "other": of_other})
    assert other.best.ratio.low < 1 / 1.05 * other.best.ratio.mean
    assert other.best.ratio.high > 1.05 * other.best.ratio.mean
    assert other.best.outcome("higher") is Outcome_.NO_DIFFERENCE


def test_a_rate_of_a_trace_ends_at_runs_that_surely_meet_and_surely_miss_the_slo():
    def traced(rate, share, low, high, **more):
        interval = {"goodput.share": Interval(share, low, high, 20)}
        return measured(rate, share, **more)._replace(intervals=interval)

    curve_ = [traced(8, 1.0, 0.98, 1.0), traced(9, 0.93, 0.88, 0.98), traced(12, 0.7, 0.6, 0.8)]
    one = found(traced(9.5, 0.91, 0.85, 0.97), traced(9.7, 0.89, 0.82, 0.96), *curve_)
    [highest] = highest_of([replace(arm("one"), is_trace=True)], {"one": [one]})
    assert highest.rate == (9.5, 8, 12, 20)
    unsure = found(traced(9.5, 0.91, 0.85, 0.97), traced(9.7, 0.89, 0.82, 0.96))
    [highest] = highest_of([replace(arm("one"), is_trace=True)], {"one": [unsure]})
    assert highest.rate.mean == 9.5
    assert math.isnan(highest.rate.low)


def test_curves_are_means_over_seeds_and_leave_out_the_goodput_of_overload():
    kept = found(None, None, measured(2.0, 0.9), measured(4.0, 0.5, overloaded=True))
    both = [kept, found(None, None, measured(2.0, 0.7), measured(4.0, 0.3))]
    rates, shares, is_overloaded = zip(*curve(both), strict=True)
    assert (rates, is_overloaded) == ((2.0, 4.0), (False, True))
    assert [share.mean for share in shares] == pytest.approx([0.8, 0.4])
    assert [value.mean for _, value in goodput_curve(both)] == pytest.approx([1.6])
    by_scale = scale_curve(both, (2.0, 1.0))
    assert [scale for scale, _ in by_scale] == [1.0, 2.0]
    assert [share.mean for _, share in by_scale] == pytest.approx([0.7, 0.9])


def test_a_scaled_slo_has_all_its_limits_scaled():
    twice = scaled(SLO, 2.0)
    assert (twice.ttft_ms, twice.tpot_ms, twice.e2e_ms) == (1000, 100, None)


def test_arms_have_names_or_are_called_by_what_they_override():
    settings = GoodputSettings(arms=("engine=vllm", "still: batching=static engine=vllm", "plain:"))
    assert settings.overrides_by_arm == {
        "engine=vllm": ("engine=vllm",),
        "still": ("batching=static", "engine=vllm"),
        "plain": (),
    }
    assert GoodputSettings().overrides_by_arm == {"as set": ()}


def test_each_seed_has_its_own_draws_in_routers_and_predictors_too():
    """With shared draws, the intervals over seeds would leave out their variance."""
    _, (one,) = arms_of("routing=random", "replicas=2", "prediction=oracle", "goodput.seeds=[3,8]")
    drawn = {seed: (s.seed, s.routing.seed, s.prediction.seed) for seed, s in one.scenarios.items()}
    assert drawn == {3: (3, 3, 3), 8: (8, 8, 8)}


def test_arms_take_the_settings_of_the_command_line_and_their_own():
    _, arms = arms_of("replicas=2", "goodput.arms=['one: replicas=1','batching=static']")
    assert [one.scenarios[0].replicas for one in arms] == [1, 2]
    assert [one.num_devices for one in arms] == [1, 2]
    assert isinstance(arms[1].scenarios[0].batching, Static)
    assert {(one.num_requests, one.max_requests) for one in arms} == {(300, 200_000)}
    assert arms[0].base_rate == pytest.approx(8.0, rel=0.2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slo=none"], "^slo=none: goodput counts requests that meet an SLO; choose one"),
        (["workload=closed_loop"], "^workload: has no request rate that could be varied"),
        (["goodput.seeds=[]"], r"^goodput.seeds=\[\]: must contain at least one seed"),
        (["goodput.seeds=[1,1]"], r"^goodput.seeds=\[1, 1\]: must be distinct"),
        (["goodput.rates=[0]"], r"^goodput.rates=0: must be finite and > 0"),
        (["goodput.target=1.5"], "^goodput.target=1.5: must be a share, > 0 and <= 1"),
        (["goodput.precision=0"], "^goodput.precision=0: must be >= 0.001 and <= 0.5"),
        (["goodput.arms=['batching']"], r"^goodput.arms\[0\]=batching: must be key=value"),
        (["goodput.arms=['a: replicas=1','a: replicas=2']"], "^goodput.arms=.*must have different names"),
        (["goodput.arms=['batching=statik']"], r"^goodput.arms\[0\]: .*statik"),
        (["load=2"], "^load=2: must not be set here; the search varies the load"),
        (["seed=5"], "^seed=5: must not be set here; goodput.seeds sets the seeds"),
        (["goodput.arms=['a: seed=3']"], r"^goodput.arms\[0\]=seed: must not be set here; goodput.seeds"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_key_value_and_rule(overrides, message):
    with pytest.raises(ConfigError, match=message):
        arms_of(*overrides)


@pytest.mark.slow
def test_a_search_writes_its_verdict_its_runs_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    overrides = [
        *SMALL,
        "goodput.arms=['one: replicas=1','two: replicas=2 routing=least_outstanding']",
        "goodput.seeds=[0]",
        "engine.max_num_seqs=4",
        "goodput.rates=[4,400]",
        "goodput.requests=100",
        "goodput.precision=0.3",
        "goodput.jobs=1",
        "hydra.run.dir=out",
    ]
    assert main(["goodput", *overrides]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert printed.splitlines()[0] == summary["verdicts"][0]
    assert [one["arm"] for one in summary["arms"]] == ["two", "one"]
    two, one = (arm["highest_rate_per_s"]["mean"] for arm in summary["arms"])
    assert 1.2 < two / one < 3  # twice the GPUs
    runs = pd.read_parquet(tmp_path / "out/runs.parquet")
    of_curve = runs[runs.part == "curve"]
    assert sorted(of_curve.rate.unique()) == [4, 400]
    assert of_curve[of_curve.rate == 400].share.max() < 0.9
    kept = runs[runs.part == "highest"]
    assert (kept.share >= 0.9).all()
    assert (runs[runs.part == "above"].share < 0.9).all()
    page = (tmp_path / "out/goodput.html").read_text()
    assert "request rate" in page
    assert "Highest rates" in page


QUICK = (
    *SMALL,
    "engine.max_num_seqs=4",
    "goodput.rates=[4,400]",
    "goodput.requests=30",
    "goodput.precision=0.5",
)


@pytest.mark.slow
def test_processes_find_what_one_finds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for jobs in (1, 2):
        own = ("goodput.seeds=[0,1]", f"goodput.jobs={jobs}", "goodput.report=false", f"hydra.run.dir={jobs}")
        assert main(["goodput", *QUICK, *own]) == 0
    one, two = (pd.read_parquet(tmp_path / f"{jobs}/runs.parquet") for jobs in (1, 2))
    assert one.equals(two)


@pytest.mark.slow
def test_ctrl_c_keeps_the_seeds_that_are_searched_and_exits_130(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arrive = Gateway.arrive
    seeds = []

    def interrupted(gateway, arrival):
        if arrival.request.request_id == 0:
            seeds.append(1)
        if len(seeds) == stop_at and arrival.request.request_id == 10:
            signal.raise_signal(signal.SIGINT)
        arrive(gateway, arrival)

    monkeypatch.setattr(Gateway, "arrive", interrupted)
    own = ("goodput.seeds=[0,1]", "goodput.jobs=1", "goodput.report=false")
    stop_at = 0
    assert main(["goodput", *QUICK, *own, "hydra.run.dir=whole"]) == 0
    stop_at, seeds[:] = len(seeds), []
    assert main(["goodput", *QUICK, *own, "hydra.run.dir=part"]) == 130
    assert json.loads((tmp_path / "part/summary.json").read_text())["interrupted"]
    whole, part = (pd.read_parquet(tmp_path / f"{name}/runs.parquet") for name in ("whole", "part"))
    assert part.equals(whole[whole.seed == 0])
    assert "interrupted" in capsys.readouterr().err
    one = ("goodput.seeds=[0]", *own[1:])
    stop_at, seeds[:] = 0, []
    assert main(["goodput", *QUICK, *one, "hydra.run.dir=whole_of_one"]) == 0
    stop_at, seeds[:] = len(seeds), []
    assert main(["goodput", *QUICK, *one, "hydra.run.dir=curve"]) == 130
    curve = pd.read_parquet(tmp_path / "curve/runs.parquet")
    assert set(curve.rate) < set(whole[whole.seed == 0].rate)  # what the search adds is not there
    stop_at, seeds[:] = 1, []
    assert main(["goodput", *QUICK, *own, "hydra.run.dir=none"]) == 130
    assert not (tmp_path / "none/summary.json").exists()


SHORT = ("goodput.seeds=[0]", "goodput.jobs=1", "goodput.report=false", "goodput.num_rates=2")


@pytest.mark.slow
def test_traffic_that_is_too_short_is_made_longer_and_has_the_answer_of_the_longer_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rates = []
    for number in (20, 60, 1000):
        own = (f"workload.num_requests={number}", f"hydra.run.dir={number}")
        assert main(["goodput", *SMALL[:3], *SHORT, *own]) == 0
        [arm] = json.loads(Path(f"{number}/summary.json").read_text())["arms"]
        rates.append(arm["highest_rate_per_s"]["mean"])
    assert max(rates) < 1.1 * min(rates)


def test_traffic_that_may_not_be_longer_has_a_lower_bound_and_exit_code_3(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = ("workload.num_requests=20", "goodput.max_requests=100", "hydra.run.dir=out")
    assert main(["goodput", *SMALL[:3], *SHORT, *own]) == 3
    printed = capsys.readouterr()
    text = " ".join(printed.out.split())
    assert "as set: at least " in text
    assert "the traffic is too short for a higher rate: its traffic lasts" in text
    assert "≥ " in text
    assert printed.err == "windtunnel: the traffic is too short to find the highest rate\n"
    [arm] = json.loads(Path("out/summary.json").read_text())["arms"]
    assert arm["is_at_least"]


CONVERSATIONS = (
    *("workload=conversation", "workload.num_conversations=50", "workload.think_time_s.mean=2"),
    *("workload.turns.mean=3", "workload.message_tokens.mean=32", "workload.answer_tokens.mean=32"),
    "workload.system_prompt_tokens.value=64",
)


@pytest.mark.slow
def test_the_rate_of_sessions_is_that_of_requests_while_as_many_begin_as_end(tmp_path, monkeypatch, capsys):
    """Chats that all begin at once are no load of a high rate."""
    monkeypatch.chdir(tmp_path)
    own = ("goodput.target=0.9", "goodput.precision=0.1", "engine.max_num_seqs=4", "hydra.run.dir=out")
    assert main(["goodput", *SMALL[:2], *CONVERSATIONS, *SHORT, *own]) == 0
    assert "its requests come in sessions of " in " ".join(capsys.readouterr().out.split())
    [arm] = json.loads(Path("out/summary.json").read_text())["arms"]
    runs = pd.read_parquet("out/runs.parquet")
    [highest] = runs[runs["part"] == "highest"].to_dict("records")
    rate = arm["highest_rate_per_s"]["mean"]
    assert highest["lasts_s"] > 2 * 2  # two think times at least
    assert 1 < rate / arm["sessions_per_s"]["mean"] < 4


@pytest.mark.slow
def test_seeds_that_give_the_same_run_are_run_once_and_have_an_interval_from_its_blocks_or_none(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i * 0.13:.2f},{40 + 7 * (i % 11)},{20 + i % 5}" for i in range(300)]
    Path("trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    trace = ("workload=plain_csv", "workload.path=trace.csv", "goodput.seeds=[0,1,2]", "goodput.jobs=1")
    assert main(["goodput", *SMALL[:2], *trace, *SHORT[2:], "hydra.run.dir=out"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the same for every seed and nothing else is random" in text
    [arm] = json.loads(Path("out/summary.json").read_text())["arms"]
    rate = arm["highest_rate_per_s"]
    assert ("95 % interval" in text) == (rate["low"] is not None)
    assert ("moving-block bootstrap" in text) == (rate["low"] is not None)
    runs = pd.read_parquet("out/runs.parquet")
    assert set(runs["seed"]) == {0}
    above = runs[runs["part"] == "above"]["rate"].item()
    if rate["low"] is not None:  # the steps of the search are part of it
        assert rate["low"] <= rate["mean"] < above <= rate["high"]
    known = runs.dropna(subset="share_low")
    assert (known["share_low"] <= known["share"]).all()
    assert len(known)


def test_rates_are_those_of_the_requests_that_were_flown():
    """The first requests of a day have another rate than its mean: the rate of arrivals is reported."""
    overrides = ["model=smollm2_135m", "hardware=l4", "workload=synthetic", "workload/arrivals=diurnal"]
    _, (one,) = build_arms(SOURCE.compose(overrides), Composition(SOURCE, overrides))
    assert rate_of(one.scenarios[0].source()) == pytest.approx(one.base_rate)
    runs = []

    def noted(scenario, source):
        runs.append(rate_of(source))
        return run(scenario, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "run", noted)
        assert one.measure(0, 20.0, 100).rate == 20.0
    assert runs == [pytest.approx(20.0)]


def test_figures_have_a_line_an_arm_and_the_target():
    arms = (arm("a"), arm("b"))
    runs = {name: [found(measured(2.0, 0.9), None, measured(2.0, 0.9))] for name in "ab"}
    outcome = Outcome(
        settings=GoodputSettings(slo_scales=(1.0, 2.0)),
        arms=arms,
        found=runs,
        scale_rate=1.0,
        highest=highest_of(arms, runs),
        interrupted=False,
    )
    names = [trace.name for trace in rate_figure(outcome).data if trace.mode == "lines+markers"]
    assert names == ["a", "a", "b", "b"]
    assert {shape.y0 for shape in rate_figure(outcome).layout.shapes if shape.y0 == shape.y1} == {0.9}
    assert list(scale_figure(outcome).data[1].y) == [0.7, pytest.approx(0.9)]


def test_the_rate_of_tasks_is_searched_with_an_slo_on_whole_tasks():
    _, (one,) = arms_of(*AGENTS, "slo=tasks", "slo.task_ms=60000")
    source = next(iter(one.scenarios.values())).source()
    assert rate_of(source) == source.num_requests / source.last_begin_s == one.base_rate
    slow, fast = (one.measure(0, rate, one.num_requests) for rate in (one.base_rate, 50 * one.base_rate))
    assert slow.term_shares.keys() == {"task"}
    assert slow.share == slow.term_shares["task"] > fast.share
    assert slow.scale_shares[1.0] == slow.share


def test_tasks_of_a_workload_without_tasks_are_refused():
    with pytest.raises(
        ConfigError, match=r"slo.task_ms=120000: the workload has no tasks; choose one that has"
    ):
        arms_of("slo=tasks")
    with pytest.raises(ConfigError, match=r"slo.publish_ms=9: the workload says nothing of what clients see"):
        arms_of("slo.publish_ms=9")
