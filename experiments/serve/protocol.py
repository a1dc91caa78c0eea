"""The HTTP protocol of a connection: bytes that are no request are answered with an error object, too."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from experiments.serve.errors import FAILED, MAX_REASON_CHARS, ApiError


class ErrorObjectProtocol(web.RequestHandler):
    """aiohttp's protocol, with JSON instead of plain text where it answers without the application."""

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends a response; a refusal of aiohttp's own, such as of an Expect, becomes an error object."""
        if isinstance(resp, web.HTTPException):
            error = ApiError(resp.reason, HTTPStatus(resp.status))
            resp = web.json_response(error.body(), status=resp.status)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the error object of a request that could not be read or served; the connection ends."""
        super().handle_error(request, status, exc, message)  # writes the log; raises if a response has begun
        reason = FAILED
        if message is not None and status < HTTPStatus.INTERNAL_SERVER_ERROR:
            reason = f"This is no HTTP request: {' '.join(message.split())}"[:MAX_REASON_CHARS]
        response = web.json_response(ApiError(reason, HTTPStatus(status)).body(), status=status)
        response.force_close()
        return response
