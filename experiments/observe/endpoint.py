"""The way to an OpenAI-compatible server: models, one request, and what goes wrong on the way, in words.

aiohttp, because it costs the least CPU a chunk: 75 us here, where httpx2 takes 173 and httpx 445 and falls
behind at 100 requests/s of 50 chunks. It is imported with this module, which is imported late.
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

# Servers close idle connections, uvicorn after 5 s. A request sent just then is lost, and a POST cannot be
# sent again by itself: idle ones are closed here before.
KEEPALIVE_S = 2.0


class Endpoint:
    """An open session with the server; made by `connect`."""

    def __init__(self, session: aiohttp.ClientSession, settings: ObserveSettings) -> None:
        self._session = session
        self._settings = settings
        self._url = f"{settings.base_url}/{PATHS[settings.api]}"

    async def models(self) -> dict[str, int | None]:
        """The models that it serves, with how many tokens fit each, if it says so. Raises ConfigError."""
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
                f"{given}: GET {url} is answered with {response.status}; OpenAI-compatible servers list "
                "their models there; give the address up to, not including, /v1"
            )
        try:
            return {str(model["id"]): model.get("max_model_len") for model in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{given}: what {url} says is no list of models: {text[:60].strip()!r}; is it another "
                "service?"
            ) from error

    async def send(self, body: bytes, reply: Reply, clock: Callable[[], float]) -> None:
        """Send one request and read its answer into `reply`; no error leaves this, they are in there."""
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
                    reply.fail("the server does not stream", clock())
                    return
                async for data in response.content.iter_any():
                    reply.feed(data, clock())
            reply.close(clock())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reply.fail(describe_error(error, self._settings), clock(), lost=True)

    def key_wanted(self, status: int) -> str:
        """What to do about a 401 or 403."""
        name, other = self._settings.api_key_env, "name another variable: api_key_env=NAME"
        if os.environ.get(name):
            return f"the server refuses the key in {name} ({status}); export the right one, or {other}"
        return f"the server asks for a key ({status}); export {name}=..., or {other}"

    def _hint(self, error: Exception) -> str:
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return "check the name"
        if isinstance(error, TimeoutError):
            return "check address and firewall, or raise connect_timeout_s"
        if isinstance(error, aiohttp.ClientConnectorError):
            return "start the server, or check address and port"
        return "is it an HTTP server, and http or https?"


@asynccontextmanager
async def connect(settings: ObserveSettings) -> AsyncIterator[Endpoint]:
    """A session without a limit of connections; nothing is sent yet."""
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
    """The model to ask for. Raises ConfigError."""
    wanted = settings.served_model_name
    if wanted is None:
        if len(models) == 1:
            return next(iter(models))
        raise ConfigError(f"served_model_name: must be given, the server has several; {suggest('', models)}")
    if models and wanted not in models:
        raise ConfigError(
            f"served_model_name={wanted}: not served at {settings.url}; {suggest(wanted, models)}"
        )
    return wanted


def context_of(settings: ObserveSettings, reported: int | None) -> int:
    """Tokens that a prompt and its answer may have together. Raises ConfigError."""
    if settings.max_model_len is None:
        return reported or DEFAULT_CONTEXT
    if reported is not None and settings.max_model_len > reported:
        raise ConfigError(
            f"max_model_len={settings.max_model_len}: must be <= {reported}, what the server says"
        )
    return settings.max_model_len


def describe_error(error: Exception, settings: ObserveSettings) -> str:
    """The reason of a failed request, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "no such host"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {settings.connect_timeout_s:g} s"
    if isinstance(error, TimeoutError):
        return f"nothing came for {settings.silence_timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {(error.os_error.strerror or 'refused').lower()}"
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
    """A connection is an open file, and shells allow 1,024 of them; the system allows more."""
    try:
        import resource  # noqa: PLC0415  (not on Windows, which has no such limit)
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
