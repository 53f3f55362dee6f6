"""The convolution's kernels against the reference, in the interpreter or on a GPU."""

import pytest
import torch

from rille.ops.conv import PooledTail, TailPlaces, choose_backend, short_conv
from rille.packing import Packing

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [[1, 15, 16, 17, 2, 3, 0, 40], [0, 0, 5], [1], [1, 1, 1, 1], [131], [4, 4, 4, 120, 0, 4], [0]]


def make(lengths, C=24, W=4, dtype=torch.float32, seed=0, **grad):
    g = torch.Generator().manual_seed(seed)
    packing = Packing.of(lengths, device=DEVICE)
    x_NC = torch.randn(sum(lengths), C, generator=g).to(DEVICE, dtype).requires_grad_(**grad)
    weight_CW = (torch.randn(C, W, generator=g) * 0.5).to(DEVICE).requires_grad_(**grad)
    tail_SPC = torch.randn(len(lengths), W - 1, C, generator=g).to(DEVICE, dtype).requires_grad_(**grad)
    return packing, x_NC, weight_CW, tail_SPC


@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_forward(lengths, with_tail):
    packing, x, weight, tail = make(lengths, requires_grad=False)
    tail = tail if with_tail else None
    got, want = (short_conv(x, weight, packing, tail, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=0)


def gradients(packing, x, weight, tail, backend, final: bool):
    """Gradients of a sum with fixed random weights of y and, where asked, of the final tails."""
    y, end = short_conv(x, weight, packing, tail, backend=backend)
    g = torch.Generator().manual_seed(9)
    total = (y * torch.randn(y.shape, generator=g).to(y)).sum()
    if final:
        total = total + (end * torch.randn(end.shape, generator=g).to(end)).sum()
    inputs = [x, weight] if tail is None else [x, weight, tail]
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_backward(lengths, with_tail, final):
    packing, x, weight, tail = make(lengths, requires_grad=True)
    tail = tail if with_tail else None
    got, want = (gradients(packing, x, weight, tail, name, final) for name in ("triton", "reference"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("W", [1, 2, 3])
def test_taps(W):
    packing, x, weight, tail = make([3, 1, 0, 9], W=W, requires_grad=True)
    for name in ("triton", "reference"):
        y, final = short_conv(x, weight, packing, tail, backend=name)
        assert final.shape == (4, W - 1, 24)
    got, want = (short_conv(x, weight, packing, tail, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(got, want)
    got, want = (gradients(packing, x, weight, tail, name, True) for name in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_blocks_of_rows_and_channels():
    """More rows and channels than one program has."""
    packing, x, weight, tail = make([150, 7, 200], C=520, requires_grad=True)
    got, want = (short_conv(x, weight, packing, tail, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(got, want)
    got, want = (gradients(packing, x, weight, tail, name, True) for name in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_pool_in_place():
    packing, x, weight, tail = make([5, 0, 1, 2], requires_grad=False)
    slots = torch.tensor([4, 0, 2, 5], device=DEVICE)
    pools = []
    for _ in range(2):
        pool = torch.full((6, 2, 3, 24), float("nan"), device=DEVICE)[:, 1]
        pool[slots] = tail
        pools.append(pool)
    got, _ = short_conv(x, weight, packing, PooledTail(pools[0], slots), backend="triton")
    want, _ = short_conv(x, weight, packing, PooledTail(pools[1], slots), backend="reference")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(pools[0], pools[1], rtol=0, atol=0, equal_nan=True)


def test_tails_on_the_way():
    """Kept before the kernels move the old ones on."""
    packing, x, weight, tail = make([1, 0, 40, 2], dtype=torch.bfloat16, requires_grad=False)
    slots, kept = torch.tensor([3, 0, 8, 5], device=DEVICE), torch.tensor([1, 7, 2, 6, 4], device=DEVICE)
    pools = [torch.full((9, 3, 24), float("nan"), dtype=x.dtype, device=DEVICE) for _ in range(2)]
    places, outputs = TailPlaces.of(packing, [[1], [], [1, 16, 40], [1]], 4), []
    for name, pool in zip(("triton", "reference"), pools, strict=True):
        pool[slots] = tail
        outputs.append(short_conv(x, weight, packing, PooledTail(pool, slots, places, kept), backend=name)[0])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*pools, rtol=0, atol=0)
    want = [torch.cat([tail[0], x[:1]]), torch.cat([tail[2], x[1:2]]), x[:17], x[:41], torch.cat([tail[3], x[41:42]])]
    assert torch.equal(pools[0][kept], torch.stack([rows[-3:] for rows in want]))


def test_pool_with_a_gradient():
    packing, x, weight, tail = make([5, 2], requires_grad=True)
    slots, grads = torch.tensor([1, 0], device=DEVICE), []
    for name in ("triton", "reference"):
        pool = tail.detach().clone()
        y, _ = short_conv(x, weight, packing, PooledTail(pool, slots), backend=name)
        grads.append((*torch.autograd.grad(y.square().sum(), [x, weight]), pool))
    torch.testing.assert_close(grads[0], grads[1])


def test_nan_stays_in_its_sequence():
    packing, x, weight, tail = make([6, 5, 7], requires_grad=True)
    with torch.no_grad():
        x[6:11] = float("nan")
        tail[1] = float("nan")
    y, _ = short_conv(x, weight, packing, tail, backend="triton")
    (dx,) = torch.autograd.grad(y.sum(), [x])
    clean = torch.ones(18, dtype=torch.bool, device=DEVICE)
    clean[6:11] = False
    assert y[clean].isfinite().all() and dx[clean].isfinite().all()
    assert y[~clean].isnan().all()


def test_rows_apart_and_bf16():
    packing, x, weight, tail = make([6, 5, 7], dtype=torch.bfloat16, requires_grad=False)
    wide = torch.cat([x, x], 1)[:, :24]
    got, want = (short_conv(a, weight, packing, tail, backend=n)[0] for a, n in ((wide, "triton"), (x, "reference")))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3)


def test_gradient_has_the_same_bits_twice():
    packing, x, weight, tail = make([70, 90], requires_grad=True)
    first, second = (gradients(packing, x, weight, tail, "triton", True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_backends():
    packing, x, weight, tail = make([4], W=5, requires_grad=False)
    with pytest.raises(ValueError, match="at most 4 taps, the weight has 5"):
        short_conv(x, weight, packing, tail, backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        short_conv(x, weight, packing, tail, backend="cuda")
    assert choose_backend(x, weight)[0] == "reference"


def test_more_tokens_than_a_grid_has_programs():
    from rille.ops import conv
    from rille.ops.conv import launch

    assert conv.MOST_TOKENS == 65_535 * launch.FORWARD_ROWS
    weight = torch.zeros(8, 4, device=DEVICE)
    assert conv.obstacle(torch.zeros(1, 8, device=DEVICE).expand(conv.MOST_TOKENS, 8), weight) is None
    reason = conv.obstacle(torch.zeros(1, 8, device=DEVICE).expand(conv.MOST_TOKENS + 1, 8), weight)
    assert reason == "the kernels take at most 2,097,120 tokens at once, not 2,097,121"


def test_compiles_as_one_op():
    packing, x, weight, tail = make([4, 9], requires_grad=True)
    from rille.ops.conv import launch

    arguments = (x, weight, packing.starts, packing.sequence_of, tail)
    torch.library.opcheck(launch.short_conv.registered, arguments, test_utils=("test_schema", "test_faketensor"))
