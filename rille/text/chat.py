"""A conversation as the prompt that the model reads, and the part of it that the model learns to write.

    prompt  := [tool-declare] [thinking-effort] {message} [tool-choice] [response-format] prefix
    message := OPEN message role="..." SEP body CLOSE message SEP END_OF_MESSAGE
    body of an assistant's message := [think] response [tools]
    prefix  := OPEN message role="assistant" SEP OPEN (think | response) SEP

Each assistant message opens as the prefix does: all behind it, up to its END_OF_MESSAGE, is what the assistant must
produce, and nothing else is (`loss_mask`). With `thinking` every assistant message has a think channel, empty or not,
and without it none has. `render` is the definition; `rille.text.parser` is its inverse for what the model writes.
Source: Kimi K3's `encoding_k3.py`, the fixed texts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rille.text.markup import Segment, Writer
from rille.text.messages import (
    Call,
    Message,
    Picture,
    check_names,
    check_tool_choice,
    compact_json,
    read_messages,
    read_tools,
    value_text,
)
from rille.text.vocabulary import CONTROLS, Tokenizer, kind

Channel = Literal["think", "response"]
EFFORTS = ("low", "high", "max")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```"
_NEW_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{tools}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_JSON_ONLY = (
    "The system is invoked with `response_format={format}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"


@dataclass(frozen=True)
class EncodedPrompt:
    """ids; loss_mask: which of them the assistant produces; num_stable: how many leading ids the next turn's prompt
    shares, whatever its trailing options; num_opening: how many ids open the channel that is to be continued (Moonshot
    does not count these as prompt tokens)."""

    ids: list[int]
    loss_mask: list[bool]
    num_stable: int
    num_opening: int


@dataclass(frozen=True)
class Prompt:
    """Segments of a rendered conversation. channel: what its end has left open, None if nothing; stable: the segments
    before the trailing options; opening: the segments that open the channel."""

    segments: tuple[Segment, ...]
    channel: Channel | None
    stable: slice
    opening: slice

    @property
    def text(self) -> str:
        """The prompt as one text, control tokens spelled by name."""
        return "".join(segment.text for segment in self.segments)

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids; text that others wrote holds no control token. Raises ValueError without control tokens."""
        return self.encode(tokenizer).ids

    def loss_mask(self, tokenizer: Tokenizer) -> list[bool]:
        """For each id, whether the assistant must produce it: what follows the opened channel in its messages."""
        return self.encode(tokenizer).loss_mask

    def encode(self, tokenizer: Tokenizer) -> EncodedPrompt:
        """Encode every segment by itself (equal ones once)."""
        if not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"tokenizer must be one of rille.load_tokenizer, not {kind(tokenizer)}")
        missing = [name for name in CONTROLS if name not in tokenizer.specials]
        if missing:
            raise ValueError(
                f"the tokenizer has no special token {missing[0]!r}, without which there is no chat: use one that "
                "`train_tokenizer` makes now, or the published one"
            )
        special = {s.text: tokenizer.encode_with_specials(s.text) for s in self.segments if s.special}
        texts = list(dict.fromkeys(s.text for s in self.segments if not s.special))
        plain = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
        parts = [(special if segment.special else plain)[segment.text] for segment in self.segments]
        lengths = [len(part) for part in parts]
        return EncodedPrompt(
            ids=[token for part in parts for token in part],
            loss_mask=[s.produced for s, length in zip(self.segments, lengths, strict=True) for _ in range(length)],
            num_stable=sum(lengths[self.stable]),
            num_opening=sum(lengths[self.opening]),
        )


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    thinking: bool = True,
    effort: str | None = "max",
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | str | None = None,
    partial: bool = False,
    images: Sequence[tuple[int, int]] | None = None,
    placeholders: bool = True,
    add_generation_prompt: bool = True,
) -> Prompt:
    """Render a conversation in the OpenAI form.

    tools: as in the OpenAI form; a later system message with `tools` declares more. thinking: with a think channel.
    effort: low, high or max, or None to say nothing of it. tool_choice: auto, none or required. response_format: text,
    json_object or json_schema. partial: the last message, of the assistant, is left open to be continued (so is one
    with "partial": true). images: original (width, height) of the pictures, one for each image part or placeholder, in
    the order of the prompt (`prompt_order`). placeholders: those in texts count; else they are what somebody wrote.
    Raises a one-line ValueError for anything that cannot be rendered. Source: `encoding_k3.py`.
    """
    if not isinstance(thinking, bool):
        raise ValueError(f"thinking is {kind(thinking)}; it must be True or False")
    history = read_messages(messages)
    declared = read_tools(tools) if tools is not None else ()
    offered = _offered(declared, history)
    opened = _take_partial(history, partial, add_generation_prompt)
    options = _trailing_options(tool_choice, response_format, bool(offered))
    if effort is not None and effort not in EFFORTS:
        raise ValueError(f"effort {effort!r} is not one of {', '.join(EFFORTS)}")

    writer = Writer(images, placeholders)
    if declared:
        _write_option(writer, "tool-declare", _TOOLS.format(tools=compact_json(declared, "tools")))
    if thinking and effort is not None:
        _write_option(writer, "thinking-effort", _EFFORT.format(effort=effort))
    _write_history(writer, history, thinking)
    stable = slice(len(writer.segments))
    for option, body in options:
        _write_option(writer, option, body)
    channel, opening = None, slice(0)
    if add_generation_prompt:
        channel, opening = _write_prefix(writer, opened, thinking)
    writer.check_images()
    return Prompt(tuple(writer.segments), channel, stable, opening)


