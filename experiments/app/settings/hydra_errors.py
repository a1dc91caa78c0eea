"""Converts exceptions of Hydra and OmegaConf to messages with key, value, rule and nearest valid name.

For a misspelt key Hydra recommends a prefix `+`, with which the command fails later, and it never suggests a
name. The details are read from the fields of the exceptions or, where these are missing, from their messages.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from experiments.app.settings.compose import ConfigSource, without_hydra
from experiments.app.settings.config_groups import GROUP_OF, find_groups, key_comments
from experiments.app.settings.override import Override
from experiments.app.settings.renamed import ADVICE, note
from sim.settings.build import is_node, shown
from sim.settings.errors import NUM_NEAREST, ONLY_WITH_SPECULATION, ConfigError, nearest, suggest

USER_ERRORS = (HydraException, MissingMandatoryValue, InterpolationResolutionError, yaml.YAMLError)
"""Exceptions of Hydra, before or after a run, that are mistakes of the user."""

COMPOSE_ERRORS = (*USER_ERRORS, OmegaConfBaseException, ValueError)
"""Exceptions while composing that are mistakes of the user: Hydra raises ValueError for `group=5`."""

OFF_BY_DEFAULT = {"lora": "{_target_: hwmodels.model.weights.Lora, rank: 16, num_active: 8}"}
"""Nodes that are null in the config -> an example of a value."""


def explain(error: Exception, overrides: Sequence[str], source: ConfigSource) -> ConfigError:
    """Returns the error to show for an exception that composing with these overrides has raised."""
    return ConfigError(_message(error, overrides, source))


@contextmanager
def explained(
    source: ConfigSource, overrides: Sequence[str], errors: tuple[type[Exception], ...] = COMPOSE_ERRORS
) -> Iterator[None]:
    """Converts exceptions inside the context, which composing with these overrides raises, to ConfigError."""
    try:
        yield
    except errors as error:
        raise explain(error, overrides, source) from error


def composed(
    source: ConfigSource,
    overrides: Sequence[str],
    *,
    with_hydra: bool = False,
    replaced: Collection[str] = (),
) -> DictConfig:
    """Composes the config with these overrides. Raises ConfigError.

    replaced: root keys whose nodes the caller replaces by objects.
    """
    with explained(source, overrides):
        cfg = source.compose(overrides, with_hydra=with_hydra)
    check_edits(cfg, overrides, source, replaced)
    return cfg


def check_edits(
    cfg: DictConfig, overrides: Sequence[str], source: ConfigSource, replaced: Collection[str] = ()
) -> None:
    """Raises ConfigError for overrides that compose but have no effect or break the config.

    These are `+key=value` with a key that no code reads (keys below a `_target_` are checked by `build`),
    `key=choice` where the choice must be written with its group, and `~key` with a root key, because the
    commands read all root keys. Prints a note for settings that the run does not use.
    replaced: see `composed`.
    """
    check_nodes(cfg, overrides, source)
    _note_unused(cfg, overrides, replaced)
    groups = find_groups(source.dirs)
    for key, group in GROUP_OF.items():
        if key in cfg and not isinstance(cfg[key], DictConfig):
            raise ConfigError(_chosen_elsewhere(key, shown(cfg[key]), group, source))
    for override in map(Override.parse, overrides):
        key = override.key
        if override.is_deleted and key == override.root and key not in cfg:
            raise ConfigError(_deleted(key, source))
        if not override.prefix and key not in groups and isinstance(value_at(cfg, key), str):
            chosen = cfg if "hydra" in cfg else source.compose(overrides, with_hydra=True)
            if origin := _group_at(key, chosen):
                raise ConfigError(_chosen_elsewhere(key, override.value or "", origin, source))
        if not override.is_added or key in groups or key.startswith(("hydra", "pools.")):
            continue  # pools.complete checks the settings of pools
        if not _is_built(key, cfg) and key not in _keys(source.compose([])):
            raise ConfigError(_no_such_key(key, overrides, source))


def _note_unused(cfg: Mapping[Any, Any], overrides: Sequence[str], replaced: Collection[str] = ()) -> None:
    """Prints a note for each override of a group that is not built. cfg: the composed config.

    It is no error, so that one command line can compare runs with and without speculation. replaced: root
    keys that an object replaces.
    """
    nodes = (cfg, *(cfg.get("pools") or {}).values())
    speculates = "speculation" in replaced or any(node.get("speculation") for node in nodes)
    for override in map(Override.parse, overrides):
        if override.root in ONLY_WITH_SPECULATION and "speculation" in cfg and not speculates:
            note(f"{override.text} is not used with speculation=none.")


def _group_at(key: str, cfg: DictConfig) -> str | None:
    """Returns the group of which the config has a choice at the key. cfg: with Hydra's node."""
    for written in map(str, cfg.hydra.runtime.choices):
        group, _, package = written.partition("@")
        if key == (package or group.replace("/", ".")):
            return group
    return None


