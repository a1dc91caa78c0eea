"""MLP operators of one layer on one rank, for each kind of MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import Operator, Per, per_token
from hwmodels.model.model_spec import MixtureOfExperts, Mlp, NoMlp
from hwmodels.model.weights import WEIGHT_FORMATS, Matrix, Role
from hwmodels.operators.moe import moe_flops, moe_seconds, moe_weight_bytes
from hwmodels.operators.moe_routing import ExpertLayer
from hwmodels.operators.systolic import systolic_moe_seconds

EXPERT_KERNELS = 8
"""Kernel launches of a fused layer of experts: top-k, sort and count tokens, two GEMMs, activation, sum."""


def mlp_operators(site: Site, mlp: Mlp, calls: float) -> Iterator[Operator]:
    """Yields the operators of an MLP, dense or with experts, and of the all-reduce after it."""
    if isinstance(mlp, NoMlp):
        return
    if isinstance(mlp, MixtureOfExperts):
        yield from experts(site, mlp, calls)
    else:
        up, down = mlp.matrices(site.model.hidden_size, site.ranks)
        yield from dense(site, up, down, calls)
        yield from site.reduced("mlp", calls)


def dense(site: Site, up: Matrix, down: Matrix, calls: float) -> Iterator[Operator]:
    """Yields the two GEMMs of a dense MLP, and the activation between them."""
    yield from site.gemm(up, calls)
    yield site.stream("activation", calls, (up.n + down.k) * site.model.element_bytes)
    yield from site.gemm(down, calls)


def experts(site: Site, mlp: MixtureOfExperts, calls: float) -> Iterator[Operator]:
    """Yields the router, the messages to the experts, their grouped GEMMs, and the shared experts."""
    by_name = {matrix.name: matrix for matrix in mlp.matrices(site.model.hidden_size, site.ranks)}
    yield from site.gemm(by_name["router"], calls)
    to_latent = mlp.latent_matrices(site.model.hidden_size)
    for matrix in to_latent[:1]:
        yield from site.gemm(matrix, calls)
    yield from to_experts(site, mlp, "dispatch", calls)
    yield routed(site, mlp, by_name["expert_down_proj"].k, calls)
    yield from to_experts(site, mlp, "combine", calls)
    for matrix in to_latent[1:]:
        yield from site.gemm(matrix, calls)
    if "shared_down_proj" in by_name:
        up = by_name["shared_gate_up_proj" if mlp.gated else "shared_up_proj"]
        yield from dense(site, up, by_name["shared_down_proj"], calls)
    if mlp.shared_gate:
        # A product with one column reads the hidden state; its sigmoid scales the shared experts' output,
        # which is added to that of the routed ones.
        yield site.stream("shared_gate", calls, site.hidden_bytes)
        yield site.stream("shared_sum", calls, 3 * site.hidden_bytes)
    if site.layout.num_token_groups == 1:
        yield from site.reduced("mlp", calls)


def routed(site: Site, mlp: MixtureOfExperts, width: int, calls: float) -> Operator:
    """Returns the fused operator of this rank's routed experts; width: intermediate size on this rank."""
    layer = ExpertLayer(
        hidden_size=mlp.expert_hidden_size(site.model.hidden_size),
        intermediate_size=width,
        top_k=mlp.top_k,
        num_experts=mlp.num_experts,
        ep_size=site.ranks.expert,
        gated=mlp.gated,
    )
    token_bytes = layer.hidden_size * site.model.element_bytes
    weights, device = site.stored(Role.routed, site.formats.get("expert_down_proj"))
    if weights.name == "fp8":
        # With one scale per tensor: the kernels measured in this format on Hopper take five times as long as
        # those for blocks, and engines do not run them (vLLM on Llama-4-Scout: 21 ms per token, not 87).
        weights = WEIGHT_FORMATS["fp8_block"]
    curve, routing = site.calibration.moe, site.kernels.routing
    routing.check(layer)
    library = expert_library(site)

    def seconds(batch: RankBatch) -> Any:
        tokens = batch.all_tokens
        if device.systolic is not None:
            return systolic_moe_seconds(
                tokens, layer, weights, device, curve, dtype=site.dtype, routing=routing
            )
        return moe_seconds(
            tokens, layer, weights, device, curve, dtype=site.dtype, kernels=library, routing=routing
        )

    def stored(batch: RankBatch) -> Any:
        return moe_weight_bytes(batch.all_tokens, layer, weights, routing=routing)

    return Operator(
        name="experts",
        component="gemm",
        per=Per.any_token,
        calls=calls,
        seconds=seconds,
        flops=lambda batch: moe_flops(batch.all_tokens, layer) / layer.ep_size,
        stored_bytes=stored,
        bytes_moved=lambda batch: stored(batch) + 2 * token_bytes * batch.all_tokens,
        dtype=weights.compute_dtype(device, site.model.dtype),
        kernels=EXPERT_KERNELS,
    )


def expert_library(site: Site) -> str:
    """Returns the library whose kernels run the routed experts.

    SGLang's own choice is known without messages to other ranks; with them DeepEP brings other kernels.
    """
    backend = site.kernels.moe_backend
    with_messages = site.layout.num_token_groups > 1
    return site.kernels.library if backend == "auto" or (backend == "sglang" and with_messages) else backend


def to_experts(site: Site, mlp: MixtureOfExperts, direction: str, calls: float) -> Iterator[Operator]:
    """Yields the messages that carry tokens to their experts' devices ("dispatch") and back ("combine").

    They exist with attention data parallelism or context parallelism only. If every device holds some experts
    whole, it is an all-to-all of top_k copies of each token. If each holds a slice of every expert, every
    token goes to every device (all-gather) and the slices are summed (reduce-scatter).
    """
    layout = site.layout
    hidden_bytes = mlp.expert_hidden_size(site.model.hidden_size) * site.model.element_bytes
    if layout.num_token_groups == 1:
        return
    if layout.expert_parallel_size > 1:
        copies = min(mlp.top_k, layout.expert_parallel_size)
        yield site.message(
            "all_to_all",
            f"expert_{direction}",
            calls,
            per_token(copies * hidden_bytes / site.tp),
            layout.stage_size,
        )
    else:
        ranks = layout.num_token_groups
        collective = "all_gather" if direction == "dispatch" else "reduce_scatter"
        whole = per_token(ranks * hidden_bytes)
        nodes = layout.nodes_spanned(ranks, site.device, stride=site.tp)
        yield site.message(collective, f"expert_{direction}", calls, whole, ranks, nodes=nodes)
