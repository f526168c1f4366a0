"""Checks of every request before the application reads it, and security headers of every response.

A page of another site can make a browser send requests to 127.0.0.1. Two checks refuse them: `Host` must be a name of
the viewer (against DNS rebinding), and `Origin`, which browsers send with every POST, must be the viewer's own. Bodies
are read completely, in memory, within limits of size and time. Starlette's `TrustedHostMiddleware` checks neither
ports nor IPv6 addresses nor `Origin`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MEGABYTE = 1 << 20
HEADER_SECONDS = 20.0  # from the connection, or from the previous answer, to the end of a request's headers
# a name or an IPv4 address, or an IPv6 address in brackets; then perhaps a port
NETLOC = re.compile(r"(?:(?P<name>[a-z0-9_.-]+)|\[(?P<address>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{1,5})?)?")
CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\"';,\s]*)", re.IGNORECASE)
MULTIPART = "/api/predict"  # the one address that takes files; all other posts are JSON
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of all together."""

    file_bytes: int = 24 * MEGABYTE
    request_bytes: int = 64 * MEGABYTE
    arriving_bytes: int = 256 * MEGABYTE  # bodies in memory at one time, over all requests
    json_bytes: int = MEGABYTE // 4
    images: int = 16  # files a request
    pixels: int = 50_000_000  # width x height of an image
    kept_bytes: int = 256 * MEGABYTE  # uploaded files
    kept_images: int = 64
    upload_seconds: float = 60.0
    send_seconds: float = 60.0  # until the client has taken an answer
    answer_seconds: float = 120.0
    waiting: int = 200  # jobs in the queue for the model


class RefusedRequest(Exception):
    """A refused request: an HTTP status and a sentence for the user."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Hosts:
    """The host names of the viewer, with any port (it may be forwarded)."""

    LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})

    def __init__(self, host: str = "127.0.0.1", also: str = "") -> None:
        self.names = self.LOCAL | {host.lower(), also.lower()} - {""}
        self.everywhere = host in ("0.0.0.0", "::")

    def serves(self, name: str) -> bool:
        """Numeric addresses cannot be rebound, so all are served if the viewer listens on all interfaces."""
        return name in self.names or (self.everywhere and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_name(netloc: str) -> str:
    """`LOCALHOST:8000` -> `localhost`, `[::1]:8000` -> `::1`; empty if invalid."""
    parts = NETLOC.fullmatch(netloc.lower())
    if parts is None or int(parts["port"] or 0) > 65535:
        return ""
    return parts["name"] or (parts["address"] if _is_address(parts["address"]) else "")


def _origin_host(origin: str) -> str:
    """`http://LOCALHOST:8000` -> `localhost:8000`; empty if it is no origin (`null`, a path, broken brackets)."""
    scheme, _, netloc = origin.lower().partition("://")
    return netloc if scheme in ("http", "https") and host_name(netloc) else ""


class Guard:
    """Checks a request, reads its body, and adds security headers to the response."""

    def __init__(self, app: App, hosts: Hosts, limits: Limits) -> None:
        self.app, self.hosts, self.limits = app, hosts, limits
        self.arriving = 0  # bytes of bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # start and end of the server; there is no address for web sockets
            return await self.app(scope, receive, send)
        answer = _with_headers(_in_time(send, self.limits.send_seconds))
        try:
            headers = _headers(scope)
            self._check(scope, headers)
            if scope["method"] != "POST":
                return await self.app(scope, receive, answer)
            await self._post(scope, receive, answer)
        except RefusedRequest as refused:
            await _refuse(refused, answer)
        except _Gone:
            return

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        if not self.hosts.serves(host_name(host)):
            raise RefusedRequest(421, "this viewer is not served under that name; open the address that it printed")
        origin = headers.get("origin")
        if origin is not None and _origin_host(origin) != host.lower():
            raise RefusedRequest(403, "requests from other sites are refused")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"] != "/":
            raise RefusedRequest(403, "requests from other sites are refused")
        if scope["method"] == "POST":
            self._check_content(scope["path"], headers)

    def _check_content(self, path: str, headers: dict[str, str]) -> None:
        wanted = "multipart/form-data" if path == MULTIPART else "application/json"
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != wanted:
            raise RefusedRequest(415, f"{path} takes {wanted}")
        charsets = CHARSET.findall(headers.get("content-type", ""))
        if any(charset.lower() not in ("utf-8", "utf8") for charset in charsets):
            raise RefusedRequest(415, "the body must be UTF-8")
        if "content-encoding" in headers:
            raise RefusedRequest(415, "compressed bodies are refused")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise RefusedRequest(400, "content-length must be a number")
        self._check_size(int(length), path)

    def _check_size(self, size: int, path: str) -> None:
        most = self.limits.request_bytes if path == MULTIPART else self.limits.json_bytes
        if size > most:
            words = f"too much at once: at most {megabytes(most)} per request; send fewer or smaller files"
            raise RefusedRequest(413, words)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, seconds = bytearray(), self.limits.upload_seconds
        try:
            try:
                async with asyncio.timeout(seconds):
                    await self._read(body, scope["path"], receive)
            except TimeoutError:
                raise RefusedRequest(408, f"the upload took longer than {seconds:g} seconds") from None
            await self.app(scope, _replay(bytes(body), receive), send)
        finally:
            self.arriving -= len(body)

    async def _read(self, body: bytearray, path: str, receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            self._check_size(len(body) + len(chunk), path)
            if self.arriving + len(chunk) > self.limits.arriving_bytes:
                raise RefusedRequest(503, "too many uploads at the same time; try again in a moment")
            body += chunk
            self.arriving += len(chunk)
            more = message.get("more_body", False)


class HeaderTimeout(H11Protocol):
    """Closes connections whose next request's headers take too long; uvicorn itself waits without limit.

    ``uvicorn.Config(app, http=HeaderTimeout)``
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._close_unless_asked, None)

    def on_response_complete(self) -> None:
        answered = self.cycle  # the server may begin with the next request in here
        super().on_response_complete()
        self.loop.call_later(HEADER_SECONDS, self._close_unless_asked, answered)

    def _close_unless_asked(self, before: RequestResponseCycle | None) -> None:
        if self.cycle is before:  # a request whose headers are complete has a cycle of its own
            self.transport.close()


class _Gone(Exception):
    """The client disconnected, or does not read."""


def megabytes(count: int) -> str:
    return f"{count / MEGABYTE:g} MB"


def _headers(scope: Scope) -> dict[str, str]:
    """Headers by name; duplicates of critical ones are refused, because two readers could use different ones."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key in headers and key in ("host", "origin", "content-type", "content-length"):
            raise RefusedRequest(400, f"the header {key} appears twice")
        headers[key] = value.decode("latin-1")
    return headers


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then further messages (such as a disconnect)."""
    pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pieces.pop() if pieces else await receive()

    return next_message


def _in_time(send: Send, seconds: float) -> Send:
    """Abort the connection of a client that does not read its response, which frees its memory."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)  # the server's; tests have none

    def cut() -> None:
        if transport is not None and transport.get_write_buffer_size():
            transport.abort()

    async def answer(message: Message) -> None:
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise _Gone from None
        if transport is not None and not message.get("more_body", False):  # the rest is in the server's buffer
            asyncio.get_running_loop().call_later(seconds, cut)

    return answer


def _with_headers(send: Send) -> Send:
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *((k.encode(), v.encode()) for k, v in HEADERS.items())]
        await send(message)

    return answer


async def _refuse(refused: RefusedRequest, send: Send) -> None:
    body = json.dumps({"error": refused.message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    # what is left of a refused upload is not read, so the connection cannot serve another request
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
