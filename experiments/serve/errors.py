"""Errors of the API, as vLLM reports them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.UNPROCESSABLE_ENTITY: "UnprocessableEntityError",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplementedError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}
"""Value of `type` by status; of other statuses, the phrase of the status."""


MAX_REASON_CHARS = 300
"""Characters of the reasons of others that are repeated to a client."""
FAILED = "The server failed; its log has the reason."


class ApiError(Exception):
    """A request that is answered with an error.

    param: the field of the request that is wrong. headers: of the response.
    """

    def __init__(
        self,
        message: str,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the error object."""
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, self.status.phrase),
                "param": self.param,
                "code": int(self.status),
            }
        }


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Gives errors the words of another API. names: of its fields, by those of a completion."""
    try:
        yield
    except ApiError as error:
        first, dot, rest = (error.param or "").partition(".")
        if first in names:
            if error.message.startswith(first):
                error.message = names[first] + error.message.removeprefix(first)
            error.param = names[first] + dot + rest
        raise


def priority_ignored(priority: int) -> ApiError:
    """Returns the error of a request with a priority to engines that serve in the order of arrival."""
    return ApiError(
        f"priority={priority}: must be 0, as scheduling=fcfs ignores priorities; start the server with "
        "scheduling=priority",
        param="priority",
    )


class ConnectionReset(Exception):
    """The connection of a client is to be cut, as by a crash of the machine behind it."""
