"""Caches that drop KV: which KV decoding sequences keep, and where, as executor and runner ask for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from kernels.attention import PLAIN, AttentionOptions, Contexts
from kernels.attention_reference import gather_tokens
from kernels.paged_kv import PagedKv
from kernels.prefill_attention import Chunks, DraftTree
from policies.caching.pool import Caching
from policies.caching.selective import SnapKv
from policies.caching.streaming import StreamingLlm
from policies.core.plan import StepPlan
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.kv_cache import KvCache

Cut = tuple[int, ...]
"""What a step does to one prompt, in words of the cache that drops KV."""


class KeptTokens(Protocol):
    """The KV that decoding sequences keep. Rows of prompts have their tokens at their positions."""

    def observed(self, backend: Backend) -> Backend:
        """Returns the backend that the model calls."""

    def places(self, positions_T: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Returns the places of decoded tokens at these positions, of sequences in these slots."""

    def contexts(self, lens_B: torch.Tensor, slots_B: torch.Tensor) -> torch.Tensor:
        """Returns the kept tokens of decoding sequences of these lengths."""

    def cuts(self, plan: StepPlan, filled: Collection[int]) -> tuple[Cut, ...]:
        """Returns what a plan does to prompts. filled: slots that other sequences have got before it."""

    def begin(self, cuts: tuple[Cut, ...]) -> None:
        """Prepares a step on the device."""

    def end(self, cuts: tuple[Cut, ...], cache: KvCache, tables_SM: torch.Tensor) -> None:
        """Ends a step with prompts. tables_SM: block tables by slot."""


def check_full_attention(architecture: Architecture, caching: Caching) -> None:
    """Raises ValueError if a model's attention is not a plain one, of which KV can be dropped."""
    windows = any(architecture.window(layer) is not None for layer in range(architecture.num_layers))
    if architecture.latent is not None or architecture.alibi or windows:
        raise ValueError(
            f"caching={type(caching).__name__}: a model of type {architecture.model_type} has latent "
            "attention, ALiBi or windows of its own; only full attention with rotary positions can drop KV"
        )


