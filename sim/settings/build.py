"""Builds the object that a config node names, or raises an error that says what to change.

There is no registry of classes: `_target_` names a class (or a function that returns an object) and the other
keys are its settings. Hydra's own `instantiate` would report a misspelt setting as a TypeError deep in a
stack trace and would pass `abc` to a float field; `build` checks every setting first.

Errors of user policies, during construction and later, are reported like settings errors: a sentence, and the
place in the user's file.

`convert` checks a plain value against the annotation of its field and converts it. It is stricter than
OmegaConf's structured configs (a bool is not an integer, a float is not text) and more general: objects,
protocols, unions and typed containers are allowed, which OmegaConf rejects.
"""

import importlib
import inspect
import re
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self, TypeGuard, Union, get_args, get_origin, get_type_hints, is_typeddict

from policies.user_code import (
    PACKAGES,
    Policy,
    PolicyError,
    definition,
    failure,
    import_quote,
    is_of_user,
    name_of_class,
    package_of,
    signature_lack,
)
from sim.settings.errors import ConfigError, suggest

TARGET = "_target_"
_MISSING = "???"
EXAMPLES = {
    "model.path": "/models/my-llama, a folder with the model's config.json",
    "ops": "measurements, a folder with gemm.parquet and other tables of operators",
    "measured": "measured.csv",
    "out": "my_gpu.yaml",
}
"""Example values of required settings whose type alone is not informative."""


def build(node: Any, key: str, kind: Any = Any) -> Any:
    """Builds the object named by `node._target_`; its settings are checked against the annotations.

    key: the place of the node in the config (`batching`), for messages. kind: the required class or protocol.
    Nested nodes with their own `_target_`, including those in lists and mappings, are built first, but no
    class is called before its place is known to accept it.
    Raises ConfigError for a missing, unknown or ill-typed setting, for a target that cannot be imported, and
    if the target raises ValueError or OSError.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get(TARGET), str):
        raise ConfigError(f"{key}={shown(node)}: must be a mapping with a {TARGET} that names a class")
    target = locate(node[TARGET], key)
    if kind is not Any:
        _checked(_planned(node, key), kind, key)
    return _checked(build_as(target, node, key), kind, key)


def build_as(target: Callable[..., Any], node: Any, key: str) -> Any:
    """Builds an object like `build`, but from a given target instead of the node's `_target_`.

    key: empty for the root of the config.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"{key}={shown(node)}: must be a mapping of settings")
    settings = {name: value for name, value in node.items() if name != TARGET}
    parameters = _parameters(target)
    for name in settings:
        if name not in parameters:
            allowed = [_join(key, parameter) for parameter in parameters]
            wrong = _join(key, name)
            raise ConfigError(f"{wrong}: no such setting; {suggest(wrong, allowed)}")
    for name, (annotation, required) in parameters.items():
        where = _join(key, name)
        absent = (_MISSING, "") if where in EXAMPLES else (_MISSING,)
        if settings.get(name, _MISSING if required else None) in absent:
            example = EXAMPLES.get(where) or example_of(annotation)
            raise ConfigError(f"{where}: must be given, for example {where}={example}")
    for name, value in settings.items():
        where = _join(key, name)
        if (planned := _planned(value, where)) is not value:
            _checked(planned, parameters[name][0], where)
    values = {
        name: _checked(_build_nested(value, _join(key, name)), parameters[name][0], _join(key, name))
        for name, value in settings.items()
    }
    try:
        return target(**values)
    except (ValueError, OSError) as error:
        if not _is_class_of_user(target):  # whose own checks raise ValueError with a message for the user
            raise_if_of_policy(error, values, key)
        raise ConfigError(_located(_as_given(str(error), settings, values), key, parameters)) from error
    except Exception as error:
        if _is_class_of_user(target):
            raise_if_of_policy(error, {key: object.__new__(target)})
        raise_if_of_policy(error, values, key)
        raise


def _is_class_of_user(target: Callable[..., Any]) -> TypeGuard[type]:
    return isinstance(target, type) and is_of_user(target)


def locate(path: str, key: str) -> Callable[..., Any]:
    """Imports and returns the class, function or classmethod with a dotted path. Raises ConfigError."""
    where = f"{_join(key, TARGET)}={path}"
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: must be a dotted path, module.Class")
    found, num_imported = _import_longest(parts[:-1], where)
    for i in range(num_imported, len(parts)):
        if not hasattr(found, parts[i]):
            present = moved_to(path) if parts[i][0].islower() and isinstance(found, ModuleType) else None
            if present is not None:  # its old module is gone
                return locate(present, key)
            raise ConfigError(_nothing_there(found, ".".join(parts[:i]), parts[i], where))
        found = getattr(found, parts[i])
        if isinstance(found, ModuleType):
            raise ConfigError(f"{where}: {found.__name__} is only imported there; use the module's own path")
    if not callable(found):
        raise ConfigError(f"{where}: must be a class or a function, found a {type(found).__name__}")
    target: Callable[..., Any] = found
    return target


