"""Other names of settings and models that are accepted, with a note that says the name that is used.

- Renamed settings and groups: their old names are accepted for one version.
- Abbreviations that mean the same as one setting: `tp` is `tensor_parallel_size`.
- Hugging Face ids of models: `model=meta-llama/Llama-3.1-8B-Instruct`, see below.
- Names of choices in other letters or by the field's other words: `engine=TensorRT-LLM`, `scheduling=sjf`,
  `batching=continuous`.
- Names of devices that leave out the series, and those that nvidia-smi prints: `hardware=a6000`,
  `hardware='NVIDIA A100-SXM4-80GB'`.

Names that could mean several settings are not accepted; `ADVICE` says what to write in their place.

One idea in more than 400 lines: for a name from elsewhere, such as a Hugging Face id, the choice of the group
`model` is found in this order: the id in a choice's `source`, up to case; then the same model under another
name: without the organisation and words of quantisation (`AWQ`, `FP8`), which become the format of the
weights, and up to punctuation; then also without words of training (`Instruct`, `Base`); then also without
dates. Versions and sizes always count: Mistral-7B-v0.1 has a sliding window, v0.3 has none. Other names are
equal only if `EQUAL` lists them. A folder of a download names its repository:
`models--ORG--NAME/snapshots/...`, `ORG__NAME` and `ORG_NAME`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.config_groups import CONFIG_DIR, first_comment
from experiments.app.settings.override import as_value
from sim.settings.errors import ConfigError

NEW_NAMES = {"handover": "kv_transfer", "troubles": "failures"}
"""Old name -> new name of keys of the root and of groups."""

ALIASES = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "ep_size": "expert_parallel_size",
    **dict.fromkeys(
        (
            *("rate", "qps", "rps", "request_rate"),
            *("workload.rate", "workload.qps", "workload.rps", "workload.request_rate"),
        ),
        "workload.arrivals.rate_per_s",
    ),
    "num_prompts": "workload.num_requests",
    "num_requests": "workload.num_requests",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_cache_dtype": "model.kv_cache_dtype",
    "quantization": "model.weights",
}
"""Abbreviations and names of other tools -> the setting that means the same."""

_GPUS = (
    "set replicas=N or tensor_parallel_size=N (their product is the number of GPUs), or layout=auto "
    "layout.devices=N for the best layout of N GPUs"
)
_COPIES = (
    "set replicas=N for copies of the whole model, or attention_data_parallel_size=N for attention alone"
)
_LENGTHS = (
    "with workload/lengths=fixed set workload.lengths.prompt_tokens.value=N and "
    "workload.lengths.output_tokens.value=N"
)
_USERS = "choose workload=closed_loop and set workload.arrivals.num_users=N"
ADVICE = {
    **dict.fromkeys(
        ("isl", "osl", "input_len", "output_len", "random_input_len", "random_output_len"), _LENGTHS
    ),
    **dict.fromkeys(("concurrency", "max_concurrency", "num_users", "users"), _USERS),
    "max_model_len": "set engine.max_model_len",
    "dp": _COPIES,
    "dp_size": _COPIES,
    "gpus": _GPUS,
    "num_gpus": _GPUS,
    "ngpus": _GPUS,
    "gpu": "set hardware=NAME; all: windtunnel list hardware",
    "workload.path": "this workload reads no file; choose workload=trace, which finds the format of a file",
    "workload.arrivals.rate_per_s": "these arrivals have no rate; scale them with load=2, or choose "
    "workload=poisson",
}
"""Names that are not settings, or not of every workload -> what to do."""

_HARDWARE = {
    "a6000": "rtx_a6000",
    "6000_ada": "rtx_6000_ada",
    "rtx_6000ada": "rtx_6000_ada",
    "a800": "a800_sxm",
    "h20_96gb": "h20",
    "h20_3e": "h20_141gb",
    "gh200_96gb": "gh200",
    "dgx_spark": "gb10",
    "spark": "gb10",
    "910b": "ascend_910b",
    "910b2": "ascend_910b",
    "a100_80gb_pcie": "a100_pcie",
    "a100_sxm4_40gb": "a100_40gb_sxm",
    "a100_sxm4_80gb": "a100_80gb_sxm",
    "a800_sxm4_80gb": "a800_sxm",
    "b300_sxm6_ac": "b300_sxm",
    "gh200_144g_hbm3e": "gh200_144gb",
    "gh200_480gb": "gh200",  # of LPDDR; 96 GB of HBM
    "h100_80gb_hbm3": "h100_sxm",
    "h100_sxm5": "h100_sxm",
    "h100_sxm5_80gb": "h100_sxm",
    "rtx_6000_ada_generation": "rtx_6000_ada",
    "rtx_pro_6000_blackwell_server_edition": "rtx_pro_6000_server",
    "v100_sxm2_32gb": "v100_sxm",
}

OTHER_WORDS: Mapping[str, Mapping[str, str]] = {
    "batching": {
        "continuous": "chunked",
        "continuous_batching": "chunked",
        "chunked_prefill": "chunked",
        "iteration_level": "orca",
        "in_flight_batching": "inflight",
    },
    "caching": {
        "paged_attention": "paged",
        "apc": "prefix",
        "prefix_caching": "prefix",
        "radix_attention": "radix",
    },
    "engine": {
        "trtllm": "tensorrt_llm",
        "tensorrt": "tensorrt_llm",
        "llamacpp": "llama_cpp",
        "fastgen": "deepspeed_fastgen",
    },
    "hardware": _HARDWARE,
    "routing": {
        "rr": "round_robin",
        "p2c": "power_of_two",
        "power_of_two_choices": "power_of_two",
        "least_requests": "least_outstanding",
        "least_loaded": "least_outstanding",
    },
    "scheduling": {
        "fifo": "fcfs",
        "sjf": "shortest_job_first",
        "srpt": "shortest_remaining",
        "srtf": "shortest_remaining",
        "lpm": "longest_prefix",
        "vtc": "virtual_token_counter",
        "earliest_deadline_first": "edf",
    },
    "speculation": {"n_gram": "ngram", "prompt_lookup": "ngram", "draft": "draft_model"},
}
"""Group -> other name with one meaning -> the choice. Those of devices are of people or of nvidia-smi."""

BY_MAKER = {"b200": "b200_sxm", "b300": "b300_sxm", "h200": "h200_sxm", "h800": "h800_sxm"}
"""What nvidia-smi calls the first kind of several, after the maker's name -> the choice of `hardware`."""
_MAKER = re.compile(r"(?:(?:NVIDIA|Tesla|GeForce|AMD|Instinct|Intel)[ _-]+)+", re.IGNORECASE)

