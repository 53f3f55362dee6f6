"""MXFP4, the format of the released experts, and MXFP8, that of activations in quantised training.

Groups of 32 consecutive values of the last axis share a scale 2^(byte - 127); `blocks` has the mechanism, `reference`
the definition, `stream` runs the kernels. `backend` is "triton" or "torch"; by default the kernels for CUDA tensors
of a dtype that they take.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rille.ops.mx import blocks
from rille.ops.settling import warn_once

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
BACKENDS = ("triton", "torch")
_EXACT = (torch.bfloat16, torch.float32, torch.float64)  # hold every code times every scale, up to their largest number


def quantise_mxfp4(w: Tensor, scales: Tensor | None = None, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Pack weights into MXFP4: (codes uint8 [..., I/2], scales uint8 [..., I/32]).

    w [..., I] of any float dtype, 32 | I. A group's scale is 2^ceil(log2(max |w| / 6)); elements go to the nearest
    code, ties to even; the sign of zero stays. A group of zeros gets byte 0, and so does one below 6 * 2^-127, whose
    elements then err by at most 2^-129. With `scales` (uint8 [..., I/32]) a group keeps its given scale when all its
    elements are exact under it, so that weights which came from a checkpoint return to their bytes; other groups follow
    the rule.

    Raises ValueError for values that are not finite or exceed 6 * 2^127, for a given scale of 255 (NaN), and for
    shapes.
    """
    _check_columns("quantise_mxfp4", w)
    if _settle("quantise_mxfp4", backend, w.dtype, w, "given scales" if scales is not None else None) == "triton":
        packed, byte_Q = _stream().quantise(w.contiguous(), False)
        _check_scales("quantise_mxfp4: values must be finite and at most 6 * 2^127 in size", byte_Q)
        return packed, byte_Q
    w_QC = blocks.grouped(w)
    byte_Q = blocks.scale_bytes(w_QC, blocks.LARGEST_E2M1)
    _check_scales("quantise_mxfp4: values must be finite and at most 6 * 2^127 in size", byte_Q)
    if scales is not None:
        byte_Q = torch.where(_exact_under(w_QC, scales), scales, byte_Q)
    code_QC = blocks.encode_e2m1(w_QC / blocks.scales(byte_Q, w_QC.dtype))
    return blocks.pack(code_QC.flatten(-2)), byte_Q


def dequantise_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype, *, backend: str | None = None) -> Tensor:
    """Values [..., I] of packed codes uint8 [..., I/2] and scales uint8 [..., I/32]; exact in every allowed dtype.

    dtype: bfloat16, float32 or float64. Reads the scales on the host's behalf (it must refuse bad ones), so it belongs
    to loading, not to a step.

    Raises ValueError for a scale of 255 (NaN), for a value beyond the dtype's largest, and for shapes and dtypes.
    """
    _check_pair("dequantise_mxfp4", packed, scale, dtype, columns=2 * packed.shape[-1])
    if _settle("dequantise_mxfp4", backend, dtype, packed) == "triton":
        value_I = _stream().dequantise(packed.contiguous(), scale.contiguous(), dtype, False)
    else:
        value_I = _times_scales(blocks.unpack_e2m1(packed, torch.promote_types(dtype, torch.float32)), scale).to(dtype)
    _check_finite("dequantise_mxfp4", value_I, scale, blocks.LARGEST_E2M1)
    return value_I


def fake_quantise_mxfp4(w: Tensor, *, backend: str | None = None) -> Tensor:
    """`dequantise_mxfp4(*quantise_mxfp4(w))` in w's dtype, with the gradient passed straight through.

    w [..., I] in bfloat16, float32 or float64. Values that already lie on an MXFP4 grid stay as they are, whatever
    their scale was. Never reads from the device: a group that holds a value which is not finite comes back as NaN
    instead of raising.

    Raises ValueError for another dtype, and unless 32 divides the last axis.
    """
    _check_columns("fake_quantise_mxfp4", w)
    _check_exact("fake_quantise_mxfp4", w.dtype)
    return _FakeQuantise.apply(w, _settle("fake_quantise_mxfp4", backend, w.dtype, w))


