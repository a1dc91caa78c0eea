"""The serving loop of one model instance, without time and without tensors.

    plan = core.plan(now)              # the policies decide; KV blocks are reserved
    outcome = <someone runs it>        # sim: a hardware model says how long. realengine: kernels run
    core.commit(plan, outcome, now)    # sequences advance, end, free their blocks

There is no prefill phase and no decode phase here: a sequence has tokens computed and tokens known, a step
hands out tokens until the budget is gone. Sequences with one uncomputed token that go on together form the
decode set, which advances in constant time (policies/decode_set.py).
Requests and aborts may come at any time; they take effect with the next plan.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush

from policies.batching import Batching
from policies.caching.paged import BlockPool
from policies.decode_set import DecodeSet
from policies.plan import Progress, StepOutcome, StepPlan
from policies.request import Request
from policies.scheduling import Scheduling
from policies.sequence import FinishReason, Sequence, SequenceState
from policies.step import StepBuilder, StepView
from policies.waiting import WaitingQueue


class RejectedError(ValueError):
    """A request that this engine can never serve; the message says why."""


class EngineCore:
    """Queues, slots and KV blocks of one engine, and the policies that act on them.

    max_num_seqs: slots, sequences that may hold KV at once. max_model_len: prompt and output tokens of one
    sequence; a cache too small for that lowers it.
    """

    def __init__(
        self,
        *,
        batching: Batching,
        scheduling: Scheduling,
        pool: BlockPool,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs}: must be >= 1")
        if max_model_len < 2:
            raise ValueError(
                f"max_model_len={max_model_len}: must be >= 2, a prompt token and an output token"
            )
        self.batching = batching
        self.scheduling = scheduling
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}  # by request id, in the order of admission
        self.prefilling: dict[int, Sequence] = {}  # the running ones that do not decode yet, same order
        self.decodes = DecodeSet(max_num_seqs, pool.block_size)
        self.free_slots = list(range(max_num_seqs))  # a heap: the lowest free slot is the next used
        self.view = StepView(self)
        self.num_iterations = 0
        self.num_preemptions = 0
        self._sequences: dict[int, Sequence] = {}  # waiting and running, by request id
        self._in_flight: StepPlan | None = None
        self._now = float("-inf")

    @property
    def num_unfinished(self) -> int:
        """Requests taken in and not ended."""
        return len(self._sequences)

    @property
    def num_tokens_held(self) -> int:
        """Tokens whose KV is stored."""
        num_tokens = self.decodes.num_context_tokens
        for seq in self.prefilling.values():
            num_tokens += seq.num_computed
        return num_tokens

    @property
    def unfinished(self) -> Collection[Sequence]:
        """Sequences waiting or running, in the order of their intake."""
        return self._sequences.values()

    def find(self, request_id: int) -> Sequence | None:
        """The sequence of a request that has not ended here."""
        return self._sequences.get(request_id)

    def add(self, request: Request, stop_after: int | None = None) -> Sequence:
        """Take a request in.

        stop_after: output tokens after which the caller will end it, if the caller knows (a simulator's
        oracle does, an engine does not). It bounds horizons and ends the sequence; policies never see it.
        Raises RejectedError if the prompt can never be served, ValueError on a known request id.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request_id={request.request_id}: is being served already")
        end_known, reason = self.end_of(request, stop_after)
        seq = Sequence(request, self.scheduling.rank(request), self.decodes, end_known, reason)
        self._sequences[request.request_id] = seq
        self.waiting.push(seq)
        return seq

    def end_of(self, request: Request, stop_after: int | None = None) -> tuple[int, FinishReason]:
        """At how many known tokens a request would end here, and why; as for `add`.

        Raises RejectedError if its prompt can never be served.
        """
        num_prompt = request.prompt.num_tokens
        if num_prompt < 1:
            raise RejectedError("an empty prompt")
        if num_prompt >= self.max_model_len:
            raise RejectedError(f"prompt of {num_prompt} tokens: max_model_len is {self.max_model_len}")
        if num_prompt > self.pool.max_tokens_per_seq:
            room = self.pool.max_tokens_per_seq
            raise RejectedError(f"prompt of {num_prompt} tokens: the KV cache holds {room} of one sequence")
        end_known = min(self.max_model_len, self.pool.max_tokens_per_seq + 1)
        if request.max_tokens is not None:
            end_known = min(end_known, num_prompt + request.max_tokens)
        reason = FinishReason.length
        if stop_after is not None and num_prompt + stop_after <= end_known:
            end_known = num_prompt + stop_after
            reason = FinishReason.stop
        if end_known <= num_prompt:
            raise RejectedError(f"{end_known - num_prompt} output tokens asked for: must be >= 1")
        return end_known, reason

    def abort(self, request_id: int) -> Sequence | None:
        """End a request now, between commit and plan; None if it is not (or no longer) here."""
        self._check_at_rest("abort")
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        if seq._state is SequenceState.waiting:
            self.waiting.remove(seq)
            self._end(seq, FinishReason.aborted)
        else:
            self._finish(seq, FinishReason.aborted)
        return seq

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to serve. Every plan must be committed before the next.

        Raises RuntimeError if the policies schedule nothing although requests are there.
        """
        if self._in_flight is not None:
            self._check_at_rest("plan")
        self._advance_to(now)
        preempted: list[Sequence] = []
        attempts_left = self.max_num_seqs + 100  # an attempt that only preempts frees at least a slot
        while self._sequences:
            step = StepBuilder(self)
            self.batching.fill(self.view, step, now)
            step._is_over = True
            if step.num_tokens:
                plan = step._plan(self.num_iterations)
                if preempted:
                    plan.preempted[:0] = preempted
                    plan.horizon = 1  # to be committed, and recorded, as the one step that preempted
                self._in_flight = plan
                return plan
            preempted += step._preempted
            attempts_left -= 1
            if not step._preempted or not attempts_left:  # else blocks were freed: another attempt
                raise RuntimeError(
                    f"{type(self.batching).__name__} scheduled nothing with {len(self.waiting)} waiting "
                    f"and {len(self.running)} running: the engine would stand still"
                )
        return None

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Enter what a plan's run has changed: outcome.iterations times the plan, then the ends."""
        num_iterations = outcome.iterations
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"commit of {num_iterations} iterations: not the plan in flight, or not within its horizon"
            )
        self._advance_to(now)
        self._in_flight = None
        if num_iterations > 1:
            self.pool.take(self.blocks_of_repeats(plan, num_iterations - 1))
        self.num_iterations += num_iterations
        finished = self.decodes.advance(num_iterations, plan.idle) if plan.num_decodes else []
        prefilled: list[Sequence] = []
        for chunk in plan.chunks:
            seq = chunk.seq
            seq._computed += chunk.num_tokens * num_iterations
            if seq._computed == seq._known:
                prefilled.append(seq)
                self._begin_decoding(seq, finished)
        for seq in finished:
            self._finish(seq, seq._end_reason)
        for seq in outcome.ended:
            if seq._state is SequenceState.waiting:
                raise ValueError(f"{seq!r} cannot have ended: it was not run")
            if seq._state is not SequenceState.ended:
                self._finish(seq, FinishReason.stop)
                finished.append(seq)
        return Progress(prefilled, finished)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Physical ids of the blocks of a running sequence's first num_tokens tokens, planned included."""
        return self.pool.block_ids(seq, num_tokens)

    def blocks_of_repeats(self, plan: StepPlan, num_repeats: int) -> int:
        """Blocks that num_repeats more iterations of a plan need beyond those reserved for its first."""
        num_blocks = self.decodes.blocks_due_after(1, num_repeats) if plan.num_decodes else 0
        for chunk in plan.chunks:
            first = chunk.num_cached + chunk.num_tokens
            num_blocks += self.pool.blocks_for(first + num_repeats * chunk.num_tokens) - self.pool.blocks_for(
                first
            )
        return num_blocks

    def check_integrity(self) -> None:
        """Assert between commit and plan: blocks free + owned = all, every slot has at most one owner."""
        self._check_at_rest("check_integrity")
        running = list(self.running.values())
        owned = sum(self.pool.blocks_for(seq.num_computed) for seq in running)
        assert owned + self.pool.num_free == self.pool.num_blocks, "a block is leaked or owned twice"
        slots = [seq._slot for seq in running] + self.free_slots
        assert sorted(slots, key=lambda slot: -1 if slot is None else slot) == list(range(self.max_num_seqs))
        decoding = {seq.request_id for seq in running if seq._state is SequenceState.decoding}
        assert (
            {seq.request_id for seq in self.decodes} == decoding == set(self.running) - set(self.prefilling)
        )
        assert len(self._sequences) == len(running) + len(self.waiting)

    def _start(self, seq: Sequence, num_cached: int) -> None:
        """From waiting to running: a slot, and KV for num_cached tokens only. Called by the step builder."""
        self.waiting.remove(seq)
        seq._slot = heappop(self.free_slots)
        seq._state = SequenceState.prefilling
        seq._computed = num_cached
        self.running[seq.request_id] = seq
        self.prefilling[seq.request_id] = seq

    def _stop(self, seq: Sequence, num_blocks: int) -> None:
        """From running back to waiting, its num_blocks blocks freed. Called by the step builder."""
        self._release(seq, num_blocks, SequenceState.waiting)
        seq._computed = 0
        seq._num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(seq)

    def _begin_decoding(self, seq: Sequence, finished: list[Sequence]) -> None:
        """A prefill that is complete has produced a token: the sequence decodes on, or ends with it."""
        seq._known += 1
        if seq._known == seq._end_known:
            finished.append(seq)
            return
        del self.prefilling[seq.request_id]
        self.decodes.join(seq)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a running sequence that is at rest."""
        self._release(seq, self.pool.blocks_for(seq.num_computed), SequenceState.ended)
        self._end(seq, reason)

    def _release(self, seq: Sequence, num_blocks: int, state: SequenceState) -> None:
        """Free blocks and slot of a running sequence and take it out of the sets of the running."""
        if seq._state is SequenceState.decoding:
            self.decodes.leave(seq, state)
        else:
            del self.prefilling[seq.request_id]
            seq._state = state
        self.pool.give_back(seq, num_blocks)
        del self.running[seq.request_id]
        assert seq._slot is not None
        heappush(self.free_slots, seq._slot)
        seq._slot = None

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq._state = SequenceState.ended
        seq._finish_reason = reason
        del self._sequences[seq.request_id]

    def _advance_to(self, now: float) -> None:
        """Time goes forward: what policies derive from it, an age or a deadline, relies on that."""
        if not now >= self._now:
            raise ValueError(f"now={now}: the clock went backwards, it was {self._now} before")
        self._now = now

    def _check_at_rest(self, what: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(f"{what} while a plan is in flight: commit it first")
