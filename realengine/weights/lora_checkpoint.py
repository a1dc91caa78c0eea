"""LoRA adapters in PEFT's layout, checked against the model.

A folder holds adapter_config.json and adapter_model.safetensors. For a linear layer W [N, K] of the model:

    base_model.model.{layer}.lora_A.weight [R, K]      W + scaling * B @ A,  scaling = lora_alpha / r,
    base_model.model.{layer}.lora_B.weight [N, R]      or lora_alpha / sqrt(r) with use_rslora

An option of PEFT that changes the outputs and is not computed here is rejected, never ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwmodels.checks import check_whole, is_finite, is_whole
from hwmodels.hf.fields import Fields, load_json_object, wrong
from kernels.lora import MAX_RANK
from realengine.model.architecture import Architecture
from realengine.model.lora_adapter import (
    PREFIX,
    Adapter,
    LowRank,
    check_shapes,
    keys_of,
    kinds,
    layer_of,
    linear_layers,
    unsupported_layer_message,
)
from realengine.weights.safetensors import SafetensorsCheckpoint

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
OUTSIDE = ("model.embed_tokens", "lm_head")
# Initialisations that leave the base model unchanged; others replace W by W - B @ A, or by a rounded W.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Options of training, names, and values of other options: they do not change a finished adapter.
IRRELEVANT = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
)
REFUSED = {
    "use_dora": "DoRA is not supported; supported: plain LoRA",
    "modules_to_save": "trained copies of whole modules are not served; supported: low-rank pairs only",
    "lora_bias": "biases are not adapted",
    "fan_in_fan_out": "the base model's weights are [out, in]",
    "trainable_token_indices": "embeddings are not adapted",
    "target_parameters": "the weights of experts are not adapted; supported: linear layers by target_modules",
    "layer_replication": "the base model's layers are used once each",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt are not supported",
}
SHOWN = 3  # names in one error


def read_adapter(path: Path | str, architecture: Architecture) -> Adapter:
    """Reads the adapter in a folder, in its stored dtype.

    Raises ValueError with file and field or tensor for missing, truncated, misshapen, non-finite and unknown
    tensors, for an adapter of another base model, for ranks above the kernels' 64, and for anything but plain
    LoRA on linear layers of attention and dense MLPs.
    """
    folder = Path(path)
    file, tensors = folder / CONFIG, folder / TENSORS
    if not file.is_file():
        raise ValueError(f"{folder}: has no {CONFIG}; an adapter is a folder with {CONFIG} and {TENSORS}")
    config = load_json_object(file)
    try:
        settings = _settings(Fields(config))
        wanted = settings.layers_of(architecture)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    checkpoint = SafetensorsCheckpoint(tensors)
    parts, shapes = linear_layers(architecture), checkpoint.shapes
    try:
        _check_names(wanted, shapes, architecture)
        for name in wanted:
            a_shape, b_shape = (shapes[key] for key in keys_of(name))
            check_shapes(name, a_shape, b_shape, settings.rank_of(name), parts[name])
    except ValueError as error:
        base = config.get("base_model_name_or_path")
        made_for = f" (the adapter was made for {base})" if base else ""
        raise ValueError(f"{tensors}: {error}{made_for}") from None
    return Adapter(
        scaling=settings.scaling(settings.rank, settings.alpha),
        layers={name: settings.pair(name, checkpoint) for name in wanted},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """The fields of an adapter_config.json."""

    rank: int
    alpha: float
    use_rslora: bool
    targets: str | tuple[str, ...]
    """Adapted layers: a regular expression for full matches, ends of names, or "all-linear"."""
    excluded: str | tuple[str, ...]
    only_layers: tuple[int, ...] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def scaling(self, rank: int, alpha: float) -> float:
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def layers_of(self, architecture: Architecture) -> list[str]:
        """Returns the linear layers that have a pair. Raises ValueError if a target is none of them."""
        names = list(linear_layers(architecture))
        if self.targets == "all-linear":
            return [name for name in names if not _matches(self.excluded, name)]
        for name in OUTSIDE:
            if _matches(self.targets, name) and not _matches(self.excluded, name):
                raise ValueError(f"target_modules: {name}: embeddings and the output head are not adapted")
        each = [self.targets] if isinstance(self.targets, str) else [(target,) for target in self.targets]
        for target in each:
            if not any(_matches(target, name) for name in names):
                shown = target if isinstance(target, str) else target[0]
                raise ValueError(
                    f"target_modules={shown}: matches no linear layer of attention or a dense MLP "
                    "of this model with "
                    f"{architecture.num_layers} layers; its linear layers are {kinds(names)}"
                )
        found = [name for name in names if self._is_target(name)]
        if not found:
            raise ValueError("target_modules: exclude_modules and layers_to_transform exclude all of them")
        return found

    def _is_target(self, name: str) -> bool:
        if _matches(self.excluded, name) or not _matches(self.targets, name):
            return False
        whole = isinstance(self.targets, str) or name in self.targets
        return whole or self.only_layers is None or layer_of(name) in self.only_layers

    def rank_of(self, name: str) -> int:
        """Returns the rank of a layer. Raises ValueError if it is above the kernels' limit."""
        rank = self.rank_pattern.get(_pattern(self.rank_pattern, name), self.rank)
        if rank > MAX_RANK:
            raise ValueError(f"{name}: rank {rank}: must be <= {MAX_RANK}, the kernels' limit")
        return rank

    def pair(self, name: str, checkpoint: SafetensorsCheckpoint) -> LowRank:
        """Reads the low-rank pair of a layer; B is rescaled if the layer has a scaling of its own."""
        read = []
        for key in keys_of(name):
            tensor = checkpoint.read(key, (slice(None), slice(None)))
            if not tensor.isfinite().all():
                raise ValueError(f"{checkpoint.where(key)}: {key}: contains infinite numbers or NaN")
            read.append(tensor)
        a_RK, b_NR = read
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, name), self.alpha)
        own, common = self.scaling(self.rank_of(name), alpha), self.scaling(self.rank, self.alpha)
        return LowRank(a_RK, b_NR if own == common else b_NR.float() * (own / common))


