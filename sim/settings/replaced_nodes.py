"""Overrides that put a number in the place of a mapping with settings, such as lengths.prompt_tokens=10."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sim.settings.build import is_node
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import find_groups, key_comments
from sim.settings.errors import ConfigError
from sim.settings.override import Override

VALUE = "value"
"""Setting with the number itself, of the classes that stand for one number."""


def check_nodes(cfg: DictConfig, overrides: Sequence[str], source: ConfigSource) -> None:
    """Raises ConfigError for a number that replaces a mapping; the message says which setting to give it."""
    for override in map(Override.parse, overrides):
        parent, _, name = override.key.rpartition(".")
        if not parent or not isinstance(value_at(cfg, override.key), int | float):
            continue
        holder = value_at(cfg, parent)
        target = holder.get("_target_") if isinstance(holder, DictConfig) else None
        if isinstance(target, str) and is_node(target, name):
            others = [text for text in overrides if text != override.text]
            raise ConfigError(f"{override.text}: must be a mapping; {_advice(override, others, source)}")


def _advice(override: Override, others: Sequence[str], source: ConfigSource) -> str:
    """Returns what to write instead: the setting `value` of the mapping, a choice with it, or any setting."""
    key, number = override.key, override.value
    parent, _, name = key.rpartition(".")
    chosen = source.compose(list(others), with_hydra=True)
    node = value_at(chosen, key)
    settings = [str(own) for own in node if own != "_target_"] if isinstance(node, DictConfig) else []
    if VALUE in settings:
        return f"set {key}.{VALUE}={number}"
    for written in map(str, chosen.hydra.runtime.choices):
        group, _, package = written.partition("@")
        if parent != (package or group.replace("/", ".")):
            continue
        for choice in find_groups(source.dirs)[group]:
            if f"{name}.{VALUE}" in key_comments(choice.file):
                return f"choose {written}={choice.name} and set {key}.{VALUE}={number}"
    if len(settings) == 1:
        return f"set {key}.{settings[0]}={number}"
    return f"its settings are {', '.join(f'{key}.{own}' for own in settings)}"


def value_at(cfg: DictConfig, key: str) -> Any:
    """Returns the value of a key; None if it, or a key that it refers to, does not exist."""
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None
