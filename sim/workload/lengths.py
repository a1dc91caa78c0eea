"""Prompt and output lengths, their correlation, and clipping to the model's context."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.workload.checks import MAX_TOKENS, require_counts
from sim.workload.distributions import Distribution, FloatArray, IntArray, whole_numbers

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Prompt and output lengths in tokens, correlated by a Gaussian copula.

    rank_correlation is Spearman's rho between the two lengths; the normal scores of the copula have the
    correlation r = 2 sin(pi rho / 6) (Kruskal, JASA 1958): rho = 0.5 gives r = 0.518. With many equal lengths
    (Fixed, a narrow Uniform) the correlation of the lengths is lower.
    """

    prompt_tokens: Distribution
    output_tokens: Distribution
    rank_correlation: float = 0.0

    def __post_init__(self) -> None:
        require_counts(self, MAX_TOKENS, "tokens", "prompt_tokens", "output_tokens")
        if not -1 <= self.rank_correlation <= 1:
            raise ValueError(f"rank_correlation={self.rank_correlation}: must be between -1 and 1")

    def from_normal(self, z_N2: FloatArray) -> tuple[IntArray, IntArray]:
        """Returns prompt tokens [N] and output tokens [N], each >= 1, for N pairs of normal scores."""
        r = 2 * math.sin(math.pi * self.rank_correlation / 6)
        z_output_N = r * z_N2[:, 0] + math.sqrt(max(0.0, 1 - r * r)) * z_N2[:, 1]
        return whole_numbers(self.prompt_tokens, z_N2[:, 0]), whole_numbers(self.output_tokens, z_output_N)


def clip_to_context(
    prompt_tokens: IntArray, output_tokens: IntArray, max_model_len: int
) -> tuple[IntArray, IntArray, BoolArray]:
    """Shortens requests to max_model_len tokens; returns prompts, outputs, and which were shortened, all [N].

    As in Vidur, the prompt is cut first, down to 1 token, and only then the output. Raises ValueError if
    max_model_len < 2.
    """
    if max_model_len < 2:
        raise ValueError(
            f"max_model_len={max_model_len}: must be >= 2 tokens, one of prompt and one of output"
        )
    outputs = np.minimum(output_tokens, max_model_len - 1)
    prompts = np.minimum(prompt_tokens, max_model_len - outputs)
    return prompts, outputs, prompt_tokens + output_tokens > max_model_len
