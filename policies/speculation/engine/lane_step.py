"""The step builder of a lane with drafts, for batching policies that declare `fills_in_order`."""

from __future__ import annotations

from operator import index

from policies.core.lane_step import LaneStep
from policies.core.plan import FOREVER, Chunk
from policies.core.sequence import Sequence
from policies.speculation.engine.lane import DraftLane


class DraftLaneStep(LaneStep):
    """A `LaneStep` with the budgets of an engine that speculates; see `engine.step`."""

    __slots__ = ("_draft_lane", "_input_budget", "_num_requests", "_num_tokens", "_token_budget")

    def __init__(self, lane: DraftLane) -> None:
        self._draft_lane = lane
        LaneStep.__init__(self, lane)

    def begin(self) -> None:
        """Opens an empty step."""
        LaneStep.begin(self)
        self._num_requests = self._num_tokens = 0
        self._token_budget = self._input_budget = FOREVER

    def budget(self, max_num_tokens: int) -> None:
        """Limits this step to max_num_tokens tokens, and to the batch's tokens with those of drafting."""
        self._token_budget = index(max_num_tokens)
        self._input_budget = max(self._draft_lane.max_inputs, self._token_budget)
        self._spend(0, 0)

    def _spend(self, num_tokens: int, num_requests: int) -> None:
        """Takes the tokens of requests from the budgets."""
        self._num_tokens += num_tokens
        self._num_requests += num_requests
        num_slots = self._draft_lane.num_input_slots * (self._num_requests + 1)
        self.tokens_left = max(min(self._token_budget, self._input_budget - num_slots) - self._num_tokens, 0)

    def decode_all(self) -> bool:
        """Decodes every decoding sequence with all its draft tokens."""
        lane = self._draft_lane
        size = lane.decodes.size
        if size:
            self._spend(size * (1 + lane.num_rows), size)
            lane.take_due()
        return True

    def prefill(self, seq: Sequence, max_num_tokens: int) -> bool:
        """Computes up to max_num_tokens more tokens of a sequence in prefill."""
        num_computed = seq.stored_computed
        num_tokens = min(index(max_num_tokens), seq.stored_known - num_computed, self.tokens_left)
        if num_tokens < 1:
            return False
        self._draft_lane.grow(num_computed, num_computed + num_tokens)
        num_then = num_computed + num_tokens
        self.chunks.append(Chunk(seq, num_computed, num_tokens, num_then == seq.stored_known))
        self._spend(num_tokens, 1)
        return True

    def admit(self, seq: Sequence, max_num_tokens: int, *, may_cut: bool = True) -> bool:
        """Admits the first waiting sequence with up to max_num_tokens tokens of prefill."""
        may_cut |= seq.stored_known > self._input_budget - self._draft_lane.num_input_slots
        if not LaneStep.admit(self, seq, max_num_tokens, may_cut=may_cut):
            return False
        self._spend(self.chunks[-1].num_tokens, 1)
        return True
