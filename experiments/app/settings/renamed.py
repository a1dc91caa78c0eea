"""Other names of settings and models that are accepted, with a note that says the name that is used.

- Renamed settings and groups: their old names are accepted for one version.
- Abbreviations that mean the same as one setting: `tp` is `tensor_parallel_size`.
- Hugging Face ids of models: `model=meta-llama/Llama-3.1-8B-Instruct`, see `model_names`.
- Names of devices in other letters, those that leave out the series, and those that nvidia-smi prints:
  `hardware=H20`, `hardware=a6000`, `hardware='NVIDIA A100-SXM4-80GB'`.

Names that could mean several settings are not accepted; `ADVICE` says what to write in their place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.model_names import model_named
from sim.settings.errors import ConfigError

NEW_NAMES = {"handover": "kv_transfer", "troubles": "failures"}
"""Old name -> new name of keys of the root and of groups."""

ALIASES = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "ep_size": "expert_parallel_size",
    "rate": "workload.arrivals.rate_per_s",
    "qps": "workload.arrivals.rate_per_s",
    "request_rate": "workload.arrivals.rate_per_s",
    "quantization": "model.weights",
}
"""Abbreviations and names of other tools -> the setting that means the same."""

_GPUS = (
    "set replicas=N or tensor_parallel_size=N (their product is the number of GPUs), or layout=auto "
    "layout.devices=N for the best layout of N GPUs"
)
_COPIES = (
    "set replicas=N for copies of the whole model, or attention_data_parallel_size=N for attention alone"
)
ADVICE = {
    "dp": _COPIES,
    "dp_size": _COPIES,
    "gpus": _GPUS,
    "num_gpus": _GPUS,
    "ngpus": _GPUS,
    "gpu": "set hardware=NAME; all: windtunnel list hardware",
    "workload.arrivals.rate_per_s": "these arrivals have no rate; scale them with load=2, or choose "
    "workload=poisson",
}
"""Names that are not settings, or not of every workload -> what to do."""

HARDWARE = {
    "a6000": "rtx_a6000",
    "6000_ada": "rtx_6000_ada",
    "rtx_6000ada": "rtx_6000_ada",
    "a800": "a800_sxm",
    "h20_96gb": "h20",
    "h20_3e": "h20_141gb",
    "gh200_96gb": "gh200",
    "dgx_spark": "gb10",
    "spark": "gb10",
    "910b": "ascend_910b",
    "910b2": "ascend_910b",
    "a100_80gb_pcie": "a100_pcie",
    "a100_sxm4_40gb": "a100_40gb_sxm",
    "a100_sxm4_80gb": "a100_80gb_sxm",
    "a800_sxm4_80gb": "a800_sxm",
    "b300_sxm6_ac": "b300_sxm",
    "gh200_144g_hbm3e": "gh200_144gb",
    "gh200_480gb": "gh200",  # of LPDDR; 96 GB of HBM
    "h100_80gb_hbm3": "h100_sxm",
    "h100_sxm5": "h100_sxm",
    "h100_sxm5_80gb": "h100_sxm",
    "rtx_6000_ada_generation": "rtx_6000_ada",
    "rtx_pro_6000_blackwell_server_edition": "rtx_pro_6000_server",
    "v100_sxm2_32gb": "v100_sxm",
}
"""Names of a device of which there is one kind, by people or nvidia-smi -> the choice of `hardware`."""

BY_MAKER = {"b200": "b200_sxm", "h200": "h200_sxm", "h800": "h800_sxm"}
"""What nvidia-smi calls the first kind of several, after the maker's name -> the choice of `hardware`."""
_MAKER = re.compile(r"(?:(?:NVIDIA|Tesla|GeForce|AMD|Instinct|Intel)[ _-]+)+", re.IGNORECASE)

_OLD_KEY = re.compile(
    rf"(?P<prefix>[+~]*)(?P<old>{'|'.join(NEW_NAMES)})(?=[./@=]|$)|(?P<alias>{'|'.join(ALIASES)})(?==|$)"
)
_MODEL = re.compile(
    r"(?P<key>\+{0,2}(?:model(?:@[\w.]+)?|pools\.\w+\.model))=(?P<quote>[\"']?)(?P<ids>[\w./,-]*[/.-][\w./,-]*)(?P=quote)"
)
"""Matches a choice of models of which one has a slash, a dash or a dot, as Hugging Face ids have."""


