"""A small model with the target's vocabulary drafts, one token after the other, on its own KV cache.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023. Its cache has the
target's blocks: a token's KV has the same slot in both, so prefix hits, copies and swaps hold for both.

When a sequence at position P drafts, its KV before P must be complete. The tokens of prompts are computed in
whole. Of a decoding sequence only the last token before P may be missing:

    last pass        newest at Q, drafted d1 d2 ... dL; computed while drafting: Q .. Q + L - 1
    accepted         a <= L of them, so P = Q + a + 1 and at most P - 1 = Q + L lacks its KV

If tokens are drafted after a pass, the tokens that it lacks and its newest ones are one batch.

Letters of array names: N sequences that draft, T tokens of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kernels.block_copy import CacheSet
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend, check_supported
from realengine.model.decoder import Decoder
from realengine.model.decoders import decoder_of
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch
from realengine.runner.parallel import Group
from realengine.serving.model import weights_of
from realengine.speculation.drafter import (
    DecodedRows,
    Drafter,
    DrafterContext,
    Drafts,
    LoadedDraft,
    Passed,
    Start,
)
from realengine.speculation.drafters.choices import choice_of
from realengine.speculation.drafters.decode_steps import (
    DraftPlaces,
    drafted_chain,
    joined,
    max_len_in,
    num_kv_blocks,
)
from realengine.speculation.settings import DraftSource, SpeculationSettings
from realengine.weights.load import load_weights
from realengine.weights.table import expected, shard


def load(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft:
    """Loads the weights of a draft model. Raises ValueError if it does not fit the target."""
    return load_models(settings.models, context, lambda models: models[0], is_drawn=settings.draws)


def load_models(
    sources: Sequence[DraftSource],
    context: DrafterContext,
    make: Callable[[Sequence[DraftModel]], Drafter],
    *,
    verifies_others: bool = False,
    is_drawn: bool = False,
) -> LoadedDraft:
    """Loads the weights of models, of which `make` makes a drafter. Raises ValueError if one does not fit."""
    decoders = [_load_decoder(source, context) for source in sources]
    sizes = [
        KvCache.bytes_per_block(
            decoder.architecture, context.block_size, context.kv_dtype, decoder.group.world_size
        )
        for decoder in decoders
    ]

    def with_cache(decoder: Decoder, target_cache: KvCache) -> DraftModel:
        cache = KvCache(
            decoder.architecture,
            num_kv_blocks(target_cache),
            context.block_size,
            context.kv_dtype,
            context.device,
            decoder.group.world_size,
        )
        return DraftModel(
            decoder,
            cache,
            context.backend,
            context.max_model_len,
            verifies_others=verifies_others,
            is_drawn=is_drawn,
        )

    def build(target_cache: KvCache) -> Drafter:
        return make([with_cache(decoder, target_cache) for decoder in decoders])

    return LoadedDraft(sum(sizes), build, draws=is_drawn)


def _load_decoder(source: DraftSource, context: DrafterContext) -> Decoder:
    """Loads a draft model: a rank's share of it, or all of it if its sizes cannot be divided."""
    name = "the architecture" if isinstance(source, Architecture) else source
    try:
        architecture, path = weights_of(source)
        _check_fit(architecture, context)
        group = _group_of(architecture, context.group)
        check_supported(
            architecture, context.backend, context.dtype, context.kv_dtype, world_size=group.world_size
        )
        weights = load_weights(
            path,
            architecture,
            context.dtype,
            context.device,
            rank=group.rank,
            world_size=group.world_size,
            seed=context.seed,
        )
    except ValueError as error:
        raise ValueError(f"speculative_config: model={name}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"speculative_config: model={name}: its weights do not fit into the GPU's memory beside the "
            f"target's: {error}; choose a smaller draft, or a larger tensor_parallel_size"
        ) from error
    return decoder_of(architecture, weights, context.backend, context.max_model_len, group)


