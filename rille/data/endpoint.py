"""Chat completions from any server that speaks the OpenAI protocol. No torch here, and no client library.

    POST {base}/chat/completions   {"model", "messages", "temperature", "max_tokens", "seed"}
      -> {"choices": [{"message": {"content": ...}, "finish_reason": "stop" | "length" | ...}]}

A busy or failing server (429, 5xx, a broken connection, an answer that is not whole in time) is asked again after a
pause that doubles; what the request itself is at fault for (other 4xx) is not. A server may refuse one text (400, 413,
422: too long for it, or filtered) and take others: whether it does is seen from a short question.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

_TRIES = 5
_PAUSE = 0.5  # seconds, doubled each time
_LONGEST_PAUSE = 30.0
_MOST_BYTES = 64_000_000  # of an answer
_OF_THE_TEXT = (400, 413, 422)


class NoAnswer(OSError):
    """The server could not be made to answer."""


class Refused(ValueError):
    """The server refuses the request as it is (wrong address, model, key). code: of HTTP, None for another answer."""

    def __init__(self, message: str, code: int | None = None):
        super().__init__(message)
        self.code = code


class Unfit(Exception):
    """The server refuses this text and takes others; the words to count it by."""


@dataclass(frozen=True)
class Answer:
    """text: as it came. fault: why it is of no use, in words to count by, or None."""

    text: str
    fault: str | None


@dataclass(frozen=True)
class Endpoint:
    """A server and a model on it. base: http://HOST:PORT/v1. key: None where none is wanted. timeout: seconds."""

    base: str
    model: str
    key: str | None = None
    timeout: float = 120.0
    pause: Callable[[float], None] = time.sleep

    def ask(self, system: str, user: str, *, temperature: float, max_tokens: int, seed: int) -> Answer:
        """One answer.

        Raises Unfit where the server refuses this text alone, Refused for other 4xx but 429 and for an answer of
        another form, NoAnswer after five tries.
        """
        try:
            return self._ask(system, user, temperature, max_tokens, seed)
        except Refused as refused:
            if refused.code not in _OF_THE_TEXT:
                raise
            self._ask("You are brief.", "Say yes.", temperature, 16, seed)  # which is Refused where all texts are
            raise Unfit(f"refused by the endpoint ({refused.code})") from None

    def _ask(self, system: str, user: str, temperature: float, max_tokens: int, seed: int) -> Answer:
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        return _answer_of(self._post(json.dumps(body).encode()))

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{self.base.rstrip('/')}/chat/completions", body, headers)
        fault = ""
        for attempt in range(_TRIES):
            if attempt:
                self.pause(min(_LONGEST_PAUSE, _PAUSE * 2**attempt))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return _whole(response, time.monotonic() + self.timeout)
            except urllib.error.HTTPError as error:
                fault = f"{error.code} {error.reason}"
                if error.code != 429 and error.code < 500:
                    detail = error.read(300).decode(errors="replace")
                    raise Refused(f"{self.base} refuses the request: {fault} {detail}", error.code) from None
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                fault = str(getattr(error, "reason", error)) or type(error).__name__
        raise NoAnswer(f"{self.base} gives no answer after {_TRIES} tries: {fault}")


def _whole(response: http.client.HTTPResponse, until: float) -> bytes:
    """The body. A time-out of the socket alone would let a server take a time for every byte."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise Refused(f"the answer is longer than {_MOST_BYTES:,} bytes")
        if time.monotonic() > until:
            raise TimeoutError("the answer is not whole in time")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _answer_of(content: bytes) -> Answer:
    try:
        choice = json.loads(content)["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason", "stop")
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text, reason = 0, ""
    if not isinstance(text, str | None):
        raise Refused(f"the answer is no chat completion: {content[:200].decode(errors='replace')}")
    text = text or ""
    checks = (
        ("cut off by the endpoint", reason != "stop"),
        ("an empty answer", not text.strip()),
        ("an answer that is no text", any("\ud800" <= character <= "\udfff" for character in text)),
    )
    return Answer(text, next((fault for fault, found in checks if found), None))
