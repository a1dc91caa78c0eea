"""Rules of the project's prose, checked in all sources: first words of docstrings, and words.

Run by `make lint` as well. A rule is a function of a text, so that it is tested on small texts, too.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "fieldlimits",
    "policies",
    "hwmodels",
    "sim",
    "kernels",
    "realengine",
    "experiments",
    "configs",
    "docs",
    "tests",
)
SUFFIXES = {".py", ".md", ".yaml", ".toml"}

# First words of docstrings.

VERB = re.compile(r"Is called\b|[A-Z][a-z]*[a-rt-z]s\b(?!')")
NOUN = re.compile(  # "Requests the KV of ..." begins with a verb all the same
    r"(?i:adapters|always|arguments|axes|axis|blocks|bytes|candidates|capacities|clients|components|constraints"
    r"|contents|elements|errors|faults|fleets|flops|gpus|ids|iterations|its|kernels|kinds|lengths|logits|members"
    r"|milliseconds|owners|ports|positions|probabilities|prompts|replicas|requests|rows|seconds|segments"
    r"|sequences|settings|slots|tensors|this|ticks|tokens|weights)\b(?! the\b)"
)
RIDDLE = re.compile(r"(whether|of|who|what|how|if|as|so|and|but|the same)\b", re.IGNORECASE)
DOCSTRING = re.compile(r'^( *)r?"""(.*)', re.MULTILINE)
OWNER = re.compile(r"( *)(async def|def|class) (\w+)")
PROPERTY = re.compile(r"@(property|cached_property|functools\.cached_property|\w+\.setter)\b")

# Words.

WORDS = {
    "who": "name the thing (the request, the user, the replica), or write `that`",
    "whom": "name the thing (the request, the user, the replica)",
    "whoever": "write `any request`, `any replica`, `every user`",
    "nobody": "write `no request`, `no replica`, `no user`",
    "somebody": "write `a request`, `another replica`, `a user`",
    "everybody": "write `every request`, `all replicas`, `every user`",
    "Kitchen": "it is called SimulationService",
    "Hangar": "it is called ExecutorCache",
    "Flight": "it is called RunningStep",
    "Visit": "it is called RequestAttempt",
    "Told": "it is called TierLedger",
    "nobodys": "write `unused` or `padding`",
    "flies it": "write `simulates it` or `runs it`",
    "handovers": "they are KV transfers",
    "mirrors": "write `equals` or `copies`; recovery calls them copies",
    "troubles": "they are failures",
    "front door": "write `gateway` or `public interface`",
}
WORD = re.compile(
    r"(?<![A-Za-z])(?:(?i:whoever|whom|who|nobodys|nobody|somebody|everybody|flies it|handovers|mirrors"
    r"|troubles|front door)(?![A-Za-z])|(?:Kitchen|Hangar|Flight|Visit|Told)(?![a-z]))"
)
QUOTATION = re.compile(r'"[^"\n]*"|“[^”\n]*”')
CODE = re.compile(r"`[^`\n]*`")
ALLOWED = {
    # Old names that are accepted for one version.
    "CHANGELOG.md": {"troubles"},
    "experiments/conformance/renamed.py": {"everybody", "who"},
    "experiments/app/settings/renamed.py": {"troubles"},
    "tests/experiments/conformance/test_plugin.py": {"everybody"},
    "tests/experiments/app/settings/test_renamed.py": {"troubles"},
    # A key of summary.json, and the name of a random stream, whose draws it decides.
    "configs/experiment/crash_recovery.yaml": {"troubles"},
    "docs/cluster.md": {"troubles"},
    "sim/cluster/failures.py": {"troubles"},
    "sim/metrics/summary.py": {"troubles"},
    "sim/report/lines.py": {"troubles"},
    "tests/experiments/compare/test_comparisons.py": {"troubles"},
    "tests/experiments/serve/engine/test_fleet.py": {"troubles"},
    "tests/experiments/simulate/test_simulate.py": {"troubles"},
    "tests/sim/workload/test_streams.py": {"troubles"},
}


