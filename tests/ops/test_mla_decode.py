"""The kernels over the paged latent cache against one query row at a time: pages, splits, poison, 8-bit rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.mla import LatentCache, choose_latent_backend, latent_attention, reference
from rille.packing import Packing

launch = pytest.importorskip("rille.ops.mla.decode_launch", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = DEVICE == "cpu"
DTYPE = torch.float32 if EXACT else torch.bfloat16
ATOL = 64 * 2**-24 if EXACT else 2e-2  # fp32 scores and sums of values up to 4; 16-bit weights


class Batch:
    """Sequences in a poisoned pool with pages dealt out of order. The table's unused entries are no pages at all."""

    def __init__(
        self, lengths: list[int], consumed: list[int], H: int = 3, R: int = 48, page_rows: int = 64, scales: int = 0,
        seed: int = 0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        totals = [a + b for a, b in zip(lengths, consumed, strict=True)]
        each = [-(-n // page_rows) for n in totals]
        pages = sum(each) + 2
        deal = iter(torch.randperm(pages, generator=generator).tolist())
        table = torch.full((len(lengths), max(each) + 1), -(10**9))
        for s, count in enumerate(each):
            table[s, :count] = torch.tensor([next(deal) for _ in range(count)], dtype=torch.int64)
        kind = torch.float8_e4m3fn if scales else DTYPE
        pool = torch.full((pages, 2, page_rows, R), torch.nan).to(DEVICE, kind)[:, 1]
        factors = torch.full((pages, scales), 0.01 if scales == 1 else torch.nan, device=DEVICE) if scales else None
        self.cache = LatentCache(pool, table.to(DEVICE), factors)
        rows = torch.randn(sum(totals), R, generator=generator).to(DEVICE, DTYPE)
        self.cache.write(rows, Packing.of(totals, device=DEVICE))
        self.rows = [self.cache.gather(s, total) for s, total in enumerate(totals)]
        self.packing, self.scale = Packing.of(lengths, consumed, device=DEVICE), R**-0.5
        self.q = torch.randn(sum(lengths), H, R, generator=generator).to(DEVICE, DTYPE)

    def got(self, value_width: int) -> Tensor:
        return latent_attention(self.q, self.cache, self.packing, self.scale, value_width, backend="triton")

    def want(self, value_width: int) -> Tensor:
        rows = [x.double() for x in self.rows]
        return reference.latent_attention(self.q.double(), rows, self.packing, self.scale, value_width)

    def check(self, value_width: int = 32) -> None:
        got = self.got(value_width)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), self.want(value_width), rtol=0, atol=ATOL)


@pytest.mark.parametrize("page_rows", [4, 48, 64, 128])
@pytest.mark.parametrize("H", [3, 20, 40])
def test_one_token_each(page_rows: int, H: int) -> None:
    Batch([1, 1, 0, 1, 1, 1], [0, 63, 7, 64, 65, 300], H, page_rows=page_rows).check()


@pytest.mark.parametrize("H", [3, 24])
def test_several_tokens_each_see_one_another_in_order(H: int) -> None:
    Batch([4, 1, 0, 3, 2], [0, 62, 7, 126, 1023], H).check()


@pytest.mark.parametrize("H", [2, 17])
def test_more_than_one_split(H: int) -> None:
    """Splits that end inside a sequence, at its end, and one that only the last of several tokens sees."""
    Batch([1, 3, 2, 1], [2500, 2046, 1023, 1024], H).check()


def test_more_splits_than_are_joined_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "plan", lambda *_: launch.Plan(16, 64, True, 4))
    Batch([1, 2, 1], [700, 63, 511], 2).check()


def test_pages_at_odd_addresses() -> None:
    """A pool that begins and strides off multiples of 16 bytes: its rows are read one by one."""
    batch = Batch([1, 2], [70, 5])
    want, pool = batch.want(32), batch.cache.pool
    shifted = torch.full((pool.shape[0] * (pool[0].numel() + 1) + 1,), torch.nan, dtype=DTYPE, device=DEVICE)
    view = shifted[1:].as_strided(pool.shape, (pool[0].numel() + 1, pool.shape[2], 1))
    view.copy_(pool)
    batch.cache = LatentCache(view, batch.cache.table)
    assert not launch.fetchable(view)
    torch.testing.assert_close(batch.got(32).double(), want, rtol=0, atol=ATOL)


