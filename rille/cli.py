"""`rille VERB ...`: one verb a function. Only the chosen verb's arguments are parsed, and its work is imported when it
runs.

Flags are made from frozen dataclasses, never written by hand. Exit codes: 0; 2 for what the user can mend (one message
that says how); 1 for faults of the machine (full disk, no permission) and numbers that are not finite; 128 + signal for
a run that was stopped: 130 for Ctrl-C, 143 for SIGTERM, 141 where the reader of a pipe went away.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from rille.flags import Arguments, check_text, in_one_line, parse, run_verb_of
from rille.interrupts import loading
from rille.misspelt import suggestion

if TYPE_CHECKING:
    from rille.model.config import K3Config

# Turns that a thread of torch waits awake for the others; read when torch is loaded. The library's 300,000 train `tiny`
# 8 % faster on an idle machine, but up to ten times slower where other programs hold the cores.
SPIN = "1000"

NO_ROOM = ". Make room on that disk"
NO_RIGHT = ". Name a directory that you may write to"
HINTS: dict[int | None, str] = {
    errno.ENOSPC: NO_ROOM,
    errno.EDQUOT: NO_ROOM,
    errno.EFBIG: NO_ROOM,
    errno.EACCES: NO_RIGHT,
    errno.EPERM: NO_RIGHT,
    errno.EROFS: NO_RIGHT,
}
UNSEEN = dict.fromkeys([*range(32), *range(127, 160)], "\ufffd")  # what others write may not steer the terminal


def main(arguments: Arguments | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print("\nrille: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; the flush at exit must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        return complain(error, 2)
    except (OSError, ArithmeticError, MemoryError) as error:
        return complain(error, 1)
    except RuntimeError as error:  # torch's kind for memory that is not there
        if (short := memory_is_short(error)) is None:
            raise
        return complain(short, 1)


def memory_is_short(error: RuntimeError) -> MemoryError | None:
    asked = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
    if asked:
        return MemoryError(f"this machine has no {int(asked[1]):,} bytes of memory left. Ask for less")
    return MemoryError(f"{error}") if type(error).__name__ == "OutOfMemoryError" else None


def run(arguments: Arguments) -> int:
    check_text(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    verb, *rest = arguments
    if verb == "--version":
        from rille import __version__

        print(f"rille {__version__}")
        return 0
    if verb not in VERBS:
        raise ValueError(f"unknown verb {verb!r}{suggestion(verb, VERBS)} `rille --help` lists all")
    return VERBS[verb].run(rest)


def complain(error: Exception, code: int) -> int:
    """One line on standard error, without the system's number of an error: what, what to do, and the error's notes."""
    hint = HINTS.get(getattr(error, "errno", None), "")
    notes = "".join(f". {note}" for note in getattr(error, "__notes__", ()))
    text = re.sub(r"^\[Errno -?\d+\] ", "", " ".join(str(error).split())).translate(UNSEEN)
    print(f"rille: {text or type(error).__name__}{hint}{notes}", file=sys.stderr)
    return code


def overview() -> str:
    verbs = "\n".join(f"  {name:<10}{verb.line}" for name, verb in VERBS.items())
    return f"""Rille: Kimi K3 as one package.

usage: rille VERB ...        `rille VERB --help` explains one

{verbs}

examples
  rille train tiny --out runs/first --steps 200
  rille report runs/first
  rille generate runs/first --prompt "def "
  rille chat runs/first
  rille serve runs/first
  rille bench serve http://127.0.0.1:8000
  rille convert runs/first first-mxfp4 --experts mxfp4
  rille data --help
  rille eval held-out runs/first
  rille study quantile-balancing --steps 20
  rille plan k3 --context 1048576
  rille doctor --preset k3"""


# --- verbs ------------------------------------------------------------------------------------------------------------


def train(arguments: Arguments) -> int:
    """`rille train RECIPE [flags]`"""
    from tyro.extras import overridable_config_cli

    from rille.recipes.pretrain import RECIPES

    if not arguments or arguments[0] in ("-h", "--help"):
        print(train_overview())
        return 0 if arguments else 2
    name = arguments[0]
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}{suggestion(name, RECIPES)} the recipes are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    with in_one_line(f"rille train {name}"):
        config = overridable_config_cli({name: (recipe.__doc__ or "", recipe())}, args=arguments, prog="rille train")

    with loading():
        from rille.train.pretrain import pretrain
        from rille.train.stopping import Interrupted

    try:
        pretrain(config)
    except Interrupted as stopped:
        resume = [word for word in arguments if word not in ("--resume", "--no-resume")] + ["--resume"]
        print(f"\nrille: {stopped}. To go on: {shlex.join(['rille', 'train', *resume])}", file=sys.stderr)
        return stopped.exit_code
    return 0


def train_overview() -> str:
    from rille.recipes.pretrain import RECIPES

    recipes = "\n".join(f"  {name:<12}{recipe.__doc__}" for name, recipe in RECIPES.items())
    return f"""Train a model from scratch and save it in the official checkpoint format.

