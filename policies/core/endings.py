"""When a sequence with a complete output leaves the engine: at once, one step late, or with its batch.

`Ends.at_once` needs no code here: `EngineCore.commit` frees slot and blocks of ended sequences.

`Ends.one_step_late` is asynchronous scheduling. Step n + 1 is planned while step n runs, so only the plan of
step n + 2 takes account of the sequences that end with step n:

    ends in step n     by step n      in step n + 1          at the plan of step n + 2
    by max_tokens      gets a token   holds slot and blocks  is gone
    by a stop token    gets a token   gets another token,    is gone
                                      which is discarded

The scheduler counts tokens, so it knows in advance that a sequence reaches max_tokens. It recognises a stop
token only when it reads the token. This is the rule of vLLM's AsyncScheduler (vllm 0.32). A simulator knows
the end of a sequence in advance. There, `commit` returns the sequence as finished after step n, and the
engine keeps it for step n + 1. An engine with kernels reads the tokens of step n after it has planned step n
+ 1, and reports such sequences with the outcome of step n + 1.

`Ends.with_batch` is the end of a static batch: members hold slot, KV and output until the last one ends.

    member    decodes ......... ends            batch ends
    state     decoding          ending          ended: slot and blocks are free, `commit` returns it

A member is preempted like any other sequence if its memory is needed earlier: if it has ended, only its slot
and blocks are freed, and its output is still complete with the batch. A running member cannot be aborted, as
in a `generate` loop: `EngineCore.find` does not return it.

With `one_step_late` and `with_batch` alike, sequences with branches end at once, because vLLM serves each
branch as a separate request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from enum import Enum

from policies.core.parts import Engine
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import DECODING, ENDED, ENDING, WAITING, FinishReason, Sequence


class Ends(Enum):
    """When a sequence with a complete output leaves the engine."""

    at_once = "at_once"
    one_step_late = "one_step_late"
    with_batch = "with_batch"


class LateEnds:
    """Complete sequences that hold slot and blocks for one more step: `Ends.one_step_late`."""

    is_batch = False

    def __init__(self, core: Engine, caches_when_read: bool) -> None:
        self._core = core
        self._caches_when_read = caches_when_read
        core.running_set.reads_late = True
        self.uncached: list[tuple[Sequence, int, int]] = []
        """Complete prompts that enter the cache when their step is read: sequence, its admission, tokens.

        Empty unless `Release.caches_when_read`.
        """
        core.block_pool.plan_ahead()

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step of an engine with complete sequences."""
        core = self._core
        ending = core.running_set.ending
        num_held = 0
        for seq in ending.values():
            if seq.state is ENDING:
                num_held += 1
        core.num_held = num_held
        if num_held == core.num_in_engine:  # a step that computes nothing
            self.free()
            return core.plan_once(now)
        plan = core.plan_once(now)
        if plan is None:
            self.free()
            if not core.step.has_freed:
                plan = core.plan_once(now)
        else:
            plan.horizon = 1  # now slots and blocks become free
        return plan

    def may_compute_nothing(self) -> bool:
        """Returns whether a step without tokens is valid. It is if the step has freed slots.

        It sets `wake_s` to now, so that the caller reads the tokens of the step before, and plans again.
        """
        core = self._core
        if core.step.has_freed:
            core.wake_s = core.now
            return True
        return bool(core.running_set.ending)

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan, if sequences had ended before it.

        First it frees the sequences that ended with the previous step. outcome.ended: sequences that got a
        stop token in the previous step (their tokens of this step are discarded), and sequences whose
        branches have all stopped in this step.
        """
        core, ended = self._core, outcome.ended
        if not ended:
            self.free(plan)
            return core.apply(plan, outcome, now)
        late = [seq for seq in ended if seq.request.branching is None]
        self.free(plan, late)
        at_once = tuple(seq for seq in ended if seq.request.branching is not None)
        prefilled, finished = core.apply(plan, outcome._replace(ended=at_once), now)
        return prefilled, [*late, *finished]

    def hold(self, finished: Iterable[Sequence]) -> None:
        """Keeps sequences with a complete output for one more step."""
        core = self._core
        for seq in finished:
            if seq.request.branching is not None:
                core.finish(seq, seq._end_reason)
            else:
                seq.finish_reason = seq._end_reason
                core.running_set.end_late(seq)

    def unfinished(self, sequences: Collection[Sequence]) -> Collection[Sequence]:
        """Returns the sequences in the engine whose output is incomplete."""
        return [seq for seq in sequences if seq.finish_reason is None]

    def num_unfinished(self, num_sequences: int) -> int:
        """Returns the number of sequences whose output is incomplete."""
        return num_sequences - len(self._core.running_set.ending)

    def hides(self, seq: Sequence) -> bool:
        """Returns whether a request can no longer be looked up because its output is complete."""
        return seq.request_id in self._core.running_set.ending

    def free(self, plan: StepPlan | None = None, late: Iterable[Sequence] = ()) -> None:
        """Frees the sequences that ended with the previous step, in the order of their admission.

        plan: the step in flight. late: sequences whose stop token the engine has just read.
        """
        core = self._core
        core.num_held = 0
        ending = core.running_set.ending
        if late:
            _note_stops(late, ending)
        if self.uncached:
            self._cache_prompts()
        members = list(ending.values())
        for seq in members:
            if seq.request.answer_id is not None:
                core.block_pool.offer_generated(seq)  # their last tokens are read after those of the plan
        if core.drafts is not None:
            core.drafts.note_read(True)
        if len(members) > 1:
            members.sort(key=_admission)
        for seq in members:
            seq.num_unread = 0
            assert seq.finish_reason is not None
            core.finish(seq, seq.finish_reason, self._num_lost(seq, plan))
        if core.drafts is not None:
            core.drafts.note_read(False)
        if plan is not None and plan.idle:
            plan.idle = [seq for seq in plan.idle if seq.finish_reason is None]

    def _num_lost(self, seq: Sequence, plan: StepPlan | None) -> int:
        """Returns the tokens in flight of a complete sequence, which will be discarded."""
        core = self._core
        if seq.state is not DECODING:
            return 0
        if plan is None or not plan.num_decodes or seq in plan.idle:
            seq.stored_computed = seq.num_computed  # its newest token has been read
            return 0
        num_lost = max(1, core.num_reserved)
        core.num_discarded += num_lost
        if not self._caches_when_read or core.drafts is not None:
            return num_lost
        core.running_set.decodes.leave(seq, ENDING)
        seq.stored_computed += num_lost  # the plan has run, so the KV of the stop token is stored
        return 0

    def cache_late(self, seq: Sequence, num_computed: int) -> None:
        """Schedules a newly complete prompt to enter the cache when its step is read."""
        self.uncached.append((seq, seq.admission, num_computed))

    def _cache_prompts(self) -> None:
        """Adds the prompts completed by the previous step to the cache, unless they have ended."""
        uncached, self.uncached = self.uncached, []
        for seq, admission, num_computed in uncached:
            if seq.state is DECODING and seq.admission == admission and seq.finish_reason is None:
                self._core.note_chunk(seq, num_computed)


def _note_stops(late: Iterable[Sequence], ending: dict[int, Sequence]) -> None:
    """Adds the sequences whose stop token the engine has just read."""
    for seq in late:
        if seq.state is WAITING:
            raise ValueError(f"{seq!r} cannot have ended: it was not run")
        if seq.state is not ENDED:
            seq.finish_reason = FinishReason.stop
            ending[seq.request_id] = seq


def _admission(seq: Sequence) -> int:
    return seq.admission


class BatchEnds:
    """Outputs that are complete together, when the last member of their batch ends: `Ends.with_batch`."""

    is_batch = True
    uncached: SequenceOf[tuple[Sequence, int, int]] = ()

    def __init__(self, core: Engine) -> None:
        self._core = core
        self._complete: list[Sequence] = []  # outputs that are held back, in the order in which they ended
        self._due: list[Sequence] = []  # outputs of batches that have ended without a commit

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step of an engine with complete members."""
        core = self._core
        core.num_held = len(core.running_set.ending)
        plan = core.plan_once(now)
        if plan is None and core.running_set.ending:  # the last members were preempted: the batch is over
            self._end_batch()
            plan = core.plan_once(now)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan; returns complete sequences when their batch has ended."""
        core = self._core
        prefilled, finished = core.apply(plan, outcome, now)
        if len(core.running_set.ending) == len(core.running):
            self._end_batch()
        finished = [*self._due, *finished]
        self._due = []
        return prefilled, finished

    def may_compute_nothing(self) -> bool:
        """Returns whether a step without tokens is valid: the batch may be over."""
        return bool(self._core.running_set.ending)

    def hold(self, finished: list[Sequence]) -> None:
        """Holds back the sequences that have ended, except those with branches, which stay in `finished`."""
        core = self._core
        held = [seq for seq in finished if seq.request.branching is None]
        for seq in finished:
            if seq.request.branching is None:
                seq.finish_reason = seq._end_reason
                core.running_set.hold(seq)
            else:
                core.finish(seq, seq._end_reason)
        self._complete += held
        finished[:] = [seq for seq in finished if seq.request.branching is not None]

    def unfinished(self, sequences: Collection[Sequence]) -> Collection[Sequence]:
        """Returns the sequences whose output has not been returned."""
        freed = [seq for seq in (*self._due, *self._complete) if seq.state is ENDED]
        return [*sequences, *freed]

    def num_unfinished(self, num_sequences: int) -> int:
        """Returns the number of sequences whose output has not been returned."""
        return num_sequences + len(self.unfinished(()))

    def cache_late(self, seq: Sequence, num_computed: int) -> None:
        """Adds a newly complete prompt to the cache at once."""
        self._core.note_chunk(seq, num_computed)

    def hides(self, seq: Sequence) -> bool:
        """Returns whether a request can no longer be looked up: it runs, so it cannot be aborted."""
        return seq.state is not WAITING

    def free(self, plan: StepPlan | None = None, late: Iterable[Sequence] = ()) -> None:
        """Frees the members of a batch that has ended."""
        self._end_batch()

    def _end_batch(self) -> None:
        """Frees the members of a batch that has ended; the next commit returns them."""
        core = self._core
        for seq in list(core.running_set.ending.values()):
            assert seq.finish_reason is not None
            core.finish(seq, seq.finish_reason)
        core.num_held = 0
        self._due += self._complete
        self._complete = []
