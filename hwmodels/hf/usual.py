"""Reads the layers of a transformer whose fields have their usual meanings, under any of their usual names.

Many architectures differ from Llama only in names, biases, norms and activations; this reader serves them,
and unknown architectures. The module also holds the weights outside the layers, and the field names of a few
architectures that differ from the usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hwmodels.hf.fields import Fields, wrong
from hwmodels.hf.layers import grouped_layers, latent_attention
from hwmodels.model import DenseMlp, MixtureOfExperts, Mlp, OtherWeights
from hwmodels.model.attention import Attention

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "n_kv_heads", "num_attention_groups"),
    "head_dim": ("attention_head_dim", "attention_head_size", "kv_channels", "d_head"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": (
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_sequence_length",
        "max_seq_length",
        "seq_length",
        "model_max_length",
    ),
    "hidden_act": ("activation_function", "hidden_activation", "mlp_hidden_act", "activation", "act_fn"),
    "sliding_window": ("sliding_window_size", "window_size", "local_attention_window"),
    "num_experts": (
        "n_routed_experts",
        "num_local_experts",
        "moe_num_experts",
        "num_routed_experts",
        "n_experts",
    ),
    "num_experts_per_tok": (
        "num_experts_per_token",
        "experts_per_token",
        "num_selected_experts",
        "moe_k",
        "moe_topk",
        "moe_top_k",
        "top_k_experts",
        "n_experts_per_tok",
        "router_topk",
    ),
    "moe_intermediate_size": (
        "expert_intermediate_size",
        "moe_ffn_hidden_size",
        "expert_ffn_hidden_size",
    ),
    "num_shared_experts": ("n_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": (
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
    ),
    "first_k_dense_replace": ("num_dense_layers", "n_dense_layers", "moe_layer_start_index"),
    "num_nextn_predict_layers": ("mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers"),
    "tie_word_embeddings": ("tie_embedding", "tie_lm_head"),
}
"""Usual name of a field, and the names that other configuration classes give to the same."""

FULL = {"full_attention", "global_attention", "attention", "full", "global", "deepseek_sparse_attention"}
WINDOWED = {"sliding_attention", "sliding_window_attention", "local_attention", "sliding", "local", "swa"}
TWO_MATRICES = {"relu", "relu2", "gelu", "gelu_new", "gelu_fast", "xielu", "squared_relu"}
"""Activations of MLPs without a gate; others, such as silu, have one."""
VARIES = "differs between layers, which only known architectures may"


def with_usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields under their usual names; a synonym that repeats a value is dropped."""
    named = dict(config)
    for usual, synonyms in SYNONYMS.items():
        for synonym in synonyms:
            if synonym not in named:
                continue
            if named.get(usual) is None:
                named[usual] = named.pop(synonym)
            elif named[synonym] == named[usual] or named[synonym] is None:
                del named[synonym]
    return named


