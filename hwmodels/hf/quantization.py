"""The storage format of each matrix of a checkpoint, by its quantiser's description.

The description is the quantization_config of the config.json or, without one, a file beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.hf.fields import load_json_object, wrong
from hwmodels.hf.modules import HEAD, Names, names_in
from hwmodels.hf.quantizers import NOT_PRICED, READERS, Description, Plan, kv_cache, method_of
from hwmodels.model.model_spec import Block
from hwmodels.model.weights import Role, weight_format

WHERE = "quantization_config"
KEYS = (WHERE, "compression_config")
"""Keys of a config.json under which a quantiser describes the checkpoint."""

MODELOPT_FILE = "hf_quant_config.json"
LAYERS_FILE = "quant_cfg.json"
"""File of TensorRT-LLM beside it, which names the format of each layer of a mixed checkpoint."""
FILES = {
    MODELOPT_FILE: "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": None,
}
"""Files beside a config.json that describe the checkpoint, and the quantiser whose name they leave out."""

EXPERTS_BESIDE_MLP = "Gemma4"
"""Start of the architectures whose layers have experts beside a dense MLP."""


class StoredWeights(NamedTuple):
    """Storage formats of a checkpoint's matrices, and of its model's keys and values.

    `weights` None: not quantised. `moe_weights` None: as `weights`.
    """

    weights: str | None = None
    moe_weights: str | None = None
    lm_head_weights: str | None = None
    kv_cache_dtype: str = "auto"
    """dtype of keys and values; auto: the dtype that the model computes in."""
    formats: tuple[tuple[tuple[str, str], ...], ...] = ()
    """For each layer: the matrices that are stored otherwise, and their formats; empty: none is."""
    notes: tuple[str, ...] = ()


def description_of(config: Mapping[str, Any], folder: Path | None = None) -> Description | None:
    """Returns what the checkpoint says of its formats; None if it says nothing. Raises ValueError.

    folder: that of the config.json, in which other files may describe the formats; None: there is none.
    """
    experts_dtype = config.get("expert_dtype")
    for key in KEYS:
        if given := config.get(key):
            if not isinstance(given, Mapping):
                raise wrong(key, given, "must be an object with a quant_method")
            return Description(key, given, experts_dtype if isinstance(experts_dtype, str) else None)
    for name in FILES if folder is not None else ():
        if folder is not None and (folder / name).exists():
            fields = load_json_object(folder / name)
            if name == MODELOPT_FILE and (folder / LAYERS_FILE).exists():
                fields = with_layers(fields, load_json_object(folder / LAYERS_FILE))
            method = method_of(fields) or FILES[name]
            return Description(name, {**fields, "quant_method": method})
    return None


def with_layers(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Model Optimizer's fields with the `quantized_layers` of another file, if they have none."""
    inside = fields.get("quantization")
    if "quantized_layers" not in more or not isinstance(inside, Mapping):
        return dict(fields)
    return {**fields, "quantization": {"quantized_layers": more["quantized_layers"], **inside}}


def stored_weights(
    description: Description | None,
    layers: Sequence[Block],
    *,
    dtype: str,
    folder: Path | None = None,
    asked: Mapping[str, str] | None = None,
    experts_beside_mlp: bool = False,
) -> StoredWeights:
    """Returns the formats of all matrices by the description; None means that they are not quantised.

    layers: one block for each layer. dtype: that of matrices which are not quantised. asked: formats that the
    user sets; with `weights` and `kv_cache_dtype` among them nothing has to be understood.
    experts_beside_mlp: see `modules.names_in`. Raises ValueError for what names a format and is not known.
    """
    if description is None:
        return StoredWeights()
    asked = asked or {}
    notes = list[str]()
    is_file = description.where in FILES
    try:
        plan = plan_of(description)
        names = names_in(json.dumps(dict(description.fields)), experts_beside_mlp=experts_beside_mlp)
        stored = of_layers(plan, layers, names, dtype, description.where)
        notes += plan.notes
    except ValueError as error:
        if "weights" not in asked:
            raise
        notes.append(f"weights are stored as model.weights says; the checkpoint's are not known: {error}")
        stored = StoredWeights()
    if "kv_cache_dtype" not in asked:
        kv, kv_notes = keys_and_values(description, folder)
        stored, notes = stored._replace(kv_cache_dtype=kv), [*notes, *kv_notes]
    if is_file:
        notes.append(f"number formats are those of {description.where.removesuffix(': ')}")
    return stored._replace(notes=tuple(notes))


