"""The passes of a replica that speculates: their acceptances, durations and records.

At its end an iteration yields a burst of tokens for each sequence. Draws belong to the output positions of a
request (sim/speculation/acceptance), so a leap over iterations gives the same tokens as single steps. A plan
runs up to the first end caused by its draws. `VerdictTable` holds the verdicts on the sequences' drafts as
arrays by slot and output position.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations import IterationModel, IterationShape, JitterFactors
from hwmodels.speculation import Leaps, SpeculativeModel
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.core.sequence import Sequence
from policies.speculation import Proposer
from policies.speculation.engine.drafting import drafts_of
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.engine.iteration_times import RunningStep, seconds_of, shape_of
from sim.speculation import Acceptance
from sim.speculation.log import DraftLog, pairs_of, with_drafts


class VerdictTable:
    """Looks up the acceptances of a plan's drafts, which do not depend on how a run is divided."""

    def __init__(self, acceptance: Acceptance, proposer: Proposer, seed: int, max_num_seqs: int) -> None:
        self._acceptance = acceptance
        self._proposer = proposer
        self._seed = seed
        self._accepted_SP: NDArray[np.uint8] = np.zeros((max_num_seqs, 256), np.uint8)
        self._proposed_SP: NDArray[np.uint8] | None = None  # None: every draft has all its tokens
        self._owner_S = np.full(max_num_seqs, -1, np.int64)  # request ids
        self._offset_S = np.zeros(max_num_seqs, np.int64)  # output position minus computed tokens
        self._num_positions = [0] * max_num_seqs
        self._known: SequenceOf[Sequence] = ()
        # The passes of a request that always has the same number of draft tokens, from some position on.
        self._place_SN = np.full((max_num_seqs, 128), -1, np.int64)  # output position before each pass
        self._next_S = np.zeros(max_num_seqs, np.int64)  # index of the next pass
        self._num_passes_S = np.zeros(max_num_seqs, np.int64)
        self._depth_S = np.zeros(max_num_seqs, np.int64)

    @property
    def varies(self) -> bool:
        """True if a draft may have fewer tokens than requested."""
        return self._proposed_SP is not None

    def find(self, drafts: DraftPlan) -> None:
        """Makes the verdicts on the sequences of a plan that have none yet."""
        if drafts.seqs is self._known:
            return
        self._known = drafts.seqs
        is_new = self._owner_S[drafts.slots] != drafts.ids
        if np.count_nonzero(is_new):
            for index in np.flatnonzero(is_new).tolist():
                self._fill(int(drafts.slots[index]), drafts.seqs[index])

    def _fill(self, slot: int, seq: Sequence) -> None:
        """Stores the verdicts on the drafts of a sequence."""
        self._owner_S[slot] = seq.request_id
        self._offset_S[slot] = 1 - seq.num_prompt_tokens
        self._num_positions[slot] = num_positions = seq._end_known - seq.num_prompt_tokens
        self._num_passes_S[slot] = 0
        if num_positions + 1 > self._accepted_SP.shape[1]:
            self._widen(num_positions + 1)
        verdicts = self._acceptance.verdicts(seq.request, self._seed, num_positions, self._proposer)
        self._accepted_SP[slot, :num_positions] = verdicts.accepted
        self._accepted_SP[slot, num_positions:] = 0
        if verdicts.proposed is None:
            if self._proposed_SP is not None:
                self._proposed_SP[slot] = 255
            return
        if self._proposed_SP is None:
            self._proposed_SP = np.full_like(self._accepted_SP, 255)
        self._proposed_SP[slot, :num_positions] = verdicts.proposed
        self._proposed_SP[slot, num_positions:] = 0

    def _widen(self, num_positions: int) -> None:
        width = max(num_positions, 2 * self._accepted_SP.shape[1]) - self._accepted_SP.shape[1]
        self._accepted_SP = np.pad(self._accepted_SP, ((0, 0), (0, width)))
        if self._proposed_SP is not None:
            self._proposed_SP = np.pad(self._proposed_SP, ((0, 0), (0, width)))

    def accepted(self, drafts: DraftPlan, num_iterations: int) -> Ints:
        """Returns the accepted draft tokens [iterations, sequences] of a plan that is repeated.

        num_iterations: the maximum; the result stops at the first iteration in which an output ends.
        """
        self.find(drafts)
        slots, depth = drafts.slots, drafts.depth
        position = drafts.num_computed + self._offset_S[slots]
        if num_iterations == 1:
            one: Ints = np.minimum(self._accepted_SP[slots, position], depth)
            return one[np.newaxis]
        first = self._next_S[slots]
        is_known = (first < self._num_passes_S[slots]) & (self._depth_S[slots] == depth)
        is_known &= self._place_SN[slots, np.minimum(first, self._place_SN.shape[1] - 1)] == position
        if np.count_nonzero(is_known) < len(is_known):
            self._walk(slots[~is_known], position[~is_known], depth[~is_known])
            first = self._next_S[slots]
        num_left = int(np.minimum.reduce(self._num_passes_S[slots] - first))
        first = first + slots * self._place_SN.shape[1]
        passes = first + np.arange(min(num_iterations, num_left) + 1)[:, np.newaxis]
        places = self._place_SN.ravel().take(passes)
        accepted: Ints = places[1:] - places[:-1]
        accepted -= 1
        return accepted

    def _walk(self, slots: Ints, positions: Ints, depths: Ints) -> None:
        """Computes the passes of some slots up to the ends of their outputs."""
        for slot, position, depth in zip(slots.tolist(), positions.tolist(), depths.tolist(), strict=True):
            num_positions = self._num_positions[slot]
            steps = np.minimum(self._accepted_SP[slot, :num_positions], depth)
            after = (steps + np.arange(1, num_positions + 1)).tolist()
            places = [position]
            with suppress(IndexError):  # `extend` reads the data that it has just appended
                places.extend(map(after.__getitem__, places))
            if len(places) == 1:  # the answer has ended: another pass, whose tokens are discarded
                places.append(position + 1)
            if len(places) > self._place_SN.shape[1]:
                width = max(len(places), 2 * self._place_SN.shape[1]) - self._place_SN.shape[1]
                self._place_SN = np.pad(self._place_SN, ((0, 0), (0, width)), constant_values=-1)
            self._place_SN[slot, : len(places)] = places
            self._next_S[slot] = 0
            self._num_passes_S[slot] = len(places) - 1
            self._depth_S[slot] = depth

    def ran(self, drafts: DraftPlan, num_iterations: int) -> None:
        """Records that iterations of a plan have run."""
        self._next_S[drafts.slots] += num_iterations

    def proposed(self, drafts: DraftPlan, accepted: Ints) -> Ints | None:
        """Returns the draft tokens found for the next pass of each of drafts.next_seqs.

        accepted: acceptances of the last iteration, by sequence. None: the requested numbers.
        """
        num_decodes = len(drafts.seqs)
        completed = drafts.next_seqs[num_decodes:]
        for seq in completed:
            slot = seq.slot
            assert slot is not None
            if self._owner_S[slot] != seq.request_id:
                self._fill(slot, seq)
        table = self._proposed_SP
        if table is None:
            return None
        slots = np.array([seq.slot for seq in drafts.next_seqs], np.int64)
        position = np.empty(len(slots), np.int64)
        position[:num_decodes] = drafts.num_computed + self._offset_S[drafts.slots] + accepted + 1
        position[num_decodes:] = [seq.num_output_tokens + 1 for seq in completed]  # also after a preemption
        position = np.minimum(position, table.shape[1] - 1)
        found: Ints = np.minimum(table[slots, position], drafts.next_drafts)
        return found


