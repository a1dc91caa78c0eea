"""Times at which the sequences of an engine produced their latest tokens.

The sequences that decode together share one time. The iteration log derives inter-token latencies from the
ends of iterations; only the gaps that differ from those of the other sequences are logged one by one.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import chain

from policies.core.engine import EngineCore
from policies.core.plan import StepPlan
from policies.core.sequence import COMPUTING, DECODING, ENDED, PAUSED, Sequence
from sim.records.iterations import IterationLog
from sim.records.requests import RequestLog

_BYTES = 4  # per parent that is drawn


class LastTokens:
    """Times of the latest tokens of one engine, or of the engine that replaced it after a crash."""

    __slots__ = ("_branched_s", "_core", "_requests", "_seed", "apart", "last_decode_s")

    def __init__(self, core: EngineCore, requests: RequestLog, seed: int) -> None:
        self.last_decode_s = 0.0
        """Time of the latest token of decoding sequences that are not in `apart` and have no branches, s."""
        self.apart: dict[Sequence, float] = {}
        """Time of the latest token, s, of sequences that produced it in a prefill or before a swap-out."""
        self._core = core
        self._requests = requests
        self._seed = seed
        self._branched_s: dict[int, float] = {}  # by request id, for sequences with branches

    def reset(self, core: EngineCore) -> None:
        """Forgets all sequences; `core` replaces the engine that has crashed."""
        self._core = core
        self.apart.clear()
        self._branched_s.clear()

    def emit(self, seq: Sequence, time_s: float) -> None:
        """Sets the time of a token that a sequence has produced in a prefill or before a swap-out."""
        if seq.request.branching is None:
            self.apart[seq] = time_s
        else:
            self._branched_s[seq.request_id] = time_s

    def forget(self, seq: Sequence) -> None:
        """Removes a sequence that has ended or leaves the replica."""
        self.apart.pop(seq, None)
        self._branched_s.pop(seq.request_id, None)

    def last_s(self, seq: Sequence) -> float:
        """Returns the time at which a sequence produced its latest token, s; NaN if it has none."""
        if seq in self.apart:
            return self.apart[seq]
        if seq.request_id in self._branched_s:
            return self._branched_s[seq.request_id]
        is_emitting = seq.state in (COMPUTING, DECODING, PAUSED)
        if is_emitting and seq.request.branching is None and seq not in self._core.arrived:
            return self.last_decode_s
        return self._requests.last_token_s[seq.request_id]

    def preempted(self, seq: Sequence) -> None:
        """Stores the time of the latest token of a preempted sequence, where its next gap begins."""
        if seq.state is ENDED:  # aborted before a plan could list it
            return
        requests, request_id = self._requests, seq.request_id
        last_s = self._branched_s.pop(request_id, self.last_decode_s)
        last_s = self.apart.pop(seq, last_s)
        # Without a new token since the last preemption, that time is still the one to keep.
        num_emitted = seq.num_emitted_tokens
        if seq.request.branching is None:  # a token that is discarded, to be computed again, counts once
            num_emitted = max(num_emitted, seq.num_lost + 1 - seq.num_prompt_tokens)
        if num_emitted > requests.output_tokens[request_id]:
            requests.last_token_s[request_id] = last_s
            requests.output_tokens[request_id] = num_emitted

    def log_gaps(self, plan: StepPlan, end_s: float, log: IterationLog) -> int:
        """Logs the gaps at the end of a plan's first iteration that differ from those of the other sequences.

        Returns their number. A sequence with a complete output, which an asynchronous engine holds for one
        more step, or a static batch until its end, has no further gap, even if it is idle in that step.
        """
        core = self._core
        if plan.num_decodes == plan.num_branches:
            return 0
        kept: dict[Sequence, float] = {}
        if plan.idle or core.paused:
            for seq in chain(plan.idle, core.paused.values()):
                if seq.finish_reason is None and seq.request.branching is None:
                    kept[seq] = self.last_s(seq)
        num_logged = 0
        for seq, emitted_s in self.apart.items():
            if seq.finish_reason is not None:
                kept[seq] = emitted_s
            elif seq not in kept:
                num_logged += 1
                log.add_gap(seq.request_id, emitted_s, end_s)
        self.apart = kept
        return num_logged

    def log_all_gaps(self, plan: StepPlan, end_s: float, log: IterationLog) -> None:
        """Logs the gaps of a plan's sequences one by one, as others decode beside them at other times."""
        apart = self.apart
        for seq in plan.decoding:
            if seq.finish_reason is None:  # else aborted on the way
                log.add_gap(seq.request_id, self.last_s(seq), end_s)
                apart[seq] = end_s

    def advance_branches(self, plan: StepPlan, end_s: float, log: IterationLog) -> dict[int, tuple[int, ...]]:
        """Logs the gaps of branches that get a token; returns the parents of new branches by request id."""
        for seq in plan.branched:
            since_s = self.last_s(seq)
            for _ in range(seq.width):
                log.add_gap(seq.request_id, since_s, end_s)
            self._branched_s[seq.request_id] = end_s
        served = [*plan.branched] + [chunk.seq for chunk in plan.chunks if chunk.completes]
        choices = ((seq.request_id, chosen_parents(self._seed, seq)) for seq in served)
        return {request_id: parents for request_id, parents in choices if parents is not None}


def draw_parents(seed: int, request_id: int, num_tokens: int, width: int) -> tuple[int, ...]:
    """Returns, for each of `width` new branches of a beam or tree search, the old branch that it continues.

    They are drawn at random, as no model computes scores: all equally likely, independently of each other. A
    real beam search is less even: the best hypotheses have more children, so its branches share more.
    num_tokens: the number of the output token at which the branches are chosen. The result depends on the
    arguments alone, on every machine.
    """
    drawn = b""
    while len(drawn) < width * _BYTES:
        name = f"{seed}/parents/{request_id}/{num_tokens}/{len(drawn)}"
        drawn += blake2b(name.encode(), digest_size=64).digest()
    words = (drawn[i * _BYTES : (i + 1) * _BYTES] for i in range(width))
    return tuple(int.from_bytes(word, "little") % width for word in words)


def chosen_parents(seed: int, seq: Sequence) -> tuple[int, ...] | None:
    """Returns the parents of a sequence's branches at its next token; None: the branches are unchanged."""
    branching = seq.request.branching
    if branching is None or branching.every is None:
        return None
    num_before = seq.num_output_tokens
    if not num_before or num_before % branching.every:  # the first token is sampled from the prompt alone
        return None
    return draw_parents(seed, seq.request_id, num_before + 1, seq.width)
