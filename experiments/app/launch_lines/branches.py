"""Which lines of a shell script are run: the branches of its ifs, as far as the text tells."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
    "-eq": operator.eq,
    "-ne": operator.ne,
}
_ARITHMETIC = re.compile(r"[\d\s()+\-*/%<>=!?:&|]{1,200}")
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
    if not _ARITHMETIC.fullmatch(expression):
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
