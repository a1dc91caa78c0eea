"""Flies a workload on a real engine: requests come at their times, prompts say what their segments name.

A workload knows prompts by length and by the names of their contents. Here equal names become equal tokens,
so a cache finds on the engine what it finds in the simulator. Answers run to the workload's length: what the
model says does not matter, and no token ends an answer.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from policies.core.request import Prompt, Request
from realengine.engine import Engine
from realengine.serving.answer import Answer
from realengine.serving.sampling_params import SamplingParams
from sim.workload.base import Arrival, Source

RESERVED_TOKENS = 3
"""The first ids of a vocabulary begin and end texts."""


class PromptTokens:
    """Token ids for the contents that prompts name. seed: of the texts."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._nameless = count()
        self._answers: dict[int, list[int]] = {}

    def of(self, prompt: Prompt) -> list[int]:
        """Equal segments, equal tokens; what no segment names is like nothing else."""
        tokens: list[int] = []
        for content_id, num_tokens in prompt.segments:
            tokens += self._text(content_id, num_tokens)
        num_nameless = prompt.num_tokens - len(tokens)
        if num_nameless:
            tokens += self._drawn((1, next(self._nameless)), num_nameless)
        return tokens

    def learn(self, answer_id: int | None, tokens: list[int]) -> None:
        """What the model has said under a name, which later prompts quote."""
        if answer_id is not None:
            self._answers[answer_id] = list(tokens)

    def _text(self, content_id: int, num_tokens: int) -> list[int]:
        said = self._answers.get(content_id, [])[:num_tokens]
        num_missing = num_tokens - len(said)
        if not num_missing:
            return said
        return said + self._drawn((0, content_id), num_tokens)[len(said) :]

    def _drawn(self, stream: tuple[int, int], num_tokens: int) -> list[int]:
        """The first tokens of a stream: a longer text begins like a shorter one."""
        random = np.random.Generator(np.random.Philox(key=self._seed, counter=[*stream, 0, 0]))
        drawn: list[int] = random.integers(RESERVED_TOKENS, self._vocab_size, num_tokens).tolist()
        return drawn


class Drive:
    """One run of a workload. answers: what the engine made of each request, by the workload's request id."""

    def __init__(self, engine: Engine, source: Source, prompts: PromptTokens) -> None:
        self._engine = engine
        self._source = source
        self._prompts = prompts
        self._start_s = 0.0
        self._coming: list[tuple[float, int, Arrival, list[int]]] = []
        self._order = count()
        # Clients write their prompts on machines of their own: no time of the engine's passes.
        self._open_loop = iter(
            [(arrival, prompts.of(arrival.request.prompt)) for arrival in source.arrivals()]
        )
        self._requests: dict[int, tuple[Request, float]] = {}  # by the engine's id: and when it is given up
        self.answers: dict[int, Answer] = {}

    def run(self) -> float:
        """Until all requests have ended; returns when it began, on the engine's clock."""
        engine = self._engine
        self._start_s = engine.clock.now()
        self._expect_next()
        while self._coming or engine.num_unfinished:
            now = engine.clock.now() - self._start_s
            while self._coming and self._coming[0][0] <= now:
                self._arrive(*heapq.heappop(self._coming)[2:])
            self._give_up(now)
            if not engine.num_unfinished:
                if self._coming:
                    engine.clock.sleep(max(0.0, self._coming[0][0] - now))
                continue
            for answer in engine.step():
                if answer.is_finished:
                    self._follow_up(answer)
            if engine.pause_s:
                due_s = self._coming[0][0] - now if self._coming else engine.pause_s
                engine.clock.sleep(max(0.0, min(engine.pause_s, due_s)))
        return self._start_s

    def _expect_next(self) -> None:
        """The next open-loop request."""
        coming = next(self._open_loop, None)
        if coming is not None:
            self._expect(*coming)

    def _expect(self, arrival: Arrival, tokens: list[int]) -> None:
        heapq.heappush(self._coming, (arrival.request.arrival_s, next(self._order), arrival, tokens))

    def _arrive(self, arrival: Arrival, tokens: list[int]) -> None:
        request = arrival.request
        branching = request.branching
        params = SamplingParams(
            temperature=0.0 if branching is None else 1.0,
            n=1 if branching is None else branching.width,
            max_tokens=arrival.num_output_tokens,
            ignore_eos=True,
        )
        due_s = request.deadline_s
        answer = self._engine.add(
            tokens,
            params,
            request.priority,
            request.tenant,
            request.adapter,
            arrival_s=self._start_s + request.arrival_s,
            deadline_s=None if due_s is None else self._start_s + due_s,
        )
        self.answers[request.request_id] = answer
        patience_s = self._source.patience_s
        give_up_s = float("inf") if patience_s is None else request.arrival_s + patience_s
        self._requests[answer.request_id] = request, give_up_s
        if answer.is_finished:  # refused
            self._follow_up(answer)
        self._expect_next()

    def _give_up(self, now: float) -> None:
        """Clients lose patience."""
        if self._source.patience_s is None:
            return
        for request_id, (request, give_up_s) in list(self._requests.items()):
            if give_up_s <= now:
                self._engine.abort(request_id)
                self._follow_up(self.answers[request.request_id])

    def _follow_up(self, answer: Answer) -> None:
        """A request has ended; its user or conversation may send another."""
        request, _ = self._requests.pop(answer.request_id)
        self._prompts.learn(request.answer_id, answer.outputs[0].tokens)
        now = self._engine.clock.now() - self._start_s
        num_tokens = sum(len(output.tokens) for output in answer.outputs)
        arrival = self._source.follow_up(request, now, num_tokens)
        if arrival is not None:
            self._expect(arrival, self._prompts.of(arrival.request.prompt))
