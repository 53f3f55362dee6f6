"""The memory of a server's process: what is there before the first request, and what goes back afterwards."""

import ctypes
import os
import subprocess
import sys
import threading
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch

from rille import cli
from rille.model.checkpoint import save_model
from rille.model.model import new_model
from rille.serve import resident, server
from rille.serve.assemble import BOUNDARY_BYTES, REMEMBERED, count_remembered
from rille.serve.audit import audit_scheduler
from rille.serve.config import ServeConfig
from rille.serve.meters import Meters
from rille.serve.paged import POISON, Pages
from rille.serve.resident import KEPT, Rest, give_back, keep_few_kernels
from rille.serve.schema import SamplingParams
from tests.serve.scripted import small_tokenizer
from tests.serve.served import until
from tests.serve.test_engine import GREEDY, alone, engine, prompt
from tests.train.small import MODEL

STATM = Path("/proc/self/statm")
needs_proc = pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")


@pytest.fixture(scope="module")
def model():
    return new_model(MODEL.replace(init_std=0.2), seed=3)


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * PAGESIZE


@needs_proc
def test_resident_memory_is_among_the_metrics(model):
    text = Meters(engine(model), "small").text().decode()
    [line] = [line for line in text.splitlines() if line.startswith("process_resident_memory_bytes ")]
    assert 0.5 < float(line.split()[1]) / resident_bytes() < 2


# --- before the first request -----------------------------------------------------------------------------------------


@needs_proc
@pytest.mark.parametrize("poison", [False, True])
def test_a_pool_is_taken_before_it_is_written(poison):
    before = resident_bytes()
    pages = Pages(MODEL, 12_000, torch.float32, "cpu", poison=poison)
    size = pages.bytes.numel()
    assert size > 64 << 20, "large enough to come from the system alone"
    some = dict(zip((0, 6001, 11_999), torch.randint(256, (3, pages.layout.page_bytes)).byte(), strict=True))
    for page, content in some.items():
        pages.write(page, content)
    pages.touch()
    assert resident_bytes() - before > 0.9 * size
    assert all(pages.read(page).equal(content) for page, content in some.items())
    assert not poison or (pages.read(1000) == POISON).all()


@pytest.mark.parametrize("num_pages", [4, 5, 120])
def test_to_warm_up_leaves_nothing(model, num_pages, monkeypatch):
    served = engine(model, num_pages=num_pages)
    before, ran, run = served.stats(), [], served.runner.run

    def note(parts):
        ran.append([part.num_tokens for part in parts])
        return run(parts)

    with monkeypatch.context() as patch:
        patch.setattr(served.runner, "run", note)
        served.warm_up()
    assert ran == [[64]] and served.stats() == before
    assert served.scheduler.cache.store.pool.num_free == num_pages
    audit_scheduler(served.scheduler)
    assert served.generate([prompt(9)], GREEDY)[0][0].tokens == alone(model, prompt(9))


@pytest.mark.parametrize("num_pages", [5, 6, 20])
def test_to_warm_up_late_evicts_nothing(model, num_pages):
    served, long = engine(model, num_pages=num_pages), prompt(128)
    params = SamplingParams(max_tokens=1, temperature=0)
    first = served.generate([long], params)
    before = served.stats()
    assert before.pages_cached
    served.warm_up()
    assert served.stats() == before
    assert served.generate([long], params)[0][0].tokens == first[0][0].tokens


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """One to serve in this process, whose settings stay as they are."""
    monkeypatch.setattr(server, "leave_a_core", lambda: None)
    monkeypatch.setattr(server, "keep_loaded", lambda: None)
    tokenizer = small_tokenizer()
    save_model(new_model(MODEL.replace(vocab_size=tokenizer.vocab_size)), tmp_path / "small", tokenizer=tokenizer)
    return str(tmp_path / "small")


def test_a_server_warms_up_in_the_thread_that_steps_and_then_is_ready(checkpoint, monkeypatch, capsys):
    told = []

    def note(*given):
        told.append((threading.current_thread().name, "ready:" in capsys.readouterr().out))

    monkeypatch.setattr("rille.serve.engine.warm_up", note)
    monkeypatch.setattr(server, "run", lambda app, engine, listener: told.append("runs"))
    server.serve(ServeConfig(checkpoint=checkpoint, port=0))
    assert told == [("rille-engine", False), "runs"] and "ready:" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_cannot_warm_up_is_not_ready(checkpoint, monkeypatch, capsys):
    def fail(*given):
        raise MemoryError("no more")

    monkeypatch.setattr("rille.serve.engine.warm_up", fail)
    assert cli.main(["serve", checkpoint, "--port", "0"]) == 1
    told = capsys.readouterr()
    assert "ready:" not in told.out and "stopped before the first request" in told.err


