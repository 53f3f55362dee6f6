"""XTML, the markup of a conversation: tags made of four control tokens and ordinary text.

    element   := OPEN tag {attribute} SEP body CLOSE tag SEP        no whitespace between elements
    attribute := ` key` `="` value `"`                               & and " in a value are written &amp; and &quot;
    message   := element END_OF_MESSAGE

A conversation becomes a list of segments, and each segment is encoded by itself. Only markup and image prompts are
encoded with special tokens recognised; whatever others wrote (texts, names, tool results, attribute values) is encoded
as plain text, so that it can never become a control token. Cutting text into segments changes the tokens, and so the
cuts are part of the format: tag, ` key`, `="`, value, `"` and each body are one segment each.
Source: Kimi K3's `encoding_k3.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rille.text.vocabulary import (
    CLOSE,
    END_OF_MESSAGE,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    OPEN,
    SEP,
    kind,
)

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"  # ordinary text that stands for a picture, not a token


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt that is encoded by itself."""

    text: str
    special: bool = False  # names of special tokens become their ids
    produced: bool = False  # the assistant generates it: it counts in the loss


def escape(value: str) -> str:
    """An attribute's value as it is written."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """What `escape` was given."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def image_prompt(width: int, height: int) -> str:
    """The markup that stands for a picture of this original size in pixels; its one `<|media_pad|>` is the picture.

    Raises ValueError for a size that is not two positive integers.
    """
    if not (isinstance(width, int) and isinstance(height, int) and width > 0 and height > 0):
        raise ValueError(f"an image's size must be two positive integers, not {width!r} and {height!r}")
    return f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}"


def as_sizes(images: Any) -> Sequence[tuple[int, int]]:
    """Sizes of pictures. Raises ValueError for what is no list of pairs."""
    pairs = isinstance(images, Sequence) and all(isinstance(size, Sequence) and len(size) == 2 for size in images)
    if not pairs:
        raise ValueError(f"images must be a list of (width, height), one for each picture, not {kind(images)}")
    return images


_TAG = re.compile(r'([a-z_]+)((?: [a-z_]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([a-z_]+)="([^"]*)"')


def read_tag(header: str) -> tuple[str, dict[str, str]] | None:
    """Tag and attributes of what stands between OPEN or CLOSE and SEP; None if it is no tag."""
    found = _TAG.fullmatch(header)
    if found is None:
        return None
    return found[1], {key: unescape(value) for key, value in _ATTRIBUTE.findall(found[2])}


class Writer:
    """Collects the segments of a conversation. While `produced` is set, what is written counts as the assistant's."""

    def __init__(self, images: Sequence[tuple[int, int]] | None, placeholders: bool = True):
        """images: original (width, height) of every picture in order, or None to leave placeholders as plain text, as
        without `placeholders` those in texts are."""
        self.segments: list[Segment] = []
        self.produced = False
        self._images = None if images is None else [image_prompt(*size) for size in as_sizes(images)]
        self._used, self._placeholders = 0, placeholders

    def open(self, tag: str, *attributes: tuple[str, str]) -> None:
        self._special(OPEN)
        self.plain(tag)
        for key, value in attributes:
            for text in (f" {key}", '="', escape(value), '"'):
                self.plain(text)
        self._special(SEP)

    def close(self, tag: str) -> None:
        self._special(CLOSE)
        self.plain(tag)
        self._special(SEP)

    def end_message(self) -> None:
        self.close("message")
        self._special(END_OF_MESSAGE)

    def plain(self, text: str) -> None:
        """Text in which nothing is markup; an empty one is no segment."""
        if text:
            self.segments.append(Segment(text, produced=self.produced))

    def body(self, text: str) -> None:
        """Text in which a placeholder stands for the next picture, where pictures were given."""
        parts = text.split(IMAGE_PLACEHOLDER) if self._placeholders and self._images is not None else [text]
        self.plain(parts[0])
        for part in parts[1:]:
            self.image()
            self.plain(part)

    def image(self) -> None:
        """The next picture. The model is given pictures and never produces one."""
        if self._images is None:
            self.plain(IMAGE_PLACEHOLDER)
            return
        self._used += 1
        if self._used <= len(self._images):
            self.segments.append(Segment(self._images[self._used - 1], special=True))

    def check_images(self) -> None:
        """Raise ValueError unless every picture given has found its place, and every place its picture."""
        if self._images is not None and self._used != len(self._images):
            raise ValueError(
                f"the messages have places for {self._used} images (image parts and {IMAGE_PLACEHOLDER} in texts), "
                f"but {len(self._images)} were given"
            )

    def _special(self, name: str) -> None:
        self.segments.append(Segment(name, special=True, produced=self.produced))
