"""The blocks of code of README.md and docs/, and the markers that say how tests run them.

A marker is a comment in the line before a block:

    printed by: COMMAND             the block is the whole output of the command
    some lines printed by: COMMAND  lines of it, in their order
    run with: WORDS                 the commands of the block get these words, too, so that they take seconds
    file: NAME                      the block is a file, for the commands below it
    tested by: FILE                 that test runs the block
    not run: REASON                 no test runs the block
    measured: WHEN AND WHERE        output with times of a machine, which no run repeats

Without a marker, a block whose lines begin with `windtunnel` is run as it is. A line with a placeholder
(FILE, FOLDER, CONFIG, `...`) is not run; DATE/TIME stands for the latest run of the page.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = ("printed by", "some lines printed by", "run with", "file", "tested by", "not run", "measured")
PLACEHOLDER = re.compile(r"\b(FILE|FOLDER|CONFIG|URL)\b|\.\.\.(?=\s|$)")
_BLOCK = re.compile(
    rf"^(?:<!-- (?P<kind>{'|'.join(KINDS)}): (?P<argument>[^\n]*) -->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One block of a page."""

    line: int
    kind: str  # of the marker; empty without one
    argument: str
    language: str
    text: str

    @property
    def is_commands(self) -> bool:
        """True if all lines are commands of windtunnel, or what prepares them."""
        lines = self.text.splitlines()
        return not self.language and all(re.match(r"(windtunnel|mkdir) ", line) for line in lines)

    @property
    def commands(self) -> list[str]:
        """The commands that can be run, without their comments."""
        if not self.is_commands or self.kind not in ("", "run with"):
            return []
        lines = (re.split(r"\s+# ", line)[0].strip() for line in self.text.splitlines())
        runnable = [line for line in lines if line.startswith("windtunnel ") and not PLACEHOLDER.search(line)]
        more = f" {self.argument}" if self.kind == "run with" else ""
        return [line + more for line in runnable]

    @property
    def is_printed(self) -> bool:
        """True if the block is output that a command must print again."""
        return self.kind in ("printed by", "some lines printed by")


def blocks_of(page: Path) -> list[Block]:
    """Returns the blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            line=text.count("\n", 0, found.start()) + 1,
            kind=found["kind"] or "",
            argument=found["argument"] or "",
            language=found["language"],
            text=found["text"],
        )
        for found in _BLOCK.finditer(text)
    ]


def shown_lines(text: str) -> list[str]:
    """Returns the lines that are neither empty nor the name of the run's folder."""
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("outputs/")]


def words_of(command: str, folder: Path) -> list[str]:
    """Returns the arguments of a command; DATE/TIME becomes that of its latest run below the folder."""
    for found in re.findall(r"outputs/(\w+)/DATE/TIME", command):
        runs = sorted((folder / "outputs" / found).glob("*/*"))
        assert runs, f"{command}: the page has no run of windtunnel {found} above it"
        command = command.replace(f"outputs/{found}/DATE/TIME", str(runs[-1].relative_to(folder)))
    return shlex.split(command)[1:]