def _check_fit(draft: Architecture, context: DrafterContext) -> None:
    """Raises ValueError unless a draft has the target's token ids and positions for its longest sequence."""
    vocab_size = context.architecture.vocab_size
    if draft.vocab_size != vocab_size:
        raise ValueError(
            f"vocab_size={draft.vocab_size}: must be that of the target, {vocab_size}, because draft tokens "
            "are the target's; choose a draft with the same tokenizer"
        )
    if draft.max_position_embeddings < context.max_model_len:
        raise ValueError(
            f"max_position_embeddings={draft.max_position_embeddings}: must be at least max_model_len="
            f"{context.max_model_len}; set max_model_len to at most {draft.max_position_embeddings}"
        )


def _group_of(architecture: Architecture, group: Group) -> Group:
    """Returns the target's group, or a group of one rank if it cannot divide the draft's sizes."""
    try:
        shard(expected(architecture), group.rank, group.world_size)
    except ValueError:
        return Group()
    return group


class DraftModel:
    """Drafts chains with a model of its own.

    cache: the model's, with as many blocks as the target's. verifies_others: whether the target verifies
    tokens that are not this model's draft, too; then all accepted tokens are computed again. is_drawn:
    whether tokens are drawn from the model's distribution, instead of the likeliest ones.
    """

    wants_states = False
    is_static = True
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        backend: Backend,
        max_model_len: int,
        *,
        verifies_others: bool = False,
        is_drawn: bool = False,
    ) -> None:
        self._backend = backend
        self.cache = cache
        self._decoder = decoder
        self._verifies_others = verifies_others
        self._is_drawn = is_drawn
        self.max_len = max_len_in(cache, max_model_len)
        """Tokens of the longest sequence."""
        self.vocab_size = decoder.architecture.vocab_size

    @property
    def cache_sets(self) -> tuple[CacheSet, ...]:
        """The tensors of its KV cache."""
        return self.cache.cache_sets

    def follow(self, passed: Passed) -> None:
        """Computes the KV of a pass that is missing, unless `draft` is called for it."""
        if not passed.drafts_next:
            self._decoder.states(self._missing(passed), self.cache)

    def draft(self, passed: Passed, start: Start, num_levels: int) -> Drafts:
        """Drafts num_levels tokens for each sequence."""
        places = self.places(start)
        first = self.first_step(passed, places)
        choice = choice_of(self._backend, start.sampling, is_drawn=self._is_drawn)
        return drafted_chain(num_levels, places, self.logits, choice, first)

    def places(self, start: Start) -> DraftPlaces:
        """Returns the places of sequences in its KV cache."""
        return DraftPlaces.of(start, self.cache, self.max_len)

    def first_step(self, passed: Passed, places: DraftPlaces) -> Batch:
        """Returns the batch of the newest tokens, and of the KV that is missing if `follow` has left it."""
        decodes = places.decode(places.start.newest_N, 0)
        return joined(decodes, self._missing(passed)) if passed.drafts_next else decodes

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Computes the hidden states [T, H] of a batch, from which `head` computes logits."""
        return self._decoder.states(batch, self.cache).hidden_TH

    def head(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Computes the logits [T, V] of hidden states."""
        return self._decoder.head(hidden_TH)

    def logits(self, batch: Batch, rows: slice) -> torch.Tensor:
        """Computes a batch, and the logits of some of its tokens."""
        return self.head(self.hidden(batch)[rows])

    def _missing(self, passed: Passed) -> Batch:
        """Returns the rows of a pass of which the KV may be missing."""
        rows = replace(passed.batch, adapters=None)
        if passed.decoded is None or self._verifies_others:
            return rows
        return without_drafted(rows, passed.decoded)


def without_drafted(rows: Batch, decoded: DecodedRows) -> Batch:
    """Returns rows in which each decoding sequence has only its last token, as a decode row."""
    num_seqs, num_tokens, last_D = decoded

    def kept(of_tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([of_tokens[last_D], of_tokens[num_tokens:]])

    has_chunks = rows.num_rows > num_seqs
    return replace(
        rows,
        tokens_T=kept(rows.tokens_T),
        positions_T=kept(rows.positions_T),
        slots_T=kept(rows.slots_T),
        chunk_starts=rows.chunk_starts[num_seqs:] - num_tokens,
        context_lens_B=torch.cat([rows.positions_T[last_D].int() + 1, rows.context_lens_B[num_seqs:]]),
        num_decodes=num_seqs,
        max_query_len=rows.max_query_len if has_chunks else 0,
    )
