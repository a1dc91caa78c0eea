"""Levels from files: which formats are recognised, which rows are used, what is refused; runs with both."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.iterations import IterationShape, UnknownIterationError
from hwmodels.levels.files import RecordedLevel, TableLevel
from sim.cluster.settings import SimSettings
from sim.records.table import column
from sim.settings.scenario import build_scenario
from tests.tables import assert_equal_tables

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
DECODE = IterationShape(8, 8 * 500, 0, 0, 0, 0, 8)


@pytest.fixture(scope="module")
def replica():
    """Builds a replica of Llama 3.1 8B on an H100."""
    return build_scenario(SOURCE.compose(["workload=poisson"])).replica


def write(folder, name, rows):
    path = folder / name
    frame = pd.DataFrame(rows)
    if name.endswith(".parquet"):
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    return str(path)


def own_profile(**changed):
    """Returns a profile with 200 and 400 us for the gate and up projections of one layer."""
    return {
        "operator": ["gate_up_proj"] * 2,
        "component": ["gemm"] * 2,
        "calls": [32] * 2,
        "latency_us": [200.0, 400.0],
        "num_tokens": [1, 101],
        **changed,
    }


def vidur(**changed):
    return {
        "gpu": ["h100", "h100", "a100", "a100"],
        "model": ["meta-llama/Llama-3.1-8B"] * 4,
        "tp": [1] * 4,
        "num_tokens": [1, 101, 1, 101],
        "mlp_up_proj_us": [200.0, 400.0, 1.0, 1.0],
        **changed,
    }


def layer_tables(folder):
    same = {"gpu": "H100", "model": "Llama-3.1-8B", "tp": 1}
    write(
        folder,
        "layers_dense.csv",
        [{**same, "layer": "gate_up_proj", "tokens": n, "time_us": t} for n, t in ((1, 200), (101, 400))],
    )
    write(
        folder,
        "layers_attention.csv",
        [
            {**same, "prefill_chunk": c, "kv_prefill": p, "n_decode": n, "kv_decode": d, "time_us": 50}
            for c, p, n, d in [
                *((0, 0, n, d) for n in (1, 64) for d in (16, 512)),
                *((c, p, 0, 0) for c in (16, 512) for p in (0, 512)),
            ]
        ],
    )
    write(
        folder,
        "layers_per_sequence.csv",
        [{**same, "layer": "lm_head", "sequences": n, "time_us": 400} for n in (1, 64)],
    )
    return str(folder)


def gemm_s(level, replica):
    return float(level.iteration_model(replica).breakdown(DECODE)["gemm"])


EXPECTED_S = 32 * (200 + 200 * 7 / 100) * 1e-6
"""8 tokens are 7 hundredths of the way from 1 to 101."""


def test_our_own_profile_as_csv_or_parquet(replica, tmp_path):
    for name in ("profile.csv", "profile.csv.gz", "profile.parquet"):
        level = TableLevel(path=write(tmp_path, name, own_profile()))
        assert gemm_s(level, replica) == pytest.approx(EXPECTED_S)


def test_vidurs_rows_of_the_simulated_gpu(replica, tmp_path):
    level = TableLevel(path=write(tmp_path, "linear_ops.csv", vidur()))
    assert gemm_s(level, replica) == pytest.approx(EXPECTED_S)
    assert "Vidur's profile of h100" in level.basis(replica)
    assert "attention, elementwise, lm_head from the roofline" in level.basis(replica)


def test_vidurs_own_files_are_in_milliseconds(replica, tmp_path):
    rows = {
        "num_tensor_parallel_workers": [1, 1, 2, 2],
        "num_tokens": [1, 101, 1, 101],
        "time_stats.mlp_up_proj.median": [0.2, 0.4, 0.1, 0.2],
    }
    level = TableLevel(path=write(tmp_path, "mlp.csv", rows))
    assert gemm_s(level, replica) == pytest.approx(EXPECTED_S)


def test_a_folder_of_layer_tables(replica, tmp_path):
    level = TableLevel(path=layer_tables(tmp_path))
    assert gemm_s(level, replica) == pytest.approx(EXPECTED_S)
    parts = level.iteration_model(replica).breakdown(DECODE)
    assert parts["attention"] == pytest.approx(32 * 50e-6)
    assert parts["lm_head"] == pytest.approx(400e-6)
    assert "LLMServingSim's tables of H100" in level.basis(replica)


def test_a_folder_with_one_profile_among_other_tables(replica, tmp_path):
    write(tmp_path, "requests.csv", {"arrival_s": [1.0]})
    write(tmp_path, "profile.csv", own_profile())
    (tmp_path / "notes.txt").write_text("x")
    assert gemm_s(TableLevel(path=str(tmp_path)), replica) == pytest.approx(EXPECTED_S)


def test_names_that_differ_from_ours_can_be_given(replica, tmp_path):
    path = write(tmp_path, "linear_ops.csv", vidur(model=["8B-base"] * 4))
    with pytest.raises(ValueError, match=r"latency.model=null: llama-3.1-8b must match one model .* 8B-base"):
        TableLevel(path=path).iteration_model(replica)
    assert gemm_s(TableLevel(path=path, model="8B-base"), replica) == pytest.approx(EXPECTED_S)
    with pytest.raises(ValueError, match="gpu=h200: must be one of a100, h100"):
        TableLevel(path=path, gpu="h200", model="8B-base").iteration_model(replica)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"x": [1], "y": [2]}, "unknown format: columns x, y; known are our own"),
        (
            own_profile(latency_us=[200.0, 0.0]),
            r"row 1 \(gate_up_proj\): latency_us=0: must be finite and > 0",
        ),
        (own_profile(latency_us=[200.0, 0.4]), r"row 1 \(gate_up_proj, 101 rows\): .* H100 SXM cannot do it"),
        (
            own_profile(latency_us=[2e5, 4e5]),
            r"gate_up_proj: latency_us: large rows take \d,\d{3} times as long as H100 SXM needs",
        ),
        (vidur(tp=[2] * 4), "tensor_parallel_size=1: must be one of 2, which the table has"),
        (
            {name: values for name, values in own_profile().items() if name != "num_tokens"},
            "profile: has no column num_tokens",
        ),
    ],
)
def test_refuses_tables_that_cannot_be_right(replica, tmp_path, rows, message):
    path = write(tmp_path, "table.csv", rows)
    with pytest.raises(ValueError, match=f"table.csv: .*{message}"):
        TableLevel(path=path).iteration_model(replica)


def test_refuses_what_is_not_there_and_folders_without_a_profile(replica, tmp_path):
    with pytest.raises(ValueError, match="path=nowhere: no such file or folder"):
        TableLevel(path="nowhere")
    with pytest.raises(ValueError, match="path=nowhere: no such file or folder"):
        RecordedLevel(path="nowhere")
    with pytest.raises(ValueError, match="holds 0 profiles; name one file"):
        TableLevel(path=str(tmp_path)).iteration_model(replica)
    (tmp_path / "broken.parquet").write_text("x")
    broken = tmp_path / "broken.parquet"
    for level in (TableLevel(path=str(broken)), RecordedLevel(path=str(broken))):
        with pytest.raises(ValueError, match=r"^latency\.path=.*/broken\.parquet: cannot be read"):
            level.iteration_model(replica)
    with pytest.raises(ValueError, match=rf"^latency\.path={tmp_path}: broken\.parquet: cannot be read"):
        TableLevel(path=str(tmp_path)).iteration_model(replica)
    (tmp_path / "notes.md").write_text("x")
    for level in (
        TableLevel(path=str(tmp_path / "notes.md")),
        RecordedLevel(path=str(tmp_path / "notes.md")),
    ):
        with pytest.raises(ValueError, match=r"^latency\.path=.*/notes\.md: must be a table"):
            level.iteration_model(replica)


@pytest.mark.parametrize("setting", ["pipeline_parallel_size=2", "attention_data_parallel_size=2"])
def test_refuses_layouts_that_no_table_knows(tmp_path, setting):
    replica = build_scenario(SOURCE.compose(["workload=poisson", setting])).replica
    with pytest.raises(ValueError, match=f"{setting}: must be 1, as a measured table"):
        TableLevel(path=write(tmp_path, "p.csv", own_profile())).iteration_model(replica)


SMALL = ("workload=poisson", "workload.num_requests=60")


@pytest.fixture(scope="module")
def scenario():
    return build_scenario(SOURCE.compose(list(SMALL)))


@pytest.fixture(scope="module")
def recorded(scenario, tmp_path_factory):
    """Returns the requests of a run, and the path of its table of iterations."""
    path = tmp_path_factory.mktemp("run") / "iterations.parquet"
    result = scenario.run().in_pandas()
    result.records.iterations.to_parquet(path)
    return result.requests, str(path)


def leaping_and_stepping(scenario, latency):
    """Returns a run's requests, which must be the same with leaps and steps, and its summary."""
    leaping = replace(scenario, latency=latency).run()
    stepping = replace(scenario, latency=latency, sim=SimSettings(leap=False)).run()
    assert_equal_tables(leaping.requests, stepping.requests)
    return leaping.requests, leaping.summary


