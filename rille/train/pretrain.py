"""Pretraining from set-up to summary.

    out/run.json         the settings            out/metrics.jsonl, out/tensorboard/    the numbers of each step
    out/inspections.jsonl                        a look inside the model now and then (`inspection.py`)
    out/corpus/          the text as tokens      out/checkpoints/step-000200/           what a resume continues
    out/model/           the finished model in the official layout, with its tokenizer
    out/model-ema/       the same with the running mean of the weights, where there is one
    out/.lock            who writes there (`folder.py`)

The loop itself is `loop.train`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic

import torch

from rille.data.built import open_built
from rille.data.corpus import Corpus, bits_per_byte, prepare_corpus, unigram_nats
from rille.data.dataset import is_dataset
from rille.data.loader import Batch, Loader, held_out_batches
from rille.data.mixed_loader import MixedLoader
from rille.model.checkpoint import save_model
from rille.model.model import K3, new_model
from rille.model.names import count_parameters
from rille.optim.groups import Named
from rille.optim.kinds import Kind
from rille.optim.rules import optimizer
from rille.train.averaging import Average
from rille.train.checkpoint import restore, weights
from rille.train.config import TrainConfig
from rille.train.curriculum import Curriculum, Stage
from rille.train.folder import sole_run, starting_point, write_settings
from rille.train.guard import Guard
from rille.train.inspection import INSPECTIONS, Inspections
from rille.train.loop import train
from rille.train.losses import mean_loss
from rille.train.metrics import METRICS, open_loggers, read_metrics
from rille.train.recompute import recompute_layers
from rille.train.roles import parameter_roles
from rille.train.run import Run
from rille.train.stopping import stop_on_signals

CORPUS, MODEL, AVERAGE = "corpus", "model", "model-ema"


def pretrain(config: TrainConfig) -> Path:
    """Train, save the finished model and print what came of it; returns the model's directory.

    Raises ValueError for settings or text that cannot be used and for a directory that holds another run or is held by
    one, Interrupted after a signal (saved), Diverged for numbers that are not finite, OSError where the machine fails.
    """
    out = Path(config.out)
    with sole_run(out):
        newest = starting_point(config, out)
        check_device(config)
        built = is_dataset(config.data.path)
        corpus = open_built(config.data) if built else prepare_corpus(config.data, out / CORPUS)
        run = set_up(config, corpus)
        if newest is not None:
            restore(run, newest)
            print(f"resuming after step {run.step} of {config.steps}: {newest}")
        write_settings(config, out)
        with advising(), ExitStack() as stack:
            stack.enter_context(run.saver)
            run.stop = stack.enter_context(stop_on_signals())
            if config.max_minutes is not None:
                run.stop.deadline = monotonic() + 60 * config.max_minutes
            run.loggers = open_loggers(out, run.step, config.steps, stack)
            run.inspections = Inspections(out / INSPECTIONS, run.step)
            train(run)
            save_model(run.model, out / MODEL, tokenizer=run.tokenizer)
            if run.average is not None:
                with run.average.worn_by(run.model):
                    save_model(run.model, out / AVERAGE, tokenizer=run.tokenizer)
        print(summary(run, corpus))
    return out / MODEL


@contextmanager
def advising() -> Iterator[None]:
    """A fault of the machine, once there is a run in the directory, says how it goes on."""
    try:
        yield
    except OSError as error:
        error.add_note("The run goes on from its last checkpoint with --resume")
        raise


def check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA device that torch can use; give --device cpu")


def set_up(config: TrainConfig, corpus: Corpus) -> Run:
    """A run at step 0: model, optimiser and the way through the text."""
    torch.manual_seed(config.seed)  # whatever will draw from torch's own generator repeats, and its state is saved
    eos = corpus.tokenizer.eos_id
    sizes = config.model.replace(bos_id=eos, eos_id=eos)
    model = new_model(sizes, dtype=config.dtype, device=config.device, seed=config.seed)
    loader = Curriculum(config.all_stages, partial(stage_loader, corpus, config.data.seed))
    check_enough(loader, config.steps)
    follow = optimizer(named_parameters(model), config.optim)
    size = count_parameters(config.model)
    print(f"model: {size.total:,} parameters, {size.active:,} active")
    kinds: dict[str, Kind] = {role.name: role.kind for role in parameter_roles(model.config)}
    held_out = held_out_measure(config, corpus)
    run = Run(config, model, follow, loader, held_out, corpus.tokenizer, corpus.domains, kinds, Guard(config.guard))
    if config.recompute:
        recompute_layers(model)
    if config.ema is not None:
        run.average = Average(weights(run), config.ema)
    return run


def stage_loader(corpus: Corpus, seed: int, stage: Stage, number: int) -> Loader | MixedLoader:
    """The way through the text in one stage; each has its own order."""
    return corpus.train.loader(stage.batch_tokens, stage.sequence_length, seed + number, dict(stage.shares))


def check_enough(curriculum: Curriculum, steps: int) -> None:
    """Raise ValueError where a stage would come to the end of a text that may be read so often only."""
    ends = [*(stage.at for stage in curriculum.stages[1:]), steps]
    for stage, loader, end in zip(curriculum.stages, curriculum.loaders, ends, strict=True):
        most = loader.most_targets if isinstance(loader, MixedLoader) else None
        a_step = stage.accumulate * stage.batch_tokens
        if most is not None and (end - stage.at) * a_step > most:
            raise ValueError(
                f"steps {stage.at:,} to {end:,} read {(end - stage.at) * a_step:,} tokens, but max_epochs of the set "
                f"allows {most:,}, enough for {most // a_step:,} steps; train shorter, or build the set anew"
            )


def named_parameters(model: K3) -> list[Named]:
    """The model's parameters with what the table says of them: how the optimiser learns what each one is."""
    roles = {role.name: role for role in parameter_roles(model.config)}
    return [Named(name, p, roles[name].kind, roles[name].blocks) for name, p in model.named_parameters()]


def held_out_measure(config: TrainConfig, corpus: Corpus) -> Callable[[], list[Batch]]:
    """Gives the batches of a held-out measurement, the same ones each time."""
    held, data, domains = corpus.held_out.head(config.eval_tokens), config.data, corpus.held_out_domains
    sizes = data.batch_tokens, data.sequence_length
    return lambda: list(held_out_batches(held.tokens, held.boundaries, *sizes, domains))


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
  rille report {shlex.quote(str(out))}
  rille generate {shlex.quote(str(out))} --prompt "def "
  tensorboard --logdir {shlex.quote(str(out / "tensorboard"))}"""


def progress(rows: list[dict]) -> str:
    """First and last loss, and the speed."""
    rows = [row for row in rows if row["loss"] is not None]
    if not rows:
        return f"loss        not known: {METRICS} has no rows"
    first, last, speed = rows[0], rows[-1], median(row["tokens_per_second"] for row in rows)
    return (
        f"loss        {first['loss']:.3f} at step {first['step']}, {last['loss']:.3f} at step {last['step']} "
        f"(nats a token); {speed:,.0f} tokens/s"
    )
