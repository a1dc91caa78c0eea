"""Computes the memory and the throughput of a replica on each kind of GPU, for placement policies.

Throughput is estimated as by `layout=auto`: equal requests, as many at once as memory and slots hold, in
output tokens per second. A replica uses all memory that others leave on its GPUs for KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fieldlimits import Checked, PositiveInt, check
from hwmodels.device import TimeSlicing
from hwmodels.iterations.memory import MemoryPlan
from hwmodels.iterations.ops import decode_shape
from policies.parallelism import Load
from policies.placement import Hosting, Pool
from sim.setup.deployment import Deployment
from sim.setup.layout_choice import prompt_seconds


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
    """Returns the hosting of the textbook problem: weights only, on as few GPUs as hold them, rate 1."""
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
    """Returns, for models that fit nowhere, the reason for the last size tried on each kind of GPU."""
    lines = []
    for model in models:
        reasons = {pool: list(why.values())[-1] for (name, pool), why in refused.items() if name == model}
        lines += [f"{model} on {pool}: {why}" for pool, why in reasons.items()]
    return lines
