"""Packs step plans into arrays, has them executed, and returns launches with the drawn tokens.

Like the InputBatch of vLLM's GPU model runner, the runner keeps persistent arrays on the host: each sequence
has a slot, a row with its tokens, its block table and its sampling settings. The executor has a copy of the
block tables on the device; only changed entries are sent. The newest token of a decoding sequence stays on
the device, so the next step can be packed before the host has read it.

Letters of array names: S slots (one more than max_num_seqs, for padding), L tokens, M blocks, B rows.

The module is long because it is one object: the arrays, and the steps that pack, send and read them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.core.plan import Chunk, StepPlan, Transfer
from policies.core.sequence import Sequence
from realengine.model.lora import NO_ADAPTER, AdapterBank, make_segments, num_decode_segments
from realengine.runner.decode_rows import DecodeRows, MemberRows, RepeatedStep
from realengine.runner.graphs import Graphs
from realengine.runner.host_kv import HostPlaces
from realengine.runner.kept_tokens import KeptTokens
from realengine.runner.launch import Launch, Result, Row
from realengine.runner.packing import Decodes, StepRows, num_pass_segments, pack_decode, pack_step
from realengine.runner.prompt_scores import NOTHING_SCORED, PromptScores, ScoredChunk
from realengine.runner.token_masks import AllowedTokens, ChangedBiases
from realengine.runner.work import (
    ON_DEVICE,
    SAMPLING,
    Draw,
    Padding,
    PenaltyInit,
    PrefillRow,
    Shape,
    StepSize,
    Work,
    as_int64,
)
from realengine.serving.forms import CANNOT_GO_ON, Form, FormError
from realengine.serving.sampling_params import SamplingParams
from realengine.speculation.packer import DraftPacker


class Packed(NamedTuple):
    """The work of a step, or of one rank's share of it."""

    rows: list[Row]
    work: Work
    scored: list[ScoredChunk]
    num_drafts: SequenceOf[int]


def share_of(plan: StepPlan, rank: int) -> StepPlan:
    """Returns the part of a plan that a rank of data-parallel attention computes."""
    share, idle = copy(plan), set(plan.idle)
    share.decoding = [seq for seq in plan.decoding if seq.dp_rank == rank and seq not in idle]
    share.idle = ()
    share.branched = [seq for seq in plan.branched if seq.dp_rank == rank]
    share.chunks = [chunk for chunk in plan.chunks if chunk.seq.dp_rank == rank]
    return share


