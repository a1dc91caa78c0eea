"""`study`: the findings of the commands in Python, with objects in arms, and its errors."""

import json

import pytest

from experiments.app.cli import main
from policies.batching.chunked import Chunked
from sim import study
from sim.settings.errors import ConfigError

FEW = ("workload=poisson", "workload.num_requests=40")


class Mine(Chunked):
    """A policy of the user's, which decides as the usual one does."""


def test_the_findings_are_those_of_the_command(tmp_path):
    arms = {"usual": "", "static": ["batching=static"], "small": {"engine__max_num_seqs": 2}}
    found = study("compare", *FEW, arms=arms, compare__seeds=[0, 1], compare__jobs=1)
    lines = "compare.arms=['usual:','static: batching=static','small: engine.max_num_seqs=2']"
    folder = tmp_path / "run"
    words = [*FEW, lines, "compare.seeds=[0,1]", "compare.jobs=1", "compare.report=false"]
    assert main(["compare", *words, f"hydra.run.dir={folder}"]) == 0
    record = json.loads((folder / "summary.json").read_text())
    assert json.loads(json.dumps(dict(found.record))) == record
    assert found.verdicts == record["verdicts"]
    assert list(found.table["arm"]) == ["usual", "static", "small"] * 2
    assert found.is_whole
    assert found.verdicts[0] in str(found)  # and all else that the command prints
    assert list(found.figures) == ["Figures"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_arm_may_have_an_object(jobs):
    arms = {"usual": "", "mine": {"batching": Mine(), "engine__max_num_seqs": 128}}
    found = study("compare", *FEW, arms=arms, compare__seeds=[0, 1], compare__jobs=jobs)
    by_arm = found.table.groupby("arm")["ttft.p99_s"].mean()
    assert by_arm["mine"] == by_arm["usual"]
    assert "<th>batching</th><td>" in found.page.sections["Settings that differ between the arms"]


@pytest.mark.slow
def test_goodput_takes_objects_too(tmp_path):
    settings = {"goodput__seeds": [0], "goodput__num_rates": 2, "goodput__jobs": 1, "goodput__requests": 100}
    found = study("goodput", *FEW, arms={"usual": "", "mine": {"batching": Mine()}}, **settings)
    rates = [one["highest_rate_per_s"]["mean"] for one in found.record["arms"]]
    assert rates[0] == rates[1] > 0
    assert set(found.table["arm"]) == {"usual", "mine"}
    found.write(tmp_path / "here", page=False)
    names = sorted(file.name for file in (tmp_path / "here").iterdir())
    assert names == ["config.yaml", "runs.parquet", "summary.json"]


def test_a_sweep_is_a_table_of_all_runs(tmp_path):
    axes = ["batching=chunked,static", "load=0.5,1", "launcher.jobs=1"]
    found = study("sweep", *FEW, *axes)
    assert found.table[["batching", "load", "status"]].values.tolist() == [
        [batching, load, "done"] for batching in ("chunked", "static") for load in (0.5, 1.0)
    ]
    assert "TTFT p99, ms" in found.figures
    assert "chunked" in str(found)
    found.write(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        *("config.yaml", "runs.parquet", "summary.json", "sweep.html"),
    }


def local():
    class Local(Chunked):
        pass

    return Local()


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("compar", {}, "study=compar: no such study; nearest: compare"),
        ("capacity", {"arms": {"one": "load=1"}}, "arms: capacity has candidates in place of arms"),
        ("sweep", {"arms": {"one": "load=1"}}, "arms: sweep combines values of settings in place of arms"),
        ("sweep", {}, "no setting has several values"),
        ("compare", {"batching": Mine(), "arms": {"one": "", "two": ""}}, "an object belongs to an arm"),
        ("whatif", {"arms": {"one": {"batching": Mine()}}}, "batching=Mine: whatif takes no objects"),
        ("compare", {"arms": {"a:b": "", "c": ""}}, "arms='a:b': the name of an arm must be"),
        ("compare", {"arms": {" a": {"batching": Mine()}, "c": ""}}, "arms=' a': the name of an arm must be"),
        ("compare", {"arms": {"a": 3, "c": ""}}, "arms.a=3: must be overrides"),
        ("compare", {"arms": ["a: load=1"]}, "arms: must be a mapping of names to overrides"),
        ("compare", {"arms": {"one": {"a.b": Mine()}, "two": ""}}, "a.b=Mine: an object can only replace"),
        ("compare", {"arms": {"one": {"nothing": Mine()}, "two": ""}}, "arm one: nothing: no such setting"),
        (
            "compare",
            {"arms": {"one": {"workload": Mine()}, "two": ""}},
            "workload=Mine: must not be an object",
        ),
        ("compare", {"arms": {"one": ""}}, "must be two or more"),
        (
            "compare",
            {"arms": {"one": {"batching": local()}, "two": ""}, "compare__jobs": 2},
            "arm one, seed 0: cannot be sent to another process",
        ),
    ],
)
def test_mistakes_are_named(name, given, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        study(name, *FEW, **given)
