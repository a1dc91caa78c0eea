"""One step's work as plain arrays: the runner packs it, and each tensor-parallel rank executes it.

All inputs of a step go to the device in one copy of `words`. A decode step's words lie at fixed positions, so
that a captured graph finds them; rows after the last one are padding.

    decode  | sampling 12 B | token B | slot B | context B | table place B | block id B | adapters |
    mixed   | sampling 12 S | token T | position T | slot of token T | slot B | context B |
            | start of chunk B - D + 1 | drawn row S | its slot S | adapters | table place U | block id U |

adapters: segment start G + 1, segment slot G, if any row uses one (`realengine.model.lora`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.sampling import Penalties, Sampling
from policies.core.sequence import Sequence
from realengine.runner.token_masks import AllowedTokens, SlotBiases

SAMPLING_WORDS = 12
ON_DEVICE = -1
"""Placeholder for the newest token drawn in a slot, which the host may not have seen yet."""


class Draw(IntEnum):
    """Way to draw a step's tokens, the most demanding of its rows."""

    greedy = 0  # every row
    sample = 1
    penalised = 2  # a row has penalties, biases, or tokens that it may not draw


class Shape(NamedTuple):
    """Sizes of a step: T tokens in B rows, S of which draw a token."""

    num_tokens: int
    num_rows: int
    num_drawn: int
    num_decodes: int
    """Number of rows that decode, which come first; if all rows do, the layout is that of a decode step."""
    max_query_len: int
    max_context_len: int
    draw: Draw
    num_iterations: int = 1
    num_logprobs: int = -1
    """Number of most likely tokens to report beside each drawn token; -1: no logprobs."""
    num_segments: int = 0
    """G, the number of runs of tokens of one adapter; 0: no row uses any."""
    num_updates: int = 0
    """U, the number of changed entries of block tables, in a mixed step."""

    @property
    def is_decode(self) -> bool:
        """True if every row brings one token and draws one."""
        return self.num_decodes == self.num_rows == self.num_drawn


class Padding(NamedTuple):
    """The row of the per-slot arrays that pads a step up to the batch size of its graph."""

    slot: int
    max_blocks: int

    @property
    def place(self) -> int:
        """Place of the padding row in the flattened block tables."""
        return self.slot * self.max_blocks


class PrefillRow(NamedTuple):
    """A row of the batch with several tokens: positions `first` to `first + num_tokens - 1` of a sequence.

    slot: its block table and tokens. drawing: branches that draw a token after the last position.
    """

    seq: Sequence
    slot: int
    first: int
    num_tokens: int
    drawing: range


class ScoredRows(NamedTuple):
    """Rows of a step whose next token is known: a token of a prompt, of which the log-probability is wanted.

    rows_P: rows of T. tokens_P: the tokens after them. num_top: most likely tokens to report with each.
    """

    rows_P: NDArray[np.int32]
    tokens_P: NDArray[np.int32]
    num_top: int


class PenaltyInit(NamedTuple):
    """Initial token counts of a sequence with penalties; its first num_prompt tokens are its prompt."""

    slot: int
    num_prompt: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A step, and the operations on the device before it.

    moves: in order, (whether into host memory, (block, place in host memory) pairs [N, 2]). copies: (from,
    to) blocks [N, 2]. table_updates: (place in the flattened tables, block id) [N, 2], for updates that do
    not fit into a decode step's words. penalty_inits: sequences with penalties that begin with this step.
    """

    shape: Shape | None = None
    """Shape of the step; None: nothing is computed."""
    words: NDArray[np.int32] | None = None
    moves: tuple[tuple[bool, NDArray[np.int32]], ...] = ()
    adapters: tuple[tuple[str, int], ...] = ()
    """LoRA adapters, by name, that are loaded into slots."""
    copies: NDArray[np.int32] | None = None
    table_updates: NDArray[np.int32] | None = None
    penalty_inits: tuple[PenaltyInit, ...] = ()
    biases: tuple[SlotBiases, ...] = ()
    """Slots whose biases begin or end with this step."""
    allowed: AllowedTokens | None = None
    """Tokens that the rows of outputs with a form may draw; None: there is no such row."""
    scored: ScoredRows | None = None
    """Rows of a step with chunks that tell log-probabilities of prompts; None: none is wanted."""
    cuts: tuple[tuple[int, ...], ...] = ()
    """What the step does to prompts if a cache drops KV; see `KeptTokens`."""


class DecodeWords(NamedTuple):
    """Views of a decode step's words; B rows."""

    sampling_BW: torch.Tensor
    tokens_B: torch.Tensor
    slots_B: torch.Tensor
    contexts_B: torch.Tensor
    places_B: torch.Tensor
    ids_B: torch.Tensor
    segment_starts: torch.Tensor
    segment_slots: torch.Tensor

    @staticmethod
    def sizes(shape: Shape) -> list[int]:
        """Returns the number of words of each section."""
        return [SAMPLING_WORDS * shape.num_rows, *[shape.num_rows] * 5, *segment_sizes(shape.num_segments)]

    @classmethod
    def of(cls, words: torch.Tensor, shape: Shape) -> DecodeWords:
        """Returns the views, which share memory with words."""
        return cls(*torch.split(words, cls.sizes(shape)))


