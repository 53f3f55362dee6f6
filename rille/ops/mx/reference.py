"""MXFP4 by its definition: try every scale, measure every distance. Slow, float64, for tests.

A group is 32 consecutive values of the last axis; it shares one power of two and each value is one of the eight
magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign:

    scale = the smallest 2^e, -127 <= e <= 127, with max |w| <= 6 * 2^e      (e + 127 is stored: E8M0)
    code  = sign * 8 + the index of the magnitude nearest to |w| / scale     (a tie goes to the even index)
    byte j of a row = code of column 2j + 16 * code of column 2j + 1

Axes: I input columns, Q = I/32 groups, C = 32 columns of a group.
"""

import torch
from torch import Tensor

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
SCALES = 2.0 ** torch.arange(-127, 128, dtype=torch.float64)


def quantise_mxfp4(w_I: Tensor) -> tuple[Tensor, Tensor]:
    w_QC = w_I.double().unflatten(-1, (-1, 32))
    fits_QS = w_QC.abs().amax(-1, keepdim=True) <= 6 * SCALES
    byte_Q = fits_QS.int().argmax(-1)
    distance = (w_QC.abs() / SCALES[byte_Q].unsqueeze(-1)).unsqueeze(-1).sub(MAGNITUDES).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    code_QC = (nearest * (1 + even.int())).argmax(-1) + 8 * torch.signbit(w_QC)
    code_I = code_QC.flatten(-2)
    return (code_I[..., 0::2] + 16 * code_I[..., 1::2]).to(torch.uint8), byte_Q.to(torch.uint8)


def dequantise_mxfp4(packed: Tensor, byte_Q: Tensor) -> Tensor:
    """The values in float64, where every one of them is exact and finite."""
    code_I = torch.stack([packed % 16, packed // 16], -1).flatten(-2).long()
    value_QC = (MAGNITUDES[code_I % 8] * torch.where(code_I >= 8, -1.0, 1.0)).unflatten(-1, (-1, 32))
    return (value_QC * SCALES[byte_Q.long()].unsqueeze(-1)).flatten(-2)
