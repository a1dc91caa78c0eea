"""Packs plans with draft tokens into arrays: a `Runner` whose decodes bring several tokens."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.core.plan import StepPlan
from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import DraftPlan
from realengine.model.lora import NO_ADAPTER
from realengine.runner.launch import Launch, Row
from realengine.runner.runner import Runner
from realengine.runner.work import ON_DEVICE, Draw, PrefillRow, pack, pack_sampling
from realengine.serving.forms import Form
from realengine.serving.sampling_params import SamplingParams
from realengine.speculation.graphs import PassGraphs
from realengine.speculation.pass_times import PassTimes
from realengine.speculation.warm_up import warm_up
from realengine.speculation.work import NO_TOKEN, PassSize, VerifyShape, VerifyWork


class DecodingRows(NamedTuple):
    """The decoding sequences of a pass, and those that fill a graph up; each array has one entry of each."""

    size: PassSize | None
    """Size of the graph that runs the pass; None: it runs eagerly, without padding."""
    slots: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    num_valid: NDArray[np.int64]
    """Rows that are no padding."""
    depth: NDArray[np.int64]
    base: NDArray[np.int64]
    """Computed tokens as the scheduler counts them."""

    @property
    def is_padded(self) -> bool:
        """True if there may be rows of padding."""
        return self.size is not None or self.num_valid is not self.num_rows

    @classmethod
    def of(
        cls, drafts: DraftPlan, size: PassSize | None, padding_slot: int, forms: Collection[int]
    ) -> DecodingRows:
        """Returns the rows of a plan.

        forms: slots of outputs with a form, of which the draft tokens are padding.
        """
        num_rows = drafts.num_drafts + 1
        num_valid = np.where(np.isin(drafts.slots, list(forms)), 1, num_rows) if forms else num_rows
        if size is None:
            return cls(None, drafts.slots, num_rows, num_valid, drafts.depth, drafts.base)
        fill = (0, size.num_seqs - len(num_valid))
        return cls(
            size,
            np.pad(drafts.slots, fill, constant_values=padding_slot),
            np.full(size.num_seqs, 1 + size.num_drafts),
            np.pad(num_valid, fill),
            np.full(size.num_seqs, size.depth),
            np.pad(drafts.base, fill),
        )


class DraftRunner(Runner):
    """A `Runner` for an engine that speculates. Its other arguments are those of `Runner`.

    drafts_on_device: whether draft tokens are made on the device; else the host sets them by `set_drafts`.
    pass_times: is told of every pass; None: no policy needs its time. graphs: of passes, if there are any.
    """

    def __init__(
        self,
        core: EngineCore,
        *args: Any,
        drafts_on_device: bool,
        pass_times: PassTimes | None,
        graphs: PassGraphs | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(core, *args, **settings)
        self._pass_graphs = graphs
        self.pass_times = pass_times
        assert core.drafts is not None
        speculation = core.drafts.speculation
        self._drafting = core.drafts.decodes
        self._drafts_on_device = drafts_on_device
        max_drafts = speculation.proposer.num_speculative_tokens
        self._has_tree = speculation.proposer.tree is not None
        self._drafts_SK = np.full((len(self._tokens_SL), max_drafts), ON_DEVICE, np.int32)
        self._started: list[tuple[int, int, int]] = []  # (slot, newest token, its position)
        if pass_times is not None:
            measured = warm_up(
                self.execute,
                pass_times.now,
                speculation.proposer,
                graphs=graphs,
                padding=self._padding,
                max_num_seqs=core.max_num_seqs,
                max_model_len=core.max_model_len,
            )
            pass_times.start(measured)

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
        """Writes the tokens and settings of a sequence into its slot, as `Runner.fill_slot` does."""
        super().fill_slot(seq, branch, index, tokens, params, lora, stop_tokens, form)
        self._started.append((seq.slots[branch], tokens[-1], len(tokens) - 1))

    def set_drafts(self, seq: Sequence, tokens: SequenceOf[int]) -> None:
        """Sets the draft tokens of a sequence's next pass."""
        self._drafts_SK[seq.slots[0], : len(tokens)] = tokens

    def may_repeat(self, plan: StepPlan) -> bool:
        """Returns whether several passes may run in one launch, as `Runner` does; the device must draft."""
        return self._drafts_on_device and super().may_repeat(plan)

    def launch(self, plan: StepPlan, num_iterations: int = 1) -> Launch:
        """Launches passes: all rows of a plan, their verification, and the drafts for the next pass."""
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        begin_s = 0.0 if self.pass_times is None else self.pass_times.now()
        completing = [chunk.seq for chunk in plan.chunks if chunk.completes]
        rows: list[Row] = [(seq, 0) for seq in (*drafts.seqs, *completing)]
        self._update_all_tables(plan, drafts)
        size = self._graph_of(plan, drafts, num_iterations)
        decoding = DecodingRows.of(drafts, size, self._padding.slot, self._forms if self.has_forms else {})
        shape, words = self._pack(plan, drafts, decoding, num_iterations)
        prefill_rows = (
            PrefillRow(chunk.seq, chunk.seq.slots[0], chunk.num_cached, chunk.num_tokens, range(0))
            for chunk in plan.chunks
        )
        scored = self._scores.of(prefill_rows, shape.num_decode_tokens, self._tokens_SL)
        work = VerifyWork(
            verify=shape,
            size=size,
            words=words,
            adapters=tuple(self._adapter_loads),
            table_updates=np.array(self._updates, np.int32) if self._updates else None,
            penalty_inits=tuple(self._penalty_inits),
            biases=tuple(self._biases.changed),
            allowed=self._allowed(rows, self._first_rows(drafts, shape)),
            scored=scored.rows,
        )
        self._updates.clear()
        self._started.clear()
        launch = self._launched(rows, work, num_iterations)
        launch.scored = scored.chunks
        launch.num_drafts = (decoding.num_valid[: len(drafts.seqs)] - 1).tolist()
        if self.pass_times is not None:
            self.pass_times.begun(plan, begin_s, num_iterations)
        if num_iterations > 1:
            self._num_ids_S[drafts.slots] = 0  # the commit may free blocks that were reserved
        return launch

    def _update_all_tables(self, plan: StepPlan, drafts: DraftPlan) -> None:
        """Updates the block tables with all blocks that the sequences of a plan hold, lookahead included."""
        blocks = self._drafting.blocks_S[drafts.slots]
        for index in np.flatnonzero(blocks > self._num_ids_S[drafts.slots]).tolist():
            seq = drafts.seqs[index]
            self._update_table(seq, seq.slots[0], int(blocks[index]) * self._block_size)
        for chunk in plan.chunks:
            num_tokens = chunk.num_cached + chunk.num_tokens
            num_blocks = -(-num_tokens // self._block_size) + chunk.seq.num_extra_blocks
            slot = chunk.seq.slots[0]
            self._update_table(chunk.seq, slot, num_blocks * self._block_size)
            self._num_ids_S[slot] = 0  # its commit may replace blocks by equal ones of another sequence

    def _graph_of(self, plan: StepPlan, drafts: DraftPlan, num_iterations: int) -> PassSize | None:
        """Returns the size of the graph that runs a plan; None: it runs eagerly."""
        if self._pass_graphs is None or plan.chunks or self._started or not drafts.seqs:
            return None
        draw, num_logprobs = self._draw_and_logprobs(drafts.slots)
        if draw is Draw.penalised or num_logprobs >= 0:
            return None
        num_drafts = drafts.num_drafts
        num_rows, most = len(num_drafts) + int(num_drafts.sum()), int(num_drafts.max())
        size = self._pass_graphs.fit(len(num_drafts), num_rows, most, drafts.next_levels)
        num_before = int(drafts.base.max()) + (num_iterations - 1) * (int(drafts.depth.max()) + 1)
        if size is not None and num_before + 1 + size.num_drafts > self._core.max_model_len:
            return None  # rows of padding would be at positions that do not exist
        return size

    def _pack(
        self, plan: StepPlan, drafts: DraftPlan, rows: DecodingRows, num_iterations: int
    ) -> tuple[VerifyShape, NDArray[np.int32]]:
        num_decodes, chunks = len(rows.slots), plan.chunks
        decode_rows = rows.num_rows
        num_decode_tokens = int(decode_rows.sum())
        completing = [chunk.seq.slots[0] for chunk in chunks if chunk.completes]
        drawn_slots = np.concatenate([rows.slots, np.array(completing, np.int64)])
        chunk_rows = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        chunk_slots = np.array([chunk.seq.slots[0] for chunk in chunks], np.int64)
        firsts = np.array([chunk.num_cached for chunk in chunks], np.int64)
        rows_of = np.concatenate([decode_rows, chunk_rows])
        slots = np.concatenate([rows.slots, chunk_slots])
        starts = np.concatenate([[0], np.cumsum(rows_of)])
        places = np.arange(starts[-1]) - np.repeat(starts[:-1], rows_of)
        tokens = self._decode_tokens(rows, places[:num_decode_tokens])
        places[num_decode_tokens:] += np.repeat(firsts, chunk_rows)
        chunk_tokens = [
            self._tokens_SL[slot, first : first + num]
            for slot, first, num in zip(chunk_slots, firsts, chunk_rows, strict=True)
        ]
        completes = np.array([chunk.completes for chunk in chunks], bool)
        ends = firsts + chunk_rows
        following = np.where(completes, 0, self._tokens_SL[chunk_slots, ends])
        last_rows = starts[num_decodes + 1 :][completes] - 1
        sequences = np.concatenate(
            [np.repeat(np.arange(num_decodes), decode_rows), num_decodes + np.arange(len(last_rows))]
        )
        draw, num_logprobs = self._draw_and_logprobs(drawn_slots)
        segments = self._pass_segments(slots, rows_of, rows.size)
        num_before_last = (num_iterations - 1) * (rows.depth + 1)
        contexts = np.concatenate([rows.base + num_before_last + decode_rows, ends])
        lookahead = self._drafts_SK.shape[1] + 1
        paths = rows.depth + 1 if self._has_tree else np.zeros(num_decodes, np.int64)
        num_path_rows = int(paths.sum())
        path_starts = np.concatenate([[0], np.cumsum(np.concatenate([paths, chunk_rows]))])
        updates = self._packed_updates(rows.size)
        shape = VerifyShape(
            num_tokens=int(starts[-1]),
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_chunks=len(chunks),
            num_drawn=len(drawn_slots),
            max_query_len=int(rows_of.max()),
            max_context_len=min(int(contexts.max()) + lookahead, self._padding.max_blocks * self._block_size),
            max_depth=int(rows.depth.max(initial=0)),
            num_levels=drafts.next_levels,
            draw=draw,
            num_path_rows=num_path_rows,
            num_logprobs=num_logprobs,
            num_started=len(self._started),
            num_iterations=num_iterations,
            num_segments=len(segments) // 2,
            num_updates=len(updates),
            is_padded=rows.is_padded,
        )
        sections = [
            pack_sampling(self._sampling_S[drawn_slots]),
            tokens,
            *chunk_tokens,
            places,
            np.repeat(slots, rows_of),
            slots,
            np.concatenate([decode_rows, ends]),
            starts,
            following,
            np.concatenate([np.arange(num_decode_tokens), last_rows]),
            sequences,
            drawn_slots,
            np.repeat(np.arange(num_decodes), paths),
            np.arange(num_path_rows) - np.repeat(path_starts[:num_decodes], paths),
            path_starts if num_path_rows else path_starts[:0],
            np.array(self._started, np.int64).reshape(-1),
            segments,
            updates[:, 0],
            updates[:, 1],
        ]
        return shape, pack(sections)

    def _first_rows(self, drafts: DraftPlan, shape: VerifyShape) -> list[int]:
        """Returns the verified row of each sequence that draws at which its next token is drawn."""
        num_rows = drafts.num_drafts + 1
        num_completing = shape.num_drawn - shape.num_decodes
        return [
            *(np.cumsum(num_rows) - num_rows).tolist(),
            *range(shape.num_decode_tokens, shape.num_decode_tokens + num_completing),
        ]

    def _decode_tokens(self, rows: DecodingRows, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the tokens of the rows of the decodes that the host knows, and what stands for others."""
        tokens = np.full(len(places), ON_DEVICE, np.int64)
        if not self._drafts_on_device:
            slots = np.repeat(rows.slots, rows.num_rows)
            drafted = self._drafts_SK[slots, np.maximum(places - 1, 0)]
            tokens = np.where(places > 0, drafted, ON_DEVICE)
        if rows.is_padded:
            tokens[places >= np.repeat(rows.num_valid, rows.num_rows)] = NO_TOKEN
        return tokens

    def _pass_segments(
        self, slots: NDArray[np.int64], counts: NDArray[np.int64], size: PassSize | None
    ) -> NDArray[np.int32]:
        """Returns the segments of adapters, as many as the graph has, if one runs the pass."""
        segments = self._segments(slots, counts)
        if size is None or not len(segments):
            return segments
        assert self._pass_graphs is not None
        num_segments = len(segments) // 2
        starts, of_slots = segments[: num_segments + 1], segments[num_segments + 1 :]
        num_empty = self._pass_graphs.num_segments(size) - num_segments
        return np.concatenate(
            [
                np.pad(starts, (0, num_empty), mode="edge"),
                np.pad(of_slots, (0, num_empty), constant_values=NO_ADAPTER),
            ]
        )

    def _packed_updates(self, size: PassSize | None) -> NDArray[np.int64]:
        """Returns the updates of block tables [U, 2] that a pass makes; a graph makes one per sequence."""
        num_taken = len(self._updates) if size is None else size.num_seqs
        updates = np.array(self._updates[:num_taken], np.int64).reshape(-1, 2)
        del self._updates[:num_taken]
        if size is None:
            return updates
        padded = np.full((size.num_seqs, 2), (self._padding.place, 0), np.int64)
        padded[: len(updates)] = updates
        return padded
