"""A model that says what a script says, and shows what it was given to read."""

from types import SimpleNamespace
from typing import Any

import torch

from rille.model.model import K3
from rille.text.chat import render
from rille.text.tokenizer import TrainedTokenizer, train_tokenizer

TEXTS = ["The response is in the message; think, then call the tools.\n"] * 20


def small_tokenizer() -> TrainedTokenizer:
    return train_tokenizer(TEXTS, 400, note=lambda _: None)


class Scripted:
    """replies: the ids of each reply, in turn. read: the tokens of each prompt that went through it, in turn."""

    def __init__(self, tokenizer: TrainedTokenizer, replies: list[list[int]]):
        self.config: Any = SimpleNamespace(
            vocab_size=tokenizer.vocab_size + 3, eos_id=None, vision=None, media_pad_id=None, max_positions=1000
        )
        self.replies = [list(reply) for reply in replies]
        self.read: list[int] = []
        self._left: list[int] = []

    def new_memory(self) -> list[int]:
        return []

    def logits(self, tokens: torch.Tensor, *, memory: list[int], images: object, rows: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 1 or not self._left:
            self._left = self.replies.pop(0)
            self.read.append(len(tokens))
        memory += tokens.tolist()
        logits = torch.zeros(1, self.config.vocab_size)
        logits[0, self._left.pop(0)] = 1
        logits[0, -1] = 2  # an id that the tokenizer does not have must never be taken
        return logits

    @property
    def as_k3(self) -> K3:
        """The same object, for what is typed to take the real model."""
        model: Any = self
        return model


def reply_ids(tokenizer: TrainedTokenizer, thinking: bool = True, **message: Any) -> list[int]:
    """What a model says to give this message: ids from behind the opened channel to the end of the message."""
    question = {"role": "user", "content": "?"}
    prompt = render([question], thinking=thinking)
    whole = render([question, {"role": "assistant", **message}], thinking=thinking, add_generation_prompt=False)
    return whole.ids(tokenizer)[len(prompt.ids(tokenizer)) :]
