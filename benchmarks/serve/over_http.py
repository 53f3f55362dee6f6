"""`rille serve` beside the offline engine on one machine: the same requests of many clients, tokens a second of both.

    python benchmarks/serve/over_http.py [--preset nano] [--device cuda] [--streams 1 64] [--out FOLDER]

A checkpoint with random weights and a vocabulary of the standard library is written first, or given (--checkpoint).
Engine and server have the settings that `rille serve` has by default, but for device and dtype. Each part is a process
of its own: the engine, stepped as fast as it goes; the server; the clients (this one), which are `rille bench serve`'s.
So many requests are open at once, and the next one is sent when one has ended; prompts lie inside the time.

The gate: requests that run alone are answered by both with the same tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from rille.serve.config import BenchServeConfig
from rille.serve.remote import Server
from rille.serve.traces import Session, TraceShape

ALONE = 3  # requests of the gate
ALONE_TOKENS = 48
PROMPT_OVER_REPLY = 2


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of both engines; all others are the defaults."""
    dtype = "bf16" if arguments.device == "cuda" else "fp32"
    return {"device": arguments.device, "dtype": dtype, "max_running": arguments.max_running}


def trace(streams: int, rounds: int, output: int, words: int, seed: int) -> list[Session]:
    """The requests of one turn: as many for each stream as there are rounds."""
    shape = TraceShape(sessions=streams * rounds, turns=1, groups=1, prefix=1, output=output, ratio=PROMPT_OVER_REPLY,
                       low=min(256, words // 2), high=words, seed=seed)  # fmt: skip
    return list(shape.draw())


# --- parts that need torch, each in its own process -------------------------------------------------------------------


def write_checkpoint(arguments: argparse.Namespace) -> None:
    import sysconfig

    import torch

    from rille.model.checkpoint import save_model
    from rille.model.model import new_model
    from rille.model.presets import preset
    from rille.text.tokenizer import train_tokenizer

    library = Path(sysconfig.get_path("stdlib")).glob("*.py")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(library)]
    config = preset(arguments.preset)
    model = new_model(config, dtype=torch.bfloat16, device=arguments.device, seed=0)
    save_model(model, arguments.checkpoint, tokenizer=train_tokenizer(texts, config.vocab_size))


def run_offline(arguments: argparse.Namespace) -> None:
    """Tokens a second of the engine, and what it answers to requests that run alone, as JSON in a file."""
    import torch

    from rille.serve.engine import Engine
    from rille.serve.schema import Request, SamplingParams

    if arguments.device == "cpu":  # as the server does (`rille.serve.server.leave_a_core`)
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    engine = Engine(arguments.checkpoint, **settings(arguments))
    assert engine.tokenizer is not None
    words = engine.tokenizer.vocab_size
    alone = trace(1, ALONE, ALONE_TOKENS, words, 100)
    found: dict[str, Any] = {"alone": []}
    for session in alone:
        params = SamplingParams(max_tokens=ALONE_TOKENS, temperature=0, ignore_eos=True)
        found["alone"].append(list(engine.generate([session.prefix + session.turns[0].added], params)[0][0].tokens))
    for streams, rounds in zip(arguments.streams, arguments.rounds, strict=True):
        for turn in range(arguments.repeats + 1):  # the first one compiles and records
            seed = 1000 * streams + turn
            waiting = trace(streams, rounds, arguments.output, words, seed)[::-1]
            written, began, handles = 0, perf_counter(), []
            while waiting or engine._handles:
                while waiting and len(engine._handles) < streams:
                    session = waiting.pop()
                    [turn] = session.turns
                    written += turn.output
                    params = SamplingParams(max_tokens=turn.output, temperature=1.0, seed=seed, ignore_eos=True)
                    handles.append(engine.submit(Request(prompt=session.prefix + turn.added, params=params)))
                engine.step()
            found.setdefault(str(streams), []).append(written / (perf_counter() - began))
            assert sum(1 for handle in handles for _ in handle) == written + len(handles), "every token and every end"
    arguments.found.write_text(json.dumps(found))


# --- the clients' process ---------------------------------------------------------------------------------------------


def in_process(part: str, arguments: argparse.Namespace, **more: Path) -> None:
    """Run a part of this program."""
    line = [sys.executable, __file__, "--part", part, "--preset", arguments.preset, "--device", arguments.device,
            "--output", str(arguments.output), "--repeats", str(arguments.repeats),
            "--max-running", str(arguments.max_running),
            "--streams", *map(str, arguments.streams), "--rounds", *map(str, arguments.rounds)]  # fmt: skip
    for name, value in more.items():
        line += [f"--{name}", str(value)]
    subprocess.run(line, check=True)


@contextmanager
def serving(arguments: argparse.Namespace, checkpoint: Path) -> Iterator[str]:
    """A server's address."""
    line = [sys.executable, "-m", "rille", "serve", str(checkpoint), "--port", "0"]
    for name, value in settings(arguments).items():
        line += [f"--engine.{name.replace('_', '-')}", str(value)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for told in process.stdout:
                print("   ", told, end="", flush=True)
                if told.startswith("ready: "):
                    yield told.split()[1]
                    break
            else:
                raise SystemExit(f"the server ended with {process.wait()}")
        finally:
            process.terminate()


def run_http(arguments: argparse.Namespace, url: str, found: dict[str, Any]) -> dict[str, Any]:
    """The gate, then the loads."""
    from rille.serve.load import bench

    server = Server(url)
    model = server.model()
    words, different = model["vocab_size"], []
    for number, session in enumerate(trace(1, ALONE, ALONE_TOKENS, words, 100)):
        body = {"model": model["id"], "prompt": session.prefix + session.turns[0].added, "max_tokens": ALONE_TOKENS,
                "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}  # fmt: skip
        chunks = [choice for chunk in server.events("/v1/completions", body) for choice in chunk["choices"]]
        tokens = [token for chunk in chunks for token in chunk.get("token_ids") or ()]
        different += [number] if tokens != found["alone"][number] else []
    print(f"gate: {ALONE - len(different)} of {ALONE} requests are answered as by the engine", flush=True)
    result: dict[str, Any] = {"gate_different": different}
    for streams, rounds in zip(arguments.streams, arguments.rounds, strict=True):
        for turn in range(arguments.repeats + 1):
            shape = {"sessions": streams * rounds, "turns": 1, "groups": 1, "prefix": 1, "output": arguments.output}
            config = BenchServeConfig(
                url=url,
                concurrency=streams,
                ratio=PROMPT_OVER_REPLY,
                seed=1000 * streams + turn,
                allow_loops=True,
                **shape,
            )
            figures = bench(config)
            result.setdefault(str(streams), []).append(figures)
            if figures["failed"]:
                raise SystemExit(f"{figures['failed']} requests failed: {figures['errors']}")
    return result


def table(arguments: argparse.Namespace, found: dict[str, Any], result: dict[str, Any]) -> str:
    """Of each number of streams the lower median of all loads but the first, which compiles and records."""
    lines = ["streams   offline      HTTP   ratio   TTFT p50   p99   TPOT p50   p99 (ms)    all loads: offline; HTTP"]
    for streams in map(str, arguments.streams):
        offline, online = found[streams], [load["output_tokens_per_s"] for load in result[streams]]
        plain, speed = median_low(offline[1:]), median_low(online[1:])
        load = result[streams][1 + online[1:].index(speed)]
        ttft, tpot = load["ttft_s"], load["tpot_s"]
        every = "; ".join(" ".join(f"{one:,.0f}" for one in some) for some in (offline, online))
        lines.append(
            f"{streams:>7}{plain:10,.0f}{speed:10,.0f}{speed / plain:8.2f}{1e3 * ttft['p50']:11.1f}"
            f"{1e3 * ttft['p99']:6.1f}{1e3 * tpot['p50']:11.2f}{1e3 * tpot['p99']:6.2f}         {every}"
        )
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        checkpoint, file = arguments.checkpoint or Path(folder, "random"), Path(folder, "offline.json")
        if not (checkpoint / "config.json").exists():
            in_process("checkpoint", arguments, checkpoint=checkpoint)
        in_process("offline", arguments, checkpoint=checkpoint, found=file)
        found = json.loads(file.read_text())
        with serving(arguments, checkpoint) as url:
            result = run_http(arguments, url, found)
    print(table(arguments, found, result))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "http.json").write_text(json.dumps({"offline": found, "http": result}, indent=1))
    if result["gate_different"]:
        raise SystemExit(f"the gate failed: requests {result['gate_different']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, nargs="+", default=[8, 3], help="requests of each stream")
    parser.add_argument("--output", type=int, default=256, help="tokens of a reply on average; prompts have twice that")
    parser.add_argument("--repeats", type=int, default=2, help="loads that count, after one that does not")
    parser.add_argument("--checkpoint", type=Path, help="written there if there is none")
    parser.add_argument("--max-running", type=int, default=64, help="sequences at once, of both")
    parser.add_argument("--part", choices=("checkpoint", "offline"), help="one of the first two parts alone")
    parser.add_argument("--found", type=Path, help="where the offline part leaves its figures")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if len(arguments.rounds) != len(arguments.streams):
        parser.error(f"{len(arguments.streams)} numbers of streams and {len(arguments.rounds)} of rounds")
    {"checkpoint": write_checkpoint, "offline": run_offline, None: measure}[arguments.part](arguments)


if __name__ == "__main__":
    main()
