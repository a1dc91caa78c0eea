"""Scales the rate of a workload (root key `load`), or its lengths (`prompt_scale`, `output_scale`).

The content of a prompt is scaled with its length: the id of its first k tokens becomes the id of its first
round(k scale) tokens. Prompts with a common prefix keep it, at the same share of their length, although
shortened prompts may lose the part in which they differ. An output that a later turn of a conversation
contains has there the length with which it was generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival, Source, SourceAround, Workload, WorkloadNotes
from sim.workload.chunks import Chunk, ChunkedSource, chunks_of, objects


def faster(source: Source, load: float) -> FasterSource:
    """Returns a source with `load` times the arrival rate of another one."""
    kind = FasterColumns if isinstance(source, ChunkedSource) else FasterSource
    return kind(source, load)


class FasterSource(SourceAround):
    """A source with the open-loop arrivals of another one at `load` times the rate.

    Deadlines, and the moments at which clients give up, keep their distance from the arrival, and think times
    between turns stay the same.
    """

    def __init__(self, source: Source, load: float) -> None:
        super().__init__(source)
        self.last_arrival_s = None if source.last_arrival_s is None else source.last_arrival_s / load
        self._load = load

    def _changed(self, arrival: Arrival) -> Arrival:
        request, at_s = arrival.request, arrival.time_s
        arrival_s = request.arrival_s / self._load
        due_s, gives_up_s = request.deadline_s, arrival.gives_up_s
        return arrival._replace(
            request=request._replace(
                arrival_s=arrival_s,
                deadline_s=None if due_s is None else due_s - request.arrival_s + arrival_s,
            ),
            time_s=None if at_s is None else at_s / self._load,
            gives_up_s=None if gives_up_s is None else gives_up_s - arrival.at_s * (1 - 1 / self._load),
        )

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return self._source.follow_ups(request, now, num_output_tokens)


class FasterColumns(FasterSource):
    """A `FasterSource` of a source with columns, which stay columns."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the same requests as columns."""
        for chunk in chunks_of(self._source):
            if chunk.made is not None:
                made = [self._changed(arrival) for arrival in chunk.made]
                yield replace(chunk, made=objects(made), at_s=np.array([arrival.at_s for arrival in made]))
                continue
            at_s, due_s = chunk.at_s / self._load, chunk.due_s()
            yield replace(chunk, at_s=at_s, deadline_s=None if due_s is None else due_s - chunk.at_s + at_s)


UNLIMITED = 1 << 60
"""Context limit of the other source, because only scaled lengths show which requests fit."""
CUT = "conversations with a first turn longer than the context"


class _InFlight(NamedTuple):
    """A request that was sent and has not ended."""

    original: Request
    num_original: int
    """Output tokens before scaling."""
    num_output_tokens: int
    """Output tokens after scaling."""


class LongerSource(SourceAround):
    """The traffic of a workload with prompts and outputs (and limits on them) scaled by the given factors.

    A request that then exceeds the context is clipped, the prompt first, as in `clip_to_context`; a
    conversation ends instead. Raises ValueError for traffic that cannot be generated, as the workload does.
    """

    def __init__(
        self, workload: Workload, *, seed: int, max_model_len: int, prompt_scale: float, output_scale: float
    ) -> None:
        super().__init__(workload.source(seed=seed, max_model_len=UNLIMITED))
        self._notes = self._source.notes
        self._max_model_len = max_model_len
        self._prompt_scale = prompt_scale
        self._output_scale = output_scale
        self._num_created = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._answers: dict[int, int] = {}  # content id of an output that a later prompt contains -> tokens

    @property
    def notes(self) -> WorkloadNotes:
        """Notes of the workload, and on what the scaled lengths have changed."""
        return self._notes

    def arrivals(self) -> Iterator[Arrival]:
        for arrival in self._source.arrivals():
            scaled = self._scaled(arrival)
            if scaled is None:
                self.notes.skip(CUT)
            else:
                yield scaled

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        ended = self._in_flight.pop(request.request_id)
        original = ended.original
        num_original = ended.num_original
        if num_output_tokens != ended.num_output_tokens:  # aborted or rejected
            num_original = _scaled(num_output_tokens, 1 / self._output_scale)
        if original.answer_id is not None:
            self._answers[original.answer_id] = num_output_tokens
        following = [self._scaled(a) for a in self._source.follow_ups(original, now, num_original)]
        sent = [arrival for arrival in following if arrival is not None]
        self.notes.num_conversations_cut += len(following) - len(sent)
        if not sent and original.answer_id is not None:
            for content in (original.answer_id, *(piece.content_id for piece in original.prompt.segments)):
                self._answers.pop(content, None)
        return sent

    def _scaled(self, arrival: Arrival) -> Arrival | None:
        """Returns the arrival with scaled lengths; None if a conversation has filled the context."""
        request, limit = arrival.request, self._max_model_len
        prompt = self._scaled_prompt(request.prompt)
        num_output_tokens = _scaled(arrival.num_output_tokens, self._output_scale)
        samples = tuple(_scaled(tokens, self._output_scale) for tokens in arrival.sample_tokens)
        if prompt.num_tokens + num_output_tokens > limit:
            if request.answer_id is not None:
                return None
            num_output_tokens = min(num_output_tokens, limit - 1)
            samples = tuple(min(tokens, limit - 1) for tokens in samples)
            prompt = _cut(prompt, limit - num_output_tokens)
            self.notes.num_clipped += 1
        max_tokens = request.max_tokens
        scaled = request._replace(
            request_id=self._num_created,
            prompt=prompt,
            max_tokens=None if max_tokens is None else _scaled(max_tokens, self._output_scale),
        )
        self._num_created += 1
        self._in_flight[scaled.request_id] = _InFlight(request, arrival.num_output_tokens, num_output_tokens)
        return arrival._replace(request=scaled, num_output_tokens=num_output_tokens, sample_tokens=samples)

    def _scaled_prompt(self, prompt: Prompt) -> Prompt:
        """Scales the segments of a prompt; the end of each depends only on what precedes it."""
        pieces: list[Segment] = []
        # Tokens so far: of the client, before scaling; of earlier outputs; of both, after scaling.
        num_own = num_quoted = end = 0
        num_left, num_pinned = prompt.num_tokens, 0
        for content, num_tokens in (*prompt.segments, (None, prompt.num_tokens)):
            num_here = min(num_tokens, num_left)
            before, num_left = prompt.num_tokens - num_left, num_left - num_here
            if content in self._answers:
                num_quoted += self._answers[content]
            else:
                if before < prompt.num_pinned:
                    pinned = min(num_here, prompt.num_pinned - before)
                    num_pinned = round((num_own + pinned) * self._prompt_scale) + num_quoted
                num_own += num_here
            start, end = end, round(num_own * self._prompt_scale) + num_quoted
            if content is not None and end > start:
                pieces.append(Segment(content, end - start))
        return Prompt(max(end, 1), tuple(pieces), min(num_pinned, max(end, 1)))


def _scaled(num_tokens: int, scale: float) -> int:
    """Scales a number of tokens; a positive number stays at least 1."""
    return max(1, round(num_tokens * scale)) if num_tokens else 0


def _cut(prompt: Prompt, num_tokens: int) -> Prompt:
    """Returns a prompt with the first num_tokens tokens."""
    pieces, num_left = [], num_tokens
    for content, length in prompt.segments:
        if num_left:
            pieces.append(Segment(content, min(length, num_left)))
            num_left -= pieces[-1].num_tokens
    return Prompt(num_tokens, tuple(pieces), min(prompt.num_pinned, num_tokens))
