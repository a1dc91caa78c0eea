"""Composes the config of one run, or the overrides of every point of a multirun, by Hydra's public interface.

Hydra composes the choices of a config: it takes 0.3 s, so each set of choices is composed once per process.
The settings of a command line are then set in it, as Hydra itself applies all choices first.

`resolved` resolves interpolations, `${engine.max_num_seqs}`, for which OmegaConf takes 25 ms per config.

Each pool of a config has the settings of the run and a few of its own:

    pools:
      large: {replicas: 2, hardware: h200_sxm}
      small: {replicas: 6, hardware: l40s, engine.max_num_seqs: 64}

The lines of a pool are overrides of the run's settings, as on the command line: a choice of a group
(hardware: l40s) or a setting. `complete_pools` replaces them by all settings of the pool.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as ParsedOverride
from hydra.core.override_parser.types import Sweep, ValueType
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.config_source import ConfigSource as HydraSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from experiments.app.settings.bounded_yaml import read_text_and_yaml
from experiments.app.settings.config_groups import CONFIG_DIR, Choice, check_choice, find_groups
from experiments.app.settings.override import Override, keys_overlap, not_about, quoted
from experiments.app.settings.renamed import with_new_names
from sim.settings import engine_limits
from sim.settings.build import shown
from sim.settings.errors import ConfigError, suggest

VERSION_BASE = "1.3"
"""Version of Hydra whose habits are kept."""

KEPT = 64
"""Size of the cache of composed configs; the least recently used one is dropped."""

_LOCK = threading.RLock()
"""Held while composing, as Hydra's singletons are global to the process."""


