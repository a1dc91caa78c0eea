"""Writes launch commands of a replica for vLLM, SGLang and TensorRT-LLM, and notes on what has no flag.

The flags are those of `vllm serve` (0.2x and later, the v1 engine), of `python -m sglang.launch_server` (0.5)
and of `trtllm-serve` with its YAML file. Sources: docs.vllm.ai, engine arguments; docs.sglang.io, server
arguments and speculative decoding; nvidia.github.io/TensorRT-LLM, trtllm-serve. `--from` reads them back
(`experiments.app.launch_lines.line`). vLLM drafts chains; a tree of SGLang has --speculative-num-steps
levels.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import yaml

from hwmodels.hf.quantization import ENGINE_NAMES
from hwmodels.iterations.memory import MemoryProfile
from hwmodels.model.weights import kind_of
from hwmodels.speculation.draft import ModelDraft
from policies.batching.chunked import Chunked
from policies.batching.inflight import EQUAL_PROGRESS, InFlight
from policies.batching.sglang import Sglang
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.scheduling.fcfs import Fcfs, QueueOrder
from policies.scheduling.longest_prefix import LongestPrefix
from policies.scheduling.priority import Priority
from policies.speculation import DraftLengthTraits, Proposer, num_places
from policies.speculation.draft_lengths import ByBatchSize, Fixed, NoDrafts
from policies.speculation.proposers import Ngram, Suffix
from policies.user_code import name_of, traits_of
from sim.setup.scenario import Scenario

VLLM_WEIGHTS = {
    "fp8": ("fp8", ""),
    "int4_wo": ("awq", "a checkpoint quantised with AWQ (gptq: with GPTQ)"),
    "nvfp4": ("modelopt_fp4", "a checkpoint quantised with ModelOpt"),
    "mxfp4": ("mxfp4", "a checkpoint in MXFP4, such as gpt-oss"),
    "fp8_block": ("fp8", "a checkpoint with block-wise FP8, such as DeepSeek-V3"),
    "fp8_wo": ("compressed-tensors", "a W8A16 FP8 checkpoint of llm-compressor"),
    "mxfp8": ("mxfp8", ""),
    "nvfp4_wo": ("modelopt_fp4", "a checkpoint in W4A16_NVFP4"),
    "int4_fp8": ("compressed-tensors", "a W4A8 FP8 checkpoint of llm-compressor"),
    "mxfp4_mxfp4": ("quark", "a checkpoint quantised with Quark"),
    "int8": ("compressed-tensors", "a W8A8 int8 checkpoint of llm-compressor"),
    "int8_wo": ("compressed-tensors", "a W8A16 checkpoint of llm-compressor"),
}
"""Weight format -> the value of --quantization, and the checkpoint that it needs."""
SGLANG_WEIGHTS = VLLM_WEIGHTS | {"int8": ("w8a8_int8", "a W8A8 int8 checkpoint")}

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Data type -> the value of --dtype."""

VLLM_METHODS = ("draft_model", "ngram", "suffix", "medusa", "eagle", "eagle3", "mtp")
SGLANG_ALGORITHMS = {
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "ngram": "NGRAM",
}
"""Method -> the value of --speculative-algorithm."""
OWN_CHECKPOINT = ("draft_model", "medusa", "eagle", "eagle3")
"""Methods whose draft has a checkpoint of its own."""


class Replica(Protocol):
    """A replica, and the number formats that were set for it."""

    @property
    def scenario(self) -> Scenario: ...

    @property
    def asked(self) -> Mapping[str, str | None]:
        """Weights, moe_weights, kv_cache_dtype, dtype, quantization_config, as they were set; else None."""


class Launch(NamedTuple):
    """Command, and notes on the settings that it cannot express."""

    command: str
    notes: list[str]


