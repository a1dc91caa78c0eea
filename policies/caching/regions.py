"""Contiguous KV regions, one per request, placed by first or best fit: memory management before paging.

FasterTransformer and Orca store the KV of a request in one contiguous region, allocated at its admission for
its maximum length. This wastes memory in three ways (Kwon et al., SOSP 2023, section 3.1):

    reserved   slots of a region that its request fills later; no other request can use them until it ends
    internal   slots of a region that are never filled, because the request ends before its maximum length
    external   free slots between regions, in pieces too short for the waiting request

Figure 2 of the paper: share of the KV memory by use, in percent. Sums differ from 100 by rounding; the paper
gives only the first number for vLLM.

                      token states   reserved   internal   external and others
    Orca (Max)            20.4         13.3       57.3             8.9
    Orca (Pow2)           26.8         17.9       13.6            41.6
    Orca (Oracle)         38.2         25.2        -              36.6
    vLLM (paged)          96.3

The Oracle row has no internal part although its regions come from a buddy allocator. We assume that the
allocator's rounding is part of "external and others" there.

Assumes nothing about requests: the caller decides the number of token slots of a region.
Memory pressure: an allocator returns None and changes nothing; the caller decides which region is freed.
Horizon: while no region is freed, a refused `allocate` or `grow` is refused again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import NamedTuple, Protocol


class Region(NamedTuple):
    """Token slots [start, start + num_tokens), including the allocator's rounding."""

    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """First slot after the region."""
        return self.start + self.num_tokens


class RegionAllocator(Protocol):
    """An allocator of regions in a memory of num_tokens slots; regions do not move.

    num_tokens = num_free + slots of the allocated regions
    """

    @property
    def num_tokens(self) -> int:
        """Size of the memory, in token slots."""

    @property
    def num_free(self) -> int:
        """Number of free slots, over all free pieces."""

    @property
    def largest_free(self) -> int:
        """Longest region that could be allocated now; 0 if none."""

    def free_regions(self) -> list[Region]:
        """Returns the free pieces, by address."""

    def allocate(self, num_tokens: int) -> Region | None:
        """Allocates at least num_tokens slots; returns None and changes nothing if there is no such piece.

        Raises ValueError if num_tokens < 1.
        """

    def grow(self, region: Region, num_tokens: int) -> Region | None:
        """Extends a region to num_tokens slots at the same start; returns None if that is not possible.

        A region that is already long enough is returned unchanged; regions are never shortened. The returned
        region replaces the given one. Raises ValueError if the region is not allocated or num_tokens < 1.
        """

    def free(self, region: Region) -> None:
        """Frees a region. Raises ValueError if it is not allocated."""

    def check_integrity(self) -> None:
        """Asserts that regions and free pieces tile the memory, and that no free pieces could be merged."""


