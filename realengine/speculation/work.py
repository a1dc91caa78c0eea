"""A pass that verifies draft tokens, as plain arrays: the runner packs it, and each rank executes it.

Rows of the pass: B decoding sequences with 1 + K rows each (the newest token and its draft tokens), then C
chunks of prompts. The device knows what the host may not know yet: the newest tokens, the positions, and the
tokens that were drafted on it.

    | sampling 12 S | token T | place T | slot T | slot of sequence B + C | length B + C | start B + C + 1
    | following C | verified row R | its sequence R | drawn slot S | path sequence P | path level P
    | path start B + C + 1 | started slot, token, position 3 N | adapters | table place U | block id U |

place: of a decode, the number of the row in its pass, from 0; of a chunk's token, its position. length: of a
decode, its rows; of a chunk, its context. following: the token after a chunk that does not complete its
prompt. Verified rows: all rows of the decodes, and the last row of each chunk that completes a prompt; each
belongs to one of the S sequences that draw. path: with a tree, the rows by which a decode may advance, its
newest token and one per level; path start: of all sequences, if those rows stand for the decodes.

A pass that a CUDA graph runs has rows of padding, with token NO_TOKEN: behind the draft tokens of a sequence
that has fewer than the graph, and all rows of the sequences that fill it up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from realengine.runner.work import SAMPLING_WORDS, Draw, Work, segment_sizes

NO_TOKEN = -2
"""Placeholder for the token of a row of padding, which writes no KV and is never accepted."""


class PassSize(NamedTuple):
    """Sizes of a pass of decoding sequences with equally many rows, as a CUDA graph runs it."""

    num_seqs: int
    num_drafts: int
    """Rows of each sequence beside that of its newest token."""
    depth: int
    """The most draft tokens of a sequence that can be accepted."""
    num_levels: int | None
    """Draft tokens, or levels, that the graph drafts for the next pass; None: it does not draft."""

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.num_seqs * (1 + self.num_drafts)


class VerifyShape(NamedTuple):
    """Sizes of a pass that verifies draft tokens."""

    num_tokens: int
    """T, the rows of all sequences."""
    num_decodes: int
    """B, the decoding sequences, which come first."""
    num_decode_tokens: int
    """Rows of the decoding sequences."""
    num_chunks: int
    """C, the chunks of prompts."""
    num_drawn: int
    """S, the sequences that draw: the decoding ones, and those that complete their prompt."""
    max_query_len: int
    max_context_len: int
    """Upper bound of the context lengths, lookahead included."""
    max_depth: int
    """D, the most draft tokens of a sequence that can be accepted."""
    num_levels: int
    """Draft tokens, or levels of the tree, to draft for the next pass; 0: none."""
    draw: Draw
    num_path_rows: int = 0
    """P, the rows of the decodes by level, with a tree."""
    num_logprobs: int = -1
    """Number of most likely tokens to report beside each drawn token; -1: no logprobs."""
    num_started: int = 0
    """N, the slots that begin with known tokens."""
    num_iterations: int = 1
    """Times that the pass runs, each on what the one before has accepted and drafted."""
    num_segments: int = 0
    """Number of runs of tokens of one adapter; 0: no row uses any."""
    num_updates: int = 0
    """U, the number of changed entries of block tables."""
    is_padded: bool = False
    """Whether there are rows of padding."""

    @property
    def num_words(self) -> int:
        """Number of words of the pass."""
        return sum(VerifyWords.sizes(self))

    @property
    def num_verified(self) -> int:
        """R, the rows that draw a token."""
        return self.num_decode_tokens + self.num_drawn - self.num_decodes


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyWork(Work):
    """A pass that verifies draft tokens, and the operations on the device before it."""

    verify: VerifyShape
    size: PassSize | None = None
    """Size of the graph that runs the pass; None: it runs eagerly."""


class VerifyWords(NamedTuple):
    """Views of the words of a pass that verifies draft tokens."""

    sampling_SW: torch.Tensor
    tokens_T: torch.Tensor
    places_T: torch.Tensor
    slots_T: torch.Tensor
    slots_B: torch.Tensor
    lengths_B: torch.Tensor
    starts_B: torch.Tensor
    following_C: torch.Tensor
    rows_R: torch.Tensor
    sequences_R: torch.Tensor
    drawn_slots_S: torch.Tensor
    path_sequences_P: torch.Tensor
    path_levels_P: torch.Tensor
    path_starts_B: torch.Tensor
    started_N3: torch.Tensor
    segment_starts: torch.Tensor
    segment_slots: torch.Tensor
    places_U: torch.Tensor
    ids_U: torch.Tensor

    @staticmethod
    def sizes(shape: VerifyShape) -> list[int]:
        """Returns the number of words of each section."""
        num_rows = shape.num_decodes + shape.num_chunks
        return [
            SAMPLING_WORDS * shape.num_drawn,
            *[shape.num_tokens] * 3,
            num_rows,
            num_rows,
            num_rows + 1,
            shape.num_chunks,
            shape.num_verified,
            shape.num_verified,
            shape.num_drawn,
            shape.num_path_rows,
            shape.num_path_rows,
            num_rows + 1 if shape.num_path_rows else 0,
            3 * shape.num_started,
            *segment_sizes(shape.num_segments),
            shape.num_updates,
            shape.num_updates,
        ]

    @classmethod
    def of(cls, words: torch.Tensor, shape: VerifyShape) -> VerifyWords:
        """Returns the views, which share memory with words."""
        return cls(*torch.split(words, cls.sizes(shape)))
