"""What the assistant may write next, as a grammar: plain data, which `serve` compiles into masks over tokens.

    start    := [reasoning CLOSE think SEP OPEN response SEP] answer
    answer   := (text | JSON of the asked form) CLOSE response SEP [tools] CLOSE message SEP
    tools    := OPEN tools SEP {call} CLOSE tools SEP
    call     := OPEN call tool="NAME" index="N" SEP {argument}* CLOSE call SEP      arguments in any order, each once

The grammar begins where the prompt ends and is complete where END_OF_MESSAGE may follow. It is text in the Lark dialect
of llguidance: control tokens stand as `<|open|>`, a text lexeme never matches one, `%json` holds a JSON schema, and a
parametric rule (`rule::_`) carries a bit for each argument that was given. What a schema asks and the grammar does not
enforce is listed in `loose`. Schemas are sorted as the model is shown them, which fixes the order of keys in values.
Source: the grammar of `rille.text.chat`; llguidance's `docs/syntax.md` and `docs/parametric.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rille.text.chat import Channel, read_response_format
from rille.text.markup import escape
from rille.text.messages import check_names, check_tool_choice, compact_json, read_tools
from rille.text.schema import Variant, check_ends, enforceable, lengths, loose_keywords, variants
from rille.text.vocabulary import CLOSE, END_OF_MESSAGE, OPEN, SEP

_NOT_ENFORCED = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties", "dependentRequired")
_MAX_BITS = 64  # of a parametric rule
_MAX_TEXT = 1 << 23  # characters; each argument brings all that it refers to
_TERMINALS = {"TEXT": r"/(.|\n)*/", "INDEX": "/[1-9][0-9]*/", "KEY": '/([^"&]|&amp;|&quot;)+/'}


@dataclass(frozen=True)
class Grammar:
    """lark: the grammar; specials: the special tokens it names; stop: the token that may follow once it is complete;
    loose: what the schemas ask that it does not enforce, one line each."""

    lark: str
    specials: tuple[str, ...] = (OPEN, CLOSE, SEP)
    stop: str = END_OF_MESSAGE
    loose: tuple[str, ...] = ()


def continuations(
    start: Channel,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | str | None = None,
    parallel: bool = True,
) -> Grammar:
    """The grammar of what may follow a prompt.

    start: the channel that the prompt has opened (`Prompt.channel`); where it holds a partial message, feed that text
    to the matcher first. tools: all that may be called (`declared_tools`). parallel: several calls in one message.
    Raises ValueError as `render` does.
    """
    checked = read_tools(tools)
    check_names(checked)
    check_tool_choice(tool_choice, bool(checked))
    writer = _GrammarWriter()
    offered = () if tool_choice == "none" else checked
    for number, tool in enumerate(offered):
        writer.call(number, tool["function"])
    head = f"TEXT {_close('think')} {_open('response')} " if start == "think" else ""
    writer.rule("start", f"{head}answer")
    writer.rule("answer", *_answers(writer, response_format, bool(offered), tool_choice == "required"))
    if offered:
        calls = " | ".join(f"call_{number}" for number in range(len(offered)))
        writer.rule("tools", f"{_open('tools')} ({calls}){'+' if parallel else ''} {_close('tools')}")
    rules = "".join(writer.lines)
    terminals = "".join(f"{name}: {body}\n" for name, body in _TERMINALS.items() if f" {name} " in rules)
    return Grammar(rules + terminals, loose=tuple(writer.loose))


def _answers(writer: _GrammarWriter, response_format: Any, has_tools: bool, required: bool) -> list[str]:
    kind, schema = read_response_format(response_format)
    end = f"{_close('response')} {'tools ' if required else 'tools? ' if has_tools else ''}{_close('message')}"
    if kind == "text":
        return [f"TEXT {end}"]
    check_ends(schema, "response_format")
    writer.rule("asked", "%json " + compact_json({"type": "object"} if schema is None else schema, "response_format"))
    called_only = [f"{_close('response')} tools {_close('message')}"] if has_tools else []
    return [f"asked {end}", *called_only]


def _open(tag: str) -> str:
    return f"{OPEN} {_quoted(tag)} {SEP}"


def _close(tag: str) -> str:
    return f"{CLOSE} {_quoted(tag)} {SEP}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # the dialect takes no bare one


def _named_variants(schema: Any, root: Mapping[str, Any], where: str) -> list[Variant]:
    try:
        return variants(schema, root)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class _GrammarWriter:
    def __init__(self):
        self.lines: list[str] = []
        self.loose: list[str] = []
        self._free: str | None = None
        self._left = _MAX_TEXT

    def rule(self, name: str, *alternatives: str) -> None:
        """Raises ValueError where the grammar grows too long."""
        self.lines.append(f"{name}: " + "\n  | ".join(alternatives) + "\n")
        self._left -= len(self.lines[-1])
        if self._left < 0:
            raise ValueError(
                f"tools and response_format come to a grammar of more than {_MAX_TEXT:,} characters, in which each "
                "argument has all that its schema refers to; shorten the schemas"
            )

    def call(self, number: int, function: Mapping[str, Any]) -> None:
        """The rules of one tool's calls."""
        name = f"call_{number}"
        arguments = self._arguments(name, function["name"], function.get("parameters"))
        header = f'call tool="{escape(function["name"])}" index="'
        self.rule(name, f'{OPEN} {_quoted(header)} INDEX "\\"" {SEP} {arguments} {_close("call")}')

    def _arguments(self, name: str, tool: str, parameters: Any) -> str:
        """An expression for any order of a tool's arguments."""
        root = {} if parameters is None else parameters
        if not isinstance(root, Mapping) or not isinstance(root.get("properties", {}), Mapping):
            raise ValueError(f"tool {tool!r}: parameters and their properties must be objects")
        required = root.get("required", [])
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise ValueError(f"tool {tool!r}: required must be a list of names")
        check_ends(root, f"tool {tool!r}")
        required = list(dict.fromkeys(required))
        properties = {**dict.fromkeys(required, True), **root.get("properties", {})}
        extra = root.get("additionalProperties", not properties)
        self.loose += [f"{tool}: {keyword} of the parameters" for keyword in _NOT_ENFORCED if keyword in root]
        if extra is not False and properties:
            self.loose.append(f"{tool}: a further argument may repeat a declared one")
        others = self._other_arguments(name, extra, root) if extra is not False else None
        ordered = [*required, *sorted(key for key in properties if key not in required)]
        elements = [self._argument(f"{name}_{i}", tool, key, properties[key], root) for i, key in enumerate(ordered)]
        if not elements:
            return f"{others}*" if others else ""
        if len(elements) > _MAX_BITS:
            self.loose.append(f"{tool}: any order of more than {_MAX_BITS} arguments (the order is fixed)")
            fixed = [element if i < len(required) else f"{element}?" for i, element in enumerate(elements)]
            return " ".join([*fixed, f"{others}*"] if others else fixed)
        given = f"{name}_given"
        choices = [f"{element} {given}::set_bit({i}) %if bit_clear({i})" for i, element in enumerate(elements)]
        if others:
            choices.append(f"{others} {given}::_")
        stop = f'"" %if is_ones([0:{len(required)}])' if required else '""'
        self.rule(f"{given}::_", stop, *choices)
        return f"{given}::0x0"

    def _argument(self, name: str, tool: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """The rule of one named argument; returns its name."""
        found = _named_variants(schema, root, f"tool {tool!r}, argument {key!r}")
        self.loose += [f"{tool}.{key}: {note}" for note in loose_keywords(found)]
        if not found:
            raise ValueError(f"tool {tool!r}: no value fits the schema of argument {key!r}")
        heads = [_quoted(f'argument key="{escape(key)}" type="{variant.type}"') for variant in found]
        values = [self._value(f"{name}_{i}", variant, f"{tool}.{key}") for i, variant in enumerate(found)]
        self.rule(
            name,
            *(f"{OPEN} {head} {SEP} {value} {_close('argument')}" for head, value in zip(heads, values, strict=True)),
        )
        return name

    def _other_arguments(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        """The rule of an argument with any key; returns its name."""
        if schema is True and self._free is not None:
            return self._free
        found = _named_variants(schema, root, f"{name}, further arguments")
        rule = "any_argument" if schema is True else f"{name}_other"
        values = [self._value(f"{rule}_{i}", variant, f"{name}: further arguments") for i, variant in enumerate(found)]
        tails = [_quoted(f'" type="{variant.type}"') for variant in found]
        self.rule(
            rule,
            *(
                f'{OPEN} "argument key=\\"" KEY {tail} {SEP} {value} {_close("argument")}'
                for tail, value in zip(tails, values, strict=True)
            ),
        )
        if schema is True:
            self._free = rule
        return rule

    def _value(self, name: str, variant: Variant, where: str) -> str:
        """An expression for a value of one type."""
        if variant.type != "string":
            schema, lost = enforceable(variant.schema)
            self.loose += [f"{where}: {note}" for note in lost]
            self.rule(f"{name}_json", "%json " + compact_json(schema, name))
            return f"{name}_json"
        options = variant.schema.get("enum")
        if options is not None:
            return "(" + " | ".join(_quoted(option) for option in options) + ")"
        counted = lengths(variant.schema)
        if counted in (None, (0, None)):
            return "TEXT"
        least, most = counted
        terminal = f"TEXT_{name}".upper()
        self.rule(terminal, f"/(.|\\n){{{least},{'' if most is None else most}}}/")
        return terminal
