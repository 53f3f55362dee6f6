"""A conversation with a model behind a URL: any server of OpenAI's chat API, read as a stream of events. No torch here.

    messages  ->  POST /v1/chat/completions  ->  chunks  ->  the events of `rille.text.reply`

`reasoning_content` is thinking. Whoever stops reading closes the connection, which ends the reply in the server too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from ssl import SSLError
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from rille.serve.config import ChatConfig
from rille.serve.dialogue import ChatEvent, Dialogue, Finished, every_picture_url
from rille.serve.tools import Toolbox
from rille.text.chat import render
from rille.text.images import Images, decode_data_url, preprocess_images
from rille.text.reply import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning, Reply, ToolCall

Json = dict[str, Any]
T = TypeVar("T")
TOO_LONG = "context_length_exceeded"

KEY_VARIABLE = "RILLE_API_KEY"
CONNECT_S = 10


def is_url(text: str) -> bool:
    """Whether this names a server, and not a checkpoint. Raises ValueError for an address that lacks its http://."""
    if re.fullmatch(r"[\w.-]+:\d{1,5}(/.*)?", text) and not Path(text).exists():
        raise ValueError(f"{text} is no checkpoint; if it is the address of a server, give http://{text}")
    return text.startswith(("http://", "https://"))


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half a bracket
        return None
    return parts if is_one and url.isascii() and url.isprintable() and " " not in url else None


def api_key() -> str | None:
    """The key to send along. Raises ValueError, which does not repeat it, for one that no header can hold."""
    key = os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE} has a character that cannot be sent; a key is of printable ASCII")
    return key


class TooLong(ValueError):
    """The server has no room for a prompt and what is to be written."""


class Server:
    """One server. url: with or without /v1. Raises ValueError for what is no URL, OSError where nobody answers."""

    def __init__(self, url: str) -> None:
        if (parts := _split(url)) is None:
            raise ValueError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        self.url, self._parts = url, parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def model(self) -> Json:
        """The first model that it serves, with its `id`. Raises ValueError where there is none, and as `text`."""
        text = self.text("/v1/models")
        try:
            models = objects(as_object(text), "data")
            if not models or not value(models[0], "id", ""):
                raise ValueError("it serves no model")
            return models[0]
        except ValueError as error:
            raise self._odd(error) from None

    def text(self, path: str) -> str:
        """A body of text. Raises ValueError for what the server refuses, OSError where it breaks off."""
        connection, response = self._ask("GET", path, None)
        with closing(connection):
            try:
                return response.read().decode("utf-8", errors="replace")
            except (OSError, HTTPException) as error:
                raise OSError(f"{self.url} broke off in the middle of an answer: {error}") from None

    def events(self, path: str, body: Json) -> Generator[Json, None, None]:
        """Events of a stream, until its end; each is an object. Raises ValueError for what the server refuses, and what
        is no event, OSError where it breaks."""
        connection, response = self._ask("POST", path, json.dumps(body).encode())
        with closing(connection):
            while line := self._line(response):
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                try:
                    event = as_object(data)
                except ValueError as error:
                    raise self._odd(error) from None
                if error := event.get("error"):
                    raise ValueError(f"{self.url}: {message_of(error)}")
                yield event

    def _odd(self, error: ValueError) -> ValueError:
        return ValueError(f"{self.url}: {error}; is this the address of a server of OpenAI's API?")

    def _line(self, response: HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (OSError, HTTPException) as error:
            raise OSError(f"{self.url} broke off in the middle of a reply: {error}") from None

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[HTTPConnection, HTTPResponse]:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_S)
        key = api_key()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt may take its time
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            text = f"{self.url} does not answer: {why}"
            number = None if isinstance(error, SSLError) else getattr(error, "errno", None)  # TLS counts its own way
            raise (OSError(text) if number is None else OSError(number, text)) from None
        if response.status != 200:
            with closing(connection):
                raise _complaint(self.url, response)
        return connection, response


def _complaint(url: str, response: HTTPResponse) -> ValueError:
    try:
        error = as_object(response.read().decode("utf-8", errors="replace")).get("error")
    except (ValueError, OSError, HTTPException):
        error = None
    if not error:
        return ValueError(f"{url}: status {response.status} {response.reason}")
    is_long = isinstance(error, dict) and error.get("code") == TOO_LONG
    return (TooLong if is_long else ValueError)(f"{url}: {message_of(error)}")


def message_of(error: Any) -> str:
    """What an error object says, or whatever stands in its place."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


# --- what others write, held against the form that it should have ---


def as_object(text: str | bytes) -> Json:
    """JSON that is an object. Raises ValueError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"its answer is no JSON object but {text[:60]!r}")
    return given


def value(given: Json, name: str, default: T) -> T:
    """What stands under a name, of the kind of the default, which stands for nothing and null. Raises ValueError."""
    found = given.get(name)
    if found is None:
        return default
    if not isinstance(found, type(default)):
        raise ValueError(f"its answer has {found!r:.60} as {name}, which must be of type {type(default).__name__}")
    return found


def objects(given: Json, name: str) -> list[Json]:
    """The list of objects under a name. Raises ValueError."""
    found = value(given, name, [])
    if odd := [one for one in found if not isinstance(one, dict)]:
        raise ValueError(f"its answer has {odd[0]!r:.60} in {name}, which must be objects")
    return found


