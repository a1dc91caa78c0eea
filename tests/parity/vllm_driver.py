"""vLLM's own scheduler, without a model: it is handed one invented token for every request that is due one.

Built from vLLM's configuration classes; the only file it needs is the config.json of a tiny Llama, which is
written to a temporary folder. Each token of a prompt is a number made of its content and its place, so equal
content gives equal block hashes; each token of an answer occurs in no other request.
"""

from __future__ import annotations

import json
import logging
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from policies.caching.block_tables import KvGroup
from policies.core.release import release_of
from tests.parity.lockstep import Arrival, Settings, Step, Workload

logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of odd sizes for every scheduler

RELEASE = release_of(vllm.__version__)
"""The rules of the vLLM that is installed."""

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def as_installed(workload: Workload) -> Workload:
    """Returns a workload whose rules on our side are those of the vLLM that is installed."""
    return replace(workload, settings=replace(workload.settings, release=RELEASE))


REASONS = {RequestStatus.FINISHED_STOPPED: "stop", RequestStatus.FINISHED_LENGTH_CAPPED: "length"}


class Launch(NamedTuple):
    """A step of the scheduler, and by request whether it gives a token."""

    plan: SchedulerOutput
    samples: dict[str, bool]


class VllmEngine:
    """vLLM's `Scheduler` or `AsyncScheduler`; with the KV groups of the settings."""

    def __init__(self, settings: Settings) -> None:
        model = copy(model_config())
        model.max_model_len = settings.max_model_len
        caching = CacheConfig(
            block_size=settings.block_size, enable_prefix_caching=settings.is_prefix_caching
        )
        caching.num_gpu_blocks = settings.num_blocks + 1  # one is the null block
        # vLLM takes the share of all blocks, the null block among them; ours, of those that can be used.
        num_kept = int(settings.watermark * settings.num_blocks)
        scheduling = SchedulerConfig(
            max_model_len=settings.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_chunked_prefill=settings.enable_chunked_prefill,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=settings.long_prefill_token_threshold_adaptive,
            policy="priority" if settings.is_priority else "fcfs",
            watermark=(num_kept + 0.5) / caching.num_gpu_blocks if num_kept else 0.0,
            async_scheduling=settings.async_scheduling,
            max_num_scheduled_tokens=settings.max_num_scheduled_tokens,
            max_num_active_seqs=settings.max_num_active_seqs,
            scheduler_reserve_full_isl=settings.scheduler_reserve_full_isl,
            prefill_schedule_interval=settings.prefill_schedule_interval,
        )
        config = VllmConfig(
            model_config=model,
            scheduler_config=scheduling,
            cache_config=caching,
            speculative_config=self._speculative_config(settings),
        )
        # vLLM turns it off on a CPU; on a GPU two steps are in flight, and windows keep the blocks of both.
        config.scheduler_config.async_scheduling = settings.async_scheduling
        self.scheduler = (AsyncScheduler if settings.async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=settings.num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=_groups(settings),
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=settings.block_size,
        )
        self._interval = settings.prefill_schedule_interval
        self._num_steps = 0  # that computed something
        self._is_async = settings.async_scheduling
        self._max_model_len = settings.max_model_len
        lookahead = {}
        if RELEASE.hashes_ahead:
            lookahead = {"num_hash_lookahead_tokens": self.scheduler.num_hash_lookahead_tokens}
        self._hasher = (
            get_request_block_hasher(settings.block_size, sha256, **lookahead)
            if settings.is_prefix_caching
            else None
        )
        self._arrivals: dict[int, Arrival] = {}
        self._in_flight: Launch | None = None  # a step with tokens that an asynchronous engine has not read

    def _speculative_config(self, settings: Settings) -> SpeculativeConfig | None:
        """Returns how tokens are drafted."""
        return None

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.get_num_unfinished_requests()

    def add(self, arrival: Arrival, arrival_s: float) -> None:
        self._arrivals[arrival.request_id] = arrival
        is_length = arrival.end == "length"
        stop = [] if is_length else [_answer_token(arrival, arrival.num_output_tokens - 1)]
        self.scheduler.add_request(
            Request(
                request_id=_name(arrival.request_id),
                prompt_token_ids=_prompt_token_ids(arrival),
                sampling_params=SamplingParams(
                    max_tokens=arrival.num_output_tokens if is_length else self._max_model_len,
                    stop_token_ids=stop,
                    ignore_eos=True,
                ),
                pooling_params=None,
                arrival_time=arrival_s,
                priority=arrival.priority,
                block_hasher=self._hasher,
            )
        )

    def abort(self, request_id: int) -> None:
        self.scheduler.finish_requests(_name(request_id), RequestStatus.FINISHED_ABORTED)

    def step(self) -> Step:
        """Runs one step that computes something; includes preceding steps that only preempted.

        An asynchronous engine plans a step before it reads the tokens of the step before.
        """
        preempted: set[str] = set()
        finished: dict[int, str] = {}
        while True:
            # vLLM's engine core does so for each of its data parallel ranks, by the number of the step.
            is_throttled = not RELEASE.paces_alone and self._num_steps % self._interval != 0
            plan = self.scheduler.schedule(throttle_prefills=is_throttled)
            preempted |= plan.preempted_req_ids
            num_free_planned = self._num_free
            launch = Launch(plan, {name: self._samples(name) for name in plan.num_scheduled_tokens})
            if self._is_async:
                before, self._in_flight = self._in_flight, launch
            else:
                before = launch
            num_unfinished = self.num_unfinished
            if before is not None:
                finished |= self._read(before)
            if plan.num_scheduled_tokens:
                break
            is_freed = plan.preempted_req_ids or self.num_unfinished < num_unfinished
            assert is_freed or (before is not None and before.samples), "vLLM stands still"
        self._num_steps += 1
        resumed = plan.scheduled_cached_reqs
        admitted = {int(new.req_id): new.num_computed_tokens for new in plan.scheduled_new_reqs}
        for name, num_cached in zip(resumed.req_ids, resumed.num_computed_tokens, strict=True):
            if name in resumed.resumed_req_ids:
                admitted[int(name)] = num_cached
        return Step(
            {int(name): num_tokens for name, num_tokens in plan.num_scheduled_tokens.items()},
            admitted,
            sorted({int(name) for name in preempted} - (finished.keys() if self._is_async else set())),
            num_free_planned,
            self._num_free,
            finished,
            self._drafts(plan),
        )

    def settle(self) -> dict[int, str]:
        plan = self.scheduler.schedule()
        assert not plan.num_scheduled_tokens
        before, self._in_flight = self._in_flight, None
        return {} if before is None else self._read(before)

    @property
    def _num_free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _samples(self, name: str) -> bool:
        """Returns whether the step that was just planned gives a request a token."""
        return not self.scheduler.requests[name].is_prefill_chunk

    def _read(self, launch: Launch) -> dict[int, str]:
        """Gives the scheduler the tokens of a step; returns the requests that end with it, and why."""
        names = list(launch.samples)
        requests = [self.scheduler.requests.get(name) for name in names]
        sampled = [
            [] if request is None or not launch.samples[name] else self._tokens(request, launch.plan)
            for name, request in zip(names, requests, strict=True)
        ]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        self.scheduler.update_from_output(launch.plan, output)
        ended = [request for request in requests if request is not None and request.is_finished()]
        return {int(request.request_id): REASONS[request.status] for request in ended}

    def _drafts(self, plan: SchedulerOutput) -> dict[int, int] | None:
        """Returns the draft tokens of a step."""
        return None

    def _tokens(self, request: Request, plan: SchedulerOutput) -> list[int]:
        """Returns the tokens that a step gives a request."""
        return [self._token(request, 0)]

    def _token(self, request: Request, num_before: int) -> int:
        """Returns a token of a request: the next one, or one so many tokens later."""
        arrival = self._arrivals[int(request.request_id)]
        return _answer_token(arrival, request.num_output_tokens + num_before)