def vllm_launch(replica: Replica) -> Launch:
    """Returns the `vllm serve` command of one replica."""
    scenario, notes = replica.scenario, list[str]()
    flags = list(_vllm_flags(scenario))
    flags += _quantised(replica, VLLM_WEIGHTS, "fp8", notes)
    flags += _vllm_speculation(scenario, notes)
    if not isinstance(scenario.batching, Chunked):
        notes.append(
            f"batching={name_of(scenario.batching)}: vLLM has no flag for it; it uses chunked prefill"
        )
    if isinstance(scenario.scheduling, Priority):
        flags.append("--scheduling-policy priority")
    elif not isinstance(scenario.scheduling, Fcfs):
        notes.append(f"scheduling={name_of(scenario.scheduling)}: vLLM has no flag for it")
    if not isinstance(scenario.caching, Paged | PrefixCaching):
        notes.append(f"caching={name_of(scenario.caching)}: vLLM has no flag for it")
    words = [*_partition("VLLM", scenario), "vllm", "serve", _model(scenario)]
    return Launch(_joined(words, flags), notes + _common_notes(scenario))


def _vllm_flags(scenario: Scenario) -> Iterator[str]:
    engine, layout = scenario.engine, scenario.layout
    # vLLM's tensor parallel size counts the devices that share the KV of a sequence in decode, too.
    yield f"--tensor-parallel-size {layout.tensor_parallel_size * layout.context_parallel_size}"
    for flag, size in (
        ("pipeline-parallel-size", layout.pipeline_parallel_size),
        ("data-parallel-size", layout.attention_data_parallel_size),
        ("decode-context-parallel-size", layout.context_parallel_size),
    ):
        if size > 1:
            yield f"--{flag} {size}"
    if layout.expert_parallel_size > 1:
        yield "--enable-expert-parallel"
    ranks = layout.attention_data_parallel_size  # each has vLLM's limits for itself
    yield f"--max-num-seqs {max(1, engine.max_num_seqs // ranks)}"
    yield f"--max-num-batched-tokens {max(1, scenario.max_num_batched_tokens // ranks)}"
    yield f"--gpu-memory-utilization {_share(scenario, 'vllm'):g}"
    if engine.max_model_len is not None:
        yield f"--max-model-len {engine.max_model_len}"
    if engine.num_kv_blocks is not None:
        yield f"--num-gpu-blocks-override {engine.num_kv_blocks // ranks}"
    if isinstance(scenario.batching, Chunked):
        yield (
            "--enable-chunked-prefill"
            if scenario.batching.enable_chunked_prefill
            else ("--no-enable-chunked-prefill")
        )
        if scenario.batching.long_prefill_token_threshold:
            yield f"--long-prefill-token-threshold {scenario.batching.long_prefill_token_threshold}"
    finds_prefixes = isinstance(scenario.caching, PrefixCaching | Radix)
    yield "--enable-prefix-caching" if finds_prefixes else "--no-enable-prefix-caching"
    if isinstance(scenario.caching, Paged | PrefixCaching):
        yield f"--block-size {scenario.caching.block_size}"
    yield "--async-scheduling" if scenario.host.overlapped else "--no-async-scheduling"
    if not engine.cuda_graphs.enabled:
        yield "--enforce-eager"
    elif engine.cuda_graphs.mode == "piecewise":
        yield """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'"""
    if engine.kv_cache_memory_bytes is not None:
        yield f"--kv-cache-memory-bytes {int(engine.kv_cache_memory_bytes)}"


def sglang_launch(replica: Replica) -> Launch:
    """Returns the `python -m sglang.launch_server` command of one replica."""
    scenario, notes = replica.scenario, list[str]()
    flags = list(_sglang_flags(scenario))
    flags += _quantised(replica, SGLANG_WEIGHTS, "fp8_e4m3", notes)
    flags += _sglang_speculation(scenario, notes)
    if isinstance(scenario.scheduling, LongestPrefix):
        flags.append("--schedule-policy lpm")
    elif isinstance(scenario.scheduling, Fcfs | QueueOrder):
        flags.append("--schedule-policy fcfs")
    elif isinstance(scenario.scheduling, Priority):
        flags += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
    else:
        notes.append(f"scheduling={name_of(scenario.scheduling)}: SGLang has no flag for it")
    if not isinstance(scenario.batching, Chunked | PrefillFirst | Sglang):
        notes.append(f"batching={name_of(scenario.batching)}: SGLang has no flag for it")
    if isinstance(scenario.batching, Chunked) and scenario.batching.long_prefill_token_threshold:
        notes.append("batching.long_prefill_token_threshold: SGLang has no flag for it")
    if not isinstance(scenario.caching, Paged | PrefixCaching | Radix):
        notes.append(f"caching={name_of(scenario.caching)}: SGLang has no flag for it")
    if scenario.layout.context_parallel_size > 1:
        notes.append("context_parallel_size: its flags depend on the model; see SGLang's documentation")
    command = [*_partition("SGLANG", scenario), "python", "-m", "sglang.launch_server"]
    command += ["--model-path", _model(scenario)]
    return Launch(_joined(command, flags), notes + _common_notes(scenario))


