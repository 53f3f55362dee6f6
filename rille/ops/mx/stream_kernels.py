"""MXFP4 and MXFP8 in Triton: groups of 32 values under one power of two, read once and written once.

    byte  = the bits of max |w|, rounded up behind the mantissa of the largest element (1.5 or 1.75), less its exponent
    value = w 2^(127 - byte), rounded to nearest, ties to even

All on the bits: no logarithm and no division. Below the first normal element a value is rounded by adding a number so
large that its last bit is the grid's step.

Suffixes: G groups of a tile, C = 32 columns of a group, J = 16 bytes of codes.
"""

import triton
import triton.language as tl

FULL = tl.constexpr(0x7F800000)  # infinity; larger bits are NaN


@triton.jit
def tile_of(N_GROUPS, GROUPS: tl.constexpr):
    """Groups of this program, their values' places, and which of them there are."""
    g_G = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    c_C = tl.arange(0, 32)
    return g_G, g_G[:, None] * 32 + c_C[None, :], (g_G < N_GROUPS)[:, None] & (c_C < 32)[None, :]


@triton.jit
def bytes_of_scale(size_GC, FP8: tl.constexpr):
    """The rule's byte of each group from the bits of |w|; 255 where a value is not finite."""
    top_G = tl.max(size_GC, 1)
    byte_G = ((top_G + 0x1FFFFF) >> 23) - 8 if FP8 else ((top_G + 0x3FFFFF) >> 23) - 2
    return tl.where(top_G >= FULL, 255, tl.maximum(byte_G, 0))


@triton.jit
def scale_of(byte_G):
    """2^(byte - 127), NaN for 255; 2^-127 is no normal number."""
    bits_G = tl.where(byte_G == 0, 0x400000, byte_G << 23)
    return tl.where(byte_G == 255, 0x7FC00000, bits_G).to(tl.float32, bitcast=True)


@triton.jit
def to_grid(size_GC, byte_G, FP8: tl.constexpr):
    """The element nearest to |w| / scale: its value, fp32."""
    up_G = ((254 - byte_G) << 23).to(tl.float32, bitcast=True)
    x_GC = size_GC.to(tl.float32, bitcast=True) * up_G[:, None]
    bits_GC = x_GC.to(tl.int32, bitcast=True)
    if FP8:
        normal_GC = (bits_GC + 0x7FFFF + ((bits_GC >> 20) & 1)) & 0x7FF00000
        below_GC = (x_GC + 24576.0) - 24576.0  # steps of 2^-9
        value_GC = tl.where(x_GC >= 0.015625, normal_GC.to(tl.float32, bitcast=True), below_GC)
    else:
        normal_GC = (bits_GC + 0x1FFFFF + ((bits_GC >> 22) & 1)) & 0x7FC00000
        below_GC = (x_GC + 6291456.0) - 6291456.0  # steps of 0.5
        value_GC = tl.where(x_GC >= 1.0, normal_GC.to(tl.float32, bitcast=True), below_GC)
    return value_GC


@triton.jit
def signed(value_GC, bits_GC):
    """value with the sign of bits, zeros too."""
    sign_GC = bits_GC & -0x80000000
    return (value_GC.to(tl.int32, bitcast=True) | sign_GC).to(tl.float32, bitcast=True)


@triton.jit
def fake_quantise(w, out, N_GROUPS, GROUPS: tl.constexpr, FP8: tl.constexpr):
    """Grid (groups / GROUPS). Values on the grid in w's dtype; a group with a value that is not finite is NaN."""
    _, place_GC, mask_GC = tile_of(N_GROUPS, GROUPS)
    bits_GC = tl.load(w + place_GC, mask=mask_GC, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    size_GC = bits_GC & 0x7FFFFFFF
    byte_G = bytes_of_scale(size_GC, FP8)
    value_GC = to_grid(size_GC, byte_G, FP8) * scale_of(byte_G)[:, None]
    value_GC = tl.where((byte_G == 255)[:, None], float("nan"), signed(value_GC, bits_GC))
    tl.store(out + place_GC, value_GC.to(out.dtype.element_ty), mask=mask_GC)


@triton.jit
def quantise(w, codes, scales, N_GROUPS, GROUPS: tl.constexpr, FP8: tl.constexpr):
    """Grid (groups / GROUPS). codes: a byte of two MXFP4 codes, the first in the low half, or of one MXFP8 element."""
    g_G, place_GC, mask_GC = tile_of(N_GROUPS, GROUPS)
    bits_GC = tl.load(w + place_GC, mask=mask_GC, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    size_GC = bits_GC & 0x7FFFFFFF
    byte_G = bytes_of_scale(size_GC, FP8)
    tl.store(scales + g_G, byte_G.to(tl.uint8), mask=g_G < N_GROUPS)
    value_GC = to_grid(size_GC, byte_G, FP8)
    grid_GC = value_GC.to(tl.int32, bitcast=True)
    negative_GC = (bits_GC >> 31) & 1
    if FP8:
        code_GC = tl.where(value_GC >= 0.015625, (grid_GC >> 20) - 960, (value_GC * 512.0).to(tl.int32))
        tl.store(codes + place_GC, (code_GC | (negative_GC << 7)).to(tl.uint8), mask=mask_GC)
    else:
        code_GC = tl.where(value_GC >= 1.0, (grid_GC >> 22) - 252, (value_GC * 2.0).to(tl.int32))
        low_GJ, high_GJ = tl.split(tl.reshape(code_GC | (negative_GC << 3), [GROUPS, 16, 2]))
        place_GJ = g_G[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(codes + place_GJ, (low_GJ | (high_GJ << 4)).to(tl.uint8), mask=(g_G < N_GROUPS)[:, None])


@triton.jit
def value_of_e2m1(code_GJ):
    """The value of a code 0..15, fp32."""
    size_GJ = code_GJ & 7
    value_GJ = tl.where(size_GJ >= 2, (size_GJ + 252) << 22, 0x3F000000 * size_GJ)  # codes 0 and 1: 0 and 0.5
    return (value_GJ | ((code_GJ & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def value_of_e4m3(code_GC):
    size_GC = code_GC & 127
    normal_GC = ((size_GC + 960) << 20).to(tl.float32, bitcast=True)
    value_GC = tl.where(size_GC >= 8, normal_GC, size_GC.to(tl.float32) * 0.001953125)
    return tl.where(size_GC == 127, float("nan"), signed(value_GC, code_GC << 24))


@triton.jit
def dequantise(codes, scales, out, N_GROUPS, GROUPS: tl.constexpr, FP8: tl.constexpr):
    """Grid (groups / GROUPS)."""
    g_G, place_GC, mask_GC = tile_of(N_GROUPS, GROUPS)
    scale_G = scale_of(tl.load(scales + g_G, mask=g_G < N_GROUPS, other=0).to(tl.int32))
    if FP8:
        value_GC = value_of_e4m3(tl.load(codes + place_GC, mask=mask_GC, other=0).to(tl.int32))
    else:
        place_GJ = g_G[:, None] * 16 + tl.arange(0, 16)[None, :]
        pair_GJ = tl.load(codes + place_GJ, mask=(g_G < N_GROUPS)[:, None], other=0).to(tl.int32)
        both_GJ2 = tl.join(value_of_e2m1(pair_GJ & 15), value_of_e2m1(pair_GJ >> 4))
        value_GC = tl.reshape(both_GJ2, [GROUPS, 32])
    tl.store(out + place_GC, (value_GC * scale_G[:, None]).to(out.dtype.element_ty), mask=mask_GC)
