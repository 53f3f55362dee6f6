"""The numbers of `plan.py` as a table for people. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from rille.model.config import K3Config
from rille.model.plan import (
    Part,
    cache_bytes,
    decode_flops,
    forward_flops,
    parts,
    state_bytes,
    training_bytes,
    training_flops,
    weight_bytes,
)

Row = tuple[str, ...]
CARD = 141 * 10**9  # bytes of one H200


def plan_table(name: str, c: K3Config, contexts: Sequence[int], gpus: int) -> str:
    """Three tables: parameters by part; FLOPs and memory as the context grows; weights in bytes."""
    kinds = f"{len(c.kda_layers)} KDA, {len(c.mla_layers)} MLA, {c.dense_layers} dense"
    head = f"{name}: {c.num_layers} layers ({kinds}), width {c.hidden_size:,}, vocabulary {c.vocab_size:,}"
    return "\n\n".join([head, _parameters(c), _costs(c, contexts), _memory(c, max(contexts), gpus)])


def _parameters(c: K3Config) -> str:
    text = [part for part in parts(c) if part.is_text]
    beside = [part for part in parts(c) if not part.is_text]
    if beside:
        text.append(_sum("language model", text))
    everything = _sum("all", parts(c))
    rows = [(part.name, f"{part.total:,}", f"{part.active:,}") for part in (*text, *beside, everything)]
    return _aligned([("parameters", "total", "used by a token"), *rows])


def _sum(name: str, some: Sequence[Part]) -> Part:
    return Part(name, sum(part.total for part in some), sum(part.active for part in some))


def _costs(c: K3Config, contexts: Sequence[int]) -> str:
    state, cache = state_bytes(c), cache_bytes(c)
    lines = {
        "forward, FLOPs a token": [_scaled(forward_flops(c, t)) for t in contexts],
        "training, FLOPs a token": [_scaled(training_flops(c, t)) for t in contexts],
        "decoding, FLOPs for the next": [_scaled(decode_flops(c, t)) for t in contexts],
        "KDA states of a sequence": [_scaled(state, "B") for _ in contexts],
        "MLA cache of a sequence": [_scaled(cache * t, "B") for t in contexts],
        "both": [_scaled(state + cache * t, "B") for t in contexts],
    }
    header = ("context", *(f"{t:,}" for t in contexts))
    return _aligned([header, *((name, *values) for name, values in lines.items())])


def _memory(c: K3Config, context: int, gpus: int) -> str:
    plain, packed = weight_bytes(c, mxfp4=False), weight_bytes(c, mxfp4=True)
    sequence = state_bytes(c) + cache_bytes(c) * context
    sizes = {
        "weights, bf16": plain,
        "weights, MXFP4 experts": packed,
        f"bf16 and {context:,} tokens": plain + sequence,
        f"MXFP4 and {context:,} tokens": packed + sequence,
        "training, fp32 with AdamW": training_bytes(c),
    }
    header = ("memory", "all", "cards of 141 GB", *([f"each of {gpus:,} GPUs"] if gpus > 1 else []))
    rows = [
        (name, _scaled(size, "B"), f"{-(-size // CARD):,}", *([_scaled(size / gpus, "B")] if gpus > 1 else []))
        for name, size in sizes.items()
    ]
    note = "without activations" if gpus == 1 else "shared evenly, without activations"
    return f"{_aligned([header, *rows])}\n{note}"


def _scaled(value: float, unit: str = "") -> str:
    """1234567 -> 1.23 M; powers of 1000."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}" if value < 1000 else f"{value:,.0f} {prefix}{unit}"


def _aligned(rows: Sequence[Row]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
