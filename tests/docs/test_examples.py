"""README.md and docs/ show what happens: every block is run, or says why not (see `tests.docs.blocks`)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run
from tests.docs.blocks import PAGES, PLACEHOLDER, ROOT, Block, blocks_of, shown_lines, words_of

OWN_POLICY = blocks_of(ROOT / "docs" / "own_policy.md")
OWN_PROCESS = blocks_of(ROOT / "docs" / "own_process.md")
START = blocks_of(ROOT / "docs" / "start.md")
RUN_PAGES = [page for page in PAGES if any(b.commands or b.is_printed for b in blocks_of(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def written(blocks: list[Block], language: str) -> str:
    """Returns the text of the first block of a language."""
    return next(block.text for block in blocks if block.language == language)


def shown_commands() -> list[str]:
    """Returns all shown `windtunnel simulate` commands that need no file."""
    lines = (line for page in PAGES for block in blocks_of(page) for line in block.text.splitlines())
    commands = (
        re.split(r"\s+# ", line)[0].strip() for line in lines if line.startswith("windtunnel simulate")
    )
    return sorted(
        {c for c in commands if not re.search(r"--|path=|own=|\+\+", c) and not PLACEHOLDER.search(c)}
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_says_why_not(page):
    """Text, output of errors and diagrams are in blocks of the language `text`."""
    free = [
        f"{name_of(page)}:{block.line}: {block.text.splitlines()[0]}"
        for block in blocks_of(page)
        if not block.kind and block.language != "text" and not block.is_commands
    ]
    assert free == []


def test_markers_are_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: no GPU -->\n```\nwindtunnel serve\n```\n\n"
        "<!-- run with: seed=1 -->\n```\nwindtunnel list a   # all\nwindtunnel simulate x=FILE\n```\n"
        "```text\nfree\n```\n<!-- printed by: windtunnel list -->\n```\nout\n```\n"
    )
    first, second, third, fourth = blocks_of(page)
    assert (first.kind, first.argument, first.commands) == ("not run", "no GPU", [])
    assert second.commands == ["windtunnel list a seed=1"]
    assert (third.language, third.commands) == ("text", [])
    assert (fourth.is_printed, fourth.argument, fourth.line) == (True, "windtunnel list", 14)


def test_date_and_time_are_those_of_the_latest_run(tmp_path):
    for day in ("2026-01-01", "2026-01-02"):
        (tmp_path / "outputs" / "simulate" / day / "10-00-00").mkdir(parents=True)
    command = "windtunnel explain run=outputs/simulate/DATE/TIME request=1"
    assert words_of(command, tmp_path) == ["explain", "run=outputs/simulate/2026-01-02/10-00-00", "request=1"]
    with pytest.raises(AssertionError, match="no run of windtunnel sweep"):
        words_of("windtunnel report run=outputs/sweep/DATE/TIME", tmp_path)


class Shell:
    """Runs the commands of a page in one folder, each once."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys
        self.outputs: dict[str, str] = {}

    def output_of(self, command: str) -> str:
        """Runs a command unless it was run, and returns what it printed. Fails unless it succeeds."""
        if command not in self.outputs:
            self.capsys.readouterr()
            status = self._status(command)
            printed = self.capsys.readouterr()
            assert status == 0, f"{command}\n{printed.err}"
            self.outputs[command] = printed.out
        return self.outputs[command]

    def _status(self, command: str) -> int:
        if command.startswith("python -m "):
            # In this process pytest imports our modules by a loader that `runpy` cannot run.
            done = subprocess.run(
                [sys.executable, *shlex.split(command)[1:]], cwd=self.folder, capture_output=True, text=True
            )
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
            return done.returncode
        words = words_of(command, self.folder)
        quick = words[0] == "simulate" and not {"--help", "--multirun"} & set(words)
        try:
            return main([*words, "output.report=false"] if quick else words)
        except SystemExit as end:  # of --help
            return int(end.code or 0)


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["windtunnel"])
    return Shell(tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.sampled(slow=4)
@pytest.mark.parametrize("page", RUN_PAGES, ids=name_of)
def test_the_commands_of_a_page_run_and_print_what_it_shows(page, shell):
    for block in blocks_of(page):
        if block.kind == "file":
            Path(block.argument).parent.mkdir(parents=True, exist_ok=True)
            Path(block.argument).write_text(block.text)
        for command in block.commands:
            shell.output_of(command)
        if block.is_printed:
            printed, shown = shown_lines(shell.output_of(block.argument)), shown_lines(block.text)
            if block.kind == "printed by":
                assert printed == shown
            else:
                rest = iter(printed)
                assert [line for line in shown if line not in rest] == [], "\n".join(printed)


def test_the_policy_of_the_guide_runs_and_leaps_exactly(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("shortest_prompt.py").write_text(written(OWN_POLICY, "python"))
    Path("mine/batching").mkdir(parents=True)
    Path("mine/batching/shortest_prompt.yaml").write_text(written(OWN_POLICY, "yaml"))
    command = ["simulate", "--config-dir", "mine", "batching=shortest_prompt", "output.report=false"]
    small = ["sim.until_s=30", "engine.num_kv_blocks=2000"]
    tables = []
    for leap in ("true", "false"):
        folder = f"hydra.run.dir={tmp_path}/{leap}"
        assert main([*command, *small, folder, f"sim.leap={leap}"]) == 0, capsys.readouterr().err
        tables.append((tmp_path / leap / "requests.parquet").read_bytes())
    assert tables[0] == tables[1]


def test_the_python_of_the_first_page_runs(capsys):
    names: dict[str, Any] = {}
    exec(written(START, "python"), names)  # our own text
    assert "requests met it" in capsys.readouterr().out
    assert len(names["result"].requests) == 300
    assert "hardware=l40s" in names["result"].command


def test_the_python_of_the_page_on_horizons_runs():
    """Its own assertions hold, and they compare a run that leaps with one that does not."""
    names: dict[str, Any] = {}
    exec(written(blocks_of(ROOT / "docs" / "horizon.md"), "python"), names)  # our own text
    assert len(names["leaping"].requests) == len(names["stepping"].requests) == 300
    assert "sim.leap=false" in names["stepping"].command
    assert "sim.leap" not in names["leaping"].command


@pytest.mark.parametrize("place", [i for i, b in enumerate(OWN_PROCESS) if b.kind == "tested by"])
def test_the_processes_of_the_guide_print_what_it_shows(place, capsys):
    exec(OWN_PROCESS[place].text, {})  # our own text
    assert capsys.readouterr().out == OWN_PROCESS[place + 1].text


@pytest.mark.parametrize("command", shown_commands())
def test_the_settings_of_a_shown_command_are_understood(command):
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    scenario, _ = build_run(source.compose(shlex.split(command)[2:]))
    assert all(pool.plan_memory().num_blocks > 0 for pool in scenario.pools_by_name.values())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_is_in_fenced_blocks(page):
    """Indented blocks have no marker, so no test would see a command in them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"(?:^|\n)\n    +\S.*", prose) == []
