"""What is read off the runs of a study, and what the comparison says. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from rille.eval.intervals import UNDECIDED, Interval, mean_interval
from rille.eval.study_config import Curve, Reading, Study

Row = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """One run: its rows of metrics.jsonl."""

    variant: str
    seed: int
    rows: list[Row]


def value_of(row: Row, metric: str, fold: str = "sum") -> float | None:
    """A metric of a row, or all that begin with it folded; None where the row has none."""
    if not metric.endswith("/"):
        return row.get(metric)
    parts = [value for name, value in row.items() if name.startswith(metric)]
    return None if not parts else max(parts) if fold == "max" else sum(parts)


def read(rows: Sequence[Row], reading: Reading) -> float:
    """The number that a reading asks of a run. Raises ValueError where no row has it."""
    pairs = [(row["step"], value_of(row, reading.metric, reading.fold)) for row in rows]
    known = [(step, value) for step, value in pairs if value is not None]
    if not known:
        raise ValueError(f"the runs have no {reading.metric}; was the model changed to one without it?")
    if reading.over == "end":
        return known[-1][1]
    first = 0 if reading.over == "run" else pairs[-1][0] * 3 // 4
    return fmean(value for step, value in known if step > first)


def points(rows: Sequence[Row], curve: Curve) -> tuple[list[Any], list[float]]:
    """x and y of one line of a panel: steps, or names of parts, and values."""
    if curve.along == "step":
        pairs = [(row["step"], value_of(row, curve.metric)) for row in rows]
        known = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in known], [value for _, value in known]
    last = [row for row in rows if any(name.startswith(curve.metric) for name in row)][-1]
    parts = {name.removeprefix(curve.metric): value for name, value in last.items() if name.startswith(curve.metric)}
    return list(parts), list(parts.values())


def compare(study: Study, runs: Sequence[Finished]) -> list[dict[str, Any]]:
    """For each reading and variant: every seed's number, mean and interval, and the difference from the first variant
    seed by seed. Variants that were not run are left out."""
    rows = []
    names = [name for name in study.variants if any(run.variant == name for run in runs)]
    for reading in study.readings:
        by = {name: {run.seed: read(run.rows, reading) for run in runs if run.variant == name} for name in names}
        for name in names:
            same = [by[name][seed] - by[names[0]][seed] for seed in by[name]]
            difference = None if name == names[0] else mean_interval(same)
            row = {"reading": reading.name, "variant": name, "by_seed": by[name]}
            rows.append(row | {"mean": mean_interval(list(by[name].values())), "difference": difference})
    return rows


def comparison_table(study: Study, rows: Sequence[dict[str, Any]]) -> Table:
    """The comparison for people."""
    first, last = rows[0]["variant"], rows[-1]["variant"]
    seeds = len(rows[0]["by_seed"])
    caption = f"means of {seeds} seeds ± half of the 95 % interval (Student's t); * the interval leaves 0 out"
    table = Table(title=study.line, caption=caption)
    table.add_column("reading", max_width=24)
    for name in ("variant", "mean", f"minus {first}, by seed"):
        table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    for row in rows:
        shown, difference = row["reading"] if row["variant"] == first else "", row["difference"]
        minus = "" if difference is None else f"{difference} {' ' if difference.side == UNDECIDED else '*'}"
        table.add_row(shown, row["variant"], str(row["mean"]), minus, end_section=row["variant"] == last)
    return table


def as_json(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The comparison as JSON can hold it."""
    plain = lambda value: asdict(value) if isinstance(value, Interval) else value  # noqa: E731
    return [{key: plain(value) for key, value in row.items()} for row in rows]
