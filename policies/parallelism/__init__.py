"""Layout policies: they choose the parallel sizes with which a model is split over GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

SHORT_NAMES = ("tensor", "pipeline", "context", "attention data")


class Sizes(NamedTuple):
    """Parallel sizes of one replica. The number of GPUs is the product of the first four."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    expert_parallel_size: int = 1
    """Number of groups of a pipeline stage's GPUs over which whole experts are distributed."""
    sequence_parallel: bool = False

    @property
    def num_devices(self) -> int:
        return prod(self[:4])

    def __str__(self) -> str:
        """Returns a readable form such as "tensor 4 x pipeline 2"; "one GPU" without parallelism."""
        parts = [f"{name} {size}" for name, size in zip(SHORT_NAMES, self[:4], strict=True) if size > 1]
        experts = f", expert {self.expert_parallel_size}" if self.expert_parallel_size > 1 else ""
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        return " x ".join(parts) + experts + sequence if parts else "one GPU"


ALONE = Sizes()
"""Sizes of a model on a single GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The properties of the model, the machine and the run that a policy may read."""

    model: str
    gpu: str
    num_heads: int
    num_kv_heads: int
    num_layers: int
    num_experts: int = 0
    """Number of routed experts; 0: the model has none."""
    shares_kv: bool = False
    """Whether all heads share a latent vector per token (MLA), which tensor-parallel ranks duplicate."""
    weight_bytes: float
    gpu_memory_bytes: float
    gpus_per_node: int
    given: Sizes = ALONE
    """Sizes set explicitly in the run's settings."""
    limits_s: Mapping[str, float] = field(default_factory=dict)
    """SLO limits of the run in seconds, by term (ttft, tpot, e2e); only terms that are set."""


class Load(NamedTuple):
    """Lengths of the requests for which a layout is evaluated; all are equal."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Estimated performance and cost of a layout."""

    max_num_seqs: int
    """Maximum number of concurrent sequences of this load, limited by KV memory and slots."""
    prefill_s: float
    """Prefill time of a single prompt, in seconds."""
    prompt_s: float
    """Additional prefill time per prompt in iterations full of prompts, in seconds."""
    decode_s: Callable[[int], float]
    """Time of a decode iteration of n sequences halfway through their outputs, in seconds."""
    bounds: Callable[[int], Mapping[str, float]]
    """Shares of that iteration's time by bound (such as memory bandwidth), the largest first."""
    usd_per_hour: float


Estimate = Callable[[Sizes, Load], Figures]
"""Estimates a layout; raises ValueError for sizes that the model, the memory or the links do not allow."""


class LayoutChoice(NamedTuple):
    """The chosen sizes, and the reasons as lines for the run's notes."""

    sizes: Sizes
    notes: tuple[str, ...] = ()


class LayoutPolicy(Protocol):
    """Chooses the parallel sizes of a replica's model."""

    def choose(self, facts: Facts, estimate: Estimate) -> LayoutChoice:
        """Returns the layout. Raises ValueError with the reasons if no layout is possible."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AsSet:
    """Uses the sizes of the run's settings, such as tensor_parallel_size=2, like engines."""

    def choose(self, facts: Facts, estimate: Estimate) -> LayoutChoice:
        """Returns the sizes of the run's settings."""
        return LayoutChoice(facts.given)
