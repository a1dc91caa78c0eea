"""Parses one override of a command line: `[+|++|~]group_or_setting[@package][=value]`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from sim.settings.errors import ConfigError

_WORD = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_]\w*", re.IGNORECASE)
_INTEGER = re.compile(r"-?(0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Override:
    """The parts of an override; any text has them, even if Hydra cannot read it.

    The parts of a group are separated by /, those of a setting by dots: workload/arrivals=gamma,
    engine.max_num_seqs=64. A package after an @ is the key at which a choice is placed:
    routing@decode_routing=power_of_two.
    """

    text: str
    prefix: str
    """+, ++, ~ or empty."""
    key: str
    """The group or the setting, without its package."""
    package: str
    """Empty if there is none."""
    value: str | None
    """The text after the first =; None without an =."""

    @classmethod
    def parse(cls, text: str) -> Override:
        """Splits a text into its parts; raises no error: a text without a key has an empty key."""
        written = text.lstrip("+~")
        name, equals, value = written.partition("=")
        key, _, package = name.partition("@")
        prefix = text[: len(text) - len(written)]
        return cls(text, prefix, key, package, value if equals else None)

    @property
    def name(self) -> str:
        """The key with its package: the text before the =, without + and ~."""
        return f"{self.key}@{self.package}" if self.package else self.key

    @property
    def root(self) -> str:
        """The first part of the key: engine for engine.max_num_seqs."""
        return re.split("[./]", self.key, maxsplit=1)[0]

    @property
    def is_added(self) -> bool:
        """True with the prefix + or ++: the key need not exist."""
        return self.prefix.startswith("+")

    @property
    def is_deleted(self) -> bool:
        return self.prefix.startswith("~")

    @property
    def is_whole(self) -> bool:
        """True if the override has a value or needs none."""
        return self.value is not None or self.is_deleted

    def typed_value(self) -> Any:
        """Returns the value as Hydra reads it: a number, a text, None, a list, a mapping or a sweep.

        Raises HydraException for a text that Hydra cannot read.
        """
        if self.value is not None and _INTEGER.fullmatch(self.value):
            return int(self.value)  # Hydra's parser takes 1 ms, and there may be thousands of overrides
        return _typed(self.text)


def keys_overlap(one: str, other: str) -> bool:
    """Returns whether two dotted keys are the same or one is below the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def quoted(text: str) -> str:
    """Returns a text as the value of an override, in quotation marks."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def as_value(plain: Any) -> str:
    """Returns a plain value of YAML as the value of an override: {a:[1,'b c']}. Keys must be simple words."""
    if isinstance(plain, Mapping):
        return "{" + ",".join(f"{key}:{as_value(value)}" for key, value in plain.items()) + "}"
    if isinstance(plain, list):
        return "[" + ",".join(map(as_value, plain)) + "]"
    if isinstance(plain, str):
        return plain if _WORD.fullmatch(plain) else quoted(plain)
    return "null" if plain is None else str(plain).lower()


def about(overrides: Sequence[str], *roots: str) -> list[str]:
    """Returns the overrides with one of these keys as their root."""
    return [text for text in overrides if Override.parse(text).root in roots]


def not_about(overrides: Sequence[str], *roots: str) -> list[str]:
    """Returns the overrides with other roots than these keys."""
    return [text for text in overrides if Override.parse(text).root not in roots]


def check_chosen_once(overrides: Sequence[str], groups: Collection[str]) -> None:
    """Raises ConfigError for a group that is chosen twice; only the last choice would count."""
    chosen: dict[str, str] = {}
    for override in map(Override.parse, overrides):
        if override.key not in groups or override.is_deleted:
            continue
        before = chosen.setdefault(override.name, override.text)
        if before != override.text:
            raise ConfigError(f"{override.text}: {override.name} is chosen twice; leave out {before}")


@lru_cache(maxsize=4096)
def _typed(text: str) -> Any:
    return OverridesParser.create().parse_override(text).value()
