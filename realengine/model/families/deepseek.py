"""DeepSeek-V2 (Lite included) and V3: multi-head latent attention, shared experts, routing by groups."""

from __future__ import annotations

import math
from typing import Any

from hwmodels.hf.fields import Fields, wrong
from realengine.model.config_fields import check_plain_weights, check_variants, rope_of
from realengine.model.variants import ExpertRouting, LatentSizes, Scoring

DEEPSEEK_NEEDED = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def deepseek_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own."""
    check_variants(fields)
    check_plain_weights(fields)
    nope_dim, rope_dim = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    inner, num_layers = fields.whole("moe_intermediate_size"), fields.whole("num_hidden_layers")
    first = fields.count("first_k_dense_replace")
    return {
        "head_dim": nope_dim + rope_dim,
        "num_kv_heads": fields.whole("num_attention_heads"),
        "latent": LatentSizes(
            query_rank=fields.whole_or_none("q_lora_rank"),
            rank=fields.whole("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=fields.whole("v_head_dim"),
            scale=(nope_dim + rope_dim) ** -0.5 * _magnitude(fields) ** 2,
            interleaved=fields.flag("rope_interleave", default=True),
        ),
        "num_experts": fields.whole("n_routed_experts"),
        "num_experts_per_tok": fields.whole("num_experts_per_tok"),
        "moe_intermediate_size": inner,
        "norm_topk_prob": fields.flag("norm_topk_prob", default=False),
        "shared_intermediate_size": inner * fields.whole("n_shared_experts"),
        "mlp_only_layers": tuple(range(min(first, num_layers))),
        "routing": _routing(fields),
    }


def _magnitude(fields: Fields) -> float:
    """Returns the factor of queries and keys that a stretched context has besides that of the angles."""
    _, scaling = rope_of(fields)
    if scaling is None or not scaling.get("mscale_all_dim") or scaling.get("factor", 1.0) <= 1:
        return 1.0
    return float(0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0)


def _routing(fields: Fields) -> ExpertRouting:
    scale = fields.value("routed_scaling_factor")
    scale = 1.0 if scale is None else float(scale)
    groups = fields.whole("n_group", default=1)
    chosen = fields.whole("topk_group", default=groups)
    if fields.whole("n_routed_experts") % groups or chosen > groups:
        raise wrong("n_group", groups, f"must divide n_routed_experts, with topk_group={chosen} at most")
    if fields.value("model_type") == "deepseek_v3":
        return ExpertRouting(
            scoring=Scoring.sigmoid,
            num_groups=groups,
            num_chosen_groups=chosen,
            group_choices=2,
            has_correction=True,
            scale=scale,
            epsilon=1e-20,
        )
    method = fields.value("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise wrong("topk_method", method, "must be greedy or group_limited_greedy")
    if fields.flag("norm_topk_prob", default=False):
        raise wrong("norm_topk_prob", True, "DeepSeek-V2's own code does not normalise; must be false")
    if method != "group_limited_greedy":
        return ExpertRouting(scale=scale)
    return ExpertRouting(num_groups=groups, num_chosen_groups=chosen, scale=scale)
