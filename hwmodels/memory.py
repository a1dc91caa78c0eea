"""What a device's memory is spent on, and how many KV blocks are left."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hwmodels.checks import check_whole
from hwmodels.device import Device
from hwmodels.host import CudaGraphs
from hwmodels.model_spec import ModelSpec

GIB = 2.0**30

RUNTIME_BYTES = 0.75 * GIB
"""What the driver keeps back of the total it reports (some 0.4 GiB), CUDA context, library workspaces."""

GRAPH_BYTES = 4 * 2.0**20
"""Of one captured graph besides the shared activation pool: kernel parameters; 51 graphs take 0.2 GiB."""

SAMPLER_BYTES_PER_LOGIT = 16
"""fp32 logits, their sorted copy, the sort's 64-bit indices: what top-p sampling holds at its peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """One device's memory, in bytes; all ranks are alike.

    usable = weights + activations + graphs + runtime + KV blocks + a rest smaller than a block
    """

    usable_bytes: float
    """memory_bytes x gpu_memory_utilization; all of memory_bytes where the number of blocks is given."""
    weights_bytes: float
    activation_bytes: float
    cuda_graph_bytes: float
    runtime_bytes: float
    kv_bytes_per_token: float
    block_size: int
    num_blocks: int
    """Physical blocks, a null block included if the engine keeps one."""

    @property
    def kv_bytes(self) -> float:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def fixed_bytes(self) -> float:
        """Everything but KV."""
        return self.weights_bytes + self.activation_bytes + self.cuda_graph_bytes + self.runtime_bytes


def plan_memory(
    *,
    model: ModelSpec,
    device: Device,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    block_size: int = 16,
    num_kv_blocks: int | None = None,
    cuda_graphs: CudaGraphs | None = None,
) -> MemoryPlan:
    """Share out each device's memory; num_kv_blocks fixes the number of blocks, else they fill what is left.

    Llama-3.1-8B on an RTX 4090 at 0.9, defaults: 21.59 GiB usable - 14.96 weights - 0.55 activations
    - 0.25 graphs - 0.75 runtime = 5.08 GiB of KV: 2,602 blocks of 16 tokens (vLLM 0.19 itself found 2,588).
    Raises ValueError where not one block fits, with the smallest tensor parallelism that would do, and where
    num_kv_blocks do not fit the device.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization}: must be a share, > 0 and <= 1")
    limits = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "block_size": block_size,
    }
    if num_kv_blocks is not None:
        limits["num_kv_blocks"] = num_kv_blocks
    for name, value in limits.items():
        check_whole(name, value)
    device.check_node_holds(tensor_parallel_size)
    model.check_tensor_parallel_size(tensor_parallel_size)
    model = replace(model, dtype=device.compute_dtype(model.dtype))

    budget_bytes = device.memory_bytes * (gpu_memory_utilization if num_kv_blocks is None else 1)

    def without_kv(num_ranks: int) -> MemoryPlan:
        return MemoryPlan(
            usable_bytes=budget_bytes,
            weights_bytes=model.weight_bytes_per_rank(num_ranks),
            activation_bytes=activation_bytes(model, num_ranks, max_num_batched_tokens, max_num_seqs),
            cuda_graph_bytes=cuda_graph_bytes(model, num_ranks, cuda_graphs or CudaGraphs()),
            runtime_bytes=RUNTIME_BYTES,
            kv_bytes_per_token=model.kv_bytes_per_token(num_ranks),
            block_size=block_size,
            num_blocks=0,
        )

    def missing_bytes(num_ranks: int) -> float:
        """What a rank would need beyond its budget; not positive where it fits."""
        plan = without_kv(num_ranks)
        return plan.fixed_bytes + (num_kv_blocks or 1) * block_size * plan.kv_bytes_per_token - budget_bytes

    missing = missing_bytes(tensor_parallel_size)
    if missing > 0:
        sizes = [2**n for n in range(device.gpus_per_node.bit_length()) if 2**n <= device.gpus_per_node]
        fitting = [
            n for n in sizes if n > tensor_parallel_size and model.divides(n) and missing_bytes(n) <= 0
        ]
        remedy = f"smallest that fits: {fitting[0]}" if fitting else f"none up to {sizes[-1]} fits"
        blocks = f" with {num_kv_blocks} KV blocks" if num_kv_blocks else ""
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size}: {model.name}{blocks} needs "
            f"{(budget_bytes + missing) / GIB:.1f} GiB on each {device.name}, {missing / GIB:.1f} GiB more "
            f"than the {budget_bytes / GIB:.1f} GiB it may use; {remedy}"
        )
    plan = without_kv(tensor_parallel_size)
    if num_kv_blocks is None:
        num_kv_blocks = int((budget_bytes - plan.fixed_bytes) // (block_size * plan.kv_bytes_per_token))
    return replace(plan, num_blocks=num_kv_blocks)


def activation_bytes(
    model: ModelSpec, num_ranks: int, max_num_batched_tokens: int, max_num_seqs: int
) -> float:
    """Peak of one forward pass over the largest batch; layers reuse each other's buffers.

    In the MLP: residual and input (2 hidden), gate and up, their product. After the last layer: the logits of
    max_num_seqs rows with the sampler's copies. Whichever is larger.
    """
    hidden, mlp = model.hidden_size, (3 if model.gated_mlp else 2) * model.intermediate_size / num_ranks
    in_mlp = max_num_batched_tokens * (2 * hidden + mlp) * model.element_bytes
    in_sampler = max_num_seqs * model.vocab_size * (model.element_bytes + SAMPLER_BYTES_PER_LOGIT)
    return max(in_mlp, in_sampler)


def cuda_graph_bytes(model: ModelSpec, num_ranks: int, graphs: CudaGraphs) -> float:
    """Captured graphs share one pool of activations, as large as the largest capture needs."""
    if not graphs.enabled:
        return 0.0
    largest = graphs.sizes[-1]
    return len(graphs.sizes) * GRAPH_BYTES + activation_bytes(model, num_ranks, largest, 0)
