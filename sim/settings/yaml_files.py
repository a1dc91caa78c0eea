"""Folders of config files as plugins of Hydra: read within limits, and by libyaml in a tenth of the time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from sim.settings.bounded_yaml import read_text_and_yaml
from sim.settings.errors import ConfigError

SCHEME = "windtunnel"


class YamlFolder(ConfigSource):
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
