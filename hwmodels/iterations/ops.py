"""An operator of an iteration: what it computes, moves and takes on one device.

An operator answers for a `RankBatch`, numbers or arrays. What depends on the number of tokens or of sampled
rows alone (`Per`) is tabulated by the roofline; what depends on contexts is computed each time, and so uses
nothing but the arithmetic of `hwmodels.exact`. `assembly` makes the list of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hwmodels.exact import larger, smaller
from hwmodels.iterations.layout import RankBatch

Quantity = Callable[[RankBatch], Any]
"""FLOPs, bytes or seconds of one call: a number, or one an iteration."""

Lines = tuple[tuple[Any, Any], ...]
"""Straight lines over the context of all sequences: (seconds, seconds a context token) each."""


class Per(Enum):
    """What an operator's price depends on: a field of `RankBatch`, or a group of them."""

    token = "tokens"
    any_token = "all_tokens"
    row = "rows"
    decode = "decode_"
    """Decoding sequences and their contexts; 0 s without any. Its seconds are `DecodeSeconds`."""
    prefill = "prefill_"
    """Chunks and their contexts; 0 s without any."""
    adapter = "adapter_"
    """Tokens with LoRA adapters and the adapters' ranks; 0 s without any."""


class Part(Enum):
    """Where in a model an operator stands, and so on which stage of a pipeline it runs."""

    first = "before all layers"
    layers = "in a layer"
    between = "from a stage to the next"
    last = "behind all layers"


def nothing(batch: RankBatch) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class DecodeSeconds:
    """Seconds of a decode operator: for a number of sequences, the largest of some lines over their context.

    So all that depends on the number of sequences can be worked out once: see `hwmodels.iterations.decodes`.
    """

    lines: Callable[[Any], Lines]
    """For a number of sequences; all at 0 s for none."""
    window: int | None = None
    """Tokens of each sequence that are attended to at most."""

    def __call__(self, batch: RankBatch) -> Any:
        context = batch.decode_context_tokens
        if self.window is not None:
            context = smaller(context, self.window * batch.decode_seqs)
        return largest(self.lines(batch.decode_seqs), context)


def largest(lines: Lines, context: Any) -> Any:
    """Seconds: the highest of the lines at each context."""
    (fixed_s, token_s), *others = lines
    seconds = fixed_s + token_s * context
    for fixed_s, token_s in others:
        seconds = larger(seconds, fixed_s + token_s * context)
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One kernel, or one collective, and how often an iteration calls it."""

    name: str
    component: str
    """One of `iteration.COMPONENTS`."""
    per: Per
    calls: float
    """One after the other, from the first layer to the last; in a pipeline: of one micro-batch."""
    seconds: Quantity
    """Of one call; 0 where the batch has nothing for it."""
    flops: Quantity = nothing
    stored_bytes: Quantity = nothing
    """Weights and KV read."""
    bytes_moved: Quantity = nothing
    """All that is read and written, stored_bytes included; of a collective: its message, for each device."""
    dtype: str = "bf16"
    """That it computes in."""
    kernels: int = 1
    """Kernels that the host launches for a call."""
    is_message: bool = False
    """Between devices."""
    part: Part = Part.layers


def per_token(amount: float) -> Quantity:
    return lambda batch: amount * batch.tokens


def per_row(amount: float) -> Quantity:
    return lambda batch: amount * batch.rows


def whatever_the_context(seconds: Callable[[Any], Any]) -> DecodeSeconds:
    """Of a decode operator that depends on the number of sequences alone."""
    return DecodeSeconds(lambda seqs: ((seconds(seqs), 0.0),))
