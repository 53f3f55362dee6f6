"""MLA decoding from the paged cache on one GPU: the part "latents" of `mla.py`.

The gate has sequences of one to three new tokens, queries of 4 to 96 heads, pages in and out of step with blocks, 8-bit
rows, and a sequence alone and in a batch, bit for bit; whatever no sequence owns is NaN. Times come out of a CUDA
graph. The floor reads each cached row once, at the speed of a copy measured in the same run.
"""

from __future__ import annotations

from typing import Any

import torch
from mla_report import Report, attempted, copy_speed, distance, replayed

from rille.ops.mla import LatentCache, decode_launch, latent_attention
from rille.packing import Packing

K, R, LATENT, PAGE, CONTEXT = 192, 576, 512, 64, 32768
BF16 = torch.bfloat16
DECODE = [(32, 1, 4), (32, 1, 16), (32, 1, 24), (32, 1, 96), (32, 4, 16), (32, 4, 96), (1, 1, 16), (1, 1, 96)]


def caches(totals: list[int], page: int, narrow: bool = False) -> LatentCache:
    """Filled at random in pages out of order; what no sequence owns is NaN."""
    each = [-(-n // page) for n in totals]
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(sum(each) + 1, generator=generator)
    table = torch.zeros(len(totals), max(each), dtype=torch.int64)
    first = 0
    for s, count in enumerate(each):
        table[s, :count] = order[first : first + count]
        first += count
    kind = torch.float8_e4m3fn if narrow else BF16
    pool = torch.full((sum(each) + 1, page, R), torch.nan, device="cuda", dtype=BF16).to(kind)
    scales = torch.full((sum(each) + 1, page), torch.nan, device="cuda") if narrow else None
    cache = LatentCache(pool, table.to("cuda"), scales)
    for s, total in enumerate(totals):
        rows = torch.randn(total, R, device="cuda").to(BF16)
        LatentCache(pool, cache.table[s : s + 1], scales).write(rows, Packing.of([total], device="cuda"))
    return cache


def gate_latents(report: Report) -> None:
    lengths, consumed = [1, 3, 0, 1, 2], [2500, 1022, 70, 63, 5]
    for H, page, narrow in [(4, 64, False), (16, 64, False), (24, 48, False), (96, 64, False), (16, 64, True)]:
        cache = caches([a + b for a, b in zip(lengths, consumed, strict=True)], page, narrow)
        packing = Packing.of(lengths, consumed, device="cuda")
        q = torch.randn(sum(lengths), H, R, device="cuda").to(BF16)
        got = latent_attention(q, cache, packing, K**-0.5, LATENT, backend="triton")
        want = latent_attention(q.double(), cache, packing, K**-0.5, LATENT, backend="torch")
        report.gate(f"latents H{H} page {page}{' e4m3' if narrow else ''}", 1e-2, o=distance(got, want))
    single = Packing.of([1] * 5, [2500, 1022, 69, 63, 5], device="cuda")
    q = torch.randn(5, 16, R, device="cuda").to(BF16)
    cache = caches([2501, 1023, 70, 64, 6], 64)
    together = latent_attention(q, cache, single, K**-0.5, LATENT, backend="triton")
    for s in range(5):
        one = LatentCache(cache.pool, cache.table[s : s + 1])
        alone = Packing.of([1], [single.consumed[s]], device="cuda")
        got = latent_attention(q[s : s + 1], one, alone, K**-0.5, LATENT, backend="triton")
        report.gate(
            f"latents: sequence {s} alone and in a batch", 0.0, o=(got - together[s : s + 1]).abs().max().item()
        )


def gate_latent_gluon(report: Report) -> None:
    """The kernels in Gluon and their twin against float64, and two runs bit for bit: several tiles, tokens, splits; the
    table's tail and pages' ends are NaN."""
    many = [1, 3, 0, 1, 2, 40], [9000, 4094, 70, 63, 5, 31]
    few = [1, 3, 0, 1, 2], [5000, 2046, 70, 63, 6000]
    single = [1, 1, 0, 1, 1], [5000, 2046, 70, 63, 6000]
    for H, page, (new, old) in ((4, 64, few), (8, 192, few), (24, 64, single), (96, 64, many), (40, 192, many)):
        cache = caches([a + b for a, b in zip(new, old, strict=True)], page)
        packing = Packing.of(new, old, device="cuda")
        q = torch.randn(sum(new), H, R, device="cuda").to(BF16)
        want = latent_attention(q.double(), cache, packing, K**-0.5, LATENT, backend="torch")
        for gluon in (False, True):
            decode_launch.PARTS = decode_launch.STREAM = gluon
            got, again = (latent_attention(q, cache, packing, K**-0.5, LATENT, backend="triton") for _ in "12")
            assert torch.equal(got, again), "two runs differ"
            report.gate(f"latents H{H} page {page} {'Gluon' if gluon else 'Triton'}", 1e-2, o=distance(got, want))


def time_latent_gluon(report: Report) -> None:
    """Gluon beside the twin, at two lengths of a split each."""
    speed = copy_speed()
    cache = caches([CONTEXT] * 32, PAGE)
    chosen = decode_launch.plan
    for B, tokens, H in [(32, 1, 4), (32, 1, 16), (32, 1, 24), (1, 1, 16), (32, 1, 96), (32, 4, 96), (32, 4, 16)]:
        one = LatentCache(cache.pool, cache.table[:B])
        decode_launch.PARTS = decode_launch.STREAM = False
        latents_row(report, speed, one, B, tokens, H, "Triton")
        decode_launch.PARTS = decode_launch.STREAM = True
        p = chosen(H, tokens, CONTEXT, False)
        for SPLIT in (1024, 2048) if p.FEW else (2048, 4096):
            other = p._replace(SPLIT=SPLIT)
            decode_launch.plan = lambda *_, other=other: other
            latents_row(report, speed, one, B, tokens, H, f"Gluon {SPLIT}")
        decode_launch.plan = chosen


def time_latents(report: Report, variants: bool) -> None:
    speed = copy_speed()
    report.add(copy=speed * 1e-9)
    cache = caches([CONTEXT] * 32, PAGE)
    for B, tokens, H in DECODE:
        one = LatentCache(cache.pool, cache.table[:B])
        latents_row(report, speed, one, B, tokens, H, "")
        if variants and B == 32 and tokens == 1 and H in (16, 96):
            chosen = decode_launch.plan
            p = chosen(H, tokens, CONTEXT, False)
            for other in latent_variants(p):
                decode_launch.plan = lambda *_, other=other: other
                latents_row(report, speed, one, B, tokens, H, str(tuple(other)))
            decode_launch.plan = chosen
    del cache, one
    torch.cuda.empty_cache()
    cache = caches([CONTEXT] * 32, PAGE, narrow=True)
    for H in (16, 96):
        latents_row(report, speed, cache, 32, 1, H, "e4m3")


def latent_variants(p: decode_launch.Plan) -> list[decode_launch.Plan]:
    if p.FEW:
        return [p._replace(SPLIT=2048), p._replace(warps=8)]
    return [p._replace(SPLIT=4096)]


def latents_row(report: Report, speed: float, cache: LatentCache, B: int, tokens: int, H: int, note: str) -> None:
    packing = Packing.of([tokens] * B, [CONTEXT - tokens] * B, device="cuda")
    q = torch.randn(B * tokens, H, R, device="cuda").to(BF16)
    call = lambda: latent_attention(q, cache, packing, K**-0.5, LATENT, backend="triton")  # noqa: E731
    with torch.no_grad():
        ms = attempted(lambda: replayed(call))
    row: dict[str, Any] = dict(decode=f"B{B} k{tokens} H{H}", note=note, ms=ms)
    if isinstance(ms, float):
        size = B * CONTEXT * (R * cache.pool.element_size() + (0 if cache.scales is None else 4))
        row |= {"TB/s": size / ms * 1e-9, "of copy": size / ms / speed}
        row["TFLOPs"] = 2.0 * B * tokens * H * CONTEXT * (R + LATENT) / ms * 1e-9
    report.add(**row)
