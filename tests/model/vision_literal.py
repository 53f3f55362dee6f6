"""The vision tower and projector once more, by hand: numpy, float64, one item, one patch, one head at a time."""

from math import cos, erf, pi, sin, sqrt, tanh

import numpy as np

EPS32 = 2.0**-23


def rms(x, gain, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


gelu = np.vectorize(lambda x: 0.5 * x * (1 + erf(x / sqrt(2))))
gelu_tanh = np.vectorize(lambda x: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))))


def table_at(table, row, column, h, w):
    """Bilinear: the centre of cell `row` of h lies at (row + 1/2) rows / h - 1/2 of the table, whose border repeats."""
    rows, columns, _ = table.shape
    y, x = max((row + 0.5) * rows / h - 0.5, 0), max((column + 0.5) * columns / w - 0.5, 0)
    y0, x0 = int(y), int(x)
    y1, x1 = min(y0 + 1, rows - 1), min(x0 + 1, columns - 1)
    top = table[y0, x0] * (1 - (x - x0)) + table[y0, x1] * (x - x0)
    bottom = table[y1, x0] * (1 - (x - x0)) + table[y1, x1] * (x - x0)
    return top * (1 - (y - y0)) + bottom * (y - y0)


def time_vector(frame, width):
    half = width // 2
    angles = [frame / 10000 ** (i / half) for i in range(half)]
    return np.array([sin(a) for a in angles] + [cos(a) for a in angles])


def turn(vector, row, column):
    out, size = vector.copy(), len(vector)
    for i in range(size // 4):
        theta = 10000 ** (-4 * i / size)
        for pair, place in ((2 * i, column), (2 * i + 1, row)):
            a, b = vector[2 * pair], vector[2 * pair + 1]
            c, s = cos(place * theta), sin(place * theta)
            out[2 * pair], out[2 * pair + 1] = a * c - b * s, a * s + b * c
    return out


def attention(q, k, v, scale, seen):
    """q, k, v [patches, channels] of one head; seen[i] are the patches that patch i may look at."""
    out = np.empty_like(v)
    for i in range(len(q)):
        out[i] = softmax(scale * (k[seen[i]] @ q[i])) @ v[seen[i]]
    return out


def tower(weights, c, patches, grid):
    """[h w / merge, merged, D] of one item."""
    t, h, w = grid
    places = [(f, y, x) for f in range(t) for y in range(h) for x in range(w)]
    x_PD = patches.reshape(len(patches), -1) @ weights["patch_embed"].reshape(c.width, -1).T
    for p, (f, y, x) in enumerate(places):
        x_PD[p] += table_at(weights["positions"], y, x, h, w) + (time_vector(f, c.width) if t > 1 else 0)
    for i in range(c.num_layers):
        block = {name.removeprefix(f"blocks.{i}."): value for name, value in weights.items() if f"blocks.{i}." in name}
        x_PD = x_PD + attend(block, c, rms(x_PD, block["attn_norm"], EPS32), places) @ block["out_proj"].T
        inner = gelu_tanh(rms(x_PD, block["ffn_norm"], EPS32) @ block["up_proj"].T)
        x_PD = x_PD + inner @ block["down_proj"].T
    x_PD = rms(x_PD, weights["norm"], EPS32)
    a, b = c.merge
    merged = np.empty((h // a, w // b, a * b, c.width))
    for y in range(h):
        for x in range(w):
            frames = [x_PD[places.index((f, y, x))] for f in range(t)]
            merged[y // a, x // b, y % a * b + x % b] = np.mean(frames, axis=0)
    return merged.reshape(-1, a * b, c.width)


def attend(block, c, x_PD, places):
    q, k, v = (x_PD @ part.T for part in np.split(block["qkv_proj"], 3))
    outputs = []
    for head in range(c.num_heads):
        channels = slice(head * c.head_dim, (head + 1) * c.head_dim)
        q_PK = np.stack([turn(row, y, x) for row, (_, y, x) in zip(q[:, channels], places, strict=True)])
        k_PK = np.stack([turn(row, y, x) for row, (_, y, x) in zip(k[:, channels], places, strict=True)])
        scale, everyone = c.head_dim**-0.5, list(range(len(places)))
        if c.attention == "joint":
            outputs.append(attention(q_PK, k_PK, v[:, channels], scale, [everyone] * len(places)))
            continue
        frame = [[p for p in everyone if places[p][0] == places[i][0]] for i in everyone]
        place = [[p for p in everyone if places[p][1:] == places[i][1:]] for i in everyone]
        in_space = attention(q_PK, k_PK, v[:, channels], scale, frame)
        outputs.append(attention(q_PK, k_PK, in_space, scale, place))
    return np.concatenate(outputs, axis=1)


def projector(weights, c, merged):
    inner = gelu(merged.reshape(len(merged), -1) @ weights["up_proj"].T)
    return rms(inner @ weights["down_proj"].T, weights["norm"], c.projector_eps)
