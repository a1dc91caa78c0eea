"""What the tiers below the GPU hold, as whoever copies was told, and what to tell next.

While a step is made, a `TieredPool` counts contents in and out of its tiers, some in and out again. Whoever
has bytes to copy is told the difference, once a plan, block by block. Contents that are counted before the
step that computes them (write=through) are told with the next plan: nothing overwrites them before.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as SequenceOf

from policies.caching.tier import Piece, Tier
from policies.core.plan import Content, Transfer

NOWHERE = "nowhere"


class Told:
    """The difference between what tiers count and what was told of them.

    tiers: the nearest to the GPU first.
    """

    def __init__(self, tiers: SequenceOf[Tier], block_size: int) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._told: dict[str, set[Content]] = {tier.name: set() for tier in tiers}
        self._changed: dict[Content, tuple[int, int]] = {}
        """Since the last telling: the block on the GPU that has it, and from which iteration on.

        Block 0: none that is known.
        """

    def written(self, piece: Piece, ids: SequenceOf[int], ready: int, now: int) -> None:
        """A piece of a place is about to be put into the first tier, out of the blocks `ids`.

        ready: from which iteration on these have it. now: iterations that were committed.
        """
        place, first, end = piece
        for one, other in self._tiers[0].missing(place, first, end):
            for block in range(one, other):
                known_id, known_ready = self._changed.get((place, block), (0, 0))
                if not known_id or known_ready > now:
                    self._changed[place, block] = ids[block - first], ready

    def gone(self, pieces: Iterable[Piece]) -> None:
        """Pieces have left a tier, perhaps for the next."""
        for place, first, end in pieces:
            for block in range(first, end):
                self._changed.setdefault((place, block), (0, 0))

    def tell(self, read: Set[tuple[str, Content]], now: int) -> tuple[list[Transfer], list[Transfer]]:
        """What has to be copied and given up before what is `read`, and what is given up behind it.

        now: iterations that were committed.
        """
        ways: dict[tuple[str, str], list[tuple[Content, int]]] = {}
        later: dict[str, list[Content]] = {}
        postponed: dict[Content, tuple[int, int]] = {}
        for content, (block, ready) in self._changed.items():
            source = "gpu"
            for tier in self._tiers:
                told = self._told[tier.name]
                is_there, is_counted = content in told, tier.reach(*content) > content[1]
                is_read = (tier.name, content) in read
                if is_there and not is_counted and not is_read:
                    ways.setdefault((tier.name, NOWHERE), []).append((content, 0))
                    told.remove(content)
                elif not is_there and (is_counted or is_read):
                    if source == "gpu" and ready > now:
                        postponed[content] = block, ready
                    else:
                        assert source != "gpu" or block, "nobody knows where this content lies"
                        ways.setdefault((source, tier.name), []).append((content, block))
                        told.add(content)
                if is_read and not is_counted:
                    later.setdefault(tier.name, []).append(content)
                    told.remove(content)
                if is_there:
                    source = tier.name
        self._changed = postponed
        before = [self._transfer(*way, ways[way]) for way in self._order() if way in ways]
        after = [self._transfer(name, NOWHERE, [(content, 0) for content in later[name]]) for name in later]
        return before, after

    def _order(self) -> list[tuple[str, str]]:
        """Ways by which contents go: room is made before it is used, from the last tier up."""
        names = [tier.name for tier in self._tiers]
        order = []
        for depth in reversed(range(len(names))):
            order += [(names[depth], NOWHERE), *((names[above], names[depth]) for above in range(depth))]
        return order + [("gpu", name) for name in reversed(names)]

    def _transfer(self, source: str, target: str, moved: list[tuple[Content, int]]) -> Transfer:
        blocks = tuple(block for _, block in moved) if source == "gpu" else ()
        contents = tuple(content for content, _ in moved)
        return Transfer(None, source, target, len(moved) * self._block_size, blocks, contents)
