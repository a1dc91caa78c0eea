"""Routes that act on the engines: prefix caches, sleep mode, LoRA adapters; the settings of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from importlib.metadata import version
from typing import Annotated, Any, Literal, Protocol, get_args

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from experiments.serve.errors import ApiError
from experiments.serve.http.fields import fields_of

Mode = Literal["abort", "wait"]
Part = Literal["weights", "kv_cache"]
LEVELS = ("1", "2")
MODES: tuple[Mode, ...] = get_args(Mode)
PARTS: tuple[Part, ...] = get_args(Part)
NO_SLEEP = "the engine may not sleep; start the server with serve.engine.enable_sleep_mode=true"
MAX_RANK = 1 << 16
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Sleeper(Protocol):
    """A back end that can sleep: its GPUs are free for others meanwhile."""

    async def fall_asleep(self, level: int, mode: Mode) -> None:
        """Puts the engines to sleep, once no request is in progress. Raises ApiError if they cannot.

        level: 1 keeps the weights in host memory, 2 drops them. mode: requests in progress are aborted, or
        are served to their end.
        """
        ...

    async def load(self, parts: Collection[Part], *, is_last: bool) -> None:
        """Loads parts that sleep; returns when they are loaded. is_last: whether no other part sleeps.

        Raises ApiError if they sleep on.
        """
        ...


class SleepMode:
    """The sleep mode of a back end: which of its parts sleep."""

    def __init__(self, sleeper: Sleeper) -> None:
        self._sleeper = sleeper
        self._asleep: set[Part] = set()
        self._changing = asyncio.Lock()

    @property
    def is_sleeping(self) -> bool:
        """True until all parts are awake."""
        return bool(self._asleep)

    async def sleep(self, level: int, mode: Mode) -> None:
        """Sleeps, as `Sleeper.fall_asleep` says; a back end that sleeps already is left as it is."""
        async with self._changing:
            if not self._asleep:
                self._asleep.update(PARTS)
                try:
                    await self._sleeper.fall_asleep(level, mode)
                except ApiError:
                    self._asleep.clear()
                    raise

    async def wake_up(self, parts: Collection[Part]) -> None:
        """Wakes those of the parts that sleep."""
        async with self._changing:
            woken = self._asleep.intersection(parts)
            if woken:
                await self._sleeper.load(woken, is_last=woken == self._asleep)
                self._asleep -= woken


def add_control_routes(
    app: web.Application,
    sleep_mode: SleepMode | None,
    clear_prefix_caches: Callable[[], None],
    config: Mapping[str, Any],
) -> None:
    """Adds the routes. sleep_mode: None: the server may not sleep. config: resolved, without secrets.

    A sleep or a wake-up goes on to its end if its client goes away, so that no half of it is done.
    """

    def may_sleep() -> SleepMode:
        if sleep_mode is None:
            raise ApiError(NO_SLEEP, HTTPStatus.NOT_IMPLEMENTED)
        return sleep_mode

    async def sleep(request: web.Request) -> web.Response:
        control = may_sleep()
        level = _choice(request, "level", LEVELS, "1")
        mode: Mode = "wait" if _choice(request, "mode", MODES, "abort") == "wait" else "abort"
        await asyncio.shield(control.sleep(int(level), mode))
        return web.Response()

    async def wake_up(request: web.Request) -> web.Response:
        control = may_sleep()
        tags = request.query.getall("tags", [])
        for tag in tags:
            if tag not in PARTS:
                raise ApiError(f"tags={tag[:40]}: must be one of {', '.join(PARTS)}", param="tags")
        parts = [part for part in PARTS if part in tags or not tags]
        await asyncio.shield(control.wake_up(parts))
        return web.Response()

    async def is_sleeping(request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": sleep_mode is not None and sleep_mode.is_sleeping})

    async def reset_prefix_cache(request: web.Request) -> web.Response:
        for name in ("reset_running_requests", "reset_external"):
            if request.query.get(name, "false").lower() not in ("", "0", "false"):
                raise ApiError(f"{name}: is not supported; leave it out", HTTPStatus.NOT_IMPLEMENTED, name)
        clear_prefix_caches()
        return web.Response()

    async def server_info(request: web.Request) -> web.Response:
        return web.json_response({"version": version("windtunnel"), "config": config})

    app.router.add_post("/sleep", sleep)
    app.router.add_post("/wake_up", wake_up)
    app.router.add_get("/is_sleeping", is_sleeping)
    app.router.add_post("/reset_prefix_cache", reset_prefix_cache)
    app.router.add_get("/server_info", server_info)


def _choice(request: web.Request, name: str, allowed: Collection[str], default: str) -> str:
    """Returns a parameter of the query. Raises ApiError."""
    value = request.query.get(name, default)
    if value not in allowed:
        raise ApiError(f"{name}={value[:40]}: must be one of {', '.join(allowed)}", param=name)
    return value


class LoadFields(BaseModel):
    """The body of /v1/load_lora_adapter. rank: of a simulated adapter; vLLM reads it from the file."""

    model_config = ConfigDict(extra="allow")

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] | None = None


class UnloadFields(BaseModel):
    """The body of /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="allow")

    lora_name: Annotated[str, Field(min_length=1)]


class AdapterControl(Protocol):
    """The adapters of a back end. The path of a request is not among the arguments: none is ever opened."""

    def load_adapter(self, name: str, rank: int | None, *, replaces: bool) -> None:
        """Loads an adapter. Raises ApiError."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Raises ApiError."""
        ...


def check_new_adapter(name: str, models: Collection[str], loaded: Collection[str], *, replaces: bool) -> None:
    """Raises ApiError for a name of a base model, or of a loaded adapter that is not to be replaced."""
    if name in models:
        raise ApiError(f"'{name}' is the name of the base model; choose another one", param="lora_name")
    if name in loaded and not replaces:
        raise ApiError(f"The lora adapter '{name}' has already been loaded.", param="lora_name")


def check_loaded_adapter(name: str, loaded: Collection[str], reason: str = ".") -> None:
    """Raises ApiError for an adapter that is not among those that are loaded. reason: end of the message."""
    if name not in loaded:
        message = f"The lora adapter '{name[:200]}' cannot be found{reason}"
        raise ApiError(message, HTTPStatus.NOT_FOUND, "lora_name")


def add_adapter_routes(app: web.Application, control: AdapterControl) -> None:
    """Adds the routes that load and unload LoRA adapters."""

    async def load(request: web.Request) -> web.Response:
        fields = await fields_of(request, LoadFields)
        control.load_adapter(fields.lora_name, fields.rank, replaces=fields.load_inplace)
        return web.Response(text=f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def unload(request: web.Request) -> web.Response:
        fields = await fields_of(request, UnloadFields)
        control.unload_adapter(fields.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    app.router.add_post("/v1/load_lora_adapter", load)
    app.router.add_post("/v1/unload_lora_adapter", unload)
