"""Checkpoints of a run: an official checkpoint that anything can load, and beside it what training needs to continue.

    step-000200/    config.json, shards, index (bf16), tokenizer.json        the official layout
                    training/state.safetensors    weights (fp32 masters of bf16 ones), their running mean, optimiser
                                                  state, random state
                    training/state.json           step, place in the data, settings, skipped steps

A directory appears whole or not at all (`publishing`). Continuing from it gives the losses, bit for bit on a CPU, that
the run would have had.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rille.model.locate import checkpoint_name
from rille.model.shards import shorten
from rille.optim.masters import Masters
from rille.train.config import check_resumable, settings
from rille.train.run import Run
from rille.train.snapshot import NUMBERS, TENSORS, Snapshot, write_checkpoint


def snapshot(run: Run) -> Snapshot:
    """What stands now: tensors are the run's own, numbers are copies."""
    numbers = {"step": run.step, "loader": run.loader.state(), "settings": settings(run.config)}
    numbers["guard"] = run.guard.state()
    path = Path(run.config.out) / "checkpoints" / checkpoint_name(run.step)
    return Snapshot(path, run.config.keep, run.model, run.tokenizer, dict(_tensors(run)), numbers)


def save_checkpoint(run: Run) -> Path:
    """Write the checkpoint of the run's step, then remove the oldest ones beyond `keep`."""
    return write_checkpoint(snapshot(run))


def restore(run: Run, path: Path) -> None:
    """Bring a run that has just been set up to where the checkpoint was taken.

    Raises ValueError if the checkpoint has no training state or a damaged one, or is of a run with other settings.
    """
    numbers = read_numbers(path)
    check_resumable(numbers["settings"], settings(run.config), str(path))
    tensors = read_tensors(path)
    wanted = {f"model.{name}": weight.shape for name, weight in weights(run).items()}
    wanted["random"] = torch.get_rng_state().shape
    if run.average is not None:
        wanted |= {f"ema.{name}": mean.shape for name, mean in run.average.named()}
    if wrong := [name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape]:
        raise damaged(path / TENSORS, path, f"absent or of another shape: {shorten(wrong)}")
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    run.model.prepare()
    _restore_optimizer(run, tensors)
    torch.set_rng_state(tensors["random"])
    run.loader.restore(numbers["loader"])
    if run.average is not None:
        run.average.restore({name: tensors[f"ema.{name}"] for name, _ in run.average.named()})
    if "guard" in numbers:  # else of before there was one
        run.guard.restore(numbers["guard"])
    run.step = numbers["step"]


def read_numbers(path: Path) -> dict[str, Any]:
    """Step, place in the data and settings of a checkpoint."""
    file = path / NUMBERS
    if not file.is_file():
        raise ValueError(f"{path} has no {NUMBERS}: it holds a model, not a run that can be continued")
    try:
        numbers = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(file, path, str(error)) from None
    kinds = {"step": int, "loader": dict, "settings": dict}
    if not isinstance(numbers, dict) or any(not isinstance(numbers.get(key), kind) for key, kind in kinds.items()):
        raise damaged(file, path, f"it must hold {', '.join(kinds)}")
    return numbers


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Weights, optimiser state and random state of a checkpoint."""
    try:
        return load_file(path / TENSORS)
    except (SafetensorError, FileNotFoundError) as error:
        raise damaged(path / TENSORS, path, str(error)) from None


def damaged(file: Path, checkpoint: Path, reason: str) -> ValueError:
    return ValueError(f"{file} is damaged ({reason}); remove {checkpoint} to go on from the checkpoint before it")


def remove_unfinished(out: Path) -> None:
    """Delete what a killed run left of what it was writing or removing."""
    for left in (*out.glob("checkpoints/.*step-*"), *out.glob(".*.partial-*"), *out.glob(".*.old-*")):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def _tensors(run: Run) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights(run).items():
        yield f"model.{name}", weight.detach().contiguous()
    for name, values in _optimizer_states(run.optimizer):
        for key, value in values.items():
            yield f"optimizer.{name}.{key}", value.contiguous()
    if run.average is not None:
        for name, mean in run.average.named():
            yield f"ema.{name}", mean
    yield "random", torch.get_rng_state()


def weights(run: Run) -> dict[str, Tensor]:
    """What the optimiser moves: each parameter by name, or the fp32 master that it is the rounding of."""
    pairs = run.optimizer.pairs if isinstance(run.optimizer, Masters) else ()
    masters = {id(held): master for held, master in pairs}
    return {name: masters.get(id(parameter), parameter) for name, parameter in run.model.named_parameters()}


def _optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(parameter name, its state) for all parameters that have one."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            yield name, optimizer.state[parameter]


def _restore_optimizer(run: Run, tensors: dict[str, Tensor]) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition(".")
            states.setdefault(name, {})[entry] = value.to(
                run.model.device
            )  # counts of steps too: rules read them there
    state_dict = run.optimizer.state_dict()
    for group in state_dict["param_groups"]:
        for name, index in zip(group["param_names"], group["params"], strict=True):
            state_dict["state"][index] = states.get(name, {})
    if isinstance(run.optimizer, Masters):
        names = {id(parameter): name for name, parameter in run.model.named_parameters()}
        state_dict["masters"] = [tensors[f"model.{names[id(held)]}"] for held, _ in run.optimizer.pairs]
    run.optimizer.load_state_dict(state_dict)
