"""The facts and estimates from which a layout policy (`layout=`) chooses parallel sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from hwmodels.assembly.roofline import Roofline
from hwmodels.iterations import IterationModel, IterationShape, causal_pairs
from hwmodels.iterations.ops import decode_shape, largest_batch, prefill_shape
from hwmodels.iterations.stages import Pipeline
from hwmodels.model.model_spec import MixtureOfExperts
from policies.parallelism import Facts, Figures, LayoutChoice, LayoutPolicy, Load, Sizes
from sim.setup.deployment import Deployment


def chosen_layout(
    policy: LayoutPolicy, deployment: Deployment, limits_s: Mapping[str, float] | None = None
) -> LayoutChoice:
    """Returns the layout that a policy chooses for a deployment.

    limits_s: the limits of the SLO in seconds, by term. Raises ValueError if the choice is not possible.
    """

    def estimate(sizes: Sizes, load: Load) -> Figures:
        return figures_of(replace(deployment, **sizes._asdict()), load)

    choice = policy.choose(facts_of(deployment, limits_s or {}), estimate)
    replace(deployment, **choice.sizes._asdict())
    return choice


def facts_of(deployment: Deployment, limits_s: Mapping[str, float]) -> Facts:
    """Returns the facts about a deployment that a layout policy may use."""
    model, device = deployment.model, deployment.hardware
    attentions = [block.attention for block in model.blocks]
    experts = [block.mlp.num_experts for block in model.blocks if isinstance(block.mlp, MixtureOfExperts)]
    return Facts(
        model=model.name,
        gpu=device.name,
        num_heads=min(attention.num_query_heads for attention in attentions),
        num_kv_heads=min(attention.num_kv_heads for attention in attentions),
        num_layers=model.num_layers,
        num_experts=max(experts, default=0),
        shares_kv=any(attention.kv_is_latent for attention in attentions),
        weight_bytes=model.weight_bytes_per_rank(),
        gpu_memory_bytes=device.memory_bytes,
        gpus_per_node=device.gpus_per_node,
        given=Sizes(*(getattr(deployment, name) for name in Sizes._fields)),
        limits_s=limits_s,
    )


def figures_of(deployment: Deployment, load: Load) -> Figures:
    """Estimates latencies and batch sizes of a deployment with its layout.

    Raises ValueError if the layout is not possible, or if the model or a sequence does not fit.
    """
    tokens = load.prompt_tokens + load.output_tokens
    if tokens > deployment.max_model_len:
        raise ValueError(
            f"layout.prompt_tokens={load.prompt_tokens}, layout.output_tokens={load.output_tokens}: must be "
            f"<= {deployment.max_model_len} together, the longest sequence that is served"
        )
    memory = deployment.plan_memory()
    model = deployment.iteration_model()
    context = load.prompt_tokens + load.output_tokens // 2

    def bounds(num_seqs: int) -> dict[str, float]:
        shares: dict[str, float] = defaultdict(float)
        for line in model.explain(decode_shape(num_seqs, context)):
            shares[line.bound] += line.share
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    return Figures(
        max_num_seqs=largest_batch(memory, tokens, deployment.max_num_seqs).num_seqs,
        prefill_s=prefill_seconds(model, load.prompt_tokens, deployment.max_num_batched_tokens),
        prompt_s=prompt_seconds(model, load.prompt_tokens, deployment.max_num_batched_tokens),
        decode_s=lambda num_seqs: float(model.seconds(decode_shape(num_seqs, context))),
        bounds=bounds,
        usd_per_hour=deployment.hardware.price_usd_per_hour * deployment.layout.num_devices,
    )


def prefill_seconds(model: IterationModel, prompt_tokens: int, budget: int) -> float:
    """Returns the prefill seconds of one prompt alone, in chunks if it is longer than the token budget.

    In a pipeline the chunks follow each other through the stages.
    """
    shapes = list(_chunks(prompt_tokens, budget))
    if not isinstance(model, Roofline) or model.stages is None:
        return sum(float(model.seconds(shape)) for shape in shapes)
    pipeline = Pipeline(len(model.stages.all))
    return max(pipeline.enter(model.stage_times(shape), 0.0) for shape in shapes)


def prompt_seconds(model: IterationModel, prompt_tokens: int, budget: int) -> float:
    """Returns the prefill seconds per prompt if iterations are filled with prompts."""
    at_once = budget // prompt_tokens
    if isinstance(model, Roofline) and model.stages is not None:  # full batches follow each other
        shapes = [prefill_shape(at_once, prompt_tokens)] if at_once else list(_chunks(prompt_tokens, budget))
        times = [model.stage_times(shape) for shape in shapes]
        slowest_s = [max(own_s + batch.send_s for own_s in batch.stage_s) for batch in times]
        return sum(slowest_s) / max(at_once, 1)
    if at_once:
        return float(model.seconds(prefill_shape(at_once, prompt_tokens))) / at_once
    return sum(float(model.seconds(shape)) for shape in _chunks(prompt_tokens, budget))


def _chunks(prompt_tokens: int, budget: int) -> Iterator[IterationShape]:
    for cached in range(0, prompt_tokens, budget):
        num_new = min(budget, prompt_tokens - cached)
        end = cached + num_new
        yield IterationShape(0, 0, 1, num_new, causal_pairs(num_new, cached), end, int(end == prompt_tokens))
