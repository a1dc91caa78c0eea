"""SGLang's scheduler (0.5.23), step by step and without a device.

`Scheduler.get_next_batch_to_run` and all that it calls (PrefillAdder, SchedulePolicy, ScheduleBatch, the
token pools, RadixCache) are SGLang's own, and so is the processing of results. Replaced are the model, whose
tokens the driver makes up, and what only reports: metrics, traces, streams.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

END_OF_SEQUENCE = 2
FIRST_OUTPUT_TOKEN = 1_000_000
"""Token ids of answers, which differ from those of all prompts and of other requests."""

MODULES = {
    "scheduler": "managers.scheduler",
    "batch": "managers.schedule_batch",
    "policy": "managers.schedule_policy",
    "ratio": "managers.scheduler_components.new_token_ratio_tracker",
    "results": "managers.scheduler_components.batch_result_processor",
    "radix": "mem_cache.radix_cache",
    "params": "mem_cache.cache_init_params",
    "pools": "mem_cache.memory_pool",
    "allocators": "mem_cache.allocator",
    "sampling": "sampling.sampling_params",
    "context": "runtime_context",
    "args": "server_args",
    "spec": "speculative.spec_info",
    "disagg": "disaggregation.utils",
    "utils": "managers.utils",
}

OFF = (
    "_pending_chunked_abort_req",
    "decode_offload_manager",
    "dllm_config",
    "dynamic_chunk_sizer",
    "enable_hicache_storage",
    "enable_hierarchical_cache",
    "enable_hisparse",
    "enable_lmcache",
    "enable_lora",
    "enable_priority_preemption",
    "enable_priority_scheduling",
    "enable_unified_cache_external_linker",
    "hisparse_coordinator",
    "is_hybrid_swa",
    "lora_drainer",
    "max_queued_requests",
    "min_free_slots_delayer",
    "prefill_delayer",
    "require_mlp_sync",
    "schedule_low_priority_values_first",
    "truncation_align_size",
    "abort_on_priority_when_disabled",
    "chunked_req",
    "last_batch",
    "scheduler_stage_metrics",
)
"""Attributes of `Scheduler` for features that are not used here."""

ZERO = (
    "_prefill_decode_interval_remaining",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
    "priority_scheduling_preemption_threshold",
    "processed_tokens_counter",
    "forward_ct",
    "max_prefill_bs",
)
FAKE = ("load_inquirer", "metrics_reporter")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of both engines, in SGLang's words. num_kv_tokens: size of the KV pool, in whole pages."""

    num_kv_tokens: int
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False


class Mute:
    """Stands for a part of SGLang that only reports: every attribute and every call gives the same again."""

    def __getattr__(self, name: str) -> Mute:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Mute:
        return self

    def __add__(self, other: Any) -> Mute:
        return self

    def __mod__(self, other: Any) -> int:
        return 1


def modules() -> SimpleNamespace:
    """Imports SGLang's modules, or skips the test where SGLang is not installed."""
    if find_spec("sglang") is None or find_spec("torch") is None:
        pytest.skip("sglang is not installed here; `make parity` makes an environment that has it")
    return SimpleNamespace(**{name: import_module(f"sglang.srt.{path}") for name, path in MODULES.items()})


