"""Grammars as masks over tokens: what `rille.text.grammar` specifies, compiled with llguidance. No torch here.

    matcher = Vocabulary(tokenizer).matcher(grammar)
    matcher.allowed()  ->  bool [W]        which tokens may come next
    matcher.accept(token)                  and so on, until `is_over`

Several tokens can be tried on a `copy`, which drafts need. The compiler must not force the tokens of a text that is
fixed: it would take those of the whole text, which cross the cuts of the format (`="` and `_id` are two segments there,
though `="_` is one token), and bar the ones that the model has learnt. What takes it too long it gives up, at any token
(`fault`): a form with thousands of ways to go on would hold up everybody else.
Source: llguidance's `docs/syntax.md`; github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from rille.text.grammar import Grammar
from rille.text.vocabulary import END_OF_MESSAGE, Tokenizer

_AT = re.compile(r"^at \d+\(\d+\): ")
_SHOWN = re.compile(r"\n +\d+ \| ")
_NOT_SHOWN = "<non-verbose/>"
_ANY_CUT = '%llguidance {"no_forcing": true}\n'


class Vocabulary:
    """A tokenizer as the compiler sees it, for a model of `width` words (or the tokenizer's). Make one, keep it.

    Raises ValueError where llguidance is not installed or the tokenizer has no control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, width: int | None = None) -> None:
        if find_spec("llguidance") is None:
            raise ValueError("grammars need llguidance, which is not installed: pip install 'rille[serve]'")
        if END_OF_MESSAGE not in tokenizer.specials:
            raise ValueError(f"the tokenizer has no special token {END_OF_MESSAGE!r}, which ends what a grammar allows")
        from llguidance import LLTokenizer, TokenizerWrapper

        self.tokenizer, self.width = tokenizer, width or tokenizer.vocab_size
        self._compiled: Any = LLTokenizer(TokenizerWrapper(_Spelled(tokenizer)))

    def matcher(self, grammar: Grammar, prefix: str = "") -> Matcher:
        """At the grammar's start, or after a text that is written already. Raises ValueError for a grammar that does
        not compile and a text that it does not allow."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        made = LLMatcher(self._compiled, LLMatcher.grammar_from_lark(_ANY_CUT + grammar.lark), limits=limits)
        if made.is_error():
            raise ValueError(f"the grammar does not compile: {_first_line(made.get_error())}")
        matcher = Matcher(made, self.tokenizer.vocab_size, self.width, self.tokenizer.specials[grammar.stop])
        ids = self.tokenizer.encode(prefix) if prefix else []
        if (valid := matcher.count_valid(ids)) < len(ids):
            there = self.tokenizer.decode(ids[:valid])
            raise ValueError(f"the grammar allows {there!r} of what is written already, not {prefix!r}")
        for token in ids:
            matcher.accept(token)
        return matcher


class Matcher:
    """Where one reply stands in its grammar; `stop` is the token that ends the reply."""

    def __init__(self, made: Any, vocab_size: int, width: int, stop: int) -> None:
        self._made = made
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._vocab_size, self._width, self._stop = vocab_size, width, stop
        self.is_over = False

    def copy(self) -> Matcher:
        """Another one at the same place, which costs far less than to compile the grammar again."""
        made = Matcher(self._made.deep_copy(), self._vocab_size, self._width, self._stop)
        made.is_over = self.is_over
        return made

    @property
    def fault(self) -> str | None:
        """Why it cannot go on, where the compiler has given up; nothing is allowed then."""
        if not self._made.is_error():
            return None
        return f"the grammar cannot be followed any further: {_first_line(self._made.get_error())}"

    def allowed(self) -> np.ndarray:
        """bool [W]: the tokens that may come next; none where it is over."""
        mask_W = np.zeros(self._width, dtype=bool)
        if self.is_over or self._made.is_stopped():
            mask_W[self._stop] = not self.is_over and not self._is_stuck
            return mask_W
        self._made.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._is_stuck:
            return mask_W
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        mask_W[: self._vocab_size] = bits[: self._vocab_size]
        return mask_W

    @property
    def _is_stuck(self) -> bool:
        """Whether nothing can follow though the text is not complete; the compiler lets the stop token through then."""
        return self._made.is_stopped() and not self._made.is_accepting()

    def accept(self, token: int) -> None:
        """Move on. Raises ValueError for a token that may not come here, and where the compiler gives up (`fault`)."""
        if self.is_over or (self._made.is_stopped() and token != self._stop):
            raise ValueError(f"the grammar does not allow token {token} here: the reply is complete")
        if self._is_stuck:
            raise ValueError(f"the grammar does not allow token {token} here: nothing can follow")
        if not self._made.is_stopped() and not self._made.consume_token(token):
            raise ValueError(f"the grammar does not allow token {token} here: {_first_line(self._made.get_error())}")
        self.is_over = token == self._stop

    def count_valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could come, one after another. Nothing moves."""
        if self.is_over or self._is_stuck:
            return 0
        if self._made.is_stopped():
            return int(list(tokens[:1]) == [self._stop])
        return self._made.validate_tokens(list(tokens))


def _first_line(error: str) -> str:
    """Of what the compiler says; behind it comes the grammar itself, in lines."""
    return " ".join(_AT.sub("", _SHOWN.split(error)[0]).replace(_NOT_SHOWN, "").split())


class _Spelled:
    """The attributes by which llguidance knows a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.specials[END_OF_MESSAGE]
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.specials.values())
        known = {*tokenizer.specials.values(), *(i for i, n in enumerate(tokenizer.byte_lengths()) if n)}
        self.tokens = [tokenizer.token_bytes(i) if i in known else b"" for i in range(tokenizer.vocab_size)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))
