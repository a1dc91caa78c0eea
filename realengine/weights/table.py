"""The engine's weights: own name, shape, and the checkpoint tensors that each is assembled from.

One table serves every source. Projections with the same input are one tensor, in the order in which the model
slices their output:

    layers.{i}.qkv.weight      [(Hq + 2 Hk) D, H]   rows: | Hq D queries | Hk D keys | Hk D values |
    layers.{i}.gate_up.weight  [2 I, H]             rows: | I gate | I up |

V vocab_size, H hidden_size, Hq query heads, Hk KV heads, D head_dim, I intermediate size. Tensor parallelism
(Shoeybi et al. 2019) divides heads, intermediate sizes (also of every expert) and the output head's rows;
norms, router and embedding are complete on every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from realengine.model.architecture import Architecture
from realengine.model.variants import LatentSizes
from realengine.weights import gpt_oss
from realengine.weights.weight import Index, Part, Weight, everything, part_of, whole

T = TypeVar("T")
LAYER = re.compile(r"layers\.(\d+)\.")

HUGGING_FACE: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "attention_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.",
    "k": "model.layers.{i}.self_attn.k_proj.",
    "v": "model.layers.{i}.self_attn.v_proj.",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
    "router": "model.layers.{i}.mlp.gate.weight",
    "expert_gate": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    "expert_up": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    "expert_down": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
    "fused_qkv": "model.layers.{i}.self_attn.qkv_proj.weight",
    "w_pack": "model.layers.{i}.self_attn.W_pack.weight",
    "fused_gate_up": "model.layers.{i}.mlp.gate_up_proj.weight",
    "q_a": "model.layers.{i}.self_attn.q_a_proj.weight",
    "q_a_norm": "model.layers.{i}.self_attn.q_a_layernorm.weight",
    "q_b": "model.layers.{i}.self_attn.q_b_proj.weight",
    "kv_a": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "model.layers.{i}.self_attn.kv_a_layernorm.weight",
    "kv_b": "model.layers.{i}.self_attn.kv_b_proj.weight",
    "correction": "model.layers.{i}.mlp.gate.e_score_correction_bias",
    "shared_gate": "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
    "shared_up": "model.layers.{i}.mlp.shared_experts.up_proj.weight",
    "shared_down": "model.layers.{i}.mlp.shared_experts.down_proj.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
MIXTRAL: Mapping[str, str] = {
    "router": "model.layers.{i}.block_sparse_moe.gate.weight",
    "expert_gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    "expert_up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    "expert_down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
}
"""Names of Mixtral that differ from Hugging Face's names of other families."""
GEMMA: Mapping[str, str] = {
    "post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
"""Names of Gemma 2 and 3 that differ from Hugging Face's names of other families."""
GGUF: Mapping[str, str] = {
    "embedding": "token_embd.weight",
    "attention_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.",
    "k": "blk.{i}.attn_k.",
    "v": "blk.{i}.attn_v.",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "o": "blk.{i}.attn_output.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "router": "blk.{i}.ffn_gate_inp.weight",
    "expert_gate": "blk.{i}.ffn_gate_exps.weight",  # all experts of a layer in one tensor
    "expert_up": "blk.{i}.ffn_up_exps.weight",
    "expert_down": "blk.{i}.ffn_down_exps.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
}


def expected(architecture: Architecture, names: Mapping[str, str] = HUGGING_FACE) -> tuple[Weight, ...]:
    """Returns every weight of the architecture, unsharded; head.weight only if it is not the embedding."""
    if names is HUGGING_FACE and architecture.gemma is not None:
        names = {**names, **GEMMA}
    if names is HUGGING_FACE and architecture.model_type == "mixtral":
        names = {**names, **MIXTRAL}
    weights = tuple(_weights(architecture, names))
    if architecture.gemma is None:
        return weights
    return tuple(replace(w, offset=1.0) if w.name.endswith("norm.weight") else w for w in weights)


class ExpertShare(NamedTuple):
    """Share of a rank in the experts of every layer, if these are divided otherwise than other weights."""

    experts: tuple[int, ...]
    """The expert of each slot."""
    rank: int
    """Number of the share of each expert's matrices, of world_size."""
    world_size: int


def shard(
    weights: Sequence[Weight], rank: int, world_size: int, experts: ExpertShare | None = None
) -> tuple[Weight, ...]:
    """Returns every weight with this tensor-parallel rank's share.

    9 heads on 3 ranks: rank 1 has rows 3 D to 6 D of the queries, and its qkv begins with them. experts: of
    an expert-parallel rank. Raises ValueError if world_size does not divide heads, intermediate sizes and
    vocabulary.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must be in 0 .. world_size - 1, world_size={world_size}")
    if experts is None:
        _check_divided(weights, world_size)
        return tuple(_share(weight, rank, world_size) for weight in weights)
    _check_divided([weight for weight in weights if not is_of_experts(weight)], world_size)
    _check_divided([weight for weight in weights if is_of_experts(weight)], experts.world_size)
    return tuple(
        _share(placed(weight, experts.experts), experts.rank, experts.world_size)
        if is_of_experts(weight)
        else _share(weight, rank, world_size)
        for weight in weights
    )


def is_of_experts(weight: Weight) -> bool:
    """Returns whether a weight has the matrices of routed experts."""
    return ".experts_" in weight.name


def placed(weight: Weight, experts: tuple[int, ...]) -> Weight:
    """Returns a weight [experts, ...] with other experts, in the order of their slots."""
    parts = []
    for slot, expert in enumerate(experts):
        for part in weight.parts:
            at = part.into[0]
            if isinstance(at, slice):  # one checkpoint tensor has all experts
                into, take = (
                    (slice(slot, slot + 1), *part.into[1:]),
                    (slice(expert, expert + 1), *part.take[1:]),
                )
                parts.append(replace(part, into=into, take=take))
            elif at == expert:
                parts.append(replace(part, into=(slot, *part.into[1:])))
    shape = (len(experts), *weight.shape[1:])
    return replace(weight, shape=shape, parts=tuple(parts), experts=experts)


def _check_divided(weights: Sequence[Weight], world_size: int) -> None:
    """Raises ValueError unless ranks can divide the weights."""
    numbers = dict(number for weight in weights for number in weight.divided)
    for name, number in numbers.items():
        if number % world_size:
            common = math.gcd(*numbers.values())
            fitting = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            everything = ", ".join(f"{key}={value}" for key, value in numbers.items())
            raise ValueError(
                f"{name}={number}: cannot be divided among world_size={world_size} ranks; sizes that divide "
                f"all of {everything}: {fitting}"
            )


def of_stage(weights: Sequence[Weight], layers: range, num_layers: int) -> tuple[Weight, ...]:
    """Returns the weights of a pipeline stage: those of its layers, and the norm.

    The first stage has the embedding, the last one the output head, which may be the embedding; on others
    these have no rows.
    """
    is_first, is_last = layers.start == 0, layers.stop == num_layers
    is_tied = all(weight.name != "head.weight" for weight in weights)
    found = []
    for weight in weights:
        if match := LAYER.match(weight.name):
            if int(match[1]) in layers:
                found.append(weight)
            continue
        is_embedding = weight.name == "embedding.weight"
        if (is_embedding and not (is_first or (is_tied and is_last))) or (
            weight.name == "head.weight" and not is_last
        ):
            weight = replace(weight, shape=(0, weight.shape[1]), parts=(), split=None)
        found.append(weight)
    return tuple(found)


def _share(weight: Weight, rank: int, world_size: int) -> Weight:
    if weight.split is None:
        return weight
    axis = weight.split

    def divided(part: Part) -> Part:
        here, stored = part.into[axis], part.take[axis]
        assert isinstance(here, slice)
        size = (stored.stop - stored.start) // world_size
        first = stored.start + rank * size
        return replace(
            part,
            into=_with(part.into, axis, slice(here.start // world_size, here.stop // world_size)),
            take=_with(part.take, axis, slice(first, first + size)),
        )

    shape = _with(weight.shape, axis, weight.shape[axis] // world_size)
    return replace(weight, shape=shape, parts=tuple(divided(part) for part in weight.parts))


def _with(items: tuple[T, ...], axis: int, item: T) -> tuple[T, ...]:
    changed = list(items)
    changed[axis] = item
    return tuple(changed)


def _weights(architecture: Architecture, names: Mapping[str, str]) -> Iterator[Weight]:
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    rows = (("vocab_size", vocab),)
    tied = architecture.tie_word_embeddings
    yield whole("embedding.weight", names["embedding"], (vocab, hidden), divided=rows if tied else ())
    for i in range(architecture.num_layers):
        layer = {key: name.replace("{i}", str(i)) for key, name in names.items()}
        if architecture.latent is None:
            weights = [*_attention(architecture, layer, interleaved=names is GGUF)]
        else:
            weights = [*_latent_attention(architecture, architecture.latent, layer)]
        if architecture.gpt_oss is not None:
            own = {key: name.replace("{i}", str(i)) for key, name in gpt_oss.NAMES.items()}
            weights += gpt_oss.weights_of(architecture, own)
        else:
            has_experts = architecture.has_experts(i)
            weights += (_experts if has_experts else _mlp)(architecture, layer)
        if architecture.gemma is not None:
            for of in ("post_attention_norm", "post_mlp_norm"):
                weights.append(whole(f"{of}.weight", layer[of], (hidden,)))
        for weight in weights:
            yield replace(weight, name=f"layers.{i}.{weight.name}")
    yield whole("norm.weight", names["norm"], (hidden,))
    if not tied:
        yield replace(whole("head.weight", names["head"], (vocab, hidden)), split=-2, divided=rows)


def _attention(
    architecture: Architecture, names: Mapping[str, str], *, interleaved: bool
) -> Iterator[Weight]:
    hidden, head_dim = architecture.hidden_size, architecture.head_dim
    q, kv = architecture.num_heads * head_dim, architecture.num_kv_heads * head_dim
    heads = (("num_heads", architecture.num_heads), ("num_kv_heads", architecture.num_kv_heads))
    order = head_dim if interleaved and architecture.model_type == "llama" else None
    orders = (order, order, None)
    rows = {"q": q, "k": kv, "v": kv}
    yield whole("attention_norm.weight", names["attention_norm"], (hidden,))
    if architecture.fused_qkv:
        stored = names["w_pack" if architecture.model_type == "baichuan" else "fused_qkv"]
        yield _fused("qkv.weight", stored, (q, kv, kv), hidden, divided=heads)
    else:
        weights = {names[key] + "weight": size for key, size in rows.items()}
        yield _stacked("qkv.weight", weights, width=(hidden,), divided=heads, orders=orders)
    if architecture.qkv_bias:
        biases = {names[key] + "bias": size for key, size in rows.items()}
        yield _stacked("qkv.bias", biases, width=(), divided=heads, orders=orders)
    if architecture.qk_norm:
        yield whole("q_norm.weight", names["q_norm"], (head_dim,))
        yield whole("k_norm.weight", names["k_norm"], (head_dim,))
    yield replace(whole("o.weight", names["o"], (hidden, q)), split=-1, divided=heads[:1])
    yield whole("mlp_norm.weight", names["mlp_norm"], (hidden,))


def _latent_attention(
    architecture: Architecture, latent: LatentSizes, names: Mapping[str, str]
) -> Iterator[Weight]:
    """Yields the projections of latent attention; those to the latent row are complete on every rank."""
    hidden, num_heads = architecture.hidden_size, architecture.num_heads
    heads = (("num_heads", num_heads),)
    rows = num_heads * (latent.nope_dim + latent.rope_dim)
    yield whole("attention_norm.weight", names["attention_norm"], (hidden,))
    if latent.query_rank is None:
        yield replace(whole("q.weight", names["q"] + "weight", (rows, hidden)), split=-2, divided=heads)
    else:
        yield whole("q_a.weight", names["q_a"], (latent.query_rank, hidden))
        yield whole("q_a_norm.weight", names["q_a_norm"], (latent.query_rank,))
        q_b = whole("q.weight", names["q_b"], (rows, latent.query_rank))
        yield replace(q_b, split=-2, divided=heads)
    yield whole("kv_a.weight", names["kv_a"], (latent.width, hidden))
    yield whole("kv_a_norm.weight", names["kv_a_norm"], (latent.rank,))
    rows = num_heads * (latent.nope_dim + latent.value_dim)
    yield replace(whole("kv_b.weight", names["kv_b"], (rows, latent.rank)), split=-2, divided=heads)
    columns = num_heads * latent.value_dim
    yield replace(whole("o.weight", names["o"], (hidden, columns)), split=-1, divided=heads)
    yield whole("mlp_norm.weight", names["mlp_norm"], (hidden,))


def _mlp(architecture: Architecture, names: Mapping[str, str]) -> Iterator[Weight]:
    stored = (names["gate"], names["up"], names["down"])
    sizes = size, hidden = architecture.intermediate_size, architecture.hidden_size
    if architecture.fused_gate_up:
        divided = (("intermediate_size", size),)
        yield _fused("gate_up.weight", names["fused_gate_up"], (size, size), hidden, divided=divided)
        yield replace(whole("down.weight", names["down"], (hidden, size)), split=-1, divided=divided)
        return
    yield from _mlp_of("gate_up", "down", stored, sizes, "intermediate_size")


def _mlp_of(
    gate_up: str, down: str, stored: tuple[str, str, str], sizes: tuple[int, int], key: str
) -> Iterator[Weight]:
    """Yields an MLP. stored: gate, up and down in the checkpoint. key: the field with its first size."""
    size, hidden = sizes
    divided = ((key, size),)
    rows = {stored[0]: size, stored[1]: size}
    yield _stacked(f"{gate_up}.weight", rows, width=(hidden,), divided=divided)
    yield replace(whole(f"{down}.weight", stored[2], (hidden, size)), split=-1, divided=divided)


def _experts(architecture: Architecture, names: Mapping[str, str]) -> Iterator[Weight]:
    """Yields the experts' weights; a checkpoint tensor holds one expert, or all if its name has no {e}."""
    experts, hidden, size = (
        architecture.num_experts,
        architecture.hidden_size,
        architecture.moe_intermediate_size,
    )
    divided = (("moe_intermediate_size", size),)

    def parts(key: str, shape: tuple[int, int], rows: slice) -> Iterator[Part]:
        columns = slice(0, shape[1])
        if "{e}" not in names[key]:
            into: Index = (slice(0, experts), rows, columns)
            yield part_of(names[key], (experts, *shape), into)
            return
        for e in range(experts):
            yield part_of(names[key].replace("{e}", str(e)), shape, (e, rows, columns))

    yield whole("router.weight", names["router"], (experts, hidden))
    if architecture.routing.has_correction:
        yield whole("correction.bias", names["correction"], (experts,))
    if architecture.shared_intermediate_size:
        shared = architecture.shared_intermediate_size
        yield from _mlp_of(
            "shared_gate_up",
            "shared_down",
            (names["shared_gate"], names["shared_up"], names["shared_down"]),
            (shared, hidden),
            "shared_intermediate_size",
        )
    yield Weight(
        name="experts_gate_up.weight",
        shape=(experts, 2 * size, hidden),
        parts=(
            *parts("expert_gate", (size, hidden), slice(0, size)),
            *parts("expert_up", (size, hidden), slice(size, 2 * size)),
        ),
        split=-2,
        divided=divided,
    )
    yield Weight(
        name="experts_down.weight",
        shape=(experts, hidden, size),
        parts=tuple(parts("expert_down", (hidden, size), slice(0, hidden))),
        split=-1,
        divided=divided,
    )


def _stacked(
    name: str,
    rows: Mapping[str, int],
    *,
    width: tuple[int, ...],
    divided: tuple[tuple[str, int], ...],
    orders: Sequence[int | None] | None = None,
) -> Weight:
    """Returns a weight of checkpoint tensors [rows, *width], one below the other."""
    parts, start = [], 0
    for (stored, size), order in zip(rows.items(), orders or [None] * len(rows), strict=True):
        into = (slice(start, start + size), *everything(width))
        parts.append(part_of(stored, (size, *width), into, order))
        start += size
    split = -1 - len(width)
    return Weight(name=name, shape=(start, *width), parts=tuple(parts), split=split, divided=divided)


def _fused(
    name: str, stored: str, rows: Sequence[int], width: int, *, divided: tuple[tuple[str, int], ...]
) -> Weight:
    """Returns a weight of one checkpoint tensor with several projections, one below the other.

    Each is a part of its own, of which tensor-parallel ranks take a share.
    """
    parts, start, total = [], 0, sum(rows)
    for size in rows:
        at = (slice(start, start + size), slice(0, width))
        parts.append(replace(part_of(stored, (total, width), at), take=at))
        start += size
    return Weight(name=name, shape=(total, width), parts=tuple(parts), split=-2, divided=divided)
