"""Decisions that are not allowed, and checks of what a user's policy returns.

The policies of this project have tests in place of these checks, so only those of a user are wrapped.
This module therefore tells the user's classes and frames from those of this project and of libraries.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MAX_SHOWN = 60
"""Length at which the text of a returned value is cut."""


class WrongDecisionError(RuntimeError):
    """A policy has returned or decided what is not allowed."""

    def __init__(self, policy: object, method: str, did: str, allowed: str) -> None:
        """Creates the error. did: what the method did, such as `returned 7`. allowed: the rule."""
        super().__init__(f"{type(policy).__name__}: {method} {did}; {allowed}")
        self.policy, self.method, self.did, self.allowed = policy, method, did, allowed


def returned(policy: object, method: str, value: object, allowed: str) -> WrongDecisionError:
    """Returns the error about a returned value. allowed: the rule, `must be a whole number`."""
    return WrongDecisionError(policy, method, f"returned {shown(value)}", f"it {allowed}")


def shown(value: object) -> str:
    """Returns the text of a value, with its type unless that is obvious, cut to `MAX_SHOWN` characters."""
    text = repr(value)
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}..."
    if type(value).__name__ in text or isinstance(value, bool | int | float | str | tuple | list | None):
        return text
    return f"{text} ({type(value).__name__})"


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number, of Python or numpy, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def checked_rank(policy: object, method: str = "rank") -> Callable[[Any], tuple[float, ...]]:
    """Returns a scheduling policy's method of that name; that of a user's policy checks each rank."""
    rank: Callable[[Any], tuple[float, ...]] = getattr(policy, method)
    if not is_of_user(type(policy)):
        return rank

    @wraps(rank)
    def checked(seq: Any) -> tuple[float, ...]:
        found: Any = rank(seq)
        if not isinstance(found, tuple) or not all(isinstance(n, Real) and n == n for n in found):  # no NaN
            raise returned(policy, method, found, "must return a tuple of numbers, such as (seq.request_id,)")
        return found

    return checked


def checked_prediction(predictor: object) -> Callable[[Any, int | None], int]:
    """Returns a predictor's method `predict`; that of a user's predictor checks each length."""
    predict: Callable[[Any, int | None], int] = predictor.predict  # type: ignore[attr-defined]
    if not is_of_user(type(predictor)):
        return predict

    @wraps(predict)
    def checked(request: Any, true_num_tokens: int | None) -> int:
        found: Any = predict(request, true_num_tokens)
        most = request.max_tokens
        if not is_whole(found) or found < 1 or (most is not None and found > most):
            limit = "" if most is None else f" and <= {most}, the request's max_tokens"
            rule = f"must return a whole number of tokens >= 1{limit}"
            raise returned(predictor, "predict", found, rule)
        return int(found)

    return checked


def checked_draft_lengths(policy: object) -> Callable[[Any], int | NDArray[np.int64]]:
    """Returns a draft-length policy's method `num_draft_tokens`; a user's policy has its numbers checked."""
    decide: Callable[[Any], int | NDArray[np.int64]] = policy.num_draft_tokens  # type: ignore[attr-defined]
    if not is_of_user(type(policy)):
        return decide

    @wraps(decide)
    def checked(view: Any) -> int | NDArray[np.int64]:
        found: Any = decide(view)
        most, num_seqs = view.max_draft_tokens, len(view.sequences)
        is_array = getattr(found, "shape", None) == (num_seqs,) and found.dtype.kind in "iu"
        numbers = found.tolist() if is_array else [found]
        if not all(is_whole(number) and 0 <= number <= most for number in numbers):
            rule = f"must return a whole number from 0 to {most}, or an array of {num_seqs}, one per sequence"
            raise returned(policy, "num_draft_tokens", found, rule)
        return found.astype("int64") if is_array else int(found)

    return checked


PACKAGES = ("experiments", "fieldlimits", "hwmodels", "kernels", "policies", "realengine", "sim")
"""The packages of this project."""

_LIBRARIES = tuple(
    f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_NO_POLICIES = {*sys.stdlib_module_names, "numpy", "pandas", "omegaconf"} - {"__main__"}
"""Packages of values that settings contain, besides this project's."""


class Call(NamedTuple):
    """A frame of a traceback, and the line that it has reached."""

    frame: FrameType
    line: int

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.frame.f_code.co_name

    @property
    def first_argument(self) -> Any:
        """The object of a method's call, such as the policy; None for a function without arguments."""
        code = self.frame.f_code
        return self.frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None

    @property
    def is_ours(self) -> bool:
        """True if the code belongs to this project."""
        return _top(str(self.frame.f_globals.get("__name__", ""))) in PACKAGES

    def is_of_user(self, packages: Collection[str]) -> bool:
        """Returns whether the code is the user's.

        packages: those of the user's policies, which may be installed as libraries are.
        """
        file = self.frame.f_code.co_filename
        if self.is_ours or file == "<string>" or file.startswith("<frozen"):  # dataclasses are "<string>"
            return False
        if _top(str(self.frame.f_globals.get("__name__", ""))) in packages:
            return True
        return not str(Path(file).resolve()).startswith(_LIBRARIES)

    def quoted(self) -> str:
        """Returns file, line and source as lines of a message."""
        return quoted(self.frame.f_code.co_filename, self.line, self.name)


def calls_of(error: BaseException) -> list[Call]:
    """Returns the calls of an error's traceback, the outermost first."""
    return [Call(frame, line) for frame, line in walk_tb(error.__traceback__)]


def is_of_user(cls: type) -> bool:
    """Returns whether a class is the user's, and neither this project's nor a library's."""
    top = package_of(cls)
    return top not in PACKAGES and top not in _NO_POLICIES


def package_of(cls: type) -> str:
    """Returns the name of the top-level package, or module, that defines a class."""
    return _top(cls.__module__)


def files_of(cls: type) -> Iterator[str]:
    """Yields the files of a class and of its bases that are the user's."""
    for each in cls.__mro__:
        module = sys.modules.get(each.__module__)
        if is_of_user(each) and getattr(module, "__file__", None):
            yield str(module.__file__)  # type: ignore[union-attr]


def definition(cls: type, method: str = "") -> str:
    """Returns file, line and source of a user's method, or of the class, as lines of a message."""
    found = inspect.unwrap(getattr(cls, method, cls))
    code = getattr(found, "__code__", None)
    if code is not None and _top(getattr(found, "__module__", "") or "") not in PACKAGES:
        first = code.co_firstlineno
        while linecache.getline(code.co_filename, first).lstrip().startswith("@"):
            first += 1
        return quoted(code.co_filename, first, method)
    try:
        lines, first = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return ""
    skipped = next((i for i, line in enumerate(lines) if line.lstrip().startswith("class ")), 0)
    return quoted(inspect.getsourcefile(cls) or "", first + skipped, "")


def quoted(file: str, line: int, function: str, source: str = "") -> str:
    """Returns a place in a file, and its line of source, as lines of a message."""
    place = Path(file)
    if place.is_absolute() and place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    where = f", in {function}" if function and not function.startswith("<") else ""
    text = (source or linecache.getline(file, line)).strip()
    return f"  {place}:{line}{where}" + (f"\n    {text}" if text else "")


def _top(module: str) -> str:
    return module.partition(".")[0]
