"""Translates a command into settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.app.launch_lines import sglang, tensorrt_llm, vllm
from experiments.app.launch_lines.flags import (
    Arguments,
    Engine,
    parse,
    reasons,
    settings_of,
    table,
    typed,
)
from experiments.app.launch_lines.shell import Command
from experiments.app.launch_lines.translation import Context, Translation, file_of, text_of
from experiments.app.launch_lines.versions import WITH_ASYNC_SCHEDULING, known, profile_at
from experiments.app.settings.config_groups import find_groups
from experiments.app.settings.override import Override
from experiments.app.settings.renamed import model_named
from sim.settings.errors import ConfigError, suggest

BY_ENGINE: Mapping[Engine, Callable[[Context, Translation], None]] = {
    "vllm": vllm.meaning,
    "sglang": sglang.meaning,
    "tensorrt_llm": tensorrt_llm.meaning,
}

PARTITIONS: Mapping[Engine, str] = {"vllm": "VLLM_PP_LAYER_PARTITION", "sglang": "SGLANG_PP_LAYER_PARTITION"}
"""Variable with the layers of each pipeline stage, by engine."""
CHUNKED = "batching.enable_chunked_prefill"


def translated(
    command: Command,
    dirs: Sequence[Path],
    beside: Sequence[str] = (),
    ignored: Sequence[str] = (),
    of_pools: Sequence[str] = (),
) -> Translation:
    """Returns a command as settings. Raises ConfigError for a flag that is unknown, wrong or refused.

    dirs: the config folders. beside: overrides that are given beside the command, which win. ignored: flags,
    variables and keys of the YAML file that are left out of the command; those that it lacks are not missed.
    of_pools: flags that need no settings, as the server is one of a pool of prefill or decode servers.
    """
    found = parse(command.engine, command.tokens, ignored)
    of_pools = [flag for flag in of_pools if found.values.pop(flag, None) is not None]
    environment = {name: value for name, value in command.environment.items() if name not in ignored}
    found.ignored += sorted(command.environment.keys() - environment.keys())
    command = replace(command, environment=environment)
    with_file(Context(command=command, found=found, dirs=dirs, beside=beside), ignored)
    own = _meaning(command, found, dirs, beside, ignored)
    own.without_effect |= dict.fromkeys(of_pools, "is about prefill and decode, which are pools")
    _check_none_is_refused(own)
    for flag in found.values:
        named = own.names(flag) or flag.startswith(("--speculative-", "--config"))
        if table(command.engine)[flag].effect != "setting" or named:
            continue
        rest = {name: value for name, value in found.values.items() if name != flag}
        try:
            alone = _meaning(command, replace(found, values=rest), dirs, beside, ignored)
        except ConfigError:  # the command needs the flag
            continue
        if alone.settings == own.settings:
            own.without_effect[found.written.get(flag, flag)] = ""
    if command.is_offline:  # no HTTP, no client
        own.settings |= {"engine.frontend_s": "0", "engine.frontend": "null"}
        if command.engine == "vllm":
            own.put("engine.default_limits", "vllm_offline")
    if command.copies > 1:
        own.put("replicas", command.copies * int(own.settings.get("replicas", 1)))
        if command.routing is not None:
            own.put("routing", command.routing)
    return own


def check_ignored(parts: Sequence[Translation], ignored: Sequence[str]) -> None:
    """Raises ConfigError for what should be left out of commands that do not have it."""
    for name in ignored:
        if not any(name in part.ignored for part in parts):
            raise ConfigError(
                f"--from-ignore {name}: the command has no such flag, variable or key; leave it out"
            )


def _check_none_is_refused(own: Translation) -> None:
    """Raises ConfigError that names all flags that change times in a way that is not modelled."""
    if not own.refused:
        return
    names = ",".join(dict.fromkeys(re.split(r"[ =]", shown.removesuffix(":"))[0] for shown in own.refused))
    if len(own.refused) == 1:
        shown, reason = next(iter(own.refused.items()))
        text = f"{shown}: {reason}; leave it out, or go on without it by --from-ignore {names}"
    else:
        shown = "; ".join(f"{flag} ({reason})" for flag, reason in own.refused.items())
        text = (
            f"{len(own.refused)} parts of the command change times in ways that are not modelled: {shown}; "
            f"leave them out, or go on without them by --from-ignore {names}"
        )
    raise ConfigError(f"--from: {text}")


def _meaning(
    command: Command, found: Arguments, dirs: Sequence[Path], beside: Sequence[str], ignored: Sequence[str]
) -> Translation:
    """Returns what the flags mean; see `translated`."""
    at = Context(
        command=command,
        found=replace(found, values=dict(found.values), written=dict(found.written)),
        dirs=dirs,
        beside=beside,
        ignored=ignored,
    )
    without_effect, refused = reasons(found, command.environment)
    own = Translation(
        engine=command.engine, without_effect=without_effect, refused=refused, ignored=[*found.ignored]
    )
    _profile(at, own)
    if layers := command.environment.get(PARTITIONS.get(command.engine, "")):
        own.put("pp_layer_partition", _partition(PARTITIONS[command.engine], layers))
    _model(at, own)
    for key, value in settings_of(found):
        own.put(key, value)
    BY_ENGINE[command.engine](at, own)
    if own.settings["engine"] == "vllm_v0" and own.settings.pop(CHUNKED, "false") == "true":
        own.put("batching", "chunked")  # v0 has chunks only if it is asked for them
    return own


def _profile(at: Context, own: Translation) -> None:
    """Chooses the profile of the engine, by the version that the command's image or package names."""
    engine, version = at.command.engine, at.command.version
    profile = engine if version is None else profile_at(engine, version)
    if at.get("--async-scheduling"):
        profile = WITH_ASYNC_SCHEDULING.get(profile, profile)
    own.put("engine", profile)
    if engine == "vllm" and profile != "vllm_v0" and version is not None:
        own.put("engine.version", known(version))


