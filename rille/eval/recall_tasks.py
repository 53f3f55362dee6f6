"""Synthetic recall tasks of the linear-attention papers, as sequences of symbols 0 .. n - 1. No torch here.

    palindrome   x1 .. xm SEP xm .. x1                        everything after SEP is asked for
    mqar         k1 v1 .. km vm   ki vi kj vj ..              keys come again in another order; each value is asked for
    stack        PUSH s x  PUSH t y  POP s x ..               what each of many stacks gives back is asked for

A model with a small state must overwrite (palindrome), look up by key (mqar: multi-query associative recall), and keep
several places apart and in order (stack). Sources: Kimi Linear, figure 4; Zoology (arXiv:2312.04927) for mqar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np


@dataclass(frozen=True, eq=False)
class Example:
    """symbols: int64 [n]. asked: bool [n], symbol i is to be told from those before it; never the first."""

    symbols: np.ndarray
    asked: np.ndarray


@dataclass(frozen=True)
class RecallTask:
    """make(length, generator) gives an example of at most `length` symbols. choices: how many an answer may be."""

    name: str
    make: Callable[[int, np.random.Generator], Example]
    choices: int


def palindrome(symbols: int, length: int, draw: np.random.Generator) -> Example:
    """Symbol 0 separates."""
    half = (length - 1) // 2
    if half < 1:
        raise ValueError(f"a palindrome of {length} symbols has nothing to recall; give at least 3")
    body = draw.integers(1, symbols, half)
    return Example(np.concatenate([body, [0], body[::-1]]), np.arange(2 * half + 1) > half)


def mqar(symbols: int, length: int, draw: np.random.Generator) -> Example:
    """The lower half of the symbols are keys, the upper half values."""
    pairs, keys = length // 4, symbols // 2
    if not 1 <= pairs <= keys:
        raise ValueError(
            f"mqar of {length} symbols has {pairs} pairs, of {keys} keys; give a length of 4 to {4 * keys}, or more "
            "symbols"
        )
    table = np.stack([draw.permutation(keys)[:pairs], draw.integers(keys, symbols, pairs)], 1)
    told = np.concatenate([table, table[draw.permutation(pairs)]]).reshape(-1)
    places = np.arange(len(told))
    return Example(told, (places >= 2 * pairs) & (places % 2 == 1))


PUSH, POP = 0, 1


def stack(symbols: int, stacks: int, length: int, draw: np.random.Generator) -> Example:
    """0 is PUSH, 1 is POP, then come the stacks, then the values. A push or a pop of a stack that holds something is
    tossed for."""
    steps = length // 3
    if steps < 2:
        raise ValueError(f"{length} symbols are too few for a push and a pop; give at least 6")
    held: list[list[int]] = [[] for _ in range(stacks)]
    told: list[int] = []
    for step in range(steps):
        number = int(draw.integers(stacks))
        full = [place for place in range(stacks) if held[place]]
        if full and (step == steps - 1 or draw.random() < 0.5):  # so that every example asks for something
            number = full[int(draw.integers(len(full)))]
            told += [POP, 2 + number, held[number].pop()]
            continue
        value = int(draw.integers(2 + stacks, symbols))
        held[number].append(value)
        told += [PUSH, 2 + number, value]
    asked = np.zeros(len(told), dtype=bool)
    asked[2::3] = np.array(told[::3]) == POP
    return Example(np.array(told, dtype=np.int64), asked)


def recall_task(name: str, symbols: int, stacks: int = 64) -> RecallTask:
    """A task by its name, over so many symbols. Raises ValueError where they are too few for it."""
    least = {"palindrome": 3, "mqar": 4, "stack": 4 + stacks}
    if name not in least:
        raise ValueError(f"unknown task {name!r}; choose one of {', '.join(least)}")
    if symbols < least[name]:
        raise ValueError(f"{name} needs at least {least[name]} symbols, not {symbols}")
    if name == "palindrome":
        return RecallTask(name, partial(palindrome, symbols), symbols - 1)
    if name == "mqar":
        return RecallTask(name, partial(mqar, symbols), symbols - symbols // 2)
    return RecallTask(name, partial(stack, symbols, stacks), symbols - 2 - stacks)
