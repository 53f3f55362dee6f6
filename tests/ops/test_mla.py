"""MLA attention: packed sequences and the paged latent cache against one query row at a time, poison around them."""

import pytest
import torch
from torch import Tensor

from rille.ops.mla import LatentCache, attention, largest_logits, latent_attention, mixed_values, reference
from rille.ops.mla.values import in_two
from rille.packing import Packing

LENGTHS = [(1,), (0, 1, 0), (63,), (1, 15, 0, 17, 15, 1, 64, 15), (16, 16, 16), (65, 0, 130, 2, 65)]
WIDTHS = [(24, 16), (8, 8), (5, 7)]  # keys wider than values, as in MLA; equal; narrower
H = 3


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_qkv(N: int, K: int, V: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [draw(N, H, width, dtype=dtype, seed=seed) for seed, width in enumerate((K, K, V))]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_attention_equals_the_reference_with_gradients(lengths: tuple[int, ...], widths: tuple[int, int]) -> None:
    packing, results = Packing.of(lengths), []
    for function in (attention, reference.attention):
        inputs = [tensor.requires_grad_() for tensor in draw_qkv(sum(lengths), *widths)]
        out = function(*inputs, packing, 0.3)
        assert out.shape == (sum(lengths), H, widths[1])
        results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_is_fp32_of_the_given_operands(dtype: torch.dtype) -> None:
    """Low-precision operands lose nothing on the way: only the fp32 arithmetic (65 terms, values of size 3) errs."""
    packing, qkv = Packing.of([63, 2, 65]), draw_qkv(130, 24, 16, dtype)
    got = attention(*qkv, packing, 0.2)
    exact = reference.attention(*(tensor.double() for tensor in qkv), packing, 0.2)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=64 * 2**-24 * 3)


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_tokens(lengths: tuple[int, ...]) -> None:
    assert attention(*draw_qkv(0, 24, 16), Packing.of(lengths), 0.3).shape == (0, H, 16)


@pytest.mark.parametrize("size", [1, 50])
def test_future_and_other_sequences_do_not_reach_a_row(size: int) -> None:
    q, k, v = draw_qkv(4 + 6 * size, 8, 4)
    packing = Packing.of([4, 3 * size, 3 * size])
    clean = attention(q, k, v, packing, 0.3)
    changed, third = slice(4 + 2 * size, 4 + 3 * size), slice(4 + 3 * size, None)
    k[changed], v[changed] = 50 * k[changed], 50 * v[changed]  # the last third of the second sequence
    k[third], v[third], q[third] = torch.nan, torch.nan, torch.nan
    got = attention(q, k, v, packing, 0.3)
    assert torch.equal(got[: changed.start], clean[: changed.start])
    assert not torch.isclose(got[changed], clean[changed]).all(-1).any() and torch.isnan(got[third]).all()


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    q, k, v = draw_qkv(270, 24, 16, torch.float32)
    spans = [slice(0, 20), slice(20, 120), slice(120, 140), slice(140, 240), slice(240, 270)]
    packed = attention(q, k, v, Packing.of([20, 100, 20, 100, 30]), 0.2)
    alone = [attention(q[span], k[span], v[span], Packing.of([span.stop - span.start]), 0.2) for span in spans]
    assert torch.equal(packed, torch.cat(alone))


class Sequences:
    """Five sequences in a poisoned pool whose pages are dealt out of order, and the rows that each should hold."""

    def __init__(self, R: int = 10, dtype: torch.dtype = torch.float64, page_rows: int = 4):
        generator = torch.Generator().manual_seed(5)
        backing = torch.full((40, 3, page_rows, R), torch.nan, dtype=dtype)
        table = torch.randperm(40, generator=generator)[:35].view(5, 7)
        self.cache = LatentCache(backing[:, 1], table)  # a view: axis 0 strides over another pool's pages
        self.rows: list[Tensor] = [torch.empty(0, R, dtype=dtype) for _ in range(5)]
        self.generator = generator

    def write(self, lengths: list[int]) -> Packing:
        packing = Packing.of(lengths, [len(rows) for rows in self.rows])
        R, dtype = self.cache.pool.shape[-1], self.cache.pool.dtype
        new = torch.randn(sum(lengths), R, generator=self.generator, dtype=torch.float64).to(dtype)
        self.cache.write(new, packing)
        self.rows = [torch.cat(pair) for pair in zip(self.rows, new.split(lengths), strict=True)]
        return packing


BATCHES = [[3, 0, 1, 9, 5], [1, 1, 1, 1, 1], [0, 7, 2, 0, 12], [1, 0, 0, 1, 1]]


def test_cache_returns_what_was_written_and_nothing_else() -> None:
    sequences = Sequences()
    for lengths in BATCHES:
        sequences.write(lengths)
        for s, rows in enumerate(sequences.rows):
            assert torch.equal(sequences.cache.gather(s, len(rows)), rows)
    held = sum(len(rows) for rows in sequences.rows)
    assert int(torch.isfinite(sequences.cache.pool).all(-1).sum()) == held, "a row outside the sequences was written"


@pytest.mark.parametrize("value_width", [7, 10])
def test_latent_attention_equals_the_reference(value_width: int) -> None:
    sequences = Sequences()
    for lengths in BATCHES:
        packing = sequences.write(lengths)
        q = draw(packing.num_tokens, H, 10)
        got = latent_attention(q, sequences.cache, packing, 0.3, value_width)
        want = reference.latent_attention(q, sequences.rows, packing, 0.3, value_width)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_latent_attention_does_not_see_the_future_of_its_own_batch() -> None:
    sequences = Sequences()
    packing = sequences.write([6, 0, 0, 0, 0])
    q = draw(6, H, 10)
    clean = latent_attention(q, sequences.cache, packing, 0.3, 7)
    # A masked score must be -inf, not q times the future row: rows 4 and 5 hold numbers that would take all the weight.
    sequences.cache.write(1e6 * torch.ones(2, 10, dtype=torch.float64), Packing.of([2, 0, 0, 0, 0], [4, 0, 0, 0, 0]))
    assert torch.equal(latent_attention(q, sequences.cache, packing, 0.3, 7)[:4], clean[:4])


