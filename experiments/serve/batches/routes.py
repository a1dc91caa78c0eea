"""The routes of files and batches, in OpenAI's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from experiments.serve.backend import Backend
from experiments.serve.batches.batch import Batch
from experiments.serve.batches.runner import ENDPOINTS, Batches
from experiments.serve.batches.store import FileStore
from experiments.serve.errors import ApiError
from experiments.serve.http.fields import fields_of

PURPOSE = "batch"
MAX_LISTED = 10_000
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400
_WINDOW = re.compile(r"([1-9][0-9]{0,8})([smhd])")

Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class BatchFields(BaseModel):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="allow")

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Metadata | None = None


def add_batch_routes(app: web.Application, backend: Backend, is_draining: Callable[[], bool]) -> None:
    """Adds the routes of files and batches; batches end with the application. is_draining: see `Batches`."""
    files = FileStore()
    batches = Batches(backend, files, is_draining)
    add_file_routes(app, files)

    async def create(request: web.Request) -> web.Response:
        fields = await fields_of(request, BatchFields)
        if fields.endpoint not in ENDPOINTS:
            raise ApiError(
                f"endpoint={fields.endpoint[:80]}: must be one of {', '.join(ENDPOINTS)}", param="endpoint"
            )
        window_s = window_of(fields.completion_window)
        batch = Batch(
            endpoint=fields.endpoint,
            input_file_id=fields.input_file_id,
            completion_window=fields.completion_window,
            window_s=window_s,
            metadata=fields.metadata,
        )
        batches.add(batch)
        return web.json_response(batch.body())

    async def get(request: web.Request) -> web.Response:
        return web.json_response(batches.get(request.match_info["id"]).body())

    async def cancel(request: web.Request) -> web.Response:
        batch = batches.get(request.match_info["id"])
        batches.cancel(batch)
        return web.json_response(batch.body())

    async def list_all(request: web.Request) -> web.Response:
        bodies = [batch.body() for batch in reversed(batches.batches)]
        return web.json_response(_page(request, bodies, default_limit=20))

    async def close(app: web.Application) -> None:
        await batches.close()

    app.router.add_post("/v1/batches", create)
    app.router.add_get("/v1/batches", list_all)
    app.router.add_get("/v1/batches/{id}", get)
    app.router.add_post("/v1/batches/{id}/cancel", cancel)
    app.on_shutdown.append(close)


def add_file_routes(app: web.Application, files: FileStore) -> None:
    """Adds the routes of files."""

    async def upload(request: web.Request) -> web.Response:
        content, filename, purpose = await _uploaded(request)
        if purpose != PURPOSE:
            raise ApiError(f"purpose={purpose[:40]}: must be {PURPOSE}", param="purpose")
        return web.json_response(files.add(content, filename, purpose).body())

    async def list_all(request: web.Request) -> web.Response:
        purpose = request.query.get("purpose")
        found = [each for each in reversed(files.files) if purpose in (None, each.purpose)]
        if request.query.get("order") == "asc":
            found.reverse()
        return web.json_response(_page(request, [each.body() for each in found], default_limit=MAX_LISTED))

    async def get(request: web.Request) -> web.Response:
        return web.json_response(files.get(request.match_info["id"]).body())

    async def content(request: web.Request) -> web.Response:
        found = files.get(request.match_info["id"])
        return web.Response(body=found.content, content_type="application/octet-stream")

    async def delete(request: web.Request) -> web.Response:
        file_id = request.match_info["id"]
        files.delete(file_id)
        return web.json_response({"id": file_id, "object": "file", "deleted": True})

    app.router.add_post("/v1/files", upload)
    app.router.add_get("/v1/files", list_all)
    app.router.add_get("/v1/files/{id}", get)
    app.router.add_get("/v1/files/{id}/content", content)
    app.router.add_delete("/v1/files/{id}", delete)


def window_of(text: str) -> float:
    """Returns a completion window such as 24h in seconds. Raises ApiError."""
    match = _WINDOW.fullmatch(text)
    window_s = int(match[1]) * UNITS_S[match[2]] if match else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise ApiError(
            f"completion_window={text[:40]}: must be a whole number of s, m, h or d up to 30d, such as 24h",
            param="completion_window",
        )
    return window_s


async def _uploaded(request: web.Request) -> tuple[bytes, str, str]:
    """Returns content, name and purpose of an uploaded file. Raises ApiError for another kind of body."""
    if request.content_type != "multipart/form-data":
        raise ApiError("the body must be multipart/form-data with the fields file and purpose", param="file")
    try:
        form = await request.post()
    except (ValueError, AssertionError, LookupError, RuntimeError) as error:
        raise ApiError(f"the body is not valid multipart/form-data: {error}"[:300], param="file") from None
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, web.FileField) or not isinstance(purpose, str):
        raise ApiError("the body must have a file, and its purpose as a text", param="file")
    with file.file as opened:
        return opened.read(), file.filename, purpose


def _page(request: web.Request, bodies: Sequence[dict[str, Any]], default_limit: int) -> dict[str, Any]:
    """Returns the part of a list for which the query asks with `limit` and `after`. Raises ApiError."""
    text = request.query.get("limit", str(default_limit))
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= MAX_LISTED:
        raise ApiError(f"limit={text[:40]}: must be from 1 to {MAX_LISTED}", param="limit")
    after, start = request.query.get("after"), 0
    if after is not None:
        places = [place for place, body in enumerate(bodies) if body["id"] == after]
        if not places:
            raise ApiError(f"after={after[:100]}: must be the id of one of the list", param="after")
        start = places[0] + 1
    found = bodies[start : start + int(text)]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": start + len(found) < len(bodies),
    }
