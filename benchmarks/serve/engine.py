"""The offline engine on one GPU: decoding alone and of many, a prompt sent again, conversations, drafts.

    python benchmarks/serve/engine.py [--preset nano] [--device cuda] [--out FOLDER]

Random weights: what is measured is time, not text. The gate comes first: recorded steps against steps as they come, and
the same tokens from a prompt that is cached. The floor of a step is one read of the weights that it needs (all experts
that 64 rows can reach are all experts) at 4.27 TB/s, what a copy reaches on an H200. Conversations: each turn reads all
before it, a few share a system prompt; `possible` is what token-exact longest prefixes without any limit would save.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rille.model.model import K3, new_model
from rille.model.presets import preset
from rille.serve.engine import Engine
from rille.serve.schema import Request, SamplingParams

COPY = 4.27e12  # bytes a second


def ids(count: int, words: int, seed: int = 0) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(words) for _ in range(count)]


def keep_loaded() -> None:
    """As `rille serve` does before it begins: a collection that visits all that torch has loaded takes as long as many
    steps, and meets one turn or another."""
    gc.collect()
    gc.freeze()


def greedy(count: int, **rest) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **rest)


def gate(model: K3, words: int, settings: dict[str, Any]) -> float:
    """The largest difference of a log-probability between both kinds of steps, as far as the tokens agree."""
    prompts = [ids(n, words, n) for n in (5, 64, 700, 130)]
    engines = [Engine(model, **settings, cuda_graphs=on) for on in (False, True)]
    eager, recorded = (engine.generate(prompts, greedy(12)) for engine in engines)
    worst = 0.0
    for (one,), (other,) in zip(eager, recorded, strict=True):
        for a, b, p, q in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
            worst = max(worst, abs(p - q)) if a == b else worst
            if a != b:
                break
    again = engines[1].generate(prompts, greedy(12))
    cached = [one.usage.cached_tokens for (one,) in again]
    if worst > 0.1 or cached != [len(prompt) - 1 if len(prompt) > 64 else 0 for prompt in prompts]:
        raise SystemExit(f"gate: log-probabilities differ by {worst:.3f}, cached {cached}")
    return worst


def decode(engine: Engine, words: int, streams: int, count: int) -> dict[str, float]:
    """Tokens a second of all streams together, from the time that all of them write."""
    params = greedy(count)
    engine.generate([ids(100, words, n) for n in range(streams)], greedy(8))  # compiles and records
    handles = [engine.submit(Request(prompt=ids(100, words, 1000 + n), params=params)) for n in range(streams)]
    while len(engine.scheduler.running) < streams or any(s.num_written < 2 for s in engine.scheduler.running):
        engine.step()
    keep_loaded()
    before, began = engine.stats(), perf_counter()
    while len(engine.scheduler.running) == streams:
        engine.step()
    seconds, after = perf_counter() - began, engine.stats()
    for handle in handles:
        list(handle)
    steps, tokens = after.steps - before.steps, after.generated_tokens - before.generated_tokens
    return {"tokens_s": tokens / seconds, "step_ms": 1e3 * seconds / steps, "steps": steps}


def profile(engine: Engine, words: int, streams: int, steps: int = 20) -> dict[str, list[str]]:
    """Kernels of decoding steps by name: launches and microseconds a step, the longest first; and those of one step in
    order, with when each began and how long the card had been idle before."""
    handles = [engine.submit(Request(prompt=ids(100, words, 2000 + n), params=greedy(64))) for n in range(streams)]
    while len(engine.scheduler.running) < streams or any(s.num_written < 2 for s in engine.scheduler.running):
        engine.step()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    for handle in handles:
        list(handle)
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    launches, total = sum(row.count for row in rows), sum(row.self_device_time_total for row in rows)
    lines = [f"{streams} streams: {launches / steps:.1f} launches, {total / steps:.1f} us of kernels a step"]
    lines += [
        f"{row.count / steps:7.2f} {row.self_device_time_total / steps:8.1f}  {row.key[:110]}" for row in rows[:50]
    ]
    return {"kernels": lines, "timeline": timeline(seen)}


def timeline(seen: Any) -> list[str]:
    """A line for each kernel of the last but one step, which begins with the only copy to the card: start, idle time
    before, duration in us, name."""
    ran = sorted((e for e in seen.events() if e.time_range.elapsed_us() > 0), key=lambda e: e.time_range.start)
    begins = [place for place, e in enumerate(ran) if "HtoD" in e.name]
    if len(begins) < 3:
        return []
    lines, idle_us, end = [], 0.0, ran[begins[-2]].time_range.start
    first = end
    for e in ran[begins[-2] : begins[-1]]:
        idle = max(0.0, e.time_range.start - end)
        start, took = e.time_range.start - first, e.time_range.elapsed_us()
        lines.append(f"{start:8.1f} {idle:5.1f} {took:6.1f}  {e.name[:90]}")
        idle_us, end = idle_us + idle, max(end, e.time_range.end)
    return [f"one step: {end - first:.1f} us, {idle_us:.1f} of them idle", *lines]


def resend(engine: Engine, words: int, length: int) -> dict[str, float]:
    """Milliseconds to the first token of a long prompt at first (kernels compile), of another one, of the first again,
    and again with one token more."""
    prompt, other, result = ids(length, words, 5), ids(length, words, 6), {}
    sent_as = {"first": prompt, "other": other, "again": prompt, "warm": prompt, "longer": [*prompt, 1]}
    for name, sent in sent_as.items():
        began = perf_counter()
        outputs = iter(engine.submit(Request(prompt=sent, params=greedy(2))))
        next(outputs)
        result[f"{name}_ms"] = 1e3 * (perf_counter() - began)
        *_, last = outputs
        result[f"{name}_computed"] = len(sent) - last.usage.cached_tokens
    return result


def conversations(engine: Engine, words: int, chats: int, turns: int, grows: int) -> dict[str, float]:
    """Hit rate of growing conversations that share a system prompt, beside what was possible."""
    system, histories = ids(1500, words, 1), {}
    for chat in range(chats):
        histories[chat] = system + ids(grows, words, 100 + chat)
    possible = hits = total = 0
    known: dict[int, int] = {}
    before = engine.stats()
    for turn in range(turns):
        for chat, history in histories.items():
            [[one]] = engine.generate([history], greedy(16))
            possible += known.get(chat, len(system) if turn or chat else 0)
            hits, total = hits + one.usage.cached_tokens, total + len(history)
            known[chat] = len(history) + len(one.tokens)
            histories[chat] = [*history, *one.tokens, *ids(grows, words, 7 * turn + chat)]
    misses = {r: n - before.misses[r] for r, n in engine.stats().misses.items()}
    return {"hit_rate": hits / total, "possible": possible / total, "of_possible": hits / possible, **misses}


def speed(engine: Engine, words: int, params: Sequence[SamplingParams]) -> dict[str, float]:
    """Tokens a second of all streams behind their first two tokens, the better of two turns, what its drafts did, and
    what the engine takes steps without guesses and with all of them for. params: of each stream. Before the clock every
    recording is made that the text may need: once with every guess run, once as ever."""
    turns, odds, streams = [], engine._stepper.odds, len(params)
    for turn in range(4):
        odds.fixed = turn == 0
        prompts = [ids(100, words, 3 + n) for n in range(streams)]
        handles = [engine.submit(Request(prompt=prompt, params=p)) for prompt, p in zip(prompts, params, strict=True)]
        while len(engine.scheduler.running) < streams or any(s.num_written < 2 for s in engine.scheduler.running):
            engine.step()
        keep_loaded()
        before, began = engine.stats(), perf_counter()
        while engine.step():
            pass
        seconds, after = perf_counter() - began, engine.stats()
        for handle in handles:
            list(handle)
        names = ("steps", "drafts", "drafted", "accepted", "generated_tokens")
        did = {name: getattr(after, name) - getattr(before, name) for name in names}
        times = {"plain_ms": odds._plain.at(streams), "guessed_ms": odds._guessed.at(streams * (1 + odds.most))}
        did |= {name: None if time is None else round(1e3 * time, 3) for name, time in times.items()}
        turns.append({"tokens_s": did.pop("generated_tokens") / seconds, **did})
    return max(turns[2:], key=lambda turn: turn["tokens_s"])


def write_text(model: K3, head: torch.Tensor, embed: torch.Tensor, kind: str) -> None:
    """Weights with which a random model writes a kind of text: the embedding outweighs all layers, and the row of the
    head of each word is the embedding of those words that it follows."""
    words = torch.arange(len(embed), device=embed.device)
    period = {"one word": 1, "circles of 17": 17, "circles of 150": 150}.get(kind)
    with torch.no_grad():
        model.embed.copy_(embed if kind == "random" else 30 * embed)
        if kind == "random":
            model.head_weight.copy_(head)
        elif period is not None:
            before = words // period * period + (words - 1) % period
            model.head_weight.copy_(embed[before.clamp(max=len(embed) - 1)])
        else:  # each word of 64 has two that may follow
            start, place = words // 64 * 64, words % 64 // 2
            model.head_weight.copy_(embed[start + place] + embed[start + place + 32])
    model.prepare()


def drafts(
    model: K3, words: int, settings: dict[str, Any], count: int, crowd: int, recorded: bool
) -> dict[str, Any]:  # fmt: skip
    """Tokens a second with prompt lookup over tokens a second without: where text repeats itself (greedy), by chance
    (one of two words follows each) and not at all (drawn from random logits, last: the engine is used to better).
    Layers say next to nothing here, so the text is right whatever a step with drafts does to their states: recorded
    ones count only after `test_recorded_drafts_agree_with_recorded_steps` on the same card. Mixed: one stream in eight
    goes in circles, the others draw at a temperature that makes all words alike."""
    engines = {
        "none": Engine(model, **settings),
        "ngram": Engine(model, **settings, drafter="ngram", recorded_drafts=recorded),
    }
    head, embed, result = model.head_weight.detach().clone(), model.embed.detach().clone(), {}
    cases = [(1, kind) for kind in ("one word", "circles of 17", "circles of 150", "one of two", "random")]
    crowds = [(crowd, kind) for kind in ("circles of 17", "mixed", "random")]
    for case, (streams, kind) in enumerate([*cases, *crowds], 1):
        write_text(model, head, embed, "circles of 17" if kind == "mixed" else kind)
        heats = [temperature_of(kind, stream) for stream in range(streams)]
        params = [
            SamplingParams(max_tokens=count, temperature=heat, seed=stream, ignore_eos=True)
            for stream, heat in enumerate(heats)
        ]
        found = {}
        for drafter, engine in engines.items():
            engine.update_weights({}, case)  # nothing is found of the text before
            found[drafter] = speed(engine, words, params)
        plain = found["none"]["tokens_s"]
        figures = {"over_plain": found["ngram"]["tokens_s"] / plain, "plain_tokens_s": plain, **found["ngram"]}
        result[f"{kind}, {streams}"] = figures
        print(f"drafts, {streams} streams, {kind}: {figures}", flush=True)
    return result


def temperature_of(kind: str, stream: int) -> float:
    """At which a stream draws a kind of text."""
    if kind == "mixed":
        return 100.0 if stream % 8 else 0.0
    return {"random": 1.0, "one of two": 0.02}.get(kind, 0.0)


def floor_ms(model: K3, streams: int) -> float:
    """Milliseconds to read what a step of so many rows needs of the weights."""
    c = model.config
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    experts = sum(
        b.ffn.experts.w13.nbytes + b.ffn.experts.w2.nbytes for b in model.blocks() if hasattr(b.ffn, "experts")
    )
    reached = 1 - (1 - c.active_experts / c.num_experts) ** streams
    embedding = 0 if c.tied_embeddings else model.embed.nbytes
    return 1e3 * (total - embedding - experts * (1 - reached)) / COPY


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu = arguments.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = new_model(preset(arguments.preset), dtype=dtype, device=arguments.device, seed=0)
    words = model.config.vocab_size
    settings = dict(memory_gib=20 if on_gpu else 1, hash_unit=64, max_running=64, token_budget=8192)
    settings["recorded_prompts"] = arguments.recorded_prompts
    small = dict(num_pages=200, hash_unit=64)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}
    result["gate_logprob"] = gate(model, words, small)
    print("gate passed", flush=True)
    most = max(arguments.streams)
    if arguments.only != "drafts":
        result |= measure_plain(arguments, model, Engine(model, **settings))
    if arguments.only == "steps":
        return result
    settings["memory_gib"] = 8 if on_gpu else 1
    result["drafts"] = drafts(model, words, settings, arguments.tokens, most, arguments.recorded_drafts)
    return result


def measure_plain(arguments: argparse.Namespace, model: K3, engine: Engine) -> dict[str, Any]:
    """All but drafts."""
    result, words = {}, model.config.vocab_size
    for streams in arguments.streams:
        found = decode(engine, words, streams, arguments.tokens)
        result[f"decode_{streams}"] = found | {"floor_ms": floor_ms(model, streams)}
        print(f"{streams} streams: {result[f'decode_{streams}']}", flush=True)
    if arguments.profile and arguments.device == "cuda":
        result["profile"] = {streams: profile(engine, words, streams) for streams in arguments.streams}
        print("\n".join(line for found in result["profile"].values() for line in found["kernels"]), flush=True)
    if arguments.only == "steps":
        return result
    result["resend"] = resend(engine, words, arguments.prompt)
    print(result["resend"], flush=True)
    result["conversations"] = conversations(engine, words, arguments.chats, 8, 600)
    print(result["conversations"], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=65_536)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--only", choices=("steps", "drafts"), help="the gate and this part alone")
    parser.add_argument("--recorded-drafts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recorded-prompts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true", help="also where a decoding step's time goes, by kernel")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "serve.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
