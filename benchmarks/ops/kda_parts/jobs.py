"""What `benchmarks/ops/kda.py` does, job by job; each runs in a process of its own.

Jobs of the first half take no times: gates, and whatever is timed later is compiled into one cache. Those of the second
half append their rows to FOLDER/rows.jsonl.
"""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import conv
import torch
import triton
from kda_parts import backward, decode, forward, segments
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

SETTINGS = 3  # processes that share the settings of one of fla's works
WORK_SECONDS = 70  # for ours and fla of one row, its tuning included

FORWARD = {work.name: work for work in (*forward.WORKS, forward.SOFTPLUS)}
TRAIN = {work.name: work for work in (*backward.WORKS, backward.SOFTPLUS)}
ERRORS = (RuntimeError, ValueError, AssertionError, triton.TritonError)  # that a work may end with
Row = tuple[str, str]  # forward, or train (forward and backward); and the work
GROUPS: dict[str, list[Row]] = {  # rows that share kernels, compiled together and timed in one process
    "H96": [("train", "H96 T8192"), ("forward", "H96 T8192")],
    "H96 packed": [("forward", "H96 8x1024"), ("forward", "H96 mixed")],
    "H16": [
        ("train", "H16 B4 T4096"), ("train", "H16 T32768"), ("forward", "H16 T32768"), ("train", "H16 T8192"),
        ("forward", "H16 T8192"),
    ],
    "H64": [("forward", "H64 T8192")],
    "H12": [("train", "H12 T65536"), ("forward", "H12 T65536")],
    "softplus": [("train", "H96 T8192 softplus"), ("forward", "H96 T8192 softplus")],
}  # fmt: skip
SPLIT_WORKS = ("H16 T32768", "H12 T65536", "H4 T65536", "H16 T8192")


@dataclass(frozen=True)
class Options:
    folder: Path
    with_fla: bool
    tried: str = ""  # settings that are not the default
    tuning: int = 100  # ms for which fla measures each of its settings, as by default


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError inside after so many seconds, between two calls into a library."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"{seconds} s are over")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def gate_forward() -> list[str]:
    with torch.no_grad():
        return forward.gate_failures(forward.check_forward())


def gate_backward(share: int) -> list[str]:
    return backward.check_gradients(backward.GATE_WORKS[share::2])[1]


def gate_decode(check: Callable[[], list[tuple[str, float, float]]]) -> list[str]:
    rows = check()
    return [
        f"gate: {what} is off by {error:.2e}, at most {limit:.0e}" for what, error, limit in rows if not error <= limit
    ]


def gate_segments() -> list[str]:
    return segments.gate_failures() + segments.compile_failures()


def gate_conv() -> list[str]:
    rows = conv.check_all()
    return [f"gate: conv {what} is off by {error:.2e}" for what, error, limit in rows if not error <= limit]


def beside_fla(work: backward.Work, options: Options) -> list[str]:
    """Errors of both on the same inputs: one setting of each of fla's kernels is enough for that."""
    take_settings(lambda turn, found: not found)
    rows, failures = backward.check_beside_fla(work, options.with_fla)
    with (options.folder / "errors.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return failures


def compile_fla_errors() -> list[str]:
    """What the jobs of errors call second, compiled while they compile ours."""
    take_settings(lambda turn, found: not found)
    backward.draw(backward.BESIDE_FLA[0], stateful=True).fla()
    return []


def case_of(part: str, work: str) -> Any:
    return forward.draw(FORWARD[work]) if part == "forward" else backward.draw(TRAIN[work])


def compile_ours(group: str) -> list[str]:
    for part, work in GROUPS[group]:
        with torch.set_grad_enabled(part == "train"):
            case_of(part, work).ours()
        torch.cuda.empty_cache()
    return []


def compile_fla(group: str, share: int) -> list[str]:
    take_settings(lambda turn, found: turn % SETTINGS == share)
    for part, work in GROUPS[group]:
        forget_settings()
        with torch.set_grad_enabled(part == "train"):
            case_of(part, work).fla()
        torch.cuda.empty_cache()
    return []


def compile_decode(options: Options) -> list[str]:
    for B in (1, 32, 128):
        bench = decode.Bench(B, 0, count=1)
        bench.decode()
        if options.with_fla:
            bench.fla()
    bench = decode.Bench(32, 8, count=1)
    bench.verify(8)
    decode.measure_sections(bench, 8)
    return []


def compile_stages() -> list[str]:
    """Kernels of the backward pass with the settings that are tried."""
    backward.measure_stages(backward.draw(TRAIN["H96 T8192"]), variants=True)
    return []


def compile_softplus() -> list[str]:
    case = backward.draw(backward.SOFTPLUS)
    case.ours()
    backward.measure_stages(case, variants=False)
    return []


def compile_segments(name: str) -> list[str]:
    segments.measure(next(work for work in segments.WORKS if work.name == name), counts=(3,))
    return []


def take_settings(wanted: Callable[[int, bool], bool]) -> None:
    """Triton's tuner runs a kernel once, untimed, with those settings for which wanted(its number, one has run) holds,
    and leaves the others out."""
    measure: Any = Autotuner._bench

    def once(self: Any, *arguments: Any, config: Any, **meta: Any) -> list[float]:
        nargs, turn, found = getattr(self, "_turns", (None, 0, False))
        if nargs is not self.nargs:
            turn, found = 0, False
        times = [float("inf")] * 3
        if wanted(turn, found):
            times = measure(self, *arguments, config=config, **meta)
        self._turns = (self.nargs, turn + 1, found or times[0] < float("inf"))
        return times

    def run(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
        call()
        return [1.0] * 3

    Autotuner._bench = once
    tuning_device().get_benchmarker = lambda: run


def append(options: Options, part: str, row: dict[str, Any]) -> None:
    with (options.folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"part": part, **row}) + "\n")
    print(part, forward.compact(row), flush=True)


