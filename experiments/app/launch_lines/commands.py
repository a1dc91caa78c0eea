"""Finds the command that starts a server in a text or a file, without executing anything.

Read are a command line; a shell script, with continued lines, variables, arrays and here-documents; a line
with `docker run`; YAML: the `command` and `args` of a container in Compose and Kubernetes, a model of KServe
or of Ray Serve LLM, the `run` of a SkyPilot task; and Python (`python_files`).

The module is long because a command may stand in a manifest in a script in a here-document.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from experiments.app.launch_lines.branches import Branches, number_of
from experiments.app.launch_lines.flags import Engine
from experiments.app.launch_lines.python_files import as_flags, started
from experiments.app.launch_lines.versions import IMAGES, version_in
from experiments.app.settings.bounded_yaml import NotTextError, TooLargeError, parse_yaml
from sim.settings.errors import ConfigError

MAX_BYTES = 1_000_000
LITERAL = "\0"
"""A dollar sign of a here-document whose end is in quotation marks, in which nothing is replaced."""
MOST_LINES = 60
"""Lines over which a quotation may go."""
FORMS = (
    "'vllm serve MODEL ...', 'python -m vllm.entrypoints.openai.api_server ...', "
    "'python -m sglang.launch_server ...', 'sglang serve ...' or 'trtllm-serve MODEL ...'"
)

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_ARRAY = re.compile(
    r"^(?P<before>[ \t]*)(?:declare -a |local |readonly )?(?P<name>\w+)(?P<adds>\+?)=\("
    r"(?P<content>(?:'[^']*'|\$\(\(.*?\)\)|[^()])*)\)",
    re.M,
)
_QUOTED_ARRAY = re.compile(r"\"(\$\{\w+\[[@*]\]\})\"")
_ARITHMETIC = re.compile(r"\$\(\(([^$]*?)\)\)")
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
    r"""\s+|\d?>&\d|[;&|]+|(?:\\.|\$\([^()]*\)|`[^`]*`|'[^']*'|"(?:\\.|[^"\\])*"|[^\s;&|'"\\`])+"""
    r"""|(?P<open>['"`\\])""",
    re.S,
)
"""Matches blanks, an operator of the shell, or a word with the quotations in it."""


CONTAINER = ("entrypoint", "command", "args")
"""Keys of a container with the words of its command."""
FENCE = "```"
"""Beginning of a line around a script in Markdown."""
_PLACEHOLDER = re.compile(r"[\w./-]*<[A-Za-z][\w.-]*>[\w./-]*")
"""Matches what a document writes in place of a value: <port>."""


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


def command_in(given: str) -> Command:
    """Returns the only command in a text, or in the file of that name. Raises ConfigError."""
    given, variables = _before_a_file(given)
    path = _file(given)
    if path is None:
        text, found = given, list(_commands(given, Path()))
        where = "--from"
    else:
        text = read_text(path)
        is_yaml = path.suffix in (".yaml", ".yml", ".json") or re.search(
            r"^\s*(apiVersion|services):", text, re.M
        )
        found = list(_from_yaml(text, path.parent)) if is_yaml else []
        if path.suffix == ".py":
            found = list(_from_python(text, path.parent, variables))
        if not found:  # a script, or YAML that quotes one
            found = list(_commands(text, path.parent, variables))
        where = str(path)
    if not found:
        if path is None and not re.search(r"\s", given.strip()):
            raise ConfigError(f"--from {given}: no such file, and no command; give a file, or {FORMS}")
        raise ConfigError(f"{where}: has no command that starts a server; it must contain {FORMS}")
    found = [each for each in found if not _is_a_further_node(each)] or found
    if len({(each.engine, each.tokens) for each in found}) > 1:
        shown = "; ".join(f"{each.engine}: {shlex.join(each.tokens)[:80]}" for each in found[:4])
        raise ConfigError(
            f"{where}: has {len(found)} commands that start a server; give one of them ({shown})"
        )
    return replace(found[0], version=version_in(found[0].engine, _without_comments(text)))


def _is_a_further_node(command: Command) -> bool:
    """Returns whether the command adds a node to the server that another command starts."""
    if "--headless" in command.tokens:
        return True
    ranks = re.findall(r"--node[-_]rank[= ](\d+)", " ".join(command.tokens))
    return any(int(rank) > 0 for rank in ranks)


def _without_comments(text: str) -> list[str]:
    return [line for line in text.split("\n") if not line.lstrip().startswith("#")]


def _before_a_file(given: str) -> tuple[str, dict[str, str]]:
    """Returns a file's name and the variables before it, as in `TP=8 bash bench.sh`; otherwise the text."""
    words, variables = _words(given), {}
    while words and (found := _ASSIGNMENT.match(words[0])) is not None and words[0] != found[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words and words[0] in ("bash", "sh", "source", "."):
        words.pop(0)
    if len(words) == 1 and _file(words[0]) is not None:
        return words[0], variables
    return given, {}


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


def _file(given: str) -> Path | None:
    """Returns the path if the text is the name of something that exists; a folder is refused on reading."""
    if "\n" in given or "\0" in given or len(given) > 4000:
        return None
    try:
        path = Path(given).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _commands(text: str, folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Command]:
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
            words = branches.enter(whole, lambda given: _plain(given, variables))
            if not words or branches.run is False:
                continue
            if all(_ASSIGNMENT.match(word) for word in _unexported(words)):
                for word in _unexported(words):
                    _assign(word, variables, unsure, is_sure=branches.run is True)
                continue
            yield from _of_words(_plain(words, variables), variables, files, folder)


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
    value = _expanded(_unquoted(value), variables)
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
    skips = False
    for word in words:
        if re.fullmatch(r"[;&|]+", word):
            yield own
            own = []
        elif _PLACEHOLDER.fullmatch(word):
            own.append(word)
        elif re.fullmatch(r"[&\d]?(>>?|<)(&\d?)?", word):
            skips = True
        elif re.match(r"[&\d]?>|\d?<", word):
            continue
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


def _expanded(text: str, variables: Mapping[str, str], depth: int = 0) -> str:
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
    return _expanded(replaced, variables, depth + 1)


def _plain(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Returns words without quotation marks, with the values of variables."""
    plain: list[str] = []
    for word in words:
        if word.startswith("'") or "='" in word:  # nothing is replaced in single quotation marks
            plain.append(_unquoted(word))
            continue
        expanded = _expanded(word, variables)
        if '"' in word:
            plain.append(_unquoted(expanded))
        else:
            plain += _words(expanded) if "$" in word else [_unquoted(expanded)]
    return plain


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _of_words(
    plain: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str], folder: Path
) -> Iterator[Command]:
    """Yields the command in these words."""
    shell = next((i for i, word in enumerate(plain) if re.fullmatch(r"(.*/)?(ba|z|da)?sh", word)), None)
    if shell is not None and (script := _script(plain[shell + 1 :])) is not None:
        yield from _commands(script, folder, dict(variables))
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
            _expanded(name, variables): _expanded(text, variables).replace(LITERAL, "$")
            for name, text in files.items()
        },
        folder=folder,
    )


def _script(words: Sequence[str]) -> str | None:
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
        elif _ASSIGNMENT.match(word) and all(_ASSIGNMENT.match(w) or w == "env" for w in words[:i]):
            found[name] = value
    return found


MODULES: Mapping[str, Engine] = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "sglang.launch_server": "sglang",
}
"""Modules that python -m starts."""
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
            if after in ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve"):
                raise ConfigError(
                    f"--from: trtllm-serve {after}: only one server is read; prefill and decode apart are "
                    "set by pools=disaggregated"
                )
            return "tensorrt_llm", i + 2 if after == "serve" else i + 1
    return _image(words)


def _image(words: Sequence[str]) -> tuple[Engine, int] | None:
    """Returns the engine of the container image in docker's command, and the index of the word after it."""
    if not {"docker", "podman", "nerdctl"} & {word.rpartition("/")[2] for word in words[:3]}:
        return None
    for i, word in enumerate(words):
        if word.startswith("-") or _ASSIGNMENT.match(word):
            continue
        for engine, pattern in IMAGES.items():
            if pattern.search(word) and i and words[i - 1] not in ("-v", "--volume", "--name", "-w"):
                return engine, i + 1
    return None


def _from_python(text: str, folder: Path, variables: Mapping[str, str]) -> Iterator[Command]:
    """Yields the commands of a Python file, and the engines that it starts without a server."""
    for words, engine in started(text):
        if engine is None:
            yield from _of_words(words, variables, {}, folder)
        else:
            tokens = tuple(words)
            yield Command(engine=engine, tokens=tokens, environment=variables, folder=folder, is_offline=True)


def _from_yaml(text: str, folder: Path) -> Iterator[Command]:
    """Yields the commands of the containers in YAML, of which there may be several documents."""
    for part in re.split(r"^---.*$", text, flags=re.M):
        try:
            whole = parse_yaml(part, "--from")
        except (TooLargeError, NotTextError) as error:
            raise ConfigError(str(error)) from None
        except (yaml.YAMLError, ValueError) as error:
            what = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise ConfigError(f"--from: not valid YAML: {what}") from error
        of_object = _copies(whole, "spec", "replicas")
        for node in _mappings(whole):
            for command in (*_of_container(node, folder), *_of_ray(node, folder), *_of_kserve(node, folder)):
                if of_object > 1:  # a Service picks one of its pods at random
                    yield replace(command, copies=of_object, routing="random")
                else:
                    yield command


def _copies(node: Any, *keys: str) -> int:
    """Returns the number below these keys; 1 if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, int) and not isinstance(node, bool) and node > 1 else 1


def _mappings(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        for value in node.values():
            yield from _mappings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _mappings(value)


def _of_container(node: Mapping[str, Any], folder: Path) -> Iterator[Command]:
    """Yields the command of a mapping with command, args or run, and of a text with a script in it."""
    environment = _variables(node.get("environment", node.get("env", node.get("envs"))))
    if isinstance(node.get("run"), str):  # a task of SkyPilot, a step of a CI
        yield from _commands(node["run"], folder, environment)
    parts = [part for key in CONTAINER if isinstance(part := node.get(key), str | list)]
    if not parts:
        return
    words: list[str] = []
    for number, part in enumerate(parts):
        if isinstance(part, list):
            words += [_expanded(str(word), environment) for word in part if word is not None]
        elif isinstance(part, str) and _script([*words[1:], "x"]) is not None:
            words.append(part)  # the script of sh -c
        elif isinstance(part, str) and not words and number == len(parts) - 1:
            found = list(_commands(part, folder, environment))
            if found:
                yield from found
                return
            words += _plain(_split_or_none(part), environment)
        elif isinstance(part, str):
            words += _plain(_split_or_none(part), environment)
    found = list(_of_words(words, environment, {}, folder))
    image = node.get("image")
    if not found and isinstance(image, str):
        for engine, pattern in IMAGES.items():
            if pattern.search(image):
                found = [Command(engine=engine, tokens=tuple(words), environment=environment, folder=folder)]
                break
    copies = _copies(node, "deploy", "replicas")
    yield from (replace(command, copies=copies) for command in found)


def _of_ray(node: Mapping[str, Any], folder: Path) -> Iterator[Command]:
    """Yields the command of a model of Ray Serve LLM: `engine_kwargs` are vLLM's arguments."""
    model, arguments = node.get("model_loading_config"), node.get("engine_kwargs", {})
    if not isinstance(model, Mapping) or not isinstance(arguments, Mapping):
        return
    words = [str(model.get("model_source") or model.get("model_id") or ""), *as_flags(arguments)]
    copies = _copies(node, "deployment_config", "num_replicas")
    runtime = node.get("runtime_env")
    yield Command(
        engine="vllm",
        tokens=tuple(words),
        environment=_variables(runtime.get("env_vars") if isinstance(runtime, Mapping) else None),
        folder=folder,
        copies=copies,
        routing="power_of_two" if copies > 1 else None,
    )


def _of_kserve(node: Mapping[str, Any], folder: Path) -> Iterator[Command]:
    """Yields the command of a model of KServe whose runtime for Hugging Face models runs vLLM."""
    kind, words = node.get("modelFormat"), node.get("args", [])
    if not isinstance(kind, Mapping) or kind.get("name") != "huggingface" or not isinstance(words, list):
        return
    kept: list[str] = []
    for word in _plain([str(word) for word in words], _variables(node.get("env"))):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name == "--backend" and value not in ("", "auto", "vllm"):
            return
        kept.append({"--model-id": "--model", "--model-name": "--served-model-name"}.get(name, name))
        kept[-1] += equals + value
    stored = str(node.get("storageUri", ""))
    if stored.startswith("hf://"):
        kept += ["--model", stored.removeprefix("hf://")]
    yield Command(engine="vllm", tokens=tuple(kept), environment=_variables(node.get("env")), folder=folder)


def _split_or_none(text: str) -> list[str]:
    try:
        return _split(text)
    except ValueError:
        return []


def _variables(node: Any) -> dict[str, str]:
    """Returns the variables of a container: a mapping, or a list of NAME=VALUE or {name, value}."""
    if isinstance(node, Mapping):
        return {str(name): str(value) for name, value in node.items() if value is not None}
    found = {}
    for entry in node if isinstance(node, list) else ():
        if isinstance(entry, Mapping) and entry.get("value") is not None:
            found[str(entry.get("name"))] = str(entry["value"])
        elif isinstance(entry, str) and "=" in entry:
            name, _, value = entry.partition("=")
            found[name] = value
    return found
