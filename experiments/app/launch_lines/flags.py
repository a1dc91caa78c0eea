"""The flags of each engine's server, and the values that a command gives them.

The tables beside this module list every flag: vLLM 0.33 (`EngineArgs`, `FrontendArgs`), SGLang 0.5.23
(`ServerArgs`) and TensorRT-LLM's `trtllm-serve`, and some that older versions had; `dynamo.csv` lists the
further flags of NVIDIA Dynamo's workers. Columns:

- flag, aliases: with dashes; an underscore counts as a dash.
- kind: text, int, float, count (32k is 32,000, 32K is 32,768, as vLLM and SGLang read it), bool (--x and
  --no-x), switch (no value), list (several values), optional (at most one value), json.
- effect: setting (becomes settings of ours), none (without effect on any time, or with one of a few percent
  at most), refused (the result would be wrong).
- detail: the setting if there is one that means the same; otherwise the reason.
- harmless: values, as patterns, with which a flag that is refused asks for nothing but what is priced.
- only_with: the flag without which this one, which is refused, has no effect.

`environment.csv` says the same of the variables that engines read, as patterns; the first match counts.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from sim.settings.errors import ConfigError, nearest

PREFIXES = ("VLLM_", "SGLANG_", "SGL_", "TRTLLM_", "TLLM_", "NCCL_", "CUDA_LAUNCH_BLOCKING")
"""Beginnings of the variables that engines read."""

Engine = Literal["vllm", "sglang", "tensorrt_llm"]
Effect = Literal["setting", "none", "refused"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
EFFECTS: tuple[Effect, ...] = get_args(Effect)
VERSIONS = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5.23", "tensorrt_llm": "trtllm-serve"}

_BARE_WORD = re.compile(r"(?<![\w\"./-])(?!(?:true|false|null)\b)[A-Za-z_][\w./-]*(?![\w\"])")
_NUMBER = re.compile(r"-\.?\d[\d.]*")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Flag(NamedTuple):
    """One row of a table."""

    flag: str
    aliases: tuple[str, ...]
    kind: str
    effect: Effect
    detail: str
    harmless: str = ""
    only_with: str = ""

    def asks_for_nothing(self, value: Any) -> bool:
        """Returns whether this value of a refused flag changes nothing that is priced."""
        patterns = self.harmless.lower().split()
        return any(fnmatchcase(str(value).lower(), pattern) for pattern in patterns)


class Reasons(NamedTuple):
    """Flags and variables that become no settings, with the reason of each."""

    without_effect: dict[str, str]
    refused: dict[str, str]


@dataclass(kw_only=True, slots=True)
class Arguments:
    """The values of a command's flags, by flag (`--tensor-parallel-size`); bool and switch: True or False."""

    engine: Engine
    values: dict[str, Any] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    """Flag -> how it was written, for messages."""
    ignored: list[str] = field(default_factory=list)
    """Flags that were left out as the user asked."""


@cache
def table(engine: Engine) -> dict[str, Flag]:
    """Returns the flags of an engine, by flag."""
    rows = _rows("dynamo.csv") + _rows(f"{engine}.csv")
    return {row["flag"]: _flag(row, row["flag"], row["kind"], row["only_with"]) for row in rows}


@cache
def variables() -> list[Flag]:
    """Returns what is known of variables; flag: a pattern of names."""
    return [_flag(row, row["name"], "text") for row in _rows("environment.csv")]


def _flag(row: Mapping[str, str], flag: str, kind: str, only_with: str = "") -> Flag:
    """Returns a row of a table; flag: a flag or the pattern of a variable's names."""
    return Flag(
        flag=flag,
        aliases=tuple(row.get("aliases", "").split()),
        kind=kind,
        effect=next(effect for effect in EFFECTS if effect == row["effect"]),
        detail=row["detail"],
        harmless=row["harmless"],
        only_with=only_with,
    )


def _rows(name: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, restval=""))


