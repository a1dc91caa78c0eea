"""One override as it is written on a command line: `[+|++|~]group_or_setting[@package][=value]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

_INTEGER = re.compile(r"-?(0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Override:
    """The parts of an override; any text has them, whether Hydra can read it or not.

    A group's parts are parted by /, a setting's by a dot: workload/arrivals=gamma, engine.max_num_seqs=64.
    A package behind an @ says where a choice goes: routing@decode_routing=power_of_two.
    """

    text: str
    prefix: str
    """+, ++, ~ or nothing."""
    key: str
    """The group or the setting, without its package."""
    package: str
    """Empty if there is none."""
    value: str | None
    """The text behind the first =; None without an =."""

    @classmethod
    def parse(cls, text: str) -> Override:
        """Raises nothing: a text without a key has an empty one."""
        written = text.lstrip("+~")
        name, equals, value = written.partition("=")
        key, _, package = name.partition("@")
        prefix = text[: len(text) - len(written)]
        return cls(text, prefix, key, package, value if equals else None)

    @property
    def name(self) -> str:
        """The key with its package: all that stands before the =, without + and ~."""
        return f"{self.key}@{self.package}" if self.package else self.key

    @property
    def root(self) -> str:
        """The key of the root of the config that it is about: engine of engine.max_num_seqs."""
        return re.split("[./]", self.key, maxsplit=1)[0]

    @property
    def is_added(self) -> bool:
        """+ or ++: the key need not be there."""
        return self.prefix.startswith("+")

    @property
    def is_deleted(self) -> bool:
        return self.prefix.startswith("~")

    @property
    def is_whole(self) -> bool:
        """Whether it has a value, or needs none."""
        return self.value is not None or self.is_deleted

    def typed_value(self) -> Any:
        """What Hydra takes the text behind the = for: a number, a text, null, a list, a mapping, a sweep.

        Raises HydraException for a text that it cannot read.
        """
        if self.value is not None and _INTEGER.fullmatch(self.value):
            return int(self.value)  # Hydra's parser takes a millisecond for it, and there may be thousands
        return _typed(self.text)


def keys_overlap(one: str, other: str) -> bool:
    """Whether two dotted keys are the same or one lies below the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def about(overrides: Sequence[str], *roots: str) -> list[str]:
    """Those of the overrides that are about one of these keys of the root."""
    return [text for text in overrides if Override.parse(text).root in roots]


def not_about(overrides: Sequence[str], *roots: str) -> list[str]:
    """The others."""
    return [text for text in overrides if Override.parse(text).root not in roots]


@lru_cache(maxsize=4096)
def _typed(text: str) -> Any:
    return OverridesParser.create().parse_override(text).value()
