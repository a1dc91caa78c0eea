"""Verifies the draft tokens of a step, and drafts those of the next one: a stage of the executor.

Besides the block tables and the newest tokens, the device keeps of each slot the number of its computed
tokens and its draft tokens, so that a step can be launched before the host knows what the last one accepted.

A draft token is accepted if it equals the token that is drawn at the row before it. Each row draws with the
random number of its own position, so the tokens of a request are those that it would get without drafts. If
the draft was drawn from a distribution, the row draws the draft token where rejection sampling accepts it,
and another one where not, so that tokens follow the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kernels.sampling import DraftRows
from policies.speculation import DraftLength, Proposer
from policies.speculation.draft_lengths import Fixed
from policies.speculation.engine.drafts import Shapes
from realengine.model.backend import Backend
from realengine.model.decoder import States
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch, TreeRows
from realengine.runner.graphs import Computed, Drawn, Verified
from realengine.runner.sampler import Sampler, logprobs_of
from realengine.runner.work import NO_TOKEN, DraftSizes, Draw, RowSettings, Shape, StepSize, StepWords
from realengine.speculation.drafter import DecodedRows, Drafter, Passed, Start
from realengine.speculation.graph_sizes import captured_levels, drafts_in_graph, sizes_of
from realengine.speculation.tree_rows import TreeShape


class DeviceDrafts(NamedTuple):
    """The drafts of an executor. drafter: makes them on the device; None: the host drafts."""

    proposer: Proposer
    drafter: Drafter | None = None
    draws: bool = False
    """Whether drafts are drawn from distributions, of which the engine keeps the probabilities."""
    draft_length: DraftLength = Fixed()
    """The policy whose numbers of draft tokens are captured."""


class Inputs(NamedTuple):
    """The input of a step's rows, with what only the device knows."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    places_T: torch.Tensor
    """Places in the cache."""
    contexts_B: torch.Tensor
    tree: TreeRows | None