def _sglang_batching_flags(scenario: Scenario) -> Iterator[str]:
    batching, size = scenario.batching, scenario.max_num_batched_tokens
    if isinstance(batching, Sglang):
        chunk = size if batching.enable_chunked_prefill else -1
        yield f"--chunked-prefill-size {chunk} --max-prefill-tokens {batching.max_prefill_tokens}"
        yield f"--schedule-conservativeness {batching.schedule_conservativeness:g}"
        if batching.mixed_chunk:
            yield "--enable-mixed-chunk"
    elif isinstance(batching, Chunked) and batching.enable_chunked_prefill:
        yield f"--chunked-prefill-size {size} --enable-mixed-chunk"
    else:
        yield f"--chunked-prefill-size -1 --max-prefill-tokens {size}"


def _sglang_flags(scenario: Scenario) -> Iterator[str]:
    engine, layout = scenario.engine, scenario.layout
    # SGLang's tensor parallel size counts all devices of a stage, those of data-parallel attention included.
    yield f"--tensor-parallel-size {layout.stage_size}"
    if layout.pipeline_parallel_size > 1:
        yield f"--pipeline-parallel-size {layout.pipeline_parallel_size}"
        if engine.pp_max_micro_batch_size:
            yield f"--pp-max-micro-batch-size {engine.pp_max_micro_batch_size}"
    if layout.attention_data_parallel_size > 1:
        yield f"--data-parallel-size {layout.attention_data_parallel_size} --enable-dp-attention"
        if engine.load_balance_method is not None:
            yield f"--load-balance-method {engine.load_balance_method}"
    if layout.expert_parallel_size > 1:
        yield f"--expert-parallel-size {layout.expert_parallel_size}"
    yield f"--max-running-requests {engine.max_num_seqs}"
    yield from _sglang_batching_flags(scenario)
    yield f"--mem-fraction-static {_share(scenario, 'sglang'):g}"
    if engine.max_model_len is not None:
        yield f"--context-length {engine.max_model_len}"
    if engine.num_kv_blocks is not None:
        num_blocks = engine.num_kv_blocks // layout.attention_data_parallel_size
        yield f"--max-total-tokens {num_blocks * scenario.caching.block_size}"
    if isinstance(scenario.caching, Paged):
        yield "--disable-radix-cache"
    if scenario.caching.block_size > 1:
        yield f"--page-size {scenario.caching.block_size}"
    if not scenario.host.overlapped:
        yield "--disable-overlap-schedule"
    if not engine.cuda_graphs.enabled:
        yield "--disable-cuda-graph"


def _share(scenario: Scenario, rule: str) -> float:
    """Returns the share of memory with which an engine of this rule has the simulated replica's KV memory."""
    engine, layout = scenario.engine, scenario.layout
    if engine.memory_profile == rule:
        return scenario.memory_share
    plan, profile = scenario.plan_memory(), MemoryProfile(rule=rule)
    needed = plan.weights_bytes + plan.adapter_bytes + plan.draft_bytes + plan.window_and_state_bytes
    needed += plan.kv_bytes + profile.runtime_bytes(scenario.hardware, layout)
    needed += profile.activation_bytes(
        scenario.model, layout, scenario.max_num_batched_tokens, engine.max_num_seqs
    )
    needed += profile.cuda_graph_bytes(scenario.model, engine.cuda_graphs, engine.max_num_seqs)
    return min(round(needed / profile.total_bytes(scenario.hardware, layout), 3), 0.99)


