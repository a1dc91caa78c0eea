"""Executes passes that verify draft tokens, and drafts the tokens of the next pass.

Besides the block tables and the newest tokens, the device keeps of each slot the number of its computed
tokens and its draft tokens, so that a pass can be launched before the host knows what the last one accepted.

A draft token is accepted if it equals the token that is drawn at the row before it. Each row draws with the
random number of its own position, so the tokens of a request are those that it would get without drafts. If
the draft was drawn from a distribution, the row draws the draft token where rejection sampling accepts it,
and another one where not, so that tokens follow the target's distribution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels.sampling import DraftRows
from policies.speculation import Proposer
from realengine.model.decoder import States
from realengine.runner.batch import Batch, TreeRows
from realengine.runner.executor import Executor, logprobs_of
from realengine.runner.graphs import Drawn, Logprobs
from realengine.runner.work import Draw, RowSettings, Work
from realengine.speculation.drafter import DecodedRows, Drafter, Passed, Start
from realengine.speculation.tree_rows import TreeShape
from realengine.speculation.verification import Verified, verified
from realengine.speculation.work import VerifyShape, VerifyWords, VerifyWork


class SpeculativeExecutor(Executor):
    """An `Executor` that verifies draft tokens. Its other arguments are those of `Executor`.

    drafter: drafts on the device; None: the host drafts.
    """

    def __init__(self, *args: Any, proposer: Proposer, drafter: Drafter | None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._drafter = drafter
        num_slots = len(self._newest_S)
        self._computed_S = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        self._drafts_SK = torch.zeros(
            num_slots, proposer.num_speculative_tokens, dtype=torch.int64, device=self.device
        )
        self._probs_SKV: torch.Tensor | None = None  # of drawn draft tokens; allocated on first use
        self._tree = None if proposer.tree is None else TreeShape(proposer.tree, self.device)

    @torch.inference_mode()
    def run(self, work: Work) -> Drawn | None:
        """Does all work in order, as `Executor.run` does."""
        if not isinstance(work, VerifyWork):
            return super().run(work)
        self._enter_device()
        self._prepare(work)
        assert work.words is not None
        shape = work.verify
        views = VerifyWords.of(self._upload.sent(work.words), shape)
        self._begin(views, shape)
        if shape.num_iterations == 1:
            return self._verify(views, shape)
        drawn = [self._verify(views, shape) for _ in range(shape.num_iterations)]
        tokens = [one.tokens_IS for one in drawn if one is not None]
        accepted = [one.accepted_IS for one in drawn if one is not None and one.accepted_IS is not None]
        return Drawn(torch.cat(tokens), accepted_IS=torch.cat(accepted))

    def _verify(self, views: VerifyWords, shape: VerifyShape) -> Drawn | None:
        """Runs a pass, accepts draft tokens, and drafts those of the next pass."""
        batch = self._batch(views, shape)
        rows_R, slots_S = views.rows_R.long(), views.drawn_slots_S.long()
        states, logits_RV = self._target(batch, rows_R)
        drawn_R = self._draw_rows(logits_RV, batch, views, shape)
        parents = (
            None
            if self._tree is None
            else self._tree.parents[views.places_T[: shape.num_decode_tokens].long()]
        )
        found = verified(self._backend, batch.tokens_T, drawn_R, views.starts_B, parents, shape)
        if self._tree is not None and shape.max_depth:
            self._compact(found, batch, shape)
        self._advance(found, views, shape)
        if self._drafter is not None:
            try:
                self._draft(self._drafter, found, batch, states, views, shape)
            except Exception as error:  # the engine ends the requests of a launch that fails so
                what = f"{type(self._drafter).__name__} raised {type(error).__name__}: {error}"
                raise RuntimeError(f"the drafter has failed: {what}") from error
        if not shape.num_drawn:
            return None
        logprobs = None
        if shape.num_logprobs >= 0:
            of_rows = logprobs_of(logits_RV, drawn_R, shape.num_logprobs)
            logprobs = Logprobs(*(part[found.rows_SD.T.flatten()] for part in of_rows))
        if shape.draw is Draw.penalised:
            self._count(found, slots_S)
        return Drawn(found.tokens_SD.T.contiguous(), logprobs, found.accepted_S[None])

    def _begin(self, views: VerifyWords, shape: VerifyShape) -> None:
        """Updates the block tables, and the slots that begin with known tokens."""
        if shape.num_updates:
            self._tables_SM.view(-1).index_copy_(0, views.places_U.long(), views.ids_U)
        if shape.num_started:
            slots, tokens, positions = views.started_N3.view(-1, 3).long().unbind(1)
            self._newest_S.index_copy_(0, slots, tokens)
            self._computed_S.index_copy_(0, slots, positions)

    def _batch(self, views: VerifyWords, shape: VerifyShape) -> Batch:
        """Returns the rows of the pass, with the tokens and positions that only the device knows."""
        num_decodes, num_ours = shape.num_decodes, shape.num_decode_tokens
        slots_T, places_T, tokens_T = views.slots_T.long(), views.places_T.long(), views.tokens_T.long()
        slots, rows = slots_T[:num_ours], places_T[:num_ours]
        computed = self._computed_S[slots]
        drafted = self._drafts_SK[slots, (rows - 1).clamp(min=0)]
        on_device = torch.where(rows == 0, self._newest_S[slots], drafted)
        tokens = torch.where(tokens_T[:num_ours] >= 0, tokens_T[:num_ours], on_device)
        depths = rows if self._tree is None else self._tree.depths[rows]
        positions_T = torch.cat([computed + depths, places_T[num_ours:]])
        lengths_B, slots_B = views.lengths_B.long(), views.slots_B.long()
        contexts = self._computed_S[slots_B[:num_decodes]] + lengths_B[:num_decodes]
        tree = None
        if self._tree is not None and num_ours > num_decodes:
            mask = self._tree.draft_tree(lengths_B[:num_decodes], positions_T[:num_ours])
            tree = TreeRows(mask, num_decodes, num_ours)
        num_singles = num_decodes if num_ours == num_decodes else 0  # without drafts they are plain decodes
        max_blocks = -(-shape.max_context_len // self._cache.block_size)
        return Batch(
            tokens_T=torch.cat([tokens, tokens_T[num_ours:]]),
            positions_T=positions_T,
            slots_T=self._kv_slots(slots_T, torch.cat([computed + rows, places_T[num_ours:]])),
            block_tables_BM=self._tables_SM[slots_B, :max_blocks],
            chunk_starts=views.starts_B[num_singles:] - num_singles,
            context_lens_B=torch.cat([contexts, lengths_B[num_decodes:]]).int(),
            sampled_rows_S=views.rows_R.long(),
            num_decodes=num_singles,
            max_query_len=shape.max_query_len,
            max_context_len=shape.max_context_len,
            adapters=self._segments(views.segment_starts, views.segment_slots, is_decode=False),
            tree=tree,
        )

    def _kv_slots(self, slots_T: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        """Returns the positions in the KV cache of tokens at these places of their sequences."""
        block_size = self._cache.block_size
        return self._tables_SM[slots_T, places_T // block_size].long() * block_size + places_T % block_size

    def _target(self, batch: Batch, rows_R: torch.Tensor) -> tuple[States | None, torch.Tensor]:
        """Computes the target's logits [R, V] of the verified rows, and the states that a drafter reads."""
        drafter = self._drafter
        if drafter is None or not drafter.wants_states:
            return None, self._decoder.logits(batch, self._cache)
        states = self._decoder.states(batch, self._cache, taps=drafter.taps)
        return states, self._decoder.head(states.hidden_TH[rows_R])

    def _draw_rows(
        self, logits_RV: torch.Tensor, batch: Batch, views: VerifyWords, shape: VerifyShape
    ) -> torch.Tensor:
        """Draws a token at every verified row, with the random number of its position."""
        if shape.draw is Draw.greedy:
            return self._backend.greedy(logits_RV)
        settings = RowSettings.of(views.sampling_SW).of_rows(views.sequences_R.long())
        sampling = settings.sampling(batch.positions_T[views.rows_R.long()] + 1)
        penalties = None
        if shape.draw is Draw.penalised:
            counts_RV = self._row_counts(batch, views, shape)
            penalties = settings.penalties(counts_RV, torch.arange(len(logits_RV), device=self.device))
        drafts = self._drawn_drafts(batch, views, shape)
        return self._backend.sample(logits_RV, sampling, penalties, drafts=drafts)

    def _drawn_drafts(self, batch: Batch, views: VerifyWords, shape: VerifyShape) -> DraftRows | None:
        """Returns the draft tokens after each verified row, if they were drawn from a distribution."""
        if self._probs_SKV is None:
            return None
        num_ours, num_others = shape.num_decode_tokens, shape.num_verified - shape.num_decode_tokens
        sequences = views.sequences_R[:num_ours]
        following = torch.cat([batch.tokens_T[1:], batch.tokens_T[:1]])[:num_ours]
        is_last = torch.ones_like(sequences, dtype=torch.bool)
        is_last[:-1] = sequences[1:] != sequences[:-1]
        num_places = self._probs_SKV.shape[1]
        rows = views.slots_T[:num_ours].long() * num_places + views.places_T[:num_ours].clamp(
            max=num_places - 1
        )
        none = sequences.new_zeros(num_others, dtype=torch.int64)
        return DraftRows(
            tokens=torch.cat([torch.where(is_last, -1, following), none - 1]),
            row=torch.cat([rows.long(), none]),
            probs=self._probs_SKV.flatten(0, 1),
        )

    def _row_counts(self, batch: Batch, views: VerifyWords, shape: VerifyShape) -> torch.Tensor:
        """Returns the token counts [R, V] at each verified row, its draft tokens included."""
        rows_R = views.rows_R.long()
        counts_RV = self._counts()[views.slots_T.long()[rows_R]]
        numbers = torch.arange(shape.num_decode_tokens, device=self.device)
        places = views.places_T[: shape.num_decode_tokens].long()
        depths = places if self._tree is None else self._tree.depths[places]
        for depth in range(1, int(shape.max_depth) + 1):
            before = torch.full_like(places, depth)
            if self._tree is not None:
                before = self._tree.ancestors[places, depth]
            tokens = batch.tokens_T[torch.where(depths >= depth, numbers - places + before, numbers)]
            _count_valid(counts_RV, numbers, tokens, depths >= depth)
        return counts_RV

    def _count(self, found: Verified, slots_S: torch.Tensor) -> None:
        """Counts the tokens that the sequences got."""
        for level, tokens_S in enumerate(found.tokens_SD.T):
            _count_valid(self._counts(), slots_S, tokens_S, found.accepted_S >= level)

    def _advance(self, found: Verified, views: VerifyWords, shape: VerifyShape) -> None:
        """Sets the newest tokens, and the numbers of computed tokens."""
        num_decodes, slots_B = shape.num_decodes, views.slots_B.long()
        newest_S = found.tokens_SD.gather(1, found.accepted_S[:, None])[:, 0]
        self._newest_S.index_copy_(0, views.drawn_slots_S.long(), newest_S)
        decodes = slots_B[:num_decodes]
        after = self._computed_S[decodes] + found.accepted_S[:num_decodes] + 1
        ends = views.lengths_B[num_decodes:].long()
        self._computed_S.index_copy_(0, slots_B, torch.cat([after, ends]))

    def _compact(self, found: Verified, batch: Batch, shape: VerifyShape) -> None:
        """Moves the KV of accepted nodes of a tree to the places of consecutive tokens."""
        rows_BD = found.rows_SD[: shape.num_decodes]
        levels = torch.arange(shape.max_depth + 1, device=self.device)
        is_moved = (levels > 0) & (levels <= found.accepted_S[: shape.num_decodes, None])
        places = torch.where(is_moved, rows_BD[:, :1] + levels, 0)
        sources_BD = torch.where(is_moved, batch.slots_T[rows_BD], -1)
        destinations_BD = torch.where(is_moved, batch.slots_T[places], -1)
        for caches in self._cache.own_sets:
            self._backend.move_tokens(caches, sources_BD, destinations_BD)

    def _draft(
        self,
        drafter: Drafter,
        found: Verified,
        batch: Batch,
        states: States | None,
        views: VerifyWords,
        shape: VerifyShape,
    ) -> None:
        """Shows a drafter the pass, and has it draft for the next one."""
        slots_S = views.drawn_slots_S.long()
        passed, rows_N = self._passed(found, batch, states, views, shape)
        drafter.follow(passed)
        if not passed.drafts_next:
            return
        positions_S, sampling = self._computed_S[slots_S], None
        if shape.draw is not Draw.greedy:
            sampling = RowSettings.of(views.sampling_SW).sampling(positions_S + 1)
        start = Start(
            slots_N=slots_S,
            newest_N=self._newest_S[slots_S],
            positions_N=positions_S,
            rows_N=rows_N,
            tables_NM=self._tables_SM[slots_S, : batch.block_tables_BM.shape[1]],
            max_context_len=shape.max_context_len,
            sampling=sampling,
        )
        tokens_NK, probs_NKV = drafter.draft(passed, start, shape.num_levels)
        num_tokens = tokens_NK.shape[1]
        self._drafts_SK[:, :num_tokens].index_copy_(0, slots_S, tokens_NK)
        if probs_NKV is not None:
            if self._probs_SKV is None:
                size = (*self._drafts_SK.shape, probs_NKV.shape[2])
                self._probs_SKV = torch.zeros(size, device=self.device)
            self._probs_SKV[:, :num_tokens].index_copy_(0, slots_S, probs_NKV)
        elif self._probs_SKV is not None:  # the likeliest tokens: all sequences are greedy
            certain = torch.zeros(*tokens_NK.shape, self._probs_SKV.shape[2], device=self.device)
            certain.scatter_(2, tokens_NK[:, :, None], 1.0)
            self._probs_SKV[:, :num_tokens].index_copy_(0, slots_S, certain)

    def _passed(
        self,
        found: Verified,
        batch: Batch,
        states: States | None,
        views: VerifyWords,
        shape: VerifyShape,
    ) -> tuple[Passed, torch.Tensor]:
        """Returns the rows that advance the sequences, and the row before each newest token."""
        num_decodes, num_ours = shape.num_decodes, shape.num_decode_tokens
        starts_B, accepted_B = views.starts_B.long(), found.accepted_S[:num_decodes]
        first_B, contexts_B, last_rows = (
            starts_B[:num_decodes],
            batch.context_lens_B,
            views.rows_R[num_ours:].long(),
        )
        tokens_T, positions_T, slots_T = batch.tokens_T, batch.positions_T, batch.slots_T
        sequences, levels = views.sequences_R[:num_ours].long(), views.places_T[:num_ours].long()
        if shape.num_path_rows:  # the rows of a tree, by level instead of by node
            sequences, levels = views.path_sequences_P.long(), views.path_levels_P.long()
            first = first_B[sequences]
            others = torch.arange(num_ours, shape.num_tokens, device=self.device)
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
            last_rows = last_rows - num_ours + shape.num_path_rows
            starts_B = by_level_B
        rows_N = torch.cat([starts_B[:num_decodes] + accepted_B, last_rows])
        is_rejected = levels > accepted_B[sequences]
        slots_T = torch.cat([torch.where(is_rejected, -1, slots_T[: len(levels)]), slots_T[len(levels) :]])
        following_T = torch.cat([tokens_T[1:], tokens_T[:1]])
        following_T[starts_B[num_decodes + 1 :] - 1] = views.following_C.long()
        following_T[rows_N] = self._newest_S[views.drawn_slots_S.long()]
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
            drafts_next=shape.num_levels > 0 and shape.num_drawn > 0,
        )
        return passed, rows_N


def _count_valid(
    counts_RV: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, is_valid: torch.Tensor
) -> None:
    """Counts tokens, each in its own row, where is_valid."""
    counts_RV.index_put_((rows, tokens), is_valid.to(counts_RV.dtype), accumulate=True)
