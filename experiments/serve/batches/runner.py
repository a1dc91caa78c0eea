"""Runs batches. The completion window is the deadline of their requests, so that engines may let them wait.

With scheduling=online_batch, requests with a deadline are the batch class: online requests are served first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from experiments.serve.backend import Backend
from experiments.serve.batches.batch import Batch, Line, LineError, Outcome, read_lines
from experiments.serve.batches.store import FileStore
from experiments.serve.errors import ApiError
from experiments.serve.http.chat import chat_of
from experiments.serve.http.common import Completion
from experiments.serve.http.completions import completion_of
from experiments.serve.http.fields import ChatFields, CompletionFields, parse

MAX_BATCHES = 1000
"""Batches of one server."""
CONCURRENCY = 256
"""Requests of one batch that are in the engines at the same time."""
MAX_TRIES = 20
"""Times that a request is sent to a healthy server that refuses it with 503."""
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0

_LOG = logging.getLogger("windtunnel.serve")


async def _completion(backend: Backend, body: bytes) -> Completion:
    return await completion_of(parse(CompletionFields, body), backend, None)


async def _chat(backend: Backend, body: bytes) -> Completion:
    return await chat_of(parse(ChatFields, body), backend, None)


ENDPOINTS: dict[str, Callable[[Backend, bytes], Awaitable[Completion]]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
}
"""Reads the requests of a batch, by its endpoint."""


class Batches:
    """The batches of a server, and the tasks that run them.

    is_draining: whether the server drains, so that requests that have not begun wait for its end.
    """

    def __init__(self, backend: Backend, files: FileStore, is_draining: Callable[[], bool]) -> None:
        self._backend = backend
        self._files = files
        self._is_draining = is_draining
        self._batches: dict[str, Batch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closing = False

    @property
    def batches(self) -> list[Batch]:
        """All batches, the oldest first."""
        return list(self._batches.values())

    def get(self, batch_id: str) -> Batch:
        """Returns a batch. Raises ApiError if there is none with this id."""
        if batch_id not in self._batches:
            raise ApiError(f"No such Batch object: {batch_id[:100]}", HTTPStatus.NOT_FOUND, "id")
        return self._batches[batch_id]

    def add(self, batch: Batch) -> None:
        """Runs a new batch. Raises ApiError if its input does not exist, or there are too many batches."""
        content = self._files.get(batch.input_file_id).content
        if len(self._batches) >= MAX_BATCHES:
            raise ApiError(f"a server has at most {MAX_BATCHES} batches; start it again")
        self._batches[batch.batch_id] = batch
        task = asyncio.get_running_loop().create_task(self._run(batch, content))
        self._tasks[batch.batch_id] = task
        task.add_done_callback(partial(self._ended, batch))

    def cancel(self, batch: Batch) -> None:
        """Begins to cancel a batch. Raises ApiError if it has ended or is writing its results."""
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise ApiError(
                f"Cannot cancel a batch with status '{batch.status}'.", HTTPStatus.CONFLICT, "status"
            )
        if batch.status != "cancelling":
            batch.enter("cancelling")
            self._tasks[batch.batch_id].cancel()

    async def close(self) -> None:
        """Ends all batches as they are."""
        self._is_closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        del self._tasks[batch.batch_id]
        if batch.status == "cancelling":  # before it had begun to run
            batch.enter("cancelled")
        elif not task.cancelled() and task.exception() is not None:
            _LOG.error("A batch has failed because of a bug.", exc_info=task.exception())
            batch.enter("failed")

    async def _run(self, batch: Batch, content: bytes) -> None:
        """Runs a batch to its end; cancelled, it writes what it has."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + batch.window_s
        lines, batch.errors = await asyncio.to_thread(read_lines, content, batch.endpoint)
        if batch.errors:
            batch.enter("failed")
            return
        batch.num_requests = len(lines)
        batch.enter("in_progress")
        outcomes: list[Outcome | None] = [None] * len(lines)
        last, code = "completed", "batch_cancelled"
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._run_lines(batch, lines, outcomes, deadline_s)
            batch.enter("finalizing")
        except TimeoutError:
            last, code = "expired", "batch_expired"
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            last = "cancelled"
        self._write(batch, lines, outcomes, code)
        batch.enter("failed" if batch.errors else last)

    async def _run_lines(
        self, batch: Batch, lines: Sequence[Line], outcomes: list[Outcome | None], deadline_s: float
    ) -> None:
        """Fills in the outcomes of all requests, some of which run at the same time."""
        rest = iter(enumerate(lines))

        async def work(rest: Iterator[tuple[int, Line]]) -> None:
            for place, line in rest:
                if self._is_draining():
                    await asyncio.Event().wait()
                outcomes[place] = outcome = await self._outcome(batch, line, deadline_s)
                batch.count(outcome)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(CONCURRENCY, len(lines))):
                group.create_task(work(rest))

    async def _outcome(self, batch: Batch, line: Line, deadline_s: float) -> Outcome:
        """Returns the outcome of one request; while no replica serves, it waits."""
        delay_s, num_tries = FIRST_RETRY_S, 0
        while True:
            try:
                body = await self._answer(batch, line, deadline_s)
                return Outcome.of(line.custom_id, HTTPStatus.OK, body)
            except ApiError as error:
                num_tries += self._backend.unhealthy_because() is None
                if error.status is not HTTPStatus.SERVICE_UNAVAILABLE or num_tries >= MAX_TRIES:
                    return Outcome.of(line.custom_id, error.status, error.body())
            except Exception:
                _LOG.exception("A request of a batch has failed because of a bug.")
                failure = ApiError("The server failed.", HTTPStatus.INTERNAL_SERVER_ERROR)
                return Outcome.of(line.custom_id, failure.status, failure.body())
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)

    async def _answer(self, batch: Batch, line: Line, deadline_s: float) -> Any:
        """Returns the body of the response to a request. Raises ApiError."""
        completion = await ENDPOINTS[batch.endpoint](self._backend, line.body)
        if completion.fields.stream:
            raise ApiError("stream=true: must be false in a batch", param="stream")
        window_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        generations = [replace(each, window_s=window_s) for each in completion.generations]
        return await replace(completion, generations=generations).whole(self._backend)

    def _write(
        self, batch: Batch, lines: Sequence[Line], outcomes: Sequence[Outcome | None], code: str
    ) -> None:
        """Writes the output and the error file, in the order of the input; code: of requests not run."""
        message = "This request was not executed: the batch was cancelled or its window has passed."
        done = [
            outcome or Outcome.not_run(line.custom_id, code, message)
            for line, outcome in zip(lines, outcomes, strict=True)
        ]
        batch.num_failed = sum(not each.is_success for each in done)
        try:
            for is_success, name in ((True, "output"), (False, "error")):
                content = b"".join(each.line for each in done if each.is_success is is_success)
                if content:
                    stored = self._files.add(content, f"{batch.batch_id}_{name}.jsonl", "batch_output")
                    if is_success:
                        batch.output_file_id = stored.file_id
                    else:
                        batch.error_file_id = stored.file_id
        except ApiError as error:
            batch.errors.append(LineError("no_room", error.message))
