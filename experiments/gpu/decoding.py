"""Requests that one engine decodes together, and their rate."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from experiments.calibrate.engine.timing import synchronize
from experiments.gpu.engine_models import Request, params_of
from realengine.serving.llm import LLM


class Decoding:
    """Requests that one engine decodes together.

    loras: names of the adapters that the requests use in turn; empty: none.
    """

    def __init__(self, llm: LLM, requests: Sequence[Request], loras: Sequence[str] = ()) -> None:
        self._engine = llm.engine
        self._answers = []
        for i, request in enumerate(requests):
            lora = loras[i % len(loras)] if loras else None
            self._answers.append(self._engine.add(request.prompt, params_of(request), lora=lora))
        for answer in self._answers:
            if answer.error is not None:
                raise RuntimeError(f"the engine rejected a request: {answer.error}")

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, over all requests."""
        return sum(len(answer.outputs[0].tokens) for answer in self._answers)

    def until(self, num_tokens: int) -> None:
        """Runs engine steps until each request has num_tokens output tokens."""
        while min(len(answer.outputs[0].tokens) for answer in self._answers) < num_tokens:
            self._engine.step()
            failed = next((answer.error for answer in self._answers if answer.error is not None), None)
            if failed is not None:
                raise RuntimeError(f"a request ended with an error: {failed}")

    def tokens_per_s(self, steps: int, device: torch.device) -> float:
        """Measures output tokens/s while each request gets `steps` tokens, after as many to warm up."""
        self.until(steps)  # prompts computed, graphs warm
        synchronize(device)
        tokens, begin = self.num_tokens, time.perf_counter()
        self.until(2 * steps)
        synchronize(device)
        return (self.num_tokens - tokens) / (time.perf_counter() - begin)

    def abort(self) -> None:
        """Aborts the requests and runs one step, after which the engine is empty."""
        for answer in self._answers:
            self._engine.abort(answer.request_id)
        self._engine.step()
