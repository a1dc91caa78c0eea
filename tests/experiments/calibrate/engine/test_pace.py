"""The pace of the machine that is measured, and calibrations that are too noisy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.app.cli import main
from experiments.calibrate.engine import pace, run
from experiments.calibrate.engine.files import Files
from experiments.calibrate.engine.pace import Pace, in_words, is_noisy, paces, variation
from experiments.calibrate.engine.residuals import errors_by_kind, residual_table
from experiments.calibrate.engine.run import Results
from experiments.calibrate.engine.steps import Step

torch.set_num_threads(1)


def test_the_pace_of_a_machine_comes_out_of_what_it_did():
    """Steps of 1 ms to 1 s in random order, 10 % of noise; by and by the machine takes 1.4 times as long."""
    random = np.random.default_rng(0)
    usual_s, places = np.geomspace(1e-3, 1, 100), random.permutation(np.repeat(np.arange(100), 10))
    slower = np.linspace(1, 1.4, 1000)
    seconds = usual_s[places] * slower * random.lognormal(0, 0.1, 1000)
    found = paces(places, seconds)
    assert np.median(found) == pytest.approx(1)
    assert np.std(np.log(found / slower)) < 0.06
    assert paces(np.zeros(3, int), np.ones(3)).tolist() == [1, 1, 1]


def test_the_pace_may_vary_by_a_quarter_over_all_measurements():
    calm, slow = Pace(1.0, 0.95, 1.1), Pace(1.15, 1.05, 1.2)
    assert variation(calm) == pytest.approx(1.1 / 0.95 - 1)
    assert variation(calm, slow) == pytest.approx(1.2 / 0.95 - 1)
    assert Pace.of(np.linspace(1, 2, 101), 0.9) == pytest.approx((1.5, 1.1, 1.9, 0.9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "MOST_VARIATION", 0.25)
        patch.setattr(pace, "LEAST_CORE_SHARE", 0.8)
        assert is_noisy(calm._replace(core_share=0.7))
        assert [is_noisy(calm), is_noisy(slow), is_noisy(calm, slow), is_noisy()] == [
            False,
            False,
            True,
            False,
        ]
        assert in_words(calm, slow) == (
            "the machine's pace varied by 26 % (a reference step took 0.95 to 1.20 times its usual time; "
            "25 % is accepted) and its thread got 100 % of a core (at least 80 % is needed)"
        )


def test_a_noisy_calibration_is_written_and_refused(served, tmp_path, monkeypatch, capsys):
    """The measured machine is replaced by a recorded one that became slower by half."""
    files = Files.under(tmp_path, "cpu", "tiny")
    errors = errors_by_kind(residual_table([Step(contexts=(4,))], [1.0], [1.1]))
    operators = pd.DataFrame(
        columns=["operator", "component", "calls", "points", "smallest_us", "largest_us"]
    )
    contents = {files.report: "{}"}
    found = Results(operators, errors, ["A note."], "Next.", files, Pace(1.0, 0.9, 1.35), contents)
    files.report.parent.mkdir()
    monkeypatch.setattr(run, "measure", lambda *given: found)
    monkeypatch.setattr(pace, "MOST_VARIATION", 0.25)
    monkeypatch.setattr(pace, "LEAST_CORE_SHARE", 0.8)
    assert main(["calibrate", "device=cpu", "model=random_8m", f"out={tmp_path}"]) == 3
    said = capsys.readouterr()
    assert "Next." in said.out
    assert files.report.read_text() == "{}"
    assert said.err == (
        "windtunnel: the machine was too noisy: the machine's pace varied by 50 % (a reference step took "
        "0.90 to 1.35 times its usual time; 25 % is accepted) and its thread got 100 % of a core (at "
        "least 80 % is needed); the files are written; measure again while fewer other programs run\n"
    )
    found = found._replace(pace=Pace(1.0, 0.95, 1.1))
    assert main(["calibrate", "device=cpu", "model=random_8m", f"out={tmp_path}"]) == 0
