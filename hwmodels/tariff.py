"""A provider's token prices with prompt caching: prices of writing, reading and keeping KV.

Prompt caching as APIs sell it: tokens found in the cache are billed at a discount; tokens of a prefix that
the client asked to keep cost more when they are first computed, or rent for as long as they are kept. Worked
number: 1,000 prompts of 10,000 tokens, 9,000 of which are found in all but the first, at $3 per million: all
computed, $30; with a read factor of 0.1 and a write factor of 1.25, 9,000 written tokens cost $0.034, 8.991
million read ones $2.70, 1 million others $3: $5.73.

Batch APIs, which answer within a day, sell all tokens at half price (OpenAI, Anthropic, Google, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, NonNegative, NonNegativeInt


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
