"""When each sequence of an engine produced its newest token: all that decode together share one time.

Gaps between tokens are told by the iteration log, which knows the iterations' ends; only those that an
iteration ends and that are not like the others' are noted one by one.
"""

from __future__ import annotations

from itertools import chain

from policies.core.engine import EngineCore
from policies.core.plan import StepPlan
from policies.core.sequence import DECODING, ENDED, PAUSED, Sequence
from sim.engine.branch_parents import chosen
from sim.records.iterations import IterationLog
from sim.records.requests import RequestLog


class LastTokens:
    """Of one engine, or of that which took its place after a crash."""

    __slots__ = ("_branched_s", "_core", "_requests", "_seed", "apart", "together_s")

    def __init__(self, core: EngineCore, requests: RequestLog, seed: int) -> None:
        self.together_s = 0.0
        """When all decoding sequences emitted last, but for those that are apart or have branches."""
        self.apart: dict[Sequence, float] = {}
        """When those emitted last that did so alone: by their prompt, or before they were swapped out."""
        self._core = core
        self._requests = requests
        self._seed = seed
        self._branched_s: dict[int, float] = {}  # by request id: of those that decode with branches

    def begin_anew(self, core: EngineCore) -> None:
        """An empty engine has taken the place of the other."""
        self._core = core
        self.apart.clear()
        self._branched_s.clear()

    def emit(self, seq: Sequence, time_s: float) -> None:
        """It has produced a token alone: by its prompt, or before it was swapped out."""
        if seq.request.branching is None:
            self.apart[seq] = time_s
        else:
            self._branched_s[seq.request_id] = time_s

    def forget(self, seq: Sequence) -> None:
        """It has ended, or leaves."""
        self.apart.pop(seq, None)
        self._branched_s.pop(seq.request_id, None)

    def last_s(self, seq: Sequence) -> float:
        """When it produced its newest token; NaN if it has none."""
        if seq in self.apart:
            return self.apart[seq]
        if seq.request_id in self._branched_s:
            return self._branched_s[seq.request_id]
        is_emitting = seq.state in (DECODING, PAUSED)
        if is_emitting and seq.request.branching is None and seq not in self._core.arrived:
            return self.together_s
        return self._requests.last_token_s[seq.request_id]

    def preempted(self, seq: Sequence) -> None:
        """Keep the time of its last token, from which the gap to its next one will count."""
        if seq.state is ENDED:  # given up since, before a plan could name it
            return
        requests, request_id = self._requests, seq.request_id
        last_s = self._branched_s.pop(request_id, self.together_s)
        last_s = self.apart.pop(seq, last_s)
        if seq.num_emitted_tokens > requests.output_tokens[request_id]:  # else none since the last time
            requests.last_token_s[request_id] = last_s
            requests.output_tokens[request_id] = seq.num_emitted_tokens

    def log_gaps(self, plan: StepPlan, end_s: float, log: IterationLog) -> int:
        """Note the gaps that a plan's first iteration ends and that are not like the others'; how many."""
        core = self._core
        if plan.num_decodes == plan.num_branches:
            return 0
        standing = chain(plan.idle, core.paused.values())
        behind = {seq: self.last_s(seq) for seq in standing if seq.request.branching is None}
        num_noted = 0
        for seq, emitted_s in self.apart.items():
            if seq not in behind:
                num_noted += 1
                log.add_gap(seq.request_id, emitted_s, end_s)
        self.apart = behind
        return num_noted

    def advance_branches(self, plan: StepPlan, end_s: float, log: IterationLog) -> dict[int, tuple[int, ...]]:
        """Note the gaps of all branches that get a token, and choose those that go on, where that is due."""
        for seq in plan.branched:
            since_s = self.last_s(seq)
            for _ in range(seq.width):
                log.add_gap(seq.request_id, since_s, end_s)
            self._branched_s[seq.request_id] = end_s
        served = [*plan.branched] + [chunk.seq for chunk in plan.chunks if chunk.completes]
        choices = ((seq.request_id, chosen(self._seed, seq)) for seq in served)
        return {request_id: parents for request_id, parents in choices if parents is not None}