def declared_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[Mapping[str, Any]]:
    """All tools that may be called: the request's, then those that system messages declare. Raises ValueError."""
    return _offered(read_tools(tools) if tools is not None else (), read_messages(messages))


def _offered(declared: Sequence[Mapping[str, Any]], history: Sequence[Message]) -> list[Mapping[str, Any]]:
    offered = [*declared, *(tool for message in history for tool in message.tools)]
    check_names(offered)
    return offered


def _take_partial(history: list[Message], partial: bool, add_generation_prompt: bool) -> Message | None:
    """Take the message that is to be continued off the history, if there is one."""
    early = [i for i, message in enumerate(history[:-1]) if message.partial]
    if early:
        raise ValueError(f"messages[{early[0]}] is partial; only the last message can be")
    last = history[-1]
    if not (partial or last.partial):
        return None
    if last.role != "assistant" or last.calls or not add_generation_prompt:
        raise ValueError("only a last message of the assistant, without tool calls, can be partial and continued")
    return history.pop()


def _trailing_options(
    tool_choice: str | None, response_format: Mapping[str, Any] | str | None, has_tools: bool
) -> list[tuple[str, str]]:
    """Kind and body of the system messages that stand behind the history."""
    check_tool_choice(tool_choice, has_tools)
    options = [("tool-choice", _TOOL_CHOICE[tool_choice])] if tool_choice in _TOOL_CHOICE else []
    kind, schema = read_response_format(response_format)
    if kind != "text":
        body = _JSON_ONLY.format(format=kind)
        if schema is not None:
            body += _SCHEMA.format(schema=compact_json(schema, "response_format"))
        options.append(("response-format", body))
    return options


def read_response_format(response_format: Mapping[str, Any] | str | None) -> tuple[str, Mapping[str, Any] | None]:
    """Kind (text, json_object, json_schema) and schema of a response format. Raises ValueError."""
    if response_format is None:
        return "text", None
    given = {"type": response_format} if isinstance(response_format, str) else response_format
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind in ("text", "json_object"):
        return kind, None
    if kind != "json_schema":
        raise ValueError(f"response_format {kind!r} is not one of text, json_object, json_schema")
    outer = given.get("json_schema")
    schema = outer
    for key in ("json_schema", "schema"):
        schema = outer.get(key, schema) if isinstance(outer, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError("response_format json_schema needs a schema, an object, in json_schema.schema")
    return kind, schema


def _write_option(writer: Writer, kind: str, body: str) -> None:
    writer.open("message", ("role", "system"), ("type", kind))
    writer.plain(body)
    writer.end_message()


def _write_history(writer: Writer, history: Sequence[Message], thinking: bool) -> None:
    results = 0
    for message in history:
        if message.role == "assistant":
            results = 0
            _write_assistant(writer, message, thinking)
            continue
        if message.tools:
            _write_option(writer, "tool-declare", _NEW_TOOLS.format(tools=compact_json(message.tools, "tools")))
            continue
        if message.role == "tool":
            results += 1
            assert message.tool is not None, "name_results names every result"
            writer.open("message", ("role", "tool"), ("tool", message.tool), ("index", str(results)))
        else:
            writer.open("message", ("role", message.role), *_name(message))
        _write_content(writer, message)
        writer.end_message()


def _name(message: Message) -> list[tuple[str, str]]:
    return [("name", message.name)] if message.name else []


def _write_content(writer: Writer, message: Message) -> None:
    for part in message.content:
        if isinstance(part, Picture):
            writer.image()
        else:
            writer.body(part)


def _write_assistant(writer: Writer, message: Message, thinking: bool) -> None:
    writer.open("message", ("role", "assistant"), *_name(message))
    if thinking:
        writer.open("think")
        writer.produced = True
        _write_reasoning(writer, message)
        writer.close("think")
    writer.open("response")
    writer.produced = True
    _write_content(writer, message)
    writer.close("response")
    if message.calls:
        writer.open("tools")
        for index, call in enumerate(message.calls, start=1):
            _write_call(writer, call, index)
        writer.close("tools")
    writer.end_message()
    writer.produced = False


def _write_reasoning(writer: Writer, message: Message) -> None:
    if message.reasoning.strip():
        writer.body(message.reasoning)


def _write_call(writer: Writer, call: Call, index: int) -> None:
    writer.open("call", ("tool", call.name), ("index", str(index)))
    if call.raw is not None:
        writer.produced = False  # a fallback for what was given: never an example to follow
        writer.open("json", ("type", "object"))
        writer.body(call.raw)
        writer.close("json")
        writer.produced = True
    for key, value in call.arguments.items():
        kind, text = value_text(value, f"argument {key!r}")
        writer.open("argument", ("key", key), ("type", kind))
        writer.body(text)
        writer.close("argument")
    writer.close("call")


def _write_prefix(writer: Writer, opened: Message | None, thinking: bool) -> tuple[Channel, slice]:
    """The beginning of the next assistant message; returns the channel left open and the segments that opened it."""
    writer.open("message", ("role", "assistant"), *(_name(opened) if opened else []))
    if thinking:
        opening = _open_channel(writer, "think")
        if opened:
            _write_reasoning(writer, opened)
        if opened is None or not any(opened.content):
            return "think", opening
        writer.close("think")
    opening = _open_channel(writer, "response")
    if opened:
        _write_content(writer, opened)
    return "response", opening


def _open_channel(writer: Writer, channel: Channel) -> slice:
    start = len(writer.segments)
    writer.open(channel)
    return slice(start, len(writer.segments))