def _is_built(key: str, cfg: DictConfig) -> bool:
    """Returns whether a node above the key has a `_target_`, so that `build` checks the key."""
    parts = key.split(".")
    above = [OmegaConf.select(cfg, ".".join(parts[:i])) for i in range(1, len(parts))]
    return any(isinstance(node, DictConfig) and "_target_" in node for node in above)


def _deleted(key: str, source: ConfigSource) -> str:
    """Returns the message for a group or setting at the root that must not be deleted."""
    if choices := _choices(key, source):
        return f"~{key}: must be chosen; allowed: {', '.join(f'{key}={choice}' for choice in choices)}"
    node = source.compose([]).get(key)
    keys = list(_keys(node, f"{key}.")) if isinstance(node, DictConfig) else [key]
    return f"~{key}: must not be deleted; instead set {', '.join(keys)}"


def _message(error: Exception, overrides: Sequence[str], source: ConfigSource) -> str:
    cause, text = error.__cause__, str(error)
    if nameless := next((o for o in overrides if not re.match("[+~]*[^=+~]", o)), None):
        return f"{nameless}: must be key=value"
    if message := _by_type(error, overrides, source) or _by_text(text, overrides, source):
        return message
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        culprit = _override_of(str(cause.full_key), overrides) or str(cause.full_key)
        return f"{culprit}: {_first_line(str(cause))}"
    return _first_line(text) or (_first_line(str(cause)) if cause else type(error).__name__)


def _by_type(error: Exception, overrides: Sequence[str], source: ConfigSource) -> str | None:
    """Returns the message for errors that are told apart by their type; else None."""
    if isinstance(error, OverrideParseException):
        return _bad_syntax(error, source)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_choice(error, overrides, source)
    if isinstance(error, MissingMandatoryValue):
        return _not_given(str(error.full_key), source)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(str(error))}"
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return _no_such_key(str(cause.full_key), overrides, source)
    return None


def _by_text(text: str, overrides: Sequence[str], source: ConfigSource) -> str | None:
    """Returns the message for errors that Hydra tells apart only by their text; else None."""
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unused_group(match[1], overrides, source)
    if match := re.search(
        r"(?:config group|Could not delete from config\.|Could not delete) '([^']+)'", text
    ):
        return _no_such_key(match[1], overrides, source)
    if match := re.search(r"You must specify '([^']+)'", text):
        return f"{match[1]}: must be chosen; {_suggest_choice('', match[1], source)}"
    if match := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^']+)'", text):
        return f"{match[1]}: several values need --multirun (a list is written [a,b])"
    if match := re.search(r"Config group override must be a string.*Got (\w+)", text):
        return _group_value(overrides, source) or text
    return None


def _bad_syntax(error: OverrideParseException, source: ConfigSource) -> str:
    written = error.override
    if "=" in written or written.startswith("~"):
        override = Override.parse(written)
        is_list = OmegaConf.is_list(value_at(source.compose([]), override.key))
        return f"{written}: cannot be read as key=value; {cure(override, is_list=is_list)}"
    best = nearest(written, [*find_groups(source.dirs), *_keys(source.compose([]))])
    return f"{written}: must be key=value" + (f"; nearest: {best}=..." if best else "")


def _not_given(key: str, source: ConfigSource) -> str:
    """Returns the message for a setting without a default, with the comment of the root config about it."""
    meaning = key_comments(source.dirs[0] / f"{source.config_name}.yaml").get(key)
    return f"{key}: must be given, as {key}=...{f': {meaning}' if meaning else ''}"


def _no_such_choice(error: MissingConfigException, overrides: Sequence[str], source: ConfigSource) -> str:
    parsed = [one for one in map(Override.parse, overrides) if not one.is_deleted]
    missing = str(error.missing_cfg_file)
    group, _, choice = missing.rpartition("/")
    of_a_path = next((one for one in parsed if "/" in (one.value or "") and missing == _file_of(one)), None)
    if of_a_path:
        group, choice = of_a_path.key, of_a_path.value or ""
    if not group:
        return f"no config file {choice}.yaml in {source.dirs[0]}"
    if not error.options:
        return _no_such_key(group, overrides, source)
    parent = re.match(r"In '([^']+)'", str(error))
    written = (f"{one.name}={choice}" for one in parsed if (one.key, one.value) == (group, choice))
    by_user = next(written, None)
    name, options = choice.rpartition("/")[2], sorted(error.options)
    suggestion = _suggest_choice(name, group, source, options)
    message = f"{by_user or f'{group}={choice}'}: no such choice; {suggestion}"
    return message if by_user or not parent else f"{parent[1]}.yaml: {message}"