usage: rille train RECIPE [flags]        `rille train RECIPE --help` lists all flags with their defaults

recipes
{recipes}

examples
  rille train tiny                                        on the standard library of the running Python
  rille train tiny --data notes/ --out runs/notes         on a text file, a folder, .jsonl[.gz|.xz|.zst] or .parquet
  rille train tiny --steps 1000 --optim.lr 3e-3 --out runs/long
  rille train tiny --steps 1000 --optim.lr 3e-3 --out runs/long --resume
  rille train nano --data sets/mixed --max-minutes 50     on a GPU, stopping in time for the end of a reservation"""


def generate(arguments: Arguments) -> int:
    """`rille generate CHECKPOINT --prompt TEXT`"""
    from rille.serve.config import GenerateConfig

    config = parse(GenerateConfig, arguments, "generate")

    with loading():
        from rille.serve.generate import continue_text

    continue_text(config)
    return 0


def chat(arguments: Arguments) -> int:
    """`rille chat CHECKPOINT`"""
    from rille.serve.config import ChatConfig

    config = parse(ChatConfig, arguments, "chat")

    with loading():
        from rille.serve.terminal import chat

    chat(config)
    return 0


def serve(arguments: Arguments) -> int:
    """`rille serve CHECKPOINT`"""
    from rille.serve.config import ServeConfig

    config = parse(ServeConfig, arguments, "serve")
    need("rille serve", "serve", "fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance")

    with loading():
        from rille.serve.resident import keep_few_kernels

        keep_few_kernels()
        from rille.serve.server import serve

    serve(config)
    return 0


BENCH = """Put a load on a server and measure it: latencies, throughput, cache hits.

usage: rille bench serve URL [flags]        `rille bench serve --help` lists all flags with their defaults

examples
  rille bench serve http://127.0.0.1:8000
  rille bench serve http://127.0.0.1:8000 --sessions 64 --concurrency 16 --out runs/bench
  rille bench serve http://127.0.0.1:8000 --sessions 4 --turns 2 --prefix 64 --output 8 --ratio 12     a small model
  rille bench serve http://127.0.0.1:8000 --mode open --rate 0.5"""


def bench(arguments: Arguments) -> int:
    """`rille bench serve URL`"""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(BENCH)
        return 0 if arguments else 2
    if arguments[0] != "serve":
        raise ValueError(f"unknown verb 'bench {arguments[0]}'; there is `rille bench serve URL`")
    from rille.serve.config import BenchServeConfig

    config = parse(BenchServeConfig, arguments[1:], "bench serve")

    from rille.serve.load import bench

    bench(config)
    return 0


def need(what: str, extra: str, *modules: str) -> None:
    """Raise ValueError where an extra of the package is not installed."""
    from importlib.util import find_spec

    if missing := [name for name in modules if find_spec(name) is None]:
        raise ValueError(f"{what} needs {', '.join(missing)}, not installed here: pip install 'rille[{extra}]'")


def convert(arguments: Arguments) -> int:
    """`rille convert SRC DST`"""
    from rille.model.convert import ConvertConfig, convert

    print(convert(parse(ConvertConfig, arguments, "convert")))
    return 0


def data(arguments: Arguments) -> int:
    """`rille data VERB ...`"""
    from rille.data import commands

    return run_verb_of("data", commands.VERBS, commands.overview, arguments)


def evaluate(arguments: Arguments) -> int:
    """`rille eval VERB ...`"""
    from rille.eval import commands

    return run_verb_of("eval", commands.VERBS, commands.overview, arguments)


