"""Checks a plain config value against the annotation of its field and converts it.

Stricter than OmegaConf's structured configs (a bool is not an integer, a float is not text) and more general:
objects, protocols, unions and typed containers are allowed, which OmegaConf rejects.
"""

import re
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, is_typeddict

from policies.user_code import definition, is_of_user, signature_lack
from sim.settings.errors import suggest

_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")
PLAIN_TYPES = (bool, int, float, str, list, tuple, dict, type(None))


LARGEST_INT = 2**63 - 1
"""Largest integer that a column of a table holds."""


class Planned:
    """Placeholder for an object that is built after its place is known to accept objects of its class."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind


class WrongObject(ValueError):
    """An object of the wrong class; the message names its class, so that its value need not be shown."""

    own: type = object
    """The class, if it is the user's."""
    quote = ""
    """The place in the user's file that defines the class or the method; empty for classes of ours."""


def convert(value: Any, annotation: Any) -> Any:
    """Converts `value` to the type of the annotation.

    Raises ValueError with the rule alone (`must be an integer`), because the caller knows key and value; for
    an element of a container the message begins with the element: `[2]=abc: must be an integer`.
    """
    if annotation is Any:
        return value
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _convert_to_one_of(value, arguments)
    if origin is Literal:
        one_of = "one of " if len(arguments) > 1 else ""
        _require(value in arguments, f"must be {one_of}{', '.join(map(str, arguments))}")
        return value
    if annotation is None or annotation is type(None):
        _require(value is None, "must be null")
        return None
    if annotation in _SCALARS:
        return _SCALARS[annotation](value)
    container = origin or annotation
    if not isinstance(container, type) or is_typeddict(container):
        return value  # a type variable or a NewType cannot be checked
    if issubclass(container, Enum):
        return _to_enum(value, container)
    if container is tuple:
        return _to_tuple(value, arguments)
    if container in (list, Sequence):
        return _to_list(value, arguments)
    if container in (dict, Mapping):
        return _to_dict(value, arguments)
    return _to_object(value, container)


def is_object(annotation: Any) -> bool:
    """Returns whether only objects, or None, have the type of an annotation."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    kinds = [
        kind for kind in (get_args(annotation) if is_union else (annotation,)) if kind is not types.NoneType
    ]
    return all(
        isinstance(kind, type) and not issubclass(kind, (*PLAIN_TYPES, Path, Enum, Mapping, Sequence))
        for kind in kinds
    )


def example_of(annotation: Any) -> str:
    """Returns an example value of a type, for messages."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for kind, example in ((Path, "FILE"), (bool, "true"), (int, "1"), (float, "1.0")):
        if kind in kinds:
            return example
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    return next(iter(enums[0])).name if enums else "VALUE"


