"""Files of many shards, of which only few are open at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import IO, Final, Generic, TypeVar

from sim.shards.shard_file import ShardMember

MAX_OPEN: Final = 100
"""Maximum number of open shard files; by default a process may have 256 or 1,024 open files of all kinds."""

Reader = TypeVar("Reader")


class OpenFiles(Generic[Reader]):
    """The content of shards; the `MAX_OPEN` most recently used are open.

    read: returns a reader of the content of a shard, given its index.
    """

    def __init__(self, shards: Sequence[ShardMember], read: Callable[[int, IO[bytes]], Reader]) -> None:
        self._shards, self._read = shards, read
        self._open: OrderedDict[int, tuple[Reader, ExitStack]] = OrderedDict()

    def __enter__(self) -> OpenFiles[Reader]:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._close_oldest()

    def opened(self, shard: int) -> Reader:
        """Returns the reader of a shard."""
        if shard not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._close_oldest()
            with ExitStack() as stack:
                content = stack.enter_context(self._shards[shard].opened())
                reader = self._read(shard, content)
                self._open[shard] = reader, stack.pop_all()
        self._open.move_to_end(shard)
        return self._open[shard][0]

    def _close_oldest(self) -> None:
        _, (_, stack) = self._open.popitem(last=False)
        stack.close()
