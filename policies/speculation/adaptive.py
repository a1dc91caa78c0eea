"""Drafts as many tokens as maximise the expected output tokens per second.

SmartSpec, later TurboSpec (Liu et al., arXiv 2406.14066): the goodput of K draft tokens is

    (1 + c_1 + c_1 c_2 + ... + c_1 ... c_K) / seconds of a pass with K draft tokens per sequence

where c_j is the measured probability that the draft token at place j is accepted if those before it are. K is
the same for all sequences. K = 0 is among the choices, so where no draft pays, none is made. Passes for which
a proposer finds nothing to draft do not count: they cost as little as they gain.

The estimate is that of a pass without a prompt. Draft tokens in a step that also computes a prompt take
longer, so more are drafted only for a gain of at least `min_gain`.

Places that are not drafted cannot be measured. A place without measurements is assumed to have the rate of
the place before it. Now and then a step is a probe, which drafts all places for a few sequences, in turn; the
time that probes may take limits how often.

    rates 0.8, 0.5, 0.2, passes of 10, 11, 12 and 13 ms with K = 0, 1, 2, 3
    K=0: 1 / 10 ms = 100 /s; K=1: 1.8 / 11 ms = 164 /s; K=2: 2.2 / 12 ms = 183 /s; K=3: 2.28 / 13 ms = 175 /s
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, NonNegative, Positive, PositiveInt, PositiveShare, Share, Unit
from policies.core.plan import FOREVER
from policies.speculation import AcceptanceCounts, DraftView


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
    """Sequences at the last decision; 0: none was made."""
    last_probe: int = -1
    """Iteration of the last probe."""
    probe_interval: int = 1
    """Number of iterations between two probes."""
    first_probed: int = 0
    """Index of the first sequence of the next probe."""
    reached: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """By place: draft tokens of which all before were accepted, the newest `window`."""
    accepted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """By place: those of `reached` that were accepted."""
    seen: AcceptanceCounts = field(default_factory=lambda: AcceptanceCounts.zero(0))
    """The engine's counts at the last decision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive(Checked):
    """Maximises the expected goodput of the whole batch, by measured acceptance and the price of a pass."""

    needs_cost: ClassVar[bool] = True
    reads_sequences: ClassVar[bool] = False

    interval: PositiveInt = 16
    """Iterations after which it decides anew; it also does when the batch has changed by an eighth."""
    window: PositiveInt = 2000
    """Number of draft tokens at a place from which its rate is measured; older ones are forgotten."""
    prior_rate: Share = 0.7
    """Rate that is assumed before the first measurement."""
    prior_weight: Annotated[Positive, Unit("draft tokens")] = 10.0
    """Number of draft tokens that an assumed rate counts as, once there are measurements."""
    min_gain: NonNegative = 0.02
    """Relative gain in goodput for which more tokens are drafted."""
    probe_share: PositiveShare = 0.005
    """Share of the time by which probes may make steps longer."""
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
        """Returns the best number by the last decision; in a probe, all places for some sequences."""
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
        """Iteration of the next probe; FOREVER while all places are drafted."""
        known = self._measured
        is_needed = known.length < len(known.reached)
        return known.last_probe + known.probe_interval if is_needed else FOREVER

    def rates(self) -> NDArray[np.float64]:
        """Returns the probability by place that a draft token is accepted if those before it are."""
        known, before, rates = self._measured, self.prior_rate, []
        for accepted, reached in zip(known.accepted.tolist(), known.reached.tolist(), strict=True):
            before = min((accepted + before * self.prior_weight) / (reached + self.prior_weight), 1.0)
            rates.append(before)
        return np.array(rates)

    def _learn(self, counts: AcceptanceCounts) -> None:
        """Adds what was counted since the last decision, and forgets what is older than the window."""
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
        """Takes the smallest number of draft tokens that is not worse than the best one by min_gain."""
        known = self._measured
        num_tokens = np.concatenate(([1.0], 1.0 + np.cumsum(np.cumprod(self.rates()))))
        seconds = np.array([view.pass_seconds(length) for length in range(view.max_draft_tokens + 1)])
        goodput = num_tokens / seconds
        known.length = int(np.argmax(goodput * (1 + self.min_gain) >= goodput.max()))
        known.decided_at, known.num_seqs = known.now, len(view.sequences)
        longer = float(seconds[-1] / seconds[known.length]) - 1
        known.probe_interval = max(ceil(longer / self.probe_share), self.interval)
