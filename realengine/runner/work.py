"""One step's work as plain arrays: the runner packs it, and each tensor-parallel rank executes it.

All inputs of a step go to the device in one copy of `words`. In a step in which each row decodes one token,
they lie at fixed positions, so that a captured graph finds them; rows after the last one are padding. All
other steps have B rows, D of which decode, and then chunks of prompts; S sequences draw, at R rows.

    decode  | sampling 12 B | token B | slot B | context B | table place B | block id B | adapters |
    others  | sampling 12 S | token T | place T | slot of token T | slot B | context B | start of chunk |
            | drawn row R | slot of drawing sequence S | drafts | adapters | table place U | block id U |

place: the position of a token. adapters: segment start G + 1, segment slot G, if any row uses one
(`realengine.model.lora`). Without drafts R = S: the rows before the drawn tokens.

In an engine that speculates, a decoding sequence has 1 + K rows, its newest token and K draft tokens; all of
them draw. The device knows what the host may not know yet: the newest tokens, the positions, and the tokens
that were drafted on it. So place is the number of the row in its sequence, from 0, and context the number of
these rows. Then there are also:

    drafts  | start B + 1 | following C | sequence of drawn row R | path sequence P | path level P
            | path start B + 1 | started slot, token, position 3 N |

start: the first row of each sequence, and the end. following: the token after a chunk that does not complete
its prompt, of C chunks. path: with a tree, the rows by which a decode may advance, its newest token and one
per level; path start: of all sequences, if those rows stand for the decodes. started: slots that begin with
known tokens. A step that a CUDA graph runs has rows of padding, with token NO_TOKEN: behind the draft tokens
of a sequence that has fewer than the graph, and all rows of the sequences that fill it up.
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
NO_TOKEN = -2
"""Placeholder for the token of a row of padding, which writes no KV and is never accepted."""


class Draw(IntEnum):
    """Way to draw a step's tokens, the most demanding of its rows."""

    greedy = 0  # every row
    sample = 1
    penalised = 2  # a row has penalties, biases, or tokens that it may not draw


class StepSize(NamedTuple):
    """Sizes of a step of decoding sequences with equally many rows, as a CUDA graph runs it."""

    num_seqs: int
    num_drafts: int = 0
    """Rows of each sequence beside that of its newest token."""
    depth: int = 0
    """The most draft tokens of a sequence that can be accepted."""
    num_levels: int | None = None
    """Draft tokens, or levels, that the graph drafts for the next step; None: it does not draft."""

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.num_seqs * (1 + self.num_drafts)


class DraftSizes(NamedTuple):
    """Sizes of the drafts of a step in an engine that speculates."""

    num_decode_tokens: int
    """Rows of the decoding sequences."""
    max_depth: int
    """The most draft tokens of a sequence that can be accepted."""
    num_levels: int
    """Draft tokens, or levels of the tree, to draft for the next step; 0: none."""
    num_path_rows: int
    """P, the rows of the decodes by level, with a tree."""
    num_started: int
    """N, the slots that begin with known tokens."""
    is_padded: bool
    """Whether there are rows of padding."""


class Shape(NamedTuple):
    """Sizes of a step: T tokens of B sequences, S of which draw."""

    num_tokens: int
    num_rows: int
    num_drawn: int
    num_decodes: int
    """Number of sequences that decode, which come first."""
    max_query_len: int
    max_context_len: int
    draw: Draw
    num_iterations: int = 1
    num_logprobs: int = -1
    """Number of most likely tokens to report beside each drawn token; -1: no logprobs."""
    num_segments: int = 0
    """G, the number of runs of tokens of one adapter; 0: no row uses any."""
    num_updates: int = 0
    """U, the number of changed entries of block tables; those of a decode step are not counted."""
    drafts: DraftSizes | None = None
    """None: the engine does not speculate."""

    @property
    def is_decode(self) -> bool:
        """True if every row brings one token and draws one, without drafts: the layout of a decode step."""
        return self.drafts is None and self.num_decodes == self.num_rows == self.num_drawn

    @property
    def num_drawn_rows(self) -> int:
        """R, the rows that draw a token."""
        if self.drafts is None:
            return self.num_drawn
        return self.drafts.num_decode_tokens + self.num_drawn - self.num_decodes

    @property
    def num_singles(self) -> int:
        """Number of first rows that are plain decodes: all that decode, or none beside drafts."""
        if self.drafts is None or self.drafts.num_decode_tokens == self.num_decodes:
            return self.num_decodes
        return 0


