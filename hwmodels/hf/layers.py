"""Reads the softmax attention and the MLP of each layer from the fields of a config.json.

Gated delta nets with softmax attention are also read here; state-space layers and other mixtures are in
`hwmodels.hf.hybrids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hwmodels.hf.fields import Fields, wrong
from hwmodels.model import DenseMlp, MixtureOfExperts, Mlp
from hwmodels.model.attention import Attention, GroupedQueryAttention, LatentAttention
from hwmodels.model.recurrent import LinearAttention


def llama_attention(fields: Fields) -> list[Attention]:
    """Reads Llama's attention: one bias setting for all four projections."""
    bias = fields.flag("attention_bias", default=False)
    return grouped_layers(fields, windows(fields), qkv_bias=bias, o_bias=bias)


def phi3_attention(fields: Fields) -> list[Attention]:
    """Reads the attention of Phi-3, in which attention_bias has no effect."""
    fields.ignore("attention_bias")
    return grouped_layers(fields, windows(fields))


def qwen2_attention(fields: Fields) -> list[Attention]:
    """Reads Qwen2's attention, which has biases on Q, K and V without a field for it."""
    fields.ignore("attention_bias")
    return grouped_layers(fields, qwen_windows(fields), qkv_bias=fields.flag("qkv_bias", default=True))


def qwen3_attention(fields: Fields) -> list[Attention]:
    """Reads the attention of Qwen3: with norms of queries and keys, attention_bias on all projections."""
    bias = fields.flag("attention_bias", default=False)
    return grouped_layers(fields, qwen_windows(fields), qkv_bias=bias, o_bias=bias, qk_norm=True)


def glm4_moe_attention(fields: Fields) -> list[Attention]:
    """Reads the attention of GLM-4 MoE, in which use_qk_norm is optional."""
    return grouped_layers(
        fields,
        windows(fields),
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm=fields.flag("use_qk_norm", default=False),
    )


def minimax_m2_attention(fields: Fields) -> list[Attention]:
    """Reads MiniMax-M2's attention; attn_type_list must be all 1, softmax attention, as in M2's layers."""
    kinds = fields.wholes("attn_type_list")
    if any(kind != 1 for kind in kinds):
        raise wrong("attn_type_list", kinds, "must be all 1, softmax attention")
    fields.ignore("qk_norm_type", "attention_bias")
    normed = fields.flag("use_qk_norm", default=True)
    return grouped_layers(fields, windows(fields), qk_norm=normed, qk_norm_joins_heads=normed)


def gemma2_attention(fields: Fields) -> list[Attention]:
    """Reads Gemma 2's attention: every second layer has full attention, the others a window."""
    bias = fields.flag("attention_bias", default=False)
    return grouped_layers(fields, windows(fields, full_every=2), qkv_bias=bias, o_bias=bias)


def gemma3_attention(fields: Fields) -> list[Attention]:
    """Reads Gemma 3's attention: every sixth layer has full attention, the others a window."""
    bias = fields.flag("attention_bias", default=False)
    every = fields.whole("sliding_window_pattern", default=fields.whole("_sliding_window_pattern", default=6))
    return grouped_layers(fields, windows(fields, full_every=every), qkv_bias=bias, o_bias=bias, qk_norm=True)


def gemma3n_attention(fields: Fields) -> list[Attention]:
    """Reads Gemma 3n's attention: each fifth layer is full; the last num_kv_shared_layers reuse KV."""
    own = fields.whole("num_hidden_layers") - fields.count("num_kv_shared_layers")
    if own < 1:
        raise wrong(
            "num_kv_shared_layers", fields.value("num_kv_shared_layers"), "must be < num_hidden_layers"
        )
    every_layer = windows(fields, full_every=5)
    fields.ignore("attention_bias")
    return [
        *grouped_layers(fields, every_layer[:own], qk_norm=True),
        *grouped_layers(fields, every_layer[own:], qk_norm=True, shares_kv=True),
    ]


def gpt_oss_attention(fields: Fields) -> list[Attention]:
    """Reads gpt-oss's attention: every second layer has full attention; each head has a learned sink."""
    bias = fields.flag("attention_bias", default=True)
    return grouped_layers(fields, windows(fields, full_every=2), qkv_bias=bias, o_bias=bias, sinks=True)


