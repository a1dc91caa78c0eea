"""Arguments of `windtunnel serve` beside its settings: flags of `vllm serve`, and checkpoints as `model=`.

The flag of the key is read before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.app.settings.override import Override
from sim.settings.errors import ConfigError

SETTINGS = {
    "--host": "host",
    "--port": "port",
    "--model": "model",
    "--served-model-name": "serve.served_model_name",
    "--allowed-hosts": "serve.allowed_hosts",
}
"""The setting of each flag; the last two take several values."""
LISTS = ("--served-model-name", "--allowed-hosts")
SMOLLM2 = "smollm2"
CHECKPOINT = "serve.engine.model"


def without_flags(words: Sequence[str]) -> list[str]:
    """Returns the words with the setting of each flag in its place.

    As in vLLM, a model that is named by --model has this name for clients, too. Raises ConfigError for a flag
    without a value.
    """
    found: list[str] = []
    rest, model = list(words), None
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in SETTINGS:
            found.append(f"{flag}{equals}{value}")
            continue
        values = [value] if equals else []
        while rest and (flag in LISTS or not values) and not rest[0].startswith("--") and "=" not in rest[0]:
            values.append(rest.pop(0))
        if not all(values) or not values:
            raise ConfigError(f"{flag}: needs a value, as in {flag}=VALUE or {SETTINGS[flag]}=VALUE")
        if flag == "--model":
            model = values[0]
        text = ",".join(map(quoted, values)) if flag in LISTS else values[0]
        found.append(f"{SETTINGS[flag]}=[{text}]" if flag in LISTS else f"{SETTINGS[flag]}={text}")
    if model is not None and not any(word.startswith("serve.served_model_name=") for word in found):
        found.append(f"serve.served_model_name=[{quoted(model)}]")
    return found


def with_checkpoint(words: Sequence[str]) -> list[str]:
    """Returns the words with `serve.engine.model=` for a model that is no choice of the group `model`.

    Those are smollm2, GGUF files, and folders. Without a model, it is smollm2. Other back ends: unchanged.
    """
    found = {parsed.name: parsed for parsed in map(Override.parse, words)}
    backend, model = found.get("backend"), found.get("model")
    if backend is None or backend.value != "engine":
        return list(words)
    if model is None:
        return list(words) if CHECKPOINT in found else [*words, f"{CHECKPOINT}={SMOLLM2}"]
    value = (model.value or "").strip("\"'")
    if value != SMOLLM2 and not value.endswith(".gguf") and not Path(value).is_dir():
        return list(words)
    return [f"{CHECKPOINT}={quoted(value)}" if word == model.text else word for word in words]


def quoted(text: str) -> str:
    """Returns a text as an override has it, whatever its characters."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
