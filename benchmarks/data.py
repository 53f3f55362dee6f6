"""Text to tokens: the table of words against the tokenizer, then a whole build, with memory at two sizes.

    python benchmarks/data.py TEXTS.jsonl [--workers 2] [--megabytes 40 160] [--out DIR]

The gate: ids of the table equal the tokenizer's on every text that is timed. Memory is the largest resident set of the
process that builds and of each of its workers, read while they run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rille.data.build import build_dataset
from rille.data.build_config import BuildConfig
from rille.data.encode import Encoder
from rille.data.shards import slices
from rille.data.workers import in_order
from rille.text.tokenizer import load_tokenizer, train_tokenizer

VOCABULARY = 32_768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="a .jsonl of documents")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[40, 160], help="sizes of the builds")
    parser.add_argument("--out", type=Path, help="write results as JSON into this folder")
    arguments = parser.parse_args()
    results: dict = {"cores": os.cpu_count(), "workers": arguments.workers}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer = vocabulary(arguments.texts, work)
        # Builds first: the other part holds all its text in this process.
        results["builds"] = [building(arguments.texts, work, size, arguments.workers) for size in arguments.megabytes]
        results["encode"] = encoding(arguments.texts, tokenizer, arguments.workers, max(arguments.megabytes))
    if arguments.out:
        (arguments.out / "data.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


def texts_of(file: Path, megabytes: float) -> Iterator[str]:
    size = 0.0
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            size += len(text.encode()) / 1e6
            yield text
            if size >= megabytes:
                return


def vocabulary(file: Path, work: Path) -> Path:
    train_tokenizer(texts_of(file, 30), VOCABULARY).save(work / "tokenizer")
    return work / "tokenizer"


def encoding(file: Path, tokenizer: Path, workers: int, megabytes: int) -> dict:
    """MB/s of the tokenizer, of the table in one process, and of the table in all, on texts past those of training."""
    plain, encoder = load_tokenizer(tokenizer), Encoder(load_tokenizer(tokenizer))
    batches = list(slices(texts_of(file, megabytes)))
    size = sum(len(text.encode()) for batch in batches for text in batch) / 1e6
    few = batches[-10:]
    few_size = sum(len(text.encode()) for batch in few for text in batch) / 1e6
    begun = time.perf_counter()
    expected = [plain.encode_batch(batch) for batch in few]
    rates = {"encode_batch, all cores": few_size / (time.perf_counter() - begun)}
    begun, cpu = time.perf_counter(), time.process_time()
    found = [encoder.encode_batch(batch) for batch in batches]
    rates["table, one process"] = size / (time.perf_counter() - begun)
    rates["  by seconds of its CPU"] = size / (time.process_time() - cpu)
    for batch, ids in zip(expected, found[-10:], strict=True):
        assert [list(one_text) for one_text in batch] == [one_text.tolist() for one_text in ids], "the gate is red"
    groups = [batches[i::workers] for i in range(workers)]
    measured = list(in_order(encode_group, [(tokenizer, group) for group in groups], workers))
    rates[f"table, {workers} processes"] = size / max(wall for wall, _ in measured)
    rates["  by seconds of the longer CPU"] = size / max(cpu for _, cpu in measured)
    for name, rate in rates.items():
        print(f"{name:<32}{rate:7.1f} MB/s")
    return rates


def encode_group(task: tuple[Path, list[list[str]]]) -> tuple[float, float]:
    """Seconds on the wall and of the CPU that a worker takes for its texts, the table empty at the start."""
    tokenizer, batches = task
    encoder = Encoder(load_tokenizer(tokenizer))
    begun, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        encoder.encode_batch(batch)
    return time.perf_counter() - begun, time.process_time() - cpu


def building(file: Path, work: Path, megabytes: int, workers: int) -> dict:
    """One build of so much text, with its steps and the largest resident sets."""
    source = work / f"{megabytes}.jsonl"
    with source.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts_of(file, megabytes))
    size = sum(len(text.encode()) for text in texts_of(file, megabytes)) / 1e6
    config = BuildConfig(
        sources=(f"text={source}",),
        out=str(work / "set"),
        plain=("text",),
        tokenizer=str(work / "tokenizer"),
        shard_bytes=16_000_000,
        workers=workers,
    )
    steps = Stopwatch()
    with largest_memory() as memory:
        build_dataset(config, note=lambda _: None, steps=steps)
    shutil.rmtree(work / "set")
    source.unlink()
    listed = ", ".join(f"{name} {size / seconds:.1f}" for name, seconds in steps.seconds.items())
    print(f"build of {size:.0f} MB: {size / sum(steps.seconds.values()):.1f} MB/s ({listed} MB/s); ", end="")
    print(f"largest resident set: build {memory['build']:.0f} MB, a worker {memory['worker']:.0f} MB")
    return {"megabytes": size, "seconds": steps.seconds, "resident_megabytes": memory}


class Stopwatch:
    """Keeps what each step took."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str, total: float | None) -> Iterator[Callable[[float], None]]:
        begun = time.perf_counter()
        yield lambda done: None
        self.seconds[name] = time.perf_counter() - begun


@contextmanager
def largest_memory() -> Iterator[dict[str, float]]:
    """Largest resident sets in MB, of this process and of any child, looked at ten times a second."""
    largest, ended = {"build": 0.0, "worker": 0.0}, threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            largest["build"] = max(largest["build"], resident(os.getpid()))
            for child in children():
                largest["worker"] = max(largest["worker"], resident(child))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield largest
    finally:
        ended.set()
        thread.join()


def children() -> list[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except FileNotFoundError:
        return 0.0


if __name__ == "__main__":
    main()
