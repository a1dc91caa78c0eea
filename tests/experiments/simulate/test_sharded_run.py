"""Shards of `windtunnel simulate`: workers die, disks are full, runs are continued; nothing counts twice."""

import errno
import json
from types import SimpleNamespace

import pytest

import experiments.simulate.shard_task
import experiments.simulate.sharded_run
import sim.report.chunk_tables
from experiments.app.cli import main
from experiments.app.job import CannotWriteError
from experiments.simulate.shard_task import ShardTask
from experiments.simulate.sharded_run import MAX_TRIES
from experiments.study.launchers.outcome import Outcome, WorkerDiedError, attempt
from sim.settings.errors import ConfigError
from tests.experiments.simulate.runs_in_shards import RUNS, SETTINGS, expected, run, run_streamed


class Losing:
    """A launcher that loses a worker at its n-th tasks, in this process."""

    num_jobs = None

    def __init__(self, *lost):
        self.lost, self.ran = set(lost), []

    def outcomes(self, work, tasks, interrupt):
        for index, task in enumerate(tasks):
            self.ran.append(task.index)
            if len(self.ran) in self.lost:
                yield Outcome(index, None, WorkerDiedError("its process was killed"))
            else:
                yield Outcome(index, *attempt(work, task))
            if interrupt.noted:
                return


def test_shards_in_processes_give_the_run(tmp_path):
    assert run(tmp_path) == expected()
    assert list(tmp_path.iterdir()) == []


def test_only_a_lost_shard_runs_again(tmp_path):
    launcher = Losing(2, 7)
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [0, 1, 2, 3, 4, 5, 1, 1]


def test_a_shard_that_is_lost_again_and_again_ends_the_run_which_can_be_continued(tmp_path):
    launcher = Losing(*range(2, 2 + 6 * MAX_TRIES))
    with pytest.raises(ConfigError, match=r"5 shards of 6 lost 3 times.*to continue: windtunnel simulate"):
        run(tmp_path, launcher)
    launcher = Losing()
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("tables", sorted(RUNS))
def test_a_full_disk_keeps_the_shards_before(tmp_path, monkeypatch, tables):
    run_it, right = RUNS[tables]
    right()
    write, written = experiments.simulate.sharded_run.write_whole, []

    def write_some(file, data):
        written.append(file.name)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write(file, data)

    monkeypatch.setattr(experiments.simulate.sharded_run, "write_whole", write_some)
    with pytest.raises(CannotWriteError, match=r"No space left.*2 of 6 shards are kept; make room, then"):
        run_it(tmp_path, Losing())
    launcher = Losing()
    assert run_it(tmp_path, launcher) == right()
    assert launcher.ran == [2, 3, 4, 5]


def test_a_disk_that_is_full_when_tables_are_written_keeps_all_shards(tmp_path, monkeypatch):
    right = RUNS["streamed"][1]()

    def no_room(file, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    with monkeypatch.context() as full:
        full.setattr(sim.report.chunk_tables, "write_whole", no_room)
        with pytest.raises(OSError, match="No space left on device"):
            run_streamed(tmp_path, Losing())
    launcher = Losing()
    assert run_streamed(tmp_path, launcher) == right
    assert launcher.ran == []


@pytest.mark.parametrize(("tables", "megabytes"), [("whole", r"0\.0360"), ("streamed", r"4\.22")])
def test_a_disk_without_room_is_refused_before_the_run(tmp_path, monkeypatch, tables, megabytes):
    free = SimpleNamespace(free=10_000)
    monkeypatch.setattr(experiments.simulate.sharded_run, "disk_usage", lambda folder: free)
    with pytest.raises(
        ConfigError, match=rf"^hydra\.run\.dir=.*: {megabytes} MB are needed for the shards of 60 requests"
    ):
        RUNS[tables][0](tmp_path)


def test_a_damaged_file_is_removed_and_simulated_again(tmp_path):
    with pytest.raises(ConfigError):
        run(tmp_path, Losing(*range(2, 30)))
    (tmp_path / "shards" / "0.zip").write_bytes(b"PK half a file")
    with pytest.raises(ConfigError, match=r"0\.zip: is damaged, and was removed"):
        run(tmp_path, Losing())
    launcher = Losing()
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [0]


def test_shards_of_another_run_are_not_used(tmp_path, monkeypatch):
    with pytest.raises(ConfigError):
        run(tmp_path, Losing(*range(2, 30)))
    about = tmp_path / "shards" / "shards.json"
    found = json.loads(about.read_text())
    about.write_text(json.dumps(found | {"run": found["run"] | {"seed": "another", "load": "another"}}))
    with pytest.raises(ConfigError, match=r"a run with other seed, load; .*overwrite=true"):
        run(tmp_path)
    about.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"holds shards of a run with other output\.tables; "):
        run_streamed(tmp_path)
    about.write_text(json.dumps(found | {"code": "0.0.9"}))
    with pytest.raises(ConfigError, match=r"holds shards of a run with other code of windtunnel"):
        run(tmp_path)


def test_nothing_is_left_of_a_run_without_a_finished_shard(tmp_path):
    with pytest.raises(ConfigError, match="6 shards of 6 lost"):
        run(tmp_path, Losing(*range(1, 30)))
    assert list(tmp_path.iterdir()) == []


def test_only_the_same_run_in_shards_takes_a_folder_with_shards(tmp_path, capsys):
    with pytest.raises(ConfigError):
        run(tmp_path, Losing(*range(2, 30)))
    for words in (["simulate", *SETTINGS, "sim.shards=null"], ["compare"]):
        assert main([*words, f"hydra.run.dir={tmp_path}"]) == 2
        assert "holds shards of a run that has not ended" in capsys.readouterr().err
        assert [file.name for file in tmp_path.iterdir()] == ["shards"]


def test_a_worker_with_other_code_is_an_error():
    task = ShardTask(index=0, num_shards=1, config="{}", import_dirs=(), code="0.0.9 (code 123)")
    with pytest.raises(ConfigError, match=r"has windtunnel .*, but this command has 0\.0\.9 \(code 123\)"):
        task.run()


def test_ctrl_c_keeps_the_finished_shards(tmp_path):
    class Interrupted(Losing):
        def outcomes(self, work, tasks, interrupt):
            for outcome in super().outcomes(work, tasks, interrupt):
                interrupt.noted = len(self.ran) == 3
                yield outcome

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Interrupted())
    launcher = Losing()
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [3, 4, 5]
