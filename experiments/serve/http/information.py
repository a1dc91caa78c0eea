"""Routes that tell about the server: models, health, version, load, and its tokenizer."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import version
from time import time

from aiohttp import web

from experiments.serve.backend import Backend
from experiments.serve.errors import ApiError
from experiments.serve.http.fields import DetokenizeFields, TokenizeFields, fields_of
from experiments.serve.http.prompts import chat_prompt_of, encoded, served_model

STARTED = int(time())


async def models(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Returns the base models and the loaded adapters (/v1/models)."""
    listed = [
        {
            "id": model.name,
            "object": "model",
            "created": STARTED,
            "owned_by": "windtunnel",
            "root": model.name,
            "parent": model.base,
            "max_model_len": model.max_model_len,
        }
        for model in backend.models()
    ]
    return web.json_response({"object": "list", "data": listed})


async def health(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Returns an empty body with status 200; raises ApiError (503) if no request would be served."""
    reason = backend.unhealthy_because()
    if reason is not None:
        raise ApiError(reason, HTTPStatus.SERVICE_UNAVAILABLE)
    return web.Response()


async def show_version(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Returns the version of windtunnel."""
    return web.json_response({"version": version("windtunnel")})


async def load(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Returns the number of outputs in progress."""
    return web.json_response({"server_load": backend.num_in_progress})


async def tokenize(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Returns the token ids of a prompt or of a conversation."""
    fields = await fields_of(request, TokenizeFields)
    model, tokenizer = served_model(backend, fields.model), backend.tokenizer
    if fields.messages is not None:
        tokens = await chat_prompt_of(fields, model, tokenizer)
    else:
        tokens = await encoded(
            fields.prompt or "",
            tokenizer,
            model.max_model_len,
            add_special_tokens=fields.add_special_tokens,
        )
    return web.json_response({"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens})


async def detokenize(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Returns the text of token ids."""
    fields = await fields_of(request, DetokenizeFields)
    served_model(backend, fields.model)
    return web.json_response({"prompt": backend.tokenizer.decode(fields.tokens, skip_special_tokens=False)})
