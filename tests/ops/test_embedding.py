"""The embeddings' gradient against its definition in float64: words often, once, never; strides; repeats; refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.embedding import choose_backend, embed, reference

launch = pytest.importorskip("rille.ops.embedding.launch", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = launch.CHUNK


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def gradient(ids: Tensor, dy: Tensor, words: int, backend: str = "triton") -> Tensor:
    table = draw(words, dy.shape[1], dtype=dy.dtype).requires_grad_()
    out = embed(ids, table, backend=backend)
    assert torch.equal(out, table[ids.long()])
    return torch.autograd.grad(out, table, dy)[0]


def zipf(N: int, words: int) -> list[int]:
    """A few words often, most of them seldom."""
    u = torch.rand(N, generator=torch.Generator().manual_seed(N))
    return ((words ** u.double() - 1) / (words - 1) * words).long().clamp(max=words - 1).tolist()


BATCHES = {
    "none": [],
    "one": [3],
    "all the same": [5] * (5 * C + 1),
    "all different": list(range(3 * C))[::-1],
    "whole chunks": [2] * C + [1] * 2 * C + [0] * C,
    "begins and ends inside": [1] * (C - 1) + [4] * 2 * C + [6] * (C + 2),
    "one place over": [1] * C + [2],
    "alternating": [7, 1] * 2 * C,
    "text": zipf(12 * C - 1, 30),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_is_the_definition(name: str, backend: str) -> None:
    ids = torch.tensor(BATCHES[name], dtype=torch.int64, device=DEVICE)
    words = 1 + max([*BATCHES[name], 30])
    dy = draw(len(ids), 20)
    got, want = gradient(ids, dy, words, backend), reference.gradient(dy.double(), ids, words)
    assert got.dtype == dy.dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert not got[torch.bincount(ids, minlength=words) == 0].any()


@pytest.mark.parametrize("D", [1, 33, 1100])
def test_widths(D: int) -> None:
    ids = torch.tensor(zipf(3 * C, 9), device=DEVICE)
    dy = draw(len(ids), D)
    want = reference.gradient(dy.double(), ids, 9)
    torch.testing.assert_close(gradient(ids, dy, 9).double(), want, rtol=1e-6, atol=1e-6)


def test_sums_are_fp32() -> None:
    """In bf16, 1 + 2^-9 stays 1 however often it is added; the interpreter truncates the last cast, no more."""
    ids = torch.zeros(2 * C + 1, dtype=torch.int64, device=DEVICE)
    dy = torch.full((len(ids), 3), 2.0**-9, dtype=torch.bfloat16, device=DEVICE)
    dy[0] = 1.0
    want = torch.full((3,), 1 + 2 * C * 2.0**-9)
    assert (gradient(ids, dy, 2)[0].float().cpu() - want).abs().max() <= 2.0**-7


def test_repeats_and_does_not_depend_on_the_rest_of_the_table() -> None:
    ids = torch.tensor(zipf(9 * C, 12), device=DEVICE)
    dy = draw(len(ids), 8)
    first = gradient(ids, dy, 12)
    assert torch.equal(first, gradient(ids, dy, 12)) and torch.equal(first, gradient(ids.int(), dy, 40)[:12])


def test_nan_stays_with_its_word() -> None:
    ids = torch.tensor(zipf(9 * C, 12), device=DEVICE)
    dy = draw(len(ids), 8)
    sick = dy.clone()
    sick[ids == 2] = torch.nan
    got, want = gradient(ids, sick, 12), gradient(ids, dy, 12)
    keep = torch.arange(12, device=DEVICE) != 2
    assert got[2].isnan().all() and torch.equal(got[keep], want[keep])


def test_gradients_that_lie_apart() -> None:
    ids, both = torch.tensor(zipf(3 * C, 9), device=DEVICE), draw(3 * C, 24)
    assert torch.equal(gradient(ids, both[:, :16], 9), gradient(ids, both[:, :16].contiguous(), 9))
    across = draw(16, 3 * C).t()
    assert torch.equal(gradient(ids, across, 9), gradient(ids, across.contiguous(), 9))


def test_one_table_twice() -> None:
    """Tied: the same table embeds and scores, and both gradients arrive."""
    ids, table = torch.tensor([1, 4, 1], device=DEVICE), draw(6, 5).requires_grad_()
    grads = [
        torch.autograd.grad((embed(ids, table, backend=name) @ table.t()).sin().sum(), table)[0]
        for name in ("triton", "torch")
    ]
    torch.testing.assert_close(*grads)


def test_one_graph() -> None:
    ids, table = torch.tensor([1, 4, 1], device=DEVICE), draw(6, 5).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: embed(ids, t, backend="triton").sin().sum(), fullgraph=True, backend="aot_eager")
    (got,), (want,) = (
        torch.autograd.grad(call(table), table) for call in (compiled, lambda t: embed(ids, t).sin().sum())
    )
    torch.testing.assert_close(got, want)


def test_ops_are_registered_whole() -> None:
    checks, ids = ("test_schema", "test_faketensor"), torch.tensor([1, 0], device=DEVICE)
    torch.library.opcheck(launch.embed.registered, (ids, draw(3, 4)), test_utils=checks)
    torch.library.opcheck(launch.embed_backward.registered, (draw(2, 4), ids, 3), test_utils=checks)


def test_choice_and_refusal() -> None:
    ids, table = torch.tensor([1], device=DEVICE), draw(3, 4)
    name, reason = choose_backend(table)
    assert reason and name == ("triton" if DEVICE == "cuda" else "torch")
    with pytest.raises(ValueError, match="unknown backend 'fast'; there are triton, torch"):
        embed(ids, table, backend="fast")
    with pytest.raises(ValueError, match="float64"):
        embed(ids, table.double(), backend="triton")
    with pytest.raises(ValueError, match=r"want \[N\] and \[W, D\]"):
        embed(ids[None], table)
