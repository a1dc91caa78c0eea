"""Tells the user's classes and frames from those of this project and of libraries."""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

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
