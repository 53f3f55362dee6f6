"""JSON schemas of arguments, split by the type that an XTML argument names.

    schema  ->  (type, schema of only that type)*        type in string, number, boolean, null, object, array

A string stands raw in XTML and everything else as JSON, and so a grammar must know the type before it knows the value:
unions, enumerations and references are opened until each part has one type.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

TYPES = ("string", "number", "boolean", "null", "object", "array")
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
# What the compiler of grammars does not know, and would refuse; and where in a schema others lie.
_UNKNOWN = (
    *("uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$recursiveRef"),
)
_FORMATS = "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
_ODD_PATTERN = re.compile(r"\(\?(?!:)|(?<!\\)(?:\\\\)*\\[1-9bBc]")  # looks around, back, at edges of words
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LARGEST, _SMALLEST = 2**53, 2.0**-53  # of bounds: beyond, a double is exact no more, and the compiler gives up
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")  # hold values, not schemas
_KEYWORDS = {"anyOf": list, "oneOf": list, "allOf": list, "enum": list, "$ref": str, "minLength": int, "maxLength": int}
MAX_LENGTH = 2000  # of a string whose characters a grammar counts
_INDEX = re.compile("[0-9]{1,18}")
_DEPTH = 16  # of references and unions at one place
_PARTS = 1_000  # that unions and references at one place may open into


@dataclass(frozen=True)
class Variant:
    """The values of one XTML type that a schema admits."""

    type: str
    schema: Mapping[str, Any]


def variants(schema: Any, root: Mapping[str, Any]) -> list[Variant]:
    """Split a schema by type. root: what `$ref` points into. Raises ValueError for a reference that leads nowhere, and
    for unions that open into more parts than a grammar should have."""
    found: list[Variant] = []
    for variant in _Splitter(root).split(schema, _DEPTH):
        if variant.type != "string":  # of whose schema a grammar reads no references
            variant = Variant(variant.type, _with_root(variant.schema, root))
        if variant not in found:
            found.append(variant)
    return found


def enforceable(schema: Any) -> tuple[Any, list[str]]:
    """A schema of JSON without the keywords that no grammar enforces, and these, one line each."""
    if isinstance(schema, list):
        parts = [enforceable(part) for part in schema]
        return [part for part, _ in parts], [note for _, notes in parts for note in notes]
    if not isinstance(schema, Mapping):
        return schema, []
    kept, lost = {}, []
    for key, value in schema.items():
        if _is_lost(key, value, schema):
            lost += [f"{key} {value!r:.80}"] if (key, value) != ("uniqueItems", False) else []
        elif key in _MAPS and isinstance(value, Mapping):
            parts = {name: enforceable(part) for name, part in value.items()}
            kept[key] = {name: part for name, (part, _) in parts.items()}
            lost += [note for _, notes in parts.values() for note in notes]
        elif key in _VALUES:
            kept[key] = value
        else:
            kept[key], notes = enforceable(value)
            lost += notes
    if "oneOf" in kept:  # the compiler takes it only where it sees that no two branches meet
        lost.append(f"oneOf {schema['oneOf']!r:.80}")
        branches = {"anyOf": kept.pop("oneOf")}
        kept |= {"allOf": [*kept.get("allOf", ()), branches]} if "anyOf" in kept else branches
    return kept, lost


def _is_lost(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    odd_format = key == "format" and value not in _FORMATS and schema.get("type") not in ("integer", "number")
    odd_pattern = key == "pattern" and _ODD_PATTERN.search(str(value)) is not None
    return key in _UNKNOWN or odd_format or odd_pattern or (key in _BOUNDS and _is_extreme(value))


def _is_extreme(bound: Any) -> bool:
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    return is_number and bound != 0 and not _SMALLEST <= abs(bound) <= _LARGEST


def check_ends(schema: Any, where: str) -> None:
    """Raise ValueError where a part of a schema is only itself again (`{"$ref": "#"}`): no value ever begins, and a
    grammar for it lets nothing through. A part begins once those begin that it leaves no way around."""
    try:
        needs = {id(node): _needs(node, schema) for node in _nodes(schema)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    endless = _endless(needs)
    for node in _nodes(schema):
        if id(node) in endless:
            raise ValueError(f"{where}: a part of the schema refers to itself before any value begins: {node!r:.80}")


def _endless(needs: Mapping[int, list[list[Any]]]) -> set[int]:
    """Ids of the schemas that never begin. Each waits for one of its groups at a time, the last that it has left, so
    that every part is looked at a few times, however many wait for it. The groups are used up."""
    endless, waiting = set(needs), dict[int, list[tuple[int, int]]]()
    looked_at = [(key, len(groups)) for key, groups in needs.items()]
    while looked_at:
        key, num_left = looked_at.pop()
        groups = needs[key]
        if len(groups) != num_left:  # another part of that group has begun before
            continue
        while groups and any(id(part) not in endless for part in groups[-1]):
            groups.pop()
        if groups:
            for part in groups[-1]:
                waiting.setdefault(id(part), []).append((key, len(groups)))
        else:
            endless.remove(key)
            looked_at += waiting.pop(key, ())
    return endless


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and those that lie in it, the outer ones first."""
    waiting = deque([schema])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, Mapping):
            yield node
            waiting += (part for key, part in node.items() if key not in _VALUES)


