"""The same requests with longer prompts or answers, or shorter ones: lengths are varied with nothing else.

A prompt stays the same content, stretched: what named its first k tokens names the first round(k scale), so
prompts that had a prefix in common still have it, and by as much of themselves (shorter ones may lose what
distinguished them). What a later turn of a conversation quotes of an answer is as long as that answer was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival, Source, Workload

UNLIMITED = 1 << 60
"""The context limit passed to the other source: what fits is known only once lengths are."""
CUT = "conversations whose first turn is longer than the context"


class _Sent(NamedTuple):
    """A request under way."""

    original: Request
    num_original: int
    """Tokens of its answer before scaling."""
    num_output_tokens: int


class LongerSource:
    """A workload's traffic, its prompts and its answers (and limits on them) so many times as long.

    What then exceeds the context is clipped, the prompt first, as in `clip_to_context`; a conversation ends.
    Raises ValueError for traffic that cannot be made, as the workload does.
    """

    def __init__(
        self, workload: Workload, *, seed: int, max_model_len: int, prompt_scale: float, output_scale: float
    ) -> None:
        source: Source = workload.source(seed=seed, max_model_len=UNLIMITED)
        self.num_requests = source.num_requests  # at most: conversations may end earlier
        self.last_arrival_s = source.last_arrival_s
        self.patience_s = source.patience_s
        self.notes = source.notes
        self._source = source
        self._max_model_len = max_model_len
        self._prompt_scale = prompt_scale
        self._output_scale = output_scale
        self._num_created = 0
        self._under_way: dict[int, _Sent] = {}
        self._answers: dict[int, int] = {}  # content of an answer that may be quoted -> its tokens

    def arrivals(self) -> Iterator[Arrival]:
        for arrival in self._source.arrivals():
            made = self._made(arrival)
            if made is None:
                self.notes.skip(CUT)
            else:
                yield made

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        sent = self._under_way.pop(request.request_id)
        original = sent.original
        num_original = sent.num_original
        if num_output_tokens != sent.num_output_tokens:  # cut short, or refused
            num_original = _scaled(num_output_tokens, 1 / self._output_scale)
        if original.answer_id is not None:
            self._answers[original.answer_id] = num_output_tokens
        arrival = self._source.follow_up(original, now, num_original)
        made = None if arrival is None else self._made(arrival)
        if arrival is not None and made is None:
            self.notes.num_conversations_cut += 1
        if made is None and original.answer_id is not None:
            for content in (original.answer_id, *(piece.content_id for piece in original.prompt.segments)):
                self._answers.pop(content, None)
        return made

    def _made(self, arrival: Arrival) -> Arrival | None:
        """The arrival with its new lengths; None where a conversation has filled the context."""
        request, limit = arrival.request, self._max_model_len
        prompt = self._stretched(request.prompt)
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
        made = request._replace(
            request_id=self._num_created,
            prompt=prompt,
            max_tokens=None if max_tokens is None else _scaled(max_tokens, self._output_scale),
        )
        self._num_created += 1
        self._under_way[made.request_id] = _Sent(request, arrival.num_output_tokens, num_output_tokens)
        return arrival._replace(request=made, num_output_tokens=num_output_tokens, sample_tokens=samples)

    def _stretched(self, prompt: Prompt) -> Prompt:
        """With its pieces where they are then; each depends on what stands before it alone."""
        pieces: list[Segment] = []
        num_own = num_quoted = end = (
            0  # tokens so far: of clients, before scaling; of answers; of both, after
        )
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
    """At least one token of what has one."""
    return max(1, round(num_tokens * scale)) if num_tokens else 0


def _cut(prompt: Prompt, num_tokens: int) -> Prompt:
    """Its first tokens."""
    pieces, num_left = [], num_tokens
    for content, length in prompt.segments:
        if num_left:
            pieces.append(Segment(content, min(length, num_left)))
            num_left -= pieces[-1].num_tokens
    return Prompt(num_tokens, tuple(pieces), min(prompt.num_pinned, num_tokens))
