"""Reads layers other than softmax attention with an MLP: hybrids with state-space layers, and others.

Each function returns the mixer of every layer, or its MLP, in the order of the layers.

The module is long because each architecture has its own fields for its layer kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hwmodels.hf.fields import Fields, wrong
from hwmodels.hf.layers import delta_net, grouped_layers, latent_attention, latent_layers, windows
from hwmodels.hf.usual import reach, usual_attention, usual_experts, usual_mlp
from hwmodels.model import DenseMlp, MixtureOfExperts, Mlp, NoMlp, OtherWeights
from hwmodels.model.attention import (
    Attention,
    CompressedAttention,
    GroupedQueryAttention,
    LatentAttention,
    NoAttention,
)
from hwmodels.model.recurrent import (
    BesideAttention,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)

NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Kinds of layers of Nemotron-H by their letter in hybrid_override_pattern."""
SINCE_TRANSFORMERS_5 = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kinds of layers as written by transformers 5, and in the models' own files."""
OF_MAMBA = ("chunk_size", "mamba_chunk_size", "mamba_expand", "expand", "mamba_dt_rank", "conv_bias")
"""Fields of state-space layers that repeat others or do not affect prices."""


def nemotron_kinds(fields: Fields) -> list[str]:
    """Returns the kind of each layer: mamba, attention, mlp or moe."""
    num_layers, listed = fields.whole("num_hidden_layers"), fields.value("layers_block_type")
    pattern = fields.value("hybrid_override_pattern")
    if listed is None and isinstance(pattern, str):
        listed = [NEMOTRON.get(letter, letter) for letter in pattern]
    if isinstance(listed, list):
        listed = [SINCE_TRANSFORMERS_5.get(str(kind), kind) for kind in listed]
    known = set(NEMOTRON.values())
    if not isinstance(listed, list) or len(listed) < num_layers or not known.issuperset(map(str, listed)):
        given = fields.value("layers_block_type") or pattern
        raise wrong(
            "hybrid_override_pattern", given, f"must name {num_layers} layers: {', '.join(sorted(known))}"
        )
    return listed[:num_layers]


def nemotron_h_attention(fields: Fields) -> list[Attention]:
    """Reads Nemotron-H's mixers; layers that are an MLP have none."""
    kinds = nemotron_kinds(fields)
    fields.ignore(
        *OF_MAMBA, "mtp_hybrid_override_pattern", "mtp_layers_block_type", "rescale_prenorm_residual"
    )
    mamba = Mamba2(
        num_heads=fields.whole("mamba_num_heads"),
        head_dim=fields.whole("mamba_head_dim"),
        state_size=fields.whole("ssm_state_size"),
        num_groups=fields.whole("n_groups", default=1),
        conv_kernel=fields.whole("conv_kernel", default=4),
        proj_bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
        state_dtype=state_dtype(fields, "mamba_ssm_cache_dtype", "fp32"),
    )
    bias = fields.flag("attention_bias", default=False)
    [full] = grouped_layers(fields, [None], qkv_bias=bias, o_bias=bias)
    fields.ignore("sliding_window")
    return [{"mamba": mamba, "attention": full}.get(kind, NoAttention()) for kind in kinds]


def nemotron_h_mlp(fields: Fields) -> list[Mlp]:
    """Reads Nemotron-H's MLPs, without gates; layers with a mixer have none."""
    kinds = nemotron_kinds(fields)
    fields.ignore("hidden_act", "moe_shared_expert_overlap")
    mlps: dict[str, Mlp] = {}
    if "mlp" in kinds:
        bias = fields.flag("mlp_bias", default=False)
        width = fields.whole("intermediate_size")
        mlps["mlp"] = DenseMlp(intermediate_size=width, gated=False, bias=bias)
    if "moe" in kinds:
        experts = usual_experts(fields, gated=False, router_bias=True)
        if experts is None:
            raise wrong("num_experts", fields.value("num_experts"), "must be a whole number >= 1")
        mlps["moe"] = experts
    fields.ignore("intermediate_size")
    return [mlps.get(kind, NoMlp()) for kind in kinds]


def nemotron_h_mtp(attention: Sequence[Attention], mlps: Sequence[Mlp]) -> tuple[Attention, Mlp]:
    """Returns the parts of an MTP module: attention, and experts if there are any."""
    softmax = [layer for layer in attention if isinstance(layer, GroupedQueryAttention)]
    experts = [mlp for mlp in mlps if isinstance(mlp, MixtureOfExperts)]
    return softmax[-1] if softmax else attention[-1], experts[-1] if experts else mlps[-1]


def dense_mtp(attention: Sequence[Attention], mlps: Sequence[Mlp]) -> tuple[Attention, Mlp]:
    """Returns the parts of an MTP module of MiMo-V2 or LongCat-Flash: a window, if any, and no experts."""
    mixers = [layer for layer in attention if not isinstance(layer, NoAttention)]
    windowed = [layer for layer in mixers if layer.window is not None]
    dense = [mlp for mlp in mlps if isinstance(mlp, DenseMlp)]
    return (windowed or mixers)[-1], (dense or mlps)[0]