_OLD_KEY = re.compile(
    rf"(?P<prefix>[+~]*)(?P<old>{'|'.join(NEW_NAMES)})(?=[./@=]|$)"
    rf"|(?P<alias>{'|'.join(map(re.escape, ALIASES))})(?==|$)"
)
_MODEL = re.compile(
    r"(?P<key>\+{0,2}(?:model(?:@[\w.]+)?|pools\.\w+\.model))=(?P<quote>[\"']?)(?P<ids>[\w./,-]+)(?P=quote)"
)
"""Matches a choice of models."""


_CHOICE = re.compile(
    rf"(?P<key>\+{{0,2}}(?:(?P<group>{'|'.join(OTHER_WORDS)})(?:@[\w.]+)?|pools\.\w+\.(?P<of_pool>hardware)))"
    r"=(?P<quote>[\"']?)(?P<names>[\w., -]+)(?P=quote)"
)
"""Matches one or several choices of a group of `OTHER_WORDS`."""


def with_new_names(overrides: Iterable[str], dirs: Sequence[Path] = (CONFIG_DIR,)) -> list[str]:
    """Replaces other names in the overrides by those that are used; prints one note per name on stderr.

    dirs: the config folders; their models may be named by their Hugging Face ids.
    """
    texts = list(overrides)
    named = [_with_new_name(text, dirs, texts) for text in texts]
    return [text for several in named for text in several]


