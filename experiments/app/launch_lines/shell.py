"""Finds the commands that start servers in shell scripts and command lines; nothing is executed.

A script may have continued lines, variables, arrays, branches and here-documents, and may run
`docker run IMAGE` or `bash -c SCRIPT`. Which branches of its ifs are run is told as far as the text says it.

The module is long because a command may stand in a script in a here-document.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

from experiments.app.launch_lines.flags import Engine
from experiments.app.launch_lines.versions import IMAGES
from sim.settings.errors import ConfigError

MAX_BYTES = 1_000_000
"""Largest text that is read, and largest value of a variable."""
LITERAL = "\0"
"""A dollar sign of a here-document whose end is in quotation marks, in which nothing is replaced."""
MOST_LINES = 60
"""Lines over which a quotation may go."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_ARRAY = re.compile(
    r"^(?P<before>[ \t]*)(?:declare -a |local |readonly )?(?P<name>\w+)(?P<adds>\+?)=\("
    r"(?P<content>(?:'[^']*'|\$\(\(.*?\)\)|[^()])*)\)",
    re.M,
)
_QUOTED_ARRAY = re.compile(r"\"(\$\{\w+\[[@*]\]\})\"")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()$\n]|\([^()$\n]*\))*)\)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_HERE = re.compile(
    r"cat[^\n]*?(?:>[ \t]*(?P<before>\S+)[ \t]*<<|<<)-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)['\"]?"
    r"(?:[ \t]*>[ \t]*(?P<after>\S+))?[^\n]*\n(?P<text>.*?)\n[ \t]*(?P=end)[ \t]*$",
    re.M | re.S,
)
_VARIABLE = re.compile(
    r"\$\{(?P<braced>\w+)(?:\[@\]|\[\*\])?(?::?[-=](?P<default>[^{}]*))?\}|\$\((?P<kubernetes>\w+)\)|\$(?P<plain>[A-Za-z_]\w*)"
)
_WORD = re.compile(
    r"""\s+|\d?>&\d|[;&|]+|(?:\\.|\$\(\((?:[^()\n]|\([^()\n]*\))*\)\)|\$\([^()]*\)|`[^`]*`|'[^']*'|"(?:\\.|[^"\\])*"|[^\s;&|'"\\`])+"""
    r"""|(?P<open>['"`\\])""",
    re.S,
)
"""Matches blanks, an operator of the shell, or a word with the quotations in it."""


FENCE = "```"
"""Beginning of a line around a script in Markdown."""
_PLACEHOLDER = re.compile(r"[\w./-]*<[A-Za-z][\w.-]*>[\w./-]*")
"""Matches what a document writes in place of a value: <port>."""


Role = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command that starts a server."""

    engine: Engine
    tokens: tuple[str, ...]
    """The words after the program."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the same script writes, by the name that it gives them."""
    folder: Path = Path()
    """Folder in which files that the command names are looked for."""
    version: str | None = None
    """Version of the engine, by its container image or package; None: it is not named."""
    is_offline: bool = False
    """Whether a program runs the engine itself, without a server."""
    copies: int = 1
    """Number of servers that the manifest starts with this command."""
    routing: str | None = None
    """How their requests are distributed (a choice of `routing`); None: the manifest does not say."""
    role: Role | None = None
    """The part of a disaggregated deployment, as the manifest says; None: it does not say."""


