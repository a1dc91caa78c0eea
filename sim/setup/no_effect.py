"""Refuses settings of a deployment that would be accepted without an effect, or contradict each other."""

from __future__ import annotations

from hwmodels.devices.device import Device
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels.rooflines import DividesAttention, LatencyLevel
from hwmodels.model.model_spec import ModelSpec
from policies.batching import Batching, BatchingTraits
from policies.caching.pool import Caching
from policies.core.ranks import DataParallel
from policies.user_code.traits import name_of, traits_of
from sim.setup.engine_profile import EngineProfile

ROUTING = "engine.kernels.routing"


def check_ranks(batching: Batching, layout: ParallelLayout, latency: LatencyLevel) -> None:
    """Raises ValueError if a batching policy waits for another number of attention groups than there are.

    With one group there is no number to contradict; `delayer_note` says what the policy does then.
    """
    num_ranks = traits_of(batching, BatchingTraits).num_ranks
    if num_ranks is None:
        return
    groups = num_groups(layout, latency)
    if groups > 1 and num_ranks != groups:
        raise ValueError(
            f"batching.num_ranks={num_ranks}: must be {groups}, the attention groups of a replica "
            f"(attention_data_parallel_size={layout.attention_data_parallel_size}), as prompts wait until "
            "there is one for each"
        )


def check_shares(ranks: DataParallel | None, engine: EngineProfile, batching: Batching) -> None:
    """Raises ValueError unless each rank of data-parallel attention has a share of the limits."""
    limits = {
        "engine.max_num_seqs": engine.max_num_seqs,
        "batching.max_num_batched_tokens": traits_of(batching, BatchingTraits).max_num_batched_tokens,
        "engine.num_kv_blocks": engine.num_kv_blocks,
    }
    for name, limit in limits.items():
        if ranks is not None and limit is not None and limit < ranks.size:
            raise ValueError(
                f"{name}={limit}: must be >= {ranks.size}, one for each rank of data-parallel attention; it "
                "is that of a replica, of which each rank has an equal share"
            )


def ranks_note(ranks: DataParallel, engine: EngineProfile, batching: Batching) -> str:
    """Returns a note on the share of the limits that each rank of data-parallel attention has."""
    shares = [f"{engine.max_num_seqs // ranks.size:,} of max_num_seqs={engine.max_num_seqs:,}"]
    budget = traits_of(batching, BatchingTraits).max_num_batched_tokens
    if budget is not None:
        shares.append(f"{budget // ranks.size:,} of max_num_batched_tokens={budget:,}")
    return (
        f"Each of the {ranks.size} ranks of data-parallel attention has a share of the limits: "
        f"{' and '.join(shares)}."
    )


def delayer_note(batching: Batching, layout: ParallelLayout, latency: LatencyLevel) -> str:
    """Returns a note if prompts wait for attention groups that a replica does not have; empty if not."""
    num_ranks = traits_of(batching, BatchingTraits).num_ranks
    if num_ranks is not None and num_ranks > 1 == num_groups(layout, latency):
        return (
            f"batching.num_ranks={num_ranks}: prompts wait for so many attention groups, and a "
            "replica has one; set attention_data_parallel_size to the same number."
        )
    return ""


def num_groups(layout: ParallelLayout, latency: LatencyLevel) -> int:
    """Returns the number of groups of devices that compute attention for sequences of their own."""
    if isinstance(latency, DividesAttention):
        return latency.num_attention_groups(layout)
    return layout.attention_data_parallel_size


def check_experts(
    model: ModelSpec, engine: EngineProfile, layout: ParallelLayout, latency: LatencyLevel
) -> None:
    """Raises ValueError for the routing to single experts of a model that has none, or all on one rank."""
    routing = engine.kernels.routing
    given = {
        "num_redundant_experts": (routing.num_redundant_experts, 0),
        "placement": (routing.placement, "dealt"),
        "loads": (routing.loads, None),
    }
    for name, (value, default) in given.items():
        if value != default and not model.has_experts:
            shown = f"{len(routing.loads)} numbers" if name == "loads" and routing.loads else value
            usual = "null, with kind=zipf" if default is None else default
            raise ValueError(
                f"{ROUTING}.{name}={shown}: {model.name} has no experts; set it to {usual}, or choose a "
                "mixture of experts, such as model=qwen3_30b_a3b"
            )
    if (
        routing.placement != "dealt"
        and layout.expert_parallel_size == 1
        and not isinstance(latency, DividesAttention)
    ):
        raise ValueError(
            f"{ROUTING}.placement={routing.placement}, expert_parallel_size=1: all experts are on one "
            "rank; set expert_parallel_size, or placement=dealt"
        )


def check_chain(hardware: Device, engine: EngineProfile, caching: Caching) -> None:
    """Raises ValueError for what a chain of chips with the model in SRAM does not do."""
    if hardware.chain is None:
        return
    machine = f"{hardware.name} holds the model in the SRAM of its chips"
    offload = engine.offload
    for name, value, unused in (
        ("cpu_offload_gb", offload.cpu_offload_gb, 0.0),
        ("n_gpu_layers", offload.n_gpu_layers, None),
    ):
        if value != unused:
            raise ValueError(
                f"engine.offload.{name}={value:g}: {machine}, and reads none from a host; set it to "
                f"{'null' if unused is None else 0}"
            )
    kernels = engine.kernels.attention_kernels
    if kernels is not None:
        raise ValueError(
            f"engine.kernels.attention_kernels={kernels}: {machine}, where no GPU kernels run; set it to null"
        )
    if caching.weight_reads is not None:
        raise ValueError(
            f"caching={name_of(caching)}: {machine}, and reading attention weights there is not modelled; "
            "choose caching=streaming_llm, or a GPU"
        )
