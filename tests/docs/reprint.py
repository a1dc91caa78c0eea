"""Prints the output blocks of README.md and docs/ again: `python -m tests.docs.reprint [PAGE ...]`.

A block that a command prints is replaced by what it prints now. Of a block of some lines, a line that is no
longer printed is replaced by the printed one that is most like it apart from its digits; a line without a
counterpart is named and stays. The pages' tests (`test_examples.py`) then compare all lines.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, shown_lines, words_of

LIKE = 0.75
"""Least likeness of a line and its counterpart, 0 to 1."""


def output_of(command: str, folder: Path, known: dict[str, str]) -> str:
    """Returns what a command prints, run once in the page's folder. Exits if it fails."""
    if command not in known:
        program = ["-m", "experiments.app.cli", *words_of(command, folder)]
        if command.startswith("python -m "):
            program = words_of(command, folder)
        path = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *program], cwd=folder, env=path, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{command}: exit code {done.returncode}\n{done.stderr}")
        known[command] = done.stdout
    return known[command]


def masked(line: str) -> str:
    """Returns a line with one sign for every number and one space between words, for likeness."""
    return " ".join(re.sub(r"[\d.,]*\d", "#", line).split())


def renewed(block: Block, printed: str) -> tuple[str, list[str]]:
    """Returns the block's new text, and its lines that have no counterpart in what is printed."""
    if block.kind == "printed by":
        is_equal = shown_lines(printed) == shown_lines(block.text)
        lines = shown_lines(printed)
        if "\n\n" in block.text:  # the page keeps the empty lines, too
            lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
            lines = [line for line in lines if not line.startswith("outputs/")]
        text = "".join(f"{line}\n" for line in lines)
        return (block.text if is_equal else text), []
    rest, new, lost = shown_lines(printed), [], []
    for line in block.text.splitlines():
        text = line.rstrip()
        if not text or text.startswith("outputs/"):
            new.append(line)
            continue
        if text not in rest:
            like = [difflib.SequenceMatcher(None, masked(text), masked(other)).ratio() for other in rest]
            best = max(range(len(rest)), key=like.__getitem__, default=None)
            if best is None or like[best] < LIKE:
                lost.append(text)
                new.append(line)
                continue
            text = rest[best]
        new.append(text)
        rest = rest[rest.index(text) + 1 :]
    return "".join(f"{line}\n" for line in new), lost


def reprint(page: Path) -> None:
    """Runs the commands of a page from top to bottom and rewrites its blocks of output."""
    with tempfile.TemporaryDirectory() as name:
        folder, known = Path(name), dict[str, str]()
        for block in blocks_of(page):
            if block.kind == "file":
                (folder / block.argument).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.argument).write_text(block.text)
            for command in block.commands if "DATE/TIME" in page.read_text() else []:
                output_of(command, folder, known)
            if not block.is_printed:
                continue
            text, lost = renewed(block, output_of(block.argument, folder, known))
            if text != block.text:
                page.write_text(page.read_text().replace(block.text, text, 1))
                print(f"{page.relative_to(ROOT)}:{block.line}: printed again")
            for line in lost:
                print(f"{page.relative_to(ROOT)}:{block.line}: no longer printed: {line.strip()}")


def main() -> None:
    """Renews the pages that are named, or all with output."""
    named = [Path(name).resolve() for name in sys.argv[1:]]
    for page in named or [page for page in PAGES if any(block.is_printed for block in blocks_of(page))]:
        reprint(page)


if __name__ == "__main__":
    main()
