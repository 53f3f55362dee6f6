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
    """The same stream, with a comment wherever it is silent for long. Closing it closes the stream."""
    async with aclosing(stream):
        coming: asyncio.Task[bytes] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(stream))
                done, _ = await asyncio.wait({coming}, timeout=silence_s)
                if not done:
                    yield PING
                    continue
                finished, coming = coming, None
                try:
                    part = finished.result()
                except StopAsyncIteration:
                    return
                yield part
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.wait({coming})
