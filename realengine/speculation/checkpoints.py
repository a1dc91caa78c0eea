"""Readers of the published layouts of heads and layers that draft, with the names that vLLM reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hwmodels.hf.config import read_hf_config
from realengine.model.architecture import Architecture
from realengine.speculation.drafter import DrafterContext
from realengine.speculation.settings import DraftSource
from realengine.weights.load import load_table, random_weight
from realengine.weights.safetensors import SafetensorsCheckpoint
from realengine.weights.table import HUGGING_FACE, expected
from realengine.weights.weight import Part, Weight


def read_weights(
    source: DraftSource,
    context: DrafterContext,
    table: Callable[[SafetensorsCheckpoint | None], Sequence[Weight]],
    *,
    is_ours: Callable[[str], bool] = lambda name: True,
) -> tuple[dict[str, torch.Tensor], SafetensorsCheckpoint | None]:
    """Returns the weights of a draft by their own names, and the checkpoint that they are from.

    table: returns the table of weights of a checkpoint; None: of random weights. is_ours: whether a tensor of
    the checkpoint belongs to the draft; others are not read. Raises ValueError, with file and tensor, for
    missing, misshapen and unknown tensors.
    """
    if isinstance(source, Architecture):
        weights = table(None)
        drawn = (
            random_weight(each, each, context.dtype, context.device, seed=context.seed) for each in weights
        )
        return {each.name: tensor for each, tensor in zip(weights, drawn, strict=True)}, None
    try:
        checkpoint = SafetensorsCheckpoint(Path(source).expanduser())
        ignored = [name for name in checkpoint.shapes if not is_ours(name)]
        tensors = load_table(table(checkpoint), checkpoint, context.dtype, context.device, ignored=ignored)
    except ValueError as error:
        raise ValueError(f"speculative_config: model={source}: {error}") from error
    return tensors, checkpoint


def whole(name: str, stored: str, shape: tuple[int, ...]) -> Weight:
    """Returns a weight of one unchanged checkpoint tensor."""
    everything = tuple(slice(0, size) for size in shape)
    part = Part(name=stored, shape=shape, into=everything, take=everything)
    return Weight(name=name, shape=shape, parts=(part,))


INSIDE = "transformer_layer_config"
NOT_COMPUTED = ("norm_before_fc", "fc_norm", "norm_output")
"""Options of vLLM for EAGLE-3 that change what the layer computes, and that are not computed here."""


class Eagle3Options(NamedTuple):
    """The options of an EAGLE-3 draft.

    config.json of EAGLE's layers: flat, or that of the library speculators, which has the layer's inside.
    """

    taps: tuple[int, ...]
    """The layers of the target of whose inputs the hidden states are read."""
    norm_before_residual: bool = False
    """Whether the layer adds its output to the normed feature, instead of the feature itself."""


def draft_config(source: str | Path) -> dict[str, Any] | None:
    """Returns the layer's fields of a folder's config.json; None: it has none."""
    config = _config_of(source)
    return config if config is None or INSIDE not in config else dict(config[INSIDE])


def eagle3_options(source: DraftSource, num_layers: int) -> Eagle3Options:
    """Returns the options of a draft for a target of num_layers. Raises ValueError for unsupported ones."""
    config = None if isinstance(source, Architecture) else _config_of(source)
    if config is None:
        return Eagle3Options(default_taps(num_layers))
    own: Mapping[str, Any] = config.get("eagle_config") or {}

    def option(name: str, default: object) -> Any:
        return own.get(name, config.get(name, default))

    where = f"speculative_config: model={source}: config.json"
    for name in NOT_COMPUTED:
        if option(name, False):
            raise ValueError(f"{where}: {name}=true is not supported; choose another draft")
    if not option("use_aux_hidden_state", True):
        raise ValueError(f"{where}: use_aux_hidden_state=false is not supported; choose another draft")
    taps = option("eagle_aux_hidden_state_layer_ids", None)
    if taps is None:
        taps = default_taps(num_layers)
    if not taps or any(not isinstance(tap, int) or not 0 <= tap <= num_layers for tap in taps):
        raise ValueError(
            f"{where}: eagle_aux_hidden_state_layer_ids={taps}: must be a list of layers from 0 to "
            f"{num_layers}, those of the target"
        )
    return Eagle3Options(tuple(taps), bool(option("norm_before_residual", INSIDE in config)))


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the layers of a target of at least 2 layers of whose inputs states are read, as in vLLM."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)


def _config_of(source: str | Path) -> dict[str, Any] | None:
    path = Path(source).expanduser()
    return read_hf_config(path)[1] if (path / "config.json").is_file() else None


EMBEDDING = "embed_tokens.weight"
D2T, T2D = "d2t", "t2d"


class LayerWeights(NamedTuple):
    """The weights of a draft by their own names; architecture: that of its layers.

    Layers that draft from hidden states: EAGLE, EAGLE-3 and modules for multi-token prediction.

    eagle: fc, layers.0.* without an input norm, embed_tokens if it is not the target's.
    eagle3: fc over several hidden states, midlayer.* or layers.0.* with a norm for each half of its input,
    norm, lm_head and d2t (draft token i is token i + d2t[i] of the target), embed_tokens if it is not the
    target's.
    mtp: mtp.* (Qwen3-Next) or model.layers.{n}.* behind the target's n layers (DeepSeek), with attention of
    q_proj, k_proj, v_proj; embeddings, and the head if the checkpoint has none, are the target's.
    """

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


Block = tuple[torch.Tensor, torch.Tensor | None]
_PUBLISHED = re.compile(r"(medusa_heads\.)?(\d+)\.(\d+)\.linear\.weight")
_IN_VLLM = re.compile(r"(medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.weight")


def load_heads(
    source: DraftSource, context: DrafterContext, num_heads: int
) -> list[tuple[tuple[Block, ...], torch.Tensor]]:
    """Returns the blocks and the projection of every head of a checkpoint; of random weights, num_heads.

    Raises ValueError if there are fewer than num_heads, or if a tensor does not fit the target.

    Medusa's heads, in two layouts.

        published  {i}.{b}.linear.weight, {i}.{b}.linear.bias  block b of head i   {i}.{n}.weight   projection
        vLLM's     blocks.{i}.layers.{b}.weight, .bias if any  block b of head i   lm_heads.{i}.weight

    n: the number of blocks. Either may stand behind `medusa_heads.`. A folder may also have config.json,
    whose fields are not needed: the tensors say all.
    """
    names = _Names(source, num_heads)
    tensors, _ = read_weights(source, context, lambda checkpoint: names.table(checkpoint, context))
    if names.num_heads < num_heads:
        raise ValueError(
            f"speculative_config: model={source}: has {names.num_heads} heads, and a draft has {num_heads} "
            f"places; set num_speculative_tokens, or the depth of the tree, to at most {names.num_heads}"
        )
    heads = []
    for head in range(names.num_heads):
        blocks = tuple(
            (tensors[f"{head}.{block}.weight"], tensors.get(f"{head}.{block}.bias"))
            for block in range(names.num_blocks)
        )
        heads.append((blocks, tensors[f"{head}.projection"]))
    return heads


class _Names:
    """The tensors of a checkpoint's layout, and how many heads and blocks it has."""

    def __init__(self, source: DraftSource, num_heads: int) -> None:
        self._source = source
        self.num_heads, self.num_blocks = num_heads, 1

    def table(self, checkpoint: SafetensorsCheckpoint | None, context: DrafterContext) -> Sequence[Weight]:
        """Returns the weights of all heads with the names of the checkpoint's layout."""
        layer, projection, pattern = "{i}.{b}.linear", "{i}.{n}.weight", _PUBLISHED
        has_bias = True
        if checkpoint is not None:
            if any(_IN_VLLM.fullmatch(name) for name in checkpoint.shapes):
                layer, projection, pattern = "blocks.{i}.layers.{b}", "lm_heads.{i}.weight", _IN_VLLM
                has_bias = any(name.endswith(".bias") for name in checkpoint.shapes)
            found = [match for name in checkpoint.shapes if (match := pattern.fullmatch(name))]
            numbers = [(int(match[2]), int(match[3])) for match in found]
            if found and found[0][1]:
                layer, projection = found[0][1] + layer, found[0][1] + projection
            if not numbers:
                raise ValueError(
                    f"{checkpoint.path}: has no heads: a Medusa checkpoint has tensors such as "
                    "0.0.linear.weight, or blocks.0.layers.0.weight"
                )
            self.num_heads = 1 + max(head for head, _ in numbers)
            self.num_blocks = 1 + max(block for _, block in numbers)
        hidden, vocab = context.architecture.hidden_size, context.architecture.vocab_size
        weights = []
        for head in range(self.num_heads):

            def name(of: str, number: int = 0, head: int = head) -> str:
                return of.format(i=head, b=number, n=self.num_blocks)

            for number in range(self.num_blocks):
                block = name(layer, number)
                weights.append(whole(f"{head}.{number}.weight", f"{block}.weight", (hidden, hidden)))
                if has_bias:
                    weights.append(whole(f"{head}.{number}.bias", f"{block}.bias", (hidden,)))
            weights.append(whole(f"{head}.projection", name(projection), (vocab, hidden)))
        return weights
