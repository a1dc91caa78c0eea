"""Settings that all studies have: where the runs are simulated, and how many there may be."""

import pytest

from experiments.app.cli import main
from experiments.study.launchers.by_submitit import BySubmitit
from experiments.study.launchers.local import Local
from experiments.study.settings import StudySettings, check_least, check_num_runs, settings_of
from sim.settings.errors import ConfigError

SUBMITIT = {"_target_": "experiments.study.launchers.by_submitit.BySubmitit", "jobs": 3}
COMPARE = (
    "compare",
    "model=smollm2_135m",
    "hardware=l4",
    "workload=poisson",
    "workload.num_requests=8",
    "compare.arms=['a: batching=chunked','b: batching=static']",
    "compare.seeds=[0,1]",
    "compare.report=false",
    "hydra.run.dir=out",
)


def test_runs_are_in_processes_of_this_machine_unless_a_launcher_is_chosen():
    assert settings_of(StudySettings, {"node": {"jobs": 2}}, "node").runs_on == Local(jobs=2)
    chosen = settings_of(StudySettings, {"node": {}, "launcher": SUBMITIT}, "node").runs_on
    assert chosen == BySubmitit(jobs=3)


def test_jobs_belong_to_the_launcher_if_one_is_chosen():
    with pytest.raises(ConfigError, match=r"^node\.jobs=2: must be null with a launcher; set launcher\.jobs"):
        settings_of(StudySettings, {"node": {"jobs": 2}, "launcher": SUBMITIT}, "node")
    with pytest.raises(ConfigError, match=r"^launcher\.jobs=0: must be > 0"):
        settings_of(StudySettings, {"node": {}, "launcher": {**SUBMITIT, "jobs": 0}}, "node")


def test_too_many_runs_are_refused():
    check_num_runs(10_000, "num_rates", 7, "all rates")
    with pytest.raises(ValueError, match=r"^num_rates=7: all rates make 10,001 runs; .* use fewer rates$"):
        check_num_runs(10_001, "num_rates", 7, "all rates")
    with pytest.raises(ValueError, match=r"^jobs=0: must be >= 1; null: no limit$"):
        check_least(StudySettings(jobs=0), {"jobs": 1}, "; null: no limit")


@pytest.mark.slow
def test_a_study_runs_in_jobs_of_submitit_as_in_processes(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    printed = []
    for launcher in ((), ("launcher=submitit", "launcher.jobs=1")):
        assert main([*COMPARE, *launcher, "overwrite=true"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
