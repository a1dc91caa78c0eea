"""Packs step plans into arrays, has them executed, and returns launches with the drawn tokens.

Like the InputBatch of vLLM's GPU model runner, the runner keeps persistent arrays on the host: each sequence
has a slot, a row with its tokens, its block table and its sampling settings. The executor has a copy of the
block tables on the device; only changed entries are sent. The newest token of a decoding sequence stays on
the device, so the next step can be packed before the host has read it.

Letters of array names: S slots (one more than max_num_seqs, for padding), L tokens, M blocks, B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.core.plan import Chunk, StepPlan, Transfer
from policies.core.sequence import Sequence
from realengine.model.lora import NO_ADAPTER, AdapterBank, make_segments, num_decode_segments
from realengine.runner.decode_rows import DecodeRows, MemberRows, RepeatedStep
from realengine.runner.graphs import DecodeGraphs, Drawn
from realengine.runner.host_kv import HostPlaces
from realengine.runner.launch import Launch, Row
from realengine.runner.prompt_scores import NOTHING_SCORED, PromptScores
from realengine.runner.token_masks import AllowedTokens, ChangedBiases
from realengine.runner.work import (
    ON_DEVICE,
    SAMPLING,
    Draw,
    Padding,
    PenaltyInit,
    PrefillRow,
    Shape,
    Work,
    as_int64,
    pack,
    pack_sampling,
)
from realengine.serving.forms import CANNOT_GO_ON, Form, FormError
from realengine.serving.sampling_params import SamplingParams


class Runner:
    """Packs plans and launches them.

    execute: runs work on the device, or on all ranks. graphs: the device's CUDA graphs, if any.
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
        self._num_on_host_S = np.zeros(num_rows, np.int64)  # number of valid tokens in each row of _tokens_SL
        self._tables_SM = np.zeros((num_rows, max_blocks), np.int32)
        self._num_ids_S = np.zeros(num_rows, np.int64)  # number of valid block ids in each row of _tables_SM
        self._sampling_S = np.zeros(num_rows, SAMPLING)
        self._draw_S = np.zeros(num_rows, np.int8)
        self._num_logprobs_S = np.full(num_rows, -1, np.int8)  # -1: no logprobs
        self._host = HostPlaces()
        self._lora_S = np.full(num_rows, NO_ADAPTER, np.int64)  # adapter slot of each sequence
        self._members = MemberRows(core.decodes, self._lora_S)
        self._adapter_loads: list[tuple[str, int]] = []  # for the next launch, as the following lists
        self._penalty_inits: list[PenaltyInit] = []
        self._biases = ChangedBiases()
        self._forms: dict[int, Form] = {}  # of the outputs that have one, by slot
        self._faults: list[tuple[Sequence, str]] = []  # of the next launch
        self._scores = PromptScores()
        self._updates: list[tuple[int, int]] = []  # (index in the flattened tables, block id)

    def fill_slot(
        self,
        seq: Sequence,
        branch: int,
        index: int,
        tokens: list[int],
        params: SamplingParams,
        lora: str | None = None,
        stop_tokens: Collection[int] = (),
        form: Form | None = None,
    ) -> None:
        """Writes the tokens and settings of a sequence, or of one of its branches, into its slot.

        index: number of the output within its request. tokens: its prompt and output so far. lora: name of
        its adapter, which must be resident. stop_tokens: they are not drawn before `params.min_tokens`. form:
        says which tokens may come next; None: all.
        """
        slot = seq.slots[branch]
        self._members.forget()
        self._tokens_SL[slot, : len(tokens)] = tokens
        self._num_on_host_S[slot] = len(tokens)
        self._num_ids_S[slot] = 0
        own_seed = params.seed is not None
        self._sampling_S[slot] = (
            as_int64(self._seed if params.seed is None else params.seed),
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
        self._scores.set(slot, seq.num_prompt_tokens, len(tokens), params.prompt_logprobs)
        self._lora_S[slot] = NO_ADAPTER
        if lora is not None:
            assert self._core.residents is not None
            adapter_slot = self._core.residents.slot_of(lora)
            assert adapter_slot is not None
            self._lora_S[slot] = adapter_slot
        if params.has_penalties:
            self._draw_S[slot] = Draw.penalised
            self._penalty_inits.append(PenaltyInit(slot, seq.num_prompt_tokens, np.array(tokens, np.int32)))
        first_end = seq.num_prompt_tokens + params.min_tokens
        if self._biases.set(slot, first_end, stop_tokens if params.min_tokens else (), params.logit_bias):
            self._draw_S[slot] = Draw.penalised
        self._forms.pop(slot, None)
        if form is not None:
            self._forms[slot] = form
            self._draw_S[slot] = Draw.penalised

    def load_adapter(self, name: str, slot: int) -> None:
        """Loads an adapter into an adapter slot with the next launch."""
        self._adapter_loads.append((name, slot))

    def move(self, transfers: list[Transfer]) -> None:
        """Copies KV between the GPU and host memory, in order before the next launch."""
        moves = tuple(self._host.moves(transfers))
        if moves:
            self.execute(Work(moves=moves))

    def may_repeat(self, plan: StepPlan) -> bool:
        """Returns whether several decode iterations may run in one launch.

        Not if a request wants logprobs, or its output has a form.
        """
        return not self.has_forms and all(self._num_logprobs_S[seq.slot] < 0 for seq in plan.decoding)

    @property
    def has_forms(self) -> bool:
        """True if outputs with a form are in slots, whose tokens must be known before the next are drawn."""
        if self._forms:
            self._forms = {slot: form for slot, form in self._forms.items() if not form.has_ended()}
        return bool(self._forms)

    def _allowed(self, rows: Iterable[Row], numbers: Iterable[int]) -> AllowedTokens | None:
        """Returns the tokens that rows may draw; None: all rows may draw all.

        numbers: of the rows in the logits of the step. A row whose form allows no token is a fault.
        """
        if not self.has_forms:
            return None
        limited, allowed = [], []
        for (seq, branch), number in zip(rows, numbers, strict=False):
            form = self._forms.get(seq.slots[branch])
            if form is None:
                continue
            try:
                allowed.append(form.allowed())
                limited.append(number)
            except FormError as error:
                self._faults.append((seq, f"{CANNOT_GO_ON}: {error}"))
        return AllowedTokens(np.array(limited, np.int32), np.stack(allowed)) if limited else None

    def launch(self, plan: StepPlan, num_iterations: int = 1) -> Launch:
        """Launches num_iterations iterations of a plan, more than one only if all rows decode.

        Returns without waiting for the device. On a RuntimeError all block tables are sent again.
        """
        decoding = self._decoding(plan)
        self._update_tables(plan, decoding, num_iterations)
        copies = None
        if plan.branched:
            decoding = self._with_branches(plan, decoding)
            copies = np.array(self._core.branched.copies(plan), np.int32).reshape(-1, 2)
        rows, scored = decoding.rows, NOTHING_SCORED
        if plan.chunks:
            prefill_rows = [row for chunk in plan.chunks for row in self._prefill_rows(chunk)]
            scored = self._scores.of(prefill_rows, len(rows), self._tokens_SL)
            rows, shape, words = self._pack_mixed(prefill_rows, decoding)
        else:
            shape, words = self._pack_decode(decoding, num_iterations)
        work = Work(
            shape=shape,
            words=words,
            adapters=tuple(self._adapter_loads),
            copies=copies if copies is not None and len(copies) else None,
            table_updates=np.array(self._updates, np.int32) if self._updates else None,
            penalty_inits=tuple(self._penalty_inits),
            biases=tuple(self._biases.changed),
            allowed=self._allowed(rows, count()),
            scored=scored.rows,
        )
        self._updates.clear()
        launch = self._launched(rows, work, num_iterations)
        launch.scored = scored.chunks
        return launch

    def _launched(self, rows: list[Row], work: Work, num_iterations: int) -> Launch:
        """Executes work that has been packed."""
        try:
            launch = Launch(rows, self.execute(work), num_iterations)
        except RuntimeError:
            self._tables_SM.fill(-1)  # it is unknown which updates the device has made
            self._num_ids_S.fill(0)
            self._members.forget()
            raise
        launch.faults, self._faults = self._faults, []
        self._adapter_loads.clear()
        self._penalty_inits.clear()
        self._biases.changed.clear()
        return launch

    def _decoding(self, plan: StepPlan) -> DecodeRows:
        """Returns the rows of the decoding sequences of a plan, without those that have branches."""
        if not plan.idle and plan.decoding is self._core.decodes:
            return self._members.current()
        idle = set(plan.idle)
        return DecodeRows.of([seq for seq in plan.decoding if seq not in idle], self._lora_S)

    def _with_branches(self, plan: StepPlan, decoding: DecodeRows) -> DecodeRows:
        """Returns rows and those of the sequences with branches: one row per branch."""
        rows, slots, origins = list(decoding.rows), [decoding.slots_B], [decoding.origins_B]
        for seq in plan.branched:
            context = self._core.branched.context_len(seq)
            for branch, ids in enumerate(self._core.branched.block_ids(seq)):
                slot = seq.slots[branch]
                rows.append((seq, branch))
                slots.append(np.array([slot]))
                origins.append(np.array([context - 1 - self._core.decodes.clock]))
                self._update_block_ids(slot, 0, ids)
        return DecodeRows(rows, np.concatenate(slots), np.concatenate(origins), self._lora_S)

    def _update_tables(self, plan: StepPlan, decoding: DecodeRows, num_iterations: int) -> None:
        """Updates the block tables with the blocks that sequences have got since their last step."""
        last_clock = self._core.decodes.clock + num_iterations - 1
        if not decoding.have_blocks(last_clock):
            num_tokens = decoding.contexts_B(last_clock)
            num_ids = self._num_ids_S[decoding.slots_B]
            for row in np.flatnonzero(num_tokens > num_ids * self._block_size).tolist():
                seq, _ = decoding.rows[row]
                self._update_table(seq, int(decoding.slots_B[row]), int(num_tokens[row]))
            decoding.note_blocks(self._num_ids_S, self._block_size)
        for chunk in plan.chunks:
            if not self._core.branched.is_recomputing(chunk.seq):
                slot = chunk.seq.slots[0]
                self._update_table(chunk.seq, slot, chunk.num_cached + chunk.num_tokens)
                self._num_ids_S[slot] = 0  # its commit may replace blocks by equal ones of another sequence

    def _update_table(self, seq: Sequence, slot: int, num_tokens: int) -> None:
        ids = self._core.block_ids(seq, num_tokens)
        self._update_block_ids(slot, int(self._num_ids_S[slot]), ids)
        self._num_ids_S[slot] = len(ids)

    def _update_block_ids(self, slot: int, first: int, ids: list[int]) -> None:
        """Updates a slot's block ids from index `first` on, if they have changed."""
        if len(ids) == first + 1:  # as in nearly all decode steps that need a block
            if self._tables_SM[slot, first] != ids[first]:
                self._tables_SM[slot, first] = ids[first]
                self._updates.append((slot * self._padding.max_blocks + first, ids[first]))
            return
        table = np.array(ids[first:], np.int32)
        changed = np.flatnonzero(self._tables_SM[slot, first : len(ids)] != table)
        self._tables_SM[slot, first + changed] = table[changed]
        places = slot * self._padding.max_blocks + first + changed
        self._updates += zip(places.tolist(), table[changed].tolist(), strict=True)

    def _pack_decode(self, decoding: DecodeRows, num_iterations: int) -> tuple[Shape, NDArray[np.int32]]:
        """Packs a step in which every row brings and draws one token, padded to a fitting graph's rows."""
        if decoding.step is None:
            decoding.step = self._repeated(decoding)
        words, (tokens, _, context, places, ids) = decoding.step.copy()
        clock, num_rows = self._core.decodes.clock, len(decoding.rows)
        contexts_B = decoding.contexts_B(clock)
        if not decoding.on_device:
            tokens[:num_rows] = known_B = self._input_tokens(decoding.slots_B, contexts_B)
            decoding.on_device = bool((known_B == ON_DEVICE).all())
        context[:num_rows] = contexts_B
        if self._updates:
            updates = np.array(self._updates[: len(places)], np.int32)
            del self._updates[: len(places)]
            places[: len(updates)], ids[: len(updates)] = updates.T
        max_context_len = decoding.max_context(clock + num_iterations - 1)
        shape = decoding.step.shape._replace(max_context_len=max_context_len, num_iterations=num_iterations)
        return shape, words

    def _repeated(self, decoding: DecodeRows) -> RepeatedStep:
        """Returns what all steps of these rows have in common."""
        slots = decoding.slots_B
        num_rows = len(slots)
        draw, num_logprobs = self._draw_and_logprobs(slots)
        if self._graphs is not None:
            num_rows = self._graphs.size_for(num_rows) or num_rows
        segments = self._segments(slots, np.ones(len(slots), np.int64), num_rows)
        shape = Shape(
            num_tokens=num_rows,
            num_rows=num_rows,
            num_drawn=num_rows,
            num_decodes=num_rows,
            max_query_len=0,
            max_context_len=0,
            draw=draw,
            num_logprobs=num_logprobs,
            num_segments=len(segments) // 2,
        )
        return RepeatedStep.of(slots, shape, self._sampling_S, segments, self._padding)

    def _pack_mixed(
        self, prefill_rows: list[PrefillRow], decoding: DecodeRows
    ) -> tuple[list[Row], Shape, NDArray[np.int32]]:
        """Packs a step with the decodes first, and then the prompt chunks.

        Returns the (sequence, branch) of each token that is drawn, too.
        """
        decode_slots, num_decodes = decoding.slots_B, len(decoding.slots_B)
        decode_contexts = decoding.contexts_B(self._core.decodes.clock)
        tokens = [self._input_tokens(decode_slots, decode_contexts)]
        positions = [decode_contexts - 1]
        token_slots = [decode_slots]
        slots, contexts = [decode_slots], [decode_contexts]
        counts = [np.ones(num_decodes, np.int64)]
        drawn, drawn_slots = list(range(num_decodes)), decode_slots.tolist()
        rows = list(decoding.rows)
        num_tokens = num_decodes
        for seq, slot, first, num_new, drawing in prefill_rows:
            tokens.append(self._tokens_SL[slot, first : first + num_new])
            positions.append(np.arange(first, first + num_new))
            token_slots.append(np.full(num_new, slot))
            num_tokens += num_new
            for branch in drawing:
                rows.append((seq, branch))
                drawn.append(num_tokens - 1)
                drawn_slots.append(seq.slots[branch])
        chunk_counts = np.array([row.num_tokens for row in prefill_rows])
        slots.append(np.array([row.slot for row in prefill_rows]))
        contexts.append(np.array([row.first for row in prefill_rows]) + chunk_counts)
        counts.append(chunk_counts)
        chunk_starts = np.concatenate([[0], np.cumsum(chunk_counts)])
        draw, num_logprobs = self._draw_and_logprobs(np.array(drawn_slots, np.int64))
        segments = self._segments(np.concatenate(slots), np.concatenate(counts))
        shape = Shape(
            num_tokens=num_tokens,
            num_rows=num_decodes + len(prefill_rows),
            num_drawn=len(drawn),
            num_decodes=num_decodes,
            max_query_len=int(chunk_counts.max()),
            max_context_len=int(np.concatenate(contexts).max()),
            draw=draw,
            num_logprobs=num_logprobs,
            num_segments=len(segments) // 2,
            num_updates=len(self._updates),
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

    def _prefill_rows(self, chunk: Chunk) -> list[PrefillRow]:
        """Returns a chunk's tokens as rows of the batch.

        There is one row, or, if branches are recomputed, one for each block that a branch owns.
        """
        seq, first, num_tokens, completes = chunk
        if not self._core.branched.is_recomputing(seq):
            drawing = range(seq.width) if completes else range(0)
            return [PrefillRow(seq, seq.slots[0], first, num_tokens, drawing)]
        pieces = self._core.branched.recomputed(seq, first, num_tokens)
        ids = self._core.branched.known_ids(seq, first + num_tokens)
        for slot, table in zip(seq.slots, ids, strict=True):
            self._update_block_ids(slot, 0, table)
        rows = [PrefillRow(seq, seq.slots[p.branch], p.position, p.num_tokens, range(0)) for p in pieces]
        if completes:  # each branch's newest token draws, also if an earlier chunk computed it
            for branch, slot in enumerate(seq.slots):
                newest = int(self._num_on_host_S[slot]) - 1
                drawing = range(branch, branch + 1)
                for place, row in enumerate(rows):
                    if row.slot == slot and row.first + row.num_tokens == newest + 1:
                        rows[place] = row._replace(drawing=drawing)
                        break
                else:
                    rows.append(PrefillRow(seq, slot, newest, 1, drawing))
        return rows

    def _segments(
        self, slots: NDArray[np.int64], counts: NDArray[np.int64], num_padded: int | None = None
    ) -> NDArray[np.int32]:
        """Returns starts and adapter slots of segments of rows with one adapter; empty if none is used.

        num_padded: rows of a padded decode step, whose number of segments must be that of its graph.
        """
        adapters_B = self._lora_S[slots]
        if self._adapters is None or (adapters_B == NO_ADAPTER).all():
            return np.empty(0, np.int32)
        max_segment_tokens = self._adapters.max_segment_tokens(num_padded is not None)
        num_segments = None
        if num_padded is not None:
            num_segments = num_decode_segments(num_padded, self._adapters.max_loras)
        segments = make_segments(adapters_B.tolist(), counts.tolist(), max_segment_tokens, num_segments)
        return np.concatenate([segments.starts, segments.slots])

    def _input_tokens(self, slots: NDArray[np.int64], contexts: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the input token of each decoding row, or ON_DEVICE if the host may not know it yet."""
        places = contexts - 1
        known = places < self._num_on_host_S[slots]
        return np.where(known, self._tokens_SL[slots, places], np.int32(ON_DEVICE))

    def _draw_and_logprobs(self, slots: NDArray[np.int64]) -> tuple[Draw, int]:
        """Returns the most demanding way to draw, and the largest number of logprobs, of the rows."""
        if not len(slots):
            return Draw.greedy, -1
        return Draw(int(self._draw_S[slots].max())), int(self._num_logprobs_S[slots].max())
