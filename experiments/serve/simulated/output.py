"""An output of a simulated fleet in progress, and the deltas that its client gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from http import HTTPStatus

from experiments.serve.backend import Delta, Generation
from experiments.serve.errors import ApiError, ConnectionReset
from experiments.serve.simulated.answers import Answer
from sim.cluster.live import Ended
from sim.records.requests import Status

FAILED = "the simulation has failed; the log of the server has the reason"


class Output:
    """An output in progress: what the simulation has reported of it so far."""

    __slots__ = (
        "answer",
        "began_work_s",
        "deliver",
        "due_s",
        "end",
        "is_failed",
        "is_lost",
        "is_streamed",
        "is_waiting",
        "news",
        "num_cached",
        "num_logprobs",
        "num_taken",
        "num_tokens",
    )

    def __init__(self, answer: Answer, generation: Generation) -> None:
        self.answer = answer
        self.is_streamed = generation.streamed
        self.num_logprobs = generation.sampling.logprobs
        self.deliver = generation.deliver
        self.is_waiting = False  # its client has all tokens so far
        self.num_taken = 0  # tokens that its client has
        self.is_failed = False  # with the simulation
        self.is_lost = False  # its client has tokens of an output that begins again
        self.num_tokens = 0
        self.due_s = 0.0  # simulated time of the first token that its client does not have
        self.began_work_s = 0.0  # see `Driver`
        self.num_cached = 0
        self.end: Ended | None = None
        self.news = asyncio.Event()

    def delta(self, finish_reason: str | None = None) -> Delta:
        """Returns the tokens that the client does not have."""
        answer, start, end = self.answer, self.num_taken, self.num_tokens
        return Delta(
            answer.text(start, end),
            answer.token_ids(start, end),
            () if self.num_logprobs is None else answer.logprobs(start, end, self.num_logprobs),
            finish_reason,
            answer.stop_reason if finish_reason == "stop" else None,
            self.num_cached,
        )

    def delivered(self) -> bool:
        """Delivers the tokens that the client does not have; returns whether it has them.

        If that fails, the task of the request meets the error, and other requests go on.
        """
        try:
            return self.deliver is not None and self.deliver(self.delta())
        except Exception:
            return False


async def deltas(output: Output) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of an output until its end, without those that are delivered meanwhile."""
    while True:
        output.is_waiting = True
        await output.news.wait()
        output.is_waiting = False
        output.news.clear()
        ended = output.end
        if output.is_failed:
            raise ApiError(FAILED, HTTPStatus.INTERNAL_SERVER_ERROR)
        if output.is_lost:
            raise ConnectionReset("its replica crashed")
        if ended is not None and ended.status is Status.rejected:
            raise _failure(ended, has_begun=output.num_taken > 0 and output.is_streamed)
        if output.num_tokens == output.num_taken and ended is None:
            continue
        delta = output.delta(None if ended is None else finish_reason(output.answer, ended))
        output.num_taken = output.num_tokens
        yield delta
        if ended is not None:
            return


def finish_reason(answer: Answer, ended: Ended) -> str:
    """Returns why an output ends, as its client is told: stop, length or abort."""
    if ended.status is Status.aborted:
        return "abort"
    if ended.reason == "length" or ended.num_output_tokens < answer.num_tokens:
        return "length"
    return answer.finish_reason


def _failure(ended: Ended, *, has_begun: bool) -> Exception:
    """Returns the error of a request that the fleet has rejected or lost."""
    if has_begun:
        return ConnectionReset(ended.reason or "the request was aborted")
    return ApiError(ended.reason or "the request was aborted", HTTPStatus.SERVICE_UNAVAILABLE)
