"""The generated reference has every group, choice, setting, command and interface."""

import functools
import re

import pytest

from experiments.app.cli import COMMANDS
from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.site.docstrings import definition, docstring, fields_of, signature
from experiments.site.python_pages import PAGES, described, text
from experiments.site.reference import generated_pages
from experiments.site.settings_pages import unit
from sim.report.page import GLOSSARY

pages = functools.cache(generated_pages)
GROUPS = find_groups([CONFIG_DIR])


def rows(page):
    """Returns the cells of all rows of tables of a page."""
    lines = (line for line in pages()[page].splitlines() if line.startswith("| "))
    return [re.split(r"(?<!\\)\|", line.strip("| ")) for line in lines]


def num_settings(node):
    values = [value for name, value in node.items() if name != "_target_"]
    return sum(num_settings(value) if isinstance(value, dict) and value else 1 for value in values)


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_of_a_group_has_all_its_settings(group):
    text = pages()[f"reference/groups/{group.replace('/', '_')}.md"]
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE))
    assert set(sections) == {choice.name for choice in GROUPS[group]}
    for choice in GROUPS[group]:
        loaded = read_yaml(choice.file) or {}
        loaded.pop("defaults", None)
        keys = re.findall(
            rf"^\| `{group.replace('/', '.')}\.[^`]+`", sections[choice.name], flags=re.MULTILINE
        )
        assert len(keys) == num_settings(loaded), choice.name
        assert choice.description.split("<")[0] in sections[choice.name].replace("\\|", "|")


def test_a_setting_has_default_unit_and_meaning():
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows("reference/settings.md")}
    assert found["`signal_age_s`"][:2] == ["`0.05`", "s"]
    assert found["`replicas`"][2].startswith(">= 1 and")
    assert "age of the router" in found["`signal_age_s`"][3]
    hardware = pages()["reference/groups/hardware.md"]
    assert "| `hardware.memory_bandwidth_bytes_per_s` | `3.35e12` | bytes/s |" in hardware
    assert "| `hardware.source` | `NVIDIA H100 Tensor Core GPU data sheet (2023)` |" in hardware


def test_a_meaning_comes_from_the_field_where_the_file_has_no_comment():
    assert "Source of the other figures." in pages()["reference/groups/hardware.md"]
    assert fields_of("hwmodels.device.Device")["source"].meaning == "Source of the other figures."


@pytest.mark.parametrize(
    ("key", "expected"),
    [("max_wait_s", "s"), ("a.peak_flops_per_s.fp8", "FLOP/s"), ("hit_share", "0 to 1"), ("seed", ""),
     ("rate_per_s", "1/s"), ("host_gib", "GiB"), ("price_usd_per_hour", "USD/hour"), ("passes", "")],
)  # fmt: skip
def test_the_end_of_a_name_is_its_unit(key, expected):
    assert unit(key) == expected


def test_every_group_is_listed_with_its_content():
    listed = {
        re.findall(r"`([^`]+)`", row[0])[0]: row[3].strip()
        for row in rows("reference/groups.md")[1:]
        if "`" in row[0]
    }
    assert set(listed) == set(GROUPS)
    assert listed["batching"].startswith("policies of an engine: which sequences")
    assert all(listed.values())


def test_every_command_has_a_section():
    commands = pages()["reference/commands.md"]
    assert re.findall(r"^## (\w+)$", commands, flags=re.MULTILINE) == list(COMMANDS)
    assert "usage: windtunnel explain" in commands
    assert "`capacity.headroom`" in commands


def test_every_row_of_a_table_has_the_cells_of_its_head():
    for name, page in pages().items():
        for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
            widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, (name, table[:200])


def test_interfaces_have_signature_and_docstring():
    python = pages()["reference/python.md"]
    assert "simulate(*overrides: str" in python
    assert "Raises ConfigError for every mistake" in python
    assert "### Result.plot_latencies" in python
    assert "| `latencies` | `pd.DataFrame` |" in python


@pytest.mark.parametrize("target", sorted(name for _, _, names in PAGES.values() for name in names))
def test_a_public_interface_is_documented(target):
    assert docstring(definition(target))


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"sim\.api\.simulated: no such class or function"):
        described("sim.api.simulated")


def test_signatures_leave_self_out():
    (fill,) = definition("policies.batching.Batching").body[1:]
    assert signature(fill) == "fill(view: StepView, step: StepBuilder, now: float) -> None"


def test_formulas_of_a_docstring_are_code():
    assert (
        text("Computes x.\n\n    x = a < b\n\nMore.") == "Computes x.\n\n```text\n    x = a < b\n```\n\nMore."
    )


def test_the_glossary_is_that_of_the_report():
    assert {row[0].strip() for row in rows("reference/glossary.md")} >= set(GLOSSARY)
