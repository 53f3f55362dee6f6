"""From the logits of a step to the tokens of its parts: drawing, with the drafts that came true.

Suffixes: R rows of the step, W vocabulary, A active experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rille.serve.sampler import Drawn, Row, draw, probabilities, report
from rille.serve.sequences import Part
from rille.serve.sequences import Sequence as Choice
from rille.serve.speculation import Draft, accept

Experts = Mapping[int, tuple[int, ...]]


def draw_parts(
    logits_RW: Tensor, parts: Sequence[Part], rows: Sequence[Sequence[Row]], drafts: Mapping[Choice, Draft]
) -> list[list[Drawn]]:
    """For each part the tokens that follow it: one, and one more for each draft that came true. rows: of each part, for
    the token after it and after each of its drafts."""
    flat = [row for some in rows for row in some]
    if not flat:
        return [[] for _ in parts]
    every, result, first = draw(logits_RW, flat), [], 0
    for part, some in zip(parts, rows, strict=True):
        drawn = every[first : first + len(some)]
        guessed = drafts[part.sequence].probabilities if part.drafts else None
        if guessed is not None and all(one.error is None for one in drawn):
            drawn = by_rejection(logits_RW[first : first + len(some)], Draft(part.drafts, guessed), some)
        result.append(drawn[: 1 + count_true(drawn, part.drafts)])
        first += len(some)
    return result


def count_true(drawn: Sequence[Drawn], guesses: Sequence[int]) -> int:
    """How many guesses are what was drawn at their places, from the first on."""
    for place, (one, guess) in enumerate(zip(drawn, guesses, strict=False)):
        if one.error is not None or one.token != guess:
            return place
    return min(len(drawn), len(guesses))


def by_rejection(logits_RW: Tensor, draft: Draft, rows: Sequence[Row]) -> list[Drawn]:
    """Tokens for a draft that was drawn from distributions; their number says how many guesses came true."""
    tokens = accept(probabilities(logits_RW, rows), draft, rows)
    logits_RW = logits_RW[: len(tokens)]
    return report(logits_RW, logits_RW, torch.tensor(tokens, device=logits_RW.device), rows[: len(tokens)])


def experts_of(experts: Mapping[int, Tensor], rows: Sequence[Sequence[Row]]) -> list[list[Experts | None]]:
    """For each part and each of its rows the chosen experts by layer, where they were asked for. experts: layer -> ids
    [R, A]."""
    lists = {layer: ids_RA.tolist() for layer, ids_RA in experts.items()}
    result, first = [], 0
    for some in rows:
        chosen: list[Experts | None] = []
        for place, row in enumerate(some, first):
            asked = row.params.expert_ids
            chosen.append({layer: tuple(ids[place]) for layer, ids in lists.items()} if asked else None)
        result.append(chosen)
        first += len(some)
    return result
