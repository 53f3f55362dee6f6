"""Values from mixtures of latents, behind absorbed attention: sum_m p_m v_h,m = W_v,h sum_m p_m latent_m."""

from __future__ import annotations

import torch
from torch import Tensor


def mixed_values(o_NHR: Tensor, value_HVR: Tensor) -> Tensor:
    """Each head's value projection [H, V, R] applied to its mixture [N, H, R]: [N, H, V] in the dtype of the mixture.

    Weights of 16 bits on a GPU stay as they are where no gradient is wanted: an fp32 mixture is multiplied as the sum
    of two numbers of 16 bits (of bf16: all but 2^-16 of an element), and sums are fp32. A product in fp32 would copy
    the weights first.
    """
    differentiated = torch.is_grad_enabled() and (o_NHR.requires_grad or value_HVR.requires_grad)
    narrow = value_HVR.dtype in (torch.bfloat16, torch.float16) and o_NHR.dtype == torch.float32
    if differentiated or not narrow or not o_NHR.is_cuda:
        return torch.einsum("nhr,hvr->nhv", o_NHR, value_HVR.to(o_NHR.dtype))
    parts_HMR = torch.cat(in_two(o_NHR, value_HVR.dtype)).transpose(0, 1)
    large_HNV, small_HNV = torch.bmm(parts_HMR, value_HVR.mT, out_dtype=torch.float32).chunk(2, dim=1)
    return (large_HNV + small_HNV).transpose(0, 1)


def in_two(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x rounded to `dtype`, and what that left of it, rounded too."""
    large = x.to(dtype)
    return large, (x - large.to(x.dtype)).to(dtype)
