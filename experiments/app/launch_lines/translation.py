"""A command as settings of ours, and the parts of it that all engines share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from experiments.app.launch_lines.flags import Arguments, Engine
from experiments.app.launch_lines.shell import Command, read_text
from experiments.app.settings.bounded_yaml import parse_yaml, read_yaml
from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import find_groups
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.override import Override
from experiments.app.settings.renamed import model_named
from hwmodels.checks import is_whole
from hwmodels.hf.config import INNER, scaled_context
from hwmodels.model import ModelSpec
from sim.settings.build import build
from sim.settings.errors import ConfigError, suggest

DTYPES = {
    "half": "fp16",
    "float16": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}
KV_DTYPES = {
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
}
WEIGHTS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "ptpc_fp8": "fp8",
    "modelopt_fp8": "fp8",
    "w8a8_fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "fp8_per_channel": "fp8",
    "fp8_per_block": "fp8_block",
    "deepseek_v4_fp8": "fp8_block",
    "awq": "int4_wo",
    "auto_awq": "int4_wo",
    "awq_marlin": "int4_wo",
    "gptq": "int4_wo",
    "auto_gptq": "int4_wo",
    "gptq_marlin": "int4_wo",
    "modelopt_fp4": "nvfp4",
    "nvfp4_per_token": "nvfp4",
    "nvfp4_online": "nvfp4",
    "w8a8_int8": "int8",
    "int8_per_channel_weight_only": "int8_wo",
}
"""Value of --quantization -> model.weights, where the method has one format."""
EXPERT_WEIGHTS = {"mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4", "experts_int8": "int8_wo"}
"""Value of --quantization -> model.moe_weights, for methods that quantise experts only."""
AS_STORED = (
    "compressed-tensors",
    "modelopt",
    "modelopt_mixed",
    "quark",
    "torchao",
    "inc",
    "auto-round",
    "moe_wna16",
)
"""Methods whose format the checkpoint states."""
STATED = ("model.weights", "model.moe_weights", "++model.quantization_config")
"""Settings with which the checkpoint's name has stated its formats."""
EXPERTS = "auto cutlass* deep_gemm* deepgemm* flashinfer* trtllm* cutedsl* triton* aiter* mega_moe*"
OTHER_EXPERTS = "prices are those of the engine's fast kernels of experts"
"""Kernels of experts, as patterns, whose prices are those that are simulated; and what holds of others."""


@dataclass(kw_only=True, slots=True)
class Translation:
    """A command as settings of ours."""

    engine: Engine
    settings: dict[str, str] = field(default_factory=dict)
    """Group or setting -> value, as overrides have them."""
    without_effect: dict[str, str] = field(default_factory=dict)
    """Flags that change no time, or by a few percent at most, with the reason (empty: it is evident)."""
    refused: dict[str, str] = field(default_factory=dict)
    """Flags that change times in a way that is not modelled, with the reason."""
    ignored: list[str] = field(default_factory=list)
    """Flags that were left out as the user asked."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]

    def names(self, flag: str) -> bool:
        """Returns whether the flag is among those without effect, or refused."""
        return any(shown.split(" ")[0] == flag for shown in (*self.without_effect, *self.refused))

    def judge(self, flag: str, value: Any, patterns: str, reason: str) -> None:
        """Refuses a flag unless its value matches one of these patterns: it asks for what is priced then."""
        if any(fnmatchcase(str(value).lower(), pattern) for pattern in patterns.split()):
            self.without_effect[f"{flag} {value}"] = ""
        else:
            self.refused[f"{flag} {value}"] = reason

    def put(self, key: str, value: Any) -> None:
        """Sets a key; None: null."""
        shown = {None: "null", True: "true", False: "false"}
        self.settings[key] = shown[value] if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """A command with all that its translation reads."""

    command: Command
    found: Arguments
    dirs: Sequence[Path]
    beside: Sequence[str]
    """Overrides that are given beside the command."""
    ignored: Sequence[str] = ()
    """Flags, variables and keys that are left out of the command."""

    def get(self, flag: str, default: Any = None) -> Any:
        """Returns the value of a flag, or the default if it is not given."""
        return self.found.values.get(flag, default)

    def wrong(self, flag: str, reason: str) -> ConfigError:
        written, value = self.found.written.get(flag, flag), self.found.values.get(flag)
        return ConfigError(f"--from: {written}{'' if value is True else f' {value}'}: {reason}")

    def has_experts(self, settings: Mapping[str, str]) -> bool:
        """Returns whether the model is a mixture of experts."""
        model: ModelSpec = build(self.model_fields(settings), "model")
        return model.has_experts

    def has_towers(self, settings: Mapping[str, str]) -> bool:
        """Returns whether towers of the model may be left out."""
        return "language_model_only" in self.model_fields(settings)

    def model_fields(self, settings: Mapping[str, str]) -> Mapping[str, Any]:
        """Returns the settings of the group `model` that the command and its settings beside it mean."""
        own = [text for text in self.beside if Override.parse(text).root == "model"]
        chosen = [f"{key}={value}" for key, value in settings.items() if Override.parse(key).root == "model"]
        mine = {Override.parse(text).name for text in own}
        kept = [text for text in chosen if Override.parse(text).name not in mine]
        return _model_config((*kept, *own), tuple(self.dirs))


@lru_cache(maxsize=16)
def _model_config(overrides: tuple[str, ...], dirs: tuple[Path, ...]) -> Mapping[str, Any]:
    source = ConfigSource(config_name="simulate", dirs=dirs)
    return dict(resolved(composed(source, overrides))["model"])


def file_of(at: Context, flag: str, name: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file that a flag names. Raises ConfigError."""
    try:
        return yaml_of(at.command, name)
    except ValueError as error:
        raise at.wrong(flag, str(error)) from None


