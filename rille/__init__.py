"""Rille: Kimi K3 as one package. This face is lazy (PEP 562): a name is imported when it is first asked for, so that
`import rille` needs neither torch nor time."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rille.model.checkpoint import load_model, save_model
    from rille.model.config import K3Config
    from rille.model.model import new_model
    from rille.model.presets import preset
    from rille.serve.engine import Engine
    from rille.serve.generate import generate, stream
    from rille.serve.schema import SamplingParams
    from rille.text.images import preprocess_images
    from rille.text.tokenizer import load_tokenizer

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "K3Config",
    "SamplingParams",
    "__version__",
    "generate",
    "load_model",
    "load_tokenizer",
    "new_model",
    "preprocess_images",
    "preset",
    "save_model",
    "stream",
]

_HOMES = {
    "Engine": "rille.serve.engine",
    "K3Config": "rille.model.config",
    "SamplingParams": "rille.serve.schema",
    "generate": "rille.serve.generate",
    "load_model": "rille.model.checkpoint",
    "load_tokenizer": "rille.text.tokenizer",
    "new_model": "rille.model.model",
    "preprocess_images": "rille.text.images",
    "preset": "rille.model.presets",
    "save_model": "rille.model.checkpoint",
    "stream": "rille.serve.generate",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'rille' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
