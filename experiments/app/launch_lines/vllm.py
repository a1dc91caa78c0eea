"""The flags of vLLM's server as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.app.launch_lines.lora import judge_modules, set_lora
from experiments.app.launch_lines.translation import (
    EXPERTS,
    Context,
    Translation,
    allow_longer,
    as_mapping,
    set_copies,
    set_draft_model,
    set_eplb,
    set_formats,
    set_limits,
    set_model_overrides,
    set_state_dtype,
    set_text_only,
    text_of,
)
from hwmodels.checks import is_whole
from sim.settings.errors import suggest

LIMITS = {
    "--max-num-seqs": "engine.max_num_seqs",
    "--max-num-batched-tokens": "engine.max_num_batched_tokens",
    "--num-gpu-blocks-override": "engine.num_kv_blocks",
}
"""Limits that each rank of data-parallel attention has."""
COMPILED = "kernels are priced as compiled at the engine's own level"
COMPILED_ANYWAY = (
    "backend",
    "cache_dir",
    "compile_cache_save_format",
    "compile_mm_encoder",
    "compile_ranges_split_points",
    "compile_sizes",
    "cudagraph_copy_inputs",
    "cudagraph_num_of_warmups",
    "custom_ops",
    "debug_dump_path",
    "dynamic_shapes_config",
    "full_cuda_graph",
    "inductor_compile_config",
    "inductor_passes",
    "local_cache_dir",
    "pass_config",
    "splitting_ops",
    "use_inductor_graph_partition",
)
"""Fields of --compilation-config that choose how kernels are compiled and fused."""
SAME_DRAFTS = (
    "attention_backend",
    "moe_backend",
    "draft_load_config",
    "revision",
    "code_revision",
    "rejection_sample_method",
    "draft_sample_method",
    "disable_padded_drafter_batch",
    "enforce_eager",
    "max_model_len",
)
"""Fields of --speculative-config that change the time of a draft by little, or by the group acceptance."""
ATTENTION = "auto flash* cutlass_mla* triton_mla* rocm_* tokenspeed_mla*"
"""Backends, as patterns, whose prices are those that are simulated."""
LMCACHE = ("LMCacheConnectorV1", "LMCacheConnector")
LMCACHE_GB = 5.0
"""LMCache's default memory on the host, per device."""
GIB = 1 << 30
APART = (
    "prefill and decode in servers of their own: give a file with the commands of both, or set "
    "pools=disaggregated; of the connectors that keep KV elsewhere, OffloadingConnector with "
    "cpu_bytes_to_use and LMCache with the host's memory alone are modelled"
)
METHODS = ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3", "mtp")
SHORT = {
    "method": "--spec-method",
    "model": "--spec-model",
    "num_speculative_tokens": "--spec-tokens",
}
"""Field of --speculative-config -> the flag that sets it alone."""
BEFORE_CONFIG = {
    "model": "--speculative-model",
    "num_speculative_tokens": "--num-speculative-tokens",
    "prompt_lookup_max": "--ngram-prompt-lookup-max",
    "prompt_lookup_min": "--ngram-prompt-lookup-min",
    "draft_tensor_parallel_size": "--speculative-draft-tensor-parallel-size",
}
"""Field of --speculative-config -> the flag that set it before vLLM 0.8."""
FIELDS = {
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "prompt_lookup_max": "speculation.prompt_lookup_max",
    "prompt_lookup_min": "speculation.prompt_lookup_min",
    "draft_tensor_parallel_size": "speculation.draft.tensor_parallel_size",
    "disable_eagle_block_drop": "speculation.disable_eagle_block_drop",
    "suffix_decoding_max_tree_depth": "speculation.suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests": "speculation.suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor": "speculation.suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob": "speculation.suffix_decoding_min_token_prob",
}
"""Field of --speculative-config -> the setting that means the same."""


def meaning(at: Context, own: Translation) -> None:
    """Adds what the flags mean. Raises ConfigError for what is not modelled."""
    _check_generates(at)
    if (overridden := at.get("--hf-overrides")) is not None:
        set_model_overrides(at, own, "--hf-overrides", overridden)
    if at.get("--language-model-only"):
        set_text_only(at, own)
    set_formats(at, own)
    set_state_dtype(at, own, "--mamba-ssm-cache-dtype", at.get("--mamba-ssm-cache-dtype"))
    _layout(at, own)
    _cache(at, own)
    _order(at, own)
    _kernels(at, own)
    _graphs(at, own)
    _lora(at, own)
    _drafts(at, own)


