"""Newton-Schulz with the sums inside the batched products, in two forms.

    plain    A = X X^T        B = b A + c A^2        X' = a X + B X                 4 P^2 Q + 2 P^3 FLOPs a step

    Gram     A_0 = X X^T once;  per step  B = a I + b A + c A^2,  T' = B T,  A' = B A B;  at the end  X' = T X

The Gram form is the plain one written for T, X_k = T_k X_0: everything but its first and last product is P x P. B is a
polynomial of A, so the two commute and A' = (B X)(B X)^T = B A B. It pays where matrices are wide (README).

A rounding error e in A may make a small eigenvalue negative, and each step multiplies it by up to a^2 = 12 until B has
nothing to do with A any more. So A is made anew from X after `RUN` steps; the last A of a run is off by 12^(RUN - 1) e:
0.02 in bf16 (e = 2^-9), 9e-6 in fp32 (e = 2^-24), 2e-12 in float64.

Tall matrices keep their place in memory: there A = X^T X and X' = a X + X B, P and Q exchanged in all of the above.

Axes: B matrices of P rows and Q columns.
"""

import torch
from torch import Tensor

from rille.ops.newton_schulz.reference import COEFFICIENTS

RUN = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 3, torch.float64: 5}


def plain(x_BPQ: Tensor, steps: int) -> Tensor:
    """x scaled to a spectral norm of at most 1."""
    a, b, c = COEFFICIENTS
    tall = x_BPQ.shape[1] > x_BPQ.shape[2]
    for _ in range(steps):
        a_BPP = square(x_BPQ)
        b_BPP = torch.baddbmm(a_BPP, a_BPP, a_BPP, beta=b, alpha=c)
        x_BPQ = torch.baddbmm(x_BPQ, *((x_BPQ, b_BPP) if tall else (b_BPP, x_BPQ)), beta=a)
    return x_BPQ


def gram(x_BPQ: Tensor, steps: int) -> Tensor:
    """x scaled to a spectral norm of at most 1."""
    run, tall = RUN[x_BPQ.dtype], x_BPQ.shape[1] > x_BPQ.shape[2]
    for done in range(0, steps, run):
        t_BPP = transform(square(x_BPQ), min(run, steps - done))
        x_BPQ = x_BPQ @ t_BPP if tall else t_BPP @ x_BPQ
    return x_BPQ


def square(x_BPQ: Tensor) -> Tensor:
    """A, of the shorter side."""
    return x_BPQ.mT @ x_BPQ if x_BPQ.shape[1] > x_BPQ.shape[2] else x_BPQ @ x_BPQ.mT


def transform(a_BPP: Tensor, steps: int) -> Tensor:
    """T with X_steps = T X, from A = X X^T."""
    a, b, c = COEFFICIENTS
    t_BPP = None
    for step in range(steps):
        b_BPP = torch.baddbmm(a_BPP, a_BPP, a_BPP, beta=b, alpha=c)
        b_BPP.diagonal(dim1=1, dim2=2).add_(a)
        t_BPP = b_BPP if t_BPP is None else b_BPP @ t_BPP
        if step + 1 < steps:
            a_BPP = b_BPP @ a_BPP @ b_BPP
    assert t_BPP is not None
    return t_BPP