def latent_mtp(attention: Sequence[Attention], mlps: Sequence[Mlp]) -> tuple[Attention, Mlp]:
    """Returns the parts of an MTP module of GLM-5.3-Flash or Ling 3: MLA, and the MLP of the last layer."""
    latent = [layer for layer in attention if isinstance(layer, LatentAttention)]
    return (latent or attention)[-1], mlps[-1]


def state_dtype(fields: Fields, name: str, default: str) -> str:
    """Returns the dtype of a recurrent state, a field with float32, bfloat16 or float16."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    given = fields.text(name)
    if given is None:
        return default
    if given not in names:
        raise wrong(name, given, f"must be one of {', '.join(names)}")
    return names[given]


def mamba2_of(fields: Fields, norm: bool = True) -> Mamba2:
    """Reads the Mamba-2 layer of Bamba, Granite 4 and Falcon-H1."""
    fields.ignore(*OF_MAMBA)
    inner = fields.whole_or_none("mamba_d_ssm") or (
        fields.whole("mamba_expand", default=2) * fields.whole("hidden_size")
    )
    heads, dim = fields.whole("mamba_n_heads"), fields.value("mamba_d_head")
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads if dim in (None, "auto") else fields.whole("mamba_d_head"),
        state_size=fields.whole("mamba_d_state"),
        num_groups=fields.whole("mamba_n_groups", default=1),
        conv_kernel=fields.whole("mamba_d_conv", default=4),
        proj_bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        norm=norm,
        state_dtype="bf16",
    )


def bamba_attention(fields: Fields) -> list[Attention]:
    """Reads Bamba's mixers: Mamba-2 except for the layers in attn_layer_indices."""
    num_layers, softmax = fields.whole("num_hidden_layers"), fields.wholes("attn_layer_indices")
    mamba, full = mamba2_of(fields), usual_attention(fields)
    return [full[i] if i in softmax else mamba for i in range(num_layers)]


def granite_hybrid_attention(fields: Fields) -> list[Attention]:
    """Reads Granite 4's mixers from layer_types (mamba or attention).

    Without state-space layers, all are attention.
    """
    num_layers = fields.whole("num_hidden_layers")
    names = ("mamba", "attention", *SINCE_TRANSFORMERS_5)
    kinds = fields.names("layer_types", names, num_layers) or ["attention"] * num_layers
    kinds = [SINCE_TRANSFORMERS_5.get(kind, kind) for kind in kinds]
    bias = fields.flag("attention_bias", default=False)
    [full] = grouped_layers(fields, [None], qkv_bias=bias, o_bias=bias)
    if "mamba" not in kinds:
        fields.ignore(*(name for name in fields.config if name.startswith("mamba_")))
        return [full] * num_layers
    mamba = mamba2_of(fields)
    return [mamba if kind == "mamba" else full for kind in kinds]


def granite_hybrid_mlp(fields: Fields) -> list[Mlp]:
    """Reads Granite 4's MLPs: experts with a shared one, or only the shared one."""
    width = fields.count("shared_expert_intermediate_size") or fields.whole("intermediate_size")
    fields.ignore("intermediate_size")
    experts = usual_experts(fields, gated=True, router_bias=False)
    return [experts or DenseMlp(intermediate_size=width)] * fields.whole("num_hidden_layers")


def falcon_h1_attention(fields: Fields) -> list[Attention]:
    """Reads Falcon-H1's layers, each with attention and Mamba-2 side by side."""
    fields.ignore("attn_layer_indices", "projectors_bias", "mamba_use_mlp", "mlp_expansion_factor")
    recurrent = mamba2_of(fields, norm=fields.flag("mamba_rms_norm", default=False))
    fields.ignore("mamba_norm_before_gate", "num_logits_to_keep")
    return [
        BesideAttention(attention=layer, recurrent=recurrent)
        for layer in usual_attention(fields)
        if isinstance(layer, GroupedQueryAttention)
    ]


