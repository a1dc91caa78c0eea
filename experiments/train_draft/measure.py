"""Measures drafts on held-out prompts: acceptance by place, tokens per second, equal outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.train_draft.settings import TrainSettings
from policies.caching.prefix import PrefixCaching
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams

BLOCK_SIZE = PrefixCaching().block_size


@dataclass(slots=True)
class Measured:
    """Outputs of an engine for all held-out prompts, and its counts. method: None: without speculation."""

    method: str | None
    num_drafts: int
    outputs: list[tuple[int, ...]]
    seconds: float
    num_passes: int
    """Passes with draft tokens."""
    num_accepted: list[int]
    """Passes that accepted the draft token of each place."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, with prefill included."""
        return sum(len(tokens) for tokens in self.outputs) / self.seconds

    @property
    def acceptance(self) -> list[float]:
        """Shares of passes that accepted the draft token of each place."""
        return [number / max(1, self.num_passes) for number in self.num_accepted]

    @property
    def mean_length(self) -> float:
        """Mean tokens of a pass with draft tokens."""
        return 1 + sum(self.acceptance)


def measure(
    prompts: Sequence[list[int]], folders: dict[str, Path], settings: TrainSettings
) -> list[Measured]:
    """Answers held-out prompts greedily and one at a time, without drafts and then with each number of them.

    folders: the checkpoint of each method. Engines take turns at every prompt, so that a machine that becomes
    busy slows all of them. Seconds are CPU time if the engine runs on one thread.
    """
    context = max(len(prompt) for prompt in prompts) + settings.num_measured_tokens + 1
    plain = Measured(None, 0, [], 0.0, 0, [])
    engines = [(plain, engine_of(settings, context, 1))]
    for method, folder in folders.items():
        for num_drafts in settings.num_drafts:
            config = {"method": method, "model": str(folder), "num_speculative_tokens": num_drafts}
            result = Measured(method, num_drafts, [], 0.0, 0, [0] * num_drafts)
            engines.append((result, engine_of(settings, context, 1, config)))
    clock = time.process_time if settings.device == "cpu" and settings.threads == 1 else time.perf_counter
    params = SamplingParams(temperature=0, max_tokens=settings.num_measured_tokens)
    for _, llm in engines:
        llm.generate([prompts[0][:4]], SamplingParams(temperature=0, max_tokens=4))
    for prompt in prompts:
        for result, llm in engines:
            _answer(llm, prompt, params, result, clock)
    return [result for result, _ in engines]


def engine_of(
    settings: TrainSettings, max_model_len: int, max_num_seqs: int, config: dict[str, Any] | None = None
) -> LLM:
    """Builds an engine of the target in float32. config: its `speculative_config`."""
    return LLM(
        settings.model,
        device=settings.device,
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_kv_blocks=max_num_seqs * -(-max_model_len // BLOCK_SIZE),
        seed=settings.seed,
        speculative_config=config,
    )


def _answer(
    llm: LLM, prompt: list[int], params: SamplingParams, result: Measured, clock: Callable[[], float]
) -> None:
    """Answers a prompt and adds what was counted to a result."""
    started = clock()
    (output,) = llm.generate([prompt], params)
    result.seconds += clock() - started
    if output.error is not None:
        raise ValueError(f"prompts: {output.error}")
    result.outputs.append(output.outputs[0].token_ids)
    if output.drafts is not None:
        result.num_passes += output.drafts.num_drafts
        counted = zip(result.num_accepted, output.drafts.num_accepted_per_pos, strict=False)
        result.num_accepted = [before + more for before, more in counted]


def table(results: Sequence[Measured]) -> list[str]:
    """Returns the lines of a table, of which the first result has no drafts."""
    plain = results[0]
    lines = [f"{'':16} {'tokens/s':>8} {'speed-up':>8} {'length':>6} {'equal':>7}   acceptance by place"]
    for result in results:
        name = "without drafts" if result.method is None else f"{result.method}, K = {result.num_drafts}"
        equal = sum(one == other for one, other in zip(result.outputs, plain.outputs, strict=True))
        line = f"{name:16} {result.tokens_per_s:8.1f} {result.tokens_per_s / plain.tokens_per_s:8.2f}"
        line += f" {result.mean_length:6.2f} {f'{equal}/{len(plain.outputs)}':>7}   "
        line += "  ".join(f"{share:.3f}" for share in result.acceptance)
        lines.append(line.rstrip())
    return lines
