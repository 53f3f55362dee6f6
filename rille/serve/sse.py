"""Server-sent events: a reply as a stream of lines. No torch here.

event: NAME          where the API names its events
data: JSON
                     an empty line ends it;  a line that begins with a colon is nothing, and keeps proxies awake
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

SILENCE_S = 15.0
PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


HOLE = "\0hole"
_LINE_END = re.compile("[\x85\u2028\u2029]")  # JSON itself escapes those below a space
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8, one line for whoever cuts text into lines as Unicode does. A lone surrogate, which UTF-8
    has no bytes for, stands as its escape."""
    return _LINE_END.sub(_escape, _encoder.encode(value)).encode("utf-8", "backslashreplace")


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def event(value: Any, name: str | None = None) -> bytes:
    """One event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


class Form:
    """Events that are the same but for the values at their holes (`HOLE`): the rest becomes JSON once."""

    def __init__(self, value: Any, name: str | None = None) -> None:
        self._parts = event(value, name).split(to_json(HOLE))

    def fill(self, *values: Any) -> bytes:
        """The event with these values, one for each hole, in order."""
        filled = [self._parts[0]]
        for value, part in zip(values, self._parts[1:], strict=True):
            filled += (to_json(value), part)
        return b"".join(filled)


async def with_pings(stream: AsyncGenerator[bytes, None], silence_s: float = SILENCE_S) -> AsyncGenerator[bytes, None]:
    """The same stream, with a comment wherever it is silent for long. Closing it closes the stream.

    What has come while the last part was sent goes in one piece: the more there is to say, the less each event costs.
    """
    parts: list[bytes] = []
    there = asyncio.Event()
    loop = asyncio.get_running_loop()
    heard = loop.time()

    async def pump() -> None:
        try:
            async with aclosing(stream):
                async for part in stream:
                    parts.append(part)
                    there.set()
        finally:
            there.set()  # and when whoever waits goes on, this task is done

    def ping() -> None:
        nonlocal clock
        left = heard + silence_s - loop.time()
        if left <= 0:
            left = silence_s
            parts.append(PING)
            there.set()
        clock = loop.call_later(left, ping)

    pumping, clock = asyncio.ensure_future(pump()), loop.call_later(silence_s, ping)
    try:
        while parts or not pumping.done():
            there.clear()
            if parts:
                together = b"".join(parts)
                parts.clear()
                heard = loop.time()
                yield together
                continue
            await there.wait()
        pumping.result()  # raises what the stream raised
    finally:
        clock.cancel()
        pumping.cancel()
        await asyncio.wait({pumping})
