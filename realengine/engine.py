"""The serving loop against a real model: EngineCore decides, the runner computes, tokens come out.

Nothing here chooses what runs: queues, batches, preemptions and cache hits are decided by EngineCore and its
policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from policies.engine import EngineCore
from policies.limits import RejectedError
from policies.plan import StepOutcome
from policies.request import Prompt, Request, Segment
from policies.sequence import FinishReason, Sequence
from realengine.names import ContentNames
from realengine.runner import Runner
from realengine.sampling_params import SamplingParams


@dataclass(slots=True)
class Answer:
    """One request and what has come of it so far. finish_reason: None until its end; "error": see `error`."""

    request_id: int
    prompt_tokens: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    segments: tuple[Segment, ...] = ()
    answer_id: int = 0


class Engine:
    """Requests in, tokens out, a step at a time.

    eos_token_ids: end an answer, unless its request ignores them. vocab_size: token ids are below.
    clock: seconds, never going backwards.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if core.swaps:
            raise ValueError(
                "scheduling.preemption_mode=swap: the engine does not move KV to host memory yet; "
                "choose recompute"
            )
        self.core = core
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._answers: dict[int, Answer] = {}
        self._names = ContentNames(core.pool.block_size)
        self._next_id = 0

    @property
    def num_unfinished(self) -> int:
        """Requests taken in that have not ended."""
        return self.core.num_unfinished

    def add(
        self, prompt_tokens: list[int], params: SamplingParams, priority: int = 0, tenant: str = ""
    ) -> Answer:
        """Take a request in. One that cannot be served comes back ended, with the reason as its error."""
        answer = Answer(self._next_id, list(prompt_tokens), params)
        self._next_id += 1
        try:
            self._check_tokens(answer.prompt_tokens)
            answer.segments = self._names.name(answer.prompt_tokens)
            answer.answer_id = self._names.new_id()
            prompt = Prompt(len(answer.prompt_tokens), answer.segments)
            request = Request(
                request_id=answer.request_id,
                arrival_s=self._clock(),
                prompt=prompt,
                max_tokens=params.max_tokens,
                priority=priority,
                tenant=tenant,
                answer_id=answer.answer_id,
            )
            self.core.add(request)
        except (RejectedError, ValueError) as error:
            answer.finish_reason, answer.error = "error", str(error)
            return answer
        self._answers[answer.request_id] = answer
        return answer

    def abort(self, request_id: int) -> None:
        """Give a request up; nothing happens if it has ended."""
        if self.core.abort(request_id) is not None:
            self._end(request_id, "aborted")

    def step(self) -> list[Answer]:
        """One iteration; the answers that got a token or ended. Nothing where there is nothing to do."""
        plan = self.core.plan(self._clock())
        if plan is None:
            self._wait()
            return []
        for seq in plan.admitted:
            answer = self._answers[seq.request_id]
            self._runner.enter(seq, answer.prompt_tokens + answer.tokens, answer.params)
        drawn = self._runner.run(plan)
        changed, ended = [], []
        for seq, token in drawn:
            answer = self._answers[seq.request_id]
            answer.tokens.append(token)
            changed.append(answer)
            if self._stops(answer, token):
                ended.append(seq)
        progress = self.core.commit(plan, StepOutcome(1, tuple(ended)), self._clock())
        for seq in progress.finished:
            self._finish(seq)
        return changed

    def run(self) -> None:
        """Step until all requests have ended."""
        while self.num_unfinished:
            self.step()

    def _wait(self) -> None:
        """The policies want to wait: until the time they named."""
        pause_s = self.core.wake_s - self._clock()
        if self.num_unfinished and pause_s > 0:
            time.sleep(min(pause_s, 0.01))

    def _check_tokens(self, tokens: list[int]) -> None:
        for place, token in enumerate(tokens):
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"token {token} at place {place} of the prompt: must be >= 0 and < {self._vocab_size}"
                )

    def _stops(self, answer: Answer, token: int) -> bool:
        params = answer.params
        if token in params.stop_token_ids:
            return True
        return token in self._eos_token_ids and not params.ignore_eos

    def _finish(self, seq: Sequence) -> None:
        answer = self._answers[seq.request_id]
        # The newest token's KV was never computed, so nobody can find it.
        self._names.learn(answer.prompt_tokens + answer.tokens[:-1], answer.segments, answer.answer_id)
        reason = "stop" if seq.finish_reason is FinishReason.stop else "length"
        self._end(seq.request_id, reason)

    def _end(self, request_id: int, reason: str) -> None:
        self._answers.pop(request_id).finish_reason = reason
        self._runner.forget(request_id)
