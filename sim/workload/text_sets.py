"""Reads data sets of conversations as texts: ShareGPT. They have no times; requests come by `arrivals`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from sim.workload.arrivals import ArrivalProcess, ClosedLoop, arrival_chunks_s
from sim.workload.base import Source
from sim.workload.checked_traces import checked_once
from sim.workload.checks import require_positive
from sim.workload.json_elements import objects_in
from sim.workload.session_pool import in_a_loop
from sim.workload.streams import stream
from sim.workload.text_lengths import TextLengths
from sim.workload.trace_blocks import TraceRow, blocks_of_rows
from sim.workload.trace_files import require_file, shown
from sim.workload.trace_source import TraceSource, Window

MESSAGES = ("conversations", "conversation", "messages")
SENDER, TEXT = ("from", "role"), ("value", "content")
ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
NO_ANSWER = "no answer, or an empty one"
WANTED = "a conversation with a list of messages (conversations: from, value)"
MAX_CONVERSATIONS = 1 << 40
"""Conversations for which times can be drawn: more than any file has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareGptJson:
    """ShareGPT: objects with `conversations`, a list of messages (`from`, `value`); one request for each.

    As with `vllm bench serve --dataset-name sharegpt`, the prompt is what comes before the first answer, and
    the output has the answer's length; later turns are not replayed. Unlike there, short and long requests
    stay, and the order is that of the file. Conversations without an answer are counted and left out.
    tokenizer: a tokenizer.json that counts the tokens; None: 4 characters per token.
    """

    path: Path
    arrivals: ArrivalProcess | ClosedLoop
    max_requests: int | None = None
    tokenizer: Path | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", Path(self.tokenizer).expanduser())
        require_positive(self, "max_requests", "patience_s")
        require_file(self.path)

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the requests in the order of the file, at the times or in the closed loop of `arrivals`."""
        requests = checked_once(
            self.path,
            (self, seed, max_model_len),
            lambda: TraceSource(
                self.path,
                lambda: blocks_of_rows(self._rows(seed)),
                window=Window(0.0, None, self.max_requests),
                segments=lambda content_ids, num_tokens: (),
                max_model_len=max_model_len,
                patience_s=self.patience_s,
                time_digits=None,
            ),
        )
        return in_a_loop(requests, self.arrivals, seed=seed, duration_s=None)

    def _rows(self, seed: int) -> Iterator[TraceRow]:
        lengths = TextLengths(self.tokenizer)
        times_s = self._times_s(seed)
        remark, at_s = lengths.remark, 0.0
        for number, found in objects_in(self.path, WANTED):
            texts = first_exchange(self.path, number, found)
            if texts is None:
                yield TraceRow(number, at_s, 0, 0, remark=remark, skip_reason=NO_ANSWER)
            else:
                next_s = next(times_s, None)
                if next_s is None:
                    raise ValueError(f"arrivals: must have a time for each request, and ends at {at_s:g} s")
                at_s = next_s
                yield TraceRow(number, at_s, lengths(texts[0]), lengths(texts[1]), remark=remark)
            remark = ""

    def _times_s(self, seed: int) -> Iterator[float]:
        if isinstance(self.arrivals, ClosedLoop):
            yield from repeat(0.0)
            return
        num_requests = self.max_requests or MAX_CONVERSATIONS
        if not hasattr(self.arrivals, "chunks_s") and self.max_requests is None:
            num_requests = sum(1 for _ in objects_in(self.path, WANTED))
        rng = stream(seed, "arrivals")
        for chunk_s in arrival_chunks_s(self.arrivals, rng, num_requests=num_requests, duration_s=None):
            yield from chunk_s.tolist()


def first_exchange(path: Path, number: int, found: dict[str, Any]) -> tuple[str, str] | None:
    """Returns what comes before the first answer of a conversation, and the answer; None if one is empty.

    Raises ValueError that names the element and its key.
    """
    key = next((name for name in MESSAGES if name in found), None)
    if key is None:
        raise ValueError(
            f"{path}: element {number}: no key {MESSAGES[0]}; expected {WANTED}, "
            f"found {shown(', '.join(found), 200)}"
        )
    messages = found[key]
    if not isinstance(messages, list):
        raise ValueError(
            f"{path}: element {number}: {key}: expected a list of messages, found {shown(messages)}"
        )
    before: list[str] = []
    for place, message in enumerate(messages):
        sender, text = (_field(message, names) for names in (SENDER, TEXT))
        if not isinstance(sender, str) or not isinstance(text, str):
            raise ValueError(
                f"{path}: element {number}: {key}[{place}]: expected a message with the texts from and "
                f"value, found {shown(message)}"
            )
        if sender.lower() in ANSWERS and any(before):
            return ("\n".join(before), text) if text else None
        before.append(text)
    return None


def _field(message: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(message, dict):
        return None
    return next((message[name] for name in names if name in message), None)