def tensorrt_llm_launch(replica: Replica) -> Launch:
    """Returns the `trtllm-serve` command of one replica, after one that writes its YAML file."""
    scenario, notes = replica.scenario, list[str]()
    engine, layout = scenario.engine, scenario.layout
    ranks = layout.attention_data_parallel_size
    flags = [f"--tp_size {layout.tensor_parallel_size * ranks}"]
    if layout.pipeline_parallel_size > 1:
        flags.append(f"--pp_size {layout.pipeline_parallel_size}")
    if layout.expert_parallel_size > 1:
        flags.append(f"--ep_size {layout.expert_parallel_size}")
    flags += [
        f"--max_batch_size {max(1, engine.max_num_seqs // ranks)}",
        f"--max_num_tokens {max(1, scenario.max_num_batched_tokens // ranks)}",
    ]
    if engine.max_model_len is not None:
        flags.append(f"--max_seq_len {engine.max_model_len}")
    options = _trtllm_options(replica, notes)
    batching = scenario.batching
    if getattr(batching, "enable_chunked_context", getattr(batching, "enable_chunked_prefill", False)):
        flags.append("--enable_chunked_prefill")
    if not isinstance(scenario.scheduling, Fcfs):
        notes.append(f"scheduling={name_of(scenario.scheduling)}: TensorRT-LLM has no flag for it")
    if layout.pp_layer_partition is not None:
        notes.append("pp_layer_partition: TensorRT-LLM's PyTorch backend has no flag for it")
    if layout.context_parallel_size > 1:
        notes.append("context_parallel_size: its flags depend on the model; see TensorRT-LLM's documentation")
    if ranks > 1 and layout.tensor_parallel_size > 1:
        notes.append("tensor_parallel_size: with attention data parallelism, attention is not cut as well")
    weights = replica.asked["weights"]
    if weights is not None and weights not in ("bf16", "fp16", "fp32"):
        notes.append(
            f"model.weights={weights}: replace the model's name by that of a checkpoint in this format"
        )
    notes += _of_another_checkpoint(replica)
    flags.append("--config options.yaml")
    file = yaml.safe_dump(options, sort_keys=False).rstrip("\n")
    command = _joined(["trtllm-serve", _model(scenario)], flags)
    return Launch(f"cat > options.yaml <<'EOF'\n{file}\nEOF\n{command}", notes + _common_notes(scenario))


def _trtllm_options(replica: Replica, notes: list[str]) -> dict[str, Any]:
    """Returns the keys of the YAML file, and adds notes on what it cannot express."""
    scenario = replica.scenario
    engine, caching, batching = scenario.engine, scenario.caching, scenario.batching
    kv: dict[str, Any] = {
        "enable_block_reuse": isinstance(caching, PrefixCaching | Radix),
        "tokens_per_block": caching.block_size,
        "free_gpu_memory_fraction": _share(scenario, "tensorrt_llm"),
    }
    if engine.num_kv_blocks is not None:
        num_blocks = engine.num_kv_blocks // scenario.layout.attention_data_parallel_size
        kv["max_tokens"] = num_blocks * caching.block_size
    if replica.asked["kv_cache_dtype"] == "fp8":
        kv["dtype"] = "fp8"
    graphs = engine.cuda_graphs
    options: dict[str, Any] = {
        "kv_cache_config": kv,
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": graphs.max_capture_size}
        if graphs.enabled
        else None,
    }
    if isinstance(batching, InFlight):
        policy = batching.capacity_scheduler_policy.upper()
        options["scheduler_config"] = {"capacity_scheduler_policy": policy}
        if batching.context_chunking_policy == EQUAL_PROGRESS:
            options["scheduler_config"]["context_chunking_policy"] = EQUAL_PROGRESS.upper()
        if batching.batch_wait_timeout_iters:
            options["batch_wait_timeout_iters"] = batching.batch_wait_timeout_iters
            options["batch_wait_max_tokens_ratio"] = batching.batch_wait_max_tokens_ratio
    else:
        notes.append(f"batching={name_of(batching)}: TensorRT-LLM has no flag for it")
    if not isinstance(caching, Paged | PrefixCaching):
        notes.append(f"caching={name_of(caching)}: TensorRT-LLM has no flag for it")
    if scenario.layout.attention_data_parallel_size > 1:
        options["enable_attention_dp"] = True
    if not scenario.host.overlapped:
        options["disable_overlap_scheduler"] = True
    if scenario.speculation is not None:
        notes.append(f"speculation={scenario.speculation.method}: add its speculative_config to options.yaml")
    return options


