"""Histories of the Anthropic and the Responses API as messages and tools in the OpenAI form. No torch here.

    Anthropic    system, blocks (text, image, thinking, tool_use, tool_result)         results stand before what follows
    Responses    instructions, items (message, reasoning, function_call, function_call_output)

Reasoning and calls of one turn of the assistant become one message. Every fault is a one-line ValueError that says
where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rille.serve.asking import Json, check_keys

# The last two say where a cache is elsewhere, and how finely arguments stream: here as finely as they come.
_TOOL_KEYS = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")


@dataclass(frozen=True)
class Listed:
    """places: where each message stands in the body."""

    messages: list[Json]
    tools: list[Json] | None
    places: list[str]


@dataclass
class _Turn:
    """An assistant's message in pieces; they are many, and joined once."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)

    def message(self) -> Json:
        texts = {"content": "".join(self.content), "reasoning_content": "".join(self.reasoning)}
        return {"role": "assistant", **texts, **({"tool_calls": self.calls} if self.calls else {})}


# --- Anthropic --------------------------------------------------------------------------------------------------------


def from_anthropic(
    messages: Sequence[Json], system: str | Sequence[Json] | None, tools: Sequence[Json] | None
) -> Listed:
    """A last message of the assistant is one that is to be continued. Raises ValueError."""
    listed: list[Json] = []
    places: list[str] = []
    text = _joined(system, "system") if system is not None else ""
    if text:
        listed.append({"role": "system", "content": text})
        places.append("system")
    for i, message in enumerate(messages):
        listed += _from_blocks(message, f"messages[{i}]")
        places += [f"messages[{i}]"] * (len(listed) - len(places))
    if listed and listed[-1]["role"] == "assistant" and not listed[-1].get("tool_calls"):
        listed[-1]["partial"] = True
    made = None if tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    return Listed(listed, made, places)


def _joined(content: str | Sequence[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(block, f"{where}[{i}]") for i, block in enumerate(content))


def _text_of(block: Any, where: str) -> str:
    if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise ValueError(f"{where} must be of type 'text' with a text")
    return block["text"]


def _from_blocks(message: Json, where: str) -> list[Json]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ValueError(f"{where} has the role {role!r}; roles are user, assistant, system")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ValueError(f"{where}.content must be a text or a list of blocks")
    blocks = [_checked(block, f"{where}.content[{i}]") for i, block in enumerate(content)]
    return [_assistant(blocks, where)] if role == "assistant" else _others(role, blocks, where)


def _checked(block: Any, where: str) -> Json:
    known = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, dict) or kind not in known:
        raise ValueError(f"{where} is of type {kind!r}; this server takes {', '.join(known)}")
    return block


def _assistant(blocks: Sequence[Json], where: str) -> Json:
    turn = _Turn()
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        if block["type"] == "text":
            turn.content.append(_text_of(block, place))
        elif block["type"] == "thinking":
            turn.reasoning.append(_field(block, "thinking", place))
        elif block["type"] == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, Mapping):
                raise ValueError(f"{place}.input must be an object")
            turn.calls.append(_call(_field(block, "id", place), _field(block, "name", place), arguments))
        elif block["type"] != "redacted_thinking":
            raise ValueError(f"{place} is of type {block['type']!r}, which an assistant does not write")
    return turn.message()


def _others(role: str, blocks: Sequence[Json], where: str) -> list[Json]:
    results, parts = [], []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        if block["type"] == "tool_result" and role == "user":
            results.append(_result(block, place))
        elif block["type"] in ("text", "image"):
            parts.append(_part(block, place))
        else:
            raise ValueError(f"{place} is of type {block['type']!r}, which does not belong to the role {role}")
    return [*results, *([{"role": role, "content": parts}] if parts or not results else [])]


def _result(block: Json, where: str) -> Json:
    content = block.get("content") or ""
    if isinstance(content, list):
        places = [f"{where}.content[{i}]" for i in range(len(content))]
        content = [_part(_checked(part, place), place) for part, place in zip(content, places, strict=True)]
    elif not isinstance(content, str):
        raise ValueError(f"{where}.content must be a text or a list of blocks")
    return {"role": "tool", "tool_call_id": _field(block, "tool_use_id", where), "content": content}


