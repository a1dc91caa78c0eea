"""How many answers a request asks for, and how they come to be."""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.request import Branching


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Several answers to each prompt, whose KV an engine can share; see `policies.core.request.Branching`.

    Independent samples have lengths of their own, drawn from the distribution of outputs with the prompt's
    length given. The branches of a beam or tree search all end at one drawn length.
    """

    width: int = 1
    """Answers to a prompt, or branches of a search."""
    every: int | None = None
    """Tokens between choices of branches: 1 in beam search, more in tree search; None for samples."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width={self.width}: must be >= 1 answer")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}: must be >= 1 token, or null for independent samples")
        if self.every is not None and self.width == 1:
            raise ValueError(
                f"width=1, every={self.every}: a search needs branches; set width >= 2, or every=null"
            )

    @property
    def branching(self) -> Branching | None:
        """As a request asks for it; None for one answer."""
        return None if self.width == 1 else Branching(self.width, self.every)


ONE_ANSWER = Answers()
"""What a request asks for that says nothing else."""
