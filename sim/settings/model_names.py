"""Finds the choice of the group `model` for a name from elsewhere, such as a Hugging Face id.

In this order: the id in a choice's `source`, up to case; then the same model under another name: without the
organisation, words of training (`Instruct`, `Base`), dates and words of quantisation (`AWQ`, `FP8`), which
become the format of the weights, and up to punctuation. Versions and sizes always count: Mistral-7B-v0.1 has
a sliding window, v0.3 has none. Other names are equal only if `EQUAL` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from sim.settings.config_groups import first_comment

TRAINING = {"instruct", "base", "chat", "it", "pt", "hf", "thinking"}
"""Words for what a model was trained for, which leave its architecture as it is."""

EQUAL = {
    "deepseek-v3": "deepseek-r1",
    "deepseek-v3.1": "deepseek-r1",
    "deepseek-v3.1-terminus": "deepseek-r1",
    "llama-3.3-70b": "llama-3.1-70b",
    "minimax-m2": "minimax-m2.5",
    "minimax-m2.1": "minimax-m2.5",
}
"""Models whose published configurations have the architecture of another one."""

QUANTISED = {
    "awq": "int4_wo",
    "gptq": "int4_wo",
    "int4": "int4_wo",
    "w4a16": "int4_wo",
    "int8": "int8",
    "w8a8": "int8",
    "w8a16": "int8_wo",
    "fp8": "fp8",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
}
"""Words for the format of a checkpoint's weights -> the setting `model.weights`."""

_BESIDE_A_FORMAT = {"dynamic", "static", "kv", "quantized", "block"}
_FP8_BY_BLOCK = {"qwen", "deepseek-ai", "minimaxai", "zai-org"}
"""Organisations whose fp8 checkpoints have a scale for every 128 x 128 weights."""

_SOURCE = re.compile(r"^source: *([^\s#]+)", re.M)
_DATE = re.compile(r"\d{4}|\d{6}|\d{8}")


class NamedModel(NamedTuple):
    """A choice of the group `model`, and what its name says of the weights."""

    choice: str
    weights: str | None
    """Format of the weights in the name; None: the choice's own."""
    summary: str
    """First comment of the choice's file: its size and kind."""


def model_named(name: str, dirs: Sequence[Path]) -> NamedModel | None:
    """Returns the choice that has this name; None if there is none. dirs: the config folders, ours first."""
    found = _choices(tuple(dirs))
    for file in found:
        if name == file.stem:
            return NamedModel(file.stem, None, first_comment(file))
    for file, source in found.items():
        if name.lower() == source.lower():
            return NamedModel(file.stem, None, first_comment(file))
    wanted, weights = _reduced(name)
    for file, source in found.items():
        if wanted in (_reduced(source)[0], _plain(file.stem)):
            return NamedModel(file.stem, weights, first_comment(file))
    return None


@lru_cache(maxsize=8)
def _choices(dirs: tuple[Path, ...]) -> dict[Path, str]:
    """Returns the files of models with their `source`, those of the first folder first."""
    return {file: source for folder in dirs for file, source in _sources(folder)}


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    for file in sorted((folder / "model").glob("*.yaml")):
        found = _SOURCE.search(file.read_text(encoding="utf-8", errors="replace"))
        if found:
            yield file, found[1]


def _reduced(name: str) -> tuple[str, str | None]:
    """Returns the name of the model itself, without punctuation, and the format of its weights."""
    organisation, _, own = name.lower().rpartition("/")
    words, weights = re.split(r"[-_]", own), None
    formats = [word for part in words for word in part.split(".") if word in QUANTISED]
    if formats:
        # A number of bits says more than the method: GPTQ-Int8 has weights in int8 and 16-bit activations.
        weights = QUANTISED[formats[-1]]
        if weights == "int8" and formats[0] == "gptq":
            weights = "int8_wo"
        if weights == "fp8" and (organisation in _FP8_BY_BLOCK or "block" in words):
            weights = "fp8_block"
        words = [word for word in words if not set(word.split(".")) & ({*QUANTISED} | _BESIDE_A_FORMAT)]
    words = [word for word in words if word not in TRAINING and not _DATE.fullmatch(word)]
    model = "-".join(words).removeprefix("meta-")
    return _plain(EQUAL.get(model, model)), weights


def _plain(name: str) -> str:
    """Returns a name without punctuation: llama3_1_8b and Llama-3.1-8B give llama318b."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
