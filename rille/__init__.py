"""Rille: Kimi K3 as one package. This face is lazy (PEP 562): a name is imported when it is first asked for, so that
`import rille` needs neither torch nor time."""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "K3Config": "rille.model.config",
    "preset": "rille.model.presets",
    "new_model": "rille.model.model",
    "load_model": "rille.model.checkpoint",
    "save_model": "rille.model.checkpoint",
    "generate": "rille.serve.generate",
    "stream": "rille.serve.generate",
    "load_tokenizer": "rille.text.tokenizer",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'rille' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
