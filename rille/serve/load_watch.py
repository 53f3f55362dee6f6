"""What a load does to a server: its memory and its pages while it runs, and whether all comes back. No torch here.

/metrics every second  ->  Point*        resident memory before, in the middle, at the end, when nothing runs, at rest
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rille.serve.remote import Server
from rille.serve.resident import IDLE_S

Json = dict[str, Any]

EVERY_S = 1.0
PATIENCE_S = 60.0  # for requests that were left to be gone from the server
REST_S = 2 * IDLE_S  # after which a server has given back what was freed


@dataclass(frozen=True)
class Point:
    """A server at one moment, `at` seconds after the start. memory: resident bytes of its process; open: requests that
    run or wait; pages: what they hold. None: the server does not say."""

    at: float
    memory: float | None
    open: int | None
    pages: int | None


class Watch:
    """Looks at a server while something else goes on."""

    def __init__(self, server: Server) -> None:
        self._server, self._start = server, perf_counter()
        self.points = [self.look()]

    def look(self) -> Point:
        """The server now. Raises as `Server.text`."""
        families = text_string_to_metric_families(self._server.text("/metrics"))
        found = {sample.name: sample.value for family in families for sample in family.samples}
        running, waiting = (found.get(f"vllm:num_requests_{name}") for name in ("running", "waiting"))
        return Point(
            perf_counter() - self._start,
            found.get("process_resident_memory_bytes"),
            None if running is None or waiting is None else int(running + waiting),
            None if (pages := found.get("rille:pages_used")) is None else int(pages),
        )

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.points.append(await asyncio.to_thread(self.look))

    async def settle(self) -> Point:
        """The server when nothing runs there any more, or when patience is at its end."""
        end = perf_counter() + PATIENCE_S
        while (point := await asyncio.to_thread(self.look)).open and perf_counter() < end:
            await asyncio.sleep(EVERY_S / 10)
        return point

    async def rest(self) -> Point:
        """The server when nothing has run there for a while."""
        await asyncio.sleep(REST_S)
        return await asyncio.to_thread(self.look)


def course(points: Sequence[Point], after: Point, rested: Point | None = None) -> Json:
    """Memory in MiB: before the load, in its middle, at its end, afterwards, at rest (where somebody waited for that)
    and at most; what is open afterwards."""
    named = {"before": points[0], "middle": points[len(points) // 2], "end": points[-1], "after": after}
    named |= {} if rested is None else {"rested": rested}
    memory = {name: point.memory / 2**20 for name, point in named.items() if point.memory is not None}
    if memory:
        memory["most"] = max(point.memory or 0.0 for point in points) / 2**20
    return {"memory_mib": memory, "open_after": after.open, "pages_after": after.pages}
