"""Every link and anchor of README.md, docs/ and the pages that they lead to is alive. No site is built."""

import functools
import re
from pathlib import Path

import pytest
import yaml

from experiments.site.pages import ROOT, all_pages, is_external, linked_file, links, stage
from experiments.site.reference import generated_pages

PAGES = all_pages()
MAPS = {ROOT / "docs" / "README.md", *(ROOT / "tests").rglob("README.md"), ROOT / "configs" / "README.md"}
generated = functools.cache(generated_pages)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of the builder, without calling them."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
NAVIGATION = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]  # a subclass of SafeLoader


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """Returns the anchors of all headings, as GitHub and the site make them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found: dict[str, int] = {}
    anchored = set()
    for heading in re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        anchored.add(f"{slug}-{count}" if count else slug)
    return anchored


def dead_links(page: Path, text: str, pages: dict[str, str]) -> list[str]:
    """Returns the links of a page that lead nowhere. pages: texts of the generated pages by their place."""
    dead = []
    for target in links(text):
        if is_external(target):
            continue
        file, anchor = linked_file(page, target), target.partition("#")[2]
        place = str(file.relative_to(ROOT / "docs")) if file.is_relative_to(ROOT / "docs") else ""
        if file == page:
            there = text
        elif place in pages:
            there = pages[place]
        elif file.is_file():
            there = file.read_text() if file.suffix == ".md" else ""
        elif file.is_dir():
            there = ""
        else:
            dead.append(target)
            continue
        if anchor and anchor not in anchors(there):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", sorted({*PAGES, *MAPS}), ids=name_of)
def test_every_link_and_anchor_is_alive(page):
    assert dead_links(page, page.read_text(), generated()) == []


def test_dead_links_and_anchors_are_found():
    text = "# A\n[a](#a) [b](#b) [c](capacity.md#plan-capacity) [d](capacity.md#nope) [e](nope.md)\n"
    text += "```\n[f](g)\n```\n"
    page = ROOT / "docs" / "cluster.md"
    assert dead_links(page, text, {}) == ["#b", "capacity.md#nope", "nope.md"]
    assert dead_links(page, text, {"nope.md": ""}) == ["#b", "capacity.md#nope"]


def test_anchors_are_those_of_github():
    text = "# A `b` & [c](d.md)\n## Twice\n## Twice\n```\n# code\n```\n### How many GPUs?\n"
    assert anchors(text) == {"a-b--c", "twice", "twice-1", "how-many-gpus"}


def navigated(entries: list) -> list[str]:
    """Returns the pages of a navigation, in order."""
    values = [next(iter(entry.values())) for entry in entries]
    return [page for value in values for page in (navigated(value) if isinstance(value, list) else [value])]


def test_the_navigation_has_every_page_of_docs_once():
    pages = navigated(NAVIGATION)
    docs = {place for page, place in PAGES.items() if page.is_relative_to(ROOT / "docs")}
    assert sorted(pages) == sorted(set(pages))
    assert docs - set(pages) == set()
    assert set(pages) - set(PAGES.values()) - set(generated()) == set()


def test_the_list_of_pages_has_every_page():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([\w/]+\.md)`", row)}
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert listed == there


def test_links_are_rewritten_for_the_site(tmp_path):
    stage(tmp_path, generated())
    home, studies = (tmp_path / "index.md").read_text(), (tmp_path / "studies.md").read_text()
    assert "](accuracy.md)" in home
    assert "](docs/" not in home
    assert "](security.md)" in studies
    assert (tmp_path / "pictures" / "dashboard.png").exists()
    assert (tmp_path / "reference" / "settings.md").exists()
    for page in tmp_path.rglob("*.md"):
        relative = [
            link for link in links(page.read_text()) if not is_external(link) and not link.startswith("#")
        ]
        assert [link for link in relative if not (page.parent / link.partition("#")[0]).exists()] == [], page