def with_names(*names: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns a function that fills these fields, if missing, from their synonyms."""
    groups = {
        name: next((usual, *synonyms) for usual, synonyms in SYNONYMS.items() if name in (usual, *synonyms))
        for name in names
    }

    def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
        named = dict(config)
        for name, group in groups.items():
            for other in group:
                if named.get(name) is None and named.get(other) is not None:
                    named[name] = named.pop(other)
        return named

    return renamed


def usual_attention(
    fields: Fields,
    *,
    qkv_bias: bool | None = None,
    o_bias: bool | None = None,
    qk_norm: bool | None = None,
    full_every: int | None = None,
    **traits: Any,
) -> list[Attention]:
    """Reads grouped-query or latent attention with or without windows.

    qkv_bias, o_bias, qk_norm: traits of the architecture; None: from the fields. full_every: interval of
    layers without a window, if the fields do not specify them. traits: of `GroupedQueryAttention`.
    """
    if fields.value("kv_lora_rank"):
        return latent_attention(fields)
    everywhere = any(fields.flag(name, default=False) for name in ("attention_bias", "use_bias", "bias"))
    inputs = any(fields.flag(name, default=False) for name in ("qkv_bias", "use_qkv_bias", "add_qkv_bias"))
    outputs = fields.flag("attention_out_bias", default=everywhere)
    normed = any(
        fields.flag(name, default=False)
        for name in ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm")
    )
    fields.ignore("qk_norm_type", "add_bias_linear", "enable_bias", "no_bias", "add_swa_attention_sink_bias")
    return grouped_layers(
        fields,
        reach(fields, full_every),
        qkv_bias=everywhere or inputs if qkv_bias is None else qkv_bias,
        o_bias=outputs if o_bias is None else o_bias,
        qk_norm=normed if qk_norm is None else qk_norm,
        **traits,
    )


def reach(fields: Fields, full_every: int | None = None) -> list[int | None]:
    """Returns the window of each layer: by layer_types, by a pattern, or equal; None: full attention."""
    num_layers = fields.whole("num_hidden_layers")
    window = fields.count("sliding_window") or None
    in_force = fields.flag("use_sliding_window", default=True)
    fields.ignore("max_window_layers")
    windowed = layer_kinds(fields, num_layers)
    pattern = fields.value("sliding_window_pattern")
    if windowed is None and isinstance(pattern, str):  # LLLG: three local layers, one global
        windowed = [pattern[i % len(pattern)] == "L" for i in range(num_layers)]
    elif windowed is None:
        every = fields.whole_or_none("sliding_window_pattern") or full_every
        windowed = [every is None or (i + 1) % every != 0 for i in range(num_layers)]
    return [window if is_windowed and in_force else None for is_windowed in windowed]


def layer_kinds(fields: Fields, num_layers: int) -> list[bool] | None:
    """Returns for each layer of layer_types whether it has a window; None without that field."""
    kinds = fields.value("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(str(kind) not in FULL | WINDOWED for kind in kinds):
        raise wrong("layer_types", kinds, "must be a list of full_attention and sliding_attention")
    if len(kinds) < num_layers:
        raise wrong("layer_types", kinds, f"must name {num_layers} layers, names {len(kinds)}")
    return [kind in WINDOWED for kind in kinds[:num_layers]]  # layers for multi-token prediction follow


def usual_mlp(
    fields: Fields,
    *,
    gated: bool | None = None,
    bias: bool | None = None,
    factor: int | None = None,
    router_bias: bool = False,
    shared_gate: bool = False,
) -> list[Mlp]:
    """Reads dense MLPs and mixtures of experts.

    gated, bias: traits of the architecture; None: from hidden_act and mlp_bias. factor: ratio of width to
    hidden size, if no field states the width.
    """
    num_layers = fields.whole("num_hidden_layers")
    if gated is None:
        gated = fields.text("hidden_act") not in TWO_MATRICES
    if bias is None:
        bias = any(fields.flag(name, default=False) for name in ("mlp_bias", "use_bias", "bias"))
    fields.ignore("hidden_act")
    experts = usual_experts(fields, gated=gated, router_bias=router_bias, shared_gate=shared_gate)
    sparse = [False] * num_layers if experts is None else sparse_layers(fields, num_layers)
    mlps: list[Mlp] = []
    for i in range(num_layers):
        if sparse[i] and experts is not None:
            mlps.append(experts)
        else:
            mlps.append(DenseMlp(intermediate_size=width(fields, i, factor), gated=gated, bias=bias))
    fields.ignore("intermediate_size", "dense_intermediate_size", "intermediate_size_mlp")
    return mlps


def width(fields: Fields, layer: int, factor: int | None) -> int:
    """Returns the width of the dense MLP of a layer."""
    for name in ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size"):
        given = fields.value(name)
        if isinstance(given, list):
            widths = fields.wholes(name)
            if layer >= len(widths) or not widths[layer]:
                raise wrong(name, given, "must name the width of every layer")
            return widths[layer]
        if given is not None:
            return fields.whole(name)
    return fields.whole("intermediate_size", default=factor and factor * fields.whole("hidden_size"))


def usual_experts(
    fields: Fields, *, gated: bool, router_bias: bool, shared_gate: bool = False
) -> MixtureOfExperts | None:
    """Returns the experts of the layers with experts; None for a dense model."""
    if not scalar(fields, "num_experts"):
        fields.ignore("num_experts_per_tok", "moe_intermediate_size", "num_shared_experts")
        return None
    num_experts = scalar(fields, "num_experts") or 1
    top_k = scalar(fields, "num_experts_per_tok")
    if not top_k or top_k > num_experts:
        given = fields.value("num_experts_per_tok")
        raise wrong(
            "num_experts_per_tok", given, f"must be a whole number from 1 to num_experts={num_experts}"
        )
    of_expert = scalar(fields, "moe_intermediate_size") or fields.whole("intermediate_size")
    shared = scalar(fields, "num_shared_experts")
    shared_width = fields.count("shared_expert_intermediate_size")
    latent = [fields.whole_or_none(name) for name in ("moe_latent_size", "routed_expert_hidden_size")]
    biases = [fields.value(name) for name in ("use_moe_router_bias", "use_routing_bias")]
    noaux = fields.value("topk_method") == "noaux_tc"
    return MixtureOfExperts(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=of_expert,
        shared_intermediate_size=shared_width * (shared or 1) if shared_width else (shared or 0) * of_expert,
        shared_gate=shared_gate,
        gated=gated,
        latent_size=next((size for size in latent if size), None),
        router_bias=router_bias or noaux or any(biases),
    )


def scalar(fields: Fields, name: str) -> int | None:
    """Returns an integer, also from a list of equal integers per layer; None if missing."""
    given = fields.value(name)
    if isinstance(given, list):
        values = set(fields.wholes(name))
        if len(values) > 1:
            raise wrong(name, given, VARIES)
        return values.pop() if values else None
    return fields.count(name) or None


def sparse_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Returns which layers have experts: after the first dense ones, by a list, or at an interval."""
    first = fields.count("first_k_dense_replace")
    last = fields.value("moe_layer_end_index")
    kinds = fields.names("mlp_layer_types", ("dense", "sparse"), num_layers)
    listed = fields.value("moe_layers_enum")
    frequency = fields.value("moe_layer_freq")
    without = fields.wholes("mlp_only_layers")
    by_layer = fields.value("is_moe_layer")
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    if isinstance(by_layer, list) and len(by_layer) >= num_layers:
        return [bool(flag) for flag in by_layer[:num_layers]]
    if isinstance(listed, str):  # 4,5,6,...
        numbers = {number.strip() for number in listed.split(",")}
        return [str(i) in numbers for i in range(num_layers)]
    if isinstance(frequency, list):
        flags = fields.wholes("moe_layer_freq")
        if len(flags) < num_layers:
            raise wrong("moe_layer_freq", frequency, f"must name {num_layers} layers, names {len(flags)}")
        return [bool(flag) for flag in flags[:num_layers]]
    step = max(
        fields.whole(name, default=1)
        for name in ("moe_layer_freq", "decoder_sparse_step", "moe_layer_interval")
    )
    end = last if isinstance(last, int) and last >= 0 else num_layers
    return [first <= i <= end and (i + 1) % step == 0 and i not in without for i in range(num_layers)]


def unknown_attention(fields: Fields) -> list[Attention]:
    """Reads the attention of an unknown architecture, whose windows must be stated layer by layer.

    Raises ValueError for a window without layer_types or a pattern, because some classes use it in all layers
    and others in some.
    """
    layers = usual_attention(fields)
    stated = any(fields.value(name) is not None for name in ("layer_types", "sliding_window_pattern"))
    if not stated and any(layer.window is not None for layer in layers):
        window = fields.value("sliding_window")
        raise wrong(
            "sliding_window", window, "is of an unknown architecture; say in layer_types which layers have it"
        )
    return layers


def no_other_weights(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns no weights apart from the vocabulary's."""
    return ()


def learned_positions(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns the table of one vector per position (GPT-2, OPT)."""
    elements = fields.whole("max_position_embeddings") * fields.whole("hidden_size")
    return (OtherWeights(name="positions", elements=elements),)


def per_layer_embeddings(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns the table with a vector per token and layer, and its projections (Gemma 3n, Gemma 4)."""
    width, num_layers = fields.count("hidden_size_per_layer_input"), fields.whole("num_hidden_layers")
    rows, hidden = fields.count("vocab_size_per_layer_input"), fields.whole("hidden_size")
    if not width or not rows:
        return ()
    table = rows * num_layers * width
    projections = num_layers * width * hidden * 3
    return (OtherWeights(name="per-layer embeddings", elements=table + projections),)


def hyper_connections(fields: Fields, *, mixes: bool = True) -> tuple[OtherWeights, ...]:
    """Returns the weights of hyper-connections (hc_mult streams), two of them in each layer.

    mixes: whether they also compute the n^2 weights that mix the n streams (GLM-5.3-Flash).
    """
    n = fields.count("hc_mult")
    fields.ignore("hc_sinkhorn_iters", "hc_magnitude")
    if n < 2:
        return ()
    rows = n * (2 + n) if mixes else 2 * n
    elements = 2 * fields.whole("num_hidden_layers") * rows * n * fields.whole("hidden_size")
    return (OtherWeights(name="hyper-connections", elements=elements),)


def gated_norms(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns the weights of the low-rank gates of norms: two in layers with experts, else one."""
    hidden, rank = fields.whole("hidden_size"), fields.whole("gated_norm_rank")
    num_layers = fields.whole("num_hidden_layers")
    kinds = fields.names("mlp_layer_types", ("dense", "sparse"), num_layers) or []
    elements = (2 * num_layers - kinds.count("dense")) * 2 * hidden * rank
    return (OtherWeights(name="gates of norms", elements=elements),)


def gemma3n_tables(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns per-layer embeddings, and the matrices of LAuReL and AltUp."""
    hidden, num_layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    laurel = 2 * hidden * fields.count("laurel_rank") * num_layers
    streams = fields.count("altup_num_inputs")
    altup = 2 * max(0, streams - 1) * hidden**2
    fields.ignore("altup_active_idx", "altup_coef_clip", "altup_correct_scale", "altup_lr_multiplier")
    others = OtherWeights(name="LAuReL and AltUp", elements=laurel + altup) if laurel + altup else None
    return (*per_layer_embeddings(fields), *([others] if others else []))


def falcon_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Falcon's fields: multi_query means one KV head, unless the newer decoder states its number."""
    named = with_usual_names(config)
    newer = named.pop("new_decoder_architecture", False)
    if named.pop("multi_query", True) and not newer:
        named["num_key_value_heads"] = 1
    elif not newer:
        named.pop("num_key_value_heads", None)
    named["mlp_bias"] = named["attention_bias"] = bool(named.pop("bias", False))
    return named


def chatglm_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ChatGLM's fields: groups of queries if multi_query_attention is set."""
    named = dict(config)
    groups = named.pop("multi_query_group_num", None)
    if named.pop("multi_query_attention", False):
        named["num_key_value_heads"] = groups
    return with_usual_names(named)


def big_code_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns GPT-BigCode's fields: multi_query means one KV head."""
    named = with_usual_names(config)
    if named.pop("multi_query", True):
        named["num_key_value_heads"] = 1
    return named


def mpt_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns MPT's fields; attn_config may state the number of KV heads."""
    named = with_usual_names(config)
    inner = named.pop("attn_config", None)
    kind = inner.get("attn_type") if isinstance(inner, Mapping) else None
    if kind == "multiquery_attention":
        named["num_key_value_heads"] = 1
    elif kind == "grouped_query_attention" and isinstance(inner, Mapping):
        named["num_key_value_heads"] = inner.get("kv_n_heads")
    ratio = named.pop("expansion_ratio", 4)
    if isinstance(ratio, int) and isinstance(named.get("hidden_size"), int):
        named.setdefault("intermediate_size", ratio * named["hidden_size"])
    return named


def dbrx_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns DBRX's fields, part of which are in attn_config and ffn_config."""
    named = with_usual_names(config)
    fields = Fields(named)
    attention, ffn = (fields.part(name).config for name in ("attn_config", "ffn_config"))
    named = {name: value for name, value in named.items() if name not in ("attn_config", "ffn_config")}
    named["num_key_value_heads"] = attention.get("kv_n_heads")
    named["intermediate_size"] = ffn.get("ffn_hidden_size")
    named["num_experts"], named["num_experts_per_tok"] = ffn.get("moe_num_experts"), ffn.get("moe_top_k")
    return named


def qwen_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first Qwen's fields: intermediate_size covers gate and up projection together."""
    named = with_usual_names(config)
    width = named.get("intermediate_size")
    if isinstance(width, int):
        named["intermediate_size"] = width // 2
    return named


def muse_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Muse Spark's fields; moe_hidden_size is the width of the experts' inputs and outputs."""
    named = with_usual_names(config)
    width = named.pop("moe_hidden_size", None)
    if width != named.get("hidden_size"):
        named["moe_latent_size"] = width
    return named


def cohere2_moe_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Command A+'s fields: intermediate_size is the experts' width, dense layers have their own.

    Without layer_types, the windows of the first dense layers follow a separate pattern.
    """
    named = with_usual_names(config)
    dense = named.pop("prefix_dense_intermediate_size", None)
    named["moe_intermediate_size"] = named.get("intermediate_size")
    if dense is not None:
        named["intermediate_size"] = dense
    fields = Fields(named)
    if named.get("layer_types") is None:
        first = fields.count("first_k_dense_replace")
        of_first = fields.whole("prefix_dense_sliding_window_pattern", default=1)
        every = fields.whole("sliding_window_pattern", default=4)
        others = fields.whole("num_hidden_layers") - first
        full = [(i + 1) % of_first == 0 for i in range(first)] + [(i + 1) % every == 0 for i in range(others)]
        named["layer_types"] = ["full_attention" if flag else "sliding_attention" for flag in full]
    return named


def inkling_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Inkling's fields; published files count the first dense layers in dense_mlp_idx."""
    named = with_usual_names(config)
    first = named.pop("dense_mlp_idx", None)
    if named.get("mlp_layer_types") is None and first is not None:
        named["first_k_dense_replace"] = first
    return named


def dots3_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of dots3, which has its own name for the width of a shared expert."""
    named = dict(config)
    if "shared_experts_intermediate_size" in named:
        named["shared_expert_intermediate_size"] = named.pop("shared_experts_intermediate_size")
    return with_usual_names(named)


def v4_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns DeepSeek-V4's fields; transformers 5 names two routers in mlp_layer_types, all of experts."""
    named, kinds = dict(config), config.get("mlp_layer_types")
    if isinstance(kinds, list) and set(map(str, kinds)) <= {"hash_moe", "moe"}:
        del named["mlp_layer_types"]
    return named


def nemotron_h_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Nemotron-H's fields; newer files state the number of layers by listing their kinds."""
    named = with_usual_names(config)
    kinds = named.get("layers_block_type")
    if named.get("num_hidden_layers") is None and isinstance(kinds, list):
        named["num_hidden_layers"] = len(kinds)
    return named