def read_text(path: Path) -> str:
    """Reads a regular file of at most `MAX_BYTES`. Raises ConfigError."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: must be a regular file")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: must have at most {MAX_BYTES:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: must be UTF-8 text: {error}") from None


def _without_waiting(name: str, flags: int) -> int:
    """Opens a file; a pipe without a writer does not make it wait."""
    return os.open(name, flags | os.O_NONBLOCK)


def commands_of_script(
    text: str, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Command]:
    """Yields the commands of a shell script, or of one line."""
    text = text.replace("\r\n", "\n")
    files = {}
    for here in _HERE.finditer(text):
        if name := here["before"] or here["after"]:
            text_of_file = here["text"]
            files[name.strip("'\"")] = text_of_file.replace("$", LITERAL) if here["quote"] else text_of_file
    text = _HERE.sub("", text)
    text = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(("#", FENCE)))
    text = re.sub(r"[ \t]*\\[ \t]*\n[ \t]*", " ", text)  # blanks after a backslash are a slip of the pasting
    variables = dict(environment or {})
    text = _QUOTED_ARRAY.sub(r"\1", text)  # its parts have quotation marks of their own
    text = _ARRAY.sub(_as_one_line, text)
    branches, unsure = Branches(), set[str]()
    for line in _lines(text):
        for whole in _apart(line):
            words = branches.enter(whole, lambda given: plain_words(given, variables))
            if not words or branches.run is False:
                continue
            if all(ASSIGNMENT.match(word) for word in _unexported(words)):
                for word in _unexported(words):
                    _assign(word, variables, unsure, is_sure=branches.run is True)
                continue
            yield from commands_of_words(plain_words(words, variables), variables, files, folder)


def _as_one_line(array: re.Match[str]) -> str:
    """Returns the assignment of an array as one of a text on one line."""
    content = " ".join(line.partition(" #")[0].strip() for line in array["content"].split("\n"))
    return f"{array['before']}{array['name']}{array['adds']}={shlex.quote(content.strip())}"


def _assign(word: str, variables: dict[str, str], unsure: set[str], *, is_sure: bool) -> None:
    """Sets a variable. One that has another value in a branch of which the text does not tell has none.

    Without a value it is named as such where a flag needs it. A branch that sets a value which is unknown
    changes nothing.
    """
    name, _, value = word.partition("=")
    value = with_values(_unquoted(value), variables)
    if name.endswith("+"):
        name = name[:-1]
        value = f"{variables.get(name, '')} {value}".strip()
    if is_sure:
        unsure.discard(name)
        variables[name] = value
    elif name in variables and "$" in value and name not in unsure:
        return
    elif name in unsure or variables.get(name, value) != value:
        unsure.add(name)
        variables.pop(name, None)
    else:
        variables[name] = value


def _lines(text: str) -> Iterator[list[str]]:
    """Yields the words of each line; a quotation may go on in the next lines."""
    lines, first = text.split("\n"), 0
    while first < len(lines):
        last = first + 1
        for end in range(first + 1, min(first + MOST_LINES, len(lines)) + 1):
            try:
                yield _split("\n".join(lines[first:end]))
            except ValueError:
                continue
            last = end
            break
        first = last  # a quotation that never ends makes its line no command


def _unexported(words: Sequence[str]) -> Sequence[str]:
    return words[1:] if words[0] in ("export", "local", "readonly") and len(words) > 1 else words


def _split(line: str) -> list[str]:
    """Splits a line into words; quotation marks are kept, so that it can be seen what they protect.

    Raises ValueError for a quotation that does not end.
    """
    words, position = [], 0
    while position < len(line):
        found = _WORD.match(line, position)
        if found is None or found["open"]:
            raise ValueError("a quotation does not end")
        position = found.end()
        if found[0].startswith("#"):
            break
        if found[0].strip():
            words.append(found[0])
    return words


def _apart(words: Sequence[str]) -> Iterator[list[str]]:
    """Yields the commands of a line: those between ;, &&, || and |, without redirections."""
    own: list[str] = []
    skips = tests = is_open = False
    for word in words:
        tests, was_open = word == "[[" or (tests and word != "]]"), is_open
        is_open = (is_open or bool(re.match(r"<[A-Za-z]", word))) and not word.endswith(">")
        if word in ("&&", "||") and (tests or own[:1] in (["if"], ["elif"])):
            own.append(word)
        elif re.fullmatch(r"[;&|]+", word):
            yield own
            own = []
        elif _PLACEHOLDER.fullmatch(word):
            own.append(word)
        elif re.fullmatch(r"[&\d]?(>>?|<)(&\d?)?", word):
            skips = True
        elif re.match(r"[&\d]?>|\d?<", word):
            continue
        elif word.endswith(">") and len(word) > 1 and not was_open:
            own.append(word.rstrip(">"))
            skips = True
        elif skips:
            skips = False
        else:
            own.append(word)
    yield own


def _unquoted(word: str) -> str:
    """Removes the quotation marks of a word, as a shell does."""
    try:
        parts = shlex.split(word)
    except ValueError:
        return word
    return " ".join(parts)


def with_values(text: str, variables: Mapping[str, str], depth: int = 0) -> str:
    """Puts the values of variables into a text; those without a value stay."""

    def value(found: re.Match[str]) -> str:
        name = found["braced"] or found["kubernetes"] or found["plain"]
        if name in variables:
            return variables[name]
        return found[0] if found["default"] is None else found["default"]

    def number(found: re.Match[str]) -> str:
        return number_of(_NAME.sub(lambda name: variables.get(name[0], name[0]), found[1])) or found[0]

    replaced = _ARITHMETIC.sub(number, _VARIABLE.sub(value, text))
    if replaced == text or depth == 5 or len(replaced) > MAX_BYTES:
        return replaced
    return with_values(replaced, variables, depth + 1)


def plain_words(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Returns words without quotation marks, with the values of variables."""
    plain: list[str] = []
    for word in words:
        if word.startswith("'") or "='" in word:  # nothing is replaced in single quotation marks
            plain.append(_unquoted(word))
            continue
        expanded = with_values(word, variables)
        if '"' in word:
            plain.append(_unquoted(expanded))
        else:
            plain += words_of(expanded) if "$" in word else [_unquoted(expanded)]
    return plain


