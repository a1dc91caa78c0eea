"""Layers of experts, ways to route to them, and their seconds."""

from dataclasses import replace

from hypothesis import strategies as st

from hwmodels.model.weights import WEIGHT_FORMATS
from hwmodels.operators.moe import MoeCurve, moe_seconds
from hwmodels.operators.moe_routing import ExpertLayer, Routing

MIXTRAL = ExpertLayer(hidden_size=4096, intermediate_size=14336, top_k=2, num_experts=8)
DEEPSEEK = ExpertLayer(hidden_size=7168, intermediate_size=2048, top_k=8, num_experts=256, ep_size=8)
BALANCED = Routing(kind="balanced")
UNIFORM = Routing(kind="uniform")
SKEWED = Routing(kind="power_law", exponent=1.2)
ZIPF = Routing(kind="zipf", exponent=0.5)

zipfs = [ZIPF, Routing(kind="zipf", exponent=0), Routing(kind="zipf", exponent=3)]
routings = st.sampled_from([BALANCED, UNIFORM, SKEWED, Routing(kind="power_law", exponent=1.01), *zipfs])
layers = st.sampled_from([MIXTRAL, DEEPSEEK, replace(DEEPSEEK, ep_size=1), replace(MIXTRAL, gated=False)])
formats = st.sampled_from(["bf16", "fp8", "fp8_block", "int4_wo", "mxfp4"])
token_counts = st.integers(1, 20_000)


def seconds(
    num_tokens, layer=MIXTRAL, *, device, weights="bf16", routing=BALANCED, curve=None, kernels="vllm"
):
    return moe_seconds(
        num_tokens,
        layer,
        WEIGHT_FORMATS[weights],
        device,
        curve or MoeCurve(),
        routing=routing,
        kernels=kernels,
    )
