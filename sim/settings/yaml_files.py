"""Reads config files like Hydra, but with libyaml, in a tenth of the time."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from hwmodels.bounded_files import UnreadableFileError, read_text
from sim.settings.bounded_yaml import MAX_CHARACTERS, NotTextError, TooLargeError, parse_yaml

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Content = tuple[str, str, str]
"""Folder, name and text of a config file."""

KEPT = 2_000
"""Size of the cache of files, in files; the least recently used one is dropped."""


class YamlRepository(ConfigRepository):
    """Hydra's repository of configs with `YamlFolder` as the source of folders.

    Caches the files that are read. Because composing changes nodes, every read creates new ones from a
    pickle, which takes a third of the time of OmegaConf.

    contents: name of each file that was read -> its folder, name and text.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.contents: dict[str, Content] = {}

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Replaces the sources of folders. Hydra calls it again if the user sets `hydra.searchpath`."""
        super().initialize_sources(config_search_path)
        self.sources = [
            YamlFolder(source.provider, source.path) if source.scheme() == "file" else source
            for source in self.sources
        ]

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Returns the content of a file and its defaults list; None if there is no such file."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if isinstance(source, YamlFolder):
            text = source.text(config_path)
        elif source is not None and source.scheme() in ("pkg", "structured"):
            text = ""  # a file or a class of an installed package does not change
        else:
            return super().load_config(config_path)
        self.contents[config_path] = key = (source.path, config_path, text)
        return _read.get(key, partial(super().load_config, config_path))


class Pickles(Generic[K, V]):
    """Results by what they are made of, each time as new objects; the least recently used one is dropped.

    Most processes need a result once, so it is pickled only when it is made for the second time.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._pickles: OrderedDict[K, bytes | None] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Returns the result for a key, which `make` makes anew."""
        known = self._pickles.get(key)
        if known is not None:
            self._pickles.move_to_end(key)
            # The pickle was written by this process, so loading it is safe.
            return pickle.loads(known)  # type: ignore[no-any-return]  # nosec B301
        made = make()
        self._pickles[key] = pickle.dumps(made) if key in self._pickles else None
        if len(self._pickles) > self._num_kept:
            self._pickles.popitem(last=False)
        return made


_read: Pickles[Content, ConfigResult | None] = Pickles(KEPT)


class YamlFolder(FileConfigSource):
    """A folder of config files."""

    def text(self, config_path: str) -> str:
        """Returns the text of a file; empty if the file cannot be read."""
        try:
            return read_text(self._file(config_path), 4 * MAX_CHARACTERS, errors="replace")
        except (OSError, UnreadableFileError):
            return ""

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns the content of a file; for an invalid file, Hydra's own loader raises the error.

        Raises YAMLError for a file that is not UTF-8 text, or exceeds the limits of `parse_yaml`.
        """
        file = self._file(config_path)
        try:
            text = read_text(file, 4 * MAX_CHARACTERS)
            content = parse_yaml(text, str(file))
        except UnreadableFileError as error:
            raise NotTextError(f"{file}: {error}") from None
        except UnicodeDecodeError as error:
            raise yaml.YAMLError(f"{file}: must be UTF-8 text: {error}") from None
        except (TooLargeError, NotTextError):
            raise
        except (OSError, yaml.YAMLError):
            content = None
        if isinstance(content, dict):
            return self._result(text, content)
        return super().load_config(config_path)

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))

    def _result(self, text: str, content: dict[str, Any]) -> ConfigResult:
        return ConfigResult(
            config=OmegaConf.create(content),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header=self._get_header_dict(text[:512]),
        )
