"""Reads the built HTML: addresses of other hosts from which a reader's browser would fetch files.

The theme's script can load libraries from a public host, but only for elements of the classes `LOADS_CODE`
and for the statistics of a repository, so pages with these count as well. Links are not fetched.
"""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

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