class SGLang:
    """A `Scheduler` and its memory, without model, processes and network."""

    def __init__(self, mods: Any, settings: Settings) -> None:
        torch = import_module("torch")
        self._mods, self._torch, self._settings = mods, torch, settings
        mods.context.reset_context()
        args = mods.args.ServerArgs(
            model_path="dummy",
            device="cpu",
            schedule_policy=settings.schedule_policy,
            pp_max_micro_batch_size=settings.max_running_requests,
            schedule_conservativeness=settings.schedule_conservativeness,
        )
        mods.context.publish(args, role="tokenizer")
        kv_cache, size = SimpleNamespace(device="cpu"), settings.num_kv_tokens
        if settings.page_size == 1:
            pool = mods.allocators.TokenToKVPoolAllocator(size, torch.float16, "cpu", kv_cache, False)
        else:
            pool = mods.allocators.PagedTokenToKVPoolAllocator(
                size, settings.page_size, torch.float16, "cpu", kv_cache, False
            )
        slots = mods.pools.ReqToTokenPool(settings.max_running_requests, 4096, "cpu", False)
        self.tree = mods.radix.RadixCache(
            mods.params.CacheInitParams(settings.disable_radix_cache, slots, pool, settings.page_size)
        )
        self.scheduler = scheduler = mods.scheduler.Scheduler.__new__(mods.scheduler.Scheduler)
        for names, make in ((OFF, lambda: None), (ZERO, int), (FAKE, Mute)):
            for name in names:
                setattr(scheduler, name, make())
        scheduler.device = "cpu"
        scheduler.enable_overlap = (
            scheduler.enable_skip_finishing_decode
        ) = not settings.disable_overlap_schedule
        scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator = slots, pool
        scheduler.tree_cache = self.tree
        for name in ("page_size", "chunked_prefill_size", "max_prefill_tokens", "max_running_requests"):
            setattr(scheduler, name, getattr(settings, name))
        scheduler.is_mixed_chunk = settings.enable_mixed_chunk and settings.chunked_prefill_size is not None
        scheduler.waiting_queue, scheduler.result_queue = [], deque()
        scheduler.running_batch = mods.batch.ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.policy = mods.policy.SchedulePolicy(
            settings.schedule_policy, self.tree, False, False, False
        )
        scheduler.new_token_ratio_tracker = mods.ratio.NewTokenRatioTracker.from_config()
        scheduler.model_config = SimpleNamespace(
            is_encoder_decoder=False, vocab_size=2**40, self_opened_think_start_ids=None, think_end_ids=None
        )
        scheduler.spec_algorithm = mods.spec.SpeculativeAlgorithm.NONE
        scheduler.disaggregation_mode = mods.disagg.DisaggregationMode.NULL
        scheduler.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
        scheduler.beam_coordinator = SimpleNamespace(
            pending_member_rows=lambda _: 0, commit_decode=lambda _: set()
        )
        scheduler.dp_attn_adapter = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        scheduler.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
        runner = SimpleNamespace(prefill_aware_swa=False, attn_backend=None)
        scheduler.tp_worker = SimpleNamespace(model_runner=runner)
        names = mods.results.SchedulerBatchResultProcessor.__dataclass_fields__
        parts = {name: getattr(scheduler, name, None) for name in names}
        parts |= {"is_generation": True, "enable_overlap_mlx": False}
        parts |= {name: Mute() for name in ("metrics_collector", "output_streamer")}
        self._results = mods.results.SchedulerBatchResultProcessor(**parts)
        self._stops: dict[str, int] = {}
        self._requests: dict[int, Any] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return sum(not request.finished() for request in self._requests.values())

    @property
    def num_free_tokens(self) -> int:
        """Token slots that are free or hold only cached contents."""
        return self.scheduler.token_to_kv_pool_allocator.available_size() + self.tree.evictable_size()

    def add(
        self, request_id: int, prompt: Sequence[int], max_new_tokens: int, stop_after: int | None
    ) -> None:
        """Adds a request; stop_after: it ends by a stop token after so many output tokens."""
        sampling = self._mods.sampling.SamplingParams(
            max_new_tokens=max_new_tokens, temperature=0.0, stop_token_ids=[END_OF_SEQUENCE]
        )
        sampling.normalize(None)
        request = self._mods.batch.Req(
            str(request_id), "", array("q", prompt), sampling, vocab_size=2**40, eos_token_ids=set()
        )
        request.tokenizer = None
        request.time_stats = Mute()
        if stop_after is not None:
            self._stops[request.rid] = stop_after
        self._requests[request_id] = request
        self.scheduler._add_request_to_queue(request)

    def step(self) -> dict[str, Any] | None:
        """Runs one batch and returns what was decided; None if there was nothing to run.

        finished: requests that are known to have ended, with overlap those of the batch before.
        """
        self.finished: list[int] = []
        retracted: list[int] = []
        while (batch := self._next_batch(retracted)) is None:
            if not self._settle():
                self.scheduler.new_token_ratio_tracker.reset()
                return None
        if batch.forward_mode.is_extend():
            tokens = {int(r.rid): n for r, n in zip(batch.reqs, batch.extend_lens, strict=True)}
            found = {
                int(r.rid): n
                for r, n in zip(batch.reqs, batch.prefix_lens, strict=True)
                if r not in (batch.decoding_reqs or ())
            }
        else:
            tokens, found = {int(r.rid): 1 for r in batch.reqs}, {}
        num_free = self.num_free_tokens
        last, self.scheduler.last_batch = self.scheduler.last_batch, batch
        if not self._settings.disable_overlap_schedule:
            batch.input_ids = None
            self.scheduler.result_queue.append((batch.copy(), None))
            if last is not None:
                self._process(self.scheduler.result_queue.popleft()[0])
        else:
            self._process(batch)
        return {
            "tokens": tokens,
            "prefixes": found,
            "retracted": sorted(retracted),
            "num_free_planned": num_free,
            "finished": sorted(self.finished),
        }

    def _next_batch(self, retracted: list[int]) -> Any:
        """Lets the scheduler decide; adds the requests that it retracts."""
        scheduler = self.scheduler
        add_again = type(scheduler)._add_request_to_queue

        def note(request: Any, is_retracted: bool = False) -> None:
            if is_retracted:
                retracted.append(int(request.rid))
            add_again(scheduler, request, is_retracted)

        scheduler._add_request_to_queue = note
        plan = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
        del scheduler._add_request_to_queue
        scheduler.running_batch = plan.running_batch
        return plan.batch_to_run

    def _settle(self) -> bool:
        """Processes the result that is due when no batch runs; returns whether there was a last batch."""
        scheduler = self.scheduler
        last, scheduler.last_batch = scheduler.last_batch, None
        if scheduler.result_queue:
            self._process(scheduler.result_queue.popleft()[0])
        return last is not None and not self._settings.disable_overlap_schedule

    def _process(self, batch: Any) -> None:
        """Samples the tokens of a batch and lets SGLang process them."""
        tokens = []
        running = [request for request in batch.reqs if not request.finished()]
        for request in batch.reqs:
            place = len(request.output_ids)
            stops = self._stops.get(request.rid) == place + 1
            token = FIRST_OUTPUT_TOKEN + int(request.rid) * 4096 + place
            tokens.append(END_OF_SEQUENCE if stops else token)
        result = SimpleNamespace(
            extend_input_len_per_req=None,
            extend_logprob_start_len_per_req=None,
            can_run_cuda_graph=False,
            num_correct_drafts_per_req_cpu=None,
            get_num_generated_tokens=int,
            copy_done=None,
            auxiliary_host_output=None,
            routed_experts_output=None,
            indexer_topk_output=None,
            logits_output=None,
            next_token_ids=self._torch.tensor(tokens),
        )
        if batch.forward_mode.is_decode():
            self._results.process_batch_result_decode(batch, result)
        else:
            self._results.process_batch_result_prefill(batch, result)
        self.finished += [int(request.rid) for request in running if request.finished()]
