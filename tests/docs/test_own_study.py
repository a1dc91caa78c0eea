"""The page on own studies: what it shows runs, and finds what its sentences say."""

import json
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, blocks_of

CALL, CLASS = [
    block.text for block in blocks_of(ROOT / "docs" / "own_study.md") if block.language == "python"
]


@pytest.mark.slow
def test_the_call_finds_what_the_command_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(CALL, names)
    found = names["found"]
    assert list(found.table["arm"].unique()) == ["vLLM", "static", "chunks of 512"]
    assert any("static loses to vLLM: TTFT p99" in verdict for verdict in found.verdicts)
    written = {file.name for file in (tmp_path / "outputs" / "static").iterdir()}
    assert written == {"runs.parquet", "config.yaml", "summary.json", "compare.html"}


@pytest.mark.slow
def test_the_study_of_the_page_runs(tmp_path):
    (tmp_path / "longest_prompts.py").write_text(CLASS)
    words = ["workload=poisson", "workload.num_requests=200", "hardware=l40s", "model=llama3_1_8b"]
    done = subprocess.run(
        [sys.executable, "longest_prompts.py", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Prompts may be ")
    folder = tmp_path / "outputs" / "longest_prompts"
    record = json.loads((folder / "summary.json").read_text())
    assert 0 < record["low"] < record["high"] <= 1.06 * record["low"]
    assert (folder / "longest_prompts.html").exists()
