"""Runs a workload on a real engine: sends requests at their times, with token ids for their contents.

A workload knows prompts by their lengths and the names of their contents. Equal names get equal tokens here,
so the engine's cache finds the same hits as the simulator's. Outputs have the workload's length: EOS is
ignored.
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
"""Lowest token ids, which are begin- and end-of-sequence tokens."""


class PromptTokens:
    """Token ids for the contents of prompts. seed: seed of the texts."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._nameless = count()
        self._answers: dict[int, list[int]] = {}

    def of(self, prompt: Prompt) -> list[int]:
        """Returns a prompt's token ids: equal segments get equal tokens, the rest is unique."""
        tokens: list[int] = []
        for content_id, num_tokens in prompt.segments:
            tokens += self._text(content_id, num_tokens)
        num_nameless = prompt.num_tokens - len(tokens)
        if num_nameless:
            tokens += self._drawn((1, next(self._nameless)), num_nameless)
        return tokens

    def learn(self, answer_id: int | None, tokens: list[int]) -> None:
        """Stores the output of a content name, for later prompts that contain it."""
        if answer_id is not None:
            self._answers[answer_id] = list(tokens)

    def _text(self, content_id: int, num_tokens: int) -> list[int]:
        output = self._answers.get(content_id, [])[:num_tokens]
        num_missing = num_tokens - len(output)
        if not num_missing:
            return output
        return output + self._drawn((0, content_id), num_tokens)[len(output) :]

    def _drawn(self, stream: tuple[int, int], num_tokens: int) -> list[int]:
        """Returns the first tokens of a stream; a longer text starts with the shorter one."""
        random = np.random.Generator(np.random.Philox(key=self._seed, counter=[*stream, 0, 0]))
        drawn: list[int] = random.integers(RESERVED_TOKENS, self._vocab_size, num_tokens).tolist()
        return drawn


class Drive:
    """One run of a workload. answers: the engine's answers, by the workload's request id."""

    def __init__(self, engine: Engine, source: Source, prompts: PromptTokens) -> None:
        self._engine = engine
        self._source = source
        self._prompts = prompts
        self._start_s = 0.0
        self._coming: list[tuple[float, int, Arrival, list[int]]] = []
        self._order = count()
        # Prompts are built in advance, because clients do it on their own machines.
        self._open_loop = iter(
            [(arrival, prompts.of(arrival.request.prompt)) for arrival in source.arrivals()]
        )
        self._requests: dict[
            int, tuple[Request, float]
        ] = {}  # by the engine's id, with the end of the client's patience
        self.answers: dict[int, Answer] = {}

    def run(self) -> float:
        """Runs until all requests have ended; returns the start on the engine's clock, in seconds."""
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
        """Schedules the next open-loop request."""
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
        if answer.is_finished:  # rejected
            self._follow_up(answer)
        self._expect_next()

    def _give_up(self, now: float) -> None:
        """Aborts requests whose client has lost patience."""
        if self._source.patience_s is None:
            return
        for request_id, (request, give_up_s) in list(self._requests.items()):
            if give_up_s <= now:
                self._engine.abort(request_id)
                self._follow_up(self.answers[request.request_id])

    def _follow_up(self, answer: Answer) -> None:
        """Handles a request's end; its user or conversation may send another."""
        request, _ = self._requests.pop(answer.request_id)
        self._prompts.learn(request.answer_id, answer.outputs[0].tokens)
        now = self._engine.clock.now() - self._start_s
        num_tokens = sum(len(output.tokens) for output in answer.outputs)
        for arrival in self._source.follow_ups(request, now, num_tokens):
            self._expect(arrival, self._prompts.of(arrival.request.prompt))