def attempt(options: Options, part: str, work: str, measure: Callable[[dict[str, Any]], None]) -> None:
    """One row. What was measured before the time ran out, or before fla gave up, stands in it."""
    row: dict[str, Any] = {"work": work}
    try:
        with limited(WORK_SECONDS):
            measure(row)
    except (TimeoutError, *ERRORS) as error:
        row["error"] = f"{type(error).__name__}: {error}"[:200]
    append(options, part, row)
    torch.cuda.empty_cache()


def tuners() -> list[Any]:
    return [x for x in gc.get_objects() if issubclass(type(x), Autotuner)]


def forget_settings() -> None:
    """fla keys its settings by heads and widths, not by tokens: what it found for one work it would keep for the next
    of the same process. (A forward pass alone has kernels of the training step before it, on the same inputs.)"""
    for tuner in tuners():
        tuner.cache.clear()


def settings_tried() -> tuple[int, float]:
    """How many settings of its kernels fla has measured since `forget_settings`, and the seconds that took. Those that
    cannot run count too."""
    used = [tuner for tuner in tuners() if tuner.cache and len(tuner.configs) > 1]
    for tuner in used:
        times = [time[0] for time in tuner.configs_timings.values()]
        assert 1.0 not in times, f"{tuner.base_fn.__name__} took its settings from the first half, which measured none"
    return sum(len(tuner.configs_timings) for tuner in used), sum(tuner.bench_time for tuner in used)


def fla_beside_ours(row: dict[str, Any], case: Any, rep: int) -> None:
    """fla first tries all settings of its kernels on this very work, as long as it would by itself."""
    for _ in range(3):
        case.fla()
    row["settings"], row["tuning s"] = settings_tried()
    row["fla"] = forward.median_ms(case.fla, rep)
    row["again"] = forward.median_ms(case.ours, rep)
    row["ratio"] = 2 * row["fla"] / (row["ours"] + row["again"])


def time_forward(row: dict[str, Any], options: Options, speed: float) -> None:
    work = FORWARD[row["work"]]
    case = forward.draw(work)
    with torch.no_grad():
        row |= {"floor": forward.floor_bytes(work) / speed, "ours": forward.median_ms(case.ours, 100)}
        row["TFLOP/s"] = forward.gflop(work) / row["ours"]
        row["graph"], row["host us"] = forward.replayed_ms(case.ours), forward.host_us(case.ours)
        if options.with_fla:
            fla_beside_ours(row, case, 100)
            row["differ"] = forward.distance(case.ours()[0], case.fla()[0])


def time_train(row: dict[str, Any], options: Options, speed: float) -> None:
    work = TRAIN[row["work"]]
    case = backward.draw(work)
    row |= {"floor": backward.floor_bytes(work) / speed, "ours": backward.median_ms(case.ours, 200)}
    row["TFLOP/s"] = forward.gflop(work, backward=True) / row["ours"]
    row["extra GiB"] = backward.extra_gib(case.ours)
    if options.with_fla:
        fla_beside_ours(row, case, 200)
        row["fla GiB"] = backward.extra_gib(case.fla)


def tuning_device() -> Any:
    return driver.active


