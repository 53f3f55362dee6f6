"""From the words of a command line to the settings of a verb, a frozen dataclass; mistakes in one line. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO

from rille.misspelt import suggestion

Arguments = list[str]
Verb = tuple[type, Callable, str]  # the settings of a verb, its work on them, one line that says what it is for


def check_text(arguments: Arguments) -> None:
    """Arguments are UTF-8: names in other bytes could neither be printed nor given to the libraries that open files."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(f"argument {os.fsencode(argument)} is not UTF-8; rename the file or directory") from None


def parse(kind: type, arguments: Arguments, verb: str):
    """The arguments of one verb as its dataclass; without any, its help and exit code 2."""
    import tyro

    try:
        with in_one_line(f"rille {verb}"):
            return tyro.cli(kind, args=arguments or ["--help"], prog=f"rille {verb}")
    except SystemExit as end:
        raise SystemExit(end.code if arguments else 2) from None


def run_verb_of(family: str, verbs: Mapping[str, Verb], overview: Callable[[], str], arguments: Arguments) -> int:
    """Run one verb of `rille FAMILY VERB ...`, or print the family's overview; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0 if arguments else 2
    verb, *rest = arguments
    if verb not in verbs:
        raise ValueError(f"unknown verb '{family} {verb}'{suggestion(verb, verbs)} the verbs are {', '.join(verbs)}")
    kind, work, _ = verbs[verb]
    work(parse(kind, rest, f"{family} {verb}"))
    return 0


@contextmanager
def in_one_line(command: str) -> Iterator[None]:
    """What is wrong with arguments, which the parser prints as a box of many lines, becomes a ValueError of one."""
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(mistake(printed.getvalue(), command)) from None


def mistake(box: str, command: str) -> str:
    """First paragraph of a box (below its title), and the first of the options that were perhaps meant.

    Options that are missing are named without their explanations, values of another kind without Python's words for it.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│|+ ") for line in plain.splitlines()[1:]]
    paragraphs = re.split(r"\n[─╰╯-]*(?:\n|$)", "\n" + "\n".join(lines) + "\n")
    first = next(" ".join(text.split()) for text in paragraphs if text.strip())
    near = re.search(r"Perhaps you meant:\s+(-[\w.-]+)", " ".join(lines))
    ours = re.match(r"Error parsing (?:[A-Z]\w*|__tyro\S*): ", first)  # of a dataclass: it says itself what to do
    if ours:
        return first.removeprefix(ours[0])
    if first.startswith("Missing from "):
        names = re.findall(_MISSING, plain.partition("For full helptext")[0], re.MULTILINE)
        first = f"{command} needs {', '.join(names)}"
    elif refused := re.match(_REFUSED, first):
        option, value = refused.groups()
        kind = re.search(rf"^{re.escape(option)} (\S.*)$", "\n".join(lines), re.MULTILINE)
        first = f"{option} takes {kind[1] if kind else 'another kind of value'}, not {value}"
    text = first.removeprefix("Error parsing ")
    return text + (f"; did you mean {near[1]}?" if near else "") + f" (`{command} --help` lists all)"


_MISSING = r"^[│| ] {5}(\S.*?) *[│| ]$"  # names stand four columns in, their explanations eight
_REFUSED = (
    r"Error parsing (-\S+): (?:invalid literal for int|could not convert string|Could not find valid parse|"
    r"no type matching)[^']*('.*?')\]?(?:\.|$)"
)
