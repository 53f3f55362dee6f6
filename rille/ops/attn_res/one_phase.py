"""One site of Attention Residuals in few passes over its sources, with the gradient written out.

With w = gain * query, and for each source V_j of a token

    r_j = rsqrt(mean(V_j^2) + eps)     t_j = <V_j, w>     a = softmax(t_j r_j)     out = sum_j a_j V_j

only t, r and a (three numbers a token and source) are kept for the backward pass. For a gradient g of out:

    ds_j = a_j (<g, V_j> - sum_i a_i <g, V_i>)
    dV_j = a_j g + ds_j r_j w - ds_j t_j r_j^3 / D * V_j
    dw   = sum over tokens and sources of ds_j r_j V_j

fp32 (float64 for float64). Axes: R residual sources, N tokens, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def attn_res(sources_ND: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(sources_ND[0].dtype, torch.float32)
    return _Mixture.apply(gain_D.to(wide) * query_D.to(wide), eps, *sources_ND)


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        w_D, eps, *sources_ND = arguments  # torch.compile misplaces arguments that are named before such a list
        wide_ND = [source_ND.to(w_D.dtype) for source_ND in sources_ND]
        norm_RN = torch.stack([torch.linalg.vector_norm(v_ND, dim=-1) for v_ND in wide_ND])
        r_RN = torch.rsqrt(norm_RN.square() / len(w_D) + eps)
        t_RN = torch.stack([v_ND @ w_D for v_ND in wide_ND])
        a_RN = torch.softmax(t_RN * r_RN, dim=0)
        out_ND = torch.zeros_like(wide_ND[0])
        for a_N, v_ND in zip(a_RN, wide_ND, strict=True):
            out_ND.addcmul_(v_ND, a_N.unsqueeze(1))
        ctx.save_for_backward(w_D, t_RN, r_RN, a_RN, *sources_ND)
        return out_ND.to(sources_ND[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        w_D, t_RN, r_RN, a_RN, *sources_ND = ctx.saved_tensors
        wide_ND = [source_ND.to(w_D.dtype) for source_ND in sources_ND]
        grad_ND = grad_outputs[0].to(w_D.dtype)
        da_RN = torch.stack([(grad_ND * v_ND).sum(-1) for v_ND in wide_ND])
        ds_RN = a_RN * (da_RN - (a_RN * da_RN).sum(0))
        along_w_RN = ds_RN * r_RN
        along_v_RN = -along_w_RN * t_RN * r_RN.square() / len(w_D)
        dw_D = torch.zeros_like(w_D)
        dv_ND: list[Tensor | None] = []
        for j, v_ND in enumerate(wide_ND):
            dw_D += along_w_RN[j] @ v_ND
            dv_ND.append(None)
            if ctx.needs_input_grad[2 + j]:
                whole_ND = torch.outer(along_w_RN[j], w_D)
                whole_ND.addcmul_(grad_ND, a_RN[j].unsqueeze(1)).addcmul_(v_ND, along_v_RN[j].unsqueeze(1))
                dv_ND[j] = whole_ND.to(sources_ND[j].dtype)
        return dw_D, None, *dv_ND
