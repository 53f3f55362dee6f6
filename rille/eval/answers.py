"""What question suites ask of a model: how likely continuations are, and what it writes itself.

    log p(continuation | context) = sum of log p over the ids of encode(context + continuation) behind those of context

Spaces at the end of a context belong to the continuation, since a token begins with its space. A text without context
follows the end-of-text token. These are the conventions of lm-evaluation-harness, whose numbers people compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rille.eval.opened import Opened
from rille.eval.scoring import batches, line_nats
from rille.packing import Packing
from rille.serve.generate import stream

KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}


def encode_pair(opened: Opened, context: str, continuation: str) -> tuple[np.ndarray, int]:
    """(line, number of its last ids that are the continuation). Raises ValueError where that has no id of its own."""
    spaces = len(context) - len(context.rstrip())
    context, continuation = context[: len(context) - spaces], context[len(context) - spaces :] + continuation
    whole = opened.tokenizer.encode(context + continuation)
    asked = len(whole) - len(opened.tokenizer.encode(context))
    if asked < 1:
        raise ValueError(f"the continuation {continuation!r} of {context[-40:]!r} has no token of its own")
    line = opened.line(whole)
    return (line if len(line) > asked else np.array([opened.tokenizer.eos_id, *line])), asked


@torch.inference_mode()
def likelihoods(
    opened: Opened, pairs: Sequence[tuple[str, str]], batch_tokens: int, tell: Callable[[int], None]
) -> list[tuple[float, bool]]:
    """Of each (context, continuation): log p in nats, and whether greedy writing would give it."""
    encoded = [encode_pair(opened, *pair) for pair in pairs]
    lines = [line for line, _ in encoded]
    answers: list[tuple[float, bool]] = []
    for pieces in batches(lines, max(map(len, lines), default=1), batch_tokens):
        answers += _batch([encoded[number] for number, *_ in pieces], opened)
        tell(len(pieces))
    return answers


def _batch(encoded: Sequence[tuple[np.ndarray, int]], opened: Opened) -> list[tuple[float, bool]]:
    inputs = [line[:-1] for line, _ in encoded]
    ends = np.cumsum([len(part) for part in inputs])
    rows = np.concatenate([np.arange(end - asked, end) for end, (_, asked) in zip(ends, encoded, strict=True)])
    wanted = torch.from_numpy(np.concatenate([line[-asked:] for line, asked in encoded]))
    packing = Packing.of([len(part) for part in inputs], device=opened.model.device)
    tokens = torch.from_numpy(np.concatenate(inputs))
    logits_RW = opened.model.logits(tokens, packing=packing, rows=torch.from_numpy(rows).to(opened.model.device)).cpu()
    log_probs = torch.log_softmax(logits_RW, -1).gather(1, wanted[:, None]).squeeze(1)
    greedy = logits_RW.argmax(-1) == wanted
    sizes = [asked for _, asked in encoded]
    cut = zip(log_probs.split(sizes), greedy.split(sizes), strict=True)
    return [(float(some.double().sum()), bool(right.all())) for some, right in cut]


def whole_text(opened: Opened, text: str, batch_tokens: int) -> float:
    """log p of a whole text, in nats, each token with all before it as context."""
    line = opened.line(opened.tokenizer.encode(text))
    line = line if opened.framed else np.array([opened.tokenizer.eos_id, *line])
    return -float(line_nats(opened.model, [line], max(1, len(line)), batch_tokens)[0].sum())


def write(opened: Opened, context: str, asked: Mapping[str, Any], most: int) -> str:
    """A continuation up to the first of the texts in `until`, which is left out, or the end of the text.

    asked: until, max_gen_toks, do_sample, temperature, top_p. Raises ValueError for anything else.
    """
    if unknown := set(asked) - KNOWN:
        raise ValueError(f"a task asks for {', '.join(sorted(unknown))} in writing, which is not known here")
    until = [asked["until"]] if isinstance(asked.get("until"), str) else list(asked.get("until") or ())
    temperature = float(asked.get("temperature", 1.0)) if asked.get("do_sample") else 0.0
    line = opened.line(opened.tokenizer.encode(context))
    prompt = torch.from_numpy(line if len(line) else np.array([opened.tokenizer.eos_id]))
    stops = {*opened.tokenizer.stop_ids}
    sampling = {"temperature": temperature, "top_p": float(asked.get("top_p", 1.0)), "seed": 0}
    ids: list[int] = []
    for token in stream(opened.model, prompt, int(asked.get("max_gen_toks", most)), **sampling, stop_ids=stops):
        if token in stops:
            break
        ids.append(token)
        if any(stop in opened.tokenizer.decode(ids) for stop in until):
            break
    text = opened.tokenizer.decode(ids)
    return text[: min([place for stop in until if (place := text.find(stop)) >= 0], default=len(text))]
