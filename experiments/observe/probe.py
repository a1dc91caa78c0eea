"""Finds out before the load: the served models, the accepted options, and the tokens of a text."""

from __future__ import annotations

import time
from dataclasses import dataclass

from experiments.observe.dialect import OPTIONS, Dialect
from experiments.observe.endpoint import Endpoint, context_of, served_model
from experiments.observe.prompts import Prompts, TextLength, TextPrompts, TokenPrompts, text_length
from experiments.observe.reply import Reply
from experiments.observe.settings import ObserveSettings
from policies.core.request import Prompt, Request
from sim.settings.errors import ConfigError
from sim.workload.sessions import Conversation

NUM_TOKENS = 4
FEW, MANY = 16, 64
SMALL_VOCABULARY = (100, 400)
"""Token ids for toy models, whose vocabularies are smaller than `ObserveSettings.token_ids`."""
TEXT_MARGIN = 64
"""Tokens of the context that stay free, because a text's length in tokens is only approximate."""
EXACT = ("min_tokens", "ignore_eos")
NOT_UNDERSTOOD = (400, 422)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """The result of the probe. max_model_len: limit of prompt plus output tokens. notes: for the user."""

    dialect: Dialect
    prompts: Prompts
    max_model_len: int
    notes: tuple[str, ...]


async def probe(endpoint: Endpoint, settings: ObserveSettings) -> Probed:
    """Sends small requests until one is answered as wanted. Raises ConfigError if none can be."""
    models = await endpoint.models()
    name = served_model(settings, models)
    prober = _Prober(endpoint, settings, name)
    context = context_of(settings, models.get(name))
    prompts: Prompts | None = await prober.with_token_ids()
    if prompts is None:
        prompts = await prober.with_text()
        context = max(context - TEXT_MARGIN, context // 2)
    return Probed(
        dialect=prober.dialect,
        prompts=prompts,
        max_model_len=context,
        notes=(*prober.notes, *prober.lacks()),
    )


class _Prober:
    """Sends small requests and remembers the accepted options."""

    def __init__(self, endpoint: Endpoint, settings: ObserveSettings, model: str) -> None:
        self._endpoint = endpoint
        self._settings = settings
        unwanted = set() if settings.exact_output else set(EXACT)
        if not isinstance(settings.workload, Conversation):
            unwanted.add("return_token_ids")  # no later prompt contains an output
        self._wished = frozenset(OPTIONS) - unwanted
        self._first = Dialect(
            model=model,
            api=settings.api,
            options=self._wished,
            seed=settings.seed,
            temperature=settings.temperature,
        )
        self.dialect = self._first
        self.notes: list[str] = []
        self._num_answered = NUM_TOKENS

    async def with_token_ids(self) -> Prompts | None:
        """Returns prompts of token ids; None if the server rejects them or the settings do not want them."""
        settings = self._settings
        if settings.api == "chat" or settings.prompts == "text":
            return None
        reply = None
        for low, end in dict.fromkeys((settings.token_ids, SMALL_VOCABULARY)):
            prompts = TokenPrompts(seed=settings.seed, low=low, end=end)
            reply = await self._ask(prompts.write(_probe_request(FEW)))
            if not reply.error:
                if (low, end) != settings.token_ids:
                    self.notes.append(
                        f"The server has a small vocabulary: token ids from {low} to {end - 1} were sent."
                    )
                return prompts
        if settings.prompts == "token_ids":
            assert reply is not None
            raise ConfigError(
                f"prompts=token_ids: the server rejects them ({reply.error}); choose prompts=auto or text"
            )
        return None

    async def with_text(self) -> Prompts:
        """Returns prompts of words, with the tokens per word measured by two requests."""
        counted = []
        for num_words in (FEW, MANY):
            words = TextPrompts(seed=self._settings.seed, length=TextLength())
            reply = await self._ask(words.write(_probe_request(num_words)))
            if reply.error:
                raise ConfigError(
                    f"url={self._settings.url}: the server rejects a plain request: {reply.error}"
                )
            if reply.prompt_tokens is not None:
                counted.append((num_words, reply.prompt_tokens))
        if len(counted) < 2:
            self.notes.append("The server does not report prompt tokens: one token per word was assumed.")
            return TextPrompts(seed=self._settings.seed, length=TextLength())
        length = text_length(*counted)
        self.notes.append(
            f"Prompts are words of {length.tokens_per_word:.3g} tokens each plus "
            f"{length.overhead_tokens:.0f} tokens of overhead, as counted by the server; lengths are "
            "accurate to about one word."
        )
        return TextPrompts(seed=self._settings.seed, length=length)

    def lacks(self) -> list[str]:
        """Returns notes on what the server does not support."""
        refused = [name for name in OPTIONS if name in self._wished - self.dialect.options]
        found = []
        if refused:
            meaning = "; ".join(dict.fromkeys(OPTIONS[name] for name in refused if OPTIONS[name]))
            found.append(
                f"The server does not support {', '.join(refused)}{f': {meaning}' if meaning else ''}."
            )
        if self._settings.exact_output and self._num_answered != NUM_TOKENS:
            found.append(
                f"The server returned {self._num_answered} of {NUM_TOKENS} requested tokens: output lengths "
                "are not exact."
            )
        return found

    async def _ask(self, prompt: str) -> Reply:
        """Sends one small request with fewer and fewer options until the server accepts it.

        Returns the last reply. Raises ConfigError if other options would not help.
        """
        dialect: Dialect | None = self._first
        while dialect is not None:
            reply = Reply(request=_probe_request(1), num_asked=NUM_TOKENS, due_s=0.0)
            await self._endpoint.send(
                dialect.body(prompt, NUM_TOKENS, wants_ids=True), reply, time.perf_counter
            )
            if not reply.error:
                self.dialect, self._num_answered = dialect, reply.num_tokens
                return reply
            if reply.http_status not in NOT_UNDERSTOOD:
                raise ConfigError(self._error_message(reply))
            if "vocab" in reply.error:
                return reply
            dialect = dialect.without(reply.error)
        return reply

    def _error_message(self, reply: Reply) -> str:
        """Returns the message for an error that no other options would mend."""
        settings, status = self._settings, reply.http_status
        where = f"url={settings.url}"
        if status in (401, 403):
            return f"{where}: {self._endpoint.key_wanted(status)}"
        if status == 404:
            other = "chat" if settings.api == "completions" else "completions"
            return (
                f"api={settings.api}: the server at {settings.url} does not have it ({reply.error}); try "
                f"api={other}"
            )
        if not reply.is_stream:
            return f"{where}: the server does not stream its response, so TTFT and TPOT cannot be measured"
        if reply.lost:
            return f"{where}: a request for {NUM_TOKENS} output tokens failed: {reply.error}"
        return f"{where}: a request for {NUM_TOKENS} output tokens returned status {status}: {reply.error}"


def _probe_request(num_tokens: int) -> Request:
    return Request(0, 0.0, Prompt(num_tokens))
