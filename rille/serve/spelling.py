"""Tokens as the OpenAI APIs spell them: beside a log-probability, as one of many, with their place in the text. No
torch here.

    whole characters         ->  their text
    a part of a character    ->  U+FFFD, with the bytes beside it; in completions, whose lists have none, bytes:\\xe2
    what the tokenizer lacks ->  token_id:402, for a model may have more words than its tokenizer

Source: OpenAI's API reference; vLLM's spelling of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rille.serve.schema import TokenOutput
from rille.text.vocabulary import TextStream, Tokenizer

Json = dict[str, Any]


def entry(tokenizer: Tokenizer, output: TokenOutput) -> Json:
    """A token of a chat with those that were likeliest in its place."""
    top = [_named(tokenizer, token, logprob) for token, logprob in output.top_logprobs]
    return {**_named(tokenizer, output.token, output.logprob), "top_logprobs": top}


def _named(tokenizer: Tokenizer, token: int, logprob: float | None) -> Json:
    if token not in tokenizer:
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
    bytes_ = tokenizer.token_bytes(token)
    return {"token": bytes_.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(bytes_)}


class Lists:
    """OpenAI's older form, of one choice: lists side by side. A token that was written is among the likeliest always;
    text_offset: characters of the text that were complete before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream, self._offset = tokenizer, TextStream(tokenizer), 0

    def of(self, outputs: Sequence[TokenOutput]) -> Json:
        """Of the next tokens."""
        spelled = [self._spell(output.token) for output in outputs]
        return {
            "tokens": spelled,
            "token_logprobs": [output.logprob for output in outputs],
            "top_logprobs": [
                {**{self._spell(token): logprob for token, logprob in output.top_logprobs}, own: output.logprob}
                for output, own in zip(outputs, spelled, strict=True)
            ],
            "text_offset": [self._place(output.token) for output in outputs],
        }

    def _spell(self, token: int) -> str:
        if token not in self._tokenizer:
            return f"token_id:{token}"
        bytes_ = self._tokenizer.token_bytes(token)
        try:
            return bytes_.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in bytes_)

    def _place(self, token: int) -> int:
        """Where the token begins; the next one begins behind what it completes."""
        place = self._offset
        is_known = token in self._tokenizer
        self._offset += len(self._stream.feed(token) if is_known else self._stream.finish() + "\ufffd")
        return place