class Composition(NamedTuple):
    """The source and the overrides of a config, from which similar configs can be composed."""

    source: ConfigSource
    overrides: Sequence[str]
    """Overrides of settings; overrides of Hydra itself are left out."""
    objects: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Arm of a study -> objects of the caller that replace nodes of its config, by their root key."""


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
        given = self.as_read(overrides)
        cfg = self._composed(given)
        self.complete(cfg, given)
        return cfg if with_hydra else without_hydra(cfg)

    def as_read(self, overrides: Sequence[str]) -> list[str]:
        """Returns the overrides as Hydra gets them: with the names in use, and with new pools allowed."""
        return forced(with_new_names(overrides, self.dirs))

    def complete(self, cfg: DictConfig, overrides: Sequence[str]) -> None:
        """Completes the limits of the engine and the pools in a config that Hydra composed from overrides."""
        if self.with_limits:
            engine_limits.complete(cfg, self.device, _plain)

        def compose_pool(own: Sequence[str]) -> DictConfig:
            pool = without_hydra(self._composed(own))
            engine_limits.complete(pool, self.device, _plain)
            return pool

        if cfg.get("pools"):
            complete_pools(cfg, overrides, find_groups(self.dirs), compose_pool)

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        """Returns what Hydra composes from the overrides, with its node."""
        settings = self.settings(overrides)
        cfg = self._with_choices([text for i, text in enumerate(overrides) if i not in settings])
        for i, value in settings.items():
            key = Override.parse(overrides[i]).key
            try:
                OmegaConf.update(cfg, key, value, merge=True)
            except (ConfigAttributeError, ConfigKeyError) as error:
                raise ConfigCompositionException(f"Could not override '{key}'.") from error
            except OmegaConfBaseException as error:
                raise ConfigCompositionException(f"Error merging override {overrides[i]}") from error
        if settings:
            _note_overrides(cfg, overrides)
        return cfg

    def settings(self, overrides: Sequence[str]) -> dict[int, Any]:
        """Returns index -> value of the overrides that may be set after composing; the others are Hydra's.

        They replace one value, at a key that no other override adds, deletes or merges with: the order of
        these counts.
        """
        found, by_hydra = {}, []
        for i, one in enumerate(map(Override.parse, overrides)):
            if one.root == "hydra" or self._is_choice(one):
                continue
            try:
                value = one.typed_value()
            except HydraException:
                value = {}  # for Hydra to refuse
            if one.prefix or one.value is None or one.root == "pools" or isinstance(value, dict | Sweep):
                by_hydra.append(one.key)
            else:
                found[i] = one.key, value
        return {
            i: value
            for i, (key, value) in found.items()
            if not any(keys_overlap(key, other) for other in by_hydra)
        }

    def _is_choice(self, one: Override) -> bool:
        is_group = any(os.path.isdir(folder / one.key) for folder in self.dirs)
        return "/" in one.key or bool(one.package) or is_group

    def _with_choices(self, overrides: Sequence[str]) -> DictConfig:
        """Returns what Hydra composes from choices, from the cache if no file has changed since."""
        words = tuple(_bounded(text) for text in overrides)
        state = _state_of(self.dirs) if words == tuple(overrides) else object()  # never found again
        with _LOCK:
            found = _composed_once(self.config_name, tuple(self.dirs), state, words)
        # The pickle was written by this process, so loading it is safe.
        cfg: DictConfig = pickle.loads(found) if isinstance(found, bytes) else deepcopy(found)  # nosec B301
        with read_write(cfg.hydra):
            cfg.hydra.runtime.cwd = os.getcwd()
        return cfg

    def command_line(self, words: Sequence[str], task: Callable[[DictConfig], None]) -> None:
        """Calls Hydra's own command line. words: its arguments. task: gets an uncompleted config.

        Raises what Hydra and the task raise.
        """
        before, place = sys.argv, str(self.dirs[0].absolute())
        sys.argv = [before[0], f"hydra.job.name={self.config_name}", *map(_bounded, words)]
        run = hydra.main(config_path=place, config_name=self.config_name, version_base=VERSION_BASE)(task)
        try:
            with searched(self.dirs), env_override({"HYDRA_FULL_ERROR": "1"}):  # errors are not printed
                run()
        finally:
            sys.argv = before

    def first_values(self, overrides: Sequence[str]) -> list[str]:
        """Returns overrides with the first of several choices, and without settings of several values.

        Raises HydraException for an override that cannot be read.
        """
        given, found = self.as_read(overrides), []
        for text, parsed in zip(given, OverridesParser.create().parse_overrides(given), strict=True):
            if not parsed.is_sweep_override():
                found.append(text)
            elif self._is_choice(Override.parse(text)) and not _is_continuous(parsed):
                found += self._alternatives(parsed)[:1]
        return found

    def compose_whole(self, first: Sequence[str], overrides: Sequence[str]) -> DictConfig:
        """Composes the config of a multirun as a whole, which decides its folder, sweeper and launcher.

        first: `first_values` of the overrides, which its node `hydra` has as they are written. The config is
        not completed. Raises as `compose` does.
        """
        cfg = self._composed(first)
        _note_overrides(cfg, self.as_read(overrides))
        return cfg

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

    def _alternatives(self, override: ParsedOverride) -> list[str]:
        if not override.is_sweep_override():
            return [override.input_line or ""]
        if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
            names = [choice.name for choice in find_groups(self.dirs).get(override.key_or_group, [])]
            values = override.value().filter(names)  # type: ignore[union-attr]
        else:
            values = list(override.sweep_string_iterator())
        return [f"{override.get_key_element()}={value}" for value in values]


def _plain(node: Any) -> Any:
    """Returns a node of a config as dicts and lists, with interpolations resolved; `???` is kept."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _is_continuous(override: ParsedOverride) -> bool:
    return override.is_sweep_override() and not override.is_discrete_sweep()


