"""Packs the decoding sequences of a plan with draft tokens: a part of the runner."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.core.plan import StepPlan
from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import DraftPlan
from realengine.runner.graphs import Drawn, Graphs
from realengine.runner.packing import Decodes, DraftRows
from realengine.runner.work import NO_TOKEN, ON_DEVICE, Padding, StepSize, Work
from realengine.speculation.pass_times import PassTimes, measured_passes


class DraftPacker:
    """The host's part of the drafts: tokens by slot, and slots that begin with known tokens.

    drafts_on_device: whether draft tokens are made on the device; else the host sets them by `set_drafts`.
    pass_times: is told of every pass; None: no policy needs its time. graphs: of passes, if there are any.
    """

    def __init__(
        self,
        core: EngineCore,
        execute: Callable[[Work], Drawn | None],
        *,
        drafts_on_device: bool,
        pass_times: PassTimes | None,
        graphs: Graphs | None,
    ) -> None:
        assert core.drafts is not None
        self._drafting = core.drafts.decodes
        self._padding = padding = Padding.of(
            core.max_num_seqs, core.max_model_len, core.block_pool.block_size
        )
        self._drafts_on_device = drafts_on_device
        self._pass_times = pass_times
        self._graphs = graphs
        self._max_model_len = core.max_model_len
        proposer = core.drafts.speculation.proposer
        self._lookahead = proposer.num_speculative_tokens + 1
        self._has_tree = proposer.tree is not None
        num_slots = padding.slot + 1
        self._drafts_SK = np.full((num_slots, proposer.num_speculative_tokens), ON_DEVICE, np.int32)
        self._started: list[tuple[int, int, int]] = []  # (slot, newest token, its position)
        if pass_times is not None:
            num_seqs, room = core.max_num_seqs, core.max_model_len
            passes = measured_passes(execute, pass_times.now, proposer, graphs, padding, num_seqs, room)
            pass_times.start(passes)

    def fill_slot(self, slot: int, tokens: SequenceOf[int]) -> None:
        """Notes the known tokens of the sequence that a slot has got."""
        self._started.append((slot, tokens[-1], len(tokens) - 1))

    def set_drafts(self, seq: Sequence, tokens: SequenceOf[int]) -> None:
        """Sets the draft tokens of a sequence's next pass."""
        self._drafts_SK[seq.slots[0], : len(tokens)] = tokens

    @property
    def may_repeat(self) -> bool:
        """True if several passes may run in one launch: the device must draft."""
        return self._drafts_on_device

    def now(self) -> float:
        """Returns the time on the clock of the passes; 0 if they are not measured."""
        return 0.0 if self._pass_times is None else self._pass_times.now()

    def blocks(self, plan: StepPlan) -> tuple[DraftPlan, NDArray[np.int64]]:
        """Returns the drafts of a plan, and the blocks that each sequence holds, lookahead included."""
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        return drafts, self._drafting.blocks_S[drafts.slots]

    def decodes(self, plan: StepPlan, num_iterations: int, forms: Collection[int]) -> Decodes:
        """Returns the rows of the decoding sequences of a plan, and those that fill a graph up.

        forms: slots of outputs with a form, of which the draft tokens are padding.
        """
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        slots, counts, depth, base = drafts.slots, drafts.num_drafts + 1, drafts.depth, drafts.base
        valid = np.where(np.isin(slots, list(forms)), 1, counts) if forms else counts
        is_padded = valid is not counts
        size = self._graph_of(plan, drafts, num_iterations)
        if size is not None:
            is_padded, fill = True, (0, size.num_seqs - len(slots))
            slots = np.pad(slots, fill, constant_values=self._padding.slot)
            valid, base = np.pad(valid, fill), np.pad(base, fill)
            counts, depth = np.full(size.num_seqs, 1 + size.num_drafts), np.full(size.num_seqs, size.depth)
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = np.full(len(places), ON_DEVICE, np.int64)
        if not self._drafts_on_device:
            drafted = self._drafts_SK[np.repeat(slots, counts), np.maximum(places - 1, 0)]
            tokens = np.where(places > 0, drafted, ON_DEVICE)
        if is_padded:
            tokens[places >= np.repeat(valid, counts)] = NO_TOKEN
        started = np.array(self._started, np.int64).reshape(-1, 3)
        self._started.clear()
        num_before_last = (num_iterations - 1) * (depth + 1)
        return Decodes(
            rows=[(seq, 0) for seq in drafts.seqs],
            slots_B=slots,
            counts_B=counts,
            contexts_B=counts,
            tokens_T=tokens,
            places_T=places,
            max_context_len=int((base + num_before_last + counts).max(initial=0)),
            lookahead=self._lookahead,
            size=size,
            num_drafts=(valid[: len(drafts.seqs)] - 1).tolist(),
            drafts=DraftRows(
                depth_D=depth,
                has_tree=self._has_tree,
                num_levels=drafts.next_levels,
                is_padded=is_padded,
                started_N3=started,
                following_C=np.empty(0, np.int64),
            ),
        )

    def launched(self, plan: StepPlan, begin_s: float, num_iterations: int) -> None:
        """Notes passes that were launched together. begin_s: from `now`."""
        if self._pass_times is not None:
            self._pass_times.begun(plan, begin_s, num_iterations)

    def _graph_of(self, plan: StepPlan, drafts: DraftPlan, num_iterations: int) -> StepSize | None:
        """Returns the size of the graphs that run a plan; None: it runs eagerly."""
        if self._graphs is None or plan.chunks or self._started or not drafts.seqs:
            return None
        num_drafts = drafts.num_drafts
        num_rows, most = len(num_drafts) + int(num_drafts.sum()), int(num_drafts.max())
        size = self._graphs.fit(len(num_drafts), num_rows, most, drafts.next_levels)
        num_before = int(drafts.base.max()) + (num_iterations - 1) * (int(drafts.depth.max()) + 1)
        if size is not None and num_before + 1 + size.num_drafts > self._max_model_len:
            return None  # rows of padding would be at positions that do not exist
        return size
