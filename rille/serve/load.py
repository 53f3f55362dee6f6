"""`rille bench serve`: a trace of agents against a server, and what it made of it. No torch here.

closed loop    so many sessions at once, each next turn when the last is answered
open loop      sessions begin at random times, at a rate, whatever the server does
afterwards     some requests once more, one at a time: the answers must be the same, and nothing may be held by then

TTFT = first token - sent        TPOT = (last token - first token) / (tokens - 1)
hit rate = cached / prompt tokens        possible = longest prefix seen before / prompt tokens, without any limit
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from rille.serve.config import BenchServeConfig
from rille.serve.load_report import Sample, figures, picture, table
from rille.serve.load_watch import Watch, course
from rille.serve.remote import Server, api_key, as_object, message_of, objects, value
from rille.serve.traces import Session, TraceShape

Json = dict[str, Any]

FIRST_ID = 256  # below are single bytes in most vocabularies
SMALL_TRACE = "--sessions 4 --turns 2 --prefix 64 --output 8 --ratio 12"  # 148 tokens in a sequence at most


def bench(config: BenchServeConfig) -> Json:
    """Run the load, print the table; with `out`, write figures, samples and a picture there.

    Raises ValueError for a trace that the server cannot take, for replies that repeat themselves, and where nothing
    was answered; OSError where nobody answers, and where `check` finds that something is wrong.
    """
    server = Server(config.url)
    model = server.model()
    shape = trace_of(config, model)
    folder = Path(config.out) if config.out is not None else None
    if folder is not None:  # what cannot be written is told before the load
        folder.mkdir(parents=True, exist_ok=True)
    samples, seconds, found = asyncio.run(_measure(config, server, Load(config, model["id"]), shape))
    summary = {**figures(samples, seconds, config), **found}
    print(table(summary))
    if folder is not None:
        whole = {"config": asdict(config), "figures": summary, "samples": [asdict(sample) for sample in samples]}
        (folder / "bench_serve.json").write_text(json.dumps(whole) + "\n", encoding="utf-8")
        picture(samples, seconds, folder / "bench_serve.png")
        print(f"written: {folder / 'bench_serve.json'}, {folder / 'bench_serve.png'}")
    if config.check and (wrong := faults(summary)):
        raise OSError(f"{config.url}: {'; '.join(wrong)}")
    return summary


async def _measure(
    config: BenchServeConfig, server: Server, load: Load, shape: TraceShape
) -> tuple[list[Sample], float, Json]:
    """Samples, seconds, and what was seen of the server, where somebody asked for that."""
    if config.seconds is None and not config.check:
        return (*await load.run(shape.draw()), {})
    watch = Watch(server)
    watching = asyncio.ensure_future(watch.run())
    samples, seconds = await load.run(shape.draw() if config.seconds is None else rounds(shape))
    watching.cancel()
    await asyncio.wait({watching})
    after = await watch.settle()
    if not config.check:
        return samples, seconds, {"server": course(watch.points, after)}
    checked, different = await load.ask_again()
    found = {"server": course(watch.points, after, await watch.rest()), "checked": checked, "different": different}
    return samples, seconds, found


def rounds(shape: TraceShape) -> Iterator[Session]:
    """The sessions of a trace, and then of others of this shape, without an end."""
    for number in count():
        for session in replace(shape, seed=shape.seed + number).draw():
            yield replace(session, group=number * shape.groups + session.group)


def faults(summary: Json) -> list[str]:
    """What a check may not find."""
    server = summary["server"]
    wrong = []
    if summary["failed"]:
        wrong.append(f"{summary['failed']} requests failed")
    if summary["different"]:
        wrong.append(f"{summary['different']} of {summary['checked']} requests were answered in another way alone")
    if server["open_after"] or server["pages_after"]:
        wrong.append(f"{server['open_after']} requests are open and {server['pages_after']} pages held after the load")
    return wrong


def trace_of(config: BenchServeConfig, model: Json) -> TraceShape:
    """The trace for a server's model. Raises ValueError where that is too small for it."""
    words = config.vocab_size or value(model, "vocab_size", 0)
    if not words:
        raise ValueError("the server does not say how large its vocabulary is; give vocab_size")
    shape = TraceShape(
        sessions=config.sessions,
        turns=config.turns,
        groups=config.groups,
        prefix=config.prefix,
        output=config.output,
        ratio=config.ratio,
        low=min(FIRST_ID, words // 2),
        high=words,
        seed=config.seed,
    )
    room = value(model, "max_model_len", shape.longest)
    if shape.longest > room:
        raise ValueError(
            f"the trace comes to {shape.longest:,} tokens in one sequence, the server takes {room:,}; ask for fewer "
            f"turns, shorter replies or a smaller ratio; for a small model: {SMALL_TRACE}"
        )
    return shape


class Load:
    """Sends a trace and notes what comes back."""

    def __init__(self, config: BenchServeConfig, model: str) -> None:
        self._config, self._model = config, model
        self._samples: list[Sample] = []
        self._seen: set[int] = set()  # groups whose prefix was sent
        self._random = Random(config.seed)
        self._answered: list[tuple[Sample, tuple[int, ...], int]] = []  # with prompt and length, to be asked again
        self._num_answered = 0
        self._start = 0.0

    async def run(self, sessions: Iterator[Session]) -> tuple[list[Sample], float]:
        """All sessions, or as many as the time allows; returns the samples and how long it took."""
        self._start = perf_counter()
        numbered = enumerate(sessions)
        if self._config.mode == "closed":

            async def worker() -> None:
                for number, session in numbered:
                    await self._session(number, session)
                    if self._is_late():
                        break

            await asyncio.gather(*(worker() for _ in range(self._config.concurrency)))
        else:
            random, at = Random(self._config.seed), 0.0
            tasks = []
            for number, session in numbered:
                if self._config.seconds is not None and at > self._config.seconds:
                    break
                tasks.append(asyncio.ensure_future(self._later(at, number, session)))
                at += random.expovariate(self._config.rate)
            await asyncio.gather(*tasks)
        return self._samples, perf_counter() - self._start

    def _is_late(self) -> bool:
        return self._config.seconds is not None and self._now() > self._config.seconds

    async def _later(self, at: float, number: int, session: Session) -> None:
        await asyncio.sleep(max(0.0, at - self._now()))
        await self._session(number, session)

    async def _session(self, number: int, session: Session) -> None:
        ids, known = list(session.prefix), len(session.prefix) if session.group in self._seen else 0
        self._seen.add(session.group)
        for place, turn in enumerate(session.turns):
            if place and self._is_late():
                return
            if place:
                await asyncio.sleep(self._config.tool_s)
            ids += turn.added
            sample = Sample(number, place, self._now(), len(ids), min(known, len(ids) - 1))
            self._samples.append(sample)
            leaves = self._random.random() < self._config.aborts
            try:
                await self._ask(sample, ids, turn.output, self._random.randint(1, turn.output) if leaves else None)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                sample.error = str(error) or type(error).__name__
                return
            self._keep(sample, ids, turn.output)
            ids += sample.tokens
            known = len(ids)

    def _keep(self, sample: Sample, ids: list[int], output: int) -> None:
        """Each of the answered requests is as likely as the others to be asked again."""
        self._num_answered += 1
        place = self._random.randrange(self._num_answered)
        if len(self._answered) < self._config.check:
            self._answered.append((sample, tuple(ids), output))
        elif place < self._config.check:
            self._answered[place] = (sample, tuple(ids), output)

    async def _ask(self, sample: Sample, ids: list[int], output: int, leave_after: int | None = None) -> None:
        """leave_after: so many tokens; the rest is not read, and the server learns of it by the closed connection."""
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": output,
            "temperature": self._config.temperature,
            "seed": self._config.seed + sample.session,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens: list[int] = []
        async with aclosing(stream(self._config.url, "/v1/completions", body)) as chunks:
            async for chunk in chunks:
                for choice in objects(chunk, "choices"):
                    if new := value(choice, "token_ids", []):
                        sample.last = self._now()
                        sample.first = sample.first or sample.last
                        tokens += new
                if usage := value(chunk, "usage", {}):
                    sample.cached = value(value(usage, "prompt_tokens_details", {}), "cached_tokens", 0)
                if leave_after is not None and len(tokens) >= leave_after:
                    sample.left = True
                    break
        sample.tokens = tuple(tokens)
        if not tokens:
            raise ValueError("an answer without token ids; the server must know return_token_ids")

    async def ask_again(self) -> tuple[int, int]:
        """Some of the requests alone: how many, and how many were answered in another way then."""
        different = 0
        for sample, ids, output in self._answered:
            alone = replace(sample)
            await self._ask(alone, list(ids), output)
            different += alone.tokens[: len(sample.tokens)] != sample.tokens
        return len(self._answered), different

    def _now(self) -> float:
        return perf_counter() - self._start


async def stream(url: str, path: str, body: Json) -> AsyncGenerator[Json, None]:
    """Events of a reply over HTTP/1.1. Raises ValueError for what the server refuses, OSError where it breaks off."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=parts.scheme == "https" or None)
    try:
        text, key = json.dumps(body).encode(), api_key()
        lines = [
            f"POST {parts.path.rstrip('/').removesuffix('/v1')}{path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(text)}",
            "Connection: close",
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + text)
        begun = re.match(rb"HTTP/1\.[01] ([0-9]{3})\b", first := await reader.readline())
        if begun is None:
            raise OSError(f"{url} does not answer in HTTP but {first[:60]!r}")
        while (await reader.readline()).strip():
            pass
        if (status := int(begun[1])) != 200:
            told = (await reader.read()).decode("utf-8", errors="replace")
            raise ValueError(f"status {status}: {told[:500]}")
        async for data in _events(reader):
            if error := data.get("error"):
                raise ValueError(message_of(error))
            yield data
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader) -> AsyncGenerator[Json, None]:
    """The JSON of each event of a chunked body."""
    held = b""
    while size := int(await reader.readline() or b"0", 16):
        held += (await reader.readexactly(size + 2))[:-2]
        *lines, held = held.split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield as_object(data)
