"""The parts of drafting after a pass: host work, and passes of models on the devices.

`Steps` are the passes of a draft, each over one row per sequence, as engines run them after sampling. The
last part of the module prices drafting on a device with measurements of the target but not of the draft. The
roofline seconds of a draft step's component, such as its matrix products, are scaled by the target's ratio of
measured to roofline seconds for that component, with the same rows and contexts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from fieldlimits import Checked, NonNegative, Unit
from hwmodels.exact import Num, divided_up, larger, smaller
from hwmodels.iterations import COMPONENTS, DraftWork, Explained, IterationShape
from hwmodels.iterations.decodes import ByContext


def drafts_of(shape: IterationShape) -> DraftWork:
    """Returns the draft tokens of an iteration with drafts."""
    assert shape.drafts is not None
    return shape.drafts


class DraftShape(NamedTuple):
    """The rows of a sequence in the steps of a draft, if they differ from a chain's."""

    level_rows: tuple[int, ...] = ()
    """Nodes by level of a tree, from the first level on; (): a chain."""
    share: Fraction = Fraction(1)
    """Share of the verified draft tokens computed in the first step of a draft with KV; 0: its rows are
    decodes.
    """

    @classmethod
    def of_tree(cls, level_rows: tuple[int, ...]) -> DraftShape:
        """Returns the shape of a tree: only one node per level can be accepted, and only it is computed."""
        return cls(level_rows, Fraction(len(level_rows), sum(level_rows)))


CHAIN = DraftShape()


class EqualSteps:
    """The seconds of steps after passes that differ only in their contexts.

    num_later: number of steps after the first. ahead: additional context tokens of each of these compared
    with the pass.
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
        """Computes `each` for non-decreasing contexts, as an array."""
        times_s = self._first.many(contexts)
        times_s += self._start_s
        if self._num_later:
            later_s = self._later.many(contexts + self._ahead)
            later_s *= self._num_later
            times_s += later_s
        return times_s


class Drafting(Protocol):
    """Prices the drafting after a pass. Results are numbers, or bit-identical arrays."""

    def scaled_by(self, target: TargetScale) -> Drafting:
        """Returns the same drafting on a device whose target is measured."""

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds from the end of the pass to the end of drafting."""

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component (`COMPONENTS`); they sum to `seconds`."""

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators, each once; their seconds sum to `seconds`; shares are 0."""

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of drafting."""

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV that drafting reads."""


class InPasses(ABC):
    """Drafting by consecutive passes of models on the devices, preceded by host work."""

    @abstractmethod
    def host_seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds in which the devices wait for the host."""

    @abstractmethod
    def passes(self, shape: IterationShape) -> Iterator[tuple[Any, StepModel, IterationShape]]:
        """Yields the number of runs of a pass on the devices, the model that prices it, and its shape."""

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of the host and of all passes."""
        seconds = self.host_seconds(shape)
        for count, model, step in self.passes(shape):
            if isinstance(count, ndarray) or count:
                seconds = seconds + count * model.seconds(step)
        return seconds

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component (`COMPONENTS`); they sum to `seconds`."""
        parts: dict[str, Any] = dict.fromkeys(COMPONENTS, 0.0)
        for count, model, step in self.passes(shape):
            own = model.breakdown(step)
            parts = {name: parts[name] + count * own[name] for name in COMPONENTS}
        return parts | {"host": parts["host"] + self.host_seconds(shape)}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators, each once; their seconds sum to `seconds`; shares are 0."""
        lines = [waiting(float(self.host_seconds(shape)))]
        for count, model, step in self.passes(shape):
            if count:
                lines += [_times(float(count), line) for line in model.explain(step)]
        return merged(lines)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of all passes."""
        total: Num = 0.0
        for count, model, step in self.passes(shape):
            total = total + count * model.flops(step)
        return total

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV that all passes read."""
        total: Num = 0.0
        for count, model, step in self.passes(shape):
            total = total + count * model.bytes_moved(step)
        return total


