"""Executes a step's work on one device: the model, its KV cache, and per-slot arrays that mirror the host's.

Every tensor-parallel rank has an executor, gets the same work and draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from kernels.lora import Segments
from kernels.sampling import count_tokens, mark_prompt
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.model.lora import AdapterBank
from realengine.model.quantization import Weights
from realengine.progress import QUIET, Progress
from realengine.runner.batch import Batch
from realengine.runner.graphs import DecodeGraphs, Drawn, Graphs
from realengine.runner.host_kv import HostKv
from realengine.runner.kept_tokens import KeptTokens
from realengine.runner.logprobs import logprobs_of, with_prompt_logprobs
from realengine.runner.piecewise import PiecewiseGraphs
from realengine.runner.token_masks import AllowedTokens, Biases, SlotBiases
from realengine.runner.upload import Upload
from realengine.runner.warm_up import warm_up_works
from realengine.runner.work import (
    ON_DEVICE,
    SAMPLING,
    DecodeWords,
    Draw,
    MixedWords,
    Padding,
    PenaltyInit,
    RowSettings,
    ScoredRows,
    Shape,
    Work,
    pack_sampling,
)

LEAST_SCORED, MOST_SCORED = 16, 256
"""Bounds of the rows of logits of prompts that exist at once; between them as many as sequences may draw."""


class DeviceLostError(RuntimeError):
    """The content of the device or of other ranks is unknown, so nothing can be computed."""


class Executor:
    """Executes work on one device.

    num_slots: maximum number of sequences with KV at once; one more row is for padding. graph_sizes: numbers
    of rows of the decode steps that are captured as CUDA graphs. piece_sizes: numbers of tokens of the other
    steps whose pieces are captured. window: the KV that decoding sequences keep; None: all.
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
    ) -> None:
        self.device = decoder.device
        self._decoder = decoder
        self._cache = cache
        self._backend = backend
        self._host_kv = host_kv
        self.adapters = adapters
        self._num_slots = num_slots
        self.window = window
        self._max_model_len = max_model_len
        max_blocks = -(-max_model_len // cache.block_size)
        self._tables_SM = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=self.device)
        self._newest_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        self._no_chunks = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._counts_SV: torch.Tensor | None = None  # token counts for penalties; allocated on first use
        self._biases: Biases | None = None  # None: no request had any
        self._allowed_now: AllowedTokens | None = None  # of the present step
        self._upload = Upload(self.device)
        self.weights: Weights | None = None
        """Weights of the decoder as they were loaded, if the engine may sleep."""
        self.start_s: dict[str, float] = {}
        """Seconds of each part of the start, by what its bar says."""
        self._piece_sizes = piece_sizes
        self._piecewise: PiecewiseGraphs | None = None
        self.graphs: Graphs | None = None
        self.decode_graphs: DecodeGraphs | None = None
        if graph_sizes:
            padding = Padding(num_slots, max_blocks)
            max_loras = 0 if adapters is None else adapters.max_loras
            hidden_size = decoder.architecture.hidden_size
            states_BH = torch.zeros(max(graph_sizes), hidden_size, dtype=decoder.dtype, device=self.device)
            self.graphs = self.decode_graphs = DecodeGraphs(
                self._forward, self._finish, states_BH, graph_sizes, padding, max_model_len, max_loras
            )

    @torch.inference_mode()
    def run(self, work: Work) -> Drawn | None:
        """Does all work in order, asynchronously on a GPU; returns None if no token is drawn."""
        self._enter_device()
        self._prepare(work)
        shape = work.shape
        if shape is None:
            return None
        assert work.words is not None
        if self.decode_graphs is not None and self.decode_graphs.fit(shape):
            return self.decode_graphs.run(shape, self._upload.stage(work.words))
        words = self._upload.sent(work.words)
        if not shape.is_decode:
            mixed = self._mixed(words, shape, work.scored)
            if self.window is not None:
                self.window.end(work.cuts, self._cache, self._tables_SM)
            return mixed
        drawn = [self._decode(words, shape) for _ in range(shape.num_iterations)]
        if len(drawn) == 1:
            return drawn[0]
        return Drawn(torch.cat([one.tokens_IS for one in drawn]), drawn[-1].logprobs)

    def _enter_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own current device

    def release(self) -> None:
        """Lets go of model, KV and graphs, so that their memory is free; the executor is of no use any more.

        Graphs refer to the executor, too, which would keep all of it until a garbage collection.
        """
        vars(self).clear()

    def warm_up(self) -> None:
        """Launches what no graph does once, on block 0; kernels are compiled at their first launch."""
        for work in warm_up_works(self._num_slots, self._max_model_len):
            self.run(work)
        self._warm_up_penalties()
        if self._host_kv is not None:
            self._host_kv.warm_up()

    @torch.inference_mode()
    def _warm_up_penalties(self) -> None:
        """Draws a token with penalties, whose counts are those of one row."""
        words = self._upload.copied(pack_sampling(np.zeros(1, SAMPLING)))
        settings, row_S = RowSettings.of(words), torch.zeros(1, dtype=torch.int64, device=self.device)
        vocab_size = self._decoder.architecture.vocab_size
        counts_SV = torch.zeros(1, vocab_size, dtype=torch.int32, device=self.device)
        logits_SV = torch.zeros(1, vocab_size, dtype=self._decoder.dtype, device=self.device)
        self._backend.sample(logits_SV, settings.sampling(row_S), settings.penalties(counts_SV, row_S))

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
        for init in work.penalty_inits:
            self._init_penalties(init)
        for changed in work.biases:
            self._set_biases(changed)
        self._allowed_now = work.allowed
        if self.window is not None:
            self.window.begin(work.cuts)

    def _decode(self, words: torch.Tensor, shape: Shape) -> Drawn:
        """Runs one decode iteration, and writes the input of the next one into its words."""
        return self._finish(self._sampled_states(self._decode_batch(words, shape)), words, shape)

    def _forward(self, words: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Computes the final hidden states [B, H] of a decode iteration."""
        return self._decoder.sampled_states(self._decode_batch(words, shape), self._cache)

    def _sampled_states(self, batch: Batch) -> torch.Tensor:
        """Computes the final hidden states [S, H] of the sampled rows, in pieces if they are captured."""
        if self._piecewise is None or not self._piecewise.fit(batch):
            return self._decoder.sampled_states(batch, self._cache)
        states_TH = self._piecewise.states(batch)
        return states_TH if batch.sampled_rows_S is None else states_TH[batch.sampled_rows_S]

    def _decode_batch(self, words: torch.Tensor, shape: Shape) -> Batch:
        """Returns the rows of a decode iteration, whose blocks it writes into the tables."""
        views = DecodeWords.of(words, shape)
        self._tables_SM.view(-1).index_copy_(0, views.places_B.long(), views.ids_B)
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
            adapters=self._segments(views.segment_starts, views.segment_slots, is_decode=True),
        )

    def _finish(self, states_BH: torch.Tensor, words: torch.Tensor, shape: Shape) -> Drawn:
        """Draws the tokens of a decode iteration, and writes the input of the next one into its words."""
        views = DecodeWords.of(words, shape)
        logits_BV, slots_B = self._decoder.head(states_BH), views.slots_B.long()
        drawn = self._draw(logits_BV, shape, views.sampling_BW, slots_B, views.contexts_B.long())
        views.contexts_B.add_(1)
        views.tokens_B.fill_(ON_DEVICE)
        return drawn

    def _mixed(self, words: torch.Tensor, shape: Shape, scored: ScoredRows | None) -> Drawn | None:
        views = MixedWords.of(words, shape)
        if shape.num_updates:
            self._tables_SM.view(-1).index_copy_(0, views.places_U.long(), views.ids_U)
        block_size = self._cache.block_size
        slots_T, positions_T = views.slots_T.long(), views.positions_T.long()
        places_T, contexts_B = self._kept(positions_T, views.contexts_B, slots_T, shape.num_decodes)
        ids_T = self._tables_SM[slots_T, places_T // block_size].long()
        rows_S = views.drawn_S.long()
        batch = Batch(
            tokens_T=torch.where(views.tokens_T >= 0, views.tokens_T.long(), self._newest_S[slots_T]),
            positions_T=positions_T,
            slots_T=ids_T * block_size + places_T % block_size,
            block_tables_BM=self._tables_SM[views.slots_B.long(), : -(-shape.max_context_len // block_size)],
            chunk_starts=views.chunk_starts,
            context_lens_B=contexts_B,
            sampled_rows_S=self._and_scored(rows_S, scored),
            num_decodes=shape.num_decodes,
            max_query_len=shape.max_query_len,
            max_context_len=shape.max_context_len,
            adapters=self._segments(views.segment_starts, views.segment_slots, is_decode=False),
        )
        states_SH = self._sampled_states(batch)
        drawn, num_drawn = None, shape.num_drawn
        if num_drawn:
            logits_SV = self._decoder.head(states_SH[:num_drawn])
            slots_S = views.drawn_slots_S.long()
            drawn = self._draw(logits_SV, shape, views.sampling_SW, slots_S, positions_T[rows_S] + 1)
        return self._with_scores(drawn, states_SH[num_drawn:], scored)

    def _and_scored(self, rows_S: torch.Tensor, scored: ScoredRows | None) -> torch.Tensor:
        """Returns the sampled rows and, after them, those whose next token is scored."""
        if scored is None:
            return rows_S
        return torch.cat([rows_S, self._upload.copied(scored.rows_P).long()])

    def _with_scores(
        self, drawn: Drawn | None, states_PH: torch.Tensor, scored: ScoredRows | None
    ) -> Drawn | None:
        """Returns what was drawn, with the log-probabilities of the scored tokens, if there are any."""
        if scored is None:
            return drawn
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

    def _segments(self, starts: torch.Tensor, slots: torch.Tensor, *, is_decode: bool) -> Segments | None:
        if not len(slots):
            return None
        assert self.adapters is not None
        return Segments(starts, slots, self.adapters.max_segment_tokens(is_decode))

    def _draw(
        self,
        logits_SV: torch.Tensor,
        shape: Shape,
        sampling_words: torch.Tensor,
        slots_S: torch.Tensor,
        positions_S: torch.Tensor,
    ) -> Drawn:
        """Draws a token for each row of logits, with the settings of its request."""
        if shape.draw is Draw.greedy:
            tokens_S = self._backend.greedy(logits_SV)
        else:
            settings = RowSettings.of(sampling_words)
            sampling, penalties, allowed_SV = settings.sampling(positions_S), None, logits_SV
            if shape.draw is Draw.penalised:
                penalties = settings.penalties(self._counts(), slots_S)
                allowed_SV = self._allowed(logits_SV, slots_S, positions_S)
            tokens_S = self._backend.sample(allowed_SV, sampling, penalties)
            if penalties is not None:
                count_tokens(penalties.counts, slots_S, tokens_S)
        self._newest_S.index_copy_(0, slots_S, tokens_S)
        logprobs = None
        if shape.num_logprobs >= 0:
            logprobs = logprobs_of(logits_SV, tokens_S, shape.num_logprobs)
        return Drawn(tokens_S[None], logprobs)

    def _init_penalties(self, init: PenaltyInit) -> None:
        """Initialises the token counts of a sequence with penalties in its slot."""
        counts_SV = self._counts()
        tokens = self._upload.copied(init.tokens).long()
        mark_prompt(counts_SV, init.slot, tokens[: init.num_prompt])
        drawn = tokens[init.num_prompt :]
        count_tokens(counts_SV, torch.full_like(drawn, init.slot), drawn)

    def _set_biases(self, changed: SlotBiases) -> None:
        if self._biases is None:
            self._biases = Biases(self._num_slots + 1, self.device)
        self._biases.set(changed)

    def _allowed(
        self, logits_SV: torch.Tensor, slots_S: torch.Tensor, positions_S: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits with the biases of these positions, without the tokens that are not allowed."""
        if self._biases is not None:
            logits_SV = self._biases.added(logits_SV, slots_S, positions_S)
        return logits_SV if self._allowed_now is None else self._allowed_now.masked(logits_SV)

    def _counts(self) -> torch.Tensor:
        if self._counts_SV is None:
            size = (self._num_slots + 1, self._decoder.architecture.vocab_size)
            self._counts_SV = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self._counts_SV