class Runner:
    """Packs plans and launches them.

    execute: runs work on the device, or on all ranks. graphs: the device's CUDA graphs, if any. window: what
    decoding sequences keep of their KV; None: all. drafts: of an engine that speculates.
    """

    def __init__(
        self,
        core: EngineCore,
        execute: Callable[[Work], Result],
        *,
        graphs: Graphs | None = None,
        adapters: AdapterBank | None = None,
        window: KeptTokens | None = None,
        drafts: DraftPacker | None = None,
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
        self._window = window
        self._filled: list[int] = []  # slots that have got another sequence since the last launch
        self._drafts = drafts
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
        self._filled.append(slot)
        if self._drafts is not None:
            self._drafts.fill_slot(slot, tokens)
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

    def note_tokens(self, tokens: Iterable[tuple[Row, list[int]]]) -> None:
        """Writes new tokens of sequences into their slots, if the device of the next step has not drawn them.

        Later steps then bring them as their inputs.
        """
        for (seq, branch), new in tokens:
            slot = seq.slots[branch]
            first = self._num_on_host_S[slot]
            self._tokens_SL[slot, first : first + len(new)] = new
            self._num_on_host_S[slot] = first + len(new)

    def set_drafts(self, seq: Sequence, tokens: SequenceOf[int]) -> None:
        """Sets the draft tokens of a sequence's next step, which the host has made."""
        assert self._drafts is not None
        self._drafts.set_drafts(seq, tokens)

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

        Not if a request wants logprobs, its output has a form, or the host drafts.
        """
        if self._drafts is not None and not self._drafts.may_repeat:
            return False
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
        begin_s = 0.0 if self._drafts is None else self._drafts.now()
        cuts = () if self._window is None else self._window.cuts(plan, self._filled)
        ranks = self._core.ranks
        shares = [plan] if ranks is None else [share_of(plan, rank) for rank in range(ranks.size)]
        packed = [self._packed(share, num_iterations, cuts) for share in shares]
        rows = [row for each in packed for row in each.rows]
        work = packed[0].work
        if ranks is not None:
            num_tokens = tuple(each.work.shape.num_tokens for each in packed if each.work.shape is not None)
            works = tuple(replace(each.work, rank_tokens=num_tokens) for each in packed)
            work = Work(of_ranks=works)
        num_rows = [len(each.rows) for each in packed]
        try:
            launch = Launch(rows, self.execute(work), num_iterations, num_rows)
        except RuntimeError:
            self._tables_SM.fill(-1)  # it is unknown which updates the device has made
            self._num_ids_S.fill(0)
            self._members.forget()
            raise
        launch.scored = [chunk for each in packed for chunk in each.scored]
        launch.num_drafts = packed[0].num_drafts
        launch.faults, self._faults = self._faults, []
        for taken in (self._adapter_loads, self._penalty_inits, self._biases.changed, self._filled):
            taken.clear()
        if self._drafts is not None:
            self._drafts.launched(plan, begin_s, num_iterations)
            if num_iterations > 1:  # the commit may free blocks that were reserved
                self._num_ids_S[[seq.slots[0] for seq, _ in rows]] = 0
        return launch

    def _packed(self, plan: StepPlan, num_iterations: int, cuts: tuple[tuple[int, ...], ...]) -> Packed:
        """Packs the work of a plan, or of a rank's share of it."""
        copies, scored = None, NOTHING_SCORED
        num_drafts: SequenceOf[int] = ()
        numbers: Iterable[int] = count()
        decodes: DecodeRows | Decodes
        if self._drafts is None:
            decodes = self._decoding(plan)
            self._update_tables(decodes, num_iterations)
        else:
            self._update_reserved(plan)
            decodes = self._drafts.decodes(plan, num_iterations, self._forms if self.has_forms else {})
        self._update_chunks(plan)
        if plan.branched and isinstance(decodes, DecodeRows):
            decodes = self._with_branches(plan, decodes)
            copies = np.array(self._core.branched.copies(plan), np.int32).reshape(-1, 2)
        if isinstance(decodes, DecodeRows) and not plan.chunks:
            rows = decodes.rows
            shape, words, size = self._pack_decode(decodes, num_iterations)
        else:
            if isinstance(decodes, DecodeRows):
                decodes = self._single(decodes)
            prefill_rows = [row for chunk in plan.chunks for row in self._prefill_rows(chunk)]
            scored = self._scores.of(prefill_rows, len(decodes.tokens_T), self._tokens_SL)
            rows, numbers, shape, words = self._pack_rows(decodes, prefill_rows, num_iterations)
            size, num_drafts = decodes.size, decodes.num_drafts
        work = Work(
            shape=shape,
            words=words,
            size=size,
            adapters=tuple(self._adapter_loads),
            copies=copies if copies is not None and len(copies) else None,
            table_updates=np.array(self._updates, np.int32) if self._updates else None,
            penalty_inits=tuple(self._penalty_inits),
            biases=tuple(self._biases.changed),
            allowed=self._allowed(rows, numbers),
            scored=scored.rows,
            cuts=cuts,
        )
        self._updates.clear()
        return Packed(rows, work, scored.chunks, num_drafts)

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

    def _update_tables(self, decoding: DecodeRows, num_iterations: int) -> None:
        """Updates the block tables with the blocks that decoding sequences have got since their last step."""
        last_clock = self._core.decodes.clock + num_iterations - 1
        if not decoding.have_blocks(last_clock):
            num_tokens = decoding.contexts_B(last_clock)
            num_ids = self._num_ids_S[decoding.slots_B]
            for row in np.flatnonzero(num_tokens > num_ids * self._block_size).tolist():
                seq, _ = decoding.rows[row]
                self._update_table(seq, int(decoding.slots_B[row]), int(num_tokens[row]))
            decoding.note_blocks(self._num_ids_S, self._block_size)

    def _update_reserved(self, plan: StepPlan) -> None:
        """Updates the block tables with all blocks of decoding sequences, those for drafts included."""
        assert self._drafts is not None
        drafts, num_blocks = self._drafts.blocks(plan)
        for index in np.flatnonzero(num_blocks > self._num_ids_S[drafts.slots]).tolist():
            seq = drafts.seqs[index]
            self._update_table(seq, seq.slots[0], int(num_blocks[index]) * self._block_size)

    def _update_chunks(self, plan: StepPlan) -> None:
        """Updates the block tables with the blocks of prompts, those for drafts included."""
        for seq, num_cached, num_tokens, _ in plan.chunks:
            if not self._core.branched.is_recomputing(seq):
                slot, num_extra = seq.slots[0], 0
                if self._drafts is not None:
                    num_extra = seq.num_extra_blocks * self._block_size
                self._update_table(seq, slot, num_cached + num_tokens + num_extra)
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

    def _pack_decode(
        self, decoding: DecodeRows, num_iterations: int
    ) -> tuple[Shape, NDArray[np.int32], StepSize | None]:
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
        return shape, words, decoding.step.size

    def _repeated(self, decoding: DecodeRows) -> RepeatedStep:
        """Returns what all steps of these rows have in common."""
        slots, num_rows, size = decoding.slots_B, len(decoding.rows), None
        draw, num_logprobs = self._draw_and_logprobs(slots)
        if self._graphs is not None:
            size = self._graphs.fit(num_rows, num_rows)
        # A rank of data-parallel attention without sequences computes a row, as others need its experts.
        num_padding = int(not num_rows) if size is None else size.num_seqs - num_rows
        padded = np.append(slots, np.full(num_padding, self._padding.slot))
        shape, words = pack_decode(
            padded,
            np.ones(len(padded), np.int64),
            0,
            draw=draw,
            place=self._padding.place,
            tokens_B=np.append(np.full(num_rows, ON_DEVICE), np.zeros(num_padding, np.int64)),
            sampling_B=None if draw is Draw.greedy else self._sampling_S[padded],
            num_logprobs=num_logprobs,
            segments=self._segments(slots, np.ones(num_rows, np.int64), len(padded)),
        )
        return RepeatedStep(shape, words, size)

    def _single(self, decoding: DecodeRows) -> Decodes:
        """Returns the rows of decodes of one token each, beside chunks."""
        slots_B, contexts_B = decoding.slots_B, decoding.contexts_B(self._core.decodes.clock)
        return Decodes(
            rows=decoding.rows,
            slots_B=slots_B,
            counts_B=np.ones(len(slots_B), np.int64),
            contexts_B=contexts_B,
            tokens_T=self._input_tokens(slots_B, contexts_B),
            places_T=contexts_B - 1,
            max_context_len=int(contexts_B.max(initial=0)),
        )

    def _pack_rows(
        self, decodes: Decodes, prefill_rows: list[PrefillRow], num_iterations: int
    ) -> tuple[list[Row], list[int], Shape, NDArray[np.int32]]:
        """Packs a step with the decodes first, and then the prompt chunks.

        Returns the (sequence, branch) of each token that is drawn, and the first row that draws it, too.
        """
        rows, num_decodes = list(decodes.rows), len(decodes.slots_B)
        num_ours = num_tokens = len(decodes.tokens_T)
        tokens: list[NDArray[np.integer]] = [decodes.tokens_T]
        places, ends, drawn_slots = [decodes.places_T], [], decodes.slots_B.tolist()
        for seq, slot, first, num_new, drawing in prefill_rows:
            tokens.append(self._tokens_SL[slot, first : first + num_new])
            places.append(np.arange(first, first + num_new))
            num_tokens += num_new
            for branch in drawing:
                rows.append((seq, branch))
                ends.append(num_tokens - 1)
                drawn_slots.append(seq.slots[branch])
        chunk_slots = np.array([row.slot for row in prefill_rows], np.int64)
        chunk_counts = np.array([row.num_tokens for row in prefill_rows], np.int64)
        chunk_ends = np.array([row.first for row in prefill_rows], np.int64) + chunk_counts
        longest = max(decodes.max_context_len, int(chunk_ends.max(initial=0))) + decodes.lookahead
        drafts = decodes.drafts
        if drafts is not None:
            completes = np.array([bool(row.drawing) for row in prefill_rows], bool)
            following = np.where(completes, 0, self._tokens_SL[chunk_slots, chunk_ends])
            drafts = drafts._replace(following_C=following)
        step_rows = StepRows(
            num_decodes=num_decodes,
            slots_B=np.concatenate([decodes.slots_B, chunk_slots]),
            counts_B=np.concatenate([decodes.counts_B, chunk_counts]),
            contexts_B=np.concatenate([decodes.contexts_B, chunk_ends]),
            tokens_T=np.concatenate(tokens),
            places_T=np.concatenate(places),
            ends=np.array(ends, np.int64),
            drawn_slots_S=np.array(drawn_slots, np.int64),
            drafts=drafts,
        )
        draw, num_logprobs = self._draw_and_logprobs(step_rows.drawn_slots_S)
        shape, words = pack_step(
            step_rows,
            max_context_len=min(longest, self._padding.max_blocks * self._block_size),
            draw=draw,
            sampling_S=self._sampling_S[drawn_slots],
            num_logprobs=num_logprobs,
            num_iterations=num_iterations,
            segments=self._segments(step_rows.slots_B, step_rows.counts_B, size=decodes.size),
            updates_U2=self._taken_updates(decodes.size),
        )
        firsts = (np.cumsum(decodes.counts_B) - decodes.counts_B)[: len(decodes.rows)]
        numbers = [*firsts.tolist(), *range(num_ours, num_ours + len(ends))]
        return rows, numbers, shape, words

    def _taken_updates(self, size: StepSize | None) -> NDArray[np.int64]:
        """Returns the changed entries of block tables that a step makes; a graph makes one per sequence."""
        num_taken = len(self._updates) if size is None else size.num_seqs
        updates = np.array(self._updates[:num_taken], np.int64).reshape(-1, 2)
        del self._updates[:num_taken]
        if size is None:
            return updates
        padded = np.full((size.num_seqs, 2), (self._padding.place, 0), np.int64)
        padded[: len(updates)] = updates
        return padded

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
        self,
        slots: NDArray[np.int64],
        counts: NDArray[np.int64],
        num_padded: int | None = None,
        size: StepSize | None = None,
    ) -> NDArray[np.int32]:
        """Returns starts and adapter slots of segments of rows with one adapter; empty if none is used.

        num_padded: rows of a padded decode step, whose number of segments must be that of its graph. size: of
        the graphs of another step, of which the same holds.
        """
        adapters_B = self._lora_S[slots]
        if self._adapters is None or (adapters_B == NO_ADAPTER).all():
            return np.empty(0, np.int32)
        max_segment_tokens = self._adapters.max_segment_tokens(num_padded is not None)
        num_segments = None
        if num_padded is not None:
            num_segments = num_decode_segments(num_padded, self._adapters.max_loras)
        elif size is not None:
            num_segments = num_pass_segments(size, self._adapters)
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
