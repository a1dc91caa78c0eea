"""Limits of settings, declared on the fields of a dataclass and checked when an object is made."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf, Unit

__all__ = [
    "BOUNDS", "FINITE", "Checked", "Ge", "Gt", "Le", "Limit", "Lt", "MinLen", "MultipleOf", "NonNegative",
    "NonNegativeInt", "OneOf", "Positive", "PositiveInt", "PositiveShare", "Share", "Unit", "check",
    "limits_of", "shown",
]  # fmt: skip

BOUNDS = (Gt, Ge, Lt, Le, MultipleOf)
FINITE = Lt(math.inf)
_NUMBERS = {int: Integral, float: Real}

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Le(1), Unit("share")]
PositiveShare = Annotated[float, Gt(0), Le(1), Unit("share")]
Positive = Annotated[float, Gt(0), FINITE]
NonNegative = Annotated[float, Ge(0), FINITE]


@dataclass(frozen=True, slots=True)
class OneOf:
    """The values that a field may have."""

    allowed: Collection[Any]


class Limit(NamedTuple):
    """The limits of a value, or of the elements of a value."""

    bounds: tuple[Any, ...]
    """Of the classes `BOUNDS`, `MinLen` and `OneOf`, in the order in which they are named."""
    rule: str
    """What the value must be: `a finite number > 0 s, or null for no limit`."""
    may_be_none: bool
    number: type | None
    """`Integral` or `Real` of a field that is a number; None: it is none."""
    element: Limit | None
    """The limits of each element of a list, or of each value of a mapping."""


class Checked:
    """Base of dataclasses whose fields declare limits.

        @dataclass(frozen=True, kw_only=True, slots=True)
        class ShortestFirst(Checked):
            max_wait_s: Annotated[float | None, Gt(0), Unit("s"), "null for no limit"] = 30.0
            order: Annotated[str, OneOf(("prompt", "output"))] = "output"

    The bounds and the unit are those of annotated-types. A limit on an element of a list or a mapping stands
    on its annotation: `dict[str, Annotated[float, Gt(0)]]`. What relates several fields stands in the
    `__post_init__` of a class, which calls `check(self)` first. Types are checked where text becomes settings
    (`sim.settings.build`).
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)


def check(settings: Any) -> None:
    """Raises ValueError, with name, value and rule, for a field of a dataclass that breaks its limits."""
    cls: type = type(settings)
    for name, limit in limits_of(cls).items():
        _check(name, getattr(settings, name), limit)


@cache
def limits_of(cls: type) -> Mapping[str, Limit]:
    """Returns the limits of the fields of a dataclass that have any, by name.

    A field that a subclass declares again, for another default, keeps its limits unless it declares others.
    Annotations with names that only type checkers know declare none.
    """
    found = {}
    own = {field.name for field in fields(cls) if field.init}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules.get(base.__module__, base))
        for name, hint in vars(base).get("__annotations__", {}).items():
            if name not in own:
                continue
            holder = SimpleNamespace(__annotations__={name: hint})
            try:
                known = get_type_hints(holder, dict(names), dict(vars(base)), include_extras=True)
            except NameError:
                continue
            if limit := _limit(known[name]):
                found[name] = limit
    return found


def _limit(hint: Any) -> Limit | None:
    """Returns the limits that an annotation declares; None if it declares none."""
    metadata: list[Any] = []
    kinds, may_be_none = [], False
    for kind, own in _members(hint):
        metadata += own
        if kind is NoneType:
            may_be_none = True
        else:
            kinds.append(kind)
    bounds = tuple(one for one in metadata if isinstance(one, (*BOUNDS, MinLen, OneOf)))
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        bounds = (OneOf(get_args(kinds[0])),)
        kinds = [str]
    arguments = get_args(kinds[0]) if len(kinds) == 1 else ()
    elements = [kind for kind in arguments[-2:] if kind is not Ellipsis]
    element = _limit(elements[-1]) if elements else None
    if not bounds and element is None:
        return None
    number = next((_NUMBERS[kind] for kind in (float, int) if kind in kinds and len(kinds) == 1), None)
    return Limit(bounds, _rule(bounds, metadata, may_be_none), may_be_none, number, element)


