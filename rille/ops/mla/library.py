"""Attention by the kernels inside PyTorch: their results are rounded to the operands' 16 bits before anyone sees them.

"flash" takes the sequences as they lie, by their boundaries, but wants values as wide as keys: zero columns are added
and cut off again. "cudnn" takes 192 and 128 as they are: sequences of one length as a batch, others by their
boundaries. Both are differentiable; neither asks the device for a size.

Suffixes: N packed tokens, S sequences of one length T, H heads, K key and V value channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rille.packing import Packing


def flash(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, packing: Packing, scale: float) -> Tensor:
    K, V, longest = q_NHK.shape[2], v_NHV.shape[2], packing.longest
    wide = max(K, V)
    q, k, v = (x if x.shape[2] == wide else F.pad(x, (0, wide - x.shape[2])) for x in (q_NHK, k_NHK, v_NHV))
    call = torch.ops.aten._flash_attention_forward
    out = call(q, k, v, packing.starts, packing.starts, longest, longest, 0.0, True, False, scale=scale)
    return out[0][..., :V]


def cudnn(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, packing: Packing, scale: float) -> Tensor:
    if len(set(packing.lengths)) == 1:
        S = packing.num_sequences
        q, k, v = (x.unflatten(0, (S, -1)).transpose(1, 2) for x in (q_NHK, k_NHK, v_NHV))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o_SHTV = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return o_SHTV.transpose(1, 2).flatten(0, 1)
    call, longest, starts = torch.ops.aten._cudnn_attention_forward, packing.longest, packing.starts
    sizes = (None, starts, starts, longest, longest, q_NHK.requires_grad)
    return call(q_NHK, k_NHK, v_NHV, *sizes, 0.0, True, False, scale=scale)[0]


def unsupported(q_NHK: Tensor) -> str:
    """Why neither can run, or an empty string."""
    if not q_NHK.is_cuda:
        return f"the tensors are on {q_NHK.device.type}"
    if q_NHK.dtype not in (torch.bfloat16, torch.float16):
        return f"PyTorch's kernels take bf16 or fp16, not {q_NHK.dtype}"
    return ""
