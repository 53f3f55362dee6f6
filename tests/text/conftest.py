"""The tokenizers that these tests share, and what the official encoder gave."""

import json
import os
from pathlib import Path

import pytest

from rille.text.tokenizer import Tokenizer, TrainedTokenizer, load_tokenizer, train_tokenizer

TOP = Path(__file__).resolve().parents[2]
# The published vocabulary is not in the repository: a folder named in the environment, or one beside the repository.
VOCABULARY = Path(os.environ.get("RILLE_ORACLE", TOP.parent / "shared" / "oracle")) / "tokenizer" / "tiktoken.model"
GOLDEN = json.loads((TOP / "tests" / "fixtures" / "tokenizer_golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def golden() -> dict:
    return GOLDEN


@pytest.fixture(scope="session")
def official() -> Tokenizer:
    if not VOCABULARY.is_file():
        pytest.skip("the published vocabulary is not beside the repository (RILLE_ORACLE names its folder)")
    return load_tokenizer(VOCABULARY)


@pytest.fixture(scope="session")
def small() -> TrainedTokenizer:
    return train_tokenizer(
        ["The response is in the message; think, then call the tools.\n"] * 20, 400, note=lambda _: None
    )


@pytest.fixture(scope="session", params=["small", "official"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer trained here and the published one, in turn."""
    return request.getfixturevalue(request.param)


USER = {"role": "user", "content": "hi"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def call(name: str, call_id: str | None = None, arguments: object = None) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


MARKS = {"⟦": "<|open|>", "⟧": "<|close|>", "¦": "<|sep|>", "■": "<|end_of_msg|>"}


def xtml(short: str) -> str:
    """Markup in a short spelling: ⟦ opens, ⟧ closes, ¦ separates, ■ ends the message."""
    return short.translate(str.maketrans(MARKS))


CALL = (
    '⟦call tool="f" index="1"¦⟦argument key="a" type="string"¦x⟧argument¦'
    '⟦argument key="n" type="number"¦5⟧argument¦⟧call¦'
)
