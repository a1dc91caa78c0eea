"""A published speed-up of speculative decoding, and the settings that it was measured with.

Of a published row only the tokens per pass are an input, where the row gives them; where it does not, the row
names what is assumed instead. Settings of engines belong to a whole comparison, never to one of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

GIVEN = ""
"""Value of `Row.assumed` if the tokens per pass are published with the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A published speed-up over the same engine without speculation."""

    setting: str
    published: float
    tokens: float
    """Mean number of tokens that a sequence gets from a pass."""
    draft: tuple[str, ...] = ()
    """Settings that add the proposer."""
    batch: int = 1
    assumed: str = GIVEN
    """What the tokens per pass were taken from; empty: the published row."""
    draft_steps: float | None = None
    """Price of a whole draft in units of a pass; None: by the hardware models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Rows of one source, measured on one engine."""

    name: str
    source: str
    rows: tuple[Row, ...]
    reason: str
    """Reason for the differences."""
    engine: tuple[str, ...] = ()
    """Settings of the engine without speculation; empty: rows have prices in units of a pass."""
    speculating: tuple[str, ...] = ()
    """Settings that the engine changes by itself once it speculates."""
    context: int = 600
    """Tokens of a sequence in the middle of its answer."""
    limit: int | None = None
    """Most rows of a pass; larger batches run in turns."""
    shares_memory: bool = False
    """Whether the draft has the target's weights and KV; the simulator would give it memory of its own."""
    is_fitted: bool = False
    """Whether settings of the hardware models were fitted to these rows."""


def mean_tokens(rate: float, places: int) -> float:
    """Returns the tokens of a pass if each draft token is accepted with the same probability."""
    return sum(rate**place for place in range(places + 1))