def _with_new_name(text: str, dirs: Sequence[Path], beside: Sequence[str]) -> list[str]:
    if text.startswith("quantization=") and _is_of_the_model(text, dirs, beside):
        return []
    if match := _OLD_KEY.match(text):
        return [_replacement(match) + text[match.end() :]]
    if match := _MODEL.fullmatch(text):
        return _named_models(match["key"], match["ids"].split(","), dirs, beside)
    if match := _CHOICE.fullmatch(text):
        group, names = match["group"] or match["of_pool"], match["names"].split(",")
        return [_named_choices(text, match["key"], group, names, dirs)]
    return [text]


def _is_of_the_model(text: str, dirs: Sequence[Path], beside: Sequence[str]) -> bool:
    """Returns whether the id of the model says already how its weights are quantised, as -AWQ does.

    Raises ConfigError if it says otherwise.
    """
    from hwmodels.hf.quantization import ENGINE_NAMES  # noqa: PLC0415 (few lines name a format)

    name = text.partition("=")[2].strip("'\"")
    for match in filter(None, map(_MODEL.fullmatch, beside)):
        found = None if match["key"] != "model" else model_named(match["ids"], dirs)
        if found is None or found.weights is None:
            continue
        meaning = ENGINE_NAMES.get(name)
        stored = None if meaning is None else meaning.weights or meaning.moe_weights
        if meaning is None or (stored is not None and stored[:3] != found.weights[:3]):
            raise ConfigError(
                f"quantization={name}: {match['ids']} is stored in {found.weights}; leave quantization out, "
                "or choose the model's checkpoint of 16 bits"
            )
        note(f"quantization={name} is how {match['ids']} is stored.")
        return True
    return False


def _named_choices(text: str, key: str, group: str, names: Sequence[str], dirs: Sequence[Path]) -> str:
    """Returns the override with these choices of a group; the text itself if no name is another one."""
    files = {file.stem for folder in dirs for file in (folder / group).glob("*.yaml")}
    known = {_plain(name): name for name in sorted(files)}
    other = {_plain(name): choice for name, choice in OTHER_WORDS[group].items()}
    found = []
    for name in names:
        own, by_maker = _plain(name), None
        if group == "hardware":
            own = _plain(_MAKER.sub("", name.strip(), count=1))
            by_maker = BY_MAKER.get(own) if own != _plain(name) else None
        choice = name if name in files else known.get(own) or other.get(own) or by_maker or name
        if choice != name:
            note(f"{key}={name} is read as {key}={choice}.")
        found.append(choice)
    return text if found == list(names) else f"{key}={','.join(found)}"


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _named_models(key: str, names: Sequence[str], dirs: Sequence[Path], beside: Sequence[str]) -> list[str]:
    """Returns the override that chooses these models, and one for the weights that an id names.

    Raises ConfigError for an id of quantised weights where the weights cannot be set for it alone.
    """
    choices, further = [], []
    for name in names:
        is_choice = any((folder / "model" / f"{name}.yaml").is_file() for folder in dirs)
        found = None if is_choice else model_named(name, dirs)
        choices.append(name if found is None else found.choice)
        if found is None or found.choice == name:
            continue
        read = f"{key}={name} is read as {key}={found.choice}"
        if found.formats and not any(text.startswith("model.weights=") for text in beside):
            if key != "model" or len(names) > 1:
                stored = " ".join(f"{setting}={value}" for setting, value in found.formats.items())
                raise ConfigError(f"{key}={name}: choose {found.choice} and set {stored} of it")
            further = found.overrides("model", beside)
            read = " ".join([read, *further])
        note(f"{read}: {found.summary}.")
    return [f"{key}={','.join(choices)}", *further]


def _replacement(found: re.Match[str]) -> str:
    if alias := found["alias"]:
        note(f"{alias} is read as {ALIASES[alias]}.")
        return ALIASES[alias]
    old = found["old"]
    note(f"{old} is now called {NEW_NAMES[old]}; the old name is accepted for one more version.")
    return f"{found['prefix']}{NEW_NAMES[old]}"


@cache
def note(text: str) -> None:
    """Prints a note once per process."""
    print(f"windtunnel: {text}", file=sys.stderr)


TRAINING = {"instruct", "base", "chat", "it", "pt", "hf", "thinking"}
"""Words for what a model was trained for, or that say what is usual; its architecture is the same."""