def plan_of(description: Description) -> Plan:
    """Returns the formats by module. Raises ValueError for a quantiser that is not known."""
    method = method_of(description.fields)
    if method is not None and method in NOT_PRICED:
        raise description.wrong(
            "quant_method",
            f"cannot be priced, since {NOT_PRICED[method]}; set model.weights to price another format",
        )
    if method is None or method not in READERS:
        raise description.wrong("quant_method", f"cannot be priced; known: {', '.join(READERS)}")
    return READERS[method](description)


def keys_and_values(description: Description, folder: Path | None) -> tuple[str, tuple[str, ...]]:
    """Returns kv_cache_dtype; where the config.json does not name it, hf_quant_config.json may."""
    kv = kv_cache(description)
    if kv != "auto" or description.where not in KEYS or folder is None:
        return kv, ()
    file = folder / MODELOPT_FILE
    if not file.exists() or {"kv_cache_quant_algo", "kv_cache_scheme"} & description.fields.keys():
        return kv, ()
    kv = kv_cache(Description(MODELOPT_FILE, load_json_object(file)))
    if kv == "auto":
        return kv, ()
    return kv, (
        f"keys and values in {kv} as {MODELOPT_FILE} says, which TensorRT-LLM reads; vLLM reads config.json "
        "alone: kv_cache_dtype=auto keeps them in the model's dtype there",
    )


def of_layers(plan: Plan, layers: Sequence[Block], names: Names, dtype: str, where: str) -> StoredWeights:
    """Returns the formats of the layers' matrices: the commonest of each role, and what differs from it."""
    found = [dict(formats_of(plan, layer, number, names)) for number, layer in enumerate(layers)]
    sizes: dict[Role, Counter[str | None]] = {Role.dense: Counter(), Role.routed: Counter()}
    for layer, own in zip(layers, found, strict=True):
        for matrix in layer.layer_matrices(1 << 10):
            if matrix.role is not Role.plain:
                sizes[matrix.role][own[matrix.name]] += matrix.elements
    head = head_format(plan)
    quantised = head is not None or any(name for own in found for name in own.values())
    if not quantised and (plan.others is not None or any(rule.stored is not None for rule in plan.rules)):
        raise ValueError(
            f"{where}: the formats that it names are of no matrix of this model, or of none that is not left "
            "out; set model.weights"
        )
    commonest = {role: max(of, key=lambda name: of[name], default=None) for role, of in sizes.items()}
    dense, routed = commonest[Role.dense], commonest[Role.routed]
    if not sizes[Role.routed] or routed == dense:
        routed = None
    elif routed is None:
        routed = dtype
    of_role = {Role.dense: dense or dtype, Role.routed: routed or dense or dtype}
    formats = tuple(
        tuple(
            (matrix.name, own[matrix.name] or dtype)
            for matrix in layer.layer_matrices(1 << 10)
            if matrix.role is not Role.plain and (own[matrix.name] or dtype) != of_role[matrix.role]
        )
        for layer, own in zip(layers, found, strict=True)
    )
    return StoredWeights(dense, routed, head, formats=formats if any(formats) else ())


def formats_of(plan: Plan, layer: Block, number: int, names: Names) -> Iterator[tuple[str, str | None]]:
    """Yields each matrix of a layer and its format; of matrices that are joined, the widest format counts."""
    for matrix in layer.layer_matrices(1 << 10):
        if matrix.role is not Role.plain:
            formats = [format_of(plan, part) for part in names.parts(number, matrix.name)]
            yield matrix.name, max(formats, key=bits_of)


def bits_of(name: str | None) -> float:
    """Returns the bytes per weight of a format; those of matrices that are not quantised are the largest."""
    return float("inf") if name is None else weight_format(name).bytes_per_weight


def format_of(plan: Plan, module: Sequence[str]) -> str | None:
    """Returns the format of a module under all its names; None: it is not quantised."""
    for rule in plan.rules:
        if rule.modules.match(module):
            return rule.stored
    return plan.others


def head_format(plan: Plan) -> str | None:
    """Returns the format of the LM head: only what names it quantises it."""
    return next((rule.stored for rule in plan.rules if rule.modules.match(HEAD)), None)
