"""From token ids or pieces of text to what an assistant's message says, as it is being written or afterwards.

    ids or pieces of text  ->  control tokens and text  ->  `MessageReader`  ->  events

However the output is cut into pieces, the joined events are the same. In ids a control token is a token, and text that
spells one is text; a stream of text cannot tell the two apart and takes what is spelled like a control token for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rille.text.chat import Channel
from rille.text.reader import MessageReader
from rille.text.reply import Event, Reply
from rille.text.vocabulary import CONTROLS, TextStream, Tokenizer, kind

_CONTROL = re.compile("|".join(map(re.escape, CONTROLS)))
_PREFIXES = {name[:length] for name in CONTROLS for length in range(1, len(name))}
_LONGEST_PREFIX = max(map(len, _PREFIXES))


def parse(output: str | Iterable[int], tokenizer: Tokenizer | None = None, *, start: Channel | None = None) -> Reply:
    """The whole output of one assistant message, as text or as ids (then with their tokenizer).

    start: the channel that the prompt has opened. Raises ValueError for ids without a tokenizer or an unknown id.
    """
    parser = Parser(tokenizer, start=start)
    if isinstance(output, str):
        parser.feed_text(output)
    else:
        parser.feed_ids(output)
    parser.finish()
    return parser.reply()


class Parser:
    """Reads one assistant message. Feed ids or text (not both), then `finish`; `reply` holds what was read so far.

    tokenizer: for ids. start: the channel that the prompt has opened (`Prompt.channel`), None if it is not known.
    drop_calls: tool calls become faults instead of events, for requests that declare no tools.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, start: Channel | None = None, drop_calls: bool = False):
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"tokenizer must be one of rille.load_tokenizer, not {kind(tokenizer)}")
        if start not in (None, "think", "response"):
            raise ValueError(f"start is {start!r}; it must be think, response or None")
        self._tokenizer = tokenizer
        self._bytes = TextStream(tokenizer) if tokenizer is not None else None
        self._tail = ""  # of a stream of text: what may become a control token
        self._reader = MessageReader(start, drop_calls)

    @property
    def done(self) -> bool:
        """The message has ended; what comes behind it is ignored."""
        return self._reader.done

    def feed_ids(self, ids: Iterable[int]) -> list[Event]:
        """Events of further token ids. Raises ValueError for an unknown id, or without a tokenizer."""
        if isinstance(ids, bytes) or not isinstance(ids, Iterable):
            raise ValueError(f"ids must be several token ids, not {kind(ids)}")
        if self._tokenizer is None or self._bytes is None:
            raise ValueError("to parse ids, give the parser their tokenizer")
        for token in ids:
            special = self._tokenizer.special_name(token)
            if special is None:
                self._reader.text(self._bytes.feed(token))
                continue
            self._reader.text(self._bytes.finish())
            if special in CONTROLS:
                self._reader.control(special)
            else:
                self._reader.other_special(special, ends=token in self._tokenizer.stop_ids)
        return self._reader.take_events()

    def feed_unknown(self) -> list[Event]:
        """Events of a word that the model has and the tokenizer lacks: U+FFFD."""
        self._reader.text((self._bytes.finish() if self._bytes else "") + "\ufffd")
        return self._reader.take_events()

    def feed_text(self, piece: str) -> list[Event]:
        """Events of a further piece of text. Raises ValueError for what is no text."""
        if not isinstance(piece, str):
            raise ValueError(f"a piece of output must be a str, not {kind(piece)}; `feed_ids` takes ids")
        text = self._tail + piece
        at = 0
        for found in _CONTROL.finditer(text):
            self._reader.text(text[at : found.start()])
            self._reader.control(found[0])
            at = found.end()
        first = max(at, len(text) - _LONGEST_PREFIX)
        hold = next((i for i in range(first, len(text)) if text[i:] in _PREFIXES), len(text))
        self._reader.text(text[at:hold])
        self._tail = text[hold:]
        return self._reader.take_events()

    def finish(self) -> list[Event]:
        """Events of what was held back; the output is over, ended or cut off."""
        self._reader.text(self._tail + (self._bytes.finish() if self._bytes else ""))
        self._tail = ""
        self._reader.finish()
        return self._reader.take_events()

    def reply(self) -> Reply:
        """The message as far as it was read."""
        return self._reader.reply()
