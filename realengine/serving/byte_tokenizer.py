"""A tokenizer for models with random weights, which have none: a token per byte of text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from realengine.serving.tokenizer import CHATML, Tokenizer

NUM_BYTES = 256
SYSTEM = "You are a helpful assistant."


def byte_tokenizer(vocab_size: int, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """Returns a tokenizer whose first 256 tokens are the bytes; the others, which no text has, are words.

    Raises ValueError for a vocabulary without room for all bytes, ImportError without the package tokenizers.
    """
    if vocab_size < NUM_BYTES:
        raise ValueError(f"vocab_size={vocab_size}: must be >= {NUM_BYTES} for a token per byte")
    try:
        package: Any = import_module("tokenizers")
    except ImportError:
        raise ImportError("text needs the package tokenizers: pip install 'windtunnel[engine]'") from None
    letters = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how the alphabet of bytes writes a space
    words = [f"{space}t{number}" for number in range(NUM_BYTES, vocab_size)]
    vocab = {token: number for number, token in enumerate([*letters, *words])}
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    template = CHATML.replace("SYSTEM", SYSTEM)
    return Tokenizer(tokenizer, eos_token_ids=eos_token_ids, chat_template=template)