def shown(value: Any) -> str:
    """Returns a value as a user would type it; for an object, the name of its class."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        settings = (f"{name}: {shown(item)}" for name, item in value.items() if name != "_target_")
        return f"{{{', '.join(settings)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value) if isinstance(value, (*PLAIN_TYPES, Path, Enum)) else _class_of(value).__name__


def _class_of(value: Any) -> type:
    """Returns the class of an object, which may be `Planned`."""
    return value.kind if isinstance(value, Planned) else type(value)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _to_bool(value: Any) -> bool:
    _require(isinstance(value, bool), "must be true or false")
    return bool(value)


def _to_int(value: Any) -> int:
    """Converts to an integer; whole floats are allowed, because users write `num_requests=1e6`."""
    whole = isinstance(value, float) and value.is_integer()
    _require(whole or _is_int(value), "must be an integer")
    _require(abs(value) <= LARGEST_INT, f"must be an integer of 64 bits, at most {LARGEST_INT:.3g}")
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, str) and (percent := _PERCENT.fullmatch(value)):
        raise ValueError(f"must be a number; write {float(percent[1]) / 100:.12g}")
    _require(isinstance(value, float) or _is_int(value), "must be a number")
    return float(value)


def _to_str(value: Any) -> str:
    """Converts to text; integers are allowed (a path may be `2023`), floats and booleans are not."""
    _require(isinstance(value, str) or _is_int(value), "must be text (put it in quotes)")
    return str(value)


def _to_path(value: Any) -> Path:
    if isinstance(value, Path):
        return value
    _require(value != "", "must be the path of a file or folder, but is empty")
    return Path(_to_str(value))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    Path: _to_path,
}


def _to_enum(value: Any, kind: type[Enum]) -> Enum:
    """Returns the member of an enum by its name or its value."""
    if isinstance(value, kind):
        return value
    for member in kind:
        if value in (member.name, member.value):
            return member
    raise ValueError(f"must be one of the choices; {suggest(str(value), [member.name for member in kind])}")


def _convert_to_one_of(value: Any, kinds: Sequence[Any]) -> Any:
    """Converts to the first member of a union that accepts the value; an exact type is preferred."""
    if type(value) in kinds:
        return value
    rules = []
    for kind in kinds:
        try:
            return convert(value, kind)
        except ValueError as error:
            if str(error).startswith("["):  # an element of the list is wrong
                raise
            rules.append(str(error).removeprefix("must be "))
    wanted = [kind for kind in kinds if isinstance(kind, type) and kind not in (*_SCALARS, types.NoneType)]
    if wanted and not isinstance(value, PLAIN_TYPES):
        raise _wrong_object(value, wanted)
    raise ValueError(f"must be {' or '.join(rules)}")


def _to_tuple(value: Any, kinds: Sequence[Any]) -> tuple[Any, ...]:
    _require(isinstance(value, list | tuple), "must be a list")
    if not kinds:
        return tuple(value)
    if kinds[-1] is Ellipsis:
        return tuple(_to_list(value, kinds[:1]))
    _require(len(value) == len(kinds), f"must be a list of {len(kinds)}, found {len(value)}")
    return tuple(
        _item(f"[{i}]", element, kind) for i, (element, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _to_list(value: Any, kinds: Sequence[Any]) -> list[Any]:
    _require(isinstance(value, list | tuple), "must be a list")
    return [_item(f"[{i}]", element, kinds[0]) if kinds else element for i, element in enumerate(value)]


def _to_dict(value: Any, kinds: Sequence[Any]) -> dict[Any, Any]:
    _require(isinstance(value, dict), "must be a mapping")
    if not kinds:
        return dict(value)
    return {
        _item(f".{name}", name, kinds[0]): _item(f".{name}", element, kinds[1])
        for name, element in value.items()
    }


def _item(where: str, value: Any, kind: Any) -> Any:
    try:
        return convert(value, kind)
    except WrongObject as error:
        located = WrongObject(f"{where}: {error}")
        located.own, located.quote = error.own, error.quote
        raise located from None
    except ValueError as error:
        raise ValueError(f"{where}={shown(value)}: {error}") from None


def _to_object(value: Any, kind: type) -> Any:
    """Checks an object that `build` has built from a nested node, and returns it."""
    _require(
        not isinstance(value, PLAIN_TYPES),
        f"must be {_with_article(kind)}: a mapping with a _target_ that names the class",
    )
    if _lack(value, kind):
        raise _wrong_object(value, [kind])
    return value


def _wrong_object(value: Any, kinds: Sequence[type]) -> WrongObject:
    names, own = " or ".join(map(_with_article, kinds)), _class_of(value)
    error = WrongObject(f"{own.__name__} {_lack(value, kinds[0])}; {names} is needed")
    if not is_of_user(own):
        return error
    error.own = own
    error.quote = definition(own, signature_lack(own, kinds[0], _methods(kinds[0]))[1])
    return error


def _with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def _lack(value: Any, kind: type) -> str:
    """Returns the reason why an object is not of a kind, such as `has no fill(...)`; empty if it is.

    An object of a protocol must have its public members; methods must be callable. Of a `Planned` object only
    the methods are checked.
    """
    own = _class_of(value)
    if not getattr(kind, "_is_protocol", False):
        if not issubclass(own, kind):
            return f"is not {_with_article(kind)}"
        return _lacking_method(own, kind)
    is_planned = isinstance(value, Planned)
    if is_planned and hasattr(own, "__getattr__"):
        return ""
    holder = own if is_planned else value
    for name, is_method in _members(kind).items():
        if is_planned and not is_method:
            continue
        if not hasattr(holder, name) or (is_method and not callable(getattr(holder, name))):
            return f"has no {name}{'(...)' if is_method else ''}"
    return _lacking_method(own, kind)


def _lacking_method(own: type, kind: type) -> str:
    """Returns the method that a user's class does not define, or not with its arguments; empty if none."""
    if not is_of_user(own):
        return ""
    for name in _methods(kind):
        if getattr(getattr(own, name, None), "__isabstractmethod__", False):
            return f"has no {name}(...)"
    return signature_lack(own, kind, _methods(kind))[0]


def _methods(kind: type) -> list[str]:
    """Returns the names of the public methods of a class or protocol."""
    return [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]


def _members(protocol: type) -> dict[str, bool]:
    """Returns the public members of a protocol and its bases: name -> whether it is a method."""
    bases = [base for base in reversed(protocol.__mro__) if getattr(base, "_is_protocol", False)]
    names = dict.fromkeys(
        name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", {}))
    )
    return {name: callable(getattr(protocol, name, None)) for name in names if not name.startswith("_")}