def llama4_attention(fields: Fields) -> list[Attention]:
    """Reads Llama 4's attention: layers with rotary positions attend within chunks of attention_chunk_size.

    A chunk is priced as a window of its size, which is an upper bound: on average attention reaches half as
    far back.
    """
    fields.ignore("use_qk_norm")  # a norm without weights
    bias = fields.flag("attention_bias", default=False)
    num_layers, chunk = fields.whole("num_hidden_layers"), fields.whole_or_none("attention_chunk_size")
    every = fields.whole("no_rope_layer_interval", default=4)
    with_rope = fields.wholes("no_rope_layers") or [(i + 1) % every for i in range(num_layers)]
    if len(with_rope) != num_layers:
        raise wrong("no_rope_layers", with_rope, f"must name {num_layers} layers, names {len(with_rope)}")
    kinds = fields.names("layer_types", ("chunked_attention", "full_attention"), num_layers)
    if kinds is not None:
        with_rope = [int(kind == "chunked_attention") for kind in kinds]
    reach = [chunk if rope else None for rope in with_rope]
    return grouped_layers(fields, reach, qkv_bias=bias, o_bias=bias, window_is_chunk=True)


def latent_attention(fields: Fields, **traits: Any) -> list[Attention]:
    """Reads MLA in every layer; traits: of `LatentAttention`."""
    return list[Attention](latent_layers(fields, **traits))


def latent_layers(
    fields: Fields, *, other_kinds: tuple[str, ...] = (), **traits: Any
) -> list[LatentAttention]:
    """Reads MLA of DeepSeek V2, V3, V3.2, Kimi K2, GLM-5; index_topk means DeepSeek sparse attention.

    indexer_types: shared layers use the tokens selected by the previous layer (GLM-5.2). other_kinds: names
    in layer_types of layers that the caller reads itself. traits: of `LatentAttention`.
    """
    fields.ignore("num_key_value_heads", "attention_bias", "head_dim", "qk_head_dim")
    num_layers, top_k = fields.whole("num_hidden_layers"), fields.whole_or_none("index_topk")
    layer = LatentAttention(
        num_heads=fields.whole("num_attention_heads"),
        q_lora_rank=fields.whole_or_none("q_lora_rank"),
        kv_lora_rank=fields.whole("kv_lora_rank"),
        qk_nope_head_dim=fields.whole("qk_nope_head_dim"),
        qk_rope_head_dim=0 if fields.value("qk_rope_head_dim") == 0 else fields.whole("qk_rope_head_dim"),
        v_head_dim=fields.whole("v_head_dim"),
        sparse_top_k=top_k,
        index_n_heads=0 if top_k is None else fields.whole("index_n_heads"),
        index_head_dim=0 if top_k is None else fields.whole("index_head_dim"),
        **traits,
    )
    kinds = fields.names("indexer_types", ("full", "shared"), num_layers)
    every = fields.whole("index_topk_freq", default=1)
    if kinds is None and every > 1:
        # After the first layers, one layer per index_topk_freq selects.
        first = fields.count("index_skip_topk_offset")
        kinds = ["full" if i < first or (i - first + 1) % every == 0 else "shared" for i in range(num_layers)]
    fields.ignore("index_skip_topk_offset", "index_share_for_mtp_iteration", "index_topk_pattern")
    names = ("deepseek_sparse_attention", "indexed_attention", "full_attention")
    fields.names("layer_types", (*names, *other_kinds), num_layers)
    shared = replace(layer, shares_index=True) if top_k is not None else layer
    return [shared if kind == "shared" else layer for kind in kinds or ["full"] * num_layers]


def hybrid_attention(fields: Fields) -> list[Attention]:
    """Reads gated delta nets with softmax attention in each full_attention_interval-th layer."""
    num_layers = fields.whole("num_hidden_layers")
    every = fields.whole("full_attention_interval", default=4)
    kinds = fields.names("layer_types", ("linear_attention", "full_attention"), num_layers) or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
    ]
    linear = delta_net(fields)
    fields.ignore("use_sliding_window")
    bias = fields.flag("attention_bias", default=False)
    gate = fields.flag("attn_output_gate", default=True)
    [full] = grouped_layers(fields, [None], qkv_bias=bias, o_bias=bias, qk_norm=True, output_gate=gate)
    return [linear if kind == "linear_attention" else full for kind in kinds]


def delta_net(fields: Fields) -> LinearAttention:
    """Reads the gated delta net of linear layers."""
    dtype = fields.value("mamba_ssm_dtype")
    if dtype not in (None, "float32", "bfloat16"):
        raise wrong("mamba_ssm_dtype", dtype, "must be float32 or bfloat16")
    return LinearAttention(
        num_key_heads=fields.whole("linear_num_key_heads"),
        key_head_dim=fields.whole("linear_key_head_dim"),
        num_value_heads=fields.whole("linear_num_value_heads"),
        value_head_dim=fields.whole("linear_value_head_dim"),
        conv_kernel=fields.whole("linear_conv_kernel_dim", default=4),
        state_dtype="bf16" if dtype == "bfloat16" else "fp32",
    )


