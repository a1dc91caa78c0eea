"""Draft-length policies: the number of draft tokens for the next pass of each sequence."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from fieldlimits import (
    Checked,
    Ge,
    Lt,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
    Unit,
    check,
)
from policies.core.plan import FOREVER
from policies.speculation import AcceptanceCounts, DraftView


@dataclass(frozen=True, kw_only=True, slots=True)
class NoDrafts:
    """Never drafts: the baseline with the memory costs of speculation and none of its gains."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False

    @property
    def num_repeats(self) -> int:
        """Returns FOREVER: its decision is the same in every step."""
        return FOREVER

    def num_draft_tokens(self, view: DraftView) -> int:
        """Returns 0."""
        return 0

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns 0, its only number."""
        return (0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed(Checked):
    """Drafts the same number of tokens for all sequences, as vLLM does by default."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False

    num_tokens: Annotated[NonNegativeInt | None, "null for all that it drafts"] = None
    """Draft tokens per pass; None: the proposer's maximum."""

    @property
    def num_repeats(self) -> int:
        """Returns FOREVER: its decision is the same in every step."""
        return FOREVER

    def num_draft_tokens(self, view: DraftView) -> int:
        """Returns the number, limited by the proposer's maximum."""
        limit = view.max_draft_tokens
        return limit if self.num_tokens is None else min(self.num_tokens, limit)

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns its only number."""
        return (most if self.num_tokens is None else min(self.num_tokens, most),)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByBatchSize:
    """Looks the number up by the number of requests in the step (including prefills), like vLLM.

    Verification takes time once the draft tokens make a pass compute-bound, so large batches draft little. As
    in vLLM 0.32, batch sizes between two ranges and above the last range use the number of the preceding
    range, and no number exceeds the proposer's maximum.

        [[1, 16, 5], [32, 128, 2]]    1-31 requests: 5 draft tokens; 32 and more: 2
    """

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False

    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = (
        (1, 16, 3),
        (17, 64, 2),
        (65, 256, 1),
    )
    """Ranges of (smallest, largest number of requests, draft tokens); both ends are inclusive."""
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranges = sorted(self.num_speculative_tokens_per_batch_size)
        _check(ranges)
        object.__setattr__(self, "_starts", tuple(start for start, _, _ in ranges))
        object.__setattr__(self, "_lengths", tuple(length for _, _, length in ranges))

    @property
    def num_repeats(self) -> int:
        """Returns FOREVER: only the number of requests matters."""
        return FOREVER

    def num_draft_tokens(self, view: DraftView) -> int:
        """Returns the number of the last range that begins at or below the number of requests."""
        if view.num_requests < 1:
            return view.max_draft_tokens
        length = self._lengths[bisect_right(self._starts, view.num_requests) - 1]
        return min(length, view.max_draft_tokens)

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns the numbers of all ranges."""
        return tuple(sorted({min(length, most) for length in self._lengths}))


