"""Tables that are written while a run goes on: the rows of the whole tables, in folders of whole files."""

import pandas as pd
import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.metrics.result import RunSums
from sim.metrics.sketches import SKETCHED
from sim.report.chunk_tables import ChunkTables, check_free_space
from sim.report.run_files import write_result
from sim.settings.scenario import build_run
from tests.tables import assert_equal_tables
from tests.worlds.chunks import chunks_of

SOURCE = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
SETTINGS = (
    *("model=llama3_1_8b", "workload=poisson", "workload.num_requests=60", "replicas=2"),
    "speculation=eagle3",
)


@pytest.fixture(scope="module")
def scenario():
    return build_run(SOURCE.compose(list(SETTINGS)))[0]


@pytest.fixture(scope="module")
def result(scenario):
    return scenario.run()


@pytest.fixture
def write(scenario, result):
    def write(folder, cuts_s, *, width_s=None):
        setting = scenario.figure_setting(scenario.pool_hardware(), result.records.pools, SKETCHED)
        tables, sums = ChunkTables(folder, width_s=width_s, group_rows=16), RunSums(setting)
        for chunk in chunks_of(result.records, cuts_s, group_rows=16):
            tables.add(sums.add(chunk))
        tables.finish(chunk.end, sums)

    return write


def test_tables_are_those_of_a_plain_run(tmp_path, result, write):
    end_s = result.records.end_s
    write(tmp_path / "streamed", [end_s / 3, end_s / 2], width_s=2.0)
    write_result(tmp_path / "plain", result, {}, tables=True, report=False)
    for name, keys in (
        ("requests", ["request_id"]),
        ("iterations", ["replica", "iteration"]),
        ("gaps", ["end_s", "request_id"]),
        ("itl", ["gap_end_s", "gap_s", "gap_count"]),
        ("bursts", ["replica", "iteration", "request_id"]),
        ("acceptance", ["place"]),
    ):
        streamed, plain = (
            pd.read_parquet(tmp_path / kind / f"{name}.parquet").sort_values(keys, ignore_index=True)
            for kind in ("streamed", "plain")
        )
        assert_equal_tables(streamed, plain, check_exact=True)
    streamed, plain = (
        pd.read_parquet(tmp_path / kind / "replicas.parquet") for kind in ("streamed", "plain")
    )
    assert_equal_tables(streamed, plain)


def test_files_of_iterations_and_gaps_do_not_depend_on_the_cuts(tmp_path, result, write):
    end_s = result.records.end_s
    write(tmp_path / "once", [], width_s=end_s / 7)
    write(tmp_path / "often", [end_s * share / 10 for share in range(1, 10)], width_s=end_s / 7)
    for name in ("iterations", "gaps", "itl", "bursts"):
        files = sorted((tmp_path / "once" / f"{name}.parquet").iterdir())
        assert len(files) in (7, 8)
        assert [file.name for file in files] == sorted(
            file.name for file in (tmp_path / "often" / f"{name}.parquet").iterdir()
        )
        for file in files:
            assert file.read_bytes() == (tmp_path / "often" / f"{name}.parquet" / file.name).read_bytes()


def test_files_of_requests_do_not_depend_on_the_cuts(tmp_path, result, write):
    write(tmp_path / "once", [])
    write(tmp_path / "often", [result.records.end_s * share / 10 for share in range(1, 10)])
    files = sorted((tmp_path / "once" / "requests.parquet").iterdir())
    assert len(files) == 4
    for file in files:
        assert file.read_bytes() == (tmp_path / "often" / "requests.parquet" / file.name).read_bytes()
    assert not (tmp_path / "once" / "iterations.parquet").exists()
    assert not (tmp_path / "once" / "itl.parquet").exists()


def test_tables_of_an_earlier_run_are_removed(tmp_path, result, write):
    write_result(tmp_path, result, {}, tables=True, report=False)
    write(tmp_path, [])
    assert (tmp_path / "requests.parquet").is_dir()
    assert not (tmp_path / "events.parquet").exists()
    write_result(tmp_path, result, {}, tables=True, report=False)
    assert (tmp_path / "requests.parquet").is_file()


def test_files_of_others_are_kept(tmp_path, result, write):
    (tmp_path / "requests.parquet").mkdir()
    (tmp_path / "requests.parquet" / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match=r"not empty"):
        write(tmp_path, [])
    assert (tmp_path / "requests.parquet" / "mine.txt").read_text() == "mine"


def test_rejects_tables_that_do_not_fit_on_the_disk(tmp_path):
    check_free_space(tmp_path / "new" / "folder", 1000, iterations=True)
    with pytest.raises(
        ValueError, match=r"the tables of 10,000,000,000,000 requests take about 1,200,000,000 MB"
    ):
        check_free_space(tmp_path / "new" / "folder", 10**13, iterations=False)
