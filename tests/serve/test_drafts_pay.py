"""What drafts cost and gain on a device whose times are known, by its clock: no time of this machine is in it."""

import random

import pytest

from rille.model.model import new_model
from rille.serve import stepping
from rille.serve.engine import Engine
from rille.serve.graphs import DecodeGraphs
from rille.serve.sampler import Drawn
from rille.serve.schema import Request, SamplingParams
from rille.serve.speculation import NgramDrafter
from tests.train.small import MODEL

WORDS, COUNT = 32_768, 300
HOST, PLAIN, GUESSED = 0.2e-3, 0.81e-3, 1.4e-3  # before a launch and after a landing; steps on the device


class Clock:
    """now: of the host; free: when the device has done all that was launched."""

    def __init__(self):
        self.now = self.free = 0.0


class Arriving:
    def __init__(self, clock, drawn):
        self.clock, self.drawn, self.end = clock, drawn, clock.free

    def wait(self):
        self.clock.now = max(self.clock.now, self.end) + HOST
        return self.drawn


class Device(DecodeGraphs):
    """Recorded steps that write what a script says: `script(sequence)` is all of the reply."""

    def __init__(self, served, script, clock, most):
        (spare,) = served.scheduler.cache.store.allocate(1)
        served.scheduler.cache.reserved = 1
        super().__init__(served.model, served.pages, spare, served.longest, range(1, 65), most, captures=False)
        self.script, self.clock, self.plain, self.guessed = script, clock, 0, 0

    def launch(self, parts, lots):
        guesses = any(part.drafts for part in parts)
        self.plain, self.guessed = self.plain + (not guesses), self.guessed + guesses
        self.clock.now += HOST
        rows = 1 + (len(parts) - 1) / 60
        self.clock.free = max(self.clock.now, self.clock.free) + (GUESSED if guesses else PLAIN) * rows
        drawn = []
        for part in parts:
            reply, place = self.script(part.sequence), part.start + 1 - part.sequence.num_prompt
            drawn.append([Drawn(reply[place + n]) for n in range(1 + len(part.drafts))])
        return Arriving(self.clock, drawn)


@pytest.fixture(scope="module")
def model():
    return new_model(MODEL.replace(vocab_size=WORDS), seed=1)


def drawn_from(words, seed):
    draws = random.Random(seed)
    return [draws.randrange(words) for _ in range(COUNT + 10)]


def mixed(seed):
    """New text, with passages of 40 tokens that were there before."""
    ids = drawn_from(WORDS, seed)
    for start in range(60, COUNT, 80):
        ids[start : start + 40] = ids[10:50]
    return ids


def habits(seed):
    """Text in which a word is followed by one of two others, so that whatever stands there stood there before."""
    draws, ids = random.Random(seed), [1]
    while len(ids) < COUNT + 10:
        ids.append((7 * ids[-1] + draws.randrange(2)) % 61)
    return ids


TEXTS = {
    "random": lambda seed: drawn_from(WORDS, seed),
    "random, 100 words": lambda seed: drawn_from(100, seed),
    "random, 20 words": lambda seed: drawn_from(20, seed),
    "habits": habits,
    "mixed": mixed,
    "circles": lambda seed: [n % 17 + 100 for n in range(COUNT + 10)],
    "one word": lambda seed: [5] * (COUNT + 10),
    "circles, one in eight": lambda seed: TEXTS["random" if seed % 8 else "circles"](seed),
}


def seconds(monkeypatch, model, text, drafter, streams=1, rounds=1):
    """By the device's clock, of the last of some rounds; and its steps without and with guesses."""
    clock = Clock()
    monkeypatch.setattr(stepping, "perf_counter", lambda: clock.now)
    served = Engine(
        model, num_pages=40 + 12 * streams, hash_unit=64, drafter=drafter, max_running=64, token_budget=8192
    )
    replies = {n: TEXTS[text](n) for n in range(streams)}
    most = served.config.draft_length if drafter != "none" else 0
    device = Device(served, lambda sequence: replies[sequence.request.params.seed], clock, most)
    served.runner.graphs, served.scheduler.takes_copies = device, not most
    served._stepper.odds.padded = bool(most)
    for _ in range(rounds):
        began, plain, guessed = clock.now, device.plain, device.guessed
        params = [SamplingParams(max_tokens=COUNT, seed=n, ignore_eos=True) for n in range(streams)]
        handles = [served.submit(Request(prompt=drawn_from(WORDS, 99 + p.seed)[:80], params=p)) for p in params]
        for n, handle in enumerate(handles):
            *outputs, _ = handle
            assert [output.token for output in outputs][1:] == replies[n][1:COUNT]
    return clock.now - began, device.plain - plain, device.guessed - guessed


LEAST = {"random": 0.999, "random, 20 words": 0.999, "habits": 0.98, "mixed": 1.15, "circles": 1.8, "one word": 2.0}


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("text", LEAST)
def test_speed_over_that_of_plain_steps(monkeypatch, model, text, streams, rounds):
    """From the first reply on, and when the same prompts come again: then they are in the cache, and their first step
    is a recorded one, as all behind it. Where nothing can be guessed not one step waits for the tokens of another."""
    plain, steps, _ = seconds(monkeypatch, model, text, "none", streams, rounds)
    drafted, *ran = seconds(monkeypatch, model, text, "ngram", streams, rounds)
    assert plain / drafted > LEAST[text]
    if text.startswith("random"):
        assert ran == [steps, 0] and drafted == pytest.approx(plain)


@pytest.mark.parametrize(
    "text, most",
    [("random", 1), ("random, 100 words", 1), ("habits", 1.5), ("circles, one in eight", 1.5), ("circles", None)],
)
def test_many_streams_are_looked_at_in_turn(monkeypatch, model, text, most):
    """64 at once: few looks a step where nothing can be guessed, and no loss of speed where all can."""
    asked, propose = [0], NgramDrafter.propose

    def counted(self, sequence, limit):
        asked[0] += 1
        return propose(self, sequence, limit)

    plain, *_ = seconds(monkeypatch, model, text, "none", 64)
    monkeypatch.setattr(NgramDrafter, "propose", counted)
    drafted, *ran = seconds(monkeypatch, model, text, "ngram", 64)
    assert plain / drafted > (0.999 if most else 2.1)
    assert most is None or asked[0] < 7 * 64 + most * sum(ran)
    assert not text.startswith("random") or ran[1] == 0
