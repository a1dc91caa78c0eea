"""Runs a step plan on the model: from the engine's decisions to tensors, and back to tokens."""

from __future__ import annotations

import numpy as np
import torch

from kernels.sampling import Penalties, Sampling, count_tokens, mark_prompt
from policies.engine import EngineCore
from policies.plan import StepPlan
from policies.sequence import Sequence
from realengine.backend import Backend
from realengine.batch import Batch
from realengine.model import Decoder, KvCache
from realengine.sampling_params import SamplingParams


class Runner:
    """One model, its KV cache, and by slot the tokens and block tables of what runs.

    A sequence's tokens are written when it gets a slot (`enter`); after that each step adds what it drew.
    """

    def __init__(
        self, decoder: Decoder, cache: KvCache, backend: Backend, core: EngineCore, seed: int = 0
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._backend = backend
        self._core = core
        self._seed = seed
        max_blocks = -(-core.max_model_len // cache.block_size)
        self._tokens_SL = np.zeros((core.max_num_seqs, core.max_model_len + 1), np.int64)
        self._tables_SM = np.zeros((core.max_num_seqs, max_blocks), np.int32)
        self._num_ids_S = np.zeros(core.max_num_seqs, np.int64)
        self._counts_SV: torch.Tensor | None = None  # for penalties; made when somebody asks for any
        self._params: dict[int, SamplingParams] = {}

    def enter(self, seq: Sequence, tokens: list[int], params: SamplingParams) -> None:
        """A sequence has got its slot: tokens are its prompt and what it has produced before."""
        slot = _slot(seq)
        self._tokens_SL[slot, : len(tokens)] = tokens
        self._num_ids_S[slot] = 0
        self._params[seq.request_id] = params
        if params.has_penalties:
            counts = self._counts()
            num_prompt = seq.num_prompt_tokens
            mark_prompt(counts, slot, torch.tensor(tokens[:num_prompt], device=counts.device))
            for token in tokens[num_prompt:]:
                counts[slot, token] += 1

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        self._params.pop(request_id, None)

    def run(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Compute one iteration of a plan; the new token of each sequence that gets one."""
        served = [(seq, seq.num_computed, 1, True) for seq in plan.decodes]
        served += [(chunk.seq, chunk.num_cached, chunk.num_tokens, chunk.completes) for chunk in plan.chunks]
        batch = self._batch(served, plan.num_decodes)
        logits = self._decoder.logits(batch, self._cache)
        drawing = [seq for seq, _, _, completes in served if completes]
        if not drawing:
            return []
        tokens = self._draw(logits, drawing)
        drawn = list(zip(drawing, tokens.tolist(), strict=True))
        for seq, token in drawn:
            self._tokens_SL[_slot(seq), seq.num_known] = token
        return drawn

    def _batch(self, served: list[tuple[Sequence, int, int, bool]], num_decodes: int) -> Batch:
        """The step's tensors: for each sequence its tokens from num_cached on."""
        tokens, positions, kv_slots, lengths = [], [], [], []
        rows = np.array([_slot(seq) for seq, _, _, _ in served])
        block_size = self._cache.block_size
        for (seq, first, num_tokens, _), row in zip(served, rows.tolist(), strict=True):
            end = first + num_tokens
            self._update_table(seq, row, end)
            places = np.arange(first, end)
            tokens.append(self._tokens_SL[row, first:end])
            positions.append(places)
            kv_slots.append(
                self._tables_SM[row, places // block_size].astype(np.int64) * block_size + places % block_size
            )
            lengths.append((num_tokens, end))
        counts, ends = np.array(lengths).T
        starts = np.concatenate([[0], np.cumsum(counts)])
        completes = np.array([completes for _, _, _, completes in served])
        max_context_len = int(ends.max())
        tables = self._tables_SM[rows, : -(-max_context_len // block_size)]
        device = self._decoder.device

        def on_device(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

        return Batch(
            tokens_T=on_device(np.concatenate(tokens), torch.int64),
            positions_T=on_device(np.concatenate(positions), torch.int64),
            slots_T=on_device(np.concatenate(kv_slots), torch.int64),
            block_tables_BM=on_device(tables, torch.int32),
            query_start_loc=on_device(starts, torch.int32),
            context_lens_B=on_device(ends, torch.int32),
            sampled_rows_S=on_device(starts[1:][completes] - 1, torch.int64),
            num_decodes=num_decodes,
            max_query_len=int(counts[num_decodes:].max(initial=0)),
            max_context_len=max_context_len,
        )

    def _update_table(self, seq: Sequence, row: int, num_tokens: int) -> None:
        """Enter the ids of the blocks that a sequence has got since its last step."""
        ids = self._core.block_ids(seq, num_tokens)
        num_known = self._num_ids_S[row]
        if len(ids) > num_known:
            self._tables_SM[row, num_known : len(ids)] = ids[num_known:]
            self._num_ids_S[row] = len(ids)

    def _draw(self, logits_SV: torch.Tensor, drawing: list[Sequence]) -> torch.Tensor:
        """A token for each row of logits, as its request asks."""
        params = [self._params[seq.request_id] for seq in drawing]
        if all(p.temperature == 0 and not p.has_penalties for p in params):
            return self._backend.greedy(logits_SV)
        device = logits_SV.device

        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        sampling = Sampling(
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int32),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            seed=column([self._seed if p.seed is None else p.seed for p in params], torch.int64),
            request=column(
                [seq.request_id if p.seed is None else 0 for seq, p in zip(drawing, params, strict=True)],
                torch.int64,
            ),
            position=column([seq.num_known for seq in drawing], torch.int64),
        )
        if not any(p.has_penalties for p in params):
            return self._backend.sample(logits_SV, sampling)
        slots = column([_slot(seq) for seq in drawing], torch.int64)
        penalties = Penalties(
            repetition=column([p.repetition_penalty for p in params], torch.float32),
            presence=column([p.presence_penalty for p in params], torch.float32),
            frequency=column([p.frequency_penalty for p in params], torch.float32),
            counts=self._counts(),
            row=slots,
        )
        tokens = self._backend.sample(logits_SV, sampling, penalties)
        count_tokens(self._counts(), slots, tokens)
        return tokens

    def _counts(self) -> torch.Tensor:
        if self._counts_SV is None:
            size = (self._core.max_num_seqs, self._decoder.architecture.vocab_size)
            self._counts_SV = torch.zeros(size, dtype=torch.int32, device=self._decoder.device)
        return self._counts_SV


def _slot(seq: Sequence) -> int:
    assert seq.slot is not None
    return seq.slot
