"""Reads the body of a request as the fields of its route."""

from __future__ import annotations

import time

from aiohttp import web

from experiments.serve.errors import ApiError
from experiments.serve.http.fields import Fields, RequestBody, parse

JSON = "application/json"


async def fields_of(request: web.Request, kind: type[Fields]) -> Fields:
    """Returns the fields of a JSON body. Raises ApiError.

    As in vLLM, the body must be declared as JSON. Pages of other sites cannot do this, so a browser lets none
    of them use a server on its machine.
    """
    if "Content-Type" not in request.headers or request.content_type != JSON:
        raise ApiError(f"Unsupported Media Type: Only '{JSON}' is allowed")
    body = await request.read()
    received_s = time.monotonic()  # before the body is parsed, which takes time
    fields = parse(kind, body)
    if isinstance(fields, RequestBody):
        fields.received_s = received_s
    return fields
