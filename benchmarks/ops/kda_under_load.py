"""KDA's kernels again and again beside processes that share the card: does a result ever differ, and whose is it?

    PYTHONPATH=. python3 benchmarks/ops/kda_under_load.py [--seconds 60] [--busy 12] [--forms "as it is,twin"]

Alone on the card every call has had the same bits; in time slices among dozens of processes one in thousands had NaN.
Busy processes take the time slices: products, copies, small kernels of torch, nothing of ours. This one repeats, a
round after another and in every form for so many seconds, on fixed inputs:

    first      the first kernel, T in two digits        pass     the state pass on fixed outputs of the first
    backward   its four kernels, each on fixed inputs   plain    a known pattern, written by torch
    tma        the same pattern, by a kernel that does nothing but store a tile as the first kernel does

and compares all bits with a run from before the others began (plain, tma: with the pattern). New memory holds a NaN of
one kind: where it still stands, a store has not arrived; a NaN that a kernel made has other bits. What differs is read
a second time, so that a store that came late is told from one that never came.

It decides: where `plain` differs, it is the card or the driver; where `tma` does and not with "whole wait", the wait at
the end of kernels that store by TMA; where "as it is" does and not "first twin" or "pass twin", that Gluon kernel.
A form in which nothing differs says something after several times the rounds that another form took to differ. Ends
with 1 where a bit differed. A cold cache adds a minute or two for compiling; --busy 0 is the control.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from kda_parts.repeated import FORMS, TILES, WORKS, Stage, controls, described, different, in_form, stages_of

LINES = 20  # that tell of differing runs, of one form


def repeat(name: str, stages: list[Stage], seconds: float) -> int:
    """How many runs differed."""
    began, rounds, found = time.time(), 0, Counter[str]()
    lines = 0
    while time.time() - began < seconds:
        rounds += 1
        for stage in stages:
            got = stage.run()
            wrong = different(got, stage.expected)
            found.update([stage.name] if wrong else [])
            for tensor in wrong if lines < LINES else ():
                text = f"{stage.name}: {tensor} {described(got[tensor], stage.expected[tensor])}"
                print(f"  {time.strftime('%H:%M:%S')} {name}, round {rounds}, {text}", flush=True)
                lines += 1
    runs, ended = rounds * len(stages), ", ".join(f"{stage} {count}" for stage, count in found.items())
    print(f"{name}: {runs} runs, {rounds} of each stage, differing: {ended or 'none'}", flush=True)
    return found.total()


def keep_busy(kind: int, device: str) -> None:
    """Until the process that began this one has gone, or ends it."""
    size, parent = 4096 if device == "cuda" else 64, os.getppid()
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in "ab")
    wide, small = torch.zeros(size, 4 * size, device=device), torch.randn(64, 1024, device=device)
    copied = torch.empty_like(wide)
    calls = (partial(torch.mm, a, b), partial(copied.copy_, wide), partial(torch.softmax, small, 1))
    calls += (partial(torch.mm, wide[:, : size // 4].T, wide[:, : size // 4]),)
    said = False
    while os.getppid() == parent:
        for _ in range(20):
            calls[kind % len(calls)]()
        if device == "cuda":
            torch.cuda.synchronize()
        if not said:
            print("busy", flush=True)
        said = True


@contextmanager
def load(processes: int, device: str) -> Iterator[None]:
    """Beside so many busy processes, all of which must last to the end."""
    command = [sys.executable, __file__, "--device", device, "--kind"]
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


def made_in(name: str, options: argparse.Namespace) -> list[Stage]:
    """The stages that are wanted, compiled, and twice the same before anything runs beside them."""
    with in_form(FORMS[name]), torch.no_grad():
        made = [stage for tiles in TILES for stage in controls(tiles, FORMS[name].whole, options.device)]
        if options.device == "cuda":
            made += [stage for work in WORKS for stage in stages_of(work)]
        chosen = [stage for stage in made if stage.name.startswith(tuple(options.stages.split(",")))]
        if not chosen:
            raise SystemExit(f"no stage begins with {options.stages!r}; there are {', '.join(x.name for x in made)}")
        for stage in chosen:
            if wrong := different(stage.run(), stage.expected):
                raise SystemExit(f"{name}: {stage.name}: {', '.join(wrong)} differ with nothing beside them")
    return chosen


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for each form")
    parser.add_argument("--busy", type=int, default=12, help="processes beside this one")
    parser.add_argument("--forms", default=",".join(FORMS), help="by commas")
    parser.add_argument("--stages", default="", help="beginnings of their names, by commas; all by default")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: nothing but the plain control")
    parser.add_argument("--kind", type=int, help="be the busy process of this number")
    options = parser.parse_args(words)
    if options.kind is not None:
        return keep_busy(options.kind, options.device)
    names = options.forms.split(",")
    if unknown := [name for name in names if name not in FORMS]:
        parser.error(f"no form {unknown[0]!r}; there are {', '.join(FORMS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("kda_under_load: no CUDA device")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    stages = {name: made_in(name, options) for name in names}
    differing = 0
    with load(options.busy, options.device):
        for name in names:
            with in_form(FORMS[name]):
                differing += repeat(name, stages[name], options.seconds)
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
