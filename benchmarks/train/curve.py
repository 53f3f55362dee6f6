"""Does a model learn with the kernels as it does without them? One curve beside another, and both beside noise.

    python benchmarks/train/curve.py --tokens tokens.npy --out FOLDER [--preset nano] [--experts 32] [--layers 8]
        [--steps 200] [--seconds 75]

Four runs of the same steps on the same text, each as the trainer does it (bf16 weights, fp32 masters, warm-up,
clipping, balancing): with the kernels, and with every op in its PyTorch form (`plain_forms`); each once from the same
weights, and once from weights that were rounded to bf16 another way, which moves an element by at most one unit of the
last place. Training amplifies a rounding as it does any other, so what the other rounding does to a curve is the noise:

    distance of two curves    mean over the steps of |a - b|, both smoothed over SMOOTH steps
    noise                     the larger of kernels, other rounding against kernels and the same of the PyTorch forms
    gate                      the mean distance of a curve with kernels and one without is at most LIMIT times the noise

A step is `--sequences` times `--length` tokens. The runs are processes side by side, as each mostly waits for its own
host; each says how far it is every SHOWN steps. After `--seconds` since the start no run begins another step: what all
have done is compared and written, and the result is unfinished, which is no pass. FOLDER gets curve.json, the losses of
every step and the distances, and curve.png (`--redraw`: from curve.json).
`--device cpu` runs the PyTorch forms twice, as there are no kernels: it shows that the program works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rille import ops
from rille.data.loader import Batch
from rille.model.balance import Counts, update_biases
from rille.model.config import K3Config
from rille.model.model import K3, new_model
from rille.model.presets import preset
from rille.ops.backends import report
from rille.ops.mla import choice
from rille.optim.clip import clip_gradients
from rille.optim.config import OptimConfig
from rille.optim.groups import Named
from rille.optim.rules import optimizer
from rille.optim.schedules import learning_rate
from rille.train.losses import next_token_loss
from rille.train.roles import parameter_roles

SMOOTH, LAST, LIMIT = 10, 20, 1.5
SHOWN = 20  # steps between two lines of a run
FORMS = ("kernels", "PyTorch")
ROUNDINGS = ("", "other rounding")


def asking() -> list[Any]:
    """The modules of all ops that choose by whether triton is there."""
    for each in iter_modules(ops.__path__):
        import_module(f"rille.ops.{each.name}")
    return [m for name, m in sys.modules.items() if name.startswith("rille.ops.") and hasattr(m, "HAS_TRITON")]


@contextmanager
def plain_forms() -> Iterator[None]:
    """Every op believes that triton is not installed, and attention is not left to cuDNN."""
    modules = asking()
    held, faster = [m.HAS_TRITON for m in modules], choice.library_is_faster
    for module in modules:
        module.HAS_TRITON = False
    choice.library_is_faster = lambda *_: ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*triton is not installed")
            yield
        assert not any(m.HAS_TRITON for m in asking()), "an op was imported meanwhile and takes its kernels"
    finally:
        choice.library_is_faster = faster
        for module, value in zip(modules, held, strict=True):
            module.HAS_TRITON = value


def batches(tokens: np.ndarray, vocabulary: int, steps: int, sequences: int, length: int) -> list[Batch]:
    """As many batches of neighbouring text as there are steps, all different."""
    size = sequences * length
    if (largest := int(tokens[: steps * size + 1].max())) >= vocabulary:
        raise SystemExit(f"token {largest} of the text is none of the model's {vocabulary}")
    if steps * size + 1 > len(tokens):
        raise SystemExit(f"{steps} steps of {size} tokens are more than the {len(tokens)} tokens of the text")
    found = []
    for at in range(0, steps * size, size):
        ids = torch.from_numpy(tokens[at : at + size + 1].astype(np.int64))
        found.append(Batch(ids[:-1], ids[1:], (length,) * sequences))
    return found


@torch.no_grad()
def round_otherwise(model: K3) -> None:
    """Each element held in bf16 times 1 + u, |u| < 2^-8, and rounded again: up to one unit of its last place, or none.
    What is held in fp32 was not rounded and stays."""
    generator = torch.Generator(model.device).manual_seed(1)
    for parameter in (p for p in model.parameters() if p.dtype == torch.bfloat16):
        u = torch.rand(parameter.shape, generator=generator, device=model.device).sub_(0.5).mul_(2**-7)
        parameter.copy_(parameter.float() * (1 + u))
    model.prepare()


class Clock(NamedTuple):
    """When the program began and when the last step may begin, in seconds of `time.time`: the runs share it."""

    began: float
    until: float


def train(
    config: K3Config, text: list[Batch], optim: OptimConfig, device: str, rounded: bool, name: str, clock: Clock
) -> list[float]:
    """The loss of each step that began in time, in nats a token. The device is asked every SHOWN steps."""
    model = new_model(config, dtype=torch.bfloat16, device=device, seed=0)
    if rounded:
        round_otherwise(model)
    roles = {role.name: role for role in parameter_roles(config)}
    rows = [Named(n, p, roles[n].kind, roles[n].blocks) for n, p in model.named_parameters()]
    rule, losses = optimizer(rows, optim), []
    for step, batch in enumerate(text):
        if time.time() > clock.until:
            break
        for group in rule.param_groups:
            group["lr"] = learning_rate(step, len(text), optim)
        losses.append(update(model, batch, rule, optim.clip))
        if step == 0 or (step + 1) % SHOWN == 0:
            loss = losses[-1].item()
            print(f"  {time.time() - clock.began:5.1f} s  {name}: step {step + 1}, loss {loss:.4f}", flush=True)
    return torch.stack(losses).tolist() if losses else []


def update(model: K3, batch: Batch, rule: torch.optim.Optimizer, clip: float) -> Tensor:
    counts, c = Counts(), model.config
    result = next_token_loss(model, batch, counts)
    (result.loss_sum / len(batch.tokens)).backward()
    clip_gradients(model.parameters(), clip)
    rule.step()
    rule.zero_grad()
    update_biases(model.router_biases(), counts, c.active_experts, c.balance)
    model.prepare()
    return result.loss_sum.detach() / len(batch.tokens)


def smoothed(losses: list[float]) -> np.ndarray:
    return np.convolve(losses, np.full(SMOOTH, 1 / SMOOTH), mode="valid")


def distance(a: list[float], b: list[float]) -> float:
    return float(np.abs(smoothed(a) - smoothed(b)).mean())


def compared(curves: dict[str, list[float]]) -> dict[str, Any]:
    """Distances and the gate. Curves of one length; nothing where they are too short to be smoothed."""
    if min(map(len, curves.values())) < 2 * SMOOTH:
        return {"passed": False}
    a, b = ([name for name in curves if name.startswith(form)] for form in FORMS)
    within = {form: distance(*(curves[name] for name in names)) for form, names in zip(FORMS, (a, b), strict=True)}
    across = [distance(curves[one], curves[other]) for one, other in product(a, b)]
    noise, mean = max(within.values()), float(np.mean(across))
    return {
        "within": within,
        "across": across,
        "noise": noise,
        "mean_across": mean,
        "ratio": mean / noise if noise else float("inf") if mean else 0.0,
        "last": {name: float(np.mean(losses[-LAST:])) for name, losses in curves.items()},
        "passed": mean <= LIMIT * noise,
    }


def draw(curves: dict[str, list[float]], picture: Path) -> None:
    """Curves above, and below how far each lies from the first one of the PyTorch forms."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True)
    base = smoothed(curves[FORMS[1]])
    for name, losses in curves.items():
        line = smoothed(losses)
        above.plot(line, label=name, linewidth=1)
        below.plot(line - base, label=name, linewidth=1)
    above.set(ylabel=f"nats a token, mean of {SMOOTH} steps")
    below.set(xlabel="step", ylabel=f"difference from {FORMS[1]}")
    above.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def to_the_shortest(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    common = min(map(len, curves.values()))
    return {name: losses[:common] for name, losses in curves.items()}


class Run(NamedTuple):
    losses: list[float]
    seconds: float
    backends: dict[str, str]


def config_of(name: str, experts: int, layers: int) -> K3Config:
    """The preset, or its first layers, with as many experts. 0: as the preset has."""
    config = preset(name)
    layers = layers or config.num_layers
    kept = tuple(layer for layer in config.mla_layers if layer < layers)
    return config.replace(num_experts=experts or config.num_experts, num_layers=layers, mla_layers=kept)


def name_of(form: str, rounding: str) -> str:
    return f"{form}, {rounding}" if rounding else form


def run(form: str, rounding: str, arguments: argparse.Namespace, clock: Clock) -> Run:
    """One curve, in a process of its own."""
    config = config_of(arguments.preset, arguments.experts, arguments.layers)
    optim = OptimConfig(rule=arguments.rule, lr=arguments.lr)
    tokens = np.load(arguments.tokens, mmap_mode="r")
    text = batches(tokens, config.vocab_size, arguments.steps, arguments.sequences, arguments.length)
    with plain_forms() if form == FORMS[1] else nullcontext():
        backends = {each.op: each.backend for each in report(config, arguments.device)}
        started = time.perf_counter()
        losses = train(config, text, optim, arguments.device, bool(rounding), name_of(form, rounding), clock)
    return Run(losses, time.perf_counter() - started, backends)


def measure(arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    kinds = list(product(FORMS, ROUNDINGS))
    names = [name_of(*kind) for kind in kinds]
    with ProcessPoolExecutor(arguments.together, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(run, *kind, arguments, clock) for kind in kinds]
        runs = dict(zip(names, (each.result() for each in waiting), strict=True))
    assert "triton" not in runs[FORMS[1]].backends.values(), runs[FORMS[1]].backends
    told = ("preset", "experts", "layers", "steps", "sequences", "length", "rule", "lr")
    settings = {n: getattr(arguments, n) for n in told}
    done = {name: len(each.losses) for name, each in runs.items()}
    curves = to_the_shortest({name: each.losses for name, each in runs.items()})
    finished, found = min(done.values()) == arguments.steps, compared(curves)
    return {
        "settings": settings,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device,
        "torch": torch.__version__,
        "backends": {form: runs[form].backends for form in FORMS},
        "seconds": {name: each.seconds for name, each in runs.items()},
        "finished": finished,
        "steps_done": done,
        "curves": curves,
        **found,
        "passed": finished and found["passed"],
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['device']}, torch {result['torch']}, {result['settings']}")
    if not result["finished"]:
        print(f"  UNFINISHED, compared as far as all came: steps done {result['steps_done']}")
    if "last" not in result:
        print(f"  fewer than {2 * SMOOTH} steps: nothing to compare")
        return
    for name, loss in result["last"].items():
        print(f"  {name:26} last {LAST} steps {loss:.4f}, {result['seconds'][name]:.1f} s")
    for form, value in result["within"].items():
        print(f"  {form:8} two roundings apart by {value:.5f}")
    plain = [op for op, backend in result["backends"][FORMS[0]].items() if backend != "triton"]
    print(f"  with kernels, not by them: {', '.join(plain) or 'nothing'}")
    print(f"  kernels and PyTorch apart by {result['mean_across']:.5f}, {result['ratio']:.2f} of the noise", end=" ")
    print(f"(at most {LIMIT}): {'passed' if result['passed'] else 'FAILED' if result['finished'] else 'UNFINISHED'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--experts", type=int, default=0, help="instead of the preset's; 0: those")
    parser.add_argument("--layers", type=int, default=0, help="the first ones of the preset; 0: all")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rule", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--together", type=int, default=4, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=0.0, help="after which no step begins; 0: no limit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--redraw", action="store_true", help="curve.png from the curve.json of FOLDER, nothing else")
    arguments, began = parser.parse_args(), time.time()
    if arguments.redraw:
        draw(json.loads((arguments.out / "curve.json").read_text())["curves"], arguments.out / "curve.png")
        return 0
    if arguments.tokens is None:
        parser.error("--tokens: which text?")
    result = measure(arguments, Clock(began, began + arguments.seconds if arguments.seconds else float("inf")))
    show(result)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "curve.json").write_text(json.dumps(result, indent=1))
    if find_spec("matplotlib") is None:
        print("matplotlib is not installed: no curve.png; --redraw makes it elsewhere")
    elif "last" in result:
        draw(result["curves"], arguments.out / "curve.png")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