def jamba_attention(fields: Fields) -> list[Attention]:
    """Reads Jamba's mixers: Mamba-1 except for one layer per attn_layer_period."""
    num_layers, hidden = fields.whole("num_hidden_layers"), fields.whole("hidden_size")
    period = fields.whole("attn_layer_period", default=8)
    offset = fields.count("attn_layer_offset")
    rank = fields.value("mamba_dt_rank")
    mamba = Mamba1(
        inner_size=fields.whole("mamba_expand", default=2) * hidden,
        state_size=fields.whole("mamba_d_state", default=16),
        dt_rank=-(-hidden // 16) if rank in (None, "auto") else fields.whole("mamba_dt_rank"),
        conv_kernel=fields.whole("mamba_d_conv", default=4),
        proj_bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        norms=True,
        state_dtype="bf16",
    )
    fields.ignore("use_mamba_kernels", "num_logits_to_keep", "mamba_inner_layernorms")
    full = usual_attention(fields)
    return [full[i] if i % period == offset else mamba for i in range(num_layers)]


def jamba_mlp(fields: Fields) -> list[Mlp]:
    """Reads Jamba's MLPs: experts in one layer per expert_layer_period."""
    num_layers, dense = (
        fields.whole("num_hidden_layers"),
        DenseMlp(intermediate_size=fields.whole("intermediate_size")),
    )
    period = fields.whole("expert_layer_period", default=2)
    offset = fields.count("expert_layer_offset")
    experts = (
        usual_experts(fields, gated=True, router_bias=False) if fields.count("num_experts") > 1 else None
    )
    fields.ignore("num_experts", "num_experts_per_tok")
    return [experts if experts and i % period == offset else dense for i in range(num_layers)]


def lfm2_attention(fields: Fields) -> list[Attention]:
    """Reads LFM2's mixers: short convolutions, and attention in the listed layers."""
    num_layers, softmax = fields.whole("num_hidden_layers"), fields.wholes("full_attn_idxs")
    kinds = fields.names("layer_types", ("conv", "full_attention"), num_layers) or [
        "full_attention" if i in softmax else "conv" for i in range(num_layers)
    ]
    convolution = ShortConvolution(
        width=fields.whole("hidden_size"),
        conv_kernel=fields.whole("conv_L_cache", default=3),
        bias=fields.flag("conv_bias", default=False),
    )
    fields.ignore("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim")
    [full] = grouped_layers(fields, [None], qk_norm=True)
    return [full if kind == "full_attention" else convolution for kind in kinds]


def lfm2_mlp(fields: Fields) -> list[Mlp]:
    """Reads LFM2's MLPs; block_auto_adjust_ff_dim takes two thirds of the width, in whole multiples."""
    if fields.count("num_experts"):
        return usual_mlp(fields, router_bias=fields.flag("use_expert_bias", default=False))
    width = fields.count("block_ff_dim") or fields.whole("intermediate_size")
    multiple = fields.whole("block_multiple_of", default=256)
    multiplier = fields.number("block_ffn_dim_multiplier", default=1.0)
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        width = int(multiplier * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    fields.ignore("intermediate_size", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale")
    fields.ignore(*(name for name in fields.config if name.startswith("block_")))
    return [DenseMlp(intermediate_size=width)] * fields.whole("num_hidden_layers")


def kimi_linear_attention(fields: Fields) -> list[Attention]:
    """Reads Kimi Linear's mixers: Kimi delta attention, and MLA in full_attn_layers, counted from 1.

    Transformers 5 has the fields of linear_attn_config next to the others, and layer_types.
    """
    num_layers, of_linear = fields.whole("num_hidden_layers"), fields.value("linear_attn_config")
    if of_linear is None and fields.value("linear_num_heads") is not None:
        return delta_or_latent(fields)
    if not isinstance(of_linear, Mapping):
        raise wrong("linear_attn_config", of_linear, "must be an object")
    inner = Fields(of_linear)
    linear = KimiDeltaAttention(
        num_heads=inner.whole("num_heads"),
        head_dim=inner.whole("head_dim"),
        conv_kernel=inner.whole("short_conv_kernel_size", default=4),
        full_rank_gate=inner.flag("use_full_rank_gate", default=False),
    )
    softmax = inner.wholes("full_attn_layers")
    gate = fields.flag("mla_use_output_gate", default=False)
    fields.ignore("mla_use_nope", "attn_res_block_size", "linear_attn_config", "latent_moe_use_norm")
    full = latent_attention(fields, output_gate=gate)
    return [full[i] if i + 1 in softmax else linear for i in range(num_layers)]


def delta_or_latent(
    fields: Fields, *, delta: Mapping[str, Any] | None = None, latent: Mapping[str, Any] | None = None
) -> list[Attention]:
    """Reads Kimi delta attention and MLA by layer_types; delta, latent: traits of the two kinds."""
    num_layers = fields.whole("num_hidden_layers")
    kinds = fields.value("layer_types")
    linear = KimiDeltaAttention(
        num_heads=fields.whole("linear_num_heads", default=fields.whole("num_attention_heads")),
        head_dim=fields.whole("linear_head_dim" if fields.value("linear_head_dim") else "head_dim"),
        conv_kernel=fields.whole("linear_conv_kernel_dim", default=4),
        **(delta or {}),
    )
    fields.ignore("short_conv_kernel_size", "linear_lower_bound", "kda_lower_bound", "kda_safe_gate")
    full = latent_layers(fields, other_kinds=("linear_attention",), **(latent or {}))
    if kinds is None:
        group = fields.whole("layer_group_size")
        kinds = ["linear_attention" if (i + 1) % group else "full_attention" for i in range(num_layers)]
    fields.ignore("layer_group_size")
    return [linear if kind == "linear_attention" else full[i] for i, kind in enumerate(kinds)]


def bailing_hybrid_attention(fields: Fields) -> list[Attention]:
    """Reads the mixers of Ling 3: Kimi delta attention with full gates, and MLA with a gate per head."""
    full = {"full_rank_gate": True, "full_rank_decay": True}
    return delta_or_latent(fields, delta=full, latent={"head_gate": True})


def glm5_next_attention(fields: Fields) -> list[Attention]:
    """Reads GLM-5.3-Flash's mixers: Kimi delta attention, and MLA whose indexer selects pools of tokens."""
    fields.ignore("index_kpool_always_select_tail", "qk_head_dim", "hc_sinkhorn_iters")
    return delta_or_latent(fields, latent={"index_ratio": fields.whole("index_kpool", default=1)})


def dots3_attention(fields: Fields) -> list[Attention]:
    """Reads dots3's MLA, with a gate per head: within a window in most layers, by an indexer in others."""
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", default=512)
    kinds = fields.value("layer_types") or [
        "indexed_attention" if i < 2 or i % 4 == 1 else "sliding_attention" for i in range(num_layers)
    ]
    layers = latent_layers(fields, other_kinds=("sliding_attention",), head_gate=True)
    reach_tokens = window if window < fields.whole("max_position_embeddings") else None
    no_indexer: dict[str, Any] = {
        "sparse_top_k": None,
        "index_n_heads": 0,
        "index_head_dim": 0,
        "shares_index": False,
    }
    return [
        replace(layer, window=reach_tokens, **no_indexer) if kind == "sliding_attention" else layer
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def mistral_large4_attention(fields: Fields) -> list[Attention]:
    """Reads Mistral Large 4's MLA, whose layers may use the latent vectors of an earlier one.

    no_rope_layers: 0 for layers in which the whole width of queries and keys is without position.
    kv_source_layers: the layer that makes the latent vectors of each layer.
    """
    layers = latent_layers(fields)
    num_layers = len(layers)
    with_rope = fields.wholes("no_rope_layers") or [1] * num_layers
    sources = fields.wholes("kv_source_layers") or list(range(num_layers))
    for name, given in (("no_rope_layers", with_rope), ("kv_source_layers", sources)):
        if len(given) != num_layers:
            raise wrong(name, given, f"must name {num_layers} layers, names {len(given)}")
    if any(source > i or sources[source] != source for i, source in enumerate(sources)):
        rule = "must name for each layer itself, or an earlier one that names itself"
        raise wrong("kv_source_layers", sources, rule)
    mixers: list[Attention] = []
    for i, layer in enumerate(layers):
        whole = layer.qk_nope_head_dim + layer.qk_rope_head_dim
        widths: dict[str, Any] = {} if with_rope[i] else {"qk_nope_head_dim": whole, "qk_rope_head_dim": 0}
        mixers.append(replace(layer, shares_kv=sources[i] != i, **widths))
    return mixers


def laguna_attention(fields: Fields) -> list[Attention]:
    """Reads Laguna's attention: a number of heads per layer, windows in some layers, and a gate.

    gating: true or per-head for one number per head, per-element for one per element of the output.
    """
    every_layer, gating = reach(fields), fields.value("gating")
    if gating not in (None, True, "per-head", "per-element"):
        raise wrong("gating", gating, "must be true, per-head or per-element")
    heads = fields.wholes("num_attention_heads_per_layer") or [fields.whole("num_attention_heads")] * len(
        every_layer
    )
    if len(heads) != len(every_layer):
        rule = f"must name {len(every_layer)} layers, names {len(heads)}"
        raise wrong("num_attention_heads_per_layer", heads, rule)
    bias = fields.flag("attention_bias", default=False)
    traits = {"qk_norm": True, "qkv_bias": bias, "o_bias": bias}
    traits |= {"output_gate" if gating == "per-element" else "head_gate": True}
    fields.ignore("num_key_value_heads", "head_dim")
    return [
        grouped_layers(Fields({**fields.config, "num_attention_heads": own}), [window], **traits)[0]
        for own, window in zip(heads, every_layer, strict=True)
    ]


def inkling_attention(fields: Fields, **traits: Any) -> list[Attention]:
    """Reads Inkling's attention: layers with a window have their own heads."""
    num_layers, local = fields.whole("num_hidden_layers"), fields.wholes("local_layer_ids")
    kinds = fields.names("layer_types", ("hybrid_sliding", "hybrid"), num_layers) or [
        "hybrid_sliding" if (i in local if local else (i + 1) % 6) else "hybrid" for i in range(num_layers)
    ]
    fields.ignore("rel_extent", "d_rel", "conv_kernel_size", "sconv_kernel_size", "number_of_conv_states")
    [full] = grouped_layers(fields, [None], qk_norm=True, **traits)
    window = fields.whole("sliding_window", default=fields.whole_or_none("sliding_window_size"))
    [windowed] = grouped_layers(of_windows(fields), [window], qk_norm=True, **traits)
    return [windowed if kind == "hybrid_sliding" else full for kind in kinds]


def inkling_weights(fields: Fields, *, second: bool = False) -> tuple[OtherWeights, ...]:
    """Returns the weights of relative positions and short convolutions; second: of Inkling 2.

    Each layer projects the hidden state to d_rel numbers per head, and has convolutions over keys, values and
    the outputs of attention and MLP. Inkling 2 also makes sinks from the hidden state and, in layers without
    a window, weights of the convolutions.
    """
    hidden, rank = fields.whole("hidden_size"), fields.whole("d_rel")
    kernel = fields.whole("sconv_kernel_size", default=fields.whole("conv_kernel_size", default=4))
    elements = 0
    for layer in inkling_attention(fields):
        assert isinstance(layer, GroupedQueryAttention)
        per_head = rank + second
        elements += hidden * layer.num_heads * per_head + rank * (layer.window or fields.whole("rel_extent"))
        elements += kernel * (2 * layer.num_kv_heads * layer.head_dim + 2 * hidden)
        if second and layer.window is None:
            elements += 2 * hidden * layer.num_kv_heads * kernel
    return (OtherWeights(name="relative positions and short convolutions", elements=elements),)


def of_windows(fields: Fields) -> Fields:
    """Returns the fields with the heads of windowed layers, from names with swa_."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    return Fields(
        {**fields.config, **{name: fields.value(f"swa_{name}") or fields.config.get(name) for name in names}}
    )


def olmo_hybrid_attention(fields: Fields) -> list[Attention]:
    """Reads OLMo Hybrid's mixers: gated delta nets, and softmax attention with norms over all heads."""
    num_layers = fields.whole("num_hidden_layers")
    kinds = fields.names("layer_types", ("linear_attention", "full_attention"), num_layers) or [
        "linear_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers)
    ]
    linear, bias = delta_net(fields), fields.flag("attention_bias", default=False)
    fields.ignore(*(f"linear_{name}" for name in ("a_log_max", "a_log_min", "allow_neg_eigval")))
    fields.ignore(*(f"linear_{name}" for name in ("dt_init_floor", "dt_max", "dt_min")))
    traits = {"qk_norm": True, "qk_norm_joins_heads": True, "qkv_bias": bias, "o_bias": bias}
    [full] = grouped_layers(fields, [None], **traits)
    return [linear if kind == "linear_attention" else full for kind in kinds]


def lara_attention(fields: Fields) -> list[Attention]:
    """Reads Lara's mixers: gated delta nets, and softmax attention with and without a window."""
    return beside_softmax(fields, "linear_attention", delta_net(fields), qk_norm=True)


def lfm3_attention(fields: Fields) -> list[Attention]:
    """Reads LFM3's mixers: short convolutions, and attention with and without a window, with a head gate."""
    convolution = ShortConvolution(
        width=fields.whole("hidden_size"),
        conv_kernel=fields.whole("conv_L_cache", default=7),
        bias=fields.flag("conv_bias", default=False),
    )
    gate = fields.flag("use_attention_gate", default=True)
    return beside_softmax(fields, "conv", convolution, qk_norm=True, head_gate=gate)


def beside_softmax(fields: Fields, name: str, other: Attention, **traits: Any) -> list[Attention]:
    """Reads layers of softmax attention, and another kind in layers with type `name` in layer_types."""
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole_or_none("sliding_window")
    allowed = (name, "full_attention", "sliding_attention")
    kinds = fields.names("layer_types", allowed, num_layers)
    if kinds is None:
        raise wrong("layer_types", None, f"must be a list of {' and '.join(allowed)}")
    if window is None and "sliding_attention" in kinds:
        raise wrong("sliding_window", None, "must be given, as layer_types has sliding_attention")
    bias = fields.flag("attention_bias", default=False)
    full, windowed = grouped_layers(fields, [None, window], qkv_bias=bias, o_bias=bias, **traits)
    return [{name: other, "sliding_attention": windowed}.get(kind, full) for kind in kinds]


def lightning_attention(fields: Fields) -> list[Attention]:
    """Reads MiniMax-M1's mixers: attn_type_list or layer_types say linear (0) or softmax (1)."""
    num_layers, kinds = fields.whole("num_hidden_layers"), fields.wholes("attn_type_list")
    named = fields.names("layer_types", ("linear_attention", "full_attention"), num_layers)
    if named is not None:
        kinds = [int(kind == "full_attention") for kind in named]
    if len(kinds) < num_layers:
        raise wrong("attn_type_list", kinds, f"must name {num_layers} layers, names {len(kinds)}")
    [full] = grouped_layers(fields, [None])
    assert isinstance(full, GroupedQueryAttention)
    linear = LightningAttention(num_heads=full.num_heads, head_dim=full.head_dim)
    fields.ignore(
        *(name for name in fields.config if name.startswith(("layernorm_", "full_attn_", "linear_attn_")))
    )
    fields.ignore("block_size", "shared_moe_mode", "postnorm", "mlp_alpha_factor", "mlp_beta_factor")
    return [full if kind else linear for kind in kinds[:num_layers]]


def bailing_linear_attention(fields: Fields) -> list[Attention]:
    """Reads the mixers of Ling 2.5: softmax or latent attention in each layer_group_size-th layer."""
    num_layers = fields.whole("num_hidden_layers")
    group = fields.whole("layer_group_size")
    full = usual_attention(fields)
    fields.ignore("group_norm_size", "linear_silu", "linear_scale", "linear_rope", "use_linear_silu")
    heads = fields.whole("num_attention_heads")
    dim = fields.whole("head_dim", default=fields.whole("hidden_size") // heads)
    linear = LightningAttention(num_heads=heads, head_dim=dim)
    last = num_layers // group * group
    return [full[i] if (i + 1) % group == 0 or i >= last else linear for i in range(num_layers)]


def deci_attention(fields: Fields) -> list[Attention]:
    """Reads DeciLM's attention, which differs by layer (block_configs) and may be absent."""
    layers: list[Attention] = []
    for i, block in enumerate(deci_blocks(fields)):
        part = block.part("attention")
        if any(part.value(name) for name in ("replace_with_linear", "window_length", "sparsify")):
            rule = "must be attention to all tokens, or no_op"
            raise wrong(f"block_configs[{i}].attention", part.config, rule)
        if part.flag("no_op", default=False):
            layers.append(NoAttention())
            continue
        kv_heads = fields.whole("num_attention_heads") // part.whole("n_heads_in_group")
        [layer] = grouped_layers(Fields({**fields.config, "num_key_value_heads": kv_heads}), [None])
        layers.append(layer)
    fields.ignore("num_key_value_heads", "attention_bias", "head_dim", "intermediate_size", "mlp_bias")
    return layers


def deci_mlp(fields: Fields) -> list[Mlp]:
    """Reads DeciLM's MLPs: 4/3 ffn_mult times the hidden size, in multiples of 256, or none."""
    mlps: list[Mlp] = []
    for i, block in enumerate(deci_blocks(fields)):
        part = block.part("ffn")
        if part.value("replace_with_linear") or part.value("sparsify"):
            raise wrong(f"block_configs[{i}].ffn", part.config, "must be an MLP, or no_op")
        if part.flag("no_op", default=False):
            mlps.append(NoMlp())
            continue
        width = part.count("intermediate_size") or int(
            2 * part.number("ffn_mult") * fields.whole("hidden_size") / 3
        )
        mlps.append(DenseMlp(intermediate_size=-(-width // 256) * 256))
    return mlps


def deci_blocks(fields: Fields) -> list[Fields]:
    """Returns block_configs: an object with attention and ffn for every layer."""
    num_layers, blocks = fields.whole("num_hidden_layers"), fields.value("block_configs")
    if not (isinstance(blocks, list) and len(blocks) >= num_layers):
        raise wrong("block_configs", blocks, f"must be a list of {num_layers} objects")
    if not all(isinstance(block, Mapping) for block in blocks):
        raise wrong("block_configs", blocks, "must hold objects with attention and ffn")
    return [Fields(block) for block in blocks[:num_layers]]


def compressed_attention(fields: Fields) -> list[Attention]:
    """Reads DeepSeek-V4's attention: compress_ratios gives the number of tokens per entry; 0: none."""
    num_layers, ratios = fields.whole("num_hidden_layers"), v4_ratios(fields)
    if len(ratios) < num_layers:
        raise wrong("compress_ratios", ratios, f"must name {num_layers} layers, names {len(ratios)}")
    fields.ignore("num_key_value_heads", "attention_bias", "compress_rope_theta", "v_head_dim")
    fields.ignore("hc_sinkhorn_iters", "num_hash_layers", "qk_head_dim", "mlp_layer_types")
    return [v4_layer(fields, ratio) for ratio in ratios[:num_layers]]


def v4_ratios(fields: Fields) -> list[int]:
    """Returns the tokens per entry of each layer, with multi-token prediction layers at the end."""
    kinds, rates = fields.value("layer_types"), fields.value("compress_rates")
    if fields.value("compress_ratios") is not None or not (isinstance(kinds, list) and rates):
        return fields.wholes("compress_ratios")
    by_kind = fields.part("compress_rates")
    return [by_kind.count(str(kind)) for kind in kinds]


def v4_layer(fields: Fields, ratio: int) -> CompressedAttention:
    """Returns a layer of DeepSeek-V4; one with 4 tokens per entry has an indexer."""
    sparse = 0 < ratio < 16
    return CompressedAttention(
        num_heads=fields.whole("num_attention_heads"),
        head_dim=fields.whole("head_dim"),
        rope_head_dim=fields.whole("qk_rope_head_dim"),
        q_lora_rank=fields.whole("q_lora_rank"),
        o_groups=fields.whole("o_groups"),
        o_lora_rank=fields.whole("o_lora_rank"),
        window_tokens=fields.whole("sliding_window"),
        ratio=ratio,
        sparse_top_k=fields.whole("index_topk") if sparse else None,
        index_n_heads=fields.whole("index_n_heads") if sparse else 0,
        index_head_dim=fields.whole("index_head_dim") if sparse else 0,
        num_streams=fields.whole("hc_mult", default=1),
    )


def v4_mtp(attention: Sequence[Attention], mlps: Sequence[Mlp]) -> tuple[Attention, Mlp]:
    """Returns the parts of an MTP module: attention only within the window, and the experts."""
    layer = attention[-1]
    if isinstance(layer, CompressedAttention):
        layer = CompressedAttention(
            num_heads=layer.num_heads,
            head_dim=layer.head_dim,
            rope_head_dim=layer.rope_head_dim,
            q_lora_rank=layer.q_lora_rank,
            o_groups=layer.o_groups,
            o_lora_rank=layer.o_lora_rank,
            window_tokens=layer.window_tokens,
            num_streams=layer.num_streams,
        )
    return layer, mlps[-1]


def minimax_m3_attention(fields: Fields) -> list[Attention]:
    """Reads MiniMax-M3's attention: in most layers, an indexer selects blocks of tokens."""
    num_layers, sparse = fields.whole("num_hidden_layers"), m3_sparse_config(fields)
    [full] = grouped_layers(fields, [None], qk_norm=fields.flag("use_qk_norm", default=True))
    fields.ignore("qk_norm_type", "sliding_window")
    if not isinstance(sparse, Mapping) or not sparse.get("use_sparse_attention", True):
        return [full] * num_layers
    inner = Fields(sparse)
    flags = inner.wholes("sparse_attention_freq") or inner.wholes("sparse_disable_index_value")
    if len(flags) < num_layers:
        raise wrong("sparse_attention_config", sparse, f"must name {num_layers} layers, names {len(flags)}")
    [selected] = grouped_layers(
        fields,
        [None],
        qk_norm=fields.flag("use_qk_norm", default=True),
        sparse_top_k=inner.whole("sparse_topk_blocks") * inner.whole("sparse_block_size"),
        index_n_heads=inner.whole("sparse_num_index_heads"),
        index_head_dim=inner.whole("sparse_index_dim"),
    )
    return [selected if flag else full for flag in flags[:num_layers]]


def m3_sparse_config(fields: Fields) -> Any:
    """Returns sparse_attention_config, or the fields of transformers 5 under its names."""
    num_layers, given = fields.whole("num_hidden_layers"), fields.value("sparse_attention_config")
    kinds = fields.names("layer_types", ("full_attention", "minimax_m3_sparse"), num_layers)
    if given is not None or kinds is None:
        return given
    fields.ignore("index_local_blocks")
    names = {
        "sparse_topk_blocks": "index_topk_blocks",
        "sparse_block_size": "index_block_size",
        "sparse_num_index_heads": "index_n_heads",
        "sparse_index_dim": "index_head_dim",
    }
    inner = {name: fields.value(flat) for name, flat in names.items()}
    flags = [int(kind == "minimax_m3_sparse") for kind in kinds]
    return {**inner, "sparse_attention_freq": flags} if any(flags) else None


def mimo_v2_attention(fields: Fields) -> list[Attention]:
    """Reads MiMo-V2's attention: layers with a window have their own heads; values are narrower."""
    num_layers, pattern = fields.whole("num_hidden_layers"), fields.wholes("hybrid_layer_pattern")
    kinds = fields.names("layer_types", ("full_attention", "sliding_attention"), num_layers)
    if not pattern and kinds is not None:
        pattern = [int(kind == "sliding_attention") for kind in kinds]
    if len(pattern) < num_layers:
        raise wrong("hybrid_layer_pattern", pattern, f"must name {num_layers} layers, names {len(pattern)}")
    fields.ignore("attention_chunk_size", "attention_value_scale", "swa_rope_theta", "attention_bias")
    full_sinks = fields.flag("add_full_attention_sink_bias", default=False)
    sinks = fields.flag("add_swa_attention_sink_bias", default=False)
    # Values as wide as keys are not stated separately.
    [full] = grouped_layers(fields, [None], v_head_dim=value_dim(fields, "v_head_dim"), sinks=full_sinks)
    inner = of_windows(fields)
    if not any(fields.value(name) for name in fields.config if name.startswith("swa_num_")):
        kv_heads = 2 * fields.whole("num_key_value_heads")  # as in transformers 5, which omits them
        inner, sinks = Fields({**inner.config, "num_key_value_heads": kv_heads}), True
    reach_tokens = fields.whole("sliding_window", default=fields.whole_or_none("sliding_window_size"))
    fields.ignore("sliding_window_size")
    [windowed] = grouped_layers(inner, [reach_tokens], v_head_dim=value_dim(inner, "v_head_dim"), sinks=sinks)
    return [windowed if flag else full for flag in pattern[:num_layers]]


def value_dim(fields: Fields, name: str) -> int | None:
    """Returns the width of a head's values, if it differs from its keys'."""
    given = fields.whole_or_none(name)
    return None if given == fields.value("head_dim") else given


def step3_attention(fields: Fields, *, head_gate: bool = False) -> list[Attention]:
    """Reads Step-3.5's attention: layers with a window may have other numbers of heads; a gate per head.

    head_gate: the default if use_head_wise_attn_gate is missing.
    """
    other, of_window = fields.value("attention_other_setting"), fields.value("num_sliding_attention_heads")
    if other is None and of_window is not None:
        other = {"num_attention_heads": fields.whole("num_sliding_attention_heads")}
    gate = fields.flag("use_head_wise_attn_gate", default=head_gate)
    fields.ignore("att_impl_type", "use_rope_layers", "yarn_only_types", "max_window_layers", "use_qk_norm")
    traits = {"qk_norm": True, "head_gate": gate}
    every_layer = reach(fields)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    inner = fields
    if isinstance(other, Mapping):
        given = {**other, "num_key_value_heads": other.get("num_attention_groups")}
        own = {name: given[name] for name in names if given.get(name)}
        inner = Fields({**fields.config, **own})
    return [
        grouped_layers(fields if window is None else inner, [window], **traits)[0] for window in every_layer
    ]


def gemma4_attention(fields: Fields) -> list[Attention]:
    """Reads Gemma 4's attention: full layers have wider heads; the last num_kv_shared_layers reuse KV.

    attention_k_eq_v: values are made from the keys' weights, which vLLM loads twice; both are cached.
    """
    every_layer = windows(fields, full_every=fields.whole("sliding_window_pattern", default=6))
    own = len(every_layer) - fields.count("num_kv_shared_layers")
    fields.ignore("attention_k_eq_v", "attention_bias", "use_bidirectional_attention")
    wide = Fields(
        {
            **fields.config,
            "head_dim": fields.value("global_head_dim") or fields.value("head_dim"),
            "num_key_value_heads": fields.value("num_global_key_value_heads")
            or fields.value("num_key_value_heads"),
        }
    )
    return [
        grouped_layers(wide if window is None else fields, [window], qk_norm=True, shares_kv=i >= own)[0]
        for i, window in enumerate(every_layer)
    ]


def gemma4_mlp(fields: Fields) -> list[Mlp]:
    """Reads Gemma 4's MLPs: with parallel experts if enable_moe_block; wider in layers without KV."""
    num_layers, width = fields.whole("num_hidden_layers"), fields.whole("intermediate_size")
    own = num_layers - fields.count("num_kv_shared_layers")
    wide = fields.flag("use_double_wide_mlp", default=False)
    fields.ignore("num_experts", "num_experts_per_tok", "moe_intermediate_size", "hidden_act")
    if fields.flag("enable_moe_block", default=False):
        experts = MixtureOfExperts(
            num_experts=fields.whole("num_experts"),
            top_k=fields.whole("num_experts_per_tok"),
            intermediate_size=fields.whole("moe_intermediate_size"),
            shared_intermediate_size=width,
            router_bias=True,
        )
        return [experts] * num_layers
    return [DenseMlp(intermediate_size=2 * width if wide and i >= own else width) for i in range(num_layers)]


def ernie_vl_mlp(fields: Fields) -> list[Mlp]:
    """Reads ERNIE 4.5 VL's experts for text; experts for images only take memory: `ernie_vl_experts`."""
    widths, numbers = _ernie_vl_sizes(fields)
    text = Fields({**fields.config, "moe_intermediate_size": widths[0], "num_experts": numbers[0]})
    mlps = usual_mlp(text, router_bias=True)
    fields.ignore(*text.names_read)
    return mlps


def ernie_vl_experts(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns the experts for images and their routers, which no text passes."""
    widths, numbers = _ernie_vl_sizes(fields)
    hidden = fields.whole("hidden_size")
    layers = sum(isinstance(mlp, MixtureOfExperts) for mlp in ernie_vl_mlp(fields))
    each = numbers[1] * (3 * hidden * widths[1] + hidden)
    return (OtherWeights(name="experts for images", elements=layers * each),) if each else ()


def _ernie_vl_sizes(fields: Fields) -> tuple[list[int], list[int]]:
    """Returns the widths and the numbers of experts, for text and for images."""
    sizes = []
    for name in ("moe_intermediate_size", "num_experts"):
        given = fields.value(name)
        both = fields.wholes(name) if isinstance(given, list) else [fields.whole(name)] * 2
        if len(both) != 2:
            raise wrong(name, given, "must be one number, or two: for text and for images")
        sizes.append(both)
    widths, numbers = sizes
    return widths, numbers


def longcat_attention(fields: Fields) -> list[Attention]:
    """Reads LongCat-Flash's mixers: a layer has two with MLA, and parallel experts."""
    layers = latent_attention(fields)
    fields.ignore("attention_method", "mla_scale_q_lora", "mla_scale_kv_lora", "zero_expert_type")
    return [mixer for layer in layers for mixer in (layer, layer, NoAttention())]


def longcat_mlp(fields: Fields) -> list[Mlp]:
    """Reads LongCat-Flash's MLPs: two dense ones and experts, some of which compute nothing."""
    dense = DenseMlp(intermediate_size=fields.whole("intermediate_size"))
    num_experts, zero = fields.whole("num_experts"), fields.count("zero_expert_num")
    chosen = fields.whole("num_experts_per_tok")
    experts = MixtureOfExperts(
        num_experts=num_experts,
        top_k=max(1, round(chosen * num_experts / (num_experts + zero))),
        intermediate_size=fields.whole("moe_intermediate_size"),
        router_bias=True,
    )
    return [mlp for _ in range(fields.whole("num_hidden_layers")) for mlp in (dense, dense, experts)]
