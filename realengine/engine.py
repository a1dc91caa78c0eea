"""The serving loop with a real model: EngineCore decides, the runner computes, tokens come out.

Nothing here chooses what runs: queues, batches, preemptions and cache hits are decided by EngineCore and its
policies.

overlap: a step is launched before the tokens of the previous one are read, so the device need not wait for
Python; not while an output with a form is in a slot, as its next token depends on those before. The end of a
sequence is then known one step late: an ended sequence takes part in one more step, whose token is discarded.

    plan 1 | launch 1 | commit 1 | plan 2 | launch 2 | read 1 | commit 2 | plan 3 | launch 3 | read 2 ...
    device:   ---- step 1 ------------------- step 2 --------------------- step 3 -----

In a pipeline as many steps are launched as there are stages, and each is read before it is committed. A
sequence is in one of them only, so the tokens before are known (`policies.core.parts`).
"""

from __future__ import annotations

import warnings
from collections import deque

from policies.batching.static import check_traffic_ends
from policies.core.engine import EngineCore
from policies.core.plan import AdapterLoad, Migrant, StepOutcome, StepPlan, Transfer
from policies.core.sequence import FinishReason, Sequence, SequenceState
from realengine.clock import Clock, WallClock
from realengine.observer import Observer
from realengine.policy_errors import fatal, policies_named, policies_of, reason_of
from realengine.runner.executor import DeviceLostError
from realengine.runner.launch import Launch, Row
from realengine.runner.runner import Runner
from realengine.serving.answer import Answer, Output
from realengine.serving.appending import RepeatedRows, append_tokens
from realengine.serving.content_names import ContentNames
from realengine.serving.forms import Forms
from realengine.serving.intake import Intake
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import Tokenizer
from realengine.speculation.drafting import EngineDrafts


