"""What the flags of each engine mean as settings of ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments.app.launch_lines.commands import Command, read_text
from experiments.app.launch_lines.flags import (
    Arguments,
    Engine,
    parse,
    settings_of,
    table,
    typed,
    without_effect,
)
from hwmodels.model.model_spec import ModelSpec
from sim.settings.bounded_yaml import parse_yaml, read_yaml
from sim.settings.build import build
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import find_groups
from sim.settings.errors import ConfigError, suggest
from sim.settings.hydra_errors import composed
from sim.settings.model_names import model_named
from sim.settings.override import Override

DTYPES = {
    "half": "fp16",
    "float16": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}
KV_DTYPES = {
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
}
WEIGHTS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "ptpc_fp8": "fp8",
    "modelopt_fp8": "fp8",
    "w8a8_fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "fp8_per_channel": "fp8",
    "fp8_per_block": "fp8_block",
    "deepseek_v4_fp8": "fp8_block",
    "awq": "int4_wo",
    "auto_awq": "int4_wo",
    "awq_marlin": "int4_wo",
    "gptq": "int4_wo",
    "auto_gptq": "int4_wo",
    "gptq_marlin": "int4_wo",
    "modelopt_fp4": "nvfp4",
    "nvfp4_per_token": "nvfp4",
    "nvfp4_online": "nvfp4",
    "w8a8_int8": "int8",
    "int8_per_channel_weight_only": "int8_wo",
}
"""Value of --quantization -> model.weights, where the method has one format."""
EXPERT_WEIGHTS = {"mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4", "experts_int8": "int8_wo"}
"""Value of --quantization -> model.moe_weights, for methods that quantise experts only."""
AS_STORED = (
    "compressed-tensors",
    "modelopt",
    "modelopt_mixed",
    "quark",
    "torchao",
    "inc",
    "auto-round",
    "moe_wna16",
)
"""Methods whose format the checkpoint states."""


@dataclass(kw_only=True, slots=True)
class Translation:
    """A command as settings of ours."""

    engine: Engine
    settings: dict[str, str] = field(default_factory=dict)
    """Group or setting -> value, as overrides have them."""
    without_effect: list[str] = field(default_factory=list)
    """Flags that change no time."""
    unpriced: list[tuple[str, str]] = field(default_factory=list)
    """Flags with an effect that is not simulated, and why."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]

    def put(self, key: str, value: Any) -> None:
        """Sets a key; None: null."""
        shown = {None: "null", True: "true", False: "false"}
        self.settings[key] = shown[value] if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a translation reads besides the command."""

    command: Command
    found: Arguments
    dirs: Sequence[Path]
    beside: Sequence[str]
    """Overrides that are given beside the command."""

    def get(self, flag: str, default: Any = None) -> Any:
        """Returns the value of a flag, or the default if it is not given."""
        return self.found.values.get(flag, default)

    def wrong(self, flag: str, reason: str) -> ConfigError:
        written, value = self.found.written.get(flag, flag), self.found.values.get(flag)
        return ConfigError(f"--from: {written}{'' if value is True else f' {value}'}: {reason}")

    def has_experts(self, settings: Mapping[str, str]) -> bool:
        """Returns whether the model is a mixture of experts."""
        own = [text for text in self.beside if Override.parse(text).root == "model"]
        chosen = [f"{key}={value}" for key, value in settings.items() if Override.parse(key).root == "model"]
        mine = {Override.parse(text).name for text in own}
        kept = [text for text in chosen if Override.parse(text).name not in mine]
        return _has_experts((*kept, *own), tuple(self.dirs))


@lru_cache(maxsize=16)
def _has_experts(overrides: tuple[str, ...], dirs: tuple[Path, ...]) -> bool:
    cfg = composed(ConfigSource(config_name="simulate", dirs=dirs), overrides)
    model: ModelSpec = build(cfg.model, "model")
    return model.has_experts


def translated(command: Command, dirs: Sequence[Path], beside: Sequence[str] = ()) -> Translation:
    """Returns a command as settings. Raises ConfigError for a flag that is unknown, wrong or refused.

    dirs: the config folders. beside: overrides that are given beside the command, which win.
    """
    found = parse(command.engine, command.tokens)
    with_file(Context(command=command, found=found, dirs=dirs, beside=beside))
    own = _meaning(command, found, dirs, beside)
    for flag in found.values:
        named = flag in own.without_effect or flag.startswith(("--speculative-", "--config"))
        if table(command.engine)[flag].effect != "setting" or named:
            continue
        rest = {name: value for name, value in found.values.items() if name != flag}
        try:
            alone = _meaning(command, replace(found, values=rest), dirs, beside)
        except ConfigError:  # the command needs the flag
            continue
        if alone.settings == own.settings and len(alone.unpriced) == len(own.unpriced):
            own.without_effect.append(found.written.get(flag, flag))
    return own


def _meaning(command: Command, found: Arguments, dirs: Sequence[Path], beside: Sequence[str]) -> Translation:
    """Returns what the flags mean; see `translated`."""
    at = Context(command=command, found=replace(found, values=dict(found.values)), dirs=dirs, beside=beside)
    own = Translation(engine=command.engine)
    own.without_effect, own.unpriced = without_effect(found)
    _environment(command, own)
    own.put("engine", command.engine)
    _model(at, own)
    for key, value in settings_of(found):
        own.put(key, value)
    BY_ENGINE[command.engine](at, own)
    return own


def with_file(at: Context) -> None:
    """Adds the flags of the YAML file that --config names; those of the command itself win."""
    name = at.get("--config")
    if name is None or at.found.engine == "tensorrt_llm":
        return
    known = table(at.found.engine)
    for key, value in file_of(at, "--config", str(name)).items():
        flag = f"--{str(key).replace('_', '-')}"
        if flag not in known:
            row = parse(at.found.engine, [flag, *([] if isinstance(value, bool) else [str(value)])])
            flag = next(iter(row.values))
        if flag not in at.found.values:
            at.found.values[flag] = typed(known[flag], f"{name}: {key}", value)
            at.found.written[flag] = f"{name}: {key}"


def file_of(at: Context, flag: str, name: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file that a flag names. Raises ConfigError."""
    if name in at.command.files:
        content = parse_yaml(at.command.files[name], name)
    else:
        path = next((p for p in (Path(name), at.command.folder / name) if p.exists()), None)
        if path is None:
            raise at.wrong(flag, f"no such file, here or in {at.command.folder.absolute()}")
        read_text(path)  # refuses what is not a file of moderate size
        content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise at.wrong(flag, "must be a mapping of settings")
    return dict(content)


