"""A checkpoint written anew with other dtypes. Starts without torch, so that mistakes are told at once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from rille.interrupts import loading
from rille.model.locate import find_checkpoint


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Write a checkpoint anew, with other dtypes. Every other file of it (tokenizer, README) moves along."""

    source: Annotated[Positional[str], arg(metavar="SRC")]
    """A checkpoint directory, or a directory that `rille train` wrote."""

    target: Annotated[Positional[str], arg(metavar="DST")]
    """The directory to write; it must not exist, or be empty."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of all plain tensors but those that the official format keeps in fp32."""

    experts: Literal["keep", "bf16", "mxfp4"] = "keep"
    """Routed experts: as they are, plain (of dtype), or packed to 4 bits."""


def convert(config: ConvertConfig) -> str:
    """Write the checkpoint anew; returns what was done, in words.

    Raises ValueError for a target that is not new or empty, FileNotFoundError where no checkpoint is, and whatever
    loading and saving raise; the target appears whole or not at all.
    """
    source, target = find_checkpoint(config.source), Path(config.target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already; name a new directory")

    with loading():
        import torch

        from rille.model.checkpoint import load_model, save_model

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.dtype]
    # Packing starts from all bits of the source; otherwise the target's dtype loses nothing more than saving does.
    loaded = load_model(source, dtype=torch.float32 if config.experts == "mxfp4" else dtype)
    save_model(loaded, target, experts=config.experts, tokenizer=OtherFiles(source), dtype=dtype)
    size = sum(file.stat().st_size for file in target.iterdir())
    return f"{source} -> {target}: {size / 1e6:,.1f} MB"


@dataclass(frozen=True)
class OtherFiles:
    """The files of a checkpoint that are neither weights nor config; saved with the model: a target appears whole."""

    source: Path

    def save(self, directory: Path) -> None:
        for file in self.source.iterdir():
            weights = file.suffix == ".safetensors" or file.name in ("config.json", "model.safetensors.index.json")
            if file.is_file() and not weights:
                shutil.copy2(file, directory / file.name)
