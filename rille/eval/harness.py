"""lm-evaluation-harness asks, a checkpoint answers (`answers.py`). Imported only where the library is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from rille.eval.answers import likelihoods, whole_text, write
from rille.eval.config import HarnessConfig
from rille.eval.opened import Opened, open_checkpoint
from rille.eval.result import Result, bar, show

BATCH_TOKENS = 4096


class HarnessModel(LM):
    """The harness's view of a checkpoint: its three kinds of request."""

    def __init__(self, opened: Opened, max_new_tokens: int):
        super().__init__()
        self.opened, self.max_new_tokens = opened, max_new_tokens

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        with bar("likelihoods", len(requests)) as tell:
            return likelihoods(self.opened, [request.args for request in requests], BATCH_TOKENS, tell)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        return [whole_text(self.opened, request.args[0], BATCH_TOKENS) for request in requests]

    def generate_until(self, requests: list[Any]) -> list[str]:
        written = []
        with bar("answers", len(requests)) as tell:
            for request in requests:
                context, asked = request.args
                written.append(write(self.opened, context, asked, self.max_new_tokens))
                tell(1)
        return written


def harness(config: HarnessConfig) -> list[dict]:
    """Ask, show, and give the rows: one for each task and measure. Raises ValueError for tasks that are not known."""
    if config.include is not None and not Path(config.include).is_dir():
        raise ValueError(f"include is {config.include}, which is no folder; name one with task descriptions")
    manager = TaskManager(include_path=config.include)
    if unknown := [name for name in config.tasks if name not in manager.all_tasks]:
        raise ValueError(f"the harness knows no task {', '.join(unknown)}; `lm_eval ls tasks` lists them")
    opened = open_checkpoint(config)
    found = simple_evaluate(
        model=HarnessModel(opened, config.max_new_tokens),
        tasks=list(config.tasks),
        num_fewshot=config.shots,
        limit=config.limit,
        task_manager=manager,
        log_samples=False,
    )
    rows = [row for task, values in found["results"].items() for row in measures(task, values)]
    if not rows:
        raise ValueError(f"the harness measured nothing in {', '.join(config.tasks)}")
    show(Result("harness", f"lm-evaluation-harness, {opened.place}", config, rows), config.out)
    return rows


def measures(task: str, values: dict[str, Any]) -> list[dict]:
    """The harness's "acc,none" and "acc_stderr,none" as rows; what is no number is no measure."""
    rows = []
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if not kind or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{name}_stderr,{kind}")
        error = float(error) if isinstance(error, int | float) else None
        shown = name if kind == "none" else f"{name}, {kind}"
        rows.append({"task": task, "measure": shown, "value": float(value), "standard error": error})
    return rows
