"""Translates a command into settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.app.launch_lines import sglang, tensorrt_llm, vllm
from experiments.app.launch_lines.commands import Command
from experiments.app.launch_lines.flags import (
    Arguments,
    Engine,
    parse,
    settings_of,
    table,
    typed,
    without_effect,
)
from experiments.app.launch_lines.translation import Context, Translation, file_of, text_of
from sim.settings.config_groups import find_groups
from sim.settings.errors import ConfigError, suggest
from sim.settings.model_names import model_named
from sim.settings.override import Override

BY_ENGINE: Mapping[Engine, Callable[[Context, Translation], None]] = {
    "vllm": vllm.meaning,
    "sglang": sglang.meaning,
    "tensorrt_llm": tensorrt_llm.meaning,
}

PARTITIONS: Mapping[Engine, str] = {"vllm": "VLLM_PP_LAYER_PARTITION", "sglang": "SGLANG_PP_LAYER_PARTITION"}
"""Variable with the layers of each pipeline stage, by engine."""


def translated(command: Command, dirs: Sequence[Path], beside: Sequence[str] = ()) -> Translation:
    """Returns a command as settings. Raises ConfigError for a flag that is unknown, wrong or refused.

    dirs: the config folders. beside: overrides that are given beside the command, which win.
    """
    found = parse(command.engine, command.tokens)
    with_file(Context(command=command, found=found, dirs=dirs, beside=beside))
    own = _meaning(command, found, dirs, beside)
    for flag in found.values:
        named = flag in own.without_effect or flag.startswith(("--speculative-", "--config"))
        if table(command.engine)[flag].effect != "setting" or named:
            continue
        rest = {name: value for name, value in found.values.items() if name != flag}
        try:
            alone = _meaning(command, replace(found, values=rest), dirs, beside)
        except ConfigError:  # the command needs the flag
            continue
        if alone.settings == own.settings and len(alone.unpriced) == len(own.unpriced):
            own.without_effect.append(found.written.get(flag, flag))
    return own


def _meaning(command: Command, found: Arguments, dirs: Sequence[Path], beside: Sequence[str]) -> Translation:
    """Returns what the flags mean; see `translated`."""
    at = Context(
        command=command,
        found=replace(found, values=dict(found.values), written=dict(found.written)),
        dirs=dirs,
        beside=beside,
    )
    own = Translation(engine=command.engine)
    own.without_effect, own.unpriced = without_effect(found)
    _environment(command, own)
    own.put("engine", command.engine)
    _model(at, own)
    for key, value in settings_of(found):
        own.put(key, value)
    BY_ENGINE[command.engine](at, own)
    return own


def with_file(at: Context) -> None:
    """Adds the flags of the YAML file that --config names; those of the command itself win."""
    name = at.get("--config")
    if name is None or at.found.engine == "tensorrt_llm":
        return
    known = table(at.found.engine)
    for key, value in file_of(at, "--config", str(name)).items():
        flag = f"--{str(key).replace('_', '-')}"
        if flag not in known:
            row = parse(at.found.engine, [flag, *([] if isinstance(value, bool) else [str(value)])])
            flag = next(iter(row.values))
        if flag not in at.found.values:
            at.found.values[flag] = typed(known[flag], f"{name}: {key}", value)
            at.found.written[flag] = f"{name}: {key}"


def _environment(command: Command, own: Translation) -> None:
    """Adds variables that an engine reads. Raises ConfigError for one that changes the engine."""
    for name, value in command.environment.items():
        if name == "VLLM_USE_V1" and value == "0":
            raise ConfigError(
                "--from: VLLM_USE_V1=0: the v0 engine is another one; leave it out, and set engine=vllm_v0 "
                "beside --from"
            )
        if name == PARTITIONS.get(command.engine):
            own.put("pp_layer_partition", _partition(name, value))
            continue
        if name.startswith(("VLLM_", "SGLANG_", "SGL_", "TRTLLM_", "TLLM_", "NCCL_")) and not name.endswith(
            ("_LEVEL", "_KEY", "_DEBUG", "_PORT", "_HOST_IP", "_VERSION", "USE_V1")
        ):
            own.unpriced.append((f"{name}={value}", "the environment is not simulated"))


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
        if found.weights is not None:
            own.put("model.weights", found.weights)
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
