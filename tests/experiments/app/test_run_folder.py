"""The folder of a run: its files, and how its path is displayed."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.app.run_folder import seen_from_here, write_study
from experiments.app.settings.compose import resolved


def test_a_study_leaves_its_resolved_config_and_its_summary(tmp_path):
    cfg = OmegaConf.create({"seed": 3, "same": "${seed}"})
    write_study(tmp_path, resolved(cfg), {"verdict": "größer"})
    assert OmegaConf.load(tmp_path / "config.yaml") == {"seed": 3, "same": 3}
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == {"verdict": "größer"}


@pytest.mark.parametrize(("path", "shown"), [("here/out", "out"), ("elsewhere", "{}/elsewhere")])
def test_a_folder_is_shown_relative_to_the_current_one_if_it_lies_below(tmp_path, monkeypatch, path, shown):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert seen_from_here(tmp_path / path) == shown.format(tmp_path)
    assert Path(seen_from_here(tmp_path / path)).resolve() == tmp_path / path