def _no_such_key(key: str, overrides: Sequence[str], source: ConfigSource) -> str:
    """Returns the message with the valid names next to the key, or at the root if its parent is unknown."""
    if key.startswith("hydra"):
        return f"{key}: no such setting of Hydra"
    parsed = list(map(Override.parse, overrides))
    for one in parsed:
        is_mapping = not one.prefix and (one.value or "").lstrip().startswith("{")
        if is_mapping and f"{key}.".startswith(f"{one.name}."):
            return f"{key}: not in the mapping yet; add new entries with '++{one.text}'"
    if key in GROUP_OF:
        value = next((one.value for one in parsed if one.name == key), None)
        return _chosen_elsewhere(key, value or "", GROUP_OF[key], source)
    groups = list(find_groups(source.dirs))
    culprit, group = next((one for one in parsed if one.name == key), None), key.replace(".", "/")
    if culprit and group != key and group in groups:
        return _chosen_elsewhere(key, culprit.value or "", group, source)
    key = next((one.name for one in parsed if one.name.startswith(f"{key}.")), key)
    cfg = _config_without(key, overrides, source)
    chosen = cfg.hydra.runtime.choices
    cfg = without_hydra(cfg)
    parent, _, _ = key.rpartition(".")
    culprit = next((one for one in parsed if one.package and one.key == key), None)
    if culprit and key in _keys(cfg):
        return f"{culprit.text}: {key} is a setting, not a group; write {key}={culprit.value or '...'}"
    branch = OmegaConf.select(cfg, parent) if parent else None
    if branch is None and parent in OFF_BY_DEFAULT:
        return f"{key}: {parent} is null; set it as a whole: '{parent}={OFF_BY_DEFAULT[parent]}'"
    if not branch and (message := _no_settings(key, cfg, chosen, source)):
        return message
    if isinstance(branch, DictConfig):
        allowed = [f"{parent}.{name}" for name in map(str, branch) if name != "_target_"]
    else:
        parent, allowed = "", sorted({*groups, *map(str, cfg)})
    kind = "setting" if parent else "group or setting"
    if key in ADVICE:
        return f"{key}: no such {kind}; {ADVICE[key]}"
    also = [*groups, *_keys(cfg)]
    is_a_last_part = key in {one.rpartition(".")[2] for one in also}
    if not parent and not is_a_last_part and (choices := _choices_with(key, source)):
        return f"{key}: no such {kind}; {choices}"
    listed_by = f"windtunnel {source.config_name} --help"
    return f"{key}: no such {kind}; {suggest(key, allowed, also, listed_by=listed_by)}"


def _no_settings(key: str, cfg: DictConfig, chosen: DictConfig, source: ConfigSource) -> str | None:
    """Returns the message for a setting of a choice without settings, or None if the key is not one.

    Example: model.transform.keep with model/transform=none. chosen: the choices of the config, by group.
    """
    groups, parts = find_groups(source.dirs), key.split(".")
    for i in range(len(parts) - 1, 0, -1):
        group = "/".join(parts[:i])
        is_chosen = group in groups and group in chosen
        if not is_chosen or value_at(cfg, ".".join(parts[:i])):
            continue
        settings = {choice.name: key_comments(choice.file) for choice in groups[group]}
        others = [name for name, keys in settings.items() if "_target_" in keys]
        if others:
            best = next((name for name in others if parts[i] in settings[name]), others[0])
            instead = f"choose one with settings, such as {group}={best}"
            present = shown(chosen[group])
            return f"{key}: {group}={present} has no settings; {instead}"
    return None


def _unused_group(group: str, overrides: Sequence[str], source: ConfigSource) -> str:
    """Returns the message for a group that the present choices do not use: arrivals with a trace workload."""
    if group not in find_groups(source.dirs):
        return _no_such_key(group, overrides, source)
    culprit = _override_of(group, overrides) or group
    parent, _, _ = group.rpartition("/")
    if not _is_taken(group, source):
        return f"{culprit}: this command does not take {group}; leave it out"
    return f"{culprit}: is not used by {_override_of(parent, overrides) or f'the present choice of {parent}'}"


def _is_taken(group: str, source: ConfigSource) -> bool:
    """Returns whether the command has the group's parent, and any choice of the parent has the group."""
    parent, _, name = group.rpartition("/")
    if parent not in source.compose([], with_hydra=True).hydra.runtime.choices:
        return False
    files = [choice.file for choice in find_groups(source.dirs)[parent]]
    return any(re.search(rf"^ *- *{name}:", file.read_text(encoding="utf-8"), re.M) for file in files)


