"""Layers that are run again in the backward pass: the same bits, counted once, less kept."""

import pytest
import torch

from rille.optim.config import OptimConfig
from rille.train import loop
from tests.train.small import small_config, small_run


def step(run):
    work = loop.forward_backward(run, loop.next_batches(run))
    gradients = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    return work, gradients


@pytest.mark.parametrize("residual", ["attn_res", "attn_res_full", "standard"])
@pytest.mark.parametrize("mtp", [0, 1])
def test_same_bits_and_counts(tmp_path, residual, mtp):
    model = small_config(tmp_path).model.replace(residual=residual, mtp_layers=mtp)
    settings = {"model": model, "mtp_weight": 0.3 * mtp}
    optim = OptimConfig(lr=3e-3, qk_clip=100.0)
    kept, again = (small_run(tmp_path, recompute=on, optim=optim, **settings) for on in (False, True))
    (a, mine), (b, theirs) = step(kept), step(again)
    assert torch.equal(a.loss, b.loss) and mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for one, other in ((a.counts.load, b.counts.load), (a.counts.histogram, b.counts.histogram)):
        assert one.keys() == other.keys() and all(torch.equal(one[layer], other[layer]) for layer in one)
    assert all(int(b.counts.load[layer].sum()) == 128 * 2 for layer in (1, 2))
    assert all(torch.equal(a.counts.largest[layer], b.counts.largest[layer]) for layer in a.counts.largest)


def test_less_is_kept(tmp_path):
    """Bytes that the graph holds between forward and backward."""
    held = []
    for on in (False, True):
        run = small_run(tmp_path, recompute=on)
        kept: dict[int, int] = {}

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loop.all_losses(run.model, next(run.loader), loop.new_work(run).counts)
        held.append(sum(kept.values()))
    assert held[1] < 0.5 * held[0], held


def test_without_gradients_it_runs_as_it_did(tmp_path):
    kept, again = (small_run(tmp_path, recompute=on) for on in (False, True))
    assert loop.mean_losses(kept.model, kept.held_out()) == loop.mean_losses(again.model, again.held_out())
