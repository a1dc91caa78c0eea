"""`windtunnel calibrate`: known curves come back from a folder of tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.calibrate.fit import error_table, fit_calibration, fitted_figures, residuals
from experiments.calibrate.operators import OPERATORS
from experiments.calibrate.relatives import known_calibrations
from experiments.calibrate.tables import read_tables
from experiments.calibrate.yaml_file import calibration_yaml, field_meanings
from experiments.study.yaml_text import figure
from hwmodels.operators import Calibration
from hwmodels.operators.gemm import GemmCurve
from hwmodels.operators.mla import MlaCurve
from sim.settings.build import build
from tests.experiments.calibrate.known_curves import TRUTH, measured, preset, shapes, write


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIG_DIR / group).glob("*.yaml"))


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
    node = OmegaConf.create(calibration_yaml(calibration, ["mla"], "x", {}))
    read = build(node, "calibration")
    assert read == calibration


def test_figures_that_rows_decided_are_counted():
    assert fitted_figures(Calibration()) == []
    changed = Calibration(mla=MlaCurve(start_s=9e-6), gemm=GemmCurve(compute_capability="sm80", start_s=1e-6))
    assert fitted_figures(changed) == ["gemm.start_s", "mla.start_s"]


def test_gpus_are_found_by_the_names_that_tables_have_for_them(tmp_path):
    a100, _ = preset("a100_80gb_sxm")
    rows = measured("gemm", shapes()["gemm"], a100).assign(gpu="a100_sxm")
    rows = rows[rows["dtype"] == "bfloat16"]
    folder = write(tmp_path, {"gemm": rows})
    assert len(read_tables(folder, a100)["gemm"].sound) == len(rows)
    assert len(read_tables(folder, replace(a100, name="mine"), gpu="a100_sxm")["gemm"].sound) == len(rows)


def test_every_device_names_a_calibration():
    """Its own where it was measured, else that of a device that was, or expressly none."""
    measured_devices = {preset(name)[0].name for name in known_calibrations()}
    for hardware in choices("hardware"):
        device, calibration = preset(hardware)
        assert calibration.measured_on in {None, *measured_devices}, hardware
        if calibration.measured_on == device.name:
            assert 20 <= len(fitted_figures(calibration)) <= 27, hardware
        file = CONFIG_DIR / "hardware" / f"{hardware}.yaml"
        assert "override /calibration@_global_" in file.read_text(), hardware


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


def test_a_measured_device_keeps_its_latencies():
    for hardware, calibration in known_calibrations().items():
        assert calibration.sm_clock_hz is not None, hardware
        assert calibration.on(preset(hardware)[0]) is calibration, hardware


def test_the_clock_of_a_fit_is_that_of_its_device(mine, h100):
    assert mine.sm_clock_hz == h100.sm_clock_hz


def test_the_command_line_chooses_another_calibration():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    cfg = source.compose(["hardware=l40s", "calibration=h100_sxm"])
    assert build(cfg.calibration, "calibration").measured_on == "H100 SXM"
