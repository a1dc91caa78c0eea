"""Composes the config of one run, or the overrides of every point of a multirun."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydra import version
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.core.utils import JobRuntime, setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from sim.settings import engine_limits, pools
from sim.settings.config_groups import find_groups
from sim.settings.renamed import with_new_names
from sim.settings.yaml_files import Content, Pickles, YamlRepository


class Composition(NamedTuple):
    """The source and the overrides of a config, from which similar configs can be composed."""

    source: "ConfigSource"
    overrides: Sequence[str]
    """Overrides of settings; overrides of Hydra itself are left out."""


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """A root config and the folders with its choices; the first folder holds the root config."""

    config_name: str
    dirs: Sequence[Path]
    device: Any = None
    """Object that replaces the node `hardware`, whose figures then decide the engine's limits; None: none."""
    with_limits: bool = True
    """Whether limits of the engine that are null get the engine's own (`engine_limits.complete`)."""

    def compose(self, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
        """Composes the config with these overrides, its pools and the engine's limits.

        Raises Hydra's exceptions, which `hydra_errors.explain` converts, and ConfigError for settings of
        pools.
        """
        cfg = self.loader().load_configuration(self.config_name, list(overrides), RunMode.RUN)
        return cfg if with_hydra else without_hydra(cfg)

    def loader(self) -> "PoolsLoader":
        """Creates the loader; it does not change Hydra's global state, so that it works inside a job."""
        version.setbase("1.3")
        setup_globals()  # ${now:...} and ${hydra:...}
        JobRuntime.instance().set("name", self.config_name)
        own_dir, *more = self.dirs
        search_path = create_config_search_path(str(own_dir))
        for folder in more:
            schema = SearchPathQuery(provider="schema")
            search_path.prepend(provider="command-line", path=f"file://{folder}", anchor=schema)
        return PoolsLoader(search_path, self)

    def compose_plain(self, overrides: Sequence[str]) -> Any:
        """Composes the config as dicts and lists; interpolations and `???` are kept as they are written."""
        return OmegaConf.to_container(self.compose(overrides))

    def points(self, overrides: Sequence[str]) -> list[list[str]] | None:
        """Returns the overrides of every run of a multirun, in the order of Hydra's basic sweeper.

        Returns None if another sweeper decides them (intervals, `hydra/sweeper` set by the user). The last of
        several overrides of one key is used.
        """
        alternatives = self.alternatives(overrides)
        if alternatives is None:
            return None
        by_key = {o.partition("=")[0]: found for o, found in zip(overrides, alternatives, strict=True)}
        return [list(point) for point in itertools.product(*by_key.values())]

    def alternatives(self, overrides: Sequence[str]) -> list[list[str]] | None:
        """Returns, for each override, its variants in a multirun: one, unless it has several values.

        Returns None as `points` does.
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


def _is_continuous(override: Override) -> bool:
    return override.is_sweep_override() and not override.is_discrete_sweep()


class PoolsLoader(ConfigLoaderImpl):
    """Hydra's loader, extended to complete the pools of the config of a run and the limits of its engine."""

    def __init__(self, search_path: Any, source: ConfigSource) -> None:
        super().__init__(search_path)
        self.repository = YamlRepository(search_path)
        self._source = source

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Composes a config and completes it, except for the config of a multirun as a whole."""
        dirs, device = self._source.dirs, self._source.device
        overrides = pools.forced(with_new_names(overrides, dirs))
        checks = {"from_shell": from_shell, "validate_sweep_overrides": validate_sweep_overrides}
        load = super().load_configuration
        cfg = load(config_name, overrides, run_mode, **checks)
        if run_mode != RunMode.RUN:
            return cfg
        if self._source.with_limits:
            engine_limits.complete(cfg, device)

        def compose_pool(own: Sequence[str]) -> DictConfig:
            pool = without_hydra(load(config_name, list(own), run_mode))
            engine_limits.complete(pool, device)
            return pool

        if cfg.get("pools"):
            pools.complete(cfg, overrides, find_groups(dirs), compose_pool)
        return cfg

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        """Merges the files of a defaults list; files that were merged before are not merged again.

        Merging takes two thirds of the time of composing. In a study, or in tests, most configs differ in
        single settings, which Hydra overrides afterwards.
        """
        merge = super()._compose_config_from_defaults_list
        # Hydra hands on a copy of `repository` that remembers what it has read.
        read = repo.delegate if isinstance(repo, CachingConfigRepository) else repo
        contents = read.contents if isinstance(read, YamlRepository) else {}
        parts = [(contents.get(each.config_path or ""), each.package, each.primary) for each in defaults]
        if any(content is None for content, *_ in parts):
            return merge(defaults, repo)
        return _merged.get(tuple(parts), lambda: merge(defaults, repo))


KEPT = 200
"""Size of the cache of merged files, in configs."""

_merged: Pickles[tuple[tuple[Content | None, str | None, bool], ...], DictConfig] = Pickles(KEPT)


def _choices_by_group(
    overrides: defaults_list.Overrides, defaults_list: list[InputDefault], self_added: bool
) -> DictConfig:
    """Returns the choices made so far if one of a file's defaults refers to them, otherwise an empty config.

    Hydra builds this map for every file but reads it only for such references: a third of composing's time.
    """
    if any(default.is_interpolation() for default in defaults_list):
        return _hydras_choices_by_group(overrides, defaults_list, self_added)
    return OmegaConf.create()


_hydras_choices_by_group = defaults_list._create_interpolation_map
defaults_list._create_interpolation_map = _choices_by_group


def without_hydra(cfg: DictConfig) -> DictConfig:
    """Removes Hydra's node from the config and returns the config."""
    with open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg
