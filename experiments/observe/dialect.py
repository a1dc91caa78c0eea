"""The body of a request, with as many of the wished-for options as the server takes."""

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
"""What is asked for beyond the API's core, and what its absence means; given up in this order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How one server wants to be asked. options: those of `OPTIONS` that it takes."""

    model: str
    api: str
    options: frozenset[str]
    seed: int = 0
    temperature: float = 0.0
    limit: str = "max_tokens"  # newer chat models: max_completion_tokens

    def without(self, message: str) -> Dialect | None:
        """The dialect to try when this one was refused with that message; None if nothing is left to drop."""
        if self.limit == "max_tokens" and "max_completion_tokens" in message:
            return replace(self, limit="max_completion_tokens")
        named = [option for option in OPTIONS if option in self.options and option in message]
        left = named or [option for option in OPTIONS if option in self.options]
        return replace(self, options=self.options - {left[0]}) if left else None

    def body(self, prompt: str, num_tokens: int | None, *, wants_ids: bool = False) -> bytes:
        """The request's JSON; prompt: JSON already, so that a long one is written once.

        num_tokens: of the answer, null for no limit; wants_ids: its token ids are of use.
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
        what = (
            f'"messages":[{{"role":"user","content":{prompt}}}]'
            if self.api == "chat"
            else f'"prompt":{prompt}'
        )
        return f"{json.dumps(fields)[:-1]},{what}}}".encode()
