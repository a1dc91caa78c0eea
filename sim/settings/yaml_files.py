"""Config files as Hydra reads them, parsed by libyaml in a tenth of the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader


def _fast_loader() -> type:
    """OmegaConf's loader, which knows what is a number and refuses a key given twice, on libyaml's parser.

    Where PyYAML was built without libyaml, OmegaConf's own.
    """
    loader: type = get_yaml_loader()
    return type("FastLoader", (yaml.CSafeLoader, loader), {}) if yaml.__with_libyaml__ else loader


_LOADER = _fast_loader()
MAX_CHARACTERS = 10_000
"""Longest file that libyaml parses: it nests calls in C, so deeper nesting than that ends the process."""


class YamlRepository(ConfigRepository):
    """Hydra's repository of configs, whose folders are `YamlFolder`s."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Also called by Hydra for a `hydra.searchpath` of the user's."""
        super().initialize_sources(config_search_path)
        self.sources = [
            YamlFolder(source.provider, source.path) if source.scheme() == "file" else source
            for source in self.sources
        ]


class YamlFolder(FileConfigSource):
    """A folder of config files."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The content of a file. Hydra's own loader reads long ones, and says what is wrong with a bad one.

        Raises YAMLError for a file that is no UTF-8 text, or nests its values deeper than Python can follow.
        """
        file = Path(self.path, self._normalize_file_name(config_path))
        try:
            text = file.read_text(encoding="utf-8")
            content = yaml.load(text, Loader=_LOADER) if len(text) <= MAX_CHARACTERS else None
        except UnicodeDecodeError as error:
            raise yaml.YAMLError(f"{file}: must be UTF-8 text: {error}") from None
        except (OSError, yaml.YAMLError):
            content = None
        try:
            if isinstance(content, dict):
                return self._result(text, content)
            return super().load_config(config_path)
        except RecursionError:
            raise yaml.YAMLError(f"{file}: its values are nested too deeply; write them flatter") from None

    def _result(self, text: str, content: dict[str, Any]) -> ConfigResult:
        return ConfigResult(
            config=OmegaConf.create(content),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header=self._get_header_dict(text[:512]),
        )
