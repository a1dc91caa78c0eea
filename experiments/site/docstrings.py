"""Reads docstrings, signatures and annotations from sources, without importing the modules."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from experiments.site.pages import ROOT

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Field(NamedTuple):
    """A field of a class: annotation, default and docstring, which are empty if there is none."""

    annotation: str
    default: str
    meaning: str


@cache
def tree_of(file: Path) -> ast.Module:
    """Returns the parsed source of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def module_file(dotted: str) -> Path | None:
    """Returns the file of a module of the project; None if there is no such module."""
    base = ROOT.joinpath(*dotted.split("."))
    files = (base.with_suffix(".py"), base / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def definition(target: str) -> Definition | None:
    """Returns the class or function of a dotted name, or None; the module may import it."""
    module, _, name = target.rpartition(".")
    file = module_file(module)
    if file is None:
        return None
    for node in tree_of(file).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return definition(f"{node.module}.{name}")
    return None


def docstring(node: Definition | None) -> str:
    """Returns a docstring without its indentation, or an empty text."""
    return (ast.get_docstring(node) or "") if node is not None else ""


def fields_of(target: str) -> Mapping[str, Field]:
    """Returns the annotated fields of a class and of its bases, by name."""
    node = definition(target)
    if not isinstance(node, ast.ClassDef):
        return {}
    module = target.rpartition(".")[0]
    found: dict[str, Field] = {}
    for base in node.bases:
        if isinstance(base, ast.Name):
            found |= fields_of(f"{module}.{base.id}")
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            meaning = _text(after)
            default = ast.unparse(statement.value) if statement.value else ""
            found[statement.target.id] = Field(ast.unparse(statement.annotation), default, _one_line(meaning))
    return found


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns `name(arguments) -> result` of a function, without self."""
    arguments = ast.unparse(node.args)
    arguments = arguments.removeprefix("self").removeprefix("cls").removeprefix(", ")
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({arguments}){result}"


def public_methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns the methods and properties of a class that do not begin with an underscore."""
    functions = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    return [item for item in functions if not item.name.startswith("_")]


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tests whether a method is a property."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _text(node: ast.stmt | None) -> str:
    """Returns the text of a statement that is only a text, such as the docstring of a field."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