def _environment(command: Command, own: Translation) -> None:
    """Adds variables that an engine reads. Raises ConfigError for one that changes the engine."""
    for name, value in command.environment.items():
        if name == "VLLM_USE_V1" and value == "0":
            raise ConfigError(
                "--from: VLLM_USE_V1=0: the v0 engine is another one; leave it out, and set engine=vllm_v0 "
                "beside --from"
            )
        if name.startswith(("VLLM_", "SGLANG_", "SGL_", "TRTLLM_", "TLLM_", "NCCL_")) and not name.endswith(
            ("_LEVEL", "_KEY", "_DEBUG", "_PORT", "_HOST_IP", "_VERSION", "USE_V1")
        ):
            own.unpriced.append((f"{name}={value}", "the environment is not simulated"))


def _model(at: Context, own: Translation) -> None:
    """Sets the model. Raises ConfigError for one that is not known."""
    flag = "--model-path" if at.found.engine == "sglang" else "--model"
    names = [*at.found.positional[:1], at.get(flag)]
    name = next((each for each in names if each), None)
    if len(at.found.positional) > 1:
        raise ConfigError(f"--from: {at.found.positional[1]}: is neither a flag nor the model; leave it out")
    if any(Override.parse(text).name == "model" for text in at.beside):
        return
    if name is None:
        raise ConfigError(
            f"--from: names no model; add it to the command ({flag} MODEL), or give model=NAME beside --from"
        )
    if found := model_named(str(name), at.dirs):
        own.put("model", found.choice)
        if found.weights is not None:
            own.put("model.weights", found.weights)
        return
    folder = next((p for p in (Path(name), at.command.folder / name) if (p / "config.json").is_file()), None)
    if folder is not None:
        own.put("model", "hf")
        own.put("model.path", _text(folder))
        return
    choices = [choice.name for choice in find_groups(at.dirs)["model"]]
    best = suggest(str(name).rpartition("/")[2], choices, listed_by="windtunnel list model")
    raise ConfigError(
        f"--from: model {name}: there is no preset of this name ({best}); give model=NAME beside --from, or "
        "model=hf model.path=FOLDER with its config.json"
    )


def _text(value: Any) -> str:
    """Returns a text as the value of an override, in quotation marks if it needs them."""
    text = str(value)
    return text if re.fullmatch(r"[\w./-]+", text) else "'" + text.replace("'", r"\'") + "'"


