"""The tokens of a recorded step: the kernel against plain PyTorch."""

import pytest
import torch

from rille.ops.embedding import step_tokens

pytest.importorskip("triton")


def compare(S, T, device):
    draw = torch.Generator().manual_seed(S + T)
    given = [torch.randint(0, 99, shape, generator=draw).to(device) for shape in ((S, T), (S,), (40,), (S,))]
    given[1] = given[1] % 41 - 1
    found = []
    for backend in ("triton", "torch"):
        history = torch.full((S,), -7, dtype=torch.int32, device=device)
        places = torch.full((S * T,), -7, dtype=torch.int64, device=device)
        ids = step_tokens(*given, history, places, backend=backend)
        assert torch.equal(step_tokens(*given, history, backend=backend), ids)
        found.append((ids, history, places))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the interpreter runs")
@pytest.mark.parametrize("S, T", [(1, 1), (9, 1), (5, 4), (3, 5)])
def test_the_kernel_says_what_plain_pytorch_says(S, T):
    compare(S, T, "cpu")


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match="unknown backend"):
        step_tokens(*[torch.zeros(1, 1)] * 5, backend="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("S, T", [(1, 1), (64, 1), (64, 5)])
def test_on_a_gpu(S, T):
    compare(S, T, "cuda")
