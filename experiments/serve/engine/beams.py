"""Beam search of the real engine for the API: the parameters of a search, and its results as deltas."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from experiments.serve.backend import BeamSearch, Delta, Sampling
from experiments.serve.errors import ApiError
from realengine.serving.beams import BeamSampling, BeamSearchParams
from realengine.serving.llm import RequestOutput


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
