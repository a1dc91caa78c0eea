"""Requests of the API as the real engine takes them, and its outputs as the API has them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields

from experiments.serve.backend import BeamSearch, Delta, Function, Sampling, Structure, TokenLogprob
from experiments.serve.errors import ApiError
from experiments.serve.http.tool_calls import CLOSE, OPEN
from realengine.serving.answer import TokenLogprobs
from realengine.serving.beams import BeamSampling, BeamSearchParams
from realengine.serving.forms import LAYOUT, FormError, Forms, StructuredOutputs
from realengine.serving.llm import RequestOutput
from realengine.serving.sampling_params import SamplingParams


def sampling_params(
    sampling: Sampling, vocab_size: int, form: StructuredOutputs | None = None
) -> SamplingParams:
    """Returns the engine's parameters for one output. Raises ValueError for one that it does not take.

    form: that the output must have; None: any. Stop tokens beyond the vocabulary, which are never drawn, are
    left out.
    """
    params = {each.name: getattr(sampling, each.name) for each in fields(sampling)}  # the names are the same
    params["stop_token_ids"] = tuple(token for token in sampling.stop_token_ids if token < vocab_size)
    return SamplingParams(structured_outputs=form, **params)


def beam_sampling(
    search: BeamSearch, sampling: Sampling, vocab_size: int, eos_token_ids: Collection[int]
) -> BeamSampling:
    """Returns the engine's parameters of a search. Raises ApiError for a width that it does not take."""
    try:
        params = BeamSearchParams(
            beam_width=search.width,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            length_penalty=search.length_penalty,
        )
    except ValueError as error:
        raise ApiError(f"use_beam_search with n={search.width}: {error}", param="n") from None
    return params.sampling(vocab_size, eos_token_ids)


def results_of(request: RequestOutput, eos_token_ids: Collection[int]) -> Iterator[Delta]:
    """Yields the outputs of a search that has ended, the best first, each as one delta.

    As in vLLM, an end-of-sequence token is not among the tokens of its output, but is its stop_reason.
    """
    for place, output in enumerate(request.outputs):
        tokens, stop = output.token_ids, None
        if output.finish_reason == "stop" and tokens and tokens[-1] in eos_token_ids:
            tokens, stop = tokens[:-1], tokens[-1]
        yield Delta(
            output.text,
            tokens,
            finish_reason="abort" if output.finish_reason == "aborted" else output.finish_reason,
            stop_reason=stop,
            num_cached_tokens=request.num_cached_tokens,
            place=place,
        )


def delta_of(request: RequestOutput, prompt_logprobs: Sequence[TokenLogprob] | None) -> Delta:
    """Returns the new part of a request's output."""
    output = request.outputs[0]
    reason = "abort" if output.finish_reason == "aborted" else output.finish_reason
    logprobs = () if output.logprobs is None else output.logprobs
    return Delta(
        output.text,
        output.token_ids,
        tuple(
            _logprob(token, each) for token, each in zip(output.token_ids, logprobs, strict=bool(logprobs))
        ),
        reason,
        output.stop_reason,
        request.num_cached_tokens,
        prompt_logprobs=prompt_logprobs,
    )


def prompt_logprobs(request: RequestOutput) -> list[TokenLogprob] | None:
    """Returns those of the prompt's tokens after the first; None if they are not wanted, or not all there."""
    known = request.prompt_logprobs
    if known is None:
        return None
    tokens = zip(request.prompt_token_ids[1:], known[1:], strict=True)
    found = [_logprob(token, each) for token, each in tokens if each is not None]
    return found if len(found) == len(known) - 1 else None


def _logprob(token: int, logprobs: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(token, logprobs.logprob, tuple(logprobs.top.items()))


def form_of(structure: Structure | None) -> StructuredOutputs | None:
    """Returns the form that an output must have; None: any, as that of one that may call tools or not."""
    if structure is None:
        return None
    if structure.kind == "tools":
        return StructuredOutputs(grammar=_call_grammar(structure.value)) if structure.must_call else None
    return StructuredOutputs(**{structure.kind: structure.value})


def check_functions(forms: Forms, functions: tuple[Function, ...]) -> None:
    """Raises FormError with the name of the first function whose parameters are no form."""
    for function in functions:
        try:
            forms.check(StructuredOutputs(json=_parameters(function)))
        except FormError as error:
            raise FormError(f"the parameters of the function {function.name}: {error}") from None


def _call_grammar(functions: tuple[Function, ...]) -> str:
    """Returns the grammar of one call in Hermes' form, as `ToolCallParser` reads it."""
    calls, rules = [], []
    for place, function in enumerate(functions):
        head = json.dumps(f'{OPEN}\n{{"name": "{function.name}", "arguments": ')
        calls.append(f"{head} arguments{place}")
        schema = json.dumps(_parameters(function) | {"x-guidance": LAYOUT}, ensure_ascii=False)
        rules.append(f"arguments{place}: %json {schema}")
    end = json.dumps(f"}}\n{CLOSE}")
    return "\n".join([f"start: ({' | '.join(calls)}) {end}", *rules])


def _parameters(function: Function) -> dict[str, object]:
    """Returns the schema of the arguments, which are an object."""
    schema = dict(function.schema) if isinstance(function.schema, dict) else {}
    return schema or {"type": "object"}
