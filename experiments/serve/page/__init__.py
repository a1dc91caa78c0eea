"""The page of the server, live figures and a chat box: one file without anything from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from re import DOTALL, findall

from aiohttp import web

from experiments.serve.backend import Backend

FILE = Path(__file__).with_name("page.html")


async def page(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Returns the page. Browsers run no script but its own, and load nothing from other servers."""
    text, policy = _content()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return web.Response(text=text, content_type="text/html", headers=headers)


@cache
def _content() -> tuple[str, str]:
    """Returns the text of the page and the policy that names its own scripts and styles by their hashes."""
    text = FILE.read_text(encoding="utf-8")
    sources = {f"{tag}-src": " ".join(_hashes(tag, text)) for tag in ("script", "style")}
    rules = {"default-src": "'none'", "connect-src": "'self'", "base-uri": "'none'", "form-action": "'none'"}
    return text, "; ".join(f"{name} {value}" for name, value in (rules | sources).items())


def _hashes(tag: str, text: str) -> list[str]:
    """Returns the hashes of the elements of a tag, as a content security policy names them."""
    contents = findall(f"<{tag}>(.*?)</{tag}>", text, DOTALL)
    return [f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in contents]