def _groups(settings: Settings) -> list[KVCacheGroupSpec]:
    """Returns the KV groups: those of the settings, else one with full attention."""
    page = {"block_size": settings.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs: list[KVCacheGroupSpec] = []
    for group in settings.groups or (KvGroup(),):
        if group.window is None:
            spec = FullAttentionSpec(**page)
        elif group.is_chunked:
            spec = ChunkedLocalAttentionSpec(**page, attention_chunk_size=group.window)
        else:
            spec = SlidingWindowSpec(**page, sliding_window=group.window)
        specs.append(KVCacheGroupSpec([f"layer.{len(specs)}"], spec))
    return specs


def _name(request_id: int) -> str:
    return f"{request_id:06d}"  # vLLM compares names as text


def _prompt_token_ids(arrival: Arrival) -> list[int]:
    contents = [segment.content_id for segment in arrival.prompt.segments for _ in range(segment.num_tokens)]
    contents += [_private(arrival)] * (arrival.prompt.num_tokens - len(contents))
    return [_token_id(content, place) for place, content in enumerate(contents)]


def _private(arrival: Arrival) -> int:
    """Returns the content id that only this request has."""
    return -arrival.request_id - 1


def _answer_token(arrival: Arrival, index: int) -> int:
    """Returns a token of the answer to a request, whether it goes on to it or not."""
    content = _private(arrival) if arrival.answer_id is None else arrival.answer_id
    return _token_id(content, arrival.prompt.num_tokens + index)


def _token_id(content: int, place: int) -> int:
    """Returns a token id that differs for every (content, place)."""
    return (1 << 40) + (content << 20) + place


@cache
def model_config() -> ModelConfig:
    init_none_hash(sha256)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_LLAMA))
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", seed=0)
