"""The options of vLLM's scheduler and KV cache, and what stands for each of them here.

`make parity VLLM=latest` compares these names with those of the newest release: it fails with new and dropped
ones.
"""

from __future__ import annotations

COMPARED = "compared step by step"
NO_SCHEDULING = "decides nothing about text requests on one KV group"

SCHEDULER: dict[str, str] = {
    "runner_type": NO_SCHEDULING,
    "max_num_batched_tokens": COMPARED,
    "max_num_scheduled_tokens": COMPARED,
    "max_num_seqs": COMPARED,
    "max_num_active_seqs": COMPARED,
    "long_prefill_token_threshold": COMPARED,
    "long_prefill_token_threshold_adaptive": COMPARED,
    "max_num_queued_reqs": "admission=queue_bound, at the gateway",
    "max_num_queued_tokens": "no counterpart: requests are refused by their number",
    "enable_chunked_prefill": COMPARED,
    "is_multimodal_model": NO_SCHEDULING,
    "max_num_encoder_input_tokens": NO_SCHEDULING,
    "encoder_cache_size": NO_SCHEDULING,
    "policy": COMPARED,
    "disable_chunked_mm_input": NO_SCHEDULING,
    "scheduler_cls": "every policy here is a class of the user's choice",
    "disable_hybrid_kv_cache_manager": NO_SCHEDULING,
    "scheduler_reserve_full_isl": COMPARED,
    "watermark": COMPARED,
    "prefill_schedule_interval": COMPARED,
    "async_scheduling": COMPARED,
    "stream_interval": "no counterpart: every token is sent at once",
}
"""Fields of vllm.config.SchedulerConfig in vLLM 0.32."""
