"""A request to a fleet, as the gateway and the reader of its outputs see it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from policies.core.request import Prompt, Request, Segment
from realengine.fleet.messages import Progress
from realengine.serving.answer import Answer, Output
from realengine.serving.beams import BeamSampling
from realengine.serving.content_names import chain_of
from realengine.serving.engine_thread import End, State
from realengine.serving.sampling_params import SamplingParams


class RefusedError(RuntimeError):
    """The gateway has refused a request, or its engines have died too often. retry_after_s: see `Refusal`."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class EngineLostError(RuntimeError):
    """The engine of a request has died after its reader had seen tokens, and the output begins again."""


class FleetRequest:
    """One request of a fleet: an arrival of the gateway, and a copy of what its engine has generated.

    stop_after: None, as the length of its output is not known.
    """

    stop_after = None

    def __init__(
        self,
        number: int,
        tokens: list[int],
        params: SamplingParams,
        *,
        request_id: int | str,
        priority: int,
        tenant: str,
        lora: str | None,
        cache_salt: str,
        is_final_only: bool,
        arrival_s: float,
        deadline_s: float | None,
        segments: tuple[Segment, ...],
        answer_id: int,
    ) -> None:
        self.number = number
        """Its id at the gateway and in the engines."""
        self.request_id: int | str = request_id
        """Its id for clients."""
        self.tokens = tokens
        self.params = params
        self.cache_salt = cache_salt
        self.is_final_only = is_final_only
        self.answer_id = answer_id
        self._chains: dict[int, Sequence[bytes]] = {}  # by block size
        self.request = Request(
            request_id=number,
            arrival_s=arrival_s,
            prompt=Prompt(len(tokens), segments),
            max_tokens=params.max_tokens,
            priority=priority,
            tenant=tenant,
            deadline_s=deadline_s,
            answer_id=answer_id if params.branching is None else None,
            branching=params.branching,
            adapter=lora,
        )
        self.state = State((End(),) * params.n)
        self.failure: Exception | None = None
        """The exception that its reader raises."""
        self.retry_after_s: float | None = None
        """When its last attempt failed: see `policies.admission.Refusal`."""
        self.has_reported = False
        """Whether its reader may have seen tokens."""
        self.news = asyncio.Event()
        self.answer = self._empty_answer()

    @property
    def has_ended(self) -> bool:
        """Returns whether nothing more comes."""
        return self.failure is not None or self.state.is_finished

    def chain(self, block_size: int) -> Sequence[bytes]:
        """Returns the hashes of the prompt up to the end of each of its full blocks."""
        if block_size not in self._chains:
            lora, salt = self.request.adapter, self.cache_salt
            self._chains[block_size] = chain_of(self.tokens, block_size, lora, salt)
        return self._chains[block_size]

    @property
    def outputs(self) -> list[Output]:
        """The outputs that its engines have generated."""
        return self.answer.outputs

    @property
    def known(self) -> Output | None:
        """The only output, as far as engines have generated it; None: nothing, or there are several."""
        if self.params.n > 1 or isinstance(self.params, BeamSampling) or not self.outputs[0].tokens:
            return None
        return self.outputs[0]

    def lose(self, failure: Exception) -> None:
        """Empties the outputs, which begin again; a reader that has seen tokens gets failure."""
        if self.has_reported:
            self.fail(failure)
        self.answer = self._empty_answer()

    def _empty_answer(self) -> Answer:
        logprobs = self.params.logprobs is not None
        outputs = [Output(index, logprobs=[] if logprobs else None) for index in range(self.params.n)]
        answer = Answer(
            self.number, self.tokens, self.params, outputs, self.request.adapter, cache_salt=self.cache_salt
        )
        answer.alive = list(outputs)
        return answer

    def grow(self, progress: Progress) -> int:
        """Takes what an engine has generated; returns the number of new tokens of the first output."""
        answer, num_before = self.answer, len(self.outputs[0].tokens)
        if progress.is_whole:
            answer.outputs = [Output(each.number) for each in progress.outputs]
            self.state = State((End(),) * len(answer.outputs))
            num_before = 0
        places = {output.index: place for place, output in enumerate(answer.outputs)}
        ends = list(self.state.ends)
        for each in progress.outputs:
            place = places[each.number]
            output = answer.outputs[place]
            output.tokens += each.tokens
            if each.logprobs is not None:
                output.logprobs = [*(output.logprobs or ()), *each.logprobs]
            output.finish_reason, output.stop_reason = each.finish_reason, each.stop_reason
            ends[place] = End(len(output.tokens), each.finish_reason, each.text)
        answer.error = progress.error
        if not num_before:
            answer.num_cached_tokens = progress.num_cached_tokens
        answer.drafts = progress.drafts
        if progress.prompt_logprobs is not None:
            answer.prompt_logprobs = progress.prompt_logprobs
        self._show(State(tuple(ends), progress.is_finished, progress.error))
        return len(answer.outputs[0].tokens) - num_before

    def _show(self, state: State) -> None:
        """Shows a state to the reader."""
        if state.is_finished or not self.is_final_only:
            self.state = state
            self.has_reported |= any(end.num_tokens for end in state.ends)
            self.news.set()

    def abort(self) -> None:
        """Ends the outputs as they are."""
        ends = (
            End(len(output.tokens), output.finish_reason or "aborted", end.text)
            for output, end in zip(self.outputs, self.state.ends, strict=True)
        )
        self._show(State(tuple(ends), is_finished=True))

    def fail(self, failure: Exception) -> None:
        """Ends the request with an exception for its reader."""
        if not self.has_ended:
            self.failure = failure
            self.news.set()
