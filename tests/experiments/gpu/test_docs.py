"""The pages have what the GPU programme prints."""

from __future__ import annotations

from pathlib import Path

from experiments import gpu_run

ROOT = Path(__file__).resolve().parents[3]


def test_the_pages_have_the_steps_and_the_targets(capsys):
    assert gpu_run.main(["--list"]) == 0
    steps = capsys.readouterr().out
    assert f"```\n{steps}```\n" in (ROOT / "docs" / "gpu_measurements.md").read_text()
    assert gpu_run.main(["table"]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "engine.md").read_text()
