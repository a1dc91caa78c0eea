"""Decides which HTTP requests the dashboard answers: only those of its own page in a browser on this machine.

Another web site can make a browser send requests to a local port. It cannot choose the `Origin` header, which
the browser sets. By DNS rebinding it can have the same origin, but not with a host name of this machine. And
it has no session cookie, which browsers send only with requests of the page itself (SameSite=Strict).
Requests that pass are parsed as untrusted text: see `Board.parse`.
"""

from __future__ import annotations

import secrets
import sys
import traceback
from http import HTTPStatus
from urllib.parse import urlsplit

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

HOSTS = ("127.0.0.1", "localhost")
MAX_BYTES = 64 * 1024
"""Largest body of a request, in bytes; a page sends less than 4 KiB."""
MAX_QUERY = 8 * 1024
"""Longest query of an address, in bytes."""
CALLBACKS = "/_dash-update-component"


def guard(server: Flask) -> None:
    """Makes a server refuse requests that do not come from the page, and requests that are too large."""
    session = secrets.token_urlsafe(32)
    server.config["MAX_CONTENT_LENGTH"] = MAX_BYTES

    @server.before_request
    def check() -> Response | None:
        problem = _problem(session)
        return None if problem is None else _refused(problem, HTTPStatus.FORBIDDEN)

    @server.after_request
    def hand_out(response: Response) -> Response:
        if request.path == "/":
            response.set_cookie(_cookie(), session, httponly=True, samesite="Strict")
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    @server.errorhandler(Exception)
    def refuse(error: Exception) -> Response | HTTPException:
        """Answers a malformed request, which no page sends, with an error; the log has the traceback."""
        if isinstance(error, HTTPException):
            return error
        if not isinstance(error, RecursionError):  # of a JSON that nests its values too deeply
            traceback.print_exception(error, file=sys.stderr)
        return _refused("This request cannot be answered; reload the page.", HTTPStatus.BAD_REQUEST)


def _problem(session: str) -> str | None:
    """Returns the reason why the current request is refused; None if it is answered."""
    if _hostname(f"//{request.host}") not in HOSTS:
        return f"Host {request.host[:100]!r}: the dashboard is served as {' and '.join(HOSTS)} only."
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.host}":
        return f"Origin {origin[:100]!r}: only the dashboard's own page may send requests."
    if len(request.query_string) > MAX_QUERY:
        return f"The query of the address has more than {MAX_QUERY:,} bytes."
    if request.path == CALLBACKS and not secrets.compare_digest(
        request.cookies.get(_cookie(), "").encode(), session.encode()
    ):
        return "The session has expired; reload the page."
    return None


def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _cookie() -> str:
    """Returns the cookie's name, which contains the port, because ports of a host share cookies."""
    return f"windtunnel-{request.host.rpartition(':')[2]}"


def _refused(message: str, status: HTTPStatus) -> Response:
    return Response(f"{message}\n", status=status, mimetype="text/plain")