class OnHost(InPasses):
    """Host-only work, such as a search; host_seconds: its seconds by the shape of the iteration."""

    def __init__(self, host_seconds: Callable[[IterationShape], Any]) -> None:
        self._host_seconds = host_seconds

    def scaled_by(self, target: TargetScale) -> OnHost:
        """Returns itself: the host's seconds are settings."""
        return self

    def host_seconds(self, shape: IterationShape) -> Any:
        return self._host_seconds(shape)

    def passes(self, shape: IterationShape) -> Iterator[tuple[Any, StepModel, IterationShape]]:
        yield from ()


class InTurn:
    """Drafts that run one after the other."""

    def __init__(self, parts: Sequence[Drafting]) -> None:
        self._parts = parts

    def scaled_by(self, target: TargetScale) -> InTurn:
        return InTurn([part.scaled_by(target) for part in self._parts])

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of all parts."""
        return sum(part.seconds(shape) for part in self._parts)

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component of all parts."""
        found = [part.breakdown(shape) for part in self._parts]
        return {name: sum(one[name] for one in found) for name in COMPONENTS}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of all parts, one part after the other."""
        return [line for part in self._parts for line in part.explain(shape)]

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of all parts."""
        return sum(part.flops(shape) for part in self._parts)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of all parts."""
        return sum(part.bytes_moved(shape) for part in self._parts)


class Steps(InPasses):
    """Sequential steps of a draft.

    first, later: prices of the first step and of later ones. has_kv: the first step computes the rows and the
    chunks of the target's pass, plus `extra` rows per decoding sequence, even if no token is drafted; without
    KV it has one row per sequence. shape: rows of a sequence in all steps.
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
        """Returns the same steps with prices scaled like the target's."""
        return Steps(
            RelativeStep(self._first, target),
            RelativeStep(self._later, target),
            start_s=self._start_s,
            has_kv=self._has_kv,
            extra=self._extra,
            shape=self._shape,
        )

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds from the end of the pass to the end of the last step."""
        if self._is_plain:
            decodes, context, _, chunks, *_, work, _ = shape
            tokens, pairs, seqs, steps, _ = cast("Any", work)
            all_draft = type(decodes) is int and type(seqs) is int and seqs == decodes and chunks == 0
            if all_draft and type(tokens) is int and type(steps) is int and steps:
                return self._seconds_of_decodes(seqs, context, tokens, pairs, steps)
        return super().seconds(shape)

    def _seconds_of_decodes(self, seqs: int, context: Any, tokens: int, pairs: Any, steps: int) -> Any:
        """Computes `seconds` if all decodes draft, in half the time. Contexts and pairs may be arrays."""
        if self._extra:
            tokens, pairs = tokens + self._extra * seqs, pairs + self._extra * (context + tokens + seqs)
        first_s = self._start_s + self._first.pass_seconds(seqs, context, tokens, pairs, seqs)
        if steps == 1:
            return first_s
        later_s = self._later.pass_seconds(seqs, context + 0.5 * steps * seqs, 0, 0, seqs)
        return first_s + (steps - 1) * later_s

    def equal_passes(self, num_seqs: int, rows: int, steps: int) -> EqualSteps | None:
        """Returns the prices after passes of the same sequences; None: only `seconds` can compute them."""
        if not (self._is_plain and rows and steps):
            return None
        tokens = num_seqs * (rows + self._extra)
        first = self._first.equal_passes(num_seqs, tokens, num_seqs, 1 + rows + self._extra)
        later = self._later.equal_passes(num_seqs, 0, num_seqs, 1)
        if first is None or later is None:
            return None
        return EqualSteps(self._start_s, first, later, steps - 1, 0.5 * steps * num_seqs)

    def host_seconds(self, shape: IterationShape) -> Any:
        return self._start_s

    def passes(self, shape: IterationShape) -> Iterator[tuple[Any, StepModel, IterationShape]]:
        once, laters = self._counts(shape)
        yield once, self._first, self._to_first(shape)
        for count, rows in laters:
            yield count, self._later, self._to_later(shape, rows)

    def _counts(self, shape: IterationShape) -> tuple[Any, list[tuple[Any, int]]]:
        """Returns the number of first steps (0 or 1), and the numbers of later steps by rows per sequence."""
        _, _, seqs, steps, _ = drafts_of(shape)
        some = smaller(seqs, 1)
        once = 1 if self._has_kv else some * smaller(steps, 1)
        if not self._shape.level_rows:
            return once, [(larger(steps - 1, 0) * some, 1)]
        levels = enumerate(self._shape.level_rows[:-1], start=1)  # no step follows the nodes of the last one
        return once, [(smaller(larger(steps - level, 0), 1) * some, rows) for level, rows in levels]

    def _to_first(self, shape: IterationShape) -> IterationShape:
        """Returns the first step of the draft after an iteration of the target."""
        tokens, pairs, seqs, _, _ = drafts_of(shape)
        if not self._has_kv:
            some = larger(seqs, 1)
            return IterationShape(some, drafting_context(shape), 0, 0, 0, 0, some)
        decodes, context = shape.decode_seqs, shape.decode_context_tokens
        if not self._shape.share:  # each row is like a decode that reads the context separately
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
        """Returns the middle one of the later steps with this many rows per sequence."""
        drafts = drafts_of(shape)
        seqs = larger(drafts.seqs, 1)
        context = drafting_context(shape) + 0.5 * drafts.steps * seqs
        if rows == 1:
            return IterationShape(seqs, context, 0, 0, 0, 0, seqs)
        work = DraftWork((rows - 1) * seqs, (rows - 1) * context, 0, 0, 0)
        return IterationShape(seqs, context, 0, 0, 0, 0, rows * seqs, None, work)


class Windows(InPasses):
    """Lookahead decoding whose window is refined in a separate pass after the verifying one.

    It is a pass of the target over the newest token and the window's rows of each drafting sequence. guesses:
    rows of a window. columns: the number of them from which tokens are sampled. start_s: seconds for which
    the devices wait for the host after each pass.
    """

    def __init__(self, target: StepModel, *, guesses: int, columns: int, start_s: float) -> None:
        self._target = target
        self._guesses, self._columns, self._start_s = guesses, columns, start_s

    def scaled_by(self, target: TargetScale) -> Windows:
        """Returns the same passes with prices scaled like the target's."""
        step = RelativeStep(self._target, target)
        return Windows(step, guesses=self._guesses, columns=self._columns, start_s=self._start_s)

    def host_seconds(self, shape: IterationShape) -> Any:
        return self._start_s

    def passes(self, shape: IterationShape) -> Iterator[tuple[Any, StepModel, IterationShape]]:
        _, _, seqs, steps, _ = drafts_of(shape)
        yield smaller(seqs, 1) * smaller(steps, 1), self._target, self._pass(shape)

    def _pass(self, shape: IterationShape) -> IterationShape:
        """Returns the pass of all drafting sequences, at least one."""
        seqs, context = larger(drafts_of(shape).seqs, 1), drafting_context(shape)
        guesses = self._guesses
        pairs = guesses * context + (guesses * (guesses + 1) // 2) * seqs
        rows = DraftWork(guesses * seqs, pairs, 0, 0, 0)
        return IterationShape(seqs, context, 0, 0, 0, 0, self._columns * seqs, None, rows)


def drafting_context(shape: IterationShape) -> Any:
    """Returns the KV tokens of the drafting sequences: decodes first, then completed prompts."""
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
    """Returns one line per operator name, with sums."""
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
    """Returns the line of the devices' waiting time for the host."""
    return Explained("host and launches", "host", seconds, 0.0, "host", 0.0, 0.0, 0.0)


NOT_OPERATORS = ("host", "launch")

Breakdown = Callable[[IterationShape], Mapping[str, Num]]
"""Returns the seconds of an iteration by component."""


class TargetScale:
    """Ratio of measured to modelled seconds of a target, by component."""

    def __init__(self, measured: Breakdown, modelled: Breakdown) -> None:
        self._measured = measured
        self._modelled = modelled

    def scaled(self, parts: dict[str, Num], shape: IterationShape) -> dict[str, Num]:
        """Returns the seconds per component of a draft, scaled like the target in an iteration of this shape.

        A component with 0 s in the target's model is scaled like all its operators together.
        """
        measured, modelled = self._measured(shape), self._modelled(shape)
        names = [name for name in parts if name not in NOT_OPERATORS]
        of_all = _ratio(sum(measured[name] for name in names), sum(modelled[name] for name in names), 1.0)
        scaled = {name: parts[name] * _ratio(measured[name], modelled[name], of_all) for name in names}
        return parts | scaled


class StepModel(Protocol):
    """Prices steps of a draft: a `Roofline`, or one scaled by the target's measured times."""

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of a step."""

    def pass_seconds(self, num_seqs: int, context_tokens: Any, tokens: int, pairs: Any, rows: int, /) -> Any:
        """Returns the seconds of decodes with additional rows; see `Roofline.pass_seconds`."""

    def equal_passes(self, num_seqs: int, tokens: int, rows: int, most_pairs: float, /) -> ByContext | None:
        """Returns the prices of passes that differ only in contexts.

        None: only `seconds` can compute them.
        """

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; they sum to `seconds`."""

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of a step."""

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of a step."""

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes that a step reads."""


class RelativeStep:
    """Prices steps like another model, each scaled like the target in an iteration of the same shape."""

    def __init__(self, step: StepModel, target: TargetScale) -> None:
        self._step = step
        self._target = target

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of a step."""
        return sum(self.breakdown(shape).values())

    def pass_seconds(self, num_seqs: int, context: Any, tokens: int, pairs: Any, sampled: int) -> Any:
        """Returns the seconds of decodes with additional rows; see `Roofline.pass_seconds`."""
        drafts = DraftWork(tokens, pairs, 0, 0, 0)
        return self.seconds(IterationShape(num_seqs, context, 0, 0, 0, 0, sampled, None, drafts))

    def equal_passes(self, num_seqs: int, tokens: int, sampled: int, most_pairs: float) -> None:
        """Returns None: only `seconds` can compute the prices."""
        return

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; they sum to `seconds`."""
        return self._target.scaled(self._step.breakdown(shape), shape)

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of a step; their seconds sum to `seconds`, in the roofline's proportions."""
        lines = self._step.explain(shape)
        scale = float(self.seconds(shape)) / max(sum(line.seconds for line in lines), 1e-12)
        return [line._replace(seconds=scale * line.seconds) for line in lines]

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of a step."""
        return self._step.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV that a step reads."""
        return self._step.bytes_moved(shape)


def _ratio(measured: Any, modelled: Any, otherwise: Any) -> Any:
    some = np.asarray(modelled) > 0
    return np.where(some, measured / np.where(some, modelled, 1.0), otherwise)[()]


OTHERS = "others"
"""Key of the host time of all proposers without their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHost(Checked):
    """Seconds that an engine's process spends on drafts in an iteration, in addition to `HostOverhead`.

    iteration_s + sequence_s x sequences + token_s x draft tokens that are verified
    + kilotoken_s x 1,000 tokens of context of the sequences for which it drafts
    """

    iteration_s: Annotated[NonNegative, Unit("s")] = 0.0
    sequence_s: Annotated[NonNegative, Unit("s")] = 0.0
    token_s: Annotated[NonNegative, Unit("s")] = 0.0
    kilotoken_s: Annotated[NonNegative, Unit("s")] = 0.0

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of an iteration with draft tokens."""
        return (
            self.iteration_s
            + self.sequence_s * (shape.decode_seqs + shape.prefill_seqs)
            + self.token_s * drafts_of(shape).tokens
            + self.kilotoken_s * 0.001 * drafting_context(shape)
        )


def draft_host_of(hosts: Mapping[str, DraftHost], method: str) -> DraftHost | None:
    """Returns the host time of a proposer, or of all others; None: neither is known."""
    return hosts.get(method) or hosts.get(OTHERS)
