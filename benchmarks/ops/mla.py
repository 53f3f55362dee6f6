"""MLA attention on one GPU: first right, then fast, beside PyTorch's kernels and the bytes and products that must be.

    PYTHONPATH=. python3 benchmarks/ops/mla.py --out FOLDER [--part NAME] [--only WORD] [--form WORD]
        [--no-variants]

Each part is a process of its own: a fault in one leaves the other's figures. The gates compare outputs and gradients
with float64 on the same card, two backward passes bit for bit, a sequence alone and in a batch bit for bit. Then times:
medians of `triton.testing.do_bench`, single kernels and decode out of a CUDA graph. "packed" is the causal form at
192 / 128 channels: PyTorch's backends forced by name and ours; TFLOP/s count half of the score matrix. "latents" is
decoding from a paged cache; its floor reads each cached row once, at the speed of a copy measured in the same run.
"rings" and "latent_gluon" are the kernels in Gluon beside their twins.
Variants are other block sizes. The tables come last; FOLDER/mla_*.json hold the numbers as far as a part came.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mla_latents import gate_latent_gluon, gate_latents, time_latent_gluon, time_latents
from mla_report import Report, attempted, distance, milliseconds, print_tables, replayed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rille.ops.mla import attention, gated_attention, launch, library
from rille.ops.mla.tiles import Blocks, key_tiles, query_tiles
from rille.packing import Packing

K, V = 192, 128
BF16 = torch.bfloat16
PARTS = ("latents", "packed", "rings", "latent_gluon")
MIXED = (1300, 547, 2048, 963, 271, 3063)
CASES = {
    "B4 T4096 H8": ((4096,) * 4, 8),
    "T8192 H16": ((8192,), 16),
    "mixed H16": (MIXED, 16),
    "T8192 H96": ((8192,), 96),
    "mixed H96": (MIXED, 96),
}
FORWARD = [Blocks(128, 64, 8, 3), Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 2)]
QUERIES = [Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 3)]
KEYS = [Blocks(128, 32, 8, 2), Blocks(128, 32, 8, 3), Blocks(128, 16, 8, 4)]


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


def gate_rings(report: Report) -> None:
    """The forward kernel in Gluon against its twin: both round the same weights, at other maxima. The last sequence is
    NaN throughout."""
    for lengths, H, k, v in [((300, 1, 0, 129, 700), 3, K, V), ((2048, 127), 2, 128, 128), ((700, 1), 2, 96, 64)]:
        (q, key, value, gate), packing = draw(lengths, H, k, v)
        kept = sum(lengths[:-1])
        for x in (q, key, value, gate):
            x.detach()[kept:] = torch.nan
        for gated in (False, True):
            form: Callable[..., Tensor] = gated_attention if gated else attention
            inputs = [q, key, value, gate] if gated else [q, key, value]
            results = []
            for rings in (False, True):
                launch.RINGS = launch.KEY_RINGS = rings
                out = form(*inputs, packing, k**-0.5, backend="triton")
                grads = torch.autograd.grad(out[:kept].float().square().sum(), inputs)
                results.append([x[:kept] for x in (out, *grads)])
            names = ("o", "dq", "dk", "dv", "dgate")
            errors = {n: distance(b, a) for n, a, b in zip(names, *results, strict=False)}
            report.gate(f"rings {lengths} {k}/{v}{' gated' if gated else ''}", 1e-2, **errors)


def time_rings(report: Report, only: str) -> None:
    """Beside the twin and PyTorch's best in the same process."""
    for name, (lengths, H) in CASES.items():
        if only in name:
            (q, k, v, gate), packing = draw(lengths, H)
            for rings in (False, True):
                launch.RINGS = rings
                form = "Gluon" if rings else "Triton"
                for kind, dtype in (("fp32", torch.float32), ("bf16", BF16)):
                    call = lambda dtype=dtype: attention(q, k, v, packing, K**-0.5, dtype=dtype, backend="triton")  # noqa: E731, B023
                    forward_row(report, name, f"{form} {kind}", lengths, H, call)
                call = lambda: gated_attention(q, k, v, gate, packing, K**-0.5, backend="triton")  # noqa: E731, B023
                forward_row(report, name, f"{form} gated", lengths, H, call)
            time_keys(report, name, lengths, H, q.detach(), k.detach(), v.detach(), packing)
            for peer, call in peers(lengths):
                if "cudnn" in peer and "boundaries" not in peer:
                    forward_row(report, name, peer, lengths, H, lambda call=call: call(q, k, v, packing))  # noqa: B023


