"""Composing configs before Hydra runs anything: one run's, or every point's of a multirun."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf

from sim.settings import pools
from sim.settings.config_groups import find_groups
from sim.settings.errors import ConfigError


class Composition(NamedTuple):
    """How a config came about, so that others like it can be made."""

    source: "ConfigSource"
    overrides: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """A root config and the folders that its choices come from; the first folder holds the root."""

    config_name: str
    dirs: Sequence[Path]

    def compose(self, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
        """The config with these overrides, its pools complete: see `pools.completed`.

        Raises what Hydra raises, which `hydra_errors.explain` reads, and ConfigError for a pool's settings.
        """
        overrides = pools.forced(overrides)
        cfg = self._compose(overrides, with_hydra=with_hydra)
        if cfg.get("pools"):
            pools.complete(cfg, overrides, find_groups(self.dirs), self._compose)
        return cfg

    def _compose(self, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
        own_dir, *more = self.dirs
        with initialize_config_dir(config_dir=str(own_dir), version_base="1.3"):
            return compose(
                self.config_name, overrides=[*_search_path(more), *overrides], return_hydra_config=with_hydra
            )

    def compose_plain(self, overrides: Sequence[str]) -> Any:
        """The same as dicts and lists, interpolations and `???` as they are written."""
        return OmegaConf.to_container(self.compose(overrides))

    def points(self, overrides: Sequence[str]) -> list[list[str]] | None:
        """The overrides of every run of a multirun, as Hydra's basic sweeper orders them.

        None if only another sweeper can tell (intervals, a `hydra/sweeper` of the user's).
        """
        alternatives = self.alternatives(overrides)
        if alternatives is None:
            return None
        return [list(point) for point in itertools.product(*alternatives)]

    def alternatives(self, overrides: Sequence[str]) -> list[list[str]] | None:
        """For each override, those that a multirun makes of it: one, unless it names several values.

        None: see `points`.
        """
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if any(o.key_or_group == "hydra/sweeper" or _is_continuous(o) for o in parsed):
            return None
        return [self._alternatives(o) for o in parsed]

    def _alternatives(self, override: Override) -> list[str]:
        if not override.is_sweep_override():
            return [override.input_line or ""]
        if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
            names = [choice.name for choice in find_groups(self.dirs).get(override.key_or_group, [])]
            values = override.value().filter(names)  # type: ignore[union-attr]
        else:
            values = list(override.sweep_string_iterator())
        return [f"{override.get_key_element()}={value}" for value in values]


def running_source() -> ConfigSource:
    """Where the config of the job that Hydra is running came from: our own folder, then the user's."""
    hydra = HydraConfig.get()
    assert hydra.job.config_name is not None
    dirs = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    return ConfigSource(config_name=hydra.job.config_name, dirs=list(dict.fromkeys(dirs)))


def recomposed() -> DictConfig:
    """The config of the job that Hydra is running, as `ConfigSource` composes it: its pools complete."""
    source, overrides = running_source(), HydraConfig.get().overrides.task
    running = GlobalHydra.instance().hydra
    assert running is not None
    GlobalHydra.instance().clear()
    try:
        return source.compose(overrides)
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().initialize(running)


def _is_continuous(override: Override) -> bool:
    return override.is_sweep_override() and not override.is_discrete_sweep()


def _search_path(dirs: Sequence[Path]) -> list[str]:
    for folder in dirs:
        if "'" in str(folder):
            raise ConfigError(f"--config-dir={folder}: must have no quote in its name")
    folders = ",".join(f"'file://{folder}'" for folder in dirs)
    return [f"hydra.searchpath=[{folders}]"] if dirs else []
