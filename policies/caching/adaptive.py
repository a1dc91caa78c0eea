"""Adaptive compression per head: each head keeps the tokens that its kind of attention needs (FastGen).

Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs", ICLR 2024. At the end of
a prompt each head is profiled: it gets the first, and therefore cheapest, of the policies below whose kept
tokens hold at least the share `recovery` of its attention. Later tokens follow the head's policy.

    policy       keeps                                          of n tokens, at most
    special special tokens, such as that of the beginning num_special_tokens punctuation these and punctuation
    + punctuation_share n frequent these and tokens with much attention so far + frequent_share n local these
    and the last tokens + local_share n full every token n

A simulator has no attention to profile, so the heads are an input. `heads` lists kinds of heads, each with
its share of all heads and the shares of its attention on the four classes of tokens. The rest of the
attention is on other tokens. The default is an assumption, not a measurement. The quality proxy is the kept
share of attention, `kept_attention`, which is at least `recovery` for every head by construction.

A sequence holds the mean of its heads' tokens, rounded up; fragmentation per head is not modelled. KV is
dropped at the end of the prompt and then every block_size tokens. Profiling reads the attention weights of
the whole prompt, and heads with the policies frequent and local read theirs in every decode step: see
`WeightReads`. Outputs differ from the model's. Assumes that the complete prompt fits while it is computed; a
preempted sequence is fully recomputed. Memory pressure: as paged. Horizon: as paged, and up to the next drop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, fsum
from typing import Annotated, ClassVar, NamedTuple

from fieldlimits import Ge, Lt, NonNegativeInt, PositiveShare, Share, Unit
from policies.caching.pool import Caching, KvMemory, WeightReads
from policies.caching.streaming import LossyPool
from policies.core.sequence import Growth, Sequence

POLICIES = ("special", "punctuation", "frequent", "local", "full")
"""Policies of a head, the cheapest first."""

ASSUMED_HEADS = (
    (0.20, 0.97, 0.01, 0.005, 0.005),
    (0.10, 0.70, 0.27, 0.01, 0.01),
    (0.25, 0.40, 0.10, 0.46, 0.02),
    (0.25, 0.30, 0.06, 0.20, 0.41),
    (0.20, 0.20, 0.05, 0.25, 0.20),
)
"""Kinds of heads: share of the heads; of their attention on special, punctuation, frequent, local tokens."""

ROUNDING = 1e-9
"""Tolerance of sums of shares."""


class HeadPolicy(NamedTuple):
    """Policy of the heads of one kind, and the attention that they keep."""

    share: float
    """Share of all heads."""
    policy: str
    """One of `POLICIES`."""
    kept_attention: float
    """Share of their attention on the tokens that they keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FastGen(Caching):
    """Settings of adaptive compression per head."""

    changes_outputs: ClassVar[bool] = True

    recovery: PositiveShare = 0.95
    """Minimum share of its attention that every head keeps."""
    num_special_tokens: NonNegativeInt = 1
    """Number of special tokens of a sequence."""
    punctuation_share: Share = 0.1
    """Share of the tokens that are punctuation."""
    frequent_share: Share = 0.3
    """Share of the tokens that heads with the policy `frequent` keep for their attention so far."""
    local_share: Share = 0.3
    """Share of the tokens, counted from the end, that heads with the policy `local` keep."""
    heads: tuple[tuple[float, ...], ...] = ASSUMED_HEADS
    """Kinds of heads: share of the heads; of their attention on special, punctuation, frequent, local."""
    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        object.__setattr__(self, "heads", tuple(tuple(kind) for kind in self.heads))
        _check_heads(self.heads)

    @property
    def policies(self) -> tuple[HeadPolicy, ...]:
        """The policy of each kind of heads: the first that recovers enough of their attention."""
        return tuple(self._profiled())

    @property
    def kept_attention(self) -> float:
        """Quality proxy: share of attention on kept tokens, as a mean over the heads."""
        return fsum(head.share * head.kept_attention for head in self.policies)

    @property
    def quality_note(self) -> str:
        """Clause with the quality proxy."""
        return (
            f"by the profile of heads, which is an input, they keep {100 * self.kept_attention:.1f} % of "
            f"their attention on average and {100 * self.recovery:.4g} % at least; quality itself is not "
            "simulated"
        )

    @property
    def weight_reads(self) -> WeightReads:
        """The weights of the whole prompt, and in every step those of heads that keep frequent tokens."""
        reading = (head.share for head in self.policies if head.policy in ("frequent", "local"))
        return WeightReads(decode_share=fsum(reading))

    def num_kept(self, num_tokens: int) -> int:
        """Computes the tokens that a sequence of num_tokens tokens holds: the mean over heads, rounded up.

        A prompt of 1,000 tokens by default: special 1, punctuation 101, frequent 401, local 701, full 1,000,
        weighted 0.2, 0.1, 0.25, 0.25, 0.2: 0.2 + 10.1 + 100.25 + 175.25 + 200 = 485.8, so 486.
        """
        parts = (self.punctuation_share, self.frequent_share, self.local_share)
        sizes = [self.num_special_tokens + share * num_tokens for share in accumulate(parts, initial=0.0)]
        of_policy = dict(zip(POLICIES, (*sizes, num_tokens), strict=True))
        mean = fsum(head.share * min(num_tokens, of_policy[head.policy]) for head in self.policies)
        return min(num_tokens, max(1, ceil(mean - ROUNDING * num_tokens)))

    def pool(self, memory: KvMemory) -> AdaptivePool:
        """Creates an empty pool."""
        num_watermark_blocks = int(self.watermark * memory.num_blocks)
        return AdaptivePool(memory.num_blocks, self.block_size, num_watermark_blocks, self)

    def _profiled(self) -> Iterator[HeadPolicy]:
        for share, *attention in self.heads:
            for policy, kept in zip(POLICIES, (*accumulate(attention), 1.0), strict=True):
                if kept >= self.recovery - ROUNDING or policy == "full":
                    yield HeadPolicy(share, policy, kept)
                    break


class AdaptivePool(LossyPool):
    """A pool in which a decoding sequence holds `FastGen.num_kept` tokens, plus at most one block."""

    def __init__(
        self, num_blocks: int, block_size: int, num_watermark_blocks: int, settings: FastGen
    ) -> None:
        super().__init__(num_blocks, block_size, num_watermark_blocks)
        self._settings = settings

    def growth(self, seq: Sequence) -> Growth | None:
        """Drops the tokens that no head keeps; the KV then grows by blocks until the next drop."""
        num_computed = seq.stored_computed
        num_surplus = num_computed - seq.num_dropped - self._settings.num_kept(num_computed)
        if num_surplus > 0:
            self.drop(seq, num_surplus)
        return Growth(until=num_computed + self.block_size)


def _check_heads(heads: tuple[tuple[float, ...], ...]) -> None:
    """Raises ValueError unless the kinds of heads are valid shares that add up to 1."""
    for i, kind in enumerate(heads):
        if len(kind) != len(POLICIES) or min(kind) < 0 or sum(kind[1:]) > 1 + ROUNDING:
            raise ValueError(
                f"heads[{i}]={list(kind)}: must be five numbers >= 0: the share of the heads, and the shares "
                "of their attention on special, punctuation, frequent and local tokens, at most 1 together"
            )
    total = fsum(kind[0] for kind in heads)
    if abs(total - 1) > ROUNDING:
        raise ValueError(f"heads: the shares of the heads add up to {total:g}; they must add up to 1")
