"""Settings of requests with several outputs: parallel samples, beam search or tree search."""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.request import Branching


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Outputs per prompt; an engine can share the prompt's KV: see `policies.core.request.Branching`.

    Each independent sample has its own length, drawn from the distribution of outputs given the prompt's
    length. The branches of a beam or tree search all end at one drawn length.
    """

    width: int = 1
    """Samples per prompt, or branches of a search."""
    every: int | None = None
    """Tokens between reselections of branches: 1 in beam search, more in tree search; None: samples."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width={self.width}: must be >= 1 sample")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}: must be >= 1 token, or null for independent samples")
        if self.every is not None and self.width == 1:
            raise ValueError(
                f"width=1, every={self.every}: width must be >= 2 for a search; every=null for one sample"
            )

    @property
    def branching(self) -> Branching | None:
        """The branching of each request; None for one output."""
        return None if self.width == 1 else Branching(self.width, self.every)


ONE_ANSWER = Answers()
"""Default: one output per request."""
