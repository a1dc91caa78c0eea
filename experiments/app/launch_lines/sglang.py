"""The flags of SGLang's server as settings."""

from __future__ import annotations

from experiments.app.launch_lines.lora import OVERLAPPED, TRAFFIC, judge_modules, judge_pinned, set_lora
from experiments.app.launch_lines.translation import (
    EXPERTS,
    Context,
    Translation,
    allow_longer,
    set_copies,
    set_draft_model,
    set_eplb,
    set_formats,
    set_model_overrides,
    set_state_dtype,
    set_text_only,
    text_of,
)
from policies.batching import LOAD_BALANCE_METHODS
from sim.settings.errors import ConfigError, suggest

RUNNERS = {"marlin": "marlin", "flashinfer_trtllm": "auto"}
"""`engine.kernels.moe_backend` by `--moe-runner-backend`; SGLang's auto is that of the engine profile."""

ALGORITHMS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "draft_model",
    "NGRAM": "ngram",
}
"""Value of --speculative-algorithm -> the group speculation."""


def meaning(at: Context, own: Translation) -> None:
    """Adds what the flags mean. Raises ConfigError for what is not modelled."""
    if at.get("--is-embedding"):
        raise at.wrong("--is-embedding", "only generation is modelled")
    if (overridden := at.get("--json-model-override-args")) is not None and overridden != "{}":
        set_model_overrides(at, own, "--json-model-override-args", overridden)
    if at.get("--language-model-only") or at.get("--language-only"):
        set_text_only(at, own)
    set_formats(at, own)
    flag, variable = "--mamba-ssm-dtype", "SGLANG_MAMBA_SSM_DTYPE"
    set_state_dtype(at, own, flag, at.get(flag) or at.command.environment.get(variable))
    _layout(at, own)
    _limits(at, own)
    _cache(at, own)
    _order(at, own)
    _graphs(at, own)
    _kernels(at, own)
    _lora(at, own)
    _drafts(at, own)


def _layout(at: Context, own: Translation) -> None:
    """Sets the parallel sizes; --tp-size counts the devices of all groups of the attention."""
    tp, (dp, ranks) = at.get("--tp-size", 1), ranks_of(at)
    if at.get("--dcp-size", 1) > 1:
        raise at.wrong("--dcp-size", "context parallelism of decodes is not modelled with SGLang's rules")
    if tp % ranks:
        raise ConfigError(
            f"--from: --tp-size {tp}: must be a multiple of {ranks}, the ranks of the attention"
        )
    own.put("tensor_parallel_size", tp // ranks)
    exchange = at.get("--moe-a2a-backend", "deepep" if at.get("--enable-deepep-moe") else "none")
    for key, value in (
        ("attention_data_parallel_size", ranks),
        ("pipeline_parallel_size", at.get("--pp-size", 1)),
        (
            "expert_parallel_size",
            at.get("--ep-size", 1) if exchange == "none" else tp,
        ),  # an all-to-all needs it
    ):
        if value > 1 and (key != "expert_parallel_size" or at.has_experts(own.settings)):
            own.put(key, value)
    method = at.get("--load-balance-method")
    if dp > 1:
        set_copies(own, dp)
        if method == "round_robin":
            own.put("routing", "round_robin")
    if ranks > 1 and method in LOAD_BALANCE_METHODS:
        own.put("engine.load_balance_method", method)
    if method not in (None, "auto", *LOAD_BALANCE_METHODS):
        own.refused[f"--load-balance-method {method}"] = "requests go to the replica with the fewest"


def ranks_of(at: Context) -> tuple[int, int]:
    """Returns the numbers of copies of the model, and of groups of its attention."""
    dp, ranks = at.get("--dp-size", 1), at.get("--attn-dp-size", 1)
    return (1, dp) if at.get("--enable-dp-attention") and ranks == 1 else (dp, ranks)


def _limits(at: Context, own: Translation) -> None:
    if at.get("--context-length") is not None:
        own.put("engine.max_model_len", at.get("--context-length"))
        if at.command.environment.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") == "1":
            allow_longer(at, own, at.get("--context-length"))
    chunk = at.get("--chunked-prefill-size")
    if chunk == -1:
        own.put("batching.enable_chunked_prefill", False)
    elif chunk is not None:
        own.put("engine.max_num_batched_tokens", chunk)
    if at.get("--disable-overlap-schedule"):
        own.put("engine.host.overlapped", False)


def _cache(at: Context, own: Translation) -> None:
    size = at.get("--page-size", 1)
    if at.get("--enable-hierarchical-cache"):
        _hicache(at, own)
    elif at.get("--disable-radix-cache"):
        own.put("caching", "paged")
        own.put("caching.block_size", size)
    elif at.get("--page-size") is not None:
        own.put("caching.block_size", size)
    if (eviction := at.get("--radix-eviction-policy")) is not None and "caching" not in own.settings:
        if eviction not in ("lru", "lfu", "priority"):
            raise at.wrong("--radix-eviction-policy", "is not modelled; use lru, lfu or priority")
        own.put("caching.eviction", eviction)
    if (most := at.get("--max-total-tokens")) is not None:
        own.put("engine.num_kv_blocks", most // _block_size(at) * ranks_of(at)[1])


def _block_size(at: Context) -> int:
    """Returns the tokens of a block of the cache."""
    size: int = at.get("--page-size", 1)
    return size


def _kernels(at: Context, own: Translation) -> None:
    backend = at.get("--moe-runner-backend", "auto")
    if backend in RUNNERS:
        own.put("engine.kernels.moe_backend", RUNNERS[backend])
    elif backend != "auto":
        own.judge(
            "--moe-runner-backend",
            backend,
            EXPERTS,
            "prices are those of the engine's fast kernels of experts",
        )
    copies = at.get("--ep-num-redundant-experts", 0)
    if at.get("--enable-eplb") or copies:
        set_eplb(own, {"num_redundant_experts": copies})


def _lora(at: Context, own: Translation) -> None:
    """Sets the adapter slots; --lora-paths alone switches them on, unless adapters are switched off."""
    paths = at.get("--lora-paths")
    if not at.get("--enable-lora", paths is not None):
        return
    slots, rank = at.get("--max-loras-per-batch", 8), at.get("--max-lora-rank")
    in_host = at.get("--max-loaded-loras")
    set_lora(at, own, "--enable-lora", slots=slots, rank=rank, in_host=in_host)
    if paths is not None:
        own.without_effect["--lora-paths"] = TRAFFIC
        judge_pinned(own, "--lora-paths", paths)
    if (modules := at.get("--lora-target-modules")) is not None:
        judge_modules(own, "--lora-target-modules", modules)
    if (backend := at.get("--lora-backend")) in ("triton", "csgmv"):
        own.put("engine.kernels.lora.backend", f"sglang_{backend}")
    elif backend is not None:
        own.refused[f"--lora-backend {backend}"] = "the kernels that are modelled are triton and csgmv"
    if (eviction := at.get("--lora-eviction-policy", "lru")) != "lru":
        own.refused[f"--lora-eviction-policy {eviction}"] = "adapters are evicted by lru or lfu"
    if at.get("--lora-drain-wait-threshold", 0):
        own.refused["--lora-drain-wait-threshold"] = "slots are not drained for adapters that wait"
    if at.get("--enable-lora-overlap-loading"):
        own.without_effect["--enable-lora-overlap-loading"] = OVERLAPPED


def _order(at: Context, own: Translation) -> None:
    policy = at.get("--schedule-policy", "fcfs")
    if at.get("--enable-priority-scheduling"):
        if not at.get("--schedule-low-priority-values-first"):
            raise ConfigError(
                "--from: --enable-priority-scheduling: larger numbers go first, here smaller ones do; add "
                "--schedule-low-priority-values-first if the traffic's numbers are of that kind"
            )
        own.put("scheduling", "priority")
    elif policy == "lpm" and at.get("--disable-radix-cache"):
        pass  # without a cache, SGLang takes them in the order of their arrival
    elif policy == "lpm":
        own.put("scheduling", "longest_prefix")
    elif policy != "fcfs":
        raise at.wrong("--schedule-policy", "is not modelled; use fcfs or lpm")


def _graphs(at: Context, own: Translation) -> None:
    if at.get("--disable-cuda-graph") or at.get("--disable-decode-cuda-graph"):
        own.put("engine.cuda_graphs.enabled", False)
    if (backend := at.get("--cuda-graph-backend-decode")) is not None:
        if backend not in ("full", "disabled"):
            raise at.wrong("--cuda-graph-backend-decode", "is not modelled; use full or disabled")
        if backend == "disabled":
            own.put("engine.cuda_graphs.enabled", False)
    if at.get("--cuda-graph-config"):
        raise at.wrong("--cuda-graph-config", "give --cuda-graph-max-bs-decode in its place")
    largest = at.get("--cuda-graph-max-bs-decode") or at.get("--cuda-graph-max-bs")
    sizes = at.get("--cuda-graph-bs-decode") or at.get("--cuda-graph-bs")
    if sizes:
        try:
            largest = max(int(size) for size in sizes)
        except ValueError:
            raise at.wrong("--cuda-graph-bs-decode", "must be whole numbers") from None
    if largest:
        own.put("engine.cuda_graphs.max_capture_size", largest * _rows(at))


def _rows(at: Context) -> int:
    """Returns the rows of a sequence in a decode, as SGLang captures graphs by sequences."""
    if at.get("--speculative-algorithm") is None:
        return 1
    steps, tokens = at.get("--speculative-num-steps"), at.get("--speculative-num-draft-tokens")
    return int(tokens or (3 if steps is None else steps) + 1)


def _hicache(at: Context, own: Translation) -> None:
    size = at.get("--hicache-size", 0)
    if not size:
        raise at.wrong(
            "--enable-hierarchical-cache",
            "the size of the host's tier is relative to the KV memory; give --hicache-size GB (per rank)",
        )
    own.put("caching", "tiered")
    own.put("caching.host_gib", size * 1e9 / 2**30)
    own.put("caching.write", "back" if at.get("--hicache-write-policy") == "write_back" else "through")


def _drafts(at: Context, own: Translation) -> None:
    algorithm = at.get("--speculative-algorithm")
    if algorithm is None:
        return
    name = str(algorithm).upper()
    if name not in ALGORITHMS:
        raise at.wrong("--speculative-algorithm", f"is not modelled; {suggest(name, ALGORITHMS)}")
    method = ALGORITHMS[name]
    if method == "eagle" and at.get("--speculative-draft-model-path") is None:
        method = "mtp"  # SGLang drafts with the model's own layers then
    own.put("speculation", method)
    draft = at.get("--speculative-draft-model-path")
    if method == "draft_model":
        set_draft_model(at, own, draft, "--speculative-draft-model-path")
    elif draft and method in ("eagle", "eagle3"):
        own.put("speculation.model", text_of(draft))
    steps, tokens = at.get("--speculative-num-steps"), at.get("--speculative-num-draft-tokens")
    width = at.get("--speculative-eagle-topk", 1)
    if width > 1 and method in ("eagle", "eagle3"):
        _tree(own, width, 5 if steps is None else steps, tokens)
    elif width > 1 and method == "mtp":
        raise at.wrong("--speculative-eagle-topk", "is not modelled for a model's own layers; use 1, a chain")
    elif method != "ngram" and steps is not None:
        own.put("speculation.num_speculative_tokens", steps)
    elif tokens is not None:
        own.put("speculation.num_speculative_tokens", max(1, tokens - 1))


def _tree(own: Translation, width: int, depth: int, tokens: int | None) -> None:
    """Sets the tree of a beam. tokens: nodes to verify and the newest token; None: all that can be chosen."""
    candidates = width + (depth - 1) * width**2
    own.put("speculation/tree", "beam")
    own.put("speculation.tree.width", width)
    own.put("speculation.tree.depth", depth)
    own.put("speculation.num_speculative_tokens", min(candidates, max(1, (tokens or candidates + 1) - 1)))
