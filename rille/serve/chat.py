"""A conversation: messages in the OpenAI form, replies as streams of events, tool calls carried out until none is left.

    say(text):   user message  ->  { prompt -> reply -> calls -> results }*  ->  answer

The list of messages is the whole state; the prompt is rendered anew each time, and the session reads of it only what it
has not read (`rille.serve.session`). Whoever iterates may stop at any event or raise KeyboardInterrupt: what was said
until then stays in the history, and calls that were not carried out say so.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from rille.model.model import K3
from rille.serve.config import ChatConfig
from rille.serve.generate import Sampler, check_pair, check_sampling
from rille.serve.session import Session
from rille.serve.tools import Toolbox, ToolError
from rille.text.chat import Prompt, render
from rille.text.images import ImageConfig, Images, decode_data_url, open_image, preprocess_images
from rille.text.messages import read_messages
from rille.text.parser import Parser
from rille.text.reply import Event, Reply, ToolCall
from rille.text.vocabulary import CHAT_SPECIALS, Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """A call was carried out, or failed."""

    name: str
    text: str
    failed: bool


@dataclass(frozen=True)
class Finished:
    """A reply is over: the model ended it, or the limit did. faults: where it broke the format, what the
    limit broke not counted. kept, read: tokens of the prompt; new: of the reply."""

    reason: Literal["end", "limit"]
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


class Conversation:
    """config: its sampling, thinking and effort may be replaced between turns. `pending`: parts of the next message.

    Raises ValueError for a tokenizer without the chat format or of another model, and sampling out of range.
    """

    def __init__(
        self,
        model: K3,
        tokenizer: Tokenizer,
        config: ChatConfig,
        toolbox: Toolbox | None = None,
        image_config: ImageConfig | None = None,
    ):
        check_sampling(config.max_new_tokens, config.temperature, config.top_p, config.seed)
        check_pair(tokenizer, model)
        check_chat_format(tokenizer)
        self.config, self.toolbox = config, toolbox
        self.system = config.system or ""
        self.messages: list[Json] = []
        self.pending: list[Json] = []
        self._model, self._tokenizer = model, tokenizer
        self._image_config = image_config
        self._pictures: dict[str, Images] = {}
        eos = model.config.eos_id
        self._stops = {*tokenizer.stop_ids, *([] if eos is None else [eos])}
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message, and sample as at the beginning."""
        self.messages, self.pending = [], []
        self._session = Session(self._model)
        generator = torch.Generator().manual_seed(self.config.seed)
        self._sampler = Sampler(self.config.temperature, self.config.top_p, generator)

    @property
    def max_positions(self) -> int:
        """Tokens that the checkpoint was made for, as its config says."""
        return self._model.config.max_positions

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

    def _reply(self) -> Generator[ChatEvent, None, list[tuple[str, ToolCall]]]:
        """One message of the assistant; returns its calls by id, those that are to be carried out."""
        started = perf_counter()
        prompt, pictures = self.prompt()
        ids = prompt.ids(self._tokenizer)
        parser = Parser(self._tokenizer, start=prompt.channel, drop_calls=self.toolbox is None)
        new, ended, is_over = 0, False, False
        try:
            for token in self._tokens(ids, pictures):
                new += 1
                yield from parser.feed_ids([token])
                ended = parser.done or token in self._stops
                if ended:
                    break
            is_over, faults = True, parser.reply().faults
            yield from parser.finish()
        finally:
            if not is_over:
                parser.finish()
            reply = parser.reply()
            calls = self._keep(reply) if new else []
            if not (is_over and ended):
                self._leave(calls, "the reply was cut off")
        session, seconds = self._session, perf_counter() - started
        yield Finished("end" if ended else "limit", reply, faults, session.num_kept, session.num_read, new, seconds)
        return calls if ended else []

    def _tokens(self, ids: list[int], pictures: Sequence[Images]) -> Iterator[int]:
        logits_W = self._session.read(ids, pictures)
        for left in reversed(range(self.config.max_new_tokens)):
            token = self._sampler(logits_W[: self._tokenizer.vocab_size])
            yield token
            if left:
                logits_W = self._session.extend(token)

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

    # --- prompt and pictures ---

    def prompt(self) -> tuple[Prompt, list[Images]]:
        """The history as the prompt of the next reply, and its pictures. Raises ValueError."""
        pictures = [self._picture(url) for message in self.history for url in picture_urls(message)]
        tools = self.toolbox.schemas if self.toolbox else None
        sizes = [picture.sizes[0] for picture in pictures] if pictures else None
        c = self.config
        prompt = render(self.history, tools=tools, thinking=c.thinking, effort=c.effort, images=sizes)
        return prompt, pictures

    def attach(self, path: str | Path) -> Images:
        """Let a picture go with the next message. Raises ValueError for no picture, or a model that cannot see."""
        part = picture_part(Path(path).expanduser())
        picture = self._picture(part["image_url"]["url"])
        self.pending.append(part)
        return picture

    def _picture(self, url: str) -> Images:
        if url not in self._pictures:
            c = self._model.config
            if c.vision is None or c.media_pad_id is None:
                raise ValueError(
                    "this checkpoint cannot see: its config has no vision_config, so pictures have no place"
                )
            default = ImageConfig(patch=c.vision.patch_size, merge=c.vision.merge[0])
            self._pictures[url] = preprocess_images([decode_data_url(url)], self._image_config or default)
        return self._pictures[url]

    # --- files ---

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
            self.prompt()
        except ValueError:
            self.system, self.messages = before
            raise
        self.pending = []


def check_chat_format(tokenizer: Tokenizer) -> None:
    """Raise ValueError for a vocabulary without the control tokens of the chat format."""
    missing = [name for name in CHAT_SPECIALS if name not in tokenizer.specials]
    if missing:
        raise ValueError(
            f"this checkpoint was not trained on the chat format: its tokenizer lacks {', '.join(missing)}. Use "
            "`rille generate` to continue texts with it, or a checkpoint whose tokenizer is the published one or was "
            "made by today's `rille train`"
        )


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
        if part.get("type") in ("image", "image_url"):
            outer = part.get("image_url", part.get("image"))
            url = outer.get("url") if isinstance(outer, Mapping) else outer
            if not isinstance(url, str) or not url.startswith("data:"):
                raise ValueError(f"pictures must lie in the file itself, as data: URLs, not {str(url)[:60]!r}")
            urls.append(url)
    return urls


def read_conversation(path: Path) -> list[Json]:
    """The messages of a file. Raises ValueError for a file that holds no conversation."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} holds no conversation: it is not JSON ({error})") from None
    messages: Any = content.get("messages") if isinstance(content, dict) else content
    try:
        checked = read_messages(messages)
    except ValueError as error:
        raise ValueError(f"{path} holds no conversation: {error}") from None
    if any(message.partial for message in checked):
        raise ValueError(f"{path} has a message that is partial; chat goes on from whole ones")
    return messages
