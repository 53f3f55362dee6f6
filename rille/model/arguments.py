"""What people may hand to a model, checked before anything is computed: each function gives the value back in the form
that the code uses, or raises a one-line ValueError that names the value, the limit and what to do.

Only values on the CPU are read at every call. Ids and rows on another device are read once per prefill and never while
single tokens are decoded: reading makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rille.packing import Packing

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
DTYPES["float64"] = torch.float64
COLDEST = 1e-6  # logits divided by less could overflow
SEEDS = 2**63  # seeds lie below it


def kind(value: object) -> str:
    """What a value is, in a word or two."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}".replace("torch.", "")
    return "None" if value is None else f"{type(value).__name__} {shown(value)}"


def shown(value: object, limit: int = 60) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[:limit]}..."


def whole(value: Any, name: str, low: int, below: int | None = None) -> int:
    """An int (or what counts as one, but no truth value) from `low` to `below` - 1."""
    try:
        number = index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name} is {kind(value)}; it must be a whole number")
    if number < low or (below is not None and number >= below):
        upper = "" if below is None else " and below 2^63" if below == SEEDS else f" and at most {below - 1}"
        raise ValueError(f"{name} is {number}; it must be at least {low}{upper}")
    return number


def as_seed(value: Any, name: str = "seed") -> int:
    return whole(value, name, 0, SEEDS)


def real(value: Any, name: str) -> float:
    """A number that may be compared (NaN too), but no truth value."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {kind(value)}; it must be a number")
    return float(value)


def as_temperature(value: Any) -> float:
    """0, or from 1e-6 on: logits are divided by it in fp32."""
    temperature = real(value, "temperature")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be at least 0 (0 takes the likeliest token)")
    if 0 < temperature < COLDEST:
        raise ValueError(f"temperature is {temperature}; below {COLDEST} give 0, which takes the likeliest token")
    return temperature


def as_dtype(value: Any) -> torch.dtype:
    """A dtype of weights, given as such or by name ("bfloat16")."""
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise ValueError(f"dtype is {shown(value)}; give a torch dtype or the name of one: {', '.join(DTYPES)}")
    return dtype


def as_path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError(f"path is {kind(value)}; give the path of a directory")
    return Path(value)


def as_layers(value: Any, num_layers: int) -> range | None:
    """A non-empty range of layers without gaps, or None for all."""
    if value is None:
        return None
    if not isinstance(value, range):
        raise ValueError(f"layers is {kind(value)}; give a range such as range(0, {num_layers}), or None for all")
    if value.step != 1 or value.start < 0 or value.stop > num_layers or not len(value):
        raise ValueError(
            f"layers {value} are not a range inside the {num_layers} layers: give range(start, stop) with "
            f"0 <= start < stop <= {num_layers}"
        )
    return value


def check_weights(device: torch.device) -> None:
    """Raise ValueError for a model on the meta device, which has shapes only."""
    if device.type == "meta":
        raise ValueError('the model is on the "meta" device, where it has shapes only; make or load it on cpu or cuda')


def check_tokens(tokens: Any, device: torch.device) -> None:
    """Raise ValueError unless they are int64 [N], on the CPU or on the model's device. Reads no values."""
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens must be an int64 tensor of shape [N], not {kind(tokens)}; use torch.tensor(ids)")
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        raise ValueError(
            f"tokens must be int64 of shape [N], got {kind(tokens)}; a batch is one axis, whose boundaries are packing"
        )
    if tokens.device.type != "cpu" and tokens.device != device:
        raise ValueError(f"tokens are on {tokens.device}, the model on {device}; move them: tokens.to(...)")


def check_ids(tokens: Tensor, packing: Packing, vocab_size: int) -> None:
    """Raise ValueError for ids outside the vocabulary."""
    if len(tokens) and readable(tokens, packing):
        low, high = (int(bound) for bound in torch.aminmax(tokens))
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token ids run from {low} to {high}, the vocabulary has 0..{vocab_size - 1}")


def readable(values: Tensor, packing: Packing) -> bool:
    """Whether a check may read values: on the CPU, or in a batch that is more than one step of decoding."""
    return values.device.type == "cpu" or packing.longest > 1


def check_packing(packing: Any, tokens: Tensor, device: torch.device) -> None:
    """Raise ValueError unless it describes so many tokens, on the model's device."""
    if not isinstance(packing, Packing):
        raise ValueError(f"packing must be a Packing, not {kind(packing)}; make one: Packing.of(lengths)")
    if packing.num_tokens != len(tokens):
        raise ValueError(
            f"the packing describes {packing.num_tokens} tokens, the batch has {len(tokens)}; the lengths of its "
            "sequences must sum to that"
        )
    if packing.device != device:
        raise ValueError(
            f"the packing is on {packing.device}, the model on {device}; make it there: "
            f'Packing.of(lengths, device="{device}")'
        )


def as_rows(rows: Any, count: int, packing: Packing, device: torch.device) -> Tensor:
    """Rows of the result to keep, int64 on the device; negative ones count from the end."""
    wanted = "rows must be whole numbers, int64 [R] (for a part of them: torch.arange(start, stop))"
    if not isinstance(rows, Tensor | Sequence) or isinstance(rows, str | bytes):
        raise ValueError(f"{wanted}, not {kind(rows)}")
    try:
        rows = rows if isinstance(rows, Tensor) else torch.tensor([index(row) for row in rows], dtype=torch.int64)
    except TypeError:
        raise ValueError(f"{wanted}, not {kind(rows)}") from None
    if rows.ndim != 1 or rows.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{wanted}, not {kind(rows)}")
    if rows.device.type != "cpu" and rows.device != device:
        raise ValueError(f"rows are on {rows.device}, the model on {device}; move them: rows.to(...)")
    if len(rows) and readable(rows, packing):
        low, high = (int(bound) for bound in torch.aminmax(rows))
        if low < -count or high >= count:
            raise ValueError(f"rows run from {low} to {high}, the batch has the rows {-count}..{count - 1}")
    return rows.to(device)
