"""Requests on their way in, and whole answers on their way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from rille.model.config import K3Config
from rille.model.media import checked_grids, feature_rows
from rille.serve.chain import Span
from rille.serve.handle import RequestHandle
from rille.serve.schema import Completion, Finished, Request, SamplingParams, TokenOutput
from rille.text.vocabulary import Tokenizer


def requests_of(
    prompts: Iterable[Sequence[int]], params: SamplingParams | Iterable[SamplingParams] | None
) -> list[Request]:
    """What `Engine.generate` is asked. Raises ValueError where that is not prompts, and parameters for all or for
    each."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {prompts!r:.80}; give a list of lists of token ids")
    params, prompts = params if params is not None else SamplingParams(), list(prompts)
    if isinstance(params, str | Mapping) or not isinstance(params, SamplingParams | Iterable):
        raise ValueError(f"params is {params!r:.80}; give SamplingParams, or one for each prompt")
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(every) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(every)} sampling parameters; give one, or one for each")
    return [Request(prompt=_ids(prompt), params=p) for prompt, p in zip(prompts, every, strict=True)]


def _ids(prompt: Sequence[int]) -> tuple[int, ...]:
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is {prompt!r:.80}; give a list of token ids for each")
    return tuple(prompt)


def check_request(request: Request, c: K3Config, tokenizer: Tokenizer | None) -> None:
    """Raise ValueError for what the model cannot do: ids outside its vocabulary, pictures that do not fit."""
    params, words = request.params, c.vocab_size
    named = {"prompt": request.prompt, "stop_ids": params.stop_ids, "logit_bias": params.logit_bias}
    for name, ids in named.items():
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= words:
            raise ValueError(f"{name} has ids from {low} to {high}; the vocabulary has 0..{words - 1}")
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the checkpoint has none; give stop_ids")
    if params.grammar is not None and tokenizer is None:
        raise ValueError("a grammar needs a tokenizer, and the checkpoint has none")
    if request.images:
        check_pictures(request, c)


def check_pictures(request: Request, c: K3Config) -> None:
    if c.vision is None or c.media_pad_id is None:
        raise ValueError("images: this model has no vision tower or no media token (vision_config, media_pad_id)")
    rows = 0
    for images in request.images:
        each = [feature_rows(grid, c.vision) for grid in checked_grids(images, c.vision)]
        rows += sum(each)
        texts = [digest for digest in images.digests if isinstance(digest, str)]
        if list(images.num_tokens) != each or not len(texts) == len(images.digests) == len(each):
            raise ValueError(
                f"images: {len(each)} pictures with {len(texts)} digests, merged by {images.merge}; this model wants a "
                f"digest, a text, for each, and merges by {c.vision.merge}"
            )
    places = sum(token == c.media_pad_id for token in request.prompt)
    if rows != places:
        raise ValueError(
            f"images: the pictures have {rows} rows of features, the prompt {places} media tokens "
            f"(id {c.media_pad_id}); give one for each row (rille.text.expand_media)"
        )


def picture_spans(request: Request, c: K3Config) -> tuple[Span, ...]:
    """Where each picture lies in the prompt: its first row, the row after its last, its digest."""
    if not request.images:
        return ()
    places = [place for place, token in enumerate(request.prompt) if token == c.media_pad_id]
    counts = [count for images in request.images for count in images.num_tokens]
    digests = [digest for images in request.images for digest in images.digests]
    ends = list(accumulate(counts))
    return tuple(
        (places[end - count], places[end - 1] + 1, digest)
        for count, end, digest in zip(counts, ends, digests, strict=True)
    )


def collect(handle: RequestHandle, request: Request) -> list[Completion]:
    """Wait for a request and give its choices."""
    tokens: list[list[TokenOutput]] = [[] for _ in range(request.params.n)]
    ends: dict[int, Finished] = {}
    for output in handle:
        if isinstance(output, Finished):
            ends[output.index] = output
        else:
            tokens[output.index].append(output)
    return [completion(some, ends[index], request) for index, some in enumerate(tokens)]


def completion(tokens: list[TokenOutput], end: Finished, request: Request) -> Completion:
    """One choice as a whole."""
    return Completion(
        tokens=tuple(output.token for output in tokens),
        logprobs=tuple(output.logprob for output in tokens if output.logprob is not None),
        versions=tuple(output.version for output in tokens),
        reason=end.reason,
        usage=end.usage,
        text="".join(output.text for output in tokens) + end.text,
        matched=end.matched,
        error=end.error,
        top_logprobs=tuple(output.top_logprobs for output in tokens) if request.params.top_logprobs else (),
        experts=tuple(output.experts or {} for output in tokens) if request.params.expert_ids else None,
    )
