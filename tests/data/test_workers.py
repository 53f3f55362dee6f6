"""Results come in order, little is under way, and a process that dies stops the run instead of hanging it."""

import os
import time
from collections.abc import Iterator

import pytest

from rille.data.workers import in_order


def square(number: int) -> int:
    time.sleep(0.02 * (number % 3 == 0))
    return number * number


def die_at_three(number: int) -> int:
    if number == 3:
        os._exit(9)
    return number


def refuse(number: int) -> int:
    raise ValueError(f"{number} is refused")


def test_order_bound_and_faults():
    taken = []

    def tasks() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    results = in_order(square, tasks(), 2)
    assert next(results) == 0
    assert len(taken) <= 5
    assert list(results) == [number**2 for number in range(1, 20)]
    with pytest.raises(OSError, match="a worker process died"):
        list(in_order(die_at_three, range(9), 2))
    with pytest.raises(ValueError, match="0 is refused"):
        list(in_order(refuse, range(9), 2))


def test_one_worker_is_this_process():
    assert list(in_order(lambda number: os.getpid(), range(3), 1)) == [os.getpid()] * 3
