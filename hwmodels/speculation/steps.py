"""Sequential steps of a draft, each a pass over one row per sequence, as engines run them after sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, cast

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from hwmodels.exact import Num, divided_up, larger, smaller
from hwmodels.iterations.decodes import ByContext
from hwmodels.iterations.iteration import COMPONENTS, DraftWork, Explained, IterationShape
from hwmodels.speculation.relative import RelativeStep, StepModel, TargetScale


def drafts_of(shape: IterationShape) -> DraftWork:
    """Returns the draft tokens of an iteration that has some."""
    assert shape.drafts is not None
    return shape.drafts


class DraftShape(NamedTuple):
    """The rows of a sequence in the steps of a draft, as far as they differ from those of a chain."""

    level_rows: tuple[int, ...] = ()
    """Nodes by level of a tree, from the first level on; (): a chain."""
    share: Fraction = Fraction(1)
    """Share of the verified draft tokens in the first step of a draft with KV; 0: its rows are decodes."""

    @classmethod
    def of_tree(cls, level_rows: tuple[int, ...]) -> DraftShape:
        """Returns the shape of a tree: of its nodes only one per level can be accepted, and is computed."""
        return cls(level_rows, Fraction(len(level_rows), sum(level_rows)))


CHAIN = DraftShape()


class EqualSteps:
    """The seconds of steps after passes that differ in their contexts only.

    num_later: steps after the first. ahead: context tokens that each of these has more than the pass.
    """

    __slots__ = ("_ahead", "_first", "_later", "_num_later", "_start_s", "few")

    def __init__(
        self, start_s: float, first: ByContext, later: ByContext, num_later: int, ahead: float
    ) -> None:
        self._start_s, self._first, self._later = start_s, first, later
        self._num_later, self._ahead = num_later, ahead
        self.few = first.few

    def each(self, contexts: Sequence[float]) -> list[float]:
        """Returns the seconds at each number of context tokens."""
        start_s, num_later, ahead = self._start_s, self._num_later, self._ahead
        firsts_s = self._first.each(contexts)
        if not num_later:
            return [start_s + first_s for first_s in firsts_s]
        laters_s = self._later.each([context + ahead for context in contexts])
        return [
            start_s + first_s + num_later * later_s
            for first_s, later_s in zip(firsts_s, laters_s, strict=True)
        ]

    def many(self, contexts: NDArray[Any]) -> NDArray[np.float64]:
        """Computes `each` for contexts that do not decrease, as an array."""
        times_s = self._first.many(contexts)
        times_s += self._start_s
        if self._num_later:
            later_s = self._later.many(contexts + self._ahead)
            later_s *= self._num_later
            times_s += later_s
        return times_s


class Steps:
    """Sequential steps of a draft.

    first, later: prices of the first step and of those after it. has_kv: the first one computes the rows and
    the chunks of the target's pass, and `extra` rows more for each decoding sequence, even if no token is to
    be drafted; else it has one row per sequence. shape: rows of a sequence in all of them.
    """

    def __init__(
        self,
        first: StepModel,
        later: StepModel,
        *,
        start_s: float,
        has_kv: bool = True,
        extra: int = 0,
        shape: DraftShape = CHAIN,
    ) -> None:
        self._first, self._later, self._start_s = first, later, start_s
        self._has_kv, self._extra, self._shape = has_kv, extra, shape
        self._is_plain = has_kv and shape == CHAIN

    def scaled_by(self, target: TargetScale) -> Steps:
        """Returns the same steps with prices that are scaled as the target's."""
        return Steps(
            RelativeStep(self._first, target),
            RelativeStep(self._later, target),
            start_s=self._start_s,
            has_kv=self._has_kv,
            extra=self._extra,
            shape=self._shape,
        )

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds from the end of the pass to that of the last step."""
        if self._is_plain:
            decodes, context, _, chunks, *_, work, _ = shape
            tokens, pairs, seqs, steps, _ = cast("Any", work)
            all_draft = type(decodes) is int and type(seqs) is int and seqs == decodes and chunks == 0
            if all_draft and type(tokens) is int and type(steps) is int and steps:
                return self._seconds_of_decodes(seqs, context, tokens, pairs, steps)
        once, laters = self._counts(shape)
        seconds = self._start_s + once * self._first.seconds(self._to_first(shape))
        for count, rows in laters:
            if isinstance(count, ndarray) or count:
                seconds = seconds + count * self._later.seconds(self._to_later(shape, rows))
        return seconds

    def _seconds_of_decodes(self, seqs: int, context: Any, tokens: int, pairs: Any, steps: int) -> Any:
        """Computes `seconds` of decodes that all draft; takes half the time. Arrays: contexts and pairs."""
        if self._extra:
            tokens, pairs = tokens + self._extra * seqs, pairs + self._extra * (context + tokens + seqs)
        first_s = self._start_s + self._first.pass_seconds(seqs, context, tokens, pairs, seqs)
        if steps == 1:
            return first_s
        later_s = self._later.pass_seconds(seqs, context + 0.5 * steps * seqs, 0, 0, seqs)
        return first_s + (steps - 1) * later_s

    def equal_passes(self, num_seqs: int, rows: int, steps: int) -> EqualSteps | None:
        """Returns the prices after passes of the same sequences; None: only `seconds` knows them."""
        if not (self._is_plain and rows and steps):
            return None
        tokens = num_seqs * (rows + self._extra)
        first = self._first.equal_passes(num_seqs, tokens, num_seqs, 1 + rows + self._extra)
        later = self._later.equal_passes(num_seqs, 0, num_seqs, 1)
        if first is None or later is None:
            return None
        return EqualSteps(self._start_s, first, later, steps - 1, 0.5 * steps * num_seqs)

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; the start is the host's."""
        once, laters = self._counts(shape)
        first = self._first.breakdown(self._to_first(shape))
        parts: dict[str, Any] = {name: once * first[name] for name in COMPONENTS}
        for count, rows in laters:
            later = self._later.breakdown(self._to_later(shape, rows))
            parts = {name: parts[name] + count * later[name] for name in COMPONENTS}
        return parts | {"host": parts["host"] + self._start_s}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of all steps, each once."""
        once, laters = self._counts(shape)
        lines = [waiting(self._start_s)]
        steps = [(once, self._first, self._to_first(shape))]
        steps += [(count, self._later, self._to_later(shape, rows)) for count, rows in laters]
        for times, model, step in steps:
            if times:
                lines += [_times(float(times), line) for line in model.explain(step)]
        return merged(lines)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of all steps."""
        return self._total(lambda model, step: model.flops(step), shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of all steps, each of which reads the draft's weights."""
        return self._total(lambda model, step: model.bytes_moved(step), shape)

    def _total(self, quantity: Callable[[StepModel, IterationShape], Num], shape: IterationShape) -> Num:
        once, laters = self._counts(shape)
        total: Num = once * quantity(self._first, self._to_first(shape))
        for count, rows in laters:
            total = total + count * quantity(self._later, self._to_later(shape, rows))
        return total

    def _counts(self, shape: IterationShape) -> tuple[Any, list[tuple[Any, int]]]:
        """Returns the number of first steps, 0 or 1, and those of steps after it by rows of a sequence."""
        _, _, seqs, steps, _ = drafts_of(shape)
        some = smaller(seqs, 1)
        once = 1 if self._has_kv else some * smaller(steps, 1)
        if not self._shape.level_rows:
            return once, [(larger(steps - 1, 0) * some, 1)]
        levels = enumerate(self._shape.level_rows[:-1], start=1)  # nothing follows the nodes of the last one
        return once, [(smaller(larger(steps - level, 0), 1) * some, rows) for level, rows in levels]

    def _to_first(self, shape: IterationShape) -> IterationShape:
        """Returns the first step of the draft after an iteration of the target."""
        tokens, pairs, seqs, _, _ = drafts_of(shape)
        if not self._has_kv:
            some = larger(seqs, 1)
            return IterationShape(some, drafting_context(shape), 0, 0, 0, 0, some)
        decodes, context = shape.decode_seqs, shape.decode_context_tokens
        if not self._shape.share:  # each row is that of a decode, with its own look at the context
            rows = 1 + self._extra
            own = DraftWork(0, 0, 0, 0, 0)
            return IterationShape(rows * decodes, rows * context, *shape[2:6], seqs, None, own)
        if self._shape.share != 1:
            kept, of = self._shape.share.as_integer_ratio()
            tokens, pairs = divided_up(kept * tokens, of), divided_up(kept * pairs, of)
        if self._extra:
            tokens, pairs = (
                tokens + self._extra * decodes,
                pairs + self._extra * (context + tokens + decodes),
            )
        return IterationShape(*shape[:6], seqs, None, DraftWork(tokens, pairs, 0, 0, 0))

    def _to_later(self, shape: IterationShape, rows: int) -> IterationShape:
        """Returns a step after the first one, with its rows of a sequence: that in their middle."""
        drafts = drafts_of(shape)
        seqs = larger(drafts.seqs, 1)
        context = drafting_context(shape) + 0.5 * drafts.steps * seqs
        if rows == 1:
            return IterationShape(seqs, context, 0, 0, 0, 0, seqs)
        work = DraftWork((rows - 1) * seqs, (rows - 1) * context, 0, 0, 0)
        return IterationShape(seqs, context, 0, 0, 0, 0, rows * seqs, None, work)


def drafting_context(shape: IterationShape) -> Any:
    """Returns the KV tokens of the sequences that draft: decodes first, then those of completed prompts."""
    decodes, context, chunks, _, _, prefill_context, *_ = shape
    seqs = drafts_of(shape).seqs
    of_decodes = context * smaller(seqs, decodes) / larger(decodes, 1)
    return of_decodes + prefill_context * larger(seqs - decodes, 0) / larger(chunks, 1)


def _times(times: float, line: Explained) -> Explained:
    return line._replace(
        seconds=times * line.seconds,
        share=0.0,
        flops=times * line.flops,
        bytes_moved=times * line.bytes_moved,
        calls=times * line.calls,
    )


def merged(lines: Iterable[Explained]) -> list[Explained]:
    """Returns one line per operator, with the sums of those of the same name."""
    sums: dict[str, Explained] = {}
    for line in lines:
        old = sums.get(line.operator)
        sums[line.operator] = (
            line
            if old is None
            else old._replace(
                seconds=old.seconds + line.seconds,
                flops=old.flops + line.flops,
                bytes_moved=old.bytes_moved + line.bytes_moved,
                calls=old.calls + line.calls,
            )
        )
    return list(sums.values())


def waiting(seconds: float) -> Explained:
    """Returns the line of the seconds in which devices wait for the host."""
    return Explained("host and launches", "host", seconds, 0.0, "host", 0.0, 0.0, 0.0)
