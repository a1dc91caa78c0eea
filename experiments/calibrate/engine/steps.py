"""Input of an executor for steps of any shape, without requests and policies.

`realengine.runner.runner` packs the same input in service. Every slot keeps its block table during a
measurement, so that steps contain no updates of block tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations import IterationShape, causal_pairs
from realengine.runner.graphs import Graphs
from realengine.runner.packing import StepRows, pack_decode, pack_step
from realengine.runner.work import Draw, Padding, Work


class Chunk(NamedTuple):
    """New tokens of one prompt after its cached tokens, and whether they complete the prompt.

    verifies: whether a token is drawn at every row, as in passes with draft tokens, not at the last one only.
    """

    cached: int
    new: int
    completes: bool = True
    verifies: bool = False

    @property
    def num_drawn(self) -> int:
        """Number of rows at which a token is drawn."""
        return self.new if self.verifies else int(self.completes)


@dataclass(frozen=True, slots=True)
class Step:
    """Decodes and prefill chunks of one step; contexts: tokens of each decode, its new token included."""

    contexts: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that pass through the layers."""
        return len(self.contexts) + sum(chunk.new for chunk in self.chunks)

    @property
    def num_drawn(self) -> int:
        """Number of rows that pass through the LM head."""
        return len(self.contexts) + sum(chunk.num_drawn for chunk in self.chunks)

    @property
    def kind(self) -> str:
        """One of decode, prefill and mixed."""
        if not self.chunks:
            return "decode"
        return "mixed" if self.contexts else "prefill"

    @property
    def shape(self) -> IterationShape:
        """Shape of the step as hardware models take it."""
        return IterationShape(
            decode_seqs=len(self.contexts),
            decode_context_tokens=sum(self.contexts),
            prefill_seqs=len(self.chunks),
            prefill_tokens=sum(chunk.new for chunk in self.chunks),
            prefill_pairs=sum(causal_pairs(chunk.new, chunk.cached) for chunk in self.chunks),
            prefill_context_tokens=sum(chunk.cached + chunk.new for chunk in self.chunks),
            sampled_seqs=self.num_drawn,
        )


REFERENCE = Step(contexts=(1,) * 8)
"""Step whose time shows the speed of the machine at that moment."""


class Tables(NamedTuple):
    """Block tables of all slots: [S, M]."""

    ids_SM: NDArray[np.int32]

    @classmethod
    def drawn(cls, num_slots: int, num_blocks: int, blocks_each: int, seed: int) -> Tables:
        """Draws blocks in random order, as after hours of serving; if there are too few, slots share them."""
        random = np.random.default_rng(seed)
        wanted = num_slots * blocks_each
        rounds = [random.permutation(num_blocks) + 1 for _ in range(-(-wanted // num_blocks))]
        return cls(np.concatenate(rounds)[:wanted].reshape(num_slots, blocks_each).astype(np.int32))

    def work(self) -> Work:
        """Returns the work that writes all block tables."""
        places = np.arange(self.ids_SM.size, dtype=np.int32)
        return Work(table_updates=np.stack([places, self.ids_SM.ravel()], axis=1))


def work_of(step: Step, padding: Padding, vocab_size: int, graphs: Graphs | None = None) -> Work:
    """Packs a step: greedy sampling, random tokens, slots from 0 on, decodes padded to a graph's size."""
    if step.chunks:
        return _mixed(step, vocab_size)
    count = len(step.contexts)
    size = None if graphs is None else graphs.fit(count, count)
    num_rows = count if size is None else size.num_seqs
    tokens, slots, contexts = np.zeros((3, num_rows), np.int64)
    tokens[:count] = _tokens(count, vocab_size)
    slots[:] = padding.slot
    slots[:count] = np.arange(count)
    contexts[:] = 1
    contexts[:count] = step.contexts
    return replace(_decode(tokens, slots, contexts, padding), size=size)


def padding_work(padding: Padding) -> Work:
    """Packs the reference step on the padding slot, which changes no sequence."""
    contexts = np.array(REFERENCE.contexts)
    return _decode(np.zeros_like(contexts), np.full_like(contexts, padding.slot), contexts, padding)


def _decode(
    tokens: NDArray[np.int64], slots: NDArray[np.int64], contexts: NDArray[np.int64], padding: Padding
) -> Work:
    longest, place = int(contexts.max()), padding.place
    shape, words = pack_decode(slots, contexts, longest, draw=Draw.greedy, place=place, tokens_B=tokens)
    return Work(shape=shape, words=words)


def _mixed(step: Step, vocab_size: int) -> Work:
    num_decodes = len(step.contexts)
    counts = np.array([1] * num_decodes + [chunk.new for chunk in step.chunks])
    contexts = np.array([*step.contexts, *(chunk.cached + chunk.new for chunk in step.chunks)])
    slots = np.arange(len(counts))
    num_drawn = [1] * num_decodes + [chunk.num_drawn for chunk in step.chunks]
    last_rows = [
        np.arange(end - num, end) for end, num in zip(np.cumsum(counts).tolist(), num_drawn, strict=True)
    ]
    rows = StepRows(
        num_decodes=num_decodes,
        slots_B=slots,
        counts_B=counts,
        contexts_B=contexts,
        tokens_T=_tokens(step.num_tokens, vocab_size),
        places_T=np.concatenate(
            [np.arange(end - count, end) for end, count in zip(contexts, counts, strict=True)]
        ),
        ends=np.concatenate(last_rows[num_decodes:]),
        drawn_slots_S=np.repeat(slots, num_drawn),
    )
    shape, words = pack_step(rows, max_context_len=int(contexts.max()), draw=Draw.greedy)
    return Work(shape=shape, words=words)


def _tokens(count: int, vocab_size: int) -> NDArray[np.int64]:
    return np.random.default_rng(count).integers(0, vocab_size, count)