def time_group(group: str, options: Options) -> None:
    bench, active = partial(triton.testing.do_bench, warmup=options.tuning // 4, rep=options.tuning), tuning_device()
    active.get_benchmarker = lambda: bench
    speed = forward.copy_speed()
    append(options, "copy", {"work": group, "TB/s": speed * 1e-9})
    before = ""
    for part, work in GROUPS[group]:
        if work != before:
            forget_settings()
        before, measure = work, time_forward if part == "forward" else time_train
        attempt(options, part, work, lambda row, measure=measure: measure(row, options, speed))


def time_decode(options: Options) -> None:
    speed, steps = decode.copy_speed(), {}
    for B in (32, 1, 128):
        [row] = decode.measure_decode([B], speed, quick=True)
        steps[row["work"]] = row["ours"]
        append(options, "decode", row)
    for row in decode.measure_verify(speed, steps, ((32, 8), (1, 8))):
        append(options, "verify", row)
    bench = decode.Bench(32, 8, count=4)
    for accepted in (8, 4, 0):
        append(options, "sections", decode.measure_sections(bench, accepted))
    if options.with_fla:
        for B in (32, 1, 128):
            append(options, "fla decode", {"work": f"decode B{B}", "fla": decode.Bench(B).fla()})


def time_conv(options: Options) -> None:
    append(options, "conv", conv.measure("T8192", conv.WORKS["T8192"], conv.copy_speed(), quick=True))


def time_stages(options: Options) -> None:
    for name, variants in (("H96 T8192", True), ("H16 B4 T4096", False)):
        times = backward.measure_stages(backward.draw(TRAIN[name]), variants)
        append(options, "stages", {"work": name, **times})


def time_kernels(work: backward.Work, options: Options) -> None:
    """Each kernel of a call with its backward pass."""
    case = backward.draw(work)
    times = {"train": backward.median_ms(case.ours)} | backward.measure_stages(case, variants=False)
    append(options, "kernels", {"work": work.name, **times})


def time_segments(options: Options) -> None:
    for name in SPLIT_WORKS:
        for row in segments.measure(next(work for work in segments.WORKS if work.name == name)):
            append(options, "segments", row)
        torch.cuda.empty_cache()


Job = Callable[[Options], list[str] | None]


def first_half(with_fla: bool) -> dict[str, Job]:
    """Gates first, then the longest."""
    jobs: dict[str, Job] = {f"gate backward {share}": lambda _, s=share: gate_backward(s) for share in range(2)}
    names = list(decode.GATE_CASES)
    checks = {"kinds": decode.check_kinds}
    for i, share in enumerate("abc"):
        checks[share] = partial(decode.check_shapes, tuple(names[2 * i : 2 * i + 2]))
    jobs |= {f"gate decode {name}": lambda _, c=check: gate_decode(c) for name, check in checks.items()}
    jobs |= {"gate segments": lambda _: gate_segments(), "gate forward": lambda _: gate_forward()}
    jobs |= {"gate conv": lambda _: gate_conv()}
    for group in GROUPS if with_fla else ():
        for share in range(SETTINGS):
            jobs[f"fla {group} {share}"] = lambda _, g=group, s=share: compile_fla(g, s)
    jobs |= {f"ours {group}": lambda _, g=group: compile_ours(g) for group in GROUPS}
    jobs |= {"errors fla": lambda _: compile_fla_errors()} if with_fla else {}
    jobs |= {f"errors {work.name}": partial(beside_fla, work) for work in backward.BESIDE_FLA}
    jobs |= {"ours softplus": lambda _: compile_softplus()}
    jobs |= {"decode kernels": compile_decode}
    jobs |= {"study kernels stages": lambda _: compile_stages()}
    return jobs | {f"study kernels {name}": lambda _, n=name: compile_segments(n) for name in SPLIT_WORKS}


def second_half() -> dict[str, tuple[Job, int]]:
    """The most important first, each with its limit in seconds."""
    jobs: dict[str, tuple[Job, int]] = {}
    limits = {"H96": 110, "H96 packed": 80, "H64": 60, "H16": 180, "H12": 110, "softplus": 80}
    for group, seconds in limits.items():
        jobs[f"time {group}"] = partial(time_group, group), seconds
        if group == "H64":
            jobs |= {"time decode": (time_decode, 50), "time conv": (time_conv, 25)}
            jobs["time kernels"] = partial(time_kernels, TRAIN["H96 T8192"]), 40
    jobs["time softplus kernels"] = partial(time_kernels, backward.SOFTPLUS), 60
    return jobs | {"study stages": (time_stages, 40), "study segments": (time_segments, 60)}


def compilers_of(name: str) -> list[str]:
    """Beginnings of the jobs of the first half that compile what a job of the second half runs: what is compiled there
    instead takes longer than all that it times."""
    special = {
        "time decode": ["decode kernels"], "time conv": ["gate conv"], "time kernels": ["ours H96"],
        "time softplus kernels": ["ours softplus"], "study stages": ["ours H96", "study kernels stages"],
        "study segments": ["study kernels H"],
    }  # fmt: skip
    _, _, group = name.partition(" ")
    return special.get(name, [f"ours {group}", *(f"fla {group} {share}" for share in range(SETTINGS))])
