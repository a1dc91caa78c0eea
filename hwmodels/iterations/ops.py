"""An operator of an iteration: its FLOPs, bytes and seconds on one device.

An operator is evaluated for a `RankBatch` of numbers or arrays. Times that depend only on the number of
tokens or of sampled rows (`Per`) are tabulated by the roofline; times that depend on contexts are computed
each time, and so use only the arithmetic of `hwmodels.exact`. `assembly` builds the list of operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy import ndarray

from hwmodels.exact import larger, smaller
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.windows import seen

Quantity = Callable[[RankBatch], Any]
"""FLOPs, bytes or seconds of one call: a number, or an array with one value per iteration."""

Lines = tuple[tuple[Any, Any], ...]
"""Straight lines over the context of all sequences: (seconds, seconds per context token) each."""


PassLines = tuple[tuple[Any, Any, Any, Any], ...]
"""Straight lines over a pass: (seconds, per KV token read, per query-key pair, per query row) each."""


class Per(Enum):
    """Quantity that an operator's price depends on: a field of `RankBatch`, or a prefix of several."""

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
    """Position of an operator in the model, which decides on which pipeline stage it runs."""

    first = "before all layers"
    layers = "in a layer"
    between = "from a stage to the next"
    last = "after all layers"


def zero(batch: RankBatch) -> float:
    """Returns 0 for every batch."""
    return 0.0


@dataclass(frozen=True, slots=True)
class DecodeSeconds:
    """Seconds of a decode operator: for a number of sequences, the maximum of some lines over their context.

    All that depends on the number of sequences alone is computed once: see `hwmodels.iterations.decodes`.
    """

    lines: Callable[[Any], Lines]
    """Returns the lines for a number of sequences; for 0 sequences all are 0 s."""
    window: int | None = None
    """Most tokens of each sequence that are attended to; None: all."""
    of_rows: Callable[[int], Callable[[Any], PassLines]] | None = None
    """Returns `lines` of sequences with some rows each, draft tokens included; None: there never are any."""

    def __call__(self, batch: RankBatch) -> Any:
        context, tokens = batch.decode_context_tokens, batch.draft_tokens
        if isinstance(tokens, ndarray) or tokens:
            return self.pass_seconds(batch.decode_seqs, context, tokens, batch.draft_pairs)
        if self.window is not None:
            context = smaller(context, self.window * batch.decode_seqs)
        return largest(self.lines(batch.decode_seqs), context)

    def pass_seconds(self, num_seqs: Any, context_tokens: Any, draft_tokens: Any, draft_pairs: Any) -> Any:
        """Returns the seconds of sequences that verify draft tokens; numbers or arrays."""
        keys, pairs = seen(num_seqs, context_tokens, draft_tokens, draft_pairs, self.window)
        each, rows = rows_each(num_seqs, draft_tokens), num_seqs + draft_tokens
        if not isinstance(each, ndarray):
            return largest_of_pass(self.pass_lines(int(each))(num_seqs), keys, pairs, rows)
        seconds: Any = 0.0
        for count in np.unique(each).tolist():
            own_s = largest_of_pass(self.pass_lines(int(count))(num_seqs), keys, pairs, rows)
            seconds = np.where(each == count, own_s, seconds)
        return seconds

    def pass_lines(self, rows: int) -> Callable[[Any], PassLines]:
        """Returns the lines for sequences of so many rows; with one row each they are those of decodes."""
        if rows == 1:
            return lambda seqs: tuple((fixed_s, token_s, 0.0, 0.0) for fixed_s, token_s in self.lines(seqs))
        assert self.of_rows is not None
        return self.of_rows(rows)


def rows_each(num_seqs: Any, draft_tokens: Any) -> Any:
    """Returns the rows of a sequence, draft tokens included: the mean, rounded up."""
    return 1 - -draft_tokens // larger(num_seqs, 1)


def largest(lines: Lines, context: Any) -> Any:
    """Returns the maximum of the lines at each context, in seconds."""
    (fixed_s, token_s), *others = lines
    seconds = fixed_s + token_s * context
    for fixed_s, token_s in others:
        seconds = larger(seconds, fixed_s + token_s * context)
    return seconds


def largest_of_pass(lines: PassLines, keys: Any, pairs: Any, rows: Any) -> Any:
    """Returns the maximum of the lines of a pass, in seconds."""
    (fixed_s, key_s, pair_s, row_s), *others = lines
    seconds = fixed_s + key_s * keys + pair_s * pairs + row_s * rows
    for fixed_s, key_s, pair_s, row_s in others:
        seconds = larger(seconds, fixed_s + key_s * keys + pair_s * pairs + row_s * rows)
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One kernel or one collective, and the number of its calls per iteration."""

    name: str
    component: str
    """Component of the breakdown, one of `iteration.COMPONENTS`."""
    per: Per
    calls: float
    """Calls per iteration, in sequence from the first layer to the last; in a pipeline, per micro-batch."""
    seconds: Quantity
    """Seconds of one call; 0 if the batch has no work for it."""
    flops: Quantity = zero
    stored_bytes: Quantity = zero
    """Bytes of weights and KV read."""
    bytes_moved: Quantity = zero
    """Bytes read and written, stored_bytes included; for a collective, its message per device."""
    dtype: str = "bf16"
    """Data type of the arithmetic."""
    kernels: int = 1
    """Kernels that the host launches per call."""
    mixed_kernels: int = 0
    """Further launches per call if prompts and decodes share the iteration."""
    is_message: bool = False
    """True for a collective between devices."""
    part: Part = Part.layers


def per_token(amount: float) -> Quantity:
    """Returns the quantity `amount` per token of the batch."""
    return lambda batch: amount * batch.tokens


def per_row(amount: float) -> Quantity:
    """Returns the quantity `amount` per sampled row of the batch."""
    return lambda batch: amount * batch.rows


def independent_of_context(
    seconds: Callable[[Any], Any], of_rows: Callable[[int], Callable[[Any], PassLines]]
) -> DecodeSeconds:
    """Returns the seconds of a decode operator that depends only on the numbers of sequences and rows."""
    return DecodeSeconds(lambda seqs: ((seconds(seqs), 0.0),), of_rows=of_rows)
