"""What `/metrics` shows: the engine's figures and the latencies seen from here, under vLLM's names. No torch here.

vLLM's names begin with `vllm:`; what it has no name for begins with `rille:`. Times are seconds, sizes tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from time import perf_counter
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rille.serve.counts import Counts
from rille.serve.schema import EngineStats, Finished, FinishReason, MissReason, ServingEngine, Usage
from rille.serve.schema import Histogram as Values

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LENGTHS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)

_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "prompt tokens that were computed"),
    "vllm:generation_tokens": ("generated_tokens", "tokens that were written"),
    "vllm:prefix_cache_queries": ("cache_queries", "prompt tokens that were looked up"),
    "vllm:prefix_cache_hits": ("cache_hits", "prompt tokens that were not computed"),
    "vllm:external_prefix_cache_queries": ("external_queries", "prompt tokens that were looked up in the outer tier"),
    "vllm:external_prefix_cache_hits": ("external_hits", "of the hits those that came from the outer tier"),
    "vllm:num_preemptions": ("preemptions", "sequences set aside for want of memory"),
    "vllm:spec_decode_num_drafts": ("drafts", "rows of guesses that were verified"),
    "vllm:spec_decode_num_draft_tokens": ("drafted", "tokens guessed"),
    "vllm:spec_decode_num_accepted_tokens": ("accepted", "tokens guessed that came true"),
    "rille:prefix_cache_latent_hits": ("latent_hits", "prompt tokens with latents there, usable or not"),
    "rille:requests_refused": ("refused", "requests that were not taken"),
    "rille:steps": ("steps", "steps of the engine"),
}
_GAUGES = {
    "vllm:num_requests_running": ("running", "sequences that run"),
    "vllm:num_requests_waiting": ("waiting", "sequences that wait"),
    "rille:pages_total": ("pages_total", "pages of the pool"),
    "rille:pages_used": ("pages_used", "pages that running sequences hold"),
    "rille:pages_cached": ("pages_cached", "pages that could be evicted"),
    "rille:checkpoints": ("checkpoints", "KDA states that can be resumed"),
    "rille:checkpoint_pages": ("checkpoint_pages", "pages that those states lie on"),
    "rille:batch_tokens": ("batch_tokens", "tokens of the last step"),
    "rille:draft_length": ("draft_length", "tokens guessed at once in the last step"),
    "rille:weights_version": ("version", "version of the weights"),
}
_HISTOGRAMS = {
    "vllm:request_queue_time_seconds": ("queued_s", "from submission to the step that a choice first ran in"),
    "vllm:iteration_tokens_total": ("step_tokens", "tokens of a step"),
    "rille:resumed_tokens": ("resumed_tokens", "tokens of a prompt that were not computed, of every choice"),
}


class Meters:
    """One registry for one server."""

    def __init__(self, engine: ServingEngine, model: str) -> None:
        self._registry = CollectorRegistry()
        self.num_stopped = 0  # choices that a stop string ended here, while the engine saw only that somebody aborted
        self.num_stopping = 0  # the same, of which the engine has not told yet
        self.first, self.between, self.each = Counts(FIRST), Counts(BETWEEN), Counts(BETWEEN)
        self.whole, self.read, self.written = Counts(WHOLE), Counts(LENGTHS), Counts(LENGTHS)
        self._registry.register(_FromStats(engine, model, self))
        ProcessCollector(registry=self._registry)

    def seen_here(self) -> Iterator[tuple[str, str, Values]]:
        """Name, text and values of the histograms that are kept here."""
        yield "vllm:time_to_first_token_seconds", "from submission to the first token", self.first.read()
        yield "vllm:inter_token_latency_seconds", "between two tokens of a choice", self.between.read()
        yield "vllm:request_time_per_output_token_seconds", "mean of that over a choice", self.each.read()
        yield "vllm:e2e_request_latency_seconds", "from submission to the end of a choice", self.whole.read()
        yield "vllm:request_prompt_tokens", "tokens of a prompt, for each choice that ended", self.read.read()
        yield "vllm:request_generation_tokens", "tokens of a choice that ended", self.written.read()

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def begin(self, started: float) -> Meter:
        """The clock of one request, which began at `started` (perf_counter)."""
        return Meter(self, started)


class Meter:
    def __init__(self, meters: Meters, started: float) -> None:
        self._meters, self._started = meters, started
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def tokens(self, index: int, count: int) -> None:
        """So many tokens of a choice have come at once."""
        now, last = perf_counter(), self._last.get(index)
        if last is None:
            self._meters.first.add(now - self._started)
            self._first[index] = last = now
            count -= 1
        if count:
            self._meters.between.add((now - last) / count, count)
        self._last[index] = now

    def stops(self) -> None:
        """A stop string has ended a choice here: what the engine will call an abort is none."""
        self._meters.num_stopping += 1

    def leaves(self, stopping: int) -> None:
        """Nobody listens any more to what becomes of so many choices that stop."""
        self._meters.num_stopping -= stopping

    def ended(self, finished: Finished, usage: Usage, stopped: bool) -> None:
        """usage: as the client is told; stopped: a stop string ended the choice here."""
        meters = self._meters
        meters.num_stopping -= stopped
        meters.num_stopped += stopped and finished.reason == "abort"
        if not stopped and finished.reason not in ("stop", "length"):
            return
        meters.whole.add(perf_counter() - self._started)
        meters.read.add(usage.prompt_tokens)
        meters.written.add(usage.completion_tokens)
        if usage.completion_tokens > 1 and (first := self._first.get(finished.index)) is not None:
            meters.each.add((self._last[finished.index] - first) / (usage.completion_tokens - 1))


class _FromStats(Collector):
    """Figures that the engine keeps, read when somebody asks."""

    def __init__(self, engine: ServingEngine, model: str, meters: Meters) -> None:
        self._engine, self._model, self._meters = engine, model, meters
        self._aborted = 0

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, (field, text) in _COUNTERS.items():
            yield self._counter(name, text, getattr(stats, field))
        for name, (field, text) in _GAUGES.items():
            yield self._gauge(name, text, getattr(stats, field))
        share = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "share of the pages that running sequences hold", share)
        for name, (field, text) in _HISTOGRAMS.items():
            yield self._histogram(name, text, getattr(stats, field))
        for name, text, values in self._meters.seen_here():
            yield self._histogram(name, text, values)
        yield self._config(stats)
        yield from self._labelled(stats)

    def _labelled(self, stats: EngineStats) -> Iterator[Metric]:
        misses = CounterMetricFamily(
            "rille:prefix_cache_miss_tokens",
            "prompt tokens that were computed, by reason",
            labels=["model_name", "reason"],
        )
        for reason in get_args(MissReason):
            misses.add_metric([self._model, reason], stats.misses.get(reason, 0))
        finished = CounterMetricFamily(
            "vllm:request_success", "choices that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished(stats).items():
            finished.add_metric([self._model, reason], count)
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "tokens guessed that came true, by their place in the draft",
            labels=["model_name", "position"],
        )
        for place, count in enumerate(stats.accepted_at):
            places.add_metric([self._model, str(place)], count)
        yield from (misses, finished, places)

    def _finished(self, stats: EngineStats) -> dict[str, int]:
        """Choices that ended, by reason. No count falls, though it is told here that a choice stops before the engine
        says that it was aborted."""
        counts = {reason: stats.finished.get(reason, 0) for reason in get_args(FinishReason)}
        counts["stop"] += self._meters.num_stopped
        known = counts["abort"] - self._meters.num_stopped - self._meters.num_stopping
        counts["abort"] = self._aborted = max(self._aborted, known)
        return counts

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, values: Values) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        bounds = [*map(str, values.bounds), "+Inf"]
        family.add_metric([self._model], list(zip(bounds, accumulate(values.counts), strict=True)), values.total)
        return family

    def _config(self, stats: EngineStats) -> Metric:
        """How large the cache is, where routers look for it."""
        names = ["model_name", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "tokens to a page of latents, and pages", labels=names)
        family.add_metric([self._model, str(stats.page_tokens), str(stats.pages_total)], 1)
        return family
