"""Messages and tools as users give them (the OpenAI form), checked, and tool results put into the order of the calls.

    results of one run of consecutive tool messages, ids matched with the calls of the latest assistant message:
        all match   ->  sorted to call order, named by the call
        otherwise   ->  left as they are, named by themselves or by their place

Every fault is a one-line ValueError that says which message it is in.
Source: Kimi K3's `encoding_k3.py`; the checks of tools follow Moonshot's API.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

IMAGE_PARTS = ("image", "image_url")
_LOST = ("function_call", "refusal", "audio")  # what other servers' messages say outside of content and calls


@dataclass(frozen=True)
class Picture:
    """Stands in a message's content where a picture goes."""


@dataclass(frozen=True)
class Call:
    """A tool call: arguments in their order, or `raw` where they were given as a text that is not valid JSON."""

    name: str
    arguments: Mapping[str, Any]
    raw: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One checked message. `tools` are what a system message declares; `tool` names the tool of a result; `place` is
    the one among the messages as they were given."""

    role: str
    content: tuple[str | Picture, ...]
    name: str | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool: str | None = None
    call_id: str | None = None
    partial: bool = False
    place: int = 0


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Check messages and bring tool results into call order. Raises ValueError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("messages must be a list with at least one message")
    read = [replace(_read_message(message, f"messages[{i}]"), place=i) for i, message in enumerate(messages)]
    return name_results(order_results(read))


def prompt_order(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the messages in the order in which the prompt has them: results stand as their calls do. Raises as
    `read_messages`."""
    return [message.place for message in read_messages(messages)]


def read_tools(tools: Any, where: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Check a list of tools: objects of type "function" that name one, no name twice. Raises ValueError."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"{where} must be a list of tools, not {_kind(tools)}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise ValueError(f"{where}[{i}] must be an object with type 'function'")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"{where}[{i}] has no function with a name")
        compact_json(tool, f"{where}[{i}]")
    return tuple(tools)


def check_names(tools: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if two of all the declared tools, first and dynamic, have one name."""
    seen: set[str] = set()
    for tool in tools:
        name = tool["function"]["name"]
        if name in seen:
            raise ValueError(f"the tool {name!r} is declared twice")
        seen.add(name)


def check_tool_choice(tool_choice: str | None, has_tools: bool) -> None:
    """Raise ValueError unless it is None, auto, none, or required with tools to choose from."""
    if tool_choice not in (None, "auto", "none", "required"):
        raise ValueError(f"tool_choice {tool_choice!r} is not one of auto, none, required")
    if tool_choice == "required" and not has_tools:
        raise ValueError("tool_choice 'required' needs tools, and none are declared")


def compact_json(value: Any, where: str) -> str:
    """JSON without spaces, keys sorted at every depth, order of lists kept, non-ASCII as it is. Raises ValueError."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON ({error})") from None


def value_text(value: Any, where: str) -> tuple[str, str]:
    """XTML type and text of a call's argument: strings raw, everything else as JSON. Raises ValueError."""
    if isinstance(value, str):
        return "string", value
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON ({error})") from None
    if isinstance(value, bool):
        return "boolean", text
    if value is None:
        return "null", text
    if isinstance(value, (int, float)):
        return "number", text
    return ("object" if isinstance(value, Mapping) else "array"), text


def order_results(messages: Iterable[Message]) -> list[Message]:
    """Each run of tool messages that match the latest assistant message's calls in full, in the order of the calls."""
    ordered: list[Message] = []
    run: list[Message] = []
    calls: tuple[Call, ...] = ()
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        ordered += _ordered_run(run, calls)
        run = []
        if message.role == "assistant":
            calls = message.calls
        ordered.append(message)
    return ordered + _ordered_run(run, calls)


def _ordered_run(run: list[Message], calls: Sequence[Call]) -> list[Message]:
    place: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.id is not None:
            place.setdefault(call.id, position)
    if any(message.call_id not in place for message in run):
        return run
    matched = sorted((place[message.call_id or ""], i) for i, message in enumerate(run))
    return [replace(run[i], tool=calls[position].name) for position, i in matched]


