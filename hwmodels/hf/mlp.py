"""Reads the MLP of each layer from the fields of a config.json."""

from __future__ import annotations

from hwmodels.hf.fields import Fields, wrong
from hwmodels.model.mlp import DenseMlp, MixtureOfExperts, Mlp


def dense_mlp(fields: Fields) -> list[Mlp]:
    """Reads the MLPs of a dense model."""
    mlp = DenseMlp(
        intermediate_size=fields.whole("intermediate_size"), bias=fields.flag("mlp_bias", default=False)
    )
    return [mlp] * fields.whole("num_hidden_layers")


def gemma3n_mlp(fields: Fields) -> list[Mlp]:
    """Reads the MLP of Gemma 3n, the width of which may be given per layer."""
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
    """Reads experts with a shared one as wide in each interleave_moe_layer_step-th layer or moe_layers."""
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
