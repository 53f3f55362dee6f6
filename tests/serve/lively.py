"""A small model with random weights so large that its replies vary, a tokenizer of its size, and a form of replies."""

from rille.model.model import K3, new_model
from rille.text.tokenizer import TrainedTokenizer, train_tokenizer
from tests.train.small import MODEL

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def lively_model() -> K3:
    return new_model(MODEL.replace(init_std=0.2), seed=3)


def lively_tokenizer() -> TrainedTokenizer:
    return train_tokenizer(["some text about nothing in particular, 1 2 3"] * 3, 320, note=lambda text: None)