def test_absorbed_equals_expanded() -> None:
    """k = [W_k c | shared], v = W_v c: the query absorbs W_k, the output W_v, and both ways give the same attention."""
    R, K, shared, V, lengths = 6, 5, 4, 3, [9, 1, 4]
    packing = Packing.of(lengths)
    rows, up_k, up_v = draw(14, R + shared), draw(H, K, R, seed=1), draw(H, V, R, seed=2)
    q = draw(14, H, K + shared, seed=3)
    latent, key = rows[:, :R], rows[:, None, R:].expand(-1, H, -1)
    k = torch.cat([torch.einsum("hkr,nr->nhk", up_k, latent), key], -1)
    expanded = attention(q, k, torch.einsum("hvr,nr->nhv", up_v, latent), packing, 0.3)
    pool = torch.full((10, 4, R + shared), torch.nan, dtype=torch.float64)
    cache = LatentCache(pool, torch.tensor([[7, 1, 3], [2, 0, 0], [9, 8, 0]]))
    cache.write(rows, packing)
    absorbed = torch.cat([torch.einsum("nhk,hkr->nhr", q[..., :K], up_k), q[..., K:]], -1)
    mixed = latent_attention(absorbed, cache, packing, 0.3, R)
    torch.testing.assert_close(torch.einsum("nhr,hvr->nhv", mixed, up_v), expanded, rtol=0, atol=1e-13)


def test_low_precision_cache_is_read_in_fp32() -> None:
    sequences = Sequences(dtype=torch.bfloat16)
    packing = sequences.write([20, 3, 1, 0, 28])
    q = draw(packing.num_tokens, H, 10, dtype=torch.bfloat16)
    got = latent_attention(q, sequences.cache, packing, 0.3, 7)
    exact = reference.latent_attention(q.double(), [rows.double() for rows in sequences.rows], packing, 0.3, 7)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=64 * 2**-24 * 3)


def test_user_mistakes() -> None:
    q, k, v = draw_qkv(6, 8, 4)
    with pytest.raises(ValueError, match="history"):
        attention(q, k, v, Packing.of([6], [2]), 0.3)
    with pytest.raises(ValueError, match="for 5 tokens"):
        attention(q, k, v, Packing.of([5]), 0.3)
    with pytest.raises(ValueError, match="float32"):
        attention(q, k.float(), v, Packing.of([6]), 0.3)
    cache = LatentCache(torch.zeros(4, 4, 8), torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="9 tokens does not fit 2 pages of 4"):
        cache.write(torch.zeros(1, 8), Packing.of([1], [8]))
    with pytest.raises(ValueError, match="1 rows for 2 sequences"):
        latent_attention(torch.zeros(2, H, 8), cache, Packing.of([1, 1]), 0.3, 4)
    with pytest.raises(ValueError, match="value_width 9"):
        latent_attention(torch.zeros(1, H, 8), cache, Packing.of([1]), 0.3, 9)


@pytest.mark.parametrize("lengths", [[5], [1, 0, 63], [600, 15]])
def test_largest_logits(lengths: list[int]):
    """Against the score matrix of each sequence, written out; later keys and other sequences must not count."""
    packing, generator = Packing.of(lengths), torch.Generator().manual_seed(len(lengths))
    q, k = (torch.randn(sum(lengths), 3, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    expected = torch.full((3,), -torch.inf, dtype=torch.float64)
    for one_q, one_k in zip(q.split(lengths), k.split(lengths), strict=True):
        for n in range(len(one_q)):
            scores = 0.3 * torch.einsum("hk,mhk->hm", one_q[n], one_k[: n + 1])
            expected = torch.maximum(expected, scores.amax(1))
    assert torch.allclose(largest_logits(q, k, packing, 0.3), expected, rtol=1e-13)
    assert largest_logits(q.bfloat16(), k.bfloat16(), packing, 0.3).dtype == torch.float32


def test_largest_logits_of_nothing_and_of_history():
    empty = torch.zeros(0, 2, 4)
    assert largest_logits(empty, empty, Packing.of([0]), 1.0).tolist() == [-torch.inf] * 2
    with pytest.raises(ValueError, match=r"history of \(3,\)"):
        largest_logits(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), Packing.of([1], [3]), 1.0)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float16, 21)])
def test_mixtures_in_two_parts(dtype: torch.dtype, bits: int) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    large, small = in_two(x, dtype)
    assert large.dtype == small.dtype == dtype
    error = (large.double() + small.double() - x.double()).abs()
    assert (error <= 2.0**-bits * x.abs().double() + 2.0**-25).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_of_mixtures(dtype: torch.dtype) -> None:
    """On a GPU with weights of 16 bits in two parts; with gradients, and everywhere else, in one product."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mixed = torch.float64 if dtype == torch.float64 else torch.float32
    o = torch.randn(5, 3, 64, device=device).to(mixed)
    up = torch.randn(3, 48, 64, device=device).to(dtype)[:, 16:]
    want, bound = (torch.einsum("nhr,hvr->nhv", f(o.double()), f(up.double())) for f in (torch.clone, torch.abs))
    for gradients in (False, True):
        got = mixed_values(o.requires_grad_(gradients), up)
        assert got.dtype == mixed and got.requires_grad == gradients
        assert ((got.detach().double() - want).abs() <= 2.0**-15 * bound).all()
