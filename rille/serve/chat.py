"""A conversation with a model in this process: replies as streams of events.

    messages  ->  prompt  ->  reply

The prompt is rendered anew each time, and the session reads of it only what it has not read (`rille.serve.session`).
Turns, tool calls and files are `rille.serve.dialogue`'s.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from time import perf_counter

import torch

from rille.model.checkpoint import load_model
from rille.model.locate import find_checkpoint
from rille.model.model import K3
from rille.serve.config import ChatConfig
from rille.serve.dialogue import ChatEvent, Dialogue, Finished, every_picture_url, full
from rille.serve.generate import Sampler, check_device, check_pair, check_sampling, model_stop_ids
from rille.serve.session import Session
from rille.serve.tools import Toolbox
from rille.text.chat import Prompt, render
from rille.text.images import ImageConfig, Images, decode_data_url, preprocess_images
from rille.text.parser import Parser
from rille.text.reply import ToolCall
from rille.text.tokenizer import load_tokenizer
from rille.text.vocabulary import CHAT_SPECIALS, Tokenizer

PICTURES = "preprocessor_config.json"


class Conversation(Dialogue):
    """As `Dialogue`. Raises ValueError for a tokenizer without the chat format or of another model, and sampling out of
    range.
    """

    def __init__(
        self,
        model: K3,
        tokenizer: Tokenizer,
        config: ChatConfig,
        toolbox: Toolbox | None = None,
        image_config: ImageConfig | None = None,
    ):
        check_sampling(config.max_new_tokens, config.temperature, config.top_p, config.seed)
        check_pair(tokenizer, model)
        check_chat_format(tokenizer)
        super().__init__(config, toolbox)
        self._model, self._tokenizer = model, tokenizer
        self._image_config = image_config
        self._pictures: dict[str, Images] = {}
        self._stops = model_stop_ids(model, tokenizer)
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message, and sample as at the beginning."""
        super().reset()
        self._session = Session(self._model)
        generator = torch.Generator().manual_seed(self.config.seed)
        self._sampler = Sampler(self.config.temperature, self.config.top_p, generator)

    @property
    def longest(self) -> int:
        """As `Dialogue.longest`: what was asked for, or what the checkpoint's config says."""
        asked = self.config.max_length
        return asked if asked is not None else self._model.config.max_positions

    def _reply(self) -> Generator[ChatEvent, None, list[tuple[str, ToolCall]]]:
        """One message of the assistant; returns its calls by id, those that are to be carried out."""
        started = perf_counter()
        prompt, pictures = self.prompt()
        ids = prompt.ids(self._tokenizer)
        room = self._room(ids, pictures)
        most = min(room, self.config.max_new_tokens)
        parser = Parser(self._tokenizer, start=prompt.channel, drop_calls=self.toolbox is None)
        new, ended, is_over = 0, False, False
        try:
            for token in self._tokens(ids, pictures, most):
                new += 1
                yield from parser.feed_ids([token])
                ended = parser.done or token in self._stops
                if ended:
                    break
            is_over, faults = True, parser.reply().faults
            yield from parser.finish()
        finally:
            if not is_over:
                parser.finish()
            reply = parser.reply()
            calls = self._keep(reply) if new else []
            if not (is_over and ended):
                self._leave(calls, "the reply was cut off")
        session, seconds = self._session, perf_counter() - started
        reason = "end" if ended else "full" if new == room else "limit"
        yield Finished(reason, reply, faults, session.num_kept, session.num_read, new, seconds)
        return calls if ended else []

    def _room(self, ids: list[int], pictures: Sequence[Images]) -> int:
        """Tokens that a reply may have. Raises ValueError where that is none."""
        used = len(ids) + sum(rows - 1 for picture in pictures for rows in picture.num_tokens)
        if used >= self.longest:
            raise ValueError(f"the conversation has {used:,} tokens by now; {full(self.longest)}")
        return self.longest - used

    def _tokens(self, ids: list[int], pictures: Sequence[Images], most: int) -> Iterator[int]:
        logits_W = self._session.read(ids, pictures)
        for left in reversed(range(most)):
            token = self._sampler(logits_W[: self._tokenizer.vocab_size])
            yield token
            if left:
                logits_W = self._session.extend(token)

    # --- prompt and pictures ---

    def prompt(self) -> tuple[Prompt, list[Images]]:
        """The history as the prompt of the next reply, and its pictures. Raises ValueError."""
        pictures = [self.look_at(url) for url in every_picture_url(self.history)]
        tools = self.toolbox.schemas if self.toolbox else None
        sizes = [picture.sizes[0] for picture in pictures] if pictures else None
        c = self.config
        prompt = render(
            self.history, tools=tools, thinking=c.thinking, effort=c.effort, images=sizes, placeholders=False
        )
        return prompt, pictures

    def check(self) -> None:
        """As `Dialogue.check`."""
        self.prompt()

    def look_at(self, url: str) -> Images:
        """As `Dialogue.look_at`."""
        if url not in self._pictures:
            c = self._model.config
            if c.vision is None or c.media_pad_id is None:
                raise ValueError(
                    "this checkpoint cannot see: its config has no vision_config, so pictures have no place"
                )
            default = ImageConfig(patch=c.vision.patch_size, merge=c.vision.merge[0])
            self._pictures[url] = preprocess_images([decode_data_url(url)], self._image_config or default)
        return self._pictures[url]


def check_chat_format(tokenizer: Tokenizer) -> None:
    """Raise ValueError for a vocabulary without the control tokens of the chat format."""
    missing = [name for name in CHAT_SPECIALS if name not in tokenizer.specials]
    if missing:
        raise ValueError(
            f"this checkpoint was not trained on the chat format: its tokenizer lacks {', '.join(missing)}. Use "
            "`rille generate` to continue texts with it, or a checkpoint whose tokenizer is the published one or was "
            "made by today's `rille train`"
        )


def open_conversation(config: ChatConfig, toolbox: Toolbox | None = None) -> tuple[Conversation, str]:
    """A conversation with the checkpoint that the settings name, and a line about it. Raises ValueError or
    FileNotFoundError."""
    check_device(config.device)
    place = find_checkpoint(config.checkpoint)
    tokenizer = load_tokenizer(place)
    check_chat_format(tokenizer)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
    model = load_model(place, dtype=dtype, device=config.device, experts=config.experts)
    count = sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in model.parameters())  # codes: two in a byte
    about = f"{place}: {count / 1e6:,.1f} M parameters, {config.dtype} on {config.device}"
    return Conversation(model, tokenizer, config, toolbox, read_image_config(place)), about


def read_image_config(place: Path) -> ImageConfig | None:
    """How the checkpoint wants pictures prepared, if it says so."""
    file = place / PICTURES
    return ImageConfig.from_official(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