def study(arguments: Arguments) -> int:
    """`rille study NAME [flags]`"""
    from tyro.extras import overridable_config_cli

    from rille.recipes.study import STUDIES, overview

    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0 if arguments else 2
    name = arguments[0]
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}{suggestion(name, STUDIES)} the studies are {', '.join(STUDIES)}")
    asked = STUDIES[name]()
    with in_one_line(f"rille study {name}"):
        config = overridable_config_cli({name: (asked.line, asked.config)}, args=arguments, prog="rille study")

    with loading():
        from rille.eval.study import run_study

    run_study(asked, config)
    return 0


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Say on paper what a model needs: parameters, FLOPs a token, memory."""

    model: Annotated[Positional[str], arg(metavar="PRESET|CHECKPOINT")]
    """A preset (tiny, nano, nano-160k, mini, kimi-linear-48b, k3) or a checkpoint directory."""

    context: tuple[int, ...] = (4096, 32768, 131072, 1048576)
    """Tokens of a sequence; one column for each."""

    gpus: int = 1
    """Share weights and training state among so many GPUs."""

    groups: bool = False
    """Show instead which parameters `optim.rule muon` updates in which way."""

    def __post_init__(self):
        if self.gpus < 1 or not self.context or min(self.context) < 1:
            raise ValueError(f"gpus is {self.gpus} and context {self.context}; both must be at least 1")


def report(arguments: Arguments) -> int:
    """`rille report RUN`"""
    from rille.train.report import ReportConfig, report

    print(report(parse(ReportConfig, arguments, "report")))
    return 0


def plan(arguments: Arguments) -> int:
    """`rille plan PRESET`"""
    config = parse(PlanConfig, arguments, "plan")
    if config.groups:
        from rille.train.roles import groups_table

        print(groups_table(config.model, model_config(config.model)))
        return 0

    from rille.model.plan_table import plan_table

    print(plan_table(config.model, model_config(config.model), config.context, config.gpus))
    return 0


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Say what is installed, what this machine has, and which backend each operation takes here and why."""

    preset: Annotated[str, arg(metavar="PRESET|CHECKPOINT")] = "nano"
    """The model whose operations are asked about: a preset or a checkpoint directory."""


def doctor(arguments: Arguments) -> int:
    """`rille doctor`"""
    config = parse(DoctorConfig, arguments or ["--preset", DoctorConfig.preset], "doctor")

    from rille.doctor import doctor

    for line in doctor(model_config(config.preset), config.preset):
        print(line)
    return 0


def model_config(name: str) -> K3Config:
    """The config of a preset or of a checkpoint."""
    from rille.model.config import K3Config
    from rille.model.locate import find_checkpoint
    from rille.model.presets import PRESETS

    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).exists():
        near = suggestion(name, PRESETS)
        raise ValueError(f"{name!r} is neither a preset nor a directory{near} the presets are {', '.join(PRESETS)}")
    return K3Config.load(find_checkpoint(name))


@dataclass(frozen=True)
class Verb:
    run: Callable[[Arguments], int]
    line: str


VERBS = {
    "train": Verb(train, "train a model from scratch on text (a recipe and its flags)"),
    "generate": Verb(generate, "continue a prompt with a checkpoint"),
    "chat": Verb(chat, "talk with a checkpoint or a server in the terminal: thinking, tools, pictures"),
    "serve": Verb(serve, "serve a checkpoint over HTTP: OpenAI's and Anthropic's APIs, metrics, a page"),
    "bench": Verb(bench, "put a load on a server: latencies, throughput, cache hits"),
    "convert": Verb(convert, "write a checkpoint anew: bf16, fp32, MXFP4 experts"),
    "data": Verb(data, "make a training set: filters, duplicates, mixture, rephrasing, long documents"),
    "eval": Verb(evaluate, "measure a checkpoint: bits per byte, recall, needles, length, question suites"),
    "study": Verb(study, "variants side by side over random seeds, with intervals and a plot"),
    "report": Verb(report, "draw a training run into one HTML page with plots"),
    "plan": Verb(plan, "what a model needs: parameters, FLOPs, memory"),
    "doctor": Verb(doctor, "what is installed here, and which backend each operation takes and why"),
}


if __name__ == "__main__":
    sys.exit(main())
