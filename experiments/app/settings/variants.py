"""Creates many configs that differ in a few keys: composes once per choice of groups, then sets the keys.

`ConfigSource.compose` takes 0.3 s, or 10 ms with choices that it remembers; setting keys in a plain config is
faster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf

from experiments.app.settings.compose import ConfigSource, pool_keys
from experiments.app.settings.config_groups import find_groups
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.override import Override
from experiments.app.settings.renamed import with_new_names
from sim.settings import engine_limits
from sim.settings.errors import ConfigError

KEPT = 64
"""Size of the cache of composed configs; the least recently used one is dropped."""

_REFERENCE = re.compile(r"\$\{(\w+)")
"""Matches the first part of an interpolation, which is a root key."""


class Variants:
    """Configs of one root with these overrides and more, as dicts and lists. Thread-safe."""

    def __init__(self, source: ConfigSource, base: Sequence[str] = ()) -> None:
        self._source = replace(source, with_limits=False)
        self._base = tuple(base)
        self._groups = find_groups(source.dirs)
        self._composed = lru_cache(KEPT)(self._compose)

    def config(self, overrides: Sequence[str] = (), *, seed: int | None = None) -> dict[str, Any]:
        """Returns `composed(source, [*base, *overrides])`; interpolations and `???` are kept as written.

        seed: replaces the seed at the root, which all parts of a run refer to. The caller may change the
        returned config. Raises ConfigError.
        """
        config = self._config([*self._base, *overrides])
        engine_limits.complete(config, self._source.device)  # by the settings that were set after composing
        return config if seed is None else {**config, "seed": seed}

    def _config(self, texts: Sequence[str]) -> dict[str, Any]:
        whole = tuple(with_new_names(texts, self._source.dirs))
        parsed = [Override.parse(text) for text in whole]
        try:
            edits = self._edits(parsed)
            rest = tuple(text for i, text in enumerate(whole) if i not in edits)
            config = _copied(self._composed(rest))
        except (HydraException, ConfigError):
            return _copied(self._composed(whole))  # raises the error with all overrides
        in_place = not config.get("pools") or _has_pools(parsed)
        if in_place and all(_set(config, parsed[i].key, value) for i, value in edits.items()):
            return config
        return _copied(self._composed(whole))

    def _edits(self, parsed: Sequence[Override]) -> dict[int, Any]:
        """Returns index -> value of the overrides that can be set in the config composed from the others."""
        in_pools = self._roots_in_pools(parsed) if _has_pools(parsed) else set()
        found = self._source.settings([one.text for one in parsed])
        return {i: value for i, value in found.items() if parsed[i].root not in in_pools}

    def _roots_in_pools(self, parsed: Sequence[Override]) -> set[str]:
        """Returns the root keys that a pool has a copy of, or that a value in a pool may refer to."""
        files = (choice.file for choices in self._groups.values() for choice in choices)
        texts = [*(file.read_text(encoding="utf-8") for file in files), *(one.text for one in parsed)]
        return {*pool_keys(), *(root for text in texts for root in _REFERENCE.findall(text))}

    def _compose(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        """Returns the composed config, which the caller must not change."""
        plain: Any = OmegaConf.to_container(composed(self._source, overrides))
        return dict(plain)


def _copied(config: dict[str, Any]) -> dict[str, Any]:
    """Copies plain data, all dicts and lists included; `copy.deepcopy` takes five times as long."""
    return {key: _copied_value(value) for key, value in config.items()}


def _copied_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _copied(value)
    return [_copied_value(item) for item in value] if isinstance(value, list) else value


def _has_pools(parsed: Sequence[Override]) -> bool:
    return any(one.root == "pools" for one in parsed)


def _set(config: dict[str, Any], key: str, value: Any) -> bool:
    """Sets an existing key; returns False and changes nothing for a missing key or a mapping."""
    *above, last = key.split(".")
    node: Any = config
    for part in above:
        place = _place(node, part)
        if place is None:
            return False
        node = node[place]
    place = _place(node, last)
    if place is None or isinstance(node[place], dict):
        return False
    node[place] = value
    return True


def _place(node: Any, part: str) -> str | int | None:
    """Returns the dict key or list index for a part of a dotted key; None if it does not exist."""
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return int(part)
    return part if isinstance(node, dict) and part in node else None