class FirstFit:
    """Allocates regions of the exact length from one free list (Knuth, TAOCP vol. 1, section 2.5).

    First fit takes the beginning of the free piece with the lowest address that is long enough: O(free
    pieces). Best fit takes the shortest such piece, by bisection; ties go to the lowest address. Freed
    regions are merged with the free pieces at both ends.
    """

    def __init__(self, num_tokens: int, *, best_fit: bool = False) -> None:
        must_be_positive(num_tokens)
        self.num_tokens = num_tokens
        self.num_free = num_tokens
        self._best_fit = best_fit
        self._taken: set[Region] = set()
        # The free pieces in three forms: sorted addresses, sorted (length, address), address -> length.
        self._starts: list[int] = []
        self._by_length: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._add(0, num_tokens)

    @property
    def largest_free(self) -> int:
        """Longest region that could be allocated now; 0 if none."""
        return self._by_length[-1][0] if self._by_length else 0

    def free_regions(self) -> list[Region]:
        """Returns the free pieces, by address."""
        return [Region(start, self._length_at[start]) for start in self._starts]

    def allocate(self, num_tokens: int) -> Region | None:
        """Allocates num_tokens slots; returns None and changes nothing if no free piece is long enough."""
        must_be_positive(num_tokens)
        if num_tokens > self.largest_free:
            return None
        region = Region(self._fitting(num_tokens), num_tokens)
        self._cut(region)
        self._taken.add(region)
        return region

    def grow(self, region: Region, num_tokens: int) -> Region | None:
        """Extends a region to num_tokens slots if the slots after it are free; else returns None."""
        must_be_taken(region, self._taken)
        must_be_positive(num_tokens)
        num_more = num_tokens - region.num_tokens
        if num_more <= 0:
            return region
        if num_more > self._length_at.get(region.end, 0):
            return None
        self._cut(Region(region.end, num_more))
        grown = Region(region.start, num_tokens)
        self._taken.remove(region)
        self._taken.add(grown)
        return grown

    def free(self, region: Region) -> None:
        """Frees a region and merges it with the free pieces before and after it."""
        must_be_taken(region, self._taken)
        self._taken.remove(region)
        self.num_free += region.num_tokens
        start, length = region
        if region.end in self._length_at:
            length += self._drop(region.end)
        index = bisect_left(self._starts, start)
        if index > 0:
            before = self._starts[index - 1]
            if before + self._length_at[before] == start:
                start, length = before, length + self._drop(before)
        self._add(start, length)

    def check_integrity(self) -> None:
        """Asserts that regions and free pieces tile the memory and that no two free pieces touch."""
        pieces = self.free_regions()
        must_tile([*self._taken, *pieces], self.num_tokens)
        assert self.num_free == sum(piece.num_tokens for piece in pieces)
        assert all(piece.end < following.start for piece, following in pairwise(pieces))
        assert self._by_length == sorted((piece.num_tokens, piece.start) for piece in pieces)
        assert len(self._length_at) == len(pieces)

    def _fitting(self, num_tokens: int) -> int:
        """Returns the start of the free piece from which num_tokens slots are taken; there must be one."""
        if self._best_fit:
            return self._by_length[bisect_left(self._by_length, (num_tokens, 0))][1]
        return next(start for start in self._starts if self._length_at[start] >= num_tokens)

    def _cut(self, region: Region) -> None:
        """Takes a region from the beginning of the free piece that starts at the same slot."""
        num_left = self._drop(region.start) - region.num_tokens
        if num_left:
            self._add(region.end, num_left)
        self.num_free -= region.num_tokens

    def _add(self, start: int, length: int) -> None:
        insort(self._starts, start)
        insort(self._by_length, (length, start))
        self._length_at[start] = length

    def _drop(self, start: int) -> int:
        """Removes the free piece at start; returns its length."""
        length = self._length_at.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length


def must_be_positive(num_tokens: int) -> None:
    """Raises ValueError unless num_tokens >= 1."""
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: must be >= 1 token")


def must_be_taken(region: Region, taken: Collection[Region]) -> None:
    """Raises ValueError if the region was freed, was replaced by a longer one, or never existed."""
    if region not in taken:
        raise ValueError(f"region={tuple(region)}: must be allocated, as last returned by allocate or grow")


def must_tile(regions: Iterable[Region], num_tokens: int) -> None:
    """Asserts that the regions cover [0, num_tokens) without gap or overlap."""
    end = 0
    for region in sorted(regions):
        assert region.num_tokens > 0, f"{region} is empty"
        assert region.start == end, f"gap or overlap between slot {end} and {region}"
        end = region.end
    assert end == num_tokens, f"the regions end at slot {end}, the memory at {num_tokens}"


class Buddy:
    """Allocates regions of power-of-two sizes from the smallest sufficient piece, lowest address first.

    Example: 15,728 slots (12 GiB at 800 KiB per token, OPT-13B) hold 4 + 2 + 1 = 7 regions of 2,048. The
    remaining 1,392 slots are 8.9% of the memory: the paper's Orca (Max), Figures 2 and 13.

    Buddy allocator of contiguous KV regions (Knowlton, CACM 1965; Knuth, TAOCP vol. 1, section 2.5).

    The vLLM paper (Kwon et al., SOSP 2023, section 6.1) assumes that Orca uses one for the KV of requests,
    and compares with three amounts that Orca may reserve: the model's longest sequence (Max), at most twice
    the true output (Pow2), and the true length (Oracle). The caller decides the amount.
    `policies.caching.regions` lists the memory shares that the paper reports for these amounts.

    Sizes are powers of two, and a piece of size s starts at a multiple of s; its buddy is the piece at start
    ^ s:

        |        8        |
        |   4    |   4    |      3 tokens take 4 slots: the fourth is wasted (rounding)
        | 2 | 2  | 2 | 2  |      two free pieces of 2 that are not buddies do not form a 4 (external)

    A memory with a size that is not a power of two is divided into the powers of two of its binary digits,
    the largest first (13 = 8 + 4 + 1): each piece is aligned, and no two of them are buddies. A rest smaller
    than the smallest size counts as free and is never allocated.

    Assumes nothing about requests. Memory pressure: the allocator returns None and changes nothing. Horizon:
    while no region is freed, a refused request is refused again.
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
