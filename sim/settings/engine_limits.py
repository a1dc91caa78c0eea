"""Engine limits that are null in a config: the values that the engine itself chooses for the device.

`engine.default_limits` names the rule. Sources, read in the code of each version:

- vllm, vllm_offline: vLLM 0.33, `EngineArgs.get_batch_defaults` and `_set_cudagraph_sizes`, behind its API
  server and for its class `LLM`. The device's name matters, not only its memory: an A100 with 80 GB gets the
  limits of smaller devices, an A800 does not, and a GB10 does since 0.33.
- sglang: SGLang 0.5.23, `handle_gpu_memory_settings` and `_resolve_max_num_reqs`: chunks and CUDA graphs
  follow memory and the number of devices, `tp_size`, which counts those of all attention groups. The running
  requests per group are 512 per context that fits in the KV memory, between 2,048 and 4,096, and at most one
  per two tokens of it; 48 in total with drafts. Chunk sizes count all groups together.
- tensorrt_llm: the defaults of `trtllm-serve`, the same on every device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.settings.errors import ConfigError, suggest

if TYPE_CHECKING:
    from hwmodels.device import Device

GIB, MIB = 2**30, 2**20
KEYS = ("max_num_seqs", "max_num_batched_tokens", "max_capture_size")
"""Limits set by a rule, in the order in which they depend on each other."""

_TPU = re.compile(r"\bv(5e|5p|6e)\b", re.I)
_TPU_TOKENS = {"6e": (1024, 2048), "5e": (512, 1024), "5p": (256, 512)}
"""TPU -> budget of vLLM behind its API server, and of its class `LLM`."""
_DATA_CENTRE_BLACKWELL = re.compile(r"\bG?B[23]00\b")
SEQS_WITH_DRAFTS = 48
"""SGLang's limit of running requests with speculative decoding."""
_SMALL = re.compile(r"a100|\bgb10\b", re.I)
"""Devices with much memory that get the limits of smaller ones."""
_CPU = re.compile(r"\b(Xeon|EPYC|CPU)\b", re.I)


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The device and the settings that a rule reads."""

    device: str
    """Name of the device."""
    memory_bytes: float
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    """Ranks of data-parallel attention; the limits here are for the replica, the sum over its ranks."""
    max_model_len: int | None = None
    """Longest sequence; None: unknown."""
    whole_prompts: bool = False
    """Whether prompts are not cut (enable_chunked_prefill=false)."""
    num_drafts: int = 0
    """Draft tokens of a sequence in a pass; 0: no proposer."""
    max_num_seqs: int | None = None
    """The explicitly set limits; None: not set."""
    max_num_batched_tokens: int | None = None
    kv_room: Callable[[int, int], tuple[int, int]] | None = None
    """(chunk, largest CUDA graph) -> (KV tokens of an attention group, of a context); None: unknown."""


def vllm(at: Circumstances, *, offline: bool = False) -> dict[str, int]:
    """Returns the limits of vLLM behind its API server, or of its class `LLM` (offline)."""
    world_size = at.tensor_parallel_size * at.pipeline_parallel_size
    if at.memory_bytes >= 160 * GIB:
        seqs, tokens = 1024, (16384, 16384)
    elif at.memory_bytes >= 70 * GIB and not _SMALL.search(at.device):
        seqs, tokens = 1024, (8192, 16384)
    else:
        seqs, tokens = 256, (2048, 8192)
    if "tpu" in at.device.lower() and (chip := _TPU.search(at.device)):
        tokens = _TPU_TOKENS[chip[1].lower()]
    elif _CPU.search(at.device):
        seqs, tokens = (256 if offline else 128) * world_size, (2048 * world_size, 4096 * world_size)
    ranks = at.attention_data_parallel_size  # each has the limits for itself
    seqs, budget = seqs * ranks, at.max_num_batched_tokens
    if budget is None:
        budget = tokens[1 if offline else 0] * ranks
        if at.max_model_len is not None:
            if at.whole_prompts:
                budget = max(budget, at.max_model_len * ranks)
            budget = min(budget, (at.max_num_seqs or seqs) * at.max_model_len)
    return {
        "max_num_seqs": min(seqs, budget),
        "max_num_batched_tokens": budget,
        "max_capture_size": 1024 if _DATA_CENTRE_BLACKWELL.search(at.device) else 512,
    }


def vllm_offline(at: Circumstances) -> dict[str, int]:
    """Returns the limits of vLLM's class `LLM`."""
    return vllm(at, offline=True)


