"""Layers that draft from hidden states: EAGLE, EAGLE-3 and modules for multi-token prediction.

eagle    fc, layers.0.* without an input norm, embed_tokens if it is not the target's
eagle3   fc over several hidden states, midlayer.* or layers.0.* with a norm for each half of its input, norm,
lm_head and d2t (draft token i is token i + d2t[i] of the target), embed_tokens if it is not the target's
mtp      mtp.* (Qwen3-Next) or model.layers.{n}.* behind the target's n layers (DeepSeek), with attention of
q_proj, k_proj, v_proj; embeddings, and the head if the checkpoint has none, are the target's
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from realengine.model.architecture import Architecture
from realengine.speculation.checkpoints.configs import Eagle3Options, draft_config, eagle3_options
from realengine.speculation.checkpoints.source import read_weights, whole
from realengine.speculation.drafter import DrafterContext
from realengine.speculation.settings import DraftSource
from realengine.weights.safetensors import SafetensorsCheckpoint
from realengine.weights.table import HUGGING_FACE, expected
from realengine.weights.weight import Weight

EMBEDDING = "embed_tokens.weight"
D2T, T2D = "d2t", "t2d"


class LayerWeights(NamedTuple):
    """The weights of a draft by their own names; architecture: that of its layers."""

    architecture: Architecture
    tensors: dict[str, torch.Tensor]
    token_offsets: torch.Tensor | None = None
    """EAGLE-3: what to add to a draft token to get the target's, int64; None: nothing."""
    options: Eagle3Options | None = None
    """EAGLE-3: the options of its config.json."""


def load_eagle(source: DraftSource, context: DrafterContext) -> LayerWeights:
    """Loads an EAGLE layer. Raises ValueError if it does not fit the target."""
    architecture = _architecture(source, context, 1)

    def table(checkpoint: SafetensorsCheckpoint | None) -> list[Weight]:
        names = {key: name.removeprefix("model.") for key, name in HUGGING_FACE.items()}
        stored = _stored(checkpoint)
        hidden = architecture.hidden_size
        weights = list(_layers(architecture, names, stored, has_input_norm=False))
        weights.append(whole("fc.weight", "fc.weight", (hidden, 2 * hidden)))
        if "fc.bias" in stored:
            weights.append(whole("fc.bias", "fc.bias", (hidden,)))
        return weights + _embedding(architecture, stored, context)

    tensors, _ = read_weights(source, context, table)
    return LayerWeights(architecture, tensors)


def load_eagle3(source: DraftSource, context: DrafterContext) -> LayerWeights:
    """Loads an EAGLE-3 layer. Raises ValueError if it does not fit the target."""
    architecture = _architecture(source, context, 1)
    options = eagle3_options(source, context.architecture.num_layers)
    vocab = context.architecture.vocab_size
    if isinstance(source, Architecture):
        vocab = source.vocab_size
    sizes = {"vocab": vocab}

    def table(checkpoint: SafetensorsCheckpoint | None) -> list[Weight]:
        stored, hidden = _stored(checkpoint), architecture.hidden_size
        layer = "layers.0" if "layers.0.hidden_norm.weight" in stored else "midlayer"
        names = {key: name.replace("model.layers.{i}", layer) for key, name in HUGGING_FACE.items()}
        if checkpoint is not None and "lm_head.weight" in stored:
            sizes["vocab"] = checkpoint.shapes["lm_head.weight"][0]
        weights = [_widened(each) for each in _layers(architecture, names, stored)]
        weights.append(whole("layers.0.hidden_norm.weight", f"{layer}.hidden_norm.weight", (hidden,)))
        width = len(options.taps) * context.architecture.hidden_size
        weights.append(whole("fc.weight", "fc.weight", (hidden, width)))
        weights.append(whole("norm.weight", "norm.weight", (hidden,)))
        weights.append(whole("head.weight", "lm_head.weight", (sizes["vocab"], hidden)))
        return weights + _embedding(architecture, stored, context)

    tensors, checkpoint = read_weights(source, context, table, is_ours=lambda name: name not in (D2T, T2D))
    offsets = _token_offsets(source, checkpoint, sizes["vocab"], context)
    return LayerWeights(architecture, tensors, offsets, options)


