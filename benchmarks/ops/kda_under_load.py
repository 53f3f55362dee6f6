"""KDA's forward and backward pass again and again while processes take turns on one card: the bits must never change.

    PYTHONPATH=. python3 benchmarks/ops/kda_under_load.py [--seconds 60] [--repeating 6] [--busy 6]

Between two turns a card saves what a kernel has on its multiprocessors and puts it back, and what a kernel does there
against the rules can show then and at no other time (`rille/ops/barriers_gluon.py` is what was found so). Processes
that repeat compare every result with their first one; busy ones see to it that turns end in mid-kernel: products,
copies and small kernels of torch. New memory holds NaN. It is a matter of luck: what one call in 50,000 shows needs
several hundred thousand. Ends with 1 where a bit differed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from kda_parts import backward as bench
from torch import Tensor

from rille.ops.kda import forward

TOGETHER = 8  # calls between two waits for the card
LINES = 20  # that tell of differing results
WORK = bench.Work("16 x 1000", 16, (1000,))
WORKS = {"bounded": WORK, "softplus": replace(WORK, bound=None)}
Results = Sequence[tuple[str, Tensor]]


def parts_of(case: bench.Case) -> Callable[[], Results]:
    """The forward pass with all that its first kernel hands on, then the same with its gradients."""
    inputs, state = bench.inputs_of(case), case.leaves[7].detach()
    arguments = (*inputs[:2], *inputs[3:8], inputs.spans_M2)

    def run() -> Results:
        with torch.no_grad():
            made, final = forward.intra(*arguments, digits=2), torch.empty_like(state)
            o = forward.state_pass(made, inputs.v_NHV, inputs.starts, inputs.order_S, inputs.first_S, state, final)
        alone = [("o alone", o), ("final alone", final), *made._asdict().items()]
        return alone + list(zip(bench.NAMES, case.ours(), strict=True))

    return run


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def described(got: Tensor, expected: Tensor) -> str:
    """How many elements differ, and the bits of the first of them."""
    wrong = bits(got) != bits(expected)
    if not wrong.any():
        return "right at a second look"
    at, mask = wrong.nonzero(), (1 << 8 * got.element_size()) - 1
    found = [f"{x & mask:x}" for x in bits(got)[wrong][:8].tolist()]
    return f"{len(at)} of {tuple(got.shape)}, {int(got.isnan().sum())} NaN, from {at[0].tolist()}: {' '.join(found)}"


def repeat(name: str, run: Callable[[], Results], seconds: float) -> int:
    """How many calls differed from the first."""
    expected, began, calls, differing, lines = dict(run()), time.time(), 0, 0, 0
    while time.time() - began < seconds:
        results = [run() for _ in range(TOGETHER)]
        same = torch.stack([(bits(x) == bits(expected[key])).all() for got in results for key, x in got])
        calls += TOGETHER
        for got, equal in zip(results, same.view(TOGETHER, -1).tolist(), strict=True):
            differing += not all(equal)
            for (key, x), fine in zip(got, equal, strict=True):
                if not fine and lines < LINES:
                    print(f"  {name}, {calls} calls, {key}: {described(x, expected[key])}", flush=True)
                    lines += 1
    print(f"{name}: {calls} calls, {differing} differ", flush=True)
    return differing


def keep_busy(kind: int) -> None:
    """Until the process that began this one has gone, or ends it."""
    parent = os.getppid()
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    wide, small = torch.zeros(4096, 16384, device="cuda"), torch.randn(64, 1024, device="cuda")
    copied = torch.empty_like(wide)
    calls = (partial(torch.mm, a, b), partial(copied.copy_, wide), partial(torch.softmax, small, 1))
    calls += (partial(torch.mm, wide[:, :1024].T, wide[:, :1024]),)
    print("busy", flush=True)
    while os.getppid() == parent:
        for _ in range(20):
            calls[kind % len(calls)]()
        torch.cuda.synchronize()


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Beside so many busy processes, all of which must last to the end."""
    command = [sys.executable, __file__, "--kind"]
    children = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(processes)]
    try:
        for child in children:
            if child.stdout is None or child.stdout.readline() != "busy\n":
                raise SystemExit("a busy process did not begin; its own words are above")
        yield
        gone = sum(child.poll() is not None for child in children)
        if gone:
            raise SystemExit(f"{gone} of {processes} busy processes ended early: the load was not what it should be")
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


def beside_others(options: argparse.Namespace) -> int:
    """The largest exit status of the processes that repeat."""
    repeating = [
        [sys.executable, __file__, "--gate", gate, "--seconds", str(options.seconds)]
        for gate in (list(WORKS) * options.repeating)[: options.repeating]
    ]
    with load(options.busy):
        children = [subprocess.Popen(command) for command in repeating]
        return max((abs(child.wait()) for child in children), default=0)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--repeating", type=int, default=6, help="processes that repeat the kernels, gate by gate")
    parser.add_argument("--busy", type=int, default=6, help="processes that take turns with them")
    parser.add_argument("--gate", choices=WORKS, help="be one that repeats")
    parser.add_argument("--kind", type=int, help="be the busy one of this number")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("kda_under_load: no CUDA device")
    if options.kind is not None:
        return keep_busy(options.kind)
    if options.gate is None:
        raise SystemExit(beside_others(options))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    run = parts_of(bench.draw(WORKS[options.gate], stateful=True))
    raise SystemExit(1 if repeat(options.gate, run, options.seconds) else 0)


if __name__ == "__main__":
    main()
