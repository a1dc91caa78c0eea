"""Reads the input files of OpenAI's Batch API, which `vllm run-batch` takes, too: one request per line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sim.workload.distributions import Lognormal, require_positive, stream
from sim.workload.trace_columns import shown
from sim.workload.trace_reading import TextLengths
from sim.workload.trace_rows import TraceRow
from sim.workload.trace_tables import COUNT, Record, json_lines
from sim.workload.untimed_traces import UntimedTrace

LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields of a body with the limit of its output, in the order in which they count."""
BLOCK = 16
"""Tokens of a prompt that have one content id: a KV block."""
PROMPTS = ("messages", "prompt", "input")
IMAGES = "Images and other parts of prompts that are no text are not counted."


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAiBatch(UntimedTrace):
    """Lines with `custom_id`, `url` and the `body` of a request: messages, prompt or input, and a limit.

    The prompt is the text of the messages with the definitions of tools; equal beginnings of prompts are
    equal contents, by blocks of 16 tokens. Chat templates add tokens that are not counted. The output has the
    length of the request's limit, or is drawn from a lognormal distribution with output_mean and output_cv,
    and cut at the limit. tokenizer: a tokenizer.json that counts the tokens; None: 4 characters per token.
    """

    begins = "request"

    max_requests: int | None = None
    tokenizer: Path | None = None
    output_mean: float | None = None
    output_cv: float = 1.0

    def __post_init__(self) -> None:
        UntimedTrace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "max_requests", "output_mean", "output_cv")

    def max_rows(self) -> int | None:
        """Returns how many requests are replayed, the first ones; None: all."""
        return self.max_requests

    def rows(self, seed: int) -> Iterator[TraceRow]:
        """Yields the requests in the order of the file. Raises ValueError that names line and field."""
        lengths, rng = TextLengths(self.tokenizer), stream(seed, "batch outputs")
        begins_s = self.begins_s(seed, lambda: sum(1 for _ in self._records()))
        drawn = None if self.output_mean is None else Lognormal(mean=self.output_mean, cv=self.output_cv)
        remark = lengths.remark
        if drawn is None:
            remark += " Outputs are as long as their limits; workload.output_mean=TOKENS draws their lengths."
        has_other_parts = False
        for record in self._records():
            body = _body(record)
            text, has_others = _text(record, body)
            if has_others and not has_other_parts:
                has_other_parts, remark = True, f"{remark} {IMAGES}".strip()
            limit = _limit(record, body)
            if drawn is not None:
                length = max(1, round(float(drawn.from_normal(rng.standard_normal(1))[0])))
                length = length if limit is None else min(length, limit)
            elif limit is None:
                rule = "a limit of the output, max_tokens, or workload.output_mean=TOKENS"
                raise record.bad("body", rule, ", ".join(body))
            else:
                length = limit
            tokens = text if isinstance(text, list) else lengths.tokens(text)
            ids = (BLOCK, *_ids_of(tokens))
            yield TraceRow(record.number, next(begins_s), len(tokens), length, ids, remark=remark)
            remark = ""

    def _records(self) -> Iterator[Record]:
        return json_lines(self.path, ("custom_id", "body"))


def _body(record: Record) -> Mapping[str, Any]:
    """Returns the body of a request that generates one output. Raises ValueError."""
    body, url = record.values.get("body"), str(record.values.get("url", ""))
    if not isinstance(body, Mapping):
        raise record.bad("body", "an object with the body of a request", body)
    if url.endswith(("/embeddings", "/score", "/rerank", "/moderations")):
        raise record.bad("url", "a request that generates text", url)
    if body.get("n", 1) != 1:
        raise record.bad("body", "n=1, one output for each request", f"n={body['n']}")
    return body


def _limit(record: Record, body: Mapping[str, Any]) -> int | None:
    found = next(((name, body[name]) for name in LIMITS if body.get(name) is not None), None)
    if found is None:
        return None
    name, value = found
    if not COUNT.is_sound(value):
        raise record.bad(f"body.{name}", COUNT.text, value)
    limit: int = int(value)
    return limit


def _text(record: Record, body: Mapping[str, Any]) -> tuple[str | list[int], bool]:
    """Returns the prompt as a text, or as token ids, and whether it has parts that are neither.

    Raises ValueError.
    """
    name = next((each for each in PROMPTS if each in body), None)
    if name is None:
        raise record.bad("body", "messages, prompt or input", ", ".join(body))
    found = body[name]
    if name != "messages" and isinstance(found, list) and found and all(type(one) is int for one in found):
        return found, False
    tools = json.dumps(body["tools"], sort_keys=True) if body.get("tools") else ""
    if isinstance(found, str):
        return tools + found, False
    texts, has_others = [tools], False
    for place, message in enumerate(found if isinstance(found, list) else [None]):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                texts.append(text)
            elif isinstance(part, Mapping) or (part is None and isinstance(message, Mapping)):
                has_others = has_others or part is not None
            else:
                rule = "messages with a content, a text, or token ids"
                raise record.bad(f"body.{name}[{place}]", rule, shown(message))
    if not any(texts):
        raise record.bad(f"body.{name}", "a text", shown(found))
    return "\n".join(texts), has_others


def _ids_of(tokens: Sequence[object]) -> tuple[int, ...]:
    """Returns the content ids of blocks of tokens: equal for equal beginnings."""
    digest, ids = b"", []
    for start in range(0, len(tokens), BLOCK):
        digest = blake2b(digest + repr(tokens[start : start + BLOCK]).encode(), digest_size=8).digest()
        ids.append(int.from_bytes(digest, "little") >> 1)
    return tuple(ids)