def sglang(at: Circumstances) -> dict[str, int]:
    """Returns the limits of SGLang's server."""
    ranks = at.attention_data_parallel_size
    memory, few_devices = at.memory_bytes / MIB, at.tensor_parallel_size * ranks < 4
    if memory < 20 * 1024:
        chunk, graphs = 2048, 8
    elif memory < 35 * 1024:
        chunk, graphs = 4096, 48 if few_devices else 160
    elif memory < 60 * 1024:
        chunk, graphs = 4096, 32 if few_devices else 160
    elif memory < 160 * 1024:
        chunk, graphs = 8192, 256 if few_devices else 512
    else:
        chunk, graphs = 16384, 512
    seqs = 2048
    if at.kv_room is not None and not at.num_drafts and at.max_num_seqs is None:
        tokens, context = at.kv_room(chunk, graphs)
        seqs = min(max(min(512 * tokens // context, 4096), 2048), max(1, tokens // 2))
    captured = min(graphs, at.max_num_seqs or graphs)
    if at.num_drafts:  # graphs count sequences, whose rows include draft tokens
        captured = max(captured, min(graphs, at.max_num_seqs or SEQS_WITH_DRAFTS) * (1 + at.num_drafts))
    return {
        "max_num_seqs": SEQS_WITH_DRAFTS if at.num_drafts else seqs * ranks,
        "max_num_batched_tokens": chunk,
        "max_capture_size": captured,
    }


def tensorrt_llm(at: Circumstances) -> dict[str, int]:
    """Returns the limits of `trtllm-serve`; its CUDA graphs are set by its users."""
    ranks = at.attention_data_parallel_size  # each has the limits for itself
    return {"max_num_seqs": 2048 * ranks, "max_num_batched_tokens": 8192 * ranks}


RULES: Mapping[str, Callable[[Circumstances], dict[str, int]]] = {
    "vllm": vllm,
    "vllm_offline": vllm_offline,
    "sglang": sglang,
    "tensorrt_llm": tensorrt_llm,
}
"""Value of `engine.default_limits` -> the rule."""


KV_IN_FP8: Mapping[str, tuple[str, ...]] = {
    "vllm": ("GlmMoeDsaForCausalLM",),
    "vllm_offline": ("GlmMoeDsaForCausalLM",),
    "sglang": ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
}
"""Rule -> architectures whose KV is in fp8 on a B200 or B300 if `model.kv_cache_dtype` is auto.

Sources: `vllm/model_executor/models/config.py` of vLLM 0.33; `_dsa_kv_cache_dtype_default` of SGLang 0.5.23.
"""

Plain = Callable[[Any], Any]
"""Returns a node as dicts and lists, with interpolations resolved."""


def as_it_is(node: Any) -> Any:
    """Returns the node, which is already plain."""
    return node


def complete(cfg: Mapping[Any, Any], device: Any = None, plain: Plain = as_it_is) -> None:
    """Sets the limits of `cfg.engine` that are null by the rule that it names, and the format of KV.

    Does nothing without an engine or a device: commands with several devices complete the config with each of
    them. device: a `Device` that replaces the node `hardware`. plain: converts a config node to plain data.
    Raises ConfigError for an unknown rule, and for a null limit without a rule.
    """
    engine = cfg.get("engine")
    if not isinstance(engine, MutableMapping) or "default_limits" not in engine:
        return
    if device is None and "hardware" not in cfg:
        return
    _choose_kv_format(cfg, engine, device)
    missing = [key for key in KEYS if _holder(engine, key) is not None and _at(engine, key) is None]
    if not missing:
        return
    found = default_limits(cfg, device, plain)
    for key in missing:
        where = "cuda_graphs." if key == "max_capture_size" else ""
        if key not in found:
            raise ConfigError(
                f"engine.{where}{key}=null: must be a number, as engine.default_limits="
                f"{engine['default_limits'] or 'null'} has no rule for it"
            )
        _holder(engine, key)[key] = found[key]


def _choose_kv_format(cfg: Mapping[Any, Any], engine: Mapping[str, Any], device: Device | None) -> None:
    """Sets `model.kv_cache_dtype=fp8` where it is auto and the engine then takes fp8: see `KV_IN_FP8`."""
    model = cfg.get("model")
    if not isinstance(model, MutableMapping) or model.get("kv_cache_dtype") != "auto":
        return
    name = str((cfg.get("hardware") or {}).get("name") if device is None else device.name)
    architectures = KV_IN_FP8.get(str(engine.get("default_limits")), ())
    if not architectures or not _DATA_CENTRE_BLACKWELL.search(name) or _is_older(engine.get("version")):
        return
    if _architecture(model) in architectures:
        model["kv_cache_dtype"] = "fp8"


def _is_older(version: Any) -> bool:
    """Returns whether a release of vLLM is older than 0.33; None: the newest."""
    numbers = [int(part) for part in re.findall(r"\d+", str(version))[:2]]
    return version is not None and numbers < [0, 33]


def _architecture(model: Mapping[str, Any]) -> str | None:
    """Returns the architecture of a preset or of a config.json.

    None if there is none or it cannot be read.
    """
    fields = model.get("config")
    try:
        if fields is None and isinstance(model.get("path"), str):
            from hwmodels.hf.config import read_hf_config  # noqa: PLC0415 (only for a file of the user's)

            fields = read_hf_config(Path(model["path"]).expanduser())[1]
        return str((fields or {})["architectures"][0])
    except (ValueError, OSError, LookupError, TypeError):
        return None


def default_limits(config: Mapping[Any, Any], device: Any = None, plain: Plain = as_it_is) -> dict[str, int]:
    """Returns the limits set by the rule of a composed config; empty without a rule or a device.

    device, plain: see `complete`. Raises ConfigError.
    """
    engine = config.get("engine") or {}
    rule = engine.get("default_limits")
    if rule is None:
        return {}
    if rule not in RULES:
        raise ConfigError(f"engine.default_limits={rule}: no such rule; {suggest(str(rule), RULES)}")
    hardware = config.get("hardware") or {}
    name = hardware.get("name") if device is None else device.name
    memory = hardware.get("memory_bytes") if device is None else device.memory_bytes
    try:
        memory_bytes = float(memory)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return {}  # `build` reports the error of the device
    model, batching = config.get("model") or {}, config.get("batching") or {}
    published = model.get("config") or {}
    length = engine.get("max_model_len") or published.get("max_position_embeddings")
    at = Circumstances(
        device=str(name),
        memory_bytes=memory_bytes,
        tensor_parallel_size=_plain(config.get("tensor_parallel_size")) or 1,
        pipeline_parallel_size=_plain(config.get("pipeline_parallel_size")) or 1,
        attention_data_parallel_size=_plain(config.get("attention_data_parallel_size")) or 1,
        max_model_len=_plain(length),
        whole_prompts=batching.get("enable_chunked_prefill") is False,
        num_drafts=_num_drafts(config.get("speculation")),
        max_num_seqs=_plain(engine.get("max_num_seqs")),
        max_num_batched_tokens=_plain(engine.get("max_num_batched_tokens")),
        kv_room=partial(_kv_room, config, device, plain),
    )
    return RULES[str(rule)](at)


def _kv_room(
    config: Mapping[str, Any], device: Device | None, plain: Plain, chunk: int, graphs: int
) -> tuple[int, int]:
    """Returns the KV tokens of an attention group and of a context; `UNKNOWN_ROOM` if unknown.

    `build` reports errors of a model, device or layout that cannot be built or does not fit.
    """
    # Imported here, because commands that only read settings import neither models nor numpy.
    from hwmodels.device import Device  # noqa: PLC0415
    from hwmodels.host import CudaGraphs  # noqa: PLC0415
    from hwmodels.iterations.layout import ParallelLayout  # noqa: PLC0415
    from hwmodels.iterations.memory import MemoryProfile, plan_memory  # noqa: PLC0415
    from hwmodels.model import ModelSpec  # noqa: PLC0415
    from sim.settings.build import build  # noqa: PLC0415

    engine, sizes = config["engine"], [size.name for size in fields(ParallelLayout)]
    share = engine.get("gpu_memory_utilization")
    if "model" not in config or not isinstance(share, float | None):
        return UNKNOWN_ROOM
    try:
        model: ModelSpec = build(plain(config["model"]), "model", ModelSpec)
        layout = ParallelLayout(**{name: config[name] for name in sizes if name in config})
        plan = plan_memory(
            model=model,
            device=build(plain(config["hardware"]), "hardware", Device) if device is None else device,
            layout=layout,
            gpu_memory_utilization=share,
            profile=MemoryProfile(rule="sglang"),
            max_num_batched_tokens=_plain(engine.get("max_num_batched_tokens")) or chunk,
            max_num_seqs=2048,
            cuda_graphs=CudaGraphs(max_capture_size=graphs),
            num_kv_blocks=_plain(engine.get("num_kv_blocks")),
        )
    except (ValueError, ConfigError):
        return UNKNOWN_ROOM
    blocks = plan.num_blocks // layout.attention_data_parallel_size
    context = _plain(engine.get("max_model_len")) or model.max_position_embeddings
    return (blocks * plan.block_size, context) if context else UNKNOWN_ROOM


UNKNOWN_ROOM = (4 * 8192, 8192)
"""KV tokens and context that give the minimum number of running requests."""


def _num_drafts(speculation: Mapping[str, Any] | None) -> int:
    """Returns the draft tokens of a sequence in a pass: the nodes of a tree, or the length of a chain."""
    if not speculation:
        return 0
    tree = speculation.get("tree") or {}
    nodes = tree.get("paths") or tree.get("parents")
    return len(nodes) if nodes else _plain(speculation.get("num_speculative_tokens")) or 1


def _plain(value: Any) -> int | None:
    """Returns a positive integer; None for anything else, whose error `build` reports."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _holder(engine: Any, key: str) -> Any:
    """Returns the node of `engine` that has this limit; None if there is none."""
    node = engine.get("cuda_graphs") if key == "max_capture_size" else engine
    return node if isinstance(node, Mapping) and key in node else None


def _at(engine: Any, key: str) -> Any:
    return _holder(engine, key)[key]
