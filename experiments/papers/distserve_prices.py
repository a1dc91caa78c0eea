"""Iteration times of OPT-13B and OPT-66B on A100 80GB, measured by DistServe's authors for both engines.

The coefficients are those of `simdistserve/estimators/profile_data` in DistServe's artifact (Apache-2.0,
github.com/LLMServe/DistServe): fits to single passes of vLLM as of that comparison, and of its own engine.

    prompts  a + b tokens + c (sum of the squares of the prompts' lengths)
    decodes  a + b (tokens of KV read) + c sequences, with other coefficients from `LARGE_BATCH` sequences

A prompt of 2,000 tokens of OPT-66B takes 653 ms on four GPUs with vLLM, 365 ms with DistServe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hwmodels.exact import Num
from hwmodels.iterations import IterationModel, IterationShape, ends_of_decodes
from hwmodels.levels import Calibrated, Replica

LARGE_BATCH = 95
"""Smallest number of sequences with the coefficients of large batches."""

Fit = tuple[float, float, float]


class Times(NamedTuple):
    """Coefficients of an engine, model, and tensor parallel size, in milliseconds."""

    prompts: Fit
    decodes: Fit
    large_decodes: Fit


TIMES = {
    ("vllm", "opt-13b", 1): Times(
        (22.05, 0.14051, 8.077e-6), (23.475, 5.929e-4, 0.06073), (20.206, 4.908e-4, 0.12000)
    ),
    ("vllm", "opt-66b", 4): Times(
        (42.97, 0.21287, 4.601e-5), (39.582, 6.946e-4, 0.13581), (40.860, 4.265e-4, 0.19508)
    ),
    ("distserve", "opt-13b", 1): Times(
        (18.10, 0.10191, 7.122e-6), (19.935, 6.269e-4, 0.03851), (7.166, 5.798e-4, 0.15831)
    ),
    ("distserve", "opt-13b", 2): Times(
        (14.74, 0.06858, 2.450e-6), (13.295, 3.411e-4, 0.06296), (10.639, 3.118e-4, 0.08563)
    ),
    ("distserve", "opt-66b", 2): Times(
        (43.06, 0.27423, 2.248e-5), (48.288, 9.424e-4, 0.12755), (28.728, 4.745e-4, 0.29618)
    ),
    ("distserve", "opt-66b", 4): Times(
        (29.44, 0.15135, 8.317e-6), (30.760, 4.519e-4, 0.06328), (27.471, 4.047e-4, 0.12481)
    ),
}


class ProfiledModel:
    """An `IterationModel` with these times; all other quantities come from the roofline.

    In a pipeline the sequences are divided evenly into as many micro-batches as stages, and an iteration
    takes as long as one of them on all stages, which is also the time of all of them on one stage.
    """

    def __init__(self, times: Times, num_stages: int, base: IterationModel) -> None:
        self._times, self._num_stages, self._base = times, num_stages, base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def seconds(self, shape: IterationShape) -> Num:
        """Returns the iteration's time in seconds."""
        tokens, seqs, context = (
            np.asarray(count) / self._num_stages
            for count in (shape.prefill_tokens, shape.decode_seqs, shape.decode_context_tokens)
        )
        squares = (2 * np.asarray(shape.prefill_pairs) - shape.prefill_tokens) / self._num_stages
        prompts_ms = np.where(tokens > 0, _fit(self._times.prompts, tokens, squares), 0.0)
        decodes_ms = np.where(
            seqs < LARGE_BATCH,
            _fit(self._times.decodes, context, seqs),
            _fit(self._times.large_decodes, context, seqs),
        )
        return (prompts_ms + np.where(seqs > 0, decodes_ms, 0.0)) / 1e3

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; each sequence grows by a token."""
        return ends_of_decodes(self.seconds, start_s, num_seqs, num_context_tokens, num_iterations)


def _fit(fit: Fit, first: Any, second: Any) -> Any:
    return fit[0] + fit[1] * first + fit[2] * second


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """Latency level of these times."""

    engine: str
    """Engine that was measured: vllm or distserve."""
    model: str
    """Model that was measured: opt-13b or opt-66b."""

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the times of the replica's layout. Raises ValueError for one that was not measured."""
        layout = replica.layout
        key = self.engine, self.model, layout.tensor_parallel_size
        if key not in TIMES:
            raise ValueError(
                f"tensor_parallel_size={layout.tensor_parallel_size}: was not measured for {self.model} with "
                f"{self.engine}"
            )
        base = Calibrated().iteration_model(replica)
        return ProfiledModel(TIMES[key], layout.pipeline_parallel_size, base)

    def basis(self, replica: Replica) -> str:
        return f"Iteration times: measured by DistServe's authors, {self.model} with {self.engine}."
