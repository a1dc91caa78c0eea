"""Drafters that are told the outputs, so that a real way to draft has any share of its tokens accepted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from realengine.runner import rank
from realengine.speculation.drafter import LoadedDraft
from realengine.speculation.drafters.load import load_draft


@dataclass
class Guide:
    """The texts of the requests of one engine, by the number of the request, and the share that is right."""

    rate: float
    seed: int
    texts: list = field(default_factory=list)
    engine: object = None

    def texts_by_slot(self):
        """Returns the text of the sequence in each slot."""
        if self.engine is None:
            return {}
        answers = self.engine._answer_of.items()
        return {seq.slots[0]: self.texts[answer.request_id] for seq, answer in answers if seq.slots}

    def draw(self, *key):
        """Returns the random numbers of a draft."""
        return random.Random(f"{self.seed}/{key}")


class GuidedDrafter:
    """Has another drafter draft, and then replaces tokens by the right ones, as often as the guide says."""

    def __init__(self, inner, guide, tree):
        self._inner, self._guide, self._tree = inner, guide, tree
        self.wants_states, self.is_static, self.taps = inner.wants_states, inner.is_static, inner.taps

    @property
    def cache_sets(self):
        return self._inner.cache_sets

    def follow(self, passed):
        self._inner.follow(passed)

    def draft(self, passed, start, num_levels):
        drafts = self._inner.draft(passed, start, num_levels)
        texts = self._guide.texts_by_slot()
        tokens = drafts.tokens_NK.clone()
        for row, (slot, position) in enumerate(
            zip(start.slots_N.tolist(), start.positions_N.tolist(), strict=True)
        ):
            draw = self._guide.draw(slot, position)
            right = texts.get(slot, [])[position + 1 :][:num_levels]
            for node, token in zip(self._path(draw, num_levels), right, strict=False):
                if draw.random() >= self._guide.rate:
                    break
                tokens[row, node] = token
        return drafts._replace(tokens_NK=tokens)

    def _path(self, draw, num_levels):
        """Returns the nodes that get the right tokens: a random path of the tree."""
        if self._tree is None:
            return range(num_levels)
        node, path = draw.randrange(self._tree.num_nodes_to(num_levels)), []
        while node >= 0:
            path.insert(0, node)
            node = self._tree.parents[node]
        return path


class GuidedHost:
    """A user's drafter on the host that drafts the right tokens, as often as the guide says."""

    def __init__(self, guide, vocab_size):
        self._guide, self._vocab_size = guide, vocab_size

    def draft(self, request_id, prompt, output, num_tokens):
        known = len(prompt) + len(output)
        draw = self._guide.draw(request_id, known)
        right = self._guide.texts[request_id][known:][: draw.randrange(num_tokens + 1)]
        return [
            token if draw.random() < self._guide.rate else (token + 1) % self._vocab_size for token in right
        ]

    def forget(self, request_id, output):
        pass


def guide_drafters(monkeypatch, guide, tree):
    """Makes the drafters of engines follow a guide; drafts that are drawn stay as they are."""

    def load(settings, context):
        loaded = load_draft(settings, context)
        if loaded is None or loaded.draws:
            return loaded
        return LoadedDraft(loaded.block_bytes, lambda cache: GuidedDrafter(loaded.build(cache), guide, tree))

    monkeypatch.setattr(rank, "load_draft", load)
