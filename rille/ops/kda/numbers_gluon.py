"""What Gluon kernels of KDA do with single numbers: instructions without corrections, roundings, the softplus gate."""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
SHUT: gl.constexpr = gl.constexpr(28.0)  # as in `intra.py`


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2_of_negative(x):
    """2^-x; the sign is part of the instruction."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 y; neg.f32 y, $1; ex2.approx.ftz.f32 $0, y; }", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def inverse_root(x):
    return gl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def negative(x):
    """-x, where Triton's own sign is a subtraction from zero."""
    return gl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def leading_bits(x):
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def bf16(x):
    """x in bf16, rounded in pairs: one number by itself goes through the unit for exponentials."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, True, 2)


@gluon.jit
def wide(x):
    """bf16 as fp32, in pairs."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xffff0000;"
        " mov.b32 $0, low; mov.b32 $1, high; }",
        "=f,=f,r", [x], gl.float32, True, 2,
    )  # fmt: skip


@gluon.jit
def softplus_decay(x, rate):
    """-rate softplus(x) / ln 2, cut off at -SHUT; the polynomial is that of `intra.log2_of_1_and`."""
    y = exp2(gl.maximum(x, -x) * -LOG2E)
    p = y * -0.012319459579885006 + 0.0636078417301178
    p = p * y - 0.15535180270671844
    p = p * y + 0.25600966811180115
    p = p * y - 0.3533948063850403
    p = p * y + 0.48006370663642883
    p = p * y - 0.7213100790977478
    p = p * y + 1.4426947832107544
    g = (gl.maximum(x, 0.0) * LOG2E + y * p) * -rate
    return gl.where(g < -SHUT, -SHUT, g)