def _members(hint: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yields the members of a union, each with what is annotated to it; that of the union comes first."""
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        for i, (kind, own) in enumerate(_members(inner)):
            yield kind, [*own, *metadata] if i == 0 else own
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint, []


def _rule(bounds: Sequence[Any], metadata: Sequence[Any], may_be_none: bool) -> str:
    unit = next((one.unit for one in metadata if isinstance(one, Unit)), "")
    numbers = " and ".join(text for one in bounds if one != FINITE and (text := _bound(one)))
    rule = f"a finite number {numbers}" if FINITE in bounds else numbers
    if unit == "share":
        rule = f"a share, {rule}"
    elif unit:
        rule = f"{rule} {unit}"
    for one in bounds:
        if isinstance(one, MinLen):
            rule = "not empty"
        elif isinstance(one, OneOf):
            allowed = [shown(value) for value in one.allowed if value is not None]
            rule = f"{'one of ' if len(allowed) > 1 else ''}{', '.join(allowed)}"
    notes = [one for one in metadata if isinstance(one, str)]
    if may_be_none and not any(note.startswith("null") for note in notes):
        notes.append("null")
    return "".join([rule, *map(_joined, notes)])


def _joined(note: str) -> str:
    if note.startswith("null"):
        return f", or {note}"
    return (
        f"{', ' if note.startswith(('or ', 'as ', 'because ', 'such as ', 'for example ')) else '; '}{note}"
    )


def _bound(one: Any) -> str:
    match one:
        case Gt(gt):
            return f"> {gt}"
        case Ge(ge):
            return f">= {_number(ge)}"
        case Lt(lt):
            return f"< {_number(lt)}"
        case Le(le):
            return f"<= {_number(le)}"
        case MultipleOf(multiple_of):
            return f"a multiple of {multiple_of}"
    return ""


def _number(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    return f"{value:g}"


def _check(name: str, value: Any, limit: Limit) -> None:
    if value is None and limit.may_be_none:
        return
    number = limit.number
    if number is not None and limit.bounds and (not isinstance(value, number) or isinstance(value, bool)):
        kind = "a whole number " if number is Integral else "a number "
        kind = "" if limit.rule.startswith("a ") else kind
        raise ValueError(f"{name}={shown(value)}: must be {kind}{limit.rule}")
    for bound in limit.bounds:
        if not _holds(value, bound):
            rule = f"must be {limit.rule}".replace("be not empty", "not be empty")
            raise ValueError(f"{name}={shown(value)}: {rule}{_nearest(value, bound)}")
    if limit.element is None:
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        _check(f"{name}.{key}" if isinstance(value, Mapping) else f"{name}[{key}]", item, limit.element)


def _holds(value: Any, bound: Any) -> bool:
    match bound:
        case Gt(gt):
            return bool(value > gt)
        case Ge(ge):
            return bool(value >= ge)
        case Lt(lt):
            return bool(value < lt)
        case Le(le):
            return bool(value <= le)
        case MultipleOf(multiple_of):
            return bool(value % multiple_of == 0)
        case MinLen(min_length):
            return len(value) >= min_length
        case OneOf(allowed):
            return value in allowed
    raise TypeError(f"{bound}: is no limit")


def _nearest(value: Any, bound: Any) -> str:
    if not isinstance(bound, OneOf) or not isinstance(value, str):
        return ""
    close = get_close_matches(value, [one for one in bound.allowed if isinstance(one, str)], n=1)
    return f"; nearest: {close[0]}" if close else ""


def shown(value: Any) -> str:
    """Returns a plain value as a user would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)