class Engine:
    """Takes requests and produces tokens, one step at a time.

    eos_token_ids: end an output, unless its request ignores them. vocab_size: upper bound of token ids.
    overlap: see the module. max_iterations: maximum number of iterations of one plan in one launch, if the
    plan allows; tokens then arrive in groups of as many, and new requests wait as long. drafting: reads and
    makes the draft tokens of a core that speculates; None: it does not.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
        overlap: bool = False,
        max_iterations: int = 1,
        clock: Clock | None = None,
        drafting: EngineDrafts | None = None,
    ) -> None:
        if max_iterations < 1:
            raise ValueError(f"max_iterations={max_iterations}: must be >= 1")
        self.core = core
        self.runner = runner
        self._overlap = overlap
        self._drafting = drafting
        check_traffic_ends(core.batching, "a real engine")
        self._max_iterations = max_iterations
        self.clock = clock or WallClock()
        self.observer: Observer | None = None
        """Called for each event of the engine, if set."""
        self._answer_of: dict[Sequence, Answer] = {}
        self.vocab_size = vocab_size
        self._names = ContentNames(core.block_pool.block_size)
        self.forms = Forms(tokenizer, vocab_size, tuple(eos_token_ids))
        self._intake = Intake(core, self._names, vocab_size, eos_token_ids, tokenizer, self.forms)
        self._next_id = 0
        self.start_s: dict[str, float] = {}  # seconds of each part of the start
        self.pause_s = 0.0
        """Seconds after a step in which there is nothing to do unless a request arrives."""
        self._pending: Launch | None = None  # launched; its tokens are not read yet
        self._in_flight: deque[tuple[StepPlan, Launch]] = deque()  # in a pipeline, neither read nor committed
        self._broken: Exception | None = None
        self._ended: list[Sequence] = []  # ended by tokens that were read; not yet committed to the core
        self._early: list[Sequence] = []  # those of them for which an overlapped engine's next commit is due
        self._parents: dict[int, tuple[int, ...]] = {}  # by request id, as in StepOutcome
        self._faulty: list[Sequence] = []  # at which a policy has failed
        self._last_rows: list[Row] = []  # of the launch that was read last
        self._repeated: RepeatedRows | None = None  # these rows, if they were read before
        core.contain_errors(self._note_fault)

    @property
    def policies(self) -> dict[str, object]:
        """The policies by their settings' names, for messages; None: there is none."""
        found = policies_of(self.core)
        return found if self._drafting is None else {**found, "draft_length": self._drafting.draft_length}

    def answer_of(self, seq: Sequence) -> Answer:
        """Returns the answer of a request that has not ended."""
        return self._answer_of[seq]

    @property
    def failure(self) -> Exception | None:
        """The error after which the engine refuses all work; None: it works."""
        return self._broken

    @property
    def num_waiting(self) -> int:
        """Number of requests that the policies have not admitted."""
        return self.core.num_waiting

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were added and have not ended."""
        return len(self._answer_of)

    @policies_named
    def add(
        self,
        prompt_tokens: list[int],
        params: SamplingParams,
        priority: int = 0,
        tenant: str = "",
        lora: str | None = None,
        arrival_s: float | None = None,
        deadline_s: float | None = None,
        cache_salt: str = "",
        known: Output | None = None,
    ) -> Answer:
        """Adds a request; a request that cannot be served is returned as ended, with the reason as its error.

        lora: name of its adapter. arrival_s: time on the engine's clock; None: now. deadline_s: deadline of
        the output on the same clock, for policies that use it. cache_salt: other salts share no KV. known:
        what another engine has generated of its only output, after which it goes on here. Errors of policies
        about this request are its errors, too. Raises ValueError for params of another type.
        """
        answer = self._intake.answer(self._next_id, prompt_tokens, params, lora, cache_salt)
        self._next_id += 1
        try:
            if self._broken is not None:
                raise ValueError(f"the engine has failed: {self._broken}; create a new engine")
            now = self.clock.now() if arrival_s is None else arrival_s
            request = self._intake.request(answer, priority, tenant, now, deadline_s)
            if known is None:
                seq = self.core.add(request)
            else:
                num_known = request.prompt.num_tokens + answer.resume(known)
                seq = self.core.adopt(Migrant(request, num_known, 0))
        except Exception as error:
            if self.core.find(answer.request_id) is not None:  # a part of it is in the queue
                self.fail(error)
                raise
            answer.error = reason_of(error, self.policies)
            answer.end("error")
            return answer
        self._answer_of[seq] = answer
        if self.observer is not None:
            self.observer.entered(seq, self.clock.now())
        return answer

    @fatal
    @policies_named
    def abort(self, request_id: int) -> None:
        """Aborts a request; nothing happens if it has ended."""
        if self._broken is not None:
            return
        seq = self._take_out(request_id, FinishReason.aborted)
        if seq is not None:
            self._end_all(seq, "aborted")

    @fatal
    @policies_named
    def step(self) -> list[Answer]:
        """Runs one launch; returns the answers with new tokens or ends, none if there is nothing to do.

        Raises PolicyError for a policy that fails at a whole step; the engine then refuses all work.
        """
        self.pause_s = 0.0
        if self._broken is not None:
            return []
        changed = self._end_faulty() if self._faulty else []
        while (found := self._step()) is None:
            pass
        return changed + found

    def _step(self) -> list[Answer] | None:
        """Runs one launch as `step` does; None: another one may follow it into a pipeline."""
        plan = self.core.plan(now := self.clock.now())
        try:
            self._move(self.core.take_transfers())
            self._load(self.core.take_adapter_loads())
        except RuntimeError as error:  # the content of host memory is unknown now
            return self.fail(error)
        if plan is None:
            if self.observer is not None:
                self.observer.waited(now)
            return self._step_without_plan()
        return self._run(plan, now)

    def _run(self, plan: StepPlan, now: float) -> list[Answer] | None:
        """Launches a plan, and reads and commits what is due."""
        for seq in plan.admitted:
            self._enter(seq)
        num_iterations = self._num_iterations(plan)
        if self.observer is not None:
            self.observer.planned(plan, num_iterations, now)
        changed: list[Answer] = []
        if self._pending is not None and self.runner.has_forms:
            try:  # the tokens before must be known
                changed += self._read_pending()
            except RuntimeError as error:
                return self.fail(error)
        try:
            launch = self.runner.launch(plan, num_iterations)
        except DeviceLostError as error:
            return changed + self.fail(error)
        except RuntimeError as error:  # such as out of memory
            return changed + self._fail(plan, error)
        for seq, reason in launch.faults:
            self._note_reason(seq, reason)
        if self.core.batches is not None:
            self.core.batches.depart(plan)
            self._in_flight.append((plan, launch))
            return self._end_oldest() if self.core.batches.is_full or launch.faults else None
        try:
            self._read_due(launch, plan, changed)
        except RuntimeError as error:  # from a kernel, after which the device computes nothing
            return changed + self.fail(error)
        self._commit(plan, num_iterations)
        return changed

    def _read_due(self, launch: Launch, plan: StepPlan, changed: list[Answer]) -> None:
        """Reads the launch before, and this one unless the engine overlaps; adds the answers that changed."""
        changed += self._read_pending()
        if self._overlap and not _has_branches(plan):
            self._pending = launch
            return
        num_late = len(self._ended)
        changed += self._read(launch)
        if self._overlap:
            self._early = [seq for seq in self._ended[num_late:] if seq.request.branching is None]
            self._ended = [seq for seq in self._ended if seq not in self._early]

    def _read_pending(self) -> list[Answer]:
        """Reads the launch before, unless it is read; returns the answers that changed."""
        pending, self._pending = self._pending, None
        return [] if pending is None else self._read(pending)

    def run(self) -> None:
        """Steps until all requests have ended."""
        while self.num_unfinished:
            self.step()
            if self.pause_s:
                self.clock.sleep(min(self.pause_s, 1.0))

    def _end_oldest(self) -> list[Answer]:
        """Reads and commits the step that has been in the pipeline longest."""
        plan, launch = self._in_flight.popleft()
        try:
            launch.arrive()
            tokens = [*zip(launch.rows, launch.tokens(), strict=True)]
        except RuntimeError as error:
            return self.fail(error)
        self.runner.note_tokens([each for each in tokens if each[0][0] in self._answer_of])
        changed = self._read(launch)
        self._commit(plan, launch.num_iterations)
        return changed

    def _step_without_plan(self) -> list[Answer]:
        changed = []
        if self._in_flight:
            return self._end_oldest()
        if self._pending is not None:
            try:
                changed = self._read_pending()
            except RuntimeError as error:
                return self.fail(error)
            self._commit_late_ends()
        elif not self.core.arrived:
            self.pause_s = max(0.0, self.core.wake_s - self.clock.now())
        return changed

    def _move(self, transfers: list[Transfer]) -> None:
        """Copies KV between the tiers in the device's order, complete before the next launch."""
        if not transfers:
            return
        self.runner.move(transfers)
        for transfer in transfers:
            if transfer.seq is not None:
                self.core.loaded(transfer.seq.request_id)

    def _load(self, loads: list[AdapterLoad]) -> None:
        """Loads adapters into their slots with the next launch, after all steps with previous ones."""
        for load in loads:
            assert load.slot is not None
            self.runner.load_adapter(load.name, load.slot)
            self.core.adapter_loaded(load.name)

    def _num_iterations(self, plan: StepPlan) -> int:
        """Returns the number of iterations to run before the next plan."""
        if (
            self._max_iterations == 1
            or self.core.ranks is not None
            or plan.chunks
            or plan.branched
            or not self.runner.may_repeat(plan)
        ):
            return 1
        if self._drafting is None:
            num_iterations = min(plan.horizon, self._max_iterations)
        else:
            num_iterations = self._drafting.max_iterations(plan, self._max_iterations)
        if num_iterations > 1:
            self.core.reserve(plan, num_iterations)
        return num_iterations

    def _enter(self, seq: Sequence) -> None:
        """Fills the slots of a sequence that has just got them, for the first time or again."""
        answer = self._answer_of[seq]
        if not seq.num_preemptions:
            answer.num_cached_tokens = seq.num_found
        for branch in range(len(answer.alive)):
            self._fill_slot(seq, branch, answer)

    def _fill_slot(self, seq: Sequence, branch: int, answer: Answer) -> None:
        """Has the runner fill the slot of a branch."""
        output = answer.alive[branch]
        tokens = answer.prompt_tokens + output.tokens
        params, stops = answer.params, answer.stop_tokens
        form = output.form
        self.runner.fill_slot(seq, branch, output.index, tokens, params, answer.lora, stops, form)

    def _read(self, launch: Launch) -> list[Answer]:
        """Waits for a launch's tokens, appends them, and returns the answers that changed."""
        launch.arrive()
        if launch.rows is not self._last_rows:
            self._last_rows, self._repeated = launch.rows, None
        elif self._repeated is None and launch.has_single_tokens:
            self._repeated = RepeatedRows.of(launch.rows, self._answer_of)
        if self._repeated is None or not launch.has_single_tokens:
            columns = launch.tokens()
            if self._drafting is not None:
                self._drafting.read(launch, columns, self._answer_of)
            logprobs, prompts = launch.logprobs(), launch.prompt_logprobs()
            changed, counts, stopped = append_tokens(launch.rows, columns, logprobs, self._answer_of, prompts)
        else:
            changed, counts, stopped = self._repeated.append(launch.single_tokens())
        for seq, answer in stopped.items():
            if remaining := answer.remaining():
                self._parents[seq.request_id] = remaining
            else:
                self._ended.append(seq)
                self._end_all(seq, "stop")
        for seq in launch.finished:
            self._end_all(seq, "length")
        if self.observer is not None:
            now = self.clock.now()
            self.observer.read(now)
            for answer, num_tokens in zip(changed, counts, strict=True):
                self.observer.emitted(answer, num_tokens, now)
        if self._drafting is not None and self._drafting.reads_late:
            self._read_late(self._drafting, stopped)
        return changed

    def _read_late(self, drafting: EngineDrafts, stopped: dict[Sequence, Answer]) -> None:
        """Tells the core, which has committed the launch, what it accepted and which sequences ended."""
        self._ended = []
        plan, accepted, at_limit = drafting.read_late(stopped)
        for seq in at_limit:
            self._end_all(seq, "length")
        if self.observer is not None:
            self.observer.verified(plan, accepted)

    def _outcome(self, plan: StepPlan, num_iterations: int) -> StepOutcome:
        """Returns what the core must know of a plan that is about to be committed."""
        running = tuple(seq for seq in self._ended if seq.state is not SequenceState.waiting)
        outcome = StepOutcome(num_iterations, running, self._parents)
        if self._drafting is None:
            return outcome
        return self._drafting.outcome(plan, outcome, self._answer_of, self.runner)

    def _commit(self, plan: StepPlan, num_iterations: int) -> None:
        """Commits a plan to the core, with the ends known so far."""
        outcome = self._outcome(plan, num_iterations)
        failed = {} if self._drafting is None else self._drafting.take_failed()
        now = self.clock.now()
        progress = _, finished = self.core.commit(plan, outcome, now)
        if self.observer is not None:
            self.observer.committed(outcome, progress, now)
        self._commit_late_ends()
        self._ended, self._early = self._early, []
        parents, self._parents = self._parents, {}
        if self._pending is not None:
            self._pending.finished = finished
            return
        for seq in finished:
            self._end_all(seq, "length")
        for request_id, remaining in parents.items():
            branched = self.core.find(request_id)
            if branched is not None:  # otherwise the other branches have ended as well, at their limit
                self._prune(branched, remaining)
        for seq, reason in failed.items():  # the device drafts if a launch is pending
            self._end_at_once(seq, reason)

    def _commit_late_ends(self) -> None:
        """Ends sequences in the core that were preempted before their ends became known."""
        for seq in self._ended:
            self._take_out(seq.request_id, FinishReason.stop)
        self._ended.clear()

    def _end_at_once(self, seq: Sequence, reason: str) -> None:
        """Ends a request with an error between two steps, unless it has ended."""
        if (answer := self._answer_of.get(seq)) is not None:
            answer.error = reason
            self._end_all(seq, "error")
            self._take_out(seq.request_id, FinishReason.aborted)

    def _prune(self, seq: Sequence, remaining: tuple[int, ...]) -> None:
        """Moves the remaining branches of a sequence to its first slots after some branches have ended."""
        answer = self._answer_of[seq]
        for branch in answer.keep(remaining):
            self._fill_slot(seq, branch, answer)

    def _note_fault(self, seq: Sequence, error: Exception) -> None:
        """Notes that a policy has failed at a sequence, which ends before the next plan."""
        self._note_reason(seq, reason_of(error, self.policies))

    def _note_reason(self, seq: Sequence, reason: str) -> None:
        """Notes why a sequence ends before the next plan."""
        answer = self._answer_of.get(seq)
        if answer is None:
            warnings.warn(f"request {seq.request_id} has ended already, but {reason}", stacklevel=2)
        elif answer.error is None:
            answer.error = reason
            self._faulty.append(seq)

    def _end_faulty(self) -> list[Answer]:
        """Ends the requests at which policies have failed."""
        faulty, self._faulty = self._faulty, []
        answers = [self._answer_of[seq] for seq in faulty if seq in self._answer_of]
        for seq in faulty:
            self._take_out(seq.request_id, FinishReason.aborted)
            self._end_all(seq, "error")
        return answers

    def _fail(self, plan: StepPlan, error: RuntimeError) -> list[Answer]:
        """Ends the sequences of a failed launch with the error; the others continue."""
        changed = []
        if self._pending is not None:  # the tokens of the previous launch are valid
            try:
                changed = self._read_pending()
            except RuntimeError as broken:
                return self.fail(broken)
        for seq in self.core.cancel(plan):
            if seq in self._answer_of:
                changed.append(self._answer_of[seq])
                changed[-1].error = str(error)
                self._end_all(seq, "error")
        self._commit_late_ends()
        return changed

    def fail(self, error: Exception) -> list[Answer]:
        """Ends all unfinished requests, and rejects later ones, with the error: the engine cannot recover."""
        self._broken = error
        lost = list(self._answer_of.values())
        self._answer_of.clear()
        self._in_flight.clear()
        self._repeated, self._last_rows = None, []
        for answer in lost:
            answer.error = str(error)
            answer.end("error")
        return lost

    def _end_all(self, seq: Sequence, reason: str) -> None:
        """Ends the outputs of a request that have not ended, and names what the cache may have of it."""
        if (answer := self._answer_of.pop(seq, None)) is None:
            return
        self._repeated, self._last_rows = None, []
        if self._drafting is not None:
            self._drafting.ended(seq, answer)
        if len(answer.outputs) == 1:
            # The newest token's KV was never computed, so no request can find it.
            known = answer.prompt_tokens + answer.outputs[0].tokens[:-1]
            self._names.learn(known, answer.segments, answer.answer_id, answer.lora, answer.cache_salt)
        answer.end("error" if answer.error is not None else reason)

    def _take_out(self, request_id: int, reason: FinishReason) -> Sequence | None:
        seq = self.core.abort(request_id, reason)
        if seq is not None and self.observer is not None:
            self.observer.left(seq, reason, self.clock.now())
        return seq


def _has_branches(plan: StepPlan) -> bool:
    """Returns whether parents of branches must be known before the plan is committed."""
    return bool(plan.branched) or any(
        chunk.completes and chunk.seq.request.branching is not None for chunk in plan.chunks
    )
