"""The site is built without a dead link, and its pages fetch nothing from other hosts."""

import json
import re

import pytest

from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.site import __main__ as site
from experiments.site.pages import fetched_from_outside
from experiments.site.settings_pages import CONTENTS


def test_the_site_is_built_and_fetches_nothing_from_outside(tmp_path, monkeypatch):
    pytest.importorskip("zensical", reason="the site's builder is not installed: make docs installs it")
    monkeypatch.setattr(site, "BUILD", tmp_path)
    assert site.made("0.1") is None
    assert json.loads((tmp_path / "site" / "versions.json").read_text())[0]["version"] == "0.1"
    home = (tmp_path / "site" / "0.1" / "index.html").read_text()
    assert "cluster.html" in home
    assert 'src="./assets/' in home
    assert '<a href="own_policy.html">Write a policy</a>' in home
    assert 'href="./site.css"' in home
    absolute = re.compile(r'(?:src|href)="/')
    assert [file.name for file in tmp_path.rglob("*.html") if absolute.search(file.read_text())] == []


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://unpkg.com/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.googleapis.com/css">',
        '<img src="http://example.org/a.png">',
        '<pre class="mermaid"><code>graph</code></pre>',
        '<a href="https://example.org" data-md-component="source">stars</a>',
        '<p style="background: url(https://example.org/a.png)">',
        '<style>@import "https://example.org/a.css";</style>',
    ],
)
def test_what_is_fetched_from_outside_is_found(html, tmp_path):
    (tmp_path / "page.html").write_text(f"<html>{html}</html>")
    ((page, _),) = fetched_from_outside(tmp_path)
    assert page == "page.html"


def test_links_and_own_files_are_not_fetched_from_outside(tmp_path):
    (tmp_path / "page.html").write_text(
        '<a href="https://example.org">there</a><img src="pictures/a.png"><link rel="canonical" href="https://a.b">'
    )
    (tmp_path / "own.css").write_text("a { background: url(../a.svg) }")
    assert list(fetched_from_outside(tmp_path)) == []
    (tmp_path / "other.css").write_text("@font-face { src: url('https://fonts.gstatic.com/a.woff2') }")
    assert list(fetched_from_outside(tmp_path)) == [("other.css", "https://fonts.gstatic.com/a.woff2")]


def test_versions_are_listed_from_the_newest(tmp_path):
    for name in ("0.2", "0.10", "dev", "0.9.1"):
        (tmp_path / name).mkdir()
    (tmp_path / "index.html").touch()
    assert site.versions_of(tmp_path) == ["0.10", "0.9.1", "0.2", "dev"]


def test_the_content_of_every_group_is_described():
    assert set(CONTENTS) == set(find_groups([CONFIG_DIR]))