def parse(engine: Engine, tokens: Sequence[str], ignored: Collection[str] = ()) -> Arguments:
    """Returns the values that a command gives to flags, as the engine's own parser reads them.

    tokens: the words after the program. ignored: flags that are left out with their values. Raises
    ConfigError for an unknown flag and a wrong value.
    """
    found = Arguments(engine=engine)
    nested: dict[str, dict[str, Any]] = {}
    rest = list(tokens)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-" or _NUMBER.fullmatch(word):
            found.positional.append(word)
            continue
        if engine == "vllm" and word.startswith("-O"):
            word = _of_level(word, rest)
        name, equals, value = word.partition("=")
        name, dot, keys = name.partition(".")
        if name in ignored and name.replace("_", "-") not in _names(engine):
            found.ignored.append(name)
            while not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)
            continue
        row, is_on = _row(engine, name)
        own_names = {name, row.flag, *row.aliases}
        left_out = next((each for each in ignored if each in own_names), None)
        found.written[row.flag] = word.partition("=")[0]
        given = value if equals else None
        if dot:
            if given is None:
                given = _value(rest, row, word)
            if left_out is None:
                _put(nested.setdefault(row.flag, {}), keys, given)
        else:
            value = _read(row, word, given, rest, is_on=is_on)
            if left_out is None:
                found.values[row.flag] = value
        if left_out is not None:
            found.ignored.append(left_out)
    for flag, own in nested.items():
        before = found.values.get(flag)
        found.values[flag] = (before if isinstance(before, dict) else {}) | own
    return found


def _of_level(word: str, rest: list[str]) -> str:
    """Returns vLLM's -O with its value as the flag that it stands for: a level, or fields or JSON.

    Before 0.11 it was another name of --compilation-config.
    """
    if word.startswith(("-O.", "-O={")):
        return word.replace("-O", "--compilation-config", 1)
    if word == "-O" and rest and rest[0].lstrip().startswith("{"):
        return "--compilation-config"
    level = re.fullmatch(r"-O=?(\w*)", word)
    if level is None:
        return word
    return f"--optimization-level={level[1] or (rest.pop(0) if rest else '')}"


def _row(engine: Engine, name: str) -> tuple[Flag, bool]:
    """Returns the flag of this name, and whether it is not negated. Raises ConfigError."""
    known = _names(engine)
    written = name.replace("_", "-") if name.startswith("--") else name
    if written in known:
        return known[written], True
    positive = "--" + written.removeprefix("--no-")
    if written.startswith("--no-") and positive in known and known[positive].kind == "bool":
        return known[positive], False
    if engine != "tensorrt_llm" and written.startswith("--"):  # argparse takes the beginning of one flag
        longer = {row.flag: row for other, row in known.items() if other.startswith(written)}
        if len(longer) == 1:
            return next(iter(longer.values())), True
    best = nearest(written, [other for other in known if other.startswith("--")])
    advice = f"nearest: {best}; or leave it out" if best else "leave it out"
    raise ConfigError(f"--from: {name}: {VERSIONS[engine]} has no such flag; {advice}")


@cache
def _names(engine: Engine) -> dict[str, Flag]:
    return {name: row for row in table(engine).values() for name in (row.flag, *row.aliases)}


def _value(rest: list[str], row: Flag, word: str) -> str:
    if not rest or (rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0]) and rest[0] != "-"):
        raise ConfigError(f"--from: {word}: needs a value")
    return rest.pop(0)


def _read(row: Flag, word: str, given: str | None, rest: list[str], *, is_on: bool) -> Any:
    """Returns the value of a flag; takes it from the rest of the words if it is not in the word itself."""
    if row.kind in ("bool", "switch"):
        if given is None and rest and rest[0].lower() in ("true", "false"):  # as vLLM took it before 0.9
            given = rest.pop(0)
        if given is not None and given.lower() in ("true", "false"):
            return given.lower() == "true"
        if given is not None:
            raise ConfigError(f"--from: {word}: takes no value")
        return is_on
    if row.kind == "list":
        values = [given] if given is not None else []
        while given is None and rest and (not rest[0].startswith("-") or _NUMBER.fullmatch(rest[0])):
            values.append(rest.pop(0))
        return values
    if row.kind == "optional":
        if given is None and (not rest or rest[0].startswith("-")):
            return True
        return rest.pop(0) if given is None else given
    if given is None:
        given = _value(rest, row, word)
    return typed(row, word, given)


