"""The errors of a calibration on measured operators that were kept back."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments.calibrate import validate_operators
from experiments.calibrate.fit import validation
from sim.settings.errors import ConfigError
from tests.experiments.calibrate.known_curves import OPS, measured, preset, shapes, write


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
