"""What the host does in a decoding step of many rows beside a device that takes no time. Runs on a CPU.

Without drafts, and with drafts by prompt lookup.

    python benchmarks/serve/host.py [--streams 64] [--rounds 5] [--out FOLDER]

The device answers with a script at once, so a step is all that the engine does around it. Steps 100 to 290 of replies
of 300 tokens. Times are those of the process, the least of some rounds in which both engines take turns: another user
of the machine still moves them by more than drafts do. Calls of functions, of Python and of C, are the same each time.
looks: n-gram searches a step.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time

import torch
from torch import Tensor

from rille.model.model import K3, new_model
from rille.model.presets import preset
from rille.serve.engine import Engine
from rille.serve.graphs import DecodeGraphs, Slate
from rille.serve.sampler import Lot, Way
from rille.serve.schema import Request, SamplingParams
from rille.serve.sequences import Part
from rille.serve.speculation import Draft, NgramDrafter

WORDS, COUNT = 32_768, 300


def drawn(words: int, seed: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(words) for _ in range(COUNT)]


def habits(seed: int) -> list[int]:
    """Each word has two that may follow: whatever stands there stood there before."""
    draws, ids = random.Random(seed), [1]
    while len(ids) < COUNT:
        ids.append((7 * ids[-1] + draws.randrange(2)) % 61)
    return ids


def circles(seed: int) -> list[int]:
    return [n % 17 + 100 for n in range(COUNT)]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "random": lambda seed: drawn(WORDS, seed),
    "one of two words follows": habits,
    "one stream in eight goes in circles": lambda seed: drawn(WORDS, seed) if seed % 8 else circles(seed),
    "circles": circles,
}


class Silent(DecodeGraphs):
    """Recorded steps that write `replies[seed of the request]` and take no time but that of the host."""

    replies: Sequence[Sequence[int]] = ()

    def _replay(self, parts: Sequence[Part], lots: Sequence[Sequence[Lot]], way: Way) -> tuple[Tensor, Tensor]:
        shape, self._turn, self._asked = self._kind(parts)[0], 1 - self._turn, None
        if shape not in self._slates:
            self._slates[shape] = Slate.new(shape, self._pages.layout.groups, self._pages.device)
        self._slates[shape].fill(self._turn, parts, lots, self.spare_page)
        words = []
        for part in parts:
            reply = self.replies[part.sequence.request.params.seed or 0]
            place = part.start + 1 - part.sequence.num_prompt
            words += [*reply[place : place + shape.tokens], *[0] * (place + shape.tokens - len(reply))]
        figures_3N = torch.ones(3, len(words), dtype=torch.float64)
        figures_3N[0] = torch.tensor(words)
        return figures_3N, figures_3N


class Counted(NgramDrafter):
    asked = 0

    def propose(self, sequence, limit: int) -> Draft:
        self.asked += 1
        return super().propose(sequence, limit)


@dataclass
class Found:
    """Of each round microseconds and searches a step; calls a step of one more."""

    step_us: list[float] = field(default_factory=list)
    looks: list[float] = field(default_factory=list)
    calls: float = 0.0


def engine_with(model: K3, drafter: Counted | None, streams: int) -> tuple[Engine, Silent]:
    engine = Engine(
        model, num_pages=60 + 12 * streams, hash_unit=64, drafter=drafter, max_running=streams, token_budget=1 << 16
    )
    (spare,) = engine.scheduler.cache.store.allocate(1) or ()
    engine.scheduler.cache.reserved = 1
    device = Silent(model, engine.pages, spare, engine.longest, range(1, streams + 1), captures=False)
    engine.runner.graphs = device
    return engine, device


class Calls:
    """Counts calls while it is entered."""

    number = 0

    def _note(self, frame: object, event: str, argument: object) -> None:
        self.number += event in ("call", "c_call")

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def measure(engine: Engine, drafter: Counted | None, streams: int, found: Found, counts: bool) -> None:
    prompts = [drawn(WORDS, 1000 + n)[:100] for n in range(streams)]
    params = [SamplingParams(max_tokens=COUNT, seed=n, ignore_eos=True) for n in range(streams)]
    handles = [engine.submit(Request(prompt=ids, params=p)) for ids, p in zip(prompts, params, strict=True)]
    running = engine.scheduler.running
    while len(running) < streams or any(s.num_written < 100 for s in running):
        engine.step()
    before, asked, calls = engine.stats().steps, drafter.asked if drafter else 0, Calls()
    began = process_time()
    with calls if counts else nullcontext():
        while running[0].num_written < 290:
            engine.step()
    seconds, steps = process_time() - began, engine.stats().steps - before
    if counts:
        found.calls = calls.number / steps
    else:
        found.step_us.append(1e6 * seconds / steps)
        found.looks.append((drafter.asked - asked if drafter else 0) / steps)
    for handle in handles:
        list(handle)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, result = new_model(preset("tiny").replace(vocab_size=WORDS), seed=1), {}
    for text, script in TEXTS.items():
        plain, guessing, drafter = Found(), Found(), Counted()
        pairs = [(None, plain), (drafter, guessing)]
        made = [(*engine_with(model, one, arguments.streams), one, found) for one, found in pairs]
        for round in range(arguments.rounds + 1):
            for engine, device, one, found in made:
                engine.update_weights({}, round + 1)  # nothing is found of the text before
                device.replies = [script(n) for n in range(arguments.streams)]
                measure(engine, one, arguments.streams, found, counts=round == arguments.rounds)
        times, calls = [min(found.step_us) for _, found in pairs], [found.calls for _, found in pairs]
        result[text] = {"us": times, "calls": calls, "looks": min(guessing.looks)}
        print(
            f"{text}: {times[0]:.0f} us a step, {times[1]:.0f} with drafts; {calls[0]:.0f} calls, {calls[1]:.0f} "
            f"({100 * (calls[1] / calls[0] - 1):+.1f} %); {min(guessing.looks):.2f} looks",
            flush=True,
        )
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "host.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