class Passes:
    """Draws, prices and records the passes of one replica."""

    def __init__(
        self, acceptance: Acceptance, proposer: Proposer, model: IterationModel, max_num_seqs: int, seed: int
    ) -> None:
        self._verdicts = VerdictTable(acceptance, proposer, seed, max_num_seqs)
        self._model = model
        self._pass_ends = (model if isinstance(model, SpeculativeModel) else Leaps(model.seconds)).pass_ends
        self._contexts: list[int] = []  # context tokens of all decodes, by iteration of the running step

    def ends_s(
        self,
        core: EngineCore,
        plan: StepPlan,
        shape: IterationShape | None,
        num_iterations: int,
        start_s: float,
        slowdown: float,
        factors: JitterFactors | None,
        by_rank: bool,
    ) -> list[float]:
        """Returns the end times of a plan's iterations, up to the first event caused by the draws.

        by_rank: whether the ranks of data-parallel attention wait for the slowest; other arguments as for
        `Replica`.
        """
        drafts, verdicts = drafts_of(plan), self._verdicts
        num_seqs = len(drafts.seqs)
        assert core.drafts is not None
        accepted = verdicts.accepted(drafts, 1 if verdicts.varies else num_iterations)
        num_iterations = core.drafts.num_iterations_of(plan, accepted)[0]
        contexts = [plan.num_decode_context_tokens]
        if num_iterations > 1:
            contexts = list(accumulate(drafts.sums[: num_iterations - 1].tolist(), initial=contexts[0]))
        self._contexts = contexts
        is_plain = plan.adapters is None and slowdown == 1 and factors is None and not by_rank
        if drafts.are_alike and is_plain and not plan.chunks:
            rows = drafts.num_tokens // num_seqs
            return self._pass_ends(start_s, num_seqs, contexts, rows, drafts.next_levels)
        pairs = pairs_of(drafts, contexts)
        if num_iterations == 1:
            if factors is not None:
                slowdown *= float(factors.of(plan.index, 1)[0])
            one = with_drafts(shape or shape_of(plan, 0), drafts, pairs[0])
            return [float(start_s + slowdown * seconds_of(self._model, plan, one, 0, by_rank))]
        shapes = shape_of(plan, 0)._replace(decode_context_tokens=np.array(contexts))
        durations_s = np.asarray(self._model.seconds(with_drafts(shapes, drafts, np.array(pairs))))
        if factors is not None:
            durations_s = factors.of(plan.index, num_iterations) * durations_s
        times_s = (slowdown * np.broadcast_to(durations_s, num_iterations)).tolist()
        times_s[0] += start_s
        return list(accumulate(times_s))

    def ran(self, core: EngineCore, step: RunningStep, log: DraftLog) -> StepOutcome:
        """Records iterations that have run; returns the outcome for the core, which commits them next."""
        plan, num_iterations, verdicts = step.plan, step.num_iterations, self._verdicts
        drafts = drafts_of(plan)
        assert core.drafts is not None
        assert drafts.accepted is not None
        proposed = verdicts.proposed(drafts, drafts.accepted[num_iterations - 1])
        log.add(
            drafts,
            self._contexts[:num_iterations],
            num_proposed=None if proposed is None else int(proposed.sum()),
            ended=core.ending.values(),
        )
        core.drafts.take_blocks_of(plan, num_iterations)
        verdicts.ran(drafts, num_iterations)
        return StepOutcome(num_iterations, proposed=proposed)
