"""Completes the pools of a config: each has the settings of the run and a few of its own.

    pools:
      large: {replicas: 2, hardware: h200_sxm}
      small: {replicas: 6, hardware: l40s, engine.max_num_seqs: 64}

The lines of a pool are overrides of the run's settings, as on the command line: a choice of a group
(hardware: l40s) or a setting. `complete_pools` replaces them by all settings of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.app.settings.config_groups import Choice, check_choice
from experiments.app.settings.override import Override, not_about
from sim.settings.build import shown
from sim.settings.errors import ConfigError, suggest


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
