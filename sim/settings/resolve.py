"""Interpolations of a plain config, `${engine.max_num_seqs}`, without the 25 ms a config of OmegaConf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sim.settings.errors import ConfigError

_WHOLE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
"""A key from the root, and nothing around it: all that our own configs use."""


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with every interpolation replaced by what it stands for. Raises ConfigError."""
    try:
        found: dict[str, Any] = _copy(config, config, ())
    except _OtherKind:
        try:
            whole: Any = OmegaConf.to_container(OmegaConf.create(dict(config)), resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
        return dict(whole)
    return found


class _OtherKind(Exception):
    """An interpolation that only OmegaConf understands, or that stands for nothing."""


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
