"""Parses YAML within limits, because with aliases a few hundred characters can define billions of values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

try:
    from omegaconf._yaml import get_yaml_loader  # type: ignore[import-not-found]  # of OmegaConf 2.4
except ImportError:
    from omegaconf._utils import get_yaml_loader

from hwmodels.checks import UnreadableFileError, read_text
from sim.settings.errors import ConfigError

MAX_CHARACTERS = 1_000_000
SHORT = 10_000
"""Length in characters up to which indentation alone cannot nest a text deeper than 141 levels."""
MAX_DEPTH = 50
"""Maximum nesting of lists and mappings; the deepest config of windtunnel has eight levels."""
MAX_VALUES = 100_000
"""Maximum number of keys and values, including those that aliases repeat."""


def _fast_loader() -> type:
    """Returns OmegaConf's loader on libyaml's parser; without libyaml, OmegaConf's own.

    It reads numbers as OmegaConf does, refuses duplicate keys, and builds only plain values.
    """
    loader: type = get_yaml_loader()
    if not yaml.__with_libyaml__ or issubclass(loader, yaml.CSafeLoader):
        return loader
    return type("FastLoader", (yaml.CSafeLoader, loader), {})


_LOADER = _fast_loader()


class TooLargeError(yaml.YAMLError):  # type: ignore[misc]
    """Raised for YAML that exceeds the limits of size, depth or number of values."""


class NotTextError(yaml.YAMLError):  # type: ignore[misc]
    """Raised for a character that YAML does not allow, such as NUL."""


def parse_yaml(text: str, where: str) -> Any:
    """Parses YAML to plain values. where: the file, for messages.

    Raises TooLargeError beyond the limits, NotTextError, and other YAMLErrors for invalid YAML.
    """
    if len(text) > MAX_CHARACTERS:
        raise TooLargeError(f"{where}: must have at most {MAX_CHARACTERS:,} characters, has {len(text):,}")
    try:
        if not _is_small(text):
            _check_size(text, where)
        # The loader derives from SafeLoader.
        return yaml.load(text, Loader=_LOADER)  # nosec B506
    except ReaderError as error:
        line = text[: text.find(chr(error.character))].count("\n") + 1
        raise NotTextError(
            f"{where}:{line}: not valid YAML: must be text without the character U+{error.character:04X}"
        ) from None
    except yaml.MarkedYAMLError as error:
        if "nesting depth" in str(error.problem):  # libyaml's own limit, which it has from PyYAML 6.0.4 on
            raise TooLargeError(_too_deep(where)) from None
        raise


def _too_deep(where: str) -> str:
    return f"{where}: must nest lists and mappings at most {MAX_DEPTH} levels deep"


def read_yaml(file: Path) -> Any:
    """Reads a YAML file that is data, such as the config of a run. Raises ConfigError."""
    return read_text_and_yaml(file)[1]


def read_text_and_yaml(file: Path) -> tuple[str, Any]:
    """Reads a YAML file, and returns its text and its values. Raises ConfigError."""
    try:
        text = read_text(file, 4 * MAX_CHARACTERS)
        return text, parse_yaml(text, str(file))
    except UnreadableFileError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (TooLargeError, NotTextError) as error:
        raise ConfigError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: must be UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).partition("\n")[0]
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else f"{file}"
        raise ConfigError(f"{where}: not valid YAML: {what}") from error


def _is_small(text: str) -> bool:
    """Returns whether a text needs no count of its values, as almost all configs: counting takes time."""
    nested = text.count("[") + text.count("{") > MAX_DEPTH or "- -" in text or "? -" in text
    return len(text) <= SHORT and "&" not in text and not nested


def _check_size(text: str, where: str) -> None:
    """Raises TooLargeError by reading the parser's events, which needs no memory for values."""
    sizes: dict[str, int] = {}
    """Anchor -> number of values that it stands for."""
    open_nodes: list[tuple[str | None, int]] = []
    """Lists and mappings that are not closed yet: the anchor, and the number of values before each."""
    count = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
            if len(open_nodes) > MAX_DEPTH:
                raise TooLargeError(_too_deep(where))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise TooLargeError(f"{where}: the alias *{event.anchor} refers to a value that contains it")
            count += sizes[event.anchor]
        if count > MAX_VALUES:
            raise TooLargeError(f"{where}: must have at most {MAX_VALUES:,} values, with those of aliases")
