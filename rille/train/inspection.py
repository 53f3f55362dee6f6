"""A look inside the model between two steps: what Attention Residuals read, how large outputs are, who works.

    attn_res       site -> [R]: mean weight of each source, oldest first, the running sum last (report section 2.2)
    output_rms     sub-layer -> root mean square of what it adds to the depth
    expert_load    layer -> [E]: tokens that each expert got in the step

The first two are measured on held-out text, so that they neither cost the step anything nor depend on its batch. One
JSON object for each look goes into `inspections.jsonl`; the loggers get all but the loads by expert as numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rille.data.loader import Batch
from rille.model.attn_res import Depth, Mix
from rille.model.balance import Counts
from rille.model.context import Context
from rille.model.model import K3
from rille.ops.attn_res import attn_res_weights
from rille.packing import Packing, moved
from rille.train.metrics import cut_rows

INSPECTIONS = "inspections.jsonl"
_OUTPUT = re.compile(r"(layers\.\d+\.(?:attn|mlp))_out")


@dataclass(eq=False)
class Watch:
    """What a forward pass shows: as its tap it sees the outputs, by hooks the sites. Tensors stay on the device."""

    attn_res: dict[str, Tensor] = field(default_factory=dict)
    output_rms: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if match := _OUTPUT.fullmatch(name):
            self.output_rms[match[1]] = tensor.float().square().mean().sqrt()
        return tensor

    def site(self, name: str, mix: Mix, depth: Depth) -> None:
        if depth.blocks:
            weights_NR = attn_res_weights([*depth.blocks, depth.sum], mix.query, mix.gain, mix.eps)
            self.attn_res[name] = weights_NR.mean(0)


@contextmanager
def watching(model: K3) -> Iterator[Watch]:
    """A watch that every site of the model reports to."""
    watch = Watch()

    def report(name: str):
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            assert isinstance(module, Mix)
            watch.site(name, module, arguments[0])

        return hook

    sites = [(name, site) for name, site in model.named_modules() if isinstance(site, Mix)]
    handles = [site.register_forward_hook(report(name)) for name, site in sites]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def inspect(model: K3, batch: Batch, counts: Counts) -> dict[str, Any]:
    """One look: a forward pass over a held-out batch, and the counts of the step that has just been made."""
    packing = Packing.of(batch.lengths, device=model.device)
    with watching(model) as watch:
        model(moved(batch.tokens, model.device), Context(packing, tap=watch))
    names = list(watch.output_rms)
    sizes = torch.stack([watch.output_rms[name] for name in names]).tolist()
    return {
        "attn_res": {name: weights_R.tolist() for name, weights_R in watch.attn_res.items()},
        "output_rms": dict(zip(names, sizes, strict=True)),
        "expert_load": {str(layer): load_E.tolist() for layer, load_E in counts.load.items()},
    }


def as_numbers(look: dict[str, Any]) -> dict[str, float]:
    """`output_rms/SUBLAYER`, and `attn_res/SITE/SOURCE` with the sources embedding, block_1, ..., running_sum."""
    numbers = {f"output_rms/{name}": size for name, size in look["output_rms"].items()}
    for site, weights_R in look["attn_res"].items():
        blocks = [f"block_{number}" for number in range(1, len(weights_R) - 1)]
        for source, weight in zip(("embedding", *blocks, "running_sum"), weights_R, strict=True):
            numbers[f"attn_res/{site}/{source}"] = weight
    return numbers


class Inspections:
    """The file of a run's looks. Those after `step`, of a run that died, are cut off when it is opened."""

    def __init__(self, path: Path, step: int):
        self.path = path
        cut_rows(path, step)

    def add(self, step: int, look: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps({'step': step, **look})}\n")
