r"""What is wrong with the form of a text, put right, and counted: no change without its name in the report.

    line endings        \r\n and a lone \r become \n
    byte order mark     at the start, removed
    terminal escapes    ESC [ ... letter (colours, moves of the cursor), removed
    control characters  all but tab, line feed and form feed, removed; so are the non-characters U+FFFE and U+FFFF
    replaced characters a text with U+FFFD has lost bytes somewhere else: it is kept, and counted
    trailing spaces     at the ends of lines (prose only), removed
    blank lines         more than two in a row become two (prose only)
    boilerplate lines   of web pages, removed (prose only): no script, cookie notices

Source of the last: the rules of C4 (Raffel et al. 2020, section 2.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")
_BLANKS = re.compile(r"\n{4,}")
_BOILERPLATE = (
    "enable javascript",
    "javascript is disabled",
    "javascript is required",
    "uses cookies",
    "use of cookies",
)


def _without_boilerplate(text: str) -> str:
    low = text.lower()
    if len(low) != len(text) or not any(phrase in low for phrase in _BOILERPLATE):
        return text  # a text whose case changes its length is left as it is
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not any(phrase in line.lower() for phrase in _BOILERPLATE))


def _without_trailing(text: str) -> str:
    return "\n".join([line.rstrip(" \t") for line in text.split("\n")])


Change = tuple[str, Callable[[str], str]]

ANY: tuple[Change, ...] = (
    ("byte order mark", lambda text: text.removeprefix("\ufeff")),
    ("line endings", lambda text: text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text),
    ("terminal escapes", lambda text: _ESCAPES.sub("", text) if "\x1b" in text else text),
    ("control characters", lambda text: _CONTROLS.sub("", text)),
)
PROSE: tuple[Change, ...] = (
    *ANY,
    ("boilerplate lines", _without_boilerplate),
    ("trailing spaces", _without_trailing),
    ("blank lines", lambda text: _BLANKS.sub("\n\n\n", text)),
)
CHANGES: dict[str, tuple[Change, ...]] = {"prose": PROSE, "code": ANY, "plain": ()}


def clean(text: str, kind: str) -> tuple[str, list[str]]:
    """The text in good form, and the names of the changes that this took. kind: prose, code or plain (no change)."""
    changed = []
    for name, change in CHANGES[kind]:
        after = change(text)
        if len(after) != len(text) or after != text:
            changed.append(name)
            text = after
    if "\ufffd" in text and kind != "plain":
        changed.append("replaced characters (kept)")
    return text, changed
