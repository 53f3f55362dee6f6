"""The body of a request as JSON, read strictly. No torch here.

What the standard reader takes and JSON is not (NaN, infinities) would come back in a reply that no client can read, and
of a name that is given twice one value would be lost in silence: both are faults of the body, told in a few words.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

MOST_VALUES = 8_000_000  # in one body: as objects of Python they take ten times the bytes that they are written with


def read_json(body: bytes) -> Any:
    """Raises JSONDecodeError, whose `msg` says what the body is instead."""
    if len(body) > MOST_VALUES and sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        raise _fault(f"it has more than {MOST_VALUES:,} values")
    try:
        return json.loads(body, parse_constant=_constant, parse_float=_finite, object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise _fault("it is not UTF-8") from None
    except RecursionError:
        raise _fault("it nests too deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # what `int` refuses
        raise _fault("it has a number of thousands of digits") from None


def _fault(text: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(text, "", 0)


def _constant(name: str) -> None:
    raise _fault(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _fault(f"the number {text[:40]} is out of range")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, _ in pairs if counts[name] > 1)
        raise _fault(f"it gives {twice[:80]!r} twice")
    return named


class _Strict(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_Strict(request.scope, request.receive))

        return handle_strictly
