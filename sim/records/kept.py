"""What a log has written, in memory that goes back to the system as soon as the log is dropped.

Logs grow side by side with millions of small objects. What the heap has given them it keeps when they go, as
something else lies behind it. So their buffers are emptied into memory maps now and then.
"""

from __future__ import annotations

from mmap import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

NUM_BYTES: Final = 1 << 17
"""That the first buffer has when all are moved for the first time."""


class Kept:
    """What stood in buffers that somebody writes to, as memory maps, in the order of its writing.

    limit: bytes of the first buffer at which it is time to `move` again. It grows with what is kept: the maps
    of a long run are few, too. num_moved: bytes of that buffer that are in maps.
    """

    def __init__(self, *buffers: bytearray) -> None:
        self.limit = NUM_BYTES
        self.num_moved = 0
        self._first = buffers[0]
        self._parts: dict[int, tuple[bytearray, list[mmap]]] = {
            id(buffer): (buffer, []) for buffer in buffers
        }

    def move(self) -> None:
        """Empty the buffers."""
        self.num_moved += len(self._first)
        self.limit = max(NUM_BYTES, self.num_moved // 8)
        for buffer, maps in self._parts.values():
            if buffer:
                maps.append(mmap(-1, len(buffer)))
                maps[-1][:] = buffer
                buffer.clear()

    def num_bytes(self, buffer: bytearray) -> int:
        """All that were ever written to one of the buffers."""
        _, maps = self._parts[id(buffer)]
        return len(buffer) + sum(len(part) for part in maps)

    def take(self, buffer: bytearray, dtype: DTypeLike) -> NDArray[Any]:
        """All that was ever written to one of the buffers. It is given up."""
        _, maps = self._parts.pop(id(buffer))
        parts: list[mmap | bytearray] = [*maps, buffer]
        return np.concatenate([np.frombuffer(part, np.uint8) for part in parts]).view(dtype)
