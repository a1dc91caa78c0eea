"""Speculative decoding: an iteration model of passes of the target, each followed by drafting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.assembly.roofline import Roofline
from hwmodels.exact import Num, larger
from hwmodels.host import HostOverhead
from hwmodels.iterations import DraftWork, Explained, IterationModel, IterationShape
from hwmodels.iterations.decodes import OneByOne, Prices, ends_of
from hwmodels.iterations.layout import InFlight, MicroBatch, Stages
from hwmodels.levels import MeasuredOperators, Replica
from hwmodels.speculation.draft import Draft, Stepwise, drafting_of
from hwmodels.speculation.steps import (
    CHAIN,
    DraftHost,
    Drafting,
    DraftShape,
    InTurn,
    OnHost,
    Steps,
    TargetScale,
    drafts_of,
    merged,
    waiting,
)

PREFIX = "draft "
"""Prefix of the names of a draft's operators."""


class PassFlops(NamedTuple):
    """FLOPs of an iteration by purpose. Rows of rejected draft tokens are wasted."""

    next_tokens: Num
    """FLOPs of the target for one row per decoding sequence, and for prompt chunks."""
    draft_rows: Num
    """FLOPs of the target for verified draft tokens, and for rows that refine guesses."""
    drafting: Num
    """FLOPs of the draft."""


class HostAhead:
    """The host's work for an iteration, done while the devices run the previous one."""

    def __init__(self, host: HostOverhead, draft: Stepwise, draft_host: DraftHost) -> None:
        self._host, self._draft, self._draft_host = host, draft, draft_host

    @property
    def knows_contexts(self) -> bool:
        """True if the time depends on the sequences' contexts."""
        return self._draft_host.kilotoken_s > 0

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the minimum seconds of an iteration: the engine's, plus those of each draft step."""
        host, draft = self._host, self._draft
        engine_s = host.iteration_s + host.sequence_s * (shape.decode_seqs + shape.prefill_seqs)
        steps_s = draft.start_s + draft.step_s * larger(drafts_of(shape).steps, 1)
        return engine_s + steps_s + self._draft_host.seconds(shape) + host.exposed_s


