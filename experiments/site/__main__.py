"""`python -m experiments.site`: builds the documentation site into build/site/VERSION. Run by `make docs`."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.site.pages import ROOT, fetched_from_outside, stage
from experiments.site.reference import generated_pages

CONFIG = ROOT / "mkdocs.yml"
BUILD = ROOT / "build"
INDEX = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}/index.html">\n'


def main() -> None:
    """Writes the pages, builds the site, and exits with status 1 if a page fetches anything from outside."""
    parser = argparse.ArgumentParser(prog="python -m experiments.site", description=__doc__)
    parser.add_argument(
        "--version", default="dev", help="name of the folder and of the entry in the menu, such as 0.1"
    )
    options = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+", options.version):
        parser.error(f"--version={options.version}: letters, digits, dots and hyphens only, such as 0.1")
    sys.exit(made(options.version))


def made(version: str) -> str | None:
    """Builds one version and lists all versions of the site. Returns what is wrong with it, if anything."""
    site = BUILD / "site"
    stage(BUILD / "pages", generated_pages())
    if not built(site / version):
        return "The site builder found dead links or anchors, see above."
    versions = versions_of(site)
    listed = [{"version": name, "title": name, "aliases": []} for name in versions]
    (site / "versions.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    (site / "index.html").write_text(INDEX.format(versions[0]), encoding="utf-8")
    outside = [f"{page}: {address}" for page, address in fetched_from_outside(site / version)]
    if outside:
        return "\n".join(["Pages fetch files from outside:", *outside])
    print(site / version / "index.html")
    return None


def built(folder: Path) -> bool:
    """Builds the written pages into a folder. Returns whether all links and anchors are alive."""
    config = BUILD / "mkdocs.yml"
    text = CONFIG.read_text(encoding="utf-8").replace("docs_dir: build/", "docs_dir: ")
    config.write_text(re.sub(r"(?m)^site_dir: .*", f"site_dir: {folder}", text), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(config)]
    is_built = subprocess.run(command, check=False).returncode == 0
    # It would look for its files at the root of the host, while a version is a folder.
    (folder / "404.html").unlink(missing_ok=True)
    return is_built


def versions_of(site: Path) -> list[str]:
    """Returns the names of the versions that a folder has, the newest first and `dev` last."""

    def age(name: str) -> tuple[bool, list[int]]:
        return name != "dev", [int(number) for number in re.findall(r"\d+", name)]

    return sorted((path.name for path in site.iterdir() if path.is_dir()), key=age, reverse=True)


if __name__ == "__main__":
    main()
