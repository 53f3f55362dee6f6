"""Needle retrieval: one sentence with a random number in a long text, asked for at its end, by depth and length.

text .. "The secret number of Lisbon is 4821093." .. text   "The secret number of Lisbon is" -> 4821093

found    every token of the number is the model's first choice, which is what greedy writing would give
gain     nats a token by which the number is likelier than in the same text without the needle: a small model that
         never gets all of it right may still have seen it
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rille.data.sources import read_documents
from rille.eval.config import NeedleConfig
from rille.eval.opened import Opened, open_checkpoint
from rille.eval.result import Result, bar, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CITIES = "Lisbon Oslo Quito Hanoi Accra Turin Perth Lima Dakar Osaka Boston Cairo Delhi Seoul Tunis Vilnius".split()


def needle(config: NeedleConfig) -> list[dict]:
    """Measure, show, and give the rows: one for each length and depth. Raises ValueError for too short lengths."""
    opened = open_checkpoint(config)
    hay = haystack(opened, config)
    rows = []
    with bar("needles", len(config.lengths) * len(config.depths) * config.samples) as tell:
        for length in config.lengths:
            for depth in config.depths:
                found, gains = [], []
                for sample in range(config.samples):
                    with_needle, without, answer = example(opened, hay, length, depth, config.seed + sample)
                    right, nats = answered(opened, with_needle, answer)
                    found.append(right)
                    gains.append(answered(opened, without, answer)[1] - nats)
                    tell(1)
                rows.append({"tokens": length, "depth": depth, "found": fmean(found), "gain": fmean(gains)})
    remark = f"found: share of {config.samples}; gain: nats a token that the needle makes the number likelier"
    draw = [lambda axes: grid(axes, rows, "found"), lambda axes: grid(axes, rows, "gain")]
    show(Result("needle", f"Needles, {opened.place}", config, rows, draw, (remark,)), config.out)
    return rows


def haystack(opened: Opened, config: NeedleConfig) -> np.ndarray:
    """Ids of text, at least one more than the longest length; repeated where there is less."""
    wanted = 4 * max(config.lengths) + 1
    ids: list[int] = []
    for document in read_documents(config.haystack, max_bytes=16 * wanted, note=lambda line: None):
        ids += opened.tokenizer.encode(document.text)
        if len(ids) >= wanted:
            break
    if not ids:
        raise ValueError(f"{config.haystack} holds no text; name another --haystack")
    return np.resize(np.array(ids, dtype=np.int64), max(wanted, len(ids)))


def example(
    opened: Opened, hay: np.ndarray, length: int, depth: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(line with the needle, the same with more hay instead, ids of the answer); both lines have `length` ids."""
    draw = np.random.default_rng((seed, length))
    city, number = CITIES[draw.integers(len(CITIES))], str(draw.integers(1_000_000, 10_000_000))
    encode = opened.tokenizer.encode
    question = np.array(encode(f"\nThe secret number of {city} is"))
    answer = np.array(encode(f" {number}"))
    sentence = np.concatenate([question, answer, encode(".\n")])
    begin = opened.line([])
    room = length - len(begin) - len(question) - len(sentence)
    if room < 1:
        raise ValueError(f"{length} tokens are too few for needle and question; give at least {length - room + 1}")
    start = int(draw.integers(len(hay) - room - len(sentence) + 1))
    text = hay[start : start + room + len(sentence)]
    place = round(depth * room)
    hidden = np.concatenate([begin, text[:place], sentence, text[place:room], question])
    return hidden, np.concatenate([begin, text, question]), answer


@torch.inference_mode()
def answered(opened: Opened, line: np.ndarray, answer: np.ndarray) -> tuple[bool, float]:
    """Whether each token of the answer is the first choice after those before it, and its mean -log p."""
    ids = torch.from_numpy(np.concatenate([line, answer[:-1]]).astype(np.int64))
    rows = torch.arange(len(line) - 1, len(ids))
    logits_RW: Tensor = opened.model.logits(ids, rows=rows).cpu()
    wanted = torch.from_numpy(answer.astype(np.int64))
    nats = -torch.log_softmax(logits_RW, -1).gather(1, wanted[:, None])
    return bool((logits_RW.argmax(-1) == wanted).all()), float(nats.mean())


def grid(axes: Axes, rows: Sequence[dict], key: str) -> None:
    """Lengths across, depths down; shares from 0 to 1, gains around 0."""
    lengths, depths = sorted({row["tokens"] for row in rows}), sorted({row["depth"] for row in rows})
    values = np.zeros((len(depths), len(lengths)))
    for row in rows:
        values[depths.index(row["depth"]), lengths.index(row["tokens"])] = row[key]
    most = max(1e-9, float(np.abs(values).max()))
    colours, least, most = ("viridis", 0.0, 1.0) if key == "found" else ("RdBu", -most, most)
    shown = axes.imshow(values, aspect="auto", cmap=colours, vmin=least, vmax=most)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("depth", fontsize=8)
    axes.set_title(key, fontsize=9)
    axes.figure.colorbar(shown, ax=axes)
