"""The KV events of the real engine."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from experiments.serve.kv_events.block_chain import BlockChain, PromptAndOutput
from experiments.serve.kv_events.cache_events import CacheEvents
from experiments.serve.kv_events.publisher import Publisher
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from realengine.engine import Engine
from realengine.serving.answer import Answer

NUM_KEPT = 64
"""Chains of requests that have ended without a report, after which they are looked for."""


class EngineEvents:
    """An observer of an engine that publishes what its prefix cache holds; called in the engine's thread.

    adapters: names of the LoRA adapters, in the order of their numbers.
    """

    def __init__(self, engine: Engine, publisher: Publisher, adapters: SequenceOf[str]) -> None:
        self._engine = engine
        self._publisher = publisher
        self._numbers = {name: number for number, name in enumerate(adapters, 1)}
        self._chains: dict[int, BlockChain] = {}  # by request id
        self._events = CacheEvents(self._chains)
        self.listens = self._events.listen(engine.core.block_pool)
        """Whether the cache reports its contents."""

    def _flush(self) -> None:
        events = self._events.take()
        if events:
            self._publisher.publish(events)

    def entered(self, seq: Sequence, now_s: float) -> None:
        answer, core = self._engine.answer_of(seq), self._engine.core
        output = answer.outputs[0].tokens
        self._chains[seq.request_id] = BlockChain(
            PromptAndOutput(answer.prompt_tokens, lambda: len(output), lambda start, end: output[start:end]),
            core.block_pool.block_size,
            lora=answer.lora,
            lora_number=None if answer.lora is None else self._numbers[answer.lora],
            lora_path=answer.lora or "",
            cache_salt=answer.cache_salt,
        )

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        self.waited(now_s)

    def waited(self, now_s: float) -> None:
        core = self._engine.core
        core.block_pool.report_delayed(core.running.values())
        self._flush()
        if len(self._chains) > core.num_unfinished + NUM_KEPT:
            held = {*core.running, *(seq.request_id for seq in core.unfinished)}
            for request_id in self._chains.keys() - held:
                del self._chains[request_id]

    def committed(self, outcome: StepOutcome, progress: Progress, now_s: float) -> None:
        self._flush()

    def verified(self, plan: StepPlan, accepted: NDArray[np.int64]) -> None:
        pass

    def left(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        self._flush()

    def read(self, now_s: float) -> None:
        pass

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        pass
