"""Errors of the measured table: predicted against measured times of random whole iterations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments.calibrate.engine.steps import Chunk, Step
from experiments.study.errors import SHARE, errors
from hwmodels.iterations import COUNTED

KINDS = ("decode", "prefill", "mixed")
SIGMA = 0.7
"""Standard deviation of the logarithms of contexts in one step.

It gives contexts a standard deviation of 0.8 times their mean, before they are cut at max_model_len.
"""


def random_steps(
    count: int, *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, seed: int
) -> list[Step]:
    """Draws steps: in turn decodes only, chunks only, and both, with random lengths within the limits."""
    random = np.random.default_rng(seed)
    steps = []
    for place in range(count):
        kind = KINDS[place % len(KINDS)]
        contexts: list[int] = []
        if kind != "prefill":
            num_decodes = int(random.integers(1, max(2, max_num_seqs - 3)))
            drawn = random.integers(2, max_model_len) * random.lognormal(-(SIGMA**2) / 2, SIGMA, num_decodes)
            contexts = np.clip(drawn, 2, max_model_len).astype(int).tolist()
        chunks: list[Chunk] = []
        if kind != "decode":
            room = max_num_batched_tokens - len(contexts)
            for _ in range(int(random.integers(1, 4))):
                new = int(np.exp(random.uniform(np.log(8), np.log(max_model_len // 2))))
                if len(contexts) + len(chunks) < max_num_seqs and new <= room:
                    cached = int(random.integers(0, max_model_len - new)) if random.random() < 0.5 else 0
                    chunks.append(Chunk(cached, new, bool(random.random() < 0.8)))
                    room -= new
        if contexts or chunks:
            steps.append(Step(tuple(contexts), tuple(chunks)))
    return steps


def residual_table(
    steps: Sequence[Step], measured_s: Sequence[float], priced_s: Sequence[float]
) -> pd.DataFrame:
    """Returns one row per step: kind, sizes, measured and predicted seconds, and the relative error."""
    table = pd.DataFrame(
        {
            "kind": [step.kind for step in steps],
            **{name: [getattr(step.shape, name) for step in steps] for name in COUNTED},
            "measured_s": measured_s,
            "priced_s": priced_s,
        }
    )
    return table.assign(error=table["priced_s"] / table["measured_s"] - 1)


def errors_by_kind(table: pd.DataFrame) -> pd.DataFrame:
    """Summarises the errors of each kind of iteration and of all.

    The columns are the number of iterations, median and p90 of the absolute error, median of the signed
    error, and error of the total time.
    """
    groups = [(kind, table[table["kind"] == kind]) for kind in KINDS]
    found = [
        (kind, errors(group["priced_s"], group["measured_s"], unit=SHARE))
        for kind, group in [*groups, ("all", table)]
        if len(group)
    ]
    figures = ("median", "p90", "bias", "total")
    return pd.DataFrame(
        [
            {"kind": kind, "iterations": one.rows, **{name: getattr(one, name) for name in figures}}
            for kind, one in found
        ]
    )
