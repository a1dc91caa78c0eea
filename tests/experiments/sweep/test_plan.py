"""The plan of a sweep: its points, their settings, and sweeps that are refused."""

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import experiments.sweep.folder as folder_module
from experiments.app.settings.compose import resolved
from experiments.sweep.plan import MAX_CHECKED_VALUES, Plan, plan_of
from experiments.sweep.run_task import tasks_of
from sim.report.files import config_yaml
from sim.settings.errors import ConfigError
from tests.experiments.sweep.small_sweeps import SMALL, SOURCE, sweep

axes = st.lists(st.integers(2, 5), min_size=1, max_size=4)


def plan_with(sizes):
    keys = [f"workload.k{i}" for i in range(len(sizes))]
    overrides = [
        f"{key}={','.join(str(10 * i + v) for v in range(n))}"
        for i, (key, n) in enumerate(zip(keys, sizes, strict=True))
    ]
    return plan_of(["replicas=3", *overrides], SOURCE)


@settings(max_examples=8)
@given(sizes=axes)
def test_points_are_every_combination_in_the_order_of_a_multirun(sizes):
    plan = plan_with(sizes)
    points = list(plan.points())
    assert [point.index for point in points] == list(range(math.prod(sizes)))
    assert [list(point.overrides) for point in points] == SOURCE.points(
        ["replicas=3", *(f"{axis.key}={','.join(map(str, axis.values))}" for axis in plan.axes)]
    )


@settings(max_examples=8)
@given(sizes=axes)
def test_a_plan_survives_its_file(sizes):
    plan = plan_with(sizes)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert list(again.points()) == list(plan.points())


@settings(max_examples=8)
@given(sizes=st.lists(st.sampled_from([2, 3, MAX_CHECKED_VALUES, 45]), min_size=1, max_size=3))
def test_the_points_built_beforehand_have_every_value_but_are_few(sizes):
    plan = plan_with(sizes)
    seen = [folder_module._values_at(plan, index) for index in plan.checked()]
    assert len(seen) <= 1 + sum(min(size, MAX_CHECKED_VALUES) for size in sizes)
    for axis in plan.axes:
        found = {row[axis.key] for row in seen}
        assert {axis.values[0], axis.values[-1]} <= found
        assert len(found) == min(len(axis.values), MAX_CHECKED_VALUES)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine=vllm,sglang", "engine.max_num_seqs=8,16"],
        ["engine.max_num_batched_tokens=512,1024", "seed=1,2", "slo.name=a,b"],  # others refer to it
        ["sim.until_s=null,10", "metrics.warmup_s=1e-3,2"],
        pytest.param(["pools=none,two_gpus", "load=1,2"], marks=pytest.mark.slow),
        pytest.param(["failures=random_crashes", "failures.events.0.mtbf_s=60,90"], marks=pytest.mark.slow),
        ["++slo.name=a,'b c'"],
    ],
    ids=" ".join,
)
def test_a_point_has_the_settings_that_hydra_would_give_it(overrides):
    plan = plan_of([*SMALL, *overrides], SOURCE)
    tasks = tasks_of(list(plan.points()), SOURCE, [], tables=False)
    for task in tasks[-1:]:
        cfg = SOURCE.compose(task.point.overrides)
        wanted = {
            k: v
            for k, v in OmegaConf.to_container(cfg, resolve=True).items()
            if k not in ("sweep", "report", "launcher")
        }
        assert task.config() == wanted


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1"], "^no setting has several values"),
        (["replicas=1,2", "replicas=3"], "^replicas: is given twice"),
        (
            ["batching=chunked", "batching=orca"],
            "^batching: is given twice; give all its values once, as batching=chunked,orca",
        ),
        (["batching=chunked,orca", "batching=static", "seed=1,2"], "as batching=chunked,orca,static"),
        (["replicas=1,1"], "^replicas=1,1: must be different"),
        (["load=1,1.0"], "^load=1,1.0: must be different"),
        (["workload.arrivals.x=[1,true],[1.0,true]"], "must be different"),
        (["replicas=interval(1,2)"], "^a sweep needs a list of values"),
        (["seed=1,2", "launcher=local,ray"], "^launcher: must have one value"),
        (["seed=1,2", "sweep.tables=true,false"], "^sweep.tables: must have one value"),
        (["output.tables=true,false"], "^output.tables: is not a setting of a sweep; sweep.tables=true"),
        (["seed=range(0,1000)", "load=range(1,1000)"], "^999,000 runs: must be <= 100,000"),
        (["batching=glob(nothing*)", "seed=1,2"], "has no value; a glob matches choices"),
    ],
)
def test_what_is_no_sweep_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(overrides, SOURCE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["replicas=1,0"],
            "as each is an engine in memory (at run 1 (replicas=0)); sweep.unbuildable=skip",
        ),
        (["replikas=1,2"], "replikas: no such group or setting; nearest: replicas"),
        (["batching=chunked,chunkd"], "batching=chunkd: no such choice; nearest: chunked"),
        (["seed=1,2", "launcher.jobs=0"], "launcher.jobs=0: must be >= 1"),
        (
            ["seed=1,2", "report.x=load"],
            "report.x=load: is not an axis of this sweep; its only axis is the seed",
        ),
        (
            ["load=1,2", "report.facet=[lode]"],
            "report.facet=lode: is not an axis of this sweep; nearest: load",
        ),
        (["seed=1,2", "report.format=[pdf]"], "report.format=pdf: no such format"),
        (["seed=1,2", "--multirun"], "--multirun: not needed, because a sweep always"),
        (["seed=1,2", "--cfg", "job"], "--cfg, --info, --resolve: apply to single runs"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(overrides, message, capsys):
    assert sweep(*SMALL, "hydra.run.dir=out", *overrides) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("aeon01.:-~ '\n", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(config=st.dictionaries(st.text("abc", min_size=1), plain, max_size=4))
def test_a_config_is_read_back_as_it_was(config):
    again = OmegaConf.to_container(OmegaConf.create(config_yaml(config)))
    assert again == config


@pytest.mark.parametrize(
    "config",
    [
        {"a": 1, "b": {"c": "${a}"}, "d": ["${b.c}", "x"], "e": "${b}"},
        {"a": "2", "b": "n${a}", "c": "${.b}"},  # OmegaConf's part
        {"a": "${b}", "b": "${c}", "c": None},
    ],
)
def test_interpolations_are_resolved_as_omegaconf_does(config):
    assert resolved(config) == OmegaConf.to_container(OmegaConf.create(config), resolve=True)


def test_an_interpolation_without_an_end_is_reported():
    with pytest.raises(ConfigError, match=r"^a: "):
        resolved({"a": "${nothing}"})
    with pytest.raises(ConfigError):
        resolved({"a": "${b}", "b": "${a}"})


def test_axes_are_listed_with_every_choice_of_a_glob():
    plan = plan_of(["scheduling=glob(s*)", "seed=range(0,3)"], SOURCE)
    scheduling, seed = plan.axes
    assert {"shortest_job_first", "shortest_remaining"} <= set(scheduling.values)
    assert seed.values == (0, 1, 2)
    assert plan.num_points == len(list(itertools.product(scheduling.values, seed.values)))
