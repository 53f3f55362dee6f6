"""Streams of events: nothing is lost or reordered, silence is broken, errors and closings reach the source."""

import asyncio
import json

import pytest

from rille.serve.sse import HOLE, PING, Form, event, to_json, with_pings


class Source:
    """parts: bytes to give, seconds to be silent, or an error to raise."""

    def __init__(self, *parts):
        self.parts, self.is_closed = parts, False

    async def __call__(self):
        try:
            for part in self.parts:
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, float):
                    await asyncio.sleep(part)
                else:
                    yield part
        finally:
            self.is_closed = True


def heard(source: Source, silence_s: float = 10.0, stop_after: int | None = None) -> list[bytes]:
    async def listen() -> list[bytes]:
        stream, parts = with_pings(source(), silence_s), []
        try:
            async for part in stream:
                parts.append(part)
                if len(parts) == stop_after:
                    break
        finally:
            await stream.aclose()
        return parts

    return asyncio.run(listen())


def test_all_comes_in_order_and_at_once_what_was_there():
    source = Source(*[b"%d," % i for i in range(100)], 0.01, b"end")
    parts = heard(source)
    assert b"".join(parts) == b"".join(b"%d," % i for i in range(100)) + b"end"
    assert len(parts) < 100 and source.is_closed


def test_silence_is_broken():
    whole = b"".join(heard(Source(b"a", 0.2, b"b"), silence_s=0.02))  # on a busy machine several pings come at once
    assert whole == b"a" + PING * (count := whole.count(PING)) + b"b" and count
    assert heard(Source(b"a", 0.01, b"b")) == [b"a", b"b"] and heard(Source()) == []


def test_an_error_comes_behind_what_was_said():
    parts = []

    async def listen():
        async for part in with_pings(Source(b"a", ValueError("broken"))()):
            parts.append(part)

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(listen())
    assert parts == [b"a"]


def test_whoever_leaves_closes_the_source():
    source = Source(b"a", 30.0, b"b")
    assert heard(source, stop_after=1) == [b"a"] and source.is_closed


def test_events_are_json_in_lines():
    assert event({"a": "é\n"}, "name") == 'event: name\ndata: {"a":"é\\n"}\n\n'.encode()
    assert json.loads(to_json({"half": "\ud800"})) == {"half": "\ud800"}
    ends = "".join(map(chr, range(0x3000)))
    assert len(to_json({"a": ends}).decode().splitlines()) == 1 and json.loads(to_json({"a": ends})) == {"a": ends}
    with pytest.raises(ValueError, match="JSON"):
        to_json({"no": float("nan")})


@pytest.mark.parametrize("text", ["", "plain", 'quo"te\n\\', "é 🙂 \u2028", "\ud800", HOLE])
def test_a_form_is_the_event_it_was_made_from(text):
    form = Form({"n": HOLE, "delta": {"text": HOLE}, "end": None}, "name")
    for number in (0, [1, 2]):
        assert form.fill(number, text) == event({"n": number, "delta": {"text": text}, "end": None}, "name")
    with pytest.raises(ValueError, match="zip"):
        form.fill(1)
