"""MoonViT-V2 and its projector: pictures and short videos to rows of the language model (report §2.4; released model).

    x = W_e patch + table resized to (rows, columns) [+ time vector of the frame, in videos]
    27 times   x += W_o Attention(RMSNorm(x));   x += W_down GELU_tanh(W_up RMSNorm(x))
    y = RMSNorm(x), mean over the frames, 2 x 2 neighbours side by side        [M, 4 D]
    features = RMSNorm(V_down GELU(V_up y))                                    [M, text width]

Items lie behind each other on one axis of patches, without padding; a patch attends to all patches of its item in both
directions. q and k are rotated: of head_dim channels the pair 2i turns by column * theta_i, the pair 2i+1 by row *
theta_i.

Suffixes: P patches, D width, H heads, K channels of a head, M merged rows, G patches of a merged row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import linear

from rille.model.allocate import Allocate
from rille.model.media import Grid, PatchedImages, checked_grids
from rille.model.vision_config import VisionConfig
from rille.ops.norm import rms_norm

EPS = torch.finfo(torch.float32).eps  # what torch's RMSNorm takes when it is given none, for bf16 input too
Runs = list[tuple[int, int]]  # (sequences, their length): equal sequences that lie behind each other


class Vision(nn.Module):
    """Tower and projector: `vision(images) -> features [M, text width]`."""

    def __init__(self, c: VisionConfig, new: Allocate) -> None:
        super().__init__()
        self.config = c
        self.tower, self.projector = Tower(c, new), Projector(c, new)

    def forward(self, images: PatchedImages) -> Tensor:
        grids = checked_grids(images, self.config)
        like = self.tower.patch_embed
        patches = torch.as_tensor(images.patches).to(like.device, like.dtype)
        return self.projector(self.tower(patches, grids))


class Tower(nn.Module):
    """Patches [P, 3, p, p] of items with the given grids -> merged rows [M, G, D], item after item."""

    def __init__(self, c: VisionConfig, new: Allocate) -> None:
        super().__init__()
        self.patch_embed = new(c.width, c.patch_numbers)
        self.positions = new(c.table_height, c.table_width, c.width)
        self.blocks = nn.ModuleList(TowerBlock(c, new) for _ in range(c.num_layers))
        self.norm = new(c.width)
        self.merge, self.head_dim = c.merge, c.head_dim

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        x_PD = linear(patches.flatten(1), self.patch_embed) + self._places(grids).to(patches.dtype)
        wide = torch.promote_types(patches.dtype, torch.float32)
        turns_PK = rotations(grids, self.head_dim).to(patches.device, wide.to_complex())
        for block in self.blocks:
            x_PD = block(x_PD, turns_PK, grids)
        return self._merged(rms_norm(x_PD, self.norm, EPS), grids)

    def _places(self, grids: Sequence[Grid]) -> Tensor:
        """Position vectors [P, D]: the table, resized where a grid has another shape; in videos the frame's vector."""
        wide = self.positions.to(torch.promote_types(self.positions.dtype, torch.float32))
        vectors = [wide.new_empty(0, wide.shape[-1])]
        for t, h, w in grids:
            place_QD = resized(wide, h, w).flatten(0, 1)
            if t > 1:
                place_QD = (place_QD + time_vectors(t, wide.shape[-1]).to(wide)[:, None]).flatten(0, 1)
            vectors.append(place_QD)
        return torch.cat(vectors)

    def _merged(self, x_PD: Tensor, grids: Sequence[Grid]) -> Tensor:
        a, b = self.merge
        items = [x_PD.new_empty(0, a * b, x_PD.shape[-1])]
        for x_QD, (t, h, w) in zip(x_PD.split([t * h * w for t, h, w in grids]), grids, strict=True):
            rows = x_QD.view(t, h // a, a, w // b, b, -1).mean(0)
            items.append(rows.transpose(1, 2).flatten(2, 3).flatten(0, 1))
        return torch.cat(items)


def resized(table: Tensor, h: int, w: int) -> Tensor:
    """The table [rows, columns, D] at h x w places: bilinear, centres at half units; as it is where it fits."""
    if table.shape[:2] == (h, w):
        return table
    return F.interpolate(table.permute(2, 0, 1)[None], (h, w), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)


def time_vectors(frames: int, width: int) -> Tensor:
    """Fixed vectors [frames, D] float64: sine, then cosine of frame * 10000^(-i / (D/2))."""
    omega = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = torch.arange(frames, dtype=torch.float64)[:, None] * omega
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def rotations(grids: Sequence[Grid], head_dim: int) -> Tensor:
    """Unit complex numbers [P, K/2] by which pairs turn, theta_i = 10000^(-4 i / K); the same in each frame."""
    theta = 10000.0 ** (-torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)
    angles = [torch.empty(0, head_dim // 2, dtype=torch.float64)]
    for t, h, w in grids:
        column, row = torch.arange(w)[None, :, None] * theta, torch.arange(h)[:, None, None] * theta
        both = torch.stack(torch.broadcast_tensors(column, row), dim=-1)
        angles.append(both.view(1, h * w, -1).expand(t, -1, -1).flatten(0, 1))
    angle = torch.cat(angles)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x_PHK: Tensor, turns_PK: Tensor) -> Tensor:
    """Turn adjacent pairs of channels, in the precision of the turns."""
    pairs = torch.view_as_complex(x_PHK.to(turns_PK.dtype.to_real()).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns_PK[:, None]).flatten(-2).to(x_PHK.dtype)


class TowerBlock(nn.Module):
    """Attention and feed-forward, each after a norm, each added to x."""

    def __init__(self, c: VisionConfig, new: Allocate) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = new(c.width), new(c.width)
        self.qkv_proj, self.out_proj = new(3 * c.qkv_width, c.width), new(c.width, c.qkv_width)
        self.up_proj, self.down_proj = new(c.mlp_width, c.width), new(c.width, c.mlp_width)
        self.head_dim, self.factorised = c.head_dim, c.attention == "factorised"

    def forward(self, x_PD: Tensor, turns_PK: Tensor, grids: Sequence[Grid]) -> Tensor:
        qkv = linear(rms_norm(x_PD, self.attn_norm, EPS), self.qkv_proj).unflatten(-1, (3, -1, self.head_dim))
        q_PHK, k_PHK, v_PHK = qkv.unbind(1)
        attention = factorised_attention if self.factorised else joint_attention
        o_PHK = attention(rotate(q_PHK, turns_PK), rotate(k_PHK, turns_PK), v_PHK, grids)
        x_PD = x_PD + linear(o_PHK.flatten(1), self.out_proj)
        inner = F.gelu(linear(rms_norm(x_PD, self.ffn_norm, EPS), self.up_proj), approximate="tanh")
        return x_PD + linear(inner, self.down_proj)


def joint_attention(q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Every patch attends to all patches of its item, over space and time at once (the released tower)."""
    return attend(q_PHK, k_PHK, v_PHK, [(1, t * h * w) for t, h, w in grids])


def factorised_attention(q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Over the patches of each frame, then, by the same queries and keys, over the frames at each place (report §2.4).

    The report says no more than that. In this form one frame gives what joint attention gives, without further weights.
    """
    o_PHK = attend(q_PHK, k_PHK, v_PHK, [(t, h * w) for t, h, w in grids])
    order, start = [], 0
    for t, h, w in grids:
        order.append(torch.arange(start, start + t * h * w).view(t, h * w).T.flatten())
        start += t * h * w
    by_place_P = torch.cat([torch.empty(0, dtype=torch.int64), *order]).to(q_PHK.device)
    moved_PHK = attend(q_PHK[by_place_P], k_PHK[by_place_P], o_PHK[by_place_P], [(h * w, t) for t, h, w in grids])
    return moved_PHK[by_place_P.argsort()]


def attend(q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, runs: Runs) -> Tensor:
    """Softmax attention in both directions inside each packed sequence; `runs` lists them in order. Scale K^-0.5."""
    equal = [(sum(n for n, _ in group), length) for length, group in groupby(runs, key=lambda run: run[1])]
    sizes = [n * length for n, length in equal]
    outputs = [q_PHK.new_empty(0, *q_PHK.shape[1:])]
    for (n, length), *parts in zip(equal, *(x.split(sizes) for x in (q_PHK, k_PHK, v_PHK)), strict=True):
        q_SHTK, k_SHTK, v_SHTK = (part.unflatten(0, (n, length)).transpose(1, 2) for part in parts)
        outputs.append(F.scaled_dot_product_attention(q_SHTK, k_SHTK, v_SHTK).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


class Projector(nn.Module):
    """Merged rows [M, G, D] -> rows of the language model [M, text width]."""

    def __init__(self, c: VisionConfig, new: Allocate) -> None:
        super().__init__()
        self.up_proj = new(c.merged_width, c.merged_width)
        self.down_proj, self.norm = new(c.text_width, c.merged_width), new(c.text_width)
        self.eps = c.projector_eps

    def forward(self, merged_MGD: Tensor) -> Tensor:
        inner = F.gelu(linear(merged_MGD.flatten(1), self.up_proj))
        return rms_norm(linear(inner, self.down_proj), self.norm, self.eps)
