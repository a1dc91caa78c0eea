"""Draws an engine that speculates, its requests, and everything that may happen to them, from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from policies.batching.chunked import Chunked
from policies.batching.inflight import InFlight
from policies.batching.sglang import Sglang
from policies.batching.static import Dynamic, Static
from policies.batching.tgi import Tgi
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.scheduling.fcfs import Fcfs
from policies.speculation.draft_lengths import Adaptive, Backoff, ByBatchSize, Fixed, NoDrafts, SloAware
from realengine.model.architecture import Architecture
from realengine.serving.sampling_params import SamplingParams
from realengine.speculation.settings import SpeculationSettings
from tests.realengine.adapters import random_adapter
from tests.realengine.small_models import CONFIGS
from tests.realengine.speculation.guided import Guide, GuidedHost

METHODS = (
    "ngram", "reference", "suffix", "host", "draft_model", "smaller", "self_speculative", "lookahead",
    "specinfer_tree", "specinfer_drafts", "medusa", "medusa_tree", "eagle", "eagle_tree", "eagle3",
    "eagle3_tree", "mtp", "mtp_modules",
)  # fmt: skip
VOCAB_SIZE = 97
MAX_MODEL_LEN = 128


@dataclass
class RandomCase:
    """An engine and its requests. plain: settings with and without drafts; settings: of the other engine."""

    method: str
    config: str
    plain: dict
    settings: dict
    speculation: SpeculationSettings
    guide: Guide
    prompts: list
    params: list
    adapters: list
    arrivals: list
    """The step before which each request is added."""
    aborts: dict
    """Requests that are aborted, with the step before which."""

    @property
    def tree(self):
        return self.speculation.proposer.tree


def drawn_case(seed, method=None):
    """Draws a case; method: one of METHODS, None: any."""
    draw = random.Random(seed)
    method = method or draw.choice(METHODS)
    config = draw.choice(["llama", "llama", "qwen3", "qwen2", "mistral"])
    guide = Guide(rate=draw.choice([0.3, 0.7, 0.9, 1.0]), seed=seed)
    length, most = _draft_length(draw), draw.randint(1, 8)
    speculation = SpeculationSettings.of(_config(draw, method, config, most, guide, length))
    plain = {
        "max_num_seqs": draw.choice([1, 2, 5, 8, 32]),
        "max_model_len": draw.choice([MAX_MODEL_LEN, MAX_MODEL_LEN, 70]),
        "kv_cache_dtype": draw.choice(["auto"] * 6 + ["int8", "fp8"]),
    }
    names = [None]
    if draw.random() < 0.3:
        names = [None, "a", "b", "c"]
        architecture = Architecture.from_hf(CONFIGS[config])
        plain["lora_adapters"] = {
            name: random_adapter(architecture, 4, seed=number, scaling=40.0)
            for number, name in enumerate(names[1:])
        }
    num = draw.choice([1, 3, 6, 10, 16, 32])
    prompts = _prompts(draw, num, plain["max_model_len"])
    step = draw.choice([0, 0, 1, 3])
    return RandomCase(
        method=method,
        config=config,
        plain=plain,
        settings=_settings(draw, speculation, plain, prompts),
        speculation=speculation,
        guide=guide,
        prompts=prompts,
        params=_params(draw, num),
        adapters=[draw.choice(names) for _ in range(num)],
        arrivals=[draw.randint(0, 1 + step * index) if step else 0 for index in range(num)],
        aborts={draw.randrange(num): draw.randint(1, 12)} if draw.random() < 0.2 else {},
    )


def _config(draw, method, config, most, guide, length):
    like = Architecture.from_hf(CONFIGS[config])
    smaller = Architecture.from_hf(CONFIGS[config] | {"num_hidden_layers": 1})
    num = {"num_speculative_tokens": most, "draft_length": length}
    tree = {"speculative_token_tree": _tree(draw), "draft_length": length}
    text = [draw.randrange(12) for _ in range(40)]
    lookup = {"prompt_lookup_max": draw.randint(1, 4), "prompt_lookup_min": 1}
    return {
        "ngram": {"method": "ngram", **lookup, **num},
        "reference": {"method": "ngram", "reference": text, **lookup, **num},
        "suffix": {"method": "suffix", **num},
        "host": {"method": "ngram", "host": GuidedHost(guide, VOCAB_SIZE), **num},
        "draft_model": {"method": "draft_model", "model": like, **num},
        "smaller": {"method": "draft_model", "model": smaller, **num},
        "self_speculative": {"method": "self_speculative", "skipped_layers": [draw.randrange(2)], **num},
        "lookahead": {
            "method": "lookahead",
            "window": draw.randint(1, 4),
            "ngram": draw.randint(2, 4),
            "guesses": draw.randint(1, 4),
            "draft_length": length,
        },
        "specinfer_tree": {
            "method": "specinfer_tree",
            "model": draw.choice([like, smaller]),
            "widths": [draw.randint(1, 3) for _ in range(draw.randint(1, 3))],
            "draft_length": length,
        },
        "specinfer_drafts": {
            "method": "specinfer_tree",
            "model": [smaller, like],
            "widths": [2, *[1] * draw.randint(0, 3)],
            "draft_length": length,
        },
        "medusa": {"method": "medusa", "model": like, **num},
        "medusa_tree": {"method": "medusa", "model": like, **tree},
        "eagle": {"method": "eagle", "model": smaller, **num},
        "eagle_tree": {"method": "eagle", "model": smaller, **tree},
        "eagle3": {"method": "eagle3", "model": smaller, **num},
        "eagle3_tree": {"method": "eagle3", "model": smaller, **tree},
        "mtp": {"method": "mtp", "model": like, **num},
        "mtp_modules": {
            "method": "mtp",
            "model": like,
            "num_nextn_predict_layers": 2,
            **num,
            "num_speculative_tokens": 2 * draw.randint(1, 4),
        },
    }[method]


def _tree(draw):
    """Draws a tree of 1 to 16 nodes."""
    paths = [[0]]
    for _ in range(draw.randint(0, 15)):
        parent = draw.choice([[], *[path for path in paths if len(path) < 5]])
        paths.append([*parent, sum(path[:-1] == parent for path in paths)])
    return paths


def _draft_length(draw):
    few = draw.randint(0, 1)
    return draw.choice(
        [
            Fixed(),
            Fixed(),
            Fixed(num_tokens=1),
            ByBatchSize(num_speculative_tokens_per_batch_size=((1, 2, 1), (3, 5, few), (6, 64, 1))),
            Backoff(max_misses=1, retry_interval=2, max_interval=4),
            Adaptive(interval=2),
            SloAware(tpot_s=draw.choice([1e-6, 1e3])),
            NoDrafts(),
        ]
    )


def _prompts(draw, num, max_model_len):
    """Draws prompts with repetitions, of which some begin alike."""
    shared = [draw.randrange(12) for _ in range(draw.choice([0, 16, 33]))]
    prompts = []
    for _ in range(num):
        part = [draw.randrange(draw.choice([6, 96])) for _ in range(draw.randint(1, 14))]
        start = shared if draw.random() < 0.6 else []
        prompts.append([*start, *part * draw.randint(1, 3)][: max_model_len - 2])
    return prompts


def _params(draw, num):
    way = draw.choice(["greedy", "greedy", "greedy", "sampled", "mixed"])
    return [_param(draw, way) for _ in range(num)]


def _param(draw, way):
    is_sampled = way == "sampled" or (way == "mixed" and draw.random() < 0.5)
    given = {
        "temperature": draw.choice([0.3, 0.8, 1.5]) if is_sampled else 0,
        "max_tokens": draw.choice([1, 2, 3, 9, 20, 40, None]),
        "ignore_eos": draw.random() < 0.5,
        "stop_token_ids": tuple(draw.sample(range(96), draw.choice([0, 0, 2]))),
        "stop": (draw.choice("0123456789") + draw.choice("abcdefghi"),) if draw.random() < 0.3 else (),
        "min_tokens": draw.choice([0, 0, 1]),
    }
    if way != "greedy" and draw.random() < 0.3:
        given |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
    if way != "greedy" and draw.random() < 0.3:
        given["logprobs"] = draw.choice([0, 2])
    if is_sampled:
        given |= {
            "top_k": draw.choice([0, 20]),
            "top_p": draw.choice([1.0, 0.8]),
            "min_p": draw.choice([0.0, 0.05]),
            "seed": draw.choice([None, 7]),
        }
    if given["max_tokens"] is not None:
        given["min_tokens"] = min(given["min_tokens"], given["max_tokens"])
    return SamplingParams(**given)


def _settings(draw, speculation, plain, prompts):
    proposer = speculation.proposer
    needed = 1 + proposer.num_speculative_tokens + proposer.rules.num_input_slots
    block_size = draw.choice([1, 2, 4, 16])
    caching = draw.choice([Paged, PrefixCaching, Radix])(block_size=block_size)
    budget = needed + draw.choice([0, 1, 7, 40, 200])
    whole = 8192
    batching = draw.choice(
        [
            Chunked(max_num_batched_tokens=budget),
            Chunked(max_num_batched_tokens=budget),
            Chunked(),
            Chunked(enable_chunked_prefill=False, max_num_batched_tokens=max(budget, 160)),
            PrefillFirst(max_num_batched_tokens=whole),
            InFlight(max_num_batched_tokens=budget),
            InFlight(capacity_scheduler_policy="max_utilization"),
            Sglang(),
            Tgi(),
            Static(batch_size=3),
            Dynamic(batch_size=4, max_queue_delay_s=0.001),
        ]
    )
    longest = plain["max_model_len"] + proposer.num_speculative_tokens + 1
    fitting = -(-longest // block_size) + 2
    num_blocks = draw.choice([fitting, fitting, fitting + 64 // block_size, 40 * fitting])
    scheduling = Fcfs(preemption_mode=draw.choice(["recompute", "swap"]))
    settings = {
        "caching": caching,
        "batching": batching,
        "scheduling": scheduling,
        "num_kv_blocks": num_blocks,
        "overlap": draw.random() < 0.4,
        "max_iterations": draw.choice([1, 1, 3]),
        "cudagraph_mode": draw.choice([None, None, "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"]),
    }
    if "lora_adapters" in plain:
        settings["max_loras"] = draw.choice([1, 2, 3])
    return settings
