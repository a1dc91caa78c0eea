"""The formats that a user asks for, on top of those of the checkpoint.

A format of weights (`WEIGHT_FORMATS`) is taken as it is, except where the checkpoint is already stored in it:
then its own one counts, with the modules that it leaves in 16 bits. An engine's name (`ENGINE_NAMES`) means
what the engine would do with the checkpoint; what it would refuse is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hwmodels.hf.engine_names import DESCRIBED, Meaning, meaning_of, nearest_to
from hwmodels.model.matrices import Role
from hwmodels.model.model_spec import ModelSpec
from hwmodels.model.quantization import kind_of, weight_format

IS_QUANTISED = "the checkpoint is quantised already"
"""Part of the message on a format that an engine would have to make from another one."""


def as_asked(model: ModelSpec, asked: Mapping[str, str], method: str | None, *, is_given: bool) -> ModelSpec:
    """Returns the model in the formats that the user asks for. Raises ValueError for what cannot be served.

    model: with the checkpoint's own formats. asked: setting -> format. method: the checkpoint's quantiser;
    None: it is not quantised. is_given: the checkpoint is the user's own; else it is a published model, of
    which checkpoints in other formats may exist.
    """
    if "weights" in asked:
        model = _with_weights(model, asked["weights"], method, is_given=is_given)
    if "moe_weights" in asked:
        blocks = tuple(block.without_formats(Role.routed) for block in model.blocks)
        model = replace(model, blocks=blocks, moe_weights=asked["moe_weights"])
    return replace(
        model,
        dtype=asked.get("dtype", model.dtype),
        kv_cache_dtype=asked.get("kv_cache_dtype", model.kv_cache_dtype),
    )


def _with_weights(model: ModelSpec, name: str, method: str | None, *, is_given: bool) -> ModelSpec:
    meaning, is_format = meaning_of(name), _is_format(name)
    own = {
        _base(stored) for stored in (model.weights, model.moe_weights) if stored not in (None, model.dtype)
    }
    if is_format:
        if _base(name) in own:
            return model
        if is_given and own and meaning is not None and meaning.is_online:
            raise ValueError(_mismatch(name, method, own))
        blocks = tuple(block.without_formats(Role.dense) for block in model.blocks)
        return replace(model, blocks=blocks, weights=name)
    if meaning is None:
        try:
            weight_format(name)
        except ValueError as error:
            raise ValueError(f"{error}{nearest_to(name)}") from None
        return model
    stored = meaning.weights or meaning.moe_weights
    if method in meaning.methods or (stored is not None and _base(stored) in own):
        return model
    return _as_an_engine_would(model, name, meaning, method, own, is_given=is_given)


def _as_an_engine_would(
    model: ModelSpec, name: str, meaning: Meaning, method: str | None, own: set[str], *, is_given: bool
) -> ModelSpec:
    """Returns the model whose checkpoint is quantised online, or replaced by one that is quantised so."""
    if method is not None and is_given:
        raise ValueError(_mismatch(name, method, own))
    stored = meaning.weights or meaning.moe_weights
    if stored is None:
        raise ValueError(
            f"weights={name}: does not say the format, which a checkpoint does; give the folder of one "
            f"(model=hf model.path=FOLDER), or a format: {', '.join(DESCRIBED)}"
        )
    if method is None and not meaning.is_online and is_given:
        raise ValueError(
            f"weights={name}: the checkpoint is not quantised, and engines load {name} from one that is; "
            f"set weights={stored} to price such a checkpoint, or fp8, which engines make of 16 bits"
        )
    if meaning.weights is None and not model.has_experts:
        raise ValueError(f"weights={name}: quantises experts alone, and {model.name} has none; nearest: fp8")
    replaced = model.with_weights(meaning.weights, meaning.moe_weights if model.has_experts else None)
    if meaning.is_online and method is None:
        return replaced
    note = f"weights in {stored}: those of a checkpoint of {model.name} that is quantised for {name}"
    return replace(replaced, notes=(*replaced.notes, note))


def _mismatch(name: str, method: str | None, own: set[str]) -> str:
    stored = f" in {' and '.join(sorted(own))}" if own else ""
    return (
        f"weights={name}: {IS_QUANTISED}, by {method}{stored}, and engines do not quantise it again; "
        "leave it out (null), or read the checkpoint of 16 bits"
    )


def _is_format(name: str) -> bool:
    try:
        weight_format(name)
    except ValueError:
        return False
    return True


def _base(name: str | None) -> str:
    """Returns the kind of a format, whatever its groups and blocks: int4_wo_g32 is int4_wo."""
    kind = kind_of(name or "")
    return "fp8" if kind == "fp8_block" else kind
