"""Connections whose next request does not come in time are closed: the server's own would wait for headers for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

SECONDS = 20.0  # from the connection, or from the answer before, to the end of a request's headers


class Impatient(H11Protocol):
    """``uvicorn.Config(app, http=Impatient)``"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(SECONDS, self._close_unless_asked, None)

    def on_response_complete(self) -> None:
        answered = self.cycle  # the server may begin with the next request in here
        super().on_response_complete()
        self.loop.call_later(SECONDS, self._close_unless_asked, answered)

    def _close_unless_asked(self, before: RequestResponseCycle | None) -> None:
        if self.cycle is before:  # a request whose headers are complete has a cycle of its own
            self.transport.close()
