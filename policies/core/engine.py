"""The serving loop of one model instance, without time and without tensors.

    plan = core.plan(now)              # the policies decide; KV blocks are reserved
    outcome = <an executor runs it>    # sim: a hardware model gives the duration. realengine: kernels run
    core.commit(plan, outcome, now)    # sequences advance, end, free their blocks

There is no prefill phase and no decode phase: a sequence has computed tokens and known tokens, and a step
distributes tokens until the budget is used up. Sequences with one uncomputed token that decode together form
the decode set, which advances in constant time (policies/core/decode_set.py). policies/core/state.py
describes how a sequence moves between the queue, the running set and its end, policies/core/transfers.py the
transfers of KV between tiers. Requests may be added at any time and aborted between commit and plan; both
take effect with the next plan. After every plan, `take_transfers` returns the KV transfers to run; the caller
reports a finished load with `loaded`. A caller that runs several iterations of a plan at once reserves their
blocks before, with `reserve`.

The module is long because it is one object, read from top to bottom: its parts, how requests enter and leave,
how KV moves, `plan`, and `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from math import inf
from typing import TYPE_CHECKING, NoReturn

from policies.batching import Batching, DataParallel, max_unasked_of, supports_mixed_role
from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet
from policies.core.decode_set import blocks_of_repeats, cut_horizon
from policies.core.endings import BatchEnds, Ends, LateEnds
from policies.core.limits import Bounds, Limits, RejectedError, StopAfter
from policies.core.parts import Batches
from policies.core.plan import (
    AdapterLoad,
    Cause,
    Chunk,
    Migrant,
    Progress,
    StepOutcome,
    StepPlan,
    Transfer,
)
from policies.core.ranks import Ranks
from policies.core.release import VLLM_0_32, Release
from policies.core.request import Request
from policies.core.safeguards import MAX_STEPS, MAX_WAITS, PreemptionWatch, Report, WaitWatch, contain, weakly
from policies.core.sequence import ACTIVE_STATES, ENDED, WAITING, FinishReason, Sequence
from policies.core.state import EngineState
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting_queue import WaitingQueue
from policies.prediction import LengthPredictor
from policies.scheduling import Scheduling, overrides
from policies.user_code import WrongDecisionError, checked_prediction, checked_rank, name_of

if TYPE_CHECKING:
    from policies.adapters.serving import Residents
    from policies.speculation.engine.drafting import Drafting


class EngineCore:
    """Queues, slots and KV blocks of one engine, and the policies that act on them.

    batching, scheduling, predictor: the engine uses its own copies, so that the state of a policy is never
    shared with another engine, and the caller's objects do not change.
    max_num_seqs: slots, sequences that may hold KV at the same time. max_model_len: prompt and output tokens
    of one sequence; a small cache lowers it. num_swap_blocks: blocks of host memory for preempted KV.
    names_blocks: transfers have block ids, for an engine that copies bytes; decisions do not change.
    residents: the LoRA adapters that are served from the same pool; None: no adapters.
    ends: when sequences with complete outputs leave. max_batches: plans in flight at once, in a pipeline;
    None: one plan at a time. max_batch_seqs: limit on the sequences of one batch. new_drafts: creates the
    part that verifies draft tokens; None: each decode is one token. data_parallel: ranks of data-parallel
    attention, which share all limits and blocks equally; see `policies.core.ranks`.
    """

    def __init__(
        self,
        *,
        batching: Batching,
        scheduling: Scheduling,
        block_pool: BlockPool,
        max_num_seqs: int,
        max_model_len: int,
        predictor: LengthPredictor | None = None,
        num_swap_blocks: int = 0,
        names_blocks: bool = False,
        residents: Residents | None = None,
        ends: Ends = Ends.at_once,
        max_batches: int | None = None,
        max_batch_seqs: int | None = None,
        new_drafts: Callable[[BlockPool, Release], Drafting] | None = None,
        data_parallel: DataParallel | None = None,
        release: Release = VLLM_0_32,
    ) -> None:
        _check_settings(max_num_seqs, max_model_len, num_swap_blocks)
        if scheduling.needs_predictor and predictor is None:
            raise ValueError(
                f"scheduling={name_of(scheduling)}: needs predicted output lengths; choose a predictor, "
                "such as prediction=histogram"
            )
        self.batching, self.scheduling, self.predictor = deepcopy((batching, scheduling, predictor))
        self._needs_truth = self.predictor is not None and self.predictor.needs_truth
        self.block_pool = block_pool
        self.residents = residents
        self.rank = checked_rank(self.scheduling)
        self._predict = None if self.predictor is None else checked_prediction(self.predictor)
        self.max_model_len = max_model_len
        self.drafts = None if new_drafts is None else new_drafts(block_pool, release)
        """The verification of draft tokens; None: each decode is one token."""
        self._state = state = self._new_state(max_num_seqs, num_swap_blocks, names_blocks, release)
        self._share(state)
        self.view = StepView(state)
        self.may_branch = False  # whether a request with branches was added
        self.wake_s = inf  # after a plan of None: time at which the policies request the next call
        self.waits_for: Cause | None = None  # after such a plan; see StepPlan.waits_for
        self._sequences = state.sequences
        self.num_iterations = 0  # committed, including those of a replaced predecessor
        self._in_flight: StepPlan | None = None
        self._loaded_in_flight: list[int] = []  # request ids of loads reported while a plan was in flight
        self._adapters_in_flight: list[str] = []  # adapters, by name, likewise
        self._lost: list[Sequence] = []
        self._arrived: list[Sequence] = []
        self.num_reserved = 0
        """Iterations of the plan in flight for which `reserve` was called."""
        self._max_attempts = max_num_seqs + 100  # per plan: a step that only preempts frees a slot
        self.num_discarded = 0
        """Number of tokens computed after stop tokens and discarded; see `Ends.one_step_late`."""
        self.num_held = 0
        """Complete sequences that keep their slot and get no token; see `policies.core.endings`."""
        self.now = float("-inf")
        """Time of the last call of `plan` or `commit`, s."""
        self._waits = WaitWatch()
        self._ends: LateEnds | BatchEnds | None = None
        if ends is Ends.one_step_late:
            self._ends = LateEnds(self, release.caches_when_read)
            self._max_attempts = 1  # the previous step's tokens are read before the next attempt
        elif ends is Ends.with_batch:
            self._ends = BatchEnds(self)
        self.step = StepBuilder(state, None if self.drafts is None else self.drafts.new_rows(state, batching))
        """The step that policies build."""
        self.step.max_batch_seqs = max_batch_seqs
        self.batches = None if max_batches is None else Batches(self, max_batches)
        """The plans in flight of a pipeline; None: one plan at a time."""
        self._outer = self.drafts or self.batches  # parts through which plans and commits pass
        block_pool.watch(self._num_readable)
        self._preemption_watch = PreemptionWatch(state.sequences)
        self._decode_plan = StepPlan(0, 0, 0, 0, state.decodes, 1, inf)  # reused for steps that only decode
        self._decode_plan.is_unasked = True
        self._attach(data_parallel)
        if self.drafts is not None:
            state.max_tokens_per_pass = self.drafts.max_tokens_per_pass
            self.drafts.attach(self, ends is Ends.one_step_late)

    def _share(self, state: EngineState) -> None:
        """Copies parts of the state to attributes of the engine, because every step reads them."""
        self.running_set = running_set = state.running_set
        """The sequences that hold a slot, and the state of each."""
        self.running = running_set.running
        """Sequences that hold a slot, by request id, in the order of admission."""
        self.decodes = running_set.decodes
        """Sequences that get a token every iteration."""
        self.ending = running_set.ending
        """Sequences with a complete output that hold their slot, by request id."""
        self.paused = running_set.paused
        """Sequences that a policy has paused, by request id."""
        self.transfers = state.transfers
        """The KV transfers between tiers."""

    def _num_readable(self, seq: Sequence) -> int:
        return self.step.num_readable(seq, self._in_flight)

    def _attach(self, data_parallel: DataParallel | None) -> None:
        """Creates the ranks, and registers the policies that implement a hook for steps, commits or ends."""
        self.ranks: Ranks | None = None
        """The ranks of data-parallel attention; None: there is one."""
        if data_parallel is not None and data_parallel.size > 1:
            self.ranks = Ranks(self._state, self.step, data_parallel, self.max_model_len)
            if self.drafts is not None:
                self.drafts.decodes.limit_slots(self.limits.room)
        self._before_step: list[Callable[[StepView, StepBuilder, float], None]] = []
        self._on_commit: list[Callable[[StepPlan, int, float], None]] = []
        if self.residents is not None:
            self._before_step.append(self.residents.before_step)
        if overrides(self.scheduling, "before_step"):
            self._before_step.append(self.scheduling.before_step)
        if overrides(self.scheduling, "on_commit"):
            self._on_commit.append(self.scheduling.on_commit)
        if self.predictor is not None:
            self._state.on_end.append(self._observe)
        if overrides(self.scheduling, "on_end"):
            self._state.on_end.append(self.scheduling.on_end)
        self.use_batching(self.batching)

    def use_batching(self, batching: Batching) -> None:
        """Replaces the batching policy from the next plan on, for example by one with other limits."""
        self.batching = batching
        # Number of decodes up to which a step is planned without calling the batching policy.
        may_repeat = not self._before_step and self.batches is None and self.ranks is None
        self._max_unasked = max_unasked_of(batching) if may_repeat else 0
        if self.ranks is not None:
            self.ranks.use_batching(batching)

    def _new_state(
        self, max_num_seqs: int, num_swap_blocks: int, names_blocks: bool, release: Release
    ) -> EngineState:
        scheduling = self.scheduling
        decodes = None
        if self.drafts is not None:
            decodes = self.drafts.new_decodes(max_num_seqs, self.max_model_len)
        state = EngineState(
            self.block_pool,
            scheduling.queue(),
            self.rank,
            checked_rank(scheduling, "chunk_rank") if overrides(scheduling, "chunk_rank") else None,
            swaps=scheduling.preemption_mode == "swap",
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            num_swap_blocks=num_swap_blocks,
            names_blocks=names_blocks,
            preempts_newest=scheduling.preempts_newest,
            release=release.under(has_classes=scheduling.has_classes, speculates=self.drafts is not None),
            decodes=decodes,
            residents=self.residents,
        )
        state.looks_up = scheduling.looks_up
        return state

    @property
    def max_num_seqs(self) -> int:
        """Slots: the number of sequences that may hold KV at once."""
        return self._state.max_num_seqs

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences without KV, in the order of their rank."""
        return self._state.waiting

    @property
    def prefilling(self) -> dict[int, Sequence]:
        """Sequences in prefill, by request id."""
        return self.running_set.prefilling

    @property
    def loading(self) -> dict[int, Sequence]:
        """Sequences that wait for KV or an adapter to be loaded, by request id."""
        return self._state.loading

    @property
    def leaving(self) -> dict[int, Sequence]:
        """Sequences with KV that another engine is copying, by request id."""
        return self._state.running_set.leaving

    @property
    def branched(self) -> BranchSet:
        """Sequences that decode with branches."""
        return self._state.branched

    @property
    def limits(self) -> Limits:
        """The engine's limits on prompt and output lengths."""
        return self._state.limits

    @property
    def free_slots(self) -> SequenceOf[int]:
        """Slots that no sequence holds."""
        return self.running_set.free_slots

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._state.num_preemptions

    @property
    def num_in_engine(self) -> int:
        """Number of waiting and running sequences, those with a complete output included."""
        return len(self._sequences)

    @property
    def num_unfinished(self) -> int:
        """Number of added requests that have not ended."""
        num_sequences = len(self._sequences)
        return num_sequences if self._ends is None else self._ends.num_unfinished(num_sequences)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the waiting queue."""
        return len(self._sequences) - len(self.running)

    @property
    def num_tokens_held(self) -> int:
        """Number of tokens with stored KV."""
        decodes = self.decodes
        if self.batches is not None:
            return self._state.running_set.num_tokens_held - self.batches.num_tokens_under_way
        if len(self.running) == decodes.size:
            return decodes.num_context_tokens
        return self._state.running_set.num_tokens_held

    @property
    def num_free_swap_blocks(self) -> int:
        """Free blocks of host memory for preempted KV."""
        return self.transfers.num_free_swap_blocks

    @property
    def lost(self) -> SequenceOf[Sequence]:
        """Sequences preempted by steps that computed nothing; the next plan lists them."""
        return self._lost

    @property
    def arrived(self) -> SequenceOf[Sequence]:
        """Sequences for which KV was loaded since the last plan; the next plan lists them as admitted."""
        return self._arrived

    @property
    def in_flight(self) -> StepPlan | None:
        """The last returned plan, while it is not committed."""
        return self._in_flight

    @property
    def unfinished(self) -> Collection[Sequence]:
        """Waiting and running sequences whose output was not returned, in the order of their arrival."""
        sequences = self._sequences.values()
        return sequences if self._ends is None else self._ends.unfinished(sequences)

    def find(self, request_id: int) -> Sequence | None:
        """Returns the sequence of a request that has not ended here and can be aborted, else None."""
        seq = self._sequences.get(request_id)
        if seq is not None and self._ends is not None and self._ends.hides(seq):
            return None
        return seq

    def add(self, request: Request, stop_after: StopAfter = None) -> Sequence:
        """Adds a request.

        stop_after: output tokens after which the request ends, if the caller knows them (a simulator does, an
        engine does not). For a request with branches, it is one number for all or one per branch. It limits
        horizons and ends the sequence; policies never see it.
        Raises RejectedError if the prompt can never be served, ValueError if the request id is in use.
        """
        return self.enter(self.sequence_of(request, stop_after))

    def sequence_of(self, request: Request, stop_after: StopAfter = None) -> Sequence:
        """Returns a sequence for a request that `enter` will add later.

        Arguments and errors as for `add`.
        """
        if self.drafts is not None:
            self.drafts.check(request)
        end_known, end_reason, max_known = self._state.bounds_of(request, stop_after)
        seq = Sequence(request, self.decodes, end_known, end_reason, max_known)
        if request.branching is not None:
            self.branched.prepare(seq, request.branching, stop_after)
        if self._needs_truth and stop_after is None:
            raise ValueError(
                f"prediction={name_of(self.predictor)}: needs the true output lengths, which only a "
                "simulator knows; choose a predictor that learns, such as prediction=histogram"
            )
        return seq

    def enter(self, seq: Sequence) -> Sequence:
        """Adds the sequence of a request. Raises ValueError if the request id is in use."""
        request_id = seq.request_id
        if request_id in self._sequences:
            raise ValueError(f"request_id={request_id}: is being served already")
        if self._predict is not None:
            truth = seq._end_known - seq.num_prompt_tokens if self._needs_truth else None
            seq.predicted = self._predict(seq.request, truth)
        if seq.request.branching is not None:
            self.may_branch = True
        state = self._state
        state.traffic_has_ended = False
        if self.ranks is not None:
            self.ranks.place(seq)
        seq.rank = state.rank(seq)
        self._sequences[request_id] = seq
        state.enqueue(seq)
        return seq

    def bounds_of(self, request: Request, stop_after: StopAfter = None) -> Bounds:
        """Returns the number of known tokens at which a request would end here, and the reason.

        Arguments as for `add`. Raises RejectedError if its prompt can never be served, or if its adapter is
        not served.
        """
        if self.drafts is not None:
            self.drafts.check(request)
        return self._state.bounds_of(request, stop_after)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.aborted) -> Sequence | None:
        """Ends a request between commit and plan. Returns its sequence; None if it is not in this engine.

        reason: `stop` if a late check of its tokens finds that the output was complete. For a sequence whose
        complete output is held for one more step, frees only slot and blocks, and returns None.
        """
        self._check_at_rest("abort")
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        is_complete = isinstance(self._ends, LateEnds) and self._ends.hides(seq)
        if self.drafts is not None:
            self.drafts.note_read(reason is not FinishReason.aborted)
        if seq.state is WAITING:
            self._state.withdraw(seq, reason)
        else:
            self._state.finish(seq, seq.finish_reason or reason if is_complete else reason)
        if self.drafts is not None:
            self.drafts.note_read(False)
        return None if is_complete else seq

    def contain_errors(self, report: Report) -> None:
        """Reports errors that policies raise about one sequence from now on, instead of raising them.

        The caller aborts the sequence before the next plan. Errors about a whole step are still raised.
        report: a method; its object is not kept alive.
        """
        contain(self._state, weakly(report))

    def check_integrity(self) -> None:
        """Asserts between commit and plan: blocks free + owned = all, every slot has at most one owner."""
        self._check_at_rest("check_integrity")
        self._state.check_integrity()
        if self.ranks is not None:
            self.ranks.check_integrity()

    def _observe(self, seq: Sequence) -> None:
        """Reports the length of a complete output to the length predictor."""
        if self.predictor is not None and seq.finish_reason in (FinishReason.stop, FinishReason.length):
            self.predictor.observe(seq.request, seq.num_output_tokens)

    def _check_at_rest(self, what: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(f"{what}: a plan is in flight; commit it first")

    # Transfers of KV and adapters.

    def take_transfers(self) -> list[Transfer]:
        """Returns the transfers that plans have requested since the last call, in order.

        The caller runs them. The stores of the last plan must be read before the plan is run, because it
        reuses their blocks. See `Transfer`.
        """
        return self.transfers.take()

    def take_adapter_loads(self) -> list[AdapterLoad]:
        """Returns the adapter loads that plans have requested since the last call, in order.

        The caller runs them after every plan, and calls `adapter_loaded` at the end of each.
        """
        return [] if self.residents is None else self.residents.take_loads()

    def loaded(self, request_id: int) -> None:
        """Records a finished transfer of a waiting sequence, which continues after its last transfer.

        Does nothing if the sequence was aborted meanwhile. While a plan is in flight, this takes effect with
        the plan's commit, or when the plan enters a pipeline.
        """
        if self._in_flight is not None:
            self._loaded_in_flight.append(request_id)
            return
        seq = self.loading.get(request_id)
        if seq is not None:
            self._note_load(seq)

    def adapter_loaded(self, name: str) -> None:
        """Records that an adapter is on the GPU; sequences that waited only for it continue.

        While a plan is in flight, this takes effect with the plan's commit.
        """
        if self._in_flight is not None:
            self._adapters_in_flight.append(name)
            return
        assert self.residents is not None
        for seq in self.residents.loaded(name):
            self._note_load(seq)

    def _note_load(self, seq: Sequence) -> None:
        if self.transfers.is_loaded(seq):
            self.running_set.finish_loading(seq)
            self._arrived.append(seq)

    def _take_loaded(self) -> None:
        """Applies the loads that were reported while a plan was in flight."""
        loaded, self._loaded_in_flight = self._loaded_in_flight, []
        for request_id in loaded:
            self.loaded(request_id)
        adapters, self._adapters_in_flight = self._adapters_in_flight, []
        for name in adapters:
            self.adapter_loaded(name)

    def export(self, request_id: int) -> Migrant | None:
        """Exports a running sequence to another engine and ends it here; None if it has no KV to copy.

        Must be called between commit and plan. The blocks of the sequence become free at once, so the caller
        must copy them before the next step and its transfers. `Transfer` says how blocks are named.
        """
        self._check_at_rest("export")
        migrant = self._state.migrant(request_id)
        if migrant is not None:
            self._state.finish(self.running[request_id], FinishReason.migrated)
        return migrant

    def begin_kv_transfer(self, request_id: int) -> Migrant | None:
        """Exports a sequence that keeps slot and blocks, in state leaving, until its KV has been copied.

        Only for a sequence that decodes or is paused; None otherwise. `abort(request_id,
        FinishReason.migrated)` ends it here when the copy is complete; `cancel_kv_transfer` lets it continue
        to decode here.
        """
        self._check_at_rest("begin_kv_transfer")
        migrant = None if request_id in self.prefilling else self._state.migrant(request_id)
        if migrant is not None:
            self.running_set.begin_kv_transfer(self.running[request_id])
        return migrant

    def cancel_kv_transfer(self, request_id: int) -> None:
        """Resumes decoding a leaving sequence here. Raises KeyError if it is not leaving."""
        self._check_at_rest("cancel_kv_transfer")
        self.running_set.cancel_kv_transfer(self.leaving[request_id])

    def check_migrant(self, request: Request, num_known: int, stop_after: StopAfter = None) -> None:
        """Raises RejectedError if a sequence of num_known known tokens cannot continue here."""
        self._state.limits.check_resident(num_known)
        end_known, _, _ = self.bounds_of(request, stop_after)
        if num_known >= end_known:
            raise RejectedError(f"a sequence of {num_known} tokens: it would have ended at {end_known} here")

    def adopt(self, migrant: Migrant, stop_after: StopAfter = None, tier: str = "remote") -> Sequence:
        """Adds a sequence that another engine has exported; it waits for a slot and then for its KV.

        KV in this engine's cache is not transferred; if the cache has all of it, there is no transfer. With
        tier="live" the cache is not looked up, because the other engine continues to decode (see
        sim/migration). This engine computes the migrant's uncomputed tokens. stop_after: as for `add`,
        counted from its first output token. tier: the location of its KV, see `Transfer`. Raises
        RejectedError if it can never be served.
        """
        self.check_migrant(migrant.request, migrant.num_known, stop_after)
        seq = self.add(migrant.request, stop_after)
        seq.stored_known = migrant.num_known
        if migrant.num_computed:
            seq.num_swapped = migrant.num_computed
            seq.swap_tier = tier
        return seq

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step; None if there is nothing to compute now.

        A plan must be committed before the next call. After None, call it again at the next event (such as an
        arrival) and at `wake_s`. In both cases call `take_transfers` afterwards. Raises WrongDecisionError if
        the policies schedule nothing although requests are unfinished and no transfer is in progress.
        """
        return self.plan_step(now) if self._outer is None else self._outer.plan(now)

    def plan_step(self, now: float) -> StepPlan | None:
        """Returns the next step like `plan`, but ignores drafts and other plans in flight."""
        if self._ends is not None and (self.ending or self._ends.uncached):
            return self._ends.plan(now)
        self.num_held = 0
        return self.plan_once(now)

    def plan_once(self, now: float) -> StepPlan | None:
        """Returns the next step while complete sequences hold their slots."""
        if self._in_flight is not None:
            self._check_at_rest("plan")
        if not now >= self.now:
            self._refuse_past(now)
        pool = self.block_pool
        self.now = pool.now = now
        if pool.expires_s <= now:
            pool.expire()
        plan, num_decodes = None, self.decodes.size
        if self.drafts is not None:
            plan = self.drafts.plan_unasked(self._max_unasked, not (self._lost or self._arrived))
        elif num_decodes and num_decodes + self.num_held == len(self._sequences):
            plan = self._plan_unasked(num_decodes)
        if plan is None:
            self.wake_s, self.waits_for = inf, None
            if self._sequences:
                plan = self._ask(now)
        if plan is None:  # all tokens are read before the next plan
            self._state.last_plan = self._state.plan_before = None
        self._in_flight = plan
        return plan

    def _ask(self, now: float) -> StepPlan | None:
        """Lets the policies build a step, and another one if the step only freed blocks."""
        step = self.step
        for _ in range(self._max_attempts):
            step.begin()
            if self.ranks is not None:
                plan = self.ranks.plan(self._before_step, now)
            else:
                for before_step in self._before_step:
                    before_step(self.view, step, now)
                self.batching.fill(self.view, step, now)
                plan = step.end()
            if step.has_preempted and step.preempted and self._preemption_watch.is_livelock():
                self._refuse_livelock()
            if plan is not None:
                if self._lost or self._arrived:
                    self._add_earlier_changes(plan)
                return plan
            self._lost += step.preempted
            if not step.has_freed:
                break
        self._rest(now)
        return None

    def _rest(self, now: float) -> None:
        """Stores what the engine waits for after a step without tokens.

        Raises WrongDecisionError if there is nothing to wait for.
        """
        step = self.step
        wake_s, self.waits_for = step.wake_s, step.waits_for()
        if wake_s is not None:
            self.wake_s = wake_s
        if self.wake_s == inf and not (step.has_freed or self._state.is_transferring):
            self._state.give_way()
        if self._may_compute_nothing():
            return
        if wake_s is None or now >= wake_s:
            raise self._stuck("scheduled nothing")
        if self._waits.is_livelock(self.num_iterations, len(self._sequences)):
            raise self._stuck(f"has called step.wait_until {MAX_WAITS:,} times in a row")

    def end_traffic(self) -> bool:
        """Tells policies that no other event will occur; returns whether they wait for one.

        If so, plan again. Raises WrongDecisionError if policies still wait when called a second time, unless
        for a replica of another role.
        """
        is_waiting = bool(self._sequences) and self.wake_s == inf and self._waits.num_waits > 0
        if not is_waiting or not supports_mixed_role(self.batching):
            return False
        if self._state.traffic_has_ended:
            raise self._stuck("waits for ever")
        self._state.traffic_has_ended = True
        return True

    def _stuck(self, did: str) -> WrongDecisionError:
        return WrongDecisionError(
            self.batching,
            "fill",
            f"{did} with {self.num_waiting} waiting and {len(self.running)} running",
            "it must decode, prefill or admit a sequence, or say with step.wait_until when to call it again, "
            "as the engine would never continue",
        )

    def _may_compute_nothing(self) -> bool:
        """Returns whether a step without tokens is valid."""
        if self.drafts is not None:
            self.drafts.make_room()
        if self._ends is not None and self._ends.may_compute_nothing():
            return True
        if self.batches is not None and self.batches.in_flight:
            return True
        return self._state.is_transferring

    def _plan_unasked(self, num_decodes: int) -> StepPlan | None:
        """Returns a step in which all sequences decode; None if the policies must be called."""
        decodes, pool = self.decodes, self.block_pool
        if num_decodes > self._max_unasked or decodes.at_limit or self._lost or self._arrived:
            return None
        num_blocks = decodes.blocks_due_by_phase[decodes.clock % decodes.block_size]
        if num_blocks > pool.num_free:
            return None
        if num_blocks:
            pool.take(num_blocks)
        plan = self._decode_plan
        plan.index = self.num_iterations
        plan.num_decodes = num_decodes
        plan.num_widening = num_widening = num_decodes - decodes.num_steady
        plan.num_decode_context_tokens = decodes.num_context_tokens + num_widening
        plan.horizon = horizon = decodes.iterations_to_first_event()
        plan.until_s = pool.expires_s
        num_blocks = num_decodes * (horizon // pool.block_size + 1)  # at most
        if num_blocks > pool.num_free or (pool.copies and num_blocks > pool.num_free_without_copy):
            plan.horizon = cut_horizon(plan, decodes, pool)
        return plan

    def _add_earlier_changes(self, plan: StepPlan) -> None:
        """Adds the admissions and preemptions since the last step with tokens to a plan, for the records."""
        plan.preempted = [*self._lost, *plan.preempted]
        plan.admitted = [*(seq for seq in self._arrived if seq.state in ACTIVE_STATES), *plan.admitted]
        plan.horizon = 1
        self._lost = []
        self._arrived = []

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan: its iterations, then the ends of sequences.

        Returns the sequences that completed their prefill, and those that ended.
        """
        if self._outer is not None:
            return self._outer.commit(plan, outcome, now)
        return self.commit_step(plan, outcome, now)

    def commit_step(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan like `commit`, but ignores drafts and other plans in flight."""
        self.check_commit(plan, outcome.iterations, now)
        ends = self._ends
        if ends is not None and (self.ending or ends.is_batch or outcome.ended or ends.uncached):
            return ends.commit(plan, outcome, now)
        return self.apply(plan, outcome, now)

    def apply(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan checked by `check_commit`, after earlier ends."""
        num_iterations, pool = outcome.iterations, self.block_pool
        self.now = pool.now = self._state.last_end_s = now
        self._in_flight = None
        state = self._state
        state.plan_before = state.last_plan if num_iterations == 1 else plan
        state.last_plan = plan
        if self._on_commit:
            for on_commit in self._on_commit:
                on_commit(plan, num_iterations, now)
        if self.num_reserved:
            self.num_reserved = 0
        elif num_iterations > 1 and self.drafts is None:  # `Drafting.num_iterations_of` took its blocks
            if plan.num_decodes:
                pool.take(self.decodes.blocks_due_after(1, num_iterations - 1))
            if plan.chunks:
                self._grow_chunks(plan.chunks, num_iterations - 1)
        self.num_iterations = pool.num_iterations = self.num_iterations + num_iterations
        if not plan.num_decodes:
            finished: list[Sequence] = []
        elif plan.branched or self.drafts is not None:
            finished = self._advance(plan, outcome)
        else:
            finished = self.decodes.advance(num_iterations, plan.idle)
        prefilled = self._commit_chunks(plan, outcome, finished) if plan.chunks else []
        if outcome.ended:
            self.note_ends(outcome.ended, finished)
        if finished:
            self.end_finished(finished)
        if self._loaded_in_flight or self._adapters_in_flight:
            self._take_loaded()
        return prefilled, finished

    def check_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        """Raises ValueError for a commit that does not fit the plan in flight."""
        num_reserved = self.num_reserved
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"commit of {num_iterations} iterations: must be of the plan in flight and within its horizon"
            )
        if num_reserved and num_iterations != num_reserved:
            raise ValueError(f"commit of {num_iterations} iterations: must be {num_reserved}, as reserved")
        if not now >= self.now:
            self._refuse_past(now)

    def check_time(self, now: float) -> None:
        """Raises ValueError if time goes backwards, because policies' ages and deadlines depend on it."""
        if not now >= self.now:
            self._refuse_past(now)

    def at_rest(self) -> None:
        """Allows the next plan although the last one has not been committed."""
        self._in_flight = None
        if self._loaded_in_flight or self._adapters_in_flight:
            self._take_loaded()

    def note_chunk(self, seq: Sequence, num_computed: int) -> None:
        """Notifies the pool of a computed chunk, if it listens."""
        if self._state.notes_chunks:
            self.block_pool.computed(seq, num_computed)

    def end_finished(self, finished: list[Sequence]) -> None:
        """Ends sequences in the order of admission, which is the order in which vLLM frees blocks."""
        if len(finished) > 1:
            finished.sort(key=lambda seq: seq.admission)
        if self._ends is not None:
            self._ends.hold(finished)
            return
        for seq in finished:
            self._state.finish(seq, seq._end_reason)

    def finish(self, seq: Sequence, reason: FinishReason, num_planned: int = 0) -> None:
        """Ends a running sequence now; num_planned tokens of the plan in flight will not be computed."""
        self._state.finish(seq, reason, num_planned)

    def on_committed(self, plan: StepPlan, now: float) -> None:
        """Counts one committed iteration, and notifies policies, before its outcome is applied."""
        pool = self.block_pool
        self.now = pool.now = self._state.last_end_s = now
        for on_commit in self._on_commit:
            on_commit(plan, 1, now)
        self.num_iterations = pool.num_iterations = self.num_iterations + 1

    def free_ending(self) -> None:
        """Frees the sequences that ended with the previous step, if they hold slots."""
        if self._ends is not None:
            self._ends.free()

    def withdraw(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence that the plan in flight has preempted."""
        plan = self._in_flight
        if plan is not None:
            plan.preempted = [other for other in plan.preempted if other is not seq]
        self._lost = [other for other in self._lost if other is not seq]
        self._state.withdraw(seq, reason)

    def _advance(self, plan: StepPlan, outcome: StepOutcome) -> list[Sequence]:
        """Advances sequences that decode with branches or drafts; returns the sequences that end."""
        if self.drafts is not None:
            return self.drafts.advance(plan, outcome)
        finished = []
        if plan.num_decodes > plan.num_branches:
            finished = self.decodes.advance(outcome.iterations, plan.idle)
        for seq in plan.branched:
            if self.branched.produce(seq, outcome.parents.get(seq.request_id)):
                finished.append(seq)
        return finished

    def _commit_chunks(
        self, plan: StepPlan, outcome: StepOutcome, finished: list[Sequence]
    ) -> list[Sequence]:
        """Records computed chunks and adds ends to `finished`; returns sequences with a complete prefill."""
        prefilled = []
        notes_chunks = self._state.notes_chunks
        for seq, _, num_tokens, _ in plan.chunks:
            seq.stored_computed = num_computed = seq.stored_computed + num_tokens * outcome.iterations
            is_complete = num_computed >= seq.stored_known
            is_late = is_complete and self._state.release.caches_when_read and seq.request.branching is None
            if notes_chunks and not is_late:
                self.block_pool.computed(seq, num_computed)
            if not is_complete:
                continue
            prefilled.append(seq)
            if self.end_prefill(seq, outcome):
                finished.append(seq)
            elif is_late and notes_chunks:
                if self._ends is None:
                    self.block_pool.computed(seq, num_computed)
                else:
                    self._ends.cache_late(seq, num_computed)
        return prefilled

    def end_prefill(self, seq: Sequence, outcome: StepOutcome) -> bool:
        """Adds the first token of a sequence, or of each of its branches; returns whether it has ended."""
        if seq.request.branching is None:
            return self.running_set.begin_decoding(seq)
        self.running_set.fork(seq)
        return self.branched.produce(seq, outcome.parents.get(seq.request_id))

    def cancel(self, plan: StepPlan) -> list[Sequence]:
        """Cancels the plan in flight, which could not be run; aborts its sequences and returns them.

        The tokens that the plan would have computed are removed from the cache. This also aborts sequences
        that wait for a transfer and had a cache hit on some of those tokens.
        """
        if plan is not self._in_flight:
            raise ValueError("cancel: must be called with the plan in flight")
        self._in_flight = None
        num_planned = dict.fromkeys(plan.decodes, max(1, self.num_reserved))
        num_planned |= {chunk.seq: chunk.num_tokens for chunk in plan.chunks}
        for owner in list(num_planned):
            num_planned |= {seq: 0 for seq in self.running_set.sharers(owner) if seq not in num_planned}
        self.num_reserved = 0
        for seq in sorted(num_planned, key=lambda seq: seq.admission, reverse=True):  # sharers before owners
            self._state.finish(seq, FinishReason.aborted, num_planned[seq])
        self._take_loaded()
        return list(num_planned)

    def reserve(self, plan: StepPlan, num_iterations: int) -> None:
        """Reserves the KV blocks of num_iterations iterations of the plan in flight before they run.

        Afterwards `block_ids` has the blocks of seq.num_known + num_iterations - 1 tokens, and only a commit
        of exactly num_iterations is allowed. Raises ValueError for a plan with chunks or branches, on a
        second call for the same plan, and beyond the plan's horizon.
        """
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"reserve for {num_iterations} iterations: must be of the plan in flight, within its horizon"
            )
        if self.drafts is None and (plan.chunks or plan.branched):
            raise ValueError("reserve: the plan must have no prompt chunks and no branches; it is run once")
        if self.num_reserved:
            raise ValueError(f"reserve: {self.num_reserved} iterations of this plan are reserved already")
        if self.drafts is not None:
            self.drafts.reserve(plan, num_iterations)
            return
        self.block_pool.take(self.decodes.blocks_due_after(1, num_iterations - 1))
        self.num_reserved = num_iterations

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Returns the physical ids of the blocks of a running sequence's first num_tokens tokens.

        Blocks of planned tokens are included. Tokens that a lossy cache has dropped count, but have no block.
        While the sequence decodes with branches, only the prompt's full blocks are included; see
        `BranchSet.block_ids`.
        """
        return self.block_pool.block_ids(seq, num_tokens - seq.num_dropped)

    def blocks_of_repeats(self, plan: StepPlan, num_repeats: int) -> int:
        """Counts the blocks that num_repeats further iterations of a plan need; the first has its blocks."""
        if self.drafts is not None:
            return self.drafts.blocks_of_repeats(plan, num_repeats)
        return blocks_of_repeats(plan, num_repeats, self.decodes, self.block_pool)

    def _grow_chunks(self, chunks: SequenceOf[Chunk], num_repeats: int) -> None:
        """Grows several prompts in turn, like single steps.

        The order matters, because a cache uses the first of several blocks with equal contents.
        """
        num_turns = num_repeats if len(chunks) > 1 else 1
        per_turn = num_repeats // num_turns
        for turn in range(num_turns):
            for chunk in chunks:
                first = chunk.num_cached + (1 + turn * per_turn) * chunk.num_tokens
                self.block_pool.grow(chunk.seq, first, first + per_turn * chunk.num_tokens)

    def _refuse_livelock(self) -> NoReturn:
        raise WrongDecisionError(
            self.batching,
            "fill",
            f"and scheduling={name_of(self.scheduling)} have preempted in {MAX_STEPS:,} steps and no "
            "sequence has got a token",
            "a policy must preempt only for a sequence that can be admitted (see `StepView.may_start`)",
        )

    @staticmethod
    def note_ends(ended: tuple[Sequence, ...], finished: list[Sequence]) -> None:
        """Adds the sequences that the executor reports as ended to `finished`.

        Their reason is `stop`, even if they reach a limit with the same token.
        """
        for seq in ended:
            if seq.state is WAITING:
                raise ValueError(f"{seq!r} cannot have ended: it was not run")
            if seq.state is not ENDED:
                seq._end_reason = FinishReason.stop
                if seq not in finished:
                    finished.append(seq)

    def _refuse_past(self, now: float) -> NoReturn:
        """Raises ValueError, because ages and deadlines of policies require that time never decreases."""
        raise ValueError(f"now={now}: must be >= the time of the last call, {self.now}")


def _check_settings(max_num_seqs: int, max_model_len: int, num_swap_blocks: int) -> None:
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs={max_num_seqs}: must be >= 1")
    if max_model_len < 2:
        raise ValueError(f"max_model_len={max_model_len}: must be >= 2, a prompt token and an output token")
    if num_swap_blocks < 0:
        raise ValueError(f"num_swap_blocks={num_swap_blocks}: must be >= 0")
