"""What a replica says of itself to routing and scaling policies, where none is declared to read it."""

from __future__ import annotations

from typing import NoReturn

from policies.core.request import Request


class Readings:
    """The readings of a replica that no policy reads: asking for one is the policy's mistake."""

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        self._refuse()

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        self._refuse()

    @property
    def num_blocks_used(self) -> int:
        """KV blocks that sequences own."""
        self._refuse()

    @property
    def num_unseen(self) -> int:
        """Requests sent to the replica that these counts do not include yet."""
        self._refuse()

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of those."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("signals: the routing policy must declare reads_signals: ClassVar[bool] = True")


NO_SIGNALS = Readings()


class NoCacheView:
    """The cache of a replica that no policy reads."""

    def num_cached(self, request: Request) -> int:
        """Tokens of a prompt that the cache has, as of the last iteration that has begun."""
        raise RuntimeError("num_cached: the routing policy must declare reads_caches: ClassVar[bool] = True")


NO_CACHE_VIEW = NoCacheView()