def _part(block: Json, where: str) -> Json:
    if block["type"] == "text":
        return {"type": "text", "text": _text_of(block, where)}
    source = block.get("source")
    if block["type"] != "image" or not isinstance(source, Mapping) or source.get("type") != "base64":
        raise ValueError(f"{where} must be a text, or an image with a source of type base64")
    url = f"data:{_field(source, 'media_type', where)};base64,{_field(source, 'data', where)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Json, where: str) -> Json:
    if (tool.get("type") or "custom") != "custom":
        raise ValueError(f"{where} is of type {tool['type']!r}; this server carries no tools out, it takes custom ones")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise ValueError(f"{where}.input_schema must be an object")
    check_keys(tool, _TOOL_KEYS, where)
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return {"type": "function", "function": function}


def _call(call_id: str, name: str, arguments: Any) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _field(block: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(block.get(key), str):
        raise ValueError(f"{where}.{key} must be a text")
    return block[key]


# --- Responses --------------------------------------------------------------------------------------------------------

_TEXT_PARTS = ("input_text", "output_text", "text")


def from_responses(given: str | Sequence[Any], instructions: str | None, tools: Sequence[Any] | None) -> Listed:
    """Raises ValueError."""
    listed: list[Json | _Turn] = [{"role": "system", "content": instructions}] if instructions else []
    places = ["instructions"] * len(listed)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    turn: _Turn | None = None  # the assistant's, as long as it goes on
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        role = item.get("role") if isinstance(item, Mapping) else None
        if kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant"):
            if turn is None or (kind != "function_call" and (any(turn.content) or turn.calls)):
                turn = _Turn()
                listed.append(turn)
                places.append(where)
            _extend(turn, kind, item, where)
            continue
        turn = None
        if kind == "message":
            listed.append(_message(item, where))
        elif kind == "function_call_output":
            listed.append(_output(item, where))
        else:
            known = "message, reasoning, function_call, function_call_output"
            raise ValueError(f"{where} is of type {kind!r}; this server takes {known}")
        places.append(where)
    made = None if tools is None else [_flat_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    return Listed([one.message() if isinstance(one, _Turn) else one for one in listed], made, places)


def _extend(turn: _Turn, kind: str, item: Mapping[str, Any], where: str) -> None:
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        turn.content.append(content)
    elif kind == "message":
        parts = _list(content, f"{where}.content")
        turn.content += (_response_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    elif kind == "reasoning":  # a summary says less, and what is encrypted cannot be read
        parts = _list(content, f"{where}.content")
        turn.reasoning += (_reasoning_text(part, f"{where}.content") for part in parts)
    else:
        call = _call(_field(item, "call_id", where), _field(item, "name", where), _field(item, "arguments", where))
        turn.calls.append(call)


def _list(value: Any, where: str) -> Sequence[Any]:
    """Nothing is an empty list."""
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where} must be a list of parts, not {type(value).__name__}")
    return value or []


def _reasoning_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "reasoning_text":
        raise ValueError(f"{where} must be of type reasoning_text")
    return _field(part, "text", where)


def _response_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise ValueError(f"{where} is of type {kind!r}; here it must be {' or '.join(_TEXT_PARTS)} with a text")
    return part["text"]


def _message(item: Mapping[str, Any], where: str) -> Json:
    role, content = item.get("role"), item.get("content")
    role = "system" if role == "developer" else role
    if isinstance(content, list):
        content = [_response_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return {"role": role, "content": content}


def _response_part(part: Any, where: str) -> Json:
    if isinstance(part, Mapping) and part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": _field(part, "image_url", where)}}
    return {"type": "text", "text": _response_text(part, where)}


def _output(item: Mapping[str, Any], where: str) -> Json:
    output = item.get("output")
    if isinstance(output, list):
        output = [_response_part(part, f"{where}.output[{i}]") for i, part in enumerate(output)]
    elif not isinstance(output, str):
        raise ValueError(f"{where}.output must be a text or a list of parts")
    return {"role": "tool", "tool_call_id": _field(item, "call_id", where), "content": output}


def _flat_tool(tool: Any, where: str) -> Json:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise ValueError(f"{where} is of type {kind!r}; this server carries no tools out, it takes functions")
    keys = ("name", "description", "parameters", "strict")
    check_keys(tool, ("type", *keys), where)
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return {"type": "function", "function": function}
