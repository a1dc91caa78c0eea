"""Stand-ins for the load signals and the cache view of a replica, if no policy is declared to read them."""

from __future__ import annotations

from typing import NoReturn

from policies.core.request import Request


class NoSignals:
    """Load signals of a replica that no policy has declared to read: reading one raises RuntimeError."""

    @property
    def num_running(self) -> int:
        """Running sequences."""
        self._refuse()

    @property
    def num_waiting(self) -> int:
        """Waiting sequences."""
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
        """Prompt tokens of the requests that these counts do not include yet."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("signals: the routing policy must declare reads_signals: ClassVar[bool] = True")


NO_SIGNALS = NoSignals()


class NoCacheView:
    """The cache of a replica that no policy has declared to read: reading it raises RuntimeError."""

    def num_cached(self, request: Request) -> int:
        """Returns the number of cached tokens of a prompt, as of the last iteration that has begun."""
        raise RuntimeError("num_cached: the routing policy must declare reads_caches: ClassVar[bool] = True")


NO_CACHE_VIEW = NoCacheView()
