"""Seeds that give the same run are one run."""

import pandas as pd
import pytest

from experiments.study.runs import Point, run_all
from experiments.study.seeds import distinct_seeds
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.resolve import resolved
from sim.settings.scenario import build_scenario
from sim.settings.variants import Variants

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
