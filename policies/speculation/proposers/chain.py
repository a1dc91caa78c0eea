"""Settings of proposers whose draft tokens continue each other, and of those that may also draft a tree."""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, check
from policies.speculation import TokenTree

MAX_DRAFT_TOKENS = 128
"""Most draft tokens of a pass that vLLM's rejection sampler accepts (MAX_SPEC_LEN)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain(Checked):
    """The settings of a proposer without a tree."""

    draft: object
    """The cost and the memory of a draft: see `hwmodels.speculation.draft`."""
    num_speculative_tokens: int
    """Draft tokens of a pass, at most."""

    def __post_init__(self) -> None:
        check(self)
        check_num_tokens(self.num_speculative_tokens)

    @property
    def tree(self) -> TokenTree | None:
        """None: each draft token continues the one before it."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainOrTree(Checked):
    """The settings of a proposer that drafts a chain, or the nodes of a tree."""

    draft: object
    """The cost and the memory of a draft: see `hwmodels.speculation.draft`."""
    num_speculative_tokens: int
    """Draft tokens of a pass, at most; the nodes of the tree, if there is one."""
    tree: TokenTree | None = None
    """The tree of the draft tokens; None: each continues the one before it."""
    model: str | None = None
    """Checkpoint of the draft layers or heads, for launch commands; None: none is known."""

    def __post_init__(self) -> None:
        check(self)
        check_num_tokens(self.num_speculative_tokens)
        if self.tree is not None and self.tree.num_nodes != self.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens}: must be {self.tree.num_nodes}, the "
                "nodes of the tree; set it, or set tree=null for a chain"
            )


def check_num_tokens(num_tokens: int, name: str = "num_speculative_tokens") -> None:
    """Raises ValueError for a number of draft tokens that no pass can have; name: the setting."""
    if not 1 <= num_tokens <= MAX_DRAFT_TOKENS:
        remedy = "; set speculation=none to draft nothing" if num_tokens < 1 else ""
        raise ValueError(f"{name}={num_tokens}: must be 1 to {MAX_DRAFT_TOKENS}{remedy}")
