"""The serving loop of one model instance, without time and without tensors.

    plan = core.plan(now)              # the policies decide; KV blocks are reserved
    outcome = <someone runs it>        # sim: a hardware model says how long. realengine: kernels run
    core.commit(plan, outcome, now)    # sequences advance, end, free their blocks

There is no prefill phase and no decode phase here: a sequence has tokens computed and tokens known, a step
hands out tokens until the budget is gone. Sequences with one uncomputed token that go on together form the
decode set, which advances in constant time (policies/core/decode_set.py). Where a sequence stands while it
has a slot is told in policies/core/running_set.py, what becomes of KV that moves between tiers in
policies/core/transfers.py. Requests may come at any time, aborts between commit and plan; they take effect
with the next plan. KV that moves between tiers is asked for by `take_transfers`, after every plan; `loaded`
says it is there. Whoever runs several iterations of a plan in one go asks for their blocks before, by
`reserve`.

Above 400 lines, as intake, plan, commit and end are one protocol.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from math import inf
from typing import NamedTuple, NoReturn

from policies.adapters.residents import Residents
from policies.batching import Batching
from policies.caching.pool import BlockPool
from policies.core.limits import Bounds, Limits, RejectedError, StopAfter
from policies.core.plan import AdapterLoad, Cause, Chunk, Migrant, Progress, StepOutcome, StepPlan, Transfer
from policies.core.request import Request
from policies.core.running_set import RunningSet
from policies.core.sequence import AT_WORK, FinishReason, Sequence, SequenceState
from policies.core.step import StepBuilder
from policies.core.transfers import Transfers
from policies.core.view import StepView
from policies.prediction import LengthPredictor
from policies.scheduling import Scheduling


class EngineCore:
    """Queues, slots and KV blocks of one engine, and the policies that act on them.

    batching, scheduling, predictor: the engine works with copies of its own, so that what a policy remembers
    is never shared with another engine, and the caller's objects stay as they are.
    max_num_seqs: slots, sequences that may hold KV at once. max_model_len: prompt and output tokens of one
    sequence; a cache too small for that lowers it. num_swap_blocks: room in host memory for preempted KV.
    names_blocks: transfers say which blocks they copy, for whoever has bytes to copy; decisions are the same.
    residents: the LoRA adapters that are served, in the same pool; None: there are none.
    """

    def __init__(
        self,
        *,
        batching: Batching,
        scheduling: Scheduling,
        pool: BlockPool,
        max_num_seqs: int,
        max_model_len: int,
        predictor: LengthPredictor | None = None,
        num_swap_blocks: int = 0,
        names_blocks: bool = False,
        residents: Residents | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs}: must be >= 1")
        if max_model_len < 2:
            raise ValueError(
                f"max_model_len={max_model_len}: must be >= 2, a prompt token and an output token"
            )
        if scheduling.needs_predictor and predictor is None:
            name = type(scheduling).__name__
            raise ValueError(f"{name} needs predicted output lengths: choose a predictor")
        if num_swap_blocks < 0:
            raise ValueError(f"num_swap_blocks={num_swap_blocks}: must be >= 0")
        self.batching, self.scheduling, self.predictor = deepcopy((batching, scheduling, predictor))
        self.pool = pool
        self.residents = residents
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.swaps = self.scheduling.preemption_mode == "swap"
        self.waiting = self.scheduling.queue()
        self.running_set = RunningSet(pool, max_num_seqs)
        self.running = self.running_set.running  # its parts, for those who look at them in every step
        self.prefilling = self.running_set.prefilling
        self.paused = self.running_set.paused
        self.loading = self.running_set.loading
        self.leaving = self.running_set.leaving
        self.decodes = self.running_set.decodes
        self.branched = self.running_set.branched
        self.free_slots = self.running_set.free_slots
        self.transfers = Transfers(pool, self.branched, num_swap_blocks, names_blocks)
        self.view = StepView(self)
        self.num_iterations = 0
        self.num_preemptions = 0
        self.may_branch = False  # somebody has asked for several answers
        self.wake_s = inf  # after a plan that is None: when the policies want to be asked again
        self.waits_for: Cause | None = None  # after such a plan: why who waits has to, as StepPlan.waits_for
        self._loaded_in_flight: list[int] = []  # request ids: loaded while a plan was in flight
        self._adapters_in_flight: list[str] = []  # the same of adapters
        self._arrived: list[Sequence] = []  # admitted, and their transfer done, since the last plan
        self._lost: list[Sequence] = []  # preempted by steps that computed nothing
        self._hooks = _overridden(self.scheduling)
        self._sequences: dict[int, Sequence] = {}  # waiting and running, by request id
        self._limits = Limits(pool, max_num_seqs, max_model_len)
        self._in_flight: StepPlan | None = None
        self._num_reserved = 0  # iterations of the plan in flight, if `reserve` was asked
        self._now = float("-inf")

    @property
    def num_unfinished(self) -> int:
        """Requests taken in and not ended."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._sequences) - len(self.running)

    @property
    def num_tokens_held(self) -> int:
        """Tokens whose KV is stored."""
        return self.running_set.num_tokens_held

    @property
    def num_free_swap_blocks(self) -> int:
        """Blocks of host memory that are left for preempted KV."""
        return self.transfers.num_free_swap_blocks

    @property
    def lost(self) -> SequenceOf[Sequence]:
        """Preempted by steps that computed nothing: the next plan will name them."""
        return self._lost

    @property
    def arrived(self) -> SequenceOf[Sequence]:
        """Sequences whose KV has come since the last plan: the next one will name them as admitted."""
        return self._arrived

    @property
    def unfinished(self) -> Collection[Sequence]:
        """Sequences waiting or running, in the order of their intake."""
        return self._sequences.values()

    def find(self, request_id: int) -> Sequence | None:
        """The sequence of a request that has not ended here."""
        return self._sequences.get(request_id)

    def add(self, request: Request, stop_after: StopAfter = None, bounds: Bounds | None = None) -> Sequence:
        """Take a request in.

        stop_after: output tokens after which the caller will end it, if the caller knows (a simulator's
        oracle does, an engine does not); of one with branches, for all or for each. It bounds
        horizons and ends the sequence; policies never see it. bounds: what `bounds_of` has said of both, if
        it was asked before.
        Raises RejectedError if the prompt can never be served, ValueError on a known request id.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request_id={request.request_id}: is being served already")
        if bounds is None:
            bounds = self.bounds_of(request, stop_after)
        predicted = None
        if self.predictor is not None:
            if self.predictor.needs_truth and stop_after is None:
                name = type(self.predictor).__name__
                raise ValueError(f"{name} stands in for a model that is told the truth: simulation only")
            truth = bounds.end_known - request.prompt.num_tokens if self.predictor.needs_truth else None
            predicted = self.predictor.predict(request, truth)
        seq = Sequence(request, self.decodes, *bounds, predicted)
        if request.branching is not None:
            self.branched.enter(seq, request.branching, bounds, stop_after)
            self.may_branch = True
        seq.rank = self.scheduling.rank(seq)
        self._sequences[request.request_id] = seq
        self._queue(seq)
        return seq

    def bounds_of(self, request: Request, stop_after: StopAfter = None) -> Bounds:
        """At how many known tokens a request would end here, and why; as for `add`.

        Raises RejectedError if its prompt can never be served, or its adapter is not.
        """
        if self.residents is not None:
            return self._limits.of(request, stop_after, self.residents.check(request.adapter))
        if request.adapter is not None:
            raise RejectedError(f"adapter={request.adapter}: must be null, as the engine serves no adapters")
        return self._limits.of(request, stop_after)

    def can_admit(self, seq: Sequence, num_cached: int) -> bool:
        """Whether a waiting sequence would find KV memory now, with that of adapters that nobody uses."""
        residents = self.residents
        if residents is None:
            return self.pool.can_admit(seq, num_cached, not self.running)
        num_missing = residents.num_missing(seq)
        seq.num_beside = num_missing - residents.num_idle_blocks(seq)
        fits = self.pool.can_admit(seq, num_cached, not self.running)
        seq.num_beside = num_missing
        return fits

    def abort(self, request_id: int, reason: FinishReason = FinishReason.aborted) -> Sequence | None:
        """End a request now, between commit and plan; None if it is not (or no longer) here.

        reason: `stop` where a late look at its tokens says that its answer had been complete.
        """
        self._check_at_rest("abort")
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        if seq.state is SequenceState.waiting:
            self.waiting.remove(seq)
            if self.residents is not None:
                self.residents.unwait(seq)
            self.transfers.free_swapped(seq)
            self._end(seq, reason)
        else:
            self._finish(seq, reason)
        return seq

    def export(self, request_id: int) -> Migrant | None:
        """Let a running sequence go on in another engine; None if it holds no KV here that could be copied.

        Between commit and plan. Its blocks are free at once: they are to be copied before the next step, and
        before its transfers. Named as in Transfer.
        """
        self._check_at_rest("export")
        seq = self.running.get(request_id)
        if seq is None or not self._is_movable(seq):
            return None
        migrant = self._migrant(seq)
        self._finish(seq, FinishReason.migrated)
        return migrant

    def hand_over(self, request_id: int) -> Migrant | None:
        """As export, but it keeps slot and blocks, in state leaving, while another engine copies its KV.

        For one that decodes or is paused. `abort(request_id, FinishReason.migrated)` lets it go when the copy
        is there, `stay` lets it decode on here.
        """
        self._check_at_rest("hand_over")
        seq = self.running.get(request_id)
        stands = (SequenceState.decoding, SequenceState.paused)
        if seq is None or seq.state not in stands or not self._is_movable(seq):
            return None
        migrant = self._migrant(seq)
        self.running_set.hand_over(seq)
        return migrant

    def stay(self, request_id: int) -> None:
        """A sequence that was to leave decodes on here. Raises KeyError if it is not leaving."""
        self._check_at_rest("stay")
        self.running_set.stay(self.leaving[request_id])

    def check_migrant(self, request: Request, num_known: int, stop_after: StopAfter = None) -> None:
        """Raise RejectedError if a sequence of so many known tokens cannot go on here."""
        self._limits.check_resident(num_known)
        if num_known >= self.bounds_of(request, stop_after).end_known:
            raise RejectedError(f"a sequence of {num_known} tokens: it would have ended here before")

    def adopt(self, migrant: Migrant, stop_after: StopAfter = None, tier: str = "remote") -> Sequence:
        """Take in a sequence that another engine has exported; it waits for a slot, and then for its KV.

        KV of it that a cache has here is not asked for. Found all of it, it begins to run without a transfer.
        What the migrant has not computed is computed here. stop_after: as for `add`, counted from its first
        output token. tier: where its KV is, see Transfer. Raises RejectedError if it can never be served.
        """
        self.check_migrant(migrant.request, migrant.num_known, stop_after)
        seq = self.add(migrant.request, stop_after)
        seq.stored_known = migrant.num_known
        if migrant.num_computed:
            seq.num_swapped = migrant.num_computed
            seq.swap_tier = tier
        return seq

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to compute now. A plan must be committed before the next.

        After None: ask again when something comes from outside, and at `wake_s`. After either, look at
        `take_transfers`. Raises RuntimeError if the policies schedule nothing although requests are there and
        nothing is awaited.
        """
        if self._in_flight is not None:
            self._check_at_rest("plan")
        if not now >= self._now:
            self._refuse_past(now)
        self._now = self.pool.now = now
        self.wake_s = inf
        if self.pool.expires_s <= now:
            self.pool.expire()
        self.waits_for = None
        attempts_left = self.max_num_seqs + 100  # an attempt that only preempts frees at least a slot
        while self._sequences:
            step = StepBuilder(self)
            if self.residents is not None:
                self.residents.before_step(self.view, step, now)
            if self._hooks.before_step:
                self.scheduling.before_step(self.view, step, now)
            self.batching.fill(self.view, step, now)
            step._is_over = True
            if step.num_tokens:
                plan = step._plan(self.num_iterations)
                if self._lost:  # to be committed, and recorded, with the one step that computes
                    plan.preempted[:0] = self._lost
                    plan.horizon = 1
                    self._lost = []
                if self._arrived:
                    plan.admitted[:0] = [seq for seq in self._arrived if seq.state in AT_WORK]
                    plan.horizon = 1
                    self._arrived = []
                self._in_flight = plan
                return plan
            self._lost += step._preempted
            attempts_left -= 1
            if not step._preempted or not attempts_left:  # else blocks were freed: another attempt
                self.wake_s = step._wake_s
                self.waits_for = step._waits_for()
                is_loading = self.loading or (self.residents is not None and self.residents.is_loading)
                if is_loading or self.leaving or (step._waits and now < self.wake_s):
                    return None
                raise RuntimeError(
                    f"{type(self.batching).__name__} scheduled nothing with {self.num_waiting} waiting "
                    f"and {len(self.running)} running: the engine would stand still"
                )
        return None

    def take_transfers(self) -> list[Transfer]:
        """The transfers that plans have asked for since the last call, in order: to be run by the caller.

        Stores of the last plan come before it is run: their blocks are its blocks. More in `Transfer`.
        """
        return self.transfers.take()

    def take_adapter_loads(self) -> list[AdapterLoad]:
        """The same of adapters: after every plan, to be run by the caller, who then says `adapter_loaded`."""
        return [] if self.residents is None else self.residents.take_loads()

    def reserve(self, plan: StepPlan, num_iterations: int) -> None:
        """Hand out the KV blocks of num_iterations iterations of the plan in flight before they are run.

        From then on `block_ids` knows those of seq.num_known + num_iterations - 1 tokens, and only a commit
        of exactly num_iterations is allowed. Raises ValueError for a plan with chunks or branches, for a
        second time, and beyond the plan's horizon.
        """
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"reserve for {num_iterations} iterations: not the plan in flight, or not within its horizon"
            )
        if plan.chunks or plan.branched:
            raise ValueError("reserve: a plan with prompt chunks or branches is run once; do not reserve")
        if self._num_reserved:
            raise ValueError(f"reserve: done already, for {self._num_reserved} iterations of this plan")
        self.pool.take(self.decodes.blocks_due_after(1, num_iterations - 1))
        self._num_reserved = num_iterations

    def loaded(self, request_id: int) -> None:
        """A transfer that a sequence waits for is done; the last one lets it go on.

        Nothing happens if it was aborted meanwhile.

        While a plan is in flight, which is made without it, this takes effect with the commit.
        """
        if self._in_flight is not None:
            self._loaded_in_flight.append(request_id)
            return
        seq = self.loading.get(request_id)
        if seq is not None and self.transfers.is_loaded(seq):
            self.running_set.arrive(seq)
            self._arrived.append(seq)

    def adapter_loaded(self, name: str) -> None:
        """An adapter is there, and lets go on who has waited for nothing else; when, as for `loaded`."""
        if self._in_flight is not None:
            self._adapters_in_flight.append(name)
            return
        assert self.residents is not None
        for seq in self.residents.loaded(name):
            if self.transfers.is_loaded(seq):
                self.running_set.arrive(seq)
                self._arrived.append(seq)

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Enter what a plan's run has changed: outcome.iterations times the plan, then the ends."""
        num_iterations = outcome.iterations
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"commit of {num_iterations} iterations: not the plan in flight, or not within its horizon"
            )
        num_reserved = self._num_reserved
        if num_reserved and num_iterations != num_reserved:
            raise ValueError(f"commit of {num_iterations} iterations: {num_reserved} were reserved")
        if not now >= self._now:
            self._refuse_past(now)
        self._now = self.pool.now = now
        self._in_flight = None
        if self._hooks.on_commit:
            self.scheduling.on_commit(plan, num_iterations, now)
        if num_reserved:
            self._num_reserved = 0
        elif num_iterations > 1:
            if plan.num_decodes:
                self.pool.take(self.decodes.blocks_due_after(1, num_iterations - 1))
            if plan.chunks:
                self._grow_chunks(plan.chunks, num_iterations - 1)
        self.num_iterations += num_iterations
        self.pool.num_iterations = self.num_iterations
        num_in_set = plan.num_decodes - plan.num_branches
        finished = self.decodes.advance(num_iterations, plan.idle) if num_in_set else []
        for seq in plan.branched:
            if self.branched.produce(seq, outcome.parents.get(seq.request_id)):
                finished.append(seq)
        prefilled: list[Sequence] = []
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.stored_computed += chunk.num_tokens * num_iterations
            self.pool.computed(seq, seq.stored_computed)
            if seq.stored_computed == seq.stored_known:
                prefilled.append(seq)
                if seq.request.branching is None:
                    if self.running_set.begin_decoding(seq):
                        finished.append(seq)
                else:
                    self.running_set.fork(seq)
                    if self.branched.produce(seq, outcome.parents.get(seq.request_id)):
                        finished.append(seq)
        if outcome.ended:
            self._note_ends(outcome.ended, finished)
        if len(finished) > 1:  # blocks become free in the order of admission, as in vLLM
            finished.sort(key=lambda seq: seq.admission)
        for seq in finished:
            self._finish(seq, seq.end_reason)
        if self._loaded_in_flight or self._adapters_in_flight:
            self._take_loaded()
        return Progress(prefilled, finished)

    def cancel(self, plan: StepPlan) -> list[Sequence]:
        """Give up a plan in flight that could not be run: who took part ends, as aborted. Returns those.

        What the plan would have computed is lost; no cache offers it. So who waits for a transfer and has
        found a part of it ends, too.
        """
        if plan is not self._in_flight:
            raise ValueError("cancel: not the plan in flight")
        self._in_flight = None
        num_planned = dict.fromkeys(plan.decodes, max(1, self._num_reserved))
        num_planned |= {chunk.seq: chunk.num_tokens for chunk in plan.chunks}
        for chunk in plan.chunks:
            num_planned |= {seq: 0 for seq in self.running_set.sharers(chunk.seq) if seq not in num_planned}
        self._num_reserved = 0
        for seq in sorted(num_planned, key=lambda seq: seq.admission, reverse=True):  # sharers first
            self._finish(seq, FinishReason.aborted, num_planned[seq])
        self._take_loaded()
        return list(num_planned)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Physical ids of the blocks of a running sequence's first num_tokens tokens, planned included.

        While it decodes with branches: of the prompt's full blocks only; see `BranchSet.block_ids`.
        """
        return self.pool.block_ids(seq, num_tokens)

    def blocks_of_repeats(self, plan: StepPlan, num_repeats: int) -> int:
        """Blocks that num_repeats more iterations of a plan need beyond those reserved for its first."""
        num_blocks = self.decodes.blocks_due_after(1, num_repeats) if plan.num_decodes else 0
        for chunk in plan.chunks:
            first = chunk.num_cached + chunk.num_tokens
            num_blocks += self.pool.blocks_to_grow(chunk.seq, first, first + num_repeats * chunk.num_tokens)
        return num_blocks

    def check_integrity(self) -> None:
        """Assert between commit and plan: blocks free + owned = all, every slot has at most one owner."""
        self._check_at_rest("check_integrity")
        self.running_set.check_integrity(0 if self.residents is None else self.residents.num_blocks)
        if self.residents is not None:
            self.residents.check_integrity(self.running.values())
        assert len(self._sequences) == len(self.running) + len(self.waiting)

    def _grow_chunks(self, chunks: list[Chunk], num_repeats: int) -> None:
        """Prompts side by side grow in turns, as in steps: of equal contents a cache offers the first."""
        num_turns = num_repeats if len(chunks) > 1 else 1
        per_turn = num_repeats // num_turns
        for turn in range(num_turns):
            for chunk in chunks:
                first = chunk.num_cached + (1 + turn * per_turn) * chunk.num_tokens
                self.pool.grow(chunk.seq, first, first + per_turn * chunk.num_tokens)

    def _take_loaded(self) -> None:
        """Transfers that were done while a plan was in flight."""
        loaded, self._loaded_in_flight = self._loaded_in_flight, []
        for request_id in loaded:
            self.loaded(request_id)
        adapters, self._adapters_in_flight = self._adapters_in_flight, []
        for name in adapters:
            self.adapter_loaded(name)

    @staticmethod
    def _note_ends(ended: tuple[Sequence, ...], finished: list[Sequence]) -> None:
        """Add those that the world says have ended; that goes before a limit reached with the same token."""
        for seq in ended:
            if seq.state is SequenceState.waiting:
                raise ValueError(f"{seq!r} cannot have ended: it was not run")
            if seq.state is not SequenceState.ended:
                seq.end_reason = FinishReason.stop
                if seq not in finished:
                    finished.append(seq)

    def _start(self, seq: Sequence, num_cached: int, num_loaded: int) -> None:
        """From waiting to running: a slot, and KV for num_cached tokens; num_loaded more are on their way."""
        self.waiting.remove(seq)
        lacks_adapter = self.residents is not None and self.residents.must_wait(seq)
        self.running_set.seat(seq, num_cached, num_loaded, lacks_adapter)
        if num_loaded:
            self.transfers.load(seq, num_cached)
        elif seq.num_swapped:  # a migrant that has found all its KV here
            self.transfers.free_swapped(seq)
        if self.residents is not None:
            self.residents.start(seq)
            seq.num_transfers += lacks_adapter

    def _stop(self, seq: Sequence, num_planned: int, swap: bool) -> None:
        """From running back to waiting, its KV freed, or on its way to host memory."""
        is_recomputing = self.branched.is_recomputing(seq)  # its blocks are not in an order that swaps keep
        num_branched = self.running_set.leave(seq, SequenceState.waiting)
        seq.num_lost = seq.stored_computed
        if swap and not seq.num_dropped and not is_recomputing:
            self.transfers.swap_out(seq, is_branched=num_branched is not None)
        self.running_set.release(seq, num_branched, num_planned)
        if self.residents is not None:
            self.residents.stop(seq)
        if seq.num_loading:
            self.transfers.drop_loads(seq)
        seq.num_transfers = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if seq.request.branching is not None:
            self.branched.stop(seq, had_joined=num_branched is not None)
        seq.stored_computed = seq.num_dropped = 0
        seq.rank = self.scheduling.rank(seq)
        self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        """A sequence waits from now on."""
        self.waiting.push(seq)
        if self.residents is not None:
            self.residents.wait(seq)

    def _rerank(self, seq: Sequence) -> None:
        """Ask for a sequence's rank again. Called by the step builder."""
        waits = seq.state is SequenceState.waiting
        if waits:
            self.waiting.remove(seq)
        seq.rank = self.scheduling.rank(seq)
        if waits:
            self.waiting.push(seq)

    def _finish(self, seq: Sequence, reason: FinishReason, num_planned: int = 0) -> None:
        """End a running sequence; num_planned tokens of a plan in flight will not be computed."""
        num_branched = self.running_set.leave(seq, SequenceState.ended)
        self.running_set.release(seq, num_branched, num_planned)
        if self.residents is not None:
            self.residents.stop(seq)
        self.transfers.free_swapped(seq)
        self._end(seq, reason)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.state = SequenceState.ended
        seq.finish_reason = reason
        del self._sequences[seq.request_id]
        if self.predictor is not None and reason in (FinishReason.stop, FinishReason.length):
            self.predictor.observe(seq.request, seq.num_output_tokens)
        if self._hooks.on_end:
            self.scheduling.on_end(seq)

    @staticmethod
    def _is_movable(seq: Sequence) -> bool:
        """Whether a running sequence holds KV that another engine could go on with."""
        is_on_the_way = seq.state in (SequenceState.loading, SequenceState.leaving)
        return not (is_on_the_way or seq.num_dropped or seq.request.branching is not None)

    def _migrant(self, seq: Sequence) -> Migrant:
        return Migrant(seq.request, seq.num_known, seq.num_computed, self.transfers.blocks(seq))

    def _refuse_past(self, now: float) -> NoReturn:
        """Time goes forward: what policies derive from it, an age or a deadline, relies on that."""
        raise ValueError(f"now={now}: the clock went backwards, it was {self._now} before")

    def _check_at_rest(self, what: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(f"{what} while a plan is in flight: commit it first")


class _Hooks(NamedTuple):
    """Which of its optional methods a scheduling policy has."""

    before_step: bool
    on_commit: bool
    on_end: bool
    chunk_rank: bool


def _overridden(scheduling: Scheduling) -> _Hooks:
    own, base = type(scheduling), Scheduling
    return _Hooks(*(getattr(own, name) is not getattr(base, name) for name in _Hooks._fields))
