"""`rille bench serve`: traces keep their promises, figures are what was sent back, loops are refused."""

import json
from statistics import fmean

import pytest

from rille import cli
from rille.serve import load_watch
from rille.serve.load import SMALL_TRACE
from rille.serve.load_report import distinct, spread
from rille.serve.schema import EngineStats
from rille.serve.traces import TraceShape
from tests.serve.scripted import small_tokenizer
from tests.serve.served import MAX_LENGTH, serving

SHAPE = TraceShape(sessions=200, turns=6, groups=4, prefix=2048, output=64, ratio=131, low=256, high=1000)


def test_a_trace_reads_so_much_more_than_it_writes():
    read = written = 0
    for session in SHAPE.draw():
        length = len(session.prefix)
        for turn in session.turns:
            length += len(turn.added)
            read, written = read + length, written + turn.output
            length += turn.output
            assert turn.output >= 1 and all(256 <= token < 1000 for token in turn.added)
        assert length <= SHAPE.longest
    assert read / written == pytest.approx(131, rel=0.03)


def test_a_trace_shares_beginnings_and_repeats_itself():
    sessions = list(SHAPE.draw())
    assert len({session.prefix for session in sessions}) == len({session.group for session in sessions}) == 4
    assert sessions == list(SHAPE.draw())
    assert len({session.turns for session in sessions}) == len(sessions)
    assert fmean(turn.output for session in sessions for turn in session.turns) == pytest.approx(64, rel=0.05)


def test_a_trace_that_cannot_be():
    with pytest.raises(ValueError, match="a shorter prefix"):
        TraceShape(sessions=1, turns=2, groups=1, prefix=9000, output=10, ratio=131, low=0, high=9)
    with pytest.raises(ValueError, match="turns is 0"):
        TraceShape(sessions=1, turns=0, groups=1, prefix=1, output=10, ratio=131, low=0, high=9)


def test_spread_and_distinct():
    assert spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}
    assert spread([]) == {}
    assert distinct([[1, 2, 3, 4], [1, 2, 3, 4]]) == 1.0, "replies are looked at one by one"
    assert distinct([[7] * 12]) == 0.1 and distinct([[1, 2]]) == 1.0


@pytest.fixture(scope="module")
def server():
    with serving(small_tokenizer()) as served:
        yield served


SMALL = "--sessions 3 --turns 2 --groups 1 --prefix 40 --output 6 --ratio 20 --seed 3".split()


def bench(server, *flags: str) -> int:
    return cli.main(["bench", "serve", server.url, *SMALL, *flags])


@pytest.mark.parametrize("mode", [["--concurrency", "2"], ["--mode", "open", "--rate", "50"]])
def test_figures_are_what_came_back(server, tmp_path, capsys, mode):
    before = len(server.engine.requests)
    for start in range(6):
        server.say(list(range(10 + 20 * start, 30 + 20 * start)), cached=30)
    assert bench(server, *mode, "--out", str(tmp_path)) == 0
    requests = server.engine.requests[before:]
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "bench_serve.json").read_text())
    figures, samples = found["figures"], found["samples"]
    assert (tmp_path / "bench_serve.png").read_bytes().startswith(b"\x89PNG")
    assert figures["requests"] == 6 and figures["failed"] == 0 and "TTFT" in out and "TPOT" in out
    assert figures["prompt_tokens"] == sum(len(request.prompt) for request in requests)
    assert figures["output_tokens"] == sum(request.params.max_tokens for request in requests)
    assert figures["hit_rate"] == pytest.approx(180 / figures["prompt_tokens"])
    assert all(sample["first"] - sample["sent"] > 0 and sample["first"] <= sample["last"] for sample in samples)
    later = [sample for sample in samples if sample["turn"] == 1]
    for sample in later:
        first = next(s for s in samples if (s["session"], s["turn"]) == (sample["session"], 0))
        assert sample["possible"] == first["prompt"] + len(first["tokens"]) < sample["prompt"]
        prompt = next(list(r.prompt) for r in requests if len(r.prompt) == sample["prompt"])
        assert prompt[first["prompt"] : sample["possible"]] == first["tokens"], "a turn goes on from what was written"
    assert sorted(sample["possible"] for sample in samples if sample["turn"] == 0) == [0, 40, 40]