RUNS_ON_A_CPU = """
import sys, rille
model = rille.new_model(rille.preset("tiny").replace(vocab_size=300))
engine = rille.Engine(model, num_pages=40)
engine.generate([[1, 2, 3] * 30], rille.SamplingParams(max_tokens=3))
loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "triton")
sys.exit(f"loaded: {loaded[:3]}" if loaded else 0)
"""


def test_a_cpu_loads_no_triton():
    """Its library takes 70 MiB and a second."""
    run = subprocess.run([sys.executable, "-c", RUNS_ON_A_CPU], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# --- afterwards -------------------------------------------------------------------------------------------------------


def test_memory_goes_back_once_when_nothing_has_run_for_a_while(monkeypatch):
    now, given = [0.0], []
    monkeypatch.setattr(resident, "perf_counter", lambda: now[0])
    monkeypatch.setattr(resident, "give_back", lambda: given.append(now[0]))
    rest = Rest()

    def pass_time(until, works):
        while now[0] < until:
            rest.worked() if works else rest.idle()
            now[0] += 0.5

    pass_time(20, False)
    assert given == [], "nothing was taken"
    pass_time(40, True)
    assert given == [], "steps run"
    pass_time(100, False)
    assert given == [39.5 + resident.IDLE_S]
    pass_time(101, True)
    pass_time(200, False)
    assert given == [39.5 + resident.IDLE_S, 100.5 + resident.IDLE_S]


def test_the_thread_that_steps_gives_back(model, monkeypatch):
    given = []
    monkeypatch.setattr(resident, "IDLE_S", 0.0)
    monkeypatch.setattr(resident, "give_back", lambda: given.append(True))
    served = engine(model)
    served.start()
    try:
        for count in (1, 2):
            served.generate([prompt(9)], GREEDY)
            until(lambda count=count: len(given) == count)
    finally:
        served.close()
    assert len(given) == 2


@needs_proc
@pytest.mark.skipif(resident._TRIM is None, reason="this C library keeps what was freed")
def test_what_was_freed_goes_back():
    """Pieces too small for mappings of their own, of which some stay, the last one too."""
    pieces = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(3000)]
    kept, many = pieces[::-50], resident_bytes()
    del pieces
    assert many - resident_bytes() < 50 << 20, "or there would be nothing to ask for"
    give_back()
    assert many - resident_bytes() > 100 << 20 and len(kept) == 60


def test_what_is_remembered_is_bounded_by_the_pool(model):
    served = engine(model, num_pages=20, max_length=400, poison=False)
    store, size = served.scheduler.cache.store, served.pages.bytes.numel()
    most = count_remembered(size)
    assert most >= 20 and most * BOUNDARY_BYTES <= size / 16, "at least what the pool holds"
    for seed in range(most // 4 + 10):
        served.generate([prompt(64 * 5 + 1, seed=seed)], SamplingParams(max_tokens=1))
    assert len(store._seen) == most and len(store._ends) <= most
    assert count_remembered(1 << 40) == REMEMBERED


def test_few_kernels_are_kept_unless_told_otherwise(monkeypatch):
    first, *others = KEPT
    monkeypatch.setenv(first, "7")
    for name in others:
        monkeypatch.delenv(name, raising=False)
    keep_few_kernels()
    assert {name: os.environ[name] for name in KEPT} == {**KEPT, first: "7"}


CONVOLVES = """
import ctypes, sys
from rille import cli
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f used free g".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
assert cli.main(["serve", "nowhere"]) == 2
import torch
weight = torch.ones(96, 1, 4)
def used_after(lengths):
    for length in lengths:
        torch.nn.functional.conv1d(torch.ones(1, 96, length), weight, groups=96)
    return libc.mallinfo2().used
before = used_after(range(100, 200))
print((used_after(range(200, 600)) - before) >> 10)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc what is in use")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_convolutions_of_many_lengths_are_not_all_kept():
    env = {name: value for name, value in os.environ.items() if name not in KEPT}
    run = subprocess.run([sys.executable, "-c", CONVOLVES], capture_output=True, text=True, env=env)
    assert run.returncode == 0 and int(run.stdout.split()[-1]) < 1024, (run.stdout, run.stderr)
