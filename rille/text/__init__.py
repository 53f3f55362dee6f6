"""Text in and out of the model, without torch: tokenizers, the chat template and its parser, grammars, pictures."""

import importlib

_HOMES = {
    "load_tokenizer": "rille.text.tokenizer",
    "train_tokenizer": "rille.text.tokenizer",
    "TextStream": "rille.text.vocabulary",
    "Tokenizer": "rille.text.vocabulary",
    "Prompt": "rille.text.chat",
    "declared_tools": "rille.text.chat",
    "render": "rille.text.chat",
    "Parser": "rille.text.parser",
    "parse": "rille.text.parser",
    "Reply": "rille.text.reply",
    "Grammar": "rille.text.grammar",
    "continuations": "rille.text.grammar",
    "expand_media": "rille.text.media",
    "ImageConfig": "rille.text.images",
    "Images": "rille.text.images",
    "preprocess_images": "rille.text.images",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'rille.text' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
