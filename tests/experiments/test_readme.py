"""The README's commands do what it says, and its output block is what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from experiments.app.cli import main
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_output_block_is_what_the_default_run_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "output.report=false"]) == 0
    printed = capsys.readouterr().out
    shown = next(block for block in blocks("") if block.startswith("SLO chat"))

    def figures(text: str) -> list[str]:
        lines = (line.rstrip() for line in text.splitlines())
        return [line for line in lines if line and "outputs/simulate" not in line]

    assert figures(printed) == figures(shown)


def test_the_policy_of_the_readme_runs_and_leaps_exactly(tmp_path, monkeypatch, capsys):
    _, policy = blocks("python")
    config, _ = blocks("yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("shortest_prompt.py").write_text(policy)
    Path("mine/batching").mkdir(parents=True)
    Path("mine/batching/shortest_prompt.yaml").write_text(config)
    command = ["simulate", "--config-dir", "mine", "batching=shortest_prompt", "output.report=false"]
    small = ["sim.until_s=120", "engine.num_kv_blocks=2000"]
    tables = []
    for leap in ("true", "false"):
        folder = f"hydra.run.dir={tmp_path}/{leap}"
        assert main([*command, *small, folder, f"sim.leap={leap}"]) == 0, capsys.readouterr().err
        tables.append((tmp_path / leap / "requests.parquet").read_bytes())
    assert tables[0] == tables[1]


def test_the_python_of_the_readme_runs(capsys):
    code, _ = blocks("python")
    names: dict[str, Any] = {}
    exec(code, names)  # our own text
    assert "requests met it" in capsys.readouterr().out
    assert len(names["result"].requests) == 300
    assert "hardware=l40s" in names["result"].command


@pytest.mark.parametrize(
    "command",
    [
        line.split("#")[0].strip()
        for block in blocks("")
        for line in block.splitlines()
        if line.startswith("windtunnel simulate") and "path=" not in line and "--" not in line
    ],
)
def test_the_settings_of_the_readmes_commands_are_understood(command):
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    scenario, _ = build_run(source.compose(command.split()[2:]))
    assert scenario.plan_memory().num_blocks > 0
