"""Counts what the real engine does, for /metrics: events come in the engine's thread, scrapes in another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.serve.metrics.engine import (
    EndedRequest,
    EngineMetrics,
    EngineState,
    adapters_of,
    cache_config_of,
)
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from realengine.engine import Engine
from realengine.serving.answer import Answer
from realengine.settings import EngineSettings


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended; times in seconds on the engine's clock."""

    seq: Sequence
    scheduled_s: float | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    answer: Answer | None = None
    """None: it has no token yet."""


class EngineMetricsFeed:
    """An observer of an engine that fills `metrics`."""

    def __init__(self, engine: Engine, settings: EngineSettings, model_name: str) -> None:
        self._core = engine.core
        self._live: dict[int, LiveRequest] = {}
        self._state = EngineState()
        self._num_computed = self._num_new = 0  # tokens of the launch that is being read
        most = settings.max_loras or len(settings.lora_adapters)
        self._max_adapters = most if settings.lora_adapters else None
        self.metrics = EngineMetrics(
            0,
            lambda: self._state,
            model_name=model_name,
            max_model_len=engine.core.max_model_len,
            cache_config=cache_config_of(
                engine.core.block_pool, settings.kv_cache_dtype, settings.gpu_memory_utilization
            ),
            proposer=None if settings.speculation is None else settings.speculation.proposer,
        )

    def entered(self, seq: Sequence, now_s: float) -> None:
        self._live[seq.request_id] = LiveRequest(seq)
        self._look()

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        for seq in plan.admitted:
            live = self._live.get(seq.request_id)
            if live is not None and live.scheduled_s is None:
                live.scheduled_s = now_s
                self.metrics.looked_up(seq.num_prompt_tokens, seq.num_found)
        self._look()

    def waited(self, now_s: float) -> None:
        self._look()

    def committed(self, outcome: StepOutcome, progress: Progress, now_s: float) -> None:
        _, finished = progress
        for seq in finished:
            live = self._live.get(seq.request_id)
            if live is not None and live.num_tokens >= seq.num_known - seq.num_prompt_tokens:
                self._end(live, "length", now_s)
        for live in [each for each in self._live.values() if each.answer and each.answer.is_finished]:
            self._end(live, _reason(live.answer), now_s)
        self._flush()
        self._look()

    def verified(self, plan: StepPlan, accepted: NDArray[np.int64]) -> None:
        pass

    def left(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        live = self._live.get(seq.request_id)
        if live is not None:
            self._end(live, "abort" if reason is FinishReason.aborted else "stop", now_s)
        self._look()

    def read(self, now_s: float) -> None:
        self._flush()

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        live = self._live.get(answer.request_id)
        if live is None:
            return
        if live.answer is None:
            live.answer, live.first_token_s = answer, now_s
            num_prompt = live.seq.num_prompt_tokens
            self._num_computed += num_prompt - answer.num_cached_tokens
            self.metrics.prefilled(num_prompt, answer.num_cached_tokens)
            self.metrics.first_token(now_s - live.seq.request.arrival_s)
        else:
            self.metrics.token_gaps(now_s - live.last_token_s, 1)
        live.last_token_s = now_s
        live.num_tokens += num_tokens
        self._num_new += num_tokens
        if answer.is_finished:
            self._end(live, _reason(answer), now_s)

    def _flush(self) -> None:
        """Counts the launch whose tokens were read last."""
        self.metrics.iterated(self._num_computed, self._num_new)
        self._num_computed = self._num_new = 0

    def _end(self, live: LiveRequest, reason: str, now_s: float) -> None:
        request, answer = live.seq.request, live.answer
        del self._live[request.request_id]
        if answer is not None and answer.drafts is not None and self.metrics.drafts is not None:
            drafts = answer.drafts
            self.metrics.drafts.add(drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_per_pos)
        scheduled_s = now_s if live.scheduled_s is None else live.scheduled_s
        self.metrics.ended(
            EndedRequest(
                finished_reason=reason,
                prompt_tokens=live.seq.num_prompt_tokens,
                generation_tokens=live.num_tokens,
                max_tokens=request.max_tokens or self._core.max_model_len - live.seq.num_prompt_tokens,
                num_preemptions=live.seq.num_preemptions,
                arrival_s=request.arrival_s,
                queued_s=request.arrival_s,
                scheduled_s=scheduled_s,
                first_token_s=live.first_token_s,
                last_token_s=live.last_token_s,
                finished_s=now_s,
            )
        )

    def _look(self) -> None:
        """Notes the present state, which a scrape in another thread reads."""
        core, pool = self._core, self._core.block_pool
        live = () if self._max_adapters is None else self._live.values()
        self._state = EngineState(
            num_running=len(core.running),
            num_waiting=core.num_waiting,
            kv_cache_usage=pool.num_used / pool.num_blocks,
            max_adapters=self._max_adapters,
            waiting_adapters=adapters_of(each.seq for each in live if each.scheduled_s is None),
            running_adapters=adapters_of(each.seq for each in live if each.scheduled_s is not None),
            num_preemptions=core.num_preemptions,
        )


def _reason(answer: Answer | None) -> str:
    """Returns the reason of an end with the name of the metric."""
    reason = None if answer is None else answer.outputs[0].finish_reason
    return "abort" if reason in (None, "aborted") else str(reason)
