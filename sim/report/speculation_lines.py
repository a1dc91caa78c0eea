"""The text on speculative decoding in a summary, for the terminal and the report."""

from __future__ import annotations

from typing import Any

from sim.report.numbers import MISSING, number, percent

MAX_PLACES = 8
"""Places of which the rates are printed; the table of acceptance has all."""


def speculation_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on acceptance and on what was in vain; none without speculation."""
    use = summary.get("speculation")
    if not use:
        return []
    if not use["drafts"]:
        return ["Speculation: nothing was drafted"]
    rates = [percent(place["rate"]) for place in use["by_place"][:MAX_PLACES]]
    more = ", ..." if len(use["by_place"]) > MAX_PLACES else ""
    wasted = use["wasted_tokens"]
    most = 1 + min(use["draft_tokens_per_draft"], len(use["by_place"]))  # of a tree, one path is accepted
    return [
        f"Speculation: mean accepted length {_length(use['mean_accepted_length'])} of "
        f"{_length(most)}, {_length(use['tokens_per_pass'])} tokens per pass; "
        f"{use['drafts']:,} drafts, acceptance rate {percent(use['acceptance_rate'])}, by place "
        f"{', '.join(rates)}{more}",
        f"Draft tokens: {use['draft_tokens']:,} verified, {use['kept_tokens']:,} kept; in vain "
        f"{wasted['rejected']:,} rejected, {wasted['discarded']:,} behind the end of an answer, "
        f"{wasted['unused']:,} unused, and {percent(use['flops']['wasted_share'])} of all FLOPs",
        "ITL is the gap between bursts, as the tokens of a pass come together: about TPOT times the tokens "
        "per pass.",
    ]


def _length(tokens: float | None) -> str:
    return MISSING if tokens is None else number(tokens)
