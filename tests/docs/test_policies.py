"""docs/policies.md: its example keeps its promises and runs, and its tables list every policy."""

import re
from pathlib import Path

import pytest

from experiments.app.cli import main
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.conformance import claims, promises
from experiments.conformance.claims import FAMILIES, claims_by_name
from tests.experiments.conformance.kept import num_kept

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text()


def blocks(language):
    """Returns the fenced code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def rows(first_header):
    """Returns the rows of the table whose header begins with that cell, as lists of cells."""
    table = re.split(rf"^\| {first_header} \|.*\n(?=\| ---)", PAGE, maxsplit=1, flags=re.MULTILINE)[1]
    table = "\n" + table.split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Writes the example's files into a folder, makes it the current one, and returns it."""
    (policy,), (config,) = blocks("python"), blocks("yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "short_prompt.py").write_text(policy)
    (tmp_path / "mine" / "scheduling").mkdir(parents=True)
    (tmp_path / "mine" / "scheduling" / "short_prompt.yaml").write_text(config)
    return tmp_path


@pytest.mark.slow
def test_the_example_keeps_its_promises(example):
    claims = claims_by_name("short_prompt.ShortPromptFirst", {"max_wait_s": 1})
    assert {claim.name: num_kept(claim, 3) for claim in claims} == {claim.name: 3 for claim in claims}


def test_the_example_runs_and_leaps_exactly(example, capsys):
    (command,) = re.findall(r"^windtunnel simulate .*$", PAGE, flags=re.MULTILINE)
    small = ["sim.until_s=20", "engine.max_num_seqs=2", "output.report=false"]
    tables = []
    for leap in ("true", "false"):
        folder = example / leap
        words = [*command.split()[1:], *small, f"sim.leap={leap}", f"hydra.run.dir={folder}"]
        assert main(words) == 0, capsys.readouterr().err
        tables.append((folder / "requests.parquet").read_bytes())
    assert tables[0] == tables[1]


def test_the_example_has_about_30_lines():
    assert 20 <= len(blocks("python")[0].splitlines()) <= 33


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_the_tables_name_every_choice_and_no_other(family):
    header = "routing, prediction" if family in ("routing", "prediction") else family
    groups = find_groups([CONFIG_DIR])
    there = {choice.name for group in header.split(", ") for choice in groups[group]}
    assert {name for row in rows(header) for name in re.findall(r"`(\w+)`", row[0])} == there


@pytest.mark.parametrize("header", ["family", "batching", "scheduling", "caching", "layout", "placing"])
def test_no_cell_of_a_table_is_empty(header):
    assert all(all(row) for row in rows(header))


def test_every_family_is_documented():
    assert [row[0] for row in rows("family")] == [family.name for family in FAMILIES]


def test_every_claim_of_the_suite_is_documented():
    checked = {promise.__name__ for family in claims.PROMISES.values() for promise in family}
    documented = {name for row in rows("claim") for name in re.findall(r"`(\w+)`", row[0])}
    assert documented == checked | {
        promises.starvation_bound_holds.__name__,
        promises.starvation_bound_s_holds.__name__,
    }
