"""The parts of an engine, and how requests and sequences enter and leave it between its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from functools import partial
from math import inf

from policies.adapters.residents import Residents
from policies.adapters.serving import AdapterState
from policies.batching import Batching, max_unasked_of
from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet
from policies.core.containment import Report, contain, weakly
from policies.core.limits import Bounds, Limits, StopAfter
from policies.core.livelock import PreemptionWatch, WaitWatch
from policies.core.plan import Cause, StepPlan
from policies.core.policy_names import name_of
from policies.core.request import Request
from policies.core.running_set import RunningSet
from policies.core.sequence import WAITING, FinishReason, Sequence
from policies.core.state import EngineState
from policies.core.step import StepBuilder
from policies.core.step_maker import StepMaker
from policies.core.transfers import Transfers
from policies.core.view import StepView
from policies.core.waiting import WaitingQueue
from policies.prediction import LengthPredictor
from policies.scheduling import Scheduling, overrides
from policies.user_code.decisions import checked_prediction, checked_rank


class EngineBase:
    """The part of an engine outside its loop: its components, adding and removing requests, and its state.

    The arguments are those of `EngineCore`, which adds the loop; `TransferringEngine` adds the transfers.
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
        self._state = state = self._new_state(max_num_seqs, num_swap_blocks, names_blocks)
        self.running = state.running  # parts of the state that every step reads
        self.decodes = state.decodes
        self.view = StepView(state)
        self.may_branch = False  # whether a request with branches was added
        self.wake_s = inf  # after a plan of None: time of the next call that policies ask for
        self.waits_for: Cause | None = None  # after such a plan; see StepPlan.waits_for
        self._sequences = state.sequences
        self.num_iterations = 0  # committed, those of a replaced predecessor included
        self._in_flight: StepPlan | None = None
        self._loaded_in_flight: list[int] = []  # request ids of loads reported while a plan was in flight
        self._adapters_in_flight: list[str] = []  # adapters, by name, likewise
        self._lost: list[Sequence] = []
        self._arrived: list[Sequence] = []
        self._num_reserved = 0  # iterations of the plan in flight, if `reserve` was asked
        self._max_attempts = max_num_seqs + 100  # per plan: a step that only preempts frees a slot
        self.num_discarded = 0
        """Number of tokens computed behind stop tokens and discarded; see `AsyncEngineCore`."""
        self._num_held = 0  # complete sequences that keep their slot and get no token; see `AsyncEngineCore`
        self._now = float("-inf")
        self._waits = WaitWatch()
        self._step = self._new_step(state)
        block_pool.watch(self._num_readable)
        self._preemption_watch = PreemptionWatch(state.sequences)
        self._decode_plan = StepPlan(0, 0, 0, 0, state.decodes, 1, inf)  # reused for steps that only decode
        self._attach()

    def _num_readable(self, seq: Sequence) -> int:
        return self._step.num_readable(seq, self._in_flight)

    def _attach(self) -> None:
        """Registers the policies that implement a hook for steps, commits and ends, and only those."""
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
        """Lets a batching policy decide from the next plan on, such as one with other limits."""
        self.batching = batching
        # Number of decodes up to which a step is planned without calling the batching policy.
        self._max_unasked = 0 if self._before_step else max_unasked_of(batching)

    def _new_state(self, max_num_seqs: int, num_swap_blocks: int, names_blocks: bool) -> EngineState:
        scheduling = self.scheduling
        make = EngineState if self.residents is None else partial(AdapterState, self.residents)
        return make(
            self.block_pool,
            scheduling.queue(),
            self.rank,
            checked_rank(scheduling, "chunk_rank") if overrides(scheduling, "chunk_rank") else None,
            swaps=scheduling.preemption_mode == "swap",
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            num_swap_blocks=num_swap_blocks,
            names_blocks=names_blocks,
            new_running_set=self._new_running_set,
        )

    def _new_running_set(self, pool: BlockPool, max_num_seqs: int) -> RunningSet:
        return RunningSet(pool, max_num_seqs)

    def _new_step(self, state: EngineState) -> StepMaker:
        return StepMaker(state)

    @property
    def max_num_seqs(self) -> int:
        """Slots: the number of sequences that may hold KV at once."""
        return self._state.max_num_seqs

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences without KV, in the order of their rank."""
        return self._state.waiting

    @property
    def running_set(self) -> RunningSet:
        """The sequences that hold a slot, and the state of each."""
        return self._state.running_set

    @property
    def prefilling(self) -> dict[int, Sequence]:
        """Sequences in prefill, by request id."""
        return self._state.prefilling

    @property
    def paused(self) -> dict[int, Sequence]:
        """Sequences that a policy has paused, by request id."""
        return self._state.running_set.paused

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
        return self._state.free_slots

    @property
    def transfers(self) -> Transfers:
        """The KV transfers between tiers."""
        return self._state.transfers

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._state.num_preemptions

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were added and have not ended."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the waiting queue."""
        return len(self._sequences) - len(self.running)

    @property
    def num_tokens_held(self) -> int:
        """Number of tokens with stored KV."""
        decodes = self.decodes
        if len(self.running) == decodes.size:
            return decodes.num_context_tokens
        return self._state.running_set.num_tokens_held

    @property
    def num_free_swap_blocks(self) -> int:
        """Blocks of host memory that are left for preempted KV."""
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
    def unfinished(self) -> Collection[Sequence]:
        """Waiting and running sequences, in the order in which they were added."""
        return self._sequences.values()

    def find(self, request_id: int) -> Sequence | None:
        """Returns the sequence of a request that has not ended here, else None."""
        return self._sequences.get(request_id)

    def add(self, request: Request, stop_after: StopAfter = None) -> Sequence:
        """Adds a request.

        stop_after: output tokens after which the request ends, if the caller knows them (a simulator does, an
        engine does not); for a request with branches one number for all or one per branch. It limits horizons
        and ends the sequence; policies never see it.
        Raises RejectedError if the prompt can never be served, ValueError if the request id is in use.
        """
        return self.enter(self.sequence_of(request, stop_after))

    def sequence_of(self, request: Request, stop_after: StopAfter = None) -> Sequence:
        """Returns a sequence for a request that will be added later, by `enter`.

        Arguments and errors as for `add`.
        """
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
        seq.rank = state.rank(seq)
        self._sequences[request_id] = seq
        state.enqueue(seq)
        return seq

    def take_over(
        self,
        sequences: Mapping[int, Sequence],
        running: SequenceOf[Sequence],
        num_admissions: int,
        num_iterations: int,
    ) -> None:
        """Lets an empty engine continue with the sequences of a lane (`policies.core.lane`).

        running: the sequences that do not wait, in the order of admission. Of the pool, only the number of
        iterations is set.
        """
        self.num_iterations = self.block_pool.num_iterations = num_iterations
        self._state.running_set.take_over(running, num_admissions)
        self._sequences.update(sequences)
        for seq in sequences.values():
            if seq.state is WAITING:
                self._state.enqueue(seq)

    def bounds_of(self, request: Request, stop_after: StopAfter = None) -> Bounds:
        """Returns the number of known tokens at which a request would end here, and the reason.

        Arguments as for `add`. Raises RejectedError if its prompt can never be served, or if its adapter is
        not served.
        """
        return self._state.bounds_of(request, stop_after)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.aborted) -> Sequence | None:
        """Ends a request between commit and plan. Returns its sequence; None if it is not in this engine.

        reason: `stop` if a late check of its tokens finds that the output was complete.
        """
        self._check_at_rest("abort")
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        if seq.state is WAITING:
            self._state.withdraw(seq, reason)
        else:
            self._state.finish(seq, reason)
        return seq

    def contain_errors(self, report: Report) -> None:
        """Has errors that policies raise about one sequence reported from now on, in place of raised.

        The caller aborts the sequence before the next plan. Errors about a whole step are still raised.
        report: a method; its object is not kept alive.
        """
        contain(self._state, weakly(report))

    def check_integrity(self) -> None:
        """Asserts between commit and plan: blocks free + owned = all, every slot has at most one owner."""
        self._check_at_rest("check_integrity")
        self._state.check_integrity()

    def _observe(self, seq: Sequence) -> None:
        """Reports the length of a complete output to the length predictor."""
        if self.predictor is not None and seq.finish_reason in (FinishReason.stop, FinishReason.length):
            self.predictor.observe(seq.request, seq.num_output_tokens)

    def _check_at_rest(self, what: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(f"{what}: a plan is in flight; commit it first")


def _check_settings(max_num_seqs: int, max_model_len: int, num_swap_blocks: int) -> None:
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs={max_num_seqs}: must be >= 1")
    if max_model_len < 2:
        raise ValueError(f"max_model_len={max_model_len}: must be >= 2, a prompt token and an output token")
    if num_swap_blocks < 0:
        raise ValueError(f"num_swap_blocks={num_swap_blocks}: must be >= 0")