def _formats(at: Context, own: Translation) -> None:
    """Sets the number formats."""
    dtype = at.get("--dtype")
    if dtype is not None and dtype != "auto":
        if dtype not in DTYPES:
            raise at.wrong("--dtype", f"must be auto, {', '.join(DTYPES)}")
        own.put("model.dtype", DTYPES[dtype])
    kv = at.get("--kv-cache-dtype")
    if kv is not None and kv != "auto":
        if kv not in KV_DTYPES:
            best = suggest(kv, KV_DTYPES)
            raise at.wrong("--kv-cache-dtype", f"this format of KV is not modelled; {best}")
        own.put("model.kv_cache_dtype", KV_DTYPES[kv])
    method = at.get("--quantization")
    if method is None or method in ("None", "none", "unquant"):
        return
    if "model.weights" in own.settings or method in AS_STORED:
        if "model.weights" not in own.settings and own.settings.get("model") != "hf":
            raise at.wrong(
                "--quantization",
                "the checkpoint states its format, which this model's name does not; give model.weights "
                "beside --from, and leave --quantization out",
            )
        own.without_effect.append("--quantization")
    elif method in WEIGHTS:
        own.put("model.weights", WEIGHTS[method])
    elif method in EXPERT_WEIGHTS:
        own.put("model.moe_weights", EXPERT_WEIGHTS[method])
    else:
        known = (*WEIGHTS, *EXPERT_WEIGHTS, *AS_STORED)
        raise at.wrong("--quantization", f"this method is not modelled; {suggest(str(method), known)}")


def _copies(own: Translation, count: int) -> None:
    """Sets replicas that share no work, each of which gets the requests in turn by its load."""
    own.put("replicas", count)
    own.put("routing", "least_outstanding")


def _times(at: Context, own: Translation, limits: Mapping[str, str], ranks: int) -> None:
    """Sets limits that the engine has for each rank of data-parallel attention, and a replica for all."""
    for flag, key in limits.items():
        if (value := at.get(flag)) is not None:
            own.put(key, value * ranks)