def words_of(text: str) -> list[str]:
    """Returns the words of a text, or the text if a quotation in it does not end."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def commands_of_words(
    plain: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str], folder: Path
) -> Iterator[Command]:
    """Yields the command in these words."""
    shell = next((i for i, word in enumerate(plain) if re.fullmatch(r"(.*/)?(ba|z|da)?sh", word)), None)
    if shell is not None and (script := script_of(plain[shell + 1 :])) is not None:
        yield from commands_of_script(script, folder, dict(variables))
        return
    environment = {**variables, **_environment(plain)}
    start = _start(plain)
    if start is None:
        return
    engine, first = start
    yield Command(
        engine=engine,
        tokens=tuple(plain[first:]),
        environment={name: value for name, value in environment.items() if name.isupper()},
        files={
            with_values(name, variables): with_values(text, variables).replace(LITERAL, "$")
            for name, text in files.items()
        },
        folder=folder,
    )


def script_of(words: Sequence[str]) -> str | None:
    """Returns the script of `sh -c SCRIPT`."""
    for i, word in enumerate(words):
        if re.fullmatch(r"-\w*c", word):
            return words[i + 1] if i + 1 < len(words) else None
        if not word.startswith("-"):
            return None
    return None


def _environment(words: Sequence[str]) -> dict[str, str]:
    """Returns variables that are set before a program, or by docker's -e and --env."""
    found = {}
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if i and words[i - 1] in ("-e", "--env") and equals:
            found[name] = value
        elif name in ("--env", "-e") and equals:
            name, _, value = value.partition("=")
            found[name] = value
        elif ASSIGNMENT.match(word) and all(ASSIGNMENT.match(w) or w == "env" for w in words[:i]):
            found[name] = value
    return found


def split_or_none(text: str) -> list[str]:
    """Returns the words with their quotation marks; none if a quotation does not end."""
    try:
        return _split(text)
    except ValueError:
        return []


MODULES: Mapping[str, Engine] = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "sglang.launch_server": "sglang",
    "dynamo.vllm": "vllm",
    "dynamo.sglang": "sglang",
    "dynamo.trtllm": "tensorrt_llm",
}
"""Modules that python -m starts; a worker of NVIDIA Dynamo takes the flags of its engine."""
PROGRAMS: Mapping[str, Engine] = {"vllm": "vllm", "sglang": "sglang"}
"""Programs with a subcommand serve."""


def _start(words: Sequence[str]) -> tuple[Engine, int] | None:
    """Returns the engine, and the index of the first word after the program; None if there is no server."""
    for i, word in enumerate(words):
        program = word.rpartition("/")[2]
        after = words[i + 1] if i + 1 < len(words) else ""
        if word in MODULES:
            return MODULES[word], i + 1
        if program in PROGRAMS and after == "serve":
            return PROGRAMS[program], i + 2
        if program == "trtllm-serve":
            if after in ("disaggregated_mpi_worker", "mm_embedding_serve"):
                raise ConfigError(
                    f"--from: trtllm-serve {after}: is not read; give trtllm-serve disaggregated -c FILE, or "
                    "the command of one server"
                )
            return "tensorrt_llm", i + 2 if after == "serve" else i + 1
    return _image(words)


def _image(words: Sequence[str]) -> tuple[Engine, int] | None:
    """Returns the engine of the container image in docker's command, and the index of the word after it."""
    if not {"docker", "podman", "nerdctl"} & {word.rpartition("/")[2] for word in words[:3]}:
        return None
    for i, word in enumerate(words):
        if word.startswith("-") or ASSIGNMENT.match(word):
            continue
        for engine, pattern in IMAGES.items():
            if pattern.search(word) and i and words[i - 1] not in ("-v", "--volume", "--name", "-w"):
                return engine, i + 1
    return None