def _check(ranges: list[tuple[int, int, int]]) -> None:
    key = "num_speculative_tokens_per_batch_size"
    if not ranges:
        raise ValueError(f"{key}=[]: must have at least one range, such as [1, 32, 4]")
    for start, end, length in ranges:
        if not 1 <= start <= end:
            raise ValueError(
                f"{key}: the range [{start}, {end}, {length}] must have 1 <= smallest <= largest requests"
            )
        if length < 0:
            raise ValueError(f"{key}: the range [{start}, {end}, {length}] must have >= 0 draft tokens")
    if ranges[0][0] != 1:
        raise ValueError(
            f"{key}: the first range begins at {ranges[0][0]} requests; it must begin at 1, "
            "so that every batch has a number of draft tokens"
        )
    for (_, end, _), (start, _, _) in pairwise(ranges):
        if start <= end:
            raise ValueError(
                f"{key}: ranges must not overlap, but one ends at {end} requests and one begins at {start}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff(Checked):
    """Drafts for every sequence except those with `max_misses` consecutive failed drafts, which pause.

    Some texts are hard to predict, and their drafts cost rows of a pass. After `max_misses` consecutive
    passes without an accepted draft token a sequence pauses. It drafts again for one pass whenever the number
    of its output tokens is a multiple of its interval, which doubles with each further miss (binary
    exponential backoff, as in Ethernet: Metcalfe and Boggs, 1976); the first accepted token ends the pause. A
    pausing sequence gets one token per pass, so the interval counts passes. The decision uses only the counts
    of a sequence: the policy has no state.

        max_misses=4, retry_interval=16:  misses  4-4  -> drafts at 16, 32, 48, ... output tokens
                                                  5    -> at 32, 64, ...
                                                  6    -> at 64, 128, ...
    """

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = True

    max_misses: PositiveInt = 4
    """Number of consecutive passes without an accepted draft token after which a sequence pauses."""
    retry_interval: PositiveInt = 16
    """Initial number of output tokens between two attempts of a pausing sequence; it doubles later."""
    max_interval: PositiveInt = 256
    """Largest interval in output tokens: retry_interval times a power of 2."""
    num_tokens: Annotated[PositiveInt | None, "null for all that it drafts"] = None
    """Draft tokens per pass; None: the proposer's maximum."""

    def __post_init__(self) -> None:
        check(self)
        factor, rest = divmod(self.max_interval, self.retry_interval)
        if rest or factor & (factor - 1) or factor < 1:
            raise ValueError(
                f"max_interval={self.max_interval}: must be retry_interval={self.retry_interval} "
                "times a power of 2 (1, 2, 4, ...)"
            )

    @property
    def num_repeats(self) -> int:
        """Returns 1, because sequences pause and try again while the batch stays the same."""
        return 1

    def num_draft_tokens(self, view: DraftView) -> NDArray[np.int64]:
        """Returns num_tokens for each sequence that is not pausing or tries again, else 0."""
        limit = view.max_draft_tokens
        length = limit if self.num_tokens is None else min(self.num_tokens, limit)
        num_doublings = (self.max_interval // self.retry_interval).bit_length() - 1
        over = np.minimum(view.num_misses - self.max_misses, num_doublings)
        interval = np.left_shift(self.retry_interval, np.maximum(over, 0))
        return np.where((over < 0) | (view.num_output_tokens % interval == 0), length, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SloAware(Checked):
    """Drafts for the sequences whose TPOT so far exceeds a share of the SLO's TPOT.

    This is the idea of AdaServe (arXiv 2501.12162, 2025): verification is spent on the sequences that need
    it. AdaServe selects nodes of a token tree by the draft model's probabilities; here a sequence gets all
    draft tokens or none. The TPOT of a sequence so far is (now - time of its first token) / (output tokens -
    1); a sequence with one output token has no TPOT and is not behind. With asynchronous scheduling the
    tokens of the last step are not read yet, so the TPOT of a short output is overestimated by at most one
    step per token.
    """

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = True

    tpot_s: Annotated[Positive | None, Unit("s"), "null for that of the SLO"] = None
    """Target time per output token, s; None: the SLO's."""
    margin: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.1
    """Margin, as a share of tpot_s, by which a sequence must be faster to get no drafts."""
    num_tokens: Annotated[PositiveInt | None, "null for all that it drafts"] = None
    """Draft tokens per pass of a sequence that is behind; None: the proposer's maximum."""

    @property
    def needs_tpot(self) -> bool:
        """True if the run must have an SLO with a TPOT."""
        return self.tpot_s is None

    @property
    def num_repeats(self) -> int:
        """Returns 1, because sequences fall behind and catch up while the batch stays the same."""
        return 1

    def num_draft_tokens(self, view: DraftView) -> NDArray[np.int64]:
        """Returns num_tokens for each sequence that is behind, else 0."""
        tpot_s = view.tpot_s if self.tpot_s is None else self.tpot_s
        assert tpot_s is not None, "needs_tpot"
        limit = view.max_draft_tokens
        length = limit if self.num_tokens is None else min(self.num_tokens, limit)
        allowed_s = (view.num_output_tokens - 1) * (tpot_s * (1 - self.margin))
        is_behind = (view.now - view.first_token_s > allowed_s) & (view.num_output_tokens > 1)
        return np.where(is_behind, length, 0)


@dataclass(slots=True)
class _Measured:
    """Measured acceptance and the last decision."""

    length: int = 0
    """Draft tokens per sequence."""
    now: int = 0
    """Number of iterations that the engine has run."""
    decided_at: int = 0
    """Iteration of the last decision."""
    num_seqs: int = 0
    """Number of sequences at the last decision; 0: no decision yet."""
    last_probe: int = -1
    """Iteration of the last probe."""
    probe_interval: int = 1
    """Number of iterations between two probes."""
    first_probed: int = 0
    """Index of the first sequence of the next probe."""
    reached: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Per place: number of draft tokens whose earlier tokens were all accepted, over the newest `window`."""
    accepted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Per place: number of tokens in `reached` that were accepted."""
    seen: AcceptanceCounts = field(default_factory=lambda: AcceptanceCounts.zero(0))
    """The engine's counts at the last decision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive(Checked):
    """Maximises the expected goodput of the whole batch, from measured acceptance and the price of a pass.

    Drafts as many tokens as maximise the expected output tokens per second.

    SmartSpec, later TurboSpec (Liu et al., arXiv 2406.14066): the goodput of K draft tokens is

        (1 + c_1 + c_1 c_2 + ... + c_1 ... c_K) / seconds of a pass with K draft tokens per sequence

    where c_j is the measured probability that the draft token at place j is accepted if all earlier ones are.
    K is the same for all sequences. K = 0 is allowed, so no tokens are drafted where drafts do not pay.
    Passes for which a proposer finds no draft do not count: they have neither cost nor gain.

    The estimate is that of a pass without a prompt. Draft tokens in a step that also computes a prompt take
    longer, so more are drafted only for a gain of at least `min_gain`.

    Places that are not drafted cannot be measured. A place without measurements is assumed to have the rate
    of the previous place. Occasionally a step is a probe, which drafts all places for a few sequences in
    turn; a limit on the time of probes determines their frequency.

        rates 0.8, 0.5, 0.2, passes of 10, 11, 12 and 13 ms with K = 0, 1, 2, 3
        K=0: 1 / 10 ms = 100 /s  K=1: 1.8 / 11 ms = 164 /s  K=2: 2.2 / 12 ms = 183 /s  K=3: 2.28 / 13 ms = 175
    """

    needs_cost: ClassVar[bool] = True
    reads_sequences: ClassVar[bool] = False

    interval: PositiveInt = 16
    """Number of iterations between decisions; a change of the batch by an eighth also causes one."""
    window: PositiveInt = 2000
    """Number of draft tokens per place over which its rate is measured; older ones are dropped."""
    prior_rate: Share = 0.7
    """Rate that is assumed before the first measurement."""
    prior_weight: Annotated[Positive, Unit("draft tokens")] = 10.0
    """Number of draft tokens that the assumed rate counts as, once there are measurements."""
    min_gain: NonNegative = 0.02
    """Relative gain in goodput for which more tokens are drafted."""
    probe_share: PositiveShare = 0.005
    """Maximum relative increase of step time due to probes."""
    probe_sequences: PositiveInt = 4
    """Number of sequences that draft all places in a probe."""
    _measured: _Measured = field(init=False, repr=False, compare=False, default_factory=_Measured)

    @property
    def num_repeats(self) -> int:
        """Returns the number of iterations until the next decision or probe; 1 in a probe."""
        known = self._measured
        if known.last_probe == known.now:
            return 1
        return min(known.decided_at + self.interval, self._next_probe) - known.now

    def num_draft_tokens(self, view: DraftView) -> int | NDArray[np.int64]:
        """Returns the best number of the last decision; in a probe, all places for some sequences."""
        known, num_seqs = self._measured, len(view.sequences)
        if not num_seqs:
            return 0
        known.now = view.num_iterations
        has_changed = abs(num_seqs - known.num_seqs) * 8 > known.num_seqs
        if has_changed or known.now >= known.decided_at + self.interval:
            self._learn(view.acceptance)
            self._decide(view)
        if known.now < self._next_probe:
            return known.length
        known.last_probe = known.now
        lengths = np.full(num_seqs, known.length)
        num_probed = min(self.probe_sequences, num_seqs)
        lengths[(known.first_probed + np.arange(num_probed)) % num_seqs] = view.max_draft_tokens
        known.first_probed = (known.first_probed + num_probed) % num_seqs
        return lengths

    @property
    def _next_probe(self) -> int:
        """Iteration of the next probe; FOREVER while every place is drafted, so that no probe is needed."""
        known = self._measured
        is_needed = known.length < len(known.reached)
        return known.last_probe + known.probe_interval if is_needed else FOREVER

    def rates(self) -> NDArray[np.float64]:
        """Returns the probability per place that a draft token is accepted if all earlier ones are."""
        known, before, rates = self._measured, self.prior_rate, []
        for accepted, reached in zip(known.accepted.tolist(), known.reached.tolist(), strict=True):
            before = min((accepted + before * self.prior_weight) / (reached + self.prior_weight), 1.0)
            rates.append(before)
        return np.array(rates)

    def _learn(self, counts: AcceptanceCounts) -> None:
        """Adds the counts since the last decision, and drops counts older than the window."""
        known = self._measured
        if not known.reached.size:
            known.reached = np.zeros(len(counts.drafted))
            known.accepted = np.zeros(len(counts.drafted))
            known.seen = AcceptanceCounts.zero(len(counts.drafted))
        new = AcceptanceCounts(counts.drafted - known.seen.drafted, counts.accepted - known.seen.accepted)
        known.seen = AcceptanceCounts(counts.drafted.copy(), counts.accepted.copy())
        num_new = new.reached()
        num_kept = np.minimum(known.reached, np.maximum(self.window - num_new, 0.0))
        known.accepted = known.accepted * (num_kept / np.maximum(known.reached, 1e-9)) + new.accepted
        known.reached = num_kept + num_new

    def _decide(self, view: DraftView) -> None:
        """Chooses the smallest number of draft tokens within min_gain of the best one."""
        known = self._measured
        num_tokens = np.concatenate(([1.0], 1.0 + np.cumsum(np.cumprod(self.rates()))))
        seconds = np.array([view.pass_seconds(length) for length in range(view.max_draft_tokens + 1)])
        goodput = num_tokens / seconds
        known.length = int(np.argmax(goodput * (1 + self.min_gain) >= goodput.max()))
        known.decided_at, known.num_seqs = known.now, len(view.sequences)
        longer = float(seconds[-1] / seconds[known.length]) - 1
        known.probe_interval = max(ceil(longer / self.probe_share), self.interval)
