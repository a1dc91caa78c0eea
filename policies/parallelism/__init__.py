"""How a replica's model is cut over devices. One policy a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

SHORT_NAMES = ("tensor", "pipeline", "context", "attention data")


class Sizes(NamedTuple):
    """Of one replica, named as everywhere. Devices: the product of the first four."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    expert_parallel_size: int = 1
    """Of a stage's devices, groups that hold whole experts."""
    sequence_parallel: bool = False

    @property
    def num_devices(self) -> int:
        return prod(self[:4])

    def __str__(self) -> str:
        """tensor 4 x pipeline 2; one device: no cut."""
        cuts = [f"{name} {size}" for name, size in zip(SHORT_NAMES, self[:4], strict=True) if size > 1]
        experts = f", expert {self.expert_parallel_size}" if self.expert_parallel_size > 1 else ""
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        return " x ".join(cuts) + experts + sequence if cuts else "no cut"


ALONE = Sizes()
"""One device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a policy knows of the model, the machine and the run."""

    model: str
    gpu: str
    num_heads: int
    num_kv_heads: int
    num_layers: int
    num_experts: int = 0
    """Routed ones; 0: the model has none."""
    shares_kv: bool = False
    """One latent vector a token serves all heads (MLA): tensor parallel ranks keep copies of the KV."""
    weight_bytes: float
    gpu_memory_bytes: float
    gpus_per_node: int
    given: Sizes = ALONE
    """What the run's own keys say."""
    limits_s: Mapping[str, float] = field(default_factory=dict)
    """Of the run's SLO: ttft, tpot, e2e, those that it has."""


class Load(NamedTuple):
    """Requests that a layout is judged by, all alike."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a layout would cost."""

    max_num_seqs: int
    """Sequences of that load that memory and slots hold at once."""
    prefill_s: float
    """Of one prompt alone."""
    prompt_s: float
    """What a prompt adds where iterations are full of them."""
    decode_s: Callable[[int], float]
    """An iteration of so many sequences that decode, half-way through their answers."""
    bounds: Callable[[int], Mapping[str, float]]
    """Of that iteration: share of the time by what bounds it, the largest first."""
    usd_per_hour: float


Estimate = Callable[[Sizes, Load], Figures]
"""Raises ValueError for sizes that the model, the memory or the links do not allow, with key, value, rule."""


class LayoutChoice(NamedTuple):
    """Sizes, and why: lines for the run's notes."""

    sizes: Sizes
    notes: tuple[str, ...] = ()


class LayoutPolicy(Protocol):
    """Cuts a replica's model."""

    def choose(self, facts: Facts, estimate: Estimate) -> LayoutChoice:
        """Raises ValueError where no layout will do, with the numbers."""
        ...