def _quantised(
    replica: Replica, formats: dict[str, tuple[str, str]], fp8_kv: str, notes: list[str]
) -> list[str]:
    """Returns the flags of the number formats that were set, and adds notes on those without a flag."""
    flags = []
    weights, kv = replica.asked["weights"], replica.asked["kv_cache_dtype"]
    kind = None if weights is None else kind_of(weights)
    if kind is not None and kind not in formats and (meaning := ENGINE_NAMES.get(kind)):
        flags.append(f"--quantization {kind}")
        if not meaning.is_online:
            notes.append(f"model.weights={weights}: needs a checkpoint that is quantised so")
    elif kind in formats:
        value, needs = formats[kind]
        flags.append(f"--quantization {value}")
        if needs:
            notes.append(f"model.weights={weights}: replace the model's name by that of {needs}")
    elif weights is not None and weights not in ("bf16", "fp16", "fp32"):
        notes.append(f"model.weights={weights}: has no flag; it needs a checkpoint in this format")
    if replica.asked["moe_weights"] is not None:
        notes.append(
            f"model.moe_weights={replica.asked['moe_weights']}: has no flag; it depends on the checkpoint"
        )
    notes += _of_another_checkpoint(replica)
    if (dtype := replica.asked["dtype"]) is not None:
        flags.append(f"--dtype {DTYPES[dtype]}")
    if kv == "fp8":
        flags.append(f"--kv-cache-dtype {fp8_kv}")
    elif kv in ("bf16", "fp16"):
        notes.append(
            f"model.kv_cache_dtype={kv}: the default (dtype of the activations), which needs no flag"
        )
    elif kv is not None:
        notes.append(f"model.kv_cache_dtype={kv}: has no flag")
    return flags


def _of_another_checkpoint(replica: Replica) -> list[str]:
    """Returns a note if the formats are those of a checkpoint that the model's name does not name."""
    if replica.asked["quantization_config"] is None or replica.asked["weights"] is not None:
        return []
    return [
        "model.quantization_config: replace the model's name by that of the checkpoint with these formats"
    ]


def _common_notes(scenario: Scenario) -> list[str]:
    notes = []
    if not scenario.model.source:
        notes.append(f"{scenario.model.name}: has no published weights; replace it by the path of your model")
    if scenario.layout.sequence_parallel:
        notes.append("sequence_parallel: has no flag; it is a compiler pass")
    if scenario.adapters is not None:
        notes.append("adapters: add the server's LoRA flags (--enable-lora, --max-loras)")
    if scenario.prediction is not None:
        notes.append(
            f"prediction={name_of(scenario.prediction)}: has no flag; engines do not predict output lengths"
        )
    return notes


def _partition(engine: str, scenario: Scenario) -> list[str]:
    """Returns the variable with the layers of each pipeline stage, if they are set."""
    layers = scenario.layout.pp_layer_partition
    return [] if layers is None else [f"{engine}_PP_LAYER_PARTITION={','.join(map(str, layers))}"]


def _model(scenario: Scenario) -> str:
    return scenario.model.source or scenario.model.name


def _joined(command: list[str], flags: list[str]) -> str:
    """Joins the command with one flag per line, so that it can be pasted into a shell."""
    return " \\\n    ".join([shlex.join(command), *flags])


