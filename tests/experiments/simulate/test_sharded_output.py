"""Runs in shards whose tables are streamed."""

import errno
import json
import os
import resource
from zipfile import ZipFile

import pandas as pd
import pytest

import sim.shards.open_files
from experiments.app.cli import main

SMALL = ("workload=poisson", "workload.num_requests=60", "replicas=4", "output.progress=false")


def simulate(folder, *arguments):
    return main(["simulate", *SMALL, f"hydra.run.dir={folder}", *arguments])


PUBLISHING = (
    *("workload@workload.of=poisson", "workload.of.num_requests=60", "slo.publish_ms=3000"),
    "workload.hidden_share.value=0.5",
)


SPECULATION = ("speculation=eagle3", "model=llama3_1_8b")


@pytest.mark.sampled(fast=1, slow=4)
@pytest.mark.parametrize(
    ("settings", "tables"),
    [
        (SMALL[:2], "stream"),
        (("workload=clients", *PUBLISHING), "stream"),
        ((*SMALL[:2], "workload.arrivals.rate_per_s=1"), "stream_all"),
        ((*SMALL[:2], *SPECULATION), "stream_all"),
    ],
)
def test_files_of_shards_that_stream_are_those_of_one_process(tmp_path, settings, tables, monkeypatch):
    monkeypatch.setattr("sim.records.timed_rows.REPLICA_SECONDS", 16.0)
    one, divided = tmp_path / "one", tmp_path / "divided"
    both = ("simulate", *SMALL[2:], *settings, f"output.tables={tables}")
    assert main([*both, f"hydra.run.dir={one}"]) == 0
    assert main([*both, f"hydra.run.dir={divided}", "sim.shards=3", "launcher.jobs=1"]) == 0
    assert {file.name for file in divided.iterdir()} == {file.name for file in one.iterdir()}
    assert (one / "summary.json").read_bytes() == (divided / "summary.json").read_bytes()
    folders = sorted(file.name for file in one.iterdir() if file.is_dir())
    assert ("iterations.parquet" in folders) == (tables == "stream_all")
    for table in folders:
        parts = sorted(file.name for file in (one / table).iterdir())
        assert parts == sorted(file.name for file in (divided / table).iterdir())
        assert len(parts) > 1 or table == "requests.parquet"
        for name in parts:
            assert (one / table / name).read_bytes() == (divided / table / name).read_bytes()
    for name in ("replicas.parquet", "series.parquet"):
        assert (one / name).read_bytes() == (divided / name).read_bytes()


def test_shards_of_a_run_that_streams_are_not_those_of_one_with_tables(tmp_path, capsys):
    assert simulate(tmp_path / "run", "sim.shards=2", "launcher.jobs=1", "output.tables=false") == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["requests"]["finished"] == 60
    assert simulate(tmp_path / "all", "sim.shards=2", "launcher.jobs=1", "output.tables=stream_all") == 0
    assert len(list((tmp_path / "all" / "iterations.parquet").iterdir())) >= 1


@pytest.mark.parametrize("tables", ["stream", "true"])
def test_a_run_in_one_shard_has_the_same_counts(tmp_path, tables):
    assert simulate(tmp_path / "run", "sim.shards=1", "launcher.jobs=1", f"output.tables={tables}") == 0
    assert len(pd.read_parquet(tmp_path / "run" / "requests.parquet")) == 60


def test_rows_that_were_damaged_before_the_merge_are_simulated_again(tmp_path, capsys, monkeypatch):
    def no_room(content, path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run, divided = tmp_path / "run", ("output.tables=stream", "sim.shards=3", "launcher.jobs=1")
    with monkeypatch.context() as full:
        full.setattr("sim.report.chunk_tables.write_table", no_room)
        assert simulate(run, *divided) == 1
    damaged = run / "shards" / "1.zip"
    with ZipFile(damaged) as archive:
        begin = archive.getinfo("rows").header_offset + 1000
    content = bytearray(damaged.read_bytes())
    content[begin : begin + 100] = bytes(100)
    damaged.write_bytes(content)
    capsys.readouterr()
    assert simulate(run, *divided) == 2
    assert "1.zip: is damaged, and was removed; continue: windtunnel simulate" in capsys.readouterr().err
    assert simulate(run, *divided) == 0
    assert simulate(tmp_path / "one", "output.tables=stream") == 0
    assert (tmp_path / "one" / "summary.json").read_bytes() == (run / "summary.json").read_bytes()


@pytest.fixture
def few_open_files(monkeypatch):
    """Lets this process open 16 files more, and the merge 6 of them."""
    monkeypatch.setattr(sim.shards.open_files, "MAX_OPEN", 6)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files are counted in /proc")
@pytest.mark.parametrize("tables", ["stream", "stream_all", pytest.param("true", marks=pytest.mark.slow)])
def test_there_may_be_more_shards_than_open_files(tmp_path, few_open_files, tables):
    own = ("replicas=30", f"output.tables={tables}", "output.report=false")
    assert simulate(tmp_path / "run", *own, "sim.shards=30", "launcher.jobs=1") == 0
    assert simulate(tmp_path / "one", *own) == 0
    read = [pd.read_parquet(tmp_path / name / "requests.parquet") for name in ("run", "one")]
    pd.testing.assert_frame_equal(*read, check_exact=True)
