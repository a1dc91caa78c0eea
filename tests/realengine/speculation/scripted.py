"""A drafter that knows the outputs: it drafts their tokens, or wrong ones where a draw says so."""

import torch

from realengine.speculation.drafter import Drafts


class ScriptedDrafter:
    """Drafts the tokens of known texts, each right with probability `rate`; a tree has it at a drawn rank.

    texts: whole token ids by prompt, of which the first token is different in each.
    """

    wants_states = False
    is_static = False
    taps = ()
    cache_sets = ()

    def __init__(self, texts, rate, vocab_size, tree=None, seed=0):
        self._texts = texts
        self._rate = rate
        self._vocab_size = vocab_size
        self._tree = tree
        self._generator = torch.Generator().manual_seed(seed)
        self._context = {}

    def follow(self, passed):
        """Checks that the rows that advance a sequence are those of its text."""
        batch = passed.batch
        starts = batch.chunk_starts.tolist()
        for first, end, table in zip(starts, starts[1:], batch.block_tables_BM, strict=False):
            block = int(table[0])
            for row in range(first, end):
                if int(batch.slots_T[row]) < 0:
                    continue
                position = int(batch.positions_T[row])
                known = self._context.setdefault(block, [])
                del known[position:]
                assert len(known) == position, "a position was skipped"
                known.append(int(batch.tokens_T[row]))

    def draft(self, passed, start, num_levels):
        rows = []
        for newest, position, table in zip(
            start.newest_N.tolist(), start.positions_N.tolist(), start.tables_NM, strict=True
        ):
            if not int(table[0]):  # the sequence is padding
                rows.append([0] * (num_levels if self._tree is None else self._tree.num_nodes))
                continue
            known = [*self._context[int(table[0])][:position], newest]
            text = next(text for text in self._texts if text[: len(known)] == known[: len(text)])
            right = [*text[len(known) :], *[0] * (num_levels + 1)]
            rows.append(self._chain(right, num_levels) if self._tree is None else self._nodes(right))
        return Drafts(torch.tensor(rows))

    def _is_right(self):
        return float(torch.rand((), generator=self._generator)) < self._rate

    def _chain(self, right, num_levels):
        return [token if self._is_right() else (token + 1) % self._vocab_size for token in right[:num_levels]]

    def _nodes(self, right):
        tree = self._tree
        tokens = []
        for node, depth in enumerate(tree.depths):
            siblings = tree.children(tree.parents[node])
            token = (right[depth - 1] + 1 + tree.ranks[node]) % self._vocab_size
            if tree.ranks[node] == len(siblings) - 1 and self._is_right():
                token = right[depth - 1]
            tokens.append(token)
        return tokens
