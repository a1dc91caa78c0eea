"""`windtunnel calibrate`: known curves come back from a folder of tables, and wrong tables are named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments.app.cli import main
from experiments.calibrate import validate_operators
from experiments.calibrate.fit import error_table, fit_calibration, fitted_figures, residuals, validation
from experiments.calibrate.operators import OPERATORS
from experiments.calibrate.relatives import known_calibrations
from experiments.calibrate.tables import Measured, read_tables
from experiments.calibrate.yaml_file import calibration_yaml, field_meanings
from experiments.study.yaml_text import figure
from hwmodels.devices.device import Device
from hwmodels.fitting.limits import TOO_SLOW, slowness
from hwmodels.operators.attention import AttentionCurve
from hwmodels.operators.calibration import Calibration
from hwmodels.operators.gemm import GemmCurve
from hwmodels.operators.mla import MlaCurve
from sim.settings.build import build
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError

TRUTH = Calibration(
    gemm=GemmCurve(
        start_s=3e-6,
        bandwidth_share=0.7,
        flops_share=0.6,
        flops_share_8bit=0.5,
        l2_bytes_per_sm_s=120e9,
        store_bytes_per_sm_s=30e9,
        wave_share=0.5,
    ),
    attention=AttentionCurve(
        decode_start_s=8e-6,
        decode_item_s=3e-6,
        kv_bandwidth_share=0.7,
        prefill_start_s=12e-6,
        flops_share=0.8,
        tile_s=5e-6,
    ),
)
OPS = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "ops"
LAYOUTS = [(32, 8), (16, 2), (64, 8), (8, 1), (40, 8), (24, 24), (28, 4), (12, 12)]


@cache
@cache
def preset(hardware: str) -> tuple[Device, Calibration]:
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose([f"hardware={hardware}"])
    return build(cfg.hardware, "hardware"), build(cfg.calibration, "calibration")


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIG_DIR / group).glob("*.yaml"))


@pytest.fixture(scope="module")
def h100() -> Device:
    return preset("h100_sxm")[0]


def table(names: tuple[str, ...], *axes, **same) -> pd.DataFrame:
    """Returns the product of the axes (single values or tuples), with columns of one value each."""
    rows = [sum((a if isinstance(a, tuple) else (a,) for a in row), ()) for row in itertools.product(*axes)]
    return pd.DataFrame(rows, columns=list(names)).assign(gpu="h100_sxm", **same)


def shapes() -> dict[str, pd.DataFrame]:
    matrices = [*itertools.product((1024, 4096, 6144, 28672), (1024, 2048, 8192))]
    sizes = (1, 16, 100, 512, 3000, 16384)
    gemm = table(("m", "n", "k", "dtype"), sizes, matrices, ("bfloat16", "fp8"), framework="vllm", kernel="x")
    attention = {
        "framework": "vllm",
        "kernel": "vllm_flash_attn_fa3",
        "kv_dtype": "bfloat16",
        "head_dim": 128,
    }
    names = ("num_heads", "num_kv_heads", "batch_size")
    decode = table((*names, "kv_len"), LAYOUTS, (1, 8, 64, 512), (4, 64, 1024, 8192), **attention)
    prefill = table(
        (*names, "seq_len"), LAYOUTS, (1, 8, 64), (32, 256, 2048, 8192), attn_dtype="bfloat16", **attention
    )
    return {"gemm": gemm, "attention_decode": decode, "attention_prefill": prefill.assign(window_size=0)}


def measured(operator: str, rows: pd.DataFrame, device: Device, noise: float = 0.0) -> pd.DataFrame:
    """Returns the rows with the latencies that TRUTH predicts, times exp(noise * z), z standard normal."""
    columns = {"window_size": np.zeros(len(rows))} | {name: rows[name].to_numpy() for name in rows}
    seconds = OPERATORS[operator].predict(columns, device, TRUTH)
    factor = np.exp(noise * np.random.default_rng(0).standard_normal(len(rows)))
    ids = [f"{operator}-{i}" for i in range(len(rows))]
    return rows.assign(id=ids, latency_us=1e6 * seconds * factor)


def write(folder: Path, tables: dict[str, pd.DataFrame]) -> Path:
    for name, rows in tables.items():
        rows.to_parquet(folder / f"{name}.parquet", index=False)
    return folder


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory, h100: Device) -> Path:
    """Writes tables with 1 % noise, half of their rows of another GPU that takes twice as long."""
    tables = {name: measured(name, rows, h100, noise=0.01) for name, rows in shapes().items()}
    others = {
        name: rows.assign(gpu="h200_sxm", latency_us=2 * rows["latency_us"]) for name, rows in tables.items()
    }
    both = {name: pd.concat([others[name], rows]) for name, rows in tables.items()}
    return write(tmp_path_factory.mktemp("ops"), both)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, ops: Path) -> Path:
    """Returns the folder that the command wrote for those tables."""
    folder = tmp_path_factory.mktemp("out")
    arguments = [f"ops={ops}", f"out={folder}/mine.yaml", f"report={folder}/mine.html", "source=a test"]
    assert main(["calibrate", "hardware=h100_sxm", *arguments]) == 0
    return folder


@pytest.fixture(scope="module")
def mine(written: Path) -> Calibration:
    """Composes the calibration with Hydra from the file that was written."""
    group = written / "user" / "calibration"
    group.mkdir(parents=True)
    (group / "mine.yaml").write_text((written / "mine.yaml").read_text())
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR, written / "user"])
    calibration: Calibration = build(source.compose(["calibration=mine"]).calibration, "calibration")
    return calibration


def test_known_figures_come_back(mine):
    for curve in ("gemm", "attention"):
        truth, found = getattr(TRUTH, curve), getattr(mine, curve)
        for name in field_meanings(type(truth)):
            expected = getattr(truth, name)
            assert getattr(found, name) == (
                expected if isinstance(expected, str) else pytest.approx(expected, rel=0.15)
            ), name


def test_the_file_says_where_its_figures_come_from(mine, written):
    lines = (written / "mine.yaml").read_text().splitlines()
    assert mine.measured_on == "H100 SXM"
    assert mine.source.startswith(
        "a test; 368 rows, one group of shapes in four held out for validation; fitted 20"
    )
    assert lines[0] == "# H100 SXM: 13 figures, fitted to 368 measured operator calls"
    assert lines[-1].startswith("# Not measured, so defaults are used: ")
    assert {"mla", "moe", "collectives"} <= set(lines[-1].partition(": ")[2].split(", "))
    assert any(
        line.endswith("  # Seconds of launch, start and drain of one kernel in a stream") for line in lines
    )
    assert any(
        "flops_share_4bit: " in line and line.endswith("default, as no measurement determines it")
        for line in lines
    )


def test_the_report_draws_every_table(written):
    page = (written / "mine.html").read_text()
    assert page.count('class="plotly-graph-div"') == 3
    assert "Calibration of H100 SXM" in page
    assert "without rows of this device: Multi-head latent attention, Mixture of experts, Collectives" in page


def test_only_groups_that_are_not_kept_back_are_fitted(ops, h100):
    """Validation rows ten times as slow change no figure."""
    tables = read_tables(ops, h100)
    slowed = {}
    for name, rows in tables.items():
        lines = residuals(OPERATORS[name], rows, h100, TRUTH)
        factor = np.where(lines["validation"], 10.0, 1.0)
        slowed[name] = rows._replace(rows={**rows.rows, "latency_us": rows.rows["latency_us"] * factor})
        assert 0 < lines["validation"].mean() < 0.5
    first, second = (
        fit_calibration(given, h100, compute_capability=None, source="") for given in (tables, slowed)
    )
    assert first == second


def test_error_table_counts_rows_without_an_answer():
    lines = pd.DataFrame(
        {
            "data_type": ["a", "a", "a", "b"],
            "size": 1.0,
            "measured_s": [1.0, 1.0, 2.0, 1.0],
            "predicted_s": [1.1, np.nan, 1.0, 2.0],
            "validation": [True, True, False, True],
        }
    )
    found = error_table(lines).set_index("data_type")
    assert found.index.tolist() == ["a", "b", "all"]
    assert found.loc["a", ["rows", "coverage"]].tolist() == [2, 0.5]
    assert found.loc["a", "median"] == pytest.approx(10)
    assert found.loc["a", ["fitted_rows", "fitted_median", "fitted_bias"]].tolist() == [1, 50, -50]
    assert found.loc["b", "fitted_rows"] == 0
    assert np.isnan(found.loc["b", "fitted_median"])
    assert found.loc["all", ["rows", "coverage"]].tolist() == [3, pytest.approx(2 / 3)]


def test_yaml_says_four_digits_in_powers_of_a_thousand():
    assert [figure(v) for v in (2.43067e-6, 150.1126e9, 0.83731, 13.595, 0.0, 0.01949, 0.0099999, 1.0)] == [
        "2.431e-6",
        "150.1e9",
        "0.8373",
        "13.6",
        "0",
        "0.01949",
        "10e-3",
        "1",
    ]


def test_yaml_says_0_for_what_a_fit_left_of_a_figure_but_keeps_short_times():
    assert [figure(v) for v in (655.7e-24, -1e-13, 785.7e-9, 1.2e-9)] == ["0", "0", "785.7e-9", "1.2e-9"]


def test_yaml_keeps_a_source_with_quotes():
    calibration = Calibration(
        measured_on="it's", source=("a: 'b' # c, " * 20).strip(), mla=MlaCurve(start_s=9e-6)
    )
    node = OmegaConf.create(calibration_yaml(calibration, ["mla"], "x"))
    read = build(node, "calibration")
    assert read == calibration


def test_figures_that_rows_decided_are_counted():
    assert fitted_figures(Calibration()) == []
    changed = Calibration(mla=MlaCurve(start_s=9e-6), gemm=GemmCurve(compute_capability="sm80", start_s=1e-6))
    assert fitted_figures(changed) == ["gemm.start_s", "mla.start_s"]


@pytest.mark.parametrize("name", ["mla", "moe"])
def test_tables_that_do_not_determine_the_capability_need_it(h100, name):
    rows = {column: np.arange(9) for column in OPERATORS[name].columns}
    given = {name: Measured(rows, np.ones(9, dtype=bool), "")}
    with pytest.raises(
        ConfigError, match="cannot be inferred from rows of mla and moe alone; give compute_cap"
    ):
        fit_calibration(given, h100, compute_capability=None, source="")


def bad_value(operator: str, column: str, value: object):
    def change(tables):
        rows = tables[operator].astype({column: object}) if isinstance(value, str) else tables[operator]
        rows.loc[3, column] = value
        tables[operator] = rows.astype({column: str}) if isinstance(value, str) else rows

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(gemm=t["gemm"].drop(columns="kernel")),
            r"gemm.parquet: has no column kernel; (nearest: \w+; )?allowed: m, n, k",
        ),
        (bad_value("gemm", "latency_us", 0.0), r"id=gemm-3: latency_us=0.0: must be a finite number > 0"),
        (bad_value("gemm", "latency_us", np.nan), r"id=gemm-3: latency_us=nan: must be a finite number > 0"),
        (bad_value("gemm", "m", -1), r"id=gemm-3: m=-1: must be a finite number > 0"),
        (bad_value("gemm", "dtype", "fp3"), r"id=gemm-3: dtype=fp3: must be one of bfloat16, fp8, fp8_block"),
        (
            lambda t: t["gemm"].update(t["gemm"]["latency_us"] / 1000),
            r"id=gemm-\d+: latency_us=[\d.e-]+, less than the .* us that H100 SXM needs .*; "
            r"is the column in us\?",
        ),
        (
            lambda t: t["gemm"].update(t["gemm"]["latency_us"] * 1000),
            r"gemm.parquet: latency_us: large rows take \d,\d{3} times as long .*; is the column in us\?",
        ),
        (
            lambda t: t["attention_prefill"].update(t["attention_prefill"]["latency_us"] * 1000),
            r"attention_prefill.parquet: latency_us: large rows take \d,\d{3} times",
        ),
        (
            lambda t: t.update(gemm=t["gemm"].assign(gpu="h101"), attention_decode=t["gemm"].head(0)),
            r"attention_decode.parquet: has no column",
        ),
        (
            lambda t: [t.update({name: rows.assign(gpu="b200_sxm")}) for name, rows in t.items()],
            r"no rows of H100 SXM; .*allowed: b200_sxm; give gpu=NAME",
        ),
        (
            lambda t: t["attention_decode"].update(
                pd.Series("torch_flow", t["attention_decode"].index, name="kernel")
            ),
            r"compute_capability: rows name kernels of no chip; give the one to fit",
        ),
    ],
)
def test_wrong_tables_are_refused(tmp_path, h100, change, message):
    tables = {name: measured(name, rows, h100) for name, rows in shapes().items()}
    change(tables)
    with pytest.raises(ConfigError, match=message):
        fit_calibration(read_tables(write(tmp_path, tables), h100), h100, compute_capability=None, source="")


def test_rows_a_little_too_fast_are_left_out_and_named(tmp_path, h100):
    rows = measured("gemm", shapes()["gemm"], h100)
    least_us = 1e6 * OPERATORS["gemm"].least_seconds({name: rows[name] for name in rows}, h100)
    slowest = int(np.argmax(least_us))
    rows.loc[slowest, "latency_us"] = 0.9 * least_us[slowest]
    found = read_tables(write(tmp_path, {"gemm": rows}), h100)["gemm"]
    assert np.flatnonzero(~found.sound).tolist() == [slowest]
    assert found.caveat.startswith(f"1 row faster than the data sheet allows, such as id=gemm-{slowest}: ")
    lines = residuals(OPERATORS["gemm"], found, h100, TRUTH)
    assert np.flatnonzero(lines["predicted_s"].isna()).tolist() == [slowest]


@pytest.mark.skipif(not OPS.exists(), reason="needs ../shared/data/ops")
def test_measured_tables_are_far_from_both_limits():
    device, _ = preset("rtx_pro_6000_server")
    tables = read_tables(OPS, device)
    assert set(tables) == set(OPERATORS)
    for name, table in tables.items():
        seconds = 1e-6 * table.rows["latency_us"]
        assert 1 < slowness(seconds, OPERATORS[name].least_seconds(table.rows, device)) < TOO_SLOW / 5


def test_small_tensors_may_beat_memory(tmp_path, h100):
    """8 MiB of weights in 2 us are 4.2e12 bytes/s: out of the L2 cache."""
    rows = table(("m", "n", "k"), [1], [1024], [4096], framework="vllm", kernel="x", dtype="bfloat16")
    rows = rows.assign(id="warm", latency_us=2.0)
    assert read_tables(write(tmp_path, {"gemm": rows}), h100)["gemm"].sound.all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops=nowhere", "out=x.yaml"], "ops=nowhere: is not a folder"),
        (["ops=.", "out=x.yaml"], "ops=.: must contain at least one of the tables gemm.parquet"),
        (["ops=.", "out=no/folder/x.yaml"], "out=no/folder/x.yaml: there is no folder "),
        (["ops=.", "out=."], "out=.: is a folder; name a file in it"),
        (["ops=.", "out=x.yaml", "report=."], "report=.: is a folder; name a file in it"),
        (["ops=.", "out=x.yaml", "compute_capability=sm10"], "compute_capability=sm10: must be one of sm80"),
        (["ops=."], "out: must be given"),
        (["ops=.", "out=x.yaml", "raport=x.html"], "raport: no such group or setting; nearest: report"),
    ],
)
def test_wrong_settings_exit_2_with_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"windtunnel: {message}")


def test_gpus_are_found_by_the_names_that_tables_have_for_them(tmp_path):
    a100, _ = preset("a100_80gb_sxm")
    rows = measured("gemm", shapes()["gemm"], a100).assign(gpu="a100_sxm")
    rows = rows[rows["dtype"] == "bfloat16"]
    folder = write(tmp_path, {"gemm": rows})
    assert len(read_tables(folder, a100)["gemm"].sound) == len(rows)
    assert len(read_tables(folder, replace(a100, name="mine"), gpu="a100_sxm")["gemm"].sound) == len(rows)


@pytest.mark.parametrize("hardware", choices("hardware"))
def test_every_device_names_a_calibration(hardware):
    """Its own where it was measured, else that of a device that was, or expressly none."""
    measured_devices = {preset(name)[0].name for name in known_calibrations()}
    device, calibration = preset(hardware)
    assert calibration.measured_on in {None, *measured_devices}
    if calibration.measured_on == device.name:
        assert 20 <= len(fitted_figures(calibration)) <= 27
    assert "override /calibration@_global_" in (CONFIG_DIR / "hardware" / f"{hardware}.yaml").read_text()


def test_latencies_of_a_relative_are_those_of_the_devices_own_clock():
    """An L4 at 2.04 GHz, by a card at 2.43 GHz; figures in bytes/s and shares stay."""
    l4, borrowed = preset("l4")
    on_l4 = borrowed.on(l4)
    assert on_l4.gemm.start_s == pytest.approx(2.43 / 2.04 * borrowed.gemm.start_s)
    assert on_l4.attention.decode_item_s == pytest.approx(2.43 / 2.04 * borrowed.attention.decode_item_s)
    assert on_l4.moe.kernel_s == pytest.approx(2.43 / 2.04 * borrowed.moe.kernel_s)
    assert on_l4.attention.prefill_start_s == borrowed.attention.prefill_start_s
    assert on_l4.gemm.bandwidth_share == borrowed.gemm.bandwidth_share
    assert on_l4.on(l4) is on_l4


@pytest.mark.parametrize("hardware", sorted(known_calibrations()))
def test_a_measured_device_keeps_its_latencies(hardware):
    device, calibration = preset(hardware)
    assert calibration.sm_clock_hz is not None
    assert calibration.on(device) is calibration


def test_the_clock_of_a_fit_is_that_of_its_device(mine, h100):
    assert mine.sm_clock_hz == h100.sm_clock_hz


def test_the_command_line_chooses_another_calibration():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    cfg = source.compose(["hardware=l40s", "calibration=h100_sxm"])
    assert build(cfg.calibration, "calibration").measured_on == "H100 SXM"


def test_validation_script_prints_a_line_an_operator(ops, capsys):
    validate_operators.main([f"ops={ops}", "refit=true"])
    printed = capsys.readouterr().out
    own = next(
        line for line in printed.splitlines() if line.startswith("| Decode attention | all | 8 / 25 |")
    )
    medians = [float(cell.split(" / ")[0]) for cell in own.strip("| ").split(" | ")[-2:]]
    assert medians[0] == pytest.approx(0.67, abs=0.25)  # median of 1 % of normal noise, either sign
    assert "(H100 SXM by H200 SXM, H200 SXM by H100 SXM)" in printed
    assert printed.count("| Matrix multiplication | all | 15 / 40 |") == 2
    assert "Mixture of experts" not in printed  # no GPU has such rows


def test_validation_takes_the_gpus_and_operators_that_a_folder_has(tmp_path, capsys):
    l4, _ = preset("l4")
    rows = measured("gemm", shapes()["gemm"], l4)
    folder = write(tmp_path, {"gemm": pd.concat([rows.assign(gpu="l4"), rows.assign(gpu="hal_9000")])})
    page = tmp_path / "page.html"
    validate_operators.main([f"ops={folder}", f"report={page}"])
    printed = capsys.readouterr().out
    assert "no hardware preset of this name: hal_9000." in printed
    assert "Never measured, so with the calibration of another device: L4 by RTX PRO 6000" in printed
    heading = next(line for line in printed.splitlines() if line.startswith("| operator"))
    assert heading.endswith("| predicted | L4 |")
    assert "Matrix multiplication" in page.read_text()


@pytest.mark.parametrize(
    ("chosen", "left"), [(lambda held_out: ~held_out, False), (lambda held_out: held_out, True)]
)
def test_validation_of_experts_whose_split_is_empty(tmp_path, capsys, chosen, left):
    """Experts without a validation row, and experts with nothing else."""
    path = OPS / "moe.parquet"
    if not path.exists():
        pytest.skip("needs the table of measured experts beside the project")
    moe = pd.read_parquet(path).query("gpu == 'h100_sxm'")
    held_out = validation("moe", {name: moe[name].to_numpy() for name in moe})
    folder = write(tmp_path, {"moe": moe[chosen(held_out)]})
    validate_operators.main([f"ops={folder}"])
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("| Mixture of experts | all |"))
    assert (line.split(" | ")[3] != "") == left


def test_validation_needs_a_gpu_with_a_preset(tmp_path):
    rows = measured("gemm", shapes()["gemm"], preset("l4")[0])
    folder = write(tmp_path, {"gemm": rows.assign(gpu="hal_9000")})
    with pytest.raises(ConfigError, match="gpu=hal_9000: has no hardware preset; "):
        validate_operators.main([f"ops={folder}"])


def test_validation_names_tables_without_rows_and_a_report_without_a_folder(tmp_path):
    rows = measured("gemm", shapes()["gemm"], preset("l4")[0])
    folder = write(tmp_path, {"gemm": rows.assign(gpu="l4").head(0)})
    with pytest.raises(ConfigError, match="the tables have no rows; give a folder"):
        validate_operators.main([f"ops={folder}"])
    with pytest.raises(ConfigError, match=r"report=nowhere/page.html: there is no folder "):
        validate_operators.main([f"ops={folder}", "report=nowhere/page.html"])


def test_a_table_with_nothing_left_to_fit_is_named(tmp_path, h100):
    rows = measured("gemm", shapes()["gemm"], h100)
    held_out = validation("gemm", {name: rows[name].to_numpy() for name in rows})
    tables = read_tables(write(tmp_path, {"gemm": rows[held_out]}), h100)
    with pytest.raises(
        ConfigError, match=f"gemm: none of the {held_out.sum()} rows is left to fit.*more n, k"
    ):
        fit_calibration(tables, h100, compute_capability=None, source="")
