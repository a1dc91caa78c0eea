"""The target refines guesses of later tokens, and n-grams of them are drafted: no draft model.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML 2024. A window
has W columns of N - 1 guesses: guess l of column i stands i + l + 1 places behind the newest token. After a
pass of the target, another one computes the window of every sequence that drafts:

    row of (l, i) sees    the context, the newest token, guesses (0, 0) ... (0, i) and (1, i) ... (l, i)
    its last row gives    the N-th token of column i: with its guesses an n-gram, which the pool keeps
    the next window       drops the first guesses, and has these tokens as its last ones

The draft is a tree of up to G n-grams of the pool that begin with the newest token. Published engines compute
the window in the pass that verifies; here it is a pass of its own. Its KV stands in the G (N - 1) slots that
the engine keeps behind a sequence, and the next pass overwrites it. So a window has at most G columns, and as
many as the context has room for.

Letters of array names: N sequences that draft, Q rows of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections import deque

import torch

from kernels.block_copy import CacheSet
from kernels.prefill_attention import DraftTree
from policies.speculation.proposers import Lookahead as Proposer
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch, TreeRows
from realengine.speculation.drafter import DrafterContext, Drafts, LoadedDraft, Passed, Start
from realengine.speculation.drafters.decode_steps import DraftPlaces, max_len_in
from realengine.speculation.settings import SpeculationSettings

Pool = dict[int, deque[tuple[int, ...]]]
"""By first token: the tokens that followed it in the latest n-grams, the newest last."""


def load(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft:
    """Loads nothing: the target refines the guesses."""
    assert isinstance(settings.proposer, Proposer)
    proposer = settings.proposer

    def build(target_cache: KvCache) -> Lookahead:
        return Lookahead(context.target, target_cache, proposer, context.max_model_len)

    return LoadedDraft(0, build)


class Lookahead:
    """Drafts n-grams from a pool that the target fills. It reads its guesses on the host.

    Raises ValueError if the context has no room for a window.
    """

    wants_states = False
    is_static = False
    taps: tuple[int, ...] = ()
    cache_sets: tuple[CacheSet, ...] = ()

    def __init__(self, target: Decoder, cache: KvCache, proposer: Proposer, max_model_len: int) -> None:
        self._target = target
        self._cache = cache
        self._max_model_len = max_model_len
        self._levels, self._guesses = proposer.ngram - 1, proposer.guesses
        max_len = max_len_in(cache, max_model_len)
        self._window = min(proposer.window, proposer.guesses, (max_len - 1) // self._levels)
        if not self._window:
            raise ValueError(
                f"ngram={proposer.ngram}: a window needs KV of {proposer.ngram} tokens, it holds {max_len} "
                "of a sequence; set a smaller ngram, or raise max_model_len or num_kv_blocks"
            )
        self._windows: dict[int, torch.Tensor] = {}  # by slot: guesses [levels, window]
        self._pools: dict[int, Pool] = {}  # by slot
        device = target.device
        levels = torch.arange(self._levels, device=device)
        columns = torch.arange(self._window, device=device)
        depths = (levels[:, None] + columns + 1).flatten()
        self._depths_Q = torch.cat([depths.new_zeros(1), depths])
        self._mask = self._rows_seen().flatten().to(device)

    def _rows_seen(self) -> torch.Tensor:
        """Returns which row of a window sees which, [1 + guesses, 1 + guesses], the newest token first."""
        num_levels, window = self._levels, self._window
        seen = torch.zeros(1 + num_levels * window, 1 + num_levels * window, dtype=torch.bool)
        seen[:, 0] = True
        for level in range(num_levels):
            for column in range(window):
                row = 1 + level * window + column
                seen[row, 1 : 2 + column] = True
                for above in range(1, level + 1):
                    seen[row, 1 + above * window + column] = True
        return seen

    def follow(self, passed: Passed) -> None:
        """Forgets what was known of the sequences that had a slot before; the target's KV is complete."""
        begun = () if passed.begun_slots is None else passed.begun_slots.tolist()
        for slot in begun:
            self._windows.pop(slot, None)
            self._pools.pop(slot, None)

    def draft(self, passed: Passed, start: Start, num_levels: int) -> Drafts:
        """Refines the windows, and drafts num_levels tokens of up to G n-grams for each sequence."""
        slots, newest = start.slots_N.tolist(), start.newest_N.tolist()
        for slot, token in zip(slots, newest, strict=True):
            if slot not in self._windows:
                self._windows[slot] = torch.full((self._levels, self._window), token)
                self._pools[slot] = {}
        guesses_NLW = torch.stack([self._windows[slot] for slot in slots]).to(self._target.device)
        found_NW = self._refined(guesses_NLW, start)
        after = torch.cat([guesses_NLW, found_NW[:, None]], dim=1).cpu()
        for slot, window in zip(slots, after, strict=True):
            self._learn(self._pools[slot], window.T.tolist())
            self._windows[slot] = window[1:]
        rows = [
            self._tree(self._pools[slot].get(token, ()), num_levels)
            for slot, token in zip(slots, newest, strict=True)
        ]
        return Drafts(torch.tensor(rows, device=self._target.device))

    def _refined(self, guesses_NLW: torch.Tensor, start: Start) -> torch.Tensor:
        """Computes the token after the last guess of every column, [N, W]."""
        places = DraftPlaces.of(start, self._cache, self._max_model_len)
        num_seqs, num_rows = len(guesses_NLW), len(self._depths_Q)
        device = guesses_NLW.device
        tokens_NQ = torch.cat([start.newest_N[:, None], guesses_NLW.flatten(1)], dim=1)
        positions_T = places.positions(self._depths_Q).flatten()
        starts = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        slots_NQ = places.slots(torch.arange(num_rows, device=device))
        slots_NQ[:, self._guesses * self._levels :] = -1  # the sequence may not own it
        batch = Batch(
            tokens_T=tokens_NQ.flatten(),
            positions_T=positions_T,
            slots_T=slots_NQ.flatten(),
            block_tables_BM=start.tables_NM,
            chunk_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_rows,
            context_lens_B=places.context_lens(num_rows),
            sampled_rows_S=None,
            num_decodes=0,
            max_query_len=num_rows,
            max_context_len=min(start.max_context_len + num_rows, places.max_len),
            tree=TreeRows(DraftTree(self._mask, starts, positions_T.int()), num_seqs, num_seqs * num_rows),
        )
        hidden = self._target.states(batch, self._cache).hidden_TH
        last = hidden.view(num_seqs, num_rows, -1)[:, -self._window :]
        return self._target.head(last.flatten(0, 1)).argmax(dim=-1).view(num_seqs, self._window)

    def _learn(self, pool: Pool, ngrams: list[list[int]]) -> None:
        """Adds n-grams to a pool; of those with the same first token the latest G are kept."""
        for first, *rest in ngrams:
            known = pool.setdefault(first, deque(maxlen=self._guesses))
            after = tuple(rest)
            if after in known:
                known.remove(after)
            known.append(after)

    def _tree(self, ngrams: deque[tuple[int, ...]] | tuple[()], num_levels: int) -> list[int]:
        """Returns the nodes of a tree of n-grams, level by level; missing ones repeat the last one."""
        latest = list(reversed(ngrams)) or [(0,) * self._levels]
        branches = [*latest, *[latest[-1]] * (self._guesses - len(latest))]
        return [branch[level] for level in range(num_levels) for branch in branches]
