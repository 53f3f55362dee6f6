"""Log-probabilities of a reply, piece by piece as a deterministic engine computes them: equal to the last bit on a CPU.

    prompt in pieces that end at multiples of the hash unit and at its end, then every token of the reply alone

Who trains on replies compares what the model says of them now with what the engine said when it wrote them; any other
cut of the sequence adds in another order and differs by rounding.

Suffix: W vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rille.model.arguments import kind, whole
from rille.model.model import K3
from rille.serve.paged import layout_of
from rille.serve.retention import unit_for


@torch.inference_mode()
def score(model: K3, prompt: Sequence[int], reply: Sequence[int], unit: int | None = None) -> tuple[float, ...]:
    """log p of each token of a reply, given all before it, before temperature and cuts.

    unit: the engine's `hash_unit`; None where that is left to the model. Raises ValueError for an empty prompt
    and for ids that the model does not have.
    """
    if unit is None:
        layout = layout_of(model.config, model.dtype)
        unit = unit_for(layout.page_tokens, layout.groups)
    unit = whole(unit, "unit", 1)
    prompt, reply = _ids(prompt, "prompt", model), _ids(reply, "reply", model)
    if not prompt:
        raise ValueError("score: the prompt has no tokens; give at least one")
    memory, last = model.new_memory(), torch.tensor([-1])
    ends = [*range(unit, len(prompt), unit), len(prompt)]
    pieces = [prompt[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    scores = []
    for place, piece in enumerate([*pieces, *([token] for token in reply[:-1])]):
        logits_W = model.logits(torch.tensor(piece), memory=memory, rows=last)[0]
        if place >= len(pieces) - 1 and reply:
            token = reply[place - len(pieces) + 1]
            scores.append(float(torch.log_softmax(logits_W, -1)[token]))
    return tuple(scores)


def _ids(given: Sequence[int], name: str, model: K3) -> list[int]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ValueError(f"score: {name} is {kind(given)}; give a list of token ids")
    return [whole(token, f"an id of the {name}", 0, model.config.vocab_size) for token in given]
