"""Builds the body of a request, with those of the wanted options that the server accepts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

OPTIONS: dict[str, str] = {
    "return_token_ids": "later turns quote outputs by text, or invent them",
    "continuous_usage_stats": "the tokens of a chunk are estimated from its text",
    "min_tokens": "outputs may be shorter than in the workload",
    "ignore_eos": "outputs may be shorter than in the workload",
    "seed": "",
    "temperature": "the server's default sampling is used",
    "stream_options": "the server does not report token counts",
}
"""Options beyond the API's core, and content it means if one is missing; they are dropped in this order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The form of requests that one server accepts.

    options: the names in `OPTIONS` that it accepts. limit: the field that limits the output tokens.
    """

    model: str
    api: str
    options: frozenset[str]
    seed: int = 0
    temperature: float = 0.0
    limit: str = "max_tokens"  # or max_completion_tokens, for newer chat models

    def without(self, message: str) -> Dialect | None:
        """Returns the dialect to try after a rejection with `message`; None if no option is left to drop."""
        if self.limit == "max_tokens" and "max_completion_tokens" in message:
            return replace(self, limit="max_completion_tokens")
        named = [option for option in OPTIONS if option in self.options and option in message]
        left = named or [option for option in OPTIONS if option in self.options]
        return replace(self, options=self.options - {left[0]}) if left else None

    def body(self, prompt: str, num_tokens: int | None, *, wants_ids: bool = False) -> bytes:
        """Returns the request's JSON.

        prompt: already JSON, so that a long one is encoded only once. num_tokens: limit of the output tokens,
        None for no limit. wants_ids: request the output's token ids, if the server has that option.
        """
        fields: dict[str, Any] = {"model": self.model, "stream": True}
        if num_tokens is not None:
            fields[self.limit] = num_tokens
            if "min_tokens" in self.options:
                fields["min_tokens"] = num_tokens
        for option, value in (("ignore_eos", True), ("seed", self.seed), ("temperature", self.temperature)):
            if option in self.options:
                fields[option] = value
        if "stream_options" in self.options:
            fields["stream_options"] = {"include_usage": True}
            if "continuous_usage_stats" in self.options:
                fields["stream_options"]["continuous_usage_stats"] = True
        if wants_ids and "return_token_ids" in self.options:
            fields["return_token_ids"] = True
        content = (
            f'"messages":[{{"role":"user","content":{prompt}}}]'
            if self.api == "chat"
            else f'"prompt":{prompt}'
        )
        return f"{json.dumps(fields)[:-1]},{content}}}".encode()