class Finding(NamedTuple):
    """A place that breaks a rule: the line, from 1, and what to write instead."""

    line: int
    advice: str


def docstrings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields (line, kind, first line) of each docstring in the layout of `ruff format`.

    Kinds are module, class, function, property and test. Docstrings of attributes are left out.
    """
    lines = text.split("\n")
    for found in DOCSTRING.finditer(text):
        indent, first = found[1], found[2].removesuffix('"""')
        line = text.count("\n", 0, found.start()) + 1
        if not indent:
            if not any(before and not before.startswith("#") for before in lines[: line - 1]):
                yield line, "module", first
            continue
        if not re.sub(r"\s*#.*", "", lines[line - 2]).endswith(":"):
            continue
        above = range(line - 2, -1, -1)
        owners = ((i, OWNER.match(lines[i])) for i in above)
        i, owner = next((i, owner) for i, owner in owners if owner and len(owner[1]) == len(indent) - 4)
        if owner[2] == "class":
            kind = "class"
        elif owner[3].startswith("test_"):
            kind = "test"
        else:
            kind = "property" if i and PROPERTY.match(lines[i - 1].strip()) else "function"
        yield line, kind, first


def docstring_findings(text: str) -> Iterator[Finding]:
    """Yields functions that do not begin with a verb in the third person, and riddles elsewhere."""
    for line, kind, first in docstrings(text):
        if kind == "function" and not (VERB.match(first) and not NOUN.match(first)):
            yield Finding(line, f'"{first[:40]}": begin with what the function does: Returns, Computes, ...')
        elif kind in ("class", "module", "property") and RIDDLE.match(first):
            yield Finding(line, f'"{first[:40]}": begin with what the {kind} is, or with what it does')


def word_findings(name: str, text: str) -> Iterator[Finding]:
    """Yields the words outside of quotations that the project does not use."""
    if not WORD.search(text):
        return
    for line, passage in passages(name, text):
        for found in WORD.finditer(passage):
            word = found[0] if found[0] in WORDS else found[0].lower()
            if word not in ALLOWED.get(name, ()):
                yield Finding(line + passage.count("\n", 0, found.start()), f'"{found[0]}": {WORDS[word]}')


