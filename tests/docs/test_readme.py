"""README.md is short, and its tables are those of the program."""

import csv
import re
from pathlib import Path

import pytest

from experiments.app.cli import COMMANDS
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SPEED = (ROOT / "docs" / "speed.md").read_text()
TRUST = ROOT / "hwmodels" / "trust" / "expected_errors.csv"
MAX_LINES = 180

ROWS = {
    "a dense model, vLLM under open-loop load": ("open", "vllm", "dense", "measured"),
    "a dense model on a GPU, vLLM at fixed concurrency": ("closed", "vllm", "dense", "measured"),
    "a dense model on a GPU, TensorRT-LLM": ("closed", "tensorrt_llm", "dense", "measured"),
    "the GPU, its operators too: dense models, vLLM": ("closed", "vllm", "dense", "relative"),
    "a mixture of experts, vLLM under open-loop load": ("open", "vllm", "moe", "measured"),
    "a mixture of experts on a GPU, vLLM": ("closed", "vllm", "moe", "measured"),
    "a mixture of experts on a GPU, SGLang": ("closed", "sglang", "moe", "measured"),
}
"""Labels of the rows of the README's table -> traffic, engine, architecture and level of the file."""


def rounded(percent: str) -> str:
    """Returns a percentage with two digits, or more if it is 100 or more."""
    return f"{float(percent):.2g}" if float(percent) < 100 else f"{float(percent):.0f}"


def trust_row(label: str) -> str:
    """Returns the row of the README's table of errors, computed from the file."""
    traffic, engine, architecture, level = ROWS[label]
    with TRUST.open() as file:
        rows = list(csv.DictReader(file))
    found = {
        row["figure"]: f"{rounded(row['median_percent'])} / {rounded(row['p90_percent'])}"
        for row in rows
        if (row["traffic"], row["engine"], row["gpu"]) == (traffic, engine, "*")
        and (row["architecture"], row["level"]) == (architecture, level)
    }
    token = "ITL" if traffic == "open" else "TPOT"
    rest = (found.get("TTFT p99", ""), f"{token} {found[token]}", found["E2E"], found.get("throughput", ""))
    cells = (found["TTFT"], *rest)
    return f"| {label} | {' | '.join(cells)} |"


def test_the_readme_is_short():
    assert len(README.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("label", ROWS)
def test_the_errors_are_those_of_the_file(label):
    assert trust_row(label) in README


def test_the_table_of_errors_has_no_other_row():
    table = re.search(r"\| left out \|.*\n\| ---.*\n((?:\|.*\n)+)", README)
    assert table is not None
    assert len(table[1].splitlines()) == len(ROWS)


def test_every_command_is_in_the_table():
    table = README.split("| command |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(COMMANDS)


def test_the_numbers_of_choices_are_right():
    groups = find_groups([CONFIG_DIR])
    devices, models = re.findall(r"(\d+) devices and (\d+) models", README)[0]
    assert int(devices) == len(groups["hardware"])
    assert int(models) == len([choice for choice in groups["model"] if choice.name != "hf"])


def test_the_speed_is_that_of_the_page_on_speed():
    case = re.findall(
        r"^ +([\d.]+) .* the Azure conversation trace, one replica$", SPEED, flags=re.MULTILINE
    )[0]
    seconds, factor = re.findall(r"in ([\d.]+) CPU s, ([\d,]+) times real time", README)[0]
    assert seconds == case
    assert int(factor.replace(",", "")) == pytest.approx(58.3 * 60 / float(case), rel=0.02)


def test_it_has_one_picture_that_the_program_made():
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures == ["experiments/dashboard/screenshots/dashboard.png"]
