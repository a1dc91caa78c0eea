"""Turns what a client sends into a request of the core: every field that policies may read is checked here.

A field of another type would otherwise fail in the middle of a policy, which orders and groups all requests
by them.
"""

from __future__ import annotations

from policies.core.engine import EngineCore
from policies.core.request import Prompt, Request
from realengine.serving.answer import Answer, Output
from realengine.serving.beams import BeamAnswer, BeamSampling
from realengine.serving.content_names import ContentNames
from realengine.serving.forms import Forms
from realengine.serving.sampling_params import SamplingParams, check_vocabulary, is_number, is_whole
from realengine.serving.stop_strings import WatchedText
from realengine.serving.tokenizer import Tokenizer

MAX_PRIORITY = 1 << 31
"""Priorities beyond it are refused, because policies compute with them in floating point."""
MAX_NAME = 4096
"""Longest text, in characters, that names a tenant or salts a cache."""


class Intake:
    """Creates answers and requests. The other arguments are those of `Engine`.

    names: identifies the content of prompts for caches.
    """

    def __init__(
        self,
        core: EngineCore,
        names: ContentNames,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        forms: Forms,
    ) -> None:
        self._core = core
        self._names = names
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._forms = forms

    def answer(
        self,
        request_id: int,
        prompt_tokens: list[int],
        params: SamplingParams,
        lora: str | None,
        cache_salt: str,
    ) -> Answer:
        """Returns the empty answer of a request that is not checked yet. Raises ValueError for no params."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r}: must be SamplingParams")
        logprobs = params.logprobs is not None
        outputs = [Output(index, logprobs=[] if logprobs else None) for index in range(params.n)]
        answer = Answer(request_id, list(prompt_tokens), params, outputs, lora, cache_salt=cache_salt)
        answer.alive = list(outputs)
        if params.prompt_logprobs is not None:
            answer.prompt_logprobs = [None] * len(prompt_tokens)
        own_stops = frozenset(params.stop_token_ids)
        answer.stop_tokens = own_stops if params.ignore_eos else own_stops | self._eos_token_ids
        if isinstance(params, BeamSampling):
            return BeamAnswer.of(answer, self._eos_token_ids)
        return answer

    def request(
        self, answer: Answer, priority: int, tenant: str, arrival_s: float, deadline_s: float | None
    ) -> Request:
        """Returns the checked request of an answer, and names the content of its prompt.

        Raises ValueError with the field, its value and what is allowed, and RejectedError if it can never be
        served.
        """
        params, lora = answer.params, answer.lora
        check_fields(priority, tenant, arrival_s, deadline_s, lora, answer.cache_salt)
        self._watch(answer)
        check_vocabulary(answer.prompt_tokens, params, self._vocab_size)
        if params.structured_outputs is not None:
            for output in answer.outputs:
                output.form = self._forms.begin(params.structured_outputs, output)
        if params.n > 1 and not self._core.block_pool.shares_branches:
            raise ValueError(f"n={params.n}: caching.shares_branches=false works in simulations only")
        answer.segments = self._names.name(
            answer.prompt_tokens, lora, answer.cache_salt, as_new=params.prompt_logprobs is not None
        )
        answer.answer_id = self._names.new_id()
        request = Request(
            request_id=answer.request_id,
            arrival_s=arrival_s,
            prompt=Prompt(len(answer.prompt_tokens), answer.segments),
            max_tokens=params.max_tokens,
            priority=priority,
            tenant=tenant,
            deadline_s=deadline_s,
            answer_id=answer.answer_id if params.branching is None else None,
            branching=params.branching,
            adapter=lora,
        )
        self._core.bounds_of(request)
        return request

    def _watch(self, answer: Answer) -> None:
        """Watches for the request's stop strings in its outputs, if it has any."""
        if not answer.params.stop:
            return
        if self._tokenizer is None:
            raise ValueError("stop: the model has no tokenizer; use stop_token_ids")
        for output in answer.outputs:
            output.watched = WatchedText(self._tokenizer, answer.params.stop, self._eos_token_ids)


def check_fields(
    priority: object,
    tenant: object,
    arrival_s: object,
    deadline_s: object,
    lora: object,
    cache_salt: object,
) -> None:
    """Raises ValueError unless the fields of a request have their types and ranges."""
    checks = (
        (
            "priority",
            priority,
            isinstance(priority, int) and is_whole(priority) and abs(priority) <= MAX_PRIORITY,
            f"a whole number >= -{MAX_PRIORITY} and <= {MAX_PRIORITY}",
        ),
        ("tenant", tenant, _is_name(tenant), f"a text of at most {MAX_NAME} characters"),
        ("arrival_s", arrival_s, is_number(arrival_s), "a finite number of seconds"),
        (
            "deadline_s",
            deadline_s,
            deadline_s is None or is_number(deadline_s),
            "a finite number of seconds, or None",
        ),
        ("lora", lora, lora is None or _is_name(lora), "the name of an adapter, or None"),
        ("cache_salt", cache_salt, _is_name(cache_salt), f"a text of at most {MAX_NAME} characters"),
    )
    for name, value, holds, allowed in checks:
        if not holds:
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            raise ValueError(f"{name}={shown}: must be {allowed}")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME
