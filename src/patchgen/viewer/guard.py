"""Checks of every request before the application reads it, and security headers of every response.

A page of another site can make a browser send requests to 127.0.0.1: so `Host` must be a name of the viewer (against
DNS rebinding), and `Origin`, which browsers send with every POST, its own. Nothing in Starlette or uvicorn checks both,
or limits bodies, slow headers or slow readers.
"""

import asyncio
import ipaddress
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from patchgen.viewer import MEGABYTE, Limits, RefusedRequest

HEADER_SECONDS = 20.0  # from the connection, or from the previous answer, to the end of a request's headers
# a name or an IPv4 address, or an IPv6 address in brackets; then perhaps a port
NETLOC = re.compile(r"(?:(?P<name>[a-z0-9_.-]+)|\[(?P<address>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{1,5})?)?")
CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\"';,\s]*)", re.IGNORECASE)
MULTIPART = "/api/predict"  # the one address that takes files; all other posts are JSON
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
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


class Hosts:
    """The host names of the viewer, with any port (it may be forwarded)."""

    def __init__(self, host: str = "127.0.0.1", also: str = "") -> None:
        self.names = LOCAL | {host.lower(), also.lower()} - {""}
        self.everywhere = host in ("0.0.0.0", "::")

    def serves(self, name: str) -> bool:
        """Numeric addresses cannot be rebound, so all are served if the viewer listens on all interfaces."""
        return name in self.names or (self.everywhere and _is_address(name))


def host_name(netloc: str) -> str:
    """`LOCALHOST:8000` -> `localhost`, `[::1]:8000` -> `::1`; empty if invalid."""
    parts = NETLOC.fullmatch(netloc.lower())
    if parts is None or int(parts["port"] or 0) > 65535:
        return ""
    return parts["name"] or (parts["address"] if _is_address(parts["address"]) else "")


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class Guard:
    """Checks a request, reads its body, and adds security headers to the response."""

    def __init__(self, app: ASGIApp, hosts: Hosts, limits: Limits) -> None:
        self.app, self.hosts, self.limits = app, hosts, limits
        self.arriving = 0  # bytes of bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # start and end of the server; there is no address for web sockets
            return await self.app(scope, receive, send)
        send = _guarded(send, self.limits.send_seconds)
        try:
            self._check(scope, Headers(scope=scope))
            if scope["method"] != "POST":
                return await self.app(scope, receive, send)
            await self._post(scope, receive, send)
        except RefusedRequest as refused:
            # what is left of a refused upload is not read, so the connection cannot serve another request
            answer = JSONResponse({"error": refused.message}, refused.status, {"connection": "close"})
            await answer(scope, receive, send)
        except ClientDisconnect:
            return

    def _check(self, scope: Scope, headers: Headers) -> None:
        for name in ("host", "origin", "content-type", "content-length"):  # two readers could use different ones
            if len(headers.getlist(name)) > 1:
                raise RefusedRequest(400, f"the header {name} appears twice")
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if not self.hosts.serves(host_name(host)):
            raise RefusedRequest(421, "this viewer is not served under that name; open the address that it printed")
        elsewhere = headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"] != "/"
        if elsewhere or (origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}")):
            raise RefusedRequest(403, "requests from other sites are refused")
        kind, path = headers.get("content-type", ""), scope["path"]
        expected = "multipart/form-data" if path == MULTIPART else "application/json"
        if scope["method"] == "POST" and kind.split(";")[0].strip().lower() != expected:
            raise RefusedRequest(415, f"{path} takes {expected}")
        if any(charset.lower() not in ("utf-8", "utf8") for charset in CHARSET.findall(kind)):
            raise RefusedRequest(415, "the body must be UTF-8")

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, seconds = bytearray(), self.limits.upload_seconds
        try:
            try:
                async with asyncio.timeout(seconds):
                    await self._read(body, scope["path"], receive)
            except TimeoutError:
                raise RefusedRequest(408, f"the upload took longer than {seconds:g} seconds") from None
            whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

            async def replay() -> Message:
                """The body in one piece, then further messages (such as a disconnect)."""
                return whole.pop() if whole else await receive()

            await self.app(scope, replay, send)
        finally:
            self.arriving -= len(body)

    async def _read(self, body: bytearray, path: str, receive: Receive) -> None:
        most = self.limits.request_bytes if path == MULTIPART else self.limits.json_bytes
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > most:
                words = f"too much at once: at most {most / MEGABYTE:g} MB per request; send fewer or smaller files"
                raise RefusedRequest(413, words)
            if self.arriving + len(chunk) > self.limits.arriving_bytes:
                raise RefusedRequest(503, "too many uploads at the same time; try again in a moment")
            body += chunk
            self.arriving += len(chunk)
            more = message.get("more_body", False)


def _guarded(send: Send, seconds: float) -> Send:
    """Adds the security headers, and aborts the connection of a client that does not read, which frees its memory."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)  # the server's; tests have none

    def abort_unless_read() -> None:
        if transport is not None and transport.get_write_buffer_size():
            transport.abort()

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            abort_unless_read()
            raise ClientDisconnect from None
        if not message.get("more_body", False):  # the rest is in the server's buffer
            asyncio.get_running_loop().call_later(seconds, abort_unless_read)

    return guarded


class HeaderTimeout(H11Protocol):
    """Closes connections whose next request's headers take too long; uvicorn itself waits without limit."""

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
