"""The flags of trtllm-serve, and the keys of its YAML file, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.app.launch_lines.flags import table, typed
from experiments.app.launch_lines.lora import TRAFFIC, judge_modules, set_lora
from experiments.app.launch_lines.translation import (
    KV_DTYPES,
    Context,
    Translation,
    file_of,
    set_draft_model,
    set_formats,
    set_limits,
    text_of,
)
from policies.batching.inflight import CONTEXT_CHUNKING_POLICIES, STATIC_BATCH
from sim.settings.errors import ConfigError, nearest, suggest

TRTLLM_KEYS: Mapping[str, str] = {
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "moe_expert_parallel_size": "--moe-expert-parallel-size",
    "max_batch_size": "--max-batch-size",
    "max_num_tokens": "--max-num-tokens",
    "max_seq_len": "--max-seq-len",
    "max_beam_width": "--max-beam-width",
    "enable_attention_dp": "--enable-attention-dp",
    "enable_chunked_prefill": "--enable-chunked-prefill",
    "backend": "--backend",
    "model": "--model",
    "kv_cache_dtype": "--kv-cache-dtype",
}
"""Keys of the YAML file that mean the same as a flag."""
CHOICE = "the price is that of the engine's own choice, from which this one differs by a few percent at most"
TRTLLM_NONE: Mapping[str, str] = {
    **dict.fromkeys(
        [
            "trust_remote_code",
            "tokenizer",
            "revision",
            "print_iter_log",
            "log_level",
            "return_perf_metrics",
            "enable_iter_perf_stats",
            "enable_iter_req_stats",
            "iter_stats_max_iterations",
            "perf_metrics_max_requests",
            "otlp_traces_endpoint",
            "gpus_per_node",
            "load_format",
            "checkpoint_format",
            "orchestrator_type",
            "garbage_collection_gen0_threshold",
            "reasoning_parser",
            "guided_decoding_backend",
            "postprocess_tokenizer_dir",
            "skip_tokenizer_init",
            "tokenizer_mode",
            "fail_fast_on_attention_window_too_large",
            "custom_tokenizer",
            "telemetry_config",
            "video_pruning_rate",
            "mm_encoder_only",
            "max_input_len",
        ],
        "",
    ),
    "stream_interval": "tokens are timed when they are made, not when they are sent",
    "num_postprocess_workers": "the frontend is never the bottleneck here",
    "nvfp4_gemm_config": CHOICE,
    "sampler_type": CHOICE,
    "enable_trtllm_sampler": CHOICE,
    "use_torch_sampler": CHOICE,
    "enable_lm_head_tp_in_adp": CHOICE,
    "enable_layerwise_nvtx_marker": "",
}
"""Keys without effect on time -> the reason (empty: it goes without saying)."""
POOLS = (
    "prefill and decode in servers of their own: give a file with the commands of both, or set "
    "pools=disaggregated"
)
OF_POOLS = ("cache_transceiver_config", "disagg_cluster")
"""Keys that need no settings where the server is one of a pool of prefill or decode servers."""
TRTLLM_REFUSED: Mapping[str, tuple[str, str]] = {
    "cache_transceiver_config": (POOLS, ""),
    "disagg_cluster": (POOLS, ""),
    "sparse_attention_config": ("it is not modelled", ""),
    "cp_config": ("it is not modelled", ""),
    "moe_cluster_parallel_size": ("clusters of experts are not modelled", "1"),
    "moe_tensor_parallel_size": ("set expert_parallel_size beside --from", "1"),
    "quant_config": ("give model.weights beside --from", ""),
    "kv_connector_config": ("KV in host memory is set by caching=tiered", ""),
    "attn_backend": (
        "prices are those of the engine's fast kernels; this one is slower",
        "trtllm flashinfer",
    ),
    "allreduce_strategy": ("collectives are priced as the engine's own choice on the device", "auto"),
    "enable_autotuner": ("kernels are priced as tuned", "true"),
    "autotuner_enabled": ("kernels are priced as tuned", "true"),
    "torch_compile_config": ("layers that torch compiles are not modelled", "none"),
    "moe_backend": (
        "this one is slower than those that are priced",
        "auto trtllm cutlass deepgemm cutedsl triton",
    ),
    "disable_flashinfer_sampling": ("sampling is priced as FlashInfer's", "false"),
    "enable_min_latency": ("it is not modelled", "false"),
    "env_overrides": ("give them as variables before the command", ""),
    "batched_logits_processor": ("the time of one's own logits processors is not modelled", ""),
    "use_low_precision_moe_combine": (
        "messages from the experts have the format of the activations",
        "false",
    ),
}
"""Key that is refused -> the reason, and patterns of values that ask for nothing but what is priced."""
MOE_KEYS = {
    "backend": TRTLLM_REFUSED["moe_backend"],
    "use_low_precision_moe_combine": TRTLLM_REFUSED["use_low_precision_moe_combine"],
    "load_balancer": (
        "experts are placed as engine.kernels.routing.placement says; set it beside --from",
        "none",
    ),
}
KV_KEYS = {
    "event_buffer_max_size": "*",
    "attention_dp_events_gather_period_ms": "*",
    "enable_partial_reuse": "*",
    "copy_on_partial_reuse": "*",
    "secondary_offload_min_priority": "*",
    "use_kv_cache_manager_v2": "*",
}
"""Key of kv_cache_config -> patterns of values that ask for nothing but what is priced."""
MAPPINGS = (
    "kv_cache_config",
    "cuda_graph_config",
    "scheduler_config",
    "attention_dp_config",
    "lora_config",
    "peft_cache_config",
)
HANDLED = (
    *MAPPINGS,
    "speculative_config",
    "enable_lora",
    "disable_overlap_scheduler",
    "batch_wait_timeout_iters",
    "batch_wait_max_tokens_ratio",
    "batch_wait_timeout_ms",
)
"""Keys that `meaning` reads."""
OLD_GRAPHS = ("cuda_graph_batch_sizes", "cuda_graph_max_batch_size", "cuda_graph_padding_enabled")
POLICIES = {
    "GUARANTEED_NO_EVICT": "inflight",
    "MAX_UTILIZATION": "inflight_max_utilization",
    STATIC_BATCH.upper(): "inflight",
}
DECODING = {
    "MTP": "mtp",
    "Eagle": "eagle3",
    "Eagle3": "eagle3",
    "NGram": "ngram",
    "Draft_Target": "draft_model",
}
LIMITS = {"--max-batch-size": "engine.max_num_seqs", "--max-num-tokens": "engine.max_num_batched_tokens"}
"""Limits that each rank of data-parallel attention has."""


def meaning(at: Context, own: Translation) -> None:
    """Adds what the flags mean. Raises ConfigError for what is not modelled."""
    options = _file(at, own)
    values = at.found.values
    if values.get("--backend", "pytorch") not in ("pytorch", "_autodeploy"):
        raise at.wrong("--backend", "only the PyTorch backend is modelled")
    if values.get("--max-beam-width", 1) != 1:
        raise at.wrong("--max-beam-width", "beams are set by the traffic; use 1")
    if values.get("--context-parallel-size", 1) != 1:
        raise at.wrong("--context-parallel-size", "is not modelled with TensorRT-LLM's rules")
    set_formats(at, own)
    _layout(at, own)
    _policies(at, own, options)
    _kv(at, own, dict(options.get("kv_cache_config") or {}))
    _graphs(own, options.get("cuda_graph_config", {}))
    if options.get("disable_overlap_scheduler"):
        own.put("engine.host.overlapped", False)
    _lora(at, own, options)
    _drafts(at, own, options.get("speculative_config"))


def _file(at: Context, own: Translation) -> dict[str, Any]:
    """Reads the YAML file into flags; returns its other keys, which have no flag."""
    name = at.get("--config")
    content = file_of(at, "--config", str(name)) if name is not None else {}
    nested = content.pop("pytorch_backend_config", None)
    content |= nested if isinstance(nested, Mapping) else {}
    rest: dict[str, Any] = {}
    for key, value in content.items():
        where = f"{name}: {key}"
        if key in at.ignored:
            own.ignored.append(key)
        elif key == "moe_config":
            for inner, each in (value or {}).items():
                reason, harmless = MOE_KEYS.get(inner, (CHOICE, "*"))
                own.judge(f"moe_config.{inner}", each, harmless, reason)
        elif key == "dtype":
            own.judge(key, value, "auto bfloat16", "give model.dtype beside --from")
        elif key in HANDLED:
            if key in MAPPINGS and value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"--from: {where}: must be a mapping")
            rest[key] = value
        elif key == "use_cuda_graph":
            rest.setdefault("cuda_graph_config", {} if value else None)
        elif key in OLD_GRAPHS:
            graphs = rest.get("cuda_graph_config") or {}
            rest["cuda_graph_config"] = {**graphs, key.removeprefix("cuda_graph_"): value}
        else:
            _key(at, own, str(key), value, where)
    return rest


def _key(at: Context, own: Translation, key: str, value: Any, where: str) -> None:
    """Reads a key of the file that means the same as a flag, or has no effect that is simulated."""
    if key in TRTLLM_KEYS:
        flag = TRTLLM_KEYS[key]
        row = table("tensorrt_llm")[flag]
        at.found.values[flag] = typed(row, where, value)  # the file wins over the command
        at.found.written[flag] = where
        if row.detail:
            own.put(row.detail, at.found.values[flag])
    elif key in OF_POOLS and at.command.role is not None:
        own.without_effect[key] = "is about prefill and decode, which are pools"
    elif key in TRTLLM_NONE:
        own.without_effect[key] = TRTLLM_NONE[key]
    elif key not in TRTLLM_REFUSED:
        names = (*TRTLLM_KEYS, *TRTLLM_NONE, *TRTLLM_REFUSED, *HANDLED)
        best = nearest(key, names)
        advice = f"nearest: {best}; or leave it out" if best else "leave it out"
        raise ConfigError(f"--from: {where}: trtllm-serve has no such key; {advice}")
    elif value:
        reason, harmless = TRTLLM_REFUSED[key]
        own.judge(key, value, harmless, reason)


def _layout(at: Context, own: Translation) -> None:
    values = at.found.values
    tp = values.get("--tensor-parallel-size", 1)
    ranks = tp if values.get("--enable-attention-dp") else 1
    own.put("tensor_parallel_size", tp // ranks)
    for key, value in (
        ("attention_data_parallel_size", ranks),
        ("pipeline_parallel_size", values.get("--pipeline-parallel-size", 1)),
        ("expert_parallel_size", values.get("--moe-expert-parallel-size") or 1),
    ):
        if value > 1 and (key != "expert_parallel_size" or at.has_experts(own.settings)):
            own.put(key, value)
    set_limits(at, own, LIMITS, ranks)


def _graphs(own: Translation, graphs: Any) -> None:
    """Sets the CUDA graphs; the server captures batches of up to 128 unless its file says otherwise."""
    if graphs is None:
        own.put("engine.cuda_graphs.enabled", False)
        return
    sizes = graphs.get("batch_sizes") or [graphs.get("max_batch_size") or 128]
    try:
        own.put("engine.cuda_graphs.max_capture_size", max(map(int, sizes)))
    except (TypeError, ValueError):
        raise ConfigError("--from: cuda_graph_config: sizes must be whole numbers") from None


def _policies(at: Context, own: Translation, options: Mapping[str, Any]) -> None:
    """Sets the capacity scheduler; without one, the server reserves KV for the longest possible output."""
    scheduler = dict(options.get("scheduler_config") or {})
    policy = str(scheduler.pop("capacity_scheduler_policy", "GUARANTEED_NO_EVICT")).upper()
    if policy not in POLICIES:
        raise ConfigError(
            f"--from: scheduler_config.capacity_scheduler_policy: {policy} is not modelled; use "
            f"{' or '.join(POLICIES)}"
        )
    own.put("batching", POLICIES[policy])
    if policy == STATIC_BATCH.upper():
        own.put("batching.capacity_scheduler_policy", STATIC_BATCH)
    own.put("batching.enable_chunked_context", bool(at.found.values.get("--enable-chunked-prefill", False)))
    chunking = scheduler.pop("context_chunking_policy", None)
    if chunking is not None:
        if str(chunking).lower() not in CONTEXT_CHUNKING_POLICIES:
            raise ConfigError(
                f"--from: scheduler_config.context_chunking_policy: {chunking} is not modelled; use "
                f"{' or '.join(map(str.upper, CONTEXT_CHUNKING_POLICIES))}"
            )
        own.put("batching.context_chunking_policy", str(chunking).lower())
    for key in ("batch_wait_timeout_iters", "batch_wait_max_tokens_ratio"):
        if options.get(key):
            own.put(f"batching.{key}", options[key])
    if options.get("batch_wait_timeout_ms"):
        raise ConfigError("--from: batch_wait_timeout_ms: give batch_wait_timeout_iters in its place")
    for key in scheduler:
        own.refused[f"scheduler_config {key}"] = "the scheduler has its usual settings"
    if options.get("attention_dp_config"):
        own.without_effect["attention_dp_config"] = "requests go to the rank with the fewest"


def _kv(at: Context, own: Translation, config: dict[str, Any]) -> None:
    values = at.found.values
    share = config.pop("free_gpu_memory_fraction", None) or values.get("--free-gpu-memory-fraction")
    if share is not None:
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise ConfigError(f"--from: free_gpu_memory_fraction {share}: must be between 0 and 1")
        own.put("engine.gpu_memory_utilization", f"{share:.4g}")
    dtype = config.pop("dtype", None)
    if dtype not in (None, "auto"):
        if str(dtype) not in KV_DTYPES:
            raise ConfigError(
                f"--from: kv_cache_config.dtype {dtype}: is not modelled; {suggest(str(dtype), KV_DTYPES)}"
            )
        own.put("model.kv_cache_dtype", KV_DTYPES[str(dtype)])
    reuses = config.pop("enable_block_reuse", True) and not values.get("--disable-kv-cache-reuse")
    size = config.pop("tokens_per_block", 32)
    host = config.pop("host_cache_size", None)
    own.put("caching", "tiered" if host else "prefix" if reuses else "paged")
    own.put("caching.block_size", size)
    if host:
        own.put("caching.host_gib", float(host) / 2**30)
    if (most := config.pop("max_tokens", None)) is not None:
        ranks = values.get("--tensor-parallel-size", 1) if values.get("--enable-attention-dp") else 1
        own.put("engine.num_kv_blocks", int(most) // size * ranks)
    for key, value in config.items():
        own.judge(
            f"kv_cache_config {key}", value, KV_KEYS.get(key, "none"), "the cache has its usual settings"
        )


LORA_KEYS = ("lora_dir", "lora_ckpt_source", "trtllm_modules_to_hf_modules", "swap_gate_up_proj")
"""Keys of lora_config that say which adapters there are, and how to read them."""


def _lora(at: Context, own: Translation, options: Mapping[str, Any]) -> None:
    """Sets the adapter slots of lora_config, of rank 64 unless it says otherwise."""
    config = dict(options.get("lora_config") or {})
    if config or options.get("enable_lora"):
        rank, slots = config.pop("max_lora_rank", 64), config.pop("max_loras", None)
        in_host = config.pop("max_cpu_loras", None)
        for name, value in (("max_lora_rank", rank), ("max_loras", slots), ("max_cpu_loras", in_host)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"--from: lora_config.{name} {value}: must be a whole number >= 1")
        if slots is None:
            own.refused["lora_config"] = "adapters get a share of the memory; give max_loras in it"
        else:
            set_lora(at, own, "lora_config", slots=slots, rank=rank, in_host=in_host)
        if modules := config.pop("lora_target_modules", None):
            judge_modules(own, "lora_config", modules)
        for key in config:
            if key not in LORA_KEYS:
                raise ConfigError(f"--from: lora_config: {key}: trtllm-serve has no such key; leave it out")
        own.without_effect["lora_config.lora_dir"] = TRAFFIC
    if options.get("peft_cache_config"):
        own.refused["peft_cache_config"] = "the memory of adapters is that of lora_config.max_loras slots"


def _drafts(at: Context, own: Translation, config: Any) -> None:
    if not config:
        return
    kind = str(config.get("decoding_type", "")) if isinstance(config, Mapping) else ""
    known = {
        "MTP": "mtp",
        "Eagle": "eagle3",
        "Eagle3": "eagle3",
        "NGram": "ngram",
        "Draft_Target": "draft_model",
    }
    method = next((name for key, name in known.items() if key.lower() == kind.lower()), None)
    if method is None:
        raise ConfigError(
            f"--from: speculative_config.decoding_type {kind}: is not modelled; {suggest(kind, DECODING)}"
        )
    own.put("speculation", method)
    draft = config.get("speculative_model_dir") or config.get("speculative_model")
    if method == "draft_model":
        set_draft_model(at, own, draft, "--config")
    elif draft and method == "eagle3":
        own.put("speculation.model", text_of(draft))
    if length := config.get("max_draft_len") or config.get("num_nextn_predict_layers"):
        own.put("speculation.num_speculative_tokens", length)