class Padding(NamedTuple):
    """The row of the per-slot arrays that pads a step up to the batch size of its graph."""

    slot: int
    max_blocks: int

    @classmethod
    def of(cls, num_slots: int, max_model_len: int, block_size: int) -> Padding:
        """Returns the row behind those of num_slots sequences of up to max_model_len tokens."""
        return cls(num_slots, -(-max_model_len // block_size))

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
    size: StepSize | None = None
    """Size of the graph that runs the step; None: it runs eagerly."""
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
    rank_tokens: tuple[int, ...] = ()
    """Tokens of each rank of data-parallel attention; empty: there is one."""
    of_ranks: tuple[Work, ...] = ()
    """The step of each rank of data-parallel attention, in place of this one; empty: all do this one."""
    cuts: tuple[tuple[int, ...], ...] = ()
    """What the step does to prompts if a cache drops KV; see `KeptTokens`."""

    def of_rank(self, rank: int) -> Work:
        """Returns what a rank of data-parallel attention does."""
        return self.of_ranks[rank] if self.of_ranks else self

    @property
    def draws(self) -> bool:
        """True if there is a step, of which the ranks that draw tell rank 0."""
        return self.shape is not None or bool(self.of_ranks)


class DecodeWords(NamedTuple):
    """Views of a decode step's words; B rows, each of which may have a changed block."""

    sampling_SW: torch.Tensor
    tokens_B: torch.Tensor
    slots_B: torch.Tensor
    contexts_B: torch.Tensor
    places_U: torch.Tensor
    ids_U: torch.Tensor
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


class StepWords(NamedTuple):
    """Views of the words of any other step."""

    sampling_SW: torch.Tensor
    tokens_T: torch.Tensor
    places_T: torch.Tensor
    slots_T: torch.Tensor
    slots_B: torch.Tensor
    contexts_B: torch.Tensor
    chunk_starts: torch.Tensor
    drawn_R: torch.Tensor
    drawn_slots_S: torch.Tensor
    starts_B: torch.Tensor
    following_C: torch.Tensor
    sequences_R: torch.Tensor
    path_sequences_P: torch.Tensor
    path_levels_P: torch.Tensor
    path_starts_B: torch.Tensor
    started_N3: torch.Tensor
    segment_starts: torch.Tensor
    segment_slots: torch.Tensor
    places_U: torch.Tensor
    ids_U: torch.Tensor

    @staticmethod
    def sizes(shape: Shape) -> list[int]:
        """Returns the number of words of each section."""
        num_rows, drafts, num_drawn_rows = shape.num_rows, shape.drafts, shape.num_drawn_rows
        of_drafts = [0] * 7
        if drafts is not None:
            of_drafts = [
                num_rows + 1,
                num_rows - shape.num_decodes,
                num_drawn_rows,
                *[drafts.num_path_rows] * 2,
                num_rows + 1 if drafts.num_path_rows else 0,
                3 * drafts.num_started,
            ]
        return [
            SAMPLING_WORDS * shape.num_drawn,
            *[shape.num_tokens] * 3,
            *[num_rows] * 2,
            num_rows - shape.num_singles + 1,
            num_drawn_rows,
            shape.num_drawn,
            *of_drafts,
            *segment_sizes(shape.num_segments),
            *[shape.num_updates] * 2,
        ]

    @classmethod
    def of(cls, words: torch.Tensor, shape: Shape) -> StepWords:
        """Returns the views, which share memory with words."""
        return cls(*torch.split(words, cls.sizes(shape)))


Views = DecodeWords | StepWords


def views_of(words: torch.Tensor, shape: Shape) -> Views:
    """Returns the views of a step's words."""
    return DecodeWords.of(words, shape) if shape.is_decode else StepWords.of(words, shape)


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
