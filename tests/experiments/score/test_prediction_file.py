"""The file of predictions: rows as they come, interruptions, and what `resume` continues."""

import json
import re

import pandas as pd
import pytest

import experiments.score.predictions as predictions_module
from experiments.app.cli import main
from experiments.score.prediction_file import PredictionFile
from experiments.study.launchers.outcome import Outcome, WorkerDiedError
from hwmodels.levels import Spec
from sim.engine.clock import Interrupt
from sim.settings.errors import ConfigError
from tests.experiments.score.measured_rows import SILICON

ROWS = [{**SILICON, "id": f"row-{i}", "isl": 100 + 10 * i} for i in range(4)]
ROWS[1]["gpu"] = "tpu, v5"


@pytest.fixture
def score(tmp_path, monkeypatch, capsys):
    """Returns score(**settings): exit code and output; the table is measured.csv, the file predicted.csv."""
    monkeypatch.chdir(tmp_path)
    pd.DataFrame(ROWS).to_csv("measured.csv", index=False)

    def run(**settings):
        given = {"measured": "measured.csv", "out": "predicted.csv", "jobs": 1, **settings}
        code = main(["score", *(f"{name}={value}" for name, value in given.items())])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def interrupted(score, monkeypatch, tmp_path):
    """Runs score, which Ctrl-C interrupts at the third row; returns the ids that are predicted later on."""
    predict, asked = predictions_module.predict_row, []

    def at_third(kind, latency, row):
        if row["id"] == "row-2" and not asked:
            asked.append("Ctrl-C")
            raise KeyboardInterrupt
        if asked:
            asked.append(row["id"])
        return predict(kind, latency, row)

    monkeypatch.setattr(predictions_module, "predict_row", at_third)
    code, said = score()
    assert code == 130
    assert "2 rows left; continue with the same settings and resume=true" in said
    assert "1 of 4 rows predicted" in said
    return asked


def ids(path):
    return pd.read_csv(path)["id"].tolist()


def test_ctrl_c_keeps_rows_and_resume_predicts_only_the_others(score, interrupted, tmp_path):
    out = tmp_path / "predicted.csv"
    assert ids(out) == ["row-0", "row-1"]
    assert score(resume="true")[0] == 0
    assert interrupted == ["Ctrl-C", "row-2", "row-3"]
    resumed = out.read_bytes()
    assert not list(tmp_path.glob("*.json"))
    assert score()[0] == 0
    assert out.read_bytes() == resumed, "as if there had been no interruption"


def test_a_line_that_a_kill_cut_is_predicted_again(score, interrupted, tmp_path):
    out = tmp_path / "predicted.csv"
    with out.open("a") as file:
        file.write("row-2,1.5,2")
    assert score(resume="true")[0] == 0
    assert interrupted == ["Ctrl-C", "row-2", "row-3"]
    assert ids(out) == ["row-0", "row-1", "row-2", "row-3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"where": "'isl>1'"}, "where is now isl>1, was None when the file was begun; set it as before"),
        ({"latency": "spec"}, r"latency is now Spec\(jitter=None\), was Calibrated"),
        ({"measured": "other.csv"}, "content of measured is now [0-9a-f]+, was [0-9a-f]+ when"),
    ],
)
def test_resume_with_other_settings_is_refused(score, interrupted, tmp_path, change, message):
    pd.DataFrame(ROWS[:3]).to_csv("other.csv", index=False)
    before = (tmp_path / "predicted.csv").read_bytes()
    code, said = score(resume="true", **change)
    assert code == 2
    assert re.search(message, said), said
    assert (tmp_path / "predicted.csv").read_bytes() == before


def test_resume_starts_what_was_never_begun_and_refuses_what_is_finished(score):
    assert score(resume="true")[0] == 0
    code, said = score(resume="true")
    assert code == 2
    assert "out=predicted.csv: was not interrupted (there is no predicted.csv.unfinished.json" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,x\n", "line 1 must be id,ttft_ms,"),
        (
            "id,ttft_ms,tpot_ms,e2e_ms,output_tokens_per_s_per_gpu,status\nrow-0,a,1,1,1,ok\n",
            "line 2: is dam",
        ),
        ("id,ttft_ms,tpot_ms,e2e_ms,output_tokens_per_s_per_gpu,status\nrow-0,1\n", "line 2: is damaged"),
    ],
)
def test_a_changed_file_is_refused(score, interrupted, tmp_path, text, message):
    (tmp_path / "predicted.csv").write_text(text)
    code, said = score(resume="true")
    assert code == 2
    assert message in said


def test_a_fresh_run_does_not_mix_with_rows_of_an_earlier_one(tmp_path):
    """A kill between the first writes must not leave old rows beside new settings."""
    file = PredictionFile(path=tmp_path / "p.csv", columns=("id", "x", "status"), settings={"kind": "a"})
    file.begin()
    file.append({"id": 0, "x": 1.5, "status": "ok"})
    file.close()
    other = PredictionFile(path=tmp_path / "p.csv", columns=("id", "x", "status"), settings={"kind": "b"})
    with pytest.raises(ConfigError, match="kind is now b, was a"):
        other.resume()
    other.begin()
    assert (tmp_path / "p.csv").read_text() == "id,x,status\n"
    assert json.loads((tmp_path / "p.csv.unfinished.json").read_text()) == {"kind": "b"}


def test_numbers_and_reasons_survive_the_file(tmp_path):
    written = PredictionFile(path=tmp_path / "p.csv", columns=("id", "x", "status"), settings={})
    written.begin()
    written.append({"id": 7, "x": 0.1 + 0.2, "status": "ok"})
    written.append({"id": 8, "status": 'a "quoted", reason'})
    read = PredictionFile(path=tmp_path / "p.csv", columns=("id", "x", "status"), settings={})
    read.resume()
    pd.testing.assert_frame_equal(read.table([7, 8, 9]), written.table([7, 8, 9]))


def test_a_killed_process_is_a_reason_and_other_errors_are_bugs(monkeypatch):
    outcomes = [Outcome(0, None, WorkerDiedError("its process was killed (SIGKILL)"))]

    def given(self, work, tasks, interrupt):
        yield from outcomes

    monkeypatch.setattr(predictions_module.Local, "outcomes", given)
    (row,) = predictions_module.predictions("silicon", Spec(), ROWS, 2, Interrupt())
    assert row == {"id": "row-0", "status": "its process was killed (SIGKILL)"}
    outcomes[:] = [Outcome(0, None, RuntimeError("bug"))]
    with pytest.raises(RuntimeError, match="bug"):
        list(predictions_module.predictions("silicon", Spec(), ROWS, 2, Interrupt()))


def test_rows_of_several_processes_end_in_the_order_of_the_table(score, tmp_path):
    assert score(jobs=2)[0] == 0
    assert ids(tmp_path / "predicted.csv") == [row["id"] for row in ROWS]
