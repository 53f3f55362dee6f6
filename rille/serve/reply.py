"""One choice while it is written: what decides its next token, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rille.serve.grammar import Matcher
from rille.serve.sampler import NO_NUMBER, Drawn, Lot, Row, lot_of, uniform
from rille.serve.schema import Finished, FinishReason, Output, TokenOutput, Usage
from rille.serve.sequences import Sequence as Choice
from rille.serve.stopping import StopStrings
from rille.text.vocabulary import TextStream, Tokenizer


class Reply:
    """stop_ids: the model's own, which `ignore_eos` leaves out. is_done: its `Finished` was made; failed: since the
    model's output was no number, so that nothing of what was computed for it is worth keeping."""

    def __init__(
        self,
        sequence: Choice,
        seed: int,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        matcher: Matcher | None,
    ) -> None:
        self.sequence, self.seed, self.matcher = sequence, seed, matcher
        params = sequence.request.params
        self.stop_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else stop_ids)
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer) if tokenizer is not None else None
        self._strings = StopStrings(params.stop)
        self.is_done = self.failed = False
        bends = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        looks = params.top_logprobs or params.expert_ids or matcher is not None
        self._is_free = not (bends or looks or params.logit_bias)
        self._least = params.min_tokens if self.stop_ids else 0
        self._plain_lots = [lot_of(params, 0.0)] if params.temperature == 0 else None
        self._read = tuple(set(sequence.request.prompt)) if params.repetition_penalty != 1 else ()  # one penalty each

    @property
    def _written(self) -> Sequence[int]:
        return self.sequence.chain.ids[self.sequence.num_prompt :]

    def is_free(self, ahead: int) -> bool:
        """Whether the token after the next `ahead` is drawn from the logits as they are, whatever was written: then the
        device draws it without us."""
        return self._is_free and (not self._least or self.sequence.num_written + ahead >= self._least)

    def lots(self, ahead: int, count: int = 1) -> list[Lot]:
        """What draws that token and those behind it, `count` in all."""
        if self._plain_lots is not None:
            return self._plain_lots * count
        params, first = self.sequence.request.params, self.sequence.num_written + ahead
        every = range(first, first + count)
        return [lot_of(params, uniform(self.seed, self.sequence.index, place)) for place in every]

    def rows(self, drafts: Sequence[int]) -> list[Row]:
        """What decides the next token, and the one after each draft if it and those before come true."""
        params, place = self.sequence.request.params, self.sequence.num_written
        needs_ids = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        written = tuple(self._written) if needs_ids else ()
        masks = self._masks(drafts)
        return [
            Row(
                params,
                self.seed,
                self.sequence.index,
                place + ahead,
                self._read,
                (*written, *drafts[:ahead]) if needs_ids else (),
                masks[ahead],
                self.stop_ids if place + ahead < params.min_tokens else frozenset(),
            )
            for ahead in range(len(drafts) + 1)
        ]

    def _masks(self, drafts: Sequence[int]) -> list[torch.Tensor | None]:
        """For each row what the grammar lets through. Rows behind a draft that it excludes never count; behind one at
        which its compiler gives up nothing may follow."""
        if self.matcher is None:
            return [None] * (len(drafts) + 1)
        tried, masks = self.matcher.copy(), [torch.from_numpy(self.matcher.allowed())]
        for token in drafts[: tried.count_valid(drafts)]:
            if not _accepts(tried, token):
                break
            masks.append(torch.from_numpy(tried.allowed()))
        behind = None if tried.fault is None else torch.zeros_like(masks[0])
        return [*masks, *[behind] * (len(drafts) + 1 - len(masks))]

    def take(
        self, drawn: Sequence[Drawn], version: int, experts: Sequence[Mapping[int, tuple[int, ...]] | None]
    ) -> list[Output]:
        """Tokens that came after each other; the chain grows by them, up to the one that ends the reply."""
        outputs: list[Output] = []
        for token, chosen in zip(drawn, experts, strict=True):
            if token.error is not None:
                self.failed = token.error == NO_NUMBER
                outputs.append(self.end("error", error=self._fault or token.error))
            else:
                outputs += self._add(token, version, chosen)
            if self.is_done:
                break
        return outputs

    def _add(self, drawn: Drawn, version: int, experts: Mapping[int, tuple[int, ...]] | None) -> list[Output]:
        sequence, params = self.sequence, self.sequence.request.params
        if self.matcher is not None and not _accepts(self.matcher, drawn.token):
            return [self.end("error", error=self._fault)]
        sequence.chain.append(drawn.token)
        is_stop = drawn.token in self.stop_ids or (self.matcher is not None and self.matcher.is_over)
        text, matched = "", None
        if self._stream is not None and not is_stop:
            text, matched = self._strings.feed(self._text(drawn.token), self._may_stop)
        logprob = drawn.logprob if params.logprobs or params.top_logprobs else None
        output = TokenOutput(sequence.index, drawn.token, logprob, drawn.top, version, text, experts)
        if is_stop:
            return [output, self.end("stop", matched=drawn.token)]
        if matched is not None:
            return [output, self.end("stop", matched=matched)]
        if sequence.num_written >= params.max_tokens:
            return [output, self.end("length")]
        return [output]

    @property
    def _may_stop(self) -> bool:
        """Whether a stop string that is complete now ends the reply."""
        return self.sequence.num_written >= self.sequence.request.params.min_tokens

    @property
    def _fault(self) -> str | None:
        """Why the grammar gives nothing more, where its compiler has given up."""
        return None if self.matcher is None else self.matcher.fault

    def _text(self, token: int) -> str:
        """What became readable. A model may have more words than its tokenizer; those have no text."""
        assert self._stream is not None and self._tokenizer is not None
        if token not in self._tokenizer:
            return self._stream.finish() + "\ufffd"
        return self._stream.feed(token)

    def end(self, reason: FinishReason, matched: int | str | None = None, error: str | None = None) -> Finished:
        """Close the choice."""
        self.is_done = True
        rest = ""
        if self._stream is not None and not isinstance(matched, str):
            rest, late = self._strings.feed(self._stream.finish(), self._may_stop)
            rest += self._strings.finish() if late is None else ""
        is_refused = error is not None and error == self._fault
        return Finished(self.sequence.index, reason, self.usage, matched, error, rest, is_refused)

    @property
    def usage(self) -> Usage:
        cached = min(self.sequence.cached or 0, self.sequence.num_prompt - 1)
        return Usage(self.sequence.num_prompt, cached, self.sequence.num_written)


def _accepts(matcher: Matcher, token: int) -> bool:
    """Move a matcher on. False where it cannot: a token that was let through may still take its compiler too much."""
    try:
        matcher.accept(token)
    except ValueError:
        return False
    return True