def yaml_of(command: Command, name: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file of a command: written beside it in the same text, or on disk.

    Raises ValueError that does not name the file.
    """
    files = command.files
    written = files.get(name, files.get(Path(name).name))
    if written is not None:
        try:
            content = parse_yaml(written, name)
        except (yaml.YAMLError, ValueError) as error:
            if unknown := re.search(r"\$\{[^}\n]*\}|\$\w+", written):
                raise ValueError(
                    f"{unknown[0]} has no value in the text, which is read and not executed; write the value "
                    "in its place"
                ) from None
            what = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise ValueError(f"is not valid YAML: {what}") from None
    else:
        path = next((p for p in (Path(name), command.folder / name) if p.exists()), None)
        if path is None:
            raise ValueError(f"no such file, here or in {command.folder.absolute()}")
        read_text(path)  # refuses what is not a file of moderate size
        content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ValueError("must be a mapping of settings")
    return dict(content)


def text_of(value: Any) -> str:
    """Returns a text as the value of an override, in quotation marks if it needs them."""
    text = str(value)
    return text if re.fullmatch(r"[\w./-]+", text) else "'" + text.replace("'", r"\'") + "'"


def set_formats(at: Context, own: Translation) -> None:
    """Sets the number formats."""
    dtype = at.get("--dtype")
    if dtype is not None and dtype != "auto":
        if dtype not in DTYPES:
            raise at.wrong("--dtype", f"must be auto, {', '.join(DTYPES)}")
        own.put("model.dtype", DTYPES[dtype])
    kv = at.get("--kv-cache-dtype")
    if kv is not None and kv != "auto":
        if kv not in KV_DTYPES:
            best = suggest(kv, KV_DTYPES)
            raise at.wrong("--kv-cache-dtype", f"this format of KV is not modelled; {best}")
        own.put("model.kv_cache_dtype", KV_DTYPES[kv])
    method = at.get("--quantization")
    if method is None or method in ("None", "none", "unquant"):
        return
    stated = any(key.startswith(STATED) for key in own.settings)
    if stated or method in AS_STORED:
        if not stated and own.settings.get("model") != "hf":
            raise at.wrong(
                "--quantization",
                "the checkpoint states its format, which this model's name does not; give model.weights "
                "beside --from, and leave --quantization out",
            )
        own.without_effect["--quantization"] = ""
    elif method in WEIGHTS:
        own.put("model.weights", WEIGHTS[method])
    elif method in EXPERT_WEIGHTS:
        own.put("model.moe_weights", EXPERT_WEIGHTS[method])
    else:
        known = (*WEIGHTS, *EXPERT_WEIGHTS, *AS_STORED)
        raise at.wrong("--quantization", f"this method is not modelled; {suggest(str(method), known)}")


def set_text_only(at: Context, own: Translation) -> None:
    """Leaves out the towers of a model that has some."""
    if at.has_towers(own.settings):
        own.put("model.language_model_only", value=True)


def set_copies(own: Translation, count: int) -> None:
    """Sets replicas that share no work, each of which gets the requests in turn by its load."""
    own.put("replicas", count)
    own.put("routing", "least_outstanding")


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns the mapping in a value or in its JSON; an empty one if there is none."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def set_limits(at: Context, own: Translation, limits: Mapping[str, str], ranks: int) -> None:
    """Sets limits that the engine has for each rank of data-parallel attention, and a replica for all."""
    for flag, key in limits.items():
        if (value := at.get(flag)) is not None:
            own.put(key, value * ranks)


def set_model_overrides(at: Context, own: Translation, flag: str, given: Any) -> None:
    """Sets what changes of a config.json mean: the context, and fields that the model's preset has.

    Angles of positions change no cost. Raises ConfigError for other fields.
    """
    try:
        changes = dict(json.loads(given) if isinstance(given, str) else given)
    except (ValueError, TypeError, RecursionError):
        raise at.wrong(flag, "must be a JSON object") from None
    for name in INNER:
        inner = changes.pop(name, {})
        changes |= inner if isinstance(inner, Mapping) else {name: inner}
    rope = {name: changes.pop(name, None) for name in ("rope_scaling", "rope_parameters")}
    changes.pop("rope_theta", None)
    stated = as_mapping(at.model_fields(own.settings).get("config"))
    length: Any = stated.get("max_position_embeddings")
    if is_whole(length) and "max_position_embeddings" not in changes:
        try:
            reached = scaled_context(length, rope)
        except ValueError as error:
            raise at.wrong(flag, str(error)) from None
        if reached != length:
            changes["max_position_embeddings"] = reached
    for name, value in changes.items():
        if name not in stated or not isinstance(value, int | float):
            raise at.wrong(
                flag,
                f"{name} may change the costs; write a config.json with it, and give model=hf "
                "model.path=FOLDER beside --from",
            )
        own.put(f"model.config.{name}", value)


def set_state_dtype(at: Context, own: Translation, flag: str, dtype: Any) -> None:
    """Sets the dtype of states of linear layers, where the model's config has a field for it."""
    if dtype in (None, "auto"):
        return
    model: ModelSpec = build(at.model_fields(own.settings), "model")
    if not model.state_bytes_per_sequence(1):
        own.without_effect[f"{flag} {dtype}"] = "the model has no linear layers"
        return
    for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        key = f"++model.config.{name}"
        try:
            build(at.model_fields({**own.settings, key: str(dtype)}), "model")
        except ConfigError:
            continue
        own.put(key, dtype)
        return
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    kept = {getattr(block.attention, "recurrent", block.attention) for block in model.blocks}
    stored = {layer.state_dtype for layer in kept if hasattr(layer, "state_dtype")}
    if stored == {names.get(dtype)}:
        own.without_effect[f"{flag} {dtype}"] = ""
    else:
        own.refused[f"{flag} {dtype}"] = "state of linear layers is counted in the checkpoint's own way"


def allow_longer(at: Context, own: Translation, length: Any) -> None:
    """Lets the context of a preset be as long as the command asks, where its environment allows that."""
    config = as_mapping(at.model_fields(own.settings).get("config"))
    key, context = "model.config.max_position_embeddings", config.get("max_position_embeddings")
    known = own.settings.get(key, context)
    if is_whole(length) and known is not None and context is not None and length > int(known):
        own.put(key, length)


def set_eplb(own: Translation, config: Any) -> None:
    """Sets the balancing of experts, with copies of popular ones."""
    own.put("engine.kernels.routing.placement", "eplb")
    copies = config.get("num_redundant_experts", 0) if isinstance(config, Mapping) else 0
    if copies:
        own.put("engine.kernels.routing.num_redundant_experts", copies)


def set_draft_model(at: Context, own: Translation, name: Any, flag: str) -> None:
    """Sets the model that drafts. Raises ConfigError for one without a preset."""
    found = model_named(str(name), at.dirs) if name else None
    if found is None:
        best = suggest(str(name).rpartition("/")[2], [c.name for c in find_groups(at.dirs)["model"]][:200])
        raise at.wrong(flag, f"the draft model {name} has no preset ({best.partition(';')[0]})")
    own.put("model@speculation.draft.model", found.choice)
    for setting in found.overrides("speculation.draft.model"):
        own.put(*setting.split("=", 1))