def _vllm(at: Context, own: Translation) -> None:
    if at.get("--task", "generate") not in ("generate", "auto") or at.get("--runner") not in (
        None,
        "auto",
        "generate",
    ):
        raise at.wrong("--runner" if at.get("--runner") else "--task", "only generation is modelled")
    if at.get("--convert") not in (None, "auto", "none"):
        raise at.wrong("--convert", "only generation is modelled")
    _formats(at, own)
    tp, dp = at.get("--tensor-parallel-size", 1), at.get("--data-parallel-size", 1)
    cp = at.get("--decode-context-parallel-size", 1)
    if tp % cp:
        raise at.wrong("--decode-context-parallel-size", f"must divide --tensor-parallel-size {tp}")
    own.put("tensor_parallel_size", tp // cp)
    for key, value in (
        ("pipeline_parallel_size", at.get("--pipeline-parallel-size", 1)),
        ("context_parallel_size", cp),
    ):
        if value > 1:
            own.put(key, value)
    ranks = 1
    if dp > 1 or at.get("--enable-expert-parallel"):
        if at.has_experts(own.settings):
            ranks = dp
            if dp > 1:
                own.put("attention_data_parallel_size", dp)
            if at.get("--enable-expert-parallel"):
                own.put("expert_parallel_size", tp * dp)
        else:
            if dp > 1:
                _copies(own, dp)
            if at.get("--enable-expert-parallel"):
                own.without_effect.append("--enable-expert-parallel")
    limits = {
        "--max-num-seqs": "engine.max_num_seqs",
        "--max-num-batched-tokens": "engine.max_num_batched_tokens",
    }
    _times(at, own, limits, ranks)
    if "--max-model-len" in at.found.values:
        length = at.get("--max-model-len")
        own.put("engine.max_model_len", None if length in ("auto", -1) else length)
    if at.get("--enable-prefix-caching") is not None:
        own.put("caching", "prefix" if at.get("--enable-prefix-caching") else "paged")
    if at.get("--block-size") is not None:
        own.put("caching.block_size", at.get("--block-size"))
    if at.get("--kv-offloading-size"):
        own.put("caching", "tiered")
        own.put(
            "caching.host_gib", at.get("--kv-offloading-size") / (tp * at.get("--pipeline-parallel-size", 1))
        )
    if at.get("--scheduling-policy", "fcfs") != "fcfs":
        if at.get("--scheduling-policy") != "priority":
            raise at.wrong("--scheduling-policy", "must be fcfs or priority")
        own.put("scheduling", "priority")
    if at.get("--prefill-schedule-interval", 1) > 1:
        own.put("batching", "paced_prefills")
        own.put("batching.prefill_schedule_interval", at.get("--prefill-schedule-interval"))
    if at.get("--async-scheduling") is not None:
        own.put("engine.host.overlapped", at.get("--async-scheduling"))
    if at.get("--moe-backend", "auto") != "auto":
        if at.get("--moe-backend") == "marlin":
            own.put("engine.kernels.moe_backend", "marlin")
        else:
            own.unpriced.append(("--moe-backend", table("vllm")["--attention-backend"].detail))
    if at.get("--attention-config"):
        own.unpriced.append(("--attention-config", table("vllm")["--attention-backend"].detail))
    if at.get("--performance-mode") not in (None, "balanced", "interactivity"):
        raise at.wrong(
            "--performance-mode",
            "doubles the limits; give --max-num-seqs and --max-num-batched-tokens in its place",
        )
    if at.get("--data-parallel-size-local") is not None:
        own.without_effect.append("--data-parallel-size-local")
    if at.get("--enable-eplb"):
        _eplb(at, own, at.get("--eplb-config") or {})
    if (overridden := at.get("--hf-overrides")) is not None:
        _hf_overrides(at, own, "--hf-overrides", overridden)
    _vllm_graphs(at, own)
    _vllm_drafts(at, own)


def _hf_overrides(at: Context, own: Translation, flag: str, given: Any) -> None:
    """Accepts changes of a config.json that only change positions."""
    try:
        keys = set(json.loads(given) if isinstance(given, str) else given)
    except (ValueError, TypeError, RecursionError):
        raise at.wrong(flag, "must be a JSON object") from None
    changed = keys - {"rope_scaling", "rope_parameters", "rope_theta"}
    if changed:
        raise at.wrong(
            flag,
            f"{', '.join(sorted(map(str, changed)))} may change the costs; write a config.json with it, and "
            "give model=hf model.path=FOLDER beside --from",
        )
    own.without_effect.append(flag)


def _eplb(at: Context, own: Translation, config: Any) -> None:
    own.put("engine.kernels.routing.placement", "eplb")
    copies = config.get("num_redundant_experts", 0) if isinstance(config, Mapping) else 0
    if copies:
        own.put("engine.kernels.routing.num_redundant_experts", copies)


def _vllm_graphs(at: Context, own: Translation) -> None:
    """Sets which batches run as CUDA graphs."""
    level = at.get("--optimization-level")
    enabled: bool | None = None
    if level is not None:
        if str(level) not in ("0", "1", "2", "3"):
            raise at.wrong("--optimization-level", "must be 0, 1, 2 or 3")
        if str(level) == "1":
            raise at.wrong(
                "--optimization-level", "piecewise CUDA graphs alone are not modelled; use 0, 2 or 3"
            )
        enabled = False if str(level) == "0" else None
    sizes = at.get("--cudagraph-capture-sizes") or at.get("--cuda-graph-sizes")
    config = at.get("--compilation-config")
    if isinstance(config, int):
        config = {"mode": config}
    config = dict(config) if isinstance(config, Mapping) else {}
    mode = config.pop("cudagraph_mode", None)
    if mode is not None:
        name = {0: "NONE", 1: "PIECEWISE"}.get(mode, str(mode).upper()) if not isinstance(mode, bool) else "?"
        if name == "PIECEWISE":
            raise at.wrong(
                "--compilation-config", "cudagraph_mode PIECEWISE is not modelled; use NONE or FULL"
            )
        enabled = False if name == "NONE" else enabled
    if config.pop("use_cudagraph", True) is False:
        enabled = False
    sizes = config.pop("cudagraph_capture_sizes", None) or sizes
    largest = config.pop("max_cudagraph_capture_size", None)
    if sizes:
        try:
            largest = max(int(size) for size in sizes)
        except (TypeError, ValueError):
            raise at.wrong("--cudagraph-capture-sizes", "must be whole numbers") from None
    if largest is not None:
        own.put("engine.cuda_graphs.max_capture_size", largest)
    for key in ("level", "mode"):
        if config.get(key) in (0, "NONE", "none"):
            own.unpriced.append(("--compilation-config", "kernels are priced as compiled"))
        config.pop(key, None)
    if config:
        own.unpriced.append((f"--compilation-config ({', '.join(config)})", "kernels are priced as compiled"))
    if at.get("--enforce-eager"):
        enabled = False
    if enabled is False:
        own.put("engine.cuda_graphs.enabled", False)


def _vllm_drafts(at: Context, own: Translation) -> None:
    """Sets speculative decoding."""
    config = at.get("--speculative-config")
    short = {
        key: at.get(flag)
        for key, flag in (
            ("method", "--spec-method"),
            ("model", "--spec-model"),
            ("num_speculative_tokens", "--spec-tokens"),
        )
        if at.get(flag) is not None
    }
    if config is None and not short:
        return
    if config is not None and not isinstance(config, Mapping):
        raise at.wrong("--speculative-config", "must be a JSON object")
    flag = "--spec-method" if config is None else "--speculative-config"
    given = {**(config or {}), **short}
    method = given.pop("method", None)
    if method is None:
        model = str(given.get("model", "")).lower()
        method = next(
            (name for name in ("eagle3", "eagle", "medusa", "ngram", "mtp") if name in model),
            "draft_model" if model else None,
        )
    if method is not None and str(method).endswith("_mtp"):
        method = "mtp"
    method = {"[ngram]": "ngram", "ngram_gpu": "ngram"}.get(str(method), str(method))
    known = ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3", "mtp")
    if method not in known:
        raise at.wrong(flag, f"method {method} is not modelled; {suggest(method, known)}")
    own.put("speculation", method)
    draft = given.pop("model", None)
    if method == "draft_model":
        _draft_model(at, own, draft, flag)
    elif draft and method in ("eagle", "eagle3", "medusa"):
        own.put("speculation.model", _text(draft))
    fields = {
        "num_speculative_tokens": "speculation.num_speculative_tokens",
        "prompt_lookup_max": "speculation.prompt_lookup_max",
        "prompt_lookup_min": "speculation.prompt_lookup_min",
        "draft_tensor_parallel_size": "speculation.draft.tensor_parallel_size",
        "disable_eagle_block_drop": "speculation.disable_eagle_block_drop",
        **{
            name: f"speculation.{name}"
            for name in (
                "suffix_decoding_max_tree_depth",
                "suffix_decoding_max_cached_requests",
                "suffix_decoding_max_spec_factor",
                "suffix_decoding_min_token_prob",
            )
        },
    }
    if "num_speculative_tokens_per_batch_size" in given:
        ranges = given.pop("num_speculative_tokens_per_batch_size")
        own.put("draft_length", "by_batch_size")
        own.put("draft_length.num_speculative_tokens_per_batch_size", str(ranges).replace(" ", ""))
    for name in [*given]:
        if name in fields and not (name == "draft_tensor_parallel_size" and method != "draft_model"):
            own.put(fields[name], given.pop(name))
    if given:
        own.unpriced.append((f"{flag} ({', '.join(given)})", "the proposer has its usual settings"))


def _draft_model(at: Context, own: Translation, name: Any, flag: str) -> None:
    found = model_named(str(name), at.dirs) if name else None
    if found is None:
        best = suggest(str(name).rpartition("/")[2], [c.name for c in find_groups(at.dirs)["model"]][:200])
        raise at.wrong(flag, f"the draft model {name} has no preset ({best.partition(';')[0]})")
    own.put("model@speculation.draft.model", found.choice)


def _sglang(at: Context, own: Translation) -> None:
    if at.get("--is-embedding"):
        raise at.wrong("--is-embedding", "only generation is modelled")
    _formats(at, own)
    tp, dp = at.get("--tp-size", 1), at.get("--dp-size", 1)
    ranks = at.get("--attn-dp-size", 1)
    if at.get("--enable-dp-attention") and ranks == 1:
        ranks, dp = dp, 1
    if at.get("--dcp-size", 1) > 1:
        raise at.wrong("--dcp-size", "context parallelism of decodes is not modelled with SGLang's rules")
    if tp % ranks:
        raise ConfigError(
            f"--from: --tp-size {tp}: must be a multiple of {ranks}, the groups of the attention"
        )
    own.put("tensor_parallel_size", tp // ranks)
    if ranks > 1:
        own.put("attention_data_parallel_size", ranks)
    if at.get("--pp-size", 1) > 1:
        own.put("pipeline_parallel_size", at.get("--pp-size"))
    if at.get("--ep-size", 1) > 1:
        own.put("expert_parallel_size", at.get("--ep-size"))
    if dp > 1:
        _copies(own, dp)
        if at.get("--load-balance-method") == "round_robin":
            own.put("routing", "round_robin")
    if at.get("--load-balance-method") not in (None, "auto", "round_robin", "total_requests"):
        own.unpriced.append(("--load-balance-method", "requests go to the replica with the fewest"))
    if at.get("--context-length") is not None:
        own.put("engine.max_model_len", at.get("--context-length"))
    if (chunk := at.get("--chunked-prefill-size")) is not None:
        if chunk == -1:
            own.put("batching.enable_chunked_prefill", False)
        else:
            own.put("engine.max_num_batched_tokens", chunk)
    pages = at.get("--page-size", 1)
    if at.get("--enable-hierarchical-cache"):
        _hicache(at, own)
    elif at.get("--disable-radix-cache"):
        own.put("caching", "paged")
        own.put("caching.block_size", pages)
    elif at.get("--page-size") is not None:
        own.put("caching.block_size", pages)
    if (eviction := at.get("--radix-eviction-policy")) is not None and "caching" not in own.settings:
        if eviction not in ("lru", "lfu", "priority"):
            raise at.wrong("--radix-eviction-policy", "is not modelled; use lru, lfu or priority")
        own.put("caching.eviction", eviction)
    if (most := at.get("--max-total-tokens")) is not None:
        own.put("engine.num_kv_blocks", most // pages)
    _sglang_order(at, own)
    if at.get("--disable-overlap-schedule"):
        own.put("engine.host.overlapped", False)
    _sglang_graphs(at, own)
    if at.get("--moe-runner-backend") not in (None, "auto"):
        if at.get("--moe-runner-backend") == "marlin":
            own.put("engine.kernels.moe_backend", "marlin")
        else:
            own.unpriced.append(("--moe-runner-backend", table("sglang")["--attention-backend"].detail))
    if at.get("--enable-eplb") or at.get("--ep-num-redundant-experts"):
        _eplb(at, own, {"num_redundant_experts": at.get("--ep-num-redundant-experts", 0)})
    if (overridden := at.get("--json-model-override-args")) is not None and overridden != "{}":
        _hf_overrides(at, own, "--json-model-override-args", overridden)
    _sglang_drafts(at, own)


def _sglang_order(at: Context, own: Translation) -> None:
    policy = at.get("--schedule-policy", "fcfs")
    if at.get("--enable-priority-scheduling"):
        if not at.get("--schedule-low-priority-values-first"):
            raise ConfigError(
                "--from: --enable-priority-scheduling: larger numbers go first, and here smaller ones do; add "
                "--schedule-low-priority-values-first if the traffic's numbers are of that kind"
            )
        own.put("scheduling", "priority")
    elif policy == "lpm":
        own.put("scheduling", "longest_prefix")
    elif policy != "fcfs":
        raise at.wrong("--schedule-policy", "is not modelled; use fcfs or lpm")


def _sglang_graphs(at: Context, own: Translation) -> None:
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
        own.put("engine.cuda_graphs.max_capture_size", largest)


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


def _sglang_drafts(at: Context, own: Translation) -> None:
    algorithm = at.get("--speculative-algorithm")
    if algorithm is None:
        return
    known = {
        "EAGLE": "eagle",
        "EAGLE3": "eagle3",
        "NEXTN": "mtp",
        "STANDALONE": "draft_model",
        "NGRAM": "ngram",
    }
    name = str(algorithm).upper()
    if name not in known:
        raise at.wrong("--speculative-algorithm", f"is not modelled; {suggest(name, known)}")
    method = known[name]
    if method == "eagle" and at.get("--speculative-draft-model-path") is None:
        method = "mtp"  # SGLang drafts with the model's own layers then
    own.put("speculation", method)
    draft = at.get("--speculative-draft-model-path")
    if method == "draft_model":
        _draft_model(at, own, draft, "--speculative-draft-model-path")
    elif draft and method in ("eagle", "eagle3"):
        own.put("speculation.model", _text(draft))
    steps, tokens = at.get("--speculative-num-steps"), at.get("--speculative-num-draft-tokens")
    if at.get("--speculative-eagle-topk", 1) > 1:
        raise at.wrong(
            "--speculative-eagle-topk",
            "a tree is set by the group speculation/tree beside --from; use 1 for a chain",
        )
    if method != "ngram" and steps is not None:
        own.put("speculation.num_speculative_tokens", steps)
    elif tokens is not None:
        own.put("speculation.num_speculative_tokens", max(1, tokens - 1))


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
TRTLLM_NONE = [
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
    "max_input_len",
    "reasoning_parser",
    "guided_decoding_backend",
    "postprocess_tokenizer_dir",
    "fail_fast_on_attention_window_too_large",
    "skip_tokenizer_init",
    "tokenizer_mode",
    "custom_tokenizer",
    "telemetry_config",
    "video_pruning_rate",
    "mm_encoder_only",
]
TRTLLM_UNPRICED = [
    "attn_backend",
    "allreduce_strategy",
    "enable_autotuner",
    "enable_layerwise_nvtx_marker",
    "torch_compile_config",
    "moe_config",
    "moe_backend",
    "nvfp4_gemm_config",
    "sampler_type",
    "disable_flashinfer_sampling",
    "enable_trtllm_sampler",
    "enable_min_latency",
    "stream_interval",
    "num_postprocess_workers",
    "env_overrides",
    "use_torch_sampler",
    "dtype",
    "enable_lm_head_tp_in_adp",
    "batched_logits_processor",
    "autotuner_enabled",
    "use_low_precision_moe_combine",
]
TRTLLM_REFUSED = {
    "cache_transceiver_config": "prefill and decode in servers of their own are set by pools=disaggregated",
    "disagg_cluster": "prefill and decode in servers of their own are set by pools=disaggregated",
    "lora_config": "LoRA is set by the group adapters, with traffic that names adapters",
    "enable_lora": "LoRA is set by the group adapters, with traffic that names adapters",
    "sparse_attention_config": "it is not modelled",
    "cp_config": "it is not modelled",
    "moe_cluster_parallel_size": "clusters of experts are not modelled",
    "moe_tensor_parallel_size": "set expert_parallel_size beside --from",
    "quant_config": "give model.weights beside --from",
    "kv_connector_config": "KV in host memory is set by caching=tiered",
}


def _tensorrt_llm(at: Context, own: Translation) -> None:
    options = _trtllm_file(at, own)
    values = at.found.values
    if values.get("--backend", "pytorch") not in ("pytorch", "_autodeploy"):
        raise at.wrong("--backend", "only the PyTorch backend is modelled")
    if values.get("--max-beam-width", 1) != 1:
        raise at.wrong("--max-beam-width", "beams are set by the traffic (workload.beam_width); use 1")
    if values.get("--context-parallel-size", 1) != 1:
        raise at.wrong("--context-parallel-size", "is not modelled with TensorRT-LLM's rules")
    _formats(at, own)
    tp = values.get("--tensor-parallel-size", 1)
    ranks = tp if values.get("--enable-attention-dp") else 1
    own.put("tensor_parallel_size", tp // ranks)
    if ranks > 1:
        own.put("attention_data_parallel_size", ranks)
    if values.get("--pipeline-parallel-size", 1) > 1:
        own.put("pipeline_parallel_size", values["--pipeline-parallel-size"])
    if (values.get("--moe-expert-parallel-size") or 1) > 1:
        own.put("expert_parallel_size", values["--moe-expert-parallel-size"])
    limits = {"--max-batch-size": "engine.max_num_seqs", "--max-num-tokens": "engine.max_num_batched_tokens"}
    _times(at, own, limits, ranks)
    _trtllm_policies(at, own, options)
    _trtllm_kv(at, own, dict(options.get("kv_cache_config") or {}))
    graphs = options.get("cuda_graph_config", {})
    if graphs is None:
        own.put("engine.cuda_graphs.enabled", False)
    else:
        sizes = graphs.get("batch_sizes") or [graphs.get("max_batch_size") or 128]
        own.put("engine.cuda_graphs.max_capture_size", max(map(int, sizes)))
    if options.get("disable_overlap_scheduler"):
        own.put("engine.host.overlapped", False)
    _trtllm_drafts(at, own, options.get("speculative_config"))


def _trtllm_file(at: Context, own: Translation) -> dict[str, Any]:
    """Reads the YAML file into flags; returns its other keys, which have no flag."""
    name = at.get("--config")
    content = file_of(at, "--config", str(name)) if name is not None else {}
    nested = content.pop("pytorch_backend_config", None)
    content = {**content, **(nested if isinstance(nested, Mapping) else {})}
    rest: dict[str, Any] = {}
    known = table("tensorrt_llm")
    handled = (
        "kv_cache_config",
        "cuda_graph_config",
        "scheduler_config",
        "speculative_config",
        "disable_overlap_scheduler",
        "attention_dp_config",
        "batch_wait_timeout_iters",
        "batch_wait_max_tokens_ratio",
        "batch_wait_timeout_ms",
    )
    for key, value in content.items():
        where = f"{name}: {key}"
        if key in TRTLLM_KEYS:
            flag = TRTLLM_KEYS[key]
            at.found.values[flag] = typed(known[flag], where, value)  # the file wins over the command
            at.found.written[flag] = where
            if known[flag].detail:
                own.put(known[flag].detail, at.found.values[flag])
        elif key in TRTLLM_NONE:
            own.without_effect.append(key)
        elif key in TRTLLM_UNPRICED:
            own.unpriced.append((key, "it is priced as the engine's own choice"))
        elif key in TRTLLM_REFUSED:
            if value:
                raise ConfigError(
                    f"--from: {where}: {TRTLLM_REFUSED[key]}; leave the key out to go on without it"
                )
        elif key == "use_cuda_graph":
            rest.setdefault("cuda_graph_config", {} if value else None)
        elif key in ("cuda_graph_batch_sizes", "cuda_graph_max_batch_size", "cuda_graph_padding_enabled"):
            if isinstance(graphs := rest.setdefault("cuda_graph_config", {}), dict):
                graphs[key.removeprefix("cuda_graph_")] = value
        elif key in handled:
            rest[key] = value
        else:
            names = (*TRTLLM_KEYS, *TRTLLM_NONE, *TRTLLM_UNPRICED, *TRTLLM_REFUSED, *handled)
            best = suggest(str(key), names).partition("; allowed")[0].partition("allowed")[0]
            raise ConfigError(f"--from: {where}: trtllm-serve has no such key; {best or 'leave it out'}")
    for key in ("kv_cache_config", "cuda_graph_config", "scheduler_config", "attention_dp_config"):
        if rest.get(key) is not None and not isinstance(rest[key], Mapping):
            raise ConfigError(f"--from: {name}: {key}: must be a mapping")
    return rest


def _trtllm_policies(at: Context, own: Translation, options: Mapping[str, Any]) -> None:
    """Sets the capacity scheduler; without one, the server reserves KV for the longest possible output."""
    scheduler = dict(options.get("scheduler_config") or {})
    policy = str(scheduler.pop("capacity_scheduler_policy", "GUARANTEED_NO_EVICT")).upper()
    policies = {"GUARANTEED_NO_EVICT": "inflight", "MAX_UTILIZATION": "inflight_max_utilization"}
    if policy not in policies:
        raise ConfigError(
            f"--from: scheduler_config.capacity_scheduler_policy: {policy} is not modelled; use "
            f"{' or '.join(policies)}"
        )
    own.put("batching", policies[policy])
    own.put("batching.enable_chunked_context", bool(at.found.values.get("--enable-chunked-prefill", False)))
    for key in ("batch_wait_timeout_iters", "batch_wait_max_tokens_ratio"):
        if options.get(key):
            own.put(f"batching.{key}", options[key])
    if options.get("batch_wait_timeout_ms"):
        raise ConfigError("--from: batch_wait_timeout_ms: give batch_wait_timeout_iters in its place")
    if scheduler or options.get("attention_dp_config"):
        own.unpriced.append(("scheduler_config, attention_dp_config", "the scheduler has its usual settings"))


FREE_SHARE = 0.6
"""Share of the memory that weights and activations leave free, in the profile tensorrt_llm: KV gets 0.9 of it,
which is 0.94 of all memory with weights and activations."""


def _trtllm_kv(at: Context, own: Translation, config: dict[str, Any]) -> None:
    values = at.found.values
    share = config.pop("free_gpu_memory_fraction", None) or values.get("--free-gpu-memory-fraction")
    if share is not None:
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise ConfigError(f"--from: free_gpu_memory_fraction {share}: must be between 0 and 1")
        own.put("engine.gpu_memory_utilization", f"{1 - FREE_SHARE * (1 - share):.4g}")
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
        own.put("engine.num_kv_blocks", int(most) // size)
    if config:
        own.unpriced.append(
            (f"kv_cache_config ({', '.join(map(str, config))})", "the cache has its usual settings")
        )


def _trtllm_drafts(at: Context, own: Translation, config: Any) -> None:
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
            f"--from: speculative_config.decoding_type {kind}: is not modelled; {suggest(kind, known)}"
        )
    own.put("speculation", method)
    draft = config.get("speculative_model_dir") or config.get("speculative_model")
    if method == "draft_model":
        _draft_model(at, own, draft, "--config")
    elif draft and method == "eagle3":
        own.put("speculation.model", _text(draft))
    if length := config.get("max_draft_len") or config.get("num_nextn_predict_layers"):
        own.put("speculation.num_speculative_tokens", length)


BY_ENGINE: Mapping[Engine, Callable[[Context, Translation], None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
}
