"""Recall tasks: solved by programs that know the rules, so that the answers are there and are right."""

import numpy as np
import pytest

from rille.eval.recall_tasks import POP, PUSH, recall_task


def examples(name: str, length: int, symbols: int, stacks: int = 4):
    draw = np.random.default_rng(1)
    return [recall_task(name, symbols, stacks).make(length, draw) for _ in range(20)]


@pytest.mark.parametrize("length", [3, 4, 65])
def test_palindromes(length):
    for example in examples("palindrome", length, 9):
        half = len(example.symbols) // 2
        assert len(example.symbols) in (length, length - 1)
        assert example.symbols[half] == 0
        assert (example.symbols == example.symbols[::-1]).all()
        assert example.asked.tolist() == [False] * (half + 1) + [True] * half


@pytest.mark.parametrize("length", [4, 16, 64])
def test_key_value_pairs(length):
    for example in examples("mqar", length, 64):
        symbols = example.symbols.tolist()
        half = len(symbols) // 2
        table = dict(zip(symbols[:half:2], symbols[1:half:2], strict=True))
        assert len(table) == length // 4
        assert sorted(symbols[half::2]) == sorted(table)
        assert [table[key] for key in symbols[half::2]] == symbols[half + 1 :: 2]
        assert np.flatnonzero(example.asked).tolist() == list(range(half + 1, len(symbols), 2))
        assert all(key < 32 <= value < 64 for key, value in table.items())


@pytest.mark.parametrize("length", [6, 60, 300])
def test_stacks(length):
    pops = 0
    for example in examples("stack", length, 20):
        held: dict[int, list[int]] = {}
        steps = zip(example.symbols.reshape(-1, 3).tolist(), example.asked.reshape(-1, 3).tolist(), strict=True)
        for (command, stack, value), asked in steps:
            assert 2 <= stack < 6 <= value < 20
            assert asked == [False, False, command == POP]
            if command == PUSH:
                held.setdefault(stack, []).append(value)
            else:
                assert held[stack].pop() == value
                pops += 1
        assert example.asked.any()
    assert pops > 5


def test_examples_repeat_with_their_seed():
    for name in ("palindrome", "mqar", "stack"):
        for a, b in zip(examples(name, 24, 16), examples(name, 24, 16), strict=True):
            assert (a.symbols == b.symbols).all()


@pytest.mark.parametrize(
    ("name", "length", "symbols", "message"),
    [
        ("palindrome", 2, 9, "nothing to recall"),
        ("palindrome", 9, 2, "needs at least 3 symbols"),
        ("mqar", 64, 16, "has 16 pairs, of 8 keys"),
        ("mqar", 3, 16, "has 0 pairs"),
        ("stack", 5, 20, "too few for a push and a pop"),
        ("stack", 60, 7, "needs at least 8 symbols"),
        ("copy", 8, 8, "unknown task 'copy'"),
    ],
)
def test_mistakes(name, length, symbols, message):
    with pytest.raises(ValueError, match=message):
        examples(name, length, symbols)
