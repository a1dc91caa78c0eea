"""Turns the prompts of requests into token ids, and checks what they name."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import numpy as np

from experiments.serve.backend import Backend, ServedModel, Tokenizer
from experiments.serve.errors import ApiError
from experiments.serve.http.fields import ChatFields, TokenizeFields

MAX_PROMPTS = 1024
"""Prompts of one request."""
LONG_CHARS = 50_000
"""Texts longer than this are encoded in a thread, so that other requests go on."""


def served_model(backend: Backend, name: str | None) -> ServedModel:
    """Returns the model that a request names; without a name, the first. Raises ApiError."""
    models = backend.models()
    if not name:
        return models[0]
    for model in models:
        if model.name == name:
            return model
    raise ApiError(f"The model `{name[:200]}` does not exist.", HTTPStatus.NOT_FOUND, "model")


async def prompts_of(
    prompt: str | list[Any], tokenizer: Tokenizer, max_model_len: int, name: str = "prompt"
) -> list[list[int]]:
    """Returns the token ids of each prompt of a completion. name: of the field. Raises ApiError."""
    many = [prompt] if isinstance(prompt, str) or set(map(type, prompt)) == {int} else prompt
    if not 1 <= len(many) <= MAX_PROMPTS:
        raise ApiError(f"{name}: must be 1 to {MAX_PROMPTS} prompts, found {len(many)}", param=name)
    found = []
    for each in many:
        if isinstance(each, str):
            token_ids = await encoded(each, tokenizer, max_model_len)
        else:
            token_ids = _checked(each, tokenizer.vocab_size, name)
        if not token_ids:
            raise ApiError(f"{name}: must not be empty", param=name)
        found.append(token_ids)
    return found


def _checked(token_ids: Any, vocab_size: int, name: str) -> list[int]:
    """Returns a prompt that is given as token ids. Raises ApiError."""
    if not isinstance(token_ids, list) or not set(map(type, token_ids)) <= {int}:
        raise ApiError(
            f"{name}: must be a text, a list of token ids, or a list of either; found {repr(token_ids)[:80]}",
            param=name,
        )
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            raise ApiError(
                f"{name}: token id {token_id}: must be >= 0 and < {vocab_size}, the size of the vocabulary",
                param=name,
            )
    return token_ids


async def chat_prompt_of(
    fields: ChatFields | TokenizeFields, model: ServedModel, tokenizer: Tokenizer
) -> list[int]:
    """Returns the token ids of a conversation, with those of its tools and images. Raises ApiError."""
    images: list[str] = []
    mark = f"\ue000{uuid4().hex}\ue000"  # no text of a client has it

    def mark_image(image: str) -> str:
        if model.tokens_per_image is None:
            raise ApiError("messages: this server takes no images; send text only", param="messages")
        images.append(image)
        return mark

    plain = [message.plain(mark_image) for message in fields.messages or ()]
    tools = [tool.model_dump(exclude_none=True) for tool in fields.tools]
    try:
        text = tokenizer.chat_prompt(plain, tools=tools, settings=fields.chat_template_kwargs)
    except ValueError as error:
        raise ApiError(f"messages: {error}", param="messages") from None
    parts = text.split(mark)
    num_image_tokens = len(images) * (model.tokens_per_image or 0)
    if len(parts) != len(images) + 1 or num_image_tokens > model.max_model_len:
        raise ApiError(
            f"messages: {len(images)} images have {num_image_tokens} tokens, and this model's maximum "
            f"context length is {model.max_model_len} tokens; send fewer images",
            param="messages",
        )
    tokens: list[int] = []
    for place, part in enumerate(parts):
        tokens += await encoded(part, tokenizer, model.max_model_len, add_special_tokens=False)
        if place < len(images):
            tokens += image_tokens(images[place], model.tokens_per_image or 0, tokenizer.vocab_size)
    return tokens


def image_tokens(image: str, num_tokens: int, vocab_size: int) -> list[int]:
    """Returns the tokens that stand for an image: those of equal addresses are equal, for prefix caches."""
    seed = sha256(image.encode("utf-8", "replace")).digest()
    return [int(each) for each in np.random.default_rng([*seed]).integers(0, vocab_size, num_tokens)]


async def encoded(
    text: str, tokenizer: Tokenizer, max_model_len: int, *, add_special_tokens: bool = True
) -> list[int]:
    """Returns the token ids of a text. Raises ApiError for one that cannot fit in the context."""
    longest = tokenizer.max_token_bytes
    if longest is not None and len(text) > longest * max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens, and the prompt has "
            f"{len(text)} characters; shorten the prompt",
            param="prompt",
        )
    if len(text) <= LONG_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
