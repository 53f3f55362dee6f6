"""Generation, one sequence at a time: the slow twin that an engine must agree with.

The prompt goes through the model once, then every new token alone, against `Memory`: KDA state, convolution tail, MLA
latents. Nothing is computed twice. For logits l of the last token:

    temperature 0    argmax l
    temperature t    p = softmax(l / t); keep the likeliest tokens until their sum reaches top_p; sample from those

Axes: N tokens of the prompt, W words of the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rille.misspelt import named
from rille.model.arguments import as_seed, as_temperature, check_ids, check_tokens, check_weights, kind, real, whole
from rille.model.checkpoint import load_model
from rille.model.locate import find_checkpoint
from rille.model.media import PatchedImages
from rille.model.model import K3
from rille.packing import Packing
from rille.serve.config import GenerateConfig
from rille.text.tokenizer import TextStream, Tokenizer, load_tokenizer


@named
def generate(
    model: K3,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_ids: Iterable[int] | Tensor = (),
    images: PatchedImages | None = None,
) -> Tensor:
    """The continuation of a prompt: int64 [n] on the CPU, n <= max_new_tokens, without the prompt.

    tokens: int64 [N], N >= 1. temperature 0 is greedy. top_p in (0, 1]. seed: of the sampling; None draws a new one. A
    token of `stop_ids` ends the continuation and is its last id. images: from `rille.preprocess_images`, one for each
    media token of the prompt, as `K3.hidden` takes them; their rows are in the memory only, not among the ids.

    Raises ValueError for an empty prompt, ids outside the vocabulary, a model that is not whole, images that do not fit
    and arguments outside their range.
    """
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    ids = stream(model, tokens, max_new_tokens, **sampling, stop_ids=stop_ids, images=images)
    return torch.tensor(list(ids), dtype=torch.int64)


@named
def stream(
    model: K3,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_ids: Iterable[int] | Tensor = (),
    images: PatchedImages | None = None,
) -> Iterator[int]:
    """As `generate`, each id as soon as it is known. The arguments are checked at the call; only whether the images fit
    shows when the first id is asked for."""
    check(model, tokens)
    check_sampling(max_new_tokens, temperature, top_p, seed)
    stops = as_stop_ids(stop_ids, model.config.vocab_size)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    return _stream(model, tokens, max_new_tokens, Sampler(temperature, top_p, generator), stops, images)


def _stream(
    model: K3,
    tokens: Tensor,
    max_new_tokens: int,
    sampler: Sampler,
    stop_ids: frozenset[int],
    images: PatchedImages | None,
) -> Iterator[int]:
    memory, last = model.new_memory(), torch.tensor([-1])
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            logits_W = model.logits(tokens, memory=memory, images=images, rows=last)[0]
            token = sampler(logits_W.cpu())
        yield token
        if token in stop_ids:
            return
        tokens, images = torch.tensor([token]), None


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


def check(model: K3, tokens: Tensor) -> None:
    """Raise ValueError unless a whole model can go on from these tokens."""
    if not isinstance(model, K3):
        raise ValueError(f"model must be a K3 model (rille.load_model, rille.new_model), not {kind(model)}")
    if len(model.held) != model.config.num_layers:
        raise ValueError(f"the model holds layers {model.held} of {model.config.num_layers}; generating needs all")
    check_weights(model.device)
    check_tokens(tokens, model.device)
    if len(tokens) < 1:
        raise ValueError("the prompt has no tokens; give at least one (a trained model's config has bos_id for that)")
    check_ids(tokens, Packing.of([len(tokens)]), model.config.vocab_size)


def check_sampling(max_new_tokens: int, temperature: float, top_p: float, seed: int | None) -> None:
    whole(max_new_tokens, "max_new_tokens", 0)
    as_temperature(temperature)
    if not 0 < real(top_p, "top_p") <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    if seed is not None:
        as_seed(seed)


def as_stop_ids(stop_ids: Iterable[int] | Tensor, vocab_size: int) -> frozenset[int]:
    """The ids that end a continuation. Raises ValueError for what is no collection of the vocabulary's ids."""
    if isinstance(stop_ids, str | bytes) or not isinstance(stop_ids, Iterable):
        raise ValueError(f"stop_ids is {kind(stop_ids)}; it must be a collection of token ids, such as (5,)")
    return frozenset(whole(token, "an id of stop_ids", 0, vocab_size) for token in stop_ids)


def continue_text(config: GenerateConfig) -> None:
    """Print a prompt and its continuation as it comes. Raises ValueError or FileNotFoundError for unfit settings."""
    check_device(config.device)
    place = find_checkpoint(config.checkpoint)
    tokenizer = load_tokenizer(place)
    model = load_model(place, device=config.device)
    ids = prompt_ids(config.prompt, tokenizer, model)
    stops = model_stop_ids(model, tokenizer)
    longest = config.max_length if config.max_length is not None else model.config.max_positions
    if len(ids) >= longest:
        raise ValueError(
            f"the prompt has {len(ids):,} tokens, prompt and continuation may have {longest:,}; shorten it, or give a "
            "larger --max-length"
        )
    most = min(config.max_new_tokens, longest - len(ids))
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "seed": config.seed}
    new = stream(model, torch.tensor(ids, dtype=torch.int64), most, **sampling, stop_ids=stops)
    started, count, text = perf_counter(), 0, TextStream(tokenizer)
    print(config.prompt, end="", flush=True)
    for token in new:
        count += 1
        print("" if token in stops else text.feed(token), end="", flush=True)
    print(text.finish())
    full = f"; prompt and continuation may have {longest:,} (--max-length)" if len(ids) + count == longest else ""
    print(f"{place}: {count} tokens, {count / (perf_counter() - started):.0f} tokens/s{full}", file=sys.stderr)


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA device that torch can use; give --device cpu")


def check_pair(tokenizer: Tokenizer, model: K3) -> None:
    """Raise ValueError unless the model has a logit for every token."""
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"the tokenizer is {kind(tokenizer)}; give one of rille.load_tokenizer")
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model only {model.config.vocab_size:,}: "
            "they do not belong together"
        )


def model_stop_ids(model: K3, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end a reply: the tokenizer's, and the one that the model's config names."""
    own = () if model.config.eos_id is None else (model.config.eos_id,)
    return frozenset((*own, *(tokenizer.stop_ids if tokenizer is not None else ())))


def prompt_ids(prompt: str, tokenizer: Tokenizer, model: K3) -> list[int]:
    """The ids of a text. A model of `rille train` has seen every document after the id that ends the one before: there
    it comes first. A released model, whose `bos_id` is another one, gets the text alone."""
    check_pair(tokenizer, model)
    begin = [tokenizer.eos_id] if model.config.bos_id == tokenizer.eos_id else []
    return begin + tokenizer.encode(prompt)
