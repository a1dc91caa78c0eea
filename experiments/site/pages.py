"""Pages of the site: where each Markdown file of the repository goes, and what the built HTML fetches.

Links of the Markdown files are rewritten.

README.md is the home page, `docs/` keeps its names, and every other Markdown file that a page links to is a
page in `project/`; links to notebooks lead to their pages in `notebooks/`. Links to files that are not pages,
such as sources, become plain text: the site needs no repository. A link whose text is the name of a file
shows the title of the page instead, as the site has no such file.

The built HTML is searched for addresses of other hosts from which a reader's browser would fetch files. The
theme's script can load libraries from a public host, but only for elements of the classes `LOADS_CODE` and
for the statistics of a repository, so pages with these count as well. Links are not fetched.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "README.md"
MAP_OF_DOCS = ROOT / "docs" / "README.md"
"""The list of pages for readers of the repository; the site has its navigation instead."""
NAMED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
PICTURES = {".png", ".svg", ".jpg"}
CONFIG = ROOT / "mkdocs.yml"
STYLE = Path(__file__).with_name("site.css")

_FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<label>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")


def links(text: str) -> list[str]:
    """Returns the targets of all links and pictures of a Markdown text, without those in blocks of code."""
    return [found["target"] for part in _prose(text) for found in _LINK.finditer(part)]


def is_external(target: str) -> bool:
    """Tests whether a link leaves the site."""
    return bool(re.match(r"[a-z]+:", target))


def linked_file(page: Path, target: str) -> Path:
    """Returns the file that a relative link of a page leads to; of a folder, its README.md if it has one."""
    path = target.partition("#")[0]
    file = Path(os.path.normpath(page.parent / path)) if path else page
    return file / "README.md" if file.is_dir() and (file / "README.md").exists() else file


def all_pages() -> dict[Path, str]:
    """Returns every Markdown file that is a page, with its place in the site.

    These are README.md, the files of docs/, CHANGELOG.md, and all that they link to, directly or not.
    """
    found: dict[Path, str] = {}
    rest = [HOME, *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in NAMED)]
    while rest:
        page = rest.pop()
        if page in found or page == MAP_OF_DOCS:
            continue
        found[page] = _place(page)
        targets = (target for target in links(page.read_text(encoding="utf-8")) if not is_external(target))
        files = (linked_file(page, target) for target in targets)
        rest += [file for file in files if file.suffix == ".md" and file.exists()]
    return found


def stage(folder: Path, generated: Mapping[str, str]) -> None:
    """Writes all pages and their pictures into an empty folder, links rewritten.

    generated: text of the pages that are not files of the repository, by their place in the site.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pages = all_pages()
    for page, place in pages.items():
        _write(folder / place, _rewritten(page, place, pages, folder))
    for place, text in generated.items():
        _write(folder / place, text)
    shutil.copy(STYLE, folder / STYLE.name)


def title_of(page: Path, place: str) -> str:
    """Returns the title of a page in the navigation; its first heading if it is not there."""
    found = re.search(rf"^ *- (.+): {re.escape(place)}$", CONFIG.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _place(page: Path) -> str:
    name = page.relative_to(ROOT).as_posix()
    if page == HOME:
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    stem = name.removesuffix("/README.md").removesuffix(".md")
    return NAMED.get(name, f"project/{stem.replace('/', '_')}.md")


def _rewritten(page: Path, place: str, pages: Mapping[Path, str], folder: Path) -> str:
    def rewrite(found: re.Match[str]) -> str:
        label, target = found["label"], found["target"]
        if is_external(target) or target.startswith("#"):
            return found[0]
        file = linked_file(page, target)
        anchor = target.partition("#")[1] + target.partition("#")[2]
        if file.suffix == ".ipynb":
            return f"{label}({_relative(f'notebooks/{file.stem}.md', place)})"
        if file in pages:
            if label == f"[{target.partition('#')[0]}]":
                label = f"[{title_of(file, pages[file])}]"
            return f"{label}({_relative(pages[file], place)}{anchor})"
        if file.suffix in PICTURES and file.exists():
            (folder / "pictures").mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / "pictures" / file.name)
            return f"{label}({_relative(f'pictures/{file.name}', place)})"
        if not file.exists():  # a generated page, which the site has and the repository has not
            return found[0] if page != HOME else f"{label}({target.removeprefix('docs/')})"
        return label.removeprefix("!")[1:-1]

    return _outside_of_code(page.read_text(encoding="utf-8"), lambda part: _LINK.sub(rewrite, part))


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    parts = _FENCE.split(text)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def _prose(text: str) -> Iterator[str]:
    yield from _FENCE.split(text)[::2]


def _relative(place: str, page: str) -> str:
    return os.path.relpath(place, os.path.dirname(page) or ".")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


FETCHED = {
    "audio": "src", "embed": "src", "iframe": "src", "img": "src", "input": "src", "link": "href",
    "object": "data", "script": "src", "source": "src", "video": "src",
}  # fmt: skip
NOT_FETCHED = {"author", "canonical", "next", "prev"}
"""Relations of `link` elements that no browser loads."""
LOADS_CODE = {"mermaid", "glightbox", "pyodide"}
_IN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        loads = LOADS_CODE & set(values.get("class", "").split())
        self.outside += [f"class {name} loads a script" for name in sorted(loads)]
        if values.get("data-md-component") == "source":
            self.outside.append("the statistics of a repository")
        address = values.get(FETCHED.get(tag, ""), "")
        relations = set(values.get("rel", "").split())
        if re.match(r"(https?:)?//", address) and not (tag == "link" and relations & NOT_FETCHED):
            self.outside.append(address)
        self.outside += _IN_STYLE.findall(values.get("style", ""))


def fetched_from_outside(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (file, address) of all that the pages and style sheets of a folder fetch from other hosts."""
    for file in sorted(folder.rglob("*.html")):
        text = file.read_text(encoding="utf-8")
        page = _Page()
        page.feed(text)
        styles = re.findall(r"<style[^>]*>(.*?)</style>", text, flags=re.DOTALL)
        addresses = [*page.outside, *(found for style in styles for found in _IN_STYLE.findall(style))]
        yield from ((file.relative_to(folder).as_posix(), address) for address in addresses)
    for file in sorted(folder.rglob("*.css")):
        found = _IN_STYLE.findall(file.read_text(encoding="utf-8"))
        yield from ((file.relative_to(folder).as_posix(), address) for address in found)
