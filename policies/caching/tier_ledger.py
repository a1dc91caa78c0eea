"""Ledger of the blocks that an executor holds in the tiers below the GPU, and the transfers between them.

While a step is planned, a `TieredPool` adds contents to its tiers and evicts others, sometimes the same ones.
An executor that copies bytes gets the net difference once per plan, block by block. Contents that are added
before the step that computes them (write=through) are copied with the next plan; their blocks are not
overwritten before.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as SequenceOf

from policies.caching.tier import Piece, Tier
from policies.core.plan import Content, Transfer

NOWHERE = "nowhere"


class TierLedger:
    """Compares the contents of the tiers with the transfers that were requested so far.

    tiers: the tier nearest to the GPU first.
    """

    def __init__(self, tiers: SequenceOf[Tier], block_size: int) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._held: dict[str, set[Content]] = {tier.name: set() for tier in tiers}
        self._changed: dict[Content, tuple[int, int]] = {}
        """Contents changed since the last `transfers` -> (GPU block, first iteration with the content).

        Block 0: no known block.
        """

    def written(self, piece: Piece, ids: SequenceOf[int], ready: int, now: int) -> None:
        """Records that a piece is copied from the GPU blocks `ids` to the first tier.

        ready: iteration from which on the blocks have the contents. now: number of committed iterations.
        """
        place, first, end = piece
        for one, other in self._tiers[0].missing(place, first, end):
            for block in range(one, other):
                known_id, known_ready = self._changed.get((place, block), (0, 0))
                if not known_id or known_ready > now:
                    self._changed[place, block] = ids[block - first], ready

    def evicted(self, pieces: Iterable[Piece]) -> None:
        """Records that pieces were evicted from a tier, possibly to the next one."""
        for place, first, end in pieces:
            for block in range(first, end):
                self._changed.setdefault((place, block), (0, 0))

    def transfers(self, read: Set[tuple[str, Content]], now: int) -> tuple[list[Transfer], list[Transfer]]:
        """Returns the copies and evictions before the contents `read` are loaded, and the evictions after.

        now: number of committed iterations.
        """
        ways: dict[tuple[str, str], list[tuple[Content, int]]] = {}
        later: dict[str, list[Content]] = {}
        postponed: dict[Content, tuple[int, int]] = {}
        for content, (block, ready) in self._changed.items():
            source = "gpu"
            for tier in self._tiers:
                held = self._held[tier.name]
                is_there, is_counted = content in held, tier.reach(*content) > content[1]
                is_read = (tier.name, content) in read
                if is_there and not is_counted and not is_read:
                    ways.setdefault((tier.name, NOWHERE), []).append((content, 0))
                    held.remove(content)
                elif not is_there and (is_counted or is_read):
                    if source == "gpu" and ready > now:
                        postponed[content] = block, ready
                    else:
                        assert source != "gpu" or block, "no tier and no block holds this content"
                        ways.setdefault((source, tier.name), []).append((content, block))
                        held.add(content)
                if is_read and not is_counted:
                    later.setdefault(tier.name, []).append(content)
                    held.remove(content)
                if is_there:
                    source = tier.name
        self._changed = postponed
        before = [self._transfer(*way, ways[way]) for way in self._order() if way in ways]
        after = [self._transfer(name, NOWHERE, [(content, 0) for content in later[name]]) for name in later]
        return before, after

    def _order(self) -> list[tuple[str, str]]:
        """Returns the order of transfers, from the last tier up, so that a tier evicts before it receives."""
        names = [tier.name for tier in self._tiers]
        order = []
        for depth in reversed(range(len(names))):
            order += [(names[depth], NOWHERE), *((names[above], names[depth]) for above in range(depth))]
        return order + [("gpu", name) for name in reversed(names)]

    def _transfer(self, source: str, target: str, moved: list[tuple[Content, int]]) -> Transfer:
        blocks = tuple(block for _, block in moved) if source == "gpu" else ()
        contents = tuple(content for content, _ in moved)
        return Transfer(None, source, target, len(moved) * self._block_size, blocks, contents)