def test_chunks_of_a_prompt_beside_single_tokens() -> None:
    Batch([40, 1, 17, 16, 0, 130], [100, 200, 0, 30, 5, 1]).check()


@pytest.mark.parametrize(("R", "value_width"), [(576, 512), (320, 256), (64, 64), (48, 16), (96, 48)])
def test_widths(R: int, value_width: int) -> None:
    for H in (3, 40):
        Batch([1, 2], [70, 5], H, R).check(value_width)


@pytest.mark.parametrize("scales", [1, 64])
@pytest.mark.parametrize("H", [3, 40])
def test_rows_of_8_bits(scales: int, H: int) -> None:
    Batch([1, 2, 0], [70, 5, 1], H, scales=scales).check()
    Batch([1, 20], [1100, 3], H, page_rows=48, scales=1 if scales == 1 else 48).check()


def test_written_rows_of_8_bits() -> None:
    """A row comes back within half a unit of e4m3's last place (2^-4 of an element, 2^-10 of the largest / 448)."""
    pool = torch.empty(3, 8, 16, dtype=torch.float8_e4m3fn)
    cache = LatentCache(pool, torch.tensor([[2, 0]]), torch.full((3, 8), torch.nan))
    rows = torch.randn(11, 16, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-5.0, 6.0)[:, None]
    rows[3] = 0.0
    cache.write(rows, Packing.of([11]))
    bound = rows.abs() * 2**-4 + rows.abs().amax(-1, keepdim=True) / 448 * 2**-10
    got = cache.gather(0, 11)
    assert got.dtype == torch.float32 and ((got - rows).abs() <= bound).all()
    paged = LatentCache(pool, torch.tensor([[2, 0]]), torch.full((3, 1), 0.5))
    paged.write(torch.full((1, 16), 1e4), Packing.of([1]))
    assert torch.equal(paged.gather(0, 1), torch.full((1, 16), 224.0)), "values beyond the range are cut, not NaN"
    assert torch.equal(paged.scales, torch.full((3, 1), 0.5)) if paged.scales is not None else False


@pytest.mark.parametrize("H", [3, 40])
def test_a_sequence_does_not_depend_on_its_batch(H: int) -> None:
    """Bit for bit: alone, or beside longer ones and a chunk of a prompt."""
    batch = Batch([1, 1, 30, 2, 0], [2100, 40, 10, 1500, 9], H)
    together = batch.got(32)
    token = 0
    for s, (length, consumed) in enumerate(zip(batch.packing.lengths, batch.packing.consumed, strict=True)):
        if length in (1, 30):
            cache = LatentCache(batch.cache.pool, batch.cache.table[s : s + 1])
            one = Packing.of([length], [consumed], device=DEVICE)
            alone = latent_attention(batch.q[token : token + length], cache, one, batch.scale, 32, backend="triton")
            if launch.plan(H, length, 0, False).FEW == launch.plan(H, 2, 0, False).FEW or length == 30:
                assert torch.equal(alone, together[token : token + length])
        token += length


def test_plans_depend_on_heads_and_room_alone() -> None:
    assert launch.plan(16, 1, 32768, False) == launch.Plan(16, 2048, True, 4)
    assert launch.plan(24, 1, 32768, False) == launch.Plan(32, 2048, True, 4)
    assert launch.plan(96, 1, 32768, False) == launch.plan(96, 16, 100, False) == launch.Plan(64, 4096, False, 8)
    assert launch.plan(16, 4, 2**20, False) == launch.Plan(64, 16384, False, 8)
    assert launch.plan(8, 1, 4096, True).FEW is False
    assert launch.plan(96, 32, 2**20, False).SPLIT == launch.WHOLE_SEQUENCE


@pytest.mark.gpu
@pytest.mark.parametrize("page_rows", [64, 192])
@pytest.mark.parametrize("H", [40, 96])
def test_gluon_with_many_queries_equals_the_reference(H: int, page_rows: int) -> None:
    """Also bit for bit twice: a part of a block that is overwritten too early would show now and then."""
    batch = Batch([1, 3, 0, 1, 2, 40], [5000, 2046, 70, 63, 5, 31], H, 576, page_rows)
    assert launch.PARTS and not launch.without_gluon(batch.cache.pool, 512)
    batch.check(512)
    assert torch.equal(batch.got(512), batch.got(512))


