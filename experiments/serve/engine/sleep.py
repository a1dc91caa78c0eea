"""The sleep mode of the real engine, for the routes of the server.

Requests that come while it sleeps wait for the wake-up, as in vLLM. Its memory comes back as a whole, so it
sleeps until all parts have been woken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from http import HTTPStatus

from experiments.serve.engine.backend import EngineBackend
from experiments.serve.errors import ApiError
from experiments.serve.http.control import PARTS, Mode, Part


class EngineSleep:
    """Puts the engine of a back end to sleep, and wakes it: a `SleepControl`."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        self._asleep: set[Part] = set()
        self._changing = asyncio.Lock()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    async def sleep(self, level: int, mode: Mode) -> None:
        """Sleeps once no request is in progress; an engine that sleeps already is left as it is."""
        async with self._changing:
            if not self._asleep:
                llm = self._backend.llm()
                self._asleep.update(PARTS)
                await llm.sleep(level, mode)

    async def wake_up(self, parts: Collection[Part]) -> None:
        """Wakes parts, with the last of them the engine. Raises ApiError if its memory is not free."""
        async with self._changing:
            left = self._asleep.difference(parts)
            if self._asleep and not left:
                try:
                    await self._backend.llm().wake_up()
                except (ValueError, RuntimeError) as error:
                    raise ApiError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from None
            self._asleep = left
