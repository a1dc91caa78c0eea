"""What one iteration (one forward pass of a replica) computes, and what a hardware model answers about it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from hwmodels.exact import Num

COMPONENTS = ("gemm", "attention", "communication", "elementwise", "lm_head", "launch", "host")
"""The keys of every `IterationModel.breakdown`, in the order in which an iteration meets them."""


class AdapterBatch(NamedTuple):
    """What an iteration computes with LoRA adapters: Punica's batches, of different ones. Numbers or arrays.

    Ranks are as the kernels pad them.
    """

    tokens: Num
    """That go through an adapter."""
    rank_tokens: Num
    """Sum over those tokens of their adapter's rank: what is computed."""
    ranks: Num
    """Sum over the different adapters of their ranks: what is read."""


class IterationShape(NamedTuple):
    """What one iteration computes (numbers), or what each of many computes (arrays).

    Fields broadcast against each other, so a leap of k decode iterations is six numbers and one array of k.
    At least one token is computed: decode_seqs + prefill_tokens >= 1.
    """

    decode_seqs: Num
    """Sequences that decode one token each."""
    decode_context_tokens: Num
    """Sum over them of the KV tokens attended to, the new one included."""
    prefill_seqs: Num
    """Prompt chunks."""
    prefill_tokens: Num
    """New tokens in all chunks."""
    prefill_pairs: Num
    """Query-key pairs under the causal mask, summed over the chunks: see `causal_pairs`."""
    prefill_context_tokens: Num
    """Sum over the chunks of cached + new tokens."""
    sampled_seqs: Num
    """Rows through the LM head: decodes, and chunks that complete their prompt."""
    adapters: AdapterBatch | None = None
    """What adapters add; None: nothing."""


COUNTED = IterationShape._fields[:-1]
"""The fields of an iteration that are numbers: all but `adapters`."""


def causal_pairs(num_new_tokens: int, num_cached_tokens: Num = 0) -> Num:
    """Query-key pairs of a chunk: n new tokens see c cached ones and, of each other, those up to themselves.

    n c + n (n + 1) / 2; a whole prompt of 4 tokens: 10 pairs; its second half alone: 2 x 2 + 3 = 7.
    An array of cached tokens gives an array: the same chunk size, iteration after iteration.
    """
    n, c = num_new_tokens, num_cached_tokens
    return n * c + n * (n + 1) // 2


class Explained(NamedTuple):
    """One operator's part of an iteration, on one device; calls of one name together."""

    operator: str
    component: str
    seconds: float
    share: float
    """Of the iteration."""
    bound: str
    """compute, memory, communication or launch; host for what no operator takes."""
    flops: float
    bytes_moved: float
    calls: float


class UnknownIterationError(ValueError):
    """A model that only replays was asked for an iteration that it has not seen."""


def counted(level: str, shape: IterationShape) -> tuple[Any, ...]:
    """The numbers of an iteration, for a level without adapters. UnknownIterationError if it has some."""
    if shape.adapters is not None:
        raise UnknownIterationError(f"{level}: has no times of LoRA adapters; choose latency=calibrated")
    return shape[:-1]


class IterationModel(Protocol):
    """One interface for every level: data sheet, calibrated, table, recorded.

    Answers have the broadcast shape of the question. `seconds` of arrays equals, bit for bit, `seconds` of
    their elements one by one: the simulator relies on it to leap over iterations without changing any time.
    A model that cannot price an iteration raises UnknownIterationError, and of several answers NaN for it: a
    leap may be cut before it gets there.
    """

    @property
    def peak_flops_per_s(self) -> float:
        """Dense peak of the compute dtype, all devices of the replica."""

    @property
    def peak_bytes_per_s(self) -> float:
        """Memory bandwidth of all devices of the replica."""

    def seconds(self, shape: IterationShape) -> Num:
        """Wall time of the iteration."""

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """When consecutive decode-only iterations of num_seqs sequences end; the first begins at start_s.

        They attend to num_context_tokens in the first, and each to one more in every further iteration. The
        `seconds` of each are added to the end of the one before it, up to the first iteration that the model
        cannot price. If that is the very first, it raises UnknownIterationError.
        """

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Seconds by component (`COMPONENTS`); they sum to `seconds`, up to rounding."""

    def explain(self, shape: IterationShape) -> list[Explained]:
        """The operators of one iteration, the longest first; their seconds sum to `seconds`."""

    def flops(self, shape: IterationShape) -> Num:
        """Model FLOPs of the whole replica, for MFU.

        All tokens of the shape are work done, those of a prefill repeated after a preemption included: the
        shape does not tell them apart. The padding of a CUDA graph is not.
        """

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Weights read and KV read by the whole replica, for MBU."""
