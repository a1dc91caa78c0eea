"""Sequences whose passes are made up, so that a drafter is driven with any drafts and any acceptance."""

from typing import NamedTuple

import torch

from realengine.runner.batch import Batch
from realengine.speculation.drafter import DecodedRows, Passed, Start
from tests.realengine.eager import eager_logits


class Row(NamedTuple):
    """The tokens of a sequence in a pass: the first num_valid advance it, and newest follows them."""

    seq: int
    tokens: list
    num_valid: int
    newest: int | None  # None: the chunk does not complete its prompt
    is_decode: bool


class Sequences:
    """Known tokens of sequences, of which the last one is not computed, and their blocks in random order."""

    def __init__(self, num_blocks, block_size, max_len, num_seqs, seed=0):
        self.block_size = block_size
        self.known = [[] for _ in range(num_seqs)]
        self.num_computed = [0] * num_seqs
        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(num_blocks, generator=generator) + 1
        width = -(-max_len // block_size)
        self.tables = free[: num_seqs * width].view(num_seqs, width).int()

    def share(self, seq, other, num_tokens):
        """Gives a sequence the first blocks of another one, as a prefix hit does."""
        num_blocks = num_tokens // self.block_size
        self.tables[seq, :num_blocks] = self.tables[other, :num_blocks]
        self.num_computed[seq] = num_blocks * self.block_size

    def passed(self, rows, *, is_told=False, drafts_next=False):
        """Returns a pass of these rows, the decodes first, and advances the sequences."""
        rows = sorted(rows, key=lambda row: not row.is_decode)
        slots, positions, ends, following, last, starts = [], [], [], [], [], [0]
        for row in rows:
            first = self.num_computed[row.seq]
            at = torch.arange(first, first + len(row.tokens))
            ids = self.tables[row.seq, at // self.block_size].long()
            slots.append(
                torch.where(at < first + row.num_valid, ids * self.block_size + at % self.block_size, -1)
            )
            positions.append(at)
            ends.append(first + len(row.tokens))
            following += [*row.tokens[1 : row.num_valid], row.newest or 0, *row.tokens[row.num_valid :]]
            last.append(starts[-1] + row.num_valid - 1)
            starts.append(starts[-1] + len(row.tokens))
            known = self.known[row.seq]
            if row.is_decode:
                known += row.tokens[1 : row.num_valid]
            if row.newest is not None:
                known.append(row.newest)
            self.num_computed[row.seq] = first + row.num_valid
        num_decodes = sum(row.is_decode for row in rows)
        self.last = {row.seq: token for row, token in zip(rows, last, strict=True)}
        batch = Batch(
            tokens_T=torch.tensor([token for row in rows for token in row.tokens]),
            positions_T=torch.cat(positions),
            slots_T=torch.cat(slots),
            block_tables_BM=self.tables[[row.seq for row in rows]],
            chunk_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens_B=torch.tensor(ends, dtype=torch.int32),
            sampled_rows_S=None,
            num_decodes=0,
            max_query_len=max(len(row.tokens) for row in rows),
            max_context_len=max(ends),
        )
        decoded = DecodedRows(
            num_decodes, starts[num_decodes], torch.tensor(last[:num_decodes], dtype=torch.int64)
        )
        return Passed(
            batch=batch,
            following_T=torch.tensor(following),
            states=None,
            decoded=decoded if is_told else None,
            drafts_next=drafts_next,
        )

    def start(self, seqs, num_padding=0):
        """Returns sequences that draft, and padding."""
        zeros = [0] * num_padding
        positions = [self.num_computed[seq] for seq in seqs]
        tables = torch.cat(
            [self.tables[seqs], torch.zeros(num_padding, self.tables.shape[1], dtype=torch.int32)]
        )
        return Start(
            slots_N=torch.tensor([*seqs, *[len(self.known)] * num_padding]),
            newest_N=torch.tensor([self.known[seq][-1] for seq in seqs] + zeros),
            positions_N=torch.tensor(positions + zeros),
            rows_N=torch.tensor([self.last[seq] for seq in seqs] + zeros),
            tables_NM=tables,
            max_context_len=max(positions) + 1,
        )


def next_logits(spec, weights, tokens):
    """Computes the logits [V] after a text, without a cache."""
    return eager_logits(spec, weights, torch.tensor(tokens))[-1]


def continuation(spec, weights, tokens, num_tokens):
    """Computes the greedy continuation of a text, without a cache."""
    found = []
    for _ in range(num_tokens):
        found.append(int(next_logits(spec, weights, [*tokens, *found]).argmax()))
    return found
