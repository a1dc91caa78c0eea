"""Finds what a measured table lacks of a model, and refuses tables that are of another model.

A table may have layers with experts as a whole (any operator whose name has `expert` or `moe` in it);
otherwise the roofline prices the experts, their router and the experts that all tokens share. What a table
cannot describe (several kinds of attention, linear attention) is refused, and so is a table of other layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hwmodels.iterations.ops import Operator
from hwmodels.levels.profile import Profile
from hwmodels.levels.readers import DENSE_MLP, Layers
from hwmodels.model import DenseMlp, MixtureOfExperts, ModelSpec
from hwmodels.model.attention import LatentAttention
from hwmodels.model.recurrent import BesideAttention, RecurrentLayer
from hwmodels.operators.moe_routing import ExpertLayer, Routing, rank_loads

SHARED = {"shared_gate_up_proj", "shared_up_proj", "shared_down_proj"}
OTHERS = "choose latency=calibrated, or the table of this model"


def layers_of(model: ModelSpec, routing: Routing) -> Layers:
    """Returns the numbers of layers of a model; routing: distribution of tokens over experts."""
    routed = [block.mlp for block in model.blocks if isinstance(block.mlp, MixtureOfExperts)]
    if not routed:
        return Layers(model.num_layers, model.num_layers)
    layer = ExpertLayer(
        hidden_size=routed[0].expert_hidden_size(model.hidden_size),
        intermediate_size=routed[0].intermediate_size,
        top_k=routed[0].top_k,
        num_experts=routed[0].num_experts,
    )
    return Layers(
        all=model.num_layers,
        dense_mlps=num_dense_mlps(model) or model.num_layers,
        experts=sum(block.count for block in model.blocks if isinstance(block.mlp, MixtureOfExperts)),
        active_experts=lambda tokens: rank_loads(tokens, layer, routing).active_experts,
    )


def num_dense_mlps(model: ModelSpec) -> int:
    """Returns the layers in which a dense MLP runs; without any, those with experts that all tokens share."""
    dense = sum(block.count for block in model.blocks if isinstance(block.mlp, DenseMlp))
    shared = sum(
        block.count
        for block in model.blocks
        if isinstance(block.mlp, MixtureOfExperts) and block.mlp.shared_intermediate_size
    )
    return dense or shared


def lacking(profile: Profile, operators: Iterable[Operator], model: ModelSpec) -> tuple[Operator, ...]:
    """Returns the operators of layers with experts that the table does not have; operators: of the model."""
    names = [operator.name.lower() for operator in profile.operators]
    if not model.has_experts or any(re.search(r"(?<!shared_)expert|moe", name) for name in names):
        return ()
    some_dense = any(isinstance(block.mlp, DenseMlp) for block in model.blocks)
    shared = any("shared" in name for name in names) or (not some_dense and bool(DENSE_MLP & {*names}))
    router = any(name == "gate" or "router" in name for name in names)
    wanted = {"experts"} | (set() if router else {"router"}) | (set() if shared else SHARED)
    return tuple(operator for operator in operators if operator.name in wanted)


def check_covers(profile: Profile, model: ModelSpec) -> None:
    """Raises ValueError if the rows cannot be those of the model's layers."""
    calls = {operator.name: operator.calls for operator in profile.operators}
    kinds = {block.attention for block in model.blocks}
    if any(isinstance(kind, RecurrentLayer | BesideAttention) for kind in kinds):
        raise ValueError(
            f"{model.name} has linear attention, which tables do not describe; choose latency=calibrated"
        )
    if len(kinds) > 1 and profile.attention is not None:
        raise ValueError(
            f"{model.name} has {len(kinds)} kinds of attention, tables have one; choose latency=calibrated"
        )
    if "qkv_proj" in calls and any(isinstance(kind, LatentAttention) for kind in kinds):
        raise ValueError(f"qkv_proj: {model.name} has latent attention without such a matrix; {OTHERS}")
    most = num_dense_mlps(model)
    for name in sorted(DENSE_MLP) if model.has_experts else ():
        if calls.get(name, 0) > most:
            layers = f"a dense MLP in {most} layers only" if most else "experts in place of a dense MLP"
            raise ValueError(f"{name}: calls={calls[name]}: {model.name} has {layers}; {OTHERS}")
