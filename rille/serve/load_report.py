"""What a load came to: figures, a table, a picture. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rille.serve.config import BenchServeConfig

Json = dict[str, Any]

LEAST_DISTINCT = 0.2


@dataclass
class Sample:
    """One answered request. Times are seconds since the start of the run; left: by the client, in the middle; error:
    what went wrong instead."""

    session: int
    turn: int
    sent: float
    prompt: int
    possible: int
    first: float = 0.0
    last: float = 0.0
    tokens: tuple[int, ...] = ()
    cached: int = 0
    left: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float | None:
        return (self.last - self.first) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


def figures(samples: Sequence[Sample], seconds: float, config: BenchServeConfig) -> Json:
    """The figures of a run. Raises ValueError where nothing was answered, and for replies that go in circles: guesses
    come true there as nowhere else, so that times would say nothing."""
    answered = [sample for sample in samples if sample.error is None and not sample.left]
    if not answered:
        first = samples[0].error or "the client left it"
        raise ValueError(f"of {len(samples)} requests none was answered; the first: {first}")
    fresh = distinct([sample.tokens for sample in answered])
    if fresh < LEAST_DISTINCT and not config.allow_loops:
        raise ValueError(
            f"the replies go in circles: only {fresh:.0%} of their runs of 3 tokens are different ones, which flatters "
            "drafts. Take a trained checkpoint or a higher temperature, or give allow_loops"
        )
    prompt, written = (sum(map(count, answered)) for count in (lambda s: s.prompt, lambda s: len(s.tokens)))
    cached, possible = sum(s.cached for s in answered), sum(s.possible for s in answered)
    return {
        "requests": len(samples),
        "left": sum(sample.left for sample in samples),
        "failed": sum(sample.error is not None for sample in samples),
        "errors": sorted({sample.error for sample in samples if sample.error is not None})[:5],
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": written,
        "input_to_output": prompt / written,
        "requests_per_s": len(answered) / seconds,
        "output_tokens_per_s": written / seconds,
        "total_tokens_per_s": (prompt + written) / seconds,
        "hit_rate": cached / prompt,
        "possible_hit_rate": possible / prompt,
        "of_possible": cached / possible if possible else 1.0,
        "distinct": fresh,
        "ttft_s": spread([sample.ttft for sample in answered]),
        "tpot_s": spread([tpot for sample in answered if (tpot := sample.tpot) is not None]),
    }


def spread(values: Sequence[float]) -> Json:
    """Mean and percentiles; empty without values."""
    if not values:
        return {}
    percents = np.percentile(values, (50, 90, 99)).tolist()
    return {"mean": float(np.mean(values)), **dict(zip(("p50", "p90", "p99"), percents, strict=True))}


def distinct(replies: Sequence[Sequence[int]], length: int = 3) -> float:
    """Of all runs of so many tokens inside a reply the share that is different, 1 where there is none."""
    runs = [(i, *reply[at : at + length]) for i, reply in enumerate(replies) for at in range(len(reply) - length + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def table(summary: Json) -> str:
    """For people."""
    lines = [
        f"{summary['requests']:,} requests in {summary['seconds']:.1f} s, {summary['left']:,} left in the middle, "
        f"{summary['failed']} failed",
        f"tokens       {summary['prompt_tokens']:,} in, {summary['output_tokens']:,} out "
        f"({summary['input_to_output']:.0f}:1)",
        f"throughput   {summary['output_tokens_per_s']:,.1f} tokens/s out, {summary['total_tokens_per_s']:,.1f} in and "
        f"out, {summary['requests_per_s']:.2f} requests/s",
        f"cache        {summary['hit_rate']:.1%} of the prompts, {summary['possible_hit_rate']:.1%} was possible "
        f"({summary['of_possible']:.1%} of that)",
        "             mean       p50       p90       p99   (ms)",
    ]
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        values = "".join(f"{1000 * value:10.2f}" for value in summary[key].values())
        lines.append(f"{name:<7}{values or '  (no reply had two tokens)'}")
    return "\n".join([*lines, *_server(summary), *(f"error: {error}" for error in summary["errors"])])


def _server(summary: Json) -> list[str]:
    """What was seen of the server, where somebody looked."""
    lines = []
    if (server := summary.get("server")) is not None:
        memory = ", ".join(f"{name} {mib:,.0f}" for name, mib in server["memory_mib"].items())
        lines = [f"memory       {memory or 'not told'} (MiB); afterwards {server['pages_after']} pages held"]
    if "checked" in summary:
        lines.append(
            f"check        {summary['checked']} asked again alone, {summary['different']} answered differently"
        )
    return lines


def picture(samples: Sequence[Sample], seconds: float, path: Path) -> None:
    """Shares of requests by TTFT and TPOT, tokens a second and hit rate over time, as a PNG."""
    from matplotlib.figure import Figure

    whole = [sample for sample in samples if sample.error is None and not sample.left]
    answered = sorted(whole, key=lambda sample: sample.last)
    figure = Figure(figsize=(10, 6), layout="constrained")
    (ttft, tpot), (speed, cache) = figure.subplots(2, 2)
    for axes, name, values in (
        (ttft, "TTFT", [1000 * sample.ttft for sample in answered]),
        (tpot, "TPOT", [1000 * value for sample in answered if (value := sample.tpot) is not None]),
    ):
        axes.plot(sorted(values), np.linspace(0, 1, len(values)) if values else [])
        axes.set(title=name, xlabel="ms", ylabel="share of requests", ylim=(0, 1))
    ends = [sample.last for sample in answered]
    edges = np.linspace(0, max(seconds, 1e-9), 41)
    counts, _ = np.histogram(ends, edges, weights=[len(sample.tokens) for sample in answered])
    speed.stairs(counts / (edges[1] - edges[0]), edges)
    speed.set(title="Tokens written", xlabel="s (where a reply ends)", ylabel="a second")
    prompts = np.cumsum([sample.prompt for sample in answered])
    for name, values in (("hits", [s.cached for s in answered]), ("possible", [s.possible for s in answered])):
        cache.plot(ends, np.cumsum(values) / prompts, label=name)
    cache.set(title="Prompt tokens from the cache", xlabel="s", ylabel="share so far", ylim=(0, 1))
    cache.legend()
    figure.savefig(path, dpi=110)
