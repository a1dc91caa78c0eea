"""The model of a server with the real engine: a checkpoint, or random weights of a choice of `model`.

The scenario describes the same model by its sizes, so that the run can be simulated as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.calibrate.engine.served import MODEL_TYPES, architecture_of
from hwmodels.hf.config import read_hf_config
from realengine.model.architecture import Architecture
from realengine.serving.model import Model
from realengine.serving.tokenizer import Tokenizer, byte_tokenizer

SMOLLM2 = "smollm2"
CHECKPOINT_TARGET = "hwmodels.hf.config.from_hf_fields"
CHOSEN = ("dtype", "weights", "moe_weights", "kv_cache_dtype", "transform")
"""Settings of `model` that a checkpoint keeps from the command line."""
DEFAULT_DTYPES = {"cpu": "fp32", "cuda": "bf16"}
"""Data type of dtype=auto by device, that of the engine."""


class ModelToServe(NamedTuple):
    """The engine's model, its name in the API, and the node `model` of the scenario that describes it."""

    name: str
    model: Model
    node: dict[str, Any]


def model_to_serve(
    checkpoint: str | None, node: Mapping[str, Any], device: str, tokenizer: Path | None
) -> ModelToServe:
    """Returns the model that is served.

    checkpoint: smollm2, a GGUF file or a folder in Hugging Face's format; None: random weights with the sizes
    of the node. tokenizer: instead of the checkpoint's own; random weights without one get a token per byte.
    Raises ValueError, OSError or ImportError if it cannot be read.
    """
    own = None if tokenizer is None else Tokenizer.from_path(tokenizer)
    if checkpoint is None:
        architecture = architecture_of(node)
        own = own or byte_tokenizer(architecture.vocab_size, architecture.eos_token_ids)
        served = ModelToServe(str(node.get("name", "model")), Model(architecture, None, own), dict(node))
    else:
        if checkpoint != SMOLLM2 and not Path(checkpoint).exists():
            raise ValueError(
                f"serve.engine.model={checkpoint}: no such file or folder; give smollm2, a GGUF file or a "
                "folder in Hugging Face's format"
            )
        model = Model.of(checkpoint)
        model = model if own is None else Model(model.architecture, model.source, own)
        if model.tokenizer is None:
            raise ValueError(
                f"serve.engine.model={checkpoint}: has no tokenizer.json, which the API needs; give "
                "serve.tokenizer, the path of one"
            )
        served = ModelToServe(_name(checkpoint), model, _described(checkpoint, model, node))
    if served.node.get("dtype", "auto") == "auto":
        served.node["dtype"] = DEFAULT_DTYPES[device]
    return served


def _name(checkpoint: str) -> str:
    path = Path(checkpoint)
    return path.stem if path.suffix == ".gguf" else path.resolve().name if path.exists() else checkpoint


def _described(checkpoint: str, model: Model, node: Mapping[str, Any]) -> dict[str, Any]:
    assert model.source is not None
    is_gguf = model.source.suffix == ".gguf"
    config = hf_fields(model.architecture) if is_gguf else read_hf_config(model.source)[1]
    return {
        "_target_": CHECKPOINT_TARGET,
        "name": _name(checkpoint),
        "source": checkpoint,
        **{key: node[key] for key in CHOSEN if key in node},
        "config": json.loads(json.dumps(config)),
    }


def hf_fields(architecture: Architecture) -> dict[str, Any]:
    """Returns the fields of a config.json that describe the sizes of an architecture."""
    names = {model_type: name for name, model_type in MODEL_TYPES.items()}
    fields: dict[str, Any] = {
        "architectures": [names[architecture.model_type]],
        "model_type": architecture.model_type,
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "intermediate_size": architecture.intermediate_size,
        "max_position_embeddings": architecture.max_position_embeddings,
        "rms_norm_eps": architecture.rms_norm_eps,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }
    if architecture.model_type == "mistral":
        fields["sliding_window"] = architecture.sliding_window
    if architecture.num_experts:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
            fields[name] = getattr(architecture, name)
    return fields
