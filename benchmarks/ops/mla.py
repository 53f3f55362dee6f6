"""MLA attention on one GPU: first right, then fast, beside PyTorch's kernels and the bytes and products that must be.

    PYTHONPATH=. python3 benchmarks/ops/mla.py --out FOLDER [--part packed|latents] [--only WORD] [--no-variants]

Each part is a process of its own: a fault in one leaves the other's figures. The gates compare outputs and gradients
with float64 on the same card, two backward passes bit for bit, a sequence alone and in a batch bit for bit. Then times:
medians of `triton.testing.do_bench`, single kernels and decode out of a CUDA graph. "packed" is the causal form at
192 / 128 channels: PyTorch's backends forced by name and ours; TFLOP/s count half of the score matrix. "latents" is
decoding from a paged cache; its floor reads each cached row once, at the speed of a copy measured in the same run.
Variants are other block sizes. The tables come last; FOLDER/mla_*.json hold the numbers as far as a part came.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.errors import TritonError

from rille.ops.mla import LatentCache, attention, decode_launch, gated_attention, latent_attention, launch, library
from rille.ops.mla.tiles import Blocks, key_tiles, query_tiles
from rille.packing import Packing

K, V, R, LATENT, PAGE = 192, 128, 576, 512, 64
BF16 = torch.bfloat16
FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, AssertionError, TritonError)
MIXED = (1300, 547, 2048, 963, 271, 3063)
CASES = {
    "B4 T4096 H8": ((4096,) * 4, 8),
    "T8192 H16": ((8192,), 16),
    "mixed H16": (MIXED, 16),
    "T8192 H96": ((8192,), 96),
    "mixed H96": (MIXED, 96),
}
FORWARD = [Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 3)]
QUERIES = [Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 2)]
KEYS = [Blocks(128, 32, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2)]
DECODE = [(32, 1, 4), (32, 1, 16), (32, 1, 24), (32, 1, 96), (32, 4, 16), (32, 4, 96), (1, 1, 16), (1, 1, 96)]
CONTEXT = 32768


class Report:
    """Rows as they are measured, written at once."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.rows, self.failed, self.complete = path / f"mla_{part}.json", [], [], False
        self.started = time.time()
        self.versions = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d %H:%M")}
        self.versions |= {name: version(name) for name in ("torch", "triton")}

    def add(self, **row: Any) -> dict[str, Any]:
        self.rows.append(row)
        self.write()
        print(f"  {time.time() - self.started:4.0f} s ", *(f"{n} {shown(x)}" for n, x in row.items()), flush=True)
        return row

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        held = {"complete": self.complete, "failed": self.failed, "rows": self.rows}
        self.path.write_text(json.dumps({**self.versions, **held}, indent=1))

    def gate(self, name: str, limit: float, **errors: float) -> None:
        self.add(gate=name, **errors)
        self.failed += [
            f"{name}: {n} is off by {e:.2e}, at most {limit:.0e}" for n, e in errors.items() if not e <= limit
        ]


def shown(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def milliseconds(call: Callable[[], Any], rep: int = 50) -> float:
    return float(triton.testing.do_bench(call, warmup=10, rep=rep, return_mode="median"))


def replayed(call: Callable[[], Any], rep: int = 50) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return milliseconds(graph.replay, rep)


def attempted(call: Callable[[], float]) -> float | str:
    """What it measures, or the first line of why it cannot run."""
    try:
        return call()
    except FAULTS as fault:
        torch.cuda.empty_cache()
        return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:90]


