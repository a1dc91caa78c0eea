"""Break-evens: a fleet of one's own against the bill of an API, and serving against training."""

from __future__ import annotations

import math

from hwmodels.checks import check_finite
from hwmodels.iterations.iteration import IterationModel, IterationShape, causal_pairs

TRAINING_CONTEXT = 4096
"""Tokens of a training sequence, assumed; attention adds a few percent to the FLOPs."""
PASSES_OF_TRAINING = 3
"""FLOPs of training over a forward pass; the backward pass takes twice as many (Kaplan et al. 2020)."""


def break_even_load(fleet_usd: float, bill_usd: float) -> float:
    """Returns the multiple of the traffic from which on the same fleet costs less than the API's bill.

    The fleet costs the same for any traffic that it can serve; the bill grows with the traffic. $2.70 an hour
    against a bill of $10 for the same hour: 0.27 of the traffic. Infinite if the API is free.
    """
    check_finite("fleet_usd", fleet_usd, unit="$", zero_allowed=True)
    check_finite("bill_usd", bill_usd, unit="$", zero_allowed=True)
    return fleet_usd / bill_usd if bill_usd else math.inf


def training_flops(model: IterationModel, num_tokens: float) -> float:
    """Returns the FLOPs of training on num_tokens tokens: 6 per active parameter and token, and attention."""
    context = TRAINING_CONTEXT
    shape = IterationShape(0, 0, 1, context, causal_pairs(context), context, context)
    return PASSES_OF_TRAINING * num_tokens / context * float(model.flops(shape))


def tokens_to_match_training(train_flops: float, served_flops: float, output_tokens: float) -> float:
    """Returns the output tokens after which serving has computed as much as training did.

    served_flops: of all work that led to output_tokens, prompts included. Short prompts and a dense model
    give 3 times the tokens of training; a prompt token for each output token halves that.
    """
    return train_flops * output_tokens / served_flops if served_flops and output_tokens else math.inf