EQUAL = {
    "ai21-jamba-mini-1.6": "ai21-jamba-1.5-mini",
    "acereason-nemotron-14b": "deepseek-r1-distill-qwen-14b",
    "athene-v2": "qwen2.5-72b",
    "deepcoder-14b-preview": "deepseek-r1-distill-qwen-14b",
    "deepscaler-1.5b-preview": "deepseek-r1-distill-qwen-1.5b",
    "deepseek-coder-v2": "deepseek-v2.5",
    "deepseek-coder-v2-lite": "deepseek-v2-lite",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-v2": "deepseek-v2.5",
    "deepseek-v3": "deepseek-r1",
    "deepseek-v3.1": "deepseek-r1",
    "deepseek-v3.1-terminus": "deepseek-r1",
    "deepseek-v3.2-exp": "deepseek-v3.2",
    "deepseek-v3.2-speciale": "deepseek-v3.2",
    "gemma-1.1-2b": "gemma-2b",
    "gemma-1.1-7b": "gemma-7b",
    "glm-5.1": "glm-5",
    "glyph": "glm-4.1v-9b",
    "granite-3.2-2b": "granite-3.1-2b",
    "granite-3.2-8b": "granite-3.1-8b",
    "granite-3.3-2b": "granite-3.1-2b",
    "granite-3.3-8b": "granite-3.1-8b",
    "hermes-3-llama-3.1-70b": "llama-3.1-70b",
    "hermes-3-llama-3.1-8b": "llama-3.1-8b",
    "hermes-4-14b": "qwen3-14b",
    "hermes-4-405b": "llama-3.1-405b",
    "hermes-4-70b": "llama-3.1-70b",
    "hy3-preview": "hy3",
    "kimi-k2-instruct-0905": "kimi-k2-thinking",
    "kimi-k2.6": "kimi-k2.5",
    "kimi-k2.7-code": "kimi-k2.5",
    "laguna-xs.2": "laguna-xs-2.1",
    "lfm2-1.2b": "lfm2.5-1.2b",
    "lfm2-350m": "lfm2.5-350m",
    "lfm2-vl-1.6b": "lfm2.5-vl-1.6b",
    "lfm2-vl-450m": "lfm2.5-vl-450m",
    "lfm2.5-1.2b-jp": "lfm2.5-1.2b",
    "llama-3-3-nemotron-super-49b-v1.5": "llama-3-3-nemotron-super-49b-v1",
    "llama-3-3-nemotron-super-49b-v1-5": "llama-3-3-nemotron-super-49b-v1",
    "llama-3.1-nemotron-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-guard-3-8b": "llama-3.1-8b",
    "llama-3.1-supernova-lite": "llama-3.1-8b",
    "llama-xlam-2-70b-fc-r": "llama-3.1-70b",
    "llama-xlam-2-8b-fc-r": "llama-3.1-8b",
    "minimax-m2": "minimax-m2.5",
    "minimax-m2.1": "minimax-m2.5",
    "minimax-m2.7": "minimax-m2.5",
    "mistral-small-3.2-24b": "mistral-small-3.1-24b",
    "nous-hermes-2-mixtral-8x7b-dpo": "mixtral-8x7b-v0.1",
    "olmo-3-32b-think": "olmo-3.1-32b-think",
    "openhermes-2.5-mistral-7b": "mistral-7b-v0.1",
    "openreasoning-nemotron-32b": "qwen2.5-32b",
    "openthinker-32b": "qwen2.5-32b",
    "openthinker3-7b": "qwen2.5-7b",
    "phi-3-mini-128k": "phi-3.5-mini",
    "phi-4-mini-reasoning": "phi-4-mini",
    "phi-4-reasoning-plus": "phi-4-reasoning",
    "pixtral-12b-2409": "pixtral-12b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-1.5b": "qwen2.5-1.5b",
    "qwen2-72b": "qwen2.5-72b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2.5-coder-0.5b": "qwen2.5-0.5b",
    "qwen2.5-coder-1.5b": "qwen2.5-1.5b",
    "qwen2.5-coder-14b": "qwen2.5-14b",
    "qwen2.5-coder-32b": "qwen2.5-32b",
    "qwen2.5-coder-3b": "qwen2.5-3b",
    "qwen2.5-coder-7b": "qwen2.5-7b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b-2507",
    "qwen3-coder-next": "qwen3-next-80b-a3b",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3.8-27b": "qwen3.5-27b",
    "s1.1-32b": "qwen2.5-32b",
    "sky-t1-32b-preview": "qwen2.5-32b",
    "skywork-or1-32b": "deepseek-r1-distill-qwen-32b",
    "trinity-large-preview": "trinity-large",
    "trinity-large-truebase": "trinity-large",
    "wizardlm-2-8x22b": "mixtral-8x22b-v0.1",
    "xlam-2-32b-fc-r": "qwen2.5-32b",
    "yi-1.5-34b": "yi-34b",
    "yi-1.5-6b": "yi-6b",
    "zephyr-7b-beta": "mistral-7b-v0.1",
}
"""Models whose published configurations have the architecture of another one."""

