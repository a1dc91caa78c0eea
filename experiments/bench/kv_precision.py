"""Measures what KV in fewer bits does to a model's predictions.

    python -m experiments.bench.kv_precision FILE ...

Of the first tokens of each text file, it prints the perplexity, and the share of places at which the
likeliest next token is that of KV in the model's dtype. All tokens are computed as one prompt, and read the
quantised KV of those before them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import KV_DTYPES


class Predictions(NamedTuple):
    """Predictions of a text: its perplexity, and the likeliest next token at each place."""

    perplexity: float
    likeliest: list[int]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each file and type of KV."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.kv_precision", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text")
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file, or a folder")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each file")
    options = parser.parse_args(arguments)
    print("KV     file                 tokens  perplexity  same likeliest token")
    for file in options.files:
        text = file.read_text(encoding="utf-8")
        plain = None
        for kv in ("auto", *KV_DTYPES):
            found = predictions(options.model, text, options.tokens, kv)
            plain = plain or found
            same = sum(map(int.__eq__, plain.likeliest, found.likeliest)) / len(found.likeliest)
            num_tokens = len(found.likeliest) + 1
            print(f"{kv:5}  {file.name[:20]:20} {num_tokens:6}  {found.perplexity:10.2f}  {same:20.1%}")


def predictions(model: str | Architecture, text: str | list[int], num_tokens: int, kv: str) -> Predictions:
    """Returns a model's predictions of the tokens of a text after the first one. kv: kv_cache_dtype."""
    llm = LLM(model, device="cpu", kv_cache_dtype=kv, max_model_len=num_tokens + 1, progress=False)
    if isinstance(text, str):
        assert llm.tokenizer is not None
        text = llm.tokenizer.encode(text)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([text[:num_tokens]], params)
    assert output.prompt_logprobs is not None
    known = [each for each in output.prompt_logprobs if each is not None]
    perplexity = math.exp(-sum(each.logprob for each in known) / len(known))
    return Predictions(perplexity, [next(iter(each.top)) for each in known])


if __name__ == "__main__":
    main()
