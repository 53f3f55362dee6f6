"""Connections that never say what they want, or never hear what they are told: closed, since each holds a place that
others could have. No torch here.

opened, or idle  --HEAD_S-->  closed        a head of more than MAX_HEAD bytes: closed
head is whole    ->  a request under way, which `Gate` and the engine have limits for
its reply        --nothing of it is taken for HEARD_S-->  closed, as if the client had gone

Java's client offers HTTP/2 with each request; what reads HTTP here would then take the request to be over at its head,
and its body for something else. No other protocol is spoken, so the offer is not heard.
"""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 30.0  # for the head of a request, from its first byte or the opened connection on
MAX_HEAD = 1 << 18
HEARD_S = 300.0
_OFFER = re.compile(rb"(^|\r\n)(upgrade:)", re.IGNORECASE)


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's own waits without end for a head, and for anything at all after something that was no request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._clock: asyncio.TimerHandle | None = None
        self._deaf: asyncio.TimerHandle | None = None
        self._in_head, self._num_head = False, 0
        self._is_head_next = True
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._hears()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_head_next:
            head, end, body = data.partition(b"\r\n\r\n")
            data = _OFFER.sub(rb"\1x-\2", head) + end + body
        super().data_received(data)
        self._num_head = self._num_head + len(data) if self._in_head else 0
        if self._num_head > MAX_HEAD:
            self.transport.close()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        else:
            self._start()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = self._is_head_next = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_head_next = True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_until_heard()

    def resume_writing(self) -> None:
        self._hears()
        super().resume_writing()

    def _wait_until_heard(self) -> None:
        left = self.transport.get_write_buffer_size()  # nothing is added as long as writing pauses
        self._deaf = self.loop.call_later(HEARD_S, self._check_heard, left)

    def _check_heard(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._wait_until_heard()
        else:
            self.transport.abort()

    def _hears(self) -> None:
        if self._deaf is not None:
            self._deaf.cancel()
            self._deaf = None

    def _start(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
