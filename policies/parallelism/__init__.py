"""Layout policies: how a replica's model is split over devices. One policy per file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

SHORT_NAMES = ("tensor", "pipeline", "context", "attention data")


class Sizes(NamedTuple):
    """Parallel sizes of one replica. The number of devices is the product of the first four."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    expert_parallel_size: int = 1
    """Number of groups of a stage's devices that hold whole experts."""
    sequence_parallel: bool = False

    @property
    def num_devices(self) -> int:
        return prod(self[:4])

    def __str__(self) -> str:
        """Readable form such as "tensor 4 x pipeline 2"; "no cut" for one device."""
        cuts = [f"{name} {size}" for name, size in zip(SHORT_NAMES, self[:4], strict=True) if size > 1]
        experts = f", expert {self.expert_parallel_size}" if self.expert_parallel_size > 1 else ""
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        return " x ".join(cuts) + experts + sequence if cuts else "no cut"


ALONE = Sizes()
"""Sizes of a single device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The model, the machine and the run, as far as a policy knows them."""

    model: str
    gpu: str
    num_heads: int
    num_kv_heads: int
    num_layers: int
    num_experts: int = 0
    """Number of routed experts; 0: the model has none."""
    shares_kv: bool = False
    """Whether one latent vector per token serves all heads (MLA).

    Tensor parallel ranks keep copies of the KV.
    """
    weight_bytes: float
    gpu_memory_bytes: float
    gpus_per_node: int
    given: Sizes = ALONE
    """Sizes given by the run's own settings."""
    limits_s: Mapping[str, float] = field(default_factory=dict)
    """SLO limits of the run in seconds: ttft, tpot, e2e, as far as set."""


class Load(NamedTuple):
    """Lengths of the requests by which a layout is judged; all are alike."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Estimated performance and cost of a layout."""

    max_num_seqs: int
    """Number of sequences of that load that memory and slots hold at once."""
    prefill_s: float
    """Time of one prompt alone, in seconds."""
    prompt_s: float
    """Time that a prompt adds where iterations are full of prompts, in seconds."""
    decode_s: Callable[[int], float]
    """Time of a decode iteration of n sequences half-way through their answers, in seconds."""
    bounds: Callable[[int], Mapping[str, float]]
    """Share of that iteration's time by bound (such as memory bandwidth), the largest first."""
    usd_per_hour: float


Estimate = Callable[[Sizes, Load], Figures]
"""Estimates a layout.

Raises ValueError with key, value and rule for sizes that the model, the memory or the links do not allow.
"""


class LayoutChoice(NamedTuple):
    """The chosen sizes, and the reasons as lines for the run's notes."""

    sizes: Sizes
    notes: tuple[str, ...] = ()


class LayoutPolicy(Protocol):
    """Chooses how a replica's model is split."""

    def choose(self, facts: Facts, estimate: Estimate) -> LayoutChoice:
        """Returns the layout. Raises ValueError with the numbers if no layout fits."""
        ...