class MixedWords(NamedTuple):
    """Views of a mixed step's words."""

    sampling_SW: torch.Tensor
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    slots_B: torch.Tensor
    contexts_B: torch.Tensor
    chunk_starts: torch.Tensor
    drawn_S: torch.Tensor
    drawn_slots_S: torch.Tensor
    segment_starts: torch.Tensor
    segment_slots: torch.Tensor
    places_U: torch.Tensor
    ids_U: torch.Tensor

    @classmethod
    def of(cls, words: torch.Tensor, shape: Shape) -> MixedWords:
        """Returns the views, which share memory with words."""
        tokens, rows, drawn = shape.num_tokens, shape.num_rows, shape.num_drawn
        sizes = [
            SAMPLING_WORDS * drawn,
            tokens,
            tokens,
            tokens,
            rows,
            rows,
            rows - shape.num_decodes + 1,
            drawn,
            drawn,
            *segment_sizes(shape.num_segments),
            shape.num_updates,
            shape.num_updates,
        ]
        return cls(*torch.split(words, sizes))


def segment_sizes(num_segments: int) -> list[int]:
    """Returns the number of words of the starts and of the adapter slots of segments."""
    return [num_segments + 1, num_segments] if num_segments else [0, 0]


def pack(sections: SequenceOf[np.ndarray]) -> NDArray[np.int32]:
    """Concatenates sections of integers."""
    return np.concatenate(sections).astype(np.int32)


SAMPLING = np.dtype(
    [
        ("seed", np.int64),
        ("request", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int32),
        ("unused", np.int32),
    ]
)
"""Settings of a row, as the runner keeps them by slot: SAMPLING_WORDS words."""
_WIDE_WORDS = 4


def as_int64(seed: int) -> int:
    """Converts a seed to a signed 64-bit integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def pack_sampling(rows: np.ndarray) -> NDArray[np.int32]:
    """Packs the settings of S rows [S] of dtype SAMPLING as words, field by field."""
    words = np.ascontiguousarray(rows).view(np.int32).reshape(len(rows), SAMPLING_WORDS)
    wide = words[:, :_WIDE_WORDS].reshape(len(rows), 2, 2).transpose(1, 0, 2)
    return np.concatenate([wide.reshape(-1), words[:, _WIDE_WORDS:].T.reshape(-1)])


class RowSettings(NamedTuple):
    """The settings that `pack_sampling` packed, as views on the device: each [S]."""

    seed: torch.Tensor
    request: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    top_k: torch.Tensor

    @classmethod
    def of(cls, words: torch.Tensor) -> RowSettings:
        """Returns the views of words: int32 [SAMPLING_WORDS * S], aligned to 8 bytes."""
        num_rows = len(words) // SAMPLING_WORDS
        seed, request = words[: _WIDE_WORDS * num_rows].view(torch.int64).view(2, num_rows)
        narrow = words[_WIDE_WORDS * num_rows :].view(SAMPLING_WORDS - _WIDE_WORDS, num_rows)
        temperature, top_p, min_p, repetition, presence, frequency = narrow[:6].view(torch.float32)
        return cls(seed, request, temperature, top_p, min_p, repetition, presence, frequency, top_k=narrow[6])

    def of_rows(self, numbers_R: torch.Tensor) -> RowSettings:
        """Returns the settings of rows that belong to these sequences."""
        return RowSettings(*(setting[numbers_R] for setting in self))

    def sampling(self, positions_S: torch.Tensor) -> Sampling:
        """Returns the sampling settings. positions_S: int64, positions of the tokens to draw."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            request=self.request,
            position=positions_S,
        )

    def penalties(self, counts_SV: torch.Tensor, slots_S: torch.Tensor) -> Penalties:
        """Returns the penalties. counts_SV: token counts of all slots."""
        return Penalties(
            repetition=self.repetition,
            presence=self.presence,
            frequency=self.frequency,
            counts=counts_SV,
            row=slots_S,
        )
