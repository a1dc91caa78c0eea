"""Servers and engines that a Python file starts, read from its syntax tree; nothing is executed.

Read are lists of words (`cmd = ["vllm", "serve", MODEL]`, extended by `cmd += [...]`), texts that are passed
to a function (`os.system("vllm serve ...")`), and the classes `LLM` of vLLM and `Engine` of SGLang with their
arguments. Names have the constant that the file assigns them once; `os.environ.get` has its default. Another
value stands as `$EXPRESSION` among the words, as a variable of a shell without a value does.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.app.launch_lines.flags import Engine

ENGINES: dict[str, Engine] = {"LLM": "vllm", "Engine": "sglang"}
"""Class -> the engine that it starts without a server."""
MOST_NODES = 100_000
MOST_VALUES = 10_000
"""Expressions whose values are found in one file; values of further ones are unknown."""
LONGEST = 10_000
"""Words or characters of a value; longer ones are unknown."""


class Unknown(NamedTuple):
    """An expression whose value the text does not tell."""

    text: str

    def __str__(self) -> str:
        return f"${self.text}"


class Started(NamedTuple):
    """A command of the file, or an engine that it starts in its own process."""

    words: list[str]
    """The words of the command; of an engine, its arguments as flags of the server."""
    engine: Engine | None = None
    """Engine that the file starts without a server; None: words are a command."""


def started(text: str) -> Iterator[Started]:
    """Yields the commands and engines of a Python file; nothing if the text is not Python."""
    try:
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        if len(nodes) > MOST_NODES:
            return
        values = _Values(nodes)
        lists = [values.named(name) for name in values.lists]
        found = [Started([str(word) for word in words]) for words in lists if isinstance(words, list)]
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        for call in calls:
            for argument in call.args[:1]:
                value = (
                    values.of(argument)
                    if isinstance(argument, ast.List | ast.Constant | ast.JoinedStr)
                    else None
                )
                if isinstance(value, list):
                    found.append(Started([str(word) for word in value]))
                elif isinstance(value, str):
                    found.append(Started(value.split()))
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in ENGINES and (call.args or call.keywords):
                found.append(Started(_arguments(call, values), ENGINES[name]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from found


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of an engine's class as flags of its server."""
    words = []
    for name, value in arguments.items():
        flag = "--" + str(name).replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def _arguments(call: ast.Call, values: _Values) -> list[str]:
    given = dict[str, Any]()
    for place, argument in enumerate(call.args):
        given["model" if not place else f"argument-{place + 1}"] = values.of(argument)
    for keyword in call.keywords:
        value = values.of(keyword.value)
        if keyword.arg is not None:
            given[keyword.arg] = value
        elif isinstance(value, dict):
            given |= value
        else:
            given[f"**{value}"] = value
    return as_flags(given)


class _Values:
    """The constants that names of a file stand for."""

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        self._assigned = dict[str, list[ast.expr]]()
        self._added = dict[str, list[tuple[ast.expr, bool]]]()
        self._depth, self._left = 0, MOST_VALUES
        conditional = {
            inner
            for node in nodes
            if isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.Match)
            for inner in ast.walk(node)
            if isinstance(inner, ast.stmt)
        }
        statements = (node for node in nodes if isinstance(node, ast.stmt))
        for node in sorted(statements, key=lambda each: (each.lineno, each.col_offset)):
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                target = node.target
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                self._assigned.setdefault(target.id, []).append(node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self._added.setdefault(node.target.id, []).append((node.value, node in conditional))
            elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
                self._note_call(call, node in conditional)

    def _note_call(self, call: ast.Call, is_conditional: bool) -> None:
        """Notes cmd.extend([...]) and cmd.append(word)."""
        function = call.func
        if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and call.args):
            return
        if function.attr == "extend":
            self._added.setdefault(function.value.id, []).append((call.args[0], is_conditional))
        elif function.attr == "append":
            word = ast.List(elts=[call.args[0]], ctx=ast.Load())
            self._added.setdefault(function.value.id, []).append((word, is_conditional))

    @property
    def lists(self) -> list[str]:
        """Names that a list is assigned to."""
        return [
            name for name, given in self._assigned.items() if any(isinstance(one, ast.List) for one in given)
        ]

    def named(self, name: str) -> Any:
        """Returns the value of a name with what is added to it."""
        given = self._assigned.get(name, [])
        if len({ast.dump(one) for one in given}) != 1 or self._depth > 20:
            return Unknown(name)
        self._depth += 1
        value = self.of(given[0])
        for more, is_conditional in self._added.get(name, []):
            added = Unknown(f"{name} (extended under a condition)") if is_conditional else self.of(more)
            if isinstance(value, list):
                value = [*value, *added] if isinstance(added, list) else [*value, added]
            else:
                value = Unknown(name)
        self._depth -= 1
        return value

    def of(self, node: ast.expr) -> Any:
        """Returns the value of an expression; `Unknown` if the text does not tell it."""
        self._left -= 1
        value = self._found(node) if self._left > 0 else None
        if self._left <= 0 or (isinstance(value, list | str | dict) and len(value) > LONGEST):
            return Unknown("...")
        return value

    def _found(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.named(name)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return self._elements(elements)
            case ast.Dict(keys=keys, values=inner) if all(isinstance(key, ast.Constant) for key in keys):
                found = {
                    str(getattr(key, "value", "")): self.of(one) for key, one in zip(keys, inner, strict=True)
                }
                return (
                    Unknown(ast.unparse(node))
                    if any(isinstance(one, Unknown) for one in found.values())
                    else found
                )
            case ast.JoinedStr(values=parts):
                texts = [
                    self.of(part.value if isinstance(part, ast.FormattedValue) else part) for part in parts
                ]
                return "".join(map(str, texts))
            case ast.IfExp(test=test, body=body, orelse=other):
                chosen = self.of(test)
                return (
                    Unknown(ast.unparse(node))
                    if isinstance(chosen, Unknown)
                    else self.of(body if chosen else other)
                )
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                one, other = self.of(left), self.of(right)
                if isinstance(one, list) and isinstance(other, list):
                    return [*one, *other]
                if isinstance(one, str) and isinstance(other, str):
                    return one + other
            case ast.Call(func=function, args=arguments):
                return self._called(node, ast.unparse(function), arguments)
        return Unknown(ast.unparse(node))

    def _elements(self, elements: Sequence[ast.expr]) -> list[Any]:
        found = []
        for element in elements:
            if isinstance(element, ast.Starred):
                inner = self.of(element.value)
                found += inner if isinstance(inner, list) else [inner]
            else:
                found.append(self.of(element))
        return found

    def _called(self, node: ast.expr, function: str, arguments: Sequence[ast.expr]) -> Any:
        values = [self.of(argument) for argument in arguments]
        if values and not any(isinstance(value, Unknown) for value in values):
            if function in ("str", "int") and len(values) == 1:
                return str(values[0])
            if function == "json.dumps":
                return json.dumps(values[0])
            if function in ("os.environ.get", "os.getenv") and len(values) == 2:
                return values[1]
        return Unknown(ast.unparse(node))
