"""The reader's end of a request: outputs as they come, from another thread or from an event loop. No torch here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from threading import Condition
from time import perf_counter, thread_time
from weakref import WeakKeyDictionary

from rille.serve.schema import Finished, Output

RESTS = 5.0  # times as long as it has worked
LONGEST_PAUSE_S = 0.05
LEAST_PAUSE_S = 0.0005


class Alarm:
    """Wakes readers of one event loop from another thread: one call into the loop for all whom a step has something
    for, since each such call is a system call.

    Only one thread runs Python at a time, and what the loop's takes the engine's lacks: most of it is a write for each
    reader, however many tokens that has. So after a ring the loop's thread rests five times as long as it worked on it,
    at most 50 ms from one ring to the next: with few readers each token goes out as it comes, with many those of some
    steps together. A reader's first tokens wait for nobody's rest: the loop has worked on the request that asks for
    them, and the engine had to wait for that anyway. Made in the loop's thread.
    """

    def __init__(self) -> None:
        self._asleep = deque[asyncio.Event]()
        self._is_ringing = False
        self._rang_at, self._had_worked = perf_counter(), thread_time()

    def wake(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        self._asleep.append(event)  # before the look at `_is_ringing`, as `_ring` resets that before it looks here
        if not self._is_ringing and not loop.is_closed():
            self._is_ringing = True
            loop.call_soon_threadsafe(self._ring, loop)

    def greet(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Wake a reader at once who has read nothing yet."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        now, worked = perf_counter(), thread_time()
        pause = min((1 + RESTS) * (worked - self._had_worked), LONGEST_PAUSE_S)
        if (left := self._rang_at + pause - now) > LEAST_PAUSE_S:
            loop.call_later(left, self._ring, loop)
            return
        self._rang_at, self._had_worked = now, worked
        self._is_ringing = False
        while self._asleep:
            self._asleep.popleft().set()


_ALARMS: WeakKeyDictionary[asyncio.AbstractEventLoop, Alarm] = WeakKeyDictionary()


class RequestHandle:
    """`put` is called by whoever steps the engine, everything else by one reader. advance: makes a step where no thread
    does, and says whether it has."""

    def __init__(self, id: str, choices: int, advance: Callable[[], bool] = lambda: False) -> None:
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
            elif not self.advance():
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._outputs))

    async def __aiter__(self) -> AsyncIterator[Output]:
        async for batch in self.batches():
            for output in batch:
                yield output

    async def batches(self) -> AsyncIterator[list[Output]]:
        """The same, all that has come since the last look at once: a reader who is slow looks less often."""
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        alarm, is_new = _ALARMS.setdefault(loop, Alarm()), True

        def wake() -> None:
            nonlocal is_new
            (alarm.greet if is_new else alarm.wake)(loop, there)
            is_new = False

        with self._changed:
            self._wake = wake
        while self._open:
            there.clear()
            with self._changed:
                batch = list(self._outputs)
                self._outputs.clear()
            if batch:
                self._open -= sum(isinstance(output, Finished) for output in batch)
                yield batch
            elif self.advance():  # the loop stands still meanwhile: who wants more of it starts the engine's thread
                await asyncio.sleep(0)
            else:
                await there.wait()
