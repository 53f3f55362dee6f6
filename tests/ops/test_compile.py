"""Public ops trace as one graph on the CPU: no question to the system, the host or the data breaks it.

Not these, whose plain form plans on the host or looks at values: `kda` in blocks, `route`, `expert_glu`.
"""

import pytest
import torch
from torch._dynamo import trace_rules

from rille.ops import attn_res, conv, cross_entropy, kda, mla, moe, mx, newton_schulz, norm, situ
from rille.packing import Packing

LENGTHS = [7, 0, 5]
N, D, H, K, V = sum(LENGTHS), 16, 2, 8, 8


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def cases() -> dict:
    packing, gate = Packing.of(LENGTHS), kda.Gate(torch.zeros(H), torch.zeros(H, K), -5.0)
    x, gain = draw(N, D), draw(D)
    rows, keys, values = draw(N, H, K), draw(N, H, K, seed=1), draw(N, H, V, seed=2)
    scores = torch.sigmoid(draw(N, 6))
    ids = moe.route(scores, torch.zeros(6), 2).ids
    targets = torch.arange(N) % 9

    def recurrence(*five: torch.Tensor) -> torch.Tensor:
        q, k, v, z, b = five
        return kda.kda(q, k, v, z, b, gate, packing, backend="reference")[0]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return mla.attention(q, k, v, packing, K**-0.5)

    return {
        "rms_norm": (norm.rms_norm, (x, gain, 1e-5)),
        "add_rms_norm": (norm.add_rms_norm, (x, draw(N, D, seed=3), gain, 1e-5)),
        "gated_rms_norm": (norm.gated_rms_norm, (rows, keys, draw(K), 1e-5)),
        "situ_glu": (situ.situ_glu, (x, draw(N, D, seed=4), 4.0, 25.0)),
        "swiglu": (situ.swiglu, (x, draw(N, D, seed=4))),
        "attn_res": (attn_res.attn_res, ([x, draw(N, D, seed=5)], draw(D), gain, 1e-5)),
        "short_conv": (lambda x, w: conv.short_conv(x, w, packing), (x, draw(D, 4))),
        "kda": (recurrence, (rows, keys, values, draw(N, H, K, seed=6), draw(N, H))),
        "attention": (attention, (rows, keys, values)),
        "route_weights": (moe.route_weights, (scores, ids)),
        "cross_entropy": (
            lambda x, head: cross_entropy.linear_cross_entropy(x, head, targets).loss_sum,
            (x, draw(9, D)),
        ),
        "newton_schulz": (newton_schulz.newton_schulz, (draw(3, 8, 12),)),
        "mxfp4": (lambda w: mx.fake_quantise_mxfp4(w), (draw(4, 64),)),
    }


@pytest.fixture
def poisoned_memory():
    """None here: what hands out poison cannot be traced."""


@pytest.mark.parametrize("name", cases())
def test_one_graph(name):
    op, arguments = cases()[name]
    torch._dynamo.reset()
    trace_rules.clear_lru_cache()  # a compilation in an earlier test may have noted the functions that hand out poison
    expected = op(*arguments)  # first: a packing derives its indices on the host, once a batch and outside any graph
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), expected)
