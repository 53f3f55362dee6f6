"""The reader's end of a request: outputs as they come, from another thread or from an event loop. No torch here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from threading import Condition

from rille.serve.schema import Finished, Output


class RequestHandle:
    """`put` is called by the engine's thread, everything else by one reader. advance: where no thread runs the engine,
    the reader does, with this."""

    def __init__(self, id: str, choices: int, advance: Callable[[], object] | None = None) -> None:
        self.id = id
        self._open, self._outputs = choices, deque[Output]()
        self._changed = Condition()
        self._wake: Callable[[], object] | None = None
        self.advance = advance

    def put(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self._outputs += outputs
            self._changed.notify_all()
            if self._wake is not None:
                self._wake()

    def _next(self) -> Output | None:
        """What has come, if anything."""
        with self._changed:
            output = self._outputs.popleft() if self._outputs else None
        if isinstance(output, Finished):
            self._open -= 1
        return output

    def __iter__(self) -> Iterator[Output]:
        while self._open:
            if (output := self._next()) is not None:
                yield output
            elif self.advance is not None:
                self.advance()
            else:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._outputs))

    async def __aiter__(self) -> AsyncIterator[Output]:
        loop, there = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(there.set)

        with self._changed:
            self._wake = wake
        while self._open:
            there.clear()
            if (output := self._next()) is not None:
                yield output
            else:
                await there.wait()
