"""What stands around absorbed attention: the kernels in the interpreter against the same in plain PyTorch, and on a GPU
in bf16."""

import pytest
import torch

from rille.ops.mla import LatentCache, absorbed_queries, gated_values, store_rows
from rille.packing import Packing

pytest.importorskip("triton")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 runs in the interpreter alone")
NAN = torch.nan


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


class Layer:
    """Inputs of one layer: N tokens of sequences with some history, H heads, R latent and S shared channels, K key and
    V value channels, Q of the query's latent. Wider products hold them, with NaN beside."""

    def __init__(self, lengths, consumed, H=2, R=24, S=8, K=16, V=20, Q=40, device="cpu", dtype=torch.float32):
        N, page = sum(lengths), 8
        each = max(n + m for n, m in zip(lengths, consumed, strict=True)) // page + 1
        pages = each * len(lengths)
        to = dict(device=device, dtype=dtype)
        self.K, self.R = K, R
        self.product = torch.full((N, 8 + Q + R + S + H * V + 8), NAN).to(**to)
        self.product[:, 8:-8] = draw(N, Q + R + S + H * V).to(**to)
        self.first, self.both, gate = self.product[:, 8:-8].split([Q, R + S, H * V], dim=1)
        self.gate = gate.unflatten(1, (H, V))
        self.gains = (draw(R) + 1).to(**to), (draw(Q) + 1).to(**to)
        self.q = draw(N, H, K + S).to(**to)
        up = (draw(H, K + V, R) * R**-0.5).to(**to)
        self.key, self.value = up.split([K, V], dim=1)
        self.o = draw(N, H, R).to(device)
        self.packing = Packing.of(lengths, consumed, device)
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).view(len(lengths), -1)
        self.table = table.to(device)
        self.pages = torch.full((pages, page * (R + S) + 16), NAN).to(**to)

    def stored(self, backend, first=True):
        pages = self.pages.clone()
        pool = pages[:, 16:].unflatten(1, (8, -1))
        cache = LatentCache(pool, self.table)
        query = (self.first, self.gains[1]) if first else ()
        return store_rows(self.both, self.gains[0], 1e-5, cache, self.packing, *query, backend=backend), pages

    def compare(self, limit):
        for first in (True, False):
            (got, pages), (want, expected) = self.stored("triton", first), self.stored("torch", first)
            assert (got is None and want is None) if not first else close(got, want, limit)
            assert torch.equal(pages.isnan(), expected.isnan()) and close(
                pages.nan_to_num(), expected.nan_to_num(), limit
            )
        got, want = (absorbed_queries(self.q, self.key, backend=name) for name in ("triton", "torch"))
        assert close(got, want, limit)
        for gate in (self.gate, None):
            forms = (gated_values(self.o, self.value, gate, self.q.dtype, backend=name) for name in ("triton", "torch"))
            assert close(*forms, limit)


def close(got, want, limit):
    assert got.shape == want.shape and got.dtype == want.dtype and got.isfinite().all()
    return not got.numel() or (got - want).abs().max() <= limit * want.abs().max()


@on_cpu
@pytest.mark.parametrize("lengths, consumed", [([1], [0]), ([1, 1, 1], [5, 16, 30]), ([3, 0, 17], [7, 2, 8])])
@pytest.mark.parametrize("sizes", [{}, dict(H=3, R=32, S=16, K=24, V=33, Q=16)])
def test_the_kernels_say_what_plain_pytorch_says(lengths, consumed, sizes):
    Layer(lengths, consumed, **sizes).compare(2e-6)


@on_cpu
def test_values_of_wide_latents_step_by_step(monkeypatch):
    from rille.ops.mla import absorb_launch

    monkeypatch.setattr(absorb_launch, "value_step", lambda R: 16)
    Layer([3, 0, 17], [7, 2, 8], R=40).compare(2e-6)


@on_cpu
def test_gates_and_rows_that_are_no_numbers_stay_where_they_are():
    case = Layer([1] * 20, [3] * 20)
    clean = gated_values(case.o, case.value, case.gate, torch.float32, backend="triton")
    case.o[7], case.gate[11, 1, 3] = NAN, NAN
    got = gated_values(case.o, case.value, case.gate, torch.float32, backend="triton")
    wrong = got.isnan()
    assert wrong[7].all() and wrong[11, 1, 3] and int(wrong.sum()) == got[7].numel() + 1
    assert torch.equal(got[~wrong], clean[~wrong])


def test_what_cannot_run_says_why():
    case = Layer([1], [4])
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        absorbed_queries(case.q, case.key, backend="fast")
    with pytest.raises(ValueError, match="no gradient|tensors are on"):
        absorbed_queries(case.q.requires_grad_(), case.key, backend="triton")
    with pytest.raises(ValueError, match="needs? more pages|does not fit"):
        short = LatentCache(case.pages[:, 16:].unflatten(1, (8, -1)), case.table[:, :0])
        store_rows(case.both, case.gains[0], 1e-5, short, case.packing)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths, consumed", [([1], [70]), ([5], [3]), ([1] * 64, range(64)), ([320, 9], [3, 0])])
def test_on_a_gpu_in_bf16(lengths, consumed):
    """Sizes of nano; roundings come at the same places, sums differ in order."""
    sizes = dict(H=4, R=256, S=64, K=128, V=128, Q=256)
    Layer(lengths, consumed, **sizes, device="cuda", dtype=torch.bfloat16).compare(2**-6)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_alone_and_among_others():
    case = Layer([1] * 12, range(12), H=4, R=256, S=64, K=128, V=128, Q=256, device="cuda", dtype=torch.bfloat16)
    q, y = absorbed_queries(case.q, case.key), gated_values(case.o, case.value, case.gate, torch.bfloat16)
    for n in (0, 5, 11):
        row = slice(n, n + 1)
        assert torch.equal(absorbed_queries(case.q[row], case.key)[0], q[n])
        assert torch.equal(gated_values(case.o[row], case.value, case.gate[row], torch.bfloat16)[0], y[n])