@lru_cache(KEPT)
def _composed_once(
    config_name: str, dirs: tuple[Path, ...], state: object, overrides: tuple[str, ...]
) -> bytes | DictConfig:
    """Returns what Hydra composes, as a pickle if its classes can be imported. state: of the folders.

    A Hydra that runs a job at present is kept.
    """
    running, place = GlobalHydra.instance().hydra, str(dirs[0].absolute())
    GlobalHydra.instance().clear()
    try:
        with searched(dirs), hydra.initialize_config_dir(place, config_name, VERSION_BASE):
            cfg = hydra.compose(config_name, list(overrides), return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = running
    try:
        return pickle.dumps(cfg)
    except (pickle.PicklingError, AttributeError):
        return cfg


def _bounded(word: str) -> str:
    """Returns an override of Hydra's search path with its folders read within limits; others as they are."""
    one = Override.parse(word)
    if one.key != "hydra.searchpath":
        return word
    places = one.typed_value()
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        return word  # Hydra says what is wrong with it
    return f"{one.prefix}{one.name}=[{','.join(quoted(address(place)) for place in places)}]"


def _state_of(dirs: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Returns what changes whenever a file of the user's folders does; windtunnel's own do not change."""
    walked = (part for folder in dirs if folder != CONFIG_DIR for part in os.walk(folder))
    files = [Path(place, name) for place, _, names in walked for name in names if name.endswith(".yaml")]
    states = [(str(file), file.stat()) for file in files if file.exists()]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


def _note_overrides(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Writes overrides of settings into Hydra's node, as Hydra does."""
    own = [text for text in overrides if Override.parse(text).root != "hydra"]
    about = cfg.hydra.job.config.override_dirname
    named = sorted(text for text in own if Override.parse(text).key not in about.exclude_keys)
    with read_write(cfg.hydra):
        cfg.hydra.overrides.task = own
        cfg.hydra.job.override_dirname = about.item_sep.join(named).replace("=", about.kv_sep)


def without_hydra(cfg: DictConfig) -> DictConfig:
    """Removes Hydra's node from the config and returns the config."""
    with open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg


SCHEME = "windtunnel"


class YamlFolder(HydraSource):
    """A folder of config files, `windtunnel:///its/path` in Hydra's search path."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns the content of a file. Raises ConfigError for what is no mapping, or beyond the limits."""
        file = self._file(config_path)
        text, content = read_text_and_yaml(file)
        if not isinstance(content, dict | None):
            raise ConfigError(f"{file}: must be a mapping of settings, is a {type(content).__name__}")
        return ConfigResult(
            config=OmegaConf.create(content or {}),
            path=self.full_path(),
            provider=self.provider,
            header=self._get_header_dict(text[:512]),
        )

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return os.path.isdir(os.path.join(self.path, config_path))

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found: list[str] = []
        for name in os.listdir(os.path.join(self.path, config_path)):
            self._list_add_result(found, os.path.join(config_path, name), name, results_filter)
        return sorted(set(found))

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))


class FoldersOfSource(SearchPathPlugin):
    """Puts folders into the search path of the Hydra that is made inside `searched`; changes no other."""

    dirs: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path() if self.dirs else ():
            if element.provider == "main":
                element.path = address(element.path)
        for folder in self.dirs[1:]:
            search_path.append(provider="command-line", path=address(str(folder)))


@contextmanager
def searched(dirs: Sequence[Path]) -> Iterator[None]:
    """Lets Hydra read its configs, inside the context, from these folders; the first is its main one."""
    plugins = Plugins.instance()
    plugins.register(YamlFolder)
    plugins.register(FoldersOfSource)
    before, FoldersOfSource.dirs = FoldersOfSource.dirs, dirs
    try:
        yield
    finally:
        FoldersOfSource.dirs = before


def address(folder: str) -> str:
    """Returns a folder, or an address of one (`file://`), as an address of a `YamlFolder`.

    An address of another kind, such as that of a package (`pkg://`), stays.
    """
    path = folder.removeprefix("file://")
    return path if "://" in path else f"{SCHEME}://{os.path.abspath(path)}"


def complete_pools(
    cfg: DictConfig,
    overrides: Sequence[str],
    groups: Mapping[str, Sequence[Choice]],
    compose: Callable[[Sequence[str]], DictConfig],
) -> None:
    """Replaces each pool of a config, composed with these overrides, by all of its settings.

    compose: composes a config from overrides. Raises ConfigError.
    """
    names = pool_keys()
    common = not_about(overrides, "pools")
    found = {}
    plain: Any = OmegaConf.to_container(cfg.pools)
    _check_replicas(overrides, plain)
    for name, node in plain.items():
        where = f"pools.{name}"
        if node is None:
            node = {}
        if not isinstance(node, Mapping):
            raise ConfigError(
                f"{where}={shown(node)}: must be a mapping of settings, for example {{replicas: 2}}"
            )
        own = list(_flat(node, groups))
        for key, value in own:
            root = Override.parse(key).root
            if root not in names:
                raise ConfigError(
                    f"{where}.{key}: must be set for the whole run, not for a pool; {suggest(root, names)}"
                )
            if key in groups and not isinstance(value, Mapping):
                check_choice(f"{where}.{key}", shown(value), key, groups)
        added = ["pools=none", *(f"{key}={shown(value)}" for key, value in own)]
        chosen = {key: shown(value) for key, value in own if key in groups}
        _check_own_choices(where, chosen, common, added, compose)
        whole = compose([*common, *added])
        kept = OmegaConf.masked_copy(whole, [key for key in names if key in whole])
        OmegaConf.resolve(whole)
        found[name] = OmegaConf.to_container(OmegaConf.masked_copy(whole, list(kept)))
    with open_dict(cfg):
        cfg.pools = found


