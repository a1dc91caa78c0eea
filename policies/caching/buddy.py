"""Buddy allocator of contiguous KV regions (Knowlton, CACM 1965; Knuth, TAOCP vol. 1, section 2.5).

The vLLM paper (Kwon et al., SOSP 2023, section 6.1) assumes that Orca uses one for the KV of requests, and
compares with three amounts that Orca may reserve: the model's longest sequence (Max), at most twice the true
output (Pow2), and the true length (Oracle). The caller decides the amount. `policies.caching.regions` has the
memory shares that the paper reports for them.

Sizes are powers of two, and a piece of size s starts at a multiple of s; its buddy is the piece at start ^ s:

    |        8        |
    |   4    |   4    |      3 tokens take 4 slots: the fourth is wasted (rounding)
    | 2 | 2  | 2 | 2  |      two free pieces of 2 that are not buddies do not form a 4 (external)

A memory with a size that is not a power of two is divided into the powers of two of its binary digits, the
largest first (13 = 8 + 4 + 1): each piece is aligned, and no two of them are buddies. A rest smaller than the
smallest size counts as free and is never allocated.

Assumes nothing about requests. Memory pressure: it returns None and changes nothing.
Horizon: while no region is freed, a refused request is refused again.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from policies.caching.regions import Region, must_be_positive, must_be_taken, must_tile


class Buddy:
    """Allocates regions of power-of-two sizes from the smallest sufficient piece, lowest address first.

    Example: 15,728 slots (12 GiB at 800 KiB per token, OPT-13B) hold 4 + 2 + 1 = 7 regions of 2,048. The
    1,392 slots left are 8.9% of the memory: the paper's Orca (Max), Figures 2 and 13.
    """

    def __init__(self, num_tokens: int, *, min_region_tokens: int = 1) -> None:
        """Creates a free memory.

        Raises ValueError unless min_region_tokens is a power of two <= num_tokens.
        """
        must_be_positive(num_tokens)
        if min_region_tokens < 1 or min_region_tokens & (min_region_tokens - 1):
            raise ValueError(f"min_region_tokens={min_region_tokens}: must be a power of two")
        if min_region_tokens > num_tokens:
            raise ValueError(f"min_region_tokens={min_region_tokens}: must be <= num_tokens={num_tokens}")
        self.num_tokens = num_tokens
        self.num_free = num_tokens
        self.min_region_tokens = min_region_tokens
        self._taken: set[Region] = set()
        # Free pieces of size 2 ** order: their starts, ascending.
        self._starts: list[list[int]] = [[] for _ in range(num_tokens.bit_length())]
        self._num_usable = num_tokens - num_tokens % min_region_tokens
        start = 0
        for order in reversed(range(num_tokens.bit_length())):
            if self._num_usable >> order & 1:
                self._starts[order].append(start)
                start += 1 << order

    @property
    def largest_free(self) -> int:
        """Longest region that could be allocated now, a power of two; 0 if none."""
        for order in reversed(range(len(self._starts))):
            if self._starts[order]:
                return 1 << order
        return 0

    def free_regions(self) -> list[Region]:
        """Returns the free pieces that can be allocated, by address."""
        return sorted(
            Region(start, 1 << order) for order, starts in enumerate(self._starts) for start in starts
        )

    def rounded(self, num_tokens: int) -> int:
        """Computes the slots of a region for num_tokens tokens: 3 -> 4, 4 -> 4, 5 -> 8."""
        must_be_positive(num_tokens)
        return max(self.min_region_tokens, 1 << (num_tokens - 1).bit_length())

    def allocate(self, num_tokens: int) -> Region | None:
        """Allocates rounded(num_tokens) slots; returns None if no piece is large enough."""
        region_tokens = self.rounded(num_tokens)
        order = region_tokens.bit_length() - 1
        found = next((o for o in range(order, len(self._starts)) if self._starts[o]), None)
        if found is None:
            return None
        start = self._starts[found].pop(0)
        for half in range(order, found):  # the right halves of split pieces remain free
            insort(self._starts[half], start + (1 << half))
        region = Region(start, region_tokens)
        self._taken.add(region)
        self.num_free -= region_tokens
        return region

    def grow(self, region: Region, num_tokens: int) -> Region | None:
        """Extends a region to rounded(num_tokens) slots at the same start; else returns None.

        A region can double in place only if it is the left one of two buddies and the right one is free and
        not split.
        """
        must_be_taken(region, self._taken)
        grown = Region(region.start, self.rounded(num_tokens))
        if grown.num_tokens <= region.num_tokens:
            return region
        if grown.start % grown.num_tokens:
            return None
        doublings = range(region.num_tokens.bit_length() - 1, grown.num_tokens.bit_length() - 1)
        if not all(self._is_free(order, region.start + (1 << order)) for order in doublings):
            return None
        for order in doublings:
            self._drop(order, region.start + (1 << order))
        self._taken.remove(region)
        self._taken.add(grown)
        self.num_free -= grown.num_tokens - region.num_tokens
        return grown

    def free(self, region: Region) -> None:
        """Frees a region and merges it with its buddy as long as the buddy is free and not split."""
        must_be_taken(region, self._taken)
        self._taken.remove(region)
        self.num_free += region.num_tokens
        start, order = region.start, region.num_tokens.bit_length() - 1
        while self._is_free(order, start ^ (1 << order)):
            self._drop(order, start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        insort(self._starts[order], start)

    def check_integrity(self) -> None:
        """Asserts that aligned regions and free pieces tile the memory and that free buddies are merged."""
        pieces = self.free_regions()
        must_tile([*self._taken, *pieces], self._num_usable)
        num_rest = self.num_tokens - self._num_usable
        assert self.num_free == sum(piece.num_tokens for piece in pieces) + num_rest
        for region in (*self._taken, *pieces):
            assert region.num_tokens == self.rounded(region.num_tokens), f"{region} has no buddy size"
            assert region.start % region.num_tokens == 0, f"{region} is not aligned"
        for order, starts in enumerate(self._starts):
            assert starts == sorted(starts)
            assert not any(self._is_free(order, start ^ (1 << order)) for start in starts)

    def _is_free(self, order: int, start: int) -> bool:
        """Returns whether the piece of size 2 ** order at start is free and not split."""
        if order >= len(self._starts):
            return False
        starts = self._starts[order]
        index = bisect_left(starts, start)
        return index < len(starts) and starts[index] == start

    def _drop(self, order: int, start: int) -> None:
        """Removes a free piece from the lists."""
        del self._starts[order][bisect_left(self._starts[order], start)]