def _vllm_speculation(scenario: Scenario, notes: list[str]) -> list[str]:
    """Returns the flag of speculation, if there is one, and adds notes on what it cannot express."""
    proposer = scenario.speculation
    if proposer is None:
        return []
    if proposer.method not in VLLM_METHODS:
        notes.append(f"speculation={proposer.method}: vLLM does not have it")
        return []
    if (
        isinstance(scenario.draft_length, NoDrafts)
        or traits_of(scenario.draft_length, DraftLengthTraits).num_tokens == 0
    ):
        notes.append("draft_length: nothing is drafted, so there is no flag")
        return []
    if proposer.tree is not None:
        notes.append(
            "speculation.tree: vLLM has no flag for it; it drafts a chain as long as the tree is deep"
        )
    config: dict[str, Any] = {"method": proposer.method}
    if proposer.method in OWN_CHECKPOINT:
        config["model"] = _checkpoint(proposer, notes)
    config["num_speculative_tokens"] = num_places(proposer)
    config |= _own_fields(proposer) | _vllm_length(scenario, notes)
    return [f"--speculative-config '{json.dumps(config)}'"]


def _sglang_speculation(scenario: Scenario, notes: list[str]) -> list[str]:
    """Returns the flags of speculation, and adds notes on what they cannot express."""
    proposer = scenario.speculation
    if proposer is None:
        return []
    algorithm = SGLANG_ALGORITHMS.get(proposer.method)
    if algorithm is None:
        notes.append(f"speculation={proposer.method}: SGLang does not have it")
        return []
    flags = [f"--speculative-algorithm {algorithm}"]
    if proposer.method in OWN_CHECKPOINT:
        flags.append(f"--speculative-draft-model-path {_checkpoint(proposer, notes)}")
    if proposer.method != "ngram":
        flags.append(
            f"--speculative-num-steps {num_places(proposer)} --speculative-eagle-topk {_widest(proposer)}"
        )
    flags.append(f"--speculative-num-draft-tokens {proposer.num_speculative_tokens + 1}")
    if not isinstance(scenario.draft_length, Fixed):
        notes.append(f"draft_length={name_of(scenario.draft_length)}: SGLang has no flag for it")
    return flags


def _widest(proposer: Proposer) -> int:
    """Returns the largest number of continuations of a node."""
    return 1 if proposer.tree is None else max(proposer.tree.ranks) + 1


def _checkpoint(proposer: Proposer, notes: list[str]) -> str:
    """Returns the name of the draft's checkpoint, or a placeholder with a note."""
    draft = proposer.draft
    found = draft.model.source if isinstance(draft, ModelDraft) else getattr(proposer, "model", None)
    if found:
        return str(found)
    notes.append(
        f"speculation={proposer.method}: no checkpoint of its draft is known for this model; replace "
        "DRAFT, or set speculation.model"
    )
    return "DRAFT"


def _own_fields(proposer: Proposer) -> dict[str, Any]:
    """Returns the fields that only this method has."""
    fields: dict[str, Any] = {}
    if isinstance(proposer, Ngram):
        fields = {"prompt_lookup_max": proposer.prompt_lookup_max, "prompt_lookup_min": proposer.min_ngram}
    elif isinstance(proposer, Suffix):
        fields = {
            name: getattr(proposer, name)
            for name in (
                "suffix_decoding_max_tree_depth",
                "suffix_decoding_max_cached_requests",
                "suffix_decoding_max_spec_factor",
                "suffix_decoding_min_token_prob",
            )
        }
    elif getattr(proposer, "disable_eagle_block_drop", False):
        fields = {"disable_eagle_block_drop": True}
    size = getattr(proposer.draft, "tensor_parallel_size", None)
    return fields if size is None else fields | {"draft_tensor_parallel_size": size}


def _vllm_length(scenario: Scenario, notes: list[str]) -> dict[str, Any]:
    """Returns the fields for the number of draft tokens, and adds a note for a policy without a field."""
    policy = scenario.draft_length
    if isinstance(policy, Fixed):
        return {} if policy.num_tokens is None else {"num_speculative_tokens": policy.num_tokens}
    if isinstance(policy, ByBatchSize):
        ranges = [list(each) for each in policy.num_speculative_tokens_per_batch_size]
        return {"num_speculative_tokens_per_batch_size": ranges}
    notes.append(
        f"draft_length={name_of(policy)}: vLLM has no flag for it; it always drafts as many tokens as it can"
    )
    return {}