@lru_cache(maxsize=1024)
def moved_to(path: str) -> str | None:
    """Returns the current path of one of this project's classes, or of its method, named in an older config.

    The class is searched by name in the folder of its old module, then in the folders above; only files are
    read. None: it is not found, is in several files, or is not this project's.
    """
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part[:1].isupper()), 0)
    if at < 1 or parts[0] not in PACKAGES or not all(part.isidentifier() for part in parts):
        return None
    root = Path(str(importlib.import_module(parts[0]).__file__)).parent
    its_class = re.compile(rf"^class {parts[at]}\b", re.MULTILINE)
    for depth in range(at - 1, 0, -1):
        files = sorted(root.joinpath(*parts[1:depth]).rglob("*.py"))
        homes = [file for file in files if its_class.search(file.read_text(encoding="utf-8"))]
        if homes:
            home = homes[0].relative_to(root.parent).with_suffix("").parts
            present = ".".join((*home[: -1 if home[-1] == "__init__" else None], *parts[at:]))
            return present if len(homes) == 1 and present != path else None
    return None


def _nothing_there(owner: Any, owner_path: str, name: str, where: str) -> str:
    kind, home = ("module", owner.__name__) if isinstance(owner, ModuleType) else ("class", owner.__module__)
    found = {n: getattr(owner, n) for n in vars(owner) if not n.startswith("_")}
    public = [n for n, value in found.items() if callable(value) and value.__module__ == home]
    return f"{where}: {kind} {owner_path} has no {name}; {suggest(name, public)}"


def _import_longest(parts: list[str], where: str) -> tuple[Any, int]:
    """Imports the longest prefix of a.b.c that is a module; returns it and its number of parts."""
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            return importlib.import_module(module), end
        except ModuleNotFoundError as error:
            own_prefix = error.name is not None and f"{module}.".startswith(f"{error.name}.")
            if not own_prefix:  # the module exists, but a module that it imports does not
                sentence = f"{where}: importing {module} failed: {error}"
                raise PolicyFailedError(sentence, import_quote(error), _trace(error)) from error
        except Exception as error:
            # A file of the user can raise any error during import; the cause is kept for debugging.
            what = error.msg if isinstance(error, SyntaxError) else error
            sentence = f"{where}: importing {module} failed: {type(error).__name__}: {what}"
            raise PolicyFailedError(sentence, import_quote(error), _trace(error)) from error
    raise ConfigError(
        f"{where}: no module {parts[0]}; install it, run in its folder, or add that folder to PYTHONPATH"
    )


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