def test_c2_loops_are_refused(server, capsys):
    for flags, code in (((), 2), (("--allow-loops",), 0)):
        for _ in range(6):
            server.say([7] * 20)
        assert bench(server, "--output", "12", *flags) == code
    assert "go in circles" in capsys.readouterr().err


@pytest.fixture
def no_rest(monkeypatch):
    """Nobody waits for memory to come back."""
    monkeypatch.setattr(load_watch, "REST_S", 0.0)


def test_a_client_leaves_and_asks_again(server, tmp_path, capsys, no_rest):
    """Left replies end in the server; those asked again alone are held against what was said under load."""
    gone = len(server.engine.aborted)
    for _ in range(8):
        server.say(list(range(10, 40)), gap_s=0.01)
    assert bench(server, "--output", "9", "--aborts", "0.5", "--check", "2", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "bench_serve.json").read_text())
    left = [sample for sample in found["samples"] if sample["left"]]
    assert 0 < len(left) == found["figures"]["left"] < 6 and f"{len(left)} left in the middle" in out
    assert all(sample["tokens"] for sample in left) and len(server.engine.aborted) >= gone + len(left) - 1
    assert "2 asked again alone, 0 answered differently" in out
    memory = found["figures"]["server"]["memory_mib"]
    assert (
        memory["most"] >= memory["before"] > 0
        and memory["after"] > 0
        and memory["rested"] > 0
        and found["figures"]["server"]["pages_after"] == 0
    )
    first = found["samples"][0]
    second = next(sample for sample in found["samples"] if (sample["session"], sample["turn"]) == (0, 1))
    assert second["possible"] == first["prompt"] + len(first["tokens"]), "a turn goes on from what was heard"


@pytest.mark.parametrize(
    ("last", "figures", "told"),
    [
        ([9] * 20, EngineStats(), "1 of 1 requests were answered in another way alone"),
        (list(range(10, 30)), EngineStats(pages_used=3), "0 requests are open and 3 pages held"),
    ],
)
def test_what_a_check_finds(server, capsys, no_rest, last, figures, told):
    for _ in range(6):
        server.say(list(range(10, 30)))
    server.say(last)
    server.engine.figures = figures
    try:
        assert bench(server, "--check", "1") == 1
    finally:
        server.engine.figures = EngineStats()
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_a_load_goes_on_for_so_long(server, tmp_path):
    for _ in range(3000):
        server.say(list(range(10, 30)))
    assert bench(server, "--seconds", "0.5", "--concurrency", "2", "--out", str(tmp_path)) == 0
    server.engine.scripts.clear()
    found = json.loads((tmp_path / "bench_serve.json").read_text())
    assert found["figures"]["requests"] > 6 and 0.5 < found["figures"]["seconds"] < 20
    prompts = {(sample["session"], sample["prompt"]) for sample in found["samples"] if sample["turn"] == 0}
    assert len({length for _, length in prompts}) > 3, "a round is not the last one again"


def test_what_fails_is_counted(server, capsys):
    server.say([5, 6, 7], reason="error", error="no numbers")
    for start in range(4):
        server.say(list(range(10 + 20 * start, 30 + 20 * start)))
    assert bench(server, "--concurrency", "1") == 0
    out = capsys.readouterr().out
    assert "5 requests" in out and "1 failed" in out and "error: this request failed: no numbers" in out


def test_the_trace_that_is_named_for_small_models_is_short():
    words = SMALL_TRACE.split()
    sizes = {name.removeprefix("--"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    assert TraceShape(**sizes, groups=1, low=1, high=9).longest == 148


def test_what_cannot_be_measured(server, capsys):
    for _ in range(6):
        server.say(list(range(10, 30)))
    for flags, told in (
        (("--ratio", "9000"), f"the server takes {MAX_LENGTH:,}"),
        (("--ratio", "9000"), f"for a small model: {SMALL_TRACE}"),
        (("--prefix", "3000"), "a shorter prefix"),
        (("--concurrency", "0"), "concurrency is 0"),
        (("--aborts", "1.5"), "aborts is 1.5"),
        (("--aborts", "1"), "the first: the client left it"),
    ):
        assert bench(server, *flags) == 2
        assert told in capsys.readouterr().err
    assert cli.main(["bench", "serve", "http://127.0.0.1:9"]) == 1
    assert cli.main(["bench", "other"]) == 2
