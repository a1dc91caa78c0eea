"""The HTTP application: its routes, its errors and its key."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

from aiohttp import typedefs, web

from experiments.serve.backend import Backend
from experiments.serve.errors import FAILED, MAX_REASON_CHARS, ApiError, ConnectionReset
from experiments.serve.http import information
from experiments.serve.http.chat import chat
from experiments.serve.http.completions import complete
from experiments.serve.http.embeddings import embed
from experiments.serve.http.generate import generate, generate_tokens
from experiments.serve.http.messages import answer, count_tokens
from experiments.serve.http.responses import respond
from experiments.serve.page import page

MAX_BODY_BYTES = 64 << 20
OPEN_PATHS = ("/", "/health", "/health/ready", "/ping", "/version", "/metrics")
"""Paths that need no key."""

_LOG = logging.getLogger("windtunnel.serve")
Handler = Callable[[web.Request, Backend], Awaitable[web.StreamResponse]]

ROUTES: Mapping[tuple[str, str], Handler] = {
    ("GET", "/"): page,
    ("POST", "/v1/completions"): complete,
    ("POST", "/v1/chat/completions"): chat,
    ("POST", "/v1/responses"): respond,
    ("POST", "/v1/messages"): answer,
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("POST", "/v1/embeddings"): embed,
    ("POST", "/generate"): generate,
    ("POST", "/inference/v1/generate"): generate_tokens,
    ("GET", "/v1/models"): information.models,
    ("GET", "/health"): information.health,
    ("GET", "/health/ready"): information.health,
    ("GET", "/ping"): information.health,
    ("GET", "/version"): information.show_version,
    ("GET", "/load"): information.load,
    ("POST", "/tokenize"): information.tokenize,
    ("POST", "/detokenize"): information.detokenize,
}
"""Handler of each method and path."""


def make_app(
    backend: Backend, api_key: str | None = None, hosts: frozenset[str] | None = None
) -> web.Application:
    """Returns the application.

    api_key: the key that requests must have; None: they need none. hosts: names by which requests may reach
    the server; None: any.
    """
    checks = [_errors, _host_check(hosts), _key_check(api_key)]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=checks)
    for (method, path), handler in ROUTES.items():
        app.router.add_route(method, path, partial(_handle, handler, backend))
    return app


async def _handle(handler: Handler, backend: Backend, request: web.Request) -> web.StreamResponse:
    return await handler(request, backend)


@web.middleware
async def _errors(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
    """Turns every error into an error object with its status."""
    try:
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise too_large(request.content_length or 0)
        return await handler(request)
    except ApiError as error:
        found = error
    except ConnectionReset:
        _reset(request)
        raise web.HTTPServiceUnavailable from None  # written to a closed connection
    except ConnectionError:
        raise  # the client has gone
    except web.HTTPException as error:
        allowed = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        found = ApiError(error.reason, HTTPStatus(error.status), headers=allowed)
    except web.RequestPayloadError as error:
        found = ApiError(f"The body cannot be read: {' '.join(str(error).split())}"[:MAX_REASON_CHARS])
    except Exception:
        _LOG.exception("A request has failed because of a bug.")
        found = ApiError(FAILED, HTTPStatus.INTERNAL_SERVER_ERROR)
    return web.json_response(found.body(), status=found.status, headers=found.headers)


def too_large(num_bytes: int) -> ApiError:
    """Returns the error of a request whose head announces a longer body than is read, before it is read."""
    message = (
        f"The body has {num_bytes:,} bytes by its Content-Length; it must have at most {MAX_BODY_BYTES:,}"
    )
    return ApiError(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def _reset(request: web.Request) -> None:
    """Cuts the connection of a request."""
    if request.transport is not None:
        request.transport.abort()


def _host_check(hosts: frozenset[str] | None) -> typedefs.Middleware:
    """Returns the check that a request is to a name of the server, and comes from no page of another site.

    A browser sends a page's site as Origin. It can send a request without a body, such as POST /sleep, to any
    address, although the page may not read the answer.
    """

    @web.middleware
    async def check(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        for header, address in (("Host", f"//{request.headers.get('Host', '')}"), ("Origin", origin)):
            if hosts is None or address in (None, "//"):
                continue  # HTTP/1.0 has no Host, and browsers send it
            name = _hostname(address)
            if name not in hosts:
                raise ApiError(
                    f"{header} {(name or str(address))[:100]!r}: this server is reached as "
                    f"{', '.join(sorted(hosts))} only; name others in serve.allowed_hosts (--allowed-hosts)",
                    HTTPStatus.FORBIDDEN,
                    header,
                )
        return await handler(request)

    return check


def _hostname(address: str) -> str | None:
    try:
        name = urlsplit(address).hostname
    except ValueError:
        return None
    return None if name is None else name.rstrip(".")


def _key_check(api_key: str | None) -> typedefs.Middleware:
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
        if expected is not None and request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, expected):
                raise ApiError("Unauthorized", HTTPStatus.UNAUTHORIZED)
        return await handler(request)

    return check