@lru_cache(maxsize=1024)
def _parameters(target: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Returns the settings of a target: name -> (annotation, whether it is required). Must not be changed."""
    plain_class = isinstance(target, type) and not is_dataclass(target)
    try:
        hints = get_type_hints(target.__init__ if plain_class else target)
    except NameError:  # a name is imported only for type checkers, so these settings are not checked here
        hints = {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: (hints.get(name, Any), parameter.default is parameter.empty)
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind in by_name
    }


def is_node(path: str, name: str) -> bool:
    """Returns whether a setting of the target at a dotted path is an object, a mapping with a `_target_`."""
    try:
        annotation, _ = _parameters(locate(path, ""))[name]
    except (ConfigError, KeyError):
        return False
    return is_object(annotation)


def _planned(value: Any, key: str) -> Any:
    """Returns the value with nodes that have a `_target_` replaced by `Planned` objects."""
    if isinstance(value, Mapping):
        if isinstance(value.get(TARGET), str):
            path = value[TARGET]
            return Planned(_class_made_by(locate(path, key), f"{_join(key, TARGET)}={path}"))
        items = {name: _planned(item, _join(key, str(name))) for name, item in value.items()}
        return items if any(items[name] is not value[name] for name in items) else value
    if isinstance(value, MutableSequence):
        found = [_planned(item, f"{key}[{i}]") for i, item in enumerate(value)]
        return found if any(new is not old for new, old in zip(found, value, strict=True)) else value
    return value


def _class_made_by(target: Callable[..., Any], where: str) -> type:
    """Returns the class of the objects that a target returns. Raises ConfigError if it is not annotated."""
    if isinstance(target, type):
        return target
    try:
        made = get_type_hints(target).get("return")
    except (NameError, TypeError):
        made = None
    owner = getattr(target, "__self__", None)
    if made is Self or (made is None and isinstance(owner, type)):
        made = owner
    if not isinstance(made, type):
        raise ConfigError(f"{where}: must be a class, or a function with a class as its return annotation")
    return made


def _build_nested(value: Any, key: str) -> Any:
    """Returns the value with every node that has a `_target_` replaced by its object."""
    if isinstance(value, Mapping):
        if TARGET in value:
            return build(value, key)
        return {name: _build_nested(element, _join(key, str(name))) for name, element in value.items()}
    if isinstance(value, MutableSequence):
        return [_build_nested(element, f"{key}[{i}]") for i, element in enumerate(value)]
    return value


def _checked(value: Any, annotation: Any, key: str) -> Any:
    try:
        return convert(value, annotation)
    except ValueError as error:
        message, quote = str(error), error.quote if isinstance(error, WrongObject) else ""
        if message.startswith(("[", ".")):  # the message begins with the element of a list or mapping
            located = f"{key}{message}"
            raise (PolicyFailedError(located, quote) if quote else ConfigError(located)) from None
        if isinstance(error, WrongObject) and quote:
            raise wrong_class(key, error.own, message, quote) from None
        where = key if isinstance(error, WrongObject) else f"{key}={shown(value)}"
        raise ConfigError(f"{where}: {message}") from None


def _as_given(message: str, given: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Returns the message with values as written by the user: -1 instead of -1.0, null instead of None."""
    for name, value in values.items():
        converted = isinstance(value, float) and isinstance(given[name], int)
        if converted or value is None or isinstance(value, bool):
            echo = rf"\b{re.escape(name)}={re.escape(str(value))}(?![\w.])"
            message = re.sub(echo, f"{name}={shown(given[name])}", message)
    return message


def _located(message: str, key: str, parameters: Mapping[str, Any]) -> str:
    """Prefixes the message of a settings class (`max_wait_s=-1: must be > 0 s`) with the node's key."""
    field = re.match(r"(\w+)[=:.\[]", message)
    if field and field[1] in parameters:
        return _join(key, message)
    return f"{key}: {message}" if key else message


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


class PolicyFailedError(ConfigError, PolicyError):
    """A policy has failed; the command line prints the sentence and the place, and exits with status 2."""


def wrong_class(key: str, cls: type, message: str, quote: str) -> PolicyFailedError:
    """Returns the error about a user's class that lacks members required by its place in the config."""
    policy = Policy(key, name_of_class(cls), cls)
    message = message.removeprefix(f"{cls.__name__} ")
    return PolicyFailedError(f"{policy}: {message}", quote, "", (key, policy.choice, policy.path))


@contextmanager
def policy_errors(settings: Any, key: str = "") -> Iterator[None]:
    """Raises PolicyFailedError instead of errors inside the context that were caused by a policy.

    settings: an object or a mapping with all policies, at any depth. key: its place in the config.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise_if_of_policy(error, settings, key)
        raise


def raise_if_of_policy(error: BaseException, settings: Any, key: str = "") -> None:
    """Raises PolicyFailedError if a policy has caused the error."""
    if isinstance(error, ConfigError):
        return
    found = failure(error, policies_of(settings, key))
    if found is not None:
        raise PolicyFailedError(*found.args) from error


def policies_of(value: Any, key: str = "") -> Iterator[Policy]:
    """Yields the user's objects and this project's policies in settings at any depth, with their keys."""
    cls = type(value)
    if is_of_user(cls) or (key and package_of(cls) in PACKAGES):
        yield Policy(key, name_of_class(cls), cls, value)
    if isinstance(value, Mapping):
        named = [(str(name), item) for name, item in value.items()]
    elif is_dataclass(value):
        named = [(each.name, getattr(value, each.name, None)) for each in fields(value)]
    else:
        return
    for name, item in named:
        if not isinstance(item, str | int | float | None):
            yield from policies_of(item, f"{key}.{name}" if key else name)


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
    """An object of the wrong class; the message names its class, so its value need not be shown."""

    own: type = object
    """The class, if it is the user's."""
    quote = ""
    """The place in the user's file that defines the class or method; empty for this project's classes."""


def convert(value: Any, annotation: Any) -> Any:
    """Converts `value` to the type of the annotation.

    Raises ValueError with only the rule (`must be an integer`), because the caller knows key and value; for
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
    """Returns whether an annotation allows only objects (or None)."""
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
    """Returns the method that a user's class lacks or defines with wrong arguments; empty if none."""
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
