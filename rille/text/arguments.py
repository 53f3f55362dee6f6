"""A call's typed arguments as one JSON object, written piece by piece while they are read.

    {argument key=K type=T: value}*  ->  { "K": value, ... }       strings are quoted, the rest is JSON already

Strings pass through as they come. Any other value is held until it is whole and proved to be JSON, since what has been
given out cannot be taken back.
"""

from __future__ import annotations

import json
from collections.abc import Callable

_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class ArgumentsWriter:
    """Each method returns the JSON text that it completes; faults are reported through the function given."""

    def __init__(self, fault: Callable[[str], None]):
        self.is_broken = False  # the message ended inside a value
        self._fault = fault
        self._keys: set[str] = set()
        self._key = ""
        self._kind = ""
        self._held: list[str] = []
        self._is_raw = False

    @property
    def is_raw(self) -> bool:
        """The arguments are one text that the model (or a history) gave as a whole."""
        return self._is_raw

    @property
    def is_empty(self) -> bool:
        return not self._keys

    def begin_raw(self) -> None:
        self._is_raw = True

    def begin(self, key: str, kind: str) -> str:
        if key in self._keys:
            self._fault(f"argument {key!r} is given twice")
        if kind != "string" and kind not in _KINDS:
            self._fault(f"argument {key!r} has the unknown type {kind!r}")
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        self._key, self._kind, self._held = key, kind, []
        return opening + json.dumps(key, ensure_ascii=False) + ": " + ('"' if kind == "string" else "")

    def text(self, text: str) -> str:
        if self._is_raw:
            return text
        if self._kind == "string":
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._held.append(text)
        return ""

    def end(self) -> str:
        """The value is whole."""
        return '"' if self._kind == "string" else self._proved("".join(self._held))

    def held(self) -> str:
        """What is still held of a value that will never be whole."""
        return "" if self._kind == "string" else "".join(self._held)

    def close(self) -> str:
        """The call is over."""
        if self._is_raw:
            return ""
        return "}" if self._keys else "{}"

    def _proved(self, text: str) -> str:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            self._fault(f"argument {self._key!r} of type {self._kind!r} is not JSON; taken as a string")
            return json.dumps(text, ensure_ascii=False)
        kinds = _KINDS.get(self._kind)
        if kinds is not None and type(value) not in kinds:
            self._fault(f"argument {self._key!r} of type {self._kind!r} is {type(value).__name__}")
        return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
