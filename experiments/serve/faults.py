"""Faults that single requests ask for in a header, to test how a client or a router takes them.

    X-Fault: status=503             the request is answered with this status
    X-Fault: reset                  its connection is cut at once
    X-Fault: reset_after=5          its connection is cut once the back end has generated 5 tokens
    X-Fault: stall_after=5          nothing is sent after 5 tokens, and the connection stays open
    X-Fault: delay=2.5              it is taken 2.5 s late
    X-Fault: slow=3                 all its tokens take three times as long
    X-Fault: delay=1, reset_after=5 several faults

Tokens count for each output; a stream sends all tokens that are ready in one event, so some more may be sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from typing import Annotated

from aiohttp import web
from aiohttp.typedefs import Handler

from experiments.serve.backend import BackendLayer, Delta, Generation
from experiments.serve.errors import ApiError, ConnectionReset
from fieldlimits import Checked, Ge, Le, check

HEADER = "X-Fault"
MAX_DELAY_S = 3600.0
MAX_FACTOR = 1000.0

_fault: ContextVar[Fault | None] = ContextVar("fault", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault(Checked):
    """The faults of one request. Raises ValueError for a value out of range."""

    status: int | None = None
    reset: bool = False
    reset_after: int | None = None
    stall_after: int | None = None
    delay: Annotated[float, Ge(0), Le(MAX_DELAY_S)] = 0.0
    slow: Annotated[float, Ge(1), Le(MAX_FACTOR)] = 1.0

    def __post_init__(self) -> None:
        check(self)
        if self.status is not None and self.status not in [each.value for each in HTTPStatus if each >= 400]:
            raise ValueError(f"status={self.status}: must be an HTTP status from 400 on")
        for name in ("reset_after", "stall_after"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be >= 0 tokens")

    @classmethod
    def of(cls, text: str) -> Fault:
        """Reads the value of the header. Raises ApiError."""
        kinds = {each.name: float if "float" in str(each.type) else int for each in fields(cls)}
        given: dict[str, float | bool] = {}
        try:
            for part in text.split(","):
                name, equals, value = part.strip().partition("=")
                if name not in kinds:
                    raise ValueError(f"{name[:40]}: must be one of {', '.join(kinds)}")
                if bool(equals) == (name == "reset"):
                    raise ValueError(f"{name}: {'takes no value' if equals else f'needs a value: {name}=1'}")
                given[name] = _number(name, value, kinds[name]) if equals else True
            return cls(**given)  # type: ignore[arg-type]
        except ValueError as error:
            raise ApiError(f"{HEADER}: {error}", param=HEADER) from None


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    """Returns the number in a text. Raises ValueError."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}={text[:40]}: must be a {'whole ' * (kind is int)}number") from None


@web.middleware
async def fault_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Performs the faults before a request is taken, and notes the others for `FaultyBackend`."""
    text = request.headers.get(HEADER)
    if text is None:
        return await handler(request)
    fault = Fault.of(text)
    if fault.delay:
        await asyncio.sleep(fault.delay)
    if fault.reset:
        raise ConnectionReset
    if fault.status is not None:
        raise ApiError(f"{HEADER} asks for this error", HTTPStatus(fault.status))
    before = _fault.set(fault)
    try:
        return await handler(request)
    finally:
        _fault.reset(before)


class FaultyBackend(BackendLayer):
    """A back end, in the outputs of which the faults of their requests occur."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        fault = _fault.get()
        if fault is None:
            return self._backend.generate(generation)
        return _faulty(self._backend.generate(replace(generation, deliver=None)), fault)


async def _faulty(deltas: AsyncGenerator[Delta, None], fault: Fault) -> AsyncGenerator[Delta, None]:
    num_tokens = 0
    async with aclosing(deltas if fault.slow == 1 else _slower(deltas, fault.slow)) as source:
        await _fail_if_due(fault, num_tokens)
        async for delta in source:
            num_tokens += len(delta.token_ids)
            yield delta
            await _fail_if_due(fault, num_tokens)


async def _fail_if_due(fault: Fault, num_tokens: int) -> None:
    """Raises ConnectionReset, or never returns, if a fault is due after so many tokens."""
    if fault.reset_after is not None and num_tokens >= fault.reset_after:
        raise ConnectionReset
    if fault.stall_after is not None and num_tokens >= fault.stall_after:
        await asyncio.Event().wait()


async def _slower(deltas: AsyncGenerator[Delta, None], factor: float) -> AsyncGenerator[Delta, None]:
    """Yields each delta `factor` times as long after the start as it comes; they wait in a queue."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    queue: asyncio.Queue[tuple[float, Delta] | None] = asyncio.Queue()

    async def collect() -> None:
        try:
            async with aclosing(deltas) as source:
                async for delta in source:
                    queue.put_nowait((loop.time(), delta))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(collect())
    try:
        while (item := await queue.get()) is not None:
            came_s, delta = item
            await asyncio.sleep(start_s + factor * (came_s - start_s) - loop.time())
            yield delta
        await task  # raises the error that has ended the output
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
