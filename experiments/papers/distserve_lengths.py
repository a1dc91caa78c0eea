"""Lengths of the requests in DistServe's experiments, in tokens of OPT, drawn as its artifact's script does.

The tables are quantiles at `PROBABILITIES`. HumanEval's come from its 164 tasks (openai/human-eval):
means of 171.3 and 98.2 tokens, as the paper states. LongBench's answers come from the 237 samples of 21 tasks
that MiniLongBench (MilkThink-Lab/MiniLongBench) publishes, weighted by the tasks' numbers of samples
in LongBench and LongBench-E: a mean of 88 tokens (the paper states 90.7), and half have 12 or fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Prompt and output tokens of each request."""

Draw = Callable[[np.random.Generator, int], Lengths]

MAX_LENGTH = 2048
SIGMA = math.sqrt(math.log(2))
"""Standard deviation of the logarithms of a lognormal distribution with a cv of 1."""
SHAREGPT_MEANS = np.array((1116.5, 214.3))
PROBABILITIES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 1)
LONGBENCH_ANSWERS = (2, 2, 2, 4, 4, 7, 12, 19, 25, 33, 44, 116, 319, 367, 614, 667, 832, 1183)
HUMANEVAL_PROMPTS = (55, 72, 91, 106, 122, 136, 146, 171, 189, 200, 216, 245, 278, 287, 318, 348, 440, 629)
HUMANEVAL_OUTPUTS = (9, 14, 19, 33, 43, 61, 79, 96, 115, 138, 151, 177, 194, 214, 224, 236, 319, 514)


def sharegpt(rng: np.random.Generator, num: int) -> Lengths:
    """Draws chats: lognormal with a cv of 1, without those of 2,048 tokens or more, with the paper's means.

    Of all requests, 755 prompt and 200 output tokens; 8 % of the prompts have more than 1,490 tokens.
    """
    kept: list[NDArray[np.int64]] = []
    while sum(map(len, kept)) < num:
        scores = rng.standard_normal((num, 2))
        drawn = np.maximum(SHAREGPT_MEANS * np.exp(SIGMA * scores - SIGMA**2 / 2), 1).astype(np.int64)
        kept.append(drawn[drawn.sum(axis=1) < MAX_LENGTH])
    prompts, outputs = np.concatenate(kept)[:num].T
    return prompts, outputs


def humaneval(rng: np.random.Generator, num: int) -> Lengths:
    """Draws the prompt and output lengths of num code completions, tokens."""
    return _drawn(rng, num, HUMANEVAL_PROMPTS), _drawn(rng, num, HUMANEVAL_OUTPUTS)


def longbench(rng: np.random.Generator, num: int) -> Lengths:
    """Draws summaries: documents are cut to 1,900 to 2,048 tokens, and to 2,040 with the answer.

    22 % of the documents are shorter, 400 to 1,900 tokens, so that prompts have the paper's mean of 1,738.
    """
    answers = _drawn(rng, num, LONGBENCH_ANSWERS)
    documents = np.interp(rng.random(num), (0, 0.22, 1), (400, 1900, 20_000)).astype(np.int64)
    return np.minimum(documents, np.minimum(rng.integers(1900, 2049, num), 2040 - answers)), answers


def with_lognormal_outputs(draw: Draw, mean: float) -> Draw:
    """Returns draws with lognormal outputs of this mean and a cv of 1, for which prompts are cut to 2,048."""

    def drawn(rng: np.random.Generator, num: int) -> Lengths:
        prompts, _ = draw(rng, num)
        lengths = mean * np.exp(SIGMA * rng.standard_normal(num) - SIGMA**2 / 2)
        outputs = np.clip(lengths.astype(np.int64), 1, MAX_LENGTH // 2)
        return np.minimum(prompts, MAX_LENGTH - outputs), outputs

    return drawn


def _drawn(rng: np.random.Generator, num: int, quantiles: tuple[int, ...]) -> NDArray[np.int64]:
    return np.interp(rng.random(num), PROBABILITIES, quantiles).round().astype(np.int64)
