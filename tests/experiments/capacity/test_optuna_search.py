"""The search with Optuna: it resumes its study, and refuses one of another question."""

import json
import math

import pytest

from experiments.app.cli import main
from experiments.capacity import optuna_search
from experiments.capacity.candidates import build_question
from sim.settings.errors import ConfigError
from tests.experiments.capacity.questions import SOURCE, TINY, question_of, run_with


@pytest.mark.slow
def test_optuna_goes_on_from_its_study_and_finds_what_the_whole_search_finds(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    asked = [*TINY, "capacity.seeds=[0]", "capacity.report=false"]
    assert main(["capacity", *asked]) == 0
    whole = json.loads((tmp_path / "out/summary.json").read_text())
    digest = optuna_search.digest_of(build_question(SOURCE.compose(asked), SOURCE, asked))
    more = ["capacity.search=optuna", "capacity.trials=1", "capacity.study=study.log"]
    for trials in (1, 2, 2):  # the second call simulates the other candidate, the third none
        assert main(["capacity", *asked, *more, "overwrite=true"]) == 0
        study = optuna_search._study(
            optuna_search.load_optuna(),
            "study.log",
            0,
            1.0,
            digest,
        )
        assert sum("runs" in trial.user_attrs for trial in study.trials) == trials
    found = json.loads((tmp_path / "out/summary.json").read_text())
    assert found["ranked"][0]["candidate"] == whole["ranked"][0]["candidate"]
    assert found["ranked"][0]["usd_per_hour"] == whole["ranked"][0]["usd_per_hour"]
    assert main(["capacity", *asked, *more, "capacity.headroom=0.1"]) == 2


def test_what_a_study_keeps_of_a_run_and_which_question_it_is_of():
    run = run_with(0.9, watts=math.inf)
    assert optuna_search._run_of(json.loads(json.dumps(optuna_search._kept(run)))) == run
    few = ["capacity.hardware=[l4]", "capacity.tensor_parallel_sizes=[1]", "capacity.quantisations=[]"]
    digests = [
        optuna_search.digest_of(question_of(*few, *own))
        for own in ([], ["capacity.trials=3"], ["capacity.headroom=0.1"], ["slo.tpot_ms=31"])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_study_that_is_none_and_a_missing_library_are_reported(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    (tmp_path / "bad.log").write_text("no journal\n")
    with pytest.raises(ConfigError, match=r"^capacity.study=.*cannot be resumed"):
        optuna_search._study(optuna_search.load_optuna(), str(tmp_path / "bad.log"), 0)
    file = str(tmp_path / "study.log")
    first = optuna_search._study(optuna_search.load_optuna(), file, 0, 1.0, "a")
    assert first.user_attrs["question"] == "a"
    optuna_search._study(optuna_search.load_optuna(), file, 0, 2.0, "a")  # another load of the same
    with pytest.raises(ConfigError, match=r"study\.log: belongs to a search with other overrides"):
        optuna_search._study(optuna_search.load_optuna(), file, 0, 1.0, "b")
    with pytest.raises(ConfigError, match="no folder"):
        optuna_search._study(optuna_search.load_optuna(), str(tmp_path / "none/bad.log"), 0)

    def missing(name):
        raise ModuleNotFoundError("optuna", name="optuna")

    monkeypatch.setattr("experiments.capacity.optuna_search.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'windtunnel\[optuna\]'"):
        optuna_search.load_optuna()