class Verifier:
    """The drafts of one executor, whose block tables and newest tokens by slot it shares."""

    def __init__(
        self,
        drafts: DeviceDrafts,
        cache: KvCache,
        backend: Backend,
        sampler: Sampler,
        tables_SM: torch.Tensor,
        newest_S: torch.Tensor,
        vocab_size: int,
    ) -> None:
        self._drafter = drafts.drafter
        self._draft_length = drafts.draft_length
        self._cache = cache
        self._backend = backend
        self._sampler = sampler
        self._tables_SM = tables_SM
        self._newest_S = newest_S
        self._device = newest_S.device
        self.shapes = Shapes(drafts.proposer)
        num_slots, num_drafts = len(newest_S), drafts.proposer.num_speculative_tokens
        self._computed_S = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
        self._drafts_SK = torch.zeros(num_slots, num_drafts, dtype=torch.int64, device=self._device)
        self._probs_SKV: torch.Tensor | None = None
        if drafts.draws:
            self._probs_SKV = torch.zeros(num_slots, num_drafts, vocab_size, device=self._device)
        self._tree = None if drafts.proposer.tree is None else TreeShape(drafts.proposer.tree, self._device)
        self.drafts_in_graph = drafts_in_graph(drafts.draft_length, drafts.drafter)
        self.wants_states = drafts.drafter is not None and drafts.drafter.wants_states
        self.taps = () if drafts.drafter is None else drafts.drafter.taps

    def graph_sizes(self, nums: Sequence[int], max_context_len: int) -> list[StepSize]:
        """Returns the sizes of the passes to capture. nums: of sequences."""
        levels = captured_levels(self.shapes, self._draft_length, drafts_on_device=self._drafter is not None)
        return sizes_of(self.shapes, levels, nums, max_context_len, drafts=self.drafts_in_graph)

    def begin(self, views: StepWords) -> None:
        """Sets the slots that begin with known tokens."""
        if len(views.started_N3):
            slots, tokens, positions = views.started_N3.view(-1, 3).long().unbind(1)
            self._newest_S.index_copy_(0, slots, tokens)
            self._computed_S.index_copy_(0, slots, positions)

    def inputs(self, views: StepWords, shape: Shape) -> Inputs:
        """Returns the tokens of the rows, their positions and places, and the lengths of the sequences."""
        num_decodes, num_ours = shape.num_decodes, _sizes(shape).num_decode_tokens
        slots_T, rows_T, tokens_T = views.slots_T.long(), views.places_T.long(), views.tokens_T.long()
        slots, rows = slots_T[:num_ours], rows_T[:num_ours]
        computed = self._computed_S[slots]
        drafted = self._drafts_SK[slots, (rows - 1).clamp(min=0)]
        on_device = torch.where(rows == 0, self._newest_S[slots], drafted)
        tokens = torch.where(tokens_T[:num_ours] >= 0, tokens_T[:num_ours], on_device)
        depths = rows if self._tree is None else self._tree.depths[rows]
        positions_T = torch.cat([computed + depths, rows_T[num_ours:]])
        lengths_B = views.contexts_B.long()
        contexts = self._computed_S[views.slots_B.long()[:num_decodes]] + lengths_B[:num_decodes]
        tree = None
        if self._tree is not None and num_ours > num_decodes:
            mask = self._tree.draft_tree(lengths_B[:num_decodes], positions_T[:num_ours])
            tree = TreeRows(mask, num_decodes, num_ours)
        return Inputs(
            tokens_T=torch.cat([tokens, tokens_T[num_ours:]]),
            positions_T=positions_T,
            places_T=torch.cat([computed + rows, rows_T[num_ours:]]),
            contexts_B=torch.cat([contexts, lengths_B[num_decodes:]]).int(),
            tree=tree,
        )

    def verify(
        self, logits_RV: torch.Tensor, computed: Computed, views: StepWords, shape: Shape
    ) -> tuple[Drawn | None, Verified]:
        """Draws a token at each row, and accepts draft tokens; the sequences advance by them."""
        batch, sizes = computed.batch, _sizes(shape)
        assert batch is not None
        drafts_T = batch.tokens_T
        if sizes.is_padded:
            drafts_T = torch.where(views.tokens_T == NO_TOKEN, -1, drafts_T)
        drawn_R = self._draw_rows(logits_RV, batch, drafts_T, views, shape)
        parents = (
            None
            if self._tree is None
            else self._tree.parents[views.places_T[: sizes.num_decode_tokens].long()]
        )
        found = verified(self._backend, drafts_T, drawn_R, views.starts_B, parents, shape)
        if self._tree is not None and sizes.max_depth:
            self._compact(found, batch, shape)
        self._advance(found, views, shape)
        if not shape.num_drawn:
            return None, found
        logprobs = None
        if shape.num_logprobs >= 0:
            of_rows = logprobs_of(logits_RV, drawn_R, shape.num_logprobs)
            logprobs = type(of_rows)(*(part[found.rows_SD.T.flatten()] for part in of_rows))
        if shape.draw is Draw.penalised:
            self._count(found, views.drawn_slots_S.long())
        return Drawn(found.tokens_SD.T.contiguous(), logprobs, found.accepted_S[None]), found

    def _draw_rows(
        self, logits_RV: torch.Tensor, batch: Batch, drafts_T: torch.Tensor, views: StepWords, shape: Shape
    ) -> torch.Tensor:
        """Draws a token at every row that draws, with the random number of its position."""
        rows_R = views.drawn_R.long()
        slots_R, positions_R = views.slots_T.long()[rows_R], batch.positions_T[rows_R] + 1
        settings, counts, drafts = None, None, None
        if shape.draw is not Draw.greedy:
            settings = RowSettings.of(views.sampling_SW).of_rows(views.sequences_R.long())
            if self._probs_SKV is not None:
                drafts = drawn_drafts(self._probs_SKV, drafts_T, views, shape)
        if shape.draw is Draw.penalised:
            counts_RV = self._row_counts(batch, views, shape)
            counts = counts_RV, torch.arange(len(logits_RV), device=self._device)
        return self._sampler.draw(
            logits_RV, shape.draw, settings, slots_R, positions_R, counts=counts, drafts=drafts
        )

    def _row_counts(self, batch: Batch, views: StepWords, shape: Shape) -> torch.Tensor:
        """Returns the token counts [R, V] at each row that draws, its draft tokens included."""
        sizes = _sizes(shape)
        counts_RV = self._sampler.counts()[views.slots_T.long()[views.drawn_R.long()]]
        numbers = torch.arange(sizes.num_decode_tokens, device=self._device)
        places = views.places_T[: sizes.num_decode_tokens].long()
        depths = places if self._tree is None else self._tree.depths[places]
        for depth in range(1, sizes.max_depth + 1):
            before = torch.full_like(places, depth)
            if self._tree is not None:
                before = self._tree.ancestors[places, depth]
            tokens = batch.tokens_T[torch.where(depths >= depth, numbers - places + before, numbers)]
            _count_valid(counts_RV, numbers, tokens, depths >= depth)
        return counts_RV

    def _count(self, found: Verified, slots_S: torch.Tensor) -> None:
        """Counts the tokens that the sequences got."""
        for level, tokens_S in enumerate(found.tokens_SD.T):
            _count_valid(self._sampler.counts(), slots_S, tokens_S, found.accepted_S >= level)

    def _advance(self, found: Verified, views: StepWords, shape: Shape) -> None:
        """Sets the newest tokens, and the numbers of computed tokens."""
        num_decodes, slots_B = shape.num_decodes, views.slots_B.long()
        newest_S = found.tokens_SD.gather(1, found.accepted_S[:, None])[:, 0]
        self._newest_S.index_copy_(0, views.drawn_slots_S.long(), newest_S)
        decodes = slots_B[:num_decodes]
        after = self._computed_S[decodes] + found.accepted_S[:num_decodes] + 1
        if _sizes(shape).is_padded:
            padding_slot = len(self._newest_S) - 1  # it never has tokens
            after = torch.where(decodes == padding_slot, 0, after)
        ends = views.contexts_B[num_decodes:].long()
        self._computed_S.index_copy_(0, slots_B, torch.cat([after, ends]))

    def _compact(self, found: Verified, batch: Batch, shape: Shape) -> None:
        """Moves the KV of accepted nodes of a tree to the places of consecutive tokens."""
        rows_BD = found.rows_SD[: shape.num_decodes]
        levels = torch.arange(_sizes(shape).max_depth + 1, device=self._device)
        is_moved = (levels > 0) & (levels <= found.accepted_S[: shape.num_decodes, None])
        places = torch.where(is_moved, rows_BD[:, :1] + levels, 0)
        sources_BD = torch.where(is_moved, batch.slots_T[rows_BD], -1)
        destinations_BD = torch.where(is_moved, batch.slots_T[places], -1)
        for caches in self._cache.own_sets:
            self._backend.move_tokens(caches, sources_BD, destinations_BD)

    def draft(self, found: Verified, computed: Computed, views: StepWords, shape: Shape) -> None:
        """Shows the drafter, if there is one, the pass, and has it draft for the next one."""
        if self._drafter is None:
            return
        assert computed.batch is not None
        batch = computed.batch
        if not batch.block_tables_BM.shape[1]:  # those of a graph; see `without_tables`
            num_blocks = -(-shape.max_context_len // self._cache.block_size)
            tables = self._tables_SM[views.slots_B.long(), :num_blocks]
            batch = replace(batch, block_tables_BM=tables, max_context_len=shape.max_context_len)
        try:
            self._draft_with(self._drafter, found, batch, computed.states, views, shape)
        except Exception as error:  # the engine ends the requests of a launch that fails so
            what = f"{type(self._drafter).__name__} raised {type(error).__name__}: {error}"
            raise RuntimeError(f"the drafter has failed: {what}") from error

    def _draft_with(
        self,
        drafter: Drafter,
        found: Verified,
        batch: Batch,
        states: States | None,
        views: StepWords,
        shape: Shape,
    ) -> None:
        slots_S = views.drawn_slots_S.long()
        newest_S = self._newest_S[slots_S]
        passed, rows_N = passed_rows(found, batch, states, newest_S, views, shape)
        drafter.follow(passed)
        if not passed.drafts_next:
            return
        positions_S, sampling = self._computed_S[slots_S], None
        if shape.draw is not Draw.greedy:
            sampling = RowSettings.of(views.sampling_SW).sampling(positions_S + 1)
        start = Start(
            slots_N=slots_S,
            newest_N=newest_S,
            positions_N=positions_S,
            rows_N=rows_N,
            tables_NM=self._tables_SM[slots_S, : batch.block_tables_BM.shape[1]],
            max_context_len=shape.max_context_len,
            sampling=sampling,
        )
        tokens_NK, probs_NKV = drafter.draft(passed, start, _sizes(shape).num_levels)
        num_tokens = tokens_NK.shape[1]
        self._drafts_SK[:, :num_tokens].index_copy_(0, slots_S, tokens_NK)
        if self._probs_SKV is None:
            return
        if probs_NKV is None:  # the likeliest tokens: all sequences are greedy
            probs_NKV = torch.zeros(*tokens_NK.shape, self._probs_SKV.shape[2], device=self._device)
            probs_NKV.scatter_(2, tokens_NK[:, :, None], 1.0)
        self._probs_SKV[:, :num_tokens].index_copy_(0, slots_S, probs_NKV)


def without_tables(batch: Batch) -> Batch:
    """Returns a batch without its block tables: what a graph keeps no other graph can use for itself."""
    return replace(batch, block_tables_BM=batch.block_tables_BM.new_empty(batch.num_rows, 0))


def verified(
    backend: Backend,
    tokens_T: torch.Tensor,
    drawn_R: torch.Tensor,
    starts_B: torch.Tensor,
    parents: torch.Tensor | None,
    shape: Shape,
) -> Verified:
    """Accepts the draft tokens that equal the tokens drawn at the rows that they continue.

    tokens_T: tokens of the rows. drawn_R: tokens drawn at the rows that draw. starts_B: first row of each
    sequence, and the end. parents: with a tree, the row of its sequence that each row of the decodes
    continues; None: each continues the one before it.
    """
    num_ours, depth = _sizes(shape).num_decode_tokens, _sizes(shape).max_depth
    prompt_rows = torch.arange(num_ours, shape.num_drawn_rows, device=drawn_R.device)
    found = backend.match_drafts(
        tokens_T[:num_ours], drawn_R[:num_ours], starts_B[: shape.num_decodes + 1], depth, parents
    )
    rows_SD = torch.cat([found.rows_BD, prompt_rows[:, None].expand(-1, depth + 1)])
    accepted_S = torch.cat([found.accepted_B, torch.zeros_like(prompt_rows)])
    return Verified(accepted_S, drawn_R[rows_SD], rows_SD)


def drawn_drafts(
    probs_SKV: torch.Tensor, drafts_T: torch.Tensor, views: StepWords, shape: Shape
) -> DraftRows:
    """Returns the draft token after each row that draws, -1 for none, and the probabilities of all drafts.

    probs_SKV: the distribution of each draft token, by slot and place in the draft.
    """
    num_ours = _sizes(shape).num_decode_tokens
    sequences = views.sequences_R[:num_ours]
    following = torch.cat([drafts_T[1:], drafts_T[:1]])[:num_ours]
    is_last = torch.ones_like(sequences, dtype=torch.bool)
    is_last[:-1] = sequences[1:] != sequences[:-1]
    num_places = probs_SKV.shape[1]
    rows = views.slots_T[:num_ours].long() * num_places + views.places_T[:num_ours].clamp(max=num_places - 1)
    none = sequences.new_zeros(shape.num_drawn_rows - num_ours, dtype=torch.int64)
    return DraftRows(
        tokens=torch.cat([torch.where(is_last, -1, following), none - 1]),
        row=torch.cat([rows.long(), none]),
        probs=probs_SKV.flatten(0, 1),
    )


def passed_rows(
    found: Verified,
    batch: Batch,
    states: States | None,
    newest_S: torch.Tensor,
    views: StepWords,
    shape: Shape,
) -> tuple[Passed, torch.Tensor]:
    """Returns the rows that advance the sequences, and the row before each newest token.

    newest_S: newest tokens of the sequences that draw.
    """
    sizes = _sizes(shape)
    num_decodes, num_ours = shape.num_decodes, sizes.num_decode_tokens
    starts_B, accepted_B = views.starts_B.long(), found.accepted_S[:num_decodes]
    first_B, contexts_B, last_rows = (
        starts_B[:num_decodes],
        batch.context_lens_B,
        views.drawn_R[num_ours:].long(),
    )
    tokens_T, positions_T, slots_T = batch.tokens_T, batch.positions_T, batch.slots_T
    sequences, levels = views.sequences_R[:num_ours].long(), views.places_T[:num_ours].long()
    if sizes.num_path_rows:  # the rows of a tree, by level instead of by node
        sequences, levels = views.path_sequences_P.long(), views.path_levels_P.long()
        first = first_B[sequences]
        others = torch.arange(num_ours, shape.num_tokens, device=newest_S.device)
        rows = torch.cat([found.rows_SD[sequences, levels], others])
        tokens_T, positions_T = (
            tokens_T[rows],
            torch.cat([positions_T[first] + levels, positions_T[others]]),
        )
        slots_T = slots_T[torch.cat([first + levels, others])]
        if states is not None:
            states = States(states.hidden_TH[rows], tuple(tap[rows] for tap in states.taps))
        by_level_B = views.path_starts_B.long()
        contexts_B = contexts_B - (starts_B.diff() - by_level_B.diff()).int()
        last_rows = last_rows - num_ours + sizes.num_path_rows
        starts_B = by_level_B
    rows_N = torch.cat([starts_B[:num_decodes] + accepted_B, last_rows])
    is_rejected = levels > accepted_B[sequences]
    slots_T = torch.cat([torch.where(is_rejected, -1, slots_T[: len(levels)]), slots_T[len(levels) :]])
    following_T = torch.cat([tokens_T[1:], tokens_T[:1]])
    following_T[starts_B[num_decodes + 1 :] - 1] = views.following_C.long()
    following_T[rows_N] = newest_S
    rows_of_passed = replace(
        batch,
        tokens_T=tokens_T,
        positions_T=positions_T,
        slots_T=slots_T,
        chunk_starts=starts_B.int(),
        context_lens_B=contexts_B,
        num_decodes=0,
        sampled_rows_S=None,
        adapters=None,
        tree=None,
    )
    passed = Passed(
        batch=rows_of_passed,
        following_T=following_T,
        states=states,
        decoded=DecodedRows(num_decodes, len(levels), rows_N[:num_decodes]),
        begun_slots=views.started_N3[::3].long() if sizes.num_started else None,
        drafts_next=sizes.num_levels > 0 and shape.num_drawn > 0,
    )
    return passed, rows_N


def _sizes(shape: Shape) -> DraftSizes:
    """Returns the sizes of the drafts of a step, which an engine that speculates always has."""
    assert shape.drafts is not None
    return shape.drafts


def _count_valid(
    counts_RV: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, is_valid: torch.Tensor
) -> None:
    """Counts tokens, each in its own row, where is_valid."""
    counts_RV.index_put_((rows, tokens), is_valid.to(counts_RV.dtype), accumulate=True)
