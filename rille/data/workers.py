"""Work spread over processes, its results in the order of the work, with a bounded amount of it under way.

A process that dies (out of memory, killed) stops the run with an error instead of hanging it, and no process outlives
the one that started it, however that ends. No torch here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_AHEAD = 2  # tasks a process that may be under way or waiting to be taken


def in_order(
    work: Callable[[Task], Result], tasks: Iterable[Task], workers: int, *, ahead: int = _AHEAD
) -> Iterator[Result]:
    """work(task) for each task, in order. One worker: here, in this process.

    work must be a function of a module, tasks and results must pickle. A script that calls this must be importable
    (`if __name__ == "__main__"`). Raises what work raises; OSError if a process died.
    """
    if workers == 1:
        yield from map(work, tasks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)
    try:
        waiting = deque()
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) >= workers * ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise OSError("a worker process died (out of memory, or killed); give fewer --workers and run again") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Libraries use one thread: there is a process for each core. A thread ends this process when its parent is gone,
    since a killed parent cannot tell it to."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent is the one that answers
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
