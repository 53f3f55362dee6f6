"""Generation, one sequence at a time: the slow twin that an engine must agree with.

The prompt goes through the model once, then every new token alone, against `Memory`: KDA state, convolution tail, MLA
latents. Nothing is computed twice. For logits l of the last token:

    temperature 0    argmax l
    temperature t    p = softmax(l / t); keep the likeliest tokens until their sum reaches top_p; sample from those

Axes: N tokens of the prompt, W words of the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from time import perf_counter

import torch
from torch import Tensor

from rille.model.checkpoint import load_model
from rille.model.locate import find_checkpoint
from rille.model.model import K3
from rille.serve.config import GenerateConfig
from rille.text.tokenizer import TextStream, Tokenizer, load_tokenizer


def generate(
    model: K3,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_ids: Collection[int] = (),
) -> Tensor:
    """The continuation of a prompt: int64 [n] on the CPU, n <= max_new_tokens, without the prompt.

    tokens: int64 [N], N >= 1. temperature 0 is greedy. top_p in (0, 1]. seed: of the sampling; None draws a new one. A
    token of `stop_ids` ends the continuation and is its last id.

    Raises ValueError for an empty prompt, ids outside the vocabulary, or an argument outside its range.
    """
    ids = stream(model, tokens, max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop_ids=stop_ids)
    return torch.tensor(list(ids), dtype=torch.int64)


def stream(
    model: K3,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """As `generate`, each id as soon as it is known. The arguments are checked at the call."""
    check(tokens, max_new_tokens, temperature, top_p, seed)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    return _stream(model, tokens, max_new_tokens, Sampler(temperature, top_p, generator), frozenset(map(int, stop_ids)))


def _stream(
    model: K3, tokens: Tensor, max_new_tokens: int, sampler: Sampler, stop_ids: frozenset[int]
) -> Iterator[int]:
    memory, last = model.new_memory(), torch.tensor([len(tokens) - 1])
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            logits_W = model.logits(tokens, memory=memory, rows=last)[0]
            token = sampler(logits_W.cpu())
        yield token
        if token in stop_ids:
            return
        tokens, last = torch.tensor([token]), torch.tensor([0])


class Sampler:
    """Picks the next token from logits fp32 [W]."""

    def __init__(self, temperature: float, top_p: float, generator: torch.Generator):
        self.temperature, self.top_p, self.generator = temperature, top_p, generator

    def __call__(self, logits_W: Tensor) -> int:
        if self.temperature == 0:
            return int(logits_W.argmax())
        probabilities_W = torch.softmax(logits_W / self.temperature, -1)
        if self.top_p < 1:
            probabilities_W = nucleus(probabilities_W, self.top_p)
        return int(torch.multinomial(probabilities_W, 1, generator=self.generator))


def nucleus(probabilities_W: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens: the fewest whose sum reaches top_p, at least one. Not renormalised."""
    sorted_W, order_W = probabilities_W.sort(descending=True, stable=True)
    before_W = sorted_W.cumsum(0) - sorted_W
    return probabilities_W.index_fill(0, order_W[before_W >= top_p], 0)


def check(tokens: Tensor, max_new_tokens: int, temperature: float, top_p: float, seed: int | None) -> None:
    if tokens.numel() < 1:
        raise ValueError("the prompt has no tokens; give at least one (a trained model's config has bos_id for that)")
    check_sampling(max_new_tokens, temperature, top_p, seed)


def check_sampling(max_new_tokens: int, temperature: float, top_p: float, seed: int | None) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must not be negative")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be at least 0 (0 takes the likeliest token)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be at least 0 and below 2^63")


def continue_text(config: GenerateConfig) -> None:
    """Print a prompt and its continuation as it comes. Raises ValueError or FileNotFoundError for unfit settings."""
    check_device(config.device)
    place = find_checkpoint(config.checkpoint)
    tokenizer = load_tokenizer(place)
    model = load_model(place, device=config.device)
    ids = prompt_ids(config.prompt, tokenizer, model)
    eos = model.config.eos_id
    stops = {*tokenizer.stop_ids, *([] if eos is None else [eos])}
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "seed": config.seed}
    new = stream(model, torch.tensor(ids, dtype=torch.int64), config.max_new_tokens, **sampling, stop_ids=stops)
    started, count, text = perf_counter(), 0, TextStream(tokenizer)
    print(config.prompt, end="", flush=True)
    for token in new:
        count += 1
        print("" if token in stops else text.feed(token), end="", flush=True)
    print(text.finish())
    print(f"{place}: {count} tokens, {count / (perf_counter() - started):.0f} tokens/s", file=sys.stderr)


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA device that torch can use; give --device cpu")


def check_pair(tokenizer: Tokenizer, model: K3) -> None:
    """Raise ValueError unless the model has a logit for every token."""
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model only {model.config.vocab_size:,}: "
            "they do not belong together"
        )


def prompt_ids(prompt: str, tokenizer: Tokenizer, model: K3) -> list[int]:
    """The ids of a text. A model of `rille train` has seen every document after the id that ends the one before: there
    it comes first. A released model, whose `bos_id` is another one, gets the text alone."""
    check_pair(tokenizer, model)
    begin = [tokenizer.eos_id] if model.config.bos_id == tokenizer.eos_id else []
    return begin + tokenizer.encode(prompt)