class RemoteDialogue(Dialogue):
    """As `Dialogue`, with the first model of a server. Raises as `Server`."""

    def __init__(self, config: ChatConfig, toolbox: Toolbox | None = None) -> None:
        if (config.device, config.dtype, config.experts) != ("cpu", "fp32", "values"):
            raise ValueError("device, dtype and experts are the server's; a conversation by URL cannot choose them")
        if config.max_length is not None:
            raise ValueError("max_length is the server's; a conversation by URL cannot choose it")
        super().__init__(config, toolbox)
        self._server = Server(config.checkpoint)
        model = self._server.model()
        self.model: str = model["id"]
        self._longest = value(model, "max_model_len", 1 << 30)

    @property
    def longest(self) -> int:
        return self._longest

    def check(self) -> None:
        """As `Dialogue.check`."""
        sizes = [self.look_at(url).sizes[0] for url in every_picture_url(self.history)]
        render(
            self.history, tools=self.toolbox.schemas if self.toolbox else None, images=sizes or None, placeholders=False
        )

    def look_at(self, url: str) -> Images:
        """As `Dialogue.look_at`. Whether the model can see is the server's to say."""
        return preprocess_images([decode_data_url(url)])

    def _request(self) -> Json:
        c = self.config
        thinking = {"type": "enabled", "effort": c.effort} if c.thinking else {"type": "disabled"}
        return {
            "model": self.model,
            "messages": self.history,
            **({"tools": self.toolbox.schemas} if self.toolbox else {}),
            "thinking": thinking,
            "temperature": c.temperature,
            "top_p": c.top_p,
            "seed": c.seed + len(self.messages),  # not the same draws again in every turn
            "max_tokens": c.max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _reply(self) -> Generator[ChatEvent, None, list[tuple[str, ToolCall]]]:
        started = perf_counter()
        heard, is_over = _Heard(self.config.thinking), False
        try:
            for chunk in self._chunks():
                yield from heard.take(chunk)
            yield from heard.finish()
            is_over = True
        finally:
            calls = self._keep(heard.reply()) if heard.has_begun else []
            if not (is_over and heard.reason != "length"):
                self._leave(calls, "the reply was cut off")
        if heard.reason is None:
            raise OSError(f"{self._server.url} broke off in the middle of a reply")
        ended = heard.reason != "length"
        seconds = perf_counter() - started
        cached, read, new = heard.usage
        reason = "end" if ended else "full" if cached + read + new >= self.longest else "limit"
        yield Finished(reason, heard.reply(), (), cached, read, new, seconds)
        return calls if ended else []

    def _chunks(self) -> Iterator[Json]:
        """Of the reply. Where there is no room for as many tokens as it may have, it gets what room there is."""
        body = self._request()
        try:
            yield from self._events(body)
        except TooLong:
            del body["max_tokens"]
            yield from self._events(body)

    def _events(self, body: Json) -> Iterator[Json]:
        with closing(self._server.events("/v1/chat/completions", body)) as chunks:
            yield from chunks


class _Heard:
    """A reply, as far as it was heard."""

    def __init__(self, thinking: bool) -> None:
        self.reason: str | None = None
        self.usage = (0, 0, 0)  # of the prompt: cached, read; written
        self._reasoning: str | None = "" if thinking else None
        self._content = ""
        self._calls: list[ToolCall] = []

    @property
    def has_begun(self) -> bool:
        return bool(self._reasoning or self._content or self._calls)

    def take(self, chunk: Json) -> Iterator[Event]:
        """Raises ValueError for a chunk that has not OpenAI's form."""
        if usage := value(chunk, "usage", {}):
            details = value(usage, "prompt_tokens_details", {})
            cached = value(details, "cached_tokens", 0) or value(usage, "cached_tokens", 0)
            self.usage = (cached, value(usage, "prompt_tokens", 0) - cached, value(usage, "completion_tokens", 0))
        for choice in objects(chunk, "choices"):
            delta = value(choice, "delta", {})
            self.reason = value(choice, "finish_reason", "") or self.reason
            if text := value(delta, "reasoning_content", "") or value(delta, "reasoning", ""):  # servers differ
                self._reasoning = (self._reasoning or "") + text
                yield Reasoning(text)
            if text := value(delta, "content", ""):
                self._content += text
                yield Content(text)
            for call in objects(delta, "tool_calls"):
                yield from self._call(call)

    def _call(self, delta: Json) -> Iterator[Event]:
        function, last = value(delta, "function", {}), len(self._calls) - 1
        name = value(function, "name", "")
        index = value(delta, "index", last + 1 if name else last)  # calls that come whole are not numbered everywhere
        if index == len(self._calls):
            if not name:
                raise ValueError("its answer begins a call without a name")
            yield from self._end_call(complete=True)
            self._calls.append(ToolCall(name, "", complete=False))
            yield CallBegin(index, name)
        if not 0 <= index < len(self._calls):
            raise ValueError(f"its answer goes on with call {index}, counted from 0, of {len(self._calls)}")
        if text := value(function, "arguments", ""):
            call = self._calls[index]
            self._calls[index] = ToolCall(call.name, call.arguments + text, complete=False)
            yield CallArguments(index, text)

    def finish(self) -> Iterator[Event]:
        """The stream is over; a limit may have cut the last call."""
        yield from self._end_call(complete=self.reason not in (None, "length"))

    def _end_call(self, complete: bool) -> Iterator[Event]:
        if self._calls:
            last = self._calls[-1]
            self._calls[-1] = ToolCall(last.name, last.arguments, complete)
            yield CallEnd(len(self._calls) - 1, complete)

    def reply(self) -> Reply:
        complete = self.reason in ("stop", "tool_calls")
        return Reply(self._reasoning, self._content, tuple(self._calls), complete=complete)
