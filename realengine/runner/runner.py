"""Packs a step plan into arrays, has them executed, and brings the drawn tokens back.

The host keeps the data of a sequence by slot: its tokens, its block table, its sampling settings. The newest
token of a sequence that decodes stays on the device, so the next step may be packed before the host has seen
it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.core.plan import Chunk, StepPlan, Transfer
from policies.core.sequence import Sequence
from realengine.model.lora import NO_ADAPTER, AdapterBank, make_segments, num_decode_segments
from realengine.runner.graphs import DecodeGraphs, Drawn
from realengine.runner.host_kv import HostPlaces
from realengine.runner.launch import Launch, Row
from realengine.runner.work import (
    ON_DEVICE,
    SAMPLING,
    SAMPLING_WORDS,
    Draw,
    Mark,
    Padding,
    Shape,
    Work,
    pack,
    pack_sampling,
)
from realengine.serving.sampling_params import SamplingParams


class Run(NamedTuple):
    """Tokens of a sequence that are computed together, from position `first` on, with a slot's table.

    drawing: branches that draw a token behind the last one.
    """

    seq: Sequence
    slot: int
    first: int
    num_tokens: int
    drawing: range


class Runner:
    """Packs plans and launches them.

    execute: runs work on the device, or on all ranks. graphs: of the device, if it has any.
    """

    def __init__(
        self,
        core: EngineCore,
        execute: Callable[[Work], Drawn | None],
        *,
        graphs: DecodeGraphs | None = None,
        adapters: AdapterBank | None = None,
        seed: int = 0,
    ) -> None:
        self._core = core
        self.execute = execute
        self._graphs = graphs
        self._adapters = adapters
        self._seed = seed
        self._block_size = core.block_pool.block_size
        max_blocks = -(-core.max_model_len // self._block_size)
        self._padding = Padding(core.max_num_seqs, max_blocks)
        num_rows = core.max_num_seqs + 1
        self._tokens_SL = np.zeros((num_rows, core.max_model_len + 1), np.int32)
        self._num_on_host_S = np.zeros(num_rows, np.int64)  # number of valid tokens in the row above
        self._tables_SM = np.zeros((num_rows, max_blocks), np.int32)
        self._num_ids_S = np.zeros(num_rows, np.int64)
        self._sampling_S = np.zeros(num_rows, SAMPLING)
        self._draw_S = np.zeros(num_rows, np.int8)
        self._num_logprobs_S = np.full(num_rows, -1, np.int8)
        self._host = HostPlaces()
        self._lora_S = np.full(num_rows, NO_ADAPTER, np.int64)  # slots of the adapters
        self._puts: list[tuple[str, int]] = []
        self._marks: list[Mark] = []
        self._updates: list[tuple[int, int]] = []  # (index in the flattened tables, block id)

    def enter(
        self,
        seq: Sequence,
        branch: int,
        index: int,
        tokens: list[int],
        params: SamplingParams,
        lora: str | None = None,
    ) -> None:
        """Enters a sequence, or a branch of it, that has got its slot.

        index: number of the answer within its request. tokens: its prompt and its output so far. lora: its
        adapter, which is resident.
        """
        slot = seq.slots[branch]
        self._tokens_SL[slot, : len(tokens)] = tokens
        self._num_on_host_S[slot] = len(tokens)
        self._num_ids_S[slot] = 0
        own_seed = params.seed is not None
        self._sampling_S[slot] = (
            _folded(self._seed if params.seed is None else params.seed),
            index if own_seed else seq.request_id + (index << 32),
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.top_k,
            0,
        )
        self._draw_S[slot] = Draw.greedy if params.temperature == 0 else Draw.sample
        self._num_logprobs_S[slot] = -1 if params.logprobs is None else params.logprobs
        self._lora_S[slot] = NO_ADAPTER
        if lora is not None:
            assert self._core.residents is not None
            adapter_slot = self._core.residents.slot_of(lora)
            assert adapter_slot is not None
            self._lora_S[slot] = adapter_slot
        if params.has_penalties:
            self._draw_S[slot] = Draw.penalised
            self._marks.append(Mark(slot, seq.num_prompt_tokens, np.array(tokens, np.int32)))

    def put(self, name: str, slot: int) -> None:
        """Loads an adapter into a slot, before the next launch."""
        self._puts.append((name, slot))

    def move(self, transfers: list[Transfer]) -> None:
        """Copies KV between the GPU and host memory, before the next launch."""
        moves = tuple(self._host.moves(transfers))
        if moves:
            self.execute(Work(moves=moves))

    def may_repeat(self, plan: StepPlan) -> bool:
        """Whether several iterations of a decode plan may run in one launch: no request wants logprobs."""
        return all(self._num_logprobs_S[seq.slot] < 0 for seq in plan.decoding)

    def launch(self, plan: StepPlan, num_iterations: int = 1) -> Launch:
        """Runs a plan, num_iterations iterations at once if all decode; returns before it is done."""
        rows, slots, contexts = self._decodes(plan)
        self._update_tables(plan, slots, contexts, num_iterations)
        copies = None
        if plan.branched:
            branch_rows, branch_slots, branch_contexts = self._branches(plan)
            rows += branch_rows
            slots, contexts = np.append(slots, branch_slots), np.append(contexts, branch_contexts)
            copies = np.array(self._core.branched.copies(plan), np.int32).reshape(-1, 2)
        if (self._lora_S[slots] != NO_ADAPTER).any():  # rows of one adapter become neighbours
            order = np.argsort(self._lora_S[slots], kind="stable")
            rows, slots, contexts = [rows[row] for row in order], slots[order], contexts[order]
        if plan.chunks:
            rows, shape, words = self._mixed(plan, rows, slots, contexts)
        else:
            shape, words = self._decode(slots, contexts, num_iterations)
        work = Work(
            shape=shape,
            words=words,
            adapters=tuple(self._puts),
            copies=copies if copies is not None and len(copies) else None,
            table_updates=np.array(self._updates, np.int32) if self._updates else None,
            marks=tuple(self._marks),
        )
        self._updates.clear()
        try:
            launch = Launch(rows, self.execute(work), num_iterations)
        except RuntimeError:
            self._tables_SM.fill(-1)  # it is unknown which of the updates were made
            self._num_ids_S.fill(0)
            raise
        self._puts.clear()
        self._marks.clear()
        return launch

    def _decodes(self, plan: StepPlan) -> tuple[list[Row], NDArray[np.int64], NDArray[np.int64]]:
        """Rows, slots and contexts (with the token to be computed) of the decoding sequences."""
        idle = set(plan.idle)
        members = [seq for seq in plan.decoding if seq not in idle] if idle else list(plan.decoding)
        slots = np.array([seq.slot for seq in members], np.int64)
        return list(zip(members, repeat(0))), slots, self._core.decodes.num_computed_S[slots] + 1

    def _branches(self, plan: StepPlan) -> tuple[list[Row], list[int], list[int]]:
        """Rows, slots and contexts of sequences that decode with branches: one row per branch."""
        rows, slots, contexts = [], [], []
        for seq in plan.branched:
            context = self._core.branched.context_len(seq)
            for branch, ids in enumerate(self._core.branched.block_ids(seq)):
                slot = seq.slots[branch]
                rows.append((seq, branch))
                slots.append(slot)
                contexts.append(context)
                self._enter_ids(slot, 0, ids)
        return rows, slots, contexts

    def _update_tables(
        self,
        plan: StepPlan,
        slots: NDArray[np.int64],
        contexts: NDArray[np.int64],
        num_iterations: int,
    ) -> None:
        """Updates the block tables with the blocks that sequences have got since their last step."""
        num_blocks = -(-(contexts + num_iterations - 1) // self._block_size)
        members = None
        for row in np.flatnonzero(num_blocks > self._num_ids_S[slots]).tolist():
            if members is None:
                members = {seq.slot: seq for seq in plan.decoding}
            slot = int(slots[row])
            self._update_table(members[slot], slot, int(contexts[row]) + num_iterations - 1)
        for chunk in plan.chunks:
            if not self._core.branched.is_recomputing(chunk.seq):
                slot = chunk.seq.slots[0]
                self._update_table(chunk.seq, slot, chunk.num_cached + chunk.num_tokens)
                self._num_ids_S[slot] = 0  # its commit may find equal blocks of another sequence

    def _update_table(self, seq: Sequence, slot: int, num_tokens: int) -> None:
        ids = self._core.block_ids(seq, num_tokens)
        self._enter_ids(slot, int(self._num_ids_S[slot]), ids)
        self._num_ids_S[slot] = len(ids)

    def _enter_ids(self, slot: int, first: int, ids: list[int]) -> None:
        """Updates those of a slot's blocks, from number `first` on, that have changed."""
        table = np.array(ids[first:], np.int32)
        changed = np.flatnonzero(self._tables_SM[slot, first : len(ids)] != table)
        self._tables_SM[slot, first + changed] = table[changed]
        places = slot * self._padding.max_blocks + first + changed
        self._updates += zip(places.tolist(), table[changed].tolist(), strict=True)

    def _decode(
        self, slots: NDArray[np.int64], contexts: NDArray[np.int64], num_iterations: int
    ) -> tuple[Shape, NDArray[np.int32]]:
        """Packs a step in which every row brings and draws one token.

        Padded to a graph's rows, if there is one.
        """
        num_rows = len(slots)
        draw, num_logprobs = self._ways_to_draw(slots)
        max_context_len = int(contexts.max()) + num_iterations - 1
        if self._graphs is not None and draw is not Draw.penalised and num_logprobs < 0:
            num_rows = self._graphs.size_for(num_rows) or num_rows
        segments = self._segments(slots, np.ones(len(slots), np.int64), num_rows)
        shape = Shape(
            num_rows,
            num_rows,
            num_rows,
            num_rows,
            0,
            max_context_len,
            draw,
            num_iterations,
            num_logprobs,
            len(segments) // 2,
        )
        words = np.zeros((SAMPLING_WORDS + 5) * num_rows + len(segments), np.int32)
        words[len(words) - len(segments) :] = segments
        if draw is not Draw.greedy:
            padded = np.append(slots, np.full(num_rows - len(slots), self._padding.slot))
            words[: SAMPLING_WORDS * num_rows] = pack_sampling(self._sampling_S[padded])
        columns = words[SAMPLING_WORDS * num_rows :][: 5 * num_rows]
        tokens, slot, context, places, ids = columns.reshape(5, num_rows)
        tokens[: len(slots)] = self._newest(slots, contexts)
        slot[: len(slots)] = slots
        slot[len(slots) :] = self._padding.slot
        context[:] = 1
        context[: len(slots)] = contexts
        places[:] = self._padding.place
        if self._updates:
            updates = np.array(self._updates[:num_rows], np.int32)
            del self._updates[:num_rows]
            places[: len(updates)], ids[: len(updates)] = updates.T
        return shape, words

    def _mixed(
        self,
        plan: StepPlan,
        rows: list[Row],
        decode_slots: NDArray[np.int64],
        decode_contexts: NDArray[np.int64],
    ) -> tuple[list[Row], Shape, NDArray[np.int32]]:
        """Packs a step with chunks of prompts, behind the decodes."""
        num_decodes = len(decode_slots)
        tokens = [self._newest(decode_slots, decode_contexts)]
        positions = [decode_contexts - 1]
        token_slots = [decode_slots]
        slots, contexts = [decode_slots], [decode_contexts]
        counts = [np.ones(num_decodes, np.int64)]
        drawn, drawn_slots = list(range(num_decodes)), decode_slots.tolist()
        rows = list(rows)
        num_tokens = num_decodes
        runs = [run for chunk in plan.chunks for run in self._runs(chunk)]
        for seq, slot, first, num_new, drawing in runs:
            tokens.append(self._tokens_SL[slot, first : first + num_new])
            positions.append(np.arange(first, first + num_new))
            token_slots.append(np.full(num_new, slot))
            num_tokens += num_new
            for branch in drawing:
                rows.append((seq, branch))
                drawn.append(num_tokens - 1)
                drawn_slots.append(seq.slots[branch])
        chunk_counts = np.array([run.num_tokens for run in runs])
        slots.append(np.array([run.slot for run in runs]))
        contexts.append(np.array([run.first for run in runs]) + chunk_counts)
        counts.append(chunk_counts)
        chunk_starts = np.concatenate([[0], np.cumsum(chunk_counts)])
        draw, num_logprobs = self._ways_to_draw(np.array(drawn_slots, np.int64))
        segments = self._segments(np.concatenate(slots), np.concatenate(counts))
        shape = Shape(
            num_tokens,
            num_decodes + len(runs),
            len(drawn),
            num_decodes,
            int(chunk_counts.max()),
            int(np.concatenate(contexts).max()),
            draw,
            1,
            num_logprobs,
            len(segments) // 2,
            len(self._updates),
        )
        updates = np.array(self._updates, np.int64).reshape(-1, 2)
        self._updates.clear()
        sections = [
            pack_sampling(self._sampling_S[drawn_slots]),
            *(np.concatenate(parts) for parts in (tokens, positions, token_slots, slots, contexts)),
            chunk_starts,
            np.array(drawn),
            np.array(drawn_slots),
            segments,
            updates[:, 0],
            updates[:, 1],
        ]
        return rows, shape, pack(sections)

    def _runs(self, chunk: Chunk) -> list[Run]:
        """A chunk's tokens as rows of the batch: one row, or one for each block that branches own."""
        seq, first, num_tokens, completes = chunk
        if not self._core.branched.is_recomputing(seq):
            drawing = range(seq.width) if completes else range(0)
            return [Run(seq, seq.slots[0], first, num_tokens, drawing)]
        pieces = self._core.branched.recomputed(seq, first, num_tokens)
        ids = self._core.branched.known_ids(seq, first + num_tokens)
        for slot, table in zip(seq.slots, ids, strict=True):
            self._enter_ids(slot, 0, table)
        runs = [Run(seq, seq.slots[p.branch], p.position, p.num_tokens, range(0)) for p in pieces]
        if completes:  # newest tokens that an earlier chunk computed, once more
            for branch, slot in enumerate(seq.slots):
                newest = int(self._num_on_host_S[slot]) - 1
                drawing = range(branch, branch + 1)
                for place, run in enumerate(runs):
                    if run.slot == slot and run.first + run.num_tokens == newest + 1:
                        runs[place] = run._replace(drawing=drawing)
                        break
                else:
                    runs.append(Run(seq, slot, newest, 1, drawing))
        return runs

    def _segments(
        self, slots: NDArray[np.int64], counts: NDArray[np.int64], num_padded: int | None = None
    ) -> NDArray[np.int32]:
        """Starts and slots of the runs of one adapter; empty if none is used.

        num_padded: rows of a decode step, which has as many segments as a graph for it.
        """
        adapters_B = self._lora_S[slots]
        if self._adapters is None or (adapters_B == NO_ADAPTER).all():
            return np.empty(0, np.int32)
        most = self._adapters.max_segment_tokens(num_padded is not None)
        num_segments = None
        if num_padded is not None:
            num_segments = num_decode_segments(num_padded, self._adapters.max_loras)
        segments = make_segments(adapters_B.tolist(), counts.tolist(), most, num_segments)
        return np.concatenate([segments.starts, segments.slots])

    def _newest(self, slots: NDArray[np.int64], contexts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The token that each decoding row brings, or ON_DEVICE if only the device may know it."""
        places = contexts - 1
        known = places < self._num_on_host_S[slots]
        return np.where(known, self._tokens_SL[slots, places], np.int32(ON_DEVICE))

    def _ways_to_draw(self, slots: NDArray[np.int64]) -> tuple[Draw, int]:
        """The most demanding way to draw, and number of logprobs, of the rows."""
        if not len(slots):
            return Draw.greedy, -1
        return Draw(int(self._draw_S[slots].max())), int(self._num_logprobs_S[slots].max())


def _folded(seed: int) -> int:
    """A seed as a signed 64-bit number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