def _needs(node: Mapping[str, Any], root: Any) -> list[list[Any]]:
    """Groups of schemas: one of each group must begin before this one does."""
    reference = str(node.get("$ref", ""))
    groups = [[_resolve(reference, root)]] if reference == "#" or reference.startswith("#/") else []
    parts = {key: node[key] if isinstance(node.get(key), list) else [] for key in ("allOf", "anyOf", "oneOf")}
    groups += [[part] for part in parts["allOf"]]
    return groups + [branches for branches in (parts["anyOf"], parts["oneOf"]) if branches]


def loose_keywords(found: Sequence[Variant]) -> list[str]:
    """Keywords of raw strings that a grammar over raw text does not enforce."""
    notes = []
    for schema in (variant.schema for variant in found if variant.type == "string"):
        ignored = [keyword for keyword in ("pattern", "format", "allOf", "not", "if") if keyword in schema]
        if lengths(schema) is None:
            ignored += [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
        notes += [f"{keyword} {schema[keyword]!r}" for keyword in ignored]
    return notes


def lengths(schema: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """Least and most characters of a string; None where they are more than a grammar should count."""
    least, most = max(0, int(schema.get("minLength", 0))), schema.get("maxLength")
    return None if max(least, most or 0) > MAX_LENGTH else (least, most)


class _Splitter:
    """Opens unions and references. Those of a few lines may open into millions of parts: there is a limit."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _PARTS

    def split(self, schema: Any, depth: int) -> Iterator[Variant]:
        if schema is False:
            return
        if schema is not True and not isinstance(schema, Mapping):
            raise ValueError(f"a schema must be an object, true or false, not {str(schema)[:80]!r}")
        _check_keywords({} if schema is True else schema)
        self._left -= 1
        if depth == 0:
            raise ValueError(f"a schema nests unions or references more than {_DEPTH} deep")
        if self._left < 0:
            raise ValueError(f"a schema's unions and references open into more than {_PARTS:,} parts")
        plain = {} if schema is True else {key: value for key, value in schema.items() if key not in _NOTES}
        for union in ("anyOf", "oneOf"):
            if union in plain:
                rest = {key: value for key, value in plain.items() if key != union}
                for branch in plain[union]:
                    yield from self.split(_joined(rest, branch), depth - 1)
                return
        if "$ref" in plain:
            rest = {key: value for key, value in plain.items() if key != "$ref"}
            yield from self.split(_joined(rest, _resolve(plain["$ref"], self._root)), depth - 1)
            return
        yield from self._of_types(plain, self._types(plain, depth))

    def _of_types(self, plain: Mapping[str, Any], kinds: Sequence[str]) -> Iterator[Variant]:
        if "const" in plain or "enum" in plain:
            values = [plain["const"]] if "const" in plain else plain["enum"]
            if "number" not in kinds:  # then integers alone
                values = [value for value in values if not isinstance(value, float) or value.is_integer()]
            for kind in TYPES:
                group = [value for value in values if _type_of(value) == kind]
                if group and kind in {_written_as(given) for given in kinds}:
                    yield Variant(kind, {"enum": group})
            return
        for kind in kinds:
            if kind != "string" or plain.get("minLength", 0) <= plain.get("maxLength", math.inf):
                yield Variant(_written_as(kind), {**plain, "type": kind})

    def _types(self, schema: Mapping[str, Any], depth: int) -> list[str]:
        """JSON types that a schema without unions admits."""
        given = schema.get("type", TYPES)
        kinds = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
        unknown = [kind for kind in kinds if kind not in (*TYPES, "integer")]
        if unknown:
            raise ValueError(f"a schema has the type {unknown[0]!r}; types are {', '.join(TYPES)}, integer")
        for part in schema.get("allOf", ()):
            admitted = {variant.type for variant in self.split(part, depth - 1)}
            kinds = [kind for kind in kinds if _written_as(kind) in admitted]
        return [kind for kind in kinds if not (kind == "integer" and "number" in kinds)]


def _check_keywords(schema: Mapping[str, Any]) -> None:
    for keyword, kind in _KEYWORDS.items():
        if not isinstance(schema.get(keyword, kind()), kind):
            raise ValueError(f"a schema's {keyword} must be of type {kind.__name__}, not {schema[keyword]!r:.60}")


def _joined(siblings: Mapping[str, Any], schema: Any) -> Any:
    """A schema together with the keywords that stood beside its union or reference."""
    if schema is True:
        return siblings
    return {**siblings, **schema} if isinstance(schema, Mapping) else schema


def _written_as(kind: str) -> str:
    """XTML knows no integers."""
    return "number" if kind == "integer" else kind


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _resolve(reference: str, root: Any) -> Any:
    """What a reference inside this schema (`#/...`) points to."""
    target = root
    if reference.startswith("#") and reference[1:2] not in ("", "/"):
        raise ValueError(f"the reference {reference!r} names an anchor; give the path to it, as #/$defs/name")
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and key not in target:  # in a URL, what is no letter may stand as %20
            key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and key in target:
            target = target[key]
        elif isinstance(target, list | tuple) and _INDEX.fullmatch(key) and int(key) < len(target):
            target = target[int(key)]
        else:
            raise ValueError(f"the reference {reference!r} leads nowhere in its schema")
    if not reference.startswith("#"):
        raise ValueError(f"the reference {reference!r} points outside of its schema")
    return target


def _with_root(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that stands by itself: what its references point to comes along, each part once."""
    names: dict[str, str] = {}
    parts: dict[int, tuple[str, Any]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        for reference in _references(waiting.pop()):
            if reference not in names:
                part = _resolve(reference, root)
                if id(part) not in parts:
                    parts[id(part)] = f"part{len(parts)}", part
                    waiting.append(part)
                names[reference] = parts[id(part)][0]
    if not names:
        return schema
    return {**_moved(schema, names), "$defs": {name: _moved(part, names) for name, part in parts.values()}}


def _references(schema: Any) -> Iterator[str]:
    """All that stand in a schema."""
    waiting = [(schema, False)]
    while waiting:
        node, is_map = waiting.pop()
        if isinstance(node, list):
            waiting += ((item, False) for item in node)
        elif isinstance(node, Mapping):
            if not is_map and isinstance(node.get("$ref"), str):
                yield node["$ref"]
            waiting += ((v, key in _MAPS and not is_map) for key, v in node.items() if is_map or key not in _VALUES)


def _moved(node: Any, names: Mapping[str, str], is_map: bool = False) -> Any:
    """The same schema, its references pointing to where the parts have moved. is_map: of names to schemas."""
    if isinstance(node, list):
        return [_moved(item, names) for item in node]
    if not isinstance(node, Mapping):
        return node
    moved = {}
    for key, value in node.items():
        if not is_map and key == "$ref" and isinstance(value, str):
            moved[key] = f"#/$defs/{names[value]}"
        else:
            is_value = key in _VALUES and not is_map
            moved[key] = value if is_value else _moved(value, names, key in _MAPS and not is_map)
    return moved