def _check_own_choices(
    where: str,
    chosen: Mapping[str, str],
    common: Sequence[str],
    added: Sequence[str],
    compose: Callable[[Sequence[str]], DictConfig],
) -> None:
    """Raises ConfigError for a setting of the run's choice of a group that a pool's own choice has not.

    chosen: the pool's own choices by group.
    """
    parsed = [(override, *override.key.partition(".")) for override in map(Override.parse, common)]
    asked = [
        (one, group, name)
        for one, group, _, name in parsed
        if name and group in chosen and not one.is_deleted
    ]
    if not asked:
        return
    texts = {override.text for override, *_ in asked}
    alone = compose([*(text for text in common if text not in texts), *added])
    for override, group, name in asked:
        node = OmegaConf.select(alone, group)
        allowed = [str(key) for key in node if key != "_target_"] if isinstance(node, DictConfig) else []
        if name.split(".")[0] not in allowed:
            raise ConfigError(
                f"{override.text}: is for the whole run, and {where}.{group}={chosen[group]} has no such "
                f"setting (it has {', '.join(allowed) or 'none'}); leave it out, or set {where}.{group} to a "
                "choice that has it"
            )


def _check_replicas(overrides: Sequence[str], pools: Mapping[str, Any]) -> None:
    """Raises ConfigError for a number of replicas of the run that the number of every pool replaces."""
    parsed = list(map(Override.parse, overrides))
    of_run = next((one for one in parsed if one.key == "replicas"), None)
    if of_run is None or not all(isinstance(pool, Mapping) and "replicas" in pool for pool in pools.values()):
        return
    chosen = next((one.text for one in parsed if one.name == "pools"), "the pools")
    keys = " and ".join(f"pools.{name}.replicas" for name in pools)
    raise ConfigError(
        f"{of_run.text}: has no effect beside {keys}; set these and leave out {of_run.text}, or leave out "
        f"{chosen}"
    )


def forced(overrides: Sequence[str]) -> list[str]:
    """Adds ++ to overrides of pools, so that Hydra accepts new settings of a pool and new pools."""
    parsed = map(Override.parse, overrides)
    return [f"++{o.text.lstrip('+')}" if _is_of_a_pool(o) else o.text for o in parsed]


def _is_of_a_pool(override: Override) -> bool:
    return override.key.startswith("pools.") and not override.is_deleted


def pool_keys() -> list[str]:
    """Returns the root keys that may differ from pool to pool."""
    from sim.setup.pool import PoolSettings  # noqa: PLC0415 (slow to import, and few runs have pools)

    return ["layout", *(field.name for field in fields(PoolSettings))]


def _flat(node: Mapping[str, Any], groups: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and their values; a mapping with a `_target_` is one value."""
    for key, value in node.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and "_target_" not in value:
            yield from _flat(value, groups, f"{name}.")
        else:
            yield name, value


_WHOLE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
"""Matches a value that is one interpolation of a key from the root; our own configs use no other kind."""


def resolved(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns a plain copy of the config with every interpolation replaced by its value; `???` is kept.

    Raises ConfigError.
    """
    plain: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    try:
        found: dict[str, Any] = _copy(plain, plain, ())
    except _OtherKind:
        own = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
        try:
            whole: Any = OmegaConf.to_container(own, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
        return dict(whole)
    return found


class _OtherKind(Exception):
    """An interpolation that only OmegaConf can resolve, or that refers to no key."""


def _copy(value: Any, root: Mapping[str, Any], on_the_way: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(item, root, on_the_way) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy(item, root, on_the_way) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = _WHOLE.fullmatch(value)
    if whole is None or value in on_the_way:
        raise _OtherKind
    node: Any = root
    for part in whole[1].split("."):
        if not isinstance(node, Mapping) or part not in node:
            raise _OtherKind
        node = node[part]
    return _copy(node, root, (*on_the_way, value))
