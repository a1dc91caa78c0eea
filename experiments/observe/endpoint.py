"""Connects to an OpenAI-compatible server: its models, one streamed request, and error messages.

It uses aiohttp for its low CPU time per chunk: 75 us measured, against 173 us with httpx2 and 445 us with
httpx, which falls behind at 100 requests/s of 50 chunks. This module imports it, so import this module late.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp

from experiments.observe.reply import MAX_ERROR_CHARS, Reply, message_of
from experiments.observe.settings import DEFAULT_CONTEXT, PATHS, ObserveSettings
from sim.settings.errors import ConfigError, suggest

# Servers close idle connections (uvicorn after 5 s). A request sent at that moment is lost, and a POST is not
# retried, so idle connections are closed here first.
KEEPALIVE_S = 2.0


class Endpoint:
    """An open session with the server, created by `connect`."""

    def __init__(self, session: aiohttp.ClientSession, settings: ObserveSettings) -> None:
        self._session = session
        self._settings = settings
        self._url = f"{settings.base_url}/{PATHS[settings.api]}"

    async def models(self) -> dict[str, int | None]:
        """Returns the served models with their context lengths, None if not reported. Raises ConfigError."""
        url, given = f"{self._settings.base_url}/models", f"url={self._settings.url}"
        try:
            async with self._session.get(url) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ConfigError(
                f"{given}: {describe_error(error, self._settings)}; {self._hint(error)}"
            ) from error
        if response.status in (401, 403):
            raise ConfigError(f"{given}: {self.key_wanted(response.status)}")
        if response.status != 200:
            raise ConfigError(
                f"{given}: GET {url} returned status {response.status}; OpenAI-compatible servers list "
                "their models there; give the address without /v1"
            )
        try:
            return {str(model["id"]): model.get("max_model_len") for model in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{given}: {url} returned no list of models but {text[:60].strip()!r}; check that the "
                "address belongs to an OpenAI-compatible server"
            ) from error

    async def send(self, body: bytes, reply: Reply, clock: Callable[[], float]) -> None:
        """Sends one request and reads its response into `reply`; errors are stored there and not raised."""
        reply.sent_s = clock()
        try:
            async with self._session.post(self._url, data=body) as response:
                reply.headers_s = clock()
                reply.http_status = response.status
                if response.status != 200:
                    reply.fail(await _refusal(response), clock())
                    return
                if response.content_type == "application/json":
                    reply.is_stream = False
                    reply.fail("the server did not stream the response", clock())
                    return
                async for data in response.content.iter_any():
                    reply.feed(data, clock())
            reply.close(clock())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reply.fail(describe_error(error, self._settings), clock(), lost=True)

    def key_wanted(self, status: int) -> str:
        """Returns the message for a 401 or 403: the environment variable to set."""
        name, other = self._settings.api_key_env, "name another variable: api_key_env=NAME"
        if os.environ.get(name):
            return f"the server rejects the key in {name} ({status}); export a valid key, or {other}"
        return f"the server requires an API key ({status}); export {name}=..., or {other}"

    def _hint(self, error: Exception) -> str:
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return "check the host name"
        if isinstance(error, TimeoutError):
            return "check the address and the firewall, or raise connect_timeout_s"
        if isinstance(error, aiohttp.ClientConnectorError):
            return "start the server, or check the address and the port"
        return "check that it is an HTTP server and that http or https is right"


@asynccontextmanager
async def connect(settings: ObserveSettings) -> AsyncIterator[Endpoint]:
    """Yields a session with no limit on connections; no request is sent yet."""
    _raise_file_limit()
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    key = os.environ.get(settings.api_key_env)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_timeout_s
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield Endpoint(session, settings)


def served_model(settings: ObserveSettings, models: dict[str, int | None]) -> str:
    """Returns the name of the model to request. Raises ConfigError."""
    wanted = settings.served_model_name
    if wanted is None:
        if len(models) == 1:
            return next(iter(models))
        raise ConfigError(
            f"served_model_name: must be given, because the server has several models; {suggest('', models)}"
        )
    if models and wanted not in models:
        raise ConfigError(
            f"served_model_name={wanted}: the server at {settings.url} does not have this model; "
            f"{suggest(wanted, models)}"
        )
    return wanted


def context_of(settings: ObserveSettings, reported: int | None) -> int:
    """Returns the maximum of prompt plus output tokens. Raises ConfigError."""
    if settings.max_model_len is None:
        return reported or DEFAULT_CONTEXT
    if reported is not None and settings.max_model_len > reported:
        raise ConfigError(
            f"max_model_len={settings.max_model_len}: must be <= {reported}, the server's limit"
        )
    return settings.max_model_len


def describe_error(error: Exception, settings: ObserveSettings) -> str:
    """Returns the reason of a failed request in a few words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host does not exist"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {settings.connect_timeout_s:g} s"
    if isinstance(error, TimeoutError):
        return f"no data for {settings.silence_timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        reason, code = error.os_error.strerror or "refused", error.os_error.errno
        if code and reason.startswith("Connect call failed"):  # asyncio's text, which repeats the address
            reason = os.strerror(code)
        return f"no connection: {reason.lower()}"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionError):
        return "the server closed the connection"
    return f"{type(error).__name__}: {error}"


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    try:
        return message_of(json.loads(text)) or f"HTTP {response.status}"
    except ValueError:
        return text[:MAX_ERROR_CHARS] or f"HTTP {response.status}"


def _raise_file_limit() -> None:
    """Raises the limit of open files to the system's maximum: each connection is an open file."""
    try:
        import resource  # noqa: PLC0415  (not on Windows, which has no such limit)
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