class KeptWindow(NamedTuple):
    """The kept tokens of every sequence that decodes.

    Attention sinks with a window of recent tokens: where a decoding sequence has the KV that it keeps.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, with the memory of
    `policies.caching.streaming`: a prompt is computed with full attention, and then cut. The window is a
    ring, in which each new token takes the place of the oldest:

        place     | 0 ... S - 1 |  S ... S + R - 1           |    S sinks, R recent tokens
        token p   |  p < S: p   |  S + (p - S) mod R         |

    Keys are rotated by the position of their token in the text, so the order of places does not matter, and
    no stored key is rotated again. In the paper positions are places in the cache, so that texts may be
    longer than the model's context; here they end at the context. Recent tokens have the same distances in
    both.
    """

    num_sinks: int
    num_recent: int

    @classmethod
    def of(cls, architecture: Architecture, caching: StreamingLlm) -> KeptWindow:
        """Returns the window of an engine. Raises ValueError for other attention than full attention."""
        check_full_attention(architecture, caching)
        return cls(caching.num_sink_tokens, caching.num_recent_tokens)

    @property
    def num_kept(self) -> int:
        """Largest number of tokens of a decoding sequence."""
        return self.num_sinks + self.num_recent

    def observed(self, backend: Backend) -> Backend:
        """Returns the backend as it is: positions alone decide what is kept."""
        return backend

    def places(self, positions: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Returns the places of tokens at these positions."""
        return self._places(positions)

    def _places(self, positions: torch.Tensor) -> torch.Tensor:
        rings = self.num_sinks + (positions - self.num_sinks) % self.num_recent
        return torch.where(positions < self.num_sinks, positions, rings)

    def contexts(self, lens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of kept tokens of sequences of these lengths."""
        return lens.clamp(max=self.num_kept)

    def cuts(self, plan: StepPlan, _: Collection[int]) -> tuple[Cut, ...]:
        """Returns the slots, and the tokens with KV, of the prompts that are cut after a plan has run."""
        ends = [
            (chunk.seq.slots[0], chunk.num_cached + chunk.num_tokens)
            for chunk in plan.chunks
            if chunk.completes
        ]
        return tuple((slot, num_tokens) for slot, num_tokens in ends if num_tokens > self.num_kept)

    def begin(self, cuts: tuple[Cut, ...]) -> None:
        """Does nothing: prompts are cut when a step has been computed."""

    def end(self, cuts: tuple[Cut, ...], cache: KvCache, tables_SM: torch.Tensor) -> None:
        """Cuts the prompts that a step has completed."""
        for slot, num_tokens in cuts:
            self.cut(cache, tables_SM[slot], num_tokens)

    def cut(self, cache: KvCache, table_M: torch.Tensor, num_tokens: int) -> None:
        """Moves the recent ones of num_tokens tokens, which lie by position, to their places.

        table_M: blocks of the sequence.
        """
        size = cache.block_size
        positions = torch.arange(num_tokens - self.num_recent, num_tokens, device=table_M.device)
        sources, places = (
            table_M[at // size].long() * size + at % size for at in (positions, self._places(positions))
        )
        for layer in cache.layers.values():
            for tensor in layer:
                if tensor is not None:
                    rows = tensor.view(-1, *tensor.shape[2:]).view(torch.uint8)
                    rows.index_copy_(0, places, rows.index_select(0, sources))


POOLED = 7
"""Neighbouring tokens of which the largest sum counts, as in the paper's experiments."""


class Part(NamedTuple):
    """A prompt's chunk in a step, as far as it decides about the cut."""

    slot: int
    num_dropped: int
    """Tokens of the prompt that are dropped."""
    row: int
    """Number of the chunk in the step; -1: the slot has got another sequence, of which nothing is dropped."""
    first_query: int = 0
    """First of the chunk's queries in the window, counted from the first query of all chunks."""
    num_queries: int = 0
    """Number of queries in the window; 0: none."""
    position: int = 0
    """Position of the first one."""
    num_tokens: int = 0
    """Tokens with KV after the chunk."""
    num_prompt: int = 0
    completes: int = 0
    """Whether the prompt is cut after this chunk."""


class KeptPrompt:
    """The kept tokens of every sequence. num_slots: largest number of sequences with KV at once.

    Prompts that are cut to the tokens to which their last ones attend most (SnapKV): what is kept, and where.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024, with the memory
    of `policies.caching.selective.PromptPool`. In every layer, the attention weights of the observation
    window, the last W tokens of the prompt, are summed for each token before it; the largest sum within
    POOLED neighbours counts (max pooling), and the tokens with the largest ones stay. Query heads that share
    a KV head choose together, by the sum of their weights; each KV head of each layer keeps other tokens, but
    as many.

        place  | 0 ... N - W - 1      |  N - W ... N - 1  |  N ...            N tokens kept of P in the prompt
        token  | chosen by the layer  |  P - W ... P - 1  |  P ...: the output, at position - (P - N)

    Keys are rotated by the positions of their tokens in the text, so their order in the cache does not
    matter. If chunks divide the window, the sums of each are added: the keys before a token are in the cache
    when it is computed. A preempted sequence is computed anew as a whole and cut in the same way.
    """

    def __init__(self, caching: SnapKv, num_layers: int, num_slots: int, device: torch.device) -> None:
        self._num_kept = caching.num_kept_tokens
        self._num_window = caching.num_window_tokens
        self._num_layers = num_layers
        self._dropped_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._parts: list[Part] = []  # of the step
        self._layer = 0  # of the next attention of the step
        self._sums: dict[
            tuple[int, int], torch.Tensor
        ] = {}  # by slot and layer: [K, tokens before the window]

    @classmethod
    def of(
        cls, architecture: Architecture, caching: SnapKv, num_slots: int, device: torch.device
    ) -> KeptPrompt:
        """Returns the kept tokens of an engine. Raises ValueError for other attention than full attention."""
        check_full_attention(architecture, caching)
        return cls(caching, architecture.num_layers, num_slots, device)

    def observed(self, backend: Backend) -> Backend:
        """Returns the backend whose attention of chunks also sums weights and cuts prompts."""
        return backend._replace(prefill_attention=_Observed(backend.prefill_attention, self.look))

    def places(self, positions_T: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Returns the places of decoded tokens."""
        return positions_T - self._dropped_S[slots_T]

    def contexts(self, lens_B: torch.Tensor, slots_B: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of kept tokens."""
        return (lens_B - self._dropped_S[slots_B]).to(lens_B.dtype)

    def cuts(self, plan: StepPlan, filled: Collection[int]) -> tuple[Cut, ...]:
        """Returns the parts of a step, and the slots that have got another sequence."""
        parts = [Part(slot, 0, -1) for slot in filled]
        first_query = 0
        for row, (seq, first, num_tokens, completes) in enumerate(plan.chunks):
            num_prompt, end = seq.num_prompt_tokens, first + num_tokens
            if num_prompt > self._num_kept:
                begin = max(first, num_prompt - self._num_window)
                num_queries = max(0, min(end, num_prompt) - begin)
                if num_queries or completes:
                    parts.append(
                        Part(
                            slot=seq.slots[0],
                            num_dropped=num_prompt - self._num_kept,
                            row=row,
                            first_query=first_query + begin - first,
                            num_queries=num_queries,
                            position=begin,
                            num_tokens=end,
                            num_prompt=num_prompt,
                            completes=int(completes),
                        )
                    )
            first_query += num_tokens
        return tuple(parts)

    def begin(self, cuts: tuple[Cut, ...]) -> None:
        """Notes the parts of a step, and how many tokens are dropped in each slot from the next step on."""
        parts = [Part(*cut) for cut in cuts]
        self._parts, self._layer = [part for part in parts if part.row >= 0], 0
        for part in parts:
            if part.row < 0:  # sums of a prompt that was preempted within its window
                for layer in range(self._num_layers):
                    self._sums.pop((part.slot, layer), None)
        changed = {part.slot: part.num_dropped for part in parts if part.row < 0 or part.completes}
        if changed:
            slots, nums = torch.tensor([[*changed], [*changed.values()]]).to(self._dropped_S.device)
            self._dropped_S.index_copy_(0, slots, nums)

    def end(self, cuts: tuple[Cut, ...], cache: KvCache, tables_SM: torch.Tensor) -> None:
        """Does nothing: each layer's attention has cut the prompts."""

    def look(self, q_THD: torch.Tensor, kv: PagedKv, contexts: Contexts, options: AttentionOptions) -> None:
        """Sums the weights of the window in one layer, and cuts the prompts that are complete."""
        layer, self._layer = self._layer, self._layer + 1
        for part in self._parts:
            table_M = contexts.block_tables_BM[part.row]
            at = part.slot, layer
            if part.num_queries:
                queries = q_THD[part.first_query :][: part.num_queries]
                num_before = part.num_prompt - self._num_window
                sums = window_sums(queries, kv, table_M, part.position, num_before, options)
                if part.position > num_before:
                    sums += self._sums[at]
                self._sums[at] = sums
            if part.completes:
                self._cut(kv, table_M, part, self._sums.pop(at))

    def _cut(self, kv: PagedKv, table_M: torch.Tensor, part: Part, sums_KL: torch.Tensor) -> None:
        """Moves the KV of the tokens that a layer keeps to their places."""
        num_chosen = self._num_kept - self._num_window
        chosen_KN = chosen(sums_KL, num_chosen)
        device = table_M.device
        later = torch.arange(part.num_prompt - self._num_window, part.num_tokens, device=device)
        tokens_KN = torch.cat([chosen_KN, later.expand(len(chosen_KN), -1)], 1)
        places_N = torch.arange(tokens_KN.shape[1], device=device)
        block_size = kv.keys.shape[1]
        sources_NK, to_N = (
            table_M[at // block_size].long() * block_size + at % block_size for at in (tokens_KN.T, places_N)
        )
        for tensor in kv:
            if tensor is not None:
                rows = tensor.view(-1, tensor.shape[2], tensor[0, 0, 0].numel()).view(torch.uint8)
                moved = rows.gather(0, sources_NK[..., None].expand(-1, -1, rows.shape[2]))
                rows.index_copy_(0, to_N, moved)


def window_sums(
    q_WHD: torch.Tensor,
    kv: PagedKv,
    table_M: torch.Tensor,
    position: int,
    num_before: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Returns the attention weights of consecutive queries, summed over them and the heads of each KV head.

    table_M: blocks of the sequence. position: of the first query. Returns fp32 [K, num_before], for the first
    num_before tokens.
    """
    num_queries, _, head_dim = q_WHD.shape
    length, num_kv_heads = position + num_queries, kv.keys.shape[2]
    keys_LKD = gather_tokens(kv.keys, kv.key_scales, table_M, 0, length, q_WHD.dtype)
    at = torch.arange(length, device=q_WHD.device)
    hidden_WL = at[None, :] > at[position:, None]
    sums = []
    for head, q_GWD in enumerate(q_WHD.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)):
        scores = torch.matmul(q_GWD.float(), keys_LKD[:, head].float().T) * options.scale_of(head_dim)
        weights_GWL = scores.masked_fill_(hidden_WL, -torch.inf).softmax(-1)
        sums.append(weights_GWL[..., :num_before].sum((0, 1)))
    return torch.stack(sums)


def chosen(sums_KL: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Returns the tokens [K, num_chosen] with the largest sums after pooling, in ascending order."""
    pooled = F.max_pool1d(sums_KL, POOLED, stride=1, padding=POOLED // 2)
    # Of tokens with equal sums, as neighbours often have after pooling, the earlier ones stay.
    order = pooled.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :num_chosen].sort(dim=-1).values


def selection_bytes(
    architecture: Architecture, caching: SnapKv, max_model_len: int, dtype: torch.dtype
) -> float:
    """Returns an upper bound of what one layer's choice in the longest prompt takes."""
    num_kv_heads = architecture.num_kv_heads
    group = architecture.num_heads // architecture.num_kv_heads
    keys = max_model_len * architecture.head_dim * (num_kv_heads * dtype.itemsize + 4)
    return float(keys + 12 * group * caching.num_window_tokens * max_model_len)


class _Observed:
    """Attention of chunks that also shows its queries and KV."""

    def __init__(
        self,
        attention: Callable[..., torch.Tensor],
        look: Callable[[torch.Tensor, PagedKv, Contexts, AttentionOptions], None],
    ) -> None:
        self._attention = attention
        self._look = look

    def __call__(
        self,
        q_THD: torch.Tensor,
        kv: PagedKv,
        contexts: Contexts,
        chunks: Chunks,
        options: AttentionOptions = PLAIN,
        *,
        tree: DraftTree | None = None,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns what `kernels.prefill_attention` returns."""
        out = self._attention(q_THD, kv, contexts, chunks, options, tree=tree, out_THD=out_THD)
        self._look(q_THD, kv, contexts, options)
        return out
