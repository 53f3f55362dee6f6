"""What became of the text, for people: tables in the terminal, one HTML page, and the same as JSON.

Every record that was read stands in exactly one line: records = kept + equal + near + the drops by reason. Kept
documents are trained on or held out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

REPORT, PAGE = "report.json", "report.html"
PARTS = ("domains", "near_pairs", "similarity", "streams", "held_out", "mixture")
Cells = list[tuple[str, ...]]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: .6rem 0; } th { text-align: left; font-weight: 600; color: #555; }
td, th { padding: .2rem .9rem .2rem 0; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: #5b7fa6; height: .8rem; display: inline-block; vertical-align: middle; }
pre { background: #f5f5f3; padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
small { color: #777; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
@media (prefers-color-scheme: dark) { body { background: #191919; color: #ddd; } pre { background: #262626; } }
"""


def write_report(directory: Path, facts: dict[str, Any]) -> None:
    """Write report.json and report.html into a folder. facts: what build.py gathered."""
    (directory / REPORT).write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
    (directory / PAGE).write_text(page(facts), encoding="utf-8")


def read_report(directory: str | Path) -> dict[str, Any]:
    """The facts of a built set. Raises ValueError where there is no report, or a damaged one."""
    file = Path(directory) / REPORT
    if not file.is_file():
        raise ValueError(f"{directory} holds no {REPORT}; give a folder that rille data build made")
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); build the set again") from None
    if missing := [part for part in PARTS if not isinstance(facts, dict) or part not in facts]:
        raise ValueError(f"{file} is damaged (it lacks {', '.join(missing)}); build the set again")
    return facts


def print_report(facts: dict[str, Any], console: Console) -> None:
    """The tables and a few examples, in the terminal."""
    console.print(Group(*_renderables(facts)))


def overview(facts: dict[str, Any]) -> Cells:
    """A line a domain: what went in, what went, what stays."""
    rows: Cells = [("domain", "records", "dropped", "equal", "near", "held out", "trained on", "MB of text")]
    for name, tally in facts["domains"].items():
        dropped = sum(tally["dropped"].values())
        trained = tally["documents"] - tally["equal"] - tally["near"] - tally["held_out"]
        numbers = (tally["records"], dropped, tally["equal"], tally["near"], tally["held_out"], trained)
        rows.append((name, *(f"{number:,}" for number in numbers), f"{_trained_bytes(facts, name) / 1e6:,.2f}"))
    return rows


def drops(facts: dict[str, Any]) -> Cells:
    """A line a reason and domain, the commonest first."""
    rows: Cells = [("domain", "reason", "records", "share", "MB")]
    for name, tally in facts["domains"].items():
        for reason, count in sorted(tally["dropped"].items(), key=lambda item: (-item[1], item[0])):
            size = tally["dropped_bytes"].get(reason, 0) / 1e6
            rows.append((name, reason, f"{count:,}", f"{count / max(1, tally['records']):.1%}", f"{size:,.2f}"))
    return rows


def changes(facts: dict[str, Any]) -> Cells:
    """A line a change of form that cleaning made."""
    rows: Cells = [("domain", "cleaned", "documents")]
    for name, tally in facts["domains"].items():
        rows += [(name, change, f"{count:,}") for change, count in sorted(tally["changed"].items())]
    return rows


def streams(facts: dict[str, Any]) -> Cells:
    """A line a stream: what training reads."""
    rows: Cells = [("domain", "documents", "count", "tokens", "bytes a token", "shards")]
    for stream in facts["streams"]:
        kind = "long" if stream["long"] else "short"
        numbers = (f"{stream['documents']:,}", f"{stream['targets']:,}")
        rows.append(
            (
                stream["domain"],
                kind,
                *numbers,
                f"{stream['text_bytes'] / stream['targets']:.2f}",
                f"{len(stream['shards']):,}",
            )
        )
    held = facts["held_out"]
    ratio = f"{held['text_bytes'] / held['targets']:.2f}"
    rows.append(("held out", "all", f"{held['documents']:,}", f"{held['targets']:,}", ratio, "1"))
    return rows


def _trained_bytes(facts: dict[str, Any], name: str) -> int:
    return sum(stream["text_bytes"] for stream in facts["streams"] if stream["domain"] == name)


def _tables(facts: dict[str, Any]) -> Iterator[tuple[str, Cells]]:
    yield "What became of the records", overview(facts)
    yield "Dropped, by reason", drops(facts)
    yield "Changed in form", changes(facts)
    yield "What training reads", streams(facts)


def _renderables(facts: dict[str, Any]) -> Iterator[RenderableType]:
    for title, rows in _tables(facts):
        if len(rows) == 1:
            yield f"\n{title}: nothing"
            continue
        table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
        for index, head in enumerate(rows[0]):
            table.add_column(head, justify="right" if _numeric(rows, index) else "left")
        for row in rows[1:]:
            table.add_row(*row)
        yield table
    if facts["near_pairs"]:
        yield f"\n{len(facts['near_pairs'])} pairs of near-duplicates, and examples of what was dropped: {PAGE}"


def _numeric(rows: Cells, index: int) -> bool:
    return all(row[index].replace(",", "").replace(".", "").rstrip("%").isdigit() for row in rows[1:])


def page(facts: dict[str, Any]) -> str:
    """The HTML page, whole in one file."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>Training set</title>"]
    parts.append(f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><h1>Training set</h1>")
    for title, rows in _tables(facts):
        parts.append(f"<h2>{title}</h2>{_html_table(rows) if len(rows) > 1 else '<p>nothing</p>'}")
    parts.append(f"<h2>Tokens by domain</h2>{_bars(facts)}")
    if facts["near_pairs"]:
        parts.append(f"<h2>Near-duplicates (similarity {facts['similarity']} or more)</h2>")
        for similarity, kept, dropped in facts["near_pairs"]:
            texts = "".join(
                f"<div><small>{what}</small>{_pre(text)}</div>" for what, text in (("kept", kept), ("dropped", dropped))
            )
            parts.append(f"<small>estimated at {similarity:.2f}</small><div class=pair>{texts}</div>")
    for name, tally in facts["domains"].items():
        parts.append(f"<h2>Examples: {escape(name)}</h2><h3>kept</h3>")
        parts += [f"<small>{escape(source)}</small>{_pre(text)}" for _, source, text in tally["kept_samples"]]
        for reason, samples in tally["dropped_samples"].items():
            parts.append(f"<h3>dropped: {escape(reason)}</h3>")
            parts += [f"<small>{escape(source)}</small>{_pre(text)}" for _, source, text in samples]
    return "\n".join([*parts, "</html>\n"])


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _html_table(rows: Cells) -> str:
    numeric = [_numeric(rows, index) for index in range(len(rows[0]))]
    lines = [
        "".join(f"<{tag}{' class=n' if n else ''}>{escape(cell)}</{tag}>" for cell, n in zip(row, numeric, strict=True))
        for tag, row in zip(["th"] + ["td"] * (len(rows) - 1), rows, strict=True)
    ]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _bars(facts: dict[str, Any]) -> str:
    total = sum(stream["targets"] for stream in facts["streams"])
    lines = []
    for stream in facts["streams"]:
        share = stream["targets"] / total
        label = escape(stream["domain"] + (" (long)" if stream["long"] else ""))
        bar = f"<span class=bar style='width:{share * 24:.2f}rem'></span>"
        lines.append(f"<tr><td>{label}</td><td class=n>{share:.1%}</td><td>{bar}</td></tr>")
    return f"<table>{''.join(lines)}</table>"