_DEVICE = re.compile(
    r"(?P<key>\+{0,2}(?:hardware|pools\.\w+\.hardware))=(?P<quote>[\"']?)(?P<names>[\w, -]+)(?P=quote)"
)
"""Matches a choice of devices."""


def with_new_names(overrides: Iterable[str], dirs: Sequence[Path] = (CONFIG_DIR,)) -> list[str]:
    """Replaces other names in the overrides by those that are used; prints one note per name on stderr.

    dirs: the config folders; their models may be named by their Hugging Face ids.
    """
    texts = list(overrides)
    named = [_with_new_name(text, dirs, texts) for text in texts]
    return [text for several in named for text in several]


def _with_new_name(text: str, dirs: Sequence[Path], beside: Sequence[str]) -> list[str]:
    if text.startswith("quantization=") and _is_of_the_model(text, dirs, beside):
        return []
    if match := _OLD_KEY.match(text):
        return [_replacement(match) + text[match.end() :]]
    if match := _MODEL.fullmatch(text):
        return _named_models(match["key"], match["ids"].split(","), dirs, beside)
    if match := _DEVICE.fullmatch(text):
        return [_named_devices(text, match["key"], match["names"].split(","), dirs)]
    return [text]


def _is_of_the_model(text: str, dirs: Sequence[Path], beside: Sequence[str]) -> bool:
    """Returns whether the id of the model says already how its weights are quantised, as -AWQ does.

    Raises ConfigError if it says otherwise.
    """
    from hwmodels.hf.asked import ENGINE_NAMES  # noqa: PLC0415 (few lines name a format)

    name = text.partition("=")[2].strip("'\"")
    for match in filter(None, map(_MODEL.fullmatch, beside)):
        found = None if match["key"] != "model" else model_named(match["ids"], dirs)
        if found is None or found.weights is None:
            continue
        meaning = ENGINE_NAMES.get(name)
        stored = None if meaning is None else meaning.weights or meaning.moe_weights
        if meaning is None or (stored is not None and stored[:3] != found.weights[:3]):
            raise ConfigError(
                f"quantization={name}: {match['ids']} is stored in {found.weights}; leave quantization out, "
                "or choose the model's checkpoint of 16 bits"
            )
        note(f"quantization={name} is how {match['ids']} is stored.")
        return True
    return False


def _named_devices(text: str, key: str, names: Sequence[str], dirs: Sequence[Path]) -> str:
    """Returns the override that chooses these devices; the text itself if all names are those of choices."""
    files = {file.stem for folder in dirs for file in (folder / "hardware").glob("*.yaml")}
    known = {_plain(name): name for name in sorted(files)}
    other = {_plain(name): choice for name, choice in HARDWARE.items()}
    found = []
    for name in names:
        own = _plain(_MAKER.sub("", name.strip(), count=1))
        by_maker = BY_MAKER.get(own) if own != _plain(name) else None
        choice = name if name in files else known.get(own) or other.get(own) or by_maker or name
        if choice != name:
            note(f"{key}={name} is read as {key}={choice}.")
        found.append(choice)
    return text if found == list(names) else f"{key}={','.join(found)}"


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _named_models(key: str, names: Sequence[str], dirs: Sequence[Path], beside: Sequence[str]) -> list[str]:
    """Returns the override that chooses these models, and one for the weights that an id names.

    Raises ConfigError for an id of quantised weights where the weights cannot be set for it alone.
    """
    choices, further = [], []
    for name in names:
        found = model_named(name, dirs)
        choices.append(name if found is None else found.choice)
        if found is None or found.choice == name:
            continue
        read = f"{key}={name} is read as {key}={found.choice}"
        if found.weights is not None and not any(text.startswith("model.weights=") for text in beside):
            if key != "model" or len(names) > 1:
                raise ConfigError(
                    f"{key}={name}: choose {found.choice} and set weights={found.weights} of it"
                )
            further = [f"model.weights={found.weights}"]
            read = f"{read} {further[0]}"
        note(f"{read}: {found.summary}.")
    return [f"{key}={','.join(choices)}", *further]


def _replacement(found: re.Match[str]) -> str:
    if alias := found["alias"]:
        note(f"{alias} is read as {ALIASES[alias]}.")
        return ALIASES[alias]
    old = found["old"]
    note(f"{old} is now called {NEW_NAMES[old]}; the old name is accepted for one more version.")
    return f"{found['prefix']}{NEW_NAMES[old]}"


@cache
def note(text: str) -> None:
    """Prints a note once per process."""
    print(f"windtunnel: {text}", file=sys.stderr)
