"""Arrays into .npy files through the stream's own `write`: numpy's goes round it, and a full disk is then an error
without number and file, which nobody can be told what to do about. No torch here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import numpy as np


def write_array(stream: BinaryIO, array: np.ndarray) -> None:
    """As np.save. Raises OSError with its number where the disk is full."""
    np.save(SimpleNamespace(write=stream.write), array)  # pyright: ignore[reportArgumentType]
    stream.flush()


def save_array(file: Path, array: np.ndarray) -> None:
    """Write a whole file."""
    with file.open("wb") as stream:
        write_array(stream, array)
