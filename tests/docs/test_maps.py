"""Every file, module and command that a text names exists, and every module has its place on a map."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.app.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fieldlimits", "policies", "hwmodels", "kernels", "sim", "realengine", "experiments")
LARGEST_MAP = 40
LARGEST_FOLDER_WITHOUT_MAP = 3
SETTINGS_OF_SIM = set(OmegaConf.load(ROOT / "configs" / "scenario.yaml").sim)
OUTPUTS = {"config.yaml"}
"""Written by a run: pages name them, the tree has none."""


def found_in(folder: str, pattern: str) -> Iterator[Path]:
    return (path for path in (ROOT / folder).rglob(pattern) if "templates" not in path.parts)


MAPS = sorted(path for folder in (*PACKAGES, "configs", "tests") for path in found_in(folder, "README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *MAPS]
MODULES = [path for package in PACKAGES for path in found_in(package, "*.py") if path.name != "__init__.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def inline_code(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose)


def named_paths(text: str) -> list[str]:
    """Returns the files and folders that the text names; a folder ends with a slash."""
    pattern = r"[\w/.-]*(\.(py|yaml|md|ipynb)|/)"
    return [code for code in inline_code(text) if re.fullmatch(pattern, code) and code not in OUTPUTS]


def named_modules(text: str) -> list[str]:
    dotted = rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+"
    named = {code for code in inline_code(text) if re.fullmatch(dotted, code)} - set(named_paths(text))
    return [*re.findall(f"python -m ({dotted})", text), *sorted(named)]


def is_known(dotted: str) -> bool:
    """Tests whether a name is a module, a name that stands in one, or a setting of the group sim."""
    parts = dotted.split(".")
    for end in range(len(parts), 1, -1):
        base = ROOT.joinpath(*parts[:end])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return end == len(parts) or bool(re.search(rf"\b{parts[end]}\b", file.read_text()))
    return parts[0] == "sim" and parts[1] in SETTINGS_OF_SIM


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_and_folder_that_a_page_names_exists(page):
    """Paths are relative to the page's folder or to the root."""
    places = (page.parent, ROOT)
    named = named_paths(page.read_text())
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_module_that_a_page_names_exists(page):
    assert [dotted for dotted in named_modules(page.read_text()) if not is_known(dotted)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_that_a_docstring_or_comment_names_exists(package):
    texts = {path: path.read_text() for path in found_in(package, "*.py")}
    unknown = {
        name_of(path): [dotted for dotted in named_modules(text) if not is_known(dotted)]
        for path, text in texts.items()
    }
    assert {name: dotted for name, dotted in unknown.items() if dotted} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_a_page_names_exists(page):
    named = set(re.findall(r"(?:^|`)windtunnel ([a-z]\w*)", page.read_text(), flags=re.MULTILINE))
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("page", MAPS, ids=name_of)
def test_a_map_is_short(page):
    assert len(page.read_text().splitlines()) <= LARGEST_MAP


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=name_of)
def test_every_module_is_on_a_map(folder):
    """A module is on the map of its folder; up to three modules may be on the map above instead."""
    modules = {path.name for path in MODULES if path.parent == folder}
    own = folder / "README.md"
    if own.exists():
        assert sorted(modules - set(named_paths(own.read_text()))) == []
        return
    assert len(modules) <= LARGEST_FOLDER_WITHOUT_MAP, "a folder as large as this needs a map of its own"
    above = next(parent for parent in folder.parents if (parent / "README.md").exists())
    assert f"{folder.relative_to(above)}/" in named_paths((above / "README.md").read_text())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_in_one_line_what_it_is(package):
    packages = found_in(package, "__init__.py")
    docstrings = {name_of(path): ast.get_docstring(ast.parse(path.read_text())) or "" for path in packages}
    assert [name for name, docstring in docstrings.items() if len(docstring.splitlines()) != 1] == []
