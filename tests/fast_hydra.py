"""A faster Hydra for tests that compose the same files hundreds of times: it reads each file once.

Tests compose some two thousand configs, which took half of the suite's time. Two steps of Hydra are
expensive, and both give the same result at less cost:
- Hydra parses a config file anew for every composition; here once, until the file changes.
- Hydra gathers names for interpolations in every defaults list; here only for a list that has some.
"""

import copy
import os

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

_read = ConfigRepository.load_config
_interpolation_map = defaults_list._create_interpolation_map
_results: dict[tuple[object, ...], object] = {}


def _read_once(repository, config_path):
    """Returns what Hydra reads of a file, from memory if it is unchanged; the config is a copy."""
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None or source.scheme() not in ("file", "pkg"):
        return _read(repository, config_path)
    key = (source.scheme(), source.path, source.provider, config_path)
    if source.scheme() == "file":  # of the user's or ours; those of a package stay as they are
        stat = os.stat(os.path.join(source.path, source._normalize_file_name(config_path)))
        key = (*key, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    if key not in _results:
        _results[key] = _read(repository, config_path)
    result = copy.copy(_results[key])
    result.config = copy.deepcopy(result.config)
    return result


def _map_if_needed(overrides, defaults, self_added):
    if any(default.is_interpolation() for default in defaults):
        return _interpolation_map(overrides, defaults, self_added)
    return None


def install(patch: pytest.MonkeyPatch) -> None:
    """Makes Hydra compose faster until the patch is undone."""
    patch.setattr(ConfigRepository, "load_config", _read_once)
    patch.setattr(defaults_list, "_create_interpolation_map", _map_if_needed)
