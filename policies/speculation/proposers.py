"""Proposers: they draft the tokens that a pass verifies.

A proposer is a frozen dataclass with its settings and its rules for KV slots and budgets (`SlotRules`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

from fieldlimits import Checked, Ge, NonNegativeInt, PositiveInt, Share, check
from policies.speculation import SlotRules, TokenTree

MAX_DRAFT_TOKENS = 128
"""Maximum draft tokens per pass that vLLM's rejection sampler supports (MAX_SPEC_LEN)."""


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
        """None: each draft token continues the previous one."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainOrTree(Checked):
    """The settings of a proposer that drafts a chain, or the nodes of a tree."""

    draft: object
    """The cost and the memory of a draft: see `hwmodels.speculation.draft`."""
    num_speculative_tokens: int
    """Maximum number of draft tokens per pass; with a tree, its number of nodes."""
    tree: TokenTree | None = None
    """The tree of the draft tokens; None: each continues the previous one."""
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
    """Raises ValueError for an invalid number of draft tokens per pass; name: the setting."""
    if not 1 <= num_tokens <= MAX_DRAFT_TOKENS:
        remedy = "; set speculation=none to draft nothing" if num_tokens < 1 else ""
        raise ValueError(f"{name}={num_tokens}: must be 1 to {MAX_DRAFT_TOKENS}{remedy}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModel(Chain):
    """Drafts with a small model, which has its own weights and KV.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al.,
    "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """

    method: ClassVar[str] = "draft_model"

    @property
    def rules(self) -> SlotRules:
        """Reserves slots for its KV.

        Takes one more token per request, for the last one that it has not seen.
        """
        return SlotRules(keeps_lookahead=True, num_input_slots=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle(ChainOrTree):
    """Drafts a chain (as vLLM does), or a tree (as published, and in SGLang).

    Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024.
    """

    method: ClassVar[str] = "eagle"

    disable_eagle_block_drop: bool = False
    """True: the last block of a prefix-cache hit is used unchanged, without the hidden states before it."""

    @property
    def rules(self) -> SlotRules:
        """Reserves slots for its KV, and recomputes the last block of a hit to get hidden states.

        The host takes part in drafting a tree between two passes: SGLang does not overlap drafts with several
        branches, and vLLM drafts only chains.
        """
        return SlotRules(
            keeps_lookahead=True,
            drops_last_block=not self.disable_eagle_block_drop,
            overlaps=self.tree is None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3(Eagle):
    """Drafts like `Eagle`, with a different draft layer.

    Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    NeurIPS 2025.
    """

    method: ClassVar[str] = "eagle3"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mtp(Chain):
    """Drafts with the modules in turn, one token each; a single module drafts all tokens.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2.
    """

    method: ClassVar[str] = "mtp"

    num_nextn_predict_layers: PositiveInt = 1
    """Number of modules with separate weights."""
    disable_eagle_block_drop: bool = False
    """True: the last block of a prefix-cache hit is used unchanged, without the hidden states before it."""

    def __post_init__(self) -> None:
        Chain.__post_init__(self)  # super() does not know classes with slots
        modules, tokens = self.num_nextn_predict_layers, self.num_speculative_tokens
        if tokens > modules and tokens % modules:
            raise ValueError(
                f"num_speculative_tokens={tokens}: must be a multiple of num_nextn_predict_layers={modules}, "
                f"or less, as the modules draft in turn; nearest: {tokens - tokens % modules}"
            )

    @property
    def rules(self) -> SlotRules:
        """Reserves slots for its KV; several modules compute the end of a prompt together."""
        several = min(self.num_nextn_predict_layers, self.num_speculative_tokens) > 1
        return SlotRules(
            keeps_lookahead=True,
            drops_last_block=not self.disable_eagle_block_drop,
            prefill_lookahead=self.num_speculative_tokens if several else 0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Medusa(ChainOrTree):
    """Drafts the most likely token of each head, as in vLLM, or a tree of the most likely, as published.

    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024.
    """

    method: ClassVar[str] = "medusa"

    @property
    def rules(self) -> SlotRules:
        """Has no separate KV; vLLM does not schedule it asynchronously."""
        return SlotRules(overlaps=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ngram(Chain):
    """Drafts the tokens after an earlier occurrence of the last n tokens, trying the longest n first.

    Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless Acceleration of
    Large Language Models", 2023.
    """

    method: ClassVar[str] = "ngram"

    prompt_lookup_max: PositiveInt = 5
    """Tokens of the longest n-gram that is looked up."""
    prompt_lookup_min: int | None = None
    """Tokens of the shortest n-gram that is looked up; None: the same as the longest."""
    reference: tuple[int, ...] = ()
    """Token ids of a text in which n-grams are also looked up, for all requests."""

    def __post_init__(self) -> None:
        Chain.__post_init__(self)  # super() does not know classes with slots
        if not 1 <= self.min_ngram <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min}: must be 1 to {self.prompt_lookup_max}, "
                "prompt_lookup_max"
            )
        if any(token < 0 for token in self.reference):
            raise ValueError(f"reference={min(self.reference)}: must be token ids, which are >= 0")

    @property
    def min_ngram(self) -> int:
        """Tokens of the shortest n-gram that is looked up."""
        return self.prompt_lookup_max if self.prompt_lookup_min is None else self.prompt_lookup_min

    @property
    def rules(self) -> SlotRules:
        """Needs the sampled tokens on the host, so the engine schedules synchronously."""
        return SlotRules(overlaps=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suffix(Chain):
    """Drafts at most max_spec_factor times the length of the match.

    Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS 2025.
    """

    method: ClassVar[str] = "suffix"

    suffix_decoding_max_tree_depth: PositiveInt = 24
    """Maximum number of tokens of match plus draft."""
    suffix_decoding_max_cached_requests: NonNegativeInt = 10_000
    """Maximum number of earlier outputs in the tree (the oldest are dropped); 0: only the request's own
    tokens.
    """
    suffix_decoding_max_spec_factor: Annotated[float, Ge(0)] = 1.0
    """Draft tokens per matched token, at most."""
    suffix_decoding_min_token_prob: Share = 0.1
    """Minimum share of the earlier continuations that a draft token must have."""

    @property
    def rules(self) -> SlotRules:
        """Needs the sampled tokens on the host, so the engine schedules synchronously."""
        return SlotRules(overlaps=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookahead(Checked):
    """Verifies several n-grams from a pool that begin with the newest token, without a draft model.

    A pass has window x (ngram - 1) rows that refine guesses and guesses x (ngram - 1) rows of candidates.

    Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML 2024.
    """

    method: ClassVar[str] = "lookahead"

    draft: object
    """The rows that refine guesses: see `hwmodels.speculation.draft.PassDraft`."""
    window: PositiveInt = 15
    """W: number of future positions guessed at once."""
    ngram: Annotated[int, Ge(2)] = 5
    """N: tokens per n-gram; the first one is known."""
    guesses: PositiveInt = 15
    """G: n-grams that a pass verifies."""

    def __post_init__(self) -> None:
        check(self)
        rows = f"guesses={self.guesses}, ngram={self.ngram}: guesses x (ngram - 1)"
        check_num_tokens(self.num_speculative_tokens, rows)

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens per pass: all tokens of its n-grams except the first ones."""
        return self.guesses * (self.ngram - 1)

    @property
    def tree(self) -> TokenTree:
        """The n-grams as branches, none of which forks."""
        return _tree(self.guesses, self.ngram - 1)

    @property
    def rules(self) -> SlotRules:
        """Reserves slots for the KV of guesses; no engine schedules it asynchronously."""
        return SlotRules(keeps_lookahead=True, overlaps=False)


@lru_cache(maxsize=16)
def _tree(branches: int, depth: int) -> TokenTree:
    return TokenTree.of_widths([branches, *[1] * (depth - 1)])


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecinferTree:
    """Drafts the widths[i] most likely continuations of every node of level i, with one or more small models.

    Several models that each draft one sequence make a tree with their number as the first width, followed by
    ones.

    Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference
    and Verification", ASPLOS 2024, section 3.
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
        return _tree_of_widths(self.widths)

    @property
    def rules(self) -> SlotRules:
        """Reserves slots like a draft model; its tree is assembled between two passes."""
        return SlotRules(keeps_lookahead=True, num_input_slots=1, overlaps=False)


def num_nodes(widths: tuple[int, ...]) -> int:
    """Counts the nodes of a tree in which every node of a level has this many children."""
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
    return total


@lru_cache(maxsize=16)
def _tree_of_widths(widths: tuple[int, ...]) -> TokenTree:
    return TokenTree.of_widths(list(widths))


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfSpeculative(Chain):
    """Drafts with a subset of the model's layers, on the KV of these layers.

    Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
    ACL 2024; Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL
    2024.
    """

    method: ClassVar[str] = "self_speculative"

    @property
    def rules(self) -> SlotRules:
        """Reserves slots for the KV of its draft tokens; no engine schedules it asynchronously."""
        return SlotRules(keeps_lookahead=True, overlaps=False)
