"""Sequential steps of a draft, each a pass over one row per sequence, as engines run them after sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from hwmodels.assembly.roofline import Roofline
from hwmodels.exact import Num, larger, smaller
from hwmodels.iterations.equal_passes import EqualPasses
from hwmodels.iterations.iteration import COMPONENTS, DraftWork, Explained, IterationShape


def drafts_of(shape: IterationShape) -> DraftWork:
    """Returns the draft tokens of an iteration that has some."""
    assert shape.drafts is not None
    return shape.drafts


class EqualSteps:
    """The seconds of steps after passes that differ in their contexts only.

    num_later: steps after the first. ahead: context tokens that each of these has more than the pass.
    """

    __slots__ = ("_ahead", "_first", "_later", "_num_later", "_start_s")

    few_passes = EqualPasses.few_passes

    def __init__(
        self, start_s: float, first: EqualPasses, later: EqualPasses, num_later: int, ahead: float
    ) -> None:
        self._start_s, self._first, self._later = start_s, first, later
        self._num_later, self._ahead = num_later, ahead

    def each(self, contexts: list[float]) -> list[float]:
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
    """Sequential steps of a draft, each priced by a roofline.

    first, later: rooflines of the first step and of those after it. has_kv: the first one computes the rows
    and the chunks of the target's pass, and `extra` rows more for each decoding sequence, even if no token is
    to be drafted; else it has one row per sequence. rows: rows of a sequence in a later step, with a tree
    those of its widest level.
    """

    def __init__(
        self,
        first: Roofline,
        later: Roofline,
        *,
        start_s: float,
        has_kv: bool = True,
        extra: int = 0,
        rows: int = 1,
    ) -> None:
        self._first, self._later, self._start_s = first, later, start_s
        self._has_kv, self._extra, self._rows = has_kv, extra, rows

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds from the end of the pass to that of the last step."""
        if self._has_kv and self._rows == 1:
            decodes, context, _, chunks, *_, work = shape
            tokens, pairs, seqs, steps, _ = cast("Any", work)
            all_draft = type(decodes) is int and type(seqs) is int and seqs == decodes and chunks == 0
            if all_draft and type(tokens) is int and type(steps) is int and steps:
                return self._seconds_of_decodes(seqs, context, tokens, pairs, steps)
        once, count = self._counts(shape)
        first_s = self._start_s + once * self._first.seconds(self._to_first(shape))
        if not isinstance(count, ndarray) and not count:
            return first_s
        return first_s + count * self._later.seconds(self._to_later(shape))

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
        if not (self._has_kv and self._rows == 1 and rows and steps):
            return None
        tokens = num_seqs * (rows + self._extra)
        first = self._first.equal_passes(num_seqs, tokens, num_seqs, 1 + rows + self._extra)
        later = self._later.equal_passes(num_seqs, 0, num_seqs, 1)
        if first is None or later is None:
            return None
        return EqualSteps(self._start_s, first, later, steps - 1, 0.5 * steps * num_seqs)

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; the start is the host's."""
        once, count = self._counts(shape)
        first, later = (
            self._first.breakdown(self._to_first(shape)),
            self._later.breakdown(self._to_later(shape)),
        )
        parts: dict[str, Num] = {name: once * first[name] + count * later[name] for name in COMPONENTS}
        return parts | {"host": parts["host"] + self._start_s}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of all steps, each once."""
        once, count = self._counts(shape)
        lines = [waiting(self._start_s)]
        for times, step in ((once, (self._first, self._to_first)), (count, (self._later, self._to_later))):
            if times:
                lines += [_times(float(times), line) for line in step[0].explain(step[1](shape))]
        return merged(lines)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of all steps."""
        return self._total(Roofline.flops, shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of all steps, each of which reads the draft's weights."""
        return self._total(Roofline.bytes_moved, shape)

    def _total(self, quantity: Callable[[Roofline, IterationShape], Num], shape: IterationShape) -> Num:
        once, count = self._counts(shape)
        first, later = (
            quantity(self._first, self._to_first(shape)),
            quantity(self._later, self._to_later(shape)),
        )
        total: Num = once * first + count * later
        return total

    def _counts(self, shape: IterationShape) -> tuple[Any, Any]:
        """Returns the number of first steps, 0 or 1, and of steps after it."""
        _, _, seqs, steps, _ = drafts_of(shape)
        some = smaller(seqs, 1)
        return 1 if self._has_kv else some * smaller(steps, 1), larger(steps - 1, 0) * some

    def _to_first(self, shape: IterationShape) -> IterationShape:
        """Returns the first step of the draft after an iteration of the target."""
        tokens, pairs, seqs, _, _ = drafts_of(shape)
        if not self._has_kv:
            some = larger(seqs, 1)
            return IterationShape(some, drafting_context(shape), 0, 0, 0, 0, some)
        decodes, context = shape.decode_seqs, shape.decode_context_tokens
        if self._extra:
            tokens, pairs = (
                tokens + self._extra * decodes,
                pairs + self._extra * (context + tokens + decodes),
            )
        return IterationShape(*shape[:6], seqs, None, DraftWork(tokens, pairs, 0, 0, 0))

    def _to_later(self, shape: IterationShape) -> IterationShape:
        """Returns the step in the middle of those after the first one."""
        drafts = drafts_of(shape)
        seqs = larger(drafts.seqs, 1)
        context = drafting_context(shape) + 0.5 * drafts.steps * seqs
        if self._rows == 1:
            return IterationShape(seqs, context, 0, 0, 0, 0, seqs)
        more = self._rows - 1
        work = DraftWork(more * seqs, more * context, 0, 0, 0)
        return IterationShape(seqs, context, 0, 0, 0, 0, self._rows * seqs, None, work)


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