def grouped_layers(fields: Fields, reach: Sequence[int | None], **traits: Any) -> list[Attention]:
    """Returns one layer of grouped-query attention per window in `reach`; None is full attention."""
    heads = fields.whole("num_attention_heads")
    kv_heads, dim = num_kv_heads(fields, heads), head_dim(fields, heads)
    longest = fields.whole("max_position_embeddings")
    return [
        GroupedQueryAttention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            window=window if window is not None and window < longest else None,
            **traits,
        )
        for window in reach
    ]


def num_kv_heads(fields: Fields, num_heads: int) -> int:
    """Returns num_key_value_heads; if it is missing, every head has its own keys and values."""
    heads = fields.whole("num_key_value_heads", default=num_heads)
    if num_heads % heads:
        raise wrong("num_key_value_heads", heads, f"must divide num_attention_heads={num_heads}")
    return heads


def head_dim(fields: Fields, num_heads: int) -> int:
    """Returns head_dim; if it is missing, the heads divide the hidden size evenly."""
    hidden_size = fields.whole("hidden_size")
    if fields.value("head_dim") is None and hidden_size % num_heads:
        rule = f"must be a multiple of num_attention_heads={num_heads}, or give head_dim"
        raise wrong("hidden_size", hidden_size, rule)
    return fields.whole("head_dim", default=hidden_size // num_heads)


def windows(fields: Fields, full_every: int | None = None) -> list[int | None]:
    """Returns sliding_window (or sliding_window_size) of each layer; None for layers with full attention.

    Full-attention layers come from layer_types if the file has it, else each full_every-th layer, else none.
    """
    num_layers = fields.whole("num_hidden_layers")
    kinds = fields.names("layer_types", ("full_attention", "sliding_attention"), num_layers)
    in_force = fields.flag("use_sliding_window", default=True)
    window, synonym = (fields.count(name) or None for name in ("sliding_window", "sliding_window_size"))
    if window and synonym and window != synonym:
        raise wrong("sliding_window_size", synonym, f"must be the same as sliding_window={window}")
    window = window or synonym
    if not in_force:
        return [None] * num_layers
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    return [window if full_every is None or (i + 1) % full_every else None for i in range(num_layers)]


def qwen_windows(fields: Fields) -> list[int | None]:
    """Returns Qwen's windows, if use_sliding_window enables them; the first max_window_layers have none."""
    first, reach = fields.count("max_window_layers"), windows(fields)
    if not fields.flag("use_sliding_window", default=False):
        return [None] * len(reach)
    if fields.value("layer_types") is not None:
        return reach
    return [window if i >= first else None for i, window in enumerate(reach)]


def dense_mlp(fields: Fields) -> list[Mlp]:
    """Reads the MLPs of a dense model."""
    mlp = DenseMlp(
        intermediate_size=fields.whole("intermediate_size"), bias=fields.flag("mlp_bias", default=False)
    )
    return [mlp] * fields.whole("num_hidden_layers")


def gemma3n_mlp(fields: Fields) -> list[Mlp]:
    """Reads the MLP of Gemma 3n, whose width may be given per layer."""
    fields.ignore("activation_sparsity_pattern")
    if not isinstance(fields.value("intermediate_size"), list):
        return dense_mlp(fields)
    widths, num_layers = fields.wholes("intermediate_size"), fields.whole("num_hidden_layers")
    if len(widths) != num_layers:
        raise wrong("intermediate_size", widths, f"must name {num_layers} layers, names {len(widths)}")
    return [DenseMlp(intermediate_size=width) for width in widths]


def mixtral_mlp(fields: Fields) -> list[Mlp]:
    """Reads the experts of Mixtral."""
    experts = MixtureOfExperts(
        num_experts=fields.whole("num_local_experts"),
        top_k=top_k(fields, "num_local_experts"),
        intermediate_size=fields.whole("intermediate_size"),
    )
    return [experts] * fields.whole("num_hidden_layers")


def gpt_oss_mlp(fields: Fields) -> list[Mlp]:
    """Reads the experts of gpt-oss, which have biases."""
    fields.ignore("experts_per_token")  # repeats num_experts_per_tok
    experts = MixtureOfExperts(
        num_experts=fields.whole("num_local_experts"),
        top_k=top_k(fields, "num_local_experts"),
        intermediate_size=fields.whole("intermediate_size"),
        bias=True,
        router_bias=True,
    )
    return [experts] * fields.whole("num_hidden_layers")


def minimax_m2_mlp(fields: Fields) -> list[Mlp]:
    """Reads the experts of MiniMax-M2."""
    fields.ignore("mlp_intermediate_size", "mtp_transformer_layers")  # left over from MiniMax-Text-01
    experts = MixtureOfExperts(
        num_experts=fields.whole("num_local_experts"),
        top_k=top_k(fields, "num_local_experts"),
        intermediate_size=fields.whole("intermediate_size"),
        shared_intermediate_size=fields.count("shared_intermediate_size"),
        router_bias=fields.flag("use_routing_bias", default=True),
    )
    return [experts] * fields.whole("num_hidden_layers")


def qwen_moe_mlp(fields: Fields) -> list[Mlp]:
    """Reads experts in each decoder_sparse_step-th layer, except those in mlp_only_layers."""
    num_layers, step = fields.whole("num_hidden_layers"), fields.whole("decoder_sparse_step", default=1)
    dense_ones = fields.wholes("mlp_only_layers")
    sparse = [i not in dense_ones and (i + 1) % step == 0 for i in range(num_layers)]
    shared = fields.count("shared_expert_intermediate_size")
    experts = MixtureOfExperts(
        num_experts=fields.whole("num_experts"),
        top_k=top_k(fields, "num_experts"),
        intermediate_size=fields.whole("moe_intermediate_size"),
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
    )
    return mixed(fields, experts, sparse)


def deepseek_mlp(fields: Fields) -> list[Mlp]:
    """Reads experts in each moe_layer_freq-th layer after the first first_k_dense_replace layers."""
    num_layers = fields.whole("num_hidden_layers")
    first, step = fields.count("first_k_dense_replace"), fields.whole("moe_layer_freq", default=1)
    kinds = fields.names("mlp_layer_types", ("dense", "sparse"), num_layers)
    sparse = (
        [i >= first and i % step == 0 for i in range(num_layers)]
        if kinds is None
        else [kind == "sparse" for kind in kinds]
    )
    width = fields.whole("moe_intermediate_size")
    experts = MixtureOfExperts(
        num_experts=fields.whole("n_routed_experts"),
        top_k=top_k(fields, "n_routed_experts"),
        intermediate_size=width,
        shared_intermediate_size=fields.count("n_shared_experts") * width,
        router_bias=fields.config.get("topk_method", "noaux_tc") == "noaux_tc",
    )
    return mixed(fields, experts, sparse)


def llama4_mlp(fields: Fields) -> list[Mlp]:
    """Reads experts with an equally wide shared one, by interleave_moe_layer_step or moe_layers."""
    num_layers, step = fields.whole("num_hidden_layers"), fields.count("interleave_moe_layer_step")
    listed, width = fields.wholes("moe_layers"), fields.whole("intermediate_size")
    sparse = [i in listed if listed else step > 0 and (i + 1) % step == 0 for i in range(num_layers)]
    dense = DenseMlp(intermediate_size=fields.whole("intermediate_size_mlp", default=width))
    if not any(sparse):
        fields.ignore("num_local_experts", "num_experts_per_tok")
        return [dense] * num_layers
    experts = MixtureOfExperts(
        num_experts=fields.whole("num_local_experts"),
        top_k=top_k(fields, "num_local_experts"),
        intermediate_size=width,
        shared_intermediate_size=width,
    )
    return [experts if has_experts else dense for has_experts in sparse]


def top_k(fields: Fields, all_experts: str) -> int:
    """Returns num_experts_per_tok. Raises ValueError if it exceeds the number in the field all_experts."""
    chosen, num_experts = fields.whole("num_experts_per_tok"), fields.whole(all_experts)
    if chosen > num_experts:
        raise wrong("num_experts_per_tok", chosen, f"must be <= {all_experts}={num_experts}")
    return chosen


def mixed(fields: Fields, experts: MixtureOfExperts, sparse: list[bool]) -> list[Mlp]:
    """Returns experts for the sparse layers, and an MLP of intermediate_size for the others."""
    fields.ignore("intermediate_size")
    if all(sparse):
        return [experts] * len(sparse)
    dense = DenseMlp(intermediate_size=fields.whole("intermediate_size"))
    return [experts if has_experts else dense for has_experts in sparse]
