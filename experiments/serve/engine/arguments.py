"""Reads `model=` of a command line with backend=engine, where it may name a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.app.settings.override import Override

SMOLLM2 = "smollm2"
CHECKPOINT = "serve.engine.model"


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
    return [_checkpoint(value) if word == model.text else word for word in words]


def _checkpoint(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{CHECKPOINT}='{escaped}'"
