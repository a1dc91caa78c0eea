"""README.md and docs/ show what happens: printed blocks, code, and the settings of commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.app.cli import main
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()


class Printed(NamedTuple):
    """A block that a program prints, with the marker in front of it."""

    command: str
    is_whole: bool  # else some of the lines, in their order
    shown: list[str]


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def figures(text: str) -> list[str]:
    """Returns the lines that are neither empty nor the name of the run's folder."""
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("outputs/")]


def printed_blocks() -> list[Printed]:
    pattern = r"<!-- (some lines )?printed by: windtunnel (.*?) -->\n```\n(.*?)^```"
    found = (re.findall(pattern, page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in PAGES)
    return [Printed(command, not some, figures(shown)) for page in found for some, command, shown in page]


def shown_commands() -> list[str]:
    lines = (line for page in PAGES for block in blocks(page.read_text(), "") for line in block.splitlines())
    commands = (line.split("#")[0].strip() for line in lines if line.startswith("windtunnel simulate"))
    return sorted({command for command in commands if not re.search(r"--|path=|\+\+", command)})


@pytest.mark.slow
@pytest.mark.parametrize("block", printed_blocks(), ids=lambda block: block.command)
def test_a_printed_block_is_what_its_command_prints(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(block.command)
    assert main([*words, "output.report=false"] if words[0] == "simulate" else words) == 0
    printed = figures(capsys.readouterr().out)
    if block.is_whole:
        assert printed == block.shown
        return
    rest = iter(printed)
    assert [line for line in block.shown if line not in rest] == []


def test_the_policy_of_the_readme_runs_and_leaps_exactly(tmp_path, monkeypatch, capsys):
    _, policy = blocks(README, "python")
    (config,) = blocks(README, "yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("shortest_prompt.py").write_text(policy)
    Path("mine/batching").mkdir(parents=True)
    Path("mine/batching/shortest_prompt.yaml").write_text(config)
    command = ["simulate", "--config-dir", "mine", "batching=shortest_prompt", "output.report=false"]
    small = ["sim.until_s=30", "engine.num_kv_blocks=2000"]
    tables = []
    for leap in ("true", "false"):
        folder = f"hydra.run.dir={tmp_path}/{leap}"
        assert main([*command, *small, folder, f"sim.leap={leap}"]) == 0, capsys.readouterr().err
        tables.append((tmp_path / leap / "requests.parquet").read_bytes())
    assert tables[0] == tables[1]


def test_the_python_of_the_readme_runs(capsys):
    code, _ = blocks(README, "python")
    names: dict[str, Any] = {}
    exec(code, names)  # our own text
    assert "requests met it" in capsys.readouterr().out
    assert len(names["result"].requests) == 300
    assert "hardware=l40s" in names["result"].command


@pytest.mark.parametrize("command", shown_commands())
def test_the_settings_of_a_shown_command_are_understood(command):
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    scenario, _ = build_run(source.compose(shlex.split(command)[2:]))
    assert all(pool.plan_memory().num_blocks > 0 for pool in scenario.pools_by_name.values())