def passages(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, passage) of a file without its quotations; of Python, its comments, strings and names."""
    if not name.endswith(".py"):
        for line, passage in enumerate(text.split("\n"), 1):
            if not passage.startswith(">"):
                yield line, QUOTATION.sub("", CODE.sub("", passage) if name.endswith(".md") else passage)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NAME):
            yield token.start[0], QUOTATION.sub("", token.string)
        elif token.type not in (tokenize.OP, tokenize.NUMBER):  # strings, and the pieces of f-strings
            quote = re.match(r"[A-Za-z]*(\"\"\"|'''|\"|'|)", token.string)
            inside = token.string.removeprefix(quote[0]).removesuffix(quote[1])
            yield token.start[0], QUOTATION.sub("", inside)


def sources() -> dict[str, str]:
    """Returns the text of every source file but this one, by its path from the root."""
    paths = [*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    files = [
        path for path in paths if (path.suffix in SUFFIXES or path.name == "Makefile") and path.is_file()
    ]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted(files)
        if path != Path(__file__)
    }


def report(findings: dict[str, list[Finding]]) -> str:
    """Returns a line for each finding: file:line, and what to write instead."""
    return "\n".join(f"{name}:{line}: {advice}" for name, ones in findings.items() for line, advice in ones)


def test_docstrings_begin_with_what_is_done():
    found = {name: list(docstring_findings(text)) for name, text in sources().items() if name.endswith(".py")}
    assert not any(found.values()), "\n" + report(found)


def test_words_are_the_fields():
    found = {name: list(word_findings(name, text)) for name, text in sources().items()}
    assert not any(found.values()), "\n" + report(found)


FUNCTION = '''
class Pool:
    """{of_class}"""

    num_free: int
    """Of each replica: no rule for attributes."""

    @property
    def num_used(self) -> int:
        """Blocks in use."""

    def free(
        self,
        num_blocks: int,
    ) -> None:  # a comment
        """{of_function}"""


def test_blocks_are_freed():
    """Of 3 blocks 2 are free."""
'''


@pytest.mark.parametrize(
    "first",
    ["The blocks.", "Whether it fits.", "Free some blocks.", "(a, b) of each.", "Blocks that are free.",
     "SGLang's cache.", "`pool.free` again.", "Address of the block.", "This frees blocks."],
)  # fmt: skip
def test_a_function_must_say_what_it_does(first):
    (found,) = docstring_findings(FUNCTION.format(of_class="Blocks.", of_function=first))
    assert found.line == 16
    assert found.advice.startswith(f'"{first}": begin with what the function does')


@pytest.mark.parametrize(
    "first",
    ["Frees blocks.", "Raises ValueError.", "Is called when it ends.", "Requests the KV of a sequence."],
)
def test_a_verb_in_the_third_person_is_what_a_function_does(first):
    assert not list(docstring_findings(FUNCTION.format(of_class="Blocks.", of_function=first)))


@pytest.mark.parametrize("first", ["Of each.", "What came of it.", "The same so much earlier.", "As it was."])
def test_classes_modules_and_properties_must_not_be_riddles(first):
    in_class, in_module = FUNCTION.format(of_class=first, of_function="Frees."), f'# licence\n"""{first}"""\n'
    assert [(found.line, found.advice.split(":")[0]) for found in docstring_findings(in_class)] == [
        (3, f'"{first}"')
    ]
    assert [found.line for found in docstring_findings(in_module)] == [2]
    in_property = FUNCTION.format(of_class="Blocks.", of_function="Frees.").replace("Blocks in use.", first)
    assert [found.line for found in docstring_findings(in_property)] == [10]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", "x = 1  # nobody waits", [1]),
        ("a.py", 'def f():\n    """Returns x.\n\n    Whoever waits.\n    """\n', [4]),
        ("a.py", "def who_waits(nobody_else):\n    pass\n", [1, 1]),
        ("a.py", 'raise ValueError(f"{x}: somebody else has it")', [1]),
        ("a.py", "class Visit(Flight):\n    pass\n", [1, 1]),
        ("a.py", 'WHOLE, in_flight = InFlight, visited  # told of "the boy who cried"', []),
        ("a.py", "'''The story of \"a boy who cried\".'''", []),
        ("a.yaml", "# for those who wait\na: front door\n", [1, 2]),
        ("a.md", 'Whom it serves.\n> a quotation: who?\n`who` and "nobody" are mentioned.\n', [1]),
        ("Makefile", "layers: ## who imports whom", [1, 1]),
        ("experiments/app/settings/renamed.py", 'NEW_NAMES = {"troubles": "failures"}', []),
        ("sim/settings/other.py", 'NEW_NAMES = {"troubles": "failures"}', [1]),
    ],
)
def test_words_are_found_where_they_are_ours(name, text, lines):
    assert [found.line for found in word_findings(name, text)] == lines


def test_every_word_has_its_advice():
    for word in WORDS:
        (found,) = word_findings("a.md", f"Here is {word} again.")
        assert found.advice == f'"{word}": {WORDS[word]}'


def test_a_report_names_file_and_line():
    assert report({"a.py": [Finding(3, "say so")], "b.py": []}) == "a.py:3: say so"


def test_all_sources_are_read():
    names = set(sources())
    assert {"README.md", "Makefile", "pyproject.toml", "sim/api.py", "configs/simulate.yaml"} <= names
    assert {"tests/conftest.py", "docs/policies.md", "kernels/rope.py"} <= names