def _check_generates(at: Context) -> None:
    for flag, allowed in (
        ("--task", (None, "generate", "auto")),
        ("--runner", (None, "generate", "auto")),
        ("--convert", (None, "none", "auto")),
    ):
        if at.get(flag) not in allowed:
            raise at.wrong(flag, "only generation is modelled")
    if at.get("--performance-mode") not in (None, "balanced", "interactivity"):
        advice = "doubles the limits; give --max-num-seqs and --max-num-batched-tokens in its place"
        raise at.wrong("--performance-mode", advice)


def _layout(at: Context, own: Translation) -> None:
    """Sets the parallel sizes, and the limits, which each rank of data-parallel attention has."""
    tp, dp = at.get("--tensor-parallel-size", 1), at.get("--data-parallel-size", 1)
    cp, spreads = at.get("--decode-context-parallel-size", 1), at.get("--enable-expert-parallel", False)
    if tp % cp:
        raise at.wrong("--decode-context-parallel-size", f"must divide --tensor-parallel-size {tp}")
    own.put("tensor_parallel_size", tp // cp)
    has_experts = (dp > 1 or spreads) and at.has_experts(own.settings)
    sizes = {
        "pipeline_parallel_size": at.get("--pipeline-parallel-size", 1),
        "context_parallel_size": cp,
        "attention_data_parallel_size": dp if has_experts else 1,
        "expert_parallel_size": tp * dp if has_experts and spreads else 1,
    }
    for key, value in sizes.items():
        if value > 1:
            own.put(key, value)
    if dp > 1 and not has_experts:  # ranks of a dense model share no work
        set_copies(own, dp)
    set_limits(at, own, LIMITS, sizes["attention_data_parallel_size"])
    if at.get("--max-model-len") is not None:
        length = at.get("--max-model-len")
        own.put("engine.max_model_len", None if length in ("auto", -1) else length)
        if at.command.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
            allow_longer(at, own, length)


def _cache(at: Context, own: Translation) -> None:
    finds = at.get("--enable-prefix-caching")
    if finds is not None:
        own.put("caching", "prefix" if finds else "paged")
    if offloaded := at.get("--kv-offloading-size"):
        devices = at.get("--tensor-parallel-size", 1) * at.get("--pipeline-parallel-size", 1)
        own.put("caching", "tiered")
        own.put("caching.host_gib", offloaded / devices)
    _host_tier(at, own)
    share = "--gpu-memory-utilization"
    if at.get("--kv-cache-memory-bytes") is not None and at.get(share) is not None:
        own.settings.pop("engine.gpu_memory_utilization", None)
        own.without_effect[f"{share} {at.get(share)}"] = "--kv-cache-memory-bytes says the memory for KV"
    if at.get("--block-size") is not None:
        own.put("caching.block_size", at.get("--block-size"))


def _host_tier(at: Context, own: Translation) -> None:
    """Sets the host's memory of a connector that keeps KV there; refuses what other connectors do."""
    config = as_mapping(at.get("--kv-transfer-config"))
    if not config:
        return
    connector, extra = (
        str(config.get("kv_connector", "")),
        as_mapping(config.get("kv_connector_extra_config")),
    )
    environment = at.command.environment
    sizes: list[Any] = []
    if connector == "OffloadingConnector":
        devices = at.get("--tensor-parallel-size", 1) * at.get("--pipeline-parallel-size", 1)
        total = extra.get("cpu_bytes_to_use")
        sizes = [total / devices / GIB] if isinstance(total, int | float) else []
    elif connector in LMCACHE and config.get("kv_role", "kv_both") == "kv_both" and not _is_shared(at, extra):
        sizes = [
            extra.get("lmcache.max_local_cpu_size", environment.get("LMCACHE_MAX_LOCAL_CPU_SIZE", LMCACHE_GB))
        ]
    try:
        host_gib = float(sizes[0])
    except (IndexError, TypeError, ValueError):
        own.refused[f"--kv-transfer-config {connector}"] = APART
        return
    own.put("caching", "tiered")
    own.put("caching.host_gib", f"{host_gib:g}")
    if connector in LMCACHE:
        own.put("caching.write", "through")
    if at.get("--enable-prefix-caching") is False:
        flag = at.found.written.get("--enable-prefix-caching", "--no-enable-prefix-caching")
        own.without_effect[flag] = "KV that is still in GPU memory is found there and not loaded again"


def _is_shared(at: Context, extra: Mapping[str, Any]) -> bool:
    """Returns whether LMCache keeps KV outside of the host's memory, or not there."""
    environment = at.command.environment
    local = str(extra.get("lmcache.local_cpu", environment.get("LMCACHE_LOCAL_CPU", True))).lower()
    far = ("LMCACHE_REMOTE_URL", "LMCACHE_CONFIG_FILE", "LMCACHE_LOCAL_DISK", "LMCACHE_MAX_LOCAL_DISK_SIZE")
    return local == "false" or any(environment.get(name) for name in far)


def _order(at: Context, own: Translation) -> None:
    policy = at.get("--scheduling-policy", "fcfs")
    if policy not in ("fcfs", "priority"):
        raise at.wrong("--scheduling-policy", "must be fcfs or priority")
    if policy == "priority":
        own.put("scheduling", "priority")
    if (interval := at.get("--prefill-schedule-interval", 1)) > 1:
        own.put("batching", "paced_prefills")
        own.put("batching.prefill_schedule_interval", interval)
    if at.get("--async-scheduling") is not None:
        own.put("engine.host.overlapped", at.get("--async-scheduling"))


def _kernels(at: Context, own: Translation) -> None:
    kernels = at.get("--kernel-config")
    kernels = dict(kernels) if isinstance(kernels, Mapping) else {}
    backend = kernels.pop("moe_backend", None) or at.get("--moe-backend", "auto")
    if backend == "marlin" or at.command.environment.get("VLLM_MXFP4_USE_MARLIN") == "1":
        own.put("engine.kernels.moe_backend", "marlin")
    elif backend != "auto":
        own.judge(
            "--moe-backend", backend, EXPERTS, "prices are those of the engine's fast kernels of experts"
        )
    attention = at.get("--attention-config")
    if isinstance(attention, Mapping) and attention.get("backend"):
        own.judge("--attention-config backend", attention["backend"], ATTENTION, "this backend is slower")
    if at.get("--enable-eplb"):
        set_eplb(own, at.get("--eplb-config") or {})


def _graphs(at: Context, own: Translation) -> None:
    """Sets which batches run as CUDA graphs."""
    config = at.get("--compilation-config")
    config = {"mode": config} if isinstance(config, int) else config
    config = dict(config) if isinstance(config, Mapping) else {}
    level, mode = _optimization_level(at), _graph_mode(at, config)
    is_eager = (level == 0 and mode is None) or at.get("--enforce-eager")
    if is_eager or mode == "NONE":
        own.put("engine.cuda_graphs.enabled", False)
        if not is_eager:  # the model is compiled even so
            own.put("engine.compilation", "inductor")
    elif mode == "PIECEWISE" or (level == 1 and mode is None):
        own.put("engine.cuda_graphs.mode", "piecewise")
    sizes = config.pop("cudagraph_capture_sizes", None)
    sizes = sizes or at.get("--cudagraph-capture-sizes") or at.get("--cuda-graph-sizes")
    largest = config.pop("max_cudagraph_capture_size", None)
    if sizes:
        try:
            largest = max(int(size) for size in sizes)
        except (TypeError, ValueError):
            raise at.wrong("--cudagraph-capture-sizes", "must be whole numbers") from None
    if largest is not None:
        own.put("engine.cuda_graphs.max_capture_size", largest)
    levels = [config.pop(key) for key in ("level", "mode") if key in config]
    for level in levels:
        own.judge("--compilation-config mode", level, "3 vllm_compile", COMPILED)
    specializes = config.pop("cudagraph_specialize_lora", None)
    if specializes is not None and at.get("--enable-lora"):
        own.put("engine.kernels.lora.cudagraph_specialize_lora", bool(specializes))
    for key, value in config.items():
        if key in COMPILED_ANYWAY:
            own.without_effect[f"--compilation-config {key}"] = COMPILED
        else:
            own.judge(f"--compilation-config {key}", value, "none", COMPILED)


def _lora(at: Context, own: Translation) -> None:
    """Sets the adapter slots; in vLLM, one of rank 16 unless the command says otherwise."""
    if not at.get("--enable-lora"):
        return
    slots = at.get("--max-loras", 1)
    in_host = at.get("--max-cpu-loras") or slots
    set_lora(at, own, "--enable-lora", slots=slots, rank=at.get("--max-lora-rank", 16), in_host=in_host)
    if (modules := at.get("--lora-target-modules")) is not None:
        judge_modules(own, "--lora-target-modules", modules)
    for flag, key in (
        ("--fully-sharded-loras", "fully_sharded_loras"),
        ("--specialize-active-lora", "specialize_active_lora"),
    ):
        if at.get(flag) is not None:
            own.put(f"engine.kernels.lora.{key}", at.get(flag))


def _optimization_level(at: Context) -> int | None:
    level = at.get("--optimization-level")
    if level is not None and str(level) not in ("0", "1", "2", "3"):
        raise at.wrong("--optimization-level", "must be 0, 1, 2 or 3")
    return None if level is None else int(level)


GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
"""vLLM's modes of CUDA graphs; a number stands for one of the first three."""


def _graph_mode(at: Context, config: dict[str, Any]) -> str | None:
    """Takes the mode of CUDA graphs from the compilation config, as vLLM names it; None: the engine's own."""
    mode, used = config.pop("cudagraph_mode", None), config.pop("use_cudagraph", True)
    if used is False:
        return "NONE"
    if mode is None:
        return None
    if is_whole(mode) and 0 <= mode <= 2:
        return GRAPH_MODES[mode]
    if str(mode).upper() not in GRAPH_MODES:
        raise at.wrong("--compilation-config", f"cudagraph_mode must be one of {', '.join(GRAPH_MODES)}")
    return str(mode).upper()


def _drafts(at: Context, own: Translation) -> None:
    """Adds the settings that `--speculative-config` means."""
    config = at.get("--speculative-config")
    flags = (*BEFORE_CONFIG.items(), *SHORT.items())
    short = {key: at.get(flag) for key, flag in flags if at.get(flag) is not None}
    if config is None and not short:
        return
    if config is not None and not isinstance(config, Mapping):
        raise at.wrong("--speculative-config", "must be a JSON object")
    flag = "--spec-method" if config is None else "--speculative-config"
    given = {**(config or {}), **short}
    method = _method(given)
    if method not in METHODS:
        raise at.wrong(flag, f"method {method} is not modelled; {suggest(method, METHODS)}")
    own.put("speculation", method)
    draft = given.pop("model", None)
    if method == "draft_model":
        set_draft_model(at, own, draft, flag)
    elif draft and method in ("eagle", "eagle3", "medusa"):
        own.put("speculation.model", text_of(draft))
    if (ranges := given.pop("num_speculative_tokens_per_batch_size", None)) is not None:
        own.put("draft_length", "by_batch_size")
        own.put("draft_length.num_speculative_tokens_per_batch_size", str(ranges).replace(" ", ""))
    for name in [*given]:
        if name in FIELDS and (name != "draft_tensor_parallel_size" or method == "draft_model"):
            own.put(FIELDS[name], given.pop(name))
    for name in given:
        if name in SAME_DRAFTS:
            own.without_effect[f"{flag} {name}"] = "the proposer has its usual settings"
        else:
            own.refused[f"{flag} {name}"] = "the proposer has its usual settings"


def _method(given: dict[str, Any]) -> str:
    """Takes the method from the fields; without one, the name of the draft tells it, as for vLLM."""
    method, model = given.pop("method", None), str(given.get("model", "")).lower()
    if method is None:
        named = (name for name in ("eagle3", "eagle", "medusa", "ngram", "mtp") if name in model)
        method = next(named, "draft_model" if model else "")
    if str(method).endswith("_mtp"):
        return "mtp"
    return {"[ngram]": "ngram", "ngram_gpu": "ngram"}.get(str(method), str(method))
