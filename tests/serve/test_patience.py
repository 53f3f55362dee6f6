"""Clients that do not say what they want, or not to its end: whoever waits for them stops, and others are answered."""

import asyncio
import json
import socket
import time
from contextlib import contextmanager

import pytest
import uvicorn
from uvicorn.server import ServerState

from rille.serve import patience
from rille.serve.api import Limits
from tests.serve.scripted import reply_ids
from tests.serve.served import serving, until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(tokenizer, Limits(patience_s=0.2, max_body=10_000)) as served:
        yield served


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(patience, "HEAD_S", 0.2)


@contextmanager
def line(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as open_line:
        yield open_line


def heard(open_line) -> bytes:
    """All that comes until the server closes; it is a fault if that never happens."""
    parts = []
    while part := open_line.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("said", [b"", b"GET /health HT", HEALTH[:-2], HEALTH[:-2] + b"X: a", b"\r\n\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(server, said):
    with line(server) as open_line:
        open_line.sendall(said)
        assert heard(open_line) == b""


def test_a_head_without_end_is_not_read_on(server, monkeypatch):
    monkeypatch.setattr(patience, "HEAD_S", 1000)
    with line(server) as open_line:
        open_line.sendall(b"GET /health HTTP/1.1\r\nX: ")
        with pytest.raises(OSError):
            for _ in range(1000):
                open_line.sendall(b"a" * 10_000)


@pytest.mark.parametrize("head", [b"Content-Length: 100\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1\r\n"])
def test_a_body_that_does_not_come_is_408_and_the_line_closes(server, head):
    with line(server) as open_line:
        open_line.sendall(HEAD + head + b"{")
        told = heard(open_line)
        assert told.startswith(b"HTTP/1.1 408 ") and b"connection: close" in told.lower()
        assert "0.2 s" in json.loads(told.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_who_is_told_before_the_end_of_a_body_can_say_it_all(server):
    """A body that is too large is refused at once; the rest of it is read and dropped, so that the answer arrives."""
    with line(server) as open_line:
        open_line.sendall(HEAD + b"Content-Length: 3000000\r\n\r\n" + b" " * 3_000_000)
        assert open_line.recv(100).startswith(b"HTTP/1.1 413 ")
        assert heard(open_line)


def test_a_line_that_is_kept_open_serves_on(server):
    with line(server) as open_line:
        for count in (1, 1, 3):  # more than one: before the first is answered
            open_line.sendall(HEALTH * count)
            told = b""
            while told.count(b'{"status":"ok"}') < count:
                part = open_line.recv(65536)
                assert part
                told += part


def test_who_does_not_hear_what_is_told_is_gone(server, tokenizer, monkeypatch):
    """More is said than the sockets hold, and nobody reads: the request ends as if the client had left."""
    monkeypatch.setattr(patience, "HEARD_S", 0.2)
    server.say(tokenizer.encode("on and on and on ")[:1] * 3000)
    body = {"prompt": "a", "n": 16, "max_tokens": 3000, "logprobs": 3, "stream": True}
    with line(server) as open_line:
        text = json.dumps(body).encode()
        head = HEAD.replace(b"chat/completions", b"completions")
        open_line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        until(lambda: server.engine.aborted, seconds=60)


class Line(asyncio.Transport):
    """What is left to be sent, and whether it was given up."""

    left, is_given_up = 900, False

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.is_given_up = True


class Clock:
    """A loop of which the last timer is kept."""

    def call_later(self, delay, action, *given):
        self.ring = lambda: action(*given)
        return asyncio.TimerHandle(delay, action, given, self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle) -> None: ...


def test_who_hears_slowly_hears_it_all():
    """As long as something is taken each time, a long reply may take many times as long."""
    wire, clock = Line(), Clock()
    protocol = patience.PatientProtocol(uvicorn.Config(None), ServerState(), {}, clock)  # type: ignore[arg-type]
    protocol.connection_made(wire)
    protocol.pause_writing()
    for wire.left in (899, 500, 1):
        clock.ring()
        assert not wire.is_given_up
    clock.ring()
    assert wire.is_given_up, "nothing more was taken"


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.0"])
@pytest.mark.parametrize("cut", [None, 30, -3])
def test_another_protocol_is_not_heard_of(server, tokenizer, offer, cut):
    """A client that offers one goes on in HTTP/1.1, with the body of the same request; on one connection many times."""
    body = json.dumps({"messages": [{"role": "user", "content": "\r\nUpgrade: h2c"}]}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\n"
    )
    head += f"HTTP2-Settings: AAMAAABk\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with line(server) as open_line:
        for _ in range(2):
            server.say(reply_ids(tokenizer, content="yes"))
            sent = head.encode() + body
            open_line.sendall(sent[:cut])
            if cut is not None:
                time.sleep(0.05)
                open_line.sendall(sent[cut:])
            said = b""
            while b'"usage"' not in said:
                said += open_line.recv(65536)
            assert said.startswith(b"HTTP/1.1 200") and b'"content":"yes"' in said
            assert "Upgrade: h2c" in server.prompt()
