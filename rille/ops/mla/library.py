"""Attention by the kernels inside PyTorch: their results are rounded to the operands' 16 bits before anyone sees them.

"flash" takes the sequences as they lie, by their boundaries, but wants values as wide as keys: zero columns are added
and cut off again. "cudnn" takes 192 and 128 as they are: sequences of one length as a batch, others with a call each
(by their boundaries it took 50 ms where the calls took 0.3: README.md). Both are differentiable; neither asks the
device for a size.

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
    lengths = packing.lengths
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        if len(set(lengths)) == 1 and lengths[0]:
            q, k, v = (x.unflatten(0, (len(lengths), -1)) for x in (q_NHK, k_NHK, v_NHV))
            return _causal(q, k, v, scale).flatten(0, 1)
        pieces = zip(*(x.split(lengths) for x in (q_NHK, k_NHK, v_NHV)), strict=True)
        found = [_causal(q[None], k[None], v[None], scale)[0] for q, k, v in pieces if len(q)]
    return torch.cat(found) if found else v_NHV


def _causal(q_STHK: Tensor, k_STHK: Tensor, v_STHV: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_STHK, k_STHK, v_STHV))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


def unsupported(q_NHK: Tensor) -> str:
    """Why neither can run, or an empty string."""
    if not q_NHK.is_cuda:
        return f"the tensors are on {q_NHK.device.type}"
    if q_NHK.dtype not in (torch.bfloat16, torch.float16):
        return f"PyTorch's kernels take bf16 or fp16, not {q_NHK.dtype}"
    return ""
