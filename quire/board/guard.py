"""What is refused before anything is looked at, and what every answer carries.

The board listens on the loopback address alone. A page elsewhere can still make a browser ask it: by a name
of its own that resolves to 127.0.0.1 (so `Host` is checked), by a form or an image (so requests that another
site starts are refused, unless the reader follows a link), or in a frame (so framing is forbidden).
"""

from __future__ import annotations

import re
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
DOCUMENT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""For files of a run (report, pictures), which bring their style with them: nothing in them may run, load or
send anything, and the sandbox takes them out of this site."""

HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.ASCII)
_LONGEST = 8192


class Guard:
    """An ASGI application around another."""

    def __init__(self, inner: ASGIApp) -> None:
        self.inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("content-security-policy", POLICY)
            await send(message)

        refused = refusal(scope)
        await (refused or self.inner)(scope, receive, dressed)


def refusal(scope: dict[str, Any] | Scope) -> PlainTextResponse | None:
    """The answer to a request that is not served, None for one that is."""
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0].lower()):
        return PlainTextResponse("This board answers to localhost alone.\n", 421)
    if scope["method"] not in ("GET", "HEAD"):
        return PlainTextResponse("The board only reads.\n", 405, headers={"allow": "GET, HEAD"})
    site = headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and headers.get("sec-fetch-mode") != "navigate":
        return PlainTextResponse("Another site may not ask this board.\n", 403)
    path = scope["path"]
    if len(path) + len(scope["query_string"]) > _LONGEST:
        return PlainTextResponse("This address is too long.\n", 414)
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return PlainTextResponse("This address holds control characters.\n", 400)
    return None