def test_a_table_is_simulated_alike_with_and_without_leaps(scenario, tmp_path):
    requests, summary = leaping_and_stepping(scenario, TableLevel(path=layer_tables(tmp_path)))
    assert summary["requests"]["finished"] == len(requests) == 60
    assert "LLMServingSim's tables of H100" in summary["notes"][0]
    assert summary["energy"]["joules"] > 0


def test_a_recorded_run_is_simulated_again(scenario, recorded):
    first, path = recorded
    again, summary = leaping_and_stepping(scenario, RecordedLevel(path=path))
    assert column(again, "last_token_s") == pytest.approx(column(first, "last_token_s"), rel=1e-9)
    assert summary["notes"][0].endswith(f"iterations recorded in {path}.")
    assert summary["energy"]["joules"] > 0


def test_another_run_needs_iterations_that_were_not_recorded(scenario, recorded):
    _, path = recorded
    other = replace(scenario, seed=1)
    with pytest.raises(UnknownIterationError, match="recorded: no iteration of decode_seqs="):
        replace(other, latency=RecordedLevel(path=path)).run()
    _, summary = leaping_and_stepping(other, RecordedLevel(path=path, allow_missing=True))
    assert "; the roofline for all others" in summary["notes"][0]


def test_the_command_names_the_iteration_that_was_not_recorded(recorded, capsys, tmp_path):
    level = ("latency=recorded", f"latency.path={recorded[1]}", "seed=1")
    assert main(["simulate", *SMALL, *level, "output.progress=false", f"hydra.run.dir={tmp_path}"]) == 2
    assert "windtunnel: latency: recorded: no iteration of decode_seqs=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"duration_s": 0.0}, r"recorded, row 0: duration_s=0: must be finite and > 0 s"),
        ({"duration_s": 1e-6}, r"recorded, row 0: duration_s=1e-06: the devices cannot do it in less than"),
        ({"prefill_pairs": None}, "iterations: has no column prefill_pairs"),
    ],
)
def test_refuses_recordings_that_cannot_be_right(replica, tmp_path, changed, message):
    columns = {name: [1] for name in IterationShape._fields} | {"duration_s": [0.1]}
    columns = {n: v for n, v in (columns | {n: [v] for n, v in changed.items()}).items() if v != [None]}
    path = write(tmp_path, "iterations.csv", columns)
    with pytest.raises(ValueError, match=f"iterations.csv: {message}"):
        RecordedLevel(path=path).iteration_model(replica)


