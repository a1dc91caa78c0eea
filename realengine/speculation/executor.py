"""Executes passes that verify draft tokens, and drafts the tokens of the next pass.

Besides the block tables and the newest tokens, the device keeps of each slot the number of its computed
tokens and its draft tokens, so that a pass can be launched before the host knows what the last one accepted.

A draft token is accepted if it equals the token that is drawn at the row before it. Each row draws with the
random number of its own position, so the tokens of a request are those that it would get without drafts. If
the draft was drawn from a distribution, the row draws the draft token where rejection sampling accepts it,
and another one where not, so that tokens follow the target's distribution.

A pass whose sequences all decode is replayed as a CUDA graph, if there is one that fits (`PassGraphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from policies.speculation import DraftLength, Proposer
from policies.speculation.engine.drafts import Shapes
from policies.speculation.fixed import Fixed
from realengine.model.decoder import States
from realengine.runner.batch import Batch, TreeRows
from realengine.runner.executor import Executor
from realengine.runner.graphs import Drawn, Logprobs
from realengine.runner.logprobs import logprobs_of
from realengine.runner.work import Draw, Padding, RowSettings, ScoredRows, Work
from realengine.speculation.completed import CompletedPass
from realengine.speculation.drafter import Drafter, Start
from realengine.speculation.drawn_drafts import drawn_drafts
from realengine.speculation.graphs import PassGraphs, captured_levels, drafts_in_graph
from realengine.speculation.passed_rows import passed_rows
from realengine.speculation.tree_rows import TreeShape
from realengine.speculation.verification import Verified, verified
from realengine.speculation.warm_up import eager_passes
from realengine.speculation.work import NO_TOKEN, PassSize, VerifyShape, VerifyWords, VerifyWork


class SpeculativeExecutor(Executor):
    """An `Executor` that verifies draft tokens. Its other arguments are those of `Executor`.

    drafter: drafts on the device; None: the host drafts. draws: whether it draws from its distribution, of
    which the engine keeps the probabilities. draft_length: the policy whose numbers are captured.
    """

    def __init__(
        self,
        *args: Any,
        proposer: Proposer,
        drafter: Drafter | None,
        draws: bool = False,
        draft_length: DraftLength | None = None,
        graph_sizes: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self._drafter = drafter
        self._shapes = Shapes(proposer)
        num_slots = len(self._newest_S)
        self._computed_S = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        num_drafts = proposer.num_speculative_tokens
        self._drafts_SK = torch.zeros(num_slots, num_drafts, dtype=torch.int64, device=self.device)
        self._probs_SKV: torch.Tensor | None = None
        if draws:
            size = (num_slots, num_drafts, self._decoder.architecture.vocab_size)
            self._probs_SKV = torch.zeros(size, device=self.device)
        self._tree = None if proposer.tree is None else TreeShape(proposer.tree, self.device)
        self._pass_graphs: PassGraphs | None = None
        if graph_sizes:
            self._pass_graphs = self.graphs = self._new_graphs(draft_length or Fixed(), graph_sizes)

    def _new_graphs(self, policy: DraftLength, sizes: Sequence[int]) -> PassGraphs:
        shapes = self._shapes
        return PassGraphs(
            self._run_words,
            shapes,
            sizes=sizes,
            levels=captured_levels(shapes, policy, drafts_on_device=self._drafter is not None),
            drafts=drafts_in_graph(policy, self._drafter),
            padding=Padding(self._num_slots, self._tables_SM.shape[1]),
            max_context_len=self._max_model_len,
            max_loras=0 if self.adapters is None else self.adapters.max_loras,
            max_segment_tokens=1 if self.adapters is None else self.adapters.max_segment_tokens(False),
            device=self.device,
        )

    def warm_up(self) -> None:
        """Launches what no graph does once, passes with drafts included."""
        super().warm_up()
        padding = Padding(self._num_slots, self._tables_SM.shape[1])
        for work in eager_passes(self._shapes, padding, self._max_model_len):
            self.run(work)

    @torch.inference_mode()
    def run(self, work: Work) -> Drawn | None:
        """Does all work in order, as `Executor.run` does."""
        if not isinstance(work, VerifyWork):
            return super().run(work)
        self._enter_device()
        self._prepare(work)
        assert work.words is not None
        if work.size is not None:
            return self._replayed(work.size, work.verify, self._upload.stage(work.words))
        shape = work.verify
        views = VerifyWords.of(self._upload.sent(work.words), shape)
        self._begin(views, shape)
        if shape.num_iterations == 1:
            return self._verify(views, shape, work.scored)
        drawn = [self._verify(views, shape)]
        views = views._replace(started_N3=views.started_N3[:0])
        drawn += [self._verify(views, shape) for _ in range(1, shape.num_iterations)]
        tokens = [one.tokens_IS for one in drawn if one is not None]
        accepted = [one.accepted_IS for one in drawn if one is not None and one.accepted_IS is not None]
        return Drawn(torch.cat(tokens), accepted_IS=torch.cat(accepted))

    def _replayed(self, size: PassSize, shape: VerifyShape, words: torch.Tensor) -> Drawn:
        """Replays the iterations of a pass; the drafter runs after each, if it is not in the graph."""
        assert self._pass_graphs is not None
        tokens, accepted = [], []
        for found, batch, states in self._pass_graphs.replay(size, shape, words):
            if batch is not None:
                views = VerifyWords.of(self._pass_graphs.words_of(shape), shape)
                num_blocks = -(-shape.max_context_len // self._cache.block_size)
                tables = self._tables_SM[views.slots_B.long(), :num_blocks]
                batch = replace(batch, block_tables_BM=tables, max_context_len=shape.max_context_len)
                self._draft(found, batch, states, views, shape)
            tokens.append(found.tokens_SD.T.clone())  # the next replay overwrites them
            accepted.append(found.accepted_S[None].clone())
        return Drawn(torch.cat(tokens), accepted_IS=torch.cat(accepted))

    def _run_words(self, words: torch.Tensor, shape: VerifyShape, drafts: bool) -> CompletedPass:
        """Runs a pass of words on the device, as a graph captures it, and drafts, too, if asked.

        The result keeps no more than is read: what it keeps no other graph can use for itself.
        """
        views = VerifyWords.of(words, shape)
        self._begin(views, shape)
        (found, batch, states), *_ = self._check(views, shape)
        assert batch is not None
        if drafts:
            self._draft(found, batch, states, views, shape)
        if drafts or self._drafter is None:
            return CompletedPass(found, None, None)
        without_tables = replace(batch, block_tables_BM=batch.block_tables_BM.new_empty(batch.num_rows, 0))
        return CompletedPass(found, without_tables, states)

    def _verify(
        self, views: VerifyWords, shape: VerifyShape, scored: ScoredRows | None = None
    ) -> Drawn | None:
        """Runs a pass, accepts draft tokens, and drafts those of the next pass."""
        (found, batch, states), drawn_R, logits_RV, scored_PH = self._check(views, shape, scored)
        assert batch is not None
        self._draft(found, batch, states, views, shape)
        if not shape.num_drawn:
            return self._with_scores(None, scored_PH, scored)
        logprobs = None
        if shape.num_logprobs >= 0:
            of_rows = logprobs_of(logits_RV, drawn_R, shape.num_logprobs)
            logprobs = Logprobs(*(part[found.rows_SD.T.flatten()] for part in of_rows))
        if shape.draw is Draw.penalised:
            self._count(found, views.drawn_slots_S.long())
        drawn = Drawn(found.tokens_SD.T.contiguous(), logprobs, found.accepted_S[None])
        return self._with_scores(drawn, scored_PH, scored)

    def _check(
        self, views: VerifyWords, shape: VerifyShape, scored: ScoredRows | None = None
    ) -> tuple[CompletedPass, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs a pass of the target, and accepts draft tokens.

        Returns tokens and logits of its verified rows, too, and the hidden states of its scored rows.
        """
        batch = self._batch(views, shape, scored)
        states, hidden_RH = self._target(batch)
        hidden_RH, scored_PH = hidden_RH.tensor_split([shape.num_verified])
        logits_RV = self._decoder.head(hidden_RH)
        drafts_T = batch.tokens_T
        if shape.is_padded:
            drafts_T = torch.where(views.tokens_T == NO_TOKEN, -1, drafts_T)
        drawn_R = self._draw_rows(logits_RV, batch, drafts_T, views, shape)
        parents = (
            None
            if self._tree is None
            else self._tree.parents[views.places_T[: shape.num_decode_tokens].long()]
        )
        found = verified(self._backend, drafts_T, drawn_R, views.starts_B, parents, shape)
        if self._tree is not None and shape.max_depth:
            self._compact(found, batch, shape)
        self._advance(found, views, shape)
        return CompletedPass(found, batch, states), drawn_R, logits_RV, scored_PH

    def _begin(self, views: VerifyWords, shape: VerifyShape) -> None:
        """Updates the block tables, and the slots that begin with known tokens."""
        if shape.num_updates:
            self._tables_SM.view(-1).index_copy_(0, views.places_U.long(), views.ids_U)
        if shape.num_started:
            slots, tokens, positions = views.started_N3.view(-1, 3).long().unbind(1)
            self._newest_S.index_copy_(0, slots, tokens)
            self._computed_S.index_copy_(0, slots, positions)

    def _batch(self, views: VerifyWords, shape: VerifyShape, scored: ScoredRows | None) -> Batch:
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
        kv_slots_T = self._kv_slots(slots_T, torch.cat([computed + rows, places_T[num_ours:]]))
        if shape.is_padded:
            kv_slots_T = torch.where(tokens_T == NO_TOKEN, -1, kv_slots_T)
        num_singles = num_decodes if num_ours == num_decodes else 0  # without drafts they are plain decodes
        max_blocks = -(-shape.max_context_len // self._cache.block_size)
        return Batch(
            tokens_T=torch.cat([tokens, tokens_T[num_ours:]]),
            positions_T=positions_T,
            slots_T=kv_slots_T,
            block_tables_BM=self._tables_SM[slots_B, :max_blocks],
            chunk_starts=views.starts_B[num_singles:] - num_singles,
            context_lens_B=torch.cat([contexts, lengths_B[num_decodes:]]).int(),
            sampled_rows_S=self._and_scored(views.rows_R.long(), scored),
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

    def _target(self, batch: Batch) -> tuple[States | None, torch.Tensor]:
        """Computes the target's final hidden states of the sampled rows, and those that a drafter reads."""
        drafter = self._drafter
        if drafter is None or not drafter.wants_states:
            return None, self._sampled_states(batch)
        if self._piecewise is not None and not drafter.taps and self._piecewise.fit(batch):
            states = States(self._piecewise.states(batch).clone(), ())  # the next step overwrites them
        else:
            states = self._decoder.states(batch, self._cache, taps=drafter.taps)
        return states, states.hidden_TH[batch.sampled_rows_S]

    def _draw_rows(
        self,
        logits_RV: torch.Tensor,
        batch: Batch,
        drafts_T: torch.Tensor,
        views: VerifyWords,
        shape: VerifyShape,
    ) -> torch.Tensor:
        """Draws a token at every verified row, with the random number of its position."""
        if shape.draw is Draw.greedy:
            return self._backend.greedy(logits_RV)
        settings = RowSettings.of(views.sampling_SW).of_rows(views.sequences_R.long())
        positions_R = batch.positions_T[views.rows_R.long()] + 1
        sampling, penalties = settings.sampling(positions_R), None
        if shape.draw is Draw.penalised:
            counts_RV = self._row_counts(batch, views, shape)
            slots_R = views.slots_T.long()[views.rows_R.long()]
            logits_RV = self._allowed(logits_RV, slots_R, positions_R)
            penalties = settings.penalties(counts_RV, torch.arange(len(logits_RV), device=self.device))
        drafts = None if self._probs_SKV is None else drawn_drafts(self._probs_SKV, drafts_T, views, shape)
        return self._backend.sample(logits_RV, sampling, penalties, drafts=drafts)

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
        if shape.is_padded:
            after = torch.where(decodes == self._num_slots, 0, after)  # the padding slot never has tokens
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
        found: Verified,
        batch: Batch,
        states: States | None,
        views: VerifyWords,
        shape: VerifyShape,
    ) -> None:
        """Shows the drafter, if there is one, the pass, and has it draft for the next one."""
        if self._drafter is None:
            return
        try:
            self._draft_with(self._drafter, found, batch, states, views, shape)
        except Exception as error:  # the engine ends the requests of a launch that fails so
            what = f"{type(self._drafter).__name__} raised {type(error).__name__}: {error}"
            raise RuntimeError(f"the drafter has failed: {what}") from error

    def _draft_with(
        self,
        drafter: Drafter,
        found: Verified,
        batch: Batch,
        states: States | None,
        views: VerifyWords,
        shape: VerifyShape,
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
        tokens_NK, probs_NKV = drafter.draft(passed, start, shape.num_levels)
        num_tokens = tokens_NK.shape[1]
        self._drafts_SK[:, :num_tokens].index_copy_(0, slots_S, tokens_NK)
        if self._probs_SKV is None:
            return
        if probs_NKV is None:  # the likeliest tokens: all sequences are greedy
            probs_NKV = torch.zeros(*tokens_NK.shape, self._probs_SKV.shape[2], device=self.device)
            probs_NKV.scatter_(2, tokens_NK[:, :, None], 1.0)
        self._probs_SKV[:, :num_tokens].index_copy_(0, slots_S, probs_NKV)


def _count_valid(
    counts_RV: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, is_valid: torch.Tensor
) -> None:
    """Counts tokens, each in its own row, where is_valid."""
    counts_RV.index_put_((rows, tokens), is_valid.to(counts_RV.dtype), accumulate=True)