CHANGED = {
    *("vision", "vl", "audio", "omni", "speech", "tts", "asr", "ocr", "mm", "multimodal", "image", "video"),
    *("embedding", "embed", "embeddings", "reranker", "rerank", "reward", "rm", "prm", "orm", "classifier"),
    *("colbert", "assistant", "mobile"),  # Gemma 4's assistants are drafts, its mobile ones of mixed formats
    *("eagle", "eagle3", "mtp", "medusa", "hydra", "draft", "drafter", "speculator", "dflash", "accelerator"),
    *(
        "moe",
        "pruned",
        "reap",
        "minitron",
        "mamba",
        "linear",
        "sparse",
        "diffusion",
        "gguf",
        "lora",
        "adapter",
    ),
}
"""Words for another architecture than that of the model whose name stands beside them."""
_SIZE = re.compile(r"[ae]?\d+(\.\d+)?(x\d+(\.\d+)?)?b|\d{2,3}m")
"""Matches 8b, 0.6b, 8x7b, a3b and 135m."""
_CONTEXT = re.compile(r"\d+k|\dm")
_PART = re.compile(r"[a-z]+|\d+(?:\.\d+)?")

QUANTISED = {
    "awq": "int4_wo",
    "gptq": "int4_wo",
    "int4": "int4_wo",
    "4bit": "int4_wo",
    "w4a16": "int4_wo",
    "8bit": "int8_wo",
    "int8": "int8",
    "w8a8": "int8",
    "w8a16": "int8_wo",
    "fp8": "fp8",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "w4a8": "int4_int8",
    "bf16": "bf16",
}
"""Words for the format of a checkpoint's weights -> the setting `model.weights`."""

_BESIDE_A_FORMAT = {
    *("dynamic", "static", "kv", "quantized", "block", "bnb", "autoround", "sym", "marlin", "mtp", "quarot"),
    *("pertensor",),
}
_AFTER_A_FORMAT = re.compile(r"v\d+|\d+(b|bit|bits|g)")
"""Matches words that say more of a format that stands before them: -NVFP4-v2, -GPTQ-4b-128g."""
_CHECKPOINTS = Path(__file__).with_name("checkpoints.yaml")
"""Published checkpoints whose names do not state their formats."""
_KV_IN_FP8 = {"fp8", "nvfp4"}
"""Formats of weights beside which NVIDIA's checkpoints have KV in fp8, if `_CHECKPOINTS` has no other."""
_FP8_BY_BLOCK = {"qwen", "deepseek-ai", "minimaxai", "poolside", "stepfun-ai", "zai-org"}
"""Organisations whose fp8 checkpoints have a scale for every 128 x 128 weights."""

_SOURCE = re.compile(r"^source: *([^\s#]+)", re.M)
_DATE = re.compile(r"\d{4}|\d{6}|\d{8}")


_NOT_IN_PRESETS = {"quantization_config"}
"""Settings of a model that the files of presets do not list."""