def time_keys(
    report: Report, case: str, lengths: tuple[int, ...], H: int, q: Tensor, k: Tensor, v: Tensor, packing: Packing
) -> None:
    do, lse, delta = torch.randn_like(v), *torch.rand(2, H, len(q), device="cuda") + 8
    dk, dv, tiles = torch.empty_like(k), torch.empty_like(v), key_tiles(packing, 128)
    together = launch.heads_together(H, packing.longest, 2 * (K + V) * 2)
    for rings in (False, True):
        launch.KEY_RINGS = rings
        call = lambda: launch._of_keys(q, k, v, do, lse, delta, dk, dv, tiles, together, K**-0.5)  # noqa: E731
        ms = attempted(lambda call=call: replayed(call))
        speed = 2 * flops(lengths, H) / ms * 1e-9 if isinstance(ms, float) else "-"
        report.add(case=case, kernel=f"keys {'Gluon' if rings else 'Triton'}", ms=ms, TFLOPs=speed)


def forward_row(
    report: Report, case: str, kernel: str, lengths: tuple[int, ...], H: int, call: Callable[[], Tensor]
) -> None:
    with torch.no_grad():
        ms = attempted(lambda: replayed(call))
    report.add(case=case, kernel=kernel, ms=ms, TFLOPs=flops(lengths, H) / ms * 1e-9 if isinstance(ms, float) else "-")


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

    def by_boundaries(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        call, most, starts = torch.ops.aten._cudnn_attention_forward, packing.longest, packing.starts
        return call(q, k, v, None, starts, starts, most, most, True, 0.0, True, False, scale=scale)[0]

    if len(set(lengths)) == 1:
        yield "sdpa cudnn", forced(SDPBackend.CUDNN_ATTENTION, False)
        yield "sdpa flash", forced(SDPBackend.FLASH_ATTENTION, False)
        yield "sdpa flash, v padded", forced(SDPBackend.FLASH_ATTENTION, True)
        yield "sdpa efficient", forced(SDPBackend.EFFICIENT_ATTENTION, False)
    else:
        yield "cudnn, a call a sequence", lambda q, k, v, p: library.cudnn(q, k, v, p, scale)
        yield "cudnn by boundaries", by_boundaries
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


def time_packed(report: Report, only: str, form: str, variants: bool) -> None:
    for name, (lengths, H) in CASES.items():
        if only in name:
            time_case(report, name, lengths, H, form)
            if variants and name in ("T8192 H16", "T8192 H96"):
                tensors, packing = draw(lengths, H)
                time_kernels(report, name, flops(lengths, H), *(x.detach() for x in tensors[:3]), packing)
            torch.cuda.empty_cache()


def time_case(report: Report, name: str, lengths: tuple[int, ...], H: int, wanted: str) -> None:
    (q, k, v, gate), packing = draw(lengths, H)
    work, scale = flops(lengths, H), K**-0.5
    forms = {peer: lambda call=call: call(q, k, v, packing) for peer, call in peers(lengths)}
    forms["ours fp32"] = lambda: attention(q, k, v, packing, scale, backend="triton")
    forms["ours bf16"] = lambda: attention(q, k, v, packing, scale, dtype=BF16, backend="triton")
    forms["cudnn gated"] = lambda: gated_attention(q, k, v, gate, packing, scale, backend="cudnn")
    forms["ours gated"] = lambda: gated_attention(q, k, v, gate, packing, scale, backend="triton")
    for form, call in forms.items():
        if wanted in form:
            timed(report, name, form, work, call, [q, k, v, gate] if "gated" in form else [q, k, v])


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


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--only", default="", help="only packed cases with this word in their name")
    parser.add_argument("--form", default="", help="only packed forms with this word in their name")
    parser.add_argument("--no-variants", action="store_true")
    parser.add_argument("--seconds", type=float, default=100, help="limit of each part")
    options = parser.parse_args()
    if options.part is None:
        for part in PARTS:
            try:
                subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", part], timeout=options.seconds)
            except subprocess.TimeoutExpired:
                print(f"{part}: stopped after {options.seconds:.0f} s", flush=True)
        return print_tables(options.out, PARTS)
    report = Report(options.out, options.part)
    if options.part == "packed":
        gate_packed(report)
        time_packed(report, options.only, options.form, not options.no_variants)
    elif options.part == "rings":
        gate_rings(report)
        time_rings(report, options.only)
    elif options.part == "latent_gluon":
        gate_latent_gluon(report)
        time_latent_gluon(report)
    else:
        gate_latents(report)
        time_latents(report, not options.no_variants)
    report.complete = True
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
