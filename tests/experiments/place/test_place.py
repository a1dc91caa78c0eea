"""`windtunnel place`: the shipped fleet, its textbook form, the prices behind it, and refused settings."""

from __future__ import annotations

import json
import re

import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.place.problem import place
from experiments.place.settings import read_settings
from hwmodels.device import TimeSlicing
from policies.parallelism import Load
from policies.placement.greedy import BestFitDecreasing, DensestFirst, FirstFitDecreasing
from sim.settings.scenario import build_scenario
from sim.setup.estimates import ReplicaNeeds, hostings_of, pool_of, weights_only

GPUS = "gpus=[{name:a10g,count:1},{name:a100_40gb_sxm,count:1}]"


def models(**changes):
    """Returns the setting of two models, 8 B and 13 B parameters at 8 bits; `changes` are of the second."""
    second = "".join(f",{key}:{value}" for key, value in {"demand": 500, **changes}.items())
    return f"models=[{{name:llama3_1_8b,weights:int8,demand:1000}},{{name:llama2_13b,weights:int8{second}}}]"


def placed(*overrides):
    cfg = ConfigSource(config_name="place", dirs=[CONFIG_DIR]).compose_plain(list(overrides))
    return place(read_settings(cfg), [CONFIG_DIR])


@pytest.fixture(scope="module")
def shipped():
    return placed()


def holdings(plan):
    """Returns the models that each kind of GPU holds."""
    return {unit.pool: unit.models for unit, _ in plan.units}


def test_the_shipped_fleet_serves_every_model(shipped):
    """70 B needs the 80 GB alone, 34 B takes 48 GB, 13 B shares 40 GB with 8 B, which 24 GB do not serve."""
    assert holdings(shipped.plan) == {
        "a100_80gb_sxm": ("llama3_1_70b",),
        "l40s": ("codellama_34b",),
        "a100_40gb_sxm": ("llama2_13b", "llama3_1_8b"),
        "a10g": ("llama3_1_8b",),
    }
    assert shipped.plan.met
    assert shipped.plan.value == pytest.approx(1000 + 500 * 1.6 + 300 * 4.2 + 200 * 8.8)


@pytest.mark.parametrize("greedy", [FirstFitDecreasing(), BestFitDecreasing(), DensestFirst()])
def test_greedy_placements_of_the_shipped_fleet_are_worth_less_or_cost_more(shipped, greedy):
    plan = greedy.place(shipped.problem)
    assert plan.value <= shipped.plan.value * (1 + 1e-6)
    assert (plan.value, -plan.usd_per_hour) <= (shipped.plan.value * (1 + 1e-6), -shipped.plan.usd_per_hour)


def test_by_weights_alone_three_13b_fill_40_gb_better_than_one_34b():
    """The textbook: 3 x 13.2 = 39.5 of 42.5 GB, worth 4.8; 34.0 GB worth 4.2."""
    puzzle = placed("counts=replicas", "max_models_per_gpu=10").plan
    assert holdings(puzzle)["a100_40gb_sxm"] == ("llama2_13b",) * 3
    assert holdings(puzzle)["a100_80gb_sxm"] == ("codellama_34b", "codellama_34b", "llama2_13b")


