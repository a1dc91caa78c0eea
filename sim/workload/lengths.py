"""How long prompts and outputs are, and how the two go together."""

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
    """Prompt and output lengths in tokens, joined by a Gaussian copula.

    rank_correlation is Spearman's rho between the two lengths; the normal scores of the copula then have the
    correlation r = 2 sin(pi rho / 6) (Kruskal, JASA 1958): rho = 0.5 gives r = 0.518. Lengths that often
    repeat a value (Fixed, a narrow Uniform) show less than the rho asked for.
    """

    prompt_tokens: Distribution
    output_tokens: Distribution
    rank_correlation: float = 0.0

    def __post_init__(self) -> None:
        require_counts(self, MAX_TOKENS, "tokens", "prompt_tokens", "output_tokens")
        if not -1 <= self.rank_correlation <= 1:
            raise ValueError(f"rank_correlation={self.rank_correlation}: must be between -1 and 1")

    def from_normal(self, z_N2: FloatArray) -> tuple[IntArray, IntArray]:
        """(prompt tokens [N], output tokens [N]), each >= 1, for N pairs of independent normal scores."""
        r = 2 * math.sin(math.pi * self.rank_correlation / 6)
        z_output_N = r * z_N2[:, 0] + math.sqrt(max(0.0, 1 - r * r)) * z_N2[:, 1]
        return whole_numbers(self.prompt_tokens, z_N2[:, 0]), whole_numbers(self.output_tokens, z_output_N)


def clip_to_context(
    prompt_tokens: IntArray, output_tokens: IntArray, max_model_len: int
) -> tuple[IntArray, IntArray, BoolArray]:
    """(prompts, outputs, which were shortened), all [N], so that prompt + output fit max_model_len.

    The prompt is cut first, down to 1 token, and only then the output; Vidur's rule. Raises ValueError if not
    even 1 + 1 tokens fit.
    """
    if max_model_len < 2:
        raise ValueError(
            f"max_model_len={max_model_len}: must be >= 2 tokens, one of prompt and one of output"
        )
    outputs = np.minimum(output_tokens, max_model_len - 1)
    prompts = np.minimum(prompt_tokens, max_model_len - outputs)
    return prompts, outputs, prompt_tokens + output_tokens > max_model_len
