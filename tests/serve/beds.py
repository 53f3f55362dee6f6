"""Sequences ready for a step: parts that begin anywhere, in poisoned pages."""

from dataclasses import dataclass
from itertools import count as counted

import torch

from rille.serve.chain import Chain
from rille.serve.holding import Holding
from rille.serve.paged import Pages
from rille.serve.prompts import PromptGraphs
from rille.serve.runner import Runner
from rille.serve.schema import Request, SamplingParams
from rille.serve.sequences import Part, Sequence
from rille.serve.store import Entry
from tests.serve.test_engine import prompt

GREEDY = SamplingParams(max_tokens=12, temperature=0)


@dataclass(frozen=True)
class Piece:
    """A part to be: tokens that went before, tokens of it, places inside at which states are kept, whether the prompt
    ends with it."""

    before: int
    count: int
    saves: tuple[int, ...] = ()
    ends: bool = True


# One token of somebody who writes, prompts of odd lengths, one that goes on from the middle of a chunk, one token of a
# longer prompt; places at the ends of chunks, inside, in one chunk together, at the very first and last token.
MIXED = (
    Piece(100, 1),
    Piece(0, 150, (1, 2, 64, 91, 128, 149)),
    Piece(37, 70, (5, 69)),
    Piece(64, 65, (64,), ends=False),
    Piece(200, 1),
    Piece(12, 1, ends=False),
)
FRESH = (Piece(0, 129, (128,)), Piece(0, 64), Piece(0, 3))
ALONE = (Piece(0, 500, (448,)),)
FULL = (Piece(0, 100, (64,)), Piece(9, 100), Piece(70, 1), Piece(0, 55))  # 256 tokens, 4 rows: nothing is left over
LATER = (Piece(249, 90, (71,)), Piece(3, 1))


class Bed:
    """Sequences in poisoned pages, each ready for its piece; `spares` pages belong to nobody."""

    def __init__(self, model, pieces, spares=1, seed=0):
        c, free = model.config, counted()
        self.pages = Pages(c, 400, model.dtype, model.device, poison=True)
        self.runner, layout = Runner(model, self.pages), self.pages.layout
        self.spares = [next(free) for _ in range(spares)]
        self.parts, begun = [], []
        for n, piece in enumerate(pieces):
            length = piece.before + piece.count + (not piece.ends)
            chain = Chain(prompt(length, seed=seed + n), 64)
            latents = [Entry((next(free),), 0) for _ in range(-(-length // layout.page_tokens))]
            holding = Holding(chain, latents=latents, state=tuple(next(free) for _ in range(layout.groups)))
            sequence = Sequence(Request(prompt=chain.ids, params=GREEDY), str(n), 0, n, chain, "", holding=holding)
            saves = tuple((piece.before + at, tuple(next(free) for _ in range(layout.groups))) for at in piece.saves)
            self.pages.clear(holding.state)
            self.parts.append(Part(sequence, piece.before, piece.count, saves=saves))
            begun += [Part(sequence, 0, piece.before)] if piece.before else []
        if begun:
            self.runner.run(begun)
        self.begun = self.pages.bytes.clone()

    def graphs(self, **options):
        return PromptGraphs(self.runner.model, self.pages, self.spares, 4096, 64, 2**33, **options)

    def run(self, prompts):
        """Logits, and all pages that belong to somebody, from the same beginning."""
        self.pages.bytes.copy_(self.begun)
        self.runner.prompts = prompts
        logits_RW = self.runner.run(self.parts).logits.clone()
        return logits_RW, self.pages.bytes[len(self.spares) :].clone()


def assert_near(got, want, dtype=torch.float32, **close):
    """Floats that are near, and no number in the same places."""
    torch.testing.assert_close(got.view(dtype), want.view(dtype), equal_nan=True, **close)