def test_what_is_served_is_printed_and_written(tmp_path, capsys):
    file = tmp_path / "placement.json"
    assert main(["place", GPUS, models(demand=1200), f"out={file}"]) == 0
    out = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert f"value {written['value']:,.1f}, {sum(written['gpus'].values())} of 2 GPUs" in out
    for model, amount in written["served"].items():
        assert re.search(rf"{model} .* {amount:,.1f} ", out)
    assert written["replicas"].keys() == {"llama3_1_8b", "llama2_13b"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gpus=[{name:a10g,count:-1}]"], r"gpus\[0\].count=-1: must be >= 0"),
        (["gpus=[{name:a10g},{name:h100}]"], r"gpus\[1\].name=h100: .*nearest: h100_"),
        (["gpus=[{name:a10g,count:0}]"], r"gpus\[0\].count=0: must be >= 1"),
        (["gpus=[{name:a10g,coutn:1}]"], r"gpus\[0\].coutn: no such setting; nearest: gpus\[0\].count"),
        (["gpus=[{name:a10g},{name:a10g}]"], r"gpus\[1\].name=a10g: must be named only once; gpus\[0\]"),
        (["models=[]"], r"models=\[\]: must have at least one entry"),
        (["gpus=[]"], r"gpus=\[\]: must have at least one entry"),
        (["models=[{name:llama_3}]"], r"models\[0\].name=llama_3: .*nearest: llama"),
        (["models=[{name:hf}]"], r"models\[0\].name=hf on a10g: model.path: must be given"),
        ([models(weights="int7")], r"models\[1\].weights=int7: must be one of"),
        (["objective=cost", models(demand="1e6")], "objective=cost: no placement serves .*; allow more"),
        (["objective=cost", models(demand="null")], r"models\[1\].demand=null: objective=cost .*llama2_13b"),
        ([models(demand=-1)], r"models\[1\].demand=-1: must be a finite number >= 0, or null for no limit"),
        ([models(value=-1)], r"models\[1\].value=-1: must be a finite number >= 0"),
        (
            ["models=[{name:glm_5,demand:9}]", "tensor_parallel_sizes=[1]", "objective=cost"],
            r"models\[0\].name=glm_5: fits none of the GPUs.*glm_5 on a10g: .*needs",
        ),
        (["tensor_parallel_sizes=[1,3]"], r"tensor_parallel_sizes=\[1, 3\]: must be one or more of 1, 2"),
        (["tensor_parallel_sizes=[]"], r"tensor_parallel_sizes=\[\]: must be one or more of 1, 2"),
        (["min_seqs=0"], "min_seqs=0: must be >= 1"),
        (["time_slice_ms=0"], "time_slice_ms=0: must be a finite number > 0 ms"),
        (["out=no/such/folder.json"], "out=no/such/folder.json: there is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_exit_2_with_one_message(overrides, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["place", GPUS, models(), *overrides]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# Prices


@pytest.fixture(scope="module")
def deployment():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return build_scenario(source.compose(["workload=poisson", "model=llama2_13b", "hardware=a100_80gb_sxm"]))


NEEDS = ReplicaNeeds(load=Load(512, 256), min_seqs=8)


def test_a_replica_needs_what_the_memory_plan_says_and_room_for_its_sequences(deployment):
    """13 B keep 800 KiB of KV a token: 8 x 768 tokens are 5 GB."""
    (one, *_), _ = hostings_of("m", "g", deployment, NEEDS)
    assert one.bytes_each - deployment.plan_memory().fixed_bytes == pytest.approx(8 * 768 * 800 * 1024)


def test_wider_replicas_need_less_of_each_gpu_and_serve_more(deployment):
    found, refused = hostings_of("m", "g", deployment, NEEDS)
    assert [hosting.num_gpus for hosting in found] == [1, 2, 4, 8]
    assert refused == {}
    sizes = [hosting.bytes_each for hosting in found]
    rates = [hosting.rate(pool_of("g", 8, deployment, TimeSlicing()).memory_bytes) for hosting in found]
    assert sizes == sorted(sizes, reverse=True)
    assert rates == sorted(rates)


def test_more_memory_holds_more_sequences_and_serves_more(deployment):
    (one, *_), _ = hostings_of("m", "g", deployment, NEEDS)
    rates = [one.rate(one.bytes_each * share) for share in (1, 1.2, 1.5, 2)]
    assert rates == sorted(rates)
    assert rates[-1] > 1.5 * rates[0]


def test_what_does_not_fit_is_refused_with_the_numbers(deployment):
    found, refused = hostings_of("m", "g", deployment, ReplicaNeeds(load=Load(512, 256), min_seqs=120))
    assert [hosting.num_gpus for hosting in found] == [2, 4, 8]
    assert re.match(r"min_seqs=120: \d+\.\d GB on each GPU", refused[1])


def test_the_textbooks_replicas_are_weights_on_as_few_gpus_as_hold_them(deployment):
    pool = pool_of("g", 8, deployment, TimeSlicing())
    (wide,) = weights_only("m", pool, pool.memory_bytes * 1.5)
    assert (wide.num_gpus, wide.rate(0.0)) == (2, 1.0)
