"""A small model drafts a tree of tokens, which one pass verifies.

Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and
Verification", ASPLOS 2024, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from policies.speculation import SlotRules, TokenTree
from policies.speculation.proposers.chain import check_num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecinferTree:
    """Drafts the likeliest widths[i] continuations of every node of level i, by one or several small models.

    Several models, of which each drafts one sequence, make a tree with their number as the first width and
    ones behind it.
    """

    method: ClassVar[str] = "specinfer_tree"

    draft: object
    """The cost and the memory of a draft: see `hwmodels.speculation.draft`."""
    widths: tuple[int, ...]
    """Children of each node, by level: the paper's expansion configuration."""

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths={list(self.widths)}: must be a list of numbers >= 1, one per level")
        check_num_tokens(num_nodes(self.widths), f"widths={list(self.widths)}, its nodes")

    @property
    def num_speculative_tokens(self) -> int:
        """Nodes of the tree."""
        return num_nodes(self.widths)

    @property
    def tree(self) -> TokenTree:
        """The tree of these widths."""
        return _tree(self.widths)

    @property
    def rules(self) -> SlotRules:
        """Keeps and takes slots as a draft model does; its tree is put together between two passes."""
        return SlotRules(keeps_lookahead=True, num_input_slots=1, overlaps=False)


def num_nodes(widths: tuple[int, ...]) -> int:
    """Counts the nodes of a tree in which every node of a level has so many children."""
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
    return total


@lru_cache(maxsize=16)
def _tree(widths: tuple[int, ...]) -> TokenTree:
    return TokenTree.of_widths(list(widths))
