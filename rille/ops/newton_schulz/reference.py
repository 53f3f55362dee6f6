"""Newton-Schulz towards the polar factor, literally (Jordan 2024; Moonlight section 2.1):

    X_0 = M / (||M||_F + eps)        A = X X^T        X' = a X + (b A + c A^2) X        five times

M = U S V^T keeps its U and V; every singular value s in (0, 1] goes through p(s) = a s + b s^3 + c s^5. The
coefficients are chosen for slope at 0, not for convergence: after five steps each s >= 0.002 lies in [0.68, 1.21], and
X is close to the polar factor U V^T.

Axes: B matrices of P rows and Q columns.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(m_BPQ: Tensor, steps: int, eps: float) -> Tensor:
    """In m's own dtype, the norm included."""
    a, b, c = COEFFICIENTS
    x_BPQ = m_BPQ / (torch.linalg.matrix_norm(m_BPQ, keepdim=True) + eps)
    for _ in range(steps):
        a_BPP = x_BPQ @ x_BPQ.mT
        x_BPQ = a * x_BPQ + (b * a_BPP + c * a_BPP @ a_BPP) @ x_BPQ
    return x_BPQ
