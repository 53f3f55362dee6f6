"""Arrays in .npy files. No torch here.

They are written through the stream's own `write`: numpy goes round it, and a full disk is then an error without number,
which nobody can be told what to do about. One that is gone or cut short is named when it is read.
"""

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


def load_array(file: Path, *, mapped: bool = False) -> np.ndarray:
    """Read or map a file. Raises ValueError where it is gone or damaged."""
    try:
        return np.load(file, mmap_mode="r" if mapped else None)
    except (FileNotFoundError, EOFError, ValueError) as error:
        reason = "it is gone" if isinstance(error, FileNotFoundError) else str(error)
        raise ValueError(f"{file} is damaged ({reason})") from None