def name_results(messages: list[Message]) -> list[Message]:
    """Give each tool result a tool: its own, else that of the call in its place. Raises ValueError where neither is."""
    named = []
    calls: tuple[Call, ...] = ()
    place = 0
    for message in messages:
        if message.role == "assistant":
            calls, place = message.calls, 0
        if message.role == "tool":
            if message.tool is None and place >= len(calls):
                raise ValueError(
                    f"tool result {place + 1} after the last assistant message belongs to no call and names no tool: "
                    "give it the tool_call_id of a call, or a name"
                )
            message = replace(message, tool=calls[place].name if message.tool is None else message.tool)
            place += 1
        named.append(message)
    return named


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object, not {_kind(message)}")
    role = message.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"{where} has the role {role!r}; roles are system, user, assistant, tool")
    tools = message.get("tools")
    if tools and (role != "system" or message.get("content")):
        raise ValueError(f"{where} declares tools, which only a system message without content can")
    if lost := [key for key in _LOST if message.get(key)]:
        raise ValueError(f"{where}.{lost[0]} has no place in a prompt; say it in content, and calls in tool_calls")
    if not isinstance(message.get("partial"), bool | None):
        raise ValueError(f"{where}.partial is {message['partial']!r:.80}; it must be true or false")
    return Message(
        role=role,
        content=_read_content(message.get("content"), where),
        name=_text(message, "name", where),
        reasoning=_text(message, "reasoning_content", where) or _text(message, "reasoning", where) or "",
        calls=_read_calls(message, role, where),
        tools=read_tools(tools, f"{where}.tools") if tools else (),
        tool=_text(message, "tool", where) if "tool" in message else _text(message, "name", where),
        call_id=_call_id(message),
        partial=bool(message.get("partial")),
    )


def _read_content(content: Any, where: str) -> tuple[str | Picture, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}.content must be a text or a list of parts, not {_kind(content)}")
    return tuple(_read_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _read_part(part: Any, where: str) -> str | Picture:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGE_PARTS:
        return Picture()
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"{where} must be of type 'text' with a text, or of type {' or '.join(map(repr, IMAGE_PARTS))}"
        )
    return part["text"]


def _read_calls(message: Mapping[str, Any], role: str, where: str) -> tuple[Call, ...]:
    calls = message.get("tool_calls")
    if not calls:
        return ()
    if role != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"{where}.tool_calls must be a list, in an assistant message")
    return tuple(_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))


def _read_call(call: Any, where: str) -> Call:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{where} has no function with a name")
    arguments, raw = _read_arguments(function.get("arguments"), f"{where} ({function['name']})")
    return Call(function["name"], arguments, raw, None if call.get("id") is None else str(call["id"]))


def _read_arguments(arguments: Any, where: str) -> tuple[Mapping[str, Any], str | None]:
    """The arguments, and their text where it is not valid JSON."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}, None
    if isinstance(arguments, str):
        try:
            parsed = strict_json(arguments)
        except (ValueError, RecursionError):
            return {}, arguments
    else:
        parsed = arguments
    if not isinstance(parsed, Mapping) or any(not isinstance(key, str) for key in parsed):
        raise ValueError(f"{where}: arguments must be an object with named values, not {_kind(parsed)}")
    for key, value in parsed.items():
        value_text(value, f"{where}: argument {key!r}")
    return parsed, None


def strict_json(text: str) -> Any:
    """What JSON says that keeps to its standard: no NaN, no number that a float cannot hold. Raises ValueError, and
    RecursionError where it nests too deep."""
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(float(text)):
        raise ValueError(f"{text} is out of range")
    return float(text)


def _call_id(message: Mapping[str, Any]) -> str | None:
    call_id = message.get("tool_call_id", message.get("id"))
    return None if call_id is None else str(call_id)


def _text(message: Mapping[str, Any], key: str, where: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}.{key} must be a text, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
