"""Executes a step's work on one device: the model, its KV cache, and per-slot arrays that mirror the host's.

Every tensor-parallel rank has an executor, gets the same work and draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.lora import Segments
from kernels.sampling import count_tokens
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder, States
from realengine.model.kv_cache import KvCache
from realengine.model.lora import AdapterBank, num_decode_segments
from realengine.model.quantization import Weights
from realengine.progress import QUIET, Progress
from realengine.runner.batch import Batch, Upload
from realengine.runner.expert_balance import ExpertBalance
from realengine.runner.graphs import Computed, Drawn, Finished, Graphs
from realengine.runner.host_kv import HostKv
from realengine.runner.kept_tokens import KeptTokens
from realengine.runner.packing import num_pass_segments, pack_decode, pack_uniform
from realengine.runner.piecewise import PiecewiseGraphs
from realengine.runner.sampler import Sampler, logprobs_of, with_prompt_logprobs
from realengine.runner.warm_up import eager_passes, warm_up_works
from realengine.runner.work import (
    NO_TOKEN,
    ON_DEVICE,
    DecodeWords,
    Draw,
    Padding,
    RowSettings,
    ScoredRows,
    Shape,
    StepSize,
    StepWords,
    Views,
    Work,
    views_of,
)
from realengine.speculation.verifier import DeviceDrafts, Verifier, without_tables

LEAST_SCORED, MOST_SCORED = 16, 256
"""Bounds of the rows of logits of prompts that exist at once; between them as many as sequences may draw."""


class DeviceLostError(RuntimeError):
    """The content of the device or of other ranks is unknown, so nothing can be computed."""


class Executor:
    """Executes work on one device: a step's rows are computed, drawn from and, with drafts, verified.

    num_slots: maximum number of sequences with KV at once; one more row is for padding. graph_sizes: numbers
    of sequences of the decode steps that are captured as CUDA graphs. piece_sizes: numbers of tokens of the
    other steps whose pieces are captured. window: the KV that decoding sequences keep; None: all. drafts: how
    the engine speculates; None: it does not. balance: of an expert-parallel rank.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        backend: Backend,
        *,
        num_slots: int,
        max_model_len: int,
        host_kv: HostKv | None = None,
        adapters: AdapterBank | None = None,
        graph_sizes: SequenceOf[int] = (),
        piece_sizes: SequenceOf[int] = (),
        window: KeptTokens | None = None,
        drafts: DeviceDrafts | None = None,
        balance: ExpertBalance | None = None,
    ) -> None:
        self.device = decoder.device
        self._decoder = decoder
        self._cache = cache
        self._backend = backend
        self._host_kv = host_kv
        self.adapters = adapters
        self._num_slots = num_slots
        self.window = window
        self.balance = balance
        self._max_model_len = max_model_len
        max_blocks = -(-max_model_len // cache.block_size)
        self._padding = Padding(num_slots, max_blocks)
        self._tables_SM = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=self.device)
        self._newest_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        self._no_chunks = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._upload = Upload(self.device)
        vocab_size = decoder.architecture.vocab_size
        self._sampler = Sampler(
            backend, self._upload, self.device, num_slots=num_slots, vocab_size=vocab_size
        )
        self._verifier: Verifier | None = None
        if drafts is not None:
            shared = self._sampler, self._tables_SM, self._newest_S
            self._verifier = Verifier(drafts, cache, backend, *shared, vocab_size)
        self.weights: Weights | None = None
        """Weights of the decoder as they were loaded, if the engine may sleep."""
        self.start_s: dict[str, float] = {}
        """Seconds of each part of the start, by what its bar says."""
        self._piece_sizes = piece_sizes
        self._piecewise: PiecewiseGraphs | None = None
        self.graphs: Graphs | None = None
        if graph_sizes:
            if self._verifier is None:
                sizes = [StepSize(num) for num in graph_sizes]
                size = max(graph_sizes), decoder.architecture.hidden_size
                self._states_BH = torch.zeros(size, dtype=decoder.dtype, device=self.device)
            else:
                sizes = self._verifier.graph_sizes(graph_sizes, max_model_len)
            self.graphs = Graphs(self, sizes, has_adapters=adapters is not None, device=self.device)

    @torch.inference_mode()
    def run(self, work: Work) -> Drawn | None:
        """Does all work in order, asynchronously on a GPU.

        Returns None if no token is drawn, or by a later stage of a pipeline.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own current device
        self._prepare(work)
        if self._decoder.exchange is not None:
            self._decoder.exchange.rank_tokens = work.rank_tokens
        if work.shape is None:
            return None
        assert work.words is not None
        if work.size is not None:
            done = self._replayed(work.shape, work.size, work.words)
        else:
            done = self._eager(work.shape, work.words, work.scored)
        if self.window is not None and not work.shape.is_decode:
            self.window.end(work.cuts, self._cache, self._tables_SM)
        if self.balance is not None:
            self.balance.stepped()
        drawn = [each for each in done if each is not None]
        if len(drawn) <= 1:
            return drawn[0] if drawn else None
        accepted = [each.accepted_IS for each in drawn if each.accepted_IS is not None]
        return Drawn(
            torch.cat([each.tokens_IS for each in drawn]),
            drawn[-1].logprobs,
            torch.cat(accepted) if accepted else None,
        )

    def _eager(self, shape: Shape, words: NDArray[np.int32], scored: ScoredRows | None) -> list[Drawn | None]:
        """Runs the iterations of a step."""
        views = views_of(self._upload.sent(words), shape)
        self._begin(views)
        done = []
        for _ in range(shape.num_iterations):
            computed = self._compute(views, shape, scored)
            if computed is not None:
                done.append(self._finish(computed, views, shape, scored).drawn)
        return done

    def _replayed(self, shape: Shape, size: StepSize, words: NDArray[np.int32]) -> list[Drawn | None]:
        """Replays the iterations of a step; what its graphs do not hold runs after them."""
        graphs, has_adapters = self.graphs, shape.num_segments > 0
        assert graphs is not None
        views = views_of(graphs.load(self._upload.stage(words)), shape)
        forward, finish = graphs.forward(size, has_adapters=has_adapters), None
        if shape.draw is not Draw.penalised and shape.num_logprobs < 0:
            finish = graphs.finish(size, shape.draw, has_adapters=has_adapters)
        done: list[Drawn | None] = []
        for _ in range(shape.num_iterations):
            forward.replay()
            if finish is None:
                done.append(self._finish(forward.result, views, shape).drawn)
                continue
            finish.replay()
            drawn, found = finish.result
            assert drawn is not None
            if found is not None:
                assert self._verifier is not None
                assert isinstance(views, StepWords)
                self._verifier.draft(found, forward.result, views, shape)
            accepted_IS = None if drawn.accepted_IS is None else drawn.accepted_IS.clone()
            done.append(Drawn(drawn.tokens_IS.clone(), accepted_IS=accepted_IS))  # the next replay overwrites
        return done

    def forward(self, words: torch.Tensor, shape: Shape) -> Computed:
        """Computes the hidden states of a step's rows, as a graph captures it.

        The result keeps no more than is read.
        """
        views = views_of(words, shape)
        self._begin(views)
        computed = self._compute(views, shape)
        assert computed is not None
        if self._verifier is None:
            return Computed(self._states_BH[: shape.num_rows].copy_(computed.hidden_RH))
        assert computed.batch is not None
        return computed._replace(batch=without_tables(computed.batch))

    def finish(self, computed: Computed, words: torch.Tensor, shape: Shape) -> Finished:
        """Draws the tokens of a step, as a graph captures it; drafts, too, if graphs hold that."""
        is_whole = self._verifier is None or self._verifier.drafts_in_graph
        return self._finish(computed, views_of(words, shape), shape, drafts=is_whole)

    def padded(self, size: StepSize, draw: Draw, *, has_adapters: bool) -> tuple[Shape, NDArray[np.int32]]:
        """Returns the captured shape of a step, for any contexts and adapters, and words of padding."""
        num_segments, bank = 0, self.adapters if has_adapters else None
        if self._verifier is not None:
            if bank is not None:
                num_segments = num_pass_segments(size, bank)
            return pack_uniform(
                size,
                self._max_model_len,
                draw,
                self._padding,
                token=NO_TOKEN,
                has_tree=not self._verifier.shapes.is_chain,
                num_segments=num_segments,
            )
        if bank is not None:
            num_segments = num_decode_segments(size.num_seqs, bank.max_loras)
        slots, contexts = np.full(size.num_seqs, self._padding.slot), np.ones(size.num_seqs, np.int64)
        segments = np.zeros(2 * num_segments + bool(num_segments), np.int32)
        place = self._padding.place
        return pack_decode(slots, contexts, self._max_model_len, draw=draw, place=place, segments=segments)

    def release(self) -> None:
        """Lets go of model, KV and graphs, so that their memory is free; the executor is of no use any more.

        Graphs refer to the executor, too, which would keep all of it until a garbage collection.
        """
        vars(self).clear()

    def warm_up(self) -> None:
        """Launches what no graph does once, on block 0; kernels are compiled at their first launch."""
        for work in warm_up_works(self._num_slots, self._max_model_len):
            self.run(work)
        self._sampler.warm_up(self._decoder.dtype)
        if self._host_kv is not None:
            self._host_kv.warm_up()
        if self._verifier is not None:
            for work in eager_passes(self._verifier.shapes, self._padding, self._max_model_len):
                self.run(work)

    def capture(self, progress: Progress = QUIET) -> None:
        """Captures all graphs before serving starts."""
        if self.graphs is not None:
            self.graphs.capture(progress)
        if self._piece_sizes and self._decoder.queries_shape is not None:
            piecewise = PiecewiseGraphs(self._decoder, self._cache, self._piece_sizes)
            piecewise.capture(progress)
            self._piecewise = piecewise

    def _prepare(self, work: Work) -> None:
        for is_store, pairs in work.moves:
            assert self._host_kv is not None
            (self._host_kv.store if is_store else self._host_kv.load)(pairs)
        for name, slot in work.adapters:
            assert self.adapters is not None
            self.adapters.put(name, slot)
        if work.copies is not None:
            copies = self._upload.copied(work.copies)
            for caches in self._cache.cache_sets:
                self._backend.copy_blocks(caches, copies)
        if work.table_updates is not None:
            updates = self._upload.copied(work.table_updates)
            self._tables_SM.view(-1).index_copy_(0, updates[:, 0].long(), updates[:, 1])
        self._sampler.prepare(work)
        if self.window is not None:
            self.window.begin(work.cuts)

    def _begin(self, views: Views) -> None:
        """Writes the changed blocks of a step into the tables."""
        if len(views.places_U):
            self._tables_SM.view(-1).index_copy_(0, views.places_U.long(), views.ids_U)
        if self._verifier is not None and isinstance(views, StepWords):
            self._verifier.begin(views)

    def _compute(self, views: Views, shape: Shape, scored: ScoredRows | None = None) -> Computed | None:
        """Computes the final hidden states of a step's rows, in pieces if they are captured.

        None: they are computed by the last stage of a pipeline, which is another one.
        """
        if isinstance(views, DecodeWords):
            batch = self._decode_batch(views, shape)
        else:
            batch = self._batch(views, shape, scored)
        verifier, piecewise = self._verifier, self._piecewise
        if piecewise is not None and not piecewise.fit(batch):
            piecewise = None
        if verifier is not None and verifier.wants_states and shape.drafts is not None:
            if piecewise is not None and not verifier.taps:
                states = States(piecewise.states(batch).clone(), ())  # the next step overwrites them
            else:
                states = self._decoder.states(batch, self._cache, taps=verifier.taps)
            return Computed(states.hidden_TH[batch.sampled_rows_S], batch, states)
        if piecewise is None:
            found_RH = self._decoder.sampled_states(batch, self._cache)
            return None if found_RH is None else Computed(found_RH, batch)
        states_TH = piecewise.states(batch)
        rows_S = batch.sampled_rows_S
        return Computed(states_TH if rows_S is None else states_TH[rows_S], batch)

    def _decode_batch(self, views: DecodeWords, shape: Shape) -> Batch:
        """Returns the rows of a decode iteration."""
        slots_B, positions_B = views.slots_B.long(), (views.contexts_B - 1).long()
        places_B, contexts_B = self._kept(positions_B, views.contexts_B, slots_B)
        block_size = self._cache.block_size
        tables_BM = self._tables_SM[slots_B, : -(-shape.max_context_len // block_size)]
        ids_B = tables_BM.gather(1, (places_B // block_size)[:, None])[:, 0].long()
        kv_slots_B = ids_B * block_size + places_B % block_size
        return Batch(
            tokens_T=torch.where(views.tokens_B >= 0, views.tokens_B.long(), self._newest_S[slots_B]),
            positions_T=positions_B,
            slots_T=torch.where(slots_B < self._num_slots, kv_slots_B, -1),
            block_tables_BM=tables_BM,
            chunk_starts=self._no_chunks,
            context_lens_B=contexts_B,
            sampled_rows_S=None,
            num_decodes=shape.num_rows,
            max_query_len=0,
            max_context_len=shape.max_context_len,
            adapters=self._segments(views, is_decode=True),
        )

    def _batch(self, views: StepWords, shape: Shape, scored: ScoredRows | None) -> Batch:
        """Returns the rows of any other step."""
        slots_T, tree = views.slots_T.long(), None
        if self._verifier is None or shape.drafts is None:
            positions_T = views.places_T.long()
            places_T, contexts_B = self._kept(positions_T, views.contexts_B, slots_T, shape.num_decodes)
            tokens_T = torch.where(views.tokens_T >= 0, views.tokens_T.long(), self._newest_S[slots_T])
        else:
            tokens_T, positions_T, places_T, contexts_B, tree = self._verifier.inputs(views, shape)
        block_size = self._cache.block_size
        ids_T = self._tables_SM[slots_T, places_T // block_size].long()
        kv_slots_T = ids_T * block_size + places_T % block_size
        if shape.drafts is not None and shape.drafts.is_padded:
            kv_slots_T = torch.where(views.tokens_T == NO_TOKEN, -1, kv_slots_T)
        return Batch(
            tokens_T=tokens_T,
            positions_T=positions_T,
            slots_T=kv_slots_T,
            block_tables_BM=self._tables_SM[views.slots_B.long(), : -(-shape.max_context_len // block_size)],
            chunk_starts=views.chunk_starts,
            context_lens_B=contexts_B,
            sampled_rows_S=self._and_scored(views.drawn_R.long(), scored),
            num_decodes=shape.num_singles,
            max_query_len=shape.max_query_len,
            max_context_len=shape.max_context_len,
            adapters=self._segments(views, is_decode=False),
            tree=tree,
        )

    def _finish(
        self,
        computed: Computed,
        views: Views,
        shape: Shape,
        scored: ScoredRows | None = None,
        *,
        drafts: bool = True,
    ) -> Finished:
        """Draws the tokens of a step and verifies its drafts. drafts: whether to draft for the next step."""
        hidden_RH = computed.hidden_RH
        if scored is not None:
            hidden_RH, scored_PH = hidden_RH.tensor_split([shape.num_drawn_rows])
        if self._verifier is not None and isinstance(views, StepWords) and shape.drafts is not None:
            drawn, found = self._verifier.verify(self._decoder.head(hidden_RH), computed, views, shape)
            if not drafts:
                return Finished(drawn, found)
            self._verifier.draft(found, computed, views, shape)
        else:
            drawn = self._drawn(self._decoder.head(hidden_RH), views, shape) if shape.num_drawn else None
        return Finished(drawn if scored is None else self._with_scores(drawn, scored_PH, scored))

    def _drawn(self, logits_SV: torch.Tensor, views: Views, shape: Shape) -> Drawn:
        """Draws a token for each sequence that draws; a decode step's words become the next input."""
        if isinstance(views, DecodeWords):
            slots_S, positions_S = views.slots_B.long(), views.contexts_B.long()
        else:
            slots_S = views.drawn_slots_S.long()
            positions_S = views.places_T.long()[views.drawn_R.long()] + 1
        settings = None if shape.draw is Draw.greedy else RowSettings.of(views.sampling_SW)
        tokens_S = self._sampler.draw(logits_SV, shape.draw, settings, slots_S, positions_S)
        if shape.draw is Draw.penalised:
            count_tokens(self._sampler.counts(), slots_S, tokens_S)
        self._newest_S.index_copy_(0, slots_S, tokens_S)
        logprobs = None
        if shape.num_logprobs >= 0:
            logprobs = logprobs_of(logits_SV, tokens_S, shape.num_logprobs)
        if isinstance(views, DecodeWords):
            views.contexts_B.add_(1)
            views.tokens_B.fill_(ON_DEVICE)
        return Drawn(tokens_S[None], logprobs)

    def _and_scored(self, rows_S: torch.Tensor, scored: ScoredRows | None) -> torch.Tensor:
        """Returns the sampled rows and, after them, those whose next token is scored."""
        if scored is None:
            return rows_S
        return torch.cat([rows_S, self._upload.copied(scored.rows_P).long()])

    def _with_scores(self, drawn: Drawn | None, states_PH: torch.Tensor, scored: ScoredRows) -> Drawn:
        """Returns what was drawn, with the log-probabilities of the scored tokens."""
        tokens_P = self._upload.copied(scored.tokens_P).long()
        max_rows = min(max(self._num_slots, LEAST_SCORED), MOST_SCORED)
        return with_prompt_logprobs(drawn, states_PH, tokens_P, scored.num_top, self._decoder.head, max_rows)

    def _kept(
        self,
        positions_T: torch.Tensor,
        contexts_B: torch.Tensor,
        slots_T: torch.Tensor,
        num_decodes: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the places of tokens in the cache, and the tokens with KV of each row.

        num_decodes: number of first rows, of one token each, that decode; None: all.
        """
        if self.window is None or num_decodes == 0:
            return positions_T, contexts_B
        places_T = self.window.places(positions_T[:num_decodes], slots_T[:num_decodes])
        kept_B = self.window.contexts(contexts_B[:num_decodes], slots_T[:num_decodes])
        if num_decodes is None:
            return places_T, kept_B
        return torch.cat([places_T, positions_T[num_decodes:]]), torch.cat([kept_B, contexts_B[num_decodes:]])

    def _segments(self, views: Views, *, is_decode: bool) -> Segments | None:
        if not len(views.segment_slots):
            return None
        assert self.adapters is not None
        most = self.adapters.max_segment_tokens(is_decode)
        return Segments(views.segment_starts, views.segment_slots, most)
