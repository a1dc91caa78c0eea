"""The interface of KV caches: settings that create a pool for the memory that it manages."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from fieldlimits import Checked, PositiveInt, Unit
from policies.caching.eviction.future import FutureUses
from policies.caching.kv_groups import KvGroup
from policies.caching.pool import BlockPool
from policies.user_code.decisions import returned


class KvMemory(NamedTuple):
    """The memory that a pool manages."""

    num_blocks: int  # blocks of `block_size` tokens on the GPU
    bytes_per_token: float = 0.0  # KV bytes over all layers and heads
    num_devices: int = 1  # GPUs of the replica
    max_model_len: int = 2**31  # prompt and output tokens of one sequence
    future: FutureUses | None = None  # future requests, for offline bounds; no engine knows them
    groups: tuple[KvGroup, ...] = ()  # KV groups of the model, for a cache that has them
    max_in_flight_tokens: int = 2**31  # tokens of steps that have not ended, at most
    state_blocks: int = 0  # blocks that a sequence takes for its states of linear attention


class WeightReads(NamedTuple):
    """Attention weights that the choice of kept tokens reads; fused (flash) kernels do not return them."""

    decode_share: float = 0.0
    """Share of the heads whose weights are read in every decode step."""
    prompt_rows: int | None = None
    """Last rows of a prompt whose weights are read once, at its end; None: those of every row are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caching(Checked):
    """Settings of a cache. A policy overrides `pool` and further methods as needed."""

    changes_outputs: ClassVar[bool] = False
    """Whether the model's outputs change, because attention does not see KV that was dropped."""
    has_groups: ClassVar[bool] = False
    """Whether a block has the KV of one group of layers, not of all; see `policies.caching.kv_groups`."""
    holds_states: ClassVar[bool] = False
    """Whether a sequence may take blocks for its states of linear attention (`KvMemory.state_blocks`)."""
    finds_prefixes: ClassVar[bool] = False
    """Whether later sequences find the KV of equal prefixes."""

    block_size: Annotated[PositiveInt, Unit("token")] = 16
    """Tokens per block."""

    @property
    def needs_predictor(self) -> bool:
        """True if the cache reads `Sequence.num_predicted_tokens`."""
        return False

    @property
    def needs_future(self) -> bool:
        """True if the cache needs the future requests (`KvMemory.future`), which no engine knows."""
        return False

    @property
    def tiers_gib(self) -> tuple[float, float]:
        """Host memory and disk space of the cache, in GiB per GPU."""
        return 0.0, 0.0

    @property
    def weight_reads(self) -> WeightReads | None:
        """Attention weights that the cache reads; None: none, so that fused kernels compute attention."""
        return None

    @property
    def quality_note(self) -> str:
        """Clause on the outputs of a cache that changes them, for the notes of a run."""
        return "their quality is not simulated"

    @abstractmethod
    def pool(self, memory: KvMemory) -> BlockPool:
        """Creates an empty pool. Raises ValueError if the settings do not fit the memory."""
        raise NotImplementedError


def pool_of(caching: Caching, memory: KvMemory) -> BlockPool:
    """Returns an empty pool of a cache. Raises WrongDecisionError if it makes something else."""
    pool: object = caching.pool(memory)
    if not isinstance(pool, BlockPool):
        raise returned(caching, "pool", pool, "must return a policies.caching.pool.BlockPool")
    pool.num_state_blocks = memory.state_blocks
    return pool
