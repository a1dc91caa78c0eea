"""Buffers of a log that move to memory maps, so that their memory is returned when the log is dropped.

Logs grow at the same time as millions of small objects. The heap cannot return their memory when they are
dropped, because other objects lie after it. The buffers are therefore emptied into memory maps periodically.
"""

from __future__ import annotations

from math import inf
from mmap import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

NUM_BYTES: Final = 1 << 16
"""Size of the first buffer, in bytes, at which all buffers are moved for the first time."""


class MappedBuffers:
    """Memory maps with the contents of buffers, in the order of writing; the owner keeps writing to these.

    limit: size of the first buffer, in bytes, at which `move` is due. It grows with the moved bytes, so a
    long run also has few maps. num_moved: bytes of the first buffer that are in maps.
    """

    def __init__(self, *buffers: bytearray) -> None:
        self.limit: float = NUM_BYTES
        self.num_moved = 0
        self._buffers = buffers
        self._places = {id(buffer): place for place, buffer in enumerate(buffers)}
        self._maps: list[tuple[mmap, list[int]]] = []  # each with the borders of the buffers in it

    def move(self) -> None:
        """Moves the contents of the buffers to a new map, unless the process has too many maps."""
        borders = [0]
        for buffer in self._buffers:
            borders.append(borders[-1] + len(buffer))
        if not borders[-1]:
            return
        try:
            moved = mmap(-1, borders[-1])
        except OSError:
            self.limit = inf
            return
        for buffer in self._buffers:
            moved.write(buffer)
            buffer.clear()
        self._maps.append((moved, borders))
        self.num_moved += borders[1]
        self.limit = max(NUM_BYTES, self.num_moved // 16)

    def extend(self, other: MappedBuffers) -> None:
        """Adds all bytes ever written to the buffers of another log of the same kind."""
        for place, (buffer, latest) in enumerate(zip(self._buffers, other._buffers, strict=True)):
            for moved, borders in other._maps:
                buffer += moved[borders[place] : borders[place + 1]]
            buffer += latest

    def num_bytes(self, buffer: bytearray) -> int:
        """Returns the number of bytes ever written to one of the buffers."""
        place = self._places[id(buffer)]
        return len(buffer) + sum(borders[place + 1] - borders[place] for _, borders in self._maps)

    def num_all_bytes(self) -> int:
        """Returns the number of bytes ever written to all buffers."""
        return sum(map(len, self._buffers)) + sum(borders[-1] for _, borders in self._maps)

    def take(self, buffer: bytearray, dtype: DTypeLike) -> NDArray[Any]:
        """Returns all bytes ever written to a buffer, and drops it; the last one also drops the maps."""
        place = self._places.pop(id(buffer))
        parts = [
            np.frombuffer(moved, np.uint8, borders[place + 1] - borders[place], borders[place])
            for moved, borders in self._maps
        ]
        whole = np.concatenate([*parts, np.frombuffer(buffer, np.uint8)]).view(dtype)
        if not self._places:
            self._maps.clear()
        return whole
