"""Products of a few rows: the kernel against PyTorch."""

import pytest
import torch

from rille.ops import linear as products
from rille.ops.linear import is_few, linear, linear_onto, normed_linear_onto, norms_on_its_way, wide_linear
from rille.ops.norm import rms_norm

pytest.importorskip("triton")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the interpreter runs")


def draw(N, width, seed=0):
    """Rows that lie apart, NaN beside them."""
    wide = torch.full((N, width + 9), torch.nan)
    wide[:, 4:-5] = torch.randn(N, width, generator=torch.Generator().manual_seed(N + width + seed))
    return wide[:, 4:-5]


SIZES = [(1, 5, 16), (3, 40, 33), (4, 9, 100), (2, 70, 512), (1, 7, 2100), (9, 40, 33), (20, 33, 130), (64, 16, 16)]


@on_cpu
@pytest.mark.parametrize("N, C, D", SIZES)
def test_products_are_those_of_pytorch(N, C, D):
    x, w, onto = draw(N, D), draw(C, D, 1).contiguous(), draw(N, C, 2)
    exact = x.double() @ w.double().t()
    for got, want in (
        (linear(x, w, backend="triton"), exact),
        (linear_onto(x, w, onto, backend="triton"), exact + onto),
    ):
        assert got.shape == (N, C) and got.dtype == x.dtype
        assert (got.double() - want).abs().max() <= 2e-6 * want.abs().max()
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))  # what a CPU does by itself
    assert torch.equal(linear_onto(x, w, onto), torch.nn.functional.linear(x, w) + onto)


@on_cpu
@pytest.mark.parametrize("N, C, D", SIZES[:4])
def test_rows_are_normed_on_their_way(N, C, D):
    x, w, onto, gain = draw(N, D), draw(C, D, 1).contiguous(), draw(N, C, 2), draw(1, D, 3)[0].contiguous()
    got = normed_linear_onto(x, gain, 1e-5, w, onto, backend="triton")
    want = rms_norm(x.double(), gain.double(), 1e-5) @ w.double().t() + onto
    assert (got.double() - want).abs().max() <= 3e-6 * want.abs().max()
    assert torch.equal(normed_linear_onto(x, gain, 1e-5, w, onto), linear_onto(rms_norm(x, gain, 1e-5), w, onto))


@on_cpu
def test_a_row_has_the_same_bits_alone_and_among_others():
    for N, few in ((4, 1), (40, 9)):
        x, w = draw(N, 48), draw(20, 48, 1).contiguous()
        together = linear(x, w, backend="triton")
        for n in (0, 2, N - few):
            torch.testing.assert_close(
                linear(x[n : n + few], w, backend="triton")[0], together[n], atol=1e-6, rtol=1e-6
            )
        x[3, 7] = torch.nan
        others = torch.arange(N) != 3
        got = linear(x, w, backend="triton")
        assert torch.equal(got[others], together[others]) and got[3].isnan().all()


def test_what_cannot_run_says_why():
    x, w = draw(3, 16), draw(5, 16).contiguous()
    assert not is_few(x, w)
    for wrong, reason in (
        ((draw(129, 16), w), "do not take"),
        ((draw(9, 600), draw(5, 600).contiguous()), "do not take"),
        ((draw(2, 2100), draw(5, 2100).contiguous()), "do not take"),
        ((x, w.double()), "alike"),
        ((x, draw(5, 16)), "dense weights"),
        ((x, w.requires_grad_()), "no gradient"),
    ):
        with pytest.raises(ValueError, match=f"{reason}|tensors are on"):
            linear(*wrong, backend="triton")
    with pytest.raises(ValueError, match="unknown backend"):
        linear(x, w, backend="fast")
    linear(x, w).sum().backward()
    assert w.grad is not None


ON_A_GPU = [(1, 2704, 512), (3, 512, 256), (4, 512, 896), (1, 32768, 512), (4, 64, 48)]
ON_A_GPU += [(5, 512, 128), (64, 512, 512), (128, 256, 512), (64, 768, 256), (33, 64, 48)]


@pytest.mark.gpu
@pytest.mark.parametrize("N, C, D", ON_A_GPU)
def test_on_a_gpu_in_bf16(monkeypatch, N, C, D):
    """Bits do not depend on the rows beside, as long as they are as few or as many."""
    monkeypatch.setattr(products, "tiles_pay", lambda: True)
    x, w, onto = (t.cuda().bfloat16() for t in (draw(N, D), draw(C, D, 1).contiguous() / D**0.5, draw(N, C, 2)))
    exact = x.double() @ w.double().t()
    with torch.no_grad():
        assert is_few(x, w)
        found = [(linear(x, w), exact), (linear_onto(x, w, onto), exact + onto.double()), (wide_linear(x, w), exact)]
        few = 1 if N <= 4 else 5
        assert torch.equal(linear(x[N - few :], w), found[0][0][N - few :])
    for got, want in found:
        limit = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
        assert (got.double() - want).norm() <= limit * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 4])
def test_rows_are_rounded_and_normed_on_their_way_on_a_gpu(N):
    x, gain = draw(N, 256).cuda(), torch.linspace(0.5, 1.5, 256, device="cuda").bfloat16()
    w, onto = (t.cuda().bfloat16() for t in (draw(512, 256, 1).contiguous() / 16, draw(N, 512, 2)))
    with torch.no_grad():
        assert norms_on_its_way(x.bfloat16(), w, gain)
        got = normed_linear_onto(x, gain, 1e-5, w, onto)
        want = rms_norm(x.bfloat16(), gain, 1e-5).double() @ w.double().t() + onto.double()
    assert (got.double() - want).norm() <= 2**-8 * want.norm()
