"""Work on a second stream: the same results, and memory that is safe."""

import pytest
import torch

from rille.model.beside import beside, in_line


def test_off_the_gpu_work_is_done_at_once():
    done = []
    x = torch.ones(2, 3)
    wait = beside(lambda: done.append(1) or x * 2, x)
    assert done == [1] and torch.equal(wait(), x * 2)


@pytest.mark.gpu
def test_results_and_memory_hold_under_load():
    """Each round frees and takes memory on both streams; a result written over too early would differ."""
    x, w = torch.randn(64, 512, device="cuda"), torch.randn(512, 512, device="cuda") / 23
    expected = x.clone()
    for _ in range(50):
        expected = expected @ w + (expected @ w).sin()
    for _ in range(20):
        y = x.clone()
        with torch.no_grad():
            for _ in range(50):
                wait = beside(lambda y=y: (y @ w).sin(), y)
                y = y @ w + wait()
        torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_a_recording_holds_both_branches():
    x, w = torch.randn(8, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        beside(lambda: x @ w, x)()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            wait = beside(lambda: (x @ w).relu(), x)
            y = x @ w + wait()
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, x @ w + (x @ w).relu())


@pytest.mark.gpu
def test_with_gradients_work_stays_on_its_stream():
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    streams = []
    beside(lambda: streams.append(torch.cuda.current_stream()) or x * 2, x)()
    assert streams == [torch.cuda.current_stream()]


@pytest.mark.gpu
def test_in_line_work_stays_on_its_stream():
    x, streams = torch.randn(8, 64, device="cuda"), []
    with torch.no_grad():
        for _ in range(2):
            with in_line():
                beside(lambda: streams.append(torch.cuda.current_stream()) or x * 2, x)()
            beside(lambda: streams.append(torch.cuda.current_stream()) or x * 2, x)()
    here = torch.cuda.current_stream()
    assert [stream == here for stream in streams] == [True, False, True, False]
