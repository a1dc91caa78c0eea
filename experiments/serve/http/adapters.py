"""/v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from typing import Annotated, Protocol

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from experiments.serve.http.body import fields_of

MAX_RANK = 1 << 16
Name = Annotated[str, Field(min_length=1, max_length=200)]


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


def add_adapter_routes(app: web.Application, control: AdapterControl) -> None:
    """Adds the routes."""

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