class NamedModel(NamedTuple):
    """A choice of the group `model`, and the formats of the checkpoint with this name."""

    choice: str
    weights: str | None
    """Format of the weights in the name; None: the choice's own."""
    summary: str
    """First comment of the choice's file: its size and kind."""
    formats: Mapping[str, str] = {}
    """Settings below `model.` that give it the checkpoint's formats -> value of an override."""

    def overrides(self, key: str, beside: Sequence[str] = ()) -> list[str]:
        """Returns the formats as overrides of the model at this key, without those that are given beside."""
        given = {text.lstrip("+").partition("=")[0] for text in beside}
        return [
            f"{'++' if setting in _NOT_IN_PRESETS else ''}{key}.{setting}={value}"
            for setting, value in self.formats.items()
            if f"{key}.{setting}" not in given
        ]


class _Choice(NamedTuple):
    """A choice of the group `model`: its `source`, and the words of that name."""

    source: str
    words: tuple[str, ...]


def model_named(name: str, dirs: Sequence[Path]) -> NamedModel | None:
    """Returns the choice that has this name; None if there is none. dirs: the config folders, ours first."""
    found = _choices(tuple(dirs))
    for file in found:
        if name == file.stem:
            return NamedModel(file.stem, None, first_comment(file))
    for file, choice in found.items():
        if name.lower() == choice.source.lower():
            return NamedModel(file.stem, None, first_comment(file))
    own = repository_of(name)
    names = [own, own.rpartition("/")[2].partition("_")[2]] if "_" in own else [own]
    for each in filter(None, names):
        words, weights = _words(each)
        for leaves_out in (set(), TRAINING, {*TRAINING, "dates"}):
            wanted = _reduced(words, leaves_out)
            for file, choice in found.items():
                if wanted in (_reduced(choice.words, leaves_out), _joined(file.stem)):
                    return _with_formats(file, each, weights)
    words, weights = _words(own)
    if (base := _base_of(words, found)) is not None:
        note(f"{own} is taken for a fine-tuned {base.stem}, as its name has that of the family and the size.")
        return _with_formats(base, own, weights)
    return None


def _base_of(words: Sequence[str], choices: Mapping[Path, _Choice]) -> Path | None:
    """Returns the choice of which a longer name has the family and the size; None: there is none.

    Words for another architecture, another context or another use than text generation forbid it.
    """
    wanted = _Name.of(words)
    if not wanted.sizes or wanted.is_changed:
        return None
    files = {_reduced(choice.words, TRAINING): file for file, choice in choices.items()}
    named = {tuple(choice.words): file for file, choice in choices.items()}
    named |= {
        tuple(name.split("-")): files[base] for name in EQUAL if (base := _equal()[_joined(name)]) in files
    }
    lengths: dict[Path, int] = {}  # of the longest name of a choice that is part of this one
    for other, file in named.items():
        known = _Name.of(other)
        if known.family and known.sizes == wanted.sizes and known.is_within(wanted):
            lengths[file] = max(lengths.get(file, 0), len(known.family))
    longest = [file for file, length in lengths.items() if length == max(lengths.values())]
    return longest[0] if len(longest) == 1 else None


class _Name(NamedTuple):
    """A model's name: the words and numbers of its family, and the sizes in it."""

    family: tuple[str, ...]
    sizes: frozenset[str]
    is_changed: bool

    @classmethod
    def of(cls, words: Sequence[str]) -> _Name:
        """Returns the parts of a name; words for its training and dates are left out."""
        kept = [word for word in words if word not in {*TRAINING, "meta"} and not _DATE.fullmatch(word)]
        sizes = frozenset(word for word in kept if _SIZE.fullmatch(word))
        rest = [part for word in kept if word not in sizes for part in _PART.findall(word)]
        is_changed = any(word in CHANGED or _CONTEXT.fullmatch(word) for word in (*kept, *rest))
        return cls(tuple(rest), sizes, is_changed)

    def is_within(self, other: _Name) -> bool:
        """Returns whether the family of another name has these words one after the other."""
        length = len(self.family)
        return any(other.family[i : i + length] == self.family for i in range(len(other.family) - length + 1))


