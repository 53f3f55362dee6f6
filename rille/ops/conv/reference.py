"""The short causal convolution in front of KDA: each channel mixes its last W inputs, then SiLU. `short_conv` below is
the definition.

    y[n, c] = silu( sum_{j=0..W-1} weight[c, W-1-j] * x[n-j, c] )

where x before a sequence's first row is its tail, or zeros.

Source: Kimi K3 report section 2.1.1; W = 4 there, fp32 throughout, no bias.

To give every row W - 1 rows before it, the tail of each sequence is laid in front of its rows; a stream of
E = N + S (W-1) rows results, and one convolution runs over it. Rows that belong to a tail are
computed too and then left out.

Suffixes: N packed tokens, S sequences, C channels, W taps, P = W - 1 inputs before the current one, E rows of the
stream.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rille.packing import Packing


def short_conv(x_NC: Tensor, weight_CW: Tensor, packing: Packing, tail_SPC: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns y [N, C] in x's dtype and the last W - 1 inputs of each sequence in the tail's dtype (x's if None)."""
    (C, W), S = weight_CW.shape, packing.num_sequences
    dtype = torch.promote_types(x_NC.dtype, torch.float32)
    if tail_SPC is None:
        tail_SPC = x_NC.new_zeros(S, W - 1, C)
    ahead_SP = torch.arange(W - 1, device=x_NC.device) + torch.arange(S, device=x_NC.device)[:, None] * (W - 1)
    tail_row_SP = packing.starts[:-1, None].long() + ahead_SP
    row_N = torch.arange(x_NC.shape[0], device=x_NC.device) + (packing.sequence_of + 1) * (W - 1)

    rows = x_NC.shape[0] + S * (W - 1) + W  # W more than needed: no input is too short for the convolution
    stream_EC = x_NC.new_zeros(rows, C, dtype=dtype)
    stream_EC = stream_EC.index_copy(0, tail_row_SP.flatten(), tail_SPC.to(dtype).flatten(0, 1))
    stream_EC = stream_EC.index_copy(0, row_N, x_NC.to(dtype))

    y_CE = F.conv1d(stream_EC.T[None], weight_CW[:, None].to(dtype), groups=C)[0]
    y_NC = F.silu(y_CE.index_select(1, row_N - (W - 1))).T  # channel-major in memory, as the release sums over it
    final_SPC = stream_EC[packing.starts[1:, None].long() + ahead_SP]
    return y_NC.to(x_NC.dtype), final_SPC.to(tail_SPC.dtype)