def _settings(fields: Fields) -> _Settings:
    if fields.value("peft_type") != "LORA":
        raise wrong("peft_type", fields.value("peft_type"), "must be LORA")
    _check_options(fields)
    only_layers = fields.value("layers_to_transform")
    if is_whole(only_layers):
        only_layers = [only_layers]
    if only_layers is not None and not (isinstance(only_layers, list) and all(map(is_whole, only_layers))):
        raise wrong("layers_to_transform", only_layers, "must be a whole number or a list of them")
    if fields.value("layers_pattern") and "layers" not in _list_of(fields.value("layers_pattern")):
        raise wrong("layers_pattern", fields.value("layers_pattern"), "the model's list is called layers")
    settings = _Settings(
        rank=fields.whole("r"),
        alpha=_positive("lora_alpha", fields.value("lora_alpha")),
        use_rslora=fields.flag("use_rslora", default=False),
        targets=_modules(fields, "target_modules", needed=True),
        excluded=_modules(fields, "exclude_modules", needed=False),
        only_layers=tuple(only_layers) if only_layers else None,
        rank_pattern=_patterns(fields, "rank_pattern", whole=True),
        alpha_pattern=_patterns(fields, "alpha_pattern", whole=False),
    )
    for name in sorted(fields.config.keys() - fields.names_read - set(IRRELEVANT)):
        if fields.config[name]:
            raise wrong(name, fields.config[name], "unknown option, so outputs could be wrong")
    return settings


def _check_options(fields: Fields) -> None:
    if fields.value("bias") not in (None, "none"):
        raise wrong("bias", fields.value("bias"), "biases are not adapted; must be none")
    for name, rule in REFUSED.items():
        if fields.value(name):
            raise wrong(name, fields.value(name), rule)
    start = fields.value("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise wrong(
            "init_lora_weights",
            start,
            "belongs to a base model with changed weights; convert the adapter to plain LoRA with PEFT",
        )


def _modules(fields: Fields, name: str, *, needed: bool) -> str | tuple[str, ...]:
    """Returns a field that is a regular expression, or names."""
    value = fields.value(name)
    if isinstance(value, str) and value:
        if value.lower() == "all-linear" and needed:
            return "all-linear"
        _check_pattern(name, value)
        return value
    if not value and not needed:
        return ()
    if not (isinstance(value, list) and value and all(isinstance(item, str) and item for item in value)):
        raise wrong(name, value, "must be a list of names, or a regular expression")
    return tuple(sorted(value))


def _patterns(fields: Fields, name: str, *, whole: bool) -> dict[str, Any]:
    """Returns a field of numbers by regular expression."""
    given = fields.value(name) or {}
    if not isinstance(given, Mapping):
        raise wrong(name, given, "must be an object of numbers by pattern")
    for pattern, number in given.items():
        _check_pattern(name, pattern)
        if whole:
            check_whole(f"{name}.{pattern}", number)
        else:
            _positive(f"{name}.{pattern}", number)
    return dict(given)


def _positive(name: str, value: Any) -> float:
    if not is_finite(value) or value <= 0:
        raise wrong(name, value, "must be a number > 0")
    return float(value)


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise wrong(name, pattern, f"not a regular expression: {error}") from None


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _matches(targets: str | tuple[str, ...], name: str) -> bool:
    """Tests PEFT's rule: a regular expression matches the whole name, a list's item the name or its end."""
    if isinstance(targets, str):
        return bool(targets) and re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _pattern(patterns: Mapping[str, Any], name: str) -> str:
    """Finds the first pattern that matches the name or its end after a dot, PEFT's rule; else the name."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), name)


def _check_names(
    wanted: Sequence[str], shapes: Mapping[str, tuple[int, ...]], architecture: Architecture
) -> None:
    """Raises ValueError for tensors that are no pair of this model, and for layers without a pair."""
    layers = linear_layers(architecture)
    keys = [key for name in wanted for key in keys_of(name)]
    for key in sorted(shapes.keys() - set(keys)):
        name = re.sub(r"\.lora_[AB]\.weight$", "", key.removeprefix(PREFIX))
        if name in layers:
            raise ValueError(f"{key}: not among the target_modules of {CONFIG}")
        raise ValueError(f"{key}: {unsupported_layer_message(name, architecture)}")
    if missing := [key for key in keys if key not in shapes]:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise ValueError(
            f"missing: {', '.join(missing[:SHOWN])}{more}; check that the adapter was made for "
            "this base model"
        )