def copy_speed() -> float:
    """Bytes read and written a millisecond by a device copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / milliseconds(lambda: target.copy_(source))


def draw(lengths: tuple[int, ...], H: int, k: int = K, v: int = V) -> tuple[list[Tensor], Packing]:
    torch.manual_seed(0)
    N = sum(lengths)
    tensors = [torch.randn(N, H, width, device="cuda").to(BF16).requires_grad_() for width in (k, k, v, v)]
    return tensors, Packing.of(lengths, device="cuda")


def gate_packed(report: Report) -> None:
    for lengths, H, k, v in [((300, 1, 0, 129, 700), 3, K, V), ((260, 5), 2, 96, 64)]:
        tensors, packing = draw(lengths, H, k, v)
        exact = [x.detach().double().requires_grad_() for x in tensors]
        weight = torch.randn(sum(lengths), H, v, device="cuda")
        for gated in (False, True):
            count = 4 if gated else 3
            form: Callable[..., Tensor] = gated_attention if gated else attention
            got = form(*tensors[:count], packing, k**-0.5, backend="triton")
            want = form(*exact[:count], packing, k**-0.5, backend="torch")
            grads = [torch.autograd.grad(got, tensors[:count], weight.to(got.dtype), retain_graph=True) for _ in "12"]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), "two backward passes differ"
            wanted = torch.autograd.grad(want, exact[:count], weight.to(got.dtype).double())
            errors = {n: distance(a, b) for n, a, b in zip(("dq", "dk", "dv", "dgate"), grads[0], wanted, strict=False)}
            report.gate(f"{lengths} {k}/{v}{' gated' if gated else ''}", 1e-2, o=distance(got, want), **errors)


def flops(lengths: tuple[int, ...], H: int) -> float:
    return sum(float(n) * n for n in lengths) * (K + V) * H


def peers(lengths: tuple[int, ...]) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """PyTorch's forms by name: (q, k, v, packing) to [N, H, V], or anything that autograd can start from."""
    scale = K**-0.5

    def forced(backend: SDPBackend, pad: bool) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
            v = F.pad(v, (0, K - V)) if pad else v
            q, k, v = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :V]

        return call

    def loop(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = [
                F.scaled_dot_product_attention(
                    *(x.transpose(0, 1)[None] for x in piece), is_causal=True, scale=scale
                )[0].transpose(0, 1)
                for piece in pieces
            ]  # fmt: skip
        return torch.cat(found)

    if len(set(lengths)) == 1:
        yield "sdpa cudnn", forced(SDPBackend.CUDNN_ATTENTION, False)
        yield "sdpa flash", forced(SDPBackend.FLASH_ATTENTION, False)
        yield "sdpa flash, v padded", forced(SDPBackend.FLASH_ATTENTION, True)
        yield "sdpa efficient", forced(SDPBackend.EFFICIENT_ATTENTION, False)
    else:
        yield "cudnn, a call a sequence", loop
        yield "cudnn varlen", lambda q, k, v, p: library.cudnn(q, k, v, p, scale)
    yield "flash varlen, v padded", lambda q, k, v, p: library.flash(q, k, v, p, scale)


def both_ways(call: Callable[[], Tensor], inputs: list[Tensor]) -> dict[str, float | str]:
    """Forward without gradients, and forward with backward through autograd."""

    def there() -> float:
        with torch.no_grad():
            return milliseconds(call)

    def and_back() -> float:
        out = call()
        weight = torch.randn_like(out)
        del out
        return milliseconds(lambda: torch.autograd.grad(call(), inputs, weight))

    forward = attempted(there)
    return {"forward": forward, "with backward": attempted(and_back) if isinstance(forward, float) else "-"}


def time_packed(report: Report, only: str, variants: bool) -> None:
    for name, (lengths, H) in CASES.items():
        if only in name:
            time_case(report, name, lengths, H)
            if variants and name in ("T8192 H16", "T8192 H96"):
                tensors, packing = draw(lengths, H)
                time_kernels(report, name, flops(lengths, H), *(x.detach() for x in tensors[:3]), packing)
            torch.cuda.empty_cache()


def time_case(report: Report, name: str, lengths: tuple[int, ...], H: int) -> None:
    (q, k, v, gate), packing = draw(lengths, H)
    work, scale = flops(lengths, H), K**-0.5
    forms = {peer: lambda call=call: call(q, k, v, packing) for peer, call in peers(lengths)}
    forms["ours fp32"] = lambda: attention(q, k, v, packing, scale, backend="triton")
    forms["ours bf16"] = lambda: attention(q, k, v, packing, scale, dtype=BF16, backend="triton")
    forms["ours gated"] = lambda: gated_attention(q, k, v, gate, packing, scale, backend="triton")
    for form, call in forms.items():
        timed(report, name, form, work, call, [q, k, v, gate] if form == "ours gated" else [q, k, v])


def timed(report: Report, case: str, name: str, work: float, call: Callable[[], Tensor], inputs: list[Tensor]) -> None:
    found = both_ways(call, inputs)
    forward = found["forward"]
    speed = work / forward * 1e-9 if isinstance(forward, float) else "-"
    report.add(case=case, form=name, **found, TFLOPs=speed)


def time_kernels(report: Report, case: str, work: float, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> None:
    """Each kernel alone with each of its block sizes; products of forward, dq, dk and dv: 2, 3 and 4 matrices."""
    scale, dtype = K**-0.5, torch.float32
    tiles = (query_tiles(packing, 128), query_tiles(packing, 128), key_tiles(packing, 128))
    o, _, lse = launch.forward_op(q, k, v, None, *tiles, packing.longest, scale, dtype, False)
    do, delta = launch.prepare(torch.randn_like(o), None, o, o, q.dtype)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    together = launch.heads_together(q.shape[1], packing.longest, 2 * (K + V) * 2)
    report.add(case=case, kernel="prepare", ms=replayed(lambda: launch.prepare(do, None, o, o, q.dtype)))

    def forward(b: Blocks) -> Any:
        rows = query_tiles(packing, b.own)
        return launch.forward_op(q, k, v, None, rows, rows, tiles[2], packing.longest, scale, dtype, False)

    def queries(b: Blocks) -> None:
        launch._of_queries(q, k, v, do, lse, delta, dq, query_tiles(packing, b.own), together, scale)

    def keys(b: Blocks) -> None:
        launch._of_keys(q, k, v, do, lse, delta, dk, dv, key_tiles(packing, b.own), together, scale)

    for constant, call, choices, amount in (
        ("FORWARD", forward, FORWARD, 1.0), ("QUERIES", queries, QUERIES, 1.6), ("KEYS", keys, KEYS, 2.0)
    ):  # fmt: skip
        chosen = getattr(launch, constant)
        for b in choices:
            setattr(launch, constant, b)
            ms = attempted(lambda call=call, b=b: replayed(lambda: call(b)))
            speed = amount * work / ms * 1e-9 if isinstance(ms, float) else "-"
            report.add(case=case, kernel=constant.lower(), blocks=list(b), ms=ms, TFLOPs=speed)
        setattr(launch, constant, chosen)


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
        return [p._replace(SPLIT=2048), p._replace(warps=4), p._replace(ROWS=64, FEW=False)]
    return [p._replace(SPLIT=4096), p._replace(stages=1)]


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


def print_tables(folder: Path) -> int:
    """The short tables, from what the parts have written; 1 where a gate failed or a part is missing."""
    broken = 0
    for part in ("packed", "latents"):
        path = folder / f"mla_{part}.json"
        if not path.exists():
            print(f"{part}: no figures")
            broken = 1
            continue
        report = json.loads(path.read_text())
        rows = [row for row in report["rows"] if "gate" not in row]
        print(f"\n{part}: {report['device']}, torch {report['torch']}, triton {report['triton']}; milliseconds")
        for row in rows:
            print(
                " ",
                *(f"{n} {shown(x)}" if n in ("ms", "TFLOPs", "of copy") else f"{shown(x):<24}" for n, x in row.items()),
            )
        print_ratios(rows)
        ended = "passed" if report["complete"] else "UNFINISHED: the part stopped before its end"
        print(f"gate of {part}:", "; ".join(report["failed"]) or ended)
        broken |= bool(report["failed"]) or not report["complete"]
    return broken


def print_ratios(rows: list[dict[str, Any]]) -> None:
    for case in dict.fromkeys(row["case"] for row in rows if "form" in row):
        for way in ("forward", "with backward"):
            found = {r["form"]: r[way] for r in rows if r.get("case") == case and isinstance(r.get(way), float)}
            theirs = {n: ms for n, ms in found.items() if not n.startswith("ours")}
            if theirs and "ours fp32" in found:
                best = min(theirs, key=theirs.__getitem__)
                print(f"  {case}, {way}: ours {found['ours fp32']:.3f}, {best} {theirs[best]:.3f}: "
                      f"{theirs[best] / found['ours fp32']:.2f}x")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--part", choices=["packed", "latents"])
    parser.add_argument("--only", default="", help="only packed cases with this word in their name")
    parser.add_argument("--no-variants", action="store_true")
    parser.add_argument("--seconds", type=float, default=100, help="limit of each part")
    options = parser.parse_args()
    if options.part is None:
        for part in ("latents", "packed"):
            try:
                subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", part], timeout=options.seconds)
            except subprocess.TimeoutExpired:
                print(f"{part}: stopped after {options.seconds:.0f} s", flush=True)
        return print_tables(options.out)
    report = Report(options.out, options.part)
    if options.part == "packed":
        gate_packed(report)
        time_packed(report, options.only, not options.no_variants)
    else:
        gate_latents(report)
        time_latents(report, not options.no_variants)
    report.complete = True
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