def typed(row: Flag, word: str, given: Any) -> Any:
    """Returns the value of a flag from text, or from YAML. Raises ConfigError for a wrong one.

    A flag that sets nothing keeps its text, whatever it is.
    """
    if row.effect == "none" or not isinstance(given, str):
        return given
    if "$" in given and row.effect == "setting":
        raise ConfigError(
            f"--from: {word} {given}: the variable has no value in the text, or one of several, which is "
            "read and not executed; write the value in its place, or before a file: --from 'TP=8 FILE'"
        )
    if row.kind == "json":
        return _json(word, given)
    try:
        return _numbers(row.kind, given)
    except ValueError:
        needs = {"int": "a whole number", "count": "a whole number, such as 8192 or 32k"}
        raise ConfigError(f"--from: {word} {given}: must be {needs.get(row.kind, 'a number')}") from None


def _numbers(kind: str, given: str) -> Any:
    if kind == "int":
        return int(given)
    if kind == "float":
        return float(given)
    if kind == "count" and given.lower() != "auto":
        if found := _COUNT.fullmatch(given.strip()):
            number, unit = found.groups()
            return int(number) * _FACTORS[unit] if unit.isupper() else int(float(number) * _FACTORS[unit])
        return int(given)
    return given


def _json(word: str, given: str) -> Any:
    """Returns the value of a JSON flag. A shell has removed the quotation marks of {"method":"mtp"}."""
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_BARE_WORD.sub(r'"\g<0>"', given))
    except (ValueError, RecursionError):
        raise ConfigError(f"--from: {word} {given[:60]}: must be JSON, such as '{{\"key\": 1}}'") from None


def _put(into: dict[str, Any], keys: str, given: str) -> None:
    """Sets a dotted key of a JSON flag: --speculative-config.method eagle."""
    *above, last = keys.split(".")
    for key in above:
        into = into.setdefault(key, {}) if isinstance(into.get(key, {}), dict) else {}
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        value = given
    into[last] = value


def reasons(found: Arguments, environment: Mapping[str, str]) -> Reasons:
    """Returns the flags and variables without effect, and those that are refused, with the reasons.

    A flag that is switched off, or has a value that asks for nothing, counts as left out.
    """
    own = Reasons({}, {})
    for flag, value in found.values.items():
        row = table(found.engine)[flag]
        written = found.written.get(flag, flag)
        if row.effect == "none":
            own.without_effect[written] = row.detail
        elif row.effect != "refused":
            continue
        elif value is False and row.harmless != "true":
            own.without_effect[written] = ""
        elif row.asks_for_nothing(value):
            own.without_effect[written if value is True else f"{written} {value}"] = ""
        elif row.only_with and str(found.values.get(row.only_with)) in ("None", "False", "1"):
            own.without_effect[written] = f"applies with {row.only_with} only"
        else:
            own.refused[written if isinstance(value, bool) else f"{written} {value}"] = row.detail
    for name, value in environment.items():
        if not value or not name.startswith(PREFIXES):
            continue
        about = next(row for row in variables() if fnmatchcase(name, row.flag))
        if about.effect == "setting":
            continue
        if about.effect == "none" or about.asks_for_nothing(value):
            own.without_effect[f"{name}={value}"] = about.detail if about.effect == "none" else ""
        else:
            own.refused[f"{name}={value}"] = about.detail
    return own


def settings_of(found: Arguments) -> Iterator[tuple[str, Any]]:
    """Yields the settings that mean the same as a flag, with the flag's value."""
    for flag, value in found.values.items():
        row = table(found.engine)[flag]
        if row.effect == "setting" and row.detail:
            yield row.detail, value