class SpeculativeModel:
    """An `IterationModel` of a replica that drafts tokens. Shapes without drafts are priced by the base.

    iteration = pass with draft tokens as additional rows (any level that prices them) + drafting Drafting
    follows the sampled tokens, as in vLLM, so its operators never overlap those of the pass. With
    asynchronous scheduling an iteration takes at least the time in which the host prepares the next one: the
    engine's time plus the time of every draft step.

    Most iterations of a run are passes of the same sequences with the same number of draft tokens: a leap.

    base: level that prices the passes of the target. shape: shape of the draft tokens. host: the host's time
    for them in addition to the draft's; None: no time.
    """

    def __init__(
        self,
        base: IterationModel,
        draft: Draft,
        replica: Replica,
        *,
        shape: DraftShape = CHAIN,
        host: DraftHost | None = None,
    ) -> None:
        """Raises ValueError if the base cannot price passes, or the replica cannot have the draft."""
        draft.check(replica.model, replica.layout)
        if isinstance(base, Roofline):
            replica = replace(replica, calibration=base.calibration)
        self._base = base
        self.pass_tokens = draft.pass_tokens
        """Rows of each decoding sequence that refine guesses, in every pass."""
        self._drafting: Drafting = drafting_of(draft, replica, shape)
        if isinstance(base, MeasuredOperators):
            modelled = replica.roofline(replica.calibration)
            # The engine assembles a level of a tree like a pass; a step of a chain takes little time.
            is_level = isinstance(draft, Stepwise) and shape.level_rows
            measured = base.breakdown if is_level else base.model_breakdown
            self._drafting = self._drafting.scaled_by(TargetScale(measured, modelled.breakdown))
        self._ahead: HostAhead | None = None
        if replica.host.overlapped and isinstance(draft, Stepwise):
            self._ahead = HostAhead(replica.host, draft, host or DraftHost())
        elif host is not None:
            self._drafting = InTurn([self._drafting, OnHost(host.seconds)])
        self.peak_flops_per_s = base.peak_flops_per_s
        self.peak_bytes_per_s = base.peak_bytes_per_s
        self._leaps = Leaps(self.seconds, self._prices_of_equal)
        base.seconds(decodes_with_drafts(1, 1, 1))  # an error here is clearer than in the middle of a run

    @property
    def stages(self) -> Stages | None:
        """Stages of a pipeline for the target's passes; None without a pipeline."""
        return self._base.stages if isinstance(self._base, Roofline) else None

    def round(self, shape: IterationShape) -> tuple[MicroBatch, InFlight, MicroBatch]:
        """Returns the micro-batches of the target's pass, as `Roofline.round` does."""
        assert isinstance(self._base, Roofline)
        return self._base.round(shape if shape.drafts is None else self._in_pass(shape))

    def drafting_seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of drafting after the pass, on the last stage of a pipeline."""
        return 0.0 if shape.drafts is None else self._drafting.seconds(shape)

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of the pass and of drafting after it."""
        if shape.drafts is None:
            return self._base.seconds(shape)
        busy_s = self._busy_seconds(shape)
        return busy_s if self._ahead is None else larger(busy_s, self._ahead.seconds(shape))

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive iterations without drafts; see `IterationModel`."""
        return self._base.decode_ends(start_s, num_seqs, num_context_tokens, num_iterations)

    def pass_ends(
        self, start_s: float, num_seqs: int, contexts: list[int], rows: int, steps: int
    ) -> list[float]:
        """Returns the end times of consecutive passes of the same sequences, with equal draft tokens.

        contexts: tokens attended to in each, summed over sequences; they do not decrease. rows, steps: draft
        tokens per sequence, and their levels.
        """
        return self._leaps.pass_ends(start_s, num_seqs, contexts, rows, steps)

    def pass_seconds(self, num_seqs: int, context_tokens: int, k: int) -> float:
        """Returns the seconds of a pass with k draft tokens per sequence, and of drafting k more after it.

        context_tokens: of all sequences in total. This is the estimate for draft-length policies.
        """
        seconds: float = self.seconds(decodes_with_drafts(num_seqs, context_tokens, k))
        return seconds

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component of the pass and of drafting together."""
        if shape.drafts is None:
            return self._base.breakdown(shape)
        parts, drafting = self._base.breakdown(self._in_pass(shape)), self._drafting.breakdown(shape)
        sums = {name: parts[name] + drafting[name] for name in parts}
        return sums | {"host": sums["host"] + self._waits(shape)}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of one iteration; names of draft operators begin with `draft`."""
        if shape.drafts is None:
            return self._base.explain(shape)
        lines = self._base.explain(self._in_pass(shape))
        drafting = [*self._drafting.explain(shape), waiting(float(self._waits(shape)))]
        lines += merged(line._replace(operator=PREFIX + line.operator) for line in drafting if line.seconds)
        total_s = float(self.seconds(shape))
        shares = [line._replace(share=line.seconds / total_s) for line in lines]
        return sorted(shares, key=lambda line: -line.seconds)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of all rows of the pass, including rejected ones, and of the draft."""
        if shape.drafts is None:
            return self._base.flops(shape)
        return self._base.flops(self._in_pass(shape)) + self._drafting.flops(shape)

    def flops_by_purpose(self, shape: IterationShape) -> PassFlops:
        """Returns the parts of `flops`."""
        plain = _without_drafts(shape)
        alone = self._base.flops(plain)
        if shape.drafts is None:
            return PassFlops(alone, 0.0, 0.0)
        rows = self._base.flops(self._in_pass(shape)) - alone
        return PassFlops(alone, rows, self._drafting.flops(shape))

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV that the pass and the draft read."""
        if shape.drafts is None:
            return self._base.bytes_moved(shape)
        return self._base.bytes_moved(self._in_pass(shape)) + self._drafting.bytes_moved(shape)

    def _prices_of_equal(self, num_seqs: int, rows: int, steps: int) -> EqualPrices | None:
        """Returns the prices of passes of the same sequences; None: only `seconds` can compute them."""
        base, drafting = self._base, self._drafting
        if self.pass_tokens or not isinstance(base, Roofline):
            return None
        tokens = num_seqs * rows
        passes = base.equal_passes(num_seqs, tokens, num_seqs + tokens, 1 + rows)
        if passes is None:
            return None
        after = drafting.equal_passes(num_seqs, rows, steps) if isinstance(drafting, Steps) else None
        least_s = 0.0
        if self._ahead is not None:
            if self._ahead.knows_contexts:
                return None
            least_s = self._ahead.seconds(pass_of_equal(num_seqs, num_seqs, rows, steps))
        return EqualPrices(passes, after or one_by_one(drafting.seconds, num_seqs, rows, steps), least_s)

    def _busy_seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of the pass and of drafting, if the host keeps up."""
        return self._base.seconds(self._in_pass(shape)) + self._drafting.seconds(shape)

    def _waits(self, shape: IterationShape) -> Any:
        """Returns the seconds in which the devices wait for the host that prepares the next iteration."""
        return self.seconds(shape) - self._busy_seconds(shape)

    def _in_pass(self, shape: IterationShape) -> IterationShape:
        """Returns the shape of the target's pass, with the rows that refine guesses."""
        if not self.pass_tokens:
            return shape
        more, drafts = self.pass_tokens, shape.drafts
        assert drafts is not None
        decodes, context = shape.decode_seqs, shape.decode_context_tokens
        rows = more * decodes
        pairs = more * context + (more * (more + 1) // 2) * decodes
        return shape._replace(
            sampled_seqs=shape.sampled_seqs + rows,
            drafts=drafts._replace(tokens=drafts.tokens + rows, pairs=drafts.pairs + pairs),
        )


def decodes_with_drafts(num_seqs: Any, context_tokens: Any, k: int) -> IterationShape:
    """Returns a pass of equal sequences that verify k draft tokens each, and draft k more."""
    shape = pass_of_equal(num_seqs, context_tokens, k, k)
    return shape._replace(drafts=drafts_of(shape)._replace(seqs=num_seqs))


def _without_drafts(shape: IterationShape) -> IterationShape:
    """Returns the iteration in which every sequence has one row."""
    if shape.drafts is None:
        return shape
    return shape._replace(sampled_seqs=shape.sampled_seqs - shape.drafts.tokens, drafts=None)


MOST_PRICES = 50_000
"""Number of batch sizes whose prices are cached."""


def pass_of_equal(num_seqs: int, context_tokens: Any, rows: int, steps: int) -> IterationShape:
    """Returns a pass in which each sequence verifies `rows` draft tokens and drafts the same number again.

    steps: levels of these tokens; in a chain, each token is a level. context_tokens: tokens attended to,
    summed over sequences; a number or an array.
    """
    tokens = num_seqs * rows
    pairs = rows * context_tokens + num_seqs * (rows * (rows + 1) // 2)
    drafts = DraftWork(tokens, pairs, num_seqs if rows else 0, steps, tokens)
    return IterationShape(num_seqs, context_tokens, 0, 0, 0, 0, num_seqs + tokens, None, drafts)


def one_by_one(seconds: Callable[[IterationShape], Any], num_seqs: int, rows: int, steps: int) -> OneByOne:
    """Returns the prices of the passes of the same sequences by a function of shapes."""
    return OneByOne(lambda contexts: seconds(pass_of_equal(num_seqs, contexts, rows, steps)))


class EqualPrices:
    """Prices of passes with drafting after them: the sum of `passes` and `drafting`, at least least_s."""

    def __init__(self, passes: Prices, drafting: Prices, least_s: float) -> None:
        self.few = min(passes.few, drafting.few)
        self._passes, self._drafting, self._least_s = passes, drafting, least_s

    def each(self, contexts: Sequence[float]) -> list[float]:
        """Returns the seconds at each number of context tokens."""
        least_s, passes_s, after_s = self._least_s, self._passes.each(contexts), self._drafting.each(contexts)
        sums_s = [pass_s + drafting_s for pass_s, drafting_s in zip(passes_s, after_s, strict=True)]
        return sums_s if min(sums_s) >= least_s else [max(sum_s, least_s) for sum_s in sums_s]

    def many(self, contexts: NDArray[Any]) -> Any:
        """Computes `each` for non-decreasing contexts, as an array."""
        sums_s = self._passes.many(contexts) + self._drafting.many(contexts)
        return np.maximum(sums_s, self._least_s)


class Leaps:
    """The end times of consecutive passes of the same sequences.

    seconds: the price of any shape. prices_of(num_seqs, rows, steps): the prices of a leap, if known.
    """

    def __init__(
        self,
        seconds: Callable[[IterationShape], Any],
        prices_of: Callable[[int, int, int], Prices | None] = lambda num_seqs, rows, steps: None,
    ) -> None:
        self._seconds, self._prices_of = seconds, prices_of
        self._known: dict[tuple[int, int, int], Prices] = {}

    def pass_ends(
        self, start_s: float, num_seqs: int, contexts: list[int], rows: int, steps: int
    ) -> list[float]:
        """Computes `SpeculativeModel.pass_ends`."""
        key = num_seqs, rows, steps
        return ends_of(self._known.get(key) or self._prices(key), start_s, contexts)

    def _prices(self, key: tuple[int, int, int]) -> Prices:
        if len(self._known) >= MOST_PRICES:
            self._known.clear()
        prices = self._known[key] = self._prices_of(*key) or one_by_one(self._seconds, *key)
        return prices
