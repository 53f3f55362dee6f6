"""A conversation that does not say where the model is: messages, turns, tool calls, files. No torch here.

    say(text):   user message  ->  { reply -> calls -> results }*  ->  answer

The list of messages is the whole state. Whoever iterates may stop at any event or raise KeyboardInterrupt: what was
said until then stays in the history, and calls that were not carried out say so. `rille.serve.chat` makes replies with
a model in this process, `rille.serve.remote` asks a server for them.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rille.serve.config import ChatConfig
from rille.serve.tools import Toolbox, ToolError
from rille.text.images import Images, open_image
from rille.text.messages import prompt_order, read_messages
from rille.text.reply import Event, Reply, ToolCall

Json = dict[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """A call was carried out, or failed."""

    name: str
    text: str
    failed: bool


@dataclass(frozen=True)
class Finished:
    """A reply is over: the model ended it, or the limit of a reply did, or that of a conversation (full). faults: where
    it broke the format, what a limit broke not counted. kept, read: tokens of the prompt; new: of the reply."""

    reason: Literal["end", "limit", "full"]
    reply: Reply
    faults: tuple[str, ...]
    kept: int
    read: int
    new: int
    seconds: float


@dataclass(frozen=True)
class OutOfRounds:
    """The last results were not answered: the turn had as many rounds of calls as it may."""

    rounds: int


ChatEvent = Event | ToolResult | Finished | OutOfRounds


def full(longest: int) -> str:
    """What to do about a conversation that has no room left."""
    return f"one may have {longest:,} tokens here: /reset begins a new one, a larger --max-length allows more"


class Dialogue(ABC):
    """config: its sampling, thinking and effort may be replaced between turns. `pending`: parts of the next message."""

    def __init__(self, config: ChatConfig, toolbox: Toolbox | None = None) -> None:
        self.config, self.toolbox = config, toolbox
        self.system = config.system or ""
        self.messages: list[Json] = []
        self.pending: list[Json] = []

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages, self.pending = [], []

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens that a conversation may come to."""

    @abstractmethod
    def _reply(self) -> Generator[ChatEvent, None, list[tuple[str, ToolCall]]]:
        """One message of the assistant; returns its calls by id, those that are to be carried out."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError for messages that cannot be rendered."""

    @abstractmethod
    def look_at(self, url: str) -> Images:
        """The picture of a data URL. Raises ValueError for a model that cannot see."""

    @property
    def history(self) -> list[Json]:
        """The messages behind the system message, if there is one."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    # --- a turn ---

    def say(self, text: str) -> Generator[ChatEvent, None, None]:
        """The events of the model's turn after a message of the user's, which takes the pending pictures along.

        Raises ValueError for a text that cannot be rendered. A message without any reply is taken back.
        """
        parts = [*self.pending, {"type": "text", "text": text}]
        before = len(self.messages)
        self.messages.append({"role": "user", "content": parts if self.pending else text})
        try:
            yield from self._turn()
        finally:
            if len(self.messages) == before + 1:
                del self.messages[before:]
            else:
                self.pending = []

    def _turn(self) -> Iterator[ChatEvent]:
        for _ in range(self.config.max_rounds):
            calls = yield from self._reply()
            if not calls:
                return
            yield from self._carry_out(calls)
        yield OutOfRounds(self.config.max_rounds)

    def _keep(self, reply: Reply) -> list[tuple[str, ToolCall]]:
        """Append a reply to the history, without calls that were cut off; returns its calls by id."""
        calls = tuple(call for call in reply.calls if call.complete)
        first = 1 + sum(len(message.get("tool_calls", ())) for message in self.messages)
        sound = tuple(replace(call, arguments=sound_arguments(call.arguments)) for call in calls)
        message = replace(reply, calls=sound).to_message(lambda place: f"call_{first + place - 1}")
        self.messages.append(message)
        return [(entry["id"], call) for entry, call in zip(message.get("tool_calls", ()), calls, strict=True)]

    def _carry_out(self, calls: list[tuple[str, ToolCall]]) -> Iterator[ToolResult]:
        assert self.toolbox is not None, "without tools the parser drops calls"
        left = list(calls)
        try:
            while left:
                call_id, call = left[0]
                try:
                    result = ToolResult(call.name, self.toolbox.run(call.name, call.arguments), failed=False)
                except ToolError as error:
                    result = ToolResult(call.name, f"error: {error}", failed=True)
                self._answer(call_id, call, result.text)
                left.pop(0)
                yield result
        finally:
            self._leave(left, "the user stopped here")

    def _leave(self, calls: list[tuple[str, ToolCall]], why: str) -> None:
        for call_id, call in calls:
            self._answer(call_id, call, f"error: not carried out, {why}")

    def _answer(self, call_id: str, call: ToolCall, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": call.name, "content": text})

    # --- pictures and files ---

    def attach(self, path: str | Path) -> Images:
        """Let a picture go with the next message. Raises ValueError for no picture, or a model that cannot see."""
        part = picture_part(Path(path).expanduser())
        picture = self.look_at(part["image_url"]["url"])
        self.pending.append(part)
        return picture

    def save(self, path: str | Path) -> None:
        """Write the conversation as JSON: {"messages": [...], "tools": [...]}, pictures inside.

        Raises ValueError for a file that exists and holds something else, OSError where it cannot be written.
        """
        path = Path(path).expanduser()
        if path.exists():
            read_conversation(path)
        if not self.messages:
            raise ValueError("nothing was said yet")
        tools = {"tools": self.toolbox.schemas} if self.toolbox else {}
        content = json.dumps({"messages": self.history, **tools}, ensure_ascii=False, indent=1)
        path.write_text(content + "\n", encoding="utf-8")

    def load(self, path: str | Path) -> None:
        """Go on with a conversation that was saved, or any list of messages in the OpenAI form. Raises ValueError."""
        messages = read_conversation(Path(path).expanduser())
        before = self.system, self.messages
        self.system, self.messages = "", messages
        if messages[0]["role"] == "system" and isinstance(messages[0].get("content"), str):
            self.system, self.messages = messages[0]["content"], messages[1:]
        try:
            self.check()
        except ValueError:
            self.system, self.messages = before
            raise
        self.pending = []


def sound_arguments(arguments: str) -> str:
    """Arguments that the history can hold: JSON that is no object becomes an empty one (the call has failed)."""
    try:
        return arguments if isinstance(json.loads(arguments), dict) else "{}"
    except (ValueError, RecursionError):
        return arguments


def picture_part(path: Path) -> Json:
    """A picture as a part of a message, its file's bytes inside. Raises ValueError for what is no picture."""
    open_image(path, "picture")
    kind = mimetypes.guess_type(path.name)[0] or ""
    kind = kind if kind.startswith("image/") else "image/png"
    url = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def picture_urls(message: Mapping[str, Any]) -> list[str]:
    """The data URLs of a message's pictures. Raises ValueError for a picture that is elsewhere."""
    content = message.get("content")
    urls = []
    for part in content if isinstance(content, list) else []:
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            outer = part.get("image_url", part.get("image"))
            url = outer.get("url") if isinstance(outer, Mapping) else outer
            if not isinstance(url, str) or url[:5].lower() != "data:":
                raise ValueError(f"pictures must come along, as data: URLs, not {str(url)[:60]!r}")
            urls.append(url)
    return urls


def every_picture_url(messages: Sequence[Json]) -> list[str]:
    """Of a whole conversation, in the order in which its prompt has them. Raises ValueError."""
    urls = [url for message in messages for url in picture_urls(message)]
    if len(urls) < 2:
        return urls
    return [url for place in prompt_order(messages) for url in picture_urls(messages[place])]


def read_conversation(path: Path) -> list[Json]:
    """The messages of a file. Raises ValueError for a file that holds no conversation."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no conversation: it is not JSON ({error})") from None
    messages: Any = content.get("messages") if isinstance(content, dict) else content
    try:
        checked = read_messages(messages)
    except ValueError as error:
        raise ValueError(f"{path} holds no conversation: {error}") from None
    if any(message.partial for message in checked):
        raise ValueError(f"{path} has a message that is partial; chat goes on from whole ones")
    return messages