def test_the_command_refuses_such_a_table_before_anything_runs(capsys, tmp_path):
    path = write(tmp_path, "profile.csv", own_profile(latency_us=[200.0, 0.0]))
    assert main(["simulate", *SMALL, "latency=table", f"latency.path={path}"]) == 2
    assert "profile.csv: profile, row 1 (gate_up_proj): latency_us=0: must be" in capsys.readouterr().err


@pytest.mark.skipif(not (DATA / "vllm_requests").exists(), reason="needs ../shared/data/vllm_requests")
def test_the_measured_layer_tables_are_recognised(tmp_path):
    replica = build_scenario(SOURCE.compose(["workload=poisson", "hardware=rtx_pro_6000_server"])).replica
    model = TableLevel(path=str(DATA / "vllm_requests")).iteration_model(replica)
    assert model.missing == ()
    assert 9e-3 < model.seconds(DECODE) < 20e-3


@pytest.mark.skipif(not (DATA / "vidur").exists(), reason="needs ../shared/data/vidur")
def test_vidurs_measured_operators_are_recognised():
    settings = ["workload=poisson", "hardware=h100_sxm", "model=llama2_7b", "tensor_parallel_size=2"]
    replica = build_scenario(SOURCE.compose(settings)).replica
    model = TableLevel(path=str(DATA / "vidur")).iteration_model(replica)
    assert model.missing == ("attention", "communication", "lm_head")
    sizes = np.array([8, 64])
    assert np.all(np.diff(model.seconds(IterationShape(sizes, sizes * 500, 0, 0, 0, 0, sizes))) > 0)
