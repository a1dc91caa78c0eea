"""Many configs that differ in a few keys: composed once for each choice of groups, then changed.

Composing takes Hydra half a second; setting a key in what was composed takes a millisecond. Hydra itself
applies all choices of groups first and then all settings in the order in which they stand, so the result is
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sim.settings.compose import ConfigSource
from sim.settings.config_groups import find_groups
from sim.settings.hydra_errors import composed


class Variants:
    """Configs of one root with these overrides and more."""

    def __init__(self, source: ConfigSource, base: Sequence[str]) -> None:
        self._source = source
        self._base = list(base)
        self._groups = set(find_groups(source.dirs))
        self._by_choices: dict[tuple[str, ...], DictConfig] = {}

    def config(self, overrides: Sequence[str]) -> DictConfig:
        """As `composed(source, [*base, *overrides])`. Raises ConfigError."""
        whole = [*self._base, *overrides]
        try:
            parsed = OverridesParser.create().parse_overrides(list(overrides))
        except HydraException:
            return composed(self._source, whole)
        if not all(self._is_choice(one) or self._is_setting(one) for one in parsed):
            return composed(self._source, whole)
        choices = tuple(one.input_line or "" for one in parsed if self._is_choice(one))
        if choices not in self._by_choices:
            self._by_choices[choices] = composed(self._source, [*self._base, *choices])
        found = self._by_choices[choices]
        if found.get("pools"):  # settings of the run are settings of its pools, too
            return composed(self._source, whole)
        found = deepcopy(found)
        try:
            for one in parsed:
                if not self._is_choice(one):
                    OmegaConf.update(found, one.key_or_group, one.value(), merge=True)
        except OmegaConfBaseException:
            return composed(self._source, whole)  # which says what is wrong
        return found

    def _is_choice(self, override: Override) -> bool:
        return override.key_or_group in self._groups and not override.is_sweep_override()

    def _is_setting(self, override: Override) -> bool:
        plain = not (override.is_sweep_override() or override.is_add() or override.is_delete())
        return plain and override.package is None and "/" not in override.key_or_group
