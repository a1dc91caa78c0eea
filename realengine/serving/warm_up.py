"""The request that a new engine serves first, so that no client waits for what happens once."""

from __future__ import annotations

from realengine.serving.sampling_params import SamplingParams

PROMPT_TOKENS = 16
OUTPUT_TOKENS = 3
SALT = "warm-up"
"""Keeps requests from finding the KV of the warm-up."""
PARAMS = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)


def warm_up_prompt(vocab_size: int, max_model_len: int) -> list[int]:
    """Returns the tokens of its prompt."""
    num_prompt = max(1, min(PROMPT_TOKENS, max_model_len - OUTPUT_TOKENS))
    return [token % vocab_size for token in range(num_prompt)]
