"""Names that somebody gives and that do not exist are told with the nearest that does. No torch here.

rille.Engine(model, num_page=1)    ValueError: Engine takes no 'num_page'; did you mean 'num_pages'?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def suggestion(word: str, known: Iterable[str]) -> str:
    """The nearest word, in the middle of a sentence."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ";"


def check_names(taker: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for the first name that `taker` does not know."""
    known = list(known)
    for name in given:
        if name not in known:
            near = suggestion(name, known)
            rest = "" if near.endswith("?") else f" it takes {', '.join(known)}"
            raise ValueError(f"{taker} takes no {name!r}{near}{rest}")


def named(function: Callable[P, R], taker: str | None = None) -> Callable[P, R]:
    """The same function, for which an argument of a name that it does not have is a ValueError, as a value is that it
    cannot take. taker: what it is called."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    known = [p.name for p in signature(function).parameters.values() if p.kind in kinds and p.name != "self"]

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        check_names(taker or function.__name__, given, known)
        return function(*args, **given)

    return checked


def named_fields(cls: C) -> C:
    """The same for the fields of a dataclass, and for `dataclasses.replace`."""
    cls.__init__ = named(cls.__init__, cls.__name__)
    return cls
