"""Which lines of a shell script are run: the branches of its ifs, as far as the text tells."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
    "-eq": operator.eq,
    "-ne": operator.ne,
}
_PRODUCTS = re.compile(r"(\d+)\s*([*/%])\s*(\d+)")
_SUMS = re.compile(r"(\d+)\s*([+-])\s*(\d+)")
_INNER = re.compile(r"\(\s*(\d+)\s*\)")
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "+": operator.add,
    "-": operator.sub,
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
    """Returns whether a test holds; None if a variable in it has no value, or it is of another kind."""
    if words[:1] in (["["], ["[["]) and words[-1] in ("]", "]]"):
        words = words[1:-1]
    elif words[:1] == ["test"]:
        words = words[1:]
    else:
        return None
    if words[:1] == ["!"]:
        other = holds(["test", *words[1:]])
        return None if other is None else not other
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
    """Returns the value of whole numbers with + - * / % and brackets; None for anything else."""
    for _ in range(100):
        if expression.strip().isdecimal():
            return expression.strip()
        if len(expression) > 200:
            return None
        for pattern in (_INNER, _PRODUCTS, _SUMS):
            if found := pattern.search(expression):
                break
        else:
            return None
        if pattern is _INNER:
            value = int(found[1])
        elif found[2] in "/%" and int(found[3]) == 0:
            return None
        else:
            value = _OPERATORS[found[2]](int(found[1]), int(found[3]))
        if value < 0:
            return None
        expression = f"{expression[: found.start()]}{value}{expression[found.end() :]}"
    return None
