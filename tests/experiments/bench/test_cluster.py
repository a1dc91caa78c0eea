"""The benchmarks of clusters run, and cells are parts of one traffic."""

import re

import pytest

from experiments.bench import cells as bench_cells
from experiments.bench import cluster as bench_cluster
from experiments.bench.cells import CellSource
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_scenario

pytestmark = pytest.mark.slow

CONVERSATIONS = (
    "workload=conversation",
    "workload.num_conversations=40",
    "model=smollm2_135m",
    "hardware=l4",
)


@pytest.fixture
def make_source():
    scenario = build_scenario(
        ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(["slo=none", *CONVERSATIONS])
    )
    return scenario.source


def test_it_prints_a_line_a_router_and_fleet(capsys):
    bench_cluster.main(
        ["2", "--routing", "random", "power_of_two", "--repeat=1", "--seconds=5", "--replica-seconds=5"]
    )
    heading, *lines = capsys.readouterr().out.splitlines()
    columns = re.findall(r"\S+(?: s\b| MiB)?", heading)
    assert [line.split()[:2] for line in lines] == [[routing, "2"] for routing in ("random", "power_of_two")]
    for line in lines:
        number = dict(zip(columns, line.split(), strict=True))
        total_us = 1e6 * float(number["CPU s"]) / int(number["requests"])
        assert float(number["us/request"]) == pytest.approx(total_us, rel=0.2)
        assert 0 < float(number["figures"]) < float(number["us/request"])


def test_cells_have_every_conversation_once_and_system_prompts_of_their_own(make_source):
    cells = [CellSource(source=make_source(), cell=k, num_cells=3) for k in range(3)]
    parts = [{(a.request.session_id, a.at_s, a.request.prompt) for a in cell.arrivals()} for cell in cells]
    whole = {(a.request.session_id, a.at_s, a.request.prompt) for a in make_source().arrivals()}
    assert set.union(*parts) == whole
    assert sum(map(len, parts)) == len(whole)
    assert {prompt.segments[0].content_id % 3 for _, _, prompt in parts[1]} == {1}


def test_cells_that_do_not_divide_the_fleet_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_cells.main(["--replicas=5", "--cells=2"])
    assert "--cells must divide --replicas" in capsys.readouterr().err


def test_cells_stand_beside_the_whole_run_figure_by_figure(capsys):
    options = ["--replicas=2", "--cells=2", "--sample=2", "--seconds=9"]
    bench_cells.main(options)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:18].strip() for line in lines[1:-1]] == list(bench_cells.FIGURES)
    assert "+0.00%" in lines[1], "all requests are in the cells"
