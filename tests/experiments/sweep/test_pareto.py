"""The page of a sweep: the front of both throughputs, short labels for mappings, and what seeds tell."""

import math

import pandas as pd

from experiments.sweep.figures import pareto_front
from experiments.sweep.grid import PARETO, GridAxis, grid_of
from experiments.sweep.page import PARETO_TITLE, drawings, rows
from experiments.sweep.settings import ReportSettings

USER, GPU = (metric.key for metric in PARETO)
PAIRS = [
    "{prompt_tokens:{_target_:Fixed,value:512},output_tokens:{_target_:Fixed,value:64}}",
    "{prompt_tokens:{_target_:Fixed,value:2048},output_tokens:{_target_:Fixed,value:64}}",
]


def grid(points, keys):
    table = pd.DataFrame([{**labels, USER: user, GPU: gpu, "status": "done"} for labels, user, gpu in points])
    return grid_of(table, keys, ReportSettings(), [])


def test_the_front_joins_what_no_other_configuration_beats_in_both():
    found = grid(
        [({"tp": tp}, user, gpu) for tp, user, gpu in [(1, 50, 900), (2, 80, 700), (4, 70, 300)]], ["tp"]
    )
    front = pareto_front(found).data[-1]
    assert front.name == "Pareto front"
    assert sorted(zip(front.x, front.y, strict=True)) == [(50, 900), (80, 700)]
    assert PARETO_TITLE in drawings(found)


def test_one_configuration_has_no_front():
    assert pareto_front(grid([({"tp": 1}, 50, 900)], ["tp"])) is None


def test_mappings_are_labelled_by_what_differs():
    found = grid([({"lengths": pair}, 50 + i, 900 - i) for i, pair in enumerate(PAIRS)], ["lengths"])
    assert [row[0] for row in rows(found)[1:]] == ["512", "2048"]
    axis = GridAxis(key="lengths", values=tuple(PAIRS))
    assert [axis.label(pair) for pair in PAIRS] == ["512", "2048"]
    assert GridAxis(key="batching", values=("chunked", "static")).label("static") == "static"


def test_seeds_that_give_the_same_run_have_no_interval():
    """As those of a trace do; where a figure is equal by chance, others differ."""
    points = [({"tp": tp, "seed": seed}, 50 + (tp == 2) * seed, 900) for tp in (1, 2, 4) for seed in range(3)]
    found = grid(points, ["tp", "seed"])
    assert all(math.isnan(found.cells[1,][key].low) for key in (USER, GPU))
    assert found.cells[2,][USER].low < 51 < found.cells[2,][USER].high
    assert found.cells[2,][GPU].low == 900
    assert any(note.startswith("All seeds give the same run of 2 of 3 config") for note in found.caveats)
    assert not any("same run" in note for note in grid(points[3:6], ["tp", "seed"]).caveats)
