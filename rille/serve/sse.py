"""Server-sent events: a reply as a stream of lines. No torch here.

event: NAME          where the API names its events
data: JSON
                     an empty line ends it;  a line that begins with a colon is nothing, and keeps proxies awake
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

SILENCE_S = 15.0
PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8. A lone surrogate, which UTF-8 has no bytes for, stands as its escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )


def event(value: Any, name: str | None = None) -> bytes:
    """One event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


async def with_pings(stream: AsyncGenerator[bytes, None], silence_s: float = SILENCE_S) -> AsyncGenerator[bytes, None]:
    """The same stream, with a comment wherever it is silent for long. Closing it closes the stream.

    What has come while the last part was sent goes in one piece: the more there is to say, the less each event costs.
    """
    parts: list[bytes] = []
    there = asyncio.Event()

    async def pump() -> None:
        try:
            async with aclosing(stream):
                async for part in stream:
                    parts.append(part)
                    there.set()
        finally:
            there.set()

    pumping = asyncio.ensure_future(pump())
    try:
        while parts or not pumping.done():
            there.clear()
            if parts:
                together = b"".join(parts)
                parts.clear()
                yield together
                continue
            try:
                async with asyncio.timeout(silence_s):
                    await there.wait()
                    await asyncio.sleep(0)  # the pump may be about to end
            except TimeoutError:
                yield PING
        pumping.result()  # raises what the stream raised
    finally:
        pumping.cancel()
        await asyncio.wait({pumping})
