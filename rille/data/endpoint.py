"""Chat completions from any server that speaks the OpenAI protocol. No torch here, and no client library.

    POST {base}/chat/completions   {"model", "messages", "temperature", "max_tokens", "seed"}
      -> {"choices": [{"message": {"content": ...}, "finish_reason": "stop" | "length" | ...}]}

A busy or failing server (429, 5xx, a broken connection, a time-out) is asked again after a pause that doubles; what the
request itself is at fault for (other 4xx) is not.
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


class NoAnswer(OSError):
    """The server could not be made to answer."""


class Refused(ValueError):
    """The server refuses the request as it is (wrong address, model, key)."""


@dataclass(frozen=True)
class Answer:
    """text: as it came. whole: the model stopped by itself, not at a limit."""

    text: str
    whole: bool


@dataclass(frozen=True)
class Endpoint:
    """A server and a model on it. base: http://HOST:PORT/v1. key: None where none is wanted. timeout: seconds."""

    base: str
    model: str
    key: str | None = None
    timeout: float = 120.0
    pause: Callable[[float], None] = time.sleep

    def ask(self, system: str, user: str, *, temperature: float, max_tokens: int, seed: int) -> Answer:
        """One answer. Raises Refused for 4xx but 429 and for an answer of another form, NoAnswer after five tries."""
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
                    return response.read()
            except urllib.error.HTTPError as error:
                fault = f"{error.code} {error.reason}"
                if error.code != 429 and error.code < 500:
                    detail = error.read(300).decode(errors="replace")
                    raise Refused(f"{self.base} refuses the request: {fault} {detail}") from None
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                fault = str(getattr(error, "reason", error)) or type(error).__name__
        raise NoAnswer(f"{self.base} gives no answer after {_TRIES} tries: {fault}")


def _answer_of(content: bytes) -> Answer:
    try:
        choice = json.loads(content)["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason", "stop")
    except (ValueError, KeyError, IndexError, TypeError):
        raise Refused(f"the answer is no chat completion: {content[:200].decode(errors='replace')}") from None
    return Answer(text or "", reason == "stop")
