"""Costs of tokens: on hardware rented by the hour, by the prices of an API, and where both are equal.

Prompt caching as APIs sell it: tokens found in the cache are billed at a discount; tokens of a prefix that
the client asked to keep cost more when they are first computed, or rent for as long as they are kept. Worked
number: 1,000 prompts of 10,000 tokens, 9,000 of which are found in all but the first, at $3 per million: all
computed, $30; with a read factor of 0.1 and a write factor of 1.25, 9,000 written tokens cost $0.034, 8.991
million read ones $2.70, 1 million others $3: $5.73.

Batch APIs, which answer within a day, sell all tokens at half price (OpenAI, Anthropic, Google, 2025).

Break-evens compare a fleet of one's own with the bill of an API, and serving with training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fieldlimits import Checked, NonNegative, NonNegativeInt
from hwmodels.checks import check_finite
from hwmodels.iterations.iteration import IterationModel, IterationShape, causal_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Tariff(Checked):
    """List prices of a provider with prompt caching.

    Defaults have the structure of Anthropic's prompt caching with a lifetime of five minutes.
    """

    usd_per_million_input_tokens: NonNegative = 3.0
    usd_per_million_output_tokens: NonNegative = 15.0
    read_factor: NonNegative = 0.1
    """Price of tokens found in the cache, as a fraction of the input price."""
    write_factor: NonNegative = 1.25
    """Price of pinned tokens that had to be computed, as a fraction of the input price."""
    usd_per_million_token_hours: NonNegative = 0.0
    """Rent of pinned tokens per million tokens and hour (Google's explicit caches: some $1 to $4.5)."""

    min_cached_tokens: NonNegativeInt = 0
    """Fewest found tokens of a prompt that get the discount; fewer are billed in full."""
    batch_factor: NonNegative = 1.0
    """Factor on the prices of all tokens, without the rent; 0.5: a batch API."""

    def bill_usd(
        self,
        *,
        input_tokens: float,
        found: float,
        written: float,
        output_tokens: float,
        pinned_token_s: float,
    ) -> float:
        """Returns the bill in US dollars; `found` and `written` are parts of input_tokens."""
        at_full_price = input_tokens - found - written
        input_usd = at_full_price + self.read_factor * found + self.write_factor * written
        return (
            self.batch_factor * self.usd_per_million_input_tokens * input_usd
            + self.batch_factor * self.usd_per_million_output_tokens * output_tokens
            + self.usd_per_million_token_hours * pinned_token_s / 3600
        ) / 1e6


class SplitCost(NamedTuple):
    """The rent of a run, split over its tokens and requests; infinite where a count is 0."""

    usd_per_million_input_tokens: float
    """Prefill share of the rent per million input tokens."""
    usd_per_million_output_tokens: float
    """Decode share of the rent per million output tokens."""
    usd_per_thousand_requests: float
    """Whole rent per thousand requests."""


def split_cost(
    *,
    usd: float,
    prefill_time_share: float,
    num_input_tokens: float,
    num_output_tokens: float,
    num_requests: float,
) -> SplitCost:
    """Splits the rent over input tokens, output tokens and requests, idle time included.

    Prefill and decode share the rent in proportion to their busy time; idle time is split in the same
    proportion.

    Of $1, a prefill share of 0.25 over 500,000 input tokens makes $0.50 per million, the rest over 100,000
    output tokens $7.50, and 200 requests $5 per thousand. usd: the rent of all devices. Raises ValueError for
    a figure that is negative or not finite, and for a share above 1.
    """
    check_finite("usd", usd, unit="$", zero_allowed=True)
    check_finite("prefill_time_share", prefill_time_share, zero_allowed=True)
    if prefill_time_share > 1:
        raise ValueError(f"prefill_time_share={prefill_time_share}: must be a share, 0 to 1")
    check_finite("num_input_tokens", num_input_tokens, unit="tokens", zero_allowed=True)
    check_finite("num_output_tokens", num_output_tokens, unit="tokens", zero_allowed=True)
    check_finite("num_requests", num_requests, unit="requests", zero_allowed=True)
    return SplitCost(
        _each(prefill_time_share * usd, num_input_tokens) * 1e6,
        _each((1 - prefill_time_share) * usd, num_output_tokens) * 1e6,
        _each(usd, num_requests) * 1e3,
    )


def _each(usd: float, count: float) -> float:
    return usd / count if count else math.inf


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