def quantise_mxfp8(x: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Round to MXFP8: (elements float8_e4m3fn [..., I], scales uint8 [..., I/32]).

    The scale is 2^ceil(log2(max |x| / 448)), so nothing saturates; elements to nearest, ties to even. Groups of zeros,
    and below 448 * 2^-127, have scale byte 0.

    Raises ValueError for values that are not finite or exceed 448 * 2^127, and unless 32 divides the last axis.
    """
    _check_columns("quantise_mxfp8", x)
    if _settle("quantise_mxfp8", backend, x.dtype, x) == "triton":
        code_I, byte_Q = _stream().quantise(x.contiguous(), True)
        _check_scales("quantise_mxfp8: values must be finite and at most 448 * 2^127 in size", byte_Q)
        return code_I.view(torch.float8_e4m3fn), byte_Q
    x_QC = blocks.grouped(x)
    byte_Q = blocks.scale_bytes(x_QC, blocks.LARGEST_E4M3)
    _check_scales("quantise_mxfp8: values must be finite and at most 448 * 2^127 in size", byte_Q)
    return (x_QC / blocks.scales(byte_Q, x_QC.dtype)).to(torch.float8_e4m3fn).flatten(-2), byte_Q


def dequantise_mxfp8(elements: Tensor, scale: Tensor, dtype: torch.dtype, *, backend: str | None = None) -> Tensor:
    """Values [..., I] of elements float8_e4m3fn [..., I] and scales uint8 [..., I/32]; otherwise as `dequantise_mxfp4`.

    In bfloat16 an element below 2^-6 may be rounded under a scale byte below 3: the product lies under its subnormals.
    """
    _check_pair("dequantise_mxfp8", elements, scale, dtype, columns=elements.shape[-1])
    if _settle("dequantise_mxfp8", backend, dtype, elements) == "triton":
        value_I = _stream().dequantise(elements.contiguous().view(torch.uint8), scale.contiguous(), dtype, True)
    else:
        value_I = _times_scales(elements.to(torch.promote_types(dtype, torch.float32)), scale).to(dtype)
    _check_finite("dequantise_mxfp8", value_I, scale, blocks.LARGEST_E4M3)
    return value_I


class _FakeQuantise(torch.autograd.Function):
    """Round to the grid forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, w_I: Tensor, backend: str) -> Tensor:
        if backend == "triton":
            return _stream().fake_quantise(w_I.contiguous(), False)
        w_QC = blocks.grouped(w_I)
        scale_Q1 = blocks.scales(blocks.scale_bytes(w_QC, blocks.LARGEST_E2M1), w_QC.dtype)
        code_QC = blocks.encode_e2m1(w_QC / scale_Q1)
        return (blocks.decode_e2m1(code_QC, w_QC.dtype) * scale_Q1).flatten(-2).to(w_I.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def choose_backend(dtype: torch.dtype, tensor: Tensor) -> tuple[str, str]:
    """The backend for values of a dtype and in words why; tensor: where the data lie."""
    reason = _obstacle(dtype, tensor) if tensor.is_cuda else f"the tensors are on {tensor.device.type}"
    return ("triton", "CUDA tensors of a supported dtype") if reason is None else ("torch", reason)


def _stream() -> Any:
    from rille.ops.mx import stream

    return stream


def _obstacle(dtype: torch.dtype, tensor: Tensor) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    if not tensor.is_cuda and not _stream().interpreting():
        return f"the tensors are on {tensor.device.type}"
    return None if dtype in (torch.bfloat16, torch.float32) else f"the kernels take bf16 or fp32 values, not {dtype}"


def _settle(op: str, backend: str | None, dtype: torch.dtype, tensor: Tensor, beside: str | None = None) -> str:
    """The backend to run; beside: what the kernels do not know besides values."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{op}: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    name, reason = choose_backend(dtype, tensor)
    if backend == "triton":
        reason = _obstacle(dtype, tensor) or (f"the kernels know no {beside}" if beside else None)
        if reason is not None:
            raise ValueError(f"{op}: backend 'triton' cannot run: {reason}")
        return "triton"
    if backend is None and name != "triton" and tensor.is_cuda:
        warn_once(f"{op}: backend 'torch' runs on a GPU, slowly: {reason}")
    return "torch" if backend == "torch" or beside else name


def _exact_under(w_QC: Tensor, byte_Q: Tensor) -> Tensor:
    """Which groups the given scales represent without error (bool [..., Q])."""
    if byte_Q.shape != w_QC.shape[:-1] or byte_Q.dtype != torch.uint8:
        raise ValueError(
            f"quantise_mxfp4: given scales {tuple(byte_Q.shape)} {byte_Q.dtype}, want {tuple(w_QC.shape[:-1])} uint8"
        )
    _check_scales("quantise_mxfp4: given scales", byte_Q)
    scale_Q1 = blocks.scales(byte_Q, w_QC.dtype)
    code_QC = blocks.encode_e2m1(w_QC / scale_Q1)
    # Compared as values: the quotient of a tiny weight and a large scale can vanish and would pass for an exact zero.
    return (blocks.decode_e2m1(code_QC, w_QC.dtype) * scale_Q1 == w_QC).all(-1)


def _times_scales(element_I: Tensor, byte_Q: Tensor) -> Tensor:
    element_QC = element_I.unflatten(-1, (-1, blocks.GROUP))
    return (element_QC * blocks.scales(byte_Q, element_I.dtype)).flatten(-2)


def _check_columns(op: str, w: Tensor) -> None:
    if not w.is_floating_point() or w.shape[-1] % blocks.GROUP:
        raise ValueError(f"{op}: {tuple(w.shape)} {w.dtype}; want floats and a last axis that {blocks.GROUP} divides")


def _check_exact(op: str, dtype: torch.dtype) -> None:
    if dtype not in _EXACT:
        raise ValueError(f"{op}: {dtype} cannot hold the values exactly; choose one of {', '.join(map(str, _EXACT))}")


def _check_pair(op: str, codes: Tensor, scale: Tensor, dtype: torch.dtype, columns: int) -> None:
    _check_exact(op, dtype)
    if scale.dtype != torch.uint8 or (*codes.shape[:-1], columns) != (
        *scale.shape[:-1],
        blocks.GROUP * scale.shape[-1],
    ):
        raise ValueError(
            f"{op}: codes {tuple(codes.shape)} hold {columns} columns, scales {tuple(scale.shape)} {scale.dtype} cover "
            f"{blocks.GROUP * scale.shape[-1]}"
        )
    _check_scales(op, scale)


def _check_scales(message: str, byte_Q: Tensor) -> None:
    bad = int((byte_Q == blocks.NOT_A_SCALE).sum())
    if bad:
        raise ValueError(
            f"{message}: {bad} of {byte_Q.numel()} groups have scale byte {blocks.NOT_A_SCALE}, which is NaN"
        )


def _check_finite(op: str, value_I: Tensor, byte_Q: Tensor, largest: float) -> None:
    # bfloat16 and float32 end below 2^128: only groups whose scale times the largest element reaches it can overflow.
    suspicious = value_I.dtype != torch.float64 and bool(
        (blocks.scales(byte_Q, torch.float64) * largest >= 2.0**128).any()
    )
    if suspicious and not bool(value_I.isfinite().all()):
        raise ValueError(f"{op}: values up to {largest} * 2^{int(byte_Q.max()) - blocks.BIAS} overflow {value_I.dtype}")
