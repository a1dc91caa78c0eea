"""The serving loop of one model instance, without time and without tensors.

    plan = core.plan(now)              # the policies decide; KV blocks are reserved
    outcome = <someone runs it>        # sim: a hardware model says how long. realengine: kernels run
    core.commit(plan, outcome, now)    # sequences advance, end, free their blocks

There is no prefill phase and no decode phase here: a sequence has tokens computed and tokens known, a step
hands out tokens until the budget is gone. Sequences with one uncomputed token that go on together form the
decode set, which advances in constant time (policies/decode_set.py).
Requests may come at any time, aborts between commit and plan; they take effect with the next plan.
A request with several answers (`Request.branching`) is one sequence: its prompt is computed once, then it
goes on as branches, beside the decode set, which share KV blocks by reference and copy them on write
(policies/caching/branches.py). It takes a slot a branch, and is preempted as one; recomputed, it is one
prefill of all the tokens that it stored.
KV that moves between tiers is asked for by `take_transfers`, after every plan; `loaded` says it is there.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from policies.batching import Batching
from policies.caching.branches import Branches
from policies.caching.pool import BlockPool
from policies.decode_set import AT_LIMIT, PAGED, DecodeSet
from policies.plan import Cause, Chunk, Migrant, Progress, StepOutcome, StepPlan, Transfer
from policies.prediction import LengthPredictor
from policies.request import Branching, Request
from policies.scheduling import Scheduling
from policies.sequence import FinishReason, Sequence, SequenceState
from policies.step import StepBuilder, StepView

StopAfter = int | tuple[int, ...] | None


class RejectedError(ValueError):
    """A request that this engine can never serve; the message says why."""


class EngineCore:
    """Queues, slots and KV blocks of one engine, and the policies that act on them.

    max_num_seqs: slots, sequences that may hold KV at once. max_model_len: prompt and output tokens of one
    sequence; a cache too small for that lowers it. num_swap_blocks: room in host memory for preempted KV.
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
        self.batching = batching
        self.scheduling = scheduling
        self.predictor = predictor
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.swaps = scheduling.preemption_mode == "swap"
        self.num_free_swap_blocks = num_swap_blocks
        self.waiting = scheduling.queue()
        self.running: dict[int, Sequence] = {}  # by request id, in the order of admission
        self.prefilling: dict[int, Sequence] = {}  # the running ones that have prompt left, same order
        self.paused: dict[int, Sequence] = {}  # the running ones that a policy has paused
        self.branching: dict[int, Sequence] = {}  # the running ones that decode with branches
        self.loading: dict[int, Sequence] = {}  # the running ones whose KV is on its way
        self.decodes = DecodeSet(max_num_seqs, pool.block_size)
        self.free_slots = list(range(max_num_seqs))  # a heap: the lowest free slot is the next used
        self.view = StepView(self)
        self.num_iterations = 0
        self.num_preemptions = 0
        self.may_branch = False  # somebody has asked for several answers
        self._num_admissions = 0
        self.wake_s = inf  # after a plan that is None: when the policies want to be asked again
        self.waits_for: Cause | None = None  # after such a plan: why who waits has to, as StepPlan.waits_for
        self._transfers: list[Transfer] = []  # wanted by plans, not taken yet
        self._loaded_in_flight: list[int] = []  # request ids: loaded while a plan was in flight
        self._arrived: list[Sequence] = []  # admitted, and their transfer done, since the last plan
        self._lost: list[Sequence] = []  # preempted by steps that computed nothing
        self._hooks = _overridden(scheduling)
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
            num_tokens += seq.num_held
        for seq in self.paused.values():
            num_tokens += seq.num_held
        if self.branching:
            num_tokens += sum(seq.num_held for seq in self.branching.values())
        return num_tokens

    @property
    def lost(self) -> SequenceOf[Sequence]:
        """Preempted by steps that computed nothing: the next plan will name them."""
        return self._lost

    @property
    def unfinished(self) -> Collection[Sequence]:
        """Sequences waiting or running, in the order of their intake."""
        return self._sequences.values()

    def find(self, request_id: int) -> Sequence | None:
        """The sequence of a request that has not ended here."""
        return self._sequences.get(request_id)

    def add(self, request: Request, stop_after: StopAfter = None) -> Sequence:
        """Take a request in.

        stop_after: output tokens after which the caller will end it, if the caller knows (a simulator's
        oracle does, an engine does not); of one with branches, for all or for each. It bounds
        horizons and ends the sequence; policies never see it.
        Raises RejectedError if the prompt can never be served, ValueError on a known request id.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request_id={request.request_id}: is being served already")
        end_known, reason = self.end_of(request, stop_after)
        predicted = None
        if self.predictor is not None:
            if self.predictor.needs_truth and stop_after is None:
                name = type(self.predictor).__name__
                raise ValueError(f"{name} stands in for a model that is told the truth: simulation only")
            truth = end_known - request.prompt.num_tokens if self.predictor.needs_truth else None
            predicted = self.predictor.predict(request, truth)
        seq = Sequence(request, self.decodes, end_known, reason, self._max_known(request), predicted)
        if request.branching is not None:
            seq._ends = self._ends(request, stop_after)
            seq._num_apart = self._num_copied_blocks(request)
            self.may_branch = True
        seq._rank = self.scheduling.rank(seq)
        self._sequences[request.request_id] = seq
        self.waiting.push(seq)
        return seq

    def _max_known(self, request: Request) -> int:
        """Known tokens at which a request ends at the latest, as far as anybody may know."""
        limit = min(self.max_model_len, self.pool.max_tokens_per_seq + 1)
        if request.branching is not None:
            limit = min(limit, self._room_for(request.branching, request.prompt.num_tokens))
        if request.max_tokens is None:
            return limit
        return min(limit, request.prompt.num_tokens + request.max_tokens)

    def _room_for(self, branching: Branching, num_prompt: int) -> int:
        """Known tokens of a branch with which a sequence alone finds room, sharing the prompt at most."""
        if not self.pool.shares_branches:
            return self.pool.num_blocks // branching.width * self.pool.block_size + 1
        num_full, num_partial = divmod(num_prompt, self.pool.block_size)
        num_blocks_each = (self.pool.num_blocks - num_full) // branching.width
        return num_prompt + max(0, num_blocks_each * self.pool.block_size - num_partial) + 1

    def _ends(self, request: Request, stop_after: StopAfter) -> tuple[int, ...]:
        """The output tokens after which each branch of a request ends, as far as anybody may know."""
        assert request.branching is not None
        limit = self._max_known(request) - request.prompt.num_tokens
        if not isinstance(stop_after, tuple):
            stop_after = (limit if stop_after is None else stop_after,) * request.branching.width
        return tuple(min(limit, num_tokens) for num_tokens in stop_after)

    def _num_copied_blocks(self, request: Request) -> int:
        """Blocks into which a prompt is copied for the other branches, where they do not share it."""
        if request.branching is None or self.pool.shares_branches:
            return 0
        return (request.branching.width - 1) * self.pool.blocks_for(request.prompt.num_tokens)

    def _check_branching(self, branching: Branching, stop_after: StopAfter) -> None:
        width, every = branching
        if width < 1 or (every is not None and every < 1):
            raise RejectedError(f"branching.width={width}, branching.every={every}: must be >= 1")
        if not self.pool.can_fork:
            raise RejectedError(f"{width} branches: {type(self.pool).__name__} cannot share KV between them")
        if width > self.max_num_seqs:
            raise RejectedError(f"{width} branches: max_num_seqs is {self.max_num_seqs}")
        if isinstance(stop_after, tuple) and (len(stop_after) != width or min(stop_after) < 1):
            raise ValueError(f"stop_after={stop_after}: must be {width} numbers >= 1, one a branch")

    def end_of(self, request: Request, stop_after: StopAfter = None) -> tuple[int, FinishReason]:
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
        if request.branching is not None:
            self._check_branching(request.branching, stop_after)
        if isinstance(stop_after, tuple):
            if request.branching is None:
                raise ValueError(f"stop_after={stop_after}: must be one number, the request has no branches")
            stop_after = max(stop_after)
        end_known = self._max_known(request)
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
            self._free_swapped(seq)
            self._end(seq, FinishReason.aborted)
        else:
            self._finish(seq, FinishReason.aborted)
        return seq

    def export(self, request_id: int) -> Migrant | None:
        """Let a running sequence go on in another engine; None if it holds no KV here that could be copied.

        Between commit and plan. Its blocks are free at once: they are to be copied before the next step.
        """
        self._check_at_rest("export")
        seq = self.running.get(request_id)
        if seq is None or seq._state is SequenceState.loading or seq._dropped:
            return None
        if seq.request.branching is not None:
            return None
        migrant = Migrant(seq.request, seq.num_known, seq.num_computed)
        self._finish(seq, FinishReason.migrated)
        return migrant

    def adopt(self, migrant: Migrant, stop_after: int | None = None) -> Sequence:
        """Take in a sequence that another engine has exported; it waits for a slot, and then for its KV.

        stop_after: as for `add`, counted from its first output token. Raises RejectedError if it can never be
        served here.
        """
        if migrant.num_known > self.pool.max_tokens_per_seq:
            room = self.pool.max_tokens_per_seq
            raise RejectedError(f"a sequence of {migrant.num_known} tokens: the KV cache holds {room} of one")
        seq = self.add(migrant.request, stop_after)
        if migrant.num_known >= seq._end_known:
            self.abort(migrant.request.request_id)
            raise RejectedError(f"a sequence of {migrant.num_known} tokens: it would have ended here before")
        seq._known = migrant.num_known
        seq._swapped = migrant.num_computed
        seq._swap_tier = "remote"
        return seq

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to compute now. A plan must be committed before the next.

        After None: ask again when something comes from outside, and at `wake_s`. After either, look at
        `take_transfers`. Raises RuntimeError if the policies schedule nothing although requests are there and
        nothing is awaited.
        """
        if self._in_flight is not None:
            self._check_at_rest("plan")
        self._advance_to(now)
        self.wake_s = inf
        if self.pool.expires_s <= now:
            self.pool.expire()
        self.waits_for = None
        attempts_left = self.max_num_seqs + 100  # an attempt that only preempts frees at least a slot
        while self._sequences:
            step = StepBuilder(self)
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
                    plan.admitted[:0] = [seq for seq in self._arrived if seq._state in _AT_WORK]
                    plan.horizon = 1
                    self._arrived = []
                self._in_flight = plan
                return plan
            self._lost += step._preempted
            attempts_left -= 1
            if not step._preempted or not attempts_left:  # else blocks were freed: another attempt
                self.wake_s = step._wake_s
                self.waits_for = step._waits_for()
                if self.loading or (step._waits and now < self.wake_s):
                    return None
                raise RuntimeError(
                    f"{type(self.batching).__name__} scheduled nothing with {len(self.waiting)} waiting "
                    f"and {len(self.running)} running: the engine would stand still"
                )
        return None

    def take_transfers(self) -> list[Transfer]:
        """The transfers that plans have asked for since the last call, in order: to be run by the caller.

        Stores of the last plan come before it is run: their blocks are its blocks.
        """
        transfers, self._transfers = self._transfers, []
        if self.pool.stores:
            transfers[:0] = [Transfer(None, *store) for store in self.pool.stores]
            self.pool.stores = []
        return transfers

    def loaded(self, request_id: int) -> None:
        """A transfer that a sequence waits for is done; the last one lets it go on.

        Nothing happens if it was aborted meanwhile.

        While a plan is in flight, which is made without it, this takes effect with the commit.
        """
        if self._in_flight is not None:
            self._loaded_in_flight.append(request_id)
            return
        seq = self.loading.get(request_id)
        if seq is None:
            return
        seq._num_transfers -= 1
        if seq._num_transfers:
            return
        del self.loading[request_id]
        seq._num_loading = 0
        self.pool.loaded(seq)
        self._free_swapped(seq)
        self._arrived.append(seq)
        if seq._branches is not None and seq._branches.is_swapped:
            self._join_branches(seq, seq._branches)
        elif seq._branches is None and seq._computed == seq._known - 1 and seq._known > seq.num_prompt_tokens:
            self._join(seq)
        else:
            seq._state = SequenceState.prefilling
            self.prefilling[request_id] = seq

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Enter what a plan's run has changed: outcome.iterations times the plan, then the ends."""
        num_iterations = outcome.iterations
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"commit of {num_iterations} iterations: not the plan in flight, or not within its horizon"
            )
        self._advance_to(now)
        self._in_flight = None
        if self._hooks.on_commit:
            self.scheduling.on_commit(plan, num_iterations, now)
        if num_iterations > 1:
            if plan.num_decodes:
                self.pool.take(self.decodes.blocks_due_after(1, num_iterations - 1))
            if plan.chunks:
                self._grow_chunks(plan.chunks, num_iterations - 1)
        self.num_iterations += num_iterations
        self.pool.num_iterations = self.num_iterations
        num_in_set = plan.num_decodes - plan.num_branches
        finished = self.decodes.advance(num_iterations, plan.idle) if num_in_set else []
        for seq in plan.branched:
            self._produce(seq, outcome.parents.get(seq.request_id), finished)
        prefilled: list[Sequence] = []
        for chunk in plan.chunks:
            seq = chunk.seq
            seq._computed += chunk.num_tokens * num_iterations
            self.pool.computed(seq, seq._computed)
            if seq._computed == seq._known:
                prefilled.append(seq)
                if seq.request.branching is None:
                    self._begin_decoding(seq, finished)
                else:
                    self._begin_branching(seq, outcome.parents.get(seq.request_id), finished)
        if outcome.ended:
            self._note_ends(outcome.ended, finished)
        if len(finished) > 1:  # blocks become free in the order of admission, as in vLLM
            finished.sort(key=lambda seq: seq._admission)
        for seq in finished:
            self._finish(seq, seq._end_reason)
        if self._loaded_in_flight:
            loaded, self._loaded_in_flight = self._loaded_in_flight, []
            for request_id in loaded:
                self.loaded(request_id)
        return Progress(prefilled, finished)

    def _grow_chunks(self, chunks: list[Chunk], num_repeats: int) -> None:
        """Prompts side by side grow in turns, as in steps: of equal contents a cache offers the first."""
        num_turns = num_repeats if len(chunks) > 1 else 1
        per_turn = num_repeats // num_turns
        for turn in range(num_turns):
            for chunk in chunks:
                first = chunk.num_cached + (1 + turn * per_turn) * chunk.num_tokens
                self.pool.grow(chunk.seq, first, first + per_turn * chunk.num_tokens)

    @staticmethod
    def _note_ends(ended: tuple[Sequence, ...], finished: list[Sequence]) -> None:
        """Add those that the world says have ended; that goes before a limit reached with the same token."""
        for seq in ended:
            if seq._state is SequenceState.waiting:
                raise ValueError(f"{seq!r} cannot have ended: it was not run")
            if seq._state is not SequenceState.ended:
                seq._end_reason = FinishReason.stop
                if seq not in finished:
                    finished.append(seq)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Physical ids of the blocks of a running sequence's first num_tokens tokens, planned included.

        While it decodes with branches: of the prompt's full blocks only; see `branch_block_ids`.
        """
        return self.pool.block_ids(seq, num_tokens)

    def branch_block_ids(self, seq: Sequence) -> list[list[int]]:
        """Physical ids of the blocks of each branch of a decoding sequence, planned included."""
        branches = seq._branches
        assert branches is not None
        shared = self.pool.block_ids(seq, branches.num_shared_tokens)
        tables, ids = branches.tables, branches.ids
        for number in [number for table in tables for number in table]:
            if number not in ids:
                ids[number] = self.pool.draw(1)[0]
        return [shared + [ids[number] for number in table] for table in tables]

    def copies(self, plan: StepPlan) -> list[tuple[int, int]]:
        """KV blocks that have to be copied before a plan is run: physical ids, from and to."""
        pairs = []
        for seq in plan.branched:
            branches = seq._branches
            assert branches is not None
            self.branch_block_ids(seq)
            pairs += [(branches.ids[source], branches.ids[target]) for source, target in branches.copies]
        return pairs

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
        running = list(self.running.values())
        self.pool.check_integrity((seq, self._num_pooled(seq)) for seq in running)
        assert self.pool.num_apart == sum(seq._num_apart for seq in running)
        for seq in self.branching.values():
            assert seq._branches is not None
            assert seq._num_apart == seq._branches.num_blocks
            seq._branches.check_integrity()
        slots = [seq._slot for seq in running] + self.free_slots
        slots += [slot for seq in running for slot in seq._more_slots]
        assert all(len(seq._more_slots) == seq.width - 1 for seq in running)
        assert sorted(slots, key=lambda slot: -1 if slot is None else slot) == list(range(self.max_num_seqs))
        states: dict[SequenceState, set[int]] = {state: set() for state in SequenceState}
        for seq in running:
            states[seq._state].add(seq.request_id)
        decoding = {seq.request_id for seq in self.decodes} | set(self.branching)
        assert decoding == states[SequenceState.decoding]
        assert set(self.prefilling) == states[SequenceState.prefilling]
        assert set(self.paused) == states[SequenceState.paused]
        assert set(self.loading) == states[SequenceState.loading]
        assert len(self._sequences) == len(running) + len(self.waiting)

    def _start(self, seq: Sequence, num_cached: int, num_loaded: int) -> None:
        """From waiting to running: a slot, and KV for num_cached tokens; num_loaded more are on their way."""
        self.waiting.remove(seq)
        seq._slot = heappop(self.free_slots)
        self.running[seq.request_id] = seq
        self._num_admissions += 1
        seq._admission = self._num_admissions
        self.pool.admit(seq, num_cached)
        if seq.request.branching is not None:
            seq._more_slots = [heappop(self.free_slots) for _ in range(seq.width - 1)]
            if seq._branches is not None and seq._branches.is_swapped:  # the token to come has no block yet
                seq._num_apart += self.pool.blocks_for(seq._known) - self.pool.blocks_for(seq._known - 1)
            self.pool.take_apart(seq._num_apart)
        seq._computed = num_cached
        seq._num_found = num_cached + num_loaded
        seq._dropped = 0
        if not num_loaded:
            seq._state = SequenceState.prefilling
            self.prefilling[seq.request_id] = seq
            return
        seq._state = SequenceState.loading
        seq._computed = num_cached + num_loaded
        seq._num_loading = num_loaded
        self.pool.grow(seq, num_cached, seq._computed)
        self.loading[seq.request_id] = seq
        loads = [(seq._swap_tier, num_loaded)] if seq._swapped else self.pool.loads(seq)
        assert sum(num_tokens for _, num_tokens in loads) == num_loaded
        self._transfers += [Transfer(seq, source, "gpu", num_tokens) for source, num_tokens in loads]
        seq._num_transfers = len(loads)

    def _stop(self, seq: Sequence, num_planned: int, swap: bool) -> None:
        """From running back to waiting, its KV freed, or on its way to host memory."""
        num_branched = self._num_branched(seq)
        self._leave(seq, SequenceState.waiting)
        num_blocks = self.pool.blocks_for(seq._computed)
        seq._num_lost = seq._computed
        if num_branched is None:
            self.pool.release(seq, seq._computed - seq._dropped + num_planned, num_planned)
        else:
            self.pool.release(seq, num_branched)
        if seq._num_apart:
            self._give_apart_back(seq)
        seq._num_preemptions += 1
        self.num_preemptions += 1
        if swap and not seq._dropped and 0 < num_blocks <= self.num_free_swap_blocks:
            self.num_free_swap_blocks -= num_blocks
            seq._swapped = seq._computed
            self._transfers.append(Transfer(None, "gpu", "host", seq._computed))
        if seq._branches is not None:
            self._prepare_return(seq, seq._branches, had_joined=num_branched is not None)
        elif seq.request.branching is not None:
            seq._num_apart = self._num_copied_blocks(seq.request)
        seq._computed = seq._dropped = 0
        seq._rank = self.scheduling.rank(seq)
        self.waiting.push(seq)

    def _rerank(self, seq: Sequence) -> None:
        """Ask for a sequence's rank again. Called by the step builder."""
        waits = seq._state is SequenceState.waiting
        if waits:
            self.waiting.remove(seq)
        seq._rank = self.scheduling.rank(seq)
        if waits:
            self.waiting.push(seq)

    def _victim(self) -> Sequence:
        """The running sequence of largest rank, but for those whose KV is on its way."""
        candidates: Collection[Sequence] = self.running.values()
        if self.loading:
            candidates = [seq for seq in candidates if seq._state is not SequenceState.loading]
        return max(candidates, key=lambda seq: (seq._rank, seq.request_id))

    def _free_swapped(self, seq: Sequence) -> None:
        """Give back the host memory of a sequence that was swapped out."""
        if seq._swapped and seq._swap_tier == "host":
            self.num_free_swap_blocks += self.pool.blocks_for(seq._swapped)
        seq._swapped = 0
        seq._swap_tier = "host"

    def _begin_decoding(self, seq: Sequence, finished: list[Sequence]) -> None:
        """A prefill that is complete has produced a token: the sequence decodes on, or ends with it."""
        seq._known += 1
        if seq._known == seq._end_known:
            finished.append(seq)
            return
        del self.prefilling[seq.request_id]
        self._join(seq)

    def _begin_branching(
        self, seq: Sequence, parents: tuple[int, ...] | None, finished: list[Sequence]
    ) -> None:
        """The same for a sequence with branches: the first time they fork here, later they come back."""
        if seq._branches is None:
            shares = self.pool.shares_branches
            seq._branches = Branches(seq.num_prompt_tokens, self.pool.block_size, seq._ends, shares)
        del self.prefilling[seq.request_id]
        self._join_branches(seq, seq._branches)
        self._produce(seq, parents, finished)

    def _join_branches(self, seq: Sequence, branches: Branches) -> None:
        """A sequence that holds the KV of all its branches' tokens but the newest decodes from now on."""
        num_before = self.pool.num_apart
        ids = self.pool.hand_over(seq, seq._computed, branches.num_shared_tokens)
        seq._num_apart += self.pool.num_apart - num_before
        branches.ids = dict(zip(branches.numbers, ids, strict=False))  # ids: as many as were asked for
        seq._decodes = branches
        seq._growth = PAGED
        self._resume(seq)

    def _produce(self, seq: Sequence, parents: tuple[int, ...] | None, finished: list[Sequence]) -> None:
        """Each branch of a sequence has a new token, and the world has chosen which go on; none: it ends."""
        branches = seq._branches
        assert branches is not None
        if parents is not None and not (parents and all(0 <= p < branches.width for p in parents)):
            raise ValueError(f"parents={parents} of {seq!r}: must name branches below {branches.width}")
        if parents is not None and len(parents) > branches.width:
            raise ValueError(f"parents={parents} of {seq!r}: must be at most {branches.width}")
        freed = branches.produce(parents)
        if not branches.ends:
            finished.append(seq)
            return
        while len(seq._more_slots) >= branches.width:
            heappush(self.free_slots, seq._more_slots.pop())
        if freed:
            ids = [branches.ids.pop(number) for number in freed if number in branches.ids]
            self.pool.give_back(len(freed), ids)
            seq._num_apart -= len(freed)

    def _prepare_return(self, seq: Sequence, branches: Branches, had_joined: bool) -> None:
        """What a sequence with branches will need when it is admitted again: all that it stored.

        Recomputed: with the newest token of each branch; these have their blocks then. Swapped: and one more.
        """
        branches.is_swapped = had_joined and seq._swapped > 0
        if had_joined:
            if not branches.is_swapped:
                branches.append()
            seq._known = branches.num_shared_tokens + branches.clock + branches.is_swapped
        num_blocks = branches.num_shared_tokens // self.pool.block_size + branches.num_blocks
        seq._num_apart = num_blocks - self.pool.blocks_for(seq._known)

    def _give_apart_back(self, seq: Sequence) -> None:
        """A sequence gives up the blocks of its branches, and what was taken for them."""
        branches = seq._branches
        ids = [] if branches is None else list(branches.ids.values())
        if branches is not None:
            branches.ids = {}
        self.pool.give_back(seq._num_apart, ids)
        seq._num_apart = 0

    def _num_branched(self, seq: Sequence) -> int | None:
        """Tokens in the full blocks of its prompt, if all others of a sequence's blocks are its branches'."""
        if seq._branches is None or seq._state not in (SequenceState.decoding, SequenceState.paused):
            return None
        return seq._branches.num_shared_tokens

    def _num_pooled(self, seq: Sequence) -> int:
        """Tokens for which the pool holds blocks in a sequence's own name."""
        num_branched = self._num_branched(seq)
        return seq.num_held if num_branched is None else num_branched

    def _resume(self, seq: Sequence) -> None:
        """A sequence whose KV is complete decodes again."""
        branches = seq._branches
        if branches is None:
            self.decodes.join(seq, seq._growth)
            return
        seq._state = SequenceState.decoding
        seq._origin = branches.num_shared_tokens
        self.branching[seq.request_id] = seq

    def _end_decoding(self, seq: Sequence, state: SequenceState) -> None:
        """A sequence decodes no more; its counts are written back to it."""
        if seq._branches is None:
            self.decodes.leave(seq, state)
            return
        seq._computed = seq.num_computed
        seq._known = seq._computed + 1
        seq._state = state
        del self.branching[seq.request_id]

    def _join(self, seq: Sequence) -> None:
        """A sequence decodes from now on, or waits at its limit for room."""
        growth = self.pool.growth(seq)
        self.decodes.join(seq, AT_LIMIT if growth is None else growth)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a running sequence that is at rest."""
        num_branched = self._num_branched(seq)
        self._leave(seq, SequenceState.ended)
        if num_branched is None:
            self.pool.release(seq, seq._computed - seq._dropped, seq._num_loading)
        else:
            self.pool.release(seq, num_branched)
        if seq._num_apart:
            self._give_apart_back(seq)
        self._free_swapped(seq)
        self._end(seq, reason)

    def _leave(self, seq: Sequence, state: SequenceState) -> None:
        """Take a running sequence out of the sets of the running, and its slot from it."""
        if seq._state is SequenceState.decoding:
            self._end_decoding(seq, state)
        elif seq._state is SequenceState.prefilling:
            del self.prefilling[seq.request_id]
        elif seq._state is SequenceState.paused:
            del self.paused[seq.request_id]
        else:
            del self.loading[seq.request_id]
        seq._state = state
        del self.running[seq.request_id]
        assert seq._slot is not None
        heappush(self.free_slots, seq._slot)
        seq._slot = None
        while seq._more_slots:
            heappush(self.free_slots, seq._more_slots.pop())

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq._state = SequenceState.ended
        seq._finish_reason = reason
        del self._sequences[seq.request_id]
        if self.predictor is not None and reason in (FinishReason.stop, FinishReason.length):
            self.predictor.observe(seq.request, seq.num_output_tokens)
        if self._hooks.on_end:
            self.scheduling.on_end(seq)

    def _advance_to(self, now: float) -> None:
        """Time goes forward: what policies derive from it, an age or a deadline, relies on that."""
        if not now >= self._now:
            raise ValueError(f"now={now}: the clock went backwards, it was {self._now} before")
        self._now = self.pool.now = now

    def _check_at_rest(self, what: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(f"{what} while a plan is in flight: commit it first")


_AT_WORK = (SequenceState.prefilling, SequenceState.decoding, SequenceState.paused)
"""States of sequences that may compute; the others wait, for KV too, or have ended."""


class _Hooks(NamedTuple):
    """Which of its optional methods a scheduling policy has."""

    before_step: bool
    on_commit: bool
    on_end: bool
    chunk_rank: bool


def _overridden(scheduling: Scheduling) -> _Hooks:
    own, base = type(scheduling), Scheduling
    return _Hooks(*(getattr(own, name) is not getattr(base, name) for name in _Hooks._fields))
