"""Blocks of 32 values under one power-of-two scale (OCP microscaling): scales, codes and packing on whole tensors.

    scale = 2^e with the smallest e such that max |w| <= largest * 2^e     largest = 6 (E2M1) or 448 (E4M3)
    code  = w / scale, rounded to nearest, ties to even
    value = code * scale

Rounding the scale up clips nothing: the released K3 weights follow this rule (the OCP rule, floor, would clip). The
exponent is read off the bits of max |w|, so no logarithm can round it wrongly.

Axes: I columns, J = I/2 bytes of codes, Q = I/32 groups, C = 32 columns of a group.
"""

import math

import torch
from torch import Tensor

GROUP = 32
BIAS = 127  # E8M0 holds e + 127
NOT_A_SCALE = 255  # E8M0's NaN
LARGEST_E2M1 = 6.0
LARGEST_E4M3 = 448.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = (*MAGNITUDES, *(-value for value in MAGNITUDES))
PAIRS = tuple((CODES[byte % 16], CODES[byte // 16]) for byte in range(256))


def grouped(w_I: Tensor) -> Tensor:
    """Groups [..., Q, C] in fp32 (float64 for float64)."""
    return w_I.to(torch.promote_types(w_I.dtype, torch.float32)).unflatten(-1, (-1, GROUP))


def scale_bytes(w_QC: Tensor, largest: float) -> Tensor:
    """E8M0 bytes [..., Q] by the rule: 0 (2^-127) also for anything smaller, zero too; 255 where no scale will do."""
    mantissa, exponent = math.frexp(largest)
    amax_Q = w_QC.abs().amax(-1)
    mantissa_Q, exponent_Q = torch.frexp(amax_Q)
    byte_Q = (exponent_Q - exponent + (mantissa_Q > mantissa) + BIAS).clamp(min=0)
    byte_Q = torch.where(amax_Q.isfinite() & (byte_Q < NOT_A_SCALE), byte_Q, NOT_A_SCALE)
    return torch.where(amax_Q == 0, 0, byte_Q).to(torch.uint8)


def scales(byte_Q: Tensor, dtype: torch.dtype) -> Tensor:
    """The powers of two [..., Q, 1] that the bytes stand for; NaN for 255."""
    return byte_Q.view(torch.float8_e8m0fnu).to(dtype).unsqueeze(-1)


def encode_e2m1(scaled: Tensor) -> Tensor:
    """Codes 0..15 of values within [-6, 6]. A midpoint between two magnitudes goes to the one of even index."""
    size = scaled.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5
    return code | (torch.signbit(scaled).to(torch.uint8) << 3)


def decode_e2m1(code: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(CODES, dtype=dtype, device=code.device)[code.int()]


def pack(code_I: Tensor) -> Tensor:
    """Bytes [..., J]: column 2j in the low nibble, column 2j + 1 in the high one."""
    return code_I[..., 0::2] | (code_I[..., 1::2] << 4)


def unpack_e2m1(packed_J: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., I] of packed codes: each byte looks up its pair."""
    pairs = torch.tensor(PAIRS, dtype=dtype, device=packed_J.device)
    return pairs.index_select(0, packed_J.reshape(-1).int()).view(*packed_J.shape[:-1], -1)
