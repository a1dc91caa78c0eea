"""Load signals and cache view of a replica, and their stand-ins if no policy is declared to read them."""

from __future__ import annotations

from typing import NoReturn, Protocol, cast

from policies.core.request import Request


class LoadSignals(Protocol):
    """The counts that an engine reports."""

    @property
    def num_running(self) -> int:
        """Running sequences."""
        ...

    @property
    def num_waiting(self) -> int:
        """Waiting sequences."""
        ...

    @property
    def num_blocks_used(self) -> int:
        """KV blocks that sequences own."""
        ...

    @property
    def num_unseen(self) -> int:
        """Requests sent to the replica that these counts do not include yet."""
        ...

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of the requests that these counts do not include yet."""
        ...


class CacheReader(Protocol):
    """The prefix cache of a replica."""

    def num_cached(self, request: Request) -> int:
        """Returns the number of cached tokens of a prompt, as of the last iteration that has begun."""
        ...


def _refuse(signals: NoSignals) -> NoReturn:
    raise RuntimeError("signals: the routing policy must declare reads_signals: ClassVar[bool] = True")


class NoSignals:
    """Load signals of a replica that no policy has declared to read: reading one raises RuntimeError."""

    num_running = num_waiting = num_blocks_used = num_unseen = num_unseen_tokens = property(_refuse)


class NoCacheView:
    """The cache of a replica that no policy has declared to read: reading it raises RuntimeError."""

    def num_cached(self, request: Request) -> int:
        """Raises RuntimeError."""
        raise RuntimeError("num_cached: the routing policy must declare reads_caches: ClassVar[bool] = True")


NO_SIGNALS = cast(LoadSignals, NoSignals())
NO_CACHE_VIEW: CacheReader = NoCacheView()
