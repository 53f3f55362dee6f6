"""The two-phase kernels of Attention Residuals on one GPU: a block of layers against the definition, and each kernel.

    PYTHONPATH=. python3 benchmarks/ops/attn_res_phases.py [--out FOLDER]

The gate comes first: all sites of a block in bf16 and fp32, values and gradients, against one phase in float64, beside
the error of the one-phase kernels, and twice bit for bit. Then medians of CUDA graphs, ms, each beside its floor: the
bytes that it must move at the speed of a copy of the same run. FOLDER/attn_res_phases.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attn_res import BF16, EPS, FP32, copy_speed, distance, timed
from torch import Tensor

from rille.ops.attn_res import attn_res_handed, phases, score_blocks, scored_site

# R finished blocks, Q sites, N tokens, D width: the last blocks of `nano` and of 24 layers in 4 blocks, nano's second.
TIMED = [(4, 6, 131072, 512), (2, 6, 131072, 512), (4, 12, 32768, 2048), (2, 24, 8192, 7168)]
GATE = [(4, 6, 1000, 512, BF16), (4, 12, 300, 2048, BF16), (2, 3, 130, 7168, BF16), (3, 4, 90, 770, FP32)]


def block_of_layers(
    R: int, Q: int, N: int, D: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Blocks and updates [N, D], each larger than the one before; queries, gains and norm gains [D], Q of each."""
    torch.manual_seed(R)
    rows = [torch.randn(N, D, device="cuda").mul_(2.0 ** (j / 2)).to(dtype) for j in range(R)]
    updates = [torch.randn(N, D, device="cuda").to(dtype) for _ in range(Q + 1)]
    scales = [D**-0.5] * Q + [1.0] * (2 * Q)
    return rows, updates, [torch.randn(D, device="cuda").mul_(scale).to(dtype) for scale in scales]


def outcomes(made: tuple[list[Tensor], ...], form: str, wide: bool = False) -> list[Tensor]:
    """What the sub-layers read, the last sum, and the gradients of everything."""
    rows, updates, weights = (
        [x.detach().to(torch.float64 if wide else x.dtype).requires_grad_() for x in xs] for xs in made
    )
    Q = len(weights) // 3
    queries, gains, norms = weights[:Q], weights[Q : 2 * Q], weights[2 * Q :]
    blocks, partial, outputs = rows, updates[0], []
    scored = score_blocks(blocks, queries, gains, EPS) if form == "two_phase" else None
    for q in range(Q):
        if scored is not None:
            x, partial = scored_site(scored, q, partial, updates[q + 1], norms[q])
        else:
            given = (updates[q + 1], queries[q], gains[q], norms[q], EPS)
            backend = "reference" if wide else "triton"
            x, (*blocks, partial) = attn_res_handed([*blocks, partial], *given, backend=backend)
        outputs.append(x)
    outputs.append(partial)
    g = torch.Generator("cuda").manual_seed(1)
    seeds = [torch.randn(out.shape, generator=g, device="cuda").to(made[0][0].dtype).to(out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [*rows, *updates, *weights], seeds)]


def check(R: int, Q: int, N: int, D: int, dtype: torch.dtype) -> list[tuple[str, float, float]]:
    """(what, largest relative error or difference, at most)"""
    made = block_of_layers(R, Q, N, D, dtype)
    two, again, one = (outcomes(made, form) for form in ("two_phase", "two_phase", "one_phase"))
    exact = outcomes(made, "one_phase", wide=True)
    limit = 3e-5 if dtype == FP32 else 2e-2
    label = f"R{R} Q{Q} N{N} D{D} {str(dtype)[6:]}"
    errors = [max(distance(a, b) for a, b in zip(found, exact, strict=True)) for found in (two, one)]
    twice = max((a.float() - b.float()).abs().max().item() for a, b in zip(two, again, strict=True))
    return [
        (label, errors[0], limit), (f"{label} one phase", errors[1], limit), (f"{label} twice", twice, 0.0),
    ]  # fmt: skip


def check_all() -> list[tuple[str, float, float]]:
    return [row for case in GATE for row in check(*case)]


def kernels(R: int, Q: int, N: int, D: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Each launch, and how many rows [N, D] it must move."""
    rows, updates, weights = block_of_layers(R, Q, N, D, BF16)
    w = torch.stack(weights[:Q]).float() * torch.stack(weights[Q : 2 * Q]).float()
    out, scores, roots, tops = phases.first_forward(rows, w, EPS)
    beside, d_tops, norm = [x.clone() for x in rows], torch.zeros_like(tops), weights[-1]
    p, y, x, d_out = updates[0], updates[1], out[0].clone(), updates[2]
    saved = phases.site_forward(p, y, x, tops[0], w[0], norm, EPS, True)[2]
    found: dict[str, tuple[Callable[[], Any], float]] = {
        "phase 1": (lambda: phases.first_forward(rows, w, EPS), R + Q),
        "site": (lambda: phases.site_forward(p, y, x, tops[0], w[0], norm, EPS, True), 5),
        "site backward": (lambda: phases.site_backward(d_out, y, p, x, w[0], norm, saved, EPS), 6),
    }
    found["phase 1 again"] = (lambda: phases.first_again(rows, scores, tops), R + Q)
    if phases.backward_plan(R, D, 2) is not None:
        given = (rows, beside, out, d_tops, w, scores, roots, tops, EPS)
        found["phase 1 backward"] = (lambda: phases.first_backward(*given), 4 * R + Q)
    return found


def measure(speed: float) -> list[dict[str, Any]]:
    rows = []
    for R, Q, N, D in TIMED:
        row: dict[str, Any] = {"work": f"R{R} Q{Q} N{N} D{D}"}
        with torch.no_grad():
            for name, (call, units) in kernels(R, Q, N, D).items():
                timed(row, name, call)
                row[f"{name} floor"] = units * N * D * 2 / speed
                print(f"  {row['work']:<24} {name:<18} {row[name]:.4f}  floor {row[f'{name} floor']:.4f}", flush=True)
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    gate = check_all()
    for what, error, limit in gate:
        print(f"  {'ok  ' if error <= limit else 'FAIL'} {what:<44} {error:.1e} (at most {limit:.0e})", flush=True)
    speed = copy_speed()
    report = {"gate": gate, "copy TB/s": speed * 1e-9, "rows": measure(speed)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attn_res_phases.json").write_text(json.dumps(report, indent=1))
    if any(not error <= limit for _, error, limit in gate):
        raise SystemExit("the gate failed")


if __name__ == "__main__":
    main()