_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
    "-eq": operator.eq,
    "-ne": operator.ne,
}
_CALCULATION = re.compile(r"[\d\s()+\-*/%<>=!?:&|]{1,200}")
_INNER = re.compile(r"\(([^()]*)\)")
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(Fraction(a, b)),  # towards zero
    ast.Mod: lambda a, b: a - b * int(Fraction(a, b)),
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(slots=True)
class Branches:
    """The ifs around a line, each with whether an earlier branch was taken and this one is; None: unknown."""

    open: list[tuple[bool | None, bool | None]] = field(default_factory=list)

    def enter(self, words: Sequence[str], plain: Callable[[Sequence[str]], list[str]]) -> Sequence[str]:
        """Returns the words of a command without the keywords before it, which open and close branches.

        plain: returns words with the values of variables, without quotation marks.
        """
        while words:
            keyword, rest = words[0], words[1:]
            if keyword == "if":
                self.open.append((False, holds(plain(rest))))
                return []
            if keyword == "case":
                self.open.append((None, None))
                return []
            if keyword in ("fi", "esac"):
                del self.open[-1:]
                return []
            if keyword in ("elif", "else") and self.open:
                before = _either(*self.open[-1])
                now = holds(plain(rest)) if keyword == "elif" else True
                self.open[-1] = before, False if before else now if before is False or now is False else None
                if keyword == "elif":
                    return []
            elif keyword not in ("then", "do", "else"):
                return words
            words = rest
        return []

    @property
    def run(self) -> bool | None:
        """Tells whether a line here is run; None: the text does not say."""
        states = [now for _, now in self.open]
        return False if False in states else None if None in states else True


def _either(first: bool | None, second: bool | None) -> bool | None:
    if first or second:
        return True
    return None if first is None or second is None else False


def holds(words: Sequence[str]) -> bool | None:
    """Returns whether tests with && or || between them hold; None if the text does not say.

    A variable without a value, another kind of test, and && beside || outside of [[ ]] say nothing.
    """
    parts, connectors, inside = [list[str]()], set[str](), False
    for word in words:
        inside = word == "[[" or (inside and word != "]]")
        if word in ("&&", "||") and not inside:
            connectors.add(word)
            parts.append([])
        else:
            parts[-1].append(word)
    if len(connectors) > 1:
        return None
    return _any_or_all(list(map(_test, parts)), is_any="||" in connectors)


def _any_or_all(found: Sequence[bool | None], *, is_any: bool) -> bool | None:
    if is_any in found:
        return is_any
    return None if None in found else not is_any


def _test(words: Sequence[str]) -> bool | None:
    """Returns whether one test holds, in [ ], [[ ]] or after `test`."""
    if words[:1] == ["[["] and words[-1] == "]]":
        ways = [[_comparison(part) for part in _cut(way, "&&")] for way in _cut(words[1:-1], "||")]
        return _any_or_all([_any_or_all(way, is_any=False) for way in ways], is_any=True)
    if words[:1] == ["["] and words[-1] == "]":
        return _comparison(words[1:-1])
    return _comparison(words[1:]) if words[:1] == ["test"] else None


def _cut(words: Sequence[str], at: str) -> list[list[str]]:
    """Returns the parts of a list of words between a word."""
    parts = [list[str]()]
    for word in words:
        if word == at:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _comparison(words: Sequence[str]) -> bool | None:
    negations = next((i for i, word in enumerate(words) if word != "!"), len(words))
    if negations:
        other = _comparison(words[negations:])
        return None if other is None else other is (negations % 2 == 0)
    if any("$" in word or "`" in word for word in words):
        return None
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, comparison, right = words
    if comparison in ("=", "=="):
        return left == right
    if comparison == "!=":
        return left != right
    if comparison in _COMPARISONS and left.isdecimal() and right.isdecimal():
        return _COMPARISONS[comparison](int(left), int(right))
    return None


def number_of(expression: str) -> str | None:
    """Returns the value of a shell's arithmetic with whole numbers; None for anything else, or below zero."""
    if not _CALCULATION.fullmatch(expression):
        return None
    try:
        while inner := _INNER.search(expression):
            expression = f"{expression[: inner.start()]} {_value(inner[1])} {expression[inner.end() :]}"
        value = _value(expression)
    except (ValueError, SyntaxError, ArithmeticError):
        return None
    return str(value) if value >= 0 else None


def _value(text: str) -> int:
    """Returns the value of arithmetic without brackets. Raises what `ast.parse` raises, and ValueError."""
    condition, asks, rest = text.partition("?")
    if asks:
        colons = [i for i, letter in enumerate(rest) if letter == ":"]
        own = next((i for i in colons if rest[:i].count(":") == rest[:i].count("?")), len(rest))
        return _value(rest[:own] if _value(condition) else rest[own + 1 :])
    for several, sufficient in (("||", True), ("&&", False)):
        if several in text:
            found = [bool(_value(part)) for part in text.split(several)]
            return int(sufficient in found) if sufficient else int(False not in found)
    return _of_node(ast.parse(text.strip(), mode="eval").body)


def _of_node(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_of_node(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_of_node(node.left), _of_node(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_OPERATORS[type(node.ops[0])](_of_node(node.left), _of_node(node.comparators[0])))
    raise ValueError("is not arithmetic with whole numbers")
