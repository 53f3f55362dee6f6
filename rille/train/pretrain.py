"""Pretraining from set-up to summary.

    out/run.json         the settings            out/metrics.jsonl, out/tensorboard/    the numbers of each step
    out/corpus/          the text as tokens      out/checkpoints/step-000200/           what a resume continues
    out/model/           the finished model in the official layout, with its tokenizer

The loop itself is `loop.train`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

from rille.data.corpus import Corpus, bits_per_byte, prepare_corpus, unigram_nats
from rille.data.loader import Batch, Loader, held_out_batches
from rille.model.checkpoint import save_model
from rille.model.locate import step_checkpoints
from rille.model.model import K3, new_model
from rille.model.names import count_parameters
from rille.model.publish import write_whole
from rille.optim.groups import Named
from rille.optim.rules import optimizer
from rille.train.checkpoint import read_numbers, remove_unfinished, restore
from rille.train.config import TrainConfig, check_resumable, settings
from rille.train.loop import Run, train
from rille.train.losses import mean_loss
from rille.train.metrics import METRICS, open_loggers, read_metrics
from rille.train.roles import parameter_roles
from rille.train.stopping import stop_on_signals

SETTINGS, CORPUS, MODEL = "run.json", "corpus", "model"


def pretrain(config: TrainConfig) -> Path:
    """Train, save the finished model and print what came of it; returns the model's directory.

    Raises ValueError for settings or text that cannot be used and for a directory that holds another run, Interrupted
    after a signal (saved), Diverged for numbers that are not finite, OSError where the machine fails.
    """
    out = Path(config.out)
    newest = claim_directory(config, out)
    corpus = read_text(config, out)
    run = set_up(config, corpus)
    if newest is not None:
        restore(run, newest)
        print(f"resuming after step {run.step} of {config.steps}: {newest}")
    write_settings(config, out)
    with ExitStack() as stack:
        run.stop = stack.enter_context(stop_on_signals())
        run.loggers = open_loggers(out, run.step, config.steps, stack)
        train(run)
        save_model(run.model, out / MODEL, tokenizer=run.tokenizer)
    print(summary(run, corpus))
    return out / MODEL


def claim_directory(config: TrainConfig, out: Path) -> Path | None:
    """The checkpoint to continue from, None to start at step 0.

    Raises ValueError for a directory that holds a run without `resume`, for `resume` where there is none, and for a run
    with other settings, before any work is done.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a directory for the run")
    holds_run = (out / SETTINGS).exists()
    if not config.resume:
        if holds_run:
            raise ValueError(f"{out} holds a run already: add --resume to continue it, or give another --out")
        out.mkdir(parents=True, exist_ok=True)
        return None
    if not holds_run:
        raise ValueError(f"{out} holds no run to resume; leave --resume out to start one")
    remove_unfinished(out)
    checkpoints = step_checkpoints(out)
    if not checkpoints:
        print(f"{out} holds no whole checkpoint yet: starting at step 0")
        check_resumable(json.loads((out / SETTINGS).read_text(encoding="utf-8")), settings(config), str(out))
        return None
    step, newest = checkpoints[-1]
    check_resumable(read_numbers(newest)["settings"], settings(config), str(newest))
    if step > config.steps:
        raise ValueError(f"{newest} is beyond the {config.steps} steps asked for; give --steps {step} or more")
    return newest


def read_text(config: TrainConfig, out: Path) -> Corpus:
    """The run's text as tokens. Where it cannot be read, a directory that was made for the run goes again."""
    try:
        return prepare_corpus(config.data, out / CORPUS)
    except ValueError:
        if not any(out.iterdir()):
            out.rmdir()
        raise


def write_settings(config: TrainConfig, out: Path) -> None:
    write_whole(out / SETTINGS, json.dumps(settings(config), indent=1))


def set_up(config: TrainConfig, corpus: Corpus) -> Run:
    """A run at step 0: model, optimiser and the way through the text."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA device that torch can use; give --device cpu")
    eos = corpus.tokenizer.eos_id
    model = new_model(config.model.replace(bos_id=eos, eos_id=eos), device=config.device, seed=config.seed)
    data = config.data
    loader = Loader(corpus.train.tokens, corpus.train.boundaries, data.batch_tokens, data.sequence_length, data.seed)
    follow = optimizer(named_parameters(model), config.optim)
    size = count_parameters(config.model)
    print(f"model: {size.total:,} parameters, {size.active:,} active")
    return Run(config, model, follow, loader, held_out_measure(config, corpus), corpus.tokenizer)


def named_parameters(model: K3) -> list[Named]:
    """The model's parameters with what the table says of them: how the optimiser learns what each one is."""
    roles = {role.name: role for role in parameter_roles(model.config)}
    return [Named(name, p, roles[name].kind, roles[name].blocks) for name, p in model.named_parameters()]


def held_out_measure(config: TrainConfig, corpus: Corpus) -> Callable[[], list[Batch]]:
    """Gives the batches of a held-out measurement, the same ones each time."""
    held, data = corpus.held_out.head(config.eval_tokens), config.data
    return lambda: list(held_out_batches(held.tokens, held.boundaries, data.batch_tokens, data.sequence_length))


def summary(run: Run, corpus: Corpus) -> str:
    """The end of a run for people: losses, the unigram model's on the same text, where things are, what to try next."""
    out = Path(run.config.out)
    held, loss = corpus.held_out.head(run.config.eval_tokens), mean_loss(run.model, run.held_out())
    unigram, bits = unigram_nats(corpus.train, held), bits_per_byte(loss, held.bytes_per_token)
    gap = f"{abs(unigram - loss):.3f} nats a token {'below' if loss < unigram else 'above'}"
    return f"""
{progress(read_metrics(out / METRICS))}
held out    {loss:.3f} nats a token, {bits:.3f} bits a byte
unigram     {unigram:.3f} from token frequencies alone: the model is {gap}
checkpoint  {out / MODEL} (official layout)

try next
  rille generate {shlex.quote(str(out))} --prompt "def "
  tensorboard --logdir {shlex.quote(str(out / "tensorboard"))}"""


def progress(rows: list[dict]) -> str:
    """First and last loss, and the speed."""
    if not rows:
        return f"loss        not known: {METRICS} has no rows"
    first, last, speed = rows[0], rows[-1], median(row["tokens_per_second"] for row in rows)
    return (
        f"loss        {first['loss']:.3f} at step {first['step']}, {last['loss']:.3f} at step {last['step']} "
        f"(nats a token); {speed:,.0f} tokens/s"
    )
