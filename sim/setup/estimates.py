"""Estimates for a deployment without a simulation, from which layout and placement policies choose.

The memory and the throughput of a replica on each kind of GPU are for placement policies. Throughput in
output tokens per second is estimated as in `layout=auto`: equal requests, with as many at once as memory and
slots allow. A replica uses all remaining memory on its GPUs for KV.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fieldlimits import Checked, PositiveInt, check
from hwmodels.assembly.roofline import Roofline
from hwmodels.device import TimeSlicing
from hwmodels.iterations import IterationModel, IterationShape, causal_pairs
from hwmodels.iterations.layout import Pipeline
from hwmodels.iterations.memory import MemoryPlan
from hwmodels.iterations.ops import decode_shape, largest_batch, prefill_shape
from hwmodels.model import MixtureOfExperts
from policies.parallelism import Facts, Figures, LayoutChoice, LayoutPolicy, Load, Sizes
from policies.placement import Hosting, Pool
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaNeeds(Checked):
    """The load that a replica must serve, and the layouts to be tried."""

    load: Load
    min_seqs: PositiveInt = 1
    """Minimum number of sequences of that load that a replica must hold."""
    tensor_parallel_sizes: tuple[int, ...] = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        check(self)
        for name, value in (("prompt", self.load.prompt_tokens), ("output", self.load.output_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be >= 1 token")
        sizes = self.tensor_parallel_sizes
        if not sizes or any(size < 1 or size & (size - 1) for size in sizes):
            raise ValueError(f"tensor_parallel_sizes={[*sizes]}: must be one or more of 1, 2, 4, 8, ...")


def pool_of(name: str, count: int, deployment: Deployment, slicing: TimeSlicing) -> Pool:
    """Returns a pool of `count` GPUs of the hardware of a deployment."""
    device = deployment.hardware
    return Pool(
        name=name,
        count=count,
        memory_bytes=deployment.usable_bytes,
        usd_per_hour=device.price_usd_per_hour,
        gpus_per_node=device.gpus_per_node,
        switch_share=slicing.switch_share(device),
    )


def hostings_of(
    model: str, pool: str, deployment: Deployment, needs: ReplicaNeeds
) -> tuple[list[Hosting], dict[int, str]]:
    """Returns a hosting per tensor parallel size that fits the model, and the reasons against the others."""
    found, refused = [], {}
    for size in needs.tensor_parallel_sizes:
        try:
            cut = replace(deployment, tensor_parallel_size=size)
            plan = cut.plan_memory()
            bytes_each = plan.fixed_bytes + needs.min_seqs * _sequence_bytes(plan, needs.load)
            if bytes_each > plan.usable_bytes:
                raise ValueError(f"min_seqs={needs.min_seqs}: {bytes_each / 1e9:.1f} GB on each GPU")
        except ValueError as error:
            refused[size] = str(error)
            continue
        rate = _rate(cut, plan, needs.load)
        found.append(Hosting(model=model, pool=pool, num_gpus=size, bytes_each=bytes_each, rate=rate))
    return found, refused


def weights_only(
    model: str, pool: Pool, weight_bytes: float, sizes: Sequence[int] = (1, 2, 4, 8)
) -> list[Hosting]:
    """Returns the hosting of the textbook problem: only weights, on the minimum number of GPUs, rate 1."""
    fitting = [size for size in sizes if weight_bytes / size <= pool.memory_bytes]
    return [
        Hosting(model=model, pool=pool.name, num_gpus=size, bytes_each=weight_bytes / size, rate=_one)
        for size in fitting[:1]
    ]


def _one(num_bytes: float) -> float:
    return 1.0


def _sequence_bytes(plan: MemoryPlan, load: Load) -> float:
    """Returns the bytes of KV and states of one sequence on one GPU, in whole blocks."""
    blocks = plan.state_blocks - (-(load.prompt_tokens + load.output_tokens) // plan.block_size)
    return blocks * plan.block_size * plan.kv_bytes_per_token


def _rate(deployment: Deployment, plan: MemoryPlan, load: Load) -> Callable[[float], float]:
    """Returns the function from the bytes of memory on each GPU to output tokens/s."""
    model = deployment.iteration_model()
    prompt_s = prompt_seconds(model, load.prompt_tokens, deployment.max_num_batched_tokens)
    context = load.prompt_tokens + load.output_tokens // 2
    known: dict[int, float] = {}

    def tokens_per_s(num_seqs: int) -> float:
        step_s = float(model.seconds(decode_shape(num_seqs, context)))
        return num_seqs * load.output_tokens / (num_seqs * prompt_s + load.output_tokens * step_s)

    def rate(num_bytes: float) -> float:
        held = int((num_bytes - plan.fixed_bytes) / _sequence_bytes(plan, load) * (1 + 1e-12))
        num_seqs = max(1, min(held, deployment.max_num_seqs))
        if num_seqs not in known:
            known[num_seqs] = tokens_per_s(num_seqs)
        return known[num_seqs]

    return rate


def refusals(refused: Mapping[tuple[str, str], Mapping[int, str]], models: Sequence[str]) -> list[str]:
    """Returns, for models that fit nowhere, the reason for the last tried size on each kind of GPU."""
    lines = []
    for model in models:
        reasons = {pool: list(why.values())[-1] for (name, pool), why in refused.items() if name == model}
        lines += [f"{model} on {pool}: {why}" for pool, why in reasons.items()]
    return lines