@pytest.mark.gpu
@pytest.mark.parametrize("page_rows", [64, 192])
@pytest.mark.parametrize("H", [3, 8])
def test_gluon_with_few_queries_equals_the_reference(H: int, page_rows: int) -> None:
    batch = Batch([1, 3, 0, 1, 2], [5000, 2046, 70, 63, 6000], H, 576, page_rows)
    assert launch.STREAM and not launch.without_gluon(batch.cache.pool, 512)
    batch.check(512)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [3, 40])
def test_pages_that_gluon_does_not_take(H: int) -> None:
    batch = Batch([1, 3, 0, 1, 2], [5000, 2046, 70, 63, 5], H, 576, page_rows=32)
    assert "pages of 32 rows" in launch.without_gluon(batch.cache.pool, 512)
    batch.check(512)


def test_history_is_read_on_the_device() -> None:
    """What a captured launch replays: new lengths in the same tensors."""
    batch = Batch([1, 1], [70, 200])
    members = launch.classes(batch.packing)
    batch.packing.history.copy_(torch.tensor([69, 130], dtype=torch.int32))
    rows = [x.double() for x in batch.rows]
    want = reference.latent_attention(batch.q.double(), rows, Packing.of([1, 1], [69, 130]), batch.scale, 32)
    assert launch.classes(batch.packing) is members
    torch.testing.assert_close(batch.got(32).double(), want, rtol=0, atol=ATOL)


def test_op_is_registered_whole() -> None:
    batch = Batch([1, 1], [3, 5])
    ((tokens, members),) = launch.classes(batch.packing)
    p, cache = launch.plan(3, tokens, 128, False), batch.cache
    arguments = (
        batch.q, cache.pool, None, cache.table.clamp_min(0), batch.packing.starts, batch.packing.history, [members],
        [tokens], [int(n) for n in p], 32, 0.2,
    )  # fmt: skip
    cache.pool.nan_to_num_(0.0)  # the check compares arguments before and after, and NaN is not equal to itself
    torch.library.opcheck(launch.latent_op.registered, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiled_models_see_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the poisoned torch.empty, which cannot be traced
    batch = Batch([1, 1], [3, 70])
    want = batch.got(32)

    def form(q: Tensor) -> Tensor:
        return latent_attention(q, batch.cache, batch.packing, batch.scale, 32, backend="triton")

    assert torch.equal(torch.compile(form, backend="aot_eager", fullgraph=True)(batch.q), want)


def test_nothing_to_do() -> None:
    batch = Batch([0, 0], [3, 5])
    assert batch.got(32).shape == (0, 3, 32)


def test_choice_and_refusal() -> None:
    batch = Batch([1], [5])
    name, reason = choose_latent_backend(batch.q, batch.cache, 32, 0.2)
    assert reason and name == ("triton" if DEVICE == "cuda" else "torch")
    with pytest.raises(ValueError, match="unknown backend"):
        latent_attention(batch.q, batch.cache, batch.packing, 0.2, 32, backend="fast")
    with pytest.raises(ValueError, match=r"multiples of 16 .* not 31 \+ 17"):
        latent_attention(batch.q, batch.cache, batch.packing, 0.2, 31, backend="triton")
    with pytest.raises(ValueError, match="gradients"):
        latent_attention(batch.q.requires_grad_(), batch.cache, batch.packing, 0.2, 32, backend="triton")
    gaps = LatentCache(torch.zeros(2, 4, 2, 48, device=DEVICE, dtype=DTYPE)[:, :, 0], torch.tensor([[0, 1]]).to(DEVICE))
    with pytest.raises(ValueError, match="without gaps"):
        latent_attention(batch.q.detach(), gaps, batch.packing, 0.2, 32, backend="triton")
    with pytest.raises(ValueError, match="scales go with"):
        LatentCache(torch.zeros(2, 4, 8), torch.tensor([[0]]), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"scales \(2, 3\)"):
        LatentCache(torch.zeros(2, 4, 8).to(torch.float8_e4m3fn), torch.tensor([[0]]), torch.ones(2, 3))