def _chosen_elsewhere(key: str, value: str, group: str, source: ConfigSource) -> str:
    """Returns the message for a choice that was written without its group."""
    choices = _choices(group, source)
    written = group if group == key.replace(".", "/") else f"{group}@{key}"
    if value in choices:
        return f"{key}={value}: must be written {written}={value}, as a choice of {group}"
    return f"{key}={value}: no such choice; write {written}=...; {_suggest_choice(value, group, source)}"


def _group_value(overrides: Sequence[str], source: ConfigSource) -> str | None:
    """Returns the message for `hardware=5`; Hydra's names only the type, so all groups are searched."""
    for group, found in find_groups(source.dirs).items():
        choices = [choice.name for choice in found]
        culprit = Override.parse(_override_of(group, overrides) or "")
        value = culprit.value or ""
        if culprit.text and value not in choices:
            return f"{culprit.text}: no such choice; {_suggest_choice(value, group, source)}"
    return None


def _config_without(key: str, overrides: Sequence[str], source: ConfigSource) -> DictConfig:
    """Composes the config without the overrides of a key, with Hydra's node.

    If this config cannot be composed either, only the choices of the overrides are kept, or none.
    """
    culprit = _override_of(key, overrides)
    others = [o for o in overrides if o != culprit]
    groups = find_groups(source.dirs)
    choices = [o for o in others if Override.parse(o).key in groups]
    for kept in (others, choices):
        try:
            return source.compose(kept, with_hydra=True)
        except COMPOSE_ERRORS:
            continue
    return source.compose([], with_hydra=True)


def _override_of(key: str, overrides: Sequence[str]) -> str | None:
    return next((o for o in overrides if Override.parse(o).name == key), None)


def _suggest_choice(
    value: str, group: str, source: ConfigSource, choices: Sequence[str] | None = None
) -> str:
    """Returns the end of a message about a wrong choice. choices: default: those of the config folders."""
    groups = find_groups(source.dirs)
    names = [choice.name for choice in groups.get(group, [])] if choices is None else choices
    others = {choice.name for other, found in groups.items() if other != group for choice in found}
    # The default is usual, and what other groups have as well, such as hardware with a calibration.
    usual = {*others, _default_of(group, source)}
    return suggest(value, names, listed_by=f"windtunnel list {group}" if group in groups else "", usual=usual)


def _default_of(group: str, source: ConfigSource) -> str:
    try:
        return str(source.compose([], with_hydra=True).hydra.runtime.choices.get(group))
    except COMPOSE_ERRORS:
        return ""


def _choices_with(name: str, source: ConfigSource) -> str:
    """Returns a hint at the choices with a setting of that name; empty if there are none."""
    for group, found in find_groups(source.dirs).items():
        written = group.replace("/", ".")
        choices = [choice.name for choice in found if name in key_comments(choice.file)]
        if choices and group in source.compose([], with_hydra=True).hydra.runtime.choices:
            return f"nearest: {written}.{name}, with {group}={', '.join(choices[:NUM_NEAREST])}"
    return ""


def _file_of(override: Override) -> str:
    return f"{override.key}/{override.value}"


def _choices(group: str, source: ConfigSource) -> list[str]:
    return [choice.name for choice in find_groups(source.dirs).get(group, [])]


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yields every dotted key below a node."""
    for name in map(str, node):
        if name == "_target_":
            continue
        yield f"{prefix}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _keys(child, f"{prefix}{name}.")


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""


_SWEEP = re.compile(r"(?P<call>(?:range|choice|glob|interval)\([^()]*\))(?P<rest>.+)")


def cure(override: Override, *, is_list: bool) -> str:
    """Returns what to write in place of an override. is_list: whether its setting is a list."""
    value = override.value or ""
    if missing := _unclosed(value):
        return f"add what is missing at the end: '{override.text}{missing}'"
    key = f"{override.prefix}{override.name}"
    if found := _SWEEP.fullmatch(value):
        return f"remove {found['rest']} at the end: '{key}={found['call']}'"
    if is_list or value.startswith("["):
        parts = value.removeprefix("[").removesuffix("]").split(",")
        items = ",".join("'{}'".format(part.strip(" '\"")) for part in parts)
        return f'write each text of the list in quotes: "{key}=[{items}]"'
    return f"quote special characters: '{key}=\"{value}\"'"


def _unclosed(value: str) -> str:
    """Returns the brackets that are open at the end of a value, closed in their order; empty if none is."""
    missing = ""
    for char in value:
        if char in "([{":
            missing = ")]}"["([{".index(char)] + missing
        elif missing and char == missing[0]:
            missing = missing[1:]
    return missing


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