def _with_formats(file: Path, repository: str, weights: str | None) -> NamedModel:
    """Returns a choice with the formats of a checkpoint. weights: the format that its name says."""
    name, summary = repository.lower(), first_comment(file)
    known = _published().get(re.sub(r"-fp4\b", "-nvfp4", name))
    if known is not None:
        formats = {key: as_value(value) for key, value in known.items()}
        return NamedModel(file.stem, weights, summary, formats)
    if weights is None or (weights == "bf16" and not _is_quantised(file)):
        return NamedModel(file.stem, None, summary)
    formats = {"weights": weights}
    if weights == "bf16":
        formats["moe_weights"] = weights
    elif (name.startswith("nvidia/") and weights in _KV_IN_FP8) or name.endswith("-kv"):
        formats["kv_cache_dtype"] = "fp8"
    return NamedModel(file.stem, weights, summary, formats)


def _is_quantised(file: Path) -> bool:
    """Returns whether the weights of a choice have fewer than 16 bits."""
    return "quantization_config:" in file.read_text(encoding="utf-8", errors="replace")


@cache
def _published() -> Mapping[str, Mapping[str, Any]]:
    """Returns settings of the model by the name of a checkpoint in lower case."""
    found: Mapping[str, Mapping[str, Any]] = read_yaml(_CHECKPOINTS)
    return found


def repository_of(name: str) -> str:
    """Returns the repository that the name of a download's folder stands for; other names as they are.

    .../models--Qwen--QwQ-32B/snapshots/976055f    Qwen/QwQ-32B
    .../Qwen__QwQ-32B/                             Qwen/QwQ-32B
    """
    parts = [part for part in name.split("/") if part]
    for part in parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    if parts and "__" in parts[-1]:
        return parts[-1].replace("__", "/", 1)
    return "/".join(parts)


@lru_cache(maxsize=8)
def _choices(dirs: tuple[Path, ...]) -> dict[Path, _Choice]:
    """Returns the choices of the group by file, those of the first folder first."""
    return {
        file: _Choice(source, tuple(_words(source)[0]))
        for folder in dirs
        for file, source in _sources(folder)
    }


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    for file in sorted((folder / "model").glob("*.yaml")):
        found = _SOURCE.search(file.read_text(encoding="utf-8", errors="replace"))
        if found:
            yield file, found[1]


def _words(name: str) -> tuple[list[str], str | None]:
    """Returns the words of a model's name without its organisation, and the format of its weights."""
    organisation, _, own = name.lower().rpartition("/")
    words, formats = [], []
    for word in re.split(r"[-_]", own):
        parts = word.split(".")
        named = [part for part in parts if part in QUANTISED]
        formats += named
        if named:
            word = ".".join(part for part in parts if part not in QUANTISED and part not in _BESIDE_A_FORMAT)
        elif word in _BESIDE_A_FORMAT or (formats and _AFTER_A_FORMAT.fullmatch(word)):
            continue
        if word:
            words.append(word)
    if not formats:
        return re.split(r"[-_]", own), None
    # A number of bits says more than the method: GPTQ-Int8 has weights in int8 and 16-bit activations.
    weights = QUANTISED[formats[-1]]
    if weights == "int8" and formats[0] == "gptq":
        weights = "int8_wo"
    parts = re.split(r"[-_.]", own)
    if weights == "fp8" and "pertensor" not in parts and (organisation in _FP8_BY_BLOCK or "block" in parts):
        weights = "fp8_block"
    return words, weights


def _reduced(words: Sequence[str], leaves_out: Set[str]) -> str:
    """Returns the name of the model itself without punctuation. leaves_out: words, and "dates"."""
    dates = "dates" in leaves_out
    kept = [word for word in words if word not in leaves_out and not (dates and _DATE.fullmatch(word))]
    model = _joined("-".join(kept).removeprefix("meta-"))
    return _equal().get(model, model)


@cache
def _equal() -> dict[str, str]:
    """Returns `EQUAL` with joined names: llama3_3_70b is Llama-3.3-70B."""
    return {_joined(one): _joined(other) for one, other in EQUAL.items()}


def _joined(name: str) -> str:
    """Returns a name with punctuation between digits only: llama3_1_8b and Llama-3.1-8B are llama3p1p8b."""
    return re.sub(r"[^a-z0-9]+", "", re.sub(r"(?<=\d)[^a-z0-9]+(?=\d)", "p", name.lower()))
