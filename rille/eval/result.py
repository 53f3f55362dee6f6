"""Where the numbers of an evaluation go: a table on the terminal, JSON and a picture in a directory. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rille.eval.pictures import picture
from rille.model.publish import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Result:
    """What an evaluation found. name: of its files. rows: one dict each, all with the keys of the first.

    settings: the dataclass that asked. draw: a panel each. facts: what only the JSON has besides.
    """

    name: str
    title: str
    settings: Any
    rows: list[dict[str, Any]]
    draw: Sequence[Callable[[Axes], None]] = ()
    remarks: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def show(result: Result, out: str | None) -> None:
    """Print the table; write OUT/NAME.json and OUT/NAME.png where there is a directory."""
    console = Console()
    console.print(table(result))
    for remark in result.remarks:
        console.print(remark, highlight=False)
    if out is None:
        return
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    facts = {"name": result.name, "settings": asdict(result.settings), "rows": result.rows, "remarks": result.remarks}
    facts |= result.facts
    write_whole(directory / f"{result.name}.json", json.dumps(facts, indent=1, default=plain))
    if result.draw:
        picture(directory / f"{result.name}.png", result.draw, result.title)
    print(f"{directory / result.name}.json" + (f", {result.name}.png" if result.draw else ""))


def table(result: Result) -> Table:
    """The rows for people."""
    made = Table(title=result.title)
    for name, value in result.rows[0].items():
        made.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in result.rows:
        made.add_row(*map(shown, row.values()))
    return made


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """For JSON: dataclasses as dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} is no JSON")


@contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal; gives a function to call with what was done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.advance(task, done)
