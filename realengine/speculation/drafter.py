"""The interface of drafters, which draft tokens on the device, and what they see of the target's last pass.

Letters of array names: T tokens of the pass, N sequences that draft, K draft tokens, D levels of a tree,
M blocks, H hidden size, V vocabulary. A slot is a sequence's row of the arrays that the engine keeps on the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from kernels.block_copy import CacheSet
from kernels.sampling import Sampling
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder, States
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch
from realengine.runner.parallel import Group


class DecodedRows(NamedTuple):
    """The first rows of a pass, which belong to sequences that decode."""

    num_seqs: int
    num_tokens: int
    """Tokens of these rows, those that do not advance their sequences included."""
    last_tokens_D: torch.Tensor
    """The last token of each that advances it, as its number among the tokens of the pass, int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A pass of the target that has been verified, as rows that advance their sequences.

    A decoding sequence has D + 1 rows: its newest token and one draft token per level. Draft tokens that were
    not accepted have a negative slot in `batch.slots_T` and the positions that follow, so that their keys are
    neither written nor seen. A prompt's chunk has its tokens.
    """

    batch: Batch
    """The rows in one batch without decode rows: tokens, positions, slots and block tables of the target."""
    following_T: torch.Tensor
    """The token after each row's token, int64: of the last row of a sequence its newest token."""
    states: States | None
    """The target's hidden states of the rows [T, H], for drafters with `wants_states`; else None."""
    decoded: DecodedRows | None = None
    """The rows of the sequences that decode; None: the rows are not told apart."""
    begun_slots: torch.Tensor | None = None
    """Slots that a sequence has got just before the pass, for the first time or again, int64; None: none."""
    drafts_next: bool = False
    """Whether `draft` is called for this pass, too, so that it may do what `follow` would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Sequences that draft: N of them, in the order of the plan.

    Rows beyond those of the plan may be padding, whose slot is the padding slot and whose block table is that
    of block 0.
    """

    slots_N: torch.Tensor
    """Slots, int64."""
    newest_N: torch.Tensor
    """Newest tokens, int64: drawn, and not computed by the target yet."""
    positions_N: torch.Tensor
    """Positions of the newest tokens, int64: the numbers of tokens that the target has computed."""
    rows_N: torch.Tensor
    """The row of `Passed` before each newest token, int64."""
    tables_NM: torch.Tensor
    """Block tables, int32, with blocks for the draft tokens."""
    max_context_len: int
    """Upper bound of positions_N + 1."""
    sampling: Sampling | None = None
    """Sampling settings, with the positions after the newest tokens; None: all sequences are greedy."""


class Drafts(NamedTuple):
    """Draft tokens of N sequences."""

    tokens_NK: torch.Tensor
    """int64; with a tree, its nodes in the order of `TokenTree`."""
    probs_NKV: torch.Tensor | None = None
    """Distributions, fp32, from which the tokens were drawn; None: each is the drafter's only choice."""


class Drafter(Protocol):
    """Drafts tokens on one device, on every tensor-parallel rank alike."""

    wants_states: bool
    """Whether it reads the target's hidden states."""
    is_static: bool
    """Whether a CUDA graph can hold its work, because the host reads nothing and keeps no state of it."""
    taps: tuple[int, ...]
    """The layers of the target of whose inputs it reads the hidden states; see `Decoder.states`."""

    def follow(self, passed: Passed) -> None:
        """Takes note of a pass of the target: writes its own keys and values of the rows, for example."""
        ...

    def draft(self, passed: Passed, start: Start, num_levels: int) -> Drafts:
        """Drafts num_levels tokens, or levels of its tree, for each sequence; called after `follow`."""
        ...

    @property
    def cache_sets(self) -> tuple[CacheSet, ...]:
        """The tensors of its own KV cache that are copied and swapped with a block; empty: it has none."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterContext:
    """The target model of one rank, and the sizes of its engine."""

    target: Decoder
    architecture: Architecture
    source: Path | None
    """The target's checkpoint; None: it has random weights."""
    backend: Backend
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    group: Group
    block_size: int
    max_model_len: int
    max_num_seqs: int
    seed: int


class LoadedDraft(NamedTuple):
    """A drafter with weights on the device, which still lacks its KV cache."""

    block_bytes: int
    """Bytes on each rank that it needs per KV block of the target."""
    build: Callable[[KvCache], Drafter]
    """Builds the drafter beside the target's KV cache: with as many blocks as it has."""
    draws: bool = False
    """Whether draft tokens are drawn from distributions, which the engine keeps until they are verified."""