def with_file(at: Context, ignored: Sequence[str] = ()) -> None:
    """Adds the flags of the YAML file that --config names; those of the command itself win."""
    name = at.get("--config")
    if name is None or at.found.engine == "tensorrt_llm":
        return
    known = table(at.found.engine)
    for key, value in file_of(at, "--config", str(name)).items():
        flag = f"--{str(key).replace('_', '-')}"
        if flag in ignored or str(key) in ignored:
            at.found.ignored.append(flag if flag in ignored else str(key))
            continue
        if flag not in known:
            row = parse(at.found.engine, [flag, *([] if isinstance(value, bool) else [str(value)])])
            flag = next(iter(row.values))
        if flag not in at.found.values:
            at.found.values[flag] = typed(known[flag], f"{name}: {key}", value)
            at.found.written[flag] = f"{name}: {key}"


def _partition(name: str, value: str) -> str:
    """Returns the layers of each pipeline stage as a list. Raises ConfigError if it is none."""
    layers = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in layers):
        raise ConfigError(
            f"--from: {name}={value}: must be the layers of each pipeline stage with commas between them, "
            "such as 20,20,20,20"
        )
    return f"[{','.join(layers)}]"


def _model(at: Context, own: Translation) -> None:
    """Sets the model. Raises ConfigError for one that is not known."""
    flag = "--model-path" if at.found.engine == "sglang" else "--model"
    names = [*at.found.positional[:1], at.get(flag)]
    name = next((each for each in names if each), None)
    if unknown := next((word for word in at.found.positional if word.startswith("$")), None):
        raise ConfigError(
            f"--from: {unknown}: the variable has no value in the text, or one of several, which is read and "
            "not executed; write the value in its place, or before a file: --from 'TP=8 FILE'"
        )
    if len(at.found.positional) > 1:
        raise ConfigError(f"--from: {at.found.positional[1]}: is neither a flag nor the model; leave it out")
    if any(Override.parse(text).name == "model" for text in at.beside):
        return
    if name is None:
        raise ConfigError(
            f"--from: names no model; add it to the command ({flag} MODEL), or give model=NAME beside --from"
        )
    if found := model_named(str(name), at.dirs):
        own.put("model", found.choice)
        for setting in found.overrides("model"):
            own.put(*setting.split("=", 1))
        return
    folder = next((p for p in (Path(name), at.command.folder / name) if (p / "config.json").is_file()), None)
    if folder is not None:
        own.put("model", "hf")
        own.put("model.path", text_of(folder))
        return
    choices = [choice.name for choice in find_groups(at.dirs)["model"]]
    best = suggest(str(name).rpartition("/")[2], choices, listed_by="windtunnel list model")
    raise ConfigError(
        f"--from: model {name}: there is no preset of this name ({best}); give model=NAME beside --from, or "
        "model=hf model.path=FOLDER with its config.json"
    )
