"""QK-clip on an MLA layer: every logit of a head that is too loud shrinks by one factor, nothing else changes."""

import pytest
import torch

from rille.model.mla import MLA
from rille.model.model import new_model
from rille.ops.mla import largest_logits
from rille.optim.qk_clip import qk_clip
from rille.packing import Packing
from tests.train.small import MODEL

PACKING = Packing.of([7, 0, 1, 12])


def loud_layer(q_rank: int | None) -> MLA:
    model = new_model(MODEL.replace(q_rank=q_rank), seed=2).double()
    layer = model.layers["2"].attn
    assert isinstance(layer, MLA)
    with torch.no_grad():
        (layer.q_up if q_rank else layer.q_proj)[:24] *= 5e4  # the first of two heads: 16 own rows, 8 shared ones
    return layer


def queries_keys_values(layer: MLA, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the layer makes them: [N, H, K] twice and [N, H, V]."""
    first, *_ = layer._read_together()
    latent = layer._latents(x_ND @ layer.kv_down.T)
    kv = (latent[:, :16] @ layer.kv_up.T).unflatten(-1, (2, 32))
    shared = latent[:, None, 16:].expand(-1, 2, -1)
    return layer._queries(x_ND @ first.T), torch.cat([kv[..., :16], shared], -1), kv[..., 16:]


@torch.no_grad()
@pytest.mark.parametrize("q_rank", [16, None])
def test_the_loud_head_comes_down_to_the_threshold(q_rank: int | None):
    layer, scale = loud_layer(q_rank), 24**-0.5
    x_ND = torch.randn(20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = queries_keys_values(layer, x_ND)
    largest = largest_logits(q, k, PACKING, scale)
    threshold = float(largest.min()) * 2
    assert largest[0] > threshold > largest[1] > 0
    before = torch.einsum("nhk,mhk->hnm", q, k) * scale
    f = qk_clip(layer.q_up if q_rank else layer.q_proj, layer.kv_up, largest, 16, threshold)
    assert torch.allclose(f, torch.stack([threshold / largest[0], torch.ones_like(f[0])]), rtol=1e-15)

    q, k, after_v = queries_keys_values(layer, x_ND)
    after = torch.einsum("nhk,mhk->hnm", q, k) * scale
    assert torch.allclose(after, before * f[:, None, None], rtol=1e-12, atol=1e-12)
    assert float(largest_logits(q, k, PACKING, scale)[0]) == pytest.approx(threshold, rel=1e-12)
    assert torch.equal(after[1], before[1]) and torch.equal(after_v, v)


def test_nothing_moves_below_the_threshold():
    query, key_value = torch.randn(12, 5), torch.randn(16, 5)
    old = query.clone(), key_value.clone()
    f = qk_clip(query, key_value, torch.tensor([100.0, -torch.inf]), 4)
    assert f.tolist() == [1.0, 1.0]
    assert torch.equal(query, old[0]) and torch.equal(key_value, old[1])


def test_parameters_keep_their_graph_out_of_it():
    query, key_value = (torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    qk_clip(query, key_value, torch.tensor([400.0]), 2)
    assert query.is_leaf and query[:, 0].tolist() == [0.5, 0.5, 0.25, 0.25]
    assert key_value[:, 0].tolist() == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("rows", "heads", "key_dim", "threshold", "message"),
    [
        (12, 2, 4, 0.0, "threshold 0.0"),
        (13, 2, 4, 1.0, r"query \(13, 3\) for 2 heads"),
        (12, 2, 7, 1.0, "7 key rows each"),
        (12, 0, 4, 1.0, "0 heads"),
    ],
)
def test_refused(rows: int, heads: int, key_dim: int, threshold: float, message: str):
    with pytest.raises(ValueError, match=message):
        qk_clip(torch.ones(rows, 3), torch.ones(12, 3), torch.ones(heads), key_dim, threshold)