def load_mtp(source: DraftSource, context: DrafterContext, num_modules: int) -> LayerWeights:
    """Loads modules for multi-token prediction. Raises ValueError if they do not fit the target."""
    architecture = _architecture(source, context, num_modules)
    first = context.architecture.num_layers
    prefixes = tuple(f"model.layers.{first + number}." for number in range(num_modules))

    def table(checkpoint: SafetensorsCheckpoint | None) -> list[Weight]:
        stored, hidden = _stored(checkpoint), architecture.hidden_size
        if any(name.startswith("mtp.") for name in stored):
            names = {key: name.replace("model.", "mtp.") for key, name in HUGGING_FACE.items()}
            weights = list(_layers(architecture, names, stored))
            for number in range(num_modules):
                weights += [
                    whole(f"{number}.enorm.weight", "mtp.pre_fc_norm_embedding.weight", (hidden,)),
                    whole(f"{number}.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", (hidden,)),
                    whole(f"{number}.proj.weight", "mtp.fc.weight", (hidden, 2 * hidden)),
                    whole(f"{number}.norm.weight", "mtp.norm.weight", (hidden,)),
                ]
            return weights
        if checkpoint is not None and f"{prefixes[0]}eh_proj.weight" not in stored:
            raise ValueError(
                f"{checkpoint.path}: has no modules for multi-token prediction, neither mtp.* nor "
                f"{prefixes[0]}*; set model to their folder, or choose another method"
            )
        weights = []
        for number, prefix in enumerate(prefixes):
            names = {key: name.replace("model.layers.{i}.", prefix) for key, name in HUGGING_FACE.items()}
            own = _layers(replace(architecture, num_layers=1), names, stored)
            weights += [
                replace(each, name=each.name.replace("layers.0.", f"layers.{number}.")) for each in own
            ]
            weights += [
                whole(f"{number}.enorm.weight", f"{prefix}enorm.weight", (hidden,)),
                whole(f"{number}.hnorm.weight", f"{prefix}hnorm.weight", (hidden,)),
                whole(f"{number}.proj.weight", f"{prefix}eh_proj.weight", (hidden, 2 * hidden)),
                whole(f"{number}.norm.weight", f"{prefix}shared_head.norm.weight", (hidden,)),
            ]
        return weights

    def is_ours(name: str) -> bool:
        shared = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        return name.startswith(("mtp.", *prefixes)) and not shared

    tensors, _ = read_weights(source, context, table, is_ours=is_ours)
    return LayerWeights(architecture, tensors)


def _architecture(source: DraftSource, context: DrafterContext, num_layers: int) -> Architecture:
    """Returns the architecture of a draft's layers. Raises ValueError if its sizes are not the target's."""
    target = context.architecture
    if isinstance(source, Architecture):
        own = source
    else:
        config = draft_config(source)
        own = target if config is None else Architecture.from_hf(config)
    where = "the architecture" if isinstance(source, Architecture) else source
    if own.hidden_size != target.hidden_size:
        raise ValueError(
            f"speculative_config: model={where}: hidden_size={own.hidden_size}: must be "
            f"{target.hidden_size}, the target's, whose hidden states it reads"
        )
    if own.max_position_embeddings < context.max_model_len:
        own = replace(own, max_position_embeddings=context.max_model_len)
    return replace(own, num_layers=num_layers, num_experts=0, tie_word_embeddings=True)


def _stored(checkpoint: SafetensorsCheckpoint | None) -> Mapping[str, tuple[int, ...]]:
    return {} if checkpoint is None else checkpoint.shapes


def _layers(
    architecture: Architecture,
    names: Mapping[str, str],
    stored: Mapping[str, tuple[int, ...]],
    *,
    has_input_norm: bool = True,
) -> Iterator[Weight]:
    """Yields the weights of the layers; an input norm that the layout lacks only if the checkpoint has it."""
    for weight in expected(architecture, names):
        is_input_norm = weight.name.endswith("attention_norm.weight")
        if weight.name.startswith("layers.") and (
            has_input_norm or not is_input_norm or weight.parts[0].name in stored
        ):
            yield weight


def _widened(weight: Weight) -> Weight:
    """Returns the projection of an attention that reads two hidden states side by side; others unchanged."""
    if not weight.name.endswith("qkv.weight"):
        return weight
    rows, width = weight.shape
    both = slice(0, 2 * width)
    parts = tuple(
        replace(part, shape=(part.shape[0], 2 * width), into=(part.into[0], both), take=(part.take[0], both))
        for part in weight.parts
    )
    return replace(weight, shape=(rows, 2 * width), parts=parts)


def _embedding(architecture: Architecture, stored: Iterable[str], context: DrafterContext) -> list[Weight]:
    if EMBEDDING not in stored:
        return []
    shape = (context.architecture.vocab_size, architecture.hidden_size)
    return [whole("embedding.weight", EMBEDDING, shape)]


def _token_offsets(
    source: DraftSource, checkpoint: SafetensorsCheckpoint | None, vocab: int, context: DrafterContext
) -> torch.Tensor | None:
    """Reads the map from draft tokens to the target's. Raises ValueError if it is missing or leaves it."""
    target = context.architecture.vocab_size
    if checkpoint is None or D2T not in checkpoint.shapes:
        if checkpoint is not None and vocab != target:
            raise ValueError(
                f"speculative_config: model={source}: d2t is missing: its vocabulary has {vocab} tokens, and "
                f"the target's {target}, so it must map its tokens"
            )
        step = target // vocab
        return None if vocab == target else torch.arange(vocab, device=context.device) * (step - 1)
    if checkpoint.shapes[D2T] != (vocab,):
        raise ValueError(
            f"speculative_config: model={source}: d2t is {list(checkpoint.shapes[D2T])}, must be [{vocab}]"
        )
    offsets = checkpoint.read(D2T, [slice(None)], integers=True).long()
    tokens = offsets + torch.arange(vocab)
    if int(tokens.min()) < 0 or int(tokens.max()) >= target:
        raise ValueError(
            f"speculative_config: model={source}: d2t names token {int(tokens.max())}, must be >= 0 and < "
            f"{target}, the target's vocabulary"
        )
    return offsets.to(context.device)
