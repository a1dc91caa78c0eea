"""Every setting and choice that README.md and docs/ name in code exists: `key=value` and `group=choice`.

A page may name what it shows how to write (a `file:` block, or a name that begins with my_), placeholders in
capitals, and checkpoints of one's own. Calls of Python are no settings.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.app.settings.config_groups import CONFIG_DIR, GROUP_OF, find_groups
from experiments.app.settings.renamed import ALIASES, with_new_names
from tests.docs.blocks import PAGES, ROOT, blocks_of

WORD = re.compile(r"""[+~]*(?P<key>[a-z_]\w*(?:[./]\w+)*)(?:@[\w.]+)?=(?P<value>[^\s"()]*)""")
OTHERS = {
    *("request", "overwrite", "metric", "run"),  # arguments of commands that Hydra does not compose
    *("max_tokens", "purpose", "mode"),  # fields of requests to a server
    *("kv_load_failure_policy", "max_waiting_tokens", "waiting_served_ratio"),  # settings of other engines
    *("name", "init"),  # words of the text itself
    "model.quantization_config",  # an argument of presets that their files do not list
}
"""Names that pages give in the form of settings, and that are none."""
OWN = re.compile(r"my_\w+|[A-Z_]+|.*[/{\[$].*|\w+(\.\w+)+|smollm2|null|\.\.\.")
"""Choices of the reader's own: files, placeholders, lists and what a group has without a choice."""


def keys_of(node: Any, prefix: str = "") -> set[str]:
    """Returns the dotted keys of a YAML node, and of the nodes in it."""
    if isinstance(node, list):
        return set().union(*(keys_of(each, prefix) for each in node)) if node else set()
    if not isinstance(node, dict):
        return set()
    found: set[str] = set()
    for key, value in node.items():
        if str(key).startswith("_") or key == "defaults":
            continue
        found |= {f"{prefix}{key}"} | keys_of(value, f"{prefix}{key}.")
    return found


@cache
def known_keys() -> frozenset[str]:
    """Returns the settings of all commands, with every choice of every group."""
    found: set[str] = set()
    for file in CONFIG_DIR.rglob("*.yaml"):
        folder = file.parent.relative_to(CONFIG_DIR)
        is_global = "@package _global_" in file.read_text()
        prefix = "" if is_global else "".join(f"{part}." for part in folder.parts)
        found |= keys_of(yaml.safe_load(file.read_text()), prefix)
    for key, group in GROUP_OF.items():
        found |= {name.replace(f"{group}.", f"{key}.", 1) for name in found if name.startswith(f"{group}.")}
    return frozenset(found)


def words_of(page: Path) -> list[str]:
    """Returns the words `key=value` of a page: those of its commands, and of code that has nothing else."""
    found: list[str] = []
    for block in blocks_of(page):
        commands = re.sub(r"\s+#.*", "", block.text.replace("\\\n", " ")).splitlines()
        shown = (line for line in commands if line.startswith("windtunnel") and "--config-dir" not in line)
        found += [word for line in shown for word in shlex.split(line)]
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`\n]+)`", prose):
        words = code.split()
        if words[:1] == ["windtunnel"] or all(WORD.fullmatch(word) for word in words):
            found += words
    return [word for word in found if WORD.fullmatch(word)]


def problem_of(word: str, own: set[str]) -> str | None:
    """Returns what is wrong with a word. own: choices for which the page shows a file."""
    match = WORD.fullmatch(word)
    assert match is not None
    key, value = match["key"], match["value"]
    key = re.sub(r"^pools\.\w+\.(?=\w)", "", re.sub(r"\.\d+(?=\.)", "", key))
    groups = find_groups([CONFIG_DIR])
    group = GROUP_OF.get(key, key)
    if group in groups and not word.startswith("~"):
        known = {choice.name for choice in groups[group]} | own
        wrong = [each for each in value.split(",") if each not in known and not OWN.fullmatch(each)]
        if wrong and group == "model":  # a Hugging Face id
            wrong = [
                each for each in wrong if with_new_names([f"model={each}"], [CONFIG_DIR]) == [f"model={each}"]
            ]
        return f"{word}: {group} has no choice {wrong[0]}" if wrong and value else None
    known_key = key in known_keys() or key in ALIASES or key in OTHERS or key.startswith("hydra.")
    return None if known_key else f"{word}: no such setting"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_that_a_page_names_exists(page):
    own = {Path(block.argument).stem for block in blocks_of(page) if block.kind == "file"}
    own |= set(re.findall(r"(\w+)\.yaml", page.read_text()))
    assert [found for word in words_of(page) if (found := problem_of(word, own))] == []


def test_what_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`caching=none` or `engine.max_num_seq=3` and `replicas=2`\n```\nwindtunnel simulate pools=x\n```\n"
    )
    problems = [problem_of(word, set()) for word in words_of(page)]
    assert problems == [
        "pools=x: pools has no choice x",
        "caching=none: caching has no choice none",
        "engine.max_num_seq=3: no such setting",
        None,
    ]
